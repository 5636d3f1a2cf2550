"""``of_trainer`` with trainers of TRL and sentence-transformers, as their users make them."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from harness.trainers import QUIET, sequence_classifier, tokenizer
from libraries.tiny import llama
from splitting.loop_models import new, tokens

from scatterpar.splitting import of_trainer

transformers = pytest.importorskip("transformers", reason="the extra `transformers`")
datasets = pytest.importorskip("datasets")

pytestmark = [
    pytest.mark.trainers,
    pytest.mark.draws,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::Warning"),
]


def texts(seed, rows=16):
    """Words of which each is a token; rows of two to seven."""
    generator = random.Random(seed)
    lines = []
    for _ in range(rows):
        words = [
            str(generator.randrange(4, 29)) for _ in range(generator.randrange(2, 8))
        ]
        lines.append(" ".join(words))
    return lines


def ids(seed):
    encode = tokenizer()
    return [encode(line)["input_ids"] for line in texts(seed)]


# --- TRL ---

QUIETLY = {name: QUIET[name] for name in ("use_cpu", "disable_tqdm") if name in QUIET}
QUIETLY |= {"use_cpu": True, "disable_tqdm": True, "bf16": False}


def rewards(completions, **_):
    """Another number for each completion: equal rewards would have no gradient."""
    return [float(number) for number in range(len(completions))]


TRL_ROWS = {
    "SFT": [{"text": "4 5 6"}],
    "DPO": [{"prompt": "4", "chosen": "5 6", "rejected": "6 7"}],
    "GRPO": [{"prompt": "4 5"}] * 8,
}


def trl_trainer(kind, folder, model, steps, **options):
    trl = pytest.importorskip("trl", reason="TRL's trainers: pip install '.[trl]'")
    more = {}
    if kind == "DPO":
        more["ref_model"] = new(llama)
    if kind == "GRPO":
        more["reward_funcs"] = rewards
        options |= {"per_device_train_batch_size": 4, "num_generations": 2}
    arguments = getattr(trl, f"{kind}Config")(
        str(folder), gradient_accumulation_steps=steps, **QUIETLY, **options
    )
    return getattr(trl, f"{kind}Trainer")(
        model,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(TRL_ROWS[kind]),
        processing_class=tokenizer(eos_token="1", padding_side="left"),
        **more,
    )


def sentences():
    return [{"input_ids": row} for row in ids(1)]


def preferences():
    columns = zip(ids(1), ids(2), ids(3), strict=True)
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    return [dict(zip(names, row, strict=True)) for row in columns]


def completions():
    """What ``GRPOTrainer._prepare_inputs`` returns."""
    words, labels = tokens()
    mask = (labels != -100).long()
    generator = torch.Generator().manual_seed(0)
    return {
        "prompt_ids": words[:, :4],
        "prompt_mask": torch.ones(16, 4, dtype=torch.long),
        "completion_ids": words,
        "completion_mask": mask,
        "advantages": torch.randn(16, generator=generator),
        "num_items_in_batch": mask.sum(),
    }


# Kind, options, batch, cause; empty if the gradient is the same.
TRL = {
    "SFT": ("SFT", {}, sentences, ""),
    "SFT packed": ("SFT", {"packing": True, "max_length": 16}, sentences, ""),
    "DPO": ("DPO", {}, preferences, ""),
    "DPO and SFT": (
        "DPO",
        {"loss_type": ["sigmoid", "sft"]},
        preferences,
        "mean of means",
    ),
    "GRPO": ("GRPO", {"loss_type": "grpo"}, completions, ""),
    "GRPO bnpo": ("GRPO", {"loss_type": "bnpo"}, completions, "mean of means"),
    "GRPO dr_grpo": ("GRPO", {"loss_type": "dr_grpo"}, completions, ""),
    "GRPO dapo": ("GRPO", {"loss_type": "dapo"}, completions, ""),
}
for loss in (
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "apo_zero",
    "apo_down",
    "discopop",
):
    options = {"loss_type": loss}
    if loss == "exo_pair":
        options["label_smoothing"] = 0.1
    TRL[f"DPO {loss}"] = ("DPO", options, preferences, "")
for loss in ("robust", "sppo_hard", "sigmoid_norm"):
    options = {"loss_type": loss}
    if loss == "robust":
        options["label_smoothing"] = 0.1
    TRL[f"DPO {loss}"] = ("DPO", options, preferences, "")
TRL["DPO aot_unpaired"] = (  # sorts rows
    "DPO",
    {"loss_type": "aot_unpaired"},
    preferences,
    "rows are compared",
)


@pytest.mark.parametrize("name", TRL)
def test_trainer_of_trl(name, tmp_path):
    kind, options, batch, cause = TRL[name]
    make = partial(trl_trainer, kind, tmp_path, **options)
    # With the usual small weights all preferences are alike, and sorting does little.
    report = of_trainer(make, new(partial(llama, initializer_range=0.3)), batch())
    assert report.cause == cause, report
    assert report.passed == (not cause)
    assert not [*tmp_path.iterdir()]


def test_sorted_preferences_are_found(tmp_path):
    """What the cause is depends on the rows: few may be in order already."""
    make = partial(trl_trainer, "DPO", tmp_path, loss_type="aot")
    model = new(partial(llama, initializer_range=0.3))
    assert not of_trainer(make, model, preferences()).passed


@pytest.mark.parametrize("name", ["SFT", "DPO", "GRPO"])
def test_trainer_of_trl_on_ranks(name, tmp_path):
    kind, options, batch, _ = TRL[name]
    make = partial(trl_trainer, kind, tmp_path, **options)
    of_trainer(make, new(llama), batch(), ranks=2, parts=2).assert_passed()


@pytest.mark.parametrize("rows", [TRL_ROWS["GRPO"] * 2, {"input_ids": tokens()[0]}])
def test_prompts_in_place_of_completions_refused(rows, tmp_path):
    make = partial(trl_trainer, "GRPO", tmp_path)
    words = "GRPOTrainer makes its batches by itself.* pass as batch the dict"
    with pytest.raises(ValueError, match=words):
        of_trainer(make, new(llama), rows)


def test_batch_that_a_trainer_prepares(tmp_path):
    """The remedy on the page of splitcheck."""
    options = {"loss_type": "grpo", "max_completion_length": 8}
    make = partial(trl_trainer, "GRPO", tmp_path, **options)
    trainer = make(new(llama), 1)
    rows = next(iter(trainer.get_train_dataloader()))
    report = of_trainer(make, new(llama), trainer._prepare_inputs(rows))
    assert report.passed, report
    assert report.rows == 4


# --- sentence-transformers ---


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    sequence_classifier(num_labels=1).save_pretrained(folder)
    tokenizer(sep_token="2", cls_token="3").save_pretrained(folder)
    return str(folder)


def encoder(saved):
    library = pytest.importorskip("sentence_transformers")
    modules = library.sentence_transformer.modules
    layers = [modules.Transformer(saved), modules.Pooling(8)]
    return library.SentenceTransformer(modules=layers, device="cpu")


def losses():
    return pytest.importorskip("sentence_transformers.sentence_transformer.losses")


def sentence_trainer(loss, folder, model, steps):
    library = pytest.importorskip("sentence_transformers")
    arguments = library.SentenceTransformerTrainingArguments(
        str(folder), gradient_accumulation_steps=steps, use_cpu=True, disable_tqdm=True
    )
    rows = datasets.Dataset.from_list(pairs()[:2])
    return library.SentenceTransformerTrainer(
        model, arguments, train_dataset=rows, loss=loss(model)
    )


def pairs():
    columns = zip(texts(1), texts(2), strict=True)
    return [{"anchor": first, "positive": second} for first, second in columns]


def ranking(model, **options):
    return losses().MultipleNegativesRankingLoss(model, **options)


@pytest.mark.parametrize(
    ("gathered", "options", "cause"),
    [
        (True, {"ranks": 2}, ""),
        (False, {"ranks": 2}, "rows are compared"),
        (False, {"parts": 4}, "rows are compared"),
    ],
)
def test_trainer_of_sentence_transformers(saved, tmp_path, gathered, options, cause):
    loss = partial(ranking, gather_across_devices=gathered)
    make = partial(sentence_trainer, loss, tmp_path)
    report = of_trainer(make, new(partial(encoder, saved)), pairs(), **options)
    assert report.cause == cause, report
    assert "labels of -100" not in report.note


def scored():
    """Pairs with a score, whose loss is a mean over rows."""
    rows = pairs()
    for number, row in enumerate(rows):
        row["score"] = number / len(rows)
    return rows


def test_loss_of_each_pair_passes(saved, tmp_path):
    make = partial(
        sentence_trainer, lambda model: losses().CosineSimilarityLoss(model), tmp_path
    )
    of_trainer(make, new(partial(encoder, saved)), scored()).assert_passed()
