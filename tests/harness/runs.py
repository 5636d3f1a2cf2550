"""Runs of the training tool: what they recorded, and whether two are the same; a model
for them.
"""

import contextlib
import json
import time

import torch
from faults.processes import SILENCE
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_leaves_with_path

from scatterpar.train.models import build_model
from scatterpar.train.records import Metrics, save


class Small(nn.Module):
    """Draws random numbers, and has buffers. Of coloured images it sees one channel."""

    def __init__(self, num_classes):
        super().__init__()
        self.body = nn.Sequential(
            nn.Flatten(),
            nn.AdaptiveAvgPool1d(196),  # pictures of 28 x 28 or more
            nn.Linear(196, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(0.2),
        )
        self.head = nn.Linear(8, num_classes)

    def forward(self, images):
        return self.head(self.body(images[:, :1]))


class Stop(Exception):
    """Ends a run as any error does."""


@contextlib.contextmanager
def stop_after(monkeypatch, number):
    """A run in the body ends once so many steps are recorded, before the
    next one is.
    """
    write = Metrics.write

    def stopping(self, kind, **fields):
        if kind == "step" and fields["step"] > number:
            raise Stop
        write(self, kind, **fields)

    with monkeypatch.context() as patch, contextlib.suppress(Stop):
        patch.setattr(Metrics, "write", stopping)
        yield


def wait_until(reached, folder):
    """Wait for as long as files in ``folder`` keep changing: logs, records,
    checkpoints.
    """
    sizes_before = None
    last_change = time.monotonic()
    while not reached():
        files = [path for path in folder.rglob("*") if path.is_file()]
        sizes = [(str(path), path.stat().st_size) for path in files]
        if sizes != sizes_before:
            sizes_before = sizes
            last_change = time.monotonic()
        is_silent = time.monotonic() - last_change >= SILENCE
        assert not is_silent, f"silent for {SILENCE:g} s: {sizes}"
        time.sleep(0.1)


def records(out, kind):
    """The records of a kind, as far as they are written."""
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    written = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record for record in written if record["kind"] == kind]


def steps(out):
    return records(out, "step")


def differences(run, other_run):
    """The places where the final checkpoints of two runs differ by a bit."""
    values = _final_values(run)
    values_of_other = _final_values(other_run)
    assert values.keys() == values_of_other.keys()
    places = []
    for path, value in values.items():
        if not _same(value, values_of_other[path]):
            places.append(keystr(path))
    return places


def _final_values(out):
    state = torch.load(out / "checkpoint.pt")
    del state["words"]  # of the command line: the folder differs
    return dict(tree_leaves_with_path(state))


def _same(value, expected):
    if isinstance(value, Tensor):
        return torch.equal(value, expected)
    return value == expected


def assert_same_run(whole, parts, number):
    """So many steps, each recorded once, with the same bits as in a run that nobody
    stopped.
    """
    recorded = _recorded_steps(parts)
    assert recorded == _recorded_steps(whole)
    assert len(recorded) == number
    assert differences(whole, parts) == []


def _recorded_steps(out):
    fields = "step", "epoch", "images", "learning_rate", "loss"
    recorded = []
    for step in steps(out):
        recorded.append([step[field] for field in fields])
    return recorded


def write_run(folder, classes, size=32):
    """Write a run's `best.pt`, of random weights for pictures of that size."""
    shape = (3, size, size)
    model = build_model("cnn", shape, len(classes), [100.0] * 3, [50.0] * 3)
    about = {"model": "cnn", "image_shape": list(shape), "class_names": list(classes)}
    about |= {"mean": [100.0] * 3, "std": [50.0] * 3}
    save(folder / "best.pt", model=model.network.state_dict(), about=about)
    return folder
