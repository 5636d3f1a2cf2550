"""Many small steps, among them faults of all kinds and interrupts; nothing may pile up.

A twin takes the good steps alone. After each of them both are equal bit for bit.
"""

from __future__ import annotations

import copy
import gc
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil
import torch

from faults.ctrl_c import Strikes, interrupts
from faults.grid import ACCUM, LAYOUTS, REPLICAS, ROWS, Bench
from faults.kinds import KINDS
from faults.places import LEAKS_IN_TORCH, PLACES
from faults.state import capture, differences, values_differ
from faults.subject import batch
from faults.trap import trap
from scatterpar import ScatterOnceParallel

SECONDS = 60.0
PLAIN = PLACES["forward, first line"]


@dataclass
class Record:
    """What a soak found."""

    good: int = 0
    faults: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    interrupts: int = 0
    strikes: int = 0
    wrong: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    tensors: list[int] = field(default_factory=list)
    megabytes: list[float] = field(default_factory=list)

    def measure(self, step: int) -> None:
        """Take down what is alive now."""
        gc.collect()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, about objects of its that are looked at
            alive = sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())
        self.steps.append(step)
        self.threads.append(threading.active_count())
        self.tensors.append(alive)
        self.megabytes.append(psutil.Process().memory_info().rss / 2**20)


class Soak:
    """A subject that fails now and then, and its twin."""

    def __init__(self, layout: str) -> None:
        self.record = Record()
        self.bench = Bench(LAYOUTS[layout])
        self.twin = copy.deepcopy(self.bench.subject)
        self.twin_engine = ScatterOnceParallel(self.twin, ACCUM, LAYOUTS[layout])
        self.bench.optimizer = self._optimizer(self.bench.subject)
        self.twin_optimizer = self._optimizer(self.twin)
        self.places = [p for name, p in PLACES.items() if name not in LEAKS_IN_TORCH]
        self.visits = {p.name: self.bench.visits(p) for p in PLACES.values() if p.counted}
        self.bench.subject.zero_grad()
        torch.manual_seed(0)

    @staticmethod
    def _optimizer(module: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), 0.01, momentum=0.9)

    def good_step(self, number: int) -> None:
        """One step of both, and one of the optimizers now and then."""
        before = torch.get_rng_state()
        found = []
        self.bench.data = batch(ROWS, seed=number)
        for engine, optimizer in (
            (self.twin_engine, self.twin_optimizer),
            (self.bench.engine, self.bench.optimizer),
        ):
            torch.set_rng_state(before)
            if number % 4 == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=number % 8 == 0)
            found.append((self.bench.step(engine, PLAIN), torch.get_rng_state()))
        same = found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])
        wrong = values_differ(self.twin, self.bench.subject) + ([] if same else ["loss, random"])
        self.record.wrong += [f"step {number}: {name}" for name in wrong]
        self.record.good += 1

    def bad_step(self, draw: random.Random) -> None:
        """A fault of any kind, anywhere."""
        kind, place = draw.choice(list(KINDS)), draw.choice(self.places)
        if place.counted:
            wrong = self.bench.bad_step(place, kind, visit=draw.randrange(self.visits[place.name]))
        else:
            where = (draw.randrange(REPLICAS), draw.randrange(ACCUM))
            wrong = self.bench.bad_step(place, kind, positions=[where])
        self.record.faults[kind] += 1
        self.record.wrong += [f"{kind} at {place.name}: {what}" for what in wrong]

    def interrupted_step(self, draw: random.Random, strikes: Strikes) -> None:
        """A step that is interrupted once or twice, at any moment."""
        subject = self.bench.subject
        self.record.interrupts += 1
        strikes.inside = 0
        while not strikes.inside:
            # What the step does when it comes to its end all the same is undone.
            saved = [t.detach().clone() for t in [*subject.parameters(), *subject.buffers()]]
            gradients = [
                (p.grad, None if p.grad is None else p.grad.clone()) for p in subject.parameters()
            ]
            random_state = torch.get_rng_state()
            before = capture(subject)
            thread = interrupts([draw.uniform(0, 0.006) for _ in range(draw.choice((1, 1, 2)))])
            strikes.attempt(lambda: self.bench.step(self.bench.engine, PLAIN))
            thread.join()
            undone = differences(before, capture(subject))
            if not undone:
                continue
            for tensor, value in zip(
                [*subject.parameters(), *subject.buffers()], saved, strict=True
            ):
                tensor.detach().copy_(value)
            for parameter, (gradient, value) in zip(subject.parameters(), gradients, strict=True):
                if gradient is not None:
                    gradient.copy_(value)
                parameter.grad = gradient
            torch.set_rng_state(random_state)
            if strikes.inside and not any("grad" in path for path in undone):
                self.record.wrong.append(f"half a step: {undone}")
        self.record.strikes += strikes.inside
        # Two interrupts in one step give its threads up; they end by themselves.
        deadline = time.monotonic() + SECONDS
        while _workers() > 2 * REPLICAS and time.monotonic() < deadline:
            time.sleep(0.005)
        trap.activations_alive()


def _workers() -> int:
    return sum(thread.name.startswith("scatterpar replica ") for thread in threading.enumerate())


def soak(
    good: int,
    faults: int,
    interruptions: int,
    layout: str = "virtual",
    every: int = 50,
    report: Callable[[Record], None] = lambda record: None,
) -> Record:
    """Good steps, with the others strewn in at random.

    Args:
        good: how many good steps.
        faults: how many steps that are made to fail.
        interruptions: how many that are interrupted.
        layout: ``"shared"`` or ``"virtual"``.
        every: how many steps there are from one measurement to the next.
        report: called with the record after each measurement.
    """
    draw = random.Random(3)
    handler = signal.getsignal(signal.SIGINT)
    torch.set_num_threads(1)
    kinds = ["good"] * good + ["fault"] * faults + ["interrupt"] * interruptions
    draw.shuffle(kinds)
    run = Soak(layout)
    strikes = Strikes()
    try:
        for number, kind in enumerate(kinds):
            if kind == "good":
                run.good_step(number)
            elif kind == "fault":
                run.bad_step(draw)
            else:
                run.interrupted_step(draw, strikes)
            if number % every == every - 1:
                run.record.measure(number + 1)
                report(run.record)
    finally:
        signal.signal(signal.SIGINT, handler)
        trap.disarm()
        run.bench.engine.close()
        run.twin_engine.close()
    return run.record
