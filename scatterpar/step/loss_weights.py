"""How the losses of micro-batches combine into the loss of the whole batch.

A mean over the batch is the mean of the micro-batches' means, weighted by the number of
terms that each averages over: rows, unless terms are ignored (``ignore_index``),
weighted, or padded.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scatterpar.devices.coalescing import to_host
from scatterpar.devices.copies import to_device, to_numbers
from scatterpar.devices.written_tensors import WrittenTensors
from scatterpar.objects.references import module_of
from scatterpar.plan import Plan
from scatterpar.step.request import CountFunction, Request, option_of
from scatterpar.torch_private.compiler import unwrapped

# Classes that ``terms_of_rows`` counts: targets are labels or class probabilities, and
# ``ignore_index``, ``weight`` and ``label_smoothing`` mean what they mean there. The
# check before a step trusts these counts: other labels are no reason for another check.
_CROSS_ENTROPIES: tuple[type[nn.Module], ...] = (nn.CrossEntropyLoss, nn.NLLLoss)
if hasattr(nn, "LinearCrossEntropyLoss"):  # from torch 2.13 on
    _CROSS_ENTROPIES += (nn.LinearCrossEntropyLoss,)


class LossWeights(NamedTuple):
    """How the losses of micro-batches combine into the loss of the whole batch.

    Attributes:
        by_share: the part of the terms that each micro-batch has: its weight in means;
            for a sum 1.
        terms: the number of terms that the batch's loss averages over; 1 for a sum.
        sums: whether criteria add their terms up (``as_sum``), because some cannot
            average over none. Of one rank, they may have no terms at all.
    """

    by_share: list[list[float]]
    terms: float
    sums: bool = False

    @property
    def of_losses(self) -> list[list[float]]:
        """The factor of each micro-batch's loss."""
        if not self.sums:
            return self.by_share
        return [[1.0 / self.divisor] * len(parts) for parts in self.by_share]

    @property
    def divisor(self) -> float:
        """The number that sums of terms are divided by."""
        return self.terms or 1.0


def compute_loss_weights(
    request: Request,
    plan: Plan,
    pieces: Iterable[tuple[Any, Any]] | None,
    *,
    is_of_rank: bool = False,
) -> LossWeights:
    """Compute the factors with which the losses of a plan's micro-batches combine.

    ``pieces`` are the micro-batches, in the plan's order. Without them micro-batches
    have no losses: the factors are numbers of rows, which weigh outputs. With
    ``is_of_rank`` other ranks have more rows of the batch.
    """
    spans = [span for share in plan.shares for span in share.micro_batches]
    total = 1.0
    sums = False
    if pieces is None:
        factors = [float(stop - start) for start, stop in spans]
    elif request.is_mean:
        counts = term_counts(request, spans, pieces)
        # Zero terms in all: the loss is 0, and a warning says that no label counts.
        total = sum(counts)  # if it is zero, all factors are zero
        # Only then can a micro-batch without terms have a loss.
        has_terms = total > 0 or is_of_rank
        sums = has_terms and 0.0 in counts and is_smoothed(request)
        factors = [count / total if count else 0.0 for count in counts]
    else:
        factors = [1.0] * len(spans)
    remaining = iter(factors)
    by_share = [
        list(islice(remaining, len(share.micro_batches))) for share in plan.shares
    ]
    return LossWeights(by_share, total, sums)


def is_smoothed(request: Request) -> bool:
    """Whether labels of classes without weight have a loss, by label smoothing.

    The mean over a micro-batch of such labels is no number. In that of a whole batch
    with other labels they count, by the other classes' weights.
    """
    criterion = request.criterion
    # With ``count=`` the user has said what counts.
    if request.count is not None or not is_cross_entropy(criterion):
        return False
    # Without class weights a smoothed label counts as any other: nothing is hidden.
    has_weight = option_of(criterion, "weight", None) is not None
    return has_weight and option_of(criterion, "label_smoothing", 0.0) > 0


def as_sum(criterion: Any) -> Any:
    """Torch's cross entropy ``criterion``, which adds its terms up."""
    if isinstance(criterion, partial):
        return partial(criterion, reduction="sum")
    # A compiled criterion keeps ``reduction`` in its code: the module that it wraps is
    # set.
    module, _ = unwrapped(module_of(criterion))
    # A shallow copy: class weights stay the replica's own tensors.
    summing = copy.copy(module)
    summing.reduction = "sum"
    return summing


