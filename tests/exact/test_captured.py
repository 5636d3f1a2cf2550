"""What a captured sub-step could get wrong: found before a step commits it, or named on
the page of limits.

On the CPU the operators of a tape run again; with an accelerator (``test_simulated.py``
runs this on a simulated one) sub-steps are really captured.
"""

from __future__ import annotations

import array
import collections
import contextvars
import logging
import random
import re
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from harness.models import Of
from harness.oracle import build, randn
from harness.pages import read
from torch import nn

from scatterpar import ScatterOnceParallel
from scatterpar.batch.nested import MAX_ENTRIES
from scatterpar.objects.walk import LONGEST_CHAIN

pytestmark = [pytest.mark.cuda, pytest.mark.nullcuda, pytest.mark.draws]

ROWS, FEATURES, ACCUM = 48, 6, 6
CHANGE = 9  # the step before which something changes: the next look at all is the 16th
STEPS = 11


def home():
    here = torch.accelerator.is_available()
    return torch.device(torch.accelerator.current_accelerator().type if here else "cpu")


def two_places():
    """Two replicas, on two devices; on the same one if there is one accelerator."""
    if not torch.accelerator.is_available():
        return ["cpu:0", "cpu:1"]
    return [0, 1] if torch.accelerator.device_count() > 1 else [0, 0]


class Program(NamedTuple):
    """What is trained.

    Attributes:
        call: the forward pass, of the module and its inputs.
        change: what changes before the step ``CHANGE``; gets the module.
        criterion: of the output and the targets.
        table: a buffer of the module.
    """

    call: Callable[[nn.Module, torch.Tensor], torch.Tensor]
    change: Callable[[nn.Module], Any] = lambda module: None
    criterion: Callable[[Any, Any], Any] = lambda output, _: output.square().mean()
    table: torch.Tensor | None = None


def plain_call(module, x):
    return module.body(x)


def trained(program, graphs, places):
    """Losses, gradients, and what was said of graphs in each step."""
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    parts = {"body": nn.Linear(FEATURES, FEATURES)}
    if program.table is not None:
        parts["table"] = nn.Buffer(program.table.clone())
    module = build(lambda: Of(program.call, **parts)).to(home())
    inputs = randn(ROWS, FEATURES).to(home())
    results, reports = [], []
    options = {"graphs": graphs, "verify": False}
    with ScatterOnceParallel(module, ACCUM, places, **options) as engine:
        for step in range(1, STEPS + 1):
            if step == CHANGE:
                program.change(module)
            module.zero_grad()
            loss = engine.forward_backward(inputs, None, program.criterion)
            results.append([loss, *(p.grad.clone() for p in module.parameters())])
            reports.append(engine.last_step.graphs)
    return results, reports


def in_context(*arguments):
    """What a value is changed to in a context variable, is not seen later."""
    return contextvars.copy_context().run(trained, *arguments)


def unequal_steps(make, places):
    """The steps that do not have the bits of eager ones, and what was said of graphs.

    ``make()`` returns the program.
    """
    results, reports = in_context(make(), True, places)
    expected, _ = in_context(make(), False, places)
    unequal = [
        step
        for step, pair in enumerate(zip(results, expected, strict=True), 1)
        if not all(map(torch.equal, *pair))
    ]
    return unequal, reports


# --- two views that begin at one address ---


VIEWS = {}


def views(make):
    """``make()`` returns a table, and two functions of the table that ``make`` uses."""
    VIEWS[make.__name__] = make
    return make


def by_view(first, second, use, table=None):
    """Makes both views of the table, or of an intermediate result, in each call; the
    program uses the second one after the change.
    """
    chosen = [0]

    def call(module, x):
        hidden = module.body(x)
        base = hidden.detach() if table is None else module.table
        pair = first(base), second(base)
        return use(hidden, pair[chosen[0]])

    return Program(call, lambda _: chosen.append(chosen.pop() + 1), table=table)


SQUARE = torch.arange(FEATURES * FEATURES).view(FEATURES, FEATURES) / 7.0


@views
def a_mask_or_its_transpose():
    return by_view(lambda t: t[:], lambda t: t.t(), torch.matmul, SQUARE)


@views
def a_prefix_of_another_length():
    return by_view(
        lambda t: t[:4], lambda t: t[:2], lambda h, t: h * t.amax(), SQUARE[0]
    )


@views
def every_second_number():
    """Both have the same shape."""
    return by_view(
        lambda t: t[:3], lambda t: t[::2], lambda h, t: h * t.sum(), SQUARE[0]
    )


@views
def other_numbers_of_the_same_bits():
    return by_view(
        lambda t: t.view(torch.float64),
        lambda t: t.view(torch.int64),
        lambda h, t: h * t.double().sign().sum(),
        -SQUARE[0],
    )


