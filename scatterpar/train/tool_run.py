"""A run of the tool: train epoch by epoch, write checkpoints and records, stop when
asked to.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from tqdm import tqdm

from scatterpar.distributed.collectives import RankError
from scatterpar.train import records
from scatterpar.train.command_line import (
    UsageError,
    as_words,
    exit_code_of,
    parse,
    printable,
)
from scatterpar.train.data import open_data
from scatterpar.train.data_parts import TEST, VAL
from scatterpar.train.feed import BrokenError, Feed, FeedError
from scatterpar.train.figures import (
    draw_confusion,
    draw_curves,
    draw_first_batch,
    draw_mistakes,
)
from scatterpar.train.model_training import Training, choose_devices
from scatterpar.train.processes import ALONE, Processes, launch
from scatterpar.train.progress import Progress
from scatterpar.train.records import (
    BEST_FILE,
    FILE,
    FINISHED,
    METRICS_FILE,
    Metrics,
    stoppable,
)
from scatterpar.train.results import (
    TOP_5_CLASSES,
    Tally,
    accuracies_in_words,
    accuracy_per_class,
    traffic,
)

CURVES_FILE = "curves.png"
CONFUSION_FILE = "confusion.png"
MISTAKES_FILE = "mistakes.png"
FIRST_BATCH_FILE = "first_batch.png"
# Drawing takes half a second, which is nothing unless an epoch takes a second.
_SECONDS_BETWEEN_DRAWINGS = 5.0
_WRITTEN = (
    METRICS_FILE,
    CURVES_FILE,
    CONFUSION_FILE,
    MISTAKES_FILE,
    FIRST_BATCH_FILE,
)
# Packages whose versions are recorded, because other ones may give other results.
_RECORDED = ("scatterpar", "torch", "torchvision", "timm", "numpy", "PIL")
_FEW_IMAGES = 5000  # to train on: fewer than CIFAR's, from which networks learn alone
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(arguments: Sequence[str]) -> int:
    """Run the tool. Returns the exit code. A wrong argument prints one line on
    stderr.
    """
    return exit_code_of("train", lambda: run(arguments))


def run(arguments: Sequence[str], processes: Processes = ALONE) -> int:
    """Train as the command line says, as one of several processes if it says so;
    return the exit code.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise UsageError(
            "start it without torchrun: --processes N starts N processes on this "
            "machine (for several machines: docs/several-machines.md)"
        )
    options = parse(arguments)
    out = options.out
    checkpoint: dict[str, Any] | None = None
    if options.resume:
        checkpoint = records.load(out / FILE, goes_on=True)
        options = parse(arguments, checkpoint["words"])
        if records.is_finished(out):
            position = checkpoint["position"]
            reached = f"{position['tested']} epochs and {position['step']} steps"
            print(
                f"{out}: finished before, after {reached}; --out starts a new run in "
                "another folder"
            )
            return 0
    else:
        records.refuse_earlier_run(out)
    if options.processes > processes.size:
        # The same folder for all: its default has the time in its name.
        words = [*arguments, "--out", str(out)]
        words += ["--processes", str(options.processes)]
        return launch(run, words, options.processes)
    devices = choose_devices(options.devices, processes)
    training = Training(options, open_data(options), devices, processes, checkpoint)
    is_first = processes.is_first
    with (
        training.engine,
        records.locked(out, options.resume) if is_first else contextlib.nullcontext(),
        Metrics(out / METRICS_FILE, training.step, is_first) as metrics,
        Feed(training.source, (), options.skip_broken, processes) as feed,
    ):
        return Run(training, metrics, feed).train()


