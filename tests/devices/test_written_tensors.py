"""Which tensors a call has written, and how that is known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from scatterpar.devices.written_tensors import WrittenTensors

pytestmark = pytest.mark.core

NAN = float("nan")


def nothing(tensor):
    pass


def read(tensor):
    tensor.sum().item()


def in_place(tensor):
    tensor.add_(1)


def through_data(tensor):
    tensor.data.add_(1)


def through_numpy(tensor):
    tensor.detach().numpy()[0] += 1


def same_values(tensor):
    tensor.copy_(tensor.clone())


def not_a_number(tensor):
    tensor.data[0] = NAN


def sign_of_zero(tensor):
    tensor.data[0] = -0.0


def another_storage(tensor):
    tensor.set_(torch.full_like(tensor, 3.0))


def data_exchanged(tensor):
    tensor.data = tensor.data.clone()


# Who notices that the middle one of three tensors is written.
WRITES = {
    nothing: set(),
    read: set(),
    in_place: {"counted", "differing"},
    through_data: {"differing"},
    through_numpy: {"differing"},
    same_values: {"counted"},
    not_a_number: {"differing"},
    sign_of_zero: {"differing"},
    another_storage: {"exchanged", "differing"},
    data_exchanged: {"exchanged"},
}


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
@pytest.mark.parametrize("compares_bits", [True, False], ids=["bits", "no bits"])
def test_write_is_found_by(write, compares_bits):
    tensors = [torch.zeros(4), torch.zeros(4), torch.zeros(0)]
    watched = WrittenTensors(tensors, stored_as=list(map(Tensor.detach, tensors)))
    watched.begin(compares_bits=compares_bits)
    write(tensors[1])
    expected = WRITES[write] if compares_bits else WRITES[write] - {"differing"}
    found = watched.written()._asdict()
    assert {kind: {1} for kind in expected} == {k: v for k, v in found.items() if v}


def test_each_call_begins_anew():
    tensor = torch.full((3,), NAN)  # equal to itself
    watched = WrittenTensors([tensor])
    watched.begin(compares_bits=True)
    tensor.add_(1)
    assert watched.written().counted == {0}
    watched.begin(compares_bits=True)
    assert not any(watched.written())
    watched.begin(compares_bits=False)
    tensor.data.zero_()
    assert not any(watched.written())


def test_no_tensors_are_not_written():
    watched = WrittenTensors([], stored_as=[])
    watched.begin(compares_bits=True)
    assert not any(watched.written())
