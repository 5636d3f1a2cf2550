"""The pair: outputs, losses, buffers, context and errors; its backward pass is in
test_autograd.
"""

from __future__ import annotations

import copy
import traceback
import weakref

import pytest
import torch
from faults.state import nothing_changes
from harness.leak_checks import in_time
from harness.models import CLASSES, FEATURES, Of, linear, mlp
from harness.module_cases import with_buffers
from harness.notes import beginning_of_note
from harness.oracle import assert_close, build, randint, randn
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from pair.common import Pair, assert_alike
from scatterpar import (
    DataParallelCriterion,
    DataParallelModel,
    count_labels,
    gather,
)

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("one_thread_an_operation")]

INPUTS, _ = BATCH = randn(9, FEATURES), randint(CLASSES, 9)


# --- outputs: one entry per replica used, of whatever types the module returns ---


@pytest.mark.parametrize(
    ("replicas", "rows", "sizes"),
    [(4, 9, [3, 2, 2, 2]), (4, 3, [1, 1, 1]), (None, 9, None)],
)
def test_one_output_per_replica_used(devices, replicas, rows, sizes):
    model = mlp()
    outputs = DataParallelModel(model, replicas and devices(replicas))(INPUTS[:rows])
    assert type(outputs) is tuple
    assert sizes in (None, [len(output) for output in outputs])
    assert_close(torch.cat(outputs), model(INPUTS[:rows]), "outputs")


def test_keyword_inputs_and_rowless_parts(devices):
    def forward(m, inputs, *, scale, extra, options):
        assert scale.ndim == 0
        return m.linear(inputs) * scale + extra["deep"][0] * options["factor"], len(
            inputs
        )

    model = Of(forward, linear=linear())
    extra = {"deep": [randn(9, CLASSES)]}
    call = {
        "scale": torch.tensor(2.0).double(),
        "extra": extra,
        "options": {"factor": 3},
    }
    outputs = DataParallelModel(model, devices(4))(INPUTS, **call)
    expected, _ = model(INPUTS, **call)
    output, rows = gather(outputs, "cpu")
    assert_close(output, expected, "outputs")
    assert rows == [3, 2, 2, 2]


@pytest.mark.parametrize("device", ["cpu:1", torch.device("cpu")])
def test_gather_is_differentiable(devices, device):
    def program(of):
        outputs = of.model(INPUTS)
        gathered = gather(outputs, device) if isinstance(of, Pair) else outputs
        nn.CrossEntropyLoss()(gathered, randint(CLASSES, 9)).backward()
        return [gathered]

    assert_alike(mlp, program, devices(4))


def test_gather_of_lists_and_rowless_values():
    numbers = [torch.tensor(float(n), requires_grad=True) for n in (3, 1)]
    mixed = tuple({"y": torch.ones(int(n), 2), "loss": n} for n in numbers)
    assert gather(mixed, "cpu")["loss"] == 2.5
    with pytest.raises(
        ValueError, match="it is unknown how many rows each number stands"
    ):
        gather(numbers, "cpu")
    mean = gather([numbers[0]] * 2, "cpu")  # of any rows
    mean.backward()
    assert mean == 3.0
    for dim in (1, -1):
        columns = gather((torch.ones(2, 3), torch.zeros(2, 1)), "cpu", dim=dim)
        assert columns.tolist() == [[1, 1, 1, 0]] * 2


# --- how losses of replicas become that of the batch ---


def test_all_labels_ignored_is_no_nan(devices):
    pair, batch = (
        Pair(mlp(), nn.CrossEntropyLoss(), devices(4)),
        (INPUTS, torch.full((9,), -100)),
    )
    loss = pair.loss(*batch)
    assert loss.item() == 0
    loss.backward()
    assert all(parameter.grad is None for parameter in pair.module.parameters())
    with torch.no_grad():
        assert not pair.loss(*batch).requires_grad


# --- buffers: replica 0's, in the module after the forward, and only where they changed ---


def test_eval_reaches_replicas_keeps_buffers(devices):
    """Nor are they written with what they had: a graph of the user's own
    may need them.
    """
    model = build(
        lambda: nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Dropout(1.0))
    ).eval()
    before = copy.deepcopy(model.state_dict())
    expected = model(INPUTS)
    assert_close(
        torch.cat(DataParallelModel(model, devices(4))(INPUTS)), expected, "outputs"
    )
    expected.square().sum().backward()
    assert all(torch.equal(model.state_dict()[k], v) for k, v in before.items())


# --- what is left: no graph without grad, and no replica ---


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_grad_builds_no_graph_moves_stats(devices, mode):
    model, twin = (build(lambda: nn.BatchNorm1d(FEATURES)) for _ in "ab")
    pair, inferring = (
        Pair(model, nn.CrossEntropyLoss(), devices(4)),
        mode is torch.inference_mode,
    )
    with mode():
        outputs = pair.model(INPUTS)
        loss = pair.criterion(outputs, BATCH[1])
        assert_close(outputs[0], twin(INPUTS[:3]), "output")
    assert all(output.is_inference() == inferring for output in outputs)
    assert not any(tensor.requires_grad for tensor in (*outputs, loss))
    assert_close(model.running_mean, twin.running_mean, "mean")
    Pair(model.eval(), nn.CrossEntropyLoss(), devices(4)).check(*BATCH)


