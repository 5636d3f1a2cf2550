"""Which calls of a loop's modules are the engine's, in plain torch."""

from __future__ import annotations

import copy

import pytest
import torch
from harness.oracle import build, randn
from torch import nn
from torch.utils.checkpoint import checkpoint

from scatterpar.integrations.divided_modules import DividedModules

VIRTUAL = ["cpu:0", "cpu:1"]
ROWS = randn(6, 4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.heads = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 2)])
        self.bank = Bank()

    def forward(self, rows):
        return self.heads[0](self.body(rows))


class Bank(nn.Module):
    """Keeps what it has seen, and has no parameters."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def forward(self, rows):
        self.sizes.append(len(rows))
        return rows


class Owner(nn.Module):
    """A module that is no model, such as a LightningModule."""

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.others = nn.ModuleDict({"judge": nn.Linear(3, 1)})

    def forward(self, rows):
        return self.others["judge"](self.net(rows))


class Loss(nn.Module):
    """Contains the model."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, rows):
        return self.scale * self.model(rows).square().mean()


def net():
    return build(Net)


def test_which_calls_are_divided(divided_calls):
    model = net()
    divided = DividedModules(model, VIRTUAL)
    model(ROWS)
    with divided.step({"rows": ROWS}):
        assert model(ROWS).shape == (6, 3)
        assert model(ROWS[:3]).shape == (3, 3)  # with any number of rows
        hidden = model.body(ROWS)
        model.heads[1](hidden)
        model.body[0](ROWS)
        model.body(ROWS[:3])  # not the batch's rows
        model.bank(ROWS)  # without parameters
        Loss(model)(ROWS)  # the model in it is
    model(ROWS)
    body = model.body
    assert divided_calls == [model, model, body, model.heads[1], body[0], model]
    assert model.bank.sizes == [6]
    divided.close()


class KeepsOutputs:
    """A ``forward`` that a loss sets for a while. It computes once, and reads twice."""

    def __init__(self, forward):
        self.forward = forward
        self.outputs = []

    def __call__(self, rows):
        if not self.outputs:
            self.outputs.append(self.forward(rows))
        return self.outputs[0]


def test_forward_that_a_loss_replaces_runs_once(divided_calls):
    """Replicas shared the object, and each read what another one had kept."""
    model = net()
    divided = DividedModules(model, VIRTUAL)
    expected = model(ROWS)
    with divided.step({"rows": ROWS}):
        keeps = model.forward = KeepsOutputs(model.forward)
        for _ in range(2):
            torch.testing.assert_close(model(ROWS), expected, rtol=1e-10, atol=1e-12)
        del model.forward
        torch.testing.assert_close(model(ROWS), expected, rtol=1e-10, atol=1e-12)
    assert len(keeps.outputs) == 1
    assert divided_calls == [model.body, model.heads[0], model]
    divided.close()


def test_forward_that_was_replaced_before_is_divided(divided_calls):
    """As accelerate does for autocast."""
    model = net()
    forward = model.forward
    model.forward = lambda rows: 2 * forward(rows)
    divided = DividedModules(model, VIRTUAL)
    with divided.step({"rows": ROWS}):
        assert model(ROWS).shape == (6, 3)
    assert divided_calls == [model]
    divided.close()


def test_children_of_an_owner_are_models(divided_calls):
    owner = build(Owner)
    divided = DividedModules(owner, VIRTUAL, is_owner=True)
    with divided.step(ROWS):
        owner(ROWS)
        owner.net(ROWS[:2])
        owner.net.body(ROWS)
        owner.added = build(lambda: nn.Linear(4, 4))
    with divided.step(ROWS):
        owner.added(ROWS[:2])
    judge = owner.others["judge"]
    assert divided_calls == [owner.net, judge, owner.net, owner.net.body, owner.added]
    divided.close()


def test_one_device_divides_nothing(divided_calls):
    model = net()
    with DividedModules(model, ["cpu"]).step(ROWS):
        model(ROWS)
    assert not divided_calls


@pytest.mark.parametrize("devices", [VIRTUAL, ["cpu"] * 3], ids="+".join)
def test_gradients_are_added_outside_of_no_sync(devices):
    model = net()
    plain = copy.deepcopy(model)
    divided = DividedModules(model, devices)
    with divided.step(ROWS):
        model(ROWS)  # makes the engine
        with divided.no_sync():
            model(ROWS).square().mean().backward()
        assert divided.engine._calls.gradients.is_waiting
        model.body(ROWS).square().mean().backward()
    for call in (plain, plain.body):
        call(ROWS).square().mean().backward()
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)
    divided.close()


