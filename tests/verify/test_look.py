"""No gradient is silently wrong: losses that do not combine as the engine thinks are told.

Each row of ``WRONG`` gave another gradient than the whole batch's, by up to 88 %, without a word.
Each of ``RIGHT`` is trained exactly, without a word.
"""

from __future__ import annotations

import copy
import functools
import pickle
from typing import ClassVar

import pytest
import torch
from faults.state import nothing_changes
from harness.agree import Case
from harness.models import CLASSES, FEATURES, Classifier, Returns, mlp, token_classifier
from harness.oracle import assert_gradients, build, call, gradients, randint, randn, whole_batch
from harness.oracle import loss_of as loss_of_plain
from harness.weighted import CLASS_WEIGHTS, classes, padded
from torch import nn
from torch.nn import functional as F

from scatterpar import ScatterOnceParallel, count_labels

ROWS = 24
INPUTS, VALUES = randn(ROWS, FEATURES), randn(ROWS, CLASSES)


def loss_of(criterion, targets=classes, *, accum=3, model=mlp, **options):
    """A case of this criterion, the same one for every module."""
    batch = INPUTS, targets(ROWS) if callable(targets) else targets
    return Case(model, batch, lambda _: criterion, accum=accum, options=options)


def in_a_module(model, *inputs, batch=None, accum=3, **options):
    """A case of a module that computes its loss."""
    return Case(model, (batch or inputs, None), lambda _: None, accum=accum, options=options)


def in_a_def(output, targets):
    return F.cross_entropy(output, targets)


def added_up(output, targets):
    return F.cross_entropy(output, targets, reduction="sum")


def squares(output, targets):
    return (output - targets).square().sum()


def leaves_out(label):
    return lambda output, targets: F.cross_entropy(output, targets, ignore_index=label)


class HasALoss(nn.Module):
    """A criterion with the label it leaves out in a child."""

    def __init__(self):
        super().__init__()
        self.of_pixels = nn.CrossEntropyLoss(ignore_index=3)

    def forward(self, output, targets):
        return self.of_pixels(output, targets)


def weighted(output, targets):
    return F.cross_entropy(output, targets, weight=CLASS_WEIGHTS)


def with_forward():
    loss = nn.CrossEntropyLoss(ignore_index=1)
    loss.forward = in_a_def
    return loss


def hooked():
    loss = nn.CrossEntropyLoss(ignore_index=1)
    loss.register_forward_hook(lambda module, args, out: out + args[0].square().mean())
    return loss


def penalised(share):
    """A sum over rows, and a penalty on weights: all of it, silently added in each micro-batch."""

    def of(model):
        def loss(output, targets, model):
            part = len(output) / ROWS if share else 1.0
            return added_up(output, targets) + part * model[0].weight.square().sum()

        return functools.partial(loss, model=model)

    return Case(mlp, (INPUTS, classes(ROWS)), of, accum=3, options={"reduction": "sum"})


def of_slopes(output, targets):
    """A penalty on gradients: told by the parameters, since it asks for more than outputs."""
    first = output.grad_fn.next_functions[0][0].variable
    (slope,) = torch.autograd.grad(output.sum(), first, create_graph=True)
    return squares(output, targets) + slope.square().sum()


def passes():
    """Gives a mask beside the logits: no parameter ever gets the gradient of that."""
    return Returns(lambda logits, rows: torch.cat([logits, (rows[:, :1] > 0).double()], 1))


def masked(output, targets):
    return (output[:, 0] * output[:, -1]).sum() / output[:, -1].sum()


LEFT_OUT = 7  # a class that there is not: no label of this kind is known to be left out


def masked_mean(output, targets):
    counts = targets != LEFT_OUT
    losses = F.cross_entropy(output, targets.where(counts, 0), reduction="none")
    return (losses * counts).sum() / counts.sum().clamp(min=1)


def without_first(value):
    """The mean of a micro-batch without labels, and of another one, is also their sum."""
    return classes(ROWS).where(torch.arange(ROWS) > 0, value)


MEANS = {-100: in_a_def, LEFT_OUT: masked_mean}
NO_SUM = "(?!.*It seems to be a sum)"
SAID = {-100: r".*not -100: .*\(\)", LEFT_OUT: ".*count="}


