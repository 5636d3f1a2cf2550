"""The examples of the guide's pages run, and each of their gradients is that of plain
torch.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from harness.models import Of
from harness.oracle import assert_close, build, randint, randn, seeded
from harness.pages import Checked, blocks, read, sections
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, normalize
from torch.utils.data import DataLoader, TensorDataset

import scatterpar
from scatterpar import Replicated, Rows, ScatterOnceParallel, count_labels

PAGES = {
    page: {
        title: blocks(text, "python")
        for title, text in sections(f"docs/{page}.md").items()
    }
    for page in ("batches", "losses", "recipes")
}

IMAGES, LABELS = randn(25, 4), randint(3, 25)
LOADER = list(zip(IMAGES.split(16), LABELS.split(16), strict=True))
IDS, FOLLOWING = randint(6, 5, 7), randint(6, 5, 7, seed=5)
TEXTS = {"ids": IDS, "labels": FOLLOWING}
LENGTHS = [3, 1, 4, 2, 5]
SEQUENCES = [randn(n, 3, seed=n) for n in LENGTHS]
FEW = randint(4, 5)
MASKS = randint(3, 9, 6, 6)
PADDED = {
    "words": randint(6, 9, 6),
    "padded": randint(6, 9, 6).masked_fill(
        torch.arange(6) >= torch.arange(1, 10)[:, None], -100
    ),
}
GRAPHS = [
    {"x": randn(n, 4, seed=n), "edges": randint(n, 2, 2 * n, seed=n)}
    for n in (3, 5, 2, 7, 1, 4, 6, 2, 3)
]


def padded(words, rows, length, seed):
    """Texts of different lengths, with zeros at their ends."""
    lengths = 2 + torch.arange(rows)[:, None] % (length - 1)
    texts = randint(words - 1, rows, length, seed=seed) + 1
    return texts.masked_fill(torch.arange(length) >= lengths, 0)


def classifier(columns=3):
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, columns))


def language(function):
    """A language model of six words, and a function of it and the inputs."""
    return Of(function, words=nn.Embedding(6, 5), head=nn.Linear(5, 6))


def scores_of(model, ids):
    return model.head(model.words(ids))


def own_loss(model, input_ids, labels):
    """Over the following words, as in transformers."""
    logits = scores_of(model, input_ids)
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    return {"loss": loss, "logits": logits}


def logits_and_loss(model, ids, labels):
    logits = scores_of(model, ids)
    return logits, cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-1
    )


def logits_and_router(model, ids):
    return scores_of(model, ids), model.words(ids)[..., :3]


def detect(model, images, targets):
    boxes = model.linear(torch.stack([image.mean((1, 2)) for image in images]))
    pairs = [
        (b - t["boxes"]).square().mean() for b, t in zip(boxes, targets, strict=True)
    ]
    return {"boxes": torch.stack(pairs).mean(), "size": boxes.square().mean()}


def encode_and_decode(model, images):
    mean, log_variance = model.linear(images).chunk(2, 1)
    return mean.tanh(), mean, log_variance


class Translator(nn.Module):
    """Makes its masks of padding from the rows of the micro-batch."""

    def __init__(self, words=20, width=8):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.layers = nn.Transformer(width, 2, 1, 1, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, source, target):  # [rows, length] each
        later = torch.ones(target.shape[1], target.shape[1], device=target.device)
        hidden = self.layers(
            self.words(source),
            self.words(target),
            tgt_mask=later.triu(1).bool(),
            src_key_padding_mask=source == 0,
            tgt_key_padding_mask=target == 0,
            memory_key_padding_mask=source == 0,
        )
        return self.head(hidden)


class SupCon(nn.Module):
    """Features ``[rows, views, width]``, and a label per row."""

    def forward(self, features, labels, temperature=0.1):
        kinds = labels.repeat_interleave(features.shape[1])
        flat = features.flatten(0, 1)
        itself = torch.eye(len(flat), dtype=torch.bool, device=flat.device)
        alike = (kinds[:, None] == kinds) & ~itself
        scores = (flat @ flat.T / temperature).masked_fill(itself, -torch.inf)
        logs = scores.log_softmax(1).masked_fill(~alike, 0)
        return -(logs.sum(1) / alike.sum(1)).mean()


class Speaker(nn.Module):
    """Generates the next number until it is a multiple of five, and encodes words."""

    pad_token_id = 0

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def generate(self, ids, max_new_tokens=20, do_sample=True):
        text = ids
        while max_new_tokens and (text[:, -1] % 5).any():
            text = torch.cat([text, (text[:, -1:] + 1) * (text[:, -1:] % 5 > 0)], 1)
            max_new_tokens -= 1
        return text

    def encode(self, words):
        return self.scale * torch.tensor([[len(word), 1.0] for word in words])

    def batch_decode(self, ids):
        return [" ".join(str(i) for i in row if i) for row in ids.tolist()]


# What a section takes for granted besides ``given``: ``model`` and other names of its
# snippets. A function of no argument makes a module.
GIVEN = {
    "Tensors without rows": {
        "model": lambda: Of(
            lambda m, x, mask: m.linear(x @ mask), linear=nn.Linear(4, 4)
        ),
        "x": randn(4, 4),
        "labels": FEW[:4],
    },
    "Sequences of different lengths": {
        "model": lambda: Of(
            lambda m, x: m.linear(x).sum(1), linear=nn.Linear(3, 4, bias=False)
        ),
        "sequences": SEQUENCES,
        "labels": FEW,
    },
    "Packed sequences": {
        "model": lambda: Of(
            lambda model, packed: model.rnn(packed)[1][0][0], rnn=nn.LSTM(3, 4)
        ),
        "sequences": SEQUENCES,
        "labels": FEW,
    },
    "Detection: a list of images and a list of dicts": {
        "model": lambda: Of(detect, linear=nn.Linear(3, 4)),
        "images": [randn(3, 4 + n, 5, seed=n) for n in LENGTHS],
        "targets": [{"boxes": randn(n, 4, seed=n)} for n in LENGTHS],
    },
    "A window of batches": {
        "model": lambda: language(
            lambda model, ids: model.head(model.words(ids).mean(1))
        ),
        "loader": [
            {"ids": randint(6, n, 5, seed=n), "labels": randint(6, n)}
            for n in (4, 3, 2)
        ],
        "count": None,
    },
    "Models that return `(logits, loss)`": {
        "model": lambda: language(logits_and_loss),
        "ids": IDS,
        "labels": FOLLOWING.where(randn(5, 7) > 0, -1),
    },
    "Auxiliary losses of a router": {
        "model": lambda: language(logits_and_router),
        **TEXTS,
    },
    "The model computes the loss itself": {
        "language_model": lambda: language(own_loss),
        "ids": IDS,
        "padding": torch.arange(7) >= torch.tensor([6, 3, 5, 2, 4])[:, None],
    },
    "Numbers to log": {"model": lambda: Of(encode_and_decode, linear=nn.Linear(4, 8))},
    "Your own Dataset": {"dataset": TensorDataset(IMAGES, LABELS)},
    "Half-precision parameters": {"half": build(classifier).bfloat16()},
    "Segmentation with a Dice loss": {
        "model": lambda: nn.Conv2d(1, 3, 3, padding=1),
        "images": randn(9, 1, 6, 6),
        "masks": nn.functional.one_hot(MASKS.clamp(min=0), 3).movedim(-1, 1).double(),
    },
    "Texts of unequal lengths": {
        "model": lambda: Of(
            lambda model, ids: model.head(model.words(ids).tanh().sum(1)),
            words=nn.Embedding(10, 4, padding_idx=0),
            head=nn.Linear(4, 3),
        ),
        "texts": [randint(9, 1 + 7 * row % 5, seed=row) + 1 for row in range(25)],
    },
    "Translation: two texts, padding and masks": {
        "model": Translator,
        "translations": [
            (padded(20, 9, 7, seed=n), padded(20, 9, 6, seed=n + 5)) for n in (1, 2)
        ],
    },
    "A GAN: two models, two optimizers": {
        "generator": lambda: classifier(4),
        "critic": lambda: classifier(1),
        "pictures": [randn(9, 4), randn(5, 4, seed=2)],
    },
    "Detection: a varying number of boxes per image": {
        "detector": lambda: classifier(4),
        "images": randn(9, 4),
        "found": [{"boxes": randn(n, 4, seed=n)} for n in (1, 3, 0, 2, 5, 1, 0, 0, 2)],
    },
    "Two views of each image, and labels": {
        "encoder": lambda: classifier(4),
        "first": randn(9, 4),
        "second": randn(9, 4, seed=1),
        "labels": torch.arange(9) % 3,
        "supcon": SupCon(),
    },
    "Graphs": {
        "graphs": GRAPHS,
        "labels": randint(3, 9),
        "labels_of_nodes": [randint(3, len(graph["x"])) for graph in GRAPHS],
    },
    "A teacher, and perceptual losses": {
        "student": classifier,
        "teacher": lambda: nn.Linear(4, 3),
    },
    "A mean over other terms": {
        "language_model": lambda: language(scores_of),
        **PADDED,
    },
    "Two means over different terms": {"model": lambda: language(scores_of), **PADDED},
    "Generation and other work on all GPUs": {
        "model": Speaker,
        "tokenizer": Speaker(),
        "batch": {"ids": torch.arange(1, 23).view(11, 2)},
        "sentences": [f"{'word ' * n}" for n in range(1, 8)],
    },
}
# What a section's names must be at its end, besides the gradients.
ENDS = {
    "Numbers to log": lambda n: (
        {*n["engine"].last_step.logged} == {"error", "kl"}
        and sum(n["engine"].last_step.logged.values())
        == pytest.approx(n["loss"].item())
    ),
    "Keep the outputs of a step": lambda n: torch.allclose(
        n["scores"], n["model"](IMAGES)
    ),
    "Generation and other work on all GPUs": lambda n: (
        n["tokens"].equal(n["model"].generate(n["batch"]["ids"]))
        and n["texts"] == n["model"].batch_decode(n["tokens"])
        and n["vectors"].equal(n["model"].encode(n["sentences"]))
    ),
    "Texts of unequal lengths": lambda n: torch.allclose(
        n["scores"], n["model"](n["pad"](n["texts"]))
    ),
    "Graphs": lambda n: all(
        torch.allclose(nodes, n["model"].nodes(**n["joined"]([graph]))[0])
        for nodes, graph in zip(n["nodes"], GRAPHS, strict=True)
    ),
    # the critic is frozen in the last step
    "A GAN: two models, two optimizers": lambda n: (
        n["engine"].last_step.bytes["reduce"]
        == sum(p.nbytes for p in n["generator"].parameters())
    ),
}
# Sections with a test of their own below.
OWN = {
    "QLoRA on several GPUs",
    "Save and resume",
    # in test_evaluation.py
    "Evaluate",
    "Batches that do not fit",
}
ALL = [(page, title) for page in PAGES for title in PAGES[page] if title not in OWN]


@pytest.fixture
def follow(monkeypatch, tmp_path):
    """``follow(page, title, **names)`` runs the section's snippets. Returns their
    names.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(scatterpar, "ScatterOnceParallel", Checked)
    Checked.engines.clear()

    def run_section(page, title, **names):
        given = {"model": classifier, **GIVEN.get(title, {})}
        made = {
            k for k, v in given.items() if callable(v) and not isinstance(v, nn.Module)
        }
        names = given | {name: build(given[name]) for name in made} | names
        common = {
            "nn": nn,
            "torch": torch,
            "scatterpar": scatterpar,
            "dtype": torch.float64,
        }
        common |= {
            "cross_entropy": cross_entropy,
            "mse_loss": mse_loss,
            "normalize": normalize,
        }
        common |= {"criterion": nn.CrossEntropyLoss(), "device": torch.device("cpu")}
        common |= {
            "ScatterOnceParallel": Checked,
            "Rows": Rows,
            "Replicated": Replicated,
        }
        rows = len(names["images"]) if "images" in names else 25
        common |= {"images": IMAGES, "labels": LABELS[:rows], "loader": LOADER}
        common["device_ids"] = ["cpu:0", "cpu:1"]
        for name, value in list(names.items()):
            if isinstance(value, nn.Module) and list(value.parameters()):
                prefix = "" if name == "model" else f"{name}_"
                common[f"{prefix}optimizer"] = torch.optim.SGD(
                    value.parameters(), 0.1, 0.9
                )
        names = common | names
        # engines that the page takes for granted
        for name in ("engine", "texts"):
            code, trained = (
                "\n".join(PAGES[page][title]),
                names.get(name, names["model"]),
            )
            is_made = f"{name} = " in code or isinstance(trained, ScatterOnceParallel)
            if f"{name}." in code and not is_made and isinstance(trained, nn.Module):
                names[name] = Checked(trained, 2, names["device_ids"])
        for code in PAGES[page][title]:
            exec(code, names)
        return names

    yield run_section
    for engine in Checked.engines:
        engine.close()
    monkeypatch.undo()


