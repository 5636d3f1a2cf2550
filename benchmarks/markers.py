"""Tables in pages: the text between two markers that a program writes again."""

from pathlib import Path


def between(name: str, text: str) -> tuple[str, str, str]:
    """What a page has before, between and after the markers of ``name``.

    >>> between("ms", "A\\n<!-- ms -->\\n| 1 |\\n<!-- /ms -->\\nZ")
    ('A\\n<!-- ms -->\\n', '| 1 |', '\\n<!-- /ms -->\\nZ')

    Raises ``ValueError`` unless the page has the pair of markers once.
    """
    opening = f"<!-- {name} -->\n"
    closing = f"<!-- /{name} -->"
    count = text.count(opening)
    if count != 1 or text.count(closing) != 1:
        raise ValueError(f"the page needs the markers of {name!r} once, has {count}")
    before, _, following = text.partition(opening)
    table, _, after = following.partition(closing)
    return before + opening, table.removesuffix("\n"), f"\n{closing}{after}"


def replace(page: Path, name: str, table: str) -> None:
    """Write ``table`` between the page's markers of ``name``."""
    before, _, after = between(name, page.read_text(encoding="utf-8"))
    page.write_text(before + table + after, encoding="utf-8")
