"""The README does what it says: its lines run, its figures come out, its links lead somewhere."""

from __future__ import annotations

import configparser
import copy
import gc
import json
import re
import statistics
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import scatterpar
from scatterpar.plan import make_plan
from scatterpar.train.models import SmallCNN

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [line for line in README.splitlines() if line.startswith("python3 -m venv ")]
DIFFS = re.findall(r"^```diff\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
CLASSES = 3


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def namespace():
    """What the README takes for granted: a model on the master, data, a loss."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(64 * 16, 4, dtype=torch.float64, generator=generator)
    labels = torch.randint(CLASSES, (64 * 16,), generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()
    if torch.accelerator.is_available():
        model, images, labels = (x.to("cuda:0") for x in (model, images, labels))
    return {
        "torch": torch,
        "nn": nn,
        "model": model,
        "net": copy.deepcopy(model),
        "images": images,
        "labels": labels,
        "loader": [(images, labels)],
        "dataset": TensorDataset(images, labels),
        "DataLoader": DataLoader,
        "criterion": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.0),
    }


def run(code, names):
    """Run a snippet, and end the threads of the engine that it leaves open."""
    try:
        exec(code, names)
    finally:
        if "engine" in names:
            names["engine"].close()


def test_three_commands_that_install_with_the_tested_versions():
    assert len(COMMANDS) == 3
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    for command in COMMANDS:
        install = re.search(r"pip install -c constraints\.txt -e '\.\[(\w+)\]' && ", command)
        assert install is not None
        assert install[1] in setup["options.extras_require"]
    assert COMMANDS[0].endswith("python -m scatterpar train")
    assert COMMANDS[1].endswith("python -m pytest")


def test_ci_runs_those_commands_and_no_others():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "README.md" in script
    assert "pip install" not in script


def test_ci_finds_the_line_that_tests_without_the_interpreter_lock():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "free-threaded.md").read_text(encoding="utf-8")
    found = re.search(r"grep '\^(python3.14t [^']*)' docs/free-threaded.md", script)
    assert found is not None
    (line,) = [line for line in page.splitlines() if line.startswith(found[1])]
    assert "-e '.[core]' && PYTHON_GIL=0 " in line
    for path in re.findall(r"tests/\S+", line):
        assert (ROOT / path).exists(), path


def test_constraints_hold_what_the_extras_ask_for():
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    listed = "\n".join(setup["options.extras_require"].values())
    asked = set(re.findall(r"^([\w-]+)>=", listed, re.MULTILINE)) | {"torch"}
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert asked == set(pinned)


@pytest.mark.draws
@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_each_snippet_runs(number, monkeypatch, tmp_path):
    names = namespace()
    code = blocks("python")[number]
    if "outputs" not in code and "DataParallelModel" in blocks("python")[number - 1]:
        run(blocks("python")[number - 1], names)
    elif "engine." in code and "engine =" not in code:
        run(blocks("python")[0], names)
    if "process_group" in code:
        names["ScatterOnceParallel"] = scatterpar.ScatterOnceParallel
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
        monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch puts its own
        store = f"file://{tmp_path}/store"  # what torchrun tells by environment variables
        code = code.replace('("gloo")', f'("gloo", init_method="{store}", rank=0, world_size=1)')
    run(code, names)
    assert not torch.distributed.is_initialized()
    gc.collect()


@pytest.mark.draws
def test_the_first_snippet_gives_the_gradient_of_the_whole_batch():
    names, plain = namespace(), namespace()
    run(blocks("python")[0], names)
    plain["criterion"](plain["model"](plain["images"]), plain["labels"]).backward()
    assert_same_gradients(names["model"], plain["model"])


def test_the_pair_gives_the_gradient_of_the_whole_batch():
    (code,) = (block for block in blocks("python") if "DataParallelCriterion(" in block)
    names, plain = namespace(), namespace()
    run(code, names)
    plain["criterion"](plain["net"](plain["images"]), plain["labels"]).backward()
    assert_same_gradients(names["net"], plain["net"])


@pytest.mark.draws  # a DataLoader does
@pytest.mark.parametrize("number", range(len(DIFFS)))
def test_a_migration_keeps_the_gradient(number):
    after, plain = namespace(), namespace()
    after["dataset"] = TensorDataset(after["images"].cpu(), after["labels"].cpu())
    run(f"from scatterpar import ScatterOnceParallel\n{side(DIFFS[number], '+')}", after)
    if "DistributedDataParallel" in DIFFS[number]:
        plain["criterion"](plain["model"](plain["images"]), plain["labels"]).backward()
    else:
        run(side(DIFFS[number], "-"), plain)
    assert_same_gradients(after["model"], plain["model"])


def side(diff, sign):
    return "\n".join(line[1:] for line in diff.splitlines() if line[:1] in (sign, " "))


def assert_same_gradients(model, other):
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12)


def test_the_plan_that_is_shown():
    plan = make_plan(4096, [torch.device("cuda", i) for i in range(4)], accum=16)
    assert f"```text\n{plan}\n```" in README


@pytest.mark.slow
@pytest.mark.draws
def test_the_table_of_averages(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import averaging

    assert f"<!-- averaging -->\n{averaging.table()}\n<!-- /averaging -->" in README


def test_the_table_of_output_memory():
    page = (ROOT / "benchmarks" / "output_memory" / "README.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"<!-- peaks -->\n((?:\|.*\n)+)", page)
    assert table in README


PEERS = {
    "of the plain\n   loop with the same micro-batches": ["plain loop, 32 sub-steps"],
    "of that of `nn.DataParallel`": ["nn.DataParallel x 16"],
    "of that of the faster of\n   `DistributedDataParallel`": [
        "DistributedDataParallel, no_sync",
        "accelerate, accumulate",
    ],
}


@pytest.mark.parametrize("words", PEERS)
def test_the_fifth_promise_quotes_the_tables(words):
    """Of several peers the faster one, in each model; rounds are compared one by one."""
    found = []
    for name in ("cnn", "mlp", "resnet20"):
        path = ROOT / "benchmarks" / "step_time" / f"{name}.json"
        seconds = json.loads(path.read_text(encoding="utf-8"))["seconds"]
        pairs = (zip(seconds[peer], seconds["engine"], strict=True) for peer in PEERS[words])
        found.append(1 / min(statistics.median(a / b for a, b in rounds) for rounds in pairs))
    promise = README.partition("5. **Fast.**")[2].partition("\n\n")[0].partition(words)[0]
    quoted = re.findall(r"\d\.\d\d", promise)[-2:]
    assert quoted == [f"{min(found):.2f}", f"{max(found):.2f}"]


def test_the_size_of_the_model_in_the_picture():
    with torch.random.fork_rng():
        parameters = sum(p.numel() for p in SmallCNN((1, 28, 28), 10).parameters())
    assert f"{parameters:,} parameters" in README


@pytest.mark.parametrize("page", ["README.md", "docs/comparison.md"])
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)", text):
        if not target.startswith("https://"):
            assert ((ROOT / page).parent / target).exists(), target


def test_the_messages_under_troubleshooting_are_ours():
    source = "\n".join(file.read_text() for file in (ROOT / "scatterpar").rglob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", source)
    table = README.partition("## Troubleshooting")[2].partition("\n## ")[0]
    theirs = ("externally-managed", "ensurepip", "different Python", "more than 1 value")
    for row in table.splitlines():
        symptom = row.split("|")[1] if row.startswith("| ") else ""
        for quoted in re.findall(r"`([^`]{20,})`", symptom):
            if not any(word in quoted for word in theirs):
                for part in filter(None, (part.strip() for part in quoted.split("…"))):
                    assert part in source, part


def test_nothing_of_a_private_machine_is_in_the_pages():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("notebooks/*.ipynb")]:
        text = page.read_text(encoding="utf-8")
        assert str(ROOT) not in text, page
        assert sys.prefix not in text, page
