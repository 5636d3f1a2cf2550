"""Gradients of replicas: hooks, what waits, what is dropped, what is refused."""

import contextlib
import copy
import itertools
import threading
import weakref
from functools import partial
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from faults.processes import run_forked
from harness.oracle import assert_gradients, build, gradients, randint, randn
from torch import nn
from torch.utils.checkpoint import checkpoint

from scatterpar import ScatterOnceParallel
from scatterpar.calls import gradients as call_gradients
from scatterpar.devices import coalescing

LAYOUTS = [
    ["cpu"] * 2,
    ["cpu:0", "cpu:1", "cpu:0"],
    ["cpu:0", "cpu:1", "cpu:2", "cpu:3"],
]
ROWS, LABELS = randn(13, 6), randint(3, 13)


@pytest.fixture(params=LAYOUTS, ids="+".join)
def pair(request):
    """An engine with its module, and the same module by itself."""
    net, plain = build(mlp), build(mlp)
    with ScatterOnceParallel(net, device_ids=request.param, verify=False) as engine:
        yield engine, net, plain


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def loss_of(call):
    return F.cross_entropy(call(ROWS), LABELS)


@pytest.mark.parametrize(
    "register", ["register_hook", "register_post_accumulate_grad_hook"]
)
def test_hooks_run_once_with_the_sum(pair, register):
    engine, net, plain = pair
    seen = {net: [], plain: []}
    for call, module in ((engine, net), (plain, plain)):
        weight = module[0].weight

        def hook(value, module=module):
            gradient = value.grad if value.grad is not None else value
            seen[module].append(gradient.detach().clone())

        getattr(weight, register)(hook)
        for _ in range(2):
            loss_of(call).backward()
    assert len(seen[net]) == 2
    torch.testing.assert_close(seen[net], seen[plain])


def test_sum_has_the_same_bits_every_time(pair):
    engine, net, _ = pair
    loss_of(engine).backward()
    found = gradients(net)
    net.zero_grad()
    loss_of(engine).backward()
    for name, gradient in gradients(net).items():
        assert torch.equal(found[name], gradient), name


class Uneven(nn.Module):
    """Uses a weight several times. The thread of replica 0 makes fewer nodes."""

    def __init__(self, times):
        super().__init__()
        self.layer, self.times = nn.Linear(6, 6), times

    def forward(self, rows):
        for _ in range(0 if rows[0, 0] == 0 else 200):
            self.layer.weight.sum()
        for _ in range(self.times):
            rows = self.layer(rows).tanh()
        return rows


@pytest.mark.parametrize("ids", [["cpu"] * 5, ["cpu:0", "cpu:1", "cpu:0"]])
@pytest.mark.parametrize("times", [1, 3])
def test_sum_has_the_bits_of_the_tree(ids, times):
    """Replica 0's gradient was added before or after the others', as fell the numbers
    of nodes that threads had made.
    """
    rows = randn(20, 6)
    rows[0, 0] = 0
    net = build(lambda: Uneven(times))
    with ScatterOnceParallel(net, device_ids=ids, verify=False) as engine:
        engine.forward_backward(rows, rows, lambda o, _: o.sum(), reduction="sum")
        expected = gradients(net)
        for _ in range(3):
            net.zero_grad()
            engine(rows).sum().backward()
            for name, gradient in gradients(net).items():
                assert torch.equal(expected[name], gradient), name


def test_clipping_while_gradients_wait_is_refused(pair):
    engine, net, _ = pair
    with engine.no_sync():
        loss_of(engine).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
    with pytest.raises(RuntimeError, match=r"pass inside of no_sync\(\)"):
        engine(ROWS)
    net.zero_grad()
    loss_of(engine).backward()


def test_clipping_before_the_pass_itself_is_refused(pair):
    engine, net, _ = pair
    losses = [loss_of(engine), loss_of(engine)]
    with engine.no_sync():
        losses[0].backward()
    net[0].weight.grad.mul_(0.5)
    with pytest.raises(RuntimeError, match="no_sync"):
        losses[1].backward()


def unscale(net, optimizer):
    """It sees replica 0's part alone, and counts no write."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))  # begins it
    scaler.unscale_(optimizer)


UNCOUNTED_WRITES = {
    "unscaled": unscale,
    "set to zero": lambda net, _: [p.grad.data.zero_() for p in net.parameters()],
    "clamped": lambda net, _: [
        p.grad.data.clamp_(-1e-3, 1e-3) for p in net.parameters()
    ],
    "not a number": lambda net, _: [
        p.grad.data.fill_(torch.nan) for p in net.parameters()
    ],
}


@pytest.mark.parametrize("name", UNCOUNTED_WRITES)
def test_step_after_write_that_is_not_counted(pair, name):
    """Parts of the others would have been added as they were: 1,024 times as large."""
    engine, net, _ = pair
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with engine.no_sync():
        (1024 * loss_of(engine)).backward()
    UNCOUNTED_WRITES[name](net, optimizer)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    with pytest.raises(RuntimeError, match=r"pass inside of no_sync\(\)"):
        optimizer.step()
    torch.testing.assert_close(list(net.parameters()), before, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.*gradients wait")
def test_step_after_a_penalty_is_no_uncounted_write(pair):
    engine, net, plain = pair
    for call, module in ((engine, net), (plain, plain)):
        with engine.no_sync():
            loss_of(call).backward()
            sum(p.square().sum() for p in module.parameters()).backward()
        torch.optim.SGD(module.parameters(), 0.1).step()
    torch.testing.assert_close(list(net.parameters()), list(plain.parameters()))


def test_uncounted_write_is_seen_beside_zeros(pair):
    """Unscaling leaves a gradient of zeros as it is."""
    engine, net, _ = pair
    net.register_parameter("unused", nn.Parameter(torch.zeros(1)))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with engine.no_sync():
        loss = loss_of(engine) + 0 * net.unused.sum()
        (1024 * loss).backward()
    unscale(net, optimizer)
    with pytest.raises(RuntimeError, match=r"inside of no_sync"):
        optimizer.step()


class WithUnused(nn.Module):
    """Its first pass reaches one parameter, with a gradient of zeros."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 3)
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, rows, is_first):
        return 0 * self.unused.expand(len(rows), 1) if is_first else self.net(rows)


