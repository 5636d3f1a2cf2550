"""The examples of the guide's pages leave what plain torch leaves; training programs come last."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from harness.models import Of
from harness.oracle import (
    assert_close,
    assert_gradients,
    assert_parameters,
    assert_step,
    build,
    randint,
    randn,
    seeded,
)
from harness.oracle import gradients as gradients_of
from harness.pages import World, blocks, read, run, sections
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, normalize, softplus
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from scatterpar import Replicated, Rows, ScatterOnceParallel, count_labels

PAGES = {
    page: {title: blocks(text, "python") for title, text in sections(f"docs/{page}.md").items()}
    for page in ("batches", "losses", "recipes", "tasks")
}
PAGES["contrastive"] = {"": blocks(read("docs/contrastive.md"), "python")}  # by number
PAGES["losses"][""] = blocks(read("docs/losses.md").partition("\n## ")[0], "python")
CRITERION = nn.CrossEntropyLoss()
IMAGES, LABELS = randn(25, 4), randint(3, 25)  # batches of 16 and 9
LENGTHS = [3, 1, 4, 2, 5]
IDS, FOLLOWING = randint(6, 5, 7), randint(6, 5, 7, seed=5)
TEXTS = {"ids": IDS, "labels": FOLLOWING}


def classifier(columns=3):
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, columns))


def language(function):
    """A language model of six words, and a function of it and the inputs."""
    return lambda: Of(function, words=nn.Embedding(6, 5), head=nn.Linear(5, 6))


def scores_of(model, ids):
    return model.head(model.words(ids))


def detect(model, images, targets):
    boxes = model.linear(torch.stack([image.mean((1, 2)) for image in images]))
    pairs = [(b - t["boxes"]).square().mean() for b, t in zip(boxes, targets, strict=True)]
    return {"boxes": torch.stack(pairs).mean(), "size": boxes.square().mean()}


def own_loss(model, input_ids, labels):
    """Over the following words, as in transformers."""
    logits = scores_of(model, input_ids)
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    return {"loss": loss, "logits": logits}


def logits_and_loss(model, ids, labels):
    logits = scores_of(model, ids)
    return logits, cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)


def logits_and_router(model, ids):
    return scores_of(model, ids), model.words(ids)[..., :3]


def two_towers(model, one, other):
    return normalize(model.body(one), dim=1), normalize(model.body(other), dim=1), model.scale


def clip():
    model = Of(two_towers, body=nn.Linear(4, 3))
    model.scale = nn.Parameter(torch.tensor(1.0))
    return model


def two_parts():
    def compute(model, images):
        return model.head(model.body(images))

    return Of(compute, body=nn.Sequential(nn.Linear(4, 6), nn.Tanh()), head=nn.Linear(6, 3))


def two_views():
    body = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))
    return Of(lambda model, one, other: (model.body(one), model.body(other)), body=body)


def texts_reader():
    def read_text(model, ids):
        return model.head(model.words(ids).tanh().sum(1))

    return Of(read_text, words=nn.Embedding(10, 4, padding_idx=0), head=nn.Linear(4, 3))


class Example(NamedTuple):
    """What an example trains, what it takes for granted, and the same loss by torch.

    ``numbers`` are those of the section's snippets, and ``name`` is what the page calls the model.
    ``plain(model, names)`` is the whole batch's loss; ``names`` has what the example defines.
    ``engine`` is the name of an engine that the page takes for granted.
    """

    page: str
    title: str
    name: str
    make: Callable[[], Any]
    given: Any
    plain: Callable[[Any, Any], Any]
    numbers: tuple[int, ...] = (0,)
    engine: str = ""
    relative: float = 1e-10


def plain_step(model, names):
    return CRITERION(model(names["images"]), names["labels"])


def classified(inputs):
    return lambda model, names: CRITERION(model(inputs), names["labels"])


def thawed(model, names):
    """Two steps, the first one of the head alone; the loss is that of the second."""
    frozen = CRITERION(model.head(model.body(IMAGES).detach()), LABELS)
    return plain_step(model, names) + frozen - frozen.detach()


def twice(model, names):
    loss = CRITERION(model(IMAGES, names["depth"]), LABELS)
    return 2 * loss - loss.detach()


def pixel_dice(model, names):
    """The oracle has means, where the page has sums."""
    scores, masks, dice = model(names["images"]), names["masks"], []
    for image, mask in zip(scores, masks, strict=True):
        at = mask != -100
        filled = image.softmax(0)[:, at]
        wanted = torch.stack([mask[at] == kind for kind in range(3)]).double()
        ratio = (2 * (filled * wanted).sum(1) + 1) / (filled.sum(1) + wanted.sum(1) + 1)
        dice.append(1 - ratio.mean())
    return torch.stack(dice).mean() + cross_entropy(scores, masks)


def read_texts(model, names):
    scores = model(names["pad"](names["texts"]))
    assert_close(names["scores"], scores.detach(), "scores")
    return cross_entropy(scores, names["labels"])


def windowed(model, names):
    terms = [cross_entropy(model(b["ids"]), b["labels"], reduction="sum") for b in names["loader"]]
    return sum(terms) / 9


def whole(loss, *inputs, targets=None):
    """The loss by this name of the page, of the model's output for these names."""

    def plain(model, names):
        return names[loss](model(*(names[one] for one in inputs)), names.get(targets))

    return plain


