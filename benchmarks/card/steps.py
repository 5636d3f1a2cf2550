"""The step time of a network: the engine beside its peers, all of them in every round.

``python -m benchmarks.card.steps resnet50 --devices cuda:0 --out FILE``; the command runs it. What
was found is written after every round, so that little is lost where something breaks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from benchmarks.card.contenders import (
    ACCUM,
    FULL,
    TINY,
    Contender,
    data_parallel,
    engine,
    loop,
    works_of,
)
from benchmarks.card.networks import NETWORKS, half
from benchmarks.card.processes import Processes
from scatterpar.devices.runtime import physical

SIZES = (FULL, TINY)
_FEWEST, _MOST = 3, 30  # rounds
ENGINE, LOOP, PER_CALL, DDP = "engine", "plain loop", f"nn.DataParallel x {ACCUM}", "DDP, no_sync"
TWICE = "engine, two replicas"


class _Steps(Protocol):
    peaks: dict[str, int]

    def apart(self, expected: Path) -> float: ...
    def step(self, size: str) -> float: ...


class Comparison:
    """Contenders that take steps in turn, and what was found of them.

    Args:
        name: of the network.
        devices: one for each replica.
        small: tiny sizes.
        out: a file for what is found.
        folder: for the contenders' own files.
    """

    def __init__(
        self, name: str, devices: Sequence[torch.device], small: bool, out: Path, folder: Path
    ) -> None:
        self._devices, self._cards = devices, list(dict.fromkeys(devices))
        self._network = NETWORKS[name](devices[0], small)
        self._works = works_of(self._network, devices)
        self._share = {size: work.part(0, len(self._cards)) for size, work in self._works.items()}
        self._processes = partial(Processes, name, small, devices, folder)
        self._out, self._expected = out, folder / "expected.pt"
        self._contenders: dict[str, _Steps] = {}
        self._found: dict[str, Any] = {
            "network": self._network.title,
            "precision": str(half(devices[0])).removeprefix("torch."),
            "devices": [str(device) for device in devices],
            "rows": self._network.rows,
            "substeps": ACCUM,
            "rows of the loop": len(self._share[FULL].inputs),
            "contenders": {},
            "absent": {},
        }

    def enter(self) -> None:
        """Make the contenders, and compare their gradients; who cannot take part says why."""
        whole = loop(self._network, self._devices[0], self._works)
        torch.save(whole.gradient(), self._expected)
        del whole
        makers: dict[str, Callable[[], _Steps]] = {
            LOOP: lambda: loop(self._network, self._devices[0], self._share),
            ENGINE: lambda: engine(self._network, self._devices, self._works),
        }
        if len(self._devices) == 1:
            twice = [*self._devices] * 2
            makers[TWICE] = lambda: engine(self._network, twice, self._works, ACCUM // 2)
        makers[PER_CALL] = self._data_parallel
        makers[DDP] = self._ddp
        for name, make in makers.items():
            with self._taking_part(name):
                contender = make()
                differs = contender.apart(self._expected)
                self._contenders[name] = contender
                self._found["contenders"][name] = {
                    "apart": None if name == LOOP else differs,  # the loop has rows of its own
                    **{size: [] for size in SIZES},
                }
            self._write()

    def rounds(self, until: float) -> None:
        """Let each of them take its steps, in an order that rotates, and write what they took."""
        number = 0
        while number <= _FEWEST or (number <= _MOST and time.monotonic() < until):
            names = list(self._contenders)
            turn = number % len(names)
            for name in [*names[turn:], *names[:turn]]:
                with self._taking_part(name):
                    contender, found = self._contenders[name], self._found["contenders"][name]
                    for size in SIZES:
                        seconds = contender.step(size)
                        if number:  # the first round pays for what is done only once
                            found[size].append(seconds)
                    found["peaks"] = contender.peaks
            number += 1
            self._write()

    @contextlib.contextmanager
    def _taking_part(self, name: str) -> Iterator[None]:
        """Who fails takes part no longer."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        except Exception as error:
            self._found["absent"][name] = f"{type(error).__name__}: {error}".splitlines()[0]
            self._contenders.pop(name, None)
            if torch.accelerator.is_available():
                torch.accelerator.empty_cache()
            if name in (LOOP, ENGINE):  # without them there is nothing to compare
                raise

    def _data_parallel(self) -> Contender:
        if self._devices[0].type == "cpu":
            raise ValueError("on the CPU it calls the module itself")
        self._require_each_once()
        return data_parallel(self._network, self._devices, self._works)

    def _ddp(self) -> Processes:
        self._require_each_once()
        if len(self._devices) == 1:
            raise ValueError("with one card it is a plain loop")
        dist.get_default_backend_for_device(physical(self._devices[0]))  # or an error that says so
        return self._processes()

    def _require_each_once(self) -> None:
        if len(self._cards) < len(self._devices):
            raise ValueError("takes each card once")

    def _write(self) -> None:
        aside = self._out.with_suffix(".tmp")
        aside.write_text(json.dumps(self._found, indent=1) + "\n")
        aside.replace(self._out)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, and write the findings."""
    start = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network", choices=NETWORKS)
    parser.add_argument("--devices", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args(arguments)
    if given.small:
        torch.set_num_threads(1)
    devices = [torch.device(name) for name in given.devices.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        comparison = Comparison(given.network, devices, given.small, given.out, Path(folder))
        comparison.enter()
        comparison.rounds(start + given.seconds)


if __name__ == "__main__":
    main()
