"""What bounds recorded steps, and what to pass: a sentence for ``print(trace)``.

Each cause of lost time has an estimate of the seconds that could be saved, and a sentence. The
sentence with the most seconds is shown if these are a tenth of the time or more.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean, median
from typing import TypeVar

import torch

from scatterpar.threads.clock import ON_DEVICES, Event, RecordedStep

BETWEEN = "between steps"  # the event from one step to the next

_NOTABLE = 0.1  # a cause that takes this part of the time is named
_UNEVEN = 1.15  # a replica that takes this many times the mean of all replicas is slow
_TINY_SECONDS = 0.002  # shorter sub-steps are mostly overhead
_MANY = 4  # sub-steps per replica, from which on tiny ones are reported
_LAG = 0.25  # of a sub-step; a device that ends this soon after the launch had waited for it
_STARTS = 5  # a first step that takes this many times the median of the others is starting
_FEWER = "a smaller accum=, for fewer and larger sub-steps"
_LENGTHS = "put rows of like length together, or pass micro_batch_cost=, and costs= to the step."
_Key = TypeVar("_Key")


class Bounds:
    """Sums over the ``events`` of recorded ``steps``; ``options`` names those that are on."""

    def __init__(
        self,
        events: Sequence[Event],
        steps: Sequence[RecordedStep],
        devices: Sequence[torch.device],
        options: frozenset[str],
    ) -> None:
        self.events, self._steps = events, steps
        self._devices, self._options = devices, options
        self.rows: Counter[int] = sum((Counter(step.rows) for step in steps), Counter())
        self.replicas = sorted(self.rows)
        self.seconds = sums(((e.replica, e.name), e.self_seconds) for e in events)
        self.of_substeps = sums(
            ((e.step, e.replica, e.sub_step), e.self_seconds)
            for e in events
            if e.name in ON_DEVICES
        )
        self.in_steps = sum(step.end - step.start for step in steps)
        self.computing = self.seconds[None, "compute"]  # without checks and warm-up

    def sentence(self) -> str:
        """Says what bounds the steps, and what to pass."""
        checks = self.seconds[None, "verify"] + self.seconds[None, "warm-up"]
        total = self.in_steps + self.seconds[None, BETWEEN] - checks
        lost, sentence = max([*self._causes(checks), self._imbalance()])
        if lost < _NOTABLE * total:
            lost, sentence = self.computing, "Computing bounds the steps: it takes {share}."
        share = f"{100 * lost / total:.0f} % of the time"
        sentence = sentence.format(share=share, ms=f"{lost * 1e3:,.0f} ms")
        if checks > _NOTABLE * (total + checks):
            sentence += f" Checks, which first steps have, took {1e3 * checks:,.0f} ms more."
        return sentence

    def _causes(self, checks: float) -> Iterator[tuple[float, str]]:
        """Yield the seconds that each cause may have cost, and its sentence."""
        yield (
            self.seconds[None, BETWEEN],
            "The engine waited {share} for its caller: for the loader, the optimizer and what else "
            "is between steps. Pass num_workers= and pin_memory=True to the DataLoader.",
        )
        first, *others = (step.end - step.start for step in self._steps)
        if len(others) > 1 and first - checks > _STARTS * median(others):
            longer = first - checks - median(others)
            yield longer, "Starting took {ms} of the first step: trace later steps."
        capture = self._mean("capture")
        yield (
            capture,
            "Graphs are captured for {share}: trace later steps. If every step does, make the "
            "criterion once, before the loop.",
        )
        once = {
            name: self.seconds[None, name] for name in ("scatter", "replicate", "reduce", "commit")
        }
        yield (
            self.in_steps - checks - self.computing - self.seconds[None, "criterion"],
            f"What is done once a step takes {{share}}, {max(once, key=lambda n: once[n])} most: "
            f"take larger batches, and a larger accum= where they do not fit.",
        )
        yield (
            self._mean("arrival"),
            "Rows take {share} to arrive: pass pin_memory=True to the DataLoader, keep inputs in a "
            "smaller dtype such as torch.uint8, and let collate do less.",
        )
        launched = [event for event in self.events if event.on_device]
        lags = [event.on_device[1] - event.end for event in launched if event.on_device]
        if lags and median(lags) < _LAG * median(event.self_seconds for event in launched):
            graphs = "" if "graphs" in self._options else "graphs=True, or "
            yield (
                self.computing - capture,
                f"Launching bounds the steps, {{share}}: devices are done as soon as the host has "
                f"launched a sub-step. Pass {graphs}{_FEWER}.",
            )
        yield (
            self._mean("waiting"),
            "Replicas wait {share} for their turn in the criterion: a loss of torch's own, such as "
            "nn.CrossEntropyLoss, needs none.",
        )
        count = len(self.of_substeps) / len(self._steps)
        size = median(self.of_substeps.values() or [0.0])
        if count >= _MANY * len(self.replicas) and size < _TINY_SECONDS:
            yield (
                self.computing / 2,
                f"Sub-steps are many and tiny: {count:,.0f} a step, of {size * 1e3:.2g} ms each. "
                f"Pass {_FEWER}.",
            )

    def _imbalance(self) -> tuple[float, str]:
        """Seconds by which each step's slowest replica exceeds the mean, and a sentence."""
        work = [e for e in self.events if e.name not in ("waiting", "capture")]
        seconds = sums(((e.step, e.replica), e.seconds) for e in work)
        each = [{r: seconds[step, r] for r in step.rows} for step in self._steps]
        uneven = [b for b in each if b and max(b.values()) > _UNEVEN * fmean(b.values())]
        if not uneven:
            return 0.0, ""
        slow = Counter(max(busy, key=busy.__getitem__) for busy in uneven)
        replica, often = slow.most_common(1)[0]
        lost = sum(max(busy.values()) - fmean(busy.values()) for busy in uneven)
        others = fmean(t for busy in uneven for r, t in busy.items() if r != replica)
        times = fmean(busy.get(replica, 0.0) for busy in uneven) / max(others, 1e-9)
        elements = sums((e.replica, e.elements) for e in self.events)
        width = {r: elements[r] / rows for r, rows in self.rows.items()}
        if width[replica] > _UNEVEN * fmean(width.values()):
            remedy = f"Its rows are longer: {_LENGTHS}"
        elif often < 2 / 3 * len(uneven):
            remedy = f"In other steps it is another one: {_LENGTHS}"
        elif "shares" in self._options:
            remedy = 'shares="auto" is set, and learns that from step to step.'
        else:
            remedy = 'Pass shares="auto".'
        return lost, (
            f"Replica {replica}, {self._devices[replica]}, takes {times:.1f} times as long as "
            f"the others, who wait for it {{share}}. {remedy}"
        )

    def _mean(self, name: str) -> float:
        """The mean over replicas of the seconds in events of this name."""
        return fmean([self.seconds[replica, name] for replica in self.replicas] or [0.0])


def sums(pairs: Iterable[tuple[_Key, float]]) -> defaultdict[_Key, float]:
    """The sum of the values of each key."""
    result: defaultdict[_Key, float] = defaultdict(float)
    for key, value in pairs:
        result[key] += value
    return result
