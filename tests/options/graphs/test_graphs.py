"""Sub-steps that are captured once, and replayed; ``test_tape.py`` has frozen values.

On the CPU the operators of a tape run again; with an accelerator (``test_simulated.py``
runs this on a simulated one) sub-steps are really captured.
"""

from __future__ import annotations

import copy
import random
import warnings
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
from scatterpar.devices import clocks
from scatterpar.devices.clocks import DeviceClock
from scatterpar.options.graphs import captures, decision, replay, schedule

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
        for rows in (ROWS, ROWS, 20, *[ROWS] * 5):
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

    reports = []

    def run(engine):
        losses = []
        for _ in range(5):
            losses.append(engine.forward_backward(inputs, targets, LOSS))
            reports.append(engine.last_step.graphs)
        return [*losses, torch.rand(3)]

    *losses, _ = assert_same(run, model, places, 3, draws=True)
    assert torch.stack(losses).unique().numel() == 5
    # A device's draws are none on the host, which would end the replays.
    assert all(report.endswith("replayed") for report in reports[:5]), reports


def test_outputs_scaler_and_masks_exact(places):
    model, inputs, targets = problem(GPT)
    targets[::3] = -100
    scaler = torch.amp.GradScaler(home().type, init_scale=8.0)

    def run(engine):
        for _ in range(4):
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
        for is_asked in (False, True) * 4:
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
        return [engine.forward_backward(rows, targets, LOSS) for _ in range(8)]

    assert_same(run, model, two_places, 2)


def of_rows(model, work, x):
    return work(model, x)


def test_function_among_rows_replays(two_places):
    """As the step function of a library's loop; the tape tells what it reads."""
    scale = 2.0

    def work(model, x):
        return model.body(x) * scale

    _, inputs, targets = problem(rows=48)
    with graphed(of_body(of_rows), 4, two_places) as engine:
        reports = []
        for step in range(7):
            scale += step == 5
            expected = work(engine.module, inputs)
            loss = engine.forward_backward((work, inputs), targets, LOSS)
            assert loss.item() == pytest.approx(LOSS(expected, targets).item())
            reports.append(engine.last_step.graphs)
    assert reports[4] == "7 of 8 sub-steps replayed"
    assert reports[5].startswith("eager: aten.mul.Tensor gets 3.0, and got 2.0")


