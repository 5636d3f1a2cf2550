"""One question of many tests: is this what plain torch gives on one device?

A ``Case`` says what is trained and on what, a runner says how, and ``agree`` takes the
steps:

    agree(Case(lambda: nn.Linear(FEATURES, CLASSES)), "engine", ["cpu:0", "cpu:1"])

Three modules start alike (``Trained``)::

    module   is trained by the runner
    twin     is trained by plain torch on the whole batch: losses, gradients and
             parameters of ``module`` must be its
    first    sees only what replica 0 sees, in its micro-batches: buffers must be its

A step is compared in four: ``change``, what a user does before it; ``plain_step``, what
is expected; ``assert_same``; and ``update``, what an optimizer does after it.
"""

import contextlib
import copy
import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.isolation import Memories, guarded
from harness.models import CLASSES, FEATURES
from harness.oracle import (
    RELATIVE,
    assert_alike,
    assert_close,
    build,
    call,
    loss_of,
    randint,
    randn,
    seeded,
)
from harness.plain import cut, joined, map_atoms, tensors
from harness.rank_processes import run_on_ranks
from scatterpar import DataParallelCriterion, DataParallelModel, ScatterOnceParallel

BATCH = randn(9, FEATURES), randint(CLASSES, 9)  # inputs, labels
LAYOUTS = {
    "one": ["cpu"],
    # one replica shares the master's memory, one has its own
    "mixed": ["cpu:0", "cpu:1", "cpu:0"],
    "shared": ["cpu"] * 3,
    "virtual": ["cpu:0", "cpu:1", "cpu:2"],
    "elsewhere": ("cpu:1", torch.device("cpu:0"), "cpu:1"),
}

# The column "default run" of a case: its runners that are not slow. With "one" the
# engine runs on one replica, too.
COPIES = ("engine", "inference")
USUAL = (*COPIES, "pair")
BROAD = (*COPIES, "whole batch")
EVERY_WAY = (
    *BROAD,
    "pair",
    "one",
    "loss",
    "check",
    "guarded",
    "guarded pair",
)
ON_RANKS = {  # how many processes, and which runner each of them has
    "1 rank": (1, "engine"),
    "2 ranks": (2, "engine"),
    "3 ranks": (3, "engine"),
    "2 ranks, graphs": (2, "graphs"),
}
CONTRACT = ("engine", "loss", "pair")


@dataclass(frozen=True)
class Case:
    """What is trained, and on what.

    Attributes:
        model: makes the module, the same one each time.
        batch: inputs and targets.
        criterion: makes the criterion for a module; ``None`` where that computes the
            loss.
        plain: inputs and targets as plain torch takes them, if those of ``batch`` have
            markers.
        changes: what a user does to the module before the second step, the third, …
        accum: sub-steps. A model that reads what its forward pass has written takes 1:
            plain torch runs one.
        by_share: each micro-batch is normalised on its own, or changes the state that
            the next one finds, so plain torch takes them in turn, and begins each share
            with the same state.
        relative: how far rounding may go.
        keep_dtypes: the parameters stay in the dtypes that ``model`` gives them, not
            float64.
        options: further ones of ``forward_backward``, or of the pair's criterion.
        engine: further options of the engine.
        unless: runners that are not for this case.
        only: the runners that are, if not all.
        default_run: the runners of the default run, on mixed memories, and numbers of
            ranks; others are slow.
    """

    model: Callable[[], Any]
    batch: Any = BATCH
    criterion: Callable[[Any], Any] = lambda _: nn.CrossEntropyLoss()
    plain: Any = None
    changes: Sequence[Callable[[Any], object]] = ()
    accum: int = 2
    by_share: bool = False
    relative: float = RELATIVE
    keep_dtypes: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    unless: Sequence[str] = ()
    only: Sequence[str] = ()
    default_run: Sequence[str] = COPIES

    def build(self):
        if not self.keep_dtypes:
            return build(self.model)
        with seeded():
            return self.model()

    @property
    def count(self):
        """The number of rows: of the targets' first tensor, or of the inputs'."""
        batch = self.batch if self.plain is None else self.plain
        sizes = [len(tensor) for tensor in tensors(batch) if tensor.ndim]
        return sizes[0]

    def rows(self, rows):
        """Copies of these rows of inputs and targets, as plain torch takes them."""

        def take(atom):
            if not isinstance(atom, Tensor):
                return atom
            if not atom.ndim or rows == range(self.count):
                return atom.clone()
            # A slice keeps the memory format.
            return atom[rows.start : rows.stop].clone()

        batch = self.batch if self.plain is None else self.plain
        return map_atoms(take, batch)

    def all(self):
        return self.rows(range(self.count))