class Recomputed(Net):
    """Its body gets twice the rows: with two replicas as many as the batch has."""

    def forward(self, rows):
        hidden = checkpoint(self.body, torch.cat([rows, rows]), use_reentrant=False)
        return self.heads[0](hidden)[: len(rows)]


def test_checkpoint_inside_of_the_model(divided_calls):
    model = build(Recomputed)
    plain = copy.deepcopy(model)
    divided = DividedModules(model, VIRTUAL)
    with divided.step(ROWS):
        model(ROWS).square().mean().backward()
    plain(ROWS).square().mean().backward()
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)
    assert divided_calls == [model]
    divided.close()


class Noted(Net):
    """Computes its head again, by what ``forward`` has noted of its rows."""

    def forward(self, rows):
        self.has_large = bool((rows > 1).any())
        self.num_rows = len(rows)
        return checkpoint(self.outputs_of, self.body(rows), use_reentrant=True)

    def outputs_of(self, hidden):
        outputs = self.heads[0](hidden.reshape(self.num_rows, -1))
        return outputs.square() if self.has_large else outputs


class Weighted(Net):
    """Multiplies by a parameter, which autograd keeps."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, rows):
        return self.heads[0](self.body(rows)) * self.factor


def backward_in_a_step_that_goes_on(model, rows, between=lambda: None):
    """As Lightning makes it, where modules have been given other calls meanwhile."""
    divided = DividedModules(model, VIRTUAL)
    with divided.step(rows):
        model(rows[1:3])  # the first call makes replicas
        loss = model(rows).square().mean()
    between()
    with divided.step(goes_on=True):
        loss.backward()
    divided.close()


def assert_same_gradients(model, plain):
    for parameter, of_plain in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, of_plain.grad)


@pytest.mark.filterwarnings("ignore:forward sets the attribute 'num_rows'")
def test_checkpoint_computes_with_notes_of_its_replica():
    model = build(Noted)
    plain = copy.deepcopy(model)
    rows = ROWS[:5].clamp(-1, 1)
    rows[0, 0] = 2
    backward_in_a_step_that_goes_on(model, rows)
    for part in rows.split(3):  # those of a replica
        outputs = plain(part)
        (outputs.square().sum() / (len(rows) * outputs.size(1))).backward()
    assert_same_gradients(model, plain)


def test_parameter_frozen_after_the_call():
    """Autograd refused the copy that it had kept."""
    model = build(Weighted)
    plain = copy.deepcopy(model)
    backward_in_a_step_that_goes_on(
        model, ROWS, lambda: model.factor.requires_grad_(False)
    )
    loss = plain(ROWS).square().mean()
    plain.factor.requires_grad_(False)
    loss.backward()
    assert_same_gradients(model, plain)


def test_checkpoint_around_a_part(divided_calls):
    model = net()
    plain = copy.deepcopy(model)
    divided = DividedModules(model, VIRTUAL)
    with divided.step(ROWS):
        hidden = checkpoint(model.body, ROWS, use_reentrant=False)
        hidden.square().mean().backward()
    plain.body(ROWS).square().mean().backward()
    for parameter, expected in zip(
        model.body.parameters(), plain.body.parameters(), strict=True
    ):
        torch.testing.assert_close(parameter.grad, expected.grad)
    assert divided_calls == [model.body, model.body]
    divided.close()


@pytest.mark.parametrize("by", ["compile", "wrapper"])
def test_compiled_models_are_divided(by, divided_calls):
    model = net()
    plain = copy.deepcopy(model)
    called = model
    if by == "wrapper":
        called = torch.compile(model, backend="eager")
    else:
        model.compile(backend="eager")
    compiled = model._compiled_call_impl
    divided = DividedModules(called, VIRTUAL)
    with divided.step(ROWS):
        torch.testing.assert_close(called(ROWS), plain(ROWS))
    assert divided_calls == [model]
    assert model._compiled_call_impl is compiled
    assert divided.is_of(model)
    divided.close()


class Generates(Net):
    def generate(self, rows, *, times):
        return [self(rows) for _ in range(times)]


def test_generate_runs_on_the_master(divided_calls):
    model = build(Generates)
    divided = DividedModules(model, VIRTUAL)
    with (
        divided.step(ROWS),
        pytest.warns(UserWarning, match="generate runs on the first device"),
    ):
        assert len(model.generate(ROWS, times=2)) == 2
    assert not divided_calls
    assert "generate" not in vars(model)


class Contrast(nn.Module):
    """A loss that compares rows with each other, and trains its temperature."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, rows):
        return (self.scale * rows @ rows.T).logsumexp(1).mean()


