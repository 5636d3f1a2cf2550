"""Replicas follow the module in every call; parameters are sent when they change."""

import pytest
import torch
from harness.oracle import assert_close, build, randn
from torch import nn

from calls.programs import mlp
from scatterpar import ScatterOnceParallel

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
            assert torch.equal(net(ROWS), engine(ROWS))
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
