"""The replicas compute: forward and backward over their shares."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from scatterpar.devices.fingerprints import same_bits
from scatterpar.devices.runtime import no_kernel_search
from scatterpar.replicas.replicas import parameter_writes_refused
from scatterpar.step.attempt import Attempt
from scatterpar.step.criterion_closure import (
    closure_contents,
    trained_leaves,
    training_buffers,
)
from scatterpar.step.reduce import Computed
from scatterpar.step.scatter import ShareLoader
from scatterpar.step.schedule import Schedule
from scatterpar.step.set_aside import SetAside
from scatterpar.step.substeps import (
    ReplicaTask,
    make_tasks,
)

# Before the sub-steps, with replicas refreshed; may raise.
Check = Callable[[Attempt, Sequence[ReplicaTask]], None]


def compute(
    attempt: Attempt,
    loaders: Sequence[ShareLoader],
    checks: Sequence[Check],
    schedule: Schedule,
) -> Computed:
    """Run every replica's sub-steps, each in its worker; the replicas then have the gradients.

    User code that runs meanwhile may move generators and statistics of networks that it refers to,
    which are restored if the step fails. Raises ``ValueError`` if a gradient arrives at the user's
    own leaves, or at those that the criterion or an object in the module refers to.
    """
    request, replicas = attempt.request, attempt.replicas
    replica_sets = replicas.replica_sets
    held, generators = closure_contents(request.criterion)
    shared, _ = closure_contents([each.shared_objects for each in replica_sets])
    buffers, shared_buffers = training_buffers(held), training_buffers(shared)
    copied = set(map(id, chain(*(each.tensors for each in replica_sets))))
    written = [*buffers, *(t for t in shared_buffers if id(t) not in copied)]
    attempt.save_for_undo(written, (), generators)
    trained = [leaf for each in replica_sets for leaf in each.trained_tensors]
    # A criterion may refer to ``engine.replicas``, whose leaves are where gradients belong.
    of_replicas = {id(t) for each in replica_sets for r in each.replicas for t in r.tensors}
    leaves = [t for t in trained_leaves([*trained, *held, *shared]) if id(t) not in of_replicas]
    with SetAside(leaves) as attempt.set_aside:
        args = attempt.weights.by_share, attempt.clock
        tasks = make_tasks(attempt.plan, replicas, loaders, *args)

        @contextlib.contextmanager
        def forward_passes() -> Iterator[None]:
            with parameter_writes_refused(replica_sets):
                with attempt.span("verify"), no_kernel_search():
                    for check in checks:
                        check(attempt, tasks[: len(replicas.criteria)])
                yield

        attempt.forward_passes = forward_passes
        before = [(t, t.clone()) for t in buffers if id(t) in copied]
        try:
            computed = schedule.run(attempt, tasks)
        finally:
            del attempt.forward_passes  # in a cycle, the rows would stay
        attempt.set_aside.refuse(request.criterion)
    written_buffers = {id(t) for t, value in before if not same_bits(t, value)}
    return computed._replace(written_buffers=written_buffers)
