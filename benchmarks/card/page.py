"""The page of a run: what went how, and the tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.card.parts import Outcome

_LOOP = "plain loop"


def write_page(
    folder: Path, facts: Mapping[str, str], outcomes: Sequence[Outcome], small: bool
) -> None:
    """Write ``README.md``, anew after every part."""
    parts = ["# Figures from this machine", "`python -m benchmarks card`"]
    if small:
        parts.append("**Tiny sizes, to try it out: the times mean nothing.**")
    parts.append("\n".join(f"- {name}: {words}" for name, words in facts.items()))
    rows = [
        [f"[{one.part.title}]({one.part.name}.txt)", one.words.replace("|", "\\|")]
        for one in outcomes
    ]
    parts.append(table(["part", "how it went"], rows))
    for outcome in outcomes:
        found = folder / f"{outcome.part.name}.json"
        if outcome.part.name in ("resnet50", "gpt2") and found.exists():
            parts += [f"## {outcome.part.title}", steps_section(json.loads(found.read_text()))]
        elif outcome.part.name in ("inside", "launching") and found.exists():
            parts += [f"## {outcome.part.title}", looks_section(json.loads(found.read_text()))]
    (folder / "README.md").write_text("\n\n".join(parts) + "\n")


def steps_section(found: Mapping[str, Any]) -> str:
    """Step times beside the engine's, host time and memory."""
    words = [
        f"{found['network']}, {found['precision']}. {found['substeps']} sub-steps of "
        f"{found['rows']} rows on each of {', '.join(found['devices'])}. Medians of the rounds; "
        f"all take part in each. The plain loop runs on one device, over the "
        f"{found['rows of the loop']} rows that are its part of the batch. *Host* is the time of a "
        f"sub-step of two tiny rows on every replica: launching alone. *Apart*: how far the "
        f"gradient lies from that of one device, relative to its norm."
    ]
    taken = {name: one for name, one in found["contenders"].items() if one["full"]}
    rows = [[name, *_figures(one, taken, found["substeps"])] for name, one in taken.items()]
    columns = ["who", "step, ms", "the engine's over it", "host, ms", "most memory, MiB", "apart"]
    words.append(table(columns, rows))
    words += [f"- {name}: no part: {why}" for name, why in found["absent"].items()]
    return "\n\n".join(words[:2]) + "\n\n" + "\n".join(words[2:])


def looks_section(found: Mapping[str, Mapping[str, object]]) -> str:
    """What each look found."""
    rows = [
        ["" if number else look, what, str(words).replace("|", "\\|")]
        for look, each in found.items()
        for number, (what, words) in enumerate(each.items())
    ]
    return table(["look", "what", "found"], rows)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown."""
    rule = ["---", *["---:"] * (len(columns) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [columns, rule, *rows])


def _figures(one: Mapping[str, Any], taken: Mapping[str, Any], substeps: int) -> list[str]:
    engine = taken.get("engine", {}).get("full", [])
    ratios = [mine / others for mine, others in zip(engine, one["full"], strict=False)]
    apart = one["apart"]
    memory = [f"{held / 2**20:.0f}" for held in one.get("peaks", {}).values()]
    return [
        f"{1e3 * median(one['full']):.1f}",
        f"{median(ratios):.3f}" if ratios else "",
        f"{1e3 * median(one['tiny']) / substeps:.2f}" if one["tiny"] else "",
        " ".join(memory) or "not counted",
        "" if apart is None else f"{apart:.0e}",
    ]
