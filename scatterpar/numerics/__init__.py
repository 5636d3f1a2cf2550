"""Numbers that were computed in different ways: how far apart rounding may bring them.

::

    comparison          gradients and outputs beside each other
    rounding            how far rounding may change results
    nudges              what a small change of parameters makes of results
    wider_precision     modules computed in a wider format
    constant_numbers    random operators that give constant numbers

Knows neither the engine nor its steps.

Imports ``devices``, and the files that every package may import.

The thread that calls it computes; nothing is shared.
"""
