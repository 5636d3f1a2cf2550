"""The pages of the guide: their snippets run, their tables come out, their messages are ours.

The recipes are compared with plain torch in ``test_recipes.py``. Batches, contrastive losses and
the Trainer have tests of their own, too.
"""

from __future__ import annotations

import gc
import re
import sys

import pytest
import torch
from helpers.oracle import assert_gradients, gradients
from helpers.pages import ROOT, blocks, namespace, read, run

from scatterpar import ScatterOnceParallel
from scatterpar.devices.coalescing import rounds
from scatterpar.plan import make_plan

START = blocks(read("docs/start.md"), "python")
PAIR = blocks(read("docs/pair.md"), "python")
SNIPPETS = {
    f"{page}-{number}": code
    for page in ("start", "large-batches", "several-machines", "one-step")
    for number, code in enumerate(blocks(read(f"docs/{page}.md"), "python"))
}


@pytest.mark.draws
@pytest.mark.parametrize("name", SNIPPETS)
def test_each_snippet_runs(name, monkeypatch, tmp_path, capsys):
    names, code = namespace() | {"ScatterOnceParallel": ScatterOnceParallel}, SNIPPETS[name]
    if "engine." in code and "engine =" not in code:
        names["engine"] = ScatterOnceParallel(names["model"], accum=2)
    if "process_group" in code:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
        monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch puts its own
        store = f"file://{tmp_path}/store"  # what torchrun tells by environment variables
        code = code.replace('("gloo")', f'("gloo", init_method="{store}", rank=0, world_size=1)')
    run(code, names)
    assert not torch.distributed.is_initialized()
    assert ("print(" in code) == bool(capsys.readouterr().out)
    gc.collect()


def test_the_first_page_shows_the_first_snippet():
    assert blocks(read("docs/index.md"), "python") == [START[0]]


@pytest.mark.draws
def test_the_first_snippet_gives_the_gradient_of_the_whole_batch():
    names, plain = namespace(), namespace()
    run(START[0], names)
    plain["criterion"](plain["model"](plain["images"]), plain["labels"]).backward()
    assert_gradients(names["model"], gradients(plain["model"]))


def test_the_pair_gives_the_gradient_of_the_whole_batch():
    names, plain = namespace(), namespace()
    run(PAIR[0], names)
    plain["criterion"](plain["net"](plain["images"]), plain["labels"]).backward()
    assert_gradients(names["net"], gradients(plain["net"]))
    run(PAIR[1], names)
    right = plain["net"](plain["images"]).argmax(1) == plain["labels"]
    assert names["right"] == right.sum()


def test_the_plan_that_is_shown():
    plan = make_plan(4096, [torch.device("cuda", i) for i in range(4)], accum=16)
    assert f"```text\n{plan}\n```" in read("docs/one-step.md")


@pytest.mark.parametrize(("devices", "words"), [(4, "2 + 2"), (8, "it is 3 + 3")])
def test_what_goes_through_the_busiest_device(devices, words):
    """As often as a device is in a pair of the tree: gradients one way, parameters the other."""
    pairs = [pair for step in rounds(devices) for pair in step]
    each = [sum(device in pair for pair in pairs) for device in range(devices)]
    found = f"{max(each)} + {max(each)}"
    assert found in words
    page = read("docs/comparison.md")
    assert words in page
    (row,) = re.findall(r"^\| through the busiest of 4 .* (\d+) \|$", page, re.MULTILINE)
    assert devices != 4 or int(row) == 2 * max(each)


@pytest.mark.slow
@pytest.mark.draws
def test_the_table_of_averages(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import averaging

    table = f"<!-- averaging -->\n{averaging.table()}\n<!-- /averaging -->"
    assert table in read("docs/large-batches.md")


def test_the_table_of_output_memory():
    (table,) = re.findall(r"^\| replicas \| gather.*\n(?:\|.*\n)+", read("docs/pair.md"), re.M)
    assert table in read("benchmarks/answered/README.md")


THEIRS = (
    "does not require grad",
    "positional arguments",
    "externally-managed",
    "ensurepip",
    "different Python",
    "more than 1 value",
    "torchvision::",
)


def test_the_messages_under_troubleshooting_are_ours():
    source = "\n".join(file.read_text() for file in (ROOT / "scatterpar").rglob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", source)
    rows = re.findall(r"^\| (.*?) \|", read("docs/troubleshooting.md"), re.MULTILINE)
    quoted = [text for row in rows for text in re.findall(r"`([^`]{20,})`", row)]
    assert len(quoted) > 10
    for message in quoted:
        if not any(word in message for word in THEIRS):
            for part in filter(None, (part.strip() for part in message.split("…"))):
                assert part in source, part


@pytest.mark.draws
def test_what_stops_on_four_goes_on_on_two(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = blocks(read("docs/same-bits.md"), "python")
    run(code, {})
    assert capsys.readouterr().out == "True\n"


def test_how_often_gradients_cross():
    """The table of the page is what was counted."""
    counted = read("benchmarks/traffic/README.md").partition("<!-- layouts -->")[2]
    numbers = re.findall(r"` \| (\d+) \| (\d+) \|$", counted, re.MULTILINE)
    shown = re.findall(
        r"^\| [^|]*[a-z+][^|]* \| (\d+) \| (\d+) \|$", read("docs/same-bits.md"), re.M
    )
    assert shown == numbers[1:]  # on one card nothing crosses
