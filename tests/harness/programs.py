"""Random training programs, right and wrong ones, and whether the engine tells them apart.

Nobody decides by hand what is right. A program is right if the engine without its check gives the
gradient of a plain backward over the whole batch, in float64 and without noise, to 1e-8. It is
wrong if that is off by more than 1 % in each of six batches. What lies between is not counted.

``python -m harness.programs 0 2400 found.jsonl`` (from ``tests/``) writes one line of JSON for each
seed that is right or wrong.
"""

from __future__ import annotations

import copy
import json
import random
import sys
import warnings
from functools import partial
from itertools import count as numbers
from types import SimpleNamespace
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
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


def words(text: str) -> list[str]:
    return text.split(", ")


LOSSES = {
    "classes": words(
        "mean, sum, ignored, ignored literal, class weights, sum over constant, smoothed, focal, "
        "sample weights, hard examples, std, root, log of mean, coupled labels, penalty, "
        "entropy of the mean, top half"
    ),
    "tokens": words(
        "mean, sum, ignored, ignored literal, class weights, per row, shifted, sum over constant, "
        "z loss, root, penalty"
    ),
    "values": words(
        "mean, sum, masked, sample weights, NaN left out, std, root, huber, correlation, "
        "contrastive, variance, dice, triplet in batch, quantile, penalty, mask of ten, "
        "per row masked"
    ),
}
PASSED = words("nothing, nothing, nothing, sum, count, wrong count")
EXTRAS = words("none, none, last, calls, buffer, meter, noise, dropout, closure, lists")
PRECISIONS = words("float64, float32, float32, bfloat16, float16, autocast")
COUNTED = words("ignored, ignored literal, class weights, sample weights, masked, shifted")


class Program(SimpleNamespace):
    """One random program: a task, a loss, what is passed for it, and its surroundings."""


def draw(seed: int) -> Program:
    """The program of a seed: the same in every version, so the order of the draws is fixed."""
    pick = random.Random(seed)
    program = Program(seed=seed, task=pick.choice(list(LOSSES)))
    program.loss = pick.choice(LOSSES[program.task])
    program.passed = pick.choice(PASSED)
    if program.loss.startswith("sum") and pick.random() < 0.6:
        program.passed = "sum"
    if program.loss in COUNTED and pick.random() < 0.5:
        program.passed = "count"
    program.place = pick.choice(words("function, function, module, object, own loss"))
    program.extra = pick.choice(EXTRAS)
    program.precision = pick.choice(PRECISIONS)
    layers = words("dropout, batch norm, layer norm, counter")
    program.layers = tuple(pick.sample(layers, pick.randint(0, 2)))
    program.rows = pick.choice([6, 8, 13, 24, 24, 48, 97, 200])
    program.replicas, program.accum = pick.choice([1, 2, 3]), pick.choice([1, 2, 3, 4])
    program.virtual, program.ranks = pick.random() < 0.4, pick.random() < 0.15
    if program.replicas * program.accum == 1:
        program.accum = 2
    if program.ranks:
        program.replicas, program.accum = 2, 1
    program.holes = pick.choice(words("none, some, some, many, few rows"))
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
        self.function, self.extra = function, extra
        self.calls, self.last, self.history = 0, None, []
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
        self.function, self.calls, self.last = function, 0, None

    def __call__(self, output: Any, targets: Any) -> Any:
        self.calls += 1
        self.last = self.function(output, targets)
        return self.last


def weights_of(program: Program) -> torch.Tensor:
    return torch.rand(CLASSES, generator=torch.Generator().manual_seed(program.seed)) + 0.05


def average(each: Any, weight: Any) -> Any:
    return (each * weight).sum() / weight.sum()


def hardest(each: Any) -> Any:
    hard = each.detach() > each.detach().mean()
    return (each * hard).sum() / hard.sum().clamp(min=1)


def entropy_of_mean(output: Any) -> Any:
    mean = output.softmax(1).mean(0)
    return (mean * mean.log()).sum()


def mean_of_rows(each: Any, labels: Any) -> Any:
    kept = (labels != -100).to(each.dtype)
    return ((each * kept).sum(1) / kept.sum(1).clamp(min=1)).mean()


def correlation(output: Any, wanted: Any) -> Any:
    a, b = output - output.mean(0), wanted - wanted.mean(0)
    return -(a * b).sum() / (a.norm() * b.norm() + 1e-3)


