"""Compiled modules: replicas run compiled, each size once, and draw as without a
compiler.

``torch.compile(model)`` was refused, and ``model.compile()`` ran eager in silence.
"""

from __future__ import annotations

import shutil
import threading
from types import SimpleNamespace

import pytest
import torch
from harness.models import Of
from harness.oracle import (
    assert_close,
    assert_gradients,
    assert_step,
    build,
    gradients,
    randint,
    randn,
    seeded,
)
from harness.pairwise import few_of
from torch import nn

from scatterpar import (
    DataParallelCriterion,
    DataParallelModel,
    ScatterOnceParallel,
    gather,
    splitcheck,
)
from scatterpar.torch_private import compiler
from scatterpar.torch_private.thread_modes import OperatorMode

DEVICES = [["cpu"], ["cpu"] * 2, ["cpu:0", "cpu:1"]]
WAYS = ["option", "torch.compile", "method", "method, later", "a block", "a part"]
ROWS = 23  # shares of 12 and 11, sub-steps of 4 and 3
CRITERION = nn.CrossEntropyLoss()

pytestmark = pytest.mark.draws


class Graphs:
    """A backend that counts graphs, and runs what it is given as it is."""

    count = 0

    def __call__(self, graph, inputs):
        self.count += 1
        return graph.forward


@pytest.fixture
def graphs():
    torch._dynamo.reset()
    return Graphs()


@pytest.fixture(autouse=True)
def no_replica_waits_in_vain(monkeypatch):
    """The replica that has the compiler's lock compiles, or gives it back in time."""

    def owner_is_compiling():
        assert compiler.is_compiling(), "waited for a replica that does not compile"
        return True

    of_compiled = "scatterpar.replicas.compiled."
    # on a busy machine a sub-step may take 10 seconds
    monkeypatch.setattr(of_compiled + "_COMPILER_PATIENCE_SECONDS", 20.0)
    monkeypatch.setattr(of_compiled + "is_compiling", owner_is_compiling)


def scaled(block, rows):
    return block.norm(rows).tanh() * block.scale


def network():
    block = Of(scaled, norm=nn.BatchNorm1d(6), scale=1.0)
    return nn.Sequential(nn.Linear(6, 6), block, nn.Linear(6, 3))


def dropping():
    return nn.Sequential(
        nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3)
    )


def compiled(graphs, device_ids=DEVICES[1], make=network, way="option", **options):
    """The module and an engine whose replicas run compiled with this backend, or these
    keywords.
    """
    how = graphs if isinstance(graphs, dict) else {"backend": graphs}
    model = given = build(make)
    if way == "option":
        options["compile"] = how
    elif way == "torch.compile":
        given = torch.compile(model, **how)
    elif way == "a block":
        model[1].compile(**how)
    elif way == "a part":
        model[1] = torch.compile(model[1], **how)
    elif way == "method":
        model.compile(**how)
    engine = ScatterOnceParallel(given, 3, device_ids, **options)
    if way == "method, later":
        assert engine.replicas
        model.compile(**how)
    return model, engine


def eager_twin(device_ids=DEVICES[1], make=network):
    model = build(make)
    return model, ScatterOnceParallel(model, 3, device_ids)


def batch(rows=ROWS):
    return randn(rows, 6), randint(3, rows)


def step(engine, rows=ROWS):
    return engine.forward_backward(*batch(rows), CRITERION)


def assert_same(model, other):
    """A compiled part has other names."""
    for ours, theirs in zip(
        model.state_dict().values(), other.state_dict().values(), strict=True
    ):
        assert_close(ours.double(), theirs.double(), "state", 1e-12)
    for one, twin in zip(model.parameters(), other.parameters(), strict=True):
        assert (one.grad is None) == (twin.grad is None)
        if twin.grad is not None:
            assert_close(one.grad, twin.grad, "gradient", 1e-12)


@pytest.mark.parametrize("way", few_of(WAYS, ["option"]))
def test_trains_as_the_eager_engine(way, graphs):
    device_ids = DEVICES[WAYS.index(way) % 3]
    model, engine = compiled(graphs, device_ids, way=way)
    twin, other = eager_twin(device_ids)
    for parameter in (*model.parameters(), *twin.parameters()):
        parameter.grad = torch.ones_like(parameter)  # which compiling leaves there
    counts = []
    with engine, other:
        assert engine.module is model
        keys = [key.replace("_orig_mod.", "") for key in engine.state_dict()]
        assert keys == list(other.state_dict())
        for _ in range(3):
            assert_close(step(engine), step(other), "loss", 1e-12)
            counts.append(graphs.count)
        assert_same(model, twin)
        if way == "option":  # the user's module is as it was
            model(batch()[0])
            assert graphs.count == counts[-1]
            assert model._compiled_call_impl is None
    assert 1 <= counts[0] <= 2  # sub-steps of two sizes
    assert counts[2] == counts[1]


@pytest.mark.slow
def test_replicas_share_the_graphs(graphs):
    _, engine = compiled(graphs, DEVICES[2] * 2)
    counts = []
    with engine:
        for rows in (48, 44, 36):
            step(engine, rows)
            counts.append(graphs.count)
    assert counts == [1, 2, 2]  # dynamic by now


