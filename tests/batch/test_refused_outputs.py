"""Outputs that a step, inference or the pair refuse; those with a graph in an object
are in ``objects/test_reach.py``.
"""

from __future__ import annotations

import pytest
import torch

from scatterpar.batch.refused_outputs import refuse_generators, refuse_unjoinable


def test_generators_distributions_refused():
    with pytest.raises(TypeError, match="a generator, an iterator; return a list"):
        refuse_generators({"rows": (row for row in [1])})
    with pytest.raises(TypeError, match="a Normal, a distribution"):
        refuse_unjoinable([torch.distributions.Normal(0.0, 1.0)])


def test_sparse_outputs_refused():
    with pytest.raises(TypeError, match=r"return output\.to_dense"):
        refuse_unjoinable({"rows": torch.eye(2).to_sparse()})
