"""Random numbers: reproducible to the bit, different in every replica, and nobody
else's.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from faults.processes import run
from harness.models import CLASSES, FEATURES, Of, Returns, mlp
from harness.oracle import (
    assert_close,
    assert_gradients,
    assert_step,
    build,
    gradients,
    randint,
    randn,
)
from harness.pairwise import few_of
from pair.common import Pair
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from scatterpar import ScatterOnceParallel

pytestmark = [pytest.mark.core, pytest.mark.draws]
ROWS = 24
INPUTS, LABELS = randn(ROWS, FEATURES), randint(CLASSES, ROWS)
NUMBERED = torch.cat([torch.arange(ROWS).double()[:, None], INPUTS], 1)
LOSS = nn.CrossEntropyLoss()
by_both = pytest.mark.parametrize("runner", ["engine", "pair"])


class Noisy(nn.Module):
    """Dropout that writes down which mask each row got, by a row number in the first
    feature.

    Drawn again under checkpointing, a row must get the mask that it got before.
    """

    drawn: dict[int, torch.Tensor] = {}  # noqa: RUF012
    lock = threading.Lock()
    replay = False

    def __init__(self, use_reentrant=None):
        super().__init__()
        self.first, self.head = nn.Linear(FEATURES, 32), nn.Linear(32, CLASSES)
        self.use_reentrant = use_reentrant

    def mask(self, rows, hidden):
        if Noisy.replay:
            return torch.stack([Noisy.drawn[row] for row in rows.tolist()])
        mask = torch.bernoulli(torch.full_like(hidden, 0.5)) * 2
        with Noisy.lock:
            for row, its in zip(rows.tolist(), mask.detach().clone(), strict=True):
                Noisy.drawn.setdefault(row, its)
        return mask

    def block(self, rows, inputs):
        hidden = self.first(inputs).tanh()
        return hidden * self.mask(rows, hidden)

    def forward(self, numbered):
        rows, inputs = numbered[:, 0].long(), numbered[:, 1:]
        if self.use_reentrant is None:
            return self.head(self.block(rows, inputs))
        # the reentrant variant needs one such input
        inputs = inputs.detach().requires_grad_()
        return self.head(
            checkpoint(self.block, rows, inputs, use_reentrant=self.use_reentrant)
        )


def dropout_model():
    return build(
        lambda: nn.Sequential(*mlp()[:2], nn.Dropout(0.5), nn.Linear(7, CLASSES))
    )


def forward_of(replica, inputs):
    return replica(inputs)


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture(autouse=True)
def _no_masks():
    Noisy.drawn.clear()
    Noisy.replay = False


@contextlib.contextmanager
def training(runner, model, device_ids, accum=2, criterion=LOSS):
    """``step(inputs, targets, seed)``: the loss and gradients of a step that begins
    without any.
    """

    def by_pair(*batch):
        loss = pair.loss(*batch)
        assert torch.rand(3).unique().numel() == 3  # others draw before backward
        state = torch.get_rng_state()
        loss.backward()
        assert torch.equal(torch.get_rng_state(), state)
        return loss.detach()

    def step(inputs=INPUTS, targets=LABELS, seed=None):
        model.zero_grad()
        if seed is not None:
            torch.manual_seed(seed)
        loss = run(inputs, targets)
        return [loss, *(p.grad.clone() for p in model.parameters())]

    if runner == "pair":
        pair, run = Pair(model, criterion, device_ids), by_pair
        yield step
    else:
        with ScatterOnceParallel(model, accum, device_ids) as engine:
            joined = runner == "whole batch"
            run = partial(
                engine.forward_backward, criterion=criterion, whole_batch=joined
            )
            yield step


@pytest.mark.parametrize("runner", ["engine", "pair", "whole batch"])
@pytest.mark.parametrize("use_reentrant", few_of([None, True, False], [True]))
def test_gradients_belong_to_drawn_masks(devices, use_reentrant, runner):
    """Replay the very masks on one device: a recomputation with others
    would show here.
    """
    model, twin = build(lambda: Noisy(use_reentrant)), build(Noisy)
    with training(runner, model, devices(4), 3) as step:
        for seed in range(3):
            Noisy.drawn.clear()
            Noisy.replay = False
            loss = step(NUMBERED, seed=seed)[0]
            masks = {tuple(mask.tolist()) for mask in Noisy.drawn.values()}
            assert len(Noisy.drawn) == len(masks) == ROWS, "another one for each row"
            Noisy.replay = True
            twin.zero_grad()
            expected = LOSS(twin(NUMBERED), LABELS)
            expected.backward()
            assert_close(loss, expected.detach(), "loss")
            assert_gradients(model, gradients(twin))


@pytest.mark.contract
@by_both
@pytest.mark.parametrize("criterion_draws", few_of([False, True], [True]))
def test_seed_decides_step_of_used_engine(devices, runner, criterion_draws):
    def criterion(output, targets):
        return LOSS(nn.functional.dropout(output, 0.5), targets)

    drawing = (mlp(), criterion) if criterion_draws else (dropout_model(), LOSS)
    with training(runner, drawing[0], devices(3), criterion=drawing[1]) as step:
        first, other = step(seed=7), step(seed=8)
        step(INPUTS[:5], LABELS[:5])
        assert equal(first, step(seed=7))
        assert not equal(first, other)
        torch.manual_seed(1)
        assert len({step()[0].item() for _ in range(6)}) == 6, (
            "without a new seed they differ"
        )


@by_both
def test_draw_of_any_replica_moves_generator(devices, runner):
    """If only replica 1 drew, the next step must not draw the same again."""

    def of_the_last(logits, inputs):
        return (
            logits * torch.rand_like(logits)
            if (inputs[-1] == INPUTS[-1]).all()
            else logits
        )

    with training(runner, build(lambda: Returns(of_the_last)), devices(2), 1) as step:
        assert step(seed=1)[0] != step()[0]


@pytest.mark.parametrize("model", [mlp, lambda: dropout_model().eval()])
def test_no_draws_leave_generator_untouched(devices, model):
    before = torch.get_rng_state()
    with ScatterOnceParallel(model(), 2, devices(3)) as engine:
        engine.forward_backward(INPUTS, LABELS, LOSS)
        engine.eval()
        engine(INPUTS)
    Pair(model(), LOSS, devices(3)).check(INPUTS, LABELS)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("accum", [1, 3])
def test_one_replica_has_bits_of_plain_loop(devices, accum):
    ours, plain = dropout_model(), dropout_model()
    with training("engine", ours, devices(1), accum) as step:
        found = [*step(seed=5)[1:], *step()[1:], torch.rand(3)]
    torch.manual_seed(5)
    expected = []
    for _ in range(2):
        plain.zero_grad()
        for inputs, targets in zip(
            INPUTS.chunk(accum), LABELS.chunk(accum), strict=True
        ):
            (
                nn.functional.cross_entropy(plain(inputs), targets)
                * (len(inputs) / ROWS)
            ).backward()
        expected += [p.grad.clone() for p in plain.parameters()]
    assert equal(found, [*expected, torch.rand(3)])


@pytest.mark.contract
@pytest.mark.parametrize("way", ["call", "map"])
def test_seed_decides_inference_draws(devices, way):
    found = []
    with ScatterOnceParallel(dropout_model(), 2, devices(3)) as engine, torch.no_grad():
        compute = engine if way == "call" else partial(engine.map, forward_of)
        for _ in range(2):
            torch.manual_seed(1)
            found.append([compute(INPUTS), compute(INPUTS)])
    assert equal(*found)
    assert not torch.equal(*found[0])


@pytest.mark.contract
def test_replica_0_continues_callers_draws(devices):
    """Its masks are those that a plain call with the same seed draws."""
    with training("engine", build(Noisy), devices(3), 1) as step:
        step(NUMBERED, seed=11)
    torch.manual_seed(11)
    expected = torch.bernoulli(torch.full((8, 32), 0.5).double()) * 2
    assert torch.equal(torch.stack([Noisy.drawn[row] for row in range(8)]), expected)


WAYS = [
    torch.rand_like,
    lambda x: torch.empty_like(x).uniform_(),
    lambda x: torch.randperm(x.numel()).view(x.shape),
    lambda x: torch.multinomial(torch.ones(x.shape), x.shape[1]),
    lambda x: torch.distributions.Gamma(torch.ones_like(x), 1.0).sample(),
    lambda x: nn.functional.scaled_dot_product_attention(
        *[x.detach()[None]] * 3, dropout_p=0.5
    )[0],
]


@pytest.mark.parametrize("draw", few_of(WAYS, [WAYS[0], WAYS[3], WAYS[5]]))
def test_every_way_to_draw_is_seeded(devices, draw):
    """Same seed same bits, another seed other bits."""
    model = build(
        lambda: Returns(lambda logits, _: logits * draw(logits).to(logits.dtype))
    )
    with training("engine", model, devices(3)) as step:
        first, other, again = (step(seed=seed) for seed in (1, 2, 1))
    assert equal(first, again)
    assert not equal(first, other)


@pytest.mark.parametrize("replicas", [1, 3])
def test_users_own_generator_is_used(devices, replicas):
    own, before, states = torch.Generator(), torch.get_rng_state(), []
    draws = lambda logits, _: logits * torch.rand(CLASSES, generator=own).double()  # noqa: E731
    with training(
        "engine", build(lambda: Returns(draws)), devices(replicas), 1
    ) as step:
        for _ in range(2):
            own.manual_seed(4)
            step()
            states.append(own.get_state())
    assert torch.equal(*states)
    assert not torch.equal(states[0], own.manual_seed(4).get_state())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.contract
@by_both
@pytest.mark.parametrize("replicas", [1, 3])
def test_failed_step_restores_generator(devices, replicas, runner):
    """One replica draws from the process's own generator, several from theirs."""

    def fail(logits, inputs):
        torch.rand(3)
        if (inputs == INPUTS[-1]).all(1).any():
            raise ArithmeticError("after drawing")
        return logits

    with training(runner, build(lambda: Returns(fail)), devices(replicas)) as step:
        before = torch.get_rng_state()
        with pytest.raises(ArithmeticError):
            step()
        assert torch.equal(torch.get_rng_state(), before)


