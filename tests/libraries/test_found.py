"""What ``docs/found.md`` says of releases. One that mends it is noticed here."""

from __future__ import annotations

from importlib.metadata import version

import pytest
import torch
from splitting.loop_models import new, tokens
from torch.utils.data import DataLoader

from scatterpar.splitting import of_trainer, valuecheck

transformers = pytest.importorskip("transformers", reason="the extra `transformers`")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::Warning")]

MENDED = "is now the same: take the row out of docs/found.md, or name the version"
SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


def arguments(folder, steps):
    return transformers.TrainingArguments(
        str(folder), gradient_accumulation_steps=steps, use_cpu=True, disable_tqdm=True
    )


def bert():
    config = transformers.BertConfig(**SIZES, num_labels=3)
    return transformers.BertForSequenceClassification(config)


def llama():
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config)


def texts():
    ids, labels = tokens()
    return {"input_ids": ids, "labels": ids.masked_fill(labels == -100, -100)}


@pytest.mark.parametrize("ranks", [1, 2])
def test_head_with_a_loss_of_its_own(ranks, tmp_path):
    """Its mean is taken for a sum over all labels, so nothing divides it."""

    def make(model, steps):
        return transformers.Trainer(
            model, arguments(tmp_path, steps), train_dataset=[0]
        )

    def mended(model, steps):
        trainer = make(model, steps)
        trainer.model_accepts_loss_kwargs = False
        return trainer

    batch = {"input_ids": tokens()[0], "labels": torch.arange(16) % 3}
    report = of_trainer(make, new(bert), batch, ranks=ranks, parts=4)
    assert not report.passed, f"transformers {version('transformers')} {MENDED}"
    assert report.cause == "constant factor"
    assert report.ratio == pytest.approx(4 * ranks)
    of_trainer(mended, new(bert), batch, ranks=ranks, parts=4).assert_passed()


def test_penalty_of_adalora(tmp_path):
    """The orthogonality penalty counts once per micro-batch."""
    peft = pytest.importorskip("peft", reason="pip install peft")
    config = peft.AdaLoraConfig(
        target_modules=["q_proj"],
        total_step=10,
        tinit=2,
        tfinal=2,
        task_type="CAUSAL_LM",
    )

    def make(model, steps):
        return transformers.Trainer(
            model, arguments(tmp_path, steps), train_dataset=[0]
        )

    def mended(model, steps):
        model.peft_config["default"].orth_reg_weight = 0.5 / steps
        return make(model, steps)

    model = new(lambda: peft.get_peft_model(llama(), config))
    report = of_trainer(make, model, texts())
    assert not report.passed, f"peft {version('peft')} {MENDED}"
    assert report.ratio == pytest.approx(4, rel=0.1)
    of_trainer(mended, model, texts()).assert_passed()


def test_evaluation_loss_of_a_language_model(tmp_path):
    """Each batch's mean over its labels counts by the rows of the batch."""

    def stock(model, batches):
        trainer = transformers.Trainer(model, arguments(tmp_path, 1), eval_dataset=[0])
        trainer.get_eval_dataloader = lambda *_: DataLoader(batches, batch_size=None)
        return {"eval_loss": trainer.evaluate()["eval_loss"]}

    @torch.no_grad()
    def mended(model, batches):
        total = 0
        terms = 0
        for batch in batches:
            count = (batch["labels"][:, 1:] != -100).sum()
            total += model(**batch).loss * count
            terms += count
        return {"eval_loss": total / terms}

    report = valuecheck(stock, new(llama), texts(), equal=True)
    assert not report.passed, f"transformers {version('transformers')} {MENDED}"
    assert "weighted by their rows of the parts" in report.why
    valuecheck(mended, new(llama).eval(), texts(), equal=True).assert_passed()
