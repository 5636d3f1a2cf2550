"""Random operators that repeat themselves, and the coarsest dtype of a step."""

from __future__ import annotations

import pytest
import torch

from scatterpar.splitting.operator_modes import (
    Numbers,
    RepeatedNumbers,
    WatchedOperators,
)

pytestmark = pytest.mark.draws


def repeated(numbers, *fixed_shapes):
    return RepeatedNumbers(numbers, frozenset(fixed_shapes))


def test_calls_give_rows_the_same_number():
    with repeated(Numbers.CONSTANT):
        few, many = torch.rand(2, 3), torch.randn(5, 3)
    assert few.unique().tolist() == many.unique().tolist()
    assert len(few.unique()) == 1


def test_varied_rows_alike_columns_differ():
    with repeated(Numbers.VARIED):
        mask = torch.rand(3, 4)
    assert torch.equal(mask[0], mask[2])
    first_multiples = [0.618, 0.236, 0.854, 0.472]  # of the golden ratio, modulo one
    torch.testing.assert_close(
        mask[0], torch.tensor(first_multiples), atol=1e-3, rtol=0
    )


def test_integers_are_the_same_in_every_call():
    with repeated(Numbers.CONSTANT):
        first, second = torch.randint(1000, (3,)), torch.randint(1000, (5,))
    assert {*first.tolist()} == {*second.tolist()}


def test_permutation_keeps_the_order():
    with repeated(Numbers.CONSTANT):
        assert torch.randperm(4).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("replacement", "count", "drawn"),
    [(True, 4, [[1, 0, 2, 1], [2, 1, 0, 2]]), (False, 2, [[1, 0], [2, 1]])],
)
def test_sample_has_most_likely_categories(replacement, count, drawn):
    probabilities = torch.tensor([[0.3, 0.6, 0.1], [0.1, 0.2, 0.7]])
    with repeated(Numbers.CONSTANT):
        assert torch.multinomial(probabilities, count, replacement).tolist() == drawn


def test_other_operators_unchanged():
    with repeated(Numbers.VARIED):
        assert (torch.arange(3) * 2).tolist() == [0, 2, 4]


def inside_of_a_list(value):
    return torch.cat([value.float(), value.bfloat16()]).double()


@pytest.mark.parametrize(
    ("compute", "coarsest"),
    [
        (lambda value: value * 2, None),
        (lambda value: value > 0, None),
        (torch.Tensor.float, torch.float32),
        (lambda value: value.float().half(), torch.float16),
        (lambda value: (value.float(), value.half()), torch.float16),
        (inside_of_a_list, torch.bfloat16),
        (lambda value: torch.ones(2).half(), torch.float16),
    ],
)
def test_coarsest_dtype_of_casts(compute, coarsest):
    with WatchedOperators(in_double=False) as dtypes:
        compute(torch.ones(2, dtype=torch.float64))
    assert dtypes.coarsest == coarsest


@torch.library.custom_op("scatterpar_tests::halves", mutates_args=())
def halves(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.half()


@pytest.mark.parametrize(
    ("dtype", "coarsest"), [(torch.float64, torch.float16), (torch.float32, None)]
)
def test_kernel_that_casts_is_seen(dtype, coarsest):
    """In float64 only what was in float64 is rounded."""
    numbers = torch.ones(2, dtype=dtype)
    with WatchedOperators(in_double=True) as dtypes:
        halves(numbers)
    assert dtypes.coarsest == coarsest


def test_varied_weights_differ_and_rows_do_not():
    with repeated(Numbers.VARIED, (3, 4)) as numbers:
        weights, rows = torch.rand(3, 4), torch.rand(5, 4)
    assert len(weights.unique()) == 12
    assert torch.equal(rows[0], rows[4])
    assert numbers.draws == {(3, 4): 1, (5, 4): 1}


def double():
    return torch.ones(3, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    "cast",
    [
        lambda x: x.to(torch.bfloat16),
        lambda x: x.half(),
        lambda x: x.float().type(torch.float16),
        lambda x: x.new_zeros(3, dtype=torch.float32) + x,
        lambda x: torch.tensor([1.0], dtype=torch.float32),
        lambda x: x.sum(dtype=torch.float32),
        lambda x: torch.nn.Linear(3, 3).bfloat16()(x),
    ],
)
def test_casts_give_float64(cast):
    with WatchedOperators(in_double=True):
        torch.set_default_dtype(torch.float64)
        try:
            result = cast(double())
        finally:
            torch.set_default_dtype(torch.float32)
    assert result.dtype == torch.float64


def test_gradient_passes_a_cast_in_float64():
    numbers = double()
    with WatchedOperators(in_double=True):
        (numbers / 3).to(torch.bfloat16).float().sum().backward()
        assert torch.arange(3).to(torch.int32).dtype == torch.int32
    assert numbers.grad.tolist() == [1 / 3] * 3