def test_compiling_draws_no_numbers(graphs):
    """Dropout and running statistics after the first step are those of
    an eager engine.
    """
    states = []
    engines = compiled(graphs, make=dropping), eager_twin(make=dropping)
    for _, engine in engines:
        with seeded(3), engine:
            before = torch.get_rng_state()
            for _ in range(2):
                step(engine)
            states.append(torch.get_rng_state())
    assert torch.equal(*states)
    assert not torch.equal(states[0], before)
    (model, _), (twin, _) = engines
    assert_same(model, twin)
    assert model[1].num_batches_tracked == twin[1].num_batches_tracked == 6


def test_evaluation_and_training_again(graphs):
    model, engine = compiled(graphs, DEVICES[2])
    with engine:
        step(engine)
        before = gradients(model)
        engine.eval()
        assert_close(engine(batch()[0]), model(batch()[0]), "outputs")
        count = graphs.count
        engine(batch()[0])
        assert_gradients(model, before)  # what a replica rehearses took them along
        engine.train()
        step(engine)
        assert graphs.count == count


def test_changed_attribute_recompiles(graphs):
    """New weights take effect without compiling again."""
    model, engine = compiled(graphs)
    twin, other = eager_twin()
    counts = []
    changes = [
        lambda module: None,
        lambda module: module[0].weight.data.mul_(2),
        lambda module: setattr(module[1], "scale", 3.0),
        lambda module: module[0].weight.requires_grad_(False),
    ]
    with engine, other:
        for change in changes:
            for each in (engine, other):
                change(each.module)
                step(each)
            counts.append(graphs.count)
    assert counts[0] == counts[1] < counts[2]
    assert_same(model, twin)


def test_compiled_criterion_is_exact(graphs):
    targets = randint(3, ROWS)
    targets[:9] = -100
    criterion = torch.compile(CRITERION, backend=graphs)
    with ScatterOnceParallel(build(lambda: nn.Linear(6, 3)), 3, ["cpu"] * 2) as engine:
        assert_step(engine, batch()[0], targets, criterion)
    assert graphs.count >= 1


def test_replicas_that_meet_do_not_deadlock(graphs, monkeypatch):
    """The one that compiles must not wait for ever for one that waits for the lock."""
    of_compiled = "scatterpar.replicas.compiled."
    monkeypatch.setattr(of_compiled + "_COMPILER_PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(of_compiled + "is_compiling", compiler.is_compiling)
    barrier = threading.Barrier(2)

    def waits(_, outputs, targets):
        barrier.wait(60)
        return CRITERION(outputs, targets)

    # Without looks: one that is abandoned may leave a replica at the barrier.
    _, engine = compiled(graphs, make=lambda: nn.Linear(6, 3), verify=False)
    with engine:  # of a criterion that is a module each replica has its own
        engine.forward_backward(*batch(24), Of(waits))


@pytest.mark.parametrize(
    "way", few_of(["torch.compile", "method", "a block"], ["a block"])
)
def test_compiled_cuda_graphs_refused(way, monkeypatch):
    """They went through where they were not asked for by ``compile=``."""
    model, engine = compiled({"options": {"triton.cudagraphs": True}}, way=way)
    name = "Of" if way == "a block" else "Sequential"
    with engine:
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        with pytest.raises(
            ValueError, match=f"{name} was compiled with CUDA graphs, which were"
        ):
            step(engine)
        assert model[0].weight.grad is None


@pytest.mark.parametrize("option", [True, {}, {"dynamic": True}])
def test_graphs_switched_on_for_all_refused(option, monkeypatch):
    """Torch's graphs then failed by an assertion in replicas' threads."""
    from torch._inductor import config  # slow to import

    def make(compile):
        ScatterOnceParallel(nn.Linear(6, 3), 1, ["cpu"], compile=compile).close()

    refusal = pytest.raises(
        ValueError, match=r"triton\.cudagraphs is on.*switch this setting"
    )
    with config.patch({"triton.cudagraphs": True}):
        make(option)  # on the CPU torch's compiler records none
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        with refusal:
            make(option)
        # The remedy, and another compiler.
        make({"options": {"triton.cudagraphs": False}})
        make({"backend": "eager"})


def test_graphs_switched_on_by_the_environment(monkeypatch):
    """Before torch's compiler is imported, which reads the variable then."""
    for value in ("0", "1"):
        monkeypatch.setenv("TORCHINDUCTOR_CUDAGRAPHS", value)
        with monkeypatch.context() as patch:
            patch.setattr(compiler, "sys", SimpleNamespace(modules={}))
            assert compiler.inductor_records_graphs() == (value == "1")


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


# The compiler takes seconds for each: one of a kind by default.
DEFAULT = [("option", "engine"), ("torch.compile", "pair")]
SLOW = pytest.mark.slow
OF_CALLS = [
    pytest.param(way, kind, marks=() if (way, kind) in DEFAULT else SLOW)
    for way in ("torch.compile", "method", "option")
    for kind in ("engine", "pair")
]


@pytest.mark.parametrize("device_ids", DEVICES)
@pytest.mark.parametrize(("way", "kind"), OF_CALLS)
def test_calls_of_compiled_modules_are_exact(graphs, device_ids, way, kind):
    """All replicas run compiled, the user's own module, too."""
    net, plain = build(mlp), build(mlp)
    given, options = net, {}
    if way == "torch.compile":
        given = torch.compile(net, backend=graphs)
    elif way == "method":
        net.compile(backend=graphs)
    elif kind == "engine":
        options["compile"] = {"backend": graphs}
    else:
        pytest.skip("the pair has no such option")
    if kind == "engine":
        call = ScatterOnceParallel(given, device_ids=device_ids, **options)
    else:
        call = DataParallelModel(given, device_ids)
    rows = randn(ROWS, 6)
    for _ in range(2):
        output = call(rows)
        if kind == "pair":
            output = gather(output, "cpu")
        output.square().mean().backward()
        plain(rows).square().mean().backward()
    assert_gradients(net, gradients(plain))
    assert graphs.count


def test_calls_of_compiled_criteria_are_exact(graphs):
    """Replicas of a criterion with a network run compiled one after the other."""

    def make():
        return nn.Sequential(nn.Linear(6, 3), nn.Tanh())

    def loss(module, output, targets):
        return CRITERION(module.head(output), targets)

    net, plain = build(make), build(make)
    head, plain_head = [build(lambda: Of(loss, head=nn.Linear(3, 3))) for _ in "12"]
    head.compile(backend=graphs)
    model = DataParallelModel(net, DEVICES[2])
    criterion = DataParallelCriterion(head)
    for count in (ROWS, ROWS, 14):
        rows, labels = batch(count)
        criterion(model(rows), labels).backward()
        plain_head(plain(rows), labels).backward()
    assert_gradients(net, gradients(plain))
    assert_gradients(head, gradients(plain_head))
    assert graphs.count


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch's compiler needs g++ for the CPU"
)
def test_inductor_equals_eager(monkeypatch, tmp_path):
    """The call in which torch compiles drew from the process's generator, not as later
    ones.
    """
    # it does compile, every time
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, engine = compiled({}, DEVICES[2])
    twin, other = eager_twin(DEVICES[2])
    with engine, other:
        for _ in range(3):
            step(engine), step(other)
    assert_gradients(model, gradients(twin), 1e-12)
    losses = []
    with ScatterOnceParallel(build(dropping), 1, DEVICES[2], compile=True) as engine:
        for _ in range(2):
            with seeded(3):
                losses.append(step(engine))
    assert losses[0] == losses[1]


