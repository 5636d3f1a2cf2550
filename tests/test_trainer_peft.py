"""LoRA, which is not in the test extra: skipped without."""

from __future__ import annotations

import pytest
import transformers
from helpers.oracle import seeded
from helpers.trainers import (
    SAME,
    arguments,
    assert_same_parameters,
    language_model,
    padded,
    quietly,
    sentences,
)

from scatterpar.integrations.transformers import ScatterOnceTrainer

pytestmark = pytest.mark.draws
ROWS = 29


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
    assert_same_parameters(*(dict(t.model.named_parameters()) for t in trainers), SAME)
    losses = [quietly(trainer.evaluate)["eval_loss"] for trainer in trainers]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    trainers[0].save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "adapter_model.safetensors").is_file()
