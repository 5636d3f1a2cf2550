"""ScatterOnceTrainer beside the stock Trainer on one device, with the
same total batch.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import pickle
import queue
import time
from collections import UserList
from functools import partial
from typing import ClassVar

import pytest
import torch
import transformers
from accelerate.utils.memory import release_memory
from faults import processes
from harness import oracle
from harness.isolation import guarded
from harness.models import Of
from harness.oracle import assert_close, randn, seeded
from harness.own_modules import IN, OUT, PROGRAMS, assert_same_net
from harness.pairwise import few_of
from harness.trainers import (
    LAYOUTS,
    PADDING,
    SAME,
    VOCABULARY,
    arguments,
    assert_same_bits,
    assert_same_parameters,
    assert_same_run,
    image_classifier,
    images,
    language_model,
    padded,
    parameters,
    quietly,
    sentences,
    sequence_classifier,
    token_classifier,
)
from harness.writes import IRREVOCABLE, RESTORABLE, Written, assert_same_writes
from torch import nn
from transformers import TrainerCallback, default_data_collator

from scatterpar import ScatterOnceParallel, count_labels, splitcheck
from scatterpar.integrations.trainer_loop import TrainerLoop
from scatterpar.integrations.transformers import ScatterOnceMixin, ScatterOnceTrainer
from scatterpar.options.graphs import decision, schedule

pytestmark = [pytest.mark.trainers, pytest.mark.draws]

ROWS = 17  # in windows of 12: the last one is ragged, and so is a batch in it
VIRTUAL = LAYOUTS["virtual"]


regression = partial(sequence_classifier, num_labels=1, problem_type="regression")
LANGUAGE = language_model, sentences, padded
CLASSIFIER = sequence_classifier, sentences, partial(padded, kind="classes")
CASES = {
    "causal language model": LANGUAGE,
    "sequence classifier": CLASSIFIER,
    "regression": (regression, sentences, partial(padded, kind="numbers")),
    "token classifier": (token_classifier, sentences, partial(padded, kind="tokens")),
    "image classifier": (image_classifier, images, None),
}


def sizes(rows, k=1):
    return {"per_device_train_batch_size": rows, "gradient_accumulation_steps": k}


def build(cls, folder, case, model=None, extra=None, **options):
    """A trainer of a case; ``extra`` beside the arguments' ``options``."""
    factory, data, collate = case
    args = arguments(folder, remove_unused_columns=False, **options)
    given = {
        "data_collator": collate,
        "train_dataset": data(ROWS),
        "eval_dataset": data(7),
    }
    return cls(factory() if model is None else model, args, **given, **(extra or {}))


def ours(folder, case, devices=VIRTUAL, sharded=False, **options):
    extra = {"device_ids": devices, "shard_optimizer": sharded}
    return build(ScatterOnceTrainer, folder, case, extra=extra, **options)


def beside(
    folder,
    case=LANGUAGE,
    *,
    model=None,
    devices=VIRTUAL,
    own=(3, 2),
    whole=(12,),
    each=({}, {}),
    classes=(ScatterOnceTrainer, transformers.Trainer),
    prepare=lambda trainer: None,
    train=lambda trainer: trainer.train(),
    extra=None,
    **options,
):
    """Ours with 2 replicas, 3 rows each and 2 batches a step; the stock one with 12
    rows.

    ``each``: further options of the one and of the other; ``extra``: of both, beside
    the arguments. The 7 rows of an evaluation come in batches of 2: the last one counts
    with its row.
    """
    model = case[0]() if model is None else model
    evaluated = {"per_device_eval_batch_size": 2}
    trainers, places = [], ({"device_ids": devices}, {})
    for cls, size, more, place in zip(classes, (own, whole), each, places, strict=True):
        asked = {**sizes(*size), **evaluated, **options, **more}
        given = {**place, **(extra or {})}
        trainers.append(build(cls, folder, case, copy.deepcopy(model), given, **asked))
        prepare(trainers[-1])
        quietly(train, trainers[-1])
    return trainers


def assert_same_evaluation(ours, stock):
    mine, theirs = (quietly(trainer.evaluate)["eval_loss"] for trainer in (ours, stock))
    assert mine == pytest.approx(theirs, rel=1e-6)


def with_and_without(own):
    """A Trainer with its own methods, below the mixin and alone."""
    return (
        type("Ours", (ScatterOnceMixin, own, transformers.Trainer), {}),
        type("Stock", (own, transformers.Trainer), {}),
    )


class Steps:
    """The loss that is logged tells how often it was called."""

    def training_step(self, *args):
        return super().training_step(*args) * 2


class WritesOut:
    """As Trainer's documentation shows it, in a subclass of ours."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()


class Older:
    """As in transformers 5.2: it counts all labels, shifted or not."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        vars(self).pop("_loss_shifts_labels", None)

    def _get_num_items_in_batch(self, batches, device):
        return sum(batch["labels"].ne(PADDING).sum() for batch in batches)


