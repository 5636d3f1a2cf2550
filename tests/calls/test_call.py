"""A call of the engine, of the pair and of the plain module: the same gradients.

Programs that are not as on one device are refused, or told by name.
"""

import contextlib
import copy
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness.oracle import (
    assert_gradients,
    assert_parameters,
    build,
    gradients,
    randint,
    randn,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from calls.loss_programs import LOSSES
from calls.module_programs import CLAMPED, MODULES, OUTPUTS
from calls.programs import PROGRAMS, SELECTING, Own, Program, cross_entropy, mlp
from calls.training_loops import LOOPS
from scatterpar import DataParallelModel, Rows, ScatterOnceParallel, gather

ALL = PROGRAMS | MODULES | OUTPUTS | LOSSES
LAYOUTS = [["cpu"], ["cpu"] * 2, ["cpu:0", "cpu:1"], ["cpu:0", "cpu:1", "cpu:0"]]
# Of several replicas those by default that share a memory, and have one of their own.
QUICK = [
    LAYOUTS[0],
    pytest.param(LAYOUTS[1], marks=pytest.mark.slow),
    pytest.param(LAYOUTS[2], marks=pytest.mark.slow),
    LAYOUTS[3],
]
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids="+".join)
quick_layouts = pytest.mark.parametrize("layout", QUICK, ids="+".join)
quick_of_several = pytest.mark.parametrize("layout", QUICK[1:], ids="+".join)
ROWS, LABELS = randn(13, 6), randint(3, 13)


def run(program, call, net, no_sync, calls):
    """The losses of some calls, whose gradients are accumulated."""
    losses = []
    for number in range(calls):
        rows, labels = ROWS[number : number + 9 + number], LABELS[number:][: 9 + number]
        is_last = number + 1 == calls
        with contextlib.nullcontext() if is_last else no_sync():
            loss = program.loss(call, net, rows, labels[: len(rows)])
            loss.backward()
        losses.append(loss.detach())
    return losses


def check_program(program, layout, calls, way="engine", **options):
    net, plain = build(program.make), build(program.make)
    expected = run(program, plain, plain, contextlib.nullcontext, calls)
    with warnings.catch_warnings(action="ignore"):
        if way == "engine":
            with ScatterOnceParallel(net, device_ids=layout, **options) as engine:
                found = run(program, engine, net, engine.no_sync, calls)
        else:
            pair = DataParallelModel(net, layout)
            found = run(program, gathered(pair), net, pair.no_sync, calls)
    relative = program.relative
    torch.testing.assert_close(found, expected, rtol=relative, atol=1e-12)
    assert_gradients(net, gradients(plain), relative)


def gathered(pair):
    def call(*args, **kwargs):
        return gather(pair(*args, **kwargs), "cpu")

    return call


