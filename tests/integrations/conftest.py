"""These tests on the simulated accelerator, where several memories are real.

With the plugin (``-p simulated``, see tests/README.md) the tests run as they are, but
``"cpu"`` and ``"cpu:1"`` in the devices of engines mean ``"simulated:0"`` and
``"simulated:1"``, and other libraries' loops, the stock ones too, run on the first.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType

import pytest
import simulated
import torch

from scatterpar.devices import device_ids

FIRST = torch.device(simulated.NAME, 0)
_resolve = device_ids.resolve


def _resolved(devices):
    """The devices of an engine, with accelerators in place of the CPU's."""
    chosen = []
    for device in _resolve(devices):
        if device.type == "cpu":
            device = torch.device(simulated.NAME, device.index or 0)
        chosen.append(device)
    return _resolve(chosen)


def _modules_with_resolve() -> list[ModuleType]:
    return [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("scatterpar") and vars(module).get("resolve") is _resolve
    ]


@pytest.fixture(autouse=True)
def _on_the_simulated_accelerator(monkeypatch):
    if not hasattr(torch, simulated.NAME):
        yield
        return
    for module in _modules_with_resolve():
        monkeypatch.setattr(module, "resolve", _resolved)
    if find_spec("transformers"):
        _place_trainers(monkeypatch)
    if find_spec("lightning"):
        _place_lightning(monkeypatch)
    if find_spec("fastai"):
        _place_fastai(monkeypatch)
    yield


def _place_trainers(monkeypatch):
    import accelerate
    import transformers

    known = transformers.TrainingArguments.device.fget

    def device(args):
        known(args)  # sets up the arguments
        return FIRST

    monkeypatch.setattr(transformers.TrainingArguments, "device", property(device))
    monkeypatch.setattr(accelerate.Accelerator, "device", property(lambda _: FIRST))


def _place_lightning(monkeypatch):
    from lightning.pytorch.accelerators import CPUAccelerator

    monkeypatch.setattr(CPUAccelerator, "setup_device", lambda *_: None)


def _place_fastai(monkeypatch):
    from fastai.data.core import DataLoaders

    made = DataLoaders.__init__

    def on_first(loaders, *args, **options):
        made(loaders, *args, **{**options, "device": FIRST})

    monkeypatch.setattr(DataLoaders, "__init__", on_first)
