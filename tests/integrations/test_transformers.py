"""ScatterOnceTrainer beside ``transformers.Trainer`` on one device with the rows of all
devices per call.
"""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import transformers
from harness.oracle import randn, seeded
from harness.own_modules import IN, OUT, PROGRAMS, assert_same_net, told_of
from harness.pairwise import few_of
from harness.trainers import (
    LAYOUTS,
    arguments,
    assert_same_parameters,
    assert_same_run,
    image_classifier,
    images,
    language_model,
    padded,
    quietly,
    sentences,
    sequence_classifier,
    token_classifier,
)
from harness.writes import NETWORKS, WRITES, Written, assert_same_writes
from torch import nn

from scatterpar.integrations.transformers import ScatterOnceMixin, ScatterOnceTrainer

pytestmark = pytest.mark.draws
ROWS = 2  # per device
BOTH = pytest.mark.parametrize(
    "layout",
    [
        pytest.param(["cpu:0", "cpu:1", "cpu:0"], id="virtual"),
        pytest.param(["cpu"] * 2, id="shared", marks=pytest.mark.slow),
    ],
)


def mixed(cls):
    if cls is transformers.Trainer:
        return ScatterOnceTrainer
    return type(cls.__name__, (ScatterOnceMixin, cls), {})


def trainer_of(
    folder, devices, count, model, *, cls=transformers.Trainer, extra=None, **options
):
    """A Trainer on these devices, or the stock one with the rows of ``count``."""
    extra = dict(extra or {})
    options = {
        "gradient_accumulation_steps": 2,
        "remove_unused_columns": False,
    } | options
    times = 1 if devices else count
    for name in ("train", "eval"):
        options.setdefault(f"per_device_{name}_batch_size", ROWS)
        options[f"per_device_{name}_batch_size"] *= times
    if devices:
        cls = mixed(cls)
        extra["device_ids"] = devices
    args = arguments(folder, **options)
    extra = {"train_dataset": sentences(25), "data_collator": padded} | extra
    with seeded():
        return cls(model=model(), args=args, **extra)


def trained(*args, **kwargs):
    trainer = trainer_of(*args, **kwargs)
    with seeded():
        quietly(trainer.train)
    return trainer


def both(folder, layout, model, **options):
    """Ours after a training, and the stock Trainer."""
    count = len(layout)
    return [
        trained(folder, devices, count, model, **options) for devices in (layout, None)
    ]


def own_loss(outputs, labels, num_items_in_batch=None):
    logits = outputs.logits[:, :-1].flatten(0, 1)
    losses = nn.functional.cross_entropy(
        logits, labels[:, 1:].flatten(), reduction="sum"
    )
    return losses / num_items_in_batch


class Focal(transformers.Trainer):
    """A loss of all rows, with a penalty, and numbers that are logged."""

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        losses = nn.functional.cross_entropy(outputs.logits, labels, reduction="none")
        weights = 1 - torch.exp(-losses.detach())
        loss = (weights * losses).sum() / weights.sum()
        loss = loss + 0.01 * model.classifier.weight.square().sum()
        self.log({"weight": float(weights.mean())})
        return (loss, outputs) if return_outputs else loss


