"""A backward pass inside of a call that reaches a parameter is refused."""

import pytest
import torch
from harness.oracle import build, randn

from calls.programs import Own, mlp
from scatterpar import ScatterOnceParallel

ROWS = randn(7, 6)


@pytest.mark.parametrize("has_gradient", [True, False])
@pytest.mark.parametrize("layout", [["cpu"] * 2, ["cpu:0", "cpu:1"]], ids="+".join)
def test_backward_in_forward_changes_nothing(layout, has_gradient):
    def forward(self, rows):
        self.net(rows.detach()).square().mean().backward()
        return self.net(rows)

    net = build(lambda: Own(forward, net=mlp()))
    weight = net.net[0].weight
    weight.grad = torch.ones_like(weight) if has_gradient else None
    with ScatterOnceParallel(net, device_ids=layout, verify=False) as engine:
        for _ in range(2):
            with pytest.raises(ValueError, match=r"backward\(\) inside.*'net\.0\."):
                engine(ROWS)
    if has_gradient:
        assert torch.equal(weight.grad, torch.ones_like(weight))
    else:
        assert weight.grad is None
