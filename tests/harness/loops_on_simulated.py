"""A pytest plugin: tests of other libraries' loops on the simulated accelerator, where
several memories are real.

``-p simulated -p harness.loops_on_simulated``: the tests run as they are, but ``"cpu"``
and ``"cpu:1"`` in the devices of engines mean ``"simulated:0"`` and ``"simulated:1"``,
and the loops of other libraries, the stock ones too, run on the first.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib.util import find_spec

import pytest
import simulated
import torch

from scatterpar.devices import device_ids

FIRST = f"{simulated.NAME}:0"
# Parts of the names of tests, and why they cannot run there.
LEFT_OUT = {
    "[regression]": "the accelerator has no backward pass of mse_loss",
    "[SigLIP]": "its Tensor.repeat makes inference tensors",
    "test_resumed_is_uninterrupted_with_dropout": "Trainers do not save its generator",
    "test_conflicts_refused_by_name[device]": "the error names the accelerator",
    "test_trainer_devices_become_replicas": "Lightning numbers the CPU's devices",
    "test_arguments_copied_with_all_rows": "it names the CPU",
}
_resolve = device_ids.resolve


def pytest_collection_modifyitems(items):
    for item in items:
        for part, reason in LEFT_OUT.items():
            if part in item.name:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _on_the_accelerator(request, monkeypatch):
    for name, module in list(sys.modules.items()):
        is_ours = name.startswith("scatterpar")
        if is_ours and vars(module).get("resolve") is _resolve:
            monkeypatch.setattr(module, "resolve", _resolved)
    if hasattr(request.module, "guarded"):  # what mixes devices is an error anyway
        monkeypatch.setattr(request.module, "guarded", lambda *_: nullcontext())
    if find_spec("transformers"):
        _place_trainers(monkeypatch)
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

    known = transformers.TrainingArguments.device.fget

    def device(args):
        known(args)  # sets up the arguments
        return torch.device(FIRST)

    first = property(lambda _: torch.device(FIRST))
    monkeypatch.setattr(transformers.TrainingArguments, "device", property(device))
    monkeypatch.setattr(accelerate.Accelerator, "device", first)


def _place_lightning(monkeypatch):
    from lightning.pytorch.accelerators import CPUAccelerator
    from lightning.pytorch.strategies import SingleDeviceStrategy

    first = property(lambda _: torch.device(FIRST))
    monkeypatch.setattr(CPUAccelerator, "setup_device", lambda *_: None)
    monkeypatch.setattr(SingleDeviceStrategy, "root_device", first)


def _place_fastai(monkeypatch):
    from fastai.data.core import DataLoaders

    made = DataLoaders.__init__

    def on_first(loaders, *args, **options):
        made(loaders, *args, **{**options, "device": FIRST})

    monkeypatch.setattr(DataLoaders, "__init__", on_first)
