"""What helps if a call computes with a tensor that is not on its replica's device.

A call in turn gets copies of the tensors to which its owner, closures and globals lead,
except of those that require grad. With ``parallel=True`` it gets copies of modules. So
this one fails on ``cuda:1``::

    def compute_loss(self, model, inputs, **options):
        weights = torch.ones(3, device="cuda:0")        # made there in each call
        …

The traceback of torch's error shows the line.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import torch

_ACCELERATOR = re.compile(r"\w+:\d+")  # such as cuda:0


@contextlib.contextmanager
def explained(device: torch.device) -> Iterator[None]:
    """Say where the call computes, and what helps, if the body mixes two devices.

    Raises:
        RuntimeError: the body's, with a remedy.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        # A kernel that failed names one device. A tensor on the host fails on a single
        # accelerator, too.
        names = {*_ACCELERATOR.findall(text)}
        if "device" not in text or len(names) < 2:
            raise
        raise RuntimeError(
            f"a replica computes on {device}, but your code computes with a tensor of "
            "another device; make tensors on the device of the inputs, as "
            "torch.zeros(3, device=x.device), make what requires grad a parameter of "
            "the model, and leave out parallel=True if a variable or an attribute "
            "refers to it"
        ) from error