# A runner yields two functions: one takes a step, the other gives the shares of so many
# rows, each of which is a list with the rows of its sub-steps.


def even_shares(case, devices):
    """The second function of a runner whose rows are cut evenly."""

    def shares_of(count):
        shares = cut(range(count), len(devices))
        return [cut(share, case.accum) for share in shares]

    return shares_of


def make_engine(case, module, devices, **options):
    options = {"accum": case.accum, **case.engine, **options}
    return ScatterOnceParallel(module, device_ids=devices, **options)


@contextlib.contextmanager
def by_engine(case, module, criterion, devices, **engine_options):
    with make_engine(case, module, devices, **engine_options) as engine:

        def step():
            return engine.forward_backward(*case.batch, criterion, **case.options)

        yield step, even_shares(case, devices)


@contextlib.contextmanager
def by_loss(case, module, criterion, devices):
    """``engine.loss`` and ``backward``."""
    with make_engine(case, module, devices) as engine:

        def step():
            loss = engine.loss(*case.batch, criterion, **case.options)
            loss.backward()
            return loss.detach()

        yield step, even_shares(case, devices)


@contextlib.contextmanager
def by_checked_engine(case, module, criterion, devices):
    """A check before each step leaves no trace in it."""
    with make_engine(case, module, devices) as engine:

        def step():
            check = engine.check(*case.batch, criterion, **case.options)
            assert check.passed
            return engine.forward_backward(*case.batch, criterion, **case.options)

        yield step, even_shares(case, devices)


def by_whole_batch(case, *args):
    """The criterion has all terms: it needs no ``count=`` and no ``reduction=``."""
    options = {"whole_batch": True}
    for name, value in case.options.items():
        if name not in ("count", "reduction"):
            options[name] = value
    return by_engine(replace(case, options=options), *args)


def by_graphs(*args):
    return by_engine(*args, graphs=True, verify=False)


def by_compiler(*args):
    return by_engine(*args, compile={"backend": "eager"})


@contextlib.contextmanager
def by_pair(case, module, criterion, devices):
    dim = case.engine.get("dim", 0)
    model = DataParallelModel(module, devices, dim)
    combined = DataParallelCriterion(criterion, devices, dim)
    inputs, targets = case.batch

    def step():
        loss = combined(call(model, inputs), targets, **case.options)
        loss.backward()
        return loss.detach()

    yield step, even_shares(replace(case, accum=1), devices)


@contextlib.contextmanager
def guarded_by(runner, case, module, criterion, devices):
    """By an engine, or pair, of each step, whose operations may not mix tensors of two
    memories.

    The loss and the gradients are in the master's memory.
    """
    modules = [module, *_heads(criterion)]
    master = torch.device(devices[0])
    devices_with_rows = {torch.device(device) for device in devices[: case.count]}
    memories = Memories()  # of all steps: a module may cache what it has computed

    def step():
        memories.checked.clear()
        with (
            runner(case, module, criterion, devices) as (unguarded_step, _),
            pytest.MonkeyPatch.context() as patch,
            guarded(patch, *modules, memories=memories),
        ):
            loss = unguarded_step()
            results = [loss, *gradients_of(module)]
            owners = {memories.owner(result) for result in results}
            assert owners <= {master, None}
            assert set(memories.checked) == devices_with_rows
        return loss

    with runner(case, module, criterion, devices) as (_, shares_of):
        yield step, shares_of


