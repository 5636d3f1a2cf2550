"""ShardedOptimizer: the bits of the plain class, with its state on all devices of the
engine.
"""

from __future__ import annotations

import collections
import copy
import functools
import io
import itertools
import pickle
import re
from contextlib import nullcontext

import pytest
import torch
from harness.isolation import guarded
from harness.models import CLASSES, FEATURES, mlp
from harness.oracle import build, gradients, randint, randn, seeded
from harness.pairwise import pairwise
from harness.rank_processes import run_on_ranks
from torch import nn, optim
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from scatterpar import ScatterOnceParallel, ShardedOptimizer

VIRTUAL = [f"cpu:{i}" for i in range(4)]
PLACES = {
    "shared": ["cpu"] * 4,
    "virtual": VIRTUAL,
    "uneven": ["cpu:0", "cpu:0", "cpu:1", "cpu:2"],
}
KINDS = {
    "SGD": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "AdamW": (optim.AdamW, {"lr": 0.1, "amsgrad": True}),
    "AdamW, foreach": (optim.AdamW, {"lr": 0.1, "foreach": True}),
    "AdamW, fused": (optim.AdamW, {"lr": 0.1, "fused": True}),
    "Adagrad": (optim.Adagrad, {"lr": 0.1}),
    "Adafactor": (optim.Adafactor, {"lr": 0.1}),
    "Muon": (optim.Muon, {"lr": 0.1}),
    "ASGD": (optim.ASGD, {"lr": 0.1}),
    **{
        kind.__name__: (kind, {})
        for kind in (
            *(optim.Adadelta, optim.Adam, optim.Adamax, optim.NAdam, optim.RAdam),
            *(optim.RMSprop, optim.Rprop),
        )
    },
}


def matrices():
    """Of odd sizes; Muon takes nothing else."""
    sizes = itertools.pairwise([FEATURES, 13, 7, CLASSES])
    return build(
        lambda: nn.Sequential(*[nn.Linear(*n, bias=False) for n in sizes])
    ).float()


def batch(number, dtype=torch.float32):
    return randn(12, FEATURES, seed=number, dtype=dtype), randint(
        CLASSES, 12, seed=number
    )


assert_same = functools.partial(torch.testing.assert_close, rtol=0, atol=0)


class Pair:
    """A model whose optimizers are sharded, and its twin with plain ones, on one
    device.
    """

    def __init__(self, model, device_ids, *kind, **options):
        self.model, self.twin = model, copy.deepcopy(model)
        self.engine, self.optimizers = ScatterOnceParallel(model, 1, device_ids), []
        self.sharded, self.plain = self.add(*kind, **options)

    def add(self, kind, is_for=lambda p: True, **options):
        ours, theirs = (
            [p for p in one.parameters() if is_for(p)]
            for one in (self.model, self.twin)
        )
        known = {} if kind.__module__.startswith("torch.") else {"elementwise": True}
        both = (
            ShardedOptimizer(self.engine, kind, ours, **known, **options),
            kind(theirs, **options),
        )
        self.optimizers.append(both)
        return both

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.engine.close()

    def backward(self, number, **options):
        """Both have the same gradients then."""
        self.model.zero_grad()
        data = batch(number, next(self.model.parameters()).dtype)
        self.engine.forward_backward(*data, nn.CrossEntropyLoss(), **options)
        for one, other in zip(
            self.model.parameters(), self.twin.parameters(), strict=True
        ):
            other.grad = None if one.grad is None else one.grad.clone()

    def update(self):
        for optimizer in itertools.chain(*self.optimizers):
            optimizer.step()

    def step(self, number):
        self.backward(number)
        self.update()

    def kept(self):
        """What a failed step must leave alone."""
        state = (
            self.model.state_dict(),
            self.sharded.state_dict(),
            gradients(self.model),
        )
        return copy.deepcopy(state)

    def assert_same(self):
        """Parameters, gradients, state and groups, bit by bit, and the replicas too."""
        assert_same(gradients(self.model), gradients(self.twin))
        for ours, theirs in self.optimizers:
            assert_same(ours.state_dict(), theirs.state_dict())
        for model in (self.model, *self.engine.replicas):
            assert_same(list(model.parameters()), list(self.twin.parameters()))