class OwnLoss(nn.Module):
    """A token classifier with the loss inside, as language models have it: labels are shifted."""

    def __init__(self, *layers):
        super().__init__()
        self.body = token_classifier()
        self.layers = nn.Sequential(*layers)

    def forward(self, ids, labels):
        logits = self.layers(self.body(ids))
        return {"loss": F.cross_entropy(logits[:, :, :-1], labels[:, 1:])}


def at_its_start():
    """With a head of zeros all losses are the same, whatever the weights; gradients tell."""
    model = OwnLoss()
    head = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
    nn.init.zeros_(head.weight), nn.init.zeros_(head.bias)
    return model


def tokens(rows=12, length=6):
    ids, labels = randint(11, rows, length, seed=5), randint(CLASSES, rows, length, seed=6)
    lengths = torch.arange(rows) % length + 1
    padding = torch.arange(length) >= lengths[:, None]
    return {"ids": ids, "labels": labels.masked_fill(padding, -100)}


class Own(Classifier):
    """Computes its own loss, a sum or a mean, behind a layer; and counts its calls."""

    def __init__(self, layer, reduction):
        super().__init__()
        self.layer, self.reduction, self.calls = layer, reduction, [0]

    def forward(self, inputs, targets):
        self.calls[0] += 1
        return F.mse_loss(self.layer(self.linear(inputs)), targets, reduction=self.reduction)


def own(layer, reduction):
    return in_a_module(lambda: Own(layer(), reduction), INPUTS, VALUES)


COUNT = "count=scatterpar.count_labels"
FUNCTION = "(?:pass count=, a function|count=scatterpar.count_labels)"
SUM = 'It seems to be a sum: pass reduction="sum".*count='
MEAN = 'reduction="mean", without count='
SHIFTED = r"count=scatterpar.count_labels\(shifted=True\)"
COUPLED = "compares rows with each other.*pass whole_batch=True.*mean of one loss per row"
SOME_WAY = r"pass (count=|whole_batch=|reduction=)"
REPEATED = torch.tensor([1, 1, 1, 2, 2, 3] * 3 + [3, 3, 3, 2, 1, 2])

WRONG: dict[str, tuple[Case, str]] = {
    "ignored labels in a lambda": (loss_of(lambda o, t: F.cross_entropy(o, t), padded), COUNT),
    "another ignored label in a lambda": (loss_of(leaves_out(1)), FUNCTION),
    "class weights": (loss_of(weighted), FUNCTION),
    "a sum in a lambda": (loss_of(lambda o, t: added_up(o, t)), SUM),
    "a sum divided by a constant": (loss_of(lambda o, t: added_up(o, t) / 256), SUM),
    "a mean that is called a sum": (
        loss_of(in_a_def, reduction="sum"),
        'seems to be a mean over rows: pass reduction="mean", without count=',
    ),
    "a wrong count": (loss_of(nn.MSELoss(), VALUES, count=lambda i, t: t.abs().sum()), MEAN),
    "torch's own loss with another forward": (
        loss_of(with_forward()),
        r"count=lambda inputs, targets: len\(targets\)",
    ),
    "torch's own loss with a hook": (loss_of(hooked()), "whole_batch=True"),
    "rows compared with each other": (loss_of(lambda o, t: o.std(0).sum()), COUPLED),
    "the root of a mean": (loss_of(lambda o, t: o.pow(2).mean().sqrt()), COUPLED),
    "a penalty beside a sum": (
        penalised(share=False),
        "add something that does not depend on the rows.*len.output. /",
    ),
    "a penalty on gradients": (loss_of(of_slopes, VALUES), SOME_WAY),
    "a mask that the module passes on": (loss_of(masked, None, model=passes), "count="),
    **{
        f"one label {value}, {options}": (
            loss_of(mean, without_first(value), accum=8, **options),
            "count=" if options else NO_SUM + SAID[value],
        )
        for value, mean in MEANS.items()
        for options in ({}, {"reduction": "sum"})
    },
    "a label that a child of the criterion leaves out": (
        loss_of(HasALoss(), torch.tensor([3] * 3 + [0, 1, 2] * 7), accum=8),
        r"count_labels\(3\)",
    ),
    # Two micro-batches that held as many of it once agreed, and stood for all others.
    "a label in a closure": (loss_of(leaves_out(2), REPEATED, accum=8), "count="),
    "in a module": (in_a_module(OwnLoss, batch=tokens()), SHIFTED),
    "in a module, badly counted": (
        in_a_module(OwnLoss, batch=tokens(), count=count_labels()),
        SHIFTED,
    ),
    "in a module, passed on": (
        Case(OwnLoss, (tokens(), None), lambda _: lambda output, _: output["loss"], accum=3),
        SHIFTED,
    ),
    "in a module at its start": (in_a_module(at_its_start, batch=tokens()), "count="),
}


