"""Which tests reach a line: the statement that is meant, and what a record answers
(tests/who.py).
"""

import inspect

import pytest
import who

from scatterpar import ScatterOnceParallel
from scatterpar.distributed.ranks import Ranks
from scatterpar.step.substeps import Substeps

TEXT = '''\
SIZE = 3


class Shelf:
    """Holds books."""

    width = 2

    @property
    def books(self):
        """All of them."""
        return [
            book
            for book in self.row
        ]

    def add(self, book):
        if book:
            self.row.append(book)
        else:
            raise ValueError(book)
'''


@pytest.mark.parametrize(
    ("line", "function", "lines"),
    [
        (1, "", [1]),
        (7, "", [7]),
        (9, "Shelf.books", [12, 13, 14, 15]),  # the decorator, for the first statement
        (11, "Shelf.books", [12, 13, 14, 15]),
        (14, "Shelf.books", [12, 13, 14, 15]),
        (17, "Shelf.add", [18]),
        (18, "Shelf.add", [18]),
        (19, "Shelf.add", [19]),
        (21, "Shelf.add", [21]),
    ],
)
def test_statement_at_a_line(line, function, lines):
    assert who.statement_at(TEXT, line) == (function, range(lines[0], lines[-1] + 1))


@pytest.mark.parametrize(
    ("old", "new", "line", "recorded"),
    [
        ("SIZE = 3\n", "SIZE = 3\nWIDTH = 4\n", 20, 19),  # moved by a line above it
        ("self.row.append", "self.row.insert", 19, 19),  # changed
        ("if book:\n", "if book:\n            print()\n", 19, 18),  # new
    ],
)
def test_changed_line_found_in_older_record(old, new, line, recorded):
    now = TEXT.replace(old, new)
    assert now != TEXT
    lines = range(line, line + 1)
    assert who.recorded_lines(TEXT, now, lines) == range(recorded, recorded + 1)


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("scatterpar/plan.py", "FILE:LINE"),
        ("tests/who.py:20", "a file of scatterpar/"),
        ("scatterpar/nowhere.py:20", "a file of scatterpar/"),
        ("scatterpar/plan.py:20", who.COMMAND),
    ],
)
def test_unanswered_question_has_remedy(place, words, tmp_path, monkeypatch):
    monkeypatch.chdir(who.ROOT)
    with pytest.raises(LookupError, match=words):
        who.question_of(who.Record(tmp_path), place)


def test_newer_file_is_left_out(tmp_path):
    coverage = pytest.importorskip("coverage")
    record = who.Record(tmp_path)
    record.sources.mkdir()
    (record.sources / "shelf.py").write_text(TEXT)
    data = coverage.CoverageData(str(record.lines))
    data.set_context("test_shelf (call)")
    data.add_lines({str(who.PACKAGE / f"{name}.py"): [19] for name in ("shelf", "new")})
    assert who._sizes(data, record) == {"test_shelf": 1}


@pytest.mark.slow
def test_record_has_threads_ranks_programs(tmp_path, monkeypatch):
    pytest.importorskip("coverage")
    monkeypatch.chdir(who.ROOT)
    record = who.Record(tmp_path / "who")
    tests = {  # by what they reach: in a replica's thread, in a rank, in a program
        Substeps.train: "tests/step/test_reduce.py::test_sum_is_rounded_once",
        Ranks.sum_of_all: "tests/step/test_reduce.py::test_ranks_add_up_in_wide_dtype",
        ScatterOnceParallel._step: "tests/faults/test_fault_exit.py::"
        "test_process_ends_soon_with_own_code",
    }
    chosen = ["-q", "-m", "slow or not slow", *tests.values()]
    assert who.make(record, chosen) == 0
    for function, test in tests.items():
        file = inspect.getsourcefile(function)
        line = inspect.getsourcelines(function)[1]
        words = who.answer(record, f"{file}:{line}")
        assert f"in {function.__qualname__}: " in words
        assert test in words
