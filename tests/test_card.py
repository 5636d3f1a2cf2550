"""``python -m benchmarks card``: the page grows by a line per finding, whatever ends it."""

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from faults.processes import environment, run

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))

from benchmarks.card import looks, main, predictions, rows, speed  # noqa: E402
from benchmarks.card import page as page_module  # noqa: E402

# Rows of a test in the place of the real ones: in this process and in those of rows.
CODE = """
import importlib.util, json, os, sys
sys.path.append({root!r})
from benchmarks.card import rows, run
spec = importlib.util.spec_from_file_location("benchmarks.card.tried", {file!r})
tried = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = tried
spec.loader.exec_module(tried)
rows.GROUPS = tried.GROUPS
"""


def tried(tmp_path, functions):
    """A file with rows, and the code of a process that has them."""
    file = tmp_path / "tried.py"
    file.write_text(
        f"import os, sys, time\nfrom benchmarks.card import rows\n{functions}"
    )
    start = CODE.format(root=str(ROOT), file=str(file))
    row = tmp_path / "row.py"
    row.write_text(f"{start}from benchmarks.card.row import main\nmain()\n")
    code = f"{start}from benchmarks import card\ncard.GROUPS = rows.GROUPS\n"
    code += f"run.ROW = [{str(row)!r}]\nsys.exit(card.main(sys.argv[1:]))"
    return code


def arguments(tmp_path, *options):
    page = tmp_path / "card.md"
    return page, ("--devices", "cpu:0,cpu:1", "--page", str(page), *options)


def table(page):
    text = page.read_text(encoding="utf-8")
    return re.findall(r"^\| (?!check|---)(.*) \|$", text, re.M)


ROWS = """
def sound(setting, say): say("1.02 | fine")
def wrong(setting, say): assert 1 == 2, "2 of 3 tensors differ"
def several(setting, say):
    say("first", "one")
    say("second", "other", "measured")
    raise RuntimeError("the third")
def prints(setting, say):
    print("noise"); os.system("echo noise")
    say("quiet")
def more(setting, say): pass
def crashes(setting, say): say("before", "one"); os._exit(3)
def hangs(setting, say): say("before", "one"); time.sleep(1000)

GROUPS = (
    rows.Group("first", 1.0, 3, (
        *(rows.Row(name, f"tried.{name}", 30.0) for name in ("sound", "wrong", "several", "prints")),
        rows.Row("more", "tried.more", 30.0, needs=4),
        rows.Row("cuda", "tried.more", 30.0, on="cuda"),
        rows.Row("crashes", "tried.crashes", 30.0),
        rows.Row("hangs", "tried.hangs", 12.0),
    )),
    rows.Group("late", 0.0, 1, (rows.Row("late", "tried.sound", 30.0),)),
)
"""


@pytest.mark.slow
def test_rows_tell_findings_limit_ends_one(tmp_path):
    page, options = arguments(tmp_path)
    outcome = run("-c", tried(tmp_path, ROWS), *options)
    assert outcome.code == 1, outcome.err
    assert sorted(table(page)) == [
        "crashes | its process ended with 3; see crashes.txt | FAILED",
        "crashes, one | before | passed",
        "cuda | CPU replicas have no CUDA | not run",
        "hangs | ended after 12 s; see hangs.txt | not reached",
        "hangs, one | before | passed",
        "late | the time of its group was over | not reached",
        "more | 4 devices are needed, and 2 are here | not run",
        "prints | quiet | passed",
        "several | RuntimeError: the third | FAILED",
        "several, one | first | passed",
        "several, other | second | measured",
        "sound | 1.02 / fine | passed",
        "wrong | 2 of 3 tensors differ | FAILED",
    ]
    text = page.read_text(encoding="utf-8")
    assert "**No GPU computed this: null GPUs, or replicas on a processor.**" in text
    assert f"torch: {torch.__version__}" in text
    assert "13 lines in" in text
    assert "in hangs" in (tmp_path / "card" / "hangs.txt").read_text()


LONG = """
def counts(setting, say):
    for number in range(1000):
        say(str(number), f"part {number}")
        open(setting.folder / "said.txt", "a").write(f"{number} {os.getpid()}\\n")
        time.sleep(0.05)

GROUPS = (rows.Group("only", 1.0, 1, (rows.Row("counts", "tried.counts", 600.0),)),)
"""


@pytest.mark.slow
def test_killed_run_leaves_page_no_process(tmp_path):
    page, options = arguments(tmp_path)
    command = [sys.executable, "-c", tried(tmp_path, LONG), *options]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL)
    said = tmp_path / "card" / "said.txt"
    while not said.exists() or len(said.read_text().splitlines()) < 20:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    found = table(page)
    assert len(found) >= 19  # the last one may be under way
    assert found == [f"counts, part {i} | {i} | passed" for i in range(len(found))]
    (worker,) = {line.split()[1] for line in said.read_text().splitlines()}
    for _ in range(200):
        if not _is_alive(int(worker)):
            break
        time.sleep(0.05)
    else:
        raise AssertionError("the process of the row is still there")


