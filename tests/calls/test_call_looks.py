"""Looks at calls: rows that meet are told, rules of losses are found."""

import copy
import enum
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from harness.oracle import (
    assert_close,
    assert_gradients,
    build,
    gradients,
    randint,
    randn,
)
from harness.pairwise import few_of
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from calls.programs import Own, mlp
from scatterpar import Replicated, Rows, ScatterOnceParallel
from scatterpar.calls import call_looks

ROWS, LABELS = randn(12, 6), randint(3, 12)


def engine_of(forward, layout=("cpu", "cpu"), **options):
    net = build(lambda: Own(forward, net=mlp()))
    return ScatterOnceParallel(net, device_ids=list(layout), **options)


def test_right_call_is_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with engine_of(lambda self, rows: self.net(rows)) as engine:
            for _ in range(4):
                engine(ROWS).sum().backward()


class Normalises(nn.Module):
    """Writes buffers in place that its graph needs, as running normalisers do."""

    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("scale", torch.ones(3))

    def forward(self, rows):
        self.count += 1
        self.scale.mul_(1.5)
        return self.net(rows) * self.count * self.scale


@pytest.mark.parametrize("layout", [["cpu"] * 2, ["cpu:0", "cpu:1", "cpu:0"]])
def test_look_leaves_buffers_to_graphs(layout):
    """It has put back what its own runs wrote, and torch refused the backward pass."""
    net, plain = build(Normalises), build(Normalises)
    with ScatterOnceParallel(net, device_ids=layout) as engine:
        for _ in range(5):
            for call in (engine, plain):
                call.zero_grad()
                call(ROWS).square().sum().backward()
            assert_gradients(net, gradients(plain))


class Cubic(nn.Module):
    def forward(self, weight):
        return weight + 0.1 * weight**3


class Symmetric(nn.Module):
    def forward(self, bias):
        return bias + bias.flip(0)


def _two_calls(call):
    (call(ROWS).square().sum() + call(ROWS[:7]).sum()).backward()


def _accumulated(call):
    call(ROWS).square().sum().backward(retain_graph=True)
    call(ROWS[:7]).sum().backward()


@pytest.mark.parametrize("layout", [["cpu"] * 2, ["cpu:0", "cpu:1", "cpu:0"]])
@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("use", [_two_calls, _accumulated])
def test_look_leaves_cached_parametrizations(use, name, layout):
    """Weights in the cache are parts of the call's graph."""
    nets = []
    for is_engine in (True, False):
        net = build(mlp)
        kind = Cubic if name == "weight" else Symmetric
        parametrize.register_parametrization(net[0], name, kind())
        call = ScatterOnceParallel(net, device_ids=layout) if is_engine else net
        with parametrize.cached():
            use(call)
        nets.append(net)
    assert_gradients(nets[0], gradients(nets[1]))


@pytest.mark.parametrize("shares", [None, [1, 2]])
def test_rows_that_meet_are_told(shares):
    """Not with unequal shares, which were taken for those of a step, in sub-steps."""
    with (
        engine_of(
            lambda self, rows: self.net(rows).softmax(0), shares=shares
        ) as engine,
        pytest.warns(UserWarning, match="other outputs for a few rows"),
    ):
        engine(ROWS)


def _after_a_name(self, rows):
    return {"name": "a", "number": 3, "output": self.net(rows)}


def _softmax_after_a_name(self, rows):
    return {"name": "a", "number": 3, "output": self.net(rows).softmax(0)}


def test_tensor_after_other_values_is_compared():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with engine_of(_after_a_name) as engine:
            engine(ROWS)["output"].sum().backward()
    with (
        engine_of(_softmax_after_a_name) as engine,
        pytest.warns(UserWarning, match="other outputs for a few rows"),
    ):
        engine(ROWS)


def test_text_that_counts_calls_has_few_looks():
    """Each new text was one more pass of two rows, and one more entry."""
    with engine_of(lambda self, rows: self.net(rows), verify=True) as engine:
        for number in range(2 * call_looks._MOST_SELECTIONS + 9):
            engine.module.name = str(number)
            engine(ROWS)
        entries = engine._calls._looks._entries
        assert len(entries) == 2 * call_looks._MOST_SELECTIONS + 1


class Reduction(enum.Enum):
    MEAN = "mean"
    SUM = "sum"


