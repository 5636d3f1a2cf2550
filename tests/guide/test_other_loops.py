"""The snippets of docs/other-loops.md, each beside the library's own loop on one device."""

from __future__ import annotations

import socket
from importlib.util import find_spec

import pytest
import torch
from faults.processes import run
from harness.models import Of
from harness.oracle import assert_close, assert_parameters, build, randint, randn
from harness.pages import blocks, read, sections
from harness.pages import run as run_snippet
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from scatterpar import ScatterOnceParallel

pytestmark = [pytest.mark.loops, pytest.mark.draws]  # loaders draw their seeds
SNIPPETS = {t: blocks(text, "python") for t, text in sections("docs/other-loops.md").items()}
IMAGES, LABELS = randn(53, 8), randint(3, 53)


def needs(package):
    reason = f"{package} is not installed, see docs/other-loops.md"
    return pytest.mark.skipif(find_spec(package) is None, reason=reason)


def network():
    return build(lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)))


def given(model, **names):
    """What a snippet takes for granted, around ``model``."""
    data = TensorDataset(IMAGES, LABELS)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    own = {"model": model, "optimizer": optimizer, "loader": DataLoader(data, 16), "nn": nn}
    own |= {"images": IMAGES, "labels": LABELS, "criterion": nn.CrossEntropyLoss(), "torch": torch}
    own |= {"ScatterOnceParallel": ScatterOnceParallel, "device_ids": ["cpu:0", "cpu:1"]}
    return own | {"device": torch.device("cpu")} | names


def follow(title, model, **names):
    """Run a snippet around ``model``. Returns its names."""
    names = given(model, **names)
    run_snippet(SNIPPETS[title][0], names)
    return names


def test_the_first_snippet():
    model, plain = network(), network()
    SNIPPETS[""] = blocks(read("docs/other-loops.md"), "python")
    loss = nn.CrossEntropyLoss()(plain(IMAGES), LABELS)
    assert_close(follow("", model)["loss"].detach(), loss.detach(), "loss")


@needs("lightning_fabric")
def test_fabric():
    model, plain = network().float(), network().float()
    loader = [(IMAGES[part].float(), LABELS[part]) for part in (slice(30), slice(30, 53))]
    ours, stock = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, plain))
    follow("Fabric", model, loader=loader, optimizer=ours)
    for images, labels in loader:
        stock.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(plain(images), labels)
        loss.backward()
        stock.step()
    assert_parameters(model, plain, 2e-3)


