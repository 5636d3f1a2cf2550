"""The model and its training: one step, the test, the learning rate and the size of the
batch.

The order of the images, the random numbers of a step and its learning rate are
functions of the seed and of the number of images used so far. So a resumed run has the
same bits.

While the batch is below the gradient's noise scale, twice the batch needs nearly half
the steps (arXiv:1812.06162). So `--batch auto` doubles it between epochs
(arXiv:1711.00489), and the learning rate with it (arXiv:1706.02677, section 2.1).
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from scatterpar import ScatterOnceParallel, StepReport, weight_decay_groups
from scatterpar.devices.device_ids import parse_devices, resolve
from scatterpar.recipe import NoiseScale
from scatterpar.train import data
from scatterpar.train.data import TEST, TRAIN, Feed, Images, Request, Shape, Source
from scatterpar.train.options import LARGE_BATCH, Options, UsageError, words_of

BUILT_IN = "cnn"
FIRST = 256  # images; `--base-lr` is the rate for them
_FEWEST_UPDATES = 8  # per epoch; with fewer, training has too few updates


@dataclass
class Position:
    """How far a run has come."""

    batch: int  # images of a step, at most
    consumed: int = 0  # images that steps have used
    step: int = 0
    tested: int = 0  # epochs that ended with a test
    best: float = -1.0  # test accuracy


class Training:
    """Everything that changes while training, and how it changes."""

    def __init__(
        self, options: Options, source: Source, devices: list[torch.device]
    ) -> None:
        # accelerators' generators, too
        torch.manual_seed(data.seed_host("run", options.seed))
        self.options, self.images, self.tests = (
            options,
            len(source.train),
            len(source.test),
        )
        self.classes, self.epochs = len(source.class_names), options.epochs or 0
        self.engine = make_engine(options, source, devices)
        self.model: Any = self.engine.module
        self.noise = NoiseScale() if options.batch == "auto" else None
        size = (
            FIRST
            if options.batch == "auto"
            else options.batch or default_batch(self.images)
        )
        # a step has at most all images
        self.position = Position(min(size, self.images))
        self.optimizer = make_optimizer(self.model, options)
        dtype, kind = options.autocast, devices[0].type
        self.precision = torch.autocast(
            kind, getattr(torch, dtype or "bfloat16"), bool(dtype)
        )
        self.scaler = GradScaler(kind, enabled=dtype == "float16")
        self.criterion = nn.CrossEntropyLoss(label_smoothing=options.label_smoothing)
        self.average: AveragedModel | None = None
        if options.ema is not None:
            function = get_ema_multi_avg_fn(options.ema)
            self.average = AveragedModel(
                self.model, multi_avg_fn=function, use_buffers=True
            )
        self.about = {  # what `predict` needs to build the model
            "model": options.model,
            "image_shape": list(source.image_shape),
            "class_names": list(source.class_names),
            "mean": self.model.mean.flatten().tolist(),
            "std": self.model.std.flatten().tolist(),
        }

    @property
    def epoch(self) -> int:
        """The number of completed epochs."""
        return self.position.consumed // self.images

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches of an epoch."""
        return -(-self.images // self.position.batch)

    def order(self, epoch: int) -> tuple[Tensor, ...]:
        """Return the row numbers of the epoch's batches, whose sizes differ by at most
        one.
        """
        generator = torch.Generator().manual_seed(
            data.seed_of("order", self.options.seed, epoch)
        )
        return torch.randperm(self.images, generator=generator).tensor_split(
            self.steps_per_epoch
        )

    def requests(self) -> Iterator[Request]:
        """Yield what the feed must read from here to the end of the run."""
        start, tested = self.position.consumed, self.position.tested
        tests = torch.arange(self.tests).split(max(FIRST, self.position.batch))
        for epoch in range(self.epoch, self.epochs + 1):
            if epoch > tested:
                yield from (Request(TEST, rows) for rows in tests)
            consumed = epoch * self.images
            for rows in self.order(epoch) if epoch < self.epochs else ():
                if consumed >= start:
                    yield Request(TRAIN, rows, epoch)
                consumed += len(rows)

    def rate(self) -> float:
        """Return the learning rate of the next step: warm-up, then a cosine to zero or
        drops.
        """
        done, a_step = self.position.consumed / self.images, 1 / self.steps_per_epoch
        warmup, drops = self.options.warmup_epochs or 0, self.options.drop_at
        peak = self.options.base_lr * self.images / self.steps_per_epoch / FIRST
        if done < warmup:
            return peak * (done + a_step) / (warmup + a_step)
        if drops:
            return float(peak * 0.1 ** sum(done >= drop for drop in drops))
        return (
            peak
            * 0.5
            * (1 + math.cos(math.pi * (done - warmup) / (self.epochs - warmup)))
        )

    def step(self, rows: int, batch: Images) -> StepReport | None:
        """Train on the readable images of a batch of `rows`. Returns None if there are
        none.
        """
        report, optimizer, scaler = None, self.optimizer, self.scaler
        torch.manual_seed(
            data.seed_host("step", self.options.seed, self.position.consumed)
        )
        if len(batch.labels):
            for group in optimizer.param_groups:
                group["lr"] = self.rate()
            self.engine.train()
            optimizer.zero_grad()
            images, labels, criterion = batch.images, batch.labels, self.criterion
            with self.precision:
                self.engine.forward_backward(images, labels, criterion, scaler=scaler)
            if self.options.clip is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip)
            scaler.step(optimizer)
            scaler.update()
            if self.average:
                self.average.update_parameters(self.model)
            report = self.engine.last_step
            if self.noise and report:
                self.noise.update(report)
            self.position.step += 1
        self.position.consumed += rows
        return report

    @torch.no_grad()
    def test(
        self, feed: Feed, between: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """Test on the feed's next requests, with averaged weights if there are any."""
        sums, images = torch.zeros(3, dtype=torch.float64), 0
        saved = copy.deepcopy(self.model.state_dict()) if self.average else None
        self.engine.eval()
        try:
            if self.average:
                self.model.load_state_dict(self.average.module.state_dict())
            with self.precision:
                for batch, scores in scored(
                    self.engine, feed, self.tests, self.classes
                ):
                    right = (
                        scores.topk(min(5, self.classes)).indices
                        == batch.labels[:, None]
                    )
                    loss = F.cross_entropy(scores, batch.labels, reduction="sum")
                    sums += torch.stack([loss.double(), right[:, 0].sum(), right.sum()])
                    images += len(batch.labels)
                    between()
        finally:
            if saved is not None:
                self.model.load_state_dict(saved)
        names = "test_loss", "test_accuracy", "test_accuracy_top5"
        return dict(zip(names, (sums / max(1, images)).tolist(), strict=True))

    def grow(self) -> bool:
        """Double the batch if the noise scale has reached the double. Returns whether
        it grew.
        """
        twice, scale = (
            2 * self.position.batch,
            self.noise.scale if self.noise else math.nan,
        )
        grows = twice * _FEWEST_UPDATES <= self.images and twice <= scale < math.inf
        self.position.batch = twice if grows else self.position.batch
        return grows

    def _parts(self) -> dict[str, Any]:
        """Return what changes beside the network and the position."""
        parts = {
            name: getattr(self, name)
            for name in ("optimizer", "scaler", "average", "noise")
        }
        return {name: part for name, part in parts.items() if part}

    def state_dict(self) -> dict[str, Any]:
        """Return what changes while training."""
        state = {
            "model": self.model.network.state_dict(),
            "position": asdict(self.position),
        }
        return state | {name: part.state_dict() for name, part in self._parts().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state that `state_dict` returned."""
        self.model.network.load_state_dict(state["model"])
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        self.position = Position(**state["position"])


def default_batch(images: int) -> int:
    """Return the largest power of two, from 32 to 4096, that leaves 50
    steps an epoch.
    """
    return 1 << min(LARGE_BATCH, max(32, images // 50)).bit_length() - 1


def scored(
    engine: Any, feed: Feed, rows: int, classes: int
) -> Iterator[tuple[Images, Tensor]]:
    """Yield the readable images of the next `rows` rows, batch by batch, with their
    scores.
    """
    while rows:
        request, batch = feed.take()
        rows -= len(request.rows)
        if len(batch.labels):
            yield batch, engine(batch.images).float().cpu()[:, :classes]


def choose_devices(words: str | Sequence[str] | None) -> list[torch.device]:
    """Return the device of each replica: as named, else all accelerators, else two
    virtual CPUs.
    """
    default = None if torch.accelerator.is_available() else ["cpu:0", "cpu:1"]
    try:
        return list(resolve(parse_devices(words or ()) or default))
    except ValueError as error:
        found = words_of(error).removeprefix("device_ids: ").partition(";")[0]
        raise UsageError(f"--devices: {found}; name them like cuda:0,cuda:1") from error


def make_engine(
    options: Options, source: Source, devices: list[torch.device]
) -> ScatterOnceParallel:
    """Build the model with its initial weights, on the first device, and its engine."""
    shape, classes, pretrained = (
        source.image_shape,
        len(source.class_names),
        options.pretrained,
    )
    model = build_model(
        options.model, shape, classes, source.mean, source.std, pretrained
    )
    layout = torch.channels_last if options.channels_last else torch.preserve_format
    if options.batch == "auto" and len(devices) < 2:
        words = (
            f"there is one: name its device twice, --devices {devices[0]},{devices[0]}"
        )
        raise UsageError(
            f"--batch auto compares the gradients of replicas, and {words}"
        )
    return ScatterOnceParallel(
        model.to(devices[0], memory_format=layout),  # type: ignore[call-overload]
        device_ids=devices,
        micro_batch_size=options.micro_batch_size,
        check_finite=True,
        buffers="batch",
        measure_noise=options.batch == "auto",
        compile=options.compile or None,
    )


def make_optimizer(model: nn.Module, options: Options) -> Optimizer:
    """Build torch's optimizer of a name, or timm's; biases and norms have no weight
    decay.
    """
    name, groups = (
        options.optimizer.lower(),
        weight_decay_groups(model, options.weight_decay),
    )
    known = {
        kind.lower(): x for kind, x in vars(torch.optim).items() if isinstance(x, type)
    }
    keywords: dict[str, Any] = {"lr": options.base_lr}
    if name == "sgd":
        keywords |= {"momentum": options.momentum, "nesterov": options.momentum > 0}
    try:
        if name not in known:
            make = data.library("timm.optim").create_optimizer_v2
        else:
            make = known[name]
        optimizer: torch.optim.Optimizer = make(groups, **keywords)
        return optimizer
    except (UsageError, AssertionError, TypeError, ValueError) as error:
        words = (
            f"{words_of(error)} (it is a class of torch.optim, or one of timm's names)"
        )
        raise UsageError(f"--optimizer {options.optimizer}: {words}") from error


class SmallCNN(nn.Sequential):
    """Three convolutions and a hidden layer, with batch normalisation, for sides of at
    least 8.
    """

    def __init__(self, image_shape: Shape, classes: int) -> None:
        channels, height, width = image_shape
        layers: list[nn.Module] = []
        for before, after in ((channels, 16), (16, 32), (32, 64)):
            layers += [
                nn.Conv2d(before, after, 3, padding=1, bias=False),
                nn.BatchNorm2d(after),
            ]
            layers += [nn.ReLU(), nn.MaxPool2d(2)]
        hidden = nn.Linear(64 * (height // 8) * (width // 8), 128, bias=False)
        head = hidden, nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, classes)
        super().__init__(*layers, nn.Flatten(), *head)


class OnPixels(nn.Module):
    """Standardises pixels from 0 to 255 for a network, on the device: bytes are copied
    there.

    Grey images are repeated for a network that takes coloured ones; coloured images are
    averaged for a network that takes grey ones.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, mean: Any, std: Any) -> None:
        super().__init__()
        self.network = network
        first = next((m for m in network.modules() if isinstance(m, nn.Conv2d)), None)
        self.takes_colour = first is not None and first.in_channels == 3
        for name, value in (("mean", mean), ("std", std)):
            value = torch.as_tensor(value, dtype=torch.float32).view(-1, 1, 1)
            self.register_buffer(name, value, persistent=False)

    def forward(self, images: Tensor) -> Any:
        """Compute the network's output for pixels: (rows, channels, height, width)."""
        if images.shape[1] > len(self.mean) == 1:
            images = images.float().mean(1, keepdim=True).round_()
        images = (images - self.mean) / self.std
        return self.network(
            images.expand(-1, 3, -1, -1) if self.takes_colour else images
        )


def build_model(
    name: str,
    shape: Shape,
    classes: int,
    mean: Any = 0,
    std: Any = 1,
    pretrained: bool = False,
) -> OnPixels:
    """Build the model that `--model` names, on the CPU, and test it with one image.

    With `pretrained` it has timm's weights, and uses the mean and deviation of their
    training data.
    """
    try:
        network = _find(name, shape, classes, pretrained)
        if pretrained:
            # for grey images the channels are averaged
            made: Any = network.pretrained_cfg
            statistics = torch.tensor([made["mean"], made["std"]])
            mean, std = 255 * statistics.view(2, shape[0], -1).mean(2)
        model = OnPixels(network, mean, std)
        with torch.no_grad():
            scores = model.eval()(torch.zeros(1, *shape, dtype=torch.uint8))
        if scores.ndim != 2 or scores.shape[1] < classes:
            found = f"of one image it makes {tuple(scores.shape)}"
            raise UsageError(
                f"it should make a score for each of {classes} classes; {found}"
            )
    except Exception as error:
        kind = "" if isinstance(error, UsageError) else f"{type(error).__name__}: "
        words = f"{kind}{words_of(error)} (with an image {shape})"
        raise UsageError(f"--model {name}: {words}") from error
    return model.train()


def _find(name: str, shape: Shape, classes: int, pretrained: bool) -> Any:
    place, _, attribute = name.partition(":")
    if pretrained and place != "timm":
        raise UsageError("--pretrained is for timm:NAME")
    if name == BUILT_IN:
        return SmallCNN(shape, classes)
    if not (place and attribute):
        known = f"{BUILT_IN} nor timm:NAME nor package.module:callable"
        raise UsageError(f"neither {known}; did you mean timm:{name}?")
    if place == "timm":
        create = functools.partial(data.library("timm.models").create_model, attribute)
        options = {
            "num_classes": classes,
            "in_chans": shape[0],
            "pretrained": pretrained,
        }
        try:
            return create(img_size=shape[1:], **options)
        except TypeError:  # a convolutional network takes any size
            return create(**options)
    find_module = (
        data.library if place.startswith("torchvision") else importlib.import_module
    )
    factory = operator.attrgetter(attribute)(find_module(place))
    parameters = inspect.signature(factory).parameters.values()
    counts = any(p.name == "num_classes" or p.kind is p.VAR_KEYWORD for p in parameters)
    return factory(num_classes=classes) if counts else factory()
