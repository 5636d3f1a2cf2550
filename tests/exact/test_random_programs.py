"""Random programs, right and wrong ones, and whether the engine tells them apart.

Nobody decides by hand what is right. A program is right if the engine without its check gives the
gradient of a plain backward over the whole batch, in float64 and without noise, to 1e-8. It is
wrong if that is off by more than 1 % in each of six batches. What lies between is not counted.
"""

import random
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from harness.oracle import whole_batch
from torch import nn
from torch.nn import functional as F

from scatterpar import ScatterOnceParallel

CLASSES, FEATURES = 6, 5
WRONG, RIGHT = 1e-2, 1e-8


def average(each, weight):
    return (each * weight).sum() / weight.sum().clamp(min=1e-9)


def contrastive(output, wanted):
    logits = F.normalize(output, dim=1) @ F.normalize(wanted, dim=1).T * 3
    return F.cross_entropy(logits, torch.arange(len(output)))


def entropy(program, output, targets, **options):
    return F.cross_entropy(output, targets["labels"], **options)


def squares(output, targets):
    return (output - targets["values"].to(output).nan_to_num()).square()


def without_nan(program, output, targets):
    holed = targets["values"].to(output)
    return (output - holed)[~holed.isnan()].square().mean()


LOSSES = {
    "mean": entropy,
    "ignored": entropy,
    "sum": partial(entropy, reduction="sum"),
    "sum over constant": lambda p, o, t: entropy(p, o, t, reduction="sum") / 64,
    "smoothed": partial(entropy, label_smoothing=0.1),
    "class weights": lambda p, o, t: entropy(p, o, t, weight=p.weights.to(o)),
    "sample weights": lambda p, o, t: average(entropy(p, o, t, reduction="none"), t["weights"]),
    "root": lambda p, o, t: entropy(p, o, t).sqrt(),
    "penalty": lambda p, o, t: entropy(p, o, t) + p.scale * o.mean().square(),
    "squares": lambda p, o, t: squares(o, t).mean(),
    "masked": lambda p, o, t: average(squares(o, t).mean(1), t["mask"]),
    "masked, by row": lambda p, o, t: (squares(o, t).mean(1) * t["mask"]).mean(),
    "NaN left out": without_nan,
    "std": lambda p, o, t: squares(o, t).mean() + o.std(),
    "contrastive": lambda p, o, t: contrastive(o, t["values"].to(o).nan_to_num()),
}
COUNTED = {
    "ignored": lambda p, t: (t["labels"] >= 0).sum(),
    "class weights": lambda p, t: (
        p.weights[t["labels"].clamp(min=0)].where(t["labels"] >= 0, 0).sum()
    ),
    "sample weights": lambda p, t: t["weights"].sum(),
    "masked": lambda p, t: t["mask"].sum(),
}


def draw(seed):
    """One random program: a loss, what is passed for it, and its surroundings."""
    pick = random.Random(seed)
    program = SimpleNamespace(seed=seed, loss=pick.choice(list(LOSSES)))
    program.passed = pick.choice(["nothing", "nothing", "nothing", "sum", "wrong count"])
    if pick.random() < 0.5:
        program.passed = {"sum": "sum"}.get(program.loss, program.passed)
        program.passed = "count" if program.loss in COUNTED else program.passed
    program.layers = pick.sample(["dropout", "batch norm", "layer norm"], pick.randint(0, 2))
    program.rows = pick.choice([6, 8, 13, 24, 24, 48, 97, 200])
    program.replicas, program.accum = pick.choice([1, 2, 3]), pick.choice([2, 3, 4])
    program.left_out = pick.choice([0.0, 0.1, 0.2, 0.2, 0.6])
    program.scale = pick.choice([0.1, 1.0, 7.0])
    program.weights = torch.rand(CLASSES, generator=torch.Generator().manual_seed(seed)) + 0.05
    return program