@views
def a_result_or_its_transpose():
    return by_view(
        lambda h: h.reshape(-1)[:16].view(4, 4),
        lambda h: h.reshape(-1)[:16].view(4, 4).t(),
        lambda h, t: h * t.cumsum(0).amax(),
    )


@views
def labels_or_a_view():
    chosen = [0]

    def criterion(output, _):
        weights = output.detach()
        pair = weights[:, :4], weights[:, :2]
        return output.sum(1).mul(pair[chosen[0]].sum()).mean()

    return Program(plain_call, lambda _: chosen.append(chosen.pop() + 1), criterion)


@views
def a_list_of_views():
    """The operator gets its tensors in a list."""
    return by_view(
        lambda t: t[:, :3],
        lambda t: t.t()[:, :3],
        lambda h, t: h * torch.cat([t, t]).cumsum(0).amax(),
        SQUARE,
    )


@pytest.mark.parametrize("name", VIEWS)
def test_another_view_is_found(name):
    """In the step that begins with it, before anything is committed."""
    unequal, reports = unequal_steps(VIEWS[name], two_places())
    assert unequal == []
    assert "replayed" in reports[CHANGE - 2]
    assert reports[CHANGE - 1].startswith("eager: ")


# --- what differs by device ---


def by_replica(is_of_master):
    """A program whose replicas read factors of their own; one of them changes."""
    changed = []  # the address of the master's parameter

    def call(module, x):
        is_master = module.body.weight.data_ptr() in changed
        is_changed = bool(changed) and is_master == is_of_master
        return module.body(x) * (2.0 if is_changed else 1.0)

    return Program(call, lambda module: changed.append(module.body.weight.data_ptr()))


@pytest.mark.parametrize("is_of_master", [True, False], ids=["first", "second"])
def test_change_on_one_device_is_found_in_turn(is_of_master):
    """Within as many steps as there are replicas."""
    places = two_places()
    if len({*places}) == 1:
        pytest.skip("replicas on one device read the same values")
    unequal, reports = unequal_steps(lambda: by_replica(is_of_master), places)
    assert len(unequal) < len(places)
    assert all("replayed" in report for report in reports[1 : CHANGE - 1])
    is_undone = [report.startswith("eager: ") for report in reports]
    assert any(is_undone[CHANGE - 1 :][: len(places)])


def test_replicas_proved_in_turn_and_sometimes_all():
    """All in the step after the capture, and in steps 1, 2, 4, 8, …"""
    places = two_places()
    _, reports = in_context(Program(plain_call), True, places)
    total = ACCUM * len(places)
    proved = [total - int(report.split()[0]) for report in reports]
    assert proved[1:] == [2, 1, 2, 1, 1, 1, 2, 1, 1, 1]


# --- what no replay moves ---

MOVING = {}
PERIOD = 25  # so that the first calls, and those that are on tape, are equal


def moving(make):
    """``make()`` returns a function that counts its calls."""
    MOVING[make.__name__] = make
    return make


def counting(make):
    """A program of which few calls differ from the others."""
    count = make()

    def call(module, x):
        hidden = module.body(x)
        if count() % PERIOD == 0:
            hidden = hidden * 2.0
        return hidden

    return Program(call)


@moving
def a_variable_of_the_function_around():
    calls = 0

    def count():
        nonlocal calls
        calls += 1
        return calls

    return count


@moving
def an_attribute_beside_a_lock():
    class Locked:
        def __init__(self):
            self.lock = threading.Lock()
            self.calls = 0

        def __call__(self):
            with self.lock:
                self.calls += 1
            return self.calls

    return Locked()


@moving
def a_number_of_the_thread():
    local = threading.local()

    def count():
        local.calls = getattr(local, "calls", 0) + 1
        return local.calls

    return count


@moving
def a_context_variable():
    variable = contextvars.ContextVar("calls_of_a_test", default=0)

    def count():
        variable.set(variable.get() + 1)
        return variable.get()

    return count


@moving
def an_attribute_of_a_class():
    class Calls:
        number = 0

    def count():
        Calls.number += 1
        return Calls.number

    return count


def in_entry(numbers):
    """Counts in the first entry."""

    def count():
        numbers[0] += 1
        return int(numbers[0])

    return count


@moving
def a_list():
    return in_entry([0])


@moving
def an_array_of_numpy():
    return in_entry(np.zeros(1, int))


@moving
def an_array_of_python():
    return in_entry(array.array("i", [0]))


@moving
def a_tensor_of_the_host():
    return in_entry(torch.zeros(1, dtype=torch.int64))


