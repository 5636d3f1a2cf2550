"""What happens to a batch, in its order: request, scatter, weights, sub-steps, reduce, commit.

The engine, the pair and ``machines`` come in here. A step knows replicas and threads below it,
and nothing of several machines.
"""
