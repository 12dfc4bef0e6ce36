"""policy.py: a vision-language model as a function from bundles to log-probs, on one CPU core or on many GPUs.

    policy = load_policy(PolicyConfig(checkpoint), renderer.never_sampled)     # checkpoints.py
    output = policy(bundles, temperature=0.7)                 # log-probs [N] of the tokens whose mask is 1
    (-(output.logprobs * output.loss_weights).sum() / tokens_of_all_ranks).backward()

    pack_bundles      bundles -> one flat sequence, in which a group's prompt appears once (packing.py)
    encode_frames     -> frames' features [1 + D, M, H]; the reference takes those of a frozen vision tower from the policy
    run_text_model    -> hidden states [L, H], with attention that keeps rows apart
    _ChunkedLogprobs  -> log-probs [N]; logits exist for one chunk of target tokens at a time, even in the backward pass

Training, the reference and the check of the engine's log-probs use the same forward. inprocess.py runs the same tower and text
model.

The ranks of a node shard the text blocks with FSDP2 (checkpoints.py), and each node has all shards (HSDP). Gradients are summed
over all ranks, so a loss divides by the token count of all ranks. Every forward runs the same collectives, even without
bundles, images or targets.

Deliberately missing: tensor and sequence parallelism, LoRA, the video channel, attention dropout.

Shapes: L tokens of the packed sequence, N target tokens, H hidden, V vocabulary, D DeepStack levels, M visual tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    PreTrainedConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLTextModel,
    Qwen3VLForConditionalGeneration,
    Qwen3VLTextModel,
    Qwen3VLVisionModel,
)
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from runtime.config import ConfigError
from runtime.distributed import own_device
from runtime.packing import Bundle, Packed, Segment, pack_bundles
from runtime.video import Clip
from runtime.visual import patchify

# The classes that this code trains and samples from, and those of their two parts.
Model = Qwen3VLForConditionalGeneration | Qwen2_5_VLForConditionalGeneration
VisionTower = Qwen3VLVisionModel | Qwen2_5_VisionTransformerPretrainedModel
TextModel = Qwen3VLTextModel | Qwen2_5_VLTextModel
MODELS: dict[str, type[Model]] = {  # by `model_type` in config.json
    "qwen3_vl": Qwen3VLForConditionalGeneration,
    "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration,
}
LOGIT_CHUNK = 1024  # target tokens whose logits are in memory at once: several fp32 copies of the vocabulary each
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
    compile: Literal["auto", "always", "never"] = "auto"
    """Fuse the small kernels of the text blocks: about 10 % less time per update, after a minute at the first step and some for
    much shorter sequences. It needs a C compiler. auto: on a GPU."""


# ------------------------------------------------------------------------------------------------ the policy


class PolicyOutput(NamedTuple):
    """Log-prob and entropy of each target token, and its row's loss weight and behaviour log-prob, in the order bundle, row, token.
    (FSDP2 finds tensors inside a NamedTuple.)"""

    logprobs: Tensor  # fp32 [N]
    entropies: Tensor  # fp32 [N], of the masked softmax; a metric, without gradient
    loss_weights: Tensor  # fp32 [N]
    behaviour_logprobs: Tensor  # fp32 [N]
    features: Tensor | None = None  # [1 + D, M, H] of a frozen tower, for the reference's pass over the same bundles


class Policy(nn.Module):
    """The model and its scoring, as FSDP2's root module: embeddings and head are gathered when log-probs are computed."""

    def __init__(self, model: Model, cfg: PolicyConfig, never_sampled: Sequence[int] = ()):
        super().__init__()
        self.model = model
        self.cfg = cfg
        self.never_sampled = list(never_sampled)
        self.dtype = torch.float32  # dtype of computation; `load_policy` sets it and the kernel
        self.kernel = "sdpa"  # attention kernel: "sdpa" needs one call per segment, the others one call in all
        self.vision_frozen = "vision" in cfg.freeze
        patch, merge = self.vision.config.patch_size, self.vision.config.spatial_merge_size
        assert isinstance(patch, int)  # square patches, as in all published models
        self.patch, self.merge = patch, merge
        prepare_tower(self.vision)

    @property
    def vision(self) -> VisionTower:
        return self.model.model.visual

    @property
    def text(self) -> TextModel:
        return self.model.model.language_model

    @property
    def device(self) -> torch.device:
        return self.text.norm.weight.device

    def forward(
        self, bundles: Sequence[Bundle], temperature: float = 1.0, features: Tensor | None = None
    ) -> PolicyOutput:
        """Score every token whose mask is 1, given the tokens before it: log softmax(logits / temperature).
        `features`: from the output of another policy with the same frozen tower."""
        # Pack the bundles into one sequence, each prompt once.
        packed = pack_bundles(bundles, self.model.config.image_token_id, self.patch * self.merge)
        predictors = torch.from_numpy(packed.predictors).to(self.device)  # [N]
        targets = torch.from_numpy(packed.targets).to(self.device)  # [N]

        # Run the vision tower, unless another policy did.
        if features is None:
            features = self.run_tower(bundles)  # [1 + D, M, H]

        # Run the text model, and keep the hidden states that predict a target.
        hidden = run_text_model(self.model, packed, features, self.kernel, use_cache=False)[predictors]  # [N, H]

        # Score chunk by chunk.
        head = self.model.lm_head.weight
        logprobs, entropies = _ChunkedLogprobs.apply(
            hidden, head, targets, temperature, self.never_sampled, LOGIT_CHUNK
        )
        loss_weights = torch.from_numpy(packed.loss_weights).to(self.device)  # [N]
        behaviour_logprobs = torch.from_numpy(packed.behaviour_logprobs).to(self.device)  # [N]
        features = features if self.vision_frozen else None
        return PolicyOutput(logprobs, entropies, loss_weights, behaviour_logprobs, features)

    def run_tower(self, bundles: Sequence[Bundle]) -> Tensor:
        """Return the features [1 + D, M, H] of all frames of the bundles, in order."""
        if self.vision_frozen:
            return self._run_frozen_tower(bundles)
        clips = [clip for bundle in bundles for clip in bundle.clips]
        if any(map(len, clips)):
            return encode_frames(self.vision, clips, self.patch, self.merge, self.kernel)
        # Its blocks are sharded, so every rank must run it in every pass. Without frames, show it a blank one and use no row
        # of it: zero gradients.
        side = self.patch * self.merge
        blank = Clip(np.zeros((1, side, side, 3), np.uint8), (0.0,))
        return encode_frames(self.vision, [blank], self.patch, self.merge, self.kernel)[:, :0]

    @torch.no_grad()
    def _run_frozen_tower(self, bundles: Sequence[Bundle]) -> Tensor:
        """Encode one bundle after another, which bounds the memory. Each rank has all of the tower, so none waits."""
        size = (count_levels(self.vision), 0, self.text.config.hidden_size)
        features = [torch.zeros(size, dtype=self.dtype, device=self.device)]  # there may be no frames
        for bundle in bundles:
            if any(map(len, bundle.clips)):
                features.append(encode_frames(self.vision, bundle.clips, self.patch, self.merge, self.kernel))
        return torch.cat(features, dim=1)


