"""Modes, transforms and profilers that watch the operators of this thread."""

from __future__ import annotations

import contextlib
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from scatterpar.libraries import package_of
from scatterpar.torch_private.compiler import uncompiled
from scatterpar.torch_private.entry_points import find

dispatch_modes = find(
    "torch.utils._python_dispatch", "_get_current_dispatch_mode_stack"
)
_push_mode = find("torch.utils._python_dispatch", "_push_mode")
_pop_mode = find("torch.utils._python_dispatch", "_pop_mode")
_function_modes = find("torch.overrides", "_get_current_function_mode_stack")
_DefaultDevice = find("torch.utils._device", "DeviceContext")

_PROFILER: Any = torch.autograd.profiler
PROFILE_ALL_THREADS = (
    "experimental_config=torch._C._profiler._ExperimentalConfig("
    "profile_all_threads=True)"
)


def modes() -> list[str]:
    """Names of this thread's dispatch and function modes.

    Without the mode of the default device, which workers get too, and those of the
    package.
    """
    names: list[str] = []
    for mode in (*dispatch_modes(), *_function_modes()):
        kind = type(mode)
        if kind is not _DefaultDevice and package_of(kind) != "scatterpar":
            names.append(kind.__name__)
    return names


def is_transformed() -> bool:
    """Whether a transform of ``torch.func`` calls this thread's code."""
    return torch._C._functorch.peek_interpreter_stack() is not None


_VMAP_OF_GRAD: Any = torch._C._parse_dispatch_key("VmapMode")


def is_batched_backward() -> bool:
    """Whether this thread runs ``torch.autograd.grad(…, is_grads_batched=True)``.

    Its gradients have a hidden dimension, by an older transform than ``torch.func``'s.
    """
    return torch._C._dispatch_tls_is_dispatch_key_included(_VMAP_OF_GRAD)


def profiler_is_on() -> bool:
    """Whether a profiler of torch is on in any thread."""
    return bool(_PROFILER._is_profiler_enabled)


def is_profiled() -> bool:
    """Whether a profiler records this thread's operators, but not all threads'."""
    return profiler_is_on() and torch._C._autograd._profiler_enabled()


class OperatorMode(TorchDispatchMode):
    """A dispatch mode of this thread; in its body nothing is compiled, in any thread.

    torch's own modes set a flag of the process instead: a frame that another thread
    compiles meanwhile would never be compiled again, and where the bodies of two
    threads overlap, the flag would stay set after both.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._uncompiled = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._uncompiled.enter_context(uncompiled())
        _push_mode(self)
        return self

    def __exit__(self, *_: object) -> None:
        _pop_mode(None)
        self._uncompiled.close()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # so that torch does not import its compiler for the mode


def below_autocast() -> contextlib.AbstractContextManager[Any]:
    """In the body, operators of this thread are not cast, whatever autocast says."""
    return torch._C._DisableAutocast()
