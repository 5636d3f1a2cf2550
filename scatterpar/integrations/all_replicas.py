"""A Trainer's devices and batches: it knows of one device, which accumulates those of all."""

from __future__ import annotations

import copy
from collections.abc import Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from scatterpar.devices.verbs import DeviceLike, physical, resolve

__all__ = ["AllReplicas"]

# What the arguments say of one device; the last two are of TRL's trainers that generate.
_SIZES = (
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
)
_RANDOM_STATES = "rng_state_replicas.pth"

# What stands in front of a Trainer: the Trainer, which its other bases bring along.
if TYPE_CHECKING:
    _Base = transformers.Trainer
else:
    _Base = object


class AllReplicas(_Base):
    """Makes a Trainer believe in one device, which accumulates the batches of all replicas.

    Its arguments are a copy of the user's, and say so.

    Args:
        args: those of the Trainer.
        device_ids: one entry per replica; the first is the Trainer's own device.
        kwargs: those of the Trainer.
    """

    def __init__(
        self, *args: Any, device_ids: Sequence[DeviceLike] | None = None, **kwargs: Any
    ) -> None:
        self._device_ids = device_ids
        super().__init__(*map(_own, args), **{name: _own(v) for name, v in kwargs.items()})

    def create_accelerator_and_postprocess(self) -> None:
        """The Trainer's own, for one process that, to its knowledge, has one device."""
        _refuse(self.args, self.model)
        self._asked = {
            name: getattr(self.args, name) for name in _SIZES if hasattr(self.args, name)
        }
        self._tell()
        self.args._n_gpu = min(self.args.n_gpu, 1)  # so that it does not wrap in nn.DataParallel
        super().create_accelerator_and_postprocess()

    def _hp_search_setup(self, trial: Any) -> None:
        """The Trainer's own, in which a trial sets some arguments anew, as for one replica."""
        for name, number in self._asked.items():
            setattr(self.args, name, number)
        super()._hp_search_setup(trial)
        self._tell()

    def _tell(self) -> None:
        """Let the arguments say what one device with the batches of all replicas has."""
        for name, number in self._of_all_replicas(self._asked, len(self._replicas())).items():
            setattr(self.args, name, number)
        self._train_batch_size = self.args.train_batch_size

    def _of_all_replicas(self, asked: dict[str, Any], n: int) -> dict[str, Any]:
        """The arguments for one device with the batches of ``n``, each as ``asked``."""
        told = {name: number and number * n for name, number in asked.items()}
        told["per_device_train_batch_size"] = asked["per_device_train_batch_size"]
        if not self._evaluates_on_all():
            told["per_device_eval_batch_size"] = asked["per_device_eval_batch_size"]
        return told

    def _evaluates_on_all(self) -> bool:
        """Whether the replicas evaluate together: TRL's trainers compute more than outputs."""
        return not any(base.__module__.startswith("trl.") for base in type(self).__mro__)

    def _replicas(self) -> tuple[torch.device, ...]:
        """The device of each replica, the Trainer's own first."""
        ids = self._device_ids
        if ids is None and self.args.device.type == "cpu":
            ids = ["cpu"]  # the user asked for the CPU, whatever else is here
        devices = resolve(ids)
        first, own = physical(devices[0]), self.args.device
        if (first.type, first.index or 0) != (own.type, own.index or 0):
            raise ValueError(
                f"device_ids must begin with the Trainer's own device, {own}, where it keeps the "
                f"model; got {devices[0]} first"
            )
        return devices

    def get_train_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own, with batches left on the host, from where they are scattered."""
        placing, self.accelerator.device_placement = self.accelerator.device_placement, False
        try:
            return super().get_train_dataloader(*args, **kwargs)
        finally:
            self.accelerator.device_placement = placing

    def set_initial_training_values(self, args: Any, dataloader: Any, *more: Any) -> Any:
        """The Trainer's own. With ``dataloader_drop_last`` the last step of an epoch is whole.

        As on one device whose batches have the rows of a step.
        """
        if args.dataloader_drop_last and isinstance(dataloader, Sized):
            dataloader = _WholeSteps(dataloader, args.gradient_accumulation_steps)
        return super().set_initial_training_values(args, dataloader, *more)

    # Random numbers of the other devices, which the Trainer does not save.

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        others = self._other_accelerators()
        if others:
            states = {str(d): torch.get_device_module(d).get_rng_state(d) for d in others}
            torch.save(states, Path(output_dir) / _RANDOM_STATES)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        path = None if checkpoint is None else Path(checkpoint) / _RANDOM_STATES
        if path is not None and path.is_file():
            states = torch.load(path, weights_only=True)
            for device in self._other_accelerators():
                if str(device) in states:
                    torch.get_device_module(device).set_rng_state(states[str(device)], device)

    def _other_accelerators(self) -> list[torch.device]:
        devices = dict.fromkeys(self._replicas())
        return [d for d in devices if d.type != "cpu" and physical(d) != self.args.device]


class _WholeSteps:
    """A loader without the batches at its end that make no whole step."""

    def __init__(self, loader: Any, batches: int) -> None:
        self._loader = loader
        self._batches = batches

    def __len__(self) -> int:
        return len(self._loader) // self._batches * self._batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _own(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, transformers.TrainingArguments) else value


def _refuse(args: Any, model: Any) -> None:
    """Refuse, by name, what needs other processes, or another owner of the model or gradients."""
    optimizer = str(getattr(args.optim, "value", args.optim))
    found = {
        "torchrun (several processes)": args.world_size > 1,
        "DeepSpeed": bool(args.deepspeed),
        "FSDP": bool(args.fsdp),
        "a model spread by device_map": len(set(getattr(model, "hf_device_map", None) or ())) > 1
        and len(set(model.hf_device_map.values())) > 1,
        f"the optimizer {optimizer}": "lomo" in optimizer,
    }
    for name, given in found.items():
        if given:
            raise ValueError(
                f"ScatterOnceTrainer does not go together with {name}: it trains one whole model "
                "in one process, with gradients that are complete before the optimizer's step; use "
                "the stock Trainer"
            )
