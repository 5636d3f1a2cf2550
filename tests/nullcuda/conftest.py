"""These tests need the null CUDA: ``tests/nullcuda/run`` makes it. Elsewhere they are
left out.
"""

from __future__ import annotations

from nullcuda import card

NEED_IT = [
    "test_memory_of_calls.py",
    "test_memory_of_graphs.py",
    "test_memory_of_looks.py",
    "test_streams.py",
    "test_the_path.py",
]
collect_ignore = [] if card.is_null() else NEED_IT