def kinds_and_places():
    """Each optimizer on one layout, and one on each; the other pairs are slow."""
    for kind, place in itertools.product(KINDS, PLACES):
        is_quick = place == "uneven" or kind == "AdamW"
        marks = [] if is_quick else [pytest.mark.slow]
        values = *KINDS[kind], PLACES[place]
        yield pytest.param(*values, id=f"{kind}-{place}", marks=marks)


@pytest.mark.parametrize(("kind", "options", "device_ids"), [*kinds_and_places()])
def test_plain_bits_no_parameter_sent_again(kind, options, device_ids, monkeypatch):
    """And no operation mixes memories; foreach and fused kernels take tensors of virtual
    devices for one's.
    """
    takes_lists = options.get("foreach") or options.get("fused")
    # Rprop writes 0-dim numbers of the host, which torch takes on every device.
    takes_numbers = kind is torch.optim.Rprop
    is_guarded = device_ids is VIRTUAL and not (takes_lists or takes_numbers)
    with Pair(matrices(), device_ids, kind, **options) as pair:
        with (
            guarded(monkeypatch, pair.model, pair.twin) if is_guarded else nullcontext()
        ):
            for number in range(4):
                pair.step(number)
                assert not number or pair.engine.last_step.bytes["replicate"] == 0
        pair.assert_same()


def test_each_device_has_its_part_of_state():
    model = build(
        lambda: nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(8)])
    )
    with ScatterOnceParallel(model, 1, VIRTUAL) as engine:
        optimizer = ShardedOptimizer(engine, optim.AdamW)
        assert optimizer.state_bytes == {torch.device(name): 0 for name in VIRTUAL}
        engine.forward_backward(
            randn(4, 16), None, lambda output, _: output.square().mean()
        )
        optimizer.step()
        of_two = 2 * (2 * model[0].weight.nbytes + 4)
        assert [*optimizer.state_bytes.values()] == [of_two] * 4
    model = mlp()
    # what has no gradient has no owner; the master comes last
    model[0].requires_grad_(False)
    with Pair(model, VIRTUAL, optim.AdamW) as pair:
        pair.step(0)
        master, first, second, third = pair.sharded.state_bytes.values()
        assert first > second > third == master == 0


