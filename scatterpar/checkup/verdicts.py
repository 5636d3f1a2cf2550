"""What follows from the findings: fine, slow because, WRONG because, and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median

import torch

from scatterpar.checkup.copies import HOST, PINNED, Route
from scatterpar.checkup.training import ACCUM, ENGINE, ONE, PER_CALL, Speed, Step

_SLOWER = 1.1  # more than this is no accident of the measurement
_LAME = 0.5  # of the bandwidth of its like
_MOVING = 0.4  # of a step

_LINKS = (
    "Copies from card to card bypass the host, and something on the way changes them: switch the "
    "IOMMU off (kernel option iommu=off, or iommu=pt) and PCIe ACS (in the BIOS), and update the "
    "driver. Until then set NCCL_P2P_DISABLE=1 for whatever uses NCCL, DistributedDataParallel "
    "too. The engine looks for itself, and goes through the host's memory where it must."
)
_MEMORY = (
    "The memory, the slot or the driver is at fault, and nothing that is computed on this machine "
    "can be trusted: test the memory, exchange the card's slot or cable, update the driver."
)


@dataclass(frozen=True)
class Verdict:
    """One line of the end: ``fine``, ``note``, ``slow`` or ``WRONG``, why, and what to do."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}{'' if self.kind in ('fine', 'note') else ' because'}: {self.text}"


def judge(
    devices: Sequence[torch.device],
    routes: Sequence[Route],
    steps: Sequence[Step],
    speeds: Sequence[Speed],
    load_per_core: float = 0.0,
) -> list[Verdict]:
    """The verdicts, in the order of the examination."""
    is_busy = load_per_core > 1
    found = [*_on_copies(routes), *([] if is_busy else _on_links(routes)), *_on_steps(steps)]
    for speed in speeds:
        if speed.error is not None:
            found.append(Verdict("WRONG", f"timing the {speed.problem} failed: {speed.error}"))
        elif not is_busy:
            kind, words = _on_speed(speed, devices)
            found.append(Verdict(kind, f"with the {speed.problem} {words}"))
    if is_busy:
        words = (
            f"the machine is busy with other work ({load_per_core:.1f} processes for each core), "
            "so no speed is judged; run this again when it is quiet."
        )
        return [*found, Verdict("note", words)]
    return [*found, *_on_shares(devices, speeds)]


def _on_copies(routes: Sequence[Route]) -> Iterator[Verdict]:
    broken = [route for route in routes if not route.arrives]
    advice = _MEMORY if any(_ends(route) != ("card", "card") for route in broken) else _LINKS
    for route in broken:
        way = f"{route.source} to {route.target}"
        if route.error is not None:
            yield Verdict("WRONG", f"{way} failed: {route.error}")
            continue
        size, altered = max(route.altered.items(), key=lambda item: item[1] / item[0])
        words = f"bring other bytes than were sent: {altered} of {size} arrived altered. {advice}"
        yield Verdict("WRONG", f"copies from {way} {words}")
    if routes and not broken:
        yield Verdict("fine", f"copies arrive as they were sent, on all {len(routes)} ways.")


def _ends(route: Route) -> tuple[str, ...]:
    """The kinds of memory at both ends."""
    return tuple(e if e in (HOST, PINNED) else "card" for e in (route.source, route.target))


def _on_links(routes: Sequence[Route]) -> Iterator[Verdict]:
    """A way that is much slower than others of its kind."""
    judged = [r for r in routes if r.arrives and "cpu" not in f"{r.source} {r.target}"]
    for route in judged:
        alike = [one for one in judged if _ends(one) == _ends(route)]
        usual = median(one.gigabytes_per_second for one in alike)
        if route.gigabytes_per_second < _LAME * usual:
            yield Verdict(
                "slow",
                f"{route.source} to {route.target} moves {route.gigabytes_per_second:.2f} GB/s, "
                f"and {usual:.2f} is usual here. Look at the slot and its PCIe lanes (nvidia-smi "
                "-q, lspci -vv: LnkSta), at a riser cable, and at what else uses the way.",
            )


def _on_steps(steps: Sequence[Step]) -> Iterator[Verdict]:
    for step in steps:
        gradient = f"the gradient of the {step.problem} on all devices"
        if step.error is not None:
            yield Verdict("WRONG", f"a step of the {step.problem} failed: {step.error}")
        elif step.is_exact:
            words = f"is that on one ({step.worst:.1e} apart, in {step.dtype})."
            yield Verdict("fine", f"{gradient} {words}")
        else:
            yield Verdict(
                "WRONG",
                f"{gradient} differs from that on one by {step.worst:.1e} in {step.parameter}, and "
                f"rounding stays below {step.limit:.0e}. If copies are fine, this is a bug: please "
                "report it.",
            )
    for words in dict.fromkeys(words for step in steps for words in step.warned):
        yield Verdict("note", words)


def _on_speed(speed: Speed, devices: Sequence[torch.device]) -> tuple[str, str]:
    per_call, one = speed.ratio(PER_CALL), speed.ratio(ONE)
    assert one is not None
    if per_call is not None and per_call > _SLOWER:
        return "slow", (
            f"{PER_CALL} takes less time ({1 / per_call:.2f} of the engine's). That should not be: "
            "please report it, with this page."
        )
    if len(devices) > 1 and one > 1 / _SLOWER:
        why = _why(speed, devices)
        return "slow", f"{len(devices)} replicas take {one:.2f} of one device's time. {why}"
    if one > _SLOWER:
        return "slow", (
            f"the engine takes {one:.2f} of a plain loop's time. What is done once a step weighs "
            "much with so little to compute: larger batches."
        )
    against = "" if per_call is None else f" and {per_call:.2f} of {PER_CALL}'s"
    return "fine", f"the {ENGINE} takes {one:.2f} of one device's time{against}."


def _why(speed: Speed, devices: Sequence[torch.device]) -> str:
    if all(device.type == "cpu" for device in devices):
        return (
            "CPU replicas share the same cores, which one replica can use alone: they are for "
            "trying things out, and for networks too small to fill the cores."
        )
    if speed.moving > _MOVING:
        return (
            f"{speed.moving:.0%} of the step is spent on moving parameters, gradients and the "
            "batch. Take larger batches (more rows between two of the optimizer's steps), and "
            "compare the bandwidths above with what the slots should give."
        )
    return (
        "All replicas are launched by one interpreter, and these sub-steps are too short to keep "
        f"the cards busy. Take a smaller accum than {ACCUM} (fewer and larger sub-steps), or "
        "compile=True. A real network has more to compute."
    )


def _on_shares(devices: Sequence[torch.device], speeds: Sequence[Speed]) -> Iterator[Verdict]:
    """Cards of unequal pace: what to pass as ``shares``."""
    measured = [speed.paces for speed in speeds if speed.paces]
    if not measured:
        return
    paces = {name: geometric_mean([median(one[name]) for one in measured]) for name in measured[0]}
    quickest, slowest = (by(paces, key=lambda name: paces[name]) for by in (max, min))
    if any(median(one[quickest]) <= _SLOWER * median(one[slowest]) for one in measured):
        return  # not with every network: an accident of the measurement
    one_each = [paces[str(d)] / paces[quickest] / devices.count(d) for d in devices]
    yield Verdict(
        "slow",
        f"the cards are not equally fast: {slowest} has {paces[slowest] / paces[quickest]:.2f} of "
        f"{quickest}'s pace, and the others wait for it. Pass "
        f'shares=[{", ".join(f"{share:.2f}" for share in one_each)}], or shares="auto".',
    )
