"""What type checkers say of right and wrong uses; the same uses run.

mypy and pyright read this file, by the command line of CONTRIBUTING. A line that ends
in ``type: ignore`` is wrong: without an error in it, the comment itself is one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, assert_type

import pytest
import torch
from torch import Tensor, nn

from scatterpar import (
    DataParallelCriterion,
    DataParallelModel,
    GradientCheck,
    Plan,
    ShardedOptimizer,
    StepReport,
    count_labels,
    splitcheck,
)
from scatterpar import ScatterOnceParallel as Engine

CPUS = ["cpu", "cpu"]
pytestmark = pytest.mark.draws


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, rows: Tensor) -> Tensor:
        return self.embed(rows)

    def embed(self, rows: Tensor) -> Tensor:
        output: Tensor = self.layer(rows)
        return output


def difference(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().mean()


def parameters_of(engine: Engine[nn.Module]) -> int:
    return len([*engine.module.parameters()])


def any_engine() -> Engine:
    return Engine(Net())


def batch() -> tuple[Tensor, Tensor]:
    return torch.linspace(-1, 1, 32).view(8, 4), torch.ones(8, 3)


def test_module_keeps_its_class() -> None:
    engine = Engine(Net(), 2, CPUS)
    assert_type(engine, Engine[Net])
    assert_type(engine.module, Net)
    assert_type(engine.module.embed(torch.ones(2, 4)), Tensor)
    assert_type(engine.eval(), Engine[Net])
    assert parameters_of(engine) == 2
    assert_type(any_engine().module, Any)
    named = copy.deepcopy(Engine[nn.Module](Net()))
    assert_type(named.module, nn.Module)
    assert isinstance(named.module, Net)
    assert_type(DataParallelModel(Net(), CPUS).module, Net)


def test_step_returns_loss_or_with_outputs() -> None:
    engine = Engine(Net(), 2, CPUS)
    rows, targets = batch()
    assert_type(engine.forward_backward(rows, targets, difference), Tensor)
    loss = engine.loss(rows, targets, nn.MSELoss())
    assert_type(loss, Tensor)
    loss.backward()
    pair = engine.forward_backward(rows, targets, difference, return_outputs=True)
    assert_type(pair, tuple[Tensor, tuple[Any, ...]])
    returned = engine.loss(rows, targets, difference, return_outputs=torch.argmax)
    assert_type(returned, tuple[Tensor, tuple[Any, ...]])
    returned[0].backward()
    is_asked = bool(len(rows))
    either = engine.forward_backward(rows, targets, difference, return_outputs=is_asked)
    assert_type(either, Tensor | tuple[Tensor, tuple[Any, ...]])
    with pytest.raises(AttributeError):
        pair.backward()  # type: ignore


def test_options_have_types() -> None:
    engine = Engine(Net(), "auto", CPUS, buffers="batch", shares=[3, 1])
    assert_type(engine.device_ids, tuple[torch.device, ...])
    assert_type(engine.dim, int)
    assert_type(engine.last_step, StepReport)
    assert_type(engine.plan(10), Plan)
    assert_type(engine.check(*batch(), difference), GradientCheck)
    assert_type(engine.buffers(), Iterator[Tensor])
    engine.accum = 4
    engine.micro_batch_size = None
    with pytest.raises(TypeError):
        engine.accum = "many"  # type: ignore
    with pytest.raises(AttributeError):
        engine.device_ids = (torch.device("cpu"),)  # type: ignore
    with pytest.raises(TypeError):
        Engine(Net(), "many")  # type: ignore
    with pytest.raises(ValueError, match="buffers"):
        Engine(Net(), buffers="mean")  # type: ignore
    with pytest.raises(TypeError):
        Engine(Net)  # type: ignore


def test_unknown_name_is_an_error() -> None:
    engine = Engine(Net(), 2, CPUS)
    with pytest.raises(AttributeError):
        print(engine.nonsense)  # type: ignore
    with pytest.raises(AttributeError):
        engine.embed(torch.ones(2, 4))  # type: ignore
    with pytest.raises(AttributeError):
        print(engine.process_group)  # type: ignore
    with pytest.raises(AttributeError):
        print(DataParallelModel(Net(), CPUS).nonsense)  # type: ignore
    engine.acum = 4  # type: ignore


def test_step_arguments_have_types() -> None:
    engine = Engine(Net(), 2, CPUS)
    rows, targets = batch()
    labels = torch.arange(8) % 3
    count = count_labels()
    engine.forward_backward((rows,), labels, nn.functional.cross_entropy, count=count)
    engine.check({"rows": rows}, targets, difference, reduction="mean")
    with pytest.raises(ValueError, match="reduction"):
        engine.forward_backward(rows, labels, difference, reduction="none")  # type: ignore
    with pytest.raises(TypeError):
        engine.forward_backward(rows=rows)  # type: ignore
    with pytest.raises(TypeError):
        engine.forward_backward(rows, targets, nn.MSELoss)  # type: ignore
    with pytest.raises(TypeError):
        engine.forward_backward(rows, targets, difference, scaler=1024.0)  # type: ignore


def test_pair_and_optimizer_have_types() -> None:
    rows, targets = batch()
    criterion = DataParallelCriterion(difference)
    outputs = DataParallelModel(Net(), CPUS)(rows)
    assert_type(criterion.forward(outputs, targets), Tensor)
    optimizer = ShardedOptimizer(Engine(Net()), torch.optim.AdamW, lr=1e-3)
    assert_type(optimizer.state_bytes, dict[torch.device, int])
    with pytest.raises(TypeError):
        DataParallelCriterion(nn.MSELoss)  # type: ignore
    with pytest.raises(TypeError):
        ShardedOptimizer(Net(), torch.optim.AdamW)  # type: ignore


def loop(model: Net, batches: list[tuple[Tensor, Tensor]]) -> None:
    for rows, targets in batches:
        (difference(model(rows), targets) / len(batches)).backward()


def test_loop_may_name_its_modules_class() -> None:
    report = splitcheck(loop, Net(), batch(), parts=2)
    assert_type(report.passed, bool)
    with pytest.raises(TypeError):
        splitcheck(loop, Net())  # type: ignore
