"""Virtual devices that behave like real ones: no operation may mix tensors of two
memories.

On GPUs torch refuses an operation on tensors of two devices. Virtual devices all lie in
the host's memory, where torch sees no difference; this dispatch mode knows which memory
each storage belongs to, and raises where a GPU would.
"""

import contextlib
import functools
import sys
import threading

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scatterpar.batch.batch import Batch
from scatterpar.devices import memory, streams, transfers
from scatterpar.replicas.module_contents import ModuleContents
from scatterpar.verify.rows import RowChoice

HOST = torch.device("cpu")


class MixedMemories(RuntimeError):
    """One operation got tensors of two memories."""


class Memories:
    """Which memory each storage belongs to; those that nobody claimed
    are the host's.
    """

    def __init__(self):
        self._owners = {}
        self._lock = threading.Lock()
        self.checked = {}

    def claim(self, tensors, memory):
        storages = _storages(tensors)
        with self._lock:
            for storage in storages:
                reference = StorageWeakRef(storage)
                self._owners[reference.cdata] = (reference, memory)

    def owner(self, tensor):
        storages = _storages(tensor)
        with self._lock:
            for storage in storages:
                reference, memory = self._owners.get(storage._cdata, (None, None))
                if reference is not None and not reference.expired():
                    return memory
        return None

    def check(self, operator, values, current, *, host_too):
        """The one memory that all tensors among ``values`` are in."""
        shapes = {}  # by memory
        for tensor in _tensors(values):
            memory = self.owner(tensor) or HOST
            # As on GPUs, a number from the host may join in.
            if memory != HOST or (tensor.ndim and not host_too):
                shapes[memory] = tuple(tensor.shape)
        if len(shapes) > 1:
            raise MixedMemories(f"{operator} on {current} mixes tensors of {shapes}")
        self.checked[current] = self.checked.get(current, 0) + 1
        return next(iter(shapes), current)


class Guard(TorchDispatchMode):
    """Checks every operation of one thread, and claims what it makes for the memory it
    ran in.

    With ``host_too`` the host's memory counts as ``current``. The caller's thread may move
    tensors between the two with ``.to``, which on virtual devices leaves no trace.
    """

    def __init__(self, memories, current, *, host_too=False):
        super().__init__()
        self.memories = memories
        self.current = current
        self.host_too = host_too

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        memory = self.memories.check(
            func, (args, kwargs), self.current, host_too=self.host_too
        )
        # A view of the host's tensor stays the host's.
        known = {storage._cdata for storage in _storages((args, kwargs))}
        result = func(*args, **kwargs)
        fresh = []
        for tensor in _tensors(result):
            is_view = not known.isdisjoint(s._cdata for s in _storages(tensor))
            if not is_view and self.memories.owner(tensor) is None:
                fresh.append(tensor)
        self.memories.claim(fresh, memory)
        return result


def _tensors(values):
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _storages(values):
    storages = []
    with torch._C._DisableTorchDispatch():
        for tensor in _tensors(values):
            parts = [tensor]
            if tensor.is_sparse:
                parts = [tensor._indices(), tensor._values()]
            if tensor.device.type != "meta":
                storages += [part.untyped_storage() for part in parts]
    return storages


@functools.cache
def _make_operators():
    """Make the Python object of every operator, which torch else makes when a mode
    first sees it.

    Of two threads that see it first at once, torch keeps one's object and frees the
    other's, to which a pointer stays: a crash, about once in a thousand runs of these
    tests.
    """
    for name in torch._C._dispatch_get_all_op_names():
        space, _, name_in_space = name.partition("::")
        packet, _, overload = name_in_space.partition(".")
        if space == "aten":
            with contextlib.suppress(AttributeError):
                getattr(getattr(torch.ops.aten, packet), overload or "default")


@contextlib.contextmanager
def guarded(monkeypatch, *modules, memories=None):
    """Virtual devices are apart in the body; ``modules`` are in the memory of
    ``cpu:0``.

    ``memories`` are those of an earlier body, whose tensors may still be used.
    """
    _make_operators()
    if memories is None:
        memories = Memories()
    master = torch.device("cpu:0")
    # Those of attributes and unregistered lists, too.
    memories.claim([*ModuleContents(modules).tensors.values()], master)
    on = streams.use_device
    empty = memory.empty
    to_device = transfers.to_device
    write = transfers.write

    @contextlib.contextmanager
    def guarded_on(device, stream):
        with on(device, stream), Guard(memories, device):
            yield

    def claimed_empty(size, dtype, device):
        with torch._C._DisableTorchDispatch():
            tensor = empty(size, dtype, device)
        memories.claim(tensor, device)
        return tensor

    def claimed_copy(tensor, device, **options):
        with torch._C._DisableTorchDispatch():
            result = to_device(tensor, device, **options)
        if result is not tensor:
            memories.claim(result, device)
        return result

    def on_host(method):
        """The method, which computes on the host in a replica's thread, too."""

        @functools.wraps(method)
        def called(*args, **kwargs):
            with torch._C._DisableTorchDispatch():
                return method(*args, **kwargs)

        return called

    def allowed_write(target, source, **options):
        with torch._C._DisableTorchDispatch():
            write(target, source, **options)

    monkeypatch.setattr(streams, "use_device", guarded_on)
    monkeypatch.setattr(memory, "empty", claimed_empty)
    # The rows of a look are chosen, and taken from the user's batch.
    monkeypatch.setattr(Batch, "select", on_host(Batch.select))
    monkeypatch.setattr(RowChoice, "parts", on_host(RowChoice.parts))
    for path, module in [*sys.modules.items()]:
        if not path.startswith("scatterpar"):
            continue
        for name, verb in (("to_device", claimed_copy), ("write", allowed_write)):
            if vars(module).get(name) in (to_device, write):
                monkeypatch.setattr(module, name, verb)
    # the caller's thread: refresh, reduce, commit
    with Guard(memories, master, host_too=True):
        yield memories