@quick_layouts
@pytest.mark.parametrize("name", ALL)
def test_program_equals_plain_torch(name, layout):
    check_program(ALL[name], layout, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_program_with_unequal_shares(name):
    """A larger share has more sub-steps in a step, and one pass in a call."""
    check_program(ALL[name], LAYOUTS[2], 2, shares=[1, 2])


def _pairs(self, rows, names):
    output = self.net(rows)
    return output, [output.sin(), {"cosine": output.cos()}]


@pytest.mark.parametrize("count", [4, 5, 6])
def test_list_as_long_as_a_micro_batch(count):
    """With unequal shares, of a step: it has two entries, as the first share rows."""
    net = build(lambda: Other(_pairs))
    layout = LAYOUTS[2]
    with ScatterOnceParallel(net, device_ids=layout, shares=[1, 2]) as engine:
        output, (sine, cosine) = engine(ROWS[:count], Rows(["a"] * count))
    torch.testing.assert_close(output, net.net(ROWS[:count]))
    torch.testing.assert_close(sine, output.sin())
    torch.testing.assert_close(cosine["cosine"], output.cos())


LATER = [name for name in ALL if name.endswith("later")]


@pytest.mark.parametrize("name", LATER)
def test_what_changes_between_calls_reaches_replicas(name):
    check_program(ALL[name], LAYOUTS[3], 4)


@pytest.mark.slow
@pytest.mark.parametrize("calls", [2, 3, 4])
@layouts
@pytest.mark.parametrize("name", ALL)
def test_accumulated_program_equals_plain_torch(name, layout, calls):
    check_program(ALL[name], layout, calls)


OF_THE_PAIR = [name for name, program in ALL.items() if not program.engine_alone]


@pytest.mark.parametrize("calls", [1, pytest.param(3, marks=pytest.mark.slow)])
@quick_of_several  # one replica of a pair is plain torch
@pytest.mark.parametrize("name", OF_THE_PAIR)
def test_program_of_the_pair_equals_plain_torch(name, layout, calls):
    check_program(ALL[name], layout, calls, "pair")


@layouts
@pytest.mark.parametrize("name", SELECTING | CLAMPED)
def test_selected_gradients_are_whole(name, layout):
    check_program((SELECTING | CLAMPED)[name], layout, 1)


def test_compiled_replicas_equal_plain_torch():
    net, plain = build(mlp), build(mlp)
    expected = run(Program(), plain, plain, contextlib.nullcontext, 3)
    options = {"compile": {"backend": "eager"}}
    devices = ["cpu:0", "cpu:1", "cpu:0"]
    with ScatterOnceParallel(net, device_ids=devices, **options) as engine:
        found = run(Program(), engine, net, engine.no_sync, 3)
    torch.testing.assert_close(found, expected)
    assert_gradients(net, gradients(plain))


@quick_layouts
@pytest.mark.parametrize("loop", LOOPS)
def test_training_loop_equals_plain_torch(loop, layout):
    with contextlib.ExitStack() as engines:

        def wrap(net):
            return engines.enter_context(ScatterOnceParallel(net, device_ids=layout))

        found = loop(wrap)
        expected = loop(lambda net: net)
    for net, plain in zip(found, expected, strict=True):
        assert_parameters(net, plain)


# ---- a frozen module in evaluation mode, of which something else is trained ----


class Extra:
    """A value of the user's, with a tensor that is trained."""

    def __init__(self):
        self.scale = torch.full((3,), 0.7, dtype=torch.float64, requires_grad=True)


def frozen(forward, **attributes):
    def make():
        module = Own(forward, net=mlp().requires_grad_(False))
        vars(module).update(copy.deepcopy(attributes))
        return module.eval()

    return make


def _with_trained_buffer():
    module = frozen(lambda self, rows, _: self.net(rows) * self.scale)()
    module.register_buffer("scale", Extra().scale)
    return module


TRAINED = {
    "a buffer": (_with_trained_buffer, lambda net, _: net.scale),
    "an attribute": (
        frozen(lambda self, rows, _: self.net(rows) * self.scale, scale=Extra().scale),
        lambda net, _: net.scale,
    ),
    "a tensor in a list": (
        frozen(
            lambda self, rows, _: self.net(rows) * self.scales[1],
            scales=[1, Extra().scale],
        ),
        lambda net, _: net.scales[1],
    ),
    "a module in a dict": (
        frozen(
            lambda self, rows, _: self.heads["a"](self.net(rows)),
            heads={"a": nn.Linear(3, 2, dtype=torch.float64)},
        ),
        lambda net, _: net.heads["a"].weight,
    ),
}


@pytest.mark.parametrize("layout", [LAYOUTS[1], LAYOUTS[3]], ids="+".join)
@pytest.mark.parametrize("name", TRAINED)
def test_frozen_module_in_evaluation_trains_more(name, layout):
    make, trained_of = TRAINED[name]

    def gradient(wrap):
        net, extra = build(make), Extra()
        trained = trained_of(net, extra)
        trained.grad = None
        output = wrap(net)(ROWS[:7], extra)
        # Without the module's part there is a gradient, too.
        (output.square().sum() + trained.square().sum()).backward()
        return trained.grad

    with contextlib.ExitStack() as engines:

        def wrap(net):
            return engines.enter_context(ScatterOnceParallel(net, device_ids=layout))

        torch.testing.assert_close(
            gradient(wrap), gradient(lambda net: net), rtol=1e-10, atol=0
        )


def test_trained_buffer_refused_if_pooled():
    net, extra = build(_with_trained_buffer), Extra()
    with ScatterOnceParallel(net, device_ids=["cpu"] * 2, buffers="batch") as engine:
        with pytest.raises(ValueError, match=r"do not work with engine\(x\)"):
            engine(ROWS, extra)
        with torch.no_grad():
            assert torch.isfinite(engine(ROWS, extra)).all()
        net.scale.requires_grad_(False)
        assert not engine(ROWS, extra).requires_grad


# ---- what is not as on one device ----


@dataclass
class Answer:
    """A program that is told or refused.

    Attributes:
        words: of the warning or error.
        is_exact: whether a told one has the gradients of plain torch all the same.
    """

    make: Any
    words: str
    loss: Any = cross_entropy
    is_exact: bool = True


class Other(nn.Module):
    """A network, and a ``forward`` that is not as on one device."""

    def __init__(self, forward, *last):
        super().__init__()
        self.net = nn.Sequential(*mlp(), *last)
        self.function = forward

    def forward(self, *args):
        return self.function(self, *args)


def other(forward, *last):
    return lambda: Other(forward, *copy.deepcopy(last))


def _with_counting_hook():
    net = mlp()
    net.calls = 0

    def count(module, args, output):
        net.calls += 1

    net[0].register_forward_hook(count)
    return net


def _keeps_mean(self, rows):
    self.mean = rows.detach().mean(0)
    return self.net(rows)


def _keeps_output_of_rows(self, rows):
    output = self.net(rows)
    self.norm = output.norm(dim=0)
    return output


def _with_texts(call, net, rows, labels):
    return F.cross_entropy(call(rows, ["a"] * len(rows)), labels)


def _without_rows(call, net, rows, labels):
    return F.cross_entropy(call(), torch.arange(6).remainder(3))


def _per_row(call, net, rows, labels):
    return torch.func.vmap(call)(rows).square().mean()


def _first_output(call, net, rows, labels):
    output, _ = call(rows)
    return F.cross_entropy(output, labels)


def _with_value(value_of):
    """A module whose output comes with a value that is no tensor."""

    def forward(self, rows):
        output = self.net(rows)
        return output, value_of(output.detach())

    return other(forward)


def _distribution(call, net, rows, labels):
    output = call(rows)
    # Of several micro-batches they are a list.
    normals = output if isinstance(output, list) else [output]
    return torch.cat([normal.mean for normal in normals]).square().mean()


def _checkpointed(self, rows):
    return self.net(checkpoint(self.inner, rows, use_reentrant=True))


def _meeting(self, rows):
    return self.net(rows).softmax(0)


def _hooked_in_a_checkpoint():
    net = Other(_checkpointed)
    net.inner = nn.Linear(6, 6)
    net.inner.weight.register_hook(lambda gradient: gradient * 2)
    return net


def _of_leaf_rows(call, net, rows, labels):
    return cross_entropy(call, net, rows.clone().requires_grad_(), labels)


TOLD = {
    "a hook that counts": Answer(_with_counting_hook, "hooks inside of the module"),
    "rows that meet": Answer(other(_meeting), "other outputs", is_exact=False),
    "batch normalisation": Answer(
        other(lambda self, x: self.net(x), nn.BatchNorm1d(3)),
        *("batch normalisation", cross_entropy, False),
    ),
    "a mean that is kept": Answer(other(_keeps_mean), "forward sets .* 'mean'"),
    "a norm with a graph": Answer(
        other(_keeps_output_of_rows), "'norm'. The tensor does not have one"
    ),
    "a float": Answer(
        _with_value(lambda output: output.mean().item()), "class float", _first_output
    ),
    "a number of rows": Answer(_with_value(len), "class int", _first_output),
    "an array": Answer(
        _with_value(lambda output: output.numpy()), "class ndarray", _first_output
    ),
    "numbers of rows": Answer(
        _with_value(lambda output: {"means": output.mean(1).tolist()}),
        *("class float", _first_output),
    ),
    "a distribution": Answer(
        other(lambda self, x: torch.distributions.Normal(self.net(x), 1.0)),
        *("class Normal", _distribution),
    ),
    "texts per row": Answer(
        other(lambda self, x, _: self.net(x)), "alone", _with_texts
    ),
    "no rows": Answer(
        other(lambda self: self.net(self.net[0].weight[:6])), "alone", _without_rows
    ),
    "a transform": Answer(mlp, "alone.*torch.func", _per_row),
    "a hook in a reentrant checkpoint": Answer(
        _hooked_in_a_checkpoint, "run more than once", _of_leaf_rows
    ),
}


@quick_of_several
@pytest.mark.parametrize("name", TOLD)
def test_told_program_is_told_once(name, layout):
    program = TOLD[name]
    net, plain = build(program.make), build(program.make)
    with ScatterOnceParallel(net, device_ids=layout) as engine:
        with pytest.warns(UserWarning, match=program.words) as warned:
            program.loss(engine, net, ROWS, LABELS).backward()
        assert len(warned) == 1
        with warnings.catch_warnings(action="error"):
            program.loss(engine, net, ROWS, LABELS).backward()
    for _ in range(2):
        program.loss(plain, plain, ROWS, LABELS).backward()
    if program.is_exact:
        assert_gradients(net, gradients(plain))


@pytest.mark.parametrize("name", ["a float", "an array", "a number of rows"])
def test_values_without_a_graph_are_told_once(name):
    net = build(TOLD[name].make)
    with ScatterOnceParallel(net, device_ids=["cpu:0", "cpu:1"]) as engine:
        with torch.no_grad(), pytest.warns(UserWarning, match=TOLD[name].words):
            _, values = engine(ROWS)
        assert isinstance(values, list)
        assert len(values) == 2
        with warnings.catch_warnings(action="error"):
            engine(ROWS)


@pytest.mark.parametrize("value", [None, 0.5, "name", {"sizes": torch.Size([3])}])
def test_same_value_of_all_micro_batches_comes_once(value):
    net = build(_with_value(lambda output: value))
    with (
        ScatterOnceParallel(net, device_ids=["cpu"] * 2) as engine,
        warnings.catch_warnings(action="error"),
    ):
        assert engine(ROWS)[1] == value


def _loss_and_penalty(self, rows, labels):
    penalty = sum(parameter.square().sum() for parameter in self.parameters())
    return F.cross_entropy(self.net(rows), labels, reduction="sum") + penalty


def _own_loss(call, net, rows, labels):
    return call(rows, labels)


def _creates(self, rows):
    self.head = nn.utils.skip_init(nn.Linear, 6, 3).to(rows)
    return self.head(rows)


def _writes(self, rows):
    with torch.no_grad():
        self.net[0].weight.mul_(0.9)
    return self.net(rows)


def _writes_data(self, rows):
    self.net[0].weight.data.mul_(0.9)
    return self.net(rows)


def _trains_itself(self, rows):
    self.net(rows).sum().backward()
    return self.net(rows)


def _selects(self, rows):
    return self.net(rows[rows[:, 0] > 0])


def _freezes_first(self, rows):
    self.net[0].requires_grad_(False)
    return self.net(rows)


def _only_selected(call, net, rows, labels):
    return call(rows).square().mean()


def _with_state(self, rows):
    _, state = self.cell(rows.reshape(len(rows), 2, 3))
    return self.net(rows), state


def _recurrent():
    net = Other(_with_state)
    net.cell = nn.GRU(3, 4, num_layers=2, batch_first=True)
    return net


REFUSED = {
    "a recurrent layer's state": Answer(
        _recurrent, r"return state\.transpose\(0, 1\)", _first_output
    ),
    "a sum and a penalty": Answer(other(_loss_and_penalty), "the loss", _own_loss),
    "a layer is made": Answer(other(_creates), "creates"),
    "a parameter is written": Answer(other(_writes), "writes the parameter"),
    "a parameter is written by data": Answer(other(_writes_data), "writes the param"),
    "a backward pass inside": Answer(other(_trains_itself), "backward"),
    "rows are selected": Answer(other(_selects), "one entry per row", _only_selected),
    "synchronised": Answer(other(lambda s, x: s.net(x), nn.SyncBatchNorm(3)), "Sync"),
    "lazy": Answer(lambda: nn.Sequential(nn.LazyLinear(3)), "lazy"),
    "frozen in forward": Answer(other(_freezes_first), "requires_grad"),
}


@quick_of_several
@pytest.mark.parametrize("name", REFUSED)
def test_refused_program_changes_nothing(name, layout):
    program = REFUSED[name]
    net = build(program.make)
    before = [*net.state_dict()], [p.requires_grad for p in net.parameters()]
    with ScatterOnceParallel(net, device_ids=layout) as engine:
        for _ in range(2):
            with pytest.raises((ValueError, RuntimeError), match=program.words):
                program.loss(engine, net, ROWS, LABELS)
    assert before == ([*net.state_dict()], [p.requires_grad for p in net.parameters()])
    assert all(parameter.grad is None for parameter in net.parameters())


class Hungry(nn.Module):
    """Memory runs out where more than 120 bytes of activations are computed at once."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 3)

    def forward(self, rows):
        output = self.net(rows)
        if output.nbytes > 120:
            raise torch.OutOfMemoryError("no memory is left")
        return output


PARTS = ROWS[:12].split(4)


def by_no_sync(engine):
    for number, part in enumerate(PARTS):
        is_last = number + 1 == len(PARTS)
        with contextlib.nullcontext() if is_last else engine.no_sync():
            (engine(part).square().sum() / 12).backward()


def by_autocast(engine):
    engine.module.float()
    with torch.autocast("cpu", torch.bfloat16):
        output = engine(ROWS[:12].float())
    (output.float().square().sum() / 12).backward()
    engine.module.double()


def by_forward_backward(engine):
    engine.accum = 2
    engine.forward_backward(ROWS[:12], None, lambda o, _: o.square().sum() / len(o))


@pytest.mark.parametrize("follow", [by_no_sync, by_autocast, by_forward_backward])
def test_note_without_memory_names_what_helps(follow):
    net, plain = build(Hungry), build(Hungry)
    for part in PARTS:
        (plain(part).square().sum() / 12).backward()
    with ScatterOnceParallel(net, device_ids=["cpu:0", "cpu:1"]) as engine:
        engine.verify = False
        with pytest.raises(torch.OutOfMemoryError) as caught:
            engine(ROWS[:12])
        (note,) = [note for note in caught.value.__notes__ if "memory" in note]
        assert follow.__name__.removeprefix("by_") in note
        follow(engine)
    assert_gradients(net, gradients(plain), 0.02 if follow is by_autocast else 1e-10)
