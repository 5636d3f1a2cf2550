"""How Sphinx builds the guide: ``sphinx-build -c docs . build/guide``.

The source folder is that of the whole repository. So links between these pages and the
CHANGELOG lead to the same place in a clone and in the guide. Nothing is fetched,
neither when the guide is built nor when it is read.
"""

from pathlib import Path

from docutils import nodes
from sphinx.parsers import Parser
from sphinx.pycode import ModuleAnalyzer

from scatterpar import __version__

project = "scatterpar"
copyright = "the scatterpar developers"
version = release = __version__

# myst_nb is myst_parser, and shows notebooks with the outputs that are in them.
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
nb_execution_mode = "off"  # the tests run them
nb_merge_streams = True
root_doc = "docs/index"
include_patterns = [
    "docs/**",
    "notebooks/*.ipynb",
    "benchmarks/README.md",
    "benchmarks/**/README.md",
    "benchmarks/card/h*.md",
    "tests/README.md",
    "tests/**/README.md",
    "examples/*.py",
    "scatterpar/train.py",
    "*.md",
]
# The README is the page before the guide; docs/package.md is the one that an index
# shows.
exclude_patterns = ["README.md", "docs/package.md", "build", "**/.*", "**/*.egg-info"]

myst_heading_anchors = 3
# Large, and not needed to describe ours.
autodoc_mock_imports = ["fastai", "lightning", "sentence_transformers", "torchmetrics"]
autodoc_typehints = "signature"
napoleon_use_ivar = True  # attributes are a list, as parameters are
napoleon_attr_annotations = False  # their types are in the signature, or in words
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 88
default_role = "code"  # a word in single backticks, in a docstring

html_theme = "furo"
html_title = f"scatterpar {release}"
html_additional_pages = {"index": "redirect.html"}
templates_path = ["templates"]
html_show_sourcelink = False
html_static_path = ["static"]
html_css_files = ["guide.css"]
pygments_style = "friendly"
pygments_dark_style = "github-dark"

# Links lead to pages beside code and to scripts, which are in no list of pages.
suppress_warnings = ["toc.not_included"]


class ScriptParser(Parser):
    """Makes a page of a script: its name and its source."""

    supported = ("script",)

    def parse(self, source, document):
        """Called by Sphinx."""
        name = Path(document["source"]).name
        page = nodes.section(ids=[nodes.make_id(name)])
        page += nodes.title(name, name)
        page += nodes.literal_block(source, source, language="python")
        document += page


def setup(app):
    """Called by Sphinx."""
    app.add_source_suffix(".py", "script")
    app.add_source_parser(ScriptParser)
    app.connect("builder-inited", without_overloads)
    app.connect("autodoc-process-signature", with_plain_names)


def without_overloads(app):
    """One signature per method: overloads differ in types only."""
    analyzer = ModuleAnalyzer.for_module("scatterpar.engine")
    analyzer.analyze()
    analyzer.overloads.clear()


def with_plain_names(app, what, name, obj, options, signature, returns):
    """The class that bounds a type variable, in the place of the variable."""
    return signature and signature.replace("ModuleT", "Module"), returns
