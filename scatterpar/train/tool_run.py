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
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from scatterpar import StepReport
from scatterpar.distributed.collectives import RankError
from scatterpar.train import records
from scatterpar.train.command_line import (
    Options,
    UsageError,
    as_words,
    exit_code_of,
    parse,
    printable,
)
from scatterpar.train.data import BatchRequest, Images, open_data
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
_SUMMED = ("images", "seconds_whole", "seconds_waited")  # numbers of steps
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
    checkpoint: dict[str, Any] | None = None
    if options.resume:
        checkpoint = records.load(options.out / FILE, goes_on=True)
        options = parse(arguments, checkpoint["words"])
        if records.is_finished(options.out):
            _say_finished(options, checkpoint["position"])
            return 0
    else:
        records.refuse_earlier_run(options.out)
    if options.processes > processes.size:
        # The same folder for all: its default has the time in its name.
        words = [*arguments, "--out", str(options.out)]
        words += ["--processes", str(options.processes)]
        return launch(run, words, options.processes)
    devices = choose_devices(options.devices, processes)
    source = open_data(options)
    saved = None if checkpoint is None else checkpoint["about"]
    training = Training(options, source, devices, processes, saved)
    if checkpoint is not None:
        _compare_data(options, checkpoint["about"], training.about)
        # After the comparison, so that a run with other images changes nothing.
        training.load_state_dict(checkpoint)
    is_first = processes.is_first
    lock = records.locked(options.out) if is_first else contextlib.nullcontext()
    with training.engine, lock:
        if is_first and checkpoint is None:
            records.refuse_earlier_run(options.out)  # it may have begun meanwhile
        return _train(training)


def _train(training: Training) -> int:
    """Train in the run's folder; return the exit code."""
    options = training.options
    processes = training.processes
    step = training.position.step
    path = options.out / METRICS_FILE
    # Those that the run uses are imported by now.
    imported = [name for name in _RECORDED if name in sys.modules]
    versions = {name: sys.modules[name].__version__ for name in imported}
    with (
        Metrics(path, step, processes.is_first) as metrics,
        Feed(training.source, (), options.skip_broken, processes) as feed,
    ):
        metrics.write(
            "run",
            step=step,
            options=vars(options),
            command=sys.argv,
            versions=versions,
            devices=[str(share) for share in training.engine.device_ids],
        )
        return Run(training, feed, metrics).train()


def _say_finished(options: Options, position: Mapping[str, int]) -> None:
    reached = f"after {position['tested']} epochs and {position['step']} steps"
    print(
        f"{options.out}: finished before, {reached}; --out starts a new run in another "
        "folder"
    )


def _compare_data(
    options: Options, saved: Mapping[str, Any], about: Mapping[str, Any]
) -> None:
    """Raise a `UsageError` if a run would go on with other images."""
    for name in ("image_shape", "class_names", "class_counts", "sizes"):
        if about[name] != saved[name]:
            raise UsageError(
                f"{options.out} is of a run with other images: its {name} were "
                f"{saved[name]!s:.300}, and those of --data {options.data} are "
                f"{about[name]!s:.300}; restore it, or start a new run with another "
                "--out"
            )


