"""Several processes, one per machine: collectives, and the exchange of a step.

Only the engine uses this package, with the outcome of its step, if it has a process group.
"""
