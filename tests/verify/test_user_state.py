"""Exact, refused, or told: what people write that was silently something else once.

Each test names what was wrong: a loss, a gradient, outputs or state that differed from plain
torch's without a word.
"""

from __future__ import annotations

import time
import warnings
from queue import Queue as Queue_

import numpy as np
import pytest
import torch
from faults.state import nothing_changes
from harness.models import CLASSES, FEATURES, Classifier, linear, mlp
from harness.oracle import (
    assert_close,
    assert_gradients,
    assert_step,
    build,
    gradients,
    randint,
    randn,
    seeded,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from scatterpar import Rows, ScatterOnceParallel

ROWS = 24
INPUTS, VALUES, LABELS = randn(ROWS, FEATURES), randn(ROWS, CLASSES), randint(CLASSES, ROWS)
IGNORED = torch.full((ROWS,), -100)


# --- outputs that are joined ---


class Views(Classifier):
    """Two views of each row, as SimCLR's usual form gives them: all first ones, then all second."""

    def __init__(self, join=torch.cat):
        super().__init__()
        self.join = join

    def forward(self, rows):
        return self.join([self.linear(rows), self.linear(-0.5 * rows)])


def stacked(views):
    return torch.stack(views, 1).flatten(0, 1)


def agreement(features, _):
    first, second = features.split(len(features) // 2)
    return F.cross_entropy(first @ second.T, torch.arange(len(first)))


@pytest.mark.parametrize("accum", [1, 3])
def test_two_views_after_each_other_are_no_entries_of_rows(devices, accum):
    """The loss of SimCLR was 5.081, and is 3.378: views of other micro-batches lay between."""
    with ScatterOnceParallel(build(Views), accum, devices(2)) as engine:
        refused = r"not in the order of the rows.*torch.stack"
        for _ in range(2):
            with nothing_changes(engine.module), pytest.raises(ValueError, match=refused):
                engine.forward_backward(INPUTS, None, agreement, whole_batch=True)
        with pytest.raises(ValueError, match="not in the order of the rows"), torch.no_grad():
            engine(INPUTS)
    with ScatterOnceParallel(build(lambda: Views(stacked)), accum, devices(2)) as engine:
        assert_step(engine, INPUTS, None, lambda o, _: o.std(0).sum(), whole_batch=True)
        with torch.no_grad():
            assert_close(engine(INPUTS), engine.module(INPUTS), "output")


def test_views_that_were_equal_at_first_are_told_later():
    model = build(Views)
    weight = model.linear.weight.detach().clone()
    nn.init.zeros_(model.linear.weight), nn.init.zeros_(model.linear.bias)
    with ScatterOnceParallel(model, 3, ["cpu"]) as engine, torch.no_grad():
        engine(INPUTS)
        model.linear.weight.copy_(weight)
        with pytest.raises(ValueError, match="not in the order of the rows"):
            engine(INPUTS)


def test_views_of_batches_of_one_row_are_joined_or_refused():
    """The error was torch's: torch.cat() expected a non-empty list of Tensors."""
    rows, loss = Rows.from_batches([*INPUTS[:2].split(1)]), lambda output, _: output.std(0).sum()
    with ScatterOnceParallel(build(lambda: Views(stacked)), 1, ["cpu"] * 2) as engine:
        assert_step(engine, rows, None, loss, plain=(INPUTS[:2], None), whole_batch=True)
    with (
        ScatterOnceParallel(build(Views), 1, ["cpu"] * 2) as engine,
        pytest.raises(ValueError, match="not in the order of the rows"),
    ):
        engine.forward_backward(rows, None, loss, whole_batch=True)


class Masks(Classifier):
    """Four masks for each picture, flat; where nothing was learned yet they are all background."""

    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.linear.weight), nn.init.zeros_(self.linear.bias)

    def forward(self, rows):
        return self.linear(rows).flatten()


@pytest.mark.parametrize("accum", [1, 3])
def test_equal_entries_of_rows_are_no_codebook(devices, accum):
    """Of 96 entries came 16."""
    with ScatterOnceParallel(build(Masks), accum, devices(2)).eval() as engine, torch.no_grad():
        assert engine(INPUTS).shape == (ROWS * CLASSES,)
        engine.module.linear.weight.fill_(1.0)
        assert_close(engine(INPUTS), engine.module(INPUTS), "output")


def test_equal_entries_are_not_returned_as_one():
    """One rule for outputs that are returned beside the loss, too."""
    with ScatterOnceParallel(build(Masks), 3, ["cpu"] * 2) as engine:
        _, outputs = engine.forward_backward(
            INPUTS, None, lambda o, t: o.square().mean(), return_outputs=True
        )
    assert [len(each) for each in outputs] == [ROWS * CLASSES // 2] * 2


# --- torch's own cross entropy ---


class Called(nn.CrossEntropyLoss):
    """Divides by all rows, whatever is ignored."""

    def __call__(self, output, targets):
        return F.cross_entropy(output, targets, reduction="sum") / len(output)


def test_a_subclass_that_overrides_its_call_is_looked_at(devices):
    """It was taken for torch's own, whose terms are counted."""
    targets = LABELS.where(torch.arange(ROWS) % 5 > 1, -100)
    engine = ScatterOnceParallel(mlp(), 3, devices(2))
    with engine, pytest.raises(ValueError, match=r"reduction=|count="):
        engine.forward_backward(INPUTS, targets, Called())


def test_labels_that_are_all_ignored_are_told(devices):
    """torch's loss is NaN, and the engine's was 0.0 without a word."""
    with ScatterOnceParallel(mlp(), 3, devices(2)) as engine:
        with pytest.warns(UserWarning, match="all are ignored.*NaN"):
            loss = engine.forward_backward(INPUTS, IGNORED, nn.CrossEntropyLoss())
        assert loss.item() == 0
        assert all(p.grad is None or not p.grad.any() for p in engine.module.parameters())


# --- state ---


class Normed(Classifier):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(CLASSES)


@pytest.mark.parametrize("whole_batch", [False, True])
@pytest.mark.parametrize("buffers", ["master", "batch"])
def test_statistics_that_the_criterion_moves_in_the_model_stay(whole_batch, buffers):
    """They were those of the replica, in which nothing had moved them: zeros."""
    model, twin = build(Normed), build(Normed)

    def loss_with(module):
        return lambda output, targets: F.mse_loss(module.norm(output), targets)

    loss_with(twin)(twin(INPUTS), VALUES).backward()
    with ScatterOnceParallel(model, 1, ["cpu"], buffers=buffers) as engine:
        criterion = loss_with(model)
        model.norm.requires_grad_(whole_batch)  # else only replicas are trained
        engine.forward_backward(INPUTS, VALUES, criterion, whole_batch=whole_batch)
    for name, expected in twin.named_buffers():
        assert torch.equal(dict(model.named_buffers())[name], expected), name


class Queue(Normed):
    """Keeps the last features, a counter, and its last output."""

    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.zeros(4, CLASSES))
        self.calls, self.last = 0, torch.zeros(())

    def forward(self, rows):
        output = self.norm(self.linear(rows))
        with torch.no_grad():
            self.queue.mul_(0.9)[:] += output.mean(0)
        self.calls += 1
        self.last = output.detach().mean()
        return output


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("accum", "words"),
    [
        (3, "the buffer 'queue', the attribute 'calls', the attribute 'last': at each of the 6"),
        (1, "move the buffer 'queue', the attribute 'last': at"),  # the counter is one device's
    ],
)
def test_state_that_sub_steps_move_is_told_once_by_name(devices, accum, words):
    """A queue of MoCo's was off by 0.45 to 1.96, and nobody was told."""
    with ScatterOnceParallel(build(Queue), accum, devices(2)) as engine:
        with pytest.warns(UserWarning, match=words) as caught:
            engine.forward_backward(INPUTS, VALUES, nn.MSELoss())
        assert len(caught) == 1
        engine.forward_backward(INPUTS, VALUES, nn.MSELoss())
    with ScatterOnceParallel(build(Queue), 1, devices(1)) as engine:
        engine.forward_backward(INPUTS, VALUES, nn.MSELoss())


