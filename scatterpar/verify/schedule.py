"""When to look: in steps 1, 2, 4, 8, … of a kind of criterion and batch, and if it
changes.

A kind is looked at, too, if labels leave the range that was seen (labels on an
accelerator: in the step after), if switches of the model, numbers of the criterion or
words in the batch are new, and after a refusal until a look agrees.

Every step pays for this decision, so it reads little: of what a criterion refers to,
the 64 nearest values, and of longer containers none.
"""

from __future__ import annotations

import enum
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from scatterpar.batch.markers import Marker
from scatterpar.causes.counts import sizes_of_entries
from scatterpar.devices.coalescing import to_host
from scatterpar.devices.copies import to_numbers
from scatterpar.devices.streams import is_async
from scatterpar.look_steps import is_look_step
from scatterpar.numerics.comparison import Inconclusive
from scatterpar.objects.reach import distinguishing_values
from scatterpar.objects.references import read_attribute
from scatterpar.step.loss_weights import counts_as_torch
from scatterpar.step.request import LossCandidate, Request
from scatterpar.step.turns import Scope

_LARGEST = 2**22  # tensors of more elements are not searched
_MAX_ENTRIES_OF_ROWS = 128  # of ``Rows``, because each is a call of Python in each step
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
    dim = batch.structure.dim
    targets = batch.without_inputs().atoms
    tensors = list(_informative(targets, dim, most_entries))
    has_targets = bool(tensors)
    for tensor in _informative(batch.without_targets().atoms, dim, most_entries):
        is_data = tensor.is_floating_point() and has_targets
        if not is_data and _is_as_small_as_a_mask(tensor):
            tensors.append(tensor)
    return sorted(tensors, key=may_be_labels, reverse=True)


def _is_as_small_as_a_mask(tensor: Tensor) -> bool:
    # Pixels and features are data: they have more dimensions.
    dimensions = sum(size > 1 for size in tensor.shape[1:])
    return dimensions <= (2 if may_be_labels(tensor) else 1)


def _informative(
    atoms: Iterable[Any], dim: int, most_entries: int | None
) -> Iterator[Tensor]:
    for atom in atoms:
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
            yield dense.movedim(dim, 0) if dim else dense


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
    if counts_as_torch(request):  # whatever the labels are
        return ()
    return ranges_of(informative_tensors(request, _MAX_ENTRIES_OF_ROWS))


def ranges_of_integers(atoms: Iterable[Any], dim: int) -> Sequence[Tensor]:
    """The ranges of a call whose arguments have these ``atoms``.

    As ``ranges_of_step``, if no floating-point tensor tells rows apart. Without a
    request, because each call reads them.
    """
    tensors = _informative(atoms, dim, _MAX_ENTRIES_OF_ROWS)
    return ranges_of(
        tensor
        for tensor in tensors
        if not tensor.is_floating_point() and _is_as_small_as_a_mask(tensor)
    )


def ranges_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """How far the numbers of each tensor go: a tensor of numbers on its device.

    The lowest number, the highest, and for labels with two dimensions whether rows
    begin, and whether they end, with two equal values (padding).
    """
    ranges: list[Tensor] = []
    for tensor in tensors:
        numbers = [*tensor.aminmax()]
        if may_be_labels(tensor) and tensor.ndim == 2:
            # A single column has no neighbour, and no two equal values.
            numbers.append((tensor[:, :1] == tensor[:, 1:2]).any())
            numbers.append((tensor[:, -1:] == tensor[:, -2:-1]).any())
        ranges.append(torch.stack(numbers))
    return ranges


def read_ranges(ranges: Sequence[Tensor]) -> list[float]:
    """``ranges_of`` tensors as numbers: a tensor is beyond a range if any number is
    larger. So the lowest numbers have the other sign.

    Large numbers, and all that are not integers, count by their sign and power of two.
    """
    numbers: list[float] = []
    for of_tensor in to_host(ranges):
        low, *others = map(float, to_numbers(of_tensor))
        numbers += map(_roughly, (-low, *others))
    return numbers


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


_MAX_ATOMS = 32  # of a batch
_LOOKS_BECAUSE_OF_NEWS = 8  # then they are rare: one in a hundred steps
_STEPS_PER_LOOK = 100


class Stage(enum.Enum):
    """The state of the looks at one kind of step.

    ::

        ASKED      a look refuses            REFUSED
        REFUSED    a look agrees             ASKED
        either     a look waited for ever    GIVEN_UP
    """

    ASKED = "asked in steps 1, 2, 4, 8, …"
    REFUSED = "asked in each step"
    GIVEN_UP = "asked no more"


