"""engine.replay: one sub-step again, in the caller's thread, as the step computed it."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from helpers import leak_checks
from helpers.models import CLASSES, FEATURES, Classifier, mlp
from helpers.oracle import assert_close, build, randint, randn
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from scatterpar import Rows, ScatterOnceParallel

ROWS, LABELS = randn(13, FEATURES), randint(CLASSES, 13)
LOSS = nn.CrossEntropyLoss()
BAD = 1e6  # in a row that makes the model fail


class Model(nn.Module):
    """Dropout, batch normalisation, and an error where a row says so."""

    def __init__(self, *, drops=True, normed=True):
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.norm = nn.BatchNorm1d(8) if normed else nn.Identity()
        self.drop = nn.Dropout(0.5 if drops else 0.0)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, inputs):
        hidden = self.drop(self.norm(self.first(inputs)))
        if (inputs == BAD).any():
            raise ArithmeticError("a bad row")
        return self.last(hidden)


def places(plan):
    return [(s.replica, k) for s in plan.shares for k in range(len(s.micro_batches))]


def tensors_of(module):
    return [*module.parameters(), *module.buffers()]


def state_of(module):
    return [(tensor.detach().clone(), tensor.grad) for tensor in tensors_of(module)]


def assert_untouched(module, before, random):
    for tensor, (value, gradient) in zip(tensors_of(module), before, strict=True):
        assert torch.equal(tensor, value)
        assert tensor.grad is gradient
    assert not leak_checks.differences(random, leak_checks.random_states())


@pytest.mark.draws
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("whole", [False, True])
def test_each_sub_step_of_a_step_comes_out_to_the_bit(devices, replicas, whole):
    """Dropout's masks and statistics of batch normalisation are those that the step used."""
    model = build(Model)
    seen = {}
    with ScatterOnceParallel(model, 2, devices(replicas)) as engine:
        options = {"whole_batch": True} if whole else {}
        torch.manual_seed(4)

        def keep(output):
            return output.clone()

        _, outputs = engine.forward_backward(ROWS, LABELS, LOSS, return_outputs=keep, **options)
        before, random = state_of(model), leak_checks.random_states()
        for replica, sub_step in places(engine.last_step.plan):
            where = {"replica": replica, "sub_step": sub_step}
            loss, output = engine.replay(ROWS, LABELS, LOSS, **where, **options)
            rows = engine.last_step.plan.rows_of(replica, sub_step)
            first = engine.last_step.plan.shares[replica].start
            expected = outputs[replica][[row - first for row in rows]]
            assert torch.equal(output, expected)
            assert not output.requires_grad
            if whole:
                assert loss is None
            else:
                seen[replica, sub_step] = loss * len(rows)
                assert torch.equal(loss, LOSS(expected, LABELS[list(rows)]))
            assert_untouched(model, before, random)
        if not whole:
            loss = torch.tensor(engine.last_step.loss, dtype=torch.float64)
            assert_close(sum(seen.values()) / 13, loss, "loss")


@pytest.mark.draws
def test_generators_that_were_seeded_since_begin_another_step(devices):
    with ScatterOnceParallel(build(Model), 2, devices(2)) as engine:
        torch.manual_seed(4)
        _, outputs = engine.forward_backward(ROWS, LABELS, LOSS, return_outputs=True)
        place = {"replica": 1, "sub_step": 1}
        assert torch.equal(engine.replay(ROWS, LABELS, LOSS, **place)[1], outputs[1][3:])
        torch.manual_seed(5)
        other = engine.replay(ROWS, LABELS, LOSS, **place)[1]
        assert not torch.equal(other, outputs[1][3:])
        _, outputs = engine.forward_backward(ROWS, LABELS, LOSS, return_outputs=True)
        assert torch.equal(other, outputs[1][3:])


def failing(devices, model, row=11, **options):
    rows = ROWS.clone()
    rows[row] = BAD
    engine = ScatterOnceParallel(model, 3, devices(2), verify=False, **options)
    with pytest.raises(ArithmeticError) as caught:
        engine.forward_backward(rows, LABELS, LOSS)
    return engine, rows, caught.value


