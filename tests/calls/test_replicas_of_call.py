"""Replicas follow the module in every call; parameters are sent when they change."""

import contextlib
import copy

import pytest
import torch
from harness.oracle import assert_close, build, randn
from torch import nn

from calls.programs import mlp
from scatterpar import DataParallelModel, ScatterOnceParallel, ShardedOptimizer
from scatterpar.devices.bits import as_bytes
from scatterpar.devices.transfers import Transfers
from scatterpar.replicas.replicas import Replica

ROWS = randn(7, 6)
LAYOUTS = [["cpu"] * 2, ["cpu:0", "cpu:1", "cpu:0"]]


@pytest.fixture(params=LAYOUTS, ids="+".join)
def layout(request):
    return request.param


def replicated(engine):
    return engine.last_step.bytes["replicate"]


def test_one_changed_parameter_is_sent_alone():
    net = build(mlp)
    with ScatterOnceParallel(
        net, device_ids=["cpu:0", "cpu:1"], verify=False
    ) as engine:
        engine(ROWS)
        assert replicated(engine) == sum(p.nbytes for p in net.parameters())
        engine(ROWS)
        assert replicated(engine) == 0
        with torch.no_grad():
            net[2].bias.add_(1)
        assert_close(engine(ROWS).detach(), net(ROWS).detach(), "output")
        assert replicated(engine) == net[2].bias.nbytes


CHANGES = {
    "a parameter": lambda net: setattr(net[0], "weight", nn.Parameter(randn(8, 6))),
    "a module": lambda net: net.__setitem__(1, nn.ReLU()),
    "a mode": lambda net: net.eval(),
    "a buffer": lambda net: net.shift.add_(1),
    "an exchanged buffer": lambda net: setattr(net, "shift", randn(3)),
    "an attribute": lambda net: setattr(net, "scale", 3.0),
    "a tensor": lambda net: setattr(net, "factors", randn(3)),
    "a hook": lambda net: net[1].register_forward_hook(lambda m, a, out: 2 * out),
    "frozen": lambda net: net[0].requires_grad_(False),
}


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(*mlp(), nn.Dropout(0.0))
        self.scale = 1.0
        self.factors = torch.ones(3)
        self.register_buffer("shift", torch.zeros(3))

    def forward(self, rows):
        return super().forward(rows) * self.scale * self.factors + self.shift


@pytest.mark.parametrize("change", CHANGES)
def test_change_reaches_the_next_call(layout, change):
    net = build(Net)
    with ScatterOnceParallel(net, device_ids=layout, verify=False) as engine:
        engine(ROWS).sum().backward()
        CHANGES[change](net)
        net.zero_grad()
        output = engine(ROWS)
        assert_close(output.detach(), net(ROWS).detach(), change)
        output.sum().backward()
        found = [p.grad for p in net.parameters()]
        net.zero_grad()
        net(ROWS).sum().backward()
        for mine, parameter in zip(found, net.parameters(), strict=True):
            assert (mine is None) == (parameter.grad is None)
            if mine is not None:
                assert_close(mine, parameter.grad, change)


def exchange(weight):
    weight.data = 2 * weight.data


@torch.no_grad()
def set_elsewhere(weight):
    weight.set_(2 * weight)


@pytest.mark.parametrize("write", [exchange, set_elsewhere])
def test_exchanged_storage_reaches_the_next_call(layout, write):
    """No gradient was added: the forward pass was told to have written it."""
    net = build(mlp)
    with ScatterOnceParallel(net, device_ids=layout, verify=False) as engine:
        for _ in range(3):
            assert_close(engine(ROWS).detach(), net(ROWS).detach(), "output")
            write(net[0].weight)


