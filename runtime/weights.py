"""weights.py: write trained weights as Hugging Face checkpoints, and hand them to the engine.

    export(policy, run / "model", contract)        # the result of a run, for plain transformers and SGLang

    with snapshot_folder(run, source) as folder:
        sync = WeightSync(folder, engine, cfg.rollout, contract)
        sync.write(policy, version)     # all ranks write FOLDER/weights-{version}; the engine may still sample
        sync.publish(version)           # the engine loads it; every later sample carries the version
        sync.remove(version - 1)

All engines get their weights this way: a node's servers, and the engine in this process. An export has a temporary name until
it is complete, so a kill at any moment, or a full disk, leaves the export before it.
"""

import contextlib
import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from runtime import distributed
from runtime.cleanup import MEMORY, memory_folder
from runtime.distributed import barrier, gather, local_rank, local_size, own_device, rank, rank_and_size
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
        """Write a snapshot."""
        # Servers that we started loaded the checkpoint, so they already have the weights that do not train.
        with_frozen = not self.server_gpus
        target = self._snapshot(version)
        export(policy, target, self.contract, per_node=True, with_frozen=with_frozen)

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
        if local_rank() == 0:
            shutil.rmtree(self._snapshot(version), ignore_errors=True)

    def _snapshot(self, version: int) -> Path:
        return self.folder / f"weights-{version}"


@contextlib.contextmanager
def snapshot_folder(run: str | Path, source: Path, images: float = 0.0) -> Iterator[Path]:
    """Yield the folder for snapshots and frames, and delete it at the end. Each node has its own. The first rank of a node
    chooses and deletes it. All ranks call this."""
    folder = _choose_folder(Path(run), source, images) if local_rank() == 0 else None
    note = Path(run) / "memory.txt"  # tells users to which run a folder in memory belongs
    try:
        folders = gather(folder)  # of all ranks; only the first ones have chosen one
        if rank() == 0:
            note.write_text("".join(f"{path}\n" for path in folders if path))
        yield folders[rank() - local_rank()]
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        if rank() == 0:
            note.unlink(missing_ok=True)


def _choose_folder(run: Path, source: Path, images: float) -> Path:
    """Return a folder in memory if two snapshots (the old one and the one being written) fit there beside `images` bytes, and
    otherwise one in the run's folder."""
    folder = run.absolute() / f"snapshot-{rank() // local_size()}"  # absolute: servers can run in another directory
    shutil.rmtree(folder, ignore_errors=True)  # from a run that was killed
    needed = images + 2.2 * sum(file.stat().st_size for file in source.glob("*.safetensors"))
    if shutil.disk_usage(memory_folder()).free > needed:  # memory_folder has removed the folders of dead runs
        return Path(tempfile.mkdtemp(prefix="weights-", dir=memory_folder()))
    told = f"{MEMORY} has no room for two snapshots beside images, {needed / 1e9:.1f} GB"
    print(f"{told}: weights and frames go through {run}")
    folder.mkdir(parents=True)
    return folder


# ------------------------------------------------------------------------------------------------ exports

File = tuple[str, list[str]]  # a file's name, and the names of its weights
NOT_COPIED = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}


def export(
    policy: Policy, folder: str | Path, contract: VisualContract, file_bytes=2 << 30, per_node=False, with_frozen=True
) -> None:
    """Write the policy as a Hugging Face checkpoint: its weights in the dtype of computation, and copies of the other files of
    the checkpoint that it started from. Replace an existing folder.

    `per_node`: each node writes its own folder. `with_frozen=False`: leave out the weights that do not train. A rank holds at most
    one file of about `file_bytes` and one gathered weight at a time."""
    folder = Path(folder)
    unfinished = folder.with_name(folder.name + ".tmp")
    me, ranks = rank_and_size(per_node)

    # Give the weights their published names. A tied head is listed once, as transformers stores it.
    published = published_names(policy.model)
    weights = {published[name]: weight for name, weight in policy.model.named_parameters()}
    distributed.refuse_not_finite(weights, f"{folder} is not written")
    if not with_frozen:
        weights = {name: weight for name, weight in weights.items() if weight.requires_grad}

    # One rank makes an empty folder.
    if me == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    barrier()

    # All ranks write the weights.
    files = _deal_into_files(weights, ranks, file_bytes // policy.dtype.itemsize)
    _write_weights(weights, files, unfinished, policy.dtype, per_node)
    barrier()

    # One rank adds the other files, and replaces the folder.
    if me == 0:
        if len(files) > 1:
            total = policy.dtype.itemsize * sum(weight.numel() for weight in weights.values())
            file_of = {name: file for file, names in files for name in names}
            index = {"metadata": {"total_size": total}, "weight_map": file_of}
            (unfinished / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        _copy_other_files(checkpoint_dir(policy.cfg.checkpoint), unfinished, policy.dtype)
        contract.save(unfinished)
        write_chat_template(unfinished)
        _replace(folder, unfinished)
    barrier()


def _deal_into_files(weights: dict[str, torch.Tensor], ranks: int, file_size: int) -> list[File]:
    """Deal the weights into files of about `file_size` numbers, equally many files per rank."""
    total = sum(weight.numel() for weight in weights.values())
    count = ranks * math.ceil(total / (ranks * file_size))
    names: list[list[str]] = [[] for _ in range(count)]
    sizes = [0] * count
    for name in sorted(weights, key=lambda name: -weights[name].numel()):
        smallest = sizes.index(min(sizes))  # put the largest remaining weight into the smallest file
        names[smallest].append(name)
        sizes[smallest] += weights[name].numel()
    if count == 1:
        return [("model.safetensors", names[0])]
    return [(f"model-{i + 1:05d}-of-{count:05d}.safetensors", names[i]) for i in range(count) if names[i]]


def _write_weights(
    weights: dict[str, torch.Tensor], files: list[File], folder: Path, dtype: torch.dtype, per_node: bool
) -> None:
    """Write the files in rounds, one file per rank."""
    me, ranks = rank_and_size(per_node)
    for first in range(0, len(files), ranks):
        # All ranks gather each weight of the round. The rank that writes it keeps it.
        mine = {}
        for i, (_, names) in enumerate(files[first : first + ranks]):
            for name in names:
                weight = weights[name].detach().to(dtype)
                if isinstance(weight, DTensor):
                    weight = weight.full_tensor()
                if i == me:
                    mine[name] = weight

        # All ranks copy their weights to the host and write at the same time.
        if mine:
            file, _ = files[first + me]
            on_host = {name: weight.cpu().contiguous() for name, weight in mine.items()}
            save_file(on_host, folder / file, metadata={"format": "pt"})


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
