"""Where rows run, and what they train: ResNet-50 and GPT-2, in mixed precision."""

import functools
import gc
import math
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from scatterpar.devices.device_ids import physical

NAMES = ("ResNet-50", "GPT-2")


class Setting(NamedTuple):
    """Where rows run, and with what sizes."""

    devices: tuple[torch.device, ...]
    small: bool
    is_real: bool  # GPUs that compute
    under: str  # a module whose `install` prepares a process for null GPUs
    folder: Path  # of the data


def draw(folder):
    """Write the random bytes of which all batches consist."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(256, (2**25,), dtype=torch.uint8, generator=generator)
    torch.save(data, folder / "data.pt")


_data = functools.cache(lambda folder: torch.load(folder / "data.pt"))


def free_memory():
    """Leave no memory of a GPU to this process."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def criterion(logits, targets):
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


class Network:
    """ResNet-50 of torchvision or GPT-2 of transformers; a sub-step has ``rows``."""

    def __init__(self, name, setting, *, exact=False, dropout=0.0):
        # Exact are few rows and plain attention: fused kernels add up gradients in any
        # order.
        self._setting, self.rows, self._length = setting, 2, 0
        if not setting.small:
            memory = torch.cuda.get_device_properties(setting.devices[0]).total_memory
            most = 32 if memory < 20 * 2**30 else 64 if memory < 40 * 2**30 else 128
            self.rows = 16 if exact else most
        if name == "GPT-2":
            library = pytest.importorskip("transformers", exc_type=ImportError)
            names = "vocab_size", "n_positions", "n_embd", "n_layer", "n_head"
            sizes = (128, 16, 32, 2, 2) if setting.small else (50257, 1024, 768, 12, 12)
            options = dict(zip(names, sizes, strict=True)) | {
                "bos_token_id": 0,
                "eos_token_id": 0,
            }
            options |= dict.fromkeys(
                ("attn_pdrop", "embd_pdrop", "resid_pdrop"), dropout
            )
            options["attn_implementation"] = "eager" if exact else "sdpa"
            self.build = lambda: library.GPT2LMHeadModel(library.GPT2Config(**options))
            (self._classes, self._length, *_), self.rows = (
                sizes,
                max(self.rows // 16, 1),
            )
        else:
            library = pytest.importorskip(
                "torchvision.models.resnet", exc_type=ImportError
            )
            layers, classes = ([1] * 4, 10) if setting.small else ([3, 4, 6, 3], 1000)
            build = functools.partial(library.ResNet, library.Bottleneck, layers)
            self.build, self._classes = lambda: build(num_classes=classes), classes

    def module(self, device):
        """The module on ``device``, with the same weights every time."""
        torch.manual_seed(0)
        return _Mixed(self.build(), self._setting, self._length).to(physical(device))

    def batch(self, rows, number=0):
        """Inputs and targets on the host, other ones for each ``number``."""
        data = _data(self._setting.folder).roll(1001 * number)
        side = 32 if self._setting.small else 224
        if not self._length:
            return _repeated(data, rows, 3, side, side), data[
                :rows
            ].long() % self._classes
        tokens = (
            _repeated(data.view(torch.int64), rows, self._length + 1) % self._classes
        )
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _repeated(data, *shape):
    count = math.prod(shape)
    return data.repeat(-(-count // len(data)))[:count].view(shape)


class _Mixed(nn.Module):
    """A network under autocast. Images arrive as bytes."""

    def __init__(self, net, setting, length):
        super().__init__()
        # it would emulate
        is_old = setting.is_real and not torch.cuda.is_bf16_supported(False)
        half = torch.float16 if is_old else torch.bfloat16
        self._autocast = functools.partial(
            torch.autocast, setting.devices[0].type, half
        )
        self.net = net
        # Without a mask transformers reads numbers on the GPU, and takes other kernels
        # in a graph.
        self.register_buffer(
            "mask", torch.full((1, 1, length, length), -math.inf).triu(1)
        )

    def forward(self, inputs):
        with self._autocast():
            if inputs.dtype == torch.uint8:
                return self.net(inputs.float() / 255).float()
            return self.net(
                inputs, attention_mask=self.mask, use_cache=False
            ).logits.float()
