"""Every private entry point of torch that the package uses.

No other file of the package names ``torch._C`` or another private module of torch. If a
version of torch lacks an entry point, ``Missing`` names it, at import or at its first
use. The versions that the tests ran with are in ``constraints.txt``.

::

    entry_points    are they there?
    tensors         flat ones, versions, subclasses
    autograd        its graph, the leaves and hooks in it
    thread_modes    modes, transforms and profilers of this thread
    random_key      the dispatch key of random operators
    modules         parametrizations, optimizers
    clipping        of gradients, in a step that is only looked at
    compiler        compiled modules and functions
    graphs          the capture of CUDA graphs
    settings        of the process; contexts that all threads share

Importers name the subject, so that they bring no other with them.

Other files call ``torch._foreach_*``, ``Tensor._version`` and
``Module._replicate_for_data_parallel`` directly: torch's own optimizers and
``nn.DataParallel`` use them too. ``entry_points`` checks that they exist.

Imports no other package, but ``libraries.py``.

Any thread calls it.
"""