class Scaled(nn.Module):
    """Its scale is a buffer that is trained, and that each call moves."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("scale", torch.ones(100).requires_grad_())

    def forward(self, rows):
        self.scale.data.add_(0.01)
        return self.linear(rows) * self.scale.mean()


def test_trained_buffer_stays_on_master():
    """Replicas in one memory share parameters, and have buffers of their own."""
    trained_values = []
    for is_sharded in (False, True):
        with seeded():
            model = Scaled()
        leaves = [*model.parameters(), model.scale]
        device_ids = ["cpu:0", "cpu:1", "cpu:1"]
        with ScatterOnceParallel(model, 1, device_ids, verify=False) as engine:
            optimizer = optim.AdamW(leaves, 0.1)
            if is_sharded:
                optimizer = ShardedOptimizer(engine, optim.AdamW, leaves, lr=0.1)
            for number in range(3):
                optimizer.zero_grad()
                engine.forward_backward(*batch(number), nn.CrossEntropyLoss())
                optimizer.step()
            trained_values.append([leaf.tolist() for leaf in leaves])
            if is_sharded:
                on_master, _ = optimizer.state_bytes.values()
                assert on_master == 2 * model.scale.nbytes + 4
    assert trained_values[0] == trained_values[1]


def trained(model, devices, numbers, saved=None):
    """The state after some steps with gradients of plain torch, which are the same
    everywhere.
    """
    with ScatterOnceParallel(model, 1, VIRTUAL[: devices or 1]) as engine:
        make = functools.partial(ShardedOptimizer, engine, optim.AdamW)
        optimizer = make() if devices else optim.AdamW(model.parameters())
        if saved is not None:
            optimizer.load_state_dict(torch.load(io.BytesIO(saved)))
        for number in numbers:
            optimizer.zero_grad()
            inputs, targets = batch(number, torch.float64)
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        kept = io.BytesIO()
        torch.save(optimizer.state_dict(), kept)
    return kept.getvalue()


@pytest.mark.parametrize(
    ("before", "after"), [(4, 3), (2, 4), (3, 0), (0, 3), (1, 2), (4, 1)]
)
def test_resumes_on_other_devices(before, after):
    """On none: with the plain class."""
    model, expected = mlp(), mlp()
    trained(expected, 0, range(4))
    trained(model, after, range(2, 4), trained(model, before, range(2)))
    assert_same(list(model.parameters()), list(expected.parameters()))


def test_muon_beside_adamw_as_plain():
    """Two of them over one engine, with schedules."""
    first = optim.AdamW, lambda p: p.ndim < 2
    with Pair(mlp().float(), PLACES["uneven"], *first, lr=0.01) as pair:
        pair.add(optim.Muon, lambda p: p.ndim == 2, lr=0.1)
        each = itertools.chain(*pair.optimizers)
        schedules = [
            optim.lr_scheduler.LambdaLR(one, lambda n: 1 / (1 + n)) for one in each
        ]
        for number in range(3):
            pair.step(number)
            assert not number or pair.engine.last_step.bytes["replicate"] == 0
            for schedule in schedules:
                schedule.step()
        pair.assert_same()


def test_state_dict_copied_bad_load_undone():
    with Pair(mlp(), VIRTUAL, optim.AdamW) as pair:
        pair.step(0)
        saved = pair.sharded.state_dict()
        kept = copy.deepcopy(saved)
        with pytest.raises(ValueError, match="size of optimizer's group"):
            pair.sharded.load_state_dict(optim.AdamW([torch.zeros(2)]).state_dict())
        assert_same(pair.sharded.state_dict(), kept)
        pair.step(1)
        pair.assert_same()
        pair.sharded.load_state_dict(saved)
        pair.sharded.step()
        assert_same(saved, kept)


def test_hooks_run_once():
    seen = []
    with Pair(mlp(), VIRTUAL, optim.AdamW) as pair:
        one = pair.sharded
        kinds = [
            register_optimizer_step_pre_hook,
            one.register_step_pre_hook,
            one.register_step_post_hook,
            register_optimizer_step_post_hook,
        ]
        handles = [
            register(
                lambda optimizer, *_, number=number: seen.append((number, optimizer))
            )
            for number, register in enumerate(kinds)
        ]
        pair.backward(0)
        one.step()
        for handle in handles:
            handle.remove()
    assert seen == [(number, one) for number in range(4)]


def test_scaler_and_clipping_as_plain():
    with Pair(mlp(), VIRTUAL, optim.AdamW) as pair:
        each = [(pair.sharded, pair.model), (pair.plain, pair.twin)]
        scalers = [torch.amp.GradScaler("cpu", 1024.0) for _ in each]
        for number in range(4):
            pair.backward(number, scaler=scalers[0])
            scalers[1].scale(torch.ones(()))  # as scaler.scale(loss) would
            if number == 1:
                for _, model in each:
                    next(model.parameters()).grad[0, 0] = torch.inf
            for scaler, (optimizer, model) in zip(scalers, each, strict=True):
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()
        assert scalers[0].get_scale() == 512.0
        pair.assert_same()


def test_closure_called_once_with_grad():
    calls = []
    with Pair(mlp(), VIRTUAL, optim.SGD, lr=0.1) as pair:

        def closure():
            pair.backward(0)
            return calls.append(torch.is_grad_enabled()) or 5

        assert pair.sharded.step(closure) == 5
        pair.plain.step()
        pair.assert_same()
    assert calls == [True]


def test_groups_are_the_users():
    with Pair(mlp(), VIRTUAL[:3], optim.AdamW) as pair:
        # of no module
        late, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        for number in range(4):
            pair.backward(number)
            if number == 1:
                pair.sharded.add_param_group({"params": [late], "lr": 0.2})
                pair.plain.add_param_group({"params": [other], "lr": 0.2})
            for optimizer, extra in ((pair.sharded, late), (pair.plain, other)):
                optimizer.param_groups[0]["lr"] *= 0.5
                extra.grad = torch.full((3,), 1.0 + number)
                optimizer.step()
            pair.assert_same()
            assert_same(late.detach(), other.detach())
        saved = pair.sharded.state_dict()
        pair.sharded.load_state_dict(pair.plain.state_dict())
        assert_same(pair.sharded.state_dict(), saved)
        assert pair.sharded.param_groups[0]["params"][0] is next(
            pair.model.parameters()
        )


WRITES = {
    "rebound": lambda p: setattr(
        p, "data", p.detach().repeat_interleave(2, -1)[..., ::2]
    ),
    "through data": lambda p: p.data.mul_(1.5),
    "in place": lambda p: p.detach().mul_(1.5),
}


@pairwise(when=["before the step", "after the step"], write=WRITES)
def test_users_writes_are_seen(write, when):
    with Pair(mlp(), VIRTUAL, optim.AdamW) as pair:

        def write_all():
            for p in (*pair.model.parameters(), *pair.twin.parameters()):
                WRITES[write](p)

        acts = write_all, pair.update
        for number in range(3):
            pair.backward(number)
            for act in acts if when == "before the step" else reversed(acts):
                act()
            pair.assert_same()


def row_through_data(p):
    p.data[p.size(0) // 3] = 5.0


def row_of_an_array(p):
    p.detach().numpy()[p.size(0) // 3] = 5.0


def row_of_an_alias(p):
    flat = p.detach().new_empty(0).set_(p.untyped_storage())
    flat[p.numel() // 3 :][:20] = 5.0


PARTIAL_WRITES = [row_through_data, row_of_an_array, row_of_an_alias]


def wide():
    """The first weight is so large that in most steps a sample of it is read."""
    return nn.Sequential(
        *(nn.Linear(FEATURES, 2**17 // FEATURES), nn.ReLU()),
        nn.Linear(2**17 // FEATURES, CLASSES),
    )


@pytest.mark.parametrize("when", ["before the step", "after the step"])
@pytest.mark.parametrize("write", PARTIAL_WRITES)
def test_late_partial_write_stays(write, when):
    """The owner's copy lacked it, and came back over it."""
    with Pair(build(wide), VIRTUAL, optim.SGD, lr=0.1) as pair:
        for number in range(7):
            pair.backward(number)
            if when == "after the step":
                pair.update()
            if number == 5:
                write(pair.model[0].weight)
                write(pair.twin[0].weight)
            if when == "before the step":
                pair.update()
            before = pair.model[0].weight.detach().clone()
            assert_same(before, pair.twin[0].weight.detach())
        pair.assert_same()


