"""What a step that fails puts back."""

from __future__ import annotations

import pytest
import torch

from scatterpar.devices.transfers import Transfers
from scatterpar.step.undo import Undo
from scatterpar.threads.generators import Generators

pytestmark = pytest.mark.draws


def undo_of_a_step():
    return Undo(Generators([torch.device("cpu")] * 2), Transfers())


def state_of(tensor, leaf, generator):
    return (
        tensor.tolist(),
        id(leaf.grad),
        generator.get_state().tolist(),
        torch.get_rng_state().tolist(),
    )


def change_all(tensor, leaf, generator):
    tensor.add_(1)
    leaf.grad = torch.ones(2)
    torch.rand(3, generator=generator)
    torch.rand(3)


def change_all_and_fail(tensor, leaf, generator, shrinks=None):
    change_all(tensor, leaf, generator)
    if shrinks is not None:
        shrinks.resize_(2)
    raise ZeroDivisionError


def saved_objects(undo):
    tensor = torch.zeros(3)
    leaf = torch.zeros(2, requires_grad=True)
    leaf.grad = torch.full((2,), 5.0)
    generator = torch.Generator().manual_seed(3)
    undo.save_values([tensor])
    undo.save_gradients([leaf])
    undo.save_generator(generator)
    return tensor, leaf, generator


def test_all_restored_if_body_raises():
    undo = undo_of_a_step()
    objects = saved_objects(undo)
    before = state_of(*objects)
    with pytest.raises(ZeroDivisionError), undo:
        change_all_and_fail(*objects)
    assert state_of(*objects) == before


def test_nothing_restored_if_body_succeeds():
    """Entered again, the same undo restores all."""
    undo = undo_of_a_step()
    objects = saved_objects(undo)
    before = state_of(*objects)
    with undo:
        change_all(*objects)
    assert state_of(*objects) != before
    with pytest.raises(ZeroDivisionError), undo:  # entered again
        raise ZeroDivisionError
    assert state_of(*objects) == before


def test_unrestorable_value_is_noted():
    undo = undo_of_a_step()
    shrinks = torch.zeros(3)
    undo.save_values([shrinks])
    objects = saved_objects(undo)
    before = state_of(*objects)
    with pytest.raises(ZeroDivisionError) as caught, undo:
        change_all_and_fail(*objects, shrinks)
    (note,) = caught.value.__notes__
    assert "could not be put back" in note
    assert state_of(*objects) == before


def test_written_are_tensors_of_other_bits():
    undo = undo_of_a_step()
    same, other = torch.zeros(3), torch.zeros(3)
    undo.save_values([same, other])
    same.add_(0)
    other.add_(1)
    (written,) = undo.written()
    assert written is other