class OwnStep(transformers.Trainer):
    """Computes its loss and gradients itself, and calls a part of the model."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        encoded = model.bert(inputs["input_ids"], inputs["attention_mask"])
        scores = model.classifier(encoded.pooler_output)
        loss = nn.functional.cross_entropy(scores, inputs["labels"])
        self.accelerator.backward(loss / self.current_gradient_accumulation_steps)
        return loss.detach() / self.current_gradient_accumulation_steps


CLASSES = {"extra": {"data_collator": partial(padded, kind="classes")}}
RUNS = {
    "language": (language_model, {}),
    "language, mean of batches": (
        language_model,
        {"average_tokens_across_devices": False},
    ),
    "language, checkpoints": (language_model, {"gradient_checkpointing": True}),
    "language, reentrant checkpoints": (
        language_model,
        {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": True},
        },
    ),
    "language, smoothed labels": (language_model, {"label_smoothing_factor": 0.1}),
    "language, a loss function": (
        language_model,
        {"extra": {"compute_loss_func": own_loss}},
    ),
    "tokens": (
        token_classifier,
        {"extra": {"data_collator": partial(padded, kind="tokens")}},
    ),
    "classes": (sequence_classifier, CLASSES),
    "regression": (
        partial(sequence_classifier, num_labels=1),
        {"extra": {"data_collator": partial(padded, kind="numbers")}},
    ),
    "images": (
        image_classifier,
        {"extra": {"train_dataset": images(25), "data_collator": None}},
    ),
    "own loss": (sequence_classifier, {"cls": Focal, **CLASSES}),
    "own step": (sequence_classifier, {"cls": OwnStep, **CLASSES}),
    "clipping, one batch per step": (
        language_model,
        {"max_grad_norm": 0.05, "gradient_accumulation_steps": 1},
    ),
}


# Losses of the model, of a function, and of a method; calls of the model, of a part, and
# again in the backward pass.
QUICK_RUNS = [
    *("language", "language, reentrant checkpoints", "language, a loss function"),
    *("tokens", "own loss", "own step"),
]


@BOTH
@pytest.mark.parametrize("name", few_of(RUNS, QUICK_RUNS))
def test_run_equals_one_device(name, layout, tmp_path, divided_calls, warned):
    model, options = RUNS[name]
    ours, stock = both(tmp_path, layout, model, **options)
    assert divided_calls
    # "reentrant": torch adds up a part at a time, and computes the mean in another way
    assert_same_run(ours, stock)
    assert not warned
    # The modules are as before.
    for module in ours.model.modules():
        assert "_compiled_call_impl" not in vars(module)
        assert "generate" not in vars(module)


@BOTH
def test_dropout_changes_the_draws_alone(layout, tmp_path):
    model = partial(language_model, dropout=0.1)
    one_step = {"max_steps": 1, "warmup_steps": 0}
    ours, stock = both(tmp_path, layout, model, **one_step)
    assert len(ours.state.log_history) == len(stock.state.log_history)
    again = trained(tmp_path, layout, 0, model, **one_step)
    assert_same_parameters(ours, again, 0.0)


@BOTH
def test_evaluation_and_prediction_equal_stock(layout, tmp_path, divided_calls):
    results = []
    for devices in (layout, None):
        trainer = trainer_of(
            tmp_path, devices, len(layout), sequence_classifier, **CLASSES
        )
        metrics = quietly(trainer.evaluate, sentences(11))
        predictions = quietly(trainer.predict, sentences(11))
        results.append((metrics["eval_loss"], predictions.predictions))
    assert divided_calls
    (loss, predicted), (expected_loss, expected) = results
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert predicted == pytest.approx(expected, rel=1e-6)


def test_evaluation_during_training_equals_stock(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1}
    options["extra"] = {"eval_dataset": sentences(9)}
    ours, stock = both(tmp_path, ["cpu:0", "cpu:1"], language_model, **options)
    assert_same_run(ours, stock)
    assert sum("eval_loss" in log for log in ours.state.log_history) == 3


class Small(nn.Module):
    """A network of a program as a Trainer's model."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, labels=None):
        return self.net(x)


def rows_of(count):
    values = randn(count, IN)
    return [{"x": values[i], "labels": i % OUT} for i in range(count)]


