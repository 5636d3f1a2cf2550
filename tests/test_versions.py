"""``python -m tests.versions``: what it compares, and that it sees a lost behaviour."""

import copy
import os
import subprocess

import pytest
import versions
from harness import outcomes
from versions import ROOT

CALL = {
    "call": "ScatterOnceParallel.forward_backward",
    "outcome": "ValueError",
    "words": "losses differ; pass count=",
    "told": ["dropout draws"],
    "report": "rows 0 to 8",
    "generators": {"torch": "1a", "accelerator 0": "2b"},
    "bits": "3c",
    "module": "4d",
    "gradients": "5e",
}
LINE = {"program": "test_x", "test": "passed", "why": "", "calls": [CALL, CALL]}
CHANGES = {  # of the second call
    "outcome": {"outcome": "returned"},
    "words": {"words": "losses differ; pass reduction="},
    "told": {"told": []},
    "report": {"report": "rows 0 to 9"},
    "generators": {"generators": {"torch": "1a", "accelerator 0": "2c"}},
    "bits": {"gradients": "5f"},
}


def differences(line):
    return versions.differences_of("cpu", {"test_x": LINE}, {"test_x": line})


def test_equal_outcomes_have_no_difference():
    assert differences(copy.deepcopy(LINE)) == []


@pytest.mark.parametrize("part", CHANGES)
def test_each_part_of_a_call_is_compared(part):
    (found,) = differences(LINE | {"calls": [CALL, CALL | CHANGES[part]]})
    assert (found.program, found.part) == ("test_x", part)
    assert found.call == "ScatterOnceParallel.forward_backward, call 1"
    assert found.old != found.new


@pytest.mark.parametrize(
    "change", [{"test": "failed", "why": "not exact"}, {"calls": [CALL]}]
)
def test_tests_are_compared(change):
    assert len(differences(LINE | change)) == 1


def test_missing_program_is_a_difference():
    (found,) = versions.differences_of("cpu", {"test_x": LINE}, {})
    assert (found.old, found.new) == ("is there", "is missing")


def test_words_are_compared_without_what_varies():
    words = [f"at 0x{7 * n:x} in /tmp/{n}/x.py:{n} after {n}.5 s" for n in (1, 2)]
    assert len({*map(outcomes.in_general, words)}) == 1
    assert outcomes.in_general("rows 1 to 3") != outcomes.in_general("rows 1 to 4")


def git(*arguments):
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, check=False
    )


HOOKS = ("--on", "cpu", "--tests", "tests/step/test_commit.py", "--only", "hook")


@pytest.mark.slow
@pytest.mark.parametrize("breaks", [False, True])
def test_lost_behaviour_is_printed(breaks, monkeypatch, capsys):
    if git("rev-parse", "HEAD").returncode:
        pytest.skip("there is no repository here")
    check_out = versions._check_out

    def checking_out(ref, folder, paths):
        check_out(ref, folder, paths)
        if breaks and folder.name == "new":
            file = folder / "scatterpar" / "step" / "commit.py"
            text = file.read_text()
            line = "        _add(pairs, attempt, observed=True)\n"
            assert text.count(line) == 1
            file.write_text(text.replace(line, "        pairs.clear()\n"))

    monkeypatch.setattr(versions, "_check_out", checking_out)
    monkeypatch.setitem(os.environ, "PYTHONDONTWRITEBYTECODE", "1")
    code = versions.main(["HEAD", "HEAD", *HOOKS])
    assert code == int(breaks)
    assert ("0 differences" in capsys.readouterr().out) != breaks