@pytest.mark.parametrize("write", [exchange, set_elsewhere])
@pytest.mark.parametrize("fails", [False, True], ids=["writes", "fails, too"])
def test_failed_call_restores_storages(layout, write, fails):
    """The user's module is the first replica: it had kept what the pass has set."""

    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.does = nn.Linear(6, 3), False

        def forward(self, rows):
            if self.does:
                write(self.layer.weight)
                if fails:
                    raise RuntimeError("mine")
            return self.layer(rows)

    net = build(Writes)
    with ScatterOnceParallel(net, device_ids=layout, verify=False) as engine:
        expected = engine(ROWS).detach()
        for _ in range(2):
            net.does = True
            with pytest.raises(RuntimeError, match="nothing was changed"):
                engine(ROWS)
            net.does = False
            assert_close(engine(ROWS).detach(), net(ROWS).detach(), "output")
            assert torch.equal(engine(ROWS), expected)


def test_values_sent_again_after_uncounted_write():
    """A replica had its own product for good."""
    switch = {"on": True}  # no flag of a module, whose change has values read again

    class Decays(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, rows):
            if switch["on"]:
                self.layer.weight.data.mul_(1 + rows.sum() ** 2)
            return self.layer(rows)

    net = build(Decays)
    ids = ["cpu:0", "cpu:1"]
    with ScatterOnceParallel(net, device_ids=ids, verify=False) as engine:
        with pytest.raises(RuntimeError, match="values are lost"):
            engine(ROWS)
        switch["on"] = False
        assert_close(engine(ROWS).detach(), net(ROWS).detach(), "output")


def test_failed_call_restores_buffers_and_draws(layout):
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.fails = nn.BatchNorm1d(6), True
            self.register_buffer("count", torch.zeros(()))

        def forward(self, rows):
            self.count.add_(1)
            rows = nn.functional.dropout(self.norm(rows))
            if self.fails:
                raise LookupError("mine")
            return rows

    net = build(Fails)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    state = torch.get_rng_state()
    made = ScatterOnceParallel(net, device_ids=layout, verify=False)
    with torch.random.fork_rng(), made as engine:
        with pytest.raises(LookupError, match="mine"):
            engine(ROWS)
        assert torch.equal(torch.get_rng_state(), state)
        torch.testing.assert_close(net.state_dict(), before)
        net.fails = False
        with pytest.warns(UserWarning, match="batch normalisation"):
            engine(ROWS)
    assert net.count == 1


def test_write_without_version_is_sent(layout):
    net = build(mlp)
    with ScatterOnceParallel(net, device_ids=layout, verify=False) as engine:
        engine(ROWS).sum().backward()
        for parameter in net.parameters():
            parameter.data.add_(parameter.grad, alpha=-0.1)
        assert_close(engine(ROWS).detach(), net(ROWS).detach(), "output")


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = mlp()
        self.register_buffer("shift", randn(3))

    def forward(self, rows):
        return self.layers(rows) + self.shift


TEACHERS = {
    "no_grad": (lambda net: net, torch.no_grad),
    "no_grad, eval": (nn.Module.eval, torch.no_grad),
    "frozen": (lambda net: net.requires_grad_(False), contextlib.nullcontext),
    "frozen, eval": (
        lambda net: net.eval().requires_grad_(False),
        contextlib.nullcontext,
    ),
}


@pytest.mark.parametrize("name", TEACHERS)
@pytest.mark.parametrize("kind", [ScatterOnceParallel, DataParallelModel])
def test_teacher_follows_without_versions(layout, kind, name):
    """As in DINO and mean teachers: it has no backward pass, after which values would
    be read again, and ``.data`` raises no version.
    """
    prepare, grad_mode = TEACHERS[name]
    net, plain = build(Shifted), build(Shifted)
    student = [parameter.detach() + 1 for parameter in net.state_dict().values()]
    prepare(net)
    teacher = kind(net, device_ids=layout)
    with grad_mode():
        for _ in range(4):
            outputs = teacher(ROWS)
            if kind is DataParallelModel:
                outputs = torch.cat([output.cpu() for output in outputs])
            assert_close(outputs.detach(), plain(ROWS).detach(), "output")
            for module in (net, plain):
                for kept, followed in zip(
                    module.state_dict().values(), student, strict=True
                ):
                    kept.data.mul_(0.5).add_(followed, alpha=0.5)


# --- many small tensors in containers ---
# They are read together, and not in each call with their values: whatever is read less
# often has an entry here.

