"""The skeleton of all loops, on a loop of no library; the rows of a library's batch."""

from __future__ import annotations

import contextvars
import dataclasses
import random
import threading
import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch
from harness.oracle import assert_gradients, seeded
from torch import nn

from scatterpar import ScatterOnceParallel
from scatterpar.batch.markers import Rows
from scatterpar.loops.loop import Loop
from scatterpar.loops.modules import Modules
from scatterpar.loops.rows import as_rows, num_rows

pytestmark = pytest.mark.draws

IMAGES = torch.zeros(3, 5)
BOXES = [{"boxes": torch.zeros(n, 4)} for n in (2, 0, 3)]
TEXTS = ["a", "b", "c"]


@pytest.mark.parametrize(
    "entries",
    [TEXTS, tuple(TEXTS), [1, 2, 3], BOXES],
    ids=["texts", "a tuple", "numbers", "dicts"],
)
def test_list_with_entry_per_row_is_marked(entries):
    batch = as_rows({"images": IMAGES, "more": [entries, IMAGES]})
    assert isinstance(batch["more"][0], Rows)
    assert batch["more"][0].entries == list(entries)
    assert batch["images"] is batch["more"][1] is IMAGES


@dataclasses.dataclass
class Documents:
    number: int
    texts: list
    parts: dict


def test_rows_in_a_dataclass():
    batch = as_rows(Documents(7, TEXTS, {"images": IMAGES, "boxes": BOXES}))
    assert isinstance(batch.texts, Rows)
    assert isinstance(batch.parts["boxes"], Rows)
    assert batch.number == 7
    assert num_rows(batch) == 3


@pytest.mark.parametrize(
    "batch",
    [
        # a loader's batch of two rows has two columns
        [torch.zeros(2, 5), torch.zeros(2)],
        [torch.zeros(2, 5), ["a", "b"]],
        [{"x": torch.zeros(2)}, {"x": torch.zeros(2)}],  # two views
        [["a", "b"], ["c", "d"]],
    ],
    ids=["tensors", "a tensor and texts", "dicts", "texts"],
)
def test_list_of_columns_is_not_rows(batch):
    assert isinstance(as_rows(batch), list)


def test_modules_keep_their_order_whatever_their_names():
    """A Trainer may have two networks of a class, also of one like ``nn.Module``'s."""
    names = ["Net", "double", "Net"]
    parts = [torch.nn.Identity() for _ in names]
    modules = Modules(zip(names, parts, strict=True))
    assert [*modules.children()] == parts
    assert [name for name, _ in modules.named_children()] == [
        *("Net", "double_", "Net_"),
    ]
    assert modules[1] is parts[1]


# --- the skeleton ---

STEP = contextvars.ContextVar("STEP", default=0)
TIMES = 4  # calls of a step
ROWS = 12


class Owner:
    """As a user's Trainer: its step function writes what it likes."""

    def __init__(self):
        with seeded():
            self.model = nn.Linear(3, 1).double()
        self.calls = 0
        self.sizes = []
        self.meter = SimpleNamespace(total=0)
        self.raises_at = None
        self.most_rows = ROWS

    def step(self, rows):
        self.calls += 1
        self.sizes.append(len(rows))
        self.meter.total += len(rows)
        STEP.set(STEP.get() + 1)
        if len(rows) > self.most_rows:
            raise torch.OutOfMemoryError("out of memory")
        if self.calls == self.raises_at:
            raise LookupError("the step function")
        return self.model(rows).square().mean()


class OfOwner(Loop):
    function = "Owner.step"
    remedies = "Pass count= to the loop."
    once_per_batch = "count batches"

    def __init__(self, owner, device_ids, accum=TIMES // 2):
        super().__init__()
        self.owner = owner
        self.others = []
        self.begin(torch.device("cpu"))
        work = Modules([("Model", owner.model)])
        self.engine = ScatterOnceParallel(work, accum, device_ids)
        self.let_take_turns([owner.step])

    def owners(self):
        return [self.owner]

    def beside(self):
        return self.others

    def replicated_modules(self):
        return [self.owner.model]

    def call(self, work, rows):
        """The loss of a micro-batch."""
        with self.in_turn(self.loan_of(work), self.device_of(work)):
            return self.owner.step(rows)


OfOwner.__module__ = "scatterpar.loops.of_owner"  # no object of the user's


def batch():
    with seeded(1):
        return torch.randn(ROWS, 3, dtype=torch.float64)


def step(loop, **options):
    """A step of the loop, and its backward pass."""
    loss = loop.step({"work": loop.call, "rows": batch()}, **options)
    loss.backward()
    return loss


def test_calls_are_those_of_accumulation(devices):
    """On the user's own object, in the order of the rows; a look leaves nothing."""
    owner, stock = Owner(), Owner()
    loop = OfOwner(owner, devices(2))
    token = STEP.set(0)
    for _ in range(2):
        loss = step(loop)
    calls = STEP.get()
    for _ in range(2):
        expected = sum(stock.step(rows) for rows in batch().chunk(TIMES)) / TIMES
        expected.backward()
    STEP.reset(token)
    loop.close()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-10, atol=0)
    gradients = {n: p.grad for n, p in stock.model.named_parameters()}
    assert_gradients(owner.model, gradients)
    assert (owner.calls, owner.sizes) == (stock.calls, stock.sizes)
    assert owner.meter == stock.meter
    assert calls == 2 * TIMES