def test_other_threads_draws_not_repeated():
    """Such as one that prepares the next batch."""
    drawn = []

    def meets(logits, inputs):
        if torch.equal(inputs[0], INPUTS[0]):  # replica 0's
            with ThreadPoolExecutor(1) as pool:
                drawn.append(pool.submit(torch.rand, ()).result().item())
        return logits

    model = build(lambda: Returns(meets))
    with ScatterOnceParallel(model, 1, ["cpu"] * 2, verify=False) as engine:
        for _ in range(3):
            engine.forward_backward(INPUTS, LABELS, LOSS)
    assert len({*drawn}) == 3


WITHOUT_KEY = """
import torch, warnings
parse = torch._C._dispatch_key_parse
def parse_without(name):
    if name == "TESTING_ONLY_GenericMode":
        raise RuntimeError(f"could not parse dispatch key: {name}")
    return parse(name)
torch._C._dispatch_key_parse = parse_without
"""
DRAWING_STEPS = """
import sys, warnings
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from scatterpar import ScatterOnceParallel

class Again(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 2))

    def forward(self, rows):
        return checkpoint(self.inner, rows, use_reentrant=False)

torch.manual_seed(3)
model, found = Again().double(), []
inputs, targets = torch.randn(12, 4).double(), torch.randn(12, 2).double()
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    for devices in (["cpu"] * 3, ["cpu:0", "cpu:1"]):
        with ScatterOnceParallel(model, 2, devices) as engine:
            for rows in (12, 2):
                loss = engine.forward_backward(inputs[:rows], targets[:rows], nn.MSELoss())
                found.append(loss.item())
            found.append(engine.map(lambda model, rows: torch.rand_like(rows), inputs).sum())
found += [parameter.grad.sum().item() for parameter in model.parameters()]
print(*map(float, found), float(torch.rand(())))
print(*(str(warning.message) for warning in told), sep="\\n", file=sys.stderr)
"""


