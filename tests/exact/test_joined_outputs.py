"""One rule joins outputs in all calls: one entry per row, or the same values everywhere.

Anything else is refused before anything changes, and what the error says to return is
exact.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from faults.state import nothing_changes
from harness.models import CLASSES, FEATURES, Of, linear
from harness.oracle import (
    assert_close,
    assert_gradients,
    build,
    randint,
    randn,
    whole_batch,
)
from harness.pairwise import pairwise
from torch import nn

from scatterpar import (
    DataParallelCriterion,
    DataParallelModel,
    Rows,
    ScatterOnceParallel,
)

ROWS, LABELS = randn(10, FEATURES), randint(CLASSES, 10)


def view_by_view(m, rows):
    return torch.cat([m.linear(rows), m.linear(-rows)])


def row_by_row(m, rows):
    return torch.stack([m.linear(rows), m.linear(-rows)], 1).flatten(0, 1)


def stacked(m, rows):
    return torch.stack([m.linear(rows), m.linear(-rows)], 1)


def reshaped(m, rows):
    return row_by_row(m, rows).reshape(len(rows), 2, -1)


# Two entries per row, beside what the error says to return.
REMEDIES = [(view_by_view, stacked), (row_by_row, reshaped)]


def views_apart(output, labels):
    """A loss of rows, of outputs in any of the forms."""
    first, second = output.reshape(len(labels), 2, -1).unbind(1)
    return nn.functional.cross_entropy(first, labels) + second.square().mean()


def rows_apart(output, labels):
    """A loss that compares rows."""
    first, second = output.unbind(1)
    scores = first @ second.T
    return nn.functional.cross_entropy(scores, torch.arange(len(labels)))


def returned(engine):
    loss, outputs = engine.forward_backward(
        ROWS, LABELS, views_apart, return_outputs=True
    )
    return loss, torch.cat(outputs)


def compared(engine):
    return engine.forward_backward(ROWS, LABELS, rows_apart, whole_batch=True), None


def inferred(engine):
    with torch.no_grad():
        return None, engine(ROWS)


def mapped(engine):
    return None, engine.map(lambda replica, rows: replica(rows), ROWS)


CALLS = [returned, compared, inferred, mapped]
LOSSES = {returned: views_apart, compared: rows_apart}


@pairwise(call=CALLS, accum=[1, 3], verify=[True, False])
@pytest.mark.parametrize(("wrong", "right"), REMEDIES)
def test_two_entries_per_row_refused(devices, wrong, right, call, accum, verify):
    model = Of(wrong, linear=linear())
    words = (
        r"\(\d+, 4\) for \d rows.*\.reshape\(rows, 2, …\).*torch\.stack\(\[a, b\], 1"
    )
    with (
        ScatterOnceParallel(model, accum, devices(2), verify=verify) as engine,
        nothing_changes(model),
        pytest.raises(ValueError, match=words),
    ):
        call(engine)
    model = Of(right, linear=linear())
    with ScatterOnceParallel(model, accum, devices(2), verify=verify) as engine:
        loss, outputs = call(engine)
    if outputs is not None:
        assert_close(outputs, model(ROWS).detach(), "outputs")
    if loss is not None:
        expected, its = whole_batch(model, ROWS, LABELS, LOSSES[call])
        assert_close(loss, expected, "loss")
        assert_gradients(model, its)


@pytest.mark.parametrize(("wrong", "right"), REMEDIES)
def test_pair_refuses_two_entries_per_row(devices, wrong, right):
    model = Of(wrong, linear=linear())
    criterion = DataParallelCriterion(views_apart)
    outputs = DataParallelModel(model, devices(2))(ROWS)
    words = r"\(10, 4\) has 10 entries along dim=0.* 5 rows.*\.reshape\(rows, k, …\)"
    with nothing_changes(model), pytest.raises(ValueError, match=words):
        criterion(outputs, LABELS)
    model = Of(right, linear=linear())
    loss = criterion(DataParallelModel(model, devices(2))(ROWS), LABELS)
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    expected, its = whole_batch(model, ROWS, LABELS, views_apart)
    assert_close(loss.detach(), expected, "loss")
    for name, gradient in found.items():
        assert_close(gradient, its[name], name)


@pytest.mark.parametrize("call", [returned, inferred, mapped])
def test_one_micro_batch_returns_any_size(call):
    """There is nothing to join."""
    model = Of(view_by_view, linear=linear())
    with ScatterOnceParallel(model, 1, ["cpu"]) as engine:
        _, outputs = call(engine)
    assert_close(outputs, model(ROWS).detach(), "outputs")


def test_loss_of_rows_takes_any_size(devices):
    """Without a join the criterion gets what the module returns."""
    model = Of(row_by_row, linear=linear())
    expected, its = whole_batch(model, ROWS, LABELS, views_apart)
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        loss = engine.forward_backward(ROWS, LABELS, views_apart)
    assert_close(loss, expected, "loss")
    assert_gradients(model, its)


@pytest.mark.parametrize("call", [inferred, mapped])
def test_entries_alike_are_no_table(devices, call):
    """Masks that are all background at first have the same bits in all micro-batches."""
    model = Of(lambda m, rows: m.linear(rows).flatten(), linear=linear())
    nn.init.zeros_(model.linear.weight)
    nn.init.zeros_(model.linear.bias)
    refused = pytest.raises(ValueError, match=r"\.reshape\(rows, 4, …\)")
    with ScatterOnceParallel(model, 1, devices(2)) as engine, refused:
        call(engine)


# --- what has no rows ---


class WithTable(nn.Module):
    """The rows' outputs, and a table."""

    def __init__(self, size):
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.table = nn.Parameter(torch.randn(size, CLASSES))

    def forward(self, rows):
        return self.linear(rows), self.table * 1.0


