"""fastai's Learner with ScatterOnce beside the stock Learner on one device."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from harness.optional import needed
from harness.oracle import randint, randn, seeded
from harness.pages import blocks, read
from torch import nn

needed("fastai.basics", "'.[fastai]'")

from fastai.callback.core import Callback  # noqa: E402
from fastai.callback.fp16 import MixedPrecision  # noqa: E402
from fastai.callback.mixup import CutMix, MixUp  # noqa: E402
from fastai.callback.rnn import RNNCallback  # noqa: E402
from fastai.callback.schedule import *  # noqa: E402, F403  patches Learner
from fastai.callback.tracker import SaveModelCallback  # noqa: E402
from fastai.callback.training import GradientAccumulation, GradientClip  # noqa: E402
from fastai.data.core import DataLoaders  # noqa: E402
from fastai.data.load import DataLoader  # noqa: E402
from fastai.learner import AvgSmoothLoss, Learner, load_learner  # noqa: E402
from fastai.losses import (  # noqa: E402
    CrossEntropyLossFlat,
    LabelSmoothingCrossEntropyFlat,
)
from fastai.metrics import LossMetrics, accuracy  # noqa: E402
from fastai.optimizer import SGD  # noqa: E402
from fastai.torch_core import params  # noqa: E402

from scatterpar import splitcheck  # noqa: E402
from scatterpar.integrations.fastai import ScatterOnce  # noqa: E402

pytestmark = [pytest.mark.loops, pytest.mark.draws]

SAME = 1e-9
ROWS, CLASSES = 41, 3  # with batches of 12 the last one has 5 rows

NEW = partial(ScatterOnce, ["cpu:0", "cpu:1"], accum=2)


class Smooth(AvgSmoothLoss):
    """fastai's own begins with a number in single precision, which it does not mix with
    others.
    """

    def reset(self):
        self.count, self.val = 0, torch.zeros((), dtype=torch.float64)

    def accumulate(self, learn):
        self.count += 1
        self.val = torch.lerp(learn.loss.detach().double(), self.val, self.beta)


def learner(
    folder, *callbacks, loss_func=None, targets=None, dtype=torch.float64, **options
):
    """A small classifier of images of 4 x 4, with its data."""
    images = randn(ROWS, 1, 4, 4).to(dtype)
    targets = randint(CLASSES, ROWS) if targets is None else targets
    rows = [(images[i], targets[i]) for i in range(ROWS)]
    loaders = [DataLoader(rows, bs=12, drop_last=False), DataLoader(rows, bs=9)]
    with seeded(3):
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, CLASSES)
        )
    options = {"cbs": list(callbacks), "path": folder, **options}
    options |= {"metrics": accuracy if targets.ndim == 1 else None}
    loss = loss_func or nn.CrossEntropyLoss()
    learn = Learner(
        DataLoaders(*loaders, device="cpu"), model.to(dtype), loss, **options
    )
    learn.recorder.smooth_loss = Smooth()
    return learn


def fitted(learn, how=None, epochs=2):
    with seeded(5), learn.no_bar(), learn.no_logging():
        (how or (lambda learn: learn.fit(epochs, 0.02)))(learn)
    return learn


def assert_same(ours, stock, tolerance=SAME):
    for one, other in zip(
        ours.model.parameters(), stock.model.parameters(), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    for one, other in zip(ours.recorder.values, stock.recorder.values, strict=True):
        assert [*one] == pytest.approx([*other], rel=max(tolerance, 1e-6), nan_ok=True)
    losses, expected = (torch.stack(learn.recorder.losses) for learn in (ours, stock))
    torch.testing.assert_close(losses, expected, rtol=tolerance, atol=tolerance)


WEIGHTS = torch.tensor([1.0, 2.0, 5.0])
SINGLE = {"dtype": torch.float32, "opt_func": SGD, "tolerance": 1e-5}
SIGMOID = {
    "loss_func": nn.BCEWithLogitsLoss(),
    "targets": randn(ROWS, CLASSES).sigmoid(),
}
IGNORED = randint(CLASSES, ROWS)
IGNORED[3:20:2] = -100


class Bfloat16(MixedPrecision):
    """fastai's own is for CUDA alone."""

    def before_fit(self):
        super().before_fit()
        self.autocast = torch.autocast("cpu", torch.bfloat16)


def split(model):
    return [params(model[:2]), params(model[2:])]


def thaw(learn):
    learn.freeze()
    learn.fit(1)
    learn.unfreeze()
    learn.fit(1, 0.1)


