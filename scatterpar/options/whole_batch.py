"""A loss over the whole batch: all outputs, the criterion once, then the backward
passes.

The gradient is that of this program, with the memory of one micro-batch per replica::

    outputs = [module(rows) for rows in micro_batches]
    loss = criterion(join(outputs), targets)
    loss.backward()

There are two passes, because the loss needs all outputs before any of them has a
gradient::

    pass 1     replica 0: forward 0, 1, … n -+             each graph is dropped at once,
               replica 1: forward 0, 1, … n -+- joined     except a replica's last one
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
from scatterpar.batch.batch import Batch
from scatterpar.batch.markers import Marker, has_marked_rows, unwrap_markers
from scatterpar.batch.nested import Lists, join_rows
from scatterpar.devices.fingerprints import same_bits
from scatterpar.devices.memory import is_out_of_memory
from scatterpar.devices.streams import synchronize
from scatterpar.devices.transfers import to_numbers
from scatterpar.distributed.ranks import Ranks
from scatterpar.errors import add_note
from scatterpar.replicas.replicas import parameter_writes_refused
from scatterpar.step.attempt import Attempt
from scatterpar.step.inner_backward import gradient_versions, inner_backward
from scatterpar.step.loss import scalar_loss
from scatterpar.step.replica_threads import Proceed
from scatterpar.step.request import Call, Request
from scatterpar.step.scatter import moved
from scatterpar.step.substeps import (
    Computed,
    Gradient,
    Schedule,
    detached_output,
    meeting_of,
    set_aside,
    unalias,
)
from scatterpar.step.task import ReplicaTask
from scatterpar.threads.generators import State
from scatterpar.torch_private import leaves_reached, nodes_of
from scatterpar.verify.verifier import Verifier


class TwoPasses(Schedule):
    """The schedule of ``whole_batch=True``; ``ranks`` are the other processes that have
    rows.

    Raises ``ValueError`` for a call without a criterion, or with ``reduction`` or
    ``count``.
    """

    replicas_of_criterion = 1  # the master's

    def __init__(
        self,
        call: Call,
        ranks: Ranks | None,
        verifier: Verifier | None,
        graphs: bool = False,
    ) -> None:
        self._ranks = ranks
        self._verifier = verifier
        if graphs:
            raise ValueError(
                "graphs=True captures the loss in each sub-step, and whole_batch=True "
                "has one loss "
                "after all of them; make another engine, without graphs, for this loss"
            )
        if call.criterion is None:
            raise ValueError(
                "whole_batch=True without a criterion; return the rows' outputs from "
                "forward, and "
                "pass criterion=, which is called once as criterion(outputs, targets)"
            )
        for name, value in (("reduction", call.reduction), ("count", call.count)):
            if value is not None:
                raise ValueError(
                    f"{name}= says how the losses of micro-batches combine, and "
                    "whole_batch=True "
                    f"has one loss, of all rows; leave {name}= out"
                )

    def data(self, request: Request) -> Sequence[Batch]:
        """The inputs only: the master alone needs the targets."""
        return [batch.without_targets() for batch in request.batches]

    def weights_apply(self) -> bool:
        """No: micro-batches have outputs, and the loss is that of all rows."""
        return False

    def run(self, attempt: Attempt, tasks: Sequence[ReplicaTask]) -> Computed:
        """Run both passes, and the master's criterion between them."""
        is_trial = attempt.extent.is_trial
        ranks = None if is_trial else self._ranks
        replica_sets = attempt.replicas.replica_sets
        with parameter_writes_refused(replica_sets):
            meeting = meeting_of(attempt)
            passes = attempt.threads.run(partial(Passes, attempt), tasks, meeting)
        if self._verifier is not None and not is_trial:
            outputs = [passes_of_replica.outputs for passes_of_replica in passes]
            self._verifier.check_join(attempt, tasks[0], outputs, output_at)
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
        returned = [each.returned for each in passes]
        value = to_numbers(loss) if batch.counts else 0.0  # ranks add it up
        return Computed(value, loss.dtype, returned, batch.gradients)