def test_numbers_of_calls_are_told_once(devices):
    loop = OfOwner(Owner(), devices(2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            step(loop)
    loop.close()
    (text,) = [str(warning.message) for warning in caught]
    assert "Owner.step writes self.calls" in text
    assert f"{TIMES} times in this batch" in text
    assert "count batches" in text


@pytest.mark.filterwarnings("error")
def test_numbers_of_a_single_call_are_not_told():
    loop = OfOwner(Owner(), ["cpu"], accum=1)
    step(loop)
    loop.close()


class Beside:
    def __init__(self):
        self.seen = []


@pytest.mark.filterwarnings("ignore:Owner.step writes")
def test_look_restores_what_is_beside_the_owner(devices):
    """Such as data sets and callbacks, to which nothing refers."""
    owner = Owner()
    beside = Beside()
    found = weakref.ref(beside)
    inner = owner.step

    def counted(rows):
        found().seen.append(len(rows))
        return inner(rows)

    owner.step = counted
    loop = OfOwner(owner, devices(2))
    loop.others = [beside]
    step(loop)
    loop.close()
    assert beside.seen == owner.sizes == [ROWS // TIMES] * TIMES


@pytest.mark.filterwarnings("error", "ignore:Owner.step writes")
def test_look_begins_each_call_with_its_numbers(devices, caplog):
    """Else the parts of a look have another loss than all its rows at once."""
    caplog.set_level("DEBUG", "scatterpar")
    owner = Owner()
    inner = owner.step
    owner.step = lambda rows: inner(rows) * owner.calls
    loop = OfOwner(owner, devices(2))
    step(loop)
    loop.close()
    assert owner.calls == TIMES
    assert "look 1 at Owner.step" in caplog.text
    assert "inconclusive" not in caplog.text


@pytest.mark.filterwarnings("ignore:Owner.step writes")
def test_failed_step_ends_as_one_that_succeeds(devices):
    """Nothing of its calls is lent, or waits for the next step."""
    owner = Owner()
    loop = OfOwner(owner, devices(2))
    step(loop)
    owner.raises_at = owner.calls + TIMES // 2
    before = [*owner.model.parameters()]
    values = [parameter.grad.clone() for parameter in before]
    ended = []
    end_step = loop.lending.end_step
    loop.lending.end_step = lambda: (ended.append(1), end_step())
    with pytest.raises(LookupError):
        step(loop)
    assert ended == [1]
    assert all(
        parameter is other
        for parameter, other in zip(before, owner.model.parameters(), strict=True)
    )
    for parameter, value in zip(before, values, strict=True):
        assert torch.equal(parameter.grad, value)
    owner.raises_at = None
    step(loop)
    loop.close()
    assert owner.sizes[-TIMES:] == [ROWS // TIMES] * TIMES


def norm_of(owner):
    gradient = owner.model.weight.grad
    return 0.0 if gradient is None else float(gradient.norm())


def clip(owner):
    nn.utils.clip_grad_norm_(owner.model.parameters(), 0.1)


def zero(owner):
    owner.model.zero_grad()


def zero_in_place(owner):
    owner.model.zero_grad(set_to_none=False)


def inner_backward(owner):
    owner.model.weight.square().sum().backward()


def add(owner):
    if owner.model.bias.grad is not None:
        owner.model.bias.grad += 1


def smooth(owner):
    gradient = owner.model.weight.grad
    if gradient is not None:
        owner.model.bias.grad = gradient.mean()[None]


GRADIENTS = [norm_of, clip, zero, zero_in_place, add, smooth]


@pytest.mark.parametrize("read", GRADIENTS, ids=lambda read: read.__name__)
@pytest.mark.filterwarnings("ignore:Owner.step writes")
def test_gradients_of_earlier_calls_are_refused(read, devices):
    """One device has the sum of the calls before; replicas have parts of it."""
    owner = Owner()
    inner = owner.step
    owner.step = lambda rows: (read(owner), inner(rows))[1]
    loop = OfOwner(owner, devices(2))
    words = r"Owner\.step reads or writes \.grad of the parameter '.*(weight|bias)'"
    with pytest.raises(ValueError, match=words) as caught:
        step(loop)
    assert loop.gradients_at in str(caught.value)
    assert all(parameter.grad is None for parameter in owner.model.parameters())
    owner.step = inner
    step(loop)
    loop.close()
    assert all(p.grad is not None for p in owner.model.parameters())


def on_gradient(leaf):
    return leaf.register_hook(lambda gradient: gradient * 2)


def double(leaf):
    leaf.grad.mul_(2)


def on_accumulated(leaf):
    return leaf.register_post_accumulate_grad_hook(double)


@pytest.mark.parametrize("register", [on_gradient, on_accumulated])
@pytest.mark.filterwarnings("ignore:Owner.step writes")
def test_hooks_that_calls_leave_are_refused(register, devices):
    """One replica had them, and later steps of it, too, as if nothing were wrong."""
    owner = Owner()
    inner = owner.step
    weight = owner.model.weight
    owner.step = lambda rows: (register(owner.model.weight), inner(rows))[1]
    loop = OfOwner(owner, devices(2))
    with pytest.raises(ValueError, match=r"a hook on the parameter '.*weight'"):
        step(loop)
    assert not weight._backward_hooks
    assert not weight._post_accumulate_grad_hooks
    # One that is removed in the call, and one of before the training.
    owner.step = lambda rows: (register(owner.model.weight).remove(), inner(rows))[1]
    step(loop)
    plain = weight.grad.clone()
    weight.grad = None
    register(weight)
    step(loop)
    loop.close()
    torch.testing.assert_close(weight.grad, 2 * plain)


@pytest.mark.parametrize("number", [0, 2], ids=["the first call", "a later call"])
def test_backward_pass_in_a_call_is_refused(number, devices):
    owner = Owner()
    inner = owner.step

    def step_with_backward(rows):
        loss = inner(rows)
        if owner.calls > number:
            inner_backward(owner)
        return loss

    owner.step = step_with_backward
    loop = OfOwner(owner, devices(2))
    loop.engine.loop = loop.options()
    with pytest.raises(ValueError, match=r"backward\(\) inside|reads or writes \.grad"):
        step(loop, is_checked=False)
    loop.close()
    assert all(parameter.grad is None for parameter in owner.model.parameters())


@pytest.mark.filterwarnings("ignore:Owner.step writes")
@pytest.mark.parametrize("keeps", [False, True], ids=["zeroed", "accumulated"])
def test_first_call_finds_earlier_steps_gradients(keeps, devices):
    """It finds ``None`` after ``zero_grad``, and later calls find that there is one."""
    owner = Owner()
    inner = owner.step
    there = []

    def noting(rows):
        there.append(owner.model.weight.grad is not None)
        # Such as a library that moves its modules where they are.
        owner.model.to(rows.device)
        assert there[-1] is False or owner.model.weight.grad.shape == (1, 3)
        return inner(rows)

    owner.step = noting
    loop = OfOwner(owner, devices(2))
    step(loop)
    there.clear()
    if not keeps:
        owner.model.zero_grad()
    step(loop)
    loop.close()
    assert there == [keeps, True, True, True]


def write_in_place(owner, rows):
    owner.factor.mul_(2)


def bind(owner, rows):
    owner.factor = owner.factor * 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("write", [write_in_place, bind])
def test_tensor_of_an_earlier_loss_is_bound_anew(write, devices):
    """The backward pass that needs its value may run after the write."""
    owner, stock = Owner(), Owner()
    written = threading.Event()

    def step_of(owner, waits):
        inner = owner.step
        owner.factor = torch.ones(1, dtype=torch.float64)

        def scaled(rows):
            loss = (inner(rows) * owner.factor).sum()
            if owner.calls == 1 and waits:
                loss.register_hook(lambda _: (written.wait(60), None)[1])
            write(owner, rows)
            if owner.calls == 2:
                written.set()
            return loss

        return scaled

    owner.step, stock.step = step_of(owner, True), step_of(stock, False)
    loop = OfOwner(owner, devices(2))
    if write is write_in_place:
        with pytest.raises(RuntimeError, match="modified by an inplace") as caught:
            step(loop, is_checked=False)
        assert "self.weights = new" in "".join(caught.value.__notes__)
    else:
        step(loop, is_checked=False)
        for rows in batch().chunk(TIMES):
            (stock.step(rows) / TIMES).backward()
        gradients = {n: p.grad for n, p in stock.model.named_parameters()}
        assert_gradients(owner.model, gradients)
    loop.close()


def write_data(owner, rows):
    owner.factor.data.mul_(2)


def bind_data(owner, rows):
    owner.factor.data = owner.factor.data * 2


def write_array(owner, rows):
    owner.factor.numpy()[:] *= 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("write", [write_in_place, write_data, bind_data, write_array])
def test_shared_values_outlive_backward_passes(write, devices, caplog):
    """Autograd sees the first of these writes; the others made wrong gradients."""
    caplog.set_level("INFO", "scatterpar")
    owner, stock = Owner(), Owner()

    def step_of(owner):
        inner = owner.step
        owner.factor = torch.ones(1, dtype=torch.float64)

        def scaled(rows):
            write(owner, rows)
            return (inner(rows) * owner.factor).sum()

        return scaled

    owner.step, stock.step = step_of(owner), step_of(stock)
    loop = OfOwner(owner, devices(2))
    step(loop)
    assert "a turn is SUBSTEP" in caplog.text
    for rows in batch().chunk(TIMES):
        (stock.step(rows) / TIMES).backward()
    gradients = {n: p.grad for n, p in stock.model.named_parameters()}
    assert_gradients(owner.model, gradients)
    loop.close()


@pytest.mark.filterwarnings("ignore")
def test_own_writes_disturb_no_other_replica(devices, caplog):
    caplog.set_level("INFO", "scatterpar")
    owner = Owner()
    owner.model.register_buffer("seen", torch.zeros(()))
    inner = owner.step

    def counting(rows):
        owner.model.seen += 1  # handed on, in memory of each replica's own
        return inner(rows)

    owner.step = counting
    loop = OfOwner(owner, devices(2))
    step(loop)
    assert "a turn is" not in caplog.text
    loop.functions.written = {0: torch.device("meta")}  # of none
    assert not loop.disturbs()
    loop.functions.written = {0: torch.device("cpu")}
    assert loop.disturbs()
    loop.close()
    alone = OfOwner(owner, devices(1), TIMES)
    alone.functions.written = loop.functions.written
    assert not alone.disturbs()
    alone.close()


DRAWS = {
    "once": lambda rows: random.random(),
    "by row": lambda rows: [random.random() for _ in rows],
}


@pytest.mark.draws
@pytest.mark.parametrize("name", DRAWS)
def test_loss_that_compares_rows_and_draws(name, devices):
    """It was taken for a mean after any draw of Python's.

    Calls that draw other numbers than one call for all rows cannot be compared.
    """
    owner = Owner()

    def spread(rows):
        DRAWS[name](rows)
        return owner.model(rows).std()

    owner.step = spread
    loop = OfOwner(owner, devices(2))
    if name == "once":
        with pytest.raises(ValueError, match="is not the mean of the losses"):
            step(loop)
    else:
        step(loop)
        with pytest.warns(UserWarning, match="generators of Python or NumPy"):
            step(loop)
    loop.close()


@pytest.mark.filterwarnings("ignore")
def test_tries_that_ran_out_of_memory_leave_nothing(devices):
    owner = Owner()
    owner.most_rows = 2
    loop = OfOwner(owner, devices(2), accum="auto")
    step(loop)
    loop.close()
    assert owner.sizes == [2] * 6
    assert (owner.calls, owner.meter.total) == (6, ROWS)


def test_functions_of_libraries_take_no_turns(devices, caplog):
    caplog.set_level("INFO", "scatterpar")
    loop = OfOwner(Owner(), devices(2))
    assert "Owner.step is called for one micro-batch at a time" in caplog.text
    assert (loop.options().takes_turns, loop.options().lends) == (True, True)
    loop.let_take_turns([])
    assert (loop.options().takes_turns, loop.options().lends) == (False, False)
    loop.close()


def test_refusal_has_the_remedies_of_the_loop(devices):
    owner = Owner()
    owner.step = lambda rows: owner.model(rows).square().sum()
    loop = OfOwner(owner, devices(2))
    with pytest.raises(ValueError, match=r"Owner\.step.*\n.*Pass count= to the loop"):
        step(loop)
    loop.close()
