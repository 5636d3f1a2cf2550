"""The pages of the guide as tests read them: their snippets, and what these take for
granted.
"""

import configparser
import copy
import importlib.util
import re
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import scatterpar
from scatterpar.batch.several_batches import batches_of

ROOT = Path(__file__).parent.parent.parent
CLASSES = 3
SETUP = configparser.ConfigParser(interpolation=None)
SETUP.read(ROOT / "setup.cfg", encoding="utf-8")


def read(page):
    return (ROOT / page).read_text(encoding="utf-8")


def example(name):
    """The script of that name in examples/, as a module."""
    where = ROOT / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, where)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def sections(page):
    """Each section of second order by its title; those without a snippet
    are left out.
    """
    _, *parts = re.split(r"^## ", read(page), flags=re.MULTILINE)
    texts = {}
    for part in parts:
        title, _, _ = part.partition("\n")
        if blocks(part, "python"):
            texts[title] = part
    return texts


def namespace():
    """What pages take for granted: a model on the master, data, a loss."""
    rows = 64 * 16
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(rows, 4, dtype=torch.float64, generator=generator)
    labels = torch.randint(CLASSES, (rows,), generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, CLASSES))
    model = model.double()
    if torch.accelerator.is_available():
        model = model.to("cuda:0")
        images = images.to("cuda:0")
        labels = labels.to("cuda:0")
    return {
        "torch": torch,
        "nn": nn,
        "scatterpar": scatterpar,
        "DataLoader": DataLoader,
        "model": model,
        "net": copy.deepcopy(model),
        "criterion": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.0),
        "images": images,
        "labels": labels,
        "device": images.device,
        "device_ids": [images.device] * 2,
        "loader": [(images, labels)],
        "dataset": TensorDataset(images, labels),
    }


class Checked(scatterpar.ScatterOnceParallel):
    """An engine that first compares the gradient of each step with that
    of plain torch.
    """

    engines: ClassVar = []
    compared = 0

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.engines.append(self)

    def forward_backward(self, *batch, **options):
        self._compare(*batch, **options)
        return super().forward_backward(*batch, **options)

    def loss(self, *batch, **options):
        self._compare(*batch, **options)
        return super().loss(*batch, **options)

    def _compare(self, inputs, targets=None, criterion=None, **options):
        if len(batches_of(inputs, targets, 0)) == 1:  # ``check`` takes one batch
            names = {"reduction", "count", "whole_batch"} & options.keys()
            options_of_check = {name: options[name] for name in names}
            report = self.check(inputs, targets, criterion, **options_of_check)
            assert report.passed, report
        self.compared += 1


def run(code, names):
    """Run a snippet, and end the threads of the engine that it leaves open."""
    try:
        exec(code, names)
    finally:
        if "engine" in names:
            names["engine"].close()
