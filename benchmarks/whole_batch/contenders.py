"""One step of a loss that compares rows, in three ways; and what else takes a pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from benchmarks.models import Case
from benchmarks.peers import Peer
from scatterpar import ScatterOnceParallel


def supervised_contrastive(outputs: Tensor, labels: Tensor) -> Tensor:
    """Rows of one class attract each other (Khosla et al. 2020, arXiv:2004.11362)."""
    z = normalize(outputs, dim=1)
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    likelihood = (z @ z.T / 0.1).masked_fill(itself, -1e9).log_softmax(1)
    positive = (labels[:, None] == labels) & ~itself
    return -((likelihood * positive).sum(1) / positive.sum(1).clamp(min=1)).mean()


def in_two_passes(case: Case) -> Peer:
    """``whole_batch=True`` on one replica."""
    return _engine(case, whole_batch=True)


def in_one_pass(case: Case) -> Peer:
    """An ordinary step with as many sub-steps: the loss compares the rows of a
    micro-batch.
    """
    return _engine(case, whole_batch=False)


def cached_as_published(case: Case) -> Peer:
    """Gradient caching as the paper has it (Gao et al. 2021, arXiv:2101.06983, section
    3.2).

    Outputs without a graph; the loss; then every chunk again, forward and backward,
    from its saved random state.
    """
    module = case.module()
    images, labels = case.data()
    chunks = images.chunk(case.accum)

    def run() -> None:
        states, outputs = [], []
        with torch.no_grad():
            for chunk in chunks:
                states.append(torch.get_rng_state())
                outputs.append(module(chunk))
        after = torch.get_rng_state()
        joined = torch.cat(outputs).requires_grad_()
        supervised_contrastive(joined, labels).backward()
        assert joined.grad is not None
        for chunk, state, gradient in zip(
            chunks, states, joined.grad.chunk(case.accum), strict=True
        ):
            torch.set_rng_state(state)
            module(chunk).backward(gradient)
        torch.set_rng_state(after)

    return Peer(module, run)


def without_comparison(case: Case) -> Peer:
    """As ``in_two_passes``, but outputs of the second pass are not compared with the
    first's.
    """
    peer = in_two_passes(case)
    return Peer(peer.module, _patched(peer.run))


def _patched(run: Callable[[], Any]) -> Callable[[], None]:
    from scatterpar.options import whole_batch

    def patched() -> None:
        kept, whole_batch.agreements = whole_batch.agreements, lambda *_: []
        try:
            run()
        finally:
            whole_batch.agreements = kept

    return patched


def _engine(case: Case, whole_batch: bool) -> Peer:
    module: nn.Module = case.module()
    images, labels = case.data()
    # An ordinary step refuses this loss, and rightly so: it compares rows with each
    # other.
    engine = ScatterOnceParallel(module, case.accum, ["cpu"], verify=False)
    return Peer(
        module,
        lambda: engine.forward_backward(
            images, labels, supervised_contrastive, whole_batch=whole_batch
        ),
    )
