"""Train a small GPT on lines of different lengths, on all devices of the machine.

The loop is written after https://github.com/karpathy/minGPT (``mingpt/trainer.py``): a
model that returns ``(logits, loss)``, clipped gradients, AdamW. The loss is a mean over
the targets that are not -1. Lines have different numbers of them; ``count`` gives the
engine their number. ``train`` has the lines of the original and those of the engine.
The text is this project's documentation.

    python examples/char_gpt.py                       # every accelerator, or the CPU
    python examples/char_gpt.py --devices cpu cpu     # two replicas on the CPU
    python examples/char_gpt.py --stock               # one device, plain torch

With ``--double --dropout 0`` all three print the same losses.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, RandomSampler

from scatterpar import ScatterOnceParallel

IGNORED = -1
TEXTS = Path(__file__).parent.parent / "docs"


class GPT(nn.Module):
    """Maps characters of shape (rows, length) to logits and, with
    targets, their loss.
    """

    def __init__(
        self,
        characters: int,
        longest: int,
        size: int,
        layers: int = 2,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, size)
        self.positions = nn.Embedding(longest, size)
        layer = nn.TransformerEncoderLayer(
            size, 4, 4 * size, dropout, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(size)
        self.head = nn.Linear(size, characters, bias=False)

    def forward(
        self, ids: Tensor, targets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits, (rows, length, characters), and the mean over the targets that are
        not -1.
        """
        length = ids.size(1)
        positions = torch.arange(length, device=ids.device)
        x = self.characters(ids) + self.positions(positions)
        mask = nn.Transformer.generate_square_subsequent_mask(
            length, ids.device, x.dtype
        )
        logits = self.head(self.norm(self.blocks(x, mask, is_causal=True)))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED
            )
        return logits, loss


def train(
    model: GPT,
    engine: ScatterOnceParallel | None,
    loader: Iterable[tuple[Tensor, Tensor]],
    optimizer: torch.optim.Optimizer,
    clip: float = 1.0,
) -> Iterator[float]:
    """Train on one pass over the loader. Yields the losses. ``engine=None``: in plain
    torch.
    """
    model.train()
    device = next(model.parameters()).device
    for x, y in loader:
        model.zero_grad(set_to_none=True)
        if engine is None:  # plain torch
            _, loss = model(x.to(device), y.to(device))
            loss.backward()
        else:  # on all devices
            loss = engine.forward_backward(
                (x, y),
                criterion=lambda output, _: output[1],
                count=lambda inputs, _: (inputs[1] != IGNORED).sum(),
            )
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        yield loss.item()


def lines(longest: int) -> tuple[int, list[Tensor]]:
    """The number of characters, and the lines of the text, cut to ``longest``, as
    numbers.
    """
    pages = [page.read_text(encoding="utf-8") for page in sorted(TEXTS.glob("*.md"))]
    text = [
        line[: longest + 1]
        for page in pages
        for line in page.split("\n")
        if len(line) > 1
    ]
    number = {character: i for i, character in enumerate(sorted(set("".join(text))))}
    return len(number), [torch.tensor([number[c] for c in line]) for line in text]


def collate(batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Characters, padded with 0, and the characters that follow them,
    padded with -1.
    """
    x = pad_sequence([line[:-1] for line in batch], batch_first=True)
    y = pad_sequence(
        [line[1:] for line in batch], batch_first=True, padding_value=IGNORED
    )
    return x, y


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and print the losses."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=64, help="lines in a batch")
    parser.add_argument(
        "--longest", type=int, default=100, help="most characters of a line"
    )
    parser.add_argument("--size", type=int, default=64, help="of the hidden states")
    parser.add_argument(
        "--accum", type=int, default=1, help="sub-steps of each replica"
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--devices", nargs="+", help="such as cuda:0 cuda:1")
    parser.add_argument("--stock", action="store_true", help="one device, plain torch")
    parser.add_argument("--double", action="store_true", help="compute in float64")
    args = parser.parse_args(arguments)

    torch.manual_seed(1)
    default = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    device = args.devices[0] if args.devices else default
    dtype = torch.float64 if args.double else torch.float32
    characters, text = lines(args.longest)
    model = GPT(characters, args.longest, args.size, dropout=args.dropout).to(
        device, dtype
    )
    engine = (
        None if args.stock else ScatterOnceParallel(model, args.accum, args.devices)
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), 3e-4, betas=(0.9, 0.95), weight_decay=0.1
    )
    order = torch.Generator().manual_seed(1)
    sampler = RandomSampler(text, True, args.steps * args.rows, generator=order)
    loader = DataLoader(text, args.rows, sampler=sampler, collate_fn=collate)
    for step, loss in enumerate(
        islice(train(model, engine, loader, optimizer), args.steps)
    ):
        if step % 10 == 0:
            print(f"step {step}: loss {loss:.12f}")


if __name__ == "__main__":
    main()
