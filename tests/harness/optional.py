"""Libraries that a test needs and another environment may lack."""

import importlib
import sys
from importlib.util import find_spec

import pytest
import torch


def needed(name, extra):
    """The module ``name``; skips the test's file if its package is not installed."""
    if find_spec(name.partition(".")[0]) is None:
        pytest.skip(f"needs {extra}: docs/loops.md", allow_module_level=True)
    import_torchvision_first()
    return importlib.import_module(name)


def import_torchvision_first():
    """Import torchvision, if it is there, before a library that imports it.

    Such are timm, torchmetrics, fastai and transformers' Trainer. PyPI's torchvision is
    built for CUDA. Beside torch's CPU build it lacks its operators for object
    detection, and its import succeeds if their names exist.
    """
    if find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor x) -> Tensor")
        for name in list(sys.modules):
            if name.partition(".")[0] == "torchvision":
                del sys.modules[name]
        importlib.import_module("torchvision")
