"""fastai's Learner with ScatterOnce beside the stock Learner on one device."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
import threading
from collections import Counter, deque
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from harness.optional import needed
from harness.oracle import randint, randn, seeded
from harness.pages import blocks, read
from torch import nn

needed("fastai.basics", "'.[fastai]'")

from fastai.callback.core import (  # noqa: E402
    Callback,
    CancelBatchException,
    CancelValidException,
)
from fastai.callback.fp16 import MixedPrecision  # noqa: E402
from fastai.callback.mixup import CutMix, MixUp  # noqa: E402
from fastai.callback.rnn import RNNCallback  # noqa: E402
from fastai.callback.schedule import *  # noqa: E402, F403  patches Learner
from fastai.callback.tracker import SaveModelCallback  # noqa: E402
from fastai.callback.training import GradientAccumulation, GradientClip  # noqa: E402
from fastai.data.core import DataLoaders  # noqa: E402
from fastai.data.load import DataLoader  # noqa: E402
from fastai.learner import AvgSmoothLoss, Learner, Metric, load_learner  # noqa: E402
from fastai.losses import (  # noqa: E402
    CrossEntropyLossFlat,
    DiceLoss,
    LabelSmoothingCrossEntropyFlat,
)
from fastai.metrics import accuracy  # noqa: E402
from fastai.optimizer import SGD  # noqa: E402
from fastai.torch_core import params  # noqa: E402

from scatterpar import count_labels, splitcheck  # noqa: E402
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


def assert_same_weights(ours, stock, tolerance=SAME):
    pairs = zip(ours.model.parameters(), stock.model.parameters(), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def assert_same(ours, stock, tolerance=SAME):
    assert_same_weights(ours, stock, tolerance)
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


def labelled(pred, target):
    """A mean over labels that are not ignored, of whose number nothing tells."""
    return nn.functional.cross_entropy(pred, target)


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
    "count_labels": {
        "loss_func": labelled,
        "targets": IGNORED,
        "own": {"count": count_labels()},
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
    assert "pass ScatterOnce(…, whole_batch=True)" in text
    assert "_LossFunction" not in text
    assert "count_labels" not in text


def contrastive(pred, target):
    """Each row against all others."""
    scores = pred @ pred.T
    return nn.functional.cross_entropy(scores, torch.arange(len(pred)))


class Sparse:
    """A loss with a penalty of weights that it closes over."""

    def __init__(self, model):
        self.model = model
        self.calls = 0

    def __call__(self, pred, target):
        self.calls += 1
        weights = [*self.model.parameters()]
        penalty = sum(weight.abs().sum() for weight in weights)
        return nn.functional.cross_entropy(pred, target) + 1e-2 * penalty


# What refusals propose for losses that are no means over rows, and for others.
WHOLE = {
    "another mean": {"loss_func": halves},
    "weighted smoothing": SINGLE | {"loss_func": weighted_smoothing()},
    "rows compared": {"loss_func": contrastive},
    "ratio of sums": SINGLE | {"loss_func": DiceLoss()},
    "cross entropy": {"loss_func": nn.CrossEntropyLoss(WEIGHTS.double())},
}


@pytest.mark.parametrize("name", WHOLE)
def test_loss_of_whole_batch_equals_one_device(name, devices, tmp_path):
    options = dict(WHOLE[name])
    tolerance = options.pop("tolerance", SAME)
    new = ScatterOnce(devices(2), 2, whole_batch=True)
    ours = fitted(learner(tmp_path, new, **options))
    assert_same(ours, fitted(learner(tmp_path, **options)), tolerance)


def test_whole_batch_with_number_of_terms_refused():
    with pytest.raises(ValueError, match="does not go together with count"):
        ScatterOnce(["cpu"] * 2, whole_batch=True, count=lambda inputs, targets: 1)


def test_unverified_loss_is_that_of_accumulation(devices, tmp_path):
    """A loss that compares rows, which a look would refuse, as the user has asked."""
    new = ScatterOnce(devices(2), 2, verify=False)
    ours = learner(tmp_path, new, loss_func=contrastive, opt_func=SGD)
    ours.dls.train = ours.dls.train.new(bs=12, drop_last=True)
    ours = fitted(ours)
    accumulation = GradientAccumulation(12)
    stock = learner(tmp_path, accumulation, loss_func=contrastive, opt_func=SGD)
    stock.dls.train = stock.dls.train.new(bs=3, n=36)
    stock = fitted(stock)
    assert_same_weights(ours, stock)


@pytest.mark.parametrize("options", [{}, {"whole_batch": True}])
def test_penalty_of_the_models_weights(options, devices, tmp_path):
    """The loss refers to the model, of which replicas have the weights."""

    def run(*callbacks):
        learn = learner(tmp_path, *callbacks)
        learn.loss_func = Sparse(learn.model)
        return fitted(learn)

    ours = run(ScatterOnce(devices(2), 2, **options))
    stock = run()
    assert_same(ours, stock)
    steps, validations = 2 * 4, 2 * 5
    assert stock.loss_func.calls == steps + validations
    factor = 1 if options else 4  # micro-batches
    assert ours.loss_func.calls == factor * steps + validations


class ReadsItsOwn(nn.Module):
    """Adds to its loss if its weights have a gradient."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.ones(CLASSES).double())

    def forward(self, scores, y):
        loss = nn.functional.cross_entropy(self.weights * scores, y)
        gradient = self.weights.grad
        return loss if gradient is None else loss + (gradient * self.weights).sum()


