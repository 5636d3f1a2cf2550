"""One question of many tests: is this what plain torch gives on one device?

A ``Case`` says what is trained and on what, a runner says how, and ``agree`` takes the steps:

    agree(Case(lambda: nn.Linear(FEATURES, CLASSES)), "engine", ["cpu:0", "cpu:1"])

Three modules start alike. The runner trains ``module``. Plain torch trains ``twin`` on the whole
batch: losses, gradients and parameters must be its. ``first`` sees only what replica 0 sees, in its
micro-batches: buffers must be its.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from harness.models import CLASSES, FEATURES
from harness.oracle import RELATIVE, assert_close, build, call, loss_of, randint, randn, seeded
from scatterpar import DataParallelCriterion, DataParallelModel, ScatterOnceParallel
from scatterpar.batch import nested
from scatterpar.plan import Plan, Share, make_plan

BATCH = randn(9, FEATURES), randint(CLASSES, 9)


@dataclass(frozen=True)
class Case:
    """What is trained, and on what.

    Attributes:
        model: makes the module, the same one each time.
        batch: inputs and targets.
        criterion: makes the criterion for a module; ``None`` where that computes the loss.
        changes: what a user does to the module before the second step, the third, …
        accum: sub-steps. A model that reads what its forward pass has written takes 1: plain torch
            runs one.
        by_share: each micro-batch is normalised on its own, or changes the state that the next one
            finds, so plain torch takes them in turn, and begins each share with the same state.
        relative: how far rounding may go.
        keep_dtypes: the parameters stay in the dtypes that ``model`` gives them, not float64.
        options: further ones of ``forward_backward``, or of the pair's criterion.
        unless: runners that are not for this case.
    """

    model: Callable[[], Any]
    batch: Any = BATCH
    criterion: Callable[[Any], Any] = lambda _: nn.CrossEntropyLoss()
    changes: Sequence[Callable[[Any], object]] = ()
    accum: int = 2
    by_share: bool = False
    relative: float = RELATIVE
    keep_dtypes: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    unless: Sequence[str] = ()

    def build(self) -> Any:
        if not self.keep_dtypes:
            return build(self.model)
        with seeded():
            return self.model()

    @property
    def count(self) -> int:
        return len(nested.tensors(self.batch)[0])

    def rows(self, start: int, stop: int) -> Any:
        """Copies of these rows of inputs and targets."""

        def take(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return leaf[start:stop].clone() if leaf.ndim else leaf.clone()

        return nested.map_leaves(take, self.batch)


Runner = tuple[Callable[[], Tensor], Callable[[int], Plan]]  # one step, and how it cuts rows


@contextlib.contextmanager
def by_engine(
    case: Case, module: Any, criterion: Any, devices: list[str], *, how: Any = None, **more: Any
) -> Iterator[Runner]:
    with ScatterOnceParallel(module, case.accum, devices, **(how or {})) as engine:
        yield (
            lambda: engine.forward_backward(*case.batch, criterion, **case.options, **more),
            engine.plan,
        )


@contextlib.contextmanager
def by_pair(case: Case, module: Any, criterion: Any, devices: list[str]) -> Iterator[Runner]:
    model, loss_of = DataParallelModel(module, devices), DataParallelCriterion(criterion, devices)
    inputs, targets = case.batch

    def step() -> Tensor:
        loss = loss_of(call(model, inputs), targets, **case.options)
        loss.backward()
        return loss.detach()

    yield step, lambda rows: make_plan(rows, [torch.device(device) for device in devices])


RUNNERS: dict[str, Callable[..., Any]] = {
    "engine": by_engine,
    "whole batch": lambda *args: by_engine(*args, whole_batch=True),
    "compiled": lambda *args: by_engine(*args, how={"compile": {"backend": "eager"}}),
    "pair": by_pair,
    "inference": by_engine,
}


def agree(case: Case, runner: str, devices: list[str], group: Any = None) -> list[Tensor]:
    """Steps of the runner, with the case's changes between them, are those of plain torch.

    With a process ``group`` each rank calls it, and trains the engine on its part of the rows. What
    was trained is returned, with its last gradients: all ranks must have the same bits.
    """
    if runner == "inference":
        _agree_in_inference(case, devices)
        return []
    module, twin, first = (case.build() for _ in range(3))
    criterion, plain_criterion = case.criterion(module), case.criterion(twin)
    parts = [(0, case.count)]
    run = RUNNERS[runner]
    if group is not None:
        parts = [
            (share.start, share.stop)
            for share in make_plan(case.count, [torch.device("cpu")] * group.size()).shares
        ]
        run = functools.partial(by_engine, how={"process_group": group})
    mine = parts[group.rank() if group else 0]
    given = replace(case, batch=case.rows(*mine))
    with run(given, module, criterion, devices) as (step, plan):
        for number in range(1 + max(2, len(case.changes))):
            if 0 < number <= len(case.changes):
                for one in (module, twin, first):
                    case.changes[number - 1](one)
            children = list(module.modules())
            start = buffers_of(first)
            outputs_of(case, first, plan(parts[0][1]).shares[0])
            if case.by_share:
                shares = plan(case.count).shares
                pieces = [each for share in shares for each in outputs_of(case, twin, share, start)]
                put_buffers(twin, buffers_of(first))
            else:
                pieces = [(0, case.count, call(twin, case.rows(0, case.count)[0]))]
            if runner == "whole batch":
                pieces = [(0, case.count, _joined(pieces))]
            expected = _plain_step(case, twin, pieces, plain_criterion)
            if case.by_share:  # to which the criterion may have written
                put_buffers(first, buffers_of(twin))
            loss = step()
            assert_close(loss, expected, "loss", case.relative)
            assert not loss.requires_grad
            assert list(module.modules()) == children, "the user's module has other children"
            _assert_same(case, module, twin, first)
            heads = [getattr(one, "__self__", one) for one in (criterion, plain_criterion)]
            if isinstance(heads[0], nn.Module):
                _assert_gradients(case, *heads)
            if number % 2:  # gradients of two steps add up
                for one in (module, twin):
                    _update(one)
            for ours, theirs in zip(first.parameters(), twin.parameters(), strict=True):
                ours.data.copy_(theirs)
    pairs = zip(nested.tensors(given.batch), nested.tensors(case.rows(*mine)), strict=True)
    assert all(torch.equal(*pair) for pair in pairs), "the caller's tensors were written"
    gradients = [tensor.grad for _, tensor in _trained(module) if tensor.grad is not None]
    return [tensor.detach().to_dense() for tensor in (*module.parameters(), *gradients)]


def _agree_in_inference(case: Case, devices: list[str]) -> None:
    """What the engine returns when it is called is what the module returns."""
    module, twin = (case.build().eval() for _ in range(2))
    with ScatterOnceParallel(module, case.accum, devices) as engine, torch.no_grad():
        for change in (lambda _: None, *case.changes):
            change(module), change(twin)
            inputs, _ = case.rows(0, case.count)
            assert_close(call(engine, inputs), call(twin, inputs), "output", case.relative)


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Copies of them, by name."""
    owners = [(f"{path}.".lstrip("."), owner) for path, owner in module.named_modules()]
    found = {prefix + name: b for prefix, one in owners for name, b in one._buffers.items()}
    return {name: None if b is None else b.detach().clone() for name, b in found.items()}


