"""Evaluation and prediction by all replicas, beside the stock Trainer on one device."""

from __future__ import annotations

import copy
import itertools
from functools import partial

import numpy
import pytest
import torch
import transformers
from harness.isolation import guarded
from harness.oracle import seeded
from harness.trainers import (
    VOCABULARY,
    arguments,
    language_model,
    padded,
    quietly,
    sentences,
    sequence_classifier,
    tokenizer,
)
from torch import nn

from scatterpar import ScatterOnceParallel
from scatterpar.integrations.trainer_loop import TrainerLoop
from scatterpar.integrations.transformers import ScatterOnceMixin, ScatterOnceTrainer
from scatterpar.loops.evaluation import BatchesAhead, Evaluation

pytestmark = [pytest.mark.trainers, pytest.mark.draws]

ROWS = (
    11  # in batches of 2: on 2 devices 3 groups, on 3 devices 2 groups; one is ragged
)
DEVICES = {
    "one": ["cpu"],
    "two": ["cpu:0", "cpu:1"],
    "three": ["cpu:0", "cpu:1", "cpu:0"],
}
layouts = pytest.mark.parametrize("devices", DEVICES.values(), ids=DEVICES)
classes = partial(padded, kind="classes")


def counts(prediction, **_):
    """Metrics that are integers, of all that the loop passes."""
    scores = prediction.predictions
    labels = prediction.label_ids
    found = {"shape": [*scores.shape], "labels": int(labels.sum())}
    found["right"] = int((scores.argmax(-1)[labels != -100] == 1).sum())
    if prediction.inputs is not None:
        found["inputs"] = int(numpy.sum(prediction.inputs))
    if prediction.losses is not None:
        found["losses"] = [float(loss) for loss in prediction.losses]
    return found


class PerBatch:
    """Metrics batch by batch, for ``batch_eval_metrics``."""

    def __init__(self):
        self.right = self.rows = 0

    def __call__(self, prediction, compute_result):
        self.right += int((prediction.predictions.argmax(-1) == 1).sum())
        self.rows += len(prediction.label_ids)
        if prediction.inputs is not None:  # the loader's batch
            self.rows += int(prediction.inputs["attention_mask"].sum())
        return {"right": self.right, "rows": self.rows, "last": compute_result}


def build(cls, folder, model, collate, data=sentences, extra=None, **options):
    how = {"per_device_eval_batch_size": 2, "remove_unused_columns": False}
    kind = extra.pop("arguments", arguments) if extra else arguments
    return cls(
        model=copy.deepcopy(model),
        args=kind(folder, **how, **options),
        data_collator=collate,
        eval_dataset=data(ROWS),
        **(extra or {}),
    )


def timeless(metrics):
    return {
        name: value
        for name, value in metrics.items()
        if not any(word in name for word in ("runtime", "per_second", "_time"))
    }


def assert_same_metrics(mine, stock):
    """Integers are equal, other numbers to rounding."""
    mine, stock = timeless(mine), timeless(stock)
    assert mine.keys() == stock.keys()
    for name, value in stock.items():
        if isinstance(value, float) or name.endswith("losses"):
            assert mine[name] == pytest.approx(value, rel=1e-6), name
        else:
            assert mine[name] == value, name


def assert_same_predictions(mine, stock):
    assert_same_metrics(mine.metrics, stock.metrics)
    for name in ("predictions", "label_ids"):
        ours, theirs = getattr(mine, name), getattr(stock, name)
        assert (ours is None) == (theirs is None), name
        if not isinstance(theirs, tuple):
            ours, theirs = (ours,), (theirs,)
        for one, other in zip(ours, theirs, strict=True):
            if other is not None:
                numpy.testing.assert_allclose(one, other, rtol=1e-9)


class Texts:
    """Counts, keeps and logs what its prediction steps see."""

    def prediction_step(self, model, inputs, *args, **kwargs):
        loss, logits, labels = super().prediction_step(model, inputs, *args, **kwargs)
        self.steps += 1
        self.lengths.append(inputs["input_ids"].shape[1])
        return loss * 2, logits, labels


