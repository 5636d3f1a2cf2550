"""A call of a module by all replicas, with a graph: what ``nn.DataParallel`` does.

Imports ``verify`` and what is below it; ``engine`` and ``pair`` import it.

The caller's thread divides and joins. Workers call the replicas. Autograd's threads run
the backward passes, in which gradients are added or wait.
"""
