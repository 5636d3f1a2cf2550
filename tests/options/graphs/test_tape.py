"""A tape tells runs apart that compute something else, and no others."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import gc
import os
import random
import re
import warnings
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from harness import frozen_values
from harness.frozen_values import (
    CHANGED,
    CHANGED_LOSSES,
    CHANGED_MODULES,
    CLASSES,
    MOVING,
    Network,
)
from harness.oracle import randn
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from scatterpar import ScatterOnceParallel
from scatterpar.devices import clocks
from scatterpar.options.graphs import decision, schedule
from scatterpar.options.graphs.tape import RepeatableTape, Tape, difference

HOST = torch.device("cpu")
ROWS, FEATURES, STEPS = 24, 4, 6
# Sub-steps per replica: those that are captured by default are counted before.
FEW, MANY = 3, 6
CHANGE = 4  # the step before which a value changes
PLACES = {"one": ["cpu"], "two": ["cpu:0", "cpu:1"]}
in_places = pytest.mark.parametrize(
    "places", [pytest.param("one", marks=pytest.mark.slow), "two"]
)
# The host waits for the device in them: no graph repeats that.
NEVER_CAPTURED = {"a_number_read_from_a_tensor"}
# Captured again before the step: flags of torch choose kernels.
SEEN_BEFORE = {"a_flag_of_torch"}
# What nobody can repeat, to compare it.
NEW_IN_EACH_RUN = {"a_clock", "random_of_the_system"}
# Their checkpoints set the random generator, which no graph repeats.
DRAWING = {"a_number_beside_dropout", "a_rate_of_dropout", "a_seed_in_the_call"}


class Beside(NamedTuple):
    """What sub-steps have beside the value.

    Attributes:
        has_draws: whether the module has dropout, and runs under autocast.
        has_checkpoint: whether the function that reads the value is computed again in
            the backward pass.
        graphs: the engine's option.
    """

    has_draws: bool = False
    has_checkpoint: bool = False
    graphs: bool | None = True


NOTHING = Beside()
BESIDE = {
    "draws, asked": Beside(has_draws=True),
    "draws": Beside(has_draws=True, graphs=None),
    "checkpoint, asked": Beside(has_checkpoint=True),
    "checkpoint": Beside(has_checkpoint=True, graphs=None),
}


def each_beside(names, *quick):
    """Each name of a table beside each of these; all slow except the ``quick`` ones."""
    return pytest.mark.parametrize(
        ("name", "beside"),
        [
            pytest.param(name, beside, marks=[] if name in quick else pytest.mark.slow)
            for name in names
            for beside in BESIDE
        ],
    )


@pytest.fixture
def waiting(monkeypatch):
    """Devices that capture by default, and wait for the host."""
    monkeypatch.setattr(schedule, "captures_graphs", lambda _: True)
    monkeypatch.setattr(clocks, "_TAIL", 1e9)
    monkeypatch.setattr(decision, "_LONGEST_RATIO", 1e9)


@contextlib.contextmanager
def values_restored():
    """What the table's values are kept in is as before afterwards."""
    kept = frozen_values.FACTOR, frozen_values.helper
    table = copy.deepcopy(frozen_values.TABLE)
    defaults = frozen_values.with_default.__defaults__
    matmul = torch.backends.cuda.matmul
    allows = matmul.allow_tf32
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        frozen_values.FACTOR, frozen_values.helper = kept
        frozen_values.TABLE.update(table)
        frozen_values.with_default.__defaults__ = defaults
        frozen_values.cached_factor.cache_clear()
        matmul.allow_tf32 = allows
        os.environ.pop("SCATTERPAR_TEST_FACTOR", None)
        random.setstate(states[0])
        np.random.set_state(states[1])


def trained(
    module,
    criterion,
    change,
    graphs,
    places,
    targets=None,
    *,
    accum=MANY,
    has_autocast=False,
):
    """Losses and gradients of some steps, and what was said of graphs in each.

    ``change()`` is called before one of them.
    """
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    results, reports = [], []
    (first, *_) = module.parameters()
    inputs = randn(ROWS, FEATURES).to(first.dtype)
    options = {"graphs": graphs, "verify": False}
    engine = ScatterOnceParallel(module, accum, places, **options)
    with engine, values_restored():
        for step in range(STEPS):
            if step == CHANGE:
                change()
            module.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=has_autocast):
                loss = engine.forward_backward(inputs, targets, criterion)
            results.append(loss)
            results += [p.grad for p in module.parameters() if p.grad is not None]
            results += [buffer.clone() for buffer in module.buffers()]
            reports.append(engine.last_step.graphs)
    return results, reports


