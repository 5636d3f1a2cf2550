"""One process of the published example under DistributedDataParallel: prints the weights.

python -m helpers.ddp_accumulation RANK STORE_FILE
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main(rank: int, store: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, 2),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=300),
    )
    model = nn.Linear(8, 1, bias=False)
    nn.init.ones_(model.weight)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    torch.manual_seed(0)
    half = torch.rand(8, 8).chunk(2)[rank]
    for _ in range(2):
        optimizer.zero_grad()
        parallel(half).sum().backward()
        optimizer.step()
    print(" ".join(f"{value:.4f}" for value in model.weight[0].tolist()), flush=True)
    dist.destroy_process_group()
    # The group ends with `parallel`: now and then that waits for ever for a thread of gloo's,
    # which waits for the interpreter; and one that is there at its end aborts it.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
