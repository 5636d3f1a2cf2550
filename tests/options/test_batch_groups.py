"""``engine.batch_groups``: whole batches of a loop, each computed by one replica."""

from __future__ import annotations

import _thread
import copy
import random
import time

import numpy
import pytest
import torch
from harness.models import FEATURES
from harness.oracle import randn
from torch import nn

from scatterpar import ScatterOnceParallel
from scatterpar.options import batch_groups
from scatterpar.options.batch_groups import StateWritten

pytestmark = [pytest.mark.core, pytest.mark.draws]

BATCHES = [randn(rows, FEATURES, seed=rows) for rows in (4, 3, 1, 5, 2)]
VIRTUAL = ["cpu:0", "cpu:1"]


def model():
    torch.manual_seed(3)
    return nn.Linear(FEATURES, 2).double().eval()


def forward(replica, batch):
    return replica(batch)


def results_of(groups, batches=BATCHES, size=2):
    """The results of all batches, in groups of this size."""
    results = []
    for start in range(0, len(batches), size):
        results += groups.results(batches[start : start + size])
    return results


def test_each_batch_as_the_function_alone_gives(devices):
    """Whatever the function returns: nothing is joined."""

    def describes(replica, batch):
        return {"mean": replica(batch).mean(), "rows": len(batch), "text": "x"}

    module = model()
    with ScatterOnceParallel(module, 1, devices(3)) as engine, torch.no_grad():
        results = results_of(engine.batch_groups(describes), size=3)
        for result, batch in zip(results, BATCHES, strict=True):
            expected = describes(module, batch)
            assert torch.equal(result.pop("mean"), expected.pop("mean"))
            assert result == expected


def test_batch_has_the_replica_of_its_place():
    """Also in the last group, which has fewer batches."""
    with ScatterOnceParallel(model(), 1, VIRTUAL) as engine:
        numbers = {id(replica): n for n, replica in enumerate(engine.replicas)}
        groups = engine.batch_groups(lambda replica, _: numbers[id(replica)])
        assert results_of(groups) == [0, 1, 0, 1, 0]


def test_batches_are_copies():
    """A function may write its batch, and the caller's stays. That is told once."""

    def writes(replica, batch):
        return replica(batch.mul_(2))

    module = model()
    before = [batch.clone() for batch in BATCHES]
    with (
        ScatterOnceParallel(module, 1, VIRTUAL) as engine,
        torch.no_grad(),
        pytest.warns(UserWarning, match="writes inputs in place") as told,
    ):
        results_of(engine.batch_groups(writes))
    assert len(told) == 1
    for batch, value in zip(BATCHES, before, strict=True):
        assert torch.equal(batch, value)


@pytest.mark.parametrize("layout", [VIRTUAL, ["cpu"] * 2], ids=["virtual", "shared"])
def test_weights_written_between_groups_count(layout):
    """That is told: the loop may have written them after the first batch of a group."""
    module = model()
    with ScatterOnceParallel(module, 1, layout) as engine, torch.no_grad():
        groups = engine.batch_groups(forward)
        expected = [module(batch) for batch in BATCHES[:2]]
        results = groups.results(BATCHES[:2])
        module.weight.mul_(2)
        expected += [module(batch) for batch in BATCHES[2:]]
        with pytest.warns(UserWarning, match="in the middle of an evaluation"):
            results += groups.results(BATCHES[2:4])
        results += groups.results(BATCHES[4:])
    for result, value in zip(results, expected, strict=True):
        assert torch.equal(result, value)


def test_values_are_compared_once(monkeypatch):
    """Comparing reads them, and the host waits."""
    with ScatterOnceParallel(model(), 1, VIRTUAL) as engine:
        refreshes = []
        refresh = engine._replicas.refresh
        monkeypatch.setattr(
            engine._replicas,
            "refresh",
            lambda *args: refreshes.append(1) or refresh(*args),
        )
        results_of(engine.batch_groups(forward))
        assert len(refreshes) == 1
        results_of(engine.batch_groups(forward))  # another evaluation
        assert len(refreshes) == 2


@pytest.mark.filterwarnings("ignore:the module has changed")
def test_step_between_groups():
    module = model()
    with ScatterOnceParallel(module, 1, VIRTUAL) as engine:
        groups = engine.batch_groups(forward)
        with torch.no_grad():
            expected = [module(batch) for batch in BATCHES]
        results = groups.results(BATCHES[:2])
        engine.forward_backward(BATCHES[0], BATCHES[0][:, :2], nn.MSELoss())
        with torch.no_grad():
            module.weight.sub_(module.weight.grad)
            results += groups.results(BATCHES[2:4])
            expected[2:] = [module(batch) for batch in BATCHES[2:4]]
    for result, value in zip(results, expected, strict=True):
        assert torch.equal(result, value)


