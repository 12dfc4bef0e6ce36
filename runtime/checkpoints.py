"""checkpoints.py: read and write checkpoints, and the states that a training resumes from.

    source = find_checkpoint("Qwen/Qwen3-VL-8B-Instruct")     # a folder, or a name on the hub
    policy = load_policy(PolicyConfig(str(source)), renderer.never_sampled)
    export(policy, run / "model", contract)                   # the result of a run, for plain transformers and SGLang
    write_weights(policy, snapshot)                           # its weights alone, for the engine

    save_state(run / "state", policy, optimizer, step)        # everything that training needs to resume
    step = load_state(run / "state", policy, optimizer)       # 0 at the start of a run

A *checkpoint* is a Hugging Face folder: weights in the dtype of computation, config, tokenizer. A *training state* is fp32
shards of weights and AdamW moments in torch's distributed checkpoint format. Any number of ranks can resume it. Its metadata
is a pickle, so read it only from the run's own folder.

Both are written under a temporary name and renamed when they are complete. A kill at any moment, or a full disk, therefore
loses nothing that was complete before. All ranks load, export and save together.

Deliberately missing: saving on SIGTERM (torchrun kills after 30 s, an 8B state takes longer), asynchronous saving.
"""

import contextlib
import functools
import hashlib
import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from runtime.config import ConfigError
from runtime.distributed import barrier, gather, gloo, local_size, own_device, print0, rank, world_size
from runtime.policy import MODELS, Policy, PolicyConfig, build_on_meta, dtype_of, pick_kernel
from runtime.render import write_chat_template
from runtime.visual import VisualContract, read_json

# ------------------------------------------------------------------------------------------------ finding


def find_checkpoint(name: str | Path, weights: bool = True) -> Path:
    """Return the folder of a checkpoint. Fetch one from the hub; without `weights`, only its small files."""
    folder = Path(name)
    if not folder.is_dir():
        if not on_the_hub(name):
            raise ConfigError(f"{name}: neither a folder nor a model on the hub; training leaves one in RUN/model")
        only = None if weights else ["*.json", "*.jinja", "*.txt"]
        try:  # all ranks call it: the hub's cache locks each file, so each file is downloaded once
            folder = Path(snapshot_download(str(name), allow_patterns=only))
        except (HFValidationError, OSError) as error:  # OSError: every error of the hub
            raise FileNotFoundError(f"{name}: neither a folder here, nor fetched from the hub: {error}") from None
    if not (folder / "config.json").exists():
        raise ConfigError(f"{folder} has no config.json: it is no checkpoint; a training leaves its own in RUN/model")
    if weights:
        require_weight_files(folder)
    return folder


def weight_files(folder: Path) -> list[Path]:
    """List a checkpoint's weight files: those that its index names, or else model.safetensors. Other files, such as
    consolidated.safetensors, are not read."""
    index = read_json(folder / "model.safetensors.index.json") or {"weight_map": {}}
    names = set(index["weight_map"].values()) or {"model.safetensors"}
    return [folder / name for name in sorted(names)]


def require_weight_files(folder: Path) -> None:
    """Refuse a checkpoint that lacks a weight file, or has model.safetensors beside an index of other files: transformers
    would read the one, and SGLang the others."""
    files = weight_files(folder)
    whole = folder / "model.safetensors"
    if whole.exists() and whole not in files:
        raise ConfigError(f"{folder} has {whole.name} and an index of other files: delete one of the two")
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise ConfigError(f"{folder} lacks {', '.join(missing)}: copy or download it again")


def on_the_hub(name: str | Path) -> bool:
    """Return whether the name looks like owner/model. If the owner is a local folder, the name is a path."""
    return bool(re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(name))) and not Path(name).parent.is_dir()


def read_config(path: Path) -> PreTrainedConfig:
    """Read a checkpoint's config.json. Refuse quantized models and other families, also those that transformers does not know."""
    config = read_json(path / "config.json") or {}
    if config.get("quantization_config"):
        raise ConfigError(f"{path} is quantized (quantization_config in config.json): take its bf16 checkpoint")
    family = config.get("model_type")
    if family not in MODELS:
        raise ConfigError(
            f"{path} is a {family!r} model; this code trains {' and '.join(MODELS)}: docs/add_a_base_model.md"
        )
    return AutoConfig.from_pretrained(path, trust_remote_code=False)


