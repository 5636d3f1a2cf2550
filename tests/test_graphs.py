"""``graphs=True``: sub-steps that are captured once, and replayed.

On the CPU the same code is called again, on the same tensors; with an accelerator
(``test_simulated.py`` runs this on a simulated one) it is really captured.
"""

from __future__ import annotations

import copy
import os
import random
import signal
import threading
import time
import warnings
from collections import Counter
from typing import ClassVar

import pytest
import torch
from harness.oracle import assert_close, assert_gradients, build, randint, randn
from harness.oracle import whole_batch as plain_step
from torch import nn
from torch.nn import functional as F

from scatterpar import ScatterOnceParallel

pytestmark = [pytest.mark.cuda, pytest.mark.nullcuda]

ROWS, FEATURES, CLASSES = 37, 6, 3
PLACES = [1, "shared", 2]


@pytest.fixture(params=PLACES, ids=str)
def places(request):
    """Replicas on so many devices, or three that share one."""
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if request.param == "shared":
        return [0, 0, 0] if here else ["cpu"] * 3
    if here and torch.accelerator.device_count() < request.param:
        pytest.skip(f"needs {request.param} accelerators")
    return list(range(request.param)) if here else [f"cpu:{i}" for i in range(request.param)]


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
        seen = nn.Transformer.generate_square_subsequent_mask(words.shape[1], words.device)
        return self.head(self.blocks(self.words(words), seen, is_causal=True).mean(1))


def mlp(*layers):
    return build(lambda: nn.Sequential(nn.Linear(FEATURES, 8), *layers, nn.Tanh(), nn.Linear(8, 3)))


def cnn(*layers):
    return build(
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), *layers, nn.ReLU(), nn.Flatten(), nn.Linear(64, CLASSES)
        )
    )


PROBLEMS = {
    "mlp": (mlp, lambda rows: randn(rows, FEATURES)),
    "cnn": (cnn, lambda rows: randn(rows, 1, 6, 6)),
    "gpt": (lambda: build(GPT), lambda rows: randint(11, rows, 5)),
}


def problem(name, rows=ROWS):
    make, inputs = PROBLEMS[name]
    return make().to(home()), inputs(rows).to(home()), randint(CLASSES, rows).to(home())


def engines(model, places, accum, *, draws=False, **options):
    """With graphs and without, each with a copy of the model.

    Where numbers are drawn on CUDA, both with graphs: without a card nobody can say what it draws.
    """
    for graphs in (True, draws and home().type == "cuda"):
        yield ScatterOnceParallel(
            copy.deepcopy(model), accum, places, graphs=graphs, verify=False, **options
        )


def assert_same(one, other):
    """The same bits in everything that a step leaves."""
    for (name, left), right in zip(
        one.module.named_parameters(), other.module.parameters(), strict=True
    ):
        assert (left.grad is None) == (right.grad is None), name
        assert left.grad is None or torch.equal(left.grad, right.grad), name
    for (name, left), right in zip(one.module.named_buffers(), other.module.buffers(), strict=True):
        assert torch.equal(left, right), name


@pytest.mark.parametrize(
    ("places", "accum"), [(1, 16), (2, 3), (4, 1), (4, 4), ("shared", 2)], indirect=["places"]
)
@pytest.mark.parametrize("name", PROBLEMS)
def test_gradients_are_those_of_the_whole_batch(places, name, accum):
    model, inputs, targets = problem(name)
    criterion = nn.CrossEntropyLoss()
    with ScatterOnceParallel(model, accum, places, graphs=True, verify=False) as engine:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for rows in (ROWS, ROWS, 20, ROWS):
            expected_loss, expected = plain_step(model, inputs[:rows], targets[:rows], criterion)
            optimizer.zero_grad()
            loss = engine.forward_backward(inputs[:rows], targets[:rows], criterion)
            assert_close(loss, expected_loss, "loss")
            assert_gradients(model, expected)
            optimizer.step()


