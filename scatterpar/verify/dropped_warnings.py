"""Warnings of user code in a look are not shown, because the step warns again."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

_IGNORE = ("ignore", None, Warning, None, 0)


@contextlib.contextmanager
def warnings_dropped() -> Iterator[None]:
    """In the body, warnings are ignored, and Python does not note them as shown.

    ``warnings.catch_warnings`` would make Python forget what it has shown before: the
    user's warnings would appear again after each look.
    """
    filters: Any = warnings.filters
    filters.insert(0, _IGNORE)
    try:
        yield
    finally:
        filters.remove(_IGNORE)
