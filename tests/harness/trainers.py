"""Trainers for tests: small models of three kinds, their data, and a run of any
Trainer.
"""

import contextlib
import io

import accelerate.utils.memory
import pytest
import torch
import transformers
from torch import nn
from tqdm import tqdm

from harness.optional import import_torchvision_first
from harness.oracle import randint, randn, seeded

import_torchvision_first()
transformers.utils.logging.set_verbosity_error()
tqdm.monitor_interval = 0  # no thread of its own
accelerate.utils.memory.clear_device_cache = lambda **_: None  # half of a test's time

VOCABULARY = 31
PADDING = -100
SAME = 1e-9
LAYOUTS = {"shared": ["cpu"] * 2, "virtual": ["cpu:0", "cpu:1"]}


SMALL = {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "hidden_size": 8,
}
SMALL |= {
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "num_labels": 3,
}


def language_model(dropout=0.0):
    """A causal language model, in float64."""
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
    drops = dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], dropout)
    words = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
    with seeded():
        config = transformers.GPT2Config(**sizes, **drops, **words)
        return transformers.GPT2LMHeadModel(config).double()


def sequence_classifier(**options):
    words = {"vocab_size": VOCABULARY, "max_position_embeddings": 16}
    with seeded():
        config = transformers.BertConfig(**SMALL | words | options)
        return transformers.BertForSequenceClassification(config).double()


def token_classifier():
    with seeded():
        config = sequence_classifier().config
        return transformers.BertForTokenClassification(config).double()


def image_classifier():
    with seeded():
        config = transformers.ViTConfig(image_size=8, patch_size=4, **SMALL)
        return transformers.ViTForImageClassification(config).double()


def moved(model):
    """The model, with other parameters."""
    with seeded(5), torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def sentences(count):
    lengths = 3 + randint(6, count, seed=5)
    return [
        {"input_ids": randint(VOCABULARY, int(n), seed=i + 1).tolist(), "number": i}
        for i, n in enumerate(lengths)
    ]


def images(count):
    return [
        {"pixel_values": randn(3, 8, 8, seed=i), "labels": i % 3} for i in range(count)
    ]


def padded(rows, kind="language"):
    """A batch of sentences, padded to its longest, with labels of one kind."""
    longest = max(len(row["input_ids"]) for row in rows)

    def pad(row, value):
        return row["input_ids"] + [value] * (longest - len(row["input_ids"]))

    ids = torch.tensor([pad(row, 0) for row in rows])
    labels = torch.tensor([pad(row, PADDING) for row in rows])
    batch = {"input_ids": ids, "attention_mask": (labels != PADDING).long()}
    numbers = torch.tensor([row["number"] for row in rows])
    if kind == "tokens":
        labels = torch.where(labels == PADDING, PADDING, labels % 3)
    elif kind == "classes":
        labels = numbers % 3
    elif kind == "numbers":
        labels = numbers.double() / 10
    return {**batch, "labels": labels}


def tokenizer(**special):
    """Of the words that are the vocabulary's numbers."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(
            {str(i): i for i in range(VOCABULARY)}, unk_token="0"
        )
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="0", unk_token="0", **special
    )


def parameters(trainer):
    """Those of the model, and of losses that are modules."""
    losses = getattr(trainer, "loss", None)
    parts = [
        trainer.model,
        nn.ModuleDict(losses) if isinstance(losses, dict) else losses,
    ]
    modules = [part for part in parts if isinstance(part, nn.Module)]
    return {name: p for module in modules for name, p in module.named_parameters()}


def assert_same_parameters(ours, stock, relative):
    mine, theirs = parameters(ours), parameters(stock)
    assert mine.keys() == theirs.keys()
    for name, parameter in mine.items():
        off = (parameter - theirs[name]).norm() / theirs[name].norm().clamp(min=1e-3)
        assert off <= relative, f"{name}: off by {off}"


def assert_same_run(ours, stock, relative=SAME, logged=2e-06):
    """The trainers have the same parameters, and logged the same, times aside."""
    assert_same_parameters(ours, stock, relative)
    for mine, its in zip(ours.state.log_history, stock.state.log_history, strict=True):
        assert_same_log(mine, its, max(logged, relative))


def assert_same_log(mine, its, relative):
    assert mine.keys() == its.keys()
    timed = {key for key in its if "time" in key or "per_second" in key}
    for key in its.keys() - timed - {"total_flos", "epoch"}:
        near = pytest.approx(its[key], rel=relative, abs=relative / 100, nan_ok=True)
        assert mine[key] == near, key


def assert_same_bits(model, other):
    for parameter, its in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(parameter, its), "the same bits"


QUIET = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1}
QUIET |= {"save_strategy": "no", "max_steps": 3}


def arguments(folder, **options):
    own = {
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "optim": "adamw_torch",
    }
    return transformers.TrainingArguments(
        output_dir=str(folder), **QUIET | own | options
    )


def quietly(call, *args, **kwargs):
    """Without what the Trainer prints."""
    with contextlib.redirect_stdout(io.StringIO()):
        return call(*args, **kwargs)