class Scaled(nn.Module):
    """A layer whose output is multiplied by an attribute."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("steps", torch.zeros(()))
        self.factor = 2.0

    def forward(self, x):
        self.steps += 1
        return self.body(x) * self.factor


@pytest.mark.parametrize("name", ["factor", "steps"])
def test_replica_rebound_between_steps_is_restored(two_places, name):
    """A replica that is only replayed is not searched; it is before it is called."""
    _, inputs, targets = problem(rows=48)
    model = build(Scaled).to(home())
    with graphed(model, 4, two_places) as engine:
        for step in range(12):
            for replica in engine._replicas.of_model.replicas if step > 2 else ():
                root = replica.root
                setattr(root, name, 3.0 if name == "factor" else root.steps + 5)
            expected = LOSS(model.body(inputs) * 2.0, targets).item()
            loss = engine.forward_backward(inputs, targets, LOSS)
            assert loss.item() == pytest.approx(expected)
            assert model.steps == 4 * (step + 1)
    assert engine.last_step.graphs == "7 of 8 sub-steps replayed"


def test_counting_function_not_captured(two_places):
    calls = []

    def work(model, x):
        calls.append(len(x))
        return model.body(x)

    _, inputs, targets = problem(rows=48)
    with graphed(of_body(of_rows), 4, two_places) as engine:
        with pytest.warns(UserWarning, match="writes or takes from"):
            engine.forward_backward((work, inputs), targets, LOSS)
        for _ in range(3):
            engine.forward_backward((work, inputs), targets, LOSS)
    assert len(calls) == 4 * 8


def test_returned_number_is_not_frozen(two_places):
    def named(model, x):
        return {"y": model.body(x), "number": model.number}

    def loss(output, targets):
        return LOSS(output["y"], targets)

    _, inputs, targets = problem(rows=48)
    model = of_body(named, number=1.0)
    numbers, reports = [], []
    with graphed(model, 4, two_places) as engine:
        for step in range(7):
            model.number = 1.0 + (step >= 5)
            _, outputs = engine.forward_backward(
                inputs, targets, loss, return_outputs=True
            )
            numbers += [output["number"] for output in outputs]
            reports.append(engine.last_step.graphs)
    assert numbers == [1.0] * 10 + [2.0] * 4
    assert reports[4] == "7 of 8 sub-steps replayed"


def test_objects_returned_by_each_call(two_places):
    """Else a replay would return that of the capture."""

    def with_object(model, x):
        return {"y": model.body(x), "object": Made()}

    class Made:
        pass

    def loss(output, targets):
        return LOSS(output["y"], targets)

    _, inputs, targets = problem(rows=48)
    with graphed(of_body(with_object), 4, two_places) as engine:

        def step():
            results = engine.forward_backward(
                inputs, targets, loss, return_outputs=True
            )
            return results[1]

        with pytest.warns(UserWarning, match="returns a Made"):
            step()
        returned = [made for output in step() for made in output["object"]]
    assert len(set(returned)) == 8


# --- what people run ---


def test_lone_shapes_not_on_tape(two_places, monkeypatch):
    """Where each micro-batch has a shape of its own, there is nothing to prove."""
    tapes = []

    class Counted(replay.Tape):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            tapes.append(self)

    monkeypatch.setattr(replay, "Tape", Counted)
    model = of_body(mean_of_steps)
    targets = randint(CLASSES, 8).to(home())

    def step(lengths):
        rows = [randn(length, FEATURES).to(home()) for length in lengths]
        inputs = Rows(rows, lambda rows: rows[0][None])
        tapes.clear()
        engine.forward_backward(inputs, targets, LOSS)
        return engine.last_step.graphs, len(tapes)

    with graphed(model, 4, two_places) as engine:
        for _ in range(5):
            report = step([2, 3, 2, 3, 2, 3, 2, 3])
        assert report == ("6 of 8 sub-steps replayed", 2)
        assert step([2, 4, 5, 6, 7, 8, 9, 3]) == ("0 of 8 sub-steps replayed", 0)
        assert step([2, 4, 5, 6, 7, 8, 2, 3]) == ("1 of 8 sub-steps replayed", 1)


def test_loss_replays_too(two_places):
    model, inputs, targets = problem(rows=64)

    def run(engine):
        for _ in range(3):
            engine.module.zero_grad()
            loss = engine.loss(inputs, targets, LOSS)
            (3 * loss).backward()
        if engine.graphs:
            assert engine.last_step.graphs == "15 of 16 sub-steps replayed"
        return [loss.detach(), *(p.grad for p in engine.module.parameters())]

    assert_same(run, model, two_places, 8)


def test_ragged_micro_batches_replay(two_places):
    """Micro-batches of two sizes are two graphs."""
    model, inputs, targets = problem(rows=37)
    with graphed(model, 8, two_places) as engine:
        for _ in range(5):
            assert_step(engine, inputs, targets, LOSS)
        assert engine.last_step.graphs == "14 of 16 sub-steps replayed"


def mean_of_steps(model, x):
    return model.body(x).mean(1)


def test_many_shapes_replay(two_places, monkeypatch):
    """As of texts that are padded to another length in each step."""
    _, _, targets = problem(rows=64)
    model = of_body(mean_of_steps)
    lengths = [*range(2, 14), *range(2, 14)]
    with graphed(model, 8, two_places) as engine:
        for number, length in enumerate(lengths):
            inputs = randn(64, length, FEATURES).to(home())
            assert_step(engine, inputs, targets, LOSS)
            # After a capture all replicas are proved.
            count = 7 if number < 12 else 14
            assert engine.last_step.graphs == f"{count} of 16 sub-steps replayed"
        monkeypatch.setattr(captures, "_SHAPES", 2)
        for graphs in engine._one_pass._by_replica:
            graphs.forget()
        for length in (2, 3, 2, 3, 4, 3, 4, 2):  # 4 drops 2, and 2 drops 3
            inputs = randn(64, length, FEATURES).to(home())
            assert_step(engine, inputs, targets, LOSS)
        assert engine.last_step.graphs == "7 of 16 sub-steps replayed"
        assert {len(g.by_shape) for g in engine._one_pass._by_replica} == {2}


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
    with graphed(model, 6, two_places) as engine:
        for _ in range(3):
            for _ in range(2):
                assert_step(engine, inputs, targets, LOSS)
            change(model)


@pytest.mark.parametrize("empty", [nn.Buffer, nn.Parameter])
def test_moved_storage_seen_beside_an_empty_tensor(two_places, empty):
    _, inputs, targets = problem()
    nothing = empty(torch.zeros(0, dtype=torch.float64, device=home()))
    model = of_body(lambda model, x: model.body(x), nothing=nothing)
    with graphed(model, 6, two_places) as engine:
        for _ in range(8):
            assert_step(engine, inputs, targets, LOSS)
        for _ in range(3):  # steps in which one replica alone is proved
            CHANGES["storage"](model)
            assert_step(engine, inputs, targets, LOSS)


def test_changed_criterion_captured_again(two_places):
    model, inputs, targets = problem()
    scale = 1.0

    def closed(output, targets):
        return F.cross_entropy(output, targets) * scale

    with graphed(model, 6, two_places) as engine:
        for criterion in (closed, closed, nn.CrossEntropyLoss(label_smoothing=0.1)):
            for _ in range(2):
                assert_step(engine, inputs, targets, criterion)
            scale += 1


def test_new_criterion_in_each_step_keeps_graphs(two_places):
    """It computes what the captured one computes."""
    model, inputs, targets = problem(rows=36)
    with graphed(model, 3, two_places) as engine:
        for _ in range(5):
            assert_step(engine, inputs, targets, lambda o, t: F.cross_entropy(o, t))
        assert engine.last_step.graphs == "5 of 6 sub-steps replayed"


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
    model, inputs, targets = problem(rows=48)
    read, write = FLAGS[name]
    reports, before = [], read()
    with graphed(model, 6, two_places) as engine:
        for value in (before, before, not before, before):
            write(value)
            try:
                engine.forward_backward(inputs, targets, LOSS)
            finally:
                write(before)
            reports.append(engine.last_step.graphs)
    captured, replayed, again, _ = reports
    assert captured == again == "3 of 12 sub-steps replayed"
    assert replayed == "10 of 12 sub-steps replayed"


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
    _, inputs, targets = problem(rows=48)
    # On the CPU torch's generator is the device's.
    is_told = words != "or the criterion draws" or torch.accelerator.is_available()
    state = random.getstate()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with graphed(of_body(UNCAPTURED[words]), 6, two_places) as engine:
            for _ in range(3):
                assert_step(engine, inputs, targets, LOSS)
    texts = [str(warning.message) for warning in told]
    assert len(texts) == is_told
    assert all(f"because Of {words}" in text for text in texts)
    assert engine.last_step.graphs.startswith("eager: Of") == is_told
    random.setstate(state)


def test_ever_changing_value_is_given_up(two_places):
    """After some steps that were undone, with the operator's name."""
    model, inputs, targets = problem(rows=48)
    factor = 1.0

    def criterion(output, targets):
        return F.cross_entropy(output, targets) * factor

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with graphed(model, 6, two_places) as engine:
            for _ in range(16):
                factor += 1
                assert_step(engine, inputs, targets, criterion)
    (text,) = [str(warning.message) for warning in told]
    assert "changes from step to step: aten.mul.Tensor gets" in text
    assert "Make it a tensor that is written in place" in text


