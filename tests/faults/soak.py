"""Many small steps, and among them faults of all kinds: ``python -m faults.soak shared 80 36``.

Nothing may pile up. A twin takes the good steps alone; after each of them both are equal bit for
bit. Prints one line of JSON for every ten steps: what is wrong, how many threads there are, and
how many tensors are alive.
"""

from __future__ import annotations

import copy
import gc
import json
import random
import sys
import threading
import warnings

import torch

from faults.grid import ACCUM, LAYOUTS, REPLICAS, ROWS, Bench
from faults.kinds import KINDS
from faults.places import LEAKS_IN_TORCH, PLACES
from faults.state import values_differ
from faults.subject import batch
from scatterpar import ScatterOnceParallel

PLAIN = PLACES["forward, first line"]


class Soak:
    """A subject that fails now and then, and its twin."""

    def __init__(self, layout: str) -> None:
        self.bench = Bench(LAYOUTS[layout])
        self.twin = copy.deepcopy(self.bench.subject)
        self.twin_engine = ScatterOnceParallel(self.twin, ACCUM, LAYOUTS[layout])
        self.optimizers = [
            torch.optim.SGD(module.parameters(), 0.01, momentum=0.9)
            for module in (self.twin, self.bench.subject)
        ]
        self.bench.optimizer = self.optimizers[1]
        self.places = [p for name, p in PLACES.items() if name not in LEAKS_IN_TORCH]
        self.visits = {p.name: self.bench.visits(p) for p in PLACES.values() if p.counted}
        self.bench.subject.zero_grad()
        torch.manual_seed(0)

    def good_step(self, number: int) -> list[str]:
        """One step of both, and one of the optimizers now and then."""
        before = torch.get_rng_state()
        found = []
        self.bench.data = batch(ROWS, seed=number)
        engines = self.twin_engine, self.bench.engine
        for engine, optimizer in zip(engines, self.optimizers, strict=True):
            torch.set_rng_state(before)
            if number % 4 == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=number % 8 == 0)
            found.append((self.bench.step(engine, PLAIN), torch.get_rng_state()))
        same = found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])
        wrong = values_differ(self.twin, self.bench.subject) + ([] if same else ["loss, random"])
        return [f"step {number}: {name}" for name in wrong]

    def bad_step(self, draw: random.Random) -> list[str]:
        """A fault of any kind, anywhere."""
        kind, place = draw.choice(list(KINDS)), draw.choice(self.places)
        if place.counted:
            wrong = self.bench.bad_step(place, kind, visit=draw.randrange(self.visits[place.name]))
        else:
            where = (draw.randrange(REPLICAS), draw.randrange(ACCUM))
            wrong = self.bench.bad_step(place, kind, positions=[where])
        return [f"{kind} at {place.name}: {what}" for what in wrong]


def alive() -> int:
    """How many tensors there are."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about objects of its that are looked at
        return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())


def soak(layout: str, good: int, faults: int) -> None:
    """Good steps, with the others strewn in at random."""
    draw = random.Random(3)
    torch.set_num_threads(1)
    kinds = ["good"] * good + ["fault"] * faults
    draw.shuffle(kinds)
    run, wrong = Soak(layout), []
    for number, kind in enumerate(kinds, 1):
        wrong += run.good_step(number) if kind == "good" else run.bad_step(draw)
        if number % 10 == 0:
            found = {"wrong": wrong, "threads": threading.active_count(), "tensors": alive()}
            print(json.dumps(found), flush=True)
    print("end")


if __name__ == "__main__":
    soak(sys.argv[1], *map(int, sys.argv[2:]))
