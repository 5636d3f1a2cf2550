"""Trainers of users beside the stock loop with gradient accumulation: what their calls
find of the loop, and what they are told.
"""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from harness.oracle import randn, seeded
from harness.own_modules import IN, OUT, Net, assert_same_net
from harness.pairwise import few_of
from harness.trainers import LAYOUTS, arguments, quietly
from torch.nn.functional import cross_entropy
from transformers import TrainerCallback

from scatterpar.integrations.transformers import ScatterOnceMixin

pytestmark = [pytest.mark.trainers, pytest.mark.draws]

ROWS = 45  # in steps of 12: the last one has three batches of three rows


class OfUser:
    """A Trainer with a loss of its own, and what is compared beside the parameters."""

    net = Net
    callbacks = ()
    options = {}  # noqa: RUF012  (of both Trainers)

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = []

    def compute_loss(
        self, model, inputs, return_outputs=False, num_items_in_batch=None
    ):
        self.note(inputs)
        return self.loss_of(model(inputs["x"]), inputs["labels"], num_items_in_batch)

    def note(self, inputs):
        pass

    def loss_of(self, scores, labels, items):
        return cross_entropy(scores, labels)


def rows(count):
    return [{"x": randn(IN, seed=n), "labels": n % OUT} for n in range(count)]


def trained(own, folder, layout=None, **options):
    """The user's Trainer after four steps, with replicas if there is a layout."""
    bases = (own, transformers.Trainer)
    if layout is not None:
        bases = (ScatterOnceMixin, *bases)
        options["device_ids"] = LAYOUTS[layout]
    with seeded():
        net = own.net()
    trainer = type("Own", bases, {})(
        net,
        arguments(
            folder,
            per_device_train_batch_size=3,
            gradient_accumulation_steps=4 if layout is None else 2,
            max_steps=4,
            optim="sgd",
            learning_rate=0.1,
            max_grad_norm=0.0,
            remove_unused_columns=False,
        ),
        train_dataset=rows(ROWS),
        callbacks=[kind() for kind in own.callbacks],
        **options,
    )
    quietly(trainer.train)
    return trainer


TRAINERS = {}


def trainer(name):
    def add(own):
        TRAINERS[name] = own
        return own

    return add


@trainer("numbers of accumulation")
class NotesNumbers(OfUser):
    def note(self, inputs):
        args = self.args
        self.seen += [args.gradient_accumulation_steps, args.train_batch_size]
        self.seen += [args.per_device_train_batch_size, self._train_batch_size]
        self.seen += [self.current_gradient_accumulation_steps]
        accelerator = self.accelerator
        self.seen += [accelerator.sync_gradients]
        self.seen += [accelerator.gradient_state.sync_gradients]


@trainer("an average that moves once per step")
class MovesOncePerStep(OfUser):
    """Replicas' calls saw one step for each batch: it moved in each call."""

    average = 0.0
    losses = ()

    def loss_of(self, scores, labels, items):
        loss = cross_entropy(scores, labels)
        self.losses += (loss.item(),)
        if self.accelerator.sync_gradients:
            self.average = 0.5 * self.average + 0.5 * sum(self.losses)
            self.seen.append(self.average)
            self.losses = ()
        return loss


@trainer("divides by the steps itself")
class DividesBySteps(OfUser):
    def loss_of(self, scores, labels, items):
        return cross_entropy(scores, labels) / self.args.gradient_accumulation_steps


@trainer("items of its own")
class OwnItems(OfUser):
    """The calls got the Trainer's own number, which was None."""

    loss_is_scaled_for_ga = True

    def get_batch_samples(self, iterator, number, device=None):
        batches, _ = super().get_batch_samples(iterator, number, device)
        return batches, sum(int((batch["labels"] > 0).sum()) for batch in batches)

    def loss_of(self, scores, labels, items):
        self.seen.append(items)
        losses = cross_entropy(scores, labels, reduction="none")
        return (losses * (labels > 0)).sum() / items


@trainer("a sum that is scaled")
class ScaledSum(OfUser):
    loss_is_scaled_for_ga = True

    def loss_of(self, scores, labels, items):
        return cross_entropy(scores, labels, reduction="sum") / 12


