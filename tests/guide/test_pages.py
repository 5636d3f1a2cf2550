"""The guide: its snippets run, its tables come out, its messages are the package's."""

from __future__ import annotations

import gc
import logging
import re
import sys

import pytest
import torch
from harness.models import Of
from harness.oracle import assert_gradients, build, gradients, randint, randn
from harness.pages import Checked, blocks, namespace, read, run, sections
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrize

import scatterpar
from scatterpar import ScatterOnceParallel
from scatterpar.log import logger
from scatterpar.plan import make_plan
from scatterpar.torch_private.thread_modes import PROFILE_ALL_THREADS

START = blocks(read("docs/start.md"), "python")


# --- debug ---

DEBUG = read("docs/debugging.md")
FAILS, ALONE, WITH_ONE_REPLICA, NOT_FINITE, BAD_ROWS, ANOMALY, LOG = blocks(
    DEBUG, "python"
)
CHECK = "print(engine.check(images, labels, criterion))"
FAILURE, NOTE_OF_NAN = blocks(DEBUG, "text")


@pytest.fixture
def names():
    """What the snippets take for granted."""
    model = build(lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))
    names = {"torch": torch, "ScatterOnceParallel": ScatterOnceParallel, "model": model}
    names |= {
        "images": randn(64, 8),
        "labels": randint(3, 64),
        "criterion": cross_entropy,
    }
    return names


def test_error_and_notes_as_on_the_page(names):
    with pytest.raises(IndexError) as caught:
        run(FAILS, names)
    said = [f"IndexError: {caught.value}", *caught.value.__notes__]
    assert "\n".join(said) == FAILURE.strip()
    for alone in (ALONE, WITH_ONE_REPLICA):
        with pytest.raises(IndexError, match="Target 7 is out of bounds"):
            run(alone, names)
    names["labels"][45] = 0
    run(ALONE, names)
    run(WITH_ONE_REPLICA, names)


@pytest.mark.filterwarnings("ignore:Anomaly")
def test_nan_row_anomaly_and_check_are_shown(names, capsys):
    run(ANOMALY, names)
    names["engine"] = ScatterOnceParallel(names["model"], 4, ["cpu"] * 2)
    assert f"`{CHECK}`" in DEBUG
    run(CHECK, names)
    assert "only rounding differs" in capsys.readouterr().out
    run(NOT_FINITE, names)
    assert capsys.readouterr().out == NOTE_OF_NAN
    run(BAD_ROWS, names)
    assert names["bad"] == [19]


def test_log_is_that_of_the_page(names, caplog):
    caplog.set_level(logging.WARNING, logger.name)  # also puts the level back
    engine = ScatterOnceParallel(names["model"], 4, ["cpu"] * 2)
    run(LOG, names)
    engine.forward_backward(names["images"], names["labels"], names["criterion"])
    assert {record.name for record in caplog.records} == {logger.name}


def normalised():
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def step_before_backward(names):
    engine = ScatterOnceParallel(build(normalised), device_ids=["cpu:0", "cpu:1"])
    loss = engine(names["images"]).sum()
    engine.forward_backward(names["images"], names["labels"], names["criterion"])
    loss.backward()


def freezes_in_forward(names):
    def forward(model, images):
        model.linear.bias.requires_grad_(False)
        return model.linear(images)

    model = build(lambda: Of(forward, linear=nn.Linear(8, 3)))
    ScatterOnceParallel(model, device_ids=["cpu:0", "cpu:1"])(names["images"])


def draws_from_default_generator(names):
    def forward(model, images):
        noise = torch.rand(3, generator=torch.random.default_generator)
        return model.linear(images) + noise.to(images)

    model = build(lambda: Of(forward, linear=nn.Linear(8, 3)))
    engine = ScatterOnceParallel(model, device_ids=["cpu"] * 2, verify=False)
    engine.forward_backward(names["images"], names["labels"], names["criterion"])


def row_from_closure(names):
    weights = torch.ones(64)

    def criterion(output, labels):
        return (cross_entropy(output, labels, reduction="none") * weights).mean()

    engine = ScatterOnceParallel(names["model"], 4, ["cpu"] * 2)
    engine.forward_backward(names["images"], names["labels"], criterion)


def inputs_and_targets_in_one_tuple(names):
    engine = ScatterOnceParallel(names["model"], 4, ["cpu"] * 2)
    batch = (names["images"], names["labels"])
    engine.forward_backward(batch, criterion=lambda o, t: cross_entropy(o, t))


def step_inside_of_cached(names):
    parametrize.register_parametrization(names["model"][0], "weight", nn.Tanh())
    engine = ScatterOnceParallel(names["model"], 4, ["cpu"] * 2)
    with parametrize.cached():
        engine.forward_backward(names["images"], names["labels"], names["criterion"])


