"""What the fork server imports once, so that its workers share it."""

import atexit
import contextlib
import os
import sys

from scatterpar.train.data import UsageError
from scatterpar.train.pictures import library

with contextlib.suppress(UsageError):  # whoever needs it says so
    library("torchvision.transforms.v2")
    library("timm.data")
if any("multiprocessing.forkserver" in word for word in sys.orig_argv):
    atexit.register(os._exit, 0)  # to take torch down takes seconds on a busy machine
