"""Modules that torch's protocol for replicas loses or breaks: fx, export, TorchScript, slots.

And what a forward pass may do or return that one device would take, or that is told in words.
"""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.models import CLASSES, FEATURES
from helpers.oracle import assert_close, assert_step, build, randint, randn
from torch import nn

from scatterpar import DataParallelCriterion, DataParallelModel, ScatterOnceParallel, gather

BATCH = randn(9, FEATURES), randint(CLASSES, 9)
CRITERION = nn.CrossEntropyLoss()


def small():
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, CLASSES))


def traced():
    return torch.fx.symbolic_trace(small())


class Traced(torch.fx.GraphModule):
    """A class of the user's own, with what no node of the graph mentions."""

    def __init__(self, root, graph):
        super().__init__(root, graph)
        self.scale = 3.0
        self.unused = nn.Linear(2, 2)

    def __call__(self, inputs):
        return super().__call__(inputs) * self.scale


def traced_subclass():
    root = small()
    return Traced(root, torch.fx.Tracer().trace(root))


def exported():
    return torch.export.export(small(), (torch.randn(3, FEATURES),), dynamic_shapes=ROWS).module()


ROWS = ({0: torch.export.Dim.AUTO},)


class Slotted(nn.Linear):
    __slots__ = ("__hidden", "scale")

    def __init__(self):
        super().__init__(FEATURES, CLASSES)
        self.scale = 2.0
        self.__hidden = [nn.Linear(CLASSES, CLASSES).double()]

    def forward(self, inputs):
        return self.__hidden[0](super().forward(inputs)) * self.scale


def scripted():
    return torch.jit.script(small())


def jit_traced():
    return torch.jit.trace(small(), torch.randn(3, FEATURES))


def scripted_child():
    return nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ModuleList([scripted()])[0])


class ScriptInAList(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.hidden = [torch.jit.script(small()).double()]

    def forward(self, inputs):
        return self.hidden[0](self.first(inputs))


class Graph(nn.Module):
    """A graph network's adjacency, which is the same for all rows."""

    def __init__(self, layout):
        super().__init__()
        adjacency = (torch.rand(FEATURES, FEATURES) > 0.5) * torch.rand(FEATURES, FEATURES)
        self.register_buffer("adjacency", adjacency.to_sparse(layout=layout))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs):
        return self.head((self.adjacency @ inputs.T).T)


KINDS = {
    "fx": traced,
    "fx subclass": traced_subclass,
    "export": exported,
    "slots": Slotted,
    "script": scripted,
    "jit trace": jit_traced,
    "script child": scripted_child,
    "script in a list": ScriptInAList,
    "sparse COO": lambda: Graph(torch.sparse_coo),
    "sparse CSR": lambda: Graph(torch.sparse_csr),
    "sparse CSC": lambda: Graph(torch.sparse_csc),
}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:Sparse")


def plain_step(model):
    model.zero_grad()
    loss = CRITERION(model(BATCH[0]), BATCH[1])
    loss.backward()
    return loss.detach()


@each_kind
def test_exact_step_after_step(devices, kind):
    model, plain = build(kind), build(kind)
    optimizers = [torch.optim.SGD(m.parameters(), 0.5) for m in (model, plain)]
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        for _ in range(3):
            model.zero_grad()
            loss = engine.forward_backward(*BATCH, CRITERION)
            assert_close(loss, plain_step(plain), "loss")
            for (name, one), (_, other) in zip(
                model.named_parameters(), plain.named_parameters(), strict=True
            ):
                assert_close(one.detach(), other.detach(), name)
                assert (one.grad is None) == (other.grad is None)
                if one.grad is not None:
                    assert_close(one.grad, other.grad, f"{name}.grad")
            for optimizer in optimizers:
                optimizer.step()
        for replica in engine.replicas:
            if not isinstance(replica, torch.jit.ScriptModule):  # a C++ object in a Python shell
                assert type(replica) is type(model)
                assert vars(replica).keys() >= vars(model).keys()
        with torch.no_grad():
            assert_close(engine(BATCH[0]), plain(BATCH[0]), "output")


QUICK = ["fx", "script child", "sparse CSR"]


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(make, id=name, marks=[] if name in QUICK else pytest.mark.slow)
        for name, make in KINDS.items()
    ],
)
def test_the_pair(devices, kind):
    model, plain = build(kind), build(kind)
    pair = DataParallelModel(model, devices(2))
    for _ in range(2):
        model.zero_grad()
        DataParallelCriterion(CRITERION)(pair(BATCH[0]), BATCH[1]).backward()
        plain_step(plain)
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            if other.grad is not None:
                assert_close(one.grad, other.grad, "gradient")


def test_statistics_inside_torchscript(devices):
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(FEATURES)
            self.head = nn.Linear(FEATURES, CLASSES)

        def forward(self, inputs):
            return self.head(self.norm(inputs))

    model = torch.jit.script(build(Normed))
    plain = copy.deepcopy(model)
    with ScatterOnceParallel(model, 1, devices(2)) as engine:
        for _ in range(2):
            engine.forward_backward(*BATCH, CRITERION)
            CRITERION(plain(BATCH[0][:5]), BATCH[1][:5]).backward()  # replica 0's rows
        for (name, one), (_, other) in zip(
            model.named_buffers(), plain.named_buffers(), strict=True
        ):
            assert_close(one.double(), other.double(), name)
        model.eval()
        plain.eval()
        assert_close(engine(BATCH[0]), plain(BATCH[0]).detach(), "output")


