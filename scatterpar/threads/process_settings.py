"""Settings of the process that a forward pass may change: they are put back.

Many settings belong to the process, and the contexts that change them do not know of
threads::

    replica 0   enters: off            leaves: on, as it was
    replica 1            enters: off                        leaves: off, as it was

So after the calls of several threads every setting is again what it was before them.
A context in a single thread needs no help. Two engines in two threads are one more case
of this: what was before is known when the first calls begin, and restored when the last
ones end (``SETTINGS_KEPT``).
"""

from __future__ import annotations

import contextlib
import gc
import logging
import operator
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from locale import LC_ALL, setlocale
from typing import Any

import torch
from torch.distributions import Distribution

from scatterpar.torch_private.settings import (
    PRECISION_SETTINGS,
    SETTINGS,
    ForAllThreads,
    Setting,
    round_no_float32,
)


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


def _set_deterministic(mode: int) -> None:
    """Set torch's debug mode of deterministic algorithms: off, warning or error."""
    # Not ``set_deterministic_debug_mode``, which leaves Inductor's setting as it is.
    torch.use_deterministic_algorithms(mode > 0, warn_only=mode == 1)


def _set_gc_thresholds(thresholds: tuple[int, int, int]) -> None:
    gc.set_threshold(*thresholds)


# Each step reads ``_data``, the encoded entries: to decode 35 of them takes 200 µs.
_environ: Any = os.environ


def _set_environment(entries: dict[Any, Any]) -> None:
    """Make the environment these encoded entries, which ``os.environ`` decodes."""
    decoded = {
        _environ.decodekey(key): _environ.decodevalue(value)
        for key, value in entries.items()
    }
    for name in _environ.keys() - decoded.keys():
        del _environ[name]
    _environ.update(decoded)


_cuda = torch.backends.cuda
# How torch computes: a captured graph keeps what held when it was captured.
_SETTINGS_OF_TORCH: tuple[Setting, ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_anomaly_enabled, _set_anomaly_mode),
    (torch.is_anomaly_check_nan_enabled, _set_anomaly_check),
    (torch.get_deterministic_debug_mode, _set_deterministic),
    (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
    (
        _cuda.fp16_bf16_reduction_math_sdp_allowed,
        _cuda.allow_fp16_bf16_reduction_math_sdp,
    ),
    *SETTINGS,
)
_ALL_SETTINGS: tuple[Setting, ...] = (
    *_SETTINGS_OF_TORCH,
    _attribute(Distribution, "_validate_args"),
    (gc.isenabled, _set_collecting),
    (gc.get_threshold, _set_gc_thresholds),
    (sys.getrecursionlimit, sys.setrecursionlimit),
    (sys.getswitchinterval, sys.setswitchinterval),
    (os.getcwd, os.chdir),
    (partial(dict, _environ._data), _set_environment),
    (partial(setlocale, LC_ALL), partial(setlocale, LC_ALL)),
    _attribute(sys, "stdout"),
    _attribute(sys, "stderr"),
    _attribute(sys, "excepthook"),  # torch's process groups set their own
    _attribute(logging.root.manager, "disable"),
    _attribute(warnings, "showwarning"),
    _attribute(warnings, "filters"),
)


# Alone, so that a job reads all of them without a Python call of ours for each.
_READERS = tuple(read for read, _ in _ALL_SETTINGS)
_READERS_OF_TORCH = _READERS[: len(_SETTINGS_OF_TORCH)]

# The values of settings, and the entries of ``warnings.filters``, which is one of them.
SettingValues = tuple[list[Any], list[Any]]

_UNREADABLE = object()


def _read_all(readers: Sequence[Callable[[], Any]]) -> list[Any]:
    """Read the values of settings; ``_UNREADABLE`` if one cannot be read.

    Such are settings of TF32 after a program has used torch's older and newer ones,
    and a working directory that does not exist any more.
    """
    try:
        return list(map(operator.call, readers))
    except (RuntimeError, OSError):
        return list(map(_read, readers))


def _read(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (RuntimeError, OSError):
        return _UNREADABLE


def _write_all(settings: Sequence[Setting], values: Sequence[Any]) -> None:
    """Write the values of settings that have another value now."""
    for (read, write), value in zip(settings, values, strict=True):
        if value is _UNREADABLE:
            continue
        # Read again: one that was written may have changed another one.
        now = _read(read)
        if now is not value and now != value:
            write(value)


@contextlib.contextmanager
def _full_float32() -> Iterator[None]:
    earlier = _read_all([read for read, _ in PRECISION_SETTINGS])
    round_no_float32()
    try:
        yield
    finally:
        _write_all(PRECISION_SETTINGS, earlier)


# In the body, no operator rounds float32 numbers to a coarser format inside.
FULL_FLOAT32 = ForAllThreads(_full_float32)


def settings_of_torch() -> list[Any]:
    """Read the settings on which operators of torch depend, to be compared."""
    return _read_all(_READERS_OF_TORCH)


def read_settings() -> SettingValues:
    """Read the settings of the process, to be restored."""
    # A context may change the list of filters, or exchange it for another one.
    return _read_all(_READERS), list(warnings.filters)


def restore_settings(values: SettingValues) -> None:
    """Make the settings of the process again what they were."""
    earlier, filters = values
    # Nearly always nothing has changed.
    if _read_all(_READERS) == earlier and warnings.filters == filters:
        return
    _write_all(_ALL_SETTINGS, earlier)
    warnings.filters[:] = filters  # type: ignore[index]
    with warnings.catch_warnings():
        pass  # it tells the registries of modules that filters have changed


@contextlib.contextmanager
def _settings_restored() -> Iterator[None]:
    values = read_settings()
    try:
        yield
    finally:
        restore_settings(values)


# In the bodies of all threads settings may change; after the last one they are as
# before the first. A body that began in another one's look, and outlived it, would else
# restore what holds in the look: no search for kernels, no TF32.
SETTINGS_KEPT = ForAllThreads(_settings_restored)
