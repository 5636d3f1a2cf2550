"""The table of all checks: what each shows, when it passes, and what it needs."""

from __future__ import annotations

from functools import partial

from scatterpar.checkup.card import bits, endings, machine, memory, times
from scatterpar.checkup.card.networks import NAMES
from scatterpar.checkup.card.setting import Check

_BITS, _ENDS = "the same bits", "raised; the process ends within 10 s"
_SPREAD, _PAIRS = ((0, 0, 1, 1), (0, 1, 2, 3)), ((0, 0, 1, 1), (0, 1, 0, 1))
_STEP, _HOST = "1.10 of DDP's time, efficiency 0.9", "the GPUs' time for it"
_MODES = (times.EAGER, 18), (times.GRAPHS, 1)  # both are measured together
_MEMORY = partial(endings.ends, "memory", '"auto" has the bits')
_ASSERTION = partial(endings.ends, "assertion", "Error: ")
_INTERRUPT = partial(endings.ends, "interrupt", "KeyboardInterrupt")
_TESTS = "kernels; tests/nullcuda/run has these tests"


def _on(count: int) -> str:
    return f"{count} GPU{'s'[: count > 1]}"


# By the process that runs them. On eight GPUs all of them take ten minutes at most.
CHECKS: dict[str, list[Check]] = {
    "machine": [
        Check("copies of 1 KB to 256 MB, all at once too", "every byte", machine.copies, 33),
        Check("one step on all devices", "exact up to rounding", machine.exact, 10),
    ],
    "tests": [Check("tests that need a GPU", "all pass", machine.tests, 75, 1, True, _TESTS)],
    "bits": [
        *[
            Check(
                f"20 steps of {name} with graphs beside eager, {_on(count)}",
                *(_BITS, partial(bits.graphs, name, count), 12, count, True),
            )
            for name in NAMES
            for count in (1, 2, 8)
        ],
        Check("three steps, and the same again", _BITS, bits.twice, 10),
        Check("[0, 0, 1, 1] beside [0, 1, 0, 1]", _BITS, partial(bits.layouts, *_PAIRS), 10, 2),
        Check("[0, 0, 1, 1] beside [0, 1, 2, 3]", _BITS, partial(bits.layouts, *_SPREAD), 10, 4),
        Check("every copy made slow", _BITS, bits.slow, 22, cuda=True),
        Check("a new shape captured at 64 steps", _BITS, bits.new_shapes, 20, cuda=True),
        Check("two processes beside one", "1e-6 apart", bits.two_processes, 25, 2, real="NCCL"),
    ],
    "memory": [
        Check("peaks of GPT-2 small's parameters", "documented ± 5 %", memory.peaks, 12, 2, True),
        Check("reserved with graphs", "1.15 of eager", memory.reserved, 12, cuda=True),
    ],
    "endings": [
        Check("out of memory on all devices", _ENDS, _MEMORY, 15, cuda=True),
        Check("an assertion in a kernel", _ENDS, _ASSERTION, 15, 1, True, "kernels that fail"),
        Check("Ctrl-C on all devices", _ENDS, _INTERRUPT, 15),
        Check("TORCH_CUDA_SANITIZER=1, one GPU", "no race", endings.sanitized, 15, cuda=True),
    ],
    "times": [
        Check("processes for DDP join", "all of them", times.join, 40, 1, True, "NCCL"),
        *[
            Check(
                f"step of {name}, {mode}, {_on(count)}",
                *(_STEP, partial(times.step, name, count, mode), seconds, count, True, "time"),
            )
            for name in NAMES
            for count in times.COUNTS
            for mode, seconds in _MODES
        ],
        *[
            Check(
                f"the host's time for a sub-step of {name}, {mode}",
                *(_HOST, partial(times.host, name, mode), 1, 1, True, "time"),
            )
            for name in NAMES
            for mode, _ in _MODES
        ],
        Check(
            "rows under kernels, pinned", "90 %", partial(times.arrival, True), 15, 1, True, "time"
        ),
        Check("not pinned", "70 %", partial(times.arrival, False), 15, 1, True, "time"),
    ],
}
