"""The guide: its snippets run, its tables come out, its messages are the package's."""

from __future__ import annotations

import gc
import re
import sys

import pytest
import torch
from harness.oracle import assert_gradients, build, gradients, randint, randn
from harness.pages import ROOT, Checked, blocks, namespace, read, run, sections
from torch import nn
from torch.nn.functional import cross_entropy

import scatterpar
from scatterpar import ScatterOnceParallel
from scatterpar.plan import make_plan
from scatterpar.torch_private.thread_modes import PROFILE_ALL_THREADS

START = blocks(read("docs/start.md"), "python")


# --- debug ---

DEBUG = list(sections("docs/debug.md").values())


@pytest.fixture
def debugged():
    """``follow(section)`` runs its snippets with these names, and with an engine if
    asked.
    """
    model = build(lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))
    names = {"torch": torch, "ScatterOnceParallel": ScatterOnceParallel, "model": model}
    names |= {
        "images": randn(64, 8),
        "labels": randint(3, 64),
        "criterion": cross_entropy,
    }

    def follow(section, with_engine=False):
        if with_engine:
            names["engine"] = ScatterOnceParallel(model, 4, ["cpu"] * 2)
        for code in blocks(DEBUG[section], "python"):
            run(code, names)

    return names, follow


def test_error_and_notes_as_on_the_page(debugged):
    names, follow = debugged
    with pytest.raises(IndexError) as caught:
        follow(0)
    (shown,) = blocks(DEBUG[0], "text")
    said = [f"IndexError: {caught.value}", *caught.value.__notes__]
    assert "\n".join(said) == shown.strip()
    with pytest.raises(IndexError, match="Target 7 is out of bounds"):
        follow(1)  # its rows alone
    names["labels"][45] = 0
    follow(1)


@pytest.mark.filterwarnings("ignore:Anomaly")
def test_nan_row_anomaly_and_check_are_shown(debugged, capsys):
    names, follow = debugged
    follow(3, with_engine=True)
    follow(4, with_engine=True)
    assert "only rounding differs" in capsys.readouterr().out
    names["images"][19, 3] = torch.nan
    follow(2)
    assert "sub-step 2; nothing was changed" in capsys.readouterr().out
    assert names["bad"] == [19]


@pytest.mark.draws
def test_page_profiles_all_threads(debugged, tmp_path, monkeypatch, capsys):
    """The profile has the blocks of a step and of its sub-steps, on two replicas."""
    monkeypatch.chdir(tmp_path)
    names, follow = debugged
    names["device_ids"] = ["cpu"] * 2
    (number,) = [i for i, section in enumerate(DEBUG) if "export_chrome" in section]
    follow(number)
    assert "scatterpar compute" in capsys.readouterr().out
    found = {entry.key for entry in names["profiler"].key_averages()}
    for part in ("scatter", "replicate", "compute", "reduce", "commit"):
        assert f"scatterpar {part}" in found
    for part in ("arrival", "forward", "backward"):
        assert {f"scatterpar {part} {sub_step}" for sub_step in range(4)} <= found
    assert PROFILE_ALL_THREADS.partition("=")[2] in DEBUG[number]


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


def test_shown_plan_is_the_engines():
    plan = make_plan(4096, [torch.device("cuda", i) for i in range(4)], accum=16)
    assert f"```text\n{plan}\n```" in read("docs/how-it-works.md")


THEIRS = (
    "does not require grad|positional "
    "arguments|externally-managed|ensurepip|different Python"
)
THEIRS += "|more than 1 value|torchvision::|Could not import"


def test_troubleshooting_quotes_our_messages():
    source = "\n".join(file.read_text() for file in (ROOT / "scatterpar").rglob("*.py"))
    source = re.sub(r"""["']\s*\n\s*f?["']""", "", source)
    rows = re.findall(r"^\| (.*?) \|", read("docs/troubleshooting.md"), re.MULTILINE)
    quoted = [text for row in rows for text in re.findall(r"`([^`]{20,})`", row)]
    assert len(quoted) > 10
    for message in quoted:
        if not re.search(THEIRS, message):
            for part in filter(None, (part.strip() for part in message.split("…"))):
                assert part in source, part


@pytest.mark.slow
@pytest.mark.draws
def test_run_of_four_devices_resumes_on_two(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = blocks(read("docs/same-bits.md"), "python")
    run(code, {})
    assert capsys.readouterr().out == "True\n"