@pytest.mark.draws
@pytest.mark.parametrize(("page", "title"), ALL)
def test_gradients_of_section_as_plain_torch(page, title, follow, capsys):
    names = follow(page, title)
    code = "\n".join(PAGES[page][title])
    assert ("print(" in code) == bool(capsys.readouterr().out)
    assert (
        sum(engine.compared for engine in Checked.engines)
        or "forward_backward" not in code
    )
    assert ENDS.get(title, lambda names: True)(names)


class OnTwo(Checked):
    """An engine that takes two virtual devices in the place of all GPUs."""

    def __init__(self, module, accum):
        super().__init__(module, accum, ["cpu:0", "cpu:1"])


@pytest.mark.draws
def test_contrastive_page_defines_its_names(monkeypatch):
    """From top to bottom, without other libraries where they are not installed."""
    monkeypatch.setattr(scatterpar, "ScatterOnceParallel", OnTwo)
    Checked.engines.clear()
    snippets = blocks(read("docs/contrastive.md"), "python")
    names = {}
    for code in snippets:
        libraries = re.findall(r"^from (pytorch_metric_learning)", code)
        if all(find_spec(name) for name in libraries):
            exec(code, names)
    steps = sum(engine.compared for engine in Checked.engines)
    for engine in Checked.engines:
        engine.close()
    assert steps >= 3


