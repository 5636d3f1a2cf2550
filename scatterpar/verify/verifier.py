"""Decide when to look, look with the first replica, and say what was found.

A kind of criterion and batch is looked at in steps 1, 2, 4, 8, 16, …; after a refusal
until a look agrees; if labels leave the range that was seen (labels on an accelerator:
in the step after); if switches of the model, numbers of the criterion or words in the
batch are new. The only error of a look is its ``ValueError``. If looks stay
inconclusive, one warning says so.
"""

from __future__ import annotations

import math
import operator
import time
import warnings
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, islice, product, repeat
from threading import Event
from typing import Any

from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.batch.markers import all_tensors
from scatterpar.devices.fingerprints import same_bits
from scatterpar.devices.memory import no_kernel_search
from scatterpar.devices.streams import is_async
from scatterpar.devices.transfers import Transfers
from scatterpar.errors import warn
from scatterpar.plan import shown
from scatterpar.replicas.module_copy import module_of
from scatterpar.step.attempt import Attempt
from scatterpar.step.criterion_closure import DEPTH, PLAIN, reachable
from scatterpar.step.loss_weights import count_labels, is_cross_entropy
from scatterpar.step.request import Call, Request, checked
from scatterpar.step.scatter import scatter
from scatterpar.step.substeps import ReplicaTask, make_tasks
from scatterpar.threads.workers import Overdue
from scatterpar.verify.look import (
    SMALL,
    Compute,
    Inconclusive,
    Look,
    Verdict,
    compare_outputs,
    entries_per_row,
    pieces_of,
)
from scatterpar.verify.ranges import informative_tensors, ranges_of, read_ranges
from scatterpar.verify.rows import Parts, choose_rows, ignored_values, unbound

_FEW, _MANY = 9, 2  # rows of a look, at least; micro-batches of rows in the first look
_BYTES = 2**22  # of inputs in a look
_NEW = 8  # looks because something is new; later ones are rare
_PATIENCE_SECONDS = 20.0  # a look that takes longer runs on the other replicas, too


@dataclass
class _Kind:
    """The results of looks for one kind of criterion and batch."""

    steps: int = 0
    looks: int = 0
    inconclusive: int = 0  # in a row
    # of labels, masks, lengths that were seen
    ranges: list[float] = field(default_factory=list)
    # of the last step, on an accelerator
    unread: list[Tensor] = field(default_factory=list)
    # that were seen: switches, numbers, words
    details: set[Hashable] = field(default_factory=set)
    is_steady: bool = False  # the last step had nothing new
    is_refused: bool = False  # refused, and has not agreed since
    is_serial: bool = False  # replicas run one at a time
    is_given_up: bool = False  # a look waited for ever

    def is_due(self, asked: list[Tensor], details: Hashable) -> bool:
        """Whether this step is looked at; ``asked`` are its ranges."""
        self.steps += 1
        is_new, was_steady = details not in self.details, self.is_steady
        self.is_steady = not is_new
        self.details.add(details)
        if any(is_async(each.device) for each in asked):  # the host does not wait now
            asked, self.unread = self.unread, asked
        beyond = any(map(operator.gt, read_ranges(asked), self.ranges))
        often = self.looks < _NEW or (
            was_steady and self.looks < _NEW + self.steps // 100
        )
        scheduled = not self.steps & (self.steps - 1)
        due = self.is_refused or beyond or scheduled or (is_new and often)
        return due and not self.is_given_up


