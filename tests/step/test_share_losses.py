"""The losses of a share: combined, and read when all else is launched."""

from __future__ import annotations

import pytest
import torch
from harness.models import mlp
from harness.notes import beginning_of_note
from harness.oracle import randint, randn

from scatterpar import ScatterOnceParallel
from scatterpar.plan import make_plan
from scatterpar.step import reduce
from scatterpar.step.logged_numbers import NumbersOfShare
from scatterpar.step.share_losses import ShareLosses, total_of

HOST = torch.device("cpu")


def losses_of(*values, weights, check_finite=False, number=None):
    share = make_plan((len(values),), [HOST], accum=len(values)).shares[0]
    numbers = NumbersOfShare()
    for _ in values:
        numbers.add({} if number is None else {"kl": torch.tensor(number)})
    losses = [torch.tensor(value, dtype=torch.float64) for value in values]
    return ShareLosses(share, losses, weights, numbers, check_finite=check_finite)


def test_losses_and_numbers_are_weighted():
    shares = [
        losses_of(1.0, 2.0, weights=[0.25, 0.25], number=4.0),
        losses_of(3.0, weights=[0.5], number=6.0),
    ]
    loss, logged = total_of(shares)
    assert loss == 0.25 + 0.5 + 1.5
    assert logged == {"kl": 2.0 + 3.0}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_does_not_count_may_be_no_number(value):
    share = losses_of(1.0, value, weights=[1.0, 0.0], check_finite=True)
    assert share.read() == (1.0, {})


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_loss_that_is_not_finite_names_its_sub_step(value):
    share = losses_of(1.0, value, weights=[0.5, 0.5], check_finite=True)
    with pytest.raises(
        FloatingPointError, match="sub-step 1; nothing was changed"
    ) as caught:
        share.read()
    (note,) = caught.value.__notes__
    assert note.startswith(beginning_of_note(0, HOST))
    assert "sub-step 1, row 1" in note


@pytest.mark.parametrize("options", [{}, {"whole_batch": True}], ids=str)
def test_losses_are_read_when_gradients_are_launched(monkeypatch, options):
    """Reading waits for the device: earlier, it would have nothing to do afterwards."""
    order = []

    def note(owner, name):
        function = getattr(owner, name)

        def noted(*args):
            order.append(name)
            return function(*args)

        monkeypatch.setattr(owner, name, noted)

    note(reduce, "reduce_gradients")
    note(ShareLosses, "read")
    model = mlp()
    inputs, targets = randn(8, 5), randint(4, 8)
    with ScatterOnceParallel(model, 2, ["cpu:0", "cpu:1"], verify=False) as engine:
        loss = torch.nn.CrossEntropyLoss()
        engine.forward_backward(inputs, targets, loss, **options)
    reads = 1 if options else 2
    assert order == ["reduce_gradients", *["read"] * reads]
