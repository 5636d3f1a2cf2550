"""Replicas of compiled modules run compiled, and share the compiled code.

``torch.compile(model)`` and ``model.compile()`` compile calls of one module object, so each replica
needs its own compiled call. All replicas of a class share one code object. torch stores compiled
graphs per code object, so each size and kind of device is compiled once, not once per replica.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from scatterpar import torch_private

CompileFn = Callable[[Callable[..., Any]], Callable[..., Any]]  # such as torch.compile

_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")


class Compiler:
    """Makes the compiled calls of replicas. With ``compile_fn`` all of the module is compiled."""

    def __init__(self, compile_fn: CompileFn | None = None) -> None:
        self._compile_fn = compile_fn
        self._code: dict[type, types.CodeType] = {}
        self.is_used = False

    def compiled_call(
        self,
        module: nn.Module,
        replica: nn.Module,
        is_root: bool,
        compile_fn: CompileFn | None = None,
    ) -> Callable[..., Any] | None:
        """The compiled call of a replica; ``None`` if it runs uncompiled.

        ``compile_fn`` compiles as the user compiled this module. ``is_root``: ``module`` is the
        whole model or criterion.
        """
        compiled = module._compiled_call_impl
        if compiled is not None:
            compile_fn = torch_private.compile_fn_of(compiled)
        elif compile_fn is None and is_root:
            compile_fn = self._compile_fn
        if compile_fn is None:
            return None
        if torch_private.records_cuda_graphs(compile_fn) and torch.accelerator.is_available():
            _refuse_cuda_graphs(f"{type(module).__name__} was compiled with")
        self.is_used = True
        return partial(compile_fn(self._function_for(type(module))), replica)

    def _function_for(self, kind: type) -> Callable[..., Any]:
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            return module._call_impl(*args, **kwargs)

        # A code object per engine: graphs of another engine would count towards torch's limit.
        call.__code__ = self._code.setdefault(kind, call.__code__.replace())
        return call


def compile_fn_from(compile: bool | Mapping[str, Any] | None) -> CompileFn | None:
    """The compile function for the option ``compile=``, which is checked; ``None`` if it is off."""
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
    """The original and the compile function of a compiled module; otherwise itself and ``None``."""
    if torch_private.is_compiled_module(module):
        return module._orig_mod, module.dynamo_ctx
    return module, None
