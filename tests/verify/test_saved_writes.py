"""Parameters that a call writes are as before; their values were saved in time."""

import pytest
import torch
from torch import nn

from scatterpar.verify.saved_writes import SavedWrites

WRITES = {
    "in place": lambda p: p.mul_(2),
    "through data": lambda p: p.data.add_(1),
    "a part": lambda p: p[0].fill_(7),
    "in one kernel": lambda p: torch._foreach_mul_([torch.zeros(1), p], 3.0),
    "an output": lambda p: torch.add(p, 1, out=p),
    "drawn": lambda p: nn.init.normal_(p),
    "twice": lambda p: (p.add_(1), p.mul_(5)),
}


@pytest.mark.draws
@pytest.mark.parametrize("name", WRITES)
def test_written_parameter_is_restored(name):
    parameters = [nn.Parameter(torch.arange(4.0), requires_grad=False), torch.ones(4)]
    noted = []
    saved_writes = SavedWrites(parameters, noted.append)
    for _ in range(2):  # two calls of a look
        with saved_writes.watching(), torch.no_grad():
            WRITES[name](parameters[0])
        assert parameters[0].tolist() != [0, 1, 2, 3]
        saved_writes.restore()
        assert parameters[0].tolist() == [0, 1, 2, 3]
    assert [each is parameters[0] for each in noted] == [True]


def test_copies_of_replicas_in_one_memory_are_noted():
    parameter = nn.Parameter(torch.zeros(3), requires_grad=False)
    of_replica = nn.Parameter(parameter.detach(), requires_grad=False)
    noted = []
    saved_writes = SavedWrites([parameter, of_replica], noted.append)
    with saved_writes.watching():
        of_replica.add_(1)
    saved_writes.restore()
    assert not parameter.any()
    assert [*map(id, noted)] == [id(parameter), id(of_replica)]


def test_calls_that_only_read_save_nothing():
    parameter = nn.Parameter(torch.ones(3))
    noted = []
    saved_writes = SavedWrites([parameter], noted.append)
    with saved_writes.watching():
        (parameter * torch.ones(3).mul_(2)).sum().backward()
    assert not noted
    assert parameter.grad.tolist() == [2, 2, 2]
