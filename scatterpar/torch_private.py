"""Every private entry point of torch that the package uses.

No other file of the package names ``torch._C`` or another private module of torch. If a
version of torch lacks an entry point, ``Missing`` names it, at import or at its first
use. The versions that the tests ran with are in ``constraints.txt``.

Other files call ``torch._foreach_*``, ``Tensor._version`` and
``Module._replicate_for_data_parallel`` directly: torch's own optimizers and
``nn.DataParallel`` use them too. This file checks that they exist.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge
from torch.library import Library, fallthrough_kernel
from torch.nn.utils import parametrize
from torch.optim import Optimizer
from torch.overrides import has_torch_function
from torch.utils._python_dispatch import TorchDispatchMode

from scatterpar.libraries import package_of


class Missing(RuntimeError):
    """The version of torch lacks a private entry point that the package needs."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"torch {torch.__version__} has no {name}, which scatterpar needs; install "
            "a version of torch that the README names"
        )


def _find(module: str, path: str) -> Any:
    """Returns ``path`` of a module of torch, which it imports. Raises ``Missing``."""
    with contextlib.suppress(ImportError, AttributeError):
        return attrgetter(path)(importlib.import_module(module))
    raise Missing(f"{module}.{path}")


_NAMES = """
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
for _name in _NAMES.split():
    _find("torch", _name)
_dispatch_modes = _find(
    "torch.utils._python_dispatch", "_get_current_dispatch_mode_stack"
)
_function_modes = _find("torch.overrides", "_get_current_function_mode_stack")
_preserve_version_counters = _find("torch.autograd", "_unsafe_preserve_version_counter")
# Dense tensors as one 1-D tensor, and its parts with the shapes of given tensors. In
# C++, for DDP.
flatten: Callable[[Sequence[Tensor]], Tensor] = _find(
    "torch._utils", "_flatten_dense_tensors"
)
unflatten: Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, ...]]
unflatten = _find("torch._utils", "_unflatten_dense_tensors")


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


@contextlib.contextmanager
def version_counters_kept(tensors: Sequence[Tensor]) -> Iterator[None]:
    """In the body, writes to ``tensors`` are not counted.

    The body leaves the values as they were: a graph that has saved them stays valid,
    and a changed counter would refuse its backward pass.
    """
    with _preserve_version_counters(tuple(tensors)):
        yield


# --- parametrizations ---


@ForAllThreads
@contextlib.contextmanager
def parametrized_in_threads() -> Iterator[None]:
    """In the body, modules may be parametrized in forward passes of several threads.

    PEFT does so for parameters of fused experts. Two things would be wrong:

    - ``parametrize.cached()`` clears its cache when all threads have left it. While
      others are inside, a replica's weights would stay, with the last sub-step's graph.
    - a parameter is set to the memory that it has. That counts as a write of it, and a
      forward pass must not write parameters.
    """
    names = vars(parametrize)
    cached = names["cached"]
    set_to = names["_maybe_set"]

    @contextlib.contextmanager
    def cached_and_cleared() -> Iterator[None]:
        with cached():
            try:
                yield
            finally:
                names["_cache"].clear()

    def set_if_elsewhere(tensor: Tensor, source: Tensor) -> None:
        if not tensor.is_set_to(source):
            set_to(tensor, source)

    names |= {"cached": cached_and_cleared, "_maybe_set": set_if_elsewhere}
    try:
        yield
    finally:
        names |= {"cached": cached, "_maybe_set": set_to}


# --- settings of the process that have no public getter or setter of their own ---

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


# --- an optimizer within another: the outer one runs the hooks, once ---


def step_without_hooks(optimizer: Optimizer, *args: Any) -> Any:
    """Run ``optimizer.step(*args)`` without hooks and the profiler's annotation."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):  # torch has replaced it by ``profile_hook_step``
        step = step.__wrapped__
    return step(optimizer, *args)


_HOOKS_OF_ALL_OPTIMIZERS: tuple[dict[int, Any], ...] = (
    _find("torch.optim.optimizer", "_global_optimizer_pre_hooks"),
    _find("torch.optim.optimizer", "_global_optimizer_post_hooks"),
)


