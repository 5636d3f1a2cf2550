"""``nn.SyncBatchNorm``: a sub-step is normalised over the rows of all replicas.

The oracle is plain torch on one device: ``nn.BatchNorm`` over the concatenated rows of
one sub-step of all replicas, one sub-step after the other.
"""

from __future__ import annotations

import copy
import re
import threading
import time
from pathlib import Path

import pytest
import torch
from faults.processes import run
from faults.state import nothing_changes
from harness.oracle import RELATIVE, assert_close, build, randint, randn
from harness.pairwise import few_of
from harness.rank_processes import run_on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from scatterpar import ScatterOnceParallel
from scatterpar.devices.transfers import Transfers
from scatterpar.replicas import sync_batch_norm
from scatterpar.replicas.batch_statistics import Moments, pooled
from scatterpar.replicas.sync_batch_norm import (
    Contribution,
    Meeting,
    Seat,
)
from scatterpar.threads.workers import Cancelled

CHANNELS = 4
CLASSES = 3
LAYOUTS = {
    "mixed 3": ["cpu:0", "cpu:1", "cpu:0"],
    "shared 2": ["cpu"] * 2,
    "virtual 2": ["cpu:0", "cpu:1"],
    "master last 3": ["cpu:0", "cpu:1", "cpu:1"],
    "shared 5": ["cpu"] * 5,
    "virtual 8": [f"cpu:{number}" for number in range(8)],
}
QUICK = {"mixed 3"}
# Notes that micro-batches see each other's rows, which is what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:Net gives other outputs for a few rows")


def slow_unless_quick(names):
    layouts = []
    for name in names:
        marks = [] if name in QUICK else [pytest.mark.slow]
        layouts.append(pytest.param(LAYOUTS[name], id=name, marks=marks))
    return layouts


every_layout = pytest.mark.parametrize("layout", slow_unless_quick(LAYOUTS))


class Net(nn.Module):
    """Layers of several kinds; ``twice`` is called twice per forward pass."""

    def __init__(self, momentum=0.1, recompute=None):
        super().__init__()
        self.first = nn.BatchNorm2d(CHANNELS, momentum=momentum)
        self.convolution = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.twice = nn.BatchNorm2d(CHANNELS, momentum=None)
        self.bare = nn.BatchNorm2d(CHANNELS, affine=False)
        self.untracked = nn.BatchNorm2d(CHANNELS, track_running_stats=False)
        self.frozen = nn.BatchNorm2d(CHANNELS).eval()
        self.flat = nn.BatchNorm1d(CLASSES)
        self.head = nn.Linear(CHANNELS, CLASSES)
        self.recompute = recompute

    def middle(self, hidden):
        hidden = self.convolution(hidden).tanh()
        return self.bare(self.twice(self.twice(hidden).square()))

    def forward(self, images):
        hidden = self.first(images)
        if self.recompute is None:
            hidden = self.middle(hidden)
        else:
            is_reentrant = self.recompute == "reentrant"
            hidden = checkpoint(self.middle, hidden, use_reentrant=is_reentrant)
        hidden = self.frozen(self.untracked(hidden))
        return self.flat(self.head(hidden.mean((2, 3))))


def models(**options):
    """A plain network, and one with synchronised layers of the same weights."""
    plain = build(lambda: Net(**options))
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    assert isinstance(synchronised.first, nn.SyncBatchNorm)
    return plain, synchronised


def batch(rows, seed=1):
    """Images and targets of which each share has another distribution."""
    images = randn(rows, CHANNELS, 4, 4, seed=seed)
    offsets = torch.linspace(-2, 2, rows, dtype=torch.float64)
    images = images * (2 + offsets[:, None, None, None]) + offsets[:, None, None, None]
    return images, randn(rows, CLASSES, seed=seed + 100)


def rows_by_sub_step(plan):
    """The numbers of the rows of each sub-step, of all replicas that have one."""
    sub_steps = max(len(share.micro_batches) for share in plan.shares)
    for number in range(sub_steps):
        rows = []
        for share in plan.shares:
            if number < len(share.micro_batches):
                rows += share.rows_of(number)
        yield rows


def plain_step(plain, plan, inputs, targets, criterion):
    """The loss of plain torch, which adds its gradient, one sub-step at a time."""
    total = 0.0
    for rows in rows_by_sub_step(plan):
        loss = criterion(plain(inputs[rows]), targets[rows]) * len(rows) / len(inputs)
        loss.backward()
        total += loss.detach()
    return total


