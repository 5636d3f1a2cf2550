"""Errors: the user's own as they are, noted where they happened; ours with numbers in them."""

from __future__ import annotations

import threading
import traceback

import pytest
import torch
from helpers.models import CLASSES, FEATURES, mlp
from helpers.oracle import randint, randn
from torch import nn

from pair.common import Shared
from scatterpar import DataParallelCriterion, DataParallelModel, ScatterOnceParallel

INPUTS, TARGETS = randn(9, FEATURES), randint(CLASSES, 9)


class Unusual(Exception):
    """Cannot be made from a message alone, as torch's own ``parallel_apply`` would."""

    def __init__(self, code, reason):
        super().__init__(code, reason)
        self.code = code


class Fails(nn.Module):
    """Fails for the shares that start with some rows."""

    def __init__(self, *rows):
        super().__init__()
        self.rows, self.raised = {float(INPUTS[row, 0]): row for row in rows}, Shared()

    def forward(self, output, targets=None):
        if float(output.flatten()[0]) in self.rows:
            self.fail()
        return output if targets is None else output.mean()

    def fail(self):
        error = Unusual(42, "a reason")
        self.raised.found.append(error)
        raise error


def run(part, module, device_ids):
    if part == "model":
        return DataParallelModel(module, device_ids)(INPUTS)
    outputs = DataParallelModel(nn.Identity(), device_ids)(INPUTS)
    return DataParallelCriterion(module, device_ids)(outputs, TARGETS)


@pytest.mark.parametrize("part", ["model", "criterion"])
@pytest.mark.parametrize(("replicas", "row", "replica"), [(4, 5, 2), (4, 0, 0), (1, 0, 0)])
def test_the_user_s_exception_object_traceback_and_a_note(placed, part, replicas, row, replica):
    module = Fails(row)
    devices = placed(replicas)
    with pytest.raises(Unusual) as caught:
        run(part, module, devices)
    assert caught.value is module.raised.found[0]
    assert caught.value.code == 42
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-2:] == ["forward", "fail"]
    assert caught.value.__notes__[0].startswith(f"in replica {replica} on {devices[replica]}")


def test_the_lowest_replica_s_error_a_note_of_the_others_and_the_next_call_works(placed):
    module = Fails(3, 7)
    model = DataParallelModel(module, placed(4))
    with pytest.raises(Unusual) as caught:
        model(INPUTS)
    assert caught.value.__notes__[0].startswith("in replica 1 on ")
    assert len(caught.value.__notes__) == 1 or "replica 3 failed too" in caught.value.__notes__[1]
    module.rows.clear()
    assert len(model(INPUTS)) == 4


def no_tuple(name):
    return rf"outputs must be the tuple that DataParallelModel returns, .* got {name}$"


ROWS_DIFFER = r"output 1 has 2 rows along dim=0, but .* targets has 3: .*one\s+batch"
MIXED = TARGETS, TARGETS[:8]
WRONG = [  # what is made of four outputs, with which targets
    (lambda o: o[:3], TARGETS, ValueError, "outputs have 3 shares, but 9 rows .* 4 devices make 4"),
    (lambda o: o, TARGETS[:3], ValueError, "outputs have 4 shares, but 3 rows .* 4 devices make 3"),
    (lambda o: (), TARGETS, ValueError, "outputs have 0 shares, but 9 rows"),
    (lambda o: o, randint(CLASSES, 11), ValueError, ROWS_DIFFER),
    (lambda o: o[::-1], TARGETS, ValueError, "output 0 has 2 rows .* its share .* has 3"),
    (lambda o: o, MIXED, ValueError, "disagrees in its rows along dim=0: targets with 9 .* 8"),
    (lambda o: o, TARGETS[:0], ValueError, "the batch is empty: targets with 0"),
    (lambda o: torch.zeros(9, CLASSES), TARGETS, TypeError, no_tuple("Tensor")),
    (lambda o: {"a": torch.zeros(3)}, TARGETS, TypeError, no_tuple("dict")),
    (lambda o: None, TARGETS, TypeError, no_tuple("NoneType")),
    (lambda o: (o[0], "text"), TARGETS, TypeError, "output 1 has no tensor in it: got str"),
]


@pytest.mark.parametrize(("change", "targets", "error", "words"), WRONG)
def test_outputs_and_targets_that_do_not_belong_together(placed, change, targets, error, words):
    outputs = change(DataParallelModel(mlp(), placed(4))(INPUTS))
    with pytest.raises(error, match=words):
        DataParallelCriterion(nn.CrossEntropyLoss(), placed(4))(outputs, targets)


def test_a_criterion_without_devices_goes_by_the_outputs():
    criterion = DataParallelCriterion(nn.CrossEntropyLoss())
    with pytest.raises(ValueError, match=r"outputs have 0 shares.* 0 devices make 0"):
        criterion((), TARGETS)
    with pytest.raises(ValueError, match=ROWS_DIFFER):
        criterion(DataParallelModel(mlp(), ["cpu"] * 4)(INPUTS), randint(CLASSES, 11))


def test_outputs_on_another_device_than_device_ids():
    outputs = (torch.zeros(3, 2, device="meta"), torch.zeros(2, 2, device="meta"))
    words = r"output 0 is on meta, but device_ids\[0\] is cpu:0; give the criterion the model's"
    with pytest.raises(ValueError, match=words):
        DataParallelCriterion(nn.MSELoss(), ["cpu:0", "cpu:1"])(outputs, torch.zeros(5, 2))


