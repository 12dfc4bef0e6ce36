"""plan.py: will it fit? Answered from shapes alone, before any weight is loaded. And MFU, from the same shapes.

    plan = plan_training(cfg.policy, gpus=4, tokens=24576, visual_tokens=16384, reference=True)
    plan.check(gpu_gib=80)              # prints a row per use of memory and the sum; refuses what cannot fit

Estimates for FSDP2 with bf16 computation and fp32 master weights. Where there is a GPU, its memory counts, not `plan.gpu_gib`.
"""

import functools
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, Qwen3VLConfig

from runtime.checks import find_checkpoint, on_the_hub
from runtime.config import ConfigError
from runtime.distributed import local_size, print0, world_size
from runtime.policy import Policy, empty
from runtime.settings import PolicyConfig

GIB = 1 << 30
# Dense bf16 TFLOPS of a GPU, by a part of the name that CUDA gives it.
PEAK_TFLOPS = {"H100": 989, "H200": 989, "B200": 2250, "A100": 312}

_LARGE_TOWER = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]}
_SMALL_TOWER = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}


def _published(hidden: int, intermediate: int, layers: int, heads: int, tower: dict, tied: bool) -> dict:
    """Return Qwen3VLConfig's arguments for one size of the family."""
    text = {"vocab_size": 151936, "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    rope = {"rope_type": "default", "rope_theta": 5_000_000, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    text |= {"num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128, "rope_parameters": rope}
    vision = tower | {"num_heads": 16, "out_hidden_size": hidden, "num_position_embeddings": 2304}
    return {"text_config": text, "vision_config": vision, "tie_word_embeddings": tied}


# Checkpoints that --dry-run knows without their config.json.
PUBLISHED = {
    "Qwen/Qwen3-VL-8B-Instruct": _published(4096, 12288, 36, 32, _LARGE_TOWER, tied=False),
    "Qwen/Qwen3-VL-2B-Instruct": _published(2048, 6144, 28, 16, _SMALL_TOWER, tied=True),
}
PUBLISHED["ParaVT/ParaVT-8B"] = PUBLISHED["Qwen/Qwen3-VL-8B-Instruct"]


@dataclass(frozen=True)
class Plan:
    """Where the memory of one GPU goes at its fullest moment: bytes by use."""

    title: str
    held: dict[str, float]  # weights and the optimizer's state, whatever the micro-batches
    used: dict[str, float]  # the rest

    @property
    def gib(self) -> float:
        return sum((self.held | self.used).values()) / GIB

    def check(self, gpu_gib: float) -> None:
        """Print the uses and their sum, and warn where the card has less. Refuse weights and optimizer that do not fit."""
        if torch.cuda.is_available():
            gpu_gib = torch.cuda.get_device_properties(0).total_memory / GIB
        print0(self.title)
        for use, size in (self.held | self.used).items():
            print0(f"  {use:<58}{size / GIB:>8.1f} GiB")
        print0(f"  {'sum':<58}{self.gib:>8.1f} GiB of {gpu_gib:.4g}")
        if self.gib > gpu_gib:
            print0("  WARNING: may run out of memory; see which rows are the largest")
        held = sum(self.held.values()) / GIB
        if held > gpu_gib:
            told = f"{self.title}: weights and optimizer state, {held:.1f} GiB, do not fit into {gpu_gib:.4g} GiB"
            raise ConfigError(f"{told}; take more GPUs, or a smaller model")


@functools.cache
def meta_policy(cfg: PolicyConfig) -> Policy:
    """Build the policy without memory: in the sizes of its checkpoint or, before that is trained, of its family."""
    name = cfg.checkpoint
    if cfg.family and not Path(name).exists() and not on_the_hub(name):
        name = cfg.family
    if name in PUBLISHED:
        return empty(Qwen3VLConfig(**PUBLISHED[name]), cfg)
    return empty(AutoConfig.from_pretrained(find_checkpoint(name, weights=False)), cfg)


