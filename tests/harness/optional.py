"""Libraries that a test needs and another environment may lack."""

import importlib
from importlib.util import find_spec

import pytest


def needed(name, extra):
    """The module ``name``; skips the test's file if its package is not installed."""
    if find_spec(name.partition(".")[0]) is None:
        pytest.skip(f"needs {extra}: docs/other-loops.md", allow_module_level=True)
    import_torchvision_first()
    return importlib.import_module(name)


def import_torchvision_first():
    """Import torchvision, if it is there, before a library that imports it.

    Such are torchmetrics, fastai and transformers' Trainer. PyPI's torchvision does not
    import beside torch's CPU build otherwise (docs/training-tool.md).
    """
    if find_spec("torchvision") is not None:
        from scatterpar.train.libraries import library

        library("torchvision")
