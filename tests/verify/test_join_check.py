"""Outputs with several entries per row: their order is compared until values show it."""

from __future__ import annotations

import re

import pytest
import torch
from harness.oracle import seeded
from torch import nn

from scatterpar import ScatterOnceParallel
from scatterpar.verify import join_check
from scatterpar.verify.join_check import _with_several_entries

ROWS = torch.arange(1.0, 9).double()[:, None]


class Twice(nn.Module):
    """Two entries per row, after each other or all rows twice."""

    def __init__(self, in_order):
        super().__init__()
        with seeded():
            self.linear = nn.Linear(1, 1, dtype=torch.float64)
        self.in_order = in_order

    def forward(self, rows):
        output = self.linear(rows)
        if self.in_order:
            return torch.stack([output, 2 * output], 1).flatten(0, 1)
        return torch.cat([output, 2 * output])


@pytest.fixture
def comparisons(monkeypatch):
    """The numbers of parts of the comparisons that are made."""
    made = []
    compare = join_check.compare_outputs

    def compare_outputs(whole, pieces, parts, dim):
        made.append(len(parts))
        return compare(whole, pieces, parts, dim)

    monkeypatch.setattr(join_check, "compare_outputs", compare_outputs)
    return made


def engine_of(module, **options):
    return ScatterOnceParallel(module, 1, ["cpu:0", "cpu:1"], **options)


def test_ordered_entries_compared_once(comparisons):
    module = Twice(in_order=True).eval()
    with engine_of(module) as engine, torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(engine(ROWS), module(ROWS))
    assert comparisons == [2]


def test_order_that_cannot_be_asked_told_once(recwarn):
    """A generator cannot be put back. The step ended in an error of the package's own."""
    module = Twice(in_order=True).eval()
    module.numbers = (number for number in range(9))
    with engine_of(module) as engine, torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(engine(ROWS), module(ROWS))
    (told,) = recwarn
    words = r"could not check that the entries.*numbers \(generator\).*view\(rows, k"
    assert re.search(words, str(told.message))


def test_entries_that_depend_on_others_refused():
    """The order of a view from which a mean is subtracted cannot be told."""

    class Centred(Twice):
        def forward(self, rows):
            return super().forward(rows - rows.mean(0))

    with (
        engine_of(Centred(in_order=True).eval()) as engine,
        torch.no_grad(),
        pytest.raises(ValueError, match=r"computed from other rows.*\n.*one entry per"),
    ):
        engine(ROWS.square())


def test_other_order_refused_each_time(comparisons):
    with engine_of(Twice(in_order=False).eval()) as engine, torch.no_grad():
        for _ in range(2):
            with pytest.raises(ValueError, match="not in the order of the rows"):
                engine(ROWS)
    assert comparisons == [2, 2]


def test_equal_entries_compared_again(comparisons):
    with engine_of(Twice(in_order=True).eval()) as engine, torch.no_grad():
        engine.module.linear.bias.zero_()
        engine(torch.zeros_like(ROWS))
        engine(torch.zeros_like(ROWS))
        engine(ROWS)
        engine(ROWS)
    assert len(comparisons) == 3


def test_numbers_drawn_in_map_refused():
    def draw(model, rows):
        return torch.rand(2 * len(rows), 1)

    words = r"draws random numbers .*\.view\(rows, k"
    with (
        engine_of(Twice(in_order=True)) as engine,
        pytest.raises(ValueError, match=words),
    ):
        engine.map(draw, ROWS)


@pytest.mark.parametrize(
    ("shapes", "several"),
    [
        ([(6, 1), (4, 1)], True),
        ([(3, 1), (2, 1)], False),
        ([(6, 1), (6, 1)], False),  # two and three entries
        ([(5, 1), (4, 1)], False),
    ],
)
def test_several_entries_per_row_detected(shapes, several):
    pieces = [
        (torch.zeros(shape), rows) for shape, rows in zip(shapes, (3, 2), strict=True)
    ]
    assert _with_several_entries(pieces, 0) == ({0} if several else set())


