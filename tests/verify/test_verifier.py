"""Looks: when the engine has one, that it leaves no trace, what it costs, and false
alarms.
"""

from __future__ import annotations

import contextvars
import copy
import gc
import pickle
import random
import re
import sys
import threading
import warnings
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from faults.state import nothing_changes
from harness import leak_checks
from harness.looks import (
    INPUTS,
    ROWS,
    VALUES,
    assert_agreed,
    calls,
    counted,
    in_a_def,
    squares,
    step,
)
from harness.models import CLASSES, FEATURES, mlp
from harness.oracle import (
    assert_gradients,
    assert_step,
    build,
    randint,
    randn,
    whole_batch,
)
from harness.rank_processes import run_on_ranks
from harness.weighted import classes
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from scatterpar import Rows, ScatterOnceParallel, count_labels
from scatterpar.verify import look
from scatterpar.verify.verifier import Verifier

ALL_WAYS = 'count=.*reduction="sum".*whole_batch=True'


# --- when ---


def test_refusal_does_not_wear_off(devices):
    """The ninth call of a cell that was refused eight times went through, four times
    too large.
    """
    with ScatterOnceParallel(mlp(), 4, devices(1)) as engine:
        for number in range(11):
            if number == 10:
                step(engine, F.mse_loss, VALUES)  # another kind
            refused = pytest.raises(ValueError, match='reduction="sum"')
            with nothing_changes(engine.module), refused:
                engine.forward_backward(
                    INPUTS, VALUES, lambda o, t: ((o - t) ** 2).sum()
                )


@pytest.mark.parametrize("factor", [1.0, float("nan")])
def test_new_lambdas_looked_at_at_1_2_4_8(factor, recwarn):
    """Looks that tell nothing are said once."""
    looks, counts = [], counted(lambda o, t: in_a_def(o, t) * factor)
    with ScatterOnceParallel(mlp(), 2, ["cpu"]) as engine:
        for number in range(1, 41):
            calls().number = 0
            step(engine, lambda o, t: counts(o, t), classes(ROWS))
            looks += [number] if calls().number > 2 else []
    assert looks == [1, 2, 4, 8, 16, 32]
    texts = [str(each.message) for each in recwarn]
    assert len(texts) == (factor != 1)
    assert all(
        re.search(f"(?s)could not check how.*{ALL_WAYS}", text) for text in texts
    )


def one_micro_batch_each(group):
    rows, said = (5, 1)[group.rank()], []
    with ScatterOnceParallel(mlp(), 1, ["cpu"], process_group=group) as engine:
        for _ in range(2):
            try:
                engine.forward_backward(
                    INPUTS[:rows], VALUES[:rows], lambda o, t: squares(o, t)
                )
            # the other rank's, by its words
            except (ValueError, RuntimeError) as error:
                said.append(str(error))
        engine.forward_backward(INPUTS[:rows], VALUES[:rows], squares, reduction="sum")
        return said, [p.grad is None for p in engine.module.parameters()]


def test_one_micro_batch_per_rank_told():
    """It was taken for nothing that could be combined."""
    for said, missing in run_on_ranks(2, one_micro_batch_each):
        assert ['reduction="sum"' in each for each in said] == [True, True]
        assert not any(missing)


# --- without a trace ---


def test_criterion_not_kept_engine_pickles():
    criterion = nn.CrossEntropyLoss()
    with ScatterOnceParallel(mlp(), 2, ["cpu"]) as engine:
        assert_agreed(engine, partial(step, engine, criterion, classes(ROWS)))
        gone = weakref.ref(criterion)
        del criterion
        gc.collect()
        assert gone() is None
        with pickle.loads(pickle.dumps(engine)) as again:
            assert_agreed(again, lambda: step(again, in_a_def, classes(ROWS)))