def test_pair_that_was_made_in_inference_mode_trains(devices):
    model = build(linear)
    with torch.inference_mode():
        pair = Pair(model, nn.CrossEntropyLoss(), devices(3))
    pair.check(*BATCH)


def test_no_output_survives_its_graph(devices, by_reference_counts_alone):
    """They go with the graph, without waiting for the collector; replicas stay."""
    alive = []

    def forward(m, inputs):
        output = m.linear(inputs)
        alive.append(weakref.ref(output))
        return output

    pair = Pair(Of(forward, linear=linear()), nn.CrossEntropyLoss(), devices(3))
    loss = pair.loss(*BATCH)
    assert len(alive) == 3
    loss.backward()
    del loss
    assert in_time(lambda: [reference() for reference in alive] == [None] * 3)


# --- the user's errors, noted where they happened, and calls inside of calls ---


@pytest.mark.parametrize("part", ["model", "criterion"])
def test_users_exception_raised_with_note(devices, part):
    """The lowest replica's, with a note of the other; buffers stay, and the next call
    works.
    """
    firsts, raised, devices = {float(INPUTS[row, 0]) for row in (3, 7)}, [], devices(4)

    def fails(m, output, targets=None):
        m.calls += 1
        if float(output[0, 0]) in firsts:
            raised.append(ArithmeticError("a reason"))
            raise raised[-1]
        return output if targets is None else output.mean()

    module = with_buffers(Of(fails), calls=torch.zeros(()))
    model = DataParallelModel(module if part == "model" else nn.Identity(), devices)
    criterion = DataParallelCriterion(
        nn.L1Loss() if part == "model" else module, devices
    )
    with nothing_changes(module), pytest.raises(ArithmeticError) as caught:
        criterion(model(INPUTS), INPUTS)
    assert caught.value in raised
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "fails"
    assert caught.value.__notes__[0].startswith(beginning_of_note(1, devices[1]))
    firsts.clear()
    assert criterion(model(INPUTS), INPUTS).ndim == 0
    assert module.calls == 1


@pytest.mark.parametrize("part", ["model", "criterion"])
def test_call_inside_a_call_refused(devices, part):
    kind = DataParallelModel if part == "model" else DataParallelCriterion
    wrapper = [kind(Of(lambda *_: wrapper[0](*given)), devices(3))]
    outputs = DataParallelModel(nn.Identity(), devices(3))(INPUTS)
    given = (INPUTS,) if part == "model" else (outputs, INPUTS)
    words = (
        rf"this {kind.__name__} is in the middle of a step: another step cannot start "
        r"from inside"
    )
    with pytest.raises(RuntimeError, match=words):
        wrapper[0](*given)
    wrapper.clear()


# --- gather: numbers count by the rows of their replica, constants are returned once ---


class OwnLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, inputs, targets):
        output = self.net(inputs)
        return {"loss": nn.functional.cross_entropy(output, targets), "y": output}


@pytest.mark.parametrize(
    "select",
    [
        lambda outputs: outputs,
        lambda outputs: [{"loss": output["loss"]} for output in outputs],
        lambda outputs: tuple({"y": o["y"], "loss": o["loss"] * 1} for o in outputs),
    ],
    ids=["whole", "losses alone", "computed, beside rows"],
)
def test_gathered_losses_are_weighted(devices, select):
    module = build(OwnLoss)
    expected = module(*BATCH)["loss"]
    outputs = DataParallelModel(module, devices(4))(*BATCH)
    loss = gather(select(outputs), "cpu")["loss"]
    assert_close(loss, expected, "loss")
    loss.backward()


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("rows", [(3, 2), (2, 2)])
def test_gathered_codebook_is_one(is_first, rows):
    """Also if it was not noted how many rows the others have."""
    book = torch.ones(5, 3)
    entries = [(book, torch.full((n, 3), float(n))) for n in rows]
    if rows == (2, 2):
        entries[1][1].zero_()
    if not is_first:
        entries = [entry[::-1] for entry in entries]
    gathered = gather(entries, "cpu")
    joined, output = gathered if is_first else gathered[::-1]
    assert joined.shape == (5, 3)
    assert output.shape == (sum(rows), 3)


def test_gather_of_selected_rows(devices):
    """Their numbers are those of no share, and they are joined all the same."""

    def forward(m, inputs):
        output = m.linear(inputs)
        return output[inputs[:, 0] > 0], output.square().mean()

    module = Of(forward, linear=linear())
    expected, mean = module(INPUTS)
    found, mean_of_all = gather(DataParallelModel(module, devices(3))(INPUTS), "cpu")
    assert_close(found, expected, "rows")
    assert_close(mean_of_all, mean, "mean")


# --- transforms of torch.func ---


