"""distributed.py: what the processes of a run do together: start, talk, save and resume, publish weights.

    rank, world = init_distributed()                          # under torchrun, or as a single process
    means = mean_over_ranks({"turns": [2, 3, 2]})             # over all values of all ranks; a rank may lack names
    save_state(run / "state", policy, optimizer, step)        # everything that training needs to go on
    step, extra = load_state(run / "state", policy, optimizer)        # (0, {}) at the start of a run
    export(policy, run / "model", source, contract)           # Hugging Face format: a result, or the engine's snapshot

Two formats, for two readers. *Training state* is fp32 shards of weights and moments, in torch's distributed checkpoint
format; any number of ranks resumes it. Its metadata is a pickle, so it is read from the run's own folder and nowhere
else. *Exports* are safetensors that plain transformers and SGLang load; they are what people exchange.

Both are written under another name and renamed when they are whole, so a process may be killed at any moment.

Deliberately missing: saving on SIGTERM (torchrun kills 30 s later, an 8B state takes longer), asynchronous saving.
"""

import datetime
import functools
import itertools
import json
import math
import os
import resource
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from runtime.contract import VisualContract

# ------------------------------------------------------------------------------------------------ ranks


TIMEOUT = datetime.timedelta(hours=2)  # an episode may wait for a server's restart, rank 0 for a download


def init_distributed() -> tuple[int, int]:
    """Join torchrun's ranks (NCCL on GPUs, gloo on CPUs) -> (rank, world size). A lone GPU makes a group of one, since
    mixed precision lives in FSDP2; a lone CPU process needs none."""
    cuda, alone = torch.cuda.is_available(), "RANK" not in os.environ
    if dist.is_initialized() or (alone and not cuda):
        return rank(), world_size()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    lone = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if alone else {}
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=TIMEOUT, **lone)
    _gloo()
    return rank(), world_size()


@functools.cache
def _gloo() -> dist.ProcessGroup:
    """The group for Python objects and barriers: no GPU waits for it."""
    return dist.new_group(backend="gloo", timeout=TIMEOUT)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def device() -> torch.device:
    """Where this rank computes."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def print0(*values: Any) -> None:
    if rank() == 0:
        print(*values, flush=True)


def barrier(what: str, timeout: datetime.timedelta = TIMEOUT) -> None:
    """Wait for all ranks; rank 0's error names those that did not come."""
    if world_size() == 1:
        return
    try:
        dist.monitored_barrier(_gloo(), timeout, wait_all_ranks=True)
    except RuntimeError as error:
        raise RuntimeError(f"{what}: not all ranks arrived within {timeout}: {error}") from None


def gather(value: Any) -> list[Any]:
    """The value of every rank, on every rank."""
    if world_size() == 1:
        return [value]
    values = [None] * world_size()
    dist.all_gather_object(values, value, group=_gloo())
    return values


def sum_over_ranks(values: dict[str, float]) -> dict[str, float]:
    return {name: math.fsum(found) for name, found in _by_name(values).items()}


def mean_over_ranks(values: dict[str, list[float]]) -> dict[str, float]:
    """Per name, the mean over all values that all ranks have of it."""
    pooled = {name: list(itertools.chain(*found)) for name, found in _by_name(values).items()}
    return {name: math.fsum(found) / len(found) for name, found in pooled.items() if found}


def _by_name(values: dict[str, Any]) -> dict[str, list[Any]]:
    ranks = gather(values)
    return {name: [v[name] for v in ranks if name in v] for name in dict.fromkeys(itertools.chain(*ranks))}


def peak_memory() -> float:
    """GiB that the most loaded rank has held so far: of its GPU, or of its process where there is none."""
    if torch.cuda.is_available():
        mine = torch.cuda.max_memory_allocated()
    else:
        mine = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    return max(gather(mine)) / 2**30


# ------------------------------------------------------------------------------------------------ training state


def save_state(
    folder: str | Path, policy, optimizer, step: int, keep: int = 2, extra: dict[str, Any] | None = None
) -> None:
    """Save weights that train, AdamW's moments, the step (with it the position in the data, on the learning-rate schedule
    and in all draws of chance, which are functions of it) and `extra` (JSON). Each step once; the `keep` newest stay."""
    folder = Path(folder)
    target, unfinished = folder / f"step-{step:08d}", folder / f"step-{step:08d}.tmp"
    if rank() == 0:
        for left_over in folder.glob("step-*.*"):  # of a process that was killed
            shutil.rmtree(left_over)
        unfinished.mkdir(parents=True)
    barrier("save_state begins")
    with warnings.catch_warnings(action="ignore"):  # "a single process": yes, it may be
        dcp.save(_state(policy, optimizer), checkpoint_id=unfinished, no_dist=world_size() == 1)
    barrier("save_state ends")
    if rank() == 0:
        (unfinished / "run.json").write_text(json.dumps({"step": step, "extra": extra or {}}))
        unfinished.rename(target)
        for old in _states(folder)[:-keep]:
            doomed = old.with_suffix(".old")  # first no longer complete by name, then gone
            old.rename(doomed)
            shutil.rmtree(doomed)
    barrier("save_state is done")


