"""Whose objects and functions are: one row for each answer."""

from __future__ import annotations

import argparse
import collections
import csv
import enum
import functools
import io
import multiprocessing
import queue
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

from scatterpar.objects.whose import (
    RULES,
    Whose,
    is_user_class,
    is_user_function,
    is_writer,
    whose,
)


class Meter:
    def __init__(self):
        self.total = 0.0

    def __call__(self, output, targets):
        return output.sum()


class Pairs(Dataset):
    pass


class Stage(enum.Enum):
    FIRST = 1


class Slots:
    __slots__ = ("calls",)


class Callback:
    """Its class is the user's, although loops call it."""


def of_library(name, **attributes):
    """An object of a class that a library has defined."""
    kind = type(name, (), {"__module__": "torch.optim"})
    value = kind()
    vars(value).update(attributes)
    return value


OBJECTS = {
    "an object": (Meter(), Whose.USER),
    "slots": (Slots(), Whose.USER),
    "a callback": (Callback(), Whose.USER),
    "a namespace": (SimpleNamespace(net=nn.Identity(), of=Meter()), Whose.USER),
    "arguments": (argparse.Namespace(rate=0.1), Whose.USER),
    "a UserDict": (collections.UserDict(a=1), Whose.USER),
    "a UserList": (collections.UserList([1]), Whose.USER),
    "a library's meter": (of_library("AverageMeter", val=0, sum=0.0), Whose.USER),
    "a library's object": (of_library("Accelerator", of=Meter()), Whose.LIBRARY),
    "a source of numbers": (random.Random(0), Whose.USER),
    "an iterator": (iter([1]), Whose.LIBRARY),
    "an array": (np.zeros(2), Whose.LIBRARY),
    "a data set": (Pairs(), Whose.DATA),
    "a loader": (DataLoader(Pairs(), sampler=[0]), Whose.DATA),
    "a sampler": (RandomSampler([1]), Whose.DATA),
    "a trainer": (of_library("PairTrainer"), Whose.DATA),
    "a module of data": (of_library("LightningDataModule"), Whose.DATA),
    "an optimizer": (torch.optim.SGD([torch.zeros(1)], 0.1), Whose.DATA),
    "a constant": (Stage.FIRST, Whose.DATA),
    "csv's writer": (csv.writer(io.StringIO()), Whose.WRITER),
    "csv's writer of dicts": (csv.DictWriter(io.StringIO(), ["a"]), Whose.USER),
    "TensorBoard's writer": (of_library("SummaryWriter"), Whose.WRITER),
    "a writer inside of it": (of_library("EventFileWriter"), Whose.WRITER),
    "a file": (io.StringIO(), Whose.DATA),
    "a lock": (threading.Lock(), Whose.LIBRARY),
    "a number of processes": (multiprocessing.Value("i", 0), Whose.USER),
    "a thread": (threading.Thread(), Whose.THREADS),
    "a lock's holder": (SimpleNamespace(lock=threading.RLock()), Whose.USER),
    "a queue's holder": (SimpleNamespace(queue=queue.Queue()), Whose.USER),
    "a thread's holder": (SimpleNamespace(of=threading.Thread()), Whose.THREADS),
    "a pool's holder": (SimpleNamespace(of=ThreadPoolExecutor()), Whose.THREADS),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_object_is_whose(name):
    value, expected = OBJECTS[name]
    assert whose(value) is expected


def test_each_rule_has_a_reason_and_an_object():
    endings = [rule.ending for rule in RULES]
    names = [
        base.__name__ for value, _ in OBJECTS.values() for base in type(value).__mro__
    ]
    assert all(rule.reason for rule in RULES)
    for ending in endings:
        assert any(name.endswith(ending) for name in names), ending


@pytest.mark.parametrize("ending", [rule.ending for rule in RULES])
def test_rules_are_for_classes_of_libraries(ending):
    """A user's class of such a name is the user's, unless it derives from a
    library's.
    """
    users = type(f"My{ending}", (), {"__module__": "of_a_user"})
    derived = type("Derived", (type(of_library(ending)),), {"__module__": "of_a_user"})
    (rule,) = [rule for rule in RULES if rule.ending == ending]
    assert whose(users()) is Whose.USER
    assert not is_writer(users)
    assert whose(derived()) is rule.whose


def users(output, targets):
    return output.sum()


class Layer(nn.Module):
    def forward(self, rows):
        return rows


class WithoutForward(nn.Linear):
    """Methods of the base may call those that this class has beside it."""


def with_replaced_forward():
    layer = nn.Linear(1, 1)
    layer.forward = users
    return layer


FUNCTIONS = {
    "function": (users, True),
    "lambda": (lambda x: x, True),
    "method": (Meter().__call__, True),
    "object": (Meter(), True),
    "partial": (functools.partial(users, targets=1), True),
    "decorated by torch": (torch.no_grad()(users), True),
    "cached": (functools.lru_cache(users), True),
    "class": (Meter, True),
    "module": (nn.Sequential(Layer()), True),
    "class of a module": (WithoutForward(1, 1), True),
    "replaced forward": (with_replaced_forward(), True),
    "torch's function": (nn.functional.cross_entropy, False),
    "torch's operator": (torch.add, False),
    "torch's module": (nn.Sequential(nn.Linear(1, 1)), False),
    "partial of torch's": (functools.partial(nn.functional.mse_loss), False),
    "python's": (len, False),
    "nothing": (None, False),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_is_users(name):
    function, expected = FUNCTIONS[name]
    assert is_user_function(function) is expected

    assert is_user_class(Meter)
    assert not is_user_class(nn.Linear)