def test_uncounted_write_is_seen_after_pass_of_zeros():
    net = build(WithUnused)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with ScatterOnceParallel(net, device_ids=["cpu"] * 2, verify=False) as engine:
        with engine.no_sync():
            for is_first in (True, False):
                (1024 * engine(randn(8, 6), is_first).sum()).backward()
        unscale(net, optimizer)
        with pytest.raises(RuntimeError, match=r"inside of no_sync"):
            optimizer.step()


@pytest.mark.filterwarnings("ignore:.*gradients wait")
@pytest.mark.parametrize("is_dropped", [False, True])
@pytest.mark.parametrize("order", [(0, 2), (2, 0)])
def test_optimizers_step_one_after_the_other(pair, order, is_dropped):
    """The second one took the first one's sum for a write that was not counted."""
    engine, net, plain = pair
    for call, module in ((engine, net), (plain, plain)):
        optimizers = [torch.optim.SGD(module[n].parameters(), 0.1) for n in order]
        with engine.no_sync():
            loss_of(call).backward()
        if is_dropped:
            optimizers[0].zero_grad(set_to_none=False)
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(list(net.parameters()), list(plain.parameters()))


class KeepsHidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 3), nn.Linear(3, 1)

    def forward(self, rows):
        hidden = self.first(rows)
        HIDDEN.append(hidden)
        return self.second(hidden)


HIDDEN = []


def test_kept_error_of_a_pass_keeps_no_pass():
    """As a notebook keeps the last one: later parts of gradients waited in it."""
    net, plain = build(KeepsHidden), build(KeepsHidden)
    with ScatterOnceParallel(net, device_ids=["cpu"] * 2, verify=False) as engine:
        loss = engine(ROWS).sum()
        with engine.no_sync():
            engine(ROWS).sum().backward()
        net.first.weight.grad.mul_(2)
        with pytest.raises(RuntimeError, match="no_sync") as kept:
            loss.backward()
        for call, module in ((engine, net), (plain, plain)):
            module.zero_grad()
            HIDDEN.clear()
            call(ROWS)
            sum(hidden.square().sum() for hidden in HIDDEN).backward()
        assert kept.tb is not None
    assert_gradients(net.first, gradients(plain.first))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_graph_of_gradients_refused_in_no_sync(pair):
    engine, _, _ = pair
    loss = loss_of(engine)
    with engine.no_sync(), pytest.raises(RuntimeError, match="gradients of gradients"):
        loss.backward(create_graph=True)


def test_selected_gradients_refused_in_no_sync(pair):
    engine, net, _ = pair
    loss = loss_of(engine)
    with engine.no_sync(), pytest.raises(RuntimeError, match=r"no_sync\(\)"):
        torch.autograd.grad(loss, list(net.parameters()))


def _batched(outputs, selected):
    ones = torch.ones(3, *outputs.shape, dtype=outputs.dtype)
    return torch.autograd.grad(outputs, selected, ones, is_grads_batched=True)


@pytest.mark.parametrize("of", ["inputs", "parameters", "Jacobian"])
def test_batched_gradients_refused_in_words(pair, of):
    engine, net, plain = pair
    rows = ROWS.clone().requires_grad_()
    selected = rows if of == "inputs" else [*net.parameters()]
    compute = partial(_batched, engine(rows), selected)
    if of == "Jacobian":
        jacobian = torch.autograd.functional.jacobian
        compute = partial(jacobian, engine, rows, vectorize=True)
    with pytest.raises(RuntimeError, match=r"is_grads_batched=True.* vectorize=False"):
        compute()
    # Nothing of it is left.
    loss_of(engine).backward()
    loss_of(plain).backward()
    torch.testing.assert_close(gradients(net), gradients(plain))


def test_batched_gradients_of_one_device():
    net = build(lambda: nn.Linear(3, 2))
    rows = torch.ones(4, 3, dtype=net.weight.dtype)
    engine = ScatterOnceParallel(net, device_ids=["cpu"])
    expected = _batched(net(rows), net.weight)
    torch.testing.assert_close(_batched(engine(rows), net.weight), expected)
    rows.requires_grad_()
    with pytest.raises(RuntimeError, match="is_grads_batched=True"):
        _batched(engine(rows), rows)


def test_selected_gradients_leave_what_waits(pair):
    engine, net, plain = pair
    loss_of(plain).backward()
    loss_of(plain).backward()
    with engine.no_sync():
        loss_of(engine).backward()
    found = torch.autograd.grad(loss_of(engine), list(net.parameters()))
    torch.testing.assert_close(
        [2 * g for g in found], [p.grad for p in plain.parameters()]
    )
    loss_of(engine).backward()
    assert_gradients(net, gradients(plain))


