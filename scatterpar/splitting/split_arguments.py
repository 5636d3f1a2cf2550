"""The arguments of a check: step, batch and parts. They are checked once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from scatterpar.option_checks import check_int, check_number
from scatterpar.splitting.process_state import refers_to_accelerator
from scatterpar.splitting.step_run import StepFunction, StepResult

Loss = Callable[[Any, Any], Tensor]

_PARTS = 4  # by default, in one process


@dataclass(frozen=True)
class SplitArguments:
    """The arguments of ``splitcheck``, ``splitgrid`` and ``of_trainer``.

    Attributes:
        step, model, batch, ranks, equal, loss, timeout: as in ``splitcheck``.
        parts: micro-batches of each rank; ``None`` for the usual number.
        counted: tensors in which a loss may count; ``None`` for those of the batch.
        references: what ``step`` gave for whole batches; the cells of a grid share it.
    """

    step: StepFunction
    model: nn.Module
    batch: Any
    ranks: int
    equal: bool | None
    timeout: float
    parts: int | None = None
    loss: Loss | None = None
    counted: Any = None
    references: dict[Any, StepResult] = field(default_factory=dict)

    @property
    def num_parts(self) -> int:
        """Micro-batches of each rank."""
        if self.parts is None:
            return _PARTS if self.ranks == 1 else 1
        return self.parts

    def __post_init__(self) -> None:
        """Raise ``TypeError`` or ``ValueError`` for an argument of a wrong kind."""
        step, model, loss = self.step, self.model, self.loss
        if not callable(step):
            raise TypeError(
                f"step must be a function step(model, batches), got {step!r}"
            )
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
        if loss is not None and not callable(loss):
            raise TypeError(f"loss must be a function loss(model, batch), got {loss!r}")
        check_int("ranks", self.ranks, least=1)
        check_int("parts", self.num_parts, least=1)
        check_number("timeout", self.timeout)
        if self.num_parts == self.ranks == 1 and loss is None:
            raise ValueError(
                "parts=1 on one rank compares the step with itself; pass parts=2 or "
                "more, ranks=2 or more, or loss=function, where function(model, batch) "
                "returns the right loss in plain torch"
            )
        if self.ranks > 1:
            self._check_for_ranks()

    def _check_for_ranks(self) -> None:
        if refers_to_accelerator(self.step):
            raise ValueError(
                f"step refers to an Accelerator that was made outside of step, for "
                f"this process alone, and ranks={self.ranks} starts other processes; "
                f"make the Accelerator, or the Trainer that has it, in step, and call "
                f"prepare() there"
            )
        # Tensors of accelerators cannot be sent to other processes as copies.
        devices = {parameter.device.type for parameter in self.model.parameters()}
        if devices != {"cpu"}:
            raise ValueError(
                f"model has parameters on {', '.join(sorted(devices)) or 'no device'}; "
                "with ranks= pass it on the CPU"
            )
