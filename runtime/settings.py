"""settings.py: the settings of policy, loss and optimiser. They stand apart from the code that uses them because that code
imports torch, which takes seconds, and a mistake in a YAML is to be answered at once.
"""

from dataclasses import dataclass
from typing import Literal


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
    attention: Literal["auto", "flash", "varlen", "sdpa"] = "auto"
    """Kernel of the text model. flash: FlashAttention 2; varlen: torch's own; sdpa: any device, one call per segment.
    auto: the first of these that runs here."""
    activation_checkpointing: bool = True
    """Keep only the input of each block and compute the rest again in the backward pass."""
    logit_chunk: int = 1024
    """Target tokens whose logits exist at the same time (fp32: 4 bytes x vocabulary each, several copies)."""

    def __post_init__(self):
        if self.logit_chunk < 1:
            raise ValueError(f"logit_chunk = {self.logit_chunk}: must be positive")


@dataclass(frozen=True, kw_only=True)
class GRPOConfig:
    """What an update does with a batch of episodes."""

    group_size: int = 8
    """G: episodes per task."""
    kl: float = 0.01
    """beta; 0 loads no reference."""
    clip: float = 0.2
    clip_high: float | None = None
    """eps_high; null: the same as clip."""
    std_floor: float = 1e-3
    """A group whose rewards vary less is flat. Fractional rewards leave a residue of rounding."""
    normalise: Literal["group", "mean", "batch"] = "group"
    """group: mean and std of the group; mean: its mean alone; batch: group, then divided by the std over all episodes of
    the batch (their mean is 0), so that few lively groups among flat ones weigh more."""
    aggregation: Literal["token", "sequence"] = "token"
    """token: mean over all tokens; sequence: mean over agents of their tokens' mean. Tokens of flat groups count, so a
    batch with few lively groups moves the policy little."""
    behaviour_cap: float = 5.0
    """Tokens with pi_prox / pi_behaviour above this are left out of the surrogate."""
    gap_limit: float = 0.5
    """The first batch stops the run if log pi of trainer and engine differ more than this on average."""
    train_tokens: int = 16_384
    """Tokens of a micro-batch. A group over it is split, and its prompt repeated; a single episode may exceed it."""

    def __post_init__(self):
        if self.group_size < 2:
            raise ValueError(f"group_size = {self.group_size}: an advantage compares at least 2 episodes")
        positive = ("clip", "clip_high", "std_floor", "behaviour_cap", "train_tokens")
        values = {name: getattr(self, name) for name in positive}
        if small := [f"{name} = {x}" for name, x in values.items() if x is not None and x <= 0]:
            raise ValueError(f"{', '.join(small)}: must be greater than 0")
        if self.kl < 0:
            raise ValueError(f"kl = {self.kl}: must not be negative; 0 loads no reference")


@dataclass(frozen=True)
class OptimConfig:
    """AdamW, its schedule and the clipping of gradients."""

    lr: float = 2e-6
    schedule: Literal["constant", "cosine"] = "constant"
    """After the warm-up. cosine falls to zero at the run's last step."""
    warmup: float = 0.0
    """Share of the run's steps in which the learning rate rises from zero."""
    weight_decay: float = 0.01
    betas: tuple[float, ...] = (0.9, 0.95)
    clip: float = 1.0
    """Largest norm of the gradient."""

    def __post_init__(self):
        if self.lr <= 0 or self.clip <= 0 or not 0 <= self.warmup < 1 or len(self.betas) != 2:
            raise ValueError(f"{self}: needs lr > 0, clip > 0, 0 <= warmup < 1 and two betas")
