"""The measuring half of this benchmark: run by each interpreter, it needs torch and
nothing else.

Answers on its output, a line of JSON each: first what it is, then what every request on
its input took.
"""

import functools
import json
import sys
import time
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from benchmarks.interpreter.modules import SUBJECTS
from scatterpar import ScatterOnceParallel

_ROWS = 2  # in a micro-batch
_criterion = nn.CrossEntropyLoss()


def main(requests: TextIO, answers: TextIO) -> None:
    """Serve until the requests end."""
    torch.set_num_threads(1)  # for one replica too: what is compared is the interpreter
    _answer(answers, _describe())
    for line in requests:
        _answer(answers, _measured(**json.loads(line)))


def _describe() -> dict[str, Any]:
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "lock": getattr(sys, "_is_gil_enabled", lambda: True)(),
    }


def _measured(
    subject: str, replicas: int, accum: int, switch_interval: float
) -> dict[str, float]:
    """Seconds of a step, or with no replicas of a bare loop's forwards
    and backwards.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(switch_interval)
    try:
        run = _step if replicas else _bare
        run(subject, replicas, accum)  # whatever was asleep or not in the caches
        return run(subject, replicas, accum)
    finally:
        sys.setswitchinterval(before)


def _step(subject: str, replicas: int, accum: int) -> dict[str, float]:
    engine, batch = _engine(subject, replicas, accum)
    engine.module.zero_grad()
    start = time.perf_counter()
    engine.forward_backward(*batch, _criterion)
    return {"step": time.perf_counter() - start}


def _bare(subject: str, _: int, accum: int) -> dict[str, float]:
    """One replica's sub-steps without an engine, forward and backward timed apart."""
    engine, batch = _engine(subject, 1, accum)
    module = engine.module
    module.zero_grad()
    seconds = {"forward": 0.0, "backward": 0.0}
    for inputs, targets in zip(*(tensor.split(_ROWS) for tensor in batch), strict=True):
        start = time.perf_counter()
        loss = _criterion(module(inputs), targets) / accum
        middle = time.perf_counter()
        loss.backward()
        seconds["forward"] += middle - start
        seconds["backward"] += time.perf_counter() - middle
    return seconds


@functools.cache
def _engine(
    subject: str, replicas: int, accum: int
) -> tuple[ScatterOnceParallel, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    module = SUBJECTS[subject].build()
    batch = SUBJECTS[subject].make(_ROWS * replicas * accum)
    return ScatterOnceParallel(module, accum, ["cpu"] * replicas), batch


def _answer(answers: TextIO, value: dict[str, Any]) -> None:
    print(json.dumps(value), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.stdin, sys.stdout)