@trainer("items of all batches beside a mean")
class ItemsAndMean(OfUser):
    """As losses of experts beside those of tokens."""

    loss_is_scaled_for_ga = True

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = True

    def loss_of(self, scores, labels, items):
        loss = cross_entropy(scores, labels, reduction="sum") / items
        steps = self.current_gradient_accumulation_steps
        return loss + scores.square().mean() / steps


@trainer("a mean that divides by the steps, and is called scaled")
class ScaledByItself(OfUser):
    """It was divided by the steps twice, or refused."""

    loss_is_scaled_for_ga = True

    def loss_of(self, scores, labels, items):
        loss = cross_entropy(scores, labels)
        return loss / self.current_gradient_accumulation_steps


@trainer("items that the loss ignores")
class IgnoresOwnItems(OwnItems):
    loss_is_scaled_for_ga = None

    def loss_of(self, scores, labels, items):
        self.seen.append(items)
        return cross_entropy(scores, labels)


@trainer("copies of the arguments")
class CopiesArguments(OfUser):
    """Files and copies had the numbers of all replicas."""

    def note(self, inputs):
        copied = copy.copy(self.args)
        saved = self.args.to_dict()
        for values in (vars(copied), saved):
            rows = values["per_device_train_batch_size"]
            self.seen.append(rows)
            steps = values["gradient_accumulation_steps"]
            self.seen.append(steps == (2 if hasattr(self, "_loop") else 4))


@trainer("noise of its own generator")
class Noise(OfUser):
    """It was refused as a loss that compares rows."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.generator = torch.Generator().manual_seed(1)

    def loss_of(self, scores, labels, items):
        noise = torch.randn(scores.shape, generator=self.generator)
        self.seen.append(noise.sum().item())
        return cross_entropy(scores + noise, labels)


class RecordsGradients(TrainerCallback):
    """By a hook, which the stock loop calls in the order of the batches."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.norms = []
        model.head.register_full_backward_hook(self.record)

    def record(self, module, inputs, outputs):
        self.norms.append(outputs[0].norm().item())


class WithLoss(Net):
    """A model that computes its loss: the Trainer's own ``compute_loss`` is enough."""

    def forward(self, x, labels=None):
        scores = super().forward(x)
        return {"loss": cross_entropy(scores, labels), "logits": scores}


@trainer("a hook on gradients")
class HooksGradients:
    """Replicas called it at the same time."""

    net = WithLoss
    callbacks = (RecordsGradients,)

    @property
    def seen(self):
        (callback,) = (
            each
            for each in self.callback_handler.callbacks
            if isinstance(each, RecordsGradients)
        )
        return callback.norms


class ScalesGradients(RecordsGradients):
    """By a number that each call moves."""

    def record(self, module, inputs, outputs):
        self.norms.append(1 + len(self.norms))
        return (inputs[0] / self.norms[-1],)


@trainer("a hook that changes gradients")
class HookChangesGradients(HooksGradients):
    callbacks = (ScalesGradients,)


QUICK = ["numbers of accumulation", "items of its own", "a hook on gradients"]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("layout", few_of(LAYOUTS, ["virtual"]))
@pytest.mark.parametrize("name", few_of(TRAINERS, QUICK))
def test_users_trainer_equals_gradient_accumulation(tmp_path, name, layout):
    own = TRAINERS[name]
    if name == "items of all batches beside a mean":
        # The stock loop divides by the steps of a whole window.
        pytest.importorskip("transformers", "5.19")
    ours = trained(own, tmp_path, layout)
    stock = trained(own, tmp_path)
    assert_same_net(ours.model, stock.model, ours.seen, stock.seen)
    silent = (DividesBySteps, ScaledByItself, ScaledSum, ItemsAndMean)
    assert stock.seen or own in silent
    # Between calls the loop has its own numbers, and accelerate those of a whole step.
    assert ours.args.gradient_accumulation_steps == 1
    assert ours.args.per_device_train_batch_size == 12
    assert ours.accelerator.sync_gradients


class DividesByRows(OfUser):
    def loss_of(self, scores, labels, items):
        rows = self.args.per_device_train_batch_size
        return cross_entropy(scores, labels, reduction="sum") / rows