def gradients_of(module):
    """The gradients that are there, of parameters and buffers."""
    gradients = []
    for _, tensor in _trained(module):
        if tensor.grad is not None:
            gradients.append(tensor.grad)
    return gradients


def _heads(criterion):
    """The modules that a criterion is, or is a method of."""
    candidates = (criterion, getattr(criterion, "__self__", None))
    return [candidate for candidate in candidates if isinstance(candidate, nn.Module)]


RUNNERS = {
    "engine": by_engine,
    "loss": by_loss,
    "check": by_checked_engine,
    "whole batch": by_whole_batch,
    "graphs": by_graphs,
    "compiled": by_compiler,
    "pair": by_pair,
    "inference": by_engine,
    "guarded": partial(guarded_by, by_engine),
    "guarded pair": partial(guarded_by, by_pair),
}


def runs(cases):
    """Each case by each runner on each layout, as parameters of a test.

    In the default run are mixed memories, and of some cases the engine on one replica;
    other layouts are slow. Copies between memories are those of the engine, so the pair
    runs on one layout more. One replica of a pair is plain torch.
    """
    layouts_of = {"engine": list(LAYOUTS), "pair": ["mixed", "virtual"]}
    parameters = []
    for name, case in cases.items():
        for runner in case.only or RUNNERS:
            if runner in case.unless or (runner == "check" and case.by_share):
                continue
            for layout in layouts_of.get(runner, ["mixed"]):
                marks = _marks_of_run(case, runner, layout)
                identity = identity_of(name, runner, layout)
                run = pytest.param(case, runner, layout, id=identity, marks=marks)
                parameters.append(run)
    return parameters


def _marks_of_run(case, runner, layout):
    is_usual = layout == "mixed" or (layout in case.default_run and runner == "engine")
    if not is_usual or runner not in case.default_run:
        return [pytest.mark.slow]
    return [pytest.mark.contract] if runner in CONTRACT else []


def runs_on_ranks(tables, slow):
    """The runs on ranks of each table's cases, as parameters of a test.

    Each case of the table ``slow`` runs on two ranks, if not in the default run.
    """
    parameters = []
    for table in tables:
        for name, case in table.CASES.items():
            for ranks, (size, runner) in ON_RANKS.items():
                marks = []
                if ranks not in case.default_run:
                    if table is not slow or ranks != "2 ranks":
                        continue
                    marks = [pytest.mark.slow]
                run = size, table.__name__, name, runner
                identity = identity_of(name, runner, f"{size}_ranks")
                parameters.append(pytest.param(*run, id=identity, marks=marks))
    return parameters


def identity_of(name, *parts):
    """The id of a test of a case; ``-k`` takes no spaces, commas and "="."""
    return "-".join([re.sub(r"[^\w.]+", "_", name), *parts])


def agree(case, runner, devices, group=None):
    """Steps of the runner, with the case's changes between them, are those of plain
    torch.

    With a process ``group`` each rank calls it, and trains the engine on its part of
    the rows. What was trained is returned, with its last gradients: all ranks must have
    the same bits. ``devices``: a list, or the name of a layout.
    """
    if isinstance(devices, str):
        devices = LAYOUTS[devices]
    if runner == "inference":
        _agree_in_inference(case, devices)
        return []
    trained = Trained(case, joins=runner == "whole batch")
    part = case
    if group is not None:
        part = part_of_rank(case, group)
        rows_of_ranks = cut(range(case.count), group.size())
        trained.rows_of_first = len(rows_of_ranks[0])
    batch_before = copy.deepcopy(part.batch)
    run = RUNNERS[runner](part, trained.module, trained.criterion, devices)
    with run as (step, shares_of):
        num_steps = 1 + max(2, len(case.changes))
        for number in range(num_steps):
            trained.change(number)
            expected = trained.plain_step(shares_of)
            trained.assert_same(step(), expected)
            trained.update(number)
    pairs = zip(tensors(part.batch), tensors(batch_before), strict=True)
    for tensor, tensor_before in pairs:
        assert torch.equal(tensor, tensor_before), "the caller's tensors were written"
    return trained.values()