@pytest.mark.draws
def test_resumed_run_has_the_same_bits(follow):
    def train(epochs, seed):
        """A run with everything that a checkpoint has."""
        net = build(
            lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3))
        )
        shuffle = torch.Generator()
        optimizer = torch.optim.SGD(net.parameters(), 0.1, 0.9)
        data = DataLoader(
            TensorDataset(IMAGES, LABELS), 16, shuffle=True, generator=shuffle
        )
        names = {"model": net, "shuffle": shuffle, "loader": data, "epochs": epochs}
        names |= {"optimizer": optimizer, "scaler": torch.amp.GradScaler("cpu")}
        names["scheduler"] = torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, T_max=4
        )
        # dropout is no oracle
        names["engine"] = ScatterOnceParallel(net, 2, ["cpu:0", "cpu:1"])
        Checked.engines.append(names["engine"])
        torch.manual_seed(seed)
        return follow("recipes", "Save and resume", **names)

    uninterrupted = train(epochs=4, seed=0)
    Path("checkpoint.pt").rename("whole.pt")
    train(epochs=2, seed=0)
    resumed = train(epochs=4, seed=5)  # another process
    assert resumed["start"] == 2
    for name, tensor in uninterrupted["model"].state_dict().items():
        assert torch.equal(tensor, resumed["model"].state_dict()[name]), name
    assert sorted(path.name for path in Path().iterdir()) == [
        "checkpoint.pt",
        "whole.pt",
    ]


