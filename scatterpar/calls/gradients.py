"""The gradients of replicas: on their way to the user's parameters, or waiting.

The replicas' parameters are outputs of nodes whose inputs are the user's parameters.
Replica 0 computes with the user's parameters themselves::

    the user's p ---+--------------------------- replica 0 ---+
                    +--- Connection --- copy --- replica 1 ---+--- joined outputs
                                   +--- copy --- replica 2 ---+

    in the node's backward pass
      outside of no_sync()     the sum of what waits and what arrives, to p
      inside of it             what arrives waits at its replica; p gets replica 0's

Autograd runs the node after all calls of a replica in this pass, and the hooks of p
after the node: once, with the whole gradient. The node has no values, so it serves all
calls until the modules change.

A reentrant checkpoint inside of a module runs backward passes of its own, with a part
of a replica's gradients each. These wait until the pass around them ends.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from scatterpar.calls.streams_of_calls import StreamsOfCalls
from scatterpar.devices import coalescing
from scatterpar.devices.bits import same_bits
from scatterpar.devices.coalescing import (
    copy_each,
    has_foreach,
    iter_copies,
    tree_pairs,
)
from scatterpar.devices.copies import to_numbers
from scatterpar.devices.streams import is_async
from scatterpar.devices.transfers import Transfers
from scatterpar.devices.write_counters import version, versions
from scatterpar.errors import Told, warn
from scatterpar.replicas.replicas import ReplicaSet
from scatterpar.replicas.slots import REQUIRES_GRAD, Slot
from scatterpar.step.commit import attach
from scatterpar.step.reduce import sum_in_order
from scatterpar.threads.workers import Workers
from scatterpar.torch_private.autograd import (
    HOOKS_AFTER,
    HOOKS_BEFORE,
    at_end_of_pass,
    backward,
    current_graph_task,
    drop_accumulator,
    executes,
    node_of,
)
from scatterpar.torch_private.compiler import never_compiled
from scatterpar.torch_private.tensors import version_counters_kept

_GRADIENT_OF = attrgetter("grad")
_NUM_PROBES = 4  # one may be of zeros, which unscaling leaves
# By replica (all except the first), the gradients of the user's tensors, by ``id``.
ByReplica = list[dict[int, Tensor]]
_MOMENTS = 20
_MOMENT_SECONDS = 0.001


@dataclass
class _Pass:
    """A backward pass that has reached outputs of calls.

    Attributes:
        is_synced: whether it is outside of ``no_sync``.
        is_selected: whether it computes the gradients of selected tensors, as
            ``autograd.grad`` does.
        arrived: gradients that wait when it has ended.
        unaccumulated: gradients that have waited, and are parts of sums that autograd
            has not accumulated yet: they wait again if the pass fails.
        token: autograd drops what it refers to when the pass has ended, or has raised.
    """

    is_synced: bool
    is_selected: bool
    arrived: ByReplica
    unaccumulated: ByReplica
    token: weakref.ref[_AutogradToken]

    def is_alive(self) -> bool:
        """Whether autograd, in some thread, still runs the pass."""
        return self.token() is not None


class _AutogradToken:
    """What autograd alone refers to, as long as it runs a backward pass."""


@dataclass(slots=True)
class _Mark:
    """The user's ``.grad`` as autograd has left it.

    Attributes:
        gradient: the tensor.
        version: how often it was written.
        is_changed: true once autograd finds that the user has written it, or has
            assigned another one.
    """

    gradient: Tensor | None
    version: int = 0
    is_changed: bool = False


@dataclass
class _Bucket:
    """Tensors of the user's that one node connects with their copies."""

    gradients: CallGradients
    tensors: list[Tensor]
    dtypes: list[torch.dtype]  # in which gradients are added
    by_key: dict[int, Tensor] = field(init=False)  # the tensors by ``id``

    def __post_init__(self) -> None:
        self.by_key = {id(tensor): tensor for tensor in self.tensors}