def halves(pred, target):
    rows = target > 0
    return nn.functional.cross_entropy(pred[rows], target[rows])


def total(pred, target):
    return nn.functional.cross_entropy(pred, target, reduction="sum")


RUNS = {
    "adam": {},
    "function": {"loss_func": nn.functional.cross_entropy, "opt_func": SGD},
    "weights": {"loss_func": nn.CrossEntropyLoss(WEIGHTS.double())},
    "clip": {"callbacks": [partial(GradientClip, 0.05)]},
    "accumulation": {"callbacks": [partial(GradientAccumulation, 24)]},
    "several labels": SIGMOID,
    "ignored labels": {"targets": IGNORED},
    "count": {
        "loss_func": halves,
        "own": {"count": lambda _, targets: (targets[0] > 0).sum()},
    },
    "a sum of torch's": {
        "loss_func": nn.CrossEntropyLoss(reduction="sum"),
        "opt_func": SGD,
    },
    "a sum": {"loss_func": total, "own": {"reduction": "sum"}},
    "discriminative rates": {
        "how": lambda learn: learn.fit_one_cycle(2, slice(1e-3, 1e-1)),
        "splitter": split,
    },
    "frozen": {"how": thaw, "splitter": split},
    "learning rate finder": {
        "how": lambda learn: learn.lr_find(num_it=12, show_plot=False)
    },
    "smoothing": SINGLE | {"loss_func": LabelSmoothingCrossEntropyFlat(eps=0.2)},
    "smoothing and weights": SINGLE
    | {"loss_func": nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.2)},
    "bfloat16": SINGLE | {"callbacks": [partial(Bfloat16, "bf16")], "tolerance": 3e-2},
    # fastai's losses are in single precision.
    **{
        f"fastai's {options}": SINGLE | {"loss_func": CrossEntropyLossFlat(**options)}
        for options in ({"weight": WEIGHTS}, {"ignore_index": 1})
    },
    **{
        mix.__name__: SINGLE
        | {"loss_func": CrossEntropyLossFlat(), "callbacks": [partial(mix, 0.4)]}
        for mix in (MixUp, CutMix)  # whose loss is computed with the whole batch
    },
}


@pytest.mark.parametrize("name", RUNS)
def test_run_equals_one_device(name, devices, tmp_path):
    options = dict(RUNS[name])
    more, own = options.pop("callbacks", []), options.pop("own", {})
    tolerance, how = options.pop("tolerance", SAME), options.pop("how", None)
    new = partial(ScatterOnce, devices(2), accum=2, **own)
    ours, stock = (
        fitted(learner(tmp_path, *(make() for make in [*place, *more]), **options), how)
        for place in ([new], [])
    )
    assert_same(ours, stock, tolerance)


def weighted_smoothing():
    """A mean over rows, and one over their weights: no number of terms fits both."""
    return LabelSmoothingCrossEntropyFlat(weight=WEIGHTS)


@pytest.mark.parametrize(
    ("loss_func", "options"),
    [(halves, {}), (weighted_smoothing(), {"dtype": torch.float32})],
)
def test_mean_over_other_terms_refused(tmp_path, loss_func, options):
    learn = learner(tmp_path, NEW(), loss_func=loss_func, **options)
    with pytest.raises(ValueError, match="count=") as refused:
        fitted(learn)
    text = str(refused.value)
    assert "In fastai pass ScatterOnce(…, count=lambda inputs, targets: …)" in text
    assert "on one device without this callback" in text
    assert "count_labels" not in text
    learn.remove_cb(ScatterOnce)
    fitted(learn)  # what the refusal proposes


def closing_over(weights):
    return lambda scores, y: nn.functional.cross_entropy(scores, y, weights)


def binding(weights):
    return partial(nn.functional.cross_entropy, weight=weights)


@pytest.mark.slow
@pytest.mark.parametrize("made", [closing_over, binding])
def test_weights_of_function_are_copied(tmp_path, made):
    """Each replica needs them on its device."""
    count = ScatterOnce(
        ["cpu:0", "cpu:1"], count=lambda _, y: WEIGHTS[y[0].cpu()].sum()
    )
    ours, stock = learner(tmp_path, count), learner(tmp_path)
    for learn in (ours, stock):
        learn.loss_func = made(WEIGHTS.double().to(learn.dls.device))
        fitted(learn)
    assert_same(ours, stock)


