"""sentence-transformers' trainers, beside the stock ones on one device with the rows of
a step.
"""

from __future__ import annotations

import copy
import random
from functools import partial

import numpy
import pytest
import torch
import transformers
from harness.isolation import guarded
from harness.models import Of
from harness.oracle import build, randint, seeded
from harness.pages import example
from harness.pairwise import few_of
from harness.trainers import (
    LAYOUTS,
    QUIET,
    SAME,
    VOCABULARY,
    assert_same_bits,
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
from sentence_transformers.base.evaluation import BaseEvaluator  # noqa: E402
from sentence_transformers.cross_encoder import CrossEncoder  # noqa: E402
from sentence_transformers.cross_encoder import (  # noqa: E402
    evaluation as pair_evaluation,
)
from sentence_transformers.cross_encoder import losses as pair_losses  # noqa: E402
from sentence_transformers.sentence_transformer import (  # noqa: E402
    evaluation as sbert_evaluation,
)
from sentence_transformers.sentence_transformer import losses  # noqa: E402
from sentence_transformers.sentence_transformer.modules import (  # noqa: E402
    Pooling,
    StaticEmbedding,
    Transformer,
)
from sentence_transformers.sparse_encoder import losses as sparse_losses  # noqa: E402
from sentence_transformers.sparse_encoder.modules import SpladePooling  # noqa: E402

from scatterpar import splitcheck  # noqa: E402
from scatterpar.integrations.sentence_transformers import (  # noqa: E402
    ScatterOnceCrossEncoderTrainer,
    ScatterOnceTrainer,
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
        return SentenceTransformer(
            modules=[Transformer(saved), Pooling(8)], device="cpu"
        ).double()


def scorer(saved, **options):
    with seeded():
        model = CrossEncoder(saved, num_labels=1, device="cpu", **options).double()
        for head in model.modules():  # which goes down to float32 on its own
            if isinstance(head, nn.Linear) and type(head) is not nn.Linear:
                head.__class__ = nn.Linear
    return model


def words(seed):
    return " ".join(map(str, randint(VOCABULARY, 2 + seed % 5, seed=seed).tolist()))


def column(offset, count=ROWS):
    return [words(1 + offset * 100 + i) for i in range(count)]


def data(*names, label=None, count=ROWS):
    columns = {name: column(i, count) for i, name in enumerate(names)}
    if label is not None:
        columns["label"] = [label(i) for i in range(count)]
    return datasets.Dataset.from_dict(columns)


PAIRS = lambda: data("anchor", "positive")  # noqa: E731
TRIPLES = lambda: data("anchor", "positive", "negative")  # noqa: E731
CLASSES = lambda: data("sentence", label=lambda i: i % 3)  # noqa: E731
SCORED = lambda: data("one", "two", label=lambda i: (i % 4) / 4)  # noqa: E731
BINARY = lambda: data("one", "two", label=lambda i: i % 2)  # noqa: E731


MNRL = losses.MultipleNegativesRankingLoss
CACHED = losses.CachedMultipleNegativesRankingLoss
LOSSES = {
    "MultipleNegativesRanking": (MNRL, TRIPLES),
    "MNRL symmetric": (losses.MultipleNegativesSymmetricRankingLoss, PAIRS),
    "CachedMNRL": (lambda m: CACHED(m, mini_batch_size=5), PAIRS),
    "Matryoshka": (lambda m: losses.MatryoshkaLoss(m, MNRL(m), [8, 4]), PAIRS),
    "Matryoshka cached": (
        lambda m: losses.MatryoshkaLoss(m, CACHED(m, mini_batch_size=4), [8, 4]),
        PAIRS,
    ),
    "GIST": (lambda m: losses.GISTEmbedLoss(m, moved(copy.deepcopy(m))), PAIRS),
    "MegaBatchMargin": (
        lambda m: losses.MegaBatchMarginLoss(m, mini_batch_size=4),
        PAIRS,
    ),
    "BatchAllTriplet": (losses.BatchAllTripletLoss, CLASSES),
    "BatchHardTriplet": (losses.BatchHardTripletLoss, CLASSES),
    "OnlineContrastive": (losses.OnlineContrastiveLoss, BINARY),
    "CoSENT": (losses.CoSENTLoss, SCORED),
    "AnglE": (losses.AnglELoss, SCORED),
    "CosineSimilarity": (losses.CosineSimilarityLoss, SCORED),
    "Contrastive": (losses.ContrastiveLoss, BINARY),
    "Triplet": (losses.TripletLoss, TRIPLES),
    "Softmax": (
        lambda m: build(lambda: losses.SoftmaxLoss(m, 8, 3)),
        lambda: data("one", "two", label=lambda i: i % 3),
    ),
}


def trained(
    cls, saved, folder, loss, rows, *, size, k=1, model=encoder, options=None, **extra
):
    model = model(saved)
    # Adam makes large steps of what is only rounding
    how = {"learning_rate": 0.1, "optim": "sgd"}
    how |= {"per_device_train_batch_size": size, "gradient_accumulation_steps": k}
    args = cls.training_args_class(
        output_dir=str(folder), **QUIET, **how, **(options or {})
    )
    made = (
        loss(model)
        if callable(loss)
        else {name: one(model) for name, one in loss.items()}
    )
    with seeded():
        random.seed(0)
        trainer = cls(model=model, args=args, train_dataset=rows, loss=made, **extra)
        quietly(trainer.train)
    return trainer


# The pairs of a cross-encoder: what the loss makes of the columns.

LISTS = lambda: datasets.Dataset.from_dict(  # noqa: E731
    {
        "query": column(0),
        "docs": [column(i, 2 + i % 3) for i in range(ROWS)],
        "labels": [[float((i + j) % 2) for j in range(2 + i % 3)] for i in range(ROWS)],
    }
)
PAIR_LOSSES = {
    "BCE": (pair_losses.BinaryCrossEntropyLoss, BINARY),
    "MSE": (pair_losses.MSELoss, SCORED),
    "MarginMSE": (
        pair_losses.MarginMSELoss,
        lambda: data(*"qpn", label=lambda i: i / 10),
    ),
    "MNRL": (
        lambda m: pair_losses.MultipleNegativesRankingLoss(m, num_negatives=2),
        TRIPLES,
    ),
    "CachedMNRL": (
        partial(
            pair_losses.CachedMultipleNegativesRankingLoss,
            num_negatives=2,
            mini_batch_size=5,
        ),
        PAIRS,
    ),
    "Lambda": (pair_losses.LambdaLoss, LISTS),
    "RankNet": (pair_losses.RankNetLoss, LISTS),
    "ListNet": (lambda m: pair_losses.ListNetLoss(m, mini_batch_size=7), LISTS),
    "PListMLE": (pair_losses.PListMLELoss, LISTS),
}


EMBEDDINGS = ScatterOnceTrainer, st.SentenceTransformerTrainer
CROSS_ENCODERS = ScatterOnceCrossEncoderTrainer, st.CrossEncoderTrainer


def ours(saved, folder, loss, rows, *, classes=EMBEDDINGS, layout="virtual", **options):
    """On two replicas, with two batches of three rows for each in a step."""
    options |= {"size": 3, "k": 2, "device_ids": LAYOUTS[layout]}
    return trained(classes[0], saved, folder, loss, rows(), **options)


def both(saved, folder, loss, rows, *, classes=EMBEDDINGS, own=None, **options):
    """Ours, and the stock one with the rows of a step in a batch.

    ``own`` are arguments of ours alone.
    """
    mine = ours(saved, folder, loss, rows, classes=classes, **(own or {}), **options)
    return mine, trained(classes[1], saved, folder, loss, rows(), size=12, **options)


def test_replicas_read_their_own_memory(saved, tmp_path, monkeypatch):
    model = encoder(saved)
    loss = CACHED(model, mini_batch_size=5)
    with guarded(monkeypatch, model):
        ours(saved, tmp_path, lambda _: loss, PAIRS, model=lambda _: model)


def bags(_):
    """A static model's rows lie in one row of words."""
    with seeded(3):
        static = StaticEmbedding(tokenizer(), embedding_dim=4)
    return SentenceTransformer(modules=[static], device="cpu").double()


TWO_SETS = {"pairs": MNRL, "scored": losses.CoSENTLoss}
PROMPTS = {"pairs": {"anchor": "7 8 "}, "scored": {"one": "9 "}}
RUNS = {
    **{f"embeddings, {name}": (*case, {}) for name, case in LOSSES.items()},
    **{
        f"scores, {name}": (*case, {"classes": CROSS_ENCODERS, "model": scorer})
        for name, case in PAIR_LOSSES.items()
    },
    "no duplicates": (MNRL, PAIRS, {"options": {"batch_sampler": "no_duplicates"}}),
    "grouped": (
        losses.BatchAllTripletLoss,
        CLASSES,
        {"options": {"batch_sampler": "group_by_label"}},
    ),
    "two data sets, a loss each": (
        TWO_SETS,
        lambda: datasets.DatasetDict(pairs=PAIRS(), scored=SCORED()),
        {"options": {"prompts": PROMPTS}},
    ),
    "bags of words": (MNRL, PAIRS, {"model": bags}),
    # A mean over rows, which by default sees the rows of a batch.
    "all rows": (losses.CosineSimilarityLoss, SCORED, {"own": {"whole_batch": True}}),
    # The last step has as many rows as the loss has columns.
    "two rows of pairs": (MNRL, lambda: data("anchor", "positive", count=14), {}),
    "three rows of triples": (MNRL, lambda: data(*"apn", count=15), {}),
    "two rows, two scores each": (
        pair_losses.MarginMSELoss,
        lambda: data(*"qpn", label=lambda i: i / 10, count=14),
        {"classes": CROSS_ENCODERS, "model": scorer},
    ),
}
QUICK = [
    *("embeddings, Softmax", "scores, CachedMNRL", "two data sets, a loss each"),
    "two rows of pairs",
]


@pytest.mark.parametrize("name", few_of(RUNS, QUICK, ["scores, CachedMNRL"]))
def test_run_equals_one_device_with_all_rows(saved, tmp_path, name):
    """Ours is the stock one, it moves the parameters, and both layouts give the same
    bits.
    """
    loss, rows, options = RUNS[name]
    options = dict(options)
    mine, stock = both(saved, tmp_path, loss, rows, **options)
    assert_same_run(
        mine, stock, 1e-6 if name.startswith("scores") else SAME, logged=1e-4
    )
    own = options.pop("own", {})
    shared = ours(saved, tmp_path, loss, rows, layout="shared", **own, **options)
    assert_same_bits(mine.model, shared.model)
    start = dict(options.get("model", encoder)(saved).named_parameters())
    assert any(not torch.equal(start[n], p) for n, p in mine.model.named_parameters())


class WeightedScores(nn.Module):
    """A mean over the labels: rows count by theirs."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, features, labels):
        one, two = (self.model(part)["sentence_embedding"] for part in features)
        errors = (torch.cosine_similarity(one, two) - labels).square()
        return (labels * errors).sum() / labels.sum().clamp(min=1e-9)


@pytest.mark.slow
def test_count_weights_losses_of_batches(saved, tmp_path):
    """It was ignored: the mean of the batches' losses, without a word."""
    how = {"count": lambda batch: batch["label"].sum()}
    with pytest.raises(ValueError, match=r"count= or reduction= here.*whole_batch=F"):
        ours(saved, tmp_path, WeightedScores, SCORED, **how)
    mine = ours(saved, tmp_path, WeightedScores, SCORED, whole_batch=False, **how)
    stock = trained(EMBEDDINGS[1], saved, tmp_path, WeightedScores, SCORED(), size=12)
    assert_same_run(mine, stock, logged=1e-4)


def test_without_whole_batch_mean_of_batches(saved, tmp_path):
    extra = {"device_ids": LAYOUTS["virtual"], "whole_batch": False}
    rows = data("anchor", "positive", count=24)
    mine = trained(
        ScatterOnceTrainer, saved, tmp_path, MNRL, rows, size=3, k=2, **extra
    )
    stock = trained(
        st.SentenceTransformerTrainer, saved, tmp_path, MNRL, rows, size=3, k=4
    )
    assert_same_run(mine, stock, logged=1e-4)


def test_evaluation_and_saving_as_stock(saved, tmp_path):
    measured = []

    class Measures(BaseEvaluator):
        def __call__(self, model, *_, **__):
            measured.append(float(model.encode(["1 2", "3"]).sum()))
            return {"measured": measured[-1]}

    trainers = both(
        saved, tmp_path, MNRL, PAIRS, eval_dataset=PAIRS(), evaluator=Measures()
    )
    for trainer in trainers:
        trainer.args.per_device_eval_batch_size = 8
    mine, stock = (quietly(trainer.evaluate) for trainer in trainers)
    assert mine["eval_loss"] == pytest.approx(stock["eval_loss"], rel=1e-9)
    assert measured[0] == pytest.approx(measured[1], rel=1e-6)
    trainers[0].save_model(str(tmp_path / "saved"))
    again = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert float(again.encode(["1 2", "3"]).sum()) == pytest.approx(
        measured[0], rel=1e-5
    )


# Evaluation on 1, 2 and 3 devices.


def retrieval():
    texts = column(5, 20)
    corpus = dict(enumerate(texts))
    queries = {f"q{i}": f"{texts[i]} 7" for i in range(7)}
    relevant = {f"q{i}": {i, i + 9} for i in range(7)}
    return sbert_evaluation.InformationRetrievalEvaluator(
        queries, corpus, relevant, corpus_chunk_size=6, batch_size=3
    )


def similarity(precision=None):
    scores = [i % 7 / 7 for i in range(ROWS)]
    return sbert_evaluation.EmbeddingSimilarityEvaluator(
        column(0), column(1), scores, batch_size=4, precision=precision
    )


def binary():
    labels = [i % 2 for i in range(ROWS)]
    return sbert_evaluation.BinaryClassificationEvaluator(column(0), column(1), labels)


def reranking():
    samples = [
        {"query": words(i), "positive": column(i, 2), "negative": column(i + 1, 3)}
        for i in range(5)
    ]
    return pair_evaluation.CrossEncoderRerankingEvaluator(samples, batch_size=2)


def correlation():
    pairs = list(zip(column(0), column(1), strict=True))
    scores = [i % 7 / 7 for i in range(ROWS)]
    return pair_evaluation.CrossEncoderCorrelationEvaluator(pairs, scores)


class Outputs(BaseEvaluator):
    """All kinds of outputs of ``encode``."""

    def __call__(self, model, *_, **__):
        texts = column(3, 5)
        found = {"one": model.encode(texts[0]).sum()}
        for precision in ("int8", "binary"):
            found[precision] = int(model.encode(texts, precision=precision).sum())
        tensors = model.encode(texts, convert_to_tensor=True, normalize_embeddings=True)
        found["tensors"] = tensors[2].sum()
        tokens = model.encode(texts, output_value="token_embeddings")
        found["tokens"] = sum(token.sum() for token in tokens[:3])
        found["all"] = model.encode(texts, output_value=None)[3]["input_ids"].sum()
        found["none"] = len(model.encode([]))
        copied = copy.deepcopy(model).encode(texts, truncate_dim=3)
        found["copied"] = copied[1].sum()
        assert not model.training
        return {name: float(value) for name, value in found.items()}


class Parts(nn.Module):
    """A loss whose terms are logged one by one."""

    def __init__(self, model):
        super().__init__()
        self.inner = MNRL(model)

    def forward(self, columns, labels):
        loss = self.inner(columns, labels)
        return {"one": loss, "other": loss.square()}


SCORES = {"classes": CROSS_ENCODERS, "model": scorer}
TWO_LOSSES = {"pairs": MNRL, "scored": losses.CoSENTLoss}
EVALUATIONS = {
    "MNRL, retrieval": (MNRL, PAIRS, retrieval, {}),
    "cached": (lambda m: CACHED(m, mini_batch_size=2), PAIRS, None, {}),
    "similarity": (losses.CosineSimilarityLoss, SCORED, similarity, {}),
    "a loss with parameters": (*LOSSES["Softmax"], binary, {}),
    "outputs": (losses.CoSENTLoss, SCORED, Outputs, {}),
    "terms": (Parts, PAIRS, None, {}),
    "a guide": (*LOSSES["GIST"], None, {}),
    "scores": (*PAIR_LOSSES["BCE"], correlation, SCORES),
    "scores, MNRL": (*PAIR_LOSSES["MNRL"], reranking, SCORES),
    "two data sets": (
        TWO_LOSSES,
        lambda: datasets.DatasetDict(pairs=PAIRS(), scored=SCORED()),
        similarity,
        {},
    ),
}
DEVICES = {1: ["cpu"], 2: ["cpu:0", "cpu:1"], 3: ["cpu:0", "cpu:1", "cpu:0"]}


@pytest.mark.slow
@pytest.mark.parametrize("devices", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("name", EVALUATIONS)
def test_metrics_equal_stock_trainer(saved, tmp_path, name, devices):
    """``eval_loss`` is that of in-batch negatives of the stock batch."""
    loss, rows, evaluator, options = EVALUATIONS[name]
    classes = options.get("classes", EMBEDDINGS)
    found = []
    for cls, place in zip(classes, ({"device_ids": devices}, {}), strict=True):
        model = options.get("model", encoder)(saved)
        args = cls.training_args_class(
            output_dir=str(tmp_path), per_device_eval_batch_size=4, **QUIET
        )
        made = (
            loss(model)
            if callable(loss)
            else {part: make(model) for part, make in loss.items()}
        )
        given = {"evaluator": evaluator()} if evaluator else {}
        trainer = cls(
            model=model, args=args, loss=made, eval_dataset=rows(), **given, **place
        )
        with seeded():
            found.append(quietly(trainer.evaluate))
        assert "_distributed_inference" not in vars(model)
        logs = trainer.state.log_history[-1]
        found[-1] |= {key: logs[key] for key in logs if key.startswith("eval_")}
    mine, stock = found
    assert mine.keys() == stock.keys()
    timed = ("runtime", "per_second", "_time")
    for key, value in stock.items():
        if not any(word in key for word in timed):
            assert mine[key] == pytest.approx(value, rel=1e-6, abs=1e-7), key


@pytest.mark.slow
def test_evaluation_leaves_training_unchanged(saved, tmp_path):
    how = {"options": {"eval_strategy": "steps", "eval_steps": 1}}
    how |= {"eval_dataset": PAIRS(), "evaluator": similarity()}
    assert_same_run(*both(saved, tmp_path, MNRL, PAIRS, **how), 1e-9, logged=1e-4)


def another(model):
    """A loss with a model of its own."""

    def loss(m, features, labels):
        return sum(
            m.own(column)["sentence_embedding"].square().mean() for column in features
        )

    return Of(loss, own=copy.deepcopy(model))


def of_tokens(model):
    """A loss that wants more than embeddings."""

    def loss(m, features, labels):
        return sum(m.model(column)["token_embeddings"].mean() for column in features)

    return Of(loss, model=model)


NEED_MORE = {
    "AdaptiveLayerLoss": lambda m: losses.AdaptiveLayerLoss(m, MNRL(m)),
    "ContrastiveTensionLoss": losses.ContrastiveTensionLoss,
    "ContrastiveTensionLossInBatchNegatives": losses.ContrastiveTensionLossInBatchNegatives,
    "Matryoshka2dLoss": lambda m: losses.Matryoshka2dLoss(m, MNRL(m), [8, 4]),
    # Its own asks a hub.
    "DenoisingAutoEncoderLoss": type(
        "DenoisingAutoEncoderLoss", (losses.ContrastiveLoss,), {}
    ),
}
ANOTHER = "needs a loss that calls the model which is trained.*pass whole_batch=False"
REFUSED = {
    name: (loss, f"does not go together with {name}: it needs more of")
    for name, loss in NEED_MORE.items()
}
REFUSED |= {
    "another model": (another, ANOTHER),
    "tokens": (of_tokens, "asks for 'token_embeddings' of the model's outputs"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_losses_refused_by_name(saved, tmp_path, name):
    loss, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        trained(
            ScatterOnceTrainer,
            saved,
            tmp_path,
            loss,
            PAIRS(),
            size=3,
            device_ids=["cpu"] * 2,
        )


@pytest.mark.slow
def test_sparse_encoder_loss_refused(tmp_path):
    """SPLADE pools in place in evaluation, where the look at its losses failed: the
    negatives were those of one batch, without a word.
    """
    folder = str(tmp_path / "model")
    with seeded():
        config = sequence_classifier().config
        transformers.BertForMaskedLM(config).save_pretrained(folder)
        special = {"sep_token": "2", "cls_token": "3", "mask_token": "4"}
        tokenizer(**special).save_pretrained(folder)
        parts = [
            Transformer(folder, transformer_task="fill-mask"),
            SpladePooling("max"),
        ]
        model = st.SparseEncoder(modules=parts, device="cpu").double()
    ranking = sparse_losses.SparseMultipleNegativesRankingLoss(model)
    loss = sparse_losses.SpladeLoss(model, ranking, 1e-2, 1e-2)
    args = st.SparseEncoderTrainingArguments(
        str(tmp_path), **QUIET, per_device_train_batch_size=3
    )
    mixed = type("Ours", (ScatterOnceMixin, st.SparseEncoderTrainer), {})
    before = copy.deepcopy(model)
    trainer = mixed(
        model, args, train_dataset=PAIRS(), loss=loss, device_ids=LAYOUTS["virtual"]
    )
    with pytest.raises(ValueError, match="It is none of these: a mean over labels"):
        quietly(trainer.train)
    assert_same_bits(model, before)
    stock = st.SparseEncoderTrainer(model, args, train_dataset=PAIRS(), loss=loss)
    quietly(stock.train)  # what the refusal proposes


def test_pairs_changed_in_second_pass_refused(saved, tmp_path):
    class Shuffles(pair_losses.BinaryCrossEntropyLoss):
        def forward(self, columns, labels, **options):
            order = numpy.random.default_rng().permutation(len(labels))
            columns = [[one[i] for i in order] for one in columns]
            return super().forward(columns, labels[torch.tensor(order)], **options)

    how = {"size": 8, "model": scorer, "device_ids": LAYOUTS["shared"]}
    with pytest.raises(
        ValueError, match="asked for the scores of other pairs the second time"
    ):
        trained(
            ScatterOnceCrossEncoderTrainer, saved, tmp_path, Shuffles, BINARY(), **how
        )


@pytest.mark.slow
def test_example_runs_as_it_stands(tmp_path, monkeypatch):
    script = example("embeddings")
    monkeypatch.setattr(
        "sys.argv", ["embeddings.py", "--tiny", "--output", str(tmp_path)]
    )
    quietly(script.main)
    assert any(tmp_path.glob("*.json"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["CachedMNRL", "CosineSimilarity"])
def test_optimizer_gets_gradient_of_all_rows(saved, tmp_path, name):
    """After the Trainer has divided and clipped, by ``splitcheck``."""
    make_loss, rows = LOSSES[name]

    def step(model, batches):
        numbers = torch.cat([numbers for (numbers,) in batches])
        args = ScatterOnceTrainer.training_args_class(
            output_dir=str(tmp_path),
            max_grad_norm=1e-3,
            per_device_train_batch_size=len(numbers) // 2 // len(batches),
            gradient_accumulation_steps=len(batches),
            **QUIET,
        )
        trainer = ScatterOnceTrainer(
            model,
            args,
            train_dataset=rows().select(numbers.tolist()),
            loss=make_loss(model),
            device_ids=LAYOUTS["virtual"],
        )
        quietly(trainer.train)

    batch = (torch.arange(16),)
    splitcheck(step, encoder(saved), batch, parts=4, equal=True).assert_passed()
