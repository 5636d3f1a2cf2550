"""`python -m scatterpar export`: a run's model in a file that needs no scatterpar."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from scatterpar.train import pictures
from scatterpar.train.command_line import (
    UsageError,
    exit_code_of,
    option,
    read,
    say,
    words_of,
)
from scatterpar.train.models import load_model
from scatterpar.train.predict import MODEL, RUN
from scatterpar.train.records import written

_MODEL_FILE = "model.pt2"
_ABOUT_FILE = "model.json"
_SCRIPT_FILE = "classify.py"
_ROWS = 3  # of the example: torch.export would take one row for a constant


@dataclass(frozen=True)
class ExportOptions:
    """Write the model of a run as torch.export's file, with a script that classifies
    pictures by it and needs torch, Pillow and NumPy only.
    """

    examples: ClassVar[str] = """examples:
  python -m scatterpar export runs/photos
  python runs/photos/classify.py new.jpg

The file takes bytes, (rows, channels, height, width), of any number of rows, and
standardises them; model.json has the names of the classes, which are the columns of the
scores."""

    run: Path = option(None, RUN, "", kind=Path)
    out: Path | None = option(
        None,
        "folder of the files (default: that of the run)",
        kind=Path,
        metavar="FOLDER",
    )
    model: str | None = option(None, MODEL, metavar="NAME")


def main(arguments: Sequence[str]) -> int:
    """Run the command. Returns the exit code: 0; 2: wrong argument, or the model cannot
    be exported.
    """
    return exit_code_of(
        "export", lambda: export(read(ExportOptions, arguments, "export"))
    )


def export(options: ExportOptions) -> int:
    """Write all files, and print what they are."""
    model, about = load_model(options.run, options.model)
    run_folder = options.run if options.run.is_dir() else options.run.parent
    folder = options.out or run_folder
    model.requires_grad_(False)  # else each call of the file would record a graph
    shape = about["image_shape"]
    images = torch.randint(256, (_ROWS, *shape), dtype=torch.uint8)
    program = _exported(model, images)
    described = {
        "class_names": about["class_names"],
        "image_shape": shape,
        "images": "uint8, (rows, channels, height, width), as classify.py reads files",
        "scores": "float32, (rows, classes); their softmax is what predict writes",
    }
    with written(folder / _MODEL_FILE) as file:
        torch.export.save(program, file)
    with written(folder / _ABOUT_FILE) as file:
        file.write(json.dumps(described, indent=1).encode())
    with written(folder / _SCRIPT_FILE) as file:
        file.write(Path(pictures.__file__).read_bytes())
    say(
        f"{folder / _MODEL_FILE}: torch.export.load(…).module()(images)",
        f"{folder / _ABOUT_FILE}: the names of the classes",
        f"to use it without scatterpar: python {folder / _SCRIPT_FILE} PICTURE (needs "
        "torch, Pillow and NumPy)",
    )
    return 0


def _exported(model: Any, images: Tensor) -> torch.export.ExportedProgram:
    """Export the model for any number of rows, and compare it with itself."""
    expected = model(images)
    try:
        program = torch.export.export(
            model, (images,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)
        )
        scores = program.module()(images)
    except Exception as error:  # torch.export raises many kinds
        raise UsageError(
            f"torch.export cannot export this model: {words_of(error):.300}"
        ) from error
    # The tolerance of float32 in another order of sums.
    if not torch.allclose(scores, expected, rtol=1e-4, atol=1e-5):
        raise UsageError(
            "the exported model has other scores than the model: its forward depends "
            "on more than its input"
        )
    return program
