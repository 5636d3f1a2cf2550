"""Lightning's Trainer with ScatterOnceStrategy beside the stock Trainer
on one device.
"""

from __future__ import annotations

import dataclasses
import logging
from contextlib import nullcontext
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from harness.optional import needed
from harness.oracle import randint, randn, seeded
from harness.own_modules import IN, OUT, PROGRAMS, Program, assert_same_net
from harness.pages import blocks, read
from harness.pairwise import few_of
from harness.writes import (
    IRREVOCABLE,
    NETWORKS,
    RESTORABLE,
    Written,
    assert_same_writes,
    atoms,
)
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset, default_collate

pl = needed("lightning.pytorch", "'.[lightning]'")

from lightning.pytorch.callbacks import (  # noqa: E402
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    ModelPruning,
    StochasticWeightAveraging,
    TQDMProgressBar,
)
from lightning.pytorch.loggers.logger import Logger  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402
from lightning.pytorch.tuner import Tuner  # noqa: E402
from lightning.pytorch.utilities import CombinedLoader, rank_zero_info  # noqa: E402
from torchmetrics import (  # noqa: E402
    AUROC,
    MeanMetric,
    MeanSquaredError,
    Metric,
    MetricCollection,
    PearsonCorrCoef,
)
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score  # noqa: E402
from torchmetrics.wrappers import Running  # noqa: E402

from scatterpar import Replicated, ScatterOnceParallel, count_labels, splitcheck  # noqa: E402
from scatterpar.integrations import lightning_loop, lightning_metrics  # noqa: E402
from scatterpar.integrations.lightning import ScatterOnceStrategy  # noqa: E402
from scatterpar.loops import lending  # noqa: E402

pytestmark = [
    pytest.mark.loops,
    pytest.mark.draws,
    pytest.mark.filterwarnings(
        "ignore:.*(num_workers|logging interval|isinstance|_check_fn):"
    ),
    pytest.mark.filterwarnings("ignore::Warning:lightning"),
]

SAME = 1e-9
SHARED = pytest.param(["cpu"] * 2, id="shared", marks=pytest.mark.slow)
LAYOUTS = [pytest.param(["cpu:0", "cpu:1", "cpu:2"], id="apart"), SHARED]
ROWS, FEATURES, CLASSES = 41, 6, 3  # with batches of 12 the last one has 5 rows

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Classifier(pl.LightningModule):
    """Logs, counts and measures in every way that a step can."""

    def __init__(self, lr=0.05):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)
        )
        self.double()
        self.lr = lr
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        f1 = {
            "macro": MulticlassF1Score(CLASSES),
            "recall": MulticlassAccuracy(CLASSES),
        }
        self.measures = MetricCollection(f1)
        self.auroc = AUROC("multiclass", num_classes=CLASSES)
        # a metric of means inside of a list
        self.many = nn.ModuleList([MeanSquaredError()])
        self.rows_seen = 0
        self.first = []
        self.ended = []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        scores = self(x)
        loss = functional.cross_entropy(scores, y)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("sized", loss, batch_size=len(x), on_step=False, on_epoch=True)
        self.log("largest", scores.amax(), reduce_fx="max")
        self.log(
            "smallest", scores.amin(), reduce_fx=torch.min, on_step=False, on_epoch=True
        )
        right = (scores.argmax(1) == y).sum().double()
        self.log_dict({"right": right, "rows": len(x)}, reduce_fx="sum", on_epoch=True)
        self.accuracy(scores, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.measures.update(scores, y)
        self.log_dict(self.measures, on_step=False, on_epoch=True)
        self.many[0](scores[:, 0].contiguous(), x[:, 0].contiguous())
        self.log("error", self.many[0], on_step=True, on_epoch=True)
        self.rows_seen += len(x)
        self.first.extend(x[:, 0].tolist())
        return {
            "loss": loss,
            "scores": scores,
            "mean": scores.mean(),
            "zeros": torch.zeros_like(y),  # the same rows in all micro-batches
            "batch_idx": batch_idx,
        }

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.ended.append(
            {name: torch.as_tensor(v).detach() for name, v in outputs.items()}
        )

    def validation_step(self, batch, batch_idx):
        x, y = batch
        scores = self(x)
        self.log("val_loss", functional.cross_entropy(scores, y), prog_bar=True)
        self.auroc.update(scores, y)
        self.log("val_auroc", self.auroc)

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return {"scores": self(batch[0]), "labels": batch[1], "batch_idx": batch_idx}

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), self.lr)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class Plain(pl.LightningModule):
    """A linear layer, trained by Adam."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(FEATURES, CLASSES)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def loader(batch_size=12, rows=ROWS):
    return DataLoader(
        TensorDataset(randn(rows, FEATURES), randint(CLASSES, rows)),
        batch_size=batch_size,
    )


def made(kind=Classifier, **options):
    with seeded(3):
        return kind(**options)


def trainer(strategy=None, **options):
    """A Trainer with ``strategy``, or the stock one on one device."""
    plain = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "log_every_n_steps": 1,
    }
    plain |= {"logger": mock.Mock(spec=Logger), "enable_checkpointing": False}
    plain |= {"enable_progress_bar": False, "enable_model_summary": False}
    own = {} if strategy is None else {"strategy": strategy}
    return pl.Trainer(**plain | own | options)


def fitted(strategy=None, module=None, callback=None, **options):
    """The trained module, and its Trainer; ``callback`` makes one for four epochs."""
    module = made() if module is None else module
    options |= {"callbacks": [callback()], "max_epochs": 4} if callback else {}
    own = trainer(strategy, **options)
    with seeded(5):
        own.fit(module, loader(), loader(9))
    return module, own


def assert_same(ours, stock, tolerance=SAME):
    ours, stock = ours.state_dict(), stock.state_dict()
    assert ours.keys() == stock.keys()
    for name, one in ours.items():
        torch.testing.assert_close(
            one, stock[name], rtol=tolerance, atol=tolerance, msg=name
        )


def assert_logged(ours, stock, tolerance=1e-6):
    """Both logged the same; Lightning keeps numbers in single precision."""
    rows, expected = (own.logger.log_metrics.call_args_list for own in (ours, stock))
    assert rows
    for one, other in zip(rows, expected, strict=True):
        assert one.kwargs["step"] == other.kwargs["step"]
        near = pytest.approx(other.kwargs["metrics"], rel=tolerance, abs=tolerance)
        assert one.kwargs["metrics"] == near


def with_own(**attributes):
    return type("Own", (Classifier,), attributes)


def summed(self, batch, batch_idx):
    return functional.cross_entropy(self(batch[0]), batch[1], reduction="sum")


def kept(self, batch, batch_idx):
    rows = batch[1] > 0
    return functional.cross_entropy(self(batch[0])[rows], batch[1][rows])


def in_part(self, batch, batch_idx):
    """No loss for the micro-batches of the batch's last rows."""
    loss = Plain.training_step(self, batch, batch_idx)
    is_last = torch.equal(batch[0][-1], self.trainer.train_dataloader.dataset[11][0])
    return None if is_last else loss


def skipped(self, batch, batch_idx):
    """No loss for the batches with odd numbers."""
    return None if batch_idx % 2 else Classifier.training_step(self, batch, batch_idx)


RUNS = {
    "plain": {},
    "skipped batches": {"kind": with_own(training_step=skipped)},
    # memory suffices for one sub-step per replica
    "accum auto": {"strategy": {"accum": "auto"}},
    "a sum": {
        "kind": with_own(training_step=summed),
        "strategy": {"accum": 3, "reduction": "sum"},
    },
    "clipping": {"gradient_clip_val": 0.05},
    "clipping by value": {
        "gradient_clip_val": 0.01,
        "gradient_clip_algorithm": "value",
    },
    "accumulation": {"accumulate_grad_batches": 3},
    "limits": {"limit_train_batches": 2, "limit_val_batches": 1, "overfit_batches": 2},
    "averages": {"callback": partial(EMAWeightAveraging, decay=0.5)},
    "stochastic averages": {
        "callback": partial(StochasticWeightAveraging, 0.01, swa_epoch_start=1)
    },
    # later masks are chosen by the weights
    "pruning": {"callback": partial(ModelPruning, "l1_unstructured", amount=0.3)},
    "pruning without resets": {
        "callback": partial(
            ModelPruning,
            "ln_structured",
            amount=0.3,
            parameter_names=["weight"],
            pruning_norm=2,
            pruning_dim=0,
            use_global_unstructured=False,
            use_lottery_ticket_hypothesis=False,
            make_pruning_permanent=False,
        )
    },
    "profiler": {"profiler": "simple"},
    "stopping": {
        "callback": partial(EarlyStopping, "val_loss", mode="max", patience=1)
    },
}


@pytest.mark.parametrize("name", RUNS)
def test_run_equals_one_device(name, devices, recwarn):
    options = dict(RUNS[name])
    kind, how = (
        options.pop("kind", Classifier),
        {"accum": 2} | options.pop("strategy", {}),
    )
    ours, own = fitted(ScatterOnceStrategy(devices(2), **how), made(kind), **options)
    stock, one = fitted(None, made(kind), **options)
    told = [str(one.message) for one in recwarn]
    assert not [text for text in told if "had no backward pass" in text]
    assert own.world_size == 1
    assert own.current_epoch == one.current_epoch
    assert_same(ours, stock)
    assert_logged(own, one)
    assert (ours.rows_seen, ours.first) == (stock.rows_seen, stock.first)
    for mine, other in zip(ours.ended, stock.ended, strict=True):
        assert mine.keys() == other.keys()
        for name, value in mine.items():
            expected = other[name]
            if name == "batch_idx":  # one number per micro-batch
                expected = expected.expand_as(value)
            torch.testing.assert_close(value, expected, msg=name)


