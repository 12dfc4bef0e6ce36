"""run.py: what SFT and RL share: the optimizer, the run's folder, the state it resumes from, its metrics, its result.

    run = Run(cfg, "rl", SHOWN, policy, make_optimizer(policy, cfg.optim))    # resumes from the newest state in RUN/state
    for step in range(run.steps_done, cfg.steps):
        norm = optimizer_step(policy, run.optimizer, cfg.optim, step, cfg.steps)
        run.log(step, measured)                       # appends a line to RUN/metrics.jsonl
        run.refuse_broken_end(step, measured)
        run.save(step)                                # RUN/state, and RUN/models if cfg.export_every is set
    run.export()                                      # RUN/model

folder.hold_folder locks the folder. All ranks call all of these functions.
"""

import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from runtime.checkpoints import (
    export,
    load_state,
    read_config,
    refuse_quantized,
    save_state,
    saved_step,
    weights_digest,
)
from runtime.config import ConfigError
from runtime.dataset import DataConfig
from runtime.distributed import gather, local_size, peak_memory, print0, rank, world_size
from runtime.folder import ScriptConfig, refuse_other_weights, save_run
from runtime.lines import append_line, read_lines, write_lines
from runtime.plan import GIB, Plan, PlanConfig, count, meta_policy
from runtime.policy import Policy, PolicyConfig
from runtime.prompts import OURS, Prompts
from runtime.visual import VisualContract

# ------------------------------------------------------------------------------------------------ the optimizer


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
        # With the first three it would learn nothing, without an error. torch refuses the betas late and without their name.
        valid_betas = len(self.betas) == 2 and max(self.betas) < 1
        if self.lr == 0 or self.max_grad_norm == 0 or self.warmup >= 1 or not valid_betas:
            raise ValueError(f"{self}: needs lr > 0, max_grad_norm > 0, warmup < 1 and two betas below 1")


def make_optimizer(policy: Policy, cfg: OptimConfig) -> torch.optim.AdamW:
    """Build AdamW over the trainable weights. Norms and biases get no weight decay."""
    matrices = [p for p in policy.parameters() if p.requires_grad and p.ndim > 1]
    vectors = [p for p in policy.parameters() if p.requires_grad and p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": cfg.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    # On a GPU, use the fused step: foreach would briefly hold another copy of the weights.
    fused = policy.device.type == "cuda"
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=(cfg.betas[0], cfg.betas[1]), fused=fused, foreach=not fused)


def learning_rate(cfg: OptimConfig, step: int, steps: int) -> float:
    """Return the learning rate of a step in 0 ... steps - 1. It depends only on the step, so resuming needs no state."""
    # lr_s = lr * (s + 1) / (w + 1)                                while s < w = warmup * steps
    #        lr, or lr * (1 + cos(pi * (s - w) / (steps - w))) / 2  after that
    rising = cfg.warmup * steps
    if step < rising:
        return cfg.lr * (step + 1) / (rising + 1)
    if cfg.schedule == "constant":
        return cfg.lr
    return cfg.lr * 0.5 * (1 + math.cos(math.pi * (step - rising) / (steps - rising)))