@pytest.mark.slow
def test_replicas_take_turns_without_the_key():
    """A later version of torch may lack the key, and nobody could import the package."""
    without = run("-c", WITHOUT_KEY + DRAWING_STEPS)
    assert without.code == 0, without.err
    assert without.out == run("-c", DRAWING_STEPS).out
    assert without.err.count("CPU replicas run one after the other") == 1


# --- forward-mode differentiation: its level belongs to the process ---


def penalised_by(derivative):
    """A network whose outputs are penalised by a derivative along the inputs."""

    def forward(m, inputs):
        def energy(row):
            return m.net(row).tanh().sum()

        return m.net(inputs) + derivative(energy, inputs)[:, :CLASSES]

    return build(lambda: Of(forward, net=nn.Linear(FEATURES, CLASSES)))


def along_ones(energy, inputs):
    _, tangent = torch.func.jvp(energy, (inputs,), (torch.ones_like(inputs),))
    return tangent.expand_as(inputs)


def by_dual_numbers(energy, inputs):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(inputs, torch.ones_like(inputs))
        return forward_ad.unpack_dual(energy(dual)).tangent.expand_as(inputs)


def by_rows(transform):
    return lambda energy, inputs: torch.func.vmap(transform(energy))(inputs)


def traces(transform):
    """The trace of the second derivative for each row."""

    def of(energy):
        return lambda row: transform(energy)(row).trace().expand_as(row)

    return by_rows(of)


