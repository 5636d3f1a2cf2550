"""State that calls move, by the names that texts tell."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.devices.bits import same_bits
from scatterpar.objects.references import MUTABLE_CONTAINERS
from scatterpar.objects.snapshot import Snapshot, entries_of
from scatterpar.objects.walk import VARIABLES, Place, Walk
from scatterpar.replicas.module_copy import ModuleCopy

# Every module has these, such as hooks: no forward pass of the user's moves them.
_OF_TORCH = vars(nn.Module()).keys()
_PLAIN_STATE = (int, float, bool, str)
_MAX_DEPTH = (
    3  # a list in a dictionary, and what it holds: each call of a look reads it
)
_MAX_COMPARED_ENTRIES = 32  # of a container: those beyond are data

# By the names that a warning tells: the contents of each value, by key.
State = dict[str, dict[Any, Any]]


class SharedTensors:
    """Find the places outside of modules that refer to tensors.

    Replicas share them: what one leaves there, another one overwrites. Each replica has
    its own of the containers in ``copied``, by ``id``.
    """

    def __init__(self, roots: Sequence[Any], copied: Collection[int] = ()) -> None:
        self._walk = Walk(roots)
        inside = set(copied)
        for module in self._walk.modules:
            inside |= {id(vars(module)), id(module._buffers), id(module._parameters)}
        self._containers = [
            (number, kind, container)
            for number, kind, container in self._walk.containers
            if id(container) not in inside
        ]
        self._earlier = Snapshot([container for *_, container in self._containers])
        self._variables = [p for p in self._walk.places if p.kind in VARIABLES]
        self._values = [place.read() for place in self._variables]

    def left(self) -> list[str]:
        """The names of places that refer to other tensors now."""
        names: list[str] = []
        for position, container, saved in self._earlier.changed():
            number, kind, _ = self._containers[position]
            earlier = set(map(id, saved.values() if isinstance(saved, dict) else saved))
            for key, value in entries_of(container):
                if id(value) not in earlier and nested.tensors(value):
                    place = Place(kind, container, key, value, number)
                    names.append(self._walk.name_of_place(place))
        for place, earlier in zip(self._variables, self._values, strict=True):
            value = place.read()
            if value is not earlier and nested.tensors(value):
                names.append(self._walk.name_of_place(place))
        return list(dict.fromkeys(names))


def state_of(replicas: Sequence[ModuleCopy], *, has_same_rows: bool = False) -> State:
    """The buffers of replicas, and those attributes that hold state whatever the rows
    are: numbers, tensors, lengths of lists.

    Running statistics do not change in a look, whose batch normalisations are in
    evaluation mode.

    Calls with the same rows are compared in attributes alone, since a buffer may move
    once per step. These are compared in switches, words and the contents of containers,
    too, which may differ between calls with other rows.
    """
    state: State = {}
    roots = [replica.root for replica in replicas]
    # A criterion may be a function, which has no attributes that are its state.
    modules = [root.named_modules() for root in roots if isinstance(root, nn.Module)]
    for path, module in chain.from_iterable(modules):
        buffers = {} if has_same_rows else module._buffers
        for kind, values in (("buffer", buffers), ("attribute", vars(module))):
            for name, value in values.items():
                # Words and switches may be those of the rows.
                is_of_rows = not has_same_rows and type(value) in (bool, str)
                if name in _OF_TORCH or is_of_rows:
                    continue
                contents = dict(_contents_of(value, _MAX_DEPTH if has_same_rows else 0))
                if contents:
                    full_name = f"{path}.{name}".lstrip(".")
                    state[f"the {kind} {full_name!r}"] = contents
    return state


def _contents_of(value: Any, depth: int) -> Iterator[tuple[Any, Any]]:
    """Yield the numbers and tensors that show that a call has moved ``value``, by keys.

    Of a container its length and contents: a call that appends to it finds more entries
    in the next one. What is kept with its graph is no state.
    """
    kind = type(value)
    if kind in _PLAIN_STATE:
        yield (), value
    elif isinstance(value, Tensor):
        if value.grad_fn is None:
            yield (), value.detach().clone()
    elif kind in MUTABLE_CONTAINERS or kind in (tuple, set):
        # Lengths of other containers may be those of the rows.
        if depth or kind in (list, deque):
            yield "length", len(value)
        # In a set positions say nothing.
        if not depth or kind is set:
            return
        for key, entry in islice(entries_of(value), _MAX_COMPARED_ENTRIES):
            for inner, content in _contents_of(entry, depth - 1):
                yield (key, inner), content


def moved_between(states: Sequence[State]) -> list[str]:
    """The names of state that the second part of a look has changed, after the first.

    What only the first part changes, such as a table that it fills, is not found. If
    both parts began in the same state: what they have left different.
    """
    if len(states) < 2:
        return []
    first, second = states[:2]
    return [
        name
        for name, contents in first.items()
        if _is_moved(contents, second.get(name, {}))
    ]


def new_in(before: State, after: State) -> list[str]:
    """The names of state that is not there before, or has other contents after."""
    return [
        name
        for name, contents in after.items()
        if name not in before
        or before[name].keys() != contents.keys()
        or _is_moved(before[name], contents)
    ]


def _is_moved(contents: Mapping[Any, Any], later: Mapping[Any, Any]) -> bool:
    """Whether a content that both have is another one later."""
    for key, content in contents.items():
        if key in later and not _is_same_content(content, later[key]):
            return True
    return False


def _is_same_content(value: Any, later: Any) -> bool:
    """Whether two values are the same, or of types that cannot be compared."""
    if type(value) is not type(later):
        return True
    if isinstance(value, Tensor):
        return same_bits(value, later)
    return repr(value) == repr(later)  # a NaN equals itself