def count(module: nn.Module, trained: bool = False) -> int:
    """Count weights; `trained`: those that train."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad or not trained)


def plan_training(cfg: PolicyConfig, gpus: int, tokens: int, visual_tokens: int = 0, reference: bool = False) -> Plan:
    """Plan a training GPU of `gpus`, at micro-batches of `tokens`, of which `visual_tokens` come from frames."""
    policy = meta_policy(cfg)
    text, trained = policy.text.config, count(policy, trained=True)
    layers, head = text.num_hidden_layers, text.vocab_size * text.hidden_size

    # held from the first step to the last
    held = {"weights, gradients, AdamW's two moments: fp32, sharded": 16 * trained / gpus}
    if policy.vision_frozen:
        held["frozen vision tower, bf16, whole"] = 2 * (count(policy) - trained)
    if reference:
        held["reference policy, bf16, sharded (none if grpo.kl_coef = 0)"] = 2 * trained / gpus

    # kept from the forward pass to the backward pass; a block keeps of a token norms, heads (queries; keys, which suffixes
    # repeat) and the MLP, in bf16 and fp32, or by checkpointing only its input
    used = {"embeddings and head, bf16, whole": 2 * (trained - count(policy.text.layers))}
    heads = (12 * text.num_attention_heads + 26 * text.num_key_value_heads) * text.head_dim
    block = 16 * text.hidden_size + heads + 8 * text.intermediate_size  # bytes
    if cfg.activation_checkpointing:
        used[f"inputs of {layers} blocks at {tokens} tokens"] = 2 * text.hidden_size * layers * tokens
    else:
        used[f"activations of {layers} blocks at {tokens} tokens"] = block * layers * tokens
    levels = 1 + len(policy.vision.config.deepstack_visual_indexes)
    used["visual features"] = 2 * levels * text.hidden_size * visual_tokens

    # One after the other: only the larger counts. A block in its backward pass: two gathered, one gradient in bf16 and one
    # in fp32, what it computes again; and the head's gradient, which waits for the end.
    backward = 10 * count(policy.text.layers[0]) + block * tokens + 2 * head
    # Logits in fp32, their exponentials, the gradients of both; and the head's gradient in fp32.
    logits = 16 * min(cfg.logit_chunk, tokens) * text.vocab_size + 4 * head
    used["at the fullest moment: a block's backward pass, or logits"] = max(backward, logits)

    if gpus == 1:  # FSDP2 divides it into another tensor, on a stream of its own, whose memory the allocator keeps
        used["gradient of embeddings and head once more, fp32"] = 4 * (trained - count(policy.text.layers))
    # A guess: CUDA, NCCL and cuBLAS hold about 3 GiB that PyTorch's allocator does not count, kernels 1 GiB that it counts.
    used["overhead: CUDA, NCCL, kernels, and 5 % between tensors"] = 4 * GIB + 0.05 * sum((held | used).values())
    return Plan(f"training, each of {gpus} GPUs", held, used)


def plan_rl(cfg) -> list[Plan]:
    """Plan an RLConfig's GPUs: those that train and, where they are others, those that sample."""
    rollout, policy = cfg.rollout, meta_policy(cfg.policy)
    # A micro-batch full of frames, or one episode that fills its context.
    longest = max(cfg.grpo.train_tokens, rollout.max_context)
    training = plan_training(cfg.policy, cfg.plan.gpus, longest, cfg.grpo.train_tokens, reference=cfg.grpo.kl_coef > 0)
    if rollout.urls:
        return [training]

    # A server's share of the episodes: of each two full turns, and of a group once the prompt (10 more tokens a frame).
    tasks = math.ceil(cfg.batch_tasks / max(1, world_size() // local_size()))  # of one node
    episodes = min(rollout.concurrency * cfg.plan.gpus, tasks * cfg.grpo.group_size)
    rows = math.ceil(episodes * rollout.tensor_parallel / max(1, len(rollout.server_gpus)))
    frame = cfg.visual.frame_tokens(*cfg.visual.frame_size(1280, 720)) + 10
    tokens = cfg.visual.overview_frames * frame // cfg.grpo.group_size + 2 * rollout.max_new_tokens
    engine = plan_engine(rollout, policy.text.config, 2 * count(policy), rows, tokens)
    if not rollout.server_gpus or set(rollout.server_gpus) & set(range(cfg.plan.gpus)):
        title, held = "training and engine on the same GPU", training.held | engine.held
        return [Plan(title, held, training.used | engine.used)]
    return [training, engine]


def plan_engine(rollout, text, weights: float, rows: int, tokens: int) -> Plan:
    """Plan a GPU that samples: of a RolloutConfig's servers, whose keys are of so many rows; or of the engine in this process.
    `text`: the language model's config; `weights`: their bytes. The GPUs of a server share both."""
    share = rollout.tensor_parallel
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kv = 2 * 2 * text.num_hidden_layers * text.num_key_value_heads * head / share  # bytes of a token's keys and values
    if rollout.server_gpus:
        used = {f"KV cache of {rows} x {tokens} tokens": kv * rows * tokens, "CUDA graphs and activations": 6 * GIB}
    else:
        used = {"KV cache of a batch, twice while it is read": 2 * kv * rollout.max_batch_tokens}
    title = f"engine, each of {len(rollout.server_gpus) or 1} GPUs"
    return Plan(title, {"weights of the engine, bf16": weights / share}, used)


def utilisation(cfg: PolicyConfig, tokens: int, seconds: float, gpus: int) -> dict[str, float]:
    """Return MFU, the useful share of the GPUs' peak, where that peak is known; nothing on a CPU."""
    for part, tflops in PEAK_TFLOPS.items():
        if torch.cuda.is_available() and part in torch.cuda.get_device_name():
            policy = meta_policy(cfg)
            # 2 N for the forward pass of a token and 4 N for its backward pass. Attention adds little at these lengths.
            flops = 6 * (count(policy, trained=True) - policy.text.embed_tokens.weight.numel()) * tokens
            return {"mfu": flops / (gpus * tflops * 1e12 * seconds)}
    return {}
