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

from harness.isolation import guarded
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

BATCH = randn(9, FEATURES), randint(CLASSES, 9)
LAYOUTS = {
    "one": ["cpu"],
    # one replica shares the master's memory, one has its own
    "mixed": ["cpu:0", "cpu:1", "cpu:0"],
    "shared": ["cpu"] * 3,
    "virtual": ["cpu:0", "cpu:1", "cpu:2"],
    "elsewhere": ("cpu:1", torch.device("cpu:0"), "cpu:1"),
}

# The column "default run" of a case: its runners that are not slow.
TRAINING = ("engine", "pair", "whole batch")
USUAL = (*TRAINING, "inference")
EVERY_WAY = (*USUAL, "loss", "check", "by cost", "guarded", "guarded pair")
ON_RANKS = {  # how many processes, and which runner each of them has
    "1 rank": (1, "engine"),
    "2 ranks": (2, "engine"),
    "3 ranks": (3, "engine"),
    "2 ranks by cost": (2, "by cost"),
    "3 ranks by cost": (3, "by cost"),
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
    default_run: Sequence[str] = USUAL

    def build(self):
        if not self.keep_dtypes:
            return build(self.model)
        with seeded():
            return self.model()

    @property
    def count(self):
        """The number of rows: of the targets' first tensor, or of the inputs'."""
        sizes = [len(each) for each in tensors(self.plain or self.batch) if each.ndim]
        return sizes[0]

    def rows(self, rows):
        """Copies of these rows of inputs and targets, as plain torch takes them."""

        def take(atom):
            if not isinstance(atom, Tensor):
                return atom
            if not atom.ndim or rows == range(self.count):
                return atom.clone()
            if isinstance(rows, range):  # a slice keeps the memory format
                return atom[rows.start : rows.stop].clone()
            return atom[list(rows)]

        return map_atoms(take, self.batch if self.plain is None else self.plain)

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


def shares_by_cost(engine, costs):
    """That of a runner whose rows are cut by cost: what the engine says."""

    def shares_of(count):
        shares = []
        for share in engine.plan(count, costs=costs).shares:
            substeps = range(len(share.micro_batches))
            shares.append([share.rows_of(number) for number in substeps])
        return shares

    return shares_of


def make_engine(case, module, devices, **options):
    options = case.engine | options
    if "micro_batch_cost" not in options:
        options["accum"] = case.accum
    return ScatterOnceParallel(module, device_ids=devices, **options)


@contextlib.contextmanager
def by_engine(case, module, criterion, devices, *, how=None, by="", **more):
    """``how``: more options of the engine. A check before each step leaves no trace in
    it.
    """
    options = case.options | more
    if "whole_batch" in more:  # the criterion has all terms
        options.pop("count", None)
        options.pop("reduction", None)
    with make_engine(case, module, devices, **(how or {})) as engine:

        def step():
            if by == "check":
                assert engine.check(*case.batch, criterion, **options).passed
            if by != "loss":
                return engine.forward_backward(*case.batch, criterion, **options)
            loss = engine.loss(*case.batch, criterion, **options)
            loss.backward()
            return loss.detach()

        if "costs" in options:
            yield step, shares_by_cost(engine, options["costs"])
        else:
            yield step, even_shares(case, devices)


def by_cost(case, *args):
    """Rows of like cost together, which are not consecutive."""
    costs = [1.0 + 3 * row % 4 for row in range(case.count)]
    budget = 8.0 if case.accum > 1 else 1e9
    return by_engine(case, *args, how={"micro_batch_cost": budget}, costs=costs)


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
def apart(by, case, module, criterion, devices):
    """By an engine, or pair, of each step, whose operations may not mix tensors of two
    memories.

    The loss and the gradients are in the master's memory.
    """
    modules = [module, *_heads(criterion)]
    master = torch.device(devices[0])
    used = {torch.device(device) for device in devices[: case.count]}

    def step():
        with (
            by(case, module, criterion, devices) as (inner, _),
            pytest.MonkeyPatch.context() as patch,
            guarded(patch, *modules) as memories,
        ):
            loss = inner()
            gradients = [tensor.grad for _, tensor in _trained(module)]
            results = [loss, *(each for each in gradients if each is not None)]
            owners = {memories.owner(result) for result in results}
            assert owners <= {master, None}
            assert set(memories.checked) == used
        return loss

    with by(case, module, criterion, devices) as (_, shares_of):
        yield step, shares_of


def _heads(criterion):
    """The modules that a criterion is, or is a method of."""
    candidates = (criterion, getattr(criterion, "__self__", None))
    return [candidate for candidate in candidates if isinstance(candidate, nn.Module)]


RUNNERS = {
    "engine": by_engine,
    "loss": lambda *args: by_engine(*args, by="loss"),
    "check": lambda *args: by_engine(*args, by="check"),
    "whole batch": lambda *args: by_engine(*args, whole_batch=True),
    "by cost": by_cost,
    "graphs": lambda *args: by_engine(*args, how={"graphs": True, "verify": False}),
    "compiled": lambda *args: by_engine(*args, how={"compile": {"backend": "eager"}}),
    "pair": by_pair,
    "inference": by_engine,
    "guarded": partial(apart, by_engine),
    "guarded pair": partial(apart, by_pair),
}


def runs(cases):
    """Each case by each runner on each layout, as parameters of a test.

    In the default run are mixed memories, and the engine on one replica; other layouts
    are slow. One replica of a pair is plain torch.
    """
    layouts_of = {"engine": [*LAYOUTS], "pair": [*LAYOUTS][1:]}
    parameters = []
    for name, case in cases.items():
        for runner in case.only or RUNNERS:
            if runner in case.unless or (runner == "check" and case.by_share):
                continue
            for layout in layouts_of.get(runner, ["mixed"]):
                is_usual = layout == "mixed" or (layout, runner) == ("one", "engine")
                if not is_usual or runner not in case.default_run:
                    marks = [pytest.mark.slow]
                else:
                    marks = [pytest.mark.contract] if runner in CONTRACT else []
                identity = identity_of(name, runner, layout)
                run = pytest.param(case, runner, layout, id=identity, marks=marks)
                parameters.append(run)
    return parameters


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


def identity_of(name, *more):
    """The id of a test of a case; ``-k`` takes no spaces, commas and "="."""
    return "-".join([re.sub(r"[^\w.]+", "_", name), *more])


def agree(case, runner, devices, group=None):
    """Steps of the runner, with the case's changes between them, are those of plain
    torch.

    With a process ``group`` each rank calls it, and trains the engine on its part of
    the rows. What was trained is returned, with its last gradients: all ranks must have
    the same bits. ``devices``: a list, or the name of a layout.
    """
    devices = LAYOUTS[devices] if isinstance(devices, str) else devices
    if runner == "inference":
        _agree_in_inference(case, devices)
        return []
    trained = Trained(case, joins=runner == "whole batch")
    part = case
    if group is not None:
        part = part_of_rank(case, group)
        trained.rows_of_first = len(cut(range(case.count), group.size())[0])
    batch_before = copy.deepcopy(part.batch)
    run = RUNNERS[runner](part, trained.module, trained.criterion, devices)
    with run as (step, shares_of):
        for number in range(1 + max(2, len(case.changes))):
            trained.change(number)
            expected = trained.plain_step(shares_of)
            trained.assert_same(step(), expected)
            trained.update(number)
    pairs = zip(tensors(part.batch), tensors(batch_before), strict=True)
    are_same = [torch.equal(*pair) for pair in pairs]
    assert all(are_same), "the caller's tensors were written"
    return trained.values()


def part_of_rank(case, group):
    """The case with this rank's rows."""
    rows = cut(range(case.count), group.size())[group.rank()]
    options = {"process_group": group, **case.engine}
    return replace(case, batch=case.rows(rows), engine=options)


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
        self.module, self.twin, self.first = (case.build() for _ in range(3))
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
            outputs_of(case, self.first, shares_of(self.rows_of_first)[0])
        if case.by_share:
            pieces = []
            for share in shares_of(case.count):
                pieces += outputs_of(case, self.twin, share, buffers)
            put_buffers(self.twin, buffers_of(self.first))
        else:
            inputs, _ = case.all()
            pieces = [(range(case.count), call(self.twin, inputs))]
        if self.joins and len(pieces) > 1:
            pieces = [(range(case.count), joined([output for _, output in pieces]))]
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
        gradients = [tensor.grad for _, tensor in _trained(self.module)]
        gradients = [gradient for gradient in gradients if gradient is not None]
        values = [*self.module.parameters(), *gradients]
        return [value.detach().to_dense() for value in values]


def on_ranks(cases, name, size, runner="engine"):
    """Ranks, each with a part of the rows, agree with plain torch, and have the same
    bits.

    ``cases`` is the module whose ``CASES`` have it: processes cannot be sent a case.
    """
    first, *others = run_on_ranks(size, _on_a_rank, cases, name, runner)
    assert all(all(map(torch.equal, first, other)) for other in others), (
        "other bits on one of them"
    )


def _on_a_rank(group, cases, name, runner):
    case = importlib.import_module(cases).CASES[name]
    return agree(case, runner, ["cpu:0", "cpu:1"], group)


def _agree_in_inference(case, devices):
    """What the engine returns when it is called is what the module returns."""
    module, twin = (case.build().eval() for _ in range(2))
    costs = {}
    if "costs" in case.options:
        costs["costs"] = case.options["costs"]
    inputs, _ = case.batch
    with make_engine(case, module, devices) as engine, torch.no_grad():
        for change in (lambda _: None, *case.changes):
            change(module)
            change(twin)
            output = call(partial(engine, **costs), inputs)
            whole, _ = case.all()
            assert_alike(output, call(twin, whole), case.relative)


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
        module.get_submodule(path)._buffers[last] = (
            None if value is None else value.clone()
        )


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
        limits = {"rtol": 0, "atol": 0}
        if buffer.dtype.is_floating_point:
            limits = {"rtol": case.relative, "atol": 1e-14, "equal_nan": True}
        torch.testing.assert_close(
            buffer.detach(),
            expected[name].detach(),
            **limits,
            msg=lambda words, name=name: f"buffer {name}: {words}",
        )


def _assert_gradients(case, module, twin):
    """Each gradient is there or not, of the same dtype, layout and strides, and the
    same.
    """
    pairs = zip(_trained(module), _trained(twin), strict=True)
    for (name, tensor), (name_in_twin, expected) in pairs:
        assert name == name_in_twin
        has_gradient = tensor.grad is not None
        is_right = has_gradient == (expected.grad is not None)
        assert is_right, f"{name}: a gradient on one side only"
        if has_gradient:
            assert tensor.grad.layout == expected.grad.layout, name
            if expected.grad.layout == torch.strided:
                strides = tensor.grad.stride(), expected.grad.stride()
                assert strides[0] == strides[1], f"{name}: strides"
            assert_close(tensor.grad, expected.grad, f"{name}.grad", case.relative)
        assert_close(tensor.detach(), expected.detach(), name, case.relative)


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
