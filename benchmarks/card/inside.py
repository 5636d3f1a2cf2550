"""Looks at one card and at torch's own allocator, streams and profiler while the engine steps.

A look that fails is written down, and the others go on. Nothing here is a comparison with peers:
that is ``steps.py``.
"""

from __future__ import annotations

import gzip
import importlib.util
import inspect
import json
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.card.contenders import ACCUM, FULL, Work, accumulate, timed, works_of
from benchmarks.card.findings import Findings, Found, arguments
from benchmarks.card.networks import half, resnet50
from scatterpar import ScatterOnceParallel

_MIB = 2**20


class Inside:
    """ResNet-50 on one card, whose sub-steps a loop or the engine takes.

    Args:
        card: which one.
        small: tiny sizes.
        folder: for traces of the profiler.
    """

    def __init__(self, card: torch.device, small: bool, folder: Path) -> None:
        self.card, self._small, self._folder = card, small, folder
        self._network = resnet50(card, small)
        self._module = self._network.module(card)
        self._substeps = 4 if small else ACCUM
        self._engine = ScatterOnceParallel(self._module, self._substeps, [card])
        self._pinned = works_of(self._network, [card])[FULL].part(0, ACCUM // self._substeps)

    def _step(self, work: Work) -> None:
        self._module.zero_grad()
        self._engine.forward_backward(work.inputs, work.targets, self._network.criterion)

    def _loop(self) -> None:
        self._module.zero_grad()
        accumulate(self._network, self._module, self._pinned, self.card)

    def figures(self) -> Found:
        """Time, memory, and the share of what a large matrix product reaches on this card."""
        before = torch.cuda.mem_get_info(self.card)[0]
        self._step(self._pinned)
        times = 1 if self._small else 3
        seconds = min(timed(lambda: self._step(self._pinned), [self.card]) for _ in range(times))
        report = self._engine.last_step
        assert report is not None
        told = sum(report.seconds.values())
        rows = self._pinned.part(0, self._substeps)
        with FlopCounterMode(display=False) as counted:
            accumulate(self._network, self._module, rows, self.card)
        rate = self._substeps * counted.get_total_flops() / seconds
        best = self._matrix_product()
        free, total = torch.cuda.mem_get_info(self.card)
        return {
            "step": f"{1e3 * seconds:.1f} ms, and {1e3 * told:.1f} by last_step.seconds",
            "computes": f"{rate / 1e12:.2f} TFLOP/s, {rate / best:.1%} of a matrix product's here",
            "a large matrix product": f"{best / 1e12:.2f} TFLOP/s in {half(self.card)}",
            "allocated at most": _mebibytes(torch.cuda.max_memory_allocated(self.card)),
            "reserved at most": _mebibytes(torch.cuda.max_memory_reserved(self.card)),
            "free by the driver": f"{_mebibytes(before)} before, {_mebibytes(free)} after, "
            f"of {_mebibytes(total)}",
        }

    def _matrix_product(self) -> float:
        """Its operations a second."""
        side, count = (256, 1) if self._small else (8192, 10)
        matrix = torch.randn(side, side, device=self.card, dtype=half(self.card))

        def products() -> None:
            for _ in range(count):
                matrix @ matrix

        products()
        return 2 * side**3 * count / timed(products, [self.card])

    def waits(self) -> Found:
        """Where torch says that the host waited for the card, in one step."""
        found: dict[str, object] = {}
        loop_and_engine: dict[str, Callable[[], None]] = {
            "plain loop": self._loop,
            "engine": lambda: self._step(self._pinned),
        }
        for name, step in loop_and_engine.items():
            step()
            torch.cuda.set_sync_debug_mode("warn")
            try:
                with warnings.catch_warnings(record=True) as seen:
                    warnings.simplefilter("always")
                    step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            told = [w for w in seen if "synchronizing" in str(w.message)]
            places = Counter(f"{Path(w.filename).name}:{w.lineno}" for w in told)
            found[name] = f"{len(told)}" + "".join(f", {n} at {at}" for at, n in places.items())
        return found

    def profile(self) -> Found:
        """How long the card is busy, and how much of the copies goes on beside kernels."""
        targets = self._pinned.targets
        assert targets is not None
        pageable = Work(self._pinned.inputs.clone(), targets.clone(), self._pinned.rows)
        found: dict[str, object] = {}
        steps: dict[str, Callable[[], None]] = {
            "plain loop": self._loop,
            "engine": lambda: self._step(self._pinned),
            "engine, batch not pinned": lambda: self._step(pageable),
        }
        for name, step in steps.items():
            step()
            torch.cuda.synchronize(self.card)
            trace = self._folder / f"trace of {name}.json.gz".replace(" ", "-").replace(",", "")
            with torch.profiler.profile(acc_events=True) as seen:
                step()
                torch.cuda.synchronize(self.card)
            seen.export_chrome_trace(str(trace))
            with gzip.open(trace, "rt") as file:
                found[name] = busy(json.load(file)["traceEvents"])
        return found

    def compiled(self) -> Found:
        """A narrow network: the gradient beside the eager one, and the time of a step."""
        if importlib.util.find_spec("triton") is None:
            return {"not looked at": "triton is not installed, and torch.compile needs it here"}
        return self._beside(compile=True)

    def graphs(self) -> Found:
        """Likewise, with CUDA graphs."""
        if "graphs" not in inspect.signature(ScatterOnceParallel).parameters:
            return {"not looked at": "this engine has no graphs="}
        return self._beside(graphs=True)

    def _beside(self, **options: Any) -> Found:
        network = resnet50(self.card, small=True)
        work = works_of(network, [self.card])[FULL].part(0, 4)
        gradients, seconds = [], []
        for each in ({}, options):
            module = network.module(self.card).eval()
            engine = ScatterOnceParallel(module, 4, [self.card], **each)
            step = partial(engine.forward_backward, work.inputs, work.targets, network.criterion)
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                for _ in range(3):
                    module.zero_grad()
                    step()
            gradients.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
            seconds.append(min(timed(step, [self.card]) for _ in range(5)))
            engine.close()
        return {
            "apart": close(*gradients, within=5e-2),
            "step": f"{1e3 * seconds[1]:.1f} ms, and {1e3 * seconds[0]:.1f} without",
            "warnings": "; ".join(str(each.message) for each in seen) or "none",
        }


def memory_runs_out(card: torch.device, small: bool) -> Found:
    """``accum="auto"`` where torch may take so much memory alone: beside the fixed ``accum``."""
    rows, room = (4096, 128 * _MIB) if small else (2**18, 4096 * _MIB)
    inputs, targets = torch.randn(rows, 64), torch.arange(rows) % 8
    gradients, told = [], {}
    torch.cuda.empty_cache()
    allowed = torch.cuda.memory_reserved(card) + room
    torch.cuda.set_per_process_memory_fraction(
        allowed / torch.cuda.get_device_properties(card).total_memory, card
    )
    try:
        accum: Any = "auto"
        for _ in range(2):
            torch.manual_seed(0)
            module = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 8)).to(card)
            with ScatterOnceParallel(module, accum, [card]) as engine:
                seconds = timed(
                    lambda: engine.forward_backward(inputs, targets, nn.CrossEntropyLoss()), [card]
                )
                assert engine.last_step is not None
                if accum == "auto":
                    accum = len(engine.last_step.plan.shares[0].micro_batches)
                    told = {
                        "may take": _mebibytes(allowed),
                        "sub-steps": f"{accum}, after {engine.last_step.retries} retries",
                        "step": f"{seconds:.2f} s",
                    }
            gradients.append([p.grad for p in module.parameters() if p.grad is not None])
            del module
            torch.cuda.empty_cache()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, card)
    if not all(map(torch.equal, *gradients)):
        raise AssertionError(f"other bits than the fixed accum: {told}")
    return told | {"the gradient of that accum": "the same bits"}


