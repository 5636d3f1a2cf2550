"""whole_batch=True: the gradient of a loss that sees the outputs of all rows at once."""

from __future__ import annotations

import copy
import itertools
import threading
from dataclasses import replace

import pytest
import torch
from faults.state import capture, differences
from harness.agree import Case, agree
from harness.contrastive import FEATURES, LOSSES, clip, nt_xent, two_views
from harness.models import Classifier, Columns, Returns, linear
from harness.module_cases import InOneMemory
from harness.notes import beginning_of_note
from harness.oracle import (
    assert_close,
    assert_gradients,
    assert_step,
    build,
    gradients,
    randint,
    randn,
)
from harness.pairwise import pairwise
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.utils.parametrizations import spectral_norm

from scatterpar import Replicated, Rows, ScatterOnceParallel
from scatterpar.batch.nested import join_rows


def batch(rows):
    views = randn(rows, FEATURES, seed=rows), randn(rows, FEATURES, seed=rows + 1)
    return views, randint(4, rows, seed=rows)


def pairs(outputs, _):
    """A loss of all pairs of rows: no micro-batch's is any part of it."""
    z = normalize(outputs, dim=1)
    return (z @ z.T).exp().mean().log() + outputs.square().mean()


@pytest.mark.contract
@pairwise(loss=LOSSES, replicas=[1, 2, 4], accum=[1, 3, 16])
def test_the_gradient_is_that_of_the_whole_batch(devices, loss, replicas, accum):
    with ScatterOnceParallel(two_views(), accum, devices(replicas)) as engine:
        for rows in (37, 9, 3, 1):
            assert_step(engine, *batch(rows), LOSSES[loss], whole_batch=True)


# How often what is computed


class Recorder(nn.Module):
    """Writes down the first row of what it sees, by thread: forward, and backward."""

    calls: list = []  # noqa: RUF012 - shared by the replicas

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 2)

    def forward(self, numbers):
        first = int(numbers[0, 0])
        Recorder.calls.append(("forward", first))
        outputs = self.linear(numbers).tanh()
        outputs.register_hook(lambda _: Recorder.calls.append(("backward", first)))
        return outputs


def recorded(accum, devices, rows):
    Recorder.calls.clear()
    numbers = torch.arange(rows, dtype=torch.float64)[:, None]
    with ScatterOnceParallel(build(Recorder), accum, devices) as engine:
        loss = engine.forward_backward(numbers, None, pairs, whole_batch=True)
        assert_close(loss, pairs(engine.module.linear(numbers).tanh(), None).detach(), "loss")
    return list(Recorder.calls)


def test_with_one_micro_batch_per_replica_nothing_is_computed_twice(devices):
    expected = [(what, first) for what in ("backward", "forward") for first in (0, 2, 4)]
    assert sorted(recorded(1, devices(3), 6)) == expected


def test_the_last_graph_is_kept_and_the_others_are_computed_again_in_order():
    assert recorded(3, ["cpu"], 6) == [
        *(("forward", first) for first in (0, 2, 4)),
        ("backward", 4),
        *((what, first) for first in (0, 2) for what in ("forward", "backward")),
    ]


def test_what_has_no_gradient_is_not_computed_again():
    """Only the criterion is trained: the second pass has nothing to do."""
    calls, numbers = [], randn(6, FEATURES)
    model = linear().requires_grad_(False)
    criterion, plain = build(Tempered), build(Tempered)
    plain(model(numbers), None).backward()
    model.register_forward_pre_hook(lambda *_: calls.append(0))
    with ScatterOnceParallel(model, 3, ["cpu"]) as engine:
        engine.forward_backward(numbers, None, criterion, whole_batch=True)
    assert len(calls) == 3
    assert_gradients(criterion, gradients(plain))


# Random numbers


def noisy():
    return build(lambda: nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 4)))


