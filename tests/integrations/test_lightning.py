"""Lightning's Trainer with ScatterOnceStrategy beside the stock Trainer on one device
with the same loader.
"""

from __future__ import annotations

import logging
from functools import partial
from unittest import mock

import pytest
import torch
from harness.optional import needed
from harness.oracle import randint, randn, seeded
from harness.own_modules import IN, OUT, PROGRAMS, assert_same_net, told_of
from harness.pairwise import few_of
from harness.writes import NETWORKS, WRITES, Written, assert_same_writes
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

pl = needed("lightning.pytorch", "'.[lightning]'")

from lightning.pytorch import callbacks  # noqa: E402
from lightning.pytorch.loggers.logger import Logger  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy  # noqa: E402
from lightning.pytorch.tuner import Tuner  # noqa: E402
from torchmetrics import AUROC, MeanMetric, MetricCollection  # noqa: E402
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score  # noqa: E402

from scatterpar.integrations.lightning import ScatterOnceStrategy  # noqa: E402

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
LAYOUTS = [pytest.param(["cpu:0", "cpu:1", "cpu:0"], id="apart"), SHARED]
ROWS, FEATURES, CLASSES = 41, 6, 3  # with batches of 12 the last one has 5 rows

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Plain(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)
        )
        self.double()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


class Classifier(Plain):
    """Logs, counts and measures in many ways."""

    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.measures = MetricCollection({"macro": MulticlassF1Score(CLASSES)})
        self.auroc = AUROC("multiclass", num_classes=CLASSES)
        self.means = nn.ModuleList([MeanMetric()])
        self.rows_seen = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        scores = self(x)
        loss = functional.cross_entropy(scores, y)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("largest", scores.amax(), reduce_fx="max")
        self.log_dict({"rows": float(len(x))}, reduce_fx="sum", on_epoch=True)
        self.accuracy(scores, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.measures.update(scores, y)
        self.log_dict(self.measures, on_step=False, on_epoch=True)
        self.means[0](scores[:, 0])
        self.log("mean", self.means[0], on_step=False, on_epoch=True)
        self.rows_seen.append(x[:, 0].tolist())
        return {"loss": loss, "scores": scores.detach()}

    def validation_step(self, batch, batch_idx):
        x, y = batch
        scores = self(x)
        self.auroc.update(scores, y)
        self.log("val_auroc", self.auroc)
        self.log("val_loss", functional.cross_entropy(scores, y))

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]


class Skips(Classifier):
    """No loss for the batches with odd numbers."""

    def training_step(self, batch, batch_idx):
        if batch_idx % 2:
            return None
        return super().training_step(batch, batch_idx)