RIGHT = {
    "a mean": loss_of(in_a_def),
    "a mean of squares": loss_of(lambda o, t: F.mse_loss(o, t), VALUES),
    "ignored labels, counted": loss_of(in_a_def, padded, count=count_labels()),
    "another ignored label, counted": loss_of(leaves_out(1), count=count_labels(1)),
    "a sum that is called one": loss_of(added_up, reduction="sum"),
    "a row's own root": loss_of(lambda o, t: o.norm(dim=1).mean()),
    "writes into what it is given": loss_of(lambda o, t: F.cross_entropy(o.mul_(2), t.clamp_(0))),
    "a penalty that is shared out": penalised(share=True),
    "a mask that the module passes on, counted": loss_of(
        masked, None, model=passes, count=lambda inputs, _: int((inputs[:, 0] > 0).sum())
    ),
    **{
        f"one label {value}, counted": loss_of(
            mean, without_first(value), accum=8, count=count_labels(value)
        )
        for value, mean in MEANS.items()
    },
    "in a module, counted": in_a_module(OwnLoss, batch=tokens(), count=count_labels(shifted=True)),
    "in a module that counts its calls": own(nn.Identity, "mean"),
}


class Calls:
    """Counts where a look does not put it back: it leaves classes alone."""

    number = 0


def counted(criterion):
    def calls(output, targets):
        Calls.number += 1
        return criterion(output, targets)

    return calls


def assert_agreed(engine, step, looks=True):
    """The first of two steps has a check (more calls), which agrees; without ``looks`` neither."""

    def note(*_):
        Calls.number += 1

    numbers = []
    handle = engine.module.register_forward_pre_hook(note)
    for _ in range(2):
        Calls.number = 0
        step()
        numbers.append(Calls.number)
    handle.remove()
    sub_steps = sum(len(share.micro_batches) for share in engine.last_step.plan.shares)
    assert looks or numbers[1] == sub_steps
    assert (numbers[0] > sub_steps) == looks


def step(engine, criterion, targets, inputs=INPUTS, **options):
    return engine.forward_backward(inputs, targets, criterion, **options)


def train(engine, case, batch=None):
    """A step, on the case's batch or another one."""
    criterion = case.criterion(engine.module)
    return engine.forward_backward(*(batch or case.batch), criterion, **case.options)


@pytest.mark.contract
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_gradient_is_told_before_anything_changes(name):
    case, words = WRONG[name]
    places = ["cpu:0", "cpu:1"] if len(name) % 2 else ["cpu"] * 2
    model = case.build()
    expected = whole_batch(model, *case.all(), case.criterion(model))[1]
    with ScatterOnceParallel(model, case.accum, places) as engine:
        for _ in range(2):  # and it is not taken for verified afterwards
            with nothing_changes(model), pytest.raises(ValueError, match=words) as caught:
                train(engine, case)
            for option in ("count=", "reduction=", "whole_batch="):
                assert option in str(caught.value)
    with ScatterOnceParallel(model, case.accum, places, verify=False) as engine:
        train(engine, case)
    with pytest.raises(AssertionError):  # else the test has no teeth
        assert_gradients(model, expected, 1e-3)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_one_is_verified_once_and_exact(devices, name):
    case = RIGHT[name]
    model, twin, (inputs, targets) = case.build(), case.build(), case.all()
    loss_of_plain(call(twin, inputs), targets, case.criterion(twin)).backward()
    with ScatterOnceParallel(model, case.accum, devices(2)) as engine:
        assert_agreed(engine, functools.partial(train, engine, case))
        model.zero_grad()
        train(engine, case)
    assert_gradients(model, gradients(twin))


# --- the first batch hides it ---


def by_sample(output, targets):
    losses = F.cross_entropy(output, targets[0], reduction="none")
    return (losses * targets[1]).sum() / targets[1].sum()


def without_nan(output, targets):
    return (output[:, 0] - targets)[~targets.isnan()].square().mean()


