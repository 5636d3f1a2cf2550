"""Fixtures that every test shares, and those that check each for what it leaves
behind.

``conftest.py`` loads them in the processes that run tests.
"""

import gc
import logging
import os
import shutil
import warnings
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import simulated
import torch

from harness import leak_checks
from scatterpar import errors
from scatterpar.devices.links import check_links
from scatterpar.integrations.divided_modules import DividedModules

if find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "suite",
        database=None,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],  # the machine may be busy
    )
    settings.load_profile("suite")


def pytest_configure(config):
    errors.raises_defects = True
    processes = getattr(config, "workerinput", {}).get("workercount", 1)
    # they share the cores
    torch.set_num_threads(max(1, torch.get_num_threads() // processes))


@pytest.fixture(scope="module", autouse=True)
def _only_what_is_new_is_collected():
    """Libraries bring a million objects; the many collections of the tests leave them
    out.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call":
        item.stash[leak_checks.FAILED] = report.failed
    return report


@pytest.fixture(autouse=True)
def _links_are_looked_at_in_every_test():
    check_links.cache_clear()


@pytest.fixture(autouse=True)
def _no_leaked_threads(request):
    before = leak_checks.threads()
    yield
    # a traceback keeps an engine alive
    if not request.node.stash.get(leak_checks.FAILED, True):
        leaked = leak_checks.leaked_threads(before)
        assert not leaked, f"the test leaked threads: {leaked}"


@pytest.fixture(autouse=True)
def _no_moved_generators(request):
    """Random state is put back after every test, and only tests marked ``draws`` may
    move it.

    Data and initial weights come from generators of their own (``harness``), so that
    what moves the global one is the code under test.
    """
    before = leak_checks.random_states()
    yield
    moved = leak_checks.differences(before, leak_checks.random_states())
    if moved:
        leak_checks.put_back_random_states(before)
    if request.node.get_closest_marker("draws") is None:
        advice = "take data from harness.oracle, or mark the test `draws`"
        assert not moved, f"the test moved random generators: {[*moved]}; {advice}"


@pytest.fixture(autouse=True)
def _no_changed_globals(_no_moved_generators):
    before = leak_checks.globals_of_torch()
    yield
    changed = leak_checks.differences(before, leak_checks.globals_of_torch())
    assert not changed, f"the test changed globals: {changed}"


@pytest.fixture
def warned(monkeypatch):
    """The texts of the package's own warnings. They are given, too."""
    texts = []
    warn = warnings.warn

    def recorded(text, category, stacklevel):
        texts.append(str(text))
        warn(text, category, stacklevel=stacklevel + 1)

    monkeypatch.setattr(errors, "warnings", SimpleNamespace(warn=recorded))
    return texts


class _Kept(logging.Handler):
    """What a logger was told since ``set_level``, as pytest's ``caplog`` has it."""

    def __init__(self):
        super().__init__()
        self.records = []
        self.levels = {}

    def emit(self, record):
        self.records.append(record)

    def set_level(self, level, name):
        logger = logging.getLogger(name)
        self.levels.setdefault(logger, logger.level)
        logger.setLevel(level)
        logger.addHandler(self)

    @property
    def messages(self):
        return [record.getMessage() for record in self.records]

    @property
    def text(self):
        return "\n".join(self.messages)


@pytest.fixture
def caplog():
    """In the place of pytest's plugin (setup.cfg switches it off), which hands handlers to
    all of torch's fifty loggers six times per test: a third of what an empty test takes.
    """
    kept = _Kept()
    yield kept
    for logger, level in kept.levels.items():
        logger.removeHandler(kept)
        logger.setLevel(level)


@pytest.fixture
def by_reference_counts_alone():
    """What torch has imported since the file's start is not looked at either."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def one_thread_an_operation():
    """Where tensors are tiny: a second thread would only be waited for."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def simulated_accelerator(tmp_path_factory):
    """What the environment of a process needs to load it; nothing where there is no
    compiler.

    Compiled once per run: processes of pytest-xdist share the folder above theirs.
    """
    if shutil.which("g++") is None:
        return {}
    import fcntl  # where there is no g++, on Windows, there is none either

    folder = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        folder = folder.parent
    with (folder / "simulated.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
        library = simulated.library_in(folder)
        if not library.exists():
            simulated.build(folder)
    return {simulated.LIBRARY: str(library)}


@pytest.fixture
def divided_calls(monkeypatch):
    """The modules whose calls an engine has computed in a library's loop."""
    modules = []
    compute = DividedModules.compute

    def counted(self, module, args, kwargs):
        modules.append(module)
        return compute(self, module, args, kwargs)

    monkeypatch.setattr(DividedModules, "compute", counted)
    return modules


_SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("shared", "virtual")]


@pytest.fixture(params=["mixed", *_SLOW])
def devices(request):
    """``devices(n)``: n replicas in one memory, on n virtual devices of their own, or
    both.
    """
    layouts = {
        "mixed": lambda n: [f"cpu:{'0102'[i % 4]}" for i in range(n)],
        "shared": lambda n: ["cpu"] * n,
        "virtual": lambda n: [f"cpu:{i}" for i in range(n)],
    }
    return layouts[request.param]
