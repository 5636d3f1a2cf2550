"""An optimizer whose state lies on all devices of an engine: each owns whole parameters.

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

from scatterpar.devices.coalescing import copy_coalesced, copy_each
from scatterpar.devices.transfers import Transfers
from scatterpar.engine import ScatterOnceParallel
from scatterpar.replicas.replicas import ParameterCopies, parameter_like
from scatterpar.step import nested
from scatterpar.threads.workers import add_note
from scatterpar.torch_private import loading_hooks, step_without_hooks

__all__ = ["ShardedOptimizer"]

_HOST = torch.device("cpu")


class ShardedOptimizer(Optimizer):
    """``optimizer_class`` with its state spread over the devices of an engine.

    Parameters, ``.grad`` and ``param_groups`` are the user's and stay on the master, so clipping,
    ``GradScaler``, schedulers and hooks work as ever. Each parameter has one owner among the
    devices, where its state lies. A step sends the owners their gradients, steps there, and
    brings the new values to all devices: the engine's next step sends no parameter again. Each
    bit is that of ``optimizer_class`` on one device.

    With several devices a step that fails leaves parameters and state as they were; for its time
    each owner keeps a copy of the state that it has. With a process group every rank has the same
    gradients and steps alike, on its own devices.

    Args:
        engine: whose devices share the state.
        optimizer_class: any that treats each parameter by itself, such as ``torch.optim.AdamW``,
            or a function that makes one.
        params: what ``optimizer_class`` takes, on the master; by default all parameters of
            ``engine.module``. Those outside the module are stepped on the master.
        defaults: the other arguments of ``optimizer_class``.

    Attributes:
        engine: the engine; after its ``close()`` another one on the same devices can follow.

    Raises:
        TypeError: not an engine, not an optimizer's class, or ``LBFGS``, which makes one vector of
            all parameters.

    Example:
        >>> engine = ScatterOnceParallel(torch.nn.Linear(4, 2), 1, ["cpu:0", "cpu:1"])
        >>> optimizer = ShardedOptimizer(engine, torch.optim.AdamW, lr=3e-4, weight_decay=0.1)
        >>> loss = engine.forward_backward(torch.randn(8, 4), None, lambda y, _: y.mean())
        >>> optimizer.step()
        >>> optimizer.state_bytes  # two moments of float32, and a count for each parameter
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
                f"engine must be a ScatterOnceParallel, whose devices share the state, got "
                f"{type(engine).__name__}"
            )
        params = engine.module.parameters() if params is None else params
        made = optimizer_class(params, **defaults) if callable(optimizer_class) else None
        self._plain = _checked(made, optimizer_class)
        super().__init__(self._plain.param_groups, self._plain.defaults)
        self.engine = engine
        self._memories = list(dict.fromkeys(engine.device_ids))
        self._owners: dict[Any, torch.device] = {}
        self._ledger = Transfers()
        self.state = self._plain.state
        if self.state and len(self._memories) > 1:  # some have state from the start
            with engine.replicas_for_update() as copies:
                self._assign_owners(list(self.state), copies.parameter_copies())

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a ShardedOptimizer cannot be copied or pickled, since its state lies on the devices "
            "of one engine; save its state_dict(), and load that into another"
        )

    @property
    def state_bytes(self) -> dict[torch.device, int]:
        """How many bytes of state each memory has; the host's small change is its owner's."""
        found = dict.fromkeys(self._memories, 0)
        for key, state in self.state.items():
            owner = self._owners.get(key, self._memories[0])
            found[owner] += sum(tensor.nbytes for tensor in nested.tensors(state))
        return found

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all parameters that have a gradient.

        Args:
            closure: is called once, before the step.

        Returns:
            What ``closure`` returns.

        Raises:
            RuntimeError: inside a step of the engine, or after its ``close()``.

            What ``optimizer_class`` raises arrives as it is.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if len(self._memories) == 1:
            with self._plain_optimizer_on({}) as plain:
                step_without_hooks(plain)
            return loss
        with self.engine.replicas_for_update() as copies:
            lent = copies.parameter_copies()
            every = dict.fromkeys(p for group in self.param_groups for p in group["params"])
            moving = [p for p in every if p.grad is not None]
            stand_ins = self._assign_owners(moving, lent)
            self._send_gradients(stand_ins)
            with self._undo_on_error(moving, lent), self._plain_optimizer_on(stand_ins) as plain:
                step_without_hooks(plain)
            for stand_in in stand_ins.values():
                stand_in.grad = None  # makes room for what is brought now
            try:
                copies.broadcast_updates(
                    {p: self._owners[p] for p in moving if p in lent}, self._ledger
                )
            except Exception:  # no room for messages; the others get theirs in the next refresh
                for p, stand_in in stand_ins.items():
                    self._ledger.copy_into(p, stand_in, "replicate")
        return loss

    def _assign_owners(
        self, needed: Iterable[Tensor], lent: ParameterCopies
    ) -> dict[Tensor, Tensor]:
        """Give those an owner that have none; what steps in place of those owned elsewhere.

        The largest first, each to who owns least so far, and rather not to the master.
        """
        home, *away = self._memories
        load = Counter(dict.fromkeys([*away, home], 0))
        for p, owner in self._owners.items():
            load[owner] += p.nbytes
        stand_ins = {}
        for p in sorted(needed, key=lambda p: -p.nbytes):
            if p not in self._owners or (p not in lent and self._owners[p] != home):
                owner = min(load, key=load.__getitem__) if p in lent else home
                if p in self.state:
                    self.state[p] = self._moved(self.state[p], owner)
                self._owners[p] = owner
                load[owner] += p.nbytes
            if self._owners[p] != home:
                stand_ins[p] = _stand_in(p, lent[p][self._owners[p]])
        return stand_ins

    def _send_gradients(self, stand_ins: Mapping[Tensor, Tensor]) -> None:
        """Each owner gets those of what it owns, chunk by chunk."""
        for device in self._memories[1:]:
            owned = [p for p in stand_ins if self._owners[p] == device]
            gradients = {i: p.grad.detach() for i, p in enumerate(owned) if p.grad is not None}
            for i, gradient in copy_coalesced(gradients, device, self._ledger, "reduce").items():
                stand_ins[owned[i]].grad = gradient

    @contextlib.contextmanager
    def _undo_on_error(self, moving: Sequence[Tensor], lent: ParameterCopies) -> Iterator[None]:
        """What the body does to the state and to the master's own parameters, if it fails.

        The other owners write to their copies only. Some classes write ``.grad``, too, as ``SGD``
        does with ``nesterov`` and ``foreach``.
        """
        home, other = self._memories[:2]
        own = [p for p in moving if self._owners[p] == home]
        values = [lent[p][other] if p in lent else p.detach().clone() for p in own]
        dense = [p.grad for p in own if p.grad is not None and p.grad.layout == torch.strided]
        kept = [gradient.clone() for gradient in dense]
        state = nested.map_tensors(lambda tensor: tensor.clone(), dict(self.state))
        try:
            yield
        except BaseException as error:
            self.state = defaultdict(dict, state)
            for p, value in zip(own, values, strict=True):
                self._ledger.copy_into(p, value, "replicate")
            copy_each(dense, kept)
            add_note(error, "optimizer.step(): parameters and state are as they were before it")
            raise

    @contextlib.contextmanager
    def _plain_optimizer_on(self, stand_ins: Mapping[Tensor, Tensor]) -> Iterator[Optimizer]:
        """The plain optimizer, on these in place of parameters; what it does counts at the end."""
        plain = self._plain
        plain.param_groups = [
            group | {"params": [stand_ins.get(p, p) for p in group["params"]]}
            for group in self.param_groups
        ]
        plain.state = defaultdict(dict, {stand_ins.get(k, k): v for k, v in self.state.items()})
        try:
            yield plain
            back = {stand_in: p for p, stand_in in stand_ins.items()}
            self.state = defaultdict(dict, {back.get(k, k): v for k, v in plain.state.items()})
            for group, stepped in zip(self.param_groups, plain.param_groups, strict=True):
                params = group["params"]
                group.clear()
                group.update(stepped, params=params)
        finally:
            plain.param_groups, plain.state = self.param_groups, self.state

    def state_dict(self) -> dict[str, Any]:
        """That of ``optimizer_class`` with all parameters: a copy in the host's memory."""
        found: dict[str, Any] = self._moved(super().state_dict(), _HOST)
        return found

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load that of ``optimizer_class``, sharded over any devices or not.

        Raises:
            ValueError: its groups are others, or have other numbers of parameters.
        """
        before, after = loading_hooks(self)
        loaded = dict(state_dict)
        for hook in before:
            loaded = hook(self, loaded) or loaded
        if len(self._memories) == 1:
            self._load(loaded, {})
        else:
            with self.engine.replicas_for_update() as copies:
                self._load(loaded, copies.parameter_copies())
        for hook in after:
            hook(self)

    def _load(self, loaded: dict[str, Any], lent: ParameterCopies) -> None:
        """Each parameter's state to its owner; then it is for ``optimizer_class`` to say."""
        numbers = [n for group in loaded["param_groups"] for n in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        of = dict(zip(numbers, parameters, strict=False))  # more of one are refused below
        stand_ins = self._assign_owners([of[n] for n in loaded["state"] if n in of], lent)
        home = self._memories[0]
        state = {
            n: self._moved(one, self._owners.get(of.get(n), home))
            for n, one in loaded["state"].items()
        }
        with self._plain_optimizer_on(stand_ins) as plain:
            plain.load_state_dict(loaded | {"state": state})

    def _moved(self, state: Any, device: torch.device) -> Any:
        """A copy of tensors in that memory; the host's numbers, such as counts, stay there."""

        def one(tensor: Tensor) -> Tensor:
            stays = not tensor.ndim and tensor.device == _HOST
            return tensor.clone() if stays else self._ledger.copy(tensor, device, "reduce")

        return nested.map_tensors(one, state)


def _checked(made: Any, optimizer_class: Any) -> Optimizer:
    if not isinstance(made, Optimizer):
        raise TypeError(
            f"optimizer_class must be a class such as torch.optim.AdamW, got {optimizer_class!r}; "
            f"its arguments come after it: ShardedOptimizer(engine, torch.optim.AdamW, lr=3e-4)"
        )
    if isinstance(made, (LBFGS, ShardedOptimizer)):
        raise TypeError(
            f"{type(made).__name__} cannot be sharded: it does not treat each parameter by "
            f"itself; use it as it is, on engine.module.parameters()"
        )
    return made


def _stand_in(p: Tensor, values: Tensor) -> Tensor:
    """A parameter like ``p`` whose values are its copy elsewhere."""
    own = parameter_like(p, values.data).requires_grad_(p.requires_grad)
    own.grad_dtype = p.grad_dtype
    vars(own).update(vars(p))
    return own