def test_count_with_other_arguments_refused():
    words = (
        r"calls count\(inputs, targets\); pass count=lambda inputs, targets: targets"
    )
    with pytest.raises(TypeError, match=words):
        ScatterOnce(["cpu"] * 2, count=lambda batch: 1)


class Meter:
    """An object of a loss, of which replicas have no copies."""

    def __init__(self):
        self.rows = 0


class Parts(nn.Module):
    """A loss that leaves its parts in attributes, as many of fastai's users have."""

    def __init__(self):
        super().__init__()
        self.ce = self.of_rows = None
        self.penalty, self.rows, self.labels = 0.0, 0, []
        self.by_kind = {"calls": 0}
        self.meter, self.table = Meter(), np.zeros(9)
        self.seen = torch.zeros(0)

    def forward(self, pred, y):
        for label in y.tolist():
            self.table[label] += 1
        self.seen = torch.cat([self.seen.to(y.device), y])
        self.meter.rows += len(y)
        self.ce = nn.functional.cross_entropy(pred, y)
        penalty = 0.1 * pred.square().mean()
        self.penalty = float(penalty)
        self.of_rows = pred.square().mean(1)
        self.rows += len(y)
        self.labels.extend(y.tolist())
        self.by_kind["calls"] += 1
        self.last = int(y[-1])
        return self.ce + penalty


class ReadsParts(Callback):
    def before_fit(self):
        self.seen, self.of_rows = [], []

    def after_loss(self):
        if self.training:
            loss_func = self.learn.loss_func
            self.seen += [float(loss_func.ce), loss_func.penalty]
            self.of_rows.append(torch.as_tensor(loss_func.of_rows).detach())


@pytest.mark.xfail(reason="until step functions take turns")
def test_kept_parts_of_loss_are_the_batchs(devices, tmp_path, recwarn):
    def run(*callbacks):
        reads, loss_func = ReadsParts(), Parts()
        learn = learner(tmp_path, reads, *callbacks, loss_func=loss_func, opt_func=SGD)
        learn.recorder.train_metrics = True
        learn.metrics = [*LossMetrics("ce,penalty"), *learn.metrics]
        fitted(learn)
        return learn, reads, loss_func

    ours, mine, parts = run(ScatterOnce(devices(2), accum=2))
    stock, other, expected = run()
    assert_same(ours, stock)
    assert mine.seen == pytest.approx(other.seen)
    for rows, of_stock in zip(mine.of_rows, other.of_rows, strict=True):
        torch.testing.assert_close(rows, of_stock)
    assert (parts.rows, parts.labels) == (expected.rows, expected.labels)
    assert parts.table.tolist() == expected.table.tolist()
    assert parts.seen.tolist() == expected.seen.tolist() == expected.labels
    assert parts.meter.rows == expected.meter.rows == expected.rows
    # once per micro-batch: validation has one
    steps, validations = 2 * 4, 2 * 5
    assert expected.by_kind["calls"] == steps + validations
    assert parts.by_kind["calls"] == 4 * steps + validations
    told = [str(w.message) for w in recwarn if "loss function sets" in str(w.message)]
    assert [text.split()[4] for text in told] == ["self.last"]


def test_predictions_and_validation_as_stock(devices, tmp_path):
    ours, stock = learner(tmp_path, ScatterOnce(devices(2), 2)), learner(tmp_path)
    for learn in (ours, stock):
        learn.no_bar().__enter__()
    for one, other in zip(
        ours.get_preds(with_loss=True), stock.get_preds(with_loss=True), strict=True
    ):
        torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other))
    assert [*ours.validate()] == pytest.approx([*stock.validate()])


def test_plain_model_is_saved_and_exported(tmp_path):
    ours = learner(tmp_path, NEW(), SaveModelCallback("accuracy"))
    model, loss_func = ours.model, ours.loss_func
    fitted(ours)
    assert ours.model is model
    assert ours.loss_func is loss_func
    assert "_do_one_batch" not in vars(ours)
    assert (
        torch.load(tmp_path / "models" / "model.pth").keys()
        == model.state_dict().keys()
    )
    ours.remove_cb(SaveModelCallback)
    ours.dls.new_empty = lambda: ours.dls  # as those of a DataBlock have
    ours.export("it.pkl")
    again = load_learner(tmp_path / "it.pkl")
    torch.testing.assert_close(again.model[1].weight, model[1].weight.cpu())


class Raises(Callback):
    def __init__(self, event, error):
        self.error = error
        setattr(self, event, self.fail)

    def fail(self, *_):
        if self.learn.iter == 2:
            raise self.error


