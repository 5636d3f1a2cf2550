"""torch's fused optimizers raise no version, and are seen all the same."""

from __future__ import annotations

import gc

import pytest
import torch
from harness.oracle import assert_close, build, randint
from torch import nn, optim

from scatterpar import ScatterOnceParallel
from scatterpar.replicas import fused_writes

APART = ["cpu:0", "cpu:1"]
FUSED = [optim.Adam, optim.AdamW, optim.SGD, optim.Adagrad]
WORDS = 9000  # 281 KiB: large, so that only a sample is read if versions say nothing


class Words(nn.Module):
    """An embedding of which each step writes a few rows."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 2)

    def forward(self, words):
        return self.head(self.embed(words).mean(1))


def trained(device_ids, kind, between=lambda *_: None, steps=7):
    """The losses of some steps with a warmup, the weights, and bytes that were sent."""
    model = build(Words).float()
    optimizer = kind(model.parameters(), lr=0.1, fused=True)
    losses, sent = [], []
    engine = ScatterOnceParallel(model, 1, device_ids) if device_ids else None
    for number in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * number  # nothing is written in the first step
        optimizer.zero_grad()
        words, labels = randint(WORDS, 8, 3, seed=number), randint(2, 8, seed=number)
        if engine:
            loss = engine.forward_backward(words, labels, nn.CrossEntropyLoss())
            sent.append(engine.last_step.bytes["replicate"])
        else:
            loss = nn.functional.cross_entropy(model(words), labels)
            loss.backward()
        losses.append(loss.detach())
        between(number, optimizer)
        optimizer.step()
    if engine:
        engine.close()
    return torch.stack(losses), model, sent


@pytest.mark.parametrize("kind", FUSED)
def test_rows_of_a_large_embedding_arrive(kind):
    losses, model, sent = trained(APART, kind)
    expected, plain, _ = trained(None, kind)
    assert_close(losses, expected, "losses", relative=1e-5)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(one.detach(), other.detach(), "weights", relative=1e-4)
    # each tensor once per step
    assert all(bytes_of_step >= model.embed.weight.nbytes for bytes_of_step in sent)


@pytest.mark.parametrize("kind", FUSED)
def test_version_raised_if_it_was_written(kind):
    model = build(lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))).float()
    other = build(lambda: nn.Linear(3, 4)).float()
    parameters = [*model.parameters(), *other.parameters()]
    model[0].bias.requires_grad_(False)
    with ScatterOnceParallel(model, 1, APART) as engine:
        optimizer = kind(parameters, lr=0.1, fused=True)
        engine.forward_backward(torch.ones(4, 3), None, lambda output, _: output.mean())
        other.weight.grad = torch.ones(4, 3)
        before = [parameter._version for parameter in parameters]
        optimizer.step()
        after = [parameter._version for parameter in parameters]
    raised = [one != two for one, two in zip(before, after, strict=True)]
    # no gradient: the frozen bias; in no engine: the others
    assert raised == [True, False, True, True, False, False]


def test_hook_acts_only_while_copies_live():
    gc.collect()
    earlier = len(fused_writes._copied_parameters)
    for device_ids, are_copied in ((["cpu"] * 2, False), (APART, True)):
        model = build(lambda: nn.Linear(3, 2)).float()
        engine = ScatterOnceParallel(model, 1, device_ids)
        engine.forward_backward(torch.ones(4, 3), None, lambda output, _: output.mean())
        assert (len(fused_writes._copied_parameters) > earlier) == are_copied
        engine.close()
        del engine
        gc.collect()
        assert len(fused_writes._copied_parameters) == earlier
        optimizer = optim.AdamW(model.parameters(), fused=True)
        version = model.weight._version
        optimizer.step()
        assert model.weight._version == version


def test_parameters_are_not_read_in_later_steps(monkeypatch):
    """Their versions tell, so that no fingerprint of them is computed."""
    from scatterpar.replicas import broadcast

    numbers = []
    compute = broadcast.Fingerprints
    monkeypatch.setattr(
        broadcast,
        "Fingerprints",
        lambda words, device: numbers.append(len(words)) or compute(words, device),
    )
    trained(APART, optim.AdamW, steps=4)
    assert not numbers
