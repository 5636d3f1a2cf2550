"""Batches that are not tensors with rows: what is replicated, entries of lists, several batches."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from harness.models import CLASSES, FEATURES, Of, mlp
from harness.oracle import (
    assert_close,
    assert_gradients,
    assert_step,
    build,
    randint,
    randn,
    whole_batch,
)
from pair.common import Pair
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from scatterpar import Replicated, Rows, ScatterOnceParallel
from scatterpar.batch.markers import Marker

ROWS = randn(7, FEATURES)
LABELS = randint(CLASSES, 7)
LOSS = nn.CrossEntropyLoss()
LENGTHS = [3, 5, 1, 4, 2, 5, 3]
SENTENCES = [randint(9, n, seed=n + i) for i, n in enumerate(LENGTHS)]
PLANS = [(1, 1), (1, 3), (2, 1), (2, 2), (3, 2)]


class Reader(nn.Module):
    """The mean of a sentence's words, padding left out: padding changes nothing, if it is right."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(10, FEATURES, padding_idx=9)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, ids):
        known = (ids != 9).unsqueeze(-1)
        return self.head((self.words(ids) * known).sum(1) / known.sum(1))


def by_table(model, rows, table, options=None):
    """Rows times a square table: the table's size is, in one of the tests, that of the batch."""
    if options is not None:
        rows = rows + options["shift"]
    return model.linear(rows @ table)


def pad(sentences):
    return pad_sequence(sentences, batch_first=True, padding_value=9)


class Jagged(Marker):
    """A third marker: words of all sentences in one tensor, and the number of words of each."""

    def __init__(self, sentences):
        self.contents = {"words": torch.cat(sentences), "sizes": [*map(len, sentences)]}

    @property
    def num_rows(self):
        return len(self.contents["sizes"])

    def split(self):
        return self.contents["words"].split(self.contents["sizes"])

    def select(self, rows):
        return Jagged([self.split()[row] for row in rows])

    def join(self, others):
        return Jagged([sentence for one in (self, *others) for sentence in one.split()])

    def unwrap(self, *, copy):
        return pad(self.split())  # new memory


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("options", [{}, {"whole_batch": True}, {"costs": LENGTHS}])
def test_another_marker_is_one_class(devices, replicas, options):
    """A new subclass of ``Marker`` works without other changes."""
    model, plain = build(Reader), (pad(SENTENCES), LABELS)
    cut = {"micro_batch_cost": 12.0} if "costs" in options else {"accum": 2}
    with ScatterOnceParallel(model, device_ids=devices(replicas), **cut) as engine:
        assert_step(engine, Jagged(SENTENCES), LABELS, LOSS, plain=plain, **options)
        if not options:
            window = Rows.from_batches([Jagged(SENTENCES[:4]), Jagged(SENTENCES[4:])])
            assert_step(engine, window, LABELS, LOSS, plain=plain)


@pytest.mark.parametrize(("replicas", "accum"), PLANS)
def test_replicated_is_never_split_though_its_size_is_that_of_the_rows(devices, replicas, accum):
    model = build(lambda: Of(by_table, linear=nn.Linear(7, CLASSES)))
    rows, table, shift = randn(7, 7), randn(7, 7, seed=3), randn(1, 7, seed=4)
    plain = rows, table, {"shift": shift}
    with ScatterOnceParallel(model, accum, devices(replicas)) as engine:
        inputs = (rows, Replicated(table), Replicated({"shift": shift}))
        assert_step(engine, inputs, LABELS, LOSS, plain=(plain, LABELS))
        assert_close(engine.eval()(*inputs), model(*plain).detach(), "inference")


def test_each_sub_step_has_what_is_replicated_to_itself(devices):
    """A model that writes into it disturbs neither the caller nor the next sub-step."""

    class Writes(nn.Linear):
        def forward(self, rows, scale):
            return super().forward(rows * scale.mul_(2))

    scale = torch.ones(FEATURES).double()
    with ScatterOnceParallel(build(lambda: Writes(FEATURES, CLASSES)), 3, devices(2)) as engine:
        plain = (ROWS, scale.clone()), LABELS
        assert_step(engine, (ROWS, Replicated(scale)), LABELS, LOSS, plain=plain)
    assert torch.equal(scale, torch.ones_like(scale))


@pytest.mark.parametrize(("replicas", "accum"), PLANS)
def test_rows_of_different_lengths_padded_per_micro_batch(devices, replicas, accum):
    model, seen = build(Reader), []

    def collate(sentences):
        seen.append(len(sentences))
        return pad(sentences)

    with ScatterOnceParallel(model, accum, devices(replicas)) as engine:
        plain = pad(SENTENCES), LABELS
        assert_step(engine, Rows(SENTENCES, collate), LABELS, LOSS, plain=plain)
        cuts = [cut for share in engine.last_step.plan.shares for cut in share.micro_batches]
        assert sorted(seen) == sorted(stop - start for start, stop in cuts)
        output = engine.eval()(Rows(SENTENCES, pad))
        assert_close(output, model(plain[0]).detach(), "inference")


