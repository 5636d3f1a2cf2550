"""Modules of every kind, small, and what is trained on them: ``CASES``, by name.

Most of them turn (rows, FEATURES) into (rows, CLASSES).
"""

import functools
import types
import weakref
from collections import Counter, OrderedDict
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from harness.agree import BATCH, EVERY_WAY, USUAL, Case
from harness.models import CLASSES, FEATURES, Of, TokenClassifier, mlp
from harness.oracle import build, randint, randn


def linear(inputs=FEATURES, outputs=CLASSES):
    return nn.Linear(inputs, outputs)


def square():
    return nn.Linear(FEATURES, FEATURES)


def small():
    return nn.Sequential(linear(FEATURES, 6), nn.Tanh(), linear(6))


def with_buffers(module, **buffers):
    for name, buffer in buffers.items():
        module.register_buffer(name, buffer)
    return module


# --- what a module may hold, and how ---


def parameter_containers():
    def forward(m, inputs):
        hidden = sum((inputs @ row).tanh() for row in m.rows)
        return sum(branch(hidden) for branch in m.branches.values()) @ m.named["head"]

    return Of(
        forward,
        rows=nn.ParameterList([torch.randn(FEATURES, 3) for _ in range(2)]),
        named=nn.ParameterDict({"head": torch.randn(3, CLASSES)}),
        branches=nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)}),
    )


def tied():
    """A parameter under two names, and a module under two names."""
    one, two = square(), square()
    two.weight = one.weight
    parts = {"one": one, "two": two, "again": one, "head": linear()}
    return Of(lambda m, x: m.head(m.again(m.two(m.one(x).tanh()).tanh())), **parts)


def recurrent():
    lstm = nn.LSTM(FEATURES, 4, num_layers=2, batch_first=True, bidirectional=True)
    parts = {"lstm": lstm, "head": linear(8)}
    return Of(
        lambda m, x: m.head(m.lstm(x[:, None].repeat(1, 3, 1))[0][:, -1]), **parts
    )


def unregistered_list():
    """Submodules in plain lists, and the parent in one: registered elsewhere, or not at
    all.
    """

    def forward(m, inputs):
        return m.head(m.hidden[0](m.order[0](inputs).tanh())) * m.head.parent[0].scale

    layers = nn.ModuleList([square(), square()])
    plain = {"order": [layers[1], layers[0]], "hidden": [square().double()]}
    parts = {"layers": layers, "head": linear(), "scale": nn.Parameter(torch.ones(()))}
    model = Of(forward, **parts, **plain)
    model.head.parent = [model]
    return model


def with_forward(model, forward):
    """Its forward is exchanged, as ``accelerate`` does."""
    model.forward = forward(model)
    return model


def doubled(old):
    """A forward that calls the old one, in its closure, as TRL writes it."""

    def forward(self, inputs):
        return self.scale * old(inputs)

    return forward


def with_bound_forward(make):
    """Its forward is a bound method of the function that ``make`` gets from the old
    one.
    """
    model = linear()
    model.scale = 2.0
    return with_forward(model, lambda m: types.MethodType(make(m.forward), m))


def bound_default(old):
    """The old forward is a default, as in a loop over layers."""
    return lambda self, inputs, old=old: self.scale * old(inputs)


def overlapping():
    """Writes a buffer in its forward pass, and reads what overlaps it: a buffer, an
    attribute.
    """

    def forward(m, inputs):
        m.table += torch.arange(1, 1 + CLASSES)
        return m.linear(inputs) * (1 + m.other[1]) + m.row

    table = torch.rand(4, CLASSES, dtype=torch.float64)
    model = with_buffers(
        Of(forward, linear=linear().double()), table=table, other=table.t()
    )
    model.row = table[2]
    return model


def takes_more(m, rows, number, name, unused):
    """A 0-dim tensor, which each sub-step gets anew and may write, and what holds no
    tensor.
    """
    assert number.shape == ()
    assert (name, unused) == ("n", [True, None, [], {}, ()])
    return m.linear(rows) * number.mul_(2)


