"""Told, always: what passed without a word, since it was tried often, had a state, or came late.

And what once was told although it was right.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from typing import ClassVar, NamedTuple

import pytest
import torch
from faults.state import capture, differences
from helpers.gang import gang
from helpers.models import CLASSES, FEATURES, Classifier, mlp
from helpers.oracle import assert_step, build, randint, randn
from helpers.weighted import CLASS_WEIGHTS, classes, padded
from test_verify import INPUTS, ROWS, Calls, assert_agreed, counted, step
from torch import nn
from torch.nn import functional as F

from scatterpar import ScatterOnceParallel

VALUES = randn(ROWS, CLASSES)


def added(output, targets):
    return (output - targets).square().sum()


def test_a_refusal_does_not_wear_off(devices):
    """The ninth call of a cell that was refused eight times went through, four times too large."""
    with ScatterOnceParallel(mlp(), 4, devices(1)) as engine:
        before = capture(engine.module)
        for _ in range(20):
            with pytest.raises(ValueError, match='reduction="sum"'):
                engine.forward_backward(INPUTS, VALUES, lambda o, t: ((o - t) ** 2).sum())
        assert differences(before, capture(engine.module)) == []
        step(engine, F.mse_loss, VALUES)  # another kind
        with pytest.raises(ValueError, match='reduction="sum"'):
            engine.forward_backward(INPUTS, VALUES, lambda o, t: ((o - t) ** 2).sum())


# --- a state, or random numbers ---

METER = {"seen": 0, "sum": 0.0}
CALLS = 0


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.last, self.calls, self.history = None, 0, []
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, output, targets):
        self.calls += 1
        self.steps += 1
        self.last = added(output, targets)
        self.history.append(self.last.item())
        return self.last


class Plain:
    def __init__(self):
        self.calls = 0

    def __call__(self, output, targets):
        self.calls += 1
        return added(output, targets)


def metered(output, targets):
    global CALLS
    CALLS += 1
    METER["seen"] += len(output)
    METER["sum"] += output.sum().item()
    return added(output, targets)


def counting():
    calls = 0

    def loss(output, targets):
        nonlocal calls
        calls += 1
        return added(output, targets) * (1 + 0 * calls)

    return loss


def with_dropout(output, targets):
    return added(F.dropout(output), targets)


def with_noise(output, targets):
    return added(output + 0.1 * torch.randn_like(output), targets)


def adaptive(output, targets):
    """As VQGAN weighs its discriminator: by gradients of the output."""
    loss, other = added(output, targets), output.abs().sum()
    one, two = (torch.autograd.grad(each, output, retain_graph=True)[0] for each in (loss, other))
    return loss + (one.norm() / (two.norm() + 1e-4)).detach() * other


STATEFUL = {
    "a module that keeps its last loss, calls, a history and a buffer": Stateful,
    "an object that counts its calls": Plain,
    "a global meter": lambda: metered,
    "a variable around it": counting,
    "an adaptive weight": lambda: adaptive,
}
DRAWING = {"dropout": with_dropout, "noise": with_noise}


@pytest.mark.parametrize("case", STATEFUL)
def test_a_criterion_with_a_state_is_told_and_the_state_put_back(devices, case):
    criterion = STATEFUL[case]()
    engine = ScatterOnceParallel(mlp(), 3, devices(2))
    with engine, pytest.raises(ValueError, match=r"pass (count=|whole_batch=|reduction=)"):
        step(engine, criterion, VALUES)
    assert METER == {"seen": 0, "sum": 0.0}
    assert CALLS == 0
    if isinstance(criterion, Stateful):
        assert (criterion.last, criterion.calls, criterion.history) == (None, 0, [])
        assert criterion.steps == 0
    assert getattr(criterion, "calls", 0) == 0


@pytest.mark.draws
@pytest.mark.parametrize("case", DRAWING)
def test_a_criterion_that_draws_is_told_once(devices, case):
    """With the same numbers for every row; so it is a warning, not an error."""
    with ScatterOnceParallel(mlp(), 3, devices(2)) as engine:
        with pytest.warns(UserWarning, match=r'reduction="sum".*the same random numbers'):
            step(engine, DRAWING[case], VALUES)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(engine, DRAWING[case], VALUES)
            step(engine, DRAWING[case], VALUES, reduction="sum")


class Own(nn.Module):
    """Computes its own loss, a sum or a mean, behind a layer."""

    def __init__(self, layer, reduction):
        super().__init__()
        self.first, self.layer = nn.Linear(FEATURES, CLASSES), layer
        self.reduction = reduction
        self.calls = 0

    def forward(self, inputs, targets):
        self.calls += 1
        output = self.layer(self.first(inputs))
        output = output[0] if isinstance(output, tuple) else output
        return F.mse_loss(output, targets, reduction=self.reduction)


class Noise(nn.Module):
    """As a diffusion model draws: a level for each row, and noise for each entry."""

    def forward(self, inputs):
        level = torch.randint(1, 5, (len(inputs), 1)).to(inputs)
        return inputs + level * torch.randn_like(inputs)


LAYERS = {
    "nothing but a counter": nn.Identity,
    "dropout": nn.Dropout,
    "batch normalisation": lambda: nn.BatchNorm1d(CLASSES),
    "noise": Noise,
}


@pytest.mark.draws
@pytest.mark.parametrize("case", LAYERS)
def test_a_module_with_a_loss_of_its_own_is_told(devices, case):
    torch.manual_seed(0)  # one seed in sixty hides the sum in the first step
    for reduction in ("mean", "sum"):
        model = build(lambda reduction=reduction: Own(LAYERS[case](), reduction))
        with (
            warnings.catch_warnings(record=True) as caught,
            ScatterOnceParallel(model, 3, devices(2)) as engine,
        ):
            warnings.simplefilter("always")
            try:
                engine.forward_backward((INPUTS, VALUES))
                said = [str(each.message) for each in caught]
            except ValueError as error:
                assert "counter" in case
                said = [str(error)]
            assert bool(said) == (reduction == "sum")
            assert all('seems to be a sum: pass reduction="sum"' in each for each in said)


def test_a_penalty_on_gradients_is_told(devices):
    """By the parameters, since it asks for more than outputs."""

    def penalised(output, targets):
        (slope,) = torch.autograd.grad(
            output.sum(), output.grad_fn.next_functions[0][0].variable, create_graph=True
        )
        return added(output, targets) + slope.square().sum()

    engine = ScatterOnceParallel(mlp(), 3, devices(2))
    with engine, pytest.raises(ValueError, match=r"pass (count=|whole_batch=|reduction=)"):
        step(engine, penalised, VALUES)


# --- the first batch hides it ---

UNWEIGHTED = nn.CrossEntropyLoss()


def leaves_out_two(output, targets):
    """Both a label and padding are left out, each by a literal."""
    kept = (targets != 1) & (targets != 3)
    return F.cross_entropy(output[kept], targets[kept])


def weighted(output, targets):
    return F.cross_entropy(output, targets, weight=CLASS_WEIGHTS)


def by_sample(output, targets):
    losses = F.cross_entropy(output, targets[0], reduction="none")
    return (losses * targets[1]).sum() / targets[1].sum()


def below_ten(output, targets):
    kept = targets[:, 0] < 10
    return (output - targets).square()[kept].mean()


def spread(low, high):
    return torch.linspace(low, high, ROWS, dtype=torch.float64)[:, None].expand(ROWS, CLASSES)


LATE = {
    "labels left out": (lambda o, t: F.cross_entropy(o, t), lambda: classes(ROWS), padded),
    "a second label that is left out": (leaves_out_two, lambda: classes(ROWS) * 0, classes),
    "class weights": (weighted, lambda: classes(ROWS) * 0 + 1, classes),
    "sample weights": (
        by_sample,
        lambda: (classes(ROWS), torch.ones(ROWS)),
        lambda n: (classes(n), torch.linspace(0.1, 3, n)),
    ),
    "a mask": (below_ten, lambda: spread(1, 2).clone(), lambda n: spread(1, 20).clone()),
}


@pytest.mark.parametrize("case", LATE)
def test_a_later_batch_shows_it(devices, case):
    criterion, first, later = LATE[case]
    with ScatterOnceParallel(mlp(), 3, devices(2)) as engine:
        for _ in range(3):
            step(engine, criterion, first())
        with pytest.raises(ValueError, match="count="):
            step(engine, criterion, later(ROWS))


def padded_with(pad, rows=16, length=6):
    """Token rows; ``pad`` is a word of the vocabulary like any other."""
    labels = randint(11, rows, length, seed=3)
    labels[:, -1] = (labels[:, -2] + 1) % 11
    if pad is not None:
        lengths = torch.arange(rows) % (length - 1) + 1
        labels = labels.masked_fill(torch.arange(length) >= lengths[:, None], pad)
    return labels


def test_padding_with_a_word_of_the_vocabulary_comes_later(devices):
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))

        def forward(self, ids):
            labels = ids[:, 1:]
            return F.cross_entropy(self.body(ids[:, :-1]).mT, labels, ignore_index=5)

    ids = padded_with(None)
    ids = ids.where(ids != 5, 6)
    ids[0, 0], ids[1, 0] = 0, 10
    with ScatterOnceParallel(build(Tokens), 3, devices(2)) as engine:
        engine.forward_backward(ids)
        with pytest.raises(ValueError, match=r"count_labels\(5, shifted=True\)"):
            engine.forward_backward(padded_with(5))


def test_what_no_label_shows_is_looked_at_again_in_later_steps():
    """The criterion changes its mind by itself, and nothing of the batch says so."""

    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, output, targets):
            self.steps += 1
            return added(output, targets) if self.steps > 9 else F.mse_loss(output, targets)

    refused = []
    with ScatterOnceParallel(mlp(), 2, ["cpu"]) as engine:
        criterion = Late()
        for number in range(1, 33):
            try:
                step(engine, criterion, VALUES)
            except ValueError:
                refused.append(number)
    assert refused[0] in (8, 16)
    assert refused == [*range(refused[0], 33)]


# --- ranks ---


def one_micro_batch_each(group, sizes):
    rows = sizes[group.rank()]
    said = []
    with ScatterOnceParallel(mlp(), 1, ["cpu"], process_group=group) as engine:
        for _ in range(2):
            try:
                engine.forward_backward(INPUTS[:rows], VALUES[:rows], lambda o, t: added(o, t))
            except (ValueError, RuntimeError) as error:  # the other rank's, by its words
                said.append(str(error))
        engine.forward_backward(INPUTS[:rows], VALUES[:rows], added, reduction="sum")
        return said, [p.grad is None for p in engine.module.parameters()]


@pytest.mark.parametrize("sizes", [(4, 4), (5, 1)])
def test_one_micro_batch_on_each_rank_is_told(sizes):
    """It was taken for nothing that could be combined."""
    for said, missing in gang()(2, one_micro_batch_each, sizes):
        assert len(said) == 2
        assert all('reduction="sum"' in each for each in said)
        assert not any(missing)


# --- no false alarms ---


class Features(NamedTuple):
    logits: torch.Tensor
    feat: torch.Tensor
    inputs: torch.Tensor


class Student(nn.Module):
    """Keeps its features, as teachers of the same class do."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(FEATURES, 6), nn.Linear(6, CLASSES)

    def forward(self, inputs):
        self.feat = self.body(inputs)
        return Features(self.head(self.feat), self.feat, inputs)


