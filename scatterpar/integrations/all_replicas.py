"""A Trainer's devices and rows: it knows of one device, which has the rows of all replicas."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from scatterpar.devices.verbs import DeviceLike, physical, resolve

__all__ = ["AllReplicas"]

_RANDOM_STATES = "rng_state_replicas.pth"

# What stands in front of a Trainer: the Trainer, which its other bases bring along.
if TYPE_CHECKING:
    _Base = transformers.Trainer
else:
    _Base = object


class AllReplicas(_Base):
    """Makes a Trainer believe in one device: batches have the rows of all replicas.

    Args:
        args: those of the Trainer.
        device_ids: one entry per replica; the first is the Trainer's own device.
        kwargs: those of the Trainer.
    """

    _says_all_rows = False

    def __init__(
        self, *args: Any, device_ids: Sequence[DeviceLike] | None = None, **kwargs: Any
    ) -> None:
        self._device_ids = device_ids
        super().__init__(*args, **kwargs)
        self._train_batch_size = self._rows_of_a_batch()

    def create_accelerator_and_postprocess(self) -> None:
        """The Trainer's own, for one process that, to its knowledge, has one device."""
        _refuse(self.args, self.model)
        self._replicas()
        self.args._n_gpu = min(self.args.n_gpu, 1)  # so that it does not wrap in nn.DataParallel
        super().create_accelerator_and_postprocess()
        # A trial of a hyperparameter search has just set it anew, from arguments of one device.
        self._train_batch_size = self._rows_of_a_batch()

    def _rows_of_a_batch(self) -> int:
        return self.args.per_device_train_batch_size * len(self._replicas())

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

    @contextlib.contextmanager
    def _rows_of_all_replicas(self) -> Iterator[None]:
        """The arguments say how many rows a batch of all replicas has.

        The Trainer takes that for one device's: to group by length, to weigh batches, to tell
        speeds, and to compare with a checkpoint.
        """
        args, sizes = self.args, ("per_device_train_batch_size", "per_device_eval_batch_size")
        before = {name: getattr(args, name) for name in sizes}
        factor = 1 if self._says_all_rows else len(self._replicas())
        said, self._says_all_rows = self._says_all_rows, True
        try:
            for name, rows in before.items():
                setattr(args, name, rows * factor)
            yield
        finally:
            self._says_all_rows = said
            for name, rows in before.items():
                setattr(args, name, rows)

    # The data: b rows for each replica, and left on the host, from where they are scattered.

    def get_train_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own, with b rows for each replica in a batch."""
        with self._rows_of_all_replicas():
            return super().get_train_dataloader(*args, **kwargs)

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own, with b rows for each replica in a batch."""
        with self._rows_of_all_replicas():
            return super().get_eval_dataloader(*args, **kwargs)

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own, with b rows for each replica in a batch."""
        with self._rows_of_all_replicas():
            return super().get_test_dataloader(*args, **kwargs)

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("is_training", len(args) > 4 and args[4]):
            return super()._get_dataloader(*args, **kwargs)
        placing, self.accelerator.device_placement = self.accelerator.device_placement, False
        try:
            return super()._get_dataloader(*args, **kwargs)
        finally:
            self.accelerator.device_placement = placing

    def _init_training_state(self, *args: Any, **kwargs: Any) -> Any:
        with self._rows_of_all_replicas():  # it compares the arguments with those of a checkpoint
            return super()._init_training_state(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own."""
        with self._rows_of_all_replicas():
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own."""
        with self._rows_of_all_replicas():
            return super().predict(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own."""
        with self._rows_of_all_replicas():
            return super().evaluation_loop(*args, **kwargs)

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
