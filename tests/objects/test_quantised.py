"""Frozen weights that hold other tensors, as bitsandbytes' do, or consist of them, as
torchao's.
"""

from __future__ import annotations

import copy
from importlib.util import find_spec

import pytest
import torch
from faults.processes import run
from harness.agree import Case, agree
from harness.models import Of
from harness.oracle import assert_close, assert_step, build, randint, randn, seeded
from harness.pairwise import few_of
from harness.rank_processes import run_on_ranks
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from scatterpar import ScatterOnceParallel

LAYERS = ["nf4", "nf4 twice", "fp4", "8-bit", "Int8WeightOnly", "Float8WeightOnly"]
BATCH = randn(22, 64, dtype=torch.float32), randn(22, 64, dtype=torch.float32, seed=2)
MSE = nn.MSELoss()


def quantised(name, linear):
    """A layer with the weights of ``linear``, quantised and frozen."""
    linear.requires_grad_(False)
    if name.endswith("WeightOnly"):
        quantization = pytest.importorskip("torchao.quantization")
        quantization.quantize_(linear, getattr(quantization, f"{name}Config")())
        return linear
    layers = pytest.importorskip("bitsandbytes").nn
    size = linear.in_features, linear.out_features
    if name == "8-bit":
        layer = layers.Linear8bitLt(*size, has_fp16_weights=False)
        layer.weight = layers.Int8Params(linear.weight.data, requires_grad=False)
    else:
        kind, _, twice = name.partition(" ")
        layer = layers.Linear4bit(*size, compute_dtype=torch.float32)
        layer.weight = layers.Params4bit(
            linear.weight.data,
            quant_type=kind,
            compress_statistics=bool(twice),
            module=layer,
        )
    layer.bias = linear.bias
    return layer.to("cpu")


def adapter(name, inputs, outputs):
    down, up = nn.Linear(inputs, 4, bias=False), nn.Linear(4, outputs, bias=False)
    base = quantised(name, nn.Linear(inputs, outputs))
    return Of(lambda m, x: m.base(x) + m.up(m.down(x)), base=base, down=down, up=up)


def adapted(name):
    """Two quantised layers with an adapter each."""
    with seeded():
        return nn.Sequential(adapter(name, 64, 128), nn.GELU(), adapter(name, 128, 64))


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def size(tensors):
    return sum(tensor.nbytes for tensor in tensors)


def on_cards(model, device):
    """``model`` on an accelerator that torch does not know, to which 4-bit weights have
    no copy.
    """
    layers = pytest.importorskip("bitsandbytes").nn
    for part in model.modules():
        weight = getattr(part, "weight", None)
        if isinstance(weight, layers.Params4bit):
            held = weight.quant_state.as_dict().items()
            state = {
                name: v.to(device) if torch.is_tensor(v) else v for name, v in held
            }
            part.weight = layers.Params4bit.from_prequantized(
                weight.data, state, device=torch.device(device), module=part
            )
    return model.to(device)


def quantised_qwen(folder, bits):
    """A tiny Qwen2 that ``from_pretrained`` quantises, with adapters of peft,
    checkpointed.
    """
    pytest.importorskip("bitsandbytes")
    peft, transformers = (
        pytest.importorskip("peft"),
        pytest.importorskip("transformers"),
    )
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50}
    how = {"load_in_8bit": True}
    if bits == 4:
        how = {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}
        how |= {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
    with seeded():
        config = transformers.Qwen2Config(**sizes, **heads)
        transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            quantization_config=transformers.BitsAndBytesConfig(**how),
            device_map="cpu",
        )
        checkpointing = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
        model = peft.prepare_model_for_kbit_training(model, **checkpointing)
        lora = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", r=4)
        model = peft.get_peft_model(model, lora)
        # zero at first: no gradient for the other
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.05)
    return model.train()


SMALL = randn(12, 8), randn(12, 4)
VIRTUAL = ["cpu:0", "cpu:1"]


class State:
    """What the numbers of a packed weight mean; ``inner`` is another one, for double
    scales.
    """

    def __init__(self, scale, inner=None):
        self.scale, self.inner, self.blocksize = scale, inner, 64


