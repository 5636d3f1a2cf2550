"""Replicas of compiled modules run compiled, and share the compiled code.

Each replica has its own compiled call, and all replicas of a class share one code
object: torch stores compiled graphs per code object, so each size and kind of device is
compiled once.

torch.compile is not thread-safe (https://github.com/pytorch/pytorch/issues/118260), and
replicas that see a new size at the same time would each compile it. So a replica that
calls its module with arguments of a new kind has a lock until its sub-step ends,
backward pass included. In a call of the engine or of the pair, it has the lock until
its forward pass ends; the thread of the backward pass has it until that pass ends.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.threads.caller_context import autocast_types
from scatterpar.threads.generators import current_generator
from scatterpar.torch_private.autograd import at_end_of_pass
from scatterpar.torch_private.compiler import (
    INDUCTOR_GRAPHS,
    CompileFn,
    inductor_records_graphs,
    is_compiling,
    is_uncompiled,
    many_graphs,
    records_cuda_graphs,
)

_CUDA_GRAPHS = (
    "CUDA graphs, which were never tried with replicas in threads; use "
    'mode="default", mode="max-autotune-no-cudagraphs" or another backend'
)
_COMPILER_PATIENCE_SECONDS = 10.0  # wait for a replica that neither compiles nor ends
# In the backward pass of a call, where the thread of another GPU has the lock until the
# whole pass ends. Torch lowers one backward graph at a time by itself.
_PATIENCE_IN_BACKWARD_SECONDS = 0.2


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
        """The compiled call of a replica.

        ``compile_fn`` compiles as the user compiled ``module``. Raises ``ValueError``
        if it would record CUDA graphs.
        """
        kind = type(module)
        records_graphs = records_cuda_graphs(compile_fn)
        # On the CPU torch's compiler records none, whatever the mode.
        if records_graphs and torch.accelerator.is_available():
            raise ValueError(f"{kind.__name__} was compiled with {_CUDA_GRAPHS}")

        def run(module: Any, *args: Any, **kwargs: Any) -> Any:
            return module._call_impl(*args, **kwargs)

        # torch stores compiled graphs per code object. One per engine, because graphs
        # of another engine would count towards torch's limit.
        run.__code__ = self._code.setdefault(kind, run.__code__.replace())
        compiled = partial(compile_fn(run), replica)

        def call(*args: Any, **kwargs: Any) -> Any:
            # Part of a larger graph, or a check that runs nothing compiled.
            if torch.compiler.is_dynamo_compiling() or is_uncompiled():
                return compiled(*args, **kwargs)
            key = id(replica), _code_key((args, kwargs))
            if key in self._known:
                return compiled(*args, **kwargs)
            # With the lock, which a backward pass through the result has, too.
            thread = threading.get_ident()
            self._acquire(thread, _COMPILER_PATIENCE_SECONDS)
            with many_graphs(), drawing_from_default():
                output = compiled(*args, **kwargs)
            for tensor in nested.tensors(output):
                if tensor.requires_grad:  # torch compiles backward passes when they run
                    tensor.register_hook(partial(self._enter_backward, thread))
            self._known.add(key)
            return output

        return call

    def forget(self) -> None:
        """Forget what is compiled, because modules have changed."""
        self._known.clear()

    def release(self) -> None:
        """Let others compile: the sub-step of this thread's replica has ended."""
        self._release(threading.get_ident())

    def _enter_backward(self, thread_of_forward: int, _: Tensor) -> None:
        """Have the lock; after a call, of which nothing else ends, until the pass ends.

        In a sub-step the thread of the forward pass still has it.
        """
        if self._owner != thread_of_forward:
            thread = threading.get_ident()
            self._acquire(thread, _PATIENCE_IN_BACKWARD_SECONDS)
            at_end_of_pass(partial(self._release, thread))

    def _release(self, thread: int) -> None:
        if self._owner == thread:
            self._owner = None
            self._lock.release()

    def _acquire(self, thread: int, patience: float) -> None:
        while self._owner != thread:
            if self._lock.acquire(timeout=patience):
                self._owner = thread
            elif not is_compiling():
                return  # without it, because its owner waits for this replica


@contextlib.contextmanager
def drawing_from_default() -> Iterator[None]:
    """In the body, the process's own generator continues that of this thread's replica.

    torch.compile ignores the kernels in the call in which it compiles, and restores the
    generator that ``torch.get_rng_state`` shows. One thread at a time may be in such a
    body.
    """
    generator = current_generator()
    if generator is None:  # outside of a step
        yield
        return
    default = torch.default_generator
    before = default.get_state()
    try:
        with generator.installed(default):
            yield
    finally:
        default.set_state(before)


def _code_key(arguments: Any) -> Hashable:
    """A key that is equal for two calls if the same compiled code accepts both."""
    kinds: list[Any] = [torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
    kinds.append(tuple(autocast_types()))
    for atom in nested.atoms(arguments):
        kinds.append(type(atom))
        # torch compiles plain values into the code, as constants.
        if isinstance(atom, (bool, int, float, str)):
            kinds.append(atom)
        if isinstance(atom, Tensor):
            kinds.append((atom.shape, atom.dtype, atom.device, atom.requires_grad))
    return tuple(kinds)


def compile_fn_from(compile: bool | Mapping[str, Any]) -> CompileFn | None:
    """The compile function for the option ``compile=``, which is checked; ``None`` if
    it is off.
    """
    if compile is False:
        return None
    if compile is True:
        compile = {}
    if not isinstance(compile, Mapping):
        raise TypeError(
            "compile must be True, False or a dict of torch.compile's keywords, got "
            f"{compile!r}"
        )
    is_asked = (compile.get("options") or {}).get("triton.cudagraphs", False)
    is_by_mode = compile.get("mode") in ("reduce-overhead", "max-autotune")
    with_graphs = is_by_mode or compile.get("backend") == "cudagraphs"
    if is_asked or (with_graphs and torch.accelerator.is_available()):
        raise ValueError(f"compile={dict(compile)!r} uses {_CUDA_GRAPHS}")
    is_left_open = "triton.cudagraphs" not in (compile.get("options") or {})
    by_inductor = compile.get("backend", "inductor") == "inductor"
    is_on = is_left_open and by_inductor and inductor_records_graphs()
    if is_on and torch.accelerator.is_available():
        raise ValueError(
            f"{INDUCTOR_GRAPHS} is on, so that compile= uses CUDA graphs, which were "
            "never tried with replicas in threads; switch this setting off, or pass "
            'compile={"options": {"triton.cudagraphs": False}}'
        )
    return partial(torch.compile, **compile)
