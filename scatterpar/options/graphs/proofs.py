"""Which sub-steps of a step are proved: computed eagerly, on tape.

Replicas share their Python, so each step proves one of them, in turn. All are proved in
the first step after a capture, and in steps 1, 2, 4, 8, …, because Python may read
values by device::

    step with graphs    1            2    3    4    5    6    7    8    9    10
    proves replica      1, captured  all  1    all  1    0    1    all  1    0
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scatterpar.look_steps import is_look_step
from scatterpar.options.graphs.captures import Graph, ReplicaGraphs, graph_key
from scatterpar.step.attempt import Attempt
from scatterpar.step.task import ReplicaTask


class StepPlan:
    """Which sub-steps of a step run eagerly, as the last ones of their shape.

    Attributes:
        replays: the number of sub-steps that were replayed.
        is_steady: whether all is captured, and no more is proved than in most steps;
            fixed when the plan is made.
    """

    def __init__(
        self,
        tasks: Sequence[ReplicaTask],
        attempt: Attempt,
        graphs: Sequence[ReplicaGraphs],
        step: int,
    ) -> None:
        self.replays = 0
        self.is_steady = not is_look_step(step)
        self._lock = threading.Lock()
        self.step = step
        self._keys: dict[int, list[Hashable]] = {}
        key_by_rows: dict[int, Hashable] = {}
        for task in tasks:
            keys = _keys_of(task, attempt.request.return_outputs, key_by_rows)
            self._keys[task.share.replica] = keys
        self._checked: dict[int, set[int]] = {number: set() for number in self._keys}
        for key, last_sub_steps in self._last_sub_steps().items():
            present = {
                replica: graphs[replica].by_shape.get(key) for replica in last_sub_steps
            }
            if not all(graph and graph.is_proved() for graph in present.values()):
                self.is_steady = False
            for replica in _to_prove(present, step):
                self._checked[replica].add(last_sub_steps[replica])
        self._leave_out_unreplayed()

    def _last_sub_steps(self) -> dict[Hashable, dict[int, int]]:
        """For each shape, by replica, the last sub-step that has it."""
        last_sub_steps: dict[Hashable, dict[int, int]] = defaultdict(dict)
        for replica, keys in self._keys.items():
            for number, key in enumerate(keys):
                if key is not None:
                    last_sub_steps[key][replica] = number
        return last_sub_steps

    def _leave_out_unreplayed(self) -> None:
        """Drop the keys of shapes that no other sub-step has: nothing is proved by
        them.
        """
        replayed: set[Hashable] = set()
        for replica, keys in self._keys.items():
            checked = self._checked[replica]
            replayed |= {
                key for number, key in enumerate(keys) if number not in checked
            }
        for replica, keys in self._keys.items():
            for number in sorted(self._checked[replica]):
                if keys[number] not in replayed:
                    keys[number] = None
                    self._checked[replica].remove(number)

    def of(self, replica: int) -> SharePlan:
        """The part of one replica."""
        return SharePlan(self, self._keys[replica], self._checked[replica])

    def count_replay(self) -> None:
        """Count a replayed sub-step."""
        with self._lock:
            self.replays += 1


def _to_prove(graphs: Mapping[int, Graph | None], step: int) -> list[int]:
    """The replicas whose graphs of one shape are proved in a step with this number.

    ``graphs`` are these graphs, by replica.
    """
    steps_of_proofs: dict[int, int] = {}
    replicas: list[int] = []
    for replica, graph in graphs.items():
        steps_of_proofs[replica] = 0 if graph is None else graph.proof
        if graph is not None and graph.is_proved_alone(step):
            replicas.append(replica)
    # The one whose last proof is the oldest; of several, replica t mod N in step t.
    numbers = list(graphs)
    first = step % len(numbers)
    in_turn = [*numbers[first:], *numbers[:first]]
    turn = min(in_turn, key=steps_of_proofs.__getitem__)
    if turn not in replicas:
        replicas.append(turn)
    # A replica that has no graph yet proves none, and others replay theirs.
    captured = [number for number in in_turn if _is_captured(graphs[number])]
    if captured and not set(captured).intersection(replicas):
        replicas.append(min(captured, key=steps_of_proofs.__getitem__))
    return replicas


def _is_captured(graph: Graph | None) -> bool:
    return graph is not None and graph.replay is not None


@dataclass(frozen=True)
class SharePlan:
    """The sub-steps of one replica.

    Attributes:
        step: the plan of all replicas.
        keys: of the sub-steps' graphs; ``None`` for those without one.
        checked: the numbers of the sub-steps that run eagerly, on tape.
    """

    step: StepPlan
    keys: Sequence[Hashable]
    checked: set[int]


def _keys_of(
    task: ReplicaTask, return_outputs: Any, key_by_rows: dict[int, Hashable]
) -> list[Hashable]:
    """For each sub-step a key of its graph; ``None`` if it runs without one.

    ``key_by_rows`` has the keys of all replicas, by number of rows.
    """
    keys: list[Hashable] = []
    # Views of one batch with as many rows have one key. Markers may collate anything.
    has_markers = any(batch.markers for batch in task.loader.batches)
    is_single = len(task.loader.batches) == 1 and not has_markers
    for number, (start, stop) in enumerate(task.share.micro_batches):
        # What does not count runs no backward pass.
        if not task.weights[number]:
            keys.append(None)
            continue
        if not is_single or stop - start not in key_by_rows:
            source = task.loader.at_source(number).unwrapped()
            parts = source, bool(return_outputs), task.sums
            key_by_rows[stop - start] = graph_key(parts)
        keys.append(key_by_rows[stop - start])
    return keys
