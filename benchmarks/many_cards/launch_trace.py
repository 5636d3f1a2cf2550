"""Trace the steps of a program on null GPUs.

In a process of its own, because a process has one number of null GPUs::

    NULLCUDA_DEVICES=4 python -m benchmarks.many_cards.launch_trace FILE --cards 4

writes a few rounds to FILE, which ``traces.py`` reads. In each round some steps of the
program are traced, then a step of one GPU without graphs, beside which the first are
read: whatever else runs on the machine slows both.
"""

from __future__ import annotations

import argparse
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from nullcuda import card, values
from nullcuda.plugin import record_hand_overs
from torch import Tensor, nn

from benchmarks import launching
from benchmarks.many_cards.traces import BASELINE_ACCUM, GRAPHS, PROGRAMS
from scatterpar import ScatterOnceParallel
from scatterpar.replicas import broadcast

# Sub-steps are captured and compared after some steps, and a later step has no looks.
_WARM_UPS = 12
_STEPS = 2  # of a round
_ROUNDS = 5
_CLOCKED = 8  # steps that are timed without a trace
_ROWS = 2  # of a micro-batch: what is launched is the same for any number
_COMPARING_STEPS = 4  # as few as show that statistics differ
_FIRST = 1  # the key of the first record of the caller, which tells who that is


class Tracer:
    """Traces some of the steps that a program runs, and clocks others.

    ::

        warm-up … | step step baseline | step step baseline | … | clocked steps
    """

    def __init__(self, network: str) -> None:
        self._baseline = _engine_step(network, 1, BASELINE_ACCUM, "off")
        self._rounds: list[tuple[list[Any], list[Any]]] = []
        self._start = 0.0
        self._start_of_threads = 0.0
        self._start_of_caller = 0.0
        self._seconds: list[float] = []
        self._caller_seconds: list[float] = []
        self._host_seconds: list[float] = []
        self._baseline_host_seconds: list[float] = []
        next(self._baseline)  # compares values, so these must be computed

    @property
    def num_steps(self) -> int:
        """The number of steps that the program runs in all."""
        return _WARM_UPS + _STEPS * _ROUNDS + _CLOCKED

    def before(self, step: int) -> None:
        """The program's step of this number begins."""
        later = step - _WARM_UPS
        if 0 <= later < _STEPS * _ROUNDS and later % _STEPS == 0:
            card.trace(True)
            card.hand_over(_FIRST)
        if later >= _STEPS * _ROUNDS:
            self._start = time.perf_counter()
            self._start_of_threads = time.process_time()
            self._start_of_caller = time.thread_time()

    def after(self, step: int) -> None:
        """The program's step of this number has ended."""
        later = step - _WARM_UPS
        if later < 0:
            next(self._baseline)
        elif later < _STEPS * _ROUNDS and later % _STEPS == _STEPS - 1:
            steps = _end_trace()
            card.trace(True)
            card.hand_over(_FIRST)
            next(self._baseline)
            self._rounds.append((steps, _end_trace()))
        if later >= _STEPS * _ROUNDS:
            self._caller_seconds.append(time.thread_time() - self._start_of_caller)
            self._seconds.append(time.perf_counter() - self._start)
            computed = time.process_time()
            self._host_seconds.append(computed - self._start_of_threads)
            next(self._baseline)
            spent = time.process_time() - computed
            self._baseline_host_seconds.append(spent)

    def content(self) -> dict[str, Any]:
        """What was traced and clocked."""
        return {
            "rounds": self._rounds,
            "num_steps": _STEPS,
            "seconds": self._seconds,
            "caller_seconds": self._caller_seconds,
            "host_seconds": self._host_seconds,
            "baseline_host_seconds": self._baseline_host_seconds,
        }


def _end_trace() -> list[tuple[Any, ...]]:
    card.hand_over(_FIRST)  # what the caller has computed since its last record
    card.trace(False)
    return [tuple(record) for record in card.records()]


def batch(network: str, rows: int, *, pageable: bool = False) -> tuple[Tensor, Tensor]:
    """Inputs and targets; in pinned memory unless ``pageable``."""
    inputs, targets = launching.batch(network, rows)
    if pageable:
        return inputs.clone(), targets.clone()
    return inputs, targets