class ReturnsNumbers(Plain):
    """Numbers that are equal for some batches by chance."""

    def __init__(self):
        super().__init__()
        self.ended = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        right = len(batch[0]) + (batch_idx and batch[1].sum())
        numbers = {"right": torch.as_tensor(right), "number": int(right)}
        return {"loss": loss, **numbers, "inside": dict(numbers), "text": "x"}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.ended.append(outputs)


def test_step_after_the_training_runs_on_one_device():
    """As a test of a loop calls it; it ended in an error without words."""
    own, trained = fitted(ScatterOnceStrategy(["cpu:0", "cpu:1"]), made(Plain).double())
    batch = next(iter(loader()))
    loss = trained.strategy.training_step(batch, 0)
    torch.testing.assert_close(loss, own.training_step(batch, 0))


def test_returned_numbers_are_a_list():
    """Also if they are equal by chance, as in the first batch."""
    module = made(ReturnsNumbers).double()
    strategy = ScatterOnceStrategy(["cpu:0", "cpu:1"], 2)
    trainer(strategy, max_epochs=1).fit(module, loader(12, 24))
    for number, outputs in enumerate(module.ended):
        for numbers in (outputs, outputs["inside"]):
            assert len(numbers["right"]) == len(numbers["number"]) == 4
            assert [int(right) for right in numbers["right"]] == numbers["number"]
        assert outputs["text"] == "x"
        assert (outputs["number"] == [3] * 4) == (number == 0)
    alone = made(ReturnsNumbers).double()
    trainer(ScatterOnceStrategy(["cpu"]), max_epochs=1).fit(alone, loader(12, 24))
    assert alone.ended[0]["number"] == 12


def test_trainer_devices_become_replicas():
    strategy, module, replicas = ScatterOnceStrategy(accum=2), made(), []
    module.on_train_end = lambda: replicas.extend(strategy._loop.engine.device_ids)
    trainer(strategy, devices=2, max_epochs=1).fit(module, loader())
    assert replicas == [strategy.root_device] * 2


def test_evaluation_searches_the_module_once(monkeypatch):
    """It was searched for every batch of another device than the first."""
    searches = []

    class Counted(lending.KeptPlaces):
        def __init__(self, roots, *args, **options):
            searches.append(len(roots))
            super().__init__(roots, *args, **options)

    monkeypatch.setattr(lending, "KeptPlaces", Counted)
    strategy = ScatterOnceStrategy(["cpu:0", "cpu:1"], 2)
    trainer(strategy).validate(made(), loader(4), verbose=False)
    assert len([*filter(None, searches)]) == 1


def test_evaluation_runs_on_all_replicas(devices):
    def run(strategy=None):
        module, own = made(), trainer(strategy)
        results = own.validate(module, loader(), verbose=False)
        results += own.test(module, loader(), verbose=False)
        return results, own.predict(module, loader())

    (ours, predicted), (stock, expected) = (
        run(ScatterOnceStrategy(devices(2), 2)),
        run(),
    )
    assert [*map(sorted, ours)] == [*map(sorted, stock)]
    for one, other in zip(ours, stock, strict=True):
        assert one == pytest.approx(other, rel=1e-6)
    for one, other in zip(predicted, expected, strict=True):
        torch.testing.assert_close(one, other)


class Hungry(Classifier):
    """Has memory for two rows, after it has logged, measured and kept them."""

    room = 10**9

    def training_step(self, batch, batch_idx):
        outputs = super().training_step(batch, batch_idx)
        if len(batch[1]) > self.room:
            raise torch.OutOfMemoryError("out of memory")
        return outputs


def test_tries_out_of_memory_leave_no_values(recwarn):
    """Metrics, logged values and lists are those of the stock Trainer."""
    ours = made(Hungry)
    ours.room = 2
    _, own = fitted(ScatterOnceStrategy(["cpu:0", "cpu:1"], "auto"), ours)
    stock, one = fitted(None, made(Hungry))
    assert_same(ours, stock)
    assert_logged(own, one)
    assert (ours.rows_seen, ours.first) == (stock.rows_seen, stock.first)
    told = [str(w.message) for w in recwarn if 'accum="auto"' in str(w.message)]
    assert "12 rows with accum=1 ran out of memory; accum=3 is the smallest" in told[0]


@pytest.mark.parametrize("ours_first", [True, False])
def test_checkpoint_resumes_with_the_other(ours_first, tmp_path):
    """A run of the stock strategy goes on with ours, and the reverse."""

    def strategy(ours):
        return ScatterOnceStrategy(["cpu:0", "cpu:1"], 2) if ours else None

    stock, _ = fitted()
    _, own = fitted(strategy(ours_first), max_epochs=1)
    own.save_checkpoint(tmp_path / "it.ckpt")
    module, own = made(), trainer(strategy(not ours_first))
    own.fit(
        module, loader(), loader(9), ckpt_path=tmp_path / "it.ckpt", weights_only=False
    )
    assert own.current_epoch == 2
    assert_same(module, stock)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_as_stock(precision, devices):
    scales = []
    single = with_own(
        on_after_batch_transfer=lambda self, rows, _: (rows[0].float(), rows[1])
    )

    def run(strategy):
        half = precision == "16-mixed"
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40) if half else None
        plugin = MixedPrecision(precision, "cpu", scaler)
        module = made(single).float()
        fitted(strategy, module, plugins=[plugin], gradient_clip_val=0.5)
        scales.append(scaler and scaler.get_scale())
        return module

    assert_same(run(ScatterOnceStrategy(devices(2), 2)), run(None), 3e-2)
    assert scales[0] == scales[1]  # the first steps overflow in float16, in both


def test_learning_rate_finder_as_stock():
    def run(strategy):
        own, module = trainer(strategy), made()
        found = Tuner(own).lr_find(
            module, loader(), num_training=12, early_stop_threshold=None
        )
        return found.results["loss"], found.suggestion(skip_begin=0, skip_end=0)

    (ours, rate), (stock, expected) = (
        run(ScatterOnceStrategy(["cpu"] * 2, 2)),
        run(None),
    )
    assert ours == pytest.approx(stock, rel=1e-5)
    assert rate == pytest.approx(expected)


def test_compiled_modules_train_as_stock():
    module = torch.compile(made(), backend="eager")
    fitted(ScatterOnceStrategy(["cpu"] * 2, 2), module, max_epochs=1)
    assert module._orig_mod._compiler_ctx is not None  # compiled still
    assert_same(module._orig_mod, fitted(None, made(), max_epochs=1)[0])


class Tokens(Classifier):
    """A mean over labels, some of which are ignored; a dict of rows, some of them
    texts.
    """

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {**batch, "x": 2 * batch["x"]}

    def training_step(self, batch, batch_idx):
        assert len(batch["text"]) == len(batch["x"])
        self.first.extend(batch["text"])
        loss = functional.cross_entropy(self(batch["x"]).transpose(1, 2), batch["y"])
        self.log("loss", loss, on_step=True)
        return loss


def labelled(batch):
    return batch["y"].ne(-100).sum()


@pytest.mark.contract
def test_count_defines_the_mean(devices):
    x, y = randn(20, 4, FEATURES), randint(CLASSES, 20, 4)
    y[randn(20, 4) > 0.5] = -100
    y[:3] = -100
    rows = [{"x": x[i], "y": y[i], "text": f"row {i}"} for i in range(20)]

    def run(strategy):
        module, own = made(Tokens), trainer(strategy)
        own.fit(module, DataLoader(rows, 6))
        return module, own

    ours, own = run(ScatterOnceStrategy(devices(2), 2, count=labelled))
    stock, one = run(None)
    assert_same(ours, stock)
    assert_logged(own, one)
    assert ours.first == stock.first


def test_error_reaches_user_module_intact():
    class Failing(Classifier):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2 and self.rows_seen > 30:
                raise LookupError("a bug")
            return super().training_step(batch, batch_idx)

    module = made(Failing)
    accuracy = module.accuracy
    with pytest.raises(LookupError, match="a bug"):
        fitted(ScatterOnceStrategy(["cpu"] * 2, 2), module)
    assert module.accuracy is accuracy
    assert "log" not in vars(module)
    assert "measures.macro.tp" not in module.state_dict()


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (with_own(automatic_optimization=False), {}, "manual optimization"),
        (
            with_own(training_step=lambda self, dataloader_iter: None),
            {},
            "dataloader_iter",
        ),
        (with_own(training_step=in_part), {}, "returned None for a part of the batch"),
        (with_own(training_step=kept), {}, "count="),
        (Classifier, {"strategy": {"graphs": True}}, "graphs=True"),
        (Classifier, {"sync_batchnorm": True}, "sync_batchnorm"),
        (Classifier, {"num_nodes": 2}, "num_nodes"),
    ],
)
def test_options_refused_by_name(kind, options, words):
    options = dict(options)
    strategy = partial(ScatterOnceStrategy, ["cpu"] * 2, **options.pop("strategy", {}))
    with pytest.raises(ValueError, match=words):
        fitted(strategy(), made(kind), **options)


