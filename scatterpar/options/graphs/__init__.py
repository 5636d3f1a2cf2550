"""Captured sub-steps: whether, which, replayed and proved."""
