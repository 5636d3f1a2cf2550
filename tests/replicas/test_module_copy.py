"""What modules may be, do and return that one device would take, or that is told in
words.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import warnings
import weakref

import pytest
import torch
from harness.isolation import guarded
from harness.models import CLASSES, FEATURES, Of, Returns, linear, mlp
from harness.oracle import (
    assert_close,
    assert_step,
    build,
    randint,
    randn,
    seeded,
    whole_batch,
)
from harness.pairwise import few_of
from harness.weighted import CLASS_WEIGHTS, classes
from torch import nn
from torch.nn import functional as F

from scatterpar import DataParallelCriterion, DataParallelModel, ScatterOnceParallel

BATCH = randn(9, FEATURES), randint(CLASSES, 9)
CRITERION = nn.CrossEntropyLoss()


pytestmark = [
    pytest.mark.core,
    pytest.mark.filterwarnings(
        *(f"ignore:{words}" for words in ("Sparse", ".*quantize", ".*jit"))
    ),
]


class Slotted(nn.Linear):
    __slots__ = ("scale",)


def holding(register, make_table):
    """Makes a module to which ``register`` gives such a table."""

    def make():
        model = linear()
        register(model, "table", make_table())
        return model

    return make


def sparse():
    return torch.eye(3).to_sparse()


def jagged():
    rows = [torch.ones(2), torch.ones(3)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def quantised():
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)


REFUSED = {
    "slots": (
        lambda: Slotted(FEATURES, CLASSES),
        "class Slotted of a module has __slots__",
    ),
    "a sparse buffer": (
        holding(nn.Module.register_buffer, sparse),
        "'table' of .* is a spars.*Repl",
    ),
    "a quantised buffer": (
        holding(nn.Module.register_buffer, quantised),
        r"the buffer 'table' of Linear is a quantised tensor, .* register the .int_repr\(\)",
    ),
    "a nested attribute": (
        holding(setattr, jagged),
        r"is a nested tensor, .* register the .values\(\) and .offsets\(\)",
    ),
    "an attribute of oneDNN": (
        holding(setattr, lambda: torch.ones(3).to_mkldnn()),
        r"is a oneDNN tensor, .* register the .to_dense\(\)",
    ),
    "TorchScript": (
        holding(setattr, lambda: torch.jit.script(nn.Tanh())),
        r"cannot be replicated, since its child 'table' is a TorchScript module, .* "
        r"gave to torch.jit",
    ),
    "a generator as output": (
        lambda: Returns(lambda logits, _: {"logits": (row for row in logits)}),
        "output contains a generator, an iterator; return a list",
    ),
}


@pytest.mark.parametrize("runner", [ScatterOnceParallel, DataParallelModel])
@pytest.mark.parametrize("case", REFUSED)
def test_uncopyable_parts_refused_with_remedy(devices, case, runner):
    make, words = REFUSED[case]
    with pytest.raises(TypeError, match=words):
        runner(build(make).eval(), device_ids=devices(2))(BATCH[0])


def zeroes(m, inputs):
    m.zero_grad()
    m.linear.zero_grad()
    return m.linear(inputs)


def test_zero_grad_in_forward_has_no_effect(devices):
    """Each sub-step forgot the ones before it, in silence."""
    model = Of(zeroes, linear=linear())
    with (
        ScatterOnceParallel(model, 3, devices(2)) as engine,
        pytest.warns(UserWarning, match="zero_grad.. inside forward has no effect"),
    ):
        assert_step(engine, *BATCH, CRITERION)


def adapts_a_copy(m, inputs):
    """As meta-learning does, with all that a module of its own can do."""
    fast = copy.deepcopy(m.linear)
    with warnings.catch_warnings(action="error"), torch.enable_grad():
        fast.zero_grad()
        fast(inputs).square().mean().backward()
        assert fast.weight.grad is not None
        fast.zero_grad()
    assert fast.weight.grad is None
    return m.linear(inputs)


def test_deep_copy_in_forward_can_zero_grad(devices):
    with ScatterOnceParallel(Of(adapts_a_copy, linear=linear()), 3, ["cpu"]) as engine:
        assert_step(engine, *BATCH, CRITERION)
        assert (
            pickle.loads(pickle.dumps(engine.replicas[0].linear.zero_grad)) is not None
        )


class Single(nn.Linear):
    """Its class has one instance."""

    instance = None

    def __new__(cls):
        if cls.instance is None:
            cls.instance = super().__new__(cls)
        return cls.instance

    def __init__(self):
        super().__init__(FEATURES, CLASSES)

    def _replicate_for_data_parallel(self):
        return self


def test_singleton_class_trains(devices):
    model = build(Single)
    before = set(vars(model))
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        engine.forward_backward(*BATCH, CRITERION)
        _, expected = whole_batch(linear_like(model), *BATCH, CRITERION)
        assert_close(model.weight.grad, expected["weight"], "weight")
    assert set(vars(model)) == before
    model.zero_grad()
    assert model.weight.grad is None


def linear_like(model):
    plain = nn.Linear(FEATURES, CLASSES, device="meta").double()
    plain.weight, plain.bias = model.weight, model.bias
    return plain


class Named:
    """Looks the names of modules up for a hook, and is shared by replicas."""

    def __init__(self, model):
        self.names = {module: name for name, module in model.named_modules()}

    def hook(self, module, args, output):
        self.last = self.names[module]


@pytest.mark.parametrize("verify", [True, False])
def test_error_tells_object_keyed_by_modules(devices, verify):
    model = mlp()
    model[0].register_forward_hook(Named(model).hook)
    with (
        ScatterOnceParallel(model, 2, devices(2), verify=verify) as engine,
        pytest.raises((KeyError, ValueError)) as raised,
    ):
        engine.forward_backward(*BATCH, CRITERION)
    if verify:
        assert "KeyError" in str(raised.value)
    else:
        notes = raised.value.__notes__
        assert any("the key is a replica's copy" in note for note in notes)


def wrapped(function):
    """As a notebook's cell wraps a function each time it runs."""
    return lambda inputs: function(inputs)


