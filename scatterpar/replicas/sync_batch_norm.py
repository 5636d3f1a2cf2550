"""nn.SyncBatchNorm: a sub-step is normalised over the rows of all replicas.

::

    forward    replica 0   mean, squares --+             +-- output
               replica 1   mean, squares --+-- pooled ---+-- output
               replica 2   has no sub-step of this number: nobody waits for it

    backward   replica 0   sums -----------+             +-- gradient
               replica 1   sums -----------+-- added ----+-- gradient

In each call of a layer, and in the call's backward pass, the replicas exchange one
tensor each. The last replica that arrives copies all contributions to the first one's
device and combines them in the order of replicas, so bits do not depend on timing. Then
each replica copies the result to its own device: between n devices, 2 (n - 1) copies.

A replica that fails, and an interrupt, set the ``Meeting``, which ends all waits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from scatterpar.devices.copies import write
from scatterpar.devices.streams import has_streams, use_device
from scatterpar.devices.transfers import Transfers
from scatterpar.replicas.batch_statistics import (
    Moments,
    pooled,
    running_stats_after,
)
from scatterpar.threads.workers import Cancellation, Cancelled

Direction = Literal["forward", "backward"]

# The longest wait for another replica: a first forward pass may compile kernels.
MEETING_SECONDS = 300.0

_INSTEAD = "use nn.BatchNorm2d, which normalises each micro-batch by itself"


class Contribution(NamedTuple):
    """The part of one replica in an exchange.

    Attributes:
        layer: the layer's name.
        direction: of the pass that calls the layer.
        moments: in a forward pass, those of the replica's rows; in a backward pass two
            sums of the gradient per channel, in their place.
        device: on which their tensor is stored.
        streams: on which the device computes the tensor; empty without streams.
    """

    layer: str
    direction: Direction
    moments: Moments
    device: torch.device
    streams: Sequence[torch.Stream]

    @property
    def place(self) -> str:
        """Where the replica is: the layer and the direction."""
        return f"{self.layer!r} ({self.direction})"


@dataclass(eq=False)
class Exchange:
    """The contributions of one call of a layer, by replica, and their combination.

    Attributes:
        contributions: one per replica that has arrived.
        result: the combination, where the first replica's contribution is; ``None``
            until all have arrived, and if they have come to different places.
    """

    contributions: dict[int, Contribution] = field(default_factory=dict)
    result: Contribution | None = None


@dataclass(eq=False)
class SubStep:
    """One sub-step of a pass.

    Attributes:
        replicas: those that have this sub-step.
        exchange: the present one: replicas call one layer at a time.
        ended: the replicas that have left the sub-step.
    """

    replicas: list[int]
    exchange: Exchange = field(default_factory=Exchange)
    ended: set[int] = field(default_factory=set)


class Meeting(Cancellation):
    """Where the replicas of one pass over the shares wait for each other.

    The event is the job's cancellation: ``set`` ends all waits at once.

    Attributes:
        is_turn_of: whether it is the turn of a replica in a sub-step, by both numbers:
            whoever waits for the others in its own turn would wait for ever.
    """

    def __init__(
        self, seats: Sequence[Seat], numbers: Sequence[int], transfers: Transfers
    ) -> None:
        """``seats`` and ``numbers``, of micro-batches, have one entry per replica."""
        super().__init__()
        self.is_turn_of: Callable[[int, int], bool] = nobodys_turn
        self._seats = seats
        self._transfers = transfers
        self._sub_steps: list[SubStep] = []
        for sub_step in range(max(numbers)):
            replicas = [i for i, number in enumerate(numbers) if sub_step < number]
            # The last sub-steps of uneven shares have fewer replicas.
            self._sub_steps.append(SubStep(replicas))

    def enter(self, replica: int, number: int | None) -> None:
        """End a replica's sub-step, and begin another; ``None`` if it has no more.

        Whoever waits for it in the old one waits in vain.
        """
        seat = self._seats[replica]
        if seat.meeting is self:
            with self.changed:
                self._sub_steps[seat.number].ended.add(replica)
                self.changed.notify_all()
        seat.meeting = None
        if number is not None:
            seat.meeting = self
            seat.replica = replica
            seat.number = number

    def is_shared(self, number: int) -> bool:
        """Whether several replicas have this sub-step."""
        return len(self._sub_steps[number].replicas) > 1

    def combine(self, replica: int, number: int, brought: Contribution) -> Moments:
        """Combine what all replicas bring, on this replica's device.

        Waits for the other replicas. Raises ``RuntimeError`` if they are in another
        layer or have left the sub-step, ``TimeoutError`` if one does not come, and
        ``Cancelled`` if one has failed.
        """
        sub_step = self._sub_steps[number]
        with self.changed:
            exchange = sub_step.exchange
            exchange.contributions[replica] = brought
            if len(exchange.contributions) == len(sub_step.replicas):
                # Another call of a layer may begin before all have left this one.
                sub_step.exchange = Exchange()
                self._complete(exchange)
            else:
                self._wait(sub_step, exchange, number)
            if exchange.result is None:
                places = [
                    f"replica {number} in {contribution.place}"
                    for number, contribution in sorted(exchange.contributions.items())
                ]
                raise RuntimeError(
                    "replicas wait for each other in different layers, "
                    f"{', '.join(places)}: each replica must call its nn.SyncBatchNorm "
                    f"layers in the same order; {_INSTEAD}"
                )
            return self._copied(exchange.result, brought)

    def _complete(self, exchange: Exchange) -> None:
        """Combine the contributions on the first one's device, and wake the others."""
        # In the order of replicas, so that bits do not depend on timing.
        _, contributions = zip(*sorted(exchange.contributions.items()), strict=True)
        first = contributions[0]
        try:
            # Else replicas are in different layers, and each raises the error of that.
            if len({contribution.place for contribution in contributions}) == 1:
                moments = [self._copied(source, first) for source in contributions]
                with use_device(first.device, first.streams):
                    of_all = combined(moments, first.direction)
                exchange.result = first._replace(moments=of_all)
        except BaseException:
            self.set()
            raise
        finally:
            self.changed.notify_all()

    def _wait(self, sub_step: SubStep, exchange: Exchange, number: int) -> None:
        """Wait for the other replicas. A complete exchange is never cancelled, so which
        replica fails does not depend on timing.
        """
        while len(exchange.contributions) < len(sub_step.replicas):
            if self.is_set():
                raise Cancelled
            absent = [i for i in sub_step.replicas if i not in exchange.contributions]
            left = sub_step.ended.intersection(absent)
            missing = _missing(min(left or absent), exchange, number)
            # Told at once, not after the longest wait.
            if left:
                raise RuntimeError(
                    f"{missing}, where others wait: every replica must call the same "
                    "nn.SyncBatchNorm layers, and each loss must depend on all of "
                    f"them; {_INSTEAD}"
                )
            if not self.changed.wait(MEETING_SECONDS):
                raise TimeoutError(
                    f"{missing} within {MEETING_SECONDS:g} s: this replica may wait "
                    "for a lock that another one holds, such as the lock of a "
                    "criterion that is a function; write such a criterion as an "
                    f"nn.Module, of which each replica has a copy, or {_INSTEAD}"
                )
        if exchange.result is None and self.is_set():
            raise Cancelled  # the last replica could not combine the contributions

    def _copied(self, source: Contribution, target: Contribution) -> Moments:
        """The moments of ``source``, where those of ``target`` are stored."""
        moments = source.moments
        if source.device == target.device:
            return moments
        # Torch puts a copy on the current streams of both devices. In a thread of
        # autograd that of another device is the default stream, which waits neither for
        # the tensor nor for what reads its memory next.
        with use_device(target.device, [*source.streams, *target.streams]):
            packed = self._transfers.copy(moments.packed, target.device, "compute")
        return moments._replace(packed=packed)