def assert_same_gradients(module, plain, relative=RELATIVE * 100):
    """Equal up to rounding: of each gradient, or of the largest one for gradients that
    are zero, as that of a bias before a batch normalisation.
    """
    expected = [parameter.grad for parameter in plain.parameters()]
    rounding = 1e-12 * max(gradient.norm() for gradient in expected)
    named = module.named_parameters()
    for (name, parameter), gradient in zip(named, expected, strict=True):
        distance = (parameter.grad - gradient).norm()
        assert distance <= relative * gradient.norm() + rounding, name


def assert_same_buffers(module, plain, relative=RELATIVE):
    for (name, buffer), expected in zip(
        module.named_buffers(), plain.buffers(), strict=True
    ):
        assert_close(buffer, expected, name, relative)


def assert_steps(engine, plain, sizes, criterion, *, buffers=True, **options):
    """Steps of several sizes, each of which moves the parameters of both networks."""
    for step, rows in enumerate(sizes):
        inputs, targets = batch(rows, seed=step)
        engine.module.zero_grad()
        plain.zero_grad()
        loss = engine.forward_backward(inputs, targets, criterion, **options)
        expected = plain_step(plain, engine.plan(rows), inputs, targets, criterion)
        assert_close(loss, expected, "loss")
        assert_same_gradients(engine.module, plain)
        if buffers:
            assert_same_buffers(engine.module, plain)
        for module in (engine.module, plain):
            torch.optim.SGD(module.parameters(), 0.02).step()


# --- the arithmetic ---


def test_moments_of_two_replicas_by_hand():
    """1, 2, 3 on one replica and 8 on the other: mean 3.5, squares 29."""
    first = torch.tensor([[2.0], [2.0]])
    second = torch.tensor([[8.0], [0.0]])
    total, (mean, squares) = pooled([Moments(3, first), Moments(1, second)])
    assert (total, mean.item(), squares.item()) == (4, 3.5, 29.0)


def test_replica_without_values_left_out():
    first = torch.tensor([[2.0], [2.0]])
    nothing = torch.zeros(2, 1)
    total, (mean, squares) = pooled([Moments(0, nothing), Moments(3, first)])
    assert (total, mean.item(), squares.item()) == (3, 2.0, 2.0)


def contribution(value, layer="norm"):
    sums = Moments(0, torch.tensor([[value], [0.0]]))
    return Contribution(layer, "backward", sums, torch.device("cpu"), ())


def meeting_of(*numbers):
    """A meeting of replicas with these numbers of micro-batches, all in sub-step 0."""
    seats = [Seat(torch.device("cpu")) for _ in numbers]
    meeting = Meeting(seats, numbers, Transfers())
    for replica in range(len(numbers)):
        meeting.enter(replica, 0)
    return meeting