NUM_SMALL = 40
FOUR = randn(7, 4)


class Holds(nn.Module):
    """Its output depends on values, order and shape of each tensor."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.listed = [randn(2, 3, seed=number) for number in range(NUM_SMALL)]
        self.named = {str(n): randn(4, seed=n) for n in range(NUM_SMALL)}
        self.alone = randn(4, seed=5)

    def forward(self, rows):
        for position, tensor in enumerate(self.listed):
            places = torch.arange(1.0, 1 + tensor.numel(), dtype=tensor.dtype)
            weighted = tensor.reshape(-1) @ places * len(tensor)
            rows = rows + weighted * (position + 1) / 1000
        for name, tensor in self.named.items():
            rows = rows + tensor.sum() * (1 + len(name))
        return self.layer(rows) * self.alone


def as_numpy(tensor):
    return tensor.detach().numpy()


def share_with_another(net):
    """One becomes a view of another, which is written then."""
    net.listed[3].data = net.listed[4].data[:1]
    net.listed[4].add_(1)


# Torch counts a version, or another object or memory is there: seen in each call.
SEEN_IN_EACH_CALL = {
    "an operator": lambda net: net.listed[3].mul_(3),
    "out=": lambda net: torch.add(net.alone, 1, out=net.named["7"]),
    "of a part": lambda net: net.named["3"][1:].zero_(),
    "set_": lambda net: net.listed[3].set_(randn(2, 3, seed=9)),
    "other data": lambda net: setattr(net.listed[3], "data", randn(2, 3, seed=9)),
    "data of another shape": lambda net: setattr(net.listed[3], "data", randn(5)),
    "a part of its data": lambda net: setattr(
        net.listed[3], "data", net.listed[3].data[:1]
    ),
    "other strides of its data": lambda net: setattr(
        net.listed[3], "data", net.listed[3].data.as_strided((2, 3), (1, 2))
    ),
    "a view of another": share_with_another,
    "another in the list": lambda net: net.listed.__setitem__(3, randn(2, 3, seed=9)),
    "two exchanged": lambda net: net.listed.__setitem__(
        slice(0, 2), [net.listed[1], net.listed[0]]
    ),
    "one more": lambda net: net.listed.append(randn(3, seed=9)),
    "one less": lambda net: net.named.pop("5"),
    "another name": lambda net: net.named.update(longer=net.named.pop("5")),
    "another attribute": lambda net: setattr(net, "alone", randn(4, seed=9)),
}
# Seen in the first call after gradients were added, or in another mode.
SEEN_AFTER_A_STEP = {
    "through .data": lambda net: net.listed[3].data.mul_(3),
    "by NumPy": lambda net: as_numpy(net.named["7"]).fill(2),
    "one bit, by NumPy": lambda net: as_numpy(net.alone).__setitem__(0, -0.0),
}


@pytest.mark.parametrize("change", SEEN_IN_EACH_CALL.values(), ids=SEEN_IN_EACH_CALL)
def test_change_reaches_each_call(layout, change):
    net = build(Holds)
    with ScatterOnceParallel(net, device_ids=layout, verify=False) as engine:
        for _ in range(2):
            engine(FOUR)
        change(net)
        # The second one is as cheap as before the change.
        for _ in range(2):
            assert_close(engine(FOUR).detach(), net(FOUR).detach(), "output")


class Corrects(Holds):
    """The last replica alone has a negative row."""

    def forward(self, rows):
        if (rows < 0).any():
            self.listed[3].data.mul_(3)
            self.named["7"].data[0] = torch.nan
        return super().forward(rows)


def test_unseen_write_of_one_replica_is_undone(layout):
    """The user's module is the first replica, which has not written: it tells
    nothing.
    """
    net = build(Corrects)
    rows = FOUR.abs()
    with_negative = rows.clone()
    with_negative[-1] *= -1
    with ScatterOnceParallel(net, device_ids=layout, verify=False) as engine:
        for _ in range(2):
            engine(rows)
        engine(with_negative).sum().backward()
        for _ in range(2):
            assert_close(engine(rows).detach(), net(rows).detach(), "output")


class Rebinds(Holds):
    """The last replica alone has a negative row, and rebinds what it reads."""

    rebind = None

    def forward(self, rows):
        outputs = super().forward(rows)
        if (rows < 0).any():
            self.rebind()
        return outputs


def graph_in_place(net):
    net.listed[3].mul_(net.layer.bias.sum())


REBOUND = {
    "other data": SEEN_IN_EACH_CALL["other data"],
    "data of another shape": SEEN_IN_EACH_CALL["data of another shape"],
    "other strides": SEEN_IN_EACH_CALL["other strides of its data"],
    "set_": SEEN_IN_EACH_CALL["set_"],
    "a view of another": share_with_another,
    "the same values elsewhere": lambda net: setattr(
        net.listed[3], "data", net.listed[3].data.clone()
    ),
    "moved, and back at the address": lambda net: (
        net.listed[3].share_memory_(),
        setattr(net.listed[3], "data", torch.full((2, 3), 9.0)),
    ),
    "two with one memory": lambda net: (
        net.listed[2].data.copy_(net.listed[3].data),
        setattr(net.listed[3], "data", net.listed[2].data),
    ),
    "a graph": graph_in_place,
    "requires_grad": lambda net: net.listed[3].requires_grad_(),
    "another in the list": SEEN_IN_EACH_CALL["another in the list"],
    "a parameter with its values elsewhere": lambda net: setattr(
        net.layer.weight, "data", net.layer.weight.data.clone()
    ),
}


@pytest.mark.parametrize("rebind", REBOUND.values(), ids=REBOUND)
def test_what_a_replica_rebinds_is_undone(layout, rebind, monkeypatch):
    net = build(Rebinds)
    monkeypatch.setattr(Rebinds, "rebind", rebind)
    rows = FOUR.abs()
    with_negative = rows.clone()
    with_negative[-1] *= -1
    with ScatterOnceParallel(net, device_ids=layout, verify=False) as engine:
        for _ in range(2):
            engine(rows).sum().backward()
        engine(with_negative).sum().backward()
        for _ in range(2):
            assert_close(engine(rows).detach(), net(rows).detach(), "output")
        with torch.no_grad():  # each tensor of the replica has memory of its own again
            net.listed[2].add_(1)
            net.layer.weight.add_(1)
        assert_close(engine(rows).detach(), net(rows).detach(), "output")


class WritesAndFails(Holds):
    fails = False
    value = None

    def forward(self, rows):
        if self.value is not None:
            self.listed[3].data.fill_(self.value)
        if self.fails:
            self.listed[3].add_(1)
            self.named["7"].zero_()
            raise LookupError("mine")
        return super().forward(rows)


@pytest.mark.parametrize("writer", ["the loop", "forward"])
def test_failed_call_restores_uncounted_writes(layout, writer):
    """The copy of the first replica, which nobody calls, follows such writes."""
    net = build(WritesAndFails)
    with ScatterOnceParallel(net, device_ids=layout, verify=False) as engine:
        for value in (2, 3):
            if writer == "the loop":
                net.listed[3].data.fill_(value)
                as_numpy(net.named["7"]).fill(value)
            else:
                net.value = value
            engine(FOUR).sum().backward()
        net.value = None
        engine(FOUR)
        before = [tensor.clone() for tensor in (net.listed[3], net.named["7"])]
        net.fails = True
        with pytest.raises(LookupError, match="mine"):
            engine(FOUR)
        assert bits(net.listed[3]) == bits(before[0])
        assert bits(net.named["7"]) == bits(before[1])


class ResetsOne(Holds):
    """The second replica alone has a negative row, and fills one with 1."""

    def forward(self, rows):
        if (rows < 0).any():
            self.listed[3].data.fill_(1)
        return super().forward(rows)


def test_unseen_write_of_earlier_values_is_undone(layout):
    """The source's values are known from the last comparison, and have changed since:
    the replica has written what they were.
    """
    net = build(ResetsOne)
    net.listed[3].fill_(1)
    rows = FOUR.abs()
    with_negative = rows.clone()
    with_negative[4] *= -1
    with ScatterOnceParallel(net, device_ids=layout, verify=False) as engine:
        for _ in range(2):
            engine(rows).sum().backward()
        net.listed[3].fill_(2)
        engine(rows).sum().backward()
        engine(with_negative).sum().backward()
        # The user's module is the first replica, which has not written.
        assert_close(engine(rows).detach(), net(rows).detach(), "output")


def test_step_that_fails_hides_no_exchanged_storage(layout):
    """It had found the storage, and failed before it sent the values."""
    net = build(mlp)
    criterion = nn.PReLU(device="meta")
    with ScatterOnceParallel(net, device_ids=layout, verify=False) as engine:
        engine(ROWS).sum().backward()
        engine(ROWS)
        net[0].weight.data = net[0].weight.data * 2
        with pytest.raises(ValueError, match="is on meta"):
            engine.forward_backward(ROWS, None, criterion)
        assert_close(engine(ROWS).detach(), net(ROWS).detach(), "output")


@pytest.mark.parametrize("is_training", [False, True])
def test_module_made_in_inference_mode(is_training):
    """Its tensors count no writes. In training mode the call was refused."""
    with torch.inference_mode():
        net = build(mlp).train(is_training)
    told: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if is_training:  # a look computes gradients, which such tensors cannot have
        told = pytest.warns(UserWarning, match="could not check")
    with ScatterOnceParallel(net, 1, ["cpu:0", "cpu:1"]) as engine, told:
        for _ in range(3):
            with torch.inference_mode():
                assert_close(engine(ROWS), net(ROWS), "output")
                for parameter in net.parameters():
                    parameter.mul_(1.1)


def test_freezing_is_followed_in_inference_mode(layout):
    """Copies stayed connected there, and torch let nobody freeze them."""
    net = build(mlp)
    with ScatterOnceParallel(net, device_ids=layout, verify=False) as engine:
        engine(ROWS).sum().backward()
        net[0].requires_grad_(False)
        with torch.inference_mode():
            assert_close(engine(ROWS), net(ROWS), "output")
        engine(ROWS).sum().backward()
        assert net[0].weight.grad is not None  # that of the first backward pass


class Factors(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.first = self.second = self.third = 1.0

    def forward(self, rows):
        return self.linear(rows) * self.first * self.second**2 * self.third**3


def test_attribute_set_after_others_moved(layout):
    """One that is deleted and set again is the last. Another one was changed instead,
    silently.
    """
    net = build(Factors)
    rows = randn(6, 4)
    with ScatterOnceParallel(net, device_ids=layout) as engine:
        engine(rows)
        del net.first
        net.first = 1.0
        engine(rows)
        net.third = 3.0
        assert_close(engine(rows).detach(), net(rows).detach(), "output")
        net.second = 0.5
        assert_close(engine(rows).detach(), net(rows).detach(), "output")


class Tied(nn.Module):
    """Buffers in the memory of weights; torch counts writes of each separately."""

    fails = False

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(randn(4, seed=n) for n in range(NUM_SMALL))
        for number, weight in enumerate(self.weights):
            self.register_buffer(f"tied{number}", weight.data)

    def forward(self, rows):
        if self.fails:
            for buffer in self.buffers():
                buffer.add_(1)
            raise LookupError("mine")
        for weight, buffer in zip(self.weights, self.buffers(), strict=True):
            rows = rows * weight + buffer
        return rows


def test_buffers_in_memory_of_weights_follow_them(layout):
    """A write of the weights is no write of the buffers, as torch counts it."""
    net = build(Tied)
    with ScatterOnceParallel(net, device_ids=layout, verify=False) as engine:
        engine(FOUR).sum().backward()
        engine(FOUR)
        with torch.no_grad():
            for weight in net.weights:
                weight.mul_(0.5)
        # No backward pass came before this call, so it reads no values.
        assert_close(engine(FOUR).detach(), net(FOUR).detach(), "output")
        for _ in range(2):
            engine(FOUR).sum().backward()
            assert_close(engine(FOUR).detach(), net(FOUR).detach(), "output")
        before = [weight.detach().clone() for weight in net.weights]
        net.fails = True
        with pytest.raises(LookupError, match="mine"):
            engine(FOUR)
        assert all(map(torch.equal, net.weights, before))


def test_owned_weights_reach_buffers_in_their_memory():
    """An owner's update is no counted write of a buffer in the weight's memory."""
    net = build(Tied)
    with ScatterOnceParallel(
        net, device_ids=["cpu:0", "cpu:1"], verify=False
    ) as engine:
        optimizer = ShardedOptimizer(engine, torch.optim.SGD, lr=0.1)
        for _ in range(4):
            assert_close(engine(FOUR).detach(), net(FOUR).detach(), "output")
            engine(FOUR).sum().backward()
            for weight in net.weights:
                weight.grad.fill_(1)  # a product's own would overflow
            optimizer.step()


def bits(tensor):
    return as_bytes(tensor).tolist()


def flip(tensor):
    """Write one bit of the last element, past torch's counter."""
    flipped = as_bytes(tensor).clone()
    flipped[-1] ^= 128
    tensor.data.copy_(flipped.view(tensor.dtype).view(tensor.shape))


