"""Time and memory of a look, and the time of a later step, with and without ``verify``.

    python -m benchmarks.verify_cost language verify        (or: cnn; no)

Prints a line of JSON: seconds of the first step, the median of later ones, and the most
memory. A process for each of them, so that the peak of its memory is its own.
"""

import json
import resource
import statistics
import sys

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.timing import timed
from scatterpar import ScatterOnceParallel, count_labels

WORDS = 50_000
LENGTH = 64
ACCUM = 2
STEPS = 5


def language_model():
    """A head over 50,000 words: logits are what takes memory. A third is padded."""
    ids = torch.randint(WORDS, (8 * ACCUM, LENGTH))
    ids[::3, LENGTH // 2 :] = -100
    head = nn.Linear(64, WORDS)
    model = nn.Sequential(nn.Embedding(WORDS, 64), nn.Linear(64, 64), nn.GELU(), head)
    return model.bfloat16(), ids.clamp(min=0), ids, {"count": count_labels()}


def cnn():
    """A small network for images, with batch normalisation."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    images = torch.randn(64 * ACCUM, 3, 32, 32)
    labels = torch.randint(10, (64 * ACCUM,))
    return model, images, labels, {}


def criterion(logits, labels):
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def main(name, verify):
    """Print seconds and memory of one kind."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    build = {"cnn": cnn, "language": language_model}[name]
    model, inputs, targets, options = build()
    seconds = []
    with ScatterOnceParallel(model, ACCUM, ["cpu"], verify=False) as engine:

        def step():
            engine.forward_backward(inputs, targets, criterion, **options)

        # To warm up, without a look: few rows.
        engine.forward_backward(inputs[:ACCUM], targets[:ACCUM], criterion, **options)
        engine.verify = verify == "verify"
        for _ in range(STEPS):
            seconds.append(timed(step))
    first, *later = seconds
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = {
        "first": first,
        "later": statistics.median(later),
        "peak_MB": round(kilobytes / 1024),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
