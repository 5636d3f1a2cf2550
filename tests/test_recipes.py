"""Each recipe of docs/recipes.md runs, and leaves what plain torch leaves without scatterpar."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path

import pytest
import torch
from helpers.oracle import assert_close, assert_gradients, build, randint, randn, whole_batch
from helpers.pages import World, blocks, sections
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import scatterpar

RECIPES = {title: blocks(text, "python") for title, text in sections("docs/recipes.md").items()}
DEVICE_IDS = ["cpu:0", "cpu:1"]
ROWS = 25  # batches of 16 and 9


def classifier():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


class TwoParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(4, 6), nn.Tanh()), nn.Linear(6, 3)

    def forward(self, images):
        return self.head(self.body(images))


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.classes, self.sizes = nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, images):
        return self.classes(images), self.sizes(images)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, images, depth):
        return self.linear(images * depth)


class LanguageModel(nn.Module):
    """Its loss is over the following words, as in transformers."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(7, 5), nn.Linear(5, 7)

    def forward(self, input_ids, labels):
        logits = self.head(self.words(input_ids))
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


class Recipe(World):
    """What the recipes take for granted."""

    def __init__(self, model, dtype=torch.float64, **more):
        images, labels = randn(ROWS, 4, dtype=dtype), randint(3, ROWS)
        model = model.to(dtype)
        super().__init__(
            RECIPES,
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            criterion=nn.CrossEntropyLoss(),
            loader=list(zip(images.split(16), labels.split(16), strict=True)),
            images=images,
            labels=labels,
            **more,
        )


def plain_loop(world, autocast=None, scaler=None, clip=None, schedule=None, average=None):
    """The same training without the engine."""
    model = world["model"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = schedule and schedule(optimizer)
    for images, labels in world["loader"]:
        optimizer.zero_grad()
        with torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext():
            loss = world["criterion"](model(images), labels)
        (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.unscale_(optimizer)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer) if scaler else optimizer.step()
        if scaler:
            scaler.update()
        if schedule:
            schedule.step()
        if average:
            average.update_parameters(model)


def assert_same_weights(ours, theirs, relative=1e-10):
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert_close(one.detach(), other.detach(), "parameter", relative)


def cosine(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)


LOOPS = {
    "Mixed precision (bfloat16)": (
        torch.float32,
        lambda: {"autocast": torch.bfloat16},
        5e-3,
    ),
    "Mixed precision (float16), with a scaler and clipping": (
        torch.float32,
        lambda: {
            "autocast": torch.float16,
            "scaler": torch.amp.GradScaler("cpu"),
            "clip": 1.0,
        },
        1e-3,
    ),
    "Clipping without a scaler": (torch.float64, lambda: {"clip": 1.0}, 1e-10),
    "Learning-rate schedules": (torch.float64, lambda: {"schedule": cosine}, 1e-10),
    "Batches that do not fit": (torch.float64, dict, 1e-10),
}


@pytest.mark.parametrize("title", LOOPS)
def test_a_loop_ends_at_the_weights_of_the_plain_one(title):
    dtype, how, relative = LOOPS[title]
    ours = Recipe(build(classifier), dtype).follow(title)
    theirs = Recipe(build(classifier), dtype)
    plain_loop(theirs, **how())
    assert_same_weights(ours["model"], theirs["model"], relative)
    with pytest.raises(AssertionError, match="parameter: off"):
        assert_same_weights(ours["model"], build(classifier).to(dtype), relative)


def test_averaged_weights():
    ours, theirs = Recipe(build(classifier)), Recipe(build(classifier))
    average = AveragedModel(
        theirs["model"], multi_avg_fn=get_ema_multi_avg_fn(0.999), use_buffers=True
    )
    ours.follow("Averaged weights (EMA)")
    plain_loop(theirs, average=average)
    assert_same_weights(ours["average"], average)


def test_several_optimizers():
    ours, plain = Recipe(build(classifier), two_parts=build(TwoParts)), build(TwoParts)
    body = torch.optim.SGD(plain.body.parameters(), lr=0.1, momentum=0.9)
    head = torch.optim.AdamW(plain.head.parameters(), lr=1e-3)
    for images, labels in ours["loader"]:
        plain.zero_grad()
        cross_entropy(plain(images), labels).backward()
        body.step()
        head.step()
    ours.follow("Several optimizers")
    assert_same_weights(ours["two_parts"], plain)


class Trained(Recipe):
    """A run that is saved and resumed: dropout, a shuffled loader, everything that changes."""

    def __init__(self, epochs):
        net = build(lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)))
        super().__init__(net, epochs=epochs, shuffle=torch.Generator())
        dataset = TensorDataset(self["images"], self["labels"])
        self["loader"] = DataLoader(dataset, 16, shuffle=True, generator=self["shuffle"])
        self["scheduler"] = cosine(self["optimizer"])
        self["scaler"] = torch.amp.GradScaler("cpu")
        self["engine"] = scatterpar.ScatterOnceParallel(net, 2, DEVICE_IDS)


