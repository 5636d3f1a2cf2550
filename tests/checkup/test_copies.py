"""Copies between every two memories, and what is concluded from them."""

from __future__ import annotations

import torch

from scatterpar.checkup import copies
from scatterpar.checkup.copies import DoctorVerdict, RouteResult, on_copies, routes

HOST = torch.device("cpu")
VIRTUAL = [torch.device("cpu", 0), torch.device("cpu", 1)]
CARDS = [torch.device("cuda", 0), torch.device("cuda", 1)]


def names(ways):
    return [f"{source} to {target}" for source, target in ways]


def test_two_devices_have_all_routes():
    assert names(routes([*VIRTUAL, VIRTUAL[0]])) == [
        "host to cpu:0",
        "host to cpu:1",
        "cpu:0 to host",
        "cpu:1 to host",
        "cpu:0 to cpu:1",
        "cpu:1 to cpu:0",
    ]


def test_gpu_routes_pageable_and_pinned():
    ways = names(routes(CARDS[:1]))
    assert ways[:2] == ["host to cuda:0", "pinned host to cuda:0"]
    assert ways[2:] == ["cuda:0 to host", "cuda:0 to pinned host"]


def test_one_memory_has_no_routes():
    assert routes([HOST, HOST]) == []
    (verdict,) = on_copies([])
    assert str(verdict) == "fine: there is one memory: nothing is copied."


def test_altered_bytes_counted_by_size(monkeypatch):
    """In each of three tries; the worst counts, and a copy that does nothing is seen."""
    tries = []

    def carry(tensor, source, target):
        arrived = tensor.clone()
        tries.append(int(arrived[0]))
        arrived[: len(tries) % 3] ^= 1  # one byte, two bytes, none
        return arrived, 0.5

    monkeypatch.setattr(copies, "SIZES", (1000,))
    monkeypatch.setattr(copies, "carry", carry)
    first = next(iter(copies.examine(VIRTUAL)))
    assert first.altered == {1000: 2}
    assert first.gigabytes_per_second == 1000 / 0.5 / 1e9
    assert first.fault == "2 of 1000 bytes were altered"
    assert len({*tries}) == 3  # each try sends other bytes


def test_route_is_a_line():
    result = RouteResult("cpu:0", "host", {1000: 0}, 2.5)
    assert str(result).split() == ["cpu:0", "to", "host", "2.50", "GB/s", "whole"]
    assert str(DoctorVerdict("slow", "it waits")) == "slow because: it waits"


def test_failed_copy_is_a_finding(monkeypatch):
    whole = copies.carry

    def carry(tensor, source, target):
        if source == VIRTUAL[1]:
            raise RuntimeError("peer access is not supported")
        return whole(tensor, source, target)

    monkeypatch.setattr(copies, "SIZES", (1000,))
    monkeypatch.setattr(copies, "carry", carry)
    found = list(copies.examine(VIRTUAL))
    assert [route.source for route in found if route.fault] == ["cpu:1", "cpu:1"]
    words = (
        "a copy from cpu:1 to host failed: RuntimeError: peer access is not supported"
    )
    assert {verdict.text for verdict in on_copies(found)} >= {words}


def test_advice_differs_for_host_routes():
    altered = {1000: 0, 2**20: 5}
    ways = ("host", "cuda:0"), ("cuda:0", "cuda:1")
    for verdict in on_copies([RouteResult(*way, altered, 10.0) for way in ways]):
        assert verdict.kind == "WRONG"
        assert "test the memory" in verdict.text
        assert "NCCL" not in verdict.text
