"""What the fork server imports once, so that its workers share it."""

import contextlib

from scatterpar.train.data import UsageError
from scatterpar.train.pictures import import_timm, torchvision

with contextlib.suppress(UsageError):  # whoever needs it says so
    torchvision("transforms.v2")
    import_timm("data")
