"""Data that calls leave: replicas share it between calls, and copy it for a step."""

import contextlib
import copy
import gc
import weakref

import pytest
import torch
from harness.oracle import assert_close, build, randn
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


def counts_in_list(self, rows):
    if self.made is None:
        self.made = []
    self.made.append(len(rows))
    return self.net(rows)


def counts_in_nested_list(self, rows):
    if self.made is None:
        self.made = {"sizes": []}
    self.made["sizes"].append(len(rows))
    return self.net(rows)


def sums_in_place(self, rows):
    if self.made is None:
        self.made = torch.zeros(6, dtype=rows.dtype)
    self.made += rows.detach().sum(0)
    return self.net(rows)


MADE = [counts_in_list, counts_in_nested_list, sums_in_place]
made_by = pytest.mark.parametrize("forward", MADE, ids=lambda f: f.__name__)


def contents_of(made):
    if isinstance(made, torch.Tensor):
        return made.tolist()
    return list(made["sizes"]) if isinstance(made, dict) else list(made)


@pytest.mark.parametrize("layout", [["cpu"] * 2, ["cpu:0", "cpu:1"]], ids="+".join)
@made_by
def test_first_call_makes_what_one_replica_writes(forward, layout):
    """Replicas wrote into the user's list, and both at once into the user's tensor."""
    net = build(lambda: Own(forward, net=mlp(), made=None))
    with ScatterOnceParallel(net, device_ids=layout, verify=False) as engine:
        for _ in range(5):
            engine(ROWS)
    alone = build(lambda: Own(forward, net=mlp(), made=None))
    for _ in range(5):
        alone(ROWS[:4])
    assert contents_of(net.made) == contents_of(alone.made)


@made_by
def test_what_loop_writes_reaches_replicas(forward):
    engine, replica_set = engine_of(forward, made=None)
    engine(ROWS)
    made = engine.module.made
    if isinstance(made, torch.Tensor):
        made.zero_()
    else:
        (made["sizes"] if isinstance(made, dict) else made).clear()
    engine(ROWS)
    assert replica_set.builds == 2
    # Numbers are those of the first replica.
    expected = [4] if forward is not sums_in_place else ROWS[4:].sum(0).tolist()
    assert contents_of(replica_set.replicas[1].root.made) == expected


@pytest.mark.parametrize("name", ["log", "features", "rows"])
def test_list_that_loop_clears_needs_no_new_replicas(name):
    def forward(self, rows):
        output = self.net(rows)
        left = {"log": len(rows), "features": output.mean(), "rows": output}
        self.left.append(left[name].detach() if name != "log" else left[name])
        return output

    engine, replica_set = engine_of(forward, left=[])
    for _ in range(4):
        engine.module.left.clear()
        engine(ROWS)
        assert len(engine.module.left) == 1
        assert len(replica_set.replicas[1].root.left) == 1
    assert replica_set.builds == 1


def test_entries_that_move_are_those_of_first_replica():
    """The oldest goes, as from a queue."""

    def forward(self, rows):
        self.left.append(rows.sum(0))
        return self.net(rows)

    engine, replica_set = engine_of(forward, left=[])
    for _ in range(3):
        engine(ROWS)
    engine.module.left.pop(0)
    engine(ROWS)
    assert replica_set.builds == 1
    for left in (engine.module.left, replica_set.replicas[1].root.left):
        assert len(left) == 3
        for entry in left:
            assert_close(entry, ROWS[:4].sum(0), "an entry")


def test_removed_tensor_frees_its_copies():
    """A tensor that the replicas were made with."""
    engine, replica_set = engine_of(lambda self, rows: self.net(rows), bank=[ROWS])
    engine(ROWS)
    engine.module.bank.clear()
    engine(ROWS)
    assert replica_set.builds == 2


def test_replica_without_rows_gets_copy_of_its_own():
    """Of a batch of one row only the first replica makes a mask."""

    def forward(self, rows):
        if self.mask is None:
            self.mask = torch.ones(3, dtype=rows.dtype)
        return self.net(rows) * self.mask

    engine, replica_set = engine_of(forward, mask=None)
    engine(ROWS[:1])
    mask = replica_set.replicas[1].root.mask
    assert mask is not engine.module.mask
    assert torch.equal(mask, engine.module.mask)