def nobodys_turn(replica: int, sub_step: int) -> bool:
    """False: replicas do not take turns."""
    return False


def combined(contributions: Sequence[Moments], direction: Direction) -> Moments:
    """The contributions of all replicas as one; they are on one device."""
    if direction == "forward":
        return pooled(contributions)
    sums = torch.stack([contribution.packed for contribution in contributions])
    return Moments(0, sums.sum(0))


def _missing(replica: int, exchange: Exchange, number: int) -> str:
    places = {contribution.place for contribution in exchange.contributions.values()}
    names = " and ".join(sorted(places))
    return f"replica {replica} does not reach {names} in sub-step {number}"


@dataclass(eq=False)
class Seat:
    """The place of one replica in a pass: its meeting, number and present sub-step.

    Layers find their meeting here, and not through a variable of the thread: autograd
    runs backward passes in threads of its own.

    Attributes:
        device: the replica's device.
        meeting: of the pass that runs; ``None`` outside of passes.
        replica: its number among those of the pass.
        number: of its present sub-step.
    """

    device: torch.device
    meeting: Meeting | None = None
    replica: int = 0
    number: int = 0

    def is_shared(self) -> bool:
        """Whether other replicas have the present sub-step, too."""
        return self.meeting is not None and self.meeting.is_shared(self.number)