def computes_its_own_gradient():
    """Forces: the gradient of an energy is part of the output (double backward)."""

    def forward(m, inputs):
        inputs = inputs.detach().requires_grad_()
        (forces,) = torch.autograd.grad(
            m.energy(inputs).sum(), inputs, create_graph=True
        )
        return forces[:, :CLASSES]

    return Of(
        forward, energy=nn.Sequential(linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 1))
    )


# --- what maps modules to something, and refers to them weakly or in a cache ---


def keyed(make_keys, find):
    """A hook looks its module up, and scales the output by what it finds."""

    def make():
        model = small()
        model.scales = make_keys(model)

        def scale(module, args, output):
            return output * find(model.scales, module)

        for module in model[:3]:
            module.register_forward_hook(scale)
        return model

    return make


def numbered(model):
    return {module: 1.0 + n for n, module in enumerate(model.modules())}


def by_parameter(model):
    return {(name, p): n for n, (name, p) in enumerate(model.named_parameters())}


def scale_of_parameters(scales, module):
    named = module.named_parameters(recurse=False)
    return 1.0 + sum(n for (_, own), n in scales.items() for _, p in named if p is own)


def in_a_closure(make_table, find):
    """As ``keyed``, but only the hook refers to the table."""

    def make():
        model = small()
        table = make_table(model)
        for module in model[:3]:
            module.register_forward_hook(lambda m, _, output: output * find(table, m))
        return model

    return make


def counted_by_sets(model):
    """How often each set of modules is there."""
    return Counter({frozenset([module, model]): 2 for module in model})


def smaller_scales(model):
    for module in model.scales:
        model.scales[module] *= 0.5


class Kinded(nn.Linear):
    """Its ``__new__`` wants what its copy is not made of."""

    def __new__(cls, kind):
        return super().__new__(cls)

    def __init__(self, kind):
        super().__init__(FEATURES, CLASSES)
        self.kind = kind


class Child(nn.Module):
    """Reads what its parent's forward pass has set."""

    def __init__(self, parent, refer):
        super().__init__()
        self.linear = linear(6)
        self.__dict__["parent"] = refer(parent)  # a proxy passes for a child

    def forward(self, hidden):
        parent = self.parent
        if isinstance(parent, weakref.WeakMethod):
            return self.linear(hidden) * parent()()
        return self.linear(hidden) * parent.temperature


def with_child(refer):
    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.temperature = linear(FEATURES, 6), 1.0
            self.child = Child(self, refer)

        def current(self):
            return self.temperature

        def forward(self, inputs):
            self.temperature = inputs.abs().mean(1, keepdim=True)
            return self.child(self.first(inputs).tanh())

    return Parent


def cached_method():
    """Its method is cached for each instance, and computes where its parameters are."""
    model = Of(lambda m, x: m.linear(x) * m.scale(2), linear=linear())
    model.ramp = types.MethodType(
        lambda m, n: n + torch.arange(CLASSES).to(m.linear.weight), model
    )
    model.scale = functools.lru_cache(maxsize=None)(model.ramp)
    return model


# --- parameters: dtypes, layouts, classes of their own ---


def conjugates():
    """Its parameter's memory holds conjugates: what forwards write is looked at."""

    def forward(m, inputs):
        return m.linear(inputs) * (m.factor.real + m.factor.imag)

    values = nn.Parameter(randn(CLASSES, dtype=torch.complex128).conj())
    return Of(forward, linear=linear(), factor=values)


def of_complex():
    weight = nn.Parameter(torch.randn(FEATURES, CLASSES, dtype=torch.complex128))
    return Of(
        lambda m, inputs: (inputs.to(torch.complex128) @ m.weight).abs(), weight=weight
    )


def conjugate_gradients():
    """The gradients of its parameters are conjugated lazily."""

    def forward(m, inputs):
        rows = inputs.to(torch.complex128)
        return (rows @ m.weight.conj() + m.bias.conj()).abs() + m.linear(inputs)

    weight = torch.randn(FEATURES, CLASSES, dtype=torch.complex128)
    bias = nn.Parameter(torch.randn(CLASSES, dtype=torch.complex128))
    return Of(forward, weight=nn.Parameter(weight), bias=bias, linear=linear().double())