# ------------------------------------------------------------------------------------------------ the vision tower


def prepare_tower(vision: VisionTower) -> None:
    """Give the vision tower our attention, and embed its flattened patches with a matrix product, since Conv3d is several
    times slower."""
    # transformers (`is_flash_attention_requested` in Qwen3VLVisionAttention.forward) passes the frames' ends to functions whose
    # name contains "flash", and calls others once per frame. Set the name after construction: a constructor that reads "flash"
    # looks for the flash-attn package.
    AttentionInterface.register("frames_flash", frames_flash_attention)
    vision.config._attn_implementation = "frames_flash"
    embed = vision.patch_embed
    embed.forward = lambda x: F.linear(x.to(embed.proj.weight.dtype), embed.proj.weight.flatten(1), embed.proj.bias)  # type: ignore[method-assign, assignment]  # of this module only


def encode_frames(vision: VisionTower, clips: Sequence[Clip], patch: int, merge: int, kernel: str) -> Tensor:
    """Return [1 + D, M, H]: the embeddings that replace the frames' pads, then the vision tower's D DeepStack levels."""
    patches, grid = patchify(clips, patch, merge, vision.device)
    longest = int(grid[:, 1:].prod(dim=1).max())  # computed on the host: on the GPU, each layer would wait for it
    # Merge consecutive frames of one size into one entry, (frames, rows, columns). The tower then computes their positions
    # once. Each frame still attends only to itself.
    runs, counts = grid.unique_consecutive(dim=0, return_counts=True)
    runs[:, 0] = counts
    encoded = vision(patches, grid_thw=runs.to(vision.device), frame_kernel=kernel, longest_frame=longest)
    return torch.stack([encoded.pooler_output, *getattr(encoded, "deepstack_features", [])])


