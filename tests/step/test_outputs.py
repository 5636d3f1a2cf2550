"""Outputs that have nothing to do with rows, such as a codebook, are no rows of any batch."""

from __future__ import annotations

import pytest
import torch
from harness.models import FEATURES
from harness.oracle import assert_close, assert_step, build, gradients, randn, whole_batch
from harness.rank_processes import run_on_ranks
from torch import nn

from scatterpar import ScatterOnceParallel

ENTRIES, WIDTH, TOKENS = 64, 4, 3


class Quantizer(nn.Module):
    """Gives the code of every row, a flat list of tokens of every row, and its codebook."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(FEATURES, WIDTH)
        self.codebook = nn.Parameter(torch.randn(ENTRIES, WIDTH))

    def forward(self, rows):
        codes = self.encode(rows)
        tokens = codes.repeat_interleave(TOKENS, 0)
        return {"codes": codes, "tokens": tokens, "codebook": self.codebook * 1.0}


def quantizer():
    return build(Quantizer)


def loss(outputs, _):
    distances = (outputs["tokens"] @ outputs["codebook"].T).logsumexp(1)
    return distances.std() + outputs["codes"].square().mean() + outputs["codebook"].std(0).sum()


SIZES = [(1, 2, 32), (2, 4, 32), (2, 1, 16), (3, 2, 31), (1, 1, 8), (2, 2, 2)]


@pytest.mark.parametrize(("replicas", "accum", "rows"), SIZES)
def test_a_criterion_of_the_whole_batch_sees_one(devices, replicas, accum, rows):
    """It saw one for each micro-batch whose size divides the codebook's."""
    with ScatterOnceParallel(quantizer(), accum, devices(replicas)) as engine:
        assert_step(engine, randn(rows, FEATURES), None, loss, whole_batch=True)


@pytest.mark.parametrize(("replicas", "accum", "rows"), SIZES)
def test_inference_gives_one(devices, replicas, accum, rows):
    model, inputs = quantizer().eval(), randn(rows, FEATURES)
    with ScatterOnceParallel(model, accum, devices(replicas)) as engine, torch.no_grad():
        found, expected = engine(inputs), model(inputs)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(found[name], value, name)


def test_returned_outputs_have_one_for_each_replica(devices):
    model, batch = quantizer(), (randn(16, FEATURES), None, lambda o, _: o["codes"].square().mean())
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        _, found = engine.forward_backward(*batch, return_outputs=lambda o: o["codebook"])
    for codebook in found:
        assert_close(codebook, model.codebook.detach(), "codebook")


def each_rank(group):
    model, rows = quantizer(), slice(0, 16) if group.rank() else slice(16, 24)
    with ScatterOnceParallel(model, 2, ["cpu"] * 2, process_group=group) as engine:
        value = engine.forward_backward(randn(24, FEATURES)[rows], None, loss, whole_batch=True)
    return value, gradients(model)


def test_ranks_show_each_other_one():
    expected, its = whole_batch(quantizer(), randn(24, FEATURES).roll(8, 0), None, loss)
    for value, grads in run_on_ranks(2, each_rank):
        assert_close(value, expected, "loss")
        for name, gradient in its.items():
            assert_close(grads[name], gradient, name)


class Ragged(nn.Module):
    """As many entries as some rule of its own says, which sizes of micro-batches divide."""

    def forward(self, rows):
        return rows.new_full((len(rows) * (2 if len(rows) > 4 else 1),), float(len(rows)))


def test_one_ratio_holds_for_all_micro_batches(devices):
    """Rows that have two entries each were joined with rows that have one."""
    with (
        ScatterOnceParallel(Ragged(), 1, devices(2)).eval() as engine,
        pytest.raises(ValueError, match=r"those of 5 and 4 rows, cannot be joined along dim=0"),
    ):
        engine(randn(9, FEATURES))
