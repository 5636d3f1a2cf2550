"""What a step function names on another device: the names that an error tells."""

import pytest
import torch
from torch import nn

from scatterpar.integrations.device_errors import explained

ELSEWHERE = torch.zeros(2, device="meta")
HERE = torch.zeros(2)


class Holder:
    """Callable, with tensors in attributes."""

    def __init__(self, **values):
        vars(self).update(values)

    def __call__(self):
        self.weights.shape  # noqa: B018  names it
        raise two_devices()

    def with_default(self, tensor=ELSEWHERE):
        raise two_devices()

    def with_callbacks(self):
        self.callbacks[1].weights  # noqa: B018  names it
        raise two_devices()

    @property
    def trainer(self):
        return self._trainer

    def with_property(self):
        self.trainer.callbacks  # noqa: B018  names it
        raise two_devices()

    def with_teacher(self):
        self.nets["teacher"]
        raise two_devices()


def two_devices():
    return RuntimeError("Expected all tensors to be on the same device")


def closes_over(value):
    def function():
        value.weights if isinstance(value, Holder) else value
        raise two_devices()

    return function


def on_meta():
    return nn.Linear(1, 1, device="meta")


TRAINS = closes_over(ELSEWHERE.clone().requires_grad_())
CASES = {
    "closure": (closes_over(ELSEWHERE), "'value'"),
    "list": (closes_over([HERE, ELSEWHERE]), r"'value\[1\]'"),
    "long list": (
        closes_over([ELSEWHERE] * 9),
        r"'value\[0\]' and 'value\[1\]' and 7 more",
    ),
    "object": (
        closes_over(Holder(weights=ELSEWHERE, other=ELSEWHERE)),
        "value.weights'",
    ),
    "module": (closes_over(on_meta()), "'value'"),
    "self": (Holder(weights=ELSEWHERE), "'Holder.weights'"),
    "bound method": (Holder(weights=ELSEWHERE).__call__, "'Holder.weights'"),
    "default": (Holder().with_default, "'tensor'"),
    "callback": (
        Holder(callbacks=[Holder(), Holder(weights=ELSEWHERE)]).with_callbacks,
        r"'Holder.callbacks\[1\].weights'",
    ),
    "property": (
        Holder(_trainer=Holder(callbacks=[ELSEWHERE])).with_property,
        r"'Holder._trainer.callbacks\[0\]'",
    ),
    "teacher": (
        Holder(nets={"teacher": on_meta()}).with_teacher,
        r"""Holder.nets\['teacher'\]""",
    ),
}


def named(names):
    words = f"computes on cpu, but ['\"]?{names}.*, which your code names.*: "
    return pytest.raises(RuntimeError, match=words)


@pytest.mark.parametrize("name", CASES)
def test_tensor_elsewhere_is_named(name):
    function, names = CASES[name]
    with named(names) as raised, explained(torch.device("cpu"), "move it"):
        function()
    assert str(raised.value).endswith(": move it")
    assert "same device" in str(raised.value.__cause__)
    assert ".other" not in str(raised.value), "which no function names"


def test_globals_and_closures_are_named():
    closed_over = torch.ones(2, device="meta")

    def inner(rows):
        closed_over.shape, HERE.shape, ELSEWHERE.shape  # noqa: B018  names them
        raise two_devices()

    names = "'closed_over' and 'ELSEWHERE'"
    with named(names), explained(torch.device("cpu"), "move it"):
        inner(HERE)


def test_trained_tensor_has_other_remedy():
    with named("'value'") as raised, explained(torch.device("cpu"), "move it"):
        TRAINS()
    assert "make it a parameter of the model" in str(raised.value)


def test_tensor_without_name_is_told():
    error = RuntimeError("found at least two devices, cuda:0 and cuda:1!")
    words = "computes on cpu, but .* a tensor of another device.*, device=x.device"
    with (
        pytest.raises(RuntimeError, match=words) as raised,
        explained(torch.device("cpu"), "move it"),
    ):
        raise error
    assert raised.value.__cause__ is error


def test_error_of_user_stays():
    error = RuntimeError("a bug on this device")
    with (
        pytest.raises(RuntimeError) as raised,
        explained(torch.device("cpu"), "move it"),
    ):
        raise error
    assert raised.value is error
