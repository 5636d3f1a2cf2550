"""Run a module on the null CUDA, with values: ``python -m nullcuda
scatterpar doctor``.
"""

from __future__ import annotations

import runpy
import sys
import warnings

from nullcuda import values

with warnings.catch_warnings(action="ignore"):  # torch notes that kernels are replaced
    values.install()
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
