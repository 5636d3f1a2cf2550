"""``engine.loss``: to a loop that calls ``backward()`` it is the loss that plain torch
computes.
"""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
from harness import contrastive, module_cases, weighted
from harness.agree import LAYOUTS, Case
from harness.leak_checks import in_time
from harness.models import CLASSES, FEATURES, mlp
from harness.oracle import (
    assert_close,
    assert_gradients,
    build,
    call,
    gradients,
    randint,
    randn,
    whole_batch,
)
from harness.rank_processes import run_on_ranks
from torch import nn

import scatterpar
from scatterpar import ScatterOnceParallel

CE = nn.CrossEntropyLoss()
FIRST = randn(9, FEATURES), randint(CLASSES, 9)
SECOND = randn(7, FEATURES, seed=3), randint(CLASSES, 7, seed=4)


def normalised(*layers):
    return build(
        lambda: nn.Sequential(
            nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), *layers, nn.Linear(6, CLASSES)
        )
    )


def two_alive(first, second, model):
    one, other = first(), second()
    other.backward()
    one.backward()


def accumulated(first, second, model):
    for loss_of in (first, second, first):
        (loss_of() / 3).backward()


def by_grad(first, second, model):
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(2 * first(), parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, found, strict=True):
        assert parameter.grad is None
        parameter.grad = gradient


def penalty(model):
    return 0.1 * sum(p.abs().square().sum() for p in model.parameters())


LOOPS = {
    "plain": lambda first, *_: first().backward(),
    "scaled": lambda first, *_: (first() / 3).backward(),
    "scaled in place": lambda first, *_: first().mul_(0.3).backward(),
    "by a gradient": lambda first, *_: first().backward(torch.tensor(-3.0).double()),
    "beside a penalty": lambda first, _, model: (first() + penalty(model)).backward(),
    "twice in one sum": lambda first, *_: (
        (loss := first()) + 2 * loss.exp()
    ).backward(),
    "two in one sum": lambda first, second, _: (first() + 0.5 * second()).backward(),
    "two alive": two_alive,
    "accumulated": accumulated,
    "one dropped": lambda first, second, _: (first(), second().backward()),
    "times zero": lambda first, *_: (0 * first()).backward(),
    "only some inputs": lambda first, _, model: first().backward(
        inputs=[*model.parameters()][:1]
    ),
    "by grad": by_grad,
}

KINDS = {
    "mlp": Case(mlp),
    "sum": weighted.CASES["sum"],
    "ignored": weighted.CASES["padded, many terms"],
    "counted": weighted.CASES["count="],
    "compared": contrastive.CASES["clip"],
    **{
        name: module_cases.CASES[name]
        for name in (
            *(
                "unused by some",
                "tied",
                "sparse gradients",
                "complex",
                "a trained buffer",
            ),
            *("gradients in one memory", "one gradient for two", "a trained criterion"),
            "a criterion that shares a parameter",
        )
    },
}
RUNS = [("mlp", loop) for loop in LOOPS]
RUNS += [
    (kind, loop)
    for kind in KINDS
    for loop in ("scaled", "two in one sum")
    if kind != "mlp"
]
RUNS += [(k, "accumulated") for k in ("unused by some", "sparse gradients", "tied")]
RUNS += [(k, "by grad") for k in ("unused by some", "sparse gradients", "tied")]


@pytest.mark.contract
@pytest.mark.parametrize(("kind", "loop"), RUNS)
def test_loop_gets_what_plain_torch_gives(kind, loop):
    case = KINDS[kind]
    model, twin = case.build(), case.build()
    batches = case.all(), case.rows(range(2, case.count))
    criterion, plain = case.criterion(model), case.criterion(twin)
    with ScatterOnceParallel(model, 2, LAYOUTS["mixed"], verify=False) as engine:
        steps = (
            partial(engine.loss, *batch, criterion, **case.options) for batch in batches
        )
        LOOPS[loop](*steps, model)
    LOOPS[loop](*(lambda b=b: plain(call(twin, b[0]), b[1]) for b in batches), twin)
    assert_gradients(model, gradients(twin))
    for (name, ours), theirs in zip(model.named_buffers(), twin.buffers(), strict=True):
        if theirs.requires_grad:
            assert_close(ours.grad, theirs.grad, name)
    if isinstance(criterion, nn.Module):
        assert_gradients(criterion, gradients(plain))


