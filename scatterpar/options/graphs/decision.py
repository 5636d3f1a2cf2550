"""Whether an engine captures its sub-steps.

::

    WATCHING ── devices wait for the host ──> CAPTURING ── no slower ──> REPLAYING
                                                 |                          |
                                                 └── an obstacle, slower ───┴──> REFUSED

With ``graphs=True`` an engine begins with capturing, and compares no times.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from enum import Enum, auto
from statistics import median
from typing import NamedTuple

from scatterpar.devices.clocks import DeviceClock, device_waited, longest_tail, tail
from scatterpar.errors import Told, warn
from scatterpar.log import logger

# How often a captured sub-step may turn out to be another one, and one more for each so
# many steps in which it was not: a value that changes once per epoch is no reason to
# give up.
_FREE_CHANGES = 4
_STEPS_PER_CHANGE = 16
# Steps in a row in which devices waited for the host, before a capture.
_STEPS_OF_WAITING = 3
# Steps with graphs whose times are compared with those of so many steps without.
_STEPS_COMPARED = 3
# Steps with graphs are kept if their time, in times of those without, is at most this.
_LONGEST_RATIO = 1.0


class GraphStage(Enum):
    """What an engine does with its sub-steps. No stage leads back to an earlier one.

    Attributes:
        WATCHING: sub-steps run eagerly, and are timed. The first stage with
            ``graphs=None``. It ends in a step with several sub-steps per replica, once
            devices have waited for the host in ``_STEPS_OF_WAITING`` steps in a row:
            ``Decision.begin`` goes on to CAPTURING.
        CAPTURING: sub-steps are captured and replayed, and timed. The first stage with
            ``graphs=True``. It ends after ``_STEPS_COMPARED`` steps that only replay
            and prove: ``Decision.see_captured`` goes on to REPLAYING, or to REFUSED if
            the eager steps were faster.
        REPLAYING: sub-steps are captured and replayed. Times decide nothing any more.
        REFUSED: sub-steps run eagerly, and no graph is kept. ``Decision.refuse`` comes
            here from any stage: something cannot be captured, changes too often, does
            not fit into memory, or is not faster. The last stage.
    """

    WATCHING = auto()
    CAPTURING = auto()
    REPLAYING = auto()
    REFUSED = auto()


class StepTimes(NamedTuple):
    """The times of one step.

    Attributes:
        clocks: of the shares.
        rows: of the batch.
        num_substeps: the largest number of sub-steps of a share.
    """

    clocks: Sequence[DeviceClock]
    rows: int
    num_substeps: int

    def per_row(self) -> float | None:
        """Seconds per row of the slowest share; ``None`` if a device is not done."""
        slowest = 0.0
        for clock in self.clocks:
            working = clock.working()
            if working is None or not working >= 0:
                return None
            slowest = max(slowest, working)
        return slowest / self.rows

    def devices_waited(self) -> bool:
        """Whether each device has waited for the host."""
        for clock in self.clocks:
            working = clock.working()
            if working is None:
                return False
            if not device_waited(working, clock.launching, self.num_substeps):
                return False
        return bool(self.clocks)

    def wait(self) -> str:
        """How long the host has waited for devices, in words; empty if unknown."""
        tails: list[float] = []
        for clock in self.clocks:
            working = clock.working()
            if working is not None:
                tails.append(tail(working, clock.launching))
        if not tails:
            return ""
        return (
            f"the host waited for devices in {max(tails):.0%} of a share; below "
            f"{longest_tail(self.num_substeps):.0%} in {_STEPS_OF_WAITING} steps in a "
            "row, sub-steps are captured"
        )


class Decision:
    """The decision of an engine about its graphs; replicas' threads share it.

    Attributes:
        is_asked: whether the user has asked for graphs, with ``graphs=True``.
        stage: what the engine does now.
        refusal: why the stage is REFUSED; empty in all others.
        steps: the number of steps with graphs.
        wait: how long the host waited for devices in the latest eager step, in words.
    """

    def __init__(self, *, is_asked: bool) -> None:
        self.is_asked = is_asked
        self.stage = GraphStage.CAPTURING if is_asked else GraphStage.WATCHING
        self.refusal = ""
        self.steps = 0
        self.wait = ""
        self._changes = 0
        self._steps_without_change = 0
        self._steps_of_waiting = 0
        self._eager: deque[float] = deque(maxlen=_STEPS_COMPARED)
        self._captured: list[float] = []
        self._told = Told()
        self._lock = threading.Lock()

    def refuse(self, why: str) -> None:
        """Capture nothing from now on."""
        with self._lock:
            if self.stage is not GraphStage.REFUSED:
                self.stage = GraphStage.REFUSED
                self.refusal = why

    def tell(self, why: str) -> None:
        """Say once why sub-steps run without graphs."""
        if not self._told.mark(why):
            return
        if self.is_asked:
            warn(f"graphs=True: sub-steps run without graphs, because {why}")
        else:
            logger.info("graphs: sub-steps run without graphs, because %s", why)

    # --- what changes ---

    def confirm(self) -> None:
        """Count a step whose tapes were those of its captures."""
        self._steps_without_change += 1

    def changed(self, where: str) -> None:
        """Count a tape that was not that of the capture; refuse after too many."""
        self._changes += 1
        allowed = _FREE_CHANGES + self._steps_without_change // _STEPS_PER_CHANGE
        if self._changes > allowed:
            self.refuse(
                f"something changes from step to step: {where}. Make it a tensor that "
                "is written in place, or a part of the batch"
            )
        else:
            logger.info("graphs: captured again, because %s", where)

    # --- times ---

    def devices_wait(self) -> bool:
        """Whether devices have waited for the host in enough eager steps in a row."""
        return self._steps_of_waiting >= _STEPS_OF_WAITING

    def begin(self) -> None:
        """Go on from WATCHING to CAPTURING: this step is the first with graphs."""
        if self.stage is GraphStage.WATCHING:
            logger.info("graphs: devices wait for the host; sub-steps are captured")
            self.stage = GraphStage.CAPTURING

    def see_eager(self, times: StepTimes) -> None:
        """Note the times of a step that has run without graphs."""
        self.wait = times.wait()
        if not times.devices_waited():
            self._steps_of_waiting = 0
            return
        self._steps_of_waiting += 1
        seconds = times.per_row()
        if seconds is not None:
            self._eager.append(seconds)

    def see_captured(self, times: StepTimes) -> None:
        """Note the times of a step that has replayed all except what each step proves.

        After enough such steps, go on from CAPTURING to REPLAYING, or refuse.
        """
        if self.stage is not GraphStage.CAPTURING:
            return
        seconds = times.per_row()
        if seconds is not None:
            self._captured.append(seconds)
        if len(self._captured) < _STEPS_COMPARED:
            return
        if self.is_asked or not self._eager:
            self.stage = GraphStage.REPLAYING
            return
        eager = median(self._eager)
        captured = median(self._captured)
        if captured <= _LONGEST_RATIO * eager:
            self.stage = GraphStage.REPLAYING
            return
        self.refuse(
            f"graphs do not make it faster: {1e6 * captured:.3g} µs per row with them, "
            f"{1e6 * eager:.3g} without"
        )
