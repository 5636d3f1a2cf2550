"""``python -m tests.versions``: what it compares, and that it sees a lost behaviour."""

import copy
import os
import subprocess
import sys
from importlib import import_module

import pytest
import versions
from harness import missing_names, outcomes
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


def test_first_difference_of_each_part_counts():
    """Draws that differ do not hide other words in a later call."""
    drawn = CALL | CHANGES["generators"]
    found = differences(LINE | {"calls": [drawn, CALL | CHANGES["words"]]})
    calls = {difference.part: difference.call[-1] for difference in found}
    assert calls == {"generators": "0", "words": "1"}


def test_calls_after_another_outcome_are_not_compared():
    returned = CALL | CHANGES["outcome"] | CHANGES["bits"]
    found = differences(LINE | {"calls": [returned, CALL | CHANGES["told"]]})
    assert [difference.part for difference in found] == ["outcome"]


def test_file_that_cannot_be_imported_is_told_once():
    fails = {"program": "x.py", "test": "not collected", "why": "ImportError: no y"}
    old = {"x.py": fails | {"calls": []}}
    new = {f"x.py::test_{n}": LINE for n in range(3)}
    (found,) = versions.differences_of("cpu", old, new)
    kind = versions.kind_of(found)
    assert (kind.section, kind.call) == (versions.GAINED, "x.py")
    (found,) = versions.differences_of("cpu", new, old)
    assert versions.kind_of(found).section == versions.LOST


PACKAGE_WITH_LAZY_NAME = """
def __getattr__(name):
    if name == "lazy":
        return 5
    raise AttributeError(name)
"""
FILE_OF_ANOTHER_VERSION = """
import older.gone.deep
from older import gone, kept, lazy
from older.kept import Gone, VALUE
from older.moved import Base, helper

class Derived(Base):
    pass

def uses_value():
    return VALUE, kept.VALUE, lazy

def uses_class():
    return Gone(3)

def uses_base():
    return Derived()

def uses_module():
    return gone.helper()

def uses_function():
    return helper.of_rows(2)

def uses_attribute():
    return kept.missing

def uses_import():
    from older.kept import another
"""


@pytest.mark.parametrize("loaded", [(), ("older.kept",)])
def test_file_with_missing_names_is_imported(loaded, tmp_path, monkeypatch):
    """A function fails by the name that the version has not; the others run.

    So they do if a conftest has imported modules of the package before.
    """
    (tmp_path / "older").mkdir()
    (tmp_path / "older/__init__.py").write_text(PACKAGE_WITH_LAZY_NAME)
    (tmp_path / "older/kept.py").write_text("VALUE = 3")
    monkeypatch.syspath_prepend(tmp_path)
    for name in loaded:
        import_module(name)
    finder = missing_names.install("older")
    try:
        names = {}
        exec(compile(FILE_OF_ANOTHER_VERSION, "test_older.py", "exec"), names)
        assert names["uses_value"]() == (3, 3, 5)
        for use in ("class", "base", "module", "function", "attribute"):
            with pytest.raises(AttributeError, match="has no attribute '"):
                names[f"uses_{use}"]()
        with pytest.raises(ImportError):
            names["uses_import"]()
    finally:
        sys.meta_path.remove(finder)
        for name in [*sys.modules]:
            if name.split(".")[0] == "older":
                del sys.modules[name]


def found_in(part, old, new, program="test_x", call="check, call 0"):
    return versions.Difference("cpu", program, part, call, old, new)


@pytest.mark.parametrize(
    ("part", "again", "is_lasting"),
    [
        ("words", ("off by 0.5", "off by 7.25, of 3"), True),
        ("words", ("off by 0.5", "refused"), False),
        ("bits", ("1a", "2b"), True),
        ("bits", ("1a", "2c"), False),
    ],
)
def test_differences_of_one_run_are_left_out(part, again, is_lasting):
    first = ("1a", "2b") if part == "bits" else ("off by 0.25", "off by 1.5, of 3")
    found = found_in(part, *first)
    kept = versions.lasting([found], [found_in(part, *again)])
    assert kept == ([found] if is_lasting else [])


def test_programs_with_the_same_change_are_one_kind():
    """Whatever names and numbers are in the words, and whichever call says them."""
    kinds = {
        versions.kind_of(found_in("words", *words, call=call))
        for words, call in [
            (("'mask' moves 3 times; stop", "'mask' moves; stop"), "check, call 0"),
            (("'seen' moves 12 times; stop", "'seen' moves; stop"), "loss, call 4"),
        ]
    }
    assert len(kinds) == 1
    other = versions.kind_of(found_in("words", "'mask' moves; stop", "'mask'; stop"))
    assert other not in kinds


@pytest.mark.parametrize(
    ("part", "old", "new", "section"),
    [
        ("outcome", "returned", "ValueError", versions.LOST),
        ("outcome", "ValueError", "returned", versions.ACCEPTED),
        ("test", "passed", "failed assert", versions.LOST),
        ("test", "failed assert", "passed", versions.GAINED),
        ("program", "is there", "is missing", versions.LOST),
        ("program", "is missing", "is there", versions.GAINED),
        ("told", "a", "b", versions.SAID),
        ("bits", "1a", "2b", versions.COMPUTED),
    ],
)
def test_kinds_are_listed_by_what_they_mean(part, old, new, section):
    assert versions.kind_of(found_in(part, old, new)).section == section


KNOWN_KIND = {"part": "words", "old": "costs", "reason": "the argument has gone"}


@pytest.mark.parametrize(
    ("entry", "num_news"),
    [
        (KNOWN_KIND, 0),
        (KNOWN_KIND | {"old": "accum"}, 1),
        (KNOWN_KIND | {"part": "told"}, 1),
        (KNOWN_KIND | {"program": "tests/pair/*"}, 1),
        (KNOWN_KIND | {"program": "test_*", "place": "cpu"}, 0),
    ],
)
def test_known_kinds_are_not_printed(entry, num_news, monkeypatch, capsys):
    found = [found_in("words", "only count, costs, dim", "only count, dim")]
    monkeypatch.setattr(versions, "known_kinds", lambda: [entry])
    assert versions.print_kinds(found) == num_news
    assert ("costs" in capsys.readouterr().out) == bool(num_news)
    versions.print_kinds(found, show_known=True)
    assert "costs" in capsys.readouterr().out


def test_known_kinds_are_told_in_the_changelog():
    changelog = " ".join((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split())
    for entry in versions.known_kinds():
        assert {"reason", "changelog"} & entry.keys(), entry
        assert {"part", "section"} & entry.keys(), entry
        assert entry.get("changelog", "") in changelog, entry


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
