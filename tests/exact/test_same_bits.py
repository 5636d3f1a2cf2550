"""Eight replicas on one device or on eight: the same losses, parameters, buffers and
draws.
"""

import functools

import pytest
import torch
from harness.models import Of
from harness.oracle import randint, randn
from harness.pairwise import pairwise
from torch import nn
from torch.utils.checkpoint import checkpoint

from scatterpar import ScatterOnceParallel

pytestmark = pytest.mark.draws

STEPS, FEATURES, LENGTH, CLASSES = 4, 7, 4, 3
ROWS = (61, 9, 50, 5)  # ragged, hardly more than replicas, and fewer
CRITERION = nn.CrossEntropyLoss()
LAYOUTS = ["00001111", "01234567", "00112234", "01111111"]


def everything():
    """Sizes that are odd: one after the other, weights would lie anywhere in their
    memory.
    """

    def forward(m, inputs):
        hidden = checkpoint(
            m.middle, m.first(inputs).transpose(1, 2), use_reentrant=False
        )
        return m.last(hidden.mean(2))

    layers = nn.Conv1d(33, 13, 2), nn.BatchNorm1d(13), nn.ReLU(), nn.Dropout(0.3)
    parts = {"first": nn.Linear(FEATURES, 33), "last": nn.Linear(13, CLASSES)}
    return Of(forward, middle=nn.Sequential(*layers), **parts)


def trained(accum, whole_batch, layouts):
    """All bits that training on these layouts, one after the other, leaves; all losses
    too.
    """
    torch.manual_seed(0)
    losses, states = [], None
    for part, layout in enumerate(layouts):
        module = everything()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        if states:  # as another process would go on
            module.load_state_dict(states[0])
            optimizer.load_state_dict(states[1])
            torch.set_rng_state(states[2])
        policy = "batch" if accum > 1 else "master"
        each = STEPS // len(layouts)
        with ScatterOnceParallel(module, accum, layout, buffers=policy) as engine:
            for step in range(part * each, (part + 1) * each):
                rows = ROWS[step % len(ROWS)]
                inputs = randn(rows, LENGTH, FEATURES, seed=step).float()
                targets = randint(CLASSES, rows, seed=step)
                optimizer.zero_grad()
                losses.append(
                    engine.forward_backward(
                        inputs, targets, CRITERION, whole_batch=whole_batch
                    )
                )
                optimizer.step()
        states = module.state_dict(), optimizer.state_dict(), torch.get_rng_state()
    return {
        **{f"loss {step}": loss for step, loss in enumerate(losses)},
        **module.state_dict(),
        "random state": states[2],
    }


in_one_memory = functools.cache(lambda *given: trained(*given, [["cpu"] * 8]))


@pytest.mark.contract
@pairwise(
    layout=LAYOUTS,
    stops=[False, True],
    accum=[1, 3],
    whole_batch=[False, True],
    # The second part of a run that stops is one that begins there.
    quick={"layout": ["00112234"], "stops": [True]},
)
def test_bits_do_not_depend_on_layout(layout, stops, accum, whole_batch):
    """Nor does it show that a run stopped on four devices and went on on another
    layout.
    """
    device_ids = [f"cpu:{i}" for i in layout]
    layouts = (
        [[f"cpu:{i // 2}" for i in range(8)], device_ids] if stops else [device_ids]
    )
    expected = in_one_memory(accum, whole_batch)
    found = trained(accum, whole_batch, layouts)
    assert found.keys() == expected.keys()
    assert not [
        name for name, value in found.items() if not torch.equal(value, expected[name])
    ]
