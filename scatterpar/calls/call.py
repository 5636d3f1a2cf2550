"""A call of a module by all replicas, with a graph.

::

    engine(x)     the caller's thread
      x -----+--- the user's module   rows 0:3 --- thread 0
             +--- replica 1           rows 3:5 --- thread 1
      y <----+    joined on the master, in autograd's graph

    loss.backward()                     autograd runs all replicas' backward passes
      outside of no_sync()              gradients are added to the user's parameters

The user's code around the call runs once, in the user's thread, as on one device.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from scatterpar.batch import nested
from scatterpar.batch.joining import (
    KnownTensors,
    Lists,
    NumberWeights,
    combined_number,
    first_listed,
    join_rows,
)
from scatterpar.batch.markers import Batches, Marker, count_rows, unwrap_markers
from scatterpar.batch.refused_outputs import refuse_generators
from scatterpar.calls.call_looks import CallLooks, CallOfLook, OutputTensors
from scatterpar.calls.copies_in_graph import AutogradTransfers
from scatterpar.calls.division import Division, are_divided_alike
from scatterpar.calls.inner_gradients import refused_inner_backward
from scatterpar.calls.left_tensors import join_left_tensors
from scatterpar.calls.lost_state import LostState
from scatterpar.calls.numbers import BY_ROWS, NumberRule, weights_of
from scatterpar.calls.replicas_of_call import (
    FORWARD_HOOKS,
    ReplicasOfCall,
    first_computed,
    modules_in,
    user_hooks,
)
from scatterpar.calls.unread_outputs import (
    entries_by_name,
    has_loss,
    needs_join,
    read_later,
)
from scatterpar.causes.batch_normalisation import uses_batch_statistics
from scatterpar.devices.links import check_links
from scatterpar.devices.streams import refuse_without_events
from scatterpar.devices.transfers import PHASES
from scatterpar.errors import Told, add_note, restore_after, warn
from scatterpar.options.call_arguments import Arguments
from scatterpar.plan import Plan, make_plan
from scatterpar.replicas.replicas import ReplicaSet, parameter_writes_refused
from scatterpar.replicas.sync_batch_norm import refuse_to_wait
from scatterpar.report import StepReport
from scatterpar.step.misfits import misfit_of_dataclass, misfit_of_inputs
from scatterpar.step.replica_threads import Proceed, ReplicaThreads
from scatterpar.step.row_writes import KnownWrites, RowWrites
from scatterpar.step.task import inputs_from_arguments
from scatterpar.step.turns import Scope
from scatterpar.threads.generators import Generators
from scatterpar.threads.workers import Workers
from scatterpar.torch_private.autograd import current_graph_task, saved_tensors_hooks
from scatterpar.torch_private.thread_modes import is_transformed

_IN_A_CALL = (
    "a call (ScatterOnceParallel.forward_backward synchronises them, and so does "
    "a call of the module itself)"
)


@dataclass(frozen=True)
class CallOptions:
    """The options of an engine that calls follow.

    Attributes:
        dim: the dimension of the rows.
        shares: the relative sizes of the replicas' shares.
        verify: whether a few rows are compared before calls 1, 2, 4, 8, ….
        check_finite: whether a number that is not finite is an error.
        tells_state: whether to warn of state that replicas leave differently.
    """

    dim: int = 0
    shares: Sequence[float] | None = None
    verify: bool = True
    check_finite: bool = False
    tells_state: bool = True


@dataclass
class OutputsOfReplicas:
    """The outputs of the replicas for one call, with their graphs.

    Attributes:
        outputs: that of each share, where it was computed.
        division: the rows of each.
        arguments: those of the call, of all rows.
        tensors: what is known of the tensors of an output.
        lists: whether lists in an output may have one entry per row.
    """

    outputs: list[Any]
    division: Division
    arguments: Arguments
    tensors: OutputTensors
    lists: Lists


def require_grad(arguments: Arguments) -> bool:
    """Whether a tensor in the arguments of a call requires grad."""
    for atom in nested.atoms(arguments):
        tensors = atom.atoms() if isinstance(atom, Marker) else [atom]
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                return True
    return False


class IndivisibleCall(ValueError):
    """The outputs of replicas cannot be joined, or rows depend on each other."""


class Calls:
    """Calls of ``root`` and of its parts, by all replicas.

    Attributes:
        gradients: those of the replicas.
        last_report: what the last call has copied; the sum of its gradients, too.
    """

    def __init__(
        self,
        root: nn.Module,
        device_ids: Sequence[torch.device],
        replica_set: ReplicaSet,
        workers: Workers,
    ) -> None:
        self._root = root
        self._device_ids = tuple(device_ids)
        self._workers = workers
        self._replicas = ReplicasOfCall(root, device_ids, replica_set)
        self.gradients = self._replicas.gradients
        self.last_report: StepReport | None = None
        self._known_writes = KnownWrites()
        self._told = Told()
        self._looks = CallLooks()
        self._lost_state = LostState()
        # Layers with running statistics, as of the last build of the replicas.
        self._norms: list[nn.Module] = []
        self._builds_of_norms = 0
        # Parts of the root whose rows or outputs cannot be divided, and why.
        self._indivisible: dict[tuple[nn.Module, bool], str] = {}

    def is_one_pass(self) -> bool:
        """Whether a replica computes its rows in one pass without a graph, too.

        In training mode, and if the user has forward hooks, which keep tensors of all
        rows.
        """
        modules = modules_in(self._root)
        if any(module.training for module in modules):
            return True
        return bool(user_hooks(modules, FORWARD_HOOKS))

    def call(
        self, module: nn.Module, arguments: Arguments, options: CallOptions
    ) -> Any:
        """Let the replicas compute ``module(*args, **kwargs)``. Returns the output.

        ``module`` is the root, or a part of it. ``arguments`` are ``(args, kwargs)``.
        What cannot be divided is computed by ``module`` itself, on the master, which is
        right; a warning says so once per reason. Calls of the root or its parts in
        forward passes of replicas are plain ones.

        Raises:
            ValueError: outputs that cannot be joined, or with ``options.verify`` rows
                that depend on each other.
            RuntimeError: a call from inside another one; a forward pass that writes
                parameters.

        Exceptions of the module are raised unchanged, with notes. Then buffers, random
        state and gradients are as before.
        """
        why = self._why_on_master(module)
        rows = 0
        if not why:
            try:
                rows = _num_rows_of_call(arguments, options)
            except (ValueError, TypeError) as error:
                if any(isinstance(atom, Batches) for atom in nested.atoms(arguments)):
                    raise
                why = str(error)
        # Past the handler, or an error of the module would have this one as context.
        if why:
            return self._on_master(module, arguments, why)
        try:
            with self._replicas_called(module, arguments, options, rows) as computed:
                try:
                    return self._joined(computed, options)
                except ValueError as error:
                    raise IndivisibleCall(str(error)) from error
        except IndivisibleCall as error:
            if module is self._root:
                raise
            # A part of the root: what calls it has asked for no division.
            self._indivisible[module, module.training] = why = str(error)
        return self._on_master(module, arguments, why)

    def outputs(
        self, module: nn.Module, arguments: Arguments, options: CallOptions
    ) -> tuple[tuple[Any, ...], Plan]:
        """Call the replicas. Returns their outputs, where they are, and the plan."""
        rows = _num_rows_of_call(arguments, options)
        with self._replicas_called(module, arguments, options, rows) as computed:
            division = computed.division
            found = nested.tensors(computed.outputs)
            left = iter(division.left_in_place(found))
            outputs = nested.map_tensors(lambda _: next(left), tuple(computed.outputs))
            return outputs, division.plan

    # --- what is not divided ---

    def _why_on_master(self, module: nn.Module) -> str:
        """Why calls are computed on the master alone; empty if they are divided."""
        # Workers do not have its interpreters, and vmap hides a dimension of rows.
        if is_transformed():
            return "it runs in a transform of torch.func"
        if (module, module.training) in self._indivisible:
            return self._indivisible[module, module.training]
        computed = first_computed(modules_in(self._root))
        if computed is not None:
            pairs = self._root.named_parameters()
            name = next(name for name, value in pairs if value is computed)
            return f"its parameter {name!r} is computed from others"
        return ""

    def _on_master(self, module: nn.Module, arguments: Arguments, why: str) -> Any:
        """Call the module itself, in the caller's thread."""
        args, kwargs = unwrap_markers(arguments)
        self._tell_of_master(module, why)
        try:
            return module(*args, **kwargs)
        except Exception as error:
            add_note(error, f"computed on the first device alone, because {why}")
            raise

    def _tell_of_master(self, module: nn.Module, why: str) -> None:
        name = type(module).__name__
        # Only the begin of a reason: shapes at its end may differ in each call.
        if len(self._device_ids) > 1 and self._told.mark((name, why[:40])):
            warn(f"a call of {name} is computed on the first device alone: {why}")

    # --- the call ---

    @contextlib.contextmanager
    def _replicas_called(
        self, module: nn.Module, arguments: Arguments, options: CallOptions, rows: int
    ) -> Iterator[OutputsOfReplicas]:
        """Call all replicas. If the body fails, the call has failed."""
        if torch.is_grad_enabled():
            refuse_without_events(self._device_ids)
        args, kwargs = arguments
        plan = make_plan(rows, self._device_ids, shares=options.shares)
        # In a step, a larger share has more sub-steps.
        plan = plan.in_one_pass()
        transfers = AutogradTransfers()
        seconds = dict.fromkeys(PHASES, 0.0)
        gradients = self.gradients
        with self._workers.exclusive(self._root), gradients.streams.of_call():
            check_links(self._device_ids)
            # Before the refresh, which adds what waits for replaced parameters.
            gradients.end_failed_passes()
            # In a backward pass, where a checkpoint calls again, gradients change.
            if current_graph_task() == -1:
                gradients.forget_dropped()
            start = time.perf_counter()
            self._replicas.refresh(transfers, self._workers)
            seconds["replicate"] = time.perf_counter() - start
            # The backward pass comes later, and is counted in this call's report.
            gradients.transfers = transfers
            division = Division(plan, options.dim, transfers, gradients)
            self._refuse_synchronised(plan)
            generators = Generators([share.device for share in plan.shares])
            end_substep = self._replicas.replica_set.end_substep
            threads = ReplicaThreads(
                self._workers, plan.shares, generators, end_substep, is_of_call=True
            )
            # Such as a checkpoint's, which knows tensors by their order.
            if saved_tensors_hooks() is not None:
                threads.widen(Scope.SUBSTEP)
            start = time.perf_counter()
            writes = RowWrites(self._known_writes)
            try:
                by_share = division.split_call(inputs_from_arguments(args, kwargs))
                seconds["scatter"] = time.perf_counter() - start
                start = time.perf_counter()
                modules = self._replicas.modules_of(module, len(plan.shares))
                is_divided = len(modules) > 1
                self._lost_state.begin(
                    self._replicas, is_divided and options.tells_state
                )
                outputs = self._run(threads, modules, by_share, writes)
                seconds["compute"] = time.perf_counter() - start
                # Before tensors are joined, which makes the first replica's the whole.
                self._lost_state.end(self._replicas, division)
                join_left_tensors(self._replicas, division, self._told)
                report = StepReport(
                    plan,
                    math.nan,
                    seconds,
                    transfers.bytes,
                    transfers.messages,
                    replica_seconds=tuple(threads.seconds),
                )
                # After the call: a look needs the places of numbers in the outputs.
                call = self._call_of_look(module, arguments, outputs, plan, options.dim)
                try:
                    tensors = self._look(call, options)
                except ValueError as error:
                    raise IndivisibleCall(str(error)) from error
                yield OutputsOfReplicas(
                    outputs, division, arguments, tensors, call.lists
                )
            except BaseException as error:
                restore_after(
                    error,
                    generators.rollback,
                    self._replicas.restore_buffers,
                    transfers.synchronize,
                )
                raise
            # The caller may write pinned inputs as soon as the call has ended.
            transfers.synchronize()
            # After the body: if the outputs cannot be joined, nothing was drawn.
            # Warnings come last, because a filter may make them errors.
            generators.commit()
            writes.tell(dict(enumerate(args)) | kwargs)
            self._looks.tell()
            self._lost_state.tell()
            if len(plan.shares) > 1:
                self._tell_of_layers(module)
            # Last: after a failed call it is still that of the call before.
            self.last_report = report

    def _run(
        self,
        threads: ReplicaThreads,
        modules: Sequence[nn.Module],
        by_share: Sequence[Any],
        writes: RowWrites,
    ) -> list[Any]:
        """Call each replica with its share. Returns the output of each share."""

        def work(replica: int, proceed: Proceed) -> Any:
            args, kwargs = by_share[replica]
            arguments = dict(enumerate(args)) | kwargs
            proceed(0)
            with (
                threads.turn(Scope.SUBSTEP, replica, 0),
                writes.watched("forward", "inputs", arguments) as watch,
            ):
                output = _output_of(modules[replica], args, kwargs)
                watch.result = output
            refuse_generators(output)
            return output

        replica_set = self._replicas.replica_set
        leaves: list[Tensor] = []
        # A single replica's gradients are those of all rows. In a backward pass, where
        # a checkpoint calls again, gradients are arriving.
        if len(modules) > 1 and current_graph_task() == -1:
            leaves = replica_set.slots.trained_leaves
        with (
            parameter_writes_refused([replica_set]),
            refused_inner_backward(self._root, leaves),
        ):
            return threads.run(work, range(len(modules)))

    def _call_of_look(
        self,
        module: nn.Module,
        arguments: Arguments,
        outputs: Sequence[Any],
        plan: Plan,
        dim: int,
    ) -> CallOfLook:
        args, kwargs = arguments
        flags = self._replicas.replica_set.flags
        lists = self._lists(arguments)
        return CallOfLook(
            module,
            args,
            kwargs,
            outputs,
            plan,
            dim,
            lists,
            flags,
            module is not self._root,
            self._workers,
        )

    def _look(self, call: CallOfLook, options: CallOptions) -> OutputTensors:
        """Find how outputs are joined, after a look if one is due."""
        if len(call.outputs) == 1:  # it is that of all rows
            return OutputTensors()
        # A checkpoint that computes the call again takes what the first one took.
        is_again = current_graph_task() != -1
        return self._looks.look(call, asks=options.verify and not is_again)

    def known_without_graph(
        self,
        arguments: Arguments,
        outputs: Sequence[Any],
        plan: Plan,
        options: CallOptions,
    ) -> KnownTensors:
        """What is known of the tensors of outputs that were computed without a graph.

        ``outputs`` are those of the micro-batches, in the order of the rows.
        """
        if len(outputs) == 1:
            return KnownTensors()
        call = self._call_of_look(self._root, arguments, outputs, plan, options.dim)
        sizes = [len(part) for part in call.parts()]
        self._tell_of_lists(outputs, sizes, options.dim, self._lists(arguments))
        tensors = self._looks.look(call, asks=options.verify, compares_rows=False)
        numbers: dict[int, NumberWeights] = {}
        for position, rule in tensors.rules.items():
            if rule != BY_ROWS:  # as the join takes it by itself
                numbers[position] = weights_of(rule, arguments, call.parts())
        return KnownTensors(numbers, tensors.entries)

    def tell(self) -> None:
        """Warn, after a call without a graph, of what looks have found."""
        self._looks.tell()

    def _refuse_synchronised(self, plan: Plan) -> None:
        if len(plan.shares) > 1:
            is_there = self._replicas.replica_set.exchanges_statistics()
            refuse_to_wait({_IN_A_CALL: is_there})

    def _tell_of_layers(self, module: nn.Module) -> None:
        """Warn once of layers and hooks that see the rows of one replica."""
        kind = nn.modules.batchnorm._NormBase
        replica_set = self._replicas.replica_set
        if self._builds_of_norms != replica_set.builds:
            self._builds_of_norms = replica_set.builds
            self._norms = [p for p in replica_set.modules if isinstance(p, kind)]
        if not self._norms:  # mostly, and the walk below takes long
            return
        norms = [part for part in modules_in(module) if isinstance(part, kind)]
        has_statistics = any(map(_has_statistics_of_rows, norms))
        if has_statistics and self._told.mark("batch normalisation"):
            warn(
                "the module has batch normalisation, or another layer with running "
                "statistics: such a layer sees the rows of one replica, as in "
                "nn.DataParallel, and your module gets the running statistics of the "
                "first replica; for the statistics of all rows call forward_backward, "
                'with nn.SyncBatchNorm or buffers="batch"'
            )

    # --- the output ---

    def _tell_of_lists(
        self, outputs: Sequence[Any], rows: Sequence[int], dim: int, lists: Lists
    ) -> None:
        """Warn once of values in outputs that become lists, because they are no
        tensors.
        """
        value = first_listed(outputs, rows, dim, lists)
        if value is not None and self._told.mark("lists in outputs"):
            warn(
                f"the module's output contains values of class {type(value).__name__}, "
                "which are no tensors, so you get lists with one value per "
                "micro-batch; return a tensor in their place, with one entry per row, "
                "or without dimensions for the mean over all rows"
            )

    def _joined(self, computed: OutputsOfReplicas, options: CallOptions) -> Any:
        """Join the outputs of all rows, on the master, with a graph."""
        outputs = computed.outputs
        division = computed.division
        if len(outputs) == 1:
            # Its node, too, says when a backward pass begins.
            return nested.map_tensors(lambda t: division.on_master(0, t), outputs[0])
        dim = options.dim
        rows = division.rows
        lists = computed.lists
        self._tell_of_lists(outputs, rows, dim, lists)

        # ``merge`` does not count: a number is known by the first replica's tensor.
        tensors = nested.tensors(outputs[0])
        positions = {id(tensor): number for number, tensor in enumerate(tensors)}

        def join_atoms(atoms: list[Any]) -> Any:
            known = KnownTensors()
            if all(isinstance(atom, Tensor) for atom in atoms):
                position = positions.get(id(atoms[0]), -1)
                kind = computed.tensors.entries.get(position)
                if kind is None and are_divided_alike(atoms, rows, dim):
                    return division.join(atoms)
                if kind is not None:
                    known = KnownTensors(entries={0: kind})  # the piece itself
                rule = computed.tensors.rules.get(position, BY_ROWS)
                numbered = enumerate(atoms)
                atoms = [division.on_master(number, atom) for number, atom in numbered]
                if not atoms[0].ndim:
                    return self._combined(atoms, rule, computed, options)
            # engine.map computes no gradient.
            names_map = not torch.is_grad_enabled()
            return join_rows(
                atoms, dim, rows, rows, lists=lists, names_map=names_map, known=known
            )

        def is_atom(values: Sequence[Any]) -> bool:
            return isinstance(values[0], PackedSequence) or (
                lists != "never" and isinstance(values[0], list)
            )

        def join(values: Sequence[Any]) -> Any:
            return nested.merge(join_atoms, values, is_atom)

        if torch.is_grad_enabled() and has_loss(outputs[0]):
            later = _joined_later(outputs, join)
            if later is not None:
                return later
        return join(outputs)

    def _combined(
        self,
        numbers: Sequence[Tensor],
        rule: NumberRule,
        computed: OutputsOfReplicas,
        options: CallOptions,
    ) -> Tensor:
        """The number of all rows."""
        parts = [range(s.start, s.stop) for s in computed.division.plan.shares]
        weights = weights_of(rule, computed.arguments, parts)
        number = combined_number(numbers, weights)
        is_checked = options.check_finite and number.is_floating_point()
        if is_checked and not bool(torch.isfinite(number)):
            raise FloatingPointError(
                f"a number that the module returns is {float(number.detach())}, and "
                "check_finite=True; check the rows of this call. Nothing was changed"
            )
        return number

    def _lists(self, arguments: Arguments) -> Lists:
        """Whether lists in outputs may have one entry per row."""
        atoms = nested.atoms(arguments)
        markers = [atom for atom in atoms if isinstance(atom, Marker)]
        are_marked = any(marker.num_rows is not None for marker in markers)
        return "if clear" if are_marked else "never"


