"""Plain torch on one device: what every step is compared with."""

import contextlib
import copy
from dataclasses import is_dataclass

import torch
from torch import Tensor

from harness import leak_checks

RELATIVE = 1e-10
# where the exact value is zero: some rounding errors of numbers around one
_ROUNDING = 1e-14


@contextlib.contextmanager
def seeded(seed=0):
    """Draw from a seeded generator, and leave the global one as it was."""
    with torch.random.fork_rng(**leak_checks.accelerators_in_use()):
        if torch.accelerator.is_available():
            torch.manual_seed(seed)
        else:  # torch saves a traceback for each kind of device that is not there: 4 ms
            torch.default_generator.manual_seed(seed)
        yield


def build(factory, seed=0):
    """A float64 module with the weights of ``seed``."""
    with seeded(seed):
        return factory().double()


def randn(*shape, seed=1, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype)


def randint(high, *shape, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(high, shape, generator=generator)


def call(module, inputs):
    if isinstance(inputs, dict):
        return module(**inputs)
    if isinstance(inputs, tuple):
        return module(*inputs)
    return module(inputs)


def gradients(module):
    """A copy of each parameter's gradient by name; tied parameters under each of their
    names.
    """
    by_name = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        gradient = parameter.grad
        by_name[name] = None if gradient is None else gradient.detach().clone()
    return by_name


def whole_batch(module, inputs, targets=None, criterion=None):
    """The loss and the gradients of one whole-batch backward through a copy of
    ``module``.
    """
    twin = copy.deepcopy(module)
    twin.zero_grad()
    loss = loss_of(call(twin, inputs), targets, criterion)
    loss.backward()
    return loss.detach(), gradients(twin)


def loss_of(output, targets, criterion):
    """The criterion's; without one, what the module has computed."""
    if criterion is not None:
        return criterion(output, targets)
    return output if isinstance(output, Tensor) else output["loss"]


def assert_close(actual, expected, name, relative=RELATIVE):
    """Equal up to rounding, measured against the expected tensor's own size."""
    assert actual.shape == expected.shape, f"{name}: {actual.shape} != {expected.shape}"
    assert actual.dtype == expected.dtype, f"{name}: {actual.dtype} != {expected.dtype}"
    actual = actual.to_dense()
    expected = expected.to_dense()
    if not actual.is_floating_point() and not actual.is_complex():
        actual = actual.double()
        expected = expected.double()
    off = (actual - expected).norm().item()
    size = expected.norm().item()
    assert off <= relative * size + _ROUNDING, f"{name}: off by {off}, of {size}"


def assert_alike(actual, expected, relative=RELATIVE):
    """Of the same types and structure, with tensors that are close; all
    else is equal.
    """
    assert type(actual) is type(expected)
    if isinstance(expected, Tensor):
        assert not actual.requires_grad
        assert_close(actual, expected.detach(), "output", relative)
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        assert_alike([*actual.values()], [*expected.values()], relative)
    elif is_dataclass(expected):
        assert_alike(vars(actual), vars(expected), relative)
    elif isinstance(expected, (list, tuple)):
        for item, expected_item in zip(actual, expected, strict=True):
            assert_alike(item, expected_item, relative)
    else:
        assert actual == expected


def assert_gradients(module, expected, relative=RELATIVE):
    """Each parameter's gradient, separately, is the expected one or is missing where it
    is.
    """
    actual = gradients(module)
    assert actual.keys() == expected.keys()
    for name, expected_gradient in expected.items():
        gradient = actual[name]
        if expected_gradient is None:
            assert gradient is None, f"{name} has a gradient that the oracle has not"
        else:
            assert gradient is not None, f"{name} has no gradient"
            assert_close(gradient, expected_gradient, name, relative)


def assert_parameters(module, plain, relative=RELATIVE):
    pairs = zip(module.named_parameters(), plain.parameters(), strict=True)
    for (name, parameter), expected in pairs:
        assert_close(parameter.detach(), expected.detach(), name, relative)


def assert_step(
    engine,
    inputs,
    targets=None,
    criterion=None,
    *,
    plain=None,
    relative=RELATIVE,
    **options,
):
    """One step of ``engine`` gives the whole batch's loss and gradients.

    ``plain``: the inputs and targets as plain torch takes them, where the engine's have
    markers.
    """
    whole = (inputs, targets) if plain is None else plain
    expected_loss, expected = whole_batch(engine.module, *whole, criterion)
    engine.module.zero_grad()
    loss = engine.forward_backward(inputs, targets, criterion, **options)
    assert_close(loss, expected_loss, "loss", relative)
    assert_gradients(engine.module, expected, relative)
    return loss
