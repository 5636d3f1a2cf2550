"""Every private entry point of torch that the package uses.

No other file of the package names ``torch._C`` or another private module of torch. If a
version of torch lacks an entry point, ``Missing`` names it, at import or at its first
use. The versions that the tests ran with are in ``constraints.txt``.

::

    entry_points    are they there?
    tensors         flat ones, versions, subclasses
    autograd        its graph, the leaves and hooks in it
    thread_modes    modes, transforms and profilers of this thread
    random_key      the dispatch key of random operators
    modules         parametrizations, optimizers, clipping
    compiler        compiled modules and functions
    graphs          the capture of CUDA graphs
    settings        of the process; contexts that all threads share

Other files call ``torch._foreach_*``, ``Tensor._version`` and
``Module._replicate_for_data_parallel`` directly: torch's own optimizers and
``nn.DataParallel`` use them too. ``entry_points`` checks that they exist.

Imports no other package, but ``libraries.py``.

Any thread calls it.
"""

from scatterpar.torch_private.autograd import (
    are_observed,
    backward,
    current_graph_task,
    has_gradient_hooks,
    hooks_taken_off,
    is_function_of_user,
    leaves_of,
    leaves_reached,
    nodes_of,
    nodes_reached,
    saved_tensors,
    saved_tensors_hooks,
)
from scatterpar.torch_private.compiler import (
    COMPILERS,
    INDUCTOR_GRAPHS,
    NOT_COMPILING,
    CompileFn,
    compile_fn_of,
    import_compiler,
    inductor_records_graphs,
    is_compiled_module,
    is_compiling,
    is_uncompiled,
    many_graphs,
    never_compiled,
    records_cuda_graphs,
    uncompiled,
    unwrapped,
)
from scatterpar.torch_private.graphs import (
    capturing_on,
    free_cublas_workspaces,
    give_up_capture,
)
from scatterpar.torch_private.modules import (
    clipping_replaced,
    loading_hooks,
    optimizer_hooks_off,
    parametrized_in_threads,
    saving_hooks,
    step_without_hooks,
)
from scatterpar.torch_private.random_key import (
    HAS_RANDOM_KEY,
    RANDOM_KEY,
    id_of_generator,
    random_key_as_outside,
    random_key_off,
    random_key_on,
    register_random_kernels,
)
from scatterpar.torch_private.settings import (
    PRECISION_SETTINGS,
    SETTINGS,
    ForAllThreads,
    Setting,
    files_of_torch_audited,
    frames_of_threads,
    round_no_float32,
)
from scatterpar.torch_private.tensors import (
    flatten,
    of_class,
    plain_functions,
    unflatten,
    version_counters_kept,
)
from scatterpar.torch_private.thread_modes import (
    PROFILE_ALL_THREADS,
    OperatorMode,
    below_autocast,
    is_profiled,
    is_transformed,
    modes,
    profiler_is_on,
)
