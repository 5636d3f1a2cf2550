"""What a step says of a program: refused, told, or silent because it is right.

Each program is one that somebody wrote, or that our own advice leads to. Most of those
in ``REFUSED`` and ``TOLD`` gave another gradient than plain torch, by up to 200 %,
without a word.
"""

from __future__ import annotations

import random
import re
import time
from functools import partial

import numpy as np
import pytest
import torch
from faults.state import nothing_changes
from harness.agree import Case
from harness.looks import (
    INPUTS,
    LABELS,
    LENGTH,
    ROWS,
    SEQUENCES,
    VALUES,
    Net,
    balancing,
    case_of,
    in_a_def,
    loss_of,
    net,
    own_loss,
    said,
    squares,
    train,
)
from harness.models import CLASSES, FEATURES, Classifier, Of, mlp, token_classifier
from harness.oracle import (
    assert_step,
    build,
    randint,
    randn,
    seeded,
)
from harness.pairwise import few_of
from harness.weighted import CLASS_WEIGHTS, classes, padded
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from scatterpar import Rows, ScatterOnceParallel, count_labels

# --- losses, and what they take ---


def added_up(output, targets):
    return F.cross_entropy(output, targets, reduction="sum")


def leaves_out(label):
    return lambda output, targets: F.cross_entropy(output, targets, ignore_index=label)


def without_twos(output, targets):
    return F.cross_entropy(output[targets != 2], targets[targets != 2])


def with_helper(output, targets):
    return without_twos(output, targets)


def compares(output, _):
    return output.std(0).sum()


def penalised(share):
    """A sum over rows, and a penalty on weights: all of it, silently added in each
    micro-batch.
    """

    def of(model):
        def loss(output, targets, model):
            part = len(output) / ROWS if share else 1.0
            return added_up(output, targets) + part * model[0].weight.square().sum()

        return partial(loss, model=model)

    return Case(mlp, (INPUTS, classes(ROWS)), of, accum=3, options={"reduction": "sum"})


def without_first():
    """The mean of a micro-batch without labels, and of another one, is
    also their sum.
    """
    return classes(ROWS).where(torch.arange(ROWS) > 0, -100)


class OwnLoss(nn.Module):
    """A token classifier with the loss inside, as language models have it: labels are
    shifted.
    """

    def __init__(self, *layers):
        super().__init__()
        self.body = token_classifier()
        self.layers = nn.Sequential(*layers)

    def forward(self, ids, labels):
        logits = self.layers(self.body(ids))
        return {"loss": F.cross_entropy(logits[:, :, :-1], labels[:, 1:])}


def at_its_start():
    """With a head of zeros all losses are the same, whatever the weights; gradients
    tell.
    """
    model = OwnLoss()
    head = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
    nn.init.zeros_(head.weight), nn.init.zeros_(head.bias)
    return model


def tokens(rows=12, length=6):
    ids, labels = (
        randint(11, rows, length, seed=5),
        randint(CLASSES, rows, length, seed=6),
    )
    padding = torch.arange(length) >= (torch.arange(rows) % length + 1)[:, None]
    return {"ids": ids, "labels": labels.masked_fill(padding, -100)}


IDS, L = tokens().values()


class Masked(OwnLoss):
    def forward(self, mask, ids, labels):
        return super().forward(ids * mask, labels)


def collated(rows):
    ids, labels = zip(*rows, strict=True)
    return {"ids": torch.stack(ids), "labels": torch.stack(labels)}


def by_key(output, targets):
    return F.cross_entropy(output, targets["y"])


COUNT = "count=scatterpar.count_labels"
SUM = 'It seems to be a sum: pass reduction="sum".*count=.*whole_batch='
MEAN = 'seems to be a mean over rows: pass reduction="mean", without count='
SHIFTED = r"count=scatterpar.count_labels\(shifted=True\)"
COUPLED = (
    "compares rows with each other.*pass whole_batch=True.*mean of one loss per row"
)
BY_ROWS = r"count=lambda inputs, targets: len\(targets\)(?!.*pass reduction=.mean)"
REPEATED = torch.tensor([1, 1, 1, 2, 2, 3] * 3 + [3, 3, 3, 2, 1, 2])


