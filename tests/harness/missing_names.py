"""Names that a version of the package has not, for ``tests/versions.py``: a file of
tests that imports one is collected all the same, and its other tests run.

::

    from scatterpar.report import GradientNoise    a placeholder if it is not there
    GradientNoise(3)                               AttributeError: the test fails
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class Missing:
    """A name that the package has not. Calling it or setting an attribute raises.

    A class whose base it is becomes such a name, too.
    """

    def __init__(self, name, *_bases_and_body):
        object.__setattr__(self, "_name", name)

    def __getattr__(self, name):
        if name.startswith("__"):  # pytest and inspect ask for these
            raise AttributeError(name)
        return Missing(f"{self._name}.{name}")

    def __setattr__(self, name, value):
        self()

    def __call__(self, *args, **kwargs):
        raise AttributeError(f"the package has no attribute {self._name!r}")


# The code that asks a module for a name: a file that is being imported, and what
# ``from module import name`` asks before it searches for a module of this name.
IMPORTS = "<module>"
IMPORTS_FROM = "_handle_fromlist"


def _add_placeholders(module, is_missing=False):
    """Let a file that is being imported take any name from the module."""
    askers = {IMPORTS, IMPORTS_FROM} if is_missing else {IMPORTS}
    inherited = vars(module).get("__getattr__")

    def placeholder(name):
        if inherited is not None:
            try:
                return inherited(name)
            except AttributeError:
                pass
        # A test that asks in its body gets torch's and pytest's usual answer.
        asker = sys._getframe(1).f_code.co_name
        if name.startswith("__") or asker not in askers:
            raise AttributeError(f"{module.__name__} has no attribute {name!r}")
        return Missing(f"{module.__name__}.{name}")

    module.__getattr__ = placeholder


class _Placeholders(Loader):
    """Loads a module by its own loader, or an empty one if it has none."""

    def __init__(self, loader):
        self._loader = loader

    def create_module(self, spec):
        if self._loader is None:
            return ModuleType(spec.name)
        return self._loader.create_module(spec)

    def exec_module(self, module):
        if self._loader is None:
            module.__path__ = []  # it may have had modules of its own
        else:
            self._loader.exec_module(module)
        _add_placeholders(module, is_missing=self._loader is None)

    def __getattr__(self, name):  # such as get_source, of a real loader
        return getattr(self._loader, name)


class Finder(MetaPathFinder):
    """Finds each module of a package, also those that the package has not."""

    def __init__(self, package):
        self._prefix = f"{package}."

    def find_spec(self, fullname, path, target=None):
        if not fullname.startswith(self._prefix):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None:
            return ModuleSpec(fullname, _Placeholders(None), is_package=True)
        spec.loader = _Placeholders(spec.loader)
        return spec


def install(package="scatterpar"):
    """Provide placeholders in a package and its modules. Returns the new finder."""
    prefix = f"{package}."
    # A conftest imports the package before pytest asks a plugin.
    loaded = {
        module for name, module in sys.modules.items() if f"{name}.".startswith(prefix)
    }
    finder = Finder(package)
    sys.meta_path.insert(0, finder)
    for module in loaded | {import_module(package)}:
        _add_placeholders(module)
    return finder
