"""Ranks: the gradient of the union of all batches, the same bits everywhere, few
collectives.
"""

from __future__ import annotations

import copy
import functools
import pickle
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import contrastive
from harness.contrastive import two_views
from harness.models import CLASSES, FEATURES, Of, linear, mlp
from harness.module_cases import CASES, with_buffers
from harness.oracle import (
    assert_close,
    assert_gradients,
    build,
    gradients,
    randint,
    randn,
    seeded,
    whole_batch,
)
from harness.rank_processes import Counted, failure, run_on_ranks
from torch import nn

from scatterpar import Replicated, Rows, ScatterOnceParallel
from scatterpar.batch import nested

# How many rows each rank has: uneven on purpose, some fewer than there are replicas.
ROWS = {2: (9, 4), 3: (7, 1, 5)}
CE = nn.CrossEntropyLoss()


BATCH = randn(13, FEATURES), randint(CLASSES, 13)
VIEWS = (randn(13, FEATURES, seed=5), randn(13, FEATURES, seed=6)), randint(4, 13)


def part(group, batch=BATCH):
    """The rows of this rank."""
    return nested.map_tensors(
        lambda tensor: tensor.split(ROWS[group.size()])[group.rank()], batch
    )


def collectives_of(group, name):
    """What a step of one rank sends to the others."""
    case = (CASES | contrastive.CASES)[name]
    model = case.build()
    batch = case.rows(range(5, 9) if group.rank() else range(5))
    with (
        ScatterOnceParallel(model, process_group=group) as engine,
        Counted() as collectives,
    ):
        loss = engine.forward_backward(*batch, case.criterion(model), **case.options)
        assert engine.last_step.loss == pytest.approx(loss.item())
    return collectives


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [
        ("several dtypes", ["float32", "float64"]),
        ("buffers of every dtype", ["float64", "uint8"]),
    ],
)
def test_step_has_one_collective_per_dtype(name, dtypes):
    """Beside a small one, for flags and counts."""
    for collectives in run_on_ranks(2, collectives_of, name):
        assert {call for call, _, _ in collectives} == {"all_reduce"}
        (_, _, small), *large = collectives
        assert small < 1024
        assert sorted(str(dtype) for _, dtype, _ in large) == [
            f"torch.{name}" for name in dtypes
        ]
        elements = sum(p.numel() for p in CASES[name].build().parameters())
        assert sum(size for *_, size in large) <= 8 * (elements + 100)


def test_whole_batch_has_four_collectives():
    """Two below 1 KiB, the outputs and targets, and the gradients."""
    first, second = run_on_ranks(2, collectives_of, "clip, one sub-step")
    assert [name for name, _, _ in first] == ["all_reduce"] * 4
    assert first == second
    sizes = [size for _, _, size in first]
    assert sizes[0] == sizes[2] < 1024


def scaled(group):
    model, scaler = build(mlp), torch.amp.GradScaler("cpu", init_scale=8.0)
    with ScatterOnceParallel(model, process_group=group) as engine:
        engine.forward_backward(*part(group), CE, scaler=scaler)
    _, expected = whole_batch(model, *BATCH, CE)
    assert_gradients(model, {name: 8 * gradient for name, gradient in expected.items()})


def masks(group, replicas):
    torch.manual_seed(7)
    replicas = replicas or 3 - group.rank()
    parts = {"weight": nn.Parameter(torch.ones(64)), "dropout": nn.Dropout()}
    # puts out the mask
    module = Of(lambda m, inputs: m.dropout(m.weight * inputs), **parts)
    batch, seen = (torch.ones(replicas, 64), None, lambda output, _: output.mean()), []
    with ScatterOnceParallel(
        module, 1, ["cpu"] * replicas, process_group=group
    ) as engine:
        for _ in range(2):
            seen += engine.forward_backward(*batch, return_outputs=True)[1]
    return [output.flatten().tolist() for output in seen]


@pytest.mark.parametrize("replicas", [1, 2, None])
def test_each_replica_draws_its_own_masks(replicas):
    found = run_on_ranks(3, masks, replicas)
    drawn = [tuple(mask) for seen in found for mask in seen]
    assert len(set(drawn)) == len(drawn) == 3 * 2 * (replicas or 2)
    assert found == run_on_ranks(3, masks, replicas)


def several_engines(group):
    engines = [ScatterOnceParallel(mlp(seed), process_group=group) for seed in (1, 2)]
    for engine in engines * 2:
        engine.module.zero_grad()
        engine.forward_backward(*part(group), CE)
        assert_gradients(engine.module, whole_batch(engine.module, *BATCH, CE)[1])
    for engine in engines:
        engine.close()


