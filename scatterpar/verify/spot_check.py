"""Compare the gradient of the loss of some rows with the weighted sum of those of parts of them.

One replica computes, in the dtypes of the step, and everything is restored::

    outputs  = module(all rows)
    expected = d criterion(outputs, targets) / d outputs                              of all rows
    combined = sum of weight * d criterion(outputs, targets) / d outputs             of each part

Gradients are compared, because wrong weights may not show in a loss: at initialisation the loss of
all rows is the same. If the module computes the loss, or outputs do not have one entry per row, the
gradients are those of the smallest parameters.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, pairwise, product
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from scatterpar.devices.transfers import Transfers
from scatterpar.replicas.module_copy import root_to_replicate
from scatterpar.step import nested
from scatterpar.step.auto_accum import is_out_of_memory
from scatterpar.step.loss_weights import term_counts
from scatterpar.step.markers import select_rows, unwrap_markers
from scatterpar.step.request import Request
from scatterpar.step.scatter import LeafMover
from scatterpar.step.substeps import ReplicaTask, as_call, loss_of
from scatterpar.threads.caller_context import autocast_types
from scatterpar.torch_private import uncompiled
from scatterpar.verify.gradient_check import has_statistics, relative_difference
from scatterpar.verify.row_choice import Parts, is_label
from scatterpar.verify.user_state import preserve_user_state

# Right gradients agree to 2e-16, 1.2e-7, 1e-3 and 8e-3, and wrong ones are off by 1e-2 and more.
_TOLERANCES = {
    torch.float64: 1e-6,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 3e-2,
}
_HALF = torch.float16, torch.bfloat16
_ROUNDING = 3e-2  # larger differences are not rounding, whatever the kernels
_CHEAP = 2**20  # elements of outputs or parameters; so many cost next to nothing
_MANY = 2**24  # maximal elements of outputs, unless two rows have more
_SMALLEST_LOSS = 1e-2  # smaller losses are sums that cancel, with a large part of rounding

Gradients = list[Tensor]
Loss = Callable[[Sequence[int]], Tensor]  # of some rows


class Inconclusive(Exception):
    """The check is inconclusive. ``lasting``: a later step would not help."""

    def __init__(self, why: str, *, lasting: bool = False) -> None:
        super().__init__(why)
        self.lasting = lasting


class DiffersFromPlain(Exception):
    """The loss of the user's own module and criterion differs from that of a replica."""


@dataclass(frozen=True)
class Finding:
    """The error of the engine's combination for ``parts`` of rows.

    Attributes:
        relative_error: of a gradient, or of the loss if only the loss differs (``of_losses``).
        factor: the ratio of the engine's gradient to the expected one.
        advice: how the loss seems to combine, and what to pass.
    """

    relative_error: float
    factor: float
    parts: Parts
    advice: str
    of_losses: bool = False