class Recurrent(nn.Module):
    """An LSTM, which on CUDA exchanges its parameters' storage."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.LSTM(32, 64, 2, batch_first=True), nn.Linear(64, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of the last position."""
        return self.head(self.body(inputs)[0][:, -1])


class Attention(nn.Module):
    """Attention with dropout, which backward may compute again."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.query, self.head, self._again = nn.Linear(64, 192), nn.Linear(64, 4), again

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of the mean over positions."""
        attend = partial(checkpoint, self._attend, use_reentrant=False)
        return self.head((attend if self._again else self._attend)(inputs).mean(1))

    def _attend(self, inputs: Tensor) -> Tensor:
        rows, length, width = inputs.shape
        heads = self.query(inputs).view(rows, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        made = F.scaled_dot_product_attention(*heads.unbind(), dropout_p=0.2)
        return made.transpose(1, 2).reshape(rows, length, width)


def lstm(card: torch.device) -> Found:
    """Two replicas of it, warnings being errors, beside one pass over the whole batch."""
    torch.manual_seed(0)
    module = Recurrent().to(card)
    inputs, targets = torch.randn(32, 16, 32), torch.arange(32) % 4
    with warnings.catch_warnings(), ScatterOnceParallel(module, 2, [card, card]) as engine:
        warnings.simplefilter("error")
        for _ in range(3):
            module.zero_grad()
            engine.forward_backward(inputs, targets, nn.CrossEntropyLoss())
    found = [p.grad for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    nn.CrossEntropyLoss()(module(inputs.to(card)), targets.to(card)).backward()
    whole = [p.grad for p in module.parameters() if p.grad is not None]
    return {"apart from one pass": close(whole, found, within=1e-2), "warnings": "none"}


def attention(card: torch.device) -> Found:
    """Computed again in backward beside kept, by the same seed."""
    gradients = []
    for again in (False, True):
        torch.manual_seed(0)
        module = Attention(again).to(card)
        inputs, targets = torch.randn(32, 16, 64), torch.arange(32) % 4
        with ScatterOnceParallel(module, 4, [card, card]) as engine:
            torch.manual_seed(1)
            engine.forward_backward(inputs, targets, nn.CrossEntropyLoss())
        gradients.append([p.grad for p in module.parameters() if p.grad is not None])
    return {"apart": close(*gradients, within=1e-3)}


def busy(events: Sequence[Any]) -> str:
    """What the profiler's events say of the card, in words."""
    cards = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not cards:
        return "the profiler saw nothing on the card"
    kernels = _union([_span(e) for e in cards if e["cat"] == "kernel"])
    copies = _union([_span(e) for e in cards if "HtoD" in e["name"]])
    everything = _union([_span(e) for e in cards])
    wall = everything[-1][1] - everything[0][0]
    # What both have is what they have together less what either has.
    beside = _length(kernels) + _length(copies) - _length(_union(kernels + copies))
    words = f"busy for {_length(kernels) / wall:.1%} of {wall / 1e3:.1f} ms"
    if not copies:
        return f"{words}; no copies to it"
    return (
        f"{words}; copies to it {_length(copies) / 1e3:.1f} ms, "
        f"{beside / _length(copies):.1%} of it beside kernels"
    )


def close(expected: Sequence[Tensor], found: Sequence[Tensor], within: float) -> str:
    """How far gradients lie from each other, relative to the norm of the first.

    Raises:
        AssertionError: further than that, or one is not a number.
    """
    off = sum(float((a - b).norm()) ** 2 for a, b in zip(expected, found, strict=True))
    apart = (off / sum(float(a.norm()) ** 2 for a in expected)) ** 0.5
    if not apart <= within:
        raise AssertionError(f"gradients are {apart:.0e} apart, more than {within:.0e}")
    return f"{apart:.0e}"


def _span(event: Any) -> tuple[float, float]:
    return event["ts"], event["ts"] + event["dur"]


def _union(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _length(spans: Sequence[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans)


def _mebibytes(count: int) -> str:
    return f"{count / _MIB:.0f} MiB"


def main() -> int:
    """All looks, the one that takes longest last."""
    given = arguments(__doc__)
    card, small = given.device, given.small
    if card.type != "cuda":
        print(f"these looks are CUDA's, and {card} is not")
        return 0
    torch.cuda.set_device(card)
    findings = Findings(given.out)
    inside = Inside(card, small, given.out.parent)
    findings.look("a step", inside.figures)
    findings.look("waits of the host in a step", inside.waits)
    findings.look("the profiler", inside.profile)
    findings.look("memory that runs out", partial(memory_runs_out, card, small))
    findings.look("an LSTM, warnings being errors", partial(lstm, card))
    findings.look("checkpointed attention with dropout", partial(attention, card))
    findings.look("CUDA graphs", inside.graphs)
    findings.look("compiled", inside.compiled)
    return findings.close()


if __name__ == "__main__":
    raise SystemExit(main())