def test_partial_write_into_frozen_stays_once_trained():
    """A parameter that no owner updates is read by a sample."""
    with Pair(build(wide), VIRTUAL, optim.SGD, lr=0.1) as pair:
        for number in range(7):
            for model in (pair.model, pair.twin):
                for p in [*model.parameters()][:-1]:
                    p.requires_grad_(number > 5)
                if number == 4:
                    row_through_data(model[0].weight)
            pair.step(number)
        assert_same(pair.model[0].weight.detach(), pair.twin[0].weight.detach())


class Overlapping(nn.Module):
    def __init__(self, cut):
        super().__init__()
        self.first, self.second = map(nn.Parameter, cut(torch.ones(9)))

    def forward(self, rows):
        return rows.mean() * (self.first.sum() + 3.0 * self.second.sum())


CUTS = {
    "starts": lambda flat: (flat[0:6], flat[3:9]),
    "later start first": lambda flat: (flat[3:9], flat[0:6]),
    "a part": lambda flat: (flat[0:9], flat[2:5]),
    "columns": lambda flat: (flat.view(3, 3)[:, :2], flat.view(3, 3)[:, 1:]),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("cut", CUTS)
def test_parameters_that_overlap_as_plain(cut, place):
    """Each owner had a copy of its own: one update was lost."""
    model, twin = Overlapping(CUTS[cut]), Overlapping(CUTS[cut])
    rows = torch.ones(4, 2)
    plain = optim.SGD(twin.parameters(), lr=0.1)
    with ScatterOnceParallel(model, 1, PLACES[place]) as engine:
        sharded = ShardedOptimizer(engine, optim.SGD, lr=0.1)
        for _ in range(3):
            model.zero_grad()
            twin.zero_grad()
            engine.forward_backward(rows, None, lambda output, _: output)
            twin(rows).backward()
            sharded.step()
            plain.step()
            torch.testing.assert_close(
                list(model.parameters()), list(twin.parameters())
            )


class Across(optim.Optimizer):
    """What it saw of all parameters is in the groups; may raise when it comes to some
    shape.
    """

    fails_at = None

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "seen": 0.0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                group["seen"] += p.grad.square().sum().item()
                total = (
                    self.state[p].setdefault("total", torch.zeros_like(p)).add_(p.grad)
                )
                p.sub_(total, alpha=group["lr"] / (1 + group["seen"]))
                if tuple(p.shape) == Across.fails_at:
                    p.grad.mul_(0.5)  # as torch's SGD does with nesterov and foreach
                    raise torch.OutOfMemoryError("on purpose")


@pairwise(shape=[(7, FEATURES), (7,), (CLASSES, 7), (CLASSES,)], first=[True, False])
def test_failure_at_an_owner_changes_nothing(shape, first, monkeypatch):
    with Pair(mlp(), VIRTUAL, Across) as pair:
        if not first:
            pair.step(0)
        pair.backward(1)
        before = pair.kept()
        monkeypatch.setattr(Across, "fails_at", shape)
        with pytest.raises(torch.OutOfMemoryError, match="on purpose") as raised:
            pair.sharded.step()
        assert "parameters and state are as they were" in "".join(
            raised.value.__notes__
        )
        assert_same(pair.kept(), before)
        monkeypatch.undo()
        pair.update()
        pair.step(2)
        pair.assert_same()
        assert pair.sharded.param_groups[0]["seen"] > 0


def test_copies_and_closed_engines_refused():
    engine = ScatterOnceParallel(mlp(), 1, VIRTUAL[:2])
    optimizer = ShardedOptimizer(engine, optim.AdamW)
    for make in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=re.escape("save its state_dict()")):
            make(optimizer)
    data = *batch(0, torch.float64), nn.CrossEntropyLoss()
    engine.forward_backward(*data)
    engine.close()
    with pytest.raises(RuntimeError, match="closed; make another"):
        optimizer.step()
    with ScatterOnceParallel(engine.module, 1, VIRTUAL[:2]) as optimizer.engine:
        optimizer.step()
        last = engine.module[2].bias
        last.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        with pytest.raises(RuntimeError, match="in the middle of a step"):
            optimizer.engine.forward_backward(*data)


