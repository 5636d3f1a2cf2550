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
from torch.nn.utils.rnn import pad_sequence
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
    rows = []
    for number, length in enumerate(lengths.tolist()):
        ids = randint(VOCABULARY, length, seed=number + 1)
        rows.append({"input_ids": ids.tolist(), "number": number})
    return rows


def images(count):
    rows = []
    for number in range(count):
        pixels = randn(3, 8, 8, seed=number)
        rows.append({"pixel_values": pixels, "labels": number % 3})
    return rows


def padded(rows, kind="language"):
    """A batch of sentences, padded to its longest, with labels of one kind."""
    ids = pad_sentences(rows, 0)
    labels = pad_sentences(rows, PADDING)
    mask = labels != PADDING
    numbers = torch.tensor([row["number"] for row in rows])
    if kind == "tokens":
        labels = torch.where(mask, labels % 3, PADDING)
    elif kind == "classes":
        labels = numbers % 3
    elif kind == "numbers":
        labels = numbers.double() / 10
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def pad_sentences(rows, value):
    sequences = [torch.tensor(row["input_ids"]) for row in rows]
    return pad_sequence(sequences, batch_first=True, padding_value=value)


def tokenizer(**special):
    """Of the words that are the vocabulary's numbers."""
    tokenizers = pytest.importorskip("tokenizers")
    ids = {str(number): number for number in range(VOCABULARY)}
    model = tokenizers.models.WordLevel(ids, unk_token="0")
    words = tokenizers.Tokenizer(model)
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="0", unk_token="0", **special
    )


def parameters(trainer):
    """Those of the model, and of losses that are modules."""
    losses = getattr(trainer, "loss", None)
    if isinstance(losses, dict):
        losses = nn.ModuleDict(losses)
    by_name = dict(trainer.model.named_parameters())
    if isinstance(losses, nn.Module):
        by_name |= dict(losses.named_parameters())
    return by_name


def assert_same_parameters(ours, stock, relative):
    expected_parameters = parameters(stock)
    actual = parameters(ours)
    assert actual.keys() == expected_parameters.keys()
    for name, parameter in actual.items():
        expected = expected_parameters[name]
        error = (parameter - expected).norm() / expected.norm().clamp(min=1e-3)
        assert error <= relative, f"{name}: off by {error}"


def assert_same_run(ours, stock, relative=SAME, logged=2e-06):
    """The trainers have the same parameters, and logged the same, times aside."""
    assert_same_parameters(ours, stock, relative)
    logs = zip(ours.state.log_history, stock.state.log_history, strict=True)
    for log, expected in logs:
        assert_same_log(log, expected, max(logged, relative))


def assert_same_log(log, expected, relative):
    assert log.keys() == expected.keys()
    for key, value in expected.items():
        if key in ("total_flos", "epoch") or "time" in key or "per_second" in key:
            continue
        close = pytest.approx(value, rel=relative, abs=relative / 100, nan_ok=True)
        assert log[key] == close, key


def assert_same_bits(model, twin):
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    for parameter, expected in pairs:
        assert torch.equal(parameter, expected), "the same bits"


QUIET = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1}
QUIET |= {"save_strategy": "no", "max_steps": 3}


def arguments(folder, **options):
    defaults = {
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "optim": "adamw_torch",
    }
    options = QUIET | defaults | options
    return transformers.TrainingArguments(output_dir=str(folder), **options)


def quietly(call, *args, **kwargs):
    """Without what the Trainer prints."""
    with contextlib.redirect_stdout(io.StringIO()):
        return call(*args, **kwargs)
