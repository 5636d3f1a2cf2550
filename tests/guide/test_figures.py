"""Each figure of the guide has the command that prints it, or a source, beside it."""

from __future__ import annotations

import re

import pytest
from harness.pages import ROOT, read

from scatterpar.devices import coalescing, fingerprints, pieces
from scatterpar.numerics import rounding
from scatterpar.replicas import large_tensors

PAGES = ["README.md", *sorted(f"docs/{page.name}" for page in ROOT.glob("docs/*.md"))]
PAGES.remove("docs/package.md")  # a part of the README, without its links
PAGES.remove("docs/errors.md")  # words of messages

UNITS = {"%": 0.01, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
UNITS |= {"bytes": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
OTHER_UNITS = r"times|x|s|ms|µs|seconds?|minutes?|hours?|tests|updates"
# A number with a unit, or one with two digits behind the point: a ratio.
FIGURE = re.compile(
    rf"(?<![\w.,])\d[\d.,]*\s*(?:{'|'.join(UNITS)}|(?:{OTHER_UNITS})\b)"
    r"|(?<![\w.,])\d\.\d\d(?![\d.])"
)
# What stands beside a figure: a command, a page of the benchmarks or tests, an address.
SOURCE = re.compile(
    r"python[\d.]* -m |pip install |\]\(\.\./(?:benchmarks|tests)/|\]\(benchmarks/"
    r"|`tests/|https://"
)

# --- figures that nobody measures, by their kinds ---

NOT_MEASURED = re.compile(
    r"(?:Python|PyTorch|torch) \d[\d.]+(?: to [\d.]+)?"  # a version
    r"|\b(?:16|32) times"  # calls, in examples of 16 sub-steps
)
# Inputs of an example, and a property of processors.
GIVEN = {("docs/gpus.md", "20 ms"), ("docs/same-bits.md", "64 bytes")}
# Limits of the package.
CHUNK, PIECE = coalescing.CHUNK_BYTES, pieces.BYTES_PER_DEVICE
TOLERANCES = {"0.3 %": rounding.FLOAT32.tolerance, "3 %": rounding.TF32.tolerance}
LIMITS = {
    "docs/gpus.md": {"128 MiB": pieces.MESSAGES_IN_BUFFERS * CHUNK},
    "docs/same-bits.md": {"8 MiB": PIECE, "256 bytes": 256},
    "docs/architecture.md": {
        "64 MiB": CHUNK,
        "4 MiB": coalescing.ALONE_BYTES,
        "8 MiB": 4 * fingerprints.WORDS_AT_A_TIME,
        "256 KiB": large_tensors.LARGE_BYTES,
    },
    "docs/silently-wrong.md": {"256 KiB": large_tensors.LARGE_BYTES},
    "docs/check.md": TOLERANCES,
    "docs/losses.md": TOLERANCES,
    # tests/distributed/test_ranks.py counts the bytes
    "docs/contrastive.md": {"1 KiB": 1024},
    "docs/several-machines.md": {"1 KiB": 1024},
}
# Products of sizes that stand in the same sentence.
PRODUCTS = {
    "docs/pair.md": {"1.28 GB": 40_000 * 250 * 32 * 4},
    "docs/contrastive.md": {"4 MB": 2 * 4096 * 128 * 4, "268 MB": 8192 * 8192 * 4},
}


def figures_without_source(text: str) -> list[str]:
    """The figures of a page that have no source in their paragraph or the next one.

    A table, a list and a snippet are one paragraph each.
    """
    snippet = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
    whole = snippet.sub(lambda code: re.sub(r"\n\s*\n", "\n", code[0]), text)
    paragraphs = re.split(r"\n\s*\n", whole)
    found: list[str] = []
    for number, paragraph in enumerate(paragraphs):
        beside = paragraphs[max(0, number - 1) : number + 2]
        prose = re.sub(r"`[^`]*`|\]\([^)]*\)", "", snippet.sub("", paragraph))
        if not SOURCE.search("\n".join(beside)):
            found += FIGURE.findall(NOT_MEASURED.sub("", prose))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_figures_have_their_command_or_source(page):
    exempt = LIMITS.get(page, {}) | PRODUCTS.get(page, {})
    found = figures_without_source(read(page))
    assert not [
        figure
        for figure in found
        if figure not in exempt and (page, figure) not in GIVEN
    ]


@pytest.mark.parametrize("page", LIMITS)
def test_limits_are_those_of_the_package(page):
    for figure, value in LIMITS[page].items():
        assert in_units(figure, value, page) == pytest.approx(0)


@pytest.mark.parametrize("page", PRODUCTS)
def test_products_are_right(page):
    for figure, value in PRODUCTS[page].items():
        assert abs(in_units(figure, value, page)) < 0.5


def in_units(figure: str, value: float, page: str) -> float:
    """How far the value is from a figure of the page, in the figure's unit."""
    assert figure in read(page)
    number, unit = figure.split()
    return value / UNITS[unit] - float(number)


def test_figure_without_source_is_found():
    text = "A step takes 7 % longer.\n\nMore.\n\nSee `python -m benchmarks card`."
    assert figures_without_source(text) == ["7 %"]
    assert not figures_without_source(text.replace("\n\nMore.", ""))
    assert figures_without_source("It needs 1.10 of the time, 3 MB.") == [
        "1.10",
        "3 MB",
    ]
    assert not figures_without_source("Python 3.11 to 3.14 calls it 16 times.")


# --- the commands exist ---

COMMAND = re.compile(r"python[\d.]* -m ((?:benchmarks|scatterpar|tests)[\w. -]*)")
EVERYWHERE = "\n".join(map(read, PAGES))


@pytest.mark.parametrize("command", sorted(set(COMMAND.findall(EVERYWHERE))))
def test_command_of_a_page_exists(command):
    module, *arguments = command.split()
    path = ROOT / module.replace(".", "/")
    assert path.is_dir() or path.with_suffix(".py").is_file()
    name = next(iter(arguments), "")
    if module == "benchmarks" and name not in ("", "card", "figures"):
        assert (ROOT / "benchmarks" / name).is_dir()
    if module == "scatterpar" and name:
        assert name in ("doctor", "demo", "train")
