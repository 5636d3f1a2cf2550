"""Which steps and rows are looked at, if switches, numbers and words of a program change."""

from __future__ import annotations

import pickle

import pytest
import torch
from harness.looks import INPUTS, LABELS, SEQUENCES, VALUES, Net, net
from harness.models import linear
from harness.oracle import build
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from scatterpar import DataParallelModel, Rows, ScatterOnceParallel, count_labels, gather


def first_refused(engine, steps, batch_of, criterion=None):
    for step in range(steps):
        try:
            engine.forward_backward(*batch_of(step), criterion)
        except ValueError:
            return step
    return None


def mean_or_std(net, rows, mode="plain"):
    compares = net.compares or mode == "std"
    return net.linear(rows).std(0).sum() if compares else net.linear(rows).square().mean()


@pytest.mark.parametrize("switch", ["of the module", "of the batch"])
def test_a_switch_makes_another_kind(devices, switch):
    """A term over the batch that began in step 10 was unseen for hundreds of steps."""
    model = build(net(mean_or_std, compares=False))

    def batch_of(step):
        if switch == "of the module":
            model.compares = step >= 10
            return INPUTS, None
        return {"rows": INPUTS, "mode": "std" if step >= 10 else "plain"}, None

    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        assert first_refused(engine, 20, batch_of) == 10


def test_a_number_that_changes_in_every_step_is_looked_at_again(devices):
    def criterion_of(step):
        def criterion(output, targets):
            return output.std(0).sum() if step >= 10 else F.mse_loss(output, targets)

        return criterion

    with ScatterOnceParallel(build(linear), 2, devices(2)) as engine:
        for step in range(15):  # step 16 is looked at
            engine.forward_backward(INPUTS, VALUES, criterion_of(min(step, 9) + step / 100))
        with pytest.raises(ValueError, match="would be off by"):
            engine.forward_backward(INPUTS, VALUES, criterion_of(16))


class Loop:
    """The user's own training loop: its method is the criterion, and it holds the engine."""

    def __init__(self, engine):
        self.engine, self.weight = engine, 0.0

    def loss(self, output, targets):
        loss = F.mse_loss(output, targets)
        return loss + self.weight * output.std(0).sum() if self.weight else loss


def test_a_number_that_changes_is_seen_beside_an_engine_in_the_same_object(devices):
    """The engine's own counters moved in every step, so it was refused at step 31."""
    with ScatterOnceParallel(build(linear), 2, devices(2)) as engine:
        loop = Loop(engine)
        for _ in range(19):
            engine.forward_backward(INPUTS, VALUES, loop.loss)
        loop.weight = 0.5
        with pytest.raises(ValueError, match="whole_batch=True"):
            engine.forward_backward(INPUTS, VALUES, loop.loss)


def test_a_name_in_each_batch_does_not_make_each_step_the_first_of_its_kind():
    model, calls = build(lambda: Net(lambda net, rows, path: net.linear(rows).square().mean())), []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    numbers = []
    with ScatterOnceParallel(model, 2, ["cpu"]) as engine:
        for step in range(90):
            calls.clear()
            engine.forward_backward({"rows": INPUTS, "path": f"{step}.png"})
            numbers.append(len(calls))
    assert numbers[-10:].count(2) >= 8


@pytest.mark.parametrize("kind", [tuple, dict])
def test_collate_may_return_several_arguments_in_inference_too(devices, kind):
    """It could in training only; inference and the pair passed the tuple as one argument."""
    sequences = [row[: 1 + i % len(row)] for i, row in enumerate(SEQUENCES)]

    def pad(few):
        return pad_sequence(few, batch_first=True)

    def collate(few):
        mask = pad([torch.ones(len(one), 1).double() for one in few])
        return {"rows": pad(few), "mask": mask} if kind is dict else (pad(few), mask)

    model = build(lambda: Net(lambda net, rows, mask: net.linear((rows * mask).sum(1))))
    rows, expected = Rows(sequences, collate), model.linear(pad(sequences).sum(1))
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        engine.forward_backward(rows, LABELS, nn.CrossEntropyLoss())
        torch.testing.assert_close(engine.eval()(rows), expected)
    outputs = DataParallelModel(model, devices(2))(rows)
    torch.testing.assert_close(gather(outputs, "cpu"), expected)


def test_a_criterion_with_other_arguments_is_told_how_it_is_called(devices):
    with (
        ScatterOnceParallel(build(linear), 2, devices(2)) as engine,
        pytest.raises(TypeError) as caught,
    ):
        engine.forward_backward(INPUTS, VALUES, lambda output: output.mean())
    assert any("criterion(output, targets)" in note for note in caught.value.__notes__)


def with_its_own_backward(net, rows):
    assert torch.is_grad_enabled()
    net.linear(rows).square().mean().backward()
    return net.linear(rows)


def test_a_backward_pass_of_forward_leaves_nothing_of_a_look(devices):
    """The eighth step had the gradients that its look had computed on a few rows, too."""
    found = []
    for verify in (True, False):
        model = build(lambda: Net(with_its_own_backward))
        with ScatterOnceParallel(model, 2, devices(2), verify=verify) as engine:
            for _ in range(9):
                engine.forward_backward(INPUTS, LABELS, nn.CrossEntropyLoss())
        found.append(model.linear.weight.grad)
    assert torch.equal(*found)


def test_count_labels_counts_what_the_loss_averages_over():
    labels = torch.tensor([[5, 6, 7], [5, -100, -100], [-100, 2, -100]])
    assert count_labels()(None, labels) == 5
    assert count_labels(shifted=True)(None, labels) == 3
    assert count_labels(5)(None, labels) == 7
    assert count_labels()({"labels": labels}, None) == 5
    assert count_labels(key="y")({"labels": labels}, {"y": labels[:1]}) == 3
    assert pickle.loads(pickle.dumps(count_labels(shifted=True)))(None, labels) == 3
