"""Looks at programs in half precision: rounding is no reason for a refusal, nor an excuse."""

from __future__ import annotations

import pytest
import torch
from harness.half_programs import program
from harness.looks import calls, step
from harness.models import CLASSES, FEATURES
from harness.oracle import randint, randn, seeded
from harness.pairwise import few_of
from torch import nn
from torch.nn import functional as F

from scatterpar import DataParallelCriterion, ScatterOnceParallel
from scatterpar.verify.single_precision import SinglePrecision

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


@pytest.mark.parametrize("dtype", HALF)
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


def test_views_shared_writes_keep_dtype():
    numbers = torch.ones(4, dtype=torch.float16)
    with SinglePrecision():
        numbers[1:].add_(1)
        numbers[0] = 5
        assert (numbers + 0).dtype == torch.float32
        assert numbers.half() is numbers
    assert numbers.dtype == torch.float16
    assert numbers.tolist() == [5, 2, 2, 2]


def test_gradient_known_before_rounding():
    weight = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
    mode = SinglePrecision()
    with mode:
        loss = (torch.full((5, 3), 1 / 3) @ weight.mT).sum()
        (gradient,) = torch.autograd.grad(loss, [weight])
    assert gradient.dtype == torch.bfloat16
    assert mode.unrounded(gradient).dtype == torch.float32
    assert torch.allclose(mode.unrounded(gradient), torch.full((2, 3), 5 / 3))
