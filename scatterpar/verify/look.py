"""One question: is what the engine computes for some rows what the user's program
computes?

::

    expected = loss and gradients of the user's criterion(module(rows), targets), in plain torch
    found    = the same by a replica, in parts, one after the other, weighted as in the step;
               with whole_batch the outputs of the parts are joined, and the criterion called once
    if they differ by more than rounding: compute it in other ways, to find out why

Random operators give constant numbers, and everything that the calls change is
restored.
"""

from __future__ import annotations

import contextlib
import math
import time
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, islice, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.batch.markers import Marker, has_markers, select_rows, unwrap_markers
from scatterpar.devices.fingerprints import same_bits
from scatterpar.devices.memory import is_out_of_memory
from scatterpar.errors import restored
from scatterpar.replicas.module_copy import module_of, root_to_replicate
from scatterpar.step.attempt import Attempt, note_replica
from scatterpar.step.criterion_closure import closure_contents
from scatterpar.step.loss_weights import term_counts
from scatterpar.step.request import Request
from scatterpar.step.substeps import ReplicaTask, loss_of
from scatterpar.torch_private import uncompiled
from scatterpar.verify.comparison import SMALLEST_SCALE, relative_difference
from scatterpar.verify.constant_numbers import ConstantNumbers, DrawsPerRow
from scatterpar.verify.gradient_check import moved_to, uses_batch_statistics
from scatterpar.verify.moved_state import State, moved_between, state_of
from scatterpar.verify.rounding import Rounding
from scatterpar.verify.rows import Parts, in_two
from scatterpar.verify.user_state import UserState

_NOTHING_BUT = 0.4  # if rounding changes a gradient by more, it is nothing but rounding
# rounding at a ReLU shows in every third, and seldom changes more
_NUDGES, _AT_A_RELU = 16, 0.2
SMALL = 2**20  # elements of parameters that are compared
_UNCOUNTED = 32  # rows that are searched for some that count= leaves out
# relative difference of joined outputs: the number of rows changes rounding
_JOINED = 1e-2

Sum = tuple[float, Sequence[Tensor]]  # a loss and its gradients
Weights = Sequence[float]
Compute = Callable[[ReplicaTask, Any], Any]  # the output for inputs and targets


class Inconclusive(Exception):
    """The look is inconclusive. After so many of them in a row (``patience``) a warning
    says so.
    """

    def __init__(self, why: str, patience: int = 4) -> None:
        super().__init__(why)
        self.patience = patience


@dataclass
class Verdict:
    """The result of a look."""

    # Empty if nothing differs. Refused are "combination", "replica", and with
    # whole_batch "joined" (the criterion finds something else) and "order" (of
    # entries). Told are "rows" and "state".
    kind: str
    parts: Parts
    losses: tuple[float, float]  # expected and found
    error: float = math.inf  # relative
    moved: Sequence[str] = ()  # state that each part moves
    lost: Sequence[tuple[int, ...]] = ()  # of large tensors that user code has written
    # forward passes change what the criterion reads, and replicas share
    shares_state: bool = False
    # whether other weights explain it
    fits: Callable[[Weights], bool] = lambda weights: False
    shapes: Sequence[tuple[int, ...]] = ()  # of output and targets that are tensors
    misplaced: int = 0  # entries of an output that are not in the order of the rows


