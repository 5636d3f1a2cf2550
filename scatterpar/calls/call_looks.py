"""Before the outputs of calls 1, 2, 4, 8, … are joined: may they be?

The engine's look is asked about a few rows of the call, on the master::

    outputs with rows     a sum of all entries, each times a number of its row
    a 0-dim output        the loss itself: which of the rules of ``numbers`` give it

A look compares values and gradients, of the user's own module with all these rows at
once, and of a copy with parts of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.batch.batch import batch_of
from scatterpar.batch.markers import Marker
from scatterpar.calls.division import are_divided_alike
from scatterpar.calls.numbers import BY_ROWS, IGNORED_LABEL, NumberRule, rules_for
from scatterpar.devices.transfers import Transfers
from scatterpar.plan import Plan, Share
from scatterpar.replicas.replicas import ReplicaOptions, Replicas
from scatterpar.step.attempt import Attempt
from scatterpar.step.loss_weights import compute_loss_weights
from scatterpar.step.request import LossCandidate, Request
from scatterpar.step.scatter import scatter
from scatterpar.step.substeps import user_state_guarded
from scatterpar.step.task import ReplicaTask, make_tasks
from scatterpar.threads.workers import Workers
from scatterpar.torch_private.autograd import saved_tensors_hooks
from scatterpar.torch_private.tensors import version_counters_kept
from scatterpar.verify.choice import candidate_of
from scatterpar.verify.look_request import LookRequest, LossWays, is_open_between
from scatterpar.verify.look_results import name_of_loss
from scatterpar.verify.schedule import Kind, ranges_of_step
from scatterpar.verify.verifier import Verifier

_NUMBERS = 61  # per row; prime, so that no size of an output repeats them
_WAYS_OUT_OF_CALLS = (
    "Return what it is computed from, one entry per row, and compute the loss from the "
    "joined output; or call the module itself."
)


@dataclass
class CallOfLook:
    """The values of a call that a look reads.

    Attributes:
        module: the user's module.
        args: its positional arguments.
        kwargs: its keyword arguments.
        outputs: those of the replicas.
        plan: the rows of each.
        dim: the dimension of the rows.
        flags: a hash of the switches of the root.
        workers: those of the call.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Sequence[Any]
    plan: Plan
    dim: int
    flags: Hashable
    workers: Workers


class CallLooks:
    """Looks at the calls of a module and of its parts."""

    def __init__(self) -> None:
        self._verifiers: dict[Hashable, Verifier] = {}

    def rules_of(self, call: CallOfLook, *, asks: bool) -> dict[int, NumberRule]:
        """By which rules the 0-dim outputs combine, by their place among the atoms.

        If it ``asks``, and a look is due, a few rows are computed.

        Raises:
            ValueError: parts of the rows give other outputs or gradients than all at
                once.
        """
        atoms_by_replica = list(map(nested.atoms, call.outputs))
        rules: dict[int, NumberRule] = {}
        of_loss = BY_ROWS
        with_rows: list[int] = []
        sizes = [share.rows for share in call.plan.shares]
        # The join says what differs.
        if len(set(map(len, atoms_by_replica))) > 1:
            return rules
        for place, atoms in enumerate(zip(*atoms_by_replica, strict=True)):
            if not all(isinstance(atom, Tensor) for atom in atoms):
                continue
            if not atoms[0].ndim and atoms[0].is_floating_point():
                # Without a graph nothing tells a loss from other numbers: the first is.
                is_first = not rules and not torch.is_grad_enabled()
                rules[place] = BY_ROWS
                if is_first or any(atom.requires_grad for atom in atoms):
                    rules[place] = self._rule(call, place, asks)
                    of_loss = rules[place]
            elif atoms[0].is_floating_point() and are_divided_alike(
                atoms, sizes, call.dim
            ):
                with_rows.append(place)
        # A number beside the loss, such as an accuracy, is a mean of the same terms.
        for place in rules:
            if not atoms_by_replica[0][place].requires_grad:
                rules[place] = of_loss
        if with_rows and asks:
            self._check_rows(call, with_rows)
        return rules

    def tell(self) -> None:
        """Warn, after a call that has succeeded, of what looks have found."""
        for verifier in self._verifiers.values():
            verifier.tell()

    def _check_rows(self, call: CallOfLook, places: Sequence[int]) -> None:
        verifier = self._verifier((id(call.module), "rows"))
        criterion = WeighedEntries(places, call.dim)
        request = _request(call, criterion, _numbers_of_rows(call))
        request = replace(request, reduction="sum")
        _ask(verifier, call, request, [candidate_of(request)])

    def _rule(self, call: CallOfLook, place: int, asks: bool) -> NumberRule:
        """The rule for a 0-dim output with a gradient."""
        verifier = self._verifier((id(call.module), place))
        arguments = _inputs_of(call)[1]
        rules = {rule.words: rule for rule in rules_for(arguments, call.dim)}
        paths = nested.paths_of_tensors(arguments)
        candidates = [_candidate(rule, paths) for rule in rules.values()]
        request = _request(call, NumberOfOutput(place), None)
        request = replace(request, loss_name="the loss that the module returns")
        if asks:
            chosen = _ask(verifier, call, request, candidates)
        else:
            kind, _ = _kind_of_call(verifier, call, request)
            chosen = kind.remaining(candidates)[0]
        return rules[chosen.words]

    def _verifier(self, key: Hashable) -> Verifier:
        return self._verifiers.setdefault(key, Verifier())