MASKS = randint(3, 9, 6, 6)
MASKS[2], MASKS[5, :4] = -100, -100  # images without a labelled pixel
PIXELS = {"images": randn(9, 1, 6, 6), "masks": randint(2, 9, 1, 6, 6).double()}
HOLES = randint(6, 9, 6).masked_fill(torch.arange(6) >= torch.arange(1, 10)[:, None], -100)
SEQUENCES = [randn(n, 3, seed=n) for n in LENGTHS]
VIEWS = {"one": randn(24, 5, seed=1), "other": randn(24, 5, seed=2)}
COLUMNS = {"pictures": randn(40, 4), "texts": randn(40, 4, seed=2)}
WORDS = [randint(9, 6, length, seed=length) for length in (3, 5, 4, 7)]
IMAGES_OF_SIZES = [randn(3, 4 + n, 5, seed=n) for n in LENGTHS]
BOXES = [{"boxes": randn(n, 4, seed=n)} for n in LENGTHS]
FOUND = [{"boxes": randn(n, 4, seed=n)} for n in (1, 3, 0, 2, 5, 1, 0, 0, 2)]
FEW = {"labels": randint(4, 5)}
WINDOW = [{"ids": randint(6, n, n + 1, seed=n), "labels": randint(6, n)} for n in (4, 3, 2)]
PADDING = torch.arange(7) >= torch.tensor([6, 3, 5, 2, 4])[:, None]


def segmentation(classes=1):
    return lambda: nn.Conv2d(1, classes, 3, padding=1)


def batches(title, make, given, plain):
    return Example("batches", title, "model", make, given, plain, engine="engine")


def of_losses(*args):
    return batches(*args)._replace(page="losses")


def of_recipe(title, plain=plain_step, *, name="model", make=classifier, given=None, **more):
    return Example("recipes", title, name, make, given or {}, plain, **more)


def dice(number, **more):
    plain = whole(("dice", "batch_dice")[number], "images", targets="masks")
    return Example(
        *("tasks", "Segmentation with a Dice loss", "model", segmentation(), PIXELS, plain),
        *((number,), "engine" * number),
    )


