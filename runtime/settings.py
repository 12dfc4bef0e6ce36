"""settings.py: the config sections of modules that import torch, and RunConfig, which SFTConfig and RLConfig extend.

This module does not import torch, so a script can read its command line before it does.
"""

import importlib.util
import os
from dataclasses import dataclass
from typing import Literal

from runtime.config import refuse_below_1
from runtime.dataset import DataConfig
from runtime.visual import VisualContract

# Settings that may change when a run resumes: how long, where and how fast it runs, what it reports, and the remedies for bad
# steps and rows. A name without a dot stands for the whole section. In data.sources only the paths may change.
MAY_CHANGE = {
    "run", "steps", "save_every", "keep", "decoders", "plan", "grpo.train_tokens", "pack_tokens",
    "policy.family", "policy.dtype", "policy.activation_checkpointing", "policy.logit_chunk",
    "rollout.server_gpus", "rollout.urls", "rollout.tensor_parallel", "rollout.server_args", "rollout.concurrency",
    "rollout.call_timeout", "rollout.max_batch_tokens", "eval_every", "val", "val_tasks", "val_frames", "dump_groups",
    "report_to", "data.video_root", "data.max_bad_fraction", "optim",
}  # fmt: skip


@dataclass(frozen=True)
class PolicyConfig:
    """Which model to train, and how to store and run it."""

    checkpoint: str
    """A Hugging Face folder of a dense Qwen3-VL, or its name on the hub."""
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


@dataclass(frozen=True, kw_only=True)
class GRPOConfig:
    """How a batch of episodes becomes an update."""

    group_size: int = 8
    """G: episodes per task."""
    kl_coef: float = 0.01
    """beta; 0 loads no reference."""
    clip_eps: float = 0.2
    """The ratio is clipped to 1 - eps .. 1 + eps. With one minibatch the ratio is 1 and the clip has no effect."""
    clip_eps_high: float | None = None
    """eps for ratios above 1. null: the same eps."""
    normalise: Literal["group", "batch"] = "group"
    """group: by the group's mean and std. batch: then also by the batch's std, which is small if many groups are flat."""
    behaviour_cap: float = 5.0
    """Tokens with pi_prox / pi_behaviour above this are masked."""
    train_tokens: int = 16_384
    """Tokens per micro-batch. A larger group is split and its prompt repeated. A single episode may exceed the limit."""

    def __post_init__(self):
        if self.group_size < 2:
            raise ValueError(f"group_size = {self.group_size}: an advantage compares at least 2 episodes")
        for name in ("clip_eps", "clip_eps_high", "behaviour_cap", "train_tokens"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} = {value}: must be greater than 0")


@dataclass(frozen=True)
class PlanConfig:
    """The node that --dry-run plans for. In a run, torchrun decides how many GPUs train."""

    gpus: int = 8
    """Training GPUs."""
    gpu_gib: float = 80.0


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The settings of every training run, SFT or RL."""

    run: str
    """Folder for all output. If it holds states of this run, training resumes from the newest."""
    policy: PolicyConfig
    """The checkpoint that the policy starts from. In RL it is also the reference of the KL."""
    data: DataConfig
    val: DataConfig | None = None
    """Held-out rows, evaluated every `eval_every` steps and at the end."""
    visual: VisualContract = VisualContract()
    optim: OptimConfig = OptimConfig()
    steps: int
    eval_every: int = 10
    save_every: int = 10
    keep: int = 2
    """How many complete training states stay on disk."""
    decoders: int = 2
    """Video decoder processes per rank, at most the rank's share of the cores."""
    report_to: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Trackers that also get the metrics of metrics.jsonl. Each must be installed."""
    plan: PlanConfig = PlanConfig()

    def __post_init__(self):
        refuse_below_1(self, "steps", "eval_every", "save_every", "keep", "decoders")
        refuse_below_1(self.policy, "logit_chunk")
        refuse_below_1(self.plan, "gpus", "gpu_gib")
        if not self.run.strip():
            raise ValueError(f"run = {self.run!r}: the run would use the current folder; name a folder")
        for name in self.report_to:
            if importlib.util.find_spec(name) is None:
                raise ValueError(f"report_to = {list(self.report_to)}: {name} is not installed; `pip install {name}`")

    @property
    def workers(self) -> int:
        """Decoder processes per rank on this machine."""
        from runtime.distributed import local_size  # which imports torch

        return max(1, min(self.decoders, (os.cpu_count() or 1) // local_size()))