SYMPTOMS = {
    "does not take 2 positional arguments": inputs_and_targets_in_one_tuple,
    "backward through the graph a second time": step_inside_of_cached,
    "modified by an inplace operation": step_before_backward,
    "requires_grad flags of leaf variables": freezes_in_forward,
    "generator=_ThreadAwareGenerator": draws_from_default_generator,
    "`8` (micro-batch) and `64` (batch)": row_from_closure,
}


@pytest.mark.parametrize("words", SYMPTOMS)
def test_symptom_has_the_words_of_the_page(names, words):
    assert words in DEBUG
    parts = re.findall("`(.+?)`", words) or [words]
    with pytest.raises((RuntimeError, TypeError, ValueError)) as caught:
        SYMPTOMS[words](names)
    assert all(part in str(caught.value) for part in parts)


@pytest.mark.draws
def test_page_profiles_all_threads(names, tmp_path, monkeypatch, capsys):
    """The profile has the blocks of a step and of its sub-steps, on two replicas."""
    monkeypatch.chdir(tmp_path)
    names["device_ids"] = ["cpu"] * 2
    (code,) = blocks(sections("docs/gpus.md")["Why is my step slow?"], "python")
    run(code, names)
    assert "scatterpar compute" in capsys.readouterr().out
    found = {entry.key for entry in names["profiler"].key_averages()}
    for part in ("scatter", "replicate", "compute", "reduce", "commit"):
        assert f"scatterpar {part}" in found
    for part in ("arrival", "forward", "backward"):
        assert {f"scatterpar {part} {sub_step}" for sub_step in range(4)} <= found
    assert PROFILE_ALL_THREADS.partition("=")[2] in code


# --- splitcheck ---


@pytest.mark.draws
def test_splitcheck_prints_what_page_shows(capsys):
    text = read("docs/splitcheck.md")
    names = {"__name__": "page"}
    shown = []
    for code in blocks(text, "python"):
        if "import accelerate" in code or "def test" in code:
            break
        run(code, names)
        printed = capsys.readouterr().out
        if printed:
            shown.append(printed)
    assert [_without_rounding(page) for page in blocks(text, "text")] == [
        _without_rounding(printed) for printed in shown
    ]


def _without_rounding(report):
    """The words of a report; differences that are rounding alone are a name."""
    return re.sub(r"\d\.\de-1\d", "ROUNDING", report).split()


# --- snippets, tables and messages of the other pages ---

PAIR = blocks(read("docs/pair.md"), "python")
SNIPPETS = {
    f"{page}-{number}": code
    for page in ("start", "large-batches", "several-machines")
    for number, code in enumerate(blocks(read(f"docs/{page}.md"), "python"))
}


@pytest.mark.draws
@pytest.mark.parametrize("name", SNIPPETS)
def test_each_snippet_runs(name, monkeypatch, tmp_path, capsys):
    names, code = namespace() | {"ScatterOnceParallel": Checked}, SNIPPETS[name]
    # for those that import it
    monkeypatch.setattr(scatterpar, "ScatterOnceParallel", Checked)
    if "engine." in code and "engine =" not in code:
        names["engine"] = Checked(names["model"], accum=2)
    if "process_group" in code:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
        monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch puts its own
        # what torchrun tells by environment variables
        store = f"file://{tmp_path}/store"
        code = code.replace(
            '("gloo")', f'("gloo", init_method="{store}", rank=0, world_size=1)'
        )
    run(code, names)
    compared = getattr(names.get("engine"), "compared", 0)
    assert compared or "engine.forward_backward" not in code
    assert not torch.distributed.is_initialized()
    assert ("print(" in code) == bool(capsys.readouterr().out)
    gc.collect()


def test_first_page_shows_first_snippet():
    assert blocks(read("docs/index.md"), "python") == [START[0]]


def test_pair_gives_whole_batch_gradient():
    names, plain = namespace(), namespace()
    run(PAIR[0], names)
    plain["criterion"](plain["net"](plain["images"]), plain["labels"]).backward()
    assert_gradients(names["net"], gradients(plain["net"]))
    run(PAIR[1], names)
    right = plain["net"](plain["images"]).argmax(1) == plain["labels"]
    assert names["right"] == right.sum()
    run(PAIR[2], names)
    outputs = plain["net"](plain["images"])
    assert torch.allclose(names["output"], outputs)
    assert torch.allclose(names["loss"], outputs.logsumexp(1).mean())


def test_shown_plan_is_the_engines():
    plan = make_plan(4096, [torch.device("cuda", i) for i in range(4)], accum=16)
    assert f"```text\n{plan}\n```" in read("docs/architecture.md")


@pytest.mark.slow
@pytest.mark.draws
def test_run_of_four_devices_resumes_on_two(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = blocks(read("docs/same-bits.md"), "python")
    run(code, {})
    assert capsys.readouterr().out == "True\n"
