"""``splitcheck`` without the engine, as a package of its own: the page's snippets run.

The package is installed into an empty environment, which has torch from this one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv

import pytest
from harness.pages import blocks, read
from harness.splitcheck_wheel import write_wheel

# What runs before the snippets: the whole package must not be there by accident.
BEFORE = """
import sys

sys.modules["scatterpar"] = None
"""
AFTER = """
import splitcheck

installed = splitcheck.__file__
assert installed.startswith(sys.prefix), installed
"""


def snippets():
    """The page's snippets that need torch alone, in its order, as one program."""
    page = read("docs/splitcheck.md").partition("\n## Trainers of libraries\n")[0]
    code = "\n".join([BEFORE, *blocks(page, "python"), AFTER])
    # The page's test runs at once: the next snippet has another step.
    code = re.sub(r"^def (test_\w+)\(\):\n.*\n", r"\g<0>\n\1()\n", code, flags=re.M)
    code, times = re.subn(
        r"from scatterpar(\.splitting)? import", "from splitcheck import", code
    )
    assert times == 2
    return code, blocks(page, "text")


@pytest.fixture
def python(tmp_path):
    """The interpreter of an empty environment, into which the wheel is installed."""
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=os.name != "nt")
    folder = "Scripts" if os.name == "nt" else "bin"
    interpreter = environment / folder / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(interpreter)]
    options = ["--no-index", "--no-deps", "--quiet", "--disable-pip-version-check"]
    wheel = str(write_wheel(tmp_path))
    subprocess.run([*pip, "install", *options, wheel], check=True)
    # After the installation, so that pip does not see what is there.
    (packages,) = environment.rglob("site-packages")
    folders = [path for path in sys.path if path.endswith("-packages")]
    (packages / "torch_of_this_environment.pth").write_text("\n".join(folders))
    return interpreter


@pytest.mark.draws
@pytest.mark.slow
def test_snippets_run_without_the_engine(python, tmp_path):
    code, shown = snippets()
    program = tmp_path / "page.py"
    program.write_text(code, encoding="utf-8")
    outcome = subprocess.run(
        [python, "-I", program],
        cwd=tmp_path,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert outcome.returncode == 0, outcome.stderr
    assert without_rounding(outcome.stdout) == without_rounding("".join(shown))


def without_rounding(report):
    """The words of a report; differences that are rounding alone are a name."""
    return re.sub(r"\d\.\de-1\d", "ROUNDING", report).split()
