"""``graphs=True``: sub-steps that are captured once, and replayed.

On the CPU the same code is called again, on the same tensors; with an accelerator
(``test_simulated.py`` runs this on a simulated one) it is really captured.
"""

from __future__ import annotations

import copy
import itertools
import random
import threading
import warnings
from collections import Counter
from functools import partial

import pytest
import torch
from faults.state import values_differ
from harness.models import Of
from harness.oracle import assert_step, build, randint, randn
from harness.pairwise import few_of
from torch import nn
from torch.nn import functional as F

from scatterpar import Rows, ScatterOnceParallel
from scatterpar.options.cuda_graphs import GraphedSubsteps

pytestmark = [pytest.mark.cuda, pytest.mark.nullcuda]

ROWS, FEATURES, CLASSES = 37, 6, 3
LOSS = nn.CrossEntropyLoss()


@pytest.fixture(params=few_of([1, "shared", 2], ["shared", 2]), ids=str)
def places(request):
    """Replicas on so many devices, or three that share one.

    With one accelerator, the second device is the host.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if request.param == "shared":
        return ["cpu"] * 3 if accelerator is None else [0, 0, 0]
    if accelerator is None:
        return [f"cpu:{i}" for i in range(request.param)]
    here = torch.accelerator.device_count()
    if (request.param, here) == (2, 1):
        return [f"{accelerator.type}:0", "cpu"]
    if here < request.param:
        pytest.skip(f"needs {request.param} accelerators")
    return list(range(request.param))


@pytest.fixture
def two_places():
    """Two replicas, on two devices; on the same one if there is one accelerator."""
    if not torch.accelerator.is_available():
        return ["cpu:0", "cpu:1"]
    return [0, 1] if torch.accelerator.device_count() > 1 else [0, 0]


def home():
    here = torch.accelerator.is_available()
    return torch.device(torch.accelerator.current_accelerator().type if here else "cpu")


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        block = nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", batch_first=True)
        self.words, self.head = nn.Embedding(11, 8), nn.Linear(8, CLASSES)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)

    def forward(self, words):
        seen = nn.Transformer.generate_square_subsequent_mask(
            words.shape[1], words.device
        )
        return self.head(self.blocks(self.words(words), seen, is_causal=True).mean(1))


def mlp(*layers):
    return nn.Sequential(
        nn.Linear(FEATURES, 8), *layers, nn.Tanh(), nn.Linear(8, CLASSES)
    )


def cnn(*layers):
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), *layers, nn.ReLU(), nn.Flatten(), nn.Linear(64, CLASSES)
    )


INPUTS = {
    mlp: lambda rows: randn(rows, FEATURES),
    cnn: lambda rows: randn(rows, 1, 6, 6),
    GPT: lambda rows: randint(11, rows, 5),
}


def problem(make=mlp, *layers, rows=ROWS):
    """A model, inputs and targets, on the master."""
    model = build(lambda: make(*layers))
    return (
        model.to(home()),
        INPUTS[make](rows).to(home()),
        randint(CLASSES, rows).to(home()),
    )


def graphed(model, accum, places, **options):
    options = {"graphs": True, "verify": False} | options
    return ScatterOnceParallel(model, accum, places, **options)


def assert_same(run, model, places, accum, *, draws=False, **options):
    """What ``run(engine)`` returns, and leaves in the module, has the same bits without
    graphs.

    Where numbers are drawn on CUDA, both with graphs: without a card nobody can say
    what it draws.
    """
    found, modules = [], []
    for graphs in (True, draws and home().type == "cuda"):
        if draws:
            torch.manual_seed(7)
        modules.append(copy.deepcopy(model))
        with graphed(modules[-1], accum, places, graphs=graphs, **options) as engine:
            found.append(run(engine))
    assert all(map(torch.equal, *found))
    assert values_differ(*modules) == []
    return found[0]


@pytest.mark.parametrize(
    ("places", "accum"),
    [
        pytest.param(1, 16, marks=pytest.mark.slow),
        (2, 3),
        pytest.param(4, 1, marks=pytest.mark.slow),
        pytest.param(4, 4, marks=pytest.mark.slow),
        ("shared", 2),
    ],
    indirect=["places"],
)
@pytest.mark.parametrize("make", INPUTS)
def test_graph_gradients_equal_whole_batch(places, make, accum):
    model, inputs, targets = problem(make)
    with graphed(model, accum, places) as engine:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for rows in (ROWS, ROWS, 20, ROWS):
            assert_step(engine, inputs[:rows], targets[:rows], LOSS)
            optimizer.step()


def draws(module, x):
    """Keeps what it drew, in a buffer."""
    module.drawn.mul_(3).add_(torch.rand(4, device=x.device, dtype=torch.float64))
    return x


@pytest.mark.draws
def test_draws_and_buffers_as_without_graphs(places):
    layers = (
        Of(draws, drawn=nn.Buffer(torch.zeros(4))),
        nn.BatchNorm2d(4),
        nn.Dropout(0.3),
    )
    model, inputs, targets = problem(cnn, *layers)

    def run(engine):
        losses = [engine.forward_backward(inputs, targets, LOSS) for _ in range(3)]
        return [*losses, torch.rand(3)]

    *losses, _ = assert_same(run, model, places, 3, draws=True)
    assert torch.stack(losses).unique().numel() == 3


def test_outputs_scaler_and_masks_exact(places):
    model, inputs, targets = problem(GPT)
    targets[::3] = -100
    scaler = torch.amp.GradScaler(home().type, init_scale=8.0)

    def run(engine):
        for _ in range(2):
            loss, outputs = engine.forward_backward(
                {"words": inputs}, targets, LOSS, scaler=scaler, return_outputs=True
            )
        return [loss, *outputs]

    assert_same(
        run, model, places, 4, check_finite=True, accumulate_dtype=torch.float64
    )


def test_later_requested_outputs_are_exact(places):
    model, inputs, targets = problem()

    def run(engine):
        for is_asked in (False, True, False, True):
            found = engine.forward_backward(
                inputs, targets, LOSS, return_outputs=is_asked
            )
        return [found[0], *found[1]]

    assert_same(run, model, places, 2)


@pytest.mark.parametrize(
    "lengths", [(3, 6, 3, 6), (*range(1, 12), 1, 11)], ids=["two", "beyond a handful"]
)
def test_unused_layers_have_no_gradient(places, lengths):
    """Shapes beyond a handful run without graphs."""

    def by_length(model, x):
        return (model.long if x.shape[1] > 4 else model.short)(x).mean(1)

    def branches():
        names = "short", "long", "never"
        return Of(by_length, **{name: nn.Linear(FEATURES, CLASSES) for name in names})

    model = build(branches).to(home())
    targets = randint(CLASSES, ROWS).to(home())
    with graphed(model, 2, places) as engine:
        for length in lengths:
            assert_step(engine, randn(ROWS, length, FEATURES).to(home()), targets, LOSS)
            assert model.never.weight.grad is None
            assert (model.short.weight.grad is None) == (length > 4)


def test_tensors_that_collate_keeps_are_not_written(two_places):
    model, inputs, targets = problem(rows=8)
    batches = {}

    def collate(rows):
        key = rows[0].device, float(rows[0].sum())
        return batches.setdefault(key, torch.stack(rows))

    def run(engine):
        batches.clear()
        rows = Rows(list(inputs), collate)
        return [engine.forward_backward(rows, targets, LOSS) for _ in range(2)]

    assert_same(run, model, two_places, 2)


# --- what has changed is captured anew ---


def of_body(function, **more):
    return build(lambda: Of(function, body=nn.Linear(FEATURES, CLASSES), **more)).to(
        home()
    )


CHANGES = {
    "number": lambda model: setattr(model, "factor", model.factor + 1),
    "layer": lambda model: setattr(
        model, "body", nn.Linear(FEATURES, CLASSES, dtype=torch.float64).to(home())
    ),
    "storage": lambda model: setattr(
        model.body.weight, "data", model.body.weight.detach() * 2
    ),
    "frozen": lambda model: model.body.bias.requires_grad_(
        not model.body.bias.requires_grad
    ),
    "hook": lambda model: model.body.register_forward_hook(
        lambda _m, _i, output: output * 3
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.draws
def test_changed_module_captured_again(two_places, change):
    _, inputs, targets = problem()
    model = of_body(lambda model, x: model.body(x) * model.factor, factor=1.0)
    with graphed(model, 3, two_places) as engine:
        for _ in range(3):
            assert_step(engine, inputs, targets, LOSS)
            change(model)


def test_changed_criterion_captured_again(two_places):
    model, inputs, targets = problem()
    scale = 1.0

    def closed(output, targets):
        return F.cross_entropy(output, targets) * scale

    with graphed(model, 3, two_places) as engine:
        for criterion in (closed, closed, nn.CrossEntropyLoss(label_smoothing=0.1)):
            assert_step(engine, inputs, targets, criterion)
            scale += 1


def test_iterator_of_criterion_keeps_graphs(two_places, monkeypatch):
    """A look that leaves a copy of it behind ends the graphs."""
    record, captured = GraphedSubsteps.record, []

    def counted(substeps, task, number):
        captured.append(task.share.replica)
        return record(substeps, task, number)

    monkeypatch.setattr(GraphedSubsteps, "record", counted)
    model, inputs, targets = problem(rows=36)
    names = itertools.cycle("ab")

    def criterion(output, targets):
        next(names)
        return LOSS(output, targets)

    with graphed(model, 3, two_places, verify=True) as engine:
        for _ in range(4):
            engine.forward_backward(inputs, targets, criterion)
    assert sorted(captured) == [0, 1]


CUDA = torch.backends.cuda
CUDNN = torch.backends.cudnn


def flag(holder, name):
    """How a flag is read and set."""
    return partial(getattr, holder, name), partial(setattr, holder, name)


FLAGS = {
    "allow_tf32": flag(CUDA.matmul, "allow_tf32"),
    "reductions in float16": flag(
        CUDA.matmul, "allow_fp16_reduced_precision_reduction"
    ),
    "sums in float16": flag(CUDA.matmul, "allow_fp16_accumulation"),
    "cudnn.allow_tf32": flag(CUDNN, "allow_tf32"),
    "cudnn.benchmark": flag(CUDNN, "benchmark"),
    "cudnn.deterministic": flag(CUDNN, "deterministic"),
    "flash attention": (CUDA.flash_sdp_enabled, CUDA.enable_flash_sdp),
    "attention without kernels": (CUDA.math_sdp_enabled, CUDA.enable_math_sdp),
}


@pytest.mark.parametrize("name", FLAGS)
def test_changed_kernel_flags_captured_again(two_places, name):
    """A graph keeps the kernels that it was captured with."""
    model, inputs, targets = problem()
    read, write = FLAGS[name]
    calls, counts, before = [], [], read()
    model.register_forward_hook(lambda *_: calls.append(1))
    with graphed(model, 1, two_places) as engine:
        for value in (before, before, not before):
            write(value)
            try:
                engine.forward_backward(inputs, targets, LOSS)
            finally:
                write(before)
            counts.append(len(calls) - sum(counts))
    captured, replayed, again = counts
    assert captured == again > replayed


# --- what cannot be captured runs without, and is told ---


UNCAPTURED = {
    "cannot be captured: it waits for the device": lambda model, x: (
        model.body(x) * (1 + float(x.sum() > -1e9))
    ),
    "keeps something on the module": lambda model, x: (
        setattr(model, "kept", model.body(x)) or model.kept
    ),
    "or the criterion draws random numbers on the host": lambda model, x: (
        model.body(x) + 0 * random.random()
    ),
    "or the criterion draws": lambda model, x: model.body(x) + 0 * torch.rand(()),
}


@pytest.mark.parametrize("words", UNCAPTURED)
@pytest.mark.draws
def test_uncapturable_runs_and_warns_once(two_places, words):
    _, inputs, targets = problem()
    is_told = words.startswith("keeps") or torch.accelerator.is_available()
    state = random.getstate()
    with graphed(of_body(UNCAPTURED[words]), 3, two_places) as engine:
        for step in range(3):
            told = pytest.warns(match=f"because Of {words}")
            with (
                told
                if is_told and not step
                else warnings.catch_warnings(action="error")
            ):
                assert_step(engine, inputs, targets, LOSS)
    random.setstate(state)


def test_ever_new_criterion_is_given_up(two_places):
    model, inputs, targets = problem(rows=8)
    with graphed(model, 1, two_places) as engine:

        def steps():
            for _ in range(34):
                engine.forward_backward(
                    inputs, targets, lambda o, t: F.cross_entropy(o, t)
                )

        with pytest.warns(
            match="captured 32 times, since something changes from step to step"
        ):
            steps()


# --- whole or not at all ---


@pytest.mark.draws
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_failed_step_leaves_no_trace(two_places, kind):
    """In a captured sub-step, and in one that is being captured."""
    model, inputs, targets = problem(mlp, nn.Dropout(0.5))
    is_failing = False

    def output_kept(output):
        if is_failing:
            raise kind("boom")
        return output

    def run(engine):
        nonlocal is_failing
        for rows in (ROWS, 16):
            is_failing, batch = True, (inputs[:rows], targets[:rows])
            with pytest.raises(kind, match="boom"):
                engine.forward_backward(
                    *batch, F.cross_entropy, return_outputs=output_kept
                )
            assert all(p.grad is None for p in engine.module.parameters())
            is_failing = False
        return [
            engine.forward_backward(inputs, targets, F.cross_entropy) for _ in range(2)
        ]

    assert_same(run, model, two_places, 4, draws=True)


@pytest.mark.parametrize("call", [1, 3], ids=["warming up", "captured"])
@pytest.mark.filterwarnings("error", 'ignore:accum="auto"')
def test_capture_out_of_memory_adds_sub_steps(call):
    """The result is that of the same fixed number of sub-steps, bit for bit."""
    calls = Counter()

    # has no room for more rows, from the call of this number with as many on
    def hungry(model, x):
        calls[len(x)] += 1
        if len(x) > model.rows and calls[len(x)] >= call:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB"
            )
        return model.norm(model.body(x))

    _, inputs, targets = problem()
    results = []
    for accum, room in (("auto", 10), (4, ROWS)):
        model = of_body(hungry, norm=nn.BatchNorm1d(CLASSES), rows=room)
        with graphed(model, accum, [str(home())]) as engine:
            losses = [engine.forward_backward(inputs, targets, LOSS) for _ in range(2)]
            assert len(engine.last_step.plan.shares[0].micro_batches) == 4
        results.append((model, torch.stack(losses)))
    (model, losses), (expected, expected_losses) = results
    assert torch.equal(losses, expected_losses)
    assert values_differ(model, expected) == []


# --- beside other things ---


def test_autocast_is_captured(two_places):
    """With it and without are two graphs."""
    model, inputs, targets = problem()

    def run(engine):
        found = []
        for is_on in (True, True, False, True):
            with torch.autocast(home().type, torch.bfloat16, enabled=is_on):
                found.append(engine.forward_backward(inputs.float(), targets, LOSS))
        return found

    found = assert_same(run, model.float(), two_places, 3)
    assert found[0] == found[1] == found[3] != found[2]


# --- replays are looked at ---


class Settings:
    """Values of a plain object."""

    def __init__(self):
        self.factor = 1.0


FACTOR = 1.0
TABLE = {"factor": 1.0}
SETTINGS = Settings()


def by_global(output, targets):
    return F.cross_entropy(output, targets) * FACTOR


def by_entry(output, targets):
    return F.cross_entropy(output, targets) * TABLE["factor"]


def by_attribute(output, targets):
    return F.cross_entropy(output, targets) * SETTINGS.factor


class BySetting:
    """A criterion that is a plain object."""

    def __init__(self):
        self.settings = {"factor": 1.0}

    def __call__(self, output, targets):
        return F.cross_entropy(output, targets) * self.settings["factor"]


def times(table, output, targets):
    return F.cross_entropy(output, targets) * table["factor"]


ARGUMENT = {"factor": 1.0}
BY_SETTING = BySetting()
# The criterion, the dictionary with the value that changes, its key, its name.
FROZEN = {
    "global": (by_global, globals(), "FACTOR", "FACTOR"),
    "entry": (by_entry, TABLE, "factor", "TABLE['factor']"),
    "attribute": (by_attribute, vars(SETTINGS), "factor", "SETTINGS.factor"),
    "criterion": (BY_SETTING, BY_SETTING.settings, "factor", "settings['factor']"),
    "partial": (
        partial(times, ARGUMENT),
        ARGUMENT,
        "factor",
        "argument 0['factor']",
    ),
}


@pytest.fixture
def frozen(request, monkeypatch):
    """A case of ``FROZEN``; without an accelerator replays see the values of a capture.

    There a replay is the same code again, so a double freezes what it reads, and drops
    what it writes.
    """
    criterion, holder, key, name = FROZEN[request.param]
    record = GraphedSubsteps.record
    frozen_values = []
    one_replay = threading.Lock()

    def change(value):
        if not frozen_values:
            holder[key] = value

    def record_and_freeze(substeps, task, number):
        graph = record(substeps, task, number)
        value, replay = holder[key], graph.replay

        def replay_with_former_value(*args):
            # Replicas replay in threads, and the value is one for all.
            with one_replay:
                now, holder[key] = holder[key], value
                frozen_values.append(value)
                try:
                    replay(*args)
                finally:
                    frozen_values.clear()
                    holder[key] = now

        graph.replay = replay_with_former_value
        return graph

    if not torch.accelerator.is_available():
        monkeypatch.setattr(GraphedSubsteps, "record", record_and_freeze)
    before = holder[key]
    yield criterion, change, name
    holder[key] = before


def by_kind(*kinds):
    return pytest.mark.parametrize("frozen", kinds or FROZEN, indirect=True)


@by_kind()
def test_frozen_value_named_ends_graphs(two_places, frozen):
    """In step 2, before a gradient counts; once it is told."""
    criterion, change, name = frozen
    model, inputs, targets = problem()
    engine = graphed(model, 3, two_places, verify=True)
    with engine, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for value in (1.0, 2.0, 3.0):  # looked at in step 2
            change(value)
            assert_step(engine, inputs, targets, criterion)
    (text,) = [str(warning.message) for warning in told]
    subject = "graphs=True: sub-steps run as without graphs, because"
    assert text.startswith(f"{subject} {name} changed after sub-steps of Sequential")
    assert "Make it a tensor that is written in place" in text


@by_kind("entry")
def test_change_between_looks_is_found(two_places, frozen):
    criterion, change, _ = frozen
    model, inputs, targets = problem()
    losses = []
    engine = graphed(model, 3, two_places, verify=True)
    with engine, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for value in (1.0, 1.0, 1.0, 2.0, 2.0):  # looks in steps 2, 3 and 5
            change(value)
            loss = engine.forward_backward(inputs, targets, criterion)
            losses.append(loss.item())
    assert len(told) == 1
    assert losses[3] == losses[2]
    assert losses[4] == pytest.approx(2 * losses[2], rel=1e-12)


@by_kind("entry")
def test_no_look_at_replays_without_verify(frozen):
    criterion, change, _ = frozen
    model, inputs, targets = problem()
    losses = []
    with graphed(model, 3, [str(home())]) as engine:
        for value in (1.0, 2.0):
            change(value)
            losses.append(engine.forward_backward(inputs, targets, criterion).item())
    assert losses[0] == losses[1]


@by_kind("entry")
def test_ever_changing_value_ends_graphs(two_places, frozen):
    criterion, change, _ = frozen
    values = iter(range(1, 1000))

    def moving(output, targets):
        change(float(next(values)))
        return criterion(output, targets)

    model, inputs, targets = problem()
    engine = graphed(model, 3, two_places, verify=True)
    with engine, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(4):
            engine.forward_backward(inputs, targets, moving)
    words = "Sequential had been captured, and replays gave another loss or gradients"
    assert [words in str(warning.message) for warning in told].count(True) == 1


@pytest.mark.draws
def test_look_at_replay_leaves_no_trace(places):
    """Neither in buffers nor in random state, nor in what the criterion counts."""
    layers = Of(draws, drawn=nn.Buffer(torch.zeros(4))), nn.BatchNorm2d(4), nn.Dropout()
    model, inputs, targets = problem(cnn, *layers)
    results, modules = [], []
    for verify in (False, True):
        torch.manual_seed(7)
        modules.append(copy.deepcopy(model))
        with (
            warnings.catch_warnings(),
            graphed(modules[-1], 3, places, verify=verify) as engine,
        ):
            warnings.simplefilter("ignore")  # of state that forward passes move
            losses = [engine.forward_backward(inputs, targets, LOSS) for _ in range(5)]
        results.append([*losses, torch.rand(3)])
    assert all(map(torch.equal, *results))
    assert values_differ(*modules) == []
