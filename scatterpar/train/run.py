"""A run of the tool: train epoch by epoch, write checkpoints and records, stop when
asked to.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from tqdm import tqdm

from scatterpar.train import records
from scatterpar.train.data import Feed, FeedError, open_data
from scatterpar.train.options import Options, UsageError, exit_code_of, parse
from scatterpar.train.records import BEST_FILE, FILE, Metrics, draw_curves
from scatterpar.train.training import Training, choose_devices

_LINE_SECONDS = 10.0  # between lines, without a progress bar
_RECORDED = "scatterpar", "torch", "torchvision", "timm", "numpy", "pillow"  # versions


def main(arguments: Sequence[str]) -> int:
    """Run the tool. Returns the exit code. A wrong argument prints one
    line on stderr.
    """
    return exit_code_of("train", lambda: run(parse(arguments)))


def run(options: Options) -> int:
    """Train as the options say; return the exit code."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        words = (
            "one process trains on all GPUs of this machine: start it without torchrun"
        )
        raise UsageError(f"{words} (for several machines: docs/several-machines.md)")
    tqdm.monitor_interval = 0  # tqdm starts no thread: every step updates the bar
    devices, source, out = (
        choose_devices(options.devices),
        open_data(options),
        options.out,
    )
    training = Training(options, source, devices)
    with training.engine:
        _resume(training)
        position = training.position
        if position.tested >= training.epochs and (out / "curves.png").exists():
            reached = f"after {training.epoch} epochs and {position.step} steps"
            print(
                f"{out}: finished before, {reached}; --out starts a new run in "
                "another folder"
            )
            return 0
        with (
            Metrics(out / "metrics.jsonl", position.step) as metrics,
            Feed(source) as feed,
        ):
            installed = importlib.metadata.distributions()
            versions = {d.name: d.version for d in installed if d.name in _RECORDED}
            about = {
                "command": sys.argv,
                "versions": versions,
                "devices": [*map(str, devices)],
            }
            metrics.write("run", step=position.step, options=vars(options), **about)
            return Run(training, feed, metrics).train()


def _resume(training: Training) -> None:
    """With --resume load the checkpoint in --out; without it there must not be one."""
    options, path = training.options, training.options.out / FILE
    if path.exists() and not options.resume:
        raise UsageError(
            f"there is a {path}: --resume goes on from it, another --out starts anew"
        )
    if options.resume:
        if not path.exists():
            raise UsageError(
                f"--resume: there is no {path}; --out names the folder of the run"
            )
        state = records.load(path)
        for name, value in options.settings().items():
            if (saved := state["settings"].get(name)) != value:
                option = "--" + name.replace("_", "-")
                same = (
                    f"leave out {option}" if saved is None else f"pass {option} {saved}"
                )
                raise UsageError(
                    f"{path} is of a run with {option} {saved}, not {value}: {same}"
                )
        training.load_state_dict(state)


@contextlib.contextmanager
def stoppable() -> Iterator[list[int]]:
    """In the body, Ctrl-C and SIGTERM are added to a list. A second one ends the
    process.
    """
    received = list[int]()

    def receive(number: int, _: FrameType | None) -> None:
        if received:
            os._exit(128 + number)
        received.append(number)
        name = signal.Signals(number).name
        # Not print: the signal may have interrupted a print.
        os.write(
            2, f"\n{name}: saving at the end of this step; again: ending now\n".encode()
        )

    # a background job of a shell ignores SIGINT
    numbers = signal.SIGINT, signal.SIGTERM
    heeded = [n for n in numbers if signal.getsignal(n) is not signal.SIG_IGN]
    before = [(number, signal.signal(number, receive)) for number in heeded]
    try:
        yield received
    finally:
        for number, handler in before:
            signal.signal(number, handler)