def count_levels(vision: VisionTower) -> int:
    """Return 1 + D. A tower without DeepStack, as Qwen2.5-VL's, has D = 0."""
    return 1 + len(getattr(vision.config, "deepstack_visual_indexes", []))


def frames_flash_attention(
    module, query, key, value, attention_mask, scaling, cu_seq_lens_q, frame_kernel: str, longest_frame: int, **_
):
    """Attend within each frame, many frames in one call: [1, heads, patches, size] -> [1, patches, heads, size].
    `encode_frames` passes the kernel and the number of patches of the largest frame. In most blocks of Qwen2.5-VL's tower,
    `cu_seq_lens_q` has the ends of windows instead of frames."""
    if frame_kernel != "sdpa":
        qkv = [x[0].transpose(0, 1) for x in (query, key, value)]  # [patches, heads, size]
        ends = (cu_seq_lens_q, cu_seq_lens_q, longest_frame, longest_frame)
        return attend_in_one_call(frame_kernel, qkv, ends, scaling, causal=False)[None], None

    # SDPA needs sequences of one length in a batch, so batch consecutive frames (or windows) of equal size.
    out = []
    start = 0
    lengths, counts = cu_seq_lens_q.diff().unique_consecutive(return_counts=True)
    for length, count in zip(lengths.tolist(), counts.tolist()):
        stop = start + count * length
        q, k, v = (x[0, :, start:stop].unflatten(1, (count, length)).transpose(0, 1) for x in (query, key, value))
        attended = F.scaled_dot_product_attention(q, k, v, scale=scaling)  # [count, heads, length, size]
        out.append(attended.transpose(1, 2).flatten(0, 1))  # [count * length, heads, size]
        start = stop
    return torch.cat(out)[None], None


# ------------------------------------------------------------------------------------------------ the text model


def run_text_model(model: Model, packed: Packed, visual: Tensor | None, kernel: str, **cache) -> Tensor:
    """Run the text model over a packed sequence. Return its last hidden states [L, H]. `visual` [1 + D, M, H] comes
    from `encode_frames`; None: no frames."""
    text = model.model.language_model
    device = text.norm.weight.device
    ids = torch.from_numpy(packed.ids).to(device)[None]  # [1, L]
    embeds = text.embed_tokens(ids)  # [1, L, H]
    levels = {}
    if visual is not None:  # replace the frames' pads by their embeddings
        pads = ids == model.config.image_token_id  # [1, L]
        embeds = embeds.masked_scatter(pads[..., None], visual[0].to(embeds.dtype))
        if len(visual) > 1:  # DeepStack adds its levels there
            levels = {"visual_pos_masks": pads, "deepstack_visual_embeds": list(visual[1:])}
    return text(
        inputs_embeds=embeds,
        # Three rows: time, height, width. transformers reads a fourth as text positions, and splits where they restart.
        position_ids=torch.from_numpy(packed.positions).to(device)[:, None],  # [3, 1, L]
        key_layout=lay_out_keys(packed.segments, kernel, device),
        **levels,
        **cache,
    ).last_hidden_state[0]


