"""What ``docs/comparison.md`` says of releases. One that mends it is noticed here."""

from __future__ import annotations

from functools import partial
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
import transformers
from harness.optional import import_torchvision_first
from harness.trainers import sequence_classifier, tokenizer
from libraries.tiny import bert, llama
from splitting.loop_models import new, pairs, tokens
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scatterpar import splitcheck
from scatterpar.splitting import of_trainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.draws,
    pytest.mark.filterwarnings("ignore::Warning"),
]

MENDED = "is now the same: take the row out of docs/comparison.md, or name the version"


def needed(name):
    """A library that is not in the extras; its own need of torchvision is met."""
    import_torchvision_first()
    return pytest.importorskip(name, reason=f"pip install {name}")


def arguments(folder, steps):
    return transformers.TrainingArguments(
        str(folder), gradient_accumulation_steps=steps, use_cpu=True, disable_tqdm=True
    )


def texts():
    ids, labels = tokens()
    return {"input_ids": ids, "labels": ids.masked_fill(labels == -100, -100)}


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_head_with_a_loss_of_its_own(ranks, tmp_path):
    """Its mean is taken for a sum over all labels, so nothing divides it.

    On 8 processes with 4 micro-batches the gradient is 32 times the right one.
    """

    def make(model, steps):
        return transformers.Trainer(
            model, arguments(tmp_path, steps), train_dataset=[0]
        )

    def mended(model, steps):
        trainer = make(model, steps)
        trainer.model_accepts_loss_kwargs = False
        return trainer

    batch = {"input_ids": tokens(32)[0], "labels": torch.arange(32) % 3}
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


# --- TRL: the divisor counts the labels of all processes, and DDP averages ---


def byte_tokenizer():
    """A token for each byte, as GOLD wants it."""
    kinds = pytest.importorskip("tokenizers")
    alphabet = sorted(kinds.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", *alphabet])}
    fast = kinds.Tokenizer(kinds.models.BPE(vocabulary, []))
    fast.pre_tokenizer = kinds.pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = kinds.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, eos_token="<eos>", pad_token="<pad>"
    )


def distilled(kind, *, is_mended, folder):
    """``make`` of a trainer that distils a model, and a model of its vocabulary."""
    pytest.importorskip("trl", reason="pip install '.[trl]'")
    rows = pytest.importorskip("datasets").Dataset
    home = pytest.importorskip(f"trl.experimental.{kind.lower()}")
    stock = getattr(home, f"{kind}Trainer")
    words = byte_tokenizer() if kind == "GOLD" else tokenizer(eos_token="1")
    words.padding_side = "left"
    words.chat_template = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
    student = partial(llama, vocab_size=300 if kind == "GOLD" else 50)
    teacher = new(partial(student, initializer_range=0.5))
    messages = [{"role": "user", "content": "4 5"}]
    messages.append({"role": "assistant", "content": "6 7"})

    class Mended(stock):
        def compute_loss(
            self, model, inputs, return_outputs=False, num_items_in_batch=1
        ):
            count = num_items_in_batch / self.accelerator.num_processes
            return super().compute_loss(model, inputs, return_outputs, count)

    def make(model, steps):
        config = getattr(home, f"{kind}Config")(
            str(folder),
            gradient_accumulation_steps=steps,
            use_cpu=True,
            disable_tqdm=True,
            bf16=False,
            lmbda=0.0,
        )
        return (Mended if is_mended else stock)(
            model,
            teacher,
            args=config,
            train_dataset=rows.from_list([{"messages": messages}] * 4),
            processing_class=words,
        )

    return make, student


def completions():
    ids, labels = tokens()
    ids = ids.clamp_min(2)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": labels.where(labels == -100, ids),
    }


@pytest.mark.parametrize("kind", ["GKD", "GOLD"])
def test_distillation_on_ranks(kind, tmp_path):
    make, student = distilled(kind, is_mended=False, folder=tmp_path)
    of_trainer(make, new(student), completions()).assert_passed()
    report = of_trainer(make, new(student), completions(), ranks=2)
    assert not report.passed, f"TRL {version('trl')}: {kind} {MENDED}"
    assert report.cause == "constant factor"
    assert report.ratio == pytest.approx(0.5)
    make, student = distilled(kind, is_mended=True, folder=tmp_path)
    of_trainer(make, new(student), completions(), ranks=2).assert_passed()


# --- contrastive losses ---


