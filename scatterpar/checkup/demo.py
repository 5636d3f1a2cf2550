"""``python -m scatterpar demo``: one batch of a tiny language model, accumulated in
three ways.

The texts have different lengths, so micro-batches have different numbers of labels::

    your loop      mean of 16 losses, each a mean over its own labels    wrong, silently
    the engine     the same line: refused before anything changes        ValueError
    with count=    weighted by labels                                    equal

Each gradient is compared with one backward pass over the whole batch, in plain torch.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from scatterpar.engine import ScatterOnceParallel
from scatterpar.report import StepReport
from scatterpar.step.loss_weights import count_labels
from scatterpar.tables import as_text

VOCABULARY = 64  # of the vocabulary
TEXTS = 64  # rows of the batch
LENGTH = 48  # of the longest text
SUB_STEPS = 16  # micro-batches of the batch
WIDTH = 84  # columns of the page
PADDING = -100  # the label that cross_entropy ignores by default
DEVICES = ("cpu:0", "cpu:1")  # two memories, between which every copy is counted


class LanguageModel(nn.Module):
    """A recurrent network that predicts the next word of each position."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.GRU(32, 64, batch_first=True)
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, words: Tensor) -> Tensor:
        """Logits of shape ``(rows, positions, vocabulary)``."""
        states, _ = self.layers(self.embedding(words))
        logits: Tensor = self.head(states)
        return logits


@dataclass(frozen=True)
class DemoResults:
    """The demo's three results.

    Attributes:
        by_hand: relative error of the gradient of the hand-written loop.
        refusal: the text of the engine's ``ValueError``.
        counted: relative error of the engine's gradient with ``count=``.
        report: counts of the engine's step in training.
    """

    by_hand: float
    refusal: str
    counted: float
    report: StepReport


def criterion(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over the labels that are not padding, as nearly every script has it."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def make_batch() -> tuple[Tensor, Tensor]:
    """Draw words and labels of shape ``(TEXTS, LENGTH)``; most texts are short."""
    lengths = torch.randint(2, LENGTH // 4, (TEXTS,))
    long_texts = torch.randperm(TEXTS)[: TEXTS // 8]
    lengths[long_texts] = LENGTH
    words = torch.randint(VOCABULARY, (TEXTS, LENGTH))
    # Frequent words, or there would be nothing to learn.
    words = words * words // VOCABULARY
    labels = words.roll(-1, dims=1)
    positions = torch.arange(LENGTH)
    last_positions = lengths[:, None] - 1  # no word follows
    labels[positions >= last_positions] = PADDING
    return words, labels


def take_gradient(model: nn.Module) -> Tensor:
    """Take the gradient of all parameters, as one vector; none is left."""
    # Cleared, so that the next way to accumulate begins with nothing.
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    gradient = parameters_to_vector(gradients)
    model.zero_grad()
    return gradient


def relative_error(gradient: Tensor, reference: Tensor) -> float:
    """The distance of two vectors over the length of the reference."""
    distance = (gradient - reference).norm()
    return float(distance / reference.norm())


def compare_three_ways() -> DemoResults:
    """Compute the same batch's gradient in three ways."""
    # The page has the same numbers on every machine, up to rounding.
    torch.manual_seed(0)
    model = LanguageModel()
    words, labels = make_batch()

    criterion(model(words), labels).backward()
    reference = take_gradient(model)

    micro_batches = zip(words.chunk(SUB_STEPS), labels.chunk(SUB_STEPS), strict=True)
    for few_words, few_labels in micro_batches:
        loss = criterion(model(few_words), few_labels) / SUB_STEPS
        loss.backward()
    by_hand = relative_error(take_gradient(model), reference)

    accum = SUB_STEPS // len(DEVICES)
    with ScatterOnceParallel(model, accum=accum, device_ids=DEVICES) as engine:
        # As users write it first: the engine says what is missing.
        refusal = ""
        try:
            engine.forward_backward(words, labels, criterion)
        except ValueError as error:
            refusal = str(error)
        engine.forward_backward(words, labels, criterion, count=count_labels())
        counted = relative_error(take_gradient(model), reference)

        # Parameters that did not change are not sent again: a step of training first.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine.forward_backward(words, labels, criterion, count=count_labels())
        optimizer.step()
        engine.forward_backward(words, labels, criterion, count=count_labels())
        report = engine.last_step
    assert report is not None
    return DemoResults(by_hand, refusal, counted, report)


def as_page(findings: DemoResults) -> str:
    """The findings as text for a terminal."""
    indent = "    "
    lines: list[str] = []
    for line in findings.refusal.splitlines():
        filled = textwrap.fill(
            line, WIDTH, initial_indent=indent, subsequent_indent=indent
        )
        lines.append(filled)
    refusal = "\n".join(lines)
    table = _table_of_copies(findings.report.bytes)
    return f"""\
{TEXTS} texts of 2 to {LENGTH} words, in {SUB_STEPS} micro-batches. Each gradient is
compared with the gradient of one backward pass over all texts.

1. Accumulated by hand: (criterion(model(x), y) / {SUB_STEPS}).backward()
{indent}no error and no warning; the gradient is off by {findings.by_hand:.0%}

2. engine.forward_backward(words, labels, criterion)
{indent}raises an error: before the step, the engine computes a few rows in one piece
{indent}and in parts. It takes the rows whose labels differ most in number, so the
{indent}error is larger than in 1.

{refusal}

3. engine.forward_backward(words, labels, criterion, count=count_labels())
{indent}the gradient of all texts, up to rounding: it differs by {findings.counted:.0e}

{table}
({SUB_STEPS} calls of nn.DataParallel copy model and gradients {SUB_STEPS} times.)"""


def _table_of_copies(copied: Mapping[str, int]) -> str:
    """The bytes that a step copies, and those of a copy in every sub-step."""
    table = [
        ("bytes copied in one step on two devices", "scatterpar", "nn.DataParallel")
    ]
    lines = (
        ("rows of the batch", "scatter", 1),
        ("the model, to the other device", "replicate", SUB_STEPS),
        ("its gradients, back", "reduce", SUB_STEPS),
    )
    for name, phase, times in lines:
        once = copied[phase]
        table.append((name, f"{once:,}", f"{times * once:,}"))
    return as_text(table)


def main(options: Sequence[str]) -> int:
    """Print the demo; returns the exit code, 1 if a result is not as promised."""
    parser = argparse.ArgumentParser(
        prog="python -m scatterpar demo",
        description="Accumulate one batch by hand and with the engine, and compare.",
    )
    parser.parse_args(options)
    findings = compare_three_ways()
    print(as_page(findings))
    is_as_promised = bool(findings.refusal) and findings.counted < 1e-5
    return 0 if is_as_promised else 1