EXAMPLES = [
    batches(
        "Tensors without rows",
        lambda: Of(lambda model, x, mask: model.linear(x @ mask), linear=nn.Linear(4, 4)),
        {"x": randn(4, 4), "labels": FEW["labels"][:4]},
        lambda model, names: CRITERION(model(names["x"], names["mask"]), names["labels"]),
    ),
    batches(  # padding with zeros follows no path
        "Sequences of different lengths",
        lambda: Of(lambda model, x: model.linear(x).sum(1), linear=nn.Linear(3, 4, bias=False)),
        {"sequences": SEQUENCES, **FEW},
        classified(pad_sequence(SEQUENCES, batch_first=True)),
    ),
    batches(
        "Packed sequences",
        lambda: Of(lambda model, packed: model.rnn(packed)[1][0][0], rnn=nn.LSTM(3, 4)),
        {"sequences": SEQUENCES, **FEW},
        classified(pack_sequence(SEQUENCES, enforce_sorted=False)),
    ),
    batches(
        "Detection: a list of images and a list of dicts",
        lambda: Of(detect, linear=nn.Linear(3, 4)),
        {"images": IMAGES_OF_SIZES, "targets": BOXES},
        lambda model, names: sum(model(IMAGES_OF_SIZES, BOXES).values()),
    ),
    batches(
        "A window of batches",
        language(lambda model, ids: model.head(model.words(ids).mean(1))),
        {"loader": WINDOW, "count": None},
        windowed,
    ),
    of_losses(
        "Models that return `(logits, loss)`",
        language(logits_and_loss),
        {"ids": IDS, "labels": FOLLOWING.where(randn(5, 7) > 0, -1)},
        lambda model, names: model(IDS, names["labels"])[1],
    ),
    *(
        of_losses(title, language(logits_and_router), TEXTS, whole(loss, "ids", targets="labels"))
        for title, loss in (
            ("Auxiliary losses of a router", "with_router"),
            ("A router's load balance", "balanced"),
        )
    ),
    of_recipe(
        "Several inputs: tuples and mappings",
        twice,
        make=lambda: Of(lambda m, images, depth: m.linear(images * depth), linear=nn.Linear(4, 3)),
        given={"depth": randn(25, 4, seed=3)},
    ),
    Example(
        *("losses", "The model computes the loss itself", "language_model", language(own_loss)),
        {"ids": IDS, "padding": PADDING},
        lambda model, names: model(IDS, IDS.masked_fill(PADDING, -100))["loss"],
    ),
    Example(
        *("losses", "Several losses in one criterion", "two_heads"),
        lambda: Of(
            lambda model, x: (model.classes(x), model.sizes(x)),
            classes=nn.Linear(4, 3),
            sizes=nn.Linear(4, 2),
        ),
        {"sizes": randn(25, 2, seed=4)},
        lambda model, names: names["both"](
            model(IMAGES), {"class": LABELS, "size": names["sizes"]}
        ),
    ),
    *map(
        of_recipe,
        ["Keep the outputs of a step", "Unequal GPUs", "Compiled models"],
    ),
    of_recipe("Freezing and unfreezing parts", thawed, name="two_parts", make=two_parts),
    of_recipe(
        *("Half-precision parameters", classified(IMAGES.bfloat16())), name="half", relative=2e-2
    ),
    dice(0),
    dice(1),
    Example(
        *("tasks", "Segmentation with a Dice loss", "model", segmentation(3)),
        {"images": PIXELS["images"], "masks": MASKS},
        *(pixel_dice, (2,), "engine"),
    ),
    Example(
        *("tasks", "Texts of unequal lengths", "model", texts_reader),
        {"texts": [randint(9, 1 + 7 * row % 5, seed=row) + 1 for row in range(25)]},
        read_texts,
    ),
    Example(
        *("tasks", "Policy gradients", "policy", classifier),
        {"observations": IMAGES, "actions": LABELS, "returns": randn(25, seed=3)},
        whole("policy_loss", "observations", targets="targets"),
    ),
    Example(
        *("tasks", "Detection: a varying number of boxes per image", "detector"),
        lambda: classifier(4),
        {"images": randn(9, 4), "found": FOUND},
        whole("box_loss", "images", targets="found"),
    ),
    Example(
        *("tasks", "A teacher, and perceptual losses", "student", classifier),
        lambda: {"teacher": build(lambda: nn.Linear(4, 3))},
        lambda model, names: mse_loss(model(IMAGES), names["teacher"](IMAGES).detach()),
    ),
    Example(
        *("tasks", "Long sequences with checkpointing", "layers"),
        lambda: nn.ModuleList([nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)]),
        {"sequences": randn(9, 6, 4), "wanted": randn(9, 6, 4, seed=2)},
        lambda model, names: mse_loss(nn.Sequential(*model)(names["sequences"]), names["wanted"]),
    ),
    Example(
        *("losses", "", "language_model", language(scores_of)),
        {"words": randint(6, 9, 6), "padded": HOLES},
        whole("token_loss", "words", targets="padded"),
    ),
    Example(
        *("contrastive", "", "clip", clip, COLUMNS),
        *(whole("clip_loss", "pictures", "texts"), (2,)),
    ),
    Example(
        *("contrastive", "", "encoder", two_views),
        VIEWS | {"loader": [((VIEWS["one"], VIEWS["other"]), None)]},
        *(whole("nt_xent", "one", "other"), (1, 0)),
    ),
    Example(
        *("contrastive", "", "encoder", two_views, VIEWS),
        lambda model, names: names["info_nce"](*model(*VIEWS.values())),
        *((4,), "pairs"),
    ),
    Example(
        *("contrastive", "", "texts"),
        lambda: Of(lambda model, ids: model.words(ids).mean(1), words=nn.Embedding(9, 4)),
        lambda: {
            "batches": iter(WORDS),
            "spread": lambda found, _: (found @ found.T).logsumexp(1).mean(),
        },
        lambda model, names: names["spread"](torch.cat([model(ids) for ids in WORDS]), None),
        *((5,), "texts"),
    ),
]


