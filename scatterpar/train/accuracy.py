"""`python -m scatterpar test`: the accuracy of a run on other labelled pictures."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import tyro

from scatterpar.tables import as_text
from scatterpar.train import command_line as cl
from scatterpar.train.command_line import UsageError, exit_code_of, printable, read
from scatterpar.train.data_parts import (
    TEST,
    Listing,
    first_names,
    labelled,
    unread_in_words,
)
from scatterpar.train.folders import list_pictures
from scatterpar.train.models import load_model
from scatterpar.train.predict import STOPPING, RunOptions, scored_files
from scatterpar.train.records import stoppable, written
from scatterpar.train.results import (
    COUNTED_CLASSES,
    TOP_5_CLASSES,
    Tally,
    accuracies_in_words,
    accuracy_per_class,
)


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions(RunOptions):
    """Test the model of a run on other labelled pictures: accuracy, accuracy of each
    class, and which classes are taken for which.
    """

    examples: ClassVar[str] = """examples:
  python -m scatterpar test runs/photos holidays --json holidays.json

holidays/ has a folder for each class, with the names that the run has."""

    # a folder with CLASS/
    pictures: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")]
    json: cl.Folder = None  # write all numbers there


def main(arguments: Sequence[str]) -> int:
    """Run the command. Returns the exit code: 0; 2: wrong argument, or no picture can
    be read; 130: interrupted.
    """
    return exit_code_of(
        "test", lambda: evaluate(read(EvaluationOptions, arguments, "test"))
    )


def evaluate(options: EvaluationOptions) -> int:
    """Print, and write, what a test of all pictures measured."""
    model, about = load_model(options.run, options.model)
    class_names = about["class_names"]
    if not options.pictures.is_dir():
        raise UsageError(
            f"{options.pictures} is no folder; pass one with a folder for each class"
        )
    listing = Listing(class_names=class_names)
    unread = listing.unread
    list_pictures(listing, TEST, options.pictures)
    pictures = labelled(listing)
    tally = Tally(len(class_names))
    unreadable = dict[str, str]()
    with stoppable(STOPPING) as signals:
        batches = scored_files(options, pictures, model, about, signals)
        for _, batch, scores in batches:
            unreadable |= dict(batch.broken)
            if len(batch.labels):
                tally.add(scores, batch.labels, batch.images)
    # Accuracies of a part of the images would look like those of all.
    if signals:
        print(f"interrupted after {tally.images:,} of {len(listing.rows):,} images")
        return 128 + signals[0]
    for name, reason in unreadable.items():
        print(printable(f"{name} cannot be read: {reason}"), file=sys.stderr)
    if not tally.images:
        raise UsageError(
            f"no picture of the classes {first_names(class_names)} in "
            f"{options.pictures} can be read; not read: {unread_in_words(unread)}"
        )
    measured, lines = _measured(tally, class_names)
    measured["run"] = str(options.run)
    measured["pictures"] = str(options.pictures)
    measured["unreadable"] = unreadable
    measured["not_read"] = unread
    if unread:
        lines.append(f"not read: images or files {unread_in_words(unread)}")
    print(printable("\n".join(lines)))
    if options.json is not None:
        with written(options.json) as file:
            file.write(json.dumps(measured, indent=1).encode())
        print(f"wrote {options.json}")
    return 0


def _measured(
    tally: Tally, class_names: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the numbers of a test by their names, and the lines that say them."""
    measured: dict[str, Any] = {
        "images": tally.images,
        "accuracy": tally.accuracy,
        "loss": tally.loss,
        "class_names": class_names,
    }
    lines = []
    accuracy = f"accuracy: {tally.accuracy:.2%}"
    if len(class_names) >= TOP_5_CLASSES:
        measured["accuracy_top5"] = tally.accuracy_top5
        accuracy += f", top-5 accuracy {tally.accuracy_top5:.2%}"
    if tally.confusion is not None:
        confusion = tally.confusion.tolist()
        measured["confusion"] = confusion
        if len(class_names) <= COUNTED_CLASSES:
            table = [("true, and predicted as", *class_names)]
            for name, counts in zip(class_names, confusion, strict=True):
                table.append((name, *map(str, counts)))
            lines.append(as_text(table))
        per_class = accuracy_per_class(tally.confusion, class_names)
        measured["accuracy_per_class"] = per_class
        lines.append(accuracies_in_words(per_class))
    lines.append(f"{accuracy}, loss {tally.loss:.4f}, {tally.images:,} images")
    return measured, lines
