"""Whether something is a library's: by its module, or by the file of its lines.

::

    torch.nn.functional                   a library's: torch's
    collections                           a library's: Python's
    …/site-packages/timm/models.py        a library's: in an installed package
    __main__, project/models.py           the user's

Libraries are torch, Python, this package, and packages that are installed. One whose
sources the user has on the path, as after ``pip install -e``, is the user's.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch

# With the separator: ``scatterpar_experiments`` beside it is the user's.
PACKAGE_FOLDER = str(Path(__file__).parent) + os.sep
# Of files; where torch is built from its sources, it is in no ``site-packages``.
_FOLDERS = (
    sysconfig.get_path("stdlib") + os.sep,
    str(Path(torch.optim.__file__).parents[1]) + os.sep,
    PACKAGE_FOLDER,
    "<frozen ",  # Python's own imports
)
_INSTALLED = {"site-packages", "dist-packages"}  # the second is Debian's


def package_of(value: Any) -> str:
    """The outermost package that defines a class or a function; of an object, its
    class.
    """
    try:
        module = value.__module__
    except Exception:  # of a user's object, whatever it is asked for
        return ""
    return str(module).partition(".")[0]


@functools.lru_cache(maxsize=4096)
def is_library(module: str | None) -> bool:
    """Whether a module, given by its name, is torch's, Python's, or in a package."""
    name = str(module)
    root = name.partition(".")[0]
    if root == "__main__":
        return False
    if root in sys.stdlib_module_names or root in ("torch", "scatterpar"):
        return True
    return is_library_file(str(getattr(sys.modules.get(name), "__file__", None)))


@functools.lru_cache(maxsize=4096)
def is_library_file(path: str) -> bool:
    """Whether a file is torch's, Python's, or in a package."""
    return path.startswith(_FOLDERS) or not _INSTALLED.isdisjoint(Path(path).parts)
