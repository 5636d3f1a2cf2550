"""What goes unseen on an accelerator that is quick: these need the simulated one's
controls.

``test_simulated.py`` runs them in every order of the simulated streams. The first ones
hold the simulation itself to what CUDA does.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
from devices.cards import test_accelerator
from devices.cards.test_accelerator import moved, whole_batch
from harness.models import Of
from harness.notes import beginning_of_note
from harness.oracle import seeded
from replicas.test_sync_batch_norm import rows_by_sub_step
from simulated import NAME, control
from torch import nn
from torch._C._distributed_c10d import FakeProcessGroup

from scatterpar import (
    DataParallelCriterion,
    DataParallelModel,
    Rows,
    ScatterOnceParallel,
)
from scatterpar.devices import coalescing, fingerprints, pieces

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        torch._C._get_privateuse1_backend_name() != NAME,
        reason="needs the simulated accelerator: run by test_simulated.py",
    ),
]
CLASSES, LOSS = test_accelerator.CLASSES, test_accelerator.LOSS
FIRST, SECOND = f"{NAME}:0", f"{NAME}:1"


@pytest.fixture
def late():
    synchronize()
    with control.ordered("late"):
        yield


problem = functools.partial(test_accelerator.problem, dtype=torch.float32)


def synchronize():
    for index in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(index)


def assert_near(model, expected, **tolerances):
    """Its gradients are these."""
    found = [parameter.grad.cpu() for parameter in model.parameters()]
    torch.testing.assert_close(
        found, [gradient.cpu() for gradient in expected], **tolerances
    )


def test_simulation_is_as_harsh_as_a_gpu(late):
    """Or what follows could not fail: order, copies that read late,
    memory that ends.
    """
    other, ones = torch.Stream(FIRST), torch.ones(4, device=FIRST)
    with other:
        assert (ones + 1).cpu().isnan().all()
    memory = torch.ones(4).pin_memory()
    copied = memory.to(FIRST, non_blocking=True)
    memory.fill_(7)
    assert copied[0].item() == 7
    back = copied.to("cpu", non_blocking=True)
    assert back.isnan().all()
    with control.limited(1, 1000), pytest.raises(torch.OutOfMemoryError):
        torch.empty(300, device=SECOND, dtype=torch.float32)


LATE = [
    ({"accum": 2}, {}, range(1, 7)),
    ({"accum": 2, "graphs": True, "verify": False}, {}, range(1, 7)),
    # Nothing is read from other cards than the first after the criterion.
    ({"accum": 1, "verify": False}, {"whole_batch": True}, range(1, 10)),
]


COMPUTED = {
    "mse_loss": lambda x: nn.functional.mse_loss(x, x.detach() + 1),
    "smooth_l1_loss": lambda x: nn.functional.smooth_l1_loss(x, x.detach() + 1),
    "repeat": lambda x: x.repeat(3, 2).square().sum(),
    "unfold": lambda x: x.unfold(0, 2, 1).square().sum(),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_simulation_computes_as_host(name):
    values = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(3, 2)
    found = []
    for device in ("cpu", FIRST):
        leaf = values.detach().to(device).requires_grad_()
        loss = COMPUTED[name](leaf)
        assert not loss.is_inference()
        loss.backward()
        found.append((loss.item(), leaf.grad.cpu()))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


DRAWN = {
    "multinomial": lambda o, g: torch.multinomial(o, 2, generator=g),
    "bernoulli": lambda o, g: torch.bernoulli(o / 2, generator=g),
    "normal": lambda o, g: torch.normal(o, o, generator=g),
    "exponential_": lambda o, g: o.exponential_(generator=g),
    "poisson": lambda o, g: torch.poisson(o, generator=g),
}


@pytest.mark.parametrize("name", DRAWN)
def test_simulation_draws_from_own_generators(name):
    ones = torch.ones(4, 8)
    values = DRAWN[name](ones.clone(), torch.Generator().manual_seed(3))
    generator = torch.Generator(SECOND).manual_seed(3)
    drawn = DRAWN[name](ones.to(SECOND), generator)
    assert drawn.device == torch.device(SECOND)
    assert torch.equal(drawn.cpu(), values)
    after = DRAWN[name](ones.to(SECOND), generator)
    assert not torch.equal(after.cpu(), values)
    with pytest.raises(RuntimeError, match="generator"):
        DRAWN[name](ones.to(SECOND), torch.Generator())


@pytest.mark.parametrize(
    ("options", "arguments", "number"),
    [(*how, number) for *how, few in LATE for number in few],
)
def test_late_kernel_failure_names_replica(late, options, arguments, number):
    """Before the launch of a graph, in it, after it; in first passes and in second
    ones.
    """
    model, *batch = problem()
    with ScatterOnceParallel(model, device_ids=[FIRST, SECOND], **options) as engine:
        step = functools.partial(engine.forward_backward, *batch, LOSS, **arguments)
        for _ in range(2):
            model.zero_grad()
            step()
        before = [p.grad.clone() for p in model.parameters()]
        control.fail_kernel(1, number)
        with pytest.raises(RuntimeError, match="illegal memory access") as caught:
            step()
        assert beginning_of_note(1, SECOND) in "".join(caught.value.__notes__)
        assert_near(model, before, rtol=0, atol=0)
        step()
        assert_near(model, [2 * gradient for gradient in before])


@pytest.mark.draws
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("options", [{}, {"whole_batch": True}], ids=str)
def test_users_error_arrives_if_device_lost(late, index, options):
    """After a kernel's assertion nothing can be put back, which is a
    note on the error.
    """

    def step(number):
        """The number of forward passes on the device, which is lost in one of them."""
        visits = []

        def asserts(_, inputs):
            visits.extend([1] * (inputs.device.index == index))
            if inputs.device.index == index and len(visits) == number:
                control.lose(index)
                raise IndexError("an index of the user's")
            return inputs

        model, *batch = problem(nn.BatchNorm1d(16), nn.Dropout(0.1), Of(asserts))
        with ScatterOnceParallel(model, 2, [FIRST, SECOND], verify=False) as engine:
            engine.forward_backward(*batch, by_rows, **options)
        return len(visits)

    notes = []
    for number in range(1, 1 + step(0)):
        with control.found_again(), pytest.raises(IndexError) as caught:
            step(number)
        notes.append("".join(caught.value.__notes__))
    assert all(
        beginning_of_note(index, (FIRST, SECOND)[index]) in noted for noted in notes
    )
    assert any("could not be put back" in noted for noted in notes)


def by_rows(scores, labels):
    return (scores.square().sum(1) * (labels != 1)).mean()


WEIGHTS = torch.tensor([0.5, 1.0, 3.0])
OPTIONS = {
    "wide sums": {"accumulate_dtype": torch.float32},
    "shares": {"shares": [2, 1, 1]},
    "batch statistics": {"buffers": "batch"},
    "finite": {"check_finite": True},
    "auto": {"accum": "auto"},
}


@pytest.mark.draws
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_need_no_float64_on_device(name, dtype):
    """Neither MPS nor the smaller XPUs have it; an operator that makes some is refused
    here.
    """
    layers = [nn.BatchNorm1d(16)] if dtype == torch.float32 else []
    loss = nn.CrossEntropyLoss(WEIGHTS.to(FIRST, dtype), ignore_index=1)
    model, inputs, targets = problem(*layers, nn.Dropout(0.1), dtype=dtype)
    devices = [FIRST, SECOND, FIRST]
    options = {"accum": 3} | OPTIONS[name]
    scaler = torch.amp.GradScaler(NAME, init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with control.incomplete():
        with pytest.raises(TypeError, match="has no float64"):
            torch.zeros(1, dtype=torch.float64, device=FIRST)
        with ScatterOnceParallel(model, device_ids=devices, **options) as engine:
            for arguments in ({}, {"return_outputs": True}, {"scaler": scaler}):
                engine.forward_backward(inputs, targets, loss, **arguments)
                optimizer.step()
            with torch.no_grad():
                assert engine(inputs).dtype == dtype
        pair = DataParallelModel(model, devices)
        DataParallelCriterion(loss)(pair(inputs), targets).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


ARGUMENTS = {"count": {"count": lambda _, targets: (targets != 1).sum()}}
ARGUMENTS |= {"outputs": {"return_outputs": True}}
STEPS = ["plain", "finite", "weighted", "function", *ARGUMENTS]


@pytest.mark.parametrize("place", ["host", "pinned", "device"])
@pytest.mark.parametrize("step", STEPS)
def test_step_waits_once_per_replica(late, step, place):
    model, *batch = problem(nn.BatchNorm1d(16))
    batch = moved(place, *batch)
    own = {"weighted": nn.CrossEntropyLoss(WEIGHTS.to(FIRST)), "function": by_rows}
    given = *batch, own.get(step, nn.CrossEntropyLoss(ignore_index=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # Labels on a card, counted by the user: how far they go is a question of its own.
    most = 3 + 2 + (step == "count" and place == "device")
    options = {"device_ids": [FIRST, SECOND, FIRST], "check_finite": step == "finite"}
    with ScatterOnceParallel(model, 4, **options) as engine:
        take = functools.partial(
            engine.forward_backward, *given, **ARGUMENTS.get(step, {})
        )
        for _ in range(8):  # checks the links, and in all of these steps the loss
            take()
        for move in (lambda: None, optimizer.step, optimizer.step):
            move()
            found = counted(take)
            assert found.synchronizations <= most, found
            assert found.blocking_copies <= most, found


def counted(step):
    """What a step does, once the devices have done what they were given before."""
    synchronize()
    before = control.counters()
    step()
    return control.counters() - before


def of_bare_weights():
    """Large and small parameters, statistics, and next to no activations."""
    sizes = [(512, 1024), *[(64, 32)] * 40, *[(32,)] * 40]
    weights = nn.ParameterList([torch.randn(size) for size in sizes])

    def compute(m, rows):
        return m.norm(rows).mean() * torch.stack([w.sum() for w in m.weights]).sum()

    return Of(compute, weights=weights, norm=nn.BatchNorm1d(32))


@pytest.mark.parametrize("large", [pieces.BYTES_PER_DEVICE, 2**10], ids=str)
@pytest.mark.parametrize("devices", [2, 4])
def test_memory_of_two_models_and_two_chunks(late, monkeypatch, devices, large):
    """Three times and more it was: flat copies to send, to receive, and of gradients at
    the end.
    """
    chunk = 2**16
    monkeypatch.setattr(coalescing, "CHUNK_BYTES", chunk)
    # The smaller one lets each device add a part of the gradients.
    monkeypatch.setattr(pieces, "BYTES_PER_DEVICE", large)
    monkeypatch.setattr(fingerprints, "WORDS_AT_A_TIME", chunk // 40)
    with seeded():
        model, rows = of_bare_weights(), torch.randn(4 * devices, 32)
    gc.collect()  # what other tests have left
    before = [torch.accelerator.memory_allocated(i) for i in range(devices)]
    model.to(FIRST)
    size = sum(parameter.nbytes for parameter in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    room = 2 * chunk + 2**15  # all activations, buffers and what is counted
    with ScatterOnceParallel(model, 1, range(devices), verify=False) as engine:
        for step in ("first", "later", "unchanged", "loss", "kept"):
            if step != "kept":
                optimizer.zero_grad()
            synchronize()
            for index in range(devices):
                torch.accelerator.reset_peak_memory_stats(index)
            if step == "loss":
                (0.5 * engine.loss(rows)).backward()
            else:
                engine.forward_backward(rows)
            master, *others = (
                torch.accelerator.max_memory_allocated(i) - before[i]
                for i in range(devices)
            )
            assert master <= (2 + (step == "kept")) * size + room, step
            assert max(others) <= 2 * size + room, step
            if step == "first":
                optimizer.step()


@pytest.mark.parametrize("devices", [3, 4])
def test_large_models_have_bits_of_one_device(late, monkeypatch, devices):
    """Parameters go along a chain, and each device adds a part of the gradients."""
    monkeypatch.setattr(pieces, "BYTES_PER_DEVICE", 2**10)
    monkeypatch.setattr(coalescing, "CHUNK_BYTES", 2**15)
    found = []
    for layout in ([0] * devices, range(devices)):
        with seeded():
            model, rows = of_bare_weights().to(FIRST), torch.randn(4 * devices, 32)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        size = sum(parameter.nbytes for parameter in model.parameters())
        with ScatterOnceParallel(model, 2, layout, verify=False) as engine:
            for _ in range(3):
                optimizer.zero_grad()
                engine.forward_backward(rows)
                others = len(set(layout)) - 1
                sums = 1 if others else 0
                assert engine.last_step.bytes["reduce"] == (others + sums) * size
                optimizer.step()
        tensors = [*model.parameters(), *(p.grad for p in model.parameters())]
        found.append([tensor.cpu() for tensor in tensors])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("by", [test_accelerator.by_engine, test_accelerator.by_pair])
@pytest.mark.parametrize("kind", ["dropped", "altered"])
@pytest.mark.parametrize(
    "way", [(0, 1), (1, 0), (2, 3)], ids=["out", "back", "broadcast"]
)
def test_corrupting_link_is_bypassed(way, kind, by):
    """Broken peer access says nothing: the gradient was simply wrong
    (pytorch #84803).
    """
    model, *batch = test_accelerator.problem()
    expected_loss, expected = whole_batch(model, *batch)
    batch = moved("device", *batch)  # a batch on a card crosses that way too
    source, target = (f"{NAME}:{i}" for i in way)
    # of four devices the third sends parameters to the fourth
    devices = range(max(way) + 1)
    take = functools.partial(by, model, devices, *batch, lambda _: None)
    with control.broken_link(*way, kind):
        with pytest.warns(
            UserWarning, match=f"from {source} to {target} arrived corrupted"
        ):
            take()
        model.zero_grad()
        loss = take()
    torch.testing.assert_close(loss, expected_loss)
    assert_near(model, expected)


@pytest.fixture
def two_backends(monkeypatch):
    """A group of one rank: gloo on the host, and on the device a library that sends
    nothing.
    """
    name = "nowhere"
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch puts its own
    if not hasattr(dist.Backend, name.upper()):
        dist.Backend.register_backend(
            name,
            lambda common, options: FakeProcessGroup._create_internal(
                common.group_rank, common.group_size, options
            ),
            extended_api=True,
            devices=[NAME],
        )
    dist.init_process_group(
        f"cpu:gloo,{NAME}:{name}", store=dist.HashStore(), rank=0, world_size=1
    )
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_only_flags_go_through_the_host(two_backends, monkeypatch):
    """Where a rank is lost NCCL ends the process, and gloo raises."""
    sent = []
    whole = dist.all_reduce

    def all_reduce(tensor, group):
        sent.append(
            (tensor.device.type, tensor.dtype, tensor.numel() * tensor.element_size())
        )
        whole(tensor, group=group)

    model, inputs, targets = problem()
    with ScatterOnceParallel(
        model, 2, [FIRST, SECOND], process_group=two_backends
    ) as engine:
        monkeypatch.setattr(dist, "all_reduce", all_reduce)
        engine.forward_backward(inputs, targets, LOSS)
        (where, _, size), *large = sent
        assert where == "cpu"
        assert size < 1024
        assert [message[:2] for message in large] == [(NAME, torch.float32)]
        assert large[0][2] >= sum(p.numel() for p in model.parameters()) * 4


# ---- rows that arrive ----------------------------------------------------------------------------

WIDE, MANY = 256, 2048


def wide_problem():
    """A batch of 2 MiB, a model of a few KiB."""
    with seeded():
        model = nn.Sequential(nn.Linear(WIDE, 4), nn.Tanh(), nn.Linear(4, CLASSES))
        inputs, targets = torch.randn(MANY, WIDE), torch.randint(CLASSES, (MANY,))
    expected = copy.deepcopy(model).double()
    nn.CrossEntropyLoss()(expected(inputs.double()), targets).backward()
    return (
        model.to(FIRST),
        inputs,
        targets,
        [p.grad.float() for p in expected.parameters()],
    )


def test_fingerprints_without_streams_on_host(monkeypatch):
    """One side of the comparison was copied to the device: every step on
    Vulkan failed.
    """
    monkeypatch.setattr(fingerprints, "has_streams", lambda _: False)
    model, *batch = problem()
    _, expected = whole_batch(model, *batch)
    with ScatterOnceParallel(model, 2, [FIRST, SECOND]) as engine:
        for _ in range(2):
            model.zero_grad()
            engine.forward_backward(*batch, LOSS)
    assert_near(model, expected)


@pytest.mark.parametrize("accum", [16, "auto"])
@pytest.mark.parametrize("place", ["host", "pinned", "device"])
def test_share_needs_room_of_micro_batches(place, accum):
    """Half of the batch is 1 MiB, and the second device has room for a
    quarter of that.
    """
    model, inputs, targets, expected = wide_problem()
    size = inputs.nbytes + targets.nbytes
    inputs, targets = moved(place, inputs, targets)
    with ScatterOnceParallel(model, accum, [FIRST, SECOND]) as engine:
        engine.forward_backward(inputs[:64], targets[:64], nn.CrossEntropyLoss())
        assert engine.last_step.retries == 0
        model.zero_grad()
        with control.limited(1, 2**18), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(4):
                engine.forward_backward(inputs, targets, LOSS)
                # the step has ended: the caller's memory is the caller's
                inputs.add_(1).sub_(1)
        assert engine.last_step.retries == 0
        assert engine.last_step.bytes["scatter"] == size // (
            2 if place == "device" else 1
        )
        assert_near(
            model, [4 * gradient for gradient in expected], rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("place", ["host", "device"])
def test_evaluation_finds_fitting_sub_steps(place):
    """A function needs 4 KiB a row beside its inputs, and the second device has 64 KiB.

    Training fits at once, before and after it.
    """
    model, inputs, targets, _ = wide_problem()
    inputs, targets = moved(place, inputs[:64], targets[:64])

    def scores(replica, rows):
        cache = torch.zeros(len(rows), 1024, device=rows.device)
        return replica(rows) + cache[:, :1]

    with torch.no_grad():
        expected = model(inputs.to(FIRST))
    with (
        ScatterOnceParallel(model, "auto", [FIRST, SECOND], verify=False) as engine,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        engine.forward_backward(inputs, targets, LOSS)
        engine.map(scores, inputs[:2])  # the replicas and threads are there
        held = torch.accelerator.memory_allocated(1)
        with control.limited(1, 2**16):
            for _ in range(3):
                found = engine.map(scores, inputs)
                torch.testing.assert_close(found, expected)
                del found
        synchronize()
        assert torch.accelerator.memory_allocated(1) == held
        engine.forward_backward(inputs, targets, LOSS)
        assert engine.last_step.plan.substep_rows == (32, 32)
    (told,) = caught
    assert "64 rows with accum=1 ran out of memory, and accum=" in str(told.message)


@pytest.mark.parametrize("place", ["host", "pinned", "device"])
def test_rows_arrive_while_gpus_compute(place, monkeypatch):
    """One after the other they took the sum of both, and from the host so much for each
    card.
    """
    monkeypatch.setattr(fingerprints, "WORDS_AT_A_TIME", 1024)
    model, inputs, targets, _ = wide_problem()
    size, speed = inputs.nbytes // 2, 1e9
    inputs, targets = moved(place, inputs, targets)
    with ScatterOnceParallel(
        model, 16, [FIRST, SECOND], verify=False, graphs=False
    ) as engine:

        def seconds(link, memory):
            synchronize()
            with control.paced(link, memory):
                engine.forward_backward(inputs, targets, LOSS)
                return control.seconds()

        seconds(0.0, 0.0)
        compute = seconds(0.0, speed)
        link = size / compute  # so that both take as long
        arrival, both = seconds(link, 0.0), seconds(link, speed)
    assert arrival > 0.9 * compute
    assert both < max(compute, arrival) + 3 * arrival / 16


def ragged(module, rows):
    """Of a list of tensors of different lengths."""
    return torch.stack([module.linear(row).sum(0) for row in rows])


@pytest.mark.parametrize("place", ["host", "pinned", "device"])
def test_packed_small_rows_arrive_whole(late, place):
    """On a card, packing them is work of a stream for which their copy
    does not wait.
    """
    with seeded():
        model = Of(ragged, linear=nn.Linear(8, 4)).to(FIRST)
        rows, targets = (
            [torch.randn(1 + i % 3, 8) for i in range(16)],
            torch.arange(16) % 4,
        )
    loss = nn.functional.cross_entropy(
        model([row.to(FIRST) for row in rows]), targets.to(FIRST)
    )
    expected = torch.autograd.grad(loss, list(model.parameters()))
    with ScatterOnceParallel(model, 2, [FIRST, SECOND], verify=False) as engine:
        for _ in range(2):
            model.zero_grad()
            engine.forward_backward(
                Rows(moved(place, *rows)), targets, nn.CrossEntropyLoss()
            )
            assert_near(model, expected)


@pytest.mark.parametrize("order", ["late", "eager", "random:3"])
@pytest.mark.parametrize("on_own_stream", [False, True])
@pytest.mark.parametrize("devices", [[FIRST, SECOND], [FIRST, "cpu", SECOND]])
def test_sync_batch_norm_exact_in_any_order(devices, on_own_stream, order):
    """Copies were once issued on another stream than the one that freed their source,
    and gradients were wrong on a stream of the user's.
    """
    with seeded():
        layers = nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4)
        plain = nn.Sequential(*layers, nn.BatchNorm1d(4)).double()
        inputs, targets = torch.randn(26, 8).double(), torch.randint(4, (26,))
    module = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain)).to(FIRST)
    synchronize()  # the parameters are there before another stream reads them
    stream = torch.Stream(FIRST) if on_own_stream else contextlib.nullcontext()
    engine = ScatterOnceParallel(module, 2, devices)
    with control.ordered(order), stream:
        for _ in range(3):
            module.zero_grad()
            plain.zero_grad()
            engine.forward_backward(inputs, targets, LOSS)
            for rows in rows_by_sub_step(engine.plan(26)):
                loss = LOSS(plain(inputs[rows]), targets[rows])
                (loss * len(rows) / 26).backward()
            expected = [parameter.grad for parameter in plain.parameters()]
            assert_near(module, expected, rtol=1e-9, atol=1e-11)
            for (name, buffer), other in zip(
                module.named_buffers(), plain.buffers(), strict=True
            ):
                torch.testing.assert_close(buffer.cpu(), other, msg=name)
        synchronize()
    engine.close()
