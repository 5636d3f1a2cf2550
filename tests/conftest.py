"""What is collected, and which process has the fixtures of every test."""

import gc
import os
import signal
from importlib.util import find_spec

import pytest

# A library's thread would send numbers, and outlive the test. Children inherit this.
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"


def pytest_addoption(parser):
    parser.addoption(
        "--steps", type=int, default=12, help="of each of the stress tests"
    )


def pytest_configure(config):
    # as in a background job of a shell
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line(
        "markers",
        "draws: moves torch's random generator on purpose; it is put back afterwards",
    )
    # The caller's thread has a guard of its own, see harness/isolation.py.
    config.addinivalue_line("filterwarnings", "ignore:Guard. active")
    if not _only_hands_out_tests(config):
        # Until all is imported nothing is garbage, and to look for it again and again
        # takes a quarter of the time.
        gc.disable()
        config.pluginmanager.import_plugin("harness.fixtures")


def _only_hands_out_tests(config):
    """Whether this is the process of pytest-xdist that starts the others.

    They wait until it has begun, and importing torch takes seconds.
    """
    is_divided = config.getoption("dist", "no") != "no"
    return is_divided and not hasattr(config, "workerinput")


def pytest_collection_finish():
    gc.enable()


# Packages of extras, by the names under which they are imported.
EXTRAS = {
    "PIL",
    "accelerate",
    "datasets",
    "hypothesis",
    "matplotlib",
    "nbformat",
    "numpy",
    "peft",
    "psutil",
    "pytest_timeout",
    "sentence_transformers",
    "timm",
    "torchvision",
    "tqdm",
    "transformers",
    "trl",
}


class _Module(pytest.Module):
    """A file of tests; skipped if it imports a package of an extra that is not
    installed.
    """

    def collect(self):
        try:
            return super().collect()
        except self.CollectError as error:
            missing = error.__cause__
            if isinstance(missing, ModuleNotFoundError) and missing.name in EXTRAS:
                pytest.skip(f"{missing.name} is not installed", allow_module_level=True)
            raise


def pytest_pycollect_makemodule(module_path, parent):
    return _Module.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(config, items):
    without = [name for name in ("torchvision", "timm") if find_spec(name) is None]
    skip = pytest.mark.skip(reason=f"{' and '.join(without)}: pip install '.[images]'")
    for item in items:
        if without and item.get_closest_marker("pictures"):
            item.add_marker(skip)
    if "slow" not in config.getoption("markexpr"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
