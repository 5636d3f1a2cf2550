"""Replicas: built once, kept, and made equal to the master's module before every step."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from scatterpar.devices import verbs
from scatterpar.devices.flat import FlatCopy
from scatterpar.devices.ledger import Ledger
from scatterpar.replicas.compiled import Compiler
from scatterpar.replicas.mirror import Mirror, Snapshot, Survey

__all__ = ["Replica", "Replicas", "check_placement", "sum_dtype"]


class Replica:
    """One working copy: its modules, and its tensors in the order of the master's.

    Attributes:
        index: the number of the replica.
        device: where it lives.
        roots: the copies of the modules that were replicated.
        tensors: this copy's tensors; those that are trained are leaves.
        of: this copy's counterpart of a module of the master's, or of a method of one.
    """

    def __init__(
        self,
        index: int,
        device: torch.device,
        roots: Sequence[nn.Module],
        survey: Survey,
        sources: Sequence[Tensor],
        compiler: Compiler,
    ) -> None:
        self.index = index
        self.device = device
        originals = list(survey.tensors.values())
        self._private = [i for i, tensor in enumerate(originals) if _is_private(tensor)]
        own = FlatCopy([originals[i] for i in self._private], device).views
        self.tensors = [source.detach() for source in sources]
        for i, view in zip(self._private, own, strict=True):
            self.tensors[i] = view.detach()
        for i, original in enumerate(originals):
            if isinstance(original, nn.Parameter):
                self.tensors[i] = nn.Parameter(self.tensors[i], requires_grad=False)
                vars(self.tensors[i]).update(vars(original))
        mirror = Mirror(survey, dict(zip(survey.tensors, self.tensors, strict=True)), compiler)
        self.of = mirror.of
        self.roots = tuple(mirror.of(root) for root in roots)
        self.buffers = [mirror.of(module)._buffers for module in survey.modules.values()]
        self._state = Snapshot(mirror.containers)

    def refresh(self, sources: Sequence[Tensor]) -> None:
        """Undo what a forward pass rebound, and copy in the buffers of ``sources``."""
        if not self._state.unchanged():
            self._state.restore()
        if self._private:
            torch._foreach_copy_(
                [self.tensors[i] for i in self._private], [sources[i] for i in self._private]
            )

    def assign(self, entries: Iterable[tuple[int, str, Any]]) -> None:
        """Obey attributes that the user rebound on the master."""
        self._state.assign(entries)

    def train_like(self, dtypes: Sequence[torch.dtype | None]) -> None:
        """Take over which tensors are trained, and in which dtype their gradients add up."""
        for tensor, dtype in zip(self.tensors, dtypes, strict=True):
            tensor.requires_grad_(dtype is not None)
            if dtype is not None:
                tensor.grad_dtype = dtype


class Replicas:
    """The replicas of some modules on some devices.

    Parameters on the master's own device share its storage; every other device has one
    copy of them, which its replicas share. Buffers are each replica's own. ``refresh``
    makes all of it equal to the master's, whatever the user did to the module meanwhile.

    Args:
        roots: modules that live on ``device_ids[0]``, the master.
        device_ids: one entry per replica.
        wide: gradients add up in this dtype, where their own is narrower.
        compiler: makes the compiled calls of the replicas.
    """

    def __init__(
        self,
        roots: Sequence[nn.Module],
        device_ids: Sequence[torch.device],
        wide: torch.dtype | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        self.compiler = compiler or Compiler()
        self.rehearsed: set[Hashable] = set()  # what compiled replicas have met as they are now
        self.roots = tuple(roots)
        self.device_ids = tuple(device_ids)
        self.replicas: list[Replica] = []
        self.tensors: list[Tensor] = []
        self.buffers: list[dict[str, Tensor | None]] = []
        self._modules: dict[int, nn.Module] = {}
        self._wide = wide
        self._sum_dtypes: list[torch.dtype | None] = []
        self._state: Snapshot | None = None

    def refresh(self, ledger: Ledger) -> None:
        """Make every replica equal to the master's modules as they are now."""
        with torch.inference_mode(False), torch.no_grad():
            if not self._follow():
                self._build()
            self._broadcast(ledger)
            for replica in self.replicas:
                replica.refresh(self._sources[replica.device])

    def rewind(self, number: int) -> None:
        """Undo whatever one replica's forward passes did to its state since the refresh."""
        replica = self.replicas[number]
        with torch.inference_mode(False), torch.no_grad():
            replica.refresh(self._sources[replica.device])

    def contains(self, module: nn.Module) -> bool:
        """Whether ``module`` is one of those that are replicated."""
        return id(module) in self._modules

    @property
    def training(self) -> tuple[bool, ...]:
        """Which modules are in training mode."""
        return tuple(module.training for module in self._modules.values())

    def forget_step(self) -> None:
        """Undo whatever forward and backward passes left since the refresh."""
        self.clear_gradients()
        for tensor in self.trained_tensors:
            tensor.grad = None
        for number in range(len(self.replicas)):
            self.rewind(number)

    def clear_gradients(self) -> None:
        """Let go of what the replicas computed."""
        for replica in self.replicas:
            for i in self.trained:
                replica.tensors[i].grad = None

    @property
    def modules(self) -> list[nn.Module]:
        """Each replica's copy of the first root."""
        return [replica.roots[0] for replica in self.replicas]

    @property
    def trained_tensors(self) -> list[Tensor]:
        """The master's leaves that a backward pass gives gradients."""
        return [self.tensors[i] for i in self.trained]

    @property
    def trained(self) -> list[int]:
        """Positions in ``tensors`` of the leaves that a backward pass gives gradients."""
        return [i for i, dtype in enumerate(self._sum_dtypes) if dtype is not None]

    def _follow(self) -> bool:
        """Obey what can be obeyed in place; whether that was all."""
        if self._state is None or self._signature() != self._signed:
            return False
        if not self._state.unchanged():
            entries = self._state.rebound()
            if entries is None:
                return False
            self._state.assign(entries)
            self.rehearsed.clear()
            for replica in self.replicas:
                replica.assign(entries)
        dtypes = self._wanted()
        if dtypes != self._sum_dtypes:
            self._sum_dtypes = dtypes
            self.rehearsed.clear()
            for replica in self.replicas:
                replica.train_like(dtypes)
        return True

    def _wanted(self) -> list[torch.dtype | None]:
        """The dtype that each tensor's gradient adds up in; ``None`` for one that has none."""
        return [
            sum_dtype(t, self._wide)
            if t.requires_grad and t.is_leaf and not t.is_inference()
            else None
            for t in self.tensors
        ]

    def _build(self) -> None:
        check_placement(self.roots, self.device_ids[0])
        survey = Survey(self.roots)
        here = verbs.physical(self.device_ids[0])
        survey.tensors = {i: t for i, t in survey.tensors.items() if t.device == here}
        self.tensors = list(survey.tensors.values())
        self._modules = survey.modules
        self.buffers = [module._buffers for module in survey.modules.values()]
        self._sources: dict[torch.device, list[Tensor]] = {self.device_ids[0]: self.tensors}
        self._arrivals = {
            device: FlatCopy(self.tensors, device)
            for device in dict.fromkeys(self.device_ids)
            if device != self.device_ids[0]
        }
        needed = self._arrivals and self.tensors
        self._departure = FlatCopy(self.tensors, self.device_ids[0]) if needed else None
        self._sources.update({device: arrival.views for device, arrival in self._arrivals.items()})
        self.replicas = [
            Replica(index, device, self.roots, survey, self._sources[device], self.compiler)
            for index, device in enumerate(self.device_ids)
        ]
        self._sum_dtypes = self._wanted()
        self.rehearsed.clear()
        for replica in self.replicas:
            replica.train_like(self._sum_dtypes)
        self._state = Snapshot(survey.containers)
        self._signed = self._signature()

    def _broadcast(self, ledger: Ledger) -> None:
        """One message per dtype to each device other than the master."""
        if self._departure is None:
            return
        torch._foreach_copy_(self._departure.views, self.tensors)
        for arrival in self._arrivals.values():
            for target, source in zip(arrival.flats, self._departure.flats, strict=True):
                ledger.copy_into(target, source, "replicate")

    def _signature(self) -> list[Any]:
        """What ``.data`` edits, ``.to()`` and ``.half()`` change, and the modules' classes."""
        tensors = [(t.data_ptr(), t.dtype, t.device, t.shape, t.stride()) for t in self.tensors]
        return [*tensors, *map(type, self._modules.values())]


