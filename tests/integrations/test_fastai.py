"""fastai's Learner with ScatterOnce beside the stock Learner on one device."""

from __future__ import annotations

import pickle
from functools import partial

import pytest
import torch
from harness.optional import needed
from harness.oracle import randint, randn, seeded
from torch import nn

needed("fastai.basics", "'.[fastai]'")

from fastai.callback.core import Callback  # noqa: E402
from fastai.callback.fp16 import MixedPrecision  # noqa: E402
from fastai.callback.mixup import MixUp  # noqa: E402
from fastai.callback.rnn import ModelResetter  # noqa: E402
from fastai.callback.schedule import *  # noqa: E402, F403  patches Learner
from fastai.callback.tracker import SaveModelCallback  # noqa: E402
from fastai.callback.training import GradientAccumulation, GradientClip  # noqa: E402
from fastai.data.core import DataLoaders  # noqa: E402
from fastai.data.load import DataLoader  # noqa: E402
from fastai.distributed import ParallelTrainer  # noqa: E402
from fastai.learner import AvgSmoothLoss, Learner  # noqa: E402
from fastai.losses import CrossEntropyLossFlat  # noqa: E402
from fastai.metrics import accuracy  # noqa: E402
from fastai.torch_core import params  # noqa: E402

from scatterpar.integrations.fastai import ScatterOnce  # noqa: E402

pytestmark = [pytest.mark.loops, pytest.mark.draws]

SAME = 1e-9
ROWS, CLASSES = 41, 3  # with batches of 12 the last one has 5 rows
DEVICES = ["cpu:0", "cpu:1", "cpu:0"]


class Smooth(AvgSmoothLoss):
    """fastai's own begins with a number in single precision, which it does not mix with
    others.
    """

    def reset(self):
        self.count, self.val = 0, torch.zeros((), dtype=torch.float64)

    def accumulate(self, learn):
        self.count += 1
        self.val = torch.lerp(learn.loss.detach().double(), self.val, self.beta)


def learner(folder, devices, *callbacks, dtype=torch.float64, loss=None, **options):
    """A small classifier of images of 4 x 4, with its data."""
    images = randn(ROWS, 1, 4, 4).to(dtype)
    targets = randint(CLASSES, ROWS)
    rows = [(images[i], targets[i]) for i in range(ROWS)]
    loaders = [DataLoader(rows, bs=12, drop_last=False), DataLoader(rows, bs=9)]
    with seeded(3):
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, CLASSES)
        )
    made = [callback() for callback in callbacks]
    if devices:
        made.append(ScatterOnce(devices))
    learn = Learner(
        DataLoaders(*loaders, device="cpu"),
        model.to(dtype),
        loss or nn.CrossEntropyLoss(),
        cbs=made,
        path=folder,
        metrics=accuracy,
        **options,
    )
    learn.recorder.smooth_loss = Smooth()
    return learn


def fitted(learn, how=None):
    with seeded(5), learn.no_bar(), learn.no_logging():
        (how or (lambda learn: learn.fit(2, 0.02)))(learn)
    return learn


def assert_same(ours, stock, tolerance=SAME):
    pairs = zip(ours.model.parameters(), stock.model.parameters(), strict=True)
    for parameter, expected in pairs:
        torch.testing.assert_close(parameter, expected, rtol=tolerance, atol=tolerance)
    for values, expected in zip(
        ours.recorder.values, stock.recorder.values, strict=True
    ):
        near = pytest.approx([*expected], rel=max(tolerance, 1e-6), nan_ok=True)
        assert [*values] == near


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


def contrastive(predictions, targets):
    """Compares rows with each other."""
    near = targets[:, None] == targets[None]
    return (predictions @ predictions.T - near.double()).square().mean()


class Doubles(Callback):
    def after_pred(self):
        self.learn.pred = 2 * self.pred


