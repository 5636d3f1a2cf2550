"""What was appended to a value of which a step function makes another one.

::

    self.seen = torch.cat([self.seen, labels])      rows are appended
    self.rows = np.append(self.rows, loss)
    self.names += (name,)                           entries
    self.text += "done"                             letters
"""

from __future__ import annotations

from operator import is_
from typing import Any

import numpy
import torch
from torch import Tensor

from scatterpar.batch.nested import PLAIN_CLASSES


def is_array(value: Any) -> bool:
    """Whether ``value`` is a tensor of torch or an array of NumPy, of no subclass."""
    return type(value) in (Tensor, numpy.ndarray)


def is_equal(value: Any, other: Any) -> bool:
    """Whether two plain values or arrays are of one class and dtype, and equal."""
    if type(value) is not type(other):
        return False
    if isinstance(value, Tensor):
        is_alike = (value.dtype, value.device) == (other.dtype, other.device)
        return is_alike and torch.equal(value, other)
    if isinstance(value, numpy.ndarray):
        return value.dtype == other.dtype and numpy.array_equal(value, other)
    return isinstance(value, PLAIN_CLASSES) and bool(value == other)


def is_number(value: Any) -> bool:
    """Whether ``value`` is a number, which may be NumPy's; not a boolean."""
    return type(value) in (int, float) or isinstance(value, numpy.number)


def appended(before: Any, now: Any, *, is_said: bool) -> Any:
    """What ``now`` has after all of ``before``: rows of an array, entries of a tuple.

    ``None`` if it does not begin with ``before``, or is not longer. Any value begins
    with an empty one: then ``is_said``, whether a statement appends, decides.
    """
    if type(now) is not type(before):
        return None
    if not isinstance(now, (tuple, str)) and not is_array(now):
        return None
    if is_array(now) and (not now.ndim or not before.ndim):
        return None
    number = len(before)
    if len(now) <= number or not (number or is_said):
        return None
    if isinstance(now, tuple):
        is_kept = type(now) is tuple and all(map(is_, now[:number], before))
    elif isinstance(now, str):
        is_kept = is_said and now.startswith(before)
    else:  # torch.zeros(0) joins rows of any shape
        is_kept = (before.ndim == 1 and not number) or is_equal(now[:number], before)
    return now[number:] if is_kept else None


def extended(target: Any, piece: Any) -> Any:
    """``target``, which may be ``None``, with ``piece`` at its end."""
    if target is None:
        return piece
    if isinstance(target, Tensor):
        return torch.cat([target, piece.to(target.device)]) if len(target) else piece
    if isinstance(target, numpy.ndarray):
        return numpy.concatenate([target, piece]) if len(target) else piece
    return target + piece
