"""Every operator that draws, drawn from inside a replica; and generators that are not its own."""

from __future__ import annotations

import pytest
import torch
from helpers.models import CLASSES, Classifier
from helpers.noise import BATCH, equal, step
from helpers.oracle import build
from torch import nn

from scatterpar import ScatterOnceParallel

pytestmark = pytest.mark.draws


@pytest.mark.parametrize(
    "draw",
    [
        torch.rand_like,
        torch.randn_like,
        lambda x: torch.rand(x.shape, dtype=x.dtype),
        lambda x: torch.randn(x.shape, dtype=x.dtype),
        lambda x: torch.normal(x.detach(), 1.0),
        lambda x: torch.empty_like(x).uniform_(),
        lambda x: torch.empty_like(x).normal_(),
        lambda x: torch.empty_like(x).exponential_(),
        lambda x: torch.randperm(x.numel()).view(x.shape).double(),
        lambda x: torch.randint(9, x.shape).double(),
        lambda x: torch.multinomial(torch.ones(x.shape), x.shape[1]).double(),
        lambda x: nn.functional.dropout(torch.ones_like(x)),
        lambda x: nn.functional.rrelu(-torch.ones_like(x), training=True),
        lambda x: nn.functional.gumbel_softmax(x.detach()),
        lambda x: torch.distributions.Gamma(torch.ones_like(x), 1.0).sample(),
        lambda x: torch.nn.init.xavier_uniform_(torch.empty_like(x)),
        lambda x: nn.functional.scaled_dot_product_attention(
            x.detach()[None], x.detach()[None], x.detach()[None], dropout_p=0.5
        )[0],
    ],
)
def test_every_way_to_draw(devices, draw):
    """Same seed same bits, another seed other bits, other rows other numbers in each replica."""

    class Draws(Classifier):
        def forward(self, inputs):
            outputs = self.linear(inputs)
            return outputs * draw(outputs).to(outputs.dtype)

    with ScatterOnceParallel(build(Draws), 2, devices(3)) as engine:
        runs = [step(engine, seed) for seed in (1, 1, 2, 1)]
    assert equal(runs[0], runs[1])
    assert equal(runs[0], runs[3])
    assert not equal(runs[0], runs[2])


def test_a_generator_of_the_user_s_own_is_respected(devices):
    """An explicit generator is the user's: it is not exchanged for the replica's."""
    own = torch.Generator()

    class Own(Classifier):
        def forward(self, inputs):
            outputs = self.linear(inputs)
            return outputs * torch.rand(CLASSES, generator=own, dtype=outputs.dtype)

    with ScatterOnceParallel(build(Own), 1, devices(1)) as engine:
        own.manual_seed(4)
        before = torch.get_rng_state()
        first = engine.forward_backward(*BATCH, nn.CrossEntropyLoss())
        own.manual_seed(4)
        second = engine.forward_backward(*BATCH, nn.CrossEntropyLoss())
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_generator_functions_are_the_replica_s_own_in_a_forward(devices):
    """fork_rng, get_rng_state and manual_seed inside a forward stay in that replica's stream."""

    class Forks(Classifier):
        def forward(self, inputs):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(99)
                fixed = torch.rand(())
            return self.linear(inputs) * fixed.double() * torch.rand(())

    with ScatterOnceParallel(build(Forks), 2, devices(3)) as engine:
        runs = [step(engine, seed=5) for _ in range(5)]
    assert all(equal(run, runs[0]) for run in runs)


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_failed_step_leaves_the_generator_as_it_was(devices, replicas):
    """One replica draws from the process's own generator, several from theirs."""

    class Fails(Classifier):
        def forward(self, inputs):
            torch.rand(3)
            if (inputs == BATCH[0][-1]).all(1).any():
                raise ArithmeticError("after drawing")
            return self.linear(inputs)

    with ScatterOnceParallel(build(Fails), 2, devices(replicas)) as engine:
        before = torch.get_rng_state()
        with pytest.raises(ArithmeticError):
            engine.forward_backward(*BATCH, nn.CrossEntropyLoss())
        assert torch.equal(torch.get_rng_state(), before)