RUNS = {
    "plain": ((), {}),
    "fastai's loss": ((), {"loss": CrossEntropyLossFlat()}),
    "margins": ((), {"loss": nn.MultiMarginLoss()}),
    "contrastive": ((), {"loss": contrastive}),
    "accumulation": ((partial(GradientAccumulation, 24),), {}),
    "clipping": ((partial(GradientClip, 0.1),), {}),
    "accumulation, clipped": (
        (partial(GradientAccumulation, 36), partial(GradientClip, 0.1)),
        {},
    ),
    "predictions replaced": ((Doubles,), {}),
    "the best is loaded": ((SaveModelCallback,), {}),
}
HOW = {
    "one cycle": lambda learn: learn.fit_one_cycle(2, 0.1),
    "frozen first": thaw,
}


@pytest.mark.parametrize("devices", [DEVICES, ["cpu"] * 2], ids="+".join)
@pytest.mark.parametrize("name", RUNS)
def test_run_equals_one_device(name, devices, tmp_path, divided_calls, warned):
    callbacks, options = RUNS[name]
    ours = fitted(learner(tmp_path, devices, *callbacks, **options))
    stock = fitted(learner(tmp_path, None, *callbacks, **options))
    assert set(divided_calls) == {ours.model}
    assert_same(ours, stock)
    assert not warned


def test_parameters_and_gradients_cross_once_per_step(tmp_path):
    """With ``GradientAccumulation``: also in the last batch of an epoch."""
    sent, received = [], []

    class Counts(Callback):
        run_valid = False

        def after_batch(self):
            num_bytes = learn.scatter_once._divided.engine.last_step.bytes
            sent.append(num_bytes["replicate"])
            received.append(num_bytes["reduce"])

    accumulation = partial(GradientAccumulation, 30)
    learn = learner(tmp_path, ["cpu:0", "cpu:1"], accumulation, Counts)
    size = sum(p.nbytes for p in learn.model.parameters())
    fitted(learn)
    assert sent == [size, 0, 0, size, 0, 0, 0, size]
    assert received == [0, 0, size, size, 0, 0, size, size]


@pytest.mark.parametrize("name", HOW)
def test_schedule_equals_one_device(name, tmp_path):
    learners = []
    for devices in (DEVICES, None):
        learn = learner(tmp_path, devices, splitter=split)
        learners.append(fitted(learn, HOW[name]))
    assert_same(*learners)


def test_mixup_and_mixed_precision_near_one_device(tmp_path):
    options = {"dtype": torch.float32, "loss": CrossEntropyLossFlat()}
    learners = []
    for devices in (DEVICES, None):
        learners.append(fitted(learner(tmp_path, devices, MixUp, Bfloat16, **options)))
    assert_same(*learners, tolerance=3e-2)


def test_predictions_as_stock(tmp_path, divided_calls):
    results = []
    for devices in (DEVICES, None):
        learn = learner(tmp_path, devices)
        with learn.no_bar(), learn.no_logging():
            results.append((*learn.get_preds(), torch.tensor(learn.validate())))
    assert divided_calls
    for value, expected in zip(*results, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-9)


def test_learner_is_saved_and_pickled(tmp_path):
    learn = fitted(learner(tmp_path, DEVICES))
    learn.save("it")
    copied = pickle.loads(pickle.dumps(learn))
    assert copied.scatter_once._divided is None
    loaded = learner(tmp_path, None).load("it")
    for one in (copied, loaded):
        for value, expected in zip(
            one.model.parameters(), learn.model.parameters(), strict=True
        ):
            assert torch.equal(value, expected)
    for part in learn.model.modules():
        assert "_compiled_call_impl" not in vars(part)


class Fails(Callback):
    def after_loss(self):
        raise KeyError("mine")


def test_error_leaves_the_model_as_before(tmp_path):
    learn = learner(tmp_path, DEVICES, Fails)
    with pytest.raises(KeyError, match="mine"):
        fitted(learn)
    for part in learn.model.modules():
        assert "_compiled_call_impl" not in vars(part)
    learn.remove_cb(Fails)
    fitted(learn)


@pytest.mark.parametrize("callback", [partial(ParallelTrainer, [0]), ModelResetter])
def test_other_callbacks_refused_by_name(callback, tmp_path):
    learn = learner(tmp_path, DEVICES, callback)
    learn.model.reset = lambda: None
    with pytest.raises(ValueError, match="ScatterOnce does not go together with"):
        fitted(learn)
