"""PyTorch's MNIST example on all devices of the machine.

The loop, the network and the schedule are written after
https://github.com/pytorch/examples/tree/main/mnist. ``train`` has the lines of the
original, and the one line of the engine. The data are the Fashion-MNIST images that the
package includes.

    python examples/mnist.py                       # every accelerator, or the CPU
    python examples/mnist.py --devices cpu cpu     # two replicas on the CPU
    python examples/mnist.py --stock               # one device, plain torch

With ``--double --dropout 0`` all three print the same losses; with dropout, replicas
draw different masks.
"""

from __future__ import annotations

import argparse
import gzip
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Subset, TensorDataset

from scatterpar import ScatterOnceParallel

Batches = Iterable[Sequence[Tensor]]


class Net(nn.Module):
    """Two convolutions and two linear layers, for images of 28 x 28."""

    def __init__(self, dropout: float = 0.25) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.head = nn.Sequential(
            nn.Dropout(dropout),
            nn.Flatten(),
            nn.Linear(9216, 128),
            nn.ReLU(),
            nn.Dropout(2 * dropout),
            nn.Linear(128, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Returns the logarithms of the classes' probabilities, (rows, 10)."""
        return F.log_softmax(self.head(self.features(images)), dim=1)


def train(
    model: nn.Module,
    engine: ScatterOnceParallel | None,
    loader: Batches,
    optimizer: torch.optim.Optimizer,
) -> Iterator[float]:
    """Train on one pass over the data. Yields the losses. ``engine=None``: in plain
    torch.
    """
    model.train()
    device = next(model.parameters()).device
    for images, labels in loader:
        optimizer.zero_grad()
        if engine is None:  # plain torch
            output = model(images.to(device))
            loss = F.nll_loss(output, labels.to(device))
            loss.backward()
        else:  # on all devices
            loss = engine.forward_backward(images, labels, F.nll_loss)
        optimizer.step()
        yield loss.item()


@torch.no_grad()
def accuracy(model: nn.Module, loader: Batches) -> float:
    """The part of the images that are classified correctly; on one device."""
    model.eval()
    device = next(model.parameters()).device
    hits = [
        model(images.to(device)).argmax(1).cpu().eq(labels) for images, labels in loader
    ]
    return torch.cat(hits).double().mean().item()


def content(name: str, header: int) -> Tensor:
    """The bytes of one of the included files, in MNIST's format, as integers."""
    file = files("scatterpar") / "embedded" / f"t10k-{name}"
    return torch.frombuffer(
        bytearray(gzip.decompress(file.read_bytes())[header:]), dtype=torch.uint8
    )


def loaders(rows: int, dtype: torch.dtype) -> tuple[Batches, Batches]:
    """Batches to train and to test on, in the same order in every run."""
    images = content("images-idx3-ubyte.gz", 16).view(-1, 1, 28, 28).to(dtype) / 255
    images = (images - images[:8192].mean()) / images[:8192].std()
    data = TensorDataset(images, content("labels-idx1-ubyte.gz", 8).long())
    parts = [Subset(data, range(8192)), Subset(data, range(8192, len(data)))]
    order = torch.Generator().manual_seed(1)
    return DataLoader(parts[0], rows, shuffle=True, generator=order), DataLoader(
        parts[1], 1000
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and print losses and accuracies."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=64, help="images in a batch")
    parser.add_argument(
        "--accum", type=int, default=1, help="sub-steps of each replica"
    )
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument(
        "--steps", type=int, default=None, help="most steps of an epoch"
    )
    parser.add_argument("--dropout", type=float, default=0.25)
    parser.add_argument("--devices", nargs="+", help="such as cuda:0 cuda:1")
    parser.add_argument("--stock", action="store_true", help="one device, plain torch")
    parser.add_argument("--double", action="store_true", help="compute in float64")
    args = parser.parse_args(arguments)

    torch.manual_seed(1)
    default = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    device = args.devices[0] if args.devices else default
    dtype = torch.float64 if args.double else torch.float32
    model = Net(args.dropout).to(device, dtype)
    engine = (
        None if args.stock else ScatterOnceParallel(model, args.accum, args.devices)
    )
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    batches, held_out = loaders(args.rows, dtype)
    for epoch in range(args.epochs):
        for step, loss in enumerate(
            islice(train(model, engine, batches, optimizer), args.steps)
        ):
            if step % 20 == 0:
                print(f"epoch {epoch}, step {step}: loss {loss:.12f}")
        print(f"epoch {epoch}: accuracy {accuracy(model, held_out):.4f}")
        scheduler.step()


if __name__ == "__main__":
    main()
