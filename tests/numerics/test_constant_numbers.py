"""Random operators that give each row the same, however many rows there are."""

from __future__ import annotations

import pytest
import torch
from harness.oracle import build, randn
from torch import Tensor, nn
from torch.nn import functional as F

from scatterpar import ScatterOnceParallel
from scatterpar.numerics.comparison import Inconclusive
from scatterpar.numerics.constant_numbers import ConstantNumbers

pytestmark = pytest.mark.draws


@pytest.mark.parametrize("draw", [torch.rand, torch.randn])
def test_numbers_same_for_any_rows(draw):
    with ConstantNumbers() as numbers:
        few, many = draw(2, 3), draw(5, 3)
    values = {*few.flatten().tolist(), *many.flatten().tolist()}
    assert [round(value, 3) for value in values] == [0.618]
    assert numbers.calls == 2


def test_native_dropout_keeps_all_elements():
    rows = torch.arange(6.0)
    with ConstantNumbers() as numbers:
        dropped, mask = torch.native_dropout(rows, 0.5, True)
    assert torch.equal(dropped, rows)
    assert mask.all()
    assert numbers.calls == 0


def test_masked_dropout_treats_all_alike():
    with ConstantNumbers():
        dropped = F.dropout(torch.ones(2, 3), 0.5)
    assert len(dropped.unique()) == 1
    assert dropped.all()


def test_slopes_are_the_mean_slope():
    """Its result was filled, and the drawn slopes were left for the backward pass."""
    rows = torch.linspace(-1, 1, 6).requires_grad_()
    for inplace in (False, True):
        with ConstantNumbers():
            output = F.rrelu(rows * 1, 0.1, 0.3, training=True, inplace=inplace)
        (gradient,) = torch.autograd.grad(output.sum(), [rows])
        assert torch.allclose(output, F.leaky_relu(rows, 0.2))
        assert torch.allclose(gradient, torch.where(rows > 0, 1.0, 0.2))


def recurrent(name, dropout):
    """A custom operator like ``aten::_cudnn_rnn``: tagged as random, with several
    results, of which the backward pass needs one.
    """
    tags = (torch.Tag.nondeterministic_seeded,)

    def function(rows: Tensor, rate: float) -> tuple[Tensor, Tensor]:
        mask = (torch.rand(rows.shape) >= rate).to(rows.dtype)
        return rows * mask, mask

    operator = torch.library.custom_op(
        f"scatterpar_tests::{name}",
        function,
        mutates_args=(),
        device_types="cpu",
        tags=tags,
        schema=f"(Tensor rows, float {dropout}) -> (Tensor, Tensor)",
    )
    operator.register_autograd(
        lambda ctx, gradient, _: (gradient * ctx.saved_tensors[0], None),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
    )
    return operator


def test_dropout_of_several_results_keeps_all():
    operator = recurrent("recurrent", "dropout")
    rows = torch.arange(6.0)
    with ConstantNumbers() as numbers:
        output, mask = operator(rows, 0.5)
        named, _ = operator(rows, dropout=0.5)
    assert torch.equal(output, rows)
    assert torch.equal(named, rows)
    assert mask.all()
    assert numbers.calls == 0


def test_unknown_operator_depends_on_rows():
    operator = recurrent("unknown", "rate")
    with ConstantNumbers(), pytest.raises(Inconclusive, match="depends on the rows"):
        operator(torch.arange(6.0), 0.5)


RANDOM = {
    "two RReLUs": lambda: [nn.RReLU(), nn.Linear(8, 8), nn.RReLU()],
    "RReLU and dropout": lambda: [nn.RReLU(0.1, 0.9), nn.Dropout(0.4)],
    "RReLU in place and noise": lambda: [nn.RReLU(inplace=True), Noise()],
    "feature dropout": lambda: [nn.RReLU(), nn.AlphaDropout(0.3)],
}


class Noise(nn.Module):
    def forward(self, rows):
        return rows + 0.1 * torch.randn_like(rows)


class RecurrentKernel(nn.Module):
    def __init__(self, operator):
        super().__init__()
        self.operator = operator

    def forward(self, rows):
        return self.operator(rows, 0.3)[0]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", RANDOM)
def test_right_random_layers_not_refused(devices, name):
    """Two RReLUs were refused, "off by 5 to 60 %"."""
    model = build(
        lambda: nn.Sequential(nn.Linear(6, 8), *RANDOM[name](), nn.Linear(8, 3))
    )
    rows, targets = randn(13, 6), randn(13, 3)
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        for _ in range(4):
            engine.forward_backward(rows, targets, F.mse_loss)
        with pytest.raises(ValueError, match="the gradient would be"):
            engine.forward_backward(rows, targets, lambda o, t: o.std(0).sum())


def test_mistake_behind_several_results_refused(devices):
    """The look failed by an error of its own, and a wrong loss went on."""
    kernel = RecurrentKernel(recurrent("layer", "dropout"))
    model = build(lambda: nn.Sequential(nn.Linear(6, 3), kernel))
    with (
        ScatterOnceParallel(model, 2, devices(2)) as engine,
        pytest.raises(ValueError, match="the gradient would be"),
    ):
        engine.forward_backward(randn(13, 6), None, lambda o, t: o.std(0).sum())


def test_integers_repeat_the_first():
    with ConstantNumbers():
        drawn = torch.randint(1000, (4,))
        empty = torch.randint(1000, (0,))
    assert len(drawn.unique()) == 1
    assert empty.numel() == 0


@pytest.mark.parametrize(
    "draw", [lambda: torch.randperm(4), lambda: torch.multinomial(torch.ones(4), 2)]
)
def test_draws_that_depend_on_rows_refused(draw):
    with ConstantNumbers(), pytest.raises(Inconclusive, match="depends on the rows"):
        draw()


def test_bernoulli_mask_is_no_dropout():
    """``bernoulli`` has an argument ``p``, too."""
    with ConstantNumbers() as numbers:
        torch.empty(3).bernoulli_(0.25)
    assert numbers.calls == 1


def test_other_operators_unchanged():
    with ConstantNumbers() as numbers:
        assert (torch.arange(3) + 1).tolist() == [1, 2, 3]
    assert numbers.calls == 0
