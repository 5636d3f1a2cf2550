"""The models that `--model` names, how they are tried, and the weights they start from."""

from __future__ import annotations

import collections
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from scatterpar.train.command_line import Options, UsageError
from scatterpar.train.data import DataPart, Source
from scatterpar.train.libraries import library
from scatterpar.train.models import build_model, load_model, start_model
from scatterpar.train.records import save

pytestmark = pytest.mark.draws

GREY = (1, 28, 28)
COLOUR = (3, 32, 32)


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


Outputs = collections.namedtuple("Outputs", "logits aux")


class Auxiliary(nn.Module):
    """Has a second output in training, as GoogLeNet and Inception."""

    kind = Outputs

    def __init__(self, num_classes):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.LazyBatchNorm1d(), nn.Dropout())
        self.head = nn.LazyLinear(num_classes)

    def forward(self, images):
        scores = self.head(self.body(images))
        return self.kind(scores, scores) if self.training else scores


class Mapped(Auxiliary):
    def kind(self, scores, aux):
        return {"logits": scores, "aux": aux}


class Fails(Auxiliary):
    def kind(self, scores, aux):
        raise RuntimeError("kernel size is larger than the input")


def of_pretrained(num_classes, pretrained=False):
    network = nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))
    network.was_pretrained = pretrained
    return network


def source(shape=COLOUR, classes=3):
    rows = torch.arange(2)
    part = DataPart(["a", "b"], rows, rows, ["a", "b"])
    names = [f"class {number}" for number in range(classes)]
    return Source(
        name="x",
        parts={"train": part, "test": part},
        class_names=names,
        image_shape=shape,
    )


def started(images, **options):
    return start_model(Options(**options), images)


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
        ("timm:qqqqqqqq", r"timm has no model qqqqqqqq \(with"),
        (
            "torchvision.models:resnet-34",
            "no attribute .*; did you mean timm:resnet34,",
        ),
        ("torchvision.models:alexnt", "did you mean torchvision.models:alexnet"),
        ("microsoft/ResNet-18", r"did you mean timm:resnet18,"),
        ("torchvision.resnet18", r"did you mean timm:resnet18,"),
        ("vit_b16", r"did you mean torchvision.models:vit_b_16,"),
        ("nothing", r"package.module:callable \(with an image"),
    ],
)
def test_near_name_answered_with_right_ones(name, words):
    with pytest.raises(UsageError, match=f"^--model {name}: .*{words}"):
        build_model(name, COLOUR, 10)


WRONG = {
    "zoo:": "neither cnn nor timm:NAME nor package.module:callable",
    "cnm": r"package.module:callable; did you mean cnn\?",
    "no_such_zoo:net": "No module named 'no_such_zoo'",
    f"{__name__}:absent": "has no attribute 'absent'",
    f"{__name__}:zoo": f"did you mean {__name__}:Zoo",
    f"{__name__}:Zoo.failing": "RuntimeError: no luck",
    f"{__name__}:Zoo.dictionary": "ValueError: no signature found",
    f"{__name__}:Zoo.wrong": r"RuntimeError: .*\(with an image \(1, 28, 28\)",
    f"{__name__}:Zoo.flat": r"for each of 10 classes; of 1 images it makes \(1, 3\)",
}


@pytest.mark.parametrize("name", WRONG, ids=range(len(WRONG)))
def test_wrong_model_refused_in_one_line(name):
    with pytest.raises(UsageError, match=f"^--model {name}.*{WRONG[name]}") as caught:
        build_model(name, GREY, 10)
    assert "\n" not in str(caught.value)


# --- tried in training ---


def test_first_of_several_outputs_is_trained_and_told():
    images = source()
    model = started(images, model=f"{__name__}:Auxiliary")
    assert model.training
    assert images.notes == [
        f"warning: in training {__name__}:Auxiliary has 2 outputs (Outputs), and the "
        "first one is trained alone"
    ]
    scores = model(torch.zeros(4, *COLOUR, dtype=torch.uint8))
    assert scores.shape == (4, 3)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Mapped", "should return a tensor of scores, and returns dict"),
        (
            "Fails",
            "kernel size is larger than the input .*--image-size N sets its side",
        ),
    ],
)
def test_untrainable_output_refused_before_data(name, words):
    with pytest.raises(UsageError, match=words):
        started(source(), model=f"{__name__}:{name}")