def on_ranks(group):
    """Ranks of unlike machines: one, two and three devices."""
    model = matrices()
    device_ids = VIRTUAL[: group.rank() + 1]
    with ScatterOnceParallel(model, 1, device_ids, process_group=group) as engine:
        optimizer = ShardedOptimizer(engine, optim.AdamW, lr=0.1)
        for number in range(3):
            optimizer.zero_grad()
            engine.forward_backward(
                *batch(3 * number + group.rank()), nn.CrossEntropyLoss()
            )
            optimizer.step()
        state = optimizer.state_dict()["state"]
    return (
        [p.detach() for p in model.parameters()],
        state,
        engine.last_step.bytes["replicate"],
    )


def test_every_rank_steps_alike():
    first, *others = run_on_ranks(3, on_ranks)
    assert first[2] == 0
    assert_same(others, [first, first])


# ---- optimizers of other people ----------------------------------------------------


class Own(optim.Optimizer):
    """What the optimizers below have in common."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})
        self.start()

    def start(self):
        pass

    def with_gradients(self):
        for group in self.param_groups:
            yield from (p for p in group["params"] if p.grad is not None)

    @torch.no_grad()
    def step(self, closure=None):
        for number, parameter in enumerate(self.with_gradients()):
            self.update(number, parameter, 0.05)


class ExchangesStorage(Own):
    def update(self, _, parameter, rate):
        parameter.data = parameter.data - rate * parameter.grad


class SetsStorage(Own):
    def update(self, _, parameter, rate):
        parameter.set_(parameter.detach() - rate * parameter.grad)


class CountsOnParameters(Own):
    def update(self, _, parameter, rate):
        parameter.steps = getattr(parameter, "steps", 0) + 1
        parameter.sub_(parameter.grad, alpha=rate / parameter.steps)


class AddsNoise(Own):
    def update(self, _, parameter, rate):
        parameter.sub_(parameter.grad + torch.randn_like(parameter), alpha=rate)


class CountsSteps(Own):
    """In an attribute, and in the group."""

    def start(self):
        self.steps = 0

    def step(self, closure=None):
        self.steps += 1
        self.param_groups[0]["steps"] = self.steps
        super().step()

    def update(self, _, parameter, rate):
        parameter.sub_(parameter.grad, alpha=rate / self.steps)


class RebindsState(Own):
    def step(self, closure=None):
        self.state = dict(self.state)
        super().step()

    def update(self, _, parameter, rate):
        momentum = self.state.setdefault(parameter, torch.zeros_like(parameter))
        momentum.mul_(0.9).add_(parameter.grad)
        parameter.sub_(momentum, alpha=rate)


RIGHT = [
    *(ExchangesStorage, SetsStorage, CountsOnParameters, AddsNoise, CountsSteps),
    *(RebindsState, optim.Adagrad, optim.RMSprop, optim.Rprop),
]


class Wraps(Own):
    """Lets another one step, and averages every third step, as Lookahead does."""

    def __init__(self, params):
        self.inner = optim.SGD(params, lr=0.05, momentum=0.9)
        super().__init__(self.inner.param_groups)
        self.param_groups = self.inner.param_groups
        self.steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        self.steps += 1
        for parameter in self.with_gradients():
            slow = self.inner.state[parameter].setdefault("slow", parameter.clone())
            if self.steps % 3 == 0:
                parameter.copy_(slow.lerp_(parameter, 0.5))


class WrapsTwo(optim.Optimizer):
    """One for matrices, one for the rest; its groups cannot be assigned."""

    def __init__(self, params):
        params = list(params)
        self.inner = [
            optim.SGD([p for p in params if p.ndim == 2], lr=0.05),
            optim.Adam([p for p in params if p.ndim < 2], lr=0.05),
        ]
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}

    @property
    def param_groups(self):
        return [group for one in self.inner for group in one.param_groups]

    @property
    def state(self):
        return {**self.inner[0].state, **self.inner[1].state}

    @property
    def defaults(self):
        return {}

    def step(self, closure=None):
        for one in self.inner:
            one.step()

    def zero_grad(self, set_to_none=True):
        for one in self.inner:
            one.zero_grad(set_to_none)


class KeepsList(Own):
    def start(self):
        self.all = list(self.param_groups[0]["params"])

    def with_gradients(self):
        return [p for p in self.all if p.grad is not None]

    def update(self, _, parameter, rate):
        parameter.sub_(parameter.grad, alpha=rate)


class ListsInFirstStep(KeepsList):
    def start(self):
        self.all = []

    def with_gradients(self):
        self.all = self.all or list(self.param_groups[0]["params"])
        return [p for p in self.all if p.grad is not None]


class MomentaByParameter(Own):
    def start(self):
        self.momenta = {}

    def key_of(self, parameter):
        return parameter

    def update(self, _, parameter, rate):
        key = self.key_of(parameter)
        momentum = self.momenta.setdefault(key, torch.zeros_like(parameter))
        parameter.sub_(momentum.mul_(0.9).add_(parameter.grad), alpha=rate)


class MomentaById(MomentaByParameter):
    def key_of(self, parameter):
        return id(parameter)


class AveragesByParameter(optim.Adam):
    """A ``KeyError``, which would print a tensor."""

    def __init__(self, params):
        super().__init__(params, lr=0.01)
        self.average = {
            p: p.detach().clone() for g in self.param_groups for p in g["params"]
        }

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.average[parameter].lerp_(parameter, 0.5)


class EverySecondStep(CountsSteps):
    """Adds gradients up; in other steps it writes nothing."""

    def update(self, _, parameter, rate):
        total = self.state[parameter].setdefault("total", torch.zeros_like(parameter))
        total.add_(parameter.grad)
        if self.steps % 2 == 0:
            parameter.sub_(total, alpha=rate)
            total.zero_()


class NeedsClosure(Own):
    """Takes gradients twice, as SAM does."""

    def step(self, closure):
        for _ in range(2):
            with torch.enable_grad():
                closure()
            super().step()

    def update(self, _, parameter, rate):
        parameter.sub_(parameter.grad, alpha=rate)


class GradientOfGradient(Own):
    """As AdaHessian does; an engine's gradients have no graph."""

    @torch.enable_grad()
    def step(self, closure=None):
        for parameter in self.with_gradients():
            torch.autograd.grad(parameter.grad.sum(), parameter)


