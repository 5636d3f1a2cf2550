"""What bounds recorded steps, and what to pass: a sentence for ``print(trace)``.

For each cause of lost time there are an estimate of the seconds that could be saved and a sentence.
The sentence with the most seconds is shown if these are a tenth of the time or more.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean, median
from typing import TypeVar

import torch

from scatterpar.threads.clock import ON_DEVICES, RecordedStep, Span

_NOTABLE = 0.1  # of the time
_UNEVEN = 1.15  # times the mean of all replicas: a replica above that is slow
_TINY_SECONDS, _MANY = 0.002, 4  # shorter sub-steps, at least so many per replica: overhead
_LAG = 0.25  # of a sub-step: a device that ends so soon after the host's launch was idle before
_STARTS = 5  # times the median of the others: a first step that long is starting
_FEWER = "a smaller accum=, for fewer and larger sub-steps"
_Key = TypeVar("_Key")


class Bounds:
    """Sums over recorded ``steps``, which took ``total`` seconds with the time between them.

    ``options`` are the names of the engine's options that are set.
    """

    def __init__(
        self,
        steps: Sequence[RecordedStep],
        total: float,
        devices: Sequence[torch.device],
        options: frozenset[str],
    ) -> None:
        self._steps, self._devices, self._options = steps, devices, options
        self.total, self.in_steps = total, sum(step.seconds for step in steps)
        self.spans = [span for step in steps for span in step.spans]
        self.replicas = sorted({replica for step in steps for replica in step.rows})
        self.rows = {r: sum(step.rows.get(r, 0) for step in steps) for r in self.replicas}
        self._seconds = _sums(((span.replica, span.name), span.own) for span in self.spans)
        self.substeps = Counter(replica for step in steps for replica, _ in _substeps(step))
        self.computing = self.of(None, "compute")  # without its checks and whole-batch criterion
        self._checks = self.of(None, "verify") + self.of(None, "warm-up")

    def of(self, replica: int | None, name: str) -> float:
        """Seconds that a replica spent in spans of this name; ``None`` is the caller's thread."""
        return self._seconds.get((replica, name), 0.0)

    def on_devices(self) -> dict[int | None, float]:
        """Seconds that each replica's device worked, by events; empty on the host."""
        return _sums((span.replica, _work(span)) for span in self.spans if span.on_device)

    def sentence(self) -> str:
        """The sentence that says what bounds the steps, and what to pass."""
        total = self.total - self._checks
        lost, says = max([(0.0, ""), *self._losses()])
        if lost < _NOTABLE * total:
            lost, says = self.computing, "Computing bounds the steps: it takes {share}."
        says = says.format(share=f"{100 * lost / total:.0f} % of the time")
        if self._checks > _NOTABLE * self.total:
            says += f" Checks, which first steps have, took {1e3 * self._checks:,.0f} ms more."
        return says

    def _losses(self) -> Iterator[tuple[float, str]]:
        yield (
            self.total - self.in_steps,
            "The engine waited {share} for its caller: for the loader, the optimizer and what else "
            "is between steps. Pass num_workers= and pin_memory=True to the DataLoader.",
        )
        first, *others = (step.seconds for step in self._steps)
        if len(others) > 1 and first - self._checks > _STARTS * median(others):
            longer = first - self._checks - median(others)
            yield (
                longer,
                f"Starting took {1e3 * longer:,.0f} ms of the first step: trace later steps.",
            )
        yield (
            self._mean("capture"),
            "Graphs are captured for {share}: trace later steps. If every step does, make the "
            "criterion once, before the loop.",
        )
        once = {name: self.of(None, name) for name in ("scatter", "replicate", "reduce", "commit")}
        yield (
            self.in_steps - self._checks - self.computing - self.of(None, "criterion"),
            f"What is done once a step takes {{share}}, {max(once, key=lambda n: once[n])} most: "
            f"take larger batches, and a larger accum= where they do not fit.",
        )
        yield (
            self._mean("arrival"),
            "Rows take {share} to arrive: pass pin_memory=True to the DataLoader, keep inputs in a "
            "smaller dtype such as torch.uint8, and let collate do less.",
        )
        yield self._imbalance()
        yield from self._launches()

    def _launches(self) -> Iterator[tuple[float, str]]:
        """Losses to launching, to turns in the criterion, and to sub-steps that are too small."""
        launched = [span for span in self.spans if span.on_device]
        lags = [span.on_device[1] - span.end for span in launched if span.on_device]
        if lags and median(lags) < _LAG * median(span.own for span in launched):
            graphs = "" if "graphs" in self._options else "graphs=True, or "
            yield (
                self.computing - self._mean("capture"),
                f"Launching bounds the steps, {{share}}: devices are done as soon as the host has "
                f"launched a sub-step. Pass {graphs}{_FEWER}.",
            )
            return
        yield (
            self._mean("waiting"),
            "Replicas wait {share} for their turn in the criterion: a loss of torch's own, such as "
            "nn.CrossEntropyLoss, needs none.",
        )
        each = [seconds for step in self._steps for seconds in _substeps(step).values()]
        count, size = len(each) / len(self._steps), median(each or [0.0])
        if count >= _MANY * len(self.replicas) and size < _TINY_SECONDS:
            yield (
                self.computing / 2,
                f"Sub-steps are many and tiny: {count:,.0f} a step, of {size * 1e3:.2g} ms each. "
                f"Pass {_FEWER}.",
            )

    def _imbalance(self) -> tuple[float, str]:
        """Seconds by which each step's slowest replica exceeds the mean, and a sentence."""
        each = [_busy(step) for step in self._steps]
        uneven = [b for b in each if b and max(b.values()) > _UNEVEN * fmean(b.values())]
        if not uneven:
            return 0.0, ""
        slow = Counter(max(busy, key=busy.__getitem__) for busy in uneven)
        replica, often = slow.most_common(1)[0]
        lost = sum(max(busy.values()) - fmean(busy.values()) for busy in uneven)
        others = fmean(t for busy in uneven for r, t in busy.items() if r != replica)
        times = fmean(busy.get(replica, 0.0) for busy in uneven) / max(others, 1e-9)
        says = f"Replica {replica}, {self._devices[replica]}, takes {times:.1f} times as long as "
        says += "the others, who wait for it {share}"
        elements = _sums((span.replica, span.elements) for span in self.spans)
        width = {r: elements.get(r, 0) / rows for r, rows in self.rows.items()}
        if width[replica] > _UNEVEN * fmean(width.values()):
            why = "Its rows are longer"
        elif often < 2 / 3 * len(uneven):
            why = "In other steps it is another one"
        elif "shares" in self._options:
            return lost, f'{says}. shares="auto" is set, and learns that from step to step.'
        else:
            return lost, f'{says}. Pass shares="auto".'
        return lost, (
            f"{says}. {why}: put rows of like length together, or pass micro_batch_cost=, and "
            f"costs= to the step."
        )

    def _mean(self, name: str) -> float:
        """The mean over replicas of the seconds in spans of this name."""
        return fmean([self.of(replica, name) for replica in self.replicas] or [0.0])


def _sums(pairs: Iterable[tuple[_Key, float]]) -> dict[_Key, float]:
    """The sum of the values of each key."""
    sums: dict[_Key, float] = defaultdict(float)
    for key, value in pairs:
        sums[key] += value
    return dict(sums)


def _substeps(step: RecordedStep) -> dict[tuple[int | None, int | None], float]:
    """The host's seconds in each sub-step, by replica and number."""
    return _sums(
        ((span.replica, span.sub_step), span.own) for span in step.spans if span.name in ON_DEVICES
    )


def _work(span: Span) -> float:
    """The seconds of a span: its device's, if it is an accelerator."""
    return span.on_device[1] - span.on_device[0] if span.on_device else span.own


def _busy(step: RecordedStep) -> dict[int, float]:
    """The seconds that each replica worked."""
    busy = dict.fromkeys(step.rows, 0.0)
    for span in step.spans:
        if span.replica in busy and span.name not in ("waiting", "capture"):
            busy[span.replica] += _work(span)
    return busy