def test_a_teacher_of_the_student_s_class_is_no_old_attribute():
    teacher = build(Student).requires_grad_(False)
    teacher(INPUTS)

    def distilled(output, targets):
        wanted = teacher(output.inputs)
        return F.mse_loss(output.feat, wanted.feat) + F.cross_entropy(output.logits, targets)

    with warnings.catch_warnings(), ScatterOnceParallel(build(Student), 3, ["cpu"]) as engine:
        warnings.simplefilter("error")
        assert_step(engine, INPUTS, classes(ROWS), distilled)
        counts = counted(distilled)
        assert_agreed(engine, lambda: step(engine, counts, classes(ROWS)))


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss, nn.NLLLoss])
@pytest.mark.parametrize("how", [torch.jit.script, torch.fx.symbolic_trace])
def test_torch_s_own_losses_scripted_or_traced_are_told_to_count(devices, loss, how):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is on its way out
        criterion = how(loss(weight=CLASS_WEIGHTS.clone(), ignore_index=1))
    with (
        ScatterOnceParallel(mlp(), 3, devices(2)) as engine,
        pytest.raises(ValueError, match="pass count="),
    ):
        engine.forward_backward(INPUTS, classes(ROWS), criterion)


def test_a_criterion_meets_no_dtype_that_is_not_its_own():
    class Notes:
        met: ClassVar = set()

        def __call__(self, output, targets):
            self.met.add(output.dtype)
            return F.mse_loss(output, targets)

    def strict(output, targets):
        assert output.dtype == targets.dtype == torch.float32
        return F.mse_loss(output, targets)

    with ScatterOnceParallel(mlp().float(), 3, ["cpu"] * 2) as engine:
        counts = counted(strict)
        assert_agreed(engine, lambda: step(engine, counts, VALUES.float(), INPUTS.float()))
        step(engine, Notes(), VALUES.float(), INPUTS.float())
    assert Notes.met == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_inside_a_module_is_no_reason(devices, dtype):
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, CLASSES))

        def forward(self, inputs, targets):
            Calls.number += 1
            with torch.autocast("cpu", torch.bfloat16):
                return F.cross_entropy(self.net(inputs), targets)

    model = build(Inside).to(dtype)
    with warnings.catch_warnings(), ScatterOnceParallel(model, 3, devices(2)) as engine:
        warnings.simplefilter("error")
        batches = [
            (randn(ROWS, 64, seed=seed).to(dtype), randint(CLASSES, ROWS, seed=seed))
            for seed in range(9)
        ]
        assert_agreed(engine, lambda: engine.forward_backward(batches[0]))
        for batch in batches[1:]:
            engine.forward_backward(batch)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_numbers_from_a_generator_of_one_s_own_are_no_reason(reduction):
    """Only those of torch's own were the same for every row, and right losses were warned of."""
    generator = torch.Generator().manual_seed(3)

    def noisy(output, targets):
        noise = torch.randn(output.shape, generator=generator, dtype=output.dtype)
        return F.mse_loss(output + noise, targets, reduction=reduction)

    with warnings.catch_warnings(), ScatterOnceParallel(mlp(), 3, ["cpu"]) as engine:
        warnings.simplefilter("error")
        counts = counted(noisy)
        assert_agreed(engine, lambda: step(engine, counts, VALUES, reduction=reduction))
        wrong = {"mean": "sum", "sum": "mean"}[reduction]
        with pytest.raises(UserWarning, match="the same random numbers"):
            step(engine, noisy, VALUES, reduction=wrong)


