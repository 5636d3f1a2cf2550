"""What the fork server imports once, so that its workers share it."""

import contextlib

from scatterpar.train.data import UsageError
from scatterpar.train.pictures import library

with contextlib.suppress(UsageError):  # whoever needs it says so
    library("torchvision.transforms.v2")
    library("timm.data")
