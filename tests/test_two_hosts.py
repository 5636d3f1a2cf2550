"""Two hosts: network namespaces joined by a wire, torchrun on both, the tool end to end."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from helpers.torchrun import finish, launched, steps

from scatterpar.train.run import main

pytestmark = [pytest.mark.draws, pytest.mark.slow]
TOOL = [
    *("--model", "helpers.torchrun:Small", "--batch", "1000", "--epochs", "1"),
    *("--devices", "cpu:0,cpu:1", "--accum", "2"),
]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=120)


@pytest.fixture
def hosts() -> Iterator[list[tuple[list[str], str, str]]]:
    """For each of two hosts: how to run there, its address, and its network interface."""
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip (iproute2) to make network namespaces")
    names = [f"scatterpar-{os.getpid()}-{i}" for i in range(2)]
    wires = [f"sp{os.getpid() % 10**7}-{i}" for i in range(2)]
    with contextlib.ExitStack() as stack:
        try:
            for name in names:
                ip("netns", "add", name)
                stack.callback(ip, "netns", "del", name)
            ip("link", "add", wires[0], "type", "veth", "peer", "name", wires[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
        found = []
        for i, (name, wire) in enumerate(zip(names, wires, strict=True)):
            address = f"10.213.77.{i + 1}"
            ip("link", "set", wire, "netns", name)
            ip("-n", name, "address", "add", f"{address}/24", "dev", wire)
            ip("-n", name, "link", "set", wire, "up")
            ip("-n", name, "link", "set", "lo", "up")
            found.append((["ip", "netns", "exec", name], address, wire))
        yield found


def test_the_tool_trains_on_two_hosts_as_on_one(hosts, tmp_path, capsys):
    logs = [tmp_path / f"{i}.log" for i in range(2)]
    outs = [tmp_path / f"out-{i}" for i in range(2)]
    rendezvous = hosts[0][1]
    with contextlib.ExitStack() as stack:
        processes = []
        for i, (prefix, address, wire) in enumerate(hosts):
            launcher = [
                *("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=two-hosts"),
                *(f"--rdzv-endpoint={rendezvous}:29411", f"--rdzv-conf=is_host={int(i == 0)}"),
                f"--local-addr={address}",
            ]
            tool = [*TOOL, "--out", str(outs[i])]
            prefix = [*prefix, "env", f"GLOO_SOCKET_IFNAME={wire}"]
            processes.append(stack.enter_context(launched(launcher, tool, logs[i], prefix)))
        printed = [finish(process, log) for process, log in zip(processes, logs, strict=True)]

    told = [text for text in printed if "finished after" in text]
    assert len(told) == 1, "one of the two prints"
    for words in (
        "2 machines; the first one's part of a batch of 1,000:",
        "finished after 1 of 1 epochs, 9 steps",
    ):
        assert words in told[0]
    written = [out for out in outs if out.exists()]
    assert len(written) == 1, "one of the two writes"
    names = sorted(path.name for path in written[0].iterdir())
    assert names == ["best.pt", "checkpoint.pt", "curves.png", "metrics.jsonl", "report.html"]
    images = [record["images"] for record in steps(written[0])]
    assert images == [*[1000] * 8, 192]

    assert main([*TOOL, "--devices", "cpu", "--out", str(tmp_path / "alone")]) == 0
    capsys.readouterr()
    together, alone = ([r["loss"] for r in steps(out)] for out in (written[0], tmp_path / "alone"))
    assert together[0] == pytest.approx(alone[0], rel=0.2)  # other masks, and statistics of parts
