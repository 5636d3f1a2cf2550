"""What a run starts from: the included images, built-in networks, names of models and devices."""

import hashlib
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

import scatterpar.train
from scatterpar.train.data import Split, library, load, make_dataset
from scatterpar.train.models import SmallCNN, build_model
from scatterpar.train.options import UsageError, parse
from scatterpar.train.training import choose_devices, make_optimizer

pytestmark = pytest.mark.draws
GREY = (1, 28, 28)
EMBEDDED = Path(scatterpar.train.__file__).parent / "embedded"
without_accelerator = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="this machine has an accelerator"
)


def test_the_embedded_files_are_the_published_bytes():
    source = (EMBEDDED / "SOURCE.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"`(t10k-\S+\.gz)` \| \d+ \| `([0-9a-f]{64})`", source))
    found = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in EMBEDDED.glob("*.gz")}
    assert found == listed
    assert len(found) == 2
    assert "MIT License" in source
    assert "https://github.com/zalandoresearch/fashion-mnist" in source


def test_the_embedded_data_are_split_and_standardised():
    data = load()
    assert (len(data.train), len(data.test), len(data.class_names)) == (8192, 1808, 10)
    images = data.standardise(data.train.images)
    assert images.shape == (8192, 1, 28, 28)
    assert images.dtype == torch.float32
    assert images.double().mean().item() == pytest.approx(0, abs=1e-5)
    assert images.double().std().item() == pytest.approx(1, abs=1e-5)


def test_statistics_are_those_of_each_channel():
    images = (torch.arange(7 * 3 * 5 * 4) ** 2 % 251).to(torch.uint8).view(7, 3, 5, 4)
    split = Split(images, torch.arange(7))
    data = make_dataset("colours", split, split, ())
    torch.testing.assert_close(data.mean, images.float().mean((0, 2, 3)))
    torch.testing.assert_close(data.std, images.float().std((0, 2, 3), correction=0))


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 33, 40), (3, 8, 8)])
def test_the_built_in_model_takes_any_size_from_8(shape):
    assert SmallCNN(shape, 7)(torch.zeros(2, *shape)).shape == (2, 7)


def test_smaller_images_are_refused():
    with pytest.raises(UsageError, match=r"--model cnn and an image \(1, 7, 28\): RuntimeError"):
        build_model("cnn", (1, 7, 28), 10)


@pytest.fixture
def zoo(monkeypatch):
    """A module `zoo` of the user's, to be filled by the test."""
    module = types.ModuleType("zoo")
    monkeypatch.setitem(sys.modules, "zoo", module)
    return module


def colour_model(num_classes):
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(num_classes))


def test_a_callable_gets_the_number_of_classes_if_it_takes_it(zoo):
    """And grey images as colour, if it takes colour."""
    zoo.colour_model = colour_model
    model = build_model("zoo:colour_model", GREY, 7)
    assert model.training
    assert model(torch.zeros(2, *GREY)).shape == (2, 7)
    plain = lambda: nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 10))  # noqa: E731
    zoo.nets = types.SimpleNamespace(plain=plain)
    assert build_model("zoo:nets.plain", GREY, 10)(torch.zeros(2, *GREY)).shape == (2, 10)


@pytest.mark.pictures
def test_a_model_and_an_optimizer_of_timms(tmp_path):
    model = build_model("timm:test_vit", (1, 32, 32), 7)  # for grey images of that size
    assert model.network.patch_embed.proj.in_channels == 1
    assert model.network.pos_embed.shape[1] == 1 + 2 * 2
    optimizer = make_optimizer(model, parse(["--optimizer", "lamb", "--base-lr", "0.1"]))
    assert type(optimizer).__name__ == "Lamb"
    assert [group["weight_decay"] for group in optimizer.param_groups] == [5e-4, 0.0]
    assert {group["lr"] for group in optimizer.param_groups} == {0.1}
    assert make_optimizer(model, parse([])).param_groups[0]["nesterov"]
    words = r"^--optimizer nonsense: .*not found .*a class of torch.optim, or"
    with pytest.raises(UsageError, match=words):
        make_optimizer(model, parse(["--optimizer", "nonsense"]))


