"""A whole run: set up, train epoch by epoch, keep checkpoints, and report what was reached."""

from __future__ import annotations

import math
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from scatterpar import StepReport
from scatterpar.recipe import NoiseScale
from scatterpar.train.checkpoint import (
    BEST_FILE,
    FILE,
    Progress,
    collect,
    collect_best,
    find,
    restore,
    save,
    written,
)
from scatterpar.train.data import TEST, TRAIN, Broken, Source, UsageError
from scatterpar.train.evaluation import Evaluation, evaluate
from scatterpar.train.feed import PIECE, Feed, FeedError, Request, default_workers
from scatterpar.train.machines import (
    Stopped,
    Stopping,
    choose_devices,
    connected,
    launched,
    run_id,
    seed_host,
)
from scatterpar.train.options import LARGE_BATCH, Options, parse
from scatterpar.train.page import write_page
from scatterpar.train.pictures import open_data
from scatterpar.train.records import Metrics, draw_curves, provenance, writing
from scatterpar.train.training import (
    Growth,
    Training,
    averaging,
    foresee,
    make_engine,
    prepare,
    train_epoch,
)

_LINE_SECONDS = 10.0  # between lines where there is no bar


def main(arguments: Sequence[str]) -> int:
    """Run the tool; return the exit code, after one line on stderr where an argument is wrong."""
    try:
        return run(parse(arguments))
    except UsageError as error:
        print(f"scatterpar train: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("scatterpar train: interrupted before training began", file=sys.stderr)
        return 130


def run(options: Options) -> int:
    """Train as the options say; return the exit code."""
    tqdm.monitor_interval = 0  # no thread that watches over bars: every step updates them
    devices, source = choose_devices(options.devices), open_data(options)
    out = options.out or Path()
    workers = default_workers() if options.workers is None else options.workers
    with connected(devices) as machines:
        if options.check_data and machines.is_first:
            _look_at(source, options, workers, out)
        torch.manual_seed(options.seed)
        seed_host(options.seed)
        with make_engine(options, source, devices, machines) as engine:
            training, growth = prepare(engine, source, options, machines)
            progress = _resume(training, options, out / FILE)
            path = out / "metrics.jsonl" if machines.is_first else None
            with (
                Metrics(path, kept=progress.step) as metrics,
                Feed(source, (), workers, options.skip_broken, tqdm.write) as feed,
            ):
                made = {**provenance(devices), "machines": machines.size}
                metrics.write("run", step=progress.step, options=options.record(), **made)
                this = Run(training, feed, options, out, progress, metrics, growth)
                if machines.is_first:
                    this.announce()
                code, ending = this.train()
                this.finish(ending)
                return code


def _look_at(source: Source, options: Options, workers: int, out: Path) -> None:
    """Look at all pictures; write the list of broken ones, and end the run if they are too many."""
    parts, path = ((TRAIN, len(source.train)), (TEST, len(source.test))), out / "broken.txt"
    requests = [Request(p, rows) for p, n in parts if n for rows in torch.arange(n).split(PIECE)]
    total, broken = sum(n for _, n in parts), list[Broken]()
    with (
        tqdm(total=total, desc="checking", unit=" images", disable=None) as bar,
        Feed(source, requests, workers, math.inf, lambda _: None) as feed,
    ):
        for request in requests:
            broken += feed.take()[1].broken
            bar.update(len(request.rows))
    with written(path) as file:
        file.write("".join(f"{p.name}\t{p.reason}\n" for p in broken).encode(errors="replace"))
    print(f"{len(broken)} of {total:,} pictures cannot be read; the list is in {path}")
    if len(broken) > options.skip_broken:
        raise UsageError(
            f"{broken[0].name} cannot be read as an image: {broken[0].reason}; {len(broken)} such "
            f"files are listed in {path}: mend or remove them, or --skip-broken {len(broken)}"
        )


def _resume(training: Training, options: Options, path: Path) -> Progress:
    """Go on where an earlier attempt stopped, where that is what is wanted."""
    state = find(path, training.machines)
    if state is None:
        if options.resume:
            raise UsageError(f"--resume: there is no {path}")
        return Progress()
    if not options.resume and (run_id() is None or state["job"] != run_id()):
        raise UsageError(f"there is a {path}: --resume goes on from it, another --out starts anew")
    wanted = options.settings()
    for name, saved in state["settings"].items():
        if wanted.get(name) != saved:
            option = "--" + name.replace("_", "-")
            raise UsageError(f"{path} is of a run with {option} {saved}, not {wanted.get(name)}")
    return restore(state, training)


@dataclass
class Run:
    """The epochs of one run, and what has been reached so far."""

    training: Training
    feed: Feed
    options: Options
    out: Path
    progress: Progress
    metrics: Metrics
    growth: Growth | None
    tested: Evaluation | None = None  # the last test
    noise: NoiseScale | None = None
    sent: dict[str, int] = field(default_factory=dict)  # bytes of the step that moved most

    def __post_init__(self) -> None:
        training, options, source = self.training, self.options, self.feed.source
        if options.measure_noise:
            decay = averaging(training.batches.steps_per_epoch)
            self.noise = NoiseScale(decay)
            if self.progress.noise is not None:
                self.noise.load_state_dict({**self.progress.noise, "decay": decay})
        self._about = {  # what `predict` needs to know
            "model": options.model,
            "image_shape": list(source.image_shape),
            "class_names": list(source.class_names),
            "mean": source.mean.tolist(),
            "std": source.std.tolist(),
        }
        self._criterion = nn.CrossEntropyLoss(label_smoothing=options.label_smoothing)
        self._saved = self.progress.step
        self._start = self._said = time.perf_counter()
        self._used = training.batches.consumed
        self._stopping = Stopping()
        self._bar = tqdm(
            total=options.epochs * training.batches.rows,
            initial=training.batches.consumed,
            disable=None if training.machines.is_first else True,  # None: where it is no terminal
            unit=" images",
            unit_scale=True,
            leave=False,
            miniters=1,
        )

    def announce(self) -> None:
        """Print what is trained on what, and how the work is cut."""
        training, options = self.training, self.options
        print(self.feed.source)
        parameters = sum(parameter.numel() for parameter in training.engine.parameters())
        print(f"{options.model}: {parameters:,} parameters")
        machines, rows = training.machines, training.batches.batch
        if machines.size > 1:
            print(f"{machines.size} machines; the first one's part of a batch of {rows:,}:")
        print(training.engine.plan(-(-rows // machines.size)))
        if self.progress.step:
            print(f"resumed after {self.progress.step} steps, {self._used:,} images")
        elif self.growth is not None:
            most = self.growth.sizes[-1]
            print(f"the batch follows the gradient's noise scale, up to {most:,} images")
        elif options.batch != rows:
            told = f"--batch {options.batch} is more than the {rows:,} images to train on"
            print(f"{told}: each step takes all of them, and the learning rate is theirs")
        sys.stdout.flush()

    def train(self) -> tuple[int, str]:
        """Train all epochs; return the exit code, and in words how it ended."""
        self._start = self._said = time.perf_counter()
        self._request()
        batches = self.training.batches
        try:
            with self._stopping:
                if self.progress.ended < batches.epoch:
                    self._end_epoch(images=0, seconds=0.0, waited=0.0)
                while batches.epoch < self.options.epochs:
                    self._train_epoch()
                self._save_if_due(1)
        except Stopped:
            return self._stop()
        except FloatingPointError as error:
            return 1, f"training diverged ({error}); a lower --base-lr may help; stopped"
        except UsageError as error:
            if isinstance(error, FeedError):
                if self._stopping.signal:  # its sender may have ended the workers too
                    return self._stop()
                if self.training.machines.size == 1:  # others would have to take part
                    self._save_if_due(1)
            kept = f"the checkpoint after step {self._saved} is kept: --resume goes on from it"
            raise UsageError(
                f"{error}; {kept if self._saved else 'no checkpoint was written yet'}"
            ) from error
        finally:
            self._bar.close()
        return 0, "finished"

    def _request(self) -> None:
        """Request what this rank wants from here on, while the batch stays as it is."""
        training, options = self.training, self.options
        together = LARGE_BATCH if options.batch == "auto" else options.batch
        where = training.batches, self.progress.ended, options.epochs
        self.feed.request(foresee(*where, len(self.feed.source.test), together, training.machines))

    def _stop(self) -> tuple[int, str]:
        """Keep what was reached, and say how to go on."""
        self._save_if_due(1)
        number = self._stopping.signal
        if self._saved:
            out = ["--out", str(self.out)]
            words = [word for word in sys.orig_argv if word != "--resume"]
            words += [] if any(word.partition("=")[0] == "--out" for word in words) else out
            line = shlex.join([*words, "--resume"])
            if launched():
                line = f"the same torchrun line, with {shlex.join([*out, '--resume'])}"
            self._say(f"saved after step {self._saved}; this goes on from there:\n  {line}")
        name = signal.Signals(number).name
        return 128 + number, "interrupted" if number == signal.SIGINT else f"ended by {name}"

    def _say(self, line: str) -> None:
        """Print a line, beside the progress bar."""
        if self.training.machines.is_first:
            self._bar.write(line, file=sys.stdout)
            sys.stdout.flush()

    def _train_epoch(self) -> None:
        batches, feed = self.training.batches, self.feed
        number, before = batches.epoch + 1, batches.consumed
        self._bar.set_description(f"epoch {number}/{self.options.epochs}")
        start, waited, used = time.perf_counter(), feed.waited, before
        for report, rate in train_epoch(self.training, feed, self._criterion):
            images, used = batches.consumed - used, batches.consumed
            share = (feed.waited - waited) / (time.perf_counter() - start)
            self._bar.set_postfix(loss=f"{report.loss:.4f}", waiting=f"{share:.0%}", refresh=False)
            self._after_step(number, rate, images, report)
            self._stopping.check(self.training.machines)
        seconds = time.perf_counter() - start
        self._end_epoch(batches.consumed - before, seconds, feed.waited - waited)

    def _after_step(self, epoch: int, rate: float, images: int, report: StepReport) -> None:
        progress, batches = self.progress, self.training.batches
        progress.step += 1
        progress.loss += report.loss * images / batches.rows
        # After a test the parameters are there already: the step that moved most is a whole one.
        self.sent = max(self.sent, report.bytes, key=lambda sent: sum(sent.values()))
        measured: dict[str, Any] = {
            "loss": report.loss,
            "learning_rate": rate,
            "seconds": report.seconds,
            "bytes": report.bytes,
            "messages": report.messages,
        }
        if self.noise is not None:
            self.noise.update(report)
            progress.noise = self.noise.state_dict()
            measured["noise_scale"] = self.noise.scale
        self.metrics.write("step", step=progress.step, epoch=epoch, images=images, **measured)
        self._bar.update(images)
        part, now = batches.consumed % batches.rows, time.perf_counter()
        if not part:
            return  # the end of the epoch, which goes on once it has been tested
        if self._bar.disable and now - self._said >= _LINE_SECONDS:
            self._said = now
            speed = (batches.consumed - self._used) / (now - self._start)
            left = (self.options.epochs * batches.rows - batches.consumed) / speed
            self._say(
                f"epoch {epoch}/{self.options.epochs}, {part / batches.rows:.0%}: "
                f"loss {report.loss:.4f}, {speed:,.0f} images/s, "
                f"{timedelta(seconds=round(left))} left"
            )
        self._save_if_due()

    def _end_epoch(self, images: int, seconds: float, waited: float) -> None:
        progress, training, options = self.progress, self.training, self.options
        number, loss, broken = training.batches.epoch, progress.loss, self.feed.broken
        speed = images / seconds if seconds else 0.0
        alone = training.machines.size == 1  # ranks have different numbers of batches
        between = self._stopping.check if alone else lambda: None
        self.tested = tested = evaluate(training, self.feed, between)
        progress.accuracy, progress.ended, progress.loss = tested.top1, number, 0.0
        self.metrics.write(
            "epoch",
            epoch=number,
            step=progress.step,
            batch=training.batches.batch,
            train_loss=loss,
            test_loss=tested.loss,
            test_accuracy=tested.top1,
            test_accuracy_top5=tested.top5,
            images_per_second=speed,
            seconds=seconds,
            seconds_waited=waited,
            left_out=broken.total(),
        )
        parts = {
            f"epoch {number}/{options.epochs}: loss {loss:.4f}": True,
            f"test loss {tested.loss:.4f}, test accuracy {tested.top1:.2%}": True,
            f"top-5 {tested.top5:.2%}": len(tested.confusion) > 5,
            f"{speed:,.0f} images/s": True,
            f"waiting {waited / (seconds or 1):.0%}": not self.feed.source.in_memory,
            f"batch {training.batches.batch:,}": self.growth is not None,
            f"noise scale {self.noise.scale if self.noise else 0:,.0f} images": self.noise,
            f"{len(broken)} broken files left out": broken,
        }
        self._say(", ".join(words for words, is_told in parts.items() if is_told))
        if tested.top1 > progress.best:
            progress.best = tested.top1
            if training.machines.is_first:
                best = collect_best(training, accuracy=tested.top1, about=self._about)
                save(self.out / BEST_FILE, best)
        if self.growth is not None and self.noise is not None and number < options.epochs:
            self._grow(self.growth.after(training.batches.batch, self.noise.scale), self.noise)
        self._save_if_due()

    def _grow(self, batch: int, noise: NoiseScale) -> None:
        """Take a batch for the epochs to come, which may be larger."""
        training = self.training
        if batch > training.batches.batch:
            training.batches.batch = batch
            noise.decay = averaging(training.batches.steps_per_epoch)
            training.scheduler.step()  # its rate is scaled with the batch
            self._request()
            self._say(f"  batches of {batch:,} images from here on")

    def _save_if_due(self, every: int | None = None) -> None:
        if self.progress.step - self._saved >= (every or self.options.checkpoint_every):
            more = {"job": run_id(), "settings": self.options.settings(), "about": self._about}
            state = collect(self.training, self.progress, **more)
            if self.training.machines.is_first:
                save(self.out / FILE, state)
            self._saved = self.progress.step

    def finish(self, ending: str) -> None:
        """Print and record what was reached, and draw it, also where that ended early."""
        progress, machines, batches = self.progress, self.training.machines, self.training.batches
        if not machines.is_first:
            if ending != "finished":
                print(f"rank {machines.rank}: {ending}", file=sys.stderr)
            return
        seconds, crossed = time.perf_counter() - self._start, self._crossed()
        reached = f"{batches.epoch} of {self.options.epochs} epochs, {progress.step} steps"
        print(f"{ending} after {reached}, {seconds:.1f} s")
        measured = "not measured, no epoch was finished"
        if progress.accuracy is not None:
            measured = f"{progress.accuracy:.2%}"
        print(f"test accuracy: {measured}\n{crossed}")
        self.metrics.write(
            "summary",
            ending=ending,
            epochs=batches.epoch,
            steps=progress.step,
            seconds=seconds,
            test_accuracy=progress.accuracy,
            bytes=self.sent,
            left_out=dict(self.feed.broken),
        )
        sizes = f"{self.growth.sizes[0]:,} to " if self.growth is not None else ""
        devices = ", ".join(map(str, self.training.engine.device_ids))
        subtitle = f"{ending} after {reached}; batches of {sizes}{batches.batch:,} on {devices}"
        title, records = f"{self.options.model} on {self.feed.source.name}", self.metrics.records
        with writing(self.out):
            draw_curves(records, self.out / "curves.png")
            texts = title, subtitle, crossed
            write_page(self.out / "report.html", texts, self.tested, self.feed.source, records)
        print(f"wrote metrics.jsonl, curves.png and report.html in {self.out}")

    def _crossed(self) -> str:
        parts = ", ".join(f"{name} {size / 1e6:,.3f}" for name, size in self.sent.items() if size)
        if not parts:
            return "nothing had to cross between devices"
        where = " of the first machine" if self.training.machines.size > 1 else ""
        return f"crossed between devices{where} in a step, in MB: {parts}"
