"""Random training programs, right and wrong ones, and whether the engine tells them apart.

What is right is not decided here: a program is right if the engine without its check gives the
gradient of a plain backward over the whole batch, in float64 and without noise, to 1e-8; it is
wrong if that is off by more than 1 %. What lies between is not counted.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import warnings
from dataclasses import dataclass, field
from functools import partial
from itertools import count as numbers
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from scatterpar import ScatterOnceParallel, count_labels

CLASSES, FEATURES, LENGTH, VOCABULARY = 6, 5, 7, 13
STEPS = 8
WRONG, RIGHT = 1e-2, 1e-8
SWITCHES = {"noise": True}  # off where the true gradient is computed
METER = {"seen": 0, "last": 0.0}


@dataclass
class Program:
    """One random program: a task, a loss, what is passed for it, and its surroundings."""

    seed: int
    task: str = ""
    loss: str = ""
    passed: str = ""
    place: str = ""
    extra: str = ""
    precision: str = ""
    layers: tuple[str, ...] = ()
    rows: int = 0
    replicas: int = 1
    accum: int = 1
    virtual: bool = False
    ranks: bool = False
    holes: str = ""
    details: dict[str, Any] = field(default_factory=dict)


LOSSES = {
    "classes": [
        "mean",
        "sum",
        "ignored",
        "ignored literal",
        "class weights",
        "sum over constant",
        "smoothed",
        "focal",
        "sample weights",
        "hard examples",
        "std",
        "root",
        "log of mean",
        "coupled labels",
        "penalty",
        "entropy of the mean",
        "top half",
    ],
    "tokens": [
        "mean",
        "sum",
        "ignored",
        "ignored literal",
        "class weights",
        "per row",
        "shifted",
        "sum over constant",
        "z loss",
        "root",
        "penalty",
    ],
    "values": [
        "mean",
        "sum",
        "masked",
        "sample weights",
        "NaN left out",
        "std",
        "root",
        "huber",
        "correlation",
        "contrastive",
        "variance",
        "dice",
        "triplet in batch",
        "quantile",
        "penalty",
        "mask of ten",
        "per row masked",
    ],
}
PASSED = ["nothing", "nothing", "nothing", "sum", "count", "wrong count"]
EXTRAS = [
    "none",
    "none",
    "last",
    "calls",
    "buffer",
    "meter",
    "noise",
    "dropout",
    "closure",
    "lists",
]
PRECISIONS = ["float64", "float32", "float32", "bfloat16", "float16", "autocast"]


def draw(seed: int) -> Program:
    pick = random.Random(seed)
    program = Program(seed, task=pick.choice(list(LOSSES)))
    program.loss = pick.choice(LOSSES[program.task])
    program.passed = pick.choice(PASSED)
    if program.loss.startswith("sum") and pick.random() < 0.6:
        program.passed = "sum"
    counted = {"ignored", "ignored literal", "class weights", "sample weights", "masked", "shifted"}
    if program.loss in counted and pick.random() < 0.5:
        program.passed = "count"
    program.place = pick.choice(["function", "function", "module", "object", "own loss"])
    program.extra = pick.choice(EXTRAS)
    program.precision = pick.choice(PRECISIONS)
    program.layers = tuple(
        pick.sample(["dropout", "batch norm", "layer norm", "counter"], pick.randint(0, 2))
    )
    program.rows = pick.choice([6, 8, 13, 24, 24, 48, 97, 200])
    program.replicas, program.accum = pick.choice([1, 2, 3]), pick.choice([1, 2, 3, 4])
    program.virtual, program.ranks = pick.random() < 0.4, pick.random() < 0.15
    if program.replicas * program.accum == 1:
        program.accum = 2
    if program.ranks:
        program.replicas, program.accum = 2, 1
    program.holes = pick.choice(["none", "some", "some", "many", "few rows"])
    program.details = {"index": pick.randrange(CLASSES), "scale": pick.choice([0.1, 1.0, 7.0])}
    return program


class Net(nn.Module):
    """Rows or tokens to ``CLASSES`` numbers; perhaps with the loss inside."""

    def __init__(self, program: Program, loss: Any = None) -> None:
        super().__init__()
        tokens = program.task == "tokens"
        self.first = nn.Embedding(VOCABULARY, 8) if tokens else nn.Linear(FEATURES, 8)
        self.norm = nn.BatchNorm1d(8) if "batch norm" in program.layers else None
        self.flat = nn.LayerNorm(8) if "layer norm" in program.layers else nn.Identity()
        self.drop = nn.Dropout(0.3) if "dropout" in program.layers else nn.Identity()
        self.last = nn.Linear(8, CLASSES)
        self.loss = loss
        self.counts = "counter" in program.layers
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: Any, targets: Any = None) -> Any:
        if self.counts and self.training:
            self.seen += len(inputs)
        hidden = self.first(inputs)
        if self.norm is not None:
            hidden = self.norm(hidden.flatten(0, -2)).view(hidden.shape)
        output = self.last(self.drop(torch.tanh(self.flat(hidden))))
        return output if targets is None else self.loss(output, targets)


class Module(nn.Module):
    """A criterion with a state."""

    def __init__(self, function: Any, extra: str) -> None:
        super().__init__()
        self.function = function
        self.extra = extra
        self.calls = 0
        self.last: Any = None
        self.history: list[float] = []
        self.register_buffer("steps", torch.zeros(()))
        self.drop = nn.Dropout(0.2)

    def forward(self, output: Any, targets: Any) -> Any:
        self.calls += 1
        if self.extra == "buffer":
            self.steps += 1
        if self.extra == "dropout" and SWITCHES["noise"]:
            output = self.drop(output)
        loss = self.function(output, targets)
        if self.extra == "last":
            self.last = loss.detach()
        if self.extra == "lists":
            self.history.append(float(loss))
        return loss


class Plain:
    """An object that is no module, with a state."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.calls = 0
        self.last: Any = None

    def __call__(self, output: Any, targets: Any) -> Any:
        self.calls += 1
        self.last = self.function(output, targets)
        return self.last