def in_context(function, *args):
    """What a value is changed to in a context variable, is not seen later."""
    return contextvars.copy_context().run(function, *args)


def trained_by(make, graphs, places, beside=NOTHING):
    """As ``trained``, of a linear layer and a function of its output."""
    function, change = make()
    torch.manual_seed(3)
    module = nn.Linear(FEATURES, CLASSES)
    if beside.has_draws:
        module = nn.Sequential(module, nn.Dropout(0.5))
    else:
        module.double()  # which autocast leaves as it is

    def criterion(output, _):
        output = output.double()
        if beside.has_checkpoint:
            output = checkpoint(function, output, use_reentrant=False)
        else:
            output = function(output)
        return output.square().mean()

    accum = FEW if beside == NOTHING else MANY
    options = {"accum": accum, "has_autocast": beside.has_draws}
    return trained(module, criterion, change, graphs, places, **options)


def assert_found(found, expected, is_captured=True, is_undone=True):
    """The steps have the bits of eager ones, and the change ended the replays."""
    (results, reports), (expected_results, _) = found, expected
    assert len(results) == len(expected_results)
    assert all(map(torch.equal, results, expected_results))
    if not is_captured:
        assert not any("replayed" in report for report in reports), reports
        return
    assert "sub-steps replayed" in reports[CHANGE - 1]
    assert not reports[CHANGE - 1].startswith("0 ")
    if is_undone:
        assert reports[CHANGE].startswith("eager: ")


@pytest.mark.draws
@in_places
@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.filterwarnings("ignore:graphs=True")
def test_changed_value_is_found(name, places):
    """In the step that begins with another value, before anything is committed."""
    found, expected = (
        in_context(trained_by, CHANGED[name], graphs, PLACES[places])
        for graphs in (True, False)
    )
    is_undone = name not in SEEN_BEFORE
    assert_found(found, expected, name not in NEVER_CAPTURED, is_undone)


@pytest.mark.draws
@each_beside(CHANGED, "a_global")
@pytest.mark.filterwarnings("ignore:graphs=True")
def test_changed_value_is_found_beside(name, beside, waiting):
    """Also by default; there nothing is told."""
    beside = BESIDE[beside]
    with warnings.catch_warnings():
        if beside.graphs is None:
            warnings.simplefilter("error")
        found, expected = (
            in_context(trained_by, CHANGED[name], graphs, PLACES["two"], beside)
            for graphs in (beside.graphs, False)
        )
    is_captured = name not in NEVER_CAPTURED
    is_captured &= not (beside.has_checkpoint and name in DRAWING)
    # A checkpoint inside of a checkpoint runs the same operators.
    is_same = beside.has_checkpoint and name == "a_checkpoint"
    is_undone = name not in SEEN_BEFORE and not is_same
    assert_found(found, expected, is_captured, is_undone)


@pytest.mark.draws
@in_places
@pytest.mark.parametrize("name", CHANGED_MODULES)
def test_changed_module_is_found(name, places):
    assert_module_is_found(name, PLACES[places])


@pytest.mark.draws
@pytest.mark.parametrize("graphs", [True, None])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "a dict" else pytest.mark.slow)
        for name in CHANGED_MODULES
    ],
)
def test_changed_module_is_found_under_autocast(name, graphs, waiting):
    assert_module_is_found(name, PLACES["two"], graphs, torch.float32)


def assert_module_is_found(name, places, graphs=True, dtype=torch.float64):
    """Under autocast with another dtype than float64, which it leaves as it is."""
    has_autocast = dtype is not torch.float64
    accum = MANY if has_autocast else FEW
    options = {"accum": accum, "has_autocast": has_autocast}
    found = []
    for option in (graphs, False):
        torch.manual_seed(3)
        module = Network().to(dtype)
        found.append(
            trained(
                module,
                lambda output, _: output.square().mean(),
                lambda module=module: CHANGED_MODULES[name](module),
                option,
                places,
                **options,
            )
        )
    # A parameter in other memory is no change of what is computed: it is captured
    # again before the step.
    (results, reports), (expected, _) = found
    assert all(map(torch.equal, results, expected))
    assert "sub-steps replayed" in reports[CHANGE - 1]
    # By default the step before was the first one that was captured, too.
    assert graphs is None or reports[CHANGE] != reports[CHANGE - 1]