def lists_and_windows(group):
    """Each rank's own batches: of another number, of other lengths, with a table for
    all.
    """

    def looks(module, ids, table):
        return torch.stack([module.words(sentence).sum(0) for sentence in ids]) @ table

    def batches(rank):
        return [
            [randint(9, n + 1, seed=n + rank) for n in range(2 + b)]
            for b in range(2 - rank)
        ]

    table = randn(CLASSES, CLASSES)
    model, twin = (
        build(lambda: Of(looks, words=nn.Embedding(9, CLASSES))) for _ in "ab"
    )
    labels = [randint(CLASSES, 5, seed=3), randint(CLASSES, 2, seed=4)]
    window = [(Rows(batch), Replicated(table)) for batch in batches(group.rank())]
    with ScatterOnceParallel(
        model, 2, ["cpu:0", "cpu:1"], process_group=group
    ) as engine:
        engine.forward_backward(Rows.from_batches(window), labels[group.rank()], CE)
    everything = [
        sentence for r in range(2) for batch in batches(r) for sentence in batch
    ]
    CE(twin(everything, table), torch.cat(labels)).backward()
    assert_gradients(model, gradients(twin))


@pytest.mark.contract
@pytest.mark.parametrize("case", [scaled, several_engines, lists_and_windows])
def test_two_ranks_equal_one_device(case):
    run_on_ranks(2, case)


# Class 0 has no weight, and its labels count by label smoothing alone.
SMOOTHED = {
    "weight": torch.tensor([0.0] + [1.0] * (CLASSES - 1), dtype=torch.float64),
    "label_smoothing": 0.1,
}
SMOOTHED_LOSSES = {
    "module": nn.CrossEntropyLoss(**SMOOTHED),
    "partial": functools.partial(nn.functional.cross_entropy, **SMOOTHED),
    "of pixels": nn.CrossEntropyLoss(**SMOOTHED),
}


def of_pixels(model, rows):
    """Scores of two pixels of each row."""
    return torch.stack([model.scores(rows), model.scores(rows.square())], 2)


def smoothed_beside(group, rank, name):
    """Two steps in which all labels of ``rank`` are of the class without weight."""
    model, criterion = build(mlp), SMOOTHED_LOSSES[name]
    inputs, labels = BATCH
    if name == "of pixels":
        model = build(lambda: Of(of_pixels, scores=linear()))
        labels = torch.stack([labels, labels.flip(0)], 1)
    labels = labels.clone()
    labels.split(ROWS[group.size()])[rank].zero_()
    expected_loss, expected = whole_batch(model, inputs, labels, criterion)
    batch = *part(group, (inputs, labels)), criterion
    with ScatterOnceParallel(
        model, 2, ["cpu:0", "cpu:1"], process_group=group
    ) as engine:
        loss = engine.forward_backward(*batch)
        assert_gradients(model, expected)
        model.zero_grad()
        engine.loss(*batch).backward()
        assert_gradients(model, expected)
    assert loss.item() == pytest.approx(expected_loss.item())


@pytest.mark.parametrize(
    ("size", "rank", "name"), [(2, 0, "module"), (3, 2, "partial"), (2, 1, "of pixels")]
)
def test_rank_without_weight_adds_smoothing(size, rank, name):
    """Its smoothed labels were silently left out."""
    run_on_ranks(size, smoothed_beside, rank, name)


# --- one criterion over the outputs of all ranks ---


TABLE = randn(4, contrastive.EMBEDDING, seed=9)


def beside_a_table(outputs, targets):
    labels, table = targets
    return nn.functional.cross_entropy(outputs["one"] @ table["centres"].T, labels)


def step_beside_a_table(group, devices):
    inputs, labels = part(group, VIEWS)
    table = Replicated({"centres": TABLE if group.rank() == 0 else TABLE * 2})
    model = two_views()
    with ScatterOnceParallel(
        model, 2, devices, process_group=group, verify=False
    ) as engine:
        loss = engine.forward_backward(
            inputs, (labels, table), beside_a_table, whole_batch=True
        )
    return loss, gradients(model)


def test_rowless_targets_are_those_of_rank_0(devices):
    """A table that was marked ``Replicated`` was joined with the other ranks', row
    after row.
    """
    targets = VIEWS[1], {"centres": TABLE}
    expected, its = whole_batch(two_views(), VIEWS[0], targets, beside_a_table)
    for loss, found in run_on_ranks(2, step_beside_a_table, devices(2)):
        assert_close(loss, expected, "loss")
        assert_close(found["first.weight"], its["first.weight"], "gradient")


