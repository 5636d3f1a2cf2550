"""Random training programs, right and wrong ones, and whether the engine tells them apart.

Nobody decides by hand what is right. A program is right if the engine without its check gives the
gradient of a plain backward over the whole batch, in float64 and without noise, to 1e-8. It is
wrong if that is off by more than 1 % in each of six batches. What lies between is not counted.
"""

import copy
import random
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from scatterpar import ScatterOnceParallel, count_labels

CLASSES, FEATURES, LENGTH, VOCABULARY = 6, 5, 7, 13
WRONG, RIGHT = 1e-2, 1e-8


def words(text):
    return text.split(", ")


LOSSES = {
    "classes": words(
        "mean, sum, ignored, class weights, sum over constant, smoothed, sample weights, "
        "hard examples, std, root, penalty"
    ),
    "tokens": words("mean, sum, ignored, class weights, per row, shifted, root, penalty"),
    "values": words(
        "mean, sum, masked, sample weights, NaN left out, std, root, contrastive, quantile, "
        "penalty, per row masked"
    ),
}
COUNTED = words("ignored, class weights, sample weights, masked, shifted")


def draw(seed):
    """One random program: a task, a loss, what is passed for it, and its surroundings."""
    pick = random.Random(seed)
    program = SimpleNamespace(seed=seed, task=pick.choice(list(LOSSES)))
    program.loss = pick.choice(LOSSES[program.task])
    program.passed = pick.choice(words("nothing, nothing, nothing, sum, count, wrong count"))
    if program.loss == "sum" and pick.random() < 0.6:
        program.passed = "sum"
    if program.loss in COUNTED and pick.random() < 0.5:
        program.passed = "count"
    program.owns_loss = pick.random() < 0.25
    program.layers = pick.sample(words("dropout, batch norm, layer norm"), pick.randint(0, 2))
    program.rows = pick.choice([6, 8, 13, 24, 24, 48, 97, 200])
    program.replicas, program.accum = pick.choice([1, 2, 3]), pick.choice([2, 3, 4])
    program.left_out = pick.choice([0.0, 0.1, 0.2, 0.2, 0.6])
    program.scale = pick.choice([0.1, 1.0, 7.0])
    program.weights = torch.rand(CLASSES, generator=torch.Generator().manual_seed(seed)) + 0.05
    return program


class Net(nn.Module):
    """Rows or tokens to ``CLASSES`` numbers; perhaps with the loss inside."""

    def __init__(self, program, loss=None):
        super().__init__()
        tokens = program.task == "tokens"
        self.first = nn.Embedding(VOCABULARY, 8) if tokens else nn.Linear(FEATURES, 8)
        self.norm = nn.BatchNorm1d(8) if "batch norm" in program.layers else nn.Identity()
        self.flat = nn.LayerNorm(8) if "layer norm" in program.layers else nn.Identity()
        self.drop = nn.Dropout(0.3 * ("dropout" in program.layers))
        self.last = nn.Linear(8, CLASSES)
        self.loss = loss

    def forward(self, inputs, targets=None):
        hidden = self.first(inputs)
        hidden = self.norm(hidden.flatten(0, -2)).view(hidden.shape)
        output = self.last(self.drop(torch.tanh(self.flat(hidden))))
        return output if targets is None else self.loss(output, targets)


def average(each, weight):
    return (each * weight).sum() / weight.sum().clamp(min=1e-9)


def contrastive(output, wanted):
    logits = F.normalize(output, dim=1) @ F.normalize(wanted, dim=1).T * 3
    return F.cross_entropy(logits, torch.arange(len(output)))


def of_classes(program, output, targets):
    labels = targets["labels"]
    if program.task == "tokens":
        if program.loss == "shifted":
            output, labels = output[:, :-1], labels[:, 1:]
        output = output.transpose(1, 2)
    entropy = partial(F.cross_entropy, output, labels)
    each = partial(entropy, reduction="none")
    losses = {
        "sum": lambda: entropy(reduction="sum"),
        "sum over constant": lambda: entropy(reduction="sum") / 64,
        "class weights": lambda: entropy(weight=program.weights.to(output)),
        "smoothed": lambda: entropy(label_smoothing=0.1),
        "root": lambda: entropy().sqrt(),
        "penalty": lambda: entropy() + 0.1 * output.square().mean(),
        "sample weights": lambda: average(each(), targets["weights"]),
        "hard examples": lambda: average(each(), each().detach() > each().detach().mean()),
        "std": lambda: each().mean() + each().std(),
        "per row": lambda: (each().sum(1) / (labels != -100).sum(1).clamp(min=1)).mean(),
    }
    return losses.get(program.loss, entropy)()