@contextlib.contextmanager
def optimizer_hooks_off() -> Iterator[None]:
    """In the body, no hook that is registered for all optimizers runs."""
    saved = [dict(hooks) for hooks in _HOOKS_OF_ALL_OPTIMIZERS]
    try:
        for hooks in _HOOKS_OF_ALL_OPTIMIZERS:
            hooks.clear()
        yield
    finally:
        for hooks, earlier in zip(_HOOKS_OF_ALL_OPTIMIZERS, saved, strict=True):
            hooks.update(earlier)


def saving_hooks(optimizer: Optimizer) -> list[list[Callable[..., Any]]]:
    """The hooks that run before and after ``optimizer.state_dict``."""
    hooks: Any = optimizer
    before = list(hooks._optimizer_state_dict_pre_hooks.values())
    after = list(hooks._optimizer_state_dict_post_hooks.values())
    return [before, after]


def loading_hooks(optimizer: Optimizer) -> list[list[Callable[..., Any]]]:
    """The hooks that run before and after ``optimizer.load_state_dict``."""
    hooks: Any = optimizer
    before = list(hooks._optimizer_load_state_dict_pre_hooks.values())
    after = list(hooks._optimizer_load_state_dict_post_hooks.values())
    return [before, after]


# --- a training step that is only looked at ---


# Gets the parameters whose gradients are limited.
Clip = Callable[[list[Tensor]], None]
_clips: list[Clip] = []  # the last one is called in the place of torch's functions


@contextlib.contextmanager
def clipping_replaced(clip: Clip) -> Iterator[None]:
    """In the body, torch's functions that clip gradients call ``clip`` in their place.

    Their code is exchanged, not a name in a module: others may have imported them by
    name.
    """
    name = "torch.nn.utils.clip_grad"
    exchanged = (
        (inspect.unwrap(_find(name, "_clip_grads_with_norm_")), _by_norm),
        (inspect.unwrap(_find(name, "clip_grad_value_")), _by_value),
    )
    codes = [function.__code__ for function, _ in exchanged]
    _clips.append(clip)
    try:
        for function, replacement in exchanged:
            function.__code__ = replacement.__code__
        yield
    finally:
        for (function, _), code in zip(exchanged, codes, strict=True):
            function.__code__ = code
        _clips.pop()


def _by_norm(
    parameters: Any, max_norm: Any, total_norm: Any, foreach: Any = None
) -> None:
    """Runs with the globals of ``torch.nn.utils.clip_grad``."""
    import sys

    sys.modules["scatterpar.torch_private"].clip_to(parameters, max_norm)


def _by_value(parameters: Any, clip_value: Any, foreach: Any = None) -> None:
    """Runs with the globals of ``torch.nn.utils.clip_grad``."""
    import sys

    sys.modules["scatterpar.torch_private"].clip_to(parameters, clip_value)


def clip_to(parameters: Any, limit: Any) -> None:
    """Call the function that ``clipping_replaced`` got."""
    if not math.isfinite(float(limit)):
        return  # the caller only asks for the norm
    is_single = isinstance(parameters, Tensor)
    _clips[-1]([parameters] if is_single else list(parameters))


# What is only kept from the compiler runs below this file of it.
NOT_COMPILING = "torch._dynamo.eval_frame."
# What the names of modules begin with that write compiled code into caches.
COMPILERS = (
    "torch._dynamo.",
    "torch._functorch.",
    "torch._inductor.",
    "torch.utils.cpp_extension.",
)


