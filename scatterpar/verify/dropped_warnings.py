"""Warnings of user code in a look are not shown, because the step warns again."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from typing import Any

# The pattern matches every message. Without one, the filter would equal that of
# ``warnings.simplefilter("ignore")``, which removes its equal, also in another thread.
_IGNORE = ("ignore", re.compile(""), Warning, None, 0)


@contextlib.contextmanager
def warnings_dropped() -> Iterator[None]:
    """In the body, warnings are ignored, and Python does not note them as shown.

    ``warnings.catch_warnings`` would make Python forget what it has shown before: the
    user's warnings would appear again after each look.
    """
    filters: Any = warnings.filters
    # First, because the first filter that fits decides.
    filters.insert(0, _IGNORE)
    try:
        yield
    finally:
        # Nothing is left to remove if the user's code called resetwarnings.
        with contextlib.suppress(ValueError):
            filters.remove(_IGNORE)