class Parts(Plain):
    """Calls parts of its network, and elements of containers."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleDict({"a": nn.Linear(8, CLASSES).double()})
        self.scale = nn.Parameter(torch.ones(()).double())

    def forward(self, x):
        first, activation, last = self.net
        hidden = activation(first(x))
        return self.scale * last(hidden) + self.heads["a"](hidden)


class Contrastive(Plain):
    """A loss over all rows of the batch, with a penalty."""

    def training_step(self, batch, batch_idx):
        first, second = self(batch[0]), self(batch[0] + 0.1)
        scores = first @ second.T
        loss = functional.cross_entropy(scores, torch.arange(len(scores)))
        return loss + 0.1 * self.net[0].weight.square().sum()


class Checkpointed(Plain):
    """Its network is called again in the backward pass."""

    def forward(self, x):
        return checkpoint(self.net, x, use_reentrant=False)


class Ratio(Plain):
    """A loss that is no mean over rows."""

    def training_step(self, batch, batch_idx):
        kept = batch[1] > 0
        return functional.cross_entropy(self(batch[0])[kept], batch[1][kept])


class TwoLosses(pl.LightningModule):
    """WGAN-GP: two optimizers, a double backward pass, clipping, in manual
    optimization.
    """

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.maker = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, FEATURES))
        self.judge = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))
        self.double()

    def training_step(self, batch, batch_idx):
        real = batch[0]
        for_maker, for_judge = self.optimizers()
        noise = torch.randn(len(real), 4, dtype=real.dtype)

        self.toggle_optimizer(for_judge)
        fake = self.maker(noise).detach()
        share = torch.rand(len(real), 1, dtype=real.dtype)
        between = (share * real + (1 - share) * fake).requires_grad_()
        (slopes,) = torch.autograd.grad(
            self.judge(between).sum(), between, create_graph=True
        )
        penalty = (slopes.norm(dim=1) - 1).square().mean()
        loss = self.judge(fake).mean() - self.judge(real).mean() + 10 * penalty
        self.log_dict({"judge": loss, "penalty": penalty})
        for_judge.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(for_judge, 0.5, "norm")
        for_judge.step()
        self.untoggle_optimizer(for_judge)

        self.toggle_optimizer(for_maker)
        loss = -self.judge(self.maker(noise)).mean()
        self.log("maker", loss)
        for_maker.zero_grad()
        self.manual_backward(loss)
        for_maker.step()
        self.untoggle_optimizer(for_maker)

    def configure_optimizers(self):
        return [
            torch.optim.Adam(self.maker.parameters(), 0.01, betas=(0.5, 0.9)),
            torch.optim.Adam(self.judge.parameters(), 0.01, betas=(0.5, 0.9)),
        ]


class ManualAccumulation(Plain):
    """Two backward passes per step of the optimizer."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx) / 2)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


def loader(rows=ROWS, size=12):
    data = TensorDataset(randn(rows, FEATURES), randint(CLASSES, rows))
    return DataLoader(data, size)


def made(kind=Classifier):
    with seeded():
        return kind()


def trainer(strategy=None, **options):
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    if strategy is not None:
        defaults["strategy"] = strategy
    return pl.Trainer(**defaults | options)


def fitted(devices, kind=Classifier, rows=None, **options):
    """The Trainer and the module after ``fit`` on these devices; ``None``: stock."""
    strategy = None if devices is None else ScatterOnceStrategy(devices)
    module = made(kind)
    make = options.pop("callback", None)
    if make is not None:
        options["callbacks"] = [make()]
    own = trainer(strategy, **options)
    validation = loader(9, 4) if module.__class__ is Classifier else None
    with seeded(3):
        own.fit(module, rows or loader(), validation)
    return own, module


def assert_same(ours, stock, tolerance=SAME):
    pairs = zip(ours.state_dict().items(), stock.state_dict().values(), strict=True)
    for (name, value), expected in pairs:
        torch.testing.assert_close(
            value, expected, rtol=tolerance, atol=tolerance, msg=name
        )


def assert_logged(ours, stock, tolerance=1e-6):
    actual = {name: float(value) for name, value in ours.callback_metrics.items()}
    expected = {name: float(value) for name, value in stock.callback_metrics.items()}
    assert actual == pytest.approx(expected, rel=tolerance, abs=tolerance)


