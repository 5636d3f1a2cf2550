"""Batches are read ahead, the same by any number of workers; what cannot be read is named."""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import replace

import pytest
import torch
from harness.pictures import broken_folder, write_folder
from torch.utils.data import DataLoader

from scatterpar.train import feed as feed_module
from scatterpar.train.data import TEST, TRAIN, Request, open_data
from scatterpar.train.feed import PIECE, Feed, FeedError
from scatterpar.train.options import Options

pytestmark = [pytest.mark.pictures, pytest.mark.draws]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("pictures"), train=60)


def requests(number=180, batch=70, epochs=2):
    found = []
    for epoch in range(epochs):
        order = torch.randperm(number, generator=torch.Generator().manual_seed(epoch))
        found += [Request(TRAIN, rows, epoch) for rows in order.split(batch)]
        found += [Request(TEST, torch.arange(12))]
    return found


def everything(data, workers):
    with Feed(data, iter(requests()), workers=workers) as feed:
        return [feed.take()[1] for _ in requests()]


def test_the_next_batch_is_read_while_this_one_is_used(folder, monkeypatch):
    joined, read = feed_module._joined, []
    monkeypatch.setattr(feed_module, "_joined", lambda *x: (joined(*x), read.append(0))[0])
    with Feed(open_data(Options(data=str(folder))), iter(requests()), workers=2) as feed:
        for number, request in enumerate(requests(), 1):
            assert torch.equal(feed.take()[0].rows, request.rows)
            deadline = time.monotonic() + 60
            while len(read) < min(number + 1, len(requests())):  # though nobody waits for it
                assert time.monotonic() < deadline
                time.sleep(0.01)
        assert feed.waited > 0


@pytest.mark.parametrize("workers", [0, 2])
def test_other_requests_may_come_than_the_first_ones(folder, workers):
    data, rows = open_data(Options(data=str(folder))), torch.arange(120)
    first, second = ([Request(TRAIN, part) for part in rows.split(size)] for size in (50, 30))
    with Feed(data, iter(first), workers) as feed:
        assert feed.take()[1].rows.tolist() == rows[:50].tolist()
        feed.request(second)
        for request in second:
            _, found = feed.take()
            assert torch.equal(found.rows, request.rows)
            assert torch.equal(found.images, data[request].images)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_picture_names_itself_and_may_be_left_out(tmp_path, workers):
    data, file = broken_folder(tmp_path)
    rows = torch.arange(36)
    words = rf"{file} cannot be read as an image: .*truncated.* \(--skip-broken 1 or more leaves"
    with Feed(data, [Request(TRAIN, rows)], workers) as feed, pytest.raises(FeedError, match=words):
        feed.take()
    wanted = [Request(TRAIN, rows), Request(TRAIN, rows[1:2]), Request(TRAIN, rows)]
    with Feed(data, wanted, workers, skip_broken=1, warn=[].append) as feed:
        for count in (35, 0, 35):
            _, found = feed.take()
            assert len(found.images) == len(found.labels) == len(found.rows) == count
        assert found.rows.tolist() == [0, *range(2, 36)]
        assert feed.broken == {file: 3}


def test_a_killed_worker_is_said_in_words(folder):
    many = requests(batch=60, epochs=400)
    others = multiprocessing.active_children()  # the ranks that other tests use
    with Feed(open_data(Options(data=str(folder))), iter(many), workers=2) as feed:
        feed.take()
        workers = set(multiprocessing.active_children()).difference(others)
        assert workers
        for process in workers:
            process.kill()
        words = r"worker process that reads images has ended by itself .*fewer --workers need less"
        with pytest.raises(FeedError, match=words):
            [feed.take() for _ in many[1:]]


@pytest.mark.parametrize(
    ("error", "seen", "words"),
    [
        (EOFError(), FeedError, r"has ended by itself \(EOFError\);"),
        (ConnectionResetError(104, "reset"), FeedError, "has ended by itself .*reset"),
        (RuntimeError("Caught RuntimeError in DataLoader worker process 0."), RuntimeError, "^C"),
    ],
)
def test_a_worker_that_ends_while_it_starts_or_sends_is_said_in_words(
    folder, monkeypatch, error, seen, words
):
    """As by a signal to all processes at the start."""

    def ended(self):
        raise error

    monkeypatch.setattr(DataLoader, "__iter__", ended)
    data = open_data(Options(data=str(folder)))
    with Feed(data, requests(), workers=1) as feed, pytest.raises(seen, match=words):
        feed.take()


@pytest.mark.parametrize(
    "augmentation",
    [
        Options(),
        Options(augment="original", erase=0.5),
        Options(augment="none", erase=1.0),
        Options(mixup=0.2, cutmix=1.0),
        Options(augment="rand-m9-mstd0.5-inc1"),
    ],
)
def test_any_number_of_workers_reads_the_same(folder, augmentation):
    data = open_data(replace(augmentation, data=str(folder), seed=1))
    alone, plain = everything(data, workers=0), everything(open_data(Options(data=str(folder))), 0)
    assert [len(batch.rows) for batch in alone] == [70, 70, 40, 12] * 2
    for workers in (1, 3) if augmentation == Options() else (2,):
        for one, other in zip(alone, everything(data, workers), strict=True):
            assert all(map(torch.equal, one[:3], other[:3]))
    first = alone[0]
    assert first.images.dtype == torch.uint8
    assert not torch.equal(first.images, plain[0].images)
    if augmentation.mixup:
        assert first.labels.shape == (70, 3)
        torch.testing.assert_close(first.labels.sum(1), torch.ones(70))
        assert len(first.labels) > PIECE
