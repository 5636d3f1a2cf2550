"""A run of the tool: set up, train epoch by epoch, write checkpoints, and report the results."""

from __future__ import annotations

import math
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import nn
from tqdm import tqdm

from scatterpar import StepReport
from scatterpar.train import checkpoint
from scatterpar.train.checkpoint import BEST_FILE, Progress, writing, written
from scatterpar.train.data import TEST, TRAIN, Broken, Source, UsageError
from scatterpar.train.feed import PIECE, Feed, FeedError, Request
from scatterpar.train.machines import (
    Stopped,
    Stopping,
    choose_devices,
    connected,
    launched,
    run_id,
    seed_host,
)
from scatterpar.train.options import LARGE_BATCH, Options, exit_code_of, parse
from scatterpar.train.page import write_page
from scatterpar.train.pictures import open_data
from scatterpar.train.records import Metrics, best_epoch, draw_curves, of_kind, provenance
from scatterpar.train.training import (
    Evaluation,
    Training,
    evaluate,
    foresee,
    make_engine,
    prepare,
    train_epoch,
)

_LINE_SECONDS = 10.0  # between lines, without a progress bar


def main(arguments: Sequence[str]) -> int:
    """Run the tool. Returns the exit code. A wrong argument prints one line on stderr."""
    return exit_code_of("train", lambda: run(parse(arguments)))


def run(options: Options) -> int:
    """Train as the options say; return the exit code."""
    tqdm.monitor_interval = 0  # tqdm starts no thread: every step updates the bar
    devices, source = choose_devices(options.devices), open_data(options)
    with connected(devices) as machines:
        if options.check_data:
            machines.first_does(lambda: _check_pictures(source, options))
        torch.manual_seed(options.seed)
        seed_host(options.seed)
        with make_engine(options, source, devices, machines) as engine:
            training = prepare(engine, source, options, machines)
            progress = _resume(training, options)
            path = options.out / "metrics.jsonl" if machines.is_first else None
            with (
                Metrics(path, progress.step, options.wandb) as metrics,
                Feed(source, (), options.workers, options.skip_broken, tqdm.write) as feed,
            ):
                made = {**provenance(devices), "machines": machines.size}
                metrics.write("run", step=progress.step, options=options.record(), **made)
                this = Run(training, feed, options, progress, metrics)
                if machines.is_first:
                    this.announce()
                code, ending = this.train()
                this.finish(ending)
                return code


