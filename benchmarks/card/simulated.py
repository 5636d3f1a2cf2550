"""Run a module as ``python -m`` does, on the accelerator of ``tests/simulated``."""

import runpy
import sys

from simulated import load_built

if __name__ == "__main__":
    load_built()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
