"""The page at the end of a run: one HTML file, which contains its images."""

from __future__ import annotations

import base64
import io
import json
from collections import Counter
from collections.abc import Iterator
from html import escape
from pathlib import Path
from string import Template

import torch
from torch import Tensor

from scatterpar.train.checkpoint import BEST_FILE
from scatterpar.train.data import TEST, Source
from scatterpar.train.records import Records, best_epoch, of_kind
from scatterpar.train.training import Evaluation

_DARK = 0.35  # from this share of a true class on, digits in its field are white
_MAX_LABELLED = 30  # classes; a larger confusion matrix has colours only

_PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>$title</title>
<style>
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
.facts, .mistakes { display: flex; flex-wrap: wrap; gap: 1rem 2rem }
.facts div { display: flex; flex-direction: column } .facts b { font-size: 1.6rem }
figure { margin: 0; width: 6.6rem; font-size: 12px } figure img { width: 96px }
img { max-width: 100%; background: white } pre { overflow-x: auto; font-size: 12px }
</style></head><body>
<h1>$title</h1> <p>$subtitle</p> <div class="facts">$facts</div>
<img alt="Loss by step, test accuracy by epoch" src="$curves">
$evaluation
<h2>Training time by phase</h2> $time
<p>$traffic</p>
<h2>What made this run</h2>
<details><summary>Options, versions, commit</summary><pre>$starts</pre></details>
</body></html>
""")


def write_page(
    path: Path, texts: dict[str, str], tested: Evaluation | None, source: Source, records: Records
) -> None:
    """Write the page. `texts` has the title, the subtitle and the traffic; curves.png exists."""
    steps, epochs = of_kind("step", records), of_kind("epoch", records)
    text = _PAGE.substitute(
        {name: escape(words) for name, words in texts.items()},
        facts="".join(_facts(tested, steps, epochs)),
        curves=_embedded(path.with_name("curves.png").read_bytes()),
        evaluation="" if tested is None else _evaluation(tested, source),
        time=_time(steps),
        starts=escape(json.dumps(of_kind("run", records), indent=2)),
    )
    path.write_text(text, encoding="utf-8")


def _facts(tested: Evaluation | None, steps: Records, epochs: Records) -> Iterator[str]:
    fact = "<div><b>{}</b><span>{}</span></div>".format
    if best := best_epoch(epochs):
        where = f"best test accuracy, epoch {best['epoch']}, in {BEST_FILE}"
        yield fact(f"{best['test_accuracy']:.2%}", where)
    if tested is not None:
        yield fact(f"{tested.top1:.2%}", f"last test accuracy, {tested.images:,} images")
        if len(tested.confusion) > 5:
            yield fact(f"{tested.top5:.2%}", "Top-5 accuracy")
        yield fact(f"{tested.loss:.4f}", "test loss")
    if seconds := sum(r["seconds_whole"] for r in steps):
        images = sum(r["images"] for r in steps)
        yield fact(f"{images / seconds:,.0f}", "images per second, training")
    if epochs and epochs[-1]["left_out"]:
        yield fact(f"{epochs[-1]['left_out']:,}", "times broken files left out")


def _evaluation(tested: Evaluation, source: Source) -> str:
    names, wrong = source.class_names, tested.confusion.clone().fill_diagonal_(0).flatten()
    counts, places = wrong.topk(min(12, len(wrong)))
    pairs = "; ".join(
        f"{names[place // len(names)]} as {names[place % len(names)]} ({count:,})"
        for count, place in zip(counts.tolist(), places.tolist(), strict=True)
        if count
    )
    return f"""<h2>Confusion matrix</h2>
<img alt="Confusion matrix" src="{_matrix(tested.confusion, names)}">
<p>Most frequent errors: {escape(pairs) or "none"}.</p>
<h2>Worst errors</h2> <p>The misclassified test images with the highest loss.</p>
<div class="mistakes">{"".join(_mistakes(tested, source))}</div>"""


def _matrix(confusion: Tensor, names: tuple[str, ...]) -> str:
    from matplotlib.figure import Figure

    figure, file = Figure(figsize=(8, 7), layout="constrained"), io.BytesIO()
    axes, shares = figure.subplots(), confusion / confusion.sum(1, keepdim=True).clamp_min(1)
    axes.imshow(shares.sqrt().numpy(), cmap="Blues", interpolation="nearest", vmin=0, vmax=1.2)
    axes.set(title="Confusion matrix", xlabel="Predicted class", ylabel="True class")
    if len(names) <= _MAX_LABELLED:
        axes.set_xticks(range(len(names)), names, rotation=90)
        axes.set_yticks(range(len(names)), names)
        for row, column in confusion.nonzero().tolist():
            text = f"{int(confusion[row, column])}"
            color = "white" if shares[row, column] > _DARK else "black"
            axes.text(column, row, text, ha="center", va="center", fontsize=8, color=color)
    figure.savefig(file, dpi=110)
    return _embedded(file.getvalue())


def _mistakes(tested: Evaluation, source: Source) -> Iterator[str]:
    from PIL import Image

    for mistake in tested.worst:
        label, taken_for = (escape(source.class_names[i]) for i in mistake[2:])
        for pixels in source.read(TEST, torch.tensor([mistake.row]), 0).images:
            file = io.BytesIO()
            picture = pixels.expand(3, -1, -1).permute(1, 2, 0).contiguous()
            Image.fromarray(picture.numpy()).save(file, "PNG")
            yield (
                f"<figure><img alt='' src='{_embedded(file.getvalue())}'><figcaption>"
                f"<b>{label}</b>, predicted {taken_for}<br>loss {mistake.loss:.2f}"
                "</figcaption></figure>"
            )


def _embedded(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def _time(steps: Records) -> str:
    """The training time by phase, over all sessions."""
    parts, whole = Counter[str](), sum(r["seconds_whole"] for r in steps)
    for step in steps:
        parts.update(step["seconds"])
    parts["waiting for images"] = sum(r["seconds_waited"] for r in steps)
    parts["optimizer and the rest"] = max(0.0, whole - parts.total())
    return "".join(
        f"<div><meter value='{seconds / whole:.3f}'></meter> {name} {seconds:.1f} s "
        f"({seconds / whole:.1%})</div>"
        for name, seconds in parts.items()
        if whole
    )
