"""A step of a small network: whether its gradient is exact, and how long it takes."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from scatterpar.checkup.copies import DoctorVerdict, synchronize_all
from scatterpar.devices.links import TO_THE_DOCTOR
from scatterpar.devices.streams import has_streams
from scatterpar.devices.virtual_devices import physical
from scatterpar.engine import ScatterOnceParallel
from scatterpar.hints import remedies_of_launching
from scatterpar.options.graphs.schedule import captures_graphs

ACCUM = 16
ENGINE = "engine"
GRAPHS = "engine, graphs=True"
ONE = "one device"
BUDGET = 10.0  # maximal seconds of the measurement
WARM_UPS = 2  # steps that allocate memory, capture graphs, and compare values
ROUNDS = 15
_SLOWER = 1.1  # a larger ratio of times is no accident of the measurement
_WAITED = 0.1  # if the host waits for a smaller part, the GPU is idle between launches
_SHARED = 1.5  # n GPUs may take this part of one GPU's time, divided by n
_MUCH_MOVING = 0.4  # a larger part of the step for copies makes it slow
# Rows of a sub-step: a GPU needs many to be busy.
_ROWS_WITH_STREAMS = 64
_ROWS_OF_SUBSTEP = 2
_MILLISECONDS = 1e3

_COPIES = (
    "of the step is spent on moving data. Take larger batches (more rows between two "
    "of the optimizer's steps), and compare the measured bandwidths with what the "
    "slots should give."
)
_LAUNCHES = (
    "One interpreter launches all replicas, and these sub-steps are too short to keep "
    "the GPUs busy; a real network computes more. What helps:"
)
_IDLE = (
    "In a plain loop this network is too small to keep a GPU busy: most of the time "
    "the GPU waits for the host, so no speed is judged. A real network computes more."
)
_NOT_JUDGED = "so no speed is judged"


def _network(device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A transformer over the patches of an image, with the same weights every time."""
    # Convolution, attention and normalisation take kernels of three libraries.
    with torch.random.fork_rng(devices=()):  # the caller's generator stays
        torch.default_generator.manual_seed(0)
        patches = nn.Conv2d(3, 32, 4, stride=4)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2)
        head = nn.Linear(2048, 10)
    network = nn.Sequential(patches, nn.Flatten(2), encoder, nn.Flatten(), head)
    return network.to(physical(device), dtype)


