"""Where a fault may strike: each place is a context that sets the scene
for one step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from faults.subject import Subject
from faults.trap import trap
from scatterpar import ScatterOnceParallel


@dataclass
class Step:
    """The arguments of one ``forward_backward``."""

    inputs: Any
    targets: Any
    criterion: Any = field(default_factory=nn.CrossEntropyLoss)
    options: dict[str, Any] = field(default_factory=dict)
    failed: bool = False

    def take(self, engine: ScatterOnceParallel) -> None:
        engine.forward_backward(
            self.inputs, self.targets, self.criterion, **self.options
        )


@dataclass(frozen=True)
class Place:
    """Prepares the subject and the step; ``counted`` places are visited outside of
    sub-steps.
    """

    name: str
    prepare: Callable[[Subject, Step, str], contextlib.AbstractContextManager[None]]
    counted: bool = False


PLACES: dict[str, Place] = {}


def place(name: str, *, counted: bool = False) -> Callable[[Any], Any]:
    def add(prepare: Callable[..., Iterator[None]]) -> Any:
        PLACES[name] = Place(name, contextlib.contextmanager(prepare), counted)
        return prepare

    return add


def _nothing(subject: Subject, step: Step, name: str) -> Iterator[None]:
    yield


for name in (  # the subject itself knows these
    "forward, first line",
    "forward, last line",
    "recomputation under checkpoint",
    "backward of a Function",
    "hook on a tensor",
):
    place(name)(_nothing)


@place("criterion, a function")
def _function(subject: Subject, step: Step, name: str) -> Iterator[None]:
    def criterion(output: Tensor, targets: Tensor) -> Tensor:
        trap.at(name)
        return nn.functional.cross_entropy(output, targets)

    step.criterion = criterion
    yield


class Centred(nn.Module):
    """A criterion with a parameter and a buffer of its own."""

    def __init__(self, counted: str | None = None) -> None:
        super().__init__()
        self.counted = counted
        self.shift = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.register_buffer("centre", torch.zeros(3, dtype=torch.float64))

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        self.centre += output.detach().mean(0)
        loss = nn.functional.cross_entropy(output + self.shift - self.centre, targets)
        if self.counted is None:
            trap.at("criterion, a module with buffers")
        else:
            trap.count(self.counted)
            loss.register_hook(lambda _: trap.count(str(self.counted)))
        return loss


@place("whole batch: criterion", counted=True)
@place("criterion, a module with buffers")
def _module(subject: Subject, step: Step, name: str) -> Iterator[None]:
    whole = name.startswith("whole")
    step.criterion = centred = Centred(name if whole else None).to(
        subject.enter.weight.device
    )
    step.options["whole_batch"] = whole
    yield
    if step.failed:
        assert centred.shift.grad is None
        assert not centred.centre.any()


@place("count=", counted=True)
def _count(subject: Subject, step: Step, name: str) -> Iterator[None]:
    def count(inputs: Tensor, targets: Tensor) -> int:
        trap.count(name)
        return len(targets)

    step.options["count"] = count
    yield


def _of_all_rows(output: Tensor, targets: Tensor) -> Tensor:
    z = nn.functional.normalize(output + 0.1 * torch.rand_like(output), dim=1)
    return (z @ z.T - (targets[:, None] == targets).double()).square().mean()


# Of a layer, in one pass or in two, or of all parameters that get a gradient.
HOOKS = {
    "forward hook": "register_forward_hook",
    "full backward hook": "register_full_backward_hook",
    "whole batch: forward, either pass": "register_forward_hook",
    "whole batch: backward": "register_full_backward_hook",
    "hook on a parameter": "register_hook",
    "post-accumulate hook on a parameter": "register_post_accumulate_grad_hook",
}


def _hooked(subject: Subject, step: Step, name: str) -> Iterator[None]:
    if name.startswith("whole"):
        step.criterion = _of_all_rows
        step.options["whole_batch"] = True
    used = [p for n, p in subject.named_parameters() if not n.startswith("unused")]
    visit = trap.count if PLACES[name].counted else trap.at
    owners: list[Any] = used if name.endswith("parameter") else [subject.leave]
    with contextlib.ExitStack() as stack:
        for owner in owners:
            stack.enter_context(getattr(owner, HOOKS[name])(lambda *_: visit(name)))
        yield


for name in HOOKS:
    place(name, counted=name.startswith("whole") or name.endswith("parameter"))(_hooked)
