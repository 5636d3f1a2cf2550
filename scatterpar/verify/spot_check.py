"""Compare the gradient of the loss of some rows with the weighted sum of those of parts of them.

One replica computes, in the dtypes of the step, and everything is restored::

    outputs  = module(all rows), without a graph
    expected = d criterion(outputs, targets) / d outputs                       of all chosen rows
    combined = sum of weight * d criterion(outputs, targets) / d outputs             of each part

Gradients are compared, because wrong weights may not show in a loss: at initialisation every row
has the same loss. The gradients are those of the smallest parameters if the module computes the
loss, if forward passes change what the criterion reads, or if the check by outputs raises an error.
An error that outputs show must be confirmed by parameters, if they can decide. Of a sum, the losses
are compared, too.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain, pairwise, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scatterpar.step import nested
from scatterpar.step.auto_accum import is_out_of_memory
from scatterpar.step.loss_weights import term_counts
from scatterpar.step.markers import all_tensors, unwrap_markers
from scatterpar.step.request import Request
from scatterpar.step.substeps import ReplicaTask, loss_of
from scatterpar.verify.few_rows import FewRows, Inconclusive, SameNumbers, select, widen
from scatterpar.verify.gradient_check import relative_difference
from scatterpar.verify.row_choice import Parts, halves, may_be_labels

# Correct gradients agree to 2e-16 in float64, to 1e-3 in float32 (if kernels round by the number of
# rows) and to 1e-2 in half precision. Wrong weights change them by more, if they matter.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 3e-3, torch.float16: 3e-2, torch.bfloat16: 3e-2}
_NOTHING_BUT = 0.1  # if rounding changes a gradient by more, it is nothing but rounding
_SMALL = 2**20  # elements of parameters that are compared; larger modules: checked on fewer rows
# Elements of inputs and outputs: never more than _MANY; more than _CHEAP up to 1/8 of the rows.
_MANY, _CHEAP = 2**20, 2**16
_FEWEST = 2  # rows of a check, even if they are large
_UNCOUNTED = 32  # rows that are searched for some that count= leaves out

Gradients = list[Tensor]
Loss = Callable[[Sequence[int]], Tensor]  # from rows to their loss
Choose = Callable[[int], Iterator[Parts]]  # from a maximal number of rows to two choices
Compare = Callable[[Parts], "tuple[Finding | None, Gradients]"]


class Finding(NamedTuple):
    """The error of the engine's combination for ``parts`` of rows.

    ``relative_error`` is that of a gradient, or of the loss if only the loss differs
    (``of_losses``). ``factor`` is the ratio of the engine's gradient to the expected one.
    ``advice`` says how the loss seems to combine, and what to pass.
    """

    relative_error: float
    factor: float
    parts: Parts
    advice: str
    of_losses: bool = False


class SpotCheck(FewRows):
    """Checks on some rows of a request how losses combine, with the replica of ``task``."""

    def __init__(
        self,
        request: Request,
        task: ReplicaTask,
        tensors: Sequence[Tensor] = (),
        ignored_labels: Iterable[int] = (),
    ) -> None:
        super().__init__(request, task)
        self._tensors, self._ignored = tensors, ignored_labels
        self.output_ratio: float | None = None  # elements of outputs per element of inputs

    def find(self, choose: Choose, max_rows: int) -> Finding | None:
        """The error found for two choices of at most ``max_rows`` rows; ``None`` if one agrees.

        Raises:
            Inconclusive: no choice of rows decides, or memory ran out.
        """
        for most in (max_rows, _FEWEST):
            try:
                return self._decide(choose, most)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            self._restore()
        raise Inconclusive("memory ran out", lasting=True)

    def _decide(self, choose: Choose, max_rows: int) -> Finding | None:
        wrong, doubt = None, Inconclusive("there are no rows")
        for parts in choose(max(_FEWEST, min(max_rows, self._cheap_rows()))):
            try:
                if (finding := self._check_parts(parts)) is None:
                    return None
                wrong = wrong or finding
            except Inconclusive as error:
                if error.lasting:
                    raise
                doubt = error
        if wrong is None:
            raise doubt
        return wrong

    def _check_parts(self, parts: Parts) -> Finding | None:
        try:
            return self._check(parts)
        except Inconclusive:
            raise
        except Exception as error:  # user code may need parts of even size: for pairs, groups
            if is_out_of_memory(error) or len([*chain(*parts)]) < 2:
                raise
        self._restore()
        return self._check(halves(parts))

    def _cheap_rows(self) -> int:
        """How many rows are cheap to check."""
        rows, eighth = sorted({0, self._request.rows - 1}), self._request.rows // 8
        inputs = max(1, _elements(select(self._request.inputs, rows, self._request.dim)))
        if self.output_ratio is None:
            self.output_ratio = _elements(self.forward(rows)) / inputs
        elements = int(inputs * (1 + self.output_ratio))
        cheap, some = (len(rows) * number // elements for number in (_CHEAP, _MANY))
        most = min(some, max(cheap, eighth))
        if not self._has_outputs and sum(map(torch.numel, self._module.parameters())) > _SMALL:
            micro_batch = max(stop - start for start, stop in self._task.share.micro_batches)
            most = min(most, eighth, micro_batch)  # each row takes backward passes
        return most

    @property
    def _has_outputs(self) -> bool:
        return self._task.criterion is not None and not self.shares_state

    def _check(self, parts: Parts) -> Finding | None:
        output = self.forward([*chain(*parts)]) if self._has_outputs else None
        if self._has_outputs:
            try:
                finding = self._check_by_outputs(parts, output)
            except Inconclusive:
                raise
            except Exception:  # outputs without rows, or user code that needs more than outputs
                return self._check_by_parameters(parts)
            # An input that the module returns, such as a mask with the logits, has a gradient that
            # no parameter gets. So parameters decide, if they can.
            with contextlib.suppress(Exception):
                if finding and not self._check_by_parameters(finding.parts):
                    return None
            return finding
        return self._check_by_parameters(parts)

    def _check_by_outputs(self, parts: Parts, output: Any) -> Finding | None:
        rows, dim = [*chain(*parts)], self._request.dim
        targets_of_all = self._move(self._request.targets, rows)
        place = {row: k for k, row in enumerate(rows)}
        leaves: list[Tensor] = []
        # Counts of half-precision targets are rounded; then the loss must be, too.
        unrounded = widen if self._request.count is None else Tensor.detach

        def leaf(value: Any) -> Any:
            if isinstance(value, Tensor):
                if value.size(dim) != len(rows):
                    raise ValueError("outputs without rows")  # for example losses
                if value.is_floating_point() or value.is_complex():
                    leaves.append(unrounded(value.detach()).requires_grad_())
                    return leaves[-1]
            elif hasattr(value, "__dict__") or callable(value):  # may hold tensors unseen here
                raise TypeError("outputs of the user's own class")
            return value

        output = nested.map_leaves(leaf, output)

        def loss(some: Sequence[int]) -> Tensor:
            def cut(value: Tensor) -> Tensor:
                each = value.split(1, dim)
                return torch.cat([each[place[row]] for row in some], dim)

            targets = nested.map_tensors(unrounded, self._move(self._request.targets, some))
            return loss_of(nested.map_tensors(cut, output), targets, self._task.criterion)

        own = [t for one in self._task.replicas[1:] for t in one.tensors if t.requires_grad]
        compare = partial(self._compare, loss, [*leaves, *_small(own)])
        finding, gradients = compare(parts)
        if finding is None and self._request.count is not None:
            finding = self._check_uncounted(compare, rows[:_UNCOUNTED])
        if finding and (shapes := _broadcast(output, targets_of_all)):
            finding = finding._replace(advice=f"{_BROADCAST.format(*shapes)} {finding.advice}")
        if finding or len(rows) <= 9:
            return finding
        # Many rows may hide a wrong weight: compare the rows with the largest gradients with those
        # with the smallest.
        each = [g.movedim(dim, 0).flatten(1).abs().amax(1) for g in gradients[: len(leaves)]]
        order = [rows[k] for k in torch.stack(each).sum(0).argsort().tolist()]
        with contextlib.suppress(Inconclusive):
            finding, _ = compare([order[-2:], order[:1]])
            return finding and compare([order[-4:-2], order[1:2]])[0]
        return None

    def _check_uncounted(self, compare: Compare, rows: Sequence[int]) -> Finding | None:
        """Compare rows for which ``count=`` gives zero with the others: they must add nothing."""
        with contextlib.suppress(Inconclusive):
            weights = self._engine_weights([[row] for row in rows])
            without = [row for row, weight in zip(rows, weights, strict=True) if not weight]
            if without and len(without) < len(rows):
                return compare([without, [row for row in rows if row not in without]])[0]
        return None

    def _check_by_parameters(self, parts: Parts) -> Finding | None:
        def loss(rows: Sequence[int]) -> Tensor:
            targets = self._move(self._request.targets, rows)
            return loss_of(self._output(rows), targets, self._task.criterion)

        leaves = _small(p for p in self._module.parameters() if p.requires_grad)
        return self._compare(loss, leaves, parts)[0]

    def _compare(
        self, loss: Loss, leaves: Sequence[Tensor], parts: Parts
    ) -> tuple[Finding | None, Gradients]:
        """Compare gradients of all rows with those of the parts, times the engine's weights.

        Returns the finding, or ``None``, and the gradients of all rows. Of a sum, losses are
        compared, too.
        """
        weights, rows = self._engine_weights(parts), [*chain(*parts)]
        counted = [part for part, weight in zip(parts, weights, strict=True) if weight]
        dtypes: set[torch.dtype] = set()
        numbers: SameNumbers | None = None

        def evaluate(rows: Sequence[int]) -> tuple[float, Gradients]:
            with numbers or contextlib.nullcontext():
                value = loss(rows)
                gradients = _gradients(value, leaves, dtypes)
            self._restore()
            return float(value.detach()), gradients

        self._criterion_state.drawn = False
        total, joined = evaluate(rows)
        if self._criterion_state.drawn:
            numbers = SameNumbers()  # only if needed: torch imports its compiler for it
            total, joined = evaluate(rows)
        calls = numbers.calls if numbers else 0
        values, apart = zip(*map(evaluate, counted), strict=True)
        if numbers and numbers.calls != calls * (1 + len(counted)):
            raise Inconclusive("what is drawn depends on the rows", lasting=True)
        if not all(each.isfinite().all() for each in joined):
            raise Inconclusive("a gradient is NaN or infinite")
        num_nonzero = sum(any(each.any() for each in own) for own in apart)  # parts with a gradient
        if not num_nonzero and not any(each.any() for each in joined):
            raise Inconclusive("all gradients are zero")
        tolerance = max(_TOLERANCES.get(dtype, 1.0) for dtype in dtypes)
        differ = partial(relative_difference, least=1e-2)
        combined = _combined([weight for weight in weights if weight], apart)
        error, _ = differ(combined, joined)
        if tolerance < error < math.inf:
            if numbers and not numbers.calls:
                raise Inconclusive("another thread draws random numbers", lasting=True)
            if differ(evaluate(rows)[1], joined)[0] > tolerance:
                raise Inconclusive("it gives another result each time", lasting=True)
            _nudge(leaves, dtypes)
            rounding = differ(evaluate(rows)[1], joined)[0]
            # For example a student that starts as a copy of its teacher.
            if error <= 4 * rounding and rounding > _NOTHING_BUT:
                raise Inconclusive("its gradient is nothing but rounding")
            tolerance = max(tolerance, 4 * rounding)
        if error > tolerance:
            advice = _OTHER if self._task.criterion is not None else _OTHER_OF_MODULE
            if len(counted) == len(parts) and error < math.inf:

                def fits(factors: Sequence[float]) -> bool:
                    if all(map(math.isclose, factors, weights)):  # what the engine does already
                        return False
                    return differ(_combined(factors, apart), joined)[0] <= 10 * tolerance

                advice = self._advice(parts, fits, num_nonzero > 1)
            factor = _norm(combined) / max(_norm(joined), 1e-300)
            return Finding(error, factor, parts, advice), joined
        if self._request.is_mean:
            return None, joined
        if num_nonzero < len(counted):
            raise Inconclusive("some parts have no gradient, so a mean cannot be told from a sum")
        error = abs(total - sum(values)) / max(map(abs, (total, *values, 1e-300)))
        finding = Finding(error, 1.0, parts, _PENALTY, of_losses=True)
        return finding if error > tolerance else None, joined

    def _advice(self, parts: Parts, fits: Callable[[Sequence[float]], bool], several: bool) -> str:
        """How the loss of all rows seems to combine, and what to pass.

        ``several``: more than one part has a gradient.
        """
        if several and fits([len(part) / sum(map(len, parts)) for part in parts]):
            is_default = self._request.is_mean and self._request.count is None
            return _MEAN_OF_ROWS if is_default else _MEAN
        if several and fits([1.0] * len(parts)):
            return _SUM
        labelled = filter(may_be_labels, self._tensors)
        for labels, value, shifted in product(labelled, self._ignored, (0, 1)):
            if shifted and labels.ndim < 2:
                continue
            counted = (labels[:, 1:] if shifted else labels) != value
            terms = [sum(int(counted[row].sum()) for row in part) for part in parts]
            is_all = all(counted[row].all() for part in parts for row in part)
            if sum(terms) and not is_all and fits([n / sum(terms) for n in terms]):
                said = ", ".join([str(value)] * (value != -100) + ["shifted=True"] * shifted)
                return _LABELS.format(value=value, said=said)
        return _OTHER if self._task.criterion is not None else _OTHER_OF_MODULE

    def _engine_weights(self, parts: Parts) -> list[float]:
        """The factors by which the engine would multiply the losses of the parts.

        Raises:
            Inconclusive: the parts have no terms.
        """
        request, batch = self._request, (self._request.inputs, self._request.targets)
        if not request.is_mean:
            return [1.0] * len(parts)
        each = [unwrap_markers(select(batch, rows, request.dim), copy=True) for rows in parts]
        targets = select(request.targets, [*chain(*parts)], request.dim)
        spans = [*pairwise([0, *accumulate(map(len, parts))])]
        counts = term_counts(replace(request, targets=targets, batches=()), spans, each)
        self._restore()
        if not sum(counts):
            raise Inconclusive("none of the rows adds anything")
        return [count / sum(counts) for count in counts]


_SUM = (
    'It seems to be a sum: pass reduction="sum" (for a mean, count= says of what; '
    "whole_batch=True for a loss that compares rows)."
)
_MEAN = (
    'It seems to be a mean over rows: pass reduction="mean", without count= '
    "(whole_batch=True for a loss that compares rows)."
)
_MEAN_OF_ROWS = (
    "It seems to be a mean over rows, whatever the labels: pass count=lambda inputs, targets: "
    'len(targets) (reduction="sum" for a sum, whole_batch=True for a loss that compares rows).'
)
_LABELS = (
    "It seems to be a mean over the labels that are not {value}: pass "
    'reduction="mean" and count=scatterpar.count_labels({said}); or whole_batch=True.'
)
_PENALTY = (
    "It seems to add something that does not depend on the rows, such as a penalty on weights, "
    "which every micro-batch would add once more: multiply that by len(output) / the number of all "
    "rows (no count= or reduction= says that, and whole_batch=True needs none)."
)
_OTHER_MEAN = (
    " If it is a mean over something else than what was counted, pass count=, a function of "
    "(inputs, targets) that gives the number of its terms, such as scatterpar.count_labels(); for "
    'a sum, reduction="sum". Or make it a mean of one loss per row.'
)
_COMPARES = "If it compares rows with each other, or is a ratio of sums, "
_OTHER = _COMPARES + "pass whole_batch=True, which calls it once with all rows." + _OTHER_MEAN
_OTHER_OF_MODULE = (
    _COMPARES + "return the outputs of the rows from forward, and pass the loss as criterion= with "
    "whole_batch=True." + _OTHER_MEAN
)
_BROADCAST = (
    "The output has shape {} and the targets {}: operators broadcast them to a matrix of all pairs "
    "of rows; pass targets of the output's shape, or the other way round."
)


def _broadcast(output: Any, targets: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The shapes of an output and of its targets if they broadcast to all pairs of rows."""
    if not isinstance(output, Tensor) or not isinstance(targets, Tensor):
        return None
    one, other = tuple(output.shape), tuple(targets.shape)
    is_likely = {len(one), len(other)} == {1, 2} and output.numel() == targets.numel()
    return (one, other) if is_likely else None