def test_sum_by_rows_of_arguments_refused_remedy_works(tmp_path):
    """With the remedy losses are added, and rows are those of the step."""
    with pytest.raises(ValueError, match='pass reduction="sum"'):
        trained(DividesByRows, tmp_path, "virtual")
    ours = trained(DividesByRows, tmp_path, "virtual", reduction="sum")
    assert ours.state.log_history[0]["loss"] == pytest.approx(
        trained(DividesByRows, tmp_path).state.log_history[0]["loss"]
    )


class ScaledMean(OfUser):
    loss_is_scaled_for_ga = True


class OfFunction(OfUser):
    """Its labels cannot be counted, so the stock loop has no items."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, compute_loss_func=self.of_scores, **kwargs)

    def compute_loss(self, model, inputs, *args, **kwargs):
        inputs = dict(inputs)
        labels = inputs["labels"]
        return self.of_scores(model(inputs["x"]), labels)

    def of_scores(self, scores, labels):
        labels = torch.tensor([each["label"] for each in labels])
        return cross_entropy(scores, labels) / self.current_gradient_accumulation_steps


def with_dicts(entries):
    return {
        "x": torch.stack([each["x"] for each in entries]),
        "labels": [{"label": each["labels"]} for each in entries],
    }


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_function_that_divides_by_the_steps(tmp_path):
    """The stock loop does not divide a function's loss, which was divided twice."""
    options = {"data_collator": with_dicts}
    ours = trained(OfFunction, tmp_path, "virtual", **options)
    stock = trained(OfFunction, tmp_path, **options)
    assert_same_net(ours.model, stock.model, [], [])


class AddedMean(ItemsAndMean):
    """The stock loop adds the mean of each batch, beside one mean over all items."""

    def loss_of(self, scores, labels, items):
        loss = cross_entropy(scores, labels, reduction="sum") / items
        return loss + scores.square().mean()


class Steps(OfUser):
    def training_step(self, *args):
        return super().training_step(*args)


class Surrounds(OfUser):
    def compute_loss_context_manager(self):
        return super().compute_loss_context_manager()


class AtSubstepEnd(TrainerCallback):
    def on_substep_end(self, *args, **kwargs):
        raise AssertionError("this loop has no part of a step")


class WithCallback(OfUser):
    callbacks = (AtSubstepEnd,)


class Stops(OfUser):
    def note(self, inputs):
        self.control.should_training_stop = self.state.global_step == 1


class StopsBetweenSteps(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 2


class StopsByCallback(OfUser):
    callbacks = (StopsBetweenSteps,)


TOLD = {
    "a mean beside items": (AddedMean, "but compute_loss is no sum over the batches"),
    "a mean": (ScaledMean, "the stock loop computes.*if compute_loss divides"),
    "training_step": (Steps, r"Steps\.training_step is called once per optimizer"),
    "context manager": (
        Surrounds,
        r"Surrounds\.compute_loss_context_manager is called once per optimizer",
    ),
    "on_substep_end": (WithCallback, r"AtSubstepEnd\.on_substep_end is not called"),
    "stop": (Stops, r"ended the training by self\.control in a step"),
}


@pytest.mark.parametrize("name", TOLD)
def test_what_the_loop_does_otherwise_is_told_once(tmp_path, name):
    own, words = TOLD[name]
    with pytest.warns(UserWarning, match=words) as caught:
        trained(own, tmp_path, "virtual")
    assert len(caught) == 1


@pytest.mark.filterwarnings("error::UserWarning")
def test_remedies_of_what_is_told_work(tmp_path):
    ours = trained(StopsByCallback, tmp_path, "virtual")
    assert ours.state.global_step == 2


class TakesOut(OfUser):
    def training_step(self, model, inputs, items=None):
        self.labels = inputs.pop("labels")
        return super().training_step(model, inputs, items)


class TakesOutOfBatch(OfUser):
    def compute_loss(self, model, inputs, **kwargs):
        labels = inputs.pop("labels")
        return cross_entropy(model(**inputs), labels)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_column_of_a_step_refused_remedy_works(tmp_path):
    with pytest.raises(AttributeError, match=r"all its batches, without pop\('labels'"):
        trained(TakesOut, tmp_path, "virtual")
    ours = trained(TakesOutOfBatch, tmp_path, "virtual")
    stock = trained(TakesOutOfBatch, tmp_path)
    assert_same_net(ours.model, stock.model, [], [])
