"""measure_noise=True: the noise of a step's gradient, from the differences between
replicas.

``observe`` looks at the replicas' gradients before they are added; ``noise_of``
compares its numbers, which ranks have added meanwhile, with the gradient of the whole
batch. The formula is in the docstring of :class:`scatterpar.GradientNoise`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from scatterpar.devices.transfers import to_host, to_numbers
from scatterpar.report import GradientNoise, StepReport
from scatterpar.step.attempt import Attempt
from scatterpar.step.reduce import Outcome


def check_noise(device_ids: Sequence[torch.device], ranks: int) -> None:
    """Refuse ``measure_noise`` with a single replica, whose gradient cannot be
    compared.
    """
    if len(device_ids) * ranks < 2:
        raise ValueError(
            "measure_noise=True compares the gradients of replicas, and there is "
            "one; name its "
            f"device twice: device_ids={[str(device_ids[0])] * 2}"
        )


def observe(attempt: Attempt) -> tuple[float, float]:
    """The ``sum of c_i |g_i|^2`` over the replicas that had terms, and their number."""
    request, weights, terms = attempt.request, attempt.weights, attempt.weights.terms
    counts = [float(share.rows) for share in attempt.plan.shares]
    if request.is_mean:
        counts = [sum(factors) * terms for factors in weights.by_share]
    scale = request.scale / (terms or 1.0)  # a replica has c_i g_i times this
    squares = [
        _squared_norm(_gradients_of(attempt, replica).values()) / (count * scale**2)
        for replica, count in enumerate(counts)
        if count
    ]
    return sum(squares), len(squares)


def _gradients_of(attempt: Attempt, replica: int) -> dict[int, Tensor]:
    """The gradients of one replica, by ``id`` of the user's leaf.

    A leaf that model and criterion share is one parameter: the norm is that of the sum.
    """
    gradients: dict[int, Tensor] = {}
    for each in attempt.replicas.replica_sets:
        for i in each.trained:
            leaf, gradient = id(each.tensors[i]), each.replicas[replica].tensors[i].grad
            if gradient is not None:
                gradients[leaf] = (
                    gradients[leaf] + gradient if leaf in gradients else gradient
                )
    return gradients


def noise_of(outcome: Outcome) -> GradientNoise:
    """The gradient's noise; NaN if there is nothing to compare. Call it before the
    commit.
    """
    request, (squares, replicas), square = outcome.request, outcome.observed, math.nan
    terms = outcome.terms if request.is_mean else float(outcome.rows)
    if replicas > 1 and terms and request.backward and math.isfinite(squares):
        gradients = [
            gradient for _, gradient in outcome.gradients if gradient is not None
        ]
        factor = request.scale * (1.0 if request.is_mean else terms)
        square = _squared_norm(gradients) / factor**2
    if not math.isfinite(square):
        return GradientNoise(math.nan, math.nan)
    variance = (squares - terms * square) / (replicas - 1)
    return GradientNoise(square - variance / terms, variance * outcome.rows / terms)


def _squared_norm(tensors: Iterable[Tensor]) -> float:
    """The sum of the squares of all elements; the host reads the device once."""
    norms = []
    for tensor in tensors:
        values = (
            tensor.detach().coalesce().values() if tensor.is_sparse else tensor.detach()
        )
        dtype = torch.promote_types(values.dtype, torch.float32)
        norms.append(torch.linalg.vector_norm(values, dtype=dtype))
    return float(sum(to_numbers(norm) ** 2 for norm in to_host(norms)))


class NoiseScale:
    """The gradient's noise scale, averaged over steps: batches much larger than it gain
    little.

    Averages signal and noise separately over the steps, with exponential decay, and
    divides the averages: the ratio of a single step is far too noisy (McCandlish et al.
    2018, arXiv:1812.06162, appendix A.1). If a batch is much smaller than the scale, a
    doubled batch needs nearly half the steps. If it is much larger, a doubled batch
    needs nearly as many steps. ``decay``, the weight of the previous average in every
    update, is at least 0 and below 1, else it is a ``ValueError``.

    >>> import torch
    >>> from scatterpar import ScatterOnceParallel
    >>> engine = ScatterOnceParallel(torch.nn.Linear(4, 1), device_ids=["cpu"] * 2, measure_noise=True)
    >>> noise_scale = NoiseScale()
    >>> for _ in range(3):
    ...     loss = engine.forward_backward(torch.randn(64, 4), torch.randn(64, 1), torch.nn.MSELoss())
    ...     noise_scale.update(engine.last_step)
    >>> noise_scale.scale > 0
    True
    """

    def __init__(self, decay: float = 0.95) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be at least 0 and below 1, got {decay!r}")
        self.decay = decay
        self._signal = self._noise = 0.0

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
        signal, noise = report.noise.signal, report.noise.noise
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
        self._signal, self._noise = state_dict["signal"], state_dict["noise"]