def call_in(error):
    lines = "\n".join(error.__notes__).splitlines()
    return next(line for line in lines if line.startswith("engine."))


def replayed(call, engine, inputs, criterion=LOSS, **names):
    """What the call of a note gives where the user's variables have these names."""
    return eval(
        call, dict(engine=engine, inputs=inputs, targets=LABELS, criterion=criterion, **names)
    )


@pytest.mark.draws
def test_the_note_has_the_call(devices):
    """It raises the same error, in the caller's own frames, and leaves nothing behind."""
    model = build(Model)
    engine, inputs, error = failing(devices, model)
    assert f"in replica 1 on {devices(2)[1]}, sub-step 2 of 3, counted from 0" in error.__notes__
    call = "engine.replay(inputs, targets, criterion, replica=1, sub_step=2)"
    assert f"alone, in this thread:\n{call}" in error.__notes__
    before, random = state_of(model), leak_checks.random_states()
    threads = []
    model.last.register_forward_hook(lambda *_: threads.append(threading.current_thread()))
    with pytest.raises(ArithmeticError, match="a bad row") as caught:
        replayed(call, engine, inputs)
    assert any(entry.frame.f_locals.get("self") is model for entry in caught.traceback)
    assert set(threads) <= {threading.current_thread()}
    assert_untouched(model, before, random)
    engine.forward_backward(ROWS, LABELS, LOSS)
    engine.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"reduction": "sum"}, "reduction='sum'"),
        ({"count": lambda inputs, targets: len(targets)}, "count=count"),
        ({"return_outputs": lambda output: output * 2}, "return_outputs=return_outputs"),
        ({"whole_batch": True}, "whole_batch=True"),
        ({"scaler": torch.amp.GradScaler("cpu")}, "scaler=scaler"),
        ({"costs": [1] * 13}, "costs=costs"),
    ],
)
def test_the_call_has_the_options_of_the_step(devices, options, said):
    inputs = ROWS.clone()
    inputs[4] = BAD
    how = {"micro_batch_cost": 4} if "costs" in options else {"accum": 2}
    with ScatterOnceParallel(build(Model), device_ids=devices(2), **how, verify=False) as engine:
        with pytest.raises(ArithmeticError) as caught:
            engine.forward_backward(inputs, LABELS, LOSS, **options)
        call = call_in(caught.value)
        assert f", {said})" in call
        with pytest.raises(ArithmeticError):
            replayed(call, engine, inputs, **options)


def test_the_call_names_the_criterion_where_there_are_no_targets(devices):
    def fails(output, targets):
        raise ArithmeticError

    with ScatterOnceParallel(mlp(), 2, devices(2), verify=False) as engine:
        with pytest.raises(ArithmeticError) as caught:
            engine.forward_backward(ROWS, criterion=fails)
        call = "engine.replay(inputs, criterion=criterion, replica=0, sub_step=0)"
        assert call_in(caught.value) == call
        with pytest.raises(ArithmeticError):
            replayed(call, engine, ROWS, fails)


@pytest.mark.draws
@pytest.mark.parametrize(
    ("drops", "normed", "passes"), [(True, False, 1), (False, False, 1), (True, True, 3)]
)
def test_earlier_sub_steps_run_where_they_are_needed(devices, drops, normed, passes):
    """Not for what the failing one drew; for what earlier ones have left in buffers."""
    model = build(lambda: Model(drops=drops, normed=normed))
    seen = []
    model.drop.register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    engine, inputs, _ = failing(devices, model)
    bad = [hidden for hidden in seen if hidden.abs().max() > 1e3]
    seen.clear()
    with pytest.raises(ArithmeticError):
        engine.replay(inputs, LABELS, LOSS, replica=1, sub_step=2)
    assert len(seen) == passes
    assert len(bad) == (not normed)
    assert all(torch.equal(seen[-1], hidden) for hidden in bad)
    engine.close()


