"""ResNet-50 and a GPT of twelve layers, in mixed precision."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scatterpar.checkup.card.setting import NotRun, Setting
from scatterpar.devices.runtime import physical

NAMES = ("ResNet-50", "GPT")
_GIB = 2**30


class Network(NamedTuple):
    """A network, its batches and its loss.

    Attributes:
        build: makes the module.
        batch: ``batch(rows, seed, tiny)`` makes rows on the host; tiny ones need no computation.
        rows: the rows of a sub-step.
        criterion: of the output and the targets.
        half: the dtype of mixed precision, or ``None``.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int, int, bool], tuple[Tensor, Tensor]]
    rows: int
    criterion: Callable[[Tensor, Tensor], Tensor]
    half: torch.dtype | None

    def module(self, device: torch.device) -> nn.Module:
        """The module on ``device``, with the same weights every time."""
        torch.manual_seed(0)
        return _Mixed(self.build(), device.type, self.half).to(physical(device))


class _Mixed(nn.Module):
    """A module under autocast."""

    def __init__(self, net: nn.Module, kind: str, half: torch.dtype | None) -> None:
        super().__init__()
        self.net, self._kind, self._half = net, kind, half

    def forward(self, inputs: Tensor) -> Tensor:
        """The logits, in float32."""
        if inputs.dtype == torch.uint8:  # images are copied as bytes
            inputs = inputs.float() / 255
        with torch.autocast(self._kind, self._half, enabled=self._half is not None):
            logits: Tensor = self.net(inputs)
        return logits.float()


class _GPT(nn.Module):
    """A language model of torch's own layers."""

    def __init__(self, width: int, layers: int, words: int, length: int, dropout: float) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, max(2, width // 64), 4 * width, dropout, "gelu", batch_first=True
        )
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of shape (rows, tokens, words)."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.words(tokens) + self.places.weight[:length]
        return F.linear(self.body(x, mask, is_causal=True), self.words.weight)


def network(name: str, setting: Setting, *, mixed: bool = True, dropout: float = 0.0) -> Network:
    """ResNet-50 or the GPT, in full size or tiny.

    Raises:
        NotRun: torchvision, which has ResNet-50, is not installed.
    """
    half, rows = None, 2
    if mixed:  # in float16 on GPUs that would emulate bfloat16
        is_old = setting.is_real and not torch.cuda.is_bf16_supported(including_emulation=False)
        half = torch.float16 if is_old else torch.bfloat16
    if not setting.small:
        total = torch.cuda.get_device_properties(setting.devices[0]).total_memory
        rows = 32 if total < 20 * _GIB else 64 if total < 40 * _GIB else 128
    if name == "GPT":
        sizes = (32, 2, 128, 16) if setting.small else (768, 12, 50304, 1024)
        text = partial(_text, sizes[2], sizes[3])
        return Network(partial(_GPT, *sizes, dropout), text, max(2, rows // 8), _by_token, half)
    try:
        models = importlib.import_module("torchvision.models")
    except ImportError as error:
        raise NotRun("torchvision is not installed: pip install torchvision") from error
    tiny = partial(models.ResNet, models.resnet.Bottleneck, [1] * 4, num_classes=10)
    build, side = (tiny, 32) if setting.small else (models.resnet50, 224)
    return Network(build, partial(_images, side), rows, F.cross_entropy, half)


def _images(side: int, rows: int, seed: int, tiny: bool) -> tuple[Tensor, Tensor]:
    generator, side = torch.Generator().manual_seed(seed), 32 if tiny else side
    images = torch.randint(256, (rows, 3, side, side), dtype=torch.uint8, generator=generator)
    return images, torch.randint(10, (rows,), generator=generator)


def _text(words: int, length: int, rows: int, seed: int, tiny: bool) -> tuple[Tensor, Tensor]:
    generator, length = torch.Generator().manual_seed(seed), 8 if tiny else length
    tokens = torch.randint(words, (rows, length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _by_token(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