# --- graphs=None ---


@pytest.fixture
def waiting(monkeypatch):
    """Devices that capture, and wait for the host."""
    monkeypatch.setattr(schedule, "captures_graphs", lambda _: True)
    # Kernels of null GPUs take no time.
    monkeypatch.setattr(DeviceClock, "working", lambda clock: clock.launching)
    monkeypatch.setattr(clocks, "_TAIL", 1e9)
    monkeypatch.setattr(decision, "_LONGEST_RATIO", 1e9)


def reports_of(steps, *batch, accum=8, places=(), criterion=LOSS, **options):
    """What is said of graphs in each step, with the default of ``graphs``."""
    model = build(mlp).to(home())
    options = {"verify": False} | options
    with (
        warnings.catch_warnings(action="error"),
        ScatterOnceParallel(model, accum, places or [str(home())], **options) as engine,
    ):
        reports = []
        for _ in range(steps):
            assert_step(engine, *batch, criterion)
            reports.append(engine.last_step.graphs)
    return reports


@pytest.fixture
def rows():
    _, inputs, targets = problem(rows=64)
    return inputs, targets


def test_devices_that_wait_are_captured(waiting, rows, two_places, caplog):
    caplog.set_level("INFO", "scatterpar")
    reports = reports_of(6, *rows, places=two_places)
    early = "eager: devices have not waited for the host in enough steps"
    assert reports[0] == early  # nothing is known yet
    assert all(r.startswith(f"{early}: the host waited for") for r in reports[1:3])
    assert reports[3:] == ["7 of 16 sub-steps replayed", *reports[4:]]
    # After the capture all replicas are proved, and then one in each step.
    assert reports[4:] == ["14 of 16 sub-steps replayed", "15 of 16 sub-steps replayed"]
    lines = [record.getMessage() for record in caplog.records]
    assert lines.count("graphs: devices wait for the host; sub-steps are captured") == 1


