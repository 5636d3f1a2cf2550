"""DataParallelModel, DataParallelCriterion, gather: outputs stay on their devices.

The pair follows Hang Zhang's PyTorch-Encoding (``encoding.parallel``). The model
returns a tuple with one entry per replica. The criterion computes each entry's loss on
the device of that entry, so no device has to hold all outputs. ::

    images ---+-- replica 0 -- outputs[0] -- loss 0 --+
              +-- replica 1 -- outputs[1] -- loss 1 --+-- weighted sum, on the master
    labels ---------------------------------^
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from scatterpar.batch import nested
from scatterpar.batch.batch import batch_of
from scatterpar.batch.joining import Entries, KnownTensors, join_rows
from scatterpar.batch.markers import count_rows
from scatterpar.calls.call import CallOptions, Calls
from scatterpar.calls.copies_in_graph import AutogradTransfers
from scatterpar.calls.division import Division
from scatterpar.calls.gradients import CallGradients
from scatterpar.calls.inner_gradients import refused_inner_backward
from scatterpar.calls.left_tensors import join_left_tensors
from scatterpar.calls.replicas_of_call import ReplicasOfCall
from scatterpar.devices.bits import same_bits
from scatterpar.devices.copies import to_device
from scatterpar.devices.device_ids import DeviceLike, resolve
from scatterpar.devices.streams import refuse_without_events
from scatterpar.devices.virtual_devices import physical
from scatterpar.errors import Told, restore_after, restored
from scatterpar.objects.references import module_of
from scatterpar.objects.walk import register_wrapper
from scatterpar.option_checks import check_int
from scatterpar.pair.outputs import (
    combine,
    note_rows,
    noted_rows,
    trained_by,
)
from scatterpar.plan import Plan, make_plan
from scatterpar.replicas.module_contents import root_to_replicate
from scatterpar.replicas.refused_modules import check_placement
from scatterpar.replicas.replicas import (
    ReplicaOptions,
    ReplicaSet,
    parameter_writes_refused,
)
from scatterpar.step.logged_numbers import NumbersToLog, require_same_names
from scatterpar.step.loss import loss_and_numbers_in
from scatterpar.step.loss_weights import as_sum, compute_loss_weights
from scatterpar.step.replica_threads import Proceed, ReplicaThreads
from scatterpar.step.request import (
    CountFunction,
    Criterion,
    Reduction,
    Request,
    check_function,
    check_module,
    resolve_reduction,
)
from scatterpar.step.row_writes import KnownWrites, RowWrites
from scatterpar.step.substeps import set_aside
from scatterpar.step.task import is_shared
from scatterpar.step.turns import Scope
from scatterpar.threads.generators import Generators
from scatterpar.threads.workers import Workers
from scatterpar.torch_private.autograd import (
    current_graph_task,
    own_saved_tensors,
    saved_tensors_hooks,
)
from scatterpar.torch_private.compiler import never_compiled, unwrapped
from scatterpar.verify.output_looks import OutputLooks
from scatterpar.wrapper import ModuleT, WrappedT, Wrapper


class _OfPair(Wrapper[WrappedT]):
    """The module or criterion, a device per replica, and their threads.

    Attributes:
        device_ids: ``None`` for a criterion that computes where its outputs are.
        dim: the dimension that holds the rows.
    """

    device_ids: tuple[torch.device, ...] | None
    dim: int
    _transient: tuple[str, ...] = ("_workers", "_known_writes")

    def __init__(
        self, module: WrappedT, device_ids: tuple[torch.device, ...] | None, dim: int
    ) -> None:
        super().__init__()
        check_int("dim", dim)
        self.module = module
        self.device_ids = device_ids
        self.dim = dim
        self._init_transient()

    def _init_transient(self) -> None:
        self._workers = Workers(self.device_ids or (), f"this {type(self).__name__}")
        self._known_writes = KnownWrites()


register_wrapper(_OfPair)


class DataParallelModel(_OfPair[ModuleT]):
    """Run a module on all devices and leave each output on the device that computed it.

    Args:
        module: any ``nn.Module`` on ``device_ids[0]``.
        device_ids: one entry per replica, as in ``ScatterOnceParallel``.
        dim: the dimension that holds the rows.

    Raises:
        TypeError: ``module`` is no ``nn.Module``, or is wrapped in another one that
            makes replicas; ``device_ids`` is no list.
        ValueError: a device that does not exist, or a parameter that is not on
            ``device_ids[0]``.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> net = nn.Linear(8, 3)
        >>> model = DataParallelModel(net, device_ids=["cpu"] * 2)
        >>> criterion = DataParallelCriterion(nn.CrossEntropyLoss())
        >>> outputs = model(torch.randn(5, 8))
        >>> [tuple(output.shape) for output in outputs]
        [(3, 3), (2, 3)]
        >>> loss = criterion(outputs, torch.tensor([0, 1, 2, 0, 1]))
        >>> loss.backward()
        >>> net.weight.grad.shape
        torch.Size([3, 8])
    """

    device_ids: tuple[torch.device, ...]

    def __init__(
        self,
        module: ModuleT,
        device_ids: Sequence[DeviceLike] | None = None,
        dim: int = 0,
    ) -> None:
        """The docstring of the class has the arguments and an example."""
        module, self._compile_fn = unwrapped(module)
        check_module(module)
        super().__init__(module, resolve(device_ids), dim)
        refuse_without_events(self.device_ids)
        check_placement(module, self.device_ids, lazy=True)

    @never_compiled
    def forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The module's outputs, each on the device that computed it.

        Args:
            inputs: positional arguments of the module, nested at will. Tensors are
                split along ``dim``; 0-dim tensors and everything else go to every
                replica.
            kwargs: keyword arguments of the module, handled in the same way.

        Returns:
            A tuple with one entry per replica used. The module gets the buffers of
            replica 0. Inputs that require grad and the module's parameters get their
            gradients by ``backward()``.

        Raises:
            ValueError: no rows, or tensors with different numbers of rows.
            RuntimeError: a call from inside another, a forward pass that writes
                parameters, a lazy module that was never called, or copies between
                devices that arrive corrupted.

        Exceptions of the module are raised unchanged, with a note that names the
        replica.
        """
        options = CallOptions(self.dim, verify=False)
        outputs, plan = self._calls.outputs(self.module, (inputs, kwargs), options)
        note_rows(outputs, plan)
        return outputs

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """In the body, backward passes leave gradients at their replicas.

        As ``ScatterOnceParallel.no_sync``: the first pass outside adds all that waits.
        """
        with self._calls.gradients.no_sync():
            yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, those that wait at the replicas, too."""
        self._calls.gradients.drop_waiting()
        super().zero_grad(set_to_none)

    _transient = (*_OfPair._transient, "_calls")

    def _init_transient(self) -> None:
        super()._init_transient()
        replica_set = ReplicaSet(ReplicaOptions(compile_fn=self._compile_fn))
        self._calls = Calls(self.module, self.device_ids, replica_set, self._workers)


class DataParallelCriterion(_OfPair[Criterion]):
    """Compute the loss of each replica's outputs on the device that holds them.

    Args:
        criterion: any callable ``criterion(output, targets)`` that returns a 0-dim
            loss, or ``(loss, numbers)`` with a dict of 0-dim tensors or numbers to log.
            If it is a module, its parameters and buffers are replicated and trained
            like those of the model.
        device_ids: one entry per replica; by default the devices of the outputs.
        dim: the dimension that holds the rows.
        verify: in calls 1, 2, 4, 8, … compute the losses of a few rows in one piece and
            in parts. If they do not combine as ``reduction=`` and ``count=`` say, a
            ``ValueError`` says what would be right. An inconclusive check warns once.

    Attributes:
        logged: the numbers of a criterion that returns ``(loss, numbers)``, combined
            as the loss of the latest call: 0-dim tensors on the first device, by name.

    Raises:
        TypeError: ``criterion`` is a class or cannot be called, or ``device_ids`` is no
            list.
        ValueError: a device that is not here.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> criterion = DataParallelCriterion(nn.MSELoss())
        >>> outputs = torch.zeros(2, 1), torch.zeros(1, 1)
        >>> criterion(outputs, torch.tensor([[1.0], [1.0], [4.0]]))
        tensor(6.)
    """

    def __init__(
        self,
        criterion: Criterion,
        device_ids: Sequence[DeviceLike] | None = None,
        dim: int = 0,
        *,
        verify: bool = True,
    ) -> None:
        """The docstring of the class has the arguments and an example."""
        check_function("criterion", criterion)
        self.verify = verify
        self.logged: dict[str, Tensor] = {}
        devices = None if device_ids is None else resolve(device_ids)
        super().__init__(criterion, devices, dim)

    _transient = (
        *_OfPair._transient,
        *("_looks", "_has_looked", "_replicas", "_told"),
    )

    def _init_transient(self) -> None:
        super()._init_transient()
        self._looks = OutputLooks()
        self._has_looked = False
        self._replicas: ReplicasOfCall | None = None
        self._told = Told()

    @never_compiled
    def forward(
        self,
        outputs: Sequence[Any],
        targets: Any,
        *,
        reduction: Reduction | None = None,
        count: CountFunction | None = None,
    ) -> Tensor:
        """The loss of the whole batch, 0-dim, on the first device.

        Args:
            outputs: the tuple that ``DataParallelModel`` returned, with one entry per
                replica used.
            targets: the targets of the whole batch, nested at will, with the rows of
                all outputs. 0-dim tensors and everything else go to every replica.
            reduction: as in ``ScatterOnceParallel.forward_backward``.
            count: ``count(output, targets)`` gives the number of terms that the mean
                loss of one replica averages over; by default as in
                ``forward_backward``.

        Raises:
            TypeError: ``outputs`` is no tuple or list, the loss is no tensor, or
                ``count`` cannot be called.
            ValueError: outputs and targets do not belong together, the loss is not
                0-dim or not real, ``reduction="none"``, or, with ``verify``, losses
                that do not combine.
            RuntimeError: a call from inside another.

        Exceptions of the criterion are raised unchanged, with a note that names the
        replica.
        """
        _require_entries(outputs)
        if count is not None:
            check_function("count", count)
        num_replicas = len(outputs)
        # A criterion without devices meets its replicas here.
        if self._workers.count < num_replicas:
            places = [None] * num_replicas
            self._workers = Workers(places, "this DataParallelCriterion")
        transfers = AutogradTransfers()
        with self._workers.exclusive(), restored(transfers.synchronize):
            resolved = resolve_reduction(self.module, reduction)
            plan = self._plan(outputs, targets)
            batch = batch_of(None, targets, plan.rows, self.dim)
            request = Request([batch], self.dim, self.module, resolved, count)
            # A checkpoint that calls the criterion again has looked before.
            is_again = self._has_looked and current_graph_task() != -1
            is_looked_at = self.verify and num_replicas > 1 and not is_again
            if is_looked_at:
                # A backward pass of the criterion's own is refused later.
                with set_aside(self._trained()), own_saved_tensors():
                    self._looks.check_call(request, plan, outputs, self._workers)
                self._has_looked = True
            devices = [share.device for share in plan.shares]
            replicas = self._replicas_on(devices, transfers)
            gradients = CallGradients(devices)
            if replicas is not None:
                gradients = replicas.gradients
            division = Division(plan, self.dim, transfers, gradients)
            pieces = division.split_call(targets)
            calls = list(zip(outputs, pieces, strict=True))
            weights = compute_loss_weights(request, plan, calls)
            writes = RowWrites(self._known_writes)

            def loss_of(replica: Any, number: int) -> tuple[Tensor, NumbersToLog]:
                criterion = as_sum(replica) if weights.sums else replica
                output, targets = calls[number]
                with writes.watched("the criterion", "targets", targets) as watch:
                    loss, numbers = loss_and_numbers_in(criterion(output, targets))
                    watch.result = loss
                return loss, numbers

            results = self._run(loss_of, division, replicas, outputs)
            self._looks.tell()
            writes.tell()
        weight_by_share = [weight for (weight,) in weights.of_losses]
        losses = [loss for loss, _ in results]
        self.logged = _combined_numbers(results, weight_by_share, plan)
        return combine(losses, weight_by_share, plan)

    def _run(
        self,
        work: Callable[[Any, int], tuple[Tensor, NumbersToLog]],
        division: Division,
        replicas: ReplicasOfCall | None,
        outputs: Sequence[Any],
    ) -> list[tuple[Tensor, NumbersToLog]]:
        """Call ``work(replica of the criterion, its number)`` for each share.

        In parallel, or one at a time. If a call raises, all is as before. No call may
        run a backward pass that reaches a parameter of the criterion, or one that
        ``outputs`` were computed from.
        """
        devices = division.devices
        generators = Generators(devices)
        replica_sets = [] if replicas is None else [replicas.replica_set]

        def end_substep() -> None:
            for replica_set in replica_sets:
                replica_set.end_substep()

        shares = division.plan.shares
        threads = ReplicaThreads(self._workers, shares, generators, end_substep)
        # A function, which replicas share, computes one loss at a time. Checkpointing
        # identifies recomputed tensors by the order in which they were saved.
        hooks = saved_tensors_hooks()
        is_checkpointed = hooks and hooks[0].__module__ == checkpoint.__module__
        if is_shared(self.module) or is_checkpointed:
            threads.widen(Scope.SUBSTEP)
        criteria: list[Any] = [self.module] * len(devices)
        leaves: Sequence[Tensor] = ()
        if replicas is not None:
            criteria = replicas.modules_of(self.module, len(devices))
        # A single replica's gradients are those of the whole batch.
        if len(devices) > 1:
            leaves = trained_by(replica_sets, outputs)

        def run(replica: int, _: Proceed) -> tuple[Tensor, NumbersToLog]:
            with threads.turn(Scope.SUBSTEP, replica, 0):
                return work(criteria[replica], replica)

        try:
            with (
                parameter_writes_refused(replica_sets),
                refused_inner_backward(self.module, leaves),
            ):
                results = threads.run(run, range(len(devices)))
            if replicas is not None:
                join_left_tensors(replicas, division, self._told)
                losses = division.left_in_place([loss for loss, _ in results])
                numbers = [numbers for _, numbers in results]
                results = list(zip(losses, numbers, strict=True))
        except BaseException as error:
            restores: list[Callable[[], object]] = [generators.rollback]
            if replicas is not None:
                restores.append(replicas.restore_buffers)
            restore_after(error, *restores)
            raise
        generators.commit()
        return results

    def _trained(self) -> list[Tensor]:
        """The parameters of the criterion that are trained."""
        module = module_of(self.module)
        parameters = () if module is None else module.parameters()
        return [parameter for parameter in parameters if parameter.requires_grad]

    def _replicas_on(
        self, devices: Sequence[torch.device], transfers: AutogradTransfers
    ) -> ReplicasOfCall | None:
        """The replicas of the criterion; ``None`` if it has no modules or tensors."""
        root = root_to_replicate(self.module)
        if root is None:
            return None
        check_placement(root, devices)
        if self._replicas is None or self._replicas.device_ids != tuple(devices):
            replica_set = ReplicaSet(ReplicaOptions())
            self._replicas = ReplicasOfCall(root, devices, replica_set)
        self._replicas.refresh(transfers, self._workers)
        return self._replicas

    def _plan(self, outputs: Sequence[Any], targets: Any) -> Plan:
        """The plan of the targets.

        Raises ``ValueError`` if the outputs have other shares.
        """
        locations = [_device_of(output, k) for k, output in enumerate(outputs)]
        sizes_of_outputs = [_sizes(output, self.dim) for output in outputs]
        num_output_rows = None  # unknown if an output has no rows
        if all(sizes_of_outputs):
            num_output_rows = sum(sizes[0] for sizes in sizes_of_outputs)
        rows = count_rows(
            # The number of the outputs' rows counts if no target has rows.
            {"targets": targets},
            self.dim,
            refuse_grad=False,
            known=num_output_rows,
        )
        devices = self.device_ids or locations
        plan = make_plan(rows, devices)
        if len(plan.shares) != len(outputs):
            raise ValueError(
                f"outputs are from {len(outputs)} devices, but {rows} rows of targets "
                f"are divided over {len(plan.shares)} of {len(devices)} devices; pass "
                "the tuple that the model returned for this batch"
            )
        for share, sizes, device in zip(
            plan.shares, sizes_of_outputs, locations, strict=True
        ):
            if physical(share.device) != device:
                raise ValueError(
                    f"output {share.replica} is on {device}, but "
                    f"device_ids[{share.replica}] is {share.device}; give the "
                    "criterion the model's device_ids, or none"
                )
            if sizes and share.rows not in sizes:
                shapes = [
                    str(tuple(tensor.shape))
                    for tensor in nested.tensors(outputs[share.replica])
                ]
                raise ValueError(
                    f"output {share.replica} of shape {' and '.join(shapes)} has "
                    f"{sizes[0]} entries along dim={self.dim}, but its share of the "
                    f"targets has {share.rows} rows; if outputs and targets are of two "
                    "batches, pass both of one batch. If forward returns k entries "
                    "per row, return output.reshape(rows, k, …). If forward returns "
                    "torch.cat([a, b]), return torch.stack([a, b], 1) in its place. If "
                    "the rows are in dimension 1, return output.transpose(0, 1), and "
                    "transpose it back in the criterion. Otherwise, train with "
                    "ScatterOnceParallel, which takes outputs of any shape"
                )
        return plan


def _combined_numbers(
    results: Sequence[tuple[Tensor, NumbersToLog]], weights: Sequence[float], plan: Plan
) -> dict[str, Tensor]:
    """The weighted sum of each number that the criterion returned, on the master."""
    by_share: list[dict[str, Tensor]] = []
    for loss, numbers in results:
        require_same_names(results[0][1], numbers)
        tensors = {
            name: torch.as_tensor(value, dtype=torch.float32, device=loss.device)
            if isinstance(value, float)
            else value
            for name, value in numbers.items()
        }
        by_share.append(tensors)
    return {
        name: combine([tensors[name] for tensors in by_share], weights, plan).detach()
        for name in by_share[0]
    }


def gather(outputs: Sequence[Any], device: DeviceLike, dim: int = 0) -> Any:
    """Bring the replicas' outputs together on one device, rows in order.

    Differentiable: gradients are copied back to the outputs.

    Args:
        outputs: one entry per replica, of the same nested types.
        device: an int (ordinal of the accelerator), a string or a device.
        dim: the dimension that holds the rows.

    Returns:
        One value of the entries' nested type. 0-dim tensors in it are averaged,
        weighted by the rows of their entry. A tensor without rows that has the same
        bits in all entries, such as a codebook, is returned once.

    Raises:
        TypeError: ``outputs`` is no tuple or list.
        ValueError: there are no outputs, the device does not exist, or there are
            different 0-dim tensors alone, which ``DataParallelModel`` did not return.

    Example:
        >>> import torch
        >>> gather((torch.zeros(2), torch.ones(1)), "cpu")
        tensor([0., 0., 1.])
    """
    _require_entries(outputs)
    (target,) = resolve([device])
    # Before they are moved: a copy has not the rows that ``note_rows`` has noted.
    rows = _rows_of(outputs, dim)
    constants = dict.fromkeys(_constants_in(outputs, dim, rows), Entries.OF_FIRST)
    move = partial(to_device, device=target)
    moved = [nested.map_tensors(move, output) for output in outputs]
    return join_rows(moved, dim, rows, known=KnownTensors(entries=constants))


def _columns(outputs: Sequence[Any]) -> list[tuple[Tensor, ...]]:
    """The tensors of the outputs, by position; none if they have different numbers."""
    by_output = list(map(nested.tensors, outputs))
    is_alike = len(set(map(len, by_output))) == 1
    return list(zip(*by_output, strict=True)) if is_alike else []


def _rows_of(outputs: Sequence[Any], dim: int) -> list[int]:
    """The number of rows of each entry."""
    noted = [noted_rows(nested.tensors(output)) for output in outputs]
    if None not in noted:
        return [rows for rows in noted if rows is not None]
    candidates: list[list[int]] = []
    numbers: list[Sequence[Tensor]] = []
    for column in _columns(outputs):
        if all(-tensor.ndim <= dim < tensor.ndim for tensor in column):
            candidates.append([tensor.size(dim) for tensor in column])
            # What has the same bits in all entries may be a constant.
            if not _are_equal(column):
                return candidates[-1]
        elif not any(tensor.ndim for tensor in column):
            numbers.append(column)
    if candidates:
        return candidates[0]
    if not all(map(_are_equal, numbers)):
        raise ValueError(
            f"{len(outputs)} numbers cannot be averaged, because it is unknown how "
            "many rows each number stands for; gather the outputs first, and compute "
            "the number from all of them. Or pass tuples (number, output) to gather, "
            "one per device: each number is then weighted by the rows of its output"
        )
    return [1] * len(outputs)


def _constants_in(outputs: Sequence[Any], dim: int, rows: Sequence[int]) -> list[int]:
    """The positions of tensors with other sizes than ``rows``, and the same bits."""
    constants: list[int] = []
    for position, column in enumerate(_columns(outputs)):
        if not all(-tensor.ndim <= dim < tensor.ndim for tensor in column):
            continue
        sizes = [tensor.size(dim) for tensor in column]
        if sizes != list(rows) and _are_equal(column):
            constants.append(position)
    return constants


def _are_equal(column: Sequence[Tensor]) -> bool:
    """Whether tensors of several devices have the same bits."""
    first = column[0]
    for tensor in column[1:]:
        if tensor.shape != first.shape or tensor.dtype != first.dtype:
            return False
        if not same_bits(first.detach(), to_device(tensor.detach(), first.device)):
            return False
    return True


def _sizes(output: Any, dim: int) -> list[int]:
    """The sizes along ``dim`` of the tensors that have this dimension."""
    sizes: list[int] = []
    for tensor in nested.tensors(output):
        if -tensor.ndim <= dim < tensor.ndim:
            sizes.append(tensor.size(dim))
    return sizes


def _device_of(output: Any, replica: int) -> torch.device:
    """Where the replica's output is. Raises ``TypeError`` if it has no tensor."""
    tensors = nested.tensors(output)
    if not tensors:
        kind = type(output).__name__
        raise TypeError(f"output {replica} has no tensor in it: got {kind}")
    return tensors[0].device


def _require_entries(outputs: Any) -> None:
    """Refuse outputs that are not a tuple or list with one entry per replica."""
    if not isinstance(outputs, (tuple, list)) or hasattr(outputs, "_fields"):
        raise TypeError(
            f"outputs must be the tuple that DataParallelModel returns, with one entry "
            f"per replica, got {type(outputs).__name__}"
        )
    if not outputs:
        raise ValueError(
            "there are no outputs to gather, or to compute losses of; pass the tuple "
            "that DataParallelModel returned"
        )