def counted_in_part(self, batch, batch_idx):
    """Zero for the micro-batches without a row that counts."""
    scores = self(batch[0])
    counts = batch[0][:, 0] > 0.5
    if not counts.any():
        return (scores * 0).sum()
    losses = functional.cross_entropy(scores, batch[1], reduction="none")
    return losses[counts].sum() / len(counts)


# What is refused, the remedy that the error names, and what follows it.
REMEDIES = {
    "a part without a loss": (
        with_own(training_step=in_part),
        r"a loss for all, such as \(output \* 0\)\.sum\(\)",
        with_own(training_step=counted_in_part),
    ),
}


@pytest.mark.parametrize("name", REMEDIES)
def test_remedy_is_followed(name):
    refused, words, follows = REMEDIES[name]
    strategy = partial(ScatterOnceStrategy, ["cpu:0", "cpu:1"], 2)
    with pytest.raises(ValueError, match=words):
        fitted(strategy(), made(refused))
    ours, _ = fitted(strategy(), made(follows))
    stock, _ = fitted(None, made(follows))
    assert_same(ours, stock)


class Normalised(Classifier):
    def __init__(self):
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(8).double())


def test_batch_norm_warns_once(recwarn):
    fitted(ScatterOnceStrategy(["cpu"] * 2), made(Normalised))
    told = [
        str(one.message) for one in recwarn if "batch normalisation" in str(one.message)
    ]
    assert len(told) == 1
    assert 'buffers="batch"' in told[0]
    recwarn.clear()
    ours, _ = fitted(
        ScatterOnceStrategy(["cpu"] * 2, buffers="batch"), made(Normalised)
    )
    assert not [one for one in recwarn if "batch normalisation" in str(one.message)]
    assert ours.net[1].num_batches_tracked == 8  # once a step


