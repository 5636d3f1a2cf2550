"""Imports that the fork server makes once, so that its workers share them."""

import atexit
import contextlib
import os
import sys

from scatterpar.train.data import library
from scatterpar.train.options import UsageError

with contextlib.suppress(UsageError):  # raised again where it is needed
    library("torchvision.transforms.v2")
    library("timm.data")
if any("multiprocessing.forkserver" in word for word in sys.orig_argv):
    atexit.register(os._exit, 0)  # torch's own exit takes seconds on a busy machine
