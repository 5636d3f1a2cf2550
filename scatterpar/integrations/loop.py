"""Run the step function of another library's training loop on replicas of the loop's
modules.

A loop has an *owner*, such as a Trainer, whose step function takes a batch. Each
replica calls the step function for its micro-batches, on a copy of the owner that
refers to the replica's modules.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.batch.markers import Marker, Rows
from scatterpar.devices.transfers import to_device
from scatterpar.errors import Told, warn
from scatterpar.integrations.lending import Lending
from scatterpar.log import logger
from scatterpar.numerics.comparison import Inconclusive
from scatterpar.objects.journal import Journal
from scatterpar.objects.walk import Walk
from scatterpar.objects.whose import is_user_class
from scatterpar.step.request import check_function
from scatterpar.verify.dropped_records import records_dropped

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)


class Modules(nn.Module):
    """The modules of a loop, the model first; called, it calls a step function with
    itself.

    Args:
        modules: with the names that texts tell.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self.training = False  # only its modules have a mode
        for name, module in modules:
            # Of another module, or of ``nn.Module``, such as ``double``.
            while hasattr(self, name):
                name += "_"
            self.add_module(name, module)

    def __getitem__(self, number: int) -> Any:
        return [*self.children()][number]

    def forward(self, work: Any, **kwargs: Any) -> Any:
        """Return ``work(self, **kwargs)``."""
        return work(self, **kwargs)


@contextlib.contextmanager
def overridden(owner: Any, **values: Any) -> Iterator[None]:
    """In the body, ``owner`` has these attributes, which may be methods.

    An owner without attributes, such as a list of batches, stays as it is.
    """
    attributes = getattr(owner, "__dict__", {})
    before = {name: attributes[name] for name in values if name in attributes}
    attributes.update(values)
    try:
        yield
    finally:
        for name in values.keys() - before:
            attributes.pop(name, None)
        attributes.update(before)  # in their places, or replicas would be made again


class UserFunctions:
    """The functions of the user's that replicas call in turn: what is told of them.

    Each call writes numbers as under gradient accumulation, which is not what one call
    for the whole batch writes. A look sees the numbers, and the step tells them::

        with functions.looking(parts, lending, roots):
            …                                   # calls of a look
        functions.tell_numbers(name, …)         # when it is known how many calls
    """

    def __init__(self) -> None:
        self._told = Told()
        self._journal: Journal | None = None  # of the present look
        self._numbers: list[str] = []  # that calls of the last look have written

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
        parts: Iterable[nn.Module],
        lending: Lending,
        roots: Iterable[Any],
        excluded: Container[str] = (),
    ) -> Iterator[None]:
        """In the body, calls of a look leave nothing, and their numbers are noted.

        What ``roots`` lead to is restored. Modules are left to the engine, except
        roots, and so are the parameters of ``parts``, which replicas have.
        ``excluded`` are names of attributes of roots.

        Raises:
            Inconclusive: the calls may write what cannot be restored.
        """
        walk = Walk(roots, excluded=excluded, enters_modules=False)
        guarded: set[int] = set()
        for part in parts:
            guarded.update(map(id, part.parameters()))
        journal = Journal(walk, guarded=guarded)
        # Before anything is called: a file, a socket or a generator is lost after it.
        if journal.unsaved:
            names = ", ".join(journal.unsaved)
            message = f"a look could not put back {names}"
            raise Inconclusive(message, 1, is_final=True)
        numbers: list[str] = []
        try:
            with journal.restored(), records_dropped():
                self._journal = journal
                self._numbers = numbers
                try:
                    yield
                finally:  # also of an inconclusive look
                    numbers += journal.changed_numbers()
        finally:
            lending.forget()
            self._journal = None
            # A journal may restore attributes of this object, too.
            self._numbers = numbers

    def restart_look(self) -> None:
        """Begin a call of a look with the state before the look.

        Else it would differ from the calls for other rows by what these have written.
        """
        assert self._journal is not None
        self._numbers += self._journal.changed_numbers()
        self._journal.restore()

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


def of_user(values: Iterable[Any]) -> list[Any]:
    """The objects of the user's classes, such as callbacks, which calls may write."""
    return [value for value in values if is_user_class(type(value))]


def groups_of(optimizer: Any) -> SimpleNamespace:
    """The parameter groups of an optimizer, if there is one.

    Not its state, which only its own steps write.
    """
    return SimpleNamespace(param_groups=getattr(optimizer, "param_groups", ()))


def hooks_in(modules: Iterable[nn.Module]) -> list[Any]:
    """The forward hooks of all modules in ``modules``, and replaced ``forward``s."""
    functions: list[Any] = []
    for module in modules:
        for part in module.modules():
            functions += part._forward_pre_hooks.values()
            functions += part._forward_hooks.values()
            if "forward" in vars(part):
                functions.append(vars(part)["forward"])
    return functions