@pytest.mark.loops
@pytest.mark.draws
def test_qlora_example_runs(follow, tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    peft, transformers = (
        pytest.importorskip("peft"),
        pytest.importorskip("transformers"),
    )
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 40}
    with seeded():
        base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    base.save_pretrained(tmp_path / "base")
    ids = randint(40, 7, 9)
    folder, batch = (
        tmp_path / "adapter",
        {"input_ids": ids, "labels": ids.where(ids % 3 > 0, -100)},
    )
    of_peft = ("get_peft_model", "prepare_model_for_kbit_training", "LoraConfig")
    names = {name: getattr(peft, name) for name in of_peft}
    names |= {
        n: getattr(transformers, n)
        for n in ("AutoModelForCausalLM", "BitsAndBytesConfig")
    }
    names |= {"path": tmp_path / "base", "folder": folder, "loader": [batch]}
    names["count_labels"] = count_labels
    found = follow("recipes", "QLoRA on several GPUs", **names)
    layers = [
        m for m in found["model"].modules() if isinstance(m, bitsandbytes.nn.Linear4bit)
    ]
    assert len(layers) == 7
    how = {"quantization_config": found["quantization"], "device_map": "cpu"}
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", **how)
    plain.train()  # a CPU repacks 4-bit weights in evaluation mode
    assert_close(found["loss"], plain(**batch).loss.detach(), "loss", 1e-5)
    saved = peft.PeftModel.from_pretrained(plain, folder).train()
    assert_close(
        saved(**batch).loss.detach(),
        found["model"](**batch).loss.detach(),
        "loss",
        1e-5,
    )
