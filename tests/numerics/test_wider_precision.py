"""Looks at programs in half precision: rounding is no reason for a refusal, nor an excuse."""

from __future__ import annotations

import itertools
from copy import deepcopy

import pytest
import torch
from harness.half_programs import program
from harness.looks import calls, step
from harness.models import CLASSES, FEATURES
from harness.oracle import randint, randn, seeded
from harness.pairwise import few_of
from torch import Tensor, nn
from torch.nn import functional as F

from scatterpar import DataParallelCriterion, ScatterOnceParallel
from scatterpar.batch import nested
from scatterpar.numerics import wider_precision
from scatterpar.numerics.wider_precision import Precision, WiderCasts, WiderLayers

ROWS = 24
HALF = torch.float16, torch.bfloat16
INPUTS = randn(ROWS, FEATURES)
LABELS = randint(CLASSES, ROWS)


def seeds(*numbers):
    """The first program, and slow ones: these and the first 30."""
    more = [
        pytest.param(seed, marks=pytest.mark.slow) for seed in (*range(1, 30), *numbers)
    ]
    return [0, *more]


@pytest.mark.draws
@pytest.mark.filterwarnings("error:could not check")
@pytest.mark.parametrize("seed", seeds(54, 216, 234))
def test_right_half_program_not_refused(seed):
    right = program(seed, is_right=True)
    assert right.error() < 1e-6, right.name
    right.step()


@pytest.mark.draws
@pytest.mark.parametrize("seed", seeds(92, 106, 119))
def test_half_hides_no_float64_mistake(seed):
    """Of 44 wrong programs 9 were silent: their difference could have been rounding."""
    wrong = program(seed, is_right=False)
    try:
        wrong.step(dtype=torch.float64)
    except ValueError:
        with pytest.raises(ValueError, match="would be off by"):
            wrong.step()


# --- right programs that were refused ---


def sums_that_cancel(output, labels):
    return (output * 300).mean() - (299.5 * output).mean()


def rounded_sums_that_cancel(output, labels):
    return (output.float() * 300).half().float().mean() - 299.5 * output.mean()


def hinge(output, labels):
    return F.multi_margin_loss(output.float(), labels)


def distances(output, labels):
    signs = 2 * (labels > 0).to(output.dtype) - 1
    return F.hinge_embedding_loss(output[:, 0].abs(), signs)


def normalised():
    """Its first biases have no gradient but rounding, in which large terms cancel."""
    layers = [nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(8, CLASSES), nn.BatchNorm1d(CLASSES))


@pytest.mark.parametrize("dtype", few_of(HALF, HALF[:1]))
@pytest.mark.parametrize(
    "loss",
    few_of(
        [sums_that_cancel, rounded_sums_that_cancel, hinge, distances],
        [rounded_sums_that_cancel, distances],
    ),
)
def test_cancelling_terms_not_refused(loss, dtype):
    for seed in range(3):
        with seeded(seed):
            model = normalised()
            model(INPUTS.float())
            model.to(dtype)
        with ScatterOnceParallel(model, 3, ["cpu"] * 2) as engine:
            step(engine, loss, LABELS, INPUTS.to(dtype))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", few_of(HALF, HALF[:1]))
def test_half_teacher_not_refused(dtype):
    """No graph shows that a teacher rounds, and each number of rows rounds apart."""
    with seeded(1):
        teacher = normalised().to(dtype).eval().requires_grad_(False)
        student = normalised().eval()

    def distils(output, inputs):
        scores = teacher(inputs.to(dtype))
        rounding = 8 * torch.finfo(scores.dtype).eps * (len(inputs) % 7) / 7
        goal = (scores * (1 + rounding)).float().softmax(-1)
        return F.kl_div(output.log_softmax(-1), goal, reduction="batchmean")

    student.load_state_dict(teacher.float().state_dict())
    teacher.to(dtype)
    inputs = INPUTS.float()
    with ScatterOnceParallel(student, 3, ["cpu"] * 2) as engine:
        step(engine, distils, inputs, inputs)


# --- gradients that nearly cancel ---


def network(width=1):
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.GELU(), nn.Linear(16, width))


class Scorer(nn.Module):
    """One score for each of several nearly equal choices of a row."""

    def __init__(self):
        super().__init__()
        self.scores = network()

    def forward(self, choices):
        return self.scores(choices).squeeze(-1)


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = network(4)

    def forward(self, first, second):
        return self.features(first), self.features(second)


class Distilled(nn.Module):
    """A student near its teacher, which no module registers."""

    def __init__(self):
        super().__init__()
        self.student = network(4)
        self.teacher = [deepcopy(self.student).requires_grad_(False)]
        with torch.no_grad():
            for parameter in self.student.parameters():
                parameter.mul_(1 + 1e-4)

    def forward(self, rows):
        return self.student(rows), self.teacher[0](rows)


def squared_distance(output, _):
    return (output[0] - output[1]).square().sum(-1).mean()