@pytest.mark.parametrize("replicas", [1, 2])
def test_transforms_are_refused_in_words(devices, replicas):
    model = DataParallelModel(mlp(), devices(replicas))
    criterion = DataParallelCriterion(nn.CrossEntropyLoss())
    outputs = model(INPUTS)
    words = "this DataParallelModel cannot be transformed by torch.func"
    with pytest.raises(RuntimeError, match=words):
        torch.func.grad(lambda rows: gather(model(rows), "cpu").sum())(INPUTS)
    with pytest.raises(RuntimeError, match=words):
        torch.func.jvp(model, (INPUTS,), (INPUTS,))
    with pytest.raises(RuntimeError, match=words):
        torch.func.vmap(model)(INPUTS[None])
    with pytest.raises(RuntimeError, match="this DataParallelCriterion cannot be"):
        torch.func.grad(lambda scale: criterion(outputs, BATCH[1]) * scale)(
            INPUTS[0, 0]
        )
    # the remedy
    transformed = torch.func.grad(lambda rows: model.module(rows).sum())(INPUTS)
    assert transformed.shape == INPUTS.shape


# --- numbers that the criterion returns beside its loss ---


def classify(logits, labels):
    right = (logits.argmax(1) == labels)[labels != -100].double().mean()
    return nn.functional.cross_entropy(logits, labels), {"accuracy": right, "two": 2}


@pytest.mark.parametrize(
    ("ignored", "options"),
    [(0, {}), (3, {"count": count_labels()})],
    ids=["rows", "labels"],
)
def test_logged_numbers_are_those_of_the_whole_batch(ignored, options, devices):
    labels = BATCH[1].clone()
    labels[:ignored] = -100
    model = build(mlp)
    loss, numbers = classify(model(INPUTS), labels)
    criterion = DataParallelCriterion(classify)
    assert criterion.logged == {}
    found = criterion(DataParallelModel(model, devices(3))(INPUTS), labels, **options)
    assert_close(found.detach(), loss.detach(), "loss")
    assert criterion.logged.keys() == numbers.keys()
    for name, number in numbers.items():
        logged = criterion.logged[name]
        assert not logged.requires_grad
        assert_close(logged.double(), torch.as_tensor(number).double(), name)


def test_other_criteria_log_nothing():
    model = DataParallelModel(build(mlp), ["cpu"] * 2)
    criterion = DataParallelCriterion(nn.CrossEntropyLoss())
    criterion(model(INPUTS), BATCH[1])
    assert criterion.logged == {}


def test_shares_with_other_names_refused():
    def criterion(logits, labels):
        return nn.functional.cross_entropy(logits, labels), {str(len(labels)): 1.0}

    model = DataParallelModel(build(mlp), ["cpu"] * 2)
    parallel = DataParallelCriterion(criterion, verify=False)
    with pytest.raises(ValueError, match="'5' for some rows, and '4' for others"):
        parallel(model(INPUTS), BATCH[1])


# --- saved tensors of a checkpoint around both ---


class Reversed(torch.autograd.Function):
    """Gives the rows, and their gradient with another sign."""

    @staticmethod
    def forward(ctx, rows):
        return rows.clone()

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class TrainedLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(CLASSES, CLASSES)

    def forward(self, output, targets):
        return cross_entropy(self.head(output), targets)


CHECKPOINTED = {
    "a trained criterion": (mlp, TrainedLoss),
    "a criterion of torch": (mlp, nn.CrossEntropyLoss),
    "a reversed gradient": (
        lambda: Of(lambda m, rows: Reversed.apply(m.linear(rows)), linear=linear()),
        TrainedLoss,
    ),
}


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_checkpoint_around_model_and_criterion(devices, name, is_reentrant):
    make, make_criterion = CHECKPOINTED[name]
    inputs, targets = BATCH
    gradients = []
    for is_pair in (False, True):
        model, criterion = build(make), build(make_criterion)
        parameters = [*model.parameters(), *criterion.parameters()]
        rows = inputs.clone().requires_grad_()
        if is_pair:
            model = DataParallelModel(model, devices(3))
            criterion = DataParallelCriterion(criterion, devices(3))

        def loss(rows, model=model, criterion=criterion):
            return criterion(model(rows), targets)

        checkpoint(loss, rows, use_reentrant=is_reentrant).backward()
        gradients.append([rows.grad, *(weight.grad for weight in parameters)])
    for found, expected in zip(*reversed(gradients), strict=True):
        assert_close(found, expected, "gradient")


class LossInBackward(torch.autograd.Function):
    """Computes a loss, and its gradient, in the backward pass."""

    @staticmethod
    def forward(ctx, loss, rows):
        ctx.loss = loss
        ctx.save_for_backward(rows)
        return rows.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        rows = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.loss(rows).backward()
        return None, rows.grad


def test_criterion_in_a_backward_pass_is_checked(devices):
    """Any call in a backward pass was taken for the second one of a checkpoint."""
    inputs, targets = BATCH
    model = DataParallelModel(build(linear), devices(3))
    criterion = DataParallelCriterion(
        lambda outputs, labels: cross_entropy(outputs, labels).sqrt(), devices(3)
    )
    loss = LossInBackward.apply(
        lambda rows: criterion(model(rows), targets), inputs.clone().requires_grad_()
    )
    with pytest.raises(ValueError, match="gradient would be"):
        loss.backward()
