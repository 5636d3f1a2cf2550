"""The functions of the user's that replicas call in turn: what is told of them."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.devices.virtual_devices import HOST
from scatterpar.errors import Told, warn
from scatterpar.log import logger
from scatterpar.loops.lending import Lending
from scatterpar.numerics.comparison import Inconclusive
from scatterpar.objects.journal import Journal
from scatterpar.objects.walk import Walk
from scatterpar.objects.whose import is_user_class
from scatterpar.verify.dropped_records import records_dropped


class UserFunctions:
    """The functions of the user's that replicas call in turn: what is told of them.

    Each call writes numbers as under gradient accumulation, which is not what one call
    for the whole batch writes. A look sees the numbers, and the step tells them::

        with functions.looking(replicated, lending, roots):
            …                                   # calls of a look
        functions.tell_numbers(name, …)         # when it is known how many calls

    Attributes:
        journal: restores what the calls of the present look write.
        written: the numbers of ``id`` and the devices of tensors and arrays that calls
            of the last look have written in place.
    """

    def __init__(self) -> None:
        self._told = Told()
        self.journal: Journal | None = None
        self._numbers: list[str] = []  # that calls of the last look have written
        self.written: dict[int, torch.device] = {}

    def tell_turns(self, function: Any) -> None:
        """Log once that replicas call ``function`` in turn."""
        name = getattr(function, "__qualname__", type(function).__name__)
        if self._told.mark(name):
            logger.info(
                "%s is called for one micro-batch at a time, in their order, because "
                "it may write",
                name,
            )

    @contextlib.contextmanager
    def looking(
        self,
        replicated: Iterable[nn.Module],
        lending: Lending,
        roots: Iterable[Any],
        excluded: Container[str] = (),
    ) -> Iterator[None]:
        """In the body, calls of a look leave nothing, and their numbers are noted.

        What ``roots`` lead to is restored. Modules are left to the engine, except
        roots, and so are the parameters of ``replicated`` modules.
        ``excluded`` are names of attributes of roots.

        Raises:
            Inconclusive: the calls may write what cannot be restored.
        """
        walk = Walk(roots, excluded=excluded, enters_modules=False)
        guarded: set[int] = set()
        for module in replicated:
            guarded.update(map(id, module.parameters()))
        journal = Journal(walk, guarded=guarded)
        # Before anything is called: a file, a socket or a generator is lost after it.
        if journal.unsaved:
            names = ", ".join(journal.unsaved)
            message = f"a look could not put back {names}"
            raise Inconclusive(message, 1, is_final=True)
        numbers: list[str] = []
        try:
            with journal.restored(), records_dropped():
                self.journal = journal
                self._numbers = numbers
                try:
                    yield
                finally:  # also of an inconclusive look
                    numbers += journal.changed_numbers()
        finally:
            lending.forget()
            self.journal = None
            # A journal may restore attributes of this object, too.
            self._numbers = numbers
            self.written = _devices_of(saved.value for saved in journal.written)

    def restart_look(self) -> None:
        """Begin a call of a look with the state before the look.

        Else it would differ from the calls for other rows by what these have written.
        """
        assert self.journal is not None
        self._numbers += self.journal.changed_numbers()
        self.journal.restore()

    def tell_numbers(
        self, function: str, calls: int, remedy: str, owner: Any = None
    ) -> None:
        """Warn once of each number that calls write, as the last look has seen.

        Attributes of ``owner`` are told as those of ``self``.
        """
        if calls == 1:  # as without replicas
            return
        names: list[str] = []
        for name in filter(self._told.mark, self._numbers):
            # self.seen["a"] and self.meter.total begin with their attributes.
            attribute = name.split("[")[0].split(".")[0]
            is_of_owner = attribute in getattr(owner, "__dict__", ())
            names.append(f"self.{name}" if is_of_owner else name)
        # Told or not, they were of the last look.
        self._numbers = []
        if names:
            warn(
                f"{function} writes {', '.join(names)} in each call, {calls} times in "
                f"this batch, as with gradient accumulation; {remedy}"
            )


def _devices_of(values: Iterable[Any]) -> dict[int, torch.device]:
    """The devices of tensors and arrays among ``values``, by their ``id``."""
    devices: dict[int, torch.device] = {}
    for value in values:
        if isinstance(value, Tensor):
            devices[id(value)] = value.device
        elif hasattr(value, "__array_interface__"):
            devices[id(value)] = HOST
    return devices


def of_user(values: Iterable[Any]) -> list[Any]:
    """The objects of the user's classes, such as callbacks, which calls may write."""
    return [value for value in values if is_user_class(type(value))]


def groups_of(optimizer: Any) -> SimpleNamespace:
    """The parameter groups of an optimizer, if there is one.

    Not its state, which only its own steps write.
    """
    return SimpleNamespace(param_groups=getattr(optimizer, "param_groups", ()))


def hooks_in(modules: Iterable[nn.Module]) -> list[Any]:
    """The hooks of all modules in ``modules``, and replaced ``forward``s."""
    functions: list[Any] = []
    for module in modules:
        for part in module.modules():
            functions += part._forward_pre_hooks.values()
            functions += part._forward_hooks.values()
            functions += part._backward_pre_hooks.values()
            functions += part._backward_hooks.values()
            if "forward" in vars(part):
                functions.append(vars(part)["forward"])
    return functions
