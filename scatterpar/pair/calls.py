"""One call per replica, with the random numbers of each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import nn

from scatterpar.plan import Plan, Share
from scatterpar.step.task import noted
from scatterpar.threads.attempt import Attempt
from scatterpar.threads.workers import Workers
from scatterpar.torch_private import is_compiled_module

__all__ = ["NOTHING", "require_eager", "run_each"]


def require_eager(module: Any) -> None:
    """Refuse compiled modules: a copy is made for every call, and would run without compiling.

    Raises:
        TypeError: ``module``, or a part of it, was compiled.
    """
    if not isinstance(module, nn.Module):
        return
    for name, child in module.named_modules():
        if is_compiled_module(child) or child._compiled_call_impl is not None:
            which = f"the child {name!r}" if name else "the module"
            raise TypeError(
                f"{which} was compiled, and the pair runs its copies as they are written; pass "
                f"the original (._orig_mod), or train with ScatterOnceParallel, which compiles its "
                f"replicas"
            )


NOTHING: contextlib.AbstractContextManager[object] = contextlib.nullcontext()


class _Call(NamedTuple):
    """What one replica is given to do."""

    share: Share
    function: Callable[..., Any]
    inputs: tuple[tuple[Any, ...], dict[str, Any]]


def run_each(
    workers: Workers,
    plan: Plan,
    functions: Sequence[Callable[..., Any]],
    calls: Sequence[Any],
    around: contextlib.AbstractContextManager[object] = NOTHING,
) -> list[Any]:
    """Call each share's function on its device, all at once; what is raised names the replica.

    What ``around`` raises at its end ends the call likewise, without a trace.
    """

    def apply(call: _Call, *, proceed: Callable[[], None]) -> Any:
        args, kwargs = call.inputs
        with noted(call.share):
            return call.function(*args, **kwargs)

    tasks = [_Call(*parts) for parts in zip(plan.shares, functions, calls, strict=True)]
    with Attempt(workers, [share.device for share in plan.shares]) as attempt, around:
        results = attempt.run(apply, tasks)
    attempt.streams.commit()
    return results
