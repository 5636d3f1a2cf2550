"""Looks of fifteen networks in float32: their difference, of what is allowed.

A look compares the engine's gradient of a few rows with plain torch's. On GPUs each
network has a look without TF32 and one with it: TF32 rounds to 10 bits.
"""

import contextlib
import functools
import time
import warnings
from typing import NamedTuple
from unittest import mock

import torch
from torch import nn

from benchmarks.card import predictions
from benchmarks.card.networks import library
from benchmarks.card.page import FAILED, MEASURED, NOT_RUN
from benchmarks.card.setting import NotRun, free_memory
from scatterpar import ScatterOnceParallel
from scatterpar.devices.virtual_devices import physical
from scatterpar.numerics.comparison import Inconclusive
from scatterpar.verify import look as looks_of_engine

_ROWS = 24
_ACCUM = 2
_CLASSES = 10
_SIDE = 64  # of images
_WORDS = 100
_LENGTH = 16  # words of a row
NOT_CONCLUSIVE = "inconclusive"


def of_torchvision(setting, say):
    """Five networks for images."""
    names = ["resnet50", "mobilenet_v3_small", "efficientnet_b0"]
    names += ["densenet121", "convnext_tiny"]
    for name in names:
        build = functools.partial(_of_torchvision, name)
        _look_at(setting, say, name, build, _images)


def _of_torchvision(name):
    return getattr(library("torchvision.models"), name)(num_classes=_CLASSES)


def of_transformers(setting, say):
    """Five networks for words, which compute their loss themselves."""
    for name, (config_name, options) in _TRANSFORMERS.items():
        build = functools.partial(_of_transformers, name, config_name, options)
        _look_at(setting, say, name, build, _words_with_labels)


def _of_transformers(name, config_name, options):
    transformers = library("transformers")
    make_config = getattr(transformers, config_name)
    config = make_config(vocab_size=_WORDS, pad_token_id=0, **options)
    return getattr(transformers, name)(config)


_SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}
_GPT2_SIZES = {
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_T5_SIZES = {
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
# The names of a model's configuration, and its sizes.
_TRANSFORMERS = {
    "GPT2LMHeadModel": ("GPT2Config", _GPT2_SIZES),
    "BertForMaskedLM": ("BertConfig", _SIZES),
    "LlamaForCausalLM": ("LlamaConfig", _SIZES),
    "T5ForConditionalGeneration": ("T5Config", _T5_SIZES),
    "MistralForCausalLM": ("MistralConfig", {**_SIZES, "num_key_value_heads": 2}),
}


def of_torch_and_timm(setting, say):
    """Three of plain torch and two of timm."""
    _look_at(setting, say, "LSTM", _Recurrent, _words)
    _look_at(setting, say, "TransformerEncoder", _Encoder, _words)
    _look_at(setting, say, "a U-Net", _UNet, _images_to_images)
    for name in ("vit_tiny_patch16_224", "mixer_s32_224"):
        build = functools.partial(_of_timm, name)
        _look_at(setting, say, name, build, _images)


def _of_timm(name):
    timm = library("timm")
    return timm.create_model(name, num_classes=_CLASSES, img_size=_SIDE)


class _Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(_WORDS, 64)
        self.body = nn.LSTM(64, 64, 2, batch_first=True)
        self.head = nn.Linear(64, _CLASSES)

    def forward(self, words):
        hidden, _ = self.body(self.words(words))
        return self.head(hidden.mean(1))


class _Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(_WORDS, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(64, _CLASSES)

    def forward(self, words):
        hidden = self.body(self.words(words))
        return self.head(hidden.mean(1))


class _UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.GroupNorm(4, 32))
        self.inner = nn.Sequential(nn.Conv2d(32, 64, 3, 2, 1), nn.SiLU())
        self.up = nn.ConvTranspose2d(64, 32, 2, 2)
        self.out = nn.ConvTranspose2d(64, 3, 2, 2)

    def forward(self, images):
        outer = self.down(images)
        inner = self.up(self.inner(outer))
        return self.out(torch.cat([outer, inner], 1))


def _images(setting):
    side = _SIDE // 2 if setting.small else _SIDE
    labels = torch.arange(_ROWS) % _CLASSES
    return torch.randn(_ROWS, 3, side, side), labels, nn.CrossEntropyLoss()


def _images_to_images(setting):
    images, _, _ = _images(setting)
    return images, images.tanh(), nn.MSELoss()


def _words(setting):
    words = torch.randint(3, _WORDS, (_ROWS, _LENGTH))
    return words, torch.arange(_ROWS) % _CLASSES, nn.CrossEntropyLoss()


def _words_with_labels(setting):
    words = torch.randint(3, _WORDS, (_ROWS, _LENGTH))
    return {"input_ids": words, "labels": words}, None, None


def _look_at(setting, say, name, build, batch):
    """One network, a line for each kind of rounding."""
    modes = (False, True) if setting.is_real else (False,)
    for tf32 in modes:
        part = f"{name}, {'with' if tf32 else 'without'} TF32"
        try:
            say(*_look(setting, build, batch, tf32, part))
        except NotRun as reason:
            say(str(reason), part, NOT_RUN)
        except Exception as error:  # one network must not hide the others
            lines = str(error).strip().splitlines() or [""]
            say(f"{type(error).__name__}: {lines[0][:300]}", part, FAILED)
        free_memory()


def _look(setting, build, batch, tf32, part):
    """Take a step with a look. Returns result, part and verdict."""
    device = setting.devices[0]
    torch.manual_seed(0)
    module = build().to(physical(device))
    inputs, targets, criterion = batch(setting)
    with (
        _precision(device, "tf32" if tf32 else "ieee"),
        _looks() as looks,
        warnings.catch_warnings(record=True) as caught,
        ScatterOnceParallel(module, _ACCUM, [device, device]) as engine,
    ):
        warnings.simplefilter("always")
        start = time.perf_counter()
        engine.forward_backward(inputs, targets, criterion)
        seconds = time.perf_counter() - start
    look = looks[-1]
    if look.reason:
        return f"{look.reason}{_warned(caught)}", part, NOT_CONCLUSIVE
    ratio = look.difference / look.allowed
    result = f"{look.difference:.1e} of {look.allowed:.0e} that are allowed"
    result += f" ({ratio:.3f}), {seconds:.1f} s"
    return f"{result}{_warned(caught)}", part, verdict_on(ratio, setting, tf32)


def verdict_on(ratio, setting, tf32):
    """The verdict on a difference divided by what is allowed, of a right network."""
    # By whatever computes: both sides of a look do.
    if not ratio <= 1.0:
        return f"{FAILED}: {ratio:.2f} of what is allowed"
    # What was predicted holds for GPUs that compute, without TF32.
    is_predicted = setting.is_real and not tf32
    return predictions.LOOK.verdict(ratio) if is_predicted else MEASURED


def _warned(caught):
    """The first line of each warning, behind a result; empty without one."""
    if not caught:
        return ""
    lines = [str(warning.message).splitlines()[0] for warning in caught]
    return f"; told: {'; '.join(line[:150] for line in lines)}"


@contextlib.contextmanager
def _precision(device, name):
    """In the body, GPUs round float32 numbers inside of operators in this way."""
    if device.type != "cuda":
        yield
        return
    cudnn = torch.backends.cudnn
    places = torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn
    saved = [place.fp32_precision for place in places]
    for place in places:
        place.fp32_precision = name
    try:
        yield
    finally:
        for place, precision in zip(places, saved, strict=True):
            place.fp32_precision = precision


class _Outcome(NamedTuple):
    """The outcome of a look: a difference, or the reason why it is inconclusive."""

    difference: float = 0.0
    allowed: float = 0.0
    reason: str = ""


@contextlib.contextmanager
def _looks():
    """Yields a list of the outcomes of looks."""
    outcomes = []
    first_report = looks_of_engine.first_report

    def recording(*args):
        try:
            report = first_report(*args)
        except Inconclusive as reason:
            outcomes.append(_Outcome(reason=str(reason)))
            raise
        outcomes.append(_Outcome(report.difference, report.tolerance))
        return report

    with mock.patch.object(looks_of_engine, "first_report", recording):
        yield outcomes