def contrastive(output: Any, wanted: Any) -> Any:
    logits = F.normalize(output, dim=1) @ F.normalize(wanted, dim=1).T * 3
    return F.cross_entropy(logits, torch.arange(len(output)))


def dice(output: Any, wanted: Any) -> Any:
    chance, truth = output.sigmoid(), (wanted > 0).to(output.dtype)
    return 1 - (2 * (chance * truth).sum() + 1) / (chance.sum() + truth.sum() + 1)


def function_of(program: Program) -> Any:
    """The loss itself, of outputs and a dict of targets."""
    kind, index, scale = program.loss, program.details["index"], program.details["scale"]
    weights, calls = weights_of(program), numbers()

    def noisy(output: Any) -> Any:
        if program.extra == "noise" and SWITCHES["noise"]:
            return output + 0.1 * torch.randn_like(output)
        if program.extra == "meter":
            METER["seen"] += len(output)
        return output

    def classes(output: Any, targets: Any) -> Any:
        output, labels = noisy(output), targets["labels"]
        if program.extra == "closure":
            next(calls)
        if output.ndim == 3:
            if kind == "shifted":
                output, labels = output[:, :-1], labels[:, 1:]
            output = output.transpose(1, 2)
        entropy = partial(F.cross_entropy, output, labels)
        whole = {
            "sum": lambda: entropy(reduction="sum"),
            "sum over constant": lambda: entropy(reduction="sum") / 64,
            "ignored literal": lambda: entropy(ignore_index=index),
            "class weights": lambda: entropy(weight=weights.to(output)),
            "smoothed": lambda: entropy(label_smoothing=0.1),
            "root": lambda: entropy().sqrt(),
            "log of mean": lambda: entropy().log1p(),
            "penalty": lambda: entropy() + 0.1 * output.square().mean(),
        }
        if kind in whole:
            return whole[kind]()
        each = entropy(reduction="none")
        of_terms = {
            "sample weights": lambda: average(each, targets["weights"]),
            "focal": lambda: ((1 - (-each).exp()) ** 2 * each).mean(),
            "hard examples": lambda: hardest(each),
            "top half": lambda: each.topk((len(each) + 1) // 2).values.mean(),
            "std": lambda: each.mean() + each.std(),
            "coupled labels": lambda: sum(each[labels == k].mean() for k in labels.unique()),
            "entropy of the mean": lambda: each.mean() + scale * entropy_of_mean(output),
            "per row": lambda: mean_of_rows(each, labels),
            "z loss": lambda: entropy() + 1e-1 * output.logsumexp(1).square().mean(),
        }
        return of_terms.get(kind, entropy)()

    def values(output: Any, targets: Any) -> Any:
        output = noisy(output)
        holed, mask, weight = (targets[k].to(output.dtype) for k in ("values", "mask", "weights"))
        wanted = holed.nan_to_num()
        error = (output - wanted).square()
        each = error.mean(1)
        losses = {
            "sum": lambda: error.sum(),
            "masked": lambda: (each * mask).sum() / mask.sum().clamp(min=1),
            "per row masked": lambda: (each * mask).mean(),
            "mask of ten": lambda: error[targets["labels"] < CLASSES - 1].mean(),
            "NaN left out": lambda: (output - holed)[~holed.isnan()].square().mean(),
            "sample weights": lambda: average(each, weight),
            "std": lambda: output.std(),
            "root": lambda: error.mean().sqrt(),
            "huber": lambda: F.huber_loss(output, wanted),
            "correlation": lambda: correlation(output, wanted),
            "contrastive": lambda: contrastive(output, wanted),
            "variance": lambda: (
                error.mean() + scale * (1 - output.var(0, unbiased=False)).relu().mean()
            ),
            "dice": lambda: dice(output, wanted),
            "triplet in batch": lambda: (each - each.roll(1) + 0.02).relu().mean() + error.mean(),
            "quantile": lambda: each.float().quantile(0.7).to(error.dtype),
            "penalty": lambda: error.sum() + scale * output.mean().square(),
        }
        return losses.get(kind, error.mean)()

    return values if program.task == "values" else classes


def count_of(program: Program) -> Any:
    kind, weights = program.loss, weights_of(program)
    ignored = program.details["index"] if kind == "ignored literal" else -100

    def count(inputs: Any, targets: Any) -> Any:
        targets = targets if targets is not None else inputs[1]
        labels = targets["labels"]
        if program.passed == "wrong count":
            return (labels % 3 == 1).sum() + 1
        if kind == "sample weights":
            return targets["weights"].sum()
        if kind == "masked":
            return targets["mask"].sum()
        if kind == "class weights":
            return weights[labels.clamp(min=0)].where(labels >= 0, 0).sum()
        return count_labels(ignored, shifted=kind == "shifted")(None, labels)

    return count


def batch_of(program: Program, seed: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(program.seed * 1000 + seed)
    n, tokens = program.rows, program.task == "tokens"
    shape = (n, LENGTH) if tokens else (n,)
    if tokens:
        inputs: Any = torch.randint(VOCABULARY, shape, generator=generator)
    else:
        inputs = torch.randn(n, FEATURES, generator=generator, dtype=torch.float64)
    labels = torch.randint(CLASSES, shape, generator=generator)
    values = torch.randn(n, CLASSES, generator=generator, dtype=torch.float64)
    chance = {"none": 0.0, "some": 0.2, "many": 0.6, "few rows": 0.1}[program.holes]
    left_out = torch.rand(n, generator=generator) < chance
    if chance and program.loss in ("ignored", "per row", "shifted"):
        if tokens:
            lengths = torch.randint(2, LENGTH + 1, (n,), generator=generator)
            left_out_labels = torch.arange(LENGTH) >= lengths[:, None]
        else:
            left_out_labels = left_out
        labels = labels.masked_fill(left_out_labels, -100)
    mask = torch.ones(n).masked_fill(left_out, 0)
    holes = left_out & (program.loss == "NaN left out")
    values[:, 0] = values[:, 0].masked_fill(holes, float("nan"))
    weights = torch.rand(n, generator=generator) + 0.1 if chance else torch.ones(n)
    if tokens:
        weights = weights[:, None].expand(n, LENGTH).contiguous()
    return inputs, {"labels": labels, "values": values, "mask": mask, "weights": weights}


def parts_of(program: Program, dtype: torch.dtype) -> tuple[Any, Any, dict[str, Any]]:
    """The module, the criterion and the options of its call."""
    function = function_of(program)
    criterion = {"module": Module(function, program.extra), "object": Plain(function)}.get(
        program.place, function
    )
    torch.manual_seed(program.seed)
    owns = program.place == "own loss"
    model = Net(program, criterion if owns else None).to(dtype)
    options: dict[str, Any] = {"reduction": "sum"} if program.passed == "sum" else {}
    if "count" in program.passed:
        options["count"] = count_of(program)
    return model, None if owns else criterion, options


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
    model, criterion, options = parts_of(program, torch.float64)
    twin = copy.deepcopy(model.eval())
    inputs, targets = (_cast(part, torch.float64) for part in batch_of(program, seed))
    loss = twin(inputs, targets) if criterion is None else criterion(twin(inputs), targets)
    loss.backward()
    ids = ["cpu"] * program.replicas
    with ScatterOnceParallel(model, program.accum, ids, verify=False) as engine:
        call(engine, criterion, batch_of(program, seed), options, torch.float64)
    one, other = (
        torch.cat([p.grad.flatten() for p in each.parameters() if p.grad is not None])
        for each in (model, twin)
    )
    if one.shape != other.shape or not (one.isfinite().all() and other.isfinite().all()):
        return float("nan")
    return float((one - other).norm() / max(float(other.norm()), 1e-12))


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
    SWITCHES["noise"] = False
    try:
        off = [off_by(program, step) for step in range(1, 7)]
    except Exception:
        return None
    finally:
        SWITCHES["noise"] = True
    is_right, is_wrong = max(off) < RIGHT, min(off) > WRONG
    if not (is_right or is_wrong):  # NaN is neither
        return None
    try:
        said, step = told(program, STEPS, group)
    except Exception as error:  # such as a loss that this precision has no kernel for
        return {"seed": seed, "failed": f"{type(error).__name__}: {error}"[:120]}
    return vars(program) | {"right": is_right, "off": off[0], "said": said, "step": step}


def judged(seeds: range) -> Any:
    """What became of the programs of some seeds, one after the other."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for seed in seeds:
            found = judge(seed, dist.group.WORLD)
            if found is not None:
                yield found
    finally:
        torch.set_num_threads(threads)
        dist.destroy_process_group()


if __name__ == "__main__":
    first, last, out = sys.argv[1:]
    with open(out, "a") as file:
        for each in judged(range(int(first), int(last))):
            print(json.dumps(each), file=file, flush=True)