@pytest.mark.contract
@pytest.mark.draws
def test_loss_equals_forward_backward(devices):
    """Buffers, random state and the report move in the call; gradients wait."""
    model = normalised(nn.Dropout(0.5))
    twin, found = copy.deepcopy(model), []
    with (
        ScatterOnceParallel(model, 2, devices(2)) as engine,
        ScatterOnceParallel(twin, 2, devices(2)) as other,
    ):
        for step in (other.forward_backward, engine.loss):
            torch.manual_seed(5)
            loss, outputs = step(*FIRST, CE, return_outputs=True)
            state = *step.__self__.buffers(), torch.get_rng_state()
            found.append([loss.detach(), *outputs, *state])
        assert all(map(torch.equal, *found))
        assert loss.requires_grad
        assert all(p.grad is None for p in model.parameters())
        ours, theirs = engine.last_step, other.last_step
        assert (ours.loss, ours.bytes) == (theirs.loss, theirs.bytes)
        loss.backward()
        assert torch.equal(torch.get_rng_state(), state[-1])
        assert_gradients(model, gradients(twin), 0.0)
        assert engine.last_step is ours


@pytest.mark.contract
def test_hooks_run_once_on_whole_gradient(devices):
    model, twin = mlp(), mlp()
    seen = {model: [], twin: []}
    for one, calls in seen.items():
        weight, bias = one[0].weight, one[0].bias
        weight.grad = torch.ones_like(weight)
        weight.register_hook(lambda g, calls=calls: calls.append(g.clone()))
        weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
        bias.register_post_accumulate_grad_hook(
            lambda p, calls=calls: calls.append(p.grad.clone())
        )
    with ScatterOnceParallel(model, 2, devices(3)) as engine:
        loss = engine.loss(*FIRST, CE) + 0.5 * engine.loss(*SECOND, CE)
        assert not seen[model]
        (2 * loss).backward()
    (
        2 * (CE(twin(FIRST[0]), FIRST[1]) + 0.5 * CE(twin(SECOND[0]), SECOND[1]))
    ).backward()
    ours, theirs = (sorted(calls, key=torch.Tensor.dim) for calls in seen.values())
    assert len(ours) == 2
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one, other, "what a hook saw")
    assert_gradients(model, gradients(twin))


def test_gradient_is_that_of_the_call(devices):
    """The gradient is that of the call: a step of an optimizer meanwhile
    is no error.
    """
    model = mlp()
    _, expected = whole_batch(model, *FIRST, CE)
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        loss = engine.loss(*FIRST, CE)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        model[2].bias.requires_grad_(False)
        loss.backward()
    assert_gradients(model, expected | {"2.bias": None})


@pytest.mark.contract
def test_second_backward_is_an_error(devices):
    model = mlp()
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        loss = engine.loss(*FIRST, CE)
        loss.backward(retain_graph=True)
        before = gradients(model)
        with pytest.raises(RuntimeError, match="a second backward pass"):
            loss.backward()
        with pytest.raises(RuntimeError, match="a second backward pass"):
            torch.autograd.grad(loss, model.parameters())
        assert_gradients(model, before, 0.0)
        with pytest.raises(RuntimeError, match=r"create_graph=True: engine\.loss"):
            torch.autograd.grad(
                engine.loss(*FIRST, CE), model.parameters(), create_graph=True
            )
        assert_gradients(model, before, 0.0)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("whole_batch", [False, True])
def test_no_grad_gives_number_no_backward(devices, mode, whole_batch):
    """Statistics move, as in plain torch."""
    model = normalised()
    twin, batch = copy.deepcopy(model), (*FIRST, nn.functional.cross_entropy)
    model[0].register_full_backward_hook(lambda *_: pytest.fail("a backward pass"))
    with (
        ScatterOnceParallel(model, 2, devices(2), verify=False) as engine,
        ScatterOnceParallel(twin, 2, devices(2), verify=False) as other,
    ):
        with mode():
            loss = engine.loss(*batch, whole_batch=whole_batch)
        assert not loss.requires_grad
        assert torch.equal(
            loss.clone(), other.forward_backward(*batch, whole_batch=whole_batch)
        )
        assert all(map(torch.equal, model.buffers(), twin.buffers()))
        assert engine.last_step.loss == loss.item()


