"""What only an accelerator can show; one is enough: ``device_ids=[0, 0]``.

Where there is none, ``test_simulated.py`` runs these on a simulated one.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from unittest import mock

import pytest
import torch
from harness import leak_checks
from harness.models import Of
from harness.oracle import assert_step, seeded
from nullcuda import card
from torch import nn
from torch.utils.checkpoint import checkpoint

from scatterpar import (
    DataParallelCriterion,
    DataParallelModel,
    ScatterOnceParallel,
    ShardedOptimizer,
    gather,
)
from scatterpar.devices import memory

pytestmark = [
    pytest.mark.nullcuda,
    pytest.mark.vulkan,
    pytest.mark.cuda,
    pytest.mark.skipif(
        not torch.accelerator.is_available(), reason="no accelerator is here"
    ),
]
ROWS, FEATURES, CLASSES = 37, 8, 3
PLACES = [[0], [0, 0], [0, 0, 0], [0, 1], [0, 1, 0, 1], [0, 1, 2, 3]]
LOSS = nn.CrossEntropyLoss()


@pytest.fixture(params=PLACES, ids=str)
def device_ids(request):
    if max(request.param) >= torch.accelerator.device_count():
        pytest.skip(f"needs {max(request.param) + 1} accelerators")
    return request.param


def kind():
    return torch.accelerator.current_accelerator().type


def problem(*layers, dtype=torch.float64):
    with seeded():
        first, last = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)
        inputs, targets = torch.randn(ROWS, FEATURES), torch.randint(CLASSES, (ROWS,))
    model = nn.Sequential(first, *layers, nn.Tanh(), last).to(kind(), dtype)
    return model, inputs.to(dtype), targets


def whole_batch(model, inputs, targets):
    """Loss and gradients of a copy of the model, on the one card, which has ended."""
    other = copy.deepcopy(model)
    loss = LOSS(other(inputs.to(kind())), targets.to(kind()))
    loss.backward()
    torch.accelerator.synchronize()
    return loss.detach(), gradients(other)


def gradients(model):
    return [parameter.grad.clone() for parameter in model.parameters()]


def assert_close(found, expected, rtol=1e-10, atol=1e-12):
    found, expected = (
        [each.cpu() for each in tensors] for tensors in (found, expected)
    )
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def assert_bits(found, expected):
    assert_close(found, expected, 0, 0)


def moved(place, *tensors):
    """These tensors in pageable or pinned memory, or on the first card."""
    if place == "pinned":
        return [tensor.pin_memory() for tensor in tensors]
    return [
        tensor.to(f"{kind()}:0" if place == "device" else "cpu") for tensor in tensors
    ]


@pytest.mark.parametrize("place", ["host", "pinned", "device"])
def test_step_is_exact_from_any_memory(device_ids, place):
    model, *plain = problem()
    batch, plain = moved(place, *plain), moved("device", *plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ScatterOnceParallel(model, 3, device_ids) as engine:
        for move in (lambda: None, optimizer.step, optimizer.step):
            move()
            assert_step(engine, *batch, LOSS, plain=plain)
            sent = len({*device_ids} - {0}) * sum(p.nbytes for p in model.parameters())
            assert engine.last_step.bytes["replicate"] == sent


@contextlib.contextmanager
def streams_of_the_users():
    """Another current stream on every device."""
    with contextlib.ExitStack() as stack:
        for index in reversed(range(torch.accelerator.device_count())):
            stack.enter_context(torch.Stream(f"{kind()}:{index}"))
        yield


def by_engine(model, device_ids, inputs, targets, spoil, **options):
    with ScatterOnceParallel(model, 3, device_ids) as engine:
        loss = engine.forward_backward(inputs, targets, LOSS, **options)
        spoil(inputs), spoil(targets)
        return loss


def by_pair(model, device_ids, inputs, targets, spoil):
    inputs, labels = inputs.detach().requires_grad_(), targets.to("cpu", copy=True)
    outputs = DataParallelModel(model, device_ids)(inputs)
    spoil(inputs)
    loss = DataParallelCriterion(LOSS)(outputs, targets)
    spoil(targets)
    loss.backward()
    assert_close([LOSS(gather(outputs, "cpu"), labels)], [loss])
    return loss.detach()


def by_inference(model, device_ids, inputs, targets, spoil):
    with ScatterOnceParallel(model, 3, device_ids).eval() as engine:
        output = engine(inputs)
        spoil(inputs)
        return LOSS(output, targets.to(kind()))


WAYS = {
    "step": by_engine,
    "whole batch": functools.partial(by_engine, whole_batch=True),
    "pair": by_pair,
    "inference": by_inference,
}


def overwrite(tensor):
    """What a caller does whose call has ended. The race checker of the null CUDA hears
    of it.
    """
    tensor.data.fill_(float("nan") if tensor.is_floating_point() else 0)
    if card.is_null():
        card.host_writes(tensor)


@pytest.mark.parametrize("way", WAYS)
def test_pinned_memory_reusable_after_call(device_ids, way):
    """A copy from pinned memory reads it some time after it was asked for."""
    model, *batch = problem()
    loss, expected = whole_batch(model, *batch)
    batch = moved("pinned", *batch)
    found = WAYS[way](model, device_ids, *batch, overwrite)
    assert_close([found], [loss])
    if way != "inference":
        assert_close(gradients(model), expected)


@pytest.mark.parametrize("way", WAYS)
def test_steps_run_on_users_streams(device_ids, way):
    model, inputs, targets = problem()
    loss, expected = whole_batch(model, inputs, targets)
    with streams_of_the_users():
        inputs = inputs.to(kind()) * 2 / 2
        found = [WAYS[way](model, device_ids, inputs, targets, lambda _: None).cpu()]
        if way != "inference":
            found += [gradient.cpu() for gradient in gradients(model)]
    assert_close(found, [loss, *expected][: len(found)])


def test_pinned_batch_reusable_after_failure(device_ids):
    """Nothing reads the caller's memory any more, though the next rows
    were under way.
    """
    model, *batch = problem()
    batch, seen = moved("pinned", *batch), []

    def fails(scores, labels):
        seen.append(scores)
        raise RuntimeError("on purpose")

    with ScatterOnceParallel(model, 3, device_ids, verify=False) as engine:
        with pytest.raises(RuntimeError, match="on purpose"):
            engine.forward_backward(*batch, fails)
        for tensor in batch:
            overwrite(tensor)
        assert all(scores.isfinite().all() for scores in seen)


def test_workers_run_on_users_streams(device_ids):
    """A criterion may use what the caller has just computed on another device."""
    model, inputs, targets = problem()
    _, expected = whole_batch(model, inputs, targets)
    first = torch.device(kind(), 0)
    with ScatterOnceParallel(model, 3, device_ids) as engine, streams_of_the_users():
        factor = torch.full((), 2.0, device=first, dtype=inputs.dtype)

        def criterion(scores, labels):
            return factor * LOSS(scores.to(first), labels.to(first))

        engine.forward_backward(inputs, targets, criterion)
        found = [gradient.cpu() / 2 for gradient in gradients(model)]
    assert_close(found, expected)


def test_autocast_reaches_every_replica(device_ids):
    model, inputs, targets = problem(dtype=torch.float32)
    _, expected = whole_batch(model, inputs, targets)
    seen = []

    def criterion(scores, labels):
        seen.append(scores.dtype)
        return LOSS(scores, labels)

    # it would be seen too
    engine = ScatterOnceParallel(model, 2, device_ids, verify=False)
    with engine, torch.autocast(kind(), torch.float16):
        engine.forward_backward(inputs, targets, criterion)
    assert seen == [torch.float16] * 2 * len(device_ids)
    assert_close(gradients(model), expected, rtol=0.1, atol=0.02)


@pytest.mark.parametrize("factor", [1, 0.5])
def test_backward_in_another_stream_is_exact(device_ids, factor):
    """Autograd's thread hands the gradients over, after the step, and before what comes
    next.
    """
    model, *batch = problem()
    plain = copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain))
    step, end = torch.Stream(kind()), torch.Stream(kind())
    step.wait_stream(torch.accelerator.current_stream())
    with ScatterOnceParallel(model, 2, device_ids) as engine:
        for _ in range(3):
            with step:
                engine.loss(*batch, LOSS)  # dropped
                losses = [engine.loss(*batch, LOSS) for _ in range(2)]
            end.wait_stream(step)
            with end:
                for loss in losses:
                    (loss * factor).backward()
                ours.step()
            step.wait_stream(end)
            ours.zero_grad()  # not before: that memory is the step's stream's
            for _ in losses:
                inputs, targets = moved("device", *batch)
                (LOSS(plain(inputs), targets) * factor).backward()
            theirs.step()
            theirs.zero_grad()
    torch.accelerator.current_stream().wait_stream(end)
    assert_close(model.parameters(), plain.parameters())


# ---- random numbers ------------------------------------------------------------------------------


def states_of(devices):
    """Of the generators of devices that have these numbers."""
    module = torch.get_device_module(kind())
    return [
        module.get_rng_state(torch.device(kind(), index)) for index in sorted(devices)
    ]


def checkpointed(inner, reentrant):
    def again(module, rows):
        return checkpoint(module.inner, rows, use_reentrant=reentrant)

    return Of(again, inner=inner)


def remembers(where, reentrant):
    """Dropout by hand, on the card or the host, checkpointed unless ``reentrant`` is
    ``None``.
    """

    def drop(_, features):
        device = "cpu" if where == "host" else features.device
        return features * (torch.rand(features.shape, device=device) < 0.5).to(
            features.device
        )

    return Of(drop) if reentrant is None else checkpointed(Of(drop), reentrant)


def of_pairs(scores, labels):
    """A loss of all pairs of rows, which draws too."""
    scores = nn.functional.dropout(scores, 0.2)
    return (
        ((scores @ scores.T).tanh() - (labels[:, None] == labels).double())
        .square()
        .mean()
    )


CRITERIA = {
    "device": (LOSS, {}),
    "host": (lambda scores, labels: LOSS(scores.cpu(), labels.cpu()), {}),
    "whole batch": (of_pairs, {"whole_batch": True}),  # in two passes
}


@pytest.mark.draws
@pytest.mark.parametrize("loss", CRITERIA)
@pytest.mark.parametrize("where", ["host", "device"])
def test_checkpointing_repeats_its_draws(device_ids, where, loss):
    """Backward passes run in threads of torch's own, which belong to no replica by
    themselves.
    """
    criterion, options = CRITERIA[loss]
    found = []
    for reentrant in (None, True, False):
        model, *batch = problem(remembers(where, reentrant))
        states = []
        with ScatterOnceParallel(model, 3, device_ids) as engine:
            for _ in range(3):
                model.zero_grad()
                torch.manual_seed(5)
                engine.forward_backward(*batch, criterion, **options)
                states += torch.get_rng_state(), *states_of({0})
        found.append([*gradients(model), *states])
    assert_bits(found[1], found[0])
    assert_bits(found[2], found[0])


def noisy(module, inputs):
    """On the accelerator and on the CPU, also in what a backward pass computes anew."""
    noise = torch.rand(len(inputs), 1, dtype=inputs.dtype).to(inputs.device)
    return module.dropout(module.mix(inputs)) * torch.rand_like(inputs) + noise


@pytest.mark.draws
@pytest.mark.parametrize("accum", [1, 3])
def test_same_bits_on_any_number_of_gpus(accum):
    layouts = [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 2, 3], [0, 0, 0, 1], [0, 1, 0, 1]]
    layouts = [ids for ids in layouts if max(ids) < torch.accelerator.device_count()]
    first = steps_on(layouts[0], accum)
    for ids in layouts[1:]:
        assert_bits(steps_on(ids, accum), first)


def steps_on(ids, accum):
    """The losses, parameters and random states that some steps leave."""
    with seeded():
        layer = Of(noisy, dropout=nn.Dropout(0.4), mix=nn.Linear(16, 16))
    model, inputs, targets = problem(checkpointed(layer, False), dtype=torch.float32)
    torch.manual_seed(3)
    others = states_of({*ids} - {0})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    with ScatterOnceParallel(model, accum, ids) as engine:
        for rows in (ROWS, 5, 3, ROWS):
            optimizer.zero_grad()
            losses.append(engine.forward_backward(inputs[:rows], targets[:rows], LOSS))
            optimizer.step()
    assert_bits(states_of({*ids} - {0}), others)
    return [*losses, *model.parameters(), torch.get_rng_state(), *states_of({0})]


# ---- checkpoints, memory, statistics -------------------------------------------------------------


def test_every_gpu_has_a_replica_by_default():
    model, *batch = problem()
    count = torch.accelerator.device_count()
    with ScatterOnceParallel(model) as engine:
        assert engine.device_ids == tuple(torch.device(kind(), i) for i in range(count))
        assert_step(engine, *batch, LOSS, plain=moved("device", *batch))
        assert [next(r.parameters()).device for r in engine.replicas] == list(
            engine.device_ids
        )


CUBLAS = "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("pretended"), RuntimeError(CUBLAS)]
)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_adds_sub_steps(device_ids, where, error, monkeypatch):
    """Backward passes run, and fail, in threads of torch's own.

    Not every device's allocator is one that ``torch.accelerator.empty_cache`` knows.
    """
    model, *batch = problem()
    released = mock.Mock(wraps=memory.empty_cache)
    monkeypatch.setattr(memory, "empty_cache", released)

    def run_out(_):
        raise copy.copy(error)

    def criterion(scores, labels):
        if len(labels) > 4:
            run_out(None) if where == "forward" else scores.register_hook(run_out)
        return LOSS(scores, labels)

    _, expected = whole_batch(model, *batch)
    with ScatterOnceParallel(model, "auto", device_ids) as engine:
        with pytest.warns(UserWarning, match="ran out of memory"):
            engine.forward_backward(*batch, criterion)
        report = engine.last_step
    assert_close(gradients(model), expected)
    assert max(report.plan.substep_rows) <= 4
    assert released.call_count >= report.retries > 0


@pytest.mark.draws
@pytest.mark.filterwarnings('ignore:accum="auto"')
def test_tries_leave_no_draws(device_ids):
    """Trials draw from the devices' generators, and the step draws as without them."""
    found, accum = [], "auto"
    for room in (4, ROWS):

        def criterion(scores, labels, room=room):
            if len(labels) > room:
                raise torch.OutOfMemoryError("pretended")
            return LOSS(scores, labels)

        model, *batch = problem(nn.Dropout(0.3))
        torch.manual_seed(1)
        with ScatterOnceParallel(model, accum, device_ids) as engine:
            engine.forward_backward(*batch, criterion)
            shares = engine.last_step.plan.shares
            accum = max(len(share.micro_batches) for share in shares)
        states = leak_checks.random_states()
        found.append(([gradient.cpu() for gradient in gradients(model)], states))
    gradients_found, states = zip(*found, strict=True)
    assert all(map(torch.equal, *gradients_found))
    assert states[0] == states[1]


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_statistics_equal_whole_batch(device_ids, reentrant):
    """Checkpoints compute anew in the threads of autograd, which counts
    nothing twice.
    """
    inner = nn.Sequential(nn.BatchNorm1d(16), nn.Tanh())
    model, inputs, targets = problem(
        inner if reentrant is None else checkpointed(inner, reentrant)
    )
    twin = copy.deepcopy(model)
    with ScatterOnceParallel(model, 2, device_ids, buffers="batch") as engine:
        engine.forward_backward(inputs, targets, LOSS)
    twin(inputs.to(kind()))
    assert_close(model.buffers(), twin.buffers())


