"""The training tool beside timm's ``train.py``: images per second and memory.

    python -m benchmarks.feeding.beside_timm --timm-train PATH/train.py

Both train the same model of timm's on the same pictures, with timm's transforms, the
same number of images per step, the same micro-batches and worker processes, on all
cores of this process. They take turns::

    for each round:                     the order alternates
        for both: start the program; wait for some steps; end it

Seconds are counted from the end of the first step to the end of the last one. Memory is
the most that all processes of a program had together.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from PIL import Image

from benchmarks.environment import describe
from benchmarks.tables import Publisher, Table
from benchmarks.timing import ratio
from scatterpar.train.data import load

OURS = "scatterpar train"
THEIRS = "timm's train.py"
POLL = 0.05  # seconds
MEMORY_POLL = 1.0  # seconds; looking at memory costs time, too
SILENCE = 180.0  # seconds without a step, after which a run has failed
TEST_PICTURES = 200
# ``library`` imports timm.data also if torchvision was not built for this torch.
START = (
    "import runpy, sys; from scatterpar.train.libraries import library; "
    "library('timm.data'); "
    "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--timm-train", type=Path, required=True, help="train.py of timm's sources"
    )
    parser.add_argument(
        "--folder", type=Path, help="of pictures; default: one is made and removed"
    )
    parser.add_argument("--pictures", type=int, default=20_000)
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--print-only", action="store_true", help="leave the README as it is"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = options.folder
        if folder is None:
            folder = Path(place) / "data"
            write_pictures(folder, options.pictures, options.size)
        speeds, memory = measure(options, folder, Path(place))
    table = table_of(speeds, memory)
    if options.print_only:
        print(table)
        return
    settings = {name: str(value) for name, value in vars(options).items()}
    del settings["timm_train"]  # a path of this machine
    data = {"options": settings, "images_per_second": speeds, "megabytes": memory}
    Publisher(Path(__file__).parent, describe())("beside-timm", table, data)


Figures = dict[str, list[float]]  # of both programs, by round


def measure(
    options: argparse.Namespace, folder: Path, place: Path
) -> tuple[Figures, Figures]:
    """Images per second and megabytes of each round."""
    speeds: Figures = {OURS: [], THEIRS: []}
    memory: Figures = {OURS: [], THEIRS: []}
    order = [OURS, THEIRS]
    for number in range(options.rounds):
        for name in order:
            word, _, _ = name.partition(" ")
            out = place / f"{word}-{number}"
            command = command_of(name, options, folder, out)
            seconds, megabytes = command.run(options.steps)
            shutil.rmtree(out, ignore_errors=True)
            # The first step's end is where the clock starts.
            speed = options.batch * (options.steps - 1) / seconds
            speeds[name].append(speed)
            memory[name].append(megabytes)
            print(f"round {number}, {name}: {speed:.1f} images/s", flush=True)
        order.reverse()
    return speeds, memory


def table_of(speeds: Figures, memory: Figures) -> Table:
    """Medians of both programs, and their ratio."""
    rows = []
    for name in (OURS, THEIRS):
        speed = statistics.median(speeds[name])
        megabytes = statistics.median(memory[name])
        rows.append([name, f"{speed:.1f}", f"{megabytes:,.0f}"])
    compared = ratio(speeds[OURS], speeds[THEIRS])
    rows.append(["the first one over the second", str(compared), ""])
    return Table(["", "images a second", "memory of all processes, MB"], rows)


def write_pictures(folder: Path, number: int, size: int) -> None:
    """Make JPEG files in train/CLASS/ and val/CLASS/ of the included images."""
    data = load()
    pictures, rows, labels, _ = data.parts["train"]
    images = pictures[rows]
    for part, count in (("train", number), ("val", TEST_PICTURES)):
        for row in range(count):
            source = row % len(images)  # over and over
            name = data.class_names[int(labels[source])].replace("/", "-")
            place = folder / part / name
            place.mkdir(parents=True, exist_ok=True)
            picture = Image.fromarray(images[source, 0].numpy()).convert("RGB")
            picture.resize((size, size)).save(place / f"{row:06d}.jpg")


@dataclass(frozen=True)
class Command:
    """A training program.

    Attributes:
        name: ``OURS`` or ``THEIRS``.
        arguments: of Python.
        out: a folder that it writes.
    """

    name: str
    arguments: list[str]
    out: Path

    @property
    def output(self) -> Path:
        """The file for all that it prints."""
        return self.out.with_suffix(".log")

    def run(self, number: int) -> tuple[float, float]:
        """Run until so many steps are done, or what else ``count`` counts.

        Returns the seconds from the first step's end to the last one's, and the most
        memory in MB. Raises ``RuntimeError`` if the program ends before, or is silent.
        """
        command = [sys.executable, *self.arguments]
        with (
            self.output.open("w") as file,
            subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT) as process,
        ):
            program = psutil.Process(process.pid)
            try:
                return self._watch(process, program, number)
            finally:
                for member in family(program):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        member.kill()

    def _watch(
        self, process: subprocess.Popen[bytes], program: psutil.Process, number: int
    ) -> tuple[float, float]:
        """Wait for the steps, and look at the memory of the program's processes."""
        times: list[float] = []  # when each step was seen
        most = 0.0
        last_look = 0.0
        last_step = time.perf_counter()
        while len(times) < number:
            now = time.perf_counter()
            if process.poll() is not None or now - last_step > SILENCE:
                printed = self.output.read_text()[-3000:]
                raise RuntimeError(f"{len(times)} of {number}: {printed}")
            num_new = self.count() - len(times)
            if num_new:
                times += [now] * num_new
                last_step = now
            if now - last_look > MEMORY_POLL:
                most = max(most, megabytes(program))
                last_look = now
            time.sleep(POLL)
        return times[number - 1] - times[0], most

    def count(self) -> int:
        """The steps that are done, by the tool's metrics, or timm's log."""
        if self.name == OURS:
            lines = lines_of(self.out / "metrics.jsonl")
            return sum(json.loads(line)["kind"] == "step" for line in lines)
        return sum(line.startswith("Train: ") for line in lines_of(self.output))