class RowByRow(Plain):
    """Calls its network for the first row of a batch, without a dimension of rows."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + self(batch[0][0]).sum()


RUNS = {
    "plain": {},
    "skipped batches": {"kind": Skips},
    "accumulation": {"accumulate_grad_batches": 3},
    "clipping": {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2},
    "limits": {"limit_train_batches": 2, "overfit_batches": 2},
    "stochastic averages": {
        "callback": partial(
            callbacks.StochasticWeightAveraging, 0.01, swa_epoch_start=1
        )
    },
    "parts": {"kind": Parts},
    "contrastive": {"kind": Contrastive, "accumulate_grad_batches": 2},
    "checkpoint around a call": {"kind": Checkpointed},
    "ratio": {"kind": Ratio},
    "two losses": {"kind": TwoLosses},
    "manual accumulation": {"kind": ManualAccumulation},
}
if hasattr(callbacks, "EMAWeightAveraging"):  # since Lightning 2.6
    RUNS["averages"] = {"callback": partial(callbacks.EMAWeightAveraging, decay=0.5)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", RUNS)
def test_run_equals_one_device(name, layout, warned, divided_calls):
    own, ours = fitted(layout, **RUNS[name])
    assert divided_calls
    stock, plain = fitted(None, **RUNS[name])
    assert own.world_size == 1
    assert_same(ours, plain)
    assert_logged(own, stock)
    assert getattr(ours, "rows_seen", 0) == getattr(plain, "rows_seen", 0)
    assert not warned


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_evaluation_equals_stock(verb, layout, divided_calls):
    results = []
    for devices in (layout, None):
        strategy = None if devices is None else ScatterOnceStrategy(devices)
        own = trainer(strategy)
        how = {} if verb == "predict" else {"verbose": False}
        results.append(getattr(own, verb)(made(), loader(), **how))
    assert len(divided_calls) == 4  # once per batch
    ours, stock = results
    if verb != "predict":
        assert ours[0] == pytest.approx(stock[0], rel=1e-6)
        return
    for value, expected in zip(ours, stock, strict=True):
        torch.testing.assert_close(value, expected)


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
    *("a centre in place", "batch normalisation", "a module on first use"),
    *("attributes of parts", "a hook that fills a dict", "frozen in the fifth call"),
    *("an attribute under a checkpoint", "a teacher in place"),
    *("a hook on first use", "parts and parameters as keys"),
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("layout", [["cpu:0", "cpu:1"], SHARED])
@pytest.mark.parametrize("name", few_of(PROGRAMS, QUICK_PROGRAMS))
def test_own_modules_equal_the_stock_loop(name, layout, recwarn):
    program = PROGRAMS[name]
    data = TensorDataset(randn(72, IN), torch.arange(72) % OUT)
    modules = []
    for devices in (layout, None):
        options = {"max_epochs": 1, "accumulate_grad_batches": 2}
        rows = DataLoader(data, 9)
        _, module = fitted(devices, partial(OfProgram, program), rows, **options)
        modules.append(module)
    if told_of(recwarn):
        return
    ours, stock = modules
    values = [program.read(module, module.net) for module in modules]
    assert_same_net(ours.net, stock.net, *values)


class Writes(Plain):
    """Its steps write in every way."""

    def __init__(self):
        super().__init__()
        self.written = Written(WRITES | NETWORKS)

    def write(self, loss, batch):
        self.written.write(float(loss.detach()), float(batch[0][0, 0]))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.write(loss, batch)
        return loss

    validation_step = training_step


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("layout", [["cpu:0", "cpu:1"], SHARED])
@pytest.mark.parametrize("verb", ["fit", "validate"])
def test_what_step_functions_write_is_as_stock(verb, layout):
    values = []
    for devices in (layout, None):
        strategy = None if devices is None else ScatterOnceStrategy(devices)
        own, module = trainer(strategy), made(Writes)
        with seeded(3):
            getattr(own, verb)(module, loader())
        values.append(module.written.values())
    assert_same_writes(*values)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_row_without_a_dimension_of_rows(layout, recwarn):
    _, ours = fitted(layout, RowByRow, accumulate_grad_batches=2)
    _, plain = fitted(None, RowByRow, accumulate_grad_batches=2)
    assert_same(ours, plain)
    words = "Sequential is computed on the first device alone"
    assert len([one for one in recwarn if words in str(one.message)]) == 1


def test_networks_of_metrics_are_not_divided(divided_calls):
    """A metric's calls write its state, of which each replica would have a part."""

    class Measure(MeanMetric):
        def __init__(self):
            super().__init__()
            self.scorer = nn.Linear(FEATURES, 1).double().requires_grad_(False)

        def update(self, rows):
            super().update(self.scorer(rows))

    class Measures(Plain):
        def __init__(self):
            super().__init__()
            self.measure = Measure()

        def training_step(self, batch, batch_idx):
            self.log("measure", self.measure(batch[0]), on_epoch=True)
            return super().training_step(batch, batch_idx)

    own, ours = fitted(["cpu:0", "cpu:1"], Measures)
    stock, _ = fitted(None, Measures)
    assert set(divided_calls) == {ours.net}
    assert_logged(own, stock)


