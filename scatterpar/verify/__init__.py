"""Check that the engine combines losses correctly, and that its gradient is right.

Before the sub-steps the check runs on some rows, and everything that it changes is restored::

    parts    = choose_rows(batch)                              rows that differ as much as they can
    outputs  = module(all rows), without a graph
    expected = d criterion(outputs, targets) / d outputs                                of all rows
    combined = sum of weight * d criterion(outputs, targets) / d outputs               of each part
    if they differ by more than rounding, and a second choice of rows does not agree:
        raise ValueError(what the criterion seems to do, what to pass)

If the criterion refers to the module, the replica's loss of a few rows must equal that of the
user's own module in plain torch (``few_rows``, which also tells of outputs that depend on other
rows). ``engine.check`` compares the gradients of a whole batch when the user asks. The engine
imports this package; of the integrations, only ``trainer_base.py`` does.
"""
