"""Public optimizers through ``ShardedOptimizer``, beside their plain classes.

``PYTHONPATH=tests python -m harness.public_optimizers`` prints a table and what was
refused. Libraries that are not installed are left out.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib
import io
import sys
import warnings

import torch
from torch import nn

from harness.models import CLASSES, FEATURES
from harness.oracle import build, randint, randn
from scatterpar import ScatterOnceParallel, ShardedOptimizer

STEPS = 5
EQUAL, REFUSED, ALONE = "equal", "refused in words", "does not run alone"


def libraries():
    """The optimizers of each installed library, by name: functions of parameters."""
    found = {"torch.optim": _of_torch()}
    for name, read in (
        ("timm", _of_timm),
        ("pytorch_optimizer", _of_pytorch_optimizer),
    ):
        with contextlib.suppress(ImportError):
            found[name] = read()
    return found


def _of_torch():
    options = {"SGD": {"lr": 0.1, "momentum": 0.9}}
    return {
        name: functools.partial(kind, **options.get(name, {}))
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and kind is not torch.optim.Optimizer
    }


def _of_timm():
    optim = importlib.import_module("timm.optim")
    made = {
        name: functools.partial(optim.create_optimizer_v2, opt=name, lr=1e-2)
        for name in optim.list_optimizers()
    }
    lookahead = importlib.import_module("timm.optim.lookahead").Lookahead
    made["lookahead"] = lambda params: lookahead(torch.optim.SGD(params, 0.1))
    return made


def _of_pytorch_optimizer():
    library = importlib.import_module("pytorch_optimizer")
    made = {}
    for name in library.get_supported_optimizers():
        made[name] = _lazily(library.load_optimizer, name)
    for name in ("Lookahead", "OrthoGrad", "TRAC", "PCGrad", "SAM"):
        wrapper = getattr(library, name, None)
        if wrapper is not None:
            made[name] = _wrapping(wrapper)
    return made


ARGUMENTS = {"bsam": {"num_data": 100}, "ranger21": {"num_iterations": 100}}


def _lazily(load, name):
    def make(params):
        options = ARGUMENTS.get(name, {})
        params = list(params)
        try:
            return load(name)(params, **options)
        except RuntimeError:  # classes that ask a group for ``use_muon``
            groups = []
            for is_matrix in (True, False):
                chosen = [p for p in params if (p.ndim == 2) == is_matrix]
                if chosen:
                    groups.append({"params": chosen, "use_muon": is_matrix})
            return load(name)(groups, **options)

    return make


def _wrapping(wrapper):
    if wrapper.__name__.endswith("SAM"):
        options = {"base_optimizer": torch.optim.SGD, "lr": 0.1}
        return lambda params: wrapper(params=params, **options)
    return lambda params: wrapper(torch.optim.SGD(params, 0.1))


def _networks():
    """Networks that optimizers may need: with vectors; of matrices alone; sparse."""
    sizes = [(FEATURES, 12), (12, CLASSES)]
    yield lambda: nn.Sequential(nn.Linear(*sizes[0]), nn.Tanh(), nn.Linear(*sizes[1]))
    yield lambda: nn.Sequential(
        *(nn.Linear(*size, bias=False) for size in sizes),
    )
    yield lambda: nn.Sequential(
        nn.EmbeddingBag(20, 12, sparse=True), nn.EmbeddingBag(12, CLASSES, sparse=True)
    )


def _loss(model, number):
    first = model[0]
    if isinstance(first, nn.EmbeddingBag):
        tables = [
            layer(randint(layer.num_embeddings, 3, 4, seed=number)) for layer in model
        ]
        return sum(table.square().mean() for table in tables)
    inputs = randn(8, FEATURES, seed=number, dtype=torch.float32)
    return nn.functional.cross_entropy(model(inputs), randint(CLASSES, 8, seed=number))


def _trained(model, optimizer, with_graph, with_closure):
    torch.manual_seed(1)
    for number in range(STEPS):

        def closure(number=number):
            optimizer.zero_grad()
            loss = _loss(model, number)
            loss.backward(create_graph=with_graph)
            return loss

        if with_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


WAYS = (False, False), (True, False), (False, True)  # a graph of gradients, a closure


def _plain(make):
    """How the class trains alone: its network, the way, and the trained parameters."""
    errors = []
    for network in _networks():
        for way in WAYS:
            try:
                model = build(network).float()
                trained = _trained(model, make(model.parameters()), *way)
            except Exception as error:
                errors.append(error)
                continue
            return network, way, trained
    raise errors[0]


def outcome(make):
    """What becomes of one optimizer, and why."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            network, way, expected = _plain(make)
        except Exception as error:
            return ALONE, f"{type(error).__name__}: {error}"
        model = build(network).float()
        with ScatterOnceParallel(model, 1, ["cpu:0", "cpu:1"]) as engine:
            try:
                optimizer = ShardedOptimizer(engine, make)
            except TypeError as error:
                if "cannot be sharded" not in str(error):
                    return "not in words", str(error)
                return REFUSED, str(error)
            got = _trained(model, optimizer, *way)
    for one, other in zip(got, expected, strict=True):
        if not torch.allclose(one, other, rtol=1e-5, atol=1e-7, equal_nan=True):
            return "another result", f"off by {(one - other).abs().max():.2g}"
    return EQUAL, ""


def main(names):
    for library, optimizers in libraries().items():
        counts = collections.Counter()
        for name, make in optimizers.items():
            if names and name not in names:
                continue
            what, why = outcome(make)
            counts[what] += 1
            if what != EQUAL:
                print(f"{library} {name}: {what}: {why[:300]}", flush=True)
        print(library, dict(counts), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
