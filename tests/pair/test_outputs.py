"""Outputs: a tuple with one entry per replica used, of whatever types the module returns.

Any of these, gathered, are in ``test_properties.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.models import CLASSES, FEATURES, Classifier, Columns, Returns, mlp
from harness.oracle import assert_close, build, randint, randn
from torch import Tensor, nn

from pair.common import Pair, assert_alike
from scatterpar import DataParallelCriterion, DataParallelModel, Rows, gather

pytestmark = pytest.mark.core

INPUTS = randn(9, FEATURES)


def run(pack: Any, device_ids: list[str], rows: int = 9):
    """The outputs of a model that packs its logits in some way, by the pair and as they are."""
    model = build(lambda: Returns(lambda logits, _: pack(logits)))
    return DataParallelModel(model, device_ids)(INPUTS[:rows]), model(INPUTS[:rows])


@pytest.mark.parametrize(
    ("replicas", "rows", "sizes"),
    [(1, 9, [9]), (4, 9, [3, 2, 2, 2]), (4, 3, [1, 1, 1]), (4, 1, [1])],
)
def test_one_entry_per_replica_used(devices, replicas, rows, sizes):
    outputs, expected = run(lambda logits: logits, devices(replicas), rows)
    assert type(outputs) is tuple
    assert [len(output) for output in outputs] == sizes
    assert_close(torch.cat(outputs), expected, "outputs")


def test_without_device_ids_there_is_a_tuple_too():
    outputs = DataParallelModel(mlp())(INPUTS)
    assert type(outputs) is tuple
    assert len(outputs) >= 1


def test_model_outputs_of_transformers(devices):
    modeling_outputs = pytest.importorskip("transformers.modeling_outputs")
    pack = modeling_outputs.SequenceClassifierOutput
    outputs, expected = run(lambda y: pack(loss=y.mean(), logits=y), devices(4))
    gathered = gather(outputs, "cpu")
    assert type(gathered) is pack
    assert list(gathered.keys()) == ["loss", "logits"]
    assert_close(gathered.logits, expected.logits, "logits")
    assert_close(gathered.loss, expected.loss, "a 0-dim entry: the mean, weighted by rows")


def test_keyword_inputs_and_parts_without_rows(devices):
    class Call(Classifier):
        def forward(self, inputs, *, scale, extra, options):
            assert scale.ndim == 0
            output = self.linear(inputs) * scale + extra["deep"][0] * options["factor"]
            return output, len(inputs)

    model = build(Call)
    extra = {"deep": [randn(9, CLASSES)]}
    call = {"scale": torch.tensor(2.0).double(), "extra": extra, "options": {"factor": 3}}
    outputs = DataParallelModel(model, devices(4))(INPUTS, **call)
    expected, _ = model(INPUTS, **call)
    output, rows = gather(outputs, "cpu")
    assert_close(output, expected, "outputs")
    assert rows == [3, 2, 2, 2]


def test_an_entry_of_rows_may_be_written(devices):
    """Entries that travel together were views of one memory, and so of one version."""

    class Writes(nn.Linear):
        def forward(self, entries):
            first = super().forward(entries[0]).tanh().sum()
            return torch.stack([first, *(entry.relu_().sum() for entry in entries[1:])])

    model, leaf = build(lambda: Writes(FEATURES, CLASSES)), INPUTS.clone().requires_grad_()
    for entries in (INPUTS, leaf * 1):
        outputs = DataParallelModel(model, devices(2))(Rows([*(entries * 1).unbind()]))
        gather(outputs, "cpu").sum().backward()
    assert_close(leaf.grad[1], (leaf[1] > 0).double(), "an entry's gradient")


def test_what_has_no_rows_crosses_once_to_each_memory(monkeypatch):
    """Each share's own copy of it was what crossed, and was told from others by its address."""
    crossed = []
    to = Tensor.to

    def noting(tensor, *args, **kwargs):
        crossed.extend([] if tensor.ndim else [tensor])
        return to(tensor, *args, **kwargs)

    class Scaled(nn.Module):
        def forward(self, inputs, factor):
            return inputs * factor.mul_(2)  # which is this replica's alone

    model = DataParallelModel(Scaled(), ["cpu:1", "cpu:2", "cpu:1", "cpu:2"])
    monkeypatch.setattr(Tensor, "to", noting)
    outputs = model(torch.ones(8, 3), torch.tensor(1.5))
    monkeypatch.undo()
    assert [output.unique().tolist() for output in outputs] == [[3.0]] * 4
    assert len(crossed) == 2


@pytest.mark.parametrize("dim", [1, -1])
def test_rows_along_another_dimension(devices, dim):
    model = build(Columns)
    inputs, targets = INPUTS.T.contiguous(), randn(CLASSES, 9, seed=4)
    expected = model(inputs)
    outputs = DataParallelModel(model, devices(4), dim)(inputs)
    assert [output.size(dim) for output in outputs] == [3, 2, 2, 2]
    assert_close(gather(outputs, "cpu", dim), expected, "outputs")
    criterion = DataParallelCriterion(nn.MSELoss(), devices(4), dim)
    assert_close(criterion(outputs, targets), nn.MSELoss()(expected, targets), "loss")


@pytest.mark.parametrize("device", ["cpu", "cpu:1", torch.device("cpu")])
def test_gather_to_a_device_and_back_to_the_parameters(devices, device):
    def program(of):
        outputs = of.model(INPUTS)
        gathered = gather(outputs, device) if isinstance(of, Pair) else outputs
        nn.CrossEntropyLoss()(gathered, randint(CLASSES, 9)).backward()
        return [gathered]

    assert_alike(mlp, program, devices(4))


def test_gather_of_lists_along_any_dimension_and_of_what_has_no_rows():
    mixed = tuple({"y": torch.ones(n, 2), "loss": torch.tensor(float(n))} for n in (3, 1))
    assert gather(mixed, "cpu")["loss"] == 2.5
    numbers = tuple(torch.tensor(float(n), requires_grad=True) for n in (3, 1))
    mean = gather(numbers, "cpu")
    mean.backward()
    assert mean == 2.0
    assert [number.grad for number in numbers] == [0.5, 0.5]
    columns = gather((torch.ones(2, 3), torch.zeros(2, 1)), "cpu", dim=1)
    assert columns.tolist() == [[1, 1, 1, 0]] * 2
    deep = tuple({"row": torch.ones(4), "y": torch.ones(2, n)} for n in (3, 1))
    assert gather([entry["y"] for entry in deep], "cpu", dim=-1).shape == (2, 4)
    assert gather([torch.zeros(2), torch.ones(1)], "cpu").tolist() == [0, 0, 1]


def test_gather_to_an_ordinal():
    if torch.accelerator.is_available():
        assert gather((torch.zeros(2), torch.ones(1)), 0).device.index == 0
        return
    with pytest.raises(ValueError, match="is not a device"):
        gather((torch.zeros(2),), "nowhere")
    with pytest.raises(ValueError, match="0 is the ordinal of an accelerator, and none is"):
        gather((torch.zeros(2),), 0)