def _elements(value: Any) -> int:
    return sum(map(torch.numel, all_tensors(value)))


def _gradients(loss: Tensor, leaves: Sequence[Tensor], dtypes: set[torch.dtype]) -> Gradients:
    """The gradients of ``leaves``; adds the dtypes of the graph to ``dtypes``."""

    def note(gradients: Sequence[Tensor | None]) -> None:
        dtypes.update(gradient.dtype for gradient in gradients if gradient is not None)

    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            node.register_prehook(note)
            nodes += [following for following, _ in node.next_functions]
    found = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return [gradient.detach().to_dense() for gradient in found]


def _combined(factors: Sequence[float], apart: Sequence[Gradients]) -> Gradients:
    """The sum of the parts' gradients, times their factors."""
    sums = [factors[0] * gradient for gradient in apart[0]]
    for factor, own in zip(factors[1:], apart[1:], strict=True):
        torch._foreach_add_(sums, own, alpha=factor)
    return sums


def _nudge(leaves: Sequence[Tensor], dtypes: Iterable[torch.dtype]) -> None:
    """Change the leaves by the size of rounding in the least precise of ``dtypes``.

    A leaf gets new memory, so that other replicas do not see the change.
    """
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    for leaf in leaves:
        errors = torch.arange(leaf.numel(), device=leaf.device).cos().view(leaf.shape)
        leaf.data = leaf.data * (1 + eps / 2 * errors.to(leaf.dtype))


def _norm(gradients: Gradients) -> float:
    return math.hypot(*(float(torch.linalg.vector_norm(g)) for g in gradients))


def _small(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The smallest tensors, up to ``_SMALL`` elements in all; at least one."""
    ordered = sorted(tensors, key=Tensor.numel)
    sizes = accumulate(map(Tensor.numel, ordered))
    return [t for t, n in zip(ordered, sizes, strict=True) if n <= _SMALL] or ordered[:1]
