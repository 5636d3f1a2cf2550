"""Ranks at construction, and their buffers."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from harness.models import CLASSES, FEATURES, Classifier, mlp
from harness.oracle import assert_close, build, randint, randn, seeded
from harness.rank_processes import Counted, failure, run_on_ranks
from torch import nn

from scatterpar import ScatterOnceParallel

CRITERION = nn.CrossEntropyLoss()
ROWS = (9, 4)


class Everything(Classifier):
    """Buffers of all dtypes; those that change depend on the rows."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)
        self.register_buffer("fp16", torch.ones(2, dtype=torch.float16))
        self.register_buffer("bf16", torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("turn", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("int16", torch.zeros((), dtype=torch.int16))
        self.register_buffer("int64", torch.zeros((), dtype=torch.long))
        self.register_buffer("fp8", torch.ones(3).to(torch.float8_e4m3fn))
        self.register_buffer("lowest", torch.full((FEATURES,), torch.inf, dtype=torch.float64))
        self.register_buffer("constant", torch.rand(7, dtype=torch.float64) / 3)
        self.register_buffer("nothing", None)
        self.register_buffer("empty", torch.zeros(0))

    def forward(self, inputs):
        if self.training:
            self.fp16 += len(inputs)
            self.bf16 += len(inputs)
            self.turn *= 1j * len(inputs)
            self.flags = ~self.flags
            self.int16 += len(inputs)
            self.int64 += 2**40 + len(inputs)
            self.lowest = torch.minimum(self.lowest, inputs.detach().amin(0))
        return self.linear(self.norm(inputs))


def everything():
    module = Everything()
    module.linear.double()
    module.norm.double()
    return module


def data():
    return randn(sum(ROWS), FEATURES), randint(CLASSES, sum(ROWS))


def bits(tensor):
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


def step_with_buffers(group, buffers, steps):
    torch.manual_seed(group.rank())
    module = everything()
    module.int64 += group.rank()
    mine = [tensor.split(ROWS)[group.rank()] for tensor in data()]
    with ScatterOnceParallel(module, process_group=group, buffers=buffers) as engine:
        start = {name: buffer.clone() for name, buffer in module.named_buffers()}
        with Counted() as collectives:
            for _ in range(steps):
                engine.forward_backward(*mine, CRITERION)
    return start, dict(module.named_buffers()), len(collectives)


def expected_buffers(start, rows):
    with seeded():
        module = everything()
    module.load_state_dict(start, strict=False)
    module.lowest = start["lowest"].clone()
    for _ in range(2):
        module(rows)
    return dict(module.named_buffers())


def test_buffers_of_every_dtype():
    (start, found, collectives), (other_start, other, _) = run_on_ranks(
        2, step_with_buffers, "master", 2
    )
    inputs, _ = data()
    first = expected_buffers(start, inputs[: ROWS[0]])
    assert found.keys() == other.keys() == first.keys()
    for name, buffer in found.items():
        assert torch.equal(bits(start[name]), bits(other_start[name])), f"{name}: not taken over"
        assert torch.equal(bits(buffer), bits(other[name])), f"{name} differs between ranks"
        assert buffer.dtype == start[name].dtype
        if buffer.dtype == torch.float64:  # batch statistics, which round as threads have it
            assert_close(buffer, first[name], name)
        else:
            assert torch.equal(bits(buffer), bits(first[name])), name
    assert collectives <= 2 * (1 + 6)  # a small one; float64, 32, 16, bfloat16, complex, bytes


def with_buffer(name, tensor):
    module = nn.Linear(2, 3)
    module.register_buffer(name, tensor)
    return module


def quantised():
    module = nn.Linear(2, 3).requires_grad_(False)
    module.weight.quant_state = torch.ones(3)
    return module


MODULES = {
    "small": lambda: nn.Linear(2, 3),
    "wider": lambda: nn.Linear(2, 4),
    "double": lambda: nn.Linear(2, 3).double(),
    "without bias": lambda: nn.Linear(2, 3, bias=False),
    "nested": lambda: nn.Sequential(nn.Linear(2, 3)),
    "with buffer": lambda: with_buffer("scale", torch.ones(())),
    "table": lambda: nn.Embedding(2, 3),
    "sparse table": lambda: nn.Embedding(2, 3, sparse=True),
    "lazy": lambda: nn.LazyLinear(3),
    "quantised": quantised,
}


def construct(group, modules, options=({}, {}, {})):
    module = MODULES[modules[group.rank()]]()
    return failure(ScatterOnceParallel, module, process_group=group, **options[group.rank()])


SMALL = "parameter 'weight' of shape (3, 2), torch.float32, "
BATCH = {"buffers": "batch"}
REFUSED = [
    ("small", "wider", {}, f"rank 0 has {SMALL}rank 1 has"),
    ("small", "double", {}, "rank 1 has parameter 'weight' of shape (3, 2), torch.float64; make"),
    ("small", "without bias", {}, "'bias' of shape (3,), torch.float32, rank 1 has nothing more"),
    ("without bias", "small", {}, "rank 0 has nothing more, rank 1 has parameter 'bias'"),
    ("small", "nested", {}, "rank 1 has parameter '0.weight'"),
    ("small", "with buffer", {}, "rank 1 has buffer 'scale' of shape (), torch.float32"),
    (
        *("table", "sparse table", {}),
        "rank 1 has parameter 'weight' of shape (2, 3), torch.float32, spa",
    ),
    ("small", "lazy", {}, "rank 1 has parameter 'weight' not initialised yet, torch.float32"),
    ("small", "small", BATCH, "rank 0 has buffers='master', rank 1 has buffers='batch'"),
]


@pytest.mark.parametrize(("first", "second", "options", "words"), REFUSED)
def test_modules_that_differ_are_the_same_error_on_every_rank(first, second, options, words):
    found = run_on_ranks(3, construct, [first, second, first], [{}, options, {}])
    assert found[0][0] == "ValueError"
    assert found[0][1].startswith("the ranks' modules differ: rank 0 has ")
    assert words in found[0][1]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("module", "words", "advice"),
    [
        ("lazy", "'weight' is not initialised yet", "call the module once"),
        ("quantised", "'weight' is quantised, a Parameter", "train without a process_group"),
        ("sparse table", "'weight' has sparse gradients", "make the embedding with sparse=False"),
    ],
)
def test_what_cannot_be_taken_over(module, words, advice):
    for kind, said in run_on_ranks(2, construct, [module, module]):
        assert kind == "ValueError"
        assert said.startswith(words)
        assert advice in said


def outside(group):
    inner = dist.new_group([0])
    return failure(ScatterOnceParallel, nn.Linear(2, 3), process_group=inner)


def test_a_process_outside_the_group_is_told_so():
    first, *others = run_on_ranks(3, outside)
    assert first is None
    for kind, words in others:
        assert kind == "TypeError"
        assert words.startswith("process_group must be a torch.distributed process group that")


def taken_over(group):
    torch.manual_seed(group.rank())
    module = nn.Sequential(nn.Linear(2, 3), nn.Conv2d(2, 2, 2), nn.Conv2d(2, 3, 1))
    module.to(memory_format=torch.channels_last)  # the last one's kernel is contiguous in both ways
    module.register_buffer("table", torch.randn(1, 3).expand(2, 3))
    ScatterOnceParallel(module, process_group=group).close()
    assert module[1].weight.is_contiguous(memory_format=torch.channels_last)
    assert module.table.stride() == (0, 1)
    return [p.detach() for p in module.parameters()] + [module.table]


def test_the_first_ranks_parameters_are_taken_over():
    with seeded(0):
        module = nn.Sequential(nn.Linear(2, 3), nn.Conv2d(2, 2, 2), nn.Conv2d(2, 3, 1))
        table = torch.randn(1, 3).expand(2, 3)
    for found in run_on_ranks(3, taken_over):
        assert all(map(torch.equal, found, [*module.parameters(), table]))


def copied(group):
    with ScatterOnceParallel(nn.Linear(2, 3), process_group=group) as engine:
        return failure(copy.deepcopy, engine), failure(pickle.dumps, engine)


def test_an_engine_with_a_group_says_what_to_copy_instead():
    for words in run_on_ranks(1, copied)[0]:
        assert words[0] == "TypeError"
        assert "copy engine.module, or save engine.state_dict()" in words[1]


def subgroup(group):
    pair = dist.new_group([1, 2])
    if group.rank() == 0:
        return None
    module = mlp(group.rank())
    inputs, targets = data()
    with ScatterOnceParallel(module, process_group=pair) as engine:
        mine = (tensor.split(ROWS)[pair.rank()] for tensor in (inputs, targets))
        return engine.forward_backward(*mine, CRITERION)


def test_a_group_of_some_of_the_ranks():
    _, first, second = run_on_ranks(3, subgroup)
    inputs, targets = data()
    assert torch.equal(first, second)
    assert_close(first, CRITERION(mlp(1)(inputs), targets).detach(), "loss")


class WritesItsWeight(nn.Linear):
    def forward(self, inputs):
        self.weight.data.mul_(0.9)
        return super().forward(inputs)


def written(group):
    module = build(lambda: WritesItsWeight(FEATURES, CLASSES))
    mine = [tensor.split(ROWS)[group.rank()] for tensor in data()]
    with ScatterOnceParallel(module, process_group=group) as engine:
        found = [failure(engine.forward_backward, *mine, CRITERION) for _ in range(2)]
    return found, module.weight.grad


def test_parameters_that_a_forward_pass_writes_are_refused():
    """Each rank would have gone on with values of its own."""
    for found, gradient in run_on_ranks(2, written):
        for kind, words in found:
            assert kind == "RuntimeError"
            assert "the forward pass writes the parameter 'weight'" in words
            assert "values are lost" in words
        assert gradient is None
