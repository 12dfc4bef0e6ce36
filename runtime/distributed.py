"""distributed.py: the ranks of a run: how they start, and how they exchange values.

init_distributed()                                        # under torchrun, or as a single process
means = mean_over_ranks({"turns": [2, 3, 2]})             # over all values of all ranks
barrier()                                                 # wait for all ranks
"""

import datetime
import functools
import math
import os
import warnings
from collections import defaultdict
from typing import TypeVar

import torch
import torch.distributed as dist

from runtime.processes import end_with_parent

T = TypeVar("T")
TIMEOUT = datetime.timedelta(hours=2)  # for barrier() and gather(): ranks wait there for episodes, judges, a download
NCCL_TIMEOUT = datetime.timedelta(minutes=30)  # gloo has just synchronised the ranks: a long wait means one is lost


def init_distributed() -> None:
    """Join torchrun's ranks. A lone process makes a group of one on a GPU, which FSDP2 needs, and no group on a CPU."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # printed when a single process saves a state
    cuda = torch.cuda.is_available()
    if dist.is_initialized() or not (cuda or "RANK" in os.environ):
        return
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    join = functools.partial(dist.init_process_group, backend, timeout=NCCL_TIMEOUT)

    # A lone process.
    if "RANK" not in os.environ:
        join(store=dist.HashStore(), rank=0, world_size=1)
        return

    # A rank of torchrun. It has its own session, so without this it would survive a kill -9 of torchrun.
    end_with_parent()
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        # On one node, the attempts of `torchrun --max-restarts` share a store, so each gets its own part of it.
        store, number, size = next(dist.rendezvous("env://"))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        join(store=dist.PrefixStore(f"attempt-{attempt}", store), rank=number, world_size=size)
    else:
        # Nodes count attempts differently. TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives each attempt a store (docs/node.md).
        join()


@functools.cache
def gloo() -> dist.ProcessGroup:
    """Return the group for Python objects and barriers, made once. It runs on the CPU, so no GPU waits for it."""
    return dist.new_group(backend="gloo", timeout=TIMEOUT)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def local_size() -> int:
    """Return the number of ranks on each node. It is less than world_size() only under torchrun --nnodes."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))


def local_rank() -> int:
    return rank() % local_size()


def own_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def print0(*values: object) -> None:
    if rank() == 0:
        print(*values, flush=True)


def barrier() -> None:
    """Wait for all ranks. After the timeout, rank 0's error names the missing ranks."""
    if world_size() > 1:
        dist.monitored_barrier(gloo(), TIMEOUT, wait_all_ranks=True)


def gather(value: T) -> list[T]:
    """Return the value of every rank, on every rank."""
    if world_size() == 1:
        return [value]
    values: list = [None] * world_size()
    dist.all_gather_object(values, value, group=gloo())
    return values


def sum_over_ranks(values: dict[str, float]) -> dict[str, float]:
    """Return the sum by name. Names can differ between ranks."""
    sums: dict[str, float] = defaultdict(int)
    for values_of_rank in gather(values):
        for name, value in values_of_rank.items():
            sums[name] += value
    return dict(sums)


def mean_over_ranks(values: dict[str, list[float]]) -> dict[str, float]:
    """Return the mean by name, over all values of all ranks. Names can differ between ranks."""
    pooled: dict[str, list[float]] = defaultdict(list)
    for values_of_rank in gather(values):
        for name, some in values_of_rank.items():
            pooled[name] += some
    return {name: math.fsum(pool) / len(pool) for name, pool in pooled.items() if pool}


def peak_memory() -> float:
    """Return the peak memory so far, in GiB, of the most loaded GPU; 0 without a GPU."""
    return max(gather(torch.cuda.max_memory_allocated())) / 2**30