def beside_table(outputs, labels):
    scores, table = outputs
    distances = torch.cdist(scores, table)
    return distances.std() + table.std() + nn.functional.cross_entropy(scores, labels)


@pytest.mark.draws
@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("size", [3, 4, 6, 8, 16])
def test_table_is_returned_once(devices, size, accum):
    """Micro-batches have four or two rows; as many entries would be taken for rows."""
    rows, labels = ROWS[:8], LABELS[:8]
    model = build(lambda: WithTable(size))
    expected, its = whole_batch(model, rows, labels, beside_table)
    with ScatterOnceParallel(model, accum, devices(2)) as engine:
        if size * accum == 4:
            words = rf"\({size}, 4\) is not the batch .*size of a micro-batch"
            with nothing_changes(model), pytest.raises(ValueError, match=words):
                engine.forward_backward(rows, labels, beside_table, whole_batch=True)
            return
        for _ in range(4):
            model.zero_grad()
            loss = engine.forward_backward(rows, labels, beside_table, whole_batch=True)
            assert_close(loss, expected, "loss")
            assert_gradients(model, its)
        _, outputs = engine.forward_backward(
            rows, labels, lambda o, t: o[0].square().mean(), return_outputs=True
        )
        assert [len(table) for _, table in outputs] == [size, size]
        with torch.no_grad():
            _, table = engine.eval()(rows)
    assert torch.equal(table, model.table)