# Two of a kind are read together.
KINDS = {
    "floats": lambda: randn(2, 3, dtype=torch.float32),
    "NaN": lambda: torch.full((3,), torch.nan),
    "zeros": lambda: torch.zeros(3),
    "without dimensions": lambda: torch.tensor(7.0),
    "half": lambda: torch.ones(3, dtype=torch.float16),
    "bytes": lambda: torch.arange(5, dtype=torch.uint8),
    "numbers": lambda: torch.arange(4),
    "complex": lambda: torch.full((3,), 1 + 2j),
    "conjugated": lambda: torch.full((3,), 1 + 2j).conj(),
    "negated": lambda: torch.full((3,), 1 + 2j).conj().imag,
    "channels last": lambda: randn(2, 3, 2, 2).to(memory_format=torch.channels_last),
    "transposed": lambda: randn(3, 2).T,
    "expanded": lambda: torch.ones(3).expand(2, 3),
    "empty": lambda: torch.empty(0, 3),
}


found = []  # what each replica has read, in each call


class OfManyKinds(nn.Module):
    """The last replica alone has a negative row, and writes all of them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.kept = [make() for make in KINDS.values() for _ in range(2)]
        table = randn(2, 3)
        self.kept += [table, table[0], table[1]]

    def forward(self, rows):
        found.append([bits(tensor) for tensor in self.kept])
        if (rows < 0).any():
            for tensor in self.kept:
                if tensor.numel():
                    flip(tensor)
        return self.layer(rows)


def test_each_kind_has_the_sources_bits_again(layout):
    net = build(OfManyKinds)
    expected = [bits(tensor) for tensor in net.kept]
    rows = FOUR.abs()
    with_negative = rows.clone()
    with_negative[-1] *= -1
    with ScatterOnceParallel(net, device_ids=layout, verify=False) as engine:
        for batch in (rows, with_negative, rows):
            found.clear()
            engine(batch).sum().backward()
    assert found == [expected] * len(layout)


@pytest.mark.parametrize("ends", ["a backward pass", "another mode"])
@pytest.mark.parametrize("change", SEEN_AFTER_A_STEP.values(), ids=SEEN_AFTER_A_STEP)
def test_unseen_change_reaches_next_step(layout, change, ends):
    net = build(Holds)
    with ScatterOnceParallel(net, device_ids=layout, verify=False) as engine:
        for _ in range(2):
            output = engine(FOUR)
        if ends == "another mode":
            net.eval()
        else:
            output.sum().backward()
        change(net)
        assert_close(engine(FOUR).detach(), net(FOUR).detach(), "output")


def test_small_tensor_trained_later_gets_its_grad(layout):
    net = build(Holds)
    plain = copy.deepcopy(net)
    with ScatterOnceParallel(net, device_ids=layout, verify=False) as engine:
        for number in 3, 5:
            for _ in range(2):
                engine(FOUR)
            for model in net, plain:
                model.listed[number].requires_grad_()
            engine(FOUR).sum().backward()
            plain(FOUR).sum().backward()
            assert_close(net.listed[number].grad, plain.listed[number].grad, "grad")
        net.listed[3].requires_grad_(False)
        net.zero_grad()
        assert_close(engine(FOUR).detach(), net(FOUR).detach(), "output")


def freezes_in_between(engine, net):
    output = engine(FOUR)
    net.listed[3].requires_grad_(False)
    output.sum().backward()


def freezes_with_another_container(engine, net):
    net.listed[3].requires_grad_(False)
    net.more = [1.0]
    engine(FOUR)


@pytest.mark.parametrize("freeze", [freezes_in_between, freezes_with_another_container])
def test_small_tensor_trained_again_gets_its_grad(layout, freeze):
    """All is as it was once, but not as the replicas have followed it last."""
    net = build(Holds)
    net.listed[3].requires_grad_()
    plain = copy.deepcopy(net)
    with ScatterOnceParallel(net, device_ids=layout, verify=False) as engine:
        for _ in range(3):
            engine(FOUR)
        freeze(engine, net)
        net.listed[3].requires_grad_()
        net.listed[3].grad = None
        engine(FOUR).sum().backward()
        plain(FOUR).sum().backward()
        assert_close(net.listed[3].grad, plain.listed[3].grad, "grad")


def test_forward_writes_of_replicas_are_undone(layout):
    """A replica's own write is not the user's: its next call begins as the first's."""

    class Writes(Holds):
        def forward(self, rows):
            output = super().forward(rows)
            with torch.no_grad():
                self.listed[3].add_(rows.sum())
            return output

    net = build(Writes)
    with ScatterOnceParallel(net, device_ids=layout, verify=False) as engine:
        for _ in range(3):
            held = [tensor.clone() for tensor in net.listed]
            output = engine(FOUR).detach()
            plain = copy.deepcopy(net)
            plain.listed = held
            assert_close(output, plain(FOUR).detach(), "output")