def lists_of(group, where):
    """As many rows on every rank, so that entry by entry all shapes are alike."""
    rows = Rows([*randn(2, FEATURES, seed=group.rank())], torch.stack)
    targets = Rows(["a", "b"]) if where == "targets" else None

    def forward(model, inputs):
        return [*model.linear(inputs)] if where == "outputs" else model.linear(inputs)

    def criterion(outputs, _):
        return torch.stack(list(outputs)).sum()

    model = Of(forward, linear=linear())
    with ScatterOnceParallel(model, process_group=group) as engine:
        raised = failure(
            engine.forward_backward, rows, targets, criterion, whole_batch=True
        )
    return raised, gradients(model)


@pytest.mark.parametrize("where", ["outputs", "targets"])
def test_unjoinable_lists_refused(where):
    """They were joined entry by entry, or rank 0's texts were taken for
    all rows' ones.
    """
    for (kind, text), found in run_on_ranks(2, lists_of, where):
        assert kind == "ValueError"
        assert "whole_batch" in text
        assert where in text
        assert {*found.values()} == {None}


def learned(noise):
    """A criterion with a temperature and statistics of its own, and noise."""

    def forward(m, outputs, labels):
        one = m.norm(outputs["one"])
        logits = m.scale * (one + noise * torch.randn_like(one)) @ outputs["other"].T
        return nn.functional.cross_entropy(logits, torch.arange(len(labels)))

    scale = nn.Parameter(torch.tensor(2.0))
    return Of(forward, scale=scale, norm=nn.BatchNorm1d(contrastive.EMBEDDING)).double()


def learn(group, noise):
    # what the criterion draws is the same on all nevertheless
    torch.manual_seed(group.rank())
    model, criterion = two_views(), learned(noise)
    options = {"process_group": group, "buffers": "batch", "verify": False}
    with ScatterOnceParallel(model, 2, ["cpu"] * 2, **options) as engine:
        batch = part(group, VIEWS)
        losses = [
            engine.forward_backward(*batch, criterion, whole_batch=True) for _ in "ab"
        ]
    return losses, gradients(criterion) | gradients(model) | dict(
        criterion.named_buffers()
    )


@pytest.mark.draws
@pytest.mark.parametrize("noise", [0.1, 0.0])
def test_criterion_counts_once_draws_alike(noise):
    """Its statistics had the variance of more rows than there are: each rank has seen
    them all.
    """
    (losses, found), (other_losses, other) = run_on_ranks(2, learn, noise)
    assert (losses[0] == losses[1]) == (not noise)
    assert other_losses == losses
    assert all(g is None or torch.equal(g, other[name]) for name, g in found.items())
    if not noise:
        model, criterion = two_views(), learned(noise)
        for _ in "ab":
            criterion(model(*VIEWS[0]), VIEWS[1]).backward()
        assert_close(found["scale"], criterion.scale.grad, "scale")
        for name, buffer in criterion.named_buffers():
            assert_close(found[name].double(), buffer.double(), name)


# --- construction ---


def quantised():
    module = nn.Linear(2, 3).requires_grad_(False)
    module.weight.quant_state = torch.ones(3)
    return module


def called_once():
    module = nn.LazyLinear(3)
    module(torch.zeros(1, 2))
    return module


MODULES = {
    "small": lambda: nn.Linear(2, 3),
    "wider": lambda: nn.Linear(2, 4),
    "table": lambda: nn.Embedding(2, 3),
    "sparse table": lambda: nn.Embedding(2, 3, sparse=True),
    "lazy": lambda: nn.LazyLinear(3),
    "called once": called_once,
    "quantised": quantised,
}
MENDED = {"lazy": "called once", "sparse table": "table", "quantised": "small"}


def construct(group, modules, options):
    module = MODULES[modules[group.rank()]]()
    return failure(
        ScatterOnceParallel, module, process_group=group, **options[group.rank()]
    )


def construct_on(group, by_rank):
    """What an engine says whose ranks have these accelerators, played by the host's."""
    devices = ["cpu:0", "cpu:1"]
    names = dict(zip(map(torch.device, devices), by_rank[group.rank()], strict=True))
    with mock.patch("scatterpar.distributed.ranks.identity_of_accelerator", names.get):
        return failure(ScatterOnceParallel, linear(), 1, devices, process_group=group)


