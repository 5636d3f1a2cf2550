"""Settings of the process that a forward pass may change: they are put back.

Many settings belong to the process, and the contexts that change them do not know of
threads::

    replica 0   enters: off            leaves: on, as it was
    replica 1            enters: off                        leaves: off, as it was

So after the calls of several threads every setting is again what it was before them.
A context in a single thread needs no help.
"""

from __future__ import annotations

import gc
import logging
import operator
import sys
import warnings
from functools import partial
from typing import Any

import torch

from scatterpar.torch_private import SETTINGS, Setting


def _attribute(owner: Any, name: str) -> Setting:
    return partial(getattr, owner, name), partial(setattr, owner, name)


def _set_collecting(is_on: bool) -> None:
    if is_on:
        gc.enable()
    else:
        gc.disable()


def _set_anomaly_mode(is_on: bool) -> None:
    torch.autograd.set_detect_anomaly(is_on, torch.is_anomaly_check_nan_enabled())


def _set_anomaly_check(checks_nan: bool) -> None:
    torch.autograd.set_detect_anomaly(torch.is_anomaly_enabled(), checks_nan)


def _set_deterministic(is_on: bool) -> None:
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(is_on, warn_only=warns_only)


def _set_warns_only(warns_only: bool) -> None:
    is_on = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(is_on, warn_only=warns_only)


_cuda = torch.backends.cuda
_SETTINGS: tuple[Setting, ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_anomaly_enabled, _set_anomaly_mode),
    (torch.is_anomaly_check_nan_enabled, _set_anomaly_check),
    (torch.are_deterministic_algorithms_enabled, _set_deterministic),
    (torch.is_deterministic_algorithms_warn_only_enabled, _set_warns_only),
    (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
    (
        _cuda.fp16_bf16_reduction_math_sdp_allowed,
        _cuda.allow_fp16_bf16_reduction_math_sdp,
    ),
    *SETTINGS,
    (gc.isenabled, _set_collecting),
    _attribute(sys, "stdout"),
    _attribute(sys, "stderr"),
    _attribute(logging.root.manager, "disable"),
    _attribute(warnings, "showwarning"),
    _attribute(warnings, "filters"),
)


# Alone, so that a job reads all of them without a Python call of ours for each.
_READERS = tuple(read for read, _ in _SETTINGS)

# The values of settings, and the entries of ``warnings.filters``, which is one of them.
SettingValues = tuple[list[Any], list[Any]]


def read_settings() -> SettingValues:
    """The settings of the process, to be restored."""
    # A context may change the list of filters, or exchange it for another one.
    return list(map(operator.call, _READERS)), list(warnings.filters)


def restore_settings(values: SettingValues) -> None:
    """Make the settings of the process again what they were."""
    earlier, filters = values
    present = list(map(operator.call, _READERS))
    # Nearly always nothing has changed.
    if present == earlier and warnings.filters == filters:
        return
    for (read, write), value in zip(_SETTINGS, earlier, strict=True):
        # Read again: one that was written may have changed another one.
        if read() is not value and read() != value:
            write(value)
    warnings.filters[:] = filters  # type: ignore[index]
    with warnings.catch_warnings():
        pass  # it tells the registries of modules that filters have changed
