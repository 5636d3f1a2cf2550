"""Metrics of parts of a batch combine into those of the whole batch, as trainers make
them from what they gather.
"""

import copy
import pickle

import pytest
import torch
from harness.oracle import randn

from scatterpar.integrations.trl_metrics import Gathered, metric_of_step

VALUES = randn(9, seed=1)
IS_COUNTED = torch.tensor([1, 0, 1, 1, 1, 0, 1, 1, 1], dtype=torch.bool)
PARTS = [slice(0, 4), slice(4, 5), slice(5, 6), slice(6, 9)]  # one has no terms
WEIGHTS = [4.0, 1.0, 1.0, 3.0]


def ratio_of_tensors(gather, values, counted):
    total = gather((values * counted).sum()).sum()
    terms = gather(counted.sum()).sum()
    return (total / terms).item() if terms > 0 else 0.0


def ratio_of_numbers(gather, values, counted):
    total = gather((values * counted).nansum()).nansum().item()
    terms = gather(counted.sum()).sum().item()
    return total / terms if terms > 0 else 0.0


# What a trainer appends, beside that of the whole batch.
METRICS = {
    "ratio of tensors": ratio_of_tensors,
    "ratio of numbers": ratio_of_numbers,
    "ratio of real numbers": lambda gather, values, _: (
        gather(values.sum()).sum().item() / gather(values.exp().sum()).sum().item()
    ),
    "mean of entries": lambda gather, values, _: gather(values).mean().item(),
    "mean of chosen entries": lambda gather, values, counted: (
        gather(values[counted]).mean().item()
    ),
    "converted": lambda gather, values, _: gather(values).float().cpu().mean().item(),
    "a function": lambda gather, values, _: torch.mean(gather(values)).item(),
    "mean of means": lambda gather, values, _: gather(values.mean()).mean().item(),
    "sum": lambda gather, values, _: gather(values).sum().item(),
    "count": lambda gather, _, counted: gather(counted.sum()).sum().item(),
    "least": lambda gather, values, _: gather(values).min().item(),
    "greatest": lambda gather, values, _: gather(values).max().item(),
    "not gathered": lambda _, values, __: values.mean().item(),
    # their mean is weighted by rows
    "scaled": lambda gather, values, _: (2 * gather(values)).mean().item(),
    "written": lambda gather, values, _: gather(values.mean()).add_(1).item(),
    "of entries": lambda gather, values, _: gather(values)[: len(values)].mean().item(),
}


@pytest.mark.contract
@pytest.mark.parametrize("name", METRICS)
def test_metrics_of_parts_are_those_of_all(name):
    metric = METRICS[name]
    parts = [metric(Gathered.of, VALUES[p].clone(), IS_COUNTED[p]) for p in PARTS]
    whole = metric(lambda tensor: tensor, VALUES.clone(), IS_COUNTED)
    pairs = list(zip(parts, WEIGHTS, strict=True))
    assert metric_of_step(pairs) == pytest.approx(whole, rel=1e-6)
    assert all(type(copy.copy(part)) in (int, float) for part in parts)
    assert pickle.loads(pickle.dumps(parts)) == pytest.approx(parts, nan_ok=True)


def test_gathered_tensors_are_tensors_as_others():
    """Only numbers know what they are made of; gradients arrive."""
    values = VALUES.clone().requires_grad_()
    gathered = Gathered.of(values)
    loss = (gathered * 2).square().mean()
    assert type(loss) is torch.Tensor
    loss.backward()
    assert torch.allclose(values.grad, 8 * VALUES / 9)
    assert type(gathered.max(dim=0).values) is torch.Tensor
    assert type(torch.cat([gathered, gathered])) is torch.Tensor
    assert type(torch.maximum(gathered, VALUES)) is torch.Tensor
    assert type(torch.max(gathered.sum(), VALUES.sum())) is torch.Tensor
    counted = Gathered.of(IS_COUNTED).sum().item()
    assert type(0 + counted // 2) is int
    assert Gathered.of(["texts"]) == ["texts"]


def test_other_numbers_of_some_calls_are_averaged():
    """Values that do not combine alike: a trainer that gathers in some calls only."""
    mean, total = Gathered.of(VALUES).mean().item(), Gathered.of(VALUES).sum().item()
    values = [(mean, 1.0), (total, 3.0)]
    assert metric_of_step(values) == pytest.approx((mean + 3 * total) / 4)
    assert metric_of_step([]) != metric_of_step([])  # NaN
