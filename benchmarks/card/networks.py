"""What rows of the page train: ResNet-50, GPT-2 and a plain GPT, in mixed precision."""

import functools
import importlib
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.blocks import Block
from benchmarks.card.setting import NotRun, random_bytes
from scatterpar.devices.virtual_devices import physical

_GIB = 2**30


def library(name):
    """The module with this name; ``NotRun`` if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NotRun(f"{error.name or name} is not installed") from error


def criterion(logits, targets):
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


class Network:
    """A network and its batches; a sub-step has ``rows``, and the network ``sizes``.

    Args:
        name: "ResNet-50" of torchvision, "GPT-2" of transformers, or "GPT", the same
            sizes in plain torch.
        exact: few rows and plain attention, because fused kernels add up gradients in
            any order.
    """

    def __init__(self, name, setting, *, exact=False, dropout=0.0):
        self._setting = setting
        self._kind = _KINDS[name]
        self._dropout = dropout
        self._is_exact = exact
        self.sizes = self._kind.small_sizes if setting.small else self._kind.sizes
        self.rows = self._rows_per_substep()

    def _rows_per_substep(self):
        if self._setting.small:
            return 2
        memory = torch.cuda.get_device_properties(self._setting.devices[0]).total_memory
        if self._is_exact:
            images = 16
        elif memory < 20 * _GIB:
            images = 32
        elif memory < 40 * _GIB:
            images = 64
        else:
            images = 128
        return max(1, images // self._kind.rows_divided_by)

    def build(self):
        """The network without autocast, on the host."""
        return self._kind.build(self.sizes, self._dropout, self._is_exact)

    def module(self, device):
        """The module on ``device``, with the same weights every time."""
        torch.manual_seed(0)
        net = self.build()
        if self._kind.is_images:
            net = net.to(memory_format=torch.channels_last)
        return _Mixed(net, self._setting).to(physical(device))

    def batch(self, rows, number=0):
        """Inputs and targets on the host, other ones for each ``number``."""
        sizes = self.sizes
        data = random_bytes(self._setting.folder).roll(1001 * number)
        if self._kind.is_images:
            images = _repeated(data, rows, 3, sizes.length, sizes.length)
            labels = data[:rows].long() % sizes.classes
            return images, labels
        tokens = _repeated(data.view(torch.int64), rows, sizes.length + 1)
        tokens = tokens % sizes.classes
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Sizes(NamedTuple):
    """The sizes of a network."""

    classes: int  # or words of the vocabulary
    length: int  # the side of an image, or the words of a text
    width: int
    layers: int
    heads: int


class _Kind(NamedTuple):
    build: object  # called with sizes, dropout, exact
    sizes: Sizes
    small_sizes: Sizes
    rows_divided_by: int  # the rows of images that fit, for one text
    is_images: bool


def _resnet(sizes, dropout, exact):
    resnet = library("torchvision.models.resnet")
    layers = [3, 4, 6, 3] if sizes.layers == 50 else [1, 1, 1, 1]
    return resnet.ResNet(resnet.Bottleneck, layers, num_classes=sizes.classes)


def _gpt2(sizes, dropout, exact):
    transformers = library("transformers")
    config = transformers.GPT2Config(
        vocab_size=sizes.classes,
        n_positions=sizes.length,
        n_embd=sizes.width,
        n_layer=sizes.layers,
        n_head=sizes.heads,
        attn_pdrop=dropout,
        embd_pdrop=dropout,
        resid_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager" if exact else "sdpa",
    )
    return _WithMask(transformers.GPT2LMHeadModel(config), sizes.length)


class _WithMask(nn.Module):
    """GPT-2 with its mask.

    Without one transformers reads numbers on the GPU, and takes other kernels in a graph.
    """

    def __init__(self, net, length):
        super().__init__()
        self.net = net
        mask = torch.full((1, 1, length, length), -math.inf)
        self.register_buffer("mask", mask.triu(1))

    def forward(self, words):
        outputs = self.net(words, attention_mask=self.mask, use_cache=False)
        return outputs.logits


class GPT(nn.Module):
    """The sizes of GPT-2 small in plain torch: 124 million parameters."""

    def __init__(self, sizes, dropout, exact):
        super().__init__()
        self.words = nn.Embedding(sizes.classes, sizes.width)
        self.places = nn.Embedding(sizes.length, sizes.width)
        blocks = [Block(sizes.width, sizes.heads) for _ in range(sizes.layers)]
        self.blocks = nn.Sequential(*blocks, nn.LayerNorm(sizes.width))
        self.head = nn.Linear(sizes.width, sizes.classes, bias=False)
        self.head.weight = self.words.weight
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, words):
        places = torch.arange(words.shape[1], device=words.device)
        hidden = self.words(words) + self.places(places)
        return self.head(self.blocks(hidden))


_GPT = Sizes(classes=50257, length=1024, width=768, layers=12, heads=12)
_SMALL_GPT = Sizes(classes=128, length=16, width=32, layers=2, heads=2)
_RESNET = Sizes(classes=1000, length=224, width=64, layers=50, heads=0)
_SMALL_RESNET = Sizes(classes=10, length=32, width=64, layers=14, heads=0)
_KINDS = {
    "ResNet-50": _Kind(_resnet, _RESNET, _SMALL_RESNET, 1, True),
    "GPT-2": _Kind(_gpt2, _GPT, _SMALL_GPT, 16, False),
    "GPT": _Kind(GPT, _GPT, _SMALL_GPT, 16, False),
}


def _repeated(data, *shape):
    """As many of the numbers as the shape has, over and over."""
    count = math.prod(shape)
    times = math.ceil(count / len(data))
    return data.repeat(times)[:count].view(shape)


class _Mixed(nn.Module):
    """A network under autocast. Images arrive as bytes."""

    def __init__(self, net, setting):
        super().__init__()
        # An old GPU would emulate bfloat16.
        is_old = setting.is_real and not torch.cuda.is_bf16_supported(False)
        dtype = torch.float16 if is_old else torch.bfloat16
        kind = setting.devices[0].type
        self._autocast = functools.partial(torch.autocast, kind, dtype)
        self.net = net

    def forward(self, inputs):
        with self._autocast():
            if inputs.dtype == torch.uint8:
                images = inputs.float() / 255
                inputs = images.contiguous(memory_format=torch.channels_last)
            return self.net(inputs).float()