def in_threads(*functions):
    """What each function returns or raises, in the order of the functions."""
    results = [None] * len(functions)

    def work(number):
        try:
            results[number] = functions[number]()
        except Exception as error:
            results[number] = error

    threads = [
        threading.Thread(target=work, args=(number,), daemon=True)
        for number in range(len(functions))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a replica waits for ever"
    return results


def test_exchange_adds_in_replica_order():
    meeting = meeting_of(1, 1, 1)
    values = [1e16, 1.0, -1e16]  # in float32 and in this order: 0
    results = in_threads(
        *(
            lambda number=number, value=value: meeting.combine(
                number, 0, contribution(value)
            )
            for number, value in enumerate(values)
        )
    )
    assert [float(tensor[0, 0]) for _, tensor in results] == [0.0] * 3


def test_cancelled_meeting_ends_all_waits():
    meeting = meeting_of(1, 1)

    def cancel():
        time.sleep(0.05)
        meeting.set()

    waited, _ = in_threads(lambda: meeting.combine(0, 0, contribution(1.0)), cancel)
    assert isinstance(waited, Cancelled)


def test_replica_leaving_sub_step_is_named():
    meeting = meeting_of(1, 1)

    def leave():
        time.sleep(0.05)
        meeting.enter(1, None)

    waited, _ = in_threads(lambda: meeting.combine(0, 0, contribution(1.0)), leave)
    assert isinstance(waited, RuntimeError)
    assert "replica 1 does not reach 'norm' (backward) in sub-step 0" in str(waited)


def test_missing_replica_ends_the_wait(monkeypatch):
    monkeypatch.setattr(sync_batch_norm, "MEETING_SECONDS", 0.05)
    with pytest.raises(
        TimeoutError, match=r"replica 1 does not reach.* within 0\.05 s"
    ):
        meeting_of(1, 1).combine(0, 0, contribution(1.0))


def test_different_layers_are_named():
    meeting = meeting_of(1, 1)
    errors = in_threads(
        lambda: meeting.combine(0, 0, contribution(1.0, "a")),
        lambda: meeting.combine(1, 0, contribution(1.0, "b")),
    )
    for error in errors:
        assert isinstance(error, RuntimeError)
        assert "replica 0 in 'a' (backward), replica 1 in 'b' (backward)" in str(error)


# --- steps beside plain torch ---


@every_layout
@pytest.mark.parametrize("accum", few_of([1, 3], [3]))
def test_steps_normalise_over_all_replicas(layout, accum):
    plain, module = models()
    with ScatterOnceParallel(module, accum, layout) as engine:
        replicas = len(layout)
        sizes = (8 * replicas, 7 * replicas + 1, 6 * replicas + 2)
        assert_steps(engine, plain, sizes, nn.MSELoss())


@every_layout
def test_no_wait_for_missing_last_sub_step(layout):
    """9 and 8 rows in sub-steps of 4: three on one replica, two on the others."""
    plain, module = models()
    rows = 9 + 8 * (len(layout) - 1)
    with ScatterOnceParallel(
        module, device_ids=layout, micro_batch_size=4, verify=False
    ) as engine:
        numbers = {len(share.micro_batches) for share in engine.plan(rows).shares}
        assert numbers == {2, 3}
        assert_steps(engine, plain, [rows, rows], nn.MSELoss())


@pytest.mark.parametrize("layout", slow_unless_quick(["mixed 3", "shared 5"]))
def test_one_row_per_replica_is_enough(layout):
    """A plain ``nn.BatchNorm1d`` cannot train on a micro-batch of one row."""
    plain, module = models()
    with ScatterOnceParallel(module, device_ids=layout, verify=False) as engine:
        assert_steps(engine, plain, [len(layout)] * 2, nn.MSELoss())


@pytest.mark.parametrize(
    "recompute", few_of(["reentrant", "not reentrant"], ["not reentrant"])
)
def test_recomputed_layers_exchange_again(recompute):
    plain, module = models(recompute=recompute)
    with ScatterOnceParallel(module, 2, LAYOUTS["mixed 3"]) as engine:
        # Running statistics move twice, in plain torch too.
        assert_steps(engine, plain, [25], nn.MSELoss())


@every_layout
def test_statistics_of_batch_as_one_call(layout):
    plain, module = models()
    replicas = len(layout)
    rows = 6 * replicas
    with ScatterOnceParallel(module, 2, layout, buffers="batch") as engine:
        inputs, targets = batch(rows)
        engine.forward_backward(inputs, targets, nn.MSELoss())
    first = copy.deepcopy(plain.first)
    first(inputs)
    for name, expected in first.named_buffers():
        assert_close(getattr(module.first, name), expected, name)
    plain_step(plain, engine.plan(rows), inputs, targets, nn.MSELoss())
    assert_same_gradients(module, plain)


@every_layout
def test_two_passes_are_exact(layout):
    """A loss that compares all rows, over sub-steps that are normalised together."""

    def spread(outputs, _):
        return (outputs - outputs.mean(0)).square().sum() / outputs.norm()

    plain, module = models()
    rows = 8 * len(layout)
    inputs, _ = batch(rows)
    with ScatterOnceParallel(module, 2, layout) as engine:
        loss = engine.forward_backward(inputs, None, spread, whole_batch=True)
        outputs = torch.empty(rows, CLASSES, dtype=torch.float64)
        for numbers in rows_by_sub_step(engine.plan(rows)):
            outputs = outputs.index_put(
                (torch.tensor(numbers),), plain(inputs[numbers])
            )
        expected = spread(outputs, None)
        expected.backward()
        assert_close(loss, expected.detach(), "loss")
        assert_same_gradients(module, plain)
        assert_same_buffers(module, plain)


def test_rows_with_ignored_labels_normalise():
    criterion = nn.CrossEntropyLoss()
    plain, module = models()
    inputs, _ = batch(24)
    targets = randint(CLASSES, 24)
    targets[:8] = -100  # all rows of the first replica
    with ScatterOnceParallel(module, 2, LAYOUTS["mixed 3"]) as engine:
        loss = engine.forward_backward(inputs, targets, criterion)
        total = (targets != -100).sum()
        expected = 0.0
        for rows in rows_by_sub_step(engine.plan(24)):
            counted = (targets[rows] != -100).sum()
            part = criterion(plain(inputs[rows]), targets[rows]) * counted / total
            part.backward()
            expected += part.detach()
    assert_close(loss, expected, "loss")
    assert_same_gradients(module, plain)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_as_exact_as_torch(dtype):
    plain, module = models()
    exact = copy.deepcopy(plain)
    rounded = copy.deepcopy(plain).to(dtype)
    inputs, targets = batch(24)
    plan = ScatterOnceParallel(module, 1, LAYOUTS["mixed 3"]).plan(24)
    plain_step(exact, plan, inputs, targets, nn.MSELoss())
    plain_step(rounded, plan, inputs.to(dtype), targets.to(dtype), nn.MSELoss())
    module.to(dtype)
    with ScatterOnceParallel(module, 1, LAYOUTS["mixed 3"]) as engine:
        engine.forward_backward(inputs.to(dtype), targets.to(dtype), nn.MSELoss())

    def error(found):
        gradients = torch.cat([p.grad.double().flatten() for p in found.parameters()])
        expected = torch.cat([p.grad.flatten() for p in exact.parameters()])
        return (gradients - expected).norm() / expected.norm()

    assert error(module) < 2 * error(rounded)


@pytest.mark.slow
def test_same_bits_on_any_layout():
    results = []
    for layout in (["cpu"] * 4, ["cpu:0", "cpu:1"] * 2, [f"cpu:{i}" for i in range(4)]):
        for _ in range(2):
            _, module = models()
            module.float()
            inputs, targets = batch(34)
            with ScatterOnceParallel(module, 2, layout) as engine:
                engine.forward_backward(inputs.float(), targets.float(), nn.MSELoss())
            tensors = [p.grad for p in module.parameters()] + [*module.buffers()]
            results.append(tensors)
    for tensors in results[1:]:
        for tensor, expected in zip(tensors, results[0], strict=True):
            assert torch.equal(tensor, expected)


def test_exchanged_bytes_are_counted():
    """2 (n - 1) copies of two values per channel, for each layer and direction."""

    def make():
        return nn.Sequential(
            nn.Conv2d(CHANNELS, CHANNELS, 1), nn.SyncBatchNorm(CHANNELS)
        )

    module = build(make)
    with ScatterOnceParallel(module, 1, [f"cpu:{i}" for i in range(3)]) as engine:
        inputs, _ = batch(12)
        engine.forward_backward(inputs, None, lambda output, _: output.square().mean())
        report = engine.last_step
    assert report.messages["compute"] == 2 * 2 * 2
    assert report.bytes["compute"] == report.messages["compute"] * 2 * CHANNELS * 8


def test_auto_accum_search_is_exact(monkeypatch):
    plain, module = models()

    class Small(nn.MSELoss):
        def forward(self, outputs, targets):
            if len(outputs) > 3:
                raise torch.OutOfMemoryError("more than three rows")
            return super().forward(outputs, targets)

    inputs, targets = batch(24)
    with ScatterOnceParallel(
        module, "auto", LAYOUTS["mixed 3"], verify=False
    ) as engine:
        with pytest.warns(UserWarning, match="memory"):
            engine.forward_backward(inputs, targets, Small())
        plan = engine.last_step.plan
    assert {len(share.micro_batches) for share in plan.shares} == {3}
    plain_step(plain, plan, inputs, targets, nn.MSELoss())
    assert_same_gradients(module, plain)
    assert_same_buffers(module, plain)


@every_layout
def test_inference_equals_the_module(layout):
    _, module = models()
    module.untracked = nn.Identity()  # it uses the batch's statistics in any mode
    inputs, targets = batch(5 * len(layout))
    with ScatterOnceParallel(module, 2, layout) as engine:
        engine.forward_backward(inputs, targets, nn.MSELoss())
        engine.eval()
        with torch.no_grad():
            assert_close(engine(inputs), module(inputs), "output")
        module.zero_grad()
        assert engine.check(inputs, targets, nn.MSELoss()).passed


# --- failures ---


class Boom(Exception):
    """An error of the user's."""


class Fails(nn.Module):
    """Raises in one replica, at one place of a sub-step."""

    def __init__(self, place, first_row):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(CHANNELS, CHANNELS, 1), nn.SyncBatchNorm(CHANNELS), nn.Tanh()
        )
        self.last = nn.SyncBatchNorm(CHANNELS)
        self.place = place
        self.first_row = first_row

    def forward(self, images, numbers):
        is_here = bool((numbers == self.first_row).any())
        hidden = self.net(images)
        if is_here and self.place == "forward":
            raise Boom
        if is_here and self.place == "skips":
            return hidden
        if is_here and self.place == "backward":
            hidden.register_hook(self.boom)
        return self.last(hidden)

    def boom(self, _):
        raise Boom


