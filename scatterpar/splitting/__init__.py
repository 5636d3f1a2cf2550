"""``splitcheck``: is the gradient of anybody's training loop that of the whole batch?

The engine has no part in it.

Imports ``causes`` and the packages below it: neither steps nor replicas.

Runs in the caller's thread, or in processes of its own.

- ``check`` compares, and reports; ``grid`` checks several splits;
- ``trainers`` runs a library's trainer as a step, of which ``library_steps`` has the
  lines for each library;
- ``row_parts`` cuts the rows of the batch;
- ``trial`` is one comparison, and ``check_report`` what it shows; ``split_runs`` runs
  its step on any split: in this process, which ``process_state`` restores, or on ranks
  (``rank_processes``). Both call ``step_run``. ``steady_numbers`` finds out which
  random numbers the step gets;
- ``split_results`` has the figures on which causes are tested, with ``gradients``;
  ``split_causes`` asks the questions, and ``cause_words`` has the words.
"""

from scatterpar.splitting.check import splitcheck
from scatterpar.splitting.check_report import SplitCheck
from scatterpar.splitting.grid import SplitGrid, splitgrid
from scatterpar.splitting.trainers import of_trainer

__all__ = [
    "SplitCheck",
    "SplitGrid",
    "of_trainer",
    "splitcheck",
    "splitgrid",
]
