"""The README does what it says: its lines run, its figures come out, its links lead
somewhere.
"""

from __future__ import annotations

import re

import pytest
import torch
from harness.oracle import assert_gradients, assert_step, gradients, seeded
from harness.pages import ROOT, SETUP, blocks, namespace, read, run
from torch import nn
from torch.utils.data import TensorDataset

from scatterpar import ScatterOnceParallel, count_labels, splitcheck

README = read("README.md")
CONTRIBUTING = read("CONTRIBUTING.md")
DIFFS = blocks(README, "diff") + blocks(read("docs/start.md"), "diff")


def test_install_commands_pin_versions():
    commands = re.findall(
        r"^python3 -m venv .*", f"{README}\n{CONTRIBUTING}", re.MULTILINE
    )
    assert len(commands) == 3
    for command in commands:
        install = re.search(
            r"pip install -c constraints\.txt -e '\.\[(\w+)\]' && ", command
        )
        assert install is not None
        assert install[1] in SETUP["options.extras_require"]
    assert commands[0].endswith("python -m scatterpar train")
    assert commands[1].endswith("python -m pytest -n 2 --dist worksteal")
    assert commands[2].endswith("sphinx-build -q -W --keep-going -c docs . build/guide")


def test_constraints_cover_the_extras():
    listed = "\n".join(SETUP["options.extras_require"].values())
    asked = set(re.findall(r"^([\w-]+)(?:\[\w+\])?>=", listed, re.MULTILINE)) | {
        "torch"
    }
    pinned = re.findall(r"^([\w-]+)==", read("constraints.txt"), re.MULTILINE)
    assert asked == set(pinned)


LOOP = """
for images, labels in loader:
    criterion(model(images), labels).backward()
"""


@pytest.mark.draws  # a DataLoader does
@pytest.mark.parametrize("number", range(len(DIFFS)))
def test_migration_keeps_the_gradient(number):
    after, plain = namespace(), namespace()
    after["dataset"] = TensorDataset(after["images"].cpu(), after["labels"].cpu())
    diff = DIFFS[number]
    # The rest of a loop in which one line is exchanged.
    rest = "" if "optimizer" in diff else LOOP
    imports = "from scatterpar import ScatterOnceParallel\n"
    run(imports + side(diff, "+") + rest, after)
    if "DistributedDataParallel" in diff:
        plain["criterion"](plain["model"](plain["images"]), plain["labels"]).backward()
    else:
        run(side(diff, "-") + rest, plain)
    assert_gradients(after["model"], gradients(plain["model"]))


def side(diff, sign):
    return "\n".join(line[1:] for line in diff.splitlines() if line[:1] in (sign, " "))


def texts():
    """What the README shows: a language model's batch, whose labels are padded."""
    with seeded():
        model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50))
        tokens = torch.randint(50, (64, 12))
        labels = tokens.roll(-1, 1)
        for row, length in enumerate(torch.randint(2, 12, (64,))):
            labels[row, length:] = -100
    engine = ScatterOnceParallel(model, accum=4, device_ids=["cpu"] * 2)
    names = {"nn": nn, "model": model, "tokens": tokens, "labels": labels}
    return names | {"engine": engine, "splitcheck": splitcheck}


def test_refusal_is_what_the_engine_says():
    snippet = blocks(README, "python")[0]
    shown = blocks(README, "text")[0]
    with pytest.raises(ValueError, match="the criterion next_word") as caught:
        run(snippet, texts())
    problem, remedy = str(caught.value).splitlines()[:2]
    assert shown.split() == f"ValueError: {problem} {remedy}".split()


def test_remedy_of_refusal_is_exact():
    names = texts()
    function, _, _ = blocks(README, "python")[0].partition("\nengine.")
    exec(function, names)
    assert_step(
        names["engine"],
        names["tokens"],
        names["labels"],
        names["next_word"],
        relative=1e-5,
        count=count_labels(),
    )
    names["engine"].close()


@pytest.mark.draws
def test_script_prints_exact_gradient(capsys):
    """But for the difference, which depends on the processor."""
    run(blocks(README, "python")[1], {})
    digits = r"\d\.\d+e-\d+, in \d\.\w+"
    printed = re.sub(digits, "…", capsys.readouterr().out)
    shown = " ".join(blocks(README, "text")[1].split())
    assert printed.strip() == re.sub(digits, "…", shown)


def test_readme_is_read_in_a_minute():
    assert len(README.splitlines()) <= 100


def test_figures_are_those_of_benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.markers import between
    from benchmarks.readme import TABLES

    for name, (page, table) in TABLES.items():
        _, quoted, _ = between(name, page.read_text(encoding="utf-8"))
        assert quoted == table(), f"{page.name}: run python -m benchmarks.readme"


PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
PAGES += [*ROOT.glob("benchmarks/**/*.md"), *ROOT.glob("tests/**/*.md")]


@pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, heading = target.partition("#")
        if not target.startswith("https://"):
            there = page.parent / path if path else page
            assert there.exists(), target
            assert not heading or heading in slugs(there.read_text(encoding="utf-8")), (
                target
            )


def slugs(text):
    """The anchors of headings, as hosts of repositories and the guide make them."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
