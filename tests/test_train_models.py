"""The built-in networks, and the way from a name to a model."""

import sys
import types

import pytest
import torch
from helpers.pictures import needs_timm
from torch import nn

from scatterpar.train.data import UsageError
from scatterpar.train.machines import choose_devices
from scatterpar.train.models import SmallCNN, build_model
from scatterpar.train.options import parse
from scatterpar.train.training import make_optimizer

pytestmark = pytest.mark.draws
GREY = (1, 28, 28)


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


def test_a_callable_gets_the_number_of_classes_and_grey_images_as_colour(zoo):
    zoo.colour_model = colour_model
    model = build_model("zoo:colour_model", GREY, 7)
    assert model.training
    assert model(torch.zeros(2, *GREY)).shape == (2, 7)


def test_a_callable_without_num_classes_is_called_with_nothing(zoo):
    zoo.nets = types.SimpleNamespace(
        plain=lambda: nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 10))
    )
    assert build_model("zoo:nets.plain", GREY, 10)(torch.zeros(2, *GREY)).shape == (2, 10)


@needs_timm
def test_a_model_and_an_optimizer_of_timms(tmp_path):
    model = build_model("timm:test_vit", (1, 32, 32), 7)  # for grey images of that size
    assert model.network.patch_embed.proj.in_channels == 1
    assert model.network.pos_embed.shape[1] == 1 + 2 * 2
    given = ["--optimizer", "lamb", "--layer-decay", "0.5", "--base-lr", "0.1"]
    optimizer = make_optimizer(model, parse(given))
    assert type(optimizer).__name__ == "Lamb"
    rates = sorted({group["lr"] for group in optimizer.param_groups})
    assert rates[-1] == pytest.approx(0.1)
    assert rates[0] == pytest.approx(0.1 * 0.5 ** (len(rates) - 1))
    sgd = make_optimizer(model, parse(["--layer-decay", "0.5"]))
    assert sgd.param_groups[0]["nesterov"]
    with pytest.raises(
        UsageError,
        match=r"^--optimizer nonsense: .*not found .*a class of torch.optim, or",
    ):
        make_optimizer(model, parse(["--optimizer", "nonsense"]))


def failing():
    raise RuntimeError("no\nluck")


FAULTS = {
    "resnet": (None, "neither cnn nor timm:NAME nor package.module:callable"),
    "zoo:": (None, "neither cnn"),
    "no_such_zoo:net": (None, "ModuleNotFoundError: No module named"),
    "zoo:absent": (None, "AttributeError: .*absent"),
    "zoo:number": (3, "TypeError: 3 is not a callable object"),
    "zoo:failing": (failing, "RuntimeError: no luck"),
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


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_without_accelerator_replicas_are_virtual_devices():
    assert [str(d) for d in choose_devices(None)] == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]


@pytest.fixture
def two_gpus(monkeypatch):
    """A machine with two GPUs, as far as choosing goes."""
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: gpu)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)


@pytest.mark.usefixtures("two_gpus")
def test_with_accelerators_each_has_a_replica():
    assert [str(d) for d in choose_devices(None)] == ["cuda:0", "cuda:1"]
    assert [str(d) for d in choose_devices("cuda:1, cpu")] == ["cuda:1", "cpu"]
    with pytest.raises(UsageError, match=r"^--devices: cuda:2 is not here \(2 cuda devices are"):
        choose_devices("cuda:2")
    with pytest.raises(UsageError, match="meta is not here"):
        choose_devices("meta")


def test_names_that_are_no_devices_are_refused():
    with pytest.raises(
        UsageError, match=r"'gpu7' is not a device: .*; name them like cuda:0,cuda:1"
    ):
        choose_devices("cpu:0,gpu7")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(UsageError, match=r"cuda:0 is not here \(visible accelerators: none\)"):
        choose_devices("cuda:0")