@pytest.mark.draws
@pytest.mark.parametrize("name", CHANGED_LOSSES)
def test_changed_loss_is_found(name):
    found = []
    targets = torch.arange(ROWS) % CLASSES
    for graphs in (True, False):
        torch.manual_seed(3)
        loss = nn.CrossEntropyLoss()
        module = nn.Linear(FEATURES, CLASSES).double()
        change = CHANGED_LOSSES[name]
        options = graphs, PLACES["two"], targets
        found.append(trained(module, loss, partial(change, loss), *options, accum=FEW))
    assert all(map(torch.equal, found[0][0], found[1][0]))


def unchanged(make):
    return make(), lambda: None


@pytest.mark.draws
@pytest.mark.parametrize("name", MOVING)
def test_moving_value_never_captured(name):
    """Two calls in a row differ, or leave something behind that the next one reads."""
    assert_never_captured(name, NOTHING)


@pytest.mark.draws
@each_beside(MOVING, "a_counter")
def test_moving_value_never_captured_beside(name, beside, waiting):
    assert_never_captured(name, BESIDE[beside])


def assert_never_captured(name, beside):
    """A moving value is told once, if graphs are asked for."""
    found = []
    for graphs in (beside.graphs, False):
        # The first values of NumPy and Python are the same.
        make = partial(unchanged, MOVING[name])
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found.append(trained_by(make, graphs, PLACES["one"], beside))
        assert len(told) == (graphs is True)
    (results, reports), (expected, _) = found
    assert not any("replayed" in report for report in reports[1:]), reports
    if name not in NEW_IN_EACH_RUN:
        assert all(map(torch.equal, results, expected))


def test_table_has_enough_kinds():
    tables = CHANGED, CHANGED_MODULES, CHANGED_LOSSES, MOVING
    assert sum(map(len, tables)) >= 62


# --- the tape itself ---


def tape_of(function, *places, tape=Tape):
    """The tape of a function of the places."""
    made = tape(HOST, places)
    with made:
        function(*places)
    made.end()
    return made


X = torch.arange(6.0).view(2, 3)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (lambda x: x * 2.0, lambda x: x * 3.0, "aten.mul.Tensor gets 3.0, and got 2.0"),
        (lambda x: x + 0.0, lambda x: x + -0.0, "aten.add.Tensor gets -0.0"),
        (lambda x: x.cumsum(0), lambda x: x.cumsum(1), "aten.cumsum.default"),
        (lambda x: x.sin(), lambda x: x.cos(), "aten.cos.default runs now"),
        (lambda x: x.sin(), lambda x: x.sin().cos(), "aten.cos.default runs now"),
        (lambda x: x.sin().cos(), lambda x: x.sin(), "aten.cos.default does not run"),
        (lambda x: x.sum().item(), lambda x: (x + 1).sum().item(), "aten.add.Tensor"),
        (
            lambda _: torch.tensor([1.0, 2.0]),
            lambda _: torch.tensor([1.0, 3.0]),
            "aten.lift_fresh.default gets another value",
        ),
        (lambda x: x + X, lambda x: x + X.clone(), "aten.clone.default runs now"),
        (lambda x: x + X[0], lambda x: x + X[1], "aten.select.int"),
        (lambda x: x * 1, lambda x: x * True, "aten.mul.Tensor"),
    ],
)
def test_difference_in_words(first, second, words):
    before, now = tape_of(first, X.clone()), tape_of(second, X.clone())
    assert words in difference(before, now)
    assert not difference(before, tape_of(first, X.clone()))


def both(first, second):
    """Two functions of a tensor, which make both views and use one of them."""

    def row_of(number):
        return lambda x: (first(x), second(x))[number].select(0, 0)

    return row_of(0), row_of(1)


VIEWS = {
    "strides (1, 2)": (lambda z: z[:], lambda z: z.t()),
    "shape (1, 2)": (lambda z: z[:2], lambda z: z[:1]),
    "conjugate": (lambda z: z[:], lambda z: z.conj()),
    "negative": (lambda z: z[:], lambda z: z._neg_view()),
}


@pytest.mark.parametrize("words", VIEWS)
def test_views_at_one_address_differ(words):
    first, second = both(*VIEWS[words])
    rows = torch.randn(2, 2, dtype=torch.complex64, generator=torch.Generator())
    before = tape_of(first, rows)
    new, _, old = difference(before, tape_of(second, rows)).partition(", and got ")
    assert words in new
    assert words not in old
    assert not difference(before, tape_of(first, rows.clone()))


