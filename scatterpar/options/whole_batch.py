"""A loss over the whole batch: all outputs, the criterion once, then the backward
passes.

The gradient is that of this program, with the memory of one micro-batch per replica::

    outputs = [module(rows) for rows in micro_batches]
    loss = criterion(join(outputs), targets)
    loss.backward()

There are two passes, because the loss needs all outputs before any of them has a
gradient::

    pass 1     replica 0: forward 0, 1, … n -+            each graph is dropped at once,
               replica 1: forward 0, 1, … n -+- joined    except a replica's last one
    criterion  on the master: the loss, and the gradient of every output
    pass 2     replica 0: backward n; forward 0, backward 0; forward 1, backward 1; …
               replica 1: backward n; forward 0, backward 0; forward 1, backward 1; …

The second forward pass of a micro-batch draws the same random numbers as the first, and
starts from the same state. With one micro-batch per replica nothing is computed twice.
This is gradient caching (Gao et al. 2021, https://arxiv.org/abs/2101.06983).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.batch.batch import Batch, batch_of
from scatterpar.batch.joining import join_rows, tensors_by_place
from scatterpar.batch.markers import Marker, unwrap_markers
from scatterpar.batch.refused_outputs import refuse_unjoinable
from scatterpar.devices.bits import same_bits
from scatterpar.devices.copies import to_numbers
from scatterpar.devices.memory import is_out_of_memory
from scatterpar.devices.streams import synchronize
from scatterpar.distributed.ranks import Ranks
from scatterpar.errors import add_note
from scatterpar.replicas.replicas import parameter_writes_refused
from scatterpar.step.attempt import Attempt
from scatterpar.step.inner_backward import gradients_put_aside
from scatterpar.step.logged_numbers import NumbersOfShare
from scatterpar.step.loss import loss_and_numbers, require_trainable
from scatterpar.step.reduce import lists_in_outputs
from scatterpar.step.replica_threads import Proceed
from scatterpar.step.request import Call
from scatterpar.step.scatter import batch_on_device
from scatterpar.step.share_losses import ShareLosses
from scatterpar.step.substeps import (
    Computed,
    Gradient,
    Schedule,
    detached,
    detached_output,
    meeting_of,
    set_aside,
    unalias,
)
from scatterpar.step.task import ReplicaTask
from scatterpar.step.turns import Scope
from scatterpar.threads.generators import GeneratorStates
from scatterpar.torch_private.autograd import leaves_reached, nodes_of
from scatterpar.verify.look_results import NUMBER_REMEDY
from scatterpar.verify.verdicts import NUMBER_PROBLEM


class TwoPasses(Schedule):
    """The schedule of ``whole_batch=True``.

    With ``ranks``, the criterion sees the rows of all processes.

    Raises:
        ValueError: a call without a criterion, or with ``reduction`` or ``count``.
    """

    replicas_of_criterion = 1  # the master's

    def __init__(self, call: Call, ranks: Ranks | None) -> None:
        self._ranks = ranks
        if call.criterion is None:
            raise ValueError(
                "whole_batch=True needs a criterion; return outputs with one entry "
                "per row from forward, and pass criterion=: the engine calls it once, "
                "as criterion(outputs, targets)"
            )
        for name, value in (("reduction", call.reduction), ("count", call.count)):
            if value is not None:
                raise ValueError(
                    f"whole_batch=True computes one loss, of all rows, and {name}= "
                    f"says how losses of micro-batches combine; leave {name}= out"
                )

    def run(self, attempt: Attempt, tasks: Sequence[ReplicaTask]) -> Computed:
        """Run both passes, and the master's criterion between them."""
        # A trial is of this process alone: other ranks would wait for it.
        is_trial = attempt.extent.is_trial
        ranks = None if is_trial else self._ranks
        replica_sets = attempt.replicas.replica_sets
        with parameter_writes_refused(replica_sets):
            meeting = meeting_of(attempt)
            passes = attempt.threads.run(partial(Passes, attempt), tasks, meeting)
        try:
            with parameter_writes_refused(replica_sets, second_pass=True):
                batch = WholeBatch(attempt, passes, ranks)
                loss = batch.loss()
                attempt.threads.run(Passes.second, passes, meeting_of(attempt))
        except BaseException as error:
            if ranks is not None and is_out_of_memory(error):
                self.may_start_again = False
                why = "other ranks have seen these outputs"
                add_note(error, f"more sub-steps do not help in this step: {why}")
            raise
        returned = [passes_of_replica.returned for passes_of_replica in passes]
        weight = 1.0 if batch.counts else 0.0  # ranks add it up
        losses = ShareLosses(
            attempt.plan.shares[0],
            [loss],
            [weight],
            batch.numbers,
            check_finite=False,  # it was checked before the backward pass
        )
        return Computed([losses], returned, batch.gradients)


