"""Nested data, markers, and rows by number."""
