"""`python -m scatterpar export`: a model as files that need no scatterpar."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import tyro
from torch import Tensor

from scatterpar.train import command_line as cl
from scatterpar.train import pictures
from scatterpar.train.command_line import UsageError, exit_code_of, read, words_of
from scatterpar.train.libraries import INSTALL
from scatterpar.train.models import load_model
from scatterpar.train.records import written

_TORCH_FILE = "model.pt2"
_ONNX_FILE = "model.onnx"
_ABOUT_FILE = "model.json"
_SCRIPT_FILE = "classify.py"
_NEEDED_BY_ONNX = ("onnx", "onnxscript")
_ROWS = 3  # of the example: torch.export would take one row for a constant


@dataclass(frozen=True)
class ExportOptions:
    """Write the model of a run as torch.export's file, and as ONNX, with a script that
    classifies pictures by it and needs torch and Pillow only.
    """

    examples: ClassVar[str] = """examples:
  python -m scatterpar export runs/photos
  python runs/photos/classify.py new.jpg

Both files take bytes, (rows, channels, height, width), of any number of rows, and
standardise them; model.json has the names of the classes, which are the columns of the
scores."""

    # folder of a training run, of which best.pt is taken, or one of its checkpoints
    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    out: cl.Folder = None  # folder of the files (default: that of the run)
    # allow the checkpoint to call this package.module:callable
    model: cl.Name = None


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
    model.requires_grad_(False)
    shape = about["image_shape"]
    images = torch.randint(256, (_ROWS, *shape), dtype=torch.uint8)
    program = _exported(model, images)
    described = {
        "class_names": about["class_names"],
        "image_shape": shape,
        "images": "uint8, (rows, channels, height, width), as classify.py reads files",
        "scores": "float32, (rows, classes); their softmax is what predict writes",
    }
    with written(folder / _TORCH_FILE) as file:
        torch.export.save(program, file)
    with written(folder / _ABOUT_FILE) as file:
        file.write(json.dumps(described, indent=1).encode())
    with written(folder / _SCRIPT_FILE) as file:
        file.write(Path(pictures.__file__).read_bytes())
    print(f"{folder / _TORCH_FILE}: torch.export.load(…).module()(images)")
    print(_write_onnx(program, folder / _ONNX_FILE))
    print(f"{folder / _ABOUT_FILE}: the names of the classes")
    print(f"to use it without scatterpar: python {folder / _SCRIPT_FILE} PICTURE")
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
    if not torch.allclose(scores, expected, rtol=1e-4, atol=1e-5):
        raise UsageError(
            "the exported model has other scores than the model: its forward depends "
            "on more than its input"
        )
    return program


def _write_onnx(program: torch.export.ExportedProgram, path: Path) -> str:
    """Write ONNX if its packages are installed. Returns a line about the file."""
    missing = [name for name in _NEEDED_BY_ONNX if find_spec(name) is None]
    if missing:
        return (
            f"no {path.name}: {' and '.join(missing)} not installed ({INSTALL} -e "
            "'.[onnx]' where you cloned scatterpar)"
        )
    try:
        with written(path) as file:
            onnx = torch.onnx.export(
                program, input_names=["images"], output_names=["scores"], verbose=False
            )
            assert onnx is not None
            file.write(onnx.model_proto.SerializeToString())
    except Exception as error:  # of torch, onnx and onnxscript
        return f"no {path.name}: torch.onnx cannot export it: {words_of(error):.200}"
    return f"{path}: input images, output scores"
