"""Compare a step in parts with plain torch in one piece, on a few rows.

Before the sub-steps of steps 1, 2, 4, 8, … of a kind of criterion and batch, the engine
computes a few of the user's rows twice: in one piece, by the user's own module and
criterion in plain torch, and in parts, as it is about to. If loss or gradient differ by
more than rounding, it refuses before anything changes, and says what would be right.

A refusal, from the step to its words, in the order in which the files are read::

    step        verifier         asks in each step; warns and raises
                  schedule       is a check due? in 1, 2, 4, 8, …, and for new labels
    rows          look_request   of which batch, for how many rows
                  rows           which rows, in which parts
                  choice         which of several rules for a number of a call is right
    numbers       look           two runs, one after the other
                    runs         loss and gradients: of the user's module, of a replica
                    results      what runs are compared by
                    user_code    undoes what runs have changed: dropped_messages
    state           measurements, moved_state, backward_calls
                                 what calls leave behind, told by name
    question        look_rounding    may the difference be rounding? who is asked first
                    look_results     further numbers, on demand: output_differences
                    row_broadcasts   are rows of a micro-batch taken for columns?
    cause           look_causes  the first question that is answered yes; the order is
                                 that of ``causes``
    words           verdicts     what becomes of the step, and why
                  look_words     the error, with its rows and the way out

Beside it: ``output_looks`` asks of the pair's outputs in the place of a module's, and
``gradient_check`` is ``engine.check``: the same question over all rows of a step.

How numbers are compared, and how far rounding may bring them apart, is in ``numerics``.

Imports ``step``, ``causes`` and the packages below them.

The engine asks in the caller's thread; the rows are computed in the workers' threads.
"""
