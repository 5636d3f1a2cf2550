"""Can an optimizer be divided over devices? Some steps on copies of parameters tell.

::

    plain      class(copies), and ``STEPS`` steps on gradients that are drawn
    divided    class(copies), and the same steps, in which some copies are replaced by
               stand-ins in another memory, others in each step
    equal      the optimizer reads and writes what ``param_groups`` and ``state`` hold

An optimizer whose copies differ writes elsewhere (it wraps another one, or keeps a list
of parameters), keeps state of its own, or treats all parameters as one vector. A dry
run is undone whole: what the class and its arguments refer to, and random generators.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from scatterpar.batch import nested
from scatterpar.devices.copies import to_numbers, write
from scatterpar.devices.transfers import Transfers
from scatterpar.devices.virtual_devices import HOST
from scatterpar.devices.write_counters import versions
from scatterpar.objects.journal import Journal
from scatterpar.objects.snapshot import is_same
from scatterpar.objects.walk import Walk
from scatterpar.replicas.replicas import parameter_like
from scatterpar.torch_private.modules import optimizer_hooks_off, step_without_hooks
from scatterpar.verify.dropped_records import records_dropped

# More than the six steps after which timm's Lookahead averages.
STEPS = 7
_MAX_ELEMENTS = 4096  # of a copy; bitsandbytes keeps smaller states in 32 bits
_MAX_KINDS = 64
_MAX_BYTES = 2**28  # of copies that are not cut
_TOLERANCE = 1e-3  # of what the steps have changed; faults are above 1e-2


def dry_run(
    plain: Optimizer,
    make: Callable[[Any], Optimizer],
    params: Any,
    memories: Sequence[torch.device],
    roots: Sequence[Any],
) -> bool:
    """Compare steps of an optimizer that is divided over the first two memories with
    those of its class.

    ``make(params)`` has made ``plain``. ``roots`` are what it may refer to. Returns
    whether each step of the class changed the version of each parameter; fused classes
    change none. Raises ``TypeError`` if results differ, or the class cannot be tried.
    """
    journal = Journal(Walk([make, *roots]), memories)
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # the user's first step shows them
        stack.enter_context(records_dropped())
        stack.enter_context(optimizer_hooks_off())
        stack.enter_context(journal.restored())
        stack.enter_context(torch.no_grad())
        return _GroupTrial(plain, make, params, memories, journal).writes_all()


class _GroupTrial:
    """The runs of one optimizer."""

    def __init__(
        self,
        plain: Optimizer,
        make: Callable[[Any], Optimizer],
        params: Any,
        memories: Sequence[torch.device],
        journal: Journal,
    ) -> None:
        self._plain = plain
        self._make = make
        self._params = params
        self._master, self._other = memories[:2]
        self._journal = journal
        self._name = type(plain).__name__
        self._transfers = Transfers()

    def writes_all(self) -> bool:
        """Run both, and compare. Returns whether steps write all parameters."""
        errors: list[Exception] = []
        # An optimizer may need more than the first rows (a rank), or sparse gradients.
        for limit, is_sparse in ((_MAX_ELEMENTS, False), (0, False), (0, True)):
            samples = sampled(self._plain.param_groups, limit)
            if not samples:
                return False
            run = _OptimizerRun(samples, is_sparse)
            self._journal.rewind()
            try:
                writes_all = self._run_plain(run)
            except Exception as error:
                errors.append(error)
                continue
            self._compare(run)
            return writes_all
        raise self._refused(f"raised {_words_of(errors[0])}") from errors[0]

    def _run_plain(self, run: _OptimizerRun) -> bool:
        """Steps of the class itself. Returns whether each wrote all parameters."""
        optimizer = self._made_on(run.copies)
        run.results = list(run.copies.values())
        writes_all = True
        for step in range(STEPS):
            run.set_gradients(step)
            before = versions(run.results)
            with torch.enable_grad():
                step_without_hooks(optimizer)
            after = versions(run.results)
            writes_all &= all(map(int.__ne__, before, after))
        return writes_all

    def _compare(self, run: _OptimizerRun) -> None:
        """Divided steps, and their results beside those of ``run``."""
        divided = run.again()
        self._journal.rewind()
        try:
            self._run_divided(divided)
        except Exception as error:
            raise self._refused(f"raised {_words_of(error)}") from error
        for parameter, expected, got in zip(
            run.copies, run.results, divided.copies.values(), strict=True
        ):
            start = run.start[parameter]
            change = _largest(expected - start)
            if _largest(got - expected) <= _TOLERANCE * change:
                continue
            shape = tuple(parameter.shape)
            what = f"gave a parameter of shape {shape} other values than {self._name}"
            if torch.equal(got, start):
                what = f"never changed a parameter of shape {shape}"
            raise self._refused(what)

    def _run_divided(self, run: _OptimizerRun) -> None:
        optimizer = self._made_on(run.copies)
        copies = list(run.copies.values())
        # Kept, so that no ``id`` is used again: an optimizer may remember it.
        used: list[Mapping[Tensor, Tensor]] = []
        for step in range(STEPS):
            run.set_gradients(step)
            # Those at odd positions, and a single one: each has another owner.
            stand_ins: dict[Tensor, Tensor] = {}
            for parameter in copies[1::2] or copies:
                values = self._transfers.copy(
                    parameter.detach(), self._other, "compute"
                )
                stand_in = stand_in_for(parameter, values)
                gradient = parameter.grad
                assert gradient is not None  # ``set_gradients`` has set it
                stand_in.grad = self._transfers.copy(gradient, self._other, "compute")
                stand_ins[parameter] = stand_in
                # Some classes make it in their constructor.
                if step == 0 and parameter in optimizer.state:
                    optimizer.state[parameter] = state_on_device(
                        optimizer.state[parameter], self._other, self._transfers
                    )
            with stepping_on(optimizer, stand_ins), torch.enable_grad():
                step_without_hooks(optimizer)
            for parameter, stand_in in stand_ins.items():
                write(parameter.detach(), stand_in.detach())
            used.append(stand_ins)

    def _made_on(self, copies: Mapping[Tensor, Tensor]) -> Optimizer:
        """The optimizer on copies of parameters."""
        optimizer = self._make(_on_copies(self._params, copies))
        ids = set(map(id, copies.values()))
        if all(id(parameter) in ids for parameter in parameters_in(optimizer)):
            return optimizer
        # ``make`` returns an optimizer that there was, or makes one of parameters that
        # it knows.
        try:
            return _copied(self._plain, copies)
        except Exception as error:
            raise TypeError(
                f"it cannot be copied ({_words_of(error)}); pass its class, and its "
                "arguments"
            ) from error

    def _refused(self, what: str) -> TypeError:
        return TypeError(
            f"{self._name} cannot be sharded: {STEPS} steps on copies of a few "
            f"parameters, divided over {self._master} and {self._other}, {what}. An "
            "optimizer can be sharded if its step() needs no closure, reads and writes "
            "the parameters in param_groups, keeps what it remembers of a parameter in "
            "state[parameter], and treats each parameter by itself. Use it as it is: "
            f"{self._name}(engine.module.parameters(), …)"
        )


class _OptimizerRun:
    """Copies of sampled parameters, and their gradients.

    Attributes:
        start: the first values, by the user's parameter.
        copies: what the optimizer trains, by the user's parameter.
        results: the copies, once they were trained.
    """

    def __init__(
        self, samples: Mapping[Tensor, torch.Size], is_sparse: bool = False
    ) -> None:
        self._samples = samples
        self._is_sparse = is_sparse
        generator = torch.Generator().manual_seed(0)
        self.start: dict[Tensor, Tensor] = {}
        self._gradients: list[list[Tensor]] = [[] for _ in range(STEPS)]
        for parameter, shape in samples.items():
            self.start[parameter] = _drawn(parameter, shape, parameter.dtype, generator)
            dtype = parameter.grad_dtype or parameter.dtype
            for gradients in self._gradients:
                gradients.append(_drawn(parameter, shape, dtype, generator))
        self.copies: dict[Tensor, Tensor] = {}
        for parameter, start in self.start.items():
            trained = stand_in_for(parameter, start.clone())
            self.copies[parameter] = trained.requires_grad_()
        self.results: list[Tensor] = []

    def again(self) -> _OptimizerRun:
        """The same copies and gradients."""
        return _OptimizerRun(self._samples, self._is_sparse)

    def set_gradients(self, step: int) -> None:
        """Give the copies the gradients of a step."""
        for trained, drawn in zip(
            self.copies.values(), self._gradients[step], strict=True
        ):
            gradient = drawn.clone()
            trained.grad = gradient.to_sparse(1) if self._is_sparse else gradient


def sampled(
    groups: Sequence[Mapping[str, Any]], max_elements: int
) -> dict[Tensor, torch.Size]:
    """Two parameters of each kind, the smallest, and the shapes of their copies.

    Copies are cut to ``max_elements``; with 0 they are not. Kinds are told by the plain
    options of the group, dtype, class and number of dimensions.
    """
    kinds: dict[Any, list[Tensor]] = defaultdict(list)
    for group in groups:
        options: list[Any] = []
        for name, value in group.items():
            is_switch = value is None or isinstance(value, (bool, str))
            options.append((name, value if is_switch else type(value)))
        for parameter in group["params"]:
            if parameter.requires_grad and not is_lazy(parameter) and parameter.numel():
                kind = type(parameter), parameter.dtype, parameter.ndim
                kinds[(*options, *kind)].append(parameter)
    samples: dict[Tensor, torch.Size] = {}
    num_bytes = 0
    for parameters in list(kinds.values())[:_MAX_KINDS]:
        for parameter in sorted(parameters, key=Tensor.numel)[:2]:
            shape = _cut(parameter.shape, max_elements)
            num_bytes += shape.numel() * parameter.element_size()
            if num_bytes <= _MAX_BYTES:
                samples[parameter] = shape
    return samples


def _cut(shape: torch.Size, max_elements: int) -> torch.Size:
    """``shape`` with its largest sizes halved until it has few elements."""
    sizes = list(shape)
    while max_elements and torch.Size(sizes).numel() > max_elements:
        largest = sizes.index(max(sizes))
        sizes[largest] = (sizes[largest] + 1) // 2
    return torch.Size(sizes)


def _drawn(
    parameter: Tensor, shape: torch.Size, dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """Normal values of a shape and dtype, where the parameter is."""
    of_host = torch.complex64 if dtype.is_complex else torch.float32
    values = torch.randn(shape, generator=generator, dtype=of_host)
    drawn = torch.empty(shape, dtype=dtype, device=parameter.device)
    write(drawn, values)
    return drawn


def _largest(difference: Tensor) -> float:
    """The largest magnitude, where results are numbers."""
    return float(to_numbers(difference.abs().nan_to_num(0.0).max()))


def _on_copies(params: Any, copies: Mapping[Tensor, Tensor]) -> Any:
    """The arguments of an optimizer: parameters, pairs with a name, or groups."""
    entries: list[Any] = []
    for entry in [params] if isinstance(params, Tensor) else params:
        if isinstance(entry, Tensor):
            if entry in copies:
                entries.append(copies[entry])
        elif isinstance(entry, dict):
            on_copies = _on_copies(entry["params"], copies)
            if on_copies:
                entries.append(entry | {"params": on_copies})
        elif entry[1] in copies:
            name, parameter = entry
            entries.append((name, copies[parameter]))
    return entries


def _copied(optimizer: Optimizer, copies: Mapping[Tensor, Tensor]) -> Optimizer:
    """A deep copy of an optimizer, and of those inside of it, with other parameters.

    Not ``copy.deepcopy``: torch's optimizers leave attributes of subclasses out.
    """
    others = [
        parameter for parameter in parameters_in(optimizer) if parameter not in copies
    ]
    # They get no gradient, and no group has them.
    absent = {parameter: torch.nn.Parameter(torch.empty(0)) for parameter in others}
    memo: dict[int, Any] = {}
    for parameter, trained in {**absent, **copies}.items():
        memo[id(parameter)] = trained
    inner = [
        value for value in vars(optimizer).values() if isinstance(value, Optimizer)
    ]
    shells: list[tuple[Optimizer, Any]] = []
    for original in [optimizer, *inner]:
        shell = original.__new__(type(original))
        memo[id(original)] = shell
        shells.append((original, shell))
    for original, shell in shells:
        vars(shell).update(copy.deepcopy(vars(original), memo))
    ids = set(map(id, absent.values()))
    for group in shells[0][1].param_groups:
        group["params"] = [
            parameter for parameter in group["params"] if id(parameter) not in ids
        ]
    copied: Optimizer = shells[0][1]
    return copied


def parameters_in(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yields the parameters in the groups of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _words_of(error: Exception) -> str:
    # The text of a ``KeyError`` may be all values of a tensor.
    text = "" if isinstance(error, KeyError) else str(error).split("\n")[0][:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def stand_in_for(parameter: Tensor, values: Tensor) -> Tensor:
    """``values`` as an optimizer updates them in the place of ``parameter``."""
    stand_in = parameter_like(parameter, values.data)
    stand_in.requires_grad_(parameter.requires_grad)
    # Gradients may have another dtype than their parameter.
    stand_in.grad_dtype = parameter.grad_dtype
    vars(stand_in).update(vars(parameter))  # attributes that optimizers may read
    return stand_in


def state_on_device(state: Any, device: torch.device, transfers: Transfers) -> Any:
    """A copy of an optimizer's ``state`` on ``device``.

    Host scalars (step counts) stay on the host.
    """

    def move(tensor: Tensor) -> Tensor:
        if tensor.ndim == 0 and tensor.device == HOST:
            return tensor.clone()
        return transfers.copy(tensor, device, "reduce")

    return nested.map_tensors(move, state)


@contextlib.contextmanager
def stepping_on(
    optimizer: Optimizer, stand_ins: Mapping[Tensor, Tensor]
) -> Iterator[None]:
    """In the body the optimizer has stand-ins instead of their parameters.

    If the body succeeds, the parameters get the state, options and attributes that
    the optimizer has given to their stand-ins.
    """
    groups = optimizer.param_groups
    state: Any = optimizer.state
    exchanged: list[dict[str, Any]] = []
    for group in groups:
        params = [stand_ins.get(parameter, parameter) for parameter in group["params"]]
        exchanged.append(group | {"params": params})
    try:
        optimizer.param_groups = exchanged
        optimizer.state = _with_keys(state, stand_ins)
        yield
        originals = {stand_in: parameter for parameter, stand_in in stand_ins.items()}
        state = _with_keys(optimizer.state, originals)
        for group, stepped in zip(groups, optimizer.param_groups, strict=True):
            # In place: schedulers refer to the group.
            params = group["params"]
            group.clear()
            group.update(stepped, params=params)
        for parameter, stand_in in stand_ins.items():
            if not is_same(vars(parameter), vars(stand_in)):
                vars(parameter).clear()
                vars(parameter).update(vars(stand_in))
    finally:
        optimizer.param_groups = groups
        optimizer.state = state


def _with_keys(
    state: Mapping[Any, Any], keys: Mapping[Tensor, Tensor]
) -> defaultdict[Any, Any]:
    """``state`` with each of its keys replaced by that in ``keys``, if it has one."""
    return defaultdict(
        dict, {keys.get(key, key): value for key, value in state.items()}
    )
