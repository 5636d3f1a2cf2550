"""Batches are read ahead by workers, in order; unreadable images are named."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
from harness.pictures import truncate, write_folder

from scatterpar.train.command_line import Options
from scatterpar.train.data import TRAIN, VAL, BatchRequest, open_data
from scatterpar.train.feed import Feed, FeedError

pytestmark = [pytest.mark.pictures, pytest.mark.draws]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("pictures"), train=60, size=(32, 32))


def opened(folder, **options):
    return open_data(Options(data=str(folder), **options))


def requests(batch=70, epochs=2):
    made = []
    for epoch in range(epochs):
        order = torch.randperm(180, generator=torch.Generator().manual_seed(epoch))
        made += [BatchRequest(TRAIN, rows, epoch) for rows in order.split(batch)]
        made += [BatchRequest(VAL, torch.arange(12))]
    return made


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_requests_may_be_replaced(folder, workers):
    data, rows = opened(folder, workers=workers), torch.arange(120)
    first, second = (
        [BatchRequest(TRAIN, part) for part in rows.split(size)] for size in (50, 30)
    )
    with Feed(data, iter(first)) as feed:
        assert feed.take()[0].rows.tolist() == rows[:50].tolist()
        feed.request(second)
        for request in second:
            taken, batch = feed.take()
            assert torch.equal(taken.rows, request.rows)
            assert torch.equal(batch.images, data[request].images)


def test_unreadable_picture_is_an_error_or_left_out(tmp_path):
    """A file may break, or its disk be away, after all were read once."""
    data = opened(write_folder(tmp_path, ending="jpg", size=(60, 60)), workers=0)
    rows = torch.arange(36)
    part = data.parts[TRAIN]
    file = part.pictures[1]
    truncate(Path(file))
    readable = data[BatchRequest(TRAIN, torch.cat([rows[:1], rows[2:]]))]
    request = [BatchRequest(TRAIN, rows), BatchRequest(TRAIN, rows[1:2])]
    with (
        Feed(data, request) as feed,
        pytest.raises(FeedError, match="cannot be read any") as caught,
    ):
        feed.take()
    assert file in str(caught.value)
    with Feed(data, request, are_all_readable=False) as feed:
        (_, batch), (_, nothing) = feed.take(), feed.take()
    assert len(nothing.images) == len(nothing.labels) == 0
    assert [name for name, _ in batch.broken] == [file]
    assert all(map(torch.equal, batch[:2], readable[:2]))


def test_killed_worker_told_in_words(folder):
    many = requests(batch=60, epochs=100)
    others = multiprocessing.active_children()  # the ranks that other tests use
    with Feed(opened(folder, workers=1), iter(many)) as feed:
        feed.take()
        for process in set(multiprocessing.active_children()).difference(others):
            process.kill()
        words = r"images cannot be read: .* \(fewer --workers need less memory\)"
        with pytest.raises(FeedError, match=words):
            [feed.take() for _ in many[1:]]


@pytest.mark.parametrize(
    "augment", ["rand-m9-mstd0.5-inc1", pytest.param("crop", marks=pytest.mark.slow)]
)
def test_any_number_of_workers_reads_same(folder, augment):
    def everything(workers, seed=1):
        data = opened(folder, workers=workers, seed=seed, augment=augment)
        with Feed(data, requests()) as feed:
            return [feed.take()[1] for _ in requests()]

    alone, (other_seed, *_) = everything(0), everything(0, seed=0)
    assert [len(batch.images) for batch in alone] == [70, 70, 40, 12] * 2
    for one, other in zip(alone, everything(2), strict=True):
        assert all(map(torch.equal, one[:2], other[:2]))
    assert alone[0].images.dtype == torch.uint8
    assert not torch.equal(alone[0].images, other_seed.images)
