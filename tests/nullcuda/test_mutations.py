"""The table of mutations is whole; ``python -m nullcuda.mutations`` tries whether tests
fail.
"""

from __future__ import annotations

from nullcuda import mutations


def test_every_wait_of_the_engine_is_taken_out_by_a_mutation():
    assert mutations.faults_of_the_table() == []
