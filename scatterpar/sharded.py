"""An optimizer with its state distributed over an engine's devices.

Each device owns whole parameters. One step::

    master   gradients ---> owner 1: steps there, on its copy ---+
             gradients ---> owner 2: steps there, on its copy ---+---> new values to all
             its own parameters: steps here ---------------------+
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import ParamsT

from scatterpar.batch import nested
from scatterpar.devices.coalescing import is_part, is_unexpanded, iter_copies
from scatterpar.devices.copies import write
from scatterpar.devices.transfers import Transfers
from scatterpar.devices.virtual_devices import HOST
from scatterpar.devices.written_tensors import WrittenTensors
from scatterpar.engine import ScatterOnceParallel
from scatterpar.errors import add_note
from scatterpar.libraries import package_of
from scatterpar.objects.snapshot import is_same
from scatterpar.replicas.broadcast import Broadcast
from scatterpar.stand_ins import stand_in_for, state_on_device, stepping_on
from scatterpar.torch_private.compiler import never_compiled
from scatterpar.torch_private.modules import (
    loading_hooks,
    saving_hooks,
    step_without_hooks,
)

# Classes that treat each parameter by itself: they read and write the parameters in
# ``param_groups``, and keep what they remember of one in ``state[parameter]``.
_CLASSES_OF_TORCH = {
    *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax"),
    *("Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam"),
}
# Each also with ``8bit`` or ``32bit`` behind, and ``Paged`` before.
_CLASSES_OF_BITSANDBYTES = {
    *("AdEMAMix", "Adagrad", "Adam", "AdamW", "LAMB", "LARS", "Lion", "RMSprop"),
    "SGD",
}


def _is_known(optimizer: Optimizer) -> bool:
    """Whether the class is one of torch's or bitsandbytes' that can be sharded."""
    kind = type(optimizer)
    package = package_of(kind)
    name = kind.__name__
    if package == "torch":
        return name in _CLASSES_OF_TORCH
    family = name.removeprefix("Paged").removesuffix("8bit").removesuffix("32bit")
    return package == "bitsandbytes" and family in _CLASSES_OF_BITSANDBYTES


class _Copies(NamedTuple):
    """The engine's copies of the parameters that an owner may update.

    Attributes:
        broadcast: has the copies in each memory.
        numbers: the number of each such parameter in ``broadcast``: dense ones that
            share no memory with others.
    """

    broadcast: Broadcast
    numbers: dict[Tensor, int]

    def copy_at(self, device: torch.device, parameter: Tensor) -> Tensor:
        """The copy of ``parameter`` in the memory of ``device``."""
        return self.broadcast.at(device)[self.numbers[parameter]]


class ShardedOptimizer(Optimizer):
    """``optimizer_class`` with its state distributed over the devices of an engine.

    Your parameters, ``.grad`` and ``param_groups`` stay on the first device, so
    clipping, ``GradScaler``, schedulers and hooks work as usual. Each parameter has one
    owner among the devices, which stores its state. A step sends the owners their
    gradients, computes the update there, and sends the new values to all devices. The
    engine's next step then sends no parameters. The results are the same bits as those
    of ``optimizer_class`` on one device.

    With several devices a failed step leaves parameters and state unchanged; during the
    step each owner keeps a copy of its state. With a process group every rank has the
    same gradients and computes the same update, on its own devices.

    Args:
        engine: the engine whose devices store the state.
        optimizer_class: an optimizer class that updates each parameter separately, such
            as ``torch.optim.AdamW``, or a function that makes such an optimizer.
        params: parameters or parameter groups on the first device; by default all those
            of ``engine.module``. Parameters outside the module, and buffers that are
            trained, are updated on the first device.
        elementwise: pass ``True`` if the class updates each parameter separately: it
            reads and writes the parameters in ``param_groups``, and keeps the state of
            each in ``state[parameter]``. Not needed for bitsandbytes' classes, for
            torch's except ``LBFGS``, and on one device.
        defaults: the other arguments of ``optimizer_class``.

    Attributes:
        engine: the engine; after its ``close()`` you may assign another one on the same
            devices.
        param_groups: those of the optimizer that ``optimizer_class`` made.
        state: the state of that optimizer, by parameter. Both may be assigned.

    Raises:
        TypeError: ``engine`` is no engine, ``optimizer_class`` makes no optimizer,
            ``LBFGS``, or, with several devices, an optimizer of an unknown class
            without ``elementwise=True``.

    Example:
        >>> engine = ScatterOnceParallel(torch.nn.Linear(4, 2), 1, ["cpu:0", "cpu:1"])
        >>> optimizer = ShardedOptimizer(engine, torch.optim.AdamW, lr=3e-4)
        >>> rows = torch.randn(8, 4)
        >>> loss = engine.forward_backward(rows, None, lambda output, _: output.mean())
        >>> optimizer.step()
        >>> optimizer.state_bytes  # two moments of float32, and one count per parameter
        {device(type='cpu', index=0): 20, device(type='cpu', index=1): 68}
    """

    # Asked by ``replicas/fused_writes.py``: no version has to tell of its writes.
    sends_new_values = True

    def __init__(
        self,
        engine: ScatterOnceParallel,
        optimizer_class: Callable[..., Optimizer],
        params: ParamsT | None = None,
        *,
        elementwise: bool = False,
        **defaults: Any,
    ) -> None:
        """The docstring of the class has the arguments and an example."""
        if not isinstance(engine, ScatterOnceParallel):
            raise TypeError(
                "engine must be a ScatterOnceParallel, whose devices share the state, "
                f"got {type(engine).__name__}"
            )
        if not callable(optimizer_class):
            raise TypeError(_not_a_class(optimizer_class))
        arguments = engine.module.parameters() if params is None else params
        plain = optimizer_class(arguments, **defaults)
        if not isinstance(plain, Optimizer):
            raise TypeError(_not_a_class(optimizer_class))
        if isinstance(plain, (LBFGS, ShardedOptimizer)):
            raise TypeError(
                f"{type(plain).__name__} cannot be sharded: its update of a parameter "
                "depends on other parameters; use the class itself, on "
                "engine.module.parameters()"
            )
        # Each device once; the master is the first.
        memories = list(dict.fromkeys(engine.device_ids))
        if len(memories) > 1 and not (elementwise or _is_known(plain)):
            name = type(plain).__name__
            raise TypeError(
                f"{name} cannot be sharded: its update of a parameter may depend on "
                "other parameters, since it is none of the known optimizers of torch "
                f"and bitsandbytes; use {name}(engine.module.parameters(), …) itself. "
                "Or pass elementwise=True, if three things hold: a parameter's update "
                "depends on no other parameter, the optimizer has the state of a "
                "parameter in optimizer.state[parameter], and step() needs no closure"
            )
        # torch's constructor makes groups and state, which are those of ``plain``.
        self._plain: Any = SimpleNamespace()
        super().__init__([torch.empty(0)], {})
        self._plain = plain
        self.defaults = plain.defaults
        self.engine = engine
        self._memories = memories
        self._owners: dict[Any, torch.device] = {}
        self._transfers = Transfers()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer that ``optimizer_class`` made."""
        groups: list[dict[str, Any]] = self._plain.param_groups
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._plain.param_groups = groups

    @property
    def state(self) -> Any:
        """The state of the optimizer that ``optimizer_class`` made."""
        return self._plain.state

    @state.setter
    def state(self, state: Any) -> None:
        self._plain.state = state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as ``optimizer_class`` does."""
        if isinstance(self._plain, Optimizer):
            self._plain.add_param_group(param_group)
        else:  # torch's constructor calls it
            super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a ShardedOptimizer cannot be copied or pickled, since its state lies on "
            "the devices of one engine; save its state_dict(), and load this into "
            "another ShardedOptimizer"
        )

    @property
    def state_bytes(self) -> dict[torch.device, int]:
        """Bytes of optimizer state per device.

        Host scalars count for their parameter's owner.
        """
        sizes = dict.fromkeys(self._memories, 0)
        for key, state in self.state.items():
            # State without an owner is where the plain optimizer made it.
            owner = self._owners.get(key, self._memories[0])
            sizes[owner] += sum(tensor.nbytes for tensor in nested.tensors(state))
        return sizes

    @never_compiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all parameters that have a gradient.

        Args:
            closure: called before the step. With one device ``optimizer_class`` calls
                it, as often as it does.

        Returns:
            The result of ``closure``.

        Raises:
            RuntimeError: inside a step of the engine, or after its ``close()``. With
                several devices: the class did not write a parameter that another device
                owns, or wrote it on the first device.

        Exceptions of ``optimizer_class`` are raised unchanged.
        """
        if len(self._memories) == 1:
            # The hooks of this optimizer have run: it is the one that the user steps.
            arguments = () if closure is None else (closure,)
            return step_without_hooks(self._plain, *arguments)
        loss = None
        if closure is not None:
            # It runs the backward pass.
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad(), self._copies() as copies:
            self._step_on_owners(copies)
        return loss

    def _step_on_owners(self, copies: _Copies) -> None:
        """Update each parameter that has a gradient in its owner's memory."""
        # A parameter may be in several groups.
        parameters = dict.fromkeys(self._parameters())
        updated = [parameter for parameter in parameters if parameter.grad is not None]
        copied = [parameter for parameter in updated if parameter in copies.numbers]
        numbers = {copies.numbers[parameter] for parameter in copied}
        copies.broadcast.own(numbers, self._transfers)
        stand_ins = self._assign_owners(updated, copies)
        self._send_gradients(stand_ins)
        with self._undone_on_error(updated, stand_ins, copies):
            writes = _Writes(self._plain, stand_ins)
            with stepping_on(self._plain, stand_ins):
                step_without_hooks(self._plain)
            writes.check(type(self._plain).__name__)
            for parameter, stand_in in stand_ins.items():
                copy = copies.copy_at(self._owners[parameter], parameter)
                if not stand_in.is_set_to(copy):
                    # The optimizer has exchanged its storage (``p.data = …``).
                    write(copy, stand_in)
        for stand_in in stand_ins.values():
            stand_in.grad = None  # frees memory for the new values
        owners = {
            copies.numbers[parameter]: self._owners[parameter] for parameter in copied
        }
        try:
            copies.broadcast.send_owned(owners, self._transfers)
        except Exception:
            # No memory for messages. The master's values are enough: the next refresh
            # sends them to the other copies.
            for parameter, stand_in in stand_ins.items():
                self._transfers.copy_into(parameter, stand_in, "replicate")

    def _parameters(self) -> Iterator[Tensor]:
        for group in self.param_groups:
            yield from group["params"]

    @contextlib.contextmanager
    def _copies(self) -> Iterator[_Copies]:
        """Yields the engine's copies, which nobody else uses in the body."""
        with self.engine.replicas_for_update() as replica_set:
            sharing = _sharing_memory(replica_set.tensors)
            numbers: dict[Tensor, int] = {}
            for slot in replica_set.slots.all:
                # A forward pass may write its replica's own buffers.
                if not slot.is_parameter:
                    continue
                parameter = slot.tensor
                if slot.number not in sharing and is_unexpanded(parameter):
                    # Tied and expanded parameters stay on the master, and views of one
                    # memory that overlap.
                    numbers[parameter] = slot.number
            yield _Copies(replica_set.broadcast, numbers)

    def _assign_owners(
        self, parameters: Iterable[Tensor], copies: _Copies
    ) -> dict[Tensor, Tensor]:
        """Assign an owner to every parameter that has none.

        Returns stand-ins, by parameter: for a parameter that another device owns, the
        plain optimizer updates a stand-in there. The largest parameters are assigned
        first, each to the device that owns least. In a tie the master is last.
        """
        master, *replicas = self._memories
        owned_bytes = dict.fromkeys([*replicas, master], 0)  # ``min`` takes the first
        for parameter, owner in self._owners.items():
            owned_bytes[owner] += parameter.nbytes
        stand_ins: dict[Tensor, Tensor] = {}
        # The largest first: small ones then even out what the devices own.
        for parameter in sorted(parameters, key=_nbytes, reverse=True):
            can_have_owner = parameter in copies.numbers
            may_stay = can_have_owner or self._owners.get(parameter) == master
            if parameter not in self._owners or not may_stay:
                owner = master
                if can_have_owner:
                    owner = min(owned_bytes, key=owned_bytes.__getitem__)
                if parameter in self.state:
                    state = self.state[parameter]
                    self.state[parameter] = state_on_device(
                        state, owner, self._transfers
                    )
                self._owners[parameter] = owner
                owned_bytes[owner] += parameter.nbytes
            owner = self._owners[parameter]
            if owner != master:
                copy = copies.copy_at(owner, parameter)
                stand_ins[parameter] = stand_in_for(parameter, copy)
        return stand_ins

    def _send_gradients(self, stand_ins: Mapping[Tensor, Tensor]) -> None:
        """Copy to each owner the gradients of its parameters, message by message."""
        for device in self._memories[1:]:
            gradients: dict[Tensor, Tensor] = {}
            for parameter in stand_ins:
                if self._owners[parameter] == device and parameter.grad is not None:
                    gradients[parameter] = parameter.grad.detach()
            for message in iter_copies(gradients, device, self._transfers, "reduce"):
                for parameter, gradient in message.items():
                    # Not a part of the message: sums may depend on where a tensor
                    # starts.
                    if is_part(gradient):
                        gradient = gradient.clone()
                    stand_ins[parameter].grad = gradient

    @contextlib.contextmanager
    def _undone_on_error(
        self,
        updated: Sequence[Tensor],
        stand_ins: Mapping[Tensor, Tensor],
        copies: _Copies,
    ) -> Iterator[None]:
        """If the body fails, restore the optimizer's state and what the master owns.

        The other owners write only to their copies, which the next refresh overwrites.
        Gradients are restored as well: some classes write ``.grad``, such as ``SGD``
        with ``nesterov`` and ``foreach``.
        """
        master, neighbour = self._memories[:2]
        saved: list[tuple[Tensor, Tensor]] = []  # tensors and their values
        for parameter in updated:
            if self._owners[parameter] != master:
                continue
            if parameter in copies.numbers:
                # The body does not write there, so no copy is needed.
                saved.append((parameter, copies.copy_at(neighbour, parameter)))
            else:
                saved.append((parameter, parameter.clone()))
            gradient = parameter.grad
            if gradient is not None and gradient.layout == torch.strided:
                saved.append((gradient, gradient.clone()))
        attributes = [dict(vars(parameter)) for parameter in updated]
        users = WrittenTensors(list(stand_ins))
        users.begin(compares_bits=False)
        # All of it, because optimizers write their state in place. Not with ``Undo``,
        # which would clone parameters whose values a neighbour has.
        state = nested.map_tensors(Tensor.clone, dict(self.state))
        try:
            yield
        except BaseException as error:
            # A ``defaultdict``, as torch's: a parameter without a state gets one in its
            # first step.
            self.state = defaultdict(dict, state)
            for parameter, earlier in zip(updated, attributes, strict=True):
                if not is_same(vars(parameter), earlier):
                    vars(parameter).clear()
                    vars(parameter).update(earlier)
            # An optimizer that keeps a list of its own writes the user's parameters.
            for position in users.written().counted:
                parameter = users.tensors[position]
                saved.append((parameter, stand_ins[parameter]))
            for target, values in saved:
                self._transfers.copy_into(target, values, "replicate")
            add_note(
                error,
                "optimizer.step(): parameters and state are as they were before it",
            )
            raise

    def state_dict(self) -> dict[str, Any]:
        """The state dict of ``optimizer_class`` with all parameters, in host memory."""
        before, after = saving_hooks(self)
        for hook in before:
            hook(self)
        # In host memory: a checkpoint loads on a machine with other devices.
        saved: dict[str, Any] = state_on_device(
            self._plain.state_dict(), HOST, self._transfers
        )
        for hook in after:
            saved = hook(self, saved) or saved
        return saved

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of ``optimizer_class``, sharded over any devices or not.

        Raises:
            ValueError: the state has other groups, or groups with other numbers of
                parameters.
        """
        before, after = loading_hooks(self)
        loaded = dict(state_dict)
        for hook in before:
            # A hook may return another state, as in torch.
            loaded = hook(self, loaded) or loaded
        with self._copies() as copies:
            stand_ins = self._assign_owners(self._parameters(), copies)
            with stepping_on(self._plain, stand_ins):
                # From the host, torch moves it to where each stand-in is.
                self._plain.load_state_dict(
                    state_on_device(loaded, HOST, self._transfers)
                )
        for hook in after:
            hook(self)


_nbytes = attrgetter("nbytes")


def _sharing_memory(tensors: Sequence[Tensor]) -> set[int]:
    """The numbers of tensors in memory that another of them spans, too."""
    spans: list[tuple[int, int, int]] = []  # first byte, byte behind the last, number
    for number, tensor in enumerate(tensors):
        if tensor.layout == torch.strided and tensor.numel():
            size = tensor.nbytes
            if not tensor.is_contiguous():
                steps = zip(tensor.shape, tensor.stride(), strict=True)
                last = sum((length - 1) * stride for length, stride in steps)
                size = (last + 1) * tensor.element_size()
            start = tensor.data_ptr()
            spans.append((start, start + size, number))
    sharing: set[int] = set()
    end = 0  # of the memory that tensors at lower addresses span
    last_number = -1  # of the tensor that ends there
    for start, stop, number in sorted(spans):
        if start < end:
            sharing |= {number, last_number}
        if stop > end:
            end = stop
            last_number = number
    return sharing


def _not_a_class(optimizer_class: object) -> str:
    return (
        f"optimizer_class must be a class such as torch.optim.AdamW, got "
        f"{optimizer_class!r}; its arguments come after it: ShardedOptimizer(engine, "
        f"torch.optim.AdamW, lr=3e-4)"
    )


class _Writes:
    """Which parameters of other owners a step writes, and where."""

    def __init__(
        self, optimizer: Optimizer, stand_ins: Mapping[Tensor, Tensor]
    ) -> None:
        self._parameters = WrittenTensors(list(stand_ins))
        self._parameters.begin(compares_bits=False)
        written = list(stand_ins.values())
        places = list(map(Tensor.detach, written))
        self._stand_ins = WrittenTensors(written, stored_as=places)
        self._stand_ins.begin(compares_bits=False)
        # Fused kernels and bitsandbytes' change no version, and sparse gradients may
        # have no entry.
        self._may_stay: set[Tensor] = set()
        is_foreign = package_of(optimizer) == "bitsandbytes"
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                is_sparse = gradient is not None and gradient.layout != torch.strided
                if is_foreign or group.get("fused") or is_sparse:
                    self._may_stay.add(parameter)

    def check(self, name: str) -> None:
        """Raise ``RuntimeError`` if the step did not write what it should have.

        It writes the stand-ins of parameters, and not the user's parameters.
        """
        what = ""
        if self._parameters.written().counted:
            what = "wrote a parameter elsewhere than in param_groups"
        found = self._stand_ins.written()
        written = found.counted | found.exchanged
        for position, parameter in enumerate(self._parameters.tensors):
            may_stay = position in written or parameter in self._may_stay
            if not (what or may_stay):
                shape = tuple(parameter.shape)
                what = f"did not write a parameter of shape {shape} that has a gradient"
        if what:
            raise RuntimeError(
                f"{name} {what}, so that it cannot be sharded; use the optimizer as it "
                f"is: {name}(engine.module.parameters(), …)"
            )
