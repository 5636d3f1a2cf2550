"""The former place of ``scatterpar.Trace``."""

import warnings
from typing import Any

from scatterpar.options import trace


def __getattr__(name: str) -> Any:
    if name.startswith("__") or not hasattr(trace, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"{__name__}.{name} is deprecated: its class Trace is scatterpar.Trace now",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(trace, name)
