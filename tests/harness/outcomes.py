"""A pytest plugin (``-p harness.outcomes``): the outcome of each call of the package,
for ``tests/versions.py``.

The calls are those that a user makes. Of each: whether it returned or what it raised,
in which words, and what was told; the bits of its result, of the module and of its
gradients; the states of all random generators afterwards; and the report of the step.
Calls inside of others, as a look's, are not recorded. The file that ``OUTCOMES`` names
gets one line of JSON when a test begins and when it has ended: what a crash of the
process leaves is not run again, and the other tests are. ``CHOSEN`` may name a file
with a list of tests.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import re
import sys
import threading
import warnings
from importlib import import_module
from pathlib import Path

import pytest
import torch

from harness import leak_checks, missing_names

FILE = "OUTCOMES"
CHOSEN = "CHOSEN"  # names a file with the programs that are run; all if there is none
CRASHED = "crashed"
# By the module that has the class or function, its methods or itself.
METHODS = {
    "ScatterOnceParallel": ("forward_backward", "loss", "forward", "map", "check"),
    "DataParallelModel": ("forward",),
    "DataParallelCriterion": ("forward",),
    "ShardedOptimizer": ("step",),
}
FUNCTIONS = ("splitcheck", "gather")
_LONGEST = 1500  # of words; the rest is tables
_calls = threading.local()
_entries: list[dict[str, object]] = []
_told: list[str] = []


def pytest_configure():
    missing_names.install()
    package = import_module("scatterpar")
    for name, methods in METHODS.items():
        owner = getattr(package, name, None)
        for method in methods:
            if owner is not None and method in vars(owner):
                called = vars(owner)[method]
                setattr(owner, method, _recorded(f"{name}.{method}", called))
    for name in FUNCTIONS:
        setattr(package, name, _recorded(name, getattr(package, name)))
    warnings.warn = _telling(warnings.warn)


def _telling(warn):
    """``warnings.warn``, which also notes the text: filters drop some of them."""

    @functools.wraps(warn)
    def warned(message, category=None, stacklevel=1, **options):
        if getattr(_calls, "depth", 0) or threading.current_thread().daemon:
            _told.append(in_general(str(message)))
        return warn(message, category, stacklevel + 1, **options)

    return warned


def _recorded(name, called):
    @functools.wraps(called)
    def recording(*args, **kwargs):
        # Also of a call in a replica's thread, which is inside of a step.
        if getattr(_calls, "depth", 0) or threading.current_thread().daemon:
            return called(*args, **kwargs)
        _told.clear()
        _calls.depth = 1
        entry = {"call": name}
        try:
            result = called(*args, **kwargs)
            entry |= {"outcome": "returned", "bits": bits_of(result)}
            return result
        except BaseException as error:
            words = [str(error), *getattr(error, "__notes__", ())]
            entry |= {"outcome": type(error).__name__}
            entry["words"] = in_general("\n".join(words))
            raise
        finally:
            _calls.depth = 0
            entry["told"] = [*_told]
            owner = args[0] if args else None
            entry |= state_after(owner)
            _entries.append(entry)

    return recording


def state_after(owner):
    """What a call leaves: the module, its gradients, generators, and the report."""
    generators = {
        name: _digest(repr(state).encode())
        for name, state in leak_checks.random_states().items()
    }
    found = {"generators": generators}
    module = getattr(owner, "module", None)
    if isinstance(module, torch.nn.Module):
        tensors = [*module.parameters(), *module.buffers()]
        found["module"] = bits_of(tensors)
        found["gradients"] = bits_of([tensor.grad for tensor in tensors])
    report = getattr(owner, "last_step", None)
    if report is not None:
        plan = [
            (share.replica, str(share.device), share.micro_batches)
            for share in report.plan.shares
        ]
        found["report"] = repr((plan, report.bytes, report.messages, report.retries))
    return found


def bits_of(value):
    """A digest of all tensors and numbers in a result; of other values their class."""
    parts = []
    _gather_bits(value, parts, 0)
    return _digest(b"".join(parts))


def _gather_bits(value, parts, depth):
    if isinstance(value, torch.Tensor):
        parts.append(f"{tuple(value.shape)} {value.dtype} ".encode())
        parts.append(_content_of(value))
    elif isinstance(value, (list, tuple)) and depth < 6:
        for entry in value:
            _gather_bits(entry, parts, depth + 1)
    elif isinstance(value, dict) and depth < 6:
        for key, entry in value.items():
            parts.append(repr(key).encode() if isinstance(key, (str, int)) else b"?")
            _gather_bits(entry, parts, depth + 1)
    elif isinstance(value, (bool, int, float, str, type(None))):
        parts.append(in_general(repr(value)).encode())
    else:
        parts.append(type(value).__name__.encode())


def _content_of(tensor):
    try:
        with torch.no_grad():
            plain = tensor.detach().to_dense().cpu().contiguous().resolve_conj()
            return plain.flatten().view(torch.uint8).numpy().tobytes()
    except Exception as error:  # of a subclass, or of a device that failed
        return type(error).__name__.encode()


def _digest(content):
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def in_general(text):
    """A text without what differs from run to run: addresses, times, folders."""
    text = re.sub(r"0x[0-9a-f]+", "0x…", text[:_LONGEST])
    text = re.sub(r"/\S*/", "…/", text)
    text = re.sub(r"\b\d+ bytes\b|\bline \d+\b|:\d+\b", "…", text)
    return re.sub(r"\d+(\.\d+)? ?(ms|s|seconds|minutes|GiB|MiB|KiB)\b", "… \\2", text)


def pytest_collection_modifyitems(config, items):
    """Leave out what an earlier process has begun, and what is not asked for."""
    file = Path(os.environ[FILE])
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    begun = {json.loads(line)["program"] for line in lines}
    chosen = {item.nodeid for item in items} - begun
    if CHOSEN in os.environ:
        chosen &= {*json.loads(Path(os.environ[CHOSEN]).read_text(encoding="utf-8"))}
    left_out = [item for item in items if item.nodeid not in chosen]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item.nodeid in chosen]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """The same draws in each run, whatever the tests before have drawn."""
    torch.manual_seed(0)
    random.seed(0)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(0)


def pytest_runtest_logstart(nodeid):
    _write({"program": nodeid, "test": CRASHED, "why": "", "calls": []})


def _write(line):
    with open(os.environ[FILE], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    # A test may be skipped, or fail, before it is called.
    if call.when == "call" or report.outcome != "passed":
        crash = getattr(report.longrepr, "reprcrash", None)
        message = crash.message if crash and report.failed else ""
        line = {
            "program": item.nodeid,
            "test": report.outcome,
            "why": in_general(message.strip())[:300],
            "calls": [*_entries],
        }
        _write(line)
    if call.when == "teardown":
        _entries.clear()
    return report


def pytest_collectreport(report):
    if report.failed:
        lines = str(report.longrepr).strip().splitlines()
        line = {"program": report.nodeid, "test": "not collected", "calls": []}
        line["why"] = in_general(lines[-1] if lines else "")[:300]
        _write(line)