def test_failed_pass_leaves_nothing_for_the_next(pair):
    engine, net, plain = pair

    def fails(gradient):
        raise LookupError("mine")

    loss = loss_of(engine)
    handle = net[2].bias.register_hook(fails)
    with engine.no_sync(), pytest.raises(LookupError, match="mine"):
        loss_of(engine).backward()
    handle.remove()
    net.zero_grad()
    loss_of(engine).backward()
    loss_of(plain).backward()
    assert_gradients(net, gradients(plain))
    del loss


def test_optimizer_adds_what_waits_and_warns_once(pair):
    engine, net, plain = pair
    optimizer, other = (torch.optim.SGD(m.parameters(), 0.1) for m in (net, plain))
    for number in range(2):
        with engine.no_sync():
            loss_of(engine).backward()
        loss_of(plain).backward()
        if number:
            optimizer.step()
        else:
            with pytest.warns(UserWarning, match="gradients wait"):
                optimizer.step()
        other.step()
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def closure_of(optimizer, call, sync):
    def closure():
        with sync():
            loss = loss_of(call)
            loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("by_name", [False, True])
def test_closure_of_a_step_makes_the_last_pass(pair, by_name, recwarn):
    """As in Lightning's loop: gradients come once, in the pass inside of the step."""
    engine, net, plain = pair
    for call, module, sync in (
        (engine, net, engine.no_sync),
        (plain, plain, contextlib.nullcontext),
    ):
        optimizer = torch.optim.Adam(module.parameters(), 0.1)
        for _ in range(2):
            with sync():
                loss_of(call).backward()
            closure = closure_of(optimizer, call, contextlib.nullcontext)
            if by_name:
                optimizer.step(closure=closure)
            else:
                optimizer.step(closure)
            optimizer.zero_grad()
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    size = sum(parameter.nbytes for parameter in net.parameters())
    num_others = len(set(engine.device_ids)) - 1
    assert engine.last_step.bytes["reduce"] == num_others * size
    assert not [w for w in recwarn if "gradients wait" in str(w.message)]


def test_closure_that_calls_often_equals_one_device(pair, recwarn):
    engine, net, plain = pair
    for call, module in ((engine, net), (plain, plain)):
        optimizer = torch.optim.LBFGS(module.parameters(), max_iter=3)

        def closure(call=call, optimizer=optimizer):
            optimizer.zero_grad()
            loss = loss_of(call)
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert not [w for w in recwarn if "gradients wait" in str(w.message)]


def test_what_waits_after_a_closure_is_added(pair):
    engine, net, plain = pair
    for call, module, sync in (
        (engine, net, engine.no_sync),
        (plain, plain, contextlib.nullcontext),
    ):
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        closure = closure_of(optimizer, call, sync)
        if call is plain:
            optimizer.step(closure)
            continue
        with pytest.warns(UserWarning, match="gradients wait"):
            optimizer.step(closure)
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


class Skips(nn.Module):
    """Uses its second layer for rows that do not begin with zero."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 3), nn.Linear(6, 3, bias=False)

    def forward(self, rows):
        begins = rows[:, :1] != 0
        output = self.first(rows)
        return output + self.second(rows * begins) if begins.any() else output


@pytest.mark.parametrize("ids", LAYOUTS, ids="+".join)
def test_hook_of_parameter_that_replica_0_skips(ids):
    """In ``no_sync`` autograd called it with ``None``: others' gradients wait."""
    net, plain = build(Skips), build(Skips)
    rows = ROWS.clone()
    rows[:7, 0] = 0
    with ScatterOnceParallel(net, device_ids=ids, verify=False) as engine:
        for call, module in ((engine, net), (plain, plain)):
            module.second.weight.register_hook(lambda gradient: 2 * gradient)
            with engine.no_sync() if call is engine else contextlib.nullcontext():
                call(rows).square().sum().backward()
            call(rows).square().sum().backward()
    assert_gradients(net, gradients(plain))


def zero_grad_of_part(net, optimizer):
    net.second.zero_grad()


def zero_grad_of_all(net, optimizer):
    optimizer.zero_grad()


DROPS = [zero_grad_of_part, zero_grad_of_all]


def rows_without(replica_0):
    """``Skips`` does not use its second layer for the first rows."""
    rows = ROWS.clone()
    rows[: 7 if replica_0 else len(rows), 0] = 0
    return rows


@pytest.mark.parametrize("drop", DROPS)
@pytest.mark.parametrize("ids", LAYOUTS, ids="+".join)
def test_what_replica_0_lacks_is_dropped(ids, drop):
    """It came back: replica 0's ``.grad``, which tells, was ``None`` before, too."""
    net, plain = build(Skips), build(Skips)
    with ScatterOnceParallel(net, device_ids=ids, verify=False) as engine:
        for call, module in ((engine, net), (plain, plain)):
            optimizer = torch.optim.SGD(module.parameters(), 0.1)
            with engine.no_sync():
                call(rows_without(replica_0=True)).square().sum().backward()
            drop(module, optimizer)
            call(rows_without(replica_0=False)).square().sum().backward()
    for name, gradient in gradients(plain).items():
        present = dict(net.named_parameters())[name].grad
        torch.testing.assert_close(present, gradient, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, None])