@moving
def a_generator_of_python():
    def numbers():
        calls = 0
        while True:
            calls += 1
            yield calls

    values = numbers()
    return lambda: next(values)


@moving
def the_length_of_a_deque():
    calls = collections.deque()

    def count():
        calls.append(0)
        return len(calls)

    return count


@moving
def a_default_argument():
    def count(calls=[0]):  # noqa: B006 - that is the point
        calls[0] += 1
        return calls[0]

    return count


@moving
def a_slot():
    class Calls:
        __slots__ = ("number",)

    calls = Calls()
    calls.number = 0

    def count():
        calls.number += 1
        return calls.number

    return count


@moving
def records_of_a_logger():
    class Counted(logging.Handler):
        records = 0

        def emit(self, _):
            self.records += 1

    log = logging.getLogger("tests.counted")
    handler = Counted()
    log.handlers[:] = [handler]
    log.propagate = False
    log.setLevel("INFO")

    def count():
        log.info("a call")
        return handler.records

    return count


def drawn(draw):
    """As if it counted: few draws are below the others."""
    return lambda: int(draw() < 1 / PERIOD) - 1


@moving
def a_draw_of_python():
    return drawn(random.random)


@moving
def a_draw_of_numpy():
    return drawn(np.random.uniform)


@moving
def a_generator_of_numpy():
    return drawn(np.random.default_rng(0).uniform)


def assert_never_captured(make):
    with pytest.warns(UserWarning, match="graphs=True") as told:
        unequal, reports = unequal_steps(make, [str(home())])
    assert unequal == []
    assert len(told) == 1
    assert not any("replayed" in report for report in reports[1:]), reports


@pytest.mark.parametrize("name", MOVING)
def test_what_calls_move_is_never_captured(name):
    assert_never_captured(lambda: counting(MOVING[name]))


def with_own_generator(*, is_seeded, device=None):
    generator = torch.Generator(device or home())

    def call(module, x):
        if is_seeded:
            generator.manual_seed(5)
        noise = torch.randn(
            FEATURES, generator=generator, dtype=x.dtype, device=generator.device
        )
        return module.body(x) + noise.to(x.device)

    return Program(call)


@pytest.mark.parametrize("place", ["host", "device"])
@pytest.mark.parametrize("is_seeded", [True, False])
def test_own_generators_are_never_captured(place, is_seeded):
    """A replay draws on from where the generator is, and seeds nothing."""
    device = "cpu" if place == "host" else None
    assert_never_captured(
        lambda: with_own_generator(is_seeded=is_seeded, device=device)
    )


CONSTANTS = {
    "torch.tensor": lambda x: torch.maximum(x, torch.tensor(0.0, device=x.device)),
    "new_tensor": lambda x: x * x.new_tensor([1.0] * FEATURES),
    "an index": lambda x: x[:, [0, 2]],
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_numbers_of_the_host_are_told_with_their_line(name):
    """Called "computes something else" before, or waiting for the device."""
    if home().type == "cpu":
        return  # they are no copies there

    def make():
        return Program(lambda module, x: CONSTANTS[name](module.body(x)))

    with pytest.warns(match="copies numbers of the host to the device") as told:
        unequal, _ = unequal_steps(make, [str(home())])
    assert unequal == []
    assert re.search(rf"\(line \d+ of {re.escape(__name__)}\)", str(told[0].message))


def test_hook_that_comes_later_is_seen():
    """It runs no operator: the capture would be repeated, and the hook left out."""
    shapes = []

    def make():
        shapes.clear()
        return Program(
            plain_call,
            lambda module: module.body.register_forward_hook(
                lambda _, __, output: shapes.append(output.shape) and None
            ),
        )

    with pytest.warns(match="writes or takes from"):
        results, _ = in_context(make(), True, two_places())
    assert len(results) == STEPS
    assert len(shapes) == ACCUM * len(two_places()) * (STEPS - CHANGE + 1)


# --- what nothing shows ---

# Kinds of state that neither an operator nor a generator shows, as the page names them.
UNSEEN = [
    f"more than {LONGEST_CHAIN} levels",
    f"more than {MAX_ENTRIES:,} entries",
    "a global variable of a library",
    "`sys.modules`",
    "`os.environ`",
    "`functools.lru_cache`",
    "a weak reference",
    "inside of a context variable",
    "NumPy",
    "the clock",
    "`os.urandom`",
]


@pytest.mark.parametrize("words", UNSEEN)
def test_page_names_what_nothing_shows(words):
    _, _, text = read("docs/cuda-graphs.md").partition(
        "## What a CUDA graph does not notice\n"
    )
    assert words in text.partition("\n## ")[0]