class Verifier:
    """Looks at steps, and remembers the results for each kind of
    criterion and batch.
    """

    def __init__(self, is_distributed: bool) -> None:
        self._is_distributed = is_distributed
        self._kinds: defaultdict[Hashable, _Kind] = defaultdict(_Kind)
        self._joined: set[Hashable] = set()  # kinds of outputs whose order is known
        # beginnings of warnings given, and names of state
        self._warned: set[str] = set()

    def check(self, attempt: Attempt, tasks: Sequence[ReplicaTask]) -> None:
        """Before the sub-steps: look at some rows, if that is due.

        Raises:
            ValueError: a replica, in parts, gives another loss or gradient than the
                user's own module and criterion for the same rows.
        """
        request = _of_largest(attempt.request)
        splits = self._is_distributed or len(attempt.plan.substep_rows) > 1
        splits = splits and not (request.whole_batch and request.rows == 1)
        question = _Question(attempt, request, tasks, splits)
        kind, details = self._kind_of(request, splits, attempt.replicas.of_model.flags)
        if kind.is_due(question.ranges, details):
            try:
                self._ask(question, kind)
            except Inconclusive as error:
                kind.inconclusive += 1
                kind.is_given_up = error.patience == 1
                is_told = kind.is_given_up or not question.is_known
                if is_told and kind.inconclusive >= error.patience:
                    self._warn_once(question.unchecked(error))
            finally:
                # the same rows again: fewer may not show it
                kind.looks += not kind.is_refused
                # user code may compute gradients
                for each in attempt.replicas.replica_sets:
                    each.clear_gradients()
                for leaf in attempt.user_leaves:
                    leaf.grad = None
        attempt.is_serial = kind.is_serial

    def _ask(self, question: _Question, kind: _Kind) -> None:
        """Look. Refuses or tells what the look has found."""
        verdict = question.verdict(kind.looks)
        kind.is_refused |= verdict.kind in _REFUSED
        if verdict.kind in _REFUSED:
            raise ValueError(question.text(verdict.kind, verdict) + _OFF)
        kind.is_serial |= verdict.shares_state and question.is_shared
        verdict.moved = [
            n for n in verdict.moved if question.splits and n not in self._warned
        ]
        self._warned.update(verdict.moved)
        told = {"serial": kind.is_serial, "moved": verdict.moved, "lost": verdict.lost}
        told |= {verdict.kind: verdict.kind}
        for name in filter(told.get, told):
            self._warn_once(question.text(name, verdict))
        kind.is_refused, kind.inconclusive, ranges = (
            False,
            0,
            read_ranges(question.ranges),
        )
        kind.ranges = [*map(max, kind.ranges, ranges)] or ranges

    def check_join(
        self,
        attempt: Attempt,
        task: ReplicaTask,
        outputs: Sequence[list[Any]],
        compute: Compute,
    ) -> None:
        """Check on a few rows how ``outputs`` are joined, until values show the order.

        Only outputs that may have several entries per row are checked.

        Raises:
            ValueError: the outputs of parts, joined, are not the output of one call; or
                they are of a function for ``engine.map`` that drew random numbers: how
                many it draws may depend on the rows.
        """
        request, model = attempt.request, attempt.replicas.of_model
        pieces, sizes, dim = [*chain(*outputs)], attempt.plan.substep_rows, request.dim
        alike = zip(*map(nested.tensors, pieces), strict=False)
        entries = [{*map(entries_per_row, each, sizes, repeat(dim))} for each in alike]
        if len(pieces) < 2 or not any(
            len(each) == 1 and min(each) > 1 for each in entries
        ):
            return
        work = getattr(compute, "function", None)  # of ``engine.map``
        if work is not None and attempt.generators.drawn:
            raise ValueError(_TEXTS["drawn"])
        shapes = [[n / sizes[0] for n in t.shape] for t in nested.tensors(pieces[0])]
        names, _ = _made_of((work, request.return_outputs))
        # Neither ``changes`` nor numbers: one that moves in each step would cause a
        # comparison.
        key = str(shapes), model.flags, model.builds, request.whole_batch, names
        if key in self._joined:
            return
        few = _of_largest(request)
        some = [0, few.rows // 2, few.rows - 1]
        choices = [some, some[:-1], some[-1:]]
        looks = Look(attempt, few, task).outputs(
            choices, compute, attempt.isolated(task)
        )
        run = partial(list[Any], looks)  # in the replica's thread
        with no_kernel_search():  # a look has other sizes
            (found,) = attempt.workers.parallel_apply(
                [run], [()], devices=[task.share.device]
            )
        _, misplaced = compare_outputs(found, choices[1:], dim)
        if misplaced:
            raise ValueError(
                _TEXTS["order"].format(misplaced=misplaced, rows=len(some)) + _OFF
            )
        several = [
            t
            for t in nested.tensors(found[0])
            if entries_per_row(t, len(some), dim) > 1
        ]
        if not any(same_bits(t, t.flip(dim)) for t in several):
            self._joined.add(key)

    def _warn_once(self, text: str) -> None:
        if text[:60] not in self._warned:
            warn(text)
            self._warned.add(text[:60])

    def _kind_of(
        self, request: Request, splits: bool, flags: Hashable
    ) -> tuple[_Kind, Hashable]:
        """The results for the request's kind, and its details, of which each may be
        new.
        """
        names, numbers = _made_of((request.criterion, request.count, request.reduction))
        leaves = list(islice(nested.leaves(request.batches[0][1]), 32))
        batch = [_name_of(t) if isinstance(t, Tensor) else type(t) for t in leaves]
        words = [t for t in leaves if isinstance(t, (bool, str))]
        key = splits, request.whole_batch, hash((names, *batch))
        return self._kinds[key], hash((flags, numbers, *words))


def _made_of(functions: Sequence[Any]) -> tuple[frozenset[Hashable], str]:
    """The names of all values that functions refer to, and the numbers among these
    values.
    """
    values = reachable(functions, DEPTH + 1, set())
    for value in [value for value in values if isinstance(value, nn.Module)]:
        # an engine counts its steps
        if not type(value).__module__.startswith("scatterpar."):
            for part in value.modules():
                values += [type(part).__qualname__, *part._buffers.values()]
                values += [v for v in vars(part).values() if isinstance(v, PLAIN)]
    numbers = [value for value in values if type(value) in (int, float)]
    return frozenset(map(_name_of, values)), str(numbers)


def _name_of(value: Any) -> Hashable:
    """The part of a kind's key for one value: a function's code, a number's type.

    It has no addresses, because a lambda is a new object in each call.
    """
    if isinstance(value, Tensor):
        return value.dtype, value.ndim
    is_switch = value is None or isinstance(value, (bool, str))
    return value if is_switch else getattr(value, "__code__", type(value).__qualname__)


def _of_largest(request: Request) -> Request:
    """The request with its largest batch only."""
    if len(request.sizes) == 1:
        return request
    rows = max(request.sizes)
    _, batch = request.batches[request.sizes.index(rows)]
    return replace(request, batches=[(0, batch)], sizes=[rows])


def fits(engine: Any, *batch: Any, **options: Any) -> bool | None:
    """Whether losses combine as ``reduction=`` and ``count=`` say, for a few rows of
    this batch.

    Takes the arguments of ``forward_backward``. The first replica of the engine
    computes the rows, and all state is restored. Returns ``None`` if the look is
    inconclusive.

    Raises:
        ValueError: as ``forward_backward``, for arguments that it refuses.
    """
    call = Call(*batch, **options)
    request = _of_largest(checked(call, engine.dim, engine.device_ids[0]))
    plan = engine.plan(request.sizes)
    with engine._workers.exclusive(), engine._attempt(request, plan) as attempt:
        attempt.replicas.refresh(engine.module, request.criterion, Transfers())
        loaders = scatter(request.batches, plan, request.dim, Transfers())
        tasks = make_tasks(attempt, loaders)[:1]
        try:
            question = _Question(attempt, request, tasks, splits=True)
            return question.verdict(looks=1).kind not in _REFUSED
        except Exception:  # inconclusive, or raised by user code
            return None


class _Question:
    """A look at a step: its rows, its verdict, and what to say of that."""

    def __init__(
        self,
        attempt: Attempt,
        request: Request,
        tasks: Sequence[ReplicaTask],
        splits: bool,
    ) -> None:
        self._attempt, self.request, self._tasks, self.splits = (
            attempt,
            request,
            tasks,
            splits,
        )
        self.is_shared = len(tasks) > 1 and not request.whole_batch
        # Of torch's own cross entropy labels do not matter: the engine counts as it
        # does.
        kind = type(module_of(request.criterion))
        is_torchs = kind in (nn.CrossEntropyLoss, nn.NLLLoss, type(None))
        self.is_known = (
            not request.count and is_torchs and is_cross_entropy(request.criterion)
        )
        self.ranges = [] if self.is_known else ranges_of(self._tensors)

    @cached_property
    def _tensors(self) -> list[Tensor]:
        return informative_tensors(self.request)

    @cached_property
    def _ignored(self) -> list[int]:
        criterion, model = self.request.criterion, self._attempt.replicas.of_model.root
        function = model.forward if criterion is None else criterion
        return ignored_values(function, self.request.count)

    def _parts(self, looks: int) -> Parts:
        """As many rows as are cheap: fewer of a large model, and in later looks."""
        request, sizes = self.request, self._attempt.plan.substep_rows
        most = max(sizes) // 4 if looks else _MANY * max(sizes)
        parameters = self._attempt.replicas.of_model.root.parameters()
        if sum(map(Tensor.numel, parameters)) > SMALL:  # each row takes long
            most = min(most, max(sizes), request.rows // 8)
        size = sum(
            t.numel() * t.element_size() for t in all_tensors(request.batches[0][1][0])
        )
        most = min(max(_FEW, most), max(2, _BYTES * request.rows // (size + 1)))
        parts = choose_rows(self._tensors, request.rows, most, self._ignored, looks)
        return parts if self.splits else [[*chain(*parts)]]

    def verdict(self, looks: int) -> Verdict:
        """The verdict of the first replica's look.

        User code may wait for the other replicas, for example at a barrier. So if the
        look takes long, the others do the same with their own modules.
        """
        tasks, parts = self._tasks, self._parts(looks)
        deadline = time.monotonic() + 2 * _PATIENCE_SECONDS
        each = [Look(self._attempt, self.request, task, deadline) for task in tasks]
        ended, looking = Event(), list[Look]()

        def run(look: Look) -> Verdict | None:
            if look is not each[0] and ended.wait(_PATIENCE_SECONDS):
                return None
            looking.append(look)
            try:
                with look.isolated():
                    return look.answer(parts)
            finally:
                ended.set()

        apply, devices = (
            self._attempt.workers.parallel_apply,
            [task.share.device for task in tasks],
        )
        arguments, seconds = [(look,) for look in each], 2.2 * _PATIENCE_SECONDS
        try:
            with warnings.catch_warnings():
                # of the user's code; the step itself warns
                warnings.simplefilter("ignore")
                found: list[Verdict] = apply(
                    [run] * len(each), arguments, devices, seconds=seconds
                )
                return found[0]
        except Overdue:  # inside a call
            for look in reversed(each):
                look.end()
            raise Inconclusive(
                "a call waits for something that does not come", 1
            ) from None
        finally:
            # the others have restored what the first had changed by then
            if len(looking) > 1:
                apply([each[0].restore], [()], devices[:1])

    @cached_property
    def _name(self) -> str:
        criterion = unbound(self.request.criterion)
        name = getattr(criterion, "__qualname__", type(criterion).__name__)
        return "the module's own loss" if criterion is None else f"the criterion {name}"

    def text(self, kind: str, verdict: Verdict) -> str:
        """The text of an error or warning: the difference, its size, what to pass or
        change.
        """
        error, replica, rows = (
            verdict.error,
            verdict.losses[1],
            [*chain(*verdict.parts)],
        )
        values = vars(verdict) | {
            "name": self._name,
            "module": type(self._tasks[0].module).__name__,
            "size": f"off by {100 * error:,.3g} %"
            if error < math.inf
            else "NaN or infinite",
            "rows": len(rows),
            "sizes": " + ".join(str(len(part)) for part in verdict.parts),
            "replica": "an error" if math.isnan(replica) else f"{replica:.4g}",
            "advice": self._advice(verdict) if kind == "combination" else "",
            "listed": f"{shown(', '.join(map(str, rows)))} of {self.request.rows}",
            "reduction": self.request.reduction,
            "names": shown(", ".join(verdict.moved)),
            "sub_steps": len(self._attempt.plan.substep_rows),
        }
        return _TEXTS[kind].format_map(values)

    def _advice(self, verdict: Verdict) -> str:
        """How the loss of all rows seems to combine, and what to pass."""
        for text, weights in self._candidates(verdict.parts):
            if verdict.fits(weights):
                return text + _TEXTS["else"]
        shapes, penalty = (
            verdict.shapes,
            "" if self.request.is_mean else _TEXTS["penalty"],
        )
        is_matrix = {*map(len, shapes)} == {1, 2} and len(
            {*map(math.prod, shapes)}
        ) == 1
        broadcast = _TEXTS["broadcast"].format(*shapes) if is_matrix else ""
        criterion = "" if self.request.criterion else " and criterion="
        return broadcast + penalty + _TEXTS["other"].format(criterion)

    def _candidates(self, parts: Parts) -> Iterator[tuple[str, Sequence[float]]]:
        """What could be passed, and the factors of the losses of
        ``parts`` if it were.
        """
        is_by_rows = self.request.is_mean and self.request.count is None
        sizes = [len(part) for part in parts]
        yield (
            _TEXTS["rows counted" if is_by_rows else "mean"],
            [n / sum(sizes) for n in sizes],
        )
        yield _TEXTS["sum"], [1.0] * len(parts)
        pieces, call = pieces_of(self.request, parts), "scatterpar.count_labels({})"
        if pieces[0][1] is None and isinstance(pieces[0][0], Tensor):  # such as tokens
            pieces, call = (
                [(None, ids) for ids, _ in pieces],
                f"lambda ids, _: {call}(None, ids)",
            )
        named = pieces[0][1] if isinstance(pieces[0][1], Mapping) else {}
        for key, value, shifted in product(
            {"labels": 0, **named}, self._ignored, (False, True)
        ):
            try:
                count = count_labels(value, shifted=shifted, key=key)
                terms = [int(count(*piece)) for piece in pieces]
            except (TypeError, ValueError):  # there are no such labels
                continue
            said = [str(value)] * (value != -100) + ["shifted=True"] * shifted
            said += [f"key={key!r}"] * (key != "labels")
            if sum(terms):
                text = _TEXTS["labels"].format(value, call.format(", ".join(said)))
                yield text, [n / sum(terms) for n in terms]

    def unchecked(self, error: Exception) -> str:
        """The warning for inconclusive looks, with the assumption and what to pass."""
        mean = "a mean over " + (
            "rows" if self.request.count is None else "what count= gives"
        )
        assumed = mean if self.request.is_mean else "a sum"
        return _TEXTS["unchecked"].format(self._name, str(error)[:120], assumed)


_OFF = " Nothing was changed; an engine made with verify=False does not check."
_RETURN = "return it from forward, and take it from the output that the criterion gets"
_REFUSED = "combination", "replica", "joined", "order"
_TEXTS = {
    "combination": "{name}: your loss of {rows} rows is not the {reduction} of the "
    "losses "
    "of {sizes} rows: the gradient would be {size}. {advice} (Rows {listed}.)",
    "replica": "{name} leads to the module that is trained, or the module has a "
    "tensor computed "
    "from parameters (compute it in forward): the loss of {rows} rows is "
    "{losses[0]:.4g} with your "
    "own module in plain torch, but {replica} on a replica (the gradient is {size}). "
    "It reads what "
    "forward leaves on the module, such as an auxiliary loss, or asks for gradients "
    "by your own "
    f"parameters. Return it: {_RETURN}. No count=, reduction= or whole_batch= says "
    "that.",
    "joined": "{name}: with whole_batch=True the gradient would be {size}. It reads "
    "what the last "
    "micro-batch left (a hook?), or an output that has as many entries as a "
    "micro-batch has "
    f"rows; {_RETURN}, with one entry per row. No count= or reduction= says that.",
    "order": "the module's output has {misplaced} entries for {rows} rows, not in the "
    "order of the "
    "rows, so those of micro-batches cannot be joined. Return one entry per row, such "
    "as "
    "torch.stack([a, b], 1) in the place of torch.cat([a, b]), or .view(rows, k, -1) "
    "of k samples.",
    "drawn": "the function draws random numbers and returns several entries per row, "
    "whose order "
    "cannot be compared with that of one call: return .view(rows, k, -1) of k entries "
    "per row",
    "sum": 'It seems to be a sum: pass reduction="sum".',
    "mean": 'It seems to be a mean over rows: pass reduction="mean", without count=.',
    "rows counted": "It seems to be a mean over rows, whatever the labels: pass "
    "count=lambda "
    "inputs, targets: len(targets).",
    "labels": "It seems to be a mean over the labels that are not {}: pass "
    'reduction="mean" and count={}.',
    "else": ' (Otherwise: count= for a mean over other terms, reduction="sum" for a '
    "sum, "
    "whole_batch=True for a loss that compares rows.)",
    "broadcast": "The output has shape {} and the targets {}, which broadcast to a "
    "matrix of all "
    "pairs of rows: pass targets of the output's shape. ",
    "penalty": "If it seems to add something that does not depend on the rows, such "
    "as a penalty "
    "on weights: multiply that by len(output) / the number of all rows. ",
    "other": "If it compares rows with each other, or is a ratio of sums, pass "
    "whole_batch=True{}. "
    "For a mean over something else, pass count=, a function of (inputs, targets) "
    "that gives its "
    'number of terms: scatterpar.count_labels(); for a sum, reduction="sum". Or make '
    "it a mean of "
    "one loss per row; docs/losses.md has sums of means.",
    "serial": "{name} reads what forward passes leave behind (a hook?), which "
    "replicas share, so "
    f"they run one after the other, which is slower; {_RETURN}, or pass verify=False",
    "moved": "forward passes move {names}: at each of the {sub_steps} sub-steps, and "
    "on each "
    "replica apart. Move it once per step, outside of forward, or keep it in a buffer "
    "and train "
    "with one sub-step (docs/limits.md, State in modules)",
    "state": "{module} or {name} gives another result when it is called again with "
    "the same rows. "
    "Return a module's state from forward, and pass it as an input; change a "
    "criterion's once per "
    "step, or pass whole_batch=True (docs/limits.md, State in modules)",
    "rows": "{module} gives other outputs for a few rows than for parts of them: they "
    "differ by "
    "{error:.2g} of the largest entry (of {rows} rows). Mask padding; check "
    "batch_first= and dim=; "
    "pass a value without rows as Replicated(value), a list with one entry per row as "
    "Rows(list); "
    "compute what compares rows in the criterion, with whole_batch=True. A home-made "
    "batch "
    "normalisation may ignore this",
    "lost": "your code writes a tensor of shape {lost[0]}, above 64 MiB, which a look "
    "at a few "
    "rows did not save: keep it in a buffer of the module, or pass verify=False",
    "unchecked": "could not check how {} combines micro-batches ({}). The engine "
    "assumes {}. Pass "
    "count= for a mean over something else, such as scatterpar.count_labels(), "
    "reduction="
    '"sum" for a sum, whole_batch=True if it compares rows. verify=False does not '
    "check",
}