def test_blocks_of_a_profiler_are_left_out():
    """``torch.profiler.record_function``, with another name in each sub-step."""
    tapes = [RepeatableTape(HOST), RepeatableTape(HOST)]
    for number, tape in enumerate(tapes):
        with tape, torch.profiler.record_function(f"sub-step {number}"):
            torch.ones(2).mul(2.0)
    assert difference(*tapes) == ""
    tapes[0].replay()


def test_nan_equals_itself():
    first, second = (
        tape_of(lambda x: x.masked_fill(x > 1, float("nan")), X.clone())
        for _ in range(2)
    )
    assert not difference(first, second)


def test_memory_of_earlier_call_is_not_used_again():
    """Otherwise new memory could have the address of memory that was freed."""
    tapes = []
    for _ in range(6):
        values = torch.ones(1000)
        tapes.append(tape_of(lambda x, v=values: x.sum() + v, X))
        del values
        gc.collect()
    for before in tapes[:-1]:
        assert difference(before, tapes[-1])


def test_empty_tensors_have_no_address():
    """Each replica was proved by itself, as if it read memory of its device alone."""
    nothing = torch.empty(0)
    assert tape_of(lambda x: torch.cat([nothing, x.flatten()]), X).addresses() == set()
    assert tape_of(lambda x: x + X, X + 0).addresses() == {X.data_ptr()}


def test_places_are_no_addresses():
    first, second = (tape_of(lambda x, y: x @ y.t(), X + i, X - i) for i in range(2))
    assert not difference(first, second)
    swapped = tape_of(lambda x, y: y @ x.t(), X, X + 1)
    assert difference(first, swapped)


@pytest.mark.draws
def test_set_generator_is_an_obstacle():
    def rewound(x):
        state = torch.get_rng_state()
        x = F.dropout(x)
        torch.set_rng_state(state)
        return F.dropout(x)

    assert not tape_of(lambda x: F.dropout(F.dropout(x)), X).obstacle
    assert "random generator" in tape_of(rewound, X).obstacle
    assert "random generator" in tape_of(lambda _: torch.manual_seed(1), X).obstacle


@pytest.mark.parametrize(
    "function",
    [lambda x: float(x.sum()), lambda x: x[x > 1], torch.nonzero, torch.unique],
)
def test_values_read_are_an_obstacle(function):
    obstacle = tape_of(function, X).obstacle
    assert "it waits for the device" in obstacle
    assert re.search(rf"\(line \d+ of {re.escape(__name__)}\)", obstacle)
    assert not tape_of(lambda x: x[torch.tensor([0, 1])], X).obstacle


def test_returned_values_are_compared():
    """A replay returns those of the capture; tensors are on the tape already."""

    def returning(value):
        tape = Tape(HOST, [X])
        tape.add_returned({"y": X, "beside": [value]})
        return tape

    for value, other in ((1, 2), (1, True), (0.0, -0.0), ("a", None)):
        assert difference(returning(value), returning(other))
        assert not difference(returning(value), returning(value))
        assert not returning(value).obstacle
    assert "returns a object" in returning(object()).obstacle


@pytest.mark.draws
def test_recording_repeats_with_other_rows():
    """The backward pass, views, draws and writes in place, too."""
    module = nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.ReLU(), nn.Linear(4, 2)
    )
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    rows = torch.randn(5, 3)

    def run(x):
        loss = module(x).t().square().mean()
        loss.backward()
        losses.append(loss.detach())

    losses = []
    recording = tape_of(run, rows, tape=RepeatableTape)
    expected_module = copy.deepcopy(module)
    for parameter, original in zip(
        expected_module.parameters(), module.parameters(), strict=True
    ):
        parameter.grad = original.grad.clone()
    others = torch.randn(5, 3)
    torch.manual_seed(9)
    rows.copy_(others)
    recording.replay()
    replayed = losses[0].clone()
    module, replayed_module = expected_module, module
    torch.manual_seed(9)
    run(others)
    assert torch.equal(losses[-1], replayed)
    for expected, found in zip(
        [*module.parameters(), *module.buffers()],
        [*replayed_module.parameters(), *replayed_module.buffers()],
        strict=True,
    ):
        assert torch.equal(found, expected)
        if expected.grad is not None:
            assert torch.equal(found.grad, expected.grad)


def test_recording_keeps_a_frozen_number():
    holder = {"factor": 2.0}
    rows = torch.ones(2)
    results = []
    recording = tape_of(
        lambda x: results.append(x * holder["factor"]), rows, tape=RepeatableTape
    )
    holder["factor"] = 3.0
    rows.fill_(10)
    recording.replay()
    assert results[0].tolist() == [20, 20]
