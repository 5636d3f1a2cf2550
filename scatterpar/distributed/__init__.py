"""Several processes, one per machine: collectives, and the exchange of a step.

Imports ``step`` and what is below it.

The caller's thread alone runs it: a collective has one order on all ranks.
"""
