"""Steps of a loss that compares rows: the engine's, and gradient caching by hand.

::

    ours          engine.forward_backward(images, labels, loss, whole_batch=True)
    published     outputs = [module(chunk) for chunk in chunks], without a graph
                  loss(outputs, labels).backward()
                  module(chunk).backward(the output's gradient), for each chunk
    one pass      an ordinary step: the loss compares the rows of a micro-batch
    not compared  ours, without the comparison of the second pass with the first
"""

from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.models import Case
from benchmarks.peers import Peer
from scatterpar import ScatterOnceParallel
from scatterpar.options import whole_batch


def supervised_contrastive(outputs: Tensor, labels: Tensor) -> Tensor:
    """Rows of one class attract each other (Khosla et al. 2020, arXiv:2004.11362)."""
    z = normalize(outputs, dim=1)
    similarities = z @ z.T / 0.1
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    likelihood = similarities.masked_fill(itself, -1e9).log_softmax(1)
    positive = (labels[:, None] == labels) & ~itself
    num_positive = positive.sum(1).clamp(min=1)
    by_row = (likelihood * positive).sum(1) / num_positive
    return -by_row.mean()


def in_two_passes(case: Case) -> Peer:
    """``whole_batch=True`` on one replica."""
    return _engine(case, is_whole=True)


def in_one_pass(case: Case) -> Peer:
    """An ordinary step with as many sub-steps."""
    return _engine(case, is_whole=False)


def cached_as_published(case: Case) -> Peer:
    """Gradient caching as in Gao et al. 2021, arXiv:2101.06983, section 3.2."""
    module = case.module()
    images, labels = case.data()
    chunks = images.chunk(case.accum)

    def run() -> None:
        states = []
        outputs = []
        with torch.no_grad():
            for chunk in chunks:
                states.append(torch.get_rng_state())
                outputs.append(module(chunk))
        state_after = torch.get_rng_state()
        joined = torch.cat(outputs).requires_grad_()
        supervised_contrastive(joined, labels).backward()
        assert joined.grad is not None
        gradients = joined.grad.chunk(case.accum)
        for chunk, state, gradient in zip(chunks, states, gradients, strict=True):
            torch.set_rng_state(state)  # the same dropout masks as in the first pass
            module(chunk).backward(gradient)
        torch.set_rng_state(state_after)

    return Peer(module, run)


def without_comparison(case: Case) -> Peer:
    """As ``in_two_passes``, without comparing the second pass with the first."""
    peer = in_two_passes(case)

    def run() -> None:
        with mock.patch.object(whole_batch, "agreements", _no_agreements):
            peer.run()

    return Peer(peer.module, run)


def _no_agreements(*_: object) -> list[Tensor]:
    return []


MAKERS: dict[str, Callable[[Case], Peer]] = {
    "ours": in_two_passes,
    "published": cached_as_published,
    "one pass": in_one_pass,
    "not compared": without_comparison,
}


def _engine(case: Case, is_whole: bool) -> Peer:
    module = case.module()
    images, labels = case.data()
    # An ordinary step refuses this loss, and rightly so: it compares rows.
    engine = ScatterOnceParallel(module, case.accum, ["cpu"], verify=False)

    def run() -> None:
        engine.forward_backward(
            images, labels, supervised_contrastive, whole_batch=is_whole
        )

    return Peer(module, run)
