"""policy.py: Qwen3-VL as a function from bundles to log-probs, on one CPU core or on many GPUs.

    init_distributed()                                       # distributed.py: torchrun's ranks, or a single process
    policy = load(PolicyConfig(checkpoint), renderer.never_sampled)
    features = policy.encode(bundles)                        # frozen vision only: once, for every later pass
    scores = policy(bundles, temperature=0.7, features=features)      # log-probs [N] of the tokens whose mask is 1
    (-(scores.logprobs * advantages).sum() / tokens_of_all_ranks).backward()
    norm = optimizer_step(policy, optimizer, OptimConfig(), step, steps)

One forward serves the training pass, the reference and the check of the engine's log-probs. It reads several bundles
as one flat sequence in which the prompt of a group stands once (packing.py), so frames and prompt are computed once for
all G rollouts. Logits exist for one chunk of target tokens at a time, in the backward pass too.

Ranks shard the text blocks with FSDP2; gradients of all ranks add up (a loss divides by the count of all ranks), and
each forward runs the same collectives whatever it is given: no bundles, no images, no targets.

Deliberately missing: tensor and sequence parallelism, LoRA, the video channel, attention dropout.

Shapes: L tokens of the packed sequence, N target tokens, H hidden, V vocabulary, D DeepStack levels, M visual tokens.
"""

import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoConfig, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from runtime.config import ConfigError
from runtime.contract import Bundle, patchify
from runtime.distributed import checkpoint_dir, device
from runtime.packing import KeyLayout, group_packed_attention, pack_bundles, pick_kernel
from runtime.settings import OptimConfig, PolicyConfig
from runtime.video import Frames

# Keep the inputs, compute the rest again in the backward pass; nothing here draws random numbers.
recompute = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


# ------------------------------------------------------------------------------------------------ the policy


class Scores(NamedTuple):
    """Per target token, in the order bundle, suffix, token. (A NamedTuple, since FSDP2 looks for tensors in it.)"""

    logprobs: Tensor  # fp32 [N]
    entropies: Tensor  # fp32 [N], of the masked softmax; a metric, without gradient