class Packed(nn.Parameter):
    """Bytes with a ``quant_state``, and a reference to their layer."""

    def __deepcopy__(self, memo):
        copied = memo[id(self)] = torch.Tensor._make_subclass(Packed, self.data.clone())
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied


class PackedLinear(nn.Module):
    def __init__(self):
        super().__init__()
        packed = torch.Tensor._make_subclass(
            Packed, torch.arange(32).view(4, 8).to(torch.uint8)
        )
        packed.quant_state = State(randn(4, 1), State(randn(1)))
        self.weight, self.quant_state, packed.layer = packed, packed.quant_state, self
        self.adapter = nn.Linear(8, 4, dtype=torch.float64)

    def forward(self, x):
        state = self.weight.quant_state
        assert state is self.quant_state
        assert self.weight.layer is self
        scale = state.scale * state.inner.scale
        return x @ (self.weight.to(x.dtype) * scale).T + self.adapter(x)


class Composite(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(
            TwoTensor(randn(4, 8), randn(4, 8)), requires_grad=False
        )
        self.adapter = nn.Linear(8, 4, dtype=torch.float64)

    def forward(self, x):
        return x @ (self.weight.a * self.weight.b).T + self.adapter(x)


def tensors_of(module):
    if isinstance(module, Composite):
        return [module.weight.a, module.weight.b]
    return [module.weight, module.quant_state.scale, module.quant_state.inner.scale]


CASES = pytest.mark.parametrize("kind", [PackedLinear, Composite])


@pytest.mark.parametrize(
    "runner",
    few_of(["check", "whole batch", "compiled", "pair", "inference"], ["pair"]),
)
@CASES
def test_all_ways_to_step_are_exact(kind, runner):
    agree(Case(kind, SMALL, lambda _: MSE), runner, "mixed")


@CASES
def test_adapters_exact_frozen_sent_once(kind, devices):
    model = build(kind)
    with ScatterOnceParallel(model, 2, devices(3)) as engine:
        assert_step(engine, *SMALL, MSE)
        engine.forward_backward(*SMALL, MSE)
        assert engine.last_step.bytes["replicate"] == 0
        with torch.no_grad():
            tensors_of(model)[-1].add_(1)
        assert_step(engine, *SMALL, MSE)
        others = len(set(engine.device_ids)) - 1
        assert (
            engine.last_step.bytes["replicate"] == others * tensors_of(model)[-1].nbytes
        )


def packed_of_floats():
    model = PackedLinear()
    held = vars(model.weight)
    model.weight = torch.Tensor._make_subclass(Packed, randn(4, 8))
    vars(model.weight).update(held)
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Composite, r"parameter 'weight', a TwoTensor, .* only if they are frozen"),
        (packed_of_floats, r"'weight', a Packed, .* as bitsandbytes does it"),
    ],
)
def test_trained_later_refused_until_frozen(make, words):
    model = build(make)
    with ScatterOnceParallel(model, 2, VIRTUAL) as engine:
        for _ in range(2):
            model.weight.requires_grad_(False)
            assert_step(engine, *SMALL, MSE)
            model.weight.requires_grad_(True)
            with pytest.raises(TypeError, match=words):
                engine.forward_backward(*SMALL, MSE)


def test_buffer_of_tensors_refused():
    model = build(lambda: nn.Linear(8, 4))
    model.register_buffer("table", TwoTensor(randn(4, 8), randn(4, 8)))
    with pytest.raises(
        TypeError,
        match=r"'table', a TwoTensor, .* such parameters only if they",
    ):
        ScatterOnceParallel(model, 2, VIRTUAL)


def words_for_a_dtensor(group):
    """The error for a frozen parameter that is a part of a tensor of
    several processes.
    """
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (group.size(),))
    whole = torch.distributed.tensor.distribute_tensor(randn(4, 8), mesh)
    model = nn.Linear(8, 4)
    model.weight = nn.Parameter(whole, requires_grad=False)
    with pytest.raises(TypeError) as caught:
        ScatterOnceParallel(model, 2, VIRTUAL)
    return str(caught.value)