def _selected_loss(self, rows, labels, reduction=None):
    is_mean = (reduction or self.reduction) in ("mean", 1, -1, Reduction.MEAN)
    name = "mean" if is_mean else "sum"
    return F.cross_entropy(self.net(rows), labels, reduction=name)


@pytest.mark.parametrize(
    "reductions",
    # Python has one hash for -1 and -2.
    [("mean", "sum"), ("sum", "mean"), (1, 2), (-1, -2), tuple(Reduction)],
    ids=["words", "sum-first", "numbers", "negative", "enum"],
)
def test_selected_number_has_its_own_rule(reductions):
    """The rule of the first reduction was the rule of all."""
    with engine_of(_selected_loss, ["cpu:0", "cpu:1"]) as engine:
        plain = copy.deepcopy(engine.module)
        for reduction in [*reductions, *reductions]:
            _assert_same_loss(engine, plain, reduction)


def test_counter_beside_a_word_spares_its_rule():
    """After 16 numbers of a counter, both words had one rule."""

    def forward(self, rows, labels, reduction, number):
        return _selected_loss(self, rows, labels, reduction)

    with engine_of(forward) as engine:
        plain = copy.deepcopy(engine.module)
        for number in range(call_looks._MOST_SELECTIONS + 8):
            reduction = "sum" if number % 3 else "mean"
            _assert_same_loss(engine, plain, reduction, number)


def test_switch_selects_the_rule_of_a_number():
    with engine_of(_selected_loss) as engine:
        plain = copy.deepcopy(engine.module)
        for reduction in ("mean", "sum", "mean", "sum"):
            engine.module.reduction = plain.reduction = reduction
            _assert_same_loss(engine, plain)


def _assert_same_loss(engine, plain, *selected):
    losses = []
    for call in (engine, plain):
        call.zero_grad()
        losses.append(call(ROWS[:7], LABELS[:7], *selected))
        losses[-1].backward()
    torch.testing.assert_close(*losses)
    assert_gradients(engine.module, gradients(plain))


def _selected_output(self, rows, what):
    if what in ("labels", "table", 0, 1, -1, -2):
        is_table = what in ("table", 1, -2)
        return torch.arange(6) if is_table else self.net(rows).argmax(1)
    if what == "codes":
        return self.codes + 0
    output = self.net(rows)
    return output * 0 if what == "zeros" else output


@pytest.mark.parametrize(
    "selections",
    [
        ("labels", "table"),
        (0, 1),
        (1, 0),
        (-1, -2),
        ("rows", "codes"),
        ("codes", "rows"),
        ("codes", "zeros"),
    ],
    ids=lambda selections: "-".join(map(str, selections)),
)
def test_selected_output_has_rows_or_none(selections):
    """What was known of the first output was taken for known of all: a table of as many
    entries as each replica has rows was joined as rows.
    """
    with engine_of(_selected_output) as engine:
        engine.module.codes = nn.Parameter(randn(6, 3))
        for what in [*selections, *selections]:
            torch.testing.assert_close(engine(ROWS, what), engine.module(ROWS, what))


def _output_by_name(self, rows, labels=False, table=False):
    return _selected_output(self, rows, "table" if table else "labels")


def test_name_selects_rows_or_none():
    with engine_of(_output_by_name) as engine:
        for name in ("labels", "table", "labels", "table"):
            selected = {name: True}
            found = engine(ROWS, **selected)
            torch.testing.assert_close(found, engine.module(ROWS, **selected))


def test_loss_that_is_no_mean_is_refused_in_words():
    def forward(self, rows, labels):
        return F.cross_entropy(self.net(rows), labels).sqrt()

    with engine_of(forward) as engine:
        with pytest.raises(ValueError, match="the loss that the module returns"):
            engine(ROWS, LABELS)
        assert engine.module.net[0].weight.grad is None


NOT_JOINED = {
    "rows over their number": (
        lambda self, rows: self.net(rows) / len(rows),
        "It seems to be a mean over rows.",
    ),
    "a mean over the square of the rows": (
        lambda self, rows: self.net(rows).mean() / len(rows),
        "add it after the call.",
    ),
    "a square": (
        lambda self, rows: self.net(rows).sum() ** 2,
        "add it after the call.",
    ),
}