def seat_layers(
    seat: Seat, root: object, modules: Iterable[nn.Module], *, records_own: bool
) -> None:
    """Let the synchronised layers among a replica's ``modules`` exchange statistics.

    With ``records_own`` running statistics are pooled after the step, so each layer
    records those of its own rows.
    """
    names: dict[int, str] = {}
    if isinstance(root, nn.Module):
        names = {id(module): name for name, module in root.named_modules()}
    for number, layer in enumerate(synchronised_layers(modules)):
        if not has_own_forward(layer):
            # A layer in a plain list has no name.
            name = names.get(id(layer), f"number {number}")
            vars(layer)["forward"] = SynchronisedForward(layer, name, seat, records_own)


def refuse_to_wait(obstacles: Mapping[str, bool]) -> None:
    """Raise ``ValueError`` for the first obstacle that is there."""
    for words, is_there in obstacles.items():
        if is_there:
            raise ValueError(
                "replicas exchange the statistics of nn.SyncBatchNorm layers, and wait "
                f"for each other, which does not work with {words}; {_INSTEAD}"
            )


def synchronised_layers(modules: Iterable[nn.Module]) -> list[nn.SyncBatchNorm]:
    """The layers of this kind."""
    return [module for module in modules if isinstance(module, nn.SyncBatchNorm)]


def has_own_forward(layer: nn.SyncBatchNorm) -> bool:
    """Whether the user has replaced the layer's ``forward``, in a subclass or in the
    object.
    """
    is_replaced = "forward" in vars(layer)
    return is_replaced or type(layer).forward is not nn.SyncBatchNorm.forward


class SynchronisedForward:
    """The ``forward`` of one replica's layer."""

    def __init__(
        self, layer: nn.SyncBatchNorm, name: str, seat: Seat, records_own: bool
    ) -> None:
        self._layer = weakref.ref(layer)  # the layer refers to this object
        self._name = name
        self._seat = seat
        self._records_own = records_own

    def __call__(self, rows: Tensor) -> Any:
        """The normalised rows of one micro-batch."""
        layer: Any = self._layer()
        # Alone in a sub-step, it is plain batch normalisation.
        if not layer.training or not self._seat.is_shared():
            return nn.SyncBatchNorm.forward(layer, rows)
        # torch's own checks, for torch's own errors.
        layer._check_input_dim(rows)
        layer._check_non_zero_input_channels(rows)
        number = self._seat.number
        with torch.no_grad():
            moments_here = moments_of(rows)
            moments = self.combine("forward", number, moments_here)
            # Of all replicas: a replica may well have one row.
            if moments.values == 1:
                raise ValueError(
                    "Expected more than 1 value per channel when training, got 1; pass "
                    "more rows, or call eval() on this layer"
                )
            if layer.track_running_stats:
                recorded = moments_here if self._records_own else moments
                for _, name, value in running_stats_after(layer, recorded):
                    write(getattr(layer, name), value)
        normalise: Any = Normalise.apply
        weight = layer.weight
        return normalise(rows, weight, layer.bias, layer.eps, moments, self, number)

    def combine(self, direction: Direction, number: int, moments: Moments) -> Moments:
        """As ``Meeting.combine`` in sub-step ``number``, in the replica's present pass.

        In the second of two passes a graph that was kept belongs to another meeting
        than in the first. So the meeting is looked up when an exchange begins.
        """
        seat = self._seat
        if seat.meeting is None:
            raise RuntimeError(
                f"the {direction} pass of {self._name!r}, an nn.SyncBatchNorm, runs "
                "outside of a sub-step, and replicas exchange statistics only inside "
                f"of one; {_INSTEAD}"
            )
        # The others cannot come to an exchange, as long as they wait for their turn.
        if seat.meeting.is_turn_of(seat.replica, seat.number):
            raise RuntimeError(
                f"the criterion computes a gradient through {self._name!r}. In this "
                "layer each replica waits for all others. A criterion that is a "
                "function is called by one replica at a time, so this replica would "
                "wait for ever; write the criterion as an nn.Module, of which each "
                "replica has a copy"
            )
        streams = []
        if has_streams(moments.packed.device):
            streams.append(torch.accelerator.current_stream(moments.packed.device))
        brought = Contribution(self._name, direction, moments, seat.device, streams)
        return seat.meeting.combine(seat.replica, number, brought)