def term_counts(
    request: Request,
    spans: Sequence[tuple[int, int]],
    pieces: Iterable[tuple[Any, Any]],
) -> list[float]:
    """The number of terms that the loss of each micro-batch averages over.

    ``spans`` are those of ``pieces`` in the rows of the batch. It is the number of rows
    unless ``count=`` or the criterion, from its targets, says otherwise.

    In a look the batches of ``request`` have no targets: whatever is counted must be
    countable in ``pieces`` alone.
    """
    criterion = request.criterion
    dim = request.dim
    if request.count is not None:
        return _numbers(_counts(request, pieces))
    rows_of_pieces = [float(stop - start) for start, stop in spans]
    if not is_cross_entropy(criterion):
        return rows_of_pieces
    # The labels of the whole batch, in few kernels, rather than of each micro-batch.
    labels = [batch.targets for batch in request.batches]
    if not all(isinstance(targets, Tensor) for targets in labels):
        # A marker's rows may have any number of labels: count in what the criterion is
        # given.
        terms = [terms_of_rows(criterion, targets, dim) for _, targets in pieces]
        return _numbers([of_piece.double().sum() for of_piece in to_host(terms)])
    terms = to_host([terms_of_rows(criterion, targets, dim) for targets in labels])
    # The usual case: numbers of rows need no sum.
    if all(_are_all_counted(of_batch) for of_batch in terms):
        return rows_of_pieces
    # In float64: sums of many class weights lose digits in float32.
    terms_by_row = torch.cat([of_batch.double() for of_batch in terms])
    return _sums_of_spans(terms_by_row, spans)


def _are_all_counted(terms: Tensor) -> bool:
    """Whether each row has one term."""
    return terms.dtype == torch.bool and bool(terms.all())


def _sums_of_spans(terms: Tensor, spans: Sequence[tuple[int, int]]) -> list[float]:
    """The sum of the terms in each span of rows."""
    # Not differences of a running sum: a micro-batch without terms must have zero, not
    # rounding.
    return [float(terms[start:stop].sum()) for start, stop in spans]


def _counts(request: Request, pieces: Iterable[tuple[Any, Any]]) -> list[Any]:
    """The results of ``count=`` for micro-batches.

    Raises ``RuntimeError`` if it writes into them: they are views of the caller's rows,
    and copies of all rows would take as long as a step.
    """
    assert request.count is not None
    watched = WrittenTensors(
        [tensor for batch in request.batches for tensor in batch.tensors()]
    )
    watched.begin(compares_bits=False)
    # All are called before any is read: a device counts while the host goes on.
    counts = [request.count(*piece) for piece in pieces]
    if watched.written().counted:
        raise RuntimeError(
            "count= wrote into the inputs or targets of the batch, whose earlier "
            "values are lost; compute the number from a copy, such as targets.clone()"
        )
    return counts


def _numbers(counts: Sequence[Any]) -> list[float]:
    """The results of ``count=`` as numbers, which the host reads together."""
    scalars = [count for count in counts if _is_scalar(count)]
    on_host = map(to_numbers, to_host(scalars))
    numbers: list[float] = []
    for count in counts:
        number = next(on_host) if _is_scalar(count) else count
        numbers.append(_number_of_terms(count, number))
    return numbers


def _is_scalar(count: Any) -> bool:
    return isinstance(count, Tensor) and not count.ndim


def _number_of_terms(count: Any, number: Any) -> float:
    """The ``number`` that a result of ``count=`` is, as a float."""
    try:
        # A tensor that was not read has rows.
        if isinstance(number, Tensor) or isinstance(count, (bool, str)):
            raise TypeError
        value = float(number)
    except (TypeError, ValueError):
        text = f"count must return a number or a 0-dim tensor, got {count!r}"
        raise TypeError(text) from None
    if not 0 <= value < math.inf:
        raise ValueError(
            f"count must return a finite number of at least 0, got {value!r}"
        )
    return value


def is_cross_entropy(criterion: Any) -> bool:
    """Whether a criterion is torch's cross entropy or negative log likelihood.

    That may be a module, a function or a partial.
    """
    function = criterion.func if isinstance(criterion, partial) else criterion
    loss, _ = unwrapped(module_of(function))
    of_torch = (F.cross_entropy, F.nll_loss)
    return isinstance(loss, _CROSS_ENTROPIES) or function in of_torch


def counts_as_torch(request: Request) -> bool:
    """Whether the criterion is torch's own cross entropy, whose terms ``term_counts``
    counts as torch does.
    """
    criterion = request.criterion
    if request.count is not None:
        return False
    module = module_of(criterion)
    if module is None:
        return is_cross_entropy(criterion)
    # A subclass may count otherwise.
    return type(module) in _CROSS_ENTROPIES


