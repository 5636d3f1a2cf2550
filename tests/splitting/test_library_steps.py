"""Trainers of libraries, as their users make them, on given parts."""

from __future__ import annotations

import pytest
import torch
from harness.optional import import_torchvision_first
from splitting.loop_models import Net, images, new, tokens

from scatterpar.splitting import of_trainer
from scatterpar.splitting.trainers import as_tensors

import_torchvision_first()

transformers = pytest.importorskip("transformers", reason="the extra `transformers`")


def samples():
    """Rows of a data set of texts, of several lengths."""
    ids, labels = tokens()
    lengths = (labels != -100).sum(1).clamp_min(2)
    rows = []
    for row, length in zip(ids.tolist(), lengths.tolist(), strict=True):
        rows.append({"input_ids": row[:length], "labels": row[:length]})
    return rows


def llama():
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config)


def padded(rows):
    """A collator that pads to the longest row of a part."""
    batch = as_tensors(rows)
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    width = batch["input_ids"].shape[1]
    batch["attention_mask"] = (torch.arange(width) < lengths[:, None]).long()
    return batch


def trainer_of(kind, folder, **options):
    def make(model, steps):
        arguments = transformers.TrainingArguments(
            str(folder),
            gradient_accumulation_steps=steps,
            use_cpu=True,
            disable_tqdm=True,
            **options,
        )
        return kind(model, arguments, data_collator=padded, train_dataset=[0])

    return make


def without_count():
    class WithoutCount(transformers.Trainer):
        """Ignores the number of labels in all parts."""

        def compute_loss(self, model, inputs, *_, **__):
            return model(**inputs).loss / self.args.gradient_accumulation_steps

    return WithoutCount


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"parts": 4}, {"ranks": 2, "parts": 2}])
def test_trainer_of_transformers_passes(options, tmp_path):
    make = trainer_of(transformers.Trainer, tmp_path)
    report = of_trainer(make, new(llama), samples(), **options)
    report.assert_passed()
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_trainer_without_count_is_found(tmp_path):
    make = trainer_of(without_count(), tmp_path)
    report = of_trainer(make, new(llama), samples())
    assert report.cause == "mean of means"


def test_steps_must_be_passed_on(tmp_path):
    def make(model, steps):
        return trainer_of(transformers.Trainer, tmp_path)(model, 1)

    with pytest.raises(ValueError, match="pass gradient_accumulation_steps=steps to"):
        of_trainer(make, new(llama), samples())


@pytest.mark.slow
def test_batches_that_a_user_prepares(tmp_path):
    class Prepared(transformers.Trainer):
        def _prepare_inputs(self, inputs):
            prepared = super()._prepare_inputs(inputs)
            return {**prepared, "attention_mask": (prepared["input_ids"] != 0).long()}

    make = trainer_of(Prepared, tmp_path)
    of_trainer(make, new(llama), samples()).assert_passed()


def test_generated_batches_refused_with_remedy(tmp_path):
    class Generating(transformers.Trainer):
        def _generate_and_score_completions(self, inputs):
            raise NotImplementedError

    make = trainer_of(Generating, tmp_path)
    with pytest.raises(
        ValueError, match="the dict that the trainer's _prepare_inputs returns"
    ):
        of_trainer(make, new(llama), samples())


# --- Lightning ---


def lightning_module(lightning):
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, _):
            pixels, classes = batch
            outputs = self.net(pixels)
            loss = torch.nn.functional.cross_entropy(outputs, classes)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    return Module()


@pytest.mark.slow
@pytest.mark.loops
@pytest.mark.draws
@pytest.mark.filterwarnings("ignore::Warning")
@pytest.mark.parametrize("options", [{"parts": 4}, {"ranks": 2, "parts": 2}])
def test_trainer_of_lightning_passes(options, tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")

    def make(module, steps):
        return lightning.Trainer(
            accumulate_grad_batches=steps,
            accelerator="cpu",
            devices=options.get("ranks", 1),
            strategy="ddp" if "ranks" in options else "auto",
            default_root_dir=str(tmp_path),
            enable_progress_bar=False,
        )

    module = new(lambda: lightning_module(lightning))
    report = of_trainer(make, module, images(), **options)
    report.assert_passed()
    assert not [*tmp_path.iterdir()]


# --- fastai ---


@pytest.mark.slow
@pytest.mark.loops
@pytest.mark.draws
@pytest.mark.filterwarnings("ignore::Warning")
def test_learner_of_fastai_passes():
    fastai = pytest.importorskip("fastai.basics")
    accumulation = pytest.importorskip("fastai.callback.training").GradientAccumulation
    pixels, classes = images()
    rows = list(zip(pixels, classes, strict=True))

    def make(model, steps):
        loaders = fastai.DataLoaders.from_dsets(rows, rows, bs=4, device="cpu")
        return fastai.Learner(
            loaders,
            model,
            loss_func=torch.nn.functional.cross_entropy,
            cbs=accumulation(len(rows)),
        )

    report = of_trainer(make, new(Net), (pixels, classes))
    report.assert_passed()