class Streams(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(sentences(ROWS))


class Loads:
    """Loaders of its own, which follow the arguments."""

    def loader(self, data, size):
        how = {"batch_size": size, "collate_fn": self.data_collator}
        return self.accelerator.prepare(torch.utils.data.DataLoader(data, **how))

    def get_train_dataloader(self):
        return self.loader(self.train_dataset, self.args.train_batch_size)

    def get_eval_dataloader(self, eval_dataset=None):
        return self.loader(self.eval_dataset, self.args.eval_batch_size)


def lora():
    peft = pytest.importorskip("peft")
    with seeded():
        adapters = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        return peft.get_peft_model(language_model(), adapters).double()


def total(outputs, labels, num_items_in_batch=None):
    """A ``compute_loss_func`` may ignore the number of items, and sum."""
    logits = outputs["logits"].movedim(-1, 1)
    return nn.functional.cross_entropy(logits, labels, reduction="sum")


class IgnoresItems(nn.Module):
    """Takes loss keywords, and computes its own mean, as BERT does for regression."""

    def __init__(self, combine):
        super().__init__()
        with seeded():
            self.words = nn.Embedding(31, 4).double()
        self.combine = combine

    def forward(
        self, input_ids, attention_mask, labels, num_items_in_batch=None, **kwargs
    ):
        losses = (
            self.words(input_ids).square().sum(-1)[..., 1:][labels[..., 1:] != -100]
        )
        return {"loss": self.combine(losses, num_items_in_batch), "logits": losses}


def shifting(combine):
    """How its losses combine is seen, not believed: labels are shifted in the loss."""
    model = IgnoresItems(combine)
    model.loss_type = "ForCausalLM"
    return {"model": model, "relative": 1e-7}


def llava():
    """Two images of four patches for each text."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    vision = transformers.CLIPVisionConfig(
        **sizes, num_hidden_layers=2, image_size=8, patch_size=4
    )
    words = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    text = transformers.LlamaConfig(
        **sizes, **words, num_hidden_layers=1, vocab_size=VOCABULARY
    )
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=VOCABULARY - 1
    )
    with seeded():
        return transformers.LlavaForConditionalGeneration(config).double()


def with_images(rows):
    placeholders = torch.full((len(rows), 8), VOCABULARY - 1)
    texts = torch.stack([torch.tensor(row["input_ids"][:3]) for row in rows])
    ids = torch.cat([placeholders, texts % (VOCABULARY - 1)], 1)
    numbers = [2 * row["number"] + i for row in rows for i in range(2)]
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": ids.masked_fill(ids == VOCABULARY - 1, PADDING),
        "pixel_values": torch.stack([randn(3, 8, 8, seed=n) for n in numbers]),
    }


def single_words(count):
    words = [[1] if i % 2 else [1, 2, 3, i % 9] for i in range(count)]
    return [{"input_ids": ids, "number": i} for i, ids in enumerate(words)]


def unlabelled(rows):
    return {name: value for name, value in padded(rows).items() if name != "labels"}


def clip(kind):
    text = {"vocab_size": VOCABULARY, "hidden_size": 8, "intermediate_size": 8}
    text |= {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
    }
    image = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    image |= {"num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=image
    )
    with seeded():
        return getattr(transformers, f"{kind}Model")(config).double()


def captioned(count):
    pairs = zip(images(ROWS), sentences(ROWS), strict=True)
    return [image | text for image, text in pairs][: count if count == ROWS else 8]


def captions(rows):
    pixels = torch.stack([row["pixel_values"] for row in rows])
    return {**unlabelled(rows), "pixel_values": pixels, "return_loss": True}


RUNS = {
    **{name: {"case": case, "max_steps": 5} for name, case in CASES.items()},
    "smoothing": {"label_smoothing_factor": 0.1},
    "LoRA": {"case": (lora, sentences, padded), "label_smoothing_factor": 0.1},
    "clipping": {"max_grad_norm": 0.1},
    "no clipping": {"max_grad_norm": 0.0, "average_tokens_across_devices": False},
    "checkpointing": {"activation_checkpointing": True},
    "drop last": {"neftune_noise_alpha": None, "dataloader_drop_last": True},
    "sgd": {"optim": "sgd", "lr_scheduler_type": "cosine"},
    "empty cache": {"torch_empty_cache_steps": 1},  # it ended the first step on the CPU
    "workers": {"dataloader_num_workers": 1, "devices": LAYOUTS["shared"]},
    "iterable": {
        "prepare": lambda trainer: setattr(trainer, "train_dataset", Streams())
    },
    "compute_loss_func": {"extra": {"compute_loss_func": total}},
    "training_step": {"case": CLASSIFIER, "classes": with_and_without(Steps)},
    "training_step written out": {
        "case": CLASSIFIER,
        "classes": (
            type("Ours", (WritesOut, ScatterOnceTrainer), {}),
            type("Stock", (WritesOut, transformers.Trainer), {}),
        ),
    },
    "older": {"classes": with_and_without(Older)},
    "another number of images": {"case": (llava, sentences, with_images)},
    "loaders of its own": {"case": CLASSIFIER, "classes": with_and_without(Loads)},
    "divides by items": shifting(lambda losses, items: losses.sum() / items),
    "hides that it divides": shifting(lambda losses, items: losses.sum() / int(items)),
    "ignores items": shifting(lambda losses, items: losses.mean()),
    "an auxiliary mean": shifting(
        lambda losses, items: losses.sum() / items + 0.1 * losses.sqrt().mean()
    ),
    # The loss of such a row is NaN, which once hid that those of both rows combine by
    # the rest.
    "a row of which nothing counts": {
        "case": (
            partial(IgnoresItems, lambda losses, items: losses.mean()),
            single_words,
            padded,
        ),
        "own": (3,),
        "whole": (6,),
    },
}
QUICK = [
    *("causal language model", "clipping", "divides by items"),
    *("a row of which nothing counts", "another number of images", "older"),
]


@pytest.mark.parametrize("name", few_of(RUNS, QUICK, ["divides by items"]))
def test_trainer_run_equals_one_device(tmp_path, recwarn, name):
    """Parameters, learning rates, losses, gradient norms; the last window is ragged."""
    run = dict(RUNS[name])
    relative = run.pop("relative", SAME)
    trainers = beside(tmp_path, **run)
    assert trainers[0].state.global_step == run.get("max_steps", 3)
    assert_same_run(*trainers, relative)
    assert_same_evaluation(*trainers)
    assert not [w for w in recwarn if "combine" in str(w.message)]


def accuracy(prediction):
    right = prediction.predictions.argmax(-1) == prediction.label_ids
    return {"accuracy": float(right.mean()), "number": prediction.label_ids.size}


@pytest.mark.slow
def test_epochs_metrics_predictions_as_stock(tmp_path):
    """With windows that are full: stock Trainers add up the others' means."""
    case = (
        language_model,
        lambda count: sentences({ROWS: 12, 7: 8}.get(count, count)),
        padded,
    )
    how = {
        "whole": (6, 2),
        "num_train_epochs": 2,
        "max_steps": -1,
        "eval_strategy": "epoch",
    }
    trainers = beside(tmp_path, case, extra={"compute_metrics": accuracy}, **how)
    assert_same_run(*trainers)
    assert any("eval_accuracy" in log for log in trainers[0].state.log_history)
    predictions = [quietly(trainer.predict, sentences(7)) for trainer in trainers]
    assert torch.equal(*(torch.tensor(p.label_ids) for p in predictions))
    assert_close(
        *(torch.tensor(p.predictions) for p in predictions), "predictions", SAME
    )


def test_arguments_copied_with_all_rows(tmp_path):
    options = {**sizes(3, 2), "per_device_eval_batch_size": 2}
    args = arguments(tmp_path, remove_unused_columns=False, **options)
    before = args.to_dict()
    given = {"train_dataset": sentences(4), "device_ids": ["cpu"] * 3}
    copied = ScatterOnceTrainer(sequence_classifier(), args, **given).args
    assert args.to_dict() == copied.to_dict() == before
    made = vars(copied)
    assert made | sizes(3 * 6) | {"per_device_eval_batch_size": 2} == made


def mean_of_rows(outputs, labels, num_items_in_batch=None):
    """A ``compute_loss_func`` that does not read the number of items."""
    return nn.functional.cross_entropy(outputs.logits, labels)


def mean_of_pairs(outputs, labels, num_items_in_batch=None):
    """Compares rows: exact where the step is one call."""
    return nn.functional.cross_entropy(outputs.logits @ outputs.logits.T, labels)


LOSS_FUNCTIONS = {  # the loss, the devices, batches per replica, further arguments
    "one call": (mean_of_rows, ["cpu"], 1, {}),
    "one call, a mean": (mean_of_rows, ["cpu"], 1, {"reduction": "mean"}),
    "one call, pairs": (mean_of_pairs, ["cpu"], 1, {}),
    "two calls": (mean_of_rows, ["cpu"], 2, {}),
    "two devices": (mean_of_rows, VIRTUAL, 2, {}),
    "two devices, a mean": (mean_of_rows, VIRTUAL, 2, {"reduction": "mean"}),
}


@pytest.mark.parametrize(
    "name", few_of(LOSS_FUNCTIONS, ["one call", "two devices, a mean"])
)
def test_loss_function_of_rows_is_exact(tmp_path, name):
    """In a step that is one call, a later look had parts, and took it for a sum."""
    function, devices, k, given = LOSS_FUNCTIONS[name]
    trainers = []
    for cls, rows, more in (
        (ScatterOnceTrainer, 12 // k // len(devices), {"device_ids": devices, **given}),
        (transformers.Trainer, 12, {}),
    ):
        options = {**sizes(rows, k if more else 1), "max_steps": 5}
        extra = {"compute_loss_func": function, **more}
        trainers.append(build(cls, tmp_path, CLASSIFIER, extra=extra, **options))
        quietly(trainers[-1].train)
    assert_same_run(*trainers)


@pytest.mark.slow
def test_named_mean_is_no_sum(tmp_path):
    """The remedy that a refusal names: it was refused in the same words."""
    extra = {"compute_loss_func": mean_of_rows, "device_ids": VIRTUAL}
    options = {"case": CLASSIFIER, **sizes(3)}
    counted = {**extra, "count": lambda batch: batch["labels"].sum() + 1}
    trainer = build(ScatterOnceTrainer, tmp_path, extra=counted, **options)
    with pytest.raises(ValueError, match=r'pass reduction="mean", without count='):
        quietly(trainer.train)
    named = build(
        ScatterOnceTrainer, tmp_path, extra={**extra, "reduction": "mean"}, **options
    )
    stock = build(
        transformers.Trainer,
        tmp_path,
        CLASSIFIER,
        extra={"compute_loss_func": mean_of_rows},
        **sizes(6),
    )
    for own in (named, stock):
        quietly(own.train)
    assert_same_run(named, stock)
    # The sum of the items is none of the ways that are tried.
    summed = build(
        ScatterOnceTrainer,
        tmp_path,
        extra={**extra, "compute_loss_func": total, "reduction": "mean"},
        **options,
    )
    with pytest.raises(ValueError, match="none of these: a mean over labels"):
        quietly(summed.train)


class OwnLoss:
    """A loss of rows that are given to it in several forms."""

    def compute_loss(
        self, model, inputs, return_outputs=False, num_items_in_batch=None
    ):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = self.loss_of(outputs.logits, labels, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)


class Weighted(OwnLoss):
    def loss_of(self, logits, labels, _):
        weights = CLASS_WEIGHTS.to(logits.device)
        return nn.functional.cross_entropy(logits, labels, weights)


class Ratio(OwnLoss):
    """Of errors to what could be wrong, as in overlaps."""

    def loss_of(self, logits, labels, _):
        wanted = nn.functional.one_hot(labels, 3) * (1 + labels[:, None])
        return (wanted - logits).square().sum() / wanted.sum()


class Total(OwnLoss):
    def loss_of(self, logits, labels, _):
        return nn.functional.cross_entropy(logits, labels, reduction="sum")


class TwoMeans(OwnLoss):
    """One over rows, and one over rows of some classes: sums divided by numbers of the
    whole step.
    """

    def loss_of(self, logits, labels, num_items_in_batch):
        losses = nn.functional.cross_entropy(logits, labels, reduction="none")
        is_chosen = labels > 0
        rows, chosen = num_items_in_batch or (len(labels), is_chosen.sum())
        return losses.sum() / rows + logits[is_chosen].square().sum() / chosen

    def _get_num_items_in_batch(self, batches, device):
        labels = torch.cat([batch["labels"] for batch in batches])
        return len(labels), int((labels > 0).sum())


COMBINED = {
    "class weights": (
        Weighted,
        {"count": lambda batch: CLASS_WEIGHTS[batch["labels"]].sum()},
    ),
    "a ratio of sums": (
        Ratio,
        {"count": lambda batch: (1 + batch["labels"]).sum()},
    ),
    "a sum": (Total, {"reduction": "sum"}),
    "a sum of two means": (TwoMeans, {"reduction": "sum"}),
}


@pytest.mark.parametrize("layout", few_of(LAYOUTS, ["virtual"]))
@pytest.mark.parametrize("name", few_of(COMBINED, ["class weights"]))
def test_count_and_reduction_are_exact(tmp_path, recwarn, name, layout):
    """In steps of ragged batches, and in evaluations."""
    own, options = COMBINED[name]
    mine, stock = with_and_without(own)
    trainers = beside(
        tmp_path,
        CLASSIFIER,
        devices=LAYOUTS[layout],
        classes=(partial(mine, **options), stock),
        optim="sgd",
        max_grad_norm=0.1,
    )
    assert_same_run(*trainers)
    assert not [w for w in recwarn if "combine" in str(w.message)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", few_of(["class weights", "a ratio of sums"], ["a ratio of sums"])
)
def test_losses_without_count_refused(tmp_path, name):
    own, options = COMBINED[name]
    mine, _ = with_and_without(own)
    trainer = build(
        mine, tmp_path, CLASSIFIER, extra={"device_ids": VIRTUAL}, **sizes(3)
    )
    with pytest.raises(
        ValueError, match="Pass count= to the Trainer, a function of a batch"
    ):
        quietly(trainer.train)
    counted = {"device_ids": VIRTUAL, **options}
    quietly(build(mine, tmp_path, CLASSIFIER, extra=counted, **sizes(3)).train)


WRONG_COMBINATIONS = {
    "count_labels": (
        {"count": count_labels()},
        r'calls count\(batch\); pass count=lambda batch: batch\["labels"\]',
        TypeError,
    ),
    "a number": ({"count": 3}, "count must be callable", TypeError),
    "both": (
        {"count": len, "reduction": "sum"},
        'leave it out with reduction="sum"',
        ValueError,
    ),
    "none": ({"reduction": "none"}, 'must be "mean" or "sum"', ValueError),
}


@pytest.mark.parametrize("name", WRONG_COMBINATIONS)
def test_uncallable_count_refused(tmp_path, name):
    options, words, kind = WRONG_COMBINATIONS[name]
    with pytest.raises(kind, match=words):
        build(ScatterOnceTrainer, tmp_path, CLASSIFIER, extra=options)


USED_AGAIN = {
    "themselves": lambda args: args,
    "a copy": copy.copy,
    "a deep copy": copy.deepcopy,
    "replace": lambda args: dataclasses.replace(args, seed=7),
    "a dictionary": lambda args: transformers.TrainingArguments(**args.to_dict()),
    "JSON": lambda args: transformers.TrainingArguments(
        **json.loads(args.to_json_string())
    ),
}


@pytest.mark.parametrize("name", few_of(USED_AGAIN, ["replace"]))
def test_arguments_can_be_used_again(tmp_path, name):
    """They had 12, 24, 48 rows per step."""
    trainer = ours(tmp_path, CLASSIFIER, **sizes(3, 2))
    for _ in range(3):
        args = USED_AGAIN[name](trainer.args)
        trainer = ScatterOnceTrainer(sequence_classifier(), args, device_ids=VIRTUAL)
        rows = trainer.args.per_device_train_batch_size
        assert (rows, trainer.args.gradient_accumulation_steps) == (12, 1)
    torch.save(trainer.args, tmp_path / "args.bin")
    saved = torch.load(tmp_path / "args.bin", weights_only=False)
    assert type(saved.per_device_train_batch_size) is int
    args.per_device_train_batch_size = 5  # the user's, and so the others
    trainer = ScatterOnceTrainer(sequence_classifier(), args, device_ids=VIRTUAL)
    assert trainer.args.per_device_train_batch_size == 20


@pytest.mark.slow
def test_bf16_autocast_as_stock(tmp_path):
    """In the workers as in the caller: half precision's own rounding apart."""
    trainers = beside(
        tmp_path, CLASSIFIER, model=sequence_classifier().float(), bf16=True
    )
    logs = [trainer.state.log_history for trainer in trainers]
    losses = [[log["loss"] for log in log if "loss" in log] for log in logs]
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)
    assert len(losses[0]) == len(losses[1]) == 3


# --- captured sub-steps ---


def without_reads(make, *args, half=False):
    """The model with attention that does not read its mask on the host."""
    model = make(*args)
    model.set_attn_implementation("eager")
    return model.float() if half else model


# The case, the model, and options; float64 and no draws: as the stock Trainer.
REPLAYED = {
    "images": (CASES["image classifier"], image_classifier(), {}),
    "padded text": (LANGUAGE, without_reads(language_model), {}),
    "smoothing": (
        LANGUAGE,
        without_reads(language_model),
        {"label_smoothing_factor": 0.1},
    ),
    "dropout": (LANGUAGE, without_reads(language_model, 0.3), {}),
    "autocast": (
        LANGUAGE,
        without_reads(language_model, 0.3, half=True),
        {"bf16": True},
    ),
}
AS_STOCK = ("images", "padded text", "smoothing")


def reported(monkeypatch, *, is_captured):
    """What is said of graphs in each step of engines, on devices that wait."""
    monkeypatch.setattr(schedule, "_captures", lambda _: is_captured)
    monkeypatch.setattr(decision, "_TAIL", 1e9)
    monkeypatch.setattr(decision, "_LONGEST_RATIO", 1e9)
    reports = []
    loss = ScatterOnceParallel.loss

    def reporting(engine, *args, **options):
        result = loss(engine, *args, **options)
        reports.append(engine.last_step.graphs)
        return result

    monkeypatch.setattr(ScatterOnceParallel, "loss", reporting)
    return reports


def run_of(monkeypatch, folder, name, cls=ScatterOnceTrainer, **extra):
    """A trainer of two micro-batches of 2 rows per replica and window, trained.

    Of 17 rows, in windows of 16 the last one is one row.
    """
    case, model, options = REPLAYED[name]
    rows = 2 if cls is ScatterOnceTrainer else 16
    number = 4 if cls is ScatterOnceTrainer else 1
    options = {"num_train_epochs": 7, "max_steps": -1, **options}
    trainer = build(
        cls, folder, case, copy.deepcopy(model), extra, **sizes(rows, number), **options
    )
    with seeded():
        quietly(trainer.train)
    return trainer


@pytest.mark.parametrize("layout", few_of(LAYOUTS, ["virtual"]))
@pytest.mark.parametrize("name", few_of(REPLAYED, ["dropout"]))
def test_stock_loss_is_replayed(tmp_path, monkeypatch, name, layout):
    """The bits are those without graphs, and the losses those of the stock Trainer."""
    runs, reports = [], []
    for is_captured in (True, False):
        with monkeypatch.context() as patched:
            reports.append(reported(patched, is_captured=is_captured))
            devices = LAYOUTS[layout]
            runs.append(run_of(patched, tmp_path, name, device_ids=devices))
    assert len(reports[0]) == 14
    counts = [int(report.split()[0]) for report in reports[0] if "replayed" in report]
    assert max(counts) >= 3, reports[0]
    assert not any("replayed" in report for report in reports[1])
    assert_same_bits(*[trainer.model for trainer in runs])
    assert_same_run(*runs, 0.0)
    if name in AS_STOCK:
        stock = run_of(monkeypatch, tmp_path, name, transformers.Trainer)
        assert_same_run(runs[0], stock)


def test_calls_of_a_step_keep_nothing_on_the_loop(tmp_path, monkeypatch):
    """A capture of one replica's call found what another's had kept: "writes an
    object", and no graphs.
    """
    changed = []
    standing_in = TrainerLoop._standing_in

    @contextlib.contextmanager
    def watched(loop, *args):
        before = {name: copy.copy(value) for name, value in vars(loop).items()}
        with standing_in(loop, *args) as standing:
            yield standing
        for name, value in vars(loop).items():
            if isinstance(value, (dict, list)) and value != before[name]:
                changed.append(name)

    monkeypatch.setattr(TrainerLoop, "_standing_in", watched)
    run_of(monkeypatch, tmp_path, "dropout", device_ids=["cpu"])
    assert not changed


@pytest.mark.parametrize("function", ["compute_loss", "log"])
def test_replays_keep_nothing_of_a_call(tmp_path, monkeypatch, function):
    """A library's class that logs in its calls, or a function of yours: no graphs."""
    values = []

    def compute_loss(trainer, model, inputs, *args, **options):
        loss = transformers.Trainer.compute_loss(
            trainer, model, inputs, *args, **options
        )
        if function == "log":
            trainer.accelerator.log({"rows": len(inputs["pixel_values"])})
        return loss

    monkeypatch.setattr(
        "accelerate.Accelerator.log", lambda _, logs, **__: values.append(logs["rows"])
    )
    cls = type("Own", (ScatterOnceTrainer,), {"compute_loss": compute_loss})
    if function == "log":
        monkeypatch.setattr(
            "scatterpar.integrations.trainer_loop.is_user_function", lambda _: False
        )
    reports = reported(monkeypatch, is_captured=True)
    case, model, _ = REPLAYED["images"]
    extra = {"device_ids": VIRTUAL}
    options = {"max_steps": 6, **sizes(2, 4)}
    trainer = build(cls, tmp_path, case, copy.deepcopy(model), extra, **options)
    quietly(trainer.train)
    words = "returns a _CallRecord" if function == "log" else "take turns"
    assert words in reports[-1], reports
    # By the look, and in three epochs by each micro-batch.
    assert not values or sum(values[-27:]) == 3 * ROWS


def compiled_beside_stock(folder):
    how = {"model": RUNS["divides by items"]["model"], "whole": (6, 2)}
    trainers = beside(folder, each=({"torch_compile_backend": "eager"}, {}), **how)
    counts = torch._dynamo.utils.counters
    assert counts["stats"]["unique_graphs"], dict(counts)
    assert_same_run(*trainers, 1e-7)
    assert type(trainers[0].model) is IgnoresItems
    assert_same_evaluation(*trainers)


@pytest.mark.slow
def test_torch_compile_compiles_the_replicas(tmp_path):
    """In a process of its own: in one where thousands of tests had run before, torch's
    compiler once compiled nothing.
    """
    program = (
        "from integrations import test_transformers as tests\n"
        f"tests.compiled_beside_stock({str(tmp_path)!r})\n"
    )
    outcome = processes.run("-c", program)
    assert outcome.code == 0, outcome


@pytest.mark.slow
@pytest.mark.parametrize("scale", [2.0**20, 2.0**127])
def test_fp16_scaler_as_stock(tmp_path, scale):
    """Gradients come out scaled and are unscaled before they are clipped; overflow
    skips a step.
    """
    model = sequence_classifier().float()
    with torch.no_grad():
        model.classifier.weight.mul_(1e3)  # gradients that overflow at the larger scale
    scalers = []

    def prepare(trainer):
        scalers.append(torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2))
        trainer.accelerator.scaler = scalers[-1]
        trainer.accelerator.state._mixed_precision = "fp16"
        trainer.accelerator.native_amp = False

    shared = LAYOUTS["shared"]
    both = beside(tmp_path, CLASSIFIER, model=model, devices=shared, prepare=prepare)
    one, other = (scaler.get_scale() for scaler in scalers)
    assert one == other != scale
    assert_same_run(*both, relative=1e-4)


