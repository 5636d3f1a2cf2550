"""A step of a small network: whether its gradient is exact, and how long it takes."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from scatterpar.checkup.copies import Verdict, synchronize
from scatterpar.devices.device_ids import physical
from scatterpar.devices.streams import has_streams
from scatterpar.engine import ScatterOnceParallel

ACCUM = 16
ENGINE, ONE, PER_CALL = "engine", "one device", f"nn.DataParallel x {ACCUM}"
# what accumulates gradients, and a step of it
_Program = tuple[nn.Module, Callable[[], object]]
BUDGET, ROUNDS = 10.0, 15  # maximal seconds and rounds of the measurement
_SLOWER = 1.1  # a larger ratio of times is no accident of the measurement
_WAITED = 0.1  # if the host waits for a smaller part, the GPU is idle between launches
_SHARED = 1.5  # n GPUs may take this part of one GPU's time, divided by n
_MUCH_MOVING = 0.4  # a larger part of the step for copies makes it slow
_COPIES = (
    "of the step is spent on moving data. Take larger batches (more rows between two "
    "of the "
    "optimizer's steps), and compare the bandwidths above with what the slots should "
    "give."
)
_LAUNCHES = (
    "One interpreter launches all replicas, and these sub-steps are too short to keep "
    "the GPUs "
    f"busy. Take a smaller accum than {ACCUM}, or compile=True. A real network "
    "computes more."
)


_IDLE = (
    "In a plain loop this network is too small to keep a GPU busy: most of the time "
    "the GPU waits for the host, so no speed is judged. A real network computes more."
)


def _network(device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A transformer over the patches of an image, with the same weights every time."""
    with torch.random.fork_rng(devices=()):  # the caller's generator stays
        torch.default_generator.manual_seed(0)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        body = nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(2048, 10)
        network = nn.Sequential(nn.Conv2d(3, 32, 4, stride=4), nn.Flatten(2), *body)
    return network.to(physical(device), dtype)


