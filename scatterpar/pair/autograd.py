"""Copies that autograd records: of parameters, rows and losses.

A backward pass copies gradients back: to the master's parameters, and to the caller's
inputs that require grad. ``gather`` uses ``to_device``, which autograd records as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.batch.markers import (
    all_tensors,
    has_markers,
    select_rows,
    unwrap_markers,
)
from scatterpar.devices.device_ids import physical
from scatterpar.devices.streams import current_streams, use_device
from scatterpar.devices.transfers import Transfers, write
from scatterpar.plan import Plan
from scatterpar.replicas.broadcast import Broadcast, version
from scatterpar.replicas.buffers import BufferValue, values_after
from scatterpar.replicas.checks import check_placement
from scatterpar.replicas.module_copy import ModuleContents, ModuleCopy
from scatterpar.replicas.parameter_guard import ParameterGuard
from scatterpar.step.reduce import sum_in_order
from scatterpar.step.scatter import LeafMover, move_rows
from scatterpar.torch_private import is_compiled_module


class PassingReplica(ModuleCopy):
    """A copy of a module for one forward pass, which stays alive in the graph of its
    outputs.
    """

    def __init__(
        self, module_contents: ModuleContents, copies: Sequence[Tensor]
    ) -> None:
        super().__init__(module_contents, copies)
        self._versions = {id(copy): version(copy) for copy in copies}

    def changed_buffers(self) -> Iterator[BufferValue]:
        """The buffers that a forward pass may have changed: places in the module, and
        values.

        The other buffers are not written, because a graph of the user may still need
        their values.
        """
        copy_of, modules = self.copy_of, list(self._found.modules.values())
        for m, name, value in values_after(
            modules, list(map(copy_of, modules)), copy_of
        ):
            module = modules[m]
            is_same = value is not None and self._versions.get(id(value)) == version(
                value
            )
            # Batch normalisation in training writes its statistics without counting
            # versions.
            if (
                module.training
                or not is_same
                or value is not copy_of(module._buffers[name])
            ):
                yield module._buffers, name, value


def replicate(
    module: nn.Module, device_ids: Sequence[torch.device], checked_modes: set[Hashable]
) -> tuple[list[PassingReplica], contextlib.AbstractContextManager[None]]:
    """Copies of ``module`` whose parameters are differentiable copies of the module's
    parameters.

    As ``torch.nn.parallel.replicate``, but the replicas of any one device share its
    parameters. A backward pass adds gradients on the master. Returns the replicas, and
    a context manager that refuses writes to parameters; in ``checked_modes`` it
    compares versions and storages only.
    """
    check_placement(module, device_ids)
    module_contents = ModuleContents((module,), physical(device_ids[0]))
    originals = list(module_contents.tensors.values())
    with torch.inference_mode(False), torch.no_grad():
        # The first replica shares the version counters of the user's parameters, so
        # that torch detects an optimizer step before the backward pass. The others have
        # their own counters, because one of them may exchange its storage.
        broadcast = Broadcast(module_contents, device_ids)
        broadcast.update(Transfers(), broadcast.compare())
        copies: list[list[Tensor]] = []
        for device in device_ids:
            storages = broadcast.storages(device)
            copies.append([t.data if copies else t.detach() for t in storages])
            for storage, source in zip(storages, broadcast.at(device), strict=True):
                if storage is not source:
                    write(storage.data, source)  # ``.data``: its own version counter
    for i, original in enumerate(originals):
        if original.requires_grad:
            at = [copy[i] for copy in copies]
            attached = _ConnectCopies.apply(device_ids, original, *at)  # type: ignore[no-untyped-call]
            for copy, tensor in zip(copies, attached, strict=True):
                vars(tensor)["__deepcopy__"] = partial(_leaf_like, original, copy[i])
                copy[i] = tensor
        kind = type(original)
        if issubclass(kind, nn.Parameter) and kind is not nn.Parameter:
            for copy in copies:
                # its own layout, such as ``__slots__``
                with contextlib.suppress(TypeError):
                    copy[i].__class__ = kind

    guard = ParameterGuard(broadcast, zip(device_ids, copies, strict=True))
    guard.checked_modes = checked_modes
    read_only = guard.read_only(
        tuple(part.training for part in module_contents.modules.values())
    )
    return [PassingReplica(module_contents, copy) for copy in copies], read_only


def scatter_owned(
    batch: Any, plan: Plan, dim: int, transfers: AutogradTransfers
) -> list[Any]:
    """The shares of the batch; their tensors share memory neither with it nor with each
    other.
    """
    sources = {tensor.device for tensor in all_tensors(batch)}
    is_marked, mover, shares = has_markers(batch), LeafMover(transfers), []
    for share in plan.shares:
        rows = nested.map_leaves(partial(mover.move_rowless, share.device), batch)
        move = partial(move_rows, transfers, share.device)
        rows = select_rows(rows, range(share.start, share.stop), dim, move)
        shares.append(unwrap_markers(rows, copy=is_marked or share.device in sources))
    return shares


def require_eager(module: Any) -> None:
    """Refuse compiled modules: the pair copies a module in every call; copies run
    uncompiled.
    """
    for name, child in module.named_modules() if isinstance(module, nn.Module) else ():
        if is_compiled_module(child) or child._compiled_call_impl is not None:
            which = f"the child {name!r}" if name else "the module"
            raise TypeError(
                f"{which} was compiled, and the pair runs its copies as they are "
                "written; pass the "
                "original (._orig_mod), or train with ScatterOnceParallel, which "
                "compiles replicas"
            )


def combine(losses: Sequence[Tensor], weights: Sequence[float], plan: Plan) -> Tensor:
    """The weighted sum of the shares' losses, on the master. Weight zero ignores even
    NaN.
    """
    master, terms = plan.shares[0].device, []
    for loss, weight, share in zip(losses, weights, plan.shares, strict=True):
        if weight:
            origin = (
                share.device if loss.device == physical(share.device) else loss.device
            )
            if origin != master:
                loss = _CopyInGraph.apply(loss, origin, master, Transfers().copy)  # type: ignore[no-untyped-call]
            terms.append(weight * loss)
    if not terms:
        zero = torch.zeros_like(losses[0], device=physical(master))
        return zero.requires_grad_(torch.is_grad_enabled())
    return torch.stack(terms).sum()


class AutogradTransfers(Transfers):
    """Transfers that autograd records, so that gradients are copied back
    to the source.
    """

    def copy(self, tensor: Tensor, device: torch.device, phase: str) -> Tensor:
        """A copy of ``tensor`` on ``device``, in autograd's graph if ``tensor``
        requires grad.
        """
        if not tensor.requires_grad:
            return super().copy(tensor, device, phase)
        copied: Tensor = _CopyInGraph.apply(tensor, tensor.device, device, super().copy)  # type: ignore[no-untyped-call]
        return copied


class _ConnectCopies(torch.autograd.Function):
    """Connect the replicas' copies to the master's tensor; backward adds their
    gradients.

    There is one node per tensor: a backward pass that uses none of a tensor's copies
    must not reach its node, or its hooks would run without a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, device_ids: Sequence[torch.device], _: Tensor, *copies: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.device_ids = device_ids
        ctx.streams = current_streams()
        ctx.set_materialize_grads(False)
        # An alias per replica, so that each has a separate gradient. It is not a view,
        # because a forward pass may exchange its storage (``set_``,
        # ``flatten_parameters``).
        return tuple(copy.detach() for copy in copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        by_replica = [
            {} if gradient is None else {0: gradient} for gradient in gradients
        ]
        with use_device(ctx.device_ids[0], ctx.streams):
            total = sum_in_order(
                by_replica, ctx.device_ids, Transfers(), in_place=False
            )
        return (None, total.get(0), *(None for _ in gradients))


class _CopyInGraph(torch.autograd.Function):
    """A copy from one memory to another. The backward pass copies the gradient back."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        origin: torch.device,
        device: torch.device,
        copy: Callable[..., Tensor],
    ) -> Tensor:
        # The origin is passed, because the virtual devices are one device of torch's.
        ctx.route_back = device, origin, Transfers().copy
        ctx.streams = current_streams()
        return copy(tensor, device, "compute")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with use_device(ctx.route_back[0], ctx.streams):
            copied = _CopyInGraph.apply(gradients[0], *ctx.route_back)  # type: ignore[no-untyped-call]
        return copied, None, None, None


def _leaf_like(original: Tensor, value: Tensor, _: Any) -> Tensor:
    """``__deepcopy__`` for a copy in the graph: a leaf, as a deep copy of the original
    would be.
    """
    leaf = value.detach().clone()
    is_parameter = isinstance(original, nn.Parameter)
    return nn.Parameter(leaf) if is_parameter else leaf.requires_grad_()
