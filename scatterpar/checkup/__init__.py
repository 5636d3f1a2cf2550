"""Whether a machine is sound: the doctor for everybody, the card for machines with GPUs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """One conclusion: ``fine``, ``note``, ``slow`` or ``WRONG``, with the reason and the remedy."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}{'' if self.kind in ('fine', 'note') else ' because'}: {self.text}"