class Focal(nn.CrossEntropyLoss):
    def forward(self, output, targets):
        return F.cross_entropy(output, targets, self.weight, reduction="none").mean()


def positives(output, labels):
    """A focal loss divided by the positives: micro-batches of negatives
    were dropped.
    """
    each = F.binary_cross_entropy_with_logits(output, labels, reduction="none")
    return each.sum() / labels.sum().clamp(min=1)


def hardest(output, targets):
    return (
        F.cross_entropy(output, targets, reduction="none")
        .topk(min(12, len(output)))[0]
        .mean()
    )


def sum_of_means(output, targets):
    """As cross entropy and a Dice loss: advice that fitted roughly led to the next
    refusal.
    """
    return in_a_def(output, targets) + 0.05 * output.pow(2).mean().sqrt()


WEIGHT_OF_ROW = torch.linspace(0.1, 2, ROWS).double()


def weighted_by_row(output, targets):
    return ((output - targets).square().mean(1) * WEIGHT_OF_ROW).mean()


def gradient_of(loss, output, **options):
    (gradient,) = torch.autograd.grad(loss, output, retain_graph=True, **options)
    return gradient


def adaptive(output, targets):
    """VQGAN's weight of its second loss: a ratio of gradients' norms."""
    first, second = F.mse_loss(output, targets), output.abs().mean()
    weight = gradient_of(first, output).norm() / gradient_of(second, output).norm()
    return first + weight.detach() * second


def virtual(output, targets):
    """A perturbation along the gradient of a mean."""
    direction = gradient_of(F.mse_loss(output, targets), output)
    return F.mse_loss(output + direction / direction.norm(), targets)


def smooth(output, targets):
    gradient = gradient_of(F.mse_loss(output, targets), output, create_graph=True)
    return F.mse_loss(output, targets) + gradient.norm()


def with_inputs(net, rows):
    """A critic, and its inputs, which require grad for a penalty."""
    rows = rows.detach().requires_grad_()
    return net.linear(rows), rows


def penalty_of_rows(output, _):
    """WGAN-GP's: one gradient norm per row, which is a mean over rows."""
    scores, rows = output
    gradient = gradient_of(scores.sum(), rows, create_graph=True)
    return scores.mean() + (gradient.norm(dim=1) - 1).square().mean()


def penalty_of_mean(output, _):
    scores, rows = output
    gradient = gradient_of(scores.mean(), rows, create_graph=True)
    return scores.mean() + gradient.norm()


def penalty_by_weight(output, targets, model):
    loss = F.mse_loss(output, targets)
    gradient = gradient_of(loss, model[-1].weight, create_graph=True)
    return loss + gradient.square().sum()


def adaptive_by_weight(output, targets, model):
    """VQGAN's weight, by the last layer."""
    first, second = F.mse_loss(output, targets), output.abs().mean()
    weight = model[-1].weight
    ratio = gradient_of(first, weight).norm() / gradient_of(second, weight).norm()
    return first + ratio.detach() * second


class PerSeenRow:
    """A sum over the rows, divided by the number of rows seen so far."""

    def __init__(self):
        self.seen = ROWS  # those of an earlier step

    def __call__(self, output, targets):
        self.seen += len(output)
        return squares(output, targets) / self.seen


FEW = torch.zeros(ROWS, CLASSES).double()
FEW[::12] = 1

# --- random numbers and batch normalisation, which are no excuse ---


def with_dropout(output, targets):
    return squares(F.dropout(output), targets)