class Look:
    """Compares what the replica of ``task`` and the user's model compute for some rows.

    Replicas other than the first use their own module as the user's. After
    ``deadline``, a time of ``time.monotonic``, the look is inconclusive.
    """

    def __init__(
        self,
        attempt: Attempt,
        request: Request,
        task: ReplicaTask,
        deadline: float = math.inf,
    ) -> None:
        self._request, self._task, self._deadline = request, task, deadline
        self._halfway = (time.monotonic() + deadline) / 2
        sets, self._scale = attempt.replicas.replica_sets, request.scale
        self._inputs, self._targets = request.batches[0][1]
        self._model: Any = task.module if task.share.replica else sets[0].root
        self._step_rows = {*attempt.plan.substep_rows}
        self._numbers = ConstantNumbers()
        self._draws = self._shares_state = False
        self._autocast: Sequence[str] = []  # device types for which it stays enabled
        self._rounding_of = Rounding(task.share.device)
        self._states: list[State] = []  # after each part of a run
        self._undo, self._saved = contextlib.ExitStack(), list[UserState]()
        groups: dict[int, list[Tensor]] = {}  # a leaf of the user's, and its copies
        for each, replica in zip(sets, task.replicas, strict=False):
            for i, own in each.leaves.items():
                groups.setdefault(id(own), [own]).append(replica.tensors[i])
        ordered = sorted(groups.values(), key=lambda group: group[0].numel())
        sizes = [*accumulate(group[0].numel() for group in ordered)]
        self._leaves = ordered[: max(1, bisect(sizes, SMALL))]

    @contextlib.contextmanager
    def isolated(self) -> Iterator[None]:
        """In the body user code may run; afterwards all that it changed is restored."""
        request, task, criterion = self._request, self._task, self._request.criterion
        of_replicas = (replica.root for replica in task.replicas)
        roots = (
            self._model,
            module_of(criterion),
            *closure_contents(criterion),
            *of_replicas,
        )
        layers = chain(
            *(root.modules() for root in roots if isinstance(root, nn.Module))
        )
        self._fixed = [
            n for n in layers if uses_batch_statistics(n) and n.running_mean is not None
        ]
        markers = [
            leaf for leaf in nested.leaves(request.batches) if isinstance(leaf, Marker)
        ]
        with_graph = torch.inference_mode(False)  # also within no_grad
        with note_replica(task.share), restored(self.end), uncompiled(), with_graph:
            self._undo.callback(self._set_training, True)
            # before state is saved: it is no change of the user's
            self._set_training(False)
            state = UserState([self._model, *(marker.collate for marker in markers)])
            of_criterion = task.criterion, criterion, request.count
            self._criterion_state = UserState(of_criterion, [task.share.device])
            self._undo.callback(self._restart)
            # The criterion's is the first to restore: it tells whether numbers were
            # drawn.
            self._saved = [self._criterion_state, state]
            yield

    def end(self) -> None:
        """Undo everything, once. From then on the look, if it still runs, changes
        nothing.
        """
        self._deadline = -math.inf
        self._undo.pop_all().close()

    def restore(self, generators_only: bool = False) -> None:
        """Undo what user code has changed."""
        for saved in self._saved:
            saved.restore(generators_only)

    def _set_training(self, value: bool) -> None:
        """Let batch normalisations use running statistics: otherwise they tie rows
        together.
        """
        for layer in self._fixed:
            layer.training = value

    def _require_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise Inconclusive("it takes too long", 2)

    def _restart(self) -> None:
        """Undo what user code has changed, in replicas, too."""
        self.restore()
        self._refresh()

    @torch.no_grad()
    def _refresh(self) -> None:
        for replica in self._task.replicas:
            replica.refresh()
        self._set_training(False)
        torch.clear_autocast_cache()  # it may hold parameters without a graph

    def outputs(
        self,
        choices: Parts,
        compute: Compute,
        isolation: contextlib.AbstractContextManager[None],
    ) -> Iterator[Any]:
        """The replica's output for each choice of rows, from the same state and random
        numbers.
        """
        with isolation, self.isolated(), torch.no_grad():
            for rows in choices:
                self._restart()
                with self._numbers:
                    output = compute(self._task, (self._move(self._inputs, rows), None))
                yield output

    def answer(self, parts: Parts, is_last: bool = False) -> Verdict:
        """The verdict on these parts of rows, or on others if user code
        fails for them.
        """
        try:
            return self._judge(parts)
        except Inconclusive:
            raise
        # user code may need autocast, pairs of rows, or memory
        except Exception as error:
            is_short, why = is_out_of_memory(error), f"{type(error).__name__}: {error}"
        # off at first: rounding would hide differences
        if self._autocast != self._task.autocast:
            self._autocast = self._task.autocast
            return self.answer(parts, is_last)
        if is_last:
            raise Inconclusive(
                "memory ran out" if is_short else why, 2 if is_short else 4
            )
        rows = [*chain(*parts)]
        return self.answer(
            [rows[:1], rows[-1:]] if is_short else self._equal_parts(rows), True
        )

    def _equal_parts(self, rows: Sequence[int]) -> Parts:
        """These rows in two parts; with ``whole_batch`` in parts of the step's size, if
        possible.

        Outputs without rows that the step would join are joined in parts of that size
        alone.
        """
        size = min(self._step_rows)
        if not self._request.whole_batch or 2 * size > len(rows):
            return in_two(rows)[0]
        return [rows[at : at + size] for at in range(0, len(rows) - size + 1, size)]

    def _judge(self, parts: Parts) -> Verdict:
        """Compare the engine's result for these parts of rows with the user's own."""
        rows, request = [*chain(*parts)], self._request
        parts, weights = self._weighted(parts)
        expected = self._own(rows)
        self._restart()
        if self._criterion_state.drawn and not self._draws:
            self._draws = True
            expected = self._own(rows)
        calls = self._numbers.calls
        # With one sub-step per replica, each part is another replica's.
        between = self._refresh if len(self._task.share.micro_batches) == 1 else None
        try:
            sums = self._run(parts, weights, between=between)
        except Exception as error:
            if (
                isinstance(error, Inconclusive)
                or is_out_of_memory(error)
                or self._computes(rows)
            ):
                raise
            return Verdict("replica", parts, (expected[0], math.nan))
        found, is_steady = _sum(sums), self._numbers.calls - calls == calls * len(parts)
        if not (_is_finite(expected) and _is_finite(found)) and self._scale != 1:
            self._scale = 1.0  # in half precision, the scale was too large
            return self._judge(parts)
        if not _is_finite(expected):
            raise Inconclusive("a gradient is NaN or infinite")
        more = in_two(rows) if not _is_finite(found) and len(parts) > 2 else ()
        for larger in more:  # one row may have NaN, which says less
            with contextlib.suppress(Inconclusive):
                verdict = self._judge(larger)
                if verdict.kind and verdict.error < math.inf:
                    return verdict
        if expected[1] and not _num_nonzero([*sums, expected]):
            raise Inconclusive("all gradients are zero")
        losses, relative = (expected[0], found[0]), _error(found, expected)
        lost, moved = (
            [*chain(*(each.lost() for each in self._saved))],
            moved_between(self._states),
        )
        verdict = Verdict("", parts, losses, relative, moved, lost, self._shares_state)
        if verdict.error > self._tolerance:
            self._explain(verdict, weights, expected, found, is_steady)
        elif not (request.is_mean or request.whole_batch) and _num_nonzero(sums) < len(
            parts
        ):
            raise Inconclusive("some parts have no gradient: it may be a mean or a sum")
        return verdict

    def _computes(self, rows: Sequence[int]) -> bool:
        """Whether the replica computes these rows at once without an error."""
        with contextlib.suppress(Exception):
            return bool(self._run([rows]))
        return False

    def _explain(
        self,
        verdict: Verdict,
        weights: Weights,
        expected: Sum,
        found: Sum,
        is_steady: bool,
    ) -> None:
        """Set the verdict's kind, by computing what differs in other ways."""
        parts, rows, limit = verdict.parts, [*chain(*verdict.parts)], self._tolerance
        whole, outputs = self._request.whole_batch, list[Any]()
        one = self._run([rows], kept=outputs)
        if _error(self._own(rows), expected) > limit:
            if self._combines(outputs[0], parts, weights):
                return  # the module draws numbers that cannot be repeated
            raise Inconclusive("it gives another result each time", 2)
        limit = max(limit, self._rounding(verdict, expected, found, _sum(one)))
        if verdict.error <= limit:
            return
        if _error(_sum(one), expected) > limit:
            verdict.kind, verdict.losses = "replica", (expected[0], one[0][0])
            return
        if not is_steady:
            raise Inconclusive("what is drawn depends on the rows", 2)
        again = self._run(
            parts, weights, between=partial(self.restore, generators_only=True)
        )
        if _error(_sum(again), expected) <= limit:
            return  # numbers are drawn once per call, by Python or NumPy
        sums = self._run(parts, between=self._restart, kept=outputs)
        if _error(_sum(sums, () if whole else weights), expected) <= limit:
            # what moves is told by name
            verdict.kind = "" if verdict.moved else "state"
            return
        error, verdict.misplaced = compare_outputs(outputs, parts, self._request.dim)
        verdict.kind = "joined" if whole else "combination"
        if whole and verdict.misplaced:
            verdict.kind = "order"
        elif error > limit and (whole or self._combines(outputs[0], parts, weights)):
            verdict.kind, verdict.error = "rows", error
        compared = outputs[0], self._move(self._targets, rows)
        verdict.shapes = [tuple(t.shape) for t in compared if isinstance(t, Tensor)]
        # then other weights than the engine's may explain it
        is_split = _num_nonzero(sums) > 1
        verdict.fits = lambda factors: (
            is_split and _error(_sum(sums, factors), expected) < limit
        )

    @property
    def _tolerance(self) -> float:
        return self._rounding_of.tolerance

    def _rounding(self, verdict: Verdict, expected: Sum, found: Sum, one: Sum) -> float:
        """The difference that rounding makes in ``one``, the replica's result for all
        rows.

        It may be all: for a student that starts as its teacher, or a loss that is
        constant. It is the verdict's error if rounding turns what was expected into
        ``found``, the result in parts: a ReLU at zero was open in one of them.
        """
        error, rows = verdict.error, [*chain(*verdict.parts)]
        eps = abs(expected[0]) * self._rounding_of.finest_eps
        is_zero = expected[1] and all(
            g.abs().max() <= eps for g in expected[1] if g.numel()
        )
        is_same, rounding = _error(one, expected) <= self._tolerance, 0.0
        for number in range(_NUDGES):
            result = _sum(self._run([rows], compute=partial(self._nudged, number)))
            if is_same and _error(result, found) <= self._tolerance:
                return error
            nudged = _error(result, one)
            if nudged < math.inf and (not number or error < _AT_A_RELU):
                rounding = max(rounding, (2 if number else 4) * nudged)
            is_late = time.monotonic() > self._halfway  # a refusal needs the other half
            if is_zero or error <= rounding or is_late:
                break
        if is_zero or (error <= rounding and rounding > _NOTHING_BUT):
            raise Inconclusive("its gradient is nothing but rounding")
        return rounding

    def _combines(self, output: Any, parts: Parts, weights: Weights) -> bool:
        """Whether the criterion's losses of parts of one output combine to that of all
        its rows.
        """
        if self._request.criterion is None or self._request.whole_batch:
            return False

        def loss(parts: Parts, weights: Weights = ()) -> Sum:
            cuts = _cuts(output, parts, self._request.dim)
            return _sum(self._run(parts, weights, compute=lambda *_: next(cuts)))

        return _error(loss(parts, weights), loss([[*chain(*parts)]])) <= self._tolerance

    def _weighted(self, parts: Parts) -> tuple[Parts, Weights]:
        """The parts, and the factors by which the engine would multiply their losses.

        If ``count=`` leaves some rows out, these are a part of their own: they must add
        nothing.
        """
        request = self._request
        if not request.is_mean or request.whole_batch:
            return parts, [1.0] * len(parts)

        def counts(parts: Parts) -> list[float]:
            spans = [*pairwise(accumulate(map(len, parts), initial=0))]
            rowless = replace(request, batches=[(0, (None, None))])
            return term_counts(rowless, spans, pieces_of(request, parts))

        if request.count is not None and len(parts) > 1:
            singles = [[row] for row in [*chain(*parts)][:_UNCOUNTED]]
            without = [
                row for (row,), n in zip(singles, counts(singles), strict=True) if not n
            ]
            rest = [[row for row in part if row not in without] for part in parts]
            if without and any(rest):
                parts = [without, *filter(None, rest)]
        terms = counts(parts)
        if not sum(terms):
            raise Inconclusive("none of the rows adds anything")
        return parts, [count / sum(terms) for count in terms]

    def _own(self, rows: Sequence[int]) -> Sum:
        """The loss and gradients by the user's own module and criterion."""
        self._numbers.calls = 0
        own = replace(self._task, module=self._model, criterion=self._request.criterion)
        return _sum(self._run([rows], task=own))

    def _run(
        self,
        parts: Parts,
        weights: Weights = (),
        *,
        task: ReplicaTask | None = None,
        compute: Compute = lambda task, rows: task.output_of(rows[0]),
        between: Callable[[], None] | None = None,
        kept: list[Any] | None = None,
    ) -> list[Sum]:
        """Loss and gradients of parts of rows, one after the other, times ``weights``.

        With ``whole_batch`` the joined parts have one loss. Everything is restored
        first. ``between`` is called before each other part. ``kept`` gets the outputs
        that ``compute`` returns, without their graphs.
        """
        request, task, sums, outputs = (
            self._request,
            task or self._task,
            list[Sum](),
            list[Any](),
        )
        self._require_time()
        self._restart()
        self._states, is_shared = [], root_to_replicate(request.criterion) is None
        with contextlib.ExitStack() as stack:
            stack.enter_context(_draws_are_inconclusive())
            stack.enter_context(
                self._numbers if self._draws else contextlib.nullcontext()
            )
            for kind in set(task.autocast).difference(self._autocast):
                stack.enter_context(torch.autocast(kind, enabled=False))
            for number, rows in enumerate(parts):
                if number and between is not None:
                    between()
                self._require_time()
                outputs.append(compute(task, (self._move(self._inputs, rows), None)))
                if not number and task is self._task and is_shared:
                    self._shares_state |= self._criterion_state.is_changed()
                if kept is not None:
                    kept.append(nested.map_tensors(_as_leaf, outputs[-1]))
                if not request.whole_batch:
                    weight = weights[number] if weights else 1.0
                    sums.append(self._loss(outputs.pop(), rows, task, weight))
                self._states.append(state_of(task.replicas))
            if outputs:
                sums.append(
                    self._loss(
                        self._joined(outputs, parts), [*chain(*parts)], task, 1.0
                    )
                )
        return sums

    def _joined(self, outputs: Sequence[Any], parts: Parts) -> Any:
        """The outputs of the parts, joined as in the step, which knows the sizes alone.

        An output with as many entries as each micro-batch of the step has rows is taken
        for rows.
        """
        dim, sizes = self._request.dim, [*map(len, parts)]
        if len(outputs) == 1:
            return outputs[0]
        lists: Any = (
            "if clear"
            if has_markers(self._request.batches, with_rows=True)
            else "never"
        )

        def join(leaves: list[Any]) -> Any:
            tensors = [
                t for t in leaves if isinstance(t, Tensor) and -t.ndim <= dim < t.ndim
            ]
            if len({*sizes}) > 1 and {t.size(dim) for t in tensors} == self._step_rows:
                return torch.cat(leaves, dim)
            return nested.join_rows(leaves, dim, sizes, sizes, lists=lists)

        return nested.merge(join, outputs)

    def _loss(
        self, output: Any, rows: Sequence[int], task: ReplicaTask, weight: float
    ) -> Sum:
        """The loss of these rows and its gradients, times ``weight``; nothing if that
        is zero.
        """
        self._require_time()
        if task.criterion is not None:  # which may write into what it is given
            output = nested.map_tensors(lambda t: t.clone() if t.is_leaf else t, output)
        loss = loss_of(output, self._move(self._targets, rows), task.criterion)
        del output
        self._rounding_of.watch(loss)
        leaves = [*chain(*self._leaves)] if weight and loss.requires_grad else []
        try:
            # With the weight inside: hooks may clamp gradients. Multiplied: for a
            # gradient that it is given, torch imports sympy, in 0.3 s.
            scaled = loss * (self._scale * weight)
            found = (
                torch.autograd.grad(scaled, leaves, allow_unused=True) if leaves else ()
            )
        except RuntimeError as error:
            # reentrant ones: only losses are compared
            if "checkpoint" not in str(error).lower():
                raise
            self._leaves, found = [], ()
        each, gradients = iter(found), []
        for group in self._leaves:
            own = [
                g.detach().to_dense() for g in islice(each, len(group)) if g is not None
            ]
            gradients.append(
                sum(own[1:], own[0]) if own else torch.zeros_like(group[0])
            )
        return float(loss.detach()) * weight if weight else 0.0, gradients

    def _nudged(self, number: int, task: ReplicaTask, rows: Any) -> Any:
        """The output with parameters changed by rounding, in new memory: others do not
        see it.

        Each number changes them in another way, and farther.
        """
        eps = self._rounding_of.coarsest_eps
        # Kernels for few rows round by several units; in half precision that would hide
        # an error.
        size = eps / 2 * (32 if eps < 1e-5 else 4) ** (number / (_NUDGES - 1))
        for leaf in {id(t): t for group in self._leaves for t in group[1:]}.values():
            angles = (
                torch.arange(leaf.numel(), device=leaf.device) * (1 + number) + number
            )
            leaf.data = leaf.data * (
                1 + size * angles.cos().view(leaf.shape).to(leaf.dtype)
            )
        return task.output_of(rows[0])

    def _move(self, value: Any, rows: Sequence[int]) -> Any:
        """These rows of the caller's batch, copied to the replica's device, not
        counted.
        """
        return moved_to(
            self._task.share.device, select_rows(value, rows, self._request.dim)
        )


