"""Embeddings with 4096 negatives, on all GPUs of one machine, in one process.

A step has 4096 pairs. The cached loss of the library computes their embeddings in parts
of 512 rows, 256 on each of two GPUs, and compares each anchor with the positives of all
4096 rows. A GPU needs the memory for 256 rows, and the first one also that for 4096
embeddings.

    pip install 'path/to/the/clone[sentence-transformers]'
    python examples/embeddings.py

By default BERT learns from the 100,000 questions and answers of natural-questions.
``--tiny`` needs neither a GPU nor a connection: on two CPU replicas a small model
learns, in less than a minute, which numbers belong together.
"""

from __future__ import annotations

import argparse
from typing import Any

import tokenizers
import torch
from datasets import Dataset, load_dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
)
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from scatterpar.integrations.transformers import ScatterOnceMixin


class ScatterOnceTrainer(ScatterOnceMixin, SentenceTransformerTrainer):  # type: ignore[misc]
    """sentence-transformers' trainer on all devices of one process."""


def trainer_for(
    model: SentenceTransformer,
    pairs: Dataset,
    *,
    batch: int = 4096,
    rows: int = 256,
    device_ids: list[Any] | None = None,
    **options: Any,
) -> ScatterOnceTrainer:
    """The trainer with ``batch`` pairs per step, and ``rows`` pairs of a GPU at a
    time.
    """
    devices = (
        len(device_ids) if device_ids else max(1, torch.accelerator.device_count())
    )
    if batch % (rows * devices):
        raise SystemExit(
            f"--batch {batch} is no multiple of {rows} rows on {devices} devices"
        )
    args = SentenceTransformerTrainingArguments(
        per_device_train_batch_size=batch // devices,
        batch_sampler="no_duplicates",  # applies to all rows of a step
        **options,
    )
    loss = CachedMultipleNegativesRankingLoss(model, mini_batch_size=rows * devices)
    return ScatterOnceTrainer(model, args, pairs, loss=loss, device_ids=device_ids)


def tiny(folder: str) -> tuple[SentenceTransformer, Dataset]:
    """A small model, saved in a folder, and pairs: two ways to write the same number."""
    words = {
        word: i for i, word in enumerate(["?", *map(str, range(10)), *"abcdefghij"])
    }
    splitter = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    splitter.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=splitter, pad_token="?", unk_token="?"
    )
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(words), num_hidden_layers=1, **sizes)
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    modules = [Transformer(folder), Pooling(32)]
    numbers = [f"{i:05d}" for i in range(4 * 512)]
    anchors = [" ".join(number) for number in numbers]
    positives = [
        " ".join("abcdefghij"[int(digit)] for digit in number) for number in numbers
    ]
    pairs = Dataset.from_dict({"anchor": anchors, "positive": positives})
    return SentenceTransformer(modules=modules, device="cpu"), pairs


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="google-bert/bert-base-uncased")
    parser.add_argument("--data", default="sentence-transformers/natural-questions")
    parser.add_argument("--batch", type=int, default=4096, help="pairs in a step")
    parser.add_argument(
        "--rows", type=int, default=256, help="pairs of a GPU at a time"
    )
    parser.add_argument("--output", default="runs/embeddings")
    parser.add_argument("--tiny", action="store_true", help="try it out, on the CPU")
    args = parser.parse_args()
    if args.tiny:
        parts = tiny(f"{args.output}/tiny")
        args.batch, args.rows = 512, 64
        options = {"device_ids": ["cpu"] * 2, "use_cpu": True, "report_to": "none"}
    else:
        parts = SentenceTransformer(args.model), load_dataset(args.data, split="train")
        options = {}
    trainer = trainer_for(
        *parts,
        **options,
        batch=args.batch,
        rows=args.rows,
        output_dir=args.output,
        num_train_epochs=1,
        learning_rate=1e-2 if args.tiny else 1e-4,
        warmup_steps=0.1,
        bf16=torch.cuda.is_available()
        and torch.cuda.is_bf16_supported(including_emulation=False),
        logging_steps=1,
    )
    trainer.train()
    trainer.save_model(args.output)


if __name__ == "__main__":
    main()
