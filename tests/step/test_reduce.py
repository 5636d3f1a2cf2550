"""Gradients add up in a wider dtype than they are kept in, with one rounding at the
end.
"""

from __future__ import annotations

import functools

import pytest
import torch
from harness.batches import LABELS
from harness.models import CLASSES, FEATURES, Of, Returns, mlp
from harness.oracle import (
    assert_close,
    assert_gradients,
    build,
    randint,
    randn,
    whole_batch,
)
from harness.rank_processes import Counted, run_on_ranks
from torch import nn

from scatterpar import ScatterOnceParallel

pytestmark = pytest.mark.draws

DEVICES = [["cpu"], ["cpu"] * 2, ["cpu:0", "cpu:1"]]
SUBSTEPS = 64


def one_weight():
    return nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)


def add_ones(model, rows, accum=1, device_ids=None, dtype=torch.bfloat16, **options):
    """Add the gradient of a sum of ones: the number of rows, if nothing is lost."""
    with ScatterOnceParallel(model, accum, device_ids, **options) as engine:
        ones = torch.ones(rows, 1, dtype=dtype)
        engine.forward_backward(
            ones, criterion=lambda out, _: out.sum(), reduction="sum"
        )


@pytest.mark.contract
@pytest.mark.parametrize("device_ids", DEVICES, ids=str)
def test_512_ones_add_up_to_512(device_ids):
    model = one_weight()
    for expected in (512, 1024):
        add_ones(
            model,
            512,
            512 // len(device_ids),
            device_ids,
            accumulate_dtype=torch.float32,
        )
        assert model.weight.grad.dtype == torch.bfloat16
        assert model.weight.grad.item() == expected