def step_of_failing(engine, rows=18):
    inputs, _ = batch(rows)
    numbers = torch.arange(rows)
    return engine.forward_backward(
        (inputs, numbers), None, lambda output, _: output.square().mean()
    )


@every_layout
@pytest.mark.parametrize("row", few_of([0, 8, 17], [8]))
@pytest.mark.parametrize(
    ("place", "error"),
    [("forward", Boom), ("backward", Boom), ("skips", RuntimeError)],
)
def test_failing_replica_undoes_step_no_wait(layout, row, place, error):
    module = build(lambda: Fails(place, row))
    with ScatterOnceParallel(module, 3, layout, verify=False) as engine:
        with nothing_changes(module), pytest.raises(error):
            step_of_failing(engine)
        module.place = "nowhere"
        step_of_failing(engine)
    other = build(lambda: Fails("nowhere", row))
    with ScatterOnceParallel(other, 3, layout, verify=False) as fresh:
        step_of_failing(fresh)
    for found, expected in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)


def test_interrupt_ends_the_waits(monkeypatch):
    """Ctrl-C arrives while replica 0 waits for another, which sleeps."""
    _, module = models()
    inputs, targets = batch(18)
    with ScatterOnceParallel(module, 3, LAYOUTS["mixed 3"], verify=False) as engine:
        wait = Meeting._wait

        def interrupted(*arguments):
            raise KeyboardInterrupt

        monkeypatch.setattr(Meeting, "_wait", interrupted)
        with nothing_changes(module), pytest.raises(KeyboardInterrupt):
            engine.forward_backward(inputs, targets, nn.MSELoss())
        monkeypatch.setattr(Meeting, "_wait", wait)
        engine.forward_backward(inputs, targets, nn.MSELoss())


