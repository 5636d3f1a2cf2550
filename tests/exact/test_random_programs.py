"""Random programs, right and wrong ones, and whether the engine tells them apart.

Nobody decides by hand what is right. A program is right if the engine without its check
gives the gradient of a plain backward over the whole batch, in float64 and without
noise, to 1e-8. It is wrong if that is off by more than 1 % in each of six batches. What
lies between is not counted.
"""

import random
import warnings
from functools import partial

import pytest
import torch
from harness.oracle import gradients, seeded, whole_batch
from torch import nn
from torch.nn import functional as F

from scatterpar import ScatterOnceParallel

CLASSES, FEATURES = 6, 5
WRONG, RIGHT = 1e-2, 1e-8
CLASS_WEIGHTS = torch.arange(1.0, 1 + CLASSES)


def average(each, weight):
    return (each * weight).sum() / weight.sum().clamp(min=1e-9)


def contrastive(output, wanted):
    logits = F.normalize(output, dim=1) @ F.normalize(wanted, dim=1).T * 3
    return F.cross_entropy(logits, torch.arange(len(output)))


def entropy(output, targets, **options):
    return F.cross_entropy(output, targets["labels"], **options)


def squares(output, targets):
    return (output - targets["values"].to(output)).square()


LOSSES = {
    "mean": entropy,
    "sum": partial(entropy, reduction="sum"),
    "sum over constant": lambda o, t: entropy(o, t, reduction="sum") / 64,
    "class weights": lambda o, t: entropy(o, t, weight=CLASS_WEIGHTS.to(o)),
    "sample weights": lambda o, t: average(
        entropy(o, t, reduction="none"), t["weights"]
    ),
    "root": lambda o, t: entropy(o, t).sqrt(),
    "penalty": lambda o, t: entropy(o, t) + o.mean().square(),
    "squares": lambda o, t: squares(o, t).mean(),
    "masked": lambda o, t: average(squares(o, t).mean(1), t["mask"]),
    "masked, by row": lambda o, t: (squares(o, t).mean(1) * t["mask"]).mean(),
    "std": lambda o, t: squares(o, t).mean() + o.std(),
    "contrastive": lambda o, t: contrastive(o, t["values"].to(o)),
}
COUNTS = {
    "mean": lambda _, t: (t["labels"] >= 0).sum(),
    "class weights": lambda _, t: CLASS_WEIGHTS[t["labels"][t["labels"] >= 0]].sum(),
    "sample weights": lambda _, t: t["weights"].sum(),
    "masked": lambda _, t: t["mask"].sum(),
}


class Program:
    """A loss, what is passed for it, and its surroundings."""

    def __init__(self, seed):
        pick = random.Random(seed)
        name = pick.choice(list(LOSSES))
        wrong_count = {
            "count": lambda _, targets: (targets["labels"] % 3 == 1).sum() + 1
        }
        right = {"count": COUNTS[name]} if name in COUNTS else {}
        right |= {"reduction": "sum"} if name == "sum" else {}
        self.seed, self.criterion = seed, LOSSES[name]
        self.options = pick.choice(
            [*[right] * 4, {}, {}, {"reduction": "sum"}, wrong_count]
        )
        self.layer = pick.choice(
            [nn.BatchNorm1d, nn.LayerNorm, lambda _: nn.Dropout(0.3)]
        )
        self.rows = pick.choice([24, 25, 48, 97, 200])
        self.replicas, self.accum = pick.choice([1, 2, 3]), pick.choice([2, 3, 4])
        self.left_out = pick.choice([0.0, 0.0, 0.2, 0.6])

    def model(self, dtype):
        with seeded(self.seed):
            first, last = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)
        return nn.Sequential(first, self.layer(8), nn.Tanh(), last).to(dtype)

    def batch(self, number, dtype):
        with seeded(self.seed * 1000 + number):
            left_out = torch.rand(self.rows) < self.left_out
            labels = torch.randint(CLASSES, (self.rows,)).masked_fill(left_out, -100)
            values, weights = (
                torch.randn(self.rows, CLASSES),
                torch.rand(self.rows) + 0.1,
            )
            inputs = torch.randn(self.rows, FEATURES).to(dtype)
        return inputs, {
            "labels": labels,
            "values": values,
            "mask": ~left_out,
            "weights": weights,
        }

    def off_by(self, number):
        """How far the engine without its check is from a plain backward, in float64, in
        eval.
        """
        model, batch = (
            self.model(torch.float64).eval(),
            self.batch(number, torch.float64),
        )
        _, expected = whole_batch(model, *batch, self.criterion)
        with ScatterOnceParallel(
            model, self.accum, ["cpu"] * self.replicas, verify=False
        ) as engine:
            engine.forward_backward(*batch, self.criterion, **self.options)
        found = gradients(model)
        off = sum(
            (found[name] - gradient).square().sum()
            for name, gradient in expected.items()
        )
        size = sum(gradient.square().sum() for gradient in expected.values())
        return float((off / size.clamp(min=1e-24)).sqrt())

    def told(self, steps=8):
        """What a user hears of it, in training mode: a refusal,
        warnings, or nothing.
        """
        model, devices = (
            self.model(torch.float32),
            [f"cpu:{k % 2}" for k in range(self.replicas)],
        )
        with (
            ScatterOnceParallel(model, self.accum, devices) as engine,
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            try:
                for number in range(1, 1 + steps):
                    batch = self.batch(number, torch.float32)
                    engine.forward_backward(*batch, self.criterion, **self.options)
            except ValueError as error:
                if "verify=False" not in str(error):
                    raise
                return [str(error)]
        return [
            str(each.message) for each in caught if "verify=False" in str(each.message)
        ]


@pytest.mark.draws
@pytest.mark.usefixtures("one_thread_an_operation")
@pytest.mark.parametrize("seeds", [4, pytest.param(120, marks=pytest.mark.slow)])
def test_only_wrong_programs_are_told(seeds):
    right, wrong = {}, {}
    for program in map(Program, range(seeds)):
        off = [program.off_by(number) for number in range(1, 7)]
        if all(each < RIGHT for each in off):  # NaN is neither
            right[program.seed] = program.told()
        elif all(each > WRONG for each in off):
            wrong[program.seed] = program.told()
    assert min(len(right), len(wrong)) >= seeds // 6
    alarms = [
        text
        for texts in right.values()
        for text in texts
        if "could not check" not in text
    ]
    assert not alarms
    assert all(wrong.values()), wrong
