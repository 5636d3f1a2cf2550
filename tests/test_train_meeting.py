"""Processes of one attempt find each other, whatever an earlier attempt has left behind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from scatterpar.train.meeting import of_this_attempt

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
