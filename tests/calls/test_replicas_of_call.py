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
