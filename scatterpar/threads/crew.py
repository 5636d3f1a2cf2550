"""The crew behind an engine: the replicas of its module and of criteria, and their workers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from scatterpar.devices.fingerprints import Readout
from scatterpar.devices.ledger import Ledger
from scatterpar.devices.links import LinkCheck
from scatterpar.plan import Plan
from scatterpar.replicas.compiled import Compiler, How
from scatterpar.replicas.mirror import Bound, Survey, holder_of
from scatterpar.replicas.replicas import Replicas
from scatterpar.threads.attempt import Attempt
from scatterpar.threads.context import Interrupts
from scatterpar.threads.sharing import Claims
from scatterpar.threads.workers import Workers

__all__ = ["Crew"]


class Crew:
    """Replicas of modules on ``device_ids``, with a worker for each.

    A crew is made anew, not copied, when its owner is copied or unpickled.

    Args:
        device_ids: one entry per replica.
        accumulate_dtype: gradients add up in this dtype, where their own is narrower.
        compile_how: compiles the replicas of the module.
        earlier: how many replicas of other processes are numbered before these.
        pools: running statistics of batch normalisation move once a step.
    """

    def __init__(
        self,
        device_ids: Sequence[torch.device],
        accumulate_dtype: torch.dtype | None = None,
        compile_how: How | None = None,
        earlier: int = 0,
        pools: bool = False,
    ) -> None:
        self.device_ids = tuple(device_ids)
        self._pools = pools
        self._earlier = earlier
        self._accumulate_dtype = accumulate_dtype
        self._compile_how = compile_how
        self.model = self._replicas_of()
        self._criterion = self._replicas_of()
        self.workers = Workers(len(device_ids), "this engine")
        self.claims = Claims()
        self._check_links = LinkCheck(self.device_ids)

    @contextlib.contextmanager
    def step_of(self, module: nn.Module) -> Iterator[Interrupts]:
        """One step that trains ``module``, in this engine or in another one.

        Raises:
            RuntimeError: as ``Workers.exclusive``; another engine is training the module.
        """
        with self.workers.exclusive() as interrupts, self.claims:
            self.claims.take(module)
            yield interrupts

    @contextlib.contextmanager
    def attempt(self, plan: Plan) -> Iterator[Attempt]:
        """One try at a step: what is raised in the body leaves no trace in random numbers."""
        self._check_links()
        try:
            with Attempt(self.workers, [s.device for s in plan.shares], self._earlier) as attempt:
                yield attempt
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """Let go of the replicas' gradients, unless the replicas are let go themselves."""
        if not self.workers.abandoned:
            for part in (self.model, self._criterion):
                part.clear_gradients()

    def refresh(
        self,
        module: nn.Module,
        criterion: Callable[..., Any] | None,
        ledger: Ledger,
        *,
        criterion_at_home: bool = False,
    ) -> tuple[list[Replicas], list[Any]]:
        """Make all replicas equal to the master's; these, and the criterion of each.

        A criterion that is a module, or a method of one, is replicated like the model, or with
        ``criterion_at_home`` on the master alone; so are the modules and tensors that are bound
        in a ``functools.partial``. Any other callable is called as it is.
        """
        if self.workers.abandoned:
            # Threads of an interrupted step may still use the old replicas: leave these to them.
            self.workers.abandoned = False
            self.model = self._replicas_of()
            self._criterion = self._replicas_of()
        if self.model.roots != (module,):
            self.model = self._replicas_of(module, how=self._compile_how)
        readout = Readout()  # the host waits once, for the model and the criterion
        with torch.inference_mode(False), torch.no_grad():
            self.model.follow(readout)
            parts, criteria = self._with_criterion(criterion, readout, at_home=criterion_at_home)
            for part in parts:
                part.refresh(ledger)
        return parts, criteria

    def _with_criterion(
        self, criterion: Callable[..., Any] | None, readout: Readout, *, at_home: bool
    ) -> tuple[list[Replicas], list[Any]]:
        owner = self._holder_of(criterion)
        if owner is None:
            return [self.model], [criterion] * len(self.device_ids)
        if self.model.contains(owner):
            return [self.model], [replica.of(criterion) for replica in self.model.replicas]
        devices = self.device_ids[:1] if at_home else self.device_ids
        if (self._criterion.roots, self._criterion.device_ids) != ((owner,), devices):
            self._criterion = self._replicas_of(owner, devices=devices)
        self._criterion.follow(readout)
        criteria = [replica.of(criterion) for replica in self._criterion.replicas]
        return [self.model, self._criterion], criteria

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
        of_model = set(map(id, self.model.tensors))
        if of_model.issuperset(survey.tensors) and all(map(self.model.contains, modules)):
            return self.model.roots[0]
        (held, *_) = (*self._criterion.roots, None)
        return held if isinstance(held, Bound) and held.function is criterion else holder
