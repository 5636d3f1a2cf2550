"""Built-in networks, names of models, optimizers and devices."""

import sys
import types

import pytest
import torch
from torch import nn

from scatterpar.train.data import library
from scatterpar.train.models import SmallCNN, build_model
from scatterpar.train.options import UsageError, parse
from scatterpar.train.training import choose_devices, make_optimizer

pytestmark = pytest.mark.draws
GREY = (1, 28, 28)


def test_the_built_in_model_takes_any_size_from_8():
    for shape in (GREY, (3, 33, 40), (3, 8, 8)):
        assert SmallCNN(shape, 7)(torch.zeros(2, *shape)).shape == (2, 7)
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


@pytest.mark.parametrize(
    ("gpus", "given", "chosen"),
    [
        (0, None, ["cpu:0", "cpu:1"]),
        (2, None, ["cuda:0", "cuda:1"]),
        (2, "cuda:1, cpu", ["cuda:1", "cpu"]),
        (2, "cuda:2", r"^--devices: cuda:2 is not here \(2 cuda devices are"),
    ],
)
def test_each_device_has_a_replica(monkeypatch, gpus, given, chosen):
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: gpu)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: gpus)
    if isinstance(chosen, list):
        assert [str(d) for d in choose_devices(given)] == chosen
    else:
        with pytest.raises(UsageError, match=chosen):
            choose_devices(given)