def test_lacked_gradient_has_the_dtype_of_gradients(dtype):
    net = build(Skips).bfloat16()
    for parameter in net.parameters():
        parameter.grad_dtype = dtype
    rows = rows_without(replica_0=True).bfloat16()
    with ScatterOnceParallel(net, device_ids=["cpu"] * 2, verify=False) as engine:
        with engine.no_sync():
            engine(rows).sum().backward()
        engine(rows).sum().backward()
    if dtype is not None:
        assert net.second.weight.grad.dtype == dtype


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 3, sparse=True)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, rows):
        used = rows[rows[:, 0] != 0]
        output = rows[:, :3] * self.scale
        if len(used):
            return output + self.table(used[:, 1].long() % 5).sum()
        return output


def test_lacked_sparse_gradient_stays_sparse():
    net = build(Sparse)
    ids = ["cpu", "cpu"]
    with ScatterOnceParallel(net, device_ids=ids, verify=False) as engine:
        with engine.no_sync():
            engine(rows_without(replica_0=True)).sum().backward()
            assert net.table.weight.grad.is_sparse
        engine(rows_without(replica_0=True)).sum().backward()
    assert net.table.weight.grad.is_sparse


@pytest.mark.parametrize(
    "register", ["register_hook", "register_post_accumulate_grad_hook"]
)
@pytest.mark.parametrize("ids", LAYOUTS, ids="+".join)
def test_hook_of_unused_parameter_does_not_run(ids, register):
    """An optimizer that steps in a hook made its step again, with old gradients."""
    counts = {}
    for is_engine in (True, False):
        net = build(Skips)
        calls = []
        getattr(net.second.weight, register)(calls.append)
        made = ScatterOnceParallel(net, device_ids=ids, verify=False)
        with made if is_engine else contextlib.nullcontext(net) as call:
            for is_used in (True, False, True):
                rows = rows_without(replica_0=True) if is_used else 0 * ROWS
                call(rows).square().sum().backward()
            calls_before = len(calls)
            if is_engine:
                with call.no_sync():
                    call(rows_without(replica_0=True)).square().sum().backward()
        counts[is_engine] = calls_before
    assert counts == {True: 2, False: 2}


def test_unused_parameter_has_no_gradient(pair):
    engine, net, _ = pair
    net.append(build(lambda: nn.Linear(3, 3)))
    net.forward = lambda rows: net[2](net[1](net[0](rows)))
    net[3].weight.register_hook(lambda gradient: gradient.clone())
    loss_of(engine).backward()
    assert net[3].weight.grad is None
    assert net[0].weight.grad is not None


def test_parameter_without_elements_comes_first(pair):
    engine, net, plain = pair
    for module in (net, plain):
        module.register_parameter("empty", nn.Parameter(torch.empty(0)))
    loss_of(engine).backward()
    loss_of(plain).backward()
    assert_gradients(net, gradients(plain))


def test_steps_and_calls_of_one_engine_alternate(pair):
    engine, net, plain = pair
    criterion = nn.CrossEntropyLoss()
    for _ in range(2):
        loss_of(engine).backward()
        engine.forward_backward(ROWS, LABELS, criterion)
        loss_of(plain).backward()
        loss_of(plain).backward()
    assert_gradients(net, gradients(plain))


def test_graphs_kept_from_steps_do_not_end_the_process():
    """A loss that a criterion keeps keeps the replicas' AccumulateGrad nodes. A call
    took their tensors from them, and the next step's backward pass ended the process.
    """
    outcome = run_forked("-c", KEPT_GRAPHS)
    assert outcome.code == 0, outcome.err


KEPT_GRAPHS = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from scatterpar import DataParallelModel, ScatterOnceParallel

ROWS, LABELS = torch.randn(13, 5).double(), torch.randint(4, (13,))
cross_entropy = nn.CrossEntropyLoss()
for devices in (["cpu"] * 2, ["cpu:0", "cpu:1", "cpu:0"]):
    net = nn.Linear(5, 4).double()
    engine, kept = ScatterOnceParallel(net, 1, devices), []

    def criterion(outputs, labels):
        kept.append(cross_entropy(outputs, labels))
        return kept[-1]

    for _ in range(3):
        engine.forward_backward(ROWS, LABELS, criterion)
        kept.append(cross_entropy(engine(ROWS), LABELS))
        kept[-1].backward()
    kept.append(cross_entropy(net(ROWS), LABELS))
    kept[-1].backward()
    expected = torch.autograd.grad(cross_entropy(net(ROWS), LABELS), net.weight)
    torch.testing.assert_close(net.weight.grad, 7 * expected[0], rtol=1e-12, atol=1e-12)