def test_two_engines_on_accelerators_meet_in_turn(monkeypatch):
    """Each might wait for the other in autograd's one thread per accelerator, until a
    ``TimeoutError`` that named a lock.
    """
    monkeypatch.setattr("scatterpar.step.replica_threads.is_async", lambda _: True)
    monkeypatch.setattr("scatterpar.replicas.sync_batch_norm.MEETING_SECONDS", 20.0)
    calls = []

    def stepping(name):
        _, module = models()

        def called(*_):
            calls.append(name)
            time.sleep(0.01)

        module.register_forward_hook(called)

        def steps():
            with ScatterOnceParallel(
                module, 3, LAYOUTS["mixed 3"], verify=False
            ) as engine:
                for _ in range(3):
                    engine.forward_backward(*batch(18), nn.MSELoss())

        return steps

    assert in_threads(stepping("first"), stepping("second")) == [None, None]
    per_step = 9  # three sub-steps of three replicas
    assert len(calls) == 6 * per_step
    for start in range(0, len(calls), per_step):
        assert len(set(calls[start : start + per_step])) == 1, "two meetings at once"


# --- refusals ---


class OwnForward(nn.SyncBatchNorm):
    """A subclass with a forward pass of its own."""

    def forward(self, rows):
        return super().forward(rows) * 2


class SynchronisedLoss(nn.Module):
    """A criterion with a synchronised layer."""

    def __init__(self):
        super().__init__()
        self.norm = nn.SyncBatchNorm(CLASSES).double()

    def forward(self, outputs, targets):
        return (self.norm(outputs) - targets).square().mean()


def own_forward(module):
    module.flat = OwnForward(CLASSES).double()
    return {}, nn.MSELoss()


REFUSED = {
    "a subclass with a forward of its own": own_forward,
    "compiled": lambda _: ({"compile": {"backend": "eager"}}, nn.MSELoss()),
    "the criterion": lambda _: ({}, SynchronisedLoss()),
}


@pytest.mark.parametrize(
    "words", few_of(REFUSED, ["the criterion", "a subclass with a forward of its own"])
)
def test_unsupported_options_refused(words):
    _, module = models()
    options, criterion = REFUSED[words](module)
    inputs, targets = batch(12)
    with (
        ScatterOnceParallel(module, 2, LAYOUTS["mixed 3"], **options) as engine,
        nothing_changes(module),
        pytest.raises(ValueError, match=f"nn.SyncBatchNorm.*{words}.*nn.BatchNorm2d"),
    ):
        engine.forward_backward(inputs, targets, criterion)


