"""Which devices a list of names means, and which of them share a memory."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from scatterpar.devices import device_ids
from scatterpar.devices.device_ids import parse_devices, resolve
from scatterpar.devices.virtual_devices import HOST

pytestmark = pytest.mark.core


@pytest.fixture
def two_accelerators(monkeypatch):
    """torch says that it has two, of which the second is current."""
    accelerator = torch.device("cuda")
    monkeypatch.setattr(
        device_ids.torch.accelerator, "current_accelerator", lambda **_: accelerator
    )
    monkeypatch.setattr(device_ids.torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(device_ids.torch.accelerator, "current_device_index", lambda: 1)


@pytest.fixture
def no_accelerator(monkeypatch):
    monkeypatch.setattr(
        device_ids.torch.accelerator, "current_accelerator", lambda **_: None
    )
    monkeypatch.setattr(device_ids.torch.accelerator, "device_count", lambda: 0)


WITH_TWO = {
    "all": (None, ["cuda:0", "cuda:1"]),
    "ordinals": ([1, 0, 1], ["cuda:1", "cuda:0", "cuda:1"]),
    "names": (["cuda:1", "cpu", "cpu:3"], ["cuda:1", "cpu", "cpu:3"]),
    "the current one": (["cuda"], ["cuda:1"]),
    "devices": ((torch.device("cuda", 0),), ["cuda:0"]),
}


@pytest.mark.parametrize("name", WITH_TWO)
def test_names_with_two_accelerators(two_accelerators, name):
    entries, expected = WITH_TWO[name]
    assert resolve(entries) == tuple(map(torch.device, expected))


def test_cpu_devices_ask_for_no_accelerator(monkeypatch):
    """The question alone takes CUDA from children that are forked later."""

    def initialises(*_, **__):
        raise AssertionError("the driver was initialised")

    for name in ("current_accelerator", "is_available", "device_count"):
        monkeypatch.setattr(device_ids.torch.accelerator, name, initialises)
    entries = ["cpu", "cpu:1", torch.device("cpu")]
    assert resolve(entries) == tuple(map(torch.device, entries))


@pytest.mark.parametrize(
    ("count", "processes", "parts"),
    [
        (8, 2, ["0 to 3", "4 to 7"]),
        (8, 1, ["0 to 7"]),
        (4, 4, ["0 to 0", "1 to 1", "2 to 2", "3 to 3"]),
        (5, 2, ["0 to 1", "2 to 4"]),
    ],
)
def test_process_of_a_launcher_takes_its_part(
    two_accelerators, monkeypatch, count, processes, parts
):
    """With two launchers for eight GPUs every process had all eight of them."""
    monkeypatch.setattr(device_ids.torch.accelerator, "device_count", lambda: count)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    warned = "do not divide evenly" if count % processes else None
    for number, part in enumerate(parts):
        monkeypatch.setenv("LOCAL_RANK", str(number))
        with pytest.warns(match=warned) if warned else contextlib.nullcontext():
            devices = resolve(None)
        assert f"{devices[0].index} to {devices[-1].index}" == part
    assert resolve([1, 0]) == (torch.device("cuda:1"), torch.device("cuda:0"))


def test_more_processes_than_accelerators_refused(two_accelerators, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(
        ValueError, match=r"3 processes .* 2 accelerators .* device_ids="
    ):
        resolve(None)
    assert resolve([0]) == (torch.device("cuda:0"),)


def test_processes_without_accelerators_have_the_host(no_accelerator, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert resolve(None) == (HOST,)


def test_no_accelerator_means_the_host(no_accelerator):
    assert resolve(None) == (HOST,)
    assert resolve(["cpu"] * 2) == (HOST, HOST)


REFUSED = {
    "no list": ("cpu", TypeError, r"'cpu'; for one replica pass \['cpu'\]"),
    "one number": (3, TypeError, r"first 3 accelerators pass \[0, 1, 2\], for one"),
    "one, as a number": (1, TypeError, r"for one replica pass \[1\]"),
    "a large number": (10**9, TypeError, r"for one replica pass \[1000000000\]"),
    "a set": ({"cpu"}, TypeError, "must be a list"),
    "empty": ([], ValueError, "device_ids is empty"),
    "a bool": ([True], TypeError, "got True"),
    "a float": ([1.0], TypeError, "got 1.0"),
    "an ordinal": ([0], ValueError, "0 is the ordinal of an accelerator"),
    "no device": (["cpux"], ValueError, "'cpux' is not a device"),
    "not here": (["cuda:0"], ValueError, r"cuda:0 is not here \(visible: no accel"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_names_of_no_device_refused(no_accelerator, name):
    entries, kind, words = REFUSED[name]
    with pytest.raises(kind, match=words):
        resolve(entries)


def test_invisible_device_refused(two_accelerators):
    with pytest.raises(ValueError, match=r"cuda:2 is not here \(visible: 2 cuda dev"):
        resolve([2])


@pytest.mark.parametrize(
    "words", ["cuda:0,1 cpu", "cuda:0 1,cpu", ["cuda:0,1", "cpu"], ["cuda:0", "1,,cpu"]]
)
def test_command_devices_by_comma_or_space(words):
    assert parse_devices(words) == ["cuda:0", 1, "cpu"]


@pytest.mark.parametrize(
    ("visible", "name"),
    [
        ("", "number"),
        ("GPU-number", "number"),
        ("MIG-1", "number/MIG-1"),
        ("MIG-2", "number/MIG-2"),
    ],
)
def test_parts_of_a_gpu_have_names(monkeypatch, visible, name):
    """Two processes on two parts of one GPU were told that they had the same one."""
    module = SimpleNamespace(
        get_device_properties=lambda _: SimpleNamespace(uuid="number")
    )
    monkeypatch.setattr(device_ids.torch, "get_device_module", lambda _: module)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device_ids.identity_of_accelerator(torch.device("cuda:0")) == name
    assert device_ids.identity_of_accelerator(HOST) is None
