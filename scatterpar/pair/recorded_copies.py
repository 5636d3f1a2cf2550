"""Copies that autograd records: of parameters, rows and losses.

A backward pass copies gradients back: to the master's parameters, and to the caller's
inputs that require grad. ``gather`` uses ``to_device``, which autograd records as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.batch.batch import batch_of
from scatterpar.calls.copies_in_graph import AutogradTransfers
from scatterpar.devices.copies import write
from scatterpar.devices.streams import current_streams, use_device
from scatterpar.devices.transfers import Transfers
from scatterpar.devices.virtual_devices import physical
from scatterpar.devices.write_counters import version
from scatterpar.plan import Plan
from scatterpar.replicas.broadcast import Broadcast
from scatterpar.replicas.buffers import BufferValue, values_after
from scatterpar.replicas.module_contents import ModuleContents, is_leaf
from scatterpar.replicas.module_copy import ModuleCopy
from scatterpar.replicas.parameter_guard import ParameterGuard
from scatterpar.replicas.refused_modules import (
    check_placement,
    refuse_created,
)
from scatterpar.replicas.shared_buffers import MemoryChanges, memory_changes
from scatterpar.replicas.sync_batch_norm import refuse_to_wait, synchronised_layers
from scatterpar.step.inner_backward import inner_backward
from scatterpar.step.reduce import sum_in_order
from scatterpar.step.scatter import Values, rows_on_device
from scatterpar.step.substeps import set_aside
from scatterpar.torch_private.autograd import leaves_of, nodes_reached
from scatterpar.torch_private.compiler import is_compiled_module, never_compiled

_APART = (
    "the pair, whose replicas compute apart (ScatterOnceParallel synchronises them)"
)


class PassingReplica(ModuleCopy):
    """A copy of a module for one forward pass.

    It stays alive in the graph of its outputs.

    Attributes:
        tensors: its tensors, in the order of the module's.
    """

    def __init__(
        self, module_contents: ModuleContents, copies: Sequence[Tensor]
    ) -> None:
        super().__init__(module_contents, copies)
        self.tensors = tuple(copies)
        self._versions = {id(copy): version(copy) for copy in copies}
        self._places = [copy.detach() for copy in copies]

    def changed_buffers(self) -> Iterator[BufferValue]:
        """The buffers that a forward pass may have changed, with their values.

        The other buffers are not written, because a graph of the user may still need
        their values.
        """
        modules = list(self._contents.modules.values())
        copies = list(map(self.copy_of, modules))
        for number, name, value in values_after(modules, copies, self.copy_of):
            module = modules[number]
            buffers = module._buffers
            copy = self.copy_of(buffers[name])
            # Batch normalisation in training writes its statistics without counting
            # versions.
            may_differ = module.training or value is None or value is not copy
            if may_differ or self._versions.get(id(copy)) != version(copy):
                yield buffers, name, value

    def memory_changes(self) -> MemoryChanges:
        """The buffers that share memory with others than in the user's modules."""
        modules = list(self._contents.modules.values())
        copies = list(map(self.copy_of, modules))
        exchanged = {
            id(tensor)
            for tensor, place in zip(self.tensors, self._places, strict=True)
            if not tensor.is_set_to(place)
        }
        return memory_changes(modules, copies, self.copy_of, exchanged)


