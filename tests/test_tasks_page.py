"""Each task of docs/tasks.md runs, and leaves what plain torch leaves without scatterpar."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.oracle import assert_close, assert_gradients, build, randint, randn, whole_batch
from helpers.pages import World, blocks, sections
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, softplus
from torch.utils.data import TensorDataset

from scatterpar import ScatterOnceParallel

TASKS = {title: blocks(text, "python") for title, text in sections("docs/tasks.md").items()}
ROWS = 9


def world(**names):
    return World(
        TASKS, nn=nn, cross_entropy=cross_entropy, mse_loss=mse_loss, dtype=torch.float64, **names
    )


def linear(rows=4, columns=3):
    return build(lambda: nn.Sequential(nn.Linear(rows, 5), nn.Tanh(), nn.Linear(5, columns)))


def test_segmentation():
    title = "Segmentation with a Dice loss"
    images, masks = randn(ROWS, 1, 6, 6), randint(2, ROWS, 1, 6, 6).double()
    for number, loss in enumerate(("dice", "batch_dice")):
        model = build(lambda: nn.Conv2d(1, 1, 3, padding=1))
        names = world(images=images, masks=masks, model=model)
        names["engine"] = ScatterOnceParallel(model, 2, names["device_ids"])
        names.follow(title, number)
        names.assert_whole_batch(model, images, masks, names[loss])


def test_dice_and_cross_entropy_over_labelled_pixels():
    """Images without a labelled pixel among them; the oracle has means, where the page has sums."""
    images, masks = randn(ROWS, 1, 6, 6), randint(3, ROWS, 6, 6)
    masks[2], masks[5, :4] = -100, -100
    model = build(lambda: nn.Conv2d(1, 3, 3, padding=1))
    plain = copy.deepcopy(model)
    names = world(images=images, masks=masks, model=model)
    names["engine"] = ScatterOnceParallel(model, 2, names["device_ids"])
    names.follow("Segmentation with a Dice loss", 2)
    scores = plain(images)
    dice = []
    for image, mask in zip(scores, masks, strict=True):
        at = mask != -100
        filled = image.softmax(0)[:, at]
        wanted = torch.stack([mask[at] == kind for kind in range(3)]).double()
        ratio = (2 * (filled * wanted).sum(1) + 1) / (filled.sum(1) + wanted.sum(1) + 1)
        dice.append(1 - ratio.mean())
    loss = torch.stack(dice).mean() + cross_entropy(scores, masks)
    loss.backward()
    assert_close(names["loss"], loss.detach(), "loss")
    assert_gradients(model, {name: p.grad for name, p in plain.named_parameters()})


def test_a_batch_dice_is_refused_without_the_whole_batch():
    images, masks = randn(ROWS, 1, 6, 6), randint(2, ROWS, 1, 6, 6).double()
    model = build(lambda: nn.Conv2d(1, 1, 3, padding=1))
    names = world(images=images, masks=masks, model=model)
    names["engine"] = ScatterOnceParallel(model, 2, names["device_ids"])
    names.follow("Segmentation with a Dice loss", 1)
    with (
        ScatterOnceParallel(model, 2, names["device_ids"]) as engine,
        pytest.raises(ValueError, match="whole_batch=True"),
    ):
        engine.forward_backward(images, masks, names["batch_dice"])


def test_texts_of_unequal_lengths(capsys):
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(10, 4, padding_idx=0), nn.Linear(4, 3)

        def forward(self, ids):
            return self.head(self.words(ids).tanh().sum(1))

    texts = [randint(9, 1 + 7 * row % 5, seed=row) + 1 for row in range(ROWS)]
    model, labels = build(Reader), randint(3, ROWS)
    names = world(texts=texts, labels=labels, model=model)
    names.follow("Texts of unequal lengths")
    padded = names["pad"](texts)
    names.assert_whole_batch(model, padded, labels, cross_entropy)
    assert_close(names["scores"], model(padded).detach(), "scores")
    assert "9 rows on 2 replicas, by cost" in capsys.readouterr().out


@pytest.mark.draws
def test_a_gan():
    title, pictures = "A GAN: two models, two optimizers", [randn(ROWS, 4), randn(5, 4, seed=2)]

    def play(follow):
        generator, critic = linear(4, 4), linear(4, 1)
        first = torch.optim.SGD(generator.parameters(), lr=0.1)
        second = torch.optim.SGD(critic.parameters(), lr=0.1)
        torch.manual_seed(0)
        follow(generator, critic, first, second)
        return [*generator.parameters(), *critic.parameters()]

    def ours(generator, critic, first, second):
        names = world(generator=generator, critic=critic, pictures=pictures)
        names.update(generator_optimizer=first, critic_optimizer=second)
        names.follow(title)

    def theirs(generator, critic, first, second):
        for images in pictures:
            second.zero_grad()
            made = generator(torch.randn(len(images), 4, dtype=torch.float64)).detach()
            (softplus(-critic(images)) + softplus(critic(made))).mean().backward()
            second.step()
            first.zero_grad()
            made = generator(torch.randn(len(images), 4, dtype=torch.float64))
            softplus(-critic(made)).mean().backward()
            first.step()

    for one, other in zip(play(ours), play(theirs), strict=True):
        assert_close(one.detach(), other.detach(), "parameter")


@pytest.mark.draws
def test_a_frozen_model_of_a_gan_does_not_travel():
    critic, generator = linear(4, 1), linear(4, 4)
    names = world(generator=generator, critic=critic, pictures=[randn(ROWS, 4)] * 2)
    for name, model in (("generator", generator), ("critic", critic)):
        names[f"{name}_optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    names.follow("A GAN: two models, two optimizers")
    moved = names["engine"].last_step.bytes  # of the generator's turn
    assert moved["reduce"] == sum(p.nbytes for p in generator.parameters())
    assert moved["replicate"] == sum(p.nbytes for p in critic.parameters())


def test_policy_gradients():
    policy = linear()
    names = world(policy=policy, observations=randn(ROWS, 4), actions=randint(3, ROWS))
    names["returns"] = randn(ROWS, seed=3)
    names.follow("Policy gradients")
    batch = names["observations"], names["targets"]
    names.assert_whole_batch(policy, *batch, names["policy_loss"])


def test_detection():
    detector = linear(4, 4)
    found = [{"boxes": randn(n, 4, seed=n)} for n in (1, 3, 0, 2, 5, 1, 0, 0, 2)]
    names = world(detector=detector, images=randn(ROWS, 4), found=found)
    names.follow("Detection: a varying number of boxes per image")
    names.assert_whole_batch(detector, names["images"], found, names["box_loss"])


class Recurrent(nn.Module):
    """A cell that carries its state from one call to the next."""

    def __init__(self):
        super().__init__()
        self.words, self.cell, self.head = nn.Embedding(7, 5), nn.GRUCell(5, 6), nn.Linear(6, 7)

    def forward(self, words, state):
        scores = []
        for step in self.words(words).unbind(1):
            state = self.cell(step, state)
            scores.append(self.head(state))
        return torch.stack(scores, 1), state


def test_truncated_backpropagation():
    network, text = build(Recurrent), randint(7, ROWS, 13)
    other = copy.deepcopy(network)
    names = world(network=network, text=text)
    names["optimizer"] = torch.optim.SGD(network.parameters(), lr=0.1)
    names.follow("Truncated backpropagation through time")
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    state = torch.zeros(ROWS, 6, dtype=torch.float64)
    for start in range(0, 12, 4):
        optimizer.zero_grad()
        output = other(text[:, start : start + 4], state)
        names["next_words"](output, text[:, start + 1 : start + 5]).backward()
        state = output[1].detach()
        optimizer.step()
    for one, plain in zip(network.parameters(), other.parameters(), strict=True):
        assert_close(one.detach(), plain.detach(), "parameter")


def test_a_teacher():
    student, teacher = linear(), build(lambda: nn.Linear(4, 3))
    names = world(student=student, teacher=teacher, images=randn(ROWS, 4))
    names.follow("A teacher, and perceptual losses")
    images = names["images"]
    names.assert_whole_batch(student, images, teacher(images).detach(), mse_loss)


@pytest.mark.draws
def test_resumed_in_the_middle_of_an_epoch():
    dataset = TensorDataset(randn(30, 4), randint(3, 30))

    def start():
        model = linear()
        names = world(model=model, dataset=dataset)
        names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return names

    title = "Save and resume within an epoch"
    saved = copy.deepcopy(start().follow(title)["saved"])
    assert saved["at"]["done"] == 16
    again = start().follow(title)  # another process: its own first steps are undone by the loading
    again["model"].load_state_dict(saved["model"])
    again["optimizer"].load_state_dict(saved["optimizer"])
    vars(again["sampler"]).update(saved["at"])
    with ScatterOnceParallel(again["model"], 2, again["device_ids"]) as again["engine"]:
        again["train"](again["sampler"], steps=99)
    assert (again["sampler"].epoch, again["sampler"].done) == (1, 0)
    plain = linear()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    for rows in order.split(8):
        optimizer.zero_grad()
        cross_entropy(plain(dataset.tensors[0][rows]), dataset.tensors[1][rows]).backward()
        optimizer.step()
    for one, other in zip(again["model"].parameters(), plain.parameters(), strict=True):
        assert_close(one.detach(), other.detach(), "parameter")


def test_long_sequences():
    layers = build(lambda: nn.ModuleList([nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)]))
    plain = nn.Sequential(*copy.deepcopy(layers))
    names = world(layers=layers, sequences=randn(ROWS, 6, 4), wanted=randn(ROWS, 6, 4, seed=2))
    names.follow("Long sequences with checkpointing")
    expected, gradients = whole_batch(plain, names["sequences"], names["wanted"], mse_loss)
    assert_close(names["loss"], expected, "loss")
    assert_gradients(nn.Sequential(*layers), gradients)


def test_no_task_goes_untested():
    with open(__file__, encoding="utf-8") as source:
        text = source.read()
    for title in TASKS:
        assert f'"{title}"' in text, title
