"""The steps in which a costly check is made.

::

    steps    1  2  3  4  5  6  7  8  9  10  11  12  13  14  15  16  17 …
    looks    x  x     x           x                              x
"""


def is_look_step(number: int) -> bool:
    """Whether the step with this ``number``, counted from 1, is 1, 2, 4, 8, …"""
    # A power of two has one bit.
    return number & (number - 1) == 0
