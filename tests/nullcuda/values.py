"""Numbers for the null CUDA: after a CUDA operator, its CPU twin fills in the values.

The CUDA kernel of torch runs first, with all that it allocates and launches; nothing
computes. Then the operator is called again on CPU tensors that lie in the very same
memory, and what it returns is written into what the first call returned. So branches on
values, gradients and losses are right, while the allocator, the streams and the
launches are torch's own. Each operator also tells the trace what it reads and writes.

Not covered: cuDNN and cuBLAS themselves (off, or computed by the CPU's), fused cells of
GRUs, sparse tensors, and kernels that other libraries launch.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from nullcuda import card

__all__ = ["failures", "install"]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Operators that move no values: views, allocations, questions.
_SHAPES = _words(
    """
    empty empty_strided as_strided view set_ resize_ _reshape_alias record_stream is_pinned
    _pin_memory pin_memory view_as_real view_as_complex unfold _local_scalar_dense is_set_to
    _resize_output_ _assert_async _copy_from lift lift_fresh alias detach _efficientzerotensor
    real imag resize_as_ squeeze unsqueeze transpose t permute expand select slice split
    view_copy set_data ones zeros _zerotensor _nested_tensor_from_mask empty_quantized
    _cudnn_init_dropout_state _scaled_dot_product_attention_math _fused_sdp_choice
    """
)
# Beginnings of the names of operators that are not covered.
_NOT_COVERED = _words(
    "_cudnn cudnn miopen _nested _sparse sparse _spd mkldnn quantize fake_quant"
)
# The size of their results depends on values: the CPU's twin says it first.
_SIZED_BY_VALUES = _words(
    """
    nonzero masked_select _unique2 unique_dim unique_consecutive unique_dim_consecutive
    _unique bincount equal is_nonzero repeat_interleave nonzero_static
    """
)

failures: dict[str, str] = {}  # operators without a twin that were called, and why
# by the stream that captures one
_graphs: dict[int, list[Callable[[int, int], None]]] = {}
_inside = threading.local()  # an operator that another one calls is part of it
_library = torch.library.Library("aten", "IMPL")


def _depthwise(
    rows: Tensor,
    weight: Tensor,
    kernel_size: Sequence[int],
    bias: Tensor | None,
    *strides: Sequence[int],
) -> Tensor:
    """``_conv_depthwise2d``: a convolution with a group for each channel."""
    return torch.conv2d(rows, weight, bias, *strides, rows.shape[1])


def _lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cell: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``_thnn_fused_lstm_cell``: hidden state, cell state, and the gates for backward."""
    total = input_gates + hidden_gates
    if input_bias is not None and hidden_bias is not None:
        total = total + input_bias + hidden_bias
    enter, keep, candidate, leave = total.chunk(4, 1)
    gates = enter.sigmoid(), keep.sigmoid(), candidate.tanh(), leave.sigmoid()
    enter, keep, candidate, leave = gates
    new_cell = keep * cell + enter * candidate
    return leave * new_cell.tanh(), new_cell, torch.cat(gates, 1)


