"""Where the weights of recurrent layers have to lie, so that cuDNN takes them as they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

__all__ = ["weight_blocks"]


def weight_blocks(modules: Iterable[nn.Module], tensors: Mapping[int, Tensor]) -> list[list[int]]:
    """Positions in ``tensors`` of the weights of each recurrent layer, in cuDNN's order.

    cuDNN wants all matrices, then all biases, from the start of one storage on; weights
    that lie elsewhere are copied together in every forward pass (``try_get_weight_buf`` in
    ATen's ``native/cudnn/RNN.cpp``). A weight that several layers share lies in the first
    one's block alone, and layers with projections keep the order of ``tensors``.
    """
    position = {key: i for i, key in enumerate(tensors)}
    taken: set[int] = set()
    blocks = []
    for module in modules:
        if not isinstance(module, nn.RNNBase) or module.proj_size:
            continue
        named = [(name, module._parameters.get(name)) for name in module._flat_weights_names]
        named.sort(key=lambda item: item[0].startswith("bias"))
        block = [position.get(id(tensor), -1) for _, tensor in named]
        dtypes = {tensor.dtype for _, tensor in named if tensor is not None}
        is_whole = -1 not in block and len(set(block)) == len(block) and len(dtypes) == 1
        if block and is_whole and not taken.intersection(block):
            taken.update(block)
            blocks.append(block)
    return blocks
