"""What the looks at a card find: written after every one, and a look that fails is written, too."""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

Found = Mapping[str, object]


class Findings:
    """The results of looks, in a file.

    Args:
        out: the file; JSON, by look and then by what was found.

    Attributes:
        failed: the looks that failed.
    """

    def __init__(self, out: Path) -> None:
        self._out = out
        self._found: dict[str, Found] = {}
        self.failed: list[str] = []

    def look(self, what: str, find: Callable[[], Found]) -> None:
        """Do one look; an error in it is what was found."""
        print(f"{what} ...", flush=True)
        start = time.monotonic()
        try:
            found = dict(find())
        except Exception as error:
            traceback.print_exc()
            self.failed.append(what)
            found = {"FAILED": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        self._found[what] = found | {"the look took": f"{time.monotonic() - start:.1f} s"}
        for name, words in self._found[what].items():
            print(f"    {name}: {words}", flush=True)
        self._out.write_text(json.dumps(self._found, indent=1) + "\n")

    def close(self) -> int:
        """The code of the process: 1 if a look failed."""
        if self.failed:
            print("failed: " + ", ".join(self.failed))
        return bool(self.failed)


def arguments(description: str | None) -> argparse.Namespace:
    """What a part of the benchmark is told: the card, the file of its findings, how much to do."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", type=torch.device, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", action="store_true")
    return parser.parse_args()
