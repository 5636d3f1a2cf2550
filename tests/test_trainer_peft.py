"""LoRA, and TRL's SFTTrainer below the mixin. Neither is in the test extra: skipped without."""

from __future__ import annotations

import pytest
import transformers
from helpers.oracle import seeded
from helpers.trainers import arguments, language_model, padded, quietly, sentences

from scatterpar.integrations.transformers import ScatterOnceMixin, ScatterOnceTrainer

pytestmark = pytest.mark.draws
ROWS, SAME = 29, 1e-9


def assert_same(ours, stock, relative=SAME):
    for (name, parameter), other in zip(
        ours.model.named_parameters(), stock.model.parameters(), strict=True
    ):
        off = (parameter - other).norm()
        assert off <= relative * other.norm().clamp(min=1e-3), f"{name}: off by {off}"


def test_lora(tmp_path):
    peft = pytest.importorskip("peft")
    trainers = []
    for cls, size, k, extra in (
        (ScatterOnceTrainer, 3, 2, {"device_ids": ["cpu:0", "cpu:1"]}),
        (transformers.Trainer, 12, 1, {}),
    ):
        with seeded():
            model = peft.get_peft_model(
                language_model(), peft.LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.0)
            ).double()
        trainer = cls(
            model,
            arguments(
                tmp_path,
                remove_unused_columns=False,
                per_device_train_batch_size=size,
                gradient_accumulation_steps=k,
                label_smoothing_factor=0.1,
            ),
            data_collator=padded,
            train_dataset=sentences(ROWS),
            eval_dataset=sentences(7),
            **extra,
        )
        quietly(trainer.train)
        trainers.append(trainer)
    assert_same(*trainers)
    losses = [quietly(trainer.evaluate)["eval_loss"] for trainer in trainers]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    trainers[0].save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "adapter_model.safetensors").is_file()


def test_sft_trainer(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)  # a thread
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({str(i): i for i in range(31)}, unk_token="0")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="0", eos_token="1", unk_token="0"
    )
    rows = [{"text": " ".join(map(str, row["input_ids"]))} for row in sentences(ROWS)]
    data = datasets.Dataset.from_list(rows)
    both = type("Both", (ScatterOnceMixin, trl.SFTTrainer), {})
    trainers = []
    for cls, size, k, extra in (
        (both, 3, 2, {"device_ids": ["cpu:0", "cpu:1"]}),
        (trl.SFTTrainer, 12, 1, {}),
    ):
        args = trl.SFTConfig(
            **{
                **arguments(tmp_path).to_dict(),
                "per_device_train_batch_size": size,
                "gradient_accumulation_steps": k,
                "activation_checkpointing": False,
                "bf16": False,
            }
        )
        trainer = cls(
            language_model(),
            args,
            train_dataset=data,
            eval_dataset=data.select(range(7)),
            processing_class=tokenizer,
            **extra,
        )
        quietly(trainer.train)
        trainers.append(trainer)
    assert_same(*trainers, relative=1e-6)  # its fused head computes in float32
    mine, theirs = (trainer.state.log_history[0] for trainer in trainers)
    assert mine["loss"] == pytest.approx(theirs["loss"], rel=2e-6)
    assert mine["num_tokens"] == theirs["num_tokens"]
    losses = [quietly(trainer.evaluate)["eval_loss"] for trainer in trainers]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