"""


def test_bytes_of_gradients_are_counted_once(pair):
    engine, net, _ = pair
    with engine.no_sync():
        for _ in range(3):
            loss_of(engine).backward()
            assert engine.last_step.bytes["reduce"] == 0
    loss_of(engine).backward()
    size = sum(parameter.nbytes for parameter in net.parameters())
    others = set(engine.device_ids) - {engine.device_ids[0]}
    assert engine.last_step.bytes["replicate"] == 0
    assert engine.last_step.bytes["reduce"] == len(others) * size


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("by", ["engine", "module", "optimizer"])
def test_dropped_gradients_stay_dropped(pair, by, set_to_none):
    engine, net, plain = pair
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with engine.no_sync():
        loss_of(engine).backward()
    owner = {"engine": engine, "module": net, "optimizer": optimizer}[by]
    owner.zero_grad(set_to_none)
    loss_of(engine).backward()
    loss_of(plain).backward()
    assert_gradients(net, gradients(plain))


@pytest.mark.parametrize("is_trained", list(itertools.product([True, False], repeat=4)))
def test_freezing_between_call_and_backward_pass(pair, is_trained):
    """Autograd drops the gradient of a parameter that is frozen by then. Other replicas'
    parts of it waited, and what had waited before was lost.
    """
    engine, net, plain = pair
    for of_model, call in ((net, engine), (plain, plain)):
        first = next(of_model.parameters())
        for number, is_trained_then in enumerate(is_trained):
            first.requires_grad_(True)
            loss = loss_of(call)
            first.requires_grad_(is_trained_then)
            with engine.no_sync() if number < 3 else contextlib.nullcontext():
                loss.backward()
        first.requires_grad_(True)
        loss_of(call).backward()
    assert_gradients(net, gradients(plain))


def by_module(engine, net):
    F.cross_entropy(net(ROWS), LABELS).backward()


def by_step(engine, net):
    engine.forward_backward(ROWS, LABELS, nn.CrossEntropyLoss())


def by_another_engine(engine, net):
    with ScatterOnceParallel(net, device_ids=["cpu"] * 2) as another:
        loss_of(another).backward()


@pytest.mark.parametrize("run_pass", [by_module, by_step, by_another_engine])
def test_engine_drops_before_other_passes(pair, run_pass):
    """Those are not the engine's: ``optimizer.zero_grad`` would not do."""
    engine, net, plain = pair
    with engine.no_sync():
        loss_of(engine).square().backward()
    engine.zero_grad()
    run_pass(engine, net)
    torch.optim.SGD(net.parameters(), 0.0).step()
    loss_of(plain).backward()
    assert_gradients(net, gradients(plain))


@pytest.mark.parametrize("is_trained", list(itertools.product([True, False], repeat=3)))
def test_freezing_for_a_while_drops_nothing(pair, is_trained):
    """A parameter that is frozen in some calls of a window keeps what it has got."""
    engine, net, plain = pair
    for of_model, call in ((net, engine), (plain, plain)):
        first = next(of_model.parameters())
        for is_trained_then in is_trained:
            first.requires_grad_(is_trained_then)
            with engine.no_sync():
                loss_of(call).backward()
        first.requires_grad_(True)
        loss_of(call).backward()
    assert_gradients(net, gradients(plain))


def test_penalty_while_gradients_wait_drops_nothing(pair):
    engine, net, plain = pair
    for call, module in ((engine, net), (plain, plain)):
        with engine.no_sync():
            loss_of(call).backward()
            sum(p.square().sum() for p in module.parameters()).backward()
        loss_of(call).backward()
    assert_gradients(net, gradients(plain))


def _by_a_step(engine, call, module):
    if call is engine:
        engine.forward_backward(ROWS, LABELS, nn.CrossEntropyLoss())
    else:
        loss_of(call).backward()


def _by_a_loss(engine, call, module):
    if call is engine:
        engine.loss(ROWS, LABELS, nn.CrossEntropyLoss()).backward()
    else:
        loss_of(call).backward()


def _by_the_module(engine, call, module):
    loss_of(module).backward()


def _by_a_penalty(engine, call, module):
    sum(p.square().sum() for p in module.parameters()).backward()


def _by_a_part_of_the_module(engine, call, module):
    module[0](ROWS).square().mean().backward()


@pytest.mark.filterwarnings("error:an optimizer steps while gradients wait")
@pytest.mark.parametrize(
    "end",
    [
        _by_a_step,
        _by_a_loss,
        _by_the_module,
        _by_a_penalty,
        _by_a_part_of_the_module,
    ],
)
def test_last_pass_not_of_a_call_adds_what_waits(pair, end):
    engine, net, plain = pair
    for _ in range(2):
        for call, module in ((engine, net), (plain, plain)):
            with engine.no_sync():
                loss_of(call).backward()
                loss_of(call).backward()
            end(engine, call, module)
        # Whoever clips now sees the whole gradient.
        assert_gradients(net, gradients(plain))
        optimizer = torch.optim.SGD([*net.parameters(), *plain.parameters()], 0.1)
        optimizer.step()
        optimizer.zero_grad()


def test_pass_not_of_a_call_inside_of_no_sync(pair):
    engine, net, plain = pair
    with engine.no_sync():
        loss_of(engine).backward()
        _by_a_penalty(engine, engine, net)
    for _ in range(2):
        loss_of(plain).backward()
    _by_a_penalty(engine, plain, plain)
    # What waits is not there yet: the parts of the other replicas.
    with pytest.raises(AssertionError):
        assert_gradients(net, gradients(plain))
    loss_of(engine).backward()
    assert_gradients(net, gradients(plain))


def test_pass_of_module_after_a_dropped_window(pair):
    engine, net, plain = pair
    for call, module in ((engine, net), (plain, plain)):
        with engine.no_sync():
            loss_of(call).backward()
        module.zero_grad()
        loss_of(module).backward()
        module.zero_grad()
        loss_of(call).backward()
    assert_gradients(net, gradients(plain))


