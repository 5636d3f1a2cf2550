"""The loops of docs/loops.md: each trains as the same loop does on one device."""

from __future__ import annotations

import contextlib
from importlib.util import find_spec

import pytest
import torch
from harness.optional import import_torchvision_first
from harness.oracle import build, randint, randn, seeded
from harness.pages import blocks, sections
from harness.pages import run as run_snippet
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from scatterpar import ScatterOnceParallel

pytestmark = [pytest.mark.loops, pytest.mark.draws]  # loaders draw their seeds
SNIPPETS = {
    title: blocks(text, "python") for title, text in sections("docs/loops.md").items()
}
IMAGES, LABELS = randn(53, 8).float(), randint(3, 53)


class OneDevice(nn.Module):
    """In the place of the engine: the model itself."""

    def __init__(self, model, device_ids=None):
        super().__init__()
        self.module = model

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def no_sync(self):
        return contextlib.nullcontext()


def network():
    layers = lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))  # noqa: E731
    return build(layers).float()


def of_fabric():
    from lightning.fabric import Fabric

    return {"fabric": Fabric(accelerator="cpu", devices=1)}


def of_skorch():
    return {"images": IMAGES.numpy(), "labels": LABELS.numpy()}


def of_monai():
    images = IMAGES.view(53, 1, 8)
    rows = [
        {"image": image, "label": label}
        for image, label in zip(images, LABELS, strict=True)
    ]
    model = nn.Sequential(nn.Flatten(), network())
    return {"loader": DataLoader(rows, 16), "model": model}


# Loops that have a row of the page, which says where the engine goes.
PROGRAMS = {
    "Fabric": """
model = ScatterOnceParallel(model, device_ids=device_ids)
model, optimizer = fabric.setup(model, optimizer)
for images, labels in loader:
    optimizer.zero_grad()
    fabric.backward(criterion(model(images), labels))
    optimizer.step()
""",
    "ignite": """
from ignite.engine import create_supervised_trainer

model = ScatterOnceParallel(model, device_ids=device_ids)
trainer = create_supervised_trainer(model, optimizer, criterion)
trainer.run(loader, max_epochs=2)
""",
    "skorch": """
from skorch import NeuralNetClassifier

net = NeuralNetClassifier(
    ScatterOnceParallel(model, device_ids=device_ids),
    criterion=nn.CrossEntropyLoss,
    max_epochs=2,
    lr=0.1,
    train_split=None,
    verbose=0,
)
net.fit(images, labels)
""",
    "MONAI": """
from monai.engines import SupervisedTrainer

trainer = SupervisedTrainer(
    device=device,
    max_epochs=2,
    train_data_loader=loader,
    network=ScatterOnceParallel(model, device_ids=device_ids),
    optimizer=optimizer,
    loss_function=criterion,
)
trainer.run()
""",
    "timm's train.py": """
from timm.utils import NativeScaler

model = ScatterOnceParallel(model, device_ids=device_ids)
scaler = NativeScaler(device="cpu")
for images, labels in loader:
    optimizer.zero_grad()
    loss = criterion(model(images), labels)
    scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
""",
    "Scripts of diffusers": """
unet = ScatterOnceParallel(model, device_ids=device_ids)
for images, _ in loader:
    noise = torch.randn_like(images)
    times = torch.randint(0, 1000, (len(images), 1))
    noisy = images + noise * times / 1000
    loss = nn.functional.mse_loss(unet(noisy), noise[:, :3])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
}
# By section or row: the library, and what its loop takes for granted.
LOOPS = {
    "accelerate": ("accelerate", dict),
    "Fabric": ("lightning", of_fabric),
    "ignite": ("ignite", dict),
    "skorch": ("skorch", of_skorch),
    "MONAI": ("monai", of_monai),
    "timm's train.py": ("timm", dict),
    "Scripts of diffusers": ("torch", dict),
}


def trained(title, wrapper):
    """The parameters after the snippet of a section."""
    model = network()
    names = {"nn": nn, "torch": torch, "criterion": nn.CrossEntropyLoss()}
    names |= {"model": model, "images": IMAGES, "labels": LABELS}
    names |= {"device_ids": ["cpu:0", "cpu:1"], "device": torch.device("cpu")}
    names |= {"loader": DataLoader(TensorDataset(IMAGES, LABELS), 16)}
    names |= LOOPS[title][1]()
    parameters = list(names["model"].parameters())
    names["optimizer"] = torch.optim.SGD(parameters, 0.1)
    names["ScatterOnceParallel"] = wrapper
    with seeded(3):
        run_snippet(PROGRAMS.get(title) or SNIPPETS[title][0], names)
    return parameters


def needs(title):
    package, _ = LOOPS[title]
    reason = f"{package} is not installed, see docs/loops.md"
    is_missing = find_spec(package) is None
    return pytest.param(title, marks=pytest.mark.skipif(is_missing, reason=reason))


@pytest.mark.parametrize("title", map(needs, LOOPS))
def test_loop_trains_as_one_device(title):
    import_torchvision_first()
    engines = []

    def engine(*args, **kwargs):
        engines.append(ScatterOnceParallel(*args, **kwargs))
        return engines[-1]

    ours = trained(title, engine)
    stock = trained(title, OneDevice)
    assert engines[0].last_step.plan.shares[1].rows > 0
    start = network().parameters()
    for parameter, expected, before in zip(ours, stock, start, strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-4, atol=1e-6)
        assert not torch.equal(parameter.view_as(before), before)


def test_snippet_of_lightning_trains(tmp_path, monkeypatch):
    pytest.importorskip("torchmetrics")
    import_torchvision_first()
    pl = pytest.importorskip("lightning.pytorch")
    monkeypatch.chdir(tmp_path)  # the Trainer writes checkpoints there

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def training_step(self, batch, _):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    stock = pl.Trainer

    def quiet(**options):
        return stock(accelerator="cpu", logger=False, **options)

    monkeypatch.setattr(pl, "Trainer", quiet)
    module = Module()
    loader = DataLoader(TensorDataset(IMAGES, LABELS), 16)
    names = {"module": module, "loader": loader, "device_ids": ["cpu:0", "cpu:1"]}
    run_snippet(SNIPPETS["Lightning"][0], names)
    assert names["trainer"].global_step == 4


def test_snippet_of_fastai_trains():
    pytest.importorskip("fastai")
    import_torchvision_first()
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader as Loader

    rows = list(zip(IMAGES, LABELS, strict=True))
    dls = DataLoaders(Loader(rows, bs=16), Loader(rows, bs=16), device="cpu")
    names = {"dls": dls, "model": network(), "criterion": nn.CrossEntropyLoss()}
    names["device_ids"] = ["cpu:0", "cpu:1"]
    run_snippet(SNIPPETS["fastai"][0], names)
    assert len(names["learn"].recorder.losses) > 0


def test_snippet_of_transformers_trains(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    from harness.trainers import language_model, sentences

    monkeypatch.chdir(tmp_path)
    rows = [
        {"input_ids": row["input_ids"][:3], "labels": row["input_ids"][:3]}
        for row in sentences(24)
    ]
    names = {"model": language_model(), "dataset": rows}
    names["device_ids"] = ["cpu:0", "cpu:1"]
    title = "transformers, TRL, sentence-transformers"
    run_snippet(SNIPPETS[title][0], names)
    assert names["trainer"].state.global_step == 3
