"""Batches that are not tensors with rows alone, and cuts that are not even: ``CASES``,
by name.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from harness.agree import BROAD, EVERY_WAY, USUAL, Case
from harness.models import CLASSES, FEATURES, Columns, Of, Returns, mlp
from harness.oracle import randint, randn
from scatterpar import Replicated, Rows, count_labels

LENGTHS = [3, 5, 1, 4, 2, 5, 3, 9, 1, 6, 2]
LABELS = randint(CLASSES, len(LENGTHS))
TEXTS = []
TAGS = []
for row, length in enumerate(LENGTHS):
    TEXTS.append(randint(9, length, seed=length + row))
    TAGS.append(randint(CLASSES, length, seed=3 * length + row))
WEIGHTS = torch.arange(1.0, 1 + CLASSES).double()
ROWS = randn(7, FEATURES)
SEVEN = LABELS[:7]


class Reader(nn.Module):
    """The mean of a text's words; padding, which is word 9, changes nothing, if it is
    right.
    """

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(10, FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, ids):
        is_word = (ids != 9).unsqueeze(-1)
        scores = self.scores_of_words(ids) * is_word
        return scores.sum(1) / is_word.sum(1)

    def scores_of_words(self, ids):
        hidden = self.words(ids).tanh()
        return self.head(hidden)


class Tagger(Reader):
    """Classes of words."""

    def forward(self, ids):
        return self.scores_of_words(ids).transpose(1, 2)


class Quantizer(nn.Module):
    """Gives the code of every row, the tokens of every row, and its codebook."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(FEATURES, 4)
        self.codebook = nn.Parameter(torch.randn(64, 4))

    def forward(self, rows):
        codes = self.encode(rows)
        tokens = codes.repeat_interleave(3, 0).reshape(len(rows), 3, -1)
        return {"codes": codes, "tokens": tokens, "codebook": self.codebook * 1.0}


def of_codes(outputs, _):
    products = outputs["tokens"].flatten(0, 1) @ outputs["codebook"].T
    distances = products.logsumexp(1)
    codes = outputs["codes"].square().mean()
    spread = outputs["codebook"].std(0).sum()
    return distances.std() + codes + spread


def pad(texts):
    return pad_sequence(texts, batch_first=True, padding_value=9)


def pad_tags(tags):
    return pad_sequence(tags, batch_first=True, padding_value=-100)


PADDED = pad(TEXTS)
PADDED_TAGS = pad_tags(TAGS)

# --- targets ---

NESTED = {
    "classes": SEVEN,
    "soft": (randn(7, CLASSES).softmax(1),),
    "factor": torch.tensor(0.5).double(),
    "names": "not a tensor",
}
IGNORED = SEVEN.clone()
IGNORED[:3] = -100


def nested_targets(output, targets):
    (soft,) = targets["soft"]
    hard_loss = F.cross_entropy(output, targets["classes"])
    soft_loss = F.cross_entropy(output, soft)
    return hard_loss + targets["factor"] * soft_loss


def without_rows(output, target):
    if target is None:
        target = 1.0
    return (output - target).square().mean()


def weighted_cross_entropy(_):
    return nn.CrossEntropyLoss(weight=WEIGHTS)


# --- outputs ---


def with_side_head():
    return Returns(lambda logits, _: {"main": logits, "side": [logits * 2]})


def of_two_heads(outputs, targets):
    main = F.cross_entropy(outputs["main"], targets)
    side = F.cross_entropy(outputs["side"][0], targets)
    return main + 0.4 * side


def with_own_loss():
    def forward(model, ids, labels):
        loss = F.cross_entropy(model.reader(ids), labels)
        return {"loss": loss}

    return Of(forward, reader=Reader())


def own_loss(output, _):
    return output["loss"]


# --- a value that every micro-batch gets whole ---

TABLE = randn(7, 7, seed=3)
SHIFT = randn(1, 7, seed=4)
SQUARE = randn(7, 7)


def multiplied_by_table():
    """It writes to its copy of the table."""

    def forward(model, rows, table, options):
        shifted = rows + options["shift"]
        return model.linear(shifted @ table.mul_(2))

    return Of(forward, linear=nn.Linear(7, CLASSES))


# --- several batches, and rows that are joined ---

