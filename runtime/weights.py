"""weights.py: hand trained weights to the engine.

    with snapshot_folders(run, source) as (snapshots, frames):
        sync = WeightSync(snapshots, engine, cfg.rollout)
        write_weights(policy, sync.snapshot(version))    # all ranks write a part of it; the engine may still sample
        sync.publish(version)                            # the engine loads it; every later sample carries the version

All engines get their weights this way: the servers of each node, and the engine in this process. Snapshots are in memory on one
node if it has room, and otherwise in the run's folder, which all nodes share.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from runtime.checkpoints import weight_files
from runtime.distributed import barrier, gather, local_rank, local_size, own_device, rank, world_size
from runtime.engine import Engine, EngineConfig
from runtime.processes import MEMORY


class WeightSync:
    """The snapshots of one run, and the engine that loads them."""

    def __init__(self, folder: Path, engine: Engine, rollout: EngineConfig):
        self.folder = folder
        self.engine = engine
        self.server_gpus = rollout.gpus
        # The first rank of a node updates the servers that its ranks share. An in-process engine loads its own weights.
        self.pushes = local_rank() == 0 or not rollout.uses_servers

    def snapshot(self, version: int) -> Path:
        """Return the folder of a snapshot: safetensors, which is all that an engine reads."""
        return self.folder / f"weights-{version}"

    def publish(self, version: int) -> None:
        """Make the engine load a snapshot, and remove the one before. No rank may sample meanwhile."""
        if own_device().index in self.server_gpus:
            torch.cuda.empty_cache()  # the server on this GPU needs the memory that torch's allocator caches
        if self.pushes:
            self.engine.update_weights(self.snapshot(version), version)
            barrier()  # the shared servers have the new weights
        else:
            barrier()  # wait for the rank that loads the servers
            self.engine.update_weights(self.snapshot(version), version, push=False)
        barrier()  # no rank reads an older snapshot any more
        if rank() == 0:
            shutil.rmtree(self.snapshot(version - 1), ignore_errors=True)


def run_memory(run: Path) -> Path:
    """Return the path of a run's folder in memory, on this node. It is named after the user and the run's folder: its name, and
    its place on the disk, because containers that share /dev/shm may have other folders at the same path."""
    place = run.stat()
    return MEMORY / f"minparavt-{os.getuid()}-{run.resolve().name}-{place.st_dev:x}-{place.st_ino:x}"


@contextlib.contextmanager
def snapshot_folders(run: str | Path, source: Path, images: float = 0.0) -> Iterator[tuple[Path, Path]]:
    """Yield (snapshots, frames): the folder for snapshots, which all ranks share, and this node's folder for frames. Delete them at
    the end; after a kill, they stay until the run resumes. All ranks call this while the run holds its lock. `images`: bytes of
    memory that the servers' images need in addition.

    Both are the run's folder in memory, or RUN/snapshot if a node's memory has no room or cannot be written. On several nodes,
    snapshots are always in RUN/snapshot."""
    memory = run_memory(Path(run))
    disk = Path(run).absolute() / "snapshot"  # absolute: servers can run in another directory
    one_node = local_size() == world_size()
    needed = images
    if one_node:  # two snapshots: the old one, and the one being written
        needed += 2.2 * sum(file.stat().st_size for file in weight_files(source))

    try:
        # Make them anew: a run that was killed has left files. The first rank of a node asks for room for its ranks.
        has_room = True
        if rank() == 0:
            shutil.rmtree(disk, ignore_errors=True)
            disk.mkdir()
        if local_rank() == 0:
            shutil.rmtree(memory, ignore_errors=True)
            try:
                memory.mkdir(mode=0o700)
                has_room = shutil.disk_usage(memory).free > needed
            except OSError:
                has_room = False
            if not has_room:
                print(
                    f"{MEMORY} has no room for {needed / 1e9:.1f} GB of weights and images, or cannot be written: they go through {disk}; "
                    f"killed runs may have left {MEMORY}/minparavt-*",
                    flush=True,
                )
        in_memory = all(gather(has_room))
        yield memory if in_memory and one_node else disk, memory if in_memory else disk
    finally:
        if local_rank() == 0:
            shutil.rmtree(memory, ignore_errors=True)
        if rank() == 0:
            shutil.rmtree(disk, ignore_errors=True)