def test_step_after_the_training_runs_on_one_device():
    own, trained = fitted(["cpu:0", "cpu:1"], Plain)
    batch = next(iter(loader()))
    loss = own.strategy.training_step(batch, 0)
    torch.testing.assert_close(loss, trained.training_step(batch, 0))


def test_modules_are_as_before_after_the_training():
    _, module = fitted(["cpu:0", "cpu:1"], Plain)
    for part in module.modules():
        assert "_compiled_call_impl" not in vars(part)


def test_trainer_devices_become_replicas():
    strategy = ScatterOnceStrategy()
    with mock.patch.object(pl.accelerators.CPUAccelerator, "parse_devices", int):
        own = trainer(strategy, devices=2, max_epochs=1)
    assert own.world_size == 1
    assert len(strategy._resolved_devices()) == 2


@pytest.mark.parametrize("ours_first", [True, False])
def test_checkpoint_resumes_with_the_other(ours_first, tmp_path):
    layouts = (["cpu:0", "cpu:1"], None)
    first, second = layouts if ours_first else layouts[::-1]
    own, _ = fitted(first, max_epochs=1)
    own.save_checkpoint(tmp_path / "it.ckpt")
    strategy = None if second is None else ScatterOnceStrategy(second)
    module = made()
    trainer(strategy).fit(
        module, loader(), loader(9, 4), ckpt_path=tmp_path / "it.ckpt"
    )
    _, stock = fitted(None)
    assert_same(module, stock)


class Single(Plain):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0].float(), batch[1]


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_as_stock(precision):
    scales = []

    def run(devices):
        half = precision == "16-mixed"
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40) if half else None
        plugin = MixedPrecision(precision, "cpu", scaler)
        options = {"plugins": [plugin], "gradient_clip_val": 0.5}
        _, module = fitted(devices, lambda: Single().float(), **options)
        scales.append(scaler and scaler.get_scale())
        return module

    assert_same(run(["cpu:0", "cpu:1"]), run(None), 3e-2)
    assert scales[0] == scales[1]  # the first steps overflow in float16, in both


def test_learning_rate_finder_as_stock():
    results = []
    for devices in (["cpu"] * 2, None):
        strategy = None if devices is None else ScatterOnceStrategy(devices)
        own, module = trainer(strategy), made(Plain)
        module.lr = 0.1
        found = Tuner(own).lr_find(
            module, loader(), num_training=12, early_stop_threshold=None
        )
        results.append(found.results["loss"])
    assert results[0] == pytest.approx(results[1], rel=1e-5)


