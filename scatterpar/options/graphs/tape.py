"""The operators of a sub-step, written down as they are dispatched.

::

    operator             arguments                            result
    aten.t               memory 140…, shape (3, 8)            1
    aten.addmm           memory 141…, shape (3,); row 0,      2
                         shape (4, 8); 1, shape (8, 3)
    aten._log_softmax    2, shape (4, 3); 1; False            3
    …                    and those of the backward pass

Two runs with equal tapes launch the same kernels with the same arguments on the same
memory, whatever Python has read. So a captured sub-step is what Python would compute
now if the tape of an eager run equals that of its capture. A tape needs to know nothing
of Python's objects.

Entries have operators, plain arguments, values that were read from tensors, and the
content of host tensors that a device gets as arguments. Any other tensor is known by
where it comes from: the operator that made it, its place among the rows, or its
address. Views may begin at one address, so each tensor is also known by its layout:
shape, strides, dtype, and whether it is a conjugate or negative view. A tape keeps
alive what it knows by its address, so that an equal address is the same memory.

Work that does not reach torch's dispatcher is on no tape.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import zip_longest
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.devices.copies import write
from scatterpar.devices.default_generators import default_of
from scatterpar.threads.generators import replica_generator
from scatterpar.torch_private.random_key import id_of_generator, random_key_as_outside
from scatterpar.torch_private.thread_modes import OperatorMode, below_autocast

# Launches nothing. Autograd detaches what it saves, and new tensors if somebody else
# refers to them, which depends on when another thread has let go of them.
_DETACH: Any = torch.ops.aten.detach.default
_LIFT: Any = torch.ops.aten.lift_fresh.default  # of what ``torch.tensor`` has made
_INDEX: Any = torch.ops.aten.index.Tensor
_MASKS = (torch.bool, torch.uint8)
_READS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# Types of arguments that are compared otherwise than by ``==``.
_NOT_PLAIN = ("Tensor", "number", "float", "Generator")
_OpOverload = type(_LIFT)
_DISPATCH: Any = Tensor.__torch_dispatch__
# Packages of which no line is a reason to read values; threads begin in the last.
_LAYERS_BELOW = ("torch", "scatterpar", "threading")
# What helps against the reads of a module.
_REMEDIES_OF_READS = {
    "transformers.masking_utils": (
        "; what helps: an attention_mask of four dimensions, which is used as it is; "
        'attn_implementation="eager" for decoders; no attention_mask if no row is '
        "padded"
    ),
}
_REPLICAS = "the replica's generator"
_END = "the end"


class _Operator(NamedTuple):
    """An operator as the tape compares it.

    Attributes:
        function: the operator, which is kept alive, as long as its ``id`` is known.
        kinds: of its positional arguments, up to the last that is not plain: ``None``
            for a plain one, which is compared as it is.
        number_of_kinds: their number.
        draws: whether it draws random numbers.
        reads_values: whether its result, or the size of it, depends on values.
        is_profiled_block: whether it begins or ends a block of a profiler.
    """

    function: Any
    kinds: tuple[type | None, ...]
    number_of_kinds: int
    draws: bool
    reads_values: bool
    is_profiled_block: bool


_OPERATORS: dict[int, _Operator] = {}


class Tape(OperatorMode):
    """A dispatch mode that writes operators down; it may be entered several times.

    Operators in autograd's threads are on it, too: torch carries modes there.

    Attributes:
        entries: the operators, each with its arguments and values that it returned.
        obstacle: why a graph cannot repeat the operators; empty if nothing is known.
    """

    def __init__(
        self,
        device: torch.device,
        places: Iterable[Tensor] = (),
        *,
        is_captured: bool = False,
    ) -> None:
        """``places``: tensors of which each run has others, such as rows.

        ``device`` is the device that computes. ``is_captured``: it only captures, so
        that generators have no state.
        """
        super().__init__()
        self.entries: list[Any] = []
        self._append = self.entries.append
        self.obstacle = ""
        self._device = device
        # Whether tensors of the host are something else than the device's.
        self._has_host = device.type != "cpu"
        # By address: the number of the result there, or of the place, below zero.
        self._origins: dict[int, int] = {}
        self._num_results = 0
        self._places = 0
        # Addresses on the host of what operators of the device have left there, such as
        # the seed of an attention's dropout: in a capture it is on the device.
        self._of_device: set[int] = set()
        # What is known by its address.
        self._memory: dict[int, Tensor] = {}
        # Results on the host, until the end. Otherwise NumPy could make an array at the
        # address of a result that was freed.
        self._host_results: list[Tensor] = []
        self._is_captured = is_captured
        # Of the generator that draws, after its last draw.
        self._state = None if is_captured else self._state_of_generator()
        for tensor in places:
            self.add_place(tensor)

    def addresses(self) -> Set[int]:
        """Those of all tensors that are known by their address; 0, which all empty
        tensors have, is none.
        """
        return self._memory.keys() - {0}

    def add_place(self, tensor: Tensor) -> None:
        """Know this tensor by its place, from here on."""
        self._places += 1
        self._origins[tensor.data_ptr()] = -self._places

    def add_returned(self, output: Any) -> None:
        """Write down what a call returns beside tensors: a replay returns it again."""
        for value in nested.atoms(output):
            if type(value) in nested.PLAIN:
                self._add_values((value,))
            elif not isinstance(value, Tensor):
                self.obstacle = (
                    f"returns a {type(value).__name__}, which a replay would return "
                    "again"
                )

    def end(self) -> None:
        """See whether the run, which has ended, has set a generator."""
        self._watch_generator()
        self._state = None
        self._host_results.clear()

    def __torch_dispatch__(
        self,
        function: Any,
        types: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator, and write it down.

        Few calls and attributes of its own, because each operator runs it.
        """
        if types and not all(map(_is_plain, types)):
            return NotImplemented  # a subclass first takes itself apart
        if function is _DETACH:
            return function(*args)
        # By ``id``: the hash of an operator is a call of Python.
        operator = _OPERATORS.get(id(function))
        if operator is None:
            operator = _OPERATORS[id(function)] = _described(function)
        # It launches nothing, and its name may have the number of the sub-step.
        if operator.is_profiled_block:
            return function(*args, **(kwargs or {}))
        append = self._append
        append(function)
        has_host = self._has_host
        origins = self._origins
        memory = self._memory
        if function is _LIFT:
            self._add_constant(args[0])
        else:
            for kind, value in zip(operator.kinds, args, strict=False):
                class_of_value = type(value)
                if class_of_value is Tensor or class_of_value is nn.Parameter:
                    try:
                        address = value.data_ptr()
                    except RuntimeError:  # sparse
                        append(value.layout)
                        continue
                    if has_host and value.is_cpu:
                        self._add_tensor(value)
                        continue
                    if address in origins:
                        append(origins[address])
                    else:
                        if address not in memory:
                            memory[address] = value.detach()
                        append(address)
                    # As ``_view_key``, without a call.
                    append(
                        (
                            value.shape,
                            value.stride(),
                            value.dtype,
                            value.is_conj(),
                            value.is_neg(),
                        )
                    )
                elif kind is None or value is None:
                    append(value)
                elif class_of_value is float:
                    # Not the number: 0.0 equals -0.0, and NaN does not equal NaN.
                    append(value.hex())
                else:
                    self._add_values((value,))
            self.entries += args[operator.number_of_kinds :]
            if kwargs:
                self.entries += kwargs
                self._add_values(kwargs.values())
        if operator.draws:
            result = self._draw(function, args, kwargs)
        else:
            if operator.reads_values and not self.obstacle:
                self._refuse_value(function, args)
            result = function(*args, **kwargs) if kwargs else function(*args)
        if type(result) is Tensor:
            self._num_results = number = self._num_results + 1
            try:
                address = result.data_ptr()
            except RuntimeError:  # sparse
                return result
            origins[address] = number
            if has_host and result.is_cpu:
                self._host_results.append(result)
            if self._of_device:
                self._of_device.discard(address)
        elif result is not None:
            self._add_results(result)
        return result

    def _draw(
        self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> Any:
        """Run an operator that draws random numbers."""
        self._watch_generator()
        with random_key_as_outside():
            result = function(*args, **(kwargs or {}))
        if not self._is_captured:
            self._state = self._state_of_generator()
        return result

    def _add_values(self, values: Iterable[Any]) -> None:
        """Append what is compared of arguments of any kind."""
        append = self.entries.append
        for value in values:
            kind = type(value)
            if isinstance(value, Tensor):
                self._add_tensor(value)
            elif kind is float:
                append(value.hex())
            elif kind is list or kind is tuple:
                append(len(value))
                self._add_values(value)
            elif kind is torch.Generator:
                append(self._name_of(value))
            else:
                append(kind)  # 1 equals True
                append(value)

    def _add_constant(self, tensor: Tensor) -> None:
        """Append what Python has made a tensor of; each call has new memory for it."""
        if tensor.is_cpu:
            self.entries.append(_content(tensor))
            return
        self.entries.append(_view_key(tensor))
        if tensor.numel():  # transformers' caches begin as torch.tensor([])
            self._refuse_constant("torch.tensor(…)")

    def _add_tensor(self, tensor: Tensor) -> None:
        """Append where a tensor comes from, and its layout."""
        append = self.entries.append
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # sparse
            append(tensor.layout)
            return
        is_elsewhere = self._has_host and tensor.is_cpu
        # A kernel gets the value of a 0-dim tensor, whoever has computed it.
        if is_elsewhere and not tensor.dim() and address not in self._of_device:
            append(_content(tensor))
            return
        origin = self._origins.get(address)
        if origin is None:
            origin = address
            if address not in self._memory:
                self._memory[address] = tensor.detach()
            # A graph reads pinned memory again, and no other memory of the host.
            if is_elsewhere and not tensor.is_pinned():
                append(_content(tensor))
                return
        append(origin)
        append(_view_key(tensor))

    def _add_results(self, result: Any) -> None:
        """Number the tensors of a result; append other values."""
        is_on_host = False
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor):
                self._num_results = number = self._num_results + 1
                try:
                    self._origins[value.data_ptr()] = number
                except RuntimeError:  # sparse
                    continue
                if value.is_cpu:
                    is_on_host = True
            elif isinstance(value, (tuple, list)):
                self._add_results(value)
            elif value is not None:
                self._add_values((value,))
        if is_on_host and self._has_host:
            self._host_results += _tensors_of_operator([result])
            self._note_device_results(result)

    # --- what a graph cannot repeat ---

    def _note_device_results(self, result: Any) -> None:
        """Note tensors on the host, unless all results are there: the device has
        computed them.
        """
        tensors = _tensors_of_operator([result])
        on_host = {tensor.data_ptr() for tensor in tensors if tensor.is_cpu}
        if len(on_host) < len(tensors):
            self._of_device |= on_host
        else:
            self._of_device -= on_host

    def _refuse_constant(self, what: str) -> None:
        """Note that an operator gets numbers of the host."""
        if not self.obstacle:
            self.obstacle = (
                f"cannot be captured: it copies numbers of the host to the device, in "
                f"{what}{_place_of_caller()}; make them once, as a buffer, or use "
                "torch.full and slices"
            )

    def _refuse_value(self, function: Any, args: Sequence[Any]) -> None:
        """See whether an operator waits for values of the device."""
        is_of_device = not self._has_host or any(
            not tensor.is_cpu for tensor in _tensors_of_operator(args)
        )
        indices = (
            [] if function is not _INDEX else [i for i in args[1] if i is not None]
        )
        if is_of_device and self._has_host and any(i.is_cpu for i in indices):
            self._refuse_constant("an index of numbers")
            return
        has_mask = function is not _INDEX or any(i.dtype in _MASKS for i in indices)
        if is_of_device and has_mask:
            self.obstacle = (
                f"cannot be captured: it waits for the device, in {function}"
                f"{_place_of_caller()}"
            )

    def _state_of_generator(self) -> Tensor:
        if self._has_host:
            generator = default_of(self._device)
        else:
            generator = replica_generator()
        state: Tensor = generator.get_state()
        return state

    def _watch_generator(self) -> None:
        """See whether anything but a draw has set the generator: graphs only draw."""
        state = self._state
        if state is not None and not torch.equal(state, self._state_of_generator()):
            self.obstacle = (
                "sets the state of a random generator, as activation checkpoints do"
            )

    def _name_of(self, generator: torch.Generator) -> Any:
        """The name of a generator among the arguments of an operator."""
        # That of a replica is another object in each step.
        if _is_of_replica(generator):
            return _REPLICAS
        self.obstacle = (
            "draws from a torch.Generator of its own, which a replay neither seeds nor "
            "restores"
        )
        return None


