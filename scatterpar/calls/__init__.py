"""A call of a module by all replicas, with a graph: what ``nn.DataParallel`` does.

Imports ``step``, ``replicas`` and what is below them; ``engine`` and ``pair`` import it.

The caller's thread divides and joins; the workers call the replicas; autograd's threads
run the backward passes, in which gradients are added or wait.
"""