def _is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_every_row_is_found_groups_in_order():
    names = [row.name for group in rows.GROUPS for row in group.rows]
    assert len(names) == len(set(names))
    for group in rows.GROUPS:
        for row in group.rows:
            module, _, function = row.called.partition(".")
            text = (ROOT / "benchmarks" / "card" / f"{module}.py").read_text()
            assert f"\ndef {function}(" in text
            assert rows.by_name(row.name) is row
    parts = [group.until for group in rows.GROUPS]
    assert parts == sorted(parts)
    assert parts[-1] == 1.0


@pytest.mark.slow
def test_run_on_cpu_passes(tmp_path):
    page, options = arguments(tmp_path, "--seconds", "2000")
    words = "dropout", "two processes", "Ctrl-C", "gradient", "torch and timm"
    outcome = run("-m", "benchmarks", "card", *options, "--only", *words, silence=600.0)
    assert outcome.code == 0, outcome.err
    text = page.read_text(encoding="utf-8")
    assert text.count("| the same bits in 60 tensors | passed |") == 2
    assert "apart, 2 devices, of 1e-6 that are allowed | passed |" in text
    assert "| KeyboardInterrupt, and the next step works | passed |" in text
    look = r"\| looks, torch and timm, LSTM, without TF32 \| .* that are allowed .* measured"
    assert re.search(look, text)


def test_wrong_devices_are_an_error(capsys):
    assert main(["--devices", "cuda:99"]) == 2
    assert "cuda:99 is not here" in capsys.readouterr().err


@pytest.mark.parametrize("is_real", [False, True])
@pytest.mark.parametrize("tf32", [False, True])
def test_difference_above_tolerance_fails(is_real, tf32):
    """On null GPUs, too: it was "measured" there, and hid looks without dropout's."""
    setting = SimpleNamespace(is_real=is_real)
    for ratio in (1.01, 500.0, math.inf, math.nan):
        assert looks.verdict_on(ratio, setting, tf32).startswith(page_module.FAILED)
    for ratio in (0.0, 0.05, 1.0):
        assert not looks.verdict_on(ratio, setting, tf32).startswith(page_module.FAILED)


def test_page_has_predictions_of_the_code():
    page = (ROOT / "benchmarks" / "card" / "README.md").read_text(encoding="utf-8")
    for prediction in predictions.ALL:
        low, high = f"{prediction.low:.2f}", f"{prediction.high:.2f}"
        assert f"| {prediction.figure} | {low} to {high} |" in page


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (1.01, "as predicted: 1.01 is in 1 to 1.02"),
        (0.9, "below the prediction: 0.90, predicted 1 to 1.02"),
        (1.2, "MISSED: 1.20, predicted 1 to 1.02"),
    ],
)
def test_verdict_names_compared_figure(value, words):
    assert predictions.TWICE.verdict(value) == words


@pytest.mark.parametrize(
    ("copies", "kernels", "hidden"),
    [
        ([(0, 4)], [(0, 4)], 4),
        ([(0, 4), (6, 8)], [(1, 2), (1, 3), (7, 9)], 3),
        ([(0, 2)], [(2, 3)], 0),
        ([(0, 10)], [(1, 4), (3, 5), (5, 6)], 5),
    ],
)
def test_hidden_part_of_copies_by_hand(copies, kernels, hidden):
    assert speed.overlap(copies, kernels) == hidden


@pytest.mark.parametrize(
    ("launched", "found"),
    [
        ([0, 0, 0], [(1, 2), (6, 8)]),  # at the end no kernel follows
        ([3, 0, 0], [(6, 8)]),
        ([0, 0, 7], [(1, 2)]),
        ([0, 5, 5], [(1, 2), (6, 8)]),
    ],
)
def test_hideable_copies_by_hand(launched, found):
    copies = [(1, 2), (6, 8), (12, 13)]
    kernels = [(3, 4), (4, 6), (8, 12)]
    assert speed.with_next_kernel(copies, kernels, launched) == found


class _Event:
    def __init__(self, name, number, span, device):
        self.name = name
        self.id = number
        self.device_type = getattr(torch.autograd.DeviceType, device)
        self.time_range = SimpleNamespace(start=span[0], end=span[1])


def test_copies_before_launches_are_left_out(monkeypatch):
    events = [
        _Event("Memcpy HtoD (Pinned -> Device)", 1, (0, 4), "CUDA"),
        _Event("cudaLaunchKernel", 2, (5, 6), "CPU"),
        _Event("gemm", 2, (7, 10), "CUDA"),
        _Event("Memcpy HtoD (Pinned -> Device)", 3, (8, 11), "CUDA"),
    ]
    profile = SimpleNamespace(events=lambda: events)
    monkeypatch.setattr(
        torch.profiler, "profile", lambda **_: contextlib.nullcontext(profile)
    )
    said = []
    program = SimpleNamespace(run=lambda _: None)
    speed._say_hidden(lambda *words: said.append(words), program, None)
    assert [words[0] for words in said] == [
        "0.67 of 0.0 ms of 1 copies of 2, whose next kernel had been launched"
    ]
