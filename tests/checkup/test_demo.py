"""The demo's gradients are what it says, and its page has its own figures."""

from __future__ import annotations

import pytest
import torch

from scatterpar.__main__ import main
from scatterpar.checkup import demo

pytestmark = pytest.mark.slow  # the demo itself takes seconds


@pytest.fixture(scope="module")
def findings():
    with torch.random.fork_rng():
        return demo.compare_three_ways()


@pytest.mark.draws
def test_hand_loop_wrong_counted_step_right(
    findings,
):
    size = 4 * sum(p.numel() for p in demo.LanguageModel().parameters())
    assert 0.2 < findings.by_hand < 0.6
    assert "count_labels" in findings.refusal
    assert findings.counted < 1e-5
    assert findings.report.bytes["replicate"] == size
    assert findings.report.bytes["reduce"] == size


@pytest.mark.draws
def test_hand_loop_error_is_mean_of_means(
    findings,
):
    """The mean of means, computed from the labels' own losses in float64."""
    torch.manual_seed(0)
    model = demo.LanguageModel().double()
    words, labels = demo.make_batch()
    counted = labels != demo.PADDING
    losses = torch.nn.functional.cross_entropy(
        model(words).flatten(0, 1), labels.flatten(), reduction="none"
    ).view_as(labels)
    rows = demo.TEXTS // demo.SUB_STEPS
    numbers = counted.sum(1).view(-1, rows).sum(1)
    weights = 1 / (numbers * demo.SUB_STEPS).repeat_interleave(rows)[:, None]

    (losses * weights).sum().backward()
    by_hand = demo.take_gradient(model)
    demo.criterion(model(words), labels).backward()
    reference = demo.take_gradient(model)

    expected = demo.relative_error(by_hand, reference)
    assert findings.by_hand == pytest.approx(expected, rel=1e-3)


def test_command_prints_the_page(capsys, findings, monkeypatch):
    monkeypatch.setattr(demo, "compare_three_ways", lambda: findings)
    assert main(["demo"]) == 0
    page = capsys.readouterr().out
    assert f"off by {findings.by_hand:.0%}" in page
    assert "count=count_labels()" in page