@ForAllThreads
@contextlib.contextmanager
def files_of_torch_audited() -> Iterator[None]:
    """In the body, ``torch.save`` tells audit hooks of a file, as Python's ``open``.

    Torch's C++ opens it.
    """
    saving: Any = _find("torch.serialization", "_open_zipfile_writer_file")
    init = saving.__init__

    @functools.wraps(init)
    def audited(self: Any, name: str) -> None:
        sys.audit("open", name, "w", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        init(self, name)

    saving.__init__ = audited
    try:
        yield
    finally:
        saving.__init__ = init


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


# --- the caller's context: there is no public way to read it ---

_Hooks = tuple[Callable[..., Any], Callable[..., Any]]
# The innermost pair of saved-tensor hooks of this thread, or ``None``.
saved_tensors_hooks: Callable[[], _Hooks | None]
saved_tensors_hooks = partial(torch._C._autograd._top_saved_tensors_default_hooks, True)

# The number of the backward pass that this thread runs; -1 outside of a backward pass.
current_graph_task: Callable[[], int] = torch._C._current_graph_task_id

_PROFILER: Any = torch.autograd.profiler
PROFILE_ALL_THREADS = (
    "experimental_config=torch._C._profiler._ExperimentalConfig("
    "profile_all_threads=True)"
)


def modes() -> list[str]:
    """Names of this thread's dispatch and function modes.

    Without the mode of the default device, which workers get too, and those of the
    package.
    """
    names: list[str] = []
    for mode in (*_dispatch_modes(), *_function_modes()):
        kind = type(mode)
        if not kind.__module__.startswith(("torch.utils._device", "scatterpar.")):
            names.append(kind.__name__)
    return names


def is_transformed() -> bool:
    """Whether a transform of ``torch.func`` calls this thread's code."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def profiler_is_on() -> bool:
    """Whether a profiler of torch is on in any thread."""
    return bool(_PROFILER._is_profiler_enabled)


def is_profiled() -> bool:
    """Whether a profiler records this thread's operators, but not all threads'."""
    return profiler_is_on() and torch._C._autograd._profiler_enabled()


# --- autograd's graph, and hooks on leaves ---

_USE_COUNT: Callable[[Tensor], int] = Tensor._use_count  # type: ignore[attr-defined]  # no stub
_HOOKS_BEFORE = attrgetter("_backward_hooks")
_HOOKS_AFTER = attrgetter("_post_accumulate_grad_hooks")
_GRAPH: Any = torch.autograd.graph


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether the leaf has hooks that run after its gradient was accumulated."""
    return bool(tensor._post_accumulate_grad_hooks)


def are_observed(leaves: Sequence[Tensor]) -> bool:
    """Whether a hook may run when these leaves get gradients.

    On a leaf, or on its AccumulateGrad node. The node refers to the leaf, so a node
    that somebody keeps raises the leaf's use count.
    """
    if max(map(_USE_COUNT, leaves), default=0) > 1:
        return True
    return any(map(_HOOKS_BEFORE, leaves)) or any(map(_HOOKS_AFTER, leaves))


@contextlib.contextmanager
def hooks_taken_off(tensors: Sequence[Tensor]) -> Iterator[None]:
    """In the body, no hook that the user registered on one of these leaves runs."""
    dictionaries = [*map(_HOOKS_BEFORE, tensors), *map(_HOOKS_AFTER, tensors)]
    saved = [(hooks, dict(hooks)) for hooks in dictionaries if hooks]
    try:
        for hooks, _ in saved:
            hooks.clear()  # torch keeps the dictionary even if another one is assigned
        yield
    finally:
        for hooks, earlier in saved:
            hooks.update(earlier)


def nodes_of(tensors: Iterable[Tensor]) -> list[Any]:
    """The autograd nodes that computed the tensors, without leaves."""
    return [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]


def nodes_reached(loss: Tensor, without: Sequence[Any] = ()) -> list[Any]:
    """The nodes, leaves too, that a backward pass from ``loss`` reaches.

    Not those of ``without``, nor what is reached through them alone.
    """
    seen = {None, *without}
    reached: list[Any] = []
    pending: list[Any] = []
    if loss.requires_grad:
        pending.append(get_gradient_edge(loss).node)
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            reached.append(node)
            pending += [next_node for next_node, _ in node.next_functions]
    return reached


def leaves_reached(loss: Tensor, nodes: Sequence[Any]) -> list[Tensor]:
    """The leaves that a backward pass from ``loss`` reaches, not through ``nodes``."""
    return leaves_of(nodes_reached(loss, nodes))


def leaves_of(nodes: Iterable[Any]) -> list[Tensor]:
    """The leaves among the nodes of a graph, each once."""
    leaves: dict[int, Tensor] = {}
    for node in nodes:
        if type(node).__name__ == "AccumulateGrad":
            leaves[id(node.variable)] = node.variable
    return list(leaves.values())


def is_function_of_user(node: Any) -> bool:
    """Whether a node of a graph is of an ``autograd.Function`` that neither torch nor
    this package defines.
    """
    if not isinstance(node, BackwardCFunction):
        return False
    # Torch makes a class of its own for the node, in a module of torch.
    class_of_node: Any = type(node)
    return package_of(class_of_node._forward_cls) not in ("torch", "scatterpar")


def backward(roots: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """``torch.autograd.backward`` without its checks of the arguments.

    The checks take as long as the backward pass of a small operator, and hold the GIL.
    All arguments come from the package, and autograd's engine still refuses wrong
    shapes.
    """
    if has_torch_function(tuple(roots)):
        torch.autograd.backward(roots, gradients)
        return
    options = {"allow_unreachable": True, "accumulate_grad": True}
    # Neither retain_graph nor create_graph; the inputs are all leaves.
    _GRAPH._engine_run_backward(
        tuple(roots), tuple(gradients), False, False, (), **options
    )


# --- CUDA graphs ---


def free_cublas_workspaces() -> None:
    """Free the workspaces of cuBLAS, of which torch keeps one per handle and stream.

    Called before and after a capture, as inductor does: the capture then allocates its
    workspaces in the graph's own memory pool. Otherwise all graphs of a stream write to
    the same workspaces, and from torch 2.12 on the end of one graph frees them for all
    (https://github.com/pytorch/pytorch/issues/193402).
    """
    free: Callable[[], None] | None = getattr(
        torch._C, "_cuda_clearCublasWorkspaces", None
    )
    if free is not None:  # else torch was built without CUDA
        free()


_LOST: list[Any] = []  # graphs whose capture failed, kept alive


def give_up_capture(
    graph: Any, device: torch.device, pool: Any, *, has_ended: bool
) -> None:
    """End the failed capture of a CUDA graph, so that operators on ``device`` work as
    before.

    Before torch 2.13, ``capture_end`` raises for an invalid capture before it informs
    the allocator and the generator. The allocator then still allocates in the graph's
    pool, and the generator refuses to draw, until the next successful capture. So this
    function captures a trivial graph.

    Args:
        graph: the graph that was captured.
        device: on which it was captured.
        pool: its memory.
        has_ended: whether it was ``capture_end`` that failed. A second call in torch
            2.12 leaves an error of CUDA behind, which the next operator raises.
    """
    if not has_ended:
        try:
            graph.capture_end()
            return
        except Exception:  # the caller raises the error that invalidated the capture
            pass
    # the allocator was informed
    with contextlib.suppress(RuntimeError, AttributeError):
        torch._C._cuda_endAllocateToPool(device.index, pool)
        _LOST.append(graph)
        another = type(graph)()
        another.capture_begin(capture_error_mode="thread_local")
        # torch warns of a graph without a kernel
        torch.empty(1, device=device).zero_()
        another.capture_end()


# --- compiled modules: no public way compiles another function in the same way ---

_DYNAMO = "torch._dynamo.eval_frame"
CompileFn = Callable[[Callable[..., Any]], Callable[..., Any]]  # such as torch.compile


def is_compiled_module(value: Any) -> bool:
    """Whether ``value`` is a module that ``torch.compile`` returned."""
    if _DYNAMO not in sys.modules:  # importing it takes a second
        return False
    return isinstance(value, _optimized_module())


@functools.cache  # lending asks for each module of each call
def _optimized_module() -> Any:
    return _find("torch._dynamo", "OptimizedModule")


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
    config = _find("torch._dynamo", "config")
    patch: contextlib.AbstractContextManager[Any] = config.patch(
        recompile_limit=max(64, config.recompile_limit),
        accumulated_recompile_limit=max(256, config.accumulated_recompile_limit),
    )
    return patch


def is_compiling() -> bool:
    """Whether another thread is compiling at this moment."""
    lock = _find("torch._dynamo.convert_frame", "compile_lock")
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


class OperatorMode(TorchDispatchMode):
    """A dispatch mode for code that is not compiled.

    torch does not import its compiler for it.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def below_autocast() -> contextlib.AbstractContextManager[Any]:
    """In the body, operators of this thread are not cast, whatever autocast says."""
    return torch._C._DisableAutocast()


# What a generator is known by: an operator's dispatch makes other objects of Python.
id_of_generator: Callable[[torch.Generator], int] = attrgetter("_cdata")


# --- random operators: a dispatch key that the workers alone switch on ---

# A mode key that torch does not use (c10/core/DispatchKey.h). A Python dispatch mode
# would do the same, but costs some microseconds for every operator. The key costs
# nothing for operators that draw no random numbers.
RANDOM_KEY = "TESTING_ONLY_GenericMode"
_KEY: Any = None
with contextlib.suppress(RuntimeError):
    _KEY = torch._C._dispatch_key_parse(RANDOM_KEY)
# If this version of torch has no such key, ``Generators`` does without.
HAS_RANDOM_KEY = _KEY is not None

_Switch = Callable[[], contextlib.AbstractContextManager[Any]]
# In the body, random operators of this thread are sent to the registered kernels.
random_key_on: _Switch = contextlib.nullcontext
# In the body, the key is off in this thread: for the call inside a registered kernel.
random_key_off: _Switch = contextlib.nullcontext
if HAS_RANDOM_KEY:
    random_key_on = partial(torch._C._IncludeDispatchKeyGuard, _KEY)
    random_key_off = partial(
        torch._C._ExcludeDispatchKeyGuard, torch._C.DispatchKeySet(_KEY)
    )


def random_key_as_outside() -> contextlib.AbstractContextManager[Any]:
    """In the body, which is that of a dispatch mode, random operators are sent to the
    registered kernels if this thread has the key on.

    A mode's body excludes all keys that come before modes.
    """
    included = torch._C._dispatch_tls_local_include_set()
    if not HAS_RANDOM_KEY or not included.has(_KEY):
        return contextlib.nullcontext()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    return torch._C._ForceDispatchKeyGuard(included, excluded.remove(_KEY))


# Control flow traces its branches in every call, forward and backward, and torch's
# tracing is not thread-safe (https://github.com/pytorch/pytorch/issues/118260): two
# replicas at once break it permanently. So replicas in threads are refused these
# operators.
_TRACING = ("associative_scan", "cond", "map_impl", "scan", "while_loop")


def register_random_kernels(
    kernel_of: Callable[[Any, int], Callable[..., Any]],
    make_dual: Callable[..., Tensor],
) -> tuple[Library, ...]:
    """In threads that have the key on, replace random operators.

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
    torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(_KEY)
    for name, operator in torch._ops._higher_order_ops.items():
        if name in _TRACING:
            operator.py_impl(_KEY)(partial(_refuse, operator))
        else:
            operator.fallthrough(_KEY)
    return fallback, operators


def _refuse(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse to run an operator that traces."""
    if _dispatch_modes():  # torch.compile traces it, which has a lock
        with random_key_off():
            return operator(*args, **kwargs)
    raise RuntimeError(
        f"{operator.name()}: torch's control flow traces its branches in every call, "
        "and torch cannot trace in several threads at once; use one replica, or "
        "compute all branches and choose with torch.where"
    )


def frames_of_threads() -> dict[int, FrameType]:
    """The frame that each thread of Python runs, by the thread's ``ident``.

    Python documents it for debuggers, and has no other way to say where a thread hangs.
    """
    return sys._current_frames()


def of_class(tensor: Tensor, cls: type[Tensor]) -> Tensor:
    """The values of ``tensor``, without a graph, as a tensor of a subclass.

    Not by ``as_subclass``, whose result is a view, which keeps ``tensor`` alive.
    """
    result: Tensor = Tensor._make_subclass(cls, tensor)
    return result


def plain_functions() -> contextlib.AbstractContextManager[object]:
    """In the body, torch's functions treat a subclass as a plain tensor.

    ``super().__torch_function__`` makes every result one of the subclass.
    """
    context: contextlib.AbstractContextManager[object]
    context = torch._C.DisableTorchFunctionSubclass()
    return context
