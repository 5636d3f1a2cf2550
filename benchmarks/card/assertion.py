"""A kernel's assertion on the card: an index out of range, in a step of the engine.

The error has to reach the caller, and the process has to end by itself: the card's context is lost,
and nothing that the engine tidies up may hang.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

from scatterpar import ScatterOnceParallel


def main() -> int:
    """0 where the step raises, 1 where it does not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", type=torch.device, required=True)
    device = parser.parse_args().device
    if device.type != "cuda":
        print(f"assertions are CUDA's, and {device} is not")
        return 0
    model = nn.Sequential(nn.Embedding(8, 16), nn.Flatten(), nn.Linear(16 * 4, 4)).to(device)
    words, targets = torch.arange(64).view(16, 4) % 8, torch.arange(16) % 4
    engine = ScatterOnceParallel(model, 4, [device, device], verify=False)
    engine.forward_backward(words, targets, nn.CrossEntropyLoss())
    words[-1, -1] = 10**6
    start = time.monotonic()
    try:
        engine.forward_backward(words, targets, nn.CrossEntropyLoss())
        print("no error came")
        return 1
    except Exception as error:
        seconds = time.monotonic() - start
        print(f"after {seconds:.2f} s: {type(error).__name__}: {str(error).splitlines()[0]}")
        print(*getattr(error, "__notes__", []), sep="\n")
        return 0


if __name__ == "__main__":
    raise SystemExit(main())