class Outside(nn.Module):
    """Answers outside of a row do not count, as in BERT's question answering."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def forward(self, start):
        scores = self.weight.expand(len(start), 3)
        return {"loss": nn.functional.cross_entropy(scores, start, ignore_index=3)}


class Ranks(nn.Embedding):
    """In-batch negatives are nearer to a sum: 12.5 was logged where the batches had 4.5
    each.
    """

    def pooled(self, rows):
        return rows

    def forward(self, input_ids, attention_mask):
        rows = (super().forward(input_ids) * attention_mask[..., None]).sum(1)
        rows = self.pooled(rows)
        negatives = torch.cat([rows.roll(1, 0), rows.roll(2, 1)]).detach()
        return {
            "loss": nn.functional.cross_entropy(
                rows @ negatives.T, torch.arange(len(rows), device=rows.device)
            )
        }


class PoolsInPlace(Ranks):
    """In evaluation, as SPLADE's pooling does: backward passes fail there. The look
    was inconclusive, and the mean of batches was taken without a word.
    """

    def pooled(self, rows):
        if self.training:
            return rows
        exponents = rows.exp()
        rows = exponents.log()
        exponents.zero_()
        return rows


class FailsInParts(Ranks):
    """In both modes a look at its rows fails: told, since nobody knows."""

    def pooled(self, rows):
        if len(rows) < 3:
            raise IndexError("too few rows")
        return rows


def starts(count):
    return [{"start": 3 * (i % 2)} for i in range(count)]


@pytest.mark.parametrize(
    ("make", "rows", "collate", "words"),
    [
        (Outside, starts, None, "NaN or infinite.*Pass count= to the Trainer"),
        (
            partial(Ranks, VOCABULARY, 4),
            sentences,
            unlabelled,
            "is not the .*stock class on one device",
        ),
        pytest.param(
            partial(PoolsInPlace, VOCABULARY, 4),
            sentences,
            unlabelled,
            "is not the .*stock class on one device",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_uncombined_losses_refused_each_time(tmp_path, make, rows, collate, words):
    trainer = ours(tmp_path, (partial(oracle.build, make), rows, collate), **sizes(4))
    before = copy.deepcopy(trainer.model)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"(?s){words}"):
            quietly(trainer.train)
    assert_same_bits(trainer.model, before)


class OwnLoss(transformers.Trainer):
    """A compute_loss of the user's: ``own`` of the entropy of each token."""

    own = None

    def compute_loss(self, model, inputs, **_):
        scores = model(input_ids=inputs["input_ids"]).logits
        entropies = scores.softmax(-1).square().sum(-1)
        return self.own(entropies, inputs["attention_mask"])