def test_entries_may_be_anything_and_the_caller_s_stay_as_they_are(devices):
    """Strings, and dicts with tensors of any shape, in a dict; the criterion counts boxes."""
    entries = [{"boxes": randn(n, FEATURES, seed=n), "name": f"image {n}"} for n in (2, 0, 3, 1)]
    before = copy.deepcopy(entries)

    class Detector(nn.Linear):
        def forward(self, images, targets):
            assert all(isinstance(target["name"], str) for target in targets)
            for target in targets:
                target["seen"] = target["boxes"].add_(1)
            found = zip(super().forward(images), targets, strict=True)
            return sum((image - target["seen"]).square().sum() for image, target in found)

    images = {"images": ROWS[:4]}
    plain = images | {"targets": copy.deepcopy(entries)}, None
    model = build(lambda: Detector(FEATURES, FEATURES))
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        assert_step(engine, images | {"targets": Rows(entries)}, plain=plain, reduction="sum")
    for entry, old in zip(entries, before, strict=True):
        assert entry.keys() == old.keys()
        assert torch.equal(entry["boxes"], old["boxes"])


def test_count_sees_what_the_module_sees(devices):
    """With ``count`` by tokens; and the targets' own ``Rows`` padded with what is ignored."""
    labels = [randint(CLASSES, n, seed=n) for n in LENGTHS]

    class Tagger(Reader):
        def forward(self, ids):
            return self.head(self.words(ids)).movedim(-1, 1)

    def ignored(few):
        return pad_sequence(few, batch_first=True, padding_value=-100)

    batch, plain = (Rows(SENTENCES, pad), Rows(labels, ignored)), (pad(SENTENCES), ignored(labels))
    for count in (None, lambda inputs, targets: (targets != -100).sum()):
        with ScatterOnceParallel(build(Tagger), 2, devices(2)) as engine:
            assert_step(engine, *batch, LOSS, plain=plain, count=count)


def window(sizes=(4, 3, 1), lengths=(5, 2, 3)):
    """Batches of other lengths each, the labels of each, and all of it as plain torch has it."""
    batches = [randint(9, n, length, seed=n) for n, length in zip(sizes, lengths, strict=True)]
    labels = [randint(CLASSES, n, seed=n) for n in sizes]
    return batches, labels, (pad([row for batch in batches for row in batch]), torch.cat(labels))


@pytest.mark.parametrize(("replicas", "accum"), PLANS)
@pytest.mark.parametrize("joined", [False, True])
def test_a_window_of_batches_is_one_step(devices, replicas, accum, joined):
    """Each batch is divided over the replicas; targets come likewise, or all in one tensor."""
    batches, labels, plain = window()
    targets = plain[1] if joined else Rows.from_batches(labels)
    with ScatterOnceParallel(build(Reader), accum, devices(replicas)) as engine:
        for options in ({}, {"count": lambda inputs, targets: len(targets)}):
            assert_step(engine, Rows.from_batches(batches), targets, LOSS, plain=plain, **options)
        plan = engine.last_step.plan
    assert plan == engine.plan((4, 3, 1))


def test_the_plan_of_a_window_says_where_its_rows_are():
    engine = ScatterOnceParallel(build(mlp), 2, ["cpu"] * 2)
    plan = engine.plan([5, 3])
    first, second = plan.shares
    assert first.micro_batches == ((0, 2), (2, 3), (5, 6), (6, 7))
    assert first.spans == ((0, 3), (5, 7))
    assert (first.start, first.stop, first.rows) == (0, 7, 5)
    assert second.spans == ((3, 5), (7, 8))
    assert "0:3, 5:7" in str(plan)


def test_a_window_of_mappings_with_markers_inside(devices):
    """Batches are what the module takes: keyword arguments, with a mask and lists of their own."""

    class Masked(Reader):
        def forward(self, ids, mask, labels, names):
            assert len(names) == len(ids)
            return LOSS(super().forward(ids) @ mask, labels)

    batches, labels, (ids, all_labels) = window()
    mask = randn(CLASSES, CLASSES)
    plain = {"ids": ids, "mask": mask, "labels": all_labels, "names": ["a"] * 8}, None
    marked = [
        {"ids": ids, "mask": Replicated(mask), "labels": own, "names": Rows(["a"] * len(own))}
        for ids, own in zip(batches, labels, strict=True)
    ]
    with ScatterOnceParallel(build(Masked), 2, devices(2)) as engine:
        assert_step(engine, Rows.from_batches(marked), plain=plain)


def test_a_window_with_accum_auto(devices):
    class Small(Reader):
        def forward(self, ids):
            if len(ids) > 1:
                raise torch.OutOfMemoryError("simulated")
            return super().forward(ids)

    model = build(Small)
    batches, labels, plain = window()
    _, expected = whole_batch(build(Reader), *plain, LOSS)
    with ScatterOnceParallel(model, "auto", devices(2)) as engine:
        with pytest.warns(UserWarning, match='accum="auto": 8 rows'):
            engine.forward_backward(Rows.from_batches(batches), Rows.from_batches(labels), LOSS)
        assert engine.plan([4]).shares[0].micro_batches == ((0, 1), (1, 2))
    assert_gradients(model, expected)


