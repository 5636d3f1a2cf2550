"""The former place of ``scatterpar.Trace``."""

import pytest

import scatterpar
import scatterpar.trace


def test_the_former_place_of_the_class_works_and_warns():
    with pytest.warns(DeprecationWarning, match="is scatterpar.Trace now"):
        from scatterpar.trace import Trace
    assert Trace is scatterpar.Trace


def test_a_name_that_was_never_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Tracer'"):
        _ = scatterpar.trace.Tracer
