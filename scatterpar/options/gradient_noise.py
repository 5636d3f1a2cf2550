"""measure_noise=True: how noisy a step's gradient is.

``norms_of`` measures the replicas' gradients before they are added, ``noise_of``
compares these norms with that of their sum. The formula is in the docstring of
:class:`scatterpar.GradientNoise`; ``NoiseScale`` averages it over steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from scatterpar.devices.coalescing import to_host
from scatterpar.devices.transfers import to_numbers
from scatterpar.report import GradientNoise, StepReport
from scatterpar.step.attempt import Attempt
from scatterpar.step.reduce import Outcome, ReplicaNorms


def check_noise(device_ids: Sequence[torch.device], ranks: int) -> None:
    """Refuse ``measure_noise`` with a single replica, which none is compared with."""
    if len(device_ids) * ranks < 2:
        raise ValueError(
            f"measure_noise=True compares the gradients of replicas, and there is one; "
            f"name its device twice: device_ids={[str(device_ids[0])] * 2}"
        )


def norms_of(attempt: Attempt) -> ReplicaNorms:
    """The ``sum of c_i |g_i|^2`` over the replicas that had terms, and their number."""
    request = attempt.request
    weights = attempt.weights
    scale = request.scale / (weights.terms or 1.0)  # a replica has c_i g_i times this
    squares: list[float] = []
    for share, factors in zip(attempt.plan.shares, weights.by_share, strict=True):
        terms = float(share.rows)
        if request.is_mean:
            terms = sum(factors) * weights.terms
        if terms:
            gradients = _gradients_of(attempt, share.replica).values()
            # c_i |g_i|^2 from |c_i g_i|^2: the sum of a replica is not divided yet.
            squares.append(_squared_norm(gradients) / (terms * scale**2))
    return ReplicaNorms(sum(squares), len(squares))


def _gradients_of(attempt: Attempt, replica: int) -> dict[int, Tensor]:
    """The gradients of one replica, by ``id`` of the user's leaf.

    A leaf that model and criterion share is one parameter: the norm is that of the sum.
    """
    gradients: dict[int, Tensor] = {}
    for replica_set in attempt.replicas.replica_sets:
        for number, gradient in replica_set.gradients_of(replica).items():
            leaf = id(replica_set.tensors[number])
            # Not in place: these are the gradients that are added up next.
            if leaf in gradients:
                gradients[leaf] = gradients[leaf] + gradient
            else:
                gradients[leaf] = gradient
    return gradients


def noise_of(outcome: Outcome) -> GradientNoise:
    """The gradient's noise, before the commit; NaN if nothing can be compared."""
    request = outcome.request
    norms = outcome.norms
    terms = outcome.terms if request.is_mean else float(outcome.rows)
    square = math.nan  # |g|^2, of the whole batch's gradient
    # With one replica that had terms there is nothing to compare it with.
    can_compare = norms.replicas > 1 and terms and request.backward
    if can_compare and math.isfinite(norms.squares):
        gradients = [
            gradient for _, gradient in outcome.gradients if gradient is not None
        ]
        factor = request.scale * (1.0 if request.is_mean else terms)
        square = _squared_norm(gradients) / factor**2
    if not math.isfinite(square):
        return GradientNoise(math.nan, math.nan)
    # The unbiased estimates of McCandlish et al. 2018, A.1, with replicas as the small
    # batches.
    variance = (norms.squares - terms * square) / (norms.replicas - 1)
    return GradientNoise(square - variance / terms, variance * outcome.rows / terms)


def _squared_norm(tensors: Iterable[Tensor]) -> float:
    """The sum of the squares of all elements; the host reads the device once."""
    norms = []
    for tensor in tensors:
        values = tensor.detach()
        if tensor.is_sparse:
            # Of an uncoalesced one, entries with one index have to be added first.
            values = values.coalesce().values()
        # A norm in half precision would overflow.
        dtype = torch.promote_types(values.dtype, torch.float32)
        norms.append(torch.linalg.vector_norm(values, dtype=dtype))
    return float(sum(to_numbers(norm) ** 2 for norm in to_host(norms)))


class NoiseScale:
    """The gradient's noise scale, averaged over steps.

    Batches much larger than the scale gain little.
    Averages signal and noise separately over the steps, with exponential decay, and
    divides the averages: the ratio of a single step is far too noisy (McCandlish et al.
    2018, arXiv:1812.06162, appendix A.1). If a batch is much smaller than the scale, a
    doubled batch needs nearly half the steps. If it is much larger, a doubled batch
    needs nearly as many steps. ``decay``, the weight of the previous average in every
    update, is at least 0 and below 1, else it is a ``ValueError``.

    >>> import torch
    >>> from scatterpar import ScatterOnceParallel
    >>> model = torch.nn.Linear(4, 1)
    >>> engine = ScatterOnceParallel(model, device_ids=["cpu"] * 2, measure_noise=True)
    >>> noise_scale = NoiseScale()
    >>> for _ in range(3):
    ...     x, y = torch.randn(64, 4), torch.randn(64, 1)
    ...     loss = engine.forward_backward(x, y, torch.nn.MSELoss())
    ...     noise_scale.update(engine.last_step)
    >>> noise_scale.scale > 0
    True
    """

    def __init__(self, decay: float = 0.95) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be at least 0 and below 1, got {decay!r}")
        self.decay = decay
        self._signal = 0.0
        self._noise = 0.0

    def update(self, report: StepReport | None) -> None:
        """Add one step, given its ``engine.last_step``; a step with NaN is ignored.

        Raises:
            ValueError: the step did not measure its noise.
        """
        if report is None or report.noise is None:
            raise ValueError(
                "the step did not measure its noise; make the engine with "
                "measure_noise=True"
            )
        signal = report.noise.signal
        noise = report.noise.noise
        # One NaN would stay in the averages for ever.
        if math.isfinite(signal) and math.isfinite(noise):
            self._signal = self.decay * self._signal + (1 - self.decay) * signal
            self._noise = self.decay * self._noise + (1 - self.decay) * noise

    @property
    def scale(self) -> float:
        """The noise scale in rows; NaN before the first step, infinite without any
        signal.
        """
        return GradientNoise(self._signal, self._noise).scale

    def state_dict(self) -> dict[str, float]:
        """The state for a checkpoint."""
        return {"decay": self.decay, "signal": self._signal, "noise": self._noise}

    def load_state_dict(self, state_dict: Mapping[str, float]) -> None:
        """Load a state that ``state_dict`` returned."""
        self.decay = state_dict["decay"]
        self._signal = state_dict["signal"]
        self._noise = state_dict["noise"]
