"""What is a library's: by its module, and by the file of its lines."""

from __future__ import annotations

import collections
import sysconfig
from pathlib import Path

import pytest
import torch
from torch import nn

import scatterpar
from scatterpar.libraries import is_library, is_library_file, package_of

pytestmark = pytest.mark.core


class Raising:
    @property
    def __module__(self):
        raise KeyError("of the user's")


def test_modules_of_libraries():
    for name in ("torch.nn", "scatterpar.engine", "collections", "pytest"):
        assert is_library(name), name
    assert not is_library("__main__")
    assert not is_library("of_a_user.models")


def test_files_of_libraries():
    stdlib = sysconfig.get_path("stdlib")
    of_libraries = (
        torch.__file__,
        scatterpar.__file__,
        collections.__file__,
        f"{stdlib}/threading.py",
        "/venv/lib/python3/site-packages/timm/models.py",
        "/usr/lib/python3/dist-packages/timm/models.py",
        "<frozen importlib._bootstrap>",
    )
    for path in of_libraries:
        assert is_library_file(path), path
    folder = Path(scatterpar.__file__).parent
    of_users = (
        __file__,
        "/tmp/ipykernel_7/1.py",
        "<stdin>",
        "<string>",
        # Names that begin or end as those of libraries.
        f"{folder}_experiments/train.py",
        f"{stdlib}_of_users/train.py",
        "/home/user/vision-packages/train.py",
    )
    for path in of_users:
        assert not is_library_file(path), path


def test_package_of_what_a_library_defines():
    assert package_of(nn.Linear) == "torch"
    assert package_of(nn.ReLU()) == "torch"
    assert package_of(nn.functional.relu) == "torch"
    assert package_of(scatterpar.count_labels) == "scatterpar"
    assert package_of(Raising()) == ""
