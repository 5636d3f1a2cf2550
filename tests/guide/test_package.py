"""What is packed: one version, the licences, and a page that an index can show."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from pathlib import Path

import pytest
from harness.pages import SETUP, read

import scatterpar

PAGE, README = read("docs/package.md"), read("README.md")


def test_one_place_holds_the_version():
    assert SETUP["metadata"]["version"] == "attr: scatterpar.__version__"
    try:
        installed = importlib.metadata.version("scatterpar")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("scatterpar is not installed, only importable")
    assert installed == scatterpar.__version__


def test_the_page_needs_nothing_that_an_index_does_not_have():
    assert SETUP["metadata"]["long_description"] == "file: docs/package.md"
    assert "![" not in PAGE
    targets = re.findall(r"\]\(([^)]+)\)", PAGE)
    assert all(target.startswith("https://") for target in targets), targets


def test_the_page_says_what_the_readme_says():
    opening = README.partition("This script runs")[0].strip()
    assert opening in PAGE
    for name in re.findall(r"^\d\. \*\*(.+)\*\*", PAGE, re.MULTILINE):
        assert f". **{name}**" in README, name


def test_the_console_script_is_the_command():
    name, _, target = SETUP["options.entry_points"]["console_scripts"].strip().partition(" = ")
    module, _, function = target.partition(":")
    assert name == "scatterpar"
    assert callable(getattr(importlib.import_module(module), function))


def test_the_citation_has_the_version():
    assert f"\nversion: {scatterpar.__version__}\n" in read("CITATION.cff")


def test_the_api_pages_have_every_public_name():
    pages = read("docs/api.md")
    documented = {*re.findall(r"auto(?:class|function):: scatterpar\.(\w+)$", pages, re.MULTILINE)}
    assert "automodule:: scatterpar.recipe\n   :members:" in pages
    assert documented | {*scatterpar.recipe.__all__} == {*scatterpar.__all__}


def test_the_licence_of_the_images_is_packed():
    files = SETUP["metadata"]["license_files"].split()
    assert [Path(file).name for file in files] == ["LICENSE", "SOURCE.md"]
    assert "The MIT License (MIT)" in read(files[1])
    assert SETUP["metadata"]["license_expression"] == "BSD-3-Clause AND MIT"


def test_the_source_distribution_has_what_the_tests_import():
    manifest = read("MANIFEST.in").split()
    for folder in ("tests", "benchmarks", "docs", "examples", "notebooks"):
        assert folder in manifest
