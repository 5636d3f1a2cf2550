"""Time and memory of a look, and the time of a later step, with and without ``verify``.

One process for each of them, so that the peak of its memory is its own. Prints one line
of JSON.
"""

import json
import resource
import statistics
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

from scatterpar import ScatterOnceParallel, count_labels

WORDS, LENGTH, MICRO, ACCUM, STEPS = 50_000, 64, 8, 2, 5


def language_model():
    ids = torch.randint(WORDS, (MICRO * ACCUM, LENGTH))
    ids[::3, LENGTH // 2 :] = -100
    model = nn.Sequential(
        nn.Embedding(WORDS, 64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, WORDS)
    )

    def criterion(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    return model.bfloat16(), ids.clamp(min=0), ids, criterion, {"count": count_labels()}


def cnn():
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
    rows = 64 * ACCUM
    criterion = lambda output, labels: F.cross_entropy(output, labels)  # noqa: E731
    return (
        model,
        torch.randn(rows, 3, 32, 32),
        torch.randint(10, (rows,)),
        criterion,
        {},
    )


def main(name, verify):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, inputs, targets, criterion, options = {
        "cnn": cnn,
        "language": language_model,
    }[name]()
    with ScatterOnceParallel(
        model, ACCUM, ["cpu"], verify=verify == "verify"
    ) as engine:
        engine.verify, wanted = False, engine.verify
        # to warm up
        engine.forward_backward(inputs[:ACCUM], targets[:ACCUM], criterion, **options)
        engine.verify = wanted
        seconds = []
        for _ in range(STEPS):
            start = time.perf_counter()
            engine.forward_backward(inputs, targets, criterion, **options)
            seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    first, *later = seconds
    print(
        json.dumps(
            {"first": first, "later": statistics.median(later), "peak_MB": round(peak)}
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
