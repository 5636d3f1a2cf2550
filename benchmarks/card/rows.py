"""The rows of the page, the most valuable first, and what each needs.

A group ends at a part of the whole run, ``until``; a row has ``limit`` seconds at most. More time
for the run changes neither: the rows themselves take more steps and rounds (``Setting.rounds``).
"""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.card.setting import Setting


@dataclass(frozen=True)
class Row:
    """One row: ``called`` is ``module.function`` in this folder.

    Attributes:
        limit: seconds.
        needs: the number of devices.
        on: "any" device, a "cuda" build of torch, or a real "gpu".
        arguments: of the function, after the setting and ``say``.
    """

    name: str
    called: str
    limit: float
    needs: int = 1
    on: str = "any"
    arguments: tuple[Any, ...] = ()

    def run(self, setting: Setting, say: Callable[..., None]) -> None:
        """Call the function, which writes lines of the page by ``say``."""
        module, _, name = self.called.partition(".")
        function = getattr(importlib.import_module(f"benchmarks.card.{module}"), name)
        function(setting, say, *self.arguments)

    def reason_not_to_run(self, setting: Setting) -> str:
        """What this machine lacks; empty if it lacks nothing."""
        count = len(setting.devices)
        if count < self.needs:
            return f"{self.needs} devices are needed, and {count} are here"
        if self.on != "any" and setting.devices[0].type == "cpu":
            return "CPU replicas have no CUDA"
        if self.on == "gpu" and not setting.is_real:
            return "needs GPUs that compute"
        return ""


@dataclass(frozen=True)
class Group:
    """Rows that run before those of the next group.

    Attributes:
        until: the part of the whole run at which the group ends.
        at_a_time: the number of rows that run at the same time.
    """

    name: str
    until: float
    at_a_time: int
    rows: tuple[Row, ...]


def _machine() -> Iterator[Row]:
    yield Row("devices", "machine.devices", 30, on="cuda")
    yield Row("cost of a launch", "machine.launches", 30, on="cuda")
    yield Row("copies", "machine.copies", 60)


def _correctness() -> Iterator[Row]:
    yield Row("gradient of one step", "machine.step", 60)
    yield Row("cuda tests", "suite.cuda_tests", 110, on="gpu")
    yield Row("looks, torchvision", "looks.of_torchvision", 100)
    yield Row("looks, transformers", "looks.of_transformers", 100)
    yield Row("looks, torch and timm", "looks.of_torch_and_timm", 100)
    yield Row("copies with poisoned targets", "bits.poisoned_copies", 90, on="cuda")
    for count in (1, 2, 4, 8):
        for network in ("ResNet-50", "GPT-2"):
            name = f"graphs beside eager, {network}, GPUs: {count}"
            yield _on_gpus(name, "bits.graphs", network, count)
    yield Row("dropout, twice", "bits.dropout_twice", 60)
    name = "dropout, [0, 0, 1, 1] and [0, 1, 0, 1]"
    yield Row(name, "bits.dropout_on_two", 60, needs=2)
    name = "dropout, [0, 0, 1, 1] and [0, 1, 2, 3]"
    yield Row(name, "bits.dropout_on_four", 60, needs=4)
    yield Row("new shapes are captured", "bits.new_shapes", 90, on="cuda")
    yield Row("out of memory", "failures.out_of_memory", 60, on="cuda")
    yield Row("Ctrl-C", "failures.interrupt", 60)
    yield Row("assertion in a kernel", "failures.assertion", 60, on="gpu")
    yield Row("two processes beside one", "bits.two_processes", 90, needs=2)
    yield Row("all copies slow", "bits.slow_copies", 90, needs=2, on="cuda")
    yield Row("peak of memory", "machine.peak", 60, needs=2, on="cuda")
    yield Row("environment", "machine.environment", 60)


def _speed() -> Iterator[Row]:
    for network in ("ResNet-50", "GPT"):
        name = f"speed, {network}"
        yield Row(name, "speed.steps", 90, on="cuda", arguments=(network,))
    for count in (2, 4, 8):
        for network in ("ResNet-50", "GPT-2"):
            name = f"speed beside DDP, {network}, GPUs: {count}"
            yield _on_gpus(name, "ddp.steps", network, count)


def _on_gpus(name: str, called: str, network: str, count: int) -> Row:
    """A row of a network on so many GPUs."""
    arguments = (network, count)
    return Row(name, called, 90, needs=count, on="cuda", arguments=arguments)


GROUPS = (
    Group("machine", until=0.15, at_a_time=1, rows=tuple(_machine())),
    Group("correctness", until=0.55, at_a_time=5, rows=tuple(_correctness())),
    Group("speed", until=1.0, at_a_time=1, rows=tuple(_speed())),
)


def by_name(name: str) -> Row:
    """The row with this name."""
    for group in GROUPS:
        for row in group.rows:
            if row.name == name:
                return row
    raise LookupError(f"there is no row {name!r}")