def test_cross_entropy_counts_the_terms_of_each_batch(devices):
    """Ignored labels, weights of classes, and probabilities: in a window as in one batch."""
    batches = list(ROWS.split([4, 3]))
    labels = LABELS.clone()
    labels[:3] = -100
    weight = torch.arange(1, CLASSES + 1).double()
    for criterion, targets in (
        (nn.CrossEntropyLoss(weight=weight), labels),
        (nn.CrossEntropyLoss(), randn(7, CLASSES).softmax(1)),
    ):
        with ScatterOnceParallel(build(mlp), 2, devices(2)) as engine:
            for its in (targets, Rows.from_batches(targets.split([4, 3]))):
                inputs = Rows.from_batches(batches)
                assert_step(engine, inputs, its, criterion, plain=(ROWS, targets))


@pytest.mark.parametrize("ignored", [False, True])
def test_cross_entropy_counts_the_labels_of_concatenated_rows(devices, ignored):
    """Rows that ``collate`` concatenates have several labels each; their rows were counted."""
    words, labels = ([torch.arange(n) % CLASSES for n in (3, 9, 2, 7, 5, 1, 8)] for _ in "ab")
    if ignored:
        labels[1][2:] = -100
    plain = torch.cat(words), torch.cat(labels)
    model = build(lambda: nn.Sequential(nn.Embedding(CLASSES, FEATURES), mlp()))
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        assert_step(engine, Rows(words, torch.cat), Rows(labels, torch.cat), LOSS, plain=plain)
    pair = Pair(model, LOSS, devices(2))
    with pytest.raises(ValueError, match="rows"):
        pair.check(Rows(words, torch.cat), Rows(labels, torch.cat), plain=plain)


def test_the_pair_takes_them_too(devices):
    pair = Pair(build(Reader), LOSS, devices(2))
    labels = Rows(list(LABELS), torch.stack)
    pair.check(Rows(SENTENCES, pad), labels, plain=(pad(SENTENCES), LABELS))
    with pytest.raises(ValueError, match="with the pair, make one call per batch"):
        pair.model(Rows.from_batches([SENTENCES[1][None], SENTENCES[5][None]]))


def test_outputs_without_rows_are_not_joined(devices):
    """They were, in the order of the pieces: which is that of no row."""
    # A word model that flattens time and rows into one dimension.
    rows, make = randn(4, 6, FEATURES), partial(nn.RNN, FEATURES, CLASSES)
    model = build(lambda: Of(lambda m, rows: m.rnn(rows)[0].flatten(0, 1), rnn=make()))
    targets = randint(CLASSES, 4, 6)

    def criterion(output, targets):
        return nn.functional.cross_entropy(output, targets.flatten())

    with ScatterOnceParallel(model, 2, devices(2), dim=1) as engine:
        words = r"outputs of shapes \(8, 4\).* of 2 .*rows, cannot be joined along dim=1.*"
        with pytest.raises(ValueError, match=words + "return_outputs=function"):
            engine.forward_backward(rows, targets, criterion, return_outputs=True)
        assert all(p.grad is None for p in model.parameters())
        _, kept = engine.forward_backward(
            rows, targets, criterion, return_outputs=lambda o: o.unflatten(0, (4, -1)).argmax(-1)
        )
        with torch.no_grad():
            expected = copy.deepcopy(model)(rows).unflatten(0, (4, -1)).argmax(-1)
        assert torch.equal(torch.cat(kept, 1), expected)
        refused = pytest.raises(ValueError, match=r"joined along dim=1.*engine\.map")
        with refused, torch.no_grad():
            engine(rows)


def test_return_outputs_keeps_what_a_function_makes_of_them(devices):
    model, graphs = build(mlp), []

    def keep(output):
        graphs.append((output.requires_grad, torch.is_grad_enabled()))
        return {"right": output.argmax(1), "largest": output.max()}

    _, expected = whole_batch(model, ROWS, LABELS, LOSS)
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        _, kept = engine.forward_backward(ROWS, LABELS, LOSS, return_outputs=keep)
    assert_gradients(model, expected)
    assert torch.equal(torch.cat([k["right"] for k in kept]), model(ROWS).argmax(1))
    assert kept[0]["largest"].shape == ()
    assert graphs == [(False, False)] * 4


def test_markers_print_and_pickle():
    assert repr(Replicated(ROWS)) == "Replicated(Tensor of shape (7, 5))"
    assert repr(Replicated({"a": 1})) == "Replicated(dict)"
    assert repr(Rows(SENTENCES, pad)) == "Rows(7 x Tensor, collate=pad)"
    assert repr(Rows.from_batches([ROWS, ROWS])) == "Rows.from_batches(2 batches)"
    for marker in (Replicated(ROWS), Rows(SENTENCES, pad), Rows.from_batches([ROWS])):
        assert repr(pickle.loads(pickle.dumps(marker))) == repr(marker)
