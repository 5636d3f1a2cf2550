"""Random programs, right and wrong: how many are told, and how many should not have been."""

from collections import Counter

import torch
import torch.distributed as dist

from benchmarks.tables import Table
from benchmarks.verify_fuzz.programs import judge

SEEDS = 2400


def test_verify_fuzz(benchmark, publish, quick):
    found = benchmark.pedantic(run, args=(20 if quick else SEEDS,), rounds=1)
    said = {
        kind: Counter(each["said"] for each in found if each["right"] == (kind == "right"))
        for kind in ("right", "wrong")
    }
    columns = ["programs", "number", "refused", "warned", "not checked, said so", "not a word"]
    rows = [
        [kind, str(sum(counts.values()))]
        + [str(counts[word]) for word in ("refused", "warned", "not checked", "")]
        for kind, counts in said.items()
    ]
    publish("told", Table(columns, rows), {"said": said})
    assert not said["right"]["refused"] + said["right"]["warned"]
    assert said["wrong"][""] <= 0.03 * sum(said["wrong"].values())


def run(seeds):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        judged = [judge(seed, dist.group.WORLD) for seed in range(seeds)]
    finally:
        torch.set_num_threads(threads)
        dist.destroy_process_group()
    return [each for each in judged if each is not None and "failed" not in each]