BATCHES = []  # each of another length
LABELS_OF_BATCHES = []
for rows, length in ((4, 5), (3, 2), (1, 3)):
    BATCHES.append(randint(9, rows, length, seed=rows))
    LABELS_OF_BATCHES.append(randint(CLASSES, rows, seed=rows))
WINDOW = Rows.from_batches(BATCHES)
ALL_LABELS = torch.cat(LABELS_OF_BATCHES)
ALL_TEXTS = pad([text for batch in BATCHES for text in batch])

PARTS = []
PART_LABELS = []  # some of them ignored
for length in (3, 9, 2, 7, 5, 1, 8):
    part = torch.arange(length) % CLASSES
    PARTS.append(part)
    PART_LABELS.append(part.where(part < 3, -100))


def embedded():
    return nn.Sequential(nn.Embedding(CLASSES, FEATURES), mlp())


# The column "only".
OF_ROWS = ("engine", "loss", "check", "whole batch", "guarded", "inference")
BY_ROW = ("engine", "loss", "check", "guarded")  # outputs of other lengths
OF_PAIRS = (*OF_ROWS, "pair", "guarded pair")
WINDOWS = ("engine", "loss", "whole batch")  # a check takes one batch


def texts(**options):
    """Texts that each micro-batch pads on its own, with a label each."""
    columns = {"only": OF_ROWS, **options}
    batch = Rows(TEXTS, pad), LABELS
    return Case(Reader, batch, plain=(PADDED, LABELS), **columns)


def tags(**options):
    """Texts that each micro-batch pads on its own, with a label per word."""
    batch = Rows(TEXTS, pad), Rows(TAGS, pad_tags)
    plain = PADDED, PADDED_TAGS
    return Case(Tagger, batch, plain=plain, only=BY_ROW, **options)


def window(targets):
    """A window of batches."""
    plain = ALL_TEXTS, ALL_LABELS
    return Case(Reader, (WINDOW, targets), plain=plain, only=WINDOWS)


CASES = {
    "nested targets": Case(
        mlp, (ROWS, NESTED), lambda _: nested_targets, default_run=BROAD
    ),
    # One label for all, as a discriminator gets: the rows are those of the outputs.
    "a number for all": Case(
        mlp, (ROWS, 1.0), lambda _: without_rows, default_run=USUAL
    ),
    "no targets": Case(mlp, (ROWS, None), lambda _: without_rows),
    "several outputs": Case(with_side_head, (ROWS, SEVEN), lambda _: of_two_heads),
    "the module's own losses": Case(
        with_own_loss,
        ((PADDED, LABELS), LABELS),
        lambda _: own_loss,
        unless=("whole batch", "inference"),
    ),
    "texts": texts(default_run=EVERY_WAY),
    "tags": tags(),
    "tags, counted": tags(options={"count": count_labels()}),
    "replicated, of the batch's size": Case(
        multiplied_by_table,
        ((SQUARE, Replicated(TABLE), Replicated({"shift": SHIFT})), SEVEN),
        plain=((SQUARE, TABLE, {"shift": SHIFT}), SEVEN),
        only=OF_PAIRS,
    ),
    "a window of batches, joined targets": window(ALL_LABELS),
    "a window of batches, own targets": window(Rows.from_batches(LABELS_OF_BATCHES)),
    "a window, ignored and weighted": Case(
        mlp,
        (
            Rows.from_batches(ROWS.split([4, 3])),
            Rows.from_batches(IGNORED.split([4, 3])),
        ),
        weighted_cross_entropy,
        plain=(ROWS, IGNORED),
        only=WINDOWS,
    ),
    "concatenated rows": Case(  # which have several labels each
        embedded,
        (Rows(PARTS, torch.cat), Rows(PART_LABELS, torch.cat)),
        plain=(torch.cat(PARTS), torch.cat(PART_LABELS)),
        only=("engine", "loss", "check"),
    ),
    "rows along dimension 1": Case(
        Columns,
        (randn(FEATURES, 11), randn(CLASSES, 11)),
        lambda _: nn.MSELoss(),
        engine={"dim": 1},
        only=("engine", "loss", "check", "whole batch", "guarded", "inference", "pair"),
    ),
    "a codebook of 64 and 32 rows": Case(
        Quantizer,
        (randn(32, FEATURES), None),
        lambda _: of_codes,
        options={"whole_batch": True},
        only=("engine", "loss", "check", "inference"),
        default_run=(*USUAL, "2 ranks"),
    ),
}
