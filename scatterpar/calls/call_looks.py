"""Before the outputs of calls 1, 2, 4, 8, … are joined: may they be?

The engine's look is asked about a few rows of the call, on the master::

    outputs with rows     a sum of all entries, each times a number of its row
    a 0-dim output        the number itself: which of the rules of ``numbers`` give it

A look compares values and gradients, of the user's own module with all these rows at
once, and of a copy with parts of them. Each number has a rule of its own. If none
fits, a number with a gradient is refused, because it may be trained. Of another number
a warning says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.batch.batch import batch_of
from scatterpar.batch.joining import Entries, Lists, entries_per_row, tensors_by_place
from scatterpar.batch.markers import Marker
from scatterpar.calls.division import are_divided_alike
from scatterpar.calls.numbers import BY_ROWS, IGNORED_LABEL, NumberRule, rules_for
from scatterpar.devices.copies import to_numbers
from scatterpar.devices.transfers import Transfers
from scatterpar.devices.virtual_devices import physical
from scatterpar.log import logger
from scatterpar.plan import Plan, Share
from scatterpar.replicas.replicas import ReplicaOptions, Replicas
from scatterpar.step.attempt import Attempt
from scatterpar.step.loss_weights import compute_loss_weights
from scatterpar.step.request import LossCandidate, Request
from scatterpar.step.scatter import scatter
from scatterpar.step.substeps import user_state_guarded
from scatterpar.step.task import ReplicaTask, make_tasks
from scatterpar.threads.process_settings import SETTINGS_KEPT
from scatterpar.threads.workers import Workers
from scatterpar.torch_private.autograd import own_saved_tensors
from scatterpar.torch_private.modules import parametrizations_uncached
from scatterpar.torch_private.tensors import version_counters_kept
from scatterpar.verify.choice import candidate_of
from scatterpar.verify.dropped_messages import warnings_dropped
from scatterpar.verify.look_request import LookRequest, LossWays, is_open_between
from scatterpar.verify.look_results import name_of_loss
from scatterpar.verify.runs import Runs
from scatterpar.verify.schedule import (
    Kind,
    Stage,
    kinds_and_words,
    ranges_of_integers,
    ranges_of_step,
)
from scatterpar.verify.verdicts import in_lines
from scatterpar.verify.verifier import Verifier

_NUMBERS = 61  # per row; prime, so that no size of an output repeats them
_MOST_SELECTIONS = 16  # of a module; a text or a number may count its calls
_MOST_KINDS = 64  # that are remembered
_SELECTING = (bool, int, str)  # the classes of arguments that may select an output
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
        outputs: those of the micro-batches, in the order of the rows.
        plan: the rows of each.
        dim: the dimension of the rows.
        lists: whether lists in the outputs may have one entry per row.
        flags: a hash of the switches of the root.
        is_of_part: whether the module is a part of the root, which can be computed on
            the master instead.
        workers: those of the call.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Sequence[Any]
    plan: Plan
    dim: int
    lists: Lists
    flags: Hashable
    is_of_part: bool
    workers: Workers

    @functools.cached_property
    def atoms(self) -> list[Any]:
        """Those of the arguments."""
        return nested.atoms((self.args, self.kwargs))

    def columns(self) -> dict[int, list[Tensor]]:
        """The tensors of all outputs by their position in the first one.

        Not those of lists with one entry per row.
        """
        if all(isinstance(output, Tensor) for output in self.outputs):  # mostly
            return {0: list(self.outputs)}
        tensors = nested.tensors(self.outputs[0])
        positions = {id(tensor): number for number, tensor in enumerate(tensors)}
        sizes = list(map(len, self.parts()))
        columns = tensors_by_place(self.outputs, sizes, self.dim, self.lists)
        return {positions[id(column[0])]: column for column in columns}

    def selection(self, classes: tuple[type, ...] = _SELECTING) -> Hashable:
        """The values that may select an output: the switches of the root, the names of
        arguments, and the words and integers among them.
        """
        values: list[Hashable] = [self.flags, *self.kwargs]
        for number, atom in enumerate(self.atoms):
            if isinstance(atom, enum.Enum):
                values.append((number, atom.name))
            elif type(atom) in classes:
                values.append((number, repr(atom)))  # -1 and -2 have one hash
        return hash(tuple(values))

    def parts(self) -> list[range]:
        """The rows of each output."""
        return [range(*span) for span in sorted(_spans(self.plan))]


@dataclass(frozen=True)
class OutputTensors:
    """What is known of the tensors of an output, by their positions among these.

    Attributes:
        rules: how numbers combine.
        entries: of tensors whose sizes may be those of rows, and that have none.
    """

    rules: Mapping[int, NumberRule] = field(default_factory=dict)
    entries: Mapping[int, Entries] = field(default_factory=dict)


class CallLooks:
    """Looks at the calls of a module and of its parts."""

    def __init__(self) -> None:
        self._verifiers: dict[Hashable, Verifier] = {}
        self._entries: dict[Hashable, Mapping[int, Entries]] = {}
        # Of calls whose outputs have rows: their kinds and details.
        self._kinds_of_rows: dict[int, tuple[Kind, Hashable]] = {}
        # What has selected outputs so far, by the module's ``id``.
        self._selections: defaultdict[Hashable, set[Hashable]] = defaultdict(set)

    def look(
        self, call: CallOfLook, *, asks: bool, compares_rows: bool = True
    ) -> OutputTensors:
        """How the outputs of the micro-batches are joined.

        If it ``asks``, and a look is due, a few rows are computed.

        Raises:
            ValueError: with ``compares_rows``, parts of the rows give other outputs or
                gradients than all at once; numbers with a gradient that no rule gives.
        """
        rules: dict[int, NumberRule] = {}
        with_rows: list[int] = []
        sizes = list(map(len, call.parts()))
        columns = call.columns()
        entries = self._entries_of(call, columns, asks)
        for position, column in columns.items():
            if position in entries:
                continue
            if not any(tensor.ndim for tensor in column):
                rules[position] = self._rule(call, position, column, asks)
            elif column[0].is_floating_point() and are_divided_alike(
                column, sizes, call.dim
            ):
                with_rows.append(position)
        if with_rows and asks and compares_rows:
            self._check_rows(call, with_rows)
        return OutputTensors(rules, entries)

    def tell(self) -> None:
        """Warn, after a call that has succeeded, of what looks have found."""
        for verifier in self._verifiers.values():
            verifier.tell()

    def _entries_of(
        self, call: CallOfLook, columns: Mapping[int, Sequence[Tensor]], asks: bool
    ) -> Mapping[int, Entries]:
        """The tensors that have no rows, though their sizes may be those of rows.

        Another number of rows shows them, which the user's own module computes once for
        all calls with outputs of this kind.
        """
        sizes = {len(part) for part in call.parts()}
        if len(sizes) > 1:  # tensors with rows differ in their sizes
            return {}
        (num_rows,) = sizes
        with_entries = {
            position: column[0]
            for position, column in columns.items()
            if entries_per_row(column[0], num_rows, call.dim)
        }
        kinds = [(p, tensor.dtype, tensor.ndim) for p, tensor in with_entries.items()]
        key = id(call.module), self._selection_of(call), tuple(kinds)
        if with_entries and asks and key not in self._entries:
            # Not two rows if the call's parts have two; one is too few for statistics.
            other_rows = range(3 if num_rows == 2 else 2)
            tensors = _tensors_for(call, other_rows)
            entries: dict[int, Entries] = {}
            for position, tensor in with_entries.items():
                if position < len(tensors):
                    kind = _entries_kind(
                        tensor, num_rows, tensors[position], len(other_rows), call.dim
                    )
                    if kind is not None:
                        entries[position] = kind
            self._entries[key] = entries
        return self._entries.get(key, {})

    def _check_rows(self, call: CallOfLook, places: Sequence[int]) -> None:
        verifier = self._verifier((id(call.module), "rows"))
        criterion = WeighedEntries(places, call.dim)
        # Each call asks, and most calls are of a known kind, so no request is made.
        of_atoms = kinds_and_words(call.atoms)
        key = hash((id(call.module), tuple(places), call.dim, call.flags, of_atoms))
        if key not in self._kinds_of_rows:
            if len(self._kinds_of_rows) == _MOST_KINDS:  # a word may count its calls
                self._kinds_of_rows.clear()
            request = _request(call, criterion, None)
            kind_of_call = _kind_of_call(verifier, call, request, selection=None)
            self._kinds_of_rows[key] = kind_of_call
        kind, details = self._kinds_of_rows[key]
        # Numbers of rows are made, and read, for a look only.
        if kind.count_step(ranges_of_integers(call.atoms, call.dim), details):
            request = _request(call, criterion, _numbers_of_rows(call))
            request = replace(request, reduction="sum")
            _look_at(verifier, call, request, kind, [candidate_of(request)])

    def _rule(
        self, call: CallOfLook, position: int, column: Sequence[Tensor], asks: bool
    ) -> NumberRule:
        """The rule for a 0-dim output."""
        criterion = NumberOfOutput(call, position, column)
        has_gradient = criterion.has_gradient
        verifier = self._verifier((id(call.module), position))
        arguments = _inputs_of(call)[1]
        rules = {rule.words: rule for rule in rules_for(arguments, call.dim)}
        paths = nested.paths_of_tensors(arguments)
        candidates = [_candidate(rule, paths) for rule in rules.values()]
        request = _request(call, criterion, None)
        selection = self._selection_of(call)
        kind, _ = _kind_of_call(verifier, call, request, selection)
        if kind.has_no_rule and not has_gradient:
            return BY_ROWS
        if not asks:
            return rules[kind.remaining(candidates)[0].words]
        try:
            chosen = _ask(verifier, call, request, candidates, column, selection)
        except ValueError as error:
            if has_gradient:
                raise
            if kind.stage is not Stage.REFUSED:
                verifier.warn("error", f"could not check {criterion.name}: {error}")
                return BY_ROWS
            # Nobody trains it, and this call has said so. With a gradient it is looked
            # at in each call, and refused.
            kind.has_no_rule = True
            text = _number_without_rule(criterion.name, list(rules))
            verifier.warn("no rule", text)
            return BY_ROWS
        return rules[chosen.words]

    def _selection_of(self, call: CallOfLook) -> Hashable:
        """The values of a call that may select another output than those of others.

        ``None`` for all calls with further values, once there are many.
        """
        # Integers count calls more often than words do.
        for classes in (_SELECTING, (bool, str)):
            known = self._selections[id(call.module), classes]
            selection = call.selection(classes)
            if selection in known or len(known) < _MOST_SELECTIONS:
                known.add(selection)
                return selection
        return None

    def _verifier(self, key: Hashable) -> Verifier:
        return self._verifiers.setdefault(key, Verifier())


class WeighedEntries:
    """The sum of the entries of outputs with rows, each times a number of its row."""

    def __init__(self, places: Sequence[int], dim: int) -> None:
        """``places`` are those of the outputs among the tensors."""
        self._places = places
        self._dim = dim
        self.__qualname__ = "the output of the module"

    def __call__(self, output: Any, numbers: Tensor) -> Tensor:
        """The sum."""
        # As targets of a look they have their rows where the call's have theirs.
        numbers = numbers.movedim(self._dim, 0)
        numbers = numbers.reshape(len(numbers), -1)
        total: Tensor = numbers.new_zeros(())
        tensors = nested.tensors(output)
        for place in self._places:
            by_row = tensors[place].movedim(self._dim, 0).reshape(len(numbers), -1)
            places = torch.arange(by_row.size(1), device=by_row.device)
            factors = numbers[:, (places + place) % _NUMBERS]
            total = total + (by_row * factors.to(by_row.dtype)).sum()
        return total


class NumberOfOutput(nn.Module):
    """One of the numbers that a module returns.

    A number without a gradient gets one, by a factor: it is the number itself.

    Attributes:
        has_gradient: whether the call's number has one.
        name: the number, as texts name it.
    """

    def __init__(
        self, call: CallOfLook, position: int, column: Sequence[Tensor]
    ) -> None:
        super().__init__()
        first = column[0]
        self._position = position
        self.has_gradient = any(tensor.requires_grad for tensor in column)
        noun = "loss" if self.has_gradient else "number"
        entry = _entry_at(call.outputs[0], position)
        self.name = f"the {noun} that the module returns{entry}"
        self.__qualname__ = self.name
        master = physical(call.plan.shares[0].device)
        # In its dtype, or the tolerance would be that of a coarser one.
        dtype = torch.promote_types(first.dtype, torch.float32).to_real()
        with torch.inference_mode(False):
            self.factor = nn.Parameter(torch.ones((), dtype=dtype, device=master))

    def forward(self, output: Any, _: Any) -> Tensor:
        """The number."""
        number: Tensor = nested.tensors(output)[self._position]
        if number.is_complex():
            number = torch.view_as_real(number).sum()
        if number.requires_grad:
            return number
        return number * self.factor


def _entry_at(output: Any, position: int) -> str:
    """A tensor of an output, as Python selects it; empty for the output itself."""
    text = ""
    for number in nested.paths_of_tensors(output)[position]:
        children = list(nested.children_of(output))
        if isinstance(output, Mapping):
            text += f"[{list(output)[number]!r}]"
        elif dataclasses.is_dataclass(output):
            text += f".{dataclasses.fields(output)[number].name}"
        else:
            text += f"[{number}]"
        output = children[number]
    return f" (output{text})" if text else ""


def _number_without_rule(name: str, words: Sequence[str]) -> str:
    """The text of a warning."""
    return in_lines(
        f"{name} is none of these: {', '.join(words)}. You get the mean of "
        "this number over the micro-batches, weighted by their rows. The number of "
        "all rows is another one.",
        _WAYS_OUT_OF_CALLS,
    )


def _tensors_for(call: CallOfLook, rows: range) -> Sequence[Tensor]:
    """The tensors of the module's own output for a few rows of the call.

    None if the module does not compute these rows.
    """
    request = _request(call, None, None)

    def computed() -> Sequence[Tensor]:
        runs = Runs(attempt, request, task)
        with runs.user_code.isolated(), runs.surroundings(runs.own_task):
            output = runs.own_task.output_of(runs.inputs_of(rows))
        return [tensor.detach() for tensor in nested.tensors(output)]

    with torch.inference_mode(False), own_saved_tensors():
        attempt = _attempt_of(call, request, _plan_of_one_replica(call.plan))
        task = _task_of(attempt)
        try:
            with SETTINGS_KEPT, warnings_dropped(), _state_kept(attempt):
                results: list[Any] = call.workers.parallel_apply(
                    [computed], [()], [task.share.device]
                )
        # User code may need other rows, or memory.
        except Exception as error:
            logger.debug("no output for another number of rows: %s", error)
            return []
    tensors: Sequence[Tensor] = results[0]
    return tensors


def _entries_kind(
    tensor: Tensor, num_rows: int, other: Tensor, num_other_rows: int, dim: int
) -> Entries | None:
    """What the entries of a tensor for ``num_rows`` are, beside that of others.

    ``None``: one per row, or unknown.
    """
    if other.shape == tensor.shape:
        return Entries.FIXED
    if other.ndim != tensor.ndim:
        return None
    if other.size(dim) == tensor.size(dim):
        return Entries.OTHERS
    per_row = entries_per_row(tensor, num_rows, dim)
    if other.size(dim) != per_row * num_other_rows:
        return None
    if per_row > 1:
        return Entries.OTHERS
    for axis in range(tensor.ndim):
        # Such as the scores of all pairs of rows.
        sizes = tensor.size(axis), other.size(axis)
        if axis != dim % tensor.ndim and sizes == (num_rows, num_other_rows):
            return Entries.OTHERS
    return None


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


def _spans(plan: Plan) -> list[tuple[int, int]]:
    """Begin and end of the rows of each micro-batch."""
    spans: list[tuple[int, int]] = []
    for share in plan.shares:
        spans += share.micro_batches
    return spans


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
    column: Sequence[Tensor] = (),
    selection: Hashable = None,
) -> LossCandidate:
    """Look at a few rows if that is due. Returns the candidate that holds.

    ``column`` are the numbers of the call whose rule is looked for, and ``selection``
    are the values that select them.
    """
    kind, details = _kind_of_call(verifier, call, request, selection)
    known = kind.remaining(candidates)
    request = request.combined_by(known[0])
    plan = _plan_of_one_replica(call.plan)
    is_open = is_open_between(request, plan, known) and not _all_agree(known, column)
    if is_open:
        details = "open", kind.steps  # new in each call
    if not kind.count_step(ranges_of_step(request), details):
        if is_open:  # as many looks as may be have not told
            verifier.warn_of_several(
                name_of_loss(request), known, _WAYS_OUT_OF_CALLS, kind
            )
        return known[0]
    return _look_at(verifier, call, request, kind, candidates, column)


def _look_at(
    verifier: Verifier,
    call: CallOfLook,
    request: Request,
    kind: Kind,
    candidates: Sequence[LossCandidate],
    column: Sequence[Tensor] = (),
) -> LossCandidate:
    """Look at a few rows. Returns the candidate that holds."""
    known = kind.remaining(candidates)
    plan = _plan_of_one_replica(call.plan)
    # Of state that replicas leave differently a call itself warns (``lost_state``).
    ways = LossWays(
        _WAYS_OUT_OF_CALLS,
        list(candidates),
        tells_moved_state=False,
        parts_are_equal=_all_agree(known, column),
        refuses_compared_rows=call.is_of_part,
        take_arguments=False,
    )
    # A call without a graph is looked at, too, and its gradient is compared.
    with torch.inference_mode(False), torch.enable_grad(), own_saved_tensors():
        attempt = _attempt_of(call, request, plan)
        task = _task_of(attempt)
        look_request = LookRequest(attempt, request, task, True, known, ways)
        with _state_kept(attempt):
            return verifier.look_at(look_request, kind)


@contextlib.contextmanager
def _state_kept(attempt: Attempt) -> Iterator[None]:
    """In the body a look calls user code, of which the call sees nothing."""
    # A graph of the call may have saved a buffer, which the look puts back.
    tensors = attempt.replicas.of_model.tensors
    # The user's hooks see no gradient of a look.
    with (
        user_state_guarded(attempt),
        version_counters_kept(tensors),
        parametrizations_uncached,
    ):
        yield


def _all_agree(known: Sequence[LossCandidate], column: Sequence[Tensor]) -> bool:
    """Whether all candidates give the same for these numbers, which have no gradient.

    All means of equal numbers do, and the sum, too, if they are zeros or NaN.
    """
    if not column or any(number.requires_grad for number in column):
        return False
    numbers = list(map(to_numbers, column))
    number = numbers[0]
    # As texts, because NaN is equal to NaN here.
    if any(repr(other) != repr(number) for other in numbers):
        return False
    if any(candidate.reduction == "sum" for candidate in known):
        return not number or number != number
    return True


def _kind_of_call(
    verifier: Verifier, call: CallOfLook, request: Request, selection: Hashable
) -> tuple[Kind, Hashable]:
    return verifier.kinds.kind_of(
        request, is_divided=True, flags=call.flags, selection=selection
    )


def _plan_of_one_replica(plan: Plan) -> Plan:
    """The plan in which one replica computes what each replica does in the call."""
    spans = tuple(_spans(plan))
    return Plan(plan.rows, (Share(0, plan.shares[0].device, spans),))


def _attempt_of(call: CallOfLook, request: Request, plan: Plan) -> Attempt:
    """An attempt at the call with a replica of its own, on the master."""
    replicas = Replicas([plan.shares[0].device], ReplicaOptions())
    attempt = Attempt(request, plan, replicas, call.workers)
    module, _ = _inputs_of(call)
    replicas.refresh(module, request.criterion, Transfers())
    attempt.weights = compute_loss_weights(request, plan, None)
    return attempt


def _task_of(attempt: Attempt) -> ReplicaTask:
    """The task of the attempt's replica, of all rows in one micro-batch."""
    request = attempt.request
    loaders = scatter(request.batches, attempt.plan, attempt.transfers)
    (task,) = make_tasks(attempt, loaders)
    # The look itself cuts the rows into parts.
    share = replace(task.share, micro_batches=((0, request.rows),))
    return replace(task, share=share)