def test_whole_batch_uneven_sub_steps_refused():
    _, module = models()
    inputs, _ = batch(25)
    with (
        ScatterOnceParallel(
            module, device_ids=LAYOUTS["mixed 3"], micro_batch_size=4
        ) as engine,
        nothing_changes(module),
        pytest.raises(ValueError, match="unequal numbers of micro-batches"),
    ):
        engine.forward_backward(
            inputs, None, lambda y, _: y.std(0).sum(), whole_batch=True
        )


def test_second_derivatives_refused():
    inputs, _ = batch(12)

    class Penalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
            self.norm = nn.SyncBatchNorm(CHANNELS).double()

        def forward(self, images):
            hidden = images * self.scale
            outputs = self.norm(hidden).pow(3)
            (gradient,) = torch.autograd.grad(outputs.sum(), hidden, create_graph=True)
            return gradient.square().sum()

    net = Penalised()
    with (
        ScatterOnceParallel(net, 1, ["cpu"] * 2, verify=False) as engine,
        nothing_changes(net),
        pytest.raises(RuntimeError, match="once_differentiable"),
    ):
        engine.forward_backward(inputs)


class OutputAndHidden(nn.Module):
    """Returns what a criterion needs to ask for a gradient through the layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(CLASSES, CLASSES)
        self.norm = nn.SyncBatchNorm(CLASSES)

    def forward(self, rows):
        hidden = self.first(rows)
        return self.norm(hidden), hidden


def test_grad_in_function_criterion_refused():
    """Replicas hold its lock in turn: the one that has it waited 300 s for the others."""

    def criterion(outputs, _):
        normalised, hidden = outputs
        (gradient,) = torch.autograd.grad(
            normalised.pow(3).sum(), hidden, retain_graph=True
        )
        return (normalised * gradient).mean()

    net = build(OutputAndHidden)
    with (
        ScatterOnceParallel(net, 1, ["cpu"] * 2, verify=False) as engine,
        nothing_changes(net),
        pytest.raises(RuntimeError, match=r"gradient through 'norm'.*nn\.Module"),
    ):
        engine.forward_backward(randn(12, CLASSES), None, criterion)


def refused_between_processes(group):
    _, module = models()
    with pytest.raises(ValueError, match=r"nn\.SyncBatchNorm.*use nn\.BatchNorm2d"):
        ScatterOnceParallel(module, 1, ["cpu"], process_group=group)


@pytest.mark.slow
def test_several_processes_refused():
    run_on_ranks(2, refused_between_processes)


class SharedZeros(nn.Module):
    """Autograd gives ``first`` and ``second`` views of one gradient."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(2, 2), nn.SyncBatchNorm(2)
        self.first = nn.Parameter(torch.zeros(2))
        self.second = nn.Parameter(torch.zeros(2))

    def forward(self, rows):
        rows = self.layer(rows)
        both = self.first.view(1, -1) + self.second.view(1, -1)
        return rows + 0 * self.norm(rows) + both


@pytest.mark.parametrize("ids", [["cpu"] * 2, ["cpu:0", "cpu:1"]], ids="+".join)
def test_gradients_of_nothing_share_no_memory(ids):
    """The next sub-step added to both at once."""
    model = build(SharedZeros)
    nn.init.zeros_(model.layer.weight)
    nn.init.zeros_(model.layer.bias)
    labels = torch.zeros(8, dtype=torch.int64)
    labels[:2] = -100  # the first sub-step of replica 0
    with ScatterOnceParallel(model, 2, ids, verify=False) as engine:
        engine.forward_backward(randn(8, 2), labels, nn.CrossEntropyLoss())
    expected = torch.tensor([-0.5, 0.5], dtype=torch.float64)
    assert_close(model.first.grad, expected, "first")
    assert_close(model.second.grad, expected, "second")


# --- many programs ---


@pytest.mark.slow
def test_random_programs_end_and_are_exact():
    """Failures and interrupts at random moments; each program has a time limit."""
    script = str(Path(__file__).with_name("sync_stress.py"))
    outcome = run(script, "1000", "200", OMP_NUM_THREADS="1", silence=1200)
    assert outcome.code == 0, outcome.err + outcome.out
    counts = dict(re.findall(r"(\w+) (\d+)", outcome.out))
    assert all(int(count) > 100 for count in counts.values()), counts