def pointwise(rows):
    return rows.sin() + 1


class Watching(OperatorMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def in_thread(call, *args):
    thread = threading.Thread(target=call, args=args)
    thread.start()
    return thread


def watched_thread():
    """A thread in the body of a mode, and the event that ends it."""
    is_inside, may_leave = threading.Event(), threading.Event()

    def watch():
        with Watching():
            is_inside.set()
            may_leave.wait(60)

    thread = in_thread(watch)
    assert is_inside.wait(60)
    return thread, may_leave


def test_code_met_beside_a_mode_compiles_later(graphs):
    """torch marked its frames as never to be compiled: a replica that was looked at made
    those of the others eager for good.
    """
    called = torch.compile(pointwise, backend=graphs)
    rows = randn(3, 2)
    with Watching():
        in_thread(called, rows).join()
    assert graphs.count == 0
    called(rows)
    assert graphs.count == 1


def test_compilation_beside_a_mode_goes_on(graphs):
    """The frames below the one that was being compiled were never compiled."""
    others = []

    def backend(graph, inputs):
        forward = graphs(graph, inputs)

        def run(*args):
            if not others:
                others.append(watched_thread())
            return forward(*args)

        return run

    def outer(rows):
        rows = rows + 1
        torch._dynamo.graph_break()
        return inner(rows)

    def inner(rows):
        rows = rows * 2
        torch._dynamo.graph_break()
        return rows.sin()

    torch.compile(outer, backend=backend)(randn(3, 2))
    ((thread, may_leave),) = others
    may_leave.set()
    thread.join()
    assert graphs.count == 3


def test_overlapping_modes_leave_the_compiler_on(graphs):
    with Watching():
        thread, may_leave = watched_thread()
    may_leave.set()
    thread.join()
    torch.compile(pointwise, backend=graphs)(randn(3, 2))
    assert graphs.count == 1


def test_splitcheck_leaves_compiled_functions_compiled(graphs):
    called = torch.compile(pointwise, backend=graphs)

    def train_step(model, batches):
        for rows, targets in batches:
            loss = CRITERION(called(model(rows)), targets)
            (loss / len(batches)).backward()

    report = splitcheck(train_step, nn.Linear(6, 3), batch(24), parts=3, equal=True)
    assert not report.cause
    assert graphs.count == 0
    called(randn(3, 2))
    assert graphs.count == 1