# ---- an optimizer on all cards ------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Adafactor]
)
def test_sharded_optimizer_has_plain_bits(device_ids, make):
    model, *batch = problem(dtype=torch.float32)
    twin = copy.deepcopy(model)
    plain = make(twin.parameters())
    with ScatterOnceParallel(model, 1, device_ids) as engine:
        sharded = ShardedOptimizer(engine, make)
        for _ in range(3):
            sharded.zero_grad()
            engine.forward_backward(*batch, LOSS)
            for one, other in zip(model.parameters(), twin.parameters(), strict=True):
                other.grad = one.grad.clone()
            sharded.step()
            plain.step()
            assert_bits(model.parameters(), twin.parameters())


@pytest.mark.draws
@pytest.mark.parametrize(
    "options", [{"reduction": "sum"}, {"whole_batch": True}], ids=str
)
def test_replicas_launch_concurrently(options):
    cards = torch.accelerator.device_count()
    barrier = threading.Barrier(cards)

    def meets(layer, rows):
        barrier.wait(60)
        return layer.linear(rows)

    model = Of(meets, linear=nn.Linear(FEATURES, CLASSES)).to(kind())
    with ScatterOnceParallel(model, 3, range(cards), verify=False) as engine:
        rows = torch.ones(6 * cards, FEATURES)
        engine.forward_backward(rows, None, lambda output, _: output.sum(), **options)
    assert not barrier.broken