def world(page, **names):
    """What the pages take for granted."""
    model = names.pop("model", None) or build(classifier)
    rows = len(names["images"]) if "images" in names else 25
    common = {"nn": nn, "cross_entropy": cross_entropy, "mse_loss": mse_loss}
    common |= {"dtype": torch.float64, "criterion": nn.CrossEntropyLoss(), "model": model}
    common["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    common |= {"Rows": Rows, "Replicated": Replicated}
    common |= {"images": IMAGES, "labels": LABELS[:rows]}
    return World(PAGES[page], **common | names)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile's
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: f"{e.page}-{e.title}{e.numbers}")
def test_loss_and_gradient_are_those_of_plain_torch(example, capsys):
    codes = [PAGES[example.page][example.title][number] for number in example.numbers]
    if any("info_nce" in code for code in codes):
        pytest.importorskip("info_nce")
    model = build(example.make)
    if example.name == "half":
        model.bfloat16()
    twin = copy.deepcopy(model)
    given = example.given() if callable(example.given) else example.given
    names = world(example.page, **given | {example.name: model})
    with contextlib.ExitStack() as stack:
        if example.engine:
            made = ScatterOnceParallel(model, 2, names["device_ids"])
            names[example.engine] = stack.enter_context(made)
        for code in codes:
            run(code, names)
    loss = example.plain(twin, names)
    loss.backward()
    assert_gradients(model, gradients_of(twin), example.relative)
    if "loss" in names:
        assert_close(names["loss"], loss.detach(), "loss", example.relative)
    assert any("print(" in code for code in codes) == bool(capsys.readouterr().out)


