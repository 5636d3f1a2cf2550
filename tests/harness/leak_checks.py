"""What a test must leave as it found it, and how to tell."""

from __future__ import annotations

import ctypes
import gc
import random
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import traceback as fx_traceback
from torch.nn.modules import module as module_globals

FAILED = pytest.StashKey[bool]()
GRACE_SECONDS = 180.0  # a thread that ends by itself may be late on a busy machine
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
_AUTOCAST_TYPES = ("cpu", "cuda")
_KNOWN = ("InductorSubproc", "subproc_worker_timer", "tqdm_monitor")


def in_time(gone: Callable[[], bool]) -> bool:
    """Whether ``gone()`` holds at once.

    In a free-threaded interpreter: before long, since there an object that another thread drops
    is freed when the thread that made it runs Python again.
    """
    deadline = time.monotonic() + (10.0 if FREE_THREADED else 0.0)
    while not gone() and time.monotonic() < deadline:
        time.sleep(0.01)
    return gone()


def count_tensors() -> int:
    """How many tensors the interpreter knows of."""
    return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())


def threads() -> set[int | None]:
    return {thread.ident for thread in threading.enumerate()}


def leaked_threads(before: set[int | None]) -> list[str]:
    """Names of threads that were not there before and that do not end by themselves."""
    deadline = time.monotonic() + GRACE_SECONDS
    while leaked := [
        thread.name
        for thread in threading.enumerate()
        if thread.ident not in before and thread not in threads_of_torchs_compiler()
    ]:
        gc.collect()
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return leaked


def threads_of_torchs_compiler() -> set[threading.Thread | None]:
    """The pools that torch.compile makes once per process and never ends, and tqdm's monitor.

    Known by what owns them, or by the names that torch gives those beside Triton's compiler, so
    that a pool of anybody else's is still a leak.
    """
    pools = [getattr(sys.modules.get("torch.utils._functools"), "_prefetch_executor", None)]
    inductor = sys.modules.get("torch._inductor.async_compile")
    if inductor is not None and inductor.AsyncCompile.pool.cache_info().currsize:
        pools.append(inductor.AsyncCompile.pool())
    found: set[threading.Thread | None] = set()
    found.update(*(pool._threads for pool in pools if pool is not None))
    return found.union(t for t in threading.enumerate() if t.name in _KNOWN)


def globals_of_torch() -> dict[str, Any]:
    """What torch, or Python, keeps for the whole process or the calling thread."""
    return {
        "num_threads": torch.get_num_threads(),
        "num_interop_threads": torch.get_num_interop_threads(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast enabled": [torch.is_autocast_enabled(kind) for kind in _AUTOCAST_TYPES],
        "autocast dtype": [torch.get_autocast_dtype(kind) for kind in _AUTOCAST_TYPES],
        "autocast cache": torch.is_autocast_cache_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "deterministic warnings": torch.is_deterministic_algorithms_warn_only_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "stance of torch.compile": _stance(),
        "metadata of graphs": dict(fx_traceback.get_current_meta()),
        "saved tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True) is None,
        "torch.default_generator": id(torch.default_generator),
        "torch.random.default_generator": id(torch.random.default_generator),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "global module hooks": [
            len(getattr(module_globals, name))
            for name in ("_global_forward_hooks", "_global_forward_pre_hooks")
        ],
        "excepthook": sys.excepthook,
        "threading.excepthook": threading.excepthook,
        "SIGINT": signal.getsignal(signal.SIGINT),
    }


def put_back(before: dict[str, Any]) -> None:
    """Undo what can be undone, so that one test's fault is not its neighbour's."""
    torch.set_num_threads(before["num_threads"])
    torch.set_default_dtype(before["default dtype"])
    torch.set_default_device(None if before["default device"].type == "cpu" else "meta")
    torch.set_grad_enabled(before["grad mode"])
    torch.set_autocast_enabled("cpu", before["autocast enabled"][0])
    torch.set_autocast_dtype("cpu", before["autocast dtype"][0])
    torch.set_autocast_cache_enabled(before["autocast cache"])
    torch.use_deterministic_algorithms(
        before["deterministic"], warn_only=before["deterministic warnings"]
    )
    torch.random.default_generator = torch.default_generator
    if _stance() != before["stance of torch.compile"]:
        torch.compiler.set_stance(before["stance of torch.compile"])
    signal.signal(signal.SIGINT, before["SIGINT"])


def _stance() -> str:
    """With ``force_eager`` left behind, all that comes later runs eager in silence."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return "default" if frames is None else frames._stance.stance


def random_states() -> dict[str, Any]:
    state = torch.default_generator.get_state()
    content = ctypes.string_at(state.data_ptr(), state.numel())  # whatever mode was left on
    return {"torch": content, "random": random.getstate()}


def put_back_random_states(before: dict[str, Any]) -> None:
    state = torch.frombuffer(bytearray(before["torch"]), dtype=torch.uint8)
    torch.default_generator.set_state(state)
    random.setstate(before["random"])


def differences(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {
        name: (value, after[name])
        for name, value in before.items()
        if value is not after[name] and value != after[name]
    }
