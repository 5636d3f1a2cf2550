"""Each 0-dim output of a call has a rule of its own, with a graph and without one."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from calls.modes import MODES, evaluation, graph, inference, training_without_graph
from calls.programs import Own, mlp
from harness.oracle import build, randint, randn
from harness.pairwise import pairwise

from scatterpar import Rows, ScatterOnceParallel

LAYOUTS = [("cpu", "cpu"), ("cpu:0", "cpu:1", "cpu:0")]
# Fewer rows than replicas, as many for each, and uneven ones.
NUM_ROWS = (1, 2, 12, 11, 7)


def batch_of(num_rows):
    rows, labels = randn(num_rows, 6, seed=num_rows), randint(3, num_rows)
    # Of two rows both count: of one, a sum over labels is a mean.
    labels[2 :: max(2, num_rows // 3)] = -100
    return rows, labels


BATCHES = [batch_of(num_rows) for num_rows in NUM_ROWS]


def _is_right(self, rows, labels):
    return self.net(rows).argmax(1) == labels


def _sum_and_accuracy(self, rows, labels):
    loss = F.cross_entropy(self.net(rows), labels, reduction="sum")
    return loss, _is_right(self, rows, labels).double().mean()


def _mean_and_counts(self, rows, labels):
    loss = F.cross_entropy(self.net(rows), labels)
    num_right = _is_right(self, rows, labels).sum()
    counts = {"right": num_right, "labels": (labels != -100).sum()}
    return {"loss": loss, "counts": counts, "rows": torch.tensor(len(rows))}


def _accuracy_of_labels(self, rows, labels):
    is_counted = labels != -100
    total = _is_right(self, rows, labels)[is_counted].sum()
    accuracy = total / is_counted.sum().clamp(min=1)
    return self.net(rows), accuracy, _is_right(self, rows, labels).float().sum()


def _constants(self, rows, labels):
    zero = torch.zeros(())
    return self.net(rows), zero, zero + torch.nan, torch.tensor(True), torch.tensor(3)


RIGHT = {
    "sum": lambda self, rows, labels: self.net(rows).square().sum(),
    "mean": lambda self, rows, labels: self.net(rows).square().mean(),
    "mean over labels": lambda self, rows, labels: F.cross_entropy(
        self.net(rows), labels
    ),
    "sum, mean": _sum_and_accuracy,
    "mean, counts": _mean_and_counts,
    "rows, mean over labels, count": _accuracy_of_labels,
    "rows, constants": _constants,
    "complex sum": lambda self, rows, labels: (self.net(rows) * (1 + 2j)).sum(),
}


def _values(output):
    if isinstance(output, dict):
        output = output.values()
    if isinstance(output, torch.Tensor):
        return [output.detach()]
    return [tensor for part in output for tensor in _values(part)]


def assert_same_values(found, expected, name):
    pairs = zip(_values(found), _values(expected), strict=True)
    for number, (actual, value) in enumerate(pairs):
        text = f"{name}, {number}: {actual} and {value}"
        assert actual.shape == value.shape, text
        if not value.is_complex():
            actual, value = actual.double(), value.double()
        assert torch.allclose(actual, value, rtol=1e-10, equal_nan=True), text


@pairwise(name=list(RIGHT), mode=MODES, layout=LAYOUTS)
def test_numbers_are_those_of_all_rows(name, mode, layout):
    net = build(lambda: Own(RIGHT[name], net=mlp()))
    plain = copy.deepcopy(net)
    with (
        warnings.catch_warnings(),
        ScatterOnceParallel(net, device_ids=list(layout)) as engine,
    ):
        warnings.simplefilter("error")
        # An accuracy of two rows may be zero, which is that by any rule.
        for words in (
            "could not check how the number",
            "the number .* rows of this st",
        ):
            warnings.filterwarnings("ignore", words)
        for rows, labels in BATCHES:
            with mode(net):
                found = engine(rows, labels)
            with mode(plain):
                expected = plain(rows, labels)
            assert_same_values(found, expected, f"{name}, {len(rows)} rows")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rule_of_training_holds_in_evaluation(layout):
    """Of evaluation alone the first batch would not tell: all its labels count."""
    net = build(lambda: Own(RIGHT["mean over labels"], net=mlp()))
    with ScatterOnceParallel(net, device_ids=list(layout)) as engine:
        for rows, labels in BATCHES[2:]:
            engine(rows, labels).backward()
        with evaluation(net):
            for rows, labels in BATCHES[2:]:
                expected = net(rows, labels)
                assert_same_values(engine(rows, labels), expected, "loss")


@pytest.mark.parametrize("accum", [1, 2])
def test_numbers_of_micro_batches_combine(devices, accum):
    net = build(lambda: Own(_mean_and_counts, net=mlp())).eval()
    with ScatterOnceParallel(net, accum, devices(3)) as engine, torch.no_grad():
        for rows, labels in BATCHES:
            expected = net(rows, labels)
            assert_same_values(engine(rows, labels), expected, "numbers")


# --- numbers that no rule gives ---


def _root_of_mean(self, rows):
    output = self.net(rows)
    return {
        "loss": output.square().mean(),
        "rmse": output.detach().square().mean().sqrt(),
    }


def _largest(self, rows):
    output = self.net(rows)
    return output.square().mean(), output.detach().max()


def _alone(self, rows):
    return self.net(rows).square().mean().sqrt()


def _integer(self, rows):
    return self.net(rows), self.net(rows).argmax(1).max() + (rows[:, 0] > 0).sum() ** 2


UNKNOWN = {
    r"\(output\['rmse'\]\) is none of these: a mean over rows, a sum": _root_of_mean,
    r"the number that the module returns \(output\[1\]\) is none of": _largest,
    "the number that the module returns is none of these": _alone,
    r"\(output\[1\]\) is none of these": _integer,
}


@pairwise(words=list(UNKNOWN), mode=MODES, layout=LAYOUTS)
def test_number_without_rule_is_told_once(words, mode, layout):
    """Refused if it has a gradient: it may be trained."""
    net = build(lambda: Own(UNKNOWN[words], net=mlp()))
    with ScatterOnceParallel(net, device_ids=list(layout)) as engine, mode(net):
        rows = randn(11, 6)
        if mode is graph and UNKNOWN[words] is _alone:
            with pytest.raises(ValueError, match="the loss that the module returns"):
                engine(rows)
            return
        with pytest.warns(UserWarning, match=words) as warned:
            engine(rows)
        assert len(warned) == 1
        with warnings.catch_warnings(action="error"):
            for _ in range(3):
                engine(rows)


@pytest.mark.filterwarnings("ignore:.*is none of these")
@pytest.mark.parametrize("first", [inference, training_without_graph])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_without_rule_is_refused_after_evaluation(first, layout):
    """It was given up without a gradient, and then trained in silence."""
    net = build(lambda: Own(_alone, net=mlp()))
    rows = randn(11, 6)
    with ScatterOnceParallel(net, device_ids=list(layout)) as engine:
        with first(net):
            engine(rows)
        with graph(net), pytest.raises(ValueError, match="the loss that the module"):
            engine(rows)


def _count_of_labels(self, rows, labels):
    return self.net(rows), (labels != -100).sum()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_that_leave_several_rules_are_told(layout):
    """Of two rows one counts: a sum over labels is a mean over labels."""
    rows, _ = BATCHES[1]
    net = build(lambda: Own(_count_of_labels, net=mlp())).eval()
    with (
        ScatterOnceParallel(net, device_ids=list(layout)) as engine,
        torch.no_grad(),
        pytest.warns(UserWarning, match=r"the number .* is a mean .* or a sum"),
    ):
        _, count = engine(rows, torch.tensor([-100, 1]))
    assert count == 1


def _num_above(self, rows):
    return self.net(rows), (rows[:, 0] > 5).sum()


@pytest.mark.parametrize("mode", MODES)
def test_equal_numbers_of_parts_may_be_a_sum(mode):
    """Zeros left all rules; then equal counts of two parts were taken for a mean."""
    net = build(lambda: Own(_num_above, net=mlp()))
    rows = randn(8, 6)
    with ScatterOnceParallel(net, device_ids=["cpu"] * 2) as engine, mode(net):
        with warnings.catch_warnings(action="ignore"):  # of zeros
            for _ in range(2):
                engine(rows)
        rows[[0, 4], 0] = 9
        for _ in range(5):
            assert engine(rows)[1] == 2


def _num_large(self, rows):
    return self.net(rows), (rows[:, 0, 0] == 9).sum()


def _told_in_calls(net, rows):
    """The warnings of calls 1 to 8."""
    with (
        ScatterOnceParallel(net, device_ids=["cpu"] * 2) as engine,
        warnings.catch_warnings(record=True) as warned,
        torch.set_grad_enabled(net.training),
    ):
        warnings.simplefilter("always")
        for _ in range(8):
            engine(rows)
    return "; ".join(str(warning.message) for warning in warned)


def test_number_that_few_rows_do_not_have_is_told():
    """A row in a thousand: a few rows have none, and those of a replica two."""
    # With two dimensions they are data, by which no rows are chosen.
    rows = randn(2000, 2, 6)
    rows[11:13, 0, 0] = 9
    net = build(lambda: Own(_num_large, net=mlp())).eval()
    assert "could not check" in _told_in_calls(net, rows)


def test_number_of_a_single_part_is_told():
    """It may be a mean over terms, which other parts have not."""

    def forward(self, rows):
        return (self.net(rows).square().sum(1) * (rows[:, 0] == 9)).sum()

    rows = randn(8, 6)
    rows[3, 0] = 9
    net = build(lambda: Own(forward, net=mlp()))
    assert "a single part has a gradient" in _told_in_calls(net, rows)


def test_frozen_rows_of_a_single_part_are_told():
    """Without trained parameters there is no gradient."""

    def forward(self, rows):
        return self.net(rows).sum(1) * (rows[:, 0] == 9)

    rows = randn(8, 6)
    rows[3, 0] = 9
    net = build(lambda: Own(forward, net=mlp())).requires_grad_(False)
    assert "a single part has a loss" in _told_in_calls(net, rows)


def test_number_is_not_looked_at_with_verify_off():
    net = build(lambda: Own(RIGHT["sum"], net=mlp())).eval()
    rows, labels = BATCHES[2]
    with (
        ScatterOnceParallel(net, device_ids=["cpu"] * 2, verify=False) as engine,
        torch.no_grad(),
    ):
        assert_same_values(engine(rows, labels), net(rows, labels) / 2, "mean by rows")


def test_map_averages_numbers():
    """It is not known what else a function does, so it is called for all rows once."""
    net = build(mlp).eval()
    calls = []

    def total(replica, rows):
        calls.append(len(rows))
        return replica(rows).sum()

    with ScatterOnceParallel(net, device_ids=["cpu"] * 2) as engine:
        found = engine.map(total, BATCHES[2][0])
    assert_same_values(found, net(BATCHES[2][0]).sum() / 2, "mean")
    assert calls == [6, 6]


@pytest.mark.parametrize("num_rows", [4, 5])
def test_numbers_in_lists_of_rows_are_values_of_rows(num_rows, devices):
    """They have one entry per row: no look is needed."""

    def energies(self, rows):
        return {"energies": [self.net(row).sum() for row in rows]}

    net = build(lambda: Own(energies, net=mlp())).eval()
    rows = list(randn(num_rows, 6))
    with (
        ScatterOnceParallel(net, device_ids=devices(2)) as engine,
        torch.no_grad(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        found = engine(Rows(rows))
        assert_same_values(found, net(rows), "energies")
        assert isinstance(found["energies"], list)
