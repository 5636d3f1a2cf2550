"""After a run in this process everything is as before, also if the step fails."""

import os
import pickle
import random

import numpy
import pytest
import torch
import torch.distributed as dist
from splitting.loop_models import (
    Net,
    backward_sums,
    class_loss,
    images,
    net_with_norm,
    new,
    scripted_net,
)
from torch import nn

from scatterpar import splitcheck


class Surroundings:
    """A model and everything that a step may refer to, and change."""

    def __init__(self):
        self.model = new(net_with_norm)
        self.model.register_buffer("steps", torch.zeros(()))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda epoch: 0.5**epoch
        )
        self.scaler = torch.amp.GradScaler("cpu")
        self.criterion = new(lambda: nn.Linear(4, 4))
        self.generator = torch.Generator().manual_seed(3)
        self.seen = []
        self.number = 0
        # As in the middle of a training: momentum, and gradients of the step before.
        class_loss(self.model, images()).backward()
        self.optimizer.step()
        self.model.norm.eval()

    def step(self, model, batches, optimize=True):
        """Change everything."""
        os.environ["OF_A_STEP"] = "1"
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(True)
        random.random()
        numpy.random.rand()
        torch.rand(1, generator=self.generator)
        self.number += 1
        self.seen.append(self.number)
        self.optimizer.param_groups[0]["lr"] *= 0.5
        self.scheduler.last_epoch += 1
        model.train()
        model.steps += 1
        model.trainer = self
        model.first.register_forward_hook(lambda *_: None)
        model.first.bias.requires_grad_(False)
        model.last.weight.register_hook(lambda gradient: gradient * 2)
        self.optimizer.zero_grad()
        for pixels, classes in batches:
            outputs = self.criterion(model(pixels + torch.rand(10)))
            loss = nn.functional.cross_entropy(outputs, classes)
            self.scaler.scale(loss / len(batches)).backward()
        self.scaler.unscale_(self.optimizer)
        with torch.no_grad():
            model.last.bias.add_(1)
        if optimize:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def state(self):
        """All of it, in bytes and identities."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        tensors += self.criterion.parameters()
        return [
            [(tensor.dtype, tensor.requires_grad) for tensor in tensors],
            [tensor.detach().tolist() for tensor in tensors],
            [(id(tensor.grad), tensor.data_ptr()) for tensor in tensors],
            [None if each.grad is None else each.grad.tolist() for each in tensors],
            [len(tensor._backward_hooks or ()) for tensor in tensors],
            [(type(module), module.training) for module in self.model.modules()],
            [len(module._forward_hooks) for module in self.model.modules()],
            sorted(vars(self.model)),
            str(self.optimizer.state_dict()),
            str(self.scheduler.state_dict()),
            str(self.scaler.state_dict()),
            len(self.scaler._per_optimizer_states),
            self.seen[:],
            self.number,
            self.generator.get_state().tolist(),
            torch.get_rng_state().tolist(),
            random.getstate(),
            pickle.dumps(numpy.random.get_state()),
            dict(os.environ),
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_grad_enabled(),
            dist.is_initialized(),
        ]


def check(surroundings, step, error=None):
    before = surroundings.state()
    if error is None:
        splitcheck(step, surroundings.model, images())
    else:
        with pytest.raises(error):
            splitcheck(step, surroundings.model, images())
    after = surroundings.state()
    for part_before, part_after in zip(before, after, strict=True):
        assert part_after == part_before


def test_wrong_loop_leaves_process_unchanged():
    surroundings = Surroundings()
    check(surroundings, surroundings.step)


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("least_parts", [1, 2])
def test_failed_step_leaves_process_unchanged(error, least_parts):
    surroundings = Surroundings()

    def step(model, batches):
        surroundings.step(model, batches, optimize=False)
        if len(batches) >= least_parts:
            raise error

    check(surroundings, step, error)


def test_process_group_of_step_is_destroyed(tmp_path):
    def step(model, batches):
        number = len(list(tmp_path.iterdir()))
        store = dist.FileStore(str(tmp_path / str(number)), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        backward_sums(nn.parallel.DistributedDataParallel(model), batches)

    splitcheck(step, new(Net), images()).assert_passed()
    assert not dist.is_initialized()


def test_error_names_parts_of_the_step():
    def step(model, batches):
        backward_sums(model, batches)
        if len(batches) > 1:
            raise KeyError("label")

    with pytest.raises(KeyError) as caught:
        splitcheck(step, new(Net), images())
    assert caught.value.__notes__ == ["splitcheck called step with 10 + 7 + 5 + 2 rows"]


def test_other_models_optimizer_has_no_effect():
    surroundings = Surroundings()
    other = new(Net)
    optimizer = torch.optim.Adam(other.parameters())
    before = [parameter.tolist() for parameter in other.parameters()]

    def step(model, batches):
        backward_sums(other, batches)
        optimizer.step()
        backward_sums(model, batches)

    check(surroundings, step)
    assert [parameter.tolist() for parameter in other.parameters()] == before
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in other.parameters())


def test_scripted_model_is_restored():
    model = new(scripted_net)
    before = [parameter.clone() for parameter in model.parameters()]
    splitcheck(backward_sums, model, images())
    for parameter, values in zip(model.parameters(), before, strict=True):
        assert parameter.grad is None
        assert parameter.dtype == values.dtype
        assert torch.equal(parameter, values)
