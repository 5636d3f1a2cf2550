"""The surroundings of a run: devices, other machines, signals, and random generators."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from scatterpar.devices.runtime import parse_devices, resolve
from scatterpar.train.data import UsageError, words_of

_LONGEST_WAIT = timedelta(minutes=10)  # for a machine that has stopped silently
_CPU_REPLICAS = 4


def choose_devices(words: str | Sequence[str] | None) -> list[torch.device]:
    """The device of each replica, the master's first, from the value of `--devices`.

    Without names: every accelerator. If there is none: four virtual CPU devices (`cpu:0` …), so
    that data are copied and counted as between GPUs.
    """
    names = parse_devices(words or ())
    if not names and not torch.accelerator.is_available():
        return [torch.device("cpu", i) for i in range(_CPU_REPLICAS)]
    try:
        return list(resolve(names or None))
    except ValueError as error:
        found = words_of(error).removeprefix("device_ids: ").partition(";")[0]
        raise UsageError(
            f"--devices: {found}; name them like cuda:0,cuda:1 or cpu:0,cpu:1"
        ) from error


class Machines:
    """The ranks of a run and their collectives. All ranks must make the same calls."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self.is_first = self.rank == 0  # it prints and writes

    def share(self, rows: Tensor) -> Tensor:
        """Return this rank's part of `rows`, in order. Parts differ in size by at most one."""
        return torch.tensor_split(rows, self.size)[self.rank]

    def everyones(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order."""
        values = [value] * self.size
        if self.group is not None:
            dist.all_gather_object(values, value, self.group)
        return values

    def from_rank(self, source: int, value: Any) -> Any:
        """Return the value of rank `source`; the values of the others are ignored."""
        values = [value]
        if self.group is not None:
            dist.broadcast_object_list(values, group=self.group, group_src=source)
        return values[0]

    def first_does(self, action: Callable[[], None]) -> None:
        """Run `action` on the first rank. If it raises a `UsageError`, all ranks raise it."""
        problem = ""
        try:
            if self.is_first:
                action()
        except UsageError as error:
            problem = str(error)
        if problem := self.from_rank(0, problem):
            raise UsageError(problem)


@contextlib.contextmanager
def connected(devices: list[torch.device]) -> Iterator[Machines]:
    """Connect to the other machines if torchrun started this process; else open no port."""
    if not launched():
        yield Machines()
        return
    require_launch(devices)
    dist.init_process_group(backend(), timeout=_LONGEST_WAIT)
    machines = Machines(dist.group.WORLD)
    yield machines
    machines.group = None
    dist.destroy_process_group()  # not after an error: it could wait for lost ranks
    gc.collect()  # drops references to the group: its threads must end before the interpreter exits


def launched() -> bool:
    """Whether torchrun started this process."""
    return dist.is_available() and dist.is_torchelastic_launched()


def run_id() -> str | None:
    """The id of torchrun's job (`--rdzv-id`); None without torchrun."""
    return os.environ["TORCHELASTIC_RUN_ID"] if launched() else None


def require_launch(devices: list[torch.device]) -> None:
    """Refuse two processes with the same accelerators, and restarts that may not reconnect."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if here > 1 and any(device.type != "cpu" for device in devices):
        raise UsageError(
            f"torchrun started {here} processes on this machine, but one uses all its devices: "
            "launch with --nproc-per-node=1"
        )
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if shared and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
        raise UsageError(  # torch's issue 135712
            "after a restart by torchrun a process may read the address of one that has died: for "
            "--max-restarts set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in torchrun's environment, "
            "and give --rdzv-backend=c10d"
        )


def backend() -> str:
    """The backends, with gloo for the host: torch's default has the accelerator's only."""
    gpu = torch.accelerator.current_accelerator(check_available=True)
    return f"cpu:gloo,{gpu.type}:{dist.get_default_backend_for_device(gpu)}" if gpu else "gloo"


class Stopped(Exception):
    """A signal asks the run to end."""


class Stopping:
    """In the body, Ctrl-C and SIGTERM wait for the end of a step. A second one ends at once."""

    def __init__(self) -> None:
        self.signal = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                # A background job of a shell ignores SIGINT.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self.signal:
            os._exit(128 + number)
        self.signal = number
        name = signal.Signals(number).name
        # Not print: the signal may have interrupted a print.
        os.write(2, f"\n{name}: saving at the end of this step; again: ending now\n".encode())

    def check(self, machines: Machines | None = None) -> None:
        """Raise `Stopped` after a signal; with `machines`, after a signal to any rank."""
        if machines is not None:
            self.signal = max(machines.everyones(self.signal))
        if self.signal:
            raise Stopped


def seed_host(seed: int) -> None:
    """Seed the generators of torch (on the CPU), Python and NumPy."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def seed_of(*numbers: int) -> int:
    """Make one seed of several numbers. It has 32 bits: torch's CPU generator ignores others."""
    return random.Random(" ".join(map(str, numbers))).getrandbits(32)


def random_states(devices: Iterable[torch.device] = ()) -> dict[str, Any]:
    """The states of all generators, on the host and on devices, as plain values and tensors."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = (kind, torch.tensor(keys.tolist()), *rest)
    states["devices"] = {
        str(device): torch.get_device_module(device).get_rng_state(device)
        for device in devices
        if device.type != "cpu"
    }
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Restore the states from `random_states`, except those of devices that do not exist."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "numpy" in states and "numpy" in sys.modules:
        kind, keys, *rest = states["numpy"]
        sys.modules["numpy"].random.set_state((kind, keys.tolist(), *rest))
    for name, state in states["devices"].items():
        with contextlib.suppress(RuntimeError, ValueError, IndexError):
            torch.get_device_module(name).set_rng_state(state, torch.device(name))
