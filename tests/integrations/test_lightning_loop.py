"""Parts of the training of a LightningModule: what replicas have, what is skipped."""

from __future__ import annotations

import pytest
from harness.optional import needed
from torch import nn

needed("lightning.pytorch", "'.[lightning]'")

from scatterpar.integrations.lightning_loop import ModuleLoop, PartsOf  # noqa: E402

pytestmark = [pytest.mark.loops, pytest.mark.draws]


def test_parts_follow_the_module_not_attributes():
    module = nn.Sequential(nn.Linear(2, 2))
    module.number = 1
    parts = PartsOf(module)
    assert not hasattr(parts, "number")
    module.append(nn.Linear(2, 1))
    module.register_buffer("late", module[0].bias.detach())
    assert [*parts.parameters()] == [*module.parameters()]
    assert dict(parts.named_buffers()).keys() == {"late"}


@pytest.mark.parametrize("first", [True, False])
def test_only_whole_batches_are_skipped(first):
    loop = ModuleLoop(None, None, None)
    loop._check_skips(first)
    loop._check_skips(first)
    with pytest.raises(ValueError, match="None for a part of the batch"):
        loop._check_skips(not first)
