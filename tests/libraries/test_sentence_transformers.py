"""sentence-transformers' trainers below the mixin, beside the stock ones on one device
with the rows of all devices per call.
"""

from __future__ import annotations

import copy
import random
import re

import pytest
import torch
from harness.oracle import randint, seeded
from harness.pages import example
from harness.pairwise import few_of
from harness.trainers import (
    LAYOUTS,
    QUIET,
    VOCABULARY,
    assert_same_run,
    moved,
    quietly,
    sequence_classifier,
    tokenizer,
)
from torch import nn

pytest.importorskip(
    "sentence_transformers", reason="pip install '.[sentence-transformers]'"
)
datasets = pytest.importorskip("datasets")

import sentence_transformers as st  # noqa: E402
from sentence_transformers import SentenceTransformer  # noqa: E402
from sentence_transformers.cross_encoder import CrossEncoder  # noqa: E402
from sentence_transformers.cross_encoder import losses as pair_losses  # noqa: E402
from sentence_transformers.sentence_transformer import losses  # noqa: E402
from sentence_transformers.sentence_transformer.modules import (  # noqa: E402
    Pooling,
    Transformer,
)

from scatterpar.integrations.transformers import ScatterOnceMixin  # noqa: E402

pytestmark = [pytest.mark.trainers, pytest.mark.draws]
ROWS = 17  # in steps of 12 rows: the last one of an epoch is ragged


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    card = "sentence_transformers.base.model_card.BaseModelCardCallback.on_init_end"
    monkeypatch.setattr(card, lambda *_, **__: None, raising=False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny encoder where its library looks for models: in a folder."""
    folder = tmp_path_factory.mktemp("encoder")
    sequence_classifier(num_labels=1).save_pretrained(folder)
    tokenizer(sep_token="2", cls_token="3").save_pretrained(folder)
    return str(folder)


def encoder(saved):
    with seeded():
        modules = [Transformer(saved), Pooling(8)]
        return SentenceTransformer(modules=modules, device="cpu").double()


def scorer(saved):
    with seeded():
        model = CrossEncoder(saved, num_labels=1, device="cpu").double()
    for head in model.modules():  # which goes down to float32 on its own
        if isinstance(head, nn.Linear) and type(head) is not nn.Linear:
            head.__class__ = nn.Linear
    return model


def words(seed):
    return " ".join(map(str, randint(VOCABULARY, 2 + seed % 5, seed=seed).tolist()))


def data(*names, label=None):
    columns = {}
    for offset, name in enumerate(names):
        columns[name] = [words(1 + offset * 100 + i) for i in range(ROWS)]
    if label is not None:
        columns["label"] = [label(i) for i in range(ROWS)]
    return datasets.Dataset.from_dict(columns)


PAIRS = lambda: data("anchor", "positive")  # noqa: E731
TRIPLES = lambda: data("anchor", "positive", "negative")  # noqa: E731
CLASSES = lambda: data("sentence", label=lambda i: i % 3)  # noqa: E731
SCORED = lambda: data("one", "two", label=lambda i: (i % 4) / 4)  # noqa: E731
BINARY = lambda: data("one", "two", label=lambda i: i % 2)  # noqa: E731

MNRL = losses.MultipleNegativesRankingLoss
CACHED = losses.CachedMultipleNegativesRankingLoss


def softmax(model):
    with seeded():
        return losses.SoftmaxLoss(model, 8, 3)


EMBEDDINGS = {
    "MultipleNegatives": (MNRL, TRIPLES),
    "symmetric": (losses.MultipleNegativesSymmetricRankingLoss, PAIRS),
    "cached": (lambda m: CACHED(m, mini_batch_size=5), PAIRS),
    "Matryoshka": (lambda m: losses.MatryoshkaLoss(m, MNRL(m), [8, 4]), PAIRS),
    "Matryoshka cached": (
        lambda m: losses.MatryoshkaLoss(m, CACHED(m, mini_batch_size=4), [8, 4]),
        PAIRS,
    ),
    "GIST": (lambda m: losses.GISTEmbedLoss(m, moved(copy.deepcopy(m))), PAIRS),
    "BatchAllTriplet": (losses.BatchAllTripletLoss, CLASSES),
    "CoSENT": (losses.CoSENTLoss, SCORED),
    "CosineSimilarity": (losses.CosineSimilarityLoss, SCORED),
    "Softmax": (softmax, lambda: data("one", "two", label=lambda i: i % 3)),
}
SCORES = {
    "BCE": (pair_losses.BinaryCrossEntropyLoss, BINARY),
    "MarginMSE": (
        pair_losses.MarginMSELoss,
        lambda: data(*"qpn", label=lambda i: i / 10),
    ),
    "pairs' cached": (
        lambda m: pair_losses.CachedMultipleNegativesRankingLoss(
            m, num_negatives=2, mini_batch_size=5
        ),
        PAIRS,
    ),
}
QUICK = ["MultipleNegatives", "cached", "CoSENT", "BCE"]


def trained(name, saved, folder, devices):
    if name in SCORES:
        cls, model = st.CrossEncoderTrainer, scorer(saved)
    else:
        cls, model = st.SentenceTransformerTrainer, encoder(saved)
    loss, rows = (EMBEDDINGS | SCORES)[name]
    extra = {}
    if devices:
        cls = type(cls.__name__, (ScatterOnceMixin, cls), {})
        extra["device_ids"] = devices
    # Adam makes large steps of what is only rounding.
    args = cls.training_args_class(
        output_dir=str(folder),
        **QUIET,
        learning_rate=0.1,
        optim="sgd",
        per_device_train_batch_size=3 if devices else 6,
        gradient_accumulation_steps=2,
    )
    with seeded():
        random.seed(0)
        trainer = cls(
            model=model, args=args, train_dataset=rows(), loss=loss(model), **extra
        )
        quietly(trainer.train)
    return trainer


@pytest.mark.parametrize(
    "loss",
    [
        lambda m: losses.AdaptiveLayerLoss(m, MNRL(m)),
        lambda m: losses.Matryoshka2dLoss(m, MNRL(m), [8, 4]),
    ],
    ids=["adaptive layers", "Matryoshka 2d"],
)
def test_losses_that_read_all_layers_raise(loss, saved, tmp_path, monkeypatch):
    """They call ``forward`` itself, whose hooks collect the rows of one replica, or of an
    earlier call: the layers that are drawn decide.

    transformers 5.0.0 has no such hooks. The run equals that of one device.
    """
    monkeypatch.setitem(EMBEDDINGS, "of layers", (loss, PAIRS))
    try:
        ours = trained("of layers", saved, tmp_path, ["cpu:0", "cpu:1"])
    except RuntimeError as error:
        if not re.search("The size of tensor|the graph a second time", str(error)):
            raise
        return
    stock = trained("of layers", saved, tmp_path, None)
    assert_same_run(ours, stock, 1e-6, logged=1e-4)


@pytest.mark.parametrize("layout", few_of(LAYOUTS, ["virtual"]))
@pytest.mark.parametrize("name", few_of([*EMBEDDINGS, *SCORES], QUICK))
def test_run_equals_one_device(name, layout, saved, tmp_path, divided_calls):
    ours = trained(name, saved, tmp_path, LAYOUTS[layout])
    # The loss contains the model: it is computed on the master.
    # This loss replaces ``forward`` by an object that keeps outputs, so parts are divided.
    model = ours.model[0] if name == "Matryoshka" else ours.model
    assert set(divided_calls) == {model}
    stock = trained(name, saved, tmp_path, None)
    assert_same_run(ours, stock, 1e-6, logged=1e-4)
    start = (scorer if name in SCORES else encoder)(saved)
    assert any(
        not torch.equal(value, parameter)
        for value, parameter in zip(
            start.parameters(), ours.model.parameters(), strict=True
        )
    )


@pytest.mark.slow
def test_example_runs_as_it_stands(tmp_path, monkeypatch):
    script = example("embeddings")
    monkeypatch.setattr(
        "sys.argv", ["embeddings.py", "--tiny", "--output", str(tmp_path)]
    )
    quietly(script.main)