FORWARD_MODE = {
    "jvp": along_ones,
    "dual numbers": by_dual_numbers,
    "jacfwd": by_rows(torch.func.jacfwd),
    "hessian": traces(torch.func.hessian),
}
REVERSE_MODE = {
    "jacrev": by_rows(torch.func.jacrev),
    "jacrev twice": traces(lambda f: torch.func.jacrev(torch.func.jacrev(f))),
}


@pytest.mark.parametrize("kind", few_of(FORWARD_MODE, ["jvp", "hessian"]))
def test_forward_mode_refused_on_replicas(devices, kind):
    """It raised torch's errors, or gave another gradient, depending on timing."""
    model = penalised_by(FORWARD_MODE[kind])
    for verify in (True, False):
        with ScatterOnceParallel(model, 2, devices(3), verify=verify) as engine:
            for _ in range(5):
                with pytest.raises(RuntimeError, match=r"forward-mode.*one replica"):
                    engine.forward_backward(INPUTS, LABELS, LOSS)
    assert all(parameter.grad is None for parameter in model.parameters())
    one, two = (torch.ones(2, dtype=torch.float64) for _ in range(2))
    assert torch.func.jvp(torch.sin, (one,), (two,))[1].equal(one.cos())
    pair = Pair(model, LOSS, devices(2))
    with pytest.raises(RuntimeError, match=r"forward-mode.*one replica"):
        pair.loss(INPUTS, LABELS)


@pytest.mark.parametrize("kind", FORWARD_MODE)
def test_forward_mode_exact_on_one_replica(kind):
    """The sum over rows of the energy is no mean of rows: one micro-batch."""
    model = penalised_by(FORWARD_MODE[kind])
    with ScatterOnceParallel(model, 1, ["cpu"]) as engine:
        assert_step(engine, INPUTS, LABELS, LOSS)


@pytest.mark.parametrize("kind", REVERSE_MODE)
def test_reverse_mode_exact_on_replicas(devices, kind):
    with ScatterOnceParallel(penalised_by(REVERSE_MODE[kind]), 2, devices(3)) as engine:
        for _ in range(3):
            assert_step(engine, INPUTS, LABELS, LOSS)


def test_forward_mode_exact_in_whole_batch(devices):
    def criterion(output, targets):
        _, tangent = torch.func.jvp(torch.tanh, (output,), (torch.ones_like(output),))
        return LOSS(output + tangent, targets)

    with ScatterOnceParallel(mlp(), 2, devices(2)) as engine:
        assert_step(engine, INPUTS, LABELS, criterion, whole_batch=True)