class OfOthers(optim.SGD):
    """A subclass may do anything, too."""


UNKNOWN = [
    *(Wraps, WrapsTwo, KeepsList, ListsInFirstStep, MomentaByParameter, MomentaById),
    *(AveragesByParameter, EverySecondStep, NeedsClosure, OfOthers),
]
# What such a class does with ``elementwise=True``, and in which step.
TOLD = {
    Wraps: (0, "wrote a parameter elsewhere"),
    KeepsList: (0, "wrote a parameter elsewhere"),
    ListsInFirstStep: (1, "did not write a parameter of shape"),
    EverySecondStep: (0, "did not write a parameter of shape"),
}
DEVICES = {
    "one": ["cpu"],
    "shared": ["cpu", "cpu"],
    "apart": ["cpu:0", "cpu:1"],
    "four": ["cpu:0", "cpu:1", "cpu:0", "cpu:1"],
}


def beside_plain(kind, devices, between=lambda *_: None, make=None, steps=8):
    """Train with the sharded optimizer, and with the class; and compare."""
    results = []
    for is_sharded in (True, False):
        model = mlp()
        with ScatterOnceParallel(model, 1, devices) as engine:
            if is_sharded:
                known = kind.__module__.startswith("torch.")
                optimizer = ShardedOptimizer(
                    engine, make or kind, elementwise=not known
                )
            else:
                optimizer = kind(model.parameters())
            if kind is AddsNoise:
                torch.manual_seed(0)
            for number in range(steps):
                between(number, optimizer)

                def closure(number=number, model=model, optimizer=optimizer):
                    optimizer.zero_grad()
                    inputs, targets = batch(number, torch.float64)
                    nn.functional.cross_entropy(model(inputs), targets).backward()

                if kind is NeedsClosure:
                    optimizer.step(closure)
                else:
                    closure()
                    optimizer.step()
        results.append([parameter.detach() for parameter in model.parameters()])
    assert_same(*results)


