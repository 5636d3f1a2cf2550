"""``accum="auto"``: out of memory is a fault that the step gets over by itself."""

from __future__ import annotations

import gc
import math
import warnings

import pytest
import torch
from faults.state import nothing_changes, values_differ
from harness.models import Of
from harness.notes import beginning_of_note
from harness.oracle import build, randint, randn
from torch import Tensor, nn

from scatterpar import ScatterOnceParallel

pytestmark = [pytest.mark.core, pytest.mark.draws]

FEATURES, CLASSES = 5, 4
CE = nn.CrossEntropyLoss()

FORMS = {
    "torch": lambda: torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB"
    ),
    "CUDA": lambda: RuntimeError("CUDA error: out of memory"),
    "cuDNN": lambda: RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "cuDNN 9": lambda: RuntimeError(
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"
    ),
    "cuBLAS": lambda: RuntimeError(
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublas"
    ),
    "host": lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory"
    ),
    "Python": MemoryError,
}


def within_budget(model, inputs):
    def require_memory(rows):
        if len(rows) > model.rows:
            raise FORMS[model.form]()

    hidden = model.dropout(model.norm(model.enter(inputs)))
    if model.where == "forward":
        require_memory(inputs)
    elif model.where == "backward" and hidden.requires_grad:
        hidden.register_hook(require_memory)
    return model.leave(hidden)


def budget(rows=10**9, form="torch", where="forward"):
    """Has memory for so many rows; draws random numbers and keeps
    running statistics.
    """
    return build(
        lambda: Of(
            within_budget,
            enter=nn.Linear(FEATURES, 6),
            norm=nn.BatchNorm1d(6),
            dropout=nn.Dropout(0.2),
            leave=nn.Linear(6, CLASSES),
            rows=rows,
            form=form,
            where=where,
        )
    )


def step(engine, rows=24, criterion=CE, **options):
    torch.manual_seed(1)
    return engine.forward_backward(
        randn(rows, FEATURES), randint(CLASSES, rows), criterion, **options
    )


def substeps(engine):
    return len(engine.last_step.plan.shares[0].micro_batches)


def of_pairs(outputs, _):
    return (outputs @ outputs.T).sigmoid().mean()


@pytest.mark.contract
@pytest.mark.parametrize(
    ("form", "where", "rows", "accum", "whole_batch"),
    [
        *((form, "forward", 24, 4, False) for form in FORMS),
        *(("torch", "backward", 24, 4, whole_batch) for whole_batch in (False, True)),
        # The search tries eight, one of them of a single row: batch normalisation
        # raised.
        *(("torch", "forward", 29, 5, whole_batch) for whole_batch in (False, True)),
    ],
)
def test_the_result_is_that_of_the_same_fixed_accum_bit_for_bit(
    devices, form, where, rows, accum, whole_batch
):
    criterion, found = of_pairs if whole_batch else CE, []
    model = budget(3, form, where)
    with ScatterOnceParallel(model, 1, devices(2)) as engine:
        torch.manual_seed(1)
        with nothing_changes(model), pytest.raises(type(FORMS[form]())):
            step(engine, rows, criterion, whole_batch=whole_batch)
    for room, given in ((10**9, accum), (3, "auto")):
        model = budget(room, form, where)
        with (
            ScatterOnceParallel(model, given, devices(2)) as engine,
            warnings.catch_warnings(record=True) as caught,
        ):
            loss = step(engine, rows, criterion, whole_batch=whole_batch)
        found.append((loss, torch.get_rng_state(), model))
        assert (engine.last_step.retries > 0) == (given == "auto")
        assert substeps(engine) == accum
    assert [str(one.message) for one in caught] == [
        f'accum="auto": {rows} rows with accum=1 ran out of memory; accum={accum} is '
        "the smallest "
        f"that fits, and is kept"
    ]
    (*expected, plain), (*results, model) = found
    assert all(map(torch.equal, results, expected))
    assert values_differ(plain, model) == []


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 11, 12])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_the_fewest_sub_steps_that_fit_are_found_and_kept(replicas, rows):
    model = budget(rows)
    model.norm.eval()
    fewest = math.ceil(math.ceil(24 / replicas) / rows)
    with ScatterOnceParallel(model, "auto", ["cpu"] * replicas) as engine:
        for is_first in (True, False):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                step(engine)
            assert len(caught) == (is_first and fewest > 1)
            assert (engine.last_step.retries > 0) == (is_first and fewest > 1)
            assert substeps(engine) == fewest
        assert len(engine.plan(24).shares[0].micro_batches) == fewest


