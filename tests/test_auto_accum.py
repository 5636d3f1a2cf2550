"""``accum="auto"``: out of memory is a fault that the step gets over by itself."""

from __future__ import annotations

import copy
import math
import warnings
import weakref

import pytest
import torch
from faults.state import capture, differences, nothing_changes, values_differ
from harness.notes import beginning_of_note
from harness.oracle import build, randint, randn
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import scatterpar.engine as engine_module
from scatterpar import ScatterOnceParallel

pytestmark = pytest.mark.core

FEATURES, CLASSES = 5, 4

FORMS = {
    "torch": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "CUDA": lambda: RuntimeError("CUDA error: out of memory"),
    "cuDNN": lambda: RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "cuBLAS": lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublas"),
    "host": lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory"
    ),
    "Python": MemoryError,
}


class Full(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, budget, form):
        ctx.budget, ctx.form = budget, form
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        if len(gradient) > ctx.budget:
            raise FORMS[ctx.form]()
        return gradient, None, None


class Budget(nn.Module):
    """Has memory for so many rows; draws random numbers and keeps running statistics."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(FEATURES, 6)
        self.norm = nn.BatchNorm1d(6)
        self.dropout = nn.Dropout(0.2)
        self.leave = nn.Linear(6, CLASSES)
        self.rows = 10**9
        self.form = "torch"
        self.where = "forward"

    def forward(self, inputs):
        hidden = self.dropout(self.norm(self.enter(inputs)))
        if self.where == "forward" and len(inputs) > self.rows:
            raise FORMS[self.form]()
        if self.where == "backward":
            hidden = Full.apply(hidden, self.rows, self.form)
        return self.leave(hidden)


def budget(rows=10**9, **options):
    model = build(Budget)
    model.rows = rows
    for name, value in options.items():
        setattr(model, name, value)
    return model


def step(engine, rows=24, seed=1):
    inputs, targets = randn(rows, FEATURES, seed=seed), randint(CLASSES, rows, seed=seed)
    torch.manual_seed(seed)
    return engine.forward_backward(inputs, targets, nn.CrossEntropyLoss())


def fixed(model, accum, devices, rows=24, seed=1):
    """The same step with a fixed ``accum`` on a copy with all the memory of the world."""
    twin = copy.deepcopy(model)
    twin.rows = 10**9
    with ScatterOnceParallel(twin, accum, devices) as engine:
        loss = step(engine, rows, seed)
    return twin, loss, torch.get_rng_state()


@pytest.mark.contract
@pytest.mark.draws
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("form", FORMS)
def test_the_result_is_that_of_the_same_fixed_accum_bit_for_bit(devices, form, where):
    model = budget(3, form=form, where=where)
    ids = devices(2)
    expected, loss, random_state = fixed(model, 4, ids)
    with ScatterOnceParallel(model, "auto", ids) as engine:
        with pytest.warns(UserWarning, match='accum="auto"') as caught:
            assert torch.equal(step(engine), loss)
        assert [str(one.message) for one in caught] == [
            'accum="auto": 24 rows with accum=1 ran out of memory; accum=4 is the smallest that '
            "fits, and is kept"
        ]
        assert values_differ(expected, model) == []
        assert torch.equal(torch.get_rng_state(), random_state)
        assert engine.last_step.retries >= 1
        assert len(engine.last_step.plan.shares[0].micro_batches) == 4


@pytest.mark.draws
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 11, 12])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_the_fewest_sub_steps_that_fit_are_found_and_kept(replicas, rows):
    model, batch = budget(rows), 24
    model.norm.eval()
    fewest = math.ceil(math.ceil(batch / replicas) / rows)
    with ScatterOnceParallel(model, "auto", ["cpu"] * replicas) as engine:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(engine, batch)
        assert len(caught) == (fewest > 1)
        assert len(engine.last_step.plan.shares[0].micro_batches) == fewest
        assert (engine.last_step.retries > 0) == (fewest > 1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(engine, batch, seed=2)
        assert engine.last_step.retries == 0
        assert len(engine.last_step.plan.shares[0].micro_batches) == fewest
        assert len(engine.plan(batch).shares[0].micro_batches) == fewest


@pytest.mark.draws
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_one_row_that_does_not_fit_reaches_the_user_and_changes_nothing(devices, where):
    model = budget(0, where=where)
    model.norm.eval()
    with ScatterOnceParallel(model, "auto", devices(2)) as engine:
        torch.manual_seed(1)
        wanted = pytest.raises(torch.OutOfMemoryError, match="Tried to allocate")
        with nothing_changes(model), wanted as caught:
            step(engine)
        notes = "\n".join(caught.value.__notes__)
        assert "with 12 sub-steps a sub-step is one row, and that does not fit" in notes
        assert any(beginning_of_note(i, devices(2)[i]) in notes for i in (0, 1))
        del caught
        model.rows = 10**9
        model.norm.train()
        expected, loss, _ = fixed(model, len(engine.plan(24).shares[0].micro_batches), devices(2))
        assert torch.equal(step(engine), loss)
        assert values_differ(expected, model) == []


class OneFails(nn.Linear):
    """Only the replica that holds the last rows runs out of memory."""

    limit = 2

    def forward(self, inputs):
        if inputs[-1, 0] >= 12 and len(inputs) > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(inputs)


def test_a_replica_that_fails_alone_holds_up_nobody(devices):
    model = build(lambda: OneFails(2, 1))
    inputs = torch.arange(48, dtype=torch.float64).reshape(24, 2)
    inputs[:, 0] = torch.arange(24)
    expected = torch.autograd.grad(model.weight @ inputs.mean(0), model.weight)[0]
    with ScatterOnceParallel(model, "auto", devices(2)) as engine:
        with pytest.warns(UserWarning, match="accum=6 is the smallest that fits"):
            engine.forward_backward(inputs, criterion=lambda output, _: output.mean())
        assert torch.allclose(model.weight.grad, expected, rtol=1e-12)


class Tight(TorchDispatchMode):
    """Has memory for so many new tensors, and then for none."""

    def __init__(self, room):
        super().__init__()
        self.room = room

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in ("clone", "full", "zeros", "zeros_like"):
            self.room -= 1
            if self.room < 0:
                raise FORMS["torch"]()
        return function(*args, **kwargs or {})


@pytest.mark.draws
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("gradients", ["none", "some"])
def test_memory_that_ends_while_a_step_is_committed(devices, monkeypatch, count, gradients):
    """Wherever it ends, and be it before anything is written: random state goes back too."""
    model = budget(10**9)
    real, tight = engine_module.Outcome.loss_tensor, []

    def from_here_on(outcome):
        tight[0].__enter__()
        return real(outcome)

    monkeypatch.setattr(engine_module.Outcome, "loss_tensor", from_here_on)
    with ScatterOnceParallel(model, 1, devices(count)) as engine:
        for room in range(100):
            given = 2 if gradients == "some" else 0
            for number, parameter in enumerate(model.parameters()):
                parameter.grad = torch.ones_like(parameter) if number < given else None
            torch.manual_seed(1)
            before = capture(model)
            tight[:] = [Tight(room)]
            try:
                step(engine)
            except torch.OutOfMemoryError:
                tight[0].__exit__(None, None, None)
                assert differences(before, capture(model)) == [], room
                continue
            tight[0].__exit__(None, None, None)
            break
        assert 0 < room < 99


@pytest.mark.parametrize("form", FORMS)
def test_a_fixed_accum_does_not_retry(form):
    model = budget(3, form=form)
    with ScatterOnceParallel(model, 1, ["cpu"] * 2) as engine:
        with pytest.raises(type(FORMS[form]())), torch.random.fork_rng():
            step(engine)
        assert model.leave.weight.grad is None


def test_other_errors_are_not_taken_for_it():
    model = budget()

    def criterion(output, targets):
        raise RuntimeError("CUDA error: device-side assert triggered")

    arrives = pytest.raises(RuntimeError, match="device-side assert")
    with ScatterOnceParallel(model, "auto", ["cpu"] * 2) as engine, arrives:
        engine.forward_backward(randn(8, FEATURES), randint(CLASSES, 8), criterion)


def of_pairs(outputs, _):
    return (outputs @ outputs.T).sigmoid().mean()


@pytest.mark.draws
@pytest.mark.parametrize(
    ("where", "rows", "accum", "whole_batch"),
    [
        *((where, 24, 4, True) for where in ("forward", "backward")),
        *(("forward", 29, 5, whole_batch) for whole_batch in (False, True)),
    ],
)
def test_the_search_ends_at_the_fewest_that_fit(devices, where, rows, accum, whole_batch):
    """The result is that of the same fixed ``accum``, bit for bit.

    For 29 rows the search tries eight, one of them of a single row: batch normalisation raised.
    """
    criterion, found = of_pairs if whole_batch else nn.CrossEntropyLoss(), []
    for room, given in ((10**9, accum), (3, "auto")):
        model = budget(room, where=where)
        with ScatterOnceParallel(model, given, devices(2)) as engine, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(1)
            batch = randn(rows, FEATURES), randint(CLASSES, rows)
            loss = engine.forward_backward(*batch, criterion, whole_batch=whole_batch)
            found.append((loss, torch.get_rng_state(), model))
            assert (engine.last_step.retries > 0) == (given == "auto")
            assert len(engine.last_step.plan.shares[0].micro_batches) == accum
    (*expected, plain), (*results, model) = found
    assert all(map(torch.equal, results, expected))
    assert values_differ(plain, model) == []


def test_an_error_of_every_size_that_fits_reaches_the_user():
    def fails(*_):
        return 1 / 0

    model = budget(3)  # runs out of memory before the criterion is called
    with (
        ScatterOnceParallel(model, "auto", ["cpu"] * 2) as engine,
        nothing_changes(model),
        pytest.raises(ZeroDivisionError),
    ):
        engine.forward_backward(randn(29, FEATURES), None, fails)


def test_a_criterion_that_never_fits_changes_nothing(devices):
    """The master holds all outputs, however many sub-steps there are."""
    calls = []

    def criterion(outputs, _):
        calls.append(len(outputs))
        raise FORMS["torch"]()

    model = budget().eval()
    with ScatterOnceParallel(model, "auto", devices(2)) as engine:
        wanted = pytest.raises(torch.OutOfMemoryError, match="Tried to allocate")
        with nothing_changes(model), wanted as caught:
            engine.forward_backward(randn(24, FEATURES), None, criterion, whole_batch=True)
    notes = "\n".join(caught.value.__notes__)
    assert "in the criterion, with the outputs of all 24 rows" in notes
    assert "with 12 sub-steps a sub-step is one row, and that does not fit" in notes
    assert calls == [24] * len(calls)


def test_a_criterion_that_fits_beside_smaller_graphs(devices):
    """It shares the memory with the last graphs, which more sub-steps make smaller."""
    held = []

    class Held(nn.Linear):
        def forward(self, inputs):
            outputs = super().forward(inputs)
            held.append(weakref.ref(outputs))
            return outputs

    def criterion(outputs, _):
        kept = [output() for output in held if output() is not None]
        if sum(len(output) for output in kept) > 8:
            raise FORMS["torch"]()
        return of_pairs(outputs, None)

    model = build(lambda: Held(FEATURES, CLASSES))
    with ScatterOnceParallel(model, "auto", devices(2)) as engine:
        with pytest.warns(UserWarning, match="accum=3 is the smallest that fits"):
            engine.forward_backward(randn(24, FEATURES), None, criterion, whole_batch=True)
        expected = copy.deepcopy(model)
        expected.zero_grad()
        of_pairs(
            nn.functional.linear(randn(24, FEATURES), expected.weight, expected.bias), None
        ).backward()
        assert torch.allclose(model.weight.grad, expected.weight.grad, rtol=1e-12, atol=0)