def test_loss_finds_no_gradients_of_sub_steps(devices, tmp_path):
    def run(*callbacks):
        loss = ReadsItsOwn()
        learn = learner(tmp_path, *callbacks, loss_func=loss)
        learn.splitter = lambda model: [*model.parameters(), loss.weights]
        fitted(learn, epochs=1)
        return [*learn.model.parameters(), loss.weights]

    pairs = zip(run(ScatterOnce(devices(2), 2)), run(), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=SAME, atol=SAME)


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


@dataclasses.dataclass
class Best:
    value: float = 9.0
    at: int = -1


class Meter:
    def __init__(self):
        self.rows = 0


def counted(_):
    """An iterator is made late: a look at code that leads to one does not begin."""
    return itertools.count()


def opened(folder):
    return open(folder / "losses.txt", "w")


def written(loss):
    loss.file.flush()
    return Path(loss.file.name).read_text()


def remember(loss, value):
    if value < loss.best.value:
        loss.best.value, loss.best.at = value, loss.number


SHARED_LIST = []
MADE = {"file", "it"}  # what is made for each loss function

# What a loss function writes: what it has first, what a call does with (loss function,
# loss as a number, labels, loss), what it has afterwards.
KINDS = {
    "number": (
        {"n": 0},
        lambda o, f, y, loss: setattr(o, "n", o.n + len(y)),
        lambda o: o.n,
    ),
    "list": ({"a": []}, lambda o, f, y, loss: o.a.append(f), lambda o: o.a),
    "last": (
        {},
        lambda o, f, y, loss: setattr(o, "last", y),
        lambda o: o.last.tolist(),
    ),
    "last loss": (
        {},
        lambda o, f, y, loss: setattr(o, "last", loss),
        lambda o: float(o.last),
    ),
    "joined": (
        {"seen": torch.zeros(0)},
        lambda o, f, y, loss: setattr(o, "seen", torch.cat([o.seen, y])),
        lambda o: o.seen.tolist(),
    ),
    "average": (
        {"a": 1.0},
        lambda o, f, y, loss: setattr(o, "a", 0.9 * o.a + 0.1 * f),
        lambda o: o.a,
    ),
    "deque": (
        {"d": deque(maxlen=5)},
        lambda o, f, y, loss: o.d.append(f),
        lambda o: [*o.d],
    ),
    "Counter": (
        {"c": Counter()},
        lambda o, f, y, loss: o.c.update(y.tolist()),
        lambda o: sorted(o.c.items()),
    ),
    "dict of lists": (
        {"by": {}},
        lambda o, f, y, loss: o.by.setdefault(int(y[0]), []).append(f),
        lambda o: sorted(o.by.items()),
    ),
    "array in place": (
        {"t": np.zeros(CLASSES)},
        lambda o, f, y, loss: np.add.at(o.t, y.numpy(), f),
        lambda o: o.t.tolist(),
    ),
    "tensor in place": (
        {"t": torch.zeros(CLASSES)},
        lambda o, f, y, loss: o.t.mul_(0.9).index_add_(0, y, torch.ones(len(y))),
        lambda o: o.t.tolist(),
    ),
    "object": (
        {"m": Meter()},
        lambda o, f, y, loss: vars(o.m).update(rows=f),
        lambda o: o.m.rows,
    ),
    "dataclass": (
        {"best": Best(), "number": 0},
        lambda o, f, y, loss: (setattr(o, "number", o.number + 1), remember(o, f)),
        lambda o: [o.best.value, o.best.at],
    ),
    "module's list": (
        {},
        lambda o, f, y, loss: SHARED_LIST.append(f),
        lambda o: [*SHARED_LIST],
    ),
    "own random numbers": (
        {"r": random.Random(3), "a": []},
        lambda o, f, y, loss: o.a.append(o.r.random()),
        lambda o: o.a,
    ),
    "iterator": (
        {"it": counted, "a": []},
        lambda o, f, y, loss: o.a.append((next(o.it), f)),
        lambda o: o.a,
    ),
    "file": (
        {"file": opened},
        lambda o, f, y, loss: print(f"{f:.9f}", file=o.file),
        written,
    ),
    "attribute of a part": (
        {"soft": nn.Softmax(1)},
        lambda o, f, y, loss: setattr(o.soft, "tau", f),
        lambda o: o.soft.tau,
    ),
    "buffer of a part": (
        {"norm": nn.BatchNorm1d(1, affine=False)},
        lambda o, f, y, loss: o.norm(y.view(-1, 1).float()),
        lambda o: [float(o.norm.running_mean), int(o.norm.num_batches_tracked)],
    ),
    "new object": (
        {},
        lambda o, f, y, loss: setattr(o, "summary", {"rows": len(y), "loss": f}),
        lambda o: [*o.summary.values()],
    ),
}


