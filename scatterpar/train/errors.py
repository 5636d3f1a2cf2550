"""The one kind of error that ends the tool with a line and exit code 2."""


class UsageError(Exception):
    """What the user asked for cannot be done; the message is one line that says why."""


def words_of(error: BaseException) -> str:
    """An error's message in one line, or its kind where it has none."""
    return " ".join(str(error).split()) or type(error).__name__
