"""A plugin of pytest that runs the code cells of fastai's notebooks, a test per cell.

The cells of a notebook run in order, in one namespace. Cells that are exported are the
source of the library: names come from the installed one.
"""

import importlib

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager

NOT_RUN = {"export", "exporti", "eval: false"}


def pytest_collect_file(file_path, parent):
    if file_path.suffix == ".ipynb":
        return Notebook.from_parent(parent, path=file_path)
    return None


class Notebook(pytest.File):
    """Its code cells that are no source of the library.

    Attributes:
        first: the first one.
        namespace: the variables of all.
    """

    first = None

    def collect(self):
        self.namespace = {"__name__": "__main__"}
        for number, cell in enumerate(nbformat.read(self.path, as_version=4).cells):
            flags = flags_of(cell.source)
            if "default_exp" in flags:
                self._take_names(flags["default_exp"])
            elif cell.cell_type == "code" and not flags.keys() & NOT_RUN:
                name = f"cell {number}"
                item = Cell.from_parent(self, name=name, source=cell.source)
                self.first = self.first or item
                yield item

    def _take_names(self, module):
        """Let cells use what the library's module has, and its tests."""
        for name in (module, "test_utils"):
            self.namespace |= vars(importlib.import_module(f"fastai.{name}"))
        self.namespace["__name__"] = "__main__"


class Cell(pytest.Item):
    """A code cell, as a test that fails if it raises."""

    def __init__(self, name, parent, source):
        super().__init__(name, parent)
        self.source = source

    def runtest(self):
        source = TransformerManager().transform_cell(self.source)
        code = compile(source, f"{self.path.name}:{self.name}", "exec")
        exec(code, self.parent.namespace)

    def reportinfo(self):
        return self.path, None, self.name


def flags_of(source):
    """The directives of a cell, such as ``#|hide``, with their arguments."""
    flags = {}
    for line in source.splitlines():
        if line.startswith("#|"):
            name, _, value = line[2:].strip().partition(" ")
            flags[f"{name} {value}" if name == "eval:" else name] = value
    return flags