class CallsWrapped(nn.Module):
    """Calls its layer through functions that refer to each other."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES).double()
        function = wrapped(self.layer)
        for _ in range(20):
            function = wrapped(function)
        self.function = function

    def forward(self, inputs):
        return self.function(inputs)


class Gone:
    """What a weak proxy has referred to."""


def hook_with_dead_proxy():
    proxy = weakref.proxy(Gone())

    def hook(module, args, output):
        with contextlib.suppress(ReferenceError):
            proxy.value  # noqa: B018
        return output

    return hook


def test_functions_that_refer_to_each_other(devices):
    model = build(CallsWrapped)
    inputs, targets = BATCH
    # Not of a copy: its functions would refer to this one's layer.
    expected = torch.autograd.grad(
        CRITERION(model(inputs), targets), model.layer.weight
    )
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        engine.forward_backward(inputs, targets, CRITERION)
    assert_close(model.layer.weight.grad, *expected, "weight")


def test_dead_proxy_in_a_hook(devices):
    """What the walk asked of it raised ``ReferenceError``."""
    model = mlp()
    model[0].register_forward_hook(hook_with_dead_proxy())
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        assert_step(engine, *BATCH, CRITERION)


def test_lazy_modules_told_to_initialise(devices):
    with seeded():
        module = nn.Sequential(
            nn.LazyLinear(6), nn.Tanh(), nn.LazyLinear(CLASSES)
        ).double()
    words = r"uninitialised lazy parameter, '0.weight'; call the module once"
    with ScatterOnceParallel(module, 2, devices(2)) as engine:
        with pytest.raises(RuntimeError, match=words):
            engine.forward_backward(*BATCH, CRITERION)
        with seeded():
            module(BATCH[0][:2])
        assert_step(engine, *BATCH, CRITERION)


def makes_its_head(m, inputs):
    """Its head comes with the first batch, as wide as that."""
    m.head = m.head or nn.Linear(6, CLASSES).double()
    return m.head(m.enter(inputs))


def exchanges_its_weight(m, inputs):
    if m.exchanges:
        m.head.weight = nn.Parameter(m.head.weight * 0.5)
    return m.head(inputs)


MAKERS = {
    "a head": lambda: Of(makes_its_head, enter=nn.Linear(FEATURES, 6), head=None),
    "a weight": lambda: Of(exchanges_its_weight, head=linear(), exchanges=True),
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("whole_batch", few_of([False, True], [True]))
def test_parameters_made_in_forward_refused(devices, kind, whole_batch):
    model, words = build(MAKERS[kind]), r"creates the parameter 'head\.weight'"
    with ScatterOnceParallel(model, 2, devices(3)) as engine:
        for _ in range(2):
            with pytest.raises(ValueError, match=f"{words}.*before the first"):
                engine.forward_backward(*BATCH, CRITERION, whole_batch=whole_batch)
            with pytest.raises(ValueError, match=words), torch.no_grad():
                engine(BATCH[0])
            assert all(parameter.grad is None for parameter in model.parameters())
        model.exchanges = False
        with seeded():
            model(BATCH[0])
        assert_step(engine, *BATCH, CRITERION)


# --- criteria that hold tensors ---

LABELLED = randn(13, FEATURES), classes(13)


def weighted(output, targets, options, scale=1.0):
    losses = F.cross_entropy(output, targets, reduction="none")
    return (losses * options["weight"][:1]).mean() * scale


CRITERIA = {
    "nested": functools.partial(
        functools.partial(weighted, options={"weight": CLASS_WEIGHTS.clone()}),
        scale=3.0,
    ),
    "a module": functools.partial(
        nn.CrossEntropyLoss(CLASS_WEIGHTS.clone(), reduction="sum")
    ),
}


@pytest.mark.parametrize("case", CRITERIA)
def test_partial_tensors_copied_per_replica(monkeypatch, case):
    """The second card failed: the weight stayed on the first."""
    model, criterion, ids = mlp(), CRITERIA[case], ["cpu:0", "cpu:1", "cpu:2"]
    expected, _ = whole_batch(model, *LABELLED, criterion)
    module = criterion.func if isinstance(criterion.func, nn.Module) else nn.Module()
    with (
        ScatterOnceParallel(model, 2, ids) as engine,
        guarded(monkeypatch, model, module) as memories,
    ):
        memories.claim(list(criterion.keywords.values()), torch.device("cpu:0"))
        assert_close(engine.forward_backward(*LABELLED, criterion), expected, "loss")
        outputs = DataParallelModel(model, ids)(LABELLED[0])
        loss = DataParallelCriterion(criterion, ids)(outputs, LABELLED[1])
        assert_close(loss.detach(), expected, "loss of the pair")
        assert len(memories.checked) == 3


def test_partial_tensors_sent_once_and_follow():
    weight = CLASS_WEIGHTS.clone()
    criterion = functools.partial(F.cross_entropy, weight=weight)
    with ScatterOnceParallel(mlp(), 2, ["cpu:0", "cpu:1"]) as engine:
        engine.forward_backward(*LABELLED, F.cross_entropy)
        assert_step(engine, *LABELLED, criterion)
        # all else is there
        assert engine.last_step.bytes["replicate"] == weight.numel() * 8
        assert_step(engine, *LABELLED, criterion)
        assert engine.last_step.bytes["replicate"] == 0
        weight[0] = 7.0
        assert_step(engine, *LABELLED, criterion)


def test_trained_partial_tensor_gets_grad(devices):
    def scaled(output, targets, scale):
        return scale * F.cross_entropy(output, targets)

    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    model = mlp()
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        engine.forward_backward(*LABELLED, functools.partial(scaled, scale=scale))
    assert_close(scale.grad, whole_batch(model, *LABELLED, F.cross_entropy)[0], "scale")


def test_closure_tensor_on_other_device_named(devices):
    """It cannot be moved; so the error says what it is, where it is, and what to write
    instead.
    """
    weight, few = CLASS_WEIGHTS.to("meta"), CLASS_WEIGHTS[:3]

    def notes_on(criterion):
        """Another error says nothing of it."""
        with pytest.raises((RuntimeError, NotImplementedError)) as caught:
            engine.forward_backward(*LABELLED, criterion)
        return [note for note in caught.value.__notes__ if "criterion uses" in note]

    with ScatterOnceParallel(mlp(), 2, devices(2)) as engine:
        (said,) = notes_on(lambda o, t: F.cross_entropy(o, t, weight=weight))
        assert (
            "the criterion uses 'weight' on meta, but this replica computes on cpu"
            in said
        )
        assert "bind it with functools.partial(criterion, weight=weight)" in said
        assert all(parameter.grad is None for parameter in engine.parameters())
        assert not notes_on(lambda o, t: F.cross_entropy(o, t, weight=few))


def test_replicate_protocol_of_torch_is_called():
    """``nn.DataParallel`` makes replicas by this method; ``nn.RNNBase``
    overrides it.
    """

    class Marked(nn.Linear):
        def _replicate_for_data_parallel(self):
            replica = super()._replicate_for_data_parallel()
            replica.is_marked = True
            return replica

        def forward(self, x):
            assert self.is_marked
            return super().forward(x)

    with ScatterOnceParallel(
        build(lambda: Marked(2, 2)), 1, ["cpu"] * 2, verify=False
    ) as engine:
        engine.forward_backward(
            torch.ones(4, 2).double(), torch.ones(4, 2).double(), nn.MSELoss()
        )
