"""Copies that arrive corrupted: around the host from then on, or an error."""

from __future__ import annotations

import pytest
import torch

from scatterpar.devices import links, transfers
from scatterpar.devices.copies import VIA_HOST
from scatterpar.devices.links import check_links

pytestmark = pytest.mark.core
PAIR = torch.device("cpu:0"), torch.device("cpu:1")
LINK = torch.device("cpu"), torch.device("cpu")


@pytest.fixture
def corrupting(monkeypatch):
    """Direct copies change their first byte; ``also`` those through the host."""
    state = {"also": False}
    write = transfers.write

    def corrupt(target, source, **options):
        write(target, source, **options)
        if state["also"] or LINK not in VIA_HOST:
            target.view(-1)[0] ^= 1

    monkeypatch.setattr(transfers, "write", corrupt)
    yield state
    VIA_HOST.clear()


def test_intact_links_stay_direct(recwarn):
    check_links(PAIR)
    assert not VIA_HOST
    assert not recwarn.list


def test_one_device_has_no_link(corrupting):
    check_links((PAIR[0],) * 3)
    assert not VIA_HOST


def test_corrupting_link_goes_through_host(corrupting):
    words = "from cpu:0 to cpu:1 arrived corrupted: .* go through host memory"
    with pytest.warns(UserWarning, match=words):
        links._check_link(*PAIR)
    assert {LINK} == VIA_HOST


def test_corrupting_host_refused(corrupting):
    corrupting["also"] = True
    with pytest.raises(RuntimeError, match="also through the host's memory; do not"):
        check_links(PAIR)
    assert not VIA_HOST
