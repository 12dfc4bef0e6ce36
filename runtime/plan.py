"""plan.py: does it fit? Estimates of a GPU's memory from shapes alone, before any weight is loaded.

    plan = plan_training(cfg.policy, gpus=4, tokens=24576, reference=True)
    plan.show(gpu_gib=80)               # prints a row per use of memory and the sum
    plan.require_room(gpu_gib=80)       # refuses a model whose weights and optimizer state alone do not fit

sft.py plans with `plan_training`, RL with `rl.plan_rl`. Both print the plan when they start on a GPU, and in a dry run. The
estimates are for FSDP2 with bf16 computation and fp32 master weights.
"""

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from torch import nn
from transformers import AutoConfig

from runtime.checkpoints import find_checkpoint, on_the_hub, read_config
from runtime.config import ConfigError
from runtime.distributed import print0
from runtime.engine import EngineConfig
from runtime.policy import LOGIT_CHUNK, Policy, PolicyConfig, build_on_meta
from runtime.visual import VisualContract

GIB = 1 << 30
FP32, BF16 = 4, 2  # bytes of a number


@dataclass(frozen=True)
class PlanConfig:
    """The node that --dry-run plans for. In a run, torchrun decides how many GPUs train. On a machine with a GPU, that GPU's memory
    is the limit instead of `gpu_gib`."""

    gpus: int = 8
    """Training GPUs."""
    gpu_gib: float = 80.0


@dataclass(frozen=True)
class Plan:
    """The memory of one GPU at its peak: bytes by use."""

    title: str
    held: dict[str, float]  # weights and optimizer state: independent of the micro-batch
    used: dict[str, float]  # everything else

    @property
    def total_gib(self) -> float:
        """The sum of all uses."""
        return sum((self.held | self.used).values()) / GIB

    def show(self, gpu_gib: float) -> None:
        """Print the uses and their sum. Warn if the sum exceeds the GPU."""
        print0(self.title)
        for use, size in (self.held | self.used).items():
            print0(f"  {use:<58}{size / GIB:>8.1f} GiB")
        print0(f"  {'sum':<58}{self.total_gib:>8.1f} GiB of {gpu_gib:.4g}")
        if self.total_gib > gpu_gib:
            print0("  WARNING: may run out of memory; see which rows are the largest")

    def require_room(self, gpu_gib: float) -> None:
        """Refuse a model whose weights and optimizer alone exceed the GPU."""
        held = sum(self.held.values()) / GIB
        if held > gpu_gib:
            raise ConfigError(
                f"{self.title}: weights and optimizer state, {held:.1f} GiB, do not fit into {gpu_gib:.4g} GiB; "
                "take more GPUs, or a smaller model"
            )


# ------------------------------------------------------------------------------------------------ a GPU that trains


def plan_training(cfg: PolicyConfig, gpus: int, tokens: int, reference: bool = False) -> Plan:
    """Plan one of `gpus` training GPUs, for micro-batches of `tokens`."""
    policy = meta_policy(cfg)
    text = policy.text.config
    layers, hidden, vocabulary = text.num_hidden_layers, text.hidden_size, text.vocab_size
    trained = count(policy, trained=True)
    frozen = count(policy) - trained
    one_block = count(policy.text.layers[0])
    outside_blocks = trained - count(policy.text.layers)
    activations = kept_by_block(policy)
    # With checkpointing, a block keeps only the hidden state that it reads, until it is computed again.
    kept = BF16 * hidden if cfg.activation_checkpointing else activations
    chunk = min(LOGIT_CHUNK, tokens)

    held = {}
    held["weights, gradients, AdamW's two moments: fp32, sharded"] = trained * 4 * FP32 / gpus
    held["frozen vision tower, bf16, whole"] = frozen * BF16
    if reference:
        held["reference policy, bf16, sharded (none if grpo.kl_coef = 0)"] = trained * BF16 / gpus

    used: dict[str, float] = {}
    used[f"inputs of {layers} blocks at {tokens} tokens"] = layers * tokens * kept
    used["embeddings and head, bf16, whole"] = outside_blocks * BF16  # FSDP2's root unit stays gathered
    # The block's weights, the next block's, and the gradient in bf16 and in fp32.
    used["recomputation of one block"] = one_block * (3 * BF16 + FP32) + tokens * activations
    # Each logit and its exponential.
    used["logits of a chunk, gradient of the head"] = chunk * vocabulary * 2 * FP32 + vocabulary * hidden * BF16
    # A guess: CUDA, NCCL and cuBLAS hold about 3 GiB outside PyTorch's allocator, and kernels about 1 GiB inside it.
    # On one GPU, PyTorch's peak was 15 to 33 % below the planned sum (results/gpu.md).
    used["overhead: CUDA, NCCL, kernels, and 5 % between tensors"] = 4 * GIB + 0.05 * sum((held | used).values())
    return Plan(f"training, each of {gpus} GPUs", held, used)


