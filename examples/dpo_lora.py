"""DPO with LoRA, on all GPUs of one machine, in one process.

TRL's trainer asks for a launcher if it sees two GPUs; with the mixin it needs none. The
reference is the model without its adapter, so no second model is in memory.

    pip install 'path/to/the/clone[trl]'
    python examples/dpo_lora.py

``--tiny`` needs neither a GPU nor a connection: on two CPU replicas a small model
learns, in less than a minute, which of two words is preferred.
"""

from __future__ import annotations

import argparse
from typing import Any

import tokenizers
import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from trl import DPOConfig, DPOTrainer

from scatterpar.integrations.transformers import ScatterOnceMixin


class ScatterOnceDPOTrainer(ScatterOnceMixin, DPOTrainer):  # type: ignore[misc]
    """TRL's ``DPOTrainer`` on all devices of one process."""


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
    """The trainer for ``pairs``, which have the columns prompt, chosen and rejected."""
    return ScatterOnceDPOTrainer(
        model,
        args=DPOConfig(**options),
        train_dataset=pairs,
        processing_class=tokenizer,
        peft_config=LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets),
        device_ids=device_ids,
    )


def tiny() -> tuple[Any, Any, Dataset]:
    """A small model, a tokenizer, and pairs."""
    words = [
        "<pad>",
        "<end>",
        "what",
        "is",
        "wanted",
        "good",
        "bad",
        *map(str, range(50)),
    ]
    splitter = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(
            {word: i for i, word in enumerate(words)}, unk_token="<pad>"
        )
    )
    splitter.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=splitter,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<pad>",
    )
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(words), num_hidden_layers=2, **sizes)
    pairs = [
        {"prompt": f"what is wanted {i % 50}", "chosen": " good", "rejected": " bad"}
        for i in range(256)
    ]
    return LlamaForCausalLM(config), tokenizer, Dataset.from_list(pairs)


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct")
    parser.add_argument("--data", default="trl-lib/ultrafeedback_binarized")
    parser.add_argument("--rows", type=int, default=4, help="pairs of a GPU at a time")
    parser.add_argument("--times", type=int, default=8, help="batches per step")
    parser.add_argument("--output", default="runs/dpo")
    parser.add_argument("--tiny", action="store_true", help="try it out, on the CPU")
    args = parser.parse_args()
    if args.tiny:
        parts = tiny()
        options = {"device_ids": ["cpu"] * 2, "use_cpu": True, "report_to": "none"}
    else:
        model, tokenizer = (
            kind.from_pretrained(args.model)
            for kind in (AutoModelForCausalLM, AutoTokenizer)
        )
        parts, options = (model, tokenizer, load_dataset(args.data, split="train")), {}
    trainer = trainer_for(
        *parts,
        **options,
        output_dir=args.output,
        per_device_train_batch_size=args.rows,
        gradient_accumulation_steps=args.times,
        learning_rate=1e-2 if args.tiny else 1e-5,
        max_length=1024,
        num_train_epochs=1,
        bf16=torch.cuda.is_available()
        and torch.cuda.is_bf16_supported(including_emulation=False),
        logging_steps=1,
    )
    trainer.train()
    trainer.save_model(args.output)


if __name__ == "__main__":
    main()