def _engine_step(
    network: str,
    cards: int,
    accum: int,
    graphs: str,
    *,
    pageable: bool = False,
    fused: bool = False,
) -> Iterator[str]:
    """Take a step each time, with the optimizer's. Yields what became of graphs."""
    model = launching.network(network)
    # By default torch chooses: one kernel for many parameters.
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=fused or None)
    inputs, targets = batch(network, cards * accum * _ROWS, pageable=pageable)
    criterion = nn.CrossEntropyLoss()
    devices = list(range(cards))
    engine = ScatterOnceParallel(
        model, accum, devices, verify=False, graphs=GRAPHS[graphs]
    )
    # The first steps compare values. They are computed here, so rows are few. Until the
    # engine knows that all statistics differ in each step, and does not compare them.
    for _ in range(_COMPARING_STEPS):
        few = cards * _ROWS
        engine.forward_backward(inputs[:few], targets[:few], criterion)
        # Else parameters are compared by kernels that do not run, and count as written
        # unseen.
        optimizer.step()
    yield ""
    while True:
        optimizer.zero_grad()
        engine.forward_backward(inputs, targets, criterion)
        optimizer.step()
        yield str(engine.last_step.graphs)


def _call_step(network: str, cards: int, accum: int) -> Iterator[str]:
    """As ``_engine_step``, by calls of the engine and the caller's backward passes."""
    model = launching.network(network)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    inputs, targets = batch(network, cards * _ROWS)
    criterion = nn.CrossEntropyLoss()
    devices = list(range(cards))
    engine = ScatterOnceParallel(model, device_ids=devices, verify=False)

    def step() -> None:
        optimizer.zero_grad()
        for number in range(1, accum + 1):
            is_last = number == accum
            x = inputs.to("cuda:0", non_blocking=True) if cards == 1 else inputs
            y = targets.to("cuda:0", non_blocking=True)
            if is_last:
                (criterion(engine(x), y) / accum).backward()
            else:
                with engine.no_sync():
                    (criterion(engine(x), y) / accum).backward()
        optimizer.step()

    step()
    yield ""
    while True:
        step()
        yield "a call has no graphs"


class _WithLoss(nn.Module):
    """A model as a Trainer takes it: its output has a loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        output = self.model(inputs)
        return {"loss": self.criterion(output, labels), "logits": output}


def _train(network: str, cards: int, accum: int, tracer: Tracer) -> str:
    """Run a Trainer of transformers, whose steps the tracer sees."""
    from transformers import TrainerCallback, TrainingArguments

    from scatterpar.integrations.transformers import ScatterOnceTrainer

    num_steps = tracer.num_steps + 1
    inputs, targets = launching.batch(network, num_steps * cards * accum * _ROWS)
    rows = [{"inputs": x, "labels": y} for x, y in zip(inputs, targets, strict=True)]

    class Steps(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            # Kernels that do not run give no values to compare.
            trainer._divided_model(trainer.model).engine.verify = False

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step:
                tracer.before(state.global_step - 1)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                values.remove()
            else:
                tracer.after(state.global_step - 2)

    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            per_device_train_batch_size=_ROWS,
            gradient_accumulation_steps=accum,
            max_steps=num_steps,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = ScatterOnceTrainer(
            _WithLoss(launching.network(network)),
            args,
            train_dataset=rows,
            callbacks=[Steps()],
            device_ids=list(range(cards)),
        )
        trainer.train()
    return "a Trainer has no graphs"


def main() -> None:
    """Trace what the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__)
    add: Callable[..., Any] = parser.add_argument
    add("file", type=Path)
    add("--network", choices=["resnet50", "gpt"], default="resnet50")
    add("--cards", type=int, default=4)
    add("--accum", type=int, default=16)
    add("--program", choices=PROGRAMS, default="step")
    add("--graphs", choices=GRAPHS, default="default")
    add("--pageable", action="store_true")
    add("--fused", action="store_true")
    options = parser.parse_args()
    network, cards, accum = options.network, options.cards, options.accum
    record_hand_overs()
    values.install()
    # The comparison of statistics in each 16th step is left out: by kernels that do not
    # run they are equal, and every step after it would compare them.
    broadcast._COMPARISONS_PER_READING = sys.maxsize
    tracer = Tracer(network)
    if options.program == "trainer":
        graphs = _train(network, cards, accum, tracer)
    else:
        if options.program == "step":
            steps = _engine_step(
                network,
                cards,
                accum,
                options.graphs,
                pageable=options.pageable,
                fused=options.fused,
            )
        else:
            steps = _call_step(network, cards, accum)
        next(steps)
        values.remove()
        for number in range(tracer.num_steps):
            tracer.before(number)
            graphs = next(steps)
            tracer.after(number)
    micro_batch = launching.batch(network, _ROWS)[0].nbytes
    content = tracer.content() | {"graphs": graphs, "micro_batch": micro_batch}
    options.file.write_bytes(pickle.dumps(content))


if __name__ == "__main__":
    main()