def preference(output, _):
    margin = output[0][:, 0] - output[1][:, 0]
    return -F.logsigmoid(0.1 * margin).mean()


def similarity(output, _):
    return (1 - F.cosine_similarity(*output)).mean()


def divergence(output, _):
    student, teacher = output
    return F.kl_div(student.log_softmax(-1), teacher.softmax(-1), reduction="batchmean")


def advantages(output, values):
    return -(output.log_softmax(-1)[:, 0] * (values - 1)).mean()


EQUAL = torch.ones(12, FEATURES)
VARIED = INPUTS[:12].float()
NEAR = VARIED, VARIED + 1e-6 * INPUTS[12:].float()
CHOICES = VARIED[:, None] + 1e-6 * randn(12, 4, FEATURES).float()
CLASSES_IN_TURN = torch.arange(12) % 3
# The module, inputs, targets, criterion, and rate of the steps.
CANCELLING = {
    "optimum of cross entropy": (
        lambda: nn.Linear(FEATURES, 3),
        (EQUAL, CLASSES_IN_TURN, F.cross_entropy, 0.5),
    ),
    "optimum of a regression": (
        network,
        (EQUAL, CLASSES_IN_TURN[:, None] - 1.0, F.mse_loss, 0.1),
    ),
    "nearly equal choices": (Scorer, (CHOICES, randint(4, 12), F.cross_entropy, 0.05)),
    "nearly equal pairs": (Siamese, (NEAR, None, squared_distance, 0.05)),
    "nearly equal preferences": (Siamese, (NEAR, None, preference, 0.05)),
    "nearly equal directions": (Siamese, (NEAR, None, similarity, 0.05)),
    "a student near its teacher": (Distilled, (VARIED, None, divergence, 0.01)),
    "centred advantages": (
        lambda: network(3),
        (EQUAL, torch.arange(12) % 3 * 1.0, advantages, 0.01),
    ),
}
FORMATS = ["float32", "autocast", "float64"]
STEPS = 65  # the seventh look is in step 64


def in_format(name, values):
    """The same values in float64, if that is the format."""
    if name != "float64":
        return values
    return nested.map_tensors(
        lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, values
    )


QUICK = [
    ("optimum of cross entropy", "autocast", 0),
    ("centred advantages", "float64", 0),
    ("nearly equal pairs", "float32", 0),
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("name", "format_name", "seed"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in itertools.product(CANCELLING, FORMATS, [0, 1])
    ],
)
def test_cancelling_gradients_not_refused(name, format_name, seed):
    """Cross entropy at its optimum was refused, "off by 40 %": its gradient was rounding.
    Parameters that are nudged move all choices of a row alike.
    """
    make, (inputs, targets, loss, rate) = CANCELLING[name]
    inputs, targets = in_format(format_name, (inputs, targets))
    with seeded(seed):
        model = make()
    if format_name == "float64":
        model.double()
        for teacher in getattr(model, "teacher", ()):
            teacher.double()
    optimizer = torch.optim.SGD(model.parameters(), rate)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=format_name == "autocast")
    with ScatterOnceParallel(model, 2, ["cpu"] * 2) as engine:
        for _ in range(STEPS):
            optimizer.zero_grad()
            with autocast:
                engine.forward_backward(inputs, targets, loss)
            optimizer.step()


def summed_distance(output, _):
    return (output[0] - output[1]).square().sum()


def coupled_choices(scores, labels):
    return F.cross_entropy(scores - scores.mean(0), labels)


@pytest.mark.parametrize(
    ("make", "inputs", "loss"),
    [(Siamese, NEAR, summed_distance), (Scorer, CHOICES, coupled_choices)],
    ids=["sum", "rows are compared"],
)
def test_mistake_refused_where_gradients_cancel(make, inputs, loss):
    """In float32 the differences could be rounding."""
    with seeded(0):
        model = make()
    labels = torch.arange(12) % 4
    with (
        ScatterOnceParallel(model, 2, ["cpu"] * 2) as engine,
        pytest.raises(ValueError, match="would be off by"),
    ):
        engine.forward_backward(inputs, labels, loss)


# --- wrong programs, and code that needs its dtype ---


def summed(output, labels):
    return F.cross_entropy(output.float(), labels, reduction="sum")


def summed_in_its_dtype(output, labels):
    assert output.dtype in HALF
    return summed(output, labels)


@pytest.mark.parametrize("dtype", few_of(HALF, HALF[1:]))
@pytest.mark.parametrize("loss", [summed, summed_in_its_dtype])
def test_half_sum_refused(loss, dtype):
    with seeded(0):
        model = normalised().to(dtype)
    with (
        ScatterOnceParallel(model, 3, ["cpu"] * 2) as engine,
        pytest.raises(ValueError, match='pass reduction="sum"'),
    ):
        step(engine, loss, LABELS, INPUTS.to(dtype))


