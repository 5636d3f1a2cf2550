"""The accelerators of a rank, of those that it and other ranks see."""

from __future__ import annotations

from unittest import mock

import pytest
from harness.models import linear
from harness.rank_processes import run_on_ranks

from scatterpar import ScatterOnceParallel
from scatterpar.distributed.visible_accelerators import accelerators_of_rank

pytestmark = pytest.mark.core

NAMES = "scatterpar.distributed.visible_accelerators.visible_identities"


def part_on(group, by_rank, device_ids=None):
    """What a rank has that sees these accelerators, or the words of its error."""
    seen = by_rank[group.rank()]
    with mock.patch(NAMES, return_value=seen):
        try:
            part = accelerators_of_rank(group, device_ids)
        except ValueError as error:
            return str(error)
    return part if part is None else list(part)


@pytest.mark.parametrize(
    ("by_rank", "parts"),
    [
        (["abcd", "abcd"], [[0, 1], [2, 3]]),
        # By CUDA_VISIBLE_DEVICES, or torchrun --virtual-local-rank: half of them were
        # idle, and a single one was refused.
        (["ab", "cd"], [[0, 1], [0, 1]]),
        (["a", "b"], [[0], [0]]),
        (["abcd", "abcd", "e"], [[0, 1], [2, 3], [0]]),
        (["a", "", "b"], [[0], None, [0]]),
        # Some in common: the launcher's variables say which part.
        (["ab", "bc"], [None, None]),
        (["", ""], [None, None]),
    ],
)
def test_rank_has_its_part_of_what_it_sees(by_rank, parts):
    by_rank = [list(seen) for seen in by_rank]
    assert run_on_ranks(len(by_rank), part_on, by_rank) == parts


def test_more_ranks_than_accelerators_are_refused():
    for words in run_on_ranks(2, part_on, [["a"], ["a"]]):
        assert "2 processes run on this machine, and 1 accelerators" in words


def part_of_some(group):
    """Rank 0 names its devices; the others wait for nobody."""
    return part_on(group, [["a"], ["a"]], None if group.rank() else [0])


def test_rank_with_device_ids_keeps_them():
    assert run_on_ranks(2, part_of_some) == [[0], [0]]


def engine_on(group):
    with (
        mock.patch(NAMES, return_value=[f"of-rank-{group.rank()}"]),
        mock.patch("scatterpar.engine.resolve", side_effect=KeyError) as resolved,
        pytest.raises(KeyError),
    ):
        ScatterOnceParallel(linear(), process_group=group)
    ((device_ids,), _) = resolved.call_args
    return list(device_ids)


def test_engine_has_the_part_of_its_rank():
    assert run_on_ranks(2, engine_on) == [[0], [0]]


def test_nothing_is_asked_without_a_group():
    with mock.patch(NAMES, side_effect=AssertionError):
        assert accelerators_of_rank(None, None) is None