class Passes:
    """The two passes of one replica over its share; the constructor runs the first.

    The first retains the graph of the last micro-batch only. All micro-batches run in
    the caller's grad mode: modules may compute other outputs without.
    """

    def __init__(self, attempt: Attempt, task: ReplicaTask, proceed: Proceed) -> None:
        self._attempt, self.task, self.share = attempt, task, task.share
        # of micro-batches, without graphs; tensors get gradients
        self.outputs: list[Any] = []
        self.returned: list[Any] = []  # the parts of them that the user asked for
        self._states: list[State] = []  # of the generators, before each micro-batch
        self._without_gradient: Sequence[Tensor] = task.leaves
        return_outputs = attempt.request.return_outputs
        retain_rows = attempt.extent.retain_rows and len(self.share.micro_batches) > 1
        for number in range(len(self.share.micro_batches)):
            proceed(number)
            # the last output with its graph; dropped before the next
            self._last: Any = None
            self._states.append(attempt.generators.get_state(self.share.replica))
            self._last = output_at(
                task, task.rows_of(number, retain=retain_rows), number
            )
            self.outputs.append(
                nested.map_tensors(
                    lambda t: t.detach().requires_grad_(t.requires_grad), self._last
                )
            )
            if return_outputs:
                self.returned.append(detached_output(self._last, return_outputs))

    def second(self, proceed: Proceed) -> None:
        """Accumulate gradients in the replica's parameters, given those of its outputs.

        The backward pass of the retained graph comes first, because restoring state may
        write tensors of that graph. Afterwards the state is that after the criterion.
        """
        task, share, attempt = self.task, self.share, self._attempt
        *others, last = range(len(self.outputs))
        max_substeps = attempt.extent.max_substeps
        if max_substeps is not None:
            others = others[: max_substeps - 1]
        proceed(last)
        tensors, self._last = nested.tensors(self._last), None
        self._run_backward(last, tensors)
        del tensors
        if not others or all(t.grad is None for t in nested.tensors(self.outputs)):
            # no host read follows: a kernel's error is raised here
            synchronize(share.device)
            return
        # With the sub-step of each. If the host read them there, the next sub-step
        # would wait.
        agreed: list[tuple[int, Tensor]] = []
        with task.isolated(attempt.generators):
            for number in others:
                proceed(number)
                attempt.generators.set_state(share.replica, self._states[number])
                output = output_at(task, task.rows_of(number), number, "recompute")
                tensors = nested.tensors(output)
                leaves = nested.tensors(self.outputs[number])
                agreed += [(number, each) for each in agreements(tensors, leaves)]
                self._run_backward(number, tensors)
                del output, tensors
        proceed(None)
        # one read
        values = to_numbers(torch.stack([each for _, each in agreed])) if agreed else ()
        for (number, _), value in zip(agreed, values, strict=True):
            if not value:
                proceed(number)
                raise RuntimeError(
                    f"the second forward pass gave other outputs: {_WHY}"
                )

    def _run_backward(self, number: int, roots: Sequence[Tensor]) -> None:
        """Run the backward pass of sub-step ``number`` from the tensors
        of its output.
        """
        leaves = zip(roots, nested.tensors(self.outputs[number]), strict=True)
        pairs = [(root, leaf.grad) for root, leaf in leaves if leaf.grad is not None]
        if pairs:
            self.task.run_backward(number, *zip(*pairs, strict=True))
        self._without_gradient = unalias(self._without_gradient)


def output_at(
    task: ReplicaTask, rows: Any, number: int = 0, name: str = "forward"
) -> Any:
    """The module's output for the rows of one micro-batch."""
    before = gradient_versions(task.leaves)
    with task.span(name, number):
        output = task.output_of(rows[0])
    if gradient_versions(task.leaves) != before:
        raise inner_backward(task.leaves, before, task.replicas)
    return output


