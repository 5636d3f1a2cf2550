"""Higher-order operators and function transforms, in the workers' threads.

The workers switch on a dispatch key of their own for random operators. Higher-order operators
look their kernels up in Python and refused the key: "could not find kernel for
HigherOrderOperator custom_function_call". ``vmap`` over dropout failed at an ``.item()``.
"""

from __future__ import annotations

import pytest
import torch
from faults.processes import run
from harness.oracle import assert_step, build, randn, seeded
from torch import nn

from scatterpar import ScatterOnceParallel, torch_private

DEVICES = [["cpu"] * 2, ["cpu:0", "cpu:1"], ["cpu"] * 3]


class Doubled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(rows):
        return rows * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Vmapped(nn.Linear):
    def forward(self, rows):
        return torch.vmap(Doubled.apply)(super().forward(rows))


class Differentiated(nn.Linear):
    """The derivative of a row's energy, itself a function of the weights."""

    def forward(self, rows):
        energy = super().forward
        return torch.func.grad(lambda x: Doubled.apply(energy(x).square()).sum())(rows)


class Branching(nn.Linear):
    def forward(self, rows):
        rows = super().forward(rows)
        shifted = rows + 100  # the same branch for every micro-batch
        return torch.cond(shifted.sum() > 0, torch.sin, torch.cos, (rows,))


def mean(outputs, _):
    return outputs.mean()


@pytest.mark.parametrize("device_ids", DEVICES, ids=str)
@pytest.mark.parametrize("kind", [Vmapped, Differentiated])
def test_custom_functions_under_transforms(kind, device_ids):
    with ScatterOnceParallel(build(lambda: kind(4, 3)), 2, device_ids) as engine:
        assert_step(engine, randn(11, 4), criterion=mean)


CONTROL_FLOW = """
import pytest
from harness.oracle import assert_step, build, randn
from scatterpar import ScatterOnceParallel
from threads.test_higher_order import Branching, mean

model = build(lambda: Branching(4, 3))
for device_ids in (["cpu"] * 2, ["cpu:0", "cpu:1"]):
    with ScatterOnceParallel(model, 2, device_ids, verify=False) as engine:
        with pytest.raises(RuntimeError, match=r"^cond: .* use one replica, or .* torch.where"):
            engine.forward_backward(randn(11, 4), criterion=mean)
        assert model.weight.grad is None
with ScatterOnceParallel(model, 2, ["cpu"]) as engine:
    assert_step(engine, randn(11, 4), criterion=mean)
print("exact")
"""


@pytest.mark.slow
def test_control_flow_is_refused_unless_there_is_one_replica():
    """In a process of its own: what two threads' tracing once broke stayed broken."""
    outcome = run("-c", CONTROL_FLOW, silence=300.0)
    assert outcome.out == "exact\n", outcome.err


def test_an_operator_that_is_registered_later():
    from torch._ops import HigherOrderOperator

    class Later(HigherOrderOperator):
        def __init__(self):
            super().__init__("registered_by_a_test")

        def __call__(self, rows):
            return super().__call__(rows)

    class Uses(nn.Linear):
        def forward(self, rows):
            return later(super().forward(rows))

    with ScatterOnceParallel(build(lambda: nn.Linear(4, 3)), 1, ["cpu"] * 2) as engine:
        assert_step(engine, randn(4, 4), criterion=mean)  # the key is routed by now
    later = Later()
    later.py_impl(torch._C.DispatchKey.Autograd)(lambda rows: rows * 3)
    with ScatterOnceParallel(build(lambda: Uses(4, 3)), 1, ["cpu"] * 2) as engine:
        assert_step(engine, randn(4, 4), criterion=mean)


@pytest.mark.draws
@pytest.mark.parametrize("randomness", ["different", "same"])
def test_dropout_under_vmap(randomness):
    class Dropped(nn.Linear):
        def forward(self, rows):
            dropped = torch.vmap(nn.functional.dropout, randomness=randomness)
            return dropped(super().forward(rows))

    def gradient():
        model = build(lambda: Dropped(4, 3))
        with seeded(7), ScatterOnceParallel(model, 1, ["cpu"] * 2) as engine:
            _, outputs = engine.forward_backward(
                torch.ones(12, 4).double(), criterion=mean, return_outputs=True
            )
        return model.weight.grad, outputs

    (first, outputs), (second, _) = gradient(), gradient()
    assert torch.equal(first, second)  # the same seed, the same masks
    rows_differ = [len(set(map(tuple, (output != 0).tolist()))) > 1 for output in outputs]
    assert rows_differ == [randomness == "different"] * 2
    assert not torch.equal(outputs[0], outputs[1])


def test_what_torch_lacks_is_said_in_words(monkeypatch):
    monkeypatch.setattr(torch_private, "_KEY_NAME", "Nothing")
    words = (
        r"torch .* has no dispatch key Nothing, which scatterpar needs; install a version of torch "
        r"that the README names"
    )
    with pytest.raises(torch_private.Missing, match=words):
        torch_private._key.__wrapped__()
