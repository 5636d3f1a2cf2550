"""The table of mutations is whole; ``python -m nullcuda.mutations`` tries whether tests
fail.
"""

from __future__ import annotations

from nullcuda import mutations


def test_each_wait_has_a_mutation():
    assert mutations.faults_of_the_table() == []
