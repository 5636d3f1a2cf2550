"""Modules whose frozen weights are quantised by bitsandbytes or torchao, with trained adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness.oracle import seeded

LAYERS = ["nf4", "nf4 twice", "fp4", "8-bit", "Int8WeightOnly", "Float8WeightOnly"]


def _quantised(name: str, linear: nn.Linear) -> nn.Module:
    """A layer with the weights of ``linear``, quantised and frozen."""
    linear.requires_grad_(False)
    if name.endswith("WeightOnly"):
        quantization = pytest.importorskip("torchao.quantization")
        quantization.quantize_(linear, getattr(quantization, f"{name}Config")())
        return linear
    layers = pytest.importorskip("bitsandbytes").nn
    size = linear.in_features, linear.out_features
    layer: Any
    if name == "8-bit":
        layer = layers.Linear8bitLt(*size, has_fp16_weights=False)
        layer.weight = layers.Int8Params(linear.weight.data, requires_grad=False)
    else:
        kind, twice = name.split()[0], name.endswith("twice")
        layer = layers.Linear4bit(*size, compute_dtype=torch.float32)
        layer.weight = layers.Params4bit(
            linear.weight.data, quant_type=kind, compress_statistics=twice, module=layer
        )
    layer.bias = linear.bias
    return layer.to("cpu")


class _Adapter(nn.Module):
    def __init__(self, name: str, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = _quantised(name, nn.Linear(inputs, outputs))
        self.down = nn.Linear(inputs, 4, bias=False)
        self.up = nn.Linear(4, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.base(x) + self.up(self.down(x))


def Adapted(name: str) -> nn.Module:
    """Two quantised layers with an adapter each."""
    with seeded():
        return nn.Sequential(_Adapter(name, 64, 128), nn.GELU(), _Adapter(name, 128, 64))


def on_cards(model: nn.Module, device: str) -> nn.Module:
    """``model`` on an accelerator that torch does not know, to which 4-bit weights have no copy."""
    layers = pytest.importorskip("bitsandbytes").nn
    for part in model.modules():
        weight = getattr(part, "weight", None)
        if isinstance(weight, layers.Params4bit):
            held = weight.quant_state.as_dict().items()
            state = {name: v.to(device) if torch.is_tensor(v) else v for name, v in held}
            part.weight = layers.Params4bit.from_prequantized(
                weight.data, state, device=torch.device(device), module=part
            )
    return model.to(device)


def quantised_llama(folder: Path, bits: int) -> Any:
    """A tiny Qwen2 that ``from_pretrained`` quantises, with adapters of peft, checkpointed."""
    pytest.importorskip("bitsandbytes")
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50}
    with seeded():
        config = transformers.Qwen2Config(**sizes, **heads)
        transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
        how = {
            "load_in_4bit": True,
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_quant_type": "nf4",
        }
        how["bnb_4bit_compute_dtype"] = torch.bfloat16
        quantization = transformers.BitsAndBytesConfig(
            **(how if bits == 4 else {"load_in_8bit": True})
        )
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=quantization, device_map="cpu"
        )
        model = peft.prepare_model_for_kbit_training(
            model, gradient_checkpointing_kwargs={"use_reentrant": False}
        )
        lora = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", r=4)
        model = peft.get_peft_model(model, lora)
        for name, parameter in model.named_parameters():  # zero at first: no gradient for the other
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.05)
    return model.train()
