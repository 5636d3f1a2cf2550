"""Learning rates against formulas written by hand, parameter groups against plain
names.
"""

import copy

import pytest
import torch
from harness.models import Of
from torch import nn
from torch.optim import lr_scheduler

from scatterpar.recipe import (
    gradual_warmup,
    linear_scaled_lr,
    weight_decay_groups,
    zero_init_residual,
)

pytestmark = pytest.mark.draws

TARGETS = (0.8, 0.2)
WARMUP = 5
START = 0.1

# name -> (a scheduler on the optimizer, the factor on the target that its step t has)
AFTER = {
    "nothing": (lambda o: None, lambda t: 1.0),
    "StepLR": (lambda o: lr_scheduler.StepLR(o, 3, 0.5), lambda t: 0.5 ** (t // 3)),
    "LambdaLR from a half on": (
        lambda o: lr_scheduler.LambdaLR(o, lambda t: 0.5 / (1 + t)),
        lambda t: 0.5 / (1 + t),
    ),
    "SequentialLR": (
        lambda o: lr_scheduler.SequentialLR(
            o,
            [lr_scheduler.ConstantLR(o, 1.0), lr_scheduler.ExponentialLR(o, 0.5)],
            [2],
        ),
        lambda t: 1.0 if t < 2 else 0.5 ** (t - 2),
    ),
}


def make_optimizer():
    parameters = [torch.zeros(1, requires_grad=True) for _ in TARGETS]
    groups = [
        {"params": [p], "lr": lr} for p, lr in zip(parameters, TARGETS, strict=True)
    ]
    return torch.optim.SGD(groups, lr=1.0)


def make_warmup(optimizer, after_name):
    return gradual_warmup(optimizer, WARMUP, START, AFTER[after_name][0](optimizer))


def rates(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


def advance(optimizer, scheduler):
    optimizer.step()
    scheduler.step()


def expected_rates(after_name, step):
    factor = AFTER[after_name][1](max(0, step - WARMUP))
    if step < WARMUP:  # to where the other begins
        ratio = START / (TARGETS[0] * factor)
        factor *= ratio + (1 - ratio) * step / WARMUP
    return [target * factor for target in TARGETS]


@pytest.mark.parametrize("after_name", AFTER)
def test_rate_follows_the_formula(after_name):
    optimizer = make_optimizer()
    scheduler = make_warmup(optimizer, after_name)
    for step in range(14):
        assert rates(optimizer) == pytest.approx(
            expected_rates(after_name, step), rel=1e-12
        )
        assert scheduler.get_last_lr() == rates(optimizer)
        advance(optimizer, scheduler)


@pytest.mark.parametrize("after_name", AFTER)
@pytest.mark.parametrize("saved_at", [2, 8])
@pytest.mark.parametrize("optimizer_first", [True, False])
def test_resumed_schedule_equals_unbroken(after_name, saved_at, optimizer_first):
    optimizer = make_optimizer()
    scheduler = make_warmup(optimizer, after_name)
    for _ in range(saved_at):
        advance(optimizer, scheduler)
    saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))

    again = make_optimizer()
    resumed = make_warmup(again, after_name)
    loads = [(again, saved[0]), (resumed, saved[1])]
    for one, state in loads if optimizer_first else reversed(loads):
        one.load_state_dict(state)
    for _ in range(6):
        assert rates(again) == rates(optimizer)
        advance(optimizer, scheduler)
        advance(again, resumed)


def test_rate_in_a_tensor_stays_that_tensor():
    rate = torch.tensor(0.8, dtype=torch.float64)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=rate)
    scheduler = gradual_warmup(optimizer, 2, 0.4)
    advance(optimizer, scheduler)
    scheduler.load_state_dict(scheduler.state_dict())
    assert rates(optimizer)[0] is rate
    assert rate.item() == pytest.approx(0.6)


def test_rate_grows_with_the_batch():
    assert linear_scaled_lr(0.1, 8192) == pytest.approx(3.2)
    assert linear_scaled_lr(0.1, 64) == pytest.approx(0.025)
    assert linear_scaled_lr(0.1, 64, base_batch_size=32) == pytest.approx(0.2)


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


def mixed():
    norms = nn.BatchNorm2d(3), nn.LayerNorm([3, 3]), nn.GroupNorm(1, 3), RMSNorm()
    parts = {"embed": nn.Embedding(5, 3), "attention": nn.MultiheadAttention(3, 1)}
    model = Of(
        None,
        **parts,
        norms=nn.ModuleList(norms),
        slope=nn.PReLU(),
        head=nn.Linear(3, 5),
    )
    model.head.weight = model.embed.weight
    model.attention.out_proj.weight.requires_grad_(False)
    return model


def test_biases_and_norms_without_decay():
    model = mixed()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decay, no_decay = weight_decay_groups(model, 0.01)
    assert (decay["weight_decay"], no_decay["weight_decay"]) == (0.01, 0.0)
    found = " ".join(names[id(parameter)] for parameter in decay["params"])
    attention = "attention.in_proj_weight attention.out_proj.weight"
    assert found == f"embed.weight {attention} slope.weight"
    assert len(decay["params"]) + len(no_decay["params"]) == len(names)


def block(norms, **parts):
    return Of(
        None, **{f"bn{i}": nn.BatchNorm2d(2) for i in range(1, norms + 1)}, **parts
    )


def test_last_scale_of_residuals_is_zero():
    residual = {"downsample": None}
    basic, bottleneck, plain = block(2, **residual), block(3, **residual), block(2)
    without = block(1, bn2=nn.BatchNorm2d(2, affine=False), **residual)  # no scale
    assert zero_init_residual(nn.Sequential(basic, bottleneck, plain, without)) == 2
    assert basic.bn2.weight.tolist() == bottleneck.bn3.weight.tolist() == [0, 0]
    untouched = [
        basic.bn1,
        bottleneck.bn1,
        bottleneck.bn2,
        plain.bn1,
        plain.bn2,
        without.bn1,
    ]
    assert all(norm.weight.tolist() == [1, 1] for norm in untouched)