def test_guided_loss_of_gathered_candidates(tmp_path):
    """Anchors are compared with those of their own process alone."""
    kinds = pytest.importorskip("sentence_transformers")
    rows = pytest.importorskip("datasets").Dataset
    folder = tmp_path / "encoder"
    sequence_classifier(num_labels=1).save_pretrained(folder)
    tokenizer(sep_token="2", cls_token="3").save_pretrained(folder)
    modules = kinds.sentence_transformer.modules
    losses = kinds.sentence_transformer.losses

    def encoder():
        layers = [modules.Transformer(str(folder)), modules.Pooling(8)]
        return kinds.SentenceTransformer(modules=layers, device="cpu")

    guide = new(encoder)
    guide.requires_grad_(False)

    def make(model, steps, contrast=True):
        config = kinds.SentenceTransformerTrainingArguments(
            str(tmp_path / "out"),
            gradient_accumulation_steps=steps,
            use_cpu=True,
            disable_tqdm=True,
        )
        loss = losses.GISTEmbedLoss(
            model, guide, gather_across_devices=True, contrast_anchors=contrast
        )
        few = rows.from_list(texts_of_pairs()[:2])
        return kinds.SentenceTransformerTrainer(
            model, config, train_dataset=few, loss=loss
        )

    report = of_trainer(make, new(encoder), texts_of_pairs(), ranks=2)
    name = f"sentence-transformers {version('sentence-transformers')}"
    assert not report.passed, f"{name} {MENDED}"
    assert report.cause == "rows are compared"
    mended = partial(make, contrast=False)
    of_trainer(mended, new(encoder), texts_of_pairs(), ranks=2).assert_passed()


def texts_of_pairs():
    pairs = []
    for row in tokens()[0].clamp(4, 28).tolist():
        first = " ".join(map(str, row[:4]))
        pairs.append({"anchor": first, "positive": " ".join(map(str, row[4:]))})
    return pairs


def clip(library):
    towers = {"width": 16, "layers": 1}
    seen = library.CLIPVisionCfg(patch_size=4, image_size=8, head_width=8, **towers)
    read = library.CLIPTextCfg(context_length=8, vocab_size=50, heads=2, **towers)
    return library.CLIP(8, seen, read, output_dict=True)


class Batches(list):
    """What open_clip asks its loader for."""

    @property
    def num_batches(self):
        return len(self)

    @property
    def num_samples(self):
        return sum(len(images) for images, _ in self)


def test_scale_of_open_clip_with_accum_freq():
    """Only the scale gets the gradient of the whole loss once per micro-batch."""
    open_clip = needed("open_clip")
    train = pytest.importorskip("open_clip_train.train")
    names = "skip_scheduler distill horovod rank local_rank wandb distributed"
    unused = dict.fromkeys([*names.split(), "grad_clip_norm", "log_local"])
    unused["skip_scheduler"] = True

    def stock(model, batches):
        options = SimpleNamespace(
            **unused,
            device="cpu",
            precision="fp32",
            accum_freq=len(batches),
            world_size=1,
            batch_size=4,
            log_every_n_steps=100,
        )
        loader = SimpleNamespace(dataloader=Batches(batches), set_epoch=lambda _: None)
        optimizer = torch.optim.AdamW(model.parameters())
        loss = open_clip.ClipLoss()
        data = {"train": loader}
        train.train_one_epoch(
            model, data, loss, 0, optimizer, None, None, None, options
        )

    def mended(model, batches):
        model.logit_scale.register_hook(lambda gradient: gradient / len(batches))
        stock(model, batches)

    def divided(model, batches):
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient / len(batches))
        stock(model, batches)

    generator = torch.Generator().manual_seed(0)
    images = torch.randn(16, 3, 8, 8, generator=generator)
    batch = images, torch.randint(1, 50, (16, 8), generator=generator)
    model = new(partial(clip, open_clip))
    report = splitcheck(stock, model, batch, equal=True)
    name = f"open_clip_torch {version('open_clip_torch')}"
    assert not report.passed, f"{name} {MENDED}"
    assert report.wrong == ["logit_scale"]
    assert "In logit_scale the gradient is 4 times the right one" in report.why
    assert "dividing the loss would make the others wrong" in report.remedy
    splitcheck(mended, model, batch, equal=True).assert_passed()
    report = splitcheck(divided, model, batch, equal=True)
    assert "logit_scale" not in report.wrong


class Prototypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(10, 8)
        self.prototypes = nn.Parameter(torch.randn(6, 8))

    def forward(self, rows):
        return self.net(rows), self.prototypes


@pytest.mark.parametrize("weight", [1.0, 0.0])
def test_regularisation_of_msn_on_ranks(weight):
    """The entropy of the mean is that of each process; without it, all is right."""
    losses = needed("lightly.loss")

    def step(model, batches):
        criterion = losses.MSNLoss(
            gather_distributed=True, regularization_weight=weight
        )
        parallel = DistributedDataParallel(model)
        ((first, second),) = batches
        outputs, prototypes = parallel(torch.cat([first, second]))
        anchors, targets = outputs.chunk(2)
        criterion(anchors, targets.detach(), prototypes).backward()

    report = splitcheck(step, new(Prototypes), pairs(), ranks=2)
    if not weight:
        report.assert_passed()
        return
    assert not report.passed, f"lightly {version('lightly')} {MENDED}"
    assert report.cause == "rows are compared"
    assert "no module does" in report.why
