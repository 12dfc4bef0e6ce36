"""policy.py: Qwen3-VL as a function from bundles to log-probs, on one CPU core or on many GPUs.

    init_distributed()                                       # distributed.py: torchrun's ranks, or a single process
    policy = load(PolicyConfig(checkpoint), renderer.never_sampled)
    features = policy.encode(bundles)                        # frozen vision only: once, for every later pass
    scores = policy(bundles, temperature=0.7, features=features)      # log-probs [N] of the tokens whose mask is 1
    (-(scores.logprobs * advantages).sum() / tokens_of_all_ranks).backward()
    norm = optimizer_step(policy, optimizer, OptimConfig(), step, steps)

One forward serves the training pass, the reference and the check of the engine's log-probs. It reads several bundles
as one flat sequence in which the prompt of a group stands once (packing.py). Logits exist for one chunk of target tokens
at a time, even in the backward pass.

The ranks of a node shard the text blocks with FSDP2, and each node has all shards (HSDP). Gradients of all ranks add up
(a loss divides by the count of all ranks). Each forward runs the same collectives whatever it is given: no bundles, no
images, no targets.

Deliberately missing: tensor and sequence parallelism, LoRA, the video channel, attention dropout.

Shapes: L tokens of the packed sequence, N target tokens, H hidden, V vocabulary, D DeepStack levels, M visual tokens.
"""

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoConfig, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from runtime import packing
from runtime.config import ConfigError
from runtime.distributed import checkpoint_dir, device, local_size, refuse_not_finite, world_size
from runtime.render import Bundle
from runtime.settings import OptimConfig, PolicyConfig
from runtime.video import Frames

# Keep the inputs, compute the rest again in the backward pass; nothing here draws random numbers.
recompute = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


# ------------------------------------------------------------------------------------------------ the policy


class TokenScores(NamedTuple):
    """Per target token, in the order bundle, suffix, token. (A NamedTuple, since FSDP2 looks for tensors in it.)"""

    logprobs: Tensor  # fp32 [N]
    entropies: Tensor  # fp32 [N], of the masked softmax; a metric, without gradient


