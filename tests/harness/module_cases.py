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

from harness.agree import BATCH, BROAD, EVERY_WAY, Case
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
    def forward(model, inputs):
        hidden = 0
        for weight in model.weights:
            hidden = hidden + (inputs @ weight).tanh()
        outputs = 0
        for branch in model.branches.values():
            outputs = outputs + branch(hidden)
        return outputs @ model.named["head"]

    weights = [torch.randn(FEATURES, 3), torch.randn(FEATURES, 3)]
    named = {"head": torch.randn(3, CLASSES)}
    branches = {"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)}
    return Of(
        forward,
        weights=nn.ParameterList(weights),
        named=nn.ParameterDict(named),
        branches=nn.ModuleDict(branches),
    )


def tied():
    """A parameter under two names, and a module under two names."""

    def forward(model, inputs):
        hidden = model.first(inputs).tanh()
        hidden = model.second(hidden).tanh()
        return model.head(model.again(hidden))

    first = square()
    second = square()
    second.weight = first.weight
    return Of(forward, first=first, second=second, again=first, head=linear())


def recurrent():
    def forward(model, inputs):
        sequences = inputs[:, None].repeat(1, 3, 1)
        states, _ = model.lstm(sequences)
        return model.head(states[:, -1])

    lstm = nn.LSTM(FEATURES, 4, num_layers=2, batch_first=True, bidirectional=True)
    return Of(forward, lstm=lstm, head=linear(8))


def unregistered_list():
    """Submodules in plain lists, and the parent in one: registered elsewhere, or not at
    all.
    """

    def forward(model, inputs):
        hidden = model.order[0](inputs).tanh()
        outputs = model.head(model.hidden[0](hidden))
        parent = model.head.parent[0]
        return outputs * parent.scale

    layers = nn.ModuleList([square(), square()])
    hidden = square().double()
    scale = nn.Parameter(torch.ones(()))
    model = Of(forward, layers=layers, head=linear(), scale=scale)
    model.order = [layers[1], layers[0]]
    model.hidden = [hidden]
    model.head.parent = [model]
    return model


def doubled(old):
    """A forward that calls the old one, in its closure, as TRL writes it."""

    def forward(self, inputs):
        return self.scale * old(inputs)

    return forward


def bound_default(old):
    """The old forward is a default, as in a loop over layers."""

    def forward(self, inputs, old=old):
        return self.scale * old(inputs)

    return forward


def bind_forward(model, make):
    """Its forward is a bound method of the function that ``make`` gets from the old
    one.
    """
    function = make(model.forward)
    model.forward = types.MethodType(function, model)
    return model


def with_bound_forward(make):
    model = linear()
    model.scale = 2.0
    return bind_forward(model, make)


def bound_closure_twice():
    return bind_forward(with_bound_forward(doubled), doubled)


def partial_forward():
    model = linear()
    model.forward = partial(type(model).forward, model)
    return nn.Sequential(model, nn.Tanh())


def overlapping():
    """Writes a buffer in its forward pass, and reads what overlaps it: a buffer, an
    attribute.
    """

    def forward(model, inputs):
        model.table += torch.arange(1, 1 + CLASSES)
        factor = 1 + model.transposed[1]
        return model.linear(inputs) * factor + model.row

    table = torch.rand(4, CLASSES, dtype=torch.float64)
    model = Of(forward, linear=linear().double())
    with_buffers(model, table=table, transposed=table.t())
    model.row = table[2]
    return model


def takes_more():
    """A 0-dim tensor, which each sub-step gets anew and may write, and what holds no
    tensor.
    """

    def forward(model, rows, number, name, unused):
        assert number.shape == ()
        assert name == "n"
        assert unused == [True, None, [], {}, ()]
        return model.linear(rows) * number.mul_(2)

    return Of(forward, linear=linear())


def computes_its_own_gradient():
    """Forces: the gradient of an energy is part of the output (double backward)."""

    def forward(model, inputs):
        inputs = inputs.detach().requires_grad_()
        energy = model.energy(inputs).sum()
        (forces,) = torch.autograd.grad(energy, inputs, create_graph=True)
        return forces[:, :CLASSES]

    energy = nn.Sequential(linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 1))
    return Of(forward, energy=energy)