class States(nn.Module):
    """Returns states in another dimension than rows."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 3, batch_first=True)

    def forward(self, rows):
        return self.lstm(rows[:, None])[1][0]


class LessMean(nn.Module):
    """Returns rows less their mean: a home-made normalisation."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, rows):
        return self.scale * (rows - rows.mean(0))


class TimeFirst(nn.Module):
    """Takes the batch's rows for steps in time, without ``batch_first``."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)

    def forward(self, rows):
        return self.layer(torch.stack([rows, rows.sin()], 1))


class Recurrent(TimeFirst):
    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(4, 3)

    def forward(self, rows):
        return super().forward(rows)[0]


MEETING = [LessMean, TimeFirst, Recurrent]


@pytest.mark.parametrize("kind", [Contrast, States, *MEETING])
def test_part_that_is_not_divided_is_told_once(kind, recwarn):
    model = build(lambda: nn.Sequential(kind(), nn.Tanh()))
    plain = copy.deepcopy(model)
    divided = DividedModules(model, VIRTUAL)
    with divided.step(ROWS):
        for _ in range(3):
            model.zero_grad()
            output = model[0](ROWS)
            output.sum().backward()
            torch.testing.assert_close(output, plain[0](ROWS))
    plain[0](ROWS).sum().backward()
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)
    texts = [str(warning.message) for warning in recwarn]
    words = f"a call of {kind.__name__} is computed on the first device alone"
    assert len([text for text in texts if words in text]) == 1
    divided.close()


def test_part_of_training_is_divided_in_evaluation():
    """It stayed on the first device, where its rows are independent."""
    sizes = []

    class LessMeanInTraining(LessMean):
        def forward(self, rows):
            sizes.append(len(rows))
            return super().forward(rows) if self.training else self.scale * rows

    model = build(lambda: nn.Sequential(LessMeanInTraining(), nn.Tanh()))
    divided = DividedModules(model, VIRTUAL)
    with pytest.warns(match="computed on the first device"), divided.step(ROWS):
        model[0](ROWS)
    assert sizes[-1] == len(ROWS)
    model.eval()
    sizes.clear()
    with torch.no_grad(), divided.step(ROWS):
        model[0](ROWS)
    assert max(sizes) < len(ROWS)
    divided.close()


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS, {"words": ["a", "b"]}])
def test_single_row_on_the_master_is_told_once(rows, recwarn, divided_calls):
    """As torch's layers take it: a vector, without a dimension of rows."""
    model = net()
    plain = copy.deepcopy(model)
    divided = DividedModules(model, VIRTUAL)
    with divided.step(rows):
        for _ in range(2):
            model(ROWS[0]).sum().backward()
            model(ROWS).sum().backward()
    for _ in range(2):
        plain(ROWS[0]).sum().backward()
        plain(ROWS).sum().backward()
    assert divided_calls == [model, model]
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)
    texts = [str(warning.message) for warning in recwarn]
    assert len([text for text in texts if "Net is computed on the first" in text]) == 1
    divided.close()


def test_vector_with_a_number_per_row_is_divided(divided_calls):
    model = build(lambda: nn.Sequential(nn.Unflatten(0, (-1, 1)), nn.Linear(1, 2)))
    times = randn(6)
    divided = DividedModules(model, VIRTUAL)
    with divided.step((ROWS, times)):
        torch.testing.assert_close(model(times), model[1](times[:, None]))
    assert model in divided_calls
    divided.close()


def test_error_leaves_the_modules_as_before():
    model = net()
    divided = DividedModules(model, VIRTUAL)
    with pytest.raises(RuntimeError), divided.step(ROWS):
        model(torch.zeros(6, 5))
    for part in model.modules():
        assert "_compiled_call_impl" not in vars(part)
    divided.close()