@pytest.mark.filterwarnings("ignore:no label of this batch counts")
def test_no_terms_backward_gives_nothing(devices):
    with ScatterOnceParallel(mlp(), 2, devices(2)) as engine:
        engine.loss(FIRST[0], torch.full((9,), -100), CE).backward()
        assert all(p.grad is None for p in engine.module.parameters())


@pytest.mark.contract
@pytest.mark.parametrize("upstream", [1.0, 0.25])
def test_grad_scaler_as_in_plain_torch(devices, upstream):
    """Inside, the scale keeps small gradients; outside, the loop's own scaling brings
    it back.
    """
    model, twin = mlp().float(), mlp().float()
    inputs, labels = FIRST[0].float(), FIRST[1]

    def losses_of(one, loss_of):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = loss_of(scaler)
            scaler.scale(loss * upstream).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(one.parameters(), 1.0)  # if a scale is left in
            scaler.step(optimizer)
            scaler.update()
            yield loss.item()

    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        ours = [
            *losses_of(
                model, lambda scaler: engine.loss(inputs, labels, CE, scaler=scaler)
            )
        ]
    theirs = [*losses_of(twin, lambda _: CE(twin(inputs), labels))]
    assert ours == pytest.approx(theirs, rel=1e-5)
    for (name, ours), theirs in zip(
        model.named_parameters(), twin.parameters(), strict=True
    ):
        assert_close(ours, theirs, name, 1e-5)


@pytest.mark.parametrize("end", ["backward", "dropped"])
def test_nothing_held_after_backward(devices, end, by_reference_counts_alone):
    """What waits for the backward pass is the sum itself, which becomes ``.grad``."""
    model = mlp()
    for parameter in model.parameters():
        # so that sums are added, and not taken
        parameter.grad = torch.zeros_like(parameter)
    with ScatterOnceParallel(model, 2, devices(3)) as engine:
        engine.forward_backward(*FIRST, CE)
        before = set(map(id, tensors()))
        loss = engine.loss(*FIRST, CE)
        sums = [
            weakref.ref(t) for t in tensors() if id(t) not in before and t is not loss
        ]
        sizes = sorted(t().numel() for t in sums)
        assert sizes == sorted(p.numel() for p in model.parameters())
        if end == "backward":
            loss.backward()
        del loss
        assert in_time(lambda: not any(t() is not None for t in sums))


def tensors():
    objects = gc.get_objects()
    return [t for t in objects if isinstance(t, torch.Tensor) and t.is_floating_point()]


def step_of_a_rank(group, devices):
    model = mlp(group.rank())
    inputs, targets = (FIRST, SECOND)[group.rank()]
    with ScatterOnceParallel(model, 2, devices, process_group=group) as engine:
        loss = engine.loss(inputs, targets, CE)
        (loss / 3).backward()
        found = gradients(model)
        with torch.no_grad():
            number = engine.loss(inputs, targets, CE)
        with (
            torch.set_grad_enabled(group.rank() == 0),
            pytest.raises(RuntimeError, match="trained"),
        ):
            engine.loss(inputs, targets, CE)
        engine.loss(inputs, targets, CE).backward()
    return loss.detach(), number, found


def test_ranks_give_gradient_of_all_batches(devices):
    found = run_on_ranks(2, step_of_a_rank, devices(2))
    both = [torch.cat(pair) for pair in zip(FIRST, SECOND, strict=True)]
    expected, expected_gradients = whole_batch(mlp(), *both, CE)
    for loss, number, grads in found:
        assert_close(loss, expected, "loss")
        assert torch.equal(loss, number)
        for name, gradient in expected_gradients.items():
            assert_close(grads[name], gradient / 3, name)
            assert torch.equal(grads[name], found[0][2][name])


def test_repr_shows_devices_and_options():
    model = build(lambda: nn.Linear(FEATURES, CLASSES))
    with ScatterOnceParallel(model, 4, ["cpu:0", "cpu:1"]) as engine:
        assert "device_ids=[cpu:0, cpu:1], accum=4\n" in repr(engine)
    options = {"micro_batch_size": 8, "buffers": "batch", "shares": [3, 1]}
    with ScatterOnceParallel(
        model, device_ids=["cpu"] * 2, verify=False, **options
    ) as other:
        text = "micro_batch_size=8, buffers='batch', shares=(3, 1), verify=False"
        assert text in repr(other)


def test_dir_lists_the_public_names():
    assert dir(scatterpar) == sorted([*scatterpar.__all__, "__version__"])