def several_dtypes():
    parts = {"wide": linear(FEATURES, 4).double(), "narrow": linear(4).float()}
    odd = nn.Parameter(torch.randn(3))
    return Of(lambda m, x: m.narrow(m.wide(x).float()) * m.odd.sum(), odd=odd, **parts)


def layouts():
    """Convolutions of which some keep another memory format, and one another dtype."""

    def forward(m, images):
        for tensor in (images, m.first[0].weight):
            assert tensor.is_contiguous(memory_format=torch.channels_last)
        return m.last(m.first(images).float()).double().flatten(1)

    first = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Conv2d(4, 3, 2))
    first.to(torch.float64, memory_format=torch.channels_last)
    return Of(forward, first=first, last=nn.Conv2d(3, CLASSES, 2))


IMAGES = randn(6, 3, 4, 4).to(memory_format=torch.channels_last)


class Doubled(nn.Parameter):
    """A parameter with a constructor and a method of its own."""

    def __new__(cls, values, factor=None):
        return super().__new__(cls, values)

    def __init__(self, values, factor):
        self.factor = factor

    def __deepcopy__(self, memo):
        return memo.setdefault(id(self), Doubled(self.detach().clone(), self.factor))

    def scaled(self):
        return self * self.factor


def own_parameters():
    """Asks what its parameter and its buffer are: replicas once had plain ones."""

    def forward(m, inputs):
        outputs = m.linear(inputs) + m.doubled.scaled()
        return outputs * (5 if isinstance(m.buffer, nn.Buffer) else 1)

    parts = {
        "doubled": Doubled(torch.randn(CLASSES), 2.0),
        "buffer": nn.Buffer(torch.ones(())),
    }
    return Of(forward, linear=linear(), **parts)


def blocks(use_reentrant):
    """Activation checkpointing."""

    def forward(m, inputs):
        # the reentrant variant needs a gradient
        inputs = inputs + m.head.bias.sum() * 0
        for block in m.blocks:
            call = nn.Sequential(block, nn.Tanh())
            inputs = checkpoint(call, inputs, use_reentrant=use_reentrant)
        return m.head(inputs)

    return Of(
        forward, blocks=nn.ModuleList([square() for _ in range(3)]), head=linear()
    )


# --- gradients that are sparse, not there, in one memory, or of what was made of parameters ---


def sparse_tokens():
    model = TokenClassifier()
    model.embedding.sparse = True
    return model


def branches():
    """Rows whose first feature is positive use one head, others the other; one is never
    used.
    """

    def forward(m, inputs):
        positive = inputs[:, 0] > 0
        outputs = inputs.new_zeros(len(inputs), CLASSES)
        for rows, head in ((positive, m.plus), (~positive, m.minus)):
            if rows.any():
                outputs = outputs.index_put((rows,), head(inputs[rows]))
        return outputs

    return Of(forward, plus=linear(), minus=linear(), never=linear())


def positive_first(rows, count):
    """Rows of which the first ``count`` have a positive first feature, and no other."""
    inputs = randn(rows, FEATURES)
    inputs[:, 0] = inputs[:, 0].abs() * torch.where(torch.arange(rows) < count, 1, -1)
    return inputs


class InOneMemory(nn.Module):
    """Two parameters whose gradients autograd puts in one memory, and a third it does
    not.
    """

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES, bias=False)
        self.one = nn.Parameter(randn(CLASSES))
        self.other = nn.Parameter(randn(CLASSES, seed=1))

    def forward(self, inputs):
        return self.linear(inputs) + (self.one.unsqueeze(0) + self.other.unsqueeze(0))


class Plus(torch.autograd.Function):
    """Gives the very same gradient to both of its inputs."""

    @staticmethod
    def forward(_, one, other):
        return one + other

    @staticmethod
    def backward(_, gradient):
        return gradient, gradient


def one_gradient_for_two():
    parts = {
        name: nn.Parameter(randn(FEATURES, CLASSES, seed=n))
        for n, name in enumerate("ab")
    }
    return Of(lambda m, inputs: inputs @ Plus.apply(m.a, m.b), **parts)


# --- buffers ---


