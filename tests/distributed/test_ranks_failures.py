"""A rank that fails: all raise, nothing changes anywhere, and the next step is exact."""

from __future__ import annotations

import functools
import os
import signal
import time
from unittest import mock

import pytest
import torch
from harness.models import CLASSES, FEATURES, Of, mlp
from harness.notes import beginning_of_note
from harness.oracle import assert_gradients, build, randint, randn, whole_batch
from harness.rank_processes import failure, run_on_ranks
from torch import nn

from scatterpar import ScatterOnceParallel
from scatterpar import engine as engine_module
from scatterpar.distributed import ranks

CRITERION = nn.CrossEntropyLoss()


class Trouble(Exception):
    pass


class Troubled(nn.Module):
    """Raises in forward, in backward, or not at all; counts in a buffer, and draws."""

    def __init__(self):
        super().__init__()
        self.body = build(mlp)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.forward_raises = self.backward_raises = None

    def forward(self, inputs):
        self.calls += 1
        if self.forward_raises is not None:
            raise self.forward_raises
        outputs = self.body(inputs) + 0 * self.dropout(inputs).sum()
        if self.backward_raises is not None:
            outputs.register_hook(self._raise)
        return outputs

    def _raise(self, _):
        raise self.backward_raises


def raising_in(where, error=Trouble):
    def fail(engine, inputs, targets):
        setattr(engine.module, f"{where}_raises", error("mine"))
        engine.forward_backward(inputs, targets, CRITERION)

    return fail


def given(criterion=CRITERION, rows=slice(None), labels=slice(None), **options):
    def fail(engine, inputs, targets):
        engine.forward_backward(inputs[rows], targets[labels], criterion, **options)

    return fail


def trouble(*_, **__):
    raise Trouble("mine")


def not_finite(engine, inputs, targets):
    engine.check_finite = True
    engine.forward_backward(inputs * torch.nan, targets, CRITERION)


def interrupted_by_a_signal(engine, inputs, targets):
    def criterion(*_):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        return (_[0] * 0).sum()

    engine.forward_backward(inputs, targets, criterion)


def interrupted_while_reducing(engine, inputs, targets):
    def reduce(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGINT)
        return kept(*args, **kwargs)

    kept = engine_module.reduce
    with mock.patch.object(engine_module, "reduce", reduce):
        engine.forward_backward(inputs, targets, CRITERION)


def no_memory_to_pack(engine, inputs, targets):
    with mock.patch.object(ranks, "Buckets", side_effect=MemoryError("mine")):
        engine.forward_backward(inputs, targets, CRITERION)


NOTED = f"mine\n{beginning_of_note(0, 'cpu')}"
PLACES = {
    "forward": (raising_in("forward"), "Trouble", NOTED),
    "backward": (raising_in("backward"), "Trouble", NOTED),
    "criterion": (given(trouble), "Trouble", NOTED),
    "count": (given(count=trouble), "Trouble", "mine"),
    "empty": (given(rows=slice(0), labels=slice(0)), "ValueError", "empty"),
    "rows": (given(labels=slice(1)), "ValueError", "rows"),
    "reduction": (given(reduction="none"), "ValueError", "none"),
    "not finite": (not_finite, "FloatingPointError", "nan"),
    "interrupt": (raising_in("forward", KeyboardInterrupt), "KeyboardInterrupt", "mine"),
    "signal": (interrupted_by_a_signal, "KeyboardInterrupt", ""),
    "signal while reducing": (interrupted_while_reducing, "KeyboardInterrupt", ""),
    "exit": (raising_in("forward", SystemExit), "SystemExit", "mine"),
    "no memory to pack": (no_memory_to_pack, "MemoryError", "mine"),
}
ON_THE_WHOLE_BATCH = ["forward", "backward", "criterion", "empty"]


def state(engine):
    module = engine.module
    tensors = [*module.parameters(), *module.buffers(), *(p.grad for p in module.parameters())]
    return [torch.get_rng_state(), *[t.detach().clone() for t in tensors]]


def fail(group, place, culprits, whole_batch_too=False):
    module = Troubled()
    rows = (9, 4, 2)[: group.size()]
    batch = randn(sum(rows), FEATURES), randint(CLASSES, sum(rows))
    mine = [tensor.split(rows)[group.rank()] for tensor in batch]
    with ScatterOnceParallel(module, 2, ["cpu"], process_group=group) as engine:
        if whole_batch_too:
            step = functools.partial(engine.forward_backward, whole_batch=True)
            engine.forward_backward = step
        engine.forward_backward(*mine, CRITERION)
        before = state(engine)
        if group.rank() in culprits:
            raised = failure(PLACES[place][0], engine, *mine)
        else:
            raised = failure(engine.forward_backward, *mine, CRITERION)
        unchanged = all(map(torch.equal, before, state(engine)))
        module.forward_raises = module.backward_raises = None
        module.zero_grad()
        expected = whole_batch(module.body, *batch, CRITERION)[1]
        engine.forward_backward(*mine, CRITERION)
        assert_gradients(module.body, expected)
    return raised, unchanged