def replaced(module: nn.Module, **methods: Callable[..., Any]) -> Any:
    """In the body, the module has these methods, such as ``forward``, and no hooks."""
    return overridden(module, **methods, **{name: {} for name in _HOOKS})


def warn_of_batch_norm(module: nn.Module) -> None:
    """Warn if a batch normalisation in ``module`` has running statistics."""
    for part in module.modules():
        is_normalisation = isinstance(part, nn.modules.batchnorm._BatchNorm)
        if is_normalisation and part.track_running_stats:
            warn(
                "the model has batch normalisation, which sees one micro-batch at a "
                'time; pass buffers="batch" for running statistics of all rows of a '
                'batch, or "master" for those of micro-batches'
            )
            return


def check_count(count: Any, arguments: Sequence[str], labels: str) -> None:
    """Refuse a ``count=`` that this loop cannot call.

    Args:
        count: the user's function, or ``None``.
        arguments: what the loop calls it with.
        labels: an expression for the labels in these arguments.

    Raises:
        TypeError: it is no function, or takes other arguments.
    """
    if count is None:
        return
    check_function("count", count)
    try:
        signature = inspect.signature(count)
    except ValueError:  # a function in C
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        names = ", ".join(arguments)
        raise TypeError(
            f"count takes {signature}, but this loop calls count({names}); pass "
            f"count=lambda {names}: {labels}.ne(-100).sum(), for a mean over labels "
            "that are not ignored"
        ) from None


def refuse(integration: str, options: Mapping[str, object], reason: str) -> None:
    """Raise ``ValueError`` for the first option that is used.

    Args:
        integration: what refuses it.
        options: whether each option is used, by its name.
        reason: why it does not work, and what to do.
    """
    for name, is_used in options.items():
        if is_used:
            raise ValueError(
                f"{integration} does not go together with {name}: {reason}"
            )


def device_of(module: nn.Module, default: Any) -> torch.device:
    """The device of a replica: that of its first parameter, or ``default``."""
    parameter = next(module.parameters(), None)
    return torch.device(default if parameter is None else parameter.device)


def moved(value: Any, device: torch.device, copy: bool = False) -> Any:
    """``value`` with its tensors on ``device``, without their graphs.

    With ``copy``, in memory that a replica does not write which goes on with its next
    batch: the module may keep an output, such as in a buffer.
    """

    def move(tensor: Tensor) -> Tensor:
        return to_device(tensor.detach(), device, copy=copy)

    return nested.map_tensors(move, value)


def num_rows(batch: Any) -> int:
    """The number of rows: that of the outermost tensor or marker with rows.

    Without one, the length of the longest list at the outermost level that has lists.
    One if nothing has rows.
    """
    # Level by level: the outermost tensor is the least likely to be one row's own.
    level = [batch]
    longest = 0
    while level:
        for value in level:
            size = size_of(value)
            if size is not None:
                return size
        if not longest:  # no level further out had lists
            lengths = [len(value) for value in level if _is_list(value)]
            longest = max(lengths, default=0)
        level = list(chain.from_iterable(map(nested.children_of, level)))
    return longest or 1


def check_rows(batch: Any, remedy: str) -> None:
    """Raise ``ValueError`` if entries of ``batch`` have different numbers of rows."""
    entries = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
    sizes: dict[Any, int] = {}
    for name, value in entries:
        size = size_of(value)
        if size is not None:
            sizes[name] = size
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"the rows of a batch cannot be divided: its tensors have {sizes} of them; "
            f"{remedy}"
        )


def as_rows(batch: Any) -> Any:
    """``batch`` with lists that have one entry per row, such as texts, as ``Rows``.

    A list of columns is not marked: all tensors and lists in it have as many rows as
    the batch.
    """
    rows = num_rows(batch)

    def is_rows(values: Sequence[Any]) -> bool:
        (value,) = values
        return _is_list(value) and len(value) == rows and not _are_columns(value)

    def marked(values: list[Any]) -> Any:
        (value,) = values
        return Rows(value) if is_rows(values) else value

    return nested.merge(marked, [batch], is_rows)


def _are_columns(entries: Sequence[Any]) -> bool:
    """Whether all tensors and lists in ``entries`` have as many rows as there are
    entries, and there are some.
    """
    sizes: set[int] = set()
    for entry in entries:
        is_mapping = isinstance(entry, Mapping)
        values = nested.with_contents(entry) if is_mapping else [entry]
        for value in values:
            size = len(value) if _is_list(value) else size_of(value)
            if size is not None:
                sizes.add(size)
    return sizes == {len(entries)}


def _is_list(value: Any) -> bool:
    """Whether ``value`` is a list or tuple that may have an entry per row."""
    return isinstance(value, (list, tuple)) and not hasattr(value, "_fields")


def size_of(value: Any) -> int | None:
    """The number of rows of a tensor or marker; ``None`` if there are none."""
    if isinstance(value, Marker):
        return value.num_rows
    return len(value) if isinstance(value, Tensor) and value.ndim else None
