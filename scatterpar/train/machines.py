"""Where a run computes: devices, machines by torchrun, signals, and random generators."""

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

from scatterpar.devices.runtime import named, resolve
from scatterpar.train.data import UsageError, words_of

_LONGEST_WAIT = timedelta(minutes=10)  # for a machine that was lost without a word
_CPU_REPLICAS = 4


def choose_devices(words: str | Sequence[str] | None) -> list[torch.device]:
    """Turn `--devices` into a device for each replica, the master's first.

    Without names: every accelerator, else four CPU replicas with a memory of their own each
    (`cpu:0` and so on), so that what crosses is copied and counted as between GPUs.
    """
    names = named(words or ())
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
    """The ranks of a run and what they tell each other; all ranks make the same calls."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self.is_first = self.rank == 0  # the one that prints and writes

    def share(self, rows: Tensor) -> Tensor:
        """Return this rank's part of `rows`, in order; sizes differ by at most one."""
        return torch.tensor_split(rows, self.size)[self.rank]

    def everyones(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order."""
        found = [value] * self.size
        if self.group is not None:
            dist.all_gather_object(found, value, self.group)
        return found

    def from_rank(self, source: int, value: Any) -> Any:
        """Return the value of rank `source`; the others' is not looked at."""
        found = [value]
        if self.group is not None:
            dist.broadcast_object_list(found, group=self.group, group_src=source)
        return found[0]

    def first_does(self, action: Callable[[], None]) -> None:
        """Let the first rank do something; if that cannot be done, all raise the same."""
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
    """Meet the other machines where torchrun started this process; otherwise open no port."""
    if not launched():
        yield Machines()
        return
    require_launch(devices)
    dist.init_process_group(backend(), timeout=_LONGEST_WAIT)
    machines = Machines(dist.group.WORLD)
    yield machines
    machines.group = None
    dist.destroy_process_group()  # not after an error, when others may be gone and it could wait
    gc.collect()  # what still holds the group would end its threads while the interpreter exits


def launched() -> bool:
    """Whether torchrun started this process."""
    return dist.is_available() and dist.is_torchelastic_launched()


def run_id() -> str | None:
    """The job's name with torchrun, its `--rdzv-id`; None without torchrun."""
    return os.environ["TORCHELASTIC_RUN_ID"] if launched() else None


def require_launch(devices: list[torch.device]) -> None:
    """Refuse two processes on the same accelerators, and restarts that may not find each other."""
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
    """Name gloo for the host: without a name torch takes the accelerator's library alone."""
    gpu = torch.accelerator.current_accelerator(check_available=True)
    return f"cpu:gloo,{gpu.type}:{dist.get_default_backend_for_device(gpu)}" if gpu else "gloo"


class Stopped(Exception):
    """The user, or whoever runs the machine, wants the run to end."""


class Stopping:
    """Ctrl-C and SIGTERM, while entered: they wait for a step's end; a second one does not."""

    def __init__(self) -> None:
        self.signal = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:  # as a shell does with its jobs
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
        # Not print, which may have been interrupted itself.
        os.write(2, f"\n{name}: saving at the end of this step; again: ending now\n".encode())

    def check(self, machines: Machines | None = None) -> None:
        """End the run if it is to end; where all ranks ask at this point, they end together."""
        if machines is not None:
            self.signal = max(machines.everyones(self.signal))
        if self.signal:
            raise Stopped


def seed_host(seed: int) -> None:
    """Seed every generator of the host that a model or a transform may draw from."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def seed_of(*numbers: int) -> int:
    """Make one seed of several numbers, of 32 bits: torch's CPU generator ignores higher ones."""
    return random.Random(" ".join(map(str, numbers))).getrandbits(32)


def random_states(devices: Iterable[torch.device] = ()) -> dict[str, Any]:
    """The states of all generators, the CPU's and those of devices, as plain values and tensors."""
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
    """Put back what `random_states` returned, as far as the devices are there."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "numpy" in states and "numpy" in sys.modules:
        kind, keys, *rest = states["numpy"]
        sys.modules["numpy"].random.set_state((kind, keys.tolist(), *rest))
    for name, state in states["devices"].items():
        with contextlib.suppress(RuntimeError, ValueError, IndexError):
            torch.get_device_module(name).set_rng_state(state, torch.device(name))