class Policy(nn.Module):
    """The root module, so that FSDP2 has gathered embeddings and head when log-probs are computed."""

    def __init__(self, model: Qwen3VLForConditionalGeneration, cfg: PolicyConfig, never_sampled: Sequence[int] = ()):
        super().__init__()
        self.model, self.cfg, self.never_sampled = model, cfg, list(never_sampled)
        self.dtype = torch.float32  # of computation; `load` sets it and the kernel
        self.kernel = "sdpa"  # what computes attention: "sdpa" in a call per segment, the others in one call for all
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

    def encode(self, bundles: Sequence[Bundle]) -> list[Tensor]:
        """Return the visual features [1 + D, M, H] of each bundle, for `forward`. Only for a frozen tower."""
        return [self._encode_frames(bundle.frames) for bundle in bundles]

    def forward(
        self, bundles: Sequence[Bundle], temperature: float = 1.0, features: Sequence[Tensor] | None = None
    ) -> TokenScores:
        """Score every token whose mask is 1, given what stands before it: log softmax(logits / temperature)."""
        # lay the bundles out as one sequence, each prompt once
        packed = packing.pack_bundles(bundles, self.model.config.image_token_id, self.patch * self.merge)
        forbidden = set(self.never_sampled) & set(packed.targets.tolist())
        if forbidden:
            raise ValueError(f"tokens {sorted(forbidden)} have mask 1, but they are never sampled")
        sources = torch.from_numpy(packed.sources).to(self.device)  # [N]
        targets = torch.from_numpy(packed.targets).to(self.device)  # [N]

        # encode the frames, unless the caller has done so
        if features is None:
            visual = self._encode_frames([clip for bundle in bundles for clip in bundle.frames])  # [1 + D, M, H]
        else:
            visual = torch.cat([self._encode_frames([]), *features], dim=1)

        # run the text model, and keep what predicts a target
        hidden = packing.run_text_model(self.model, packed, visual, self.kernel, use_cache=False)[sources]  # [N, H]

        # score chunk by chunk
        score = functools.partial(self._score, temperature=temperature)
        head = self.model.lm_head.weight
        return TokenScores(*_ChunkedScores.apply(hidden, head, targets, score, self.cfg.logit_chunk))

    def _encode_frames(self, clips: Sequence[Frames]) -> Tensor:
        """Return [1 + D, M, H]: the embeddings that replace the frames' pads, then the D DeepStack levels."""
        nothing = not any(len(clip.pixels) for clip in clips)
        if nothing and self.vision_frozen:
            levels = 1 + len(self.vision.deepstack_visual_indexes)
            return torch.zeros(levels, 0, self.text.config.hidden_size, dtype=self.dtype, device=self.device)
        if nothing:
            # The tower runs on every rank in every pass; of a blank frame no row is used, and its gradients are zero.
            side = self.patch * self.merge
            clips = [Frames(np.zeros((1, side, side, 3), np.uint8), (0.0,))]
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.vision_frozen):
            visual = packing.encode_frames(self.vision, clips, self.patch, self.merge, self.kernel)
        return visual[:, :0] if nothing else visual

    def _score(self, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies of one chunk: fp32 [n, V], [n] -> [n], [n]."""
        logits = logits / temperature
        # The engine bans these ids, so its softmax has no mass on them either. Finite, since 0 * inf is nan.
        logits[:, self.never_sampled] = torch.finfo(torch.float32).min
        total = logits.logsumexp(-1)
        logprobs = logits.gather(-1, targets[:, None])[:, 0] - total
        with torch.no_grad():  # H = log Z - sum_v p(v) logit(v)
            entropies = total - ((logits - total[:, None]).exp() * logits).sum(-1)
        return logprobs, entropies


class _ChunkedScores(torch.autograd.Function):
    """Score chunk by chunk, and again chunk by chunk in the backward pass, so that logits exist for one chunk at a time.

    Logits and the head's gradient are fp32 even where all else is bf16. (`recompute` would let autograd sum the head's
    gradient over the chunks in the head's dtype: bf16 loses what is small beside the sum.)"""

    @staticmethod
    def forward(ctx, hidden, head, targets, score, chunk):
        ctx.save_for_backward(hidden, head, targets)
        ctx.score, ctx.chunk = score, chunk
        logprobs, entropies = [], []
        # An empty split is one empty chunk: without targets the head still takes part in the graph.
        for h, t in zip(hidden.split(chunk), targets.split(chunk)):
            chunk_logprobs, chunk_entropies = score(packing.matmul_fp32(h, head.t()), t)
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
        for h, t, g in reversed(chunks):  # the order in which autograd would do it
            logits = packing.matmul_fp32(h, head.t()).requires_grad_()  # [n, V]
            with torch.enable_grad():
                logprobs, _ = ctx.score(logits, t)
            logits_grad = torch.autograd.grad(logprobs, logits, g)[0].to(head.dtype)
            hidden_grads.append(logits_grad @ head)
            head_grad += packing.matmul_fp32(logits_grad.t(), h)
        return torch.cat(hidden_grads[::-1]), head_grad.to(head.dtype), None, None, None


# ------------------------------------------------------------------------------------------------ loading


def dtype_of(cfg: PolicyConfig, train: bool = True) -> torch.dtype:
    """Return the dtype of computation; ConfigError if nothing can train in it here."""
    bf16 = cfg.dtype == "bf16" or (cfg.dtype == "auto" and device().type == "cuda")
    if train and bf16 and not dist.is_initialized():  # mixed precision lives in FSDP2
        raise ConfigError(f"policy.dtype = {cfg.dtype!r}: training in bf16 needs torchrun or a GPU; on a CPU use fp32")
    return torch.bfloat16 if bf16 else torch.float32


def load(cfg: PolicyConfig, never_sampled: Sequence[int] = (), train: bool = True) -> Policy:
    """Build the policy on the meta device, shard it, then let every rank read its own rows of each weight.

    `train=False` holds the weights in the dtype of computation and without gradient: the reference policy."""
    path = checkpoint_dir(cfg.checkpoint)
    where = device()
    dtype = dtype_of(cfg, train)

    # shapes and dtypes
    policy = empty(AutoConfig.from_pretrained(path), cfg, never_sampled)
    policy.dtype = dtype
    policy.kernel = packing.pick_kernel(where, dtype)
    if not train:
        policy.requires_grad_(False).to(dtype)
    if policy.vision_frozen:
        policy.vision.to(dtype)

    # blocks that are recomputed, then sharded
    blocks = list(policy.text.layers)
    if not policy.vision_frozen:
        blocks += policy.vision.blocks
    if cfg.activation_checkpointing and train:
        for block in blocks:  # inside the unit that FSDP2 wraps, so that its hooks run once per pass
            block.forward = functools.partial(recompute, block.forward)
    if dist.is_initialized():
        shard(policy, blocks, dtype, where)

    # memory, and the weights into it
    policy.to_empty(device=where)
    policy.model.tie_weights()
    # to_empty leaves garbage in the buffers that no checkpoint holds.
    policy.text.rotary_emb = type(policy.text.rotary_emb)(policy.text.config).to(where)
    rotary = policy.vision.rotary_pos_emb
    for name, buffer in list(rotary.named_buffers()):  # one, or from transformers 5.24 on two that are alike
        angles = torch.arange(len(buffer), dtype=torch.float32)
        setattr(rotary, name, (1 / 10_000 ** (angles / len(angles))).to(where))
    try:
        _read_weights(policy.model, path)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: its weights cannot be read: {error}") from None
    refuse_not_finite(dict(policy.model.named_parameters()), str(path))
    return policy


def shard(policy: Policy, blocks: Sequence[nn.Module], dtype: torch.dtype, where: torch.device) -> None:
    """Shard the weights over the ranks of a node, each block as a unit and the rest as the root; a frozen tower stays whole.
    Every node has all shards, so that weights never travel between nodes: gradients do (`sum_over_nodes`)."""
    if local_size() == world_size():
        mesh = dist.init_device_mesh(where.type, (world_size(),), mesh_dim_names=("ranks",))
    else:
        shape = (world_size() // local_size(), local_size())
        mesh = dist.init_device_mesh(where.type, shape, mesh_dim_names=("nodes", "ranks"))
    whole = set(policy.vision.parameters()) if policy.vision_frozen else set()
    # Without cast_forward_inputs the vision tower's rotary angles stay fp32, as in transformers.
    precision = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    for unit in (*blocks, policy):
        # The root reshards too: left gathered, it would miss the optimizer's next step after a pass without backward.
        fully_shard(unit, mesh=mesh, mp_policy=precision, reshard_after_forward=True, ignored_params=whole)
        unit.set_gradient_divide_factor(1.0)  # gradients of all ranks add up
        unit.set_force_sum_reduction_for_comms(True)


def sum_over_nodes(policy: nn.Module, now: bool) -> None:
    """Choose whether the next backward passes add up gradients over all nodes or only over the ranks of each. Once per
    update is enough: in its last pass."""
    if isinstance(policy, FSDPModule):
        policy.set_requires_all_reduce(now)


def empty(model_config: Qwen3VLConfig, cfg: PolicyConfig, never_sampled: Sequence[int] = ()) -> Policy:
    """Build the policy's shapes, without memory."""
    if model_config.model_type != "qwen3_vl":
        raise ConfigError(f"{cfg.checkpoint} is a {model_config.model_type!r}, this code runs dense Qwen3-VL")
    for part in (model_config, model_config.text_config, model_config.vision_config):
        part.dtype = torch.float32  # of master weights: transformers would build each part in the dtype that it names
    AttentionInterface.register("group_packed", packing.group_packed_attention)
    model_config.text_config._attn_implementation = "group_packed"
    model_config.vision_config._attn_implementation = "sdpa"
    with torch.device("meta"):
        policy = Policy(Qwen3VLForConditionalGeneration(model_config), cfg, never_sampled)
    if policy.vision_frozen:
        policy.vision.requires_grad_(False)
    return policy


def _read_weights(model: nn.Module, path: Path) -> None:
    """Fill every parameter from safetensors; of a sharded one, read this rank's rows only."""
    missing = dict(model.named_parameters())  # a tied head is listed once
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if name not in missing:
                    continue
                parameter = missing.pop(name).detach()
                stored = tensors.get_slice(name)
                if stored.get_shape() != list(parameter.shape):  # slices would hide rows too many
                    raise ConfigError(f"{file}: {name} is {stored.get_shape()}, by config.json {list(parameter.shape)}")
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
    """Build AdamW over what trains. Norms and biases have nothing to decay towards."""
    matrices = [p for p in policy.parameters() if p.requires_grad and p.ndim > 1]
    vectors = [p for p in policy.parameters() if p.requires_grad and p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": cfg.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    # On a GPU fused: foreach would hold another copy of the weights for a moment.
    fused = policy.device.type == "cuda"
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=tuple(cfg.betas), fused=fused, foreach=not fused)


def learning_rate(cfg: OptimConfig, step: int, steps: int) -> float:
    """Return the rate of step 0 ... steps - 1: a function of the step alone, so that a resumed run needs no state."""
    rising = cfg.warmup * steps
    if step < rising:
        return cfg.lr * (step + 1) / (rising + 1)
    if cfg.schedule == "constant":
        return cfg.lr
    return cfg.lr * 0.5 * (1 + math.cos(math.pi * (step - rising) / (steps - rising)))


def clip_gradients(policy: nn.Module, largest: float) -> float:
    """Scale the gradient to a norm of at most `largest`; return the norm before, the same on every rank."""
    trained = [p for p in policy.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in trained])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    torch.nn.utils.clip_grads_with_norm_(trained, largest, norm)
    return norm.item()


def optimizer_step(policy: nn.Module, optimizer: torch.optim.AdamW, cfg: OptimConfig, step: int, steps: int) -> float:
    """Clip, step, forget the gradient; return its norm. If that is not finite, weights and moments stay unchanged."""
    norm = clip_gradients(policy, cfg.max_grad_norm)
    if math.isfinite(norm):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(cfg, step, steps)
        optimizer.step()
    optimizer.zero_grad()
    return norm