class Fed(nn.Module):
    """Keeps a running centre in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(CLASSES).double())

    def forward(self, output, targets):
        loss = (output - self.centre).pow(2).mean()
        self.centre.mul_(0.9).add_(output.detach().mean(0))
        return loss


LOOKED_AT = {
    "torch's random numbers": lambda o, t: (o * torch.rand_like(o)).mean(),
    "Python's random numbers": lambda o, t: o.mean() * (1 + random.random()),
    "NumPy's random numbers": lambda o, t: o.mean() * (1 + np.random.rand()),
    "keeps a state": Fed(),
}
INCONCLUSIVE = {
    "NaN": lambda o, t: (o * float("nan")).std(),
    "no gradient": lambda o, t: (o * 0).std(),
}


@pytest.mark.contract
@pytest.mark.draws
@pytest.mark.filterwarnings(
    "error", "ignore:forward passes move", "ignore:(?s)could not check.*NaN"
)
@pytest.mark.parametrize("case", [*LOOKED_AT, *INCONCLUSIVE])
def test_look_leaves_no_trace(devices, case):
    """The same bits as without looking, everywhere; nothing fails."""
    # these draw in any order
    replicas = 1 if "Python" in case or "NumPy" in case else 2
    states = []
    for verify in (False, True):
        criterion = copy.deepcopy({**LOOKED_AT, **INCONCLUSIVE}[case])
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        with ScatterOnceParallel(mlp(), 3, devices(replicas), verify=verify) as engine:
            one = partial(step, engine, criterion, classes(ROWS))
            if case in LOOKED_AT:
                assert_agreed(engine, one, looks=verify)
            else:
                one(), one()
        kept = [p.grad.nan_to_num().tolist() for p in engine.module.parameters()]
        kept += (
            [b.tolist() for b in criterion.buffers()] if case == "keeps a state" else []
        )
        drawn = leak_checks.random_states(), np.random.get_state()[1].tolist()
        states.append((engine.last_step.bytes, engine.last_step.messages, kept, drawn))
    assert states[0] == states[1]


def test_interrupted_look_leaves_no_trace(devices):
    class Interrupted(nn.Module):
        calls = 0

        def forward(self, output, targets):
            self.calls += 1
            if len(output) < 10:
                raise KeyboardInterrupt
            return F.mse_loss(output, targets)

    criterion = Interrupted()
    inputs, values = randn(60, FEATURES), randn(60, CLASSES)
    with ScatterOnceParallel(mlp(), 3, devices(2)) as engine:
        with nothing_changes(engine.module), pytest.raises(KeyboardInterrupt):
            engine.forward_backward(inputs, values, criterion)
        assert criterion.calls == 0
        assert_step(engine, inputs, values, nn.MSELoss())


# --- what it costs, and where ---


def fails(output, targets):
    if len(output) != 4:
        raise torch.OutOfMemoryError("no memory for any rows but four")
    return output.std()


def test_look_never_raises_accum():
    """Only the look runs out of memory: accum="auto" stays as it is."""
    with ScatterOnceParallel(mlp(), "auto", ["cpu"] * 6) as engine:
        step(engine, fails, classes(ROWS))  # which might have failed by the same
        with pytest.warns(UserWarning, match=f"(?s)memory ran out.*{ALL_WAYS}"):
            step(engine, fails, classes(ROWS))
        assert engine.last_step.retries == 0


def test_later_looks_take_fewer_rows():
    """Looks take some micro-batches once, then a few rows, then nothing."""
    rows = 2000
    model, inputs, targets = mlp(), randn(rows, FEATURES), randint(CLASSES, rows)
    taken = []

    def note(_, args):
        calls().number += len(args[0])

    model.register_forward_pre_hook(note)
    with ScatterOnceParallel(model, 20, ["cpu"]) as engine:
        for _ in range(9):
            calls().number = 0
            engine.forward_backward(inputs, targets, in_a_def)
            taken.append(calls().number - rows)
    assert 0 < taken[0] <= 4 * 100 * 1.5
    assert all(0 < taken[number - 1] <= 2 * 25 * 1.5 for number in (2, 4, 8))
    assert [taken[number - 1] for number in (3, 5, 6, 7, 9)] == [0] * 5


def calls_of_a_fifth_step(num_rows, verify):
    """The number of calls of Python functions in this thread; that step has no look."""
    sequences = Rows([torch.ones(1 + row % 4) for row in range(num_rows)], padded_sums)
    calls = []
    engine = ScatterOnceParallel(nn.Linear(1, 2), 2, ["cpu"] * 2, verify=verify)
    with engine:
        for _ in range(5):
            calls.clear()
            sys.setprofile(lambda _, event, __: calls.append(event))
            try:
                engine.forward_backward(sequences, None, mean_of_squares)
            finally:
                sys.setprofile(None)
    return calls.count("call")


def padded_sums(rows):
    return pad_sequence(rows, batch_first=True).sum(1, keepdim=True)


def mean_of_squares(output, _):
    return output.square().mean()


@pytest.mark.draws
def test_no_look_reads_no_rows():
    """Each step read the sizes of 16,384 entries of ``Rows``, and took 2.5 times as
    long.
    """
    few, many = (
        calls_of_a_fifth_step(num_rows, verify=True)
        - calls_of_a_fifth_step(num_rows, verify=False)
        for num_rows in (128, 640)
    )
    assert many < few + 200


def test_fixmatch_not_told_whole_batch(
    devices,
):
    """FixMatch was told to pass whole_batch=True, which it passed, and is exact."""

    inputs, labels = randn(300, FEATURES), randint(CLASSES, 300)

    def fixmatch(output, labels):
        labelled, weak, strong = output.split(100)
        guesses = weak.detach().argmax(1)
        loss = F.cross_entropy(labelled, labels[: len(labelled)])
        return loss + F.cross_entropy(strong, guesses)

    with ScatterOnceParallel(mlp(), 3, devices(2)) as engine:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(8):
                step(engine, fixmatch, labels, inputs, whole_batch=True)
        assert_step(engine, inputs, labels, fixmatch, whole_batch=True)
    (text,) = [str(warning.message) for warning in caught]
    assert re.search("could not check.*fixmatch with whole_batch=True", text)
    assert "pass whole_batch" not in text
    assert "a sum" not in text


def test_endless_wait_told_once_step_goes_on(monkeypatch):
    """A criterion that waits in a look, which nobody can interrupt, hung the step."""
    monkeypatch.setattr(look, "PATIENCE_SECONDS", 1.0)
    event = threading.Event()

    def waits(output, targets):
        if len(output) != ROWS // 2:  # in a look
            event.wait(60)
        return F.mse_loss(output, targets)

    model = mlp()
    _, expected = whole_batch(model, INPUTS, VALUES, F.mse_loss)
    with ScatterOnceParallel(model, 1, ["cpu"] * 2) as engine:
        with pytest.warns(UserWarning, match="could not check how.*a call waits"):
            step(engine, waits, VALUES)
        event.set()
    assert_gradients(model, expected)


# --- looks tell what they have found once the step has succeeded ---


class Breaks(nn.Module):
    """Fails from a step on."""

    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.is_broken = False

    def forward(self, rows):
        if self.is_broken:
            raise LookupError("no such expert")
        return self.body(rows)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("accum", [2, 50])
@pytest.mark.parametrize("step_number", [0, 1, 3])
def test_failing_step_says_one_thing(devices, step_number, accum):
    """A warning that the check could not be made came before the user's error."""
    model = Breaks()
    with ScatterOnceParallel(model, accum, devices(2)) as engine:
        for _ in range(step_number):
            step(engine, F.mse_loss, VALUES)
        model.is_broken = True
        with pytest.raises(LookupError, match="no such expert"):
            step(engine, F.mse_loss, VALUES)


