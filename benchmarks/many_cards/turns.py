"""Do the kernels of several GPUs overlap while step functions take turns?

    tests/nullcuda/run python -m benchmarks.many_cards.turns

Lightning's Trainer runs on null GPUs: an evaluation of 24 batches, and steps of a
training. Each entry of the trace gets a duration, as in ``simulation.py``: a matrix
product takes 500 us, any other kernel and each launch 5 us. The GIL costs nothing: one
replica at a time runs Python.

A call that writes a buffer hands it on, so that the next forward pass begins when this
one has ended, and backward passes alone overlap: 3 of 4 GPUs at most.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("NULLCUDA_DEVICES", "4")

import lightning.pytorch as pl
import torch
from nullcuda import card, values
from nullcuda.plugin import record_hand_overs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.many_cards.simulation import Costs, Durations, Simulation, Trace
from scatterpar.integrations.lightning import ScatterOnceStrategy

_US = 1e-6
_COSTS = Costs(
    gil=0.0, call=5 * _US, backward_call=5 * _US, large=500 * _US, small=5 * _US
)
# Those of sub-steps and graphs are not used: nothing is captured.
_DURATIONS = Durations(
    host=0.0, device=0.0, graph_launch=0.0, tape=0.0, hand_over=0.0, link=50e9
)
_FEATURES = 32
_LAYERS = 20
_BATCHES = 24  # of an evaluation
_ROWS = 16  # of a batch in an evaluation, and of a micro-batch
_ACCUM = 4
_WARM_UPS = 8  # steps whose values the host compares, and some later ones
_STEPS = 4  # that are recorded
_BUFFERS = {
    "no buffer": "",
    "a buffer that calls read": "read",
    "a buffer that calls write": "write",
}


class Network(pl.LightningModule):  # type: ignore[misc]
    """Layers of equal sizes.

    Args:
        buffer: what a call does with a registered buffer: "read", "write" or nothing.
        logs: whether each call logs its loss.
    """

    def __init__(self, buffer: str = "", logs: bool = True) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(_LAYERS):
            layers += [nn.Linear(_FEATURES, _FEATURES), nn.Tanh()]
        self.layers = nn.Sequential(*layers)
        self.buffer = buffer
        self.logs = logs
        if buffer:
            self.register_buffer("centre", torch.zeros(_FEATURES))

    def loss_of(self, batch: Any) -> torch.Tensor:
        """The loss of some rows."""
        (rows,) = batch
        output = self.layers(rows)
        if self.buffer:
            output = output - self.centre
        if self.buffer == "write":
            self.centre.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
        loss = output.square().mean()
        if self.logs:
            self.log("loss", loss)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """The loss of some rows."""
        return self.loss_of(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """The loss of a batch."""
        return self.loss_of(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Any."""
        return torch.optim.SGD(self.parameters(), 0.01)


class Recorded(pl.Callback):  # type: ignore[misc]
    """Records the last steps of a training."""

    def on_train_batch_start(self, trainer: Any, module: Any, _: Any, i: int) -> None:
        """Begin after the steps in which the host compares values."""
        if i == _WARM_UPS:
            card.trace(True)

    def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
        """End with the last step."""
        if rest[-1] == _WARM_UPS + _STEPS - 1:
            card.trace(False)


def trainer_on(cards: int, **options: Any) -> pl.Trainer:
    """A Trainer on so many GPUs."""
    strategy = ScatterOnceStrategy([*range(cards)], _ACCUM, verify=False)
    return pl.Trainer(
        accelerator="gpu",
        devices=1,
        strategy=strategy,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        **options,
    )


def loader(batches: int, rows: int) -> Any:
    """So many batches."""
    return DataLoader(TensorDataset(torch.randn(batches * rows, _FEATURES)), rows)


def seconds_of(records: Sequence[Any]) -> float:
    """How long the recorded work takes."""
    return Simulation(Trace.of(records), _DURATIONS, _COSTS).end


def evaluation(cards: int, *, logs: bool) -> float:
    """Seconds of a second evaluation."""
    trainer = trainer_on(cards)
    module = Network(logs=logs)
    data = loader(_BATCHES, _ROWS)
    trainer.validate(module, data, verbose=False)
    card.reset()
    card.trace(True)
    trainer.validate(module, data, verbose=False)
    card.trace(False)
    return seconds_of(card.records())


def training(cards: int, *, buffer: str) -> float:
    """Seconds per micro-batch in later steps of a training."""
    trainer = trainer_on(cards, max_epochs=1, callbacks=[Recorded()])
    card.reset()
    data = loader(_WARM_UPS + _STEPS, cards * _ACCUM * _ROWS)
    trainer.fit(Network(buffer), data)
    return seconds_of(card.records()) / (_STEPS * cards * _ACCUM)


def main(arguments: list[str]) -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cards", nargs="+", type=int, default=[2, 4])
    options = parser.parse_args(arguments)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings(action="ignore"):
        values.install()
        record_hand_overs()
        columns = "".join(f" {cards} |" for cards in options.cards)
        ruler = "---:|" * len(options.cards)
        print(f"| evaluation of 24 batches, in times of one GPU |{columns}")
        print(f"|---|{ruler}", flush=True)
        for words, logs in (("`self.log`", True), ("nothing logged", False)):
            alone = evaluation(1, logs=logs)
            cells = [
                f"{evaluation(cards, logs=logs) / alone:.3f}" for cards in options.cards
            ]
            print(f"| {words} | {' | '.join(cells)} |", flush=True)
        print(f"\n| training in turns, in times of one GPU's speed |{columns}")
        print(f"|---|{ruler}", flush=True)
        for words, buffer in _BUFFERS.items():
            alone = training(1, buffer=buffer)
            cells = [
                f"{alone / training(cards, buffer=buffer):.2f}"
                for cards in options.cards
            ]
            print(f"| {words} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