class RepeatableTape(Tape):
    """A tape whose operators can run again, in host memory: the CPU's graph.

    It keeps all tensors alive. A replay writes each result where the first run has put
    it.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._calls: list[_RecordedCall] = []

    def __torch_dispatch__(
        self,
        function: Any,
        types: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator, write it down, and keep the call."""
        result = super().__torch_dispatch__(function, types, args, kwargs)
        if result is not NotImplemented and function is not _DETACH:
            self._calls.append(_RecordedCall(function, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        """Run all operators again, on the same memory."""
        with torch.no_grad(), below_autocast():
            for call in self._calls:
                call.run()


class _RecordedCall:
    """A call of an operator, which can run again."""

    def __init__(
        self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        self._function = function
        self._args = [_named_if_generator(value) for value in args]
        self._kwargs = {name: _named_if_generator(kwargs[name]) for name in kwargs}
        sources = set(map(_storage, _tensors_of_operator([*args, *kwargs.values()])))
        # ``None`` for a tensor that shares memory with an argument.
        self._targets: list[Tensor | None] = []
        for tensor in _tensors_of_operator([result]):
            self._targets.append(None if _storage(tensor) in sources else tensor)
        # A view stays a view.
        is_view = all(target is None for target in self._targets)
        self._is_idle = is_view and not function._schema.is_mutable

    def run(self) -> None:
        """Run the operator; its results are written to those of the first run."""
        if self._is_idle:
            return
        args = map(_present, self._args)
        kwargs = {name: _present(self._kwargs[name]) for name in self._kwargs}
        result = self._function(*args, **kwargs)
        for target, tensor in zip(
            self._targets, _tensors_of_operator([result]), strict=True
        ):
            if target is not None:
                write(target, tensor)


def _named_if_generator(value: Any) -> Any:
    """An argument to be kept: the replica has another generator in each step."""
    return _REPLICAS if isinstance(value, torch.Generator) else value


def _present(value: Any) -> Any:
    return replica_generator() if value is _REPLICAS else value


def _is_of_replica(generator: torch.Generator) -> bool:
    """Whether a replica draws from this generator if it passes none."""
    of_replica: list[torch.Generator] = [torch.default_generator, replica_generator()]
    if generator.device.type != "cpu":
        module = torch.get_device_module(generator.device)
        of_replica += getattr(module, "default_generators", ())
    return id_of_generator(generator) in map(id_of_generator, of_replica)


def _tensors_of_operator(values: Sequence[Any]) -> list[Tensor]:
    """The tensors among the arguments or results of an operator."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += _tensors_of_operator(value)
    return tensors


def _storage(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse
        return 0


def _place_of_caller() -> str:
    """The line that has called an operator, and what helps if it is a library's whose
    reads can be avoided; empty if there is none, as in autograd's threads.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.partition(".")[0] not in _LAYERS_BELOW:
            remedy = _REMEDIES_OF_READS.get(module, "")
            return f" (line {frame.f_lineno} of {module}){remedy}"
        frame = frame.f_back
    return ""


@functools.cache
def _is_plain(kind: type) -> bool:
    """Whether tensors of this class have no operators of their own."""
    dispatch: Any = kind
    return bool(dispatch.__torch_dispatch__ is _DISPATCH)


def _described(function: Any) -> _Operator:
    """Describe an operator for the tape, from its schema and its tags."""
    kinds: list[Any] = []
    for argument in function._schema.arguments:
        name = str(argument.type)
        is_plain = not any(word in name for word in _NOT_PLAIN)
        kinds.append(None if is_plain else object)
    while kinds and kinds[-1] is None:
        kinds.pop()
    tags = set(function.tags)
    return _Operator(
        function,
        tuple(kinds),
        len(kinds),
        draws=torch.Tag.nondeterministic_seeded in tags,
        reads_values=bool(_READS_VALUES & tags),
        is_profiled_block=function.namespace == "profiler",
    )


def _view_key(tensor: Tensor) -> tuple[Any, ...]:
    """How a tensor reads the memory at its address."""
    return (
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _content(tensor: Tensor) -> tuple[Any, ...]:
    """The content of a tensor in host memory."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    content = ctypes.string_at(dense.data_ptr(), dense.nbytes)
    return (*_view_key(tensor), content)


def difference(before: Tape, now: Tape) -> str:
    """Describe the first difference of two tapes; empty if they are equal.

    >>> device = torch.device("cpu")
    >>> tapes = Tape(device), Tape(device)
    >>> for tape, factor in zip(tapes, (2.0, 3.0)):
    ...     with tape:
    ...         _ = torch.ones(2).mul(factor)
    >>> difference(*tapes)
    'aten.mul.Tensor gets 3.0, and got 2.0'
    """
    if before.entries == now.entries:
        return ""
    pairs = zip_longest(before.entries, now.entries, fillvalue=_END)
    for place, (old, new) in enumerate(pairs):  # noqa: B007 - read below
        if old != new:
            break
    if new is _END:
        return f"{_operator_at(before, place)} does not run"
    operator = _operator_at(now, place)
    if old is _END or isinstance(old, _OpOverload) or new is operator:
        return f"{operator} runs now"
    return f"{operator} gets {_entry_in_words(new)}, and got {_entry_in_words(old)}"


def _operator_at(tape: Tape, place: int) -> Any:
    """The operator to which an entry belongs."""
    for entry in reversed(tape.entries[: place + 1]):
        if isinstance(entry, _OpOverload):
            return entry
    return "the first operator"


def _entry_in_words(value: Any) -> str:
    """An entry, in words."""
    if isinstance(value, str) and value.lstrip("-").startswith("0x"):
        return str(float.fromhex(value))
    if isinstance(value, tuple) and value:
        if isinstance(value[-1], bytes):
            return "another value"
        if type(value[0]) is torch.Size:
            return _view_in_words(*value)
    if isinstance(value, tuple) or type(value) is int:
        return "another tensor or number"
    return str(value)


def _view_in_words(
    shape: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    is_conj: bool,
    is_neg: bool,
) -> str:
    """A view, in words."""
    words = f"{dtype} of shape {tuple(shape)} and strides {strides}"
    if is_conj:
        words += ", conjugate"
    if is_neg:
        words += ", negative"
    return words
