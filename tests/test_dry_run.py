"""A dry run of an optimizer: what is sampled, cut, copied and put back."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim

from scatterpar import ScatterOnceParallel, ShardedOptimizer
from scatterpar.dry_run import sampled, stand_in_for, stepping_on

APART = ["cpu:0", "cpu:1"]


def parameter(*shape, dtype=torch.float32):
    return nn.Parameter(torch.ones(shape, dtype=dtype))


def test_two_of_each_kind_are_sampled():
    matrices = [parameter(9, 9), parameter(2, 3), parameter(3, 2), parameter(4, 4)]
    vector, half = parameter(5), parameter(5, dtype=torch.bfloat16)
    frozen, empty = parameter(1).requires_grad_(False), parameter(0)
    groups = [
        {"params": [*matrices, vector, half, frozen, empty], "lr": 0.1, "muon": True},
        {"params": [parameter(7, 7)], "lr": 0.2, "muon": True},  # of the same kind
        {"params": [parameter(7, 1)], "lr": 0.2, "muon": False},
    ]
    samples = sampled(groups, 4096)
    expected = [*matrices[1:3], vector, half, groups[2]["params"][0]]
    assert set(map(id, samples)) == set(map(id, expected))
    assert all(sample.shape == shape for sample, shape in samples.items())


@pytest.mark.parametrize(
    ("shape", "cut"),
    [
        ((50257, 768), (50, 48)),
        ((100000,), (3125,)),
        ((64, 3, 7, 7), (16, 3, 7, 7)),
        ((512, 512, 3, 3), (16, 16, 3, 3)),
    ],
)
def test_large_ones_are_cut(shape, cut):
    large = parameter(*shape)
    (found,) = sampled([{"params": [large]}], 4096).values()
    assert found == cut
    (whole,) = sampled([{"params": [large]}], 0).values()
    assert whole == shape


def test_attributes_and_state_come_back():
    trained, other = parameter(2), parameter(2)
    optimizer = optim.SGD([trained, other], lr=0.1, momentum=0.9)
    group = optimizer.param_groups[0]
    stand_in = stand_in_for(trained, trained.detach().clone())
    trained.grad = stand_in.grad = torch.ones(2)
    trained.label = "before"
    with stepping_on(optimizer, {trained: stand_in}):
        optimizer.step()
        optimizer.param_groups[0]["seen"] = 3
        stand_in.label = "after"
        assert all(p is not trained for p in optimizer.param_groups[0]["params"])
    assert optimizer.param_groups == [group]
    assert group["params"][0] is trained
    assert (group["seen"], trained.label) == (3, "after")
    assert list(optimizer.state) == [trained]
    assert torch.equal(trained, torch.ones(2))
    assert not torch.equal(stand_in, trained)


def test_failed_step_leaves_state_and_attributes():
    trained = parameter(2)
    optimizer = optim.SGD([trained], lr=0.1, momentum=0.9)
    state = optimizer.state
    stand_in = stand_in_for(trained, trained.detach().clone())
    stand_in.grad = torch.ones(2)

    def fail():
        with stepping_on(optimizer, {trained: stand_in}):
            optimizer.step()
            stand_in.label = "after"
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail()
    assert optimizer.state is state
    assert optimizer.param_groups[0]["params"] == [trained]
    assert not vars(trained)


class OfRank(optim.SGD):
    """Needs matrices with as many columns as its rank."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for trained in group["params"]:
                trained[:, 99].sub_(trained.grad[:, 99])


@pytest.mark.parametrize(
    ("kind", "module"),
    [(OfRank, nn.Linear(100, 400, bias=False)), (optim.SparseAdam, nn.Embedding(9, 4))],
)
def test_whole_sizes_and_sparse_gradients_are_tried(kind, module):
    with ScatterOnceParallel(module, 1, APART) as engine:
        ShardedOptimizer(engine, kind)


@pytest.mark.draws
def test_groups_and_names_reach_the_copies():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    asked = []

    class Asks(optim.SGD):
        def __init__(self, params, lr):
            super().__init__(params, lr)
            asked.append([g["params"][0].shape for g in self.param_groups])
            asked.append([g.get("decays") for g in self.param_groups])

    weights = [p for p in model.parameters() if p.ndim == 2]
    biases = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": iter(weights), "decays": True},
        {"params": biases, "decays": False},
    ]
    with ScatterOnceParallel(model, 1, APART) as engine:
        optimizer = ShardedOptimizer(engine, Asks, iter(groups), lr=0.1)
        assert len(optimizer.param_groups[0]["params"]) == 2
        named = ShardedOptimizer(engine, optim.AdamW, model.named_parameters())
        assert named.param_groups[0]["param_names"][0] == "0.weight"
    assert asked == [[(4, 3), (4,)], [True, False]]