@pairwise(kind=RIGHT, place=DEVICES)
@pytest.mark.draws
def test_own_optimizers_have_plain_bits(kind, place):
    beside_plain(kind, DEVICES[place])


@pytest.mark.parametrize("kind", UNKNOWN)
@pytest.mark.parametrize("place", ["apart", "four"])
def test_others_are_refused_before_a_step(kind, place):
    model = mlp()
    before = copy.deepcopy(model.state_dict())
    with ScatterOnceParallel(model, 1, DEVICES[place]) as engine:
        words = rf"{kind.__name__} cannot be sharded.*use .* itself.*elementwise=True"
        with pytest.raises(TypeError, match=words):
            ShardedOptimizer(engine, kind)
        assert_same(model.state_dict(), before)
        if kind is not NeedsClosure:  # the remedy
            optimizer = kind(engine.module.parameters())
            for number in range(2):
                engine.forward_backward(
                    *batch(number, torch.float64), nn.CrossEntropyLoss()
                )
                optimizer.step()
            assert not torch.equal(model[0].weight, before["0.weight"])


@pytest.mark.parametrize("name", ["AdamW8bit", "PagedLion32bit", "LAMB", "SGD8bit"])
def test_classes_of_bitsandbytes_are_known(name):
    """Their kernels change no version, so nothing is asked of these."""

    def update(self, _, parameter, rate):
        parameter.data.sub_(parameter.grad, alpha=rate)

    kind = type(name, (Own,), {"update": update, "__module__": "bitsandbytes.optim"})
    results = []
    for make in (ShardedOptimizer, lambda engine, kind: kind(engine.parameters())):
        model = mlp()
        with ScatterOnceParallel(model, 1, DEVICES["four"]) as engine:
            optimizer = make(engine, kind)
            for number in range(3):
                optimizer.zero_grad()
                engine.forward_backward(
                    *batch(number, torch.float64), nn.CrossEntropyLoss()
                )
                optimizer.step()
        results.append(model.state_dict())
    assert_same(*results)


@pytest.mark.parametrize("kind", TOLD)
def test_what_is_not_written_is_an_error(kind):
    """Nothing has changed then."""
    number, words = TOLD[kind]
    model = mlp()
    with ScatterOnceParallel(model, 1, DEVICES["four"]) as engine:
        optimizer = ShardedOptimizer(engine, kind, elementwise=True)
        for step in range(number + 1):
            optimizer.zero_grad()
            engine.forward_backward(*batch(step, torch.float64), nn.CrossEntropyLoss())
            before = copy.deepcopy(model.state_dict())
            if step < number:
                optimizer.step()
        with pytest.raises(RuntimeError, match=f"{words}.*use the optimizer as it is"):
            optimizer.step()
        assert_same(model.state_dict(), before)


