"""Exact, or told: does the engine combine losses as it should, and is its gradient right?

Only the engine comes in here, once per kind of criterion and batch, or when the user asks with
``engine.check``. Nothing that is computed here becomes part of a step.
"""