class Passes:
    """The two passes of one replica over its share; the constructor runs the first.

    The first retains the graph of the last micro-batch only. All micro-batches run in
    the caller's grad mode: modules may compute other outputs without.

    Attributes:
        task: the work of the replica.
        share: the rows.
        outputs: of the micro-batches, without graphs; their tensors get gradients.
        returned: the parts of outputs that the user asked for.
    """

    def __init__(self, attempt: Attempt, task: ReplicaTask, proceed: Proceed) -> None:
        self._attempt = attempt
        self.task = task
        self.share = task.share
        self.outputs: list[Any] = []
        self.returned: list[Any] = []
        # Of the generators, before each micro-batch.
        self._states: list[GeneratorStates] = []
        self._without_gradient: Sequence[Tensor] = task.leaves
        return_outputs = attempt.request.return_outputs
        retain_rows = (
            attempt.extent.retain_rows
            and attempt.request.backward  # else there is no second pass
            and len(self.share.micro_batches) > 1
        )
        for sub_step in range(len(self.share.micro_batches)):
            proceed(sub_step)
            # The last output with its graph, which is freed before the next forward.
            self._last: Any = None
            # One state per micro-batch: the second pass begins with the last one, and a
            # single state would give the others its numbers.
            self._states.append(attempt.generators.get_state(self.share.replica))
            # The rows have no name here, which would keep inputs.
            self._last = output_at(
                task, task.rows_of(sub_step, retain=retain_rows), sub_step
            )
            # Leaves: the criterion's backward pass ends here, and the second pass
            # begins.
            self.outputs.append(nested.map_tensors(_as_leaf_with_gradient, self._last))
            if return_outputs:
                self.returned.append(detached_output(self._last, return_outputs))

    def second(self, proceed: Proceed) -> None:
        """Accumulate gradients in the replica's parameters, given those of its outputs.

        The backward pass of the retained graph comes first, because restoring state may
        write tensors of that graph. Afterwards the state is that after the criterion.
        """
        *earlier, last = range(len(self.outputs))
        max_substeps = self._attempt.extent.max_substeps
        if max_substeps is not None:
            earlier = earlier[: max_substeps - 1]
        # The retained graph is the largest memory: it goes first.
        proceed(last)
        roots = nested.tensors(self._last)
        self._last = None
        self._run_backward(last, roots)
        del roots  # with the graph
        leaves = nested.tensors(self.outputs)
        have_gradient = any(leaf.grad is not None for leaf in leaves)
        if not earlier or not have_gradient:
            # No host read follows: a kernel's error is raised here.
            synchronize(self.share.device)
            return
        # Buffers and random state moved in the first pass. This one shall not move them
        # again.
        agreed: list[Tensor] = []
        sub_steps: list[int] = []  # of these
        with self.task.isolated(self._attempt.generators):
            for sub_step in earlier:
                proceed(sub_step)
                agreed += self._recompute(sub_step)
                sub_steps += [sub_step] * (len(agreed) - len(sub_steps))
        proceed(None)
        # One read of all: the sub-steps have not waited for the device.
        values = to_numbers(torch.stack(agreed)) if agreed else []
        for sub_step, agrees in zip(sub_steps, values, strict=True):
            if not agrees:
                proceed(sub_step)
                raise RuntimeError(
                    "whole_batch=True runs forward twice, and the second pass gave "
                    f"other outputs than the first; {_REMEDIES}"
                )

    def _recompute(self, sub_step: int) -> list[Tensor]:
        """Run a sub-step's forward pass again, and its backward pass.

        Returns ``agreements``.
        """
        replica = self.share.replica
        self._attempt.generators.set_state(replica, self._states[sub_step])
        rows_of = self.task.rows_of
        output = output_at(self.task, rows_of(sub_step), sub_step, "recompute")
        roots = nested.tensors(output)
        agreed = agreements(roots, nested.tensors(self.outputs[sub_step]))
        self._run_backward(sub_step, roots)
        return agreed

    def _run_backward(self, sub_step: int, tensors: Sequence[Tensor]) -> None:
        """Run the backward pass of a sub-step from the tensors of its output."""
        roots: list[Tensor] = []
        gradients: list[Tensor] = []
        leaves = nested.tensors(self.outputs[sub_step])
        for tensor, leaf in zip(tensors, leaves, strict=True):
            if leaf.grad is not None:
                roots.append(tensor)
                gradients.append(leaf.grad)
        if roots:
            self.task.run_backward(sub_step, roots, gradients)
        # ``gradients`` are views of one tensor: replicas share its version counter.
        self._without_gradient = unalias(self._without_gradient, beside=gradients)


