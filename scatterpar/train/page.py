"""The page at the end of a run: one HTML file that needs nothing else, for a person to look at."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import torch
from torch import Tensor

from scatterpar.train.epochs import Run
from scatterpar.train.evaluation import Evaluation, Mistake
from scatterpar.train.source import TEST, Source
from scatterpar.train.traffic import PHASES, Traffic

_MOST_CELLS = 30  # classes; a larger confusion matrix is drawn
_PAIRS = 12
_SHOWN_PIXELS = 96

_PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
.facts { display: flex; flex-wrap: wrap; gap: .8rem 2.4rem; margin: 1rem 0 }
.facts div { display: flex; flex-direction: column } .facts b { font-size: 1.6rem }
.facts span, .note { color: GrayText }
table { border-collapse: collapse; font-size: 13px } .scroll { overflow-x: auto }
td, th { padding: .2rem .55rem; text-align: right; font-variant-numeric: tabular-nums }
th { font-weight: 600 } tr th:first-child { text-align: left }
.matrix thead th { writing-mode: vertical-rl; transform: rotate(180deg); text-align: left }
.matrix td { min-width: 1.6rem; text-align: center; color: #111 }
.mistakes { display: flex; flex-wrap: wrap; gap: 1rem } figure { margin: 0; width: 6.6rem }
figure img { width: 96px; height: 96px; image-rendering: pixelated; border-radius: 4px }
figcaption { font-size: 12px; line-height: 1.3; overflow-wrap: anywhere }
.bar { display: flex; height: 1.6rem; border-radius: 4px; overflow: hidden }
.key i { display: inline-block; width: .8rem; height: .8rem; margin: 0 .4rem 0 0 }
.key span { margin-right: 1.2rem; white-space: nowrap }
img.curves { max-width: 100%; background: white; border-radius: 4px }
pre { overflow-x: auto; font-size: 12px }
</style></head><body>
<h1>$title</h1>
<p class="note">$subtitle</p>
<div class="facts">$facts</div>
<img class="curves" alt="Loss by step, test accuracy by epoch" src="$curves">
$evaluation
<h2>Time by phase</h2>
$time
<h2>Bytes between devices</h2>
$traffic
<h2>What made this run</h2>
<details><summary>Options, versions, commit</summary><pre>$provenance</pre></details>
</body></html>
""")
_COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#bbbbbb")  # Paul Tol's bright


def write_page(path: Path, run: Run, ending: str) -> None:
    """Write the page of a run, beside the files that it shows."""
    tested = run.evaluation
    text = _PAGE.substitute(
        title=escape(f"{run.options.model} on {run.feed.source.name}"),
        subtitle=escape(_subtitle(run, ending)),
        facts="".join(map(_fact, _facts(run, tested))),
        curves=_png(path.with_name("curves.png").read_bytes()),
        evaluation="" if tested is None else _evaluation(tested, run.feed.source),
        time=_time(run.metrics.records),
        traffic=_traffic(run.traffic),
        provenance=escape(_provenance(path.with_name("run.json"))),
    )
    path.write_text(text, encoding="utf-8")


def _subtitle(run: Run, ending: str) -> str:
    devices = ", ".join(str(device) for device in run.training.engine.device_ids)
    return (
        f"{ending} after {run.training.batches.epoch} of {run.options.epochs} epochs and "
        f"{run.progress.step} steps; {_batches(run)} on {devices}"
    )


def _batches(run: Run) -> str:
    batch, growth = run.training.batches.batch, run.training.growth
    grown = "" if growth is None else f"{growth.sizes[0]:,} to "
    return f"batches of {grown}{batch:,} images"


def _facts(run: Run, tested: Evaluation | None) -> Iterable[tuple[str, str]]:
    if tested is not None:
        yield f"{tested.top1:.2%}", f"test accuracy, {tested.images:,} images"
        if len(tested.confusion) > 5:
            yield f"{tested.top5:.2%}", "right class among the best five"
        yield f"{tested.loss:.4f}", "test loss"
    epochs = [r for r in run.metrics.records if r["kind"] == "epoch" and r["seconds"]]
    seconds = sum(r["seconds"] for r in epochs)
    if seconds:
        images = sum(r["images_per_second"] * r["seconds"] for r in epochs)
        yield f"{images / seconds:,.0f}", "images per second, training"
        yield (
            f"{sum(r['seconds_waited'] for r in epochs) / seconds:.1%}",
            "of that time waiting for images",
        )
    if run.feed.broken:
        yield f"{len(run.feed.broken):,}", "broken files left out"


def _fact(fact: tuple[str, str]) -> str:
    return f"<div><b>{escape(fact[0])}</b><span>{escape(fact[1])}</span></div>"


