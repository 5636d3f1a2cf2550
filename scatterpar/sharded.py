"""An optimizer with its state distributed over an engine's devices: each owns whole
parameters.

One step::

    master      gradients ---> owner 1: steps there, on its copy ---+
                gradients ---> owner 2: steps there, on its copy ---+---> new values, everywhere
                its own parameters: steps here ---------------------+
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from scatterpar.batch import nested
from scatterpar.devices.coalescing import is_part, is_unexpanded, iter_copies
from scatterpar.devices.device_ids import HOST
from scatterpar.devices.transfers import Transfers
from scatterpar.engine import ScatterOnceParallel
from scatterpar.errors import add_note
from scatterpar.replicas.broadcast import Broadcast
from scatterpar.replicas.replicas import parameter_like
from scatterpar.torch_private import loading_hooks, step_without_hooks


class ShardedOptimizer(Optimizer):
    """``optimizer_class`` with its state distributed over the devices of an engine.

    The user's parameters, ``.grad`` and ``param_groups`` stay on the master, so
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
        params: parameters or parameter groups on the master; by default all parameters
            of ``engine.module``. Parameters outside the module are updated on the
            master.
        defaults: the other arguments of ``optimizer_class``.

    Attributes:
        engine: the engine; after its ``close()`` you may assign another one on the same
            devices.

    Raises:
        TypeError: ``engine`` is no engine, ``optimizer_class`` makes no optimizer, or
            it makes ``LBFGS``, which treats all parameters as one vector.

    Example:
        >>> engine = ScatterOnceParallel(torch.nn.Linear(4, 2), 1, ["cpu:0", "cpu:1"])
        >>> optimizer = ShardedOptimizer(engine, torch.optim.AdamW, lr=3e-4, weight_decay=0.1)
        >>> loss = engine.forward_backward(torch.randn(8, 4), None, lambda y, _: y.mean())
        >>> optimizer.step()
        >>> optimizer.state_bytes  # two moments of float32, and one count per parameter
        {device(type='cpu', index=0): 20, device(type='cpu', index=1): 68}
    """

    def __init__(
        self,
        engine: ScatterOnceParallel,
        optimizer_class: Callable[..., Optimizer],
        params: Iterable[Any] | None = None,
        **defaults: Any,
    ) -> None:
        if not isinstance(engine, ScatterOnceParallel):
            raise TypeError(
                "engine must be a ScatterOnceParallel, whose devices share the "
                "state, got "
                f"{type(engine).__name__}"
            )
        params = engine.module.parameters() if params is None else params
        made = (
            optimizer_class(params, **defaults) if callable(optimizer_class) else None
        )
        if not isinstance(made, Optimizer):
            raise TypeError(
                f"optimizer_class must be a class such as torch.optim.AdamW, got "
                f"{optimizer_class!r}; its arguments come after it: "
                "ShardedOptimizer(engine, "
                f"torch.optim.AdamW, lr=3e-4)"
            )
        if isinstance(made, (LBFGS, ShardedOptimizer)):
            raise TypeError(
                f"{type(made).__name__} cannot be sharded: it does not treat each "
                "parameter by "
                f"itself; use it as it is, on engine.module.parameters()"
            )
        self._plain = made
        super().__init__(self._plain.param_groups, self._plain.defaults)
        self.engine = engine
        self._memories = list(dict.fromkeys(engine.device_ids))
        self._owners: dict[Any, torch.device] = {}
        self._transfers = Transfers()
        self.state, self._plain.param_groups = self._plain.state, self.param_groups

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a ShardedOptimizer cannot be copied or pickled, since its state lies on "
            "the devices "
            "of one engine; save its state_dict(), and load that into another"
        )

    @property
    def state_bytes(self) -> dict[torch.device, int]:
        """Bytes of optimizer state per device; host scalars count for their parameter's
        owner.
        """
        sizes = dict.fromkeys(self._memories, 0)
        for key, state in self.state.items():
            owner = self._owners.get(key, self._memories[0])
            sizes[owner] += sum(tensor.nbytes for tensor in nested.tensors(state))
        return sizes

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all parameters that have a gradient.

        Args:
            closure: called once, before the step.

        Returns:
            The result of ``closure``.

        Raises:
            RuntimeError: inside a step of the engine, or after its ``close()``.

            Exceptions of ``optimizer_class`` are raised unchanged.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if len(self._memories) == 1:
            step_without_hooks(self._plain)
            return loss
        with self._replicas() as (broadcast, numbers):
            parameters = dict.fromkeys(
                p for group in self.param_groups for p in group["params"]
            )
            updated = [p for p in parameters if p.grad is not None]
            stand_ins = self._assign_owners(updated, broadcast, numbers)
            self._send_gradients(stand_ins)
            undo = self._undo_on_error(updated, broadcast, numbers)
            with undo, self._plain_optimizer_on(stand_ins) as plain:
                step_without_hooks(plain)
            for stand_in in stand_ins.values():
                stand_in.grad = None  # frees memory for the new values
            try:
                owners = {numbers[p]: self._owners[p] for p in updated if p in numbers}
                broadcast.send(owners, self._transfers)
            # no memory for messages: the next refresh sends the other copies
            except Exception:
                for p, stand_in in stand_ins.items():
                    self._transfers.copy_into(p, stand_in, "replicate")
        return loss

    @contextlib.contextmanager
    def _replicas(self) -> Iterator[tuple[Broadcast, dict[Tensor, int]]]:
        """Yields the engine's copies, and the numbers of dense parameters that share no
        memory.
        """
        with self.engine.replicas_for_update() as replica_set:
            tensors, broadcast = replica_set.tensors, replica_set.broadcast
            starts = Counter(map(Tensor.data_ptr, tensors))
            alone = (
                i for i in broadcast.parameters if starts[tensors[i].data_ptr()] == 1
            )
            yield broadcast, {tensors[i]: i for i in alone if is_unexpanded(tensors[i])}

    def _assign_owners(
        self,
        needed: Iterable[Tensor],
        broadcast: Broadcast,
        numbers: Mapping[Tensor, int],
    ) -> dict[Tensor, Tensor]:
        """Assign an owner to every parameter that has none. Returns stand-ins, by
        parameter.

        For a parameter that another device owns, the plain optimizer updates a stand-in
        there. The largest parameters are assigned first, each to the device that owns
        least. In a tie the master is last.
        """
        master, *others = self._memories
        load = Counter(dict.fromkeys([*others, master], 0))
        for p, owner in self._owners.items():
            load[owner] += p.nbytes
        stand_ins = {}
        for p in sorted(needed, key=lambda p: -p.nbytes):
            if p not in self._owners or (
                p not in numbers and self._owners[p] != master
            ):
                owner = min(load, key=load.__getitem__) if p in numbers else master
                if p in self.state:
                    self.state[p] = self._moved(self.state[p], owner)
                self._owners[p] = owner
                load[owner] += p.nbytes
            if self._owners[p] != master:
                values = broadcast.at(self._owners[p])[numbers[p]].data
                stand_ins[p] = parameter_like(p, values).requires_grad_(p.requires_grad)
                stand_ins[p].grad_dtype = p.grad_dtype
                vars(stand_ins[p]).update(vars(p))
        return stand_ins

    def _send_gradients(self, stand_ins: Mapping[Tensor, Tensor]) -> None:
        """Copy to each owner the gradients of its parameters, message by message."""
        for device in self._memories[1:]:
            owned = (p for p in stand_ins if self._owners[p] == device)
            gradients = {p: p.grad.detach() for p in owned if p.grad is not None}
            for message in iter_copies(gradients, device, self._transfers, "reduce"):
                for p, gradient in message.items():
                    # Not a part of the message: sums may depend on where a tensor
                    # starts.
                    stand_ins[p].grad = (
                        gradient.clone() if is_part(gradient) else gradient
                    )

    @contextlib.contextmanager
    def _undo_on_error(
        self,
        updated: Sequence[Tensor],
        broadcast: Broadcast,
        numbers: Mapping[Tensor, int],
    ) -> Iterator[None]:
        """If the body fails, restore the optimizer's state and the parameters the
        master owns.

        The other owners write only to their copies, which the next refresh overwrites.
        Gradients are restored as well: some classes write ``.grad``, such as ``SGD``
        with ``nesterov`` and ``foreach``.
        """
        master, other = self._memories[:2]
        saved = []
        for p in (p for p in updated if self._owners[p] == master):
            saved.append(
                (p, broadcast.at(other)[numbers[p]] if p in numbers else p.clone())
            )
            if p.grad is not None and p.grad.layout == torch.strided:
                saved.append((p.grad, p.grad.clone()))
        state = nested.map_tensors(Tensor.clone, dict(self.state))
        try:
            yield
        except BaseException as error:
            self.state = defaultdict(dict, state)
            for target, value in saved:
                self._transfers.copy_into(target, value, "replicate")
            add_note(
                error,
                "optimizer.step(): parameters and state are as they were before it",
            )
            raise

    @contextlib.contextmanager
    def _plain_optimizer_on(
        self, stand_ins: Mapping[Tensor, Tensor]
    ) -> Iterator[Optimizer]:
        """Yields the plain optimizer with stand-ins instead of the parameters that they
        replace.

        If the body succeeds, the optimizer's new state and options are taken over.
        """
        plain = self._plain
        plain.param_groups = [
            group | {"params": [stand_ins.get(p, p) for p in group["params"]]}
            for group in self.param_groups
        ]
        plain.state = defaultdict(
            dict, {stand_ins.get(k, k): v for k, v in self.state.items()}
        )
        try:
            yield plain
            originals = {stand_in: p for p, stand_in in stand_ins.items()}
            self.state = defaultdict(
                dict, {originals.get(k, k): v for k, v in plain.state.items()}
            )
            for group, stepped in zip(
                self.param_groups, plain.param_groups, strict=True
            ):
                params = group["params"]
                group.clear()
                group.update(stepped, params=params)
        finally:
            plain.param_groups, plain.state = self.param_groups, self.state

    def state_dict(self) -> dict[str, Any]:
        """The state dict of ``optimizer_class`` with all parameters: a copy in host
        memory.
        """
        return dict(self._moved(super().state_dict(), HOST))

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
            loaded = hook(self, loaded) or loaded
        parameters = [p for group in self.param_groups for p in group["params"]]
        with self._replicas() as (broadcast, numbers):
            stand_ins = self._assign_owners(parameters, broadcast, numbers)
            with self._plain_optimizer_on(stand_ins) as plain:
                # to where each stand-in is
                plain.load_state_dict(self._moved(loaded, HOST))
        for hook in after:
            hook(self)

    def _moved(self, state: Any, device: torch.device) -> Any:
        """A copy of ``state`` on ``device``; host scalars (step counts) stay on the
        host.
        """

        def move(tensor: Tensor) -> Tensor:
            stays = not tensor.ndim and tensor.device == HOST
            return (
                tensor.clone()
                if stays
                else self._transfers.copy(tensor, device, "reduce")
            )

        return nested.map_tensors(move, state)