@pytest.mark.filterwarnings("error:hooks on parameters run more than once")
def test_two_engines_of_one_parameter_do_not_warn(pair):
    engine, net, plain = pair
    head = build(partial(nn.Linear, 8, 3))
    other = nn.Sequential(net[0], nn.ReLU(), head)
    other_plain = nn.Sequential(plain[0], nn.ReLU(), copy.deepcopy(head))
    with ScatterOnceParallel(
        other, device_ids=engine.device_ids, verify=False
    ) as second:
        for _ in range(2):
            with engine.no_sync(), second.no_sync():
                loss_of(engine).backward()
                loss_of(second).backward()
            loss_of(net).backward()
            for call in (plain, other_plain, plain):
                loss_of(call).backward()
    assert_gradients(net, gradients(plain))


def test_scaled_gradients_as_in_plain_torch(pair):
    engine, net, plain = pair
    for call, module in ((engine, net), (plain, plain)):
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            for number in range(2):
                is_last = number == 1
                with contextlib.nullcontext() if is_last else engine.no_sync():
                    scaler.scale(loss_of(call)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


class Scale(nn.Module):
    """The gradient of its weight is the sum of the rows."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.bfloat16))

    def forward(self, rows):
        return rows * self.weight


@pytest.mark.parametrize(
    ("accumulate_dtype", "grad_dtype", "expected"),
    [
        (None, None, 256 + 256),
        (torch.float32, None, 256 + 260),  # the sum of replica 1 alone
        (None, torch.float32, 260 + 260),
    ],
)
@pytest.mark.parametrize("ids", [["cpu"] * 2, ["cpu:0", "cpu:1"]], ids="+".join)
def test_dtypes_of_sums(ids, accumulate_dtype, grad_dtype, expected):
    """Beside 256 a one is lost in bfloat16."""
    net = Scale()
    if grad_dtype is not None:
        net.weight.grad_dtype = grad_dtype
    options = {"verify": False, "accumulate_dtype": accumulate_dtype}
    with ScatterOnceParallel(net, device_ids=ids, **options) as engine:
        for number, value in enumerate([256, 1, 1, 1, 1]):
            with engine.no_sync() if number < 4 else contextlib.nullcontext():
                rows = torch.full((2,), value, dtype=torch.bfloat16)
                engine(rows).float().sum().backward()
    assert net.weight.grad.dtype == (grad_dtype or torch.bfloat16)
    assert net.weight.grad == expected


# --- gradients that are somebody else's tensors, too ---

SUM_LAYOUTS = [
    ["cpu"] * 2,
    ["cpu"] * 3,
    ["cpu"] * 8,
    ["cpu:0", "cpu:1", "cpu:2", "cpu:3"],
    ["cpu:0", "cpu:1"] * 4,
    [f"cpu:{number}" for number in range(8)],
]


class Shifts(nn.Module):
    """Autograd gives two parameters one gradient, or one that is expanded."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first = nn.Parameter(randn(3))
        self.second = nn.Parameter(randn(3))

    def forward(self, rows):
        match self.kind:
            case "added":
                return rows * (self.first + self.second)
            case "expanded":
                return rows + self.first.sum() - self.second.sum()
            case "one per row":  # the gradient is a part of the user's own
                return rows + self.first + self.second
            case "unused by some":
                used = self.first if rows[0, 0] < 8 else self.second
                return rows * (used + self.second)


def passes(call, module, how):
    """Three backward passes of a window, then what the window ends with."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    rows = torch.arange(48.0, dtype=torch.float64).view(16, 3)
    own = torch.ones(16, 3, dtype=torch.float64)
    no_sync = getattr(call, "no_sync", contextlib.nullcontext)
    for number in range(3):
        is_last = number == 2 and how != "step"
        with contextlib.nullcontext() if is_last or how == "synced" else no_sync():
            call(rows + number).backward(own)
    assert bool((own == 1).all())
    optimizer.step()  # adds what waits
    return gradients(module)


@pytest.mark.filterwarnings("ignore:an optimizer steps while gradients wait")
@pytest.mark.parametrize("how", ["synced", "window", "step"])
@pytest.mark.parametrize("kind", ["added", "expanded", "one per row", "unused by some"])
@pytest.mark.parametrize("ids", SUM_LAYOUTS, ids="+".join)
def test_shared_gradient_is_added_once(ids, kind, how):
    """``a + b`` gives both parameters one tensor: added in place, it was twice in
    sums of four replicas.
    """
    net, plain = Shifts(kind), Shifts(kind)
    with ScatterOnceParallel(net, device_ids=ids, verify=False) as engine:
        found = passes(engine, net, how)
    for part in range(3):
        rows = torch.arange(48.0, dtype=torch.float64).view(16, 3) + part
        shares = rows.split(engine_rows(ids))
        for share in shares:
            plain(share).backward(torch.ones_like(share))
    torch.testing.assert_close(found, gradients(plain))


def engine_rows(ids):
    """The number of rows of each replica's share of 16 rows."""
    shares, more = divmod(16, len(ids))
    return [shares + (number < more) for number in range(len(ids))]


class ScaleInOneWorkspace(torch.autograd.Function):
    """Returns the same tensor as the weight's gradient in each backward pass."""

    @staticmethod
    def forward(ctx, rows, weight, workspace):
        ctx.save_for_backward(rows, weight)
        ctx.workspace = workspace
        return rows * weight

    @staticmethod
    def backward(ctx, gradient):
        rows, weight = ctx.saved_tensors
        torch.sum(gradient * rows, 0, out=ctx.workspace)
        return gradient * weight, ctx.workspace, None


class ScaleByWorkspace(nn.Module):
    """Each copy of the module has a workspace of its own."""

    workspaces: ClassVar = {}  # by ``id`` of the copy

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, rows):
        workspace = torch.empty(3, dtype=torch.float64)
        workspace = self.workspaces.setdefault(id(self), workspace)
        return ScaleInOneWorkspace.apply(rows, self.weight, workspace)