@pytest.mark.parametrize("name", NOT_JOINED)
def test_remedies_of_a_call_are_no_arguments(name):
    """``engine(x)`` has none: ``reduction="mean"`` would reach ``forward``."""
    forward, words = NOT_JOINED[name]
    with (
        engine_of(forward) as engine,
        pytest.raises(ValueError, match="is not the sum of the losses") as caught,
    ):
        engine(ROWS)
    text = str(caught.value)
    assert words in text
    assert "Return what it is computed from, one entry per row" in text
    for argument in ("reduction=", "count=", "whole_batch=", "engine.loss"):
        assert argument not in text


def test_mean_over_rows_is_taken_without_a_look():
    def forward(self, rows):
        return self.net(rows).sum()

    with engine_of(forward, verify=False) as engine:
        found = engine(ROWS)
        torch.testing.assert_close(found, engine.module(ROWS) / 2)


def test_hooks_of_parameters_see_no_look():
    seen = []
    with engine_of(lambda self, rows: self.net(rows)) as engine:
        engine.module.net[0].weight.register_hook(seen.append)
        engine(ROWS)
    assert not seen


class Checkpointed(nn.Module):
    """A language model whose norm computes in float32, such as Llama's, under a
    checkpoint. It is new: the losses of all words are nearly the same.
    """

    def __init__(self, scale):
        super().__init__()
        self.words = nn.Embedding(50, 8)
        self.layer = nn.Linear(8, 8)
        self.head = nn.Linear(8, 50, bias=False)
        with torch.no_grad():
            self.head.weight.mul_(scale)

    def forward(self, words, labels):
        hidden = checkpoint(self.normed, self.words(words), use_reentrant=False)
        logits = self.head(self.layer(hidden))
        labels = labels[:, 1:].flatten()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels)

    def normed(self, hidden):
        wide = hidden.to(torch.float32)
        return (wide * wide.square().mean(-1, keepdim=True).rsqrt()).to(hidden.dtype)


@pytest.mark.parametrize("scale", [1e-3, 1.0])
def test_checkpoint_keeps_rules_apart(scale):
    """In double precision a checkpoint computes other formats again, which is no answer.

    The gradient was that of a mean over rows: off by a fifth.
    """
    net = build(lambda: Checkpointed(scale)).float()
    plain = copy.deepcopy(net)
    words = randint(50, 8, 24)
    labels = words.clone()
    for row, number in enumerate([5, 4, 6, 8, 8, 6, 10, 11]):
        labels[row, : 24 - number] = -100
    with ScatterOnceParallel(net, device_ids=["cpu:0", "cpu:1"]) as engine:
        for _ in range(2):
            engine(words, labels).backward()
            plain(words, labels).backward()
    for parameter, expected in zip(net.parameters(), plain.parameters(), strict=True):
        error = (parameter.grad - expected.grad).norm() / expected.grad.norm()
        assert float(error) < 1e-4


# --- which of the rules holds ---


class Sentences(nn.Module):
    """Returns a loss of its words; ``loss`` is given logits and labels."""

    def __init__(self, loss, scale=1.0, reentrant=None, vocabulary=20):
        super().__init__()
        self.loss = loss
        self.reentrant = reentrant
        self.words = nn.Embedding(vocabulary, 6)
        self.layer = nn.Linear(6, 6)
        self.head = nn.Linear(6, vocabulary, bias=False)
        with torch.no_grad():
            self.head.weight.mul_(scale)

    def forward(self, words, labels):
        hidden = self.words(words)
        if self.reentrant is None:
            hidden = self.layer(hidden)
        else:
            hidden = checkpoint(self.layer, hidden, use_reentrant=self.reentrant)
        return self.loss(self.head(hidden.tanh()), labels)


def by_labels(logits, labels, reduction="mean"):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)


def by_shifted_labels(logits, labels):
    return by_labels(logits[:, :-1], labels[:, 1:])


def by_rows(logits, labels):
    sums = by_labels(logits, labels, "none").view(len(labels), -1).sum(1)
    return sums.mean() / 40


def summed(logits, labels):
    return by_labels(logits, labels, "sum") / 300


def by_completions(logits, labels):
    """As preference trainers of TRL compute it, of log-probabilities of completions."""
    labels = labels[:, 1:]
    is_counted = labels != -100
    places = labels.clamp(min=0)[..., None]
    chosen = logits[:, :-1].log_softmax(-1).gather(-1, places).squeeze(-1)
    total = chosen.masked_fill(~is_counted, 0).sum()
    return -total / is_counted.sum().clamp(min=1)