@pytest.mark.contract
@pytest.mark.draws
def test_same_seed_same_bits_and_the_random_state_moves_as_in_an_ordinary_step(devices):
    found, states = [], []
    with ScatterOnceParallel(noisy(), 3, devices(3), verify=False) as engine:
        for whole in (True, True, False):
            torch.manual_seed(7)
            engine.module.zero_grad()
            engine.forward_backward(randn(20, 5), None, pairs, whole_batch=whole)
            found.append(gradients(engine.module))
            states.append(torch.get_rng_state())
    assert all(map(torch.equal, found[0].values(), found[1].values()))
    assert all(torch.equal(states[0], state) for state in states)


@pytest.mark.draws
@pytest.mark.parametrize("replicas", [1, 3])
def test_a_criterion_draws_on_from_where_the_module_stopped(devices, replicas):
    def subsampled(outputs, _):
        return pairs(outputs[torch.randperm(len(outputs))[:5]], None)

    model = build(lambda: nn.Linear(5, 4))
    with ScatterOnceParallel(model, 2, devices(replicas)) as engine:
        torch.manual_seed(3)
        expected = subsampled(model(randn(12, 5)), None).detach()
        after = torch.get_rng_state()
        torch.manual_seed(3)
        loss = engine.forward_backward(randn(12, 5), None, subsampled, whole_batch=True)
    assert_close(loss, expected, "loss")
    assert torch.equal(torch.get_rng_state(), after)


