"""plan.py: estimate GPU memory from shapes alone, before any weight is loaded.

    plan = plan_training(cfg.policy, gpus=4, tokens=24576, reference=True)
    plan.show(gpu_gib=80)               # prints a row per use of memory and the sum
    plan.require_room(gpu_gib=80)       # refuses a model whose weights and optimizer state alone do not fit

The estimates are for FSDP2 with bf16 computation and fp32 master weights.
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
from runtime.config import ConfigError, refuse_below_1
from runtime.distributed import local_size, print0, world_size
from runtime.policy import Policy, PolicyConfig, build_on_meta

GIB = 1 << 30

# config.json's sizes of checkpoints that --dry-run knows without a download.
PUBLISHED = yaml.safe_load(Path(__file__).with_name("sizes.yaml").read_text("utf-8"))


@dataclass(frozen=True)
class PlanConfig:
    """The node that --dry-run plans for. In a run, torchrun decides how many GPUs train. On a machine with a GPU, that GPU's memory
    is the limit instead of `gpu_gib`."""

    gpus: int = 8
    """Training GPUs."""
    gpu_gib: float = 80.0

    def __post_init__(self):
        refuse_below_1(self, "gpus", "gpu_gib")


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


# ------------------------------------------------------------------------------------------------ training

FP32, BF16 = 4, 2  # bytes of a number


def plan_training(cfg: PolicyConfig, gpus: int, tokens: int, reference: bool = False) -> Plan:
    """Plan one of `gpus` training GPUs, for micro-batches of `tokens`."""
    policy = meta_policy(cfg)
    text = policy.text.config
    layers, hidden, vocabulary = text.num_hidden_layers, text.hidden_size, text.vocab_size
    trained = count(policy, trained=True)
    frozen = count(policy) - trained
    one_block = count(policy.text.layers[0])
    outside_blocks = trained - count(policy.text.layers)

    held = {}
    # trained x (weight + gradient + two moments) / gpus
    held["weights, gradients, AdamW's two moments: fp32, sharded"] = trained * 4 * FP32 / gpus
    # frozen x weight, on every GPU
    held["frozen vision tower, bf16, whole"] = frozen * BF16
    if reference:
        # trained x weight / gpus
        held["reference policy, bf16, sharded (none if grpo.kl_coef = 0)"] = trained * BF16 / gpus

    # layers x tokens x the hidden state that a block reads. Without checkpointing, every block keeps all that it computes.
    kept = BF16 * hidden if cfg.activation_checkpointing else kept_by_block(policy)
    used = {f"inputs of {layers} blocks at {tokens} tokens": layers * tokens * kept}
    # (trained - blocks) x weight: the root unit stays gathered
    used["embeddings and head, bf16, whole"] = outside_blocks * BF16
    # block x (weight + the next block's weight + gradient in bf16 and in fp32) + tokens x what the block keeps
    used["recomputation of one block"] = one_block * (3 * BF16 + FP32) + tokens * kept_by_block(policy)
    # chunk x vocabulary x (logit + its exponential) + vocabulary x hidden x gradient of the head
    logits = min(cfg.logit_chunk, tokens) * vocabulary * 2 * FP32
    used["logits of a chunk, gradient of the head"] = logits + vocabulary * hidden * BF16
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
    heads = text.num_attention_heads + text.num_key_value_heads
    attention = (norm + 2 * BF16) * heads * policy.text.layers[0].self_attn.head_dim
    # gate, its activation, up, their product
    mlp = 4 * BF16 * text.intermediate_size
    return norms + attention + mlp


# ------------------------------------------------------------------------------------------------ an RL run


def plan_rl(cfg: Any, gpus: int) -> list[Plan]:
    """Plan the GPUs of an RLConfig (in rl.py, above this file): those that train and, if they are others, those that sample."""
    rollout = cfg.rollout
    # The longest micro-batch: a full one, or one episode that fills its context.
    longest = max(cfg.grpo.train_tokens, rollout.max_context)
    training = plan_training(cfg.policy, cfg.plan.gpus, longest, reference=cfg.grpo.kl_coef > 0)
    if rollout.urls:
        return [training]
    engine = plan_servers(cfg) if rollout.server_gpus else plan_inprocess(cfg)
    if not rollout.server_gpus or set(rollout.server_gpus) & set(range(cfg.plan.gpus)):
        return [Plan("training and engine on one GPU", training.held | engine.held, training.used | engine.used)]
    return [training, engine]


def plan_inprocess(cfg: Any) -> Plan:
    """Plan the engine in the trainer's process, of an RLConfig."""
    policy = meta_policy(cfg.policy)
    held = {"weights of the engine, bf16": count(policy) * BF16}
    # A batch's keys are copied when their room is used up.
    used = {"KV cache of a batch, twice while it is read": 2 * cfg.rollout.max_batch_tokens * keys_per_token(policy)}
    return Plan("engine", held, used)


def plan_servers(cfg: Any) -> Plan:
    """Plan one GPU of an RLConfig's servers. The GPUs of a server share its weights, and each token's keys and values."""
    rollout, group_size = cfg.rollout, cfg.grpo.group_size
    policy = meta_policy(cfg.policy)
    gpus, per_server = len(rollout.server_gpus), rollout.tensor_parallel
    # weights / GPUs of a server
    held = {"weights of the engine, bf16": count(policy) * BF16 / per_server}

    # episodes of this node that run at once / servers
    tasks = math.ceil(cfg.batch_tasks / max(1, world_size() // local_size()))  # tasks per node
    episodes = min(rollout.concurrency * cfg.plan.gpus, tasks * group_size)
    rows = math.ceil(episodes * per_server / gpus)
    # rows x (a group's prompt / G + two full turns). A frame's stamp takes 10 more tokens.
    frame = cfg.visual.frame_tokens(*cfg.visual.frame_size(1280, 720)) + 10
    tokens = rows * (cfg.visual.overview_frames * frame // group_size + 2 * rollout.max_new_tokens)
    used = {f"KV cache of {tokens} tokens": tokens * keys_per_token(policy) / per_server}
    used["CUDA graphs and activations"] = 6 * GIB
    return Plan(f"engine, each of {gpus} GPUs", held, used)


def keys_per_token(policy: Policy) -> int:
    """Return the bytes of a token's keys and values: layers x (key + value) x key heads x head size."""
    text = policy.text.config
    head_size = policy.text.layers[0].self_attn.head_dim
    return text.num_hidden_layers * 2 * BF16 * text.num_key_value_heads * head_size
