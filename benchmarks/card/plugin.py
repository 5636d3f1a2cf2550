"""For pytest: which rows run on this machine, the time that each has, and the page."""

import faulthandler
import functools
import importlib
import time
from pathlib import Path

import pytest
import torch

from benchmarks.card import BUDGETS
from benchmarks.card.networks import Setting, draw, free_memory
from scatterpar.checkup.doctor import describe, load_per_core
from scatterpar.devices.device_ids import parse_devices, resolve

NOT_REACHED = "not reached"
_LEAST = 3.0  # seconds; a row with less time does not begin


def pytest_addoption(parser):
    group = parser.getgroup("card", "a page of this machine's GPUs")
    group.addoption("--devices", default="", help="such as 0,1; default: all GPUs")
    group.addoption(
        "--under", default="", metavar="MODULE", help="null GPUs: nullcuda.values"
    )
    group.addoption(
        "--seconds", type=float, default=600.0, help="the longest time of the whole"
    )
    words = "the page; data is in a folder beside it; default: %(default)s"
    group.addoption("--page", type=Path, default=Path("runs/card.md"), help=words)


def pytest_configure(config):
    options = config.option
    try:
        names = parse_devices([options.devices] if options.devices else ()) or None
        if names is None and not torch.accelerator.is_available():
            names = [f"cpu:{i}" for i in range(4)]
        devices = tuple(dict.fromkeys(resolve(names)))
    except (TypeError, ValueError) as error:
        raise pytest.UsageError(str(error)) from error
    is_real, page = (
        devices[0].type != "cpu" and not options.under,
        options.page.resolve(),
    )
    folder = page.with_suffix("")
    config.setting = Setting(devices, not is_real, is_real, options.under, folder)
    if not hasattr(config, "workerinput"):
        draw(folder)
        config.pluginmanager.register(Page(config.setting, page, options.seconds))
    elif options.under:
        importlib.import_module(options.under).install()


def pytest_generate_tests(metafunc):
    """A row for one device, for all, and for two and four of them."""
    if "count" in metafunc.fixturenames:
        most = len(metafunc.config.setting.devices)
        metafunc.parametrize("count", sorted({n for n in (1, 2, 4, most) if n <= most}))


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest-timeout reads the mark
def pytest_runtest_protocol(item):
    limit = limit_of(
        item.nodeid, item.config.workerinput["begin"], item.config.option.seconds
    )
    if limit < _LEAST:
        item.add_marker(
            pytest.mark.skip(f"{NOT_REACHED}: the time of its group was over")
        )
    limit = max(limit, _LEAST)
    item.add_marker(pytest.mark.timeout(limit, method="thread"), append=False)
    with (item.config.setting.folder / "stacks.txt").open("a") as file:
        # xdist drops pytest-timeout's
        faulthandler.dump_traceback_later(limit - 0.2, file=file)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()
            free_memory()  # the next row may start another process


def pytest_runtest_setup(item):
    setting, marks = (
        item.config.setting,
        {mark.name: mark.args for mark in item.iter_markers()},
    )
    here, (needed,) = len(setting.devices), marks.get("needs", (0,))
    for applies, why in (
        (here < needed, f"{needed} devices are needed, and {here} are here"),
        (
            "cuda" in marks and setting.devices[0].type == "cpu",
            "CPU replicas have no CUDA",
        ),
        ("gpu" in marks and not setting.is_real, "needs GPUs that compute"),
        ("ranks" in marks and setting.under, "null GPUs have no NCCL"),
    ):
        if applies:
            pytest.skip(why)


@pytest.fixture
def setting(request):
    return request.config.setting


@pytest.fixture
def say(record_property):
    return functools.partial(record_property, "result")


def limit_of(nodeid, begin, seconds):
    """The seconds that a row may take from now on, if the whole began at ``begin``."""
    group, groups, scale = _group_of(nodeid), list(BUDGETS), seconds / 600
    until = sum(BUDGETS[name][0] for name in groups[: groups.index(group) + 1])
    return min(begin + until * scale - time.time(), BUDGETS[group][1] * scale)


def _group_of(nodeid):
    return Path(nodeid.split("::")[0]).stem


class Page:
    """Tells the worker when the whole began, and writes the page."""

    def __init__(self, setting, file, seconds):
        self._setting, self._file, self._seconds = setting, file, seconds
        self._begin, self._load = time.time(), load_per_core()
        self._rows, self._ends = [], {}  # all rows, and when the limit of each ends

    def pytest_configure_node(self, node):
        node.workerinput["begin"] = self._begin

    def pytest_xdist_node_collection_finished(self, ids):
        self._rows = ids  # some may never begin

    def pytest_runtest_logstart(self, nodeid):
        self._ends[nodeid] = time.time() + limit_of(nodeid, self._begin, self._seconds)

    def pytest_handlecrashitem(self, crashitem, report, sched):
        """Tell a row that was ended by its limit from a row whose process ended."""
        sched.pending.sort()  # the row after this one was moved to the end
        if time.time() > self._ends[crashitem] - 0.5:
            words = f"{NOT_REACHED}: ended by its limit; see stacks.txt"
            report.outcome, report.longrepr = "skipped", (report.location[0], 0, words)
        else:
            report.longrepr = "its process ended"

    def pytest_terminal_summary(self, terminalreporter):
        kinds = ("passed", "skipped", "failed", "error")
        reports = [
            each for kind in kinds for each in terminalreporter.stats.get(kind, [])
        ]
        by_row = {report.nodeid: report for report in reports}
        lines = ["| check | result | verdict |", "|---|---|---|"]
        for nodeid in self._rows:
            name = nodeid.partition("::test_")[2].replace("_", " ")
            cells = f"{_group_of(nodeid)}: {name}", *result_of(by_row.get(nodeid))
            lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
        minutes = f"{(time.time() - self._begin) / 60:.1f} minutes"
        lines += [
            "",
            f"{len(self._rows)} checks in {minutes}, by `python -m benchmarks card`.",
        ]
        if not self._setting.is_real:
            lines += [
                "",
                "**No GPU computed this: null GPUs, or replicas on a processor.**",
            ]
        facts = {
            "devices": " ".join(map(str, self._setting.devices)),
            **describe(self._load),
        }
        lines += [
            "",
            "```text",
            *(f"{name}: {each}" for name, each in facts.items()),
            "```",
            "",
        ]
        self._file.write_text("\n".join(lines), encoding="utf-8")
        terminalreporter.write_line(f"the page to paste: {self._file}")


def result_of(report):
    """The result of a row, and the verdict."""
    if report is None:
        return "", NOT_REACHED
    if report.passed:
        return ", ".join(words for _, words in report.user_properties), "passed"
    if report.skipped:
        reason = report.longrepr[2].removeprefix("Skipped: ")
        return reason, NOT_REACHED if reason.startswith(NOT_REACHED) else "not run"
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr).splitlines()[0][
        :300
    ], "FAILED"