def test_failed_group_leaves_nothing():
    """The error is the user's, and names the replica; draws are put back."""

    def fails(replica, batch):
        torch.rand(3)
        if len(batch) == 3:
            raise ZeroDivisionError("mine")
        return replica(batch)

    with ScatterOnceParallel(model(), 1, VIRTUAL) as engine:
        before = torch.get_rng_state()
        with pytest.raises(ZeroDivisionError, match="mine") as caught:
            engine.batch_groups(fails).results(BATCHES[:2])
        assert "replica 1 on cpu:1" in caught.value.__notes__[0]
        assert torch.equal(torch.get_rng_state(), before)
        assert len(results_of(engine.batch_groups(forward))) == len(BATCHES)


def test_writing_a_parameter_is_refused():
    def writes(replica, batch):
        replica.bias.add_(1)
        return replica(batch)

    with (
        ScatterOnceParallel(model(), 1, VIRTUAL) as engine,
        pytest.raises(RuntimeError, match="bias"),
    ):
        engine.batch_groups(writes).results(BATCHES[:2])


def test_interrupt_ends_a_group():
    def interrupts(replica, batch):
        if len(batch) == 1:
            _thread.interrupt_main()
        return replica(batch)

    with ScatterOnceParallel(model(), 1, VIRTUAL) as engine:
        with pytest.raises(KeyboardInterrupt):
            results_of(engine.batch_groups(interrupts))
        assert len(results_of(engine.batch_groups(forward))) == len(BATCHES)


def test_interrupt_ends_a_group_of_several_batches(monkeypatch):
    """Between two batches of a replica, too."""
    monkeypatch.setattr(batch_groups, "_MAX_BATCHES", 500)
    called = []

    def interrupts(replica, batch):
        called.append(1)
        if len(called) == 3:
            _thread.interrupt_main()
        if len(called) > 2:
            time.sleep(0.01)
        return replica(batch)

    with ScatterOnceParallel(model(), 1, VIRTUAL) as engine:
        groups = engine.batch_groups(interrupts)
        groups.results(BATCHES[:1] * 2)
        with pytest.raises(KeyboardInterrupt):
            groups.results(BATCHES[:1] * 1000)
    assert len(called) < 1002


def test_loop_draws_as_without_groups():
    """Calls that draw nothing leave the generators to the loop."""
    with ScatterOnceParallel(model(), 1, VIRTUAL) as engine:
        groups = engine.batch_groups(forward)
        torch.manual_seed(5)
        drawn = []
        for number in range(4):
            if number % 2 == 0:
                groups.results(BATCHES[number : number + 2])
            drawn.append(torch.rand(1))
        torch.manual_seed(5)
        assert drawn == [torch.rand(1) for _ in range(4)]


def draws_and_fails(replica, batch):
    random.random()
    numpy.random.rand()
    raise LookupError("of the model")


@pytest.mark.draws
def test_failed_group_leaves_hosts_generators():
    random.seed(3)
    numpy.random.seed(3)
    with (
        ScatterOnceParallel(model(), 1, VIRTUAL) as engine,
        pytest.raises(LookupError),
    ):
        engine.batch_groups(draws_and_fails).results(BATCHES[:2])
    drawn = random.random(), numpy.random.rand()
    assert drawn == (random.Random(3).random(), numpy.random.RandomState(3).rand())


def test_groups_that_draw_differ_and_can_be_repeated():
    """Each continues the numbers of the last one, also with what the loop draws."""

    def drawn():
        torch.manual_seed(5)
        with ScatterOnceParallel(model(), 1, VIRTUAL) as engine:
            groups = engine.batch_groups(lambda *_: torch.rand(()).item())
            numbers = []
            for _ in range(3):
                numbers += groups.results(BATCHES[:2])
                numbers.append(torch.rand(()).item())
        return numbers

    numbers = drawn()
    assert len(set(numbers)) == 9
    assert numbers == drawn()


class CountsCalls(nn.Module):
    """A buffer that calls write in place, or bind to another tensor."""

    def __init__(self, is_bound):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(FEATURES, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros(()))
        self.is_bound = is_bound

    def forward(self, inputs):
        if self.is_bound:
            self.calls = self.calls + torch.rand(())
        else:
            self.calls += torch.rand(())
        return inputs * self.weight * self.calls


