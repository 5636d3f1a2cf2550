"""A call of a module by all replicas, with a graph: what ``nn.DataParallel`` does.

Imports ``options`` and what is below it; the engine and the pair import it.

The caller's thread divides and joins. Workers call the replicas. Autograd's threads run
the backward passes, in which gradients are added or wait.
"""
