import torch
from harness.oracle import randn

from scatterpar.calls.copies_in_graph import AutogradTransfers

DEVICE, HOME = torch.device("cpu:1"), torch.device("cpu:0")


def test_gradient_of_a_copy_is_copied_back():
    transfers = AutogradTransfers()
    tensor = randn(3).requires_grad_()
    copied = transfers.copy(tensor, DEVICE, "scatter", HOME)
    assert transfers.bytes["scatter"] == tensor.nbytes
    (gradient,) = torch.autograd.grad(copied.pow(3).sum(), tensor, create_graph=True)
    gradient.sum().backward()
    torch.testing.assert_close(tensor.grad, 6 * tensor.detach())


def test_copy_without_a_graph_has_none():
    copied = AutogradTransfers().copy(randn(3), DEVICE, "scatter", HOME)
    assert not copied.requires_grad
