"""``python -m benchmarks card``: what the page says of rows that fail, hang or crash,
and when.
"""

import sys
from pathlib import Path

import pytest
import torch
from faults.processes import run

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))
pytest.importorskip("pytest_timeout")

from benchmarks.card import BUDGETS, main  # noqa: E402

RUN = "import sys, pathlib; sys.path.append(sys.argv[1]); from benchmarks import card; "
RUN += "card.HERE = pathlib.Path(sys.argv[2]); sys.exit(card.main(sys.argv[3:]))"


def written(tmp_path, *options, **rows):
    """The exit code, and the rows of the page, of a run on two virtual devices."""
    for group, code in rows.items():
        (tmp_path / f"{group}.py").write_text(f"import os, time, pytest\n{code}")
    page = tmp_path / "card.md"
    options = ("--devices", "cpu:0,cpu:1", "--page", str(page), *options)
    folder = tmp_path if rows else ROOT / "benchmarks" / "card"
    outcome = run("-c", RUN, str(ROOT), str(folder), *options)
    return outcome.code, page.read_text(encoding="utf-8").split("\n\n")


def test_ten_minutes_are_a_sum():
    assert sum(budget for budget, _ in BUDGETS.values()) == 600


ROWS = """
def test_sound_one(say): say("1.02 | fine")
def test_wrong(): assert 1 == 2, "2 of 3 tensors differ"
@pytest.mark.needs(4)
def test_more(): pass
@pytest.mark.cuda
def test_cuda(): pass

import torch
from benchmarks.card.bits import compare, slow_copies

def test_bits(say):
    one, other = [torch.ones(3), torch.zeros(2)], [torch.ones(3), torch.tensor([0.0, -0.0])]
    say(compare(one, one))
    compare(one, other)

"""


def test_rows_say_what_they_found(tmp_path):
    code, (table, *others) = written(tmp_path, machine=ROWS)
    assert code == 1
    assert table.splitlines() == [
        "| check | result | verdict |",
        "|---|---|---|",
        "| machine: sound one | 1.02 / fine | passed |",
        "| machine: wrong | AssertionError: 2 of 3 tensors differ | FAILED |",
        "| machine: more | 4 devices are needed, and 2 are here | not run |",
        "| machine: cuda | CPU replicas have no CUDA | not run |",
        "| machine: bits | AssertionError: 1 of 2 tensors differ, by 0.0e+00 at most "
        "| FAILED |",
    ]
    assert (
        others[1] == "**No GPU computed this: null GPUs, or replicas on a processor.**"
    )
    assert f"PyTorch version: {torch.__version__}" in "".join(others)


@pytest.mark.slow
def test_one_that_crashes_fails_and_one_that_hangs_is_not_reached(tmp_path):
    hangs = "def test_hangs(): time.sleep(1000)"
    crashes = "def test_crashes(): os._exit(3)\ndef test_last(say): say('here')"
    code, (table, *_) = written(
        tmp_path, "--seconds", "400", machine=hangs, bits=crashes
    )
    assert code == 1
    assert table.splitlines()[2:] == [
        "| machine: hangs | not reached: ended by its limit; see stacks.txt | not "
        "reached |",
        "| bits: crashes | its process ended | FAILED |",
        "| bits: last | here | passed |",
    ]
    assert "test_hangs" in (tmp_path / "card" / "stacks.txt").read_text()


@pytest.mark.slow
def test_a_run_on_a_processor(tmp_path):
    code, (table, *_) = written(
        tmp_path, "-k", "dropout or processes or interrupt or ddp"
    )
    assert code == 0
    assert table.count("| the same bits in 60 tensors | passed |") == 2
    assert "apart, 2 devices | passed |" in table
    assert "| KeyboardInterrupt | passed |" in table


def test_wrong_devices_are_an_error(capsys):
    assert main(["--devices", "cuda:99"]) == pytest.ExitCode.USAGE_ERROR
    assert "cuda:99 is not here" in capsys.readouterr().err