LAYOUTS = [("cpu", "cpu"), ("cpu:0", "cpu:1", "cpu:0")]
RULES = (by_labels, by_shifted_labels, by_rows, summed, by_completions)
LIMITS = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.bfloat16: 3e-2,
    torch.float16: 3e-2,
}
# Ignored labels of the first four rows, and of the last four. In the second call every
# mean is within the rounding of float32, so that later calls have to show which holds.
NUM_IGNORED = [(0, 0, 0, 0, 0, 0, 0, 0)]
NUM_IGNORED += [(20, 20, 21, 20, 20, 20, 20, 20)]
NUM_IGNORED += [(38, 30, 1, 35, 2, 20, 3, 1), (0, 3, 1, 20, 39, 38, 20, 30)]


def sentences(num_ignored):
    words = randint(20, 8, 40)
    labels = words.clone()
    for row, number in enumerate(num_ignored):
        labels[row, :number] = -100
    return words, labels


BATCHES = [sentences(num_ignored) for num_ignored in NUM_IGNORED]


def losses_and_errors(net, batches, layout=("cpu:0", "cpu:1"), call=None):
    """The relative difference of losses and of gradients to plain torch, by call."""
    plain = copy.deepcopy(net)
    with ScatterOnceParallel(net, device_ids=list(layout)) as engine:
        for batch in batches:
            net.zero_grad()
            plain.zero_grad()
            loss = (call or ScatterOnceParallel.__call__)(engine, *batch)
            loss.backward()
            expected = plain(*batch)
            expected.backward()
            pairs = [(loss.detach(), expected.detach())]
            for parameter, other in zip(
                net.parameters(), plain.parameters(), strict=True
            ):
                pairs.append((parameter.grad, other.grad))
            yield max(float((a - b).norm() / b.norm()) for a, b in pairs)


@pytest.mark.parametrize("layout", few_of(LAYOUTS, LAYOUTS[1:]))
@pytest.mark.parametrize("dtype", few_of(LIMITS, [torch.float64, torch.bfloat16]))
@pytest.mark.parametrize("loss", few_of(RULES, [by_labels, by_completions]))
def test_rule_that_holds_is_found_later(loss, dtype, layout):
    """The first rule that fitted within rounding was kept: a later call was refused."""
    net = build(lambda: Sentences(loss)).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for error in losses_and_errors(net, BATCHES, layout):
            assert error < LIMITS[dtype]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("scale", few_of([1.0, 1e-3, 0.0], [0.0]))
@pytest.mark.parametrize("loss", few_of(RULES, [by_labels]))
def test_reentrant_checkpoint_inside_keeps_rules_apart(loss, scale, dtype):
    """Losses alone were compared, which are all the same in a new model: a mean over
    labels was taken for one over rows.
    """
    net = build(lambda: Sentences(loss, scale, reentrant=True)).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for error in losses_and_errors(net, BATCHES[2:]):
            assert error < LIMITS[dtype]


def of_lengths(lengths, seed):
    """Sentences of these lengths, padded at the right."""
    words = randint(20, len(lengths), max(lengths), seed=seed)
    labels = words.clone()
    for row, length in enumerate(lengths):
        labels[row, length:] = -100
    return words, labels


@pytest.mark.parametrize("loss", few_of(RULES, [by_labels, by_shifted_labels]))
@pytest.mark.parametrize("seed", few_of(range(40), [2]))
def test_first_call_of_few_sentences_is_exact(seed, loss):
    """The look had divided four rows so that both parts had the same number of labels,
    shifted or not: the first step of TRL's SFT was off, with a warning.
    """
    lengths = (3 + randint(11, 4, seed=seed)).tolist()
    net = build(lambda: Sentences(loss))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for error in losses_and_errors(net, [of_lengths(lengths, seed)]):
            assert error < 1e-10


@pytest.mark.parametrize("loss", [by_labels, by_shifted_labels])
@pytest.mark.parametrize("seed", few_of([36, 38, 47], [36]))
def test_rule_is_not_assumed_after_one_look(seed, loss):
    """Of a language model a look affords two of four sentences. These two had the same
    number of labels, so that a mean over rows fitted as well.
    """
    lengths = (3 + randint(11, 4, seed=seed)).tolist()
    net = build(lambda: Sentences(loss, vocabulary=20_000))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for error in losses_and_errors(net, [of_lengths(lengths, seed)]):
            assert error < 1e-10


