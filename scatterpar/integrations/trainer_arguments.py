"""The arguments of a Trainer: a copy whose numbers are those of one device that takes
all rows of a step.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import transformers


class ChangedNumber(int):
    """A number of ``TrainingArguments`` that a Trainer of this module has changed."""

    # A search of hyperparameters makes a number of the same class of the user's.
    user_value: int | None = None


def changed_number(value: int, user_value: int) -> ChangedNumber:
    """A number in the place of the user's."""
    number = ChangedNumber(value)
    number.user_value = user_value
    return number


class _ChangedArguments(transformers.TrainingArguments):
    """A base of changed arguments: outside of the Trainer they have the user's numbers.

    Files and loggers get the user's, and so do copies and pickles, whose class is the
    user's own: they can be used again.
    """

    def to_dict(self) -> dict[str, Any]:
        """The arguments as the user has passed them."""
        arguments: dict[str, Any] = super().to_dict()  # type: ignore[no-untyped-call]
        return with_user_values(arguments)

    def __reduce_ex__(self, protocol: Any) -> Any:
        user_class = type(self).__bases__[1]
        return object.__new__, (user_class,), with_user_values(vars(self))


def changed_class(kind: type) -> type:
    """The class of changed arguments of this class."""
    if issubclass(kind, _ChangedArguments):
        return kind
    return type(
        kind.__name__, (_ChangedArguments, kind), {"__module__": kind.__module__}
    )


def own_arguments(value: Any) -> Any:
    """A copy of a user's ``TrainingArguments``; any other value itself."""
    # Not replace(): it would run the constructor's checks for changed numbers.
    is_arguments = isinstance(value, transformers.TrainingArguments)
    return copy.copy(value) if is_arguments else value


def with_user_values(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with the user's numbers in the place of changed ones."""
    values = dict(arguments)
    for name, value in arguments.items():
        if isinstance(value, ChangedNumber):
            values[name] = value.user_value or int(value)
    return values