def _evaluation(tested: Evaluation, source: Source) -> str:
    names, confusion = source.class_names, tested.confusion
    matrix = _table(confusion, names) if len(names) <= _MOST_CELLS else _drawing(confusion)
    parts = [
        "<h2>What was taken for what</h2>",
        "<p class='note'>Rows: the true class. Columns: the one with the highest score.</p>",
        f"<div class='scroll'>{matrix}</div>",
        f"<p>Most often mistaken: {escape(_pairs(confusion, names))}.</p>" if tested.worst else "",
        "<h2>Worst mistakes</h2>",
        "<p class='note'>The test images with the highest loss.</p>",
        f"<div class='mistakes'>{''.join(_mistakes(tested.worst, source))}</div>",
    ]
    return "\n".join(parts)


def _table(confusion: Tensor, names: Sequence[str]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    rows = []
    for label, counts in enumerate(confusion.tolist()):
        total = max(1, sum(counts))
        cells = "".join(
            f"<td style='background:{_shade(count / total, column == label)}'>{count or ''}</td>"
            for column, count in enumerate(counts)
        )
        share = f"{counts[label] / total:.1%}" if sum(counts) else "no images"
        rows.append(
            f"<tr><th>{escape(names[label])}</th>{cells}<td style='color:inherit'>{share}</td></tr>"
        )
    return (
        f"<table class='matrix'><thead><tr><th></th>{head}<th>right</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def _shade(share: float, right: bool) -> str:
    hue, light = (145 if right else 10), 97 - 45 * share**0.5
    return f"hsl({hue} 60% {light:.0f}%)"


def _drawing(confusion: Tensor) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 7))
    axes = figure.subplots()
    shares = confusion / confusion.sum(1, keepdim=True).clamp_min(1)
    axes.imshow(shares.sqrt().numpy(), cmap="magma", interpolation="nearest")
    axes.set(xlabel="class with the highest score", ylabel="true class")
    figure.tight_layout()
    file = io.BytesIO()
    figure.savefig(file, dpi=110)
    return f"<img alt='Confusion matrix' src='{_png(file.getvalue())}'>"


def _pairs(confusion: Tensor, names: Sequence[str]) -> str:
    wrong = confusion.clone().fill_diagonal_(0).flatten()
    counts, places = wrong.topk(min(_PAIRS, len(wrong)))
    return "; ".join(
        f"{names[place // len(names)]} as {names[place % len(names)]} ({count:,})"
        for count, place in zip(counts.tolist(), places.tolist(), strict=True)
        if count
    )


def _mistakes(worst: Sequence[Mistake], source: Source) -> Iterable[str]:
    names = source.class_names
    for mistake in worst:
        found = source.read(TEST, torch.tensor([mistake.row]), 0)
        label, taken_for = (escape(names[i]) for i in (mistake.label, mistake.predicted))
        if len(found.images):
            yield (
                f"<figure><img alt='' src='{_picture(found.images[0])}'><figcaption>"
                f"<b>{label}</b> taken for {taken_for}<br>loss {mistake.loss:.2f}"
                "</figcaption></figure>"
            )


def _picture(pixels: Tensor) -> str:
    from PIL import Image

    image = Image.fromarray(pixels.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy())
    if min(image.size) > 2 * _SHOWN_PIXELS:
        image = image.resize((2 * _SHOWN_PIXELS, 2 * _SHOWN_PIXELS))
    file = io.BytesIO()
    image.save(file, "PNG")
    return _png(file.getvalue())


def _png(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def _time(records: Sequence[dict[str, Any]]) -> str:
    """Draw where the time of finished epochs went, tests apart."""
    epochs = [r for r in records if r["kind"] == "epoch"]
    last = max((r["step"] for r in epochs), default=0)
    steps = [r for r in records if r["kind"] == "step" and r["step"] <= last]
    total = sum(r["seconds"] for r in epochs)
    parts = {phase: sum(r["seconds"][phase] for r in steps) for phase in PHASES}
    parts["waiting for images"] = sum(r["seconds_waited"] for r in epochs)
    parts["optimizer and the rest"] = max(0.0, total - sum(parts.values()))
    whole = sum(parts.values())
    if not whole:
        return "<p class='note'>No epoch was finished.</p>"
    bar = "".join(
        f"<div style='width:{100 * seconds / whole:.2f}%;background:{colour}'></div>"
        for seconds, colour in zip(parts.values(), _COLOURS, strict=True)
    )
    key = "".join(
        f"<span><i style='background:{colour}'></i>{name} {seconds:.1f} s "
        f"({seconds / whole:.1%})</span> "
        for (name, seconds), colour in zip(parts.items(), _COLOURS, strict=True)
    )
    return f"<div class='bar'>{bar}</div><p class='key'>{key}</p>"


def _traffic(traffic: Traffic) -> str:
    if not traffic.steps:
        return "<p class='note'>No step was made.</p>"
    return f"<pre>{escape(str(traffic))}</pre>"


def _provenance(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else json.dumps(None)
