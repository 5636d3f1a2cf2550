"""A batch: nested data, markers, rows by number, and joining rows again.

Imports ``devices``, and the files that every package may import.

The caller's thread takes a batch apart; each worker selects the rows of its replica.
"""