# --- what looks up to date, and is not ---


@pytest.fixture(params=[["cpu"] * 2, ["cpu:0", "cpu:1"]], ids="+".join)
def two(request):
    return request.param


# --- backward passes that add no gradient to a parameter ---


def of_weight(engine, net):
    torch.autograd.grad(engine(ROWS).sum(), net[0].weight)


def of_rows(engine, net):
    rows = ROWS.clone().requires_grad_()
    engine(rows).sum().backward(inputs=[rows])


def of_selected_weight(engine, net):
    engine(ROWS).sum().backward(inputs=[net[0].weight])


def that_fails(engine, net):
    def fail(gradient):
        raise LookupError("mine")

    hook = net[0].weight.register_hook(fail)
    with pytest.raises(LookupError, match="mine"):
        engine(ROWS).sum().backward()
    hook.remove()


PASSES = [of_weight, of_rows, of_selected_weight, that_fails]


@pytest.mark.parametrize("run_pass", PASSES)
def test_write_after_backward_pass_is_seen(two, run_pass):
    net = build(mlp)
    with ScatterOnceParallel(net, device_ids=two, verify=False) as engine:
        for _ in range(3):
            run_pass(engine, net)
            net[0].weight.data.mul_(2)
            assert_close(engine(ROWS).detach(), net(ROWS).detach(), "output")