def of_values(program, output, targets):
    holed, mask, weight = (targets[k].to(output.dtype) for k in ("values", "mask", "weights"))
    wanted = holed.nan_to_num()
    error = (output - wanted).square()
    each = error.mean(1)
    losses = {
        "sum": error.sum,
        "masked": lambda: (each * mask).sum() / mask.sum().clamp(min=1),
        "per row masked": lambda: (each * mask).mean(),
        "NaN left out": lambda: (output - holed)[~holed.isnan()].square().mean(),
        "sample weights": lambda: average(each, weight),
        "std": lambda: output.std(),
        "root": lambda: error.mean().sqrt(),
        "contrastive": lambda: contrastive(output, wanted),
        "quantile": lambda: each.float().quantile(0.7).to(error.dtype),
        "penalty": lambda: error.sum() + program.scale * output.mean().square(),
    }
    return losses.get(program.loss, error.mean)()


def count_of(program, inputs, targets):
    targets = targets if targets is not None else inputs[1]
    labels = targets["labels"]
    if program.passed == "wrong count":
        return (labels % 3 == 1).sum() + 1
    if program.loss in ("sample weights", "masked"):
        return targets["mask" if program.loss == "masked" else "weights"].sum()
    if program.loss == "class weights":
        return program.weights[labels.clamp(min=0)].where(labels >= 0, 0).sum()
    return count_labels(shifted=program.loss == "shifted")(None, labels)


def batch_of(program, seed, dtype):
    generator = torch.Generator().manual_seed(program.seed * 1000 + seed)
    n, tokens = program.rows, program.task == "tokens"
    shape = (n, LENGTH) if tokens else (n,)
    rows = torch.randn(n, FEATURES, generator=generator, dtype=torch.float64).to(dtype)
    inputs = torch.randint(VOCABULARY, shape, generator=generator) if tokens else rows
    labels = torch.randint(CLASSES, shape, generator=generator)
    values = torch.randn(n, CLASSES, generator=generator, dtype=torch.float64).to(dtype)
    left_out = torch.rand(n, generator=generator) < program.left_out
    if program.left_out and program.loss in ("ignored", "per row", "shifted"):
        lengths = torch.randint(2, LENGTH + 1, (n, 1), generator=generator)
        labels[torch.arange(LENGTH) >= lengths if tokens else left_out] = -100
    values[:, 0].masked_fill_(left_out & (program.loss == "NaN left out"), float("nan"))
    weights = torch.rand(shape, generator=generator) + 0.1
    return inputs, {"labels": labels, "values": values, "mask": ~left_out, "weights": weights}


def parts_of(program, dtype):
    """The module, the criterion and the options of its call."""
    loss = partial(of_values if program.task == "values" else of_classes, program)
    torch.manual_seed(program.seed)
    model = Net(program, loss if program.owns_loss else None).to(dtype)
    options = {"reduction": "sum"} if program.passed == "sum" else {}
    if "count" in program.passed:
        options["count"] = partial(count_of, program)
    return model, None if program.owns_loss else loss, options


def step(engine, criterion, batch, options):
    given = (batch,) if criterion is None else (*batch, criterion)
    return engine.forward_backward(*given, **options)


def off_by(program, seed):
    """How far the engine without its check is from a plain backward: in float64, without noise."""
    model, criterion, options = parts_of(program, torch.float64)
    twin, batch = copy.deepcopy(model.eval()), batch_of(program, seed, torch.float64)
    loss = twin(*batch) if criterion is None else criterion(twin(batch[0]), batch[1])
    loss.backward()
    ids = ["cpu"] * program.replicas
    with ScatterOnceParallel(model, program.accum, ids, verify=False) as engine:
        step(engine, criterion, batch, options)
    one, other = (
        torch.cat([p.grad.flatten() for p in each.parameters() if p.grad is not None])
        for each in (model, twin)
    )
    return float((one - other).norm() / max(float(other.norm()), 1e-12))


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
                step(engine, criterion, batch_of(program, number, torch.float32), options)
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