class Rotates(Classifier):
    """Grows a table of positions in its first pass, and reads it from then on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(0), persistent=False)
        self.length, self.angles = 0, torch.zeros(0)

    def forward(self, rows):
        if self.length < FEATURES:
            self.length, self.angles = FEATURES, torch.arange(FEATURES) / FEATURES
            self.table = self.angles.cos()
        return self.linear(rows * self.table)


class Fills(Classifier):
    """Fills a buffer in the first sub-step, in place, so that graphs can do it too."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(FEATURES))

    def forward(self, rows):
        if not self.table.any():
            self.table.fill_(2.0)
        return self.linear(rows * self.table)


@pytest.mark.filterwarnings("error")
def test_a_buffer_that_is_filled_once_is_no_state_that_moves_with_graphs():
    """It was told to move at each of the sub-steps."""
    with ScatterOnceParallel(build(Fills), 3, ["cpu"] * 2, graphs=True) as engine:
        engine.forward_backward(INPUTS, VALUES, nn.MSELoss())


STEADY = {
    "a table that grows once": lambda: build(Rotates),
    "a buffer that is filled once": lambda: build(Fills),
    "weights that each pass computes": lambda: torch.nn.utils.weight_norm(linear()),
}


@pytest.mark.filterwarnings("error", "ignore:.*weight_norm")
@pytest.mark.parametrize(("replicas", "accum"), [(2, 3), (1, 3), (2, 1)])
@pytest.mark.parametrize("case", STEADY)
def test_what_is_no_state_that_moves(devices, case, replicas, accum):
    """It was told to move at each of the sub-steps."""
    with ScatterOnceParallel(STEADY[case](), accum, devices(replicas)) as engine:
        for _ in range(2):
            engine.forward_backward(INPUTS, VALUES, nn.MSELoss())
            engine.forward_backward(INPUTS, VALUES, F.mse_loss, whole_batch=True)


