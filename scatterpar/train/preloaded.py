"""Imports that the fork server makes once, so that its workers share them."""

import contextlib

from scatterpar.train.data import library

with contextlib.suppress(Exception):  # raised again where it is needed
    library("torchvision.transforms.v2")
    library("timm.data")
