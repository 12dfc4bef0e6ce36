"""distributed.py: what the ranks of a run do together: start, exchange values, save and resume.

    init_distributed()                                        # under torchrun, or as a single process
    means = mean_over_ranks({"turns": [2, 3, 2]})             # over all values of all ranks
    save_state(run / "state", policy, optimizer, step)        # everything that training needs to resume
    step = load_state(run / "state", policy, optimizer)       # 0 at the start of a run

*Training state* is fp32 shards of weights and AdamW moments in torch's distributed checkpoint format. Any number of ranks
can resume it. Its metadata is a pickle, so read it only from the run's own folder. A state is written under a temporary name
and renamed when it is complete. A kill at any moment, or a full disk, therefore loses nothing that was complete before.

Deliberately missing: saving on SIGTERM (torchrun kills after 30 s, an 8B state takes longer), asynchronous saving.
"""

import datetime
import functools
import math
import os
import shutil
import warnings
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import DTensor

from runtime.cleanup import end_with_parent
from runtime.config import ConfigError

# ------------------------------------------------------------------------------------------------ ranks

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
    group = {}
    if "RANK" not in os.environ:
        group = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    else:
        end_with_parent()  # torchrun's ranks have their own sessions, so they would survive a kill -9 of torchrun
        # The attempts of `torchrun --max-restarts` share a store, so each gets its own part of it. Nodes count attempts
        # differently: on several, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives each attempt a store (docs/node.md).
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
            store, number, size = next(dist.rendezvous("env://"))
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            group = {"store": dist.PrefixStore(f"attempt-{attempt}", store), "rank": number, "world_size": size}
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=NCCL_TIMEOUT, **group)


@functools.cache
def _gloo() -> dist.ProcessGroup:
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


def print0(*values: Any) -> None:
    if rank() == 0:
        print(*values, flush=True)


def barrier() -> None:
    """Wait for all ranks. After the timeout, rank 0's error names the missing ranks."""
    if world_size() > 1:
        dist.monitored_barrier(_gloo(), TIMEOUT, wait_all_ranks=True)


def gather(value: Any) -> list[Any]:
    """Return the value of every rank, on every rank."""
    if world_size() == 1:
        return [value]
    values = [None] * world_size()
    dist.all_gather_object(values, value, group=_gloo())
    return values


def sum_over_ranks(values: dict[str, float]) -> dict[str, float]:
    """Return the sum by name. Names can differ between ranks."""
    sums = Counter()
    for values_of_rank in gather(values):
        sums.update(values_of_rank)
    return dict(sums)


def mean_over_ranks(values: dict[str, list[float]]) -> dict[str, float]:
    """Return the mean by name, over all values of all ranks. Names can differ between ranks."""
    pooled = defaultdict(list)
    for values_of_rank in gather(values):
        for name, some in values_of_rank.items():
            pooled[name] += some
    return {name: math.fsum(pool) / len(pool) for name, pool in pooled.items() if pool}


def peak_memory() -> float:
    """Return the peak memory so far, in GiB, of the most loaded GPU; 0 without a GPU."""
    return max(gather(torch.cuda.max_memory_allocated())) / 2**30


# ------------------------------------------------------------------------------------------------ training state


def refuse_not_finite(weights: dict[str, torch.Tensor], where: str) -> None:
    """Raise ConfigError on every rank if any rank holds a weight that is not finite. The error names the weight."""
    broken = []
    for name, weight in weights.items():
        mine = weight.to_local() if isinstance(weight, DTensor) else weight
        if not mine.isfinite().all():
            broken.append(name)
    broken = sum(gather(broken), [])
    if broken:
        fix = "take an earlier state or checkpoint, and lower optim.lr"
        raise ConfigError(f"{where}: weights are not finite, such as {broken[0]}; {fix}")


def save_state(folder: str | Path, policy, optimizer, step: int, keep: int = 2) -> None:
    """Save the trainable weights and AdamW's moments under the step's name. Data, learning rate and random draws need no state:
    they are functions of the step. Keep the `keep` newest states."""
    folder = Path(folder)
    state = _state(policy, optimizer)
    refuse_not_finite(state["weights"], f"{folder}: no state of step {step} is saved")
    target = folder / f"step-{step:08d}"
    unfinished = target.with_suffix(".tmp")
    if rank() == 0:
        for left_over in folder.glob("step-*.*"):  # from a process that was killed
            shutil.rmtree(left_over)
        unfinished.mkdir(parents=True)
    barrier()
    dcp.save(state, checkpoint_id=unfinished, **_group())
    if rank() == 0:  # here, dcp.save returns once all ranks have written
        unfinished.rename(target)
        for old in _states(folder)[:-keep]:
            doomed = old.with_suffix(".old")  # rename first: only a complete state has a name without suffix
            old.rename(doomed)
            shutil.rmtree(doomed)
    barrier()


def load_state(folder: str | Path, policy, optimizer) -> int:
    """Load the newest complete state. Return its step, or 0 if there is none."""
    states = _states(Path(folder))
    if not states:
        return 0
    try:
        dcp.load(_state(policy, optimizer), checkpoint_id=states[-1], **_group())
    except (Exception, CheckpointException) as error:  # unpickling a damaged file can raise anything
        cause = f"{type(error).__name__}: {error}".splitlines()[-1]  # of a rank's traceback: its last line
        then = f"resume from {states[-2].name}" if states[1:] else "start again"
        raise ConfigError(f"{states[-1]} cannot be read ({cause}); if it is damaged, delete it to {then}") from None
    return saved_step(folder)


def _group() -> dict[str, Any]:
    """Return dcp's options: all ranks save or load together, over gloo, whose timeout allows for slow disks."""
    return {"process_group": _gloo()} if world_size() > 1 else {"no_dist": True}


def saved_step(folder: str | Path) -> int:
    """Return the step of the newest complete state, or 0 if there is none."""
    states = _states(Path(folder))
    return int(states[-1].name.removeprefix("step-")) if states else 0


def _states(folder: Path) -> list[Path]:
    """List the complete states, oldest first. A state's name has a suffix until it is complete. A user's copies have other names."""
    return sorted(folder.glob("step-" + 8 * "[0-9]"))


def _state(policy, optimizer) -> dict[str, dict[str, Any]]:
    """Return the trainable weights and AdamW's state, by name. dcp.load writes into these tensors."""
    weights, adamw = {}, {}
    for name, p in policy.named_parameters():
        if not p.requires_grad:
            continue
        if not optimizer.state[p]:  # AdamW creates it at its first step; before that, create zeros
            step = torch.zeros((), device=p.device if optimizer.defaults["fused"] else "cpu")  # AdamW's own choice
            optimizer.state[p] = {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        weights[name] = p.detach()
        adamw[name] = optimizer.state[p]
    return {"weights": weights, "adamw": adamw}