def part_of_rank(case, group):
    """The case with this rank's rows."""
    rows_of_ranks = cut(range(case.count), group.size())
    batch = case.rows(rows_of_ranks[group.rank()])
    options = {"process_group": group, **case.engine}
    return replace(case, batch=batch, engine=options)


class Trained:
    """A module that a runner trains, and two that plain torch trains.

    Attributes:
        joins: the criterion gets one output, that of all rows.
        rows_of_first: the number of rows that the first rank has.
    """

    def __init__(self, case, joins):
        self.case = case
        self.joins = joins
        self.rows_of_first = case.count
        self.module = case.build()
        self.twin = case.build()
        self.first = case.build()
        self.criterion = case.criterion(self.module)
        self.plain_criterion = case.criterion(self.twin)

    def change(self, number):
        """Before step ``number``, what a user does."""
        if 0 < number <= len(self.case.changes):
            for module in (self.module, self.twin, self.first):
                self.case.changes[number - 1](module)
        self.children = list(self.module.modules())

    def plain_step(self, shares_of):
        """The loss by plain torch, whose gradients arrive in ``twin``."""
        case = self.case
        buffers = buffers_of(self.first)
        if buffers:
            share_of_first = shares_of(self.rows_of_first)[0]
            outputs_of(case, self.first, share_of_first)
        if case.by_share:
            pieces = []
            for share in shares_of(case.count):
                pieces += outputs_of(case, self.twin, share, buffers)
            put_buffers(self.twin, buffers_of(self.first))
        else:
            inputs, _ = case.all()
            pieces = [(range(case.count), call(self.twin, inputs))]
        if self.joins and len(pieces) > 1:
            outputs = [output for _, output in pieces]
            pieces = [(range(case.count), joined(outputs))]
        return _plain_loss(case, self.twin, pieces, self.plain_criterion)

    def assert_same(self, loss, expected):
        """The runner's step is that of plain torch."""
        case = self.case
        assert_close(loss, expected, "loss", case.relative)
        assert not loss.requires_grad
        are_same = list(self.module.modules()) == self.children
        assert are_same, "the user's module has other children"
        _assert_gradients(case, self.module, self.twin)
        _assert_buffers(case, self.module, self.first)
        heads = zip(_heads(self.criterion), _heads(self.plain_criterion), strict=True)
        for head, plain_head in heads:
            _assert_gradients(case, head, plain_head)

    def update(self, number):
        """After each second step: gradients of two steps add up."""
        if number % 2:
            for module in (self.module, self.twin):
                _update(module)
        pairs = zip(self.first.parameters(), self.twin.parameters(), strict=True)
        for follower, parameter in pairs:
            follower.data.copy_(parameter)

    def values(self):
        """Parameters, and gradients that are there."""
        values = [*self.module.parameters(), *gradients_of(self.module)]
        return [value.detach().to_dense() for value in values]


def on_ranks(cases, name, size, runner="engine"):
    """Ranks, each with a part of the rows, agree with plain torch, and have the same
    bits.

    ``cases`` is the module whose ``CASES`` have it: processes cannot be sent a case.
    """
    first, *following = run_on_ranks(size, _on_a_rank, cases, name, runner)
    for rank, values in enumerate(following, 1):
        for value, value_of_first in zip(values, first, strict=True):
            assert torch.equal(value, value_of_first), f"other bits on rank {rank}"


def _on_a_rank(group, cases, name, runner):
    case = importlib.import_module(cases).CASES[name]
    return agree(case, runner, ["cpu:0", "cpu:1"], group)