def test_inputs_without_rows_or_that_disagree(placed):
    model = DataParallelModel(mlp(), placed(2))
    with pytest.raises(ValueError, match=r"the batch is empty: inputs with 0"):
        model(INPUTS[:0])
    with pytest.raises(ValueError, match=r"disagrees in its rows .* keyword inputs with 4"):
        model(INPUTS, mask=torch.zeros(4))
    for inputs in ((), (torch.tensor(1.0),)):
        with pytest.raises(ValueError, match="the batch has no tensor with rows"):
            model(*inputs)
    with pytest.raises(RuntimeError, match="uninitialised lazy parameter, 'weight': call the"):
        DataParallelModel(nn.LazyLinear(3), placed(2))(INPUTS)


CROSS = nn.CrossEntropyLoss()
LOSSES = [
    (nn.CrossEntropyLoss(reduction="none"), {}, ValueError, 'reduction="none" gives one loss per'),
    (lambda o, t: o, {}, ValueError, r"the criterion must give a 0-dim loss, got shape \(\d, 4\)"),
    (lambda o, t: o.mean() * 1j, {}, ValueError, "must give a real loss, got torch.complex128"),
    (lambda o, t: 1.0, {}, TypeError, "the criterion must give the loss as a 0-dim .* got float"),
    (CROSS, {"reduction": "median"}, ValueError, "reduction must be"),
    (CROSS, {"count": lambda o, t: "many"}, TypeError, "count must return a number or a 0-dim te"),
    (CROSS, {"count": lambda o, t: -1}, ValueError, "not negative"),
    (CROSS, {"count": 3}, TypeError, "count must be callable, got 3"),
]


@pytest.mark.parametrize(("criterion", "options", "error", "words"), LOSSES)
def test_losses_reductions_and_counts_that_are_none(placed, criterion, options, error, words):
    outputs = DataParallelModel(mlp(), placed(3))(INPUTS)
    with pytest.raises(error, match=words):
        DataParallelCriterion(criterion, placed(3))(outputs, TARGETS, **options)


ELSEWHERE = nn.Sequential(mlp(), nn.Linear(2, 2, device="meta"))
CONSTRUCTED = [
    (DataParallelModel, (lambda x: x,), TypeError, "module must be an nn.Module, got function"),
    (DataParallelCriterion, ("mse",), TypeError, "criterion must be callable, got 'mse'"),
    (
        DataParallelCriterion,
        (nn.MSELoss,),
        TypeError,
        "is the class MSELoss; pass an instance, MSE",
    ),
    (DataParallelModel, (mlp(), "cpu"), TypeError, "device_ids must be a list"),
    (DataParallelCriterion, (nn.MSELoss(), []), ValueError, "device_ids is empty"),
    (DataParallelModel, (ELSEWHERE, ["cpu"]), ValueError, "its parameter '1.weight' is on meta"),
]


@pytest.mark.parametrize(("kind", "given", "error", "words"), CONSTRUCTED)
def test_constructors(kind, given, error, words):
    with pytest.raises(error, match=words):
        kind(*given)


@pytest.mark.parametrize("wrapper", [DataParallelModel, ScatterOnceParallel])
@pytest.mark.parametrize("inner", [DataParallelModel, ScatterOnceParallel])
def test_what_makes_replicas_is_not_replicated(wrapper, inner):
    """One engine within another, or the pair's model in it, was once taken without a word."""
    wrapped = inner(mlp(), device_ids=["cpu"])
    words = rf"module is wrapped in {inner.__name__}, .* pass the model itself, which is its .mod"
    with pytest.raises(TypeError, match=words):
        wrapper(wrapped)


@pytest.mark.parametrize("part", ["model", "criterion"])
@pytest.mark.parametrize("replicas", [1, 3])
def test_a_call_from_inside_a_call_is_an_error_and_no_hang(placed, part, replicas):
    class Again(nn.Module):
        def forward(self, output, targets=None):
            if targets is None:
                return wrapper[0](output)
            return wrapper[0]((output,) * replicas, targets)

    kind = DataParallelModel if part == "model" else DataParallelCriterion
    wrapper = [kind(Again(), placed(replicas))]
    outputs = DataParallelModel(nn.Identity(), placed(replicas))(INPUTS)
    words = rf"this {kind.__name__} is in the middle of a step: another cannot start from inside"
    with pytest.raises(RuntimeError, match=words):
        wrapper[0](INPUTS) if part == "model" else wrapper[0](outputs, TARGETS)
    wrapper.clear()


def test_a_call_from_another_thread_meanwhile(placed):
    inside, done, found = threading.Event(), threading.Event(), []

    class Waits(nn.Module):
        def forward(self, inputs):
            inside.set()
            assert done.wait(120)
            return inputs

    pair = DataParallelModel(Waits(), placed(2))

    thread = threading.Thread(target=lambda: found.append(pair(INPUTS)))
    thread.start()
    assert inside.wait(120)
    with pytest.raises(RuntimeError, match="nor from a second thread"):
        pair(INPUTS)
    done.set()
    thread.join()
    assert len(found[0]) == 2