def test_devices_that_work_are_left_alone(waiting, rows, monkeypatch):
    monkeypatch.setattr(clocks, "_TAIL", -1.0)
    assert "have not waited" in reports_of(6, *rows)[-1]


def test_few_sub_steps_are_left_alone(waiting, rows):
    assert reports_of(6, *rows, accum=1)[-1] == (
        "eager: fewer than 2 sub-steps per replica"
    )


def test_two_sub_steps_are_captured(waiting, rows, two_places):
    reports = reports_of(12, *rows, accum=2, places=two_places)
    assert reports[-1] == "3 of 4 sub-steps replayed"


def test_host_alone_captures_nothing(rows):
    reports = reports_of(1, *rows)
    assert (reports == ["eager: cpu captures nothing"]) == (home().type == "cpu")


def test_what_helps_is_logged_once(waiting, rows, caplog):
    """No warning, if an option is in the way of graphs that would help."""
    caplog.set_level("INFO", "scatterpar")
    reports = reports_of(6, *rows, buffers="batch")
    why = 'buffers="batch" needs Python in every sub-step'
    assert {*reports} == {f"eager: {why}"}  # the hint says what helps
    remedies = "devices wait for the host here, what helps: larger micro-batches"
    lines = [record.getMessage() for record in caplog.records]
    told = [line for line in lines if f"{why}; {remedies}" in line]
    assert len(told) == 1
    assert "compile=True" in told[0]


def test_default_stays_silent_of_changes(waiting, rows):
    factor = 1.0

    def criterion(output, targets):
        return F.cross_entropy(output, targets) * factor

    model = build(mlp).to(home())
    engine = ScatterOnceParallel(model, 8, [str(home())], verify=False)
    with engine, warnings.catch_warnings(action="error"):
        for step in range(40):
            factor += step > 4
            assert_step(engine, *rows, criterion)
        assert "something changes from step to step" in engine.last_step.graphs


def test_whole_batch_told_once_if_asked(two_places, rows):
    model, *_ = problem(rows=64)
    with graphed(model, 4, two_places) as engine:
        with pytest.warns(match="whole_batch=True has one loss, after all sub-steps"):
            engine.forward_backward(*rows, LOSS, whole_batch=True)
        with warnings.catch_warnings(action="error"):
            engine.forward_backward(*rows, LOSS, whole_batch=True)
        assert engine.last_step.graphs.startswith("eager: whole_batch=True")