@contextlib.contextmanager
def _draws_are_inconclusive() -> Iterator[None]:
    try:
        yield
    except DrawsPerRow:
        raise Inconclusive("what is drawn depends on the rows", 2) from None


def pieces_of(request: Request, parts: Parts) -> Any:
    """The inputs and targets of each part of rows, as ``count=`` gets them."""
    batch = request.batches[0][1]
    return unwrap_markers(
        [select_rows(batch, part, request.dim) for part in parts], copy=True
    )


def _as_leaf(tensor: Tensor) -> Tensor:
    """The tensor without its graph. A criterion may ask for a gradient of it."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def compare_outputs(
    outputs: Sequence[Any], parts: Parts, dim: int
) -> tuple[float, int]:
    """Compare outputs for parts of rows, all but the first, with parts of the first,
    for all.

    Returns the error of tensors with one entry per row along ``dim``, and the number of
    entries of a tensor with others that are not in the order of the rows; 0 if there is
    none.
    """
    whole, *pieces = outputs
    error, misplaced = 0.0, 0
    for piece, cut, part in zip(pieces, _cuts(whole, parts, dim), parts, strict=True):
        for one, other, uncut in zip(
            *map(nested.tensors, (piece, cut, whole)), strict=False
        ):
            if not -one.ndim <= dim < one.ndim or same_bits(one, uncut):
                continue
            if one.shape == other.shape:
                difference = _difference(one, other)
                if entries_per_row(one, len(part), dim) == 1:
                    error = max(error, difference)
                elif difference > _JOINED:
                    misplaced = uncut.size(dim)
            elif one.ndim == uncut.ndim and one.size(dim) == uncut.size(dim):
                misplaced = uncut.size(dim)  # as many for fewer rows
    return error, misplaced


def entries_per_row(tensor: Tensor, rows: int, dim: int) -> int:
    """The number of entries along ``dim`` for each of ``rows`` rows; 0 if it is no
    integer.
    """
    size = tensor.size(dim) if -tensor.ndim <= dim < tensor.ndim else 0
    return 0 if size % rows else size // rows


def _cuts(output: Any, parts: Parts, dim: int) -> Iterator[Any]:
    """The output for each of ``parts``, cut from the output for all of their rows."""
    start, rows = 0, sum(map(len, parts))

    def cut(leaf: Tensor) -> Tensor:
        entries = entries_per_row(leaf, rows, dim)
        return (
            leaf.narrow(dim, start * entries, size * entries).clone()
            if entries
            else leaf
        )

    for size in map(len, parts):
        yield nested.map_tensors(cut, output)
        start += size


def _difference(one: Tensor, other: Tensor) -> float:
    if same_bits(one, other) or not (one.is_floating_point() or one.is_complex()):
        return 0.0 if same_bits(one, other) else math.inf
    return relative_difference([one.nan_to_num()], [other.nan_to_num()])[0]


def _sum(sums: Sequence[Sum], factors: Weights = ()) -> Sum:
    """The sums of losses and gradients. What has the factor zero is left out, even if
    NaN.
    """
    each = [
        one for one in zip(factors or [1.0] * len(sums), sums, strict=True) if one[0]
    ]
    gradients = [[w * gradient for gradient in own] for w, (_, own) in each]
    combined = [torch.stack(same).sum(0) for same in zip(*gradients, strict=True)]
    return sum(w * loss for w, (loss, _) in each), combined


def _error(found: Sum, expected: Sum) -> float:
    """The relative error of gradients, or of the loss if that is larger."""
    size = max(abs(found[0]), abs(expected[0]), SMALLEST_SCALE)
    of_loss = (
        abs(found[0] - expected[0]) / size if math.isfinite(found[0]) else math.inf
    )
    return max(of_loss, relative_difference(found[1], expected[1])[0])


def _num_nonzero(sums: Sequence[Sum]) -> int:
    return sum(any(gradient.any() for gradient in gradients) for _, gradients in sums)


def _is_finite(result: Sum) -> bool:
    return math.isfinite(result[0]) and all(
        bool(each.isfinite().all()) for each in result[1]
    )