# --- a copy that fails ---


def in_another_mode(net):
    net[0].weight.data.mul_(2)
    net.eval()


def exchanged(net):
    net[0].weight.data = 2 * net[0].weight.data


def after_a_count(net):
    with torch.no_grad():
        net[0].weight.mul_(2)


@pytest.mark.parametrize("change", [in_another_mode, exchanged, after_a_count])
@pytest.mark.parametrize(
    "place",
    [(Transfers, "copy_into"), (Transfers, "copy"), (Replica, "reset_written")],
    ids=["one", "many", "buffers"],
)
def test_values_reach_call_after_failed_one(two, change, place, monkeypatch):
    def fail(*args, **kwargs):
        raise LookupError("mine")

    net = build(mlp)
    owner, method = place
    with ScatterOnceParallel(net, device_ids=two, verify=False) as engine:
        engine(ROWS)
        change(net)
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, fail)
            # Of the cases some copy nothing in this way.
            with contextlib.suppress(LookupError):
                engine(ROWS)
        assert_close(engine(ROWS).detach(), net(ROWS).detach(), "output")


# --- a buffer that an earlier graph has saved ---


class Scales(nn.Module):
    """Writes a buffer with its rows, if it ``writes``, and multiplies by it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.register_buffer("scale", torch.ones(()))
        self.writes = True

    def forward(self, rows):
        if self.writes:
            self.scale.copy_(rows.detach().abs().mean())
        return self.weight * self.scale * rows


def without_writing(engine, net):
    net.writes = False
    engine(ROWS)


def in_eval_mode(engine, net):
    net.writes = False
    net.eval()
    engine(ROWS)


def after_the_users_write(engine, net):
    net.writes = False
    net.scale.fill_(3)
    engine(ROWS)


def writing_again(engine, net):
    engine(ROWS + 1)


def without_graph(engine, net):
    net.writes = False
    net.eval()
    with torch.no_grad():
        engine(ROWS[:5])


def in_inference_mode(engine, net):
    net.writes = False
    net.eval()
    with torch.inference_mode():
        engine(ROWS[:5])


def by_map(engine, net):
    net.writes = False
    net.eval()
    engine.map(lambda replica, rows: replica(rows), ROWS[:5])


def after_the_users_write_without_graph(engine, net):
    net.scale.fill_(3)
    without_graph(engine, net)


WITHOUT_GRAPH = [without_graph, in_inference_mode, by_map]
CALLS = [without_writing, in_eval_mode, after_the_users_write, writing_again]


@pytest.mark.parametrize(
    "call", [*CALLS, *WITHOUT_GRAPH, after_the_users_write_without_graph]
)
def test_graph_of_overwritten_buffer_is_refused(two, call):
    """As torch refuses it on one device, if the module has written the buffer there."""
    net = build(Scales)
    with ScatterOnceParallel(net, device_ids=two, verify=False) as engine:
        output = engine(ROWS)
        call(engine, net)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


@pytest.mark.parametrize("call", [without_writing, in_eval_mode, *WITHOUT_GRAPH])
def test_graph_of_unchanged_buffer_stays_valid(two, call):
    net = build(Scales)
    net.writes = False
    with ScatterOnceParallel(net, device_ids=two, verify=False) as engine:
        engine(ROWS).sum().backward()
        expected, net.weight.grad = net.weight.grad, None
        output = engine(ROWS)
        call(engine, net)
        output.sum().backward()
        assert_close(net.weight.grad, expected, "gradient")


@pytest.mark.parametrize("call", WITHOUT_GRAPH)
def test_graph_of_running_statistics_stays_valid(two, call):
    """An evaluation between the call and its backward pass writes none of them."""
    gradients = []
    for is_called in (False, True):
        net = build(lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))).eval()
        net.writes = False  # as the call sets it, or replicas would be made again
        with ScatterOnceParallel(net, device_ids=two) as engine:
            output = engine(ROWS)
            if is_called:
                call(engine, net)
            output.square().sum().backward()
        gradients.append(net[0].weight.grad)
    assert_close(*gradients, "gradient")


class Counts(Scales):
    """All replicas write the same values."""

    def forward(self, rows):
        if self.writes:
            self.scale.add_(1)
        return self.weight * self.scale * rows


@pytest.mark.parametrize("call", [without_writing, in_eval_mode])
def test_graph_of_equally_written_buffer_is_valid(two, call):
    net = build(Counts)
    with ScatterOnceParallel(net, device_ids=two, verify=False) as engine:
        output = engine(ROWS)
        call(engine, net)
        output.sum().backward()
        assert_close(net.weight.grad, 2 * ROWS.sum(0), "gradient")