# --- what maps modules to something, and refers to them weakly or in a cache ---


def keyed(make_scales, find):
    """A hook looks its module up, and scales the output by what it finds."""

    def make():
        model = small()
        model.scales = make_scales(model)

        def scale(module, args, output):
            return output * find(model.scales, module)

        for module in model[:3]:
            module.register_forward_hook(scale)
        return model

    return make


def numbered(model):
    scales = {}
    for number, module in enumerate(model.modules()):
        scales[module] = 1.0 + number
    return scales


def in_order(model):
    return OrderedDict(numbered(model))


def in_weak_keys(model):
    return weakref.WeakKeyDictionary(numbered(model))


def scale_in(scales, module):
    return scales[module]


def in_weak_values(model):
    modules = weakref.WeakValueDictionary()
    for module, number in numbered(model).items():
        modules[number] = module
    return modules


def number_in(modules, module):
    numbers = [number for number in modules if modules[number] is module]
    return numbers[0]


def in_weak_set(model):
    return weakref.WeakSet(numbered(model))


def scale_of_member(modules, module):
    return 2.0 if module in modules else 1.0


def by_id(model):
    return {id(module): number for module, number in numbered(model).items()}


def scale_by_id(scales, module):
    return scales[id(module)]


def by_parameter(model):
    scales = {}
    for number, name_and_parameter in enumerate(model.named_parameters()):
        scales[name_and_parameter] = number
    return scales


def scale_of_parameters(scales, module):
    ids = [id(parameter) for parameter in module.parameters(recurse=False)]
    total = 1.0
    for (_, parameter), number in scales.items():
        if id(parameter) in ids:
            total += number
    return total


def in_a_closure(make_table, find):
    """As ``keyed``, but only the hook refers to the table."""

    def make():
        model = small()
        table = make_table(model)

        def scale(module, _, output):
            return output * find(table, module)

        for module in model[:3]:
            module.register_forward_hook(scale)
        return model

    return make


def in_pairs(model):
    return {"pairs": list(numbered(model).items())}


def scale_in_pairs(table, module):
    scales = [scale for key, scale in table["pairs"] if key is module]
    return scales[0]


def ids_of_two(model):
    return [{id(model[0])}, id(model[2])]


def scale_by_ids(table, module):
    scale = 1.0
    if id(module) in table[0]:
        scale += 1
    if id(module) == table[1]:
        scale += 1
    return scale


def counted_by_sets(model):
    """How often each set of modules is there."""
    return Counter({frozenset([module, model]): 2 for module in model})


def count_with(counts, module):
    return sum(number for modules, number in counts.items() if module in modules)


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
            self.first = linear(FEATURES, 6)
            self.temperature = 1.0
            self.child = Child(self, refer)

        def current(self):
            return self.temperature

        def forward(self, inputs):
            self.temperature = inputs.abs().mean(1, keepdim=True)
            hidden = self.first(inputs).tanh()
            return self.child(hidden)

    return Parent


def weak_method(parent):
    return weakref.WeakMethod(parent.current)


def cached_method():
    """Its method is cached for each instance, and computes where its parameters are."""

    def forward(model, inputs):
        return model.linear(inputs) * model.scale(2)

    def ramp(model, start):
        return start + torch.arange(CLASSES).to(model.linear.weight)

    model = Of(forward, linear=linear())
    model.ramp = types.MethodType(ramp, model)
    model.scale = functools.lru_cache(maxsize=None)(model.ramp)
    return model


# --- parameters: dtypes, layouts, classes of their own ---


def conjugates():
    """Its parameter's memory holds conjugates: what forwards write is looked at."""

    def forward(model, inputs):
        factor = model.factor.real + model.factor.imag
        return model.linear(inputs) * factor

    values = randn(CLASSES, dtype=torch.complex128).conj()
    return Of(forward, linear=linear(), factor=nn.Parameter(values))


