"""How a step is run, and what is refused."""

import numpy
import pytest
import torch
from splitting.loop_models import (
    Net,
    Tagger,
    average,
    backward_sums,
    class_loss,
    images,
    new,
    num_rows,
    token_loss,
    tokens,
)
from torch import nn
from torch.nn.functional import cross_entropy

from scatterpar import splitcheck
from scatterpar.splitting.split_arguments import SplitArguments
from scatterpar.splitting.trial import Trial


def test_one_part_compared_with_a_loss():
    report = splitcheck(backward_sums, new(Net), images(), parts=1, loss=class_loss)
    report.assert_passed()


@pytest.mark.parametrize("step", [lambda *_: None, lambda model, _: model.zero_grad()])
def test_step_without_gradient_refused(step):
    with pytest.raises(ValueError, match="left no gradient"):
        splitcheck(step, new(Net), images())


def test_failed_diagnosis_leaves_verdict():
    """A part by itself fails, as one without labels may."""

    def step(model, batches):
        if len(batches) == 1 and num_rows(batches) < 24:
            raise ZeroDivisionError("no labels")
        for batch in batches:
            (class_loss(model, batch).exp() / len(batches)).backward()

    report = splitcheck(step, new(Net), images())
    assert not report.passed
    assert report.cause == "unknown"
    assert "ZeroDivisionError: no labels" in report.why


def test_differing_numpy_draws_are_told():
    def step(model, batches):
        for batch in batches:
            weight = numpy.random.rand()
            loss = weight * class_loss(model, batch, "sum") / num_rows(batches)
            loss.backward()

    report = splitcheck(step, new(Net), images())
    assert not report.passed
    assert "draws from the generator of NumPy" in report.why


def test_rounding_of_own_dtype_passes():
    def step(model, batches):
        for pixels, classes in batches:
            hidden = torch.relu(model.first(pixels)).float()
            outputs = nn.functional.linear(hidden, model.last.weight.float())
            loss = cross_entropy(outputs, classes, reduction="sum")
            (loss / num_rows(batches)).backward()

    report = splitcheck(step, new(Net), images())
    report.assert_passed()
    assert 0 < report.worst < 1e-5


def test_equal_label_counts_are_noted():
    ids, labels = tokens()

    def step(model, batches):
        count = sum(labels.numel() for _, labels in batches)
        for batch in batches:
            (token_loss(model, batch, "sum") / count).backward()

    model = new(lambda: nn.Sequential(nn.Embedding(50, 4), nn.Linear(4, 50)))
    report = splitcheck(step, model, (ids, ids))
    assert "give some rows labels of -100" in str(report)
    report = splitcheck(step, model, (ids, labels))
    assert report.note == ""


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


def trial_of(step, **others):
    options = {"ranks": 1, "equal": None, "timeout": 60.0, **others}
    return Trial(SplitArguments(step, new(Net), images(), **options))


def test_parameters_beyond_limit_are_named():
    expected = {"weight": numbers(1, -4), "bias": numbers(2)}
    actual = {"weight": numbers(1, -4.004), "bias": numbers(2.1)}
    trial = trial_of(backward_sums)
    assert trial.differing(actual, expected) == ["weight", "bias"]
    trial.limit = 0.01
    assert trial.differing(actual, expected) == ["bias"]


def test_gradient_beside_a_larger_one_is_invisible():
    gradients = {"weight": numbers(1, -4), "bias": numbers(1e-12)}
    assert trial_of(backward_sums).invisible(gradients) == ["bias"]


# --- what could hide a difference ---