class Tokens(nn.Module):
    """Two tokens per row, the number of each, and perhaps a table without rows."""

    def __init__(self, table_size=0):
        super().__init__()
        with seeded():
            self.linear = nn.Linear(1, 1, dtype=torch.float64)
        self.table_size = table_size

    def forward(self, rows):
        tokens = self.linear(torch.stack([rows, 2 * rows], 1).flatten(0, 1))
        numbers = torch.arange(2).repeat(len(rows))
        if not self.table_size:
            return tokens, numbers
        return tokens, numbers, torch.ones(self.table_size)


def loss_of_first_tokens(output, _):
    tokens, numbers = output
    return tokens[numbers == 0].square().mean()


@pytest.mark.parametrize("rows", [8, 7])
@pytest.mark.parametrize("verify", [True, False])
def test_equal_entries_of_rows_are_joined(devices, rows, verify):
    model = Tokens()
    expected = loss_of_first_tokens(model(ROWS[:rows]), None)
    with ScatterOnceParallel(model, 2, devices(2), verify=verify) as engine:
        for _ in range(4):  # the second look takes equal parts, as the step does
            loss = engine.forward_backward(
                ROWS[:rows], criterion=loss_of_first_tokens, whole_batch=True
            )
            torch.testing.assert_close(loss, expected.detach())
        _, numbers = engine.eval()(ROWS[:rows])
        assert torch.equal(numbers, torch.arange(2).repeat(rows))
        mapped = engine.map(lambda replica, rows: replica(rows)[1], ROWS[:rows])
        assert torch.equal(mapped, numbers)


def first_tokens_by_table(output, _):
    tokens, _, table = output
    return tokens.square().mean() * len(table) + table.sum()


@pytest.mark.parametrize("size", [3, 4, 8])
def test_constant_is_returned_once(devices, size):
    """Four rows per micro-batch: each row seemed to have one or two of the entries."""
    model = Tokens(table_size=size)
    expected = first_tokens_by_table(model(ROWS), None).detach()
    with ScatterOnceParallel(model, 1, devices(2)) as engine:
        for _ in range(2):
            loss = engine.forward_backward(
                ROWS, criterion=first_tokens_by_table, whole_batch=True
            )
            torch.testing.assert_close(loss, expected)
        mapped = engine.map(lambda replica, rows: replica(rows)[2], ROWS)
        _, _, table = engine.eval()(ROWS)
    assert torch.equal(table, torch.ones(size))
    assert torch.equal(mapped, table)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("size", [6, 8, 12])
def test_constant_of_shares_of_other_sizes(devices, whole, size):
    """Of twelve entries, each of four rows seemed to have three, and of three four."""
    model = Tokens(table_size=size)
    rows = torch.arange(1.0, 15).double()[:, None]
    with ScatterOnceParallel(model, 2, devices(2), shares=[4, 3]) as engine:
        for select, position in ((True, 2), (lambda output: output[::-1], 0)):
            _, outputs = engine.forward_backward(
                rows,
                criterion=lambda output, _: output[0].square().mean(),
                return_outputs=select,
                whole_batch=whole,
            )
            sizes = [len(output[position]) for output in outputs]
            if not (whole and position == 0):  # nobody has looked at these
                assert sizes == [size, size]
    assert len(engine.last_step.plan.shares[0].micro_batches) > 1


def test_constant_returned_by_shares_is_not_joined():
    """Each replica has one micro-batch, so its output is returned as it is."""
    model = Tokens(table_size=8)
    with ScatterOnceParallel(model, 1, ["cpu"] * 2) as engine:
        _, outputs = engine.forward_backward(
            ROWS, criterion=lambda o, _: o[0].square().mean(), return_outputs=True
        )
    assert [len(table) for _, _, table in outputs] == [8, 8]
