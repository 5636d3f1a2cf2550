"""What does it cost to save what user code may write, beside a copy of it?

    python -m benchmarks.journal_cost

An owner has 10,000 values in containers. A journal saves and restores them; the peer is
``copy.deepcopy``, in the same rounds. A plain step makes no journal.
"""

import copy
import statistics
import time

import torch

from scatterpar.objects.journal import Journal
from scatterpar.objects.walk import Walk

ROUNDS = 15
GROUPS = 20
VALUES = 500  # per group


class Meter:
    def __init__(self, number):
        self.total = float(number)
        self.count = number


class Owner:
    def __init__(self, make):
        self.groups = {
            f"group {group}": [make(number) for number in range(VALUES)]
            for group in range(GROUPS)
        }

    def step(self):
        pass


KINDS = {
    "numbers": float,
    "dictionaries": lambda number: {"loss": float(number), "step": number},
    "objects": Meter,
    "tensors": lambda number: torch.full((3,), number),
}


def seconds_of_journal(owner):
    start = time.perf_counter()
    journal = Journal(Walk([owner.step]))
    journal.restore()
    return time.perf_counter() - start


def seconds_of_copy(owner):
    start = time.perf_counter()
    copy.deepcopy(owner)
    return time.perf_counter() - start


def main():
    for name, make in KINDS.items():
        owner = Owner(make)
        pairs = [
            (seconds_of_journal(owner), seconds_of_copy(owner)) for _ in range(ROUNDS)
        ]
        ratio = statistics.median(journal / copied for journal, copied in pairs)
        milliseconds = 1e3 * statistics.median(journal for journal, _ in pairs)
        print(
            f"{name:>12}  journal {milliseconds:6.1f} ms  {ratio:5.2f} of a deep copy"
        )


if __name__ == "__main__":
    main()