@pytest.mark.pictures
def test_pretrained_weights_come_with_the_pixels_that_they_were_made_with(monkeypatch):
    """No network: what timm is asked for is looked at."""
    asked, create = [], library("timm.models").create_model

    def offline(name, pretrained=False, **options):
        asked.append(pretrained)
        return create(name, **options)

    monkeypatch.setattr(library("timm.models"), "create_model", offline)
    for shape, channels in ((GREY, 1), ((3, 28, 28), 3)):
        model = build_model("timm:test_resnet", shape, 7, pretrained=True)
        made = model.network.pretrained_cfg
        expected = torch.tensor(made["mean"]) * 255
        torch.testing.assert_close(model.mean.mean(), expected.mean())
        assert model.mean.numel() == channels
    assert all(asked)
    with pytest.raises(UsageError, match=r"^--model cnn: --pretrained is for timm:NAME"):
        build_model("cnn", GREY, 7, pretrained=True)


def failing():
    raise RuntimeError("no\nluck")


def unfitting():
    raise RuntimeError("operator torchvision::nms does not exist")


FAULTS = {
    "resnet": (None, "neither cnn nor timm:NAME nor package.module:callable"),
    "zoo:": (None, "neither cnn"),
    "no_such_zoo:net": (None, "ModuleNotFoundError: No module named"),
    "zoo:absent": (None, "AttributeError: .*absent"),
    "zoo:number": (3, "TypeError: 3 is not a callable object"),
    "zoo:failing": (failing, "RuntimeError: no luck"),
    "zoo:unfitting": (unfitting, "this torchvision was built for another torch; .*whl/cpu"),
    "zoo:dictionary": (dict, "AttributeError: 'dict' object has no attribute 'modules'"),
    "zoo:wrong": (lambda: nn.Linear(3, 10), r"and an image \(1, 28, 28\): RuntimeError"),
    "zoo:flat": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 3)),
        r"a score for each of 10 classes, but makes \(1, 3\) of one image",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_name_that_leads_to_no_model_is_one_line(zoo, name):
    value, words = FAULTS[name]
    if value is not None:
        setattr(zoo, name.partition(":")[2], value)
    with pytest.raises(UsageError, match=f"^--model {name}.*{words}") as caught:
        build_model(name, GREY, 10)
    assert "\n" not in str(caught.value)


@without_accelerator
def test_without_accelerator_replicas_are_virtual_devices():
    assert [str(d) for d in choose_devices(None)] == ["cpu:0", "cpu:1"]


@pytest.fixture
def two_gpus(monkeypatch):
    """A machine with two GPUs, as far as choosing goes."""
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: gpu)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("given", "chosen"), [(None, ["cuda:0", "cuda:1"]), ("cuda:1, cpu", ["cuda:1", "cpu"])]
)
def test_with_accelerators_each_has_a_replica(given, chosen):
    assert [str(d) for d in choose_devices(given)] == chosen


@pytest.mark.parametrize(
    ("machine", "given", "words"),
    [
        ("two_gpus", "cuda:2", r"^--devices: cuda:2 is not here \(2 cuda devices are"),
        ("two_gpus", "meta", "meta is not here"),
        (None, "cpu:0,gpu7", r"'gpu7' is not a device: .*; name them like cuda:0,cuda:1"),
        pytest.param(
            *(None, "cuda:0", r"cuda:0 is not here \(visible accelerators: none\)"),
            marks=without_accelerator,
        ),
    ],
)
def test_names_that_are_no_devices_here_are_refused(request, machine, given, words):
    if machine:
        request.getfixturevalue(machine)
    with pytest.raises(UsageError, match=words):
        choose_devices(given)
