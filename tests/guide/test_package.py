"""What is packed: one version, the licences, and a page that an index can show."""

from __future__ import annotations

import importlib.metadata
import inspect
import pydoc
import re
from pathlib import Path

import pytest
from harness.pages import SETUP, read
from torch import nn

import scatterpar


def test_one_place_holds_the_version():
    assert SETUP["metadata"]["version"] == "attr: scatterpar.version.__version__"
    assert f"\nversion: {scatterpar.__version__}\n" in read("CITATION.cff")
    try:
        installed = importlib.metadata.version("scatterpar")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("scatterpar is not installed, only importable")
    assert installed == scatterpar.__version__


def test_index_page_says_what_readme_says():
    assert SETUP["metadata"]["long_description"] == "file: docs/package.md"
    page, readme = read("docs/package.md"), read("README.md")
    targets = re.findall(r"\]\(([^)]+)\)", page)
    assert all(target.startswith("https://") for target in targets), targets
    opening, _, _ = readme.partition("![")
    assert re.sub(r"\[(.+?)\]\(.+?\)", r"\1", opening).strip() in page
    for name in re.findall(r"^\d\. \*\*(.+)\*\*", page, re.MULTILINE):
        assert f". **{name}**" in readme, name


def test_api_pages_have_all_public_names():
    pages = read("docs/api.md")
    documented = {
        *re.findall(r"auto(?:class|function):: scatterpar\.(\w+)$", pages, re.MULTILINE)
    }
    assert "automodule:: scatterpar.recipe\n   :members:" in pages
    assert documented | {*scatterpar.recipe.__all__} == {*scatterpar.__all__}


def test_licence_of_images_is_packed():
    files = SETUP["metadata"]["license_files"].split()
    assert [Path(file).name for file in files] == ["LICENSE", "SOURCE.md"]
    assert "The MIT License (MIT)" in read(files[1])
    assert SETUP["metadata"]["license_expression"] == "BSD-3-Clause AND MIT"


# --- what help, dir and IPython show ---

CLASSES = [
    scatterpar.ScatterOnceParallel,
    scatterpar.DataParallelModel,
    scatterpar.DataParallelCriterion,
    scatterpar.ShardedOptimizer,
]


def test_help_begins_with_the_loop():
    text = pydoc.plain(pydoc.render_doc(scatterpar))
    description = text.partition("DESCRIPTION")[2].partition("PACKAGE CONTENTS")[0]
    assert "engine.forward_backward(images, labels, criterion)" in description


def test_dir_has_public_names_alone():
    assert {*dir(scatterpar)} == {*scatterpar.__all__, "__version__"}


@pytest.mark.parametrize("public_class", CLASSES, ids=lambda public: public.__name__)
def test_constructor_has_no_docstring_of_torch(public_class):
    """IPython shows it below that of the class."""
    docstring = inspect.getdoc(public_class.__init__)
    assert docstring
    assert docstring != inspect.getdoc(nn.Module.__init__)


@pytest.mark.parametrize("public_class", CLASSES, ids=lambda public: public.__name__)
def test_properties_have_docstrings_of_their_own(public_class):
    """``property`` takes the getter's: that of the class of an ``attrgetter``."""
    for name, value in vars(public_class).items():
        if isinstance(value, property) and not name.startswith("_"):
            assert value.__doc__, name
            assert value.__doc__ != type(value.fget).__doc__, name
