"""Arguments that make no sense are refused before anything runs."""

import pytest
from splitting.loop_models import Net, backward_sums, images, new, pairs

from scatterpar import splitcheck


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"parts": 0}, ValueError, "parts must be at least 1, got 0"),
        ({"ranks": -1}, ValueError, "ranks must be at least 1, got -1"),
        ({"parts": 2.0}, TypeError, "parts must be an int, got 2.0"),
        ({"parts": 1}, ValueError, "compares the step with itself"),
        ({"parts": 13}, ValueError, "24 rows, too few for 13 parts"),
        ({"parts": 5, "equal": True}, ValueError, "a multiple of 5 rows, or equal=F"),
        ({"loss": 1}, TypeError, "loss must be a function"),
        ({"timeout": 0}, ValueError, "timeout must be positive"),
    ],
)
def test_senseless_arguments_refused(options, error, words):
    with pytest.raises(error, match=words):
        splitcheck(backward_sums, new(Net), images(), **options)


def test_non_functions_and_modules_refused():
    with pytest.raises(TypeError, match="step must be a function"):
        splitcheck(1, new(Net), images())
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, got"):
        splitcheck(backward_sums, backward_sums, images())
    with pytest.raises(ValueError, match=r"per row as Rows\(entries\)"):
        splitcheck(backward_sums, new(Net), ["a"] * 16)


def test_ranks_need_a_model_on_the_cpu():
    with pytest.raises(ValueError, match="on meta; with ranks= pass it on the CPU"):
        splitcheck(backward_sums, new(Net).to("meta"), pairs(), ranks=2)
