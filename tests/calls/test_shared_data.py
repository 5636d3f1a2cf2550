"""Data that calls leave: replicas share it between calls, and copy it for a step."""

from harness.oracle import build, randn
from torch import nn

from calls.programs import Own, mlp
from scatterpar import ScatterOnceParallel

ROWS = randn(7, 6)


def engine_of(forward, **parts):
    net = build(lambda: Own(forward, net=mlp(), **parts))
    engine = ScatterOnceParallel(net, device_ids=["cpu:0", "cpu:1"], verify=False)
    return engine, engine._replicas.of_model


def leaves_data(self, rows):
    self.hidden = self.net[0](rows).detach()
    self.log.append(len(rows))
    return self.net(rows)


def test_calls_share_data_and_build_replicas_once():
    engine, replica_set = engine_of(leaves_data, log=[])
    for _ in range(3):
        engine(ROWS)
        assert replica_set.lacks_data
        for replica in replica_set.replicas:
            assert replica.root.hidden is engine.module.hidden
            assert replica.root.log == engine.module.log
    assert replica_set.builds == 1


def test_step_has_copies_of_what_a_call_has_left():
    engine, replica_set = engine_of(leaves_data, log=[])
    engine(ROWS)
    engine.forward_backward(ROWS, criterion=lambda output, _: output.mean())
    assert not replica_set.lacks_data
    assert replica_set.builds == 2
    first, second = (replica.root for replica in replica_set.replicas)
    assert first.log is not second.log is not engine.module.log


def test_new_module_is_no_data():
    """The next call makes replicas of it."""

    def forward(self, rows):
        self.activation = nn.ReLU()
        return self.activation(self.net(rows))

    engine, replica_set = engine_of(forward)
    engine(ROWS)
    assert not replica_set.lacks_data
    engine(ROWS)
    assert replica_set.builds == 2


def test_changed_number_is_no_data():
    """It is copied to the replicas that there are."""

    def forward(self, rows):
        self.number = len(rows)
        return self.net(rows)

    engine, replica_set = engine_of(forward, number=0)
    engine(ROWS)
    assert not replica_set.lacks_data
    engine(ROWS)
    assert replica_set.builds == 1