def _as_leaf_with_gradient(tensor: Tensor) -> Tensor:
    """The tensor without its graph; it gets a gradient if it had a graph."""
    return detached(tensor).requires_grad_(tensor.requires_grad)


def output_at(
    task: ReplicaTask, rows: Any, sub_step: int = 0, name: str = "forward"
) -> Any:
    """The module's output for the rows of one micro-batch."""
    with (
        task.turn(Scope.FUNCTION, sub_step),
        gradients_put_aside(task.leaves, task.replicas),
        task.span(name, sub_step),
    ):
        return task.output_of(rows[0])


class WholeBatch:
    """The outputs and targets of all rows, in row order, in the master's memory.

    Outputs are copied once to the master and their gradients once back, counted under
    ``compute``. The criterion is called once, so the leaves that it refers to need no
    replicas.

    All ranks compute the same criterion on the same outputs, and need the same list of
    leaves: those that a search of the criterion finds, in its order. Loss and gradients
    of these leaves are added over ranks, so only those of rank 0 count.

    Attributes:
        counts: whether the loss of this process counts.
        gradients: of the leaves that the criterion refers to.
        numbers: the criterion's numbers to log.
    """

    def __init__(
        self, attempt: Attempt, passes: Sequence[Passes], ranks: Ranks | None
    ) -> None:
        self.counts = ranks is None or ranks.rank == 0
        self.gradients: list[Gradient] = []
        self.numbers = NumbersOfShare()
        self._attempt = attempt
        self._request = attempt.request
        self._ranks = ranks
        self._task = passes[0].task
        # Of other replicas: the loss reaches them by the joined outputs alone.
        self._foreign: set[int] = set()
        for passes_of_replica in passes[1:]:
            self._foreign.update(map(id, passes_of_replica.task.leaves))
        self._master = passes[0].share.device
        # Each with the device of the output, and its copy.
        self._copies: list[tuple[torch.device, Tensor, Tensor]] = []
        copies: list[list[Any]] = []
        for passes_of_replica in passes:
            on_master = partial(self._on_master, passes_of_replica.share.device)
            copies.append(
                [
                    nested.map_tensors(on_master, output)
                    for output in passes_of_replica.outputs
                ]
            )
        plan = attempt.plan
        # In the order of the rows, whichever replica had them.
        self._pieces = plan.by_rows(copies)
        self._rows = plan.by_rows(share.substep_rows for share in plan.shares)
        batches = self._request.batches
        self._targets = self._joined_targets(batches)
        self._lists = lists_in_outputs(batches)

    def _on_master(self, device: torch.device, output: Tensor) -> Tensor:
        """``output`` in the master's memory, as a leaf that accumulates a gradient."""
        # The criterion's gradient arrives in the output itself.
        if device == self._master:
            return output
        copy = self._attempt.transfers.copy(output.detach(), self._master, "compute")
        # A leaf: the criterion's backward pass must not run on into the replica's
        # graph, which lies on another device and, but for the last one, is gone.
        copy.requires_grad_(output.requires_grad)
        self._copies.append((device, output, copy))
        return copy

    def _joined_targets(self, batches: Sequence[Batch]) -> Any:
        """Join the targets of all batches on the master, with their markers."""
        on_master = [
            batch_on_device(
                batch.without_inputs(), self._master, self._attempt.transfers
            )
            for batch in batches
        ]

        def join(atoms: list[Any]) -> Any:  # a value without rows is the first batch's
            if isinstance(atoms[0], Marker):
                return atoms[0].join(atoms[1:])
            return join_rows(atoms, self._request.dim, self._request.sizes)

        return nested.merge(join, [batch.targets for batch in on_master])

    def loss(self) -> Tensor:
        """The loss of all rows. Its gradient is in the outputs of the first passes."""
        attempt = self._attempt
        seed = None
        if self._ranks is not None:
            seed = self._join_ranks(self._ranks, attempt.generators.seed_of_criterion())
        # Interrupts wait until the criterion and its backward pass have ended.
        with attempt.span("criterion"), attempt.generators.of_criterion(seed):
            loss = attempt.threads.call(self._master, self._backward)
        if not self.counts:
            for of_criterion in attempt.replicas.replica_sets[1:]:
                of_criterion.replicas[0].clear_records()
        for device, output, copy in self._copies:
            if copy.grad is not None:
                output.grad = attempt.transfers.copy(copy.grad, device, "compute")
        return loss

    def _join_ranks(self, ranks: Ranks, seed: int) -> int:
        """Add the other processes' rows. Returns the seed that all processes use."""
        is_list = self._lists != "never" and any(
            isinstance(piece, list) for piece in self._pieces
        )
        targets = batch_of(None, self._targets, sum(self._rows), self._request.dim)
        if is_list or targets.has_marked_rows:
            lists = "outputs that are lists" if is_list else "targets with a marker"
            raise ValueError(
                f"whole_batch=True with a process_group joins tensors across ranks, "
                f"but not {lists}; pass or return one tensor instead, padded to the "
                "same length on all ranks"
            )
        self._pieces, self._rows, self._targets, seed = ranks.outputs_of_all(
            self._pieces,
            self._rows,
            self._targets,
            self._request.dim,
            seed,
        )
        return seed

    def _joined(self) -> Any:
        """All outputs as one. No leaves: a criterion may write them in place."""
        if len(self._pieces) > 1:
            refuse_unjoinable(self._pieces)
        joined = join_rows(
            self._pieces,
            self._request.dim,
            weights=self._rows,
            rows=self._rows,
            lists=self._lists,
        )
        return nested.map_tensors(_not_a_leaf, joined)

    def _backward(self) -> Tensor:
        """Add the gradients of the loss to the outputs and to leaves of the criterion.

        Returns the loss.
        """
        try:
            loss, hidden = self._loss_and_hidden_leaves()
            if self._request.check_finite and not torch.isfinite(loss):
                raise FloatingPointError(
                    f"the loss is {to_numbers(loss)}; nothing was changed"
                )
            if self._request.backward:
                self._run_backward(loss, [*self._attempt.user_leaves, *hidden])
                self._require_one_value()
        except BaseException as error:
            rows = sum(self._rows)
            add_note(
                error,
                f"in the criterion, with the outputs of all {rows} rows, which have no "
                "graph of the module",
            )
            if len(self._pieces) > 1:
                note_lists_of_objects(error, self._pieces[0])
            raise
        return loss.detach()

    def _require_one_value(self) -> None:
        """Refuse 0-dim outputs that get a gradient and differ between micro-batches.

        Raises ``ValueError``.
        """
        dim = self._request.dim
        places = tensors_by_place(self._pieces, self._rows, dim, self._lists)
        for first, *later in places:
            uses_number = not first.ndim and first.grad is not None
            if uses_number and not all(same_bits(first, piece) for piece in later):
                raise ValueError(
                    f"{NUMBER_PROBLEM}; {NUMBER_REMEDY}, which gets all rows. Nothing "
                    "was changed"
                )

    def _loss_and_hidden_leaves(self) -> tuple[Tensor, list[Tensor]]:
        """Call the criterion, and free the joined outputs that its graph has not."""
        criterion = self._attempt.replicas.criteria[0]
        joined = self._joined()
        nodes = nodes_of(nested.tensors(joined))  # first: a criterion may write outputs
        # A copy: the criterion may write targets, which are the user's on the master.
        targets = unwrap_markers(self._targets, copy=True)
        writes = self._attempt.writes
        with writes.watched("the criterion", "targets", targets) as watch:
            loss, numbers = loss_and_numbers(joined, targets, criterion)
            watch.result = loss
        self.numbers.add(numbers)
        return loss, self._hidden_leaves(loss, nodes)

    def _run_backward(self, loss: Tensor, leaves: Sequence[Tensor]) -> None:
        """Run the backward pass; the gradients of ``leaves`` are kept apart."""
        if not loss.requires_grad:
            require_trainable(self._task.module)
        # Gradients are those of the scaled loss, as by
        # ``scaler.scale(loss).backward()``.
        scale = torch.full_like(loss, self._request.scale, requires_grad=False)
        leaves_aside = list(leaves)
        if not self.counts:
            # What other ranks give the criterion's leaves is what rank 0 gives them.
            leaves_aside += self._task.leaves
        with set_aside(leaves_aside):
            self._task.run_unprofiled_backward([loss], [scale])
            # A later sum is in place: two leaves must not share a gradient, nor a leaf
            # one with the outputs, whose gradients the second pass may write.
            outputs = nested.tensors(self._pieces)
            of_outputs = [tensor.grad for tensor in outputs if tensor.grad is not None]
            unalias([*self._task.leaves, *leaves], beside=of_outputs)
            for leaf in leaves:
                self.gradients.append((leaf, leaf.grad if self.counts else None))

    def _hidden_leaves(self, loss: Tensor, nodes: Sequence[Any]) -> list[Tensor]:
        """The leaves that ``loss`` reaches beside ``nodes``, but no search finds."""
        # These get their gradients anyway.
        known = {id(leaf) for leaf in (*self._task.leaves, *self._attempt.user_leaves)}
        hidden = [leaf for leaf in leaves_reached(loss, nodes) if id(leaf) not in known]
        if not self._foreign.isdisjoint(map(id, hidden)):
            raise TypeError(
                "the loss uses tensors of the module that are not among the outputs: "
                "they are attributes of an object that forward returns, or a hook "
                "keeps them; return these tensors from forward, in a tuple, dict or "
                "dataclass"
            )
        if self._ranks is None:
            return hidden
        for leaf in hidden:
            if isinstance(leaf, nn.Parameter):
                raise ValueError(
                    f"the criterion uses a parameter of shape {tuple(leaf.shape)} that "
                    f"the engine does not find, so that ranks cannot share its "
                    f"gradient; give the criterion an argument net for the module that "
                    f"has this parameter, and bind it: functools.partial(criterion, "
                    f"net=net). Or make the criterion an nn.Module, with this module "
                    f"as a child"
                )
        return []  # the criterion itself made them, as for a gradient penalty


