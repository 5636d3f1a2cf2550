"""What is left at the end of a run: a summary in words, pictures, and a page."""

from __future__ import annotations

import math
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


def what_it_means(scale: float, batch: int) -> str:
    """Tell how well a batch suits a noise scale, both in images.

    A step with a batch of B images gets 1 / (1 + scale / B) of the way that one with all images
    would, and an image counts 1 / (1 + B / scale) of what it does in a tiny batch (McCandlish et
    al. 2018, arXiv:1812.06162, section 2.2).

    >>> print(what_it_means(scale=3000.0, batch=1000))
    noise scale of the gradient at the end: 3,000 images
      a step with a batch of 1,000 goes 25% as far as one with all images, and each of its images
      counts 75% of what it does in a tiny batch: a larger --batch needs fewer steps
    """
    if batch > 2 * scale:
        advice = "a smaller --batch needs fewer images"
    elif batch < scale / 2:
        advice = "a larger --batch needs fewer steps"
    else:
        advice = "--batch suits it"
    return (
        f"noise scale of the gradient at the end: {scale:,.0f} images\n"
        f"  a step with a batch of {batch:,} goes {1 / (1 + scale / batch):.0%} as far as one with "
        "all images, and each of its images\n"
        f"  counts {1 / (1 + batch / scale):.0%} of what it does in a tiny batch: {advice}"
    )


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
    if run.noise is not None and math.isfinite(run.noise.scale):
        print(what_it_means(run.noise.scale, run.training.batches.batch))
    if run.traffic.steps:
        if machines.size > 1:
            print("within the first machine, without what machines told each other:")
        print(run.traffic)
