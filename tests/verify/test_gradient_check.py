"""``engine.check``: the gradient beside that of a plain whole-batch backward, without a
trace.
"""

from __future__ import annotations

import re

import pytest
import torch
from faults.state import nothing_changes
from harness.models import FEATURES, Classifier, Returns, mlp
from harness.oracle import build, randn
from harness.rank_processes import run_on_ranks
from harness.weighted import classes, padded
from torch import nn
from torch.nn import functional as F

from scatterpar import ScatterOnceParallel, count_labels

ROWS = 23
INPUTS = randn(ROWS, FEATURES)
LOSS = nn.CrossEntropyLoss()


def lam(output, targets):
    return F.cross_entropy(output, targets)


def test_difference_measured_and_explained(devices):
    with ScatterOnceParallel(mlp(), 3, devices(2)) as engine:
        report = engine.check(INPUTS, padded(ROWS), LOSS)
        assert report.passed
        assert report.worst < 1e-10
        assert report.parameter in dict(engine.module.named_parameters())
        assert "compared with plain torch's: only rounding differs. " in str(report)
        end = f"difference is {report.worst:.2e}, in {report.parameter} (limit 1e-10)."
        assert str(report).endswith(end)
        assert repr(report) == f"<GradientCheck: {report}>"
        report = engine.check(INPUTS, padded(ROWS), lam)
        assert not report.passed
        assert 0.01 < report.worst < 10
        assert "plain torch's: NOT the same. The largest" in str(report)
        assert "(limit 1e-10). The loss is no mean over rows" in str(report)
        assert str(report).endswith("its padding or on other rows: mask the padding.")
        assert "count=" in str(report)
        assert engine.check(INPUTS, padded(ROWS), lam, count=count_labels()).passed
        assert not engine.check(INPUTS, padded(ROWS), LOSS, reduction="sum").passed
        # a mean of 6 sums of a row
        report = engine.check(INPUTS[:6], None, lambda o, t: o.sum())
        assert report.worst == pytest.approx(5 / 6)


class Everything(Classifier):
    """All that a forward pass can leave behind: statistics, attributes,
    random numbers.
    """

    def __init__(self, drop=0.5):
        super().__init__()
        self.norm, self.drop, self.calls = nn.BatchNorm1d(FEATURES), nn.Dropout(drop), 0

    def forward(self, inputs):
        self.calls += 1
        return self.linear(self.drop(self.norm(inputs)))


def test_check_leaves_no_trace(devices):
    """Not in buffers, gradients or random state; and no hook that steps an optimizer
    runs.
    """
    model = build(Everything)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ran = []
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        with torch.random.fork_rng():
            engine.forward_backward(INPUTS, classes(ROWS), LOSS)
        report = engine.last_step
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: ran.append("hook"))
            parameter.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        with nothing_changes(model, optimizer=optimizer):
            engine.check(INPUTS, classes(ROWS), LOSS)
        assert engine.last_step is report
    assert ran == []


@pytest.mark.parametrize(
    ("drop", "words"), [(0.5, "drew random numbers"), (0, "Batch norm")]
)
def test_varying_passes_named(drop, words):
    with ScatterOnceParallel(build(lambda: Everything(drop)), 2, ["cpu"] * 2) as engine:
        report = engine.check(INPUTS, classes(ROWS), LOSS)
        assert not report.passed
        assert re.search(f"{words}.*engine.eval", str(report))
        assert engine.eval().check(INPUTS, classes(ROWS), LOSS).passed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_limit_follows_dtype(dtype):
    with ScatterOnceParallel(mlp().to(dtype), 3, ["cpu"] * 2) as engine:
        assert engine.check(INPUTS.to(dtype), classes(ROWS), LOSS).passed
        assert not engine.check(INPUTS.to(dtype), padded(ROWS), lam).passed


def compares_rows(output, targets):
    return F.cross_entropy(output, targets) + output.std(0).sum()


def test_row_comparing_loss_checked_whole(devices):
    """It is computed once, of all rows, as the step computes it; without a trace."""
    batch = (INPUTS, classes(ROWS), compares_rows)
    engine = ScatterOnceParallel(mlp(), 3, devices(2))
    with engine, nothing_changes(engine.module):
        report = engine.check(*batch, whole_batch=True)
        assert report.passed
        assert report.worst < 1e-10
        assert not engine.check(*batch).passed
    model = build(lambda: Returns(lambda logits, _: logits - logits.mean(0)))
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        report = engine.check(*batch[:2], LOSS, whole_batch=True)
    assert "the module ties the rows of a micro-batch to each other" in str(report)


def checks_its_own_rows(group):
    with ScatterOnceParallel(mlp(), 2, ["cpu"], process_group=group) as engine:
        # One of them alone: nothing is exchanged.
        batch = INPUTS[:7], classes(7), compares_rows
        return group.rank() == 0 or engine.check(*batch, whole_batch=True).passed


def test_rank_compares_its_own_rows():
    assert all(run_on_ranks(2, checks_its_own_rows))


def at_its_optimum(dtype=torch.float32):
    """Equal rows, each class three times: the gradients of rows cancel."""
    inputs, labels = torch.ones(9, 5), torch.arange(9) // 3
    torch.manual_seed(0)
    net = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    for _ in range(40):
        optimizer.zero_grad()
        LOSS(net(inputs), labels).backward()
        optimizer.step()
    return net.to(dtype), inputs.to(dtype), labels


@pytest.mark.draws
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("accum", [1, 2, 3])
def test_gradients_that_cancel_pass(devices, accum, dtype):
    net, inputs, labels = at_its_optimum(dtype)
    with ScatterOnceParallel(net, accum, devices(2)) as engine:
        with nothing_changes(engine):
            report = engine.check(inputs, labels, LOSS)
        assert report.passed, report
        assert net.weight.dtype == dtype
        # The step finds the parameters as they were.
        engine.forward_backward(inputs, labels, LOSS)
        assert net.weight.grad.dtype == dtype
        for wrong in ({"reduction": "sum"}, {"count": lambda rows, _: len(rows) ** 2}):
            report = engine.check(inputs, labels, lam, **wrong)
            assert not report.passed
            assert not report.in_double


@pytest.mark.draws
def test_cancelling_gradients_compared_in_double():
    net, inputs, labels = at_its_optimum()
    with ScatterOnceParallel(net, 2, ["cpu"]) as engine:
        report = engine.check(inputs, labels, LOSS)
        assert report.in_double
        assert report.worst < 1e-6
        assert "both in float64 because gradients nearly cancel" in str(report)
        with torch.autocast("cpu", torch.bfloat16):
            assert engine.check(inputs, labels, LOSS).passed


def test_difference_in_single_precision_alone_fails(devices):
    """The plain pass is as exact in the step's format as in float64."""

    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(FEATURES, 3)

        def forward(self, rows):
            is_part = rows.dtype == torch.float32 and len(rows) < ROWS
            return self.linear(rows) * (2 if is_part else 1)

    labels = torch.arange(ROWS) % 3
    model = build(Wrong).float()
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        report = engine.check(INPUTS.float(), labels, LOSS)
    assert not report.passed
    assert not report.in_double
