"""Divide the rows of a call, and join them again, in autograd's graph.

::

    x ---- SplitRows ----+---- rows 0:3 on cuda:0          the two are each other's
                         +---- rows 3:5 on cuda:1          backward pass
    y <--- JoinRows -----+---- output of rows 0:3
                         +---- output of rows 3:5
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.batch.batch import Batch, batch_of
from scatterpar.calls.copies_in_graph import AutogradTransfers
from scatterpar.calls.gradients import CallGradients
from scatterpar.devices.copies import to_device, write
from scatterpar.devices.streams import current_streams, has_streams, use_device
from scatterpar.devices.virtual_devices import physical
from scatterpar.plan import Plan
from scatterpar.step.scatter import Values, rows_on_device
from scatterpar.torch_private.autograd import saved_tensors_hooks
from scatterpar.torch_private.compiler import never_compiled
from scatterpar.torch_private.thread_modes import is_batched_backward


class Division:
    """How the rows of one call are divided.

    Attributes:
        plan: the rows of each replica, in one micro-batch.
        dim: the dimension of the rows.
        transfers: counts what is copied.
        master: the device of the whole.
        devices: that of each share.
        rows: the number of rows of each share.
        gradients: those of the replicas, which are told of backward passes.
    """

    def __init__(
        self,
        plan: Plan,
        dim: int,
        transfers: AutogradTransfers,
        gradients: CallGradients,
    ) -> None:
        self.plan = plan
        self.dim = dim
        self.transfers = transfers
        self.master = plan.shares[0].device
        self.devices = [share.device for share in plan.shares]
        self.rows = [share.rows for share in plan.shares]
        self.gradients = gradients
        # A backward pass may run in a thread of autograd's, on other streams.
        self._streams = current_streams()

    def on_streams(self) -> Any:
        """In the body, the master and the streams of the call are current."""
        return use_device(self.master, self._streams)

    def split_call(self, arguments: Any) -> list[Any]:
        """Split the arguments of a call into those of each share, which share no memory
        with ``arguments``.
        """
        batch = batch_of(arguments, None, self.plan.rows, self.dim)
        # Only a tensor that is on a share's device may be passed on as it is.
        sources = batch.devices()
        is_marked = bool(batch.markers)
        values = Values(self.transfers)
        connected = self._connected(batch)
        if connected:
            others = [p for p in batch.structure.rows if p not in connected]
            batch.structure = replace(batch.structure, rows=tuple(others))
        shares: list[Any] = []
        for number, share in enumerate(self.plan.shares):
            device = share.device
            rows = values.on(device, batch).select(range(share.start, share.stop))
            arrived = rows.map_rows(partial(rows_on_device, self.transfers, device))
            for position, parts in connected.items():
                arrived.atoms[position] = parts[number]
            is_copied = is_marked or device in sources
            inputs, _ = arrived.unwrapped(copy=is_copied)
            shares.append(inputs)
        return shares

    def _connected(self, batch: Batch) -> dict[int, tuple[Tensor, ...]]:
        """The parts of the tensors with rows that need a gradient, by position."""
        parts: dict[int, tuple[Tensor, ...]] = {}
        if not torch.is_grad_enabled():
            return parts
        for position in batch.structure.rows:
            atom = batch.atoms[position]
            if type(atom) is Tensor and atom.requires_grad:
                if atom.device != physical(self.master):
                    atom = self.transfers.copy(atom, self.master, "scatter")
                parts[position] = SplitRows.apply(self, atom)  # type: ignore[no-untyped-call]
        return parts

    def split(self, whole: Tensor) -> tuple[Tensor, ...]:
        """Split rows into those of each share, on its device."""
        parts: list[Tensor] = []
        for share, device in zip(self.plan.shares, self.devices, strict=True):
            part = whole.narrow(self.dim, share.start, share.rows)
            if device == self.master:
                # No view: a node's output may be written in place.
                parts.append(part.clone())
            else:
                part = part.detach()
                parts.append(self.transfers.copy(part, device, "compute"))
        return tuple(parts)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """All rows, on the master; each is written once."""
        first = parts[0]
        sizes = list(first.shape)
        sizes[self.dim] = self.plan.rows
        whole = torch.empty(
            sizes,
            dtype=first.dtype,
            device=physical(self.master),
            memory_format=_memory_format_of(first),
        )
        for share, part in zip(self.plan.shares, parts, strict=True):
            target = whole.narrow(self.dim, share.start, share.rows)
            if share.device == self.master:
                write(target, part)
            else:
                self.transfers.count(part, "compute")
                write(target, part, non_blocking=has_streams(self.master))
        return whole

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Join all rows, on the master, with a graph if a part has one."""
        if torch.is_grad_enabled() and any(part.requires_grad for part in parts):
            whole: Tensor = JoinRows.apply(self, self.gradients.backward_probe, *parts)  # type: ignore[no-untyped-call]
            return whole
        with torch.no_grad():
            return self.joined(parts)

    def on_master(self, number: int, tensor: Tensor) -> Tensor:
        """Copy a tensor of a share to the master, with its graph."""
        device = self.devices[number]
        if device != self.master:
            tensor = self.transfers.copy(tensor, self.master, "compute", device)
        return self._outgoing([tensor])[0]

    def left_in_place(self, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Outputs of the pair, where they are, as nodes of the call."""
        if saved_tensors_hooks() is not None:
            return self._outgoing(outputs)
        return [self._outgoing([output])[0] for output in outputs]

    def _outgoing(self, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """These outputs, which one node of the graph has as its own."""
        if not torch.is_grad_enabled():
            return outputs
        result = list(outputs)
        trained = [n for n, output in enumerate(outputs) if output.requires_grad]
        if trained:
            others = [outputs[number] for number in trained]
            left = Outgoing.apply(self, self.gradients.backward_probe, *others)  # type: ignore[no-untyped-call]
            for number, output in zip(trained, left, strict=True):
                result[number] = output
        return result


class JoinRows(torch.autograd.Function):
    """Join rows on the master."""

    @staticmethod
    def forward(ctx: Any, division: Division, _: Tensor, *parts: Tensor) -> Tensor:
        """The joined rows."""
        ctx.division = division
        _save_for_checkpoint(ctx, division)
        return division.joined(parts)

    @staticmethod
    @never_compiled  # a compiled function may call ``backward()``
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the parts."""
        (gradient,) = gradients
        division: Division = ctx.division
        _begin_pass(ctx)
        with division.on_streams():
            # In a graph of its own, for a second derivative.
            parts = SplitRows.apply(division, gradient)  # type: ignore[no-untyped-call]
        return None, None, *parts


class SplitRows(torch.autograd.Function):
    """Divide rows of the master."""

    @staticmethod
    def forward(ctx: Any, division: Division, whole: Tensor) -> tuple[Tensor, ...]:
        """The rows of each share."""
        ctx.division = division
        ctx.device = whole.device
        return division.split(whole)

    @staticmethod
    @never_compiled
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor]:
        """The gradient of the whole."""
        _refuse_batched()
        division: Division = ctx.division
        with division.on_streams():
            # The caller's tensor may be on the host.
            return None, to_device(division.join(gradients), ctx.device)