class Compares(nn.Module):
    """A loss that compares rows, and outputs without rows."""

    def __init__(self):
        super().__init__()
        with seeded():
            self.words = nn.Embedding(VOCABULARY, 4).double()

    def forward(self, input_ids, attention_mask, labels):
        texts = (self.words(input_ids) * attention_mask[..., None]).sum(1)
        scores = texts @ texts.T
        numbers = torch.arange(len(scores), device=scores.device)
        loss = nn.functional.cross_entropy(scores, numbers)
        return {"loss": loss, "logits": scores.mean(0)[:1]}


def two_labels(rows):
    batch = padded(rows)
    return {**batch, "more": batch["labels"][:, :1]}


class TwoLabels(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = sequence_classifier()

    def forward(self, input_ids, attention_mask, labels, more):
        scores = self.inner(input_ids, attention_mask).logits
        lengths = labels.ne(-100).sum(1).clamp(max=2)
        loss = nn.functional.cross_entropy(scores, lengths) + more.double().mean()
        return {"loss": loss, "logits": (scores, scores.exp())}


def with_metrics(function=counts, **options):
    return {"extra": {"compute_metrics": function}, **options}


CASES = {
    "causal language model": (language_model, padded, with_metrics()),
    "sequence classifier": (
        sequence_classifier,
        classes,
        with_metrics(include_for_metrics=["inputs", "loss"]),
    ),
    "metrics batch by batch": (
        sequence_classifier,
        classes,
        {"batch_eval_metrics": True},
    ),
    "metrics of batches on the device": (
        sequence_classifier,
        classes,
        {"batch_eval_metrics": True, "include_for_metrics": ["inputs"]},
    ),
    "label smoothing": (language_model, padded, {"label_smoothing_factor": 0.1}),
    "the loss alone": (language_model, padded, {"prediction_loss_only": True}),
    "accumulation": (language_model, padded, with_metrics(eval_accumulation_steps=1)),
    "lists of batches": (language_model, padded, {"eval_do_concat_batches": False}),
    "dropped": (language_model, padded, {"dataloader_drop_last": True}),
    "several labels": (
        TwoLabels,
        two_labels,
        {"label_names": ["labels", "more"]},
    ),
    "a loss that compares rows": (Compares, padded, {}),
    "bfloat16": (language_model, padded, {"bf16_full_eval": True}),
    "a compiled model": (
        sequence_classifier,
        classes,
        {"torch_compile": True, "torch_compile_backend": "eager"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@layouts
def test_metrics_are_those_of_stock_trainer(tmp_path, name, devices):
    """Also ``eval_loss``, a mean of the means of batches, which depends on their
    size.
    """
    make, collate, options = CASES[name]
    model = make()
    results = []
    for cls, place in (
        (ScatterOnceTrainer, {"device_ids": devices}),
        (transformers.Trainer, {}),
    ):
        given = dict(options)
        extra = given.pop("extra", {}) | place
        if "batch_eval_metrics" in given:
            extra["compute_metrics"] = PerBatch()
        trainer = build(cls, tmp_path, model, collate, extra=extra, **given)
        metrics = quietly(trainer.evaluate)
        predicted = None
        if given.get("eval_do_concat_batches", True):
            predicted = quietly(trainer.predict, sentences(5))
        results.append((metrics, predicted))
    (mine, my_prediction), (stock, its_prediction) = results
    assert "eval_loss" in stock
    assert_same_metrics(mine, stock)
    if its_prediction is not None:
        assert_same_predictions(my_prediction, its_prediction)


@pytest.mark.slow
@layouts
def test_overridden_prediction_step_works(tmp_path, devices):
    """It runs on replicas; what it counts and keeps is that of one device."""
    model = sequence_classifier()
    kinds = {
        "ours": type("Ours", (ScatterOnceMixin, Texts, transformers.Trainer), {}),
        "above": type("Above", (Texts, ScatterOnceTrainer), {}),
        "stock": type("Stock", (Texts, transformers.Trainer), {}),
    }
    found = {}
    for name, cls in kinds.items():
        place = {} if name == "stock" else {"device_ids": devices}
        trainer = build(cls, tmp_path, model, classes, extra=place)
        trainer.lengths, trainer.steps = [], 0
        metrics = quietly(trainer.evaluate)
        found[name] = [metrics["eval_loss"], trainer.steps, *trainer.lengths]
    assert found["ours"] == pytest.approx(found["stock"])
    assert found["above"] == pytest.approx(found["stock"])


@pytest.mark.slow
def test_replicas_read_their_own_memory(tmp_path, monkeypatch):
    place = {"device_ids": DEVICES["two"]}
    trainer = build(ScatterOnceTrainer, tmp_path, language_model(), padded, extra=place)
    ahead = BatchesAhead(trainer.get_eval_dataloader())
    trainer.model.eval()
    results = []
    with guarded(monkeypatch, trainer.model):
        for batch in itertools.islice(ahead, 3):
            results.append(
                trainer._loop.prediction_in(ahead, trainer.model, batch, False)
            )
    assert [len(logits) for _, logits, _ in results] == [2, 2, 2]
    trainer._loop.close()


@layouts
def test_batches_that_the_loop_leaves_out(tmp_path, devices):
    place = {"device_ids": devices}
    trainer = build(ScatterOnceTrainer, tmp_path, language_model(), padded, extra=place)
    trainer.model.eval()
    loader = trainer.get_eval_dataloader()
    ahead = BatchesAhead(loader)
    for number, batch in enumerate(ahead):
        if number in (1, 4):
            continue
        _, logits, _ = trainer._loop.prediction_in(ahead, trainer.model, batch, False)
        stock = transformers.Trainer.prediction_step
        expected = stock(trainer, trainer.model, batch, False)
        # An operator has fewer threads in a worker, and so may round in another order.
        torch.testing.assert_close(logits, expected[1], rtol=1e-12, atol=1e-12)
    assert number == 5
    trainer._loop.close()


@pytest.mark.slow
def test_changed_batches_are_computed_singly(tmp_path):
    """Batches that are not the loader's are computed one by one, on the first
    device.
    """

    class Changes:
        def evaluation_loop(self, dataloader, *args, **kwargs):
            changed = [dict(batch) for batch in dataloader]
            return super().evaluation_loop(changed, *args, **kwargs)

        def prediction_step(self, model, inputs, *args, **kwargs):
            return super().prediction_step(model, {**inputs}, *args, **kwargs)

    model = sequence_classifier()
    ours = type("Ours", (Changes, ScatterOnceTrainer), {})
    stock = type("Stock", (Changes, transformers.Trainer), {})
    place = {"device_ids": DEVICES["two"]}
    mine = build(ours, tmp_path, model, classes, extra=place)
    theirs = build(stock, tmp_path, model, classes)
    for trainer in (mine, theirs):
        trainer.accelerator.gather_for_metrics = lambda values: values
    assert_same_metrics(*(quietly(t.evaluate) for t in (mine, theirs)))


@pytest.mark.slow
def test_error_reaches_user_next_loop_works(tmp_path):
    class Fails(ScatterOnceTrainer):
        fails = True

        def prediction_step(self, model, inputs, *args, **kwargs):
            if self.fails:
                raise ZeroDivisionError("mine")
            return super().prediction_step(model, inputs, *args, **kwargs)

    place = {"device_ids": DEVICES["two"]}
    trainer = build(Fails, tmp_path, sequence_classifier(), classes, extra=place)
    with pytest.raises(ZeroDivisionError, match="mine"):
        quietly(trainer.evaluate)
    Fails.fails = False
    assert "eval_loss" in quietly(trainer.evaluate)


def translator():
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    words = {"vocab_size": VOCABULARY, "decoder_start_token_id": 0, "eos_token_id": 1}
    with seeded(4):
        config = transformers.T5Config(**sizes, **words, dropout_rate=0.0)
        return transformers.T5ForConditionalGeneration(config).double()


def seq2seq_arguments(folder, **options):
    own = {"use_cpu": True, "report_to": "none", "disable_tqdm": True}
    return transformers.Seq2SeqTrainingArguments(str(folder), **own, **options)


GENERATIONS = {
    "greedy": {"generation_max_length": 7},
    "beams": {"generation_max_length": 7, "generation_num_beams": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GENERATIONS)
@layouts
def test_generated_predictions_as_stock(tmp_path, name, devices):
    """Greedy search and beams give the texts of the stock Trainer, and its padding."""
    model = translator()
    ours = type("Ours", (ScatterOnceMixin, transformers.Seq2SeqTrainer), {})
    results = []
    for cls, place in (
        (ours, {"device_ids": devices}),
        (transformers.Seq2SeqTrainer, {}),
    ):
        extra = {
            "arguments": seq2seq_arguments,
            "compute_metrics": lambda p: {"sum": int(p.predictions.sum())},
            "processing_class": tokenizer(),
            **place,
        }
        trainer = build(
            cls,
            tmp_path,
            model,
            padded,
            extra=extra,
            predict_with_generate=True,
            **GENERATIONS[name],
        )
        metrics = quietly(trainer.evaluate)
        results.append((metrics, quietly(trainer.predict, sentences(5))))
    (mine, my_prediction), (stock, its_prediction) = results
    assert "eval_sum" in stock
    assert_same_metrics(mine, stock)
    assert_same_predictions(my_prediction, its_prediction)


@pytest.mark.slow
def test_evaluation_in_training_picks_best(tmp_path):
    """The best model is chosen by the stock Trainer's metrics."""
    logs = []
    for cls, place in (
        (ScatterOnceTrainer, {"device_ids": DEVICES["two"]}),
        (transformers.Trainer, {}),
    ):
        trainer = build(
            cls,
            tmp_path,
            language_model(),
            padded,
            extra=place | {"train_dataset": sentences(12)},
            per_device_train_batch_size=6 if place else 12,
            eval_strategy="steps",
            eval_steps=1,
        )
        quietly(trainer.train)
        logs.append([log for log in trainer.state.log_history if "eval_loss" in log])
    mine, stock = logs
    assert len(stock) == 3
    for ours, theirs in zip(mine, stock, strict=True):
        assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=1e-6)


@pytest.mark.parametrize("reads", [1, 3])
def test_reading_ahead_ends_as_the_loader_does(reads):
    """accelerate's loader says before its last batch that it is the last."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    for number in (0, 1, 4, 5, 6):
        loader = torch.utils.data.DataLoader(torch.arange(number), batch_size=2)
        loader = accelerator.prepare(loader)
        ahead = BatchesAhead(loader)
        assert len(ahead) == len(loader)
        for _ in range(2):
            ends = []
            for _ in ahead:
                ahead.read(reads)
                ends.append(accelerator.gradient_state.end_of_dataloader)
            assert ends == [False] * (len(loader) - 1) + [True] * bool(number)
            assert not accelerator.gradient_state.in_dataloader
    rows = [object() for _ in range(4)]
    assert [*BatchesAhead(rows)] == rows


def test_only_results_read_ahead():
    """A loop that computes itself gets each batch as the loader gives it."""
    events = []

    def batches():
        for number in range(3):
            events.append(f"read {number}")
            yield number

    for number in BatchesAhead(batches()):
        events.append(f"at {number}")
    assert events == ["read 0", "at 0", "read 1", "at 1", "read 2", "at 2"]


class Observes:
    """Its prediction step sees where it runs, and writes on the Trainer."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = []
        self.draws = []

    def prediction_step(self, model, inputs, *args, **kwargs):
        assert model is self.model
        with torch.no_grad():
            model.calls += 1
        self.draws.append(torch.rand(()).item())
        weight = model.inner.classifier.weight
        self.seen.append((weight.data_ptr(), float(model.calls)))
        return super().prediction_step(model, inputs, *args, **kwargs)


class Counting(nn.Module):
    """A classifier with a buffer that steps write."""

    def __init__(self):
        super().__init__()
        self.inner = sequence_classifier()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input_ids, attention_mask, labels):
        return self.inner(input_ids, attention_mask, labels=labels)


@pytest.mark.parametrize("name", ["two", pytest.param("three", marks=pytest.mark.slow)])
def test_step_of_the_users_takes_turns_on_the_devices(tmp_path, name):
    """Batch i on device i mod N, with the user's own model and generator. What a step
    writes into a buffer the next one reads, on another device.
    """
    results = []
    for base, place in (
        (ScatterOnceTrainer, {"device_ids": DEVICES[name]}),
        (transformers.Trainer, {}),
    ):
        cls = type("Mine", (Observes, base), {})
        trainer = build(cls, tmp_path, Counting(), classes, extra=place)
        own = trainer.model.inner.classifier.weight.data_ptr()
        with seeded(7):
            metrics = quietly(trainer.evaluate)
            drawn = torch.rand(()).item()
        places = [place == own for place, _ in trainer.seen]
        numbers = [number for _, number in trainer.seen]
        results.append((metrics, trainer.draws, drawn, numbers, trainer.model.calls))
        stock_places = [True] * 6
        assert places == ([True, False] * 3 if place else stock_places)
    mine, stock = results
    assert "eval_loss" in stock[0]
    assert_same_metrics(mine[0], stock[0])
    assert mine[1:] == stock[1:]
    assert mine[4] == 6


class ReadsItsCalls(Counting):
    """A model whose forward pass writes a buffer that the next one reads."""

    def __init__(self, *, is_bound=False):
        super().__init__()
        self.is_bound = is_bound

    def forward(self, input_ids, attention_mask, labels):
        outputs = super().forward(input_ids, attention_mask, labels)
        if len(input_ids) % 2 == 0:
            calls = self.calls + 1 + outputs["logits"].detach().mean()
            if self.is_bound:
                self.calls = calls
            else:
                self.calls.copy_(calls)
        factor = 1 + self.calls
        return {"loss": outputs["loss"] * factor, "logits": outputs["logits"] * factor}


class KeepsStatistics(Counting):
    """A model of which a part stays in training mode."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(1).double()

    def train(self, mode=True):
        super().train(mode)
        self.norm.train()
        return self

    def forward(self, input_ids, attention_mask, labels):
        outputs = super().forward(input_ids, attention_mask, labels)
        factor = self.norm(input_ids[:, None].double()).square().mean()
        factor = factor + self.norm.running_mean
        return {"loss": outputs["loss"] * factor, "logits": outputs["logits"]}


class Tally:
    def __init__(self):
        self.calls = 0.0


class ReadsItsState(Counting):
    """A model whose forward pass counts in an object, a list, or a buffer's data."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.number = 0.0
        self.tally = Tally()
        self.numbers = []

    def forward(self, input_ids, attention_mask, labels):
        self.number += self.kind == "number"
        self.tally.calls += self.kind == "object"
        if self.kind == "list":
            self.numbers.append(1)
        if self.kind == "data":
            self.calls.data.add_(1)
        outputs = super().forward(input_ids, attention_mask, labels)
        factor = 1 + self.number + self.tally.calls + len(self.numbers) + self.calls
        return {"loss": outputs["loss"] * factor, "logits": outputs["logits"] * factor}


WRITING = {
    **{
        kind: partial(ReadsItsState, kind)
        for kind in ("number", "object", "list", "data")
    },
    "in place": ReadsItsCalls,
    "bound": partial(ReadsItsCalls, is_bound=True),
    "running statistics": KeepsStatistics,
}


@pytest.mark.parametrize(
    "name", ["two", "one", pytest.param("three", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("writing", WRITING)
def test_buffers_that_a_library_evaluation_writes(tmp_path, name, writing, caplog):
    """Batches depend on each other. All of a group began with the same buffers, and
    what they wrote was lost, in silence.
    """
    caplog.set_level("INFO", "scatterpar")
    results = []
    for cls, place in (
        (ScatterOnceTrainer, {"device_ids": DEVICES[name]}),
        (transformers.Trainer, {}),
    ):
        trainer = build(cls, tmp_path, WRITING[writing](), classes, extra=place)
        results.append((quietly(trainer.evaluate), dict(trainer.model.named_buffers())))
    (mine, buffers), (stock, expected) = results
    assert_same_metrics(mine, stock)
    assert buffers.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(buffers[key], value)
    assert ("batches are computed alone" in caplog.text) == (name != "one")


class MakesTable(Counting):
    """Its first forward pass makes a table that the next ones read."""

    table = None

    def forward(self, input_ids, attention_mask, labels):
        if self.table is None:
            self.table = torch.ones(3, dtype=torch.float64).cumsum(0)
        outputs = super().forward(input_ids, attention_mask, labels)
        return {"loss": outputs["loss"], "logits": outputs["logits"] * self.table}


def test_table_of_the_first_call_leaves_groups(tmp_path, caplog):
    """The first batch is computed alone. Then replicas have its table."""
    caplog.set_level("INFO", "scatterpar")
    results = []
    for cls, place in (
        (ScatterOnceTrainer, {"device_ids": DEVICES["two"]}),
        (transformers.Trainer, {}),
    ):
        trainer = build(cls, tmp_path, MakesTable(), classes, extra=place)
        results.append(quietly(trainer.evaluate))
    assert_same_metrics(*results)
    assert "this batch is computed alone" in caplog.text
    assert "batches are computed alone" not in caplog.text


class OfUser:
    def prediction_step(self, *args, **options):
        return super().prediction_step(*args, **options)


def test_running_statistics_in_turns_are_handed_on(tmp_path):
    """Their kernels count no version, so each device had its own."""
    results = []
    for base, place in (
        (ScatterOnceTrainer, {"device_ids": DEVICES["two"]}),
        (transformers.Trainer, {}),
    ):
        cls = type("Mine", (OfUser, base), {})
        trainer = build(cls, tmp_path, KeepsStatistics(), classes, extra=place)
        results.append((quietly(trainer.evaluate), trainer.model.norm))
    (mine, norm), (stock, expected) = results
    assert_same_metrics(mine, stock)
    torch.testing.assert_close(norm.running_mean, expected.running_mean)
    assert norm.num_batches_tracked == 6


def assert_evaluates_as_stock(tmp_path, callback):
    """With a callback that changes the model between batches."""
    results = []
    for base, place in (
        (ScatterOnceTrainer, {"device_ids": DEVICES["two"]}),
        (transformers.Trainer, {}),
    ):
        cls = type("Mine", (Observes, base), {})
        extra = {"callbacks": [callback()], **place}
        trainer = build(cls, tmp_path, Counting(), classes, extra=extra)
        results.append(quietly(trainer.evaluate))
    assert "eval_loss" in results[1]
    assert_same_metrics(*results)


def test_evaluation_of_a_callback_in_an_evaluation(tmp_path):
    """It closed the engine of the evaluation around it."""

    class Evaluates(transformers.TrainerCallback):
        steps = 0
        metrics = None

        def on_prediction_step(self, *args, **kwargs):
            self.steps += 1
            if self.steps == 3:
                self.metrics = self.trainer.evaluate(sentences(3))

    def metrics(cls, devices):
        callback = Evaluates()
        trainer = build(
            cls,
            tmp_path,
            sequence_classifier(),
            classes,
            extra={"compute_metrics": counts, "callbacks": [callback], **devices},
        )
        callback.trainer = trainer
        found = trainer.evaluate()
        assert getattr(trainer, "_loop", None) is None or trainer._loop.engine is None
        return found, callback.metrics

    mine = metrics(ScatterOnceTrainer, {"device_ids": ["cpu:0", "cpu:1"]})
    for ours, stock in zip(mine, metrics(transformers.Trainer, {}), strict=True):
        assert_same_metrics(ours, stock)


def test_weights_that_a_callback_writes_count_in_turns(tmp_path):
    """With the next batch, on each device."""

    class Doubles(transformers.TrainerCallback):
        def on_prediction_step(self, args, state, control, model, **_):
            with torch.no_grad():
                model.inner.classifier.weight.mul_(2)

    assert_evaluates_as_stock(tmp_path, Doubles)


@pytest.mark.slow
def test_module_that_a_callback_replaces_counts(tmp_path):
    class Replaces(transformers.TrainerCallback):
        calls = 0

        def on_prediction_step(self, args, state, control, model, **_):
            self.calls += 1
            if self.calls == 3:
                with seeded(self.calls):
                    layer = nn.Linear(8, 3).double()
                model.inner.classifier = layer.to(model.calls.device)

    assert_evaluates_as_stock(tmp_path, Replaces)


@pytest.mark.slow
@pytest.mark.parametrize("edit", ["data", "no_grad"])
def test_weights_written_between_evaluations_count(tmp_path, edit):
    """Within an evaluation values are read once; a new one reads them again."""
    model = sequence_classifier()
    trainers = []
    for kind, extra in (
        (transformers.Trainer, {}),
        (ScatterOnceTrainer, {"device_ids": DEVICES["two"]}),
    ):
        trainer = quietly(build, kind, tmp_path, model, classes, extra=extra)
        quietly(trainer.evaluate)
        weight = trainer.model.classifier.weight
        with torch.no_grad():
            (weight.data if edit == "data" else weight).mul_(3)
        trainers.append(trainer)
    stock, mine = [quietly(trainer.evaluate) for trainer in trainers]
    assert_same_metrics(mine, stock)


@pytest.mark.slow
def test_owner_is_searched_once_per_evaluation(tmp_path, monkeypatch):
    searches = []
    search = TrainerLoop.modules

    def counted(self):
        searches.append(1)
        return search(self)

    monkeypatch.setattr(TrainerLoop, "modules", counted)
    extra = {"device_ids": DEVICES["two"]}
    trainer = quietly(
        build, ScatterOnceTrainer, tmp_path, sequence_classifier(), classes, extra=extra
    )
    quietly(trainer.evaluate)
    assert len(searches) == 1


# --- groups, turns, and the switch between them, in a loop of no library ---


class Tallies(nn.Module):
    """Writes state in its first calls, which later calls read."""

    def __init__(self, num_writes):
        super().__init__()
        with seeded():
            self.layer = nn.Linear(3, 2).double()
        self.num_writes = num_writes
        self.number = 0

    def forward(self, rows):
        if self.number < self.num_writes:
            self.number += 1
        return self.layer(rows) * (1 + self.number)


def evaluated(model, device_ids, batches):
    """The results of a loop as in the docstring of ``Evaluation``, and the devices of
    batches that were computed alone.
    """
    alone = []
    results = []
    with ScatterOnceParallel(model, device_ids=device_ids) as engine, torch.no_grad():
        ahead = BatchesAhead(batches)
        evaluation = Evaluation(engine, [model])
        evaluation.begin_groups(lambda replica, rows: replica(rows))
        ahead.begin(evaluation)
        for rows in ahead:
            result = ahead.result()
            if result is None:
                device = evaluation.next_device()
                alone.append(str(device))
                with evaluation.turn(device):
                    result = model(rows)
                result = evaluation.brought_home(result, device)
            results.append(result)
    return results, alone


HOME, AWAY = DEVICES["two"]
ALONE = {
    "nothing": (0, []),
    "the first call": (1, [HOME]),
    # The batch after it is in a group again, which writes, and turns begin.
    "all calls": (9, [HOME, HOME, AWAY, HOME, AWAY, HOME]),
}


@pytest.mark.parametrize("name", ALONE)
def test_evaluation_ends_groups_that_write(name):
    num_writes, alone = ALONE[name]
    with seeded(1):
        batches = [torch.randn(4, 3, dtype=torch.float64) for _ in range(6)]
    stock = Tallies(num_writes)
    with torch.no_grad():
        expected = [stock(rows) for rows in batches]
    model = Tallies(num_writes)
    results, devices = evaluated(model, DEVICES["two"], batches)
    assert devices == alone
    assert model.number == stock.number
    for result, value in zip(results, expected, strict=True):
        torch.testing.assert_close(result, value, rtol=1e-12, atol=1e-12)
