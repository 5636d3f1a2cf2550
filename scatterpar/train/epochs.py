"""The epochs of a run: train, test, record, and keep checkpoints."""

from __future__ import annotations

import shlex
import signal
import sys
import time
from datetime import timedelta
from typing import Any

from torch import nn

from scatterpar import StepReport
from scatterpar.recipe import NoiseScale
from scatterpar.train.checkpoint import BEST_FILE, FILE, Progress, collect, collect_best, save
from scatterpar.train.errors import UsageError
from scatterpar.train.evaluation import Evaluation, evaluate
from scatterpar.train.feed import Feed, FeedError
from scatterpar.train.growth import averaging
from scatterpar.train.loop import Stopped, Stopping, Training, train_epoch
from scatterpar.train.machines import launched, run_id
from scatterpar.train.options import Options
from scatterpar.train.preparation import what_comes
from scatterpar.train.records import Metrics
from scatterpar.train.schedule import is_tested
from scatterpar.train.traffic import Traffic

_LONG_WAIT = 0.2  # of the time; from here on the tool says what to do
_LINE_SECONDS = 10.0  # between lines where there is no bar


class Run:
    """The epochs of one run, and what has been reached so far.

    Args:
        training: what changes.
        feed: what it is trained and tested on.
        criterion: the loss to train with.
        options: the command line's.
        progress: what an earlier attempt has reached.
        metrics: where steps and epochs are recorded.
        about: what `predict` needs to know of the model.

    Attributes:
        evaluation: the last test, if there was one.
    """

    def __init__(
        self,
        training: Training,
        feed: Feed,
        criterion: nn.Module,
        options: Options,
        progress: Progress,
        metrics: Metrics,
        about: dict[str, Any],
    ) -> None:
        from tqdm import tqdm

        self.training = training
        self.feed = feed
        self.criterion = criterion
        self.options = options
        self.progress = progress
        self.metrics = metrics
        self.about = about
        self.evaluation: Evaluation | None = None
        decay = averaging(training.batches.steps_per_epoch)
        self.noise = NoiseScale(decay) if options.measure_noise else None
        if self.noise is not None and progress.noise is not None:
            self.noise.load_state_dict({**progress.noise, "decay": decay})
        self.images = len(feed.source.train)
        row_bytes = 4 * len(feed.source.class_names)
        self._has_sent = False  # whether a test has sent what the next step would have sent
        self.traffic = Traffic(training.engine.module, row_bytes)
        self.seconds = 0.0
        self._saved = progress.step
        self._stopping = Stopping()
        tqdm.monitor_interval = 0  # no thread that watches over the bar: every step updates it
        self._bar = tqdm(
            total=options.epochs * self.images,
            initial=training.batches.consumed,
            disable=None if training.machines.is_first else True,  # None: where it is no terminal
            unit=" images",
            unit_scale=True,
            leave=False,
            miniters=1,
        )

    def train(self) -> tuple[int, str]:
        """Train all epochs; return the exit code, and in words how it ended.

        Raises:
            UsageError: an image cannot be read, or a file cannot be written.
        """
        self._start = self._said = start = time.perf_counter()
        self._used = self.training.batches.consumed
        try:
            with self._stopping:
                self._train()
        except Stopped:
            return self._stop()
        except FloatingPointError as error:
            return 1, f"training diverged ({error}); a lower --base-lr may help; stopped"
        except FeedError as error:
            if self._stopping.signal:  # its sender may have ended the workers too
                return self._stop()
            alone = self.training.machines.size == 1  # others would have to take part
            if alone and self._saved < self.progress.step:
                self._save()
            raise self._with_what_is_kept(error) from error
        except UsageError as error:
            raise self._with_what_is_kept(error) from error
        finally:
            self.seconds = time.perf_counter() - start
            self._bar.close()
        return 0, "finished"

    def _train(self) -> None:
        if self.progress.ended < self.training.batches.epoch:
            self._end_epoch(images=0, seconds=0.0, waited=0.0)
        while self.training.batches.epoch < self.options.epochs:
            self._train_epoch()
        if self._saved < self.progress.step:
            self._save()

    def _stop(self) -> tuple[int, str]:
        """Keep what was reached, and say how to go on."""
        if self._saved < self.progress.step:
            self._save()
        number = self._stopping.signal
        if self._saved:
            out = ["--out", str(self.options.out)]
            words = [word for word in sys.orig_argv if word != "--resume"]
            words += [] if any(word.partition("=")[0] == "--out" for word in words) else out
            line = shlex.join([*words, "--resume"])
            if launched():
                line = f"the same torchrun line, with {shlex.join([*out, '--resume'])}"
            self.say(f"saved after step {self._saved}; this goes on from there:\n  {line}")
        name = (
            "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
        )
        return 128 + number, name

    def say(self, line: str) -> None:
        """Print a line, beside the progress bar."""
        if self.training.machines.is_first:
            self._bar.write(line, file=sys.stdout)
            sys.stdout.flush()

    def _train_epoch(self) -> None:
        batches = self.training.batches
        number, before, used = batches.epoch + 1, batches.consumed, batches.consumed
        self._bar.set_description(f"epoch {number}/{self.options.epochs}")
        feed, start = self.feed, time.perf_counter()
        waited, started = feed.waited, feed.started
        for report, rate in train_epoch(self.training, self.feed, self.criterion):
            images, used = batches.consumed - used, batches.consumed
            share = (feed.waited - waited) / (time.perf_counter() - start)
            self._after_step(number, rate, images, report, share)
            self._stopping.check(self.training.machines)
        seconds, waited = time.perf_counter() - start, feed.waited - waited
        steady = waited - (feed.started - started)  # once the workers had started
        self._end_epoch(batches.consumed - before, seconds, waited)
        if steady > _LONG_WAIT * seconds and not feed.source.in_memory:
            self.say(
                f"  {steady / seconds:.0%} of the time was spent waiting for images: give more "
                "--workers, or store smaller images"
            )

    def _after_step(
        self, epoch: int, rate: float, images: int, report: StepReport, waiting: float
    ) -> None:
        progress = self.progress
        progress.step += 1
        progress.loss += report.loss * images / self.images
        if not self._has_sent:
            self.traffic.add(report.plan, report.bytes)
        self._has_sent = False
        measured = {}
        if self.noise is not None:
            self.noise.update(report)
            progress.noise = self.noise.state_dict()
            measured["noise_scale"] = self.noise.scale
        self.metrics.write(
            "step",
            step=progress.step,
            epoch=epoch,
            images=images,
            loss=report.loss,
            learning_rate=rate,
            seconds=report.seconds,
            bytes=report.bytes,
            messages=report.messages,
            **measured,
        )
        self._bar.set_postfix(loss=f"{report.loss:.4f}", waiting=f"{waiting:.0%}", refresh=False)
        self._bar.update(images)
        self._say_how_far(report.loss)
        if self.training.batches.consumed % self.images:
            self._save_if_due()  # at the end of an epoch once it has been tested

    def _say_how_far(self, loss: float) -> None:
        """Print a line now and then where there is no bar."""
        now, batches = time.perf_counter(), self.training.batches
        if not self._bar.disable or now - self._said < _LINE_SECONDS:
            return
        self._said = now
        epoch, part = divmod(batches.consumed / self.images, 1)
        speed = (batches.consumed - self._used) / (now - self._start)
        left = (self.options.epochs * self.images - batches.consumed) / speed
        self.say(
            f"epoch {epoch + 1:.0f}/{self.options.epochs}, {part:.0%}: loss {loss:.4f}, "
            f"{speed:,.0f} images/s, {timedelta(seconds=round(left))} left"
        )

    def _end_epoch(self, images: int, seconds: float, waited: float) -> None:
        progress, number = self.progress, self.training.batches.epoch
        loss, speed = progress.loss, images / seconds if seconds else 0.0
        waiting = waited / seconds if seconds else 0.0
        tested = None
        if is_tested(number, self.options.epochs, self.options.eval_every):
            alone = self.training.machines.size == 1  # ranks have different numbers of batches
            between = self._stopping.check if alone else lambda: None
            together = self.options.tested_together
            tested = evaluate(self.training, self.feed, together, between)
            progress.accuracy, self.evaluation, self._has_sent = tested.top1, tested, True
        progress.ended, progress.loss = number, 0.0
        self.metrics.write(
            "epoch",
            epoch=number,
            step=progress.step,
            batch=self.training.batches.batch,
            train_loss=loss,
            test_loss=tested and tested.loss,
            test_accuracy=tested and tested.top1,
            test_accuracy_top5=tested and tested.top5,
            images_per_second=speed,
            seconds=seconds,
            seconds_waited=waited,
            left_out=self.feed.broken.total(),
        )
        self.say(self._line(number, loss, tested, speed, waiting))
        if tested is not None and tested.top1 > progress.best:
            progress.best = tested.top1
            if self.training.machines.is_first:
                best = collect_best(self.training, tested.top1, self.about)
                save(self.options.out / BEST_FILE, best)
        self._grow()
        self._save_if_due()

    def _grow(self) -> None:
        """Take the next larger batch for the epochs to come where the noise scale allows it."""
        training, batches = self.training, self.training.batches
        if training.growth is None or self.noise is None or batches.epoch == self.options.epochs:
            return
        larger = training.growth.after(batches.batch, self.noise.scale)
        if larger == batches.batch:
            return
        batches.batch = larger
        self.noise.decay = averaging(batches.steps_per_epoch)
        training.scheduler.step()  # its rate is scaled with the batch
        source, options = self.feed.source, self.options
        self.feed.foresee(what_comes(training, len(source.test), options, self.progress))
        self.say(f"  batches of {larger:,} images from here on")

    def _line(
        self, number: int, loss: float, tested: Evaluation | None, speed: float, waiting: float
    ) -> str:
        parts = [f"epoch {number}/{self.options.epochs}: loss {loss:.4f}"]
        if tested is not None:
            parts.append(f"test loss {tested.loss:.4f}, test accuracy {tested.top1:.2%}")
            if len(tested.confusion) > 5:
                parts.append(f"top-5 {tested.top5:.2%}")
        parts.append(f"{speed:,.0f} images/s")
        if not self.feed.source.in_memory:
            parts.append(f"waiting {waiting:.0%}")
        if self.training.growth is not None:
            parts.append(f"batch {self.training.batches.batch:,}")
        if self.noise is not None:
            parts.append(f"noise scale {self.noise.scale:,.0f} images")
        if self.feed.broken:
            parts.append(f"{len(self.feed.broken)} broken files left out")
        return ", ".join(parts)

    def _save_if_due(self) -> None:
        if self.progress.step - self._saved >= self.options.checkpoint_every:
            self._save()

    def _save(self) -> None:
        settings = self.options.settings()
        state = collect(self.training, self.progress, settings, run_id(), self.about)
        if self.training.machines.is_first:
            save(self.options.out / FILE, state)
        self._saved = self.progress.step

    def _with_what_is_kept(self, error: UsageError) -> UsageError:
        if not self._saved:
            return UsageError(f"{error}; no checkpoint was written yet")
        return UsageError(
            f"{error}; the checkpoint after step {self._saved} is kept: --resume goes on from it"
        )
