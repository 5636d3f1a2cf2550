"""ShardedOptimizer: the bits of the plain class, with its state on all devices of the
engine.
"""

from __future__ import annotations

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
from harness.oracle import build, gradients, randint, randn
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
    "Adagrad": (optim.Adagrad, {"lr": 0.1}),
    "Adafactor": (optim.Adafactor, {"lr": 0.1}),
    "Muon": (optim.Muon, {"lr": 0.1}),
    "ASGD": (optim.ASGD, {"lr": 0.1}),
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
        both = (
            ShardedOptimizer(self.engine, kind, ours, **options),
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
    """And no operation mixes memories; foreach takes tensors of virtual devices for
    one's.
    """
    is_guarded = device_ids is VIRTUAL and not options.get("foreach")
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
