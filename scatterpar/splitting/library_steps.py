"""One optimizer step of a library's trainer on given parts, for ``of_trainer``.

Each library has a function of a few lines, and is not imported before a user has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, default_collate

from scatterpar.libraries import package_of

# What a trainer that generates its batches needs in the place of prompts.
_GENERATED = ("completion_ids", "completion_mask", "advantages")

# What TRL's trainers have that make batches by themselves.
_BUFFERS = ("_buffered_inputs", "_generate_and_score_completions")


def run_one_step(trainer: Any, model: nn.Module, batches: Sequence[Any]) -> None:
    """Train one optimizer step. Raises ``TypeError`` for an unknown trainer."""
    # By name: to import the class would import its library.
    for kind in type(trainer).__mro__:
        run = _STEPS.get((package_of(kind), kind.__name__))
        if run is not None:
            run(trainer, model, batches)
            return
    kinds = ", ".join(f"{library}'s {name}" for library, name in _STEPS)
    raise TypeError(
        f"make must return a trainer ({kinds}), got {type(trainer).__name__}; pass a "
        f"step(model, batches) to splitcheck for another loop"
    )


def _collated(batches: Sequence[Any], collate: Callable[[Any], Any]) -> list[Any]:
    """The parts; those that are lists of samples are collated."""
    parts = []
    for batch in batches:
        parts.append(collate(batch) if type(batch) is list else batch)
    return parts


def _loader(parts: Any) -> DataLoader[Any]:
    return DataLoader(parts, batch_size=None)


def _check_steps(given: int, steps: int, keyword: str) -> None:
    if given != steps:
        raise ValueError(
            f"the trainer accumulates {given} micro-batches, not {steps}; pass "
            f"{keyword}=steps to the trainer in your function make(model, steps)"
        )


def _of_transformers(trainer: Any, _: nn.Module, batches: Sequence[Any]) -> None:
    """Also trainers of TRL and sentence-transformers, which are derived from it."""
    arguments = trainer.args
    steps = arguments.gradient_accumulation_steps
    _check_steps(steps, len(batches), "gradient_accumulation_steps")
    parts = _collated(batches, trainer.data_collator)
    if _makes_batches(trainer):
        _use_made(trainer, parts)
    arguments.max_steps = 1
    arguments.save_strategy = "no"
    arguments.eval_strategy = "no"
    # A step leaves no files, and shows nothing, on any rank.
    arguments.logging_strategy = "no"
    arguments.report_to = []
    # This one decides when the stock loop ends; others log and save.
    handler = trainer.callback_handler
    flow = [c for c in handler.callbacks if type(c).__name__ == "DefaultFlowCallback"]
    handler.callbacks = flow
    # The parts are given, so no sampler may divide them again.
    trainer.get_train_dataloader = lambda: _loader(parts)
    trainer.train()


def _makes_batches(trainer: Any) -> bool:
    """Whether a trainer makes its batches from those of its loader.

    Trainers of reinforcement learning and distillation generate texts for a whole
    optimizer step, keep them in a buffer, and give out one micro-batch after another.
    """
    return any(hasattr(trainer, name) for name in _BUFFERS)


def _use_made(trainer: Any, parts: Sequence[Any]) -> None:
    """Train on batches as they are: a trainer would make others for each split."""
    is_generated = hasattr(trainer, "_generate_and_score_completions")
    keys = _GENERATED if is_generated else ("input_ids", "labels")
    for part in parts:
        if not isinstance(part, Mapping) or not set(keys) <= part.keys():
            raise ValueError(
                f"{type(trainer).__name__} makes its batches by itself, differently "
                f"for each split; pass as batch the dict that the trainer's "
                f"_prepare_inputs returns. It has the keys {', '.join(keys)}"
            )
    trainer._prepare_inputs = lambda inputs: inputs


def _of_lightning(trainer: Any, module: nn.Module, batches: Sequence[Any]) -> None:
    steps = trainer.accumulate_grad_batches
    _check_steps(steps, len(batches), "accumulate_grad_batches")
    parts = _collated(batches, default_collate)
    # A Trainer checks these in its constructor, which the user has called.
    trainer.fit_loop.epoch_loop.max_steps = 1
    trainer.limit_train_batches = len(parts)
    trainer.limit_val_batches = 0
    trainer.num_sanity_val_steps = 0
    trainer.loggers = []
    checkpoints = trainer.checkpoint_callbacks
    trainer.callbacks = [c for c in trainer.callbacks if c not in checkpoints]
    # Each process has its own parts already.
    trainer._accelerator_connector.use_distributed_sampler = False
    trainer.fit(module, _loader(parts))


def _of_fastai(learner: Any, _: nn.Module, batches: Sequence[Any]) -> None:
    from fastai.callback.core import CancelFitException
    from fastai.data.load import DataLoader as FastaiLoader

    def end() -> None:
        raise CancelFitException  # gradients are known, and not yet set to zero

    parts = _collated(batches, default_collate)
    # Its means are in float32, beside a loss in float64.
    recorders = [c for c in learner.cbs if type(c).__name__ == "Recorder"]
    learner.remove_cbs(recorders)
    learner.dls.loaders = [FastaiLoader(parts, bs=None)]
    learner.create_opt()
    learner.opt.step = end
    learner._do_epoch_validate = lambda *_: None
    with learner.no_bar(), learner.no_logging():
        learner.fit(1)


_STEPS: Mapping[tuple[str, str], Callable[[Any, nn.Module, Sequence[Any]], None]] = {
    ("transformers", "Trainer"): _of_transformers,
    ("lightning", "Trainer"): _of_lightning,
    ("pytorch_lightning", "Trainer"): _of_lightning,
    ("fastai", "Learner"): _of_fastai,
}