class Draws(nn.Module):
    """Keeps what it drew, in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("drawn", torch.zeros(4, dtype=torch.float64))

    def forward(self, x):
        self.drawn.mul_(3).add_(torch.rand(4, device=x.device, dtype=torch.float64))
        return x


LAYERS = {
    "dropout": (mlp, lambda: (nn.Dropout(0.3), Draws())),
    "batch_norm": (cnn, lambda: (nn.BatchNorm2d(4, dtype=torch.float64),)),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.draws
def test_draws_and_buffers_are_those_of_a_step_without_graphs(places, name):
    make, layers = LAYERS[name]
    model = make(*layers()).to(home())
    inputs = PROBLEMS["mlp" if make is mlp else "cnn"][1](ROWS).to(home())
    targets, criterion = randint(CLASSES, ROWS).to(home()), nn.CrossEntropyLoss()
    results = []
    for engine in engines(model, places, 3, draws=True):
        with engine:
            torch.manual_seed(7)
            losses = [engine.forward_backward(inputs, targets, criterion) for _ in range(3)]
        results.append((engine, torch.stack(losses), torch.rand(3)))
    (one, losses, after), (other, expected, expected_after) = results
    assert torch.equal(losses, expected)
    assert losses.unique().numel() == 3 or name == "batch_norm"
    assert torch.equal(after, expected_after)
    assert_same(one, other)


def test_outputs_scaler_weights_and_masks(places):
    model, inputs, targets = problem("gpt")
    targets[::3] = -100
    criterion, scaler = nn.CrossEntropyLoss(), torch.amp.GradScaler(home().type, init_scale=8.0)
    results = []
    for engine in engines(model, places, 4, check_finite=True, accumulate_dtype=torch.float64):
        with engine:
            for _ in range(2):
                loss, outputs = engine.forward_backward(
                    {"words": inputs}, targets, criterion, scaler=scaler, return_outputs=True
                )
        results.append((engine, loss, torch.cat([output.cpu() for output in outputs])))
    (one, loss, outputs), (other, expected_loss, expected_outputs) = results
    assert torch.equal(loss, expected_loss)
    assert torch.equal(outputs, expected_outputs)
    assert_same(one, other)


class Partly(nn.Module):
    """One branch for short rows, another for long ones; one that nobody uses."""

    def __init__(self):
        super().__init__()
        self.short, self.long, self.never = (nn.Linear(FEATURES, CLASSES) for _ in range(3))

    def forward(self, x):
        return (self.long if x.shape[1] > 4 else self.short)(x).mean(1)


@pytest.mark.parametrize(
    "lengths", [(3, 6, 3, 6), (*range(1, 12), 1, 11)], ids=["two", "beyond a handful"]
)
def test_what_is_not_used_in_a_step_has_no_gradient(places, lengths):
    """Shapes beyond a handful run without graphs."""
    model = build(Partly).to(home())
    targets, criterion = randint(CLASSES, ROWS).to(home()), nn.CrossEntropyLoss()
    with ScatterOnceParallel(model, 2, places, graphs=True, verify=False) as engine:
        for length in lengths:
            inputs = randn(ROWS, length, FEATURES, seed=length).to(home())
            model.zero_grad()
            engine.forward_backward(inputs, targets, criterion)
            assert model.never.weight.grad is None
            assert (model.short.weight.grad is None) == (length > 4)
            assert_gradients(model, plain_step(model, inputs, targets, criterion)[1])


# --- what has changed is captured anew ---


@pytest.fixture
def two_places():
    """Two replicas, on two devices."""
    return [0, 1] if torch.accelerator.is_available() else ["cpu:0", "cpu:1"]


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.factor = nn.Linear(FEATURES, CLASSES), 1.0

    def forward(self, x):
        return self.body(x) * self.factor


CHANGES = {
    "number": lambda model: setattr(model, "factor", model.factor + 1),
    "layer": lambda model: setattr(
        model, "body", nn.Linear(FEATURES, CLASSES, dtype=torch.float64).to(home())
    ),
    "storage": lambda model: setattr(model.body.weight, "data", model.body.weight.detach() * 2),
    "frozen": lambda model: model.body.bias.requires_grad_(not model.body.bias.requires_grad),
    "hook": lambda model: model.body.register_forward_hook(lambda _m, _i, output: output * 3),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.draws
def test_a_module_that_has_changed_is_captured_anew(two_places, change):
    model = build(Scaled).to(home())
    inputs, targets = problem("mlp")[1:]
    criterion = nn.CrossEntropyLoss()
    with ScatterOnceParallel(model, 3, two_places, graphs=True, verify=False) as engine:
        for _ in range(3):
            model.zero_grad()
            expected = plain_step(model, inputs, targets, criterion)[1]
            engine.forward_backward(inputs, targets, criterion)
            assert_gradients(model, expected)
            change(model)


def test_another_criterion_or_what_is_in_it_too(two_places):
    model, inputs, targets = problem("mlp")
    scale = 1.0

    def closed(output, targets):
        return F.cross_entropy(output, targets) * scale

    with ScatterOnceParallel(model, 3, two_places, graphs=True, verify=False) as engine:
        for criterion in (closed, closed, nn.CrossEntropyLoss(label_smoothing=0.1)):
            model.zero_grad()
            engine.forward_backward(inputs, targets, criterion)
            assert_gradients(model, plain_step(model, inputs, targets, criterion)[1])
            scale += 1


FLAGS = {
    "matmul": (torch.backends.cuda.matmul, "allow_tf32"),
    "convolution": (torch.backends.cudnn, "allow_tf32"),
    "benchmark": (torch.backends.cudnn, "benchmark"),
    "deterministic": (torch.backends.cudnn, "deterministic"),
}


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_that_choose_kernels_are_captured_anew(two_places, flag):
    """A graph keeps the kernels that it was captured with."""
    model, inputs, targets = problem("mlp")
    criterion, calls = nn.CrossEntropyLoss(), []
    model.register_forward_hook(lambda *_: calls.append(1))
    holder, name = FLAGS[flag]
    before = getattr(holder, name)
    with ScatterOnceParallel(model, 1, two_places, graphs=True, verify=False) as engine:
        engine.forward_backward(inputs, targets, criterion)
        captured = len(calls)
        engine.forward_backward(inputs, targets, criterion)
        replayed = len(calls) - captured
        setattr(holder, name, not before)
        try:
            engine.forward_backward(inputs, targets, criterion)
        finally:
            setattr(holder, name, before)
    assert len(calls) - captured - replayed == captured > replayed


# --- what cannot be captured runs without, and is told ---


class Asks(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (1 + float(x.sum() > 0))


class Keeps(nn.Linear):
    def forward(self, x):
        self.kept = super().forward(x)
        return self.kept


class Tosses(nn.Linear):
    def forward(self, x):
        random.random()
        return super().forward(x)


class DrawsOnTheHost(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 0 * torch.rand(())


UNCAPTURED = {
    "Asks cannot be captured: it waits for the device": (Asks, True),
    "Keeps keeps something on the module": (Keeps, False),
    "Tosses or the criterion draws random numbers on the host": (Tosses, True),
    "DrawsOnTheHost or the criterion draws": (DrawsOnTheHost, True),
}


@pytest.mark.parametrize("words", UNCAPTURED)
@pytest.mark.draws
def test_what_cannot_be_captured_runs_without_and_is_told_once(two_places, words):
    kind, only_on_accelerators = UNCAPTURED[words]
    model = build(lambda: kind(FEATURES, CLASSES)).to(home())
    inputs, targets = problem("mlp")[1:]
    criterion = nn.CrossEntropyLoss()
    state = random.getstate()
    with ScatterOnceParallel(model, 3, two_places, graphs=True, verify=False) as engine:
        for step in range(3):
            model.zero_grad()
            told = step == 0 and (not only_on_accelerators or torch.accelerator.is_available())
            with pytest.warns(match=words) if told else warnings.catch_warnings(action="error"):
                engine.forward_backward(inputs, targets, criterion)
            if kind is not Asks:  # which sees a micro-batch
                assert_gradients(model, plain_step(model, inputs, targets, criterion)[1])
    random.setstate(state)


@pytest.mark.draws
def test_a_criterion_that_has_parameters_of_its_own_in_a_closure_is_refused(two_places):
    model, inputs, targets = problem("mlp")
    temperature = nn.Parameter(torch.tensor(2.0, dtype=torch.float64, device=home()))

    def criterion(output, targets):
        return F.cross_entropy(output * temperature.to(output.device), targets)

    with ScatterOnceParallel(model, 2, two_places, graphs=True, verify=False) as engine:
        with pytest.raises(ValueError, match=r"arrives at temperature, .* functools\.partial"):
            engine.forward_backward(inputs, targets, criterion)
        assert temperature.grad is None
        temperature.requires_grad_(False)
        engine.forward_backward(inputs, targets, criterion)
    assert_gradients(model, plain_step(model, inputs, targets, criterion)[1])


def test_a_criterion_that_is_made_anew_in_every_step_is_given_up(two_places):
    model, inputs, targets = problem("mlp", rows=8)
    with ScatterOnceParallel(model, 1, two_places, graphs=True, verify=False) as engine:

        def steps():
            for _ in range(34):
                engine.forward_backward(inputs, targets, lambda o, t: F.cross_entropy(o, t))

        with pytest.warns(match="captured 32 times, since something changes from step to step"):
            steps()


# --- whole or not at all ---


@pytest.mark.draws
def test_a_step_that_fails_leaves_no_trace(two_places):
    """In a captured sub-step, and in one that is being captured."""
    model = mlp(nn.Dropout(0.5)).to(home())
    inputs, targets = problem("mlp")[1:]
    boom = threading.Event()

    def output_kept(output):
        if boom.is_set():
            raise ValueError("boom")
        return output

    results = []
    for engine in engines(model, two_places, 4, draws=True):
        torch.manual_seed(3)
        with engine:
            for rows in (ROWS, 16):
                boom.set()
                with pytest.raises(ValueError, match="boom"):
                    engine.forward_backward(
                        inputs[:rows], targets[:rows], F.cross_entropy, return_outputs=output_kept
                    )
                assert all(p.grad is None for p in engine.module.parameters())
                boom.clear()
            for _ in range(2):
                engine.forward_backward(inputs, targets, F.cross_entropy)
        results.append(engine)
    assert_same(*results)


def test_ctrl_c_between_captured_sub_steps_leaves_no_trace(two_places):
    """A real signal, while replicas are at work."""
    model, inputs, targets = problem("mlp")
    strikes = iter([False] * 5 + [True])

    def interrupted(output):
        if next(strikes, False):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)  # the caller's thread is told in the meantime
        return output

    criterion = nn.CrossEntropyLoss()
    with ScatterOnceParallel(model, 4, two_places, graphs=True, verify=False) as engine:

        def steps():
            for _ in range(2):
                engine.forward_backward(inputs, targets, criterion, return_outputs=interrupted)

        with pytest.raises(KeyboardInterrupt):
            steps()
        assert all(parameter.grad is None for parameter in model.parameters())
        engine.forward_backward(inputs, targets, criterion)
        assert_gradients(model, plain_step(model, inputs, targets, criterion)[1])


class Hungry(nn.Module):
    """Has no room for more than so many rows, from the call of this number with as many on."""

    calls: ClassVar[Counter[int]] = Counter()

    def __init__(self, rows, call):
        super().__init__()
        self.body, self.norm = nn.Linear(FEATURES, CLASSES), nn.BatchNorm1d(CLASSES)
        self.rows, self.call = rows, call

    def forward(self, x):
        self.calls[len(x)] += 1
        if len(x) > self.rows and self.calls[len(x)] >= self.call:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return self.norm(self.body(x))


@pytest.mark.parametrize("call", [1, 3], ids=["warming up", "captured"])
def test_memory_that_runs_out_in_a_capture_makes_more_sub_steps(call):
    """The result is that of the same fixed number of sub-steps, bit for bit."""
    Hungry.calls.clear()
    inputs, targets = problem("mlp")[1:]
    criterion, place = nn.CrossEntropyLoss(), [str(home())]
    results = []
    for accum, room in (("auto", 10), (4, ROWS)):
        model = build(lambda room=room: Hungry(room, call)).to(home())
        with ScatterOnceParallel(model, accum, place, graphs=True, verify=False) as engine:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message='accum="auto"')  # and no others
                losses = [engine.forward_backward(inputs, targets, criterion) for _ in range(2)]
            assert len(engine.last_step.plan.shares[0].micro_batches) == 4
        results.append((engine, losses))
    assert torch.equal(torch.stack(results[0][1]), torch.stack(results[1][1]))
    assert_same(results[0][0], results[1][0])


# --- beside other things ---


def test_autocast_is_captured_too(two_places):
    """With it and without are two graphs."""
    model, inputs, targets = problem("mlp")
    model, inputs = model.float(), inputs.float()
    found = []
    for engine in engines(model, two_places, 3):
        with engine:
            for is_on in (True, True, False, True):
                with torch.autocast(home().type, torch.bfloat16, enabled=is_on):
                    found.append(engine.forward_backward(inputs, targets, nn.CrossEntropyLoss()))
    half = len(found) // 2
    assert torch.equal(torch.stack(found[:half]), torch.stack(found[half:]))
    assert found[0] == found[1] == found[3] != found[2]


def test_copies_of_an_engine_capture_for_themselves(two_places):
    model, inputs, targets = problem("mlp")
    criterion = nn.CrossEntropyLoss()
    with ScatterOnceParallel(model, 2, two_places, graphs=True, verify=False) as engine:
        engine.forward_backward(inputs, targets, criterion)
        with copy.deepcopy(engine) as other:
            other.module.zero_grad()
            other.forward_backward(inputs, targets, criterion)
            assert_same(engine, other)
