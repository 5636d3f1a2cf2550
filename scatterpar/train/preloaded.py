"""Imports that the fork server makes once, so that its workers share them."""

import contextlib

from scatterpar.train.data import library
from scatterpar.train.options import UsageError

with contextlib.suppress(UsageError):  # raised again where it is needed
    library("torchvision.transforms.v2")
    library("timm.data")
