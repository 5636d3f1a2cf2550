"""Find the tensors of a batch that may hold labels, masks, lengths or weights, and
their ranges.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from scatterpar.batch.batch import Batch
from scatterpar.batch.markers import Marker
from scatterpar.causes.counts import sizes_of_entries
from scatterpar.devices.coalescing import to_host
from scatterpar.objects.references import module_of
from scatterpar.step.loss_weights import is_cross_entropy
from scatterpar.step.request import Request

_LARGEST = 2**22  # tensors of more elements are not searched
_MAX_ENTRIES = 128  # of ``Rows``, because each is a call of Python in each step
# Labels above this are token ids, of which only the power of two counts.
_EXACT_UPTO = 1000
_ABOVE_ALL_LABELS = 1100  # frexp's exponents, from -1073 on, then lie above 0


def may_be_labels(tensor: Tensor) -> bool:
    """Whether the tensor may hold labels."""
    return not (
        tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool
    )


def informative_tensors(
    request: Request, most_entries: int | None = None
) -> list[Tensor]:
    """Tensors that may hold labels, masks, lengths or weights of each row.

    Rows are in dimension 0. Of ``Rows``: the number of elements in each row, or in
    ``most_entries`` of them. Without targets also floating-point inputs of at most two
    dimensions.
    """
    batch = request.batches[0]
    # Targets first: they are labels more often than inputs.
    tensors = list(_informative(batch.without_inputs(), most_entries))
    has_targets = bool(tensors)
    for tensor in _informative(batch.without_targets(), most_entries):
        is_data = tensor.is_floating_point() and has_targets
        # Pixels and features are data: they have more dimensions than a mask.
        dimensions = sum(size > 1 for size in tensor.shape[1:])
        if not is_data and dimensions <= (2 if may_be_labels(tensor) else 1):
            tensors.append(tensor)
    return sorted(tensors, key=may_be_labels, reverse=True)


def _informative(batch: Batch, most_entries: int | None) -> Iterator[Tensor]:
    for atom in batch.atoms:
        if isinstance(atom, Marker) and atom.num_rows is not None:
            # Rows from all over.
            every = 1 if most_entries is None else -(-atom.num_rows // most_entries)
            yield sizes_of_entries(atom, every)
            continue
        is_plain = type(atom) in (Tensor, Parameter) and atom.layout == torch.strided
        if not is_plain or atom.is_complex():
            continue
        if atom.ndim and 0 < atom.numel() <= _LARGEST:
            dense = _with_all_operators(atom.detach())
            yield dense.movedim(batch.structure.dim, 0)


def _with_all_operators(tensor: Tensor) -> Tensor:
    """The tensor in a dtype that has a minimum, and an order.

    Unsigned integers of more than one byte have neither, nor has float8, nor have
    quantised dtypes.
    """
    if tensor.is_quantized:
        return tensor.dequantize()
    dtype = tensor.dtype
    if dtype in (torch.uint16, torch.uint32, torch.uint64):
        return tensor.long()
    if dtype.is_floating_point and dtype.itemsize == 1:
        return tensor.float()
    return tensor


def ranges_of_step(request: Request) -> Sequence[Tensor]:
    """The ranges that say whether a look is due; each step reads them."""
    if counts_as_torch(request):
        return ()
    return ranges_of(informative_tensors(request, _MAX_ENTRIES))


def counts_as_torch(request: Request) -> bool:
    """Whether the criterion is torch's own cross entropy.

    Its labels do not matter, since the engine counts as it does.
    """
    criterion = request.criterion
    if request.count is not None:
        return False
    module = module_of(criterion)
    if module is None:
        return is_cross_entropy(criterion)
    # A subclass may count otherwise.
    return type(module) in (nn.CrossEntropyLoss, nn.NLLLoss)


def ranges_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """How far the numbers of each tensor go, on its device: three 0-dim tensors per
    tensor.

    The negative of the lowest number, the highest, and for labels whether rows begin or
    end with two equal values (padding).
    """
    ranges: list[Tensor] = []
    for tensor in tensors:
        low, high = tensor.aminmax()
        # On the same device, because all ranges are read in one copy.
        padding = torch.zeros((), device=tensor.device)
        if may_be_labels(tensor) and tensor.ndim == 2 and tensor.size(1) > 1:
            at_start = (tensor[:, 0] == tensor[:, 1]).any()
            at_end = (tensor[:, -2] == tensor[:, -1]).any()
            padding = at_start + 2 * at_end
        # With a sign, which not all dtypes have; of one dtype, to be read in one copy.
        ranges += [-low.float(), high.float(), padding.float()]
    return ranges


def read_ranges(ranges: Sequence[Tensor]) -> list[float]:
    """``ranges_of`` tensors as numbers: a tensor is beyond a range if any number is
    larger.

    Large numbers, and all that are not integers, count by their sign and power of two.
    """
    return [_roughly(float(tensor)) for tensor in to_host(ranges)]


def _roughly(value: float) -> float:
    # As the largest number it is new once, and not in each step.
    if math.isnan(value):
        return math.inf
    if not math.isfinite(value):
        return value
    if value % 1 == 0 and abs(value) <= _EXACT_UPTO:
        return value
    _, exponent = math.frexp(value)
    return math.copysign(exponent + _ABOVE_ALL_LABELS, value)
