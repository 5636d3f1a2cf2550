"""What may be raised: ordinary exceptions, and those that are awkward to pass on."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Sulky(Exception):
    """Refuses to be printed, compared or hashed."""

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        raise RuntimeError("this exception has no repr")

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("this exception cannot be compared")

    def __bool__(self) -> bool:
        raise RuntimeError("this exception is neither true nor false")


class Unnoted(Exception):
    """Refuses notes, as one of a class whose attributes cannot be set."""

    def add_note(self, note: str) -> None:
        raise AttributeError("this exception takes no notes")


KINDS: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError("boom"),
    "StopIteration": lambda: StopIteration("early"),
    "OutOfMemoryError": lambda: torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate"
    ),
    "SystemExit": lambda: SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt,
    "without a repr": Sulky,
    "without notes": Unnoted,
}