def check_placement(
    roots: Iterable[nn.Module], master: torch.device, *, lazy: bool = False
) -> None:
    """Refuse modules that cannot be replicated from ``master``, naming what is in the way.

    With ``lazy``, parameters that are not initialised yet are let pass.

    Raises:
        RuntimeError: a lazy module that has not been initialised.
        ValueError: a parameter or buffer on another device.
    """
    expected = verbs.physical(master)
    for root in roots:
        for kind, named in (
            ("parameter", root.named_parameters()),
            ("buffer", root.named_buffers()),
        ):
            for name, tensor in named:
                if is_lazy(tensor):
                    if lazy:
                        continue
                    raise RuntimeError(
                        f"{type(root).__name__} has an uninitialised lazy {kind}, {name!r}: "
                        f"call the module once on one micro-batch before the first step"
                    )
                if tensor.device != expected:
                    raise ValueError(
                        f"{type(root).__name__} must be on device_ids[0], which is {master}, but "
                        f"its {kind} {name!r} is on {tensor.device}; call .to({str(expected)!r})"
                    )


def sum_dtype(tensor: Tensor, wide: torch.dtype | None) -> torch.dtype:
    """The dtype that a leaf's gradient adds up in: its ``grad_dtype``, or ``wide`` if wider."""
    own = tensor.grad_dtype or tensor.dtype
    return own if wide is None else torch.promote_types(own, wide)


def _is_private(tensor: Tensor) -> bool:
    """Whether every replica needs its own copy: all but parameters, which a step only reads."""
    return not isinstance(tensor, nn.Parameter)
