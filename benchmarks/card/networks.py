"""ResNet-50 and GPT-2 small, as one trains them: mixed precision, channels last."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.devices.runtime import physical

Batch = tuple[Tensor, Tensor | None]
_GIB = 2**30


@dataclass(frozen=True)
class Network:
    """What is trained.

    Attributes:
        title: its name, and whose it is.
        module: on the device; the same weights every time.
        data: that many rows, on the host, by a seed.
        tiny: likewise, so small that to launch them takes longer than to compute them.
        rows: of a sub-step.
        criterion: of the output and the targets; ``None`` where the module gives the loss.
    """

    title: str
    module: Callable[[torch.device], nn.Module]
    data: Callable[[int, int], Batch]
    tiny: Callable[[int, int], Batch]
    rows: int
    criterion: nn.Module | None

    def loss(self, output: Tensor, targets: Tensor | None) -> Tensor:
        """Of one sub-step; ``nn.DataParallel`` gathers one loss of each replica."""
        return output.mean() if self.criterion is None else self.criterion(output, targets)


class Mixed(nn.Module):
    """A module in mixed precision.

    Autocast is inside, as torch's documentation has it for ``nn.DataParallel``, whose threads do
    not know the caller's.
    """

    def __init__(self, net: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.net, self._type, self._dtype = net, device.type, dtype

    def forward(self, inputs: Tensor) -> Tensor:
        """The module's logits or loss, in float32."""
        if inputs.dtype == torch.uint8:  # pictures travel as bytes
            inputs = inputs / 255
        with torch.autocast(self._type, self._dtype):
            return self.net(inputs).float()


class Part(nn.Module):
    """One field of what a module of transformers returns."""

    def __init__(self, net: nn.Module, field: str, **fixed: Any) -> None:
        super().__init__()
        self.net, self._field, self._fixed = net, field, fixed

    def forward(self, inputs: Tensor) -> Tensor:
        """Labels, where the loss is wanted, are the inputs."""
        labels = {"labels": inputs} if self._field == "loss" else {}
        return getattr(self.net(inputs, **labels, **self._fixed), self._field)


def half(device: torch.device) -> torch.dtype:
    """bfloat16, or float16 on cards that would emulate it."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16
    return torch.bfloat16


def resnet50(device: torch.device, small: bool) -> Network:
    """Images of 224 x 224, or of 32 x 32 for a network of four blocks, eight channels wide."""
    build, source = _resnet(small)
    side, classes = (32, 10) if small else (224, 1000)

    def module(device: torch.device) -> nn.Module:
        torch.manual_seed(0)
        mixed = Mixed(build(), device, half(device))
        return mixed.to(physical(device), memory_format=torch.channels_last)

    def images(rows: int, side: int, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        size = rows, 3, side, side
        made = torch.randint(256, size, dtype=torch.uint8, generator=generator)
        labels = torch.randint(classes, (rows,), generator=generator)
        return made.contiguous(memory_format=torch.channels_last), labels

    return Network(
        f"ResNet-50{', four narrow blocks of it,' if small else ''} of {source}, channels last",
        module,
        lambda rows, seed: images(rows, side, seed),
        lambda rows, seed: images(rows, 32, seed),
        2 if small else _rows(device, 32),
        nn.CrossEntropyLoss(),
    )


def gpt2(device: torch.device, small: bool) -> Network:
    """Texts of 1,024 tokens, or of 16 for a network of two narrow layers."""
    transformers = _transformers("GPT-2")
    tiny = {"vocab_size": 128, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**tiny if small else {})

    def module(device: torch.device) -> nn.Module:
        torch.manual_seed(0)
        net = Part(transformers.GPT2LMHeadModel(config), "loss", use_cache=False)
        return Mixed(net, device, half(device)).to(physical(device))

    def text(rows: int, length: int, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(config.vocab_size, (rows, length), generator=generator), None

    return Network(
        f"GPT-2 small{', two narrow layers of it,' if small else ''} of transformers "
        f"{transformers.__version__}, {config.n_positions} tokens",
        module,
        lambda rows, seed: text(rows, config.n_positions, seed),
        lambda rows, seed: text(rows, 8, seed),
        2 if small else _rows(device, 2),
        None,
    )


NETWORKS = {"resnet50": resnet50, "gpt2": gpt2}


def _rows(device: torch.device, fewest: int) -> int:
    """So many a sub-step, and more of them on cards with more memory."""
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return fewest
    total = module.mem_get_info(device)[1] / _GIB
    return fewest * (1 if total < 20 else 2 if total < 40 else 4)


def _resnet(small: bool) -> tuple[Callable[[], nn.Module], str]:
    """torchvision's; without it that of transformers, which has the same operators."""
    try:
        models = importlib.import_module("torchvision.models")
    except ImportError:
        transformers = _transformers("ResNet-50 (nor is torchvision)")
        narrow = {"embedding_size": 8, "hidden_sizes": [8] * 4, "depths": [1] * 4}
        config = transformers.ResNetConfig(
            num_labels=10 if small else 1000, **narrow if small else {}
        )

        def build() -> nn.Module:
            net = transformers.ResNetForImageClassification(config)
            return Part(net, "logits")

        return build, f"transformers {transformers.__version__}"
    if small:
        block = models.resnet.Bottleneck
        return lambda: models.ResNet(block, [1] * 4, num_classes=10), _torchvision()
    return models.resnet50, _torchvision()


def _torchvision() -> str:
    return f"torchvision {version('torchvision')}"


def _transformers(what: str) -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise SystemExit(
            f"transformers is not installed, and {what} is built with it: pip install transformers"
        ) from error