def _checkpointed(use_reentrant):
    def call(engine, words, labels):
        scale = torch.ones((), dtype=torch.float64, requires_grad=True)
        # A reentrant checkpoint needs an input that requires grad.
        return checkpoint(
            lambda factor: engine(words, labels) * factor,
            scale,
            use_reentrant=use_reentrant,
        )

    return call


def _on_the_host(engine, words, labels):
    with torch.autograd.graph.save_on_cpu():
        return engine(words, labels)


@pytest.mark.parametrize(
    "call", [_checkpointed(True), _checkpointed(False), _on_the_host]
)
@pytest.mark.parametrize("loss", few_of(RULES, [by_shifted_labels]))
def test_saved_tensor_hooks_around_keep_rules_apart(loss, call):
    """No call was looked at there: every loss was taken for a mean over rows."""
    net = build(lambda: Sentences(loss))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for error in losses_and_errors(net, BATCHES[2:], call=call):
            assert error < 1e-10


def test_rules_are_those_of_a_kind_of_call():
    """Another call has its labels in another place."""

    class Masked(Sentences):
        def forward(self, words, *others):
            *_, labels = others
            return super().forward(words, labels)

    net = build(lambda: Masked(by_labels))
    first, second = BATCHES[2:]
    ones = torch.ones(8, 40, dtype=torch.long)
    batches = [first, (second[0], ones, second[1]), second]
    for error in losses_and_errors(net, batches):
        assert error < 1e-10


# --- labels beside other values ---


class Placed(Sentences):
    """Adds what it gets beside words and labels to the words' vectors.

    Its labels are at a position, or have a name.
    """

    def __init__(self, loss, position):
        super().__init__(loss)
        self.position = position

    def forward(self, *values, **named):
        named = dict(enumerate(values)) | named
        labels = named.pop("labels" if self.position is None else self.position)
        hidden = 0
        for value in named.values():
            if isinstance(value, dict):
                value = value["places"]
            if isinstance(value, list):
                value = torch.stack([entry[:40] for entry in value])
            hidden = hidden + self.words(value)
        return self.loss(self.head(self.layer(hidden).tanh()), labels)


PLACES = torch.arange(40) % 20
OTHER = randint(20, 8, 40)
# Longer than the labels: one of another length fails where one is taken for labels.
OF_ROWS = [
    torch.cat([row, row[:number]]) for number, row in enumerate(randint(20, 8, 40))
]
# Words and labels are those of a batch.
ARGUMENTS = {
    "Replicated before": (["words", Replicated(PLACES), "labels"], {}),
    "Replicated of several before": (
        ["words", Replicated({"places": PLACES, "more": (OTHER, OTHER)}), "labels"],
        {},
    ),
    "Rows before": (["words", Rows(OF_ROWS), "labels"], {}),
    "Rows with collate before": (
        [
            "words",
            Rows(OF_ROWS, lambda few: torch.stack([row[:40] for row in few])),
            "labels",
        ],
        {},
    ),
    "an integer after": (["words", "labels", OTHER], {}),
    "Replicated before, an integer after": (
        ["words", Replicated(PLACES), "labels", OTHER],
        {},
    ),
    "Rows before, an integer after": (["words", Rows(OF_ROWS), "labels", OTHER], {}),
    "both before, an integer between": (
        ["words", Rows(OF_ROWS), OTHER, Replicated(PLACES), "labels", OTHER],
        {},
    ),
    "keywords": (["words"], {"labels": "labels", "more": OTHER}),
    "keywords, Replicated before": (
        ["words"],
        {"more": Replicated(PLACES), "labels": "labels", "last": OTHER},
    ),
    "keywords, Rows before": (["words", Rows(OF_ROWS), OTHER], {"labels": "labels"}),
    "keywords alone": (
        [],
        {"words": "words", "more": Replicated(PLACES), "labels": "labels"},
    ),
    "in a mapping": (
        ["words", {"places": Replicated(PLACES), "ids": OTHER}],
        {"last": Rows(OF_ROWS), "labels": "labels"},
    ),
}


def _filled(value, batch):
    """``value`` with the batch's words and labels in the place of their names."""
    return batch[value] if isinstance(value, str) else value