class Writes:
    """A loss function that writes; as an object of the user's."""

    def __init__(self, kind, folder):
        before, self.write, self.read = KINDS[kind]
        for name, value in copy.deepcopy(before).items():
            setattr(
                self,
                name,
                value(folder) if callable(value) and name in MADE else value,
            )

    def __call__(self, pred, target):
        loss = nn.functional.cross_entropy(pred, target)
        self.write(self, loss.item(), target, loss)
        return loss


class WritesInModule(nn.Module):
    """The same as a module, with a weight that is trained."""

    def __init__(self, kind, folder):
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        Writes.__init__(self, kind, folder)

    def forward(self, pred, target):
        return Writes.__call__(self, pred * self.scale, target)


class Hungry:
    """Has memory for two rows of a training, after it has counted them."""

    def __init__(self, room):
        self.room, self.rows, self.labels = room, 0, []

    def __call__(self, pred, target):
        self.rows += len(target)
        self.labels += target.tolist()
        if len(target) > self.room and pred.requires_grad:
            raise torch.OutOfMemoryError("out of memory")
        return nn.functional.cross_entropy(pred, target)


def test_tries_out_of_memory_leave_no_calls(tmp_path, recwarn):
    """Rows of the tries that failed were counted, too."""
    losses = Hungry(2), Hungry(10**9)
    ours = learner(
        tmp_path, ScatterOnce(["cpu:0", "cpu:1"], "auto"), loss_func=losses[0]
    )
    assert_same(fitted(ours), fitted(learner(tmp_path, loss_func=losses[1])))
    assert losses[0].rows == losses[1].rows
    assert losses[0].labels == losses[1].labels
    told = [str(w.message) for w in recwarn if 'accum="auto"' in str(w.message)]
    assert "12 rows with accum=1 ran out of memory; accum=3 is the smallest" in told[0]


