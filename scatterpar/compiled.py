"""Replicas of compiled modules run compiled, and share the compiled code.

``torch.compile(model)`` and ``model.compile()`` compile calls of one module object, so each replica
needs its own compiled call. All replicas of a class share one code object. torch stores compiled
graphs per code object, so each size and kind of device is compiled once, not once per replica.

torch.compile is not thread-safe (https://github.com/pytorch/pytorch/issues/118260), and replicas
that see a new size at the same time would each compile it. So a replica that calls its module with
arguments of a new kind has a lock until its sub-step ends, backward pass included.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from scatterpar import torch_private
from scatterpar.batch import nested
from scatterpar.threads.caller_context import autocast_types
from scatterpar.threads.generators import drawing_from_default
from scatterpar.torch_private import CompileFn

_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
_PATIENCE_SECONDS = 10.0  # wait for a replica that neither compiles nor ends


class Compiler:
    """Makes the compiled calls of replicas, and lets one replica at a time compile."""

    def __init__(self) -> None:
        self._code: dict[type, types.CodeType] = {}
        self._known: set[Hashable] = set()  # kinds of calls that have run compiled
        self._lock = threading.Lock()
        self._owner: int | None = None  # the thread of the replica that has the lock

    def compiled_call(
        self, module: nn.Module, replica: nn.Module, compile_fn: CompileFn
    ) -> Callable[..., Any]:
        """The compiled call of a replica; ``compile_fn`` compiles as the user compiled ``module``.

        Raises ``ValueError`` if it would record CUDA graphs.
        """
        kind = type(module)
        if torch_private.records_cuda_graphs(compile_fn) and torch.accelerator.is_available():
            _refuse_cuda_graphs(f"{kind.__name__} was compiled with")
        compiled = partial(compile_fn(self._function_for(kind)), replica)

        def call(*args: Any, **kwargs: Any) -> Any:
            # Part of a larger graph, or a check that runs nothing compiled.
            if not (torch.compiler.is_dynamo_compiling() or torch_private.is_uncompiled()):
                key = id(replica), _kind_of((args, kwargs))
                if key not in self._known:
                    return self._first_call(key, partial(compiled, *args, **kwargs))
            return compiled(*args, **kwargs)

        return call

    def forget(self) -> None:
        """The modules changed: calls may compile again."""
        self._known.clear()

    def release(self) -> None:
        """The sub-step of this thread's replica has ended: others may compile."""
        if self._owner == threading.get_ident():
            self._owner = None
            self._lock.release()

    def _first_call(self, key: Hashable, compiled: Callable[[], Any]) -> Any:
        """Call with the lock. A backward pass through the result has it, too."""
        acquire = partial(self._acquire, threading.get_ident())
        acquire()
        with torch_private.many_graphs(), drawing_from_default():
            output = compiled()
        for tensor in nested.tensors(output):
            if tensor.requires_grad:  # torch compiles backward passes when they run
                tensor.register_hook(lambda _: acquire())
        self._known.add(key)
        return output

    def _acquire(self, thread: int) -> None:
        while self._owner != thread:
            if self._lock.acquire(timeout=_PATIENCE_SECONDS):
                self._owner = thread
            elif not torch_private.is_compiling():  # the owner waits for this replica
                return

    def _function_for(self, kind: type) -> Callable[..., Any]:
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            return module._call_impl(*args, **kwargs)

        # A code object per engine: graphs of another engine would count towards torch's limit.
        call.__code__ = self._code.setdefault(kind, call.__code__.replace())
        return call


def _kind_of(arguments: Any) -> Hashable:
    """A key that is equal for two calls if the same compiled code accepts both."""
    plain = bool, int, float, str
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), tuple(autocast_types())
    return modes, tuple(
        (leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else (leaf if isinstance(leaf, plain) else None, type(leaf))
        for leaf in nested.leaves(arguments)
    )


def compile_fn_from(compile: bool | Mapping[str, Any]) -> CompileFn | None:
    """The compile function for the option ``compile=``, which is checked; ``None`` if it is off."""
    if compile is False:
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
