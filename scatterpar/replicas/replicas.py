"""Replicas: built once, kept, and updated before every step to match the master."""

from __future__ import annotations

import contextlib
from collections.abc import (
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from itertools import compress, starmap
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scatterpar.devices.bits import same_bits
from scatterpar.devices.coalescing import copy_each, messages, to_host
from scatterpar.devices.copies import to_numbers
from scatterpar.devices.fingerprints import read_together, words_of
from scatterpar.devices.streams import is_async
from scatterpar.devices.transfers import Transfers
from scatterpar.devices.virtual_devices import physical
from scatterpar.devices.write_counters import versions
from scatterpar.errors import restored
from scatterpar.look_steps import is_look_step
from scatterpar.objects.left_data import LeftData
from scatterpar.objects.snapshot import Snapshot, ValueChange
from scatterpar.plan import Share
from scatterpar.replicas.batch_statistics import (
    Layer,
    Records,
    StepStatistics,
    moments_on,
    no_moments,
    pooled,
    record,
)
from scatterpar.replicas.broadcast import (
    Broadcast,
    CopyComparison,
    addresses,
    sharing_storages,
)
from scatterpar.replicas.buffers import RUNNING, BufferValue, RegisteredBuffers
from scatterpar.replicas.compiled import Compiler
from scatterpar.replicas.computed_weights import (
    computed_tensors,
    computing_hooks,
    set_computed,
)
from scatterpar.replicas.large_tensors import LargeCopy, may_stay
from scatterpar.replicas.module_contents import ModuleContents, root_to_replicate
from scatterpar.replicas.module_copy import ModuleCopy
from scatterpar.replicas.parameter_guard import ParameterGuard
from scatterpar.replicas.refused_modules import check_placement, refuse_created
from scatterpar.replicas.shared_buffers import MemoryChanges, memory_changes
from scatterpar.replicas.slots import REQUIRES_GRAD, Slot, Slots
from scatterpar.replicas.sync_batch_norm import (
    Meeting,
    Seat,
    has_own_forward,
    refuse_to_wait,
    seat_layers,
    synchronised_layers,
)
from scatterpar.torch_private.compiler import CompileFn
from scatterpar.torch_private.tensors import version_counters_kept

_TRAINING = attrgetter("training")
# So many buffers of a kind take longer to read than their versions.
_MIN_BUFFERS_WITH_KEPT_WORDS = 16
_HOOKS_OF_MODULE = [
    attrgetter(f"_{kind}_hooks")
    for kind in ("forward", "forward_pre", "backward", "backward_pre")
]


class ReplicaOptions(NamedTuple):
    """The options of replicas.

    Attributes:
        accumulate_dtype: gradients are added in it, unless their own dtype is wider.
        record_statistics: replicas record the statistics of batch normalisation, from
            which the running ones are updated once per step.
        compile_fn: compiles the whole module; ``None`` if it runs as it is.
    """

    accumulate_dtype: torch.dtype | None = None
    record_statistics: bool = False
    compile_fn: CompileFn | None = None


class Replicas:
    """The replicas of a module, one per entry of ``device_ids``, and of its criterion.

    Attributes:
        options: how replicas are made.
        of_model: the replicas of the module.
        replica_sets: ``of_model``, and the replicas of the criterion if it needs any.
        criteria: the criterion of each replica, during a step.
    """

    def __init__(
        self, device_ids: Sequence[torch.device], options: ReplicaOptions
    ) -> None:
        self._device_ids = tuple(device_ids)
        self.options = options
        self.discard()

    def discard(self) -> None:
        """Forget the replicas: threads of an interrupted step may still use them."""
        self.of_model = ReplicaSet(self.options)
        # ``compile=`` is of the module: a criterion that is compiled is so by itself.
        self._of_criterion = ReplicaSet(self.options._replace(compile_fn=None))
        self.replica_sets = [self.of_model]
        self.criteria: list[Any] = []

    def refresh(
        self,
        module: nn.Module,
        criterion: Any,
        transfers: Transfers,
        number: int | None = None,
        *,
        lazily: bool = False,
    ) -> None:
        """Update all replicas to match the user's modules.

        With ``lazily``, whoever calls a replica calls its ``restore`` first.

        A criterion that is a module, or a method of one, is replicated like the model,
        or only ``number`` times, on the first devices. So are the modules and tensors
        that a ``functools.partial`` binds. Any other callable is called unchanged.
        """
        root = root_to_replicate(criterion)
        self.replica_sets = [self.of_model]
        # Tensors that are made in inference mode could not be trained later.
        with torch.inference_mode(False), torch.no_grad():
            self.of_model.follow(module, self._device_ids)
            # A criterion that is a part of the model has its replicas there.
            if root is not None and not self.of_model.contains_all_of(root):
                self._of_criterion.follow(root, self._device_ids[:number])
                self.replica_sets.append(self._of_criterion)
            comparisons: list[CopyComparison] = []
            differences: list[Tensor] = []
            for replica_set in self.replica_sets:
                comparison = replica_set.broadcast.compare()
                comparisons.append(comparison)
                differences.append(comparison.differences)
            # The host waits once, for the model's and the criterion's.
            on_host = to_host(differences)
            for replica_set, comparison, of_set in zip(
                self.replica_sets, comparisons, on_host, strict=True
            ):
                comparison = comparison._replace(differences=of_set)
                replica_set.send(transfers, comparison, lazily=lazily)
            # The criterion's own replicas, or those of the model that it is a part of.
            replicas = self.replica_sets[-1].replicas
            if root is None:
                self.criteria = [criterion] * len(replicas)
            else:
                self.criteria = [replica.copy_of(criterion) for replica in replicas]

    def statistics_after(
        self, active: int, transfers: Transfers
    ) -> StepStatistics | None:
        """The statistics of the step, on the master; ``None`` if none are recorded.

        Only the first ``active`` replicas have a share of the batch.
        """
        if not self.options.record_statistics:
            return None
        layers: list[Layer] = []
        for replica_set in self.replica_sets:
            layers += replica_set.recorded(active, transfers)
        return StepStatistics(layers)

    def exchange_statistics(self) -> bool:
        """Whether an ``nn.SyncBatchNorm`` layer is in training mode."""
        return any(map(ReplicaSet.exchanges_statistics, self.replica_sets))

    def has_compiled(self) -> bool:
        """Whether a module of the model or the criterion runs compiled."""
        return any(each.compiler is not None for each in self.replica_sets)

    def meeting(
        self,
        shares: Sequence[Share],
        transfers: Transfers,
        obstacles: Mapping[str, bool],
    ) -> Meeting | None:
        """Where the replicas of ``shares`` exchange statistics in one pass.

        Returns ``None`` if only one replica has a share. Raises ``ValueError`` if
        replicas cannot wait for each other. ``obstacles`` has what the step knows of
        that, in words.
        """
        if len(shares) == 1:
            return None
        of_model, *of_criterion = self.replica_sets
        in_criterion = any(map(ReplicaSet.exchanges_statistics, of_criterion))
        accelerators = [share.device for share in shares if is_async(share.device)]
        has_own = any(has_own_forward(layer) for layer in of_model.synchronised)
        refuse_to_wait(
            {
                "one in the criterion": in_criterion,
                "a subclass with a forward of its own": has_own,
                "compiled modules": of_model.compiler is not None,
                "two replicas on one accelerator, which take turns": (
                    len(set(accelerators)) < len(accelerators)
                ),
                **obstacles,
            }
        )
        seats = [replica.seat for replica in of_model.replicas]
        numbers = [len(share.micro_batches) for share in shares]
        return Meeting(seats, numbers, transfers)

    def equal_buffers(self) -> list[Tensor]:
        """Large buffers of replica 0 that are as they were: no commit writes them."""
        buffers: list[Tensor] = []
        for replica_set in self.replica_sets:
            # There are none after threads were abandoned, as in a look.
            for replica in replica_set.replicas[:1]:
                for large in replica.large:
                    if not large.find_difference():
                        buffers.append(large.copy)
        return buffers

    def end_substep(self) -> None:
        """Let others compile: the sub-step of this thread's replica has ended."""
        for replica_set in self.replica_sets:
            replica_set.end_substep()

    def clear_step_state(self) -> None:
        """Drop the replicas' gradients and the references to the user's criterion."""
        self.criteria = []
        for replica_set in self.replica_sets:
            replica_set.clear_gradients()

    @contextlib.contextmanager
    def values_remembered(self) -> Iterator[None]:
        """In the body a look calls the module: remember the values of parameters."""
        for replica_set in self.replica_sets:
            replica_set.guard.remember_values(_mode_of(replica_set))
        try:
            yield
        except BaseException:
            for replica_set in self.replica_sets:
                replica_set.guard.forget_values()
            raise


class ReplicaSet:
    """The replicas of one root: a module, or a partial that binds modules or tensors.

    On the master's device, parameters share the master's storage. Every other device
    has one copy of them, which its replicas share. Each replica has private buffers.
    ``follow`` and ``send`` make all replicas match the master, whatever the user has
    changed in the module:

    =========================================  ======================================
    values of tensors                          sent in ``send``
    numbers, strings and flags                 copied to the replicas that there are
    modules, parameters, containers, shapes    new replicas
    =========================================  ======================================

    Attributes:
        options: how replicas are made.
        root: what is replicated, as of the last ``follow``; ``None`` before the first.
        device_ids: one entry per replica.
        contents: what the root consists of.
        slots: the places of the user's tensors in every replica.
        synchronised: the user's ``nn.SyncBatchNorm`` layers.
        computed: the user's modules with weights that hooks compute, and the hooks.
        state: the user's containers as the replicas follow them; ``None`` until the
            replicas are built, and again if building fails.
        flags: a hash of all switches, such as ``training``.
        replicas: the copies, the master's first.
        broadcast: copies of the tensors in every memory, which replicas share.
        compiler: compiles the replicas' calls; ``None`` if no module is compiled.
        guard: refuses forward passes that write parameters.
        builds: how often replicas were made.
        sends: how often values were sent by ``send``.
        num_hooks: the number of hooks on modules: replicas are made again if one comes.
        left_data: what calls have left in the user's modules since the replicas were
            made, which lack copies of some of it; ``None`` if nothing.
    """

    def __init__(self, options: ReplicaOptions) -> None:
        self.options = options
        self.root: Any = None
        self.device_ids: tuple[torch.device, ...] = ()
        self.contents = ModuleContents(())
        self.slots = Slots(self.contents, options.accumulate_dtype)
        self.synchronised: Sequence[nn.SyncBatchNorm] = ()
        self.computed: Sequence[tuple[nn.Module, Any]] = ()
        self.state: Snapshot | None = None
        self.flags = 0
        self.replicas: list[Replica] = []
        self.broadcast = Broadcast(self.contents, ())
        self.compiler: Compiler | None = None
        self.builds = 0
        self.sends = 0
        # Since the replicas were made, or a mode changed.
        self._sends_in_mode = 0
        # Where the user's tensors were stored when the replicas were reset.
        self._places_of_reset: Sequence[Tensor] = ()
        self.num_hooks = 0
        self.left_data: LeftData | None = None

    @property
    def lacks_data(self) -> bool:
        """Whether replicas have data of calls, which a step copies."""
        return self.left_data is not None

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The user's modules, in the order of each replica's."""
        return self.contents.module_list

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The user's tensors, by number."""
        return self.contents.tensor_list

    def follow(
        self,
        root: Any,
        device_ids: tuple[torch.device, ...],
        share: Callable[[], bool] | None = None,
    ) -> None:
        """Make the replicas match ``root``, except in values of tensors.

        Args:
            root: what is copied.
            device_ids: one entry per replica.
            share: for replicas that may share data with the user's containers. Called
                if more has changed there than plain values. Returns whether the
                replicas share what they lacked, so that no new ones are needed.
        """
        # By identity: an equal module has other parameters.
        is_new = root is not self.root or device_ids != self.device_ids
        is_new |= self.lacks_data and share is None
        self.root = root
        self.device_ids = device_ids
        if is_new or not self._update_in_place(asks_places=True, share=share):
            self._build()
        are_same = [set_computed(module, hook) for module, hook in self.computed]
        # They are stored elsewhere now, and perhaps in another dtype or layout.
        if are_same and not (all(are_same) and self.broadcast.adopt_storages()):
            self._build()

    def forget(self) -> None:
        """Let the next ``follow`` make new replicas."""
        self.state = None

    def follow_values(self) -> None:
        """Copy changed plain values, such as flags, and which tensors require grad.

        Anything else that has changed waits for the next ``follow``.
        """
        # Tensors that are made in inference mode could not be trained later.
        with torch.inference_mode(False), torch.no_grad():
            self._update_in_place(asks_places=False)

    def send(
        self, transfers: Transfers, comparison: CopyComparison, *, lazily: bool
    ) -> None:
        """Send the values of tensors to all replicas, and reset these.

        Call it under ``torch.no_grad()``.
        """
        # Before the replicas copy their buffers from these.
        self.broadcast.send_changed(transfers, comparison)
        self._sends_in_mode += 1
        self.sends += 1
        reads_all = is_look_step(self._sends_in_mode)
        places = self.broadcast.places
        # The user may have exchanged the storage of a parameter, which replicas read.
        lazily &= places is self._places_of_reset
        for replica in self.replicas:
            for large in replica.large:
                large.reads_all = reads_all
            replica.reset(lazily=lazily)
        self._places_of_reset = places

    def exchanges_statistics(self) -> bool:
        """Whether one of its ``nn.SyncBatchNorm`` layers is in training mode."""
        return any(map(_TRAINING, self.synchronised))

    def contains_all_of(self, root: Any) -> bool:
        """Whether the modules and tensors of ``root`` are all replicated here."""
        modules = self.contents.modules.keys()
        if isinstance(root, nn.Module):
            return id(root) in modules
        parts = ModuleContents((root,))
        tensors = self.contents.tensors.keys()
        return modules >= parts.modules.keys() and tensors >= parts.tensors.keys()

    def gradients_of(self, replica: int) -> dict[int, Tensor]:
        """The gradients that a replica has accumulated, by number of the tensor."""
        tensors = self.replicas[replica].tensors
        gradients: dict[int, Tensor] = {}
        for slot in self.slots.trained:
            gradient = tensors[slot.number].grad
            if gradient is not None:
                # Those without one are left out: the parameter may be unused on all
                # replicas.
                gradients[slot.number] = gradient
        return gradients

    def end_substep(self) -> None:
        """Let others compile: the sub-step of this thread's replica has ended."""
        if self.compiler is not None:
            self.compiler.release()

    def clear_gradients(self) -> None:
        """Drop the replicas' gradients."""
        for replica in self.replicas:
            for tensor in map(replica.tensors.__getitem__, self.slots.trained_numbers):
                # Not zeros: the next step shall see which tensors are used.
                tensor.grad = None

    def _update_in_place(
        self, asks_places: bool, share: Callable[[], bool] | None = None
    ) -> bool:
        """Copy changed plain values, and set which tensors require grad. If it
        ``asks_places``, tensors whose storage was exchanged are found.

        Returns ``False`` if anything else has changed, and is not shared by ``share``,
        so that new replicas are needed.
        Plain values are numbers, strings and flags: schedules change these at every
        step.
        """
        # No state: nothing was built yet, or building failed.
        if self.state is None:
            return False
        # Before ``adopt_storages``: whether the slots, too, are those of the tensors.
        forms = self.broadcast.forms
        have_same_forms = forms is not None and forms.are_same()
        if asks_places and not self.broadcast.adopt_storages(
            have_same_forms=have_same_forms
        ):
            return False
        if not self.state.unchanged():
            changes = self.state.value_changes()
            if changes is not None:
                self.state.apply_changes(changes)
                for replica in self.replicas:
                    replica.apply_changes(changes)
            elif share is None or not share():
                return False
            # Switches such as ``training`` change what a forward pass writes; a rate
            # does not.
            flags = self.state.flags()
            if flags != self.flags:
                # A forward pass in another mode may write what it did not write before.
                self._sends_in_mode = 0
                self.broadcast.expect_no_change()
            self.flags = flags
            self._forget_compiled_calls()
        if have_same_forms:
            return True
        tensors = self.contents.tensor_list
        if list(map(REQUIRES_GRAD, tensors)) != self.slots.requires_grad:
            self.broadcast.forms = None  # those that the slots followed before
            self.slots = Slots(self.contents, self.options.accumulate_dtype)
            self._set_requires_grad()
        # A backward pass has other modes than calls, so their forms would differ.
        if asks_places:
            self.broadcast.remember_forms()
        return True

    def _set_requires_grad(self) -> None:
        """Set which tensors of the replicas require grad."""
        self._forget_compiled_calls()
        for replica in self.replicas:
            replica.set_requires_grad(self.slots.all)

    def _forget_compiled_calls(self) -> None:
        if self.compiler is not None:
            self.compiler.forget()

    def _build(self) -> None:
        self.state = None
        self.builds += 1
        # Before anything is copied: the error names the user's module.
        check_placement(self.root, self.device_ids)
        self._find_contents()
        # If only containers have changed, the copies in other memories stay.
        if not self.broadcast.adopt(self.contents, self.device_ids):
            self.broadcast = Broadcast(self.contents, self.device_ids)
        if self.contents.compiled and self.compiler is None:
            self.compiler = Compiler()
        self.replicas = [Replica(self, device) for device in self.device_ids]
        self._sends_in_mode = 0
        self.left_data = None
        first = self.replicas[0]
        self._registered = RegisteredBuffers(self.modules, first.modules, first.copy_of)
        self.num_hooks = _num_hooks(self.modules)
        replicas = self.replicas
        # New ones have passed no check in any mode.
        self.guard = ParameterGuard(
            self.broadcast,
            [(replica.device, replica.tensors) for replica in replicas],
            lambda: [replica.was_called for replica in replicas],
        )
        self._set_requires_grad()
        # Last: until then the replicas count as not built.
        self.state = Snapshot(self.contents.containers, self.contents.facts)
        self.flags = self.state.flags()

    def _find_contents(self) -> None:
        """Find all that the root holds."""
        self.contents = ModuleContents((self.root,), physical(self.device_ids[0]))
        self.slots = Slots(self.contents, self.options.accumulate_dtype)
        # Searched once: each step asks whether one of them trains.
        self.synchronised = synchronised_layers(self.modules)
        self.computed = computing_hooks(self.modules)
        if self.options.compile_fn is not None:
            # Not if the user has compiled the root, perhaps in another way.
            compiled = self.root, self.options.compile_fn
            self.contents.compiled.setdefault(id(self.root), compiled)

    def _refuse_created(self) -> None:
        for replica in self.replicas:
            refuse_created(replica.root, replica.tensors)

    def _has_buffers_as_built(self) -> bool:
        """Whether no forward pass has registered or replaced a buffer."""
        first = self.replicas[0]
        registered = self._registered
        # A replica whose sub-steps were all replayed has run no Python.
        watched = registered.of_all if first.was_called else registered.of_modules
        if watched.unchanged():
            return True
        first.restore()
        return False

    def buffers_after(self) -> tuple[list[BufferValue], MemoryChanges]:
        """Replica 0's buffers after a step, and those of them that share memory with
        others than in the user's modules.

        Without running statistics that are updated once per step.
        """
        first = self.replicas[0]
        buffers = self._registered.values
        changes: MemoryChanges = {}
        is_as_built = self._has_buffers_as_built()
        if not is_as_built:
            buffers = self._registered.values_after(first.copy_of)
        if not is_as_built or not first.has_buffers_in_place():
            modules = self.contents.module_list
            exchanged = first.exchanged()
            changes = memory_changes(modules, first.modules, first.copy_of, exchanged)
        if not first.records:
            return buffers, changes
        # Running statistics of layers that record come from ``recorded``.
        recording = {id(self.modules[number]._buffers) for number in first.records}
        kept = [
            (registry, name, value)
            for registry, name, value in buffers
            if id(registry) not in recording or name not in RUNNING
        ]
        return kept, changes

    def recorded(self, active: int, transfers: Transfers) -> list[Layer]:
        """Each recording layer, with the moments of the first ``active`` replicas."""
        replicas = self.replicas[:active]
        master = replicas[0].device
        by_replica = [
            moments_on(master, replica.records, replica.device, transfers)
            for replica in replicas
        ]
        layers: list[Layer] = []
        for number in replicas[0].records:
            layer: Any = self.modules[number]
            # A layer without running statistics has nothing to update.
            if layer.running_mean is not None:
                moments = [
                    of_replica[number]
                    for of_replica in by_replica
                    if number in of_replica
                ]
                moments = moments or [no_moments(layer.running_mean)]
                layers.append((layer, pooled(moments)))
        return layers


@contextlib.contextmanager
def parameter_writes_refused(
    replica_sets: Sequence[ReplicaSet], *, second_pass: bool = False
) -> Iterator[None]:
    """Refuse forward passes in the body that write or create parameters.

    Each of two passes has modes of its own.
    """
    with contextlib.ExitStack() as stack:
        for replica_set in replica_sets:
            stack.enter_context(
                replica_set.guard.read_only(
                    _mode_of(replica_set, second_pass=second_pass),
                    replica_set._refuse_created,
                )
            )
        yield


def _num_hooks(modules: Sequence[nn.Module]) -> int:
    """The number of hooks on modules."""
    return sum(sum(map(len, map(hooks_of, modules))) for hooks_of in _HOOKS_OF_MODULE)


def _mode_of(replica_set: ReplicaSet, *, second_pass: bool = False) -> Hashable:
    """The mode of a pass: a module may write parameters in some modes only."""
    return replica_set.flags, second_pass


class Replica(ModuleCopy):
    """A working copy of the modules, with its tensors in the order of the master's.

    Attributes:
        device: where it is.
        tensors: its tensors. Parameters use shared memory, buffers have their own.
        large: those of its buffers that are copied only if they are stale.
        modules: the copies of the modules, in the order of the user's.
        records: what batch normalisation has recorded in this step.
        seat: where its synchronised batch normalisation meets that of other replicas.
        state: its containers, and which tensors require grad, as of the last ``reset``.
        was_called: whether it may have been called since the last ``reset``: from
            ``restore``, which has compared the containers with ``state``. Calls with a
            graph set it after ``reset_written``.
    """

    def __init__(self, replica_set: ReplicaSet, device: torch.device) -> None:
        self.device = device
        storages = replica_set.broadcast.storages(device)
        sources = replica_set.broadcast.at(device)
        self._all_sources = sources
        # With the version counters of the storages: a backward pass raises if another
        # replica's call has written what it needs.
        aliases = list(map(Tensor.detach, storages))
        # Of the user's class: optimizers of libraries, and isinstance in forward, ask
        # for it.
        self.tensors = list(map(parameter_like, replica_set.tensors, aliases))
        self._places = list(zip(self.tensors, storages, strict=True))
        # Buffers: each replica has its own, and copies their values before each step.
        self._private: list[Tensor] = []
        self._sources: list[Tensor] = []
        self.large: list[LargeCopy] = []
        self._large_numbers: list[int] = []
        self._own: list[int] = []  # both kinds, by number
        self._source_of: dict[int, Tensor] = {}
        self._own_versions: Sequence[int]  # as of the last ``reset``
        for number, tensor in enumerate(self.tensors):
            source = sources[number]
            if storages[number] is source:  # a parameter in shared memory
                continue
            self._own.append(number)
            if may_stay(tensor, source):
                self.large.append(LargeCopy(tensor, source))
                self._large_numbers.append(number)
            else:
                self._source_of[number] = source
                self._private.append(tensor)
                self._sources.append(source)
        self._own_tensors = [self.tensors[number] for number in self._own]
        self._own_places = [self._places[number] for number in self._own]
        self._own_addresses = addresses(self._own_tensors)
        # Of all tensors; empty if they may have changed, or a tensor has no memory.
        self._addresses: Sequence[int] = ()
        self._own_versions = [-1] * len(self._own)
        # Cut once: ``reset`` puts exchanged storages back, so shapes stay.
        self._messages = messages(dict(enumerate(self._private)))
        # A subclass may refuse to be read as words, and hooks compute weights in other
        # dtypes than those of the copies.
        computed = computed_tensors(replica_set.computed)
        compared: dict[int, Tensor] = {}
        for number, source in self._source_of.items():
            if (
                type(source) is Tensor
                and id(replica_set.tensors[number]) not in computed
            ):
                compared[number] = source
        # Only ``Broadcast`` writes copies. Torch counts each write, unless it is of
        # another tensor in the same memory.
        are_copies = device != replica_set.broadcast.memories[0]
        sharing = sharing_storages(sources).keys()
        self._read_together: list[_ReadTogether] = []
        for numbers in read_together(compared):
            own = [self.tensors[number] for number in numbers]
            of_group = [self._source_of[number] for number in numbers]
            # Else their words would need as much memory as they do.
            are_many = len(numbers) >= _MIN_BUFFERS_WITH_KEPT_WORDS
            keeps_words = are_copies and are_many and sharing.isdisjoint(numbers)
            group = _ReadTogether(numbers, own, of_group, keeps_words=keeps_words)
            self._read_together.append(group)
        self._uncompared = self._source_of.keys() - compared.keys()
        super().__init__(replica_set.contents, self.tensors, replica_set.compiler)
        self.modules = [self.copy_of(module) for module in replica_set.modules]
        records_own = replica_set.options.record_statistics
        self.records: Records = record(self.modules) if records_own else {}
        self.seat = Seat(device)
        seat_layers(self.seat, self.root, self.modules, records_own=records_own)
        tensors = self.tensors  # not `self`, which would be a cycle
        self.state = Snapshot(
            self.containers, lambda: list(map(REQUIRES_GRAD, tensors))
        )
        self._slots: Sequence[Slot] = replica_set.slots.all

        self.was_called = True

    def reset(self, *, lazily: bool = False) -> None:
        """Undo what a forward pass rebound, and copy the sources' buffers.

        Of large buffers those that may have changed.

        Call it under ``torch.no_grad()``. A forward pass or the user may exchange the
        storage of a tensor (``p.data =``, ``p.set_``, ``flatten_parameters``), or set
        ``requires_grad``. With ``lazily``, what is no buffer's storage waits for
        ``restore``: a replica whose sub-steps are all replayed runs no Python.
        """
        if self.was_called or not lazily:
            self._addresses = ()
        has_buffers_in_place = lazily and self.has_buffers_in_place()
        self.was_called = False
        if not has_buffers_in_place:
            self.restore()
        own = self._own_tensors
        if own:
            # A graph of an earlier call stays valid if it has saved what nobody has
            # written: writes to the sources are seen by the graph of the first replica.
            present = versions(own)
            pairs = zip(own, present, self._own_versions, strict=True)
            unwritten = [tensor for tensor, now, before in pairs if now == before]
            # After the storages are back: values go to where the replica reads them.
            with version_counters_kept(unwritten):
                copy_each(self._private, self._sources, self._messages)
                for large in self.large:
                    if large.find_difference():
                        large.copy_source()
            self._own_versions = versions(own)
        self.clear_records()

    def restore(self) -> None:
        """Undo what a forward pass rebound, if ``reset`` has left that."""
        if self.was_called:
            return
        # Mostly nothing was rebound, and the question is cheap.
        if not self.is_as_reset():
            with torch.inference_mode(False), torch.no_grad():
                self._rebind()
        self.was_called = True

    def _rebind(self) -> None:
        for tensor, storage in self._places:
            if not tensor.is_set_to(storage):
                tensor.data = storage
        self.set_requires_grad(self._slots)
        self.state.restore()

    def reset_written(
        self,
        changed: Set[int],
        *,
        uncounted: Set[int],
        reads_values: bool,
        is_complete: bool,
        may_be_written: bool,
    ) -> None:
        """Copy the sources of buffers. If the replica ``may_be_written``, also undo
        what forward passes have rebound and written.

        Copied are those of ``changed``, by number, and those that the replica has
        written; with ``reads_values`` all that differ from their sources. If
        ``changed`` ``is_complete``, no small buffer has to be read for that. A graph
        that has saved a buffer stays valid, except for values that the replica itself
        has written and that are overwritten here: then torch refuses its backward pass.
        Those of ``uncounted`` are running statistics, whose writes torch does not
        count, either.
        """
        stale: set[int] = set(changed)
        counted: set[int] = set()
        if may_be_written:
            is_same = self.state.unchanged()
            # Nothing is written where a replica reads, unless something has changed.
            if changed or reads_values:
                is_same = is_same and self.is_in_place()
            if not is_same:
                self._rebind()
            present = versions(self._own_tensors)
            if present != self._own_versions:
                pairs = zip(self._own, present, self._own_versions, strict=True)
                own_writes = {number for number, now, before in pairs if now != before}
                stale |= own_writes
                counted.update(filter(self._may_differ, own_writes - uncounted))
        large: dict[int, LargeCopy] = {}
        for number, large_copy in zip(self._large_numbers, self.large, strict=True):
            if number in stale or (reads_values and large_copy.find_difference()):
                large[number] = large_copy
        if reads_values and not is_complete:
            stale |= self._differing()
        numbers = sorted(stale & self._source_of.keys())
        overwritten = {*numbers, *large}
        if not overwritten:
            return
        kept = [self.tensors[number] for number in overwritten - counted]
        with version_counters_kept(kept):
            targets = [self.tensors[number] for number in numbers]
            sources = [self._source_of[number] for number in numbers]
            are_all = len(numbers) == len(self._private)
            copy_each(targets, sources, self._messages if are_all else None)
            for large_copy in large.values():
                large_copy.copy_source()
        self._own_versions = versions(self._own_tensors)

    def _differing(self) -> set[int]:
        """The numbers of small buffers that may have other bits than their sources."""
        # On an accelerator the host would wait for the answer.
        if is_async(self.device):
            return set(self._source_of)
        differing = set(self._uncompared)
        for group in self._read_together:
            differing |= group.differing()
        return differing

    def _may_differ(self, number: int) -> bool:
        """Whether the host does not know that a buffer has its source's values."""
        # On an accelerator the host would wait for the answer.
        if is_async(self.device):
            return True
        return not same_bits(self.tensors[number], self._all_sources[number])

    def own_tensors(self) -> dict[int, Tensor]:
        """The tensors that no other replica reads, such as buffers, by number."""
        return {number: self.tensors[number] for number in self._own}

    def affects_others(self) -> bool:
        """Whether outputs of other replicas depend on its rows in this sub-step."""
        return self.seat.is_shared()

    def apply_changes(self, changes: Iterable[ValueChange]) -> None:
        """Replace plain values, as the user has in the original's containers."""
        copied = [
            change._replace(value=self.copy_of(change.value)) for change in changes
        ]
        self.state.apply_changes(copied)

    def clear_records(self) -> None:
        """Forget what modules have recorded in this step."""
        for number in self.records:
            self.records[number] = []

    @contextlib.contextmanager
    def isolated(self) -> Iterator[None]:
        """In the body, the replica begins as it was after the last ``reset``.

        Then its present state is restored: the registered buffers, the values of
        private tensors, and the records. A graph that has saved private tensors, such
        as the statistics of batch normalisation in eval mode, stays valid.
        """
        self.restore()
        with version_counters_kept(self._private):
            containers: list[Any] = [self.records]
            for module in self.modules:
                containers += [module._buffers, module._non_persistent_buffers_set]
            # The containers, not only values: a body may register or replace buffers.
            registered = Snapshot(containers)
            with torch.inference_mode(False), torch.no_grad():
                private = list(self._private)
                for large in self.large:
                    # Others are not overwritten by the body's own ``reset``.
                    if large.find_difference():
                        private.append(large.copy)
                saved = list(map(Tensor.clone, private))
                self.reset()

            def restore() -> None:
                with torch.inference_mode(False), torch.no_grad():
                    self.reset()
                    # After ``reset``, which puts the storages back that the body
                    # exchanged.
                    copy_each(private, saved)
                registered.restore()

            with restored(restore):
                yield

    def exchanged(self) -> set[int]:
        """The ``id`` of tensors with another storage than after the last ``reset``."""
        return {
            id(tensor)
            for tensor, storage in self._places
            if not tensor.is_set_to(storage)
        }

    def addresses(self) -> Sequence[int]:
        """Where its tensors begin in memory, as of the last ``reset``."""
        # Nobody moves those of a replica that was not called.
        if not self._addresses:
            self._addresses = addresses(self.tensors)
        # Beside one without memory, such as an empty buffer, the others have theirs.
        return self._addresses or list(map(Tensor.data_ptr, self.tensors))

    def is_as_reset(self) -> bool:
        """Whether forward passes have rebound nothing since the last ``reset``."""
        return self.state.unchanged() and self.is_in_place()

    def is_in_place(self) -> bool:
        """Whether its tensors are stored as after the last ``reset``."""
        return all(starmap(Tensor.is_set_to, self._places))

    def has_buffers_in_place(self) -> bool:
        """Whether the tensors that no other replica reads are stored as then."""
        # If no forward pass may have changed shapes: it takes a fifth of the time.
        if not self.was_called and self._own_addresses:
            return addresses(self._own_tensors) == self._own_addresses
        return all(starmap(Tensor.is_set_to, self._own_places))

    def set_requires_grad(self, slots: Sequence[Slot]) -> None:
        """Set which tensors require grad, and the dtypes of their gradients."""
        self._slots = slots
        for slot, tensor in zip(slots, self.tensors, strict=True):
            # A forward pass may have written a buffer in place, which gives it a graph.
            if tensor.is_leaf:
                is_trained = slot.sum_dtype is not None
                tensor.requires_grad_(is_trained)
                if is_trained:
                    tensor.grad_dtype = slot.sum_dtype


class _ReadTogether:
    """Small buffers of one dtype and shape, which are compared with their sources.

    Args:
        numbers: their numbers.
        tensors: the replica's.
        sources: where their values come from.
        keeps_words: whether the words of the sources are kept until torch has counted a
            write to one of the sources.
    """

    def __init__(
        self,
        numbers: list[int],
        tensors: list[Tensor],
        sources: list[Tensor],
        *,
        keeps_words: bool,
    ) -> None:
        self._numbers = numbers
        self._tensors = tensors
        self._sources = sources
        self._keeps_words = keeps_words
        self._words_of_sources: Tensor | None = None
        self._versions: list[int] = []  # of the sources when their words were read

    def differing(self) -> set[int]:
        """The numbers of those with other bits than their sources."""
        words = words_of(self._tensors)
        words_of_sources = self._present_words_of_sources()
        if torch.equal(words, words_of_sources):
            return set()
        are_different = to_numbers((words != words_of_sources).any(1))
        return set(compress(self._numbers, are_different))

    def _present_words_of_sources(self) -> Tensor:
        if not self._keeps_words:
            return words_of(self._sources)
        present = versions(self._sources)
        if self._words_of_sources is None or present != self._versions:
            self._words_of_sources = words_of(self._sources)
            self._versions = present
        return self._words_of_sources


def parameter_like(original: Tensor, values: Tensor) -> Tensor:
    """A parameter of the original's class that uses the memory of ``values``.

    If the original is no parameter, ``values`` itself.
    """
    if not isinstance(original, nn.Parameter):
        return values
    # A tensor subclass may count as a parameter by its ``_is_param`` alone.
    kind = type(original) if issubclass(type(original), nn.Parameter) else nn.Parameter
    # Not the constructor of a subclass, which may need more arguments.
    return nn.Parameter.__new__(kind, values, requires_grad=False)
