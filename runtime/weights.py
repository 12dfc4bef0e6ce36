"""weights.py: write trained weights as Hugging Face checkpoints, and hand them to the engine.

    export(policy, run / "model", contract)        # the result of a run, for plain transformers and SGLang

    with snapshot_folders(run, source) as (snapshots, frames):
        sync = WeightSync(snapshots, engine, cfg.rollout, contract)
        sync.write(policy, version)     # all ranks write SNAPSHOTS/weights-{version}; the engine may still sample
        sync.publish(version)           # the engine loads it; every later sample carries the version
        sync.remove(version - 1)

All engines get their weights this way: the servers of each node, and the engine in this process. Snapshots are in memory on one
node, and in the run's shared folder on several. An export has a temporary name until it is complete, so a kill at any moment, or
a full disk, leaves the export before it.
"""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from runtime.cleanup import MEMORY, print_folders_in_memory, run_memory
from runtime.distributed import (
    barrier,
    gather,
    local_rank,
    local_size,
    own_device,
    rank,
    refuse_not_finite,
    world_size,
)
from runtime.engine import Engine
from runtime.policy import Policy, checkpoint_dir, published_names
from runtime.render import write_chat_template
from runtime.visual import VisualContract

# ------------------------------------------------------------------------------------------------ the engine's weights


class WeightSync:
    """The snapshots of one run, and the engine that loads them."""

    def __init__(self, folder: Path, engine: Engine, rollout: Any, contract: VisualContract):
        self.folder = folder
        self.engine = engine
        self.contract = contract
        self.server_gpus = rollout.server_gpus
        # The first rank of a node updates the servers that its ranks share. An in-process engine loads its own weights.
        shares_servers = bool(rollout.server_gpus or rollout.urls)
        self.loads = local_rank() == 0 or not shares_servers

    def write(self, policy: Policy, version: int) -> None:
        """Write a snapshot. Each rank writes a part of it, while the engine may still sample."""
        export(policy, self._snapshot(version), self.contract)

    def publish(self, version: int) -> None:
        """Make the engine load a snapshot. No rank may sample meanwhile."""
        if own_device().index in self.server_gpus:
            torch.cuda.empty_cache()  # the server on this GPU needs the memory that torch's allocator caches
        if self.loads:
            self.engine.update_weights(self._snapshot(version), version)
            barrier()  # the shared servers have the new weights
        else:
            barrier()  # wait for the rank that loads the servers
            self.engine.update_weights(self._snapshot(version), version, push=False)
        barrier()  # no rank reads an older snapshot any more

    def remove(self, version: int) -> None:
        """Delete a snapshot that no server reads any more."""
        if rank() == 0:
            shutil.rmtree(self._snapshot(version), ignore_errors=True)

    def _snapshot(self, version: int) -> Path:
        return self.folder / f"weights-{version}"


@contextlib.contextmanager
def snapshot_folders(run: str | Path, source: Path, images: float = 0.0) -> Iterator[tuple[Path, Path]]:
    """Yield the folder for snapshots, which all ranks share, and the one for frames of this node. Delete them at the end. All
    ranks call this while the run holds its lock. `images`: bytes of memory that servers need beside.

    Both are the run's folder in memory, or RUN/snapshot if a node's memory has no room. On several nodes, snapshots are always in
    RUN/snapshot."""
    memory = run_memory(Path(run))
    disk = Path(run).absolute() / "snapshot"  # absolute: servers can run in another directory
    one_node = local_size() == world_size()
    needed = images
    if one_node:  # two snapshots: the old one, and the one being written
        needed += 2.2 * sum(file.stat().st_size for file in source.glob("*.safetensors"))

    try:
        # Make them anew: a run that was killed has left files. The first rank of a node asks for room for its ranks.
        has_room = True
        if rank() == 0:
            shutil.rmtree(disk, ignore_errors=True)
            disk.mkdir()
        if local_rank() == 0:
            shutil.rmtree(memory, ignore_errors=True)
            memory.mkdir(mode=0o700)
            has_room = shutil.disk_usage(memory).free > needed
            if not has_room:
                print(f"{MEMORY} has no room for {needed / 1e9:.1f} GB of weights and images: they go through {disk}")
                print_folders_in_memory()
        in_memory = all(gather(has_room))
        yield memory if in_memory and one_node else disk, memory if in_memory else disk
    finally:
        if local_rank() == 0:
            shutil.rmtree(memory, ignore_errors=True)
        if rank() == 0:
            shutil.rmtree(disk, ignore_errors=True)


# ------------------------------------------------------------------------------------------------ exports

NOT_COPIED = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}


def export(policy: Policy, folder: str | Path, contract: VisualContract) -> None:
    """Write the policy as a Hugging Face checkpoint: its weights in the dtype of computation, and copies of the other files of
    the checkpoint that it started from. Replace an existing folder. Each rank writes one file."""
    folder = Path(folder)
    unfinished = folder.with_name(folder.name + ".tmp")
    n = world_size()

    # Give the weights their published names. A tied head is listed once, as transformers stores it.
    published = published_names(policy.model)
    weights = {published[name]: weight for name, weight in policy.model.named_parameters()}
    refuse_not_finite(weights, f"{folder} is not written")

    # Make an empty folder.
    if rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    barrier()

    # Deal the weights into one file per rank: the largest remaining weight goes into the smallest file.
    files = ["model.safetensors"]
    if n > 1:
        files = [f"model-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]
    writer_of = {}  # weight -> the rank that writes it
    sizes = [0] * n
    for name in sorted(weights, key=lambda name: -weights[name].numel()):
        writer_of[name] = sizes.index(min(sizes))
        sizes[writer_of[name]] += weights[name].numel()

    # All ranks gather each weight. Its writer copies it to the host at once, so a GPU holds one gathered weight.
    on_host = {}
    for name, weight in weights.items():
        weight = weight.detach().to(policy.dtype)
        if isinstance(weight, DTensor):
            weight = weight.full_tensor()
        if writer_of[name] == rank():
            on_host[name] = weight.cpu().contiguous()
    save_file(on_host, unfinished / files[rank()], metadata={"format": "pt"})
    barrier()

    # Add the other files, and replace the folder.
    if rank() == 0:
        if n > 1:
            total = policy.dtype.itemsize * sum(weight.numel() for weight in weights.values())
            file_of = {name: files[writer] for name, writer in writer_of.items()}
            index = {"metadata": {"total_size": total}, "weight_map": file_of}
            (unfinished / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        _copy_other_files(checkpoint_dir(policy.cfg.checkpoint), unfinished, policy.dtype)
        contract.save(unfinished)
        write_chat_template(unfinished)
        _replace(folder, unfinished)
    barrier()


def _copy_other_files(source: Path, folder: Path, dtype: torch.dtype) -> None:
    """Copy what is neither weights nor their index. config.json names the dtype of the exported weights."""
    for path in source.iterdir():
        if path.is_file() and path.suffix not in NOT_COPIED and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)
    config = json.loads((folder / "config.json").read_text())
    for part in (config, config.get("text_config", {}), config.get("vision_config", {})):
        part["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for path in folder.glob("*.safetensors"):  # safetensors makes them readable only for the owner
        shutil.copymode(folder / "config.json", path)


def _replace(folder: Path, unfinished: Path) -> None:
    """Give the complete folder its name, and remove the one that had it."""
    replaced = folder.with_name(folder.name + ".old")
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)
    unfinished.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)
