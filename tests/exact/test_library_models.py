"""Models that people have, two steps each: parameters and gradients beside plain torch, float64.

A loss is a mean over rows of all floating-point tensors of a model, so that no output goes unused.
"""

import pytest
import torch
from harness.oracle import assert_close, assert_parameters, build
from harness.tiny_transformers import inputs_of, tiny, tiny_config
from torch import Tensor

from scatterpar import ScatterOnceParallel
from scatterpar.batch import nested


def criterion(output, _):
    """A mean over rows: every element of every tensor counts, and each in its own way."""
    found = [t for t in nested.leaves(output.to_tuple()) if isinstance(t, Tensor) and t.ndim]
    found = [t for t in found if t.is_floating_point()]
    weights = [torch.linspace(0.5, 1.5, t[0].numel(), dtype=t.dtype).view_as(t[0]) for t in found]
    return sum(((t + 0.1) ** 2 * w).mean() for t, w in zip(found, weights, strict=True))


def words(text):
    return text.split()


# Some of the library's architectures of each kind, for text or images alone.
IN_FLOAT64 = words("""
    Albert Bamba Bart Beit Bert BigBird BioGpt BitNet Bloom CLIPText CLIPVision ConvBert CTRL
    Data2VecVision Deberta DebertaV2 DeepseekV3 DeiT DiffLlama Dinov2 DistilBert Doge DPT Electra
    Falcon FalconMamba FNet Funnel Glm4Moe GPT2 GPTJ GPTNeoX GptOss GraniteMoeHybrid IBert ImageGPT
    Jamba JetMoe LayoutLM Llama Llama4Text LongT5 Mamba Mamba2 Marian MiniMax Mistral Mixtral
    MobileBert ModernBert MPNet Mpt NllbMoe Nystromformer Olmo2 Olmoe OPT Pegasus Persimmon Phi3
    ProphetNet Qwen2Moe Qwen3 RemBert Roberta RoFormer Rwkv SiglipVision SqueezeBert StableLm
    SwitchTransformers T5 Tapas UMT5 ViT VitDet XLM XLNet xLSTM Yoso
""")
# Part of these is computed in float32, whatever the model's dtype: a normalisation, a router.
IN_FLOAT32 = words("Cohere2 DeepseekV4 Gemma2 Gemma3Text Helium NemotronH Qwen3Next RecurrentGemma")
QUICK = ["Llama", "T5", "Mixtral", "Mamba"]
OTHERS = sorted({*IN_FLOAT64, *IN_FLOAT32} - {*QUICK})


@pytest.mark.draws  # some do, even for dropout of nothing
@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_two_steps_of_a_model_of_transformers(name):
    """On two memories, where more can go wrong than in one."""
    tiny_config(name)  # or skip
    relative = 1e-5 if name in IN_FLOAT32 else 1e-9
    inputs = inputs_of(tiny(name, "meta"))
    model, plain = both = [build(lambda: tiny(name)) for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), 0.05, momentum=0.9) for m in both]
    with ScatterOnceParallel(model, 2, ["cpu:0", "cpu:1"]) as engine:
        for _ in range(2):
            loss = engine.forward_backward(inputs, None, criterion)
            expected = criterion(plain(**inputs), None)
            expected.backward()
            assert_close(loss, expected.detach(), "loss", relative)
            ours, theirs = (
                {key: p.grad.to_dense() for key, p in m.named_parameters() if p.grad is not None}
                for m in both
            )
            assert ours.keys() == theirs.keys()
            scale = max(grad.abs().max() for grad in theirs.values())
            for key, grad in ours.items():
                assert (grad - theirs[key]).abs().max() <= relative * scale, f"{key}.grad"
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_parameters(model, plain, relative)