@pytest.mark.parametrize(
    "event", ["before_batch", "model", "after_pred", "after_loss", "before_step"]
)
def test_error_leaves_learner_unchanged(event, tmp_path):
    raises = Raises(event, LookupError("a bug"))
    learn = learner(tmp_path, NEW(), raises)
    model, loss_func = learn.model, learn.loss_func
    hook = model[1].register_forward_hook(
        raises.fail if event == "model" else lambda *_: None
    )
    with pytest.raises(LookupError, match="a bug"):
        fitted(learn)
    hook.remove()
    assert learn.model is model
    assert learn.loss_func is loss_func
    learn.remove_cbs([Raises, ScatterOnce])
    fitted(learn)  # the stock loop
    assert "_do_one_batch" not in vars(learn)
    fitted(learn.add_cb(NEW()))


class Doubles(Callback):
    def after_pred(self):
        self.learn.pred = 2 * self.learn.pred


@pytest.mark.parametrize(
    ("callback", "words"),
    [(RNNCallback, "RNNCallback"), (Doubles, r"replaced learn\.pred")],
)
def test_replicating_callbacks_refused(tmp_path, callback, words):
    with pytest.raises(ValueError, match=words):
        fitted(learner(tmp_path, NEW(), callback()))


def test_page_example_runs(tmp_path):
    (snippet,) = blocks(read("docs/fastai.md"), "python")
    learn = learner(tmp_path)
    learn.no_bar().__enter__()
    exec(snippet.replace("[0, 1]", "['cpu', 'cpu']"), {"learn": learn})
    assert len(learn.recorder.losses) > 0


@pytest.mark.slow
def test_optimizer_gets_whole_batch_gradient(tmp_path):
    """After ``GradientAccumulation`` has weighted batches by their rows.

    fastai's optimizers are not torch's: with a rate of 1 the step is the gradient.
    """

    def step(model, batches):
        rows = []
        for images, labels in batches:
            rows += zip(images, labels, strict=True)
        loader = DataLoader(rows, bs=len(rows) // len(batches))
        learn = Learner(
            DataLoaders(loader, loader, device="cpu"),
            model,
            nn.CrossEntropyLoss(),
            opt_func=SGD,
            cbs=[NEW(), GradientAccumulation(len(rows))],
            path=tmp_path,
        )
        learn.recorder.smooth_loss = Smooth()
        fitted(learn, lambda learn: learn.fit(1, 1.0))

    def loss(model, batch):
        images, labels = batch
        return nn.functional.cross_entropy(model(images), labels)

    with seeded(3):
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, CLASSES))
    batch = randn(24, 1, 4, 4), randint(CLASSES, 24)
    splitcheck(step, model, batch, parts=3, equal=True, loss=loss).assert_passed()


def test_row_comparing_model_gets_whole_batch(devices, tmp_path):
    """Batch statistics in evaluation, of micro-batches: predictions were others."""

    def normalising():
        with seeded(3):
            norm = nn.BatchNorm1d(16, track_running_stats=False)
            last = nn.Linear(16, CLASSES)
            return nn.Sequential(nn.Flatten(), norm, last).double()

    ours = learner(tmp_path, ScatterOnce(devices(2), 2))
    stock = learner(tmp_path)
    found = []
    for learn in (ours, stock):
        learn.model = normalising()
        with learn.no_bar():
            found.append([*learn.validate()])
    assert found[0] == pytest.approx(found[1])


class OfFeatures:
    """A loss that reads what a hook on the model keeps."""

    def __init__(self):
        self.features = None

    def keep(self, module, inputs, output):
        self.features = output

    def __call__(self, pred, targets):
        loss = nn.functional.cross_entropy(pred, targets)
        return loss + self.features.square().mean()


@pytest.mark.parametrize(
    "layout",
    [
        ["cpu:0", "cpu:1", "cpu:2"],
        pytest.param(["cpu"] * 2, marks=pytest.mark.slow),
    ],
    ids=["apart", "shared"],
)
def test_loss_of_hooked_features(layout, tmp_path):
    """The validation's loss read those of the last micro-batch."""

    def run(*callbacks):
        loss = OfFeatures()
        learn = learner(tmp_path, *callbacks, loss_func=loss, opt_func=SGD)
        learn.model[1].register_forward_hook(loss.keep)
        return fitted(learn)

    stock = run()
    with pytest.warns(UserWarning, match="forward hooks keep values"):
        ours = run(ScatterOnce(layout, 2))
    assert_same(ours, stock)
