"""Rows of unequal length: micro-batches by cost beside other ways to cut and to order
them.
"""

import copy
import statistics
from contextlib import ExitStack

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
    lengths = (
        torch.empty(rows)
        .log_normal_(4.3, 0.8, generator=generator)
        .clamp(8, LONGEST)
        .long()
    )
    texts = [
        torch.randint(1, 1000, (n,), generator=generator) for n in lengths.tolist()
    ]
    return texts, torch.randint(CLASSES, (rows,), generator=generator), lengths.tolist()


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
    with ScatterOnceParallel(
        module, device_ids=["cpu"] * replicas, micro_batch_size=SIZE
    ) as plain:
        ways = {
            f"engine, {name}": (plain.plan(len(lengths)), order)
            for name, order in orders(lengths).items()
        }
    with ScatterOnceParallel(
        module, device_ids=["cpu"] * replicas, micro_batch_cost=TOKENS
    ) as engine:
        ways[BY_COST] = engine.plan(len(lengths), costs=lengths), range(len(lengths))
    return {
        name: [
            [
                [order[row] for row in plan.rows_of(share.replica, k)]
                for k in range(len(share.micro_batches))
            ]
            for share in plan.shares
        ]
        for name, (plan, order) in ways.items()
    }


def test_padding(publish):
    _, _, lengths = batch(ROWS)
    rows = []
    for replicas in (2, 4):
        for name, shares in cut(lengths, replicas).items():
            loads = [
                sum(len(p) * max(lengths[row] for row in p) for p in own)
                for own in shares
            ]
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


def test_time(benchmark, publish, quick):
    texts, labels, lengths = batch(32 if quick else ROWS)
    model = Reader()
    models, contenders = {}, {}

    def loop(module, order):
        for start in range(0, len(order), SIZE):
            few = order[start : start + SIZE]
            loss = LOSS(module(pad([texts[row] for row in few])), labels[few])
            (loss * len(few) / len(order)).backward()

    with ExitStack() as stack:

        def engine_of(name, **how):
            models[name] = copy.deepcopy(model)
            return stack.enter_context(
                ScatterOnceParallel(models[name], device_ids=["cpu"] * 2, **how)
            )

        engine = engine_of(BY_COST, micro_batch_cost=TOKENS)
        rows = Rows(texts, pad)
        contenders[BY_COST] = lambda: engine.forward_backward(
            rows, labels, LOSS, costs=lengths
        )
        for way, order in orders(lengths).items():
            plain = engine_of(f"engine, {way}", micro_batch_size=SIZE)
            args = Rows([texts[row] for row in order], pad), labels[order], LOSS
            contenders[f"engine, {way}"] = lambda e=plain, a=args: e.forward_backward(
                *a
            )
            models[f"plain loop, {way}"] = copy.deepcopy(model)
            contenders[f"plain loop, {way}"] = (
                lambda m=models[f"plain loop, {way}"], o=order: loop(m, o)
            )

        def step(name):
            models[name].zero_grad()
            return timed(contenders[name])

        first = None
        for name, run in contenders.items():
            run()
            own = torch.cat([p.grad.flatten() for p in models[name].parameters()])
            first = own if first is None else first
            torch.testing.assert_close(own, first, rtol=1e-3, atol=1e-5)
        steps = {name: lambda name=name: step(name) for name in contenders}
        seconds = interleaved(benchmark, steps, 1 if quick else 7)
    rows = [
        [name, f"{statistics.median(times):.2f}", str(ratio(times, seconds[BY_COST]))]
        for name, times in seconds.items()
    ]
    table = Table(["two replicas on two cores", "s, median", "time / by cost"], rows)
    publish("time", table, {"seconds": seconds})