# --- what forward passes leave on the module ---


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES)
        self.aux = torch.zeros(())

    def forward(self, rows):
        output = self.norm(self.linear(rows))
        self.aux = (output + self.linear(rows)).square().mean()
        return output


class Experts(nn.Module):
    """Leaves an auxiliary loss on each block, as mixtures of experts do."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(FEATURES, CLASSES))

    def forward(self, rows):
        for block in self.blocks:
            rows = block(rows)
        return self.head(rows)

    def balance(self):
        return sum(block.aux for block in self.blocks)


def total_of(parts):
    return sum(getattr(part, "aux") for part in parts)  # noqa: B009


class Holds:
    def __init__(self, model):
        self.model = model

    def __call__(self, output, targets):
        return F.cross_entropy(output, targets) + total_of(self.model.blocks)


def with_gradients(model):
    """A penalty on gradients, as adaptive weights have it."""

    def criterion(output, targets):
        loss, own = F.cross_entropy(output, targets), [*model.parameters()]
        found = torch.autograd.grad(loss, own, allow_unused=True, create_graph=True)
        return loss + sum(gradient.square().sum() for gradient in found if gradient is not None)

    return criterion


KEPT = {}


def of_file(output, targets):
    return F.cross_entropy(output, targets) + sum(KEPT["model"].blocks[k].aux for k in range(2))


def adds(extra):
    return lambda output, targets: F.cross_entropy(output, targets) + extra()


LEFT_BEHIND = {
    "attributes": lambda m: lambda o, t: F.cross_entropy(o, t) + sum(b.aux for b in m.blocks),
    "a method": lambda m: lambda o, t: F.cross_entropy(o, t) + m.balance(),
    "a global": lambda m: KEPT.update(model=m) or of_file,
    "a list": lambda m: adds(lambda parts=[*m.blocks]: sum(part.aux for part in parts)),
    "a helper": lambda m: adds(lambda: total_of(m.blocks)),
    "an object that holds the model": Holds,
    "gradients by parameters": with_gradients,
}


@pytest.mark.parametrize(("replicas", "accum", "whole_batch"), [(1, 1, False), (2, 3, True)])
@pytest.mark.parametrize("name", LEFT_BEHIND)
def test_what_replicas_keep_is_not_left_out_of_a_loss(devices, name, replicas, accum, whole_batch):
    """Auxiliary losses were dropped: 1.465 became 1.178; penalties by parameters found nothing."""
    model = build(Experts)
    criterion = LEFT_BEHIND[name](model)
    model.head[1].bias.grad = torch.ones_like(model.head[1].bias)
    words = (
        "leads to the module.*in plain torch, but.*on a replica.*an auxiliary loss.*Return it.*"
        "count=, reduction= or whole_batch=.*verify="
    )
    with ScatterOnceParallel(model, accum, devices(replicas)) as engine:
        for _ in range(2):
            with nothing_changes(model), pytest.raises(ValueError, match=words):
                engine.forward_backward(INPUTS, LABELS, criterion, whole_batch=whole_batch)


class Penalised(nn.Module):
    """A criterion that holds the model, or a part of it, and asks for no more than its weights."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, output, targets):
        penalty = sum(p.square().sum() for p in self.part.parameters())
        return F.cross_entropy(output, targets) + 0.01 * penalty


