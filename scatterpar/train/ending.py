"""What is left at the end of a run: a summary in words, pictures, and a page."""

from __future__ import annotations

import sys

from scatterpar.train.curves import draw_curves
from scatterpar.train.epochs import Run
from scatterpar.train.errors import UsageError
from scatterpar.train.page import write_page


def finish(run: Run, ending: str) -> None:
    """Print and record what was reached, and draw it, also where that ended early.

    Args:
        run: the run.
        ending: `finished`, or why not.

    Raises:
        UsageError: a file cannot be written.
    """
    machines = run.training.machines
    if not machines.is_first:
        if ending != "finished":
            print(f"rank {machines.rank}: {ending}", file=sys.stderr)
        return
    _say(run, ending)
    run.metrics.write(
        "summary",
        ending=ending,
        epochs=run.training.batches.epoch,
        steps=run.progress.step,
        seconds=run.seconds,
        test_accuracy=run.progress.accuracy,
        bytes_counted=run.traffic.counted,
        bytes_data_parallel_computed=run.traffic.computed,
        left_out=dict(run.feed.broken),
    )
    out = run.options.out
    try:
        draw_curves(run.metrics.records, out / "curves.png")
        write_page(out / "report.html", run, ending)
    except OSError as error:
        raise UsageError(f"--out: {out} cannot be written: {error.strerror}") from error
    print(f"wrote metrics.jsonl, curves.png and report.html in {out}")


def _say(run: Run, ending: str) -> None:
    progress, machines = run.progress, run.training.machines
    print(
        f"{ending} after {run.training.batches.epoch} of {run.options.epochs} epochs, "
        f"{progress.step} steps, {run.seconds:.1f} s"
    )
    if progress.accuracy is None:
        print("test accuracy: not measured, no epoch was finished")
    else:
        print(f"test accuracy: {progress.accuracy:.2%}")
    if run.traffic.steps:
        if machines.size > 1:
            print("within the first machine, without what machines told each other:")
        print(run.traffic)
