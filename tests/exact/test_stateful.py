"""An engine and a plain loop walk the same random path: steps, faults, edits,
interrupts.

The plain model takes every good step itself, one micro-batch after the other, on one
device. After each rule all state is equal: parameters, gradients, buffers, the
optimizer's state and the random generator; what failed has left no trace.
"""

import os
import signal

import pytest
import torch
from faults.state import nothing_changes
from faults.subject import CLASSES, FEATURES
from faults.trap import trap
from harness.agree import buffers_of, put_buffers
from harness.oracle import (
    assert_close,
    assert_gradients,
    assert_parameters,
    build,
    gradients,
    randint,
    randn,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import nn

from scatterpar import ScatterOnceParallel

pytestmark = pytest.mark.core

RELATIVE = 1e-8  # rounding, carried along over some optimizer steps


EDITS = (
    *(
        "slope = 0.5",
        "slope = 1.0",
        "slope = 2.0",
        "norm.momentum = 0.1",
        "norm.momentum = 0.5",
    ),
    *(
        "blocks[0].weight.data.mul_(0.9)",
        "leave.bias.data = model.leave.bias.data + 0.1",
    ),
)
PLACES = ("forward", "criterion", "backward", "hook", "count")
ERRORS = (ValueError, SystemExit, KeyboardInterrupt, torch.OutOfMemoryError)


class Walker(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.norm = nn.Linear(FEATURES, 5), nn.BatchNorm1d(5)
        self.blocks = nn.ModuleList([nn.Linear(5, 5)])
        self.leave = nn.Linear(5, CLASSES)
        self.slope = 1.0

    def forward(self, inputs):
        trap.count("forward")
        hidden = self.norm(self.enter(inputs))
        if hidden.requires_grad:
            hidden.register_hook(lambda _: trap.count("backward"))
        for block in self.blocks:
            hidden = torch.tanh(self.slope * block(hidden))
        return self.leave(hidden)


def criterion(output, targets):
    trap.count("criterion")
    return nn.functional.cross_entropy(output, targets)


def count(inputs, targets):
    trap.count("count")
    return len(targets)


def plain_step(model, plan, inputs, targets):
    """The whole batch, one micro-batch after the other; buffers as replica 0 leaves
    them.
    """
    before, kept = buffers_of(model), None
    for share in plan.shares:
        put_buffers(model, before)
        for start, stop in share.micro_batches:
            loss = criterion(model(inputs[start:stop]), targets[start:stop])
            if loss.requires_grad:
                (loss * ((stop - start) / plan.rows)).backward()
        kept = kept or buffers_of(model)
    put_buffers(model, kept)


class Walk(RuleBasedStateMachine):
    devices = st.sampled_from([["cpu"], ["cpu"] * 2, ["cpu:0", "cpu:1", "cpu:0"]])

    @initialize(devices=devices, accum=st.integers(1, 3))
    def begin(self, devices, accum):
        trap.disarm()
        self.model, self.plain = build(Walker), build(Walker)
        # counts visits
        self.engine = ScatterOnceParallel(self.model, accum, devices, verify=False)
        models = self.model, self.plain
        self.optimizers = [
            torch.optim.SGD(m.parameters(), 0.05, momentum=0.9) for m in models
        ]
        self.random = torch.get_rng_state()

    def batch(self, rows, seed):
        # for BatchNorm
        rows = max(rows, 2 * self.engine.accum * len(self.engine.device_ids))
        return randn(rows, FEATURES, seed=seed), randint(CLASSES, rows, seed=seed)

    def both(self, change):
        for model in (self.model, self.plain):
            change(model)

    # --- steps ---

    @rule(rows=st.integers(6, 30), seed=st.integers(0, 9))
    def good_step(self, rows, seed):
        inputs, targets = self.batch(rows, seed)
        self.engine.forward_backward(inputs, targets, criterion, count=count)
        plain_step(self.plain, self.engine.plan(len(inputs)), inputs, targets)

    @rule(
        place=st.sampled_from(PLACES),
        after=st.integers(0, 2),
        error=st.sampled_from(ERRORS),
        rows=st.integers(6, 30),
    )
    def bad_step(self, place, after, error, rows):
        raised = error("boom")
        if place == "backward" and not self.model.enter.weight.requires_grad:
            place = "forward"
        handle = self.model.leave.register_forward_hook(lambda *_: trap.count("hook"))
        assert (
            self.failed_step(place, after, lambda: raised, rows, count=count) is raised
        )
        handle.remove()

    @rule(after=st.integers(0, 2), rows=st.integers(6, 30), times=st.integers(1, 2))
    def interrupted_step(self, after, rows, times):
        def strike():
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)

        error = self.failed_step("forward", after, strike, rows)
        assert type(error) is KeyboardInterrupt

    def failed_step(self, place, after, make, rows, **options):
        """What a step raises that leaves no trace."""
        pieces = self.engine.accum * len(self.engine.device_ids)
        same = nothing_changes(self.model, optimizer=self.optimizers[0])
        trap.arm(place, make, visit=min(after, pieces - 1))
        with same, pytest.raises(BaseException) as caught:  # noqa: PT011
            self.engine.forward_backward(*self.batch(rows, 0), criterion, **options)
        trap.disarm()
        return caught.value

    @rule()
    def optimize(self):
        for optimizer in self.optimizers:
            optimizer.step()

    @rule(set_to_none=st.booleans())
    def zero_grad(self, set_to_none):
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    # --- edits ---

    @rule(flag=st.booleans())
    def freeze(self, flag):
        self.both(lambda model: model.enter.requires_grad_(flag))

    @rule(mode=st.booleans())
    def train_or_eval(self, mode):
        self.both(lambda model: model.train(mode))

    @rule(edits=st.lists(st.sampled_from(EDITS), min_size=1, max_size=4))
    def edit(self, edits):
        for edit in edits:
            self.both(lambda model, edit=edit: exec(f"model.{edit}", {"model": model}))

    @rule(count=st.integers(1, 3))
    def add_or_drop_blocks(self, count):
        def change(model):
            while len(model.blocks) < count:
                model.blocks.append(build(lambda: nn.Linear(5, 5), seed=3))
            del model.blocks[count:]

        self.both(change)

    @rule(accum=st.integers(1, 3))
    def change_accum(self, accum):
        self.engine.accum = accum

    @rule()
    def infer(self):
        (inputs, _), mode = self.batch(8, 3), self.model.training
        self.both(lambda model: model.eval())
        with torch.no_grad():
            assert_close(self.engine(inputs), self.plain(inputs), "output", RELATIVE)
        self.both(lambda model: model.train(mode))

    @invariant()
    def all_state_is_equal(self):
        assert torch.equal(self.random, torch.get_rng_state())
        assert_parameters(self.model, self.plain, RELATIVE)
        assert_gradients(self.model, gradients(self.plain), RELATIVE)
        pairs = zip(self.model.named_buffers(), self.plain.named_buffers(), strict=True)
        for (name, one), (_, other) in pairs:
            assert_close(one, other, name, RELATIVE)
        states = [list(optimizer.state.values()) for optimizer in self.optimizers]
        assert len(states[0]) == len(states[1])
        for one, other in zip(*states, strict=True):
            assert one.keys() == other.keys()
            for key, value in one.items():
                if value is not None:
                    assert_close(value, other[key], key, RELATIVE)

    def teardown(self):
        if hasattr(self, "engine"):
            self.engine.close()


TestWalk = pytest.mark.draws(Walk.TestCase)
TestWalk.settings = settings(max_examples=6, stateful_step_count=25, deadline=None)