def noise(_, inputs):
    """As a diffusion model draws: a level for each row, and noise for each entry."""
    level = torch.randint(1, 5, (len(inputs), *[1] * (inputs.ndim - 1))).to(inputs)
    return inputs + level * torch.randn_like(inputs)


OWN = torch.Generator().manual_seed(3)


def with_own_generator(output, targets):
    """Only torch's own numbers were the same for every row: right losses were warned
    of.
    """
    noise = torch.randn(output.shape, generator=OWN, dtype=output.dtype)
    return F.mse_loss(output + noise, targets)


LANGUAGE_MODELS = {
    "batch normalisation": lambda: OwnLoss(nn.BatchNorm1d(CLASSES)),
    "noise": lambda: OwnLoss(Of(noise)),
}

# --- what module and criterion leave behind, and read ---


def with_balance(net, rows):
    """The load balance of a mixture of experts, which compares the rows of the
    micro-batch.
    """
    gates = net.linear(net.drop(rows)).softmax(-1)
    return gates, (gates.mean(0) ** 2).sum()


def with_router(net, rows):
    """What the experts get on average has an entry for each of them, and none for a
    row.
    """
    return net.linear(rows), net.linear(rows).softmax(-1).mean(0)


def balanced_at_once(output, targets):
    return F.mse_loss(output[0], targets) + output[1].square().sum()


def balanced(output, targets):
    return F.mse_loss(output[0], targets) + output[1]


def first_of_each(net, rows, lengths):
    return net.linear(
        torch.stack([row[:n].sum(0) for row, n in zip(rows, lengths, strict=False)])
    )


LABELLED = INPUTS, LABELS
NUMBERS = {
    "a tuple": tuple(1 + i % LENGTH for i in range(ROWS)),
    "0-dim tensors": [torch.tensor(1 + i % LENGTH) for i in range(ROWS)],
}


def expert(net, rows):
    """Leaves an auxiliary loss on the module, as mixtures of experts do."""
    net.aux = net.linear(rows).square().mean()
    return net.linear(net.drop(rows))


EXPERT = net(expert, aux=torch.zeros(()))


def with_gradients(model):
    """A penalty on gradients, as adaptive weights have it."""

    def criterion(output, targets):
        loss, own = F.cross_entropy(output, targets), [*model.parameters()]
        found = torch.autograd.grad(loss, own, allow_unused=True, create_graph=True)
        return loss + sum(
            gradient.square().sum() for gradient in found if gradient is not None
        )

    return criterion


def a_layer_that_balances():
    """Its gradient is far smaller than single precision resolves beside the loss's."""
    return Of(balancing(lambda gates: 1e-6 * gates.square().mean()), linear=mlp())


def pushed_by_a_hook(net, rows):
    """A hook adds to the gradient of each row what a mean over rows would."""
    output = net.linear(rows)
    output.register_hook(lambda gradient: gradient + output.detach() / len(output))
    return output


INJECTED = {
    "a mean": net(balancing(lambda gates: gates.square().mean())),
    "a product of means": net(balancing(lambda gates: gates.mean(0).square().sum())),
    "a mean in one of many layers": lambda: nn.Sequential(
        mlp(), nn.Linear(CLASSES, FEATURES), a_layer_that_balances()
    ).double(),
    "a mean, by a hook": net(pushed_by_a_hook),
}


LEFT_BEHIND = {  # auxiliary losses were dropped; penalties by parameters found nothing
    "attributes": lambda m: (
        lambda output, targets: F.cross_entropy(output, targets) + m.aux
    ),
    "gradients by parameters": with_gradients,
}


def leaving(net, rows):
    net.kept = [net.linear(rows).square().mean()]
    return net.linear(rows)


REPLICA = "with your own module in plain torch, but.*on a replica"

