"""Snippets of the guide's pages run, say what the page says, and give the whole batch's gradient.

Pages of many recipes have tests of their own: batches, recipes, tasks, other loops.
"""

from __future__ import annotations

import copy
import re
from functools import partial

import pytest
import torch
from helpers.models import CLASSES, FEATURES, mlp
from helpers.oracle import (
    assert_close,
    assert_gradients,
    assert_step,
    build,
    gradients,
    randint,
    randn,
)
from helpers.pages import assert_whole_batch, blocks, namespace, read, run, sections
from helpers.stock_parallel import gradient
from helpers.trainers import language_model, padded, sentences, sequence_classifier
from helpers.trainers import token_classifier as token_model
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from scatterpar import ScatterOnceParallel

# --- does-it-solve-mine ---

ANSWERS = blocks(read("docs/does-it-solve-mine.md"), "python")


class TwoColumns(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 3)

    def forward(self, one, other):
        return normalize(self.body(one), dim=1), normalize(self.body(other), dim=1)


class Clip(TwoColumns):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, one, other):
        return *super().forward(one, other), self.scale


def answered(number, **names):
    names = namespace() | {"ScatterOnceParallel": ScatterOnceParallel} | names
    run(ANSWERS[number], names)
    return names


@pytest.mark.parametrize("number", [0, 1, 5])
def test_loops_with_one_process(number, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    names, plain = answered(number), namespace()
    plain["criterion"](plain["model"](plain["images"]), plain["labels"]).backward()
    assert_gradients(names["model"], gradients(plain["model"]))
    if number == 0:
        assert names["engine"].last_step.messages["reduce"] == 1
        assert "'replicate': " in capsys.readouterr().out
    elif number == 1:
        assert torch.load("model.pt").keys() == plain["model"].state_dict().keys()


def test_tokens():
    model = build(lambda: nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7)))
    words = randint(7, 9, 6)
    holes = words.masked_fill(torch.arange(6) >= torch.arange(1, 10)[:, None], -100)
    names = answered(2, language_model=model, words=words, padded=holes)
    assert_whole_batch(names, model, words, holes, names["token_loss"])


@pytest.mark.parametrize(
    ("number", "made", "name", "loss"),
    [(3, TwoColumns, "two_columns", "in_batch_negatives"), (4, Clip, "clip", "clip_loss")],
)
def test_contrastive_answers(number, made, name, loss):
    model, columns = build(made), (randn(40, 4), randn(40, 4, seed=2))
    names = answered(number, anchors=columns[0], positives=columns[1], **{name: model})
    assert_whole_batch(names, model, columns, None, names[loss])


def test_no_answer_goes_untested():
    assert len(ANSWERS) == 6


# --- contrastive, with losses of other libraries as they are ---

CONTRASTIVE = blocks(read("docs/contrastive.md"), "python")


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, one, other):
        return self.body(one), self.body(other)


class Texts(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 4)

    def forward(self, tokens):
        return self.embedding(tokens).mean(1)


def contrasted(*parts, dtype=torch.float64):
    """The names of the page, after the snippets that have these words."""
    encoder, model, texts = build(Views), build(lambda: nn.Linear(5, 4)), build(Texts)
    one, other, labels = randn(24, 5, seed=1), randn(24, 5, seed=2), randint(3, 24)
    names = {
        "encoder": encoder,
        "loader": [((one, other), labels)],
        "optimizer": torch.optim.SGD(encoder.parameters(), 0.0),
        "engine": ScatterOnceParallel(model.to(dtype), 3, ["cpu"] * 2),
        "pairs": ScatterOnceParallel(encoder, 3, ["cpu"] * 2),
        "texts": ScatterOnceParallel(texts, 2, ["cpu"] * 2),
        "spread": lambda embeddings, _: (embeddings @ embeddings.T).logsumexp(1).mean(),
        "batches": iter([randint(9, 6, length, seed=length) for length in (3, 5, 4, 7)]),
        "images": randn(24, 5).to(dtype),
        "labels": labels,
        "one": one,
        "other": other,
    }
    for part in parts:
        (block,) = [block for block in CONTRASTIVE if part in block]
        exec(block, names)
    return names


def test_the_first_contrastive_example():
    names = contrasted("def nt_xent", "for (one, other), labels in loader")
    names["engine"].close()
    views = names["one"], names["other"]
    assert_whole_batch(names, names["encoder"], views, None, names["nt_xent"])


def test_texts_of_other_lengths():
    names = contrasted("Rows.from_batches")
    module = names["texts"].module
    expected = names["spread"](torch.cat([module(tokens) for tokens in names["window"]]), None)
    assert_close(names["loss"], expected.detach(), "loss")


@pytest.mark.draws
def test_pytorch_metric_learning():
    pytest.importorskip("pytorch_metric_learning")
    names = contrasted("pytorch_metric_learning", dtype=torch.float32)  # as its own proxies
    engine, batch = names["engine"], (names["images"], names["labels"])
    for criterion in (names["criterion"], names["batch_hard"]):
        assert_step(engine, *batch, criterion, whole_batch=True, relative=1e-4)
    assert names["proxies"].proxies.grad is not None


