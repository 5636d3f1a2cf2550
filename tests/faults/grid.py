"""Every fault, at every place, in the first, middle and last sub-step of first and last
replica.

See README.md. With ``pairs``, ``shared`` and ``virtual`` together have each place with
each kind, each place at each moment, and each kind at each moment of a sub-step. With
``half`` they together have all combinations.
"""

from __future__ import annotations

import copy
import faulthandler
import json
import random
import sys
import traceback
from collections.abc import Iterable, Iterator
from typing import Any

import simulated
import torch
from harness.notes import beginning_of_note

from faults.kinds import KINDS
from faults.places import PLACES, Place, Step
from faults.state import capture, differences, values_differ
from faults.subject import Subject, batch, build_subject
from faults.trap import trap
from scatterpar import ScatterOnceParallel
from scatterpar.devices.virtual_devices import physical

REPLICAS, ACCUM, ROWS = 3, 3, 26
SECONDS_EACH = 120  # a hang, not a slow machine: each takes some 20 ms on an idle one

LAYOUTS = {
    "shared": ["cpu"] * REPLICAS,
    "virtual": [f"cpu:{i}" for i in range(REPLICAS)],
    "accelerator": [f"{simulated.NAME}:{i}" for i in range(REPLICAS)],
}


def bench_on(layout: str) -> Bench:
    """A bench on a layout, or with a single replica on the host (``alone``)."""
    if layout == "accelerator":
        simulated.load_built()
    return Bench(["cpu"] if layout == "alone" else LAYOUTS[layout])


class Bench:
    """A subject whose steps are made to fail, always from the same start."""

    def __init__(self, devices: list[str]) -> None:
        self.devices = devices
        self.subject = build_subject().to(physical(torch.device(devices[0])))
        # A step that holds graphs frees them if memory runs out, and is computed again.
        options = {"verify": False, "graphs": False}
        self.engine = ScatterOnceParallel(self.subject, ACCUM, devices, **options)
        self.optimizer = torch.optim.SGD(self.subject.parameters(), 0.01, momentum=0.9)
        self.data = batch(ROWS, seed=5)
        trap.plan = self.engine.plan(ROWS)
        self.step(self.engine, PLACES["forward, first line"])
        self.optimizer.step()
        self.start = copy.deepcopy(self.subject)
        self._gradients = [p.grad for p in self.subject.parameters()]
        self._expected: dict[tuple[str, bool], tuple[Subject, float, torch.Tensor]] = {}

    def back_to_start(self, module: Subject, *, accumulate: bool) -> None:
        """Weights, buffers and random state of the start; gradients too, or none of
        them.
        """
        for tensor, start in zip(_tensors(module), _tensors(self.start), strict=True):
            tensor.detach().copy_(start)
        for parameter, gradient in zip(
            module.parameters(), self._gradients, strict=True
        ):
            there = accumulate and gradient is not None
            parameter.grad = gradient.clone() if there else None
        torch.manual_seed(4)

    def expected(
        self, place: Place, accumulate: bool
    ) -> tuple[Subject, float, torch.Tensor]:
        """The module, loss and random state after one step of an engine that never
        failed.
        """
        if (place.name, accumulate) not in self._expected:
            twin = copy.deepcopy(self.start)
            with ScatterOnceParallel(twin, ACCUM, self.devices, verify=False) as engine:
                self.back_to_start(twin, accumulate=accumulate)
                loss = self.step(engine, place)
                self._expected[place.name, accumulate] = (
                    twin,
                    loss,
                    torch.get_rng_state(),
                )
        return self._expected[place.name, accumulate]

    def good_step(self, place: Place, accumulate: bool) -> list[str]:
        """In what the next step differs from that of an engine that never failed."""
        loss = self.step(self.engine, place)
        random_state = torch.get_rng_state()
        twin, expected_loss, expected_state = self.expected(place, accumulate)
        wrong = ["loss"] * (loss != expected_loss) + values_differ(twin, self.subject)
        return wrong + ["random state"] * (
            not torch.equal(random_state, expected_state)
        )

    def step(self, engine: ScatterOnceParallel, place: Place) -> float:
        """The loss of a good step; ``trap.visits`` is how often it came by a counted
        place.
        """
        step = Step(*self.data)
        trap.arm(place.name, AssertionError, visit=-1)
        with place.prepare(engine.module, step, place.name):
            step.take(engine)
        assert engine.last_step is not None
        return engine.last_step.loss

    def bad_step(self, place: Place, kind: str, **where: Any) -> list[str]:
        """One step that is made to fail, and what is wrong afterwards."""
        step = Step(*self.data)
        wrong: list[str] = []
        with place.prepare(self.subject, step, place.name):
            before = capture(self.subject, self.optimizer)
            trap.arm(place.name, KINDS[kind], **where)
            try:
                step.take(self.engine)
                wrong.append("nothing was raised")
            except BaseException as error:
                wrong += _judge_error(error, kind, where, self.devices)
            wrong += [] if trap.sprung else ["the trap was never visited"]
            step.failed = bool(trap.sprung)
            trap.disarm()
            after = capture(self.subject, self.optimizer)
            return wrong + [f"changed: {path}" for path in differences(before, after)]


