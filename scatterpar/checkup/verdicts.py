"""Conclusions from the findings: fine, note, slow or WRONG, with the reason and the remedy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from scatterpar.checkup.copies import RouteResult
from scatterpar.checkup.training import ACCUM, ONE, PER_CALL, Speed, Step

_SLOWER = 1.1  # a larger ratio of times is no accident of the measurement
_MUCH_MOVING = 0.4  # a larger part of the step for copies makes it slow

_LINKS = (
    "Copies between two GPUs bypass the host, and something on the way changes them: switch the "
    "IOMMU off (kernel option iommu=off, or iommu=pt) and PCIe ACS (in the BIOS), and update the "
    "driver. Until then set NCCL_P2P_DISABLE=1 for whatever uses NCCL, DistributedDataParallel "
    "too. The engine checks its copies, and copies through the host if they arrive wrong."
)
_MEMORY = (
    "The memory, the slot or the driver is at fault, and nothing that is computed on this machine "
    "can be trusted: test the memory, change the GPU's slot or cable, update the driver."
)


@dataclass(frozen=True)
class Verdict:
    """One conclusion: ``fine``, ``note``, ``slow`` or ``WRONG``, with the reason and the remedy."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}{'' if self.kind in ('fine', 'note') else ' because'}: {self.text}"


def on_copies(routes: Sequence[RouteResult]) -> Iterator[Verdict]:
    """Conclude whether every byte arrived."""
    broken = [route for route in routes if not route.arrives]
    through_host = any("host" in route.source + route.target for route in broken)
    for route in broken:
        way = f"from {route.source} to {route.target}"
        if route.error is not None:
            yield Verdict("WRONG", f"a copy {way} failed: {route.error}")
            continue
        size, altered = max(route.altered.items(), key=lambda item: item[1] / item[0])
        words = f"copies {way} bring other bytes than were sent: {altered} of {size} were altered."
        yield Verdict("WRONG", f"{words} {_MEMORY if through_host else _LINKS}")
    if routes and not broken:
        yield Verdict("fine", f"copies arrive as they were sent, on all {len(routes)} ways.")


def on_step(step: Step) -> Iterator[Verdict]:
    """Conclude whether the gradient is right, and repeat the engine's warnings."""
    if step.is_exact:
        yield Verdict("fine", "the gradient on all devices is that on one, up to rounding.")
    else:
        yield Verdict("WRONG", f"{step.words}. If copies are fine, please report this as a bug.")
    yield from (Verdict("note", words) for words in dict.fromkeys(step.warned))


def on_speed(devices: Sequence[torch.device], speed: Speed, load: float) -> Iterator[Verdict]:
    """Conclude whether all devices are faster than one, and whether one of them is slow."""
    if speed.error is not None:
        yield Verdict("WRONG", f"timing a step failed: {speed.error}")
        return
    if load > 1:
        words = f"the machine is busy with other work ({load:.1f} processes for each core)"
        yield Verdict("note", f"{words}, so no speed is judged; run this again when it is quiet.")
        return
    others = {ONE: "one device's time", PER_CALL: f"the time of {PER_CALL}"}
    ratios = {name: speed.ratio(name) for name in others if name in speed.seconds}
    compared = " and ".join(f"{ratio:.2f} of {others[name]}" for name, ratio in ratios.items())
    is_fine = ratios[ONE] <= (_SLOWER if len(devices) == 1 else 1 / _SLOWER)
    why = "" if is_fine else f" {_why(devices, speed.phases)}"
    if ratios.get(PER_CALL, 0) > _SLOWER:
        why, is_fine = " That should not be: please report it, with this page.", False
    yield Verdict("fine" if is_fine else "slow", f"the engine takes {compared}.{why}")
    if all(f"{device} alone" in speed.seconds for device in devices):
        paces = [1 / median(speed.seconds[f"{device} alone"]) for device in devices]
        yield from _on_shares(devices, paces)


def _why(devices: Sequence[torch.device], phases: dict[str, float]) -> str:
    if all(device.type == "cpu" for device in devices):
        return (
            "CPU replicas share the same cores, which one replica can use alone: they are for "
            "trying things out, and for networks too small to fill the cores."
        )
    moving = 1 - phases["compute"] / sum(phases.values())
    if moving > _MUCH_MOVING:
        return (
            f"{moving:.0%} of the step is spent on moving parameters, gradients and the batch. "
            "Take larger batches (more rows between two of the optimizer's steps), and compare "
            "the bandwidths above with each other, and with what the slots should give."
        )
    return (
        "All replicas are launched by one interpreter, and these sub-steps are too short to keep "
        f"the GPUs busy. Take a smaller accum than {ACCUM} (fewer and larger sub-steps), or "
        "compile=True. A real network has more to compute."
    )


def _on_shares(devices: Sequence[torch.device], paces: Sequence[float]) -> Iterator[Verdict]:
    best, worst = max(paces), min(paces)
    if best > _SLOWER * worst:
        shares = ", ".join(f"{pace / best:.2f}" for pace in paces)
        yield Verdict(
            "slow",
            f"the GPUs are not equally fast: {devices[paces.index(worst)]} has {worst / best:.2f} "
            f"of {devices[paces.index(best)]}'s pace, and the others wait for it. Pass "
            f'shares=[{shares}], or shares="auto".',
        )