def test_info_nce():
    pytest.importorskip("info_nce")
    names = contrasted("InfoNCE")
    views = names["one"], names["other"]
    loss = lambda outputs, _: names["info_nce"](*outputs)  # noqa: E731
    assert_whole_batch(names, names["encoder"], views, None, loss)


# --- debug-a-step ---

DEBUG = list(sections("docs/debug-a-step.md").values())


@pytest.fixture
def debugged():
    """``follow(section)`` runs its snippets with these names, and with an engine if asked."""
    images, labels = randn(64, 8), randint(3, 64)
    model = build(lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))
    names = {
        "torch": torch,
        "ScatterOnceParallel": ScatterOnceParallel,
        "model": model,
        "images": images,
        "labels": labels,
        "criterion": lambda scores, labels: cross_entropy(scores, labels),
    }

    def follow(section, with_engine=False):
        if with_engine:
            names["engine"] = ScatterOnceParallel(model, 4, ["cpu"] * 2)
        for code in blocks(DEBUG[section], "python"):
            run(code, names)

    return names, follow


def test_the_error_and_its_notes_are_those_of_the_page(debugged):
    _, follow = debugged
    with pytest.raises(IndexError) as caught:
        follow(0)
    (shown,) = blocks(DEBUG[0], "text")
    said = [f"IndexError: {caught.value}", *caught.value.__notes__]
    assert "\n".join(said) == shown.strip()


def test_a_replay_after_a_step_that_did_not_fail(debugged):
    names, follow = debugged
    follow(1, with_engine=True)
    assert torch.equal(names["output"], names["model"](names["images"][40:48]).detach())
    assert list(names["engine"].plan(64).rows_of(1, 1)) == [*range(40, 48)]


def test_the_row_whose_loss_is_nan(debugged, capsys):
    names, follow = debugged
    names["images"][19, 3] = torch.nan
    follow(2)
    assert "sub-step 2; nothing was changed" in capsys.readouterr().out
    assert names["bad"] == [19]


@pytest.mark.filterwarnings("ignore:Anomaly")
def test_anomaly_detection_and_the_check(debugged, capsys):
    _, follow = debugged
    follow(3, with_engine=True)
    follow(4, with_engine=True)
    assert "only rounding differs" in capsys.readouterr().out


# --- trainer: its table comes out, and its recipes run ---

TRAINER = read("docs/trainer.md")
TABLE = re.findall(
    r"^\| ([a-z ]+) \| (\d+) \| (\d) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", TRAINER, re.M
)
MODELS = {
    "causal language model": (language_model, padded),
    "sequence classifier": (sequence_classifier, partial(padded, kind="classes")),
    "token classifier": (token_model, partial(padded, kind="tokens")),
}


@pytest.mark.draws
@pytest.mark.slow
@pytest.mark.parametrize("row", TABLE, ids=lambda row: "-".join(row[:3]))
def test_the_table_of_trainers(tmp_path, row):
    name, rows, k, *figures = row
    factory, collate = MODELS[name]
    first = partial(
        gradient, folder=tmp_path, model=factory(), data=sentences(int(rows)), collate=collate
    )
    single = first("stock", size=int(rows), k=1)
    for kind, parts, shown in zip(
        ("stock", "data parallel", "scatterpar"), (1, 4, 4), figures, strict=True
    ):
        off = (first(kind, size=8, k=int(k), parts=parts) - single).norm() / single.norm()
        assert float(off) == pytest.approx(float(shown), rel=0.03, abs=1e-12), kind


def test_the_table_of_trainers_is_found():
    assert len(TABLE) == 12


@pytest.mark.parametrize(
    ("title", "package", "relative"),
    [("accelerate", "accelerate", 1e-6), ("Fabric", "lightning_fabric", 2e-3)],
)
def test_the_recipes_for_other_loops(title, package, relative):
    """Beside a plain loop."""
    pytest.importorskip(package)
    code = blocks(sections("docs/trainer.md")[title], "python")[0]
    clips, schedules = "clip_grad_norm_" in code, "scheduler.step()" in code
    model = build(mlp).float()
    twin = copy.deepcopy(model)
    loader = [(randn(9, FEATURES, seed=n).float(), randint(CLASSES, 9, seed=n)) for n in range(3)]
    names = {"model": model, "loader": loader, "criterion": nn.CrossEntropyLoss()}
    optimizers, schedulers = [], []
    for one in (model, twin):
        optimizers.append(torch.optim.SGD(one.parameters(), lr=0.1))
        schedulers.append(torch.optim.lr_scheduler.ConstantLR(optimizers[-1], 0.5, 2))
    if not schedules:
        optimizers[0] = torch.optim.SGD(model.parameters(), lr=0.05)
    names |= {"optimizer": optimizers[0], "scheduler": schedulers[0]}
    for inputs, targets in loader:
        optimizers[1].zero_grad()
        cross_entropy(twin(inputs), targets).backward()
        if clips:
            nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        optimizers[1].step()
        if schedules:
            schedulers[1].step()
    names["device_ids"] = ["cpu:0", "cpu:1"]
    exec(code, names)
    names["engine"].close()
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(parameter.detach(), other.detach(), "parameter", relative)