def test_kernels_that_round_by_the_number_of_rows_are_no_reason():
    """As TF32 does on cards, and convolutions there: here each size of batch has an error."""

    class Rounds(Classifier):
        def forward(self, inputs, targets):
            error = 1 + 1e-3 * (len(inputs) % 7) / 7
            return F.mse_loss(self.linear(inputs) * error, targets)

    with ScatterOnceParallel(build(Rounds).float(), 3, ["cpu"]) as engine:
        engine.forward_backward((INPUTS.float(), VALUES.float()))


def test_a_little_is_no_rounding():
    """Where the module computes the loss in single precision, weights that are off by 0.3 %."""

    class Weighs(Classifier):
        def forward(self, inputs, targets):
            weights = 1 + 0.006 * (inputs[:, 0] > 0)
            errors = (self.linear(inputs) - targets).square().mean(1)
            return (errors * weights).sum() / weights.sum()

    with (
        ScatterOnceParallel(build(Weighs).float(), 3, ["cpu"]) as engine,
        pytest.raises(ValueError, match="count="),
    ):
        engine.forward_backward((INPUTS.float(), VALUES.float()))


def test_what_differs_each_time_is_no_reason():
    """It is not told right from wrong by chance: that it cannot be checked is said."""
    calls = itertools.count()  # which nothing puts back

    def drifts(output, targets):
        return F.mse_loss(output, targets) * (1 + 0.01 * (next(calls) % 7))

    with ScatterOnceParallel(mlp(), 3, ["cpu"]) as engine:
        step(engine, drifts, VALUES)
        with pytest.warns(UserWarning, match="not be checked .it gives another result each time"):
            step(engine, drifts, VALUES)