QUICK_PROGRAMS = [
    *("a centre in place", "batch normalisation", "a module on first use"),
    *("attributes of parts", "a hook that fills a dict", "frozen in the sixth call"),
    *("a reentrant checkpoint", "a teacher through .data"),
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("layout", few_of(LAYOUTS, ["virtual"]))
@pytest.mark.parametrize("name", few_of(PROGRAMS, QUICK_PROGRAMS))
def test_own_modules_equal_the_stock_loop(name, layout, tmp_path, recwarn):
    program = PROGRAMS[name]

    class OfProgram(transformers.Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            return program.step(self, model, inputs["x"], inputs["labels"])

    trainers = []
    options = {"optim": "sgd", "learning_rate": 0.1, "weight_decay": 0.0}
    options |= {"per_device_train_batch_size": 3, "max_steps": 4, "warmup_steps": 0}
    extra = {"train_dataset": rows_of(72), "data_collator": None}
    for devices in (LAYOUTS[layout], None):
        trainer = trainer_of(
            tmp_path, devices, 2, program.net, cls=OfProgram, extra=extra, **options
        )
        with seeded():  # some prepare modules of random weights
            program.prepare(trainer, trainer.model)
        quietly(trainer.train)
        trainers.append(trainer)
    if told_of(recwarn):
        return
    ours, stock = trainers
    values = [program.read(trainer, trainer.model) for trainer in trainers]
    assert_same_net(ours.model, stock.model, *values)


class Writes(transformers.Trainer):
    """Its functions write in every way."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.written = Written(WRITES | NETWORKS)

    def compute_loss(self, model, inputs, *args, **kwargs):
        first = float(inputs["input_ids"][0, 0])
        result = super().compute_loss(model, inputs, *args, **kwargs)
        loss = result[0] if isinstance(result, tuple) else result
        self.written.write(float(loss.detach()), first)
        return result


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("layout", few_of(LAYOUTS, ["virtual"]))
@pytest.mark.parametrize("verb", ["train", "evaluate"])
def test_what_functions_write_is_as_stock(verb, layout, tmp_path):
    values = []
    for devices in (LAYOUTS[layout], None):
        extra = {**CLASSES["extra"], "eval_dataset": sentences(9)}
        trainer = trainer_of(
            tmp_path, devices, 2, sequence_classifier, cls=Writes, extra=extra
        )
        with seeded():
            quietly(getattr(trainer, verb))
        values.append(trainer.written.values())
    assert_same_writes(*values)


def test_arguments_are_those_of_one_device(tmp_path):
    args = arguments(tmp_path, per_device_train_batch_size=3)
    before = copy.deepcopy(args.to_dict())
    trainer = ScatterOnceTrainer(
        language_model(),
        args,
        device_ids=["cpu:0", "cpu:1"],
        train_dataset=sentences(8),
    )
    assert args.to_dict() == before  # the user's own
    assert trainer.args.per_device_train_batch_size == 6
    assert trainer.args.train_batch_size == trainer._train_batch_size == 6
    assert trainer.args.per_device_eval_batch_size == 16


@pytest.mark.parametrize("layout", few_of(LAYOUTS, ["virtual"]))
def test_sharded_optimizer_equals_stock(layout, tmp_path):
    extra = {"shard_optimizer": True}
    ours = trained(tmp_path, LAYOUTS[layout], 2, language_model, extra=extra)
    stock = trained(tmp_path, None, 2, language_model)
    assert_same_run(ours, stock)


@pytest.mark.slow
def test_compiled_model_equals_stock(tmp_path, divided_calls):
    options = {"torch_compile": True, "torch_compile_backend": "eager"}
    ours, stock = both(tmp_path, ["cpu:0", "cpu:1"], language_model, **options)
    assert len(divided_calls) == 6  # three steps of two batches
    assert_same_run(ours, stock)


def test_bfloat16_near_stock(tmp_path):
    model = lambda: language_model().float()  # noqa: E731
    ours, stock = both(tmp_path, ["cpu:0", "cpu:1"], model, bf16=True, optim="sgd")
    assert_same_parameters(ours, stock, 3e-2)


class Generates(transformers.Trainer):
    """Generates in its step, as trainers of reinforcement learning do."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        with torch.no_grad():
            words = model.generate(
                inputs["input_ids"], max_new_tokens=3, do_sample=False, pad_token_id=0
            )
        inputs = {"input_ids": words, "labels": words}
        return super().compute_loss(model, inputs, *args, **kwargs)


def test_generation_on_the_master_is_told_once(tmp_path, recwarn):
    ours, stock = both(tmp_path, ["cpu:0", "cpu:1"], language_model, cls=Generates)
    assert_same_run(ours, stock)
    told = [w for w in recwarn if "generate runs on the first device" in str(w.message)]
    assert len(told) == 1


def test_parameters_and_gradients_cross_once_per_step(tmp_path):
    sent, received = [], []

    class Counts(transformers.TrainerCallback):
        def on_substep_end(self, *args, **kwargs):
            num_bytes = trainer._divided.engine.last_step.bytes
            sent.append(num_bytes["replicate"])
            received.append(num_bytes["reduce"])

        on_step_end = on_substep_end

    options = {"gradient_accumulation_steps": 3, "max_steps": 2}
    extra = {"train_dataset": sentences(24), "callbacks": [Counts()]}
    devices = ["cpu:0", "cpu:1"]
    trainer = trainer_of(tmp_path, devices, 2, language_model, extra=extra, **options)
    quietly(trainer.train)
    first, *others = sent
    assert first > 0
    assert [number > 0 for number in others] == [False, False, True, False, False]
    assert received == [0, 0, first, 0, 0, first]


@pytest.mark.parametrize("ours_first", [True, False])
def test_checkpoint_resumes_with_the_other(ours_first, tmp_path):
    layout = ["cpu:0", "cpu:1"]
    first, second = (layout, None) if ours_first else (None, layout)
    options = {"save_strategy": "steps", "save_steps": 1}
    trained(tmp_path, first, 2, language_model, max_steps=1, **options)
    resumed = trainer_of(tmp_path, second, 2, language_model, max_steps=3)
    with seeded():
        quietly(resumed.train, resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    stock = trained(tmp_path / "whole", None, 2, language_model, max_steps=3)
    # The schedule was made for one step in the first training.
    assert resumed.state.global_step == stock.state.global_step


def test_trials_set_rows_of_one_device(tmp_path):
    trainer = trainer_of(tmp_path, ["cpu:0", "cpu:1"], 2, language_model)
    trainer.hp_search_backend = transformers.trainer_utils.HPSearchBackend.RAY
    trainer._hp_search_setup({"per_device_train_batch_size": 3})
    assert trainer.args.per_device_train_batch_size == 6
    assert trainer._train_batch_size == 6
    trainer._hp_search_setup({"learning_rate": 0.1})
    assert trainer.args.per_device_train_batch_size == 6


REFUSED = {
    "lomo": ({"device_ids": ["cpu"] * 2}, {"optim": "lomo"}, "lomo"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_refused_by_name(name, tmp_path):
    extra, options, words = REFUSED[name]
    args = arguments(tmp_path, **options)
    with pytest.raises((ValueError, TypeError), match=words):
        ScatterOnceTrainer(language_model(), args, **extra)


def test_error_reaches_the_user(tmp_path):
    class Fails(transformers.Trainer):
        def compute_loss(self, *args, **kwargs):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        trained(tmp_path, ["cpu:0", "cpu:1"], 2, language_model, cls=Fails)
