"""The measuring half of this benchmark: each interpreter runs it. It needs only torch.

Its input and output are lines of JSON::

    output    {"python": …, "torch": …, "lock": …}
    input     {"subject": …, "replicas": …, "accum": …, "switch_interval": …}
    output    {"step": seconds}, or of no replicas {"forward": …, "backward": …}
    input     …
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
    """Seconds of a step, or with no replicas of a bare loop's forwards and backwards."""
    interval_before = sys.getswitchinterval()
    sys.setswitchinterval(switch_interval)
    run = _step if replicas else _bare
    try:
        # Wakes threads, and fills caches.
        run(subject, replicas, accum)
        return run(subject, replicas, accum)
    finally:
        sys.setswitchinterval(interval_before)


def _step(subject: str, replicas: int, accum: int) -> dict[str, float]:
    engine, (inputs, targets) = _engine(subject, replicas, accum)
    engine.module.zero_grad()
    start = time.perf_counter()
    engine.forward_backward(inputs, targets, _criterion)
    return {"step": time.perf_counter() - start}


def _bare(subject: str, _: int, accum: int) -> dict[str, float]:
    """One replica's sub-steps without an engine, forward and backward timed apart."""
    engine, (inputs, targets) = _engine(subject, 1, accum)
    module = engine.module
    module.zero_grad()
    forward = 0.0
    backward = 0.0
    for x, y in zip(inputs.split(_ROWS), targets.split(_ROWS), strict=True):
        start = time.perf_counter()
        loss = _criterion(module(x), y) / accum
        middle = time.perf_counter()
        loss.backward()
        forward += middle - start
        backward += time.perf_counter() - middle
    return {"forward": forward, "backward": backward}


@functools.cache
def _engine(
    subject: str, replicas: int, accum: int
) -> tuple[ScatterOnceParallel, tuple[Tensor, Tensor]]:
    """An engine and its batch, made once."""
    torch.manual_seed(0)
    module = SUBJECTS[subject].build()
    batch = SUBJECTS[subject].make(_ROWS * replicas * accum)
    return ScatterOnceParallel(module, accum, ["cpu"] * replicas), batch


def _answer(answers: TextIO, value: dict[str, Any]) -> None:
    print(json.dumps(value), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.stdin, sys.stdout)