class SpotCheck:
    """A check on some rows of a request, computed by the replica of a task."""

    def __init__(
        self,
        request: Request,
        task: ReplicaTask,
        labels: Sequence[Tensor] = (),
        ignored_labels: Iterable[int] = (),
    ) -> None:
        self._request, self._task = request, task
        self._labels, self._ignored = labels, ignored_labels
        self._module = cast(nn.Module, task.module)
        self._micro_batch = max(stop - start for start, stop in task.share.micro_batches)
        self._is_shared = root_to_replicate(request.criterion) is None  # replicas have no copies
        self.shares_state = False  # whether a forward pass changes what the criterion leads to

    @contextlib.contextmanager
    def _isolated(self) -> Iterator[None]:
        devices = [self._task.share.device]
        modules = [*self._module.modules()]
        hooks = [*chain(*(m._forward_pre_hooks.values() for m in modules))]
        hooks += chain(*(m._forward_hooks.values() for m in modules))
        self._criterion_state = preserve_user_state(
            [self._task.criterion, self._request.count], devices
        )
        self._hook_state = preserve_user_state(hooks, devices)
        here = torch.inference_mode(False), torch.enable_grad()
        with self._hook_state, self._criterion_state, uncompiled(), here[0], here[1]:
            try:
                yield
            finally:
                self._restore()

    def _restore(self) -> None:
        """Undo the changes of user code."""
        with torch.no_grad():
            for replica in self._task.replicas:
                replica.refresh()
        torch.clear_autocast_cache()  # it may hold parameters without a graph
        self._hook_state.restore()
        self._criterion_state.restore()

    def run(self, choose: Callable[[int], Sequence[Parts]], max_rows: int) -> Finding | None:
        """What is off for two choices of at most so many rows; ``None`` if one agrees.

        Raises:
            Inconclusive: the rows say neither.
        """
        try:
            with self._isolated():
                return self._decide(choose, max_rows)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        if max_rows > 2:
            return self.run(choose, 2)
        raise Inconclusive("memory ran out", lasting=True)

    def _decide(self, choose: Callable[[int], Sequence[Parts]], max_rows: int) -> Finding | None:
        self._few = [*range(min(2, self._request.rows))]
        self._probe = self._output(self._few)
        self._note_shared()
        self._restore()
        wrong, doubt = None, Inconclusive("there are no rows")
        for parts in choose(min(max_rows, self._most_rows())):
            try:
                finding = self._check(parts)
            except Inconclusive as error:
                if error.lasting:
                    raise
                doubt = error
                continue
            if finding is None:
                if wrong is not None:
                    raise Inconclusive("other rows say something else")
                return None
            wrong = wrong or finding
        if wrong is None:
            raise doubt
        return wrong

    def _most_rows(self) -> int:
        """As many as have few elements of outputs; three, unless these are very large."""
        of_row = max(1, sum(map(torch.numel, nested.tensors(self._probe))) // len(self._few))
        rows = max(_CHEAP // of_row, 3 if 3 * of_row <= _MANY else 2)
        if not self._has_outputs and sum(map(torch.numel, self._module.parameters())) > _CHEAP:
            rows = min(rows, max(3, self._micro_batch))  # each takes a backward pass
        return rows

    def forward(self) -> None:
        """Run the module on a row, for ``shares_state``."""
        with self._isolated():
            self._output([0])
            self._note_shared()

    def outputs(
        self, choices: Sequence[Sequence[int]], output_of: Callable[[Any], Any]
    ) -> list[Any]:
        """What ``output_of`` gives for each choice of rows, with the same random numbers."""
        outputs = []
        with self._isolated(), torch.no_grad():
            for rows in choices:
                with SameNumbers():
                    outputs.append(self._output(rows, output_of))
                self._restore()
        return outputs

    def compare_with_plain(self, model: nn.Module, rows: Sequence[int]) -> None:
        """Compare the loss of some rows with that of the user's own module and criterion.

        Raises:
            DiffersFromPlain: by more than rounding, and each gives the same again.
        """
        request, device = self._request, self._task.share.device
        dtypes = {torch.get_autocast_dtype(kind) for kind in autocast_types()}

        def loss(module: nn.Module, criterion: Any) -> float:
            args, kwargs = as_call(self._move(request.inputs, rows))
            value = loss_of(module(*args, **kwargs), self._move(request.targets, rows), criterion)
            self._restore()
            dtypes.add(value.dtype)
            return float(value.detach())

        def both() -> tuple[float, float]:
            found = loss(self._module, self._task.criterion)
            with preserve_user_state([model, request.criterion], [device]):
                return found, loss(model, request.criterion)

        def differ(one: float, other: float) -> bool:
            scale = max(abs(one), abs(other), _SMALLEST_LOSS)
            return abs(one - other) > scale * max(_TOLERANCES.get(d, 1.0) for d in dtypes)

        with self._isolated():
            try:
                first = both()
                if not differ(*first) or any(map(differ, first, both())):
                    return
            except Exception:  # raised by user code for these rows
                return
            raise DiffersFromPlain(*reversed(first))

    @property
    def _has_outputs(self) -> bool:
        return self._task.criterion is not None and not self.shares_state

    def _is_random(self) -> bool:
        return self._hook_state.drawn or self._criterion_state.drawn

    def _note_shared(self) -> None:
        self.shares_state = self._is_shared and self._criterion_state.is_changed()

    def _check(self, parts: Parts) -> Finding | None:
        if self._has_outputs:
            try:
                finding = self._check_by_outputs(parts)
            except Exception as error:  # they do not tell, or the user's code asks for more
                if isinstance(error, Inconclusive) or is_out_of_memory(error):
                    raise
            else:
                # An input that the module returns, such as a mask with the logits, has a gradient
                # that no parameter gets. So parameters decide, if they could show the difference.
                with contextlib.suppress(Exception):
                    if finding and not self._check_by_parameters(
                        finding.parts, finding.relative_error / 4
                    ):
                        return None
                return finding
        return self._check_by_parameters(parts)

    def _check_by_outputs(self, parts: Parts) -> Finding | None:
        rows, dim = [*chain(*parts)], self._request.dim
        place = {row: k for k, row in enumerate(rows)}
        leaves: list[Tensor] = []

        def leaf(pair: list[Any]) -> Any:
            few, whole = pair
            if not isinstance(few, Tensor):
                if hasattr(few, "__dict__") or callable(few):
                    raise TypeError("outputs of the user's own class")  # which may hold anything
                return few
            if [few.size(dim), whole.size(dim)] != [len(self._few), len(rows)]:
                raise ValueError("outputs without rows")  # these may be losses
            whole = _wider(whole.detach())
            if few.requires_grad:
                leaves.append(whole.requires_grad_())
            return whole

        with torch.no_grad():
            whole = nested.merge(leaf, [self._probe, self._output(rows)])
        self._restore()

        def loss(some: Sequence[int], wide: bool = False) -> Tensor:
            def cut(pair: list[Any]) -> Any:
                few, value = pair
                if not isinstance(value, Tensor):
                    return value
                each = value.split(1, dim)
                own = torch.cat([each[place[row]] for row in some], dim)
                return own if wide else own.to(few.dtype)

            targets = self._move(self._request.targets, some)
            targets = nested.map_tensors(_wider, targets) if wide else targets
            return loss_of(nested.merge(cut, [self._probe, whole]), targets, self._task.criterion)

        own = [t for one in self._task.replicas[1:] for t in one.tensors if t.requires_grad]
        is_half = any(t.dtype in _HALF for t in nested.tensors(self._probe))
        if is_half and self._request.count is None:
            try:
                loss(parts[-1], wide=True)
                loss = partial(loss, wide=True)  # a criterion in half precision rounds, too
            except Exception:  # a criterion that is in half precision
                pass
            self._restore()
        compare = partial(self._compare, loss, [*leaves, *_small(own)])
        finding, gradients = compare(parts)
        if finding or len(rows) <= 9:
            return finding
        pairs = zip(gradients, leaves, strict=False)
        sizes = torch.stack([g.movedim(dim, 0).flatten(1).abs().amax(1) for g, _ in pairs]).sum(0)
        order = [rows[k] for k in sizes.argsort().tolist()]
        extremes = [[order[-2:], order[:1]], [order[-4:-2], order[1:2]]]
        with contextlib.suppress(Inconclusive):
            findings = [compare(each)[0] for each in extremes]
            return findings[0] if all(findings) else None
        return None

    def _check_by_parameters(self, parts: Parts, finest: float = math.inf) -> Finding | None:
        def loss(rows: Sequence[int]) -> Tensor:
            targets = self._move(self._request.targets, rows)
            return loss_of(self._output(rows), targets, self._task.criterion)

        leaves = _small(p for p in self._module.parameters() if p.requires_grad)
        return self._compare(loss, leaves, parts, by_module=True, finest=finest)[0]

    def _compare(
        self,
        loss: Loss,
        leaves: Sequence[Tensor],
        parts: Parts,
        *,
        by_module: bool = False,
        finest: float = math.inf,
    ) -> tuple[Finding | None, Gradients]:
        """Compare gradients of all rows with those of the parts, times the engine's weights.

        Returns what is off, and the gradients of all rows.

        Raises:
            Inconclusive: also if rounding hides differences that are smaller than ``finest``.
        """
        weights, rows = self._engine_weights(parts), [*chain(*parts)]
        counted = [part for part, weight in zip(parts, weights, strict=True) if weight]
        draws: set[int] = set()  # how many operators drew, each time
        dtypes: set[torch.dtype] = set()
        differ = partial(relative_difference, least=1e-2 if by_module else 1e-6)

        def evaluate(rows: Sequence[int]) -> tuple[float, Gradients]:
            numbers = SameNumbers()  # entered only if needed: torch imports its compiler for it
            with numbers if self._is_random() else contextlib.nullcontext():
                value = loss(rows)
                gradients = _gradients(value, leaves, dtypes)
            draws.add(numbers.calls)
            self._restore()
            return float(value.detach()), gradients

        self._hook_state.drawn = self._criterion_state.drawn = False
        evaluate(counted[-1])  # whether anything is drawn
        draws.clear()
        total, joined = evaluate(rows)
        values, apart = zip(*map(evaluate, counted), strict=True)
        if len(draws) > 1:
            raise Inconclusive("what is drawn depends on the rows", lasting=True)
        if not all(each.isfinite().all() for each in joined):
            raise Inconclusive("a gradient is NaN or infinite")
        if not any(each.any() for own in (joined, *apart) for each in own):
            raise Inconclusive("all gradients are zero")
        tolerance = max(_TOLERANCES.get(dtype, 1.0) for dtype in dtypes)
        combined = _combined([weight for weight in weights if weight], apart)
        error, _ = differ(combined, joined)
        if tolerance < error < math.inf:
            if self._is_random() and draws == {0}:
                raise Inconclusive("another thread draws random numbers", lasting=True)
            if differ(evaluate(rows)[1], joined)[0] > tolerance:
                raise Inconclusive("it gives another result each time", lasting=True)
            went_through = dtypes | {t.dtype for t in nested.tensors(self._probe)}
            _nudge(leaves, max(torch.finfo(d).eps for d in went_through if d.is_floating_point))
            if error <= 4 * differ(evaluate(rows)[1], joined)[0]:
                raise Inconclusive("its gradient is nothing but rounding")  # a student's at first
            if by_module and error < 1:
                # A mean of rows twice is what it is of them once, a sum is twice that: what differs
                # is how kernels round that go by the number of rows.
                _, once = evaluate(counted[-1])
                _, twice = evaluate([*counted[-1], *counted[-1]])
                noise = min(differ(twice, _combined([n], [once]))[0] for n in (1.0, 2.0))
                tolerance = max(tolerance, 8 * noise if noise < _ROUNDING else 0.0)
        if tolerance > finest:
            raise Inconclusive("rounding is as large")
        factor, of_losses = _norm(combined) / max(_norm(joined), 1e-300), error <= tolerance
        if of_losses and self._request.is_mean:
            return None, joined
        if of_losses:
            if not all(any(each.any() for each in own) for own in apart):
                raise Inconclusive("a mean of one thing alone is its sum")
            error = abs(total - sum(values)) / max(map(abs, (total, *values, 1e-300)))
            if error <= tolerance:
                return None, joined
            return Finding(error, factor, parts, _PENALTY, of_losses=True), joined

        def fits(candidate: Sequence[float]) -> bool:
            return differ(_combined(candidate, apart), joined)[0] <= 10 * tolerance

        is_complete = len(counted) == len(parts) and math.isfinite(error)
        several = sum(any(each.any() for each in own) for own in apart) > 1
        advice = self._advice(parts, fits, several) if is_complete else _OTHER
        return Finding(error, factor, parts, advice), joined

    def _advice(self, parts: Parts, fits: Callable[[Sequence[float]], bool], several: bool) -> str:
        """How the loss of all rows depends on the parts' losses; ``several`` are not zero."""
        labelled = filter(is_label, self._labels)
        for labels, value, shifted in product(labelled, self._ignored, (0, 1)):
            if shifted and labels.ndim < 2:
                continue
            counted = (labels[:, 1:] if shifted else labels) != value
            terms = [sum(int(counted[row].sum()) for row in part) for part in parts]
            is_all = not shifted and all(counted[row].all() for part in parts for row in part)
            if sum(terms) and not is_all and fits([n / sum(terms) for n in terms]):
                said = ", ".join([str(value)] * (value != -100) + ["shifted=True"] * shifted)
                return _LABELS.format(value=value, said=said)
        if several and fits([1.0] * len(parts)):
            return _SUM
        if several and fits([len(part) / sum(map(len, parts)) for part in parts]):
            return _MEAN
        return _OTHER

    def _engine_weights(self, parts: Parts) -> list[float]:
        """The factors by which the engine would multiply the losses of the parts."""
        request, batch = self._request, (self._request.inputs, self._request.targets)
        if not request.is_mean:
            return [1.0] * len(parts)
        each = [unwrap_markers(_select(batch, rows, request.dim), copy=True) for rows in parts]
        targets = _select(request.targets, [*chain(*parts)], request.dim)
        spans = [*pairwise([0, *accumulate(map(len, parts))])]
        counts = term_counts(replace(request, targets=targets, batches=()), spans, each)
        self._restore()
        if not sum(counts):
            raise Inconclusive("none of the rows adds anything")
        return [count / sum(counts) for count in counts]

    def _output(self, rows: Sequence[int], output_of: Callable[[Any], Any] | None = None) -> Any:
        """The module's output for some rows, with running statistics in batch normalisation."""
        for layer in chain(*(one.roots[0].modules() for one in self._task.replicas[:1])):
            if has_statistics(layer):
                if layer.running_mean is None and output_of is None:
                    raise Inconclusive("batch normalisation ties rows together", lasting=True)
                layer.training = False
        return (output_of or self._task.output_of)(self._move(self._request.inputs, rows))

    def _move(self, value: Any, rows: Sequence[int]) -> Any:
        """These rows of the caller's batch, copied to the replica's device."""
        move = partial(LeafMover(Transfers()).move, self._task.share.device)  # not counted
        few = nested.map_leaves(move, _select(value, rows, self._request.dim))
        return unwrap_markers(few, copy=True)


_SUM = (
    'It seems to be a sum: pass reduction="sum" (for a mean, count= says of what; '
    "whole_batch=True for a loss that compares rows)."
)
_MEAN = (
    'It seems to be a mean over rows: pass reduction="mean", without count= '
    "(whole_batch=True for a loss that compares rows)."
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
_OTHER = (
    "If it compares rows with each other, or is a ratio of sums, pass whole_batch=True, which "
    "calls it once with all rows. If it is a mean over something else than what was counted, pass "
    "count=, a function of (inputs, targets) that gives the number of its terms, such as "
    'scatterpar.count_labels(); for a sum, reduction="sum". Or make it a mean of one loss per row.'
)


class SameNumbers(TorchDispatchMode):
    """Random numbers that do not depend on rows: each operator draws one number for all elements.

    Dropout keeps all elements: with one number for all it would keep all or nothing.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0  # the number of operators that drew

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        schema, own, call = func._schema, [*args], partial(func, **(kwargs or {}))
        name = schema.name.removeprefix("aten::")
        if "attention" in name:  # forward and backward
            at = [k for k, argument in enumerate(schema.arguments) if argument.name == "dropout_p"]
            return call(*(0.0 if k in at else value for k, value in enumerate(own)))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return call(*own)
        self.calls += 1
        if name == "native_dropout":
            return own[0] / (1 - own[1]), torch.ones_like(own[0], dtype=torch.bool)
        if name in ("bernoulli", "bernoulli_"):  # the chances themselves
            given, default = own[0], 0.5 if name[-1] == "_" else own[0]
            chance = torch.as_tensor(own[1] if len(own) > 1 else default)
            return given.copy_(chance) if name[-1] == "_" else chance.expand_as(given).clone()
        sizes = [k for k, value in enumerate(own) if isinstance(value, (list, tuple))]
        if not sizes and not name.endswith(("_", "_like")):
            raise Inconclusive("what is drawn depends on the rows", lasting=True)
        k = sizes[0] if sizes else 0
        size = own[k] if sizes else own[k].shape
        own[k] = [1] * len(size) if sizes else own[k].new_empty([1] * len(size))
        number = call(*own).expand(size)
        return args[0].copy_(number) if name[-1] == "_" else number.contiguous()


def _select(value: Any, rows: Sequence[int], dim: int) -> Any:
    """These rows. They are narrowed one by one: an index tensor would have to be on the device."""

    def select(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.ndim:
            return torch.cat([leaf.detach().narrow(dim, row, 1) for row in rows], dim)
        return select_rows(leaf, rows, dim)

    return nested.map_leaves(select, value)


def _gradients(loss: Tensor, leaves: Sequence[Tensor], dtypes: set[torch.dtype]) -> Gradients:
    """The gradients of ``leaves``; adds the dtypes of the graph to ``dtypes``."""
    dtypes.add(loss.dtype)

    def note(gradients: Sequence[Tensor | None]) -> None:
        dtypes.update(gradient.dtype for gradient in gradients if gradient is not None)

    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            node.register_prehook(note)
            nodes += [following for following, _ in node.next_functions]
    with contextlib.ExitStack() as stack:
        for kind in autocast_types():
            stack.enter_context(torch.autocast(kind, enabled=False))
        found = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return [_wider(gradient.detach().to_dense()) for gradient in found]


def _combined(factors: Sequence[float], apart: Sequence[Gradients]) -> Gradients:
    """The sum of the parts' gradients, times their factors."""
    sums = [factors[0] * gradient for gradient in apart[0]]
    for factor, own in zip(factors[1:], apart[1:], strict=True):
        torch._foreach_add_(sums, own, alpha=factor)
    return sums


def _nudge(leaves: Sequence[Tensor], eps: float) -> None:
    """Change the leaves by the size of rounding.

    They are private to this replica until they are restored.
    """
    for leaf in leaves:
        errors = torch.arange(leaf.numel(), device=leaf.device).cos().view(leaf.shape)
        leaf.data = leaf.data * (1 + eps / 2 * errors.to(leaf.dtype))


def _norm(gradients: Gradients) -> float:
    return math.hypot(*(float(torch.linalg.vector_norm(g)) for g in gradients))


def _wider(tensor: Tensor) -> Tensor:
    """Half-precision tensors in single precision, so that rounding does not hide wrong weights."""
    return tensor.float() if tensor.dtype in _HALF else tensor


def _small(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The smallest leaves, at least one: every layer has some."""
    ordered = sorted(tensors, key=Tensor.numel)
    sizes = accumulate(map(Tensor.numel, ordered))
    return [t for t, n in zip(ordered, sizes, strict=True) if n <= _CHEAP] or ordered[:1]