class Towers(nn.Module):
    """Two embeddings of each row, a learned temperature, and maybe all scores."""

    def __init__(self, *, scores):
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 3), nn.Linear(FEATURES, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.scores = scores

    def forward(self, rows):
        first, second = self.first(rows), self.second(rows.flip(1))
        outputs = first, second, self.scale.exp()
        return (*outputs, first @ second.T) if self.scores else outputs


def of_scores(outputs, _):
    *_, scale, scores = outputs
    return nn.functional.cross_entropy(scale * scores, torch.arange(len(scores)))


def of_features(outputs, _):
    first, second, scale, *_ = outputs
    return of_scores((scale, first @ second.T), None)


@pytest.mark.parametrize("rows", [8, 9])
def test_scores_of_pairs_refused_features_exact(devices, rows):
    """Micro-batches of one size would be joined; the criterion fails, or not."""
    data = ROWS[:rows]
    model = build(lambda: Towers(scores=True))
    words = rf"\(({rows}, {rows}|\d, \d)\) has an entry for each pair of rows"
    for loss in (of_scores, lambda outputs, _: outputs[3].square().mean()):
        with (
            ScatterOnceParallel(model, 2, devices(2)) as engine,
            nothing_changes(model),
            pytest.raises(ValueError, match=words),
        ):
            engine.forward_backward(data, None, loss, whole_batch=True)
    without = build(lambda: Towers(scores=False))
    expected, gradients = whole_batch(without, data, None, of_features)
    with ScatterOnceParallel(without, 2, devices(2)) as engine:
        # The temperature is no number of the micro-batch.
        refused = "compares rows with each other, or is a ratio of sums, pass whole_b"
        with pytest.raises(ValueError, match=refused):
            engine.forward_backward(data, None, of_features)
        loss = engine.forward_backward(data, None, of_features, whole_batch=True)
    assert_close(loss, expected, "loss")
    assert_gradients(without, gradients)


def test_scores_of_pairs_that_nobody_reads_are_right(devices):
    """As a library's CLIP returns them beside the features; with equal micro-batches."""
    model = build(lambda: Towers(scores=True))
    expected, gradients = whole_batch(model, ROWS[:8], None, of_features)
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        loss = engine.forward_backward(ROWS[:8], None, of_features, whole_batch=True)
        assert_close(loss, expected, "loss")
        assert_gradients(model, gradients)
        engine.eval()
        with pytest.raises(ValueError, match="a matrix of all pairs of rows, return"):
            engine(ROWS[:9])


@pytest.mark.parametrize("accum", [1, 2])
def test_value_of_micro_batch_refused(devices, accum):
    """A histogram or a covariance has no rows, and is another in each micro-batch."""
    model = Of(lambda m, rows: (m.linear(rows), (rows.T @ rows)[:4]), linear=linear())
    with ScatterOnceParallel(model, accum, devices(2)) as engine:
        for call in (returned_mean, inferred):
            with pytest.raises(ValueError, match=r"cannot be joined along dim=0"):
                call(engine)


def returned_mean(engine):
    return engine.forward_backward(
        ROWS, None, lambda o, _: o[0].square().mean(), return_outputs=True
    )


# --- a row with a varying number of entries, as a graph with its nodes ---

GRAPHS = [randn(nodes, FEATURES, seed=nodes) for nodes in (3, 5, 2, 7, 1, 4, 6)]


def of_nodes(m, graphs):
    return m.linear(torch.cat(graphs))


def of_graphs(m, graphs):
    """What the error says to return."""
    output = m.linear(torch.cat(graphs))
    return list(output.split([len(graph) for graph in graphs]))


def with_numbers(m, graphs):
    """A 0-dim tensor per graph, which is no mean over rows."""
    nodes = of_graphs(m, graphs)
    return {"nodes": nodes, "energies": [values.square().sum() for values in nodes]}


def mean_of_graphs(nodes, _):
    return torch.stack([values.square().mean() for values in nodes]).mean()


def spread_of_graphs(nodes, _):
    return torch.stack([values.square().mean() for values in nodes]).std()


def spread_of_energies(output, _):
    return torch.stack(output["energies"]).std() + spread_of_graphs(output["nodes"], _)


@pytest.mark.parametrize("accum", [1, 2])
def test_remedy_for_nodes_of_graphs_works(devices, accum):
    """The error named ``engine.map(…, pad=)``, which raised the same error."""
    calls = [
        lambda engine, model: engine(Rows(GRAPHS)),
        lambda engine, model: engine.map(model.forward, Rows(GRAPHS), pad=0.0),
    ]
    refused = Of(of_nodes, linear=linear()).eval()
    with ScatterOnceParallel(refused, accum, devices(2)) as engine:
        for call in calls:
            words = (
                r"\(\d+, 4\) for . rows.*list\(output\.split\(sizes\)\).*engine\.map"
            )
            with torch.no_grad(), pytest.raises(ValueError, match=words) as error:
                call(engine, refused)
            assert "pad=" not in str(error.value)
        of_function = engine.map(of_graphs, Rows(GRAPHS))
    model = Of(of_graphs, linear=linear()).eval()
    expected = model(GRAPHS)
    with ScatterOnceParallel(model, accum, devices(2)) as engine:
        for outputs in [of_function, *(call(engine, model) for call in calls)]:
            assert isinstance(outputs, list)
            for actual, values in zip(outputs, expected, strict=True):
                assert_close(actual, values.detach(), "nodes of a graph")


@pytest.mark.parametrize("accum", [1, 2, 3])
@pytest.mark.parametrize(
    ("forward", "criterion", "whole"),
    [
        (of_graphs, mean_of_graphs, False),
        (of_graphs, spread_of_graphs, True),
        (with_numbers, spread_of_energies, True),
    ],
)
def test_lists_of_rows_joined_in_a_step(devices, forward, criterion, whole, accum):
    """Micro-batches have unequal numbers of rows: a list is not joined by place."""
    model = Of(forward, linear=linear())
    expected, its = whole_batch(model, GRAPHS, None, criterion)
    with ScatterOnceParallel(model, accum, devices(2)) as engine:
        loss, outputs = engine.forward_backward(
            Rows(GRAPHS), None, criterion, whole_batch=whole, return_outputs=True
        )
    assert_close(loss, expected, "loss")
    assert_gradients(model, its)
    if forward is of_graphs:
        nodes = [values for of_replica in outputs for values in of_replica]
        for actual, values in zip(nodes, of_graphs(model, GRAPHS), strict=True):
            assert_close(actual, values.detach(), "returned nodes")


def stacked_rows(rows):
    return torch.stack(rows) if isinstance(rows, list) else rows


def with_table(m, rows, *_):
    return m.linear(stacked_rows(rows)), m.table * 1.0


def with_constant(m, rows, *_):
    return m.linear(stacked_rows(rows)), m.linear.weight.new_ones(4, CLASSES)


def with_list(m, rows, *_):
    """A list of four tables, none of which has four entries."""
    return m.linear(stacked_rows(rows)), [m.table[:3], m.table[1:], m.wide, m.wide]


def with_numbers_of_layers(m, rows, *_):
    return m.linear(stacked_rows(rows)), [0.1, 0.2, 0.3, 0.4]


def with_list_of_views(m, rows, *_):
    """A list of two tensors with rows, which no number of rows makes one of rows."""
    scores = m.linear(stacked_rows(rows))
    return scores, [scores, 2.0 * scores]


def beside_extra(outputs, _):
    scores, extra = outputs
    values = extra if isinstance(extra, list) else [extra]
    sums = [v.square().sum() if isinstance(v, torch.Tensor) else v for v in values]
    return scores.logsumexp(1).std() + sum(sums)


def module_with(forward):
    tables = {"table": (4, CLASSES), "wide": (5, CLASSES)}
    model = Of(forward, linear=linear())
    for name, shape in tables.items():
        setattr(model, name, nn.Parameter(randn(*shape)))
    return model


MARKED = {
    "inputs": (Rows(list(ROWS[:8])), None),
    "targets": (ROWS[:8], Rows(list(range(8)))),
    "beside tensors": ((ROWS[:8], Rows([{"name": "a"}] * 8)), None),
}


@pytest.mark.parametrize("where", MARKED)
@pytest.mark.parametrize(
    ("forward", "accum", "words"),
    [
        (with_table, 1, r"shape \(4, 4\) is not the batch dimension"),
        (with_constant, 1, r"shape \(4, 4\) is not the batch dimension"),
        (with_table, 2, None),
        (with_list_of_views, 2, None),
        (with_list_of_views, 4, None),
    ],
)
def test_table_beside_marked_rows(devices, forward, accum, words, where):
    """The table was joined in silence, and its gradient counted twice."""
    model = module_with(forward)
    expected, its = whole_batch(model, ROWS[:8], None, beside_extra)
    with ScatterOnceParallel(model, accum, devices(2)) as engine:
        if words is not None:
            with nothing_changes(model), pytest.raises(ValueError, match=words):
                engine.forward_backward(*MARKED[where], beside_extra, whole_batch=True)
            return
        loss = engine.forward_backward(*MARKED[where], beside_extra, whole_batch=True)
    assert_close(loss, expected, "loss")
    assert_gradients(model, its)


@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("forward", [with_list, with_numbers_of_layers])
def test_list_beside_rows(devices, forward, accum):
    """A list with as many values as each micro-batch has rows was joined."""
    model = module_with(forward)
    expected, its = whole_batch(model, ROWS[:8], None, beside_extra)
    rows = Rows(list(ROWS[:8]))
    with ScatterOnceParallel(model, accum, devices(2)) as engine:
        if accum == 1:
            words = "a list of 4 values does not have one value per row"
            with nothing_changes(model), pytest.raises(ValueError, match=words):
                engine.forward_backward(rows, None, beside_extra, whole_batch=True)
            return
        loss = engine.forward_backward(rows, None, beside_extra, whole_batch=True)
    assert_close(loss, expected, "loss")
    assert_gradients(model, its)


def test_table_of_a_last_batch_refused(devices):
    """The third step has a table's number of rows, and no check is due."""
    model = module_with(with_table)
    with ScatterOnceParallel(model, 1, devices(2)) as engine:
        for rows in (10, 10, 8, 10, 10, 8):
            batch = ROWS[:rows], torch.arange(rows) % 2
            model.zero_grad()
            if rows == 8:
                words = "is not the batch dimension"
                with nothing_changes(model), pytest.raises(ValueError, match=words):
                    engine.forward_backward(*batch, beside_extra, whole_batch=True)
                continue
            expected, its = whole_batch(model, *batch, beside_extra)
            loss = engine.forward_backward(*batch, beside_extra, whole_batch=True)
            assert_close(loss, expected, "loss")
            assert_gradients(model, its)


class Tagger(nn.Module):
    """Pads to the longest text of its rows, or to ``total_length``."""

    def __init__(self, total_length=None):
        super().__init__()
        self.total_length = total_length
        self.layer = nn.GRU(FEATURES, 6, batch_first=True)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, inputs, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(inputs, lengths, batch_first=True)
        hidden, _ = nn.utils.rnn.pad_packed_sequence(
            self.layer(packed)[0], batch_first=True, total_length=self.total_length
        )
        return self.head(hidden)


@pytest.mark.parametrize("options", [{"whole_batch": True}, {"return_outputs": True}])
def test_padding_in_forward_named_in_training(devices, options):
    """``engine.map``, which pads, computes no gradients."""
    lengths = torch.tensor([7, 7, 6, 5, 3, 2])
    batch = (randn(6, 7, FEATURES), lengths), randint(CLASSES, 6)

    def criterion(output, targets):
        return nn.functional.cross_entropy(output[:, 0], targets)

    with (
        ScatterOnceParallel(build(Tagger), 2, devices(2)) as engine,
        pytest.raises(ValueError, match=r"total_length=") as caught,
    ):
        engine.forward_backward(*batch, criterion, **options)
    assert "map" not in str(caught.value)
    model = build(lambda: Tagger(total_length=7))
    expected_loss, expected = whole_batch(model, *batch, criterion)
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        result = engine.forward_backward(*batch, criterion, **options)
    loss = result if isinstance(result, torch.Tensor) else result[0]
    assert_close(loss, expected_loss, "loss")
    assert_gradients(model, expected)


def test_padding_named_for_other_sizes_works(devices):
    """Texts of unequal lengths have one entry per row: padding joins these."""
    texts = [randn(words, FEATURES, seed=words) for words in (3, 5, 2, 7)]
    padded = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    model = linear().eval()
    batch = Rows(texts, partial(nn.utils.rnn.pad_sequence, batch_first=True))
    with ScatterOnceParallel(model, 1, devices(2)) as engine:
        words = r"; if .* pad .*engine\.map\(…, pad=value\)$"
        with torch.no_grad(), pytest.raises(ValueError, match=words):
            engine(batch)
        outputs = engine.map(model.forward, batch, pad=0.0)
    expected = model(padded).detach()
    for row, text in enumerate(texts):
        words = len(text)
        assert_close(outputs[row, :words], expected[row, :words], "words")
