"""Modules that draw random numbers: on accelerators they are looked at as on the CPU.

A look holds random numbers constant, to compare results, and puts all generators back:
the host's, each accelerator's, Python's and NumPy's. On a device whose generator it
misses, no wrong loss of a module with dropout is refused, and looks move the numbers of
the training. So each test is one table of what is trained and where: on the CPU in any
run, and on accelerators where there are some, or as ``test_simulated.py`` runs them.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from harness.models import CLASSES, FEATURES, Of
from harness.oracle import build, randint, randn
from harness.pairwise import few_of
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from scatterpar import (
    DataParallelCriterion,
    DataParallelModel,
    ScatterOnceParallel,
    count_labels,
    splitcheck,
)

pytestmark = [pytest.mark.nullcuda, pytest.mark.cuda, pytest.mark.draws]
ROWS = 24
LENGTH = 3
INPUTS = randn(ROWS, LENGTH, FEATURES)
LABELS = randint(CLASSES, ROWS)
IGNORED = torch.where(torch.arange(ROWS) % 5 < 2, -100, LABELS)
ACCELERATOR = torch.accelerator.current_accelerator()
COUNT = torch.accelerator.device_count()


def _on(*numbers):
    """A layout on accelerators, by their numbers."""
    ids = [f"{ACCELERATOR.type if ACCELERATOR else 'cuda'}:{n}" for n in numbers]
    missing = pytest.mark.skipif(
        max(numbers) >= COUNT, reason=f"needs {max(numbers) + 1} accelerators"
    )
    return pytest.param(ids, marks=missing, id=f"on {numbers}")


# On a machine with accelerators, those of the CPU are in the slow run. One replica, and
# those that share a memory, draw from streams of their own, as on virtual devices.
_CPU = [pytest.mark.slow] if COUNT else []
LAYOUTS = [
    pytest.param(["cpu"], marks=pytest.mark.slow, id="cpu"),
    pytest.param(["cpu", "cpu"], marks=pytest.mark.slow, id="shared"),
    pytest.param(["cpu:0", "cpu:1"], marks=_CPU, id="virtual"),
    _on(0),
    _on(1, 0),
]
on_all_layouts = pytest.mark.parametrize("layout", LAYOUTS)

# --- what draws ---


class Encoder(nn.Module):
    """Dropout of attention's weights, of hidden layers, and of results."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            FEATURES, 1, 8, dropout=0.2, batch_first=True
        )
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, rows):
        return self.head(self.layer(rows).mean(1))


def drawing(function):
    """Makes a module: two linear layers, and what ``function`` makes of what is between
    them.
    """

    def make():
        return Of(
            lambda net, rows: net.last(function(net.first(rows.flatten(1)).tanh())),
            first=nn.Linear(LENGTH * FEATURES, 8),
            last=nn.Linear(8, CLASSES),
        )

    return make


def sequential(*layers):
    def make():
        first = nn.Linear(LENGTH * FEATURES, 8)
        return nn.Sequential(nn.Flatten(), first, *layers, nn.Linear(8, CLASSES))

    return make


def kept_rows(hidden):
    """Stochastic depth: whole rows are dropped."""
    return hidden * hidden.new_empty(len(hidden), 1).bernoulli_(0.7) / 0.7


def drawn_on_host(hidden):
    return hidden + torch.rand(hidden.shape[1]).to(hidden)


MODULES = {
    "dropout": sequential(nn.Tanh(), nn.Dropout(0.3)),
    "dropout in place": sequential(nn.Dropout(0.3, inplace=True)),
    "two dropouts": sequential(nn.Dropout(0.2), nn.Tanh(), nn.Dropout(0.4)),
    "alpha dropout": sequential(nn.SELU(), nn.AlphaDropout(0.2)),
    "encoder": Encoder,
    "noise": drawing(lambda hidden: hidden + 0.1 * torch.randn_like(hidden)),
    "uniform noise": drawing(lambda hidden: hidden * torch.rand_like(hidden)),
    "stochastic depth": drawing(kept_rows),
    "checkpointed": drawing(
        lambda hidden: checkpoint(F.dropout, hidden, 0.3, use_reentrant=False)
    ),
    "drawn on the host": drawing(drawn_on_host),
    "drawn by Python": drawing(lambda hidden: hidden * (1 + random.random())),
    "drawn by NumPy": drawing(lambda hidden: hidden * float(np.random.rand())),
}


def by_module(*quick):
    return pytest.mark.parametrize("name", few_of(MODULES, quick))


# Generators of the process, from which replicas draw in the order in which they run.
OF_PROCESS = "drawn by Python", "drawn by NumPy"


