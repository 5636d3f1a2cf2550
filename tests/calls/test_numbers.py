from harness.oracle import randint, randn

from scatterpar.calls.numbers import BY_ROWS, SUM, rules_for, weights_of

ROWS, LABELS = randn(6, 3), randint(4, 6, 5)
PARTS = [range(4), range(4, 6)]


def test_rules_are_of_integer_tensors_with_rows():
    words = [rule.words for rule in rules_for((ROWS, {"labels": LABELS}), 0)]
    assert len(words) == 4
    assert (words[0], words[-1]) == (BY_ROWS.words, SUM.words)
    assert "shifted" in words[2]


def test_weights_count_labels_that_are_not_ignored():
    labels = LABELS.clone()
    labels[0] = -100
    labels[5, 0] = -100
    arguments = ((ROWS,), {"labels": labels})
    weights = [weights_of(rule, arguments, PARTS) for rule in rules_for(arguments, 0)]
    by_part = [weight.by_piece for weight in weights]
    assert by_part == [[4, 2], [15, 9], [12, 8], [4, 2]]
    assert [weight.is_sum for weight in weights] == [False, False, False, True]