def _agree_in_inference(case, devices):
    """What the engine returns when it is called is what the module returns."""
    module = case.build().eval()
    twin = case.build().eval()
    inputs, _ = case.batch
    with make_engine(case, module, devices) as engine, torch.no_grad():
        for change in (None, *case.changes):
            if change is not None:
                change(module)
                change(twin)
            output = call(engine, inputs)
            plain_inputs, _ = case.all()
            expected = call(twin, plain_inputs)
            assert_alike(output, expected, case.relative)


def buffers_of(module):
    """Copies of them, by name."""
    buffers = {}
    for path, owner in module.named_modules():
        prefix = f"{path}." if path else ""
        for name, buffer in owner._buffers.items():
            copied = None if buffer is None else buffer.detach().clone()
            buffers[prefix + name] = copied
    return buffers


def put_buffers(module, values):
    """Rebind them to copies: what a graph has saved is not written."""
    for name, value in values.items():
        path, _, last = name.rpartition(".")
        owner = module.get_submodule(path)
        owner._buffers[last] = None if value is None else value.clone()


def outputs_of(case, module, share, start=None):
    """Rows and output of each micro-batch of a share, from these buffers on.

    Attributes that a forward pass rebinds are what they were afterwards: replicas have
    their own.
    """
    put_buffers(module, start or {})
    attributes = [(owner, dict(vars(owner))) for owner in module.modules()]
    pieces = []
    for rows in share:
        inputs, _ = case.rows(rows)
        pieces.append((rows, call(module, inputs)))
    for owner, values in attributes:
        vars(owner).update(values)
    return pieces


def _plain_loss(case, twin, pieces, criterion):
    """The mean over the rows of all pieces; its gradients are added to ``twin``'s."""
    total = 0
    for rows, output in pieces:
        _, targets = case.rows(rows)
        loss = loss_of(output, targets, criterion)
        total += loss * (len(rows) / case.count)
    before = [(tensor, tensor.grad) for _, tensor in _trained(twin)]
    for tensor, _ in before:
        tensor.grad = None
    total.backward()
    for tensor, old in before:  # torch would add to gradients that share memory twice
        if old is not None:
            tensor.grad = old if tensor.grad is None else old + tensor.grad
    return total.detach()


def _assert_buffers(case, module, first):
    assert module.state_dict().keys() == first.state_dict().keys()
    buffers = dict(module.named_buffers())
    expected = dict(first.named_buffers())
    assert list(buffers) == list(expected)
    for name, buffer in buffers.items():
        if buffer.dtype.is_floating_point:
            limits = {"rtol": case.relative, "atol": 1e-14, "equal_nan": True}
        else:
            limits = {"rtol": 0, "atol": 0}

        def message(words, name=name):
            return f"buffer {name}: {words}"

        values = buffer.detach(), expected[name].detach()
        torch.testing.assert_close(*values, **limits, msg=message)


def _assert_gradients(case, module, twin):
    """Each gradient is there or not, of the same dtype, layout and strides, and the
    same.
    """
    pairs = zip(_trained(module), _trained(twin), strict=True)
    for (name, tensor), (name_in_twin, expected) in pairs:
        assert name == name_in_twin
        _assert_gradient(name, tensor.grad, expected.grad, case.relative)
        assert_close(tensor.detach(), expected.detach(), name, case.relative)


def _assert_gradient(name, gradient, expected, relative):
    if expected is None:
        assert gradient is None, f"{name}: a gradient that plain torch has not"
        return
    assert gradient is not None, f"{name}: no gradient"
    assert gradient.layout == expected.layout, name
    if expected.layout == torch.strided:
        assert gradient.stride() == expected.stride(), f"{name}: strides"
    assert_close(gradient, expected, f"{name}.grad", relative)


def _trained(module):
    """The parameters and buffers that get a gradient, by name."""
    trained = []
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.requires_grad and tensor.is_leaf:
            trained.append((name, tensor))
    return trained


@torch.no_grad()
def _update(module):
    """What an optimizer does."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
