"""The base class of wrappers of a module: state dicts with its own keys, copies,
pickles.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic

from torch import nn
from typing_extensions import TypeVar  # with defaults; torch itself requires it

# A module keeps its class: ``ScatterOnceParallel(MyNet()).module`` is a ``MyNet``.
ModuleT = TypeVar("ModuleT", bound=nn.Module, covariant=True, default=Any)
WrappedT = TypeVar("WrappedT", covariant=True, default=Any)

_PREFIX = "module."


def to_own_keys(module: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """``state_dict`` without the prefix ``module.``, except in keys of the module's
    own.

    So checkpoints of ``nn.DataParallel`` and ``DistributedDataParallel`` load, and a
    model may have a child named ``module``.
    """
    own_keys = module.state_dict().keys()
    renamed: OrderedDict[str, Any] = OrderedDict()
    for key, value in state_dict.items():
        if key not in own_keys:
            key = key.removeprefix(_PREFIX)
        renamed[key] = value
    # The versions of modules, by their names. torch reads them when it loads.
    versions = getattr(state_dict, "_metadata", None)
    if versions is not None:
        metadata = {
            name.removeprefix(_PREFIX): version
            for name, version in versions.items()
            if name.startswith(_PREFIX)
        }
        # Names that exist both with and without the prefix keep their own version.
        renamed._metadata = metadata | dict(versions)  # type: ignore[attr-defined]
    return renamed


class Wrapper(nn.Module, Generic[WrappedT]):
    """A wrapper of ``self.module``; its state dict has the module's own keys.

    The wrapper's run-time state (threads, replicas) is neither copied nor pickled.
    """

    module: WrappedT

    if TYPE_CHECKING:
        # By these methods of nn.Module, type checkers take any name for an attribute.
        # If they are no methods, a misspelled name is an error.
        __getattr__: None  # type: ignore[misc, assignment]
        __setattr__: None  # type: ignore[misc, assignment]

    _transient: tuple[str, ...]  # the attributes that ``_init_transient`` makes

    def __init__(self) -> None:
        super().__init__()
        # A parent's ``load_state_dict`` does not call that of its children.
        self.register_load_state_dict_pre_hook(_add_prefix)  # type: ignore[no-untyped-call]

    @property
    def _inner(self) -> nn.Module:
        """The module; for a criterion that is a function, a module without state."""
        return self.module if isinstance(self.module, nn.Module) else nn.Module()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's state, under the module's own keys."""
        self._refuse_inside()
        return self._inner.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the module's state from keys with or without a leading ``module.``."""
        if isinstance(state_dict, Mapping):  # torch raises an error for anything else
            state_dict = to_own_keys(self._inner, state_dict)
        return self._inner.load_state_dict(state_dict, strict, assign)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The module; ``train``, ``to`` and ``apply`` call this."""
        self._refuse_inside()
        return super().named_children()

    def _refuse_inside(self) -> None:
        """Refuse a module that has its wrapper as a child: traversing it would never
        end.
        """
        if any(part is self for part in self._inner.modules()):
            kind = type(self.module).__name__
            name = type(self).__name__
            raise ValueError(
                f"{kind} contains the {name} that wraps it (self.engine = "
                f"{name}(self)), so train(), to() and state_dict() would never end; "
                f"keep the {name} outside of the module, or in a list, self.engine = "
                f"[{name}(self)]"
            )

    def _init_transient(self) -> None:
        """Make the attributes that ``_transient`` lists."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in vars(self).items()
            if name not in self._transient
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        # torch adds attributes that older versions did not save.
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._init_transient()


def _add_prefix(wrapper: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Hook for a parent that loads: convert the wrapper's keys to those of torch.

    The parent loads each child by itself, and torch expects the names of attributes.
    """
    wrapper_state: dict[str, Any] = {}
    for key in list(state_dict):
        if key.startswith(prefix):
            wrapper_state[key.removeprefix(prefix)] = state_dict.pop(key)
    for key, value in to_own_keys(wrapper._inner, wrapper_state).items():
        state_dict[prefix + _PREFIX + key] = value