class Tokens(nn.Module):
    """Pads with a word of the vocabulary."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))

    def forward(self, ids):
        return F.cross_entropy(self.body(ids[:, :-1]).mT, ids[:, 1:], ignore_index=5)


def words(pad, length=6):
    """Token rows; ``pad`` is a word of the vocabulary like any other, and they may have none."""
    ids = randint(11, 16, length, seed=3)
    ids[:, -1] = (ids[:, -2] + 1) % 11
    if pad is not None:
        return ids.masked_fill(torch.arange(length) >= (torch.arange(16) % 5 + 1)[:, None], pad)
    ids = ids.where(ids != 5, 6)
    ids[0, 0], ids[1, 0] = 0, 10
    return ids


POSITIVE = randn(ROWS).abs() + 0.5
LATE = {
    "labels left out": (
        loss_of(lambda o, t: F.cross_entropy(o, t)),
        (INPUTS, padded(ROWS)),
        "count=",
    ),
    "sample weights": (
        loss_of(by_sample, (classes(ROWS), torch.ones(ROWS))),
        (INPUTS, (classes(ROWS), torch.linspace(0.1, 3, ROWS))),
        "count=",
    ),
    "NaN": (
        loss_of(without_nan, POSITIVE, accum=8),
        (INPUTS, POSITIVE.where(torch.arange(ROWS) >= 2, torch.nan)),
        "count=",
    ),
    "padding with a word of the vocabulary": (
        in_a_module(Tokens, words(None)),
        ((words(5),), None),
        r"count_labels\(5, shifted=True\)",
    ),
}


@pytest.fixture
def searching():
    """cuDNN searches kernels, before and after the test; other flags of cuDNN do not change."""
    flags = torch.backends.cudnn.enabled, torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.benchmark = True
    yield
    assert torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    assert (torch.backends.cudnn.enabled, torch.backends.cudnn.allow_tf32) == flags


class Flags(nn.Module):
    """Records with how many rows it is called, and whether cuDNN would search a kernel for them."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs):
        Seen.sizes.add((len(inputs), torch.backends.cudnn.benchmark))
        return self.linear(inputs).repeat_interleave(2, 0)


class Seen:
    """Records where a look does not put it back: it leaves classes alone."""

    sizes: ClassVar = set()


@pytest.mark.parametrize("use", ["step", "a check that fails", "inference"])
def test_checks_let_cudnn_search_no_kernels_for_their_sizes(searching, use):
    """After each search torch empties the caches of all devices."""
    model, rows = build(Flags), ROWS // 4
    Seen.sizes.clear()

    def criterion(output, targets):
        if use == "a check that fails" and len(output) != 2 * rows:
            raise IndexError
        return output.square().mean()

    with ScatterOnceParallel(model, 2, ["cpu"] * 2) as engine:
        if use == "inference":
            engine.eval()(INPUTS)
        else:
            engine.forward_backward(INPUTS, None, criterion)
    assert {size for size, is_searched in Seen.sizes if is_searched} == {rows}
    assert {size for size, is_searched in Seen.sizes if not is_searched} - {rows}


@pytest.mark.parametrize("name", LATE)
def test_a_later_batch_shows_it(devices, name):
    """What the first batch had agreed on once stood for all."""
    case, later, said = LATE[name]
    with ScatterOnceParallel(case.build(), case.accum, devices(2)) as engine:
        for _ in range(3):
            train(engine, case)
        with pytest.raises(ValueError, match=said):
            train(engine, case, later)


def test_a_step_of_one_micro_batch_verifies_nothing_of_the_next():
    with ScatterOnceParallel(mlp(), 3, ["cpu"]) as engine:
        step(engine, in_a_def, padded(1), INPUTS[:1])
        with pytest.raises(ValueError, match=COUNT):
            step(engine, in_a_def, padded(ROWS))


def test_a_new_function_at_an_old_address_is_another_criterion():
    """No address is a key: each lambda dies before the next one is made."""
    with ScatterOnceParallel(mlp(), 3, ["cpu"]) as engine:
        for _ in range(2):
            step(engine, lambda o, t, w=None: F.cross_entropy(o, t, w), classes(ROWS))
            with pytest.raises(ValueError, match="count="):
                step(engine, lambda o, t, w=CLASS_WEIGHTS: F.cross_entropy(o, t, w), classes(ROWS))


# --- random numbers and batch normalisation are no excuse ---