class Run:
    """The epochs of one run, and its results so far. A process beside the first one
    makes the same steps and tests, but says, draws and saves nothing.

    Attributes:
        training: what changes while training.
        feed: the images.
        metrics: the records.
        options: the options of the run.
        tested: the part that each epoch is tested on: ``"val"`` if ``test`` comes at
            the end, else ``"test"``.
    """

    def __init__(self, training: Training, feed: Feed, metrics: Metrics) -> None:
        self.training = training
        self.feed = feed
        self.metrics = metrics
        self.options = training.options
        self._is_first = training.processes.is_first
        self.tested = training.source.tested
        self._signals = list[int]()
        self._saved = training.position.step
        self._final: Tally | None = None  # the test at the end
        # What is drawn: the test of the best epoch, or the one at the end.
        self._shown = Tally(training.classes)
        if training.position.tested:
            best = records.load(self.options.out / BEST_FILE)
            self._shown.confusion = best.get("confusion")
        self._last_step: StepReport | None = None
        self._progress: Progress
        self._drawn = -math.inf  # when the pictures were drawn last

    def train(self) -> int:
        """Train all epochs, print and write what was reached, and return the exit
        code.
        """
        try:
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
        training = self.training
        self._announce()
        total = training.epochs * training.images
        stopping = "saving at the end of this step" if self._is_first else None
        self.feed.request(training.requests())
        try:
            with (
                Progress(
                    total,
                    training.position.consumed,
                    file=sys.stdout,
                    is_shown=self._is_first,
                ) as self._progress,
                stoppable(stopping) as self._signals,
            ):
                # A large batch takes a while.
                self._progress.describe("reading the first batch")
                # It is called once per sub-step, so that the bar moves within a step.
                training.criterion.register_forward_hook(self._progress.add)
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
            name = signal.Signals(self._signals[0]).name
            ending = "interrupted" if name == "SIGINT" else f"ended by {name}"
            code = 128 + self._signals[0]
        if self._is_first:
            self._finish(ending)
        return code

    def _train_epochs(self) -> None:
        training = self.training
        # The session before may have ended between the last step of an epoch and its
        # test.
        if training.position.tested < training.epoch:
            self._end_epoch()
        while not training.is_over:
            self._train_epoch()
        if self.tested == VAL:
            self._check()  # the first process has written the file
            best = records.load(self.options.out / BEST_FILE)
            self.feed.request(training.test_requests(TEST))
            self._final = training.test(self.feed, TEST, best["model"], self._check)
            self._shown = self._final

    def _check(self) -> None:
        """Raise `KeyboardInterrupt` in all processes if one has received a signal."""
        # A signal may reach one process a step earlier than another, and all have to
        # end after the same step.
        number = self.training.processes.largest(max(self._signals, default=0))
        if number:
            if not self._signals:
                self._signals.append(number)
            raise KeyboardInterrupt

    def _find_broken(self) -> int:
        """Read all images, and print the names of the unreadable ones. Returns how many
        have to be left out.
        """
        self._say("an image cannot be read; looking for others")
        self.feed.limit = sys.maxsize
        requests = list[BatchRequest]()
        for part in self.training.source.parts:
            requests += self.training.test_requests(part)
        self.feed.request(requests)
        for _ in requests:
            self.feed.take()
        # None is broken if a disk was away for a while.
        return max(len(self.feed.broken), self.options.skip_broken + 1)

    def _kept(self) -> str:
        """Return which checkpoint there is, in words."""
        if not self._saved:
            return "no checkpoint was written yet"
        checkpoint = f"the checkpoint after step {self._saved}"
        return f"{checkpoint} is kept: --resume goes on from it"

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

    def _announce(self) -> None:
        """Print the model, the data, and how the work is divided."""
        training = self.training
        source = training.source
        parameters = sum(tensor.numel() for tensor in training.model.parameters())
        self._say(
            f"writing to {self.options.out}",
            str(source),
            source.classes_in_words(),
            *source.notes,
            f"{self.options.model}: {parameters:,} parameters",
        )
        rows = training.rows_per_step
        size = training.processes.size
        if size > 1:
            self._say(f"{size} processes divide each batch; the first one:")
        self._say(str(training.engine.plan(rows // size)))
        position = training.position
        if position.step:
            images = f"{position.consumed:,} images"
            self._say(f"resumed after {position.step} steps, {images}")
            return
        steps = f"{training.steps_per_epoch} steps an epoch of {training.images:,}"
        reason = "--batch sets it"
        if training.noise:
            reason = "the gradient's noise scale doubles it"
        self._say(
            f"batches of {rows:,}, for {steps}; {reason}", training.rates_in_words()
        )

    def _train_epoch(self) -> None:
        training = self.training
        number = training.epoch + 1
        before = time.perf_counter()
        while training.epoch < number:
            # Before the step, which counts its images: afterwards it is the next one's.
            rate = training.rate()
            request, batch = self.feed.take()
            self._draw_first_batch(batch)
            self._progress.begin(len(request.rows))
            report = training.step(len(request.rows), batch)
            if report is None:
                continue  # no picture of the batch can be read
            end = time.perf_counter()
            self._record_step(report, number, len(request.rows), rate, end - before)
            before = end
            if training.epoch < number:  # at the end of the epoch the test comes first
                self._save(self.options.checkpoint_every)
            self._check()
        self._end_epoch()

    def _draw_first_batch(self, batch: Images) -> None:
        path = self.options.out / FIRST_BATCH_FILE
        if self._is_first and len(batch.images) and not path.exists():
            names = self.training.source.class_names
            draw_first_batch(batch.images, batch.labels, names, path)

    def _record_step(
        self, report: StepReport, epoch: int, rows: int, rate: float, seconds: float
    ) -> None:
        training = self.training
        position = training.position
        loss = report.loss
        waited = self.feed.waited
        # As numbers of `Metrics`, which TensorBoard shows.
        measured = {"loss": loss, "learning_rate": rate}
        if training.noise:
            measured["noise_scale"] = training.noise.scale
        spent = {"seconds_whole": seconds, "seconds_waited": waited}
        self.metrics.write(
            "step",
            step=position.step,
            epoch=epoch,
            images=rows,
            **measured,
            **spent,
            seconds=report.seconds,
            bytes=report.bytes,
            messages=report.messages,
        )
        self._last_step = report
        words = f"epoch {epoch}/{training.epochs}"
        part = f"{waited / seconds:.0%}"
        self._progress.describe(words, loss=f"{loss:.4f}", waiting=part)
        self._progress.report(position.consumed)

    def _end_epoch(self) -> None:
        """Test, record and print the results, keep the best weights, and let the batch
        grow.
        """
        training = self.training
        position = training.position
        number = training.epoch
        tally = training.test(self.feed, self.tested, between=self._check)
        position.tested = number
        is_best = tally.accuracy > position.best
        if is_best:
            position.best = tally.accuracy
            position.best_epoch = number
            self._shown = tally
        if self._is_first:
            self._record_epoch(number, tally)
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
        if not training.is_over and training.grow():
            self.feed.request(training.requests())
            self._say(f"  batches of {position.batch:,} images from here on")
        self._save()

    def _record_epoch(self, number: int, tally: Tally) -> None:
        """Record and print the results of an epoch."""
        training = self.training
        broken = self.feed.broken
        # From the records, because the epoch may have begun in an earlier session.
        sums = Counter[str]()
        for step in self.metrics.of_kind("step"):
            if step["epoch"] == number:
                sums.update({name: step[name] for name in _SUMMED})
                sums["loss"] += step["loss"] * step["images"]
        # No image of an epoch may be readable.
        images = sums["images"] or 1
        seconds = sums["seconds_whole"] or 1
        loss = sums["loss"] / images
        speed = images / seconds
        waited = sums["seconds_waited"]
        rows = training.rows_per_step
        tested = self.tested
        measured = {
            f"{tested}_loss": tally.loss,
            f"{tested}_accuracy": tally.accuracy,
            f"{tested}_accuracy_top5": tally.accuracy_top5,
        }
        self.metrics.write(
            "epoch",
            epoch=number,
            step=training.position.step,
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
            f"{tested} loss {tally.loss:.4f}",
            f"{tested} accuracy {tally.accuracy:.2%}",
        ]
        if training.classes >= TOP_5_CLASSES:
            words.append(f"top-5 accuracy {tally.accuracy_top5:.2%}")
        words.append(f"{speed:,.0f} images/s")
        if not training.source.in_memory:
            words.append(f"waiting {waited / seconds:.0%}")
        if training.noise:
            scale = training.noise.scale
            words.append(f"batch {rows:,}, noise scale {scale:,.0f} images")
        if broken:
            words.append(f"{len(broken)} broken files left out")
        self._say(", ".join(words))

    def _save(self, every: int = 0) -> None:
        """Write a checkpoint if there were `every` steps since the last one."""
        step = self.training.position.step
        # Before the first step there is nothing to go on from, and the folder stays
        # free for another try.
        if self._is_first and step and step - self._saved >= every:
            records.save(
                self.options.out / FILE,
                **self.training.state_dict(),
                words=list(as_words(vars(self.options))),
                about=self.training.about,
            )
            self._saved = step

    def _draw(self) -> None:
        """Draw the curves, the confusion matrix and the mistakes."""
        out = self.options.out
        class_names = self.training.source.class_names
        images = self.training.images
        path = out / CURVES_FILE
        draw_curves(self.metrics, path, images=images, tested=self.tested)
        shown = self._shown
        if self.training.position.tested and shown.confusion is not None:
            part = self.tested if self._final is None else TEST
            title = f"Images of {part}, best epoch"
            path = out / CONFUSION_FILE
            draw_confusion(shown.confusion, class_names, title, path)
        if shown.images:  # None, if an earlier session has tested and drawn them.
            draw_mistakes(shown.mistakes, class_names, out / MISTAKES_FILE)
        self._drawn = time.perf_counter()

    def _finish(self, ending: str) -> None:
        """Print and record the results, and draw them, even if the run ended early.
        The last lines are the result, where it is, and the next command.
        """
        training = self.training
        out = self.options.out
        seconds = self.metrics.elapsed
        steps = training.position.step
        reached = f"{training.epoch} of {training.epochs} epochs, {steps} steps"
        self._say(f"{ending} after {reached}, {seconds:.1f} s")
        if ending == FINISHED and training.epoch < training.epochs:
            patience = self.options.patience
            self._say(f"no better accuracy in {patience} epochs (--patience)")
        if self._last_step is not None and traffic(self._last_step):
            self._say(traffic(self._last_step))
        accuracies = self._say_accuracies()
        self._draw()
        # The last record: a run with it has written all results.
        self.metrics.write(
            "summary",
            ending=ending,
            epochs=training.epoch,
            steps=steps,
            seconds=seconds,
            **accuracies,
            left_out=dict(self.feed.broken),
        )
        # A run that ended early has not written all of them.
        names = [name for name in _WRITTEN if (out / name).exists()]
        self._say(f"wrote {', '.join(names)} in {out}")
        self._say_what_would_help()
        position = training.position
        if position.tested:
            words = f"best epoch: {position.best_epoch}, {self.tested} accuracy"
            self._say(
                f"{words} {position.best:.2%}, in {out / BEST_FILE}",
                f"to use it: python -m scatterpar predict {out} PICTURES",
                f"to use it elsewhere: python -m scatterpar export {out}",
            )
        if ending != FINISHED:
            self._say_how_to_resume()

    def _say_what_would_help(self) -> None:
        """Print what helps most with few images, unless the run has it."""
        source = self.training.source
        is_few = self.training.images < _FEW_IMAGES and not source.in_memory
        options = self.options
        if is_few and not (options.pretrained or options.from_scratch):
            self._say(
                f"with few images ({self.training.images:,}) pretrained weights help "
                "most: --model timm:resnet18 starts from them if it can fetch them"
            )

    def _say_accuracies(self) -> dict[str, Any]:
        """Print the accuracies. Returns them for the summary."""
        accuracies: dict[str, Any] = {"test_accuracy": None}
        measured = "not measured, no epoch was finished"
        epochs = self.metrics.of_kind("epoch")
        if epochs:
            accuracy = epochs[-1][f"{self.tested}_accuracy"]
            accuracies[f"{self.tested}_accuracy"] = accuracy
            measured = f"{accuracy:.2%}"
        self._say(f"{self.tested} accuracy: {measured}")
        if self._final is not None:
            accuracy = self._final.accuracy
            accuracies["test_accuracy"] = accuracy
            self._say(f"test accuracy: {accuracy:.2%}, of the best epoch's weights")
        confusion = self._shown.confusion
        if epochs and confusion is not None:
            class_names = self.training.source.class_names
            per_class = accuracy_per_class(confusion, class_names)
            accuracies["accuracy_per_class"] = per_class
            self._say(accuracies_in_words(per_class))
        return accuracies
