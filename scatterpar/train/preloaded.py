"""What the fork server imports once, so that its workers share it."""

import contextlib

from scatterpar.train.errors import UsageError
from scatterpar.train.pictures import torchvision

with contextlib.suppress(UsageError):  # whoever needs it says so
    torchvision("transforms.v2")