def load_state(folder: str | Path, policy, optimizer, resume: str = "auto") -> tuple[int, dict[str, Any]]:
    """Continue from the newest complete state -> (step, extra); (0, {}) where there is none. resume = "never": there is
    none any more."""
    if resume == "never" and rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    barrier("load_state begins")
    path = latest_state(folder)
    if path is None:
        return 0, {}
    run = json.loads((path / "run.json").read_text())
    with warnings.catch_warnings(action="ignore"):
        dcp.load(_state(policy, optimizer), checkpoint_id=path, no_dist=world_size() == 1)
    return run["step"], run["extra"]


def latest_state(folder: str | Path) -> Path | None:
    """The newest complete state: its name alone says that it is whole."""
    return next(reversed(_states(Path(folder))), None)


def _states(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if not path.suffix)


def _state(policy, optimizer) -> dict[str, dict[str, Any]]:
    """Weights that train and AdamW's state, by name. Reading fills these very tensors."""
    trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    for p in trained.values():
        if not optimizer.state[p]:  # no step so far; the optimizer itself would begin with the same
            moments = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
            where = p.device if optimizer.defaults["fused"] else "cpu"  # AdamW's own choice
            optimizer.state[p] = {"step": torch.zeros((), device=where), **moments}
    weights = {name: p.detach() for name, p in trained.items()}
    return {"weights": weights, "adamw": {name: optimizer.state[p] for name, p in trained.items()}}


# ------------------------------------------------------------------------------------------------ exports

NOT_COPIED = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}


def checkpoint_dir(checkpoint: str | Path, only: Sequence[str] | None = None) -> Path:
    """A checkpoint's folder; a name that is no folder is fetched from the Hugging Face hub, by rank 0 first. `only`:
    patterns of the files that are wanted."""
    if Path(checkpoint).is_dir():
        return Path(checkpoint)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    found = None
    for turn in (True, False):
        if (rank() == 0) is turn:
            try:
                found = snapshot_download(str(checkpoint), allow_patterns=only)
            except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError) as error:
                raise FileNotFoundError(f"{checkpoint}: neither a folder nor a model on the hub: {error}") from None
        barrier(f"{checkpoint} is downloaded")
    return Path(found)


def export(
    policy,
    folder: str | Path,
    source: str | Path,
    contract: VisualContract,
    dtype: torch.dtype | None = None,
    file_bytes: int = 2 << 30,
) -> None:
    """Write the policy as a Hugging Face checkpoint: its weights (by default in the dtype it computes in), and all else
    (tokenizer, chat template, processor, generation config) as in `source`. A folder of that name is replaced.

    Each rank writes every world-th file: it holds one file of `file_bytes`, and one gathered weight, at a time."""
    folder, dtype = Path(folder), dtype or policy.dtype
    unfinished, replaced = (folder.with_name(folder.name + suffix) for suffix in (".tmp", ".old"))
    if rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    barrier("export begins")
    weights = dict(policy.model.named_parameters())  # a tied head is listed once, as transformers stores it
    files = _by_file({name: weight.numel() * dtype.itemsize for name, weight in weights.items()}, file_bytes)
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    names = names if len(files) > 1 else ["model.safetensors"]
    for turn in range(0, len(files), world_size()):
        mine, name = {}, None
        for i in range(turn, min(turn + world_size(), len(files))):
            for member in files[i]:
                whole = _whole(weights[member].detach().to(dtype))
                if i - turn == rank():
                    mine[member], name = whole, names[i]
        if name:  # copied to the host by all ranks at the same time, not between two gathers
            mine = {member: whole.cpu().contiguous() for member, whole in mine.items()}
            save_file(mine, unfinished / name, metadata={"format": "pt"})
    barrier("export is written")
    if rank() == 0:
        if len(files) > 1:
            total = sum(weight.numel() for weight in weights.values()) * dtype.itemsize
            where = {member: name for name, members in zip(names, files) for member in members}
            index = {"metadata": {"total_size": total}, "weight_map": where}
            (unfinished / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        _copy_all_but_weights(Path(source), unfinished, dtype)
        contract.save(unfinished)
        if folder.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            folder.rename(replaced)
        unfinished.rename(folder)
        shutil.rmtree(replaced, ignore_errors=True)
    barrier("export is done")


def _whole(weight: torch.Tensor) -> torch.Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def _by_file(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Names in order, at most `limit` bytes per file (a larger weight has a file of its own)."""
    files, room = [], 0
    for name, size in sizes.items():
        if not files or size > room:
            files.append([])
            room = limit
        files[-1].append(name)
        room -= size
    return files


def _copy_all_but_weights(source: Path, target: Path, dtype: torch.dtype) -> None:
    for path in source.iterdir():
        if path.is_file() and path.suffix not in NOT_COPIED and not path.name.endswith(".index.json"):
            shutil.copyfile(path, target / path.name)
    config = json.loads((target / "config.json").read_text())
    for part in (config, config.get("text_config", {}), config.get("vision_config", {})):
        part.pop("torch_dtype", None)  # the older spelling of the same
        part["dtype"] = str(dtype).removeprefix("torch.")
    (target / "config.json").write_text(json.dumps(config, indent=2))