def command_of(
    name: str, options: argparse.Namespace, folder: Path, out: Path
) -> Command:
    """Both programs have the same sizes."""
    if name == OURS:
        return Command(name, our_arguments(options, folder, out), out)
    return Command(name, their_arguments(options, folder, out), out)


def our_arguments(options: argparse.Namespace, folder: Path, out: Path) -> list[str]:
    settings = {
        "--data": folder,
        "--model": f"timm:{options.model}",
        "--image-size": options.size,
        "--batch": options.batch,
        "--out": out,
        "--micro-batch-size": options.micro_batch,
        "--devices": "cpu,cpu",
        "--workers": options.workers,
        "--epochs": 1,
        "--warmup-epochs": 0,
    }
    return ["-m", "scatterpar", "train", *as_words(settings)]


def their_arguments(options: argparse.Namespace, folder: Path, out: Path) -> list[str]:
    settings = {
        "--data-dir": folder,
        "--model": options.model,
        "--train-split": "train",
        "--val-split": "val",
        "--num-classes": 10,
        "--img-size": options.size,
        "-b": options.micro_batch,
        "--device": "cpu",
        "--grad-accum-steps": options.batch // options.micro_batch,
        "-j": options.workers,
        "--color-jitter": 0,
        "--train-interpolation": "bilinear",
        "--smoothing": 0,
        "--weight-decay": "5e-4",
        "--epochs": 1,
        "--warmup-epochs": 0,
        "--lr": 0.025,
        "--log-interval": 1,
        "--output": out,
    }
    return ["-c", START, str(options.timm_train), *as_words(settings)]


def as_words(settings: dict[str, object]) -> list[str]:
    """Options and values as arguments of a command."""
    words = []
    for name, value in settings.items():
        words += [name, str(value)]
    return words


def lines_of(file: Path) -> list[str]:
    """The complete lines so far; none without the file."""
    text = file.read_text() if file.exists() else ""
    complete, _, _ = text.rpartition("\n")
    return complete.splitlines()


def family(process: psutil.Process) -> Iterator[psutil.Process]:
    """The processes that ``process`` has started, and itself."""
    with contextlib.suppress(psutil.NoSuchProcess):
        yield from process.children(recursive=True)
    yield process


def megabytes(process: psutil.Process) -> float:
    """Memory of a process and all that it has started; shared pages count once."""
    total = 0
    for member in family(process):
        with contextlib.suppress(psutil.Error):
            total += member.memory_full_info().pss
    return total / 1e6


if __name__ == "__main__":
    main()
