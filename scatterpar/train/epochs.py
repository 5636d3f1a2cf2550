"""The epochs of a run: train, test, record, and keep a checkpoint."""

from __future__ import annotations

import dataclasses
import sys
import time

from torch import nn

from scatterpar.report import StepReport
from scatterpar.train.checkpoint import FILE, Progress, collect, save
from scatterpar.train.data import Dataset
from scatterpar.train.loop import Training, evaluate, train_epoch
from scatterpar.train.machines import run_id
from scatterpar.train.options import Options
from scatterpar.train.report import Metrics, draw_curves
from scatterpar.train.traffic import Traffic

CRITERION = nn.CrossEntropyLoss()


class Run:
    """The epochs of one run, and what has been reached so far.

    Args:
        training: what changes.
        data: what it is trained and tested on.
        options: the command line's.
        progress: what an earlier attempt has reached.
        metrics: where steps and epochs are recorded.
    """

    def __init__(
        self,
        training: Training,
        data: Dataset,
        options: Options,
        progress: Progress,
        metrics: Metrics,
    ) -> None:
        from tqdm import tqdm

        self.training = training
        self.data = data
        self.options = options
        self.progress = progress
        self.metrics = metrics
        self.traffic = Traffic(training.engine.module, row_bytes=4 * data.classes)
        self.saved = progress.step
        tqdm.monitor_interval = 0  # no thread that watches over the bar: every step updates it
        self.bar = tqdm(
            total=options.epochs * len(data.train),
            initial=training.batches.consumed,
            disable=not training.machines.is_first,
            unit=" images",
            unit_scale=True,
            leave=False,
            miniters=1,
        )

    def train(self) -> int:
        """Train all epochs, and report also when that ends early; return the exit code."""
        if not self.metrics.records:
            options = {**dataclasses.asdict(self.options), "out": str(self.options.out)}
            self.metrics.write("run", machines=self.training.machines.size, **options)
        start = time.perf_counter()
        code, ending = 0, "finished"
        try:
            while self.training.batches.epoch < self.options.epochs:
                self._train_epoch()
            if self.saved < self.progress.step:
                self._save()
        except KeyboardInterrupt:
            code, ending = 130, "interrupted"
        except FloatingPointError as error:
            code, ending = 1, f"training diverged ({error}); a lower --base-lr may help; stopped"
        finally:
            self.bar.close()
        self._summarise(ending, time.perf_counter() - start)
        return code

    def _train_epoch(self) -> None:
        batches = self.training.batches
        number, before = batches.epoch + 1, batches.consumed
        self.bar.set_description(f"epoch {number}/{self.options.epochs}")
        start, used = time.perf_counter(), before
        for report, rate in train_epoch(self.training, self.data, CRITERION):
            images, used = batches.consumed - used, batches.consumed
            self._after_step(number, rate, images, report)
        seconds = time.perf_counter() - start
        progress, loss = self.progress, self.progress.loss
        test_loss, progress.accuracy = evaluate(
            self.training.engine,
            self.data,
            self.data.test,
            self.options.batch,
            CRITERION,
            self.training.machines,
        )
        progress.loss = 0.0
        speed = (batches.consumed - before) / seconds
        self.metrics.write(
            "epoch",
            epoch=number,
            step=progress.step,
            train_loss=loss,
            test_loss=test_loss,
            test_accuracy=progress.accuracy,
            images_per_second=speed,
            seconds=seconds,
        )
        if self.training.machines.is_first:
            self.bar.write(
                f"epoch {number}/{self.options.epochs}: loss {loss:.4f}, "
                f"test loss {test_loss:.4f}, test accuracy {progress.accuracy:.2%}, "
                f"{speed:,.0f} images/s",
                file=sys.stdout,
            )
            sys.stdout.flush()
        self._save_if_due()

    def _after_step(self, epoch: int, rate: float, images: int, report: StepReport) -> None:
        progress = self.progress
        progress.step += 1
        progress.loss += report.loss * images / len(self.data.train)
        self.traffic.add(report.plan, report.bytes)
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
        )
        self.bar.set_postfix(loss=f"{report.loss:.4f}", refresh=False)
        self.bar.update(images)
        if self.training.batches.consumed % len(self.data.train):
            self._save_if_due()  # at the end of an epoch once it has been tested

    def _save_if_due(self) -> None:
        if self.progress.step - self.saved >= self.options.checkpoint_every:
            self._save()

    def _save(self) -> None:
        settings = self.options.settings()
        state = collect(self.training, self.progress, settings, run_id())
        if self.training.machines.is_first:
            save(self.options.out / FILE, state)
        self.saved = self.progress.step

    def _summarise(self, ending: str, seconds: float) -> None:
        machines, progress = self.training.machines, self.progress
        epochs = self.training.batches.epoch
        if not machines.is_first:
            if ending != "finished":
                print(f"rank {machines.rank}: {ending}", file=sys.stderr)
            return
        print(
            f"{ending} after {epochs} of {self.options.epochs} epochs, {progress.step} steps, "
            f"{seconds:.1f} s"
        )
        if progress.accuracy is None:
            print("test accuracy: not measured, no epoch was finished")
        else:
            print(f"test accuracy: {progress.accuracy:.2%}")
        if self.traffic.steps:
            if machines.size > 1:
                print("within the first machine, without what machines told each other:")
            print(self.traffic)
        self.metrics.write(
            "summary",
            ending=ending,
            epochs=epochs,
            steps=progress.step,
            seconds=seconds,
            test_accuracy=progress.accuracy,
            bytes_counted=self.traffic.counted,
            bytes_data_parallel_computed=self.traffic.computed,
        )
        picture = self.options.out / "curves.png"
        draw_curves(self.metrics.records, picture)
        print(f"wrote {self.options.out / 'metrics.jsonl'} and {picture}")