def module_of(name, layout):
    return build(MODULES[name]).to(torch_device(layout[0]))


def torch_device(name):
    return torch.device("cpu") if name.startswith("cpu") else torch.device(name)


# --- what is wrong ---


def of_kept_labels(outputs, targets):
    """A mean over labels that are not ignored, without ``count=``."""
    return F.cross_entropy(outputs, targets)


def summed(outputs, targets):
    """A sum that is told as a mean."""
    return F.cross_entropy(outputs, targets, reduction="sum")


def compares_rows(outputs, targets):
    return outputs.std(0).sum() + F.cross_entropy(outputs, targets)


def over_constant(outputs, targets):
    """A sum divided by the number of rows of the whole batch."""
    return F.cross_entropy(outputs, targets, reduction="sum") / ROWS


def squared(outputs, targets):
    """The square of a mean."""
    return F.cross_entropy(outputs, targets) ** 2


WRONG = {
    "ignored labels": (of_kept_labels, IGNORED),
    "a sum": (summed, LABELS),
    "compares rows": (compares_rows, LABELS),
    "a constant": (over_constant, LABELS),
    "squared": (squared, LABELS),
}
RIGHT = {
    "mean": (F.cross_entropy, LABELS, {}),
    "ignored labels": (F.cross_entropy, IGNORED, {"count": count_labels()}),
    "a sum": (summed, LABELS, {"reduction": "sum"}),
    "whole batch": (compares_rows, LABELS, {"whole_batch": True}),
}

# --- what the states of generators are ---


def states():
    """Those of all generators of this process, by name."""
    found = {"host": torch.get_rng_state(), "Python": random.getstate()}
    backend = torch.get_device_module(ACCELERATOR) if ACCELERATOR else None
    for number in range(COUNT):
        found[f"accelerator {number}"] = backend.get_rng_state(number)
    kind, keys, *rest = np.random.get_state()
    return found | {"NumPy": (kind, keys.tolist(), *rest)}


def seed_all():
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)


def moved(before):
    """The names of generators with other states now."""
    names = []
    for name, state in states().items():
        is_tensor = isinstance(state, torch.Tensor)
        is_same = torch.equal if is_tensor else tuple.__eq__
        if not is_same(state, before[name]):
            names.append(name)
    return names


@contextlib.contextmanager
def unmoved():
    """In the body no generator is moved, or all are put back."""
    before = states()
    yield
    assert moved(before) == []


def tensors_of(module):
    return [tensor.detach().cpu().clone() for tensor in module.state_dict().values()]


# --- looks ---


@on_all_layouts
@by_module("dropout")
def test_wrong_steps_of_drawing_modules_refused(name, layout):
    module = module_of(name, layout)
    before = tensors_of(module)
    for wrong, (criterion, targets) in WRONG.items():
        with ScatterOnceParallel(module, 3, layout) as engine:
            for _ in range(1 + (wrong == "a sum")):  # in each step again
                with unmoved(), pytest.raises(ValueError, match="whole_batch=True"):
                    engine.forward_backward(INPUTS, targets, criterion)
    assert all(parameter.grad is None for parameter in module.parameters())
    assert all(map(torch.equal, tensors_of(module), before))


@on_all_layouts
@by_module("noise")
def test_right_steps_of_drawing_modules_unchanged(name, layout):
    """Steps with looks give the bits, and leave the generators, of steps without."""
    is_ordered = name not in OF_PROCESS or len(layout) == 1
    for criterion, targets, options in RIGHT.values():
        if "whole_batch" in options and name in OF_PROCESS:
            continue  # refused: a second pass draws other numbers
        results = []
        for verify in (False, True):
            seed_all()
            module = module_of(name, layout)
            optimizer = torch.optim.SGD(module.parameters(), 0.1)
            losses = []
            with (
                warnings.catch_warnings(action="error"),
                ScatterOnceParallel(module, 3, layout, verify=verify) as engine,
            ):
                for _ in range(4):
                    loss = engine.forward_backward(
                        INPUTS, targets, criterion, **options
                    )
                    losses.append(loss.cpu())
                    optimizer.step()
            results.append(([*losses, *tensors_of(module)], states()))
        (expected, after), (found, _) = results
        assert not is_ordered or all(map(torch.equal, found, expected))
        assert moved(after) == []


