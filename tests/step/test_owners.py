"""Large gradients are added on all devices, with the bits of the tree.

Messages are of a few bytes here, so that small models are large.
"""

from __future__ import annotations

import pytest
import torch
from harness.models import CLASSES, FEATURES, mlp
from harness.oracle import assert_step, randint, randn
from torch import nn

from scatterpar import ScatterOnceParallel
from scatterpar.devices import coalescing, pieces
from scatterpar.devices.transfers import Transfers
from scatterpar.step import owners
from scatterpar.step.owners import add_by_owners
from scatterpar.step.reduce import sum_in_order

pytestmark = pytest.mark.draws
BATCH = randn(16, FEATURES), randint(CLASSES, 16)
CRITERION = nn.CrossEntropyLoss()


@pytest.fixture
def large(monkeypatch):
    """What is copied is large, and pieces are small."""
    monkeypatch.setattr(pieces, "BYTES_PER_DEVICE", 8)
    monkeypatch.setattr(coalescing, "CHUNK_BYTES", 1024)


def gradients(count, dtype=torch.float32):
    """Per replica: gradients of several sizes and layouts, whose sums round."""
    by_replica = []
    for number in range(count):
        scale = 10.0 ** (3 * (number % 3))
        shapes = {0: (3, 50), 1: (7,), 2: (2, 3, 4, 5), 3: (), 4: (600,)}
        of_replica = {
            index: (scale * randn(1, *shape, seed=10 * number + index)[0]).to(dtype)
            for index, shape in shapes.items()
        }
        of_replica[2] = of_replica[2].to(memory_format=torch.channels_last)
        by_replica.append(of_replica)
    return by_replica


def copies(by_replica):
    return [{index: g.clone() for index, g in g_s.items()} for g_s in by_replica]


def devices_of(layout):
    return [torch.device("cpu", int(digit)) for digit in layout]


def sums(by_replica, layout, transfers=None):
    transfers = transfers or Transfers()
    return sum_in_order(
        copies(by_replica), devices_of(layout), transfers, in_place=True
    )


def bits(tensor):
    return tensor.reshape(-1).view(torch.uint8)


LAYOUTS = ["012", "0123", "01234", "012345", "0123456", "01234567"]
LAYOUTS += ["001122", "00112233", "00112", "0000111122223"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


@pytest.mark.contract
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_have_the_bits_of_the_tree(layout, dtype, large, monkeypatch):
    by_replica = gradients(len(layout), dtype)
    by_owners = sums(by_replica, layout)
    monkeypatch.setattr(owners, "needs_pieces", lambda *_: False)
    by_tree = sums(by_replica, layout)
    on_one = sums(by_replica, "0" * len(layout))
    assert by_owners.keys() == by_tree.keys()
    for index, total in by_tree.items():
        assert by_owners[index].stride() == total.stride()
        assert torch.equal(bits(by_owners[index]), bits(total))
        assert torch.equal(bits(on_one[index]), bits(total))


def test_order_is_the_tree_not_another(large):
    """(0 + 1) + (2 + 3) is 0: in float32 1e8 + 1 is 1e8."""
    by_replica = [{0: torch.full((64,), v)} for v in (1e8, 1.0, -1e8, 1.0)]
    assert not sums(by_replica, "0123")[0].any()
    by_replica = [{0: torch.full((64,), v)} for v in (1e8, -1e8, 1.0, 1.0)]
    assert sums(by_replica, "0123")[0].eq(2).all()


@pytest.mark.parametrize(
    ("layout", "crossings"),
    [("01", 1), ("012", 3), ("01234567", 8), ("00112233", 4), ("010101", 3)],
)
def test_bytes_of_all_gradients(layout, crossings, large):
    """Those of the other devices, and the master's own, once each; where owners do not
    help, as the tree.
    """
    transfers = Transfers()
    by_replica = gradients(len(layout))
    size = sum(g.nbytes for g in by_replica[0].values())
    sums(by_replica, layout, transfers)
    assert transfers.bytes["reduce"] == crossings * size


def test_no_link_carries_more_than_all_gradients(large, monkeypatch):
    """In each direction of each device. In the tree the first gets them three times."""
    sent = dict.fromkeys(range(8), 0)
    got = dict.fromkeys(range(8), 0)
    copy = owners.Lanes.send

    def counted(lanes, source, sender, target, receiver):
        sent[sender.index] += source.nbytes
        got[receiver.index] += source.nbytes
        copy(lanes, source, sender, target, receiver)

    monkeypatch.setattr(owners.Lanes, "send", counted)
    by_replica = [{0: torch.ones(7 * 64)} for _ in range(8)]
    sums(by_replica, "01234567")
    size = by_replica[0][0].nbytes
    assert set(sent.values()) == {size}
    assert set(got.values()) == {size}


def test_others_are_added_by_the_tree(large):
    """Sparse, transposed, of one replica alone, and of other strides or dtypes."""
    by_replica = gradients(3)
    for number, of_replica in enumerate(by_replica):
        of_replica[5] = randn(4, 3, seed=number).to_sparse()
        of_replica[6] = randn(4, 3, seed=number).T
        if number:
            of_replica[7] = randn(40, seed=number)
        turned = randn(4, 3, seed=number)
        of_replica[8] = turned.T.contiguous().T if number == 1 else turned
    expected = sums(by_replica, "000")
    found = sums(by_replica, "012")
    assert found.keys() == expected.keys()
    for index, total in expected.items():
        assert found[index].layout == total.layout
        assert torch.equal(found[index].to_dense(), total.to_dense())


def test_small_gradients_are_left_to_the_tree():
    by_replica = gradients(4)
    assert add_by_owners(by_replica, devices_of("0123"), Transfers()) == {}
    assert all(len(of_replica) == 5 for of_replica in by_replica)


def test_failed_sum_leaves_gradients_of_users(large, monkeypatch):
    model = mlp()
    model(BATCH[0]).sum().backward()
    before = [p.grad.clone() for p in model.parameters()]
    with ScatterOnceParallel(model, 1, devices_of("0123"), verify=False) as engine:
        with monkeypatch.context() as context:

            def failing(*_):
                raise OSError("device lost")

            context.setattr(owners._Device, "send_sum", failing)
            with pytest.raises(OSError, match="device lost"):
                engine.forward_backward(*BATCH, CRITERION)
        assert all(map(torch.equal, before, (p.grad for p in model.parameters())))
        for parameter in model.parameters():
            parameter.grad = None
        assert_step(engine, *BATCH, CRITERION)


@pytest.mark.contract
@pytest.mark.parametrize("layout", ["01234", "00112233"])
def test_steps_equal_plain_torch(layout, large):
    """Parameters go along the chain, and gradients back by owners."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    size = sum(p.nbytes for p in model.parameters())
    others = len(set(layout)) - 1
    with ScatterOnceParallel(model, 2, devices_of(layout)) as engine:
        for _ in range(3):
            optimizer.zero_grad()
            assert_step(engine, *BATCH, CRITERION)
            assert engine.last_step.bytes["replicate"] == others * size
            assert engine.last_step.bytes["reduce"] == (others + 1) * size
            optimizer.step()
