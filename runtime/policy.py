"""policy.py: a vision-language model as a function from bundles to log-probs, on one CPU core or on many GPUs.

    init_distributed()                                       # distributed.py: torchrun's ranks, or a single process
    policy = load(PolicyConfig(checkpoint), renderer.never_sampled)
    features = policy.vision_features(bundles)               # frozen vision only: run the tower once for all later passes
    scores = policy(bundles, temperature=0.7, features=features)      # log-probs [N] of the tokens whose mask is 1
    (-(scores.logprobs * advantages).sum() / tokens_of_all_ranks).backward()
    norm = optimizer_step(policy, optimizer, OptimConfig(), step, steps)

Training, the reference and the check of the engine's log-probs use the same forward. It packs several bundles into one
flat sequence in which a group's prompt appears once (packing.py). Logits exist for one chunk of target tokens at a time,
even in the backward pass.

The ranks of a node shard the text blocks with FSDP2, and each node has all shards (HSDP). Gradients are summed over all
ranks, so a loss divides by the token count of all ranks. Every forward runs the same collectives, even without bundles,
images or targets.

Deliberately missing: tensor and sequence parallelism, LoRA, the video channel, attention dropout.

Shapes: L tokens of the packed sequence, N target tokens, H hidden, V vocabulary, D DeepStack levels, M visual tokens.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import (
    AttentionInterface,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
)
from transformers.conversion_mapping import get_model_conversion_mapping

from runtime import packing
from runtime.config import ConfigError
from runtime.distributed import local_size, own_device, refuse_not_finite, world_size
from runtime.packing import Bundle
from runtime.video import Clip
from runtime.visual import read_json

# The classes that this code trains and samples from, by the `model_type` in config.json.
MODELS = {"qwen3_vl": Qwen3VLForConditionalGeneration, "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration}

# Keep a block's inputs and recompute the rest in the backward pass. The RNG state can go: nothing here draws random numbers.
recompute = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
HEAD_BLOCK = 16_384  # rows of the head whose gradient is computed at once


@dataclass(frozen=True)
class PolicyConfig:
    """Which model to train, and how to store and run it."""

    checkpoint: str
    """A Hugging Face folder of a dense Qwen3-VL or a Qwen2.5-VL, or its name on the hub."""
    family: str = ""
    """The model that --dry-run plans for while `checkpoint` does not exist yet: a folder or a published name."""
    freeze: tuple[Literal["vision"], ...] = ("vision",)
    """[vision]: the vision tower does not train; every rank holds all of it. []: everything trains."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Dtype of the computation. auto: bf16 on a GPU, fp32 on a CPU. Master weights and gradient sums are always fp32."""
    activation_checkpointing: bool = True
    """Store only each block's input, and recompute the rest in the backward pass."""
    logit_chunk: int = 1024
    """Target tokens whose logits are in memory at the same time (several fp32 copies of the vocabulary each)."""


@dataclass(frozen=True)
class OptimConfig:
    """AdamW, its schedule and the clipping of gradients."""

    lr: float = 2e-6
    schedule: Literal["constant", "cosine"] = "constant"
    """The rate after the warm-up. cosine reaches zero one step after the last."""
    warmup: float = 0.0
    """Share of the steps in which the rate rises from zero."""
    weight_decay: float = 0.01
    betas: tuple[float, ...] = (0.9, 0.999)
    max_grad_norm: float = 1.0

    def __post_init__(self):
        betas = len(self.betas) == 2 and max(self.betas) < 1
        if self.lr <= 0 or self.max_grad_norm <= 0 or not 0 <= self.warmup < 1 or not betas:
            raise ValueError(f"{self}: needs lr > 0, max_grad_norm > 0, 0 <= warmup < 1 and two betas below 1")


# ------------------------------------------------------------------------------------------------ the policy


class PolicyOutput(NamedTuple):
    """The scores of all target tokens, in the order bundle, suffix, token. (FSDP2 finds tensors inside a NamedTuple.)"""

    logprobs: Tensor  # fp32 [N]
    entropies: Tensor  # fp32 [N], of the masked softmax; a metric, without gradient