def test_empty_sparse_gradients_change_nothing():
    """A bag without entries: ``SparseAdam`` leaves its table alone."""
    with seeded():
        tables = [nn.EmbeddingBag(5, 3, sparse=True) for _ in range(4)]
    model = nn.ModuleList(tables)
    with ScatterOnceParallel(model, 1, DEVICES["apart"]) as engine:
        optimizer = ShardedOptimizer(engine, optim.SparseAdam)
        for table in tables:
            table.weight.grad = torch.sparse_coo_tensor(
                torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0, 3), (5, 3)
            )
        before = copy.deepcopy(model.state_dict())
        optimizer.step()
        assert_same(model.state_dict(), before)


@pairwise(kind=UNKNOWN, place=["one", "shared"])
def test_one_memory_takes_any_optimizer(kind, place):
    beside_plain(kind, DEVICES[place])


def forgets_state(number, optimizer):
    if number == 3:
        optimizer.state = collections.defaultdict(dict)


def exchanges_groups(number, optimizer):
    if number == 3:
        (group,) = optimizer.param_groups
        optimizer.param_groups = [group | {"lr": 0.2, "params": group["params"][:2]}]


def adds_a_group(number, optimizer):
    if number == 3:
        last = optimizer.param_groups[0]["params"].pop()
        optimizer.add_param_group({"params": [last], "lr": 0.3})


@pairwise(between=[forgets_state, exchanges_groups, adds_a_group], place=DEVICES)
def test_assigned_state_and_groups_are_obeyed(between, place):
    beside_plain(optim.AdamW, DEVICES[place], between)


@pytest.mark.parametrize("kind", [optim.AdamW, CountsSteps, KeepsList, MomentaById])
def test_optimizer_that_was_made_before(kind):
    """The function returns it, whatever it is called with."""
    model = mlp()
    with ScatterOnceParallel(model, 1, DEVICES["apart"]) as engine:
        made = kind(model.parameters())
        if kind in UNKNOWN:
            with pytest.raises(TypeError, match="cannot be sharded"):
                ShardedOptimizer(engine, lambda _: made)
            return
        known = kind is optim.AdamW
        ShardedOptimizer(engine, lambda _: made, elementwise=not known)
    assert not made.state
    assert getattr(made, "steps", 0) == 0


class ChangesItsWays(Own):
    """Trains what is in its groups, and from the tenth step on others."""

    starts_at = 10
    trains_own_list = False

    def start(self):
        self.all, self.steps = list(self.param_groups[0]["params"]), 0

    def with_gradients(self):
        self.steps += 1
        in_groups = list(super().with_gradients())
        if self.steps < self.starts_at:
            return in_groups
        if self.trains_own_list:
            return [p for p in self.all if p.grad is not None]
        return [p for p in in_groups if any(p is known for known in self.all)]

    def update(self, _, parameter, rate):
        parameter.sub_(parameter.grad, alpha=rate)


@pytest.mark.parametrize("trains_own_list", [False, True])
def test_later_change_is_found_in_its_step(trains_own_list, monkeypatch):
    monkeypatch.setattr(ChangesItsWays, "trains_own_list", trains_own_list)
    with Pair(mlp(), DEVICES["apart"], ChangesItsWays) as pair:
        for number in range(1, ChangesItsWays.starts_at):
            pair.step(number)
        pair.backward(11)
        before = pair.kept()
        what = "elsewhere" if trains_own_list else "did not write a parameter"
        with pytest.raises(RuntimeError, match=f"{what}.*use the optimizer as it is"):
            pair.sharded.step()
        assert_same(pair.kept(), before)
        ChangesItsWays(pair.model.parameters()).step()  # the remedy


class SavesMore(optim.SGD):
    def state_dict(self):
        return {**super().state_dict(), "more": 5}


def test_state_dict_is_that_of_the_class():
    seen = []
    with ScatterOnceParallel(mlp(), 1, DEVICES["apart"]) as engine:
        optimizer = ShardedOptimizer(engine, SavesMore, elementwise=True, lr=0.1)
        optimizer.register_state_dict_pre_hook(seen.append)
        optimizer.register_state_dict_post_hook(lambda _, saved: saved | {"hook": 6})
        saved = optimizer.state_dict()
    assert (saved["more"], saved["hook"], seen) == (5, 6, [optimizer])