@pytest.mark.parametrize("dtype", few_of(HALF, HALF[1:]))
def test_pair_computes_half_in_single(dtype):
    output = INPUTS.to(dtype).requires_grad_()
    halves = output[:12], output[12:]
    DataParallelCriterion(sums_that_cancel, ["cpu"] * 2)(halves, LABELS)
    with pytest.raises(ValueError, match='pass reduction="sum"'):
        DataParallelCriterion(summed, ["cpu"] * 2)(halves, LABELS)


# --- what a look needs ---


class Wide(nn.Module):
    """Each row's graph keeps a megabyte."""

    def __init__(self):
        super().__init__()
        self.columns = nn.Parameter(torch.ones(2**19, dtype=torch.float16))

    def forward(self, inputs):
        calls().seen.append(len(inputs))
        return inputs[:, :1] * self.columns


def test_single_look_takes_one_sub_step():
    """They need as much memory as two sub-steps."""
    calls().seen = []
    with ScatterOnceParallel(Wide(), 1, ["cpu"], micro_batch_size=4) as engine:
        step(engine, lambda o, t: o.float().square().mean(), None, INPUTS[:12].half())
    assert max(calls().seen) == 4


class Halves(nn.Module):
    """A weight, one that is not trained, statistics, and a table of integers."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((2, 3), 1 / 3, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.ones(3).half(), requires_grad=False)
        self.register_buffer("mean", torch.ones(3).half())
        self.register_buffer("table", torch.arange(3))


def test_narrowed_tensors_have_their_memory():
    module = Halves()
    tensors = [*module.parameters(), *module.buffers()]
    saved = [tensor.data for tensor in tensors]
    single = WiderLayers(module.modules(), Precision.SINGLE.formats)
    assert single.size == 2 * (6 + 3 + 3)
    single.widen()
    assert [tensor.dtype for tensor in tensors] == [torch.float32] * 3 + [torch.int64]
    module.mean += 1
    single.widen()  # as after a restart: what was widened stays
    single.narrow()
    assert all(map(Tensor.is_set_to, tensors, saved))
    assert module.mean.tolist() == [1, 1, 1]


def test_gradient_of_widened_leaf_not_rounded():
    """Also that of a replica's leaf, whose gradients have a dtype of their own."""
    module = Halves()
    weight = module.weight
    weight.grad_dtype = torch.bfloat16
    single = WiderLayers([module], Precision.SINGLE.formats)
    single.widen()
    (gradient,) = torch.autograd.grad(
        (torch.full((5, 2), 1 / 3) @ weight).sum(), [weight]
    )
    assert torch.allclose(gradient, torch.full((2, 3), 5 / 3), rtol=1e-6)
    single.narrow()
    assert weight.grad_dtype == weight.dtype == torch.bfloat16


def test_weights_in_one_memory_share_a_copy():
    """Those of a replica are in the memory of the user's; buffers are its own."""
    module, replica = Halves(), Halves()
    for tensor, copy in zip(module.parameters(), replica.parameters(), strict=True):
        copy.data = tensor.data
    WiderLayers([module, replica], Precision.SINGLE.formats).widen()
    pairs = zip(module.parameters(), replica.parameters(), strict=True)
    assert all(copy.is_set_to(tensor) for tensor, copy in pairs)
    assert not replica.mean.is_set_to(module.mean)


def test_large_models_are_not_widened(monkeypatch):
    monkeypatch.setattr(wider_precision, "MAX_BYTES_IN_SINGLE", 2)
    seen = []

    def noted(output, labels):
        seen.append(output.dtype)
        return F.cross_entropy(output.float(), labels)

    with seeded(0):
        model = normalised().half()
    with ScatterOnceParallel(model, 3, ["cpu"] * 2) as engine:
        step(engine, noted, LABELS, INPUTS.half())
    assert {*seen} == {torch.float16}


def test_casts_give_double_precision():
    numbers = torch.ones(3)
    with WiderCasts(Precision.DOUBLE):
        casts = [numbers.float(), numbers.half(), numbers.to(torch.float32)]
        casts.append(torch.zeros(3, dtype=torch.bfloat16))
        # A tensor that no layer holds, beside one that was widened.
        casts.append(F.linear(torch.ones(2, 3).double(), torch.ones(4, 3)))
        casts.append(torch.cat([casts[0], numbers]))
        kept = [numbers + 1, numbers.mul_(casts[0])]
        numbers[0] = casts[0][0]
    assert {tensor.dtype for tensor in casts} == {torch.float64}
    assert {tensor.dtype for tensor in (*kept, numbers)} == {torch.float32}


def test_casts_give_single_precision():
    numbers = torch.ones(3, dtype=torch.float64)
    with WiderCasts(Precision.SINGLE):
        casts = [numbers.half(), numbers.bfloat16(), numbers.to(torch.float16)]
        casts.append(torch.zeros(3, dtype=torch.bfloat16))
        assert numbers.to(torch.int32).dtype == torch.int32
    assert {tensor.dtype for tensor in casts} == {torch.float32}
    assert numbers.half().dtype == torch.float16