def kept_by_block(policy: Policy) -> int:
    """Return the bytes that a text block keeps per token for its backward pass. tests/test_plan.py compares them with autograd's."""
    text = policy.text.config
    # A norm keeps, per unit: its input in fp32, normalized, scaled.
    norm = FP32 + 2 * BF16
    # 2 norms of the hidden state
    norms = 2 * norm * text.hidden_size
    # each query head: its norm, rotated, attention's output; each key head: its norm, rotated, the value
    block: Any = policy.text.layers[0]  # its class depends on the model
    heads = block.self_attn.config.num_attention_heads + block.self_attn.config.num_key_value_heads
    attention = (norm + 2 * BF16) * heads * block.self_attn.head_dim
    # gate, its activation, up, their product
    mlp = 4 * BF16 * text.intermediate_size
    return norms + attention + mlp


# ------------------------------------------------------------------------------------------------ a GPU that samples


def plan_inprocess(cfg: PolicyConfig, max_batch_tokens: int) -> Plan:
    """Plan the engine in the trainer's process."""
    policy = meta_policy(cfg)
    held: dict[str, float] = {"weights of the engine, bf16": count(policy) * BF16}
    cache = 2 * max_batch_tokens * keys_per_token(policy)  # a batch's keys are copied when their room is used up
    used: dict[str, float] = {"KV cache of a batch, twice while it is read": cache}
    return Plan("engine", held, used)


def plan_servers(
    cfg: PolicyConfig, engine: EngineConfig, visual: VisualContract, episodes: int, group_size: int, turn_tokens: int
) -> Plan:
    """Plan one GPU of a node's servers, on which `episodes` run at once. The GPUs of a server share its weights, and each token's
    keys and values."""
    policy = meta_policy(cfg)
    gpus, per_server = len(engine.gpus), engine.tensor_parallel
    frame_tokens = visual.frame_tokens(*visual.frame_size(1280, 720)) + 10  # 10: the frame's stamp
    # A server's episodes: each keeps its share of the group's prompt, and two full turns.
    rows = math.ceil(episodes * per_server / gpus)
    tokens = rows * (visual.overview_frames * frame_tokens // group_size + 2 * turn_tokens)

    held = {"weights of the engine, bf16": count(policy) * BF16 / per_server}
    used = {}
    used[f"KV cache of {tokens} tokens"] = tokens * keys_per_token(policy) / per_server
    used["CUDA graphs and activations"] = 6 * GIB
    return Plan(f"engine, each of {gpus} GPUs", held, used)


def keys_per_token(policy: Policy) -> int:
    """Return the bytes of a token's keys and values: layers x (key + value) x key heads x head size."""
    block: Any = policy.text.layers[0]
    keys = block.self_attn.config.num_key_value_heads * block.self_attn.head_dim
    return policy.text.config.num_hidden_layers * 2 * BF16 * keys


# ------------------------------------------------------------------------------------------------ shapes

# config.json's sizes of the hub's models that configs/ train: --dry-run knows them without a download.
PUBLISHED = yaml.safe_load(Path(__file__).with_name("sizes.yaml").read_text("utf-8"))


@functools.cache
def meta_policy(cfg: PolicyConfig) -> Policy:
    """Build the policy on the meta device, with the sizes of its checkpoint or, if that does not exist yet, of its family."""
    name = cfg.checkpoint
    if cfg.family and not Path(name).exists() and not on_the_hub(name):
        name = cfg.family
    if name in PUBLISHED:
        return build_on_meta(AutoConfig.for_model(**PUBLISHED[name]), cfg)
    return build_on_meta(read_config(find_checkpoint(name, weights=False)), cfg)


def count(module: nn.Module, trained: bool = False) -> int:
    """Count the weights; with `trained`, only those that train."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad or not trained)
