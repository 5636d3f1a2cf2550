"""Learning rate and parameter groups for large batches.

After Goyal et al. 2017, "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour",
arXiv:1706.02677: scale the rate with the batch (section 2.1), reach that rate gradually
(2.2), start residual blocks as the identity and leave normalisation without weight
decay (5.1).
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from scatterpar.option_checks import check_number

__all__ = [
    "gradual_warmup",
    "linear_scaled_lr",
    "weight_decay_groups",
    "zero_init_residual",
]

_NORMALISATION = re.compile(r"norm(\dd)?$", re.IGNORECASE)


def linear_scaled_lr(
    base_lr: float, batch_size: int, base_batch_size: int = 256
) -> float:
    """The learning rate for a batch size: `base_lr * batch_size / base_batch_size`.

    After Goyal et al., section 2.1. `batch_size` counts the rows of one optimizer step,
    on all devices together. Raises `ValueError` for a number that is not positive and
    finite.

    >>> linear_scaled_lr(0.1, 4096)
    1.6
    """
    _check_positive(
        base_lr=base_lr, batch_size=batch_size, base_batch_size=base_batch_size
    )
    return base_lr * batch_size / base_batch_size


def gradual_warmup(
    optimizer: Optimizer,
    warmup_steps: int,
    start_lr: float,
    after: LRScheduler | None = None,
) -> LRScheduler:
    """A scheduler that moves rates to their targets in equal steps.

    Then `after` takes over. After Goyal et al., section 2.2. The targets are the
    present rates of the optimizer's groups. At step `t < warmup_steps` the first
    group's rate is `start_lr + (target - start_lr) * t / warmup_steps`, and the others
    are in proportion. At step `warmup_steps + t` every rate is that of `after` at its
    own step `t`. Without `after` it stays at its target. Call `.step()` once after each
    `optimizer.step()`, and never `after.step()`. `state_dict()` includes `after`'s.

    Args:
        optimizer: this call sets the rates of its groups to those of step 0.
        warmup_steps: optimizer steps until the target is reached; above zero.
        start_lr: the first group's rate at step 0; above zero.
        after: a scheduler that was built on the same optimizer before this call and not
            yet stepped.

    Raises:
        ValueError: a size or rate is not positive; `after` belongs to another optimizer
            or has been stepped already.
        TypeError: `after` is a `ReduceLROnPlateau`, which cannot step without a metric.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.6)
    >>> after = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    >>> scheduler = gradual_warmup(optimizer, warmup_steps=3, start_lr=0.1, after=after)
    >>> rates = []
    >>> for _ in range(6):
    ...     rates.append(round(optimizer.param_groups[0]["lr"], 6))
    ...     optimizer.step()
    ...     scheduler.step()
    >>> rates
    [0.1, 0.6, 1.1, 1.6, 0.8, 0.4]
    """
    _check_positive(warmup_steps=warmup_steps, start_lr=start_lr)
    # Rates at the start are in proportion to it.
    first_lr = float(optimizer.param_groups[0]["lr"])
    check_number("the first group's learning rate", first_lr)
    if isinstance(after, ReduceLROnPlateau):
        raise TypeError(
            "`after` is a ReduceLROnPlateau, which needs a metric at every step; warm "
            "up without `after`, then step the ReduceLROnPlateau yourself"
        )
    if after is not None:
        _refuse_other_or_stepped(after, optimizer)
    return _GradualWarmup(optimizer, warmup_steps, start_lr, after)


def _refuse_other_or_stepped(after: LRScheduler, optimizer: Optimizer) -> None:
    """Refuse a scheduler that belongs to another optimizer or has been stepped."""
    if after.optimizer is not optimizer:
        raise ValueError(
            "the scheduler `after` was made with another optimizer than the warm-up; "
            "make both with the same optimizer"
        )
    if after.last_epoch != 0:
        raise ValueError(
            f"the scheduler `after` is at step {after.last_epoch} already; make a new "
            "scheduler right before you call gradual_warmup, and do not step it"
        )


class _GradualWarmup(LRScheduler):
    """A linear warm-up, followed by the steps of another scheduler.

    `SequentialLR` calls `after.step(0)` at its milestone, which starts schedulers
    without a closed form (`MultiplicativeLR`, nested ones) from the wrong rate.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_steps: int,
        start_lr: float,
        after: LRScheduler | None,
    ) -> None:
        self.warmup_steps = warmup_steps
        self.targets = [float(group["lr"]) for group in optimizer.param_groups]
        # Targets of the other groups are in proportion to the first.
        self.start_factor = start_lr / self.targets[0]
        self.after = after
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """The groups' rates at step `last_epoch`."""
        # After the warm-up `after` has set them.
        if self.last_epoch > self.warmup_steps:
            return [group["lr"] for group in self.optimizer.param_groups]
        done = self.last_epoch / self.warmup_steps
        factor = self.start_factor * (1 - done) + done
        return [target * factor for target in self.targets]

    def step(self, epoch: int | None = None) -> None:
        """Set the rates of the next step; `epoch` is not supported."""
        if epoch is not None:
            raise ValueError(
                f"step() takes no epoch, but {epoch} was given; call step() alone"
            )
        if self.after is not None and self.last_epoch >= self.warmup_steps:
            self.after.step()
        # After ``after``: it has set the rates, which ``get_lr`` returns.
        super().step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this scheduler, with that of `after` under `"after"`."""
        after = None if self.after is None else self.after.state_dict()
        return {**super().state_dict(), "after": after}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, and set the optimizer's rates to those of the state."""
        after_state = state_dict["after"]
        if (after_state is None) != (self.after is None):
            raise ValueError(
                "the state was saved with `after`, and this warm-up has none, or the "
                "other way round; make this warm-up as you made the saved one"
            )
        # torch's ``load_state_dict`` takes over every entry as an attribute.
        super().load_state_dict({**state_dict, "after": self.after})
        if self.after is not None:
            self.after.load_state_dict(after_state)
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            # In place: compiled optimizers and CUDA graphs refer to the tensor.
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def weight_decay_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split a module's parameters into a group with weight decay and one without.

    Returns two parameter groups for any optimizer of `torch.optim`, the one with decay
    first. The other has the biases (parameters with "bias" in their own name) and the
    parameters of normalisation layers (classes whose name ends in "Norm", "Norm2d" and
    so on). Every parameter is in exactly one group; frozen ones may be trained later.
    Goyal et al., section 5.1, have no decay on normalisation; Jia et al. 2018,
    arXiv:1807.11205, add the biases. Raises `ValueError` if `weight_decay` is negative
    or not finite.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    >>> for group in weight_decay_groups(model, 1e-4):
    ...     print(group["weight_decay"], [tuple(p.shape) for p in group["params"]])
    0.0001 [(3, 2)]
    0.0 [(3,), (3,), (3,)]
    """
    check_number("weight_decay", float(weight_decay), zero=True)
    exempt: set[Tensor] = set()
    for layer in module.modules():
        is_normalisation = _NORMALISATION.search(type(layer).__name__)
        # Also under a second name, such as a tied bias.
        for name, parameter in layer.named_parameters(
            recurse=False, remove_duplicate=False
        ):
            if is_normalisation or "bias" in name:
                exempt.add(parameter)
    decayed: list[Tensor] = []
    undecayed: list[Tensor] = []
    for parameter in module.parameters():
        group = undecayed if parameter in exempt else decayed
        group.append(parameter)
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
    ]


def zero_init_residual(module: nn.Module) -> int:
    """Set the scale of the last normalisation of every residual block to zero.

    In place. Each block then starts as the identity, which stabilises the first steps
    at a large rate (Goyal et al., section 5.1). Residual blocks are recognised by the
    names of their parts, as in `torchvision` and this package: a `downsample` or
    `shortcut`, and `bn3` or else `bn2` as the last normalisation. Returns their number.

    >>> block = nn.Module()
    >>> block.bn1, block.bn2 = nn.BatchNorm2d(2), nn.BatchNorm2d(2)
    >>> block.shortcut = nn.Identity()
    >>> zero_init_residual(nn.Sequential(block))
    1
    >>> block.bn1.weight.tolist(), block.bn2.weight.tolist()
    ([1.0, 1.0], [0.0, 0.0])
    """
    num_blocks = 0
    for block in module.modules():
        is_residual = hasattr(block, "downsample") or hasattr(block, "shortcut")
        # Bottlenecks have three convolutions, basic blocks two.
        normalisation = getattr(block, "bn3", None) or getattr(block, "bn2", None)
        scale = getattr(normalisation, "weight", None)
        if is_residual and isinstance(scale, nn.Parameter):
            nn.init.zeros_(scale)
            num_blocks += 1
    return num_blocks


def _check_positive(**numbers: float) -> None:
    for name, number in numbers.items():
        check_number(name, float(number))