ALLOWED = {
    "a penalty on weights": lambda m: adds(lambda: m.head[1].weight.square().sum()),
    "a module that holds the model": Penalised,
    "a method of a module": lambda m: Penalised(m.head).forward,
    "a part that is called": lambda m: (
        lambda o, t: F.cross_entropy(o, t) + m.head(o.new_ones(5, FEATURES)).square().mean()
    ),
    "draws": lambda m: (
        lambda o, t: F.cross_entropy(o, t) + 0 * m.head[1].bias.sum() + torch.rand(()) * o.mean()
    ),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("whole_batch", [False, True])
@pytest.mark.parametrize("name", ALLOWED)
def test_a_criterion_may_hold_the_model(devices, name, whole_batch):
    """Dropout draws the same numbers for both, and batch normalisation sees the same rows.

    A module is copied for each replica; a function must not train the model, except once.
    """
    model = build(Experts)
    criterion = ALLOWED[name](model)
    if not whole_batch and "module" not in name:
        model.head.requires_grad_(False)
    with ScatterOnceParallel(model, 2, devices(2)) as engine, seeded(0):
        for _ in range(2):
            engine.forward_backward(INPUTS, LABELS, criterion, whole_batch=whole_batch)


# --- what a hook fills ---


def two_layers():
    return nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES))


class Bag:
    feature = None


def filled(how):
    """A model whose hook fills something, and a criterion that reads it."""
    model, bag, box = build(two_layers), Bag(), {"of": {}}
    feature = None

    def attribute(_, __, output):
        bag.feature = output
        time.sleep(0.01)  # another replica's would be there

    def variable(_, __, output):
        nonlocal feature
        feature = output

    def entry(_, __, output):
        box["of"]["feature"] = output

    hook, read = {
        "an attribute": (attribute, lambda: bag.feature),
        "a variable": (variable, lambda: feature),
        "an entry": (entry, lambda: box["of"]["feature"]),
    }[how]
    model[0].register_forward_hook(hook)
    return model, lambda o, t: F.cross_entropy(o, t) + read().square().mean()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("how", ["an attribute", "a variable", "an entry"])
def test_what_a_hook_fills_is_read_by_the_replica_that_filled_it(devices, how):
    """It was another replica's in 1 to 5 of 20 steps, without a word. In turn, it is exact."""
    model, criterion = filled(how)
    with ScatterOnceParallel(model, 3, devices(3)) as engine:
        with pytest.warns(UserWarning, match="filled.*reads what forward passes leave behind"):
            engine.forward_backward(INPUTS, LABELS, criterion)
        for _ in range(4):
            model.zero_grad()
            engine.forward_backward(INPUTS, LABELS, criterion)
        found = gradients(model)
        model.zero_grad()
        criterion(model(INPUTS), LABELS).backward()
        assert_gradients(model, found)
        with pytest.raises(ValueError, match="what the last micro-batch left"):
            engine.forward_backward(INPUTS, LABELS, criterion, whole_batch=True)


@pytest.mark.filterwarnings("error")
def test_one_replica_reads_what_its_own_hook_fills():
    model, criterion = filled("an entry")
    with ScatterOnceParallel(model, 2, ["cpu"]) as engine:
        assert_step(engine, INPUTS, LABELS, criterion)


# --- more than a handful of rows ---

FORTY_EIGHT = randn(48, FEATURES), randint(CLASSES, 48)


def hardest(output, targets):
    return F.cross_entropy(output, targets, reduction="none").topk(min(12, len(output)))[0].mean()


with torch.no_grad():
    LEVEL = F.cross_entropy(mlp()(FORTY_EIGHT[0]), FORTY_EIGHT[1]).item() - 0.2


def flooded(output, targets):
    return (F.cross_entropy(output, targets) - LEVEL).abs() + LEVEL