@torch.compiler.disable  # it calls a kernel, or loops over segments; the code around it is compiled
def group_packed_attention(module, query, key, value, attention_mask, scaling, key_layout: "KeyLayout", **_):
    """Implement transformers' attention interface for the text blocks: [1, heads, L, size] -> [1, L, heads, size].
    `run_text_model` passes `key_layout`, and transformers passes it on to every block."""
    return key_layout.attend(query, key, value, scaling), None


class SegmentLayout:
    """Calls SDPA once per segment, with the keys of its prompt and its own. Each row needs a mask."""

    def __init__(self, segments: Sequence[Segment], device: torch.device):
        self.segments = segments
        self.masks: list[Tensor | None] = []  # by segment; None: causal
        for segment in segments:
            prompt = segment.prompt_stop - segment.prompt_start
            own = segment.stop - segment.start
            mask = None
            if prompt:  # see all of it, and the row up to the query (`is_causal` aligns top-left)
                mask = torch.ones(own, prompt + own, dtype=torch.bool, device=device).tril(prompt)
            self.masks.append(mask)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        out = []
        for segment, mask in zip(self.segments, self.masks):
            own, prompt = slice(segment.start, segment.stop), slice(segment.prompt_start, segment.prompt_stop)
            keys = torch.cat([key[:, :, prompt], key[:, :, own]], dim=2)
            values = torch.cat([value[:, :, prompt], value[:, :, own]], dim=2)
            causal = mask is None
            attended = F.scaled_dot_product_attention(
                query[:, :, own], keys, values, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=True
            )  # [1, heads, stop - start, size]
            out.append(attended.transpose(1, 2))
        return torch.cat(out, dim=1)