def of_complex():
    def forward(model, inputs):
        outputs = inputs.to(torch.complex128) @ model.weight
        return outputs.abs()

    weight = torch.randn(FEATURES, CLASSES, dtype=torch.complex128)
    return Of(forward, weight=nn.Parameter(weight))


def conjugate_gradients():
    """The gradients of its parameters are conjugated lazily."""

    def forward(model, inputs):
        rows = inputs.to(torch.complex128)
        outputs = rows @ model.weight.conj() + model.bias.conj()
        return outputs.abs() + model.linear(inputs)

    weight = nn.Parameter(torch.randn(FEATURES, CLASSES, dtype=torch.complex128))
    bias = nn.Parameter(torch.randn(CLASSES, dtype=torch.complex128))
    return Of(forward, weight=weight, bias=bias, linear=linear().double())


def several_dtypes():
    def forward(model, inputs):
        hidden = model.wide(inputs).float()
        return model.narrow(hidden) * model.odd.sum()

    wide = linear(FEATURES, 4).double()
    narrow = linear(4).float()
    odd = nn.Parameter(torch.randn(3))
    return Of(forward, odd=odd, wide=wide, narrow=narrow)


def layouts():
    """Convolutions of which some keep another memory format, and one another dtype."""

    def forward(model, images):
        for tensor in (images, model.first[0].weight):
            assert tensor.is_contiguous(memory_format=torch.channels_last)
        hidden = model.first(images).float()
        outputs = model.last(hidden).double()
        return outputs.flatten(1)

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

    def forward(model, inputs):
        outputs = model.linear(inputs) + model.doubled.scaled()
        if isinstance(model.buffer, nn.Buffer):
            outputs = outputs * 5
        return outputs

    doubled = Doubled(torch.randn(CLASSES), 2.0)
    buffer = nn.Buffer(torch.ones(()))
    return Of(forward, linear=linear(), doubled=doubled, buffer=buffer)


def blocks(use_reentrant):
    """Activation checkpointing."""

    def forward(model, inputs):
        # the reentrant variant needs a gradient
        inputs = inputs + model.head.bias.sum() * 0
        for block in model.blocks:
            block_with_tanh = nn.Sequential(block, nn.Tanh())
            inputs = checkpoint(block_with_tanh, inputs, use_reentrant=use_reentrant)
        return model.head(inputs)

    layers = nn.ModuleList([square(), square(), square()])
    return Of(forward, blocks=layers, head=linear())


def embedding_bags():
    def ids_of(_, inputs):
        return inputs.abs().long()

    return nn.Sequential(Of(ids_of), nn.EmbeddingBag(99, CLASSES))


def of_unsigned_ids():
    def forward(model, ids):
        outputs = model.body(ids.long())
        return outputs[:, :, 0]

    return Of(forward, body=TokenClassifier())


def with_sum_of_parameters():
    def forward(model, inputs):
        outputs = model.linear(inputs)
        for parameter in model.parameters():
            outputs = outputs + parameter.sum()
        return outputs

    return Of(forward, linear=linear())


# --- gradients that are sparse, not there, in one memory, or of what was made of parameters ---


def sparse_tokens():
    model = TokenClassifier()
    model.embedding.sparse = True
    return model


def branches():
    """Rows whose first feature is positive use one head, others the other; one is never
    used.
    """

    def forward(model, inputs):
        positive = inputs[:, 0] > 0
        outputs = inputs.new_zeros(len(inputs), CLASSES)
        for rows, head in ((positive, model.plus), (~positive, model.minus)):
            if rows.any():
                scores = head(inputs[rows])
                outputs = outputs.index_put((rows,), scores)
        return outputs

    return Of(forward, plus=linear(), minus=linear(), never=linear())


def positive_first(rows, count):
    """Rows of which the first ``count`` have a positive first feature, and no other."""
    inputs = randn(rows, FEATURES)
    signs = torch.where(torch.arange(rows) < count, 1, -1)
    inputs[:, 0] = inputs[:, 0].abs() * signs
    return inputs


