"""Processes of one attempt find each other, whatever an earlier attempt has left behind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from scatterpar.train.machines import backend, of_this_attempt

LIMIT = timedelta(seconds=120)


def attempt(store, size):
    with ThreadPoolExecutor(size) as pool:
        stores = pool.map(lambda rank: of_this_attempt(store, rank, size, LIMIT), range(size))
        return list(stores)


def test_every_attempt_has_keys_of_its_own():
    store = dist.HashStore()
    store.set("asked by 1", "from a process that died before it was answered")
    first = attempt(store, 3)
    first[0].set("address", "old")
    second = attempt(store, 3)
    second[2].set("address", "new")
    assert {part.get("address") for part in first} == {b"old"}
    assert {part.get("address") for part in second} == {b"new"}


def test_an_attempt_may_have_another_size():
    store = dist.HashStore()
    attempt(store, 3)[0].set("address", "old")
    (alone,) = attempt(store, 1)
    assert not alone.check(["address"])


def test_a_rank_that_does_not_come_is_named():
    store = dist.HashStore()
    store.set("asked by 2", "from a process that died")
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] of 3 did not come in time"):
        of_this_attempt(store, 0, 3, timedelta(seconds=0.1))


@pytest.mark.parametrize(
    ("card", "nccl", "expected"),
    [
        (None, True, "gloo"),
        ("cuda", True, "cpu:gloo,cuda:nccl"),
        ("cuda", False, "cpu:gloo,cuda:gloo"),
        ("xpu", False, "cpu:gloo,xpu:xccl"),
        ("mps", False, "cpu:gloo,mps:gloo"),
    ],
)
def test_tensors_on_the_host_always_have_a_backend(monkeypatch, card, nccl, expected):
    """Without a name torch made NCCL alone on a machine with cards, and no count could be sent."""
    found = torch.device(card) if card else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
    assert backend() == expected