def terms_of_rows(criterion: Any, targets: Any, dim: int) -> Tensor:
    """The number of terms of torch's mean cross entropy in each entry along ``dim``.

    It is in float64 only if the class weights are, because some accelerators lack this
    dtype.
    """
    if targets is None:
        raise TypeError(
            "the criterion, a cross entropy, needs targets, and none were passed; call "
            "forward_backward(inputs, targets, criterion)"
        )
    if not isinstance(targets, Tensor):
        raise TypeError(
            f"the terms of a cross entropy are counted in a tensor of targets, got "
            f"{type(targets).__name__}; pass the tensor itself as targets, or, if the "
            "criterion picks its labels, how many they are: count=scatterpar."
            "count_labels(key=…), or a count= of your own"
        )
    if targets.is_floating_point():  # class probabilities: every position is a term
        rows = targets.size(dim)
        # Probabilities have the classes along dimension 1, or along their only one.
        classes = targets.size(min(1, targets.ndim - 1))
        terms_of_row = targets.numel() / max(1, rows * classes)
        return torch.full((rows,), terms_of_row, device="cpu")
    # Not bytes: compared with one, -100 would be 156, and an index of bytes is a mask.
    targets = targets.long()
    ignore_index = option_of(criterion, "ignore_index", None)
    terms: Tensor = targets != (-100 if ignore_index is None else ignore_index)
    class_weight = option_of(criterion, "weight", None)
    if class_weight is not None:
        dtype = torch.promote_types(class_weight.dtype, torch.float32)
        weight = to_device(class_weight.detach(), targets.device).to(dtype)
        # An ignored label may be no index: class 0 stands in for it, times zero.
        terms = weight[targets.masked_fill(~terms, 0)] * terms
    if terms.ndim == 1:
        return terms
    # Labels of pixels or tokens: all in a row count as terms of that row.
    return terms.movedim(dim, 0).flatten(1).sum(1)


def count_labels(
    ignore_index: int = -100, *, shifted: bool = False, key: str | int = "labels"
) -> CountFunction:
    """A ``count=`` for losses that average over labels that are not ``ignore_index``.

    Args:
        ignore_index: the value of labels that are ignored, such as padding.
        shifted: ignore the first position of each row, as causal language models do: no
            position predicts the first label.
        key: the key of the labels if the targets are no tensor, and no tuple that holds
            one tensor: ``targets[key]``, else ``inputs[key]``; in a tuple, their
            number, such as 1.

    Returns:
        ``count(inputs, targets)``, the number of labels as a 0-dim tensor. It can be
        pickled.

    The returned function raises ``TypeError`` if there are no labels, and
    ``ValueError`` if ``shifted`` labels have no dimension 1.

    Example:
        >>> import torch
        >>> labels = torch.tensor([[5, 6, 7], [5, -100, -100]])
        >>> count_labels()({}, labels)
        tensor(4)
        >>> count_labels(shifted=True)({"labels": labels}, None)
        tensor(2)
    """
    return partial(_count, ignore_index=ignore_index, shifted=shifted, key=key)


def _count(
    inputs: Any, targets: Any, *, ignore_index: int, shifted: bool, key: str | int
) -> Tensor:
    labels = _labels_in(inputs, targets, key)
    if labels is None:
        raise TypeError(
            f"count_labels found no labels: neither targets ({type(targets).__name__}) "
            f"nor inputs ({type(inputs).__name__}) has a tensor {key!r}; pass the key "
            "or index of the labels as key="
        )
    if shifted and labels.ndim < 2:
        raise ValueError(
            f"shifted=True needs labels of two or more dimensions, got shape "
            f"{tuple(labels.shape)}; pass labels with one entry per token, or leave "
            "shifted=True out"
        )
    if shifted:
        labels = labels[:, 1:]
    # A tensor, not a number: the host reads all counts of a step together.
    counted: Tensor = labels != ignore_index
    return counted.sum()


def _labels_in(inputs: Any, targets: Any, key: str | int) -> Tensor | None:
    """The targets if they are a tensor, or hold nothing but one; else targets or inputs
    at ``key``.
    """
    candidates = [targets]
    # fastai's targets are a tuple, usually with one entry.
    if isinstance(targets, (tuple, list)) and len(targets) == 1:
        candidates += targets
    for part in (targets, inputs):
        if isinstance(part, Mapping):
            candidates.append(part.get(key))
        elif isinstance(part, (tuple, list)) and isinstance(key, int):
            candidates += [part[key]] if -len(part) <= key < len(part) else []
    for candidate in candidates:
        if isinstance(candidate, Tensor):
            return candidate
    return None
