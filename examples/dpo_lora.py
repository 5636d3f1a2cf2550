"""DPO with LoRA, on all the GPUs of one machine, in one process.

TRL's trainer asks for a launcher as soon as it sees two cards. Below the mixin it does not. The
reference is the model without its adapter, so that no second model is in memory.

    pip install 'path/to/the/clone[trl]'
    python examples/dpo_lora.py
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

from scatterpar.integrations.transformers import ScatterOnceMixin


class ScatterOnceDPOTrainer(ScatterOnceMixin, DPOTrainer):  # type: ignore[misc]
    """TRL's own, on all devices of one process."""


def trainer_for(
    model: Any,
    tokenizer: Any,
    pairs: Dataset,
    *,
    device_ids: list[Any] | None = None,
    rank: int = 16,
    targets: str | list[str] = "all-linear",
    **options: Any,
) -> ScatterOnceDPOTrainer:
    """The trainer of ``pairs`` with the columns prompt, chosen and rejected."""
    return ScatterOnceDPOTrainer(
        model,
        args=DPOConfig(**options),
        train_dataset=pairs,
        processing_class=tokenizer,
        peft_config=LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets),
        device_ids=device_ids,
    )


def main() -> None:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct")
    parser.add_argument("--data", default="trl-lib/ultrafeedback_binarized")
    parser.add_argument("--rows", type=int, default=4, help="pairs on a card at a time")
    parser.add_argument("--times", type=int, default=8, help="that many times a step")
    parser.add_argument("--output", default="runs/dpo")
    given = parser.parse_args()
    trainer = trainer_for(
        AutoModelForCausalLM.from_pretrained(given.model),
        AutoTokenizer.from_pretrained(given.model),
        load_dataset(given.data, split="train"),
        output_dir=given.output,
        per_device_train_batch_size=given.rows,
        gradient_accumulation_steps=given.times,
        learning_rate=1e-5,
        max_length=1024,
        num_train_epochs=1,
        bf16=torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False),
        logging_steps=1,
    )
    trainer.train()
    trainer.save_model(given.output)


if __name__ == "__main__":
    main()