@pytest.mark.parametrize("whole", [True, False])
def test_compiled_modules_train_as_stock(whole, divided_calls):
    """``torch.compile`` of the LightningModule, or of its network."""
    module = made(Plain)
    if whole:
        compiled = torch.compile(module, backend="eager")
    else:
        module.net = torch.compile(module.net, backend="eager")
        compiled = module
    own = trainer(ScatterOnceStrategy(["cpu"] * 2), max_epochs=1)
    own.fit(compiled, loader())
    assert divided_calls
    _, stock = fitted(None, Plain, max_epochs=1)
    for value, expected in zip(module.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(value, expected, rtol=SAME, atol=SAME)


def test_error_reaches_the_user():
    class Fails(Plain):
        def training_step(self, batch, batch_idx):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fitted(["cpu:0", "cpu:1"], Fails)


class FailsOnce(torch.autograd.Function):
    """The identity, whose backward pass raises in its third call."""

    num_calls = 0

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        FailsOnce.num_calls += 1
        if FailsOnce.num_calls == 3:
            raise RuntimeError("mine")
        return grad


class LossFails(Plain):
    def training_step(self, batch, batch_idx):
        return FailsOnce.apply(super().training_step(batch, batch_idx))

    def on_train_start(self):
        FailsOnce.num_calls = 0


class SkipsFailed:
    """Drops the gradients of an optimizer step whose backward pass raised."""

    num_skipped = 0

    def backward(self, closure_loss, *args, **kwargs):
        try:
            return super().backward(closure_loss, *args, **kwargs)
        except RuntimeError:
            self.num_skipped += 1
            self.lightning_module.zero_grad()
            return closure_loss


@pytest.mark.parametrize("accumulated", [1, 2])
def test_training_goes_on_after_failed_backward(accumulated, recwarn):
    """Also if the failed pass was one of those that keep gradients on the devices."""

    class Ours(SkipsFailed, ScatterOnceStrategy):
        pass

    class Stock(SkipsFailed, SingleDeviceStrategy):
        pass

    modules = []
    for strategy in (Ours(["cpu:0", "cpu:1"]), Stock("cpu")):
        own = trainer(strategy, accumulate_grad_batches=accumulated)
        modules.append(made(LossFails))
        own.fit(modules[-1], loader())
        assert strategy.num_skipped == 1
    assert_same(*modules)
    assert not [w for w in recwarn if "gradients wait" in str(w.message)]


def test_modules_are_as_before_after_failed_backward():
    modules = []

    class Recorded(LossFails):
        def on_train_start(self):
            super().on_train_start()
            modules.extend(self.modules())

    with pytest.raises(RuntimeError, match="mine"):
        fitted(["cpu:0", "cpu:1"], Recorded, accumulate_grad_batches=2)
    for part in modules:
        assert "_compiled_call_impl" not in vars(part)


def test_backward_pass_is_lightning_s():
    """What wraps Lightning's own method sees each backward pass."""
    strategy = ScatterOnceStrategy(["cpu:0", "cpu:1"])
    module = made(Plain)
    wrapped = strategy.backward
    with mock.patch.object(Strategy, "backward", wraps=wrapped) as backward:
        trainer(strategy, max_epochs=1).fit(module, loader())
    assert backward.call_count == len(loader())
    _, stock = fitted(None, Plain, max_epochs=1)
    assert_same(module, stock)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"sync_batchnorm": True}, "sync_batchnorm"), ({"num_nodes": 2}, "num_nodes")],
)
def test_options_refused_by_name(options, words):
    with pytest.raises(ValueError, match=words):
        fitted(["cpu:0", "cpu:1"], Plain, **options)


class Kept(Logger):
    """Keeps what it is given."""

    name = version = None

    def __init__(self):
        super().__init__()
        self.metrics = []

    def log_metrics(self, metrics, step=None):
        self.metrics.append((step, metrics))

    def log_hyperparams(self, *args, **kwargs):
        """Nothing is kept of these."""


def test_loggers_get_each_value_once():
    kept = []
    for devices in (["cpu:0", "cpu:1"], None):
        logger = Kept()
        fitted(devices, logger=logger, log_every_n_steps=1)
        kept.append(logger.metrics)
    for (step, metrics), (other, expected) in zip(*kept, strict=True):
        assert step == other
        assert metrics == pytest.approx(expected, rel=1e-6)


def test_parameters_and_gradients_cross_once_per_step(recwarn):
    """Three batches of a step send no parameters but in the first, and add no gradients
    but in the last, in the closure of the optimizer's step.
    """
    sent, received = [], []

    class Counts(Plain):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            num_bytes = self.trainer.strategy._divided.engine.last_step.bytes
            sent.append(num_bytes["replicate"])
            received.append(num_bytes["reduce"])

    fitted(["cpu:0", "cpu:1"], Counts, accumulate_grad_batches=3, max_epochs=2)
    size = sum(p.numel() * 8 for p in made(Counts).parameters())
    assert sent == [size, 0, 0, size, size, 0, 0, size]
    assert received == [0, 0, size, size, 0, 0, size, size]
    assert not [w for w in recwarn if "gradients wait" in str(w.message)]
