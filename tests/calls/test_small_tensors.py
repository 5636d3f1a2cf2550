"""Thousands of small tensors in containers: each way to change one reaches a call.

They are read together, and not in each call with their values. So whatever is read less
often has an entry here.
"""

import copy

import pytest
import torch
from harness.oracle import assert_close, build, randn
from torch import nn

from scatterpar import ScatterOnceParallel

ROWS = randn(7, 4)
LAYOUTS = [["cpu"] * 2, ["cpu:0", "cpu:1", "cpu:0"]]
NUMBER = 40


@pytest.fixture(params=LAYOUTS, ids="+".join)
def layout(request):
    return request.param


class Holds(nn.Module):
    """Its output depends on values, order and shape of each tensor."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.listed = [randn(2, 3, seed=number) for number in range(NUMBER)]
        self.named = {str(n): randn(4, seed=n) for n in range(NUMBER)}
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
            engine(ROWS)
        change(net)
        # The second one is as cheap as before the change.
        for _ in range(2):
            assert_close(engine(ROWS).detach(), net(ROWS).detach(), "output")


@pytest.mark.parametrize("ends", ["a backward pass", "another mode"])
@pytest.mark.parametrize("change", SEEN_AFTER_A_STEP.values(), ids=SEEN_AFTER_A_STEP)
def test_change_without_version_reaches_next_step(layout, change, ends):
    net = build(Holds)
    with ScatterOnceParallel(net, device_ids=layout, verify=False) as engine:
        for _ in range(2):
            output = engine(ROWS)
        if ends == "another mode":
            net.eval()
        else:
            output.sum().backward()
        change(net)
        assert_close(engine(ROWS).detach(), net(ROWS).detach(), "output")


def test_one_that_is_trained_later_gets_its_gradient(layout):
    net = build(Holds)
    plain = copy.deepcopy(net)
    with ScatterOnceParallel(net, device_ids=layout, verify=False) as engine:
        for number in 3, 5:
            for _ in range(2):
                engine(ROWS)
            for model in net, plain:
                model.listed[number].requires_grad_()
            engine(ROWS).sum().backward()
            plain(ROWS).sum().backward()
            assert_close(net.listed[number].grad, plain.listed[number].grad, "grad")
        net.listed[3].requires_grad_(False)
        net.zero_grad()
        assert_close(engine(ROWS).detach(), net(ROWS).detach(), "output")


def freezes_in_between(engine, net):
    output = engine(ROWS)
    net.listed[3].requires_grad_(False)
    output.sum().backward()


def freezes_with_another_container(engine, net):
    net.listed[3].requires_grad_(False)
    net.more = [1.0]
    engine(ROWS)


@pytest.mark.parametrize("freeze", [freezes_in_between, freezes_with_another_container])
def test_one_that_is_trained_again_gets_its_gradient(layout, freeze):
    """All is as it was once, but not as the replicas have followed it last."""
    net = build(Holds)
    net.listed[3].requires_grad_()
    plain = copy.deepcopy(net)
    with ScatterOnceParallel(net, device_ids=layout, verify=False) as engine:
        for _ in range(3):
            engine(ROWS)
        freeze(engine, net)
        net.listed[3].requires_grad_()
        net.listed[3].grad = None
        engine(ROWS).sum().backward()
        plain(ROWS).sum().backward()
        assert_close(net.listed[3].grad, plain.listed[3].grad, "grad")


def test_replicas_follow_the_first_one_in_what_forward_writes(layout):
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
            output = engine(ROWS).detach()
            plain = copy.deepcopy(net)
            plain.listed = held
            assert_close(output, plain(ROWS).detach(), "output")
