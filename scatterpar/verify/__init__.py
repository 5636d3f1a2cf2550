"""One question: is what this step computes in parts what plain torch computes at once?

Before the sub-steps of steps 1, 2, 4, 8, … of a kind of criterion and batch, the engine
computes a few of the user's rows twice: at once, by the user's own module and criterion
in plain torch, and in parts, as it is about to. If loss or gradient differ by more than
rounding, it refuses before anything changes, and says what would be right.

``verifier`` decides when, and writes errors and warnings. ``look`` computes and
compares. ``rows`` chooses rows. ``user_state`` saves and restores what user code
changes. ``gradient_check`` is ``engine.check``: the same question over all rows,
through the step's own schedule. The engine imports this package; of the integrations,
only ``transformers.py`` does.
"""

from scatterpar.verify.verifier import fits

__all__ = ["fits"]
