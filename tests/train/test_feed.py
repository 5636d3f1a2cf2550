"""Batches are read ahead by workers, in order, and broken images are named."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace

import pytest
import torch
from harness.pictures import broken_folder, truncate, write_folder

from scatterpar.train.command_line import Options
from scatterpar.train.data import BatchRequest, open_data
from scatterpar.train.data_parts import TEST, TRAIN
from scatterpar.train.feed import PIECE, BrokenError, Feed, FeedError

pytestmark = [pytest.mark.pictures, pytest.mark.draws]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("pictures"), train=60, size=(32, 32))


def opened(folder, **options):
    return open_data(Options(data=str(folder), **options))


def requests(batch=70, epochs=2):
    found = []
    for epoch in range(epochs):
        order = torch.randperm(180, generator=torch.Generator().manual_seed(epoch))
        found += [BatchRequest(TRAIN, rows, epoch) for rows in order.split(batch)]
        found += [BatchRequest(TEST, torch.arange(12))]
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_requests_may_be_replaced(folder, workers):
    data, rows = opened(folder, workers=workers), torch.arange(120)
    first, second = (
        [BatchRequest(TRAIN, part) for part in rows.split(size)] for size in (50, 30)
    )
    with Feed(data, iter(first)) as feed:
        assert feed.take()[0].rows.tolist() == rows[:50].tolist()
        feed.request(second)
        for request in second:
            found, batch = feed.take()
            assert torch.equal(found.rows, request.rows)
            assert torch.equal(batch.images, data[request].images)


def test_broken_picture_and_label_left_out(tmp_path):
    data, file = broken_folder(tmp_path)
    data.options, rows = replace(data.options, workers=1), torch.arange(36)
    with Feed(
        data, [BatchRequest(TRAIN, rows), BatchRequest(TRAIN, rows[1:2])]
    ) as feed:
        (_, found), (_, nothing) = feed.take(), feed.take()
        assert feed.broken == {file: 2}
    assert len(nothing.images) == len(nothing.labels) == 0
    readable = data[BatchRequest(TRAIN, torch.cat([rows[:1], rows[2:]]))]
    assert all(map(torch.equal, found[:2], readable[:2]))


@pytest.mark.parametrize("workers", [0, 1])
def test_more_broken_pictures_than_may_be_left_out(tmp_path, workers, capsys):
    """With a higher limit the same feed names all of them."""
    write_folder(tmp_path, train=40, test=8, size=(32, 32))
    files = [min((tmp_path / "train" / "Bag").iterdir())]
    files += [
        max((tmp_path / part / "Trouser").iterdir()) for part in ("train", "test")
    ]
    for file in files:
        truncate(file)
    every = [
        BatchRequest(TEST, torch.arange(24)),
        BatchRequest(TRAIN, torch.arange(120)),
    ]
    with Feed(opened(tmp_path, workers=workers), every, limit=1) as feed:
        feed.take()
        with pytest.raises(
            BrokenError, match=r"Bag.*cannot be read as an image: .*trun"
        ):
            feed.take()
        feed.limit = 3
        feed.request(every)
        for _ in every:
            feed.take()
        assert sorted(feed.broken) == sorted(map(str, files))
    assert capsys.readouterr().out.count("left out: ") == 3


def test_killed_worker_told_in_words(folder):
    many = requests(batch=60, epochs=400)
    others = multiprocessing.active_children()  # the ranks that other tests use
    with Feed(opened(folder, workers=2), iter(many)) as feed:
        feed.take()
        for process in set(multiprocessing.active_children()).difference(others):
            process.kill()
        words = r"images cannot be read: .* \(fewer --workers need less memory\)"
        with pytest.raises(FeedError, match=words):
            [feed.take() for _ in many[1:]]


@pytest.mark.parametrize(
    "augmentation",
    [
        {"augment": "none", "erase": 1.0},
        {"mixup": 0.2, "cutmix": 1.0},
        {"augment": "rand-m9-mstd0.5-inc1"},
    ],
)
def test_any_number_of_workers_reads_same(folder, augmentation):
    def everything(workers, seed=1, **options):
        with Feed(
            opened(folder, workers=workers, seed=seed, **options), requests()
        ) as feed:
            return [feed.take()[1] for _ in requests()]

    alone, (plain, *_) = everything(0, **augmentation), everything(0, seed=0)
    assert [len(batch.images) for batch in alone] == [70, 70, 40, 12] * 2
    for one, other in zip(alone, everything(2, **augmentation), strict=True):
        assert all(map(torch.equal, one[:2], other[:2]))
    assert alone[0].images.dtype == torch.uint8
    assert not torch.equal(alone[0].images, plain.images)
    if "mixup" in augmentation:
        labels = alone[0].labels
        assert labels.shape == (70, 3)
        torch.testing.assert_close(labels.sum(1), torch.ones(70))
        assert len(labels) > PIECE
