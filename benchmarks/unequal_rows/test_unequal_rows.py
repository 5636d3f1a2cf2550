"""Rows of unequal length: micro-batches by cost beside other ways to cut and to order
them.
"""

import copy
import statistics
from contextlib import ExitStack
from functools import partial

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers.trainer_pt_utils import get_length_grouped_indices

from benchmarks.tables import Table
from benchmarks.timing import interleaved, ratio, timed
from scatterpar import Rows, ScatterOnceParallel

ROWS, TOKENS, LONGEST, CLASSES = 256, 4096, 512, 4
# rows of a micro-batch that holds TOKENS, however long the rows are
SIZE = TOKENS // LONGEST
BY_COST, AS_THEY_COME = "engine, `micro_batch_cost=4096`", "engine, rows as they come"
LOSS = nn.CrossEntropyLoss()


class Reader(nn.Module):
    """A transformer's encoder over words, and a class for the mean of those that are no
    padding.
    """

    def __init__(self, width=64, layers=2):
        super().__init__()
        self.words = nn.Embedding(1000, width, padding_idx=0)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, ids):
        padded = ids == 0
        hidden = self.encoder(self.words(ids), src_key_padding_mask=padded)
        known = (~padded).unsqueeze(-1)
        return self.head((hidden * known).sum(1) / known.sum(1))


def pad(texts):
    return pad_sequence(texts, batch_first=True)


def batch(rows):
    """Texts of 8 to 512 words, log-normal, and their classes."""
    generator = torch.Generator().manual_seed(0)
    logarithms = torch.empty(rows).log_normal_(4.3, 0.8, generator=generator)
    lengths = logarithms.clamp(8, LONGEST).long().tolist()
    texts = [torch.randint(1, 1000, (n,), generator=generator) for n in lengths]
    labels = torch.randint(CLASSES, (rows,), generator=generator)
    return texts, labels, lengths


def orders(lengths):
    """The rows as they come, sorted by hand, and as transformers' ``group_by_length``
    has them.
    """
    generator = torch.Generator().manual_seed(0)
    grouped = get_length_grouped_indices(lengths, SIZE, generator=generator)
    rows = range(len(lengths))
    return {
        "rows as they come": [*rows],
        "sorted by hand": sorted(rows, key=lengths.__getitem__),
        "`group_by_length`": [int(row) for row in grouped],
    }


def cut(lengths, replicas):
    """The rows of each micro-batch, by replica, of each way."""
    module = nn.Linear(1, 1)
    devices = ["cpu"] * replicas
    ways = {}
    by_size = ScatterOnceParallel(module, device_ids=devices, micro_batch_size=SIZE)
    with by_size as engine:
        plan = engine.plan(len(lengths))
        for name, order in orders(lengths).items():
            ways[f"engine, {name}"] = numbers_of_rows(plan, order)
    by_cost = ScatterOnceParallel(module, device_ids=devices, micro_batch_cost=TOKENS)
    with by_cost as engine:
        plan = engine.plan(len(lengths), costs=lengths)
        ways[BY_COST] = numbers_of_rows(plan, range(len(lengths)))
    return ways


def numbers_of_rows(plan, order):
    """For each share, for each micro-batch: the numbers of rows that lie in ``order``."""
    shares = []
    for share in plan.shares:
        micro_batches = []
        for number in range(len(share.micro_batches)):
            micro_batches.append([order[row] for row in share.rows_of(number)])
        shares.append(micro_batches)
    return shares


def padded_tokens(micro_batches, lengths):
    """The tokens that a replica computes: each text is as long as its longest one."""
    total = 0
    for rows in micro_batches:
        total += len(rows) * max(lengths[row] for row in rows)
    return total


def test_padding(publish):
    _, _, lengths = batch(ROWS)
    rows = []
    for replicas in (2, 4):
        for name, shares in cut(lengths, replicas).items():
            loads = [padded_tokens(share, lengths) for share in shares]
            steps = max(map(len, shares))
            padded = f"{sum(loads) / sum(lengths):.2f}"
            even = f"{max(loads) * replicas / sum(loads):.3f}"
            rows.append([name, replicas, padded, steps, even, f"{max(loads):,}"])
    columns = [
        "way",
        "replicas",
        "padded / real tokens",
        "sub-steps of a replica",
        "largest load / mean",
        "tokens of the largest load",
    ]
    publish("padding", Table(columns, rows), {"lengths": lengths})


def plain_step(module, texts, labels, order):
    """Accumulate gradients in plain torch, over the rows in this order."""
    for start in range(0, len(order), SIZE):
        rows = order[start : start + SIZE]
        loss = LOSS(module(pad([texts[row] for row in rows])), labels[rows])
        (loss * len(rows) / len(order)).backward()


def test_time(benchmark, publish, quick):
    texts, labels, lengths = batch(32 if quick else ROWS)
    model = Reader()
    models = {}
    calls = {}
    with ExitStack() as stack:

        def engine_of(name, **options):
            models[name] = copy.deepcopy(model)
            engine = ScatterOnceParallel(
                models[name], device_ids=["cpu"] * 2, **options
            )
            return stack.enter_context(engine)

        by_cost = engine_of(BY_COST, micro_batch_cost=TOKENS)
        calls[BY_COST] = partial(
            by_cost.forward_backward, Rows(texts, pad), labels, LOSS, costs=lengths
        )
        for way, order in orders(lengths).items():
            name = f"engine, {way}"
            engine = engine_of(name, micro_batch_size=SIZE)
            rows = Rows([texts[row] for row in order], pad)
            calls[name] = partial(engine.forward_backward, rows, labels[order], LOSS)
            name = f"plain loop, {way}"
            models[name] = copy.deepcopy(model)
            calls[name] = partial(plain_step, models[name], texts, labels, order)

        assert_same_gradients(calls, models)

        def step(name):
            models[name].zero_grad()
            return timed(calls[name])

        steps = {name: partial(step, name) for name in calls}
        seconds = interleaved(benchmark, steps, 1 if quick else 7)
    rows = []
    for name, times in seconds.items():
        beside = str(ratio(times, seconds[BY_COST]))
        rows.append([name, f"{statistics.median(times):.2f}", beside])
    table = Table(["two replicas on two cores", "s, median", "time / by cost"], rows)
    publish("time", table, {"seconds": seconds})


def assert_same_gradients(calls, models):
    """Each way computes the gradient of the first one, in float32."""
    expected = None
    for name, call in calls.items():
        call()
        gradients = [parameter.grad for parameter in models[name].parameters()]
        joined = torch.cat([gradient.flatten() for gradient in gradients])
        if expected is None:
            expected = joined
        torch.testing.assert_close(joined, expected, rtol=1e-3, atol=1e-5)