def test_a_scripted_criterion(devices):
    weight = randn(CLASSES, seed=2).abs()
    criterion = torch.jit.script(nn.CrossEntropyLoss(weight=weight))
    model, plain = build(small), build(small)
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        loss = engine.forward_backward(*BATCH, criterion, count=lambda _, t: weight[t].sum())
    expected = criterion(plain(BATCH[0]), BATCH[1])
    expected.backward()
    assert_close(loss, expected.detach(), "loss")
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(one.grad, other.grad, "gradient")


def test_a_scripted_criterion_without_a_count(devices):
    """Its class has no forward to be looked at, and its terms are counted all the same."""
    with ScatterOnceParallel(build(small), 2, devices(2)) as engine:
        assert_step(engine, *BATCH, torch.jit.script(nn.CrossEntropyLoss()))
        weighted = torch.jit.script(nn.CrossEntropyLoss(weight=randn(CLASSES, seed=2).abs()))
        assert_step(engine, *BATCH, weighted)


def test_changes_that_replicas_follow(devices):
    """Slots, TorchScript tensors and sparse values have no dictionary that tells."""
    model = build(lambda: nn.ModuleDict({"slots": Slotted(), "graph": Graph(torch.sparse_coo)}))
    model["script"] = torch.jit.script(build(small))

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = model

        def forward(self, inputs):
            return sum(child(inputs) for child in self.parts.values())

    whole = Sum().double().eval()
    with ScatterOnceParallel(whole, 1, devices(2)) as engine:

        def check():
            assert_close(engine(BATCH[0]), whole(BATCH[0]).detach(), "output")

        check()
        model["slots"].scale = 5.0
        check()
        with torch.no_grad():
            dict(model["script"].named_modules())["0"].weight.mul_(2)
        check()
        dict(model["script"].named_modules())["2"].weight = nn.Parameter(randn(CLASSES, 6, seed=5))
        check()
        model["graph"].adjacency.mul_(2)
        check()
        model["graph"].adjacency._values().data[0] = 7.0
        check()
        model["graph"].adjacency = torch.eye(FEATURES).double().to_sparse()
        check()


def test_a_sparse_tensor_travels_once():
    with ScatterOnceParallel(
        build(lambda: Graph(torch.sparse_csr)), 1, ["cpu:0", "cpu:1"]
    ) as engine:
        for _ in range(2):
            engine.forward_backward(*BATCH, CRITERION)
        assert engine.last_step.bytes["replicate"] == 0


def test_a_trained_sparse_tensor_is_refused_in_words():
    model = build(small)
    model.table = torch.eye(3).to_sparse().requires_grad_()
    with (
        ScatterOnceParallel(model, 1, ["cpu"]) as engine,
        pytest.raises(ValueError, match=r"sparse tensor of shape \(3, 3\) that requires grad"),
    ):
        engine.forward_backward(*BATCH, CRITERION)


class Zeroes(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs):
        self.zero_grad()
        self.linear.zero_grad()
        return self.linear(inputs)


def test_zero_grad_in_forward_does_not_wipe_earlier_sub_steps(devices):
    """Each sub-step forgot the ones before it, in silence."""
    model = build(Zeroes)
    with (
        ScatterOnceParallel(model, 3, devices(2)) as engine,
        pytest.warns(UserWarning, match="zero_grad.. inside forward has no effect"),
    ):
        engine.forward_backward(*BATCH, CRITERION)
    gradient = model.linear.weight.grad
    plain_step(model)
    assert_close(gradient, model.linear.weight.grad, "gradient")


class Yields(nn.Linear):
    def forward(self, inputs):
        return {"logits": (row for row in super().forward(inputs))}


class Maps(nn.Linear):
    def forward(self, inputs):
        return map(super().forward, inputs)


def test_a_generator_as_an_output_is_refused_in_words(devices):
    model = build(lambda: Yields(FEATURES, CLASSES)).eval()
    words = "output holds a generator, which nobody has run yet; return a list"
    with ScatterOnceParallel(model, 2, devices(2)) as engine, pytest.raises(TypeError, match=words):
        engine(BATCH[0])
    with pytest.raises(TypeError, match=words):
        DataParallelModel(model, devices(2))(BATCH[0])
    pair = DataParallelModel(build(lambda: Maps(FEATURES, CLASSES)), devices(2))
    with pytest.raises(TypeError, match="output holds a map, which nobody has run yet"):
        pair(BATCH[0])


def test_mappings_with_different_keys_are_refused_in_words():
    """They came back as a list, without a word."""
    outputs = ({"a": torch.zeros(2)}, {"a": torch.zeros(2), "b": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"different keys .*\['a'\] in the first, \['a', 'b'\]"):
        gather(outputs, "cpu")
    with pytest.raises(ValueError, match="different keys"):
        gather(({"in": outputs[0]}, {"in": outputs[1]}), "cpu")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused_with_a_way_out(devices, layout):
    inputs = torch.nested.nested_tensor([randn(n, FEATURES) for n in (2, 3, 4)], layout=layout)
    with (
        ScatterOnceParallel(build(small), 1, devices(2)) as engine,
        pytest.raises(ValueError, match=r"inputs: a nested tensor .*Rows\(list\(tensor.unbind"),
    ):
        engine.forward_backward(inputs, BATCH[1][:3], CRITERION)


def test_the_step_is_the_oracles(devices):
    with ScatterOnceParallel(build(traced), 2, devices(2)) as engine:
        assert_step(engine, *BATCH, CRITERION)
