"""Every private entry point of torch does, on this Python and this torch, what the engine needs."""

from __future__ import annotations

import inspect
import re
import runpy
from pathlib import Path

import pytest
import torch
from faults.forked import run_forked
from harness.oracle import build
from torch import nn
from torch.overrides import TorchFunctionMode

from scatterpar import torch_private as private

pytestmark = pytest.mark.core

WORDS = r"torch \S+ has no {}, which scatterpar needs; install a version of torch that the"


ON_CARDS = {"allocating", "give_up_capture"}  # which tests/nullcuda tries


def test_all_are_tried_here():
    functions = inspect.getmembers(private, inspect.isfunction)
    public = {n for n, f in functions if f.__module__ == private.__name__ and n[0] != "_"}
    tried = re.findall(r"private\.(\w+)\(", Path(__file__).read_text("utf-8"))
    assert public - ON_CARDS <= set(tried)


@pytest.mark.parametrize("name", ["_foreach_copy_", "_C._current_graph_task_id"])
def test_at_import_a_missing_one_is_named(name, monkeypatch):
    monkeypatch.delattr(f"torch.{name}")
    with pytest.raises(RuntimeError, match=WORDS.format(re.escape(f"torch.{name}"))):
        runpy.run_path(private.__file__)


def test_one_that_is_imported_late_is_named(monkeypatch):
    import torch._dynamo.convert_frame as module

    monkeypatch.delattr(module, "compile_lock")
    words = WORDS.format("torch._dynamo.convert_frame.compile_lock")
    with pytest.raises(private.Missing, match=words):
        private.is_compiling()


def test_optimizers():
    weight, seen = nn.Parameter(torch.ones(1)), []
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizer.register_step_pre_hook(lambda *_: seen.append("step"))
    hook = optimizer.register_load_state_dict_post_hook(lambda _: seen.append("load"))
    weight.grad = torch.ones(1)
    private.step_without_hooks(optimizer)
    assert (seen, weight.item()) == ([], 0.0)
    before, (after,) = private.loading_hooks(optimizer)
    assert not before
    after(optimizer)
    assert seen == ["load"]
    hook.remove()
    assert private.loading_hooks(optimizer) == [[], []]


def test_the_caller_s_context():
    class Mode(TorchFunctionMode):
        pass

    assert private.saved_tensors_hooks() is None
    pair = (lambda x: x), (lambda x: x)
    with torch.autograd.graph.saved_tensors_hooks(*pair):
        assert private.saved_tensors_hooks() == pair
    with torch.device("cpu"), Mode():
        assert private.modes() == ["Mode"]
    assert private.modes() == []


def test_profilers():
    assert not private.profiler_is_on()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert private.profiler_is_on()
        assert private.is_profiled()
    assert not private.is_profiled()


def test_graphs():
    leaf, tasks = torch.ones(2, requires_grad=True), []
    assert private.current_graph_task() == -1
    assert not private.are_observed([leaf])
    middle = leaf * 2
    middle.register_hook(lambda _: tasks.append(private.current_graph_task()))
    loss = middle.sum()
    assert private.nodes_of([leaf, middle]) == [middle.grad_fn]
    (found,) = private.leaves_reached(loss, [])
    assert found is leaf
    assert private.leaves_reached(loss, [middle.grad_fn]) == []
    assert private.nodes_reached(loss)[0] is loss.grad_fn
    private.backward([loss], [torch.ones(())])
    assert leaf.grad.tolist() == [2.0, 2.0]
    assert tasks[0] >= 0


def test_hooks_on_leaves():
    before, after, seen = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True), []
    before.register_hook(lambda _: seen.append("before"))
    after.register_post_accumulate_grad_hook(lambda _: seen.append("after"))
    for leaf in before, after:
        assert private.are_observed([leaf])
    assert private.has_gradient_hooks(after)
    assert not private.has_gradient_hooks(before)
    with private.hooks_taken_off([before, after]):
        (before + after).backward()
    assert seen == []
    (before + after).backward()
    assert sorted(seen) == ["after", "before"]


def test_compiling():
    import torch._dynamo.config as config

    module, runs = build(lambda: nn.Linear(2, 2)), []

    def backend(graph, _):
        runs.append("compiled")
        return graph.forward

    compiled = torch.compile(module, backend=backend)
    assert private.is_compiled_module(compiled)
    assert not private.is_compiled_module(module)
    assert private.unwrapped(compiled)[0] is module
    assert private.unwrapped(module) == (module, None)
    with private.uncompiled():
        assert private.is_uncompiled()
        compiled(torch.ones(1, 2).double())
    assert runs == []
    assert not private.is_compiling()
    limit = config.recompile_limit
    with private.many_graphs():
        assert config.recompile_limit >= 64
    assert config.recompile_limit == limit

    @torch.compile(backend=backend)
    def double(x):
        return x * 2

    again = private.compile_fn_of(double)(lambda x: x * 3)
    assert again(torch.ones(1)).item() == 3.0
    assert runs == ["compiled"]
    for mode, records in (("reduce-overhead", True), ("default", False)):
        how = private.compile_fn_of(torch.compile(lambda x: x, mode=mode))
        assert private.records_cuda_graphs(how) == records


def test_random_operators_are_routed_where_the_key_is_on():
    """In a process of its own: what is routed stays so."""
    program = """
import torch
from scatterpar import torch_private as private
seen = []
def kernel_of(operator, position):
    def kernel(*args, **kwargs):
        seen.append(operator._schema.name)
        with private.random_key_off():
            return operator(*args, **kwargs)
    return kernel
names = [operator._schema.name for operator, _ in private.random_operators()]
assert {"aten::bernoulli_", "aten::rand", "aten::normal_"} <= set(names), names
kept = private.register_random_kernels(kernel_of)
x = torch.ones(3)
x.bernoulli_()
assert seen == []
with private.random_key_on():
    x.bernoulli_()
    x + 1
assert seen == ["aten::bernoulli_"], seen
print("routed")
"""
    found = run_forked("-c", program)
    assert found.out == "routed\n", found.err
