"""The page at the end of a run: one HTML file that needs nothing else, for a person to look at."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import torch
from torch import Tensor

from scatterpar.train.data import TEST, Source
from scatterpar.train.evaluation import Evaluation
from scatterpar.train.records import Records
from scatterpar.train.traffic import PHASES, Traffic

_MOST_NUMBERS = 30  # classes; the cells of a larger confusion matrix have colours alone
_PAIRS = 12
_SHOWN_PIXELS = 96
_COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#bbbbbb")  # Paul Tol's bright

_PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>$title</title>
<style>
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem } .note { color: GrayText }
.facts { display: flex; flex-wrap: wrap; gap: .8rem 2.4rem; margin: 1rem 0 }
.facts div { display: flex; flex-direction: column } .facts b { font-size: 1.6rem }
.mistakes { display: flex; flex-wrap: wrap; gap: 1rem } figure { margin: 0; width: 6.6rem }
figure img { width: 96px; height: 96px; image-rendering: pixelated; border-radius: 4px }
figcaption { font-size: 12px; line-height: 1.3; overflow-wrap: anywhere }
.bar { display: flex; height: 1.6rem; border-radius: 4px; overflow: hidden }
.key i { display: inline-block; width: .8rem; height: .8rem; margin: 0 .4rem 0 0 }
.key span { margin-right: 1.2rem; white-space: nowrap }
img.drawn { max-width: 100%; background: white; border-radius: 4px }
pre { overflow-x: auto; font-size: 12px }
</style></head><body>
<h1>$title</h1> <p class="note">$subtitle</p> <div class="facts">$facts</div>
<img class="drawn" alt="Loss by step, test accuracy by epoch" src="$curves">
$evaluation
<h2>Time by phase</h2> $time
<h2>Bytes between devices</h2> <pre>$traffic</pre>
<h2>What made this run</h2>
<details><summary>Options, versions, commit</summary><pre>$provenance</pre></details>
</body></html>
""")


def write_page(
    path: Path,
    title: str,
    subtitle: str,
    tested: Evaluation | None,
    source: Source,
    records: Records,
    traffic: Traffic,
    left_out: int,
) -> None:
    """Write the page of a run, beside the files that it shows."""
    facts = _facts(tested, records, left_out)
    text = _PAGE.substitute(
        title=escape(title),
        subtitle=escape(subtitle),
        facts="".join(f"<div><b>{escape(a)}</b><span>{escape(b)}</span></div>" for a, b in facts),
        curves=_png(path.with_name("curves.png").read_bytes()),
        evaluation="" if tested is None else _evaluation(tested, source),
        time=_time(records),
        traffic=escape(str(traffic)) if traffic.steps else "No whole step was counted.",
        provenance=escape(path.with_name("run.json").read_text(encoding="utf-8")),
    )
    path.write_text(text, encoding="utf-8")


def _facts(tested: Evaluation | None, records: Records, left_out: int) -> Iterable[tuple[str, str]]:
    if tested is not None:
        yield f"{tested.top1:.2%}", f"test accuracy, {tested.images:,} images"
        if len(tested.confusion) > 5:
            yield f"{tested.top5:.2%}", "right class among the best five"
        yield f"{tested.loss:.4f}", "test loss"
    epochs = [r for r in records if r["kind"] == "epoch" and r["seconds"]]
    if seconds := sum(r["seconds"] for r in epochs):
        images = sum(r["images_per_second"] * r["seconds"] for r in epochs)
        waited = sum(r["seconds_waited"] for r in epochs)
        yield f"{images / seconds:,.0f}", "images per second, training"
        yield f"{waited / seconds:.1%}", "of that time waiting for images"
    if left_out:
        yield f"{left_out:,}", "broken files left out"


def _evaluation(tested: Evaluation, source: Source) -> str:
    names, confusion = source.class_names, tested.confusion
    wrong = confusion.clone().fill_diagonal_(0).flatten()
    counts, places = wrong.topk(min(_PAIRS, len(wrong)))
    pairs = "; ".join(
        f"{names[place // len(names)]} as {names[place % len(names)]} ({count:,})"
        for count, place in zip(counts.tolist(), places.tolist(), strict=True)
        if count
    )
    return f"""<h2>What was taken for what</h2>
<img class="drawn" alt="Confusion matrix" src="{_drawing(confusion, names)}">
<p>Most often mistaken: {escape(pairs) or "nothing"}.</p>
<h2>Worst mistakes</h2> <p class="note">The test images with the highest loss.</p>
<div class="mistakes">{"".join(_mistakes(tested, source))}</div>"""


def _drawing(confusion: Tensor, names: Sequence[str]) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 7), layout="constrained")
    axes, shares = figure.subplots(), confusion / confusion.sum(1, keepdim=True).clamp_min(1)
    axes.imshow(shares.sqrt().numpy(), cmap="Blues", interpolation="nearest", vmin=0, vmax=1.2)
    axes.set(xlabel="class with the highest score", ylabel="true class")
    if len(names) <= _MOST_NUMBERS:
        axes.set_xticks(range(len(names)), names, rotation=90)
        axes.set_yticks(range(len(names)), names)
        for row, column in confusion.nonzero().tolist():
            text = f"{int(confusion[row, column])}"
            axes.text(column, row, text, ha="center", va="center", fontsize=8)
    return _saved(figure.savefig, dpi=110)


def _mistakes(tested: Evaluation, source: Source) -> Iterable[str]:
    from PIL import Image

    for mistake in tested.worst:
        found = source.read(TEST, torch.tensor([mistake.row]), 0)
        label, taken_for = (escape(source.class_names[i]) for i in mistake[2:])
        for pixels in found.images:
            image = Image.fromarray(pixels.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy())
            image.thumbnail((2 * _SHOWN_PIXELS, 2 * _SHOWN_PIXELS))
            yield (
                f"<figure><img alt='' src='{_saved(image.save, format='PNG')}'><figcaption>"
                f"<b>{label}</b> taken for {taken_for}<br>loss {mistake.loss:.2f}"
                "</figcaption></figure>"
            )


def _saved(save: Any, **how: Any) -> str:
    file = io.BytesIO()
    save(file, **how)
    return _png(file.getvalue())


def _png(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def _time(records: Records) -> str:
    """Draw where the time of finished epochs went, tests apart."""
    epochs = [r for r in records if r["kind"] == "epoch"]
    last = max((r["step"] for r in epochs), default=0)
    steps = [r for r in records if r["kind"] == "step" and r["step"] <= last]
    parts = {phase: sum(r["seconds"][phase] for r in steps) for phase in PHASES}
    parts["waiting for images"] = sum(r["seconds_waited"] for r in epochs)
    rest = sum(r["seconds"] for r in epochs) - sum(parts.values())
    parts["optimizer and the rest"] = max(0.0, rest)
    whole = sum(parts.values())
    if not whole:
        return "<p class='note'>No epoch was finished.</p>"
    bar = key = ""
    for (name, seconds), colour in zip(parts.items(), _COLOURS, strict=True):
        share = seconds / whole
        bar += f"<div style='width:{share:.2%};background:{colour}'></div>"
        key += (
            f"<span><i style='background:{colour}'></i>{name} {seconds:.1f} s ({share:.1%})</span> "
        )
    return f"<div class='bar'>{bar}</div><p class='key'>{key}</p>"