@pytest.mark.parametrize("criterion", [hardest, flooded])
def test_losses_that_a_handful_of_rows_does_not_show(devices, criterion):
    engine = ScatterOnceParallel(mlp(), 4, devices(1))
    with engine, pytest.raises(ValueError, match="whole_batch=True"):
        engine.forward_backward(*FORTY_EIGHT, criterion)


# --- without a trace ---


class Slots:
    __slots__ = ("calls",)


METER = {"seen": 0}


class Counts:
    """Counts its calls in all ways that there are."""

    seen, array, queue, slots, history, last = 0, np.zeros(3), Queue_(), Slots(), [], None

    def __init__(self, reduction="mean"):
        self.reduced, self.calls, self.steps, self.slots.calls = reduction, 0, torch.zeros(()), 0

    def __call__(self, output, targets):
        type(self).seen += 1
        self.calls += 1
        self.steps += 1
        self.slots.calls += 1
        self.array[0] += 1
        self.queue.put(1)
        self.history.append(1)
        METER["seen"] += 1
        self.last = F.cross_entropy(output, targets, reduction=self.reduced)
        return self.last

    def numbers(self):
        own = self.seen, self.calls, int(self.steps), self.slots.calls, int(self.array[0])
        return [*own, self.queue.qsize(), len(self.history), METER["seen"]]


def test_a_check_leaves_no_trace():
    """They had extra entries in steps 1, 8, 16, …, also if the step was refused."""
    rows, model, calls = [], mlp(), 0
    model[0].register_forward_hook(lambda _, args, __: rows.append(len(args[0])))

    def counting(output, targets):
        nonlocal calls
        calls += 1
        return criterion(output, targets)

    with ScatterOnceParallel(model, 3, ["cpu"]) as engine:
        criterion = Counts("sum")
        with pytest.raises(ValueError, match="reduction="):
            engine.forward_backward(INPUTS, LABELS, counting)
        assert (calls, rows, criterion.last, criterion.numbers()) == (0, [], None, [0] * 8)
        criterion = Counts()
        engine.forward_backward(INPUTS, LABELS, counting)
        assert (calls, rows, criterion.numbers()) == (3, [8] * 3, [3] * 8)


@pytest.mark.contract
def test_a_failed_step_restores_a_generator_that_the_criterion_closes_over(devices):
    generator = torch.Generator().manual_seed(3)

    def criterion(output, targets):
        factor = 1 + 0 * torch.rand((), generator=generator).item()
        if len(output) == 4:
            raise RuntimeError("as planned")
        return F.cross_entropy(output, targets) * factor

    with ScatterOnceParallel(mlp(), 3, devices(2)) as engine:
        before = generator.get_state()
        with pytest.raises(RuntimeError, match="as planned"):
            engine.forward_backward(INPUTS, LABELS, criterion)
        assert torch.equal(generator.get_state(), before)


# --- false alarms ---


class Recomputes(Classifier):
    def forward(self, rows):
        return checkpoint(self.linear, rows, use_reentrant=True)


def own_mean(output, targets):
    return F.mse_loss(output, targets)


def test_a_check_brings_no_warnings_of_torch_s(devices):
    """Of a reentrant checkpoint that has nothing to train, and of targets that are broadcast."""
    model = build(lambda: nn.Sequential(nn.Linear(FEATURES, FEATURES), Recomputes()))
    one_column = VALUES[:, :1].expand(ROWS, CLASSES).contiguous()
    with ScatterOnceParallel(model, 3, devices(2)) as engine:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            engine.forward_backward(INPUTS, one_column, own_mean)
            engine.forward_backward(INPUTS, one_column, own_mean, return_outputs=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.forward_backward(INPUTS, VALUES[:, :1], own_mean)
    sizes = [each for each in caught if "target size" in str(each.message)]
    assert len(sizes) == len(caught) == 6  # one per sub-step


class OwnMean(nn.CrossEntropyLoss):
    def forward(self, output, targets):
        return super().forward(output, targets).mean()


def test_a_subclass_that_takes_its_own_mean_is_right(devices):
    with ScatterOnceParallel(mlp(), 3, devices(2)) as engine:
        criterion = OwnMean(reduction="none")
        assert_step(engine, INPUTS, LABELS, criterion, reduction="mean")
        with pytest.raises(ValueError, match='pass reduction="mean"'):
            engine.forward_backward(INPUTS, LABELS, criterion)
