"""Tensors that a call leaves in its module: in attributes, or in what hooks fill.

::

    features["hidden"] = output     by a hook: its own dict in each replica
    self.hidden = hidden            in forward

If they have rows, they are joined as outputs are, and what replica 0 has left in the
user's module is replaced. Anything else there is replica 0's. So is a buffer that is
state, without a graph: by chance it may have as many entries as there are rows.

The other replicas get copies of this: state that each kept for itself would be that of
other rows. Of joined tensors they have the joined one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from scatterpar.batch import nested
from scatterpar.calls.division import Division, are_divided_alike
from scatterpar.calls.replicas_of_call import ReplicasOfCall
from scatterpar.errors import Told, warn
from scatterpar.objects.snapshot import entries_of
from scatterpar.replicas.computed_weights import name_of_computed, spectral_weights
from scatterpar.replicas.refused_modules import refuse_created
from scatterpar.replicas.replicas import Replica


def join_left_tensors(
    replicas_of_call: ReplicasOfCall, division: Division, told: Told
) -> None:
    """Join the tensors that the call has left in the user's containers.

    Raises:
        ValueError: the call has created a parameter or a module.
    """
    # A list: joined tensors are written into these containers.
    changed = list(replicas_of_call.shared_data.changed_containers())
    if not changed:
        return
    replica_set = replicas_of_call.replica_set
    others = replicas_of_call.others(len(division.rows))
    is_divided = len(division.rows) > 1
    buffers = {id(module._buffers) for module in replica_set.modules}
    # Hooks of torch set these weights in each forward pass.
    known = {
        (id(vars(module)), name_of_computed(hook))
        for module, hook in replica_set.computed
    }
    for module, name in spectral_weights(replica_set.modules):
        known.add((id(vars(module)), name))
    joined: set[int] = set()
    for number, container, saved in changed:
        before = dict(entries_of(saved))
        for key, value in list(entries_of(container)):
            if key in before and before[key] is value:
                continue
            # Sets and deques have no place to which a joined tensor could be written.
            if not isinstance(container, (dict, list)) or (id(container), key) in known:
                continue
            if not is_divided or not any(_is_tensor(a) for a in nested.atoms(value)):
                continue
            if id(container) in buffers and not value.requires_grad:
                continue
            values = [value, *_counterparts(number, key, others)]
            container[key], new = _joined_or_first(values, key, division, told)
            joined.update(map(id, new))
    if is_divided:
        refuse_created(replica_set.root, replica_set.tensors)
    replicas_of_call.shared_data.share_left(joined)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _counterparts(number: int, key: Any, others: Sequence[Replica]) -> list[Any]:
    values: list[Any] = []
    for replica in others:
        entries = dict(entries_of(replica.containers[number]))
        values.append(entries.get(replica.copy_of(key)))
    return values


def _joined_or_first(
    values: list[Any], name: Any, division: Division, told: Told
) -> tuple[Any, list[Tensor]]:
    """Join the values of all replicas, or take that of replica 0. Also returns the
    tensors that were joined.
    """
    joined: list[Tensor] = []

    def join_atoms(atoms: list[Any]) -> Any:
        first = atoms[0]
        if not all(map(_is_tensor, atoms)):
            return first
        if are_divided_alike(atoms, division.rows, division.dim):
            joined.append(division.join(atoms))
            return joined[-1]
        if first.requires_grad and told.mark(("left", str(name))):
            warn(
                "forward, or a hook, leaves a tensor of shape "
                f"{tuple(first.shape)} in {name!r}. The tensor does not have one "
                "entry per row, and it comes from the first replica only; return "
                "the tensor from forward, or leave a tensor with one entry per row "
                "instead. docs/limits.md, State in modules."
            )
        return first

    try:
        merged = nested.merge(join_atoms, values)
    except ValueError:  # mappings with other keys
        return values[0], []
    # The same object, which may be elsewhere, too.
    return (merged if joined else values[0]), joined
