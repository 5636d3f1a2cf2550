"""A handful of rows before the step: is the loss of them what the engine makes of their parts'?

On one replica, in the dtype that the user computes in, and without a trace. Gradients are compared,
since wrong weights may not show in a loss: that of a model at initialisation is the same for all
rows. Where those by outputs do not tell (the module computes the loss; the criterion asks for more
than outputs) it is those by the module's smallest parameters.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from scatterpar.devices.transfers import Transfers
from scatterpar.step import nested
from scatterpar.step.auto_accum import is_out_of_memory
from scatterpar.step.criterion_closure import set_by_forward
from scatterpar.step.loss_weights import term_counts
from scatterpar.step.markers import select_rows, unwrap_markers
from scatterpar.step.request import Request
from scatterpar.step.scatter import LeafMover
from scatterpar.step.substeps import ReplicaTask, as_call, loss_of
from scatterpar.threads.caller_context import autocast_types
from scatterpar.torch_private import uncompiled
from scatterpar.verify.check import has_statistics, relative_difference
from scatterpar.verify.rows import Parts
from scatterpar.verify.untouched import untouched

# Right gradients agree to 2e-16, 1.2e-7, 1e-3 and 8e-3, and wrong ones are off by 1e-2 and more.
_TOLERANCES = {
    torch.float64: 1e-6,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 3e-2,
}
_HALF = torch.float16, torch.bfloat16
_ROUNDING = 3e-2  # what differs by more is not rounding, whatever kernels do
_CHEAP = 2**20  # elements of outputs or parameters that cost next to nothing
_MOST = 2**24  # elements of outputs, and where one row has more, of two rows
_MOST_PARAMETERS = 2**20  # elements
_FEW = 4  # rows that are enough to compare a replica with the user's module
_SMALLEST_LOSS = 1e-2  # of smaller ones, sums that cancel, rounding may be a large part

Loss = Callable[[Sequence[int]], Tensor]  # of some rows
Gradients = list[Tensor]


class Unsure(Exception):
    """It cannot be told: in no step, if that is ``lasting``; or by so few ``rows`` alone."""

    def __init__(self, why: str, *, lasting: bool = False, rows: int = 0) -> None:
        super().__init__(why)
        self.lasting = lasting
        self.rows = rows


class ReadsOld(Unsure):
    """The criterion reads an attribute, of this name, that a forward pass sets on each replica."""


class DiffersFromPlain(Exception):
    """The user's own module and criterion, in plain torch, give another loss than a replica."""


@dataclass(frozen=True)
class Finding:
    """How far the engine's arithmetic is off, and what the loss of all is of that of the parts.

    ``off`` is the relative difference, zero for what is right.
    """

    off: float = 0.0
    parts: Parts = ()
    factors: Sequence[float] = ()  # what the engine multiplies the parts' losses with
    weights: Sequence[float] | None = None  # what it has to; ``None`` where no numbers do
    of_losses: bool = False  # the losses differ, and no gradient does
    certain: bool = True  # it was computed as the step computes
    tolerance: float = 0.0  # what rounding may do