def _batch(rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Images and labels on the host, the same every time."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(rows, 3, 32, 32, generator=generator, dtype=dtype)
    labels = torch.randint(10, (rows,), generator=generator)
    return images, labels


@dataclass(frozen=True)
class StepComparison:
    """How the engine's gradient differs from plain torch's on one device; the engine's
    warnings.
    """

    is_exact: bool
    words: str
    warned: tuple[str, ...] = ()

    def __str__(self) -> str:
        verdict = "exact" if self.is_exact else "WRONG"
        return f"{verdict}: {self.words}"


def take_step(devices: Sequence[torch.device]) -> StepComparison:
    """Compare one step on all devices with the same step on one device."""
    master = physical(devices[0])
    rows = 8 * len(devices) + 3  # shares are ragged
    dtype = _widest_dtype(master)
    criterion = nn.CrossEntropyLoss()
    # A warning is a finding: it stands on the page, not in the middle of it.
    with (
        warnings.catch_warnings(record=True, action="always") as caught,
        ScatterOnceParallel(_network(master, dtype), 3, devices) as engine,
    ):
        images, labels = _batch(rows, dtype)
        check = engine.check(images, labels, criterion)
    apart = f"{check.worst:.1e} apart at most ({check.parameter}), in {dtype}"
    warned = tuple(str(warning.message) for warning in caught)
    return StepComparison(check.passed, f"gradients of {rows} rows are {apart}", warned)


def _widest_dtype(device: torch.device) -> torch.dtype:
    """float64; float32 on accelerators that do not have it."""
    # Rounding hides small faults, and float64 rounds least. Some accelerators lack it.
    try:
        return torch.zeros(1, dtype=torch.float64, device=device).dtype
    except (TypeError, RuntimeError):
        return torch.float32


def on_step(step: StepComparison) -> Iterator[DoctorVerdict]:
    """Conclude whether the gradient is right, and repeat the engine's warnings."""
    if step.is_exact:
        text = "the gradient on all devices equals the gradient on one, up to rounding."
        yield DoctorVerdict("fine", text)
    else:
        text = f"{step.words}. If copies are fine, please report this as a bug."
        yield DoctorVerdict("WRONG", text)
    # Each text once: every replica may have warned.
    for warning in dict.fromkeys(step.warned):
        yield DoctorVerdict("note", warning.removesuffix(TO_THE_DOCTOR))


@dataclass(frozen=True)
class Speed:
    """The seconds of a step in each round, by program, and the engine's median seconds
    by phase.

    Attributes:
        waited: the part of one device's time that the host waits for it after the last
            launch, the median over the rounds; next to nothing if the device has
            waited for the host.
    """

    rows: int
    seconds: dict[str, list[float]]
    phases: dict[str, float]
    waited: float = 1.0

    @property
    def ratio_to_one(self) -> float:
        """The engine's time over one device's: the median over the rounds.

        With graphs if these are faster: by default the engine keeps what is.
        """
        return min(self._ratio_of(ENGINE), self._ratio_of(GRAPHS))

    @property
    def graphs_are_faster(self) -> bool:
        """Whether steps with CUDA graphs are faster than steps without."""
        return self._ratio_of(GRAPHS) < self._ratio_of(ENGINE)

    def compared(self) -> str:
        """The engine's time in times of one device's, in words."""
        words = f"{self.ratio_to_one:.2f} of one device's time"
        if GRAPHS not in self.seconds:
            return words
        of_graphs = self._ratio_of(GRAPHS)
        eager = self._ratio_of(ENGINE)
        return f"{words} ({of_graphs:.2f} with CUDA graphs, {eager:.2f} without)"

    def _ratio_of(self, program: str) -> float:
        """A program's time over one device's; infinite if it was not measured."""
        if program not in self.seconds:
            return inf
        # By round: what else runs on the machine slows both programs of a round.
        pairs = zip(self.seconds[program], self.seconds[ONE], strict=True)
        return median(ours / theirs for ours, theirs in pairs)

    def __str__(self) -> str:
        lines = [f"a step of {self.rows} rows:"]
        for name, seconds in self.seconds.items():
            milliseconds = _MILLISECONDS * median(seconds)
            lines.append(f"  {name + ':':22} {milliseconds:8.1f} ms")
        phases: list[str] = []
        for name, spent in self.phases.items():
            phases.append(f"{name} {_MILLISECONDS * spent:.1f}")
        lines.append(f"  in the engine: {', '.join(phases)}")
        return "\n".join(lines)


class _Program(NamedTuple):
    """A way to compute the gradient of the batch.

    Attributes:
        module: what accumulates gradients.
        step: computes the gradient once.
    """

    module: nn.Module
    step: Callable[[], object]


def measure(devices: Sequence[torch.device]) -> Speed:
    """Time a step of every program, in as many rounds as fit into
    ``BUDGET`` seconds.
    """
    is_async = all(map(has_streams, devices))
    rows_of_substep = _ROWS_WITH_STREAMS if is_async else _ROWS_OF_SUBSTEP
    rows = ACCUM * len(devices) * rows_of_substep
    times: dict[str, list[float]] = defaultdict(list)
    waited: list[float] = []
    phases: list[dict[str, float]] = []
    begin = time.perf_counter()
    with (
        warnings.catch_warnings(action="ignore"),  # the exact step has reported them
        ScatterOnceParallel(
            _network(devices[0]), ACCUM, devices, graphs=False
        ) as engine,
        contextlib.ExitStack() as stack,
    ):
        images, labels = _batch(rows)
        programs = _programs(engine, images, labels)
        if all(captures_graphs(device.type) for device in devices):
            graphed = ScatterOnceParallel(
                _network(devices[0]), ACCUM, devices, graphs=True
            )
            stack.enter_context(graphed)
            programs[GRAPHS] = _step_of(graphed, images, labels)
        for number in range(WARM_UPS + ROUNDS):
            # One round is counted at least.
            if number > WARM_UPS and time.perf_counter() - begin > BUDGET:
                break
            for name, program in programs.items():
                program.module.zero_grad()
                # Kernels of the program before would count as this one's.
                synchronize_all(devices)
                start = time.perf_counter()
                program.step()
                launched = time.perf_counter()
                synchronize_all(devices)
                end = time.perf_counter()
                times[name].append(end - start)
                if name == ONE:
                    waited.append((end - launched) / (end - start))
            phases.append(engine.last_step.seconds)
    medians: dict[str, float] = {}
    for phase in phases[0]:
        medians[phase] = median(seconds[phase] for seconds in phases[WARM_UPS:])
    seconds_of = {name: seconds[WARM_UPS:] for name, seconds in times.items()}
    return Speed(
        rows, seconds_of, medians, median(waited[WARM_UPS:]) if is_async else 1.0
    )


def _programs(
    engine: ScatterOnceParallel, images: Tensor, labels: Tensor
) -> dict[str, _Program]:
    """Each program by its name."""
    devices = engine.device_ids
    master = devices[0]
    programs = {ENGINE: _step_of(engine, images, labels)}
    # As many parts as the engine has sub-steps: kernels of the same size.
    parts = len(devices) * ACCUM
    programs[ONE] = _loop(_network(master), master, images, labels, parts)
    are_different = len(set(devices)) == len(devices) > 1
    # Replicas that share a processor have no speed of their own.
    if not are_different or master.type == "cpu":
        return programs
    rows = len(images) // len(devices)
    for device in devices:
        program = _loop(_network(device), device, images[:rows], labels[:rows], ACCUM)
        programs[f"{device} alone"] = program
    return programs


def _step_of(engine: ScatterOnceParallel, images: Tensor, labels: Tensor) -> _Program:
    criterion = nn.CrossEntropyLoss()

    def step() -> None:
        engine.forward_backward(images, labels, criterion)

    return _Program(engine.module, step)


def _on_processes(num_devices: int, ratio: float) -> str:
    """How many processes launch as fast as their devices compute, in words.

    Or, if no number does, one per device. ``ratio``: the engine's time over one
    device's, for the same rows.
    """
    # A device computes for this part of one device's time: 1 / num_devices.
    needed = ratio * num_devices
    for processes in range(2, num_devices + 1):
        # Each process has as many devices as the others.
        if num_devices % processes == 0 and processes >= min(needed, num_devices):
            gpus = num_devices // processes
            return f" Or use {processes} processes with {gpus} of the GPUs each."
    return ""


def _loop(
    module: nn.Module, device: torch.device, images: Tensor, labels: Tensor, parts: int
) -> _Program:
    """A plain loop, which accumulates gradients over parts of the batch."""
    place = physical(device)
    pairs = list(zip(images.chunk(parts), labels.chunk(parts), strict=True))

    def step() -> None:
        for inputs, targets in pairs:
            outputs = module(inputs.to(place, non_blocking=True))
            loss = cross_entropy(outputs, targets.to(place, non_blocking=True))
            (loss / parts).backward()

    return _Program(module, step)


def on_speed(
    devices: Sequence[torch.device], speed: Speed, load: float
) -> Iterator[DoctorVerdict]:
    """Conclude whether all devices are faster than one, and whether one of them is
    slow.
    """
    if load > 1:
        yield DoctorVerdict(
            "note",
            f"the machine is busy with other work ({load:.1f} processes for each "
            f"core), {_NOT_JUDGED}; run this again when it is quiet.",
        )
        return
    ratio = speed.ratio_to_one
    compared = speed.compared()
    # From here on the reasons come in order of how much they explain.
    if len(set(map(physical, devices))) < len(devices):
        yield DoctorVerdict(
            "note",
            f"the engine takes {compared}. Replicas that share a processor or a GPU "
            f"compute no faster than one, {_NOT_JUDGED}.",
        )
        return
    moving = 1 - speed.phases["compute"] / sum(speed.phases.values())
    limit = _SLOWER if len(devices) == 1 else _SHARED / len(devices)
    is_fast = ratio <= limit
    is_idle = speed.waited < _WAITED and moving <= _MUCH_MOVING
    if not is_fast and is_idle:
        yield DoctorVerdict("note", f"the engine takes {compared}. {_IDLE}")
        return
    reason = ""
    if not is_fast and moving > _MUCH_MOVING:
        reason = f" {moving:.0%} {_COPIES}"
    elif not is_fast:
        # Sub-steps run either compiled or captured: the faster graphs stay.
        remedies = remedies_of_launching(
            1,
            num_substeps=ACCUM,
            is_compiled=speed.graphs_are_faster,
            has_room=True,  # the network is small
        )
        processes = _on_processes(len(devices), ratio)
        reason = f" {_LAUNCHES} {remedies}.{processes}"
    kind = "slow" if reason else "fine"
    yield DoctorVerdict(kind, f"the engine takes {compared}.{reason}")
    yield from _on_unequal_devices(devices, speed)


def _on_unequal_devices(
    devices: Sequence[torch.device], speed: Speed
) -> Iterator[DoctorVerdict]:
    """Conclude whether one of the devices makes the others wait."""
    alone: list[float] = []
    for device in devices:
        alone.append(median(speed.seconds.get(f"{device} alone", [0.0])))
    slowest = max(alone)
    fastest = min(alone)
    # Also if nothing was measured alone: all are zero.
    if slowest <= _SLOWER * fastest:
        return
    shares = ", ".join(f"{fastest / seconds:.2f}" for seconds in alone)
    slow = devices[alone.index(slowest)]
    fast = devices[alone.index(fastest)]
    yield DoctorVerdict(
        "slow",
        f"the GPUs are not equally fast: {slow} has {fastest / slowest:.2f} of "
        f"{fast}'s pace, and the others wait for it. Pass shares=[{shares}].",
    )
