"""Autograd: its graph, the leaves and hooks in it, and what this thread runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge
from torch.overrides import has_torch_function

from scatterpar.libraries import package_of

_Hooks = tuple[Callable[..., Any], Callable[..., Any]]
# The innermost pair of saved-tensor hooks of this thread, or ``None``.
saved_tensors_hooks: Callable[[], _Hooks | None]
saved_tensors_hooks = partial(torch._C._autograd._top_saved_tensors_default_hooks, True)

# The number of the backward pass that this thread runs; -1 outside of a backward pass.
current_graph_task: Callable[[], int] = torch._C._current_graph_task_id


def own_saved_tensors() -> contextlib.AbstractContextManager[None]:
    """In the body, graphs save their tensors as they are.

    A checkpoint around a call knows the tensors of its graph by their order, and those
    of a look in the call are not computed again.
    """
    if saved_tensors_hooks() is None:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def node_of(tensor: Tensor) -> Any:
    """The autograd node at which the gradient of ``tensor`` arrives."""
    return get_gradient_edge(tensor).node


def executes(node: Any) -> bool:
    """Whether the backward pass that this thread runs executes ``node``, if it reaches
    it. ``autograd.grad`` of other tensors does not execute that of a leaf.
    """
    answer: bool = torch._C._will_engine_execute_node(node)
    return answer


def at_end_of_pass(function: Callable[[], object]) -> None:
    """Call ``function`` when the backward pass that this thread runs has ended.

    Not if it raises.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(function)


_USE_COUNT: Callable[[Tensor], int] = Tensor._use_count  # type: ignore[attr-defined]  # no stub
# Of a tensor, by number: those that get its gradient, and those that run after it was
# accumulated. ``None`` if there never was one.
HOOKS_BEFORE = attrgetter("_backward_hooks")
HOOKS_AFTER = attrgetter("_post_accumulate_grad_hooks")
_GRAPH: Any = torch.autograd.graph


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether the leaf has hooks that run after its gradient was accumulated."""
    return bool(tensor._post_accumulate_grad_hooks)


def are_observed(leaves: Sequence[Tensor]) -> bool:
    """Whether a hook may run when these leaves get gradients.

    On a leaf, or on its AccumulateGrad node. The node refers to the leaf, so a node
    that somebody keeps raises the leaf's use count.
    """
    if max(map(_USE_COUNT, leaves), default=0) > 1:
        return True
    return any(map(HOOKS_BEFORE, leaves)) or any(map(HOOKS_AFTER, leaves))


def drop_accumulator(leaf: Tensor) -> None:
    """Let the leaf's next graph have an AccumulateGrad node of its own.

    A leaf that becomes the output of a ``Function`` that wrote it takes itself from its
    node. If somebody keeps an earlier graph, the node stays the leaf's, and the next
    backward pass that the leaf is in as a leaf ends the process. ``Tensor.data`` drops
    the node if the type changes.
    """
    if _USE_COUNT(leaf) == 1:
        return  # no node refers to the leaf
    data = leaf.data
    other = torch.float32 if data.dtype != torch.float32 else torch.float64
    leaf.data = data.new_empty(0, dtype=other)
    leaf.data = data


@contextlib.contextmanager
def hooks_taken_off(tensors: Sequence[Tensor]) -> Iterator[None]:
    """In the body, no hook that the user registered on one of these leaves runs."""
    dictionaries = [*map(HOOKS_BEFORE, tensors), *map(HOOKS_AFTER, tensors)]
    # Lists: to copy these ordered dictionaries takes five times as long.
    saved = [(hooks, list(hooks.items())) for hooks in dictionaries if hooks]
    try:
        for hooks, _ in saved:
            hooks.clear()  # torch keeps the dictionary even if another one is assigned
        yield
    finally:
        for hooks, earlier in saved:
            for number, hook in earlier:
                hooks[number] = hook


def nodes_of(tensors: Iterable[Tensor]) -> list[Any]:
    """The autograd nodes that computed the tensors, without leaves."""
    return [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]


def nodes_reached(loss: Tensor, without: Sequence[Any] = ()) -> list[Any]:
    """The nodes, leaves too, that a backward pass from ``loss`` reaches.

    Not those of ``without``, nor what is reached through them alone.
    """
    seen = {None, *without}
    reached: list[Any] = []
    pending: list[Any] = []
    if loss.requires_grad:
        pending.append(node_of(loss))
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            reached.append(node)
            pending += [next_node for next_node, _ in node.next_functions]
    return reached


def saved_tensors(results: Iterable[Tensor]) -> list[Tensor]:
    """The strided tensors that the graphs of ``results`` have saved.

    Not those that hooks have packed, as activation checkpoints do: to unpack them is to
    compute again.
    """
    nodes: list[Any] = []
    for result in results:
        nodes += nodes_reached(result, nodes)
    tensors: list[Tensor] = []
    for node in nodes:
        for name in dir(node):
            if not name.startswith("_raw_saved_"):
                continue
            try:
                saved = getattr(node, name)
                entries = saved if isinstance(saved, (tuple, list)) else [saved]
                data = [entry.data for entry in entries if entry.unpack_hook is None]
            except RuntimeError:  # a node that a backward pass has freed
                continue
            for tensor in data:
                if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                    tensors.append(tensor)
    return tensors


def leaves_reached(loss: Tensor, nodes: Sequence[Any]) -> list[Tensor]:
    """The leaves that a backward pass from ``loss`` reaches, not through ``nodes``."""
    return leaves_of(nodes_reached(loss, nodes))


def leaves_of(nodes: Iterable[Any]) -> list[Tensor]:
    """The leaves among the nodes of a graph, each once."""
    leaves: dict[int, Tensor] = {}
    for node in nodes:
        if is_of_leaf(node):
            leaves[id(node.variable)] = node.variable
    return list(leaves.values())


def is_of_leaf(node: Any) -> bool:
    """Whether a node of a graph accumulates the gradient of a leaf."""
    return type(node).__name__ == "AccumulateGrad"


def is_function_of_user(node: Any) -> bool:
    """Whether a node of a graph is of an ``autograd.Function`` that neither torch nor
    this package defines.
    """
    if not isinstance(node, BackwardCFunction):
        return False
    # Torch makes a class of its own for the node, in a module of torch.
    class_of_node: Any = type(node)
    return package_of(class_of_node._forward_cls) not in ("torch", "scatterpar")


def backward(roots: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Run ``torch.autograd.backward`` without its checks of the arguments.

    The checks take as long as the backward pass of a small operator, and hold the GIL.
    All arguments come from the package, and autograd's engine still refuses wrong
    shapes.
    """
    if has_torch_function(tuple(roots)):
        torch.autograd.backward(roots, gradients)
        return
    options = {"allow_unreachable": True, "accumulate_grad": True}
    # Neither retain_graph nor create_graph; the inputs are all leaves.
    _GRAPH._engine_run_backward(
        tuple(roots), tuple(gradients), False, False, (), **options
    )
