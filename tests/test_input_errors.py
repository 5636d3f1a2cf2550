"""Errors about arguments and batches: the numbers given, what was expected, the way out.

Most of them are rows of ``tests/bad_inputs.md``, which ``test_misuse.py`` tries word for word.
"""

from __future__ import annotations

import pytest
import torch
from helpers.models import CLASSES, FEATURES, Classifier, Returns, mlp
from helpers.oracle import assert_step, build, randint, randn
from torch import nn

from scatterpar import ScatterOnceParallel

ROWS = randn(6, FEATURES)
LABELS = randint(CLASSES, 6)
LOSS = nn.CrossEntropyLoss()


def test_too_few_dimensions(devices):
    with (
        ScatterOnceParallel(mlp(), 2, devices(2), dim=1) as engine,
        pytest.raises(
            ValueError, match=r"targets: a tensor of shape \(6,\) has no dimension 1 to split"
        ),
    ):
        engine.forward_backward(ROWS, LABELS, LOSS)


def test_a_criterion_that_returns_several_losses(devices):
    words = r"got dict of losses \(box, class\); return sum\(losses.values\(\)\)"
    with ScatterOnceParallel(mlp(), 1, devices(2)) as engine:
        with pytest.raises(TypeError, match=words):
            engine.forward_backward(ROWS, None, lambda o, t: {"box": o.sum(), "class": o.mean()})
        assert all(parameter.grad is None for parameter in engine.parameters())


RETURNED = {
    "several losses": (
        lambda found: {"box": found.abs().mean(), "class": (found**2).mean()},
        r"; pass criterion=lambda losses, _: sum\(losses\.v",
        lambda losses, _: sum(losses.values()),
    ),
    "no loss": (
        lambda found: {"logits": found},
        r"the module must give the loss.*got dict; pass a criterion, such",
        lambda output, _: output["logits"].mean(),
    ),
    "logits and a loss": (
        lambda found: (found, found.mean()),
        r"got tuple; pass a criterion, such as lambda output, _: output\[1\]",
        lambda output, _: output[1],
    ),
}


@pytest.mark.parametrize("case", RETURNED)
def test_a_module_that_returns(devices, case):
    """The error says what to pass, and with that it is exact."""
    returned, words, criterion = RETURNED[case]
    model = build(lambda: Returns(lambda logits, _: returned(logits)))
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        with pytest.raises(TypeError, match=words):
            engine.forward_backward(ROWS)
        assert_step(engine, ROWS, None, criterion)


def test_a_module_with_nothing_to_train(devices):
    model = mlp().requires_grad_(False)
    with ScatterOnceParallel(model, 1, devices(2)) as engine:
        words = r"has no parameter that requires grad: there is nothing to train; call .requires"
        with pytest.raises(ValueError, match=words):
            engine.forward_backward(ROWS, None, lambda output, _: output.sum())


def test_a_loss_that_depends_on_nothing(devices):
    """Torch's own error, in the caller's thread, with the place noted."""
    with (
        ScatterOnceParallel(mlp(), 1, devices(2)) as engine,
        pytest.raises(RuntimeError, match="does not require grad") as caught,
    ):
        engine.forward_backward(ROWS, LABELS, lambda o, t: torch.tensor(1.0))
    assert any("in replica" in note for note in caught.value.__notes__)


OPTIONS = [
    ({"micro_batch_size": 2.0}, TypeError, "micro_batch_size must be an int, got 2.0"),
    ({"dim": 0.0}, TypeError, "dim must be an int, got 0.0"),
    ({"device_ids": ["nonsense"]}, ValueError, "device_ids: 'nonsense' is not a device"),
    ({"device_ids": [True]}, TypeError, "expected an int, a string or a torch.device, got True"),
    ({"device_ids": ["meta"]}, ValueError, "device_ids: meta is not here"),
    ({"device_ids": ["cuda:99"]}, ValueError, "device_ids: cuda:99 is not here"),
]


@pytest.mark.parametrize(("options", "error", "words"), OPTIONS)
def test_options(options, error, words):
    with pytest.raises(error, match=words):
        ScatterOnceParallel(mlp(), **options)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_ordinals_without_an_accelerator_say_how_to_ask_for_the_cpu():
    with pytest.raises(ValueError, match=r'none is visible here.*\["cpu"\] \* 2'):
        ScatterOnceParallel(mlp(), 1, [0, 1])


def test_a_buffer_elsewhere_is_named_too(devices):
    model = build(lambda: nn.Sequential(nn.BatchNorm1d(FEATURES)))
    model[0].running_var = model[0].running_var.to("meta")
    with pytest.raises(
        ValueError, match=r"its buffer '0.running_var' is on meta; call \.to\('cpu'\)"
    ):
        ScatterOnceParallel(model, 1, devices(2))


def test_a_list_is_one_argument_and_a_tuple_several(devices):
    class Pair(Classifier):
        def forward(self, first, second=None):
            first, second = first if second is None else (first, second)
            return self.linear(first * second)

    with ScatterOnceParallel(build(Pair), 2, devices(3)) as engine:
        by_tuple = engine.forward_backward((ROWS, ROWS), LABELS, LOSS)
        by_list = engine.forward_backward([ROWS, ROWS], LABELS, LOSS)
        by_dict = engine.forward_backward({"first": ROWS, "second": ROWS}, LABELS, LOSS)
    assert by_tuple == by_list == by_dict