class WeighedEntries:
    """The sum of the entries of outputs with rows, each times a number of its row."""

    def __init__(self, places: Sequence[int], dim: int) -> None:
        """``places`` are those of the outputs among the atoms."""
        self._places = places
        self._dim = dim
        self.__qualname__ = "the output of the module"

    def __call__(self, output: Any, numbers: Tensor) -> Tensor:
        """The sum."""
        # As targets of a look they have their rows where the call's have theirs.
        numbers = numbers.movedim(self._dim, 0)
        numbers = numbers.reshape(len(numbers), -1)
        total: Tensor = numbers.new_zeros(())
        atoms = nested.atoms(output)
        for place in self._places:
            by_row = atoms[place].movedim(self._dim, 0).reshape(len(numbers), -1)
            places = torch.arange(by_row.size(1), device=by_row.device)
            factors = numbers[:, (places + place) % _NUMBERS]
            total = total + (by_row * factors.to(by_row.dtype)).sum()
        return total


class NumberOfOutput:
    """One of the numbers that a module returns."""

    def __init__(self, place: int) -> None:
        self._place = place
        self.__qualname__ = f"the loss that the module returns (entry {place})"

    def __call__(self, output: Any, _: Any) -> Tensor:
        """The number."""
        number: Tensor = nested.atoms(output)[self._place]
        return number


def _candidate(rule: NumberRule, paths: Sequence[nested.Path]) -> LossCandidate:
    """The rule as a look tries it. ``paths`` are those of the arguments' tensors."""
    if rule.is_sum:
        return LossCandidate(rule.words, "sum")
    return LossCandidate(rule.words, "mean", _count_of(rule, paths))


def _count_of(
    rule: NumberRule, paths: Sequence[nested.Path]
) -> Callable[[Any, Any], Any] | None:
    if rule.labels is None:
        return None
    path = paths[rule.labels]

    def count(inputs: Any, _: Any) -> Any:
        # Not by position: here the tensors of markers are among the others.
        labels = nested.part_at(inputs, path)
        if rule.is_shifted:
            labels = labels[:, 1:]
        return labels.ne(IGNORED_LABEL).sum()

    return count


class _WithBoth(nn.Module):
    """Calls a module with positional and keyword arguments, which are its two own."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, args: Any, kwargs: Any) -> Any:
        """The module's output."""
        return self.module(*args, **kwargs)


def _inputs_of(call: CallOfLook) -> tuple[nn.Module, Any]:
    """The module of a look, and the inputs that it gets."""
    if not call.kwargs:
        return call.module, call.args
    if not call.args:
        return call.module, call.kwargs
    module = _WithBoth(call.module)
    module.train(call.module.training)
    module.training = call.module.training
    return module, (call.args, call.kwargs)