def moments_of(rows: Tensor) -> Moments:
    """The moments of one replica's rows, at least in float32."""
    dtype = torch.promote_types(rows.dtype, torch.float32)
    rows = rows.to(dtype)
    channels = rows.size(1)
    values = rows.numel() // channels
    if values == 0:
        return Moments(0, rows.new_zeros(2, channels))
    dimensions = [0, *range(2, rows.ndim)]
    variance, mean = torch.var_mean(rows, dimensions, correction=0)
    return Moments(values, torch.stack([mean, variance * values]))


class Normalise(torch.autograd.Function):
    """Normalise rows with statistics that depend on the rows of all replicas."""

    @staticmethod
    def forward(
        context: Any,
        rows: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        moments: Moments,
        synchronised: SynchronisedForward,
        number: int,
    ) -> Tensor:
        """The kernel of evaluation mode, for which statistics are given."""
        mean, squares = moments.packed
        variance = squares / max(1, moments.values)
        context.save_for_backward(rows, weight, bias, mean, variance)
        context.eps = eps
        context.values = moments.values
        context.synchronised = synchronised
        context.number = number
        weight = cast(weight, mean.dtype)
        bias = cast(bias, mean.dtype)
        return functional.batch_norm(rows, mean, variance, weight, bias, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> Any:
        """The gradient of all rows' loss, also through the statistics.

        With x-hat = (x - mean) * slope, N values per channel, sums over replicas::

            weight * slope * (dy - sum(dy) / N - x-hat * sum(dy * x-hat) / N)
        """
        rows, weight, bias, mean, variance = context.saved_tensors
        slope = torch.rsqrt(variance + context.eps)
        # CUDA's kernel has no gradients without a weight.
        scale = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
        of_rows, of_weight, of_bias = gradients_of_evaluation(
            gradient, rows, scale, (mean, variance, slope), context.eps
        )
        # Without it nobody else waits: all replicas run the same layers.
        if context.needs_input_grad[0]:
            brought = Moments(0, torch.stack([of_bias, of_weight]))
            combine = context.synchronised.combine
            _, sums = combine("backward", context.number, brought)
            sums = sums * slope / context.values * scale
            of_shift, of_slope = sums
            # In the statistics' dtype: rows in half precision would be rounded thrice.
            correction = rows - per_channel(mean, rows)
            correction *= per_channel(of_slope * slope, rows)
            correction += per_channel(of_shift, rows)
            of_rows -= correction
        nothing = [None] * 4
        return (
            of_rows,
            gradient_like(of_weight, weight),
            gradient_like(of_bias, bias),
            *nothing,
        )


def gradients_of_evaluation(
    gradient: Tensor,
    rows: Tensor,
    scale: Tensor,
    statistics: tuple[Tensor, Tensor, Tensor],
    eps: float,
) -> Sequence[Tensor]:
    """The gradients of rows, weight and bias, as if statistics did not depend on rows.

    ``statistics`` are mean, variance and slope.
    """
    # Without values the CPU's kernel divides by zero, which ends the process.
    if not rows.numel():
        return torch.empty_like(rows), torch.zeros_like(scale), torch.zeros_like(scale)
    # CUDA's kernel for rows with channels last, or without further dimensions, asks for
    # all of these.
    mean, variance, slope = statistics
    every = [True, True, True]
    gradients: Sequence[Tensor] = torch.ops.aten.native_batch_norm_backward(
        gradient, rows, scale, mean, variance, mean, slope, False, eps, every
    )
    return gradients


def cast(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The parameter in ``dtype``, if the layer has one."""
    return None if parameter is None else parameter.to(dtype)


def gradient_like(gradient: Tensor, parameter: Tensor | None) -> Tensor | None:
    """The gradient in the parameter's dtype, if the layer has one."""
    return None if parameter is None else gradient.to(parameter.dtype)


def per_channel(values: Tensor, rows: Tensor) -> Tensor:
    """``values``, which broadcast along the channels of ``rows``."""
    shape = [1] * rows.ndim
    shape[1] = -1
    return values.view(shape)