def _without_marker(value):
    if isinstance(value, dict):
        return {name: _without_marker(entry) for name, entry in value.items()}
    return value.unwrap(copy=False) if isinstance(value, (Rows, Replicated)) else value


@pytest.mark.parametrize("layout", [("cpu", "cpu"), ("cpu:0", "cpu:1")])
@pytest.mark.parametrize(
    "loss", few_of([by_labels, by_shifted_labels, by_rows, summed], [by_labels])
)
@pytest.mark.parametrize("case", ARGUMENTS)
def test_markers_move_no_labels(case, loss, layout):
    """Tensors in markers were counted, so that labels were looked for in others."""
    args, kwargs = ARGUMENTS[case]
    position = args.index("labels") if "labels" in args else None
    net = build(lambda: Placed(loss, position))
    plain = copy.deepcopy(net)
    with (
        warnings.catch_warnings(),
        ScatterOnceParallel(net, device_ids=list(layout)) as engine,
    ):
        warnings.simplefilter("error")
        for words, labels in BATCHES[2:]:
            batch = {"words": words, "labels": labels}
            filled = [_filled(value, batch) for value in args]
            named = {name: _filled(value, batch) for name, value in kwargs.items()}
            found = engine(*filled, **named)
            found.backward()
            expected = plain(*map(_without_marker, filled), **_without_marker(named))
            expected.backward()
            assert_close(found.detach(), expected.detach(), "loss")
            for parameter, other in zip(
                net.parameters(), plain.parameters(), strict=True
            ):
                assert_close(parameter.grad, other.grad, case)


@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("dim", [-3, -2, -1, 0, 1, 2])
def test_rows_along_any_dimension_are_compared(dim, is_mixed, recwarn):
    """With ``dim=-3`` the first call of a right module was an ``IndexError``."""

    def forward(self, rows):
        rows = self.layer(rows)
        return rows - rows.mean(dim, keepdim=True) if is_mixed else rows

    net = build(lambda: Own(forward, layer=nn.PReLU()))
    rows = randn(4, 4, 4)
    with ScatterOnceParallel(net, device_ids=["cpu"] * 2, dim=dim) as engine:
        output = engine(rows)
    assert bool(recwarn) == is_mixed
    if not is_mixed:
        torch.testing.assert_close(output, net(rows))


FROZEN = {
    "rows": lambda self, rows: self.net(rows),
    "mean": lambda self, rows: self.net(rows).mean(),
    "sum": lambda self, rows: self.net(rows).sum(),
}


@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("name", FROZEN)
def test_right_frozen_module_is_silent(name, trains, needs_grad):
    """A teacher. From the eighth call on a warning said that a single part has a
    gradient, where none has.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with engine_of(FROZEN[name]) as engine:
            net = engine.module.train(trains).requires_grad_(False)
            for _ in range(9):
                rows = ROWS.clone().requires_grad_(needs_grad)
                torch.testing.assert_close(engine(rows), net(rows))


@pytest.mark.parametrize("needs_grad", [True, False])
def test_rows_of_a_frozen_module_that_meet_are_told(needs_grad):
    def forward(self, rows):
        return self.net(rows).softmax(0)

    with engine_of(forward) as engine:
        engine.module.requires_grad_(False)
        rows = ROWS.clone().requires_grad_(needs_grad)
        with pytest.warns(UserWarning, match="other outputs for a few rows"):
            engine(rows)


# Whether a loss of numbers such as these is said to be unclear.
UNCLEAR_OF_FROZEN = {
    "nothing": (lambda output: 0 * output.mean(), "assumes a mean over rows"),
    "NaN": (lambda output: math.nan * output.mean(), "assumes a mean over rows"),
    "infinity": (lambda output: math.inf + output.mean(), "assumes a mean over rows"),
    "a product": (lambda output: output.mean() ** 2, None),
}


@pytest.mark.parametrize("name", UNCLEAR_OF_FROZEN)
def test_frozen_loss_that_shows_nothing_is_told(name, recwarn):
    number, words = UNCLEAR_OF_FROZEN[name]
    with engine_of(lambda self, rows: number(self.net(rows))) as engine:
        engine.module.requires_grad_(False)
        rows = ROWS.clone().requires_grad_()
        if words is None:
            with pytest.raises(ValueError, match="is not the sum of the losses"):
                engine(rows)
            return
        for _ in range(12):
            engine(rows)
    assert any(words in str(warning.message) for warning in recwarn)