def _num_rows_of_call(arguments: Arguments, options: CallOptions) -> int:
    args, kwargs = arguments
    parts = {"inputs": args, "keyword inputs": kwargs}
    return count_rows(parts, options.dim, refuse_grad=False)


def _joined_later(
    outputs: Sequence[Any], join: Callable[[Sequence[Any]], Any]
) -> Any | None:
    """Make an output whose entries with rows are joined when they are read.

    Returns ``None`` if that is not possible.
    """
    if len(set(map(type, outputs))) > 1:
        return None
    by_replica = list(map(entries_by_name, outputs))
    names = by_replica[0].keys()
    # Such as an entry that a replica leaves out: the join says which.
    if any(entries.keys() != names for entries in by_replica):
        return None

    def join_with_graph(values: Sequence[Any]) -> Any:
        # It may be read under ``no_grad``, and trained afterwards.
        with torch.inference_mode(False), torch.enable_grad():
            return join(values)

    entries: dict[str, Any] = {}
    joins: dict[str, Callable[[], Any]] = {}
    for name in names:
        values = [of_replica[name] for of_replica in by_replica]
        if needs_join(values[0]):
            joins[name] = partial(join_with_graph, values)
        else:
            entries[name] = join(values)
    return read_later(outputs[0], entries, joins)


def _has_statistics_of_rows(layer: nn.modules.batchnorm._NormBase) -> bool:
    """Whether a layer computes, or keeps, statistics of the rows that it sees."""
    if uses_batch_statistics(layer):
        return True
    return layer.training and bool(layer.track_running_stats)


def _output_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return module(*args, **kwargs)
    except (TypeError, AttributeError) as error:
        # The signature is read after a failure only.
        misfit = misfit_of_dataclass(error, module, args, kwargs)
        if misfit is None and isinstance(error, TypeError):
            inputs = args[0] if len(args) == 1 and not kwargs else args
            misfit = misfit_of_inputs(module, inputs, args, kwargs)
        if misfit is None:
            raise
        raise misfit from error