def with_dropout(output, targets):
    return squares(F.dropout(output), targets)


class Noise(nn.Module):
    """As a diffusion model draws: a level for each row, and noise for each entry."""

    def forward(self, inputs):
        level = torch.randint(1, 5, (len(inputs), 1)).to(inputs)
        return inputs + level * torch.randn_like(inputs)


def with_own_generator(reduction):
    """Only torch's own numbers were the same for every row: right losses were warned of."""
    generator = torch.Generator().manual_seed(3)

    def noisy(output, targets):
        noise = torch.randn(output.shape, generator=generator, dtype=output.dtype)
        return F.mse_loss(output + noise, targets, reduction=reduction)

    return noisy


def behind(layer):
    """A language model with this layer: refused as it is, and right where count= is given."""

    def case(batch, **options):
        return in_a_module(lambda: OwnLoss(layer()), batch=batch, **options)

    unpadded = {key: value.abs() % 4 for key, value in tokens().items()}
    right = [case(tokens(), count=count_labels(shifted=True)), case(unpadded)]
    return case(tokens()), SHIFTED, right


REFUSED: dict[str, tuple[Case, str, list[Case]]] = {
    "dropout": (
        loss_of(with_dropout, VALUES),
        'reduction="sum"',
        [loss_of(with_dropout, VALUES, reduction="sum")],
    ),
    **{
        f"numbers from one's own generator, a {reduction}": (
            loss_of(noisy := with_own_generator(reduction), VALUES, reduction=other),
            "count=",
            [loss_of(noisy, VALUES, reduction=reduction)],
        )
        for reduction, other in (("mean", "sum"), ("sum", "mean"))
    },
    "a language model with dropout": behind(nn.Dropout),
    "a language model with batch normalisation": behind(lambda: nn.BatchNorm1d(CLASSES)),
    **{
        f"a module's own sum behind {name}": (own(layer, "sum"), SUM, [own(layer, "mean")])
        for name, layer in {
            "dropout": nn.Dropout,
            "batch normalisation": lambda: nn.BatchNorm1d(CLASSES),
            "noise": Noise,
        }.items()
    },
}


@pytest.mark.draws
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", REFUSED)
def test_random_numbers_and_batch_normalisation_are_no_excuse(devices, name):
    """It was warned of once, since all rows of a check had the same random numbers."""
    torch.manual_seed(0)  # one seed in sixty hides the sum in the first step
    case, words, right = REFUSED[name]
    with ScatterOnceParallel(case.build(), 3, devices(2)) as engine:
        for _ in range(2):
            with nothing_changes(engine.module), pytest.raises(ValueError, match=words):
                train(engine, case)
    for each in right:
        with ScatterOnceParallel(each.build(), 3, devices(2)) as another:
            for _ in range(3):
                train(another, each)


# --- ready counts ---


def test_count_labels_counts_what_the_loss_averages_over():
    labels = torch.tensor([[5, 6, 7], [5, -100, -100], [-100, 2, -100]])
    assert count_labels()(None, labels) == 5
    assert count_labels(shifted=True)(None, labels) == 3
    assert count_labels(5)(None, labels) == 7
    assert count_labels()({"labels": labels}, None) == 5
    assert count_labels(key="y")({"labels": labels}, {"y": labels[:1]}) == 3
    assert pickle.loads(pickle.dumps(count_labels(shifted=True)))(None, labels) == 3


def test_a_student_that_begins_as_its_teacher_is_no_false_alarm(devices):
    """The loss is zero; a wrong one is refused nevertheless."""
    student, inputs = build(lambda: nn.Linear(4, 3)), randn(33, 4)
    teacher = copy.deepcopy(student).requires_grad_(False)

    def distance(output, inputs):
        return nn.functional.mse_loss(output, teacher(inputs))

    def divergence(output, inputs):
        both = output.log_softmax(1), teacher(inputs).log_softmax(1)
        return nn.functional.kl_div(*both, reduction="batchmean", log_target=True)

    engine = ScatterOnceParallel(student, 2, devices(3))
    for criterion in (distance, divergence):
        assert engine.forward_backward(inputs, inputs, criterion).item() < 1e-20
    with pytest.raises(ValueError, match="whole_batch=True"):
        engine.forward_backward(
            inputs, inputs, lambda *args: 33 * (distance(*args) + args[0].std())
        )
