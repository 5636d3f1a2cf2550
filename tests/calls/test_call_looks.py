"""Looks at calls: rows that meet are told, rules of losses are found."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from harness.oracle import build, randint, randn

from calls.programs import Own, mlp
from scatterpar import ScatterOnceParallel

ROWS, LABELS = randn(12, 6), randint(3, 12)


def engine_of(forward, layout=("cpu", "cpu"), **options):
    net = build(lambda: Own(forward, net=mlp()))
    return ScatterOnceParallel(net, device_ids=list(layout), **options)


def test_right_call_is_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with engine_of(lambda self, rows: self.net(rows)) as engine:
            for _ in range(4):
                engine(ROWS).sum().backward()


def test_rows_that_meet_are_told():
    with (
        engine_of(lambda self, rows: self.net(rows).softmax(0)) as engine,
        pytest.warns(UserWarning, match="other outputs for a few rows"),
    ):
        engine(ROWS)


def test_loss_that_is_no_mean_is_refused_in_words():
    def forward(self, rows, labels):
        return F.cross_entropy(self.net(rows), labels).sqrt()

    with engine_of(forward) as engine:
        with pytest.raises(ValueError, match="the loss that the module returns"):
            engine(ROWS, LABELS)
        assert engine.module.net[0].weight.grad is None


def test_mean_over_rows_is_taken_without_a_look():
    def forward(self, rows):
        return self.net(rows).sum()

    with engine_of(forward, verify=False) as engine:
        found = engine(ROWS)
        torch.testing.assert_close(found, engine.module(ROWS) / 2)


def test_hooks_of_parameters_see_no_look():
    seen = []
    with engine_of(lambda self, rows: self.net(rows)) as engine:
        engine.module.net[0].weight.register_hook(seen.append)
        engine(ROWS)
    assert not seen
