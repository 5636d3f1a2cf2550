"""The snippets of docs/other-loops.md: each gradient is that of plain torch."""

from __future__ import annotations

from importlib.util import find_spec
from typing import ClassVar

import pytest
import torch
from faults.processes import run
from harness.models import Of
from harness.oracle import build, randint, randn
from harness.pages import Checked, blocks, read, sections
from harness.pages import run as run_snippet
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import scatterpar
from scatterpar import ScatterOnceParallel, splitcheck

pytestmark = [pytest.mark.loops, pytest.mark.draws]  # loaders draw their seeds
SNIPPETS = {
    t: blocks(text, "python") for t, text in sections("docs/other-loops.md").items()
}
SNIPPETS["first"] = blocks(read("docs/other-loops.md").partition("\n## ")[0], "python")
IMAGES, LABELS = randn(53, 8), randint(3, 53)


def needs(package):
    reason = f"{package} is not installed, see docs/other-loops.md"
    return pytest.mark.skipif(find_spec(package) is None, reason=reason)


def network():
    return build(lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)))


def of_fabric():
    from lightning_fabric import Fabric

    parts = slice(30), slice(30, 53)
    loader = [(IMAGES[part].float(), LABELS[part]) for part in parts]
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    return {"model": network().float(), "loader": loader, "fabric": fabric}


def of_skorch():
    return {"images": IMAGES.numpy(), "labels": LABELS.numpy()}


def of_torch_geometric():
    from torch_geometric.data import Data
    from torch_geometric.nn import GCNConv, global_mean_pool

    def classify(graphs, batch):
        nodes = graphs.body(batch.x, batch.edge_index).tanh()
        return graphs.head(global_mean_pool(nodes, batch.batch))

    dataset = [
        Data(randn(n, 8, seed=n), randint(n, 2, 2 * n, seed=n), y=randint(3, 1, seed=n))
        for n in [3, 8, 5, 4, 6, 7, 3, 5, 8, 4, 6] * 3
    ]
    graphs = build(lambda: Of(classify, body=GCNConv(8, 16), head=nn.Linear(16, 3)))
    return {"model": graphs, "dataset": dataset}


@pytest.fixture(autouse=True)
def casts_of_torch(monkeypatch):
    """fastai replaces a method of all tensors: its casts keep attributes, so that a
    plain tensor of MONAI had the metadata still.
    """
    if "as_subclass" in vars(torch.Tensor):
        monkeypatch.delattr(torch.Tensor, "as_subclass")


def of_monai():
    from monai.data import MetaTensor
    from monai.losses import DiceLoss
    from monai.networks.nets import UNet

    images, labels = randn(11, 1, 16, 16), (randn(11, 1, 16, 16, seed=3) > 0).double()
    pairs = zip(images, labels, strict=True)
    rows = [{"image": MetaTensor(image), "label": label} for image, label in pairs]
    unet = build(lambda: UNet(2, 1, 1, (4, 8), (2,), norm="instance"))
    criterion = DiceLoss(sigmoid=True, batch=True)
    return {"model": unet, "loader": DataLoader(rows, 4), "criterion": criterion}


# Per section: the library, how many steps the snippet takes, and what it takes for
# granted.
LOOPS = {
    "first": ("torch", 1, dict),
    "Fabric": ("lightning_fabric", 2, of_fabric),
    "accelerate": ("accelerate", 4, dict),
    "ignite": ("ignite", 3 * 4, dict),
    "skorch": ("skorch", 3, of_skorch),
    "PyTorch Geometric": ("torch_geometric", 3, of_torch_geometric),
    "MONAI": ("monai", 2 * 3, of_monai),
}


@pytest.mark.parametrize(
    "title",
    [
        pytest.param(title, marks=needs(package))
        for title, (package, *_) in LOOPS.items()
    ],
)
def test_gradients_of_loop_as_plain_torch(title, monkeypatch):
    # for those that import it
    monkeypatch.setattr(scatterpar, "ScatterOnceParallel", Checked)
    _, steps, given = LOOPS[title]
    names = {
        "nn": nn,
        "torch": torch,
        "criterion": nn.CrossEntropyLoss(),
        "model": network(),
    }
    names |= {"images": IMAGES, "labels": LABELS, "ScatterOnceParallel": Checked}
    names |= {"device_ids": ["cpu:0", "cpu:1"], "device": torch.device("cpu")}
    names |= {"loader": DataLoader(TensorDataset(IMAGES, LABELS), 16)} | given()
    start = next(names["model"].parameters()).clone()
    names["optimizer"] = torch.optim.Adam(names["model"].parameters(), 0.02)
    Checked.engines.clear()
    run_snippet(SNIPPETS[title][0], names)
    (engine,) = Checked.engines
    engine.close()
    assert engine.compared == steps
    assert torch.equal(start, next(engine.module.parameters())) == (title == "first")