SECOND = {
    "gave other outputs.*the random numbers of Python or NumPy": lambda out, n: out * (n + 1),
    "outputs of another kind": lambda out, n: out[:, n // 4 :],
}


@pytest.mark.parametrize("words", SECOND)
def test_what_differs_the_second_time_is_refused(devices, words):
    """By a count of its own, which nothing puts back."""
    calls = itertools.count()
    model = build(lambda: Returns(lambda outputs, _: SECOND[words](outputs, next(calls))))
    model.linear.weight.grad = torch.ones_like(model.linear.weight)
    before = capture(model)
    with ScatterOnceParallel(model, 2, devices(2), verify=False) as engine:
        with pytest.raises(RuntimeError, match=words) as error:
            engine.forward_backward(randn(8, FEATURES), None, pairs, whole_batch=True)
        begins = tuple(beginning_of_note(i, devices(2)[i], 0, of=2) for i in (0, 1))
        assert error.value.__notes__[0].startswith(begins)
    assert differences(before, capture(model)) == []
    with ScatterOnceParallel(model, 1, devices(1), verify=False) as engine:  # its way out
        engine.forward_backward(randn(8, FEATURES), None, pairs, whole_batch=True)


# State


class Counted(Classifier):
    """Computes otherwise in every second call: a plain counter, and one in a buffer."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, inputs):
        self.calls += 1
        self.seen = self.seen + len(inputs)  # rebound, not written
        outputs = self.linear(inputs) * (1 + self.calls % 2)
        return outputs + self.seen


class Queued(Classifier):
    """A criterion that is a method of the model, and writes to a buffer of the model's."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("queue", torch.ones(3, 4))

    def forward(self, inputs):
        return self.linear(self.norm(inputs))

    def loss(self, outputs, labels):
        logits = self.scale.exp() * outputs @ torch.cat([outputs.detach(), self.queue]).T
        self.queue.copy_(outputs.detach()[:3])
        return cross_entropy(logits, torch.arange(len(outputs)))


def normed():
    return nn.Sequential(nn.Linear(FEATURES, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh())


def stateful(make):
    return Case(make, (randn(19, FEATURES), None), lambda _: pairs, by_share=True)


STATEFUL = {
    "batch norm": stateful(normed),
    "spectral norm": stateful(
        lambda: nn.Sequential(spectral_norm(nn.Linear(FEATURES, 6)), nn.Tanh())
    ),
    "counters": stateful(Counted),
}


@pytest.mark.parametrize("accum", [1, 3])
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("kind", STATEFUL)
def test_state_moves_once_and_is_the_same_in_both_passes(devices, kind, replicas, accum):
    agree(replace(STATEFUL[kind], accum=accum), "whole batch", devices(replicas))


class Tempered(nn.Module):
    """A criterion with a parameter, a projection head and a queue of its own."""

    def __init__(self, tied=None):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.head = nn.Linear(4, 4) if tied is None else tied
        self.register_buffer("queue", torch.ones(2, 4))

    def forward(self, outputs, labels):
        z = self.head(outputs)
        logits = self.scale.exp() * z @ torch.cat([outputs, self.queue]).T
        self.queue.copy_(z.detach()[:2])  # the next loss depends on it
        return cross_entropy(logits, torch.arange(len(outputs)))


def test_a_criterion_alternates_between_whole_batches_and_micro_batches(devices):
    """Replicated everywhere for one, on the master alone for the other."""
    model, criterion = linear(), build(Tempered)
    with ScatterOnceParallel(model, 1, devices(2), verify=False) as engine:
        for whole in (True, False, True):
            engine.forward_backward(randn(8, FEATURES), None, criterion, whole_batch=whole)
    assert criterion.scale.grad is not None


# Outputs


class Everything(Classifier):
    """Outputs of all kinds, some of them unused, some in place."""

    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(0.2))

    def forward(self, inputs):
        z = self.linear(inputs).mul_(2).tanh_()
        return {
            "z": z,
            "again": z,
            "nested": (z.square(), [z.argmax(1), "text", None]),
            "scale": self.log_scale.exp(),
            "itself": self.log_scale,
            "unused": z * 3,
            "doubled": torch.stack([z, -z], 1).flatten(0, 1),
            "constant": torch.ones(len(inputs), 2),
        }


def of_everything(outputs, _):
    square, (classes, text, nothing) = outputs["nested"]
    assert (text, nothing) == ("text", None)
    assert classes.dtype == torch.long
    assert outputs["doubled"].shape[0] == 2 * len(classes)
    total = pairs(outputs["z"] + outputs["again"], None) * outputs["scale"]
    total = total + (square * classes[:, None]).mean() * outputs["itself"]
    total = total + (outputs["doubled"] @ outputs["doubled"].T).sin().mean()
    return total + outputs["constant"].sum()


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("accum", [1, 2])
def test_a_criterion_may_work_in_place(devices, replicas, accum):
    def in_place(outputs, labels):
        labels += 1
        outputs.mul_(2).sub_(outputs.mean(0, keepdim=True).detach())
        return cross_entropy(outputs @ outputs.T, labels)

    model, expected, labels = linear(), linear(), torch.arange(9) - 1
    in_place(expected(randn(9, FEATURES)), labels.clone()).backward()
    with ScatterOnceParallel(model, accum, devices(replicas)) as engine:
        _, outputs = engine.forward_backward(
            randn(9, FEATURES), labels, in_place, whole_batch=True, return_outputs=True
        )
    assert_gradients(model, gradients(expected))
    assert torch.equal(labels, torch.arange(9) - 1), "the caller's tensors are never written"
    assert_close(torch.cat(outputs), model(randn(9, FEATURES)).detach(), "returned outputs")


class InPlace(Classifier):
    """Normalises its input where it lies, as models that take raw pixels do."""

    def forward(self, inputs):
        rows = [row.sub_(0.5).div_(0.25) for row in inputs]
        return self.linear(torch.stack(rows))


class Masked(Classifier):
    """Infinities and NaN, which the loss masks: they are no difference between the passes."""

    def forward(self, inputs):
        special = torch.tensor([[torch.inf, torch.nan]], dtype=torch.float64)
        return torch.cat([self.linear(inputs), special.expand(len(inputs), 2)], 1)


class Encoder(nn.Module):
    """Under no_grad it takes another way in eval mode, with other outputs."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1).eval()

    def forward(self, tokens, padding):
        return self.encoder(tokens, src_key_padding_mask=padding).sum(1)


class InItsCriterion(InOneMemory):
    """The criterion's gradients share memory, and the model's are added to them."""

    def loss(self, outputs, targets):
        own = self.one.unsqueeze(0) + self.other.unsqueeze(0)
        return cross_entropy(outputs * own, targets)


class Scaled(nn.Linear):
    """The criterion closes over a parameter of it."""

    def __init__(self):
        super().__init__(FEATURES, 4)
        self.scale = nn.Parameter(torch.tensor(0.5))


class Versions:
    """As timm's JsdCrossEntropy: rows are three versions of pictures, one after another."""

    num_splits = 3

    def __call__(self, output, targets):
        clean, *others = output.chunk(self.num_splits)
        far = sum((other.softmax(1) - clean.softmax(1)).square().mean() for other in others)
        return cross_entropy(clean, targets[: len(clean)]) + far


def three_layers():
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 4))


