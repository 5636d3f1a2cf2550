"""``DataParallelModel`` and ``DataParallelCriterion``: outputs stay where they are
computed.

Imports ``calls`` and what is below it; the engine never imports it.

The caller's thread copies and combines; the workers call the copies; autograd's threads
run the backward passes.
"""