def replicate(
    module: nn.Module, device_ids: Sequence[torch.device], checked_modes: set[Hashable]
) -> tuple[list[PassingReplica], contextlib.AbstractContextManager[None]]:
    """Copies of ``module``, whose parameters are differentiable copies of its
    parameters.

    As ``torch.nn.parallel.replicate``, but the replicas of any one device share its
    parameters. A backward pass adds gradients on the master. Returns the replicas, and
    a context manager that refuses forward passes that write or create parameters; in
    ``checked_modes`` it compares versions and storages only.
    """
    check_placement(module, device_ids)
    contents = ModuleContents((module,), physical(device_ids[0]))
    if len(device_ids) > 1:
        layers = synchronised_layers(contents.modules.values())
        refuse_to_wait({_APART: any(layer.training for layer in layers)})
    with torch.inference_mode(False), torch.no_grad():
        broadcast = Broadcast(contents, device_ids)
        broadcast.update(Transfers(), broadcast.compare())
        tensors_of_replicas: list[list[Tensor]] = []
        for device in device_ids:
            storages = _filled_storages(broadcast, device)
            if tensors_of_replicas:
                # Own version counters: one of them may exchange its storage.
                tensors = [storage.data for storage in storages]
            else:
                # The first replica shares the version counters of the user's
                # parameters, so that torch detects an optimizer step before the
                # backward pass.
                tensors = [storage.detach() for storage in storages]
            tensors_of_replicas.append(tensors)
    for number, original in enumerate(contents.tensors.values()):
        copies = [tensors[number] for tensors in tensors_of_replicas]
        if original.requires_grad:
            # A frozen parameter needs no node: its copies are plain tensors.
            copies = _connected(original, copies, device_ids)
        for tensors, copy in zip(tensors_of_replicas, copies, strict=True):
            _give_class_of(original, copy)
            tensors[number] = copy
    tensors_by_device = zip(device_ids, tensors_of_replicas, strict=True)
    guard = ParameterGuard(broadcast, tensors_by_device)
    guard.checked_modes = checked_modes
    mode = tuple(part.training for part in contents.modules.values())
    replicas = [PassingReplica(contents, tensors) for tensors in tensors_of_replicas]

    def refuse_all_created() -> None:
        for replica in replicas:
            refuse_created(replica.root, replica.tensors)

    return replicas, guard.read_only(mode, refuse_all_created)


def _filled_storages(broadcast: Broadcast, device: torch.device) -> list[Tensor]:
    """Where a replica's tensors are stored: parameters that it shares, new buffers."""
    storages = broadcast.storages(device)
    for storage, source in zip(storages, broadcast.at(device), strict=True):
        if storage is not source:
            write(storage.data, source)  # ``.data``: its own version counter
    return storages


def _connected(
    original: Tensor, copies: Sequence[Tensor], device_ids: Sequence[torch.device]
) -> list[Tensor]:
    """The copies as parts of autograd's graph, in which ``original`` is a leaf."""
    connected = _ConnectCopies.apply(device_ids, original, *copies)  # type: ignore[no-untyped-call]
    for copy, tensor in zip(copies, connected, strict=True):
        vars(tensor)["__deepcopy__"] = partial(_leaf_like, original, copy)
    return list(connected)


def _give_class_of(original: Tensor, copy: Tensor) -> None:
    """Make the copy of a parameter of a user's class an object of this class."""
    kind = type(original)
    if issubclass(kind, nn.Parameter) and kind is not nn.Parameter:
        with contextlib.suppress(TypeError):  # its own layout, such as ``__slots__``
            copy.__class__ = kind


def scatter_owned(
    value: Any, plan: Plan, dim: int, transfers: AutogradTransfers
) -> list[Any]:
    """The shares of ``value``, which share no memory with it nor with each other."""
    batch = batch_of(value, None, plan.rows, dim)
    # Only a tensor that is on a share's device may be passed on as it is.
    sources = batch.devices()
    is_marked = bool(batch.markers)
    values = Values(transfers)
    shares: list[Any] = []
    for share in plan.shares:
        device = share.device
        rows = values.on(device, batch).select(range(share.start, share.stop))
        arrived = rows.map_rows(partial(rows_on_device, transfers, device))
        is_copied = is_marked or device in sources
        inputs, _ = arrived.unwrapped(copy=is_copied)
        shares.append(inputs)
    return shares


def require_eager(module: Any) -> None:
    """Refuse compiled modules.

    The pair copies a module in every call, and copies run uncompiled.
    """
    if not isinstance(module, nn.Module):
        return
    for name, child in module.named_modules():
        if is_compiled_module(child) or child._compiled_call_impl is not None:
            which = f"the child {name!r}" if name else "the module"
            raise TypeError(
                f"{which} was compiled, and the pair runs its copies as they are "
                "written; pass the original (._orig_mod), or train with "
                "ScatterOnceParallel, which compiles replicas"
            )


def trained_by(root: Any, outputs: Sequence[Any]) -> list[Tensor]:
    """The leaves in ``root``, and those from which ``outputs`` were computed."""
    leaves: dict[int, Tensor] = {}
    if root is not None:
        for tensor in ModuleContents((root,)).tensors.values():
            if is_leaf(tensor) and tensor.requires_grad:
                leaves[id(tensor)] = tensor
    nodes: list[Any] = []
    for tensor in nested.tensors(list(outputs)):
        nodes += nodes_reached(tensor, nodes)
    for leaf in leaves_of(nodes):
        leaves[id(leaf)] = leaf
    return list(leaves.values())