@pytest.mark.parametrize("where", ["forward", "backward", "criterion"])
def test_what_never_fits_reaches_the_user_and_changes_nothing(devices, where):
    model, twin = budget(0, where=where), budget()
    model.norm.eval()
    options = {"whole_batch": where == "criterion"}

    def criterion(outputs, targets):
        if where == "criterion" and not model.rows:
            assert len(outputs) == 24, "all outputs, however many sub-steps there are"
            raise FORMS["torch"]()
        return CE(outputs, targets)

    with ScatterOnceParallel(model, "auto", devices(2)) as engine:
        torch.manual_seed(1)
        wanted = pytest.raises(torch.OutOfMemoryError, match="Tried to allocate")
        with nothing_changes(model), wanted as caught:
            step(engine, criterion=criterion, **options)
        notes = "\n".join(caught.value.__notes__)
        assert "with 12 sub-steps a sub-step is one row, and that does not fit" in notes
        begins = [beginning_of_note(i, devices(2)[i]) for i in (0, 1)]
        if where == "criterion":
            begins = ["in the criterion, with the outputs of all 24 rows"]
        assert any(words in notes for words in begins)
        del caught
        model.rows = 10**9
        model.norm.train()
        loss = step(engine, criterion=criterion, **options)
    with ScatterOnceParallel(twin, 1, devices(2)) as engine:
        assert torch.equal(step(engine, criterion=criterion, **options), loss)
    assert values_differ(twin, model) == []


@pytest.mark.parametrize("room", [10**9, 3], ids=["at once", "after memory ran out"])
def test_other_errors_are_not_taken_for_it(room):
    def fails(*_):
        raise RuntimeError("CUDA error: device-side assert triggered")

    model = budget(room)
    torch.manual_seed(1)
    wanted = pytest.raises(RuntimeError, match="device-side assert")
    with (
        ScatterOnceParallel(model, "auto", ["cpu"] * 2) as engine,
        nothing_changes(model),
        wanted,
    ):
        step(engine, 29, fails)


def test_the_gradients_of_a_trial_are_freed_before_the_next_try(devices):
    """The search exists because memory is short."""
    alive = []  # tensors of a weight's size at the start of each try

    def forward(model, inputs):
        weight = model.enter.weight
        if weight.grad is None:
            tensors = [each for each in gc.get_objects() if type(each) is Tensor]
            alive.append(sum(tensor.shape == weight.shape for tensor in tensors))
        return within_budget(model, inputs)

    model = budget(3)
    model.enter = nn.Linear(FEATURES, 13)  # no other test has a weight of this size
    model.norm = nn.BatchNorm1d(13)
    model.leave = nn.Linear(13, CLASSES)
    model.double().function = forward
    options = {"device_ids": devices(1), "verify": False}
    with ScatterOnceParallel(model, "auto", **options) as engine:
        with pytest.warns(UserWarning, match="is the smallest that fits"):
            step(engine)
        assert engine.last_step.retries == 5
    assert len(alive) == 7  # tries: a trial of 8 sub-steps has fitted between others
    assert len(set(alive)) == 1, alive


def test_a_function_of_outputs_is_not_called_by_trials(devices):
    sizes = []

    def number_of_rows(output):
        sizes.append(len(output))
        return output

    warns = pytest.warns(UserWarning, match="is the smallest that fits")
    with ScatterOnceParallel(budget(3), "auto", devices(2)) as engine, warns:
        _, outputs = step(engine, return_outputs=number_of_rows)
    assert sizes == [3] * 8
    assert [len(output) for output in outputs] == [12, 12]