class Outgoing(torch.autograd.Function):
    """Outputs that leave replicas. Their backward pass is one of the call."""

    @staticmethod
    def forward(
        ctx: Any, division: Division, backward_probe: Tensor, *outputs: Tensor
    ) -> tuple[Tensor, ...]:
        """The outputs, as other tensors."""
        ctx.division = division
        ctx.set_materialize_grads(False)
        _save_for_checkpoint(ctx, division)
        # No views: the user may write them in place.
        return tuple(output.detach() for output in outputs)

    @staticmethod
    @never_compiled
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of the outputs."""
        _begin_pass(ctx)
        return None, None, *gradients


def _save_for_checkpoint(ctx: Any, division: Division) -> None:
    """Let a checkpoint around the call compute again when it reaches this node.

    Else the first tensors that replicas have saved would ask it to, from the threads
    of several devices at once.
    """
    if saved_tensors_hooks() is not None:
        ctx.save_for_backward(division.gradients.backward_probe)


def _begin_pass(ctx: Any) -> None:
    """Tell the gradients that a backward pass has reached an output of a call."""
    _ = ctx.saved_tensors
    division: Division = ctx.division
    if len(division.devices) > 1:
        _refuse_batched()
    division.gradients.begin_pass()


def _refuse_batched() -> None:
    if is_batched_backward():
        raise RuntimeError(
            "torch.autograd.grad(…, is_grads_batched=True) through a call of the "
            "engine: such gradients can be neither divided nor joined; call "
            "torch.autograd.grad once per entry of grad_outputs. Or, if "
            "torch.autograd.functional makes this call, pass vectorize=False to it. Or "
            "call the module itself in the engine's place"
        )


def are_divided_alike(tensors: Sequence[Tensor], rows: Sequence[int], dim: int) -> bool:
    """Whether dense tensors have one entry per row, and are alike in all else."""
    first = tensors[0]
    if not -first.ndim <= dim < first.ndim:
        return False
    kinds: set[Any] = set()
    for tensor, num_rows in zip(tensors, rows, strict=True):
        if tensor.ndim != first.ndim or tensor.size(dim) != num_rows:
            return False
        if tensor.layout is not torch.strided or tensor.is_nested:
            return False
        sizes = list(tensor.shape)
        del sizes[dim]
        kinds.add((tuple(sizes), tensor.dtype, type(tensor)))
    # Joined rows of a subclass would lose what the subclass adds.
    return len(kinds) == 1 and type(first) in (Tensor, nn.Parameter)


def _memory_format_of(tensor: Tensor) -> torch.memory_format:
    is_image = tensor.ndim == 4 and not tensor.is_contiguous()
    if is_image and tensor.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    return torch.contiguous_format
