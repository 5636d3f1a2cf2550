"""Replicas of compiled modules run compiled: one piece of compiled code for all of them.

``torch.compile(model)`` and ``model.compile()`` hold code that calls the one module that they were
made for. A replica needs a compiled call of its own. All replicas of a class of modules share
one code object, and torch keeps compiled graphs by code object: so each size and kind of device is
compiled once, not once a replica.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from scatterpar import torch_private

CompileFn = Callable[
    [Callable[..., Any]], Callable[..., Any]
]  # compiles a function, as torch.compile

_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")


class Compiler:
    """Makes the compiled calls of replicas: all compile by ``how``, or what the user compiled."""

    def __init__(self, how: CompileFn | None = None) -> None:
        self._how = how
        self._code: dict[type, types.CodeType] = {}
        self.is_used = False

    def compiled_call(
        self, module: nn.Module, replica: nn.Module, is_root: bool, how: CompileFn | None = None
    ) -> Callable[..., Any] | None:
        """The compiled call of a replica; ``None`` where it is not to be compiled.

        ``how`` is that of the user's own compiled module; ``is_root``: all of it is to be compiled.
        """
        own = module._compiled_call_impl
        if own is not None:
            how = torch_private.compile_fn_of(own)
        elif how is None and is_root:
            how = self._how
        if how is None:
            return None
        if torch_private.records_cuda_graphs(how) and torch.accelerator.is_available():
            _refuse_cuda_graphs(f"{type(module).__name__} was compiled with")
        self.is_used = True
        return partial(how(self._function_for(type(module))), replica)

    def _function_for(self, kind: type) -> Callable[..., Any]:
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            return module._call_impl(*args, **kwargs)

        # A code object of its own: another engine's graphs neither fit nor count here.
        call.__code__ = self._code.setdefault(kind, call.__code__.replace())
        return call


def compile_fn_from(compile: bool | Mapping[str, Any] | None) -> CompileFn | None:
    """What ``compile=`` asks for: a function that compiles as ``torch.compile`` does.

    Raises:
        TypeError: not a bool, nor a mapping of torch.compile's keywords.
        ValueError: a mode with CUDA graphs.
    """
    if compile is None or compile is False:
        return None
    if compile is True:
        return torch.compile
    if not isinstance(compile, Mapping):
        raise TypeError(
            f"compile must be True, False or a dict of torch.compile's keywords, got {compile!r}"
        )
    mode = compile.get("mode")
    graphs = (compile.get("options") or {}).get("triton.cudagraphs", False)
    if graphs or (mode in _CUDA_GRAPHS and torch.accelerator.is_available()):
        _refuse_cuda_graphs(f"compile={dict(compile)!r} asks for")
    return partial(torch.compile, **compile)


def _refuse_cuda_graphs(what: str) -> NoReturn:
    raise ValueError(
        f"{what} CUDA graphs, which replicas in threads have not been tried with; use "
        f'mode="default" or mode="max-autotune-no-cudagraphs"'
    )


def unwrapped(module: Any) -> tuple[Any, CompileFn | None]:
    """The module that ``torch.compile`` was given, and how it compiles; others as they are."""
    if torch_private.is_compiled_module(module):
        return module._orig_mod, module.dynamo_ctx
    return module, None