def trained_buffer():
    """A buffer that requires grad, as it is: ``double()`` would make it no leaf."""
    parts = {
        "linear": linear().double(),
        "constant": torch.full((CLASSES,), 0.5).double(),
    }
    model = Of(lambda m, x: m.linear(x) * m.scale + m.constant * m.scale.exp(), **parts)
    return with_buffers(
        model, scale=torch.full((CLASSES,), 1.5).double().requires_grad_()
    )


def rebinds():
    """Running state by assignment rather than in place, of a shape that changes."""

    def forward(m, inputs):
        m.seen = m.seen + len(inputs)
        m.last = inputs.detach().clone()
        m.cache = inputs.detach().sum()
        m.grown = torch.cat([m.grown, inputs[0, :1]])
        return m.linear(inputs)

    buffers = {"seen": torch.zeros(()), "last": torch.zeros(0, FEATURES), "cache": None}
    return with_buffers(Of(forward, linear=linear()), grown=torch.zeros(1), **buffers)


def of_every_dtype():
    """Buffers that change depend on the rows."""

    def forward(m, inputs):
        if m.training:
            m.fp16 += len(inputs)
            m.turn *= 1j * len(inputs)
            m.flags = ~m.flags
            m.int64 += 2**40 + len(inputs)
        return m.linear(inputs)

    return with_buffers(
        Of(forward, linear=linear().double()),
        fp16=torch.ones(2, dtype=torch.float16),
        turn=torch.ones(2, dtype=torch.complex64),
        flags=torch.tensor([True, False, True]),
        int64=torch.zeros((), dtype=torch.long),
    )


# --- hooks, and criteria with parameters ---


def multiplies():
    """A hook that closes over the module reads what forward set: it once read the
    user's module.
    """

    def forward(m, rows):
        m.mask = rows.abs()[:, :CLASSES]
        return m.linear(rows)

    model = Of(forward, linear=linear(), mask=torch.ones(CLASSES))
    model.linear.register_forward_hook(lambda module, args, output: output * model.mask)
    return model


def penalised(model):
    """A criterion that reaches the model's own parameters."""
    return lambda output, targets: (
        F.cross_entropy(output, targets) + model.weight.square().sum()
    )


def hooked_in_the_middle():
    """A module's hook changes the gradients that pass."""
    model = mlp()
    model[1].register_full_backward_hook(lambda _, before, after: (before[0] * 3,))
    return model


class Head(nn.Module):
    """A loss with parameters and a buffer of its own: a classifier after
    the features.
    """

    def __init__(self):
        super().__init__()
        self.proxies = nn.Parameter(randn(CLASSES, CLASSES, seed=5))
        self.temperature = nn.Parameter(torch.tensor(0.7).double())
        self.unused = nn.Parameter(torch.ones(2).double())
        self.register_buffer("offset", randn(CLASSES, seed=6))

    def forward(self, output, targets):
        return F.cross_entropy(
            (output @ self.proxies + self.offset) / self.temperature, targets
        )


def sharing(model):
    """A criterion with a network of its own, one parameter of which is
    the model's too.
    """
    network = build(lambda: linear(CLASSES), 1)
    network.bias = model[-1].bias
    return Of(
        lambda m, output, targets: F.cross_entropy(m.net(output), targets), net=network
    )


# --- all of them ---

RANKS_TOO = {"default_run": (*USUAL, "2 ranks")}
EVERY_WAY_TOO = {"default_run": EVERY_WAY}
ONCE = {"accum": 1}  # it reads what its forward pass has written
BY_SHARE = {"by_share": True, "accum": 1}
TOKENS = randint(11, 9, 3), randint(CLASSES, 9, 3)

