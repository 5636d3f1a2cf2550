"""Imports that the fork server makes once, so that its workers share them."""

import contextlib
import importlib

from scatterpar.train.libraries import library

importlib.import_module("scatterpar.train.feed")  # and what it imports
with contextlib.suppress(Exception):  # raised again where it is needed
    library("torchvision.transforms.v2")
    library("timm.data")
