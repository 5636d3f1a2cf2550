"""Compare a step in parts with plain torch in one piece, on a few rows.

Before the sub-steps of steps 1, 2, 4, 8, … of a kind of criterion and batch, the engine
computes a few of the user's rows twice: at once, by the user's own module and criterion
in plain torch, and in parts, as it is about to. If loss or gradient differ by more than
rounding, it refuses before anything changes, and says what would be right::

    verifier            the engine's looks: errors and warnings  dropped_warnings,
                                                            look_words
      schedule          when to look; the ranges of labels
      choice            which candidates of a loop a look tells apart
      look_request      which step, with how many rows
      rows              which rows, in which parts
      look              two runs, and the verdict
        runs            loss and gradients of rows          results,
                                                            backward_calls
        measurements    outputs, memory, state that moves     moved_state
        user_code       restores what runs have changed     dropped_records
        look_rounding   what rounding explains: who is asked, in which order
        look_results    results, and further runs on demand output_differences
        row_broadcasts  rows of a micro-batch that are taken for columns
        look_causes     why not: questions to these results
        verdicts        words for the cause, which is of the list in ``causes``
    output_looks        the pair's looks: rows of its outputs in the place of a module's
    gradient_check      ``engine.check``: the same question over all rows of a step

How numbers are compared, and how far rounding may bring them apart, is in ``numerics``.

Imports ``step``, ``causes`` and the packages below them.

The engine asks in the caller's thread; the rows are computed in the workers' threads.
"""