def _batch(rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Images and labels on the host, the same every time."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(rows, 3, 32, 32, generator=generator, dtype=dtype)
    return images, torch.randint(10, (rows,), generator=generator)


@dataclass(frozen=True)
class Step:
    """How the engine's gradient differs from plain torch's on one device; the engine's
    warnings.
    """

    is_exact: bool
    words: str
    warned: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{'exact' if self.is_exact else 'WRONG'}: {self.words}"


def take_step(devices: Sequence[torch.device]) -> Step:
    """Compare one step on all devices with the same step on one device."""
    master, rows = physical(devices[0]), 8 * len(devices) + 3  # shares are ragged
    try:
        dtype = torch.zeros(1, dtype=torch.float64, device=master).dtype
    except (TypeError, RuntimeError):  # some accelerators do not have float64
        dtype = torch.float32
    with (
        warnings.catch_warnings(record=True, action="always") as caught,
        ScatterOnceParallel(_network(master, dtype), 3, devices) as engine,
    ):
        check = engine.check(*_batch(rows, dtype), nn.CrossEntropyLoss())
    apart = f"{check.worst:.1e} apart at most ({check.parameter}), in {dtype}"
    warned = tuple(str(warning.message) for warning in caught)
    return Step(check.passed, f"gradients of {rows} rows are {apart}", warned)


def on_step(step: Step) -> Iterator[Verdict]:
    """Conclude whether the gradient is right, and repeat the engine's warnings."""
    fine = "the gradient on all devices is that on one, up to rounding."
    wrong = f"{step.words}. If copies are fine, please report this as a bug."
    yield Verdict("fine", fine) if step.is_exact else Verdict("WRONG", wrong)
    yield from (Verdict("note", words) for words in dict.fromkeys(step.warned))


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

    def ratio(self, other: str) -> float:
        """The engine's time divided by another program's: the median
        over the rounds.
        """
        pairs = zip(self.seconds[ENGINE], self.seconds[other], strict=True)
        return median(ours / theirs for ours, theirs in pairs)

    def __str__(self) -> str:
        lines = [
            f"  {n + ':':22} {1e3 * median(s):8.1f} ms" for n, s in self.seconds.items()
        ]
        phases = ", ".join(
            f"{name} {1e3 * spent:.1f}" for name, spent in self.phases.items()
        )
        return "\n".join(
            [f"a step of {self.rows} rows:", *lines, f"  in the engine: {phases}"]
        )


def measure(devices: Sequence[torch.device]) -> Speed:
    """Time a step of every program, in as many rounds as fit into
    ``BUDGET`` seconds.
    """
    rows = ACCUM * len(devices) * (64 if all(map(has_streams, devices)) else 2)
    times, phases, begin = defaultdict[str, list[float]](list), [], time.perf_counter()
    waited = list[float]()
    with (
        warnings.catch_warnings(action="ignore"),  # the exact step has reported them
        ScatterOnceParallel(_network(devices[0]), ACCUM, devices) as engine,
    ):
        programs = _programs(engine, *_batch(rows))
        for number in range(1 + ROUNDS):
            if number > 1 and time.perf_counter() - begin > BUDGET:
                break
            for name, (module, step) in programs.items():
                module.zero_grad()
                synchronize(devices)
                start = time.perf_counter()
                step()
                launched = time.perf_counter()
                synchronize(devices)
                end = time.perf_counter()
                times[name].append(end - start)
                if name == ONE:
                    waited.append((end - launched) / (end - start))
            assert engine.last_step is not None
            phases.append(engine.last_step.seconds)
    # The first round is a warm-up.
    medians = {name: median(one[name] for one in phases[1:]) for name in phases[0]}
    seconds = {name: each[1:] for name, each in times.items()}
    is_async = all(map(has_streams, devices))
    return Speed(rows, seconds, medians, median(waited[1:]) if is_async else 1.0)


def _programs(
    engine: ScatterOnceParallel, images: Tensor, labels: Tensor
) -> dict[str, _Program]:
    """Each program by its name."""
    devices, master, rows = engine.device_ids, engine.device_ids[0], len(images)
    step = partial(engine.forward_backward, images, labels, nn.CrossEntropyLoss())
    programs: dict[str, _Program] = {ENGINE: (engine.module, step)}

    def add(
        name: str, module: nn.Module, device: torch.device, count: int, parts: int
    ) -> None:
        step = partial(
            _accumulate, module, device, images[:count], labels[:count], parts
        )
        programs[name] = module, step

    add(ONE, _network(master), master, rows, len(devices) * ACCUM)
    if 1 < len(set(devices)) == len(devices) and master.type != "cpu":
        for device in devices:
            add(
                f"{device} alone", _network(device), device, rows // len(devices), ACCUM
            )
        with contextlib.suppress(Exception):  # some accelerators do not support it
            parallel = nn.DataParallel(
                _network(master), [device.index for device in devices]
            )
            _accumulate(parallel, master, images, labels, ACCUM)
            add(PER_CALL, parallel, master, rows, ACCUM)
    return programs


def _accumulate(
    module: nn.Module, device: torch.device, images: Tensor, labels: Tensor, parts: int
) -> None:
    """Accumulate gradients in plain torch."""
    on_device = partial(Tensor.to, device=physical(device), non_blocking=True)
    for inputs, targets in zip(images.chunk(parts), labels.chunk(parts), strict=True):
        (
            cross_entropy(module(on_device(inputs)), on_device(targets)) / parts
        ).backward()


def on_speed(
    devices: Sequence[torch.device], speed: Speed, load: float
) -> Iterator[Verdict]:
    """Conclude whether all devices are faster than one, and whether one of them is
    slow.
    """
    if load > 1:
        words = (
            f"the machine is busy with other work ({load:.1f} processes for each core)"
        )
        yield Verdict(
            "note", f"{words}, so no speed is judged; run this again when it is quiet."
        )
        return
    others = {ONE: "one device's time", PER_CALL: f"the time of {PER_CALL}"}
    ratios = {name: speed.ratio(name) for name in others if name in speed.seconds}
    compared = " and ".join(
        f"{ratio:.2f} of {others[name]}" for name, ratio in ratios.items()
    )
    if len({*map(physical, devices)}) < len(devices):
        words = "Replicas that share a processor or a GPU compute no faster than one"
        yield Verdict(
            "note", f"the engine takes {compared}. {words}, so no speed is judged."
        )
        return
    moving = 1 - speed.phases["compute"] / sum(speed.phases.values())
    is_fine = ratios[ONE] <= (_SLOWER if len(devices) == 1 else _SHARED / len(devices))
    if not is_fine and speed.waited < _WAITED and moving <= _MUCH_MOVING:
        yield Verdict("note", f"the engine takes {compared}. {_IDLE}")
        return
    reason = f"{moving:.0%} {_COPIES}" if moving > _MUCH_MOVING else _LAUNCHES
    why = "" if is_fine else f" {reason}"
    if ratios.get(PER_CALL, 0) > _SLOWER:
        why, is_fine = " That should not be: please report it, with this page.", False
    yield Verdict("fine" if is_fine else "slow", f"the engine takes {compared}.{why}")
    alone = [median(speed.seconds.get(f"{device} alone", [0.0])) for device in devices]
    if max(alone) > _SLOWER * min(alone):
        shares = ", ".join(f"{min(alone) / seconds:.2f}" for seconds in alone)
        slow, fast = (
            devices[alone.index(seconds)] for seconds in (max(alone), min(alone))
        )
        pace = f"{slow} has {min(alone) / max(alone):.2f} of {fast}'s pace"
        words = f"the GPUs are not equally fast: {pace}, and the others wait for it."
        yield Verdict("slow", f"{words} Pass shares=[{shares}].")