def masked_mean(entropies, mask):
    return (entropies * mask).sum() / mask.sum()


def variance_of_rows(entropies, mask):
    return (entropies * mask).mean(1).var()  # of one row: NaN


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (masked_mean, r'compute_loss: .*lambda batch: batch\["attention_mask"\]'),
        pytest.param(
            variance_of_rows,
            "compute_loss: .*NaN or infinite.*none of these",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_own_loss_refused_with_its_cause(tmp_path, own, words):
    kind = type("Ours", (ScatterOnceMixin, OwnLoss), {"own": staticmethod(own)})
    case = language_model, sentences, unlabelled
    trainer = build(kind, tmp_path, case, extra={"device_ids": VIRTUAL}, **sizes(2))
    with pytest.raises(ValueError, match=f"(?s){words}"):
        quietly(trainer.train)


@pytest.mark.slow
def test_unlookable_losses_warn_once(tmp_path):
    case = (
        partial(oracle.build, partial(FailsInParts, VOCABULARY, 4)),
        sentences,
        unlabelled,
    )
    trainer = ours(tmp_path, case, dataloader_drop_last=True, **sizes(4))
    with pytest.warns(
        UserWarning, match="(?s)could not check.*Pass count= to the Trainer"
    ) as told:
        quietly(trainer.train)
    texts = [str(warning.message) for warning in told]
    assert sum("could not check" in text for text in texts) == 1
    # what the warning names
    case = case[0], case[1], case[2]
    extra = {"device_ids": VIRTUAL, "count": lambda batch: len(batch["input_ids"])}
    options = {"dataloader_drop_last": True, **sizes(4)}
    quietly(build(ScatterOnceTrainer, tmp_path, case, extra=extra, **options).train)


@pytest.mark.parametrize("seed", [None, 5])
def test_only_seeds_of_compute_loss_are_told(tmp_path, recwarn, seed):
    """Each call of a look begins with the same random numbers, as if it seeded them."""

    class Drops(ScatterOnceTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            if seed is not None:
                torch.manual_seed(seed)
            scores = model(inputs["input_ids"], inputs["attention_mask"]).logits
            scores = nn.functional.dropout(scores, 0.3)
            return nn.functional.cross_entropy(scores, inputs["labels"])

    trainer = Drops(
        sequence_classifier(hidden_dropout_prob=0.1),
        arguments(tmp_path, max_steps=1, remove_unused_columns=False),
        data_collator=partial(padded, kind="classes"),
        train_dataset=sentences(8),
        device_ids=VIRTUAL,
    )
    quietly(trainer.train)
    told = [str(warning.message) for warning in recwarn]
    assert len([text for text in told if "seed the" in text]) == (seed is not None)


class Distills:
    """Reaches its modules by attributes, counts on itself, and stores
    what it measures.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        scale = nn.Parameter(torch.full((3,), 0.5, dtype=torch.float64))
        self.teachers = {"one": Of(judged, scale=scale).to(self.args.device)}
        self.tokens_seen = 0

    def compute_loss(
        self, model, inputs, return_outputs=False, num_items_in_batch=None
    ):
        labels = inputs.pop("labels")
        self.tokens_seen += int(inputs["attention_mask"].sum())
        outputs = self.model(**inputs)
        with torch.no_grad():
            goal = self.teachers["one"](inputs["attention_mask"])
        at_home = torch.zeros((), device=self.accelerator.device).double()
        loss = (outputs.logits - goal).square().mean() + at_home
        loss = loss + nn.functional.cross_entropy(outputs.logits, labels)
        return (loss, outputs) if return_outputs else loss


def judged(teacher, mask):
    return mask.double().sum(1, keepdim=True) / 9 * teacher.scale


@pytest.mark.slow
@pytest.mark.parametrize("layout", few_of(LAYOUTS, ["shared"]))
def test_compute_loss_finds_replica_modules(tmp_path, monkeypatch, layout):
    """It reached the Trainer's own: another device's at once, and one module in two
    threads.
    """
    devices = LAYOUTS[layout]

    def train(trainer):
        mine = isinstance(trainer, ScatterOnceMixin) and devices[1] != "cpu"
        apart = guarded(monkeypatch, trainer.model, *trainer.teachers.values())
        with apart if mine else contextlib.nullcontext():
            trainer.train()

    classes = with_and_without(Distills)
    both = beside(tmp_path, CLASSIFIER, devices=devices, classes=classes, train=train)
    assert_same_run(*both)
    assert both[0].tokens_seen == both[1].tokens_seen > 0
    assert_same_evaluation(*both)


def test_unclear_losses_weighted_by_labels(tmp_path):
    """No two batches of one row can be computed together, and the model ignores the
    items.
    """
    model = IgnoresItems(lambda losses, items: losses.mean())
    model.loss_type = "ForCausalLM"
    with pytest.warns(UserWarning, match="the rows of this step do not show whether"):
        trainers = beside(tmp_path, model=model, own=(1, 2), whole=(4,))
    assert_same_run(*trainers)


@pytest.mark.slow
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("sharded", few_of([False, True], [True]))
def test_checkpoints_go_both_ways(tmp_path, swapped, sharded):
    """Three steps of the one, and one of the other, are four: saved within an epoch."""
    one = partial(ours, tmp_path, LANGUAGE, sharded=sharded, max_steps=4, **sizes(3, 2))
    other = partial(
        build, transformers.Trainer, tmp_path, LANGUAGE, max_steps=4, **sizes(6, 2)
    )
    first, second = (other, one) if swapped else (one, other)
    quietly(first(save_strategy="steps", save_steps=3).train)
    resumed = second()
    quietly(resumed.train, resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    plain = other()
    quietly(plain.train)
    assert_same_parameters(resumed, plain, SAME)
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "checkpoint-3" / "model.safetensors")
    assert saved.keys() <= plain.model.state_dict().keys()


@pytest.mark.slow
@pytest.mark.parametrize("given", [False, True])
def test_sharded_optimizer_trains_again(tmp_path, given):
    options = {**sizes(3), "max_steps": 2, "max_grad_norm": 0.1}
    trainers = [
        ours(tmp_path, LANGUAGE, sharded=flag, **options) for flag in (True, False)
    ]
    for trainer in trainers:
        if given:
            trainer.optimizer = torch.optim.Adam(trainer.model.parameters(), 1e-2)
        for _ in range(2):  # in between, the replicas are let go
            quietly(trainer.train)
    assert_same_bits(*(trainer.model for trainer in trainers))
    master, other = trainers[0].optimizer.optimizer.state_bytes.values()
    assert 0.7 < master / other < 1.4


@pytest.mark.slow
def test_resumed_is_uninterrupted_with_dropout(tmp_path):
    options = {**sizes(3, 2), "max_steps": 4, "save_strategy": "steps", "save_steps": 3}
    whole, resumed = (
        ours(tmp_path, LANGUAGE, model=language_model(0.2), **options) for _ in range(2)
    )
    quietly(whole.train)
    quietly(resumed.train, resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert_same_bits(whole.model, resumed.model)


SEEN = []  # the classes of Trainers, one for each call
COUNTED = UserList()


def record_in_closure():
    calls = []

    def record():
        calls.append(1)
        return len(calls)

    return record


class Counter:
    """Counts calls in a slot, and in its class. Appending is safe in threads."""

    __slots__ = ("calls",)
    total: ClassVar[list] = []

    def __init__(self):
        self.calls = []

    def __call__(self):
        self.calls.append(1)
        self.total.append(1)


class Logs:
    """Logs and keeps for each batch, under a name that TRL's trainers use, too."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._metrics, self.last, self.rows = {"ce": [], "rows": 0}, 0.0, 0
        self.record, self.counter = record_in_closure(), Counter()
        self.in_place = torch.zeros((), dtype=torch.float64)

    def compute_loss(
        self, model, inputs, return_outputs=False, num_items_in_batch=None
    ):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(outputs.logits, labels)
        self.log({"own": float(loss), "in_place": self.in_place.copy_(loss.detach())})
        self._metrics["ce"].append(float(loss))
        self._metrics["rows"] += len(labels)
        self.last = float(loss)
        self.rows = inputs["input_ids"].ndim
        SEEN.append(type(self))
        COUNTED.append(1)
        self.record()
        self.counter()
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("layout", few_of(LAYOUTS, ["virtual"]))
def test_compute_loss_logs_once_per_batch(tmp_path, recwarn, layout):
    """Looks left entries: 68 logs in 4 steps, and 101 in a global list."""
    SEEN.clear()
    COUNTED.clear()
    Counter.total.clear()
    mine, stock = beside(
        tmp_path,
        CLASSIFIER,
        devices=LAYOUTS[layout],
        classes=with_and_without(Logs),
        dataloader_drop_last=True,
        max_steps=2,
    )
    logged, expected = (
        [log["own"] for log in each.state.log_history if "own" in log]
        for each in (mine, stock)
    )
    assert logged == mine._metrics["ce"]
    # The stock Trainer keeps the tensor itself, whose last value it then shows.
    in_place = [log["in_place"] for log in mine.state.log_history if "own" in log]
    assert torch.stack(in_place).tolist() == logged
    assert len(logged) == 4 * len(expected) == 8
    calls = [SEEN.count(type(mine)), mine.record() - 1, len(mine.counter.calls)]
    assert calls == [8] * 3
    assert len(COUNTED) == len(Counter.total) == len(SEEN) == 10
    assert sum(logged) / 4 == pytest.approx(sum(expected), rel=1e-2)
    assert mine._metrics["rows"] == stock._metrics["rows"] == 24


class Hooked(OwnLoss):
    """A teacher's features, which a hook keeps in a dict of the Trainer."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.features = {}
        self.teacher = sequence_classifier().requires_grad_(False)
        self.teacher.to(self.args.device)
        self.teacher.classifier.register_forward_hook(
            lambda _, __, output: self.features.update(logits=output)
        )

    def compute_loss(
        self, model, inputs, return_outputs=False, num_items_in_batch=None
    ):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        self.teacher(**inputs)
        errors = (outputs.logits - 2 * self.features["logits"] - labels[:, None]) ** 2
        return (errors.mean(), outputs) if return_outputs else errors.mean()


FEATURES = {}  # of a teacher that only a method of the Trainer names
TEACHER = sequence_classifier().requires_grad_(False)
TEACHER.classifier.register_forward_hook(
    lambda _, __, output: FEATURES.__setitem__("logits", output)
)


class HookedOutside(Hooked):
    """A teacher and a dict in this file."""

    def compute_loss(
        self, model, inputs, return_outputs=False, num_items_in_batch=None
    ):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        errors = self.errors(outputs.logits, inputs, labels)
        return (errors.mean(), outputs) if return_outputs else errors.mean()

    def errors(self, logits, inputs, labels):
        TEACHER(**inputs)
        time.sleep(0.002)  # what a GPU's kernels would take
        return (logits - 2 * FEATURES["logits"] - labels[:, None]) ** 2


def keep_logits(features, layer, inputs, output):
    features["logits"] = output


class HookedByPartial(Hooked):
    """A dict that the hook binds: replicas of the hook bind copies."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher.classifier._forward_hooks.clear()
        hook = partial(keep_logits, self.features)
        self.teacher.classifier.register_forward_hook(hook)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [HookedOutside, HookedByPartial])
def test_features_outside_are_the_batchs(tmp_path, kind, recwarn):
    """A race, silently; and a raw KeyError."""
    assert_same_run(*beside(tmp_path, CLASSIFIER, classes=with_and_without(kind)))
    assert not [w for w in recwarn if "do not show how" in str(w.message)]


@pytest.mark.slow
@pytest.mark.parametrize("layout", few_of(LAYOUTS, ["shared"]))
def test_hooked_features_are_the_batchs(tmp_path, layout):
    """Replicas mixed them up: another result in each run."""
    classes = with_and_without(Hooked)
    devices = LAYOUTS[layout]
    trainers = beside(tmp_path, CLASSIFIER, devices=devices, classes=classes)
    assert_same_run(*trainers)


@pytest.mark.slow
def test_dispatched_batches_refused_remedy_works(tmp_path):
    dispatches = {"accelerator_config": {"dispatch_batches": True}}
    with pytest.raises(ValueError, match=r"dispatch_batches=True \(leave it out: one"):
        ours(tmp_path, CLASSIFIER, **dispatches)
    quietly(ours(tmp_path, CLASSIFIER, max_steps=1).train)


LOMO = transformers.training_args.OptimizerNames.LOMO
ON_META = "must begin with the Trainer's own device, meta.*got [a-z]+(:0)? first"


# By the attribute of the arguments or the model: its value, and words of the refusal.
FOUR_STEPS = transformers.trainer_pt_utils.AcceleratorConfig(
    gradient_accumulation_kwargs={"num_steps": 4}
)
CONFLICTS = {
    "accelerator_config": (FOUR_STEPS, "pass gradient_accumulation_steps="),
    "deepspeed": ("zero2.json", "DeepSpeed.*use the stock Trainer"),
    "fsdp": ("full_shard", "FSDP"),
    "optim": (LOMO, "lomo"),
    "hf_device_map": ({"a": 0, "b": 1}, "device_map"),
    "world_size": (2, "torchrun"),
    "device": (torch.device("meta"), ON_META),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_conflicts_refused_by_name(tmp_path, monkeypatch, name):
    value, words = CONFLICTS[name]
    args, model = arguments(tmp_path), language_model()
    holder = model if name == "hf_device_map" else args
    computed = name in ("world_size", "device")
    monkeypatch.setattr(type(args) if computed else holder, name, value, raising=False)
    with pytest.raises(ValueError, match=words):
        ScatterOnceTrainer(model, args, device_ids=["cpu"] * 2)


@pytest.mark.slow
def test_optimizer_gets_gradient_of_labels(tmp_path):
    """After the Trainer has divided and clipped, for batches with unequal labels.

    Beside that of one batch, because the stock Trainer counts the first label of each
    row, too, which no loss of a causal model does.
    """

    def step(model, batches):
        rows = []
        for batch in batches:
            for values in zip(*batch.values(), strict=True):
                rows.append(dict(zip(batch, values, strict=True)))
        options = sizes(len(rows) // 2 // len(batches), len(batches))
        args = arguments(tmp_path, max_steps=1, max_grad_norm=1e-3, **options)
        given = {"device_ids": VIRTUAL, "train_dataset": rows}
        quietly(ScatterOnceTrainer(model, args, **given).train)

    batch = padded(sentences(16))
    splitcheck(step, language_model(), batch, parts=4, equal=True).assert_passed()


class Line(nn.Module):
    """Takes no keywords of losses: the stock Trainer averages over micro-batches."""

    def __init__(self):
        super().__init__()
        with seeded():
            self.line = nn.Linear(5, 3).double()

    def forward(self, x, labels):
        logits = self.line(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def lines(count):
    rows = randn(count, 5)
    return [{"x": x, "labels": number % 3} for number, x in enumerate(rows)]


class Writes(TrainerCallback):
    """A callback, whose attributes the Trainer's own function writes."""

    def __init__(self, kinds):
        self.written = Written(kinds)


class WritesOfTrainer:
    """What it writes into objects of its own and of a callback, in each call."""

    kinds: ClassVar = {}

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.written = Written(self.kinds)
        self.add_callback(Writes(self.kinds))
        self.number = 0

    def note(self, loss, inputs):
        self.number += 1
        callback = self.callback_handler.callbacks[-1]
        for written in (self.written, callback.written):
            written.write(float(loss), float(inputs["x"][0, 0]))

    def compute_loss(self, model, inputs, return_outputs=False, **options):
        result = super().compute_loss(model, inputs, return_outputs, **options)
        self.note(result[0] if return_outputs else result, inputs)
        return result

    def values(self):
        callback = self.callback_handler.callbacks[-1].written
        return {
            **self.written.values(),
            **{f"{k} of callback": v for k, v in callback.values().items()},
            "number": [self.number],
        }


class WritesInEvaluation(WritesOfTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, **options):
        return super(WritesOfTrainer, self).compute_loss(
            model, inputs, return_outputs, **options
        )

    def prediction_step(self, model, inputs, *args, **options):
        result = super().prediction_step(model, inputs, *args, **options)
        self.note(result[0], inputs)
        return result


KINDS_OF_WRITES = {"restorable": RESTORABLE, "irrevocable": IRREVOCABLE}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("layout", few_of(LAYOUTS, ["virtual"]))
@pytest.mark.parametrize("own", [WritesOfTrainer, WritesInEvaluation])
@pytest.mark.parametrize("kinds", KINDS_OF_WRITES)
def test_writes_equal_gradient_accumulation(tmp_path, kinds, own, layout):
    """Calls leave what they leave in the stock loop, in the order of the rows. A replica
    wrote into copies, whose changes were merged: 14 of 26 kinds were lost.
    """
    values = []
    for cls in with_and_without(type("Own", (own,), {"kinds": KINDS_OF_WRITES[kinds]})):
        is_ours = issubclass(cls, ScatterOnceMixin)
        trainer = cls(
            Line(),
            arguments(
                tmp_path,
                per_device_train_batch_size=3,
                per_device_eval_batch_size=3,
                gradient_accumulation_steps=2 if is_ours else 4,
                max_steps=3,
            ),
            train_dataset=lines(36),
            eval_dataset=lines(22),
            **({"device_ids": LAYOUTS[layout]} if is_ours else {}),
        )
        quietly(trainer.train if own is WritesOfTrainer else trainer.evaluate)
        values.append(trainer.values())
    assert_same_writes(*values)


QUICK_PROGRAMS = [
    *("a new centre", "batch normalisation", "an activation in a container"),
    *(
        "attributes of parts",
        "parts and parameters as keys",
        "frozen in the sixth call",
    ),
    *("an activation under a checkpoint", "counts under a checkpoint"),
    *("a teacher through .data", "a teacher from the sixth call on"),
]


class OfProgram:
    """``compute_loss`` is a program's step."""

    def compute_loss(
        self, model, inputs, return_outputs=False, num_items_in_batch=None
    ):
        return self.program.step(self, model, inputs["x"], inputs["labels"])


def rows_of_program(count):
    return [{"x": randn(IN, seed=n), "labels": n % OUT} for n in range(count)]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("layout", few_of(["virtual", "shared"], ["virtual"]))
@pytest.mark.parametrize("name", few_of(PROGRAMS, QUICK_PROGRAMS))
def test_own_modules_equal_gradient_accumulation(tmp_path, name, layout):
    """Calls had a replica's modules: what they did to these was lost, or refused."""
    program = PROGRAMS[name]
    results = []
    for cls in with_and_without(type("Own", (OfProgram,), {"program": program})):
        is_ours = issubclass(cls, ScatterOnceMixin)
        with seeded():
            net = program.net()
        trainer = cls(
            net,
            arguments(
                tmp_path,
                **sizes(3, 2 if is_ours else 4),
                optim="sgd",
                learning_rate=0.1,
                max_grad_norm=0.0,
                remove_unused_columns=False,
            ),
            train_dataset=rows_of_program(36),
            **({"device_ids": LAYOUTS[layout]} if is_ours else {}),
        )
        program.prepare(trainer, net)
        quietly(trainer.train)
        results.append((net, program.read(trainer, net)))
    (ours, read), (stock, expected) = results
    assert_same_net(ours, stock, read, expected)


class WritesInHelper:
    """Overrides a method that a library's ``prediction_step`` calls."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.opened = []

    def compute_loss_context_manager(self):
        self.opened.append(len(self.opened))
        return super().compute_loss_context_manager()


class WritesArguments:
    """Writes the library's own objects in each call."""

    def compute_loss(self, *args, **kwargs):
        self.args.calls = getattr(self.args, "calls", 0) + 1
        self.state.calls = getattr(self.state, "calls", 0) + 1
        group = self.optimizer.param_groups[0]
        group["calls"] = group.get("calls", 0) + 1
        return super().compute_loss(*args, **kwargs)


@pytest.mark.parametrize("layout", few_of(LAYOUTS, ["virtual"]))
def test_helper_of_users_takes_turns(tmp_path, layout, caplog):
    """Only ``prediction_step`` itself was asked, so four of six calls were lost."""
    caplog.set_level("INFO", "scatterpar")
    own, stock = with_and_without(WritesInHelper)
    opened = []
    for cls, more in ((own, {"device_ids": LAYOUTS[layout]}), (stock, {})):
        args = arguments(tmp_path, per_device_eval_batch_size=4)
        trainer = cls(Line(), args, eval_dataset=lines(22), **more)
        quietly(trainer.evaluate)
        opened.append(trainer.opened)
    assert opened[0] == opened[1]
    assert "compute_loss_context_manager is called for one" in caplog.text


def test_looks_leave_nothing_in_librarys_objects(tmp_path):
    own = with_and_without(WritesArguments)[0]
    args = arguments(tmp_path, max_steps=3, **sizes(3, 2))
    trainer = own(Line(), args, train_dataset=lines(36), device_ids=VIRTUAL)
    quietly(trainer.train)
    group = trainer.optimizer.param_groups[0]
    assert (trainer.args.calls, trainer.state.calls, group["calls"]) == (12, 12, 12)


class Metric(nn.Module):
    """Counts rows, as metrics do: it has no parameters."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.zeros(()))
        self.seen = torch.zeros(())

    def update(self, labels):
        self.rows += len(labels)
        self.seen = self.seen + labels.sum()


class Anneals:
    """Sets a number of its model by the step, and reads another module's."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.metric = Metric()
        self.weights = {"classes": nn.Parameter(torch.ones(3)).requires_grad_(False)}

    def compute_loss(self, model, inputs, return_outputs=False, **options):
        if model.training:
            model.line.scale = 2.0**-self.state.global_step
            model.steps = getattr(model, "steps", 0) + 1
            self.metric.update(inputs["labels"])
        return super().compute_loss(model, inputs, return_outputs, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_modules_in_turns_are_the_users(tmp_path, layout):
    """``model.scale`` was set on a replica, and metrics were each replica's own."""
    trainers = []
    for cls in with_and_without(Anneals):
        is_ours = issubclass(cls, ScatterOnceMixin)
        options = sizes(3, 2 if is_ours else 4)
        args = arguments(tmp_path, max_steps=3, **options)
        given = {"device_ids": LAYOUTS[layout]} if is_ours else {}
        trainer = cls(Line(), args, train_dataset=lines(36), **given)
        quietly(trainer.train)
        trainers.append(trainer)
    ours, stock = trainers
    assert ours.model.line.scale == stock.model.line.scale == 0.25
    assert ours.model.steps == stock.model.steps == 12
    assert ours.metric.rows == stock.metric.rows == 36
    assert ours.metric.seen == stock.metric.seen


def test_function_that_takes_turns_is_logged_once(tmp_path, caplog):
    caplog.set_level("INFO", "scatterpar")
    own = with_and_without(Anneals)[0]
    args = arguments(tmp_path, max_steps=2, **sizes(3, 2))
    trainer = own(Line(), args, train_dataset=lines(24), device_ids=VIRTUAL)
    quietly(trainer.train)
    assert float(trainer.metric.seen) == 24
    told = [text for text in caplog.messages if "one micro-batch at a time" in text]
    assert len(told) == 1
    assert "Anneals.compute_loss" in told[0]


def test_arguments_in_files_are_the_users(tmp_path):
    """A trainer that was made with them had twice as many rows in a step."""
    trainer = ours(tmp_path, CLASSIFIER, **sizes(3, 2))
    loaded = pickle.loads(pickle.dumps(trainer.args))
    numbers = loaded.per_device_train_batch_size, loaded.gradient_accumulation_steps
    assert numbers == (3, 2)


def test_trials_of_a_search_have_the_users_rows(tmp_path):
    """Each trial sets some arguments, and makes an accelerator again."""
    trainer = ours(tmp_path, CLASSIFIER, **sizes(3, 2))
    for rows in (12, 20):
        trainer.create_accelerator_and_postprocess()
        assert trainer.args.per_device_train_batch_size == rows
        kind = type(trainer.args.per_device_train_batch_size)
        trainer.args.per_device_train_batch_size = kind(5)


def trials(trainer):
    """Parameters and losses of three trials, as a search with optuna makes them: after
    each it lets go of the model.
    """
    results = []
    for rate in (1e-3, 1e-2, 3e-3):
        trainer.args.learning_rate = rate
        trainer.create_accelerator_and_postprocess()
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
        results.append((copy.deepcopy(parameters(trainer)), loss))
        wrapped, model = trainer.model_wrapped, trainer.model
        trainer.model_wrapped, trainer.model = release_memory(wrapped, model)
        trainer.accelerator.clear()
    return results


class Normalises(Line):
    """With a batch normalisation."""

    def __init__(self):
        super().__init__()
        self.line = nn.Sequential(self.line, nn.BatchNorm1d(3).double())


SEARCHES = {
    "a line": (Line, {}),
    "a language model": (language_model, {}),
    "its optimizer on all devices": (Line, {"shard_optimizer": True}),
    "a normalisation of micro-batches": (Normalises, {}),
}


@pytest.mark.parametrize("name", few_of(SEARCHES, ["a line"]))
def test_trials_of_a_search_equal_stock(tmp_path, recwarn, name):
    """The second trial ended: the first had let go of the model."""
    make, own_options = SEARCHES[name]
    is_of_words = make is language_model
    data, collate = (sentences, padded) if is_of_words else (lines, None)
    runs = []
    for cls in (ScatterOnceTrainer, transformers.Trainer):
        is_ours = cls is ScatterOnceTrainer
        size = sizes(3, 2) if is_ours else sizes(12)
        options = {"device_ids": VIRTUAL, **own_options} if is_ours else {}
        trainer = cls(
            args=arguments(tmp_path, max_steps=3, remove_unused_columns=False, **size),
            model_init=lambda: make(),
            train_dataset=data(ROWS),
            eval_dataset=data(7),
            data_collator=collate,
            **options,
        )
        runs.append(quietly(trials, trainer))
    if name == "a normalisation of micro-batches":
        told = [w for w in recwarn if "batch normalisation" in str(w.message)]
        assert len(told) == 1
        return
    for (actual, loss), (expected, stock_loss) in zip(*runs, strict=True):
        for key, value in expected.items():
            torch.testing.assert_close(actual[key], value, rtol=1e-7, atol=1e-9)
        assert loss == pytest.approx(stock_loss, rel=1e-6)
    (first, _), (second, _), _ = runs[0]
    assert not all(torch.equal(first[key], second[key]) for key in first)


class Weighs:
    """The weight of a term of its loss grows with the number of calls."""

    calls = 0

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        self.calls += 1
        outputs = model(**inputs)
        loss = outputs["loss"] + 0.01 * self.calls * outputs["logits"].square().mean()
        return (loss, outputs) if return_outputs else loss


def test_look_begins_each_call_with_the_same_numbers(tmp_path, recwarn):
    """The look could not say how losses combine: it got another one each time."""
    trainers = []
    for cls in with_and_without(Weighs):
        is_ours = issubclass(cls, ScatterOnceMixin)
        args = arguments(tmp_path, max_steps=3, **sizes(3, 2 if is_ours else 4))
        given = {"device_ids": VIRTUAL} if is_ours else {}
        trainer = cls(Line(), args, train_dataset=lines(36), **given)
        quietly(trainer.train)
        trainers.append(trainer)
    assert_same_parameters(*trainers, SAME)
    assert trainers[0].calls == trainers[1].calls == 12
    told = [str(warning.message) for warning in recwarn]
    assert not [text for text in told if "could not check" in text]
    assert any("compute_loss writes self.calls in each call" in text for text in told)


class ByAttribute:
    """Reads its batch as transformers' processors return it."""

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        outputs = model(inputs.x, inputs.labels)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


class ByPosition:
    def compute_loss(self, model, inputs, return_outputs=False, **_):
        x, labels = inputs
        outputs = model(x, labels)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


class AttributeDict(dict):
    def __getattr__(self, name):
        if name not in self:
            raise AttributeError(name)
        return self[name]


def encoded(kind, rows):
    return kind(default_data_collator(rows))


COLLATED = {
    "BatchEncoding": (ByAttribute, partial(encoded, transformers.BatchEncoding)),
    "BatchFeature": (ByAttribute, partial(encoded, transformers.BatchFeature)),
    "a class of dicts": (ByAttribute, partial(encoded, AttributeDict)),
    "a tuple": (ByPosition, lambda rows: (*default_data_collator(rows).values(),)),
}


@pytest.mark.parametrize("layout", few_of(LAYOUTS, ["virtual"]))
@pytest.mark.parametrize("name", few_of(COLLATED, ["BatchEncoding", "a tuple"]))
def test_batches_keep_their_class(tmp_path, name, layout):
    """``inputs.labels`` raised an AttributeError: a replica got a plain dict."""
    own, collate = COLLATED[name]
    trainers = []
    for cls in with_and_without(own):
        is_ours = issubclass(cls, ScatterOnceMixin)
        options = sizes(3, 2) if is_ours else sizes(12)
        args = arguments(tmp_path, max_steps=3, **options)
        given = {"device_ids": LAYOUTS[layout]} if is_ours else {}
        trainer = cls(
            Line(), args, train_dataset=lines(36), data_collator=collate, **given
        )
        quietly(trainer.train)
        trainers.append(trainer)
    assert_same_parameters(*trainers, SAME)


def mixed(x):
    return 0.7 * x + 0.3 * x.roll(1, 0)


def scaled(x):
    return 0.7 * x


def noisy(x):
    return x + 0.1 * torch.randn_like(x)


class Prepares:
    """Changes its rows, and counts them."""

    change = staticmethod(scaled)

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.prepared = []

    def _prepare_inputs(self, inputs):
        prepared = super()._prepare_inputs(inputs)
        prepared["x"] = self.change(prepared["x"])
        self.prepared.append(float(prepared["x"][0, 0]))
        return prepared


def preparing(change):
    return with_and_without(type("Own", (Prepares,), {"change": staticmethod(change)}))


@pytest.mark.parametrize("layout", few_of(LAYOUTS, ["virtual"]))
def test_batches_are_prepared_in_their_order(tmp_path, layout):
    """In training and in an evaluation, on the device of their replica."""
    trainers = []
    for cls in preparing(scaled):
        is_ours = issubclass(cls, ScatterOnceMixin)
        options = sizes(3, 2 if is_ours else 4)
        args = arguments(tmp_path, max_steps=3, per_device_eval_batch_size=4, **options)
        trainer = cls(
            Line(),
            args,
            train_dataset=lines(36),
            eval_dataset=lines(22),
            **({"device_ids": LAYOUTS[layout]} if is_ours else {}),
        )
        quietly(trainer.train)
        quietly(trainer.evaluate)
        trainers.append(trainer)
    assert_same_parameters(*trainers, SAME)
    assert trainers[0].prepared == trainers[1].prepared
    assert len(trainers[0].prepared) == 12 + 6


def test_rows_mixed_as_batches_are_prepared_refused(tmp_path):
    """The neighbour was one of 3 rows in the place of 12, and nothing was told."""
    own, _ = preparing(mixed)
    args = arguments(tmp_path, max_steps=2, **sizes(3, 2))
    trainer = own(Line(), args, train_dataset=lines(24), device_ids=VIRTUAL)
    with pytest.raises(ValueError, match="Rows are mixed in the data collator"):
        quietly(trainer.train)


def test_noise_as_batches_are_prepared_is_not_refused(tmp_path):
    own, _ = preparing(noisy)
    args = arguments(tmp_path, max_steps=2, **sizes(3, 2))
    trainer = own(Line(), args, train_dataset=lines(24), device_ids=VIRTUAL)
    with pytest.warns(UserWarning, match="_prepare_inputs gets the rows of one batch"):
        quietly(trainer.train)
    assert len(trainer.prepared) == 8


@pytest.mark.slow
def test_loss_that_compares_images_with_texts_refused(tmp_path):
    """It saw the rows of one batch, with a warning."""
    case = partial(clip, "CLIP"), captioned, captions
    trainer = ours(tmp_path, case, **sizes(3, 2))
    words = r"rows with each other.*engine\.loss\(inputs, targets, criterion, whole_ba"
    with pytest.raises(ValueError, match=f"(?s){words}"):
        quietly(trainer.train)


def test_batch_normalisation_is_told_once(tmp_path, recwarn):
    counts = []
    for buffers in ("master", "batch"):
        model = Line()
        model.line = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
        args = arguments(tmp_path, max_steps=2, **sizes(3, 2))
        trainer = ScatterOnceTrainer(
            model, args, train_dataset=lines(24), device_ids=VIRTUAL, buffers=buffers
        )
        quietly(trainer.train)
        counts.append(sum("batch normalisation" in str(w.message) for w in recwarn))
        assert model.line[0].num_batches_tracked > 0
    assert counts == [1, 1]


class CountsCalls:
    """A schedule by the number of calls, which is no number of steps."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.schedule = {"beta": 1.0}
        self.losses = []

    def compute_loss(self, model, inputs, return_outputs=False, **options):
        self.schedule["beta"] *= 0.9
        result = super().compute_loss(model, inputs, return_outputs, **options)
        self.losses.append(result)
        return result


def test_numbers_that_calls_write_told_once(tmp_path, recwarn):
    own = with_and_without(CountsCalls)[0]
    args = arguments(tmp_path, max_steps=3, **sizes(3, 2))
    trainer = own(Line(), args, train_dataset=lines(36), device_ids=VIRTUAL)
    quietly(trainer.train)
    assert trainer.schedule["beta"] == pytest.approx(0.9**12)
    assert len(trainer.losses) == 12
    told = [str(w.message) for w in recwarn if "compute_loss writes" in str(w.message)]
    assert len(told) == 1
    assert "self.schedule['beta'] in each call, 4 times" in told[0]


class WritesToQueue:
    """Its model takes the number of items, and ignores it."""

    def compute_loss(self, *args, **kwargs):
        self.queue.put("a call")
        return super().compute_loss(*args, **kwargs)


def test_function_with_queue_is_not_looked_at(tmp_path, recwarn):
    """Entries of a look would stay in the queue. Its loss is taken for a mean."""
    entries = queue.SimpleQueue()

    def train(trainer):
        trainer.queue = entries
        trainer.train()

    classes = with_and_without(WritesToQueue)[0], transformers.Trainer
    trainers = beside(tmp_path, CLASSIFIER, classes=classes, train=train, max_steps=1)
    assert_same_run(*trainers)
    assert entries.qsize() == 4
    told = [text for w in recwarn if "could not put back" in (text := str(w.message))]
    assert len(told) == 1
    assert "queue" in told[0]