# --- what it costs ---


def test_a_look_takes_a_handful_of_rows_and_later_steps_nothing():
    class Sizes(nn.Module):
        met: ClassVar = []  # a look leaves classes alone

        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, inputs):
            Sizes.met.append(len(inputs))
            return self.net(inputs)

    inputs = randn(400, FEATURES)
    targets = randint(CLASSES, 400)
    criterion = functools.partial(lambda o, t: F.cross_entropy(o, t))
    with ScatterOnceParallel(Sizes(), 4, ["cpu"]) as engine:
        engine.forward_backward(inputs, targets, criterion)
        look = Sizes.met[:-4]
        assert sum(look) <= 24
        Sizes.met.clear()
        engine.forward_backward(inputs, targets, criterion)
        assert Sizes.met == [100] * 4


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_of_a_look_leaves_no_trace(devices, error):
    class Interrupted(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, output, targets):
            self.calls += 1
            if self.calls and len(output) < 10:
                raise error
            return F.mse_loss(output, targets)

    criterion = Interrupted()
    inputs, values = randn(60, FEATURES), randn(60, CLASSES)
    with ScatterOnceParallel(mlp(), 3, devices(2)) as engine:
        before = capture(engine.module)
        with pytest.raises(error):
            engine.forward_backward(inputs, values, criterion)
        assert differences(before, capture(engine.module)) == []
        assert criterion.calls == 0
        assert_step(engine, inputs, values, nn.MSELoss())
