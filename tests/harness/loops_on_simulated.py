"""A pytest plugin: tests of other libraries' loops on the simulated accelerator, where
several memories are real.

``-p simulated -p harness.loops_on_simulated``: the tests run as they are, but ``"cpu"``
and ``"cpu:1"`` in the devices of engines mean ``"simulated:0"`` and ``"simulated:1"``,
and the loops of other libraries, the stock ones too, run on the first.
"""

from __future__ import annotations

import sys
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

import pytest
import simulated
import torch

from scatterpar.devices import device_ids

FIRST = f"{simulated.NAME}:0"
GENERATOR = "generator.pt"
_resolve = device_ids.resolve


@pytest.fixture(autouse=True)
def _on_the_accelerator(monkeypatch):
    for name, module in list(sys.modules.items()):
        is_ours = name.startswith("scatterpar")
        if is_ours and vars(module).get("resolve") is _resolve:
            monkeypatch.setattr(module, "resolve", _resolved)
    if find_spec("transformers"):
        _place_trainers(monkeypatch)
        _save_generators(monkeypatch)
    if find_spec("lightning"):
        _place_lightning(monkeypatch)
    if find_spec("fastai"):
        _place_fastai(monkeypatch)


def _resolved(devices):
    """The devices of an engine, with accelerators in place of the CPU's."""
    chosen = []
    for device in _resolve(devices):
        is_virtual = device.type == "cpu"
        index = device.index or 0
        chosen.append(torch.device(simulated.NAME, index) if is_virtual else device)
    return _resolve(chosen)


def _place_trainers(monkeypatch):
    import accelerate
    import transformers

    set_up = transformers.TrainingArguments._setup_devices.func

    def device(args):
        set_up(args)
        return torch.device(FIRST)

    set_up_on_first = cached_property(device)
    set_up_on_first.__set_name__(transformers.TrainingArguments, "_setup_devices")
    first = property(lambda _: torch.device(FIRST))
    monkeypatch.setattr(
        transformers.TrainingArguments, "_setup_devices", set_up_on_first
    )
    monkeypatch.setattr(accelerate.Accelerator, "device", first)


def _save_generators(monkeypatch):
    """Trainers' checkpoints have the state of the first device's generator, as they
    have CUDA's.
    """
    import transformers

    save = transformers.Trainer._save_rng_state
    load = transformers.Trainer._load_rng_state

    def saved(trainer, folder):
        save(trainer, folder)
        state = torch.get_device_module(FIRST).get_rng_state(FIRST)
        torch.save(state, Path(folder, GENERATOR))

    def loaded(trainer, folder):
        load(trainer, folder)
        if folder is not None:
            state = torch.load(Path(folder, GENERATOR))
            torch.get_device_module(FIRST).set_rng_state(state, FIRST)

    monkeypatch.setattr(transformers.Trainer, "_save_rng_state", saved)
    monkeypatch.setattr(transformers.Trainer, "_load_rng_state", loaded)


def _place_lightning(monkeypatch):
    from lightning.pytorch.accelerators import CPUAccelerator
    from lightning.pytorch.strategies import SingleDeviceStrategy

    first = property(lambda _: torch.device(FIRST))
    monkeypatch.setattr(CPUAccelerator, "setup_device", lambda *_: None)
    monkeypatch.setattr(SingleDeviceStrategy, "root_device", first)


def _place_fastai(monkeypatch):
    from fastai.data.core import DataLoaders

    initialise = DataLoaders.__init__

    def on_first(loaders, *args, **options):
        initialise(loaders, *args, **{**options, "device": FIRST})

    monkeypatch.setattr(DataLoaders, "__init__", on_first)