REFUSED: dict[str, tuple[Case, str]] = {
    "ignored labels in a lambda": (
        loss_of(lambda o, t: F.cross_entropy(o, t), padded),
        COUNT,
    ),
    "class weights, then a mean": (loss_of(Focal(CLASS_WEIGHTS), LABELS), BY_ROWS),
    "a sum in a lambda": (loss_of(lambda o, t: added_up(o, t)), SUM),
    "a mean that is called a sum": (loss_of(in_a_def, reduction="sum"), MEAN),
    "a wrong count": (
        loss_of(nn.MSELoss(), VALUES, count=lambda i, t: t.abs().sum()),
        MEAN,
    ),
    "rows compared with each other": (loss_of(compares), COUPLED),
    **{
        f"the gradient of the output in the criterion, {loss.__name__}": (
            loss_of(loss, VALUES),
            COUPLED,
        )
        for loss in (adaptive, virtual, smooth)
    },
    **{
        f"{loss.__name__}, of the replica's model": (
            Case(mlp, (INPUTS, VALUES), lambda m, f=loss: partial(f, model=m), accum=2),
            "your loss of.*call engine.loss for each loss",
        )
        for loss in (penalty_by_weight, adaptive_by_weight)
    },
    "a penalty on the gradient of a mean by inputs": (
        case_of(net(with_inputs), criterion=penalty_of_mean),
        "your loss of.*call engine.loss for each loss",
    ),
    "a sum over a counter": (
        Case(mlp, (INPUTS, VALUES), lambda _: PerSeenRow(), accum=3),
        "would be off by",
    ),
    "the hardest rows": (
        case_of(
            mlp, randn(48, FEATURES), randint(CLASSES, 48), criterion=hardest, accum=4
        ),
        COUPLED,
    ),
    "a penalty beside a sum": (
        penalised(share=False),
        "adds something that does not depend on the rows.*engine.loss.*penalty",
    ),
    "rows that count leaves out": (
        loss_of(positives, FEW, count=lambda _, labels: labels.sum()),
        "would be off by",
    ),
    "a sum of means": (
        loss_of(sum_of_means, padded),
        r"(?!.*It seems)(?=.*whole_batch=True).*losses\.md",
    ),
    "one row without a label": (
        loss_of(in_a_def, without_first(), accum=8),
        r"(?!.*It seems to be a sum).*not -100: .*\(\)",
    ),
    # Two micro-batches that held as many of it once agreed, and stood for all others.
    "a label in a closure": (loss_of(leaves_out(2), REPEATED, accum=8), "count="),
    "a label in a helper": (
        loss_of(with_helper, REPEATED, accum=8),
        r"count_labels\(2\)",
    ),
    "in a module": (own_loss(OwnLoss, tokens()), SHIFTED),
    # The mask once stood for the labels: count_labels(0, shifted=True), which was then
    # refused.
    "beside a mask": (
        own_loss(Masked, {"mask": (L != -100).long(), **tokens()}),
        SHIFTED,
    ),
    "labels that collate makes": (
        own_loss(OwnLoss, Rows([*zip(IDS, L, strict=True)], collated)),
        SHIFTED,
    ),
    "labels under a key": (
        loss_of(by_key, {"y": padded(ROWS)}),
        r"count_labels\(key='y'\)",
    ),
    "in a module at its start": (own_loss(at_its_start, tokens()), "count="),
    "dropout": (loss_of(with_dropout, VALUES), SUM),
    **{
        f"a language model with {name}": (own_loss(make, tokens()), SHIFTED)
        for name, make in LANGUAGE_MODELS.items()
    },
    # It broadcast to each row, and looks at several rows failed for seven steps.
    "a weight for each row in a closure, sub-steps of one row": (
        loss_of(weighted_by_row, VALUES, accum=ROWS),
        r"your loss of 24 rows.*1 \+ 1 \+ 1 \+ 1 \+ 1 \+ 1 \+ … rows",
    ),
    "shapes that broadcast to all pairs": (
        case_of(
            net(lambda net, rows: net.linear(rows)[:, :1]),
            targets=VALUES[:, 0],
            criterion=lambda output, targets: (output - targets).square().mean(),
        ),
        r"shape \(\d+, 1\) and the targets \(\d+,\).*all pairs",
    ),
    "experts' entries of micro-batches of one row": (
        case_of(
            net(with_router), accum=ROWS, criterion=balanced_at_once, whole_batch=True
        ),
        r"cannot be joined.*\.reshape\(rows",
    ),
    "a number that forward computes from its rows": (
        case_of(
            net(with_balance),
            criterion=balanced,
            engine={"verify": False},
            whole_batch=True,
        ),
        "number that differs between micro-batches.*in the criterion",
    ),
    **{
        f"a number that forward computes{', whole_batch' * whole}, looked at": (
            case_of(net(with_balance), criterion=balanced, whole_batch=whole),
            "(your loss of|returns a number).*the number in the criterion",
        )
        for whole in (False, True)
    },
    **{
        f"the gradient of {name}, injected{', ' + option if option else ''}": (
            case_of(make, **options),
            "adds a gradient that is not the gradient of the loss.*inputs of the auxiliary loss",
        )
        for name, make in INJECTED.items()
        for option, options in {
            "": {},
            "a sum": {"reduction": "sum", "criterion": squares},
            "whole_batch": {"whole_batch": True},
        }.items()
    },
    **{
        f"a number for each row in {name}": (
            case_of(net(first_of_each), (SEQUENCES, numbers)),
            r"24 numbers.*Rows\(numbers\).*Replicated\(numbers\)",
        )
        for name, numbers in NUMBERS.items()
    },
    **{
        f"{name}, left behind{', whole_batch' * whole}": (
            Case(
                EXPERT,
                LABELLED,
                of,
                accum=1 + 2 * whole,
                options={"whole_batch": whole},
            ),
            f"{REPLICA}.*reads a value that forward sets.*return this value.*reduction= or "
            "whole_batch=.*verify=",
        )
        for name, of in LEFT_BEHIND.items()
        for whole in (False, True)
    },
    # the error was an IndexError
    "an entry of a list that is empty on the user's module": (
        Case(
            net(leaving, kept=[]),
            LABELLED,
            lambda m: lambda o, t: m.kept[0] + in_a_def(o, t),
        ),
        "Computing it on a replica raised.*parameters to autograd.grad",
    ),
}