def _request(call: CallOfLook, criterion: Any, targets: Any) -> Request:
    _, inputs = _inputs_of(call)

    def without_graph(atom: Any) -> Any:
        if isinstance(atom, Marker):
            return atom.map(lambda value: nested.map_tensors(Tensor.detach, value))
        return atom.detach() if isinstance(atom, Tensor) else atom

    inputs = nested.map_atoms(without_graph, inputs)
    batch = batch_of(inputs, targets, call.plan.rows, call.dim)
    return Request([batch], call.dim, criterion)


def _numbers_of_rows(call: CallOfLook) -> Tensor:
    """A few numbers for each row, which are the same in all looks."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(call.plan.rows, _NUMBERS, generator=generator)
    if call.dim == 0:
        return numbers
    # Their rows are along the dimension of the call's.
    if call.dim <= -2:
        return numbers[(..., *(None,) * (-2 - call.dim))]
    return numbers.T[(None,) * max(0, call.dim - 1)]


def _ask(
    verifier: Verifier,
    call: CallOfLook,
    request: Request,
    candidates: Sequence[LossCandidate],
) -> LossCandidate:
    """Look at a few rows if that is due. Returns the candidate that holds."""
    kind, details = _kind_of_call(verifier, call, request)
    known = kind.remaining(candidates)
    request = request.combined_by(known[0])
    plan = _plan_of_one_replica(call.plan)
    # Of state that replicas leave differently a call itself warns (``lost_state``).
    ways = LossWays(_WAYS_OUT_OF_CALLS, list(candidates), tells_moved_state=False)
    is_open = is_open_between(request, plan, known)
    if is_open:
        details = "open", kind.steps  # new in each call
    if not kind.count_step(ranges_of_step(request), details):
        if is_open:  # as many looks as may be have not told
            verifier.warn_of_several(name_of_loss(request), known, ways, kind)
        return known[0]
    # A call without a graph is looked at, too, and its gradient is compared.
    with torch.inference_mode(False), torch.enable_grad(), _own_saved_tensors():
        attempt = _attempt_of(call, request, plan)
        task = _task_of(attempt)
        look_request = LookRequest(attempt, request, task, True, known, ways)
        # A graph of the call may have saved a buffer, which the look puts back.
        tensors = attempt.replicas.of_model.tensors
        # The user's hooks see no gradient of a look.
        with user_state_guarded(attempt), version_counters_kept(tensors):
            return verifier.look_at(look_request, kind)


def _kind_of_call(
    verifier: Verifier, call: CallOfLook, request: Request
) -> tuple[Kind, Hashable]:
    return verifier.kinds.kind_of(request, is_divided=True, flags=call.flags)


def _own_saved_tensors() -> contextlib.AbstractContextManager[None]:
    """In the body, graphs save their tensors as they are.

    A checkpoint around the call knows the tensors of its graph by their order, and
    those of a look are not computed again.
    """
    if saved_tensors_hooks() is None:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _plan_of_one_replica(plan: Plan) -> Plan:
    """The plan in which one replica computes what each replica does in the call."""
    spans: list[tuple[int, int]] = []
    for share in plan.shares:
        spans += share.micro_batches
    return Plan(plan.rows, (Share(0, plan.shares[0].device, tuple(spans)),))


def _attempt_of(call: CallOfLook, request: Request, plan: Plan) -> Attempt:
    """An attempt at the call with a replica of its own, on the master."""
    replicas = Replicas([plan.shares[0].device], ReplicaOptions())
    attempt = Attempt(request, plan, replicas, call.workers)
    module, _ = _inputs_of(call)
    replicas.refresh(module, None, Transfers())
    attempt.weights = compute_loss_weights(request, plan, None)
    return attempt


def _task_of(attempt: Attempt) -> ReplicaTask:
    """The task of the attempt's replica, of all rows in one micro-batch."""
    request = attempt.request
    loaders = scatter(request.batches, attempt.plan, attempt.transfers)
    (task,) = make_tasks(attempt, loaders)
    # The look itself cuts the rows into parts.
    share = replace(task.share, micro_batches=((0, request.rows),))
    return replace(task, share=share, criterion=request.criterion)
