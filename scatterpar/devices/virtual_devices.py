"""The memories that devices stand for: the host's, an accelerator's, a virtual one.

A *memory* is named by a ``torch.device``. ``cpu`` is host memory. ``cpu:0``, ``cpu:1``,
… are virtual devices: separate memories in host RAM. So a machine without GPUs makes
and counts the copies that several GPUs would need. Equal devices share one memory.
"""

from __future__ import annotations

import functools

import torch

HOST = torch.device("cpu")


@functools.cache  # asked at every copy
def physical(device: torch.device) -> torch.device:
    """The device as torch knows it: ``cpu`` for a virtual ``cpu:i``."""
    return HOST if device.type == "cpu" else device