def test_statistics_told_once_if_asked(two_places, rows):
    """``nn.SyncBatchNorm`` exchanges them in each sub-step."""
    if len({*two_places}) == 1:
        pytest.skip("replicas that exchange statistics share no accelerator")
    model = build(lambda: mlp(nn.SyncBatchNorm(8))).to(home())
    with graphed(model, 4, two_places) as engine:
        words = "nn.SyncBatchNorm layers exchange statistics in each sub-step"
        with pytest.warns(match=f"graphs=True.*because {words}"):
            engine.forward_backward(*rows, LOSS)
        with warnings.catch_warnings(action="error"):
            for _ in range(2):
                engine.forward_backward(*rows, LOSS)
        assert engine.last_step.graphs == f"eager: {words}"


class Counting:
    """A backend of ``torch.compile`` that counts the calls of what it has compiled."""

    def __init__(self):
        torch.compiler.reset()  # a function is compiled a few times at most
        self.calls = 0

    def __call__(self, graph_module, _):
        def run(*arguments):
            self.calls += 1
            return graph_module.forward(*arguments)

        return run


def compile_root(model, backend):
    model.compile(backend=backend)


def compile_block(model, backend):
    model[0].compile(backend=backend)


def compile_part(model, backend):
    model[0] = torch.compile(model[0], backend=backend)


@pytest.mark.parametrize("compile_it", [compile_root, compile_block, compile_part])
def test_compiled_modules_stay_compiled(two_places, rows, compile_it):
    """In each sub-step, those of the first step, too; this is told once."""
    model = build(mlp).to(home())
    backend = Counting()
    compile_it(model, backend)
    with graphed(model, 4, two_places) as engine:
        with pytest.warns(match="graphs=True.*either compiled or captured"):
            engine.forward_backward(*rows, LOSS)
        assert backend.calls == 8
        with warnings.catch_warnings(action="error"):
            engine.forward_backward(*rows, LOSS)
        assert backend.calls == 16
        assert "either compiled or captured" in engine.last_step.graphs


@pytest.mark.parametrize("where", ["criterion", "forward"])
@pytest.mark.parametrize("graphs", [True, None])
def test_compiled_functions_stay_compiled(waiting, two_places, rows, where, graphs):
    """In a captured sub-step they ran uncompiled, and nobody was told."""
    backend = Counting()
    function = torch.compile(lambda x: x.tanh() * 2, backend=backend)
    if where == "forward":
        model, criterion = of_body(lambda model, x: function(model.body(x))), LOSS
    else:
        model = of_body(lambda model, x: model.body(x))

        def criterion(output, targets):
            return LOSS(function(output), targets)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with graphed(model, 4, two_places, graphs=graphs) as engine:
            for _ in range(8):
                backend.calls = 0
                assert_step(engine, *rows, criterion)
            report = engine.last_step.graphs
    assert report.startswith("eager: Of calls a function that torch.compile has")
    # The oracle has one more call.
    assert backend.calls == 8 + 1
    texts = [str(warning.message) for warning in told]
    is_told = ["graphs=True" in text for text in texts]
    assert is_told.count(True) == (graphs is True)


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


def of_limited(has_room):
    """A model that runs out of memory for some numbers of rows."""

    def limited(model, x):
        if not has_room(len(x)):
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB"
            )
        return model.norm(model.body(x))

    return of_body(limited, norm=nn.BatchNorm1d(CLASSES))


def has_graphs(engine):
    return any(graphs.by_shape for graphs in engine._one_pass._by_replica)


