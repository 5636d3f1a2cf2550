"""What the stock Trainer computes with ``nn.DataParallel``, on the CPU: its own formulas.

``nn.DataParallel`` needs GPUs. What it computes does not: rows are cut as by ``Tensor.chunk``, the
module runs on each piece, and outputs are concatenated, 0-dim losses as vectors. That is put in
its place, and the Trainer believes that it has so many GPUs. All else is the Trainer's own code.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from harness.trainers import arguments, quietly
from scatterpar.integrations.transformers import ScatterOnceTrainer


class Chunks(nn.DataParallel):
    """What ``nn.DataParallel`` computes, in a row on one device."""

    parts = 4

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module

    def forward(self, **inputs: Any) -> Any:
        pieces = [(key, value.chunk(self.parts)) for key, value in inputs.items()]
        count = min(len(chunks) for _, chunks in pieces)
        outputs = [self.module(**{key: chunks[i] for key, chunks in pieces}) for i in range(count)]
        return {
            key: torch.cat([o[key].reshape(1) if not o[key].ndim else o[key] for o in outputs])
            for key in ("loss", "logits")
        }


class _Gradients(transformers.TrainerCallback):
    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.found = [p.grad.clone() for p in kwargs["model"].parameters() if p.grad is not None]


def gradient(
    kind: str,
    folder: Path,
    model: nn.Module,
    data: Any,
    collate: Any,
    size: int,
    k: int,
    parts: int = 1,
) -> Tensor:
    """The first step's gradient: windows of ``k`` batches of ``size`` rows each.

    Args:
        kind: ``"stock"``, ``"data parallel"`` or ``"scatterpar"``.
        parts: the devices; ``size`` is that of all of them together.
    """
    args = arguments(
        folder,
        remove_unused_columns=False,
        per_device_train_batch_size=size // parts if kind != "stock" else size,
        gradient_accumulation_steps=k,
        max_steps=1,
        max_grad_norm=0.0,
        train_sampling_strategy="sequential",
    )
    extra: dict[str, Any] = {}
    cls: Any = transformers.Trainer
    patched = torch.nn.DataParallel
    if kind == "scatterpar":
        cls, extra = ScatterOnceTrainer, {"device_ids": [f"cpu:{i}" for i in range(parts)]}
    seen = _Gradients()
    try:
        if kind == "data parallel":
            args._n_gpu = parts
            Chunks.parts = parts
            torch.nn.DataParallel = Chunks  # type: ignore[misc]
        trainer = cls(
            copy.deepcopy(model),
            args,
            data_collator=collate,
            train_dataset=data,
            callbacks=[seen],
            **extra,
        )
        quietly(trainer.train)
    finally:
        torch.nn.DataParallel = patched  # type: ignore[misc]
    return torch.cat([g.flatten() for g in seen.found])
