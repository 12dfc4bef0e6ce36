"""settings.py: the sections of a config whose own modules import torch, and what SFTConfig and RLConfig share.

They are kept apart from those modules, so that a script can read its command line before it imports torch.
"""

import importlib.util
import os
from dataclasses import dataclass
from typing import Literal

from runtime.config import refuse_below_1
from runtime.dataset import DataConfig
from runtime.visual import VisualContract


@dataclass(frozen=True)
class PolicyConfig:
    """Which model, and how it is held and run."""

    checkpoint: str
    """A Hugging Face folder of a dense Qwen3-VL, or its name on the hub."""
    family: str = ""
    """What --dry-run plans with as long as `checkpoint` is not there: another folder, or a published name."""
    freeze: tuple[Literal["vision"], ...] = ("vision",)
    """`[vision]` keeps the vision tower as it is: whole on every rank, run without gradient. `[]` trains everything."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Of computation; master weights and gradient sums are fp32 in any case. auto: bf16 on a GPU, fp32 on a CPU."""
    activation_checkpointing: bool = True
    """Keep only the input of each block and compute the rest again in the backward pass."""
    logit_chunk: int = 1024
    """Target tokens whose logits exist at the same time (fp32: 4 bytes x vocabulary each, several copies)."""


@dataclass(frozen=True)
class OptimConfig:
    """AdamW, its schedule and the clipping of gradients."""

    lr: float = 2e-6
    schedule: Literal["constant", "cosine"] = "constant"
    """After the warm-up. cosine falls towards zero, which it would reach one step after the last."""
    warmup: float = 0.0
    """Share of the run's steps in which the learning rate rises from zero."""
    weight_decay: float = 0.01
    betas: tuple[float, ...] = (0.9, 0.999)
    max_grad_norm: float = 1.0

    def __post_init__(self):
        betas = len(self.betas) == 2 and max(self.betas) < 1
        if self.lr <= 0 or self.max_grad_norm <= 0 or not 0 <= self.warmup < 1 or not betas:
            raise ValueError(f"{self}: needs lr > 0, max_grad_norm > 0, 0 <= warmup < 1 and two betas below 1")


@dataclass(frozen=True, kw_only=True)
class GRPOConfig:
    """What an update does with a batch of episodes."""

    group_size: int = 8
    """G: episodes per task."""
    kl_coef: float = 0.01
    """beta; 0 loads no reference."""
    clip_eps: float = 0.2
    """The ratio is clipped to 1 - eps .. 1 + eps. With one minibatch it is 1, and the clip is inert."""
    clip_eps_high: float | None = None
    """eps for ratios above 1; null: the same."""
    normalise: Literal["group", "batch"] = "group"
    """group: mean and std of the group. batch: then also divided by the batch's std, small where groups are flat."""
    behaviour_cap: float = 5.0
    """Tokens with pi_prox / pi_behaviour above this are left out of the surrogate."""
    train_tokens: int = 16_384
    """Tokens of a micro-batch. A group over it is split, and its prompt repeated; a single episode may exceed it."""

    def __post_init__(self):
        if self.group_size < 2:
            raise ValueError(f"group_size = {self.group_size}: an advantage compares at least 2 episodes")
        for name in ("clip_eps", "clip_eps_high", "behaviour_cap", "train_tokens"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} = {value}: must be greater than 0")


@dataclass(frozen=True)
class PlanConfig:
    """The node that --dry-run plans for. torchrun decides how many GPUs train, and the machine how large they are."""

    gpus: int = 8
    """Training GPUs."""
    gpu_gib: float = 80.0


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What every training run says, SFT and RL."""

    run: str
    """Folder of everything the run leaves. If it holds states of this run, the newest is where it goes on."""
    policy: PolicyConfig
    """Where the policy starts; in RL, the reference of the KL is the same checkpoint."""
    data: DataConfig
    val: DataConfig | None = None
    """Held-out rows, measured every `eval_every` steps and at the end."""
    visual: VisualContract = VisualContract()
    optim: OptimConfig = OptimConfig()
    steps: int
    eval_every: int = 10
    save_every: int = 10
    keep: int = 2
    """Complete training states that stay on disk."""
    decoders: int = 2
    """Video decoder processes per rank; fewer where its share of the machine's cores is smaller."""
    report_to: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Who gets the figures of metrics.jsonl, too; each needs its library."""
    plan: PlanConfig = PlanConfig()

    def __post_init__(self):
        refuse_below_1(self, "steps", "eval_every", "save_every", "keep", "decoders")
        refuse_below_1(self.policy, "logit_chunk")
        refuse_below_1(self.plan, "gpus", "gpu_gib")
        if not self.run.strip():
            raise ValueError(f"run = {self.run!r}: the run would lie in the current folder; name one of its own")
        for name in self.report_to:
            if importlib.util.find_spec(name) is None:
                raise ValueError(f"report_to = {list(self.report_to)}: {name} is not installed; `pip install {name}`")

    @property
    def workers(self) -> int:
        """Decoders of a rank on this machine."""
        from runtime.distributed import local_size  # which imports torch

        return max(1, min(self.decoders, (os.cpu_count() or 1) // local_size()))
