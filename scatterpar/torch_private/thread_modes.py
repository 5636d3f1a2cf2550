"""Modes, transforms and profilers that watch the operators of this thread."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from scatterpar.torch_private.entry_points import find

dispatch_modes = find(
    "torch.utils._python_dispatch", "_get_current_dispatch_mode_stack"
)
_function_modes = find("torch.overrides", "_get_current_function_mode_stack")

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
        if not kind.__module__.startswith(("torch.utils._device", "scatterpar.")):
            names.append(kind.__name__)
    return names


def is_transformed() -> bool:
    """Whether a transform of ``torch.func`` calls this thread's code."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def profiler_is_on() -> bool:
    """Whether a profiler of torch is on in any thread."""
    return bool(_PROFILER._is_profiler_enabled)


def is_profiled() -> bool:
    """Whether a profiler records this thread's operators, but not all threads'."""
    return profiler_is_on() and torch._C._autograd._profiler_enabled()


class OperatorMode(TorchDispatchMode):
    """A dispatch mode for code that is not compiled.

    torch does not import its compiler for it.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def below_autocast() -> contextlib.AbstractContextManager[Any]:
    """In the body, operators of this thread are not cast, whatever autocast says."""
    return torch._C._DisableAutocast()
