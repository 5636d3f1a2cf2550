"""Random operators: a dispatch key that the workers alone switch on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, fallthrough_kernel

from scatterpar.torch_private.thread_modes import dispatch_modes

# What a generator is known by: an operator's dispatch makes other objects of Python.
id_of_generator: Callable[[torch.Generator], int] = attrgetter("_cdata")

# A mode key that torch does not use (c10/core/DispatchKey.h). A Python dispatch mode
# would do the same, but costs some microseconds for every operator. The key costs
# nothing for operators that draw no random numbers.
RANDOM_KEY = "TESTING_ONLY_GenericMode"
_DISPATCH_KEY: Any = None
with contextlib.suppress(RuntimeError):
    _DISPATCH_KEY = torch._C._dispatch_key_parse(RANDOM_KEY)
# If this version of torch has no such key, ``Generators`` does without.
HAS_RANDOM_KEY = _DISPATCH_KEY is not None

_Switch = Callable[[], contextlib.AbstractContextManager[Any]]
# In the body, random operators of this thread are sent to the registered kernels.
random_key_on: _Switch = contextlib.nullcontext
# In the body, the key is off in this thread: for the call inside a registered kernel.
random_key_off: _Switch = contextlib.nullcontext
if HAS_RANDOM_KEY:
    random_key_on = partial(torch._C._IncludeDispatchKeyGuard, _DISPATCH_KEY)
    random_key_off = partial(
        torch._C._ExcludeDispatchKeyGuard, torch._C.DispatchKeySet(_DISPATCH_KEY)
    )


def random_key_as_outside() -> contextlib.AbstractContextManager[Any]:
    """In the body, which is that of a dispatch mode, random operators are sent to the
    registered kernels if this thread has the key on.

    A mode's body excludes all keys that come before modes.
    """
    included = torch._C._dispatch_tls_local_include_set()
    if not HAS_RANDOM_KEY or not included.has(_DISPATCH_KEY):
        return contextlib.nullcontext()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    return torch._C._ForceDispatchKeyGuard(included, excluded.remove(_DISPATCH_KEY))


# Control flow traces its branches in every call, forward and backward, and torch's
# tracing is not thread-safe (https://github.com/pytorch/pytorch/issues/118260): two
# replicas at once break it permanently. So replicas in threads are refused these
# operators.
_TRACING = ("associative_scan", "cond", "map_impl", "scan", "while_loop")


def register_random_kernels(
    kernel_of: Callable[[Any, int], Callable[..., Any]],
    make_dual: Callable[..., Tensor],
) -> tuple[Library, ...]:
    """Replace random operators, in threads that have the key on.

    ``kernel_of(operator, position)`` makes the kernel. The operators are torch's that
    take a generator, as the argument at ``position``. ``make_dual`` is the kernel of
    the operator with which all forward-mode differentiation begins. All other operators
    fall through the key. So do higher-order operators such as ``torch.cond`` or a
    custom ``autograd.Function`` under ``vmap``, including those registered later.
    """
    fallback = Library("_", "IMPL")
    fallback.fallback(fallthrough_kernel, RANDOM_KEY)
    operators = Library("aten", "IMPL")
    for schema in torch._C._jit_get_all_schemas():
        # str() is one call of C++; reading each argument of 4,000 schemas would take 15
        # ms more.
        is_aten = schema.name.startswith("aten::")
        if not is_aten or "Generator? generator" not in str(schema):
            continue
        packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"), None)
        operator = getattr(packet, schema.overload_name or "default", None)
        if operator is None:  # only TorchScript has it
            continue
        names = [argument.name for argument in schema.arguments]
        kernel = kernel_of(operator, names.index("generator"))
        operators.impl(operator, kernel, RANDOM_KEY)
    operators.impl("_make_dual", make_dual, RANDOM_KEY)
    # The Python table of higher-order operators has no fallbacks. For those registered
    # later:
    torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(_DISPATCH_KEY)
    for name, operator in torch._ops._higher_order_ops.items():
        if name in _TRACING:
            operator.py_impl(_DISPATCH_KEY)(partial(_refuse_operator, operator))
        else:
            operator.fallthrough(_DISPATCH_KEY)
    return fallback, operators


def _refuse_operator(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse to run an operator that traces."""
    if dispatch_modes():  # torch.compile traces it, which has a lock
        with random_key_off():
            return operator(*args, **kwargs)
    raise RuntimeError(
        f"{operator.name()}: torch's operators for control flow trace their "
        "branches in every call, and torch cannot trace in several threads; use one "
        "replica, or compute all branches and choose with torch.where"
    )