def batch_of(program, seed, dtype):
    generator = torch.Generator().manual_seed(program.seed * 1000 + seed)
    rows = program.rows
    inputs = torch.randn(rows, FEATURES, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(CLASSES, (rows,), generator=generator)
    values = torch.randn(rows, CLASSES, generator=generator)
    left_out = torch.rand(rows, generator=generator) < program.left_out
    labels[left_out & (program.loss == "ignored")] = -100
    values[:, 0].masked_fill_(left_out & (program.loss == "NaN left out"), float("nan"))
    weights = torch.rand(rows, generator=generator) + 0.1
    return inputs, {"labels": labels, "values": values, "mask": ~left_out, "weights": weights}


def parts_of(program, dtype):
    """The module, the criterion and the options of its call."""
    torch.manual_seed(program.seed)
    model = nn.Sequential(
        nn.Linear(FEATURES, 8),
        nn.BatchNorm1d(8) if "batch norm" in program.layers else nn.Identity(),
        nn.LayerNorm(8) if "layer norm" in program.layers else nn.Identity(),
        nn.Tanh(),
        nn.Dropout(0.3 * ("dropout" in program.layers)),
        nn.Linear(8, CLASSES),
    )
    counts = {
        "count": lambda _, targets: COUNTED[program.loss](program, targets),
        "wrong count": lambda _, targets: (targets["labels"] % 3 == 1).sum() + 1,
    }
    options = {"reduction": "sum"} if program.passed == "sum" else {}
    if program.passed in counts:
        options["count"] = counts[program.passed]
    return model.to(dtype), partial(LOSSES[program.loss], program), options


def off_by(program, seed):
    """How far the engine without its check is from a plain backward: in float64, without noise."""
    model, criterion, options = parts_of(program, torch.float64)
    batch = batch_of(program, seed, torch.float64)
    _, expected = whole_batch(model.eval(), *batch, criterion)
    ids = ["cpu"] * program.replicas
    with ScatterOnceParallel(model, program.accum, ids, verify=False) as engine:
        engine.forward_backward(*batch, criterion, **options)
    ours, plain = (
        torch.cat([gradient.flatten() for gradient in found])
        for found in ([p.grad for p in model.parameters()], expected.values())
    )
    return float((ours - plain).norm() / max(float(plain.norm()), 1e-12))


def told(program, steps=8):
    """``refused``, ``warned``, ``not checked`` or nothing."""
    model, criterion, options = parts_of(program, torch.float32)
    ids = [f"cpu:{k % 2}" for k in range(program.replicas)]
    with (
        ScatterOnceParallel(model, program.accum, ids) as engine,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        try:
            for number in range(1, steps + 1):
                batch = batch_of(program, number, torch.float32)
                engine.forward_backward(*batch, criterion, **options)
        except ValueError as error:
            if "verify=False" not in str(error):
                raise
            return "refused"
    texts = [str(each.message) for each in caught]
    if any("verify=False" in text and "not be checked" not in text for text in texts):
        return "warned"
    return "not checked" if any("not be checked" in text for text in texts) else ""


def judge(seed):
    """What one program is and what was told of it; ``None`` if it is neither right nor wrong."""
    program = draw(seed)
    try:
        off = [off_by(program, number) for number in range(1, 7)]
        is_right, is_wrong = all(o < RIGHT for o in off), all(o > WRONG for o in off)
        if not (is_right or is_wrong):  # NaN is neither
            return None
        return vars(program) | {"right": is_right, "off": off[0], "said": told(program)}
    except Exception:  # such as a loss or a normalisation of no rows, or of one
        return None


@pytest.mark.draws
@pytest.mark.usefixtures("one_thread_an_operation")
@pytest.mark.parametrize("seeds", [12, pytest.param(240, marks=pytest.mark.slow)])
def test_wrong_programs_are_told_and_right_ones_are_not(seeds):
    found = [one for one in map(judge, range(seeds)) if one]
    assert len(found) > seeds // 2
    assert not [each for each in found if each["right"] and each["said"] in ("refused", "warned")]
    assert not [each for each in found if not (each["right"] or each["said"])]