@pytest.mark.parametrize(
    ("place", "whole"),
    [*((place, False) for place in PLACES), *((place, True) for place in ON_THE_WHOLE_BATCH)],
)
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_fails_fails_all(place, whole, culprit):
    found = run_on_ranks(2, fail, place, [culprit], whole)
    _, kind, words = PLACES[place]
    words = words.partition("\n")[0] if whole else words
    (own, unchanged), (other, other_unchanged) = found[culprit], found[1 - culprit]
    assert own[0] == kind
    assert words in own[1]
    assert other[0] == "RuntimeError"
    assert other[1].startswith(
        f"rank {culprit} of 2 failed in this step, so that nothing was changed on any rank"
    )
    assert unchanged
    assert other_unchanged


def test_ranks_that_fail_together_name_each_other():
    zero, one, two = run_on_ranks(3, fail, "forward", [0, 2])
    assert "rank 2 failed in this step too" in zero[0][1]
    assert "rank 0 failed in this step too" in two[0][1]
    assert one[0][1].startswith("rank 0, 2 of 3 failed in this step")
    assert all(unchanged for _, unchanged in (zero, one, two))


def disagree(group, how):
    module = Troubled()
    module.twins = nn.ParameterList([torch.ones(2), torch.ones(2)])
    module.register_buffer("first", torch.ones(2))
    module.register_buffer("second", torch.ones(2))
    batch = randn(4, FEATURES), randint(CLASSES, 4)

    def criterion(outputs, targets):
        if how == "shape" and group.rank() == 1:
            replicas[0]._buffers["calls"] = torch.zeros(3, dtype=torch.long)
        if how == "buffer":
            replicas[0]._buffers["first" if group.rank() else "second"] = None
        return CRITERION(outputs, targets)

    with ScatterOnceParallel(module, process_group=group, verify=False) as engine:
        replicas = engine.replicas
        if group.rank() == 1 and how == "trained":
            module.body[0].weight.requires_grad_(False)
        if how == "frozen":
            module.twins[group.rank()].requires_grad_(False)
        options = {"reduction": "sum"} if group.rank() == 1 and how == "reduction" else {}
        if how == "scale":
            scale = 8.0 * (1 + group.rank())
            options = {"scaler": torch.amp.GradScaler("cpu", init_scale=scale)}
        if how == "labels" or (how == "call" and group.rank() == 1):
            options = {"whole_batch": True}
        if how == "labels" and group.rank() == 1:
            batch = batch[0], batch[1].double()
        return failure(engine.forward_backward, *batch, criterion, **options)


@pytest.mark.parametrize(
    "how", ["trained", "frozen", "reduction", "scale", "shape", "buffer", "call", "labels"]
)
def test_ranks_that_disagree_are_told_so(how):
    """Of weights with equal shapes, one got the other's gradient; scaled ones were added up."""
    for kind, words in run_on_ranks(2, disagree, how):
        assert kind == "RuntimeError"
        assert "the ranks disagree on " in words
        assert how in ("call", "labels") or "which tensors are trained, on their shapes" in words


def hungry_model(most):
    """Runs out of memory for more than so many rows at a time."""

    def forward(model, inputs):
        if len(inputs) > most:
            raise torch.OutOfMemoryError("out of memory")
        return model.body(inputs)

    return Of(forward, body=build(mlp))


def hungry(group):
    module = hungry_model(2 if group.rank() == 1 else 100)
    batch = randn(16, FEATURES), randint(CLASSES, 16)
    mine = [tensor.chunk(2)[group.rank()] for tensor in batch]
    expected = whole_batch(module.body, *batch, CRITERION)[1]
    with ScatterOnceParallel(module, "auto", process_group=group) as engine:
        for _ in range(2):
            module.zero_grad()
            engine.forward_backward(*mine, CRITERION)
            assert_gradients(module.body, expected)
    return engine.plan(8).shares[0].micro_batches


@pytest.mark.filterwarnings("ignore:accum=")
def test_a_rank_alone_may_need_more_sub_steps():
    assert [len(cuts) for cuts in run_on_ranks(2, hungry)] == [1, 4]


def starve(group):
    module = hungry_model(0 if group.rank() == 1 else 100)
    with ScatterOnceParallel(module, "auto", process_group=group) as engine:
        return failure(engine.forward_backward, randn(4, FEATURES), randint(CLASSES, 4), CRITERION)


def test_memory_that_is_not_enough_on_one_rank_fails_all():
    zero, one = run_on_ranks(2, starve)
    assert one[0] == "OutOfMemoryError"
    assert zero[1].startswith("rank 1 of 2 failed")
