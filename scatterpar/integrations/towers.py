"""Contrastive models, such as CLIP: replicas run the encoders of images and of texts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from scatterpar.integrations.loop import Modules, replaced


def of(model: nn.Module) -> list[nn.Module]:
    """The encoders of a contrastive model, for images and for texts; empty for other models."""
    names = ("vision_model", "text_model")
    parts = (dict(part.named_children()) for part in model.modules())
    return next(([part[n] for n in names] for part in parts if part.keys() >= {*names}), [])


def pooled(work: Modules, batch: Mapping[str, Any]) -> list[list[Tensor]]:
    """The pooled outputs of a replica's towers for one batch: a list with one entry per batch."""
    outputs = dict[nn.Module, Tensor]()

    def store(tower: nn.Module, _: Any, output: Any) -> None:
        outputs[tower] = output.pooler_output

    model = work[0]
    with contextlib.ExitStack() as stack:
        for tower in of(model):
            stack.enter_context(tower.register_forward_hook(store))
        model(**{**batch, "return_loss": False})
    return [[outputs[tower] for tower in of(model)]]


@contextlib.contextmanager
def returning(model: nn.Module, outputs: Sequence[Sequence[Tensor]]) -> Iterator[None]:
    """In the body, the towers return these outputs, which ``pooled`` gave, for all rows."""
    with contextlib.ExitStack() as stack:
        for tower, parts in zip(of(model), zip(*outputs, strict=True), strict=True):
            output = BaseModelOutputWithPooling(pooler_output=torch.cat(parts))
            forward = lambda *_, output=output, **__: output  # noqa: E731
            stack.enter_context(replaced(tower, forward=forward))
        yield