def _judge_error(
    error: BaseException, kind: str, where: dict[str, Any], devices: list[str]
) -> list[str]:
    position = where.get("positions", [where.get("visit")])[0]
    if error is not trap.sprung.get(position):
        return [f"another error: {type(error).__name__}"]
    frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    wrong = [] if "_spring" in frames else [f"the traceback ends in {frames[-1]}"]
    notes = getattr(error, "__notes__", [])
    if kind != "without notes" and "positions" in where:
        begins = beginning_of_note(
            position[0], devices[position[0]], position[1], ACCUM
        )
        if [note.startswith(begins) for note in notes].count(True) != 1:
            wrong.append(f"notes: {notes}")
    return wrong


def _tensors(module: Subject) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def combinations(
    bench: Bench, layout: str, extent: str
) -> Iterator[tuple[Place, str, str, dict[str, Any]]]:
    """Each place, kind and moment, half of them, or each pair, as words and as
    arguments of the trap.
    """
    turn = list(LAYOUTS).index(layout) % 2
    for i, place in enumerate(PLACES.values()):
        if place.counted:
            bench.step(bench.engine, place)
            last = trap.visits - 1
            moments = {
                f"visit {visit}": {"visit": visit} for visit in {0, last // 2, last}
            }
        else:
            moments = {
                f"replica {replica}, sub-step {number}": {
                    "positions": [(replica, number)]
                }
                for replica in (0, REPLICAS - 1)
                for number in (0, ACCUM // 2, ACCUM - 1)
            }
            if place.name != "criterion, a function":  # which replicas call in turn
                moments["all replicas at once"] = {
                    "positions": [(replica, ACCUM // 2) for replica in range(REPLICAS)]
                }
        for j, kind in enumerate(KINDS):
            for k, (moment, where) in enumerate(moments.items()):
                is_in = {
                    "all": True,
                    "half": (i + j + k) % 2 == turn,
                    "pairs": (i + j) % len(moments) == k and (i + j) % 2 == turn,
                }
                if is_in[extent]:
                    yield place, kind, moment, where


def run(layout: str, extent: str = "all") -> Iterator[dict[str, Any]]:
    """Try combinations on one layout of replicas: ``"all"`` of them, ``"half"``, or
    ``"pairs"``.
    """
    strays: list[str] = []
    sys.unraisablehook = lambda raised: strays.append(
        f"unraisable {raised.exc_type.__name__}"
    )
    random.seed(0)
    torch.manual_seed(0)
    # on a busy machine OpenMP threads mostly wait for each other
    torch.set_num_threads(1)
    bench = bench_on(layout)
    for number, (place, kind, moment, where) in enumerate(
        combinations(bench, layout, extent)
    ):
        faulthandler.dump_traceback_later(SECONDS_EACH, exit=True)
        bench.back_to_start(bench.subject, accumulate=number % 2 == 0)
        wrong = bench.bad_step(place, kind, **where)
        wrong += [
            f"next step: {name}" for name in bench.good_step(place, number % 2 == 0)
        ]
        wrong, strays[:] = wrong + strays, []
        # whoever reads may come to it much later
        faulthandler.cancel_dump_traceback_later()
        tried = {"layout": layout, "place": place.name, "kind": kind, "moment": moment}
        yield tried | {"wrong": wrong}


def say(found: Iterable[dict[str, Any]]) -> None:
    """Print one line of JSON each, and an end."""
    for one in found:
        print(json.dumps(one), flush=True)
    print("end", flush=True)


if __name__ == "__main__":
    say(run(*sys.argv[1:]))