@pytest.mark.draws
@pytest.mark.skipif(
    importlib.util.find_spec("pytorch_metric_learning") is None, reason="needs '.[contrastive]'"
)
def test_pytorch_metric_learning():
    batch = randn(24, 5).float(), LABELS[:24]  # float32, as its own proxies
    names = world("contrastive", images=batch[0], labels=batch[1])
    model = build(lambda: nn.Linear(5, 4)).float()
    with ScatterOnceParallel(model, 3, names["device_ids"]) as names["engine"]:
        exec(PAGES["contrastive"][""][3], names)
        for criterion in (names["criterion"], names["batch_hard"]):
            assert_step(names["engine"], *batch, criterion, whole_batch=True, relative=1e-4)
    assert names["proxies"].proxies.grad is not None


# --- training programs ---


def loader(dtype=torch.float64):
    return list(zip(IMAGES.to(dtype).split(16), LABELS.split(16), strict=True))


def recipe(title, model=None, dtype=torch.float64, **names):
    model = (model or build(classifier)).to(dtype)
    return world("recipes", model=model, loader=loader(dtype), **names).follow(title)


def plain_loop(
    model, *optimizers, autocast=None, scaler=None, clip=None, schedule=None, average=None, data=()
):
    """The same training without the engine."""
    optimizers = optimizers or [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]
    schedule = schedule and schedule(optimizers[0])
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    for images, labels in data or loader(next(model.parameters()).dtype):
        model.zero_grad()
        with torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext():
            loss = CRITERION(model(images), labels)
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        if schedule:
            schedule.step()
        if average:
            average.update_parameters(model)


def cosine(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)


LOOPS = {
    "Mixed precision (bfloat16)": (torch.float32, lambda: {"autocast": torch.bfloat16}, 5e-3),
    "Mixed precision (float16), with a scaler and clipping": (
        torch.float32,
        lambda: {"autocast": torch.float16, "scaler": torch.amp.GradScaler("cpu"), "clip": 1.0},
        1e-3,
    ),
    "Clipping and schedules": (
        torch.float64,
        lambda: {"clip": 1.0, "schedule": cosine},
        1e-10,
    ),
    "Batches that do not fit": (torch.float64, dict, 1e-10),
    "Activations in host memory": (torch.float64, dict, 1e-10),
}


@pytest.mark.parametrize("title", LOOPS)
def test_a_loop_ends_at_the_weights_of_the_plain_one(title):
    dtype, how, relative = LOOPS[title]
    ours, plain = recipe(title, dtype=dtype)["model"], build(classifier).to(dtype)
    plain_loop(plain, **how())
    assert_parameters(ours, plain, relative)
    with pytest.raises(AssertionError, match="off by"):
        assert_parameters(ours, build(classifier).to(dtype), relative)


def test_averaged_weights():
    plain = build(classifier)
    average = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.999), use_buffers=True)
    plain_loop(plain, average=average)
    assert_parameters(recipe("Averaged weights (EMA)")["average"], average)


def test_the_optimizers_state_on_all_cards(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = build(classifier)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-4, weight_decay=0.1)
    plain_loop(plain, optimizer, clip=1.0)
    assert_parameters(recipe("The optimizer's state on all GPUs")["model"], plain)
    optimizer.load_state_dict(torch.load("optimizer.pt"))


def test_muon_for_matrices_and_adamw_for_the_rest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = build(classifier)
    matrices = [p for p in plain.parameters() if p.ndim == 2]
    others = [p for p in plain.parameters() if p.ndim != 2]
    optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=3e-4)]
    plain_loop(plain, *optimizers)
    ours = recipe("Muon for matrices, AdamW for the rest")["model"]
    assert_parameters(ours, plain, 1e-2)  # Muon computes in bfloat16
    for optimizer, state in zip(optimizers, torch.load("optimizers.pt"), strict=True):
        optimizer.load_state_dict(state)