class Teaching(Hungry):
    """Draws, and moves the statistics of a network that is not trained."""

    def __init__(self, room):
        super().__init__(room)
        self.teacher = nn.BatchNorm1d(CLASSES)

    def __call__(self, pred, target):
        # Two values per channel, also of one row.
        self.teacher(pred.detach().float().unsqueeze(2).repeat(1, 1, 2))
        return super().__call__(nn.functional.dropout(pred, 0.3), target)


def test_tries_out_of_memory_leave_no_draws(tmp_path):
    """Nor statistics: all is as with the number that fits."""
    found = []
    for accum, room in (("auto", 2), (3, 10**9)):
        loss = Teaching(room)
        learn = learner(
            tmp_path, ScatterOnce(["cpu:0", "cpu:1"], accum), loss_func=loss
        )
        fitted(learn)
        found.append([*learn.model.parameters(), *loss.teacher.buffers()])
    assert all(map(torch.equal, *found))


STEPS, ROWS_OF_CALL, PARTS = 3, 3, 4


@pytest.mark.contract
@pytest.mark.parametrize(
    "made", [Writes, pytest.param(WritesInModule, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_loss_leaves_what_accumulation_leaves(kind, made, devices, tmp_path):
    """Same values, in the same order, as in the stock loop that accumulates."""
    number = STEPS * ROWS_OF_CALL * PARTS
    rows = [*zip(randn(number, 4), randint(CLASSES, number), strict=True)]

    def run(batch_size, *callbacks):
        SHARED_LIST.clear()
        loss = made(kind, tmp_path)
        with seeded(3):
            model = nn.Linear(4, CLASSES).double()
        loader = DataLoader(rows, bs=batch_size)
        loaders = DataLoaders(loader, DataLoader(rows[:2], bs=2), device="cpu")
        learn = Learner(
            loaders, model, loss, opt_func=SGD, cbs=[*callbacks], path=tmp_path
        )
        learn.recorder.smooth_loss = Smooth()
        learn.splitter = lambda model: [*model.parameters(), *_weights(loss)]
        fitted(learn, lambda learn: learn.fit(1, 0.1))
        return learn, loss.read(loss)

    stock, expected = run(ROWS_OF_CALL, GradientAccumulation(ROWS_OF_CALL * PARTS))
    ours, values = run(ROWS_OF_CALL * PARTS, ScatterOnce(devices(2), PARTS // 2))
    assert flat(values) == pytest.approx(flat(expected), rel=1e-9)
    weights = [
        _weights(learn.model) + _weights(learn.loss_func) for learn in (ours, stock)
    ]
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, rtol=SAME, atol=SAME)


def _weights(value):
    return [*value.parameters()] if isinstance(value, nn.Module) else []


def flat(value):
    if isinstance(value, str):
        value = [*map(float, value.split())]
    if isinstance(value, (list, tuple)):
        return [number for entry in value for number in flat(entry)]
    return [value]


@pytest.mark.parametrize(("options", "told"), [({}, 1), ({"whole_batch": True}, 0)])
def test_numbers_that_calls_write_are_told(options, told, tmp_path, recwarn):
    """They are written once per micro-batch, not once per batch."""
    loss = Writes("dataclass", tmp_path)
    fitted(learner(tmp_path, NEW(**options), loss_func=loss))
    texts = [str(w.message) for w in recwarn if "in each call" in str(w.message)]
    assert len(texts) == told
    if told:
        assert "number" in texts[0]
        assert "4 times in this batch" in texts[0]


class Weighs:
    """The weight of a term of its loss grows with the number of calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, pred, target):
        self.calls += 1
        loss = nn.functional.cross_entropy(pred, target)
        return loss + 0.01 * self.calls * pred.square().mean()


def test_look_begins_each_call_with_the_same_numbers(devices, tmp_path, recwarn):
    """The look could not say how losses combine: it got another one each time."""

    def run(batch_size, *callbacks):
        loss = Weighs()
        with seeded(3):
            model = nn.Linear(4, CLASSES).double()
        loader = DataLoader(rows, bs=batch_size)
        loaders = DataLoaders(loader, DataLoader(rows[:2], bs=2), device="cpu")
        learn = Learner(
            loaders, model, loss, opt_func=SGD, cbs=[*callbacks], path=tmp_path
        )
        learn.recorder.smooth_loss = Smooth()
        fitted(learn, lambda learn: learn.fit(1, 0.1))
        return learn

    with seeded(1):
        rows = [
            (torch.randn(4, dtype=torch.float64), number % CLASSES)
            for number in range(STEPS * ROWS_OF_CALL * PARTS)
        ]
    stock = run(ROWS_OF_CALL, GradientAccumulation(ROWS_OF_CALL * PARTS))
    ours = run(ROWS_OF_CALL * PARTS, ScatterOnce(devices(2), PARTS // 2))
    assert ours.loss_func.calls == stock.loss_func.calls
    for one, other in zip(
        ours.model.parameters(), stock.model.parameters(), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=SAME, atol=SAME)
    told = [str(warning.message) for warning in recwarn]
    assert not [text for text in told if "could not check" in text]


class Fails(WritesInModule):
    """Its third call raises."""

    def forward(self, pred, target):
        self.calls += 1
        if self.calls == 3:
            raise LookupError("the third call")
        return super().forward(pred, target)


def test_failed_step_leaves_buffers_of_loss(devices, tmp_path):
    loss = Fails("buffer of a part", tmp_path)
    loss.calls = 0
    before = copy.deepcopy(loss.read(loss))
    learn = learner(tmp_path, ScatterOnce(devices(2), 2, verify=False), loss_func=loss)
    with pytest.raises(LookupError, match="the third call"):
        fitted(learn)
    assert loss.read(loss) == before


def assert_same_values(mine, theirs):
    """Tensors to rounding, and all else, in nested values."""
    if isinstance(theirs, (tuple, list)):
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            assert_same_values(one, other)
    elif isinstance(theirs, torch.Tensor):
        assert type(mine) is type(theirs)
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)
    else:
        assert mine == theirs


PREDICTIONS = {
    "plain": {},
    "losses": {"with_loss": True},
    "inputs": {"with_input": True},
    "decoded": {"with_decoded": True, "with_loss": True, "with_input": True},
    "of the training data": {"ds_idx": 0, "with_loss": True},
    "activation": {"act": torch.sigmoid},
    "targets alone": {"with_preds": False},
}


@pytest.mark.parametrize("name", PREDICTIONS)
def test_predictions_as_stock(name, devices, tmp_path):
    loss = CrossEntropyLossFlat()
    results = []
    for callbacks in ([ScatterOnce(devices(2), 2)], []):
        learn = learner(tmp_path, *callbacks, loss_func=loss, dtype=torch.float32)
        with learn.no_bar():
            results.append(learn.get_preds(**PREDICTIONS[name]))
    assert_same_values(*results)


class Ratio(Metric):
    """A ratio of sums, which no mean over batches gives; and the order of batches."""

    def reset(self):
        self.right, self.rows, self.firsts = 0, 0, []

    def accumulate(self, learn):
        self.right += int((learn.pred.argmax(1) == 1).sum())
        self.rows += int((learn.y != 1).sum())
        self.firsts.append((learn.iter, len(learn.y), float(learn.loss)))

    @property
    def value(self):
        return self.right / self.rows

    @property
    def name(self):
        return "ratio"


class Records(Callback):
    """Writes batch by batch."""

    def before_fit(self):
        self.seen, self.lasts = [], []

    def after_batch(self):
        if not self.training:
            self.seen.append((self.iter, len(self.xb[0]), float(self.loss)))
            self.lasts.append(self.learn.pred[-1])


class Named(nn.Module):
    """A model whose batches are dictionaries with texts."""

    def __init__(self, classes=CLASSES):
        super().__init__()
        with seeded(3):
            self.line = nn.Linear(16, classes).double()

    def forward(self, batch):
        lengths = torch.tensor([float(len(text)) for text in batch["texts"]])
        scores = self.line(batch["image"].flatten(1)) * lengths.double()[:, None]
        return scores - scores.mean(0)  # compares rows


def of_texts(rows):
    images, labels = randn(rows, 1, 4, 4), randint(CLASSES, rows)
    texts = ["a" * (1 + i % 5) for i in range(rows)]
    return [
        ({"image": image, "texts": text}, label)
        for image, text, label in zip(images, texts, labels, strict=True)
    ]


def of_images(rows):
    return [*zip(randn(rows, 1, 4, 4), randint(CLASSES, rows), strict=True)]


def classifier():
    with seeded(3):
        return nn.Sequential(nn.Flatten(), nn.Linear(16, CLASSES)).double()


def normalising():
    """Batch statistics in evaluation, of all rows of a batch."""
    with seeded(3):
        norm = nn.BatchNorm1d(16, track_running_stats=False)
        return nn.Sequential(nn.Flatten(), norm, nn.Linear(16, CLASSES)).double()


class Pairs(nn.Module):
    """Outputs without rows, beside some with rows."""

    def __init__(self):
        super().__init__()
        self.inner = classifier()

    def forward(self, images):
        scores = self.inner(images)
        return scores, scores.square().mean()


class Noises(Callback):
    """Changes the batches of an evaluation."""

    order = -1

    def before_batch(self):
        if not self.training:
            self.learn.xb = tuple(x + self.iter for x in self.xb)


class Doubles(Callback):
    """Writes into the batches of an evaluation."""

    def before_batch(self):
        if not self.training:
            self.xb[0].mul_(2)


class Skips(Callback):
    def before_batch(self):
        if not self.training and self.iter in (1, 3):
            raise CancelBatchException


class Stops(Callback):
    def after_batch(self):
        if not self.training and self.iter == 2:
            raise CancelValidException


def first_of(loss_func):
    return lambda pred, target: loss_func(pred[0], target) + pred[1]


# The model, its data, rows, the size of a batch; callbacks and the loss function.
VALIDATIONS = {
    "even": (classifier, of_images, 24, 6, [], None),
    "smaller last batch": (classifier, of_images, 23, 6, [], None),
    "last batch of one row": (classifier, of_images, 19, 6, [], None),
    "one batch": (classifier, of_images, 5, 6, [], None),
    "batches of one row": (classifier, of_images, 3, 1, [], None),
    "dictionaries and texts": (Named, of_texts, 23, 5, [], None),
    "rows compared": (normalising, of_images, 23, 6, [], None),
    "no rows": (Pairs, of_images, 23, 6, [], first_of(nn.functional.cross_entropy)),
    "changed batches": (classifier, of_images, 23, 6, [Noises], None),
    "batches written": (classifier, of_images, 23, 6, [Doubles], None),
    "many batches": (classifier, of_images, 23, 2, [], None),
    "batches skipped": (classifier, of_images, 23, 5, [Skips], None),
    "some of many skipped": (classifier, of_images, 23, 2, [Skips], None),
    "ended early": (classifier, of_images, 31, 5, [Stops], None),
}


@pytest.mark.parametrize("name", VALIDATIONS)
def test_validation_as_stock(name, devices, tmp_path):
    """Same values, and callbacks see the batches in the same order."""
    make, data, rows, size, callbacks, loss_func = VALIDATIONS[name]
    found = []
    for place in ([ScatterOnce(devices(3), 2)], []):
        loaders = [DataLoader(data(rows), bs=size, drop_last=False) for _ in range(2)]
        records = Records()
        learn = Learner(
            DataLoaders(*loaders, device="cpu"),
            make(),
            loss_func or nn.CrossEntropyLoss(),
            metrics=[Ratio()] if loss_func is None else [],
            cbs=[*place, records, *(make() for make in callbacks)],
            path=tmp_path,
        )
        with seeded(5), learn.no_bar():
            values = [*learn.validate()]
            assert learn.dl is loaders[1]
        lasts = [] if loss_func else records.lasts
        found.append([values, records.seen, lasts])
    mine, theirs = found
    assert mine[0] == pytest.approx(theirs[0], rel=1e-6)
    assert [seen[:2] for seen in mine[1]] == [seen[:2] for seen in theirs[1]]
    assert flat(mine[1]) == pytest.approx(flat(theirs[1]), rel=1e-6)
    assert_same_values(mine[2], theirs[2])


class ReadsItsCalls(nn.Module):
    """A model whose forward pass writes a buffer that the next one reads."""

    def __init__(self):
        super().__init__()
        self.inner = classifier()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, images):
        self.calls += 1
        return self.inner(images) * self.calls


class ReadsItsNumber(ReadsItsCalls):
    """A number in the place of the buffer."""

    def __init__(self):
        super().__init__()
        del self.calls
        self.calls = 0.0


class SwapsLayers(ReadsItsCalls):
    """Another activation in each forward pass."""

    def forward(self, images):
        self.add_module("last", nn.ReLU() if self.calls % 2 else nn.Tanh())
        return self.last(super().forward(images))


@pytest.mark.parametrize("make", [ReadsItsCalls, ReadsItsNumber, SwapsLayers])
def test_predictions_that_write_state_equal_stock(make, tmp_path):
    """All of a group began with the same state, and what they wrote was lost."""
    results = []
    for callbacks in ([ScatterOnce(["cpu:0", "cpu:1"])], []):
        loader = DataLoader(of_images(17), bs=3)
        learn = Learner(
            DataLoaders(loader, loader, device="cpu"),
            make(),
            nn.CrossEntropyLoss(),
            cbs=callbacks,
            path=tmp_path,
        )
        with learn.no_bar():
            results.append((learn.validate()[0], float(learn.model.calls)))
    assert results[0] == pytest.approx(results[1], rel=1e-6)
    assert results[0][1] == 6


def test_replicas_predict_at_the_same_time(tmp_path):
    """Three replicas compute three batches, each in a thread of its own."""
    barrier = threading.Barrier(3, timeout=60)

    class Meets(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = classifier()

        def forward(self, images):
            barrier.wait()
            return self.inner(images)

    loader = DataLoader(of_images(18), bs=3)
    learn = Learner(
        DataLoaders(loader, loader, device="cpu"),
        Meets(),
        nn.CrossEntropyLoss(),
        cbs=ScatterOnce(["cpu:0", "cpu:1", "cpu:2"]),
        path=tmp_path,
    )
    with learn.no_bar():
        learn.validate()


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


class DoublesPredictions(Callback):
    def after_pred(self):
        self.learn.pred = 2 * self.learn.pred


@pytest.mark.parametrize(
    ("callback", "words"),
    [(RNNCallback, "RNNCallback"), (DoublesPredictions, r"replaced learn\.pred")],
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

    assert_same(run(ScatterOnce(layout, 2)), run())


class Averages(Callback):
    """The mean of the weights so far is what is validated."""

    def __init__(self, order, event):
        self.order = order
        self.event = event

    def before_fit(self):
        self.average = copy.deepcopy(self.learn.model)

    def after_step(self):
        with torch.no_grad():
            for mean, weight in zip(
                self.average.parameters(), self.learn.model.parameters(), strict=True
            ):
                mean.lerp_(weight, 0.2)

    def swap(self, event):
        """In the second batch of a validation, or before it."""
        is_due = event == self.event and not self.learn.training
        if is_due and not hasattr(self, "trained"):
            self.trained, self.learn.model = self.learn.model, self.average

    def before_validate(self):
        self.swap("before_validate")

    def before_batch(self):
        if self.learn.iter:
            self.swap("before_batch")

    def after_validate(self):
        self.learn.model = self.trained
        del self.trained


@pytest.mark.parametrize("devices", [["cpu:0", "cpu:1"], ["cpu"] * 2])
@pytest.mark.parametrize("event", ["before_validate", "before_batch"])
def test_swapped_model_is_validated(tmp_path, event, devices):
    """By replicas of the model that was there before."""
    learners = []
    for own in ([ScatterOnce(devices)], []):
        callbacks = [Averages(60, event), *own]
        learners.append(fitted(learner(tmp_path, *callbacks)))
    assert_same(*learners)
