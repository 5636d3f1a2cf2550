"""The models that `--model` names, and the weights of a run."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

from scatterpar.train.command_line import UsageError
from scatterpar.train.libraries import library
from scatterpar.train.models import build_model, load_model
from scatterpar.train.records import save

pytestmark = pytest.mark.draws

GREY = (1, 28, 28)


class Zoo:
    """Models of a user's."""

    colour = lambda num_classes: nn.Sequential(  # noqa: E731
        nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(num_classes)
    )
    plain = lambda: nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 10))  # noqa: E731
    failing = mock.Mock(side_effect=RuntimeError("no\nluck"))
    dictionary = dict
    wrong = lambda: nn.Linear(3, 10)  # noqa: E731
    flat = lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 3))  # noqa: E731


@pytest.mark.parametrize(("name", "classes"), [("colour", 7), ("plain", 10)])
def test_callable_gets_number_of_classes(name, classes):
    """And grey images as colour, if it takes colour."""
    model = build_model(f"{__name__}:Zoo.{name}", GREY, classes)
    assert model.training
    assert model(torch.zeros(2, *GREY, dtype=torch.uint8)).shape == (2, classes)


@pytest.mark.pictures
def test_timm_model_takes_grey_images():
    model = build_model("timm:test_vit", (1, 32, 32), 7)  # for grey images of that size
    assert model.network.patch_embed.proj.in_channels == 1
    assert model.network.pos_embed.shape[1] == 1 + 2 * 2


@pytest.mark.pictures
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("timm:resnet1", "timm has no model resnet1; did you mean .*timm:resnet18"),
        ("timm:ResNet5O", "did you mean .*timm:resnet50"),
        ("timm:qqqqqqqq", r"timm has no model qqqqqqqq \(with"),
        (
            "torchvision.models:resnet-34",
            "no attribute .*; did you mean timm:resnet34,",
        ),
        ("torchvision.models:alexnt", "did you mean torchvision.models:alexnet"),
        ("resnet1", "package.module:callable; did you mean .*timm:resnet18"),
        ("resnet-18", r"did you mean timm:resnet18,"),
        ("microsoft/ResNet-18", r"did you mean timm:resnet18,"),
        ("timm.resnet18", r"did you mean timm:resnet18,"),
        ("torchvision.resnet18", r"did you mean timm:resnet18,"),
        ("vit_b16", r"did you mean torchvision.models:vit_b_16,"),
        ("torchvision:resnet18", "no attribute .*; did you mean timm:resnet18,"),
        ("torchvision.model:vit-b-32", "did you mean torchvision.models:vit_b_32,"),
        ("torchvision.efficientnet-b0", "did you mean timm:efficientnet_b0,"),
        ("nothing", r"package.module:callable \(with an image"),
    ],
)
def test_near_name_answered_with_right_ones(name, words):
    with pytest.raises(UsageError, match=f"^--model {name}: .*{words}"):
        build_model(name, (3, 32, 32), 10)


@pytest.mark.pictures
@pytest.mark.parametrize(("shape", "channels"), [(GREY, 1), ((3, 28, 28), 3)])
def test_pretrained_weights_set_pixel_scale(shape, channels):
    """No network: what timm is asked for is looked at."""
    models = library("timm.models")
    net = models.create_model("test_resnet", num_classes=7, in_chans=channels)
    with mock.patch.object(models, "create_model", return_value=net) as create:
        model = build_model("timm:test_resnet", shape, 7, pretrained=True)
    assert create.call_args.kwargs["pretrained"]
    made = torch.tensor(net.pretrained_cfg["mean"]) * 255
    torch.testing.assert_close(model.mean.mean(), made.mean())
    assert model.mean.numel() == channels


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("zoo:", "neither cnn nor timm:NAME nor package.module:callable"),
        ("cnm", r"package.module:callable; did you mean cnn\?"),
        ("no_such_zoo:net", "No module named 'no_such_zoo'"),
        (f"{__name__}:absent", "has no attribute 'absent'"),
        (f"{__name__}:zoo", f"did you mean {__name__}:Zoo"),
        (f"{__name__}:Zoo.failing", "RuntimeError: no luck"),
        (f"{__name__}:Zoo.dictionary", "ValueError: no signature found"),
        (f"{__name__}:Zoo.wrong", r"RuntimeError: .*\(with an image \(1, 28, 28\)\)"),
        (
            f"{__name__}:Zoo.flat",
            r"a score for each of 10 classes; of one image it makes \(1, 3\)",
        ),
    ],
    ids=[
        "no name",
        "near name",
        "no file",
        "absent",
        "near attribute",
        "failing",
        "dictionary",
        "wrong",
        "flat",
    ],
)
def test_wrong_model_refused_in_one_line(name, words):
    with pytest.raises(UsageError, match=f"^--model {name}.*{words}") as caught:
        build_model(name, GREY, 10)
    assert "\n" not in str(caught.value)


def test_checkpoint_loaded_in_eval_mode(tmp_path):
    model = build_model("cnn", GREY, 3, [100.0], [50.0])
    about = {"model": "cnn", "image_shape": list(GREY), "class_names": ["a", "b", "c"]}
    about |= {"mean": [100.0], "std": [50.0]}
    save(tmp_path / "best.pt", model=model.network.state_dict(), about=about)
    images = torch.randint(256, (4, *GREY), dtype=torch.uint8)
    expected = model.eval()(images)
    with pytest.raises(TypeError, match="float32, and the model takes bytes"):
        model(images / 255)
    for path in (tmp_path, str(tmp_path / "best.pt")):
        loaded, found = load_model(path)
        assert not loaded.training
        assert found["class_names"] == ["a", "b", "c"]
        assert torch.equal(loaded(images), expected)
