"""fastai's ``Learner`` on all devices of one process: a callback in the place of
``to_parallel()``.

Calls of ``learn.model`` are divided, in training and validation. The Learner's loop,
its loss function, metrics and callbacks run once per batch, as on one device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastai.callback.core import Callback
from fastai.torch_core import find_bs

from scatterpar.devices.device_ids import DeviceLike
from scatterpar.integrations.divided_modules import DividedModules

__all__ = ["ScatterOnce"]

# Callbacks that replicate the model, too, or that say that it keeps something for each
# row of a batch until the next batch.
_REFUSED = {"DistributedTrainer", "ModelResetter", "ParallelTrainer"}


class ScatterOnce(Callback):  # type: ignore[misc]
    """Trains a ``Learner`` on all devices of one process.

    The rows of each batch of the ``DataLoaders`` are computed by all devices, and the
    result is that of one device. ``learn.model`` and ``learn.loss_func`` stay as they
    are.

    Args:
        device_ids: as in ``ScatterOnceParallel``; the first is the device of the
            ``DataLoaders``.

    Raises:
        ValueError: at the start of training, if the Learner has a callback that does
            not work with this one.
    """

    _stateattrs = ("_divided",)  # not pickled
    _divided: DividedModules | None = None

    def __init__(self, device_ids: Sequence[DeviceLike] | None = None) -> None:
        self._device_ids = device_ids

    def before_train(self) -> None:
        """Refuse callbacks by name, and divide the calls of the present model."""
        learn = self.learn
        for callback in learn.cbs:
            for kind in type(callback).__mro__:
                if kind.__name__ in _REFUSED:
                    raise ValueError(
                        "ScatterOnce does not go together with "
                        f"{kind.__name__}, which replicates the model, too, or "
                        "resets a state that the model keeps from batch to batch; "
                        "remove one of the two callbacks"
                    )
        if self._divided is None or not self._divided.is_of(learn.model):
            self._close()
            self._divided = DividedModules(learn.model, self._device_ids)
        # With the Learner: a callback that was removed from it has none.
        learn._do_one_batch = partial(self._do_one_batch, learn)

    before_validate = before_train

    def _do_one_batch(self, learn: Any) -> None:
        """Process a batch as the Learner does, with the model's calls divided."""
        divided = self._divided
        assert divided is not None
        sync = divided.no_sync() if _accumulates(learn) else contextlib.nullcontext()
        with sync, divided.step(tuple(learn.xb)):
            type(learn)._do_one_batch(learn)

    def after_fit(self) -> None:
        """Restore the Learner's own method, and close the engine."""
        # A pickled Learner must not have a method of this callback.
        self.learn.__dict__.pop("_do_one_batch", None)
        self._close()

    def _close(self) -> None:
        if self._divided is not None:
            self._divided.close()
            self._divided = None


def _accumulates(learn: Any) -> bool:
    """Whether no optimizer step follows the present batch, because of fastai's
    ``GradientAccumulation``.

    Not in an epoch's last batch: it may be the last of all, and leaves gradients.
    """
    accumulation = getattr(learn, "gradient_accumulation", None)
    if accumulation is None or not learn.training or learn.iter + 1 == learn.n_iter:
        return False
    num_rows = accumulation.count + find_bs(learn.yb)
    return bool(num_rows < accumulation.n_acc)
