"""Batches that are not tensors with rows alone, and cuts that are not even: ``CASES``,
by name.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from harness.agree import EVERY_WAY, USUAL, Case
from harness.models import CLASSES, FEATURES, Columns, Of, Returns, mlp
from harness.oracle import randint, randn
from scatterpar import Replicated, Rows, count_labels

LENGTHS = [3, 5, 1, 4, 2, 5, 3, 9, 1, 6, 2]
LABELS = randint(CLASSES, len(LENGTHS))
TEXTS = [randint(9, n, seed=n + i) for i, n in enumerate(LENGTHS)]
TAGS = [randint(CLASSES, n, seed=3 * n + i) for i, n in enumerate(LENGTHS)]
WEIGHTS = torch.arange(1.0, 1 + CLASSES).double()
ROWS, SEVEN = randn(7, FEATURES), LABELS[:7]


class Reader(nn.Module):
    """The mean of a text's words; padding, which is word 9, changes nothing, if it is
    right.
    """

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(10, FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, ids):
        known = (ids != 9).unsqueeze(-1)
        return (self.head(self.words(ids).tanh()) * known).sum(1) / known.sum(1)


class Tagger(Reader):
    """Classes of words."""

    def forward(self, ids):
        return self.head(self.words(ids).tanh()).transpose(1, 2)


class Quantizer(nn.Module):
    """Gives the code of every row, a flat list of tokens of every row, and its
    codebook.
    """

    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(FEATURES, 4)
        self.codebook = nn.Parameter(torch.randn(64, 4))

    def forward(self, rows):
        codes = self.encode(rows)
        tokens = codes.repeat_interleave(3, 0)
        return {"codes": codes, "tokens": tokens, "codebook": self.codebook * 1.0}


def of_codes(outputs, _):
    distances = (outputs["tokens"] @ outputs["codebook"].T).logsumexp(1)
    return (
        distances.std()
        + outputs["codes"].square().mean()
        + outputs["codebook"].std(0).sum()
    )


def pad(texts):
    return pad_sequence(texts, batch_first=True, padding_value=9)


def pad_tags(tags):
    return pad_sequence(tags, batch_first=True, padding_value=-100)


NESTED = {
    "classes": SEVEN,
    "soft": (randn(7, CLASSES).softmax(1),),
    "factor": torch.tensor(0.5).double(),
    "names": "not a tensor",
}


def window():
    """Batches of other lengths each, the labels of each, and all of it as plain torch
    has it.
    """
    batches = [randint(9, n, length, seed=n) for n, length in ((4, 5), (3, 2), (1, 3))]
    labels = [randint(CLASSES, len(batch), seed=len(batch)) for batch in batches]
    return (
        batches,
        labels,
        (pad([row for batch in batches for row in batch]), torch.cat(labels)),
    )


def nested_targets(output, targets):
    classes, (soft,) = targets["classes"], targets["soft"]
    return F.cross_entropy(output, classes) + targets["factor"] * F.cross_entropy(
        output, soft
    )


def without_rows(output, target):
    return (output - (1.0 if target is None else target)).square().mean()


def of_two_heads(outputs, targets):
    side = F.cross_entropy(outputs["side"][0], targets)
    return F.cross_entropy(outputs["main"], targets) + 0.4 * side


WINDOW = window()
TABLE, SHIFT = randn(7, 7, seed=3), randn(1, 7, seed=4)
IGNORED = SEVEN.clone()
IGNORED[:3] = -100
PARTS = [torch.arange(n) % CLASSES for n in (3, 9, 2, 7, 5, 1, 8)]
PART_LABELS = [part.where(part < 3, -100) for part in PARTS]
PADDED, PADDED_TAGS = pad(TEXTS), pad_tags(TAGS)
OF_ROWS = ("engine", "loss", "check", "whole batch", "by cost", "guarded", "inference")
BY_ROW = ("engine", "loss", "check", "by cost", "guarded")  # outputs of other lengths
OF_PAIRS = (*OF_ROWS, "pair", "guarded pair")
WINDOWS = ("engine", "loss", "whole batch")  # a check takes one batch


def texts(criterion=None, tagged=False, **more):
    """Texts that each micro-batch pads on its own, with a label each or
    one per word.
    """
    given = {"criterion": lambda _: criterion} if criterion else {}
    return Case(
        Tagger if tagged else Reader,
        (Rows(TEXTS, pad), Rows(TAGS, pad_tags) if tagged else LABELS),
        plain=(PADDED, PADDED_TAGS if tagged else LABELS),
        **(given | {"only": OF_ROWS} | more),
    )


CASES = {
    "nested targets": Case(mlp, (ROWS, NESTED), lambda _: nested_targets),
    # One label for all, as a discriminator gets: the rows are those of the outputs.
    "a number for all": Case(mlp, (ROWS, 1.0), lambda _: without_rows),
    "no targets": Case(mlp, (ROWS, None), lambda _: without_rows),
    "several outputs": Case(
        lambda: Returns(lambda logits, _: {"main": logits, "side": [logits * 2]}),
        (ROWS, SEVEN),
        lambda _: of_two_heads,
    ),
    "the module's own losses": Case(
        lambda: Of(
            lambda m, ids, labels: {"loss": F.cross_entropy(m.reader(ids), labels)},
            reader=Reader(),
        ),
        ((PADDED, LABELS), LABELS),
        lambda _: lambda output, _: output["loss"],
        unless=("whole batch", "by cost", "inference"),
    ),
    "texts": texts(default_run=EVERY_WAY),
    "texts by length": texts(
        engine={"micro_batch_cost": 10},
        options={"costs": LENGTHS},
        only=("engine", "loss", "check", "inference"),
    ),
    "tags": texts(tagged=True, only=BY_ROW),
    "tags, counted": texts(tagged=True, only=BY_ROW, options={"count": count_labels()}),
    "replicated, of the batch's size": Case(
        lambda: Of(
            lambda m, rows, table, options: m.linear(
                (rows + options["shift"]) @ table.mul_(2)
            ),
            linear=nn.Linear(7, CLASSES),
        ),
        ((randn(7, 7), Replicated(TABLE), Replicated({"shift": SHIFT})), SEVEN),
        plain=((randn(7, 7), TABLE, {"shift": SHIFT}), SEVEN),
        only=OF_PAIRS,
    ),
    **{
        f"a window of batches, {how}": Case(
            Reader,
            (Rows.from_batches(WINDOW[0]), targets),
            plain=WINDOW[2],
            only=WINDOWS,
        )
        for how, targets in (
            ("joined targets", WINDOW[2][1]),
            ("own targets", Rows.from_batches(WINDOW[1])),
        )
    },
    "a window, ignored and weighted": Case(
        mlp,
        (
            Rows.from_batches(ROWS.split([4, 3])),
            Rows.from_batches(IGNORED.split([4, 3])),
        ),
        lambda _: nn.CrossEntropyLoss(weight=WEIGHTS),
        plain=(ROWS, IGNORED),
        only=WINDOWS,
    ),
    "concatenated rows": Case(  # which have several labels each, some of them ignored
        lambda: nn.Sequential(nn.Embedding(CLASSES, FEATURES), mlp()),
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
        only=("engine", "loss", "check", "by cost", "inference"),
        default_run=(*USUAL, "2 ranks"),
    ),
}
