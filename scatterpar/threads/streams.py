"""Random numbers of a step: reproducible, and another stream for every replica.

Replica 0 continues the process's own stream, as a plain loop would; the others are seeded
from it. A step commits by moving the process's generator on, if anything was drawn.

Accelerators have a generator each, all seeded alike by ``torch.manual_seed``. The master's goes
on as in a plain loop; the others are seeded from its state and the replica's number for the
step, and are put back after it. So who saves and restores the master's has all there is.
Replicas that share an accelerator draw from its generator in turn, since they run in turn.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from scatterpar.threads.randomness import drawing

__all__ = ["Position", "RandomStreams"]

_SEEDS = 2**32  # what the CPU's generator keeps of a seed
_CRITERION = -1  # the key of the stream that no replica draws from

Position = tuple["Tensor | None", "Tensor | None"]  # of the CPU's generator and the accelerator's


class RandomStreams:
    """The generators of one step, one per replica, made when first drawn from.

    Args:
        devices: the device of each replica that takes part.
        earlier: how many replicas of other processes are numbered before these.
    """

    def __init__(self, devices: Sequence[torch.device], earlier: int = 0) -> None:
        self._alone = len(devices) == 1 and not earlier
        self._earlier = earlier
        self._before = torch.default_generator.get_state()
        self._made: dict[int, tuple[torch.Generator, Tensor]] = {}
        self._devices = tuple(devices)
        first = devices[0]
        self._masters_seed = _seed(self._before if first.type == "cpu" else _state(first))
        self._accelerators = [
            _AcceleratorStream(device, self._masters_seed, earlier + replica)
            for replica, device in enumerate(devices)
            if device.type != "cpu" and device not in devices[:replica]
        ]
        self._master = self._accelerator_of(0)

    @contextlib.contextmanager
    def of(self, replica: int) -> Iterator[None]:
        """Let the current thread draw from the stream of ``replica``."""
        if self._alone:
            yield
            return
        with drawing(partial(self._generator, replica), helpers=bool(self._accelerators)):
            yield

    @contextlib.contextmanager
    def of_criterion(self, seed: int | None) -> Iterator[None]:
        """Let the current thread draw what a criterion draws that sees all outputs.

        Args:
            seed: the same on all processes that compute this criterion; ``None`` where there is
                one process: then the criterion goes on with the stream of replica 0.
        """
        if seed is None:
            with self.of(0):
                yield
            return
        make, helpers = partial(self._of_all, seed), bool(self._accelerators)
        with drawing(make, helpers=helpers), contextlib.ExitStack() as stack:
            for stream in self._accelerators[:1]:
                stack.enter_context(stream.seeded(seed))
            yield

    def seed_of_criterion(self) -> int:
        """What the first process gives the others, so that their criteria draw alike."""
        return (_seed(self._before) - 1) % _SEEDS  # replicas take those from the number on

    def now(self, replica: int) -> Position:
        """Where the stream of ``replica`` is; ``rewind`` goes back there."""
        generator: Tensor | None = None
        if self._alone:
            generator = torch.default_generator.get_state()
        elif replica in self._made:
            generator = self._made[replica][0].get_state()
        stream = self._accelerator_of(replica)
        return generator, None if stream is None else stream.now()

    def rewind(self, replica: int, position: Position) -> None:
        """Let ``replica`` draw again what it drew from ``position`` on."""
        generator, accelerator = position
        if self._alone:
            assert generator is not None
            torch.default_generator.set_state(generator)
        elif replica in self._made:
            made, start = self._made[replica]
            made.set_state(start if generator is None else generator)
        stream = self._accelerator_of(replica)
        if stream is not None and accelerator is not None:
            stream.rewind(accelerator)

    @property
    def drawn(self) -> bool:
        """Whether any replica drew a random number."""
        return (
            any(not torch.equal(g.get_state(), start) for g, start in self._made.values())
            or not torch.equal(torch.default_generator.get_state(), self._before)
            or any(stream.drawn for stream in self._accelerators)
        )

    def commit(self) -> None:
        """Move the process's generator on if anything was drawn, so that the next step differs."""
        moved = [k for k, (g, start) in self._made.items() if not torch.equal(g.get_state(), start)]
        if self._alone and not torch.equal(torch.default_generator.get_state(), self._before):
            moved = []  # the only replica moved the process's generator itself
        stands_in = self._commit_accelerators()
        if moved or stands_in:
            if 0 in moved and not self._earlier:
                following = self._made[0][0]
            else:
                following = torch.Generator()
                following.set_state(self._before)
                torch.randint(_SEEDS, (), generator=following)
            torch.default_generator.set_state(following.get_state())

    def _commit_accelerators(self) -> bool:
        """Move the master's on if anything was drawn; whether the CPU's has to stand in for it."""
        drawn = any(stream.drawn for stream in self._accelerators)
        goes_on = self._master is not None and self._master.drawn and not self._earlier
        for stream in self._accelerators:
            if stream is not self._master or not goes_on:
                stream.rollback()
        if drawn and self._master is not None and not goes_on:
            self._master.seed((self._masters_seed - 1) % _SEEDS)
        return drawn and self._master is None

    def rollback(self) -> None:
        """Leave all generators as they were before the step."""
        if not torch.equal(torch.default_generator.get_state(), self._before):
            torch.default_generator.set_state(self._before)
        for stream in self._accelerators:
            stream.rollback()

    def _generator(self, replica: int) -> torch.Generator:
        if replica not in self._made:
            number = self._earlier + replica
            generator = torch.Generator().manual_seed((_seed(self._before) + number) % _SEEDS)
            if number == 0:
                generator.set_state(self._before)
            self._made[replica] = (generator, generator.get_state())
        return self._made[replica][0]

    def _of_all(self, seed: int) -> torch.Generator:
        if _CRITERION not in self._made:
            generator = torch.Generator().manual_seed(seed)
            self._made[_CRITERION] = (generator, generator.get_state())
        return self._made[_CRITERION][0]

    def _accelerator_of(self, replica: int) -> _AcceleratorStream | None:
        device = self._devices[replica]
        return next((stream for stream in self._accelerators if stream.device == device), None)