class Rehearsal:
    """One look at a handful of the request's rows, by the replica that is given the task.

    With ``plain``, a loss of its own is compared with that of ``model``, which is the user's.
    """

    def __init__(self, request: Request, task: ReplicaTask, model: nn.Module, plain: bool) -> None:
        self._request, self._task, self._model, self._plain = request, task, model, plain
        self._module = cast(nn.Module, task.module)
        roots = [task.criterion, request.count, *([request.criterion, model] if plain else [])]
        self._user = untouched(roots, [task.share.device])
        self._micro = max(stop - start for start, stop in task.share.micro_batches)

    def run(self, choose: Callable[[int], Sequence[Parts]] | None, most: int) -> Finding:
        """What the first choice of at most so many rows says; if that is anything, the second too.

        Without any, only whether the criterion reads what no forward pass sets, which is raised as
        ``ReadsOld`` or ``DiffersFromPlain``. ``Unsure``: it cannot be told.
        """
        with self._user, uncompiled(), torch.inference_mode(False), torch.enable_grad():
            try:
                if self._plain:
                    self._compare_with_plain()
                if choose is None:
                    return Finding()
                return self._confirmed(choose(most))
            except Exception as error:
                if is_out_of_memory(error):
                    error = Unsure("memory ran out", lasting=True, rows=2)
                few = error.rows if isinstance(error, Unsure) else 0
                if choose is None or not 0 < few < most:
                    raise error
                most = few  # which are small enough
            finally:
                self._put_back()
        return self.run(choose, most)

    def _compare_with_plain(self) -> None:
        """Compare the loss of a few rows with that of the user's own module and criterion.

        Raises:
            DiffersFromPlain: by more than rounding, and each gives the same again.
        """
        request, last = self._request, self._request.rows - 1
        steps = max(1, min(last, max(2, self._micro) - 1, _FEW - 1))
        rows = sorted({k * last // steps for k in range(steps + 1)})

        def loss(on_replica: bool) -> float:
            self._put_back()
            if on_replica:
                output, criterion = self._output(rows), self._task.criterion
            else:
                args, kwargs = as_call(self._bring(request.inputs, rows))
                output, criterion = self._model(*args, **kwargs), request.criterion
            value = loss_of(output, self._bring(request.targets, rows), criterion)
            dtypes.add(value.dtype)
            return float(value.detach())

        def differ(one: float, other: float) -> bool:
            scale = max(abs(one), abs(other), _SMALLEST_LOSS)
            return abs(one - other) > scale * max(_TOLERANCES.get(d, 1.0) for d in dtypes)

        dtypes = {torch.get_autocast_dtype(kind) for kind in autocast_types()}
        try:
            found, expected = loss(True), loss(False)
            if differ(found, expected) and not (
                differ(loss(True), found) or differ(loss(False), expected)
            ):
                raise DiffersFromPlain(expected, found)
        except (DiffersFromPlain, ReadsOld):
            raise
        except Exception:  # the user's code, of rows that it never met
            return
        finally:
            self._put_back()

    def _confirmed(self, choices: Sequence[Parts]) -> Finding:
        """What is off is off for both choices; what is right, or cannot be told, is for one."""
        off, doubt = None, Unsure("there are no rows")
        for parts in choices:
            try:
                found = self._found(parts)
            except Unsure as error:
                if error.lasting:
                    raise
                doubt = error
                continue
            if not found.off:
                if off:
                    raise Unsure("other rows say something else")
                return found
            off = off or found
        if off is None:
            raise doubt
        return off

    def _found(self, parts: Parts) -> Finding:
        try:
            found = self._by_outputs(parts)
        except Exception as error:  # they do not tell, or the user's code asks for more
            if isinstance(error, Unsure) or is_out_of_memory(error):
                raise
            if sum(map(torch.numel, self._module.parameters())) > _CHEAP:
                _require_at_most(max(3, self._micro), parts)  # each takes a whole backward pass
            return self._by_parameters(parts)
        if found.off:
            # What a module merely passes on, such as a mask beside the logits, has a gradient that
            # no parameter ever gets. They overrule where they could have seen the difference.
            with contextlib.suppress(Exception):
                its = self._by_parameters(parts)
                if not its.off and its.tolerance < found.off / 4:
                    return its
        return found

    def _by_outputs(self, parts: Parts) -> Finding:
        """Outputs once, without a graph, and the criterion's gradients by these."""
        if self._task.criterion is None:
            raise TypeError("the module computes the loss")
        rows, few = [*chain(*parts)], parts[-1]
        part = self._output(few)  # with a graph: which outputs have one
        self._put_back()
        each = sum(t.numel() for t in nested.tensors(part)) // len(few)
        if len(rows) * each > _CHEAP:
            _require_at_most(min(max(3, self._micro // 3), _MOST // each), parts)
        with torch.no_grad():
            whole = self._output(rows)
        self._put_back()
        outputs = _Outputs(whole, part, rows, len(few), self._request.dim)
        del whole, part
        own = [t for one in self._task.replicas[1:] for t in one.tensors if t.requires_grad]
        leaves = [*outputs.leaves, *_small(own)]

        def loss(some: Sequence[int], *, wide: bool = False) -> Tensor:
            targets = self._bring(self._request.targets, some)
            targets = nested.map_tensors(_wider, targets) if wide else targets
            return loss_of(outputs.of(some, wide), targets, self._task.criterion)

        compared = partial(self._compared, leaves=leaves, parts=parts, halved=outputs.halved)
        found = None
        if outputs.halved and self._request.count is None:  # which rounds, too
            try:
                found = compared(partial(loss, wide=True))
            except Unsure:
                raise
            except Exception:  # a criterion that is in half precision
                found = None
        found = found or compared(loss)
        if not found.off and outputs.are_tied:
            raise ValueError("outputs without rows may be losses of their own")
        return found

    def _by_parameters(self, parts: Parts) -> Finding:
        normed = [layer for layer in self._module.modules() if has_statistics(layer)]
        if any(layer.running_mean is None for layer in normed):
            raise Unsure("batch normalisation ties rows to each other", lasting=True)
        leaves = _small(p for p in self._module.parameters() if p.requires_grad)

        def loss(rows: Sequence[int]) -> Tensor:
            for layer in normed:
                layer.training = False
            output = self._output(rows)
            return loss_of(output, self._bring(self._request.targets, rows), self._task.criterion)

        found = self._compared(loss, leaves, parts, by_module=True)
        return replace(found, certain=found.certain and not normed)

    def _compared(
        self,
        loss: Loss,
        leaves: Sequence[Tensor],
        parts: Parts,
        *,
        by_module: bool = False,
        halved: bool = False,
    ) -> Finding:
        """Compare gradients of all rows with those of the parts, times their factors.

        ``halved``: what the leaves hold was rounded to half precision before.
        """
        factors, rows = self._factors(parts), [*chain(*parts)]
        counted = [part for part, factor in zip(parts, factors, strict=True) if factor]
        used, few = [factor for factor in factors if factor], min(counted, key=len)
        evaluate = _Evaluation(loss, leaves, self._put_back)
        differ = partial(relative_difference, least=1e-2 if by_module else 1e-6)
        self._user.drawn = False
        first = evaluate(few)
        if self._user.drawn:
            evaluate.mode, evaluate.calls = evaluate.numbers, set()
            first = evaluate(few)
        total, joined = evaluate(rows)
        values, apart = zip(*(first if p is few else evaluate(p) for p in counted), strict=True)
        if len(evaluate.calls) > 1:
            raise Unsure("what is drawn depends on the rows", lasting=True)
        if not all(each.isfinite().all() for each in joined):
            raise Unsure("a gradient is NaN or infinite")
        if not any(each.any() for own in (joined, *apart) for each in own):
            raise Unsure("all gradients are zero")
        tolerance = max(_TOLERANCES.get(dtype, 1.0) for dtype in evaluate.dtypes)
        off, _ = differ(_combined(used, apart), joined)
        if off > tolerance and all(each.isfinite().all() for own in apart for each in own):
            again, _ = differ(evaluate(rows)[1], joined)
            if again > tolerance:
                raise Unsure("it gives another result each time", lasting=True)
            evaluate.nudge(halved)
            noise, _ = differ(evaluate(rows)[1], joined)
            if off <= 4 * noise:  # as where a student begins as its teacher
                raise Unsure("its gradient is nothing but rounding")
            if by_module and off < 1:
                # A mean of rows twice is what it is of them once, a sum is twice that: what differs
                # is how kernels round that go by the number of rows.
                _, twice = evaluate([*few, *few])
                noise = min(differ(twice, _combined([n], [first[1]]))[0] for n in (1, 2))
                tolerance = max(tolerance, 8 * noise if noise < _ROUNDING else 0.0)
        found = Finding(off, parts, factors, certain=not self._user.drawn, tolerance=tolerance)
        if off > tolerance:
            weights = None
            if math.isfinite(off) and len(counted) == len(parts):
                weights = _weights(joined, apart, 10 * tolerance)
            return replace(found, weights=weights)
        if self._request.is_mean:
            return replace(found, off=0.0)
        if not all(any(each.any() for each in own) for own in apart):
            raise Unsure("a mean of one thing alone is its sum")
        off = abs(total - sum(values)) / max(map(abs, (total, *values, 1e-300)))
        return replace(found, off=off if off > tolerance else 0.0, of_losses=True)

    def _factors(self, parts: Parts) -> list[float]:
        """What the engine would multiply the losses of the parts with."""
        request = self._request
        if not request.is_mean:
            return [1.0] * len(parts)
        whole = request.inputs, request.targets
        each = [unwrap_markers(select_rows(whole, rows, request.dim), copy=True) for rows in parts]
        targets = select_rows(request.targets, [*chain(*parts)], request.dim)
        spans = [*pairwise([0, *accumulate(map(len, parts))])]
        counts = term_counts(replace(request, targets=targets, batches=()), spans, each)
        self._put_back()
        if not sum(counts):
            raise Unsure("none of the rows adds anything")
        return [count / sum(counts) for count in counts]

    def _output(self, rows: Sequence[int]) -> Any:
        output = self._task.output_of(self._bring(self._request.inputs, rows))
        name = set_by_forward(self._request.criterion, self._model, self._module)
        if name is not None:
            raise ReadsOld(name, lasting=True)
        return output

    def _bring(self, value: Any, rows: Sequence[int]) -> Any:
        """These rows of the caller's batch on the replica's device; nobody else has them."""
        bring = partial(LeafMover(Transfers()).move, self._task.share.device)  # which nobody counts
        few = nested.map_leaves(bring, select_rows(value, rows, self._request.dim))
        return unwrap_markers(few, copy=True)

    def _put_back(self) -> None:
        """Make everything what it was."""
        with torch.no_grad():
            for replica in self._task.replicas:
                replica.refresh()
        torch.clear_autocast_cache()  # which may have met parameters without a graph
        self._user.put_back()


def _require_at_most(rows: int, parts: Parts) -> None:
    if sum(map(len, parts)) > max(2, rows):
        raise Unsure("rows are large", lasting=True, rows=max(2, rows))


class _Outputs:
    """A module's outputs for all ``rows``, to be cut.

    ``whole`` has no graph. ``part``, of the last ``few`` rows, has one: that tells what trains, and
    where rows are. What trains are the ``leaves``, in single precision where outputs are in half.
    """

    def __init__(self, whole: Any, part: Any, rows: Sequence[int], few: int, dim: int) -> None:
        self._rows, self._few, self._dim = rows, few, dim
        self.leaves: list[Tensor] = []
        self.halved = self.are_tied = False  # whether some are; whether some without rows train
        self._cuts = nested.merge(self._cut, [whole, part])

    def of(self, rows: Sequence[int], wide: bool) -> Any:
        """Those of some rows; ``wide`` in the leaves' precision."""
        return nested.map_leaves(lambda cut: cut(rows, wide) if callable(cut) else cut, self._cuts)

    def _cut(self, pair: list[Any]) -> Any:
        whole, part = pair
        if not isinstance(whole, Tensor):
            if type(whole) is not type(part) or hasattr(whole, "__dict__") or callable(whole):
                raise TypeError("outputs of the user's own class")  # which may hold anything
            return whole
        order, n, dim = self._rows, len(self._rows), self._dim
        size, its = (t.size(dim) if t.ndim > dim else 0 for t in (whole, part))
        block = 0 if size == its else size // n
        if block * n != size * bool(block) or (size != its and block * self._few != its):
            raise ValueError("outputs without rows")
        leaf, dtype = _wider(whole.detach()), whole.dtype
        if part.requires_grad:
            self.leaves.append(leaf.requires_grad_())
            self.halved = self.halved or dtype in _HALF
            self.are_tied = self.are_tied or not block

        def cut(rows: Sequence[int], wide: bool) -> Tensor:
            each = leaf.split(block, dim) if block else ()
            own = [each[order.index(row)] for row in rows] if block else []  # no cycle with self
            given = torch.cat(own, dim) if block else leaf.clone()  # which may be written
            return given if wide else given.to(dtype)  # ``whole`` is let go

        return cut


class _Evaluation:
    """The loss of some rows, and its gradients by ``leaves``; the dtypes that these go through."""

    def __init__(self, loss: Loss, leaves: Sequence[Tensor], put_back: Callable[[], None]) -> None:
        self._loss, self._leaves, self._put_back = loss, leaves, put_back
        self.numbers = SameNumbers()
        self.mode: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        self.calls: set[int] = set()  # how many operators drew, each time
        self.dtypes: set[torch.dtype] = set()

    def __call__(self, rows: Sequence[int]) -> tuple[float, Gradients]:
        self.numbers.calls = 0
        with self.mode:
            value = self._loss(rows)
            found = _gradients(value, self._leaves, self.dtypes)
        self.calls.add(self.numbers.calls)
        self._put_back()
        return float(value.detach()), found

    def nudge(self, halved: bool) -> None:
        """Move the leaves, which are this replica's alone until all is put back, by rounding."""
        went_through = self.dtypes | ({torch.bfloat16} if halved else set())
        for leaf in self._leaves:
            leaf.data = _nudged(leaf.data, max(torch.finfo(d).eps for d in went_through) / 2)


class SameNumbers(TorchDispatchMode):
    """Random numbers that do not depend on the rows: each operator draws one for all places.

    Dropout keeps everything: one number for all would keep all or nothing.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0  # how many operators drew

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
            raise Unsure("what is drawn depends on the rows", lasting=True)
        k = sizes[0] if sizes else 0
        size = own[k] if sizes else own[k].shape
        own[k] = [1] * len(size) if sizes else own[k].new_empty([1] * len(size))
        number = call(*own).expand(size)
        return args[0].copy_(number) if name[-1] == "_" else number.contiguous()


def _gradients(loss: Tensor, leaves: Sequence[Tensor], dtypes: set[torch.dtype]) -> Gradients:
    """Those of ``leaves``; the dtypes that they go through on their way are added to ``dtypes``."""
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
    found = [factors[0] * gradient for gradient in apart[0]]
    for factor, own in zip(factors[1:], apart[1:], strict=True):
        torch._foreach_add_(found, own, alpha=factor)
    return found


def _weights(joined: Gradients, apart: Sequence[Gradients], tolerance: float) -> list[float] | None:
    """The numbers that the parts are multiplied with to give all, where there are such."""

    def dot(one: Gradients, other: Gradients) -> float:
        pairs = zip(one, other, strict=True)
        return sum(float((a.conj() * b).real.sum(dtype=torch.float64)) for a, b in pairs)

    gram = torch.tensor([[dot(a, b) for b in apart] for a in apart], dtype=torch.float64)
    right = torch.tensor([dot(a, joined) for a in apart], dtype=torch.float64)
    found: list[float] = (torch.linalg.pinv(gram, rtol=1e-9, hermitian=True) @ right).tolist()
    off = min(abs(sum(found) - 1), max(abs(weight - 1) for weight in found))
    if max(off, relative_difference(_combined(found, apart), joined, 1e-2)[0]) > tolerance:
        return None  # it is neither a mean of something nor a sum
    return found


def _wider(tensor: Tensor) -> Tensor:
    """In single precision, where it is half: what wrong weights do is not lost in rounding."""
    return tensor.float() if tensor.dtype in _HALF else tensor


def _nudged(tensor: Tensor, by: float) -> Tensor:
    """Every number moved by a rounding error, each by another one."""
    errors = torch.arange(tensor.numel(), device=tensor.device).cos().view(tensor.shape)
    return tensor * (1 + by * errors.to(tensor.dtype))


def _small(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The smallest of them, and one at least: every layer has some."""
    ordered = sorted(tensors, key=Tensor.numel)
    sizes = accumulate(map(Tensor.numel, ordered))
    few = [t for t, n in zip(ordered, sizes, strict=True) if n <= _MOST_PARAMETERS]
    return few or ordered[:1]