@pytest.mark.parametrize("how", ["window", "step"])
@pytest.mark.filterwarnings("ignore:an optimizer steps while gradients wait")
@pytest.mark.parametrize("ids", SUM_LAYOUTS, ids="+".join)
def test_gradient_waits_as_it_was(ids, how):
    """Whoever has made a gradient may write its memory in the next pass."""
    net, plain = ScaleByWorkspace(), ScaleByWorkspace()
    with ScatterOnceParallel(net, device_ids=ids, verify=False) as engine:
        found = passes(engine, net, how)
    torch.testing.assert_close(found, passes(plain, plain, "synced"))


def test_gradients_are_twice_in_memory_by_message(monkeypatch):
    """What begins to wait is copied, and what was copied is freed."""
    monkeypatch.setattr(coalescing, "CHUNK_BYTES", 64)
    arrived = {key: randn(4) for key in range(6)}
    expected = {key: tensor.clone() for key, tensor in arrived.items()}
    originals = [weakref.ref(tensor) for tensor in arrived.values()]
    num_alive = []
    copy_each = call_gradients.copy_each

    def counted(targets, *others):
        num_alive.append(sum(original() is not None for original in originals))
        copy_each(targets, *others)

    monkeypatch.setattr(call_gradients, "copy_each", counted)
    waiting = {}
    call_gradients._let_wait(waiting, arrived)
    assert num_alive == [6, 4, 2]
    assert not arrived
    torch.testing.assert_close(waiting, expected)