def test_trial_leaves_running_statistics():
    model = started(source(), model=f"{__name__}:Auxiliary")
    norm = model.network.body[1]
    assert int(norm.num_batches_tracked) == 0
    assert (norm.running_mean == 0).all()


@pytest.mark.pictures
@pytest.mark.parametrize(("name", "size"), [("googlenet", 96), ("inception_v3", 299)])
@pytest.mark.slow
def test_torchvision_networks_with_auxiliary_heads(name, size):
    images = source((3, size, size))
    started(images, model=f"torchvision.models:{name}")
    assert "and the first one is trained alone" in images.notes[0]


@pytest.mark.pictures
@pytest.mark.slow
def test_fixed_size_of_callable_names_option():
    with pytest.raises(UsageError, match=r"224 .*--image-size N sets its side"):
        started(source(), model="torchvision.models:vit_b_16")


# --- initial weights ---


@pytest.mark.pictures
@pytest.mark.parametrize(("shape", "channels"), [(GREY, 1), ((3, 28, 28), 3)])
def test_pretrained_weights_set_pixel_scale(shape, channels):
    """No network: what timm is asked for is looked at. The last layer starts from zero."""
    models = library("timm.models")
    net = models.create_model("test_resnet", num_classes=3, in_chans=channels)
    images = source(shape)
    with mock.patch.object(models, "create_model", return_value=net) as create:
        model = started(images, model="timm:test_resnet", pretrained=True)
    assert create.call_args.kwargs["pretrained"]
    made = torch.tensor(net.pretrained_cfg["mean"]) * 255
    torch.testing.assert_close(model.mean.mean(), made.mean())
    assert model.mean.numel() == channels
    assert not model.network.fc.weight.any()
    assert images.notes == ["timm:test_resnet starts from its library's weights"]


@pytest.mark.pictures
@pytest.mark.parametrize("wrapped", ["plain", "state_dict", "model", "safetensors"])
def test_weights_of_a_file_except_the_last_layer(tmp_path, wrapped):
    """Of five classes, for three: as torch saves them, timm's train.py, and this tool."""
    network = library("timm.models").create_model("test_resnet", num_classes=5)
    state = network.state_dict()
    path = tmp_path / "weights.pth"
    if wrapped == "safetensors":
        path = tmp_path / "weights.safetensors"
        library("safetensors.torch").save_file(state, path)
    else:
        torch.save(state if wrapped == "plain" else {wrapped: state}, path)
    images = source()
    mean = images.mean.clone()
    model = started(images, model="timm:test_resnet", weights=path)
    assert torch.equal(images.mean, mean)  # that of other runs, too
    assert not torch.equal(model.mean.flatten(), mean)  # timm's for this network
    for name, value in model.network.state_dict().items():
        expected = torch.zeros_like(value) if name.startswith("fc.") else state[name]
        assert torch.equal(value, expected), name
    line = (
        f"starts from the weights in {path}, except fc.weight, fc.bias, which are zero"
    )
    assert images.notes == [line]
    images = source(classes=5)
    model = started(images, model="timm:test_resnet", weights=path)
    assert torch.equal(model.network.fc.weight, state["fc.weight"])
    assert images.notes == [f"starts from the weights in {path}"]


@pytest.mark.pictures
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            {"a": torch.zeros(1)},
            r"lacks \d+ of the \d+ tensors of this network.*first one",
        ),
        (b"<html>", "cannot be read"),
        (None, "there is no file"),
    ],
)
def test_file_of_other_weights_refused(tmp_path, content, words):
    path = tmp_path / "w.pth"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content:
        torch.save(content, path)
    with pytest.raises(UsageError, match=words):
        started(source(), model="timm:test_resnet", weights=path)


def test_pretrained_reaches_a_function_that_has_it():
    model = started(source(), model=f"{__name__}:of_pretrained", pretrained=True)
    assert model.network.was_pretrained
    assert not model.network[1].weight.any()
    words = "functions with a parameter `pretrained`; --weights FILE loads a file"
    with pytest.raises(UsageError, match=words):
        started(source(), model=f"{__name__}:Auxiliary", pretrained=True)


def test_only_one_kind_of_initial_weights():
    with pytest.raises(UsageError, match="exclude each other"):
        started(source(), pretrained=True, weights=Path("w"))


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
        loaded, about_run = load_model(path)
        assert not loaded.training
        assert about_run["class_names"] == ["a", "b", "c"]
        assert torch.equal(loaded(images), expected)