@pytest.mark.parametrize(
    ("by_rank", "is_refused"),
    [
        ([("GPU-a", "GPU-b"), ("GPU-c", "GPU-b")], True),
        ([("GPU-a", "GPU-a"), ("GPU-b", "GPU-b")], False),  # two replicas on one
        ([(None, None), (None, None)], False),
    ],
)
def test_accelerator_of_two_ranks_refused(by_rank, is_refused):
    """NCCL ends or hangs there: two processes were given the same GPU."""
    for words in run_on_ranks(2, construct_on, by_rank):
        if not is_refused:
            assert words is None
            continue
        kind, text = words
        assert kind == "ValueError"
        assert re.search("ranks 0 and 1 have the same accelerator, GPU-b; leave", text)


DIFFER = "the ranks' modules differ: rank 0 has "
WEIGHT = r"parameter 'weight' of shape \(3, 2\), torch.float32"
# The modules of ranks 0 and 2 and of rank 1, the options of rank 1, and the words. The
# error's remedy: the same module and options on all, or what ``MENDED`` has in its place.
REFUSED = {
    "another shape": (
        "small",
        "wider",
        {},
        rf"{DIFFER}{WEIGHT}, rank 1 has .*\(4, 2\), torch.float32; make",
    ),
    "sparse on one rank": (
        "table",
        "sparse table",
        {},
        f"{DIFFER}.*, rank 1 has parameter 'weight' .*, sparse",
    ),
    "another option": (
        "small",
        "small",
        {"buffers": "batch"},
        f"{DIFFER}buffers='master', .* buffers='batch'",
    ),
    "another dtype": (
        "small",
        "small",
        {"accumulate_dtype": torch.half},
        f"{DIFFER}.*=None, .*=torch.float16",
    ),
    "lazy": (
        "lazy",
        "lazy",
        {},
        "'weight' is not initialised yet.*call the module once",
    ),
    "quantised": (
        "quantised",
        "quantised",
        {},
        "'weight' is quantised, a Parameter.*without a process_group",
    ),
    "sparse on all ranks": (
        "sparse table",
        "sparse table",
        {},
        "'weight' has sparse gradients.*with sparse=False",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusal_is_the_same_on_all_ranks(name):
    first, second, options, words = REFUSED[name]
    found = run_on_ranks(3, construct, [first, second, first], [{}, options, {}])
    kind, text = found[0]
    assert kind == "ValueError"
    assert re.match(words, text)
    assert found == [found[0]] * 3
    mended = MENDED.get(first, first)
    assert run_on_ranks(3, construct, [mended] * 3, [{}] * 3) == [None] * 3


def layers():
    module = nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last)
    numbers = torch.arange(3).to(torch.int16)
    return with_buffers(module, numbers=numbers, empty=torch.zeros(0), nothing=None)


def taken_over(group):
    torch.manual_seed(group.rank())
    module = layers()
    ScatterOnceParallel(module, process_group=group).close()
    assert module.weight.is_contiguous(memory_format=torch.channels_last)
    return [*module.state_dict().values()]


def test_first_ranks_parameters_are_used():
    with seeded(0):
        expected = layers().state_dict().values()
    for found in run_on_ranks(3, taken_over):
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)


def copied(group):
    with ScatterOnceParallel(nn.Linear(2, 3), process_group=group) as engine:
        return [failure(way, engine) for way in (copy.deepcopy, pickle.dumps)]


def test_copy_of_engine_with_group_refused():
    for kind, words in run_on_ranks(1, copied)[0]:
        assert kind == "TypeError"
        assert "copy engine.module, or save engine.state_dict()" in words


def subgroup(group):
    pair, model = dist.new_group([1, 2]), mlp(group.rank())
    if group.rank() == 0:
        return failure(ScatterOnceParallel, model, process_group=pair)
    with ScatterOnceParallel(model, process_group=pair) as engine:
        return engine.forward_backward(*part(pair), CE)


def test_subgroup_refuses_outside_processes():
    (kind, words), first, second = run_on_ranks(3, subgroup)
    assert kind == "TypeError"
    assert words.startswith(
        "process_group must be a torch.distributed process group that"
    )
    assert torch.equal(first, second)
    assert_close(first, CE(mlp(1)(BATCH[0]), BATCH[1]).detach(), "loss")


def written(group):
    def forward(m, inputs):
        m.linear.weight.data.mul_(0.9)
        return m.linear(inputs)

    module = Of(forward, linear=linear())
    with ScatterOnceParallel(module, process_group=group) as engine:
        return failure(
            engine.forward_backward, *part(group), CE
        ), module.linear.weight.grad


def test_parameters_written_in_forward_refused():
    """Each rank would have gone on with values of its own."""
    for (kind, words), gradient in run_on_ranks(2, written):
        assert kind == "RuntimeError"
        assert "the forward pass writes the parameter 'linear.weight'" in words
        assert gradient is None


