"""The scripts in examples/: the original's lines and the engine's give the same curves."""

from __future__ import annotations

import copy
import re
from itertools import islice

import pytest
import torch
from harness.oracle import assert_close, build, seeded
from harness.pages import ROOT, example

from scatterpar import ScatterOnceParallel

DIGITS = 1e-12

pytestmark = pytest.mark.usefixtures("one_thread_an_operation")


def assert_same_curves(model, curve_of, engine_of):
    """The lines with an engine give the original's losses (``curve_of``) and final parameters."""
    plain = copy.deepcopy(model)
    start = [p.detach().clone() for p in model.parameters()]
    expected = list(curve_of(plain, None))
    with engine_of(model) as engine:
        found = list(curve_of(model, engine))
    assert len(found) == len(expected) > 3
    assert len(set(expected)) == len(expected)
    for mine, its in zip(found, expected, strict=True):
        assert abs(mine - its) <= DIGITS * abs(its)
    for mine, its, before in zip(model.parameters(), plain.parameters(), start, strict=True):
        assert_close(mine.detach(), its.detach(), "parameter", 1e-10)
        assert not torch.equal(its, before)


@pytest.fixture(scope="module")
def images():
    """Two small batches of the images that the script reads, in float64."""
    with seeded():
        batches, _ = example("mnist").loaders(5, torch.float64)
        return list(islice(batches, 2))


def test_mnist(devices, images):
    mnist = example("mnist")

    def curve(model, engine):
        optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
        for _ in range(2):
            yield from mnist.train(model, engine, images, optimizer)
            scheduler.step()

    model = build(lambda: mnist.Net(dropout=0.0))
    assert_same_curves(model, curve, lambda m: ScatterOnceParallel(m, 2, devices(2)))


def test_word_language_model(devices):
    """The last stretch is shorter, and the rows are not divided evenly."""
    words = example("word_language_model")
    _, text, _ = words.corpus(rows=7)
    text = text[:33] % 50

    def curve(model, engine):
        for lr in (20.0, 5.0):
            yield from words.train(model, engine, text, 9, lr)

    model = build(lambda: words.RNNModel(50, 8, dropout=0.0))
    assert_same_curves(model, curve, lambda m: ScatterOnceParallel(m, 2, devices(2), dim=1))


def test_char_gpt(devices):
    gpt = example("char_gpt")
    characters, text = gpt.lines(longest=30)
    long = [line for line in text if len(line) == 31]
    text = [line[: 2 + 4 * i % 29] for i, line in enumerate(long)]
    batches = [gpt.collate(text[i : i + 7]) for i in range(0, 35, 7)]
    assert all((y == gpt.IGNORED).any() for _, y in batches)

    def curve(model, engine):
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3, betas=(0.9, 0.95))
        yield from gpt.train(model, engine, batches, optimizer)

    model = build(lambda: gpt.GPT(characters, 30, 16, dropout=0.0))
    assert_same_curves(model, curve, lambda m: ScatterOnceParallel(m, 2, devices(2)))


SHORT = {
    "mnist": ["--epochs", "1"],
    "word_language_model": ["--rows", "40", "--size", "8", "--length", "9", "--epochs", "1"],
    "char_gpt": ["--rows", "4", "--size", "8", "--longest", "12"],
}


@pytest.mark.draws
@pytest.mark.parametrize("name", SHORT)
def test_the_scripts_run_and_print_the_same(name, capsys, images):
    module, printed = example(name), []
    if name == "mnist":
        module.loaders = lambda rows, dtype: (images, images)
    for more in (["--stock"], ["--devices", "cpu", "cpu", "--accum", "2"]):
        module.main([*SHORT[name], "--steps", "2", "--double", "--dropout", "0", *more])
        printed.append(capsys.readouterr().out)
    assert "loss" in printed[0]
    assert printed[0] == printed[1]


PUBLIC = [*ROOT.glob("examples/*.py"), *ROOT.glob("notebooks/*.ipynb")]


@pytest.mark.parametrize("path", PUBLIC, ids=lambda path: path.stem)
def test_scripts_and_notebooks_import_public_names_alone(path):
    source = path.read_text(encoding="utf-8")
    modules = re.findall(r'^[\s"]*(?:from|import) (scatterpar[\w.]*)', source, re.MULTILINE)
    assert modules
    for module in modules:
        assert re.fullmatch(r"scatterpar(\.recipe|\.integrations\.\w+)?", module), module


def test_every_script_is_tested():
    elsewhere = {"dpo_lora", "embeddings"}  # by the tests of those trainers
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == SHORT.keys() | elsewhere