WRITING = {
    "in place": CountsCalls(is_bound=False).eval(),
    "bound": CountsCalls(is_bound=True).eval(),
    "statistics": nn.BatchNorm1d(FEATURES).double(),
    "statistics without a counter": nn.BatchNorm1d(FEATURES).double(),
}
# The counter's version moves, and that of the statistics does not.
WRITING["statistics without a counter"].num_batches_tracked = None


@pytest.mark.parametrize("buffers", ["master", "batch"])
@pytest.mark.parametrize("name", WRITING)
def test_group_that_writes_buffers_leaves_nothing(name, buffers, devices):
    """The next batch may read them, so it is not computed at the same time."""
    module = copy.deepcopy(WRITING[name])
    before = copy.deepcopy(module.state_dict())
    with ScatterOnceParallel(module, 1, devices(2), buffers=buffers) as engine:
        state = torch.get_rng_state()
        with pytest.raises(StateWritten):
            engine.batch_groups(forward).results(BATCHES[:2])
        assert torch.equal(torch.get_rng_state(), state)
        module.eval()
        if "statistics" in name:  # they are read now, and not written
            results_of(engine.batch_groups(forward))
    for key, value in module.state_dict().items():
        assert torch.equal(value, before[key])


class WritesLate(nn.Module):
    """Its output is a tensor of its own, which some calls write."""

    def __init__(self):
        super().__init__()
        self.register_parameter("factor", nn.Parameter(torch.ones(())))
        self.last = torch.zeros(2)

    def forward(self, inputs):
        if inputs[0] >= 3:
            self.last.copy_(self.factor * inputs)
        return {"last": self.last, "rest": (self.last[1:],)}


def test_next_group_leaves_earlier_outputs(devices):
    batches = [torch.full((2,), float(number)) for number in range(6)]
    module = WritesLate().eval()
    with ScatterOnceParallel(module, 1, devices(3)) as engine:
        groups = engine.batch_groups(forward)
        results = groups.results(batches[:3])
        with pytest.raises(StateWritten, match="a tensor"):
            groups.results(batches[3:])
    for result in results:
        assert not result["last"].any()
        assert not result["rest"][0].any()


def sizes(engine, function, batches):
    """The sizes of the next groups, after each of a loop that asks for them."""
    groups = engine.batch_groups(function)
    sizes, start = [groups.size], 0
    while start < len(batches):
        start += len(groups.results(batches[start : start + sizes[-1]]))
        sizes.append(groups.size)
    return sizes


def large(replica, batch):
    return torch.empty(2**20, dtype=torch.float64).expand(3, -1).contiguous()


def large_view(replica, batch):
    """It keeps all that it is a view of."""
    return large(replica, batch)[:, :1]


def large_array(replica, batch):
    return {"scores": [large(replica, batch).numpy()]}


def draws(replica, batch):
    return torch.rand(())


GROWING = {
    # The second group, in which a batch is larger than any before, has two.
    "small batches": (forward, [2, 8, 8, 8]),
    "large results": (large, [2, 2, 2, 2, 2, 2]),
    "views of large results": (large_view, [2, 2, 2, 2, 2, 2]),
    "large arrays": (large_array, [2, 2, 2, 2, 2, 2]),
    "draws": (draws, [2, 2, 2, 2, 2, 2]),
}


@pytest.mark.parametrize("name", GROWING)
def test_size_of_next_group(name):
    function, expected = GROWING[name]
    with ScatterOnceParallel(model(), 1, VIRTUAL) as engine:
        assert sizes(engine, function, BATCHES * 2) == expected


def test_replica_computes_several_batches(devices):
    module = model()
    with ScatterOnceParallel(module, 1, devices(2)) as engine, torch.no_grad():
        numbers = {id(replica): n for n, replica in enumerate(engine.replicas)}
        called = []

        def notes(replica, batch):
            called.append((numbers[id(replica)], len(batch)))
            return replica(batch)

        groups = engine.batch_groups(notes)
        results = groups.results([BATCHES[3], BATCHES[0]])
        assert [*map(str, groups.devices)] == [*map(str, engine.device_ids)]
        results += groups.results(BATCHES)
        first, second = engine.device_ids
        assert groups.devices == [first] * 3 + [second] * 2
    assert sorted(called[2:]) == [(0, 1), (0, 3), (0, 4), (1, 2), (1, 5)]
    batches = [BATCHES[3], BATCHES[0], *BATCHES]
    for result, batch in zip(results, batches, strict=True):
        assert torch.equal(result, module(batch))


