"""One question: is what the engine computes for some rows what the user's program computes?

::

    expected = loss and gradients of the user's criterion(module(rows), targets), in plain torch
    found    = the same by a replica, in parts, one after the other, weighted as in the step;
               with whole_batch the outputs of the parts are joined, and the criterion called once
    if they differ by more than rounding: compute it in other ways, to find out why

Random operators give constant numbers, and everything that the calls change is restored.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, islice, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.batch.markers import Marker, has_markers_with_rows, select_rows, unwrap_markers
from scatterpar.devices.fingerprints import same_bits
from scatterpar.devices.runtime import is_out_of_memory
from scatterpar.devices.transfers import Transfers
from scatterpar.replicas.module_copy import module_of, root_to_replicate
from scatterpar.replicas.replicas import ReplicaSet
from scatterpar.step.criterion_closure import closure_contents
from scatterpar.step.loss_weights import term_counts
from scatterpar.step.request import Request
from scatterpar.step.scatter import LeafMover
from scatterpar.step.substeps import ReplicaTask, as_call, loss_of, note_replica
from scatterpar.torch_private import OperatorMode, uncompiled
from scatterpar.verify.gradient_check import relative_difference, uses_batch_statistics
from scatterpar.verify.rows import Parts, halves
from scatterpar.verify.user_state import State, UserState, moved_between, state_of

# Correct results agree to 2e-16 in float64, to 1e-3 in float32 (if kernels round by the number of
# rows) and to 1e-2 in half precision. Wrong weights change them by more, if they matter.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 3e-3, torch.float16: 3e-2, torch.bfloat16: 3e-2}
_LEAST = 1e-2  # gradients smaller than this part of the largest: their tolerance is absolute
_NOTHING_BUT = 0.4  # if rounding changes a gradient by more, it is nothing but rounding
_NUDGES, _AT_A_RELU = 16, 0.2  # rounding at a ReLU shows in every third, and changes no more
_SMALL = 2**20  # elements of parameters that are compared
_UNCOUNTED = 32  # rows that are searched for some that count= leaves out
_JOINED = 1e-2  # relative difference of joined outputs: the number of rows changes rounding
_DRAWN = 0.618  # instead of random floating-point numbers

Sum = tuple[float, Sequence[Tensor]]  # a loss and its gradients
Weights = Sequence[float]


class Inconclusive(Exception):
    """The look is inconclusive. ``lasting``: a later step would not help."""

    def __init__(self, why: str, *, lasting: bool = False) -> None:
        super().__init__(why)
        self.lasting = lasting


class Refused(ValueError):
    """Outputs cannot be joined."""


@dataclass
class Verdict:
    """The result of a look.

    ``kind`` is empty if nothing differs. Refused are ``"combination"``, ``"replica"``, and
    ``"joined"`` (with ``whole_batch`` the criterion finds something else). Told are ``"rows"`` and
    ``"state"``.
    """

    kind: str
    parts: Parts
    error: float = 0.0  # relative
    limit: float = 0.0  # of errors that rounding explains
    losses: tuple[float, float] = (0.0, 0.0)  # expected and found
    factor: float = 1.0  # of the norm of the gradients: found / expected
    fits: Callable[[Weights], bool] = lambda weights: False  # whether other weights explain it
    moved: Sequence[str] = ()  # state that each part moves
    shares_state: bool = False  # forward passes change what the criterion reads, and replicas share
    lost: Sequence[str] = ()  # large tensors that user code has written
    shapes: Sequence[tuple[int, ...]] = ()  # of an output and its targets, if they may broadcast


class Look:
    """Compares what the replica of ``task`` and the user's ``model`` compute for some rows.

    ``step_rows`` are the sizes of the step's micro-batches.
    """

    def __init__(
        self,
        request: Request,
        task: ReplicaTask,
        model: nn.Module,
        replica_sets: Sequence[ReplicaSet],
        step_rows: Sequence[int] = (),
    ) -> None:
        self._request, self._task, self._model = request, task, model
        self._step_rows, self._scale, self._shares_state = {*step_rows}, request.scale, False
        self._numbers: ConstantNumbers | None = None
        self._dtypes: set[torch.dtype] = set()
        self._states: list[State] = []
        self._shapes: list[tuple[int, ...]] = []
        self.is_over, self.deadline = False, math.inf
        self._fixed: list[nn.Module] | None = None  # layers that use other statistics in a look
        groups: dict[int, list[Tensor]] = {}  # a leaf of the user's, and its copies
        for each, replica in zip(replica_sets, task.replicas, strict=False):
            for i in each.leaf_indices:
                own = each.tensors[i]
                groups.setdefault(id(own), [own]).append(replica.tensors[i])
        ordered = sorted(groups.values(), key=lambda group: group[0].numel())
        sizes = accumulate(group[0].numel() for group in ordered)
        few = [group for group, size in zip(ordered, sizes, strict=True) if size <= _SMALL]
        self._leaves = few or ordered[:1]

    @contextlib.contextmanager
    def isolated(self) -> Iterator[None]:
        """In the body user code may run; afterwards all that it changed is restored."""
        request, task = self._request, self._task
        others = module_of(request.criterion), *closure_contents(request.criterion)
        self._fixed = _fix_statistics(task, self._model, *others)
        each = ((m._forward_pre_hooks, m._forward_hooks) for m in task.module.modules())  # type: ignore[attr-defined]
        hooks = [hook for own in chain(*each) for hook in own.values()]
        markers = [m for m in nested.leaves(request.batches) if isinstance(m, Marker)]
        collates = [getattr(marker, "collate", None) for marker in markers]
        of_criterion = [task.criterion, request.criterion, request.count]
        self._state = UserState([self._model, *hooks, *collates])
        self._criterion_state = UserState(of_criterion, [task.share.device])
        try:
            with uncompiled(), torch.inference_mode(False), torch.enable_grad():
                yield
        finally:
            with note_replica(task.share):  # its device may be lost
                self.end()

    def end(self) -> None:
        """Undo everything, once. From then on the look, if it still runs, changes nothing."""
        if self._fixed is not None and not self.is_over:
            self._undo()
            for layer in self._fixed:
                layer.training = True
        self.is_over = True

    def restore(self, generators_only: bool = False) -> None:
        """Undo what user code has changed. Raises ``Inconclusive`` when the time is over."""
        self._require_time()
        self._undo(generators_only)

    def _require_time(self) -> None:
        if self.is_over or time.monotonic() > self.deadline:
            raise Inconclusive("it takes too long", lasting=True)

    def _undo(self, generators_only: bool = False) -> None:
        self._criterion_state.restore(generators_only)  # first: it tells whether numbers were drawn
        self._state.restore(generators_only)
        if not generators_only:
            self._refresh()

    @torch.no_grad()
    def _refresh(self) -> None:
        for replica in self._task.replicas:
            replica.refresh()
        torch.clear_autocast_cache()  # it may hold parameters without a graph

    def outputs(
        self,
        choices: Sequence[Sequence[int]],
        compute_rows: Callable[[ReplicaTask, Any], Any],
        isolation: contextlib.AbstractContextManager[None],
    ) -> list[Any]:
        """The replica's output for each choice of rows, from the same state and random numbers."""
        outputs = []
        with isolation, self.isolated(), torch.no_grad():
            for rows in choices:
                self.restore()
                _fix_statistics(self._task)
                with ConstantNumbers():
                    inputs = self._move(self._request.inputs, rows)
                    outputs.append(compute_rows(self._task, (inputs, None)))
        return outputs

    def judge(self, parts: Parts) -> Verdict:
        """Compare the engine's result for these parts of rows with the user's own.

        Raises:
            Inconclusive: it cannot be told whether they agree.
        """
        rows = [*chain(*parts)]
        parts, weights = self._weighted(parts)
        expected = self._expected(rows)
        calls = self._calls
        self._states.clear()
        # With one sub-step per replica, each part is another replica's.
        fresh = ["fresh"] * (len(self._task.share.micro_batches) == 1)
        try:
            sums, _ = self._run(parts, weights, "watch", *fresh)
        except Exception as error:
            fails = not isinstance(error, (Inconclusive, Refused)) and not is_out_of_memory(error)
            if not fails or not _fails(partial(self._run, [rows])):
                raise
            return Verdict("replica", parts, math.inf, losses=(expected[0], math.nan))
        found, is_steady = _sum(sums), self._calls - calls == calls * len(parts)
        if not (_is_finite(expected) and _is_finite(found)) and self._scale != 1:
            self._scale = 1.0  # in half precision, the scale was too large
            return self.judge(parts)
        if not _is_finite(expected):
            raise Inconclusive("a gradient is NaN or infinite")
        if not _is_finite(found) and len(parts) > 2 and (other := self._of_larger(parts)):
            return other
        nonzero = sum(any(g.any() for g in each) for _, each in sums)
        if expected[1] and not nonzero and not any(each.any() for each in expected[1]):
            raise Inconclusive("all gradients are zero")
        limit = max(_TOLERANCES.get(dtype, 1.0) for dtype in self._dtypes)
        verdict = Verdict("", parts, _error(found, expected), limit, (expected[0], found[0]))
        verdict.moved = moved_between(self._states)
        verdict.shares_state, verdict.lost = self._shares_state, self._state.lost()
        norms = [math.hypot(*(float(g.norm()) for g in each)) for _, each in (found, expected)]
        verdict.factor = norms[0] / norms[1] if norms[1] else 1.0
        if verdict.error > limit:
            self._explain(verdict, weights, expected, nonzero, is_steady)
        elif not (self._request.is_mean or self._request.whole_batch) and nonzero < len(parts):
            raise Inconclusive("some parts have no gradient: it may be a mean or a sum")
        return verdict

    def _expected(self, rows: Sequence[int]) -> Sum:
        """``_own``, with constant random numbers if any are drawn."""
        self._criterion_state.drawn = False
        expected = self._own(rows)
        if self._criterion_state.drawn and self._numbers is None:
            self._numbers = ConstantNumbers()
            expected = self._own(rows)
        return expected

    def _of_larger(self, parts: Parts) -> Verdict | None:
        """The verdict on larger parts, if it says more than NaN, which one row may have."""
        rows = [*chain(*parts)]
        quarters = [[rows[:n], rows[n:]] for n in (len(rows) * 3 // 4, len(rows) // 4)]
        for larger in (halves(parts), *quarters):
            with contextlib.suppress(Inconclusive):
                verdict = self.judge(larger)
                if verdict.kind and verdict.error < math.inf:
                    return verdict
        return None

    def _rounding(self, error: float, expected: Sum, rows: Sequence[int], one: Sum) -> float:
        """The difference that rounding makes in ``one``, the replica's result for ``rows``.

        Raises ``Inconclusive`` if the gradient is nothing but rounding, such as that of a student
        that starts as its teacher, or of a loss that is constant.
        """
        eps = abs(expected[0]) * min(torch.finfo(dtype).eps for dtype in self._dtypes)
        is_zero = expected[1] and all(g.abs().max() <= eps for g in expected[1] if g.numel())
        rounding = 0.0
        for number in range(_NUDGES if error < _AT_A_RELU else 1):
            nudged = _error(_sum(self._run([rows], nudge=number)[0]), one)
            rounding = max(rounding, (2 if number else 4) * nudged if nudged < math.inf else 0.0)
            if is_zero or error <= rounding:
                break
        if is_zero or (error <= rounding and rounding > _NOTHING_BUT):
            raise Inconclusive("its gradient is nothing but rounding")
        return rounding

    def _explain(
        self, verdict: Verdict, weights: Weights, expected: Sum, nonzero: int, is_steady: bool
    ) -> None:
        """Set the verdict's kind, by computing what differs in other ways."""
        parts, rows = verdict.parts, [*chain(*verdict.parts)]
        whole, dim = self._request.whole_batch, self._request.dim

        def agrees(sums: Sequence[Sum], factors: Weights = ()) -> bool:
            return _error(_sum(sums, factors), expected) <= verdict.limit

        if not agrees([self._own(rows)]):
            if not whole and self._combines(parts, weights, verdict.limit):
                return  # the module draws numbers that cannot be repeated
            raise Inconclusive("it gives another result each time", lasting=True)
        one, together = self._run([rows], (), "keep")
        verdict.limit = max(verdict.limit, self._rounding(verdict.error, expected, rows, _sum(one)))
        if verdict.error <= verdict.limit:
            return
        if not agrees(one):
            verdict.kind, verdict.losses = "replica", (expected[0], one[0][0])
            return
        if self._numbers and not is_steady:
            raise Inconclusive("what is drawn depends on the rows", lasting=True)
        if agrees(self._run(parts, weights, "again")[0]):
            return  # numbers are drawn once per call, by Python or NumPy
        sums, outputs = self._run(parts, (), "apart", "keep")
        if agrees(sums, () if whole else weights):
            verdict.kind = "state"
            return
        size = _joined_error(together, outputs, parts, whole)
        if whole:
            require_joined([*together, *outputs], [len(rows), *map(len, parts)], dim)
        if size > verdict.limit and (whole or self._combines(parts, weights, verdict.limit)):
            verdict.kind, verdict.error = "rows", size
            return
        verdict.kind, verdict.shapes = "joined" if whole else "combination", self._shapes
        if not whole and nonzero > 1:  # other weights, which are not the engine's, may explain it
            verdict.fits = lambda factors: (
                not all(map(math.isclose, factors, weights))
                and _error(_sum(sums, factors), expected) < 10 * verdict.limit
            )

    def _combines(self, parts: Parts, weights: Weights, limit: float) -> bool:
        """Whether the criterion's losses of parts of one output combine to that of all its rows."""
        request, task, rows = self._request, self._task, [*chain(*parts)]
        if request.criterion is None:
            return False
        self.restore()
        _fix_statistics(task)
        args, kwargs = as_call(self._move(request.inputs, rows))

        def loss(start: int, part: Sequence[int]) -> float:
            def cut(value: Tensor) -> Tensor:
                has_rows = -value.ndim <= request.dim < value.ndim
                has_rows = has_rows and value.size(request.dim) == len(rows)
                return value.narrow(request.dim, start, len(part)).clone() if has_rows else value

            targets = self._move(request.targets, part)
            return float(loss_of(nested.map_tensors(cut, output), targets, task.criterion).detach())

        starts = accumulate(map(len, parts), initial=0)
        with self._numbers or contextlib.nullcontext():
            output = task.module(*args, **kwargs)
            whole, each = loss(0, rows), [*map(loss, starts, parts)]
        self.restore()
        found = sum(w * one for w, one in zip(weights, each, strict=True) if w)
        return _error((found, ()), (whole, ())) <= limit

    @property
    def _calls(self) -> int:
        return self._numbers.calls if self._numbers else 0

    def _weighted(self, parts: Parts) -> tuple[Parts, Weights]:
        """The parts, and the factors by which the engine would multiply their losses.

        If ``count=`` leaves some rows out, these are a part of their own: they must add nothing.
        """
        request, rows = self._request, [*chain(*parts)]
        if not request.is_mean or request.whole_batch:
            return parts, [1.0] * len(parts)

        def counts(parts: Parts) -> list[float]:
            batch, few = (request.inputs, request.targets), [*chain(*parts)]
            each = [unwrap_markers(_select(batch, one, request.dim), copy=True) for one in parts]
            targets = _select(request.targets, few, request.dim)
            spans = [*pairwise([0, *accumulate(map(len, parts))])]
            return term_counts(replace(request, targets=targets, batches=()), spans, each)

        if request.count is not None and len(parts) > 1:
            of_rows = zip(rows, counts([[row] for row in rows[:_UNCOUNTED]]), strict=False)
            without = [row for row, count in of_rows if not count]
            rest = [[row for row in part if row not in without] for part in parts]
            if without and any(rest):
                parts = [without, *filter(None, rest)]
        terms = counts(parts)
        if not sum(terms):
            raise Inconclusive("none of the rows adds anything")
        return parts, [count / sum(terms) for count in terms]

    def _own(self, rows: Sequence[int]) -> Sum:
        """The loss and gradients by the user's own module and criterion."""
        return _sum(self._run([rows], roots=(self._model, self._request.criterion))[0])

    def _run(
        self,
        parts: Parts,
        weights: Weights = (),
        *how: str,
        roots: tuple[Any, Any] | None = None,
        nudge: int | None = None,
    ) -> tuple[list[Sum], list[Any]]:
        """Loss and gradients of parts of rows, one after the other, times ``weights``; outputs.

        The replica computes them, or other ``roots``: a module and a criterion. With
        ``whole_batch`` the joined parts have one loss.

        ``how``: before each part "apart" restores everything, "fresh" the replica, "again" the
        generators. "watch" notes state that moves. "keep" returns the outputs. A ``nudge`` changes
        the replica's parameters by rounding.
        """
        request, task = self._request, self._task
        module, criterion = roots or (task.module, task.criterion)
        sums: list[Sum] = []
        kept, outputs = [], []
        self.restore()
        if nudge is not None:
            self._nudge(nudge)
        with self._numbers or contextlib.nullcontext(), note_replica(task.share):
            for number, rows in enumerate(parts):
                if number and not {"apart", "again"}.isdisjoint(how):
                    self.restore(generators_only="again" in how)
                self._require_time()
                if "fresh" in how:
                    self._refresh()
                _fix_statistics(task)
                args, kwargs = as_call(self._move(request.inputs, rows))
                outputs.append(module(*args, **kwargs))
                if "watch" in how and not number and root_to_replicate(request.criterion) is None:
                    self._shares_state |= self._criterion_state.is_changed()
                if "keep" in how:
                    kept.append(nested.map_tensors(Tensor.detach, outputs[-1]))
                if not request.whole_batch:
                    weight = weights[number] if weights else 1.0
                    sums.append(self._loss(outputs.pop(), rows, criterion, weight))
                if "watch" in how:
                    self._states.append(state_of(task.replicas, copy="fresh" in how))
            if outputs:
                sums.append(self._loss(self._joined(outputs, parts), [*chain(*parts)], criterion))
        self.restore()
        return sums, kept

    def _joined(self, outputs: Sequence[Any], parts: Parts) -> Any:
        """The outputs of the parts, joined as in the step, which knows the sizes alone.

        An output with as many entries as each micro-batch of the step has rows is taken for rows.
        """
        dim, sizes = self._request.dim, [*map(len, parts)]
        if len(outputs) == 1:
            return outputs[0]
        has_lists = has_markers_with_rows(self._request.batch)
        lists: nested.Lists = "if clear" if has_lists else "never"

        def join(leaves: list[Any]) -> Any:
            if all(isinstance(t, Tensor) and -t.ndim <= dim < t.ndim for t in leaves):
                lengths = {leaf.size(dim) for leaf in leaves}
                if len(set(sizes)) > 1 and lengths == self._step_rows:
                    return torch.cat(leaves, dim)
            return nested.join_rows(leaves, dim, sizes, sizes, lists=lists)

        return nested.merge(join, outputs)

    def _loss(self, output: Any, rows: Sequence[int], criterion: Any, weight: float = 1.0) -> Sum:
        """The loss of these rows and its gradients, times ``weight``; nothing if that is zero."""
        self._require_time()
        if criterion is not None:  # which may write into what it is given
            output = nested.map_tensors(lambda t: t.clone() if t.is_leaf else t, output)
        targets = self._move(self._request.targets, rows)
        if isinstance(output, Tensor) and isinstance(targets, Tensor) and not self._shapes:
            shapes = [tuple(output.shape), tuple(targets.shape)]
            if output.numel() == targets.numel() and {*map(len, shapes)} == {1, 2}:
                self._shapes = shapes
        loss = loss_of(output, targets, criterion)
        del output, targets
        _note_dtypes(loss, self._dtypes)
        leaves = [*chain(*self._leaves)] if weight and loss.requires_grad else []
        found: Sequence[Tensor | None] = ()
        try:
            if leaves:  # with the weight inside: hooks may clamp gradients
                # Multiplied: for a gradient that it is given, torch imports sympy, in 0.3 s.
                found = torch.autograd.grad(
                    loss * (self._scale * weight), leaves, allow_unused=True
                )
        except RuntimeError as error:
            if "checkpoint" not in str(error).lower():  # reentrant ones: only losses are compared
                raise
            self._leaves = []
        each, gradients = iter(found), []
        for group in self._leaves:
            own = [g.detach().to_dense() for g in islice(each, len(group)) if g is not None]
            total = sum(own[1:], own[0]) if own else torch.zeros_like(group[0])
            gradients.append(total)
        return float(loss.detach()) * weight if weight else 0.0, gradients

    def _nudge(self, number: int) -> None:
        """Change the replica's parameters by rounding, in new memory: others do not see it.

        Each number changes them in another way, and farther.
        """
        eps = max(torch.finfo(dtype).eps for dtype in self._dtypes)
        # Kernels for few rows round by several units; in half precision that would hide an error.
        size = eps / 2 * (32 if eps < 1e-5 else 4) ** (number / (_NUDGES - 1))
        for leaf in {id(t): t for group in self._leaves for t in group[1:]}.values():
            angles = torch.arange(leaf.numel(), device=leaf.device) * (1 + number) + number
            leaf.data = leaf.data * (1 + size * angles.cos().view(leaf.shape).to(leaf.dtype))

    def _move(self, value: Any, rows: Sequence[int]) -> Any:
        """These rows of the caller's batch, copied to the replica's device, not counted."""
        move = partial(LeafMover(Transfers()).move, self._task.share.device)
        few = nested.map_leaves(move, _select(value, rows, self._request.dim))
        return unwrap_markers(few, copy=True)


class ConstantNumbers(OperatorMode):
    """Random operators that do not depend on rows.

    Dropout keeps all elements, floating-point numbers are 0.618, and others repeat the first number
    drawn.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0  # calls of random operators, without dropout

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        name, names = func._schema.name, [each.name for each in func._schema.arguments]
        drops = {"dropout_p", "p"} if "dropout" in name else {"dropout_p"}
        own = [0.0 if at in drops else value for at, value in zip(names, args, strict=False)]
        drawn = func(*own, **(kwargs or {}))
        if drops.isdisjoint(names):
            self.calls += 1
            if name in ("aten::randperm", "aten::multinomial"):
                raise Inconclusive("what is drawn depends on the rows", lasting=True)
            drawn.fill_(_DRAWN if drawn.is_floating_point() else drawn.flatten()[0])
        return drawn


def _select(value: Any, rows: Sequence[int], dim: int) -> Any:
    """``value`` with these rows. An index tensor would have to be in the memory of each leaf."""

    def select(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.ndim:
            return torch.cat([leaf.detach().narrow(dim, row, 1) for row in rows], dim)
        return select_rows(leaf, rows, dim)

    return nested.map_leaves(select, value)


def _fix_statistics(task: ReplicaTask, *others: Any) -> list[nn.Module]:
    """Let batch normalisations use running statistics: otherwise they tie rows together."""
    roots = [*others, *(replica.root for replica in task.replicas)]
    layers = chain(*(root.modules() for root in roots if isinstance(root, nn.Module)))
    fixed = [layer for layer in layers if uses_batch_statistics(layer)]
    fixed = [layer for layer in fixed if layer.running_mean is not None]
    for layer in fixed:
        layer.training = False
    return fixed


def _note_dtypes(loss: Tensor, dtypes: set[torch.dtype]) -> None:
    """Add the dtypes of the graph, when it is run: the coarsest determines the tolerance."""
    dtypes.add(loss.dtype)

    def note(gradients: Sequence[Tensor | None]) -> None:
        dtypes.update(each.dtype for each in gradients if each is not None)

    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            node.register_prehook(note)
            nodes += [following for following, _ in node.next_functions]


def _joined_error(whole: Sequence[Any], pieces: Sequence[Any], parts: Parts, mean: bool) -> float:
    """The relative difference of the joined outputs of parts from those of all rows.

    Infinite if two dimensions have the rows, as a matrix of scores has. The ``mean`` of numbers is
    compared if the engine takes it.
    """
    sizes, errors = [sum(map(len, parts)), *map(len, parts)], [0.0]

    def compare(leaves: list[Any]) -> None:
        one, *others = (leaf.double().nan_to_num() for leaf in leaves)
        dims = [d for d in range(one.ndim) if [leaf.size(d) for leaf in leaves] == sizes]
        joined = torch.cat(others, dims[0]) if dims else one
        if mean and not one.ndim:
            joined = sum(each * n / sizes[0] for each, n in zip(others, sizes[1:], strict=True))
        errors.append(math.inf if len(dims) > 1 else relative_difference([joined], [one])[0])

    def leaf(values: list[Any]) -> None:
        with contextlib.suppress(AttributeError, RuntimeError):  # no tensors, or padded ones
            compare(values)

    with contextlib.suppress(Exception):  # of structures that differ
        nested.merge(leaf, [*whole, *pieces])
    return max(errors)


def _fails(run: Callable[[], object]) -> bool:
    with contextlib.suppress(Exception):
        run()
        return False
    return True


def _sum(sums: Sequence[Sum], factors: Weights = ()) -> Sum:
    """The sums of losses and gradients. What has the factor zero is left out, even if NaN."""
    each = [one for one in zip(factors or [1.0] * len(sums), sums, strict=True) if one[0]]
    gradients = [[w * gradient for gradient in own] for w, (_, own) in each]
    combined = [torch.stack(same).sum(0) for same in zip(*gradients, strict=True)]
    return sum(w * loss for w, (loss, _) in each), combined


def _error(found: Sum, expected: Sum) -> float:
    """The relative error of gradients, or of the loss if that is larger."""
    size = max(abs(found[0]), abs(expected[0]), _LEAST)
    of_loss = abs(found[0] - expected[0]) / size if math.isfinite(found[0]) else math.inf
    return max(of_loss, relative_difference(found[1], expected[1], _LEAST)[0])


def _is_finite(result: Sum) -> bool:
    return math.isfinite(result[0]) and all(bool(each.isfinite().all()) for each in result[1])


def require_joined(outputs: Sequence[Any], sizes: Sequence[int], dim: int) -> bool:
    """Require that the outputs for parts of a few rows, joined, are the output for all of them.

    Only tensors with several entries per row are compared. Returns whether the values show their
    order: whether the parts joined in the wrong order would differ.

    Args:
        outputs: the outputs for a few rows, and for parts of them in order.
        sizes: the numbers of rows of each.
        dim: the dimension that holds the rows.

    Raises:
        ValueError: they differ.
    """
    shows = True

    def compare(leaves: list[Any]) -> None:
        nonlocal shows
        whole, *parts = leaves
        if not isinstance(whole, Tensor) or not nested.have_entries(whole, dim, sizes[0]):
            return
        lengths = [leaf.size(dim) for leaf in leaves]
        if len({*lengths}) == 1:  # no rows, such as a codebook
            return
        are_equal = len({leaf.movedim(dim, 0).shape[1:] for leaf in leaves}) == 1
        are_equal = are_equal and sum(lengths[1:]) == lengths[0]
        if not are_equal or not _is_close(torch.cat(parts, dim), whole):
            raise Refused(
                f"the module's output has {whole.size(dim)} entries for {sizes[0]} rows, and not "
                f"in the order of the rows: the outputs of micro-batches cannot be joined to what "
                f"one call gives. Return one entry per row, such as torch.stack([a, b], 1) in the "
                f"place of torch.cat([a, b]), or .view(rows, k, -1) of k samples per row. Nothing "
                f"was changed; an engine made with verify=False does not check."
            )
        shows = shows and not same_bits(torch.cat(parts[::-1], dim), whole)

    nested.merge(compare, outputs)
    return shows


def _is_close(joined: Tensor, whole: Tensor) -> bool:
    if same_bits(joined, whole) or not (whole.is_floating_point() or whole.is_complex()):
        return same_bits(joined, whole)
    return relative_difference([joined], [whole])[0] <= _JOINED
