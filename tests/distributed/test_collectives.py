"""A rank that fails or is lost: all raise, nothing changes anywhere, and the next step
is exact.
"""

from __future__ import annotations

import contextlib
import functools
import re
import time
import warnings
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from faults.state import nothing_changes
from harness.leak_checks import in_time
from harness.models import CLASSES, FEATURES, Of, mlp
from harness.module_cases import with_buffers
from harness.notes import beginning_of_note
from harness.oracle import (
    assert_close,
    assert_gradients,
    build,
    randint,
    randn,
    whole_batch,
)
from harness.pairwise import few_of
from harness.rank_processes import failure, run_on_ranks
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout

from scatterpar import ScatterOnceParallel

CRITERION = nn.CrossEntropyLoss()
FOUR = randn(4, FEATURES), randint(CLASSES, 4)
TROUBLE = set()  # where this process raises: in forward or backward


class Trouble(Exception):
    pass


def trouble(place):
    if place in TROUBLE:
        raise Trouble("mine")


def troubled():
    """Raises in forward, in backward, or not at all; counts in a buffer, and draws."""

    def forward(model, inputs):
        model.calls += 1
        trouble("forward")
        outputs = model.body(inputs) + 0 * model.dropout(inputs).sum()
        outputs.register_hook(lambda _: trouble("backward"))
        return outputs

    model = Of(forward, body=build(mlp), dropout=nn.Dropout(0.5))
    return with_buffers(model, calls=torch.zeros((), dtype=torch.long))


# What a rank does in the place of a good step, given the step and its batch.


def raising_in(place):
    def fail(step, *batch):
        TROUBLE.add(place)
        step(*batch, CRITERION)

    return fail


def raises(*_):
    raise Trouble("mine")


def not_finite(step, inputs, targets):
    step(inputs * torch.nan, targets, CRITERION)


NOTED = f"mine\n{beginning_of_note(0, 'cpu')}"
PLACES = {
    "forward": (raising_in("forward"), "Trouble", NOTED),
    "backward": (raising_in("backward"), "Trouble", NOTED),
    "criterion": (lambda step, *batch: step(*batch, raises), "Trouble", NOTED),
    "empty": (
        lambda step, *batch: step(*(b[:0] for b in batch), CRITERION),
        "ValueError",
        "empty",
    ),
    "not finite": (not_finite, "FloatingPointError", "nan"),
}


def fail(group, place, culprits, **options):
    module, rows = troubled(), (9, 4, 2)[: group.size()]
    batch = randn(sum(rows), FEATURES), randint(CLASSES, sum(rows))
    mine = [tensor.split(rows)[group.rank()] for tensor in batch]
    engine = ScatterOnceParallel(
        module, 2, ["cpu"], check_finite=True, process_group=group
    )
    with engine:
        step = functools.partial(engine.forward_backward, **options)
        step(*mine, CRITERION)
        with nothing_changes(module):
            wrong = (
                PLACES[place][0] if group.rank() in culprits else raising_in("nowhere")
            )
            raised = failure(wrong, step, *mine)
        TROUBLE.clear()
        module.zero_grad()
        expected = whole_batch(module.body, *batch, CRITERION)[1]
        step(*mine, CRITERION)
        assert_gradients(module.body, expected)
    return raised


JOINED = [(place, True) for place in ("backward", "criterion")]


@pytest.mark.parametrize(
    ("place", "joined"), [*((place, False) for place in PLACES), *JOINED]
)
@pytest.mark.parametrize("culprit", few_of([0, 1], [1]))
def test_failing_rank_fails_all(place, joined, culprit):
    found = run_on_ranks(
        2, functools.partial(fail, whole_batch=joined), place, [culprit]
    )
    _, kind, words = PLACES[place]
    own, other = found[culprit], found[1 - culprit]
    assert own[0] == kind
    assert (words.partition("\n")[0] if joined else words) in own[1]
    assert other[0] == "RankError"
    assert other[1].startswith(
        f"rank {culprit} of 2 failed in this step, so that nothing was changed on any "
        "rank"
    )


def test_ranks_failing_together_are_named():
    zero, one, two = run_on_ranks(3, fail, "forward", [0, 2])
    assert "rank 2 failed in this step too" in zero[1]
    assert "rank 0 failed in this step too" in two[1]
    assert one[1].startswith("rank 0, 2 of 3 failed in this step")


def disagree(group, how):
    """What a step raises if this rank's module, call or labels are of another kind."""
    rank, options, (inputs, labels) = group.rank(), {}, FOUR
    twins = nn.ParameterList([torch.ones(2), torch.ones(2)])
    module = Of(lambda model, inputs: model.body(inputs), body=build(mlp), twins=twins)
    with ScatterOnceParallel(module, process_group=group, verify=False) as engine:
        match how:
            case "frozen":
                twins[rank].requires_grad_(False)
            case "reduction":
                options = {"reduction": ["mean", "sum"][rank]}
            case "scale":
                options = {
                    "scaler": torch.amp.GradScaler("cpu", init_scale=8.0 * (1 + rank))
                }
            case "call":
                options = {"whole_batch": bool(rank)}
            case "labels":
                options, labels = {"whole_batch": True}, [labels, labels.double()][rank]
        return failure(engine.forward_backward, inputs, labels, CRITERION, **options)