@pytest.mark.parametrize("device_ids", DEVICES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sum_is_rounded_once(device_ids, dtype):
    """Every element is the float64 sum of the micro-batches' own gradients, rounded
    once.
    """
    model = build(lambda: nn.Linear(16, 8)).to(dtype)
    inputs, targets = (
        randn(SUBSTEPS, 16).to(dtype),
        randn(SUBSTEPS, 8, seed=3).to(dtype),
    )
    exact = torch.zeros(8, 16, dtype=torch.float64)
    for x, y in zip(inputs.split(1), targets.split(1), strict=True):
        model.zero_grad()
        nn.MSELoss(reduction="sum")(model(x), y).backward()
        exact += model.weight.grad.double()
    model.zero_grad()
    accum, wide = SUBSTEPS // len(device_ids), {"accumulate_dtype": torch.float64}
    with ScatterOnceParallel(model, accum, device_ids, **wide) as engine:
        engine.forward_backward(inputs, targets, nn.MSELoss(reduction="sum"))
    assert torch.equal(model.weight.grad, exact.to(dtype))


@pytest.mark.parametrize("device_ids", DEVICES[2:], ids=str)
def test_grad_dtype_of_user_is_followed(device_ids):
    model = one_weight()
    model.weight.grad_dtype = torch.float32
    for _ in range(2):  # the second one adds to what is there
        add_ones(model, 514, 512 // len(device_ids), device_ids)
    assert model.weight.grad.dtype == torch.float32
    assert model.weight.grad.item() == 1028


def _wide_ranks(group):
    model, rows = one_weight(), 200 + 200 * group.rank()
    with Counted() as collectives:
        add_ones(model, rows, 200, process_group=group, accumulate_dtype=torch.float32)
    return model.weight.grad, [dtype for _, dtype, _ in collectives]


def test_ranks_add_up_in_wide_dtype():
    """200 + 400 ones on two ranks: bfloat16 would give 512 at most."""
    for gradient, dtypes in run_on_ranks(2, _wide_ranks):
        assert gradient.dtype == torch.bfloat16
        assert gradient.item() == 600
        sums = [dtype for dtype in dtypes if dtype.is_floating_point]
        assert sums == [torch.float64, torch.float32], "counts, gradients"


# --- return_outputs=: each replica's outputs, joined; and outputs that are no rows ---

INPUTS = randn(11, FEATURES)


def test_one_ratio_for_all_micro_batches(devices):
    """Rows that have two entries each were joined with rows that have one."""
    ragged = Of(lambda _, rows: rows.repeat(2, 1) if len(rows) > 4 else rows).eval()
    refused = pytest.raises(ValueError, match=r"for 5 rows and .* joined along dim=0")
    with ScatterOnceParallel(ragged, 1, devices(2)) as engine, refused:
        engine(randn(9, FEATURES))


@pytest.mark.contract
@pytest.mark.parametrize("rows", [[4, 4, 3], [1, 1]], ids=str)
def test_return_outputs_one_per_replica(devices, rows):
    """One entry per replica that had rows, on its device: detached, in the module's
    types.
    """
    model = build(
        lambda: Returns(lambda y, x: {"logits": y, "mean": y.mean(), "tag": "t"})
    )
    inputs, targets = INPUTS[: sum(rows)], randint(CLASSES, sum(rows))

    def criterion(output, targets):
        return nn.functional.cross_entropy(output["logits"], targets)

    expected = model(inputs)["logits"].detach()
    with ScatterOnceParallel(model, 2, devices(3)) as engine:
        loss, outputs = engine.forward_backward(
            inputs, targets, criterion, return_outputs=True
        )
        # does not write to these outputs
        engine.forward_backward(inputs * 2, targets, criterion)
    assert loss.shape == ()
    assert isinstance(outputs, tuple)
    assert [len(output["logits"]) for output in outputs] == rows
    for output, part in zip(outputs, expected.split(rows), strict=True):
        assert output["tag"] == "t"
        assert not output["logits"].requires_grad
        assert_close(output["logits"], part, "logits")
        assert_close(
            output["mean"], part.mean(), "0-dim, averaged with the rows as weights"
        )


def test_outputs_without_rows_not_joined(devices):
    """They were, in the order of the pieces: which is that of no row."""
    # A word model that flattens time and rows into one dimension.
    model = build(
        lambda: Of(
            lambda m, x: m.rnn(x)[0].flatten(0, 1), rnn=nn.RNN(FEATURES, CLASSES)
        )
    )
    rows, targets = randn(4, 6, FEATURES), randint(CLASSES, 4, 6)

    def loss(output, targets):
        return nn.functional.cross_entropy(output, targets.flatten())

    def classes(output):
        return output.unflatten(0, (4, -1)).argmax(-1)

    with ScatterOnceParallel(model, 2, devices(2), dim=1) as engine:
        words = r"outputs of shape \(8, 4\) for 2 rows .*joined along dim=1.*"
        with pytest.raises(ValueError, match=words + "return_outputs=function"):
            engine.forward_backward(rows, targets, loss, return_outputs=True)
        assert all(p.grad is None for p in model.parameters())
        _, kept = engine.forward_backward(rows, targets, loss, return_outputs=classes)
        assert torch.equal(torch.cat(kept, 1), classes(model(rows)))
        refused = pytest.raises(ValueError, match=r"joined along dim=1.*engine\.map")
        with refused, torch.no_grad():
            engine(rows)


def test_return_outputs_applies_function(devices):
    model, graphs = mlp(), []

    def keep(output):
        graphs.append((output.requires_grad, torch.is_grad_enabled()))
        return {"right": output.argmax(1), "largest": output.max()}

    batch = INPUTS[:7], LABELS[:7], nn.CrossEntropyLoss()
    _, expected = whole_batch(model, *batch)
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        _, kept = engine.forward_backward(*batch, return_outputs=keep)
    assert_gradients(model, expected)
    assert torch.equal(
        torch.cat([k["right"] for k in kept]), model(INPUTS[:7]).argmax(1)
    )
    assert kept[0]["largest"].shape == ()
    assert graphs == [(False, False)] * 4


# --- buffers of modules that the criterion holds, too ---


class Penalised(nn.Module):
    """A criterion that holds the model, for a penalty on its weights."""

    def __init__(self, model, is_called=False):
        super().__init__()
        self.model = model
        self.is_called = is_called

    def forward(self, output, labels):
        penalty = self.model[0].weight.square().sum()
        if self.is_called:
            penalty = penalty + self.model[2](output.detach()).square().mean()
        return nn.functional.cross_entropy(output, labels) + 0.01 * penalty


def normalised():
    return nn.Sequential(
        nn.Linear(FEATURES, CLASSES), nn.BatchNorm1d(CLASSES), nn.Identity()
    )


def with_teacher(output, labels, net, teacher):
    distance = (output - teacher(labels).detach()).square().mean()
    return nn.functional.cross_entropy(output, labels) + distance + net[0].bias.sum()


def bound(model):
    teacher = nn.Embedding(CLASSES, CLASSES).double().requires_grad_(False)
    return functools.partial(with_teacher, net=model, teacher=teacher)


HOLDERS = {"a module": Penalised, "a partial with a teacher": bound}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
@pytest.mark.parametrize("device_ids", DEVICES, ids="+".join)
def test_buffers_of_model_in_criterion(device_ids, hold):
    """The values of the criterion's copy, as before the step, replaced them."""
    batch = randn(12, FEATURES), randint(CLASSES, 12)
    models = build(normalised), build(normalised)
    buffer = models[0][1].running_mean
    for model, criterion in zip(
        models, (hold(models[0]), nn.CrossEntropyLoss()), strict=True
    ):
        with ScatterOnceParallel(model, 1, device_ids, verify=False) as engine:
            engine.forward_backward(*batch, criterion)
    assert models[0][1].running_mean is buffer
    for (name, found), expected in zip(
        models[0].named_buffers(), models[1].buffers(), strict=True
    ):
        assert torch.equal(found, expected), name
    assert models[0][1].num_batches_tracked == 1


@pytest.mark.parametrize("device_ids", DEVICES, ids="+".join)
def test_buffers_of_part_in_criterion(device_ids):
    model = build(normalised)
    model[2] = nn.BatchNorm1d(CLASSES).double()
    criterion = Penalised(model, is_called=True)
    model.forward = lambda rows: model[1](model[0](rows))
    batch = randn(12, FEATURES), randint(CLASSES, 12)
    with ScatterOnceParallel(model, 1, device_ids, verify=False) as engine:
        engine.forward_backward(*batch, criterion)
    assert model[1].num_batches_tracked == 1
    assert model[2].num_batches_tracked == 1