class InOneMemory(nn.Module):
    """Two parameters whose gradients autograd puts in one memory, and a third it does
    not.
    """

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES, bias=False)
        self.first = nn.Parameter(randn(CLASSES))
        self.second = nn.Parameter(randn(CLASSES, seed=1))

    def forward(self, inputs):
        total = self.first.unsqueeze(0) + self.second.unsqueeze(0)
        return self.linear(inputs) + total


class Plus(torch.autograd.Function):
    """Gives the very same gradient to both of its inputs."""

    @staticmethod
    def forward(_, left, right):
        return left + right

    @staticmethod
    def backward(_, gradient):
        return gradient, gradient


def one_gradient_for_two():
    def forward(model, inputs):
        return inputs @ Plus.apply(model.left, model.right)

    left = nn.Parameter(randn(FEATURES, CLASSES, seed=0))
    right = nn.Parameter(randn(FEATURES, CLASSES, seed=1))
    return Of(forward, left=left, right=right)


# --- buffers ---


def trained_buffer():
    """A buffer that requires grad, as it is: ``double()`` would make it no leaf."""

    def forward(model, inputs):
        outputs = model.linear(inputs) * model.scale
        return outputs + model.constant * model.scale.exp()

    constant = torch.full((CLASSES,), 0.5).double()
    scale = torch.full((CLASSES,), 1.5).double().requires_grad_()
    model = Of(forward, linear=linear().double(), constant=constant)
    return with_buffers(model, scale=scale)


def rebinds():
    """Running state by assignment rather than in place, of a shape that changes."""

    def forward(model, inputs):
        model.seen = model.seen + len(inputs)
        model.last = inputs.detach().clone()
        model.cache = inputs.detach().sum()
        model.grown = torch.cat([model.grown, inputs[0, :1]])
        return model.linear(inputs)

    return with_buffers(
        Of(forward, linear=linear()),
        grown=torch.zeros(1),
        seen=torch.zeros(()),
        last=torch.zeros(0, FEATURES),
        cache=None,
    )


def of_every_dtype():
    """Buffers that change depend on the rows."""

    def forward(model, inputs):
        if model.training:
            model.fp16 += len(inputs)
            model.turn *= 1j * len(inputs)
            model.flags = ~model.flags
            model.int64 += 2**40 + len(inputs)
        return model.linear(inputs)

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

    def forward(model, rows):
        model.mask = rows.abs()[:, :CLASSES]
        return model.linear(rows)

    def mask_output(module, args, output):
        return output * model.mask

    model = Of(forward, linear=linear(), mask=torch.ones(CLASSES))
    model.linear.register_forward_hook(mask_output)
    return model


def penalised(model):
    """A criterion that reaches the model's own parameters."""

    def criterion(output, targets):
        penalty = model.weight.square().sum()
        return F.cross_entropy(output, targets) + penalty

    return criterion


def hooked_in_the_middle():
    """A module's hook changes the gradients that pass."""

    def triple(_, grad_input, grad_output):
        return (grad_input[0] * 3,)

    model = mlp()
    model[1].register_full_backward_hook(triple)
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
        logits = output @ self.proxies + self.offset
        return F.cross_entropy(logits / self.temperature, targets)


def sharing(model):
    """A criterion with a network of its own, one parameter of which is
    the model's too.
    """

    def criterion(head, output, targets):
        return F.cross_entropy(head.network(output), targets)

    network = build(lambda: linear(CLASSES), 1)
    network.bias = model[-1].bias
    return Of(criterion, network=network)


def writes_to_targets(output, targets):
    difference = output - targets.mul_(2)
    return difference.square().mean()


# --- what a user does between steps ---


def exchange_weight(model):
    model[0].weight.data = randn(7, FEATURES, seed=8)


def exchange_activation(model):
    model[1] = nn.Sigmoid()


def append_layer(model):
    layer = build(lambda: nn.Linear(CLASSES, CLASSES), seed=3)
    model.append(layer)


def freeze_first(model):
    model[0].requires_grad_(False)


def thaw_first(model):
    model[0].requires_grad_(True)
    model[2].bias.requires_grad_(False)


