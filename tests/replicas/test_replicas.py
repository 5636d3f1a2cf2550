"""Whatever the user does to the module between two steps is obeyed by the next."""

from __future__ import annotations

import copy

import pytest
import torch
from harness.agree import BATCH, Case, agree
from harness.models import CLASSES, FEATURES, Of, linear, mlp
from harness.oracle import assert_step, build, randn
from harness.pairwise import few_of
from torch import nn

from scatterpar import ScatterOnceParallel


class Model(nn.Module):
    """Something of everything that a user may turn, exchange, add or take away."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, CLASSES)
        self.register_buffer("offset", torch.zeros(6))
        self.p = 0.5
        self.options = {"scale": 1.0, "nested": [1.0, 2.0]}
        self.shifts = [0.0]
        self.act = torch.tanh
        self.names = {"first"}
        self.norm.eval()

    def forward(self, inputs):
        hidden = self.act(self.first(inputs)) * self.p * self.options["scale"]
        hidden = hidden * self.options["nested"][1] + sum(self.shifts)
        for block in self.blocks:
            hidden = hidden + block(hidden).tanh()
        hidden = self.norm(hidden) + self.offset
        if "second" in self.names:
            hidden = hidden * 3
        for name, buffer in self.named_buffers(recurse=False):
            if name.startswith("extra"):
                hidden = hidden + buffer
        hidden = hidden if self.head.training else hidden * 2
        return self.head(hidden) * getattr(self, "bonus", 1.0)


def edit_data(model):
    model.first.weight.data.mul_(2)
    model.norm.running_var.data.fill_(3)


def rebind_data_as_a_view(model):
    flat = randn(200, seed=8)
    model.first.weight.data = flat[: 6 * FEATURES].view(6, FEATURES)
    model.head.weight.data = flat[-6 * CLASSES :].view(CLASSES, 6)


def freeze_and_thaw(model):
    model.requires_grad_(False)
    model.head.weight.requires_grad_(True)


def swap_layers(model):
    model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]


def delete_buffer(model):
    del model.offset
    model.offset = 0.25


def swap_class(model):
    class Doubled(Model):
        def forward(self, inputs):
            return super().forward(inputs) * 2

    model.__class__ = Doubled


def sets(path, make):
    """Rebinds what is there to what ``make`` makes, of the model."""
    *parents, name = path.split(".")
    return lambda model: setattr(
        model.get_submodule(".".join(parents)), name, make(model)
    )


def layer(*sizes, seed, **options):
    return lambda _: build(lambda: nn.Linear(*sizes, **options), seed)


CHANGES = {
    "edit data": edit_data,
    "rebind data as a view": rebind_data_as_a_view,
    "rebind a buffer": sets("offset", lambda _: randn(6, seed=9)),
    "replace a parameter": sets(
        "head.bias", lambda _: nn.Parameter(randn(CLASSES, seed=10))
    ),
    "remove a parameter": sets("head.bias", lambda _: None),
    "transpose strides": lambda model: setattr(
        model.first.weight, "data", model.first.weight.data.T.contiguous().T
    ),
    "freeze": lambda model: model.blocks.requires_grad_(False),
    "freeze and thaw": freeze_and_thaw,
    "evaluate a layer": lambda model: model.head.eval(),
    "rebind an attribute": sets("p", lambda _: 0.2),
    "rebind it to a tensor": sets("p", lambda _: randn(6, seed=11)),
    "rebind a function": sets("act", lambda _: torch.sin),
    "add an attribute": sets("bonus", lambda _: 7.0),
    "edit a dict": lambda model: model.options.update(scale=3.0),
    "edit a nested list": lambda model: model.options["nested"].__setitem__(1, 5.0),
    "edit a list": lambda model: model.shifts.append(0.7),
    "edit a set": lambda model: model.names.add("second"),
    "replace a layer": sets("blocks.0", layer(6, 6, seed=13, bias=False)),
    "replace it by one of the same shape": sets("first", layer(FEATURES, 6, seed=14)),
    "swap layers": swap_layers,
    "tie weights": sets("blocks.0.weight", lambda model: model.blocks[1].weight),
    "register a buffer": lambda model: model.register_buffer(
        "extra", randn(6, seed=15)
    ),
    "delete a buffer": delete_buffer,
    "add a pre-hook": lambda model: model.head.register_forward_pre_hook(
        lambda module, args: (args[0] + 1,)
    ),
    "swap the class": swap_class,
    "replace a forward": sets(
        "head.forward", lambda _: lambda hidden: hidden[:, :CLASSES] * 2
    ),
}
KEEP_THE_LOSS = {"freeze", "freeze and thaw", "transpose strides"}


pytestmark = pytest.mark.core

CRITERION = nn.CrossEntropyLoss()
# one replica shares the master's memory, one has its own
MIXED = ["cpu:0", "cpu:1", "cpu:0"]


@pytest.mark.contract
@pytest.mark.parametrize("change", CHANGES)
def test_change_reaches_next_step(change):
    model = build(Model)
    with ScatterOnceParallel(model, 2, MIXED) as engine:
        before = assert_step(engine, *BATCH, CRITERION)
        CHANGES[change](model)
        after = assert_step(engine, *BATCH, CRITERION)
        again = assert_step(engine, *BATCH, CRITERION)
    assert torch.equal(after, again)
    assert (change in KEEP_THE_LOSS) == torch.equal(before, after)


def written():
    """Its output depends on an attribute and a frozen parameter."""
    frozen = nn.Parameter(torch.zeros(CLASSES), requires_grad=False)
    return Written(
        lambda m, x: m.linear(x) * m.scale + m.frozen, linear=linear(), frozen=frozen
    )


class Written(Of):
    scale = 1.0  # what counts while the instance has no other


def set_it(model, value):
    model.scale = value


def delete_or_set(delete):
    def write(model, value):
        delete(model) if "scale" in vars(model) else set_it(model, value)

    return write


def write_frozen(model, value):
    """Another number for each class: cross entropy does not see a number
    that all have.
    """
    model.frozen.detach().copy_(torch.linspace(0.0, value, CLASSES))


WRITES = {
    "set it": set_it,
    "by name": lambda model, value: setattr(model, "sca" + "le", value),
    "in the dictionary": lambda model, value: vars(model).update(scale=value),
    "past the module": lambda model, value: object.__setattr__(model, "scale", value),
    "delete it": delete_or_set(lambda model: delattr(model, "scale")),
    "take it from the dictionary": delete_or_set(
        lambda model: vars(model).pop("scale")
    ),
    "a frozen parameter": write_frozen,
}


@pytest.mark.contract
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_every_write_is_followed(write):
    """From Python 3.13 on attributes lie beside the dictionary, and its watcher hears
    of no write.

    What Python does with a write may change once it has run a few times: so there are
    many.
    """
    model = build(written)
    model.scale = 2.0
    with ScatterOnceParallel(model, 1, MIXED) as engine:
        for value in 2.0, 0.5, 3.0, 0.25, 4.0, 0.125:
            for _ in range(2):
                assert_step(engine, *BATCH, CRITERION)
            for other in range(50 if write is set_it else 0):
                write(model, float(other))
            write(model, value)


def test_changed_criterion_is_followed(devices):
    criterion = nn.CrossEntropyLoss(weight=torch.ones(CLASSES).double())
    losses = set()
    with ScatterOnceParallel(mlp(), 2, devices(2)) as engine:
        for change in (
            lambda: None,
            lambda: criterion.weight.__setitem__(0, 9.0),
            lambda: setattr(
                criterion, "weight", torch.tensor([0.1, 0.2, 0.3, 4.0]).double()
            ),
            lambda: setattr(criterion, "label_smoothing", 0.3),
            lambda: setattr(criterion, "weight", None),  # from now on without state
            lambda: criterion.register_forward_hook(
                lambda module, args, loss: loss * 2
            ),
        ):
            change()
            losses.add(assert_step(engine, *BATCH, criterion).item())
    assert len(losses) == 6


def test_new_module_of_engine_is_used(devices):
    with ScatterOnceParallel(mlp(), 2, devices(2)) as engine:
        first = assert_step(engine, *BATCH, CRITERION)
        engine.module = mlp(seed=3)
        second = assert_step(engine, *BATCH, CRITERION)
    assert not torch.equal(first, second)


def test_replicas_have_current_values(devices):
    model = mlp()
    with ScatterOnceParallel(model, 1, devices(3)) as engine:
        engine.forward_backward(*BATCH, CRITERION)
        model[0].weight.data.fill_(4)
        assert len(engine.replicas) == 3
        for replica in engine.replicas:
            assert (replica[0].weight == 4).all()
            assert replica is not model


def test_rnn_weights_laid_out_for_cudnn():
    """As the master's, that ``flatten_parameters`` has put together from the start of a
    storage.
    """
    lstm = build(lambda: nn.LSTM(5, 3))

    def weights_of(layer):  # matrices first
        return [
            w
            for _, w in sorted(
                layer.named_parameters(), key=lambda item: "bias" in item[0]
            )
        ]

    weights = weights_of(lstm)
    flat = torch.cat([weight.detach().flatten() for weight in weights])
    for weight, part in zip(
        weights, flat.split([w.numel() for w in weights]), strict=True
    ):
        weight.data = part.view_as(weight)
    with ScatterOnceParallel(lstm, 1, ["cpu:0", "cpu:1"]) as engine:
        start = engine.replicas[1].weight_ih_l0.untyped_storage().data_ptr()
        for weight in weights_of(engine.replicas[1]):
            assert weight.data_ptr() == start
            start += weight.nbytes


# What a forward pass leaves on a replica ends with the step.


def remembers(m, inputs):
    m.calls += 1
    m.cache.append(inputs)
    return m.linear(inputs) * (1.0 if m.calls == len(m.cache) == 1 else 9.0)


def caches(m, inputs):
    """Once it outlived the values that it was made of."""
    if not hasattr(m.linear.bias, "shift"):
        m.linear.bias.shift = m.linear.bias.detach().sum()
    return m.linear(inputs) * m.linear.bias.shift


def freezes(m, inputs):
    """Its evaluation turns gradients off; the user turns them on, where the master's
    never went.
    """
    if not m.training:
        m.linear.requires_grad_(False)
    return m.linear(inputs)


@pytest.mark.parametrize("function", [remembers, caches, freezes])
def test_values_set_in_forward_end_with_step(devices, function):
    model = Of(function, linear=linear(), calls=0, cache=[])
    with ScatterOnceParallel(model, 1, devices(3)) as engine:
        for _ in range(3):
            assert_step(engine, *BATCH, CRITERION)
            assert model.linear.weight.grad is not None
            assert (model.calls, model.cache, vars(model.linear.bias)) == (0, [], {})
            with torch.no_grad():
                model.linear.bias.add_(1.0)
            model.eval()
            with torch.no_grad():
                engine(BATCH[0])
            model.train().requires_grad_(True)


# Changes that plain torch follows too, by every way to train.


def scales(m, inputs):
    outputs = m.linear(inputs)
    return outputs if m.scale is None else outputs * m.scale


def flattens(m, inputs):
    """Exchanges storages as ``flatten_parameters`` does: replicas kept the first step's
    weights.
    """
    for parameter in m.parameters():
        parameter.data = parameter.data.clone()
    return m.linear(inputs)


@torch.no_grad()
def sets(m):
    """As ``flatten_parameters`` does it on GPUs: torch counts writes."""
    for parameter in m.parameters():
        parameter.set_(parameter.clone())


def flattens_by_set(m, inputs):
    sets(m)
    return m.linear(inputs)


def flattens_in_between(m, inputs):
    outputs = m.linear(inputs)
    sets(m)
    return outputs


def flattens_together(m, inputs):
    """All weights in one memory, as those of an LSTM."""
    parameters = list(m.parameters())
    with torch.no_grad():
        flat = torch.cat([parameter.flatten() for parameter in parameters])
        pieces = flat.split([parameter.numel() for parameter in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.set_(piece.view_as(parameter))
    return m.linear(inputs)


def grows(m, inputs):
    """A buffer that a forward pass lets grow could not be refreshed in
    the next step.
    """
    m.seen.data = torch.cat([m.seen, m.seen.new_ones(1)])
    return m.linear(inputs) * len(m.seen)


def scaled(m, inputs):
    """Multiplies by what it finds on its tensors: replicas once kept that of the first
    step.
    """
    factors = [getattr(tensor, "scale", 1.0) for tensor in (m.linear.bias, m.factor)]
    return m.linear(inputs) * factors[0] * factors[1]


def hook(module):
    module.handle = module[0].register_forward_hook(
        lambda module, args, output: output * 2
    )


def attribute(name, value):
    return lambda module: setattr(module, name, value)


def of(function, **parts):
    return lambda: Of(function, linear=linear(), **copy.deepcopy(parts))


SCALES = (1, 0.5, True, None, 0.25, torch.tensor(3.0), 2.0, False)
ATTRIBUTES = (2.0, 5.0, torch.tensor(3.0), 1.0)
FOLLOWED = {
    "numbers and flags": Case(
        of(scales, scale=None), changes=[*(attribute("scale", s) for s in SCALES)]
    ),
    "a hook, taken off": Case(
        mlp, changes=[hook, lambda module: module.handle.remove()]
    ),
    "storages that a forward pass exchanges": Case(of(flattens)),
    "storages that it sets": Case(of(flattens_by_set)),
    "storages that it sets at its end": Case(of(flattens_in_between)),
    "storages that it sets to one memory": Case(of(flattens_together)),
    "a buffer that grows": Case(of(grows, seen=nn.Buffer(torch.ones(1))), accum=1),
    **{
        f"an attribute of {name}": Case(
            of(scaled, factor=nn.Buffer(torch.ones(CLASSES))),
            changes=[
                lambda m, f=find, v=value: setattr(f(m), "scale", v)
                for value in ATTRIBUTES
            ],
        )
        for name, find in {
            "bias": lambda m: m.linear.bias,
            "a buffer": lambda m: m.factor,
        }.items()
    },
}


@pytest.mark.parametrize("runner", few_of(["engine", "pair"], ["engine"]))
@pytest.mark.parametrize("name", FOLLOWED)
def test_values_plain_torch_follows(name, runner):
    agree(FOLLOWED[name], runner, MIXED)