class _AcceleratorStream:
    """The default generator of one accelerator, for one step of the replica that lives there."""

    def __init__(self, device: torch.device, seed: int, replica: int) -> None:
        self.device = device
        self._before = self.now()
        if replica > 0:
            self.seed((seed + replica) % _SEEDS)
        self._start = self.now()

    @property
    def drawn(self) -> bool:
        """Whether anything has been drawn in the step."""
        return not torch.equal(self.now(), self._start)

    def now(self) -> Tensor:
        return _state(self.device)

    def rewind(self, state: Tensor) -> None:
        torch.get_device_module(self.device).set_rng_state(state, self.device)

    def seed(self, seed: int) -> None:
        """Draw from another stream."""
        self.rewind(torch.Generator(self.device).manual_seed(seed).get_state())

    @contextlib.contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Draw from ``seed`` on in the body; what draws nothing finds its own state afterwards."""
        before = self.now()
        generator = torch.Generator(self.device).manual_seed(seed)
        start = generator.get_state()
        self.rewind(start)
        yield
        if torch.equal(self.now(), start):
            self.rewind(before)

    def rollback(self) -> None:
        """Leave it as it was before the step."""
        self.rewind(self._before)


def _state(device: torch.device) -> Tensor:
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def _seed(state: Tensor) -> int:
    """A seed out of a generator's state, without an operator: ``vmap`` may be around us."""
    content = ctypes.string_at(state.data_ptr(), state.numel())  # a storage goes byte by byte
    digest = hashlib.blake2b(content, digest_size=4)
    return int.from_bytes(digest.digest(), "big")
