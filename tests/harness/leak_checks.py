"""What a test must leave as it found it, and how to tell."""

import ctypes
import gc
import random
import signal
import sys
import sysconfig
import threading
import time

import pytest
import torch
from torch.fx import traceback as fx_traceback
from torch.nn.modules import module as module_globals

FAILED = pytest.StashKey[bool]()
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
_GRACE_SECONDS = 180.0  # a thread that ends by itself may be late on a busy machine
_KNOWN = ("InductorSubproc", "subproc_worker_timer", "tqdm_monitor")


def in_time(gone):
    """Whether ``gone()`` holds at once.

    In a free-threaded interpreter: before long, since there an object that another
    thread drops is freed when the thread that made it runs Python again.
    """
    deadline = time.monotonic() + (10.0 if FREE_THREADED else 0.0)
    while not gone() and time.monotonic() < deadline:
        time.sleep(0.01)
    return gone()


def count_tensors():
    """The number of tensors that the interpreter knows of."""
    return sum(isinstance(value, torch.Tensor) for value in gc.get_objects())


def threads():
    return {thread.ident for thread in threading.enumerate()}


def leaked_threads(before):
    """Names of threads that were not there before and that do not end by themselves."""
    deadline = time.monotonic() + _GRACE_SECONDS
    # What a test has made is young, and soon found. After that everything is searched.
    generation, pause = 1, 0.002
    while True:
        of_compiler = _threads_of_torchs_compiler()
        leaked = []
        for thread in threading.enumerate():
            if thread.ident not in before and thread not in of_compiler:
                leaked.append(thread.name)
        if not leaked or time.monotonic() > deadline:
            return leaked
        gc.collect(generation)
        time.sleep(pause)
        generation, pause = 2, 0.02


def _threads_of_torchs_compiler():
    """The pools that torch.compile makes once per process and never ends, tqdm's
    monitor, and threads of autograd.

    Known by what owns them, or by the names that torch gives those beside Triton's
    compiler, so that a pool of anybody else's is still a leak.
    """
    functools_of_torch = sys.modules.get("torch.utils._functools")
    pools = [getattr(functools_of_torch, "_prefetch_executor", None)]
    inductor = sys.modules.get("torch._inductor.async_compile")
    if inductor is not None and inductor.AsyncCompile.pool.cache_info().currsize:
        pools.append(inductor.AsyncCompile.pool())
    known = {thread for thread in threading.enumerate() if thread.name in _KNOWN}
    # Autograd's thread of a device, which never ends, once it has run Python code.
    of_autograd = threading._DummyThread
    known |= {t for t in threading.enumerate() if isinstance(t, of_autograd)}
    for pool in pools:
        if pool is not None:
            known |= pool._threads
    return known


def _stance():
    """With ``force_eager`` left behind, all that comes later runs eager in silence."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return "default" if frames is None else frames._stance.stance


def globals_of_torch():
    """What torch, or Python, keeps for the whole process or the calling thread."""
    return _settings() | _modes() | _hooks()


def _settings():
    return {
        "num_threads": torch.get_num_threads(),
        "num_interop_threads": torch.get_num_interop_threads(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "deterministic": torch.get_deterministic_debug_mode(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "torch.default_generator": id(torch.default_generator),
        "torch.random.default_generator": id(torch.random.default_generator),
    }


def _modes():
    autocast_kinds = ("cpu", "cuda")
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": [torch.is_autocast_enabled(kind) for kind in autocast_kinds],
        "autocast dtype": [torch.get_autocast_dtype(kind) for kind in autocast_kinds],
        "autocast cache": torch.is_autocast_cache_enabled(),
        "stance of torch.compile": _stance(),
        "metadata of graphs": dict(fx_traceback.get_current_meta()),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
    }


def _hooks():
    saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return {
        "saved tensor hooks": saved_tensor_hooks is None,
        "forward hooks": len(module_globals._global_forward_hooks),
        "forward pre-hooks": len(module_globals._global_forward_pre_hooks),
        "excepthook": sys.excepthook,
        "threading.excepthook": threading.excepthook,
        "SIGINT": signal.getsignal(signal.SIGINT),
    }


def random_states():
    """Those of the host's generators, and of all accelerators that are in use."""
    states = {"torch": _content(torch.default_generator.get_state())}
    for number in range(_accelerators()):
        states[f"accelerator {number}"] = _content(_backend().get_rng_state(number))
    return states | {"random": random.getstate()}


def put_back_random_states(before):
    torch.default_generator.set_state(_as_state(before["torch"]))
    random.setstate(before["random"])
    for number in range(_accelerators()):
        # Of a device that the test was the first to use nothing is known.
        if state := before.get(f"accelerator {number}"):
            _backend().set_rng_state(_as_state(state), number)


def _content(state):
    # Whatever mode was left on.
    return ctypes.string_at(state.data_ptr(), state.numel())


def _as_state(content):
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _backend():
    return torch.get_device_module(torch.accelerator.current_accelerator())


def _accelerators():
    """The number of accelerators. A test of the CPU alone initialises none."""
    if torch.accelerator.current_accelerator() is None:
        return 0
    return torch.accelerator.device_count() if _backend().is_initialized() else 0


def accelerators_in_use():
    """The arguments of ``torch.random.fork_rng`` for these."""
    numbers = [*range(_accelerators())]
    if not numbers:
        return {"devices": []}
    kind = torch.accelerator.current_accelerator().type
    return {"devices": numbers, "device_type": kind}


def differences(before, after):
    changed = {}
    for name, value in before.items():
        value_after = after[name]
        if value is not value_after and value != value_after:
            changed[name] = value, value_after
    return changed
