"""What an evaluation gains from two devices: the forward pass waits, as for a GPU.

::

    stock      the library's own loop, on one device
    engine     the same evaluation, on two virtual devices

A wait releases the GIL, as a kernel does that computes. The rest is Python, which
replicas run in turn.
"""

import logging
import statistics
import tempfile
import threading
import time
import warnings
from importlib.util import find_spec

import pytest
import torch
from harness.optional import import_torchvision_first
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.tables import Table
from benchmarks.timing import interleaved, ratio, timed
from scatterpar import ScatterOnceParallel

DEVICES = ("cpu:0", "cpu:1")
WAITS = {"5 ms": 0.005, "20 ms": 0.020}
BATCHES = 60
FEW_BATCHES = 30  # unless results are written
ROWS = 4  # of a batch
TOKENS = 5  # forward passes of a generated text
NEEDED = ("fastai", "lightning", "transformers")


class Waiting(nn.Module):
    """A model whose forward pass waits.

    Numbers that it wrote would be state, which an evaluation puts back, and for which
    it leaves groups. So it counts by semaphores, which no evaluation looks at.

    Attributes:
        running: one for each forward pass that runs.
        most_at_once: as many as forward passes have run at the same time.
    """

    running = threading.Semaphore(0)
    most_at_once = threading.Semaphore(0)
    lock = threading.Lock()

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds
        self.layer = nn.Linear(4, 3)

    def forward(self, rows):
        with self.lock:
            self.running.release()
            if self.running._value > self.most_at_once._value:
                self.most_at_once.release()
        time.sleep(self.seconds)
        self.running.acquire()
        return self.layer(rows)

    def generate(self, rows):
        for _ in range(TOKENS):
            scores = self(rows)
        return scores.argmax(1)


class WithLoss(nn.Module):
    """A model as ``transformers.Trainer`` takes it."""

    main_input_name = "rows"

    def __init__(self, seconds):
        super().__init__()
        self.waiting = Waiting(seconds)

    def forward(self, rows, labels):
        scores = self.waiting(rows)
        # Of a text, whose labels are all equal here, the first.
        labels = labels.view(len(rows), -1)[:, 0]
        loss = nn.functional.cross_entropy(scores, labels)
        return {"loss": loss, "logits": scores}

    def generate(self, rows, labels, **_):
        words = self.waiting.generate(rows)
        return words[:, None].expand(-1, TOKENS)


def dataset(num_batches):
    labels = [torch.tensor(number % 3) for number in range(num_batches * ROWS)]
    return [{"rows": torch.randn(4), "labels": label} for label in labels]


def trainers(seconds, rows):
    import transformers

    return evaluations_of(transformers.Trainer, WithLoss(seconds), rows)