# --- numbers that the criterion returns beside its loss ---


def classify(logits, labels):
    right = (logits.argmax(1) == labels).float().mean()
    loss = nn.functional.cross_entropy(logits, labels)
    return loss, {"accuracy": right, "largest": logits.mean(), "two": 2}


def add_up(logits, labels):
    right = (logits.argmax(1) == labels).sum()
    loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
    return loss, {"right": right}


def logged_by(group, criterion, options):
    inputs, labels = (tensor.split(ROWS[2])[group.rank()] for tensor in BATCH)
    with (
        ScatterOnceParallel(build(mlp), 2, ["cpu"], process_group=group) as engine,
        Counted() as collectives,
    ):
        engine.forward_backward(inputs, labels, criterion, **options)
        return engine.last_step.logged, len(collectives), collectives[0][-1]


@pytest.mark.parametrize(
    ("criterion", "options", "number_of_collectives"),
    [
        (classify, {}, 2),
        (add_up, {"reduction": "sum"}, 2),
        (classify, {"whole_batch": True}, 4),
    ],
    ids=["mean", "sum", "whole batch"],
)
def test_numbers_are_those_of_all_ranks(criterion, options, number_of_collectives):
    """They are sent with the counts."""
    _, numbers = criterion(build(mlp)(BATCH[0]), BATCH[1])
    expected = {name: pytest.approx(float(number)) for name, number in numbers.items()}
    for logged, collectives, small in run_on_ranks(2, logged_by, criterion, options):
        assert logged == expected
        assert collectives == number_of_collectives
        assert small < 1024


def other_names(logits, labels):
    loss, numbers = classify(logits, labels)
    return loss, {f"other {name}": number for name, number in numbers.items()}


def with_many(logits, labels):
    loss, _ = classify(logits, labels)
    return loss, {str(number): 1.0 for number in range(33)}


def raised_by(group, *criteria):
    inputs, labels = (tensor.split(ROWS[2])[group.rank()] for tensor in BATCH)
    with ScatterOnceParallel(build(mlp), 2, ["cpu"], process_group=group) as engine:
        step = engine.forward_backward
        error = failure(step, inputs, labels, criteria[group.rank()])
        step(inputs, labels, classify)
        return error


def test_other_names_raise_on_each_rank():
    for error in run_on_ranks(2, raised_by, classify, other_names):
        assert "the names of the numbers that the criterion returns" in str(error)


def test_too_many_numbers_raise_on_each_rank():
    for error in run_on_ranks(2, raised_by, with_many, with_many):
        assert "33 numbers to log" in str(error)


def with_head(features, labels, head):
    return CE(head(features), labels)


def head_in_criterion(model, head):
    return functools.partial(with_head, head=head)


class Head(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.head = head

    def forward(self, features, labels):
        return with_head(features, labels, self.head)


def module_of_head(model, head):
    return Head(head)


def head_added_to_model(model, head):
    """After the engine was made."""
    model.append(head)
    return CE


def raised_with_heads(group, criterion_of, seeds, whole):
    """What a step raises, and the gradients of a step with rank 0's head."""
    inputs, labels = (tensor.split(ROWS[2])[group.rank()] for tensor in BATCH)
    model = build(lambda: nn.Sequential(nn.Linear(FEATURES, 6)))
    head = build(lambda: nn.Linear(6, CLASSES), seed=seeds[group.rank()])
    with ScatterOnceParallel(model, 2, ["cpu"], process_group=group) as engine:
        step = functools.partial(
            engine.forward_backward,
            *(inputs, labels, criterion_of(model, head)),
            whole_batch=whole,
        )
        error = failure(step) if seeds[0] != seeds[1] else None
        assert all(p.grad is None for p in model.parameters()) or error is None
        head.load_state_dict(
            build(lambda: nn.Linear(6, CLASSES), seed=seeds[0]).state_dict()
        )
        for _ in range(2):
            model.zero_grad()
            head.zero_grad()
            step()
    return None if error is None else str(error), gradients(model), gradients(head)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    "criterion_of", [head_in_criterion, module_of_head, head_added_to_model]
)
def test_other_values_of_a_head_raise_on_each_rank(criterion_of, whole):
    """Each rank trained its own head, with the mean of the gradients."""
    expected = run_on_ranks(2, raised_with_heads, criterion_of, (3, 3), whole)
    found = run_on_ranks(2, raised_with_heads, criterion_of, (3, 4), whole)
    for (error, *its), (_, *right) in zip(found, expected, strict=True):
        assert error is not None
        assert "the values of those that the criterion trains" in error
        torch.testing.assert_close(its, right)