@on_all_layouts
@by_module("dropout", "noise")
def test_looks_of_the_pair_move_no_generator(name, layout):
    results = []
    for verify in (False, True):
        seed_all()
        module = module_of(name, layout)
        model = DataParallelModel(module, layout)
        criterion = DataParallelCriterion(nn.CrossEntropyLoss(), layout, verify=verify)
        for _ in range(2):
            loss = criterion(model(INPUTS), LABELS)
            loss.backward()
        gradients = [parameter.grad.cpu() for parameter in module.parameters()]
        results.append(([loss.detach().cpu(), *gradients], states()))
    (expected, after), (found, _) = results
    is_ordered = name not in OF_PROCESS or len(layout) == 1
    assert not is_ordered or all(map(torch.equal, found, expected))
    assert moved(after) == []


@on_all_layouts
def test_look_puts_users_generators_back(layout):
    """One of the user's own, on the module's device, that the module draws from."""
    device = torch_device(layout[0])
    generator = torch.Generator(device)

    def noisy(hidden):
        return hidden + 0.1 * torch.rand(
            hidden.shape, generator=generator, device=device, dtype=hidden.dtype
        )

    module = build(drawing(noisy)).to(device)
    before = generator.get_state()
    with ScatterOnceParallel(module, 3, layout[:1]) as engine:
        with pytest.raises(ValueError, match="whole_batch=True"):
            engine.forward_backward(INPUTS, LABELS, compares_rows)
        assert torch.equal(generator.get_state(), before)


# --- all else that gives the generators back ---


def check(module, layout):
    with ScatterOnceParallel(module, 3, layout) as engine:
        engine.check(INPUTS, LABELS, F.cross_entropy)


def step_of_loop(model, batches, device):
    for inputs, targets in batches:
        loss = F.cross_entropy(model(inputs.to(device)), targets.to(device))
        (loss / len(batches)).backward()


def split_check(module, layout):
    device = torch_device(layout[0])
    splitcheck(partial(step_of_loop, device=device), module, (INPUTS, LABELS))


def evaluation(module, layout):
    """In evaluation mode, in which these modules draw nothing, or on the host alone."""
    module.eval()
    before = torch.get_rng_state()
    with ScatterOnceParallel(module, 3, layout) as engine:
        engine(INPUTS)
        engine.map(lambda replica, rows: replica(rows), INPUTS)
    torch.set_rng_state(before)


def failed_evaluation(module, layout):
    with (
        ScatterOnceParallel(module, 3, layout) as engine,
        pytest.raises(ArithmeticError),
    ):
        engine.map(failing_call, INPUTS)


def failing_call(replica, rows):
    replica(rows)
    if torch.equal(rows[-1].cpu(), INPUTS[-1]):
        raise ArithmeticError("after drawing")


def failed_step(module, layout, **options):
    def criterion(outputs, targets):
        if targets.numel() == 0 or int(targets[-1]) == -1:
            raise ArithmeticError("after drawing")
        return F.cross_entropy(outputs, targets)

    labels = LABELS.clone()
    labels[-1] = -1
    with (
        ScatterOnceParallel(module, 3, layout, **options) as engine,
        pytest.raises(ArithmeticError),
    ):
        engine.forward_backward(INPUTS, labels, criterion)


def refused_step(module, layout):
    with (
        ScatterOnceParallel(module, 3, layout) as engine,
        pytest.raises(ValueError, match="reduction="),
    ):
        engine.forward_backward(INPUTS, LABELS, summed)


def step_refused_at_its_end(module, layout):
    """A gradient arrives at a network that the criterion closes over."""
    other = build(lambda: nn.Linear(CLASSES, CLASSES)).to(torch_device(layout[0]))

    def criterion(outputs, targets):
        return F.cross_entropy(other(outputs.to(other.weight.device)), targets)

    with (
        ScatterOnceParallel(module, 3, layout, verify=False) as engine,
        pytest.raises(ValueError, match="functools"),
    ):
        engine.forward_backward(INPUTS, LABELS, criterion)


def interrupted_step(module, layout):
    def criterion(outputs, targets):
        raise KeyboardInterrupt

    with (
        ScatterOnceParallel(module, 3, layout, verify=False) as engine,
        pytest.raises(KeyboardInterrupt),
    ):
        engine.forward_backward(INPUTS, LABELS, criterion)


CALLS = {
    "check": check,
    "splitcheck": split_check,
    "evaluation": evaluation,
    "failed evaluation": failed_evaluation,
    "failed step": failed_step,
    "failed step without looks": partial(failed_step, verify=False),
    "refused step": refused_step,
    "step refused at its end": step_refused_at_its_end,
    "interrupted step": interrupted_step,
}


@on_all_layouts
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ["encoder", "drawn on the host"])
def test_generators_are_as_before(name, call, layout):
    module = module_of(name, layout)
    with unmoved(), warnings.catch_warnings(action="ignore"):
        CALLS[call](module, layout)