def generating_trainers(seconds, rows):
    import transformers

    model = WithLoss(seconds)
    model.generation_config = transformers.GenerationConfig(max_length=TOKENS)
    # Several passes each, and labels as texts have them.
    few = []
    for row in rows[: len(rows) // TOKENS]:
        few.append({**row, "labels": row["labels"].expand(TOKENS)})
    kind = transformers.Seq2SeqTrainer
    return evaluations_of(kind, model, few, predict_with_generate=True)


def evaluations_of(kind, model, rows, **arguments):
    """``evaluate`` of a trainer, and of the same one on two devices."""
    import transformers

    from scatterpar.integrations.transformers import ScatterOnceMixin

    transformers.logging.set_verbosity_error()
    ours = type("Ours", (ScatterOnceMixin, kind), {})
    arguments_kind = transformers.TrainingArguments
    metrics = None
    if kind is transformers.Seq2SeqTrainer:  # it generates for metrics alone
        arguments_kind = transformers.Seq2SeqTrainingArguments
        metrics = no_metrics
    evaluations = []
    for trainer_kind, options in ((kind, {}), (ours, {"device_ids": DEVICES})):
        args = arguments_kind(
            tempfile.mkdtemp(),
            per_device_eval_batch_size=ROWS,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            **arguments,
        )
        trainer = trainer_kind(
            model, args, eval_dataset=rows, compute_metrics=metrics, **options
        )
        trainer.remove_callback(transformers.PrinterCallback)
        evaluations.append(trainer.evaluate)
    return evaluations


def no_metrics(prediction):
    return {}


def lightning_trainers(seconds, rows):
    import lightning.pytorch as pl

    from scatterpar.integrations.lightning import ScatterOnceStrategy

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.waiting = Waiting(seconds)

        def validation_step(self, batch, batch_idx):
            scores = self.waiting(batch["rows"])
            self.log("loss", nn.functional.cross_entropy(scores, batch["labels"]))

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    evaluations = []
    strategies = {"devices": 1}, {"strategy": ScatterOnceStrategy(DEVICES)}
    for options in strategies:
        trainer = pl.Trainer(
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
            **options,
        )
        module = Module()
        loader = DataLoader(rows, ROWS)
        evaluations.append(validation(trainer, module, loader))
    return evaluations


def validation(trainer, module, loader):
    return lambda: trainer.validate(module, loader, verbose=False)


def learners(seconds, rows):
    from fastai.vision.all import DataLoader, DataLoaders, Learner

    from scatterpar.integrations.fastai import ScatterOnce

    pairs = [(row["rows"], row["labels"]) for row in rows]
    evaluations = []
    for callbacks in ([], [ScatterOnce(DEVICES)]):
        loaders = DataLoaders(DataLoader(pairs, bs=ROWS), DataLoader(pairs, bs=ROWS))
        criterion = nn.CrossEntropyLoss()
        learner = Learner(loaders, Waiting(seconds), loss_func=criterion, cbs=callbacks)
        evaluations.append(silent_validation(learner))
    return evaluations


def silent_validation(learner):
    def validate():
        with learner.no_bar(), learner.no_logging():
            return learner.validate()

    return validate


def generations(seconds, rows):
    model = Waiting(seconds).eval()
    engine = ScatterOnceParallel(model, device_ids=DEVICES)
    batches = [torch.stack([row["rows"] for row in rows[:ROWS]])] * (len(rows) // ROWS)
    batches = batches[: max(1, len(batches) // TOKENS)]  # several passes each

    @torch.no_grad()
    def stock():
        for batch in batches:
            model.generate(batch)
            model.generate(batch)

    def generate():
        for batch in batches:
            engine.map(model.generate, torch.cat([batch, batch]))

    return stock, generate


LOOPS = {
    "`Trainer.evaluate`": trainers,
    "Lightning's `validate`": lightning_trainers,
    "fastai's `validate`": learners,
    "`engine.map(model.generate, ...)`": generations,
    "`Seq2SeqTrainer.evaluate`, `predict_with_generate`": generating_trainers,
}


@pytest.mark.skipif(
    not all(map(find_spec, NEEDED)), reason="needs the environment of other loops"
)
def test_evaluation(benchmark, publish, quick, writes, rounds):
    import_torchvision_first()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = dataset(4 if quick else BATCHES if writes else FEW_BATCHES)
    contenders = {}
    most_at_once = dict.fromkeys(LOOPS, 0)
    for name, loop in LOOPS.items():
        for words, seconds in WAITS.items():
            stock, engine = loop(seconds, rows)
            contenders[name, words, "stock"] = timing(stock)
            contenders[name, words, "engine"] = timing(engine)
            while Waiting.most_at_once.acquire(blocking=False):
                pass
            engine()
            number = Waiting.most_at_once._value
            most_at_once[name] = max(number, most_at_once[name])
    seconds = interleaved(benchmark, contenders, rounds(11))
    cells = []
    for name in LOOPS:
        row = [name]
        for words in WAITS:
            stock = seconds[name, words, "stock"]
            engine = seconds[name, words, "engine"]
            row.append(f"{ratio(stock, engine).median:.2f}")
        assert most_at_once[name] <= len(DEVICES)
        row.append(str(most_at_once[name]))
        cells.append(row)
    columns = ["evaluation", *(f"forward waits {words}" for words in WAITS)]
    columns.append("forward passes at once")
    medians = {
        " | ".join(key): statistics.median(values) for key, values in seconds.items()
    }
    publish("evaluation", Table(columns, cells), {"rows": cells, "seconds": medians})


def timing(function):
    return lambda: timed(function)