def masked_rows(alternating=True):
    """Ids that rise, targets, and masks of two and of eight entries."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.arange(16)[:, None] * 3 + torch.arange(8) % 3
    targets = torch.randint(0, 50, (16, 8), generator=generator)
    is_short = torch.arange(16) % 2 == 0 if alternating else torch.arange(16) < 0
    lengths = torch.where(is_short, 2, 8)
    return ids, targets, torch.arange(8) < lengths[:, None]


def mean_over_the_mask(model, batches):
    for ids, targets, mask in batches:
        logits = model(ids).flatten(0, 1)
        losses = cross_entropy(logits, targets.flatten(), reduction="none")
        loss = (losses * mask.flatten()).sum() / mask.sum()
        (loss / len(batches)).backward()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize(
    "options", [{}, {"parts": 2}, pytest.param({"ranks": 2}, marks=pytest.mark.slow)]
)
def test_mask_that_alternates_is_seen(dtype, options):
    ids, targets, mask = masked_rows()
    batch = ids, targets, mask.to(dtype)
    if "ranks" in options:
        report = splitcheck(averaged_means, new(Tagger), batch, equal=True, **options)
    else:
        step = mean_over_the_mask
        report = splitcheck(step, new(Tagger), batch, equal=True, **options)
    assert report.cause == "mean of means"


def averaged_means(model, batches):
    mean_over_the_mask(model, batches)
    average(model)


def added_means(model, batches):
    for pixels, classes in batches:
        losses = cross_entropy(model(pixels), classes, reduction="none")
        (losses.sum() / (classes != -100).sum().clamp_min(1)).backward()


def test_part_without_terms_gets_some():
    """With all labels in the first part, a sum of means would be the mean."""
    pixels, classes = images(16)
    half = classes.masked_fill(torch.arange(16) % 2 == 0, -100)
    report = splitcheck(added_means, new(Net), (pixels, half), parts=2, equal=True)
    assert report.cause == "sum of means"
    few = classes.masked_fill(torch.arange(16) > 0, -100)
    report = splitcheck(added_means, new(Net), (pixels, few), parts=2, equal=True)
    report.assert_passed()
    assert "labels that are not -100 are counted right in batch[1]" in report.note
    assert "or some part has none" in report.note


def test_mask_of_ones_is_noted():
    batch = masked_rows(alternating=False)
    report = splitcheck(mean_over_the_mask, new(Tagger), batch, equal=True)
    report.assert_passed()
    assert "entries that are not 0 are counted right in batch[2]" in report.note


class Proxies(nn.Module):
    def __init__(self):
        super().__init__()
        self.proxies = nn.Parameter(torch.randn(5, 4))

    def forward(self, outputs, classes):
        return cross_entropy(outputs @ self.proxies.T, classes)


def trained_with(criterion, *, optimizers=1, factor=1):
    """A step whose criterion counts ``factor`` times; the model is right."""

    def step(model, batches):
        for pixels, classes in batches:
            outputs = model(pixels)
            frozen = [parameter.detach() for parameter in criterion.parameters()]
            loss = cross_entropy(outputs @ frozen[0].T, classes) / len(batches)
            (
                loss + factor / len(batches) * criterion(outputs.detach(), classes)
            ).backward()
        model_parameters = list(model.parameters())
        if optimizers == 1:
            torch.optim.SGD([*model_parameters, *criterion.parameters()], 0.1).step()
        if optimizers == 2:
            torch.optim.Adam(model_parameters).step()
            torch.optim.SGD(criterion.parameters(), 0.1).step()

    return step


@pytest.mark.parametrize("optimizers", [0, 1, 2])
def test_parameters_of_criterion_are_compared(optimizers):
    criterion = new(Proxies)
    step = trained_with(criterion, optimizers=optimizers)
    splitcheck(step, new(Net), images(), equal=True).assert_passed()
    step = trained_with(criterion, optimizers=optimizers, factor=0)
    splitcheck(step, new(Net), images(), equal=True).assert_passed()

    def wrong(model, batches):
        trained_with(criterion, optimizers=optimizers, factor=len(batches))(
            model, batches
        )

    report = splitcheck(wrong, new(Net), images(), equal=True)
    assert report.cause == "constant factor"
    assert "In step.criterion.proxies the gradient is 4 times" in report.why
    assert criterion.proxies.grad is None


def test_head_in_the_optimizer_is_compared():
    def step(model, batches):
        head = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()])
        for pixels, classes in batches:
            outputs = model(pixels)
            loss = cross_entropy(head(outputs), classes) / len(batches)
            (loss + head.weight.square().sum()).backward()
        optimizer.step()

    report = splitcheck(step, new(Net), images(), equal=True)
    assert report.cause == "once per part"
    assert "step.AdamW.0.4" in report.why


def test_parameter_without_optimizer_is_noted():
    criterion = new(Proxies)

    def step(model, batches):
        for pixels, classes in batches:
            (criterion(model(pixels), classes) / len(batches)).backward()
        torch.optim.SGD(model.parameters(), 0.1).step()

    report = splitcheck(step, new(Net), images(), equal=True)
    report.assert_passed()
    assert "the gradient of step.criterion.proxies: not compared" in report.note


def test_parameter_of_each_row_is_noted():
    """Codes that the step trains: their shape depends on the split."""

    def step(model, batches):
        for pixels, classes in batches:
            codes = nn.Parameter(torch.zeros(len(pixels), 10))
            parameters = [*model.parameters(), codes]
            loss = cross_entropy(model(pixels + codes), classes, reduction="sum")
            (loss / num_rows(batches)).backward()
        torch.optim.SGD(parameters, 0.1).step()

    report = splitcheck(step, new(Net), images())
    report.assert_passed()
    assert "the gradient of step.SGD.0.4, a parameter of shape" in report.note
    assert "its shape depends on the split" in report.note


CASTS = {
    "to": lambda outputs: outputs.to(torch.bfloat16).float(),
    "half": lambda outputs: outputs.half().float(),
    "twice": lambda outputs: outputs.float().to(torch.float16).float(),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS.keys())
def test_small_mistake_beside_a_cast_is_found(cast):
    def step(model, batches, factor=1):
        for pixels, classes in batches:
            loss = cross_entropy(cast(model(pixels)), classes)
            penalty = 1e-5 * sum(p.square().sum() for p in model.parameters())
            (loss / len(batches) + factor * penalty).backward()

    def right(model, batches):
        step(model, batches, 1 / len(batches))

    report = splitcheck(step, new(Net), images(), equal=True)
    assert report.cause == "once per part"
    assert report.limit == 1e-6
    report = splitcheck(right, new(Net), images(), equal=True)
    report.assert_passed()
    assert report.worst < 1e-9


class SinglePrecisionKernel(torch.autograd.Function):
    """A kernel that takes no float64, as many of those for GPUs."""

    @staticmethod
    def forward(ctx, numbers):
        if numbers.dtype != torch.float32:
            raise TypeError(f"expected float32, got {numbers.dtype}")
        return numbers * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


@pytest.mark.parametrize("casts", [True, False])
def test_kernel_without_float64_widens_the_limit(casts):
    def step(model, batches):
        for pixels, classes in batches:
            outputs = model(pixels)
            if casts:
                outputs = outputs.float()
            outputs = SinglePrecisionKernel.apply(outputs)
            loss = cross_entropy(outputs, classes) / len(batches)
            loss.backward()

    report = splitcheck(step, new(Net), images(), equal=True)
    report.assert_passed()
    if report.limit > 1e-6:
        assert f"an error below {report.limit:.0e} of a gradient" in report.note


def test_constant_weights_leave_a_gradient():
    def step(model, batches):
        head = nn.Linear(4, 3)
        for pixels, classes in batches:
            loss = cross_entropy(head(model(pixels)), classes.clamp_max(2))
            (loss / len(batches)).backward()
        step.largest = max(float(p.grad.abs().max()) for p in model.parameters())

    report = splitcheck(step, new(Net), images(), equal=True)
    report.assert_passed()
    assert report.cosine > 0.99
    assert step.largest > 1e-6


def weighted_by_draws(model, batches):
    for pixels, classes in batches:
        weights = torch.rand(len(pixels))
        losses = cross_entropy(model(pixels), classes, reduction="none")
        ((losses * weights).sum() / weights.sum() / len(batches)).backward()


def timesteps(model, batches):
    for pixels, classes in batches:
        weights = 1.0 + torch.randint(0, 100, (len(pixels),))
        losses = cross_entropy(model(pixels), classes, reduction="none")
        ((losses * weights).sum() / weights.sum() / len(batches)).backward()


def weights_row_by_row(model, batches):
    for pixels, classes in batches:
        weights = torch.stack([torch.rand(()) for _ in pixels])
        losses = cross_entropy(model(pixels), classes, reduction="none")
        ((losses * weights).sum() / weights.sum() / len(batches)).backward()


@pytest.mark.parametrize("step", [weighted_by_draws, timesteps, weights_row_by_row])
def test_draws_of_rows_are_noted(step):
    """All rows get the same numbers, so a sum of these in each part does not show."""
    report = splitcheck(step, new(Net), images(), equal=True)
    report.assert_passed()
    assert "what random numbers of each row decide" in report.note


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_dropout_is_no_draw_of_rows(dropout):
    model = new(lambda: nn.Sequential(Net(), nn.Dropout(dropout), nn.Linear(4, 4)))
    report = splitcheck(backward_sums, model, images())
    report.assert_passed()
    assert report.note == ""


def test_difference_below_limit_is_noted():
    """A term of 1e-7 in each part: rounding is 1e-15."""

    def step(model, batches):
        for batch in batches:
            penalty = sum(p.square().sum() for p in model.parameters())
            loss = class_loss(model, batch) / len(batches)
            (loss + 1e-8 * penalty).backward()

    report = splitcheck(step, new(Net), images(), equal=True)
    report.assert_passed()
    assert "which is more than rounding" in report.note


def test_gradient_that_is_zero_is_noted():
    model = new(Net)
    model.unused = new(lambda: nn.Linear(2, 2))
    report = splitcheck(backward_sums, model, images())
    report.assert_passed()
    assert "the gradient of unused.weight, unused.bias, which is zero" in report.note


def test_comparison_of_nothing_refused():
    def step(model, batches):
        for pixels, _ in batches:
            outputs = model(pixels)
            noise = torch.randn(len(pixels), 1)
            (outputs * (noise - noise.mean())).sum().backward()

    with pytest.raises(ValueError, match="with these the gradient is zero"):
        splitcheck(step, new(Net), images(), equal=True)


# --- what a user is told ---


def test_step_for_one_batch_is_told_so():
    def step(model, batch):
        class_loss(model, batch).backward()

    with pytest.raises(ValueError, match="written for one batch, and gets a list"):
        splitcheck(step, new(Net), images())


def test_error_of_a_step_is_raised():
    def step(model, batches):
        raise ZeroDivisionError("of the step")

    with pytest.raises(ZeroDivisionError, match="of the step"):
        splitcheck(step, new(Net), images())
