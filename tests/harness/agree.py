"""One question of many tests: is this what plain torch gives on one device?

A ``Case`` says what is trained and on what, a runner says how, and ``agree`` takes the
steps:

    agree(Case(lambda: nn.Linear(FEATURES, CLASSES)), "engine", ["cpu:0", "cpu:1"])

Three modules start alike. The runner trains ``module``. Plain torch trains ``twin`` on
the whole batch: losses, gradients and parameters must be its. ``first`` sees only what
replica 0 sees, in its micro-batches: buffers must be its.
"""

import contextlib
import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.isolation import guarded
from harness.models import CLASSES, FEATURES
from harness.oracle import (
    RELATIVE,
    assert_alike,
    assert_close,
    build,
    call,
    loss_of,
    randint,
    randn,
    seeded,
)
from harness.rank_processes import run_on_ranks
from scatterpar import DataParallelCriterion, DataParallelModel, ScatterOnceParallel
from scatterpar.batch import nested
from scatterpar.batch.joining import join_rows
from scatterpar.plan import make_plan

BATCH = randn(9, FEATURES), randint(CLASSES, 9)
LAYOUTS = {
    "one": ["cpu"],
    # one replica shares the master's memory, one has its own
    "mixed": ["cpu:0", "cpu:1", "cpu:0"],
    "shared": ["cpu"] * 3,
    "virtual": ["cpu:0", "cpu:1", "cpu:2"],
    "elsewhere": ("cpu:1", torch.device("cpu:0"), "cpu:1"),
}


@dataclass(frozen=True)
class Case:
    """What is trained, and on what.

    Attributes:
        model: makes the module, the same one each time.
        batch: inputs and targets.
        criterion: makes the criterion for a module; ``None`` where that computes the
            loss.
        plain: inputs and targets as plain torch takes them, if those of ``batch`` have
            markers.
        changes: what a user does to the module before the second step, the third, …
        accum: sub-steps. A model that reads what its forward pass has written takes 1:
            plain torch runs one.
        by_share: each micro-batch is normalised on its own, or changes the state that
            the next one finds, so plain torch takes them in turn, and begins each share
            with the same state.
        relative: how far rounding may go.
        keep_dtypes: the parameters stay in the dtypes that ``model`` gives them, not
            float64.
        options: further ones of ``forward_backward``, or of the pair's criterion.
        engine: further options of the engine.
        unless: runners that are not for this case.
        only: the runners that are, if not all.
    """

    model: Callable[[], Any]
    batch: Any = BATCH
    criterion: Callable[[Any], Any] = lambda _: nn.CrossEntropyLoss()
    plain: Any = None
    changes: Sequence[Callable[[Any], object]] = ()
    accum: int = 2
    by_share: bool = False
    relative: float = RELATIVE
    keep_dtypes: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    unless: Sequence[str] = ()
    only: Sequence[str] = ()

    def build(self):
        if not self.keep_dtypes:
            return build(self.model)
        with seeded():
            return self.model()

    @property
    def count(self):
        """The number of rows: of the targets' first tensor, or of the inputs'."""
        found = nested.tensors(self.plain or self.batch)
        return len(next(tensor for tensor in found if tensor.ndim))

    def rows(self, rows):
        """Copies of these rows of inputs and targets, as plain torch takes them."""

        def take(leaf):
            if not isinstance(leaf, Tensor):
                return leaf
            if not leaf.ndim or rows == range(self.count):
                return leaf.clone()
            if isinstance(rows, range):  # which keeps the memory format
                return leaf[rows.start : rows.stop].clone()
            return leaf[list(rows)]

        return nested.map_atoms(take, self.batch if self.plain is None else self.plain)

    def all(self):
        return self.rows(range(self.count))


# A runner yields two functions: one takes a step, the other is the plan of so many
# rows.


def make_engine(case, module, devices, **how):
    cut = {} if "micro_batch_cost" in (case.engine | how) else {"accum": case.accum}
    return ScatterOnceParallel(module, device_ids=devices, **(cut | case.engine | how))