def test_frozen_dtensor_refused():
    # all: each numbers the groups that it makes
    for words in run_on_ranks(3, words_for_a_dtensor):
        assert "'weight', a DTensor" in words
        assert ".full_tensor()" in words


def test_new_quant_state_is_followed():
    model = build(PackedLinear)
    with ScatterOnceParallel(model, 2, VIRTUAL) as engine:
        assert_step(engine, *SMALL, MSE)
        model.weight.quant_state = model.quant_state = State(
            randn(4, 1), State(randn(1))
        )
        assert_step(engine, *SMALL, MSE)
        model.quant_state.inner.scale = randn(1, seed=9)
        assert_step(engine, *SMALL, MSE)


@pytest.mark.loops
@pytest.mark.parametrize("layer", LAYERS)
def test_library_layers_send_adapters_only(layer):
    model = adapted(layer)
    optimizer = torch.optim.SGD(trained(model), lr=0.1)
    with ScatterOnceParallel(model, 2, ["cpu:0", "cpu:1", "cpu:0", "cpu:2"]) as engine:
        for step in range(3):
            assert_step(engine, *BATCH, MSE, relative=1e-5)
            sent, adapters = (
                engine.last_step.bytes["replicate"],
                size(trained(model)) * 2,
            )
            assert sent == adapters if step else sent >= adapters
            optimizer.step()


def squares(output, targets):
    return (output - targets).square().mean()


@pytest.mark.loops
@pytest.mark.skipif(torch.accelerator.device_count() < 3, reason="needs 3 accelerators")
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("layer", ["nf4", "nf4 twice"])
def test_four_bit_weights_on_gpus(layer, number):
    card = torch.accelerator.current_accelerator().type
    plain, model = adapted(layer), on_cards(adapted(layer), f"{card}:0")
    squares(plain(BATCH[0]), BATCH[1]).backward()
    with ScatterOnceParallel(
        model, 2, [f"{card}:{i}" for i in range(number)]
    ) as engine:
        engine.forward_backward(*BATCH, squares)
        for found, expected in zip(trained(model), trained(plain), strict=True):
            assert_close(found.grad.cpu(), expected.grad, "gradient", 1e-5)
        torch.optim.SGD(trained(model), lr=0.1).step()
        model.zero_grad()
        engine.forward_backward(*BATCH, squares)
        assert engine.last_step.bytes["replicate"] == size(trained(model)) * (
            number - 1
        )


@pytest.mark.loops
@pytest.mark.skipif(
    find_spec("bitsandbytes") is None,  # before the accelerator is compiled for it
    reason="could not import 'bitsandbytes'",
)
def test_four_bit_weights_on_simulated_gpus(simulated_accelerator):
    """Operators there refuse tensors of two devices, which virtual devices on the CPU
    do not.
    """
    if not simulated_accelerator:
        pytest.skip("there is no g++ to build it")
    # Else bitsandbytes compiles what it runs on accelerators that it does not know:
    # minutes.
    variables = {
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        **simulated_accelerator,
    }
    chosen = (
        "-p",
        "simulated",
        "-p",
        "no:cacheprovider",
        "-k",
        "test_four_bit_weights_on_gpus",
    )
    outcome = run("-m", "pytest", *chosen, __file__, **variables)
    assert outcome.code == 0, outcome.out
    assert "4 passed" in outcome.out


@pytest.mark.loops
@pytest.mark.parametrize("bits", [4, 8])
def test_qlora_of_pretrained_model_is_exact(bits, tmp_path, devices):
    """Checkpointed activations, computed in bfloat16; Qwen's frozen biases are cast in
    forward.
    """
    model, ids = quantised_qwen(tmp_path, bits), randint(50, 6, 9)
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    plain = copy.deepcopy(model)
    plain(**batch).loss.backward()
    with ScatterOnceParallel(model, 3, devices(2)) as engine:
        engine.forward_backward(batch)
        for found, expected in zip(trained(model), trained(plain), strict=True):
            assert_close(found.grad, expected.grad, "gradient", relative=2e-2)
        torch.optim.AdamW(trained(model)).step()
        engine.forward_backward(batch)
        others = len(set(engine.device_ids)) - 1
        assert engine.last_step.bytes["replicate"] == size(trained(model)) * others