def _lstm_cell_backward(
    of_hidden: Tensor | None,
    of_cell: Tensor | None,
    cell: Tensor,
    new_cell: Tensor,
    gates: Tensor,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``_thnn_fused_lstm_cell_backward_impl``: gradients of gates, cell state and bias."""
    enter, keep, candidate, leave = gates.chunk(4, 1)
    tanh = new_cell.tanh()
    through = torch.zeros_like(cell) if of_cell is None else of_cell
    of_leave = torch.zeros_like(cell)
    if of_hidden is not None:
        through = through + of_hidden * leave * (1 - tanh**2)
        of_leave = of_hidden * tanh
    of_gates = [
        through * candidate * enter * (1 - enter),
        through * cell * keep * (1 - keep),
        through * enter * (1 - candidate**2),
        of_leave * leave * (1 - leave),
    ]
    total = torch.cat(of_gates, 1)
    return total, through * keep, total.sum(0) if has_bias else None


# What the CPU computes in the place of an operator that it does not have.
_EQUIVALENTS: dict[str, Callable[..., Any]] = {
    "_conv_depthwise2d": _depthwise,
    "_thnn_fused_lstm_cell": _lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
}


def install() -> None:
    """Give every CUDA operator its twin."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, full_name = name.partition("::")
        base, _, overload = full_name.partition(".")
        if namespace != "aten" or base in _SHAPES or base.startswith(_NOT_COVERED):
            continue
        # ``copy_`` has one kernel for all devices.
        if not (has_kernel(name, "CUDA") or name == "aten::copy_"):
            continue
        on_cpu = torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CPU")
        if not on_cpu and full_name not in _EQUIVALENTS:
            continue
        packet = getattr(torch.ops.aten, base)
        overload = overload or "default"
        if overload in packet.overloads():
            twin = _Twin(getattr(packet, overload), base)
            options = {"with_keyset": True, "allow_override": True}
            _library.impl(full_name, twin, "CUDA", **options)
    torch.backends.cudnn.enabled = False
    _fused_attention(False)  # its kernels have no twins, and the plain operators have
    torch.cuda.CUDAGraph = _Graph


class _Graph(torch.cuda.CUDAGraph):
    """A graph that also replays what the CPU computes in the place of kernels."""

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        self._device = torch.cuda.current_device()
        self._stream = torch._C._cuda_getCurrentRawStream(self._device)
        super().capture_begin(*args, **kwargs)
        self._twins = _graphs[self._stream] = []

    def capture_end(self) -> None:
        _graphs.pop(self._stream, None)
        super().capture_end()

    def replay(self) -> None:
        state = torch.cuda.get_rng_state(self._device)[-16:].view(torch.int64).tolist()
        super().replay()
        for twin in self._twins:
            twin(*state)


def remove() -> None:
    """Take the twins away: nothing computes any more, nor costs the host time."""
    _library._destroy()
    card.runtime().null_moves(0)
    torch.cuda.CUDAGraph = _Graph.__base__
    torch.backends.cudnn.enabled = True
    _fused_attention(True)


def _fused_attention(on: bool) -> None:
    torch.backends.cuda.enable_flash_sdp(on)
    torch.backends.cuda.enable_mem_efficient_sdp(on)
    torch.backends.cuda.enable_cudnn_sdp(on)


class _Twin:
    """An operator on the null CUDA: torch's own kernel, then the values."""

    def __init__(self, operator: Any, base: str) -> None:
        self._operator = _EQUIVALENTS.get(base, operator)
        self._base = base
        self._kernel = torch.library.get_kernel(operator, "CUDA")
        self._schema = operator._schema
        self._name = str(operator).encode()
        arguments = self._schema.arguments
        self._tensors = [i for i, a in enumerate(arguments) if str(a.type) == "Tensor"]
        self._draws = (
            any(a.name == "generator" for a in arguments) or base == "native_dropout"
        )

    @property
    def __name__(self) -> str:
        return self._base

    def __call__(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        args = _with_tensors(args, self._tensors)
        device = _device_of(args, kwargs)
        if self._base in _SIZED_BY_VALUES and not self._schema.is_mutable:
            on_cpu = tree_map(_as_cpu, args)
            named = tree_map(_as_cpu, kwargs)
            values = self._operator(*on_cpu, **named)
            return tree_map(
                lambda x: x.to(device) if isinstance(x, Tensor) else x, values
            )
        if getattr(_inside, "one", False):
            return self._kernel.call_boxed(keys, *args, **kwargs)
        graph = None  # the twins of the graph that captures the stream
        if _graphs:
            graph = _graphs.get(torch._C._cuda_getCurrentRawStream(device.index))
        draws = self._draws and graph is None
        generator = _host_generator(device, args, kwargs) if draws else None
        _inside.one = True
        try:
            out = self._kernel.call_boxed(keys, *args, **kwargs)
            if graph is not None:
                graph.append(self._again(out, args, kwargs, len(graph)))
                return out
            # Copies between memories are in the trace: the runtime notes them itself.
            is_transfer = self._base == "copy_" and args[0].device != args[1].device
            if card.runtime().null_tracing() and not is_transfer:
                self._tell(self._ranges(args, kwargs, out))
            return self._with_values(out, args, kwargs, generator)
        finally:
            _inside.one = False

    def _with_values(
        self, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any], generator: Any
    ) -> Any:
        try:
            values = self._values(
                tree_map(_as_cpu, args), tree_map(_as_cpu, kwargs), generator
            )
            if self._schema.is_mutable:
                return out
            if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(out)):
                return values if self._schema.returns else out
            _fill(out, values)
        except Exception as error:
            failures.setdefault(str(self._operator), repr(error)[:200])
        return out

    def _values(self, on_cpu: Any, named: Any, generator: Any) -> Any:
        if generator is not None and self._base != "native_dropout":
            on_cpu = [None if isinstance(x, torch.Generator) else x for x in on_cpu]
            named = named | {"generator": generator}
        with torch.no_grad():
            if self._base == "native_dropout":
                return _dropout(generator, *on_cpu)
            return self._operator(*on_cpu, **named)

    def _again(
        self, out: Any, args: Any, kwargs: Any, number: int
    ) -> Callable[[int, int], None]:
        """What computes the values at every launch of the graph that is
        being captured.
        """
        on_cpu, named, target = (
            tree_map(_as_cpu, value) for value in (args, kwargs, out)
        )
        ranges = list(self._ranges(args, kwargs, out))

        def again(seed: int, offset: int) -> None:
            if card.runtime().null_tracing():
                self._tell(ranges)
            generator = _seeded(seed, offset, number) if self._draws else None
            values = self._values(on_cpu, named, generator)
            if not self._schema.is_mutable:
                _fill(target, values)

        return again

    def _ranges(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> Iterator[_Range]:
        """What this operator reads and writes."""
        arguments = {a.name: a.alias_info for a in self._schema.arguments}
        for name, value in (*zip(arguments, args, strict=False), *kwargs.items()):
            alias = arguments.get(name)
            yield from _ranges_of(value, bool(alias and alias.is_write))
        if not self._schema.is_mutable:
            yield from _ranges_of(out, True)

    def _tell(self, ranges: Iterable[_Range]) -> None:
        """Into the trace: bytes that are read or written, on the current stream."""
        for device, start, bytes, writes in ranges:
            stream = torch._C._cuda_getCurrentRawStream(device)
            card.runtime().null_access(
                self._name, device, stream, start, bytes, int(writes)
            )


# device, start, bytes, and whether they are written
_Range = tuple[int, int, int, bool]


def _ranges_of(value: Any, writes: bool) -> Iterator[_Range]:
    """The bytes of dense tensors on cards."""
    for leaf in tree_leaves(value):
        is_on_card = isinstance(leaf, Tensor) and leaf.device.type == "cuda"
        if is_on_card and leaf.layout == torch.strided and leaf.numel():
            last = 0  # element, counted from the first one
            for count, stride in zip(leaf.shape, leaf.stride(), strict=True):
                last += (count - 1) * stride
            size = (1 + last) * leaf.itemsize
            yield leaf.device.index, leaf.data_ptr(), size, writes


def _as_cpu(value: Any) -> Any:
    """A CPU tensor in the memory of one of a card; devices become the CPU."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if not isinstance(value, Tensor) or value.device.type != "cuda":
        return value
    if value.layout != torch.strided:
        raise NotImplementedError("sparse tensors have no values here")
    storage = value.untyped_storage()
    if not storage.nbytes():
        options = {"dtype": value.dtype, "device": "cpu"}
        return torch.empty_strided(value.shape, value.stride(), **options)
    address = storage.data_ptr() + card.runtime().null_shadow()
    memory = (ctypes.c_char * storage.nbytes()).from_address(address)
    bytes = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    empty = torch.empty(0, dtype=value.dtype, device="cpu")
    return empty.set_(bytes, value.storage_offset(), value.shape, value.stride())


def _fill(out: Any, values: Any) -> None:
    if isinstance(out, (tuple, list)):
        for output, value in zip(out, values, strict=True):
            _fill(output, value)
    # A normalisation in eval mode saves no statistics.
    elif isinstance(out, Tensor) and values.numel():
        if out.shape != values.shape:
            shapes = f"{tuple(out.shape)} and {tuple(values.shape)}"
            raise RuntimeError(f"the shapes are {shapes}")
        _as_cpu(out).copy_(values)


def _with_tensors(args: tuple[Any, ...], places: list[int]) -> tuple[Any, ...]:
    """The arguments with tensors in these places.

    The dispatcher passes Python numbers in the place of tensors with one element.
    """
    arguments = list(args)
    for place in places:
        if place < len(args) and isinstance(args[place], (int, float, complex)):
            number = args[place]
            like = next((a.dtype for a in args if isinstance(a, Tensor)), None)
            dtype = _dtype_of(number, like)
            arguments[place] = torch.tensor(number, dtype=dtype, device="cpu")
    return tuple(arguments)


def _dtype_of(number: complex, like: torch.dtype | None) -> torch.dtype | None:
    if like is None or isinstance(number, bool) or like == torch.bool:
        return None
    is_float_in_float = like.is_floating_point and isinstance(number, float)
    if isinstance(number, int) or like.is_complex or is_float_in_float:
        return like
    return None


def _device_of(args: Any, kwargs: Any) -> torch.device:
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor) and leaf.device.type == "cuda":
            return leaf.device
    return torch.device("cuda", torch.cuda.current_device())


def _host_generator(
    device: torch.device, args: Any, kwargs: dict[str, Any]
) -> torch.Generator:
    """Numbers that depend on the seed and the offset of the card's generator alone."""
    generator = torch.cuda.default_generators[device.index]
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, torch.Generator):
            generator = argument
    seed, offset = generator.get_state()[-16:].view(torch.int64).tolist()
    return _seeded(seed, offset)


def _seeded(seed: int, offset: int, number: int = 0) -> torch.Generator:
    # Any numbers will do that keep seeds, offsets and operators of a graph apart.
    mixed = seed * 1_000_003 + offset * 7_919 + number * 104_729 + 17
    return torch.Generator().manual_seed(mixed & 0x7FFF_FFFF_FFFF_FFFF)


def _dropout(
    generator: torch.Generator, x: Tensor, p: float, train: bool | None
) -> tuple[Tensor, Tensor]:
    """``native_dropout`` takes no generator, so its mask is drawn here."""
    if train is False or p == 0:
        return x, torch.ones_like(x, dtype=torch.bool)
    mask = torch.rand(x.shape, generator=generator) >= p
    output = x * mask / (1 - p) if p < 1 else torch.zeros_like(x)
    return output, mask