class Policy(nn.Module):
    """The model and its scoring, as FSDP2's root module: embeddings and head are gathered when log-probs are computed."""

    def __init__(self, model: PreTrainedModel, cfg: PolicyConfig, never_sampled: Sequence[int] = ()):
        super().__init__()
        self.model, self.cfg, self.never_sampled = model, cfg, list(never_sampled)
        self.dtype = torch.float32  # dtype of computation; `load` sets it and the kernel
        self.kernel = "sdpa"  # attention kernel: "sdpa" needs one call per segment, the others one call in all
        self.vision_frozen = "vision" in cfg.freeze
        self.patch, self.merge = self.vision.config.patch_size, self.vision.config.spatial_merge_size
        packing.prepare_tower(self.vision)

    @property
    def vision(self) -> nn.Module:
        return self.model.model.visual

    @property
    def text(self) -> nn.Module:
        return self.model.model.language_model

    @property
    def device(self) -> torch.device:
        return self.text.norm.weight.device

    def vision_features(self, bundles: Sequence[Bundle]) -> list[Tensor]:
        """Run the vision tower: return the features [1 + D, M, H] of each bundle, for `forward`. Only for a frozen tower."""
        return [self._run_tower(bundle.clips) for bundle in bundles]

    def forward(
        self, bundles: Sequence[Bundle], temperature: float = 1.0, features: Sequence[Tensor] | None = None
    ) -> PolicyOutput:
        """Score every token whose mask is 1, given the tokens before it: log softmax(logits / temperature)."""
        # pack the bundles into one sequence, each prompt once
        packed = packing.pack_bundles(bundles, self.model.config.image_token_id, self.patch * self.merge)
        forbidden = set(self.never_sampled) & set(packed.targets.tolist())
        if forbidden:
            raise ValueError(f"tokens {sorted(forbidden)} have mask 1, but they are never sampled")
        predictors = torch.from_numpy(packed.predictors).to(self.device)  # [N]
        targets = torch.from_numpy(packed.targets).to(self.device)  # [N]

        # run the vision tower, unless the caller passes its features
        if features is None:
            visual = self._run_tower([clip for bundle in bundles for clip in bundle.clips])  # [1 + D, M, H]
        else:
            visual = torch.cat([self._run_tower([]), *features], dim=1)  # [1 + D, 0, H] first: there may be no bundle

        # run the text model, and keep the hidden states that predict a target
        hidden = packing.run_text_model(self.model, packed, visual, self.kernel, use_cache=False)[predictors]  # [N, H]

        # score chunk by chunk
        head = self.model.lm_head.weight
        chunk = self.cfg.logit_chunk
        return PolicyOutput(*_ChunkedLogprobs.apply(hidden, head, targets, self._logits, temperature, chunk))

    def _run_tower(self, clips: Sequence[Clip]) -> Tensor:
        """Return [1 + D, M, H]: the embeddings that replace the frames' pads, then the D DeepStack levels."""
        nothing = not any(len(clip.pixels) for clip in clips)
        if nothing and self.vision_frozen:
            levels = packing.count_levels(self.vision)
            return torch.zeros(levels, 0, self.text.config.hidden_size, dtype=self.dtype, device=self.device)
        if nothing:
            # Every rank must run the tower in every pass. Show it a blank frame and use no row of it: zero gradients.
            side = self.patch * self.merge
            clips = [Clip(np.zeros((1, side, side, 3), np.uint8), (0.0,))]
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.vision_frozen):
            visual = packing.encode_frames(self.vision, clips, self.patch, self.merge, self.kernel)
        return visual[:, :0] if nothing else visual

    def _logits(self, hidden: Tensor, head: Tensor, temperature: float) -> Tensor:
        """Return the logits of one chunk, divided by the temperature: [n, H], [V, H] -> fp32 [n, V]."""
        logits = packing.matmul_fp32(hidden, head.t())  # [n, V]
        logits /= temperature
        # The engine bans these ids, so mask them here as well. Not with -inf: the entropy would have 0 * inf, a nan.
        logits[:, self.never_sampled] = torch.finfo(torch.float32).min
        return logits


class _ChunkedLogprobs(torch.autograd.Function):
    """Computes log-probs and entropies chunk by chunk, so that logits exist for one chunk at a time. The backward pass computes
    them again.

    Logits and the head's gradient are fp32 even if everything else is bf16. (With `recompute`, autograd would sum the head's
    gradient over the chunks in bf16. A chunk's gradient is small beside that sum, and bf16 would round it away.)"""

    @staticmethod
    def forward(ctx, hidden, head, targets, logits_of, temperature, chunk):
        ctx.save_for_backward(hidden, head, targets)
        ctx.logits_of, ctx.temperature, ctx.chunk = logits_of, temperature, chunk
        logprobs, entropies = [], []
        # Without targets, `split` returns one empty chunk, so the head is still part of the graph.
        for h, t in zip(hidden.split(chunk), targets.split(chunk)):
            chunk_logprobs, chunk_entropies = _logprobs_and_entropies(logits_of(h, head, temperature), t)
            logprobs.append(chunk_logprobs)
            entropies.append(chunk_entropies)
        logprobs, entropies = torch.cat(logprobs), torch.cat(entropies)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx, grad, _):
        hidden, head, targets = ctx.saved_tensors
        hidden_grads = []
        head_grad = torch.zeros_like(head, dtype=torch.float32)
        chunks = list(zip(hidden.split(ctx.chunk), targets.split(ctx.chunk), grad.split(ctx.chunk)))
        for h, t, g in reversed(chunks):  # in autograd's order
            logits = ctx.logits_of(h, head, ctx.temperature)
            logits_grad = _logits_grad(logits, t, g, ctx.temperature).to(head.dtype)  # [n, V]
            hidden_grads.append(logits_grad @ head)
            # Add block by block: the product of all rows would be a second head in fp32.
            for rows, columns in zip(head_grad.split(HEAD_BLOCK), logits_grad.split(HEAD_BLOCK, dim=1)):
                rows += packing.matmul_fp32(columns.t(), h)
            del logits, logits_grad, columns  # before the logits of the next chunk
        return torch.cat(hidden_grads[::-1]), head_grad.to(head.dtype), None, None, None, None