def in_parts(title, engine_class):
    """A loop of the page for one optimizer step, with parts for its batches."""

    _, _, given = LOOPS[title]

    def step(model, batches):
        names = given()  # its model and loader are replaced below
        names |= {"nn": nn, "torch": torch, "criterion": nn.CrossEntropyLoss()}
        names |= {"device_ids": ["cpu:0", "cpu:1"], "device": torch.device("cpu")}
        names |= {"ScatterOnceParallel": engine_class, "model": model}
        names |= {"loader": DataLoader(batches, batch_size=None)}
        names["optimizer"] = torch.optim.Adam(model.parameters(), 0.02)
        engine_class.made.clear()
        try:
            run_snippet(SNIPPETS[title][0], names)
        finally:
            (engine,) = engine_class.made
            engine.close()

    return step


class Made(ScatterOnceParallel):
    """An engine, which the class keeps in ``made``."""

    made: ClassVar = []

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.made.append(self)


# Per section: the library, and the micro-batches of a step. skorch's loop keeps rows for
# its validation, and so computes another gradient.
STEPS = {
    "Fabric": ("lightning_fabric", 1),
    "accelerate": ("accelerate", 2),
    "ignite": ("ignite", 1),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "title",
    [
        pytest.param(title, marks=needs(package))
        for title, (package, _) in STEPS.items()
    ],
)
def test_optimizer_gets_whole_batch_gradient(title, monkeypatch):
    """After all that the library does with it: dividing, scaling, clipping."""
    # for those that import it
    monkeypatch.setattr(scatterpar, "ScatterOnceParallel", Made)

    def loss(model, batch):
        images, labels = batch
        return nn.functional.cross_entropy(model(images), labels)

    _, parts = STEPS[title]
    splitcheck(
        in_parts(title, Made),
        network(),
        (IMAGES[:52], LABELS[:52]),
        parts=parts,
        equal=True,
        loss=loss,
    ).assert_passed()


class Penalised:
    """What a skorch user writes into ``get_loss``, all of which the stock loop
    passes.
    """

    def get_loss(self, y_pred, y_true, X=None, training=False):
        loss = super().get_loss(y_pred, y_true, X=X, training=training)
        weights = [*self.module_.parameters()]
        inputs = X["x"] if isinstance(X, dict) else X
        loss = loss + 1e-2 * sum(weight.abs().sum() for weight in weights)
        loss = loss + (y_pred.square().mean(1) * inputs[:, 0]).mean()
        return loss + 0.1 * y_pred.square().mean() if training else loss


class Scaled(nn.Module):
    """Its ``forward`` has a parameter that ``fit`` passes, with a row per class."""

    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, x, gain=None):
        logits = self.net(x)
        return logits if gain is None else logits * gain


# Per case: the net's additions, options of the net, X of fit, parameters of fit.
SKORCH = {
    "get_loss": (Penalised, {}, IMAGES.numpy(), {}),
    "dict": (Penalised, {}, {"x": IMAGES.numpy()}, {}),
    "parameters of fit": (
        object,
        {"train_split": None},
        IMAGES.numpy(),
        {"gain": torch.tensor([2.0, 1.0, 0.5])},
    ),
    "class weights": (
        object,
        {"criterion__weight": torch.tensor([1.0, 2.0, 5.0]).double()},
        IMAGES.numpy(),
        {},
    ),
}


@pytest.mark.parametrize("name", SKORCH)
@needs("skorch")
def test_skorch_snippet_trains_as_stock(name, devices):
    import skorch

    additions, options, inputs, fit = SKORCH[name]
    code, *_ = SNIPPETS["skorch"][0].split("class Net(")
    names = {"ScatterOnceParallel": Made, "device_ids": devices(2)}
    exec(code, names)
    bases = [additions, skorch.NeuralNetClassifier]
    if additions is object:
        bases.remove(object)
    Made.made.clear()
    nets = []
    for mixin in ([], [names["ScatterOnceMixin"]]):
        kind = type("Net", (*mixin, *bases), {})
        options_of_all = {"batch_size": 16, "max_epochs": 2, "lr": 0.1, "verbose": 0}
        net = kind(Scaled(), criterion=nn.CrossEntropyLoss, **options_of_all, **options)
        nets.append(net.fit(inputs, LABELS.numpy(), **fit))
    (engine,) = Made.made
    engine.close()
    stock, ours = nets
    for parameter, expected in zip(
        ours.module_.parameters(), stock.module_.parameters(), strict=True
    ):
        torch.testing.assert_close(parameter, expected, rtol=1e-9, atol=1e-12)
    expected_losses = stock.history[:, "train_loss"]
    assert ours.history[:, "train_loss"] == pytest.approx(expected_losses)


