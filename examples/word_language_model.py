"""A recurrent language model that keeps hidden states from batch to batch, on all
devices.

The loop and the network are written after
https://github.com/pytorch/examples/tree/main/word_language_model. Rows are along
dimension 1, in hidden states, too. Each part of a text begins with the final hidden
states of the previous part (truncated backpropagation through time). ``train`` has the
lines of the original and those of the engine. The text is this project's documentation.

    python examples/word_language_model.py                       # every accelerator, or the CPU
    python examples/word_language_model.py --devices cpu cpu     # two replicas on the CPU
    python examples/word_language_model.py --stock               # one device, plain torch

With ``--double --dropout 0`` all three print the same losses.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scatterpar import ScatterOnceParallel, gather

Hidden = tuple[Tensor, ...]
TEXTS = Path(__file__).parent.parent / "docs"


class RNNModel(nn.Module):
    """Maps words, (time, rows), to log-probabilities of the next word, and a hidden
    state.
    """

    def __init__(
        self, words: int, size: int, layers: int = 2, dropout: float = 0.2
    ) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(words, size)
        self.rnn = nn.LSTM(size, size, layers, dropout=dropout)
        self.decoder = nn.Linear(size, words)
        for weight in (self.encoder.weight, self.decoder.weight):
            nn.init.uniform_(weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, words: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
        """Returns log-probabilities of shape (time * rows, words), and the hidden
        state.
        """
        output, hidden = self.rnn(self.drop(self.encoder(words)), hidden)
        decoded = self.decoder(self.drop(output))
        return F.log_softmax(decoded.flatten(0, 1), dim=1), hidden

    def start(self, rows: int) -> Hidden:
        """The hidden states before the first word."""
        zeros = self.decoder.weight.new_zeros(
            self.rnn.num_layers, rows, self.rnn.hidden_size
        )
        return zeros, zeros


def parts(text: Tensor, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Words and the words that follow them, (length, rows) each; the last ones are
    shorter.
    """
    for start in range(0, len(text) - 1, length):
        stop = min(start + length, len(text) - 1)
        yield text[start:stop], text[start + 1 : stop + 1]


def train(
    model: RNNModel,
    engine: ScatterOnceParallel | None,
    text: Tensor,
    length: int,
    lr: float,
    clip: float = 0.25,
) -> Iterator[float]:
    """Train on one pass over the text, (time, rows). Yields the losses.

    ``engine=None``: in plain torch, on one device.
    """
    model.train()
    device = next(model.parameters()).device
    hidden = model.start(text.size(1))
    for words, following in parts(text, length):
        hidden = tuple(state.detach() for state in hidden)
        model.zero_grad()
        if engine is None:  # plain torch
            output, hidden = model(words.to(device), hidden)
            loss = F.nll_loss(output, following.flatten().to(device))
            loss.backward()
        else:  # on all devices
            loss, states = engine.forward_backward(
                (words, hidden),
                following,
                criterion=lambda output, following: F.nll_loss(
                    output[0], following.flatten()
                ),
                return_outputs=lambda output: output[1],
            )
            hidden = gather(states, device, dim=1)
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        yield loss.item()


@torch.no_grad()
def evaluate(model: RNNModel, text: Tensor, length: int) -> float:
    """The mean loss over a text; on one device."""
    model.eval()
    device = next(model.parameters()).device
    hidden, total = model.start(text.size(1)), 0.0
    for words, following in parts(text, length):
        output, hidden = model(words.to(device), hidden)
        total += len(words) * F.nll_loss(output, following.flatten().to(device)).item()
    return total / (len(text) - 1)


def corpus(rows: int) -> tuple[int, Tensor, Tensor]:
    """The number of words, and two texts, (time, rows): to train on, and to validate
    on.
    """
    pages = [page.read_text(encoding="utf-8") for page in sorted(TEXTS.glob("*.md"))]
    words = re.findall(r"\w+|[^\w\s]", "\n".join(pages).lower())
    number = {word: i for i, word in enumerate(dict.fromkeys(words))}
    ids = torch.tensor([number[word] for word in words])
    cut = len(ids) * 9 // 10
    return len(number), columns(ids[:cut], rows), columns(ids[cut:], rows)


def columns(ids: Tensor, rows: int) -> Tensor:
    """One text, cut into ``rows`` texts of equal length: (time, rows)."""
    return ids[: len(ids) // rows * rows].view(rows, -1).t().contiguous()


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and print losses and perplexities."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=20, help="texts side by side")
    parser.add_argument(
        "--length", type=int, default=35, help="words that a gradient goes through"
    )
    parser.add_argument(
        "--size", type=int, default=200, help="of word vectors and states"
    )
    parser.add_argument(
        "--accum", type=int, default=1, help="sub-steps of each replica"
    )
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument(
        "--steps", type=int, default=None, help="most steps of an epoch"
    )
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--devices", nargs="+", help="such as cuda:0 cuda:1")
    parser.add_argument("--stock", action="store_true", help="one device, plain torch")
    parser.add_argument("--double", action="store_true", help="compute in float64")
    args = parser.parse_args(arguments)

    torch.manual_seed(1)
    default = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    device = args.devices[0] if args.devices else default
    dtype = torch.float64 if args.double else torch.float32
    words, text, held_out = corpus(args.rows)
    model = RNNModel(words, args.size, dropout=args.dropout).to(device, dtype)
    engine = None
    if not args.stock:
        engine = ScatterOnceParallel(model, args.accum, args.devices, dim=1)
    lr, best = 20.0, math.inf
    for epoch in range(args.epochs):
        losses = train(model, engine, text, args.length, lr)
        for step, loss in enumerate(islice(losses, args.steps)):
            if step % 5 == 0:
                print(f"epoch {epoch}, step {step}: loss {loss:.12f}")
        loss = evaluate(model, held_out, args.length)
        print(
            f"epoch {epoch}: perplexity {math.exp(loss):.3f} of texts that were held "
            "out"
        )
        best, lr = (loss, lr) if loss < best else (best, lr / 4)


if __name__ == "__main__":
    main()