def _check_pictures(source: Source, options: Options) -> None:
    """Read all pictures, and write a list of broken ones. Raises if there are too many of them."""
    parts, path = {TRAIN: source.train, TEST: source.test}, options.out / "broken.txt"
    total, broken = sum(map(len, parts.values())), list[Broken]()
    requests = [
        Request(part, rows)
        for part, pictures in parts.items()
        for rows in torch.arange(len(pictures)).split(PIECE)
    ]
    with (
        tqdm(total=total, desc="checking", unit=" images", disable=None) as bar,
        Feed(source, requests, options.workers, math.inf, lambda _: None) as feed,
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


def _resume(training: Training, options: Options) -> Progress:
    """Load the checkpoint of an earlier attempt, with --resume or after a restart by torchrun."""
    path = options.out / checkpoint.FILE
    state = checkpoint.find(path, training.machines)
    if state is None:
        if options.resume:
            raise UsageError(f"--resume: there is no {path}; --out names the folder of the run")
        return Progress()
    if not options.resume and (run_id() is None or state["job"] != run_id()):
        raise UsageError(f"there is a {path}: --resume goes on from it, another --out starts anew")
    settings = options.settings()
    for name, saved in state["settings"].items():
        if settings.get(name) != saved:
            option = "--" + name.replace("_", "-")
            raise UsageError(f"{path} is of a run with {option} {saved}, not {settings.get(name)}")
    return checkpoint.restore(state, training)


@dataclass
class Run:
    """The epochs of one run, and its results so far."""

    training: Training
    feed: Feed
    options: Options
    progress: Progress
    metrics: Metrics
    tested: Evaluation | None = None  # the last test
    stopping: Stopping = field(default_factory=Stopping)
    sent: dict[str, int] = field(default_factory=dict)  # bytes of the step with the most traffic

    def __post_init__(self) -> None:
        batches, source = self.training.batches, self.feed.source
        model = self.training.engine.module
        self._about = {  # `predict` needs these
            "model": self.options.model,
            "image_shape": list(source.image_shape),
            "class_names": list(source.class_names),
            "mean": model.mean.flatten().tolist(),
            "std": model.std.flatten().tolist(),
        }
        self._saved = self.progress.step
        self._said = time.perf_counter()
        earlier = max((r.get("elapsed", 0.0) for r in self.metrics.records), default=0.0)
        self._start = self._said - earlier  # of all sessions
        self._bar = tqdm(
            total=self.options.epochs * batches.rows,
            initial=batches.consumed,
            disable=None if self.training.machines.is_first else True,  # None: without a terminal
            unit=" images",
            unit_scale=True,
            leave=False,
            miniters=1,
        )

    def announce(self) -> None:
        """Print the model, the data, and how the work is divided."""
        training, options = self.training, self.options
        parameters = sum(parameter.numel() for parameter in training.engine.parameters())
        print(f"writing to {options.out}\n{self.feed.source}")
        print(f"{options.model}: {parameters:,} parameters")
        machines, rows = training.machines, training.batches.batch
        if machines.size > 1:
            print(f"{machines.size} machines; the first one's part of a batch of {rows:,}:")
        print(training.engine.plan(-(-rows // machines.size)))
        if self.progress.step:
            used = training.batches.consumed
            print(f"resumed after {self.progress.step} steps, {used:,} images")
        elif training.growth is not None:
            most = training.growth.sizes[-1]
            print(f"the batch follows the gradient's noise scale, up to {most:,} images")
        elif options.batch is None:
            steps, images = training.batches.steps_per_epoch, training.batches.rows
            print(f"batches of {rows:,}, for {steps} steps an epoch of {images:,}; --batch sets it")
        elif options.batch != rows:
            told = f"--batch {options.batch} is more than the {rows:,} images to train on"
            print(f"{told}: each step takes all of them, and the learning rate is theirs")
        sys.stdout.flush()

    def train(self) -> tuple[int, str]:
        """Train all epochs. Returns the exit code, and a text that says how the run ended."""
        self._request()
        batches = self.training.batches
        try:
            with self.stopping:
                if self.progress.ended < batches.epoch:
                    self._end_epoch()
                while batches.epoch < self.options.epochs:
                    self._train_epoch()
                self._save_if_due(1)
        except Stopped:
            return self._stop()
        except FloatingPointError as error:
            return 1, f"training diverged ({error}); a lower --base-lr may help; stopped"
        except UsageError as error:
            if isinstance(error, FeedError):
                if self.stopping.signal:  # a signal may have ended the workers, too
                    return self._stop()
                if self.training.machines.size == 1:  # saving has collectives
                    self._save_if_due(1)
            kept = f"the checkpoint after step {self._saved} is kept: --resume goes on from it"
            kept = kept if self._saved else "no checkpoint was written yet"
            raise UsageError(f"{error}; {kept}") from error
        finally:
            self._bar.close()
        return 0, "finished"

    def _request(self) -> None:
        """Request this rank's batches from now on; the size of the batch must not change."""
        training, options = self.training, self.options
        test_batch = options.batch if isinstance(options.batch, int) else LARGE_BATCH
        position = training.batches, self.progress.ended, options.epochs
        tests = len(self.feed.source.test)
        self.feed.request(foresee(*position, tests, test_batch, training.machines))

    def _stop(self) -> tuple[int, str]:
        """Save a checkpoint, and print the command that resumes the run."""
        self._save_if_due(1)
        number = self.stopping.signal
        if self._saved:
            out = ["--out", str(self.options.out)]
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
        number, used = batches.epoch + 1, batches.consumed
        self._bar.set_description(f"epoch {number}/{self.options.epochs}")
        criterion = nn.CrossEntropyLoss(label_smoothing=self.options.label_smoothing)
        start, waited = time.perf_counter(), feed.waited
        before = used, 0.0, 0.0
        for report, rate in train_epoch(self.training, feed, criterion):
            so_far = batches.consumed, time.perf_counter() - start, feed.waited - waited
            images, whole, waiting = (x - y for x, y in zip(so_far, before, strict=True))
            before, share = so_far, so_far[2] / so_far[1]
            self._bar.set_postfix(loss=f"{report.loss:.4f}", waiting=f"{share:.0%}", refresh=False)
            self._bar.update(int(images))
            took = {"seconds_whole": whole, "seconds_waited": waiting}
            self._after_step(number, rate, int(images), report, took)
            self.stopping.check(self.training.machines)
        self._end_epoch()

    def _after_step(
        self, epoch: int, rate: float, images: int, report: StepReport, took: dict[str, float]
    ) -> None:
        """Record a step. `took` has the seconds since the previous one, and those of waiting."""
        progress, batches, noise = self.progress, self.training.batches, self.training.noise
        progress.step += 1
        progress.loss += report.loss * images / batches.rows
        # The first step after a test does not send parameters, so it moves less.
        self.sent = max(self.sent, report.bytes, key=lambda sent: sum(sent.values()))
        measured = {"loss": report.loss, "learning_rate": rate, "seconds": report.seconds}
        sent = {"bytes": report.bytes, "messages": report.messages}
        more = {} if noise is None else {"noise_scale": noise.scale}
        where = {"step": progress.step, "epoch": epoch, "images": images}
        took["elapsed"] = time.perf_counter() - self._start
        self.metrics.write("step", **where, **measured, **took, **sent, **more)
        part, now = batches.consumed % batches.rows, time.perf_counter()
        if not part:
            return  # at the end of the epoch the test comes first
        if self._bar.disable and now - self._said >= _LINE_SECONDS:
            self._said = now
            speed = batches.consumed / (now - self._start)
            left = (self.options.epochs * batches.rows - batches.consumed) / speed
            self._say(
                f"epoch {epoch}/{self.options.epochs}, {part / batches.rows:.0%}: "
                f"loss {report.loss:.4f}, {speed:,.0f} images/s, "
                f"{timedelta(seconds=round(left))} left"
            )
        self._save_if_due()

    def _end_epoch(self) -> None:
        progress, training, options = self.progress, self.training, self.options
        number, loss, broken = training.batches.epoch, progress.loss, self.feed.broken
        steps = [r for r in of_kind("step", self.metrics.records) if r["epoch"] == number]
        names = "images", "seconds_whole", "seconds_waited"
        images, seconds, waited = (sum(step[name] for step in steps) for name in names)
        speed = images / seconds if seconds else 0.0
        alone = training.machines.size == 1  # ranks have different numbers of batches
        between = self.stopping.check if alone else lambda: None
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
            elapsed=time.perf_counter() - self._start,
            left_out=broken.total(),
        )
        noise = training.noise
        parts = {
            f"epoch {number}/{options.epochs}: loss {loss:.4f}": True,
            f"test loss {tested.loss:.4f}, test accuracy {tested.top1:.2%}": True,
            f"top-5 accuracy {tested.top5:.2%}": len(tested.confusion) > 5,
            f"{speed:,.0f} images/s": True,
            f"waiting {waited / (seconds or 1):.0%}": not self.feed.source.in_memory,
            f"batch {training.batches.batch:,}": training.growth,
            f"noise scale {noise.scale if noise else 0:,.0f} images": noise,
            f"{len(broken)} broken files left out": broken,
        }
        self._say(", ".join(words for words, is_told in parts.items() if is_told))
        if tested.top1 > progress.best:
            progress.best = tested.top1
            if training.machines.is_first:
                path = options.out / BEST_FILE
                checkpoint.save_best(path, training, accuracy=tested.top1, about=self._about)
        if number < options.epochs and training.grow():
            self._request()
            self._say(f"  batches of {training.batches.batch:,} images from here on")
        self._save_if_due()

    def _save_if_due(self, every: int | None = None) -> None:
        if self.progress.step - self._saved >= (every or self.options.checkpoint_every):
            more = {"job": run_id(), "settings": self.options.settings(), "about": self._about}
            state = checkpoint.collect(self.training, self.progress, **more)
            if self.training.machines.is_first:
                checkpoint.save(self.options.out / checkpoint.FILE, state)
            self._saved = self.progress.step

    def finish(self, ending: str) -> None:
        """Print and record the results, and draw them, even if the run ended early."""
        progress, training, out = self.progress, self.training, self.options.out
        if not training.machines.is_first:
            if ending != "finished":
                print(f"rank {training.machines.rank}: {ending}", file=sys.stderr)
            return
        seconds, records = time.perf_counter() - self._start, self.metrics.records
        epochs, accuracy = training.batches.epoch, progress.accuracy
        reached = f"{ending} after {epochs} of {self.options.epochs} epochs, {progress.step} steps"
        measured = "not measured, no epoch was finished" if accuracy is None else f"{accuracy:.2%}"
        sessions = len(of_kind("run", records))
        in_all = f"{seconds:.1f} s" + f" in {sessions} sessions" * (sessions > 1)
        crossed = ", ".join(f"{name} {size / 1e6:,.3f}" for name, size in self.sent.items() if size)
        where = " of the first machine" if training.machines.size > 1 else ""
        traffic = f"crossed between devices{where} in a step, in MB: {crossed}"
        traffic = traffic if crossed else "nothing had to cross between devices"
        if best := best_epoch(records):
            accuracy_of_best = f"test accuracy {best['test_accuracy']:.2%}"
            print(f"best epoch: {best['epoch']}, {accuracy_of_best}, in {out / BEST_FILE}")
        print(f"{reached}, {in_all}\ntest accuracy: {measured}\n{traffic}")
        self.metrics.write(
            "summary",
            ending=ending,
            epochs=epochs,
            steps=progress.step,
            seconds=seconds,
            test_accuracy=accuracy,
            bytes=self.sent,
            left_out=dict(self.feed.broken),
        )
        sizes = f"{training.growth.sizes[0]:,} to " if training.growth is not None else ""
        devices = ", ".join(map(str, training.engine.device_ids))
        texts = {
            "title": f"{self.options.model} on {self.feed.source.name}",
            "subtitle": f"{reached}, {in_all}; "
            f"batches of {sizes}{training.batches.batch:,} on {devices}",
            "traffic": traffic,
        }
        with writing(out):
            draw_curves(records, out / "curves.png")
            write_page(out / "report.html", texts, self.tested, self.feed.source, records)
        print(f"wrote metrics.jsonl, curves.png and report.html in {out}")
