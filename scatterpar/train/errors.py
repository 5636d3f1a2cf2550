"""The one kind of error that ends the tool with a line and exit code 2."""


class UsageError(Exception):
    """What the user asked for cannot be done; the message is one line that says why."""