@needs("monai")
def test_monai_snippet_fires_events():
    from monai.engines.utils import IterationEvents

    code, *_ = SNIPPETS["MONAI"][0].split("trainer.run()")
    names = {"ScatterOnceParallel": Made, "device_ids": ["cpu:0", "cpu:1"]}
    names |= of_monai() | {"device": torch.device("cpu")}
    names["optimizer"] = torch.optim.SGD(names["model"].parameters(), 0.1)
    Made.made.clear()
    exec(code, names)
    trainer = names["trainer"]
    fired = []

    def record(trainer, name):
        output = trainer.state.output
        if name == "model_completed":  # MONAI has made a list of rows of it
            output = output[0]
        fired.append((name, {*output}))

    for event in IterationEvents:
        trainer.add_event_handler(event, record, event.value)
    trainer.run()
    (engine,) = Made.made
    engine.close()
    before_loss = {"image", "label", "pred"}
    with_loss = before_loss | {"loss"}
    step = [
        ("forward_completed", before_loss),
        ("loss_completed", with_loss),
        ("backward_completed", with_loss),
        ("model_completed", with_loss),
    ]
    assert fired == step * 2 * 3
    assert {*trainer.state.output[0]} == with_loss


@needs("ignite")
def test_ignite_snippet_gives_metrics_predictions():
    from ignite.metrics import Accuracy

    code, *_ = SNIPPETS["ignite"][0].split("trainer.run(")
    model = network()
    names = {"ScatterOnceParallel": Made, "device_ids": ["cpu:0", "cpu:1"]}
    names |= {"model": model, "criterion": nn.CrossEntropyLoss()}
    names |= {"device": torch.device("cpu")}
    names["optimizer"] = torch.optim.SGD(model.parameters(), 0.0)
    Made.made.clear()
    exec(code, names)
    accuracy = Accuracy(lambda output: (output["y_pred"], output["y"]))
    accuracy.attach(names["trainer"], "accuracy")
    loader = DataLoader(TensorDataset(IMAGES, LABELS), 16)
    state = names["trainer"].run(loader)
    (engine,) = Made.made
    engine.close()
    right = model(IMAGES).argmax(1) == LABELS
    assert state.metrics["accuracy"] == pytest.approx(float(right.double().mean()))


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


@needs("ray")
def test_ray_train_snippet_is_exact(tmp_path):
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
    run_script(
        tmp_path,
        path,
        *SNIPPETS["Ray Train, and Monarch"],
        check,
        RAY_USAGE_STATS_ENABLED="0",
    )


@needs("ultralytics")
def test_ultralytics_snippet_is_exact(tmp_path):
    """Two epochs with the statistics of batch normalisation fixed; no test of the
    model.
    """
    from PIL import Image

    for folder in ("images", "labels"):
        (tmp_path / folder).mkdir()
    for i in range(8):
        picture = Image.fromarray(randint(256, 64, 64, 3, seed=i).byte().numpy())
        picture.save(tmp_path / "images" / f"{i}.png")
        (tmp_path / "labels" / f"{i}.txt").write_text(f"{i % 2} 0.5 0.5 0.4 0.3\n")
    data = tmp_path / "data.yaml"
    data.write_text(f"path: {tmp_path}\ntrain: images\nval: images\nnames: [a, b]\n")
    before = """
from harness.optional import import_torchvision_first
import_torchvision_first()
"""
    check = f"""
def fix(trainer):
    for module in trainer.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()

def trained(kind):
    options = dict(model="yolov8n.yaml", data={str(data)!r}, imgsz=64, batch=4, optimizer="SGD")
    options |= dict(epochs=2, device="cpu", workers=0, plots=False, amp=False, val=False)
    trainer = kind(overrides=options | dict(project={str(tmp_path)!r}, name=kind.__name__))
    trainer.add_callback("on_train_batch_start", fix)
    trainer.final_eval, trainer.validate = lambda: None, lambda: (dict(), 0.0)
    trainer.train()
    return trainer.model

model, plain = trained(ScatterOnceTrainer), trained(DetectionTrainer)
for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
    off = (ours - theirs).norm() / theirs.norm().clamp_min(1e-6)
    assert off < 1e-5, (name, off)
"""
    variables = {"YOLO_CONFIG_DIR": str(tmp_path), "YOLO_OFFLINE": "true"}
    run_script(tmp_path, before, *SNIPPETS["ultralytics"], check, **variables)
