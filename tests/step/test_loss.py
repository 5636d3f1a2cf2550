"""What counts as a loss, and the errors for everything else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from scatterpar.step.loss import loss_of, require_trainable, scalar_loss

LOSS = torch.tensor(2.0)
ROWS = torch.ones(3)


@pytest.mark.parametrize(
    "output", [LOSS, {"loss": LOSS, "logits": ROWS}, SimpleNamespace(loss=LOSS)]
)
def test_module_gives_loss_as_or_in_output(output):
    assert loss_of(output, None, None) is LOSS


@pytest.mark.parametrize(
    ("loss", "error", "words"),
    [
        (2.0, TypeError, r"got float; return the tensor itself, without \.item\(\)"),
        (
            (LOSS, ROWS),
            TypeError,
            r"got tuple; return it alone, as by lambda output, targets: "
            r"criterion\(output, targets\)\[0\], or \(loss, numbers\)",
        ),
        ({"a": LOSS, "b": LOSS}, TypeError, r"return sum\(losses.values\(\)\)"),
        (ROWS, ValueError, r"got shape \(3,\); reduce it"),
        (torch.tensor(1j), ValueError, r"take its .abs\(\)"),
    ],
)
def test_non_losses_refused_with_remedy(loss, error, words):
    with pytest.raises(error, match=f"the criterion must give .*{words}"):
        scalar_loss(loss, "the criterion")


def test_several_outputs_need_a_criterion():
    with pytest.raises(TypeError, match=r"lambda output, _: output\[1\]"):
        loss_of((ROWS, LOSS), None, None)


def test_criterion_of_other_arguments_refused():
    with pytest.raises(TypeError, match=r"criterion\(output, targets\)"):
        loss_of(ROWS, None, lambda output: LOSS)


@pytest.mark.draws
def test_module_without_parameters_refused():
    module = nn.Linear(2, 2)
    require_trainable(module)
    with pytest.raises(ValueError, match="Linear, has no parameter that requires grad"):
        require_trainable(module.requires_grad_(False))
