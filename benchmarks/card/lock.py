"""What the interpreter's lock costs: how long a forward pass may hold it, beside the computation.

``python -m benchmarks.card.lock`` prints the table of ``docs/on-your-cards.md``; it needs no card.
Forward passes of N replicas are launched in turn, so a round of sub-steps takes N times the Python
of one at least. Measured is the CPU time of the thread in one forward pass and its loss, of modules
so narrow that they compute next to nothing: an upper bound, since operators run without the lock.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.card.page import table
from benchmarks.interpreter.modules import SUBJECTS

CARDS = (1, 2, 4, 8)
_ROUNDS, _FEW, _WARM = 50, 5, 3


@dataclass(frozen=True)
class SubStep:
    """What somebody measured on one card.

    Attributes:
        module: which of the measured ones does the same.
        work: of a sub-step.
        milliseconds: that it takes, forward and backward.
    """

    module: str
    work: str
    milliseconds: float


# ResNet-50: 2470 images a second, mixed precision, one A100:
#   https://github.com/NVIDIA/DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5
# GPT-2: 562 ms for 5 x 12 texts of 1,024 tokens on each of 8 A100, compiled, by the logs in
#   https://github.com/karpathy/nanoGPT/issues/110 (defaults of that time: issue 179)
_IMAGE, _TEXT = 1000 / 2470, 562 / 60


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="for the figures, as JSON")
    parser.add_argument("--page", type=Path, help="a page with markers that gets the table")
    parser.add_argument("--quick", action="store_true", help="a few passes alone")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = {name: held(make, _FEW if given.quick else _ROUNDS) for name, make in MODULES.items()}
    text = "\n".join(f"- {name}: {1e3 * seconds:.1f} ms" for name, seconds in found.items())
    found = {name: round(seconds, 4) for name, seconds in found.items()}  # as it is shown
    text += f"\n\n{launching(found)}"
    print(text)
    if given.page is not None:
        given.page.write_text(_between_markers(given.page.read_text(), text))
    if given.out is not None:
        given.out.write_text(json.dumps({"held": found}, indent=1) + "\n")


def held(make: Callable[[], Callable[[], Tensor]], rounds: int) -> float:
    """Seconds of this thread's CPU time in one forward pass and its loss: the least of some.

    Whatever else a machine does only adds to it.
    """
    torch.manual_seed(0)
    forward, found = make(), []
    for _ in range(_WARM + rounds):
        start = time.thread_time()
        loss = forward()
        found.append(time.thread_time() - start)
        loss.backward()
    return min(found[_WARM:])


def launching(found: Mapping[str, float]) -> str:
    """A table: what N cards wait for one launcher, beside what each of them computes."""
    rows = []
    for sub_step in PUBLISHED:
        if sub_step.module not in found:
            continue
        line = [f"{sub_step.module}, {sub_step.work}", f"{sub_step.milliseconds:.0f}"]
        for cards in CARDS:
            launch = cards * 1e3 * found[sub_step.module]
            times = launch / sub_step.milliseconds
            line.append(f"{launch:.1f}" + (f" (**{times:.1f} x**)" if times >= 1.05 else ""))
        rows.append(line)
    return table(["a sub-step", "compute", "1 card", *(str(n) for n in CARDS[1:])], rows)


def _between_markers(page: str, text: str) -> str:
    before, start, rest = page.partition("<!-- lock -->\n")
    _, end, after = rest.partition("<!-- /lock -->\n")
    if not end:
        raise SystemExit("the page has no markers <!-- lock --> and <!-- /lock -->")
    return f"{before}{start}{text}\n{end}{after}"


def _interpreters(name: str) -> Callable[[], Tensor]:
    subject, criterion = SUBJECTS[name], nn.CrossEntropyLoss()
    module, (inputs, targets) = subject.build(), subject.make(2)
    return lambda: criterion(module(inputs), targets)


def _transformers() -> Callable[[], Tensor]:
    from transformers import GPT2Config, GPT2LMHeadModel

    narrow = {"vocab_size": 32, "n_positions": 8, "n_embd": 16, "n_head": 2}  # twelve layers
    module, text = GPT2LMHeadModel(GPT2Config(**narrow)), torch.randint(32, (2, 8))
    return lambda: module(text, labels=text, use_cache=False).loss


_OF_TRANSFORMERS = "GPT-2 small of transformers"
MODULES: dict[str, Callable[[], Callable[[], Tensor]]] = {
    "ResNet-50": partial(_interpreters, "resnet"),
    "GPT-2 small, written plainly": partial(_interpreters, "gpt"),
}
if importlib.util.find_spec("transformers") is not None:
    MODULES[_OF_TRANSFORMERS] = _transformers
PUBLISHED = (
    *(SubStep("ResNet-50", f"{n} images", n * _IMAGE) for n in (32, 64, 128, 256)),
    *(
        SubStep(module, f"{n} x 1,024 tokens", n * _TEXT)
        for module in ("GPT-2 small, written plainly", _OF_TRANSFORMERS)
        for n in (1, 4, 12)
    ),
)

if __name__ == "__main__":
    main()