def saved_run(epochs):
    """A run that is saved: dropout, a shuffled loader, everything that changes."""
    net = build(lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)))
    names = world("recipes", model=net, epochs=epochs, shuffle=torch.Generator())
    data = TensorDataset(IMAGES, LABELS)
    names["loader"] = DataLoader(data, 16, shuffle=True, generator=names["shuffle"])
    names["scheduler"] = cosine(names["optimizer"])
    names["scaler"] = torch.amp.GradScaler("cpu")
    names["engine"] = ScatterOnceParallel(net, 2, names["device_ids"])
    return names.follow("Save and resume")


@pytest.mark.draws
def test_resumed_is_the_same_as_uninterrupted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    uninterrupted = saved_run(epochs=4)
    Path("checkpoint.pt").rename("whole.pt")
    torch.manual_seed(0)
    saved_run(epochs=2)
    torch.manual_seed(5)  # another process
    resumed = saved_run(epochs=4)
    assert resumed["start"] == 2
    for name, tensor in uninterrupted["model"].state_dict().items():
        assert torch.equal(tensor, resumed["model"].state_dict()[name]), name
    assert sorted(path.name for path in Path().iterdir()) == ["checkpoint.pt", "whole.pt"]


@pytest.mark.draws
def test_your_own_dataset():
    names = recipe("Your own Dataset", features=IMAGES)
    assert len(names["loader"]) == 2
    assert names["loss"].isfinite()
    assert not torch.equal(names["model"][0].weight, build(classifier)[0].weight)


@pytest.mark.loops
@pytest.mark.draws
def test_qlora(tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 40}
    with seeded():
        base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    base.save_pretrained(tmp_path / "base")
    ids = randint(40, 7, 9)
    labels = ids.where(ids % 3 > 0, -100)
    folder, batch = tmp_path / "adapter", {"input_ids": ids, "labels": labels}
    kinds = ("get_peft_model", "prepare_model_for_kbit_training", "LoraConfig")
    names = {name: getattr(peft, name) for name in kinds} | {"count_labels": count_labels}
    names |= {n: getattr(transformers, n) for n in ("AutoModelForCausalLM", "BitsAndBytesConfig")}
    names = world("recipes", path=tmp_path / "base", folder=folder, loader=[batch], **names)
    found = names.follow("QLoRA on several GPUs")
    layers = [m for m in found["model"].modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
    assert len(layers) == 7
    how = {"quantization_config": found["quantization"], "device_map": "cpu"}
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", **how)
    plain.train()  # a CPU repacks 4-bit weights in evaluation mode
    assert_close(found["loss"], plain(**batch).loss.detach(), "loss", 1e-5)
    saved = peft.PeftModel.from_pretrained(plain, folder).train()
    trained = {n: p for n, p in saved.named_parameters() if "lora_B" in n}
    assert all(p.abs().sum() > 0 for p in trained.values())
    assert_close(saved(**batch).loss.detach(), found["model"](**batch).loss.detach(), "loss", 1e-5)


class Speaker(nn.Module):
    """Generates the next number until it is a multiple of five, and encodes words."""

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


def test_generation():
    class Tokenizer:
        pad_token_id = 0

        def batch_decode(self, ids):
            return [" ".join(str(i) for i in row if i) for row in ids.tolist()]

    sentences = [f"{'word ' * n}" for n in range(1, 8)]
    names = {"tokenizer": Tokenizer(), "sentences": sentences, "Rows": Rows}
    ids = torch.arange(1, 23).view(11, 2)
    world_ = world("recipes", model=Speaker(), batch={"ids": ids}, **names)
    found = world_.follow("Generation and other work on all GPUs")
    expected = found["model"].generate(ids)
    assert torch.equal(found["tokens"], expected)
    assert found["texts"] == Tokenizer().batch_decode(expected)
    assert_close(found["vectors"], found["model"].encode(sentences).detach(), "vectors")


def test_evaluation():
    model = build(classifier)
    engine = ScatterOnceParallel(model, 2, ["cpu:0", "cpu:1"])
    assert recipe("Evaluation", model, engine=engine)["right"] == (
        (model(IMAGES).argmax(1) == LABELS).sum()
    )
    assert model.training


def gan(pictures):
    models = {"generator": build(lambda: classifier(4)), "critic": build(lambda: classifier(1))}
    optimizers = {
        f"{name}_optimizer": torch.optim.SGD(model.parameters(), lr=0.1)
        for name, model in models.items()
    }
    return world("tasks", pictures=pictures, **models, **optimizers)


@pytest.mark.draws
def test_a_gan():
    pictures = [randn(9, 4), randn(5, 4, seed=2)]
    torch.manual_seed(0)
    ours = gan(pictures).follow("A GAN: two models, two optimizers")
    theirs = gan(pictures)
    generator, critic = theirs["generator"], theirs["critic"]
    torch.manual_seed(0)
    for images in pictures:
        critic.zero_grad()
        made = generator(torch.randn(len(images), 4, dtype=torch.float64)).detach()
        (softplus(-critic(images)) + softplus(critic(made))).mean().backward()
        theirs["critic_optimizer"].step()
        generator.zero_grad()
        made = generator(torch.randn(len(images), 4, dtype=torch.float64))
        softplus(-critic(made)).mean().backward()
        theirs["generator_optimizer"].step()
    for name in ("generator", "critic"):
        assert_parameters(ours[name], theirs[name])
    moved = ours["engine"].last_step.bytes  # of the generator's turn: a frozen model stays
    assert moved["reduce"] == sum(p.nbytes for p in generator.parameters())
    assert moved["replicate"] == sum(p.nbytes for p in critic.parameters())


def recurrent():
    """A cell that carries its state from one call to the next."""

    def compute(model, words, state):
        scores = []
        for step in model.words(words).unbind(1):
            state = model.cell(step, state)
            scores.append(model.head(state))
        return torch.stack(scores, 1), state

    layers = {"words": nn.Embedding(7, 5), "cell": nn.GRUCell(5, 6), "head": nn.Linear(6, 7)}
    return Of(compute, **layers)


def test_truncated_backpropagation():
    network, plain, text = build(recurrent), build(recurrent), randint(7, 9, 13)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (network, plain)]
    names = world("tasks", network=network, text=text, optimizer=optimizers[0])
    names.follow("Truncated backpropagation through time")
    state = torch.zeros(9, 6, dtype=torch.float64)
    for start in range(0, 12, 4):
        optimizers[1].zero_grad()
        output = plain(text[:, start : start + 4], state)
        names["next_words"](output, text[:, start + 1 : start + 5]).backward()
        state = output[1].detach()
        optimizers[1].step()
    assert_parameters(network, plain)