class Run:
    """The epochs of one run, and its results so far."""

    def __init__(self, training: Training, feed: Feed, metrics: Metrics) -> None:
        self.training, self.feed, self.metrics = training, feed, metrics
        self.options, self._signals = training.options, list[int]()
        earlier = max((r.get("elapsed", 0.0) for r in metrics.records), default=0.0)
        self._start = time.perf_counter() - earlier  # of all sessions
        self._saved = training.position.step
        self._bar: Any = None

    def train(self) -> int:
        """Train all epochs, print and write what was reached, and return
        the exit code.
        """
        training, code, ending = self.training, 0, "finished"
        self._announce()
        self.feed.request(training.requests())
        try:
            with stoppable() as self._signals:
                if training.position.tested < training.epoch:
                    self._end_epoch()
                while training.epoch < training.epochs:
                    self._train_epoch()
                self._save(0)  # a test may have come since the last step was saved
        except FloatingPointError as error:
            code = 1
            ending = f"training diverged ({error}); a lower --base-lr may help; stopped"
        except (KeyboardInterrupt, UsageError) as error:
            is_sound = isinstance(error, KeyboardInterrupt | FeedError)
            if is_sound:
                self._save()
            # a signal may have ended the workers, too
            if not (is_sound and self._signals):
                kept = (
                    f"the checkpoint after step {self._saved} is kept: --resume "
                    "goes on from it"
                )
                kept = kept if self._saved else "no checkpoint was written yet"
                raise UsageError(f"{error}; {kept}") from error
            code, name = 128 + self._signals[0], signal.Signals(self._signals[0]).name
            ending = "interrupted" if name == "SIGINT" else f"ended by {name}"
            self._say_how_to_resume()
        finally:
            if self._bar is not None:
                self._bar.close()
        self._finish(ending)
        return code

    def _check(self) -> None:
        if self._signals:
            raise KeyboardInterrupt

    def _say_how_to_resume(self) -> None:
        if self._saved:
            words = [word for word in sys.orig_argv if word != "--resume"]
            named = any(word.partition("=")[0] == "--out" for word in words)
            words += (
                ["--resume"] if named else ["--out", str(self.options.out), "--resume"]
            )
            line = shlex.join(words)
            self._say(
                f"saved after step {self._saved}; this goes on from there:\n  {line}"
            )

    def _say(self, line: str) -> None:
        """Print a line, beside the progress bar."""
        tqdm.write(line, file=sys.stdout)
        sys.stdout.flush()

    def _announce(self) -> None:
        """Print the model, the data, and how the work is divided."""
        training, options, position = (
            self.training,
            self.options,
            self.training.position,
        )
        parameters = sum(parameter.numel() for parameter in training.model.parameters())
        self._say(f"writing to {options.out}\n{self.feed.source}")
        rows, steps = (
            -(-training.images // training.steps_per_epoch),
            training.steps_per_epoch,
        )
        self._say(
            f"{options.model}: {parameters:,} parameters\n{training.engine.plan(rows)}"
        )
        more = (
            "the gradient's noise scale doubles it"
            if training.noise
            else "--batch sets it"
        )
        line = (
            f"batches of {rows:,}, for {steps} steps an epoch of "
            f"{training.images:,}; {more}"
        )
        if position.step:
            line = f"resumed after {position.step} steps, {position.consumed:,} images"
        self._say(line)

    def _train_epoch(self) -> None:
        training, feed, number = self.training, self.feed, self.training.epoch + 1
        before = time.perf_counter()
        while training.epoch < number:
            rate, (request, batch) = training.rate(), feed.take()
            report = training.step(len(request.rows), batch)
            if report is None:
                continue  # no picture of the batch can be read
            now = time.perf_counter()
            took, before = (
                {"seconds_whole": now - before, "seconds_waited": feed.waited},
                now,
            )
            where = {
                "step": training.position.step,
                "epoch": number,
                "images": len(request.rows),
            }
            made = {
                "learning_rate": rate,
                "loss": report.loss,
                "elapsed": now - self._start,
            }
            sent: dict[str, Any] = {"seconds": report.seconds, "bytes": report.bytes}
            sent |= {"noise_scale": training.noise.scale} if training.noise else {}
            self.metrics.write("step", **where, **made, **took, **sent)
            self._show_progress(
                number, report.loss, took["seconds_waited"] / took["seconds_whole"]
            )
            if training.epoch < number:  # at the end of the epoch the test comes first
                self._save(self.options.checkpoint_every)
            self._check()
        self._end_epoch()

    def _show_progress(self, epoch: int, loss: float, waiting: float) -> None:
        """Move the bar; without a terminal, print a line now and then
        within an epoch.
        """
        training, now = self.training, time.perf_counter()
        consumed, total = training.position.consumed, training.epochs * training.images
        # the first step sets up the engine: estimates begin after it
        if self._bar is None:
            self._timed, self._said = (consumed, now), now
            shown = {
                "unit": " images",
                "unit_scale": True,
                "leave": False,
                "miniters": 1,
            }
            self._bar = tqdm(total=total, initial=consumed, disable=None, **shown)
        self._bar.set_description(f"epoch {epoch}/{training.epochs}", refresh=False)
        self._bar.set_postfix(
            loss=f"{loss:.4f}", waiting=f"{waiting:.0%}", refresh=False
        )
        self._bar.update(consumed - self._bar.n)
        if (
            self._bar.disable
            and training.epoch < epoch
            and now - self._said > _LINE_SECONDS
        ):
            self._said, speed = (
                now,
                (consumed - self._timed[0]) / (now - self._timed[1]),
            )
            left = tqdm.format_interval((total - consumed) / speed)
            where = (
                f"epoch {epoch}/{training.epochs}, {consumed / training.images % 1:.0%}"
            )
            self._say(f"{where}: loss {loss:.4f}, {speed:,.0f} images/s, {left} left")

    def _end_epoch(self) -> None:
        """Test, record and print the results, keep the best weights, and let the batch
        grow.
        """
        training, position, broken = (
            self.training,
            self.training.position,
            self.feed.broken,
        )
        number, rows = training.epoch, -(-training.images // training.steps_per_epoch)
        steps = [r for r in self.metrics.of_kind("step") if r["epoch"] == number]
        names = "images", "seconds_whole", "seconds_waited"
        images, seconds, waited = (sum(step[name] for step in steps) for name in names)
        loss = sum(step["loss"] * step["images"] for step in steps) / (images or 1)
        speed, waiting = images / (seconds or 1), waited / (seconds or 1)
        tested = training.test(self.feed, self._check)
        accuracy, top5 = tested["test_accuracy"], tested["test_accuracy_top5"]
        position.tested = number
        took = {
            "images_per_second": speed,
            "seconds": seconds,
            "seconds_waited": waited,
        }
        took |= {
            "elapsed": time.perf_counter() - self._start,
            "left_out": broken.total(),
        }
        where = {
            "epoch": number,
            "step": position.step,
            "batch": rows,
            "train_loss": loss,
        }
        self.metrics.write("epoch", **where, **tested, **took)
        scale = training.noise.scale if training.noise else 0.0
        parts = {
            f"epoch {number}/{training.epochs}: loss {loss:.4f}": True,
            f"test loss {tested['test_loss']:.4f}, test accuracy {accuracy:.2%}": True,
            f"top-5 accuracy {top5:.2%}": training.classes > 5,
            f"{speed:,.0f} images/s": True,
            f"waiting {waiting:.0%}": not self.feed.source.in_memory,
            f"batch {rows:,}, noise scale {scale:,.0f} images": training.noise,
            f"{len(broken)} broken files left out": broken,
        }
        self._say(", ".join(words for words, is_told in parts.items() if is_told))
        if accuracy > position.best:
            position.best = accuracy
            best: Any = training.average.module if training.average else training.model
            state = {"model": best.network.state_dict(), "accuracy": accuracy}
            records.save(self.options.out / BEST_FILE, **state, about=training.about)
        if number < training.epochs and training.grow():
            self.feed.request(training.requests())
            self._say(f"  batches of {position.batch:,} images from here on")
        self._save(self.options.checkpoint_every)

    def _save(self, every: int = 1) -> None:
        """Write a checkpoint if there were `every` steps since the last one."""
        training, step = self.training, self.training.position.step
        if step - self._saved >= every:
            about = {"settings": self.options.settings(), "about": training.about}
            records.save(self.options.out / FILE, **training.state_dict(), **about)
            self._saved = step

    def _finish(self, ending: str) -> None:
        """Print and record the results, and draw them, even if the run ended early."""
        training, metrics, out = self.training, self.metrics, self.options.out
        epochs, sessions = metrics.of_kind("epoch"), len(metrics.of_kind("run"))
        seconds, steps = time.perf_counter() - self._start, training.position.step
        accuracy = epochs[-1]["test_accuracy"] if epochs else None
        measured = (
            f"{accuracy:.2%}" if epochs else "not measured, no epoch was finished"
        )
        if epochs:
            # the first of equal ones
            best = max(epochs, key=lambda r: float(r["test_accuracy"]))
            words = (
                f"best epoch: {best['epoch']}, test accuracy "
                f"{best['test_accuracy']:.2%}"
            )
            self._say(f"{words}, in {out / BEST_FILE}")
            self._say(f"to use it: python -m scatterpar predict {out} PICTURES")
        in_all = f"{seconds:.1f} s" + f" in {sessions} sessions" * (sessions > 1)
        reached = f"{training.epoch} of {training.epochs} epochs, {steps} steps"
        self._say(f"{ending} after {reached}, {in_all}\ntest accuracy: {measured}")
        done = {
            "ending": ending,
            "epochs": training.epoch,
            "steps": steps,
            "seconds": seconds,
        }
        metrics.write(
            "summary", **done, test_accuracy=accuracy, left_out=dict(self.feed.broken)
        )
        draw_curves(metrics, out / "curves.png")
        self._say(f"wrote metrics.jsonl and curves.png in {out}")
