"""One replica: a working copy of modules, with tensors of its own or shared with its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter

import torch
from torch import Tensor, nn

from scatterpar.devices.lists import copy_lists, grouped
from scatterpar.replicas.aliases import like_memory
from scatterpar.replicas.attributes import attributes_of, parameter_like, take_attributes
from scatterpar.replicas.batch_norm import listening
from scatterpar.replicas.compiled import Compiler
from scatterpar.replicas.mirror import Mirror, Snapshot, Survey
from scatterpar.replicas.registration import registered_by
from scatterpar.replicas.sparse import pieces_of

__all__ = ["Replica", "is_state", "survey_tensors"]

_REQUIRES_GRAD = attrgetter("requires_grad")


class Replica:
    """One working copy: its modules, and its tensors in the order of the master's.

    Attributes:
        index: the number of the replica.
        device: where it lives.
        roots: the copies of the modules that were replicated.
        tensors: this copy's tensors; those that are trained are leaves.
        registered: the buffers of each of its modules.
        of: this copy's counterpart of a module of the master's, or of a method of one.
        cells: of the user's functions, and what was in them when twins of these were made.
        seen: by its batch normalisations since the refresh, where statistics move once a step.
    """

    def __init__(
        self,
        index: int,
        device: torch.device,
        roots: Sequence[nn.Module],
        survey: Survey,
        sources: Sequence[Tensor],
        compiler: Compiler,
        batch_norms: Mapping[int, nn.Module],
    ) -> None:
        self.index = index
        self.device = device
        originals = list(survey.tensors.values())
        private = [i for i, tensor in enumerate(originals) if is_state(tensor)]
        own = like_memory([originals[i] for i in private], device)
        # Where each tensor lies: with the sources, or in memory of this replica's own.
        self._homes = list(sources)
        for i, view in zip(private, own, strict=True):
            self._homes[i] = view
        # ``.data``: an alias that counts its own versions, so that writes can be told apart.
        self.tensors = [home.data for home in self._homes]
        for i, original in enumerate(originals):
            if isinstance(original, nn.Parameter):
                self.tensors[i] = parameter_like(original, self.tensors[i])
        self._copied = grouped([self.tensors[i] for i in private], [sources[i] for i in private])
        copies = dict(zip(survey.tensors, self.tensors, strict=True))
        mirror = Mirror(survey, copies, compiler)
        self._mirror = mirror
        self.of = mirror.of
        self.roots = tuple(mirror.of(root) for root in roots)
        self.cells = mirror.cells
        of_all = survey_tensors(survey)
        for original in of_all:
            take_attributes(original, mirror.of(original), mirror.of)
        self.registered = [registered_by(mirror.of(module)) for module in survey.modules.values()]
        self.seen = listening({m: mirror.of(module) for m, module in batch_norms.items()})
        self.state = Snapshot([*mirror.containers, *attributes_of(map(mirror.of, of_all))])
        self._sum_dtypes: Sequence[torch.dtype | None] = [None] * len(self.tensors)
        self._is_trained = [False] * len(self.tensors)

    def refresh(self) -> None:
        """Undo what a forward pass rebound, and copy in the sources' buffers.

        A forward pass may also leave a tensor in place and exchange its storage (``p.data =``,
        ``p.set_``, ``flatten_parameters``), and so may the user: each goes home. A leaf requires
        grad as the master's does, whatever a forward pass did to it.
        """
        if not self.state.unchanged():
            self.state.restore()
        self._mirror.rebind()
        for i in self.strays():
            self.tensors[i].data = self._homes[i]
        if list(map(_REQUIRES_GRAD, self.tensors)) != self._is_trained:
            self.train_like(self._sum_dtypes)
        copy_lists(self._copied)
        self.seen.update({m: [] for m in self.seen})

    def is_whole(self) -> bool:
        """Whether sparse tensors still lie on the pieces that are refreshed."""
        return all(
            all(map(Tensor.is_set_to, pieces_of(tensor), pieces))
            for tensor, pieces in self._mirror.sparse
        )

    def strays(self) -> list[int]:
        """Positions of the tensors that do not lie where they did after the last refresh."""
        at_home = list(map(Tensor.is_set_to, self.tensors, self._homes))
        return [] if all(at_home) else [i for i, flag in enumerate(at_home) if not flag]

    def train_like(self, dtypes: Sequence[torch.dtype | None]) -> None:
        """Take over which tensors are trained, and in which dtype their gradients add up."""
        self._sum_dtypes = dtypes
        self._is_trained = [dtype is not None for dtype in dtypes]
        for tensor, dtype in zip(self.tensors, dtypes, strict=True):
            if tensor.is_leaf:
                tensor.requires_grad_(dtype is not None)
                if dtype is not None:
                    tensor.grad_dtype = dtype


def survey_tensors(survey: Survey) -> list[Tensor]:
    """The tensors that modules hold and replicas make anew, the sparse ones last."""
    return [*survey.tensors.values(), *(tensor for tensor, _ in survey.sparse.values())]


def is_state(tensor: Tensor) -> bool:
    """Whether every replica needs its own copy: all but parameters, which a step only reads."""
    return not isinstance(tensor, nn.Parameter)