MODELS = {
    "parameter containers": parameter_containers,
    "lstm": recurrent,
    "unregistered list": unregistered_list,
    "forward is a partial": lambda: nn.Sequential(
        with_forward(linear(), lambda m: partial(type(m).forward, m)), nn.Tanh()
    ),
    "forward is a bound closure": partial(with_bound_forward, doubled),
    "forward is a bound default": partial(with_bound_forward, bound_default),
    "a bound closure twice": lambda: with_forward(
        with_bound_forward(doubled), lambda m: types.MethodType(doubled(m.forward), m)
    ),
    "keyed by modules": keyed(numbered, dict.__getitem__),
    "keyed by modules, ordered": keyed(
        lambda m: OrderedDict(numbered(m)), OrderedDict.__getitem__
    ),
    "keyed by modules, weakly": keyed(
        lambda m: weakref.WeakKeyDictionary(numbered(m)),
        lambda scales, module: scales[module],
    ),
    "modules in a weak dictionary": keyed(
        lambda m: weakref.WeakValueDictionary(
            {n: key for key, n in numbered(m).items()}
        ),
        lambda modules, module: next(n for n in modules if modules[n] is module),
    ),
    "modules in a weak set": keyed(
        lambda m: weakref.WeakSet(numbered(m)),
        lambda modules, module: 2.0 if module in modules else 1.0,
    ),
    "keyed by ids": keyed(
        lambda m: {id(key): n for key, n in numbered(m).items()},
        lambda scales, module: scales[id(module)],
    ),
    "keyed by parameters": keyed(by_parameter, scale_of_parameters),
    "keyed in a closure": in_a_closure(numbered, dict.__getitem__),
    "pairs in a closure": in_a_closure(
        lambda m: {"pairs": [*numbered(m).items()]},
        lambda table, module: next(n for m, n in table["pairs"] if m is module),
    ),
    "ids in a closure": in_a_closure(
        lambda m: [{id(m[0])}, id(m[2])],
        lambda table, module: 1.0 + (id(module) in table[0]) + (id(module) == table[1]),
    ),
    "keyed by sets, counted": keyed(
        counted_by_sets,
        lambda counts, module: sum(n for key, n in counts.items() if module in key),
    ),
    "weak method of the parent": with_child(lambda p: weakref.WeakMethod(p.current)),
    "__new__ with an argument": lambda: Kinded("a"),
    "cached method": cached_method,
    "in-place ReLU first": lambda: nn.Sequential(nn.ReLU(inplace=True), linear()),
    "weight norm, old": lambda: nn.utils.weight_norm(linear()),
    "weight norm": lambda: parametrizations.weight_norm(linear()),
    "SyncBatchNorm, eval": lambda: nn.Sequential(
        linear(), nn.SyncBatchNorm(CLASSES)
    ).eval(),
    "bags": lambda: nn.Sequential(
        Of(lambda _, x: x.abs().long()), nn.EmbeddingBag(99, CLASSES)
    ),
}

