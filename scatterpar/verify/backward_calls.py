"""Find whether a backward pass calls modules, as activation checkpoints do.

Replicas that take turns call the user's function one at a time, and their backward
passes overlap. A backward pass that calls modules again would overlap with the call of
another replica, so the turn includes it (``Scope.SUBSTEP``).
"""

from __future__ import annotations

from typing import Any

from torch.nn.modules.module import register_module_forward_pre_hook


class BackwardCalls:
    """In the body a backward pass runs; notes whether it calls a module.

    Autograd may call modules in threads of its own.

    Attributes:
        calls_modules: true from the first call of a module in a body on.
    """

    def __init__(self) -> None:
        self.calls_modules = False

    def _note(self, *_: Any) -> None:
        self.calls_modules = True

    def __enter__(self) -> None:
        # A global hook, because checkpoints call modules that nobody has listed.
        self._handle = register_module_forward_pre_hook(self._note)

    def __exit__(self, *_: object) -> None:
        self._handle.remove()