# --- all of them ---

# Columns of the table.
RANKS_TOO = {"default_run": (*BROAD, "2 ranks")}
EVERY_WAY_TOO = {"default_run": EVERY_WAY}
ONCE = {"accum": 1}  # it reads what its forward pass has written
BY_SHARE = {"by_share": True, "accum": 1}
AS_IT_IS = {"keep_dtypes": True}
SINGLE = {"keep_dtypes": True, "relative": 1e-5}
TIED_RUNS = (  # others take seconds with graphs
    *EVERY_WAY,
    "graphs",
    "1 rank",
    "2 ranks",
    "3 ranks",
    "2 ranks, graphs",
)

INPUTS, LABELS = BATCH
TOKENS = randint(11, 9, 3), randint(CLASSES, 9, 3)
VALUES = INPUTS, randn(9, CLASSES, seed=3)
HALF = INPUTS.to(torch.half), LABELS
BFLOAT = INPUTS.to(torch.bfloat16), LABELS
FLOAT = INPUTS.to(torch.float32), LABELS
MORE = (INPUTS, torch.tensor(1.5).double(), "n", [True, None, [], {}, ()]), LABELS


def of_dtype(dtype):
    return lambda: linear().to(dtype)


def weight_norm_of_hooks():
    return nn.utils.weight_norm(linear())


def weight_norm():
    return parametrizations.weight_norm(linear())


def spectral_norm_of_hooks():
    return nn.utils.spectral_norm(linear())


def spectral_norm():
    return parametrizations.spectral_norm(linear())


def relu_in_place():
    return nn.Sequential(nn.ReLU(inplace=True), linear())


def sync_batch_norm_in_eval():
    model = nn.Sequential(linear(), nn.SyncBatchNorm(CLASSES))
    return model.eval()


def batch_norm():
    return nn.Sequential(linear(), nn.BatchNorm1d(CLASSES))


def batch_norm_with_forward():
    """Its statistics once stood still."""
    norm = nn.BatchNorm1d(CLASSES)
    norm.forward = norm.forward
    return nn.Sequential(linear(), norm)


def unsigned_ids(dtype):
    return randint(11, 9, 3).to(dtype), LABELS


MODELS = {
    "parameter containers": parameter_containers,
    "lstm": recurrent,
    "unregistered list": unregistered_list,
    "forward is a partial": partial_forward,
    "forward is a bound closure": partial(with_bound_forward, doubled),
    "forward is a bound default": partial(with_bound_forward, bound_default),
    "a bound closure twice": bound_closure_twice,
    "keyed by modules": keyed(numbered, scale_in),
    "keyed by modules, ordered": keyed(in_order, scale_in),
    "keyed by modules, weakly": keyed(in_weak_keys, scale_in),
    "modules in a weak dictionary": keyed(in_weak_values, number_in),
    "modules in a weak set": keyed(in_weak_set, scale_of_member),
    "keyed by ids": keyed(by_id, scale_by_id),
    "keyed by parameters": keyed(by_parameter, scale_of_parameters),
    "keyed in a closure": in_a_closure(numbered, scale_in),
    "pairs in a closure": in_a_closure(in_pairs, scale_in_pairs),
    "ids in a closure": in_a_closure(ids_of_two, scale_by_ids),
    "keyed by sets, counted": keyed(counted_by_sets, count_with),
    "weak method of the parent": with_child(weak_method),
    "__new__ with an argument": partial(Kinded, "a"),
    "cached method": cached_method,
    "in-place ReLU first": relu_in_place,
    "weight norm, old": weight_norm_of_hooks,
    "weight norm": weight_norm,
    "SyncBatchNorm, eval": sync_batch_norm_in_eval,
    "bags": embedding_bags,
}