class WholeBatch:
    """The outputs and targets of all rows, in row order, in the master's memory.

    Outputs are copied once to the master and their gradients once back, counted under
    ``compute``. The criterion is called once, so the leaves that it refers to need no
    replicas: ``gradients`` has theirs. With ``ranks``, all ranks need the same list of
    leaves: those that a search of the criterion finds, in its order. All ranks have the
    same loss and gradients of these leaves, and the first one's ``counts``.
    """

    def __init__(
        self, attempt: Attempt, passes: Sequence[Passes], ranks: Ranks | None
    ) -> None:
        self._attempt, self._task, self._ranks = attempt, passes[0].task, ranks
        self.counts = ranks is None or ranks.rank == 0
        self.gradients: list[Gradient] = []
        self._request, self._master = attempt.request, passes[0].share.device
        # device, output, its copy
        self._copies: list[tuple[torch.device, Tensor, Tensor]] = []
        pieces = {
            span: nested.map_tensors(
                partial(self._on_master, each.share.device), output
            )
            for each in passes
            for span, output in zip(each.share.micro_batches, each.outputs, strict=True)
        }
        self._pieces = [pieces[span] for span in sorted(pieces)]
        self._rows = [stop - start for start, stop in sorted(pieces)]
        self._order = attempt.plan.order
        batches = self._request.batches
        self._targets = self._joined_targets(batches)
        self._lists = any(batch.without_targets().has_marked_rows for batch in batches)

    def _on_master(self, device: torch.device, output: Tensor) -> Tensor:
        """``output`` in the master's memory, as a leaf that accumulates a gradient."""
        if device == self._master:
            return output
        copy = self._attempt.transfers.copy(output.detach(), self._master, "compute")
        self._copies.append((device, output, copy.requires_grad_(output.requires_grad)))
        return copy

    def _joined_targets(self, batches: Sequence[Batch]) -> Any:
        """The targets of all batches on the master, with their markers."""
        on_master = [
            moved(batch.without_inputs(), self._master, self._attempt.transfers)
            for batch in batches
        ]

        def join(leaves: list[Any]) -> Any:  # a value without rows is the first batch's
            if isinstance(leaves[0], Marker):
                return leaves[0].join(leaves[1:])
            return join_rows(leaves, self._request.dim, self._request.sizes)

        return nested.merge(join, [batch.targets for batch in on_master])

    def loss(self) -> Tensor:
        """The loss of all rows. Its gradient is in the outputs of the first passes."""
        attempt, seed = self._attempt, None
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
        is_list = self._lists and any(isinstance(piece, list) for piece in self._pieces)
        if is_list or has_marked_rows(self._targets):
            what = "outputs that are lists" if is_list else "targets with a marker"
            raise ValueError(
                f"whole_batch=True with a process_group cannot join {what} of rows "
                "across ranks; "
                f"make them tensors of one length on all ranks"
            )
        if self._order:  # other ranks have other orders
            self._pieces, self._rows, self._order = (
                [self._joined()],
                [sum(self._rows)],
                (),
            )
        self._pieces, self._rows, self._targets, seed = ranks.outputs_of_all(
            self._pieces, self._rows, self._targets, self._request.dim, seed
        )
        return seed

    def _joined(self) -> Any:
        """All outputs as one. They are not leaves, because a criterion may write them
        in place.
        """
        rows, dim = self._rows, self._request.dim
        lists: Lists = "if clear" if self._lists else "never"
        joined = join_rows(
            self._pieces, dim, rows, rows, lists=lists, order=self._order
        )
        return nested.map_tensors(lambda t: t.clone() if t.is_leaf else t, joined)

    def _backward(self) -> Tensor:
        """Returns the loss; adds its gradients to the outputs and to leaves of the
        criterion.
        """
        criterion, request = self._attempt.replicas.criteria[0], self._request
        try:
            joined, targets = self._joined(), unwrap_markers(self._targets, copy=True)
            nodes = nodes_of(nested.tensors(joined))
            loss = scalar_loss(criterion(joined, targets), "the criterion")
            hidden = self._hidden_leaves(loss, nodes)
            if request.check_finite and not torch.isfinite(loss):
                raise FloatingPointError(
                    f"the loss is {to_numbers(loss)}; nothing was changed"
                )
            if request.backward:
                scale = torch.full_like(loss, request.scale, requires_grad=False)
                leaves = [*self._attempt.user_leaves, *hidden]
                # What other ranks give the criterion's leaves is what the first rank
                # gives them.
                with set_aside(
                    leaves if self.counts else [*leaves, *self._task.leaves]
                ):
                    self._task.run_untimed_backward([loss], [scale])
                    unalias([*self._task.leaves, *leaves])
                    self.gradients = [
                        (t, t.grad if self.counts else None) for t in leaves
                    ]
                _require_one_value(self._pieces)
        except BaseException as error:
            add_note(
                error,
                f"in the criterion, with the outputs of all {sum(self._rows)} rows",
            )
            raise
        return loss.detach()

    def _hidden_leaves(self, loss: Tensor, nodes: Sequence[Any]) -> list[Tensor]:
        """The leaves that ``loss`` reaches without passing ``nodes``, and that no
        search finds.
        """
        known = {id(leaf) for leaf in (*self._task.leaves, *self._attempt.user_leaves)}
        hidden = [leaf for leaf in leaves_reached(loss, nodes) if id(leaf) not in known]
        if self._ranks is None:
            return hidden
        for leaf in hidden:
            if isinstance(leaf, nn.Parameter):
                raise ValueError(
                    f"the criterion reaches a parameter of shape {tuple(leaf.shape)} "
                    "that a search "
                    "for ranks does not find; bind its module with "
                    "functools.partial(criterion, "
                    f"net=net), or make it a part of an nn.Module"
                )
        return []  # the criterion itself made them, as for a gradient penalty


