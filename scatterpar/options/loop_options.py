"""What a loop of another library sets on the engine that computes its steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LoopOptions:
    """The options of a loop around the engine, ``engine.loop``; read in each step.

    Without such a loop they keep their defaults. Copies of an engine have defaults,
    too, because a loop makes its own engine.

    Attributes:
        takes_turns: whether replicas call the user's function one at a time. It is the
            module's forward pass and the criterion of a sub-step, or the function of
            ``engine.map``.
        remedies: sentences for the refusals of a look, which name arguments of the loop
            in the place of the engine's. Empty: the engine's own.
    """

    takes_turns: bool = False
    remedies: str = ""