class CallGradients:
    """The gradients of one module's replicas, except the first.

    Attributes:
        backward_probe: a leaf that all joined outputs depend on. ``backward()`` gets as
            far as this leaf, and ``autograd.grad`` of other tensors does not: so a
            backward pass finds which of both it is.
        is_synced: whether backward passes add gradients to the user's parameters:
            false in the body of ``no_sync``.
        were_added: true from an addition, or the begin of a backward pass outside of
            ``no_sync``, until a call has read the parameters again.
        transfers: counts the copies of the next sums.
        streams: those of calls, on which gradients are added.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        # Nobody selects it: a pass that does not execute it is an ``autograd.grad``.
        with torch.inference_mode(False):  # in which the user may make an engine
            self.backward_probe = torch.zeros((), requires_grad=True)
            self._probe_node = node_of(self.backward_probe)
        self.is_synced = True
        self.were_added = False
        self.transfers = Transfers()
        self.streams = StreamsOfCalls(devices)
        self._devices = list(devices)
        self.blocks = _blocks(len(self._devices))
        self._passes: dict[int, _Pass] = {}
        self._passes_lock = threading.RLock()
        self._other_pass = -1  # a pass of none of the calls, which ends by adding
        self._waiting: ByReplica = self._nothing()
        self._tensors: dict[int, Tensor] = {}  # the user's, for which gradients wait
        self._marks: dict[int, _Mark] = {}
        self._hooks: dict[int, RemovableHandle] = {}
        self._told = Told()
        # A few of replica 0's gradients, by the tensor's ``id``, and their values as
        # autograd has left them.
        self._probes: dict[int, tuple[Tensor, Tensor]] = {}
        self._probed: set[int] = set()
        self._num_compared = 0  # marks, of which these are the smallest
        # What is connected at present. The copies' graph refers to this object, so it
        # does not refer to them: such a cycle is never collected.
        self._replica_set: weakref.ref[ReplicaSet] | None = None
        self._slots: Sequence[Slot] = ()
        self._alone: frozenset[int] = frozenset()
        self._copies: list[weakref.ref[Tensor]] = []
        _listen_before_steps()
        _all_gradients.add(self)

    # --- the graph ---

    def connect(self, replica_set: ReplicaSet, workers: Workers | None = None) -> None:
        """Let the replicas' tensors depend on the user's, unless they do.

        Autograd prefers nodes that their thread has made later. So the nodes are made
        in the first replica's thread, of ``workers``, before its other nodes: what
        replica 0 adds to the user's tensors arrives first, and sums have the same bits
        every time. Without ``workers`` the present thread makes them.
        """
        slots = replica_set.slots.all
        trained = replica_set.slots.trained
        # A backward pass that does not use these must not reach them: autograd would
        # call their hooks without a gradient, or run a graph that it has freed.
        have_hooks = self._have_hooks([slot.tensor for slot in trained])
        alone = frozenset(
            slot.number
            for slot, has_hooks in zip(trained, have_hooks, strict=True)
            if not slot.is_leaf or has_hooks
        )
        if slots is self._slots and alone == self._alone:
            return
        # In inference mode torch leaves the copies connected, and says nothing.
        with torch.inference_mode(False):
            self._connect_anew(replica_set, alone, workers)

    def _connect_anew(
        self, replica_set: ReplicaSet, alone: frozenset[int], workers: Workers | None
    ) -> None:
        """As ``connect``, where those of ``alone`` have a node each."""
        slots = replica_set.slots.all
        trained = replica_set.slots.trained
        replicas = replica_set.replicas[1:]
        self.disconnect(replica_set)
        # Those of a parameter that is frozen for a while wait for the next sum.
        self._add_lost({id(slot.tensor) for slot in slots})
        connections: list[tuple[_Bucket, list[Tensor]]] = []
        for numbers in _buckets(trained, alone):
            originals = [slots[number].tensor for number in numbers]
            dtypes = [slots[number].sum_dtype or torch.float32 for number in numbers]
            copies: list[Tensor] = []
            for replica in replicas:
                copies += [replica.tensors[number] for number in numbers]
            connections.append((_Bucket(self, originals, dtypes), copies))
            self._copies += map(weakref.ref, copies)
        connect_all = partial(_connect_all, connections)
        if workers is None or not replicas:
            connect_all()
        else:
            # Without a limit a single call runs in the caller's thread.
            master = self._devices[:1]
            workers.parallel_apply([connect_all], [()], master, seconds=math.inf)
        self._replica_set = weakref.ref(replica_set)
        self._slots = slots
        self._alone = alone

    def disconnect(self, replica_set: ReplicaSet) -> None:
        """Make the replicas' tensors leaves again, for steps."""
        if self._replica_set is None and not self._copies:
            return  # as in a loop of steps alone
        present: set[int] = set()
        for replica in replica_set.replicas[1:]:
            present.update(map(id, replica.tensors))
        for reference in self._copies:
            copy = reference()
            # Those of earlier replicas may be needed by a checkpoint in the backward
            # pass of an earlier call.
            if copy is not None and id(copy) in present:
                copy.detach_()
        self._copies = []
        self._replica_set = None
        self._slots = ()
        for replica in replica_set.replicas[1:]:
            replica.set_requires_grad(replica_set.slots.all)

    # --- backward passes ---

    def begin_pass(self) -> None:
        """Begin a backward pass, which has reached its first output of a call."""
        task = current_graph_task()
        # Outputs of the pair are reached in a thread per device: the others wait.
        with self._passes_lock:
            if task in self._passes:
                return
            self._end_dead_passes()
            is_selected = not executes(self._probe_node)
            self._add_pass(task, is_selected)
            # Also without an addition: the user may apply what ``autograd.grad``
            # returns. Inside of ``no_sync`` nothing is applied yet, and reading values
            # takes time.
            self.were_added |= self.is_synced
            if not is_selected:
                # Before autograd accumulates: later nobody sees what the user has
                # dropped.
                with self.streams.used_by_node():
                    self.forget_dropped()
        # A checkpoint inside of the module calls parts again, and torch calls them as
        # they are now, such as with adapters switched on again.
        replica_set = None if self._replica_set is None else self._replica_set()
        if replica_set is not None:
            replica_set.follow_values()
            self.connect(replica_set)

    def _add_pass(self, task: int, is_selected: bool) -> None:
        """Add a pass, which autograd ends.

        Apart from code that raises: a traceback that somebody keeps has its locals, and
        would keep the token, and so the pass.
        """
        token = _AutogradToken()
        self._passes[task] = _Pass(
            self.is_synced,
            is_selected,
            self._nothing(),
            unaccumulated=self._nothing(),
            token=weakref.ref(token),
        )
        at_end_of_pass(partial(self._end_pass, task, token))

    def arrive(
        self, bucket: _Bucket, gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Take the gradients of a bucket's copies, which have arrived, by replica.

        Returns what the user's tensors get: a block of the tree's after the other.

        Raises:
            RuntimeError: ``autograd.grad`` of parameters inside of ``no_sync``, or
                a change of ``.grad`` that replicas do not see.
        """
        arrived: ByReplica = []
        count = len(bucket.tensors)
        for start in range(0, len(gradients), count):
            part = gradients[start : start + count]
            arrived.append(
                {
                    key: gradient if gradient.dtype == dtype else gradient.to(dtype)
                    for key, dtype, gradient in zip(
                        bucket.by_key, bucket.dtypes, part, strict=True
                    )
                    if gradient is not None
                }
            )
        self.streams.record([*arrived, *self._waiting])
        task = current_graph_task()
        if task not in self._passes:
            self._end_dead_passes()
        if not self._passes:  # it has reached the graph past all outputs
            self.begin_pass()
        backward_pass = self._passes.get(task)
        if backward_pass is not None and backward_pass.is_selected:
            if not backward_pass.is_synced:
                raise RuntimeError(_PARTLY_SELECTED)
            return self._sums(bucket, arrived)
        # The graph of a tensor that the user has computed may be gone in a later pass.
        if not bucket.tensors[0].is_leaf:
            return self._sums(bucket, arrived)
        if backward_pass is None:  # of a checkpoint inside of a replica
            *_, around = self._passes.values()
            self._keep(around.arrived, arrived, bucket)
            return self._nothing_yet(bucket, gradients)
        if not backward_pass.is_synced:
            self._keep(backward_pass.arrived, arrived, bucket)
            return self._nothing_yet(bucket, gradients)
        for waiting, unaccumulated, of_replica in zip(
            self._waiting, backward_pass.unaccumulated, arrived, strict=True
        ):
            for tensor in bucket.tensors:
                # One that was frozen after the call keeps what it has got before.
                if not tensor.requires_grad:
                    continue
                key = id(tensor)
                earlier = waiting.pop(key, None)
                if earlier is not None:
                    _plus_in(of_replica, key, earlier)
                    if key in self._hooks:  # ``_note`` drops it again
                        unaccumulated[key] = earlier
        return self._sums(bucket, arrived)

    def _nothing_yet(
        self, bucket: _Bucket, gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """What the user's tensors get if all that has arrived waits."""
        nothing: list[Tensor | None] = [None] * (len(bucket.tensors) * len(self.blocks))
        (tensor, *others) = bucket.tensors
        arrived = next(gradient for gradient in gradients if gradient is not None)
        # Autograd calls a hook without a gradient, too, and hooks do not expect that. A
        # tensor with hooks has a node of its own.
        if not others and any(self._have_hooks([tensor])):
            nothing[0] = torch.zeros_like(
                arrived, dtype=tensor.dtype, device=tensor.device
            )
        return nothing

    def _sums(self, bucket: _Bucket, by_replica: ByReplica) -> list[Tensor | None]:
        """For each block of the tree the sums of its replicas, on the master.

        ::

            ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))    the tree, from left to right:
            0,  1,  2 + 3,  (4 + 5) + (6 + 7)            replica 0, and three blocks
        """
        master = self._devices[0]
        is_recorded = torch.is_grad_enabled()
        sums: list[Tensor | None] = []
        for block in self.blocks:
            parts = [by_replica[replica - 1] for replica in block]
            devices = [self._devices[replica] for replica in block]
            if not is_recorded:
                parts = _cloned_targets(parts, devices)
            total = sum_in_order(
                parts, devices, self.transfers, in_place=not is_recorded
            )
            if devices[0] != master:
                messages = iter_copies(total, master, self.transfers, "reduce")
                total = {}
                for message in messages:
                    total |= message
            sums += [total.get(id(tensor)) for tensor in bucket.tensors]
        return sums

    def _end_pass(self, task: int, _: _AutogradToken) -> None:
        """End a backward pass: let its gradients wait, or add all that wait."""
        backward_pass = self._passes.pop(task)
        if backward_pass.is_selected:
            return
        self.streams.follow()
        self.streams.record([*self._waiting, *backward_pass.arrived])
        try:
            with torch.no_grad():
                for waiting, arrived in zip(
                    self._waiting, backward_pass.arrived, strict=True
                ):
                    _let_wait(waiting, arrived)
            if not backward_pass.is_synced:
                self._mark()
                return
        except BaseException:
            self._drop_unmarked()
            raise
        self.were_added = True
        # Of checkpoints inside of replicas, and of parameters that only earlier passes
        # have used.
        self.add_waiting()
        self._release(())

    def _drop_unmarked(self) -> None:
        """Drop gradients that wait without a mark: nobody would see that the user drops
        them.
        """
        for waiting in self._waiting:
            for key in waiting.keys() - self._marks.keys():
                del waiting[key]

    def end_failed_passes(self) -> None:
        """Forget passes that have raised, with what has arrived in them.

        What has waited before, and autograd has not accumulated, waits again.
        """
        if not self._passes or current_graph_task() != -1:
            return
        self._end_dead_passes()
        # An accelerator's thread drops a pass that has raised a moment later, when it
        # gets the GIL. On the CPU another thread of the user's runs it.
        if is_async(self._devices[0]):
            for _ in range(_MOMENTS):
                if not self._passes:
                    break
                time.sleep(_MOMENT_SECONDS)
                self._end_dead_passes()

    def _end_dead_passes(self) -> None:
        """As ``end_failed_passes``, also in another backward pass: a retry, say."""
        with self._passes_lock:
            for task, backward_pass in list(self._passes.items()):
                if backward_pass.is_alive():
                    continue
                del self._passes[task]
                for waiting, unaccumulated in zip(
                    self._waiting, backward_pass.unaccumulated, strict=True
                ):
                    for key, gradient in unaccumulated.items():
                        _plus_in(waiting, key, gradient)
                self._release(())

    def _have_hooks(self, tensors: Sequence[Tensor]) -> list[bool]:
        """Whether each of the user's tensors has hooks, beside ``_note`` of engines."""
        own = self._hooks
        before = map(HOOKS_BEFORE, tensors)
        after = map(HOOKS_AFTER, tensors)
        return [
            bool(hooks_before)
            or (len(hooks_after or ()) > (id(tensor) in own) and _has_others(tensor))
            for tensor, hooks_before, hooks_after in zip(
                tensors, before, after, strict=True
            )
        ]

    # --- gradients that wait ---

    @property
    def is_waiting(self) -> bool:
        """Whether gradients wait at their replicas."""
        return any(self._waiting)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """In the body, backward passes leave gradients at their replicas."""
        before = self.is_synced
        self.is_synced = False
        try:
            yield
        finally:
            self.is_synced = before

    def add_waiting(self, only: Iterable[int] | None = None) -> None:
        """Add gradients that wait to the user's ``.grad``, or ``only`` those of these
        tensors, by ``id``.
        """
        if not self.is_waiting:
            return
        self.streams.follow()
        self.streams.record(self._waiting)
        keys = set().union(*self._waiting)
        if only is not None:
            keys &= set(only)
        parts: ByReplica = []
        for waiting in self._waiting:
            parts.append({key: waiting.pop(key) for key in keys & waiting.keys()})
        with torch.no_grad():
            # The first one is of replica 0, whose gradients are there already.
            parts = _cloned_targets([{}, *parts], self._devices)
            sums = sum_in_order(parts, self._devices, self.transfers, in_place=True)
        pairs = [(self._tensors[key], gradient) for key, gradient in sums.items()]
        self._release(keys)
        self.were_added = True
        pairs = [(tensor, gradient) for tensor, gradient in pairs if tensor.is_leaf]
        # What was frozen since has the gradients of the passes before.
        for tensor, gradient in pairs:
            if not tensor.requires_grad:
                earlier = tensor.grad
                tensor.grad = gradient if earlier is None else earlier + gradient
        pairs = [pair for pair in pairs if pair[0].requires_grad]
        if not pairs:
            return
        if any(self._have_hooks([tensor for tensor, _ in pairs])):
            self._tell_of_parts()
        with torch.inference_mode(False), torch.enable_grad():
            device = pairs[0][0].device
            # By a backward pass, so that hooks on parameters run.
            root = attach(partial(torch.zeros, (), device=device), pairs)
            backward([root], [root.detach()])

    def add_before(self, optimizer: Optimizer) -> None:
        """Add what waits for the parameters of an optimizer, before its step."""
        self.end_failed_passes()
        keys = self._waiting_of(optimizer)
        if not keys:  # it is another module's
            return
        self.forget_dropped()
        keys = self._waiting_of(optimizer)
        if not keys:
            return
        # A GradScaler's unscaling raises no version, and ``.data`` neither.
        for gradient, before in self._probes.values():
            if not same_bits(gradient, before):
                raise RuntimeError(_changed_while_waiting(gradient))
        self.add_waiting(keys)
        if self._told.mark("step"):
            warn(
                "an optimizer steps while gradients wait at the replicas, because the "
                "last backward pass was inside of no_sync(). The engine adds these "
                "gradients now. Clipping and unscaling before this step did not "
                "include these gradients; make the last backward pass before a step "
                "outside of no_sync()"
            )

    def _waiting_of(self, optimizer: Optimizer) -> set[int]:
        """The ``id`` of each parameter of an optimizer for which gradients wait."""
        waiting = set().union(*self._waiting)
        keys: set[int] = set()
        if waiting:
            for group in optimizer.param_groups:
                keys |= waiting.intersection(map(id, group["params"]))
        return keys

    def drop_waiting(self) -> None:
        """Drop gradients that wait."""
        self.end_failed_passes()
        keys = set().union(*self._waiting)
        self._waiting = self._nothing()
        self._release(keys)

    def forget_dropped(self) -> None:
        """Drop gradients that wait where the user has dropped replica 0's.

        Raises:
            RuntimeError: a ``.grad`` has changed in another way.
        """
        changed = self._forget_dropped()
        if changed is not None:
            raise RuntimeError(_changed_while_waiting(changed))

    def _forget_dropped(self) -> Tensor | None:
        """Drop what the user has, unless a ``.grad`` has changed in another way.

        Returns the tensor with this ``.grad``, if there is one.
        """
        if not self._marks or not self.is_waiting:
            return None
        if self._are_as_marked():
            return None
        dropped: set[int] = set()
        is_kept = False
        # Without one of replica 0's there is nothing that could be dropped.
        marked = [pair for pair in self._marks.items() if pair[1].gradient is not None]
        gradients = [self._tensors[key].grad for key, _ in marked]
        present = iter(versions([g for g in gradients if g is not None]))
        for (key, mark), gradient in zip(marked, gradients, strict=True):
            if gradient is None:
                dropped.add(key)
                continue
            is_same = next(present) == mark.version and gradient is mark.gradient
            if is_same and not mark.is_changed:
                is_kept = True
            elif not mark.is_changed and _has_no_entry(gradient):
                dropped.add(key)
            else:
                return self._tensors[key]
        # Without a gradient of replica 0's, others go as those beside them do.
        if dropped and not is_kept:
            dropped = set(self._marks)
        for waiting in self._waiting:
            for key in dropped:
                waiting.pop(key, None)
        self._release(dropped)
        return None

    def _are_as_marked(self) -> bool:
        """Whether nobody has changed the user's gradients since ``_mark``."""
        # Mostly, so it is asked without much Python per tensor.
        marks = self._marks.values()
        known = [mark.gradient for mark in marks if mark.gradient is not None]
        gradients = map(_GRADIENT_OF, map(self._tensors.__getitem__, self._marks))
        # If one is frozen and has none, the other path asks.
        if len(known) < len(marks) or not all(map(is_, gradients, known)):
            return False
        if True in [mark.is_changed for mark in marks]:
            return False
        return versions(known) == [mark.version for mark in marks]

    def _keep(self, kept: ByReplica, arrived: ByReplica, bucket: _Bucket) -> None:
        trained = bucket.by_key
        if not all(map(REQUIRES_GRAD, bucket.tensors)):
            # Autograd drops replica 0's of what was frozen after the call.
            tensors = bucket.by_key.items()
            trained = {key: tensor for key, tensor in tensors if tensor.requires_grad}
        for of_replica, gradients in zip(kept, arrived, strict=True):
            if any(map(REQUIRES_GRAD, gradients.values())):  # ``create_graph=True``
                raise RuntimeError(_GRAPH_OF_PART)
            are_new = of_replica.keys().isdisjoint(gradients)
            if are_new and gradients.keys() <= trained.keys():  # mostly
                of_replica |= gradients
                continue
            with torch.no_grad():
                for key in gradients.keys() & trained.keys():
                    _plus_in(of_replica, key, gradients[key])
        self._tensors |= trained

    def _mark(self) -> None:
        """Remember the user's gradients, to see later whether they were dropped."""
        gradients: dict[int, Tensor] = {}
        for key in set().union(*self._waiting):
            tensor = self._tensors[key]
            if not tensor.is_leaf:  # autograd keeps no gradient of it
                continue
            # Into one that is frozen meanwhile autograd accumulates nothing.
            is_trained = tensor.requires_grad
            if is_trained and key not in self._hooks:
                hook = tensor.register_post_accumulate_grad_hook(self._note)
                self._hooks[key] = hook
            gradient = tensor.grad
            if gradient is None and is_trained:
                # Only others have one: this is replica 0's, which the user may drop.
                arrived = next(of[key] for of in self._waiting if key in of)
                gradient = tensor.grad = torch.zeros_like(
                    arrived, dtype=tensor.grad_dtype, device=tensor.device
                )
            if gradient is None:
                self._marks[key] = _Mark(None)
            else:
                gradients[key] = gradient
        present = versions([*gradients.values()])
        for (key, gradient), number in zip(gradients.items(), present, strict=True):
            self._marks[key] = _Mark(gradient, number)
        self._probe_gradients()

    def _probe_gradients(self) -> None:
        """Remember the values of a few small gradients of replica 0's."""
        self._probes = {}
        # Not in each pass: to compare the sizes of all takes longer than to copy.
        if len(self._marks) != self._num_compared or not (
            self._probed and self._marks.keys() >= self._probed
        ):
            self._probed = self._smallest()
            self._num_compared = len(self._marks)
        for key in self._probed:
            gradient = self._marks[key].gradient
            if gradient is not None and gradient.layout == torch.strided:
                self._probes[key] = gradient, gradient.detach().clone()

    def _smallest(self) -> set[int]:
        """The tensors whose dense gradients of replica 0's are the smallest."""
        sizes: list[tuple[int, int]] = []
        for key, mark in self._marks.items():
            gradient = mark.gradient
            if gradient is not None and gradient.layout == torch.strided:
                sizes.append((gradient.numel(), key))
        return {key for _, key in heapq.nsmallest(_NUM_PROBES, sizes)}

    def _note(self, tensor: Tensor) -> None:
        """Autograd has accumulated a gradient, such as a penalty's; others wait."""
        key = id(tensor)
        backward_pass = self._passes.get(current_graph_task())
        if backward_pass is not None and backward_pass.is_synced:  # others take nothing
            for unaccumulated in backward_pass.unaccumulated:
                unaccumulated.pop(key, None)
        elif backward_pass is None and self.is_synced:
            self._add_at_end_of_pass()
        mark = self._marks.get(key)
        if mark is None or mark.gradient is None:
            return
        gradient = tensor.grad
        if gradient is None:
            return
        present = version(gradient)
        # Autograd writes once, or not at all if nothing has arrived.
        if gradient is not mark.gradient or present - mark.version not in (0, 1):
            mark.is_changed = True
        self._probes.pop(key, None)
        mark.version = present

    def _add_at_end_of_pass(self) -> None:
        """Add all that waits when the present backward pass ends, unless a pass of
        calls runs: its end adds them.

        Such as the pass of a step, of the module itself, or of a penalty, which may be
        the last one before an optimizer's step.
        """
        self._end_dead_passes()
        task = current_graph_task()
        if self._passes or task == self._other_pass:
            return
        self._other_pass = task
        at_end_of_pass(self._end_other_pass)

    def _end_other_pass(self) -> None:
        # What was changed is an error for whoever needs it. It may yet be dropped.
        if self._forget_dropped() is None:
            self.add_waiting()

    def _release(self, keys: Iterable[int]) -> None:
        """Forget these tensors, for which nothing waits any more."""
        for key in keys:
            self._marks.pop(key, None)
            self._probes.pop(key, None)
        if self.is_waiting or self._passes:
            return
        self._marks.clear()
        self._probes.clear()
        self._probed = set()
        self._tensors.clear()
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def _add_lost(self, connected: set[int]) -> None:
        """Add what waits for tensors that are not connected any more."""
        lost = set().union(*self._waiting) - connected
        if lost:
            self.forget_dropped()
            self.add_waiting(lost)

    def _tell_of_parts(self) -> None:
        if self._told.mark("parts"):
            warn(
                "hooks on parameters run more than once, each time with a part of the "
                "gradient; if a reentrant checkpoint uses the parameter, write "
                "checkpoint(…, use_reentrant=False). If the parameter has a gradient "
                "from a loss inside of no_sync(), and the next loss outside of "
                "no_sync() does not use the parameter, the engine adds this gradient "
                "separately: let that loss use the parameter, too"
            )

    def _nothing(self) -> ByReplica:
        return [{} for _ in self._devices[1:]]


class _Connection(torch.autograd.Function):
    """Connects the user's tensors with replicas' copies of them.

    The copies stay the objects that they are. Each of the user's tensors is an input
    once per block of the tree, so that autograd adds the blocks in this order.
    """

    @staticmethod
    def forward(
        ctx: Any, bucket: _Bucket, backward_probe: Tensor, copies: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.bucket = bucket
        ctx.copies = copies
        # A parameter that a replica does not use has no gradient, not one of zeros.
        ctx.set_materialize_grads(False)
        connected = tensors[len(tensors) - copies :]
        # As if written: new tensors would not be those that the replicas hold.
        ctx.mark_dirty(*connected)
        # The first output is on the master: so is the thread of the backward pass.
        return backward_probe.new_zeros((), device=bucket.tensors[0].device), *connected

    @staticmethod
    @never_compiled  # a compiled function may call ``backward()``
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        bucket: _Bucket = ctx.bucket
        of_all = bucket.gradients
        with of_all.streams.used_by_node():
            sums = of_all.arrive(bucket, gradients[1:])
        # Autograd takes them for results of this node's stream.
        of_all.streams.record_here(sums)
        return None, None, None, *sums, *[None] * ctx.copies


def _connect_all(connections: Sequence[tuple[_Bucket, list[Tensor]]]) -> None:
    with torch.inference_mode(False), torch.enable_grad():
        for bucket, copies in connections:
            # A copy shares its version counter with the memory that it uses.
            with version_counters_kept(copies):
                for copy in copies:
                    copy.requires_grad_(False)
                    drop_accumulator(copy)
                _connect(bucket, copies)


def _connect(bucket: _Bucket, copies: list[Tensor]) -> None:
    gradients = bucket.gradients
    inputs = bucket.tensors * len(gradients.blocks)
    _Connection.apply(bucket, gradients.backward_probe, len(copies), *inputs, *copies)  # type: ignore[no-untyped-call]


def _blocks(count: int) -> list[range]:
    """The replicas whose sums the tree adds to replica 0's, one block after another.

    >>> _blocks(6)
    [range(1, 2), range(2, 4), range(4, 6)]
    """
    blocks: list[range] = []
    start = 1
    while start < count:
        blocks.append(range(start, min(2 * start, count)))
        start *= 2
    return blocks


def _buckets(slots: Sequence[Slot], alone: frozenset[int]) -> list[list[int]]:
    """The numbers of the slots that one node connects.

    Their sums are on the master at the same time. Those of ``alone`` have a node each.
    """
    buckets: list[list[int]] = [[slot.number] for slot in slots if slot.number in alone]
    free_bytes = -1  # so that one without elements, too, begins the first bucket
    for slot in slots:
        if slot.number in alone:
            continue
        if slot.tensor.nbytes > free_bytes:
            buckets.append([])
            free_bytes = coalescing.CHUNK_BYTES
        buckets[-1].append(slot.number)
        free_bytes -= slot.tensor.nbytes
    return buckets


def _has_others(tensor: Tensor) -> bool:
    """Whether a tensor has hooks after its gradient that are not of engines."""
    engines = list(_all_gradients)  # two may train a tensor
    own = sum(id(tensor) in gradients._hooks for gradients in engines)
    return len(HOOKS_AFTER(tensor)) > own


def _cloned_targets(parts: ByReplica, devices: Sequence[torch.device]) -> ByReplica:
    """Clone the gradients that a sum in the tree's order may overwrite.

    Autograd's tensors may be somebody else's, too: ``a + b`` gives both parameters one
    gradient. What comes from another device is a copy already.
    """
    pairs = tree_pairs(len(parts))
    targets = {target for target, _ in pairs}
    # One that its target lacks takes its place.
    targets |= {
        source for target, source in pairs if devices[target] == devices[source]
    }
    return [
        {key: gradient.clone() for key, gradient in of_replica.items()}
        if replica in targets
        else of_replica
        for replica, of_replica in enumerate(parts)
    ]


def _let_wait(waiting: dict[int, Tensor], arrived: dict[int, Tensor]) -> None:
    """Add gradients, which may be somebody else's tensors, too, to those that wait,
    which nobody else has: they are overwritten. Takes them out of ``arrived``.
    """
    together = list(filter(waiting.__contains__, arrived))
    sums = list(map(waiting.__getitem__, together))
    added = list(map(arrived.pop, together))
    if has_foreach(*sums, *added):  # mostly: as one operator
        if sums:
            torch._foreach_add_(sums, added)
    else:
        for key, gradient in zip(together, added, strict=True):
            _plus_in(waiting, key, gradient)
    # Message by message: what has been copied is freed before the next one is.
    for keys in coalescing.messages(arrived):
        originals = [arrived.pop(key) for key in keys]
        copies = list(map(torch.empty_like, originals))
        copy_each(copies, originals, [range(len(keys))])  # as one message, again
        waiting.update(zip(keys, copies, strict=True))


def _plus_in(total: dict[int, Tensor], key: int, gradient: Tensor) -> None:
    """Add a gradient, which may be somebody else's tensor, too."""
    earlier = total.get(key)
    if earlier is None:
        total[key] = gradient
    # torch adds a sparse tensor to a dense one, but no dense one to a sparse one.
    elif earlier.layout == torch.strided:
        total[key] = earlier + gradient
    else:
        total[key] = gradient + earlier


def _has_no_entry(gradient: Tensor) -> bool:
    values = gradient.detach()
    if values.layout != torch.strided:
        values = values.to_dense()
    return not to_numbers(values.count_nonzero())


_PARTLY_SELECTED = (
    "torch.autograd.grad (or backward(inputs=…)) inside of no_sync() would give only "
    "replica 0's part of the gradients of parameters; call torch.autograd.grad outside "
    "of no_sync()"
)

_GRAPH_OF_PART = (
    "backward(create_graph=True) inside of no_sync(): the gradients of other replicas "
    "wait without their graphs, so gradients of gradients would be wrong; call it "
    "outside of no_sync()"
)


def _changed_while_waiting(tensor: Tensor) -> str:
    return (
        f"the .grad of a parameter of shape {tuple(tensor.shape)} was changed after a "
        "backward pass inside of no_sync(), while gradients of other replicas wait: "
        "the waiting gradients would not be changed; clip, unscale or write .grad "
        "after a backward pass outside of no_sync(), or drop all gradients by "
        "zero_grad()"
    )


# --- optimizers ---

_all_gradients: weakref.WeakSet[CallGradients] = weakref.WeakSet()


@functools.cache
def _listen_before_steps() -> RemovableHandle:
    """Register the one hook of all engines; later calls do nothing."""
    return register_optimizer_step_pre_hook(_add_before_step)


def _add_before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Add the gradients that wait for an optimizer's parameters.

    A closure may make the last backward pass before the step, as in Lightning's loop.
    Returns the arguments of a step whose closure is followed by the sum.
    """
    if "closure" in kwargs:
        closure = kwargs["closure"]
    else:
        closure = args[1] if len(args) > 1 else None  # the first is the optimizer
    if closure is None:
        _add_waiting_of(optimizer)
        return None
    run = partial(_add_after_closure, optimizer, closure)
    if "closure" in kwargs:
        return args, {**kwargs, "closure": run}
    return (args[0], run, *args[2:]), kwargs


def _add_after_closure(optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
    loss = closure()
    _add_waiting_of(optimizer)
    return loss


def _add_waiting_of(optimizer: Optimizer) -> None:
    # A list, because hooks of the user run in the sum, and may make an engine.
    for gradients in list(_all_gradients):
        gradients.add_before(optimizer)
