"""torch's compiler: no public way compiles another function in the same way."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch

from scatterpar.torch_private.entry_points import Missing, find
from scatterpar.torch_private.settings import ForAllThreads

# Begins the names of attributes that the compiler gives to a user's objects.
PREFIX_OF_COMPILER = "_dynamo"


def import_compiler() -> None:
    """Import torch's compiler, which DDP imports at its first use, in seconds.

    The import sets a variable and makes an empty folder for the compiler's cache. Both
    are removed: torch sets and makes them again when it stores something.
    """
    name = "TORCHINDUCTOR_CACHE_DIR"
    is_users = name in os.environ
    importlib.import_module("torch._dynamo")
    if not is_users and name in os.environ:
        folder = os.environ.pop(name)
        with contextlib.suppress(OSError):  # it is not empty
            os.rmdir(folder)


_DYNAMO = "torch._dynamo.eval_frame"
CompileFn = Callable[[Callable[..., Any]], Callable[..., Any]]  # such as torch.compile


def is_compiled_module(value: Any) -> bool:
    """Whether ``value`` is a module that ``torch.compile`` returned."""
    if _DYNAMO not in sys.modules:  # importing it takes a second
        return False
    return isinstance(value, _optimized_module())


@functools.cache  # lending asks for each module of each call
def _optimized_module() -> Any:
    return find("torch._dynamo", "OptimizedModule")


def unwrapped(module: Any) -> tuple[Any, CompileFn | None]:
    """The original and the compile function of a compiled module.

    Of any other module itself and ``None``.
    """
    if is_compiled_module(module):
        return module._orig_mod, module.dynamo_ctx
    return module, None


def compile_fn_of(function: Callable[..., Any]) -> CompileFn:
    """The function that compiled ``function``.

    It compiles another function with the same options.
    """
    closure = inspect.getclosurevars(function).nonlocals
    compile_fn: CompileFn | None = closure.get("self")
    if compile_fn is None:
        raise Missing("context in compiled functions")
    return compile_fn


def records_cuda_graphs(compile_fn: Callable[..., Any]) -> bool:
    """Whether a function as from ``compile_fn_of`` records CUDA graphs on a GPU.

    Inductor does so by its option; torch's backend "cudagraphs" always does.
    """
    config: Any = getattr(compile_fn, "compiler_config", None)
    if isinstance(config, dict):
        return bool(config.get("triton.cudagraphs"))
    backend: Any = getattr(compile_fn, "callback", None)
    while hasattr(backend, "_torchdynamo_orig_backend"):  # torch wraps it twice
        backend = backend._torchdynamo_orig_backend
    return getattr(backend, "compiler_name", None) == "cudagraphs"


# The setting that a user may have switched on, as an error names it.
INDUCTOR_GRAPHS = "torch._inductor.config.triton.cudagraphs"


def inductor_records_graphs() -> bool:
    """Whether torch's compiler records CUDA graphs unless a call says otherwise."""
    config = sys.modules.get("torch._inductor.config")
    if config is None:  # it reads this variable when it is imported
        return os.environ.get("TORCHINDUCTOR_CUDAGRAPHS") == "1"
    return bool(config.triton.cudagraphs)


def many_graphs() -> contextlib.AbstractContextManager[Any]:
    """In the body, torch.compile keeps up to 64 graphs of a function.

    All replicas share the function, so its graphs are those of all of them.
    """
    config = find("torch._dynamo", "config")
    patch: contextlib.AbstractContextManager[Any] = config.patch(
        recompile_limit=max(64, config.recompile_limit),
        accumulated_recompile_limit=max(256, config.accumulated_recompile_limit),
    )
    return patch


def is_compiling() -> bool:
    """Whether another thread is compiling at this moment."""
    lock = find("torch._dynamo.convert_frame", "compile_lock")
    is_free = bool(lock.acquire(blocking=False))
    if is_free:
        lock.release()
    return not is_free


_eager = ForAllThreads(lambda: torch.compiler.set_stance("force_eager"))


def is_uncompiled() -> bool:
    """Whether a body of ``uncompiled`` runs, in any thread."""
    return bool(_eager.bodies)


P = ParamSpec("P")
R = TypeVar("R")


def never_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` runs as it is, also if ``torch.compile`` traces its caller.

    As ``torch.compiler.disable``, which would import torch's compiler.
    """
    disabled: list[Callable[P, R]] = []

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if _DYNAMO not in sys.modules:
            return function(*args, **kwargs)
        # A list, because torch's compiler warns of a cache of ``functools``.
        if not disabled:
            disabled.append(importlib.import_module("torch._dynamo").disable(function))
        return disabled[0](*args, **kwargs)

    vars(called)["_torchdynamo_disable"] = True
    return called


def uncompiled() -> contextlib.AbstractContextManager[None]:
    """In the body nothing is compiled or runs compiled, in any thread."""
    return _eager if _DYNAMO in sys.modules else contextlib.nullcontext()


class CompiledCalls:
    """Calls of compiled functions by the threads of bodies of ``watched``.

    In a body of ``uncompiled`` they run as plain Python, and nothing else shows that.
    """

    def __init__(self) -> None:
        self._thread = threading.local()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """In the body, ``were_made`` knows of this thread's calls."""
        self._thread.were_made = False
        if _DYNAMO not in sys.modules:  # nothing can be compiled
            yield
            return
        with self._noted_in_all_threads:
            yield

    def were_made(self) -> bool:
        """Whether this thread has called a compiled function in its latest body."""
        return bool(self._thread.were_made)

    @functools.cached_property
    def _noted_in_all_threads(self) -> ForAllThreads:
        return ForAllThreads(self._noted)

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        # Each compiled function asks it what to do, whatever the stance is.
        callback_of = find(_DYNAMO, "_callback_from_stance")

        def noted_callback_of(callback: Any) -> Any:
            if callback is not None and callback is not False:
                self._thread.were_made = True
            return callback_of(callback)

        module: Any = sys.modules[_DYNAMO]
        module._callback_from_stance = noted_callback_of
        try:
            yield
        finally:
            module._callback_from_stance = callback_of


compiled_calls = CompiledCalls()