@pytest.mark.draws
def test_resumed_in_the_middle_of_an_epoch():
    dataset = TensorDataset(randn(30, 4), randint(3, 30))
    title = "Save and resume within an epoch"
    saved = copy.deepcopy(world("tasks", dataset=dataset).follow(title)["saved"])
    assert saved["at"]["done"] == 16
    again = world("tasks", dataset=dataset).follow(title)  # its own first steps: undone by loading
    again["model"].load_state_dict(saved["model"])
    again["optimizer"].load_state_dict(saved["optimizer"])
    vars(again["sampler"]).update(saved["at"])
    with ScatterOnceParallel(again["model"], 2, again["device_ids"]) as again["engine"]:
        again["train"](again["sampler"], steps=99)
    assert (again["sampler"].epoch, again["sampler"].done) == (1, 0)
    plain = build(classifier)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    plain_loop(plain, data=[dataset[rows] for rows in order.split(8)])
    assert_parameters(again["model"], plain)


def test_no_example_goes_untested():
    source = Path(__file__).read_text(encoding="utf-8")
    for page in ("batches", "losses", "recipes", "tasks"):
        for title in PAGES[page]:
            assert f'"{title}"' in source, title
    assert [len(PAGES[page][""]) for page in ("losses", "contrastive")] == [1, 6]