def moving_mean(self, rows):
    if self.training:
        self.mean = 0.5 * self.mean + rows.detach().mean(0)
    return self.net(rows - self.mean)


def mean_of_first_rows(self, rows):
    if self.mean is None:
        self.mean = rows.detach().mean(0)
    return self.net(rows - self.mean)


def moving_mean_in_dict(self, rows):
    if self.training:
        before = self.left.get("mean", torch.zeros(6, dtype=rows.dtype))
        self.left["mean"] = 0.5 * before + rows.detach().mean(0)
    return self.net(rows - self.left["mean"])


def means_written_in_place(self, rows):
    """Each call leaves one, and writes those of earlier calls."""
    if self.training:
        for mean in self.left["means"]:
            mean += rows.detach().mean(0)
        self.left["means"].append(rows.detach().mean(0))
    return self.net(rows - sum(self.left["means"]))


STATES = {
    moving_mean: {"mean": torch.zeros(6, dtype=ROWS.dtype)},
    mean_of_first_rows: {"mean": None},
    moving_mean_in_dict: {"left": {}},
    means_written_in_place: {"left": {"means": []}},
}


@pytest.mark.parametrize("layout", [["cpu"] * 2, ["cpu:0", "cpu:1"]], ids="+".join)
@pytest.mark.parametrize("forward", STATES, ids=lambda f: f.__name__)
def test_state_of_rows_is_that_of_users_module(forward, layout):
    """Each replica went on with the state of its own rows, in evaluation, too."""
    attributes = copy.deepcopy(STATES[forward])
    net = build(lambda: Own(forward, net=mlp(), **attributes))
    with ScatterOnceParallel(net, device_ids=layout, verify=False) as engine:
        for number in range(4):
            engine(ROWS + number).sum().backward()
        engine.eval()
        assert_close(engine(ROWS), net(ROWS), "an output")


def counts_large_rows(self, rows):
    if self.made is None:
        self.made = torch.zeros(6, dtype=rows.dtype)
    self.made += (rows.detach() > 50).sum(0)
    return self.net(rows - self.made)


def lists_large_rows(self, rows):
    if self.made is None:
        self.made = {"sizes": []}
    if bool((rows > 50).any()):
        self.made["sizes"].append(len(rows))
    return self.net(rows - len(self.made["sizes"]))


def fails_after_large_rows(self, rows):
    output = lists_large_rows(self, rows)
    if bool((rows > 90).any()):
        raise ValueError("a large row")
    return output


WRITES = [counts_large_rows, lists_large_rows, fails_after_large_rows]


@pytest.mark.parametrize("forward", WRITES, ids=lambda f: f.__name__)
def test_write_of_one_replica_alone_is_undone(forward):
    """Its rows would have been computed with other state than the user's module has."""
    net = build(lambda: Own(forward, net=mlp(), made=None))
    large = ROWS.clone()
    large[-1] = 99
    with ScatterOnceParallel(net, device_ids=["cpu"] * 2, verify=False) as engine:
        engine(ROWS)
        with contextlib.suppress(ValueError):
            engine(large)
        assert_close(engine(ROWS), net(ROWS), "an output")


def test_constant_of_inference_is_trained_with_later():
    """Copies that are made in inference mode could not be saved for backward."""
    constant = torch.ones(3, dtype=ROWS.dtype)

    def forward(self, rows):
        if self.left is None:
            self.left = [constant]
        return self.net(rows) * self.left[0]

    engine, replica_set = engine_of(forward, left=None)
    with torch.inference_mode():
        engine(ROWS)
    engine(ROWS).sum().backward()
    assert replica_set.builds == 1


def fits(engine):
    engine.forward_backward(ROWS, ROWS[:, :3], nn.functional.mse_loss)


def calls_with_a_part_more(engine):
    engine.module.part = nn.Tanh()
    engine(ROWS)


@pytest.mark.parametrize("go_on", [fits, calls_with_a_part_more])
def test_what_a_call_left_is_freed(go_on):
    def forward(self, rows):
        output = self.net(rows)
        if self.keeps:
            self.left = output * 2
        return output

    engine, _ = engine_of(forward, left=None, keeps=True)
    engine(ROWS)
    left = weakref.ref(engine.module.left)
    engine.module.keeps = False
    engine.module.left = None
    go_on(engine)
    gc.collect()
    assert left() is None
