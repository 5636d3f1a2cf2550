"""What bounds recorded steps, and what to pass: a sentence for ``print(trace)``.

For each cause of lost time there are an estimate of the seconds that could be saved and a sentence.
The sentence with the most seconds is shown if these are a tenth of the time or more.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean, median
from typing import TypeVar

import torch

from scatterpar.threads.clock import ON_DEVICES, RecordedStep, Span

_NOTABLE = 0.1  # of the time
_UNEVEN = 1.15  # times the mean of all replicas: a replica above that is slow
_TINY_SECONDS, _MANY = 0.002, 4  # shorter sub-steps, at least so many per replica: overhead
_LAG = 0.25  # of a sub-step: a device that ends so soon after the host's launch was idle before
_Key = TypeVar("_Key")
_FEWER = "a smaller accum=, for fewer and larger sub-steps"


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
        self.total = total
        self.in_steps = sum(step.seconds for step in steps)
        self.spans = [span for step in steps for span in step.spans]
        self.replicas = sorted({replica for step in steps for replica in step.rows})
        self.rows = {r: sum(step.rows.get(r, 0) for step in steps) for r in self.replicas}
        self._seconds: dict[tuple[int | None, str], float] = _sums(
            self.spans, lambda span: (span.replica, span.name), lambda span: span.own
        )
        substeps = (replica for step in steps for replica, _ in _of_substeps(step))
        self.substeps = Counter(substeps)
        self.computing = self.of(None, "compute")  # without its checks and whole-batch criterion

    def of(self, replica: int | None, name: str) -> float:
        """Seconds that a replica spent in spans of this name; ``None`` is the caller's thread."""
        return self._seconds.get((replica, name), 0.0)

    def on_devices(self) -> dict[int | None, float]:
        """Seconds that each replica's device worked, by events; empty on the host."""
        launched = [span for span in self.spans if span.on_device]
        return _sums(launched, lambda span: span.replica, _device_seconds)

    def mean(self, name: str) -> float:
        """The mean over replicas of the seconds in spans of this name."""
        return fmean([self.of(replica, name) for replica in self.replicas] or [0.0])

    def sentence(self) -> str:
        """The sentence that says what bounds the steps, and what to pass."""
        lost, says = max([(0.0, ""), *self._losses()])
        if lost < _NOTABLE * self.total:
            lost, says = self.computing, "Computing bounds the steps: it takes {share}."
        return says.format(share=f"{100 * lost / self.total:.0f} % of the time")

    def _losses(self) -> Iterator[tuple[float, str]]:
        yield (
            self.total - self.in_steps,
            "The engine waited {share} for its caller: for the loader, the optimizer and what else "
            "is between steps. Pass num_workers= and pin_memory=True to the DataLoader.",
        )
        checks = self.of(None, "verify") + self.of(None, "warm-up")
        yield checks, "What is checked in the first steps takes {share}: trace later ones."
        yield (
            self.mean("capture"),
            "Graphs are captured for {share}: trace later steps. If every step does, make the "
            "criterion once, before the loop.",
        )
        once = {name: self.of(None, name) for name in ("scatter", "replicate", "reduce", "commit")}
        yield (
            self.in_steps - checks - self.computing - self.of(None, "criterion"),
            f"What is done once a step takes {{share}}, {max(once, key=lambda n: once[n])} most: "
            f"take larger batches, and a larger accum= where they do not fit.",
        )
        yield (
            self.mean("arrival"),
            "Rows take {share} to arrive: pass pin_memory=True to the DataLoader, keep inputs in a "
            "smaller dtype such as torch.uint8, and let collate do less.",
        )
        yield self._imbalance()
        yield from self._launches()

    def _launches(self) -> Iterator[tuple[float, str]]:
        """Losses to launching, to turns in the criterion, and to sub-steps that are too small."""
        launched = [span for span in self.spans if span.name in ON_DEVICES]
        lags = [span.on_device[1] - span.end for span in launched if span.on_device]
        if lags and median(lags) < _LAG * median(span.own for span in launched):
            graphs = "" if "graphs" in self._options else "graphs=True, or "
            yield (
                self.computing - self.mean("capture"),
                f"Launching bounds the steps, {{share}}: devices are done as soon as the host has "
                f"launched a sub-step. Pass {graphs}{_FEWER}.",
            )
            return
        yield (
            self.mean("waiting"),
            "Replicas wait {share} for their turn in the criterion: a loss of torch's own, such as "
            "nn.CrossEntropyLoss, needs none.",
        )
        each = [t for step in self._steps for t in _of_substeps(step).values()]
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
        elements = _sums(self.spans, lambda span: span.replica, lambda span: span.elements)
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


def _sums(
    spans: Iterable[Span], key: Callable[[Span], _Key], value: Callable[[Span], float]
) -> dict[_Key, float]:
    """The sum of the spans' values for each key."""
    sums: dict[_Key, float] = defaultdict(float)
    for span in spans:
        sums[key(span)] += value(span)
    return dict(sums)


def _of_substeps(step: RecordedStep) -> dict[tuple[int | None, int | None], float]:
    """The host's seconds in each sub-step, by replica and number."""
    own = [span for span in step.spans if span.name in ON_DEVICES]
    return _sums(own, lambda span: (span.replica, span.sub_step), lambda span: span.own)


def _device_seconds(span: Span) -> float:
    start, end = span.on_device or (0.0, 0.0)
    return end - start


def _busy(step: RecordedStep) -> dict[int, float]:
    """The seconds that each replica worked: its device's, if it is an accelerator."""
    busy = dict.fromkeys(step.rows, 0.0)
    for span in step.spans:
        if span.replica in busy and span.name not in ("waiting", "capture"):
            busy[span.replica] += _device_seconds(span) if span.on_device else span.own
    return busy
