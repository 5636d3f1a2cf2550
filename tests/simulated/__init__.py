"""A simulated accelerator, for machines without one.

Its devices are in host memory, and torch treats them as real: each thread has its own
streams and current device, backward passes run in a thread per device, each device has
its own generator, and the CPU's generators are refused. It exposes these errors, as
CUDA does:

- Work waits in the queue of its stream, and by default runs as late as possible: when
  the host synchronises, reads a value or waits for a copy, or when another stream waits
  for an event.
- Fresh memory, the target of a copy under way, and freed memory that another stream
  still reads hold poison: NaN in floats, -1 in integers.
- Copies from pinned memory read it when they run; pageable memory is staged at once.
- Operators refuse tensors of two devices, and of host and device but for 0-dim ones.
- What goes wrong in a kernel is raised at the next synchronisation.
- A stream that captures a graph runs nothing; the host and other streams must not wait
for it.

`control` switches each of these and counts what happens. As a pytest plugin (``-p
simulated``, with ``PYTHONPATH=tests``) it is there for a whole run: a process cannot
get rid of it again.
"""

from __future__ import annotations

import os
import subprocess
import types
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

from simulated import control

__all__ = ["LIBRARY", "NAME", "build", "load", "load_built"]

NAME = "simulated"
# the environment variable that says where it was built
LIBRARY = "SIMULATED_ACCELERATOR"
_SOURCE = Path(__file__).with_name("accelerator.cpp")


def build(folder: Path) -> Path:
    """Compile the library into ``folder``; takes some seconds on an idle machine."""
    library = library_in(folder)
    under_way = library.with_suffix(".part")  # a stopped compiler leaves no library
    command = ["g++", "-shared", "-fPIC", "-std=c++20", "-O0", "-w", str(_SOURCE)]
    command += [f"-I{path}" for path in include_paths()]
    command += [f"-L{path}" for path in library_paths()]
    command += ["-ltorch", "-ltorch_cpu", "-lc10", "-o", str(under_way)]
    subprocess.run(command, check=True, timeout=1800)
    under_way.rename(library)
    return library


def library_in(folder: Path) -> Path:
    """Where ``build`` leaves the library."""
    return folder / "accelerator.so"


def load(library: Path) -> None:
    """Make it this process's accelerator, with the module ``torch.simulated``."""
    torch.utils.rename_privateuse1_backend(NAME)
    torch.ops.load_library(library)
    operators = torch.ops.simulated

    def index(device: str | torch.device) -> int:
        found = torch.device(device).index
        return torch.accelerator.current_device_index() if found is None else found

    def manual_seed_all(seed: int) -> None:
        for i in range(operators.device_count()):
            operators.manual_seed(seed, i)

    module = types.ModuleType(f"torch.{NAME}")
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = operators.device_count
    module._initialized = True  # or checkpointing would not save its random state
    module.device = lambda device: torch.accelerator.device_index(index(device))
    module.current_device = torch.accelerator.current_device_index
    module.get_rng_state = lambda device=NAME: operators.get_rng_state(index(device))
    module.set_rng_state = lambda state, device=NAME: operators.set_rng_state(
        state, index(device)
    )
    module.manual_seed_all = manual_seed_all
    module.CUDAGraph, module.graph_pool_handle = control.Graph, lambda: None
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend()
    control.obey_environment()


def load_built() -> None:
    """Load what the environment says was built."""
    load(Path(os.environ[LIBRARY]))


pytest_configure = load_built  # as a plugin
