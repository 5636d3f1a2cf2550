"""The training tool beside timm's ``train.py``: images a second and memory, on the same
folder.

    python -m benchmarks.feeding.beside_timm --timm-train PATH/train.py

Both train the same model of timm's on the same pictures, with timm's transforms, the
same number of images a step, the same micro-batches and worker processes, on all cores
of this process. They take turns: in each round one runs, is ended after some steps, and
then the other. Seconds are counted from the end of the first step to the end of the
last one, memory is the largest that all its processes had.
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
from pathlib import Path

import psutil
from PIL import Image

from benchmarks.environment import describe
from benchmarks.tables import Publisher, Table
from benchmarks.timing import ratio
from scatterpar.train.data import load

OURS, THEIRS = "scatterpar train", "timm's train.py"
POLL = 0.05  # seconds
SILENCE = 180.0  # of a run that makes no step
# Also where torchvision was not built for the torch that is there.
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
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = given.folder or write_pictures(
            Path(place) / "data", given.pictures, given.size
        )
        speeds: dict[str, list[float]] = {OURS: [], THEIRS: []}
        memory: dict[str, list[float]] = {OURS: [], THEIRS: []}
        for number in range(given.rounds):
            for name in (OURS, THEIRS) if number % 2 == 0 else (THEIRS, OURS):
                out = Path(place) / f"{name.split()[0]}-{number}"
                command, log = commands(given, folder, out)[name]
                seconds, megabytes = one_run(command, log, given.steps)
                speeds[name].append(given.batch * (given.steps - 1) / seconds)
                memory[name].append(megabytes)
                print(
                    f"round {number}, {name}: {speeds[name][-1]:.1f} images/s",
                    flush=True,
                )
    compared = ratio(speeds[OURS], speeds[THEIRS])
    rows = [
        [
            name,
            f"{statistics.median(speeds[name]):.1f}",
            f"{statistics.median(memory[name]):,.0f}",
        ]
        for name in (OURS, THEIRS)
    ]
    rows.append(["the first one over the second", f"{compared}", ""])
    table = Table(["", "images a second", "memory of all processes, MB"], rows)
    if given.print_only:
        print(table)
        return
    options = {
        name: str(value) for name, value in vars(given).items() if name != "timm_train"
    }
    data = {"options": options, "images_per_second": speeds, "megabytes": memory}
    Publisher(Path(__file__).parent, describe())("beside-timm", table, data)


def write_pictures(folder: Path, number: int, size: int) -> Path:
    """JPEG files in train/CLASS/ and test/CLASS/, made of the included images, over and
    over.
    """
    data = load()
    images, labels = data.train.tensors
    for part, rows in (("train", number), ("test", 200)):
        for row in range(rows):
            source = row % len(data.train)
            name = data.class_names[int(labels[source])].replace("/", "-")
            place = folder / part / name
            place.mkdir(parents=True, exist_ok=True)
            picture = Image.fromarray(images[source, 0].numpy()).convert("RGB")
            picture.resize((size, size)).save(place / f"{row:06d}.jpg")
    return folder


def commands(
    given: argparse.Namespace, folder: Path, out: Path
) -> dict[str, tuple[list[str], Path]]:
    """What is run, and the file in which a line appears with each step."""
    ours = [
        "-m",
        "scatterpar",
        "train",
        "--data",
        str(folder),
        "--model",
        f"timm:{given.model}",
    ]
    ours += [
        "--image-size",
        str(given.size),
        "--batch",
        str(given.batch),
        "--out",
        str(out),
    ]
    ours += ["--micro-batch-size", str(given.micro_batch), "--devices", "cpu,cpu"]
    ours += ["--workers", str(given.workers), "--epochs", "1", "--warmup-epochs", "0"]
    theirs = [
        "-c",
        START,
        str(given.timm_train),
        "--data-dir",
        str(folder),
        "--model",
        given.model,
    ]
    theirs += ["--train-split", "train", "--val-split", "test", "--num-classes", "10"]
    theirs += [
        "--img-size",
        str(given.size),
        "-b",
        str(given.micro_batch),
        "--device",
        "cpu",
    ]
    theirs += ["--grad-accum-steps", str(given.batch // given.micro_batch), "-j"]
    theirs += [
        str(given.workers),
        "--color-jitter",
        "0",
        "--train-interpolation",
        "bilinear",
    ]
    theirs += [
        "--smoothing",
        "0",
        "--weight-decay",
        "5e-4",
        "--epochs",
        "1",
        "--warmup-epochs",
    ]
    theirs += ["0", "--lr", "0.025", "--log-interval", "1", "--output", str(out)]
    return {
        OURS: ([sys.executable, *ours], out / "metrics.jsonl"),
        THEIRS: ([sys.executable, *theirs], out.with_suffix(".log")),
    }


def one_run(command: list[str], log: Path, steps: int) -> tuple[float, float]:
    """Seconds from the first step's end to the last one's, and the largest memory in
    MB.
    """
    times: list[float] = []
    most, heard = 0.0, time.perf_counter()
    output = log if log.suffix == ".log" else log.parent.with_suffix(".log")
    with (
        output.open("w") as file,
        subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT) as process,
    ):
        family = psutil.Process(process.pid)
        measured = 0.0
        try:
            while len(times) < steps:
                if process.poll() is not None or time.perf_counter() - heard > SILENCE:
                    raise RuntimeError(
                        f"no {steps} steps: {output.read_text()[-3000:]}"
                    )
                found = steps_in(log)
                now = time.perf_counter()
                times += [now] * (found - len(times))
                heard = now if times and times[-1] == now else heard
                if now - measured > 1.0:  # looking costs time, too
                    most, measured = max(most, megabytes(family)), now
                time.sleep(POLL)
        finally:
            for one in everyone(family):
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
    if log.parent.is_dir() and log.suffix != ".log":
        shutil.rmtree(log.parent)
    return times[steps - 1] - times[0], most


def steps_in(log: Path) -> int:
    """How many steps are done, by what was written."""
    text = log.read_text() if log.exists() else ""
    lines = text[: text.rfind("\n") + 1].splitlines()
    if log.suffix == ".log":
        return sum(line.startswith("Train: ") for line in lines)
    return sum(json.loads(line)["kind"] == "step" for line in lines)


def everyone(process: psutil.Process) -> Iterator[psutil.Process]:
    """The process and all that it has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        yield from process.children(recursive=True)
    yield process


def megabytes(process: psutil.Process) -> float:
    """Memory of a process and all that it has started; what they share counts once."""
    total = 0
    for one in everyone(process):
        with contextlib.suppress(psutil.Error):
            total += one.memory_full_info().pss
    return total / 1e6


if __name__ == "__main__":
    main()
