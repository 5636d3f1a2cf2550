"""How Sphinx builds the guide: ``sphinx-build -c docs . build/guide``.

The source folder is that of the whole repository. So links between these pages and the
CHANGELOG lead to the same place in a clone and in the guide. Nothing is fetched,
neither when the guide is built nor when it is read.
"""

import re

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
    "*.md",
]
# The README is the page before the guide; docs/package.md is the one that an index
# shows.
exclude_patterns = ["README.md", "docs/package.md", "build", "**/.*", "**/*.egg-info"]

myst_heading_anchors = 3
# Large, and not needed to describe ours.
autodoc_mock_imports = ["fastai", "lightning", "sentence_transformers", "torchmetrics"]
autodoc_typehints = "both"
autodoc_type_aliases = {  # what the names of our own stand for
    "Count": "Callable[[Any, Any], float | Tensor]",
    "DeviceLike": "int | str | torch.device",
}
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

# Pages that lie beside their code are no pages of the guide: links hand out the file.
BESIDE_CODE = re.compile(
    r"\]\(((?:\.\./)*(?:benchmarks|tests)/[\w/]*README\.md)(?:#[^)]*)?\)"
)


def setup(app):
    """Called by Sphinx."""
    app.connect("source-read", link_to_files)


def link_to_files(app, page, source):
    """Let links to pages beside code lead to the files themselves."""
    source[0] = BESIDE_CODE.sub(r"](path:\1)", source[0])
