"""Outputs without rows that have as many entries as the rows of each replica."""

import copy
import warnings

import pytest
import torch
from calls.modes import MODES
from calls.programs import Own, mlp
from harness.oracle import build, randn
from harness.pairwise import pairwise

from scatterpar import Rows, ScatterOnceParallel
from scatterpar.calls import call_looks

# Two and three replicas, each of which gets as many rows as there are entries.
LAYOUTS = {("cpu", "cpu"): 8, ("cpu:0", "cpu:1", "cpu:0"): 12}


def _learned(self, rows):
    return self.net(rows), self.table * 1.0


def _integers(self, rows):
    return {"indices": torch.arange(4), "rows": self.net(rows)}


def _booleans_first(self, rows):
    return torch.arange(4) > 1, self.net(rows), torch.full((4, 2), torch.nan)


def _labels_of_rows(self, rows):
    """They have rows, and are alike in all replicas."""
    return torch.zeros(len(rows), dtype=torch.long), self.net(rows) * 0


def _two_per_row(self, rows):
    return torch.stack([self.net(rows), self.net(-rows)], 1)


def _fours(self, rows):
    """Each row has four, as there are rows."""
    return self.net(rows)[:, None].expand(-1, 4, -1)


RIGHT = [
    _learned,
    _integers,
    _booleans_first,
    _labels_of_rows,
    _two_per_row,
    _fours,
]


def made(forward):
    def make():
        table = torch.nn.Parameter(torch.arange(8.0).reshape(4, 2))
        net = Own(forward, net=mlp())
        net.table = table
        return net

    return build(make)


def _values(output):
    parts = output.values() if isinstance(output, dict) else output
    return [output] if isinstance(output, torch.Tensor) else list(parts)


def assert_same(found, expected):
    for actual, value in zip(_values(found), _values(expected), strict=True):
        torch.testing.assert_close(actual, value, equal_nan=True)


@pairwise(forward=RIGHT, mode=MODES, layout=list(LAYOUTS))
def test_outputs_are_those_of_all_rows(forward, mode, layout):
    net = made(forward)
    plain = copy.deepcopy(net)
    # With fewer rows than replicas, uneven ones, and with those of the table.
    num_rows = LAYOUTS[layout]
    with (
        warnings.catch_warnings(action="error"),
        ScatterOnceParallel(net, device_ids=list(layout)) as engine,
    ):
        for number in (1, num_rows, num_rows - 1, num_rows, num_rows // 2):
            with mode(net):
                found = engine(randn(number, 6))
            with mode(plain):
                assert_same(found, plain(randn(number, 6)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_of_a_table_is_whole(layout):
    net = made(_learned)
    plain = copy.deepcopy(net)
    rows = randn(LAYOUTS[layout], 6)
    with ScatterOnceParallel(net, device_ids=list(layout)) as engine:
        for call in (engine, plain):
            output, table = call(rows)
            (output.square().sum() + table.pow(3).sum()).backward()
    for parameter, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)


def _view_by_view(self, rows):
    return torch.cat([self.net(rows), 3 * self.net(rows)])


def _pairs(self, rows):
    features = self.net(rows)
    return features, features @ features.T


def _histogram(self, rows):
    return self.net(rows), torch.bincount(rows[:, 0].long() + 1, minlength=4)


def _first_layers(self, rows):
    return torch.stack([self.net(rows)] * 4)


WORDS = {
    _view_by_view: r"\.reshape\(rows, 2, …\)",
    _pairs: "a matrix of all pairs of rows, return the features",
    _histogram: r"\d entries for any number of rows",
    _first_layers: "do not have one entry per row",
}


@pairwise(forward=list(WORDS), mode=MODES, layout=list(LAYOUTS))
def test_outputs_without_rows_are_refused(forward, mode, layout):
    """Equal rows give equal outputs on all replicas, as a table has them."""
    rows = torch.ones(LAYOUTS[layout], 6, dtype=torch.float64)
    if forward is _histogram:
        rows[-1] = 2
    with (
        ScatterOnceParallel(made(forward), device_ids=list(layout)) as engine,
        mode(engine.module),
        pytest.raises(ValueError, match=WORDS[forward]),
    ):
        engine(rows)


@pytest.mark.parametrize("accum", [1, 2])
def test_micro_batches_may_have_as_many_rows(devices, accum):
    net = made(_integers).eval()
    rows = randn(8 * accum, 6)
    with ScatterOnceParallel(net, accum, devices(2)) as engine, torch.no_grad():
        assert_same(engine(rows), net(rows))


def test_other_rows_are_computed_once_for_all_calls(monkeypatch):
    net = made(_labels_of_rows).eval()
    numbers = []

    def counted(call, rows):
        numbers.append(len(rows))
        return tensors_for(call, rows)

    tensors_for = call_looks._tensors_for
    monkeypatch.setattr(call_looks, "_tensors_for", counted)
    with ScatterOnceParallel(net, device_ids=["cpu"] * 2) as engine, torch.no_grad():
        for num_rows in (7, 8, 8, 12):
            engine(randn(num_rows, 6))
        assert numbers == [2]
        engine.verify = False
        net.train()
        engine(randn(8, 6))
    assert numbers == [2]


def test_module_that_needs_its_rows_is_as_before(recwarn):
    """It is not known whether its output has rows."""

    def forward(self, rows):
        return self.net(rows.reshape(4, 6))

    net = made(forward).eval()
    rows = randn(8, 6)
    with ScatterOnceParallel(net, device_ids=["cpu"] * 2) as engine, torch.no_grad():
        assert_same(engine(rows), net.net(rows))
    assert not recwarn


@pytest.mark.parametrize("by_list", [True, False])
def test_texts_of_one_length_are_rows(by_list):
    """Padded to the longest of its rows, an output is no matrix of pairs."""

    def forward(self, rows):
        return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)

    rows = list(randn(8, 4))
    batch = Rows(rows) if by_list else torch.stack(rows)
    with (
        ScatterOnceParallel(made(forward).eval(), device_ids=["cpu"] * 2) as engine,
        torch.no_grad(),
    ):
        assert_same(engine(batch), torch.stack(rows))