class VarlenLayout:
    """Runs a varlen kernel once for all segments. It needs their keys side by side, so each row repeats its prompt's."""

    def __init__(self, segments: Sequence[Segment], kernel: str, device: torch.device):
        self.kernel = kernel
        keys = []
        query_ends, key_ends = [0], [0]  # of the segments, one after another
        for segment in segments:
            keys.append(segment.key_positions())
            query_ends.append(query_ends[-1] + segment.stop - segment.start)
            key_ends.append(key_ends[-1] + len(keys[-1]))
        self.keys = torch.from_numpy(np.concatenate(keys)).to(device)
        self.ends = (
            torch.tensor(query_ends, dtype=torch.int32, device=device),
            torch.tensor(key_ends, dtype=torch.int32, device=device),
            max(segment.stop - segment.start for segment in segments),  # longest query
            max(map(len, keys)),  # longest key
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [L, heads, size]
        qkv = query, key[self.keys], value[self.keys]
        return attend_in_one_call(self.kernel, qkv, self.ends, scaling, causal=True)[None]


KeyLayout = SegmentLayout | VarlenLayout  # the keys that each segment's queries see


def lay_out_keys(segments: Sequence[Segment], kernel: str, device: torch.device) -> KeyLayout:
    """Return the layout that the kernel needs. All text blocks of a forward pass share it."""
    if kernel == "sdpa":
        return SegmentLayout(segments, device)
    return VarlenLayout(segments, kernel, device)


def attend_in_one_call(kernel: str, qkv: Sequence[Tensor], ends: tuple, scaling: float, causal: bool) -> Tensor:
    """Run one kernel over all segments. `ends`: where queries and keys end, and the longest of each. A causal mask is aligned
    bottom-right: the last query sees all keys."""
    if kernel == "flash":
        from flash_attn import flash_attn_varlen_func

        return flash_attn_varlen_func(*qkv, *ends, causal=causal, softmax_scale=scaling)
    from torch.nn.attention.varlen import varlen_attn

    window = (-1, 0) if causal else (-1, -1)
    q, k, v = qkv
    attended = varlen_attn(q, k, v, *ends, scale=scaling, window_size=window, enable_gqa=True)
    assert isinstance(attended, Tensor)  # a tuple only with `return_aux`
    return attended


# ------------------------------------------------------------------------------------------------ the head


def matmul_fp32(left: Tensor, right: Tensor) -> Tensor:
    """Multiply [m, k] by [k, n] with an fp32 result. bf16 has 8 bits: it would round a logit above 16 by up to 0.06."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)  # not differentiable
    return left.float() @ right.float()


def compute_logits(hidden: Tensor, head: Tensor, temperature: float, never_sampled: list[int]) -> Tensor:
    """Return the logits of one chunk, divided by the temperature: [n, H], [V, H] -> fp32 [n, V]."""
    logits = matmul_fp32(hidden, head.t())  # [n, V]
    logits /= temperature
    # The engine bans these ids, so mask them here as well. Not with -inf: the entropy would have 0 * inf, a nan.
    logits[:, never_sampled] = torch.finfo(torch.float32).min
    return logits


class _ChunkedLogprobs(torch.autograd.Function):
    """Computes log-probs and entropies chunk by chunk, so that logits exist for one chunk at a time. The backward pass computes
    them again.

    Entropies have no gradient: they are only logged. Logits and the head's gradient are fp32 even if everything else is bf16.
    (With torch's checkpointing, autograd would sum the head's gradient over the chunks in bf16. A chunk's gradient is small
    beside that sum, and bf16 would round it away.)"""

    @staticmethod
    def forward(ctx, hidden, head, targets, temperature, never_sampled, chunk):
        ctx.save_for_backward(hidden, head, targets)
        ctx.temperature, ctx.never_sampled, ctx.chunk = temperature, never_sampled, chunk
        logprobs, entropies = [], []
        # Without targets, `split` returns one empty chunk, so the head is still part of the graph.
        for h, t in zip(hidden.split(chunk), targets.split(chunk)):
            logits = compute_logits(h, head, temperature, never_sampled)
            chunk_logprobs, chunk_entropies = _logprobs_and_entropies(logits, t)
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
            logits = compute_logits(h, head, ctx.temperature, ctx.never_sampled)
            logits_grad = _logits_grad(logits, t, g, ctx.temperature).to(head.dtype)  # [n, V]
            hidden_grads.append(logits_grad @ head)
            # Add block by block: the product of all rows would be a second head in fp32.
            for rows, columns in zip(head_grad.split(HEAD_BLOCK), logits_grad.split(HEAD_BLOCK, dim=1)):
                rows += matmul_fp32(columns.t(), h)
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


# ------------------------------------------------------------------------------------------------ building


def pick_kernel(device: torch.device, dtype: torch.dtype) -> str:
    """Return the fastest kernel that runs here: FlashAttention 2, torch's own, or one SDPA call per segment."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return "sdpa"
    try:  # flash-attn-4 installs a folder of the same name, so look for the function itself
        from flash_attn import flash_attn_varlen_func  # noqa: F401

        return "flash"
    except ImportError:
        return "varlen"


def dtype_of(cfg: PolicyConfig, train: bool = True) -> torch.dtype:
    """Return the dtype of computation. Raise ConfigError if training in it is impossible here."""
    bf16 = cfg.dtype == "bf16" or (cfg.dtype == "auto" and own_device().type == "cuda")
    if train and bf16 and not dist.is_initialized():  # FSDP2 implements mixed precision
        raise ConfigError(f"policy.dtype = {cfg.dtype!r}: training in bf16 needs torchrun or a GPU; on a CPU use fp32")
    return torch.bfloat16 if bf16 else torch.float32


def build_on_meta(model_config: PreTrainedConfig, cfg: PolicyConfig, never_sampled: Sequence[int] = ()) -> Policy:
    """Build the policy on the meta device, which allocates no memory."""
    for part in (model_config, model_config.text_config, model_config.vision_config):
        part.dtype = torch.float32  # for master weights; transformers would use the dtype that config.json names
    AttentionInterface.register("group_packed", group_packed_attention)
    model_config.text_config._attn_implementation = "group_packed"
    model_config.vision_config._attn_implementation = "sdpa"
    with torch.device("meta"):
        policy = Policy(MODELS[model_config.model_type](model_config), cfg, never_sampled)
    if policy.vision_frozen:
        policy.vision.requires_grad_(False)
    return policy
