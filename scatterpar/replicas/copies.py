"""The replicas of what an engine trains: of its module, and of the criterion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from scatterpar.devices.fingerprints import Readout
from scatterpar.devices.ledger import Ledger
from scatterpar.replicas.compiled import Compiler, How
from scatterpar.replicas.mirror import Bound, Survey, holder_of
from scatterpar.replicas.replicas import Replicas


class Copies:
    """The replicas of a module and of the criterion that it is trained with.

    ``parts`` are those of the model and, where it has any, of the criterion; ``criteria`` has the
    criterion of each replica.
    """

    def __init__(
        self,
        device_ids: Sequence[torch.device],
        accumulate_dtype: torch.dtype | None = None,
        compile_how: How | None = None,
        pools: bool = False,
    ) -> None:
        self.device_ids = tuple(device_ids)
        self.parts: list[Replicas] = []
        self.criteria: list[Any] = []
        self._pools = pools
        self._accumulate_dtype = accumulate_dtype
        self._compile_how = compile_how
        self.leave_behind()

    def leave_behind(self) -> None:
        """Make all of them anew: threads of an interrupted step may still use these."""
        self._model = self._replicas_of()
        self._criterion = self._replicas_of()

    def clear_gradients(self) -> None:
        """Let go of what the replicas computed, and of the user's criterion."""
        self.criteria = []
        for part in (self._model, self._criterion):
            part.clear_gradients()

    def refresh(
        self,
        module: nn.Module,
        criterion: Callable[..., Any] | None,
        ledger: Ledger,
        criterion_once: bool = False,
    ) -> None:
        """Make all replicas equal to the master's.

        A criterion that is a module, or a method of one, is replicated like the model, or with
        ``criterion_once`` on the master alone; so are the modules and tensors that are bound
        in a ``functools.partial``. Any other callable is called as it is.
        """
        if self._model.roots != (module,):
            self._model = self._replicas_of(module, how=self._compile_how)
        readout = Readout()  # the host waits once, for the model and the criterion
        with torch.inference_mode(False), torch.no_grad():
            self._model.follow(readout)
            self._find_criterion(criterion, readout, once=criterion_once)
            for part in self.parts:
                part.refresh(ledger)

    def _find_criterion(
        self, criterion: Callable[..., Any] | None, readout: Readout, *, once: bool
    ) -> None:
        owner = self._holder_of(criterion)
        self.parts, replicas = [self._model], self._model.replicas
        if owner is None:
            self.criteria = [criterion] * len(self.device_ids)
            return
        if not self._model.contains(owner):
            devices = self.device_ids[:1] if once else self.device_ids
            if (self._criterion.roots, self._criterion.device_ids) != ((owner,), devices):
                self._criterion = self._replicas_of(owner, devices=devices)
            self._criterion.follow(readout)
            self.parts, replicas = [self._model, self._criterion], self._criterion.replicas
        self.criteria = [replica.of(criterion) for replica in replicas]

    def _replicas_of(
        self,
        *roots: nn.Module,
        devices: Sequence[torch.device] | None = None,
        how: How | None = None,
    ) -> Replicas:
        wide, compiler = self._accumulate_dtype, Compiler(how)
        return Replicas(roots, devices or self.device_ids, wide, compiler, self._pools)

    def _holder_of(self, criterion: Callable[..., Any] | None) -> nn.Module | None:
        """What is replicated for the criterion's sake: the model itself, where that has it all."""
        holder = holder_of(criterion)
        if not isinstance(holder, Bound):
            return holder
        survey = Survey((holder,))
        modules = [module for module in survey.modules.values() if module is not holder]
        of_model = set(map(id, self._model.tensors))
        if of_model.issuperset(survey.tensors) and all(map(self._model.contains, modules)):
            return self._model.roots[0]
        (held, *_) = (*self._criterion.roots, None)
        return held if isinstance(held, Bound) and held.function is criterion else holder