@contextlib.contextmanager
def by_engine(case, module, criterion, devices, *, how=None, by="", **more):
    """``how``: more options of the engine. A check before each step leaves no trace in
    it.
    """
    options = case.options | more
    if "whole_batch" in more:  # the criterion has all terms
        options = {k: v for k, v in options.items() if k not in ("count", "reduction")}
    with make_engine(case, module, devices, **(how or {})) as engine:

        def step():
            if by == "check":
                assert engine.check(*case.batch, criterion, **options).passed
            if by != "loss":
                return engine.forward_backward(*case.batch, criterion, **options)
            loss = engine.loss(*case.batch, criterion, **options)
            loss.backward()
            return loss.detach()

        yield step, lambda rows: engine.plan(rows, costs=options.get("costs"))


def by_cost(case, *args):
    """Rows of like cost together, which are not consecutive."""
    costs = [1.0 + 3 * row % 4 for row in range(case.count)]
    budget = 8.0 if case.accum > 1 else 1e9
    return by_engine(case, *args, how={"micro_batch_cost": budget}, costs=costs)


@contextlib.contextmanager
def by_pair(case, module, criterion, devices):
    how = devices, case.engine.get("dim", 0)
    model, loss_of = (
        DataParallelModel(module, *how),
        DataParallelCriterion(criterion, *how),
    )
    inputs, targets = case.batch

    def step():
        loss = loss_of(call(model, inputs), targets, **case.options)
        loss.backward()
        return loss.detach()

    yield (
        step,
        lambda rows: make_plan(rows, [torch.device(device) for device in devices]),
    )


@contextlib.contextmanager
def apart(by, case, module, criterion, devices):
    """By an engine, or pair, of each step, whose operations may not mix tensors of two
    memories.

    The loss and the gradients are in the master's memory.
    """
    modules = [module, *_heads(criterion)]
    master = torch.device(devices[0])

    def step():
        with (
            by(case, module, criterion, devices) as (inner, _),
            pytest.MonkeyPatch.context() as patch,
            guarded(patch, *modules) as memories,
        ):
            loss = inner()
            given = [
                tensor.grad for _, tensor in _trained(module) if tensor.grad is not None
            ]
            assert {memories.owner(tensor) for tensor in (loss, *given)} <= {
                master,
                None,
            }
            used = devices[: case.count]
            assert set(memories.checked) == {torch.device(device) for device in used}
        return loss

    with by(case, module, criterion, devices) as (_, plan):
        yield step, plan


def _heads(criterion):
    """The modules that a criterion is, or is a method of."""
    found = (criterion, getattr(criterion, "__self__", None))
    return [one for one in found if isinstance(one, nn.Module)]


RUNNERS = {
    "engine": by_engine,
    "loss": lambda *args: by_engine(*args, by="loss"),
    "check": lambda *args: by_engine(*args, by="check"),
    "whole batch": lambda *args: by_engine(*args, whole_batch=True),
    "by cost": by_cost,
    "graphs": lambda *args: by_engine(*args, how={"graphs": True, "verify": False}),
    "compiled": lambda *args: by_engine(*args, how={"compile": {"backend": "eager"}}),
    "pair": by_pair,
    "inference": by_engine,
    "guarded": partial(apart, by_engine),
    "guarded pair": partial(apart, by_pair),
}


def runs(cases, quick, contract=()):
    """Each case by each runner on each layout, as parameters of a test; few of them are
    not slow.

    ``quick`` has the runners of the default run, and for each the cases; none are all
    of them. These run on mixed memories; with the engine on one replica, too. Other
    layouts are slow.
    """
    # one replica of a pair is plain torch
    layouts = {"engine": [*LAYOUTS], "pair": [*LAYOUTS][1:]}
    found = []
    for name, case in cases.items():
        for runner in case.only or RUNNERS:
            if runner in case.unless or (runner == "check" and case.by_share):
                continue
            for layout in layouts.get(runner, ["mixed"]):
                is_quick = layout == "mixed" or (layout, runner) == ("one", "engine")
                is_quick &= runner in quick and (
                    not quick[runner] or name in quick[runner]
                )
                marks = [] if is_quick else [pytest.mark.slow]
                if is_quick and runner in contract:
                    marks.append(pytest.mark.contract)
                identity = identity_of(name, runner, layout)
                found.append(
                    pytest.param(case, runner, layout, id=identity, marks=marks)
                )
    return found


