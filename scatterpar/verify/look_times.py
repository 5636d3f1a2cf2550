"""When the engine and the pair look, and what they tell afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from scatterpar.errors import warn
from scatterpar.verify.comparison import Inconclusive
from scatterpar.verify.schedule import Kind, Kinds

_KEY_LENGTH = 60  # beginnings of warnings that are not repeated
_REASON_LENGTH = 120


class Looks:
    """The looks at the calls of one engine, or of one criterion of the pair.

    Warnings wait until the call has succeeded: one that fails says its error alone.

    Attributes:
        kinds: the kinds of calls, and the looks at each.
        told: beginnings of the warnings so far, and the names in them.
    """

    def __init__(self) -> None:
        self.kinds = Kinds()
        self._waiting: list[tuple[str, Sequence[str]]] = []
        self.told: set[str] = set()

    @contextlib.contextmanager
    def counted(self, kind: Kind) -> Iterator[None]:
        """The body is a look at a call of this kind. It raises if the look refuses."""
        try:
            yield
        except ValueError:
            # Each step is looked at until one agrees: a remedy may be wrong, too.
            kind.is_refused = True
            raise
        finally:
            # After a refusal the same rows again: fewer may not show it.
            kind.looks += not kind.is_refused

    def note_inconclusive(self, kind: Kind, error: Inconclusive, text: str) -> None:
        """Count an inconclusive look; ``text`` is its warning, empty if none is due."""
        kind.num_inconclusive += 1
        kind.is_given_up = error.is_final
        if text and (error.is_final or kind.num_inconclusive >= error.patience):
            self.warn(text)

    def warn(self, text: str, names: Sequence[str] = ()) -> None:
        """Warn once, when the call has succeeded. ``told`` has the names then."""
        self._waiting.append((text, names))

    def begin(self) -> None:
        """A call begins: forget the warnings of one that has failed."""
        self._waiting.clear()

    def tell(self) -> None:
        """The call has succeeded: warn of what its look has found."""
        for text, names in self._waiting:
            # By their beginnings, because numbers at the end differ from step to step.
            if text[:_KEY_LENGTH] not in self.told:
                self.told.update([text[:_KEY_LENGTH], *names])
                warn(text)
        self._waiting.clear()


def shown_reason(error: Exception) -> str:
    """The first line of an error, shortened."""
    lines = str(error).strip().splitlines()
    return lines[0][:_REASON_LENGTH].rstrip(".") if lines else type(error).__name__
