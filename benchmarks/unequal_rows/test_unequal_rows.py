"""What are micro-batches by cost worth for rows of unequal length?

``python -m benchmarks unequal_rows`` counts padding, and times steps in turns::

    by cost          engine.forward_backward(Rows(texts, pad), labels, costs=lengths)
    engine, ORDER    engine.forward_backward(Rows(texts in this order, pad), labels)
    loop, ORDER      for 8 rows at a time: (loss * rows / all rows).backward()

Orders: as the rows come, sorted by hand, and ``group_by_length`` of transformers.
"""

import copy
import statistics
from contextlib import ExitStack
from functools import partial

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers.trainer_pt_utils import get_length_grouped_indices

from benchmarks.peers import Peer
from benchmarks.tables import Table
from benchmarks.timing import interleaved, ratio
from scatterpar import Rows, ScatterOnceParallel

ROWS = 256
LONGEST = 512  # tokens
CLASSES = 4
TOKENS = 4096  # of a micro-batch at most, with padding
# Rows of a micro-batch that has TOKENS, however long the rows are.
SIZE = TOKENS // LONGEST
BY_COST = f"engine, `micro_batch_cost={TOKENS}`"
LOSS = nn.CrossEntropyLoss()


class Reader(nn.Module):
    """A transformer's encoder, and a class for the mean over words without padding."""

    def __init__(self, width=64, layers=2):
        super().__init__()
        self.words = nn.Embedding(1000, width, padding_idx=0)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, ids):
        padded = ids == 0
        hidden = self.encoder(self.words(ids), src_key_padding_mask=padded)
        is_word = (~padded).unsqueeze(-1)
        mean = (hidden * is_word).sum(1) / is_word.sum(1)
        return self.head(mean)


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
    """The numbers of the rows in each order."""
    generator = torch.Generator().manual_seed(0)
    grouped = get_length_grouped_indices(lengths, SIZE, generator=generator)
    rows = list(range(len(lengths)))
    return {
        "rows as they come": rows,
        "sorted by hand": sorted(rows, key=lengths.__getitem__),
        "`group_by_length`": [int(row) for row in grouped],
    }


def cut(lengths, replicas):
    """The rows of each micro-batch, by replica, by way."""
    module = nn.Linear(1, 1)
    devices = ["cpu"] * replicas
    ways = {}
    with ScatterOnceParallel(
        module, device_ids=devices, micro_batch_size=SIZE
    ) as engine:
        plan = engine.plan(len(lengths))
        for name, order in orders(lengths).items():
            ways[f"engine, {name}"] = numbers_of_rows(plan, order)
    with ScatterOnceParallel(
        module, device_ids=devices, micro_batch_cost=TOKENS
    ) as engine:
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
            largest = max(loads)
            sub_steps = max(map(len, shares))
            padded = f"{sum(loads) / sum(lengths):.2f}"
            over_mean = f"{largest * replicas / sum(loads):.3f}"
            cells = [padded, sub_steps, over_mean, f"{largest:,}"]
            rows.append([name, replicas, *cells])
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
        inputs = pad([texts[row] for row in rows])
        loss = LOSS(module(inputs), labels[rows])
        (loss * len(rows) / len(order)).backward()


def test_time(benchmark, publish, quick):
    texts, labels, lengths = batch(32 if quick else ROWS)
    model = Reader()
    contenders = {}
    with ExitStack() as stack:

        def engine_of(**options):
            module = copy.deepcopy(model)
            engine = ScatterOnceParallel(module, device_ids=["cpu"] * 2, **options)
            return stack.enter_context(engine)

        engine = engine_of(micro_batch_cost=TOKENS)
        rows = Rows(texts, pad)
        run = partial(engine.forward_backward, rows, labels, LOSS, costs=lengths)
        contenders[BY_COST] = Peer(engine.module, run)
        for name, order in orders(lengths).items():
            engine = engine_of(micro_batch_size=SIZE)
            rows = Rows([texts[row] for row in order], pad)
            run = partial(engine.forward_backward, rows, labels[order], LOSS)
            contenders[f"engine, {name}"] = Peer(engine.module, run)
            module = copy.deepcopy(model)
            run = partial(plain_step, module, texts, labels, order)
            contenders[f"plain loop, {name}"] = Peer(module, run)
        assert_same_gradients(contenders)
        steps = {name: contender.step for name, contender in contenders.items()}
        seconds = interleaved(benchmark, steps, 1 if quick else 7)
    rows = []
    for name, times in seconds.items():
        beside = str(ratio(times, seconds[BY_COST]))
        rows.append([name, f"{statistics.median(times):.2f}", beside])
    table = Table(["two replicas on two cores", "s, median", "time / by cost"], rows)
    publish("time", table, {"seconds": seconds})


def assert_same_gradients(contenders):
    """Each contender computes the gradient of the first one, in float32."""
    expected = contenders[BY_COST].gradient()
    for contender in contenders.values():
        gradient = contender.gradient()
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-5)
