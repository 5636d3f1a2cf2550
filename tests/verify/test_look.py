"""One look: what it sees in later batches, what rounding changes, and how cuDNN
computes it.
"""

from __future__ import annotations

from types import FunctionType

import pytest
import torch
from harness.looks import (
    INPUTS,
    ROWS,
    VALUES,
    assert_agreed,
    calls,
    in_a_def,
    loss_of,
    net,
    own_loss,
    step,
    train,
)
from harness.models import CLASSES, FEATURES, Returns, mlp, token_classifier
from harness.oracle import assert_step, build, randint, randn, seeded
from harness.pairwise import few_of
from harness.weighted import CLASS_WEIGHTS, classes, padded
from torch import nn
from torch.nn import functional as F

from scatterpar import ScatterOnceParallel, errors
from scatterpar.verify import look
from scatterpar.verify.runs import Runs

# --- the first batch hides it ---


def without_nan(output, targets):
    return (output[:, 0] - targets)[~targets.isnan()].square().mean()


class Tokens(nn.Module):
    """Pads with a word of the vocabulary."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))

    def forward(self, ids):
        return F.cross_entropy(self.body(ids[:, :-1]).mT, ids[:, 1:], ignore_index=5)


def words(pad, length=6):
    """Token rows; ``pad`` is a word of the vocabulary like any other, and they may have
    none.
    """
    ids = randint(11, 16, length, seed=3)
    ids[:, -1] = (ids[:, -2] + 1) % 11
    if pad is not None:
        return ids.masked_fill(
            torch.arange(length) >= (torch.arange(16) % 5 + 1)[:, None], pad
        )
    ids = ids.where(ids != 5, 6)
    ids[0, 0], ids[1, 0] = 0, 10
    return ids


POSITIVE = randn(ROWS).abs() + 0.5
WITH_NAN = POSITIVE.where(torch.arange(ROWS) >= 2, torch.nan)
LATE = {  # a case, a later batch, words
    "labels left out": (loss_of(in_a_def), (INPUTS, padded(ROWS)), "count="),
    "NaN": (loss_of(without_nan, POSITIVE, accum=8), (INPUTS, WITH_NAN), "count="),
    "padding with a word of the vocabulary": (
        own_loss(Tokens, words(None)),
        (words(5), None),
        r"count=lambda inputs, targets: inputs\[:, 1:\]\.ne\(5\)\.sum\(\)",
    ),
}


@pytest.mark.parametrize("name", LATE)
def test_later_batch_shows_mistake(devices, name):
    case, later, words = LATE[name]
    with ScatterOnceParallel(case.build(), case.accum, devices(2)) as engine:
        for _ in range(4):  # step 5 would not be looked at
            train(engine, case)
        with pytest.raises(ValueError, match=words):
            train(engine, case, later)


def hardest_sixteen(output, targets):
    losses = (output - targets).square().mean(1)
    return losses.topk(min(16, len(losses)))[0].mean()


def without_outliers(output, targets):
    losses = (output - targets).square().mean(1)
    return losses.sort()[0][:12].mean()


def decorrelated_if_many(output, targets):
    """A covariance needs many rows."""
    covariance = output.T.cov().square().mean() if len(output) > 12 else 0.0
    return F.mse_loss(output, targets) + covariance


@pytest.mark.parametrize(
    "loss", [hardest_sixteen, without_outliers, decorrelated_if_many]
)
def test_small_batch_compared_in_parts_of_the_step(devices, loss):
    """Few rows did not show what applies to micro-batches, or to the batch, alone."""
    refused = pytest.raises(ValueError, match="compares rows with each other")
    with ScatterOnceParallel(mlp(), 3, devices(2)) as engine, refused:
        step(engine, loss, VALUES)


def test_second_look_large_batch_takes_few():
    calls().seen = []
    model = build(net(note_size))
    engine = ScatterOnceParallel(model, 1, ["cpu"], micro_batch_size=50)
    with engine:
        for _ in range(2):
            step(engine, mean, None, randn(300, FEATURES))
            seen, calls().seen = calls().seen, []
    assert max(seen) == 50


def test_one_micro_batch_verifies_nothing():
    with ScatterOnceParallel(mlp(), 3, ["cpu"]) as engine:
        step(engine, in_a_def, padded(1), INPUTS[:1])
        with pytest.raises(ValueError, match=r"count=scatterpar\.count_labels"):
            step(engine, in_a_def, padded(ROWS))


def test_reused_address_is_new_criterion():
    """No address is a key: each lambda dies before the next one is made."""
    with ScatterOnceParallel(mlp(), 3, ["cpu"]) as engine:
        for _ in range(2):
            step(engine, lambda o, t, w=None: F.cross_entropy(o, t, w), classes(ROWS))
            with pytest.raises(ValueError, match="count="):
                step(
                    engine,
                    lambda o, t, w=CLASS_WEIGHTS: F.cross_entropy(o, t, w),
                    classes(ROWS),
                )


# --- cuDNN's search, of which each empties the caches of all devices ---


def mean(output, _):
    return output.square().mean()


def note_flags(net, inputs):
    calls().sizes.add((len(inputs), torch.backends.cudnn.benchmark))
    return net.linear(inputs).repeat_interleave(2, 0)


@torch.backends.cudnn.flags(enabled=True, benchmark=True)
def test_looks_need_no_cudnn_search():
    rows = ROWS // 4
    with ScatterOnceParallel(build(net(note_flags)), 2, ["cpu"] * 2) as engine:
        calls().sizes = set()
        step(engine, mean, None)
        assert torch.backends.cudnn.benchmark
        assert {size for size, is_searched in calls().sizes if is_searched} == {rows}
        assert {size for size, is_searched in calls().sizes if not is_searched} - {rows}


# --- errors of the look's own code ---


def mistaken(self, rows, *_, **__):
    raise AttributeError("a look's own mistake")


def failing_user(output, targets):
    raise AttributeError("of the user")


@pytest.mark.parametrize("is_in_tests", [True, False])
def test_mistake_of_a_look_is_not_silent(monkeypatch, is_in_tests):
    """An operator with several results failed in the look, and a wrong loss went on."""
    monkeypatch.setattr(Runs, "run", in_file_of_looks(mistaken))
    with ScatterOnceParallel(mlp(), 3, ["cpu"]) as engine:
        if is_in_tests:
            with pytest.raises(errors.Defect, match="a look's own mistake"):
                step(engine, F.mse_loss, VALUES)
            return
        monkeypatch.setattr(errors, "raises_defects", False)
        with pytest.warns(UserWarning, match="could not check .*a look's own mistake"):
            step(engine, lambda o, t: F.mse_loss(o, t), VALUES)


def in_file_of_looks(function):
    """The function, with the name of a file of this package in its code."""
    code = function.__code__.replace(co_filename=look.__file__)
    return FunctionType(code, function.__globals__)


def test_error_of_user_is_no_mistake_of_a_look():
    with (
        ScatterOnceParallel(mlp(), 3, ["cpu"]) as engine,
        pytest.raises(AttributeError, match="of the user"),
    ):
        step(engine, failing_user, VALUES)


# --- rounding is no reason, and no excuse ---


@pytest.mark.parametrize(
    "dtype",
    few_of(
        ["float64", "float32", "bfloat16", "float16", "autocast"],
        ["bfloat16"],
    ),
)
@pytest.mark.parametrize("halved", [False, True])
def test_tolerance_follows_coarsest_dtype(dtype, halved):
    def loss(output, targets):
        if halved:
            output = (output.half() * 1.1).to(output.dtype)
        return F.cross_entropy(output, targets)

    autocast = dtype == "autocast"
    inputs = INPUTS.float() if autocast else INPUTS.to(getattr(torch, dtype))
    engine = ScatterOnceParallel(mlp().to(inputs.dtype), 3, ["cpu"] * 2)
    with engine, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert_agreed(engine, lambda: step(engine, loss, classes(ROWS), inputs))
        with pytest.raises(ValueError, match="count="):
            step(engine, loss, padded(ROWS), inputs)


@pytest.mark.parametrize("seed", few_of([2, 7, 9], [7]))
def test_autocast_hides_no_difference(seed):
    """Of 60 such steps 20 were not refused: off by 40 %, which rounding could have
    been.
    """

    def spread(output, _):
        return (output.float() - output.float().mean(0)).square().mean()

    with seeded(seed), torch.autocast("cpu", torch.bfloat16):
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        engine = ScatterOnceParallel(model, device_ids=["cpu"] * 2, micro_batch_size=4)
        with engine, pytest.raises(ValueError, match="compares rows with each other"):
            step(engine, spread, None, torch.randn(32, 5))


def by_rows(logits, inputs):
    """Kernels whose error depends on the size of the batch, as with TF32, and in
    convolutions.
    """
    return F.mse_loss(logits * (1 + 1e-3 * (len(inputs) % 7) / 7), inputs[:, :CLASSES])


def student(logits, inputs):
    """It begins as its teacher, and so its gradient is nothing but rounding."""
    size = 1 + len(inputs) / 7
    return F.mse_loss(logits * size / size, logits.detach())


@pytest.mark.parametrize("loss", [by_rows, student])
def test_rounding_not_refused(loss):
    with ScatterOnceParallel(
        build(lambda: Returns(loss)).float(), 3, ["cpu"]
    ) as engine:
        engine.forward_backward(INPUTS.float())


@pytest.mark.parametrize("size", [0.02, 1.0])
def test_rounding_at_relu_edge_not_refused(size):
    """Networks in float32 were refused: a ReLU at zero was open for many rows at once
    alone.
    """

    def at_zero(net, inputs):
        rounded = net.edge * (1 + torch.finfo(torch.float32).eps * (len(inputs) > 8))
        return net.linear(inputs) + size * F.relu(inputs[:, :1] * rounded - 1)

    inputs = torch.linspace(0, 0.9, 24 * INPUTS.shape[1]).view(24, -1)
    inputs[5] = 1
    model = build(net(at_zero, edge=nn.Parameter(torch.ones(())))).float()
    with ScatterOnceParallel(model, 3, ["cpu"]) as engine:
        assert_agreed(
            engine, lambda: step(engine, F.mse_loss, torch.ones(24, CLASSES), inputs)
        )


def test_drifting_loss_not_refused():
    """It is not told right from wrong by chance: that it cannot be checked is said."""
    calls().sizes = set()  # which nothing restores

    def drifts(output, targets):
        calls().sizes.add(len(calls().sizes))
        return F.mse_loss(output, targets) * (1 + 0.01 * (len(calls().sizes) % 7))

    with ScatterOnceParallel(mlp(), 3, ["cpu"]) as engine:
        step(engine, drifts, VALUES)
        with pytest.warns(
            UserWarning, match="could not check.*.it gives another result each time"
        ):
            step(engine, drifts, VALUES)


def padded_mean(output, labels):
    is_token = labels >= 0
    losses = F.cross_entropy(output, labels.clamp(min=0), reduction="none")
    return (losses * is_token).sum() / is_token.sum()


def mean_of_rows_with_tokens(output, labels):
    is_token = labels >= 0
    losses = F.cross_entropy(output, labels.clamp(min=0), reduction="none")
    has_tokens = is_token.any(1)
    of_rows = (losses * is_token).sum(1) / is_token.sum(1).clamp(min=1)
    return of_rows[has_tokens].mean()


def weighted_mean(output, labels):
    weights = torch.linspace(0.1, 3, CLASSES).double()[labels.clamp(min=0)]
    losses = F.cross_entropy(output, labels.clamp(min=0), reduction="none")
    return (losses * weights).sum() / weights.sum()


MEANS = [padded_mean, mean_of_rows_with_tokens, weighted_mean]


@pytest.mark.parametrize("criterion", MEANS)
def test_equal_losses_refused_by_gradients(criterion, devices):
    """At its initialisation a language model gives each token the same loss."""
    model = token_classifier()
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    ids, labels = randint(11, 12, 6), randint(CLASSES, 12, 6)
    lengths = torch.tensor([6, 6, 5, 6, 1, 1, 2, 1, 0, 0, 0, 6])
    labels[torch.arange(6) >= lengths[:, None]] = -1
    refused = pytest.raises(ValueError, match="count=")
    with ScatterOnceParallel(model, 3, devices(1)) as engine, refused:
        engine.forward_backward(ids, labels, criterion)


@pytest.mark.parametrize("accum", [1, 2])
def test_exported_module_is_looked_at(accum, devices):
    """It leads to symbols of sympy, whose classes override slots of their bases."""
    net = mlp()
    rows = torch.export.Dim("rows")
    exported = torch.export.export(net, (INPUTS,), dynamic_shapes=({0: rows},))
    with ScatterOnceParallel(exported.module(), accum, devices(2)) as engine:
        assert_step(engine, INPUTS, VALUES, nn.MSELoss())


def test_failure_of_several_rows_told_at_once(devices):
    """A weight per row broadcasts to one row. The batch is too large to compute at once."""
    inputs, values = randn(300, INPUTS.shape[1]), randn(300, CLASSES)
    weights = torch.linspace(0.1, 2, 300).double()

    def weighted(output, targets):
        return ((output - targets).square().mean(1) * weights).mean()

    engine = ScatterOnceParallel(mlp(), 1, devices(2), micro_batch_size=1)
    is_told = pytest.warns(UserWarning, match="could not check how.*RuntimeError")
    with engine, is_told:
        step(engine, weighted, values, inputs)


# --- what it costs ---


def note_size(net, inputs):
    calls().seen.append(len(inputs))
    return net.linear(inputs)


def wide(net, inputs):
    """Each row's graph keeps 2 MiB."""
    return note_size(net, inputs)[:, :1] * net.columns