@dataclass(eq=False)
class Run:
    """The epochs of one run, and its results so far. A process beside the first one
    makes the same steps and tests, but says, draws and saves nothing.

    Attributes:
        training: what changes while training.
        metrics: the records.
        feed: the images.
        progress: the bar.
        options: the options of the run.
        tested: the part that each epoch is tested on: ``"val"`` if ``test`` comes at
            the end, else ``"test"``.
    """

    training: Training
    metrics: Metrics
    feed: Feed
    _signals: list[int] = field(default_factory=list)  # numbers of those received
    _copied: str = ""  # what the last step copied, in words
    _step_ended: float = 0.0  # when the last step ended, or the test after it
    _drawn: float = -math.inf  # when the pictures were drawn last

    def __post_init__(self) -> None:
        training = self.training
        self.options = training.options
        self.tested = training.source.tested
        self.progress: Progress
        self._is_first = training.processes.is_first
        self._saved = training.step
        # What is drawn: the test of the best epoch, or the one at the end.
        self._shown = Tally(training.classes, self.tested)
        out = self.options.out
        best = records.load(out / BEST_FILE) if training.tested else {}
        self._shown.confusion = best.get("confusion")

    def train(self) -> int:
        """Train all epochs, print and write what was reached, and return the exit
        code.
        """
        try:
            self._announce()
            # After the lines, so that the bar is below them.
            with Progress(
                self.training.epochs * self.training.images,
                self.training.consumed,
                file=sys.stdout,
                is_shown=self._is_first,
            ) as self.progress:
                return self._train()
        except UsageError as error:
            raise UsageError(f"{error}; {self._kept()}") from error
        except RankError:
            self._say_how_to_resume()
            raise
        except ValueError as error:
            # torch's layers say so of one row, which no option names.
            if "more than 1 value per channel" not in str(error):
                raise
            raise UsageError(
                "a sub-step has one image, of which batch normalisation has no "
                f"statistics: --batch with two images for each device; {self._kept()}"
            ) from error
        except OSError as error:  # of a print, or of a library
            if error.errno in _FULL_DISK:
                raise UsageError(f"{error.strerror}; {self._kept()}") from error
            raise

    def _train(self) -> int:
        code = 0
        ending = FINISHED
        stopping = "saving at the end of this step" if self._is_first else None
        try:
            with stoppable(stopping) as self._signals:
                self._train_epochs()
        except FloatingPointError as error:
            code = 1
            ending = f"training diverged ({error}); a lower --base-lr may help; stopped"
        # The weights are those of the last whole step: saving them loses nothing.
        except (KeyboardInterrupt, FeedError, RankError) as error:
            self._save()
            if not self._signals:  # a signal may have ended the workers, too
                if not isinstance(error, BrokenError):
                    raise
                remedy = f"--skip-broken {self._find_broken()} or more leaves out such"
                raise FeedError(f"{error} ({remedy} images)") from error
            number = self._signals[0]
            name = signal.Signals(number).name
            ending = "interrupted" if number == signal.SIGINT else f"ended by {name}"
            code = 128 + number
        if self._is_first:
            self._finish(ending)
        return code

    def _announce(self) -> None:
        """Record how the run starts; print the model, the data, and how the work is
        divided.
        """
        training = self.training
        source = training.source
        engine = training.engine
        step = training.step
        # Those that the run uses are imported by now.
        imported = [name for name in _RECORDED if name in sys.modules]
        self.metrics.write(
            "run",
            step=step,
            options=vars(self.options),
            command=sys.argv,
            versions={name: sys.modules[name].__version__ for name in imported},
            devices=[str(share) for share in engine.device_ids],
        )
        parameters = sum(tensor.numel() for tensor in training.model.parameters())
        rows = training.rows_per_step
        size = training.processes.size
        lines = [
            f"writing to {self.options.out}",
            str(source),
            source.classes_in_words(),
            *source.notes,
            f"{self.options.model}: {parameters:,} parameters",
        ]
        if size > 1:
            lines.append(f"{size} processes divide each batch; the first one:")
        lines.append(str(engine.plan(rows // size)))
        if step:
            images = f"{training.consumed:,} images"
            lines.append(f"resumed after {step} steps, {images}")
        else:
            steps = f"{training.steps_per_epoch} steps an epoch of {training.images:,}"
            lines.append(f"batches of {rows:,}, for {steps}; --batch sets it")
            lines.append(training.rates_in_words())
        self._say(*lines)

    def _train_epochs(self) -> None:
        training = self.training
        self.feed.request(training.requests())
        # It is called once per sub-step, so that the bar moves within a step.
        training.criterion.register_forward_hook(self.progress.add)
        # A large batch takes a while.
        self.progress.describe("reading the first batch")
        while not training.is_over:
            self._step_ended = time.perf_counter()
            # The session before may have ended between the last step of an epoch and
            # its test.
            while training.epoch == training.tested:
                self._train_step()
            self._end_epoch()
        if self.tested == VAL:
            self._check()  # the first process has written the file
            best = records.load(self.options.out / BEST_FILE)
            self.feed.request(training.test_requests(TEST))
            self._shown = training.test(self.feed, TEST, best["model"], self._check)

    def _train_step(self) -> None:
        """Train on a batch, record the step, and write a checkpoint if it is due."""
        training = self.training
        request, batch = self.feed.take()
        images = len(request.rows)
        path = self.options.out / FIRST_BATCH_FILE
        if self._is_first and len(batch.images) and not path.exists():
            class_names = training.source.class_names
            draw_first_batch(batch.images, batch.labels, class_names, path)
        self.progress.begin(images)
        report = training.train(images, batch)
        if report is None:
            return  # no picture of the batch can be read
        self._copied = traffic(report)
        end = time.perf_counter()
        seconds = end - self._step_ended
        self._step_ended = end
        waited = self.feed.waited
        epoch = training.tested + 1
        self.metrics.write(
            "step",
            step=training.step,
            epoch=epoch,
            images=images,
            loss=report.loss,
            learning_rate=training.optimizer.param_groups[0]["lr"],
            seconds_whole=seconds,
            seconds_waited=waited,
            seconds=report.seconds,
            bytes=report.bytes,
            messages=report.messages,
        )
        self.progress.describe(
            f"epoch {epoch}/{training.epochs}",
            loss=f"{report.loss:.4f}",
            waiting=f"{waited / seconds:.0%}",
        )
        self.progress.report(training.consumed)
        if training.epoch < epoch:  # at the end of the epoch the test comes first
            self._save(self.options.checkpoint_every)
        self._check()

    def _check(self) -> None:
        """Raise `KeyboardInterrupt` in all processes if one has received a signal."""
        # A signal may reach one process a step earlier than another, and all have to
        # end after the same step.
        number = self.training.processes.largest(max(self._signals, default=0))
        if number:
            self._signals[:] = [number]
            raise KeyboardInterrupt

    def _end_epoch(self) -> None:
        """Test, record and print the results, and keep the best weights."""
        training = self.training
        tally = training.test(self.feed, self.tested, between=self._check)
        training.tested = training.epoch
        is_best = tally.accuracy > training.best
        if is_best:
            training.best = tally.accuracy
            training.best_epoch = training.tested
            self._shown = tally
        if self._is_first:
            self._record_epoch(tally)
            if is_best:
                records.save(
                    self.options.out / BEST_FILE,
                    model=training.tested_weights(),
                    accuracy=tally.accuracy,
                    confusion=tally.confusion,
                    about=training.about,
                )
            if time.perf_counter() - self._drawn >= _SECONDS_BETWEEN_DRAWINGS:
                self._draw()
        self._save()

    def _record_epoch(self, tally: Tally) -> None:
        """Record and print the results of an epoch."""
        training = self.training
        number = training.epoch
        broken = self.feed.broken
        # From the records, because the epoch may have begun in an earlier session.
        steps = [
            step for step in self.metrics.of_kind("step") if step["epoch"] == number
        ]

        def total(name: str) -> float:
            return float(sum(step[name] for step in steps))

        # No image of an epoch may be readable.
        images = total("images") or 1.0
        seconds = total("seconds_whole") or 1.0
        waited = total("seconds_waited")
        loss = sum(step["loss"] * step["images"] for step in steps) / images
        speed = images / seconds
        rows = training.rows_per_step
        part = self.tested
        measured = {
            f"{part}_loss": tally.loss,
            f"{part}_accuracy": tally.accuracy,
            f"{part}_accuracy_top5": tally.accuracy_top5,
        }
        self.metrics.write(
            "epoch",
            epoch=number,
            step=training.step,
            batch=rows,
            train_loss=loss,
            **measured,
            images_per_second=speed,
            seconds=seconds,
            seconds_waited=waited,
            left_out=broken.total(),
        )
        words = [
            f"epoch {number}/{training.epochs}: loss {loss:.4f}",
            f"{part} loss {tally.loss:.4f}",
            f"{part} accuracy {tally.accuracy:.2%}",
        ]
        if training.classes >= TOP_5_CLASSES:
            words.append(f"top-5 accuracy {tally.accuracy_top5:.2%}")
        words.append(f"{speed:,.0f} images/s")
        if not training.source.in_memory:
            words.append(f"waiting {waited / seconds:.0%}")
        if broken:
            words.append(f"{len(broken)} broken files left out")
        self._say(", ".join(words))

    def _save(self, every: int = 0) -> None:
        """Write a checkpoint if there were `every` steps since the last one."""
        step = self.training.step
        # Before the first step there is nothing to go on from, and the folder stays
        # free for another try.
        if step and step - self._saved >= every:
            if self._is_first:
                records.save(
                    self.options.out / FILE,
                    **self.training.state_dict(),
                    words=list(as_words(vars(self.options))),
                    about=self.training.about,
                )
            # Also in another process, whose error names the checkpoint.
            self._saved = step

    def _kept(self) -> str:
        """Return which checkpoint there is, in words."""
        if not self._saved:
            return "no checkpoint was written yet"
        checkpoint = f"the checkpoint after step {self._saved}"
        return f"{checkpoint} is kept: --resume goes on from it"

    def _find_broken(self) -> int:
        """Read all images, and print the names of the unreadable ones. Returns how many
        have to be left out.
        """
        self._say("an image cannot be read; looking for others")
        source = self.training.source
        requests = [
            *chain.from_iterable(map(self.training.test_requests, source.parts))
        ]
        self.feed.limit = sys.maxsize
        self.feed.request(requests)
        for _ in requests:
            self.feed.take()
        # None is broken if a disk was away for a while.
        return max(len(self.feed.broken), self.options.skip_broken + 1)

    def _draw(self) -> None:
        """Draw the curves, the confusion matrix and the mistakes."""
        training = self.training
        class_names = training.source.class_names
        out = self.options.out
        shown = self._shown
        path = out / CURVES_FILE
        draw_curves(self.metrics, path, images=training.images, tested=self.tested)
        if shown.confusion is not None:
            title = f"Images of {shown.part}, best epoch"
            path = out / CONFUSION_FILE
            draw_confusion(shown.confusion, class_names, title, path)
        if shown.images:  # None, if an earlier session has tested and drawn them.
            draw_mistakes(shown.mistakes, class_names, out / MISTAKES_FILE)
        self._drawn = time.perf_counter()

    def _finish(self, ending: str) -> None:
        """Draw, record and print the results, even if the run ended early. The last
        lines are the result, where it is, and the next command.
        """
        training = self.training
        options = self.options
        out = options.out
        seconds = self.metrics.elapsed
        self._draw()
        reached = f"{training.epoch} of {training.epochs} epochs, {training.step} steps"
        lines = [f"{ending} after {reached}, {seconds:.1f} s"]
        if ending == FINISHED and training.epoch < training.epochs:
            lines.append(
                f"no better accuracy in {options.patience} epochs (--patience)"
            )
        if self._copied:
            lines.append(self._copied)
        accuracies, words = self._accuracies()
        # The last record: a run with it has written all results.
        self.metrics.write(
            "summary",
            ending=ending,
            epochs=training.epoch,
            steps=training.step,
            seconds=seconds,
            **accuracies,
            left_out=dict(self.feed.broken),
        )
        # A run that ended early has not written all of them.
        names = [name for name in _WRITTEN if (out / name).exists()]
        lines += [*words, f"wrote {', '.join(names)} in {out}"]
        is_few = training.images < _FEW_IMAGES and not training.source.in_memory
        if is_few and not (options.pretrained or options.from_scratch):
            lines.append(
                f"with few images ({training.images:,}) pretrained weights help "
                "most: --model timm:resnet18 starts from them if it can fetch them"
            )
        if training.tested:
            best = f"best epoch: {training.best_epoch}, {self.tested} accuracy"
            lines += [
                f"{best} {training.best:.2%}, in {out / BEST_FILE}",
                f"to use it: python -m scatterpar predict {out} PICTURES",
                f"to use it elsewhere: python -m scatterpar export {out}",
            ]
        self._say(*lines)
        if ending != FINISHED:
            self._say_how_to_resume()

    def _accuracies(self) -> tuple[dict[str, Any], list[str]]:
        """Return the accuracies of the summary, and the lines that say them."""
        name = f"{self.tested}_accuracy"
        accuracies: dict[str, Any] = {"test_accuracy": None}
        lines = [f"{self.tested} accuracy: not measured, no epoch was finished"]
        epochs = self.metrics.of_kind("epoch")
        shown = self._shown
        if epochs:
            accuracies[name] = epochs[-1][name]
            lines = [f"{self.tested} accuracy: {accuracies[name]:.2%}"]
        if shown.part != self.tested:
            accuracies["test_accuracy"] = shown.accuracy
            lines.append(
                f"test accuracy: {shown.accuracy:.2%}, of the best epoch's weights"
            )
        if shown.confusion is not None:
            class_names = self.training.source.class_names
            per_class = accuracy_per_class(shown.confusion, class_names)
            accuracies["accuracy_per_class"] = per_class
            lines.append(accuracies_in_words(per_class))
        return accuracies, lines

    def _say_how_to_resume(self) -> None:
        if self._saved:
            words = [sys.executable, "-m", "scatterpar", "train"]
            words += ["--out", str(self.options.out), "--resume"]
            self._say(
                f"saved after step {self._saved}; this goes on from there:",
                f"  {shlex.join(words)}",
            )

    def _say(self, *lines: str) -> None:
        """Print lines, beside the progress bar."""
        if self._is_first:
            # A plain print would be in the middle of the bar.
            tqdm.write(printable("\n".join(lines)), file=sys.stdout)
            sys.stdout.flush()