def test_larger_batch_is_no_replicas_second(devices):
    """Its result may be larger than any that was measured, and there would be many."""
    with ScatterOnceParallel(model(), 1, devices(2)) as engine:
        groups = engine.batch_groups(forward)
        assert len(groups.results(BATCHES[:2])) == 2
        assert len(groups.results(BATCHES)) == 2  # one of five rows
        assert len(groups.devices) == 2
        assert len(groups.results(BATCHES[2:])) == 2
        assert len(groups.results([*BATCHES[4:], *BATCHES])) == 6


# Two of them have two rows: in groups of two, the first ones of the last two groups.
LATE = [BATCHES[number] for number in (3, 0, 0, 1, 2, 0, 4, 1, 4)]


def results_by_group(groups):
    """Results of ``LATE`` as a loop asks for them, a list per group."""
    by_group, start = [], 0
    while start < len(LATE):
        by_group.append(groups.results(LATE[start : start + groups.size]))
        start += len(by_group[-1])
    return by_group


def test_late_draws_are_those_of_small_groups():
    """Which replica draws for a batch does not depend on how large results are."""

    def drawn(padding):
        def draws_late(_, batch):
            number = torch.rand(()).item() if len(batch) == 2 else len(batch)
            return {"number": number, "padding": torch.zeros(padding)}

        torch.manual_seed(5)
        with ScatterOnceParallel(model(), 1, VIRTUAL) as engine:
            groups = results_by_group(engine.batch_groups(draws_late))
        numbers = [[result["number"] for result in group] for group in groups]
        return numbers, torch.get_rng_state().tolist()

    numbers, state = drawn(padding=1)  # a group of seven is undone
    assert [*map(len, numbers)] == [2, 2, 2, 2, 1]
    assert (numbers, state) == drawn(padding=2**22)


def test_error_of_a_replicas_second_batch():
    """The loop gets the results of earlier groups, as with a batch per replica."""

    def fails(_, batch):
        if len(batch) == 2:
            raise ZeroDivisionError("mine")
        return len(batch)

    with ScatterOnceParallel(model(), 1, VIRTUAL) as engine:
        groups = engine.batch_groups(fails)
        assert groups.results(LATE[:2]) == [5, 4]
        assert groups.results(LATE[2:]) == [4, 3]
        assert groups.results(LATE[4:6]) == [1, 4]
        with pytest.raises(ZeroDivisionError, match="mine") as caught:
            groups.results(LATE[6:8])
    assert "in replica 0 on cpu:0, counted" in caught.value.__notes__[0]


def test_group_that_runs_out_of_memory_is_cut():
    """One batch per replica needs less, so results are those of all batches."""
    failed = []

    def needs_memory(_, batch):
        if len(batch) == 1 and not failed:
            failed.append(batch)
            raise torch.OutOfMemoryError("mine")
        return len(batch)

    with ScatterOnceParallel(model(), 1, VIRTUAL) as engine:
        by_group = results_by_group(engine.batch_groups(needs_memory))
    assert by_group == [[5, 4], [4, 3], [1, 4], [2, 3], [2]]
    assert failed


def test_state_of_a_replicas_second_batch(devices):
    """The group is undone, and the next group has one batch per replica."""
    module = CountsRows().eval()
    with ScatterOnceParallel(module, 1, devices(2)) as engine:
        groups = engine.batch_groups(forward)
        groups.results([BATCHES[0], BATCHES[0]])
        assert groups.size == 8
        batches = [*BATCHES[:2], BATCHES[4], BATCHES[1]]
        assert len(groups.results(batches)) == 2
        assert groups.size == 2
        with pytest.raises(StateWritten, match="rows"):
            groups.results(batches[2:])
    assert not module.rows


DRAWING = {"Python": random, "NumPy": numpy.random}


@pytest.mark.parametrize("name", DRAWING)
def test_numbers_drawn_on_the_host_are_state(name):
    """Replicas would share the generator, in an order that time decides."""

    def draws_late(_, batch):
        return DRAWING[name].random() if len(batch) == 2 else 0.0

    state = random.getstate(), numpy.random.get_state()[1].tolist()
    with ScatterOnceParallel(model(), 1, VIRTUAL) as engine:
        groups = engine.batch_groups(draws_late)
        for start in (0, 2, 4):
            assert groups.results(LATE[start : start + groups.size]) == [0, 0]
        with pytest.raises(StateWritten, match="Random"):
            groups.results(LATE[6:8])
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == state