CASES = {
    **{name: Case(make) for name, make in MODELS.items()},
    "tied": Case(
        tied,
        default_run=(
            *EVERY_WAY,
            "graphs",
            "compiled",  # others take seconds
            "1 rank",
            "2 ranks",
            "3 ranks",
            "2 ranks, graphs",
        ),
    ),
    "proxy of the parent": Case(
        with_child(weakref.proxy),
        unless=("compiled",),  # torch cannot guard a proxy: an error of its own
    ),
    "double backward": Case(computes_its_own_gradient, unless=("inference",)),
    "a hook that changes gradients": Case(hooked_in_the_middle),
    "float64 that adds up in float32": Case(
        mlp, engine={"accumulate_dtype": torch.float32}
    ),
    "a number, and no tensors": Case(
        lambda: Of(takes_more, linear=linear()),
        batch=(
            (BATCH[0], torch.tensor(1.5).double(), "n", [True, None, [], {}, ()]),
            BATCH[1],
        ),
    ),
    "spectral norm, old": Case(lambda: nn.utils.spectral_norm(linear()), **ONCE),
    "spectral norm": Case(
        lambda: parametrizations.spectral_norm(linear()), **ONCE, **RANKS_TOO
    ),
    "checkpointing": Case(partial(blocks, use_reentrant=False)),
    "checkpointing, reentrant": Case(
        partial(blocks, use_reentrant=True), unless=("check",)
    ),
    "fx": Case(lambda: torch.fx.symbolic_trace(small())),
    "complex": Case(of_complex, keep_dtypes=True, **RANKS_TOO),
    "conjugates": Case(conjugates, **RANKS_TOO),
    "conjugate gradients": Case(conjugate_gradients, keep_dtypes=True),
    **{
        str(dtype): Case(
            lambda dtype=dtype: linear().to(dtype),
            batch=(BATCH[0].to(dtype), BATCH[1]),
            keep_dtypes=True,
            relative=relative,
            **(RANKS_TOO if dtype == torch.half else {}),
        )
        for dtype, relative in (
            (torch.float32, 1e-5),
            (torch.bfloat16, 0.03),
            (torch.half, 3e-3),
        )
    },
    **{
        str(dtype): Case(
            lambda: Of(lambda m, x: m.body(x.long())[:, :, 0], body=TokenClassifier()),
            batch=(randint(11, 9, 3).to(dtype), BATCH[1]),
        )
        for dtype in (torch.uint16, torch.uint64)
    },
    "several dtypes": Case(
        several_dtypes, keep_dtypes=True, relative=1e-5, **RANKS_TOO
    ),
    "layouts, torch.float32": Case(
        layouts,
        batch=(IMAGES, randint(CLASSES, 6)),
        keep_dtypes=True,
        relative=1e-5,
        unless=("by cost",),  # rows that are selected are contiguous
        **RANKS_TOO,
    ),
    "own parameters": Case(own_parameters, **RANKS_TOO),
    # ``nn.DataParallel``'s replicas say that they have none
    "looks at its parameters": Case(
        lambda: Of(
            lambda m, x: m.linear(x) + sum(map(torch.sum, m.parameters())),
            linear=linear(),
        )
    ),
    "changes between steps": Case(
        mlp,
        changes=[
            lambda model: setattr(model[0].weight, "data", randn(7, FEATURES, seed=8)),
            lambda model: model.__setitem__(1, nn.Sigmoid()),
            lambda model: model.append(
                build(lambda: nn.Linear(CLASSES, CLASSES), seed=3)
            ),
        ],
        **RANKS_TOO,
    ),
    "sparse gradients": Case(sparse_tokens, batch=TOKENS, **EVERY_WAY_TOO),
    "unused by some": Case(
        branches, batch=(positive_first(9, 6), BATCH[1]), **RANKS_TOO
    ),
    "gradients in one memory": Case(InOneMemory, **RANKS_TOO),
    "one gradient for two": Case(one_gradient_for_two),
    "a criterion that writes to its targets": Case(
        mlp,
        batch=(BATCH[0], randn(9, CLASSES, seed=3)),
        criterion=lambda _: (
            lambda output, targets: ((output - targets.mul_(2)) ** 2).mean()
        ),
    ),
    "a trained criterion": Case(
        mlp, criterion=lambda _: Head(), default_run=(*EVERY_WAY, "2 ranks")
    ),
    "a criterion that shares a parameter": Case(mlp, criterion=sharing),
    "a method of a trained criterion": Case(mlp, criterion=lambda _: Head().forward),
    "fewer rows than replicas": Case(mlp, batch=(BATCH[0][:2], BATCH[1][:2])),
    "keyed by modules, changed": Case(
        keyed(numbered, dict.__getitem__), changes=[smaller_scales, smaller_scales]
    ),
    "frozen and thawed": Case(
        mlp,
        changes=[
            lambda model: model[0].requires_grad_(False),
            lambda model: (
                model[0].requires_grad_(True),
                model[2].bias.requires_grad_(False),
            ),
        ],
        **RANKS_TOO,
    ),
    "a penalty on the model": Case(  # refused unless the criterion is called once
        linear, criterion=penalised, only=("whole batch", "inference")
    ),
    "batch norm": Case(
        lambda: nn.Sequential(linear(), nn.BatchNorm1d(CLASSES)),
        **BY_SHARE,
        **EVERY_WAY_TOO,
    ),
    "batch norm with another forward": Case(  # its statistics once stood still
        lambda: nn.Sequential(
            linear(), with_forward(nn.BatchNorm1d(CLASSES), lambda norm: norm.forward)
        ),
        **BY_SHARE,
    ),
    "a trained buffer": Case(trained_buffer, keep_dtypes=True, **RANKS_TOO),
    "rebound buffers": Case(rebinds),
    "buffers of every dtype": Case(
        of_every_dtype, keep_dtypes=True, **ONCE, **RANKS_TOO
    ),
    "overlapping buffer, transposed": Case(
        overlapping, keep_dtypes=True, **ONCE, **RANKS_TOO
    ),
    "a hook that closes over the module": Case(multiplies),
}
