"""Several processes, one a machine: what they agree on, and the one exchange of a step.

Only the engine comes in here, with the outcome of its own step, and only where it was given a
process group.
"""
