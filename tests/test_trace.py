"""The former place of ``scatterpar.Trace``."""

import pytest

import scatterpar
import scatterpar.trace


def test_former_place_works_and_warns():
    with pytest.warns(DeprecationWarning, match="is scatterpar.Trace now"):
        from scatterpar.trace import Trace
    assert Trace is scatterpar.Trace


def test_unknown_name_is_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Tracer'"):
        _ = scatterpar.trace.Tracer
