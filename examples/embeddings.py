"""Embeddings with 4096 negatives, on all the GPUs of one machine, in one process.

A step of 4096 pairs: 256 rows at a time on each of two cards, 8 times. Each anchor is told from the
positives of all 4096 rows. The memory is that of 256 rows, beside the 4096 embeddings.

    pip install 'path/to/the/clone[sentence-transformers]'
    python examples/embeddings.py

By default BERT learns from the 100,000 questions and answers of natural-questions. ``--tiny`` needs
neither a card nor a connection: embeddings of words learn on two CPU replicas, in less than a
minute, which numbers belong together.
"""

from __future__ import annotations

import argparse
from typing import Any

import tokenizers
import torch
from datasets import Dataset, load_dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import StaticEmbedding

from scatterpar.integrations.sentence_transformers import ScatterOnceTrainer


def trainer_for(
    model: SentenceTransformer,
    pairs: Dataset,
    *,
    batch: int = 4096,
    rows: int = 256,
    device_ids: list[Any] | None = None,
    **options: Any,
) -> ScatterOnceTrainer:
    """The trainer of a step with ``batch`` pairs, of which a card holds ``rows`` at a time."""
    cards = len(device_ids) if device_ids else max(1, torch.accelerator.device_count())
    if batch % (rows * cards):
        raise SystemExit(f"--batch {batch} is no multiple of {rows} rows on {cards} devices")
    args = SentenceTransformerTrainingArguments(
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=batch // (rows * cards),
        batch_sampler="no_duplicates",  # of all rows of a step
        **options,
    )
    loss = MultipleNegativesRankingLoss(model)
    return ScatterOnceTrainer(model, args, pairs, loss=loss, device_ids=device_ids)


def tiny() -> tuple[SentenceTransformer, Dataset]:
    """A model and pairs that are made here: two ways to write the same number."""
    words = {word: i for i, word in enumerate(["?", *map(str, range(10)), *"abcdefghij"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    model = SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=64)])
    numbers = [f"{i:05d}" for i in range(3 * 4096)]
    anchors = [" ".join(number) for number in numbers]
    positives = [" ".join("abcdefghij"[int(digit)] for digit in number) for number in numbers]
    return model, Dataset.from_dict({"anchor": anchors, "positive": positives})


def main() -> None:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="google-bert/bert-base-uncased")
    parser.add_argument("--data", default="sentence-transformers/natural-questions")
    parser.add_argument("--batch", type=int, default=4096, help="pairs in a step")
    parser.add_argument("--rows", type=int, default=256, help="pairs on a card at a time")
    parser.add_argument("--output", default="runs/embeddings")
    parser.add_argument("--tiny", action="store_true", help="try it out, on the CPU")
    given = parser.parse_args()
    if given.tiny:
        made = tiny()
        options = {"device_ids": ["cpu"] * 2, "use_cpu": True, "report_to": "none"}
    else:
        made = SentenceTransformer(given.model), load_dataset(given.data, split="train")
        options = {}
    trainer = trainer_for(
        *made,
        **options,
        batch=given.batch,
        rows=given.rows,
        output_dir=given.output,
        num_train_epochs=1,
        learning_rate=1e-1 if given.tiny else 1e-4,
        warmup_steps=0.1,
        bf16=torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False),
        logging_steps=1,
    )
    trainer.train()
    trainer.save_model(given.output)


if __name__ == "__main__":
    main()