def test_the_optimizers_state_on_all_cards(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ours, plain = Recipe(build(classifier)), build(classifier)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-4, weight_decay=0.1)
    for images, labels in ours["loader"]:
        optimizer.zero_grad()
        cross_entropy(plain(images), labels).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
    ours.follow("The optimizer's state on all GPUs")
    assert_same_weights(ours["model"], plain)
    optimizer.load_state_dict(torch.load("optimizer.pt"))


@pytest.mark.draws
def test_resumed_is_the_same_as_uninterrupted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    whole = Trained(epochs=4).follow("Save and resume")
    Path("checkpoint.pt").rename("whole.pt")
    torch.manual_seed(0)
    Trained(epochs=2).follow("Save and resume")
    torch.manual_seed(5)  # another process
    resumed = Trained(epochs=4).follow("Save and resume")
    assert resumed["start"] == 2
    for name, tensor in whole["model"].state_dict().items():
        assert torch.equal(tensor, resumed["model"].state_dict()[name]), name
    assert sorted(path.name for path in Path().iterdir()) == ["checkpoint.pt", "whole.pt"]


@pytest.mark.draws
def test_your_own_dataset():
    names = Recipe(build(classifier), features=randn(ROWS, 4)).follow("Your own Dataset")
    assert len(names["loader"]) == 2
    assert names["loss"].isfinite()
    assert not torch.equal(names["model"][0].weight, build(classifier)[0].weight)


def test_several_inputs():
    model, depth = build(TwoInputs), randn(ROWS, 4, seed=3)
    names = Recipe(model, depth=depth)
    expected, gradients = whole_batch(
        model, (names["images"], depth), names["labels"], nn.CrossEntropyLoss()
    )
    names.follow("Several inputs: tuples and mappings")
    assert_close(names["loss"], expected, "loss")
    assert_close(names["again"], expected, "loss")
    assert_gradients(model, {name: 2 * gradient for name, gradient in gradients.items()})


def test_the_model_computes_the_loss_itself():
    model, ids = build(LanguageModel), randint(7, 5, 6)
    padding = torch.arange(6) >= torch.tensor([6, 3, 5, 2, 4])[:, None]
    names = Recipe(build(classifier), language_model=model, ids=ids, padding=padding)
    batch = {"input_ids": ids, "labels": ids.masked_fill(padding, -100)}
    names.follow("The model computes the loss itself")
    names.assert_whole_batch(model, batch)


def test_several_losses_in_one_criterion():
    model, sizes = build(TwoHeads), randn(ROWS, 2, seed=4)
    given = {"two_heads": model, "sizes": sizes, "cross_entropy": cross_entropy}
    names = Recipe(build(classifier), mse_loss=mse_loss, **given)
    names.follow("Several losses in one criterion")
    targets = {"class": names["labels"], "size": sizes}
    names.assert_whole_batch(model, names["images"], targets, names["both"])


def test_evaluation():
    model = build(classifier)
    names = Recipe(model)
    names["engine"] = scatterpar.ScatterOnceParallel(model, 2, DEVICE_IDS)
    names.follow("Evaluation")
    right = (model(randn(ROWS, 4)).argmax(1) == randint(3, ROWS)).sum()
    assert names["right"] == right
    assert model.training


@pytest.mark.parametrize(
    ("title", "times"),
    [
        ("Keep the outputs of a step", 1),
        ("Unequal GPUs", 1),
        ("Compiled models", 1),
        ("Watch what a step did", 1),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_step_has_the_gradient_of_all_rows(title, times, capsys):
    model = build(classifier)
    names = Recipe(copy.deepcopy(model))
    names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.0)
    images, labels = names["images"], names["labels"]
    expected, gradients = whole_batch(model, images, labels, nn.CrossEntropyLoss())
    names.follow(title)
    assert_gradients(names["model"], gradients)
    assert names["engine"].last_step.loss == pytest.approx(float(expected))
    assert ("print(" in RECIPES[title][0]) == bool(capsys.readouterr().out)


def test_freezing_and_thawing():
    model = build(TwoParts)
    names = Recipe(build(classifier), two_parts=copy.deepcopy(model))
    names.follow("Freezing and unfreezing parts")
    images, labels = names["images"], names["labels"]
    _, gradients = whole_batch(model, images, labels, nn.CrossEntropyLoss())
    expected = {name: g * (2 if "head" in name else 1) for name, g in gradients.items()}
    assert_gradients(names["two_parts"], expected)


def test_half_precision_parameters():
    half = build(classifier).bfloat16()
    names = Recipe(build(classifier), half=half)
    names.follow("Half-precision parameters")
    images, labels = names["images"].bfloat16(), names["labels"]
    _, gradients = whole_batch(half, images, labels, nn.CrossEntropyLoss())
    assert_gradients(half, gradients, relative=2e-2)


def test_no_recipe_goes_untested():
    source = Path(__file__).read_text(encoding="utf-8")
    for title in RECIPES:
        assert f'"{title}"' in source, title