def test_memory_of_graphs_given_up_first():
    """The same number of sub-steps, without graphs."""
    _, inputs, targets = problem(rows=48)
    results = []
    for graphs in (True, False):
        holder = []
        model = of_limited(lambda _, holder=holder: not any(map(has_graphs, holder)))
        engine = graphed(model, 6, [str(home())], graphs=graphs)
        holder += [engine] if graphs else []
        with engine, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            losses = [engine.forward_backward(inputs, targets, LOSS) for _ in range(3)]
        assert len(engine.last_step.plan.shares[0].micro_batches) == 6
        texts = [str(warning.message) for warning in told]
        assert len(texts) == graphs
        assert all("because memory ran out with them" in text for text in texts)
        results.append((model, torch.stack(losses)))
    (model, losses), (expected, expected_losses) = results
    assert torch.equal(losses, expected_losses)
    assert values_differ(model, expected) == []


@pytest.mark.filterwarnings("error", 'ignore:accum="auto"')
def test_more_sub_steps_keep_graphs():
    """The result is that of the same fixed number of sub-steps, bit for bit."""
    _, inputs, targets = problem(rows=48)
    results = []
    for accum, room in (("auto", 10), (5, 48)):
        model = of_limited(lambda rows, room=room: rows <= room)
        with graphed(model, accum, [str(home())]) as engine:
            losses = [engine.forward_backward(inputs, targets, LOSS) for _ in range(6)]
            assert len(engine.last_step.plan.shares[0].micro_batches) == 5
            assert "replayed" in engine.last_step.graphs
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
        for is_on in (True, True, True, False, True, True):
            with torch.autocast(home().type, torch.bfloat16, enabled=is_on):
                found.append(engine.forward_backward(inputs.float(), targets, LOSS))
        return found

    found = assert_same(run, model.float(), two_places, 6)
    assert found[0] == found[2] == found[4] == found[5] != found[3]


# --- what is replayed is proved in the same step ---


class Drawing(nn.Module):
    """Draws on the host, which graphs refuse, for texts of seven words."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, CLASSES)
        self.scale, self.draws = 1.0, False

    def forward(self, words):
        if self.draws and words.shape[1] == 7:
            random.random()
        return self.layer(words).mean(1) * self.scale


def gradients_of_steps(windows, places, changes, **options):
    """The gradients of a step per window of batches, in which the module changes before
    the steps of ``changes``.
    """
    net = build(Drawing).float().to(home())
    generator = torch.Generator().manual_seed(1)
    gradients = []
    engine = ScatterOnceParallel(net, 1, places, verify=False, **options)
    with engine:
        for step, window in enumerate(windows):
            inputs = [torch.randn(*size, 4, generator=generator) for size in window]
            labels = [
                torch.randint(CLASSES, size[:1], generator=generator) for size in window
            ]
            for name, value in changes.get(step, {}).items():
                setattr(net, name, value)
            net.zero_grad()
            engine.forward_backward(
                Rows.from_batches(inputs), Rows.from_batches(labels), LOSS
            )
            gradients.append(net.layer.weight.grad.clone())
    return gradients


def test_replays_before_a_refusal_are_proved(places):
    """A later sub-step refused graphs, and the step ran its last ones eagerly: those
    that had been replayed with an old scale were committed.
    """
    rows = 8 * len(places)
    windows = [[(rows, 5)] * 3] * 8 + [[(rows, 5), (rows, 7), (rows, 5)]] * 4
    changes = {9: {"scale": 5.0, "draws": True}}
    options = {"micro_batch_size": 4}
    state = random.getstate()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # graphs=True names the obstacle
        actual = gradients_of_steps(windows, places, changes, graphs=True, **options)
    expected = gradients_of_steps(windows, places, changes, graphs=False, **options)
    random.setstate(state)
    torch.testing.assert_close(actual, expected)


def test_replays_are_proved_if_a_replica_has_no_graph(two_places):
    """It was its turn to prove a shape that it met for the first time: nobody did, in
    three steps.
    """
    windows = [[(5, 5)] * 3] * 9 + [[(6, 5)] * 3] * 5
    changes = {9: {"scale": 5.0}}
    options = {"micro_batch_size": 3}
    actual = gradients_of_steps(windows, two_places, changes, graphs=True, **options)
    expected = gradients_of_steps(windows, two_places, changes, graphs=False, **options)
    torch.testing.assert_close(actual, expected)
