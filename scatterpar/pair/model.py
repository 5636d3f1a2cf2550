"""DataParallelModel: outputs stay on the devices that made them.

The pair follows Hang Zhang's PyTorch-Encoding (``encoding.parallel``): the model returns a
tuple with one entry per replica, and the criterion computes each entry's loss on the device
that holds it, so that no device has to hold the outputs of all.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import nn

from scatterpar.devices.links import LinkCheck
from scatterpar.devices.verbs import DeviceLike, resolve
from scatterpar.pair.crossing import Crossing, replicate, require_eager, run_each, scatter_owned
from scatterpar.plan import Plan, make_plan
from scatterpar.replicas.kinds import check_placement
from scatterpar.replicas.wrapper import Wrapper
from scatterpar.step import nested
from scatterpar.step.commit import commit_buffers
from scatterpar.step.options import check_dim, check_module
from scatterpar.step.rows import count_rows
from scatterpar.threads.workers import Workers

__all__ = ["DataParallelModel"]


class DataParallelModel(Wrapper):
    """Run a module on all devices and leave each output on the device that made it.

    Args:
        module: any ``nn.Module`` on ``device_ids[0]``.
        device_ids: one entry per replica, as in ``ScatterOnceParallel``.
        dim: the dimension that holds the rows.

    Raises:
        TypeError: ``module`` is no ``nn.Module`` or wrapped in another one that makes replicas,
            ``device_ids`` no list.
        ValueError: a device that is not here, a parameter that is not on ``device_ids[0]``.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from scatterpar import DataParallelCriterion
        >>> net = nn.Linear(8, 3)
        >>> model = DataParallelModel(net, device_ids=["cpu"] * 2)
        >>> criterion = DataParallelCriterion(nn.CrossEntropyLoss())
        >>> outputs = model(torch.randn(5, 8))
        >>> [tuple(output.shape) for output in outputs]
        [(3, 3), (2, 3)]
        >>> loss = criterion(outputs, torch.tensor([0, 1, 2, 0, 1]))
        >>> loss.backward()
        >>> net.weight.grad.shape
        torch.Size([3, 8])
    """

    def __init__(
        self, module: nn.Module, device_ids: Sequence[DeviceLike] | None = None, dim: int = 0
    ) -> None:
        super().__init__()
        check_module(module)
        require_eager(module)
        check_dim(dim)
        self.module = module
        self.device_ids = resolve(device_ids)
        self.dim = dim
        check_placement((module,), self.device_ids, lazy=True)
        self._hire()

    def _hire(self) -> None:
        self._workers = Workers(len(self.device_ids), "this DataParallelModel")
        self._proven: set[Hashable] = set()
        self._check_links = LinkCheck(self.device_ids)

    def forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The module's outputs: a tuple with one entry per replica used, each on its device.

        Args:
            inputs: positional arguments of the module, nested at will. Tensors are split
                along ``dim``; 0-dim tensors and everything else go to every replica.
            kwargs: its keyword arguments, likewise.

        Returns:
            The outputs, with buffers as replica 0 left them in the module. Inputs that
            require grad, and the module's parameters, get their gradients by ``backward()``.

        Raises:
            ValueError: no rows, or tensors that disagree in them; a forward pass that writes
                parameters.
            RuntimeError: a call from inside another, a lazy module never called before, or copies
                between the devices that bring other bytes through the host's memory too.

            What the module raises arrives as it is, with a note of the replica.
        """
        rows = count_rows({"inputs": inputs, "keyword inputs": kwargs}, self.dim, data=False)
        plan = make_plan(rows, self.device_ids)
        require_eager(self.module)
        with self._workers.exclusive():
            return self._run(plan, (inputs, kwargs))

    def _run(self, plan: Plan, batch: Any) -> tuple[Any, ...]:
        devices = [share.device for share in plan.shares]
        self._check_links()
        with Crossing() as crossing:
            replicas, guard = replicate(self.module, devices, self._proven)
            modules = [replica.of(self.module) for replica in replicas]
            calls = scatter_owned(batch, plan, self.dim, crossing)
            outputs = run_each(self._workers, plan, modules, calls, guard)
            nested.refuse_generators(outputs)
            commit_buffers(replicas[0].changed_buffers())
        return tuple(outputs)