# A program that differs from one above it by an option, or by the name of its loss.
VARIANT = re.compile(
    r"injected, |, (virtual|smooth)$|^penalty_by_weight|left behind, whole|0-dim|"
    r"with noise|, 1 sub-steps|sub-steps, whole_batch|whole_batch, looked at|"
    r"(product of means|of many layers), injected$"
)


def one_of_each(names):
    """Variants of a program are slow."""
    return few_of(names, [name for name in names if not VARIANT.search(name)])


REFUSED_TWICE = {"ignored labels in a lambda", "a sum of means", "dropout"}


@pytest.mark.contract
@pytest.mark.draws
@pytest.mark.parametrize("name", one_of_each(REFUSED))
def test_wrong_gradient_refused_in_time(devices, name):
    """A second step, too: the first is not taken for verified."""
    case, words = REFUSED[name]
    model = case.build()
    next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
    # Of one replica all parts are its own sub-steps.
    replicas = 1 if name == "the hardest rows" or "left behind" in name else 2
    with ScatterOnceParallel(
        model, case.accum, devices(replicas), **case.engine
    ) as engine:
        for _ in range(2 if name in REFUSED_TWICE else 1):
            with (
                seeded(0),
                nothing_changes(model),
                pytest.raises(ValueError, match=re.compile(words, re.S)),
            ):
                train(engine, case)


# --- told ---


