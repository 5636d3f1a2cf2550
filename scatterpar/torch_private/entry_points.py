"""Check at import that this version of torch has each private entry point."""

from __future__ import annotations

import contextlib
import importlib
from operator import attrgetter
from typing import Any

import torch


class Missing(RuntimeError):
    """The version of torch lacks a private entry point that the package needs."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"torch {torch.__version__} has no {name}, which scatterpar needs; install "
            "a version of torch that the README names"
        )


def find(module: str, path: str) -> Any:
    """Returns ``path`` of a module of torch, which it imports. Raises ``Missing``."""
    with contextlib.suppress(ImportError, AttributeError):
        return attrgetter(path)(importlib.import_module(module))
    raise Missing(f"{module}.{path}")


_REQUIRED = """
    _foreach_add_ _foreach_copy_ _foreach_mul _foreach_mul_ _foreach_sub _foreach_zero_
    Tensor._version Tensor._use_count
    nn.utils.parametrize._cache nn.utils.parametrize._maybe_set
    Tensor._backward_hooks Tensor._post_accumulate_grad_hooks
    nn.Module._replicate_for_data_parallel optim.Optimizer.profile_hook_step
    _C._autograd._top_saved_tensors_default_hooks _C._current_graph_task_id
    autograd.graph._engine_run_backward
    autograd.profiler._is_profiler_enabled _C._autograd._profiler_enabled
    _ops._higher_order_ops _ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS
    _C._functorch.peek_interpreter_stack
    _C._jit_get_all_schemas _C._dispatch_key_parse _C.DispatchKeySet
    _C._IncludeDispatchKeyGuard _C._ExcludeDispatchKeyGuard _C._ForceDispatchKeyGuard
    _C._dispatch_tls_local_include_set _C._dispatch_tls_local_exclude_set
"""
for _name in _REQUIRED.split():
    find("torch", _name)