class Policy(nn.Module):
    """The root module, so that FSDP2 has gathered embeddings and head when log-probs are computed."""

    def __init__(self, model: Qwen3VLForConditionalGeneration, cfg: PolicyConfig, never_sampled: Sequence[int] = ()):
        super().__init__()
        self.model, self.cfg, self.never_sampled = model, cfg, list(never_sampled)
        self.dtype, self.kernel = torch.float32, "sdpa"  # of computation
        self.vision_frozen = "vision" in cfg.freeze
        self.patch, self.merge = self.vision.config.patch_size, self.vision.config.spatial_merge_size
        # Patches come flattened, so their convolution is a matrix product; Conv3d is several times slower.
        embed = self.vision.patch_embed
        embed.forward = lambda x: F.linear(x.to(embed.proj.weight.dtype), embed.proj.weight.flatten(1), embed.proj.bias)

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
        """Visual features [1 + D, M, H] of each bundle, for `forward`; they hold as long as the vision tower does."""
        if not self.vision_frozen:
            raise RuntimeError("features of a vision tower that trains belong to one pass: let forward compute them")
        return [self._see(bundle.frames) for bundle in bundles]

    def forward(
        self, bundles: Sequence[Bundle], temperature: float = 1.0, features: Sequence[Tensor] | None = None
    ) -> Scores:
        """log softmax(logits / temperature) of every token whose mask is 1, given what stands before it."""
        image_pad = self.model.config.image_token_id
        packed = pack_bundles(bundles, image_pad, self.patch * self.merge)
        if forbidden := sorted(set(self.never_sampled) & set(packed.targets.tolist())):
            raise ValueError(f"tokens {forbidden} have mask 1, but they are never sampled: their mask must be 0")
        where = self.device
        ids, positions, sources, targets = (
            torch.from_numpy(x).to(where) for x in (packed.ids, packed.positions, packed.sources, packed.targets)
        )
        if features is None:
            visual = self._see([clip for bundle in bundles for clip in bundle.frames])
        else:
            visual = torch.cat([self._see([]), *features], dim=1)  # [1 + D, M, H]

        pads = (ids == image_pad)[None]  # [1, L]
        hidden = self.text.embed_tokens(ids)[None]  # [1, L, H]
        hidden = hidden.masked_scatter(pads[..., None], visual[0].to(hidden.dtype))
        hidden = self.text(
            inputs_embeds=hidden,
            # Three rows: with a fourth, transformers takes restarted positions for separate sequences.
            position_ids=positions[:, None],  # [3, 1, L]
            visual_pos_masks=pads,
            deepstack_visual_embeds=list(visual[1:]),
            key_layout=KeyLayout(packed.segments, self.kernel, where),
            use_cache=False,
        ).last_hidden_state[0, sources]  # [N, H]

        # An empty split is one empty chunk: without targets the head still takes part in the graph.
        chunks = zip(hidden.split(self.cfg.logit_chunk), targets.split(self.cfg.logit_chunk))
        scored = [recompute(self._score, *chunk, temperature) for chunk in chunks]
        return Scores(*(torch.cat(column) for column in zip(*scored)))

    def _see(self, clips: Sequence[Frames]) -> Tensor:
        """Frames -> [1 + D, M, H]: the embeddings that replace their pads, then the D DeepStack levels."""
        vision, text = self.vision, self.text
        count = sum(len(clip.pixels) for clip in clips)
        if not count:
            if self.vision_frozen:
                levels = 1 + len(vision.deepstack_visual_indexes)
                return torch.zeros(levels, 0, text.config.hidden_size, dtype=self.dtype, device=self.device)
            # The tower runs on every rank in every pass; of a blank frame no row is used, and its gradients are zero.
            side = self.patch * self.merge
            clips = [Frames(np.zeros((1, side, side, 3), np.uint8), (0.0,))]
        patches, grid = (torch.from_numpy(x).to(self.device) for x in patchify(clips, self.patch, self.merge))
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.vision_frozen):
            seen = vision(patches, grid_thw=grid)
        visual = torch.stack([seen.pooler_output, *seen.deepstack_features])
        return visual if count else visual[:, :0]

    def _score(self, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of one chunk: [n, H], [n] -> [n], [n]."""
        logits = self.model.lm_head(hidden).float() / temperature  # [n, V]
        # The engine bans these ids, so its softmax has no mass on them either. Finite, since 0 * inf is nan.
        logits[:, self.never_sampled] = torch.finfo(torch.float32).min
        total = logits.logsumexp(-1)
        logprobs = logits.gather(-1, targets[:, None])[:, 0] - total
        with torch.no_grad():  # H = log Z - sum_v p(v) logit(v)
            entropies = total - ((logits - total[:, None]).exp() * logits).sum(-1)
        return logprobs, entropies


# ------------------------------------------------------------------------------------------------ loading


def load(cfg: PolicyConfig, never_sampled: Sequence[int] = (), train: bool = True) -> Policy:
    """Build the policy on the meta device, shard it, then let every rank read its own rows of each weight.

    `train=False` holds the weights in the dtype of computation and without gradient: the reference policy."""
    path, where = checkpoint_dir(cfg.checkpoint), device()
    bf16 = cfg.dtype == "bf16" or (cfg.dtype == "auto" and where.type == "cuda")
    dtype = torch.bfloat16 if bf16 else torch.float32
    if train and bf16 and not dist.is_initialized():
        raise ConfigError(
            f"policy.dtype = {cfg.dtype!r}: training in bf16 keeps its fp32 master weights in FSDP2: call init_distributed() "
            "before load, which needs torchrun or a GPU; on a CPU use fp32"
        )
    policy = empty(AutoConfig.from_pretrained(path), cfg, never_sampled)
    policy.dtype, policy.kernel = dtype, pick_kernel(cfg.attention, where, dtype)
    if not train:
        policy.requires_grad_(False).to(dtype)
    if policy.vision_frozen:
        policy.vision.to(dtype)
    blocks = [*policy.text.layers, *([] if policy.vision_frozen else policy.vision.blocks)]
    if cfg.activation_checkpointing and train:
        for block in blocks:  # inside the unit that FSDP2 wraps, so that its hooks run once per pass
            block.forward = functools.partial(recompute, block.forward)
    if dist.is_initialized():
        mesh = dist.init_device_mesh(where.type, (dist.get_world_size(),))
        whole = set(policy.vision.parameters()) if policy.vision_frozen else set()
        # Without cast_forward_inputs the vision tower's rotary angles stay fp32, as in transformers.
        precision = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
        for unit in (*blocks, policy):
            # The root reshards too: left gathered, it would miss the optimizer's next step after a pass without backward.
            fully_shard(unit, mesh=mesh, mp_policy=precision, reshard_after_forward=True, ignored_params=whole)
            unit.set_gradient_divide_factor(1.0)  # gradients of all ranks add up
            unit.set_force_sum_reduction_for_comms(True)
    policy.to_empty(device=where)
    policy.model.tie_weights()
    # to_empty leaves garbage in the buffers that no checkpoint holds.
    policy.text.rotary_emb = type(policy.text.rotary_emb)(policy.text.config, where)
    policy.vision.rotary_pos_emb = type(policy.vision.rotary_pos_emb)(policy.vision.rotary_pos_emb.dim).to(where)
    _read_weights(policy.model, path)
    return policy


def empty(model_config: Qwen3VLConfig, cfg: PolicyConfig, never_sampled: Sequence[int] = ()) -> Policy:
    """The policy's shapes, without memory."""
    if model_config.model_type != "qwen3_vl":
        raise ConfigError(
            f"{cfg.checkpoint} is a {model_config.model_type!r}, this code runs dense Qwen3-VL: 'qwen3_vl'"
        )
    for part in (model_config, model_config.text_config, model_config.vision_config):
        part.dtype = torch.float32  # of master weights: transformers would build each part in the dtype that it names
    AttentionInterface.register("group_packed", group_packed_attention)
    model_config.text_config._attn_implementation = "group_packed"
    model_config.vision_config._attn_implementation = "sdpa"
    with torch.device("meta"):
        policy = Policy(Qwen3VLForConditionalGeneration(model_config), cfg, never_sampled)
    if policy.vision_frozen:
        policy.vision.requires_grad_(False)
    return policy


def _read_weights(model: nn.Module, path: Path) -> None:
    """Fill every parameter from safetensors; of a sharded one, read this rank's rows only."""
    index = path / "model.safetensors.index.json"
    files = [path / "model.safetensors"]
    if index.exists():
        files = [path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    parameters = dict(model.named_parameters())  # a tied head is listed once
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in [name for name in tensors.keys() if name in parameters]:  # noqa: SIM118
                parameter, stored, start = parameters.pop(name).detach(), tensors.get_slice(name), 0
                if stored.get_shape() != list(parameter.shape):
                    raise ConfigError(
                        f"{file}: shape of {name}: {stored.get_shape()}, by config.json {[*parameter.shape]}"
                    )
                if isinstance(parameter, DTensor):  # FSDP2 gives rank r the r-th of equal chunks of rows
                    rows = math.ceil(len(parameter) / parameter.device_mesh.size())
                    start, parameter = parameter.device_mesh.get_local_rank() * rows, parameter.to_local()
                if len(parameter):
                    parameter.copy_(stored[start : start + len(parameter)])
    if parameters:
        raise ConfigError(f"{path} lacks {len(parameters)} weights: {', '.join(sorted(parameters)[:3])} ...")


# ------------------------------------------------------------------------------------------------ optimizer


def make_optimizer(policy: Policy, cfg: OptimConfig) -> torch.optim.AdamW:
    trained = [p for p in policy.parameters() if p.requires_grad]
    groups = [  # norms and biases have nothing to decay towards
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": cfg.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    # On a GPU fused: foreach would hold another copy of the weights for a moment.
    kernel = {"fused" if policy.device.type == "cuda" else "foreach": True}
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=tuple(cfg.betas), **kernel)


def learning_rate(cfg: OptimConfig, step: int, steps: int) -> float:
    """Of step 0 ... steps - 1: a function of the step alone, so that a resumed run needs no state for it."""
    rising = cfg.warmup * steps
    if step < rising:
        return cfg.lr * (step + 1) / (rising + 1)
    if cfg.schedule == "constant":
        return cfg.lr
    return cfg.lr * 0.5 * (1 + math.cos(math.pi * (step - rising) / (steps - rising)))


def clip_gradients(policy: nn.Module, largest: float) -> float:
    """Scale the gradient to a norm of at most `largest`; returns the norm before, the same on every rank."""
    trained = [p for p in policy.parameters() if p.grad is not None]  # none, where no rank had anything to learn from
    norm = torch.nn.utils.get_total_norm([p.grad for p in trained])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    torch.nn.utils.clip_grads_with_norm_(trained, largest, norm)
    return norm.item()


def optimizer_step(
    policy: nn.Module, optimizer: torch.optim.Optimizer, cfg: OptimConfig, step: int, steps: int
) -> float:
    """Clip, step, forget the gradient; returns its norm. If that is not finite, weights and moments stay as they are."""
    norm = clip_gradients(policy, cfg.clip)
    if math.isfinite(norm):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(cfg, step, steps)
        optimizer.step()
    optimizer.zero_grad()
    return norm