def clip_gradients(policy: nn.Module, largest: float) -> float:
    """Scale the gradient to a norm of at most `largest`. Return the norm before, the same on every rank."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in policy.parameters() if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    torch.nn.utils.clip_grads_with_norm_(policy.parameters(), largest, norm)
    return norm.item()


def optimizer_step(policy: nn.Module, optimizer: Optimizer, cfg: OptimConfig, step: int, steps: int) -> float:
    """Clip the gradient, update the weights, zero the gradient and return its norm. Skip the update if that is not finite."""
    norm = clip_gradients(policy, cfg.max_grad_norm)
    if math.isfinite(norm):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(cfg, step, steps)
        optimizer.step()
    optimizer.zero_grad()
    return norm


# ------------------------------------------------------------------------------------------------ the settings of a run


@dataclass(frozen=True, kw_only=True)
class RunConfig(ScriptConfig):
    """The settings of every training run, SFT or RL."""

    policy: PolicyConfig
    """The checkpoint that the policy starts from. In RL it is also the reference of the KL."""
    data: DataConfig
    val: DataConfig | None = None
    """Held-out rows, evaluated every `eval_every` steps and at the end."""
    visual: VisualContract = VisualContract()
    prompts: Prompts = OURS
    """A YAML file with texts in place of ours. SFT, RL and evaluation of one model need the same."""
    optim: OptimConfig = OptimConfig()
    steps: int
    eval_every: int = 10
    """Evaluate every so many steps, and after the last one. 0: only then."""
    save_every: int = 10
    """Save a training state every so many steps, and after the last one. 0: only then."""
    keep: int = 2
    """How many complete training states stay on disk. 0: all."""
    export_every: int = 0
    """Every so many steps, write the policy to RUN/models/step-000040. 0: only at the end, to RUN/model."""
    decoders: int = 2
    """Video decoder processes per rank, at most the rank's share of the cores."""
    report_to: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Trackers that also get the metrics of metrics.jsonl. Each must be installed."""
    plan: PlanConfig = PlanConfig()

    @property
    def think_prefix(self) -> bool:
        """Whether the model's turns open with a forced `<think>`. Each export records it."""
        return False

    @property
    def workers(self) -> int:
        """Decoder processes per rank on this machine."""
        return max(1, min(self.decoders, (os.cpu_count() or 1) // local_size()))


# ------------------------------------------------------------------------------------------------ before a run


def require_memory(cfg: PlanConfig, plans: Sequence[Plan]) -> None:
    """Show what memory each GPU needs. Refuse what does not fit on this machine's GPUs or, without one, on those of `plan`."""
    gpu_gib = cfg.gpu_gib
    if torch.cuda.is_available():
        gpu_gib = torch.cuda.get_device_properties(0).total_memory / GIB
    else:
        print0(f"  note    there is no GPU here: planned for plan.gpus = {cfg.gpus}, plan.gpu_gib = {gpu_gib:.4g}")
    for plan in plans:
        plan.show(gpu_gib)
        plan.require_room(gpu_gib)


def require_weights(cfg: RunConfig, source: Path) -> None:
    """Refuse weights that cannot be trained here, and a resumed run that began with others: its reference and its frozen tower
    would be new, and its text model old."""
    read_config(source)  # refuses other families
    refuse_quantized(source)
    if saved_step(Path(cfg.run) / "state"):
        refuse_other_weights(Path(cfg.run), source, f"policy.checkpoint = {cfg.policy.checkpoint!r}")


# ------------------------------------------------------------------------------------------------ a run


class Run:
    """The progress of a run: steps done, and metrics."""

    def __init__(self, cfg: RunConfig, name: str, shown: Sequence[str], policy: Policy, optimizer: Optimizer):
        self.cfg = cfg
        self.folder = Path(cfg.run)
        self.policy = policy
        self.optimizer = optimizer
        self.steps_done = load_state(self.folder / "state", policy, optimizer)
        if self.steps_done >= cfg.steps:
            print0(f"{self.folder}: finished; the model of step {self.steps_done} is exported again")
        elif self.steps_done:
            print0(f"{self.folder}: resumes after step {self.steps_done} of {cfg.steps}")
        else:
            print0(f"{self.folder}: starts from {policy.cfg.checkpoint}")
        if rank() == 0:
            save_run(cfg, self.folder, checkpoint=weights_digest(Path(policy.cfg.checkpoint)))
            self.metrics = Metrics(cfg, name, self.steps_done, shown)

    def is_time(self, step: int, every: int) -> bool:
        """Return whether something is due after this step: every so many steps (0: never) and after the last one."""
        return step + 1 == self.cfg.steps or (every > 0 and (step + 1) % every == 0)

    def log(self, step: int, measured: dict[str, float]) -> None:
        """Write a step's metrics. `bad_steps: 1` means that the gradient was not finite and the update was skipped."""
        bad_steps = int(not math.isfinite(measured["grad_norm"]))
        lr = learning_rate(self.cfg.optim, step, self.cfg.steps)
        measured = measured | {"bad_steps": bad_steps, "peak_memory_gib": peak_memory(), "lr": lr}
        if rank() == 0:
            self.metrics.write(step, measured)

    def refuse_broken_end(self, step: int, measured: dict[str, float]) -> None:
        """Refuse a last step whose loss or gradient is not finite, before a state or a model is written. After an earlier such
        step, the run can recover."""
        loss, norm = measured["loss"], measured["grad_norm"]
        if step + 1 == self.cfg.steps and not (math.isfinite(loss) and math.isfinite(norm)):
            raise ConfigError(
                f"the last step has the loss {loss:g} and a gradient of norm {norm:g}, so no state and no model are written: "
                f"lower optim.lr; the same command resumes from the last state in {self.folder}/state, if there is one"
            )

    def save(self, step: int) -> None:
        """Write a model every `export_every` steps, and a state every `save_every`."""
        # The model comes first. After a kill between the two, the resumed run writes it again.
        every = self.cfg.export_every
        if every and (step + 1) % every == 0:
            self.write_model(self.folder / "models" / f"step-{step + 1:06d}")
        if self.is_time(step, self.cfg.save_every):
            save_state(self.folder / "state", self.policy, self.optimizer, step + 1, self.cfg.keep)

    def export(self) -> None:
        """Write the result."""
        self.write_model(self.folder / "model")
        print0(f"done: {self.folder}/model")

    def write_model(self, folder: Path) -> None:
        """Write the policy as a Hugging Face checkpoint."""
        export(self.policy, folder, self.cfg.visual)
        if rank() == 0:
            self.cfg.prompts.save(folder)
            (folder / "rollout.json").write_text(json.dumps({"think_prefix": self.cfg.think_prefix}))


# ------------------------------------------------------------------------------------------------ speed

# Dense bf16 TFLOPS by a part of the GPU's CUDA name, from the data sheets.
PEAK_TFLOPS = {"H100": 989, "H200": 989, "B200": 2250, "A100": 312}


class Clock:
    """Seconds per phase of a step, on this rank."""

    def __init__(self):
        self.seconds = {"seconds": 0.0}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[f"{phase}_seconds"] = now - self._last
        self.seconds["seconds"] += now - self._last
        self._last = now


def speed(cfg: PolicyConfig, tokens: int, seconds: float) -> dict[str, float]:
    """Return the trained tokens per second of all ranks together, and the MFU, from this rank's tokens and seconds."""
    tokens = sum(gather(tokens))
    slowest = max(gather(seconds))
    return {"trained_tokens_per_second": tokens / slowest} | utilisation(cfg, tokens, slowest, world_size())


def utilisation(cfg: PolicyConfig, tokens: int, seconds: float, gpus: int) -> dict[str, float]:
    """Return the MFU, the useful share of the GPUs' peak. Empty on a CPU or an unknown GPU."""
    for part, tflops in PEAK_TFLOPS.items():
        if torch.cuda.is_available() and part in torch.cuda.get_device_name():
            policy = meta_policy(cfg)
            # 2 N FLOPs per token forward and 4 N backward, for N trained weights without the embedding. (If it is tied to the
            # head, the head is left out with it.) Attention adds little at these lengths.
            flops = 6 * (count(policy, trained=True) - policy.text.embed_tokens.weight.numel()) * tokens
            return {"mfu": flops / (gpus * tflops * 1e12 * seconds)}
    return {}


# ------------------------------------------------------------------------------------------------ metrics

# Metrics that the console shows unless they are 0.
ALARMS = ("failed_rate", "eval/failed_rate", "call_errors/timeout", "call_errors/engine", "bad_steps")


class Metrics:
    """Writes one line per step: all metrics to RUN/metrics.jsonl, the main ones to the console.

    Files count steps from 0, as RUN/episodes does. The console and RUN/state show how many steps are done."""

    def __init__(self, cfg: RunConfig, name: str, steps_done: int, shown: Sequence[str]):
        self._path = Path(cfg.run) / "metrics.jsonl"
        self._name = name
        self._steps = cfg.steps
        self._shown = shown  # metrics on the console
        self._board = self._wandb = None
        if "tensorboard" in cfg.report_to:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(f"{cfg.run}/tensorboard", purge_step=steps_done, flush_secs=10)
        if "wandb" in cfg.report_to:  # a resumed run appears as a new run of the same name
            import wandb

            project = os.environ.get("WANDB_PROJECT", "minparavt")
            self._wandb = wandb.init(project=project, name=cfg.run, dir=cfg.run, config=asdict(cfg))

        # Keep the lines of the steps that are done. Later steps run again.
        lines = read_lines(self._path) if self._path.exists() else []
        write_lines(self._path, [line for line in lines if line["step"] < steps_done])

    def write(self, step: int, values: dict[str, float]) -> None:
        values = {"time": round(time.time(), 3), **values}  # seconds since the epoch
        append_line(self._path, {"step": step, **values})
        if self._board:
            for key, value in values.items():
                self._board.add_scalar(key, value, step)
        if self._wandb:
            self._wandb.log(values, step=step)
        keys = [key for key in self._shown if key in values] + [key for key in ALARMS if values.get(key)]
        figures = " ".join(f"{key} {values[key]:.4g}" for key in keys)
        print(f"{self._name} step {step + 1}/{self._steps} {figures}", flush=True)