def test_no_debugger_stops_in_earlier_sub_steps(devices, monkeypatch):
    stops = []

    class Stops(Model):
        def forward(self, inputs):
            breakpoint()
            return super().forward(inputs)

    model = build(Stops)
    with ScatterOnceParallel(model, 3, devices(2)) as engine:
        monkeypatch.setattr(sys, "breakpointhook", lambda: stops.append(1))
        engine.replay(ROWS, LABELS, LOSS, replica=1, sub_step=2)
        assert stops == [1]


def test_the_output_of_rows_by_cost(devices):
    lengths = [3, 5, 1, 4, 2, 5, 3, 9, 1]
    texts = [randn(n, FEATURES, seed=n + i) for i, n in enumerate(lengths)]

    class Reader(nn.Linear):
        def forward(self, padded):
            return super().forward(padded).sum(1)

    model = build(lambda: Reader(FEATURES, CLASSES, bias=False))
    inputs = Rows(texts, lambda few: pad_sequence(few, batch_first=True))
    with ScatterOnceParallel(model, device_ids=devices(2), micro_batch_cost=9) as engine:
        plan = engine.plan(9, costs=lengths)
        for replica, sub_step in places(plan):
            rows = list(plan.rows_of(replica, sub_step))
            loss, output = engine.replay(
                inputs, LABELS[:9], LOSS, replica=replica, sub_step=sub_step, costs=lengths
            )
            expected = torch.stack([model(texts[row][None])[0] for row in rows]).detach()
            assert_close(output, expected, "output")
            assert_close(loss, LOSS(expected, LABELS[rows]), "loss")


def test_anomaly_detection_names_the_line(devices):
    """In a worker's thread it is hard to use; here it is torch's own."""

    class Root(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs).mul(0).sqrt()  # whose gradient is NaN

    with ScatterOnceParallel(build(lambda: Root(FEATURES, 1)), 2, devices(2)) as engine:
        with (
            pytest.warns(UserWarning, match="Anomaly|Error detected in MulBackward0"),
            torch.autograd.detect_anomaly(check_nan=True),
            pytest.raises(RuntimeError, match="MulBackward0' returned nan"),
        ):
            engine.replay(ROWS, criterion=lambda o, _: o.sum(), replica=1, sub_step=1)
        assert all(p.grad is None for p in engine.parameters())


def test_the_row_that_made_a_loss_nan(devices):
    inputs = ROWS.clone()
    inputs[8, 2] = torch.nan
    with ScatterOnceParallel(mlp(), 2, devices(2), check_finite=True, verify=False) as engine:
        with pytest.raises(FloatingPointError) as caught:
            engine.forward_backward(inputs, LABELS, LOSS)
        loss, output = replayed(call_in(caught.value), engine, inputs)
        assert loss.isnan()
        rows = engine.plan(13).rows_of(1, 0)
        assert [row for row, bad in zip(rows, output.isnan().any(1), strict=True) if bad] == [8]


def test_what_a_criterion_and_a_checkpoint_do_is_put_back(devices):
    """Leaves that a criterion closes over, those under reentrant checkpoints, writes of weights."""
    head = build(lambda: nn.Linear(CLASSES, CLASSES))

    class Checkpointed(Classifier):
        seen = 0

        def forward(self, inputs):
            self.seen += 1
            with torch.no_grad():
                self.linear.weight.mul_(2)
            return checkpoint(self.linear, inputs.requires_grad_(), use_reentrant=True)

    model = build(Checkpointed)
    model.linear.weight.grad = torch.ones_like(model.linear.weight)
    model.linear.weight.register_hook(lambda _: pytest.fail("hooks are the step's"))
    before, random = state_of(model), leak_checks.random_states()
    with ScatterOnceParallel(model, 2, devices(2), verify=False) as engine:
        loss, _ = engine.replay(ROWS, LABELS, lambda o, t: LOSS(head(o), t), replica=0, sub_step=1)
        assert loss.isfinite()
    assert_untouched(model, before, random)
    assert torch.equal(model.linear.weight.grad, torch.ones_like(model.linear.weight))
    assert all(p.grad is None for p in head.parameters())
    assert model.seen == 0