def count_call(module, *_):
    module.calls += 1


def test_warning_of_a_failed_step_is_told_later(devices):
    """Of state that forward passes move."""
    model = Breaks()
    model.register_buffer("calls", torch.zeros(()))
    model.register_forward_hook(count_call)
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        with pytest.raises(ZeroDivisionError):
            step(engine, lambda o, t: F.mse_loss(o, t) if len(o) > 6 else 1 / 0, VALUES)
        with pytest.warns(UserWarning, match="forward passes move the buffer"):
            step(engine, F.mse_loss, VALUES)


def test_warning_is_given_once_per_subject():
    """Not per beginning of its text: names of criteria may be long."""
    verifier = Verifier()
    beginning = "the criterion " + "with a long name " * 5
    for _ in range(2):
        for subject, number in (("a", 1), ("a", 2), ("b", 3)):
            verifier.warn(subject, f"{beginning}{number}")
    with pytest.warns(UserWarning, match="the criterion") as caught:
        verifier.tell()
    assert [str(warning.message)[-1] for warning in caught] == ["1", "3"]


@pytest.mark.filterwarnings("error")
def test_refused_outputs_say_one_thing(devices):
    """The warning of its look came before the error of the join."""
    model = Breaks()
    model.register_buffer("calls", torch.zeros(()))
    model.register_forward_hook(count_call)

    def odd(output):
        return output.flatten()[: len(output) // 2 + 1]

    with (
        ScatterOnceParallel(model, 2, devices(2)) as engine,
        pytest.raises(ValueError, match=r"torch\.stack"),
    ):
        step(engine, F.mse_loss, VALUES, return_outputs=odd)


@pytest.mark.filterwarnings("error")
def test_warning_that_is_an_error_changes_nothing(devices):
    """It was raised after the step's gradients had been added."""
    model = Breaks()
    model.register_buffer("calls", torch.zeros(()))
    model.register_forward_hook(count_call)
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        words = "forward passes move the buffer"
        with nothing_changes(model), pytest.raises(UserWarning, match=words):
            step(engine, F.mse_loss, VALUES)
        step(engine, F.mse_loss, VALUES)


OF_CONTEXT = contextvars.ContextVar("scale", default=1.0)


class ScaledByContext(nn.Module):
    """Replicas compute in threads with the caller's context."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, 3)

    def forward(self, rows):
        return self.linear(rows) * OF_CONTEXT.get()


@pytest.fixture
def _scaled_by_three():
    token = OF_CONTEXT.set(3.0)
    yield
    OF_CONTEXT.reset(token)


@pytest.mark.usefixtures("_scaled_by_three")
def test_context_variable_is_every_replicas(devices):
    inputs, targets = randn(9, FEATURES), randn(9, 3)
    with (
        warnings.catch_warnings(),
        ScatterOnceParallel(build(ScaledByContext), 2, devices(2)) as engine,
    ):
        warnings.simplefilter("error")
        assert_step(engine, inputs, targets, nn.MSELoss())


# --- reentrant checkpoints refuse autograd.grad, by which looks ask for gradients ---


class Recomputed(nn.Module):
    """A new model: the losses of all words are the same, and gradients are not."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(CLASSES, FEATURES)
        self.layer = nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, words):
        hidden = checkpoint(self.layer, self.words(words), use_reentrant=True)
        return self.head(hidden)


def test_wrong_count_behind_checkpoint_is_refused(devices):
    """Losses alone were compared. Hooks of the user's see one gradient per step."""
    model, seen = build(Recomputed), []
    model.head.weight.register_hook(lambda _: seen.append("a hook"))
    model.head.weight.register_post_accumulate_grad_hook(lambda _: seen.append("after"))
    words = randint(CLASSES, 8, 6)
    labels = words.clone()
    labels[:3, 1:] = -100
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        with nothing_changes(model), pytest.raises(ValueError, match="count_labels"):
            engine.forward_backward(words, labels, of_words)
        assert seen == []
        plain = copy.deepcopy(model)
        of_words(plain(words), labels).backward()
        seen.clear()
        engine.forward_backward(words, labels, of_words, count=count_labels())
        assert seen == ["a hook", "after"]
    assert_gradients(model, {n: p.grad for n, p in plain.named_parameters()})


def of_words(output, labels):
    return F.cross_entropy(output.flatten(0, 1), labels.flatten())
