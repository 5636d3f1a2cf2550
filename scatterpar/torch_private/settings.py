"""Settings of the process that have no public getter or setter of their own, and
contexts that all threads share.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch


class ForAllThreads(contextlib.AbstractContextManager[None]):
    """A context that all threads share. ::

        thread 1   enters, and the context begins   ...   leaves
        thread 2                                     enters   ...   leaves, and it ends

    With a context per thread, each thread would restore what another one has set.

    Attributes:
        bodies: how many bodies run at present.
    """

    def __init__(
        self, make_context: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> None:
        self._make_context = make_context
        self._context = contextlib.ExitStack()
        self._lock = threading.Lock()
        self.bodies = 0

    def __enter__(self) -> None:
        with self._lock:
            if not self.bodies:
                self._context.enter_context(self._make_context())
            self.bodies += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.bodies -= 1
            if not self.bodies:
                self._context.close()


# How a setting is read and written.
Setting = tuple[Callable[[], Any], Callable[[Any], object]]


def _settings() -> Iterator[Setting]:
    """The settings that this version of torch has, of those that contexts change."""
    yield from PRECISION_SETTINGS
    yield from _settings_of_c(_SETTINGS_OF_C)
    for read, write in _settings_of_c(_PAIRS_OF_C):
        # They return two values, as one tuple, and are set by two arguments.
        yield read, partial(_call_with, write)
    for path in _SETTINGS_OF_MODULES.split():
        module, _, name = path.rpartition(".")
        owner: Any = sys.modules.get(module)
        if hasattr(owner, name):
            yield partial(getattr, owner, name), partial(setattr, owner, name)
    check = getattr(torch._C, "_check_sparse_tensor_invariants", None)
    if check is not None:
        yield check, torch._C._set_check_sparse_tensor_invariants


def _call_with(write: Callable[..., object], values: Sequence[Any]) -> None:
    write(*values)


def _settings_of_c(names: str) -> Iterator[Setting]:
    for name in names.split():
        getter = getattr(torch._C, f"_get_{name}", None)
        setter = getattr(torch._C, f"_set_{name}", None)
        if getter is not None and setter is not None:
            yield getter, setter


def _precision_settings() -> Iterator[Setting]:
    """How float32 numbers are rounded inside of operators."""
    # The older settings come first: each also writes some of the newer ones.
    yield from _settings_of_c(_OLD_PRECISIONS)
    for backend, operator in _FP32_PRECISIONS:
        with contextlib.suppress(AttributeError):
            read = partial(torch._C._get_fp32_precision_getter, backend, operator)
            write = partial(torch._C._set_fp32_precision_setter, backend, operator)
            yield read, write


_OLD_PRECISIONS = "float32_matmul_precision cudnn_allow_tf32 onednn_allow_tf32"
_SETTINGS_OF_C = """
    sdp_priority_order cudnn_enabled cudnn_benchmark cudnn_deterministic mkldnn_enabled
    mkldnn_deterministic nnpack_enabled deterministic_fill_uninitialized_memory
    qengine warnAlways cublas_allow_fp16_accumulation
    blas_preferred_backend linalg_preferred_backend
"""
# In which precision a product of half-precision matrices adds up.
_PAIRS_OF_C = """
    cublas_allow_fp16_reduced_precision_reduction
    cublas_allow_bf16_reduced_precision_reduction
"""
_SETTINGS_OF_MODULES = """
    torch._functorch.eager_transforms.JVP_NESTING
    torch.utils.checkpoint._enable_checkpoint_early_stop
    torch.utils.checkpoint._checkpoint_debug_enabled
    torch.__future__._overwrite_module_params_on_conversion
    torch.__future__._swap_module_params_on_conversion
"""
# Without the properties of ``torch.backends``: that of mkldnn writes all backends.
_FP32_PRECISIONS = (  # those that others inherit come first
    ("generic", "all"),
    ("cuda", "all"),
    ("mkldnn", "all"),
    ("cuda", "matmul"),
    ("cuda", "conv"),
    ("cuda", "rnn"),
    ("mkldnn", "matmul"),
    ("mkldnn", "conv"),
    ("mkldnn", "rnn"),
)
PRECISION_SETTINGS: tuple[Setting, ...] = tuple(_precision_settings())
SETTINGS: tuple[Setting, ...] = tuple(_settings())


def round_no_float32() -> None:
    """Let no operator round float32 numbers to a coarser format inside."""
    # The older settings: newer ones alone would make these unreadable.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    with contextlib.suppress(AttributeError):
        for operator in ("matmul", "conv", "rnn"):
            torch._C._set_fp32_precision_setter("mkldnn", operator, "ieee")


def frames_of_threads() -> dict[int, FrameType]:
    """The frame that each thread of Python runs, by the thread's ``ident``.

    Python documents it for debuggers, and has no other way to say where a thread hangs.
    """
    return sys._current_frames()