def identity_of(name, *more):
    """The id of a test of a case; ``-k`` takes no spaces, commas and "="."""
    return "-".join([re.sub(r"[^\w.]+", "_", name), *more])


def agree(case, runner, devices, group=None):
    """Steps of the runner, with the case's changes between them, are those of plain
    torch.

    With a process ``group`` each rank calls it, and trains the engine on its part of
    the rows. What was trained is returned, with its last gradients: all ranks must have
    the same bits. ``devices``: a list, or the name of a layout.
    """
    devices = LAYOUTS[devices] if isinstance(devices, str) else devices
    if runner == "inference":
        _agree_in_inference(case, devices)
        return []
    module, twin, first = (case.build() for _ in range(3))
    criterion, plain_criterion = case.criterion(module), case.criterion(twin)
    given, rows_of_first = case, case.count
    if group is not None:
        parts = make_plan(case.count, [torch.device("cpu")] * group.size()).shares
        mine = parts[group.rank()]
        given = replace(
            case,
            batch=case.rows(range(mine.start, mine.stop)),
            engine={"process_group": group, **case.engine},
        )
        rows_of_first = parts[0].rows
    before = given.batch if case.plain else replace(given, plain=None).all()
    with RUNNERS[runner](given, module, criterion, devices) as (step, plan):
        for number in range(1 + max(2, len(case.changes))):
            if 0 < number <= len(case.changes):
                for one in (module, twin, first):
                    case.changes[number - 1](one)
            children = list(module.modules())
            start = buffers_of(first)
            if start:
                outputs_of(case, first, plan(rows_of_first).shares[0])
            if case.by_share:
                shares = plan(case.count).shares
                pieces = [
                    each
                    for share in shares
                    for each in outputs_of(case, twin, share, start)
                ]
                put_buffers(twin, buffers_of(first))
            else:
                pieces = [(range(case.count), call(twin, case.all()[0]))]
            if runner == "whole batch":
                pieces = [(range(case.count), _joined(pieces))]
            expected = _plain_step(case, twin, pieces, plain_criterion)
            loss = step()
            assert_close(loss, expected, "loss", case.relative)
            assert not loss.requires_grad
            assert list(module.modules()) == children, (
                "the user's module has other children"
            )
            _assert_same(case, module, twin, first)
            for ours, theirs in zip(
                *map(_heads, (criterion, plain_criterion)), strict=True
            ):
                _assert_gradients(case, ours, theirs)
            if number % 2:  # gradients of two steps add up
                for one in (module, twin):
                    _update(one)
            for ours, theirs in zip(first.parameters(), twin.parameters(), strict=True):
                ours.data.copy_(theirs)
    pairs = zip(nested.tensors(given.batch), nested.tensors(before), strict=True)
    assert all(torch.equal(*pair) for pair in pairs), (
        "the caller's tensors were written"
    )
    gradients = [
        tensor.grad for _, tensor in _trained(module) if tensor.grad is not None
    ]
    return [tensor.detach().to_dense() for tensor in (*module.parameters(), *gradients)]


def on_ranks(cases, name, size, runner="engine"):
    """Ranks, each with a part of the rows, agree with plain torch, and have the same
    bits.

    ``cases`` is the module whose ``CASES`` have it: processes cannot be sent a case.
    """
    first, *others = run_on_ranks(size, _on_a_rank, cases, name, runner)
    assert all(all(map(torch.equal, first, other)) for other in others), (
        "other bits on one of them"
    )


def _on_a_rank(group, cases, name, runner):
    case = importlib.import_module(cases).CASES[name]
    return agree(case, runner, ["cpu:0", "cpu:1"], group)