def noisy(program: Program, output: Any) -> Any:
    if program.extra == "noise" and SWITCHES["noise"]:
        return output + 0.1 * torch.randn_like(output)
    if program.extra == "meter":
        METER["seen"] += len(output)
    return output


def function_of(program: Program) -> Any:
    """The loss itself, of outputs and a dict of targets."""
    kind, index = program.loss, program.details["index"]
    scale = program.details["scale"]
    weights = torch.rand(CLASSES, generator=torch.Generator().manual_seed(program.seed)) + 0.05
    calls = numbers()

    def classes(output: Any, targets: Any) -> Any:
        output = noisy(program, output)
        if program.extra == "closure":
            next(calls)
        labels = targets["labels"]
        if output.ndim == 3:
            if kind == "shifted":
                output, labels = output[:, :-1], labels[:, 1:]
            output = output.transpose(1, 2)
        entropy = partial(F.cross_entropy, output, labels)
        if kind == "sum":
            return entropy(reduction="sum")
        if kind == "sum over constant":
            return entropy(reduction="sum") / 64
        if kind == "ignored literal":
            return F.cross_entropy(output, labels, ignore_index=index)
        if kind == "class weights":
            return entropy(weight=weights.to(output))
        if kind == "smoothed":
            return entropy(label_smoothing=0.1)
        if kind in ("root", "log of mean"):
            return entropy().sqrt() if kind == "root" else entropy().log1p()
        if kind == "penalty":
            return entropy() + 0.1 * output.square().mean()
        each = entropy(reduction="none")
        if kind == "sample weights":
            return (each * targets["weights"]).sum() / targets["weights"].sum()
        if kind == "focal":
            return ((1 - (-each).exp()) ** 2 * each).mean()
        if kind == "hard examples":
            hard = each.detach() > each.detach().mean()
            return (each * hard).sum() / hard.sum().clamp(min=1)
        if kind == "top half":
            return each.topk((len(each) + 1) // 2).values.mean()
        if kind == "std":
            return each.mean() + each.std()
        if kind == "coupled labels":
            return sum(each[labels == k].mean() for k in labels.unique())
        if kind == "entropy of the mean":
            mean = output.softmax(1).mean(0)
            return each.mean() + scale * (mean * mean.log()).sum()
        if kind == "per row":
            kept = (labels != -100).to(each.dtype)
            return ((each * kept).sum(1) / kept.sum(1).clamp(min=1)).mean()
        if kind == "z loss":
            return entropy() + 1e-1 * output.logsumexp(1).square().mean()
        return entropy()

    def values(output: Any, targets: Any) -> Any:
        output = noisy(program, output)
        wanted, mask, weight = (targets[k].to(output.dtype) for k in ("values", "mask", "weights"))
        error = (output - wanted.nan_to_num()).square()
        if kind == "sum":
            return error.sum()
        if kind == "masked":
            return (error.mean(1) * mask).sum() / mask.sum().clamp(min=1)
        if kind == "per row masked":
            return (error.mean(1) * mask).mean()
        if kind == "mask of ten":
            kept = targets["labels"] < CLASSES - 1
            return error[kept].mean()
        if kind == "NaN left out":
            return (output - wanted)[~wanted.isnan()].square().mean()
        if kind == "sample weights":
            return (error.mean(1) * weight).sum() / weight.sum()
        if kind == "std":
            return output.std()
        if kind == "root":
            return error.mean().sqrt()
        if kind == "huber":
            return F.huber_loss(output, wanted.nan_to_num())
        if kind == "correlation":
            a, b = output - output.mean(0), wanted.nan_to_num() - wanted.nan_to_num().mean(0)
            return -(a * b).sum() / (a.norm() * b.norm() + 1e-3)
        if kind == "contrastive":
            unit = F.normalize(output, dim=1)
            return F.cross_entropy(
                unit @ F.normalize(wanted.nan_to_num(), dim=1).T * 3, torch.arange(len(output))
            )
        if kind == "variance":
            return error.mean() + scale * (1 - output.var(0, unbiased=False)).relu().mean()
        if kind == "dice":
            chance, truth = output.sigmoid(), (wanted.nan_to_num() > 0).to(output.dtype)
            return 1 - (2 * (chance * truth).sum() + 1) / (chance.sum() + truth.sum() + 1)
        if kind == "triplet in batch":
            return (error.mean(1) - error.mean(1).roll(1) + 0.02).relu().mean() + error.mean()
        if kind == "quantile":
            return error.mean(1).float().quantile(0.7).to(error.dtype)
        if kind == "penalty":
            return error.sum() + scale * output.mean().square()
        return error.mean()

    return values if program.task == "values" else classes


def count_of(program: Program) -> Any:
    kind, index = program.loss, program.details["index"]
    weights = torch.rand(CLASSES, generator=torch.Generator().manual_seed(program.seed)) + 0.05

    def targets_of(inputs: Any, targets: Any) -> Any:
        return targets if targets is not None else inputs[1]

    def count(inputs: Any, targets: Any) -> Any:
        targets = targets_of(inputs, targets)
        labels = targets["labels"]
        if program.passed == "wrong count":
            return (labels % 3 == 1).sum() + 1
        if kind == "sample weights":
            return targets["weights"].sum()
        if kind in ("masked",):
            return targets["mask"].sum()
        if kind == "class weights":
            return weights[labels.clamp(min=0)].where(labels >= 0, 0).sum()
        value = index if kind == "ignored literal" else -100
        return count_labels(value, shifted=kind == "shifted")(None, labels)

    return count


def batch_of(program: Program, seed: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(program.seed * 1000 + seed)
    n = program.rows
    shape = (n, LENGTH) if program.task == "tokens" else (n,)
    if program.task == "tokens":
        inputs: Any = torch.randint(VOCABULARY, shape, generator=generator)
    else:
        inputs = torch.randn(n, FEATURES, generator=generator, dtype=torch.float64)
    labels = torch.randint(CLASSES, shape, generator=generator)
    mask = torch.ones(n)
    values = torch.randn(n, CLASSES, generator=generator, dtype=torch.float64)
    chance = {"none": 0.0, "some": 0.2, "many": 0.6, "few rows": 0.1}[program.holes]
    left_out = torch.rand(n, generator=generator) < chance
    if chance and program.loss in ("ignored", "per row", "shifted"):
        if program.task == "tokens":
            lengths = torch.randint(2, LENGTH + 1, (n,), generator=generator)
            labels = labels.masked_fill(torch.arange(LENGTH) >= lengths[:, None], -100)
        else:
            labels = labels.masked_fill(left_out, -100)
    mask = mask.masked_fill(left_out, 0)
    values[:, 0] = values[:, 0].masked_fill(
        left_out & (program.loss == "NaN left out"), float("nan")
    )
    weights = torch.rand(n, generator=generator) + 0.1 if chance else torch.ones(n)
    if program.task == "tokens":
        weights = weights[:, None].expand(n, LENGTH).contiguous()
    return inputs, {"labels": labels, "values": values, "mask": mask, "weights": weights}


def parts_of(program: Program, dtype: torch.dtype) -> tuple[Any, Any, dict[str, Any]]:
    """The module, the criterion and the options of its call."""
    function = function_of(program)
    criterion = {"module": Module(function, program.extra), "object": Plain(function)}.get(
        program.place, function
    )
    torch.manual_seed(program.seed)
    model = Net(program, criterion if program.place == "own loss" else None).to(dtype)
    options: dict[str, Any] = {}
    if program.passed == "sum":
        options["reduction"] = "sum"
    if "count" in program.passed:
        options["count"] = count_of(program)
    return model, None if program.place == "own loss" else criterion, options


def call(engine: Any, criterion: Any, batch: Any, options: Any, dtype: torch.dtype) -> Any:
    inputs, targets = (_cast(part, dtype) for part in batch)
    if criterion is None:
        return engine.forward_backward((inputs, targets), **options)
    return engine.forward_backward(inputs, targets, criterion, **options)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, dict):
        return {key: _cast(each, dtype) for key, each in value.items()}
    return value.to(dtype) if value.is_floating_point() else value


def off_by(program: Program, seed: int) -> float:
    """How far the engine without its check is from a plain backward: in float64, without noise."""
    SWITCHES["noise"] = False
    model, criterion, options = parts_of(program, torch.float64)
    model.eval()
    twin = copy.deepcopy(model)
    inputs, targets = (_cast(part, torch.float64) for part in batch_of(program, seed))
    loss = twin(inputs, targets) if criterion is None else criterion(twin(inputs), targets)
    loss.backward()
    with ScatterOnceParallel(
        model, program.accum, ["cpu"] * program.replicas, verify=False
    ) as engine:
        call(engine, criterion, batch_of(program, seed), options, torch.float64)
    SWITCHES["noise"] = True
    one, other = (
        torch.cat([p.grad.flatten() for p in each.parameters() if p.grad is not None])
        for each in (model, twin)
    )
    if one.shape != other.shape or not (one.isfinite().all() and other.isfinite().all()):
        return float("nan")
    return float((one - other).norm() / max(float(other.norm()), 1e-12))


DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


def told(program: Program, steps: int, group: Any = None) -> tuple[str, int]:
    """``refused``, ``warned``, ``not checked`` or nothing, and in which step."""
    dtype = DTYPES.get(program.precision, torch.float32)
    model, criterion, options = parts_of(program, dtype)
    ids = [f"cpu:{k}" if program.virtual else "cpu" for k in range(program.replicas)]
    kwargs: dict[str, Any] = {}
    if program.ranks:
        ids, kwargs = ids[:1], {"process_group": group}
    said, at = "", 0
    with (
        ScatterOnceParallel(model, program.accum, ids, **kwargs) as engine,
        torch.autocast("cpu", torch.bfloat16, enabled=program.precision == "autocast"),
    ):
        for step in range(1, steps + 1):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    call(engine, criterion, batch_of(program, step), options, dtype)
                except ValueError as error:
                    if "verify=False" not in str(error):
                        raise
                    return "refused", step
            texts = [str(each.message) for each in caught]
            if any("verify=False" in t and "not be checked" not in t for t in texts):
                return "warned", step
            if not said and any("not be checked" in t for t in texts):
                said, at = "not checked", step
    return said, at


def judge(seed: int, group: Any) -> dict[str, Any] | None:
    """What one program is and what was told of it; ``None`` if it is neither right nor wrong."""
    program = draw(seed)
    try:
        off = [off_by(program, step) for step in range(1, 7)]
    except Exception:
        SWITCHES["noise"] = True
        return None
    is_right, is_wrong = max(off) < RIGHT, min(off) > WRONG
    if not (is_right or is_wrong):  # NaN is neither
        return None
    try:
        said, step = told(program, STEPS, group)
    except Exception as error:  # such as a loss that this precision has no kernel for
        return {"seed": seed, "failed": f"{type(error).__name__}: {error}"[:120]}
    return {
        "seed": seed,
        "right": is_right,
        "off": off[0],
        "said": said,
        "step": step,
        **{key: str(getattr(program, key)) for key in KEYS},
    }


KEYS = ("task", "loss", "passed", "place", "extra", "precision", "layers", "rows", "ranks", "holes")


def run(first: int, last: int, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with open(out, "a") as file:
        for seed in range(first, last):
            found = judge(seed, dist.group.WORLD)
            if found is not None:
                print(json.dumps(found), file=file, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    parser.add_argument("out")
    options = parser.parse_args()
    run(options.first, options.last, options.out)