class Baseline:
    """The running mean of a REINFORCE loss, in an object of the user's."""

    def __init__(self):
        self.mean, self.seen = 0.0, []

    def __call__(self, output, targets):
        self.seen.append(float(output.detach().mean()))
        advantage = targets - self.mean
        self.mean = 0.5 * self.mean + 0.5 * float(targets.mean())
        return (output * advantage).mean()


def remembering(net, rows):
    past = net._past
    net._past = net.linear(rows).detach().mean(0)
    return net.linear(rows) if past is None else net.linear(rows) * past


def carries(net, rows):
    """A hidden state that is kept between calls."""
    output = net.linear(rows) + net.state
    net.state = output.detach().mean(0)
    return output


def appending(net, rows):
    """A list of losses that is read after the step."""
    output = net.linear(rows)
    net.losses.append(output.detach().square().mean())
    return output


class Queue(Classifier):
    """Keeps the last features, a counter, and its last output."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(CLASSES)
        self.register_buffer("queue", torch.zeros(4, CLASSES))
        self.calls, self.last = 0, torch.zeros(())

    def forward(self, rows):
        output = self.norm(self.linear(rows))
        with torch.no_grad():
            self.queue.mul_(0.9)[:] += output.mean(0)
        self.calls += 1
        self.last = output.detach().mean()
        return output


def rnn():
    """Takes time steps in dimension 0: batch_first=True is forgotten."""
    return nn.RNN(FEATURES, FEATURES)


UNCHECKED = {
    "NaN": (lambda o, t: F.mse_loss(o, t) / 0, "NaN or infinite"),
    "zero gradients": (lambda o, t: F.mse_loss(o * 0, t), "zero|rounding"),
}
TOLD: dict[str, tuple[Case, str]] = {
    "a mean over rows": (
        case_of(net(lambda net, rows: net.linear(rows - rows.mean(0)))),
        "other outputs for",
    ),
    "rows along the wrong dimension": (
        case_of(
            net(lambda net, rows: net.linear(net.parts[0](rows)[0]), rnn),
            inputs=SEQUENCES,
            targets=SEQUENCES[:, :, :CLASSES],
        ),
        "other outputs for.*batch_first=",
    ),
    **{
        f"a loss with {name}": (
            case_of(Classifier, criterion=loss),
            f"could not check how.*{reason}",
        )
        for name, (loss, reason) in UNCHECKED.items()
    },
    "writes into the targets": (
        loss_of(lambda o, t: F.cross_entropy(o, t.clone()) + 0 * t.add_(0).sum()),
        "the criterion writes targets in place",
    ),
    "a criterion that reads its earlier calls": (
        case_of(Classifier, criterion=Baseline()),
        "another result when it is called again",
    ),
    "a private attribute that held None": (
        case_of(net(remembering, _past=None)),
        "move the attribute '_past'",
    ),
    "a queue of MoCo's": (
        case_of(Queue, accum=3),
        "the buffer 'queue', the attribute 'calls', the attribute 'last': each",
    ),
    "a queue, one sub-step per replica": (
        case_of(Queue, accum=1),
        "move the buffer 'queue', the attribute 'last', the attribute 'calls': each",
    ),
    "a list that forward passes append to": (
        case_of(net(appending, losses=[]), accum=1),
        "move the attribute 'losses': each",
    ),
    "a hidden state, one sub-step per replica": (
        case_of(net(carries, state=torch.zeros(CLASSES).double()), accum=1),
        "move the attribute 'state': each",
    ),
}


@pytest.mark.draws
@pytest.mark.parametrize("name", TOLD)
def test_program_warns_once(devices, name):
    case, words = TOLD[name]
    with ScatterOnceParallel(case.build(), case.accum, devices(2)) as engine:
        try:
            # what looks cannot check is told in step 8
            steps = 9 if name.startswith("a loss with") else 5
            texts = said(engine, case, steps)
        except ValueError as error:  # the losses differ, too
            texts = [str(error)]
    assert len([text for text in texts if re.search(words, text, re.S)]) == 1, texts


@pytest.mark.parametrize("make", [Queue, net(carries, state=torch.zeros(CLASSES))])
def test_moved_attributes_told_by_name(make):
    """A schedule that counted its own calls stood at its start for ever."""
    case = case_of(make, accum=1)
    with ScatterOnceParallel(build(make), 1, ["cpu"]) as engine:
        texts = said(engine, case, 9)
    name = "calls" if make is Queue else "state"
    assert len(texts) == 1
    assert f"forward passes move the attribute {name!r}: each sub-step" in texts[0]
    assert "keep it in a buffer, and train on one replica with one sub-step" in texts[0]


# --- silent ---


def ctc(output, targets):
    lengths = torch.full((output.size(1),), LENGTH)
    return F.ctc_loss(output, targets, lengths, torch.ones_like(lengths))


def masked_by_python(net, rows):
    """As some models mask time steps in training: row by row, with the
    host's numbers.
    """
    keep = [[random.random() > 0.3 for _ in row] for row in rows]
    return net.linear(rows * torch.tensor(keep))


def masked_by_numpy(net, rows):
    return net.linear(
        rows * torch.from_numpy(np.random.default_rng().random(rows.shape))
    )


def recomputes(net, rows):
    return checkpoint(net.linear, net.parts[0](rows), use_reentrant=True)


def rotates(net, rows):
    """Grows a table of positions in its first pass, and reads it from then on."""
    if net.length < FEATURES:
        net.length, net.angles = FEATURES, torch.arange(FEATURES) / FEATURES
        net.table = net.angles.cos()
    return net.linear(rows * net.table)


def fills(net, rows):
    """Fills a buffer in the first sub-step, in place."""
    if not net.table.any():
        net.table.fill_(2.0)
    return net.linear(rows * net.table)


def penalising(model):
    """A criterion that is a module, holds the model, and asks for no more than its
    weights.
    """

    def penalised(own, output, targets):
        penalty = sum(p.square().sum() for p in own.model.parameters())
        return F.cross_entropy(output, targets) + 0.01 * penalty

    return Of(penalised, model=model)


def buffer(size):
    return nn.Buffer(torch.zeros(size), persistent=False)


ZERO = torch.zeros(0)
STEADY = {  # none of them moves state
    "a table that grows once": lambda: Net(
        rotates, table=buffer(0), length=0, angles=ZERO
    ),
    "a buffer that is filled once": lambda: Net(fills, table=buffer(FEATURES)),
}

COUNT_SHIFTED = count_labels(shifted=True)
SILENT = {
    "a mean": loss_of(in_a_def),
    "ignored labels, counted": loss_of(in_a_def, padded, count=count_labels()),
    "a sum in a partial function": loss_of(partial(F.cross_entropy, reduction="sum")),
    "a sum that is called one": loss_of(added_up, reduction="sum"),
    "writes into what it is given": loss_of(
        lambda o, t: F.cross_entropy(o.mul_(2), t.clamp_(0))
    ),
    "a penalty that is shared out": penalised(share=True),
    "one row without a label, counted": loss_of(
        in_a_def, without_first(), accum=8, count=count_labels()
    ),
    "in a module, counted": own_loss(OwnLoss, tokens(), count=COUNT_SHIFTED),
    "dropout": loss_of(with_dropout, VALUES, reduction="sum"),
    "numbers from one's own generator": loss_of(with_own_generator, VALUES),
    **{
        f"a language model with {name}, counted": own_loss(
            make, tokens(), count=COUNT_SHIFTED
        )
        for name, make in LANGUAGE_MODELS.items()
    },
    "masked by Python": case_of(net(masked_by_python)),
    "masked by NumPy": case_of(net(masked_by_numpy)),
    "a reentrant checkpoint": case_of(
        net(recomputes, partial(nn.Linear, FEATURES, FEATURES))
    ),
    "padding": case_of(
        net(lambda net, rows: net.linear(rows.sum(1))),
        Rows(
            [row[: 2 + i % 4] for i, row in enumerate(SEQUENCES)],
            partial(pad_sequence, batch_first=True),
        ),
    ),
    "rows in another dimension": case_of(
        net(lambda net, rows: net.linear(rows).transpose(0, 1).log_softmax(-1)),
        SEQUENCES,
        LABELS[:, None] % 2 + 1,
        criterion=ctc,
    ),
    "a number that no loss reads": case_of(
        net(with_balance), criterion=lambda o, t: F.mse_loss(o[0], t), whole_batch=True
    ),
    **{
        f"{name}, {accum} sub-steps{', whole_batch' * whole}": case_of(
            make, accum=accum, whole_batch=whole
        )
        for name, make in STEADY.items()
        for accum in (1, 3)
        for whole in (False, True)
    },
    # A sum over rows is that of the micro-batches' sums, whatever the loss.
    "the gradient of a sum, injected": case_of(
        net(balancing(lambda gates: 0.01 * gates.square().sum()))
    ),
    "the gradient of a mean, returned in place of injected": case_of(
        net(lambda net, rows: (net.linear(rows), net.linear(rows).square().mean())),
        criterion=balanced,
    ),
    "a penalty on each row's gradient": case_of(
        net(with_inputs), criterion=penalty_of_rows
    ),
    "a module that holds the model": Case(EXPERT, LABELLED, penalising),
}


@pytest.mark.draws
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", one_of_each(SILENT))
def test_right_program_is_silent(devices, name):
    case = SILENT[name]
    with (
        ScatterOnceParallel(
            case.build(), case.accum, devices(2), **case.engine
        ) as engine,
        seeded(0),
    ):
        for _ in range(9 if "whole_batch" in case.options else 4):
            train(engine, case)


# --- told, and exact ---


@pytest.mark.filterwarnings("error")
def test_hook_values_read_by_own_replica(devices):
    """It was another replica's in 1 to 5 of 20 steps, without a word. In turn, it is
    exact.
    """
    model, box = mlp(), {}

    def hook(_, __, output):
        box["feature"] = output
        time.sleep(0.01)  # another replica's would be there

    def criterion(output, targets):
        return F.cross_entropy(output, targets) + box["feature"].square().mean()

    model[0].register_forward_hook(hook)
    with ScatterOnceParallel(model, 3, devices(3)) as engine:
        with pytest.warns(
            UserWarning,
            match="criterion.*reads a value that forward passes leave behind",
        ):
            engine.forward_backward(INPUTS, LABELS, criterion)
        for _ in range(4):
            assert_step(engine, INPUTS, LABELS, criterion)
        with pytest.raises(
            ValueError, match="If a hook keeps a tensor for the criterion"
        ):
            engine.forward_backward(INPUTS, LABELS, criterion, whole_batch=True)
    with ScatterOnceParallel(model, 2, ["cpu"]) as engine:  # there is no other replica
        assert_step(engine, INPUTS, LABELS, criterion)


@pytest.mark.filterwarnings("ignore:.*reads a value that forward passes leave behind")
def test_checkpoint_writes_hook_values_in_own_turn(devices):
    """A checkpoint calls the layer again in the backward pass, and the hook writes."""
    layers, box = mlp(), {}
    model = Of(
        lambda net, rows: checkpoint(net.net, rows, use_reentrant=False), net=layers
    )

    def hook(_, __, output):
        box["feature"] = output
        time.sleep(0.01)  # a backward pass of another replica would write here

    def criterion(output, targets):
        return F.cross_entropy(output, targets) + box["feature"].square().mean()

    layers[0].register_forward_hook(hook)
    with ScatterOnceParallel(model, 3, devices(2)) as engine:
        for _ in range(3):
            assert_step(engine, INPUTS, LABELS, criterion)