def _require_one_value(pieces: Sequence[Any]) -> None:
    """Raise ``ValueError`` if a 0-dim output that gets a gradient differs between
    micro-batches.
    """
    for first, *others in zip(*map(nested.tensors, pieces), strict=True):
        uses_number = not first.ndim and first.grad is not None
        if uses_number and not all(same_bits(first, other) for other in others):
            raise ValueError(
                "the module returns a number that is another one for each "
                "micro-batch, and the "
                "loss uses it; return what it is computed from, one entry per row, "
                "and compute it "
                "in the criterion, which with whole_batch=True sees all rows. Nothing "
                "was changed"
            )


def agreements(tensors: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    """For each output with a gradient: whether it is that of the first pass, as a 0-dim
    tensor.

    Elements are equal, NaN too, or differ by rounding, which kernels may change. The
    tolerance is far below what another dropout mask changes.
    """
    kinds = [
        [(t.shape, t.dtype, t.requires_grad) for t in each]
        for each in (tensors, leaves)
    ]
    if kinds[0] != kinds[1]:
        raise RuntimeError(
            f"the second forward pass gave outputs of another kind: {_WHY}"
        )
    agreed = []
    for tensor, leaf in zip(tensors, leaves, strict=True):
        if leaf.numel() and leaf.grad is not None:
            now, before = tensor.detach(), leaf.detach()
            size = before.abs().nan_to_num(0.0, 0.0, 0.0).amax()
            is_near = (now - before).abs() <= size * torch.finfo(now.dtype).eps ** 0.5
            is_equal = torch.isclose(now, before, rtol=0.0, atol=0.0, equal_nan=True)
            agreed.append(is_near.logical_or_(is_equal).all())
    return agreed


_WHY = (
    "this module depends on something that is not the same the second time, such as "
    "the random "
    "numbers of Python or NumPy, or a counter outside of it; draw from torch's "
    "generators and keep "
    "state in the module, or have one sub-step per replica, which whole_batch=True "
    "computes once. "
    "Nothing was changed"
)
