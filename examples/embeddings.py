"""Embeddings with 4096 negatives, on all the GPUs of one machine, in one process.

A step of 4096 pairs: 256 rows at a time on each of two cards, 8 times. Each anchor is told from the
positives of all 4096 rows. The memory is that of 256 rows, beside the 4096 embeddings.

    pip install 'path/to/the/clone[sentence-transformers]'
    python examples/embeddings.py

By default BERT learns from the 100,000 questions and answers of natural-questions.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from datasets import Dataset, load_dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

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


def main() -> None:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="google-bert/bert-base-uncased")
    parser.add_argument("--data", default="sentence-transformers/natural-questions")
    parser.add_argument("--batch", type=int, default=4096, help="pairs in a step")
    parser.add_argument("--rows", type=int, default=256, help="pairs on a card at a time")
    parser.add_argument("--output", default="runs/embeddings")
    given = parser.parse_args()
    trainer = trainer_for(
        SentenceTransformer(given.model),
        load_dataset(given.data, split="train"),
        batch=given.batch,
        rows=given.rows,
        output_dir=given.output,
        num_train_epochs=1,
        learning_rate=1e-4,
        warmup_steps=0.1,
        bf16=torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False),
        logging_steps=1,
    )
    trainer.train()
    trainer.save_model(given.output)


if __name__ == "__main__":
    main()