def test_hook_that_comes_between_groups_is_seen():
    """What it writes is in the order of the batches, so no group is computed."""
    module = model()
    features = []
    with ScatterOnceParallel(module, 1, VIRTUAL) as engine:
        groups = engine.batch_groups(forward)
        groups.results(BATCHES[:2])
        hook = module.register_forward_hook(lambda *args: features.append(args[2]))
        with (
            pytest.warns(UserWarning, match="in the middle of an evaluation"),
            pytest.raises(StateWritten),
        ):
            groups.results(BATCHES[:2] * 2)
        assert not features
        hook.remove()
        assert len(groups.results(BATCHES[:2])) == 2


class CountsRows(nn.Module):
    """A buffer that calls write for batches of two rows."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, 2).double()
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, inputs):
        if len(inputs) == 2:
            self.rows += 2
        return self.layer(inputs) + self.rows


CALLS: list[int] = []  # a global variable


class Meter:
    all_calls = 0

    def __init__(self):
        self.calls = 0


class WritesState(nn.Module):
    """Writes state of one kind in each call."""

    def __init__(self, write):
        super().__init__()
        self.inner = nn.Linear(FEATURES, 2).double()
        self.spare = nn.ModuleList([nn.Tanh()])
        self.register_buffer("total", torch.zeros(()))
        self.number = 0
        self.numbers = []
        self.meter = Meter()
        self.generator = torch.Generator().manual_seed(3)
        self.write = write

    def forward(self, inputs):
        self.write(self)
        return self.inner(inputs)


STATES = {
    "number": lambda m: setattr(m, "number", m.number + 1),
    "list": lambda m: m.numbers.append(1),
    "object": lambda m: setattr(m.meter, "calls", m.meter.calls + 1),
    "global": lambda m: CALLS.append(1),
    "class": lambda m: setattr(Meter, "all_calls", Meter.all_calls + 1),
    "generator": lambda m: torch.rand((), generator=m.generator),
    "data": lambda m: m.total.data.add_(1),
    "new data": lambda m: setattr(m.total, "data", m.total.data + 1),
    "layer": lambda m: m.spare.__setitem__(0, nn.ReLU()),
    "mode": lambda m: m.spare.train(not m.spare.training),
    "requires_grad": lambda m: m.inner.requires_grad_(not m.inner.weight.requires_grad),
}


@pytest.mark.parametrize("name", STATES)
def test_state_of_any_kind_is_no_group(name, devices):
    """It was lost, or written by all replicas at once, in silence."""
    CALLS.clear()
    module = WritesState(STATES[name]).eval()
    engine = ScatterOnceParallel(module, 1, devices(2))
    with engine, pytest.raises(StateWritten):
        engine.batch_groups(forward).results(BATCHES[:2])
    assert not CALLS
    assert not module.meter.calls
    assert not module.numbers
    assert not module.total
    assert not Meter.all_calls
    expected = torch.Generator().manual_seed(3).get_state()
    assert torch.equal(module.generator.get_state(), expected)
    assert type(module.spare[0]) is nn.Tanh


def test_equal_values_are_no_state(devices):
    """PEFT sets the list of its active adapters anew when another one has been used."""

    def rebind(module):
        module.numbers = [*module.numbers]
        module.names = {"active": (module.number, *module.numbers)}

    module = WritesState(rebind).eval()
    module.numbers = [1, "default"]
    module.names = {"active": (module.number, 1, "default")}
    with ScatterOnceParallel(module, 1, devices(2)) as engine:
        assert len(engine.batch_groups(forward).results(BATCHES[:2])) == 2
        module.names = {"active": (module.number, 2, "default")}
        with pytest.raises(StateWritten):
            engine.batch_groups(forward).results(BATCHES[:2])


def test_iterator_in_a_model_is_no_group(devices):
    """What a call takes from it cannot be put back, so nothing is called."""
    module = WritesState(lambda m: next(m.numbers)).eval()
    module.numbers = iter([1, 2])
    engine = ScatterOnceParallel(module, 1, devices(2))
    with engine, pytest.raises(StateWritten, match="numbers"):
        engine.batch_groups(forward).results(BATCHES[:2])
    assert [*module.numbers] == [1, 2]


def test_results_are_copied_only_if_a_call_writes_them():
    """A copy of logits is as large as they are."""
    places = []

    def notes(replica, batch):
        output = replica(batch)
        places.append(output.data_ptr())
        return output

    with ScatterOnceParallel(model(), 1, VIRTUAL) as engine:
        results = engine.batch_groups(notes).results(BATCHES[:2])
    assert {result.data_ptr() for result in results} == set(places)