@needs("accelerate")
def test_accelerate():
    from accelerate import Accelerator

    model, plain = network(), network()
    follow("accelerate", model)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    names = given(plain)
    _, optimizer, loader = accelerator.prepare(plain, names["optimizer"], names["loader"])
    for images, labels in loader:
        with accelerator.accumulate(plain):
            accelerator.backward(names["criterion"](plain(images), labels))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(plain.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert_parameters(model, plain, 1e-9)


@needs("ignite")
def test_ignite():
    from ignite.engine import create_supervised_trainer

    model, plain = network(), network()
    losses = follow("ignite", model)["trainer"].state.output
    names = given(plain)
    trainer = create_supervised_trainer(plain, names["optimizer"], names["criterion"])
    trainer.run(names["loader"], max_epochs=3)
    assert losses == pytest.approx(trainer.state.output, rel=1e-9)
    assert_parameters(model, plain, 1e-9)


@needs("skorch")
def test_skorch():
    import skorch

    model, plain = network(), network()
    net = follow("skorch", model, images=IMAGES.numpy(), labels=LABELS.numpy())["net"]
    options = {"criterion": nn.CrossEntropyLoss, "batch_size": 64, "max_epochs": 3, "verbose": 0}
    other = skorch.NeuralNetClassifier(plain, **options).fit(IMAGES.numpy(), LABELS.numpy())
    for name in ("train_loss", "valid_loss", "valid_acc"):
        assert net.history[:, name] == pytest.approx(other.history[:, name], rel=1e-9)
    assert_parameters(net.module_, other.module_, 1e-9)
    vars(net)["_engine"].close()


@needs("torch_geometric")
def test_torch_geometric():
    from torch_geometric.data import Batch, Data
    from torch_geometric.nn import GCNConv, global_mean_pool

    def classify(graphs, batch):
        nodes = graphs.body(batch.x, batch.edge_index).tanh()
        return graphs.head(global_mean_pool(nodes, batch.batch))

    def make():
        return Of(classify, body=GCNConv(8, 16), head=nn.Linear(16, 3))

    dataset = [
        Data(randn(n, 8, seed=n), randint(n, 2, 2 * n, seed=n), y=randint(3, 1, seed=n))
        for n in [3, 8, 5, 4, 6, 7, 3, 5, 8, 4, 6] * 3
    ]
    model, plain = build(make), build(make)
    follow("PyTorch Geometric", model, dataset=dataset)
    names = given(plain)
    for start in range(0, len(dataset), 16):
        batch = Batch.from_data_list(dataset[start : start + 16])
        names["optimizer"].zero_grad()
        names["criterion"](plain(batch), batch.y).backward()
        names["optimizer"].step()
    assert_parameters(model, plain, 1e-9)


@needs("monai")
@pytest.mark.parametrize("pooled", [True, False])
def test_monai(pooled):
    from monai.data import MetaTensor
    from monai.engines import SupervisedTrainer
    from monai.losses import DiceLoss
    from monai.networks.nets import UNet

    images, labels = randn(11, 1, 16, 16), (randn(11, 1, 16, 16, seed=3) > 0).double()
    rows = [
        {"image": MetaTensor(image), "label": label}
        for image, label in zip(images, labels, strict=True)
    ]
    model, plain = (build(lambda: UNet(2, 1, 1, (4, 8), (2,), norm="instance")) for _ in "ab")
    own = {"loader": DataLoader(rows, 4), "criterion": DiceLoss(sigmoid=True, batch=pooled)}
    follow("MONAI", model, **own)
    names = given(plain, **own)
    own = {"network": plain, "optimizer": names["optimizer"], "loss_function": names["criterion"]}
    how = {"device": torch.device("cpu"), "max_epochs": 2, "train_data_loader": names["loader"]}
    SupervisedTrainer(**how, **own).run()
    assert_parameters(model, plain, 1e-9)


SCRIPT = """
import torch
from torch import nn
from scatterpar import ScatterOnceParallel

def make_model():
    torch.manual_seed(0)
    return nn.Linear(8, 3).double()

torch.manual_seed(1)
images, labels = torch.randn(23, 8).double(), torch.randint(3, (23,))
criterion, device_ids = nn.CrossEntropyLoss(), ["cpu:0", "cpu:1"]
"""


def run_script(tmp_path, *parts, **variables):
    """Run a script of its own, whose functions may go to other processes."""
    script = tmp_path / "script.py"
    script.write_text("\n".join([SCRIPT, *parts, 'print("all is well")']))
    outcome = run(str(script), GLOO_SOCKET_IFNAME="lo", **variables)
    assert "all is well" in outcome.out, outcome.err


@needs("monarch")
def test_monarch(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    check = """
plain = make_model()
expected = criterion(plain(images), labels)
expected.backward()
for _, (loss, gradients) in found.items():
    assert abs(loss - expected.item()) < 1e-10
    for ours, theirs in zip(gradients, plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs.grad, rtol=1e-10)
"""
    run_script(tmp_path, f"port = {port}", *SNIPPETS["Monarch"], check)


@needs("ray")
def test_ray_train(tmp_path):
    check = """
plain = make_model()
for _ in range(3):
    plain.zero_grad()
    criterion(plain(images), labels).backward()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter -= 0.1 * parameter.grad
for name, ours in torch.load(path).items():
    assert torch.allclose(ours, plain.state_dict()[name], rtol=1e-10)
"""
    path = f"path = {str(tmp_path / 'model.pt')!r}"
    run_script(tmp_path, path, *SNIPPETS["Ray Train"], check, RAY_USAGE_STATS_ENABLED="0")


@needs("ultralytics")
def test_ultralytics(tmp_path):
    """Two epochs with the statistics of batch normalisation fixed; no test of the model."""
    from PIL import Image

    data = tmp_path / "data"
    for kind in ("train", "val"):
        (data / "images" / kind).mkdir(parents=True)
        (data / "labels" / kind).mkdir(parents=True)
        for i in range(8):
            picture = randint(256, 64, 64, 3, seed=i).byte().numpy()
            Image.fromarray(picture).save(data / "images" / kind / f"{i}.png")
            (data / "labels" / kind / f"{i}.txt").write_text(f"{i % 2} 0.5 0.5 0.4 0.3\n")
    (data / "data.yaml").write_text(
        f"path: {data}\ntrain: images/train\nval: images/val\nnames: [a, b]\n"
    )
    before = """
from scatterpar.train.data import library
library("torchvision")  # PyPI's beside torch's CPU build
"""
    check = f"""
def fixed(trainer):
    class Fixed(trainer):
        def _model_train(self):
            super()._model_train()
            for module in self.model.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()

        def final_eval(self):
            pass

        def validate(self):
            return {{}}, 0.0

    return Fixed

def trained(trainer):
    options = dict(model="yolov8n.yaml", data={str(data / "data.yaml")!r}, imgsz=64, batch=4)
    options |= dict(epochs=2, device="cpu", workers=0, plots=False, amp=False, val=False)
    options |= dict(project={str(tmp_path / "runs")!r}, name=trainer.__name__, optimizer="SGD")
    one = fixed(trainer)(overrides=options)
    one.train()
    return one.model

model, plain = trained(ScatterOnceTrainer), trained(DetectionTrainer)
for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
    off = (ours - theirs).norm() / theirs.norm().clamp_min(1e-6)
    assert off < 1e-5, (name, off)
"""
    variables = {"YOLO_CONFIG_DIR": str(tmp_path), "YOLO_OFFLINE": "true"}
    run_script(tmp_path, before, *SNIPPETS["ultralytics"], check, **variables)