ROWS = randn(13, FEATURES), None
PADDING = torch.arange(6) >= randint(5, 10)[:, None] + 1
CASES = {
    "outputs of all kinds": Case(Everything, ROWS, lambda _: of_everything),
    "a module that writes its input": Case(InPlace, ROWS, lambda _: pairs),
    "infinities": Case(Masked, ROWS, lambda _: lambda outputs, _: pairs(outputs[:, :-2], None)),
    "an encoder in eval mode": Case(Encoder, ((randn(10, 6, 8), PADDING), None), lambda _: pairs),
    "a closure": Case(
        Scaled, ROWS, lambda model: lambda outputs, _: pairs(outputs * model.scale, None)
    ),
    **{
        f"gradients that share memory, {accum}": Case(
            InItsCriterion, (ROWS[0], randint(4, 13)), lambda model: model.loss, accum=accum
        )
        for accum in (1, 2)
    },
    "a criterion with parameters and a queue": Case(
        three_layers, ROWS, lambda _: build(Tempered), accum=3
    ),
    "a criterion that belongs to the model": Case(
        Queued, ROWS, lambda model: model.loss, accum=3, by_share=True
    ),
    "a criterion that shares a layer": Case(
        three_layers, ROWS, lambda model: build(lambda: Tempered(model[2])), accum=3
    ),
    "versions of the same pictures": Case(
        lambda: nn.Linear(5, 3), (randn(24, 5), randint(3, 24)), lambda _: Versions()
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_as_on_one_device(devices, name):
    agree(CASES[name], "whole batch", devices(2))


@pytest.mark.contract
def test_outputs_of_a_whole_batch_are_returned(devices):
    model = two_views()
    views, labels = batch(11)
    with ScatterOnceParallel(model, 2, devices(3)) as engine:
        options = {"whole_batch": True}
        _, outputs = engine.forward_backward(views, labels, clip, return_outputs=True, **options)
        joined = torch.cat([output["one"] for output in outputs])
        assert_close(joined, model(*views)["one"].detach(), "outputs")
        assert all(output["scale"].shape == () for output in outputs)
        _, norms = engine.forward_backward(
            views, labels, clip, return_outputs=lambda output: output["one"].norm(dim=1), **options
        )
        assert_close(torch.cat(norms), joined.norm(dim=1), "norms")


def test_rows_along_another_dimension(devices):
    def criterion(outputs, labels):
        return cross_entropy(outputs.T @ outputs, labels[0])

    with ScatterOnceParallel(build(Columns), 2, devices(2), dim=1) as engine:
        inputs, labels = randn(FEATURES, 11), torch.arange(11)[None]
        assert_step(engine, inputs, labels, criterion, whole_batch=True)


def test_markers_in_inputs_and_targets(devices):
    """Targets with one entry per row, and what has no rows, as the criterion is told."""

    def criterion(outputs, targets):
        names, anchors = targets
        assert names == [f"row {n}" for n in range(7)]
        return pairs(outputs @ anchors, None)

    inputs, names, anchors = randn(7, FEATURES), [f"row {n}" for n in range(7)], randn(4, 3)
    with ScatterOnceParallel(linear(), 2, devices(2)) as engine:
        targets, plain = (Rows(names), Replicated(anchors)), (inputs, (names, anchors))
        assert_step(engine, inputs, targets, criterion, plain=plain, whole_batch=True)


def test_several_batches_are_joined_in_row_order(devices):
    """Entries of batches of one size were once joined with each other, first with first."""
    inputs, entries = randn(11, FEATURES), [randn(length + 1) for length in range(11)]
    seen = []

    def criterion(outputs, targets):
        rows, (factor,) = targets
        seen.append([len(row) for row in rows])
        return (outputs.sum(1) * torch.stack([row.sum() for row in rows]) * factor).sum()

    parts = (entries[:4], entries[4:8], entries[8:])
    batches = [(Rows(few), [Replicated(torch.tensor(2.0))]) for few in parts]
    model = build(lambda: nn.Linear(FEATURES, 5))
    expected = copy.deepcopy(model)
    criterion(expected(inputs), (entries, [torch.tensor(2.0)])).backward()
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        engine.forward_backward(
            Rows.from_batches(inputs.split(4)),
            Rows.from_batches(batches),
            criterion,
            whole_batch=True,
        )
    assert seen == [[*range(1, 12)]] * 2
    assert_gradients(model, gradients(expected))


# What goes along


def test_autocast_is_that_of_a_plain_loop(devices):
    model = two_views().float()
    views = tuple(view.float() for view in batch(12)[0])
    dtypes = []

    def criterion(outputs, labels):
        dtypes.append((outputs["one"].dtype, (outputs["one"] @ outputs["one"].T.float()).dtype))
        return nt_xent({name: value.float() for name, value in outputs.items()}, labels)

    twin, labels = copy.deepcopy(model), batch(12)[1]
    engine = ScatterOnceParallel(model, 3, devices(2))
    with engine, torch.autocast("cpu", torch.bfloat16):
        engine.forward_backward(views, labels, criterion, whole_batch=True)
        pieces = [twin(*(view[low : low + 2] for view in views)) for low in range(0, 12, 2)]
        loss = criterion(join_rows(pieces, 0, [2] * 6), labels)
    loss.backward()
    assert dtypes == [(torch.bfloat16, torch.bfloat16)] * 2
    assert_gradients(model, gradients(twin), relative=1e-2)


def test_a_scaler_scales_the_gradients(devices):
    model = two_views()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with ScatterOnceParallel(model, 3, devices(2)) as engine:
        loss = engine.forward_backward(*batch(9), nt_xent, whole_batch=True)
        plain = gradients(model)
        model.zero_grad()
        scaled_loss = engine.forward_backward(*batch(9), nt_xent, scaler=scaler, whole_batch=True)
    assert torch.equal(loss, scaled_loss)
    assert_gradients(model, {k: None if g is None else 1024 * g for k, g in plain.items()})


def test_there_is_no_noise_scale_to_measure():
    """The replicas' gradients are parts of one loss, not means over rows of their own."""
    with ScatterOnceParallel(two_views(), 2, ["cpu"] * 2, measure_noise=True) as engine:
        engine.forward_backward(*batch(9), nt_xent, whole_batch=True)
        assert engine.last_step.noise.scale != engine.last_step.noise.scale  # NaN


def test_the_criterion_runs_once_in_the_caller_s_thread(devices):
    seen = []

    def criterion(outputs, labels):
        seen.append(threading.current_thread())
        return nt_xent(outputs, labels)

    with ScatterOnceParallel(two_views(), 3, devices(2)) as engine:
        engine.forward_backward(*batch(9), criterion, whole_batch=True)
    assert seen == [threading.current_thread()]


def test_the_criterion_s_error_is_the_user_s_with_a_note():
    with ScatterOnceParallel(two_views(), 2, ["cpu"] * 2) as engine:
        with pytest.raises(ZeroDivisionError) as error:
            engine.forward_backward(*batch(9), lambda *_: 1 / 0, whole_batch=True)
        assert error.value.__notes__ == ["in the criterion, with the outputs of all 9 rows"]
        assert_step(engine, *batch(9), nt_xent, whole_batch=True)


def test_a_loss_of_versions_of_the_same_pictures():
    """Micro-batches of a number that three divides were cut into other versions, in silence."""
    with ScatterOnceParallel(linear(), 2, ["cpu:0", "cpu:1"]) as engine:
        words = "Versions splits its rows into 3 versions.*pass whole_batch=True"
        with pytest.raises(ValueError, match=words):
            engine.forward_backward(randn(24, FEATURES), randint(3, 24), Versions())
