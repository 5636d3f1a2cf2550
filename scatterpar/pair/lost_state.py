"""What a call of the pair leaves behind, and nobody finds there: told once, by name.

::

    self.calls += 1            in a copy of the module that is made anew in each call
    features["x"] = output     by a hook, into what all replicas share: the last one's
    self.hidden = output       in a copy, where no criterion finds it

Calls 1, 2, 4, 8, … are looked at. Buffers of replica 0 come back, so they are not lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scatterpar.errors import Told, warn
from scatterpar.look_steps import is_look_step
from scatterpar.replicas.module_copy import ModuleCopy
from scatterpar.verify.moved_state import (
    SharedTensors,
    State,
    kept_graphs,
    moved_between,
    state_of,
)

_PAGE = "docs/limits.md, State in modules."


class LostState:
    """Looks at the calls of one module or criterion."""

    def __init__(self) -> None:
        self._calls = 0
        self._told = Told()
        self._copies: Sequence[ModuleCopy] = ()
        self._before: State = {}
        self._later: State = {}  # what the last look found that was not there before
        self._graphs: set[str] = set()
        self._shared: SharedTensors | None = None

    def begin(self, module: Any, copies: Sequence[ModuleCopy]) -> None:
        """Save what ``copies`` of ``module`` hold, if this call is looked at."""
        self._calls += 1
        if not is_look_step(self._calls):
            return
        self._copies = copies[:2]
        self._before = state_of(copies[:1], has_same_rows=True)
        self._graphs = set(kept_graphs(copies[0].root))
        if len(copies) > 1:
            self._shared = SharedTensors([module])

    def end(self) -> None:
        """Tell what the call has left behind."""
        if not self._copies:
            return
        after, *others = [state_of([copy], has_same_rows=True) for copy in self._copies]
        names = moved_between([self._before, after])
        # A mask or table that each call makes, the same for all rows, is not missed.
        later = {name: after[name] for name in after.keys() - self._before.keys()}
        for state in (self._later, *others):
            names += moved_between([later, state])
        self._later = later
        graphs = kept_graphs(self._copies[0].root)
        names += [name for name in graphs if name not in self._graphs]
        left = self._shared.left() if self._shared is not None else []
        self._copies = ()
        self._shared = None
        self._tell(
            names,
            "forward sets {names}, in copies that each call makes anew: your module "
            "keeps its own values. Return it from forward, keep it in a buffer "
            "(replica 0's come back), or set it outside of forward.",
        )
        self._tell(
            left,
            "forward or a hook leaves tensors behind in {names}, which all replicas "
            "share: whoever reads it, such as a criterion, gets those of one replica. "
            "Return them from forward.",
        )

    def _tell(self, names: Sequence[str], text: str) -> None:
        new = [name for name in dict.fromkeys(names) if self._told.mark(name)]
        if new:
            warn(f"{text.format(names=', '.join(new))} {_PAGE}")
