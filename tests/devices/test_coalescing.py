"""Copies in chunks, and the order of the sum.

Chunks are of a few bytes here, so that small models are cut as large ones are.
"""

from __future__ import annotations

import pytest
import torch
from harness.agree import agree
from harness.models import CLASSES, FEATURES, Of, mlp
from harness.module_cases import CASES
from harness.oracle import assert_step, build, randint, randn
from harness.pairwise import few_of
from torch import nn

from scatterpar import ScatterOnceParallel
from scatterpar.devices import coalescing, fingerprints
from scatterpar.devices.transfers import Transfers
from scatterpar.step.reduce import sum_in_order

BATCH = randn(16, FEATURES), randint(CLASSES, 16)
CRITERION = nn.CrossEntropyLoss()


@pytest.fixture
def tiny_chunks(monkeypatch):
    monkeypatch.setattr(coalescing, "CHUNK_BYTES", 96)
    monkeypatch.setattr(fingerprints, "_WORDS_IN_THE_HOST", 5)


MIXED = [
    "lstm",
    "complex",
    "conjugates",
    "several dtypes",
    "layouts, torch.float32",
    "batch norm",
]
MIXED += ["overlapping buffer, transposed", "sparse gradients", "unused by some"]


@pytest.mark.parametrize("alone", few_of([coalescing.ALONE_BYTES, 50], [50]))
@pytest.mark.parametrize("name", MIXED)
def test_copies_in_chunks_are_exact(tiny_chunks, name, alone, monkeypatch):
    """Dtypes and strides of all sorts."""
    monkeypatch.setattr(coalescing, "ALONE_BYTES", alone)
    agree(CASES[name], "engine", "virtual")


@pytest.mark.contract
@pytest.mark.parametrize("replicas", few_of([2, 3, 4, 5, 8], [5, 8]))
def test_sum_has_same_bits_every_time(replicas, devices, monkeypatch):
    """Whatever the chunks, and whoever is ready first."""
    found = []
    for chunk in (2**26, 96):
        monkeypatch.setattr(coalescing, "CHUNK_BYTES", chunk)
        model = mlp().float()
        with ScatterOnceParallel(model, 2, devices(replicas)) as engine:
            engine.forward_backward(BATCH[0].float(), BATCH[1], CRITERION)
        found.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.contract
def test_four_gradients_added_in_pairs(devices):
    """(0 + 1) + (2 + 3) is 0: in float32 1e8 + 1 is 1e8. From left to right it would be
    1.
    """
    rows = torch.tensor([[1e8], [1.0], [-1e8], [1.0]])
    model = build(lambda: nn.Linear(1, 1, bias=False)).float()
    with ScatterOnceParallel(model, 1, devices(4), verify=False) as engine:
        engine.forward_backward(
            rows, criterion=lambda out, _: out.sum(), reduction="sum"
        )
    assert model.weight.grad.item() == 0.0


def test_other_strides_added_by_element():
    """In chunks of memory, elements of other places would be added up."""
    one, turned = randn(3, 4), randn(4, 3, seed=1).T
    memories = [torch.device("cpu:0"), torch.device("cpu:1")]
    given = [{0: one.clone()}, {0: turned.clone()}]
    found = sum_in_order(given, memories, Transfers(), in_place=True)
    assert torch.equal(found[0], one + turned)


CROSSINGS = {"00000000": 0, "00001111": 1, "00112233": 3, "01234567": 7, "00112234": 4}
CROSSINGS |= {"00011122": 3, "01111111": 3, "01010101": 4}


@pytest.mark.parametrize("layout", CROSSINGS)
def test_gradients_cross_once_per_far_pair(layout):
    """Of the fixed tree over replicas: once for each other device, where blocks are
    even.
    """
    model = mlp()
    size = sum(p.nbytes for p in model.parameters())
    with ScatterOnceParallel(model, 1, [f"cpu:{i}" for i in layout]) as engine:
        assert_step(engine, *BATCH, CRITERION)
        assert engine.last_step.bytes["reduce"] == CROSSINGS[layout] * size


@pytest.mark.parametrize("accum", [1, 3])
def test_tensors_aligned_as_allocations(devices, accum):
    """A kernel that finds one at 60 of 64 bytes may go about the same sum in another
    order.
    """
    places = []

    def look(module, inputs):
        given = [inputs, *module.parameters(), *module.buffers()]
        places.extend(tensor.data_ptr() % 64 for tensor in given)
        return module.layers(inputs)

    model = Of(look, layers=mlp().float(), three=nn.Buffer(torch.ones(3)))
    with ScatterOnceParallel(model, accum, devices(3)) as engine:
        engine.forward_backward(BATCH[0].float(), BATCH[1], CRITERION)
    assert len(places) >= 6 * 3 * accum
    assert set(places) == {0}
