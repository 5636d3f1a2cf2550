"""The grid can fail: an engine that does any one thing wrong is caught, by name."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from faults import grid
from faults.grid import LAYOUTS, Bench
from faults.places import PLACES
from scatterpar import ScatterOnceParallel

pytestmark = pytest.mark.draws

PLACE = PLACES["backward of a Function"]
LAST = {"positions": [(2, 2)]}


@pytest.fixture
def bench():
    bench = Bench(LAYOUTS["shared"])
    with bench.engine:
        bench.back_to_start(bench.subject, accumulate=True)
        yield bench
    gc.collect()


def sabotage(monkeypatch, before=lambda engine: None, after=lambda engine, error: error):
    """Make every step do ``before`` first, and raise what ``after`` makes of its error."""
    honest = ScatterOnceParallel.forward_backward

    def step(self, *args, **kwargs):
        before(self)
        try:
            return honest(self, *args, **kwargs)
        except BaseException as error:
            made = after(self, error)
            try:
                raise made from None
            finally:
                del made  # the traceback holds this frame

    monkeypatch.setattr(ScatterOnceParallel, "forward_backward", step)


def test_an_honest_engine_passes(bench):
    assert bench.bad_step(PLACE, "ValueError", **LAST) == []
    assert bench.good_step(PLACE, True) == []


def exchange(engine):
    engine.module.leave.bias.grad = engine.module.leave.bias.grad.clone()


CHANGES = {
    "norm._buffers['running_mean']": lambda engine: engine.module.norm.running_mean.add_(1),
    "leave.bias.grad": lambda engine: engine.module.leave.bias.grad.add_(1),
    "leave.bias.grad (another object)": exchange,
    "torch's generator": lambda engine: torch.rand(()),
    "root.calls (another object)": lambda engine: setattr(engine.module, "calls", 99),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_a_failed_step_changes_is_named(bench, monkeypatch, what):
    sabotage(monkeypatch, CHANGES[what])
    assert bench.bad_step(PLACE, "ValueError", **LAST) == [f"changed: {what}"]


def test_a_gradient_from_nothing(bench, monkeypatch):
    def fill(engine):
        engine.module.unused.bias.grad = torch.zeros(2, dtype=torch.float64)

    sabotage(monkeypatch, fill)
    assert "changed: unused.bias.grad (another object)" in bench.bad_step(
        PLACE, "ValueError", **LAST
    )


def test_a_hook_left_behind(bench, monkeypatch):
    sabotage(monkeypatch, lambda engine: engine.module.norm.register_forward_hook(print))
    assert any(
        wrong.startswith("changed: norm._forward_hooks")
        for wrong in bench.bad_step(PLACE, "ValueError", **LAST)
    )


def test_a_global_left_behind(bench, monkeypatch):
    sabotage(monkeypatch, lambda engine: torch.set_num_threads(torch.get_num_threads() + 1))
    threads = torch.get_num_threads()
    assert bench.bad_step(PLACE, "ValueError", **LAST) == ["changed: torch: num_threads"]
    torch.set_num_threads(threads)


def another(engine, error):
    return type(error)(*error.args)


def cut(engine, error):
    raise error.with_traceback(None)


def forget(engine, error):
    error.__notes__.clear()
    return error


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (another, "another error: ValueError"),
        (cut, "the traceback ends in cut"),
        (forget, "notes: []"),
    ],
)
def test_what_becomes_of_the_error_is_said(bench, monkeypatch, after, words):
    sabotage(monkeypatch, after=after)
    assert bench.bad_step(PLACE, "ValueError", **LAST) == [words]


def test_activations_kept(bench, monkeypatch):
    kept = []

    def keep(engine, error):
        kept.append(error)
        return error

    monkeypatch.setattr(grid, "LEAK_SECONDS", 1)  # of which nobody else needs to be sure
    sabotage(monkeypatch, after=keep)
    assert any(
        wrong.endswith("activations alive") for wrong in bench.bad_step(PLACE, "ValueError", **LAST)
    )


def test_an_error_swallowed(bench, monkeypatch):
    honest = ScatterOnceParallel.forward_backward

    def step(self, *args, **kwargs):
        try:
            honest(self, *args, **kwargs)
        except ValueError:
            return

    monkeypatch.setattr(ScatterOnceParallel, "forward_backward", step)
    assert bench.bad_step(PLACE, "ValueError", **LAST) == ["nothing was raised"]


def test_a_next_step_that_is_not_exact(bench, monkeypatch):
    assert bench.good_step(PLACE, True) == []
    bench.back_to_start(bench.subject, accumulate=True)
    honest = ScatterOnceParallel.forward_backward

    def step(self, *args, **kwargs):
        honest(self, *args, **kwargs)
        gradient = self.module.leave.bias.grad
        gradient[0] = torch.nextafter(gradient[0], gradient[0] + 1)

    monkeypatch.setattr(ScatterOnceParallel, "forward_backward", step)
    assert bench.good_step(PLACE, True) == ["leave.bias.grad"]


def test_torch_itself_keeps_the_graph_of_an_unpack_hook_that_raises():
    """Why that one place is not asked about activations; if this fails, ask it again."""

    def unpack(tensor):
        raise ValueError("boom")

    def step():
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            hidden = torch.ones(3, requires_grad=True).tanh()
            kept.append(weakref.ref(hidden))
            hidden.tanh().sum().backward()

    kept = []
    with pytest.raises(ValueError, match="boom") as caught:
        step()
    del caught
    gc.collect()
    assert kept[0]() is not None