def _logprobs_and_entropies(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies of one chunk: fp32 [n, V], [n] -> [n], [n]."""
    total = logits.logsumexp(-1)
    logprobs = logits.gather(-1, targets[:, None])[:, 0] - total
    # H = log Z - sum_v p(v) logit(v)
    p = (logits - total[:, None]).exp_()
    return logprobs, total - p.mul_(logits).sum(-1)


def _logits_grad(logits: Tensor, targets: Tensor, grad: Tensor, temperature: float) -> Tensor:
    """Turn the logits of one chunk into their gradient, in place. `grad`: that of the log-probs, [n]."""
    # d log p(t) / d logit(v) = (1[v = t] - p(v)) / temperature
    logits -= logits.logsumexp(-1, keepdim=True)
    logits.exp_().mul_(-grad[:, None])
    logits.scatter_add_(-1, targets[:, None], grad[:, None])
    return logits.div_(temperature)


# ------------------------------------------------------------------------------------------------ loading


def checkpoint_dir(checkpoint: str | Path, only: Sequence[str] | None = None) -> Path:
    """Return a checkpoint's folder. Download a model from the Hugging Face hub, or only its files that match `only`."""
    if Path(checkpoint).is_dir():
        return Path(checkpoint)
    try:  # all ranks call it: the hub's cache locks each file, so each file is downloaded once
        return Path(snapshot_download(str(checkpoint), allow_patterns=only))
    except (HFValidationError, OSError) as error:  # OSError: every error of the hub
        raise FileNotFoundError(f"{checkpoint}: neither a folder nor a model on the hub: {error}") from None


def read_config(path: Path) -> PreTrainedConfig:
    """Read a checkpoint's config.json. Refuse other model families, also those that transformers does not know."""
    family = (read_json(path / "config.json") or {}).get("model_type")
    if family not in MODELS:
        told = f"{path} is a {family!r} model"
        raise ConfigError(f"{told}; this code trains {' and '.join(MODELS)}: docs/add_a_base_model.md")
    return AutoConfig.from_pretrained(path)


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


def dtype_of(cfg: PolicyConfig, train: bool = True) -> torch.dtype:
    """Return the dtype of computation. Raise ConfigError if training in it is impossible here."""
    bf16 = cfg.dtype == "bf16" or (cfg.dtype == "auto" and own_device().type == "cuda")
    if train and bf16 and not dist.is_initialized():  # FSDP2 implements mixed precision
        raise ConfigError(f"policy.dtype = {cfg.dtype!r}: training in bf16 needs torchrun or a GPU; on a CPU use fp32")
    return torch.bfloat16 if bf16 else torch.float32


def load(cfg: PolicyConfig, never_sampled: Sequence[int] = (), train: bool = True) -> Policy:
    """Build the policy on the meta device, shard it, and let every rank read its own rows of each weight.

    `train=False` builds the reference policy: its weights are in the dtype of computation and have no gradient."""
    path = checkpoint_dir(cfg.checkpoint)
    device = own_device()
    dtype = dtype_of(cfg, train)

    # build the shapes, and set the dtypes
    policy = build_on_meta(read_config(path), cfg, never_sampled)
    policy.dtype = dtype
    policy.kernel = packing.pick_kernel(device, dtype)
    if not train:
        policy.requires_grad_(False).to(dtype)
    if policy.vision_frozen:
        policy.vision.to(dtype)

    # wrap the blocks for recomputation, then shard
    blocks = list(policy.text.layers)
    if not policy.vision_frozen:
        blocks += policy.vision.blocks
    if cfg.activation_checkpointing and train:
        for block in blocks:  # before FSDP2 wraps them, so that its hooks run once per pass
            block.forward = functools.partial(recompute, block.forward)
    if dist.is_initialized():
        shard(policy, blocks, dtype, device)

    # allocate memory, and read the weights into it
    policy.to_empty(device=device)
    policy.model.tie_weights()
    # No checkpoint holds the rotary buffers, and to_empty leaves garbage in them, so compute them.
    policy.text.rotary_emb = type(policy.text.rotary_emb)(policy.text.config).to(device)
    rotary = policy.vision.rotary_pos_emb
    for name, buffer in list(rotary.named_buffers()):  # one buffer; from transformers 5.24 on, two equal ones
        angles = torch.arange(len(buffer), dtype=torch.float32)
        setattr(rotary, name, (1 / 10_000 ** (angles / len(angles))).to(device))
    try:
        _read_weights(policy.model, path)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: its weights cannot be read: {error}") from None
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
        fully_shard(unit, mesh=mesh, mp_policy=precision, reshard_after_forward=True, ignored_params=whole)
        unit.set_gradient_divide_factor(1.0)  # sum the gradients of all ranks
        unit.set_force_sum_reduction_for_comms(True)


def build_on_meta(model_config: PreTrainedConfig, cfg: PolicyConfig, never_sampled: Sequence[int] = ()) -> Policy:
    """Build the policy on the meta device, which allocates no memory."""
    for part in (model_config, model_config.text_config, model_config.vision_config):
        part.dtype = torch.float32  # for master weights; transformers would use the dtype that config.json names
    AttentionInterface.register("group_packed", packing.group_packed_attention)
    model_config.text_config._attn_implementation = "group_packed"
    model_config.vision_config._attn_implementation = "sdpa"
    with torch.device("meta"):
        policy = Policy(MODELS[model_config.model_type](model_config), cfg, never_sampled)
    if policy.vision_frozen:
        policy.vision.requires_grad_(False)
    return policy


def _read_weights(model: nn.Module, path: Path) -> None:
    """Fill every parameter from the safetensors files. If it is sharded, read only this rank's rows."""
    ours = {published: name for name, published in published_names(model).items()}
    missing = dict(model.named_parameters())  # a tied head is listed once
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for stored_name in tensors.keys():  # noqa: SIM118
                name = ours.get(stored_name, stored_name)
                if name not in missing:
                    continue
                parameter = missing.pop(name).detach()
                stored = tensors.get_slice(stored_name)
                if stored.get_shape() != list(parameter.shape):  # slicing would hide surplus rows
                    raise ConfigError(f"{file}: {name} is {stored.get_shape()}, in config.json {list(parameter.shape)}")
                start = 0
                if isinstance(parameter, DTensor):  # FSDP2 gives rank r the r-th of equal chunks of rows
                    mesh = parameter.device_mesh["ranks"]  # of one node
                    rows = math.ceil(len(parameter) / mesh.size())
                    start = mesh.get_local_rank() * rows
                    parameter = parameter.to_local()
                if len(parameter):
                    parameter.copy_(stored[start : start + len(parameter)])
    if missing:
        raise ConfigError(f"{path} lacks {len(missing)} weights: {', '.join(sorted(missing)[:3])} ...")


# ------------------------------------------------------------------------------------------------ optimizer


def make_optimizer(policy: Policy, cfg: OptimConfig) -> torch.optim.AdamW:
    """Build AdamW over the trainable weights. Norms and biases get no weight decay."""
    matrices = [p for p in policy.parameters() if p.requires_grad and p.ndim > 1]
    vectors = [p for p in policy.parameters() if p.requires_grad and p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": cfg.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    # On a GPU, use the fused step: foreach would briefly hold another copy of the weights.
    fused = policy.device.type == "cuda"
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=tuple(cfg.betas), fused=fused, foreach=not fused)


def learning_rate(cfg: OptimConfig, step: int, steps: int) -> float:
    """Return the learning rate of a step in 0 ... steps - 1. It depends only on the step, so resuming needs no state."""
    rising = cfg.warmup * steps
    if step < rising:
        return cfg.lr * (step + 1) / (rising + 1)
    if cfg.schedule == "constant":
        return cfg.lr
    return cfg.lr * 0.5 * (1 + math.cos(math.pi * (step - rising) / (steps - rising)))


def clip_gradients(policy: nn.Module, largest: float) -> float:
    """Scale the gradient to a norm of at most `largest`. Return the norm before, the same on every rank."""
    trained = [p for p in policy.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in trained])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    torch.nn.utils.clip_grads_with_norm_(trained, largest, norm)
    return norm.item()


def optimizer_step(policy: nn.Module, optimizer: torch.optim.AdamW, cfg: OptimConfig, step: int, steps: int) -> float:
    """Clip the gradient, update the weights, zero the gradient and return its norm. Skip the update if that is not finite."""
    norm = clip_gradients(policy, cfg.max_grad_norm)
    if math.isfinite(norm):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(cfg, step, steps)
        optimizer.step()
    optimizer.zero_grad()
    return norm
