"""A check from a shell: its exit codes, its table, its file."""

from __future__ import annotations

import json

import pytest

from scatterpar.splitting.command import main

PROGRAM = """
import torch
from torch import nn
from torch.nn.functional import mse_loss


def step(model, batches):
    for rows, targets in batches:
        (mse_loss(model(rows), targets) / DIVISOR).backward()


def check():
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(16, 3, generator=generator), torch.zeros(16, 2)
    return step, nn.Linear(3, 2), batch


def nothing():
    return None


def fail():
    raise ValueError("of the loop")
"""


@pytest.fixture
def program(tmp_path, request):
    def write(divisor):
        # Files of one name would be one module.
        path = tmp_path / f"program_{abs(hash(request.node.name))}.py"
        path.write_text(PROGRAM.replace("DIVISOR", divisor), encoding="utf-8")
        return str(path)

    return write


@pytest.mark.draws
@pytest.mark.parametrize(("divisor", "code"), [("len(batches)", 0), ("1", 1)])
def test_exit_code_is_that_of_the_grid(program, divisor, code, tmp_path, capsys):
    file = tmp_path / "split.json"
    target = f"{program(divisor)}:check"
    arguments = [target, "--parts", "1,4", "--ranks", "1", "--json", str(file)]
    assert main(arguments) == code
    printed = capsys.readouterr().out
    assert "4 + 4 + 4 + 4" in printed
    assert ("constant factor" in printed) == bool(code)
    assert json.loads(file.read_text(encoding="utf-8"))["passed"] == (not code)


def refuse(arguments):
    """An argument is wrong: the command ends with 2."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("check:missing", "names no function of a file"),
        ("missing", ":missing names no function of a file"),
        ("nothing", "nothing must return step, model, batch"),
    ],
)
def test_wrong_arguments_end_with_2(program, function, words, capsys):
    refuse([f"{program('1')}:{function}"])
    assert words in capsys.readouterr().err


@pytest.mark.draws
def test_rows_that_do_not_divide_end_with_2(program, capsys):
    target = f"{program('1')}:check"
    refuse([target, "--parts", "5", "--ranks", "1"])
    assert "16 rows cannot be cut into 5 equal parts" in capsys.readouterr().err
    refuse([target, "--parts", "x"])


@pytest.mark.draws
def test_error_of_the_users_loop_stays_as_it_is(program):
    """Python prints it with its traceback, and ends with 1: no argument is wrong."""
    with pytest.raises(ValueError, match="of the loop") as raised:
        main([f"{program('fail()')}:check", "--parts", "4", "--ranks", "1"])
    assert raised.traceback[-1].name == "fail"


def test_error_of_the_users_function_stays_as_it_is(program):
    with pytest.raises(ValueError, match="of the loop"):
        main([f"{program('1')}:fail"])


def test_folder_of_json_is_checked_first(program, tmp_path, capsys):
    missing = str(tmp_path / "missing" / "split.json")
    refuse([f"{program('fail()')}:check", "--json", missing])
    assert "for --json; make it" in capsys.readouterr().err