@pytest.mark.parametrize("is_synced", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_dropped_stays_dropped_without_rows(pair, set_to_none, is_synced):
    """A batch of one row reaches replica 0 alone: the pass met no gradient of the
    others, and did not look for what was dropped.
    """
    engine, net, plain = pair
    with engine.no_sync():
        loss_of(engine).backward()
    output = engine(ROWS[:1])
    net.zero_grad(set_to_none=set_to_none)
    with contextlib.nullcontext() if is_synced else engine.no_sync():
        output.sum().backward()
    loss_of(engine).backward()
    plain(ROWS[:1]).sum().backward()
    loss_of(plain).backward()
    torch.testing.assert_close(gradients(net), gradients(plain))


@pytest.mark.parametrize("where", ["hook", "hook after accumulation", "output"])
@pytest.mark.parametrize("ids", SUM_LAYOUTS, ids="+".join)
def test_failed_pass_loses_nothing(ids, where):
    """A pass that fails outside of ``no_sync`` had taken what waits."""

    def fail(*_):
        raise RuntimeError("of the user")

    found = []
    for is_plain in (False, True):
        net = build(lambda: nn.Linear(3, 1, bias=False))
        rows = randn(16, 3)
        with ScatterOnceParallel(net, device_ids=ids, verify=False) as engine:
            call = net if is_plain else engine
            with contextlib.nullcontext() if is_plain else engine.no_sync():
                call(rows).sum().backward()
            output = call(rows)
            match where:
                case "hook":
                    handle = net.weight.register_hook(fail)
                case "hook after accumulation":
                    handle = net.weight.register_post_accumulate_grad_hook(fail)
                case "output":
                    handle = output.register_hook(fail)
            with pytest.raises(RuntimeError, match="of the user"):
                output.sum().backward()
            handle.remove()
            call(rows).sum().backward()
        found.append(gradients(net))
    torch.testing.assert_close(*found)


class Scaled(nn.Module):
    """Computes its second layer again, times a factor that the loop may change."""

    def __init__(self):
        super().__init__()
        self.layers = mlp()
        self.factor = 1.0

    def forward(self, rows):
        return checkpoint(self.outputs_of, self.layers[0](rows), use_reentrant=True)

    def outputs_of(self, hidden):
        return self.layers[2](self.factor * hidden)


CHANGES_AFTER_CALLS = {
    "another factor": lambda module: setattr(module, "factor", 3.0),
    "a layer trains": lambda module: module.layers[2].requires_grad_(),
}


@pytest.mark.parametrize("change", CHANGES_AFTER_CALLS)
@pytest.mark.parametrize("is_synced", [True, False])
@pytest.mark.parametrize("ids", LAYOUTS, ids="+".join)
def test_checkpoint_computes_as_the_module_is_now(ids, is_synced, change):
    """As in plain torch, where a flag may be switched after the call."""
    net, plain = build(Scaled), build(Scaled)
    for module in (net, plain):
        module.layers[2].requires_grad_(change != "a layer trains")
    with ScatterOnceParallel(net, device_ids=ids, verify=False) as engine:
        for call, module in ((engine, net), (plain, plain)):
            loss_of(call)  # the first call makes replicas
            loss = loss_of(call)
            CHANGES_AFTER_CALLS[change](module)
            is_waiting = module is net and not is_synced
            with engine.no_sync() if is_waiting else contextlib.nullcontext():
                loss.backward()
        # Nothing has arrived: this pass adds what waits.
        (0 * loss_of(engine)).backward()
        assert_gradients(net, gradients(plain))


class RowOfWeight(nn.Module):
    """Computes with a tensor that the loop has computed from a parameter."""

    def __init__(self, reenters):
        super().__init__()
        self.weight = nn.Parameter(randn(2, 3))
        self.reenters = reenters

    def forward(self, rows):
        if not self.reenters:
            return rows.tanh() * self.row
        return checkpoint(lambda r: r.tanh() * self.row, rows, use_reentrant=True)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_pass_that_fails_at_its_end_keeps_nothing(pair, set_to_none, monkeypatch):
    """Memory ran out while gradients began to wait. The first ones stayed, and nobody
    saw that the user dropped them.
    """
    engine, net, plain = pair
    let_wait = call_gradients._let_wait

    def fails_after_the_first(waiting, arrived):
        key = next(iter(arrived))
        let_wait(waiting, {key: arrived[key]})
        raise torch.OutOfMemoryError("out of memory")

    loss = loss_of(engine)
    with monkeypatch.context() as patch, engine.no_sync():
        patch.setattr(call_gradients, "_let_wait", fails_after_the_first)
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward()
    net.zero_grad(set_to_none)
    loss_of(engine).backward()
    loss_of(plain).backward()
    assert_gradients(net, gradients(plain))


@pytest.mark.parametrize("reenters", [False, True])
@pytest.mark.parametrize("ids", SUM_LAYOUTS, ids="+".join)
def test_computed_attribute_waits_for_nothing(ids, reenters):
    """The attribute of the next pass is another tensor: what waited was lost."""
    found = []
    for is_plain in (False, True):
        net = RowOfWeight(reenters)
        rows = randn(16, 3).requires_grad_()
        with ScatterOnceParallel(net, device_ids=ids, verify=False) as engine:
            call = net if is_plain else engine
            for number in range(3):
                row = net.weight[number % 2]
                # A reentrant pass per replica: with saved tensors torch would raise.
                net.row = row.neg() if reenters else row.square()
                is_apart = is_plain or number == 2
                with contextlib.nullcontext() if is_apart else engine.no_sync():
                    call(rows).sum().backward()
        found.append(gradients(net))
    torch.testing.assert_close(*found)


def test_window_that_has_ended_leaves_no_hook(pair):
    """A later window took a clipped gradient for one that was changed while others
    wait.
    """
    engine, net, _ = pair
    with engine.no_sync():
        loss_of(engine).backward()
    loss_of(engine).backward()
    assert not net[0].weight._post_accumulate_grad_hooks
    net[0].requires_grad_(False)
    net[0].weight.grad.mul_(0.5)  # clipped, and kept
    with engine.no_sync():
        loss_of(engine).backward()
    loss_of(engine).backward()


@pytest.mark.parametrize("ids", LAYOUTS, ids="+".join)
def test_step_after_a_failed_pass_has_what_waits(ids, recwarn):
    def fail(*_):
        raise RuntimeError("of the user")

    found = []
    for is_plain in (False, True):
        net = build(lambda: nn.Linear(6, 1, bias=False))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with ScatterOnceParallel(net, device_ids=ids, verify=False) as engine:
            call = net if is_plain else engine
            with contextlib.nullcontext() if is_plain else engine.no_sync():
                call(ROWS).sum().backward()
            handle = net.weight.register_hook(fail)
            with pytest.raises(RuntimeError, match="of the user"):
                call(ROWS).sum().backward()
            handle.remove()
            optimizer.step()
        found.append(net.weight.detach())
    torch.testing.assert_close(*found)


def raises_at_weight(net, _, fail):
    return net.weight.register_hook(fail)


def raises_at_output(_, output, fail):
    return output.register_hook(fail)


def raises_after_accumulation(net, _, fail):
    return net.weight.register_post_accumulate_grad_hook(fail)


@pytest.mark.parametrize("tries", [1, 3])
@pytest.mark.parametrize(
    "register", [raises_at_weight, raises_at_output, raises_after_accumulation]
)
@pytest.mark.parametrize("ids", LAYOUTS, ids="+".join)
def test_retried_pass_has_what_waits(ids, register, tries):
    """Without a call between both, what waited was missing in the second pass."""

    def fail(*_):
        raise RuntimeError("of the user")

    found = []
    for is_plain in (False, True):
        net = build(lambda: nn.Linear(6, 1, bias=False))
        with ScatterOnceParallel(net, device_ids=ids, verify=False) as engine:
            call = net if is_plain else engine
            with contextlib.nullcontext() if is_plain else engine.no_sync():
                call(ROWS).sum().backward()
            output = call(ROWS)
            handle = register(net, output, fail)
            for _ in range(tries):
                with pytest.raises(RuntimeError, match="of the user"):
                    output.square().sum().backward(retain_graph=True)
            handle.remove()
            output.square().sum().backward()
        found.append(gradients(net))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("ids", LAYOUTS, ids="+".join)
def test_call_of_another_thread_in_a_backward_pass(ids, waits):
    """The call took the pass for one that has failed: a KeyError at its end."""
    net, plain = (build(lambda: nn.Linear(6, 1, bias=False)) for _ in range(2))
    losses = []
    with ScatterOnceParallel(net, device_ids=ids, verify=False) as engine:

        def call_in_thread(_):
            thread = threading.Thread(target=lambda: losses.append(engine(ROWS).sum()))
            thread.start()
            thread.join()

        handle = net.weight.register_hook(call_in_thread)
        with engine.no_sync() if waits else contextlib.nullcontext():
            engine(ROWS).square().sum().backward()
        handle.remove()
        losses[0].backward()
    plain(ROWS).square().sum().backward()
    plain(ROWS).sum().backward()
    torch.testing.assert_close(gradients(net), gradients(plain))
