"""weights.py: hand trained weights to the engine, as safetensors in a folder that it loads.

    sync.write(policy, version)     # all ranks write FOLDER/weights-{version}; the engine may still sample
    sync.publish(version)           # the engine loads it; every later sample carries the version
    sync.remove(version - 1)

All engines get their weights this way: servers on this node, servers elsewhere, and the engine in this process.
"""

import shutil
from pathlib import Path
from typing import Any

import torch

from runtime.distributed import barrier, device, export, local_rank, rank_and_size
from runtime.engine import Engine
from runtime.policy import Policy
from runtime.servers import on_this_machine
from runtime.visual import VisualContract


class WeightSync:
    """The snapshots of one run, and the engine that loads them."""

    def __init__(self, folder: Path, engine: Engine, rollout: Any, contract: VisualContract):
        self.folder = folder
        self.engine = engine
        self.contract = contract
        self.server_gpus = rollout.server_gpus
        # Each node has its own snapshots. Servers elsewhere read those of rank 0.
        self.per_node = on_this_machine(rollout.urls)
        # The first rank updates the servers that its node (or all ranks) share. An in-process engine loads its own weights.
        shares_servers = bool(rollout.server_gpus or rollout.urls)
        number, _ = rank_and_size(self.per_node)
        self.loads = number == 0 or not shares_servers

    def write(self, policy: Policy, version: int) -> None:
        """Write a snapshot. A server that restarts meanwhile still loads the previous one."""
        # Servers that we started loaded the checkpoint, so they already have the weights that do not train.
        frozen = not self.server_gpus
        target = self._snapshot(version)
        export(policy, target, policy.cfg.checkpoint, self.contract, per_node=self.per_node, frozen=frozen)

    def publish(self, version: int) -> None:
        """Make the engine load a snapshot. No rank may sample meanwhile."""
        if device().index in self.server_gpus:
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
        if local_rank() == 0:
            shutil.rmtree(self._snapshot(version), ignore_errors=True)

    def _snapshot(self, version: int) -> Path:
        return self.folder / f"weights-{version}"
