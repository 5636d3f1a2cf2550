from scatterpar.look_steps import is_look_step


def test_looks_double_their_distance():
    assert [n for n in range(1, 40) if is_look_step(n)] == [1, 2, 4, 8, 16, 32]
