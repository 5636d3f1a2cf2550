"""The meter counts what code does, and nothing of how it is written."""

import re

import pytest

from tests import size


@pytest.mark.parametrize(
    "text",
    [
        "x = f(1)",
        "x = f(\n    1\n)\n",
        '"""What x is."""\n# why\nx: int = f(1)  # here',
        "import os\nfrom os import path\nx = f(1)",
    ],
    ids=["plain", "lines", "words", "imports"],
)
def test_one_thought_has_one_size(text):
    assert size.tokens_in(text) == 6


def test_functions_count_without_annotations():
    bare = "def f(a):\n    return a\n"
    annotated = 'def f(a: int) -> int:\n    """a."""\n    return a\n'
    assert size.tokens_in(annotated) == size.tokens_in(bare)


def test_difference_names_each_changed_file(capsys):
    before = size.Counter({"scatterpar/a.py": 10, "scatterpar/b.py": 5})
    now = size.Counter({"scatterpar/a.py": 10, "scatterpar/c.py": 7})
    size.print_difference(before, now)
    printed = capsys.readouterr().out
    assert "a.py" not in printed
    assert [line.split()[0] for line in printed.splitlines()] == ["+7", "-5", "+2"]


def test_formatted_string_is_one_token():
    """Python 3.12 reads the parts of one: a bound that held on 3.11 failed on 3.13."""
    assert size.tokens_in("""f"{name!r} of {f'{count + 1}'}"\n""") == 1
    assert size.tokens_in("text = f'{name} {count:{width}d}' + other\n") == 5


@pytest.fixture(scope="module")
def sizes():
    return size.sizes_now()


def test_sizes_of_mechanisms_are_about_right(sizes):
    """They say what is large; a test that wants more is met by the letter."""
    rows = size.mechanisms()
    assert len(rows) > 30
    all_names = {name for names, _ in rows for name in names}
    for names, told in rows:
        now = size.size_of_mechanism(names, sizes, all_names)
        is_close = abs(now - told) <= 300 + told // 4
        assert is_close, f"{names}: {told} of {now}; run python -m tests.size --write"


def test_page_of_sizes_changes_nothing_else(sizes):
    page = size.PAGE.read_text("utf-8")
    written = size.page_with_sizes(sizes)
    assert re.sub(r"\| [\d,]+ \|", "", written) == size.re.sub(
        r"\| [\d,]+ \|", "", page
    )