def test_page_example_runs(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # the Trainer writes checkpoints there
    snippet, _ = blocks(read("docs/lightning.md"), "python")
    monkeypatch.setattr(
        pl, "Trainer", partial(pl.Trainer, accelerator="cpu", logger=False)
    )
    exec(snippet, {"module": made(), "loader": loader()})


class PlainLoss:
    """``engine.loss`` of a whole batch, in plain torch."""

    def __init__(self, module, *_):
        self.module = module

    def loss(self, inputs, targets=None, criterion=None):
        if criterion is None:
            return self.module(*inputs)
        return criterion(self.module(inputs), targets)

    def close(self):
        """There are no workers."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_page_example_of_a_gan_equals_plain_torch(layout):
    """Manual optimization, with the stock strategy and two engines."""
    _, snippet = blocks(read("docs/lightning.md"), "python")
    gans = []
    for engine in (ScatterOnceParallel, PlainLoss):
        names = {}
        exec(snippet, names)
        names["ScatterOnceParallel"] = engine
        gan = made(names["GAN"], devices=layout).double()
        data = DataLoader(TensorDataset(randn(ROWS, 2)), 12)
        with seeded(4):
            trainer().fit(gan, data)
        gans.append(gan)
    assert_same(*gans)


def step_of(own, batch, batch_idx):
    """``training_step`` of ``Plain``, and a note of it in objects of several owners."""
    loss = Plain.training_step(own, batch, batch_idx)
    own.note(float(loss.detach()), float(batch[0][0, 0]))
    return loss


@pytest.mark.parametrize("seed", [None, 5])
def test_only_seeds_of_training_step_are_told(recwarn, seed):
    """Each call of a look begins with the same random numbers, as if it seeded them."""

    class Drops(Plain):
        def training_step(self, batch, batch_idx):
            if seed is not None:
                torch.manual_seed(seed)
            scores = functional.dropout(self.net(batch[0]), 0.3)
            return functional.cross_entropy(scores, batch[1])

    trainer(ScatterOnceStrategy(["cpu:0", "cpu:1"], 2)).fit(
        made(Drops).double(), loader()
    )
    told = [str(warning.message) for warning in recwarn]
    assert len([text for text in told if "seed the" in text]) == (seed is not None)


class Counts(Callback):
    def __init__(self, kinds):
        self.written = Written(kinds)


class Data(pl.LightningDataModule):
    def __init__(self):
        super().__init__()
        self.rows = 0

    def train_dataloader(self):
        return loader()


class Soft(nn.Module):
    """A temperature that ``training_step`` sets, and ``forward`` reads."""

    temperature = 1.0

    def forward(self, scores):
        return scores / self.temperature


class Writes(Plain):
    """Writes into objects of its own, of a callback, the data module, the Trainer."""

    kinds = RESTORABLE

    def __init__(self):
        super().__init__()
        self.double()
        self.net = nn.Sequential(self.net, Soft())
        self.written = Written(self.kinds)
        self.number = 0
        self.same = self.history = [[]]
        self.meters = {"mean": MeanMetric()}  # a dict hides it from the module
        self.register_buffer("queue", torch.zeros(5).double())
        self.save_hyperparameters({"beta": 1.0})

    def note(self, loss, first):
        self.number += 1
        self.same[0].append(loss)
        self.meters["mean"].update(loss)
        self.queue[self.number % 5] = loss
        self.hparams.beta *= 0.99
        self.net[1].temperature = 1 + 0.1 * self.global_step
        self.trainer.datamodule.rows += 1
        self.trainer.own_rows = getattr(self.trainer, "own_rows", 0) + 1
        callback = self.trainer.callbacks[0]
        for written in (self.written, callback.written):
            written.write(loss, first)

    training_step = step_of

    def values(self):
        trainer = self.trainer
        values = self.written.values()
        for name, kept in trainer.callbacks[0].written.values().items():
            values[f"{name} of the callback"] = kept
        values["history"] = list(atoms(self.history))
        values["queue"] = list(atoms(self.queue))
        values["meter"] = [round(float(self.meters["mean"].compute()), 5)]
        values["numbers"] = [self.number, self.hparams.beta, self.net[1].temperature]
        values["trainer"] = [trainer.datamodule.rows, trainer.own_rows]
        return values


class WritesInEvaluation(Writes):
    """Writes the same in an evaluation, whose batches are whole."""

    training_step = Plain.training_step
    validation_step = test_step = predict_step = step_of

    def note(self, loss, first):
        super().note(loss, first)
        part = self.net[1]
        part.history = [*getattr(part, "history", []), loss]
        part.last = torch.tensor([first])

    def values(self):
        part = self.net[1]
        return super().values() | {"part": [*part.history, float(part.last)]}


def accumulated(module, layout, accum, **options):
    """``module`` trained for two epochs of equal batches of 12 rows; without a layout
    by the stock Trainer, with micro-batches of ``12 / accum`` rows.
    """
    data = Data()
    size = 12 if layout else 12 // accum
    data.train_dataloader = lambda: loader(size, 48)
    strategy = ScatterOnceStrategy(layout, accum // len(layout)) if layout else None
    options |= {} if layout else {"accumulate_grad_batches": accum}
    own = trainer(strategy, callbacks=[Counts(module.kinds)], **options)
    own.fit(module, datamodule=data)
    return module


KINDS_OF_WRITES = {"restorable": RESTORABLE, "irrevocable": IRREVOCABLE}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("layout", [["cpu:0", "cpu:1"], SHARED])
@pytest.mark.parametrize("kinds", KINDS_OF_WRITES)
def test_writes_equal_gradient_accumulation(kinds, layout):
    """In the order of the rows. Calls wrote into copies, whose changes were merged."""
    own = type("Own", (Writes,), {"kinds": KINDS_OF_WRITES[kinds]})
    ours = accumulated(made(own), layout, 4)
    stock = accumulated(made(own), None, 4)
    assert_same_writes(ours.values(), stock.values())
    assert_same(ours, stock)


class WritesNetworks(Plain):
    """Writes networks that are no submodules, as averaged weights are."""

    kinds = NETWORKS

    def __init__(self):
        super().__init__()
        self.double()
        self.written = Written(NETWORKS)

    def note(self, loss, first):
        for written in (self.written, self.trainer.callbacks[0].written):
            written.write(loss, first)

    training_step = step_of


@pytest.mark.parametrize("layout", [["cpu:0", "cpu:1"], SHARED])
def test_networks_outside_equal_gradient_accumulation(layout):
    """A look wrote the layers of a network in a list, and left them written."""
    ours = accumulated(made(WritesNetworks), layout, 4)
    stock = accumulated(made(WritesNetworks), None, 4)
    assert_same_writes(ours.written.values(), stock.written.values())
    of_callbacks = [own.trainer.callbacks[0].written.values() for own in (ours, stock)]
    assert_same_writes(*of_callbacks)
    assert_same(ours, stock)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kinds", KINDS_OF_WRITES)
@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_writes_of_an_evaluation_equal_stock(verb, kinds, layout):
    """Each call has a whole batch. Calls had parts of one, and wrote into copies."""
    values = []
    own = type("Own", (WritesInEvaluation,), {"kinds": KINDS_OF_WRITES[kinds]})
    for strategy in (ScatterOnceStrategy(layout, 2), None):
        module, one = made(own), trainer(strategy, callbacks=[Counts(own.kinds)])
        data = Data()
        setattr(data, f"{verb.replace('validate', 'val')}_dataloader", loader)
        getattr(one, verb)(module, datamodule=data)
        values.append(module.values())
    assert_same_writes(*values)


class OfProgram(pl.LightningModule):
    """``training_step`` is a program's step."""

    def __init__(self, program):
        super().__init__()
        self.program = program
        self.net = program.net()
        program.prepare(self, self.net)

    def training_step(self, batch, batch_idx):
        return self.program.step(self, self.net, *batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


QUICK_PROGRAMS = [
    *("a centre in place", "instance normalisation", "a module on first use"),
    *("attributes of parts", "a hook that fills a dict", "frozen in the fifth call"),
    *("an attribute under a checkpoint", "batch normalisation under a checkpoint"),
    *("a teacher in place", "a teacher's .data from the eighth call"),
]


@pytest.mark.filterwarnings("ignore::UserWarning")
def fitted_by_both(make, data, layout):
    """A module after an epoch on two replicas, and one after the stock loop."""
    modules = []
    for strategy, size in ((ScatterOnceStrategy(layout, 2), 12), (None, 3)):
        module = made(make)
        options = {"max_epochs": 1, "logger": False}
        if strategy is None:
            options["accumulate_grad_batches"] = 4
        trainer(strategy, **options).fit(module, DataLoader(data, size))
        modules.append(module)
    return modules


@pytest.mark.parametrize("layout", [["cpu:0", "cpu:1"], SHARED])
@pytest.mark.parametrize("name", few_of(PROGRAMS, QUICK_PROGRAMS))
def test_own_modules_equal_the_stock_loop(name, layout):
    """Calls had a replica's modules: what they did to these was lost, or refused."""
    program = PROGRAMS[name]
    data = TensorDataset(randn(36, IN), torch.arange(36) % OUT)
    ours, stock = fitted_by_both(partial(OfProgram, program), data, layout)
    values = [program.read(module, module.net) for module in (ours, stock)]
    assert_same_net(ours.net, stock.net, *values)


class KeepsGradients(OfProgram):
    """Keeps the gradient of each step, for the next one."""

    kept = None

    def on_before_optimizer_step(self, optimizer):
        self.kept = self.net.head.weight.grad.clone()


def smoothed(module, net, x, y):
    loss = torch.nn.functional.cross_entropy(net(x), y)
    if module.kept is None:
        return loss
    return loss + (module.kept.to(x.device) * net.head.weight).sum()


def reads_gradients(module, net, x, y):
    module.kept = net.head.weight.grad
    return smoothed(module, net, x, y)


@pytest.mark.parametrize("layout", [["cpu:0", "cpu:1"], SHARED])
def test_refused_gradients_are_read_at_the_steps_end(layout):
    """Calls read the gradients of their replica's earlier micro-batches, silently."""
    data = TensorDataset(randn(36, IN), torch.arange(36) % OUT)
    strategy = ScatterOnceStrategy(layout, 2)
    module = made(partial(KeepsGradients, Program(reads_gradients)))
    words = r"training_step reads or writes \.grad.*\.head\.weight'.*before_optimizer"
    with pytest.raises(ValueError, match=words):
        trainer(strategy, logger=False, max_epochs=1).fit(module, DataLoader(data, 12))
    smoothing = partial(KeepsGradients, Program(smoothed))
    ours, stock = fitted_by_both(smoothing, data, layout)
    torch.testing.assert_close(ours.kept, stock.kept, rtol=1e-9, atol=1e-12)
    assert_same_net(ours.net, stock.net, [], [])


class CountsUpdates(Metric):
    """Has an attribute that is no state."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("sum", torch.zeros(()), dist_reduce_fx="sum")
        self.updates = 0
        self.sizes = []

    def update(self, scores, labels):
        self.sum += scores.sum()
        self.updates += 1
        self.sizes.append(len(labels))

    def compute(self):
        return self.sum / self.updates


class CountsClasses(Metric):
    """Writes entries, tensors and arrays that are no states, and keeps a method."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("sum", torch.zeros(()), dist_reduce_fx="sum")
        self.counts = dict.fromkeys(range(OUT), 0)
        self.least = np.zeros(2)
        self.register_buffer("largest", torch.zeros(()), persistent=False)
        self.rule = self._add

    def update(self, scores, labels):
        self.rule(scores)
        for label in labels.tolist():
            self.counts[label] += 1
        np.minimum(self.least, scores.min().item(), out=self.least)
        self.largest.copy_(torch.maximum(self.largest, scores.max()))

    def _add(self, scores):
        self.sum += scores.sum()

    def compute(self):
        rows = sum(self.counts.values())
        return self.sum / rows + self.least.sum() + self.largest


class AddsFromOne(Metric):
    """The default of its sum is not zero."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("sum", torch.ones(()), dist_reduce_fx="sum")

    def update(self, scores, labels):
        self.sum += scores.sum()

    def compute(self):
        return self.sum


class Largest(Metric):
    """Its update reads its state, and its class does not say so."""

    def __init__(self):
        super().__init__()
        self.add_state("value", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, scores, labels):
        self.value = torch.maximum(self.value * 0.9, scores.max())

    def compute(self):
        return self.value


class Means(MeanMetric):
    """Of the scores, whatever the labels are."""

    def update(self, scores, labels):
        super().update(scores)


class Scales(Means):
    def compute(self, scale=1.0):
        return super().compute() * scale


class Correlation(PearsonCorrCoef):
    def update(self, scores, labels):
        super().update(scores[:, 0].contiguous(), labels.double())


def updates(module, scores, labels):
    module.metric.update(scores, labels)


def computes(module, scores, labels):
    module.metric(scores, labels)
    module.seen.append(float(module.metric.compute()))


def computes_late(module, scores, labels):
    updates(module, scores, labels)
    if module.calls % 4 == 3:
        module.seen.append(float(module.metric.compute()))
        updates(module, scores.abs(), labels)


def resets_late(module, scores, labels):
    computes_late(module, scores, labels)
    if module.calls == 7:
        metric = module.metric
        metric.reset()
        metric.update(scores, labels)


def calls(module, scores, labels):
    module.metric(scores, labels)


def computes_scaled(module, scores, labels):
    updates(module, scores, labels)
    module.seen.append(float(module.metric.compute(scale=2.0)))


def resets(module, scores, labels):
    module.metric.reset()
    updates(module, scores, labels)


def computes_member(module, scores, labels):
    updates(module, scores, labels)
    if module.calls > 5:
        module.seen.append(float(module.metric["recall"].compute()))


def replaces(module, scores, labels):
    if module.calls == 5:
        module.seen.append(float(module.metric.compute()))
        module.metric = Means()
    updates(module, scores, labels)


def replaces_unread(module, scores, labels):
    updates(module, scores, labels)
    if module.calls in (2, 8):
        module.metric = Means()


def makes(module, scores, labels):
    if module.calls == 5:
        module.metric = Means()
    if module.calls >= 5:
        updates(module, scores, labels)


def of_classes(average):
    return MulticlassAccuracy(OUT, average=average)


MEASURED = {
    "computed in each call": (partial(of_classes, "macro"), computes),
    "computed late": (Means, computes_late),
    "reset late": (Means, resets_late),
    "reset in each call": (partial(of_classes, "micro"), resets),
    "the last ones": (lambda: Running(Means(), 5), updates),
    "an attribute": (CountsUpdates, updates),
    "an attribute, computed late": (CountsUpdates, computes_late),
    "entries and a method": (CountsClasses, updates),
    "entries and a method, computed late": (CountsClasses, computes_late),
    "a sum from one on": (AddsFromOne, updates),
    "arguments": (Scales, computes_scaled),
    "an update that reads": (Largest, updates),
    "no sum": (Correlation, updates),
    "replaced": (Means, replaces),
    "replaced unread": (Means, replaces_unread),
    "made in a call": (nn.Identity, makes),
    "a member of a group": (
        lambda: MetricCollection(
            {"f1": MulticlassF1Score(OUT), "recall": of_classes("macro")}
        ),
        computes_member,
    ),
}


class Measures(Plain):
    """What ``measure`` does with a metric in each call."""

    def __init__(self, metric, measure):
        super().__init__()
        self.net = nn.Linear(IN, OUT).double()
        self.metric = metric()
        self.measure = measure
        self.seen = []
        self.calls = 0

    def training_step(self, batch, batch_idx):
        scores = self.net(batch[0])
        self.measure(self, scores.detach(), batch[1])
        self.calls += 1
        return functional.cross_entropy(scores, batch[1])

    def on_train_epoch_end(self):
        value = self.metric.compute()
        self.seen += map(float, value.values() if isinstance(value, dict) else [value])
        self.seen += getattr(self.metric, "sizes", [])


@pytest.mark.filterwarnings("ignore:training_step writes self.calls")
@pytest.mark.parametrize("layout", [["cpu:0", "cpu:1"], SHARED])
@pytest.mark.parametrize(
    "name", few_of(MEASURED, ["computed in each call", "reset late", "an attribute"])
)
def test_metrics_of_calls_equal_the_stock_loop(name, layout):
    """Calls had copies of one micro-batch, which were merged whatever they did."""
    data = TensorDataset(randn(36, IN), torch.arange(36) % OUT)
    ours, stock = fitted_by_both(partial(Measures, *MEASURED[name]), data, layout)
    assert ours.seen == pytest.approx(stock.seen, rel=1e-9)
    assert_same(ours, stock)


class LogsItsMetric(Measures):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("mean", self.metric, on_step=True)
        return loss


@pytest.mark.filterwarnings("ignore:training_step writes self.calls")
@pytest.mark.parametrize("verify", [True, False])
def test_value_of_a_step_is_that_of_the_batch(verify):
    """Without looks it was that of the last micro-batch."""
    data = TensorDataset(randn(36, IN), torch.arange(36) % OUT)
    values = []
    for strategy in (ScatterOnceStrategy(["cpu"] * 2, 2, verify=verify), None):
        module = made(partial(LogsItsMetric, Means, calls))
        own = trainer(strategy, logger=False, max_epochs=1)
        own.fit(module, DataLoader(data, 12))
        values.append(float(own.callback_metrics["mean"]))
    assert values[0] == pytest.approx(values[1], rel=1e-6)


class LooksAtTheLoop(LogsItsMetric):
    """Notes what the loop has between steps."""

    def on_train_batch_end(self, *_):
        own = self.trainer.strategy._loop
        self.kept += [*own._step_metrics._updated, own._call_results]


@pytest.mark.filterwarnings("ignore")
def test_copies_of_metrics_end_with_the_step():
    """They stayed on all devices while the optimizer stepped."""
    module = made(partial(LooksAtTheLoop, Means, calls))
    module.kept = []
    data = TensorDataset(randn(24, IN), torch.arange(24) % OUT)
    own = trainer(ScatterOnceStrategy(["cpu"] * 2, 2), logger=False, max_epochs=1)
    own.fit(module, DataLoader(data, 12))
    assert module.kept == [None] * 2


def test_states_of_copies_have_no_graphs():
    metric = MeanMetric()
    metric(torch.ones(3, requires_grad=True) * 2)
    lightning_metrics._detach(metric)
    kept = [metric.mean_value, metric.weight, metric._forward_cache]
    assert not any(tensor.requires_grad for tensor in kept)


def test_logged_number_is_made_on_the_host():
    """Each call waited for its device to copy it there."""
    got = []
    lightning_loop._logged_tensor(lambda value, name: got.append(value), 2, "two")
    assert got == [torch.tensor(2.0)]


class Evaluates(Callback):
    """Evaluates the module in the middle of its training, by another Trainer."""

    def __init__(self, verb, hook, strategy):
        self.verb = verb
        self.strategy = strategy
        self.results = []
        setattr(self, hook, self.evaluate)

    def evaluate(self, _, module, *__):
        other = trainer(self.strategy and self.strategy(), logger=False)
        function = getattr(other, self.verb)
        self.results += function(
            module, DataLoader(TensorDataset(randn(7, FEATURES)), 4)
        )


class IsEvaluated(Plain):
    def __init__(self):
        super().__init__()
        self.double()

    def validation_step(self, batch, batch_idx):
        self.log("value", self.net(batch[0]).sum())

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])


EVALUATIONS = [
    ("validate", "on_train_epoch_end"),
    ("test", "on_train_batch_end"),
    ("predict", "on_train_epoch_start"),
]


@pytest.mark.parametrize(("verb", "hook"), EVALUATIONS)
def test_another_trainer_evaluates_during_training(verb, hook):
    """Its Trainer was the module's afterwards, which the strategy asked."""
    results = []
    modules = []
    for strategy in (partial(ScatterOnceStrategy, ["cpu:0", "cpu:1"]), None):
        callback = Evaluates(verb, hook, strategy)
        module = made(IsEvaluated)
        options = {"max_epochs": 2, "logger": False, "limit_train_batches": 2}
        own = strategy and strategy()
        trainer(own, callbacks=[callback], **options).fit(module, loader())
        modules.append(module)
        results.append(callback.results)
    torch.testing.assert_close(*results)
    assert_same(*modules)


class WritesNumbers(Plain):
    """Writes numbers in several places, and what is no number of calls."""

    def __init__(self):
        super().__init__()
        self.double()
        self.steps = 0
        self.average = {"first": 0.0}
        self.losses = []
        self.place = {"epoch": 0}
        self.save_hyperparameters({"beta": 1.0})

    def training_step(self, batch, batch_idx):
        self.steps += 1
        self.average = {"first": 0.9 * self.average["first"] + 0.1}
        self.losses.append(1.0)
        self.place = {"epoch": self.current_epoch}
        self.hparams.beta *= 0.9
        self.trainer.callbacks[0].calls += 1
        return super().training_step(batch, batch_idx)


class CountsCalls(Callback):
    calls = 0

    def __init__(self):
        self.calls = 0


@pytest.mark.parametrize(
    ("layout", "options", "is_told"),
    [
        (["cpu:0", "cpu:1"], {}, True),
        pytest.param(["cpu"], {"accum": 3}, True, marks=pytest.mark.slow),
        (["cpu"], {}, False),  # one call per batch
    ],
)
def test_numbers_that_calls_write_are_told(layout, options, is_told, recwarn):
    """They are written once per micro-batch, not once per batch."""
    strategy = ScatterOnceStrategy(layout, **options)
    fitted(strategy, made(WritesNumbers), callbacks=[CountsCalls()])
    texts = [str(w.message) for w in recwarn if "in each call" in str(w.message)]
    assert len(texts) == is_told
    for text in texts:
        names = "self.steps, self.average, self._hparams['beta'], calls"
        assert {*text.partition("writes ")[2].partition(" in each")[0].split(", ")} == {
            *names.split(", ")
        }
        assert "self.global_step counts steps" in text


@dataclasses.dataclass
class Documents:
    scores: torch.Tensor
    labels: torch.Tensor
    texts: list


class OfDataclass(Plain):
    def training_step(self, batch, batch_idx):
        assert isinstance(batch, Documents)
        assert len(batch.texts) == len(batch.labels)
        return super().training_step((batch.scores, batch.labels), batch_idx)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dataclass_as_a_batch(layout):
    """Its lists of texts are rows."""

    def collated(rows):
        scores, labels = default_collate(rows)
        return Documents(scores, labels, [f"row {int(label)}" for label in labels])

    modules = []
    for strategy in (ScatterOnceStrategy(layout, 2), None):
        module = made(OfDataclass).double()
        trainer(strategy).fit(
            module, DataLoader(loader().dataset, 12, False, collate_fn=collated)
        )
        modules.append(module)
    assert_same(*modules)


class Keeps(Plain):
    """What it writes into itself changes in each step."""

    def __init__(self):
        super().__init__()
        self.double()
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.losses.append(float(loss.detach()))
        self.last = loss.detach()
        return loss


def test_writes_make_no_new_replicas():
    """Each step made them again, for attributes that replicas do not need."""
    strategy, module, builds = ScatterOnceStrategy(["cpu:0", "cpu:1"]), made(Keeps), []
    replicas = lambda: strategy._loop.engine._replicas.of_model  # noqa: E731
    module.on_train_end = lambda: builds.append(replicas().builds)
    trainer(strategy).fit(module, loader())
    assert len(module.losses) == 16
    assert builds == [1]


class LogsSizes(Plain):
    """Logs means over other terms than rows, and over batches of a constant size."""

    def training_step(self, batch, batch_idx):
        images, labels = batch
        scores = self.net(images)
        epoch = {"on_step": False, "on_epoch": True}
        for kind in range(CLASSES):
            rows = labels == kind
            if rows.any():
                loss = functional.cross_entropy(scores[rows], labels[rows])
                self.log(f"of_{kind}", loss, batch_size=int(rows.sum()), **epoch)
        self.log("of_all", scores.mean(), batch_size=scores.numel(), **epoch)
        self.log("equal", scores.mean(), batch_size=1, **epoch)
        self.log("constant", scores.mean(), batch_size=12, **epoch)
        return functional.cross_entropy(scores, labels)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logs_weighted_by_batch_size(layout):
    """Equal numbers of terms in all micro-batches were taken for the batch's."""
    ours = made(LogsSizes).double()
    _, own = fitted(ScatterOnceStrategy(layout, 2), ours)
    _, one = fitted(None, made(LogsSizes).double())
    for name, value in one.callback_metrics.items():
        torch.testing.assert_close(
            own.callback_metrics[name], value, rtol=1e-6, atol=1e-6, msg=name
        )


class LogsNumbers(Plain):
    """Logs how many rows are right, as if that were a mean."""

    def training_step(self, batch, batch_idx):
        images, labels = batch
        scores = self.net(images)
        self.log("right", (scores.argmax(1) == labels).sum().double(), on_epoch=True)
        return functional.cross_entropy(scores, labels)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logged_number_of_rows_is_told_once(layout, recwarn):
    """It was told inside a look, whose warnings are not shown."""
    fitted(ScatterOnceStrategy(layout), made(LogsNumbers).double())
    texts = [str(warning.message) for warning in recwarn]
    assert sum("it is no mean over rows" in text for text in texts) == 1
    assert any("training_step logs 'right'" in text for text in texts)


class OfTwoLoaders(Classifier):
    def training_step(self, batch, batch_idx):
        first, second = batch["one"], batch["two"]
        loss = functional.cross_entropy(self(first[0]), first[1])
        return loss + self(second[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))


def whole(rows):
    return Replicated(default_collate(rows))


def of_two_loaders(strategy, sizes, collate=None, validates=False):
    """The module, trained or validated on two loaders side by side."""
    loaders = {}
    for name, size in zip(["one", "two"], sizes, strict=True):
        loaders[name] = DataLoader(loader(1).dataset, size, drop_last=True)
    loaders["two"].collate_fn = collate or default_collate
    module, own = made(OfTwoLoaders), trainer(strategy, max_epochs=1)
    if validates:
        both = CombinedLoader(loaders, "max_size_cycle")
        return own.validate(module, both, verbose=False)
    own.fit(module, loaders)
    return module


class CompiledPart(Plain):
    """A part of the module is compiled, as ``torch.compile`` returns it."""

    def __init__(self):
        super().__init__()
        self.net = torch.compile(self.net, backend="eager")
        self.weights = set()  # by their memory

    def validation_step(self, batch, batch_idx):
        self.weights.add(self.net._orig_mod.weight.data_ptr())


def test_compiled_part_is_lent_in_an_evaluation():
    """The second device computed with the tensors of the first one."""
    module = made(CompiledPart)
    ours = trainer(ScatterOnceStrategy(["cpu:0", "cpu:1"]))
    ours.validate(module.double(), loader(), verbose=False)
    assert len(module.weights) == 2


def test_combined_loaders_need_one_size():
    ours = ScatterOnceStrategy(["cpu:0", "cpu:1"], 2)
    with pytest.raises(ValueError, match=r"inputs with 12 .*, inputs with 7 "):
        of_two_loaders(ours, (12, 7))


@pytest.mark.parametrize(("sizes", "collate"), [((12, 12), None), ((5, 12), whole)])
def test_combined_loaders_remedies(sizes, collate):
    ours = ScatterOnceStrategy(["cpu:0", "cpu:1"], 2)
    assert_same(of_two_loaders(ours, sizes, collate), of_two_loaders(None, sizes))


def test_combined_loaders_of_a_validation():
    ours = ScatterOnceStrategy(["cpu:0", "cpu:1"], 2)
    (values,) = of_two_loaders(ours, (12, 7), validates=True)
    (expected,) = of_two_loaders(None, (12, 7), validates=True)
    assert values == pytest.approx(expected, rel=1e-6)


class OfTwoDictionaries(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        one, two = batch.values() if isinstance(batch, dict) else batch
        return self.net(one["x"]).square().mean() + self.net(two["x"]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def of_two_dictionaries(strategy, *, in_a_list):
    """Two loaders of dictionaries, whose last batch has two rows."""
    loaders = {}
    for number, name in enumerate(["one", "two"]):
        rows = [{"x": row} for row in randn(6, 4, seed=number)]
        loaders[name] = DataLoader(rows, 4)
    module = made(OfTwoDictionaries).double()
    own = trainer(strategy, max_epochs=1)
    own.fit(module, list(loaders.values()) if in_a_list else loaders)
    return module


@pytest.mark.slow
def test_loaders_in_a_dictionary_are_no_list_of_rows():
    """Two dictionaries beside two rows may be one for each row: the page's remedy."""
    ours = partial(ScatterOnceStrategy, ["cpu:0", "cpu:1"])
    with pytest.raises(ValueError, match="a list of 2 dicts beside 2 rows is neither"):
        of_two_dictionaries(ours(), in_a_list=True)
    mine = of_two_dictionaries(ours(), in_a_list=False)
    stock = of_two_dictionaries(None, in_a_list=True)
    torch.testing.assert_close(mine.net.weight, stock.net.weight, rtol=1e-9, atol=0)


class Profiles(Classifier):
    def training_step(self, batch, batch_idx):
        with self.trainer.profiler.profile("own"):
            return super().training_step(batch, batch_idx)


def test_step_actions_are_profiled():
    ours, own = fitted(
        ScatterOnceStrategy(["cpu:0", "cpu:1"], 2), made(Profiles), profiler="simple"
    )
    stock, one = fitted(None, made(Profiles), profiler="simple")
    assert_same(ours, stock)
    durations, expected = (each.profiler.recorded_durations for each in (own, one))
    # the looks' are dropped
    assert len(durations["own"]) == 4 * len(expected["own"])
    step = "run_training_batch"
    assert len(durations[step]) == len(expected[step])


class LogsItself(Plain):
    """Writes to loggers past ``self.log``, by three ways to them."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.logger.log_metrics({"module's": float(loss)})
        self.trainer.loggers[0].log_metrics({"list's": float(loss)})
        self.logger.experiment.add_scalar("experiment's", float(loss))
        return loss


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loggers_hear_nothing_of_a_look(layout):
    """They hear of each micro-batch of each step, and of no call of a look."""
    logger = mock.Mock(spec=Logger, experiment=mock.Mock())
    own = made(LogsItself).double()
    fitted(ScatterOnceStrategy(layout, 2), own, logger=logger)
    heard = [call.args for call in logger.log_metrics.call_args_list]
    names = [name for arguments in heard if arguments for name in arguments[0]]
    sizes = [12, 12, 12, 5]
    calls = 2 * sum(min(2 * len(layout), size) for size in sizes)  # of two epochs
    assert names.count("module's") == names.count("list's") == calls
    assert logger.experiment.add_scalar.call_count == calls


class ReadsBack(Plain):
    """Reads what it has logged: for a loss, and to keep it."""

    log_prefix = ""

    def __init__(self):
        super().__init__()
        self.double()
        self.error = MeanSquaredError()
        self.before = []
        self.after = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.before.append(self.read())
        self.log("loss", loss.detach(), on_epoch=True, prog_bar=True)
        self.log("scale", 1.5)
        self.log_dict({"rows": len(batch[0]), "least": -loss}, reduce_fx="sum")
        self.log("epoch", loss, on_step=False, on_epoch=True)
        self.error(batch[0][:, 0].contiguous(), batch[0][:, 1].contiguous())
        self.log("error", self.error)
        self.after.append(self.read())
        return loss * self.trainer.callback_metrics[f"{self.log_prefix}scale"]

    def read(self):
        own = self.trainer
        results = own.fit_loop._results
        sums = {name: results[name].value for name in results if "error" not in name}
        return [
            {name: float(value) for name, value in values.items()}
            for values in (
                own.callback_metrics,
                own.logged_metrics,
                own.progress_bar_metrics,
                sums,
            )
        ]


class LogsByItsOwn(ReadsBack):
    """With a ``log`` of the user's around Lightning's."""

    log_prefix = "train/"

    def log(self, name, value, **options):
        super().log(f"train/{name}", value.double() if name == "loss" else value)


class FindsNothing(ReadsBack):
    """Reads before anything is logged, which a look must not leave there."""

    def training_step(self, batch, batch_idx):
        is_first = "loss" not in self.trainer.callback_metrics
        loss = super().training_step(batch, batch_idx)
        return loss * 3 if is_first else loss


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "kind",
    [
        ReadsBack,
        pytest.param(LogsByItsOwn, marks=pytest.mark.slow),
        pytest.param(FindsNothing, marks=pytest.mark.slow),
    ],
)
def test_logged_values_are_read_as_under_accumulation(kind, layout):
    """Calls read values of earlier batches, in silence."""
    runs = []
    for strategy in (ScatterOnceStrategy(layout[:2], 1), None):
        own = trainer(strategy, accumulate_grad_batches=1 if strategy else 2)
        module = made(kind)
        own.fit(module, loader(8 if strategy else 4, 24))
        runs.append((module, own.callback_metrics))
    (ours, own), (stock, one) = runs
    assert_same(ours, stock)
    for mine, theirs in zip(ours.after, stock.after, strict=True):
        for values, expected in zip(mine, theirs, strict=True):
            assert values == pytest.approx(expected, rel=1e-6)
    # The first call of a batch finds the values of the batch before.
    for mine, theirs in zip(ours.before[1::2], stock.before[1::2], strict=True):
        assert mine[0] == pytest.approx(theirs[0], rel=1e-6)
    assert own.keys() == one.keys()
    if kind is not LogsByItsOwn:  # which logs no values of epochs
        assert float(own["epoch"]) == pytest.approx(float(one["epoch"]), rel=1e-6)


class Prints(Plain):
    def training_step(self, batch, batch_idx):
        self.print("module")
        self.trainer.print("trainer")
        bar = self.trainer.progress_bar_callback
        bar.print("bar")
        rank_zero_info("record")
        return super().training_step(batch, batch_idx)


def test_what_is_printed_is_not_that_of_looks(monkeypatch, capsys, caplog):
    """Each micro-batch prints once, as with accumulation."""
    written = mock.Mock()
    monkeypatch.setattr("tqdm.tqdm.write", written)
    # Which logger it is depends on who has imported Lightning first.
    logger = logging.getLogger("of_rank_zero")
    monkeypatch.setattr("lightning_utilities.core.rank_zero.log", logger)
    caplog.set_level(logging.INFO, logger.name)
    options = {"callbacks": [TQDMProgressBar()], "enable_progress_bar": True}
    own = trainer(ScatterOnceStrategy(["cpu:0", "cpu:1"]), **options)
    own.fit(made(Prints).double(), loader(8, 24))
    calls = 2 * 3 * 2  # of two epochs, with two replicas
    texts = [call.args[0] for call in written.call_args_list]
    assert texts.count("module") == texts.count("bar") == calls
    assert capsys.readouterr().out.count("trainer") == calls
    assert caplog.messages.count("record") == calls


class KeepsModules(Plain):
    """What is written leads to modules, which replicas need."""

    def __init__(self):
        super().__init__()
        self.double()
        self.parts = {"net": [self.net], "losses": []}
        self.called = partial(functional.linear, weight=self.net.weight)

    def training_step(self, batch, batch_idx):
        scores = self.parts["net"][0](batch[0]) + self.called(batch[0])
        self.parts["losses"].append(len(batch[0]))
        return functional.cross_entropy(scores, batch[1])


def test_containers_of_modules_are_kept():
    ours, _ = fitted(ScatterOnceStrategy(["cpu:0", "cpu:1"], 2), made(KeepsModules))
    stock, _ = fitted(None, made(KeepsModules))
    assert_same(ours, stock)
    assert ours.parts["net"] == [ours.net]
    assert sum(ours.parts["losses"]) == sum(stock.parts["losses"])


REFUSED_COUNTS = {
    "count_labels": (
        count_labels(),
        r"count\(batch\); pass count=lambda batch: batch\[1",
    ),
    "two arguments": (lambda inputs, targets: 1, "count takes .inputs, targets."),
    "a class": (dict, "count is the class dict"),
    "a number": (3, "count must be callable"),
}


@pytest.mark.parametrize("name", REFUSED_COUNTS)
def test_count_with_other_arguments_refused(name):
    count, words = REFUSED_COUNTS[name]
    with pytest.raises(TypeError, match=words):
        ScatterOnceStrategy(["cpu"] * 2, count=count)


def ignoring(self, batch, batch_idx):
    return functional.cross_entropy(self(batch[0]), batch[1].where(batch[1] > 0, -100))


def contrastive(self, batch, batch_idx):
    one = functional.normalize(self(batch[0]), dim=1)
    numbers = torch.arange(len(one), device=one.device)
    return functional.cross_entropy(one @ one.T, numbers)


def test_proposed_remedy_works():
    strategy = partial(ScatterOnceStrategy, ["cpu:0", "cpu:1"], 2)
    with pytest.raises(ValueError, match="In Lightning pass ") as refused:
        fitted(strategy(), made(with_own(training_step=ignoring)))
    text = str(refused.value)
    assert "ScatterOnceStrategy(…, count=lambda batch: …)" in text
    assert "count_labels" not in text
    ours, _ = fitted(
        strategy(count=lambda batch: (batch[1] > 0).sum()),
        made(with_own(training_step=ignoring)),
    )
    assert_same(ours, fitted(None, made(with_own(training_step=ignoring)))[0])
    # a loop of one's own, for a loss that compares rows
    with pytest.raises(
        ValueError, match=r"engine\.loss\(inputs, targets, criterion, wh"
    ):
        fitted(strategy(), made(with_own(training_step=contrastive)))
    module, stock = (made(with_own(training_step=contrastive)) for _ in range(2))
    rows = randn(12, FEATURES)
    with ScatterOnceParallel(module, 2, ["cpu:0", "cpu:1"]) as engine:
        engine.loss(rows, None, lambda out, _: ranked(out), whole_batch=True).backward()
    ranked(stock(rows)).backward()
    for mine, other in zip(module.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=SAME, atol=SAME)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_unverified_loss_is_that_of_accumulation(layout, recwarn):
    """A loss that compares rows, which a look would refuse, as the user has asked."""
    parts = 2 * len(layout)
    modules = []
    for strategy, num_batches in (
        (ScatterOnceStrategy(layout, 2, verify=False), 1),
        (None, parts),
    ):
        module = made(with_own(training_step=contrastive))
        options = {"accumulate_grad_batches": num_batches}
        options["limit_train_batches"] = 3 * num_batches
        trainer(strategy, **options).fit(module, loader(12 // num_batches))
        modules.append(module)
    assert_same(*modules)
    assert not [one for one in recwarn if "could not check" in str(one.message)]


def ranked(outputs):
    one = functional.normalize(outputs, dim=1)
    numbers = torch.arange(len(one), device=one.device)
    return functional.cross_entropy(one @ one.T, numbers)


def test_unchecked_loss_names_the_remedy():
    def nothing(self, batch, batch_idx):
        return 0 * Plain.training_step(self, batch, batch_idx)

    module = made(with_own(training_step=nothing))
    with pytest.warns(UserWarning, match="could not check") as told:
        fitted(ScatterOnceStrategy(["cpu"], 3), module, max_epochs=9)
    (text,) = [str(w.message) for w in told if "could not check" in str(w.message)]
    assert "In Lightning pass ScatterOnceStrategy(…, count=lambda batch: …)" in text
    assert "count_labels" not in text
    assert "engine.check" not in text
    assert "Nothing was changed" not in text


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 3])
def test_optimizer_gets_whole_batch_gradient(parts):
    """After the Trainer has divided by ``accumulate_grad_batches``, and clipped."""

    def step(module, batches):
        trainer = pl.Trainer(
            max_steps=1,
            accumulate_grad_batches=len(batches),
            accelerator="cpu",
            strategy=ScatterOnceStrategy(["cpu:0", "cpu:1"], 2),
            gradient_clip_val=1e-3,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(batches, batch_size=None))

    def loss(module, batch):
        images, labels = batch
        return functional.cross_entropy(module.net(images), labels)

    batch = randn(24, FEATURES), randint(CLASSES, 24)
    splitcheck(step, Plain(), batch, parts=parts, equal=True, loss=loss).assert_passed()


class Evaluated(Classifier):
    """Compares rows, logs ratios and metrics, and returns what has no rows."""

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch["x"], batch["y"]
        assert batch["text"] == [f"row {int(number)}" for number in batch["number"]]
        scores = self(x)
        near = functional.softmax(scores @ scores.T, 1).diagonal()
        self.log("contrast", near.log().mean(), on_step=True, on_epoch=True)
        right = scores.argmax(1) == y
        self.log("precision", right.sum() / y.gt(0).sum().clamp(min=1))
        self.log("rows", len(x), reduce_fx="sum")
        self.accuracy(scores, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.measures.update(scores, y)
        self.log_dict(self.measures)
        self.auroc.update(scores, y)
        self.log("auroc", self.auroc)
        array = scores.detach().cpu().numpy()
        return {
            "rows": len(x),
            "array": array,
            "texts": batch["text"],
            "scores": scores,
        }

    test_step = validation_step

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        scores = self(batch["x"])
        return (
            scores.cpu().numpy(),
            batch_idx,
            dataloader_idx,
            batch["text"],
            len(scores),
        )

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return {**batch, "x": batch["x"] * 2}

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {**batch, "x": batch["x"] + dataloader_idx}

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.ended.append((outputs, batch, batch_idx, dataloader_idx))

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end


def dict_loader(rows=ROWS, batch_size=8, kind=list):
    """Batches of a dict with texts; the last one has one row."""
    data = []
    for number, (x, y) in enumerate(loader(1, rows).dataset):
        data.append({"x": x, "y": y, "number": number, "text": f"row {number}"})
    return DataLoader(kind(data), batch_size)


class Streamed(torch.utils.data.IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(self.data)


LOADERS = {
    "one": dict_loader,
    "several": lambda: [dict_loader(), dict_loader(9, 3), dict_loader(3, 3)],
    "combined": lambda: CombinedLoader(
        [dict_loader(), dict_loader(9, 3)], "sequential"
    ),
    "iterable": lambda: [dict_loader(kind=Streamed), dict_loader(9, 4, Streamed)],
}


def evaluated(strategy, verb, loaders, **options):
    """What an evaluation returns, what hooks got, and the Trainer."""
    own, module = trainer(strategy, **options), made(Evaluated)
    silent = {} if verb == "predict" else {"verbose": False}
    with seeded(2):
        results = getattr(own, verb)(module, loaders(), **silent)
    return results, module.ended, own


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loaders", LOADERS)
@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_evaluation_equals_stock(verb, loaders, layout):
    """Batches were divided: numbers of rows, arrays and ratios were others."""
    strategy = ScatterOnceStrategy(layout, 2)
    ours, ended, own = evaluated(strategy, verb, LOADERS[loaders])
    stock, expected, one = evaluated(None, verb, LOADERS[loaders])
    near(ours, stock)
    near(ended, expected)
    if verb != "predict":
        assert_logged(own, one)


class Adapts(Plain):
    """A step that writes its module in a way that no version counts."""

    optimizer = None

    def __init__(self, kind):
        super().__init__()
        self.double()
        self.kind = kind
        self.register_buffer("offset", torch.zeros(CLASSES).double())
        self.norms = []

    def training_loss(self, batch):
        return functional.cross_entropy(self.net(batch[0]) + self.offset, batch[1])

    def validation_step(self, batch, batch_idx):
        getattr(self, self.kind)(batch, batch_idx)
        self.log("loss", self.training_loss(batch))

    def through_data(self, batch, batch_idx):
        self.net.weight.data.mul_(0.9)
        self.offset.data.add_(batch[0].mean())

    def with_new_data(self, batch, batch_idx):
        self.net.weight.data = self.net.weight.data * 0.9
        self.offset.data = self.offset.data + torch.arange(CLASSES)

    def with_flags(self, batch, batch_idx):
        self.net.bias.requires_grad_(batch_idx < 1)

    @torch.enable_grad()
    def with_gradients(self, batch, batch_idx):
        self.training_loss(batch).backward()
        self.norms.append(float(self.net.weight.grad.norm()))

    @torch.enable_grad()
    def with_optimizer(self, batch, batch_idx):
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD(self.net.parameters(), 0.5, momentum=0.9)
        self.optimizer.zero_grad()
        self.training_loss(batch).backward()
        self.optimizer.step()


ADAPTS = ("data", "new_data", "flags", "gradients", "optimizer")


@pytest.mark.parametrize("kind", ADAPTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_step_that_adapts_in_evaluation(kind, layout):
    """Test-time training, and the like: the next batch finds what this one left."""
    kind = f"through_{kind}" if kind == "data" else f"with_{kind}"
    results = []
    for strategy in (ScatterOnceStrategy(layout), None):
        module = made(partial(Adapts, kind))
        own = trainer(strategy, inference_mode=False)
        values = own.validate(module, loader(6), verbose=False)
        flags = [parameter.requires_grad for parameter in module.parameters()]
        gradients = [parameter.grad for parameter in module.parameters()]
        results.append([values, module.norms, flags, gradients])
        results[-1].append({**module.state_dict()})
    (ours, *written), (stock, *expected) = results
    near(ours, stock)
    torch.testing.assert_close(written, expected, check_device=False)


def test_evaluation_leaves_replicas_no_gradients():
    """They stayed in replicas, whose next step added to them."""
    results = []
    for strategy in (ScatterOnceStrategy(["cpu:0", "cpu:1"]), None):
        module = made(partial(Adapts, "with_gradients"))
        own = trainer(strategy, inference_mode=False, max_epochs=1)
        own.fit(module, loader(12, 24), loader(6))
        results.append(module.state_dict())
    torch.testing.assert_close(*results, check_device=False)


@pytest.mark.parametrize(
    "limits", [{"limit_val_batches": 3}, {"limit_val_batches": 0.4}]
)
def test_limited_evaluation_equals_stock(limits):
    strategy = ScatterOnceStrategy(["cpu:0", "cpu:1"])
    ours, ended, _ = evaluated(strategy, "validate", dict_loader, **limits)
    stock, expected, _ = evaluated(None, "validate", dict_loader, **limits)
    near(ours, stock)
    near(ended, expected)


def near(ours, stock):
    """Nested values are equal, numbers up to rounding of single precision."""
    assert type(ours) is type(stock)
    if isinstance(stock, dict):
        assert ours.keys() == stock.keys()
        ours, stock = list(ours.values()), list(stock.values())
    if isinstance(stock, (list, tuple)):
        assert len(ours) == len(stock)
        for one, other in zip(ours, stock, strict=True):
            near(one, other)
    elif isinstance(stock, (str, int)):
        assert ours == stock
    else:
        # Hooks get the batch of a device where it is.
        near_enough = {"rtol": 1e-6, "atol": 1e-6, "check_device": False}
        ours, stock = torch.as_tensor(ours), torch.as_tensor(stock)
        torch.testing.assert_close(ours, stock, **near_enough)


class LogsInHooks(Evaluated):
    """Its hooks log and measure between its steps."""

    def __init__(self):
        super().__init__()
        self.seen = MeanMetric()

    def log(self, name, value, **options):
        super().log(f"own/{name}", value, **options)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        outputs = super().validation_step(batch, batch_idx, dataloader_idx)
        self.log("number", float(batch_idx), on_step=True, on_epoch=True)
        self.log("flag", batch_idx > 1)
        self.log("one entry", outputs["scores"].amax()[None], prog_bar=True)
        self.log("twice", batch_idx)
        self.log("twice", batch_idx)
        return outputs

    def on_validation_batch_start(self, batch, batch_idx, dataloader_idx=0):
        self.log("start", float(batch_idx))

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.seen.update(outputs["rows"])
        for name in ("end", "rows"):
            self.log(f"{name} of {dataloader_idx}", float(outputs["rows"]))
        self.log("seen", self.seen)
        self.accuracy.update(outputs["scores"], batch["y"])

    def on_validation_epoch_end(self):
        self.log("accuracy of all", self.accuracy.compute())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loaders", LOADERS)
def test_hooks_log_between_batches_as_stock(loaders, layout):
    results = []
    for strategy in (ScatterOnceStrategy(layout), None):
        own = trainer(strategy)
        own.validate(made(LogsInHooks), LOADERS[loaders](), verbose=False)
        results.append(own.logged_metrics | own.callback_metrics)
    near(*results)


WRONG_LOGS = {
    "several": lambda self, scores: self.log("x", scores),
    "text": lambda self, scores: self.log("x", "text"),
    "unknown metric": lambda self, scores: self.log("x", MeanMetric()),
    "of a part": lambda self, scores: self.part.log("x", 1.0),
    "unknown option": lambda self, scores: self.log("x", 1.0, what=2),
}


class LogsWrongly(Plain):
    def __init__(self):
        super().__init__()
        self.part = Plain()

    def training_step(self, batch, batch_idx):
        WRONG_LOGS[self.wrong](self, self.net(batch[0]))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("wrong", WRONG_LOGS)
def test_what_cannot_be_logged_raises_as_stock(wrong):
    errors = []
    for strategy in (ScatterOnceStrategy(["cpu:0", "cpu:1"]), None):
        module = made(LogsWrongly)
        module.wrong = wrong
        with pytest.raises(Exception) as caught:  # noqa: PT011
            trainer(strategy).fit(module, loader())
        errors.append(caught)
    ours, stock = errors
    assert ours.type is stock.type
    assert str(ours.value)[:20] == str(stock.value)[:20]


class Events(Plain):
    """Notes hooks and steps, and a metric's value of the batches so far."""

    def __init__(self):
        super().__init__()
        self.double()
        self.error = MeanSquaredError()
        self.correlation = PearsonCorrCoef()
        self.scale = Soft()
        self.register_buffer("batches", torch.zeros(()))
        self.events = []

    def validation_step(self, batch, batch_idx):
        self.batches += 1
        self.scale.temperature = 1 + batch_idx
        scores = self.scale(self.net(batch[0]))[:, 0].contiguous()
        targets = batch[0][:, 0].contiguous()
        self.error.update(scores, targets)
        self.correlation.update(scores, targets)
        self.log("correlation", self.correlation)
        self.events.append(("step", batch_idx, float(self.error.compute())))
        if batch_idx == 2 and self.raises == "in step":
            raise LookupError("a bug")

    def on_validation_batch_start(self, batch, batch_idx):
        self.events.append(("start", batch_idx, float(self.batches)))

    def on_validation_batch_end(self, outputs, batch, batch_idx):
        self.events.append(("end", batch_idx, self.scale.temperature))
        if batch_idx == 1 and self.raises == "in hook":
            raise LookupError("a bug")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("raises", ["", "in step", "in hook"])
def test_events_in_the_order_of_batches(raises, layout):
    """Hooks, steps, buffers, attributes of parts and unmergeable metrics."""
    events = []
    for strategy in (ScatterOnceStrategy(layout), None):
        module, own = made(Events), trainer(strategy)
        module.raises = raises
        error = pytest.raises(LookupError, match="a bug") if raises else nullcontext()
        with error:
            own.validate(module, loader(), verbose=False)
        module.events.append(float(module.batches))
        module.events.append(float(own.callback_metrics.get("correlation", 0)))
        events.append(module.events)
    near(*events)


def test_loader_that_raises_is_not_read_ahead():
    """So batches before its error are evaluated."""

    class Failing(list):
        def __getitem__(self, number):
            if number == 29:
                raise LookupError("a row")
            return super().__getitem__(number)

    numbers = []
    for strategy in (ScatterOnceStrategy(["cpu:0", "cpu:1"]), None):
        module, own = made(Evaluated), trainer(strategy)
        with pytest.raises(LookupError, match="a row"):
            own.validate(module, dict_loader(batch_size=4, kind=Failing), verbose=False)
        numbers.append(len(module.ended))
    assert numbers == [7, 7]


class Fetches(Plain):
    def validation_step(self, dataloader_iter):
        (images, labels), _, _ = next(dataloader_iter)
        loss = functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss, batch_size=len(images))

    test_step = validation_step


@pytest.mark.parametrize("verb", ["validate", "test"])
def test_evaluation_by_an_iterator_as_stock(verb):
    results = []
    for strategy in (ScatterOnceStrategy(["cpu:0", "cpu:1"]), None):
        own, module = trainer(strategy), made(Fetches).double()
        results.append(getattr(own, verb)(module, loader(), verbose=False))
    near(*results)


class SkipsAndLogs(Plain):
    """Skips every other batch, and says so; a metric counts all rows."""

    def __init__(self):
        super().__init__()
        self.double()
        self.rows = MeanMetric()

    def training_step(self, batch, batch_idx):
        is_skipped = batch_idx % 2 == 1
        size = len(batch[1])
        self.log("skipped", float(is_skipped), on_epoch=True, batch_size=size)
        self.rows.update(batch[0][:, 0])
        self.log("rows", self.rows, on_epoch=True, on_step=False)
        return None if is_skipped else super().training_step(batch, batch_idx)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_skipped_batches_are_logged(layout):
    """What a step logs and measures before it returns None was dropped."""
    results = []
    for strategy in (ScatterOnceStrategy(layout, 2), None):
        module = made(SkipsAndLogs)
        own = trainer(strategy)
        own.fit(module, loader(12, 48))
        logged = {name: float(value) for name, value in own.callback_metrics.items()}
        results.append((module, logged))
    (ours, logged), (stock, expected) = results
    assert expected["skipped_epoch"] == 0.5
    assert logged == pytest.approx(expected, rel=1e-6)
    assert_same(ours, stock)


def terms_of(batch):
    return len(batch[1])


def test_trainer_is_saved_after_training(tmp_path):
    """Functions of the strategy could not be pickled."""
    module = made(Plain).double()
    strategy = ScatterOnceStrategy(["cpu"] * 2, count=terms_of)
    own = trainer(strategy, logger=False)
    own.fit(module, loader(12, 48))
    torch.save(own, tmp_path / "trainer.pt")
    loaded = torch.load(tmp_path / "trainer.pt", weights_only=False)
    assert loaded.global_step == own.global_step == 8