CASES = {
    **{name: Case(make) for name, make in MODELS.items()},
    "tied": Case(tied, default_run=TIED_RUNS),
    "proxy of the parent": Case(
        with_child(weakref.proxy),
        unless=("compiled",),  # torch cannot guard a proxy: an error of its own
    ),
    "double backward": Case(computes_its_own_gradient, unless=("inference",)),
    "a hook that changes gradients": Case(hooked_in_the_middle),
    "float64 that adds up in float32": Case(
        mlp, engine={"accumulate_dtype": torch.float32}
    ),
    "a number, and no tensors": Case(takes_more, MORE),
    "spectral norm, old": Case(spectral_norm_of_hooks, **ONCE),
    "spectral norm": Case(spectral_norm, **ONCE, **RANKS_TOO),
    "checkpointing": Case(partial(blocks, use_reentrant=False)),
    "checkpointing, reentrant": Case(
        partial(blocks, use_reentrant=True), unless=("check",)
    ),
    "fx": Case(lambda: torch.fx.symbolic_trace(small())),
    "complex": Case(of_complex, **AS_IT_IS, **RANKS_TOO),
    "conjugates": Case(conjugates, **RANKS_TOO),
    "conjugate gradients": Case(conjugate_gradients, **AS_IT_IS),
    "torch.float32": Case(of_dtype(torch.float32), FLOAT, **SINGLE),
    "torch.bfloat16": Case(of_dtype(torch.bfloat16), BFLOAT, relative=0.03, **AS_IT_IS),
    "torch.float16": Case(
        of_dtype(torch.half), HALF, relative=3e-3, **AS_IT_IS, **RANKS_TOO
    ),
    "torch.uint16": Case(of_unsigned_ids, unsigned_ids(torch.uint16)),
    "torch.uint64": Case(of_unsigned_ids, unsigned_ids(torch.uint64)),
    "several dtypes": Case(several_dtypes, **SINGLE, **RANKS_TOO),
    "layouts, torch.float32": Case(
        layouts,
        batch=(IMAGES, randint(CLASSES, 6)),
        **SINGLE,
        **RANKS_TOO,
    ),
    "own parameters": Case(own_parameters, **RANKS_TOO),
    # ``nn.DataParallel``'s replicas say that they have none
    "looks at its parameters": Case(with_sum_of_parameters),
    "changes between steps": Case(
        mlp, changes=[exchange_weight, exchange_activation, append_layer], **RANKS_TOO
    ),
    "sparse gradients": Case(sparse_tokens, TOKENS, default_run=BROAD),
    "unused by some": Case(branches, (positive_first(9, 6), LABELS), **RANKS_TOO),
    "gradients in one memory": Case(InOneMemory, **RANKS_TOO),
    "one gradient for two": Case(one_gradient_for_two),
    "a criterion that writes to its targets": Case(
        mlp, VALUES, lambda _: writes_to_targets
    ),
    "a trained criterion": Case(
        mlp, criterion=lambda _: Head(), default_run=(*BROAD, "guarded", "2 ranks")
    ),
    "a criterion that shares a parameter": Case(mlp, criterion=sharing),
    "a method of a trained criterion": Case(mlp, criterion=lambda _: Head().forward),
    "fewer rows than replicas": Case(mlp, (INPUTS[:2], LABELS[:2])),
    "keyed by modules, changed": Case(
        keyed(numbered, scale_in), changes=[smaller_scales, smaller_scales]
    ),
    "frozen and thawed": Case(mlp, changes=[freeze_first, thaw_first], **RANKS_TOO),
    "a penalty on the model": Case(  # refused unless the criterion is called once
        linear, criterion=penalised, only=("whole batch", "inference")
    ),
    "batch norm": Case(batch_norm, **BY_SHARE, **EVERY_WAY_TOO),
    "batch norm with another forward": Case(batch_norm_with_forward, **BY_SHARE),
    "a trained buffer": Case(trained_buffer, **AS_IT_IS, **RANKS_TOO),
    "rebound buffers": Case(rebinds),
    "buffers of every dtype": Case(of_every_dtype, **AS_IT_IS, **ONCE, **RANKS_TOO),
    "overlapping buffer, transposed": Case(
        overlapping, **AS_IT_IS, **ONCE, **RANKS_TOO
    ),
    "a hook that closes over the module": Case(multiplies),
}