@pytest.mark.parametrize("size", [1, 2, 3])
def test_look_takes_rows_of_a_large_sub_step(devices, size):
    """A language model's look took 9 rows at once, and its sub-steps one. A small batch
    is computed whole.
    """
    calls().seen = []
    model = build(net(wide, columns=nn.Parameter(torch.ones(2**18))))
    with ScatterOnceParallel(model, 1, devices(1), micro_batch_size=size) as engine:
        step(engine, lambda o, t: o.square().mean(), None, INPUTS[:12])
    assert max(calls().seen) == max(2, size)
    calls().seen = []
    with ScatterOnceParallel(
        build(net(note_size)), 1, devices(1), micro_batch_size=size
    ) as engine:
        step(engine, lambda o, t: o.square().mean(), None, INPUTS[:12])
    assert max(calls().seen) == 12


def test_look_takes_as_many_rows_as_are_small():
    """Each row's graph keeps half a MiB, and a look 4 MiB. It took two of nine rows."""
    calls().seen = []
    model = build(net(wide, columns=nn.Parameter(torch.ones(2**16))))
    with ScatterOnceParallel(model, 1, ["cpu"], micro_batch_size=1) as engine:
        step(engine, mean, None, INPUTS[:12])
    assert max(calls().seen) == 7


def test_look_short_of_memory_takes_fewer(devices):
    """Whether a loss combines was not told: two rows of 16 do not show it."""

    def short(net, inputs):
        if len(inputs) > 5:
            raise torch.OutOfMemoryError("no memory for more than five rows")
        return net.linear(inputs)

    for accum in ("auto", 3):
        engine = ScatterOnceParallel(build(net(short)), accum, devices(2))
        with engine, pytest.raises(ValueError, match="count="):
            step(engine, in_a_def, padded(ROWS))