@contextlib.contextmanager
def refused_inner_backward(root: Any, leaves: Sequence[Tensor]) -> Iterator[None]:
    """In the body no gradient may arrive at ``leaves``; their own are put aside.

    Raises ``ValueError`` with the name of one. A gradient that a replica adds is not
    weighted, as the loss will be.
    """
    with set_aside(leaves):
        yield
        for leaf in leaves:
            if leaf.grad is not None:
                raise inner_backward(leaf, [root])


_ROWS = "_scatterpar_rows"


def note_rows(outputs: Sequence[Any], plan: Plan) -> None:
    """Note on each tensor of an output how many rows its replica has.

    ``gather`` weighs numbers by them, whatever the user has selected by then.
    """
    entries: dict[int, int] = {}
    for output in outputs:
        for key in {id(tensor) for tensor in nested.tensors(output)}:
            entries[key] = entries.get(key, 0) + 1
    for share, output in zip(plan.shares, outputs, strict=True):
        for tensor in nested.tensors(output):
            # What replicas share is of no share.
            if entries[id(tensor)] == 1:
                vars(tensor)[_ROWS] = share.rows


def noted_rows(tensors: Sequence[Tensor]) -> int | None:
    """The rows that ``note_rows`` has noted on one of them."""
    for tensor in tensors:
        rows: int | None = vars(tensor).get(_ROWS)
        if rows is not None:
            return rows
    return None


def combine(losses: Sequence[Tensor], weights: Sequence[float], plan: Plan) -> Tensor:
    """The weighted sum of the shares' losses, on the master.

    A loss of weight zero is ignored, even if it is NaN.
    """
    master = plan.shares[0].device
    terms: list[Tensor] = []
    for loss, weight, share in zip(losses, weights, plan.shares, strict=True):
        if weight == 0:
            continue
        # The name of a virtual device, which the loss does not have. A criterion may
        # have moved its loss to another device.
        is_at_share = loss.device == physical(share.device)
        origin = share.device if is_at_share else loss.device
        if origin != master:
            loss = AutogradTransfers().copy(loss, master, "compute", origin)
        terms.append(weight * loss)
    if not terms:
        # Not a loss times zero, which may be NaN.
        zero = torch.zeros_like(losses[0], device=physical(master))
        return zero.requires_grad_(torch.is_grad_enabled())
    return torch.stack(terms).sum()


class _ConnectCopies(torch.autograd.Function):
    """Connect the replicas' copies to the master's tensor.

    Its backward pass adds their gradients. There is one node per tensor: a backward
    pass that uses none of a tensor's copies must not reach its node, or its hooks would
    run without a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, device_ids: Sequence[torch.device], _: Tensor, *copies: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.device_ids = device_ids
        # The backward pass may run in a thread of autograd's, on other streams.
        ctx.streams = current_streams()
        # A replica that did not use the parameter has no gradient, not one of zeros:
        # weight decay must not move it.
        ctx.set_materialize_grads(False)
        # An alias per replica, so that each has a separate gradient. It is not a view,
        # because a forward pass may exchange its storage (``set_``,
        # ``flatten_parameters``).
        return tuple(copy.detach() for copy in copies)

    @staticmethod
    @never_compiled  # a compiled function may call ``backward()``
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        # As sums of replicas have them: by number of the tensor.
        by_replica: list[dict[int, Tensor]] = []
        for gradient in gradients:
            by_replica.append({} if gradient is None else {0: gradient})
        devices = ctx.device_ids
        with use_device(devices[0], ctx.streams):
            total = sum_in_order(by_replica, devices, Transfers(), in_place=False)
        of_copies = [None] * len(gradients)
        return None, total.get(0), *of_copies


def _leaf_like(original: Tensor, value: Tensor, _: Any) -> Tensor:
    """``__deepcopy__`` of a copy in the graph: a leaf, like that of the original."""
    leaf = value.detach().clone()
    if isinstance(original, nn.Parameter):
        return nn.Parameter(leaf)
    return leaf.requires_grad_()