@pytest.mark.parametrize("how", ["frozen", "reduction", "scale", "call", "labels"])
def test_disagreeing_ranks_are_told(how):
    """Of weights with equal shapes, one got the other's gradient; scaled ones were
    added up.
    """
    for kind, words in run_on_ranks(2, disagree, how):
        assert kind == "RuntimeError", words
        assert "the ranks disagree on " in words
        assert (
            how in ("call", "labels")
            or "which tensors are trained, on their shapes" in words
        )


def hungry(group, most):
    """A rank with little memory, and less without gradients: the sub-steps of each, or
    what they raise.
    """
    sizes = []

    def forward(model, inputs):
        sizes.append(len(inputs))
        room = most if torch.is_grad_enabled() else most - 1
        if group.rank() == 1 and len(inputs) > room:
            raise torch.OutOfMemoryError("out of memory")
        return model.body(inputs)

    module = Of(forward, body=build(mlp))
    batch = randn(16, FEATURES), randint(CLASSES, 16)
    mine = [tensor.chunk(2)[group.rank()] for tensor in batch]
    expected_loss, expected = whole_batch(module.body, *batch, CRITERION)[:2]
    with ScatterOnceParallel(module, "auto", process_group=group) as engine:
        for _ in range(2):
            module.zero_grad()
            if raised := failure(engine.forward_backward, *mine, CRITERION):
                return raised
            assert_gradients(module.body, expected)
            with torch.no_grad():
                assert_close(engine(mine[0]), module.body(mine[0]), "rank's own rows")
                loss = engine.loss(*mine, CRITERION)
                assert_close(loss, expected_loss, "all ranks' rows")
                sizes.clear()
                engine(mine[0])
    return len(engine.plan(8).shares[0].micro_batches), sizes


@pytest.mark.filterwarnings("ignore:accum=")
def test_one_rank_may_need_more_sub_steps():
    assert run_on_ranks(2, hungry, 2) == [(1, [8]), (4, [1] * 8)]
    zero, one = run_on_ranks(2, hungry, 0)
    assert one[0] == "OutOfMemoryError"
    assert zero[1].startswith("rank 1 of 2 failed")


# --- a rank that is lost, a group that is left ---


def absent(group, folder):
    limit = timedelta(seconds=100)
    pairs = [
        dist.new_group([0, 1], backend="cpu:gloo", timeout=limit) for _ in range(2)
    ]
    if group.rank() == 2:
        return None
    engine = ScatterOnceParallel(build(mlp), process_group=pairs[0])
    for _ in range(2):
        engine.forward_backward(*FOUR, CRITERION)
    dist.barrier(group=pairs[1])
    found = []
    if group.rank() == 0:
        # only now, since on a busy machine one rank may be much later
        for pair in pairs:
            _set_pg_timeout(timedelta(seconds=0.5), pair)
        with nothing_changes(engine.module):
            found.append(failure(engine.forward_backward, *FOUR, CRITERION))
        found.append(failure(ScatterOnceParallel, build(mlp), process_group=pairs[1]))
        (folder / "waited").touch()
    while not (folder / "waited").exists():  # alive, and not there
        time.sleep(0.02)
    for pair in pairs:
        dist.destroy_process_group(pair)
    return found


def test_waiting_ranks_say_what_for(tmp_path):
    found, *_ = run_on_ranks(3, absent, tmp_path)
    waited_for = [
        "the flags and counts of all ranks",
        "the other ranks' accelerators",
    ]
    for (kind, words), what in zip(found, waited_for, strict=True):
        assert kind == "RankError"
        assert re.match(
            rf"rank 0 of 2 waited \d+\.\d s for {what}, and another rank was", words
        )
        assert "did not come within the process group's timeout" in words
    assert (
        "timeout; nothing was changed on this rank. The group cannot be used"
        in found[0][1]
    )


def with_nccl_alone(group):
    with (
        mock.patch.object(dist, "get_backend_config", return_value="cuda:nccl"),
        mock.patch.object(dist, "get_backend", return_value="nccl"),
        warnings.catch_warnings(record=True, action="always") as caught,
    ):
        ScatterOnceParallel(build(mlp), process_group=group).close()
    return [str(warning.message) for warning in caught]


def test_group_without_gloo_warns():
    ((words,),) = run_on_ranks(1, with_nccl_alone)
    assert words.startswith("the process group has nccl only")
    assert 'init_process_group("cpu:gloo,' in words


def threads_of_gloo():
    found = 0
    for file in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # a thread that has ended in between
            found += "gloo" in file.read_text()
    return found


def left(group):
    before = threads_of_gloo()
    pair = dist.new_group([0, 1])
    if group.rank() == 2:
        return None
    engine = ScatterOnceParallel(build(mlp), process_group=pair)
    engine.forward_backward(*FOUR, CRITERION)
    dist.destroy_process_group(pair)
    del pair
    with nothing_changes(engine.module):
        raised = failure(engine.forward_backward, *FOUR, CRITERION)
    return raised, in_time(lambda: threads_of_gloo() == before)


def test_end_of_group_ends_its_threads():
    """The engine once held gloo's threads alive; two of 15 runs then ended with an
    abort.
    """
    for (kind, words), have_ended in run_on_ranks(3, left)[:2]:
        assert kind == "RuntimeError"
        assert (
            "the engine's process group no longer exists, perhaps because of " in words
        )
        assert have_ended