def put_buffers(module: nn.Module, values: dict[str, Tensor | None]) -> None:
    """Rebind them to copies: what a graph has saved is not written."""
    for name, value in values.items():
        path, _, last = name.rpartition(".")
        module.get_submodule(path)._buffers[last] = None if value is None else value.clone()


def outputs_of(
    case: Case, module: nn.Module, share: Share, start: dict[str, Tensor | None] | None = None
) -> list[tuple[int, int, Any]]:
    """Start, stop and output of each micro-batch of a share, from these buffers on.

    Attributes that a forward pass rebinds are what they were afterwards: replicas have their own.
    """
    put_buffers(module, start or {})
    attributes = [(one, dict(vars(one))) for one in module.modules()]
    found = [(*span, call(module, case.rows(*span)[0])) for span in share.micro_batches]
    for one, own in attributes:
        vars(one).update(own)
    return found


def _joined(pieces: list[tuple[int, int, Any]]) -> Any:
    starts, stops, outputs = zip(*pieces, strict=True)
    rows = [stop - start for start, stop in zip(starts, stops, strict=True)]
    return nested.join_rows(list(outputs), 0, rows) if len(rows) > 1 else outputs[0]


def _plain_step(case: Case, twin: Any, pieces: Any, criterion: Any) -> Tensor:
    total = 0
    for start, stop, output in pieces:
        loss = loss_of(output, case.rows(start, stop)[1], criterion)
        total += loss * ((stop - start) / case.count)
    before = [(tensor, tensor.grad) for _, tensor in _trained(twin)]
    for tensor, _ in before:
        tensor.grad = None
    total.backward()
    for tensor, old in before:  # torch would add to gradients that share memory twice
        if old is not None:
            tensor.grad = old if tensor.grad is None else old + tensor.grad
    return total.detach()


def _assert_same(case: Case, module: Any, twin: Any, first: Any) -> None:
    _assert_gradients(case, module, twin)
    assert module.state_dict().keys() == first.state_dict().keys()
    ours, theirs = (dict(one.named_buffers()) for one in (module, first))
    assert list(ours) == list(theirs)
    for name, buffer in ours.items():
        limits = {"rtol": 0, "atol": 0, "msg": lambda words, name=name: f"buffer {name}: {words}"}
        if buffer.dtype.is_floating_point:
            limits |= {"rtol": case.relative, "atol": 1e-14, "equal_nan": True}
        torch.testing.assert_close(buffer.detach(), theirs[name].detach(), **limits)


def _assert_gradients(case: Case, module: Any, twin: Any) -> None:
    """Each gradient is there or not, of the same dtype, layout and strides, and the same."""
    for (name, ours), (its, theirs) in zip(_trained(module), _trained(twin), strict=True):
        assert name == its
        assert (ours.grad is None) == (theirs.grad is None), f"{name}: a gradient on one side only"
        if theirs.grad is not None:
            assert ours.grad.layout == theirs.grad.layout, name
            if theirs.grad.layout == torch.strided:
                assert ours.grad.stride() == theirs.grad.stride(), f"{name}: strides"
            assert_close(ours.grad, theirs.grad, f"{name}.grad", case.relative)
        assert_close(ours.detach(), theirs.detach(), name, case.relative)


def _trained(module: Any) -> list[tuple[str, Tensor]]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return [(name, tensor) for name, tensor in named if tensor.requires_grad and tensor.is_leaf]


@torch.no_grad()
def _update(module: Any) -> None:
    """What an optimizer does."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