def _agree_in_inference(case, devices):
    """What the engine returns when it is called is what the module returns."""
    module, twin = (case.build().eval() for _ in range(2))
    costs = {"costs": case.options["costs"]} if "costs" in case.options else {}
    with make_engine(case, module, devices) as engine, torch.no_grad():
        for change in (lambda _: None, *case.changes):
            change(module), change(twin)
            found = call(partial(engine, **costs), case.batch[0])
            assert_alike(found, call(twin, case.all()[0]), case.relative)


def buffers_of(module):
    """Copies of them, by name."""
    owners = [(f"{path}.".lstrip("."), owner) for path, owner in module.named_modules()]
    found = {
        prefix + name: b for prefix, one in owners for name, b in one._buffers.items()
    }
    return {
        name: None if b is None else b.detach().clone() for name, b in found.items()
    }


def put_buffers(module, values):
    """Rebind them to copies: what a graph has saved is not written."""
    for name, value in values.items():
        path, _, last = name.rpartition(".")
        module.get_submodule(path)._buffers[last] = (
            None if value is None else value.clone()
        )


def outputs_of(case, module, share, start=None):
    """Rows and output of each micro-batch of a share, from these buffers on.

    Attributes that a forward pass rebinds are what they were afterwards: replicas have
    their own.
    """
    put_buffers(module, start or {})
    attributes = [(one, dict(vars(one))) for one in module.modules()]
    pieces = [share.rows_of(number) for number in range(len(share.micro_batches))]
    found = [(rows, call(module, case.rows(rows)[0])) for rows in pieces]
    for one, own in attributes:
        vars(one).update(own)
    return found


def _joined(pieces):
    rows, outputs = zip(*pieces, strict=True)
    return (
        join_rows(list(outputs), 0, [*map(len, rows)]) if len(rows) > 1 else outputs[0]
    )


def _plain_step(case, twin, pieces, criterion):
    total = 0
    for rows, output in pieces:
        loss = loss_of(output, case.rows(rows)[1], criterion)
        total += loss * (len(rows) / case.count)
    before = [(tensor, tensor.grad) for _, tensor in _trained(twin)]
    for tensor, _ in before:
        tensor.grad = None
    total.backward()
    for tensor, old in before:  # torch would add to gradients that share memory twice
        if old is not None:
            tensor.grad = old if tensor.grad is None else old + tensor.grad
    return total.detach()


def _assert_same(case, module, twin, first):
    _assert_gradients(case, module, twin)
    assert module.state_dict().keys() == first.state_dict().keys()
    ours, theirs = (dict(one.named_buffers()) for one in (module, first))
    assert list(ours) == list(theirs)
    for name, buffer in ours.items():
        limits = {
            "rtol": 0,
            "atol": 0,
            "msg": lambda words, name=name: f"buffer {name}: {words}",
        }
        if buffer.dtype.is_floating_point:
            limits |= {"rtol": case.relative, "atol": 1e-14, "equal_nan": True}
        torch.testing.assert_close(buffer.detach(), theirs[name].detach(), **limits)


def _assert_gradients(case, module, twin):
    """Each gradient is there or not, of the same dtype, layout and strides, and the
    same.
    """
    for (name, ours), (its, theirs) in zip(
        _trained(module), _trained(twin), strict=True
    ):
        assert name == its
        assert (ours.grad is None) == (theirs.grad is None), (
            f"{name}: a gradient on one side only"
        )
        if theirs.grad is not None:
            assert ours.grad.layout == theirs.grad.layout, name
            if theirs.grad.layout == torch.strided:
                assert ours.grad.stride() == theirs.grad.stride(), f"{name}: strides"
            assert_close(ours.grad, theirs.grad, f"{name}.grad", case.relative)
        assert_close(ours.detach(), theirs.detach(), name, case.relative)


def _trained(module):
    named = [*module.named_parameters(), *module.named_buffers()]
    return [
        (name, tensor)
        for name, tensor in named
        if tensor.requires_grad and tensor.is_leaf
    ]


@torch.no_grad()
def _update(module):
    """What an optimizer does."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
