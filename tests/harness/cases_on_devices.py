"""The table of cases on accelerators: a pytest file that only ``tests/versions.py``
runs, because it compares two versions, and not each with plain torch's possibilities.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from harness import module_cases, weighted
from harness.agree import agree
from harness.plain import map_atoms

pytestmark = pytest.mark.draws
RUNNERS = ("engine", "pair", "inference")
LAYOUTS = {"one": (0,), "shared": (0, 0), "two": (0, 1)}
CASES = {**module_cases.CASES, **weighted.CASES}
# Plain torch alone fails in these on the simulated accelerator.
NOT_MOVED = "``.to`` leaves tensors of the case on the host"
NO_KERNEL = "the simulated accelerator has no kernel for it"
NOT_SIMULATED = {
    "a trained buffer": NOT_MOVED,
    "overlapping buffer, transposed": NOT_MOVED,
    "unregistered list": NOT_MOVED,
    "own parameters": "``.to`` makes plain parameters of them",
    "changes between steps": NOT_MOVED,
    "a method of a trained criterion": NOT_MOVED,
    "lstm": NO_KERNEL,
    "sparse gradients": NO_KERNEL,
    "conjugate gradients": f"{NO_KERNEL}, and the process ends",
    "bags": f"{NO_KERNEL}, and the error may come in the next test",
}


def on_device(case, device):
    """The case with all tensors there: plain torch computes there, too."""

    def criterion(module):
        made = case.criterion(module)
        return made.to(device) if isinstance(made, nn.Module) else made

    def moved(batch):
        return map_atoms(
            lambda atom: atom.to(device) if isinstance(atom, torch.Tensor) else atom,
            batch,
        )

    return replace(
        case,
        model=lambda: case.build().to(device),
        keep_dtypes=True,
        criterion=criterion,
        batch=moved(case.batch),
        plain=None if case.plain is None else moved(case.plain),
    )


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_case(name, layout, runner):
    numbers = LAYOUTS[layout]
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or max(numbers) >= torch.accelerator.device_count():
        pytest.skip("needs accelerators")
    case = CASES[name]
    if runner in case.unless or runner not in (case.only or RUNNERS):
        pytest.skip("not for this case")
    if accelerator.type == "simulated" and name in NOT_SIMULATED:
        pytest.skip(NOT_SIMULATED[name])
    if (name, layout, runner) == ("gradients in one memory", "one", "pair"):
        pytest.skip("autograd's own sum, which adds twice into such a gradient")
    devices = [f"{accelerator.type}:{number}" for number in numbers]
    agree(on_device(case, devices[0]), runner, devices)