def weights_digest(folder: Path) -> str:
    """Hash a checkpoint: the names and sizes of its files, and 1024 blocks of 4 KiB spread over each file. Files up to 4 MiB
    are hashed whole. Training changes weights everywhere; a change that lies between the blocks goes unnoticed."""
    block = 4096
    whole = hashlib.sha256()
    weights = weight_files(folder)
    for path in sorted(p for p in folder.iterdir() if p.suffix in (".json", ".jinja", ".txt") or p in weights):
        size = path.stat().st_size
        whole.update(f"{path.name}/{size}/".encode())
        with path.open("rb") as file:
            for start in range(0, size, max(block, size // 1024)):
                file.seek(start)
                whole.update(file.read(block))
    return whole.hexdigest()[:16]


# ------------------------------------------------------------------------------------------------ loading

# Keep a block's inputs and recompute the rest in the backward pass. The RNG state can go: nothing here draws random numbers.
recompute = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def load_policy(cfg: PolicyConfig, never_sampled: Sequence[int] = (), train: bool = True) -> Policy:
    """Build the policy on the meta device, shard it, and let every rank read its own rows of each weight.

    `train=False` builds the reference policy: its weights are in the dtype of computation and have no gradient."""
    path = find_checkpoint(cfg.checkpoint)
    device = own_device()
    dtype = dtype_of(cfg, train)

    # Build the shapes, and set the dtypes.
    policy = build_on_meta(read_config(path), cfg, never_sampled)
    policy.dtype = dtype
    policy.kernel = pick_kernel(device, dtype)
    if not train:
        policy.requires_grad_(False).to(dtype)
    if policy.vision_frozen:
        tower: nn.Module = policy.vision  # transformers' own `to` has a type that refuses every call
        tower.to(dtype)

    # Compile the text blocks, wrap all blocks for recomputation, then shard.
    blocks = list(policy.text.layers)
    if cfg.compile == "always" or (cfg.compile == "auto" and device.type == "cuda"):
        for block in blocks:
            block.forward = torch.compile(block.forward, dynamic=True)  # all blocks share the kernels
        # Kernels per piece of a block: with and without gradient, for policy and reference, for a few ranges of lengths.
        torch._dynamo.config.recompile_limit = 64
    if not policy.vision_frozen:
        blocks += policy.vision.blocks
    if cfg.activation_checkpointing and train:
        for block in blocks:  # before FSDP2 wraps them, so that its hooks run once per pass
            block.forward = functools.partial(recompute, block.forward)
    if dist.is_initialized():
        shard(policy, blocks, dtype, device)

    # Allocate memory, and read the weights into it.
    policy.to_empty(device=device)
    policy.model.tie_weights()
    # No checkpoint holds the rotary buffers, and to_empty leaves garbage in them, so compute them.
    policy.text.rotary_emb = type(policy.text.rotary_emb)(policy.text.config).to(device)  # type: ignore[arg-type]  # its own config
    rotary = policy.vision.rotary_pos_emb
    for name, buffer in list(rotary.named_buffers()):  # one buffer; from transformers 5.24 on, two equal ones
        angles = torch.arange(len(buffer), dtype=torch.float32)
        setattr(rotary, name, (1 / 10_000 ** (angles / len(angles))).to(device))
    _read_weights(policy.model, path)
    refuse_not_finite(dict(policy.model.named_parameters()), str(path))
    return policy


def shard(policy: Policy, blocks: Sequence[nn.Module], dtype: torch.dtype, device: torch.device) -> None:
    """Shard the weights over the ranks of a node: each block is a unit, the rest is the root. A frozen tower is not sharded.
    Every node has all shards, so gradients travel between nodes, but weights never do."""
    if local_size() == world_size():
        mesh = dist.init_device_mesh(device.type, (world_size(),), mesh_dim_names=("ranks",))
    else:
        shape = (world_size() // local_size(), local_size())
        mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=("nodes", "ranks"))
    whole = set(policy.vision.parameters()) if policy.vision_frozen else set()
    # cast_forward_inputs=False keeps the vision tower's rotary angles in fp32, as in transformers.
    precision = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    for unit in (*blocks, policy):
        # The root must reshard as well. After a pass without backward it would stay gathered and miss the next update.
        sharded = fully_shard(unit, mesh=mesh, mp_policy=precision, reshard_after_forward=True, ignored_params=whole)
        sharded.set_gradient_divide_factor(1.0)  # sum the gradients of all ranks
        sharded.set_force_sum_reduction_for_comms(True)


@contextlib.contextmanager
def open_weights(file: Path) -> Iterator[Any]:
    """Open a safetensors file, which reads only its header. Refuse one that cannot be read."""
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file.parent}: its weights cannot be read: {error}") from None


def refuse_quantized(folder: Path) -> None:
    """Refuse weights that are stored as integers or 8-bit floats: nothing here reads their scales."""
    for file in weight_files(folder):
        with open_weights(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118
                dtype = tensors.get_slice(name).get_dtype()
                if dtype not in ("BF16", "F16", "F32", "F64"):
                    rule = "weights must be floats of 16 bits or more; take the bf16 checkpoint"
                    raise ConfigError(f"{file}: {name} is stored as {dtype}: {rule}")


def _read_weights(model: PreTrainedModel, path: Path) -> None:
    """Fill every parameter from the safetensors files. If it is sharded, read only this rank's rows."""
    ours = {published: name for name, published in published_names(model).items()}
    missing = dict(model.named_parameters())  # a tied head is listed once
    surplus = []
    for file in weight_files(path):
        with open_weights(file) as tensors:
            for stored_name in tensors.keys():  # noqa: SIM118
                name = ours.get(stored_name, stored_name)
                if name not in missing:
                    surplus.append(stored_name)
                    continue
                parameter = missing.pop(name).detach()
                stored = tensors.get_slice(stored_name)
                if stored.get_shape() != list(parameter.shape):  # slicing would hide surplus rows
                    raise ConfigError(f"{file}: {name} is {stored.get_shape()}, in config.json {list(parameter.shape)}")
                own, start = _own_rows(parameter)
                if len(own):
                    own.copy_(stored[start : start + len(own)])
    if missing:
        raise ConfigError(f"{path} lacks {len(missing)} weights: {', '.join(sorted(missing)[:3])} ...")
    if surplus:
        print0(f"  note    {path} has {len(surplus)} weights that its config.json has no place for: {surplus[0]} ...")


def _own_rows(parameter: Tensor) -> tuple[Tensor, int]:
    """Return the rows of a parameter that this rank holds, and the index of the first."""
    if not isinstance(parameter, DTensor):
        return parameter, 0
    mesh = parameter.device_mesh["ranks"]  # of one node
    rows = math.ceil(len(parameter) / mesh.size())  # FSDP2 gives rank r the r-th of equal chunks of rows
    return parameter.to_local(), mesh.get_local_rank() * rows


def published_names(model: PreTrainedModel) -> dict[str, str]:
    """Return each weight's name in published checkpoints, by its name in transformers' model. They differ for Qwen2.5-VL, and
    SGLang loads only published names."""
    renamings = [renaming.reverse_transform() for renaming in get_model_conversion_mapping(model, add_legacy=False)]
    names = {}
    for name, _ in model.named_parameters():
        published = name
        for renaming in reversed(renamings):
            published, _ = renaming.rename_source_key(published)
        names[name] = published
    return names


def refuse_not_finite(weights: Mapping[str, Tensor], where: str) -> None:
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


# ------------------------------------------------------------------------------------------------ writing


def write_weights(policy: Policy, folder: Path) -> None:
    """Write the weights into a new folder, in the dtype of computation. Each rank writes one safetensors file."""
    n = world_size()

    # Give the weights their published names. A tied head is listed once, as transformers stores it.
    published = published_names(policy.model)
    weights = {published[name]: weight for name, weight in policy.model.named_parameters()}
    refuse_not_finite(weights, f"{folder} is not written")

    # Deal the weights into one file per rank: the largest remaining weight goes into the smallest file.
    files = ["model.safetensors"]
    if n > 1:
        files = [f"model-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]
    writer_of = {}  # weight -> the rank that writes it
    sizes = [0] * n
    for name in sorted(weights, key=lambda name: -weights[name].numel()):
        writer_of[name] = sizes.index(min(sizes))
        sizes[writer_of[name]] += weights[name].numel()

    # Make the folder. With several files, an index says which weight is where.
    if rank() == 0:
        folder.mkdir(parents=True)
        if n > 1:
            file_of = {name: files[writer] for name, writer in writer_of.items()}
            index = {"metadata": {"total_size": policy.dtype.itemsize * sum(sizes)}, "weight_map": file_of}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    barrier()

    # All ranks gather each weight. Its writer copies it to the host at once, so a GPU holds one gathered weight.
    on_host = {}
    for name, weight in weights.items():
        weight = weight.detach().to(policy.dtype)
        if isinstance(weight, DTensor):
            weight = weight.full_tensor()
        if writer_of[name] == rank():
            on_host[name] = weight.cpu().contiguous()
    file = folder / files[rank()]
    save_file(on_host, file, metadata={"format": "pt"})
    file.chmod(folder.stat().st_mode & 0o666)  # safetensors makes it readable only for its owner
    barrier()


# Endings of weight files that an export does not copy.
NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def export(policy: Policy, folder: str | Path, contract: VisualContract) -> None:
    """Write the policy as a Hugging Face checkpoint: its weights, and copies of the other files of the checkpoint that it started
    from. Replace an existing folder."""
    folder = Path(folder)
    unfinished = folder.with_name(folder.name + ".tmp")
    if rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
    write_weights(policy, unfinished)
    if rank() == 0:
        _copy_other_files(find_checkpoint(policy.cfg.checkpoint, weights=False), unfinished, policy.dtype)
        contract.save(unfinished)
        write_chat_template(unfinished)

        # Give the complete folder its name, and remove the one that had it.
        replaced = folder.with_name(folder.name + ".old")
        if folder.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            folder.rename(replaced)
        unfinished.rename(folder)
        shutil.rmtree(replaced, ignore_errors=True)
    barrier()


def _copy_other_files(source: Path, folder: Path, dtype: torch.dtype) -> None:
    """Copy what is neither weights nor their index. config.json names the dtype of the exported weights."""
    for path in source.iterdir():
        if path.is_file() and not path.name.endswith(NOT_COPIED):
            shutil.copyfile(path, folder / path.name)
    config = json.loads((folder / "config.json").read_text())
    for part in (config, config.get("text_config", {}), config.get("vision_config", {})):
        part["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2))


# ------------------------------------------------------------------------------------------------ training state


def save_state(folder: str | Path, policy: nn.Module, optimizer: Optimizer, step: int, keep: int = 2) -> None:
    """Save the trainable weights and AdamW's moments under the step's name. Data, learning rate and random draws need no state:
    they are functions of the step. Keep the `keep` newest states (0: all)."""
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
        for old in _states(folder)[:-keep]:  # with keep = 0, [:-0] is empty: none is removed
            doomed = old.with_suffix(".old")  # rename first: only a complete state has a name without suffix
            old.rename(doomed)
            shutil.rmtree(doomed)
    barrier()


def load_state(folder: str | Path, policy: nn.Module, optimizer: Optimizer) -> int:
    """Load the newest complete state. Return its step, or 0 if there is none."""
    states = _states(Path(folder))
    if not states:
        return 0
    try:
        dcp.load(_state(policy, optimizer), checkpoint_id=states[-1], **_group())
    except (Exception, CheckpointException) as error:  # unpickling can raise anything; the latter is a BaseException
        cause = f"{type(error).__name__}: {error}".splitlines()[-1]  # of a rank's traceback: its last line
        then = f"resume from {states[-2].name}" if states[1:] else "start again"
        raise ConfigError(f"{states[-1]} cannot be read ({cause}); if it is damaged, delete it to {then}") from None
    return saved_step(folder)


def _group() -> dict[str, Any]:
    """Return dcp's options: all ranks save or load together, over gloo, whose timeout allows for slow disks."""
    return {"process_group": gloo()} if world_size() > 1 else {"no_dist": True}


def saved_step(folder: str | Path) -> int:
    """Return the step of the newest complete state, or 0 if there is none."""
    states = _states(Path(folder))
    return int(states[-1].name.removeprefix("step-")) if states else 0


def _states(folder: Path) -> list[Path]:
    """List the complete states, oldest first. A state's name has a suffix until it is complete. A user's copies have other names."""
    return sorted(folder.glob("step-" + 8 * "[0-9]"))


def _state(policy: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
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