@dataclass
class Kind:
    """The looks at one kind of criterion and batch.

    Attributes:
        steps: the number of steps so far.
        looks: the number of looks, without those at a refused step.
        num_inconclusive: the number of inconclusive looks in a row.
        ranges: those of labels, masks, lengths that looks have seen.
        ranges_of_step: those of the last step, on its devices.
        details: hashes of the switches, numbers and words that were seen.
        scope: the part of a sub-step that one replica at a time runs.
        stage: what the looks have said so far.
        not_refuted: the words of a call's candidates that looks leave, the best first.
        has_no_rule: looks have refused all candidates for a number without a gradient,
            and none has agreed since.
        has_assumed: a step has taken one of several candidates that differ in it.
        sizes_without_rows: those of outputs that have no rows; a step whose
            micro-batches have as many rows would join such an output.
    """

    steps: int = 0
    looks: int = 0
    num_inconclusive: int = 0
    ranges: list[float] = field(default_factory=list)
    ranges_of_step: Sequence[Tensor] = ()
    details: set[Hashable] = field(default_factory=set)
    scope: Scope = Scope.NOTHING
    stage: Stage = Stage.ASKED
    not_refuted: Sequence[str] = ()
    has_no_rule: bool = False
    has_assumed: bool = False
    sizes_without_rows: set[int] = field(default_factory=set)

    def remaining(self, candidates: Sequence[LossCandidate]) -> Sequence[LossCandidate]:
        """Those of a call's candidates that looks leave; the first one is assumed."""
        # A call makes new ones, with the same words.
        by_words = {candidate.words: candidate for candidate in candidates}
        known = [by_words[words] for words in self.not_refuted if words in by_words]
        return known or candidates  # none is known before the first look

    def count_step(self, ranges: Sequence[Tensor], details: Hashable) -> bool:
        """Count a step with these ranges and details. Returns whether a look is due."""
        self.steps += 1
        # Asked in every step, because the next one reads the ranges of an accelerator.
        has_news = self._remember_ranges(ranges) or details not in self.details
        self.details.add(details)
        if self.stage is Stage.GIVEN_UP:
            return False
        if self.stage is Stage.REFUSED:
            return True
        # An inconclusive look has seen no range, and a counter is new in each step.
        # Without a limit every later step would be looked at, at three times its cost
        # (a ResNet-50 in bfloat16 on a GPU).
        most = _LOOKS_BECAUSE_OF_NEWS + self.steps // _STEPS_PER_LOOK
        is_due = has_news and self.looks < most
        return is_due or is_look_step(self.steps)

    def may_join(self, rows_of_substeps: int | None) -> bool:
        """Whether a step with micro-batches of so many rows would join an output that
        has none.
        """
        is_asked = self.stage is not Stage.GIVEN_UP
        return is_asked and rows_of_substeps in self.sizes_without_rows

    def _remember_ranges(self, ranges: Sequence[Tensor]) -> bool:
        """Remember the ranges of a step.

        Returns whether labels leave the range that looks have seen.
        """
        if not ranges:  # as for torch's own cross entropy
            return False
        before = self.ranges_of_step
        self.ranges_of_step = ranges
        if any(is_async(tensor.device) for tensor in ranges):  # the host does not wait
            ranges = before
        pairs = zip(read_ranges(ranges), self.ranges, strict=False)
        return any(number > seen for number, seen in pairs)

    def note_inconclusive(self, reason: Inconclusive) -> bool:
        """Note an inconclusive look. Returns whether it is time to warn of it."""
        self.num_inconclusive += 1
        if reason.is_final:
            self.stage = Stage.GIVEN_UP
        return reason.is_final or self.num_inconclusive >= reason.patience

    def note_agreement(self) -> None:
        """Note that a look at the last step has not refused."""
        self.stage = Stage.ASKED
        self.has_no_rule = False
        self.num_inconclusive = 0
        numbers = read_ranges(self.ranges_of_step)
        # Of all looks together: batches of labels differ at random.
        widest = [max(pair) for pair in zip(self.ranges, numbers, strict=False)]
        self.ranges = widest or numbers


class Kinds:
    """The looks at all kinds of criteria and batches of one engine."""

    def __init__(self) -> None:
        # It does not grow with steps: kinds have no sizes and no numbers in them.
        self._kinds: defaultdict[Hashable, Kind] = defaultdict(Kind)

    def kind_of(
        self,
        request: Request,
        is_divided: bool,
        flags: Hashable,
        selection: Hashable = None,
    ) -> tuple[Kind, Hashable]:
        """The kind of a request, and its details, each of which may be new.

        ``flags`` are the switches of the model. Requests with another ``selection`` are
        of another kind.
        """
        names, numbers = names_and_numbers((request.criterion, request.count))
        kinds_of_atoms, words = kinds_and_words(request.batches[0].atoms)
        options = is_divided, request.whole_batch, request.reduction
        key = options, names, kinds_of_atoms, selection
        details = flags, numbers, words
        # Hashes, because the code objects in them would keep functions alive.
        return self._kinds[hash(key)], hash(details)


def kinds_and_words(
    atoms: Sequence[Any],
) -> tuple[tuple[object, ...], tuple[Hashable, ...]]:
    """The kinds of a batch's first atoms, and the words among these."""
    kinds: list[object] = []
    words: list[Hashable] = []
    for atom in atoms[:_MAX_ATOMS]:
        is_tensor = isinstance(atom, Tensor)
        kinds.append(_part_of_key(atom) if is_tensor else type(atom))
        # A word may select another loss, as a switch of the model may.
        if isinstance(atom, (bool, str)):
            words.append(atom)
    return tuple(kinds), tuple(words)


def names_and_numbers(functions: Sequence[Any]) -> tuple[frozenset[Hashable], str]:
    """The names of the values that functions refer to, and the numbers among these."""
    names: set[Hashable] = set()
    numbers: list[int | float] = []
    for value in distinguishing_values(functions):
        if type(value) in (int, float):
            numbers.append(value)
        is_word = value is None or isinstance(value, (bool, str))
        names.add(value if is_word else _part_of_key(value))
    return frozenset(names), str(numbers)


def _part_of_key(value: Any) -> Hashable:
    """The part of a kind's key for one value: a function's code, a number's type.

    It has no addresses, because a lambda is a new object in each call.
    """
    if isinstance(value, Tensor):
        return value.dtype, value.ndim
    code = read_attribute(value, "__code__")
    return type(value).__qualname__ if code is None else code
