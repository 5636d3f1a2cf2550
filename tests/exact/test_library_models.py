"""Models that people have, two steps each: parameters and gradients beside plain torch,
float64.

A loss is a mean over rows of all floating-point tensors of a model, so that no output
goes unused.
"""

import pytest
import torch
from harness.oracle import assert_close, assert_parameters, build
from harness.tiny_transformers import inputs_of, tiny, tiny_config
from torch import Tensor

from scatterpar import ScatterOnceParallel
from scatterpar.batch import nested


def criterion(output, _):
    """A mean over rows: every element of every tensor counts, and each
    in its own way.
    """
    found = [
        t for t in nested.atoms(output.to_tuple()) if isinstance(t, Tensor) and t.ndim
    ]
    found = [t for t in found if t.is_floating_point()]
    weights = [
        torch.linspace(0.5, 1.5, t[0].numel(), dtype=t.dtype).view_as(t[0])
        for t in found
    ]
    return sum(((t + 0.1) ** 2 * w).mean() for t, w in zip(found, weights, strict=True))


def words(text):
    return text.split()


# What of the library's architectures takes text or images alone and is of a size to be
# built. Left out: ViTMAE, which hides other patches in every pass.
IN_FLOAT64 = words("""
    Afmoe Albert Apertus Arcee AriaText AXK2 Bamba Bart Beam Beit Bert BigBird BigBirdPegasus
    BioGpt BitNet Blenderbot BlenderbotSmall Bloom Camembert ChineseCLIPVision CLIPText
    CLIPVision ConvBert CTRL Cwm Data2VecText Data2VecVision Deberta DebertaV2 DeepseekV2
    DeepseekV3 DeepseekV32 DeiT DiffLlama Dinov2 Dinov2WithRegisters DistilBert Doge
    Dots3NoteText DPT Electra Ernie Ernie4_5 Ernie4_5_Moe Esm Esmc EuroBert Exaone4 ExaoneMoe
    Falcon FalconMamba Flaubert FlexOlmo FNet Funnel Glm Glm4 Glm4Moe Glm4MoeLite GlmMoeDsa GPT2
    GPTBigCode GPTJ GPTNeoX GPTNeoXJapanese GptOss Granite GraniteDoclingText GraniteMoe
    GraniteMoeHybrid GraniteMoeShared GraniteMoeSWA Gte HrmText HunYuanDenseV1 HunYuanMoEV1
    HyperCLOVAX HYV3 IBert IJepa ImageGPT InternVLVision Jais2 Jamba JetMoe JinaEmbeddingsV3
    LayoutLM Lfm2 Lfm3 Llama Llama4Text LongT5 M2M100 Mamba Mamba2 Marian MBart MegatronBert
    Mellum MiniCPM3 MiniMax MiniMaxM2 Ministral Ministral3 Mistral Mistral4 MistralLarge4Text
    Mixtral MobileBert ModernBert ModernBertDecoder Molmo2Text MPNet Mpt MT5 Mvp NanoChat
    Nemotron NllbMoe NomicBert Nystromformer Olmo Olmo2 Olmo3 Olmoe OlmoHybrid OpenAIGPT OPT
    Pegasus PegasusX Persimmon Phi Phi3 Phimoe Pixio PLBart ProphetNet Qwen2 Qwen2Moe Qwen3
    Qwen3Moe Qwen3VLMoeText Qwen3VLText RemBert Roberta RobertaPreLayerNorm RoFormer Rwkv
    SeedOss SiglipVision SmolLM3 SolarOpen Splinter SqueezeBert StableLm Starcoder2
    SwitchTransformers T5 Tapas Tipsv2Text Tipsv2Vision Ultrabert UMT5 VisualBert ViT VitDet
    ViTMSN XLM XLMRoberta XLMRobertaXL XLNet xLSTM Yoso Youtu
""")
# Part of these is computed in float32, whatever the model's dtype: a normalisation, a
# router.
IN_FLOAT32 = words("""
    Aimv2Vision AXK1 BailingHybrid Cohere Cohere2 Cohere2Moe DeepseekV4 EmbeddingGemma2Text
    Flint Gemma Gemma2 Gemma3Text Gemma4UnifiedText GraniteSWA Helium HYV4 Kolibri1 Laguna
    MiniMaxM3VLText MLCDVision MuseGlimmerText NemotronH OpenAIPrivacyFilter Qwen3_5MoeText
    Qwen3_5Text Qwen3Next Qwen4ExpText RecurrentGemma VaultGemma
""")
QUICK = ["Llama", "T5"]
OTHERS = sorted({*IN_FLOAT64, *IN_FLOAT32} - {*QUICK})


@pytest.mark.draws  # some do, even for dropout of nothing
@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_two_steps_of_library_models(name):
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
                {
                    key: p.grad.to_dense()
                    for key, p in m.named_parameters()
                    if p.grad is not None
                }
                for m in both
            )
            assert ours.keys() == theirs.keys()
            scale = max(grad.abs().max() for grad in theirs.values())
            for key, grad in ours.items():
                assert (grad - theirs[key]).abs().max() <= relative * scale, (
                    f"{key}.grad"
                )
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_parameters(model, plain, relative)