def note_lists_of_objects(error: BaseException, piece: Any) -> None:
    """Add a note to ``error`` per kind of object that was not joined."""
    kinds: set[str] = set()
    for atom in nested.atoms(piece):
        if not isinstance(atom, (Tensor, *nested.PLAIN_CLASSES)):
            kinds.add(type(atom).__name__)
    for kind in sorted(kinds):
        add_note(
            error,
            f"the criterion gets a list with the {kind} of each micro-batch, because "
            f"tensors in a {kind} are not joined; return the tensors in a tuple, dict "
            "or dataclass",
        )


def _not_a_leaf(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.is_leaf else tensor


def agreements(tensors: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    """For each output with a gradient, whether it is that of the first pass.

    Elements are equal, NaN too, or differ by rounding, which kernels may change. The
    tolerance is far below what another dropout mask changes.

    Returns 0-dim tensors.
    """
    if list(map(_output_kind, tensors)) != list(map(_output_kind, leaves)):
        raise RuntimeError(
            "whole_batch=True runs forward twice, and the second pass gave more or "
            "fewer outputs than the first, or outputs of a different shape or dtype; "
            f"{_REMEDIES}"
        )
    agreed: list[Tensor] = []
    for tensor, leaf in zip(tensors, leaves, strict=True):
        # An output without a gradient has no influence, whatever it is.
        if leaf.numel() and leaf.grad is not None:
            agreed.append(_agree(tensor.detach(), leaf.detach()))
    return agreed


def _output_kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype, bool]:
    return tensor.shape, tensor.dtype, tensor.requires_grad


def _agree(second: Tensor, first: Tensor) -> Tensor:
    precision = torch.finfo(second.dtype)
    # A tensor, not a number: the host does not wait for the device here.
    largest = first.abs().nan_to_num(0.0, 0.0, 0.0).amax().clamp_min(precision.tiny)
    # The square root of the rounding unit: 3e-4 in float32, where a dropped element
    # differs by its whole value.
    tolerance = precision.eps**0.5
    agree: Tensor = torch.isclose(
        second / largest, first / largest, rtol=0.0, atol=tolerance, equal_nan=True
    ).all()
    return agree


_REMEDIES = (
    "if forward draws random numbers of Python or NumPy, use torch's random functions "
    "instead. If forward reads a counter outside of the module, keep the counter in "
    "the module. Or use one sub-step per replica, with which forward runs once. "
    "Nothing was changed"
)
