"""plan.py: will it fit, and how long will a step take? Answered from shapes alone, before any weight is loaded.

    print(plan_training(cfg.policy, gpus=7, tokens=16384).table(gpu_gib=80))
    plan_engine(cfg.policy, gpus=1, rows=64, row_tokens=8192).check(gpu_gib=80)       # PlanError names the knob to turn
    plan_step(cfg, trainers=7, engines=1, pace=Pace()).seconds(staleness=1)           # of an RL step, from stated speeds

The sums are for FSDP2 with bf16 computation and fp32 master weights, as `policy.load` builds it. They are estimates: the
largest unknown, the allocator's waste, is a row of its own.

Shapes: L tokens of a micro-batch, H hidden, I intermediate, V vocabulary; q and kv: width of all query and key heads.
"""

import functools
import math
import shutil
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, Qwen3VLConfig

from runtime.policy import empty
from runtime.settings import PolicyConfig

GIB = 1 << 30


def _published(hidden: int, intermediate: int, layers: int, heads: int, tower: dict, tied: bool) -> dict:
    """Qwen3VLConfig's arguments for one size of the family."""
    text = {
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5_000_000,
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
    }
    vision = tower | {"num_heads": 16, "out_hidden_size": hidden, "num_position_embeddings": 2304}
    return {"text_config": text, "vision_config": vision, "tie_word_embeddings": tied}


_LARGE_TOWER = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "deepstack_visual_indexes": [8, 16, 24],
}
_SMALL_TOWER = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "deepstack_visual_indexes": [5, 11, 17],
}
# Checkpoints that --dry-run knows without their config.json.
PUBLISHED = {
    "Qwen/Qwen3-VL-8B-Instruct": _published(4096, 12288, 36, 32, _LARGE_TOWER, tied=False),
    "Qwen/Qwen3-VL-4B-Instruct": _published(2560, 9728, 36, 32, _SMALL_TOWER, tied=True),
    "Qwen/Qwen3-VL-2B-Instruct": _published(2048, 6144, 28, 16, _SMALL_TOWER, tied=True),
}
# Dense bf16 TFLOPS of a GPU, by a part of the name that CUDA gives it.
PEAK_TFLOPS = {"H100": 989, "H200": 989, "H800": 989, "B200": 2250, "A100": 312, "A800": 312}


class PlanError(ValueError):
    """The run cannot fit; the text names what to change."""


@dataclass(frozen=True)
class Shapes:
    """What the sums need of a model: parameters by part, and its text and vision configs."""

    text: object
    vision: object
    parameters: int
    trained: int
    layer: int  # one text block
    root: int  # trained, but in no block: embeddings, head, norm; the vision tower's ends where it trains

    @property
    def frozen(self) -> int:
        return self.parameters - self.trained


@functools.cache
def shapes(cfg: PolicyConfig) -> Shapes:
    """Count on the meta device, in well under a second for any size."""
    for name in filter(None, (cfg.checkpoint, cfg.family)):
        if (Path(name) / "config.json").exists():
            config = AutoConfig.from_pretrained(name)
            break
        if name in PUBLISHED:
            config = Qwen3VLConfig(**PUBLISHED[name])
            break
    else:
        raise PlanError(
            f"{cfg.checkpoint}: the plan needs its config.json; run the training first that leaves it there, or set "
            f"policy.family to a checkpoint whose shapes are known: {', '.join(PUBLISHED)}"
        )
    policy = empty(config, cfg)

    def count(module, trained_only=False):
        return sum(p.numel() for p in module.parameters() if p.requires_grad or not trained_only)

    trained, layer = count(policy, trained_only=True), count(policy.text.layers[0])
    blocks = count(policy.text.layers) + (0 if policy.vision_frozen else count(policy.vision.blocks))
    return Shapes(config.text_config, config.vision_config, count(policy), trained, layer, trained - blocks)


@dataclass(frozen=True)
class Row:
    """One line of the plan, for one GPU."""

    what: str
    bytes: float
    knob: str = ""  # what makes it smaller


@dataclass(frozen=True)
class Plan:
    """Where the memory of one GPU goes at its fullest moment."""

    title: str
    rows: list[Row]

    @property
    def gib(self) -> float:
        return sum(row.bytes for row in self.rows) / GIB

    def table(self, gpu_gib: float) -> str:
        lines = [f"  {row.what:<58}{row.bytes / GIB:>8.1f} GiB" for row in self.rows]
        return "\n".join([self.title, *lines, f"  {'sum':<58}{self.gib:>8.1f} GiB of {gpu_gib:g}"])

    def check(self, gpu_gib: float) -> None:
        if self.gib <= gpu_gib:
            return
        rows = sorted((row for row in self.rows if row.knob), key=lambda row: -row.bytes)[:3]
        knobs = "; ".join(f"{row.knob} ({row.what}: {row.bytes / GIB:.1f} GiB)" for row in rows)
        raise PlanError(f"{self.title}: {self.gib:.1f} GiB do not fit into {gpu_gib:g} GiB. What helps most: {knobs}")


def plan_training(cfg: PolicyConfig, gpus: int, tokens: int, visual_tokens: int = 0, reference: bool = False) -> Plan:
    """A training GPU of `gpus`, at micro-batches of `tokens`, of which `visual_tokens` come from frames."""
    s = shapes(cfg)
    fewer = "more GPUs, or policy.freeze = [vision]" if not s.frozen else "more GPUs"
    rows = [
        Row("master weights, fp32, sharded", 4 * s.trained / gpus, fewer),
        Row("gradients, fp32, sharded", 4 * s.trained / gpus, fewer),
        Row("AdamW's two moments, fp32, sharded", 8 * s.trained / gpus, fewer),
        # Weights and gradients of the root; of blocks, two gathered, one gradient in bf16 and one in fp32.
        Row("gathered bf16 weights, gradients being reduced", 4 * s.root + 10 * s.layer),
    ]
    if s.frozen:
        rows.append(Row("frozen vision tower, bf16, whole", 2 * s.frozen))
    if reference:
        rows.append(Row("reference policy, bf16", 2 * s.trained / gpus, "kl coefficient 0, or more GPUs"))
    one = tokens * block_bytes(s.text)
    layers = s.text.num_hidden_layers
    shorter = "fewer tokens per micro-batch"
    if cfg.activation_checkpointing:
        kept = 2 * s.text.hidden_size * layers * tokens
        rows.append(Row(f"inputs of {layers} blocks at {tokens} tokens", kept, shorter))
        rows.append(Row("activations of the block in its backward pass", 1.5 * one, shorter))
    else:
        kept = one * layers
        rows.append(
            Row(f"activations of {layers} blocks at {tokens} tokens", kept, "policy.activation_checkpointing = true")
        )
    rows.append(Row("embeddings and final norm", 16 * s.text.hidden_size * tokens, shorter))
    # bf16 and fp32 logits, the scaled copy, their exponentials and their gradients.
    logits = 22 * min(cfg.logit_chunk, tokens) * s.text.vocab_size
    rows.append(Row(f"logits of {cfg.logit_chunk} targets", logits, "a smaller policy.logit_chunk"))
    rows.append(Row("visual features", _feature_bytes(s, visual_tokens), "fewer or smaller frames"))
    rows.append(Row("vision tower at work", _tower_bytes(s, cfg, visual_tokens), "fewer or smaller frames"))
    used = sum(row.bytes for row in rows)
    rows.append(Row("CUDA and NCCL, and 5 % of waste", 3 * GIB + 0.05 * used))
    return Plan(f"training, each of {gpus} GPUs", rows)


def plan_updates(cfg, gpus: int, engine: bool = True) -> Plan:
    """`plan_training` of an RLConfig: a micro-batch full of frames, or one episode that fills its context; and the engine,
    where the ranks sample for themselves."""
    longest = max(cfg.train_tokens, cfg.rollout.max_context)
    plan = plan_training(cfg.policy, gpus, longest, cfg.train_tokens, reference=cfg.kl > 0)
    if engine and not (cfg.rollout.gpus or cfg.rollout.urls):
        s = shapes(cfg.policy)
        own = 2 * s.parameters + cfg.rollout.max_batch_tokens * kv_bytes_per_token(s.text)
        plan.rows.append(Row("engine in this process", own, "rollout.gpus, or fewer rollout.max_batch_tokens"))
    return plan


def plan_engine(cfg: PolicyConfig, gpus: int, rows: int, row_tokens: int) -> Plan:
    """An engine with a whole copy of the weights per GPU that holds `rows` sequences of `row_tokens` among its GPUs."""
    s = shapes(cfg)
    here = -(-rows // gpus)
    cache = here * row_tokens * kv_bytes_per_token(s.text)
    fewer = "fewer concurrent rollouts, fewer tokens per rollout, or more engine GPUs"
    return Plan(
        f"engine, each of {gpus} GPUs",
        [
            Row("weights, bf16", 2 * s.parameters),
            Row(f"KV cache of {here} x {row_tokens} tokens", cache, fewer),
            Row("CUDA graphs and activations", 6 * GIB),
        ],
    )


def engine_load(cfg) -> tuple[int, int]:
    """(rows, tokens of each) that the engine of an RLConfig holds."""
    rows = min(cfg.rollout.concurrency, cfg.batch_tasks * cfg.group_size)
    # A group shares its prompt's keys (about 80 tokens a frame); each episode is given two full turns.
    return rows, cfg.visual.overview_frames * 80 // cfg.group_size + 2 * cfg.rollout.max_new_tokens


def plan_disk(cfg: PolicyConfig, run: str | Path, keep: int) -> str:
    """What the training states of a run take: fp32 weights and two moments, `keep` of them and one being written."""
    needed = 12 * shapes(cfg).trained * (keep + 1) / GIB
    folder = next(path for path in (Path(run).absolute(), *Path(run).absolute().parents) if path.exists())
    free = shutil.disk_usage(folder).free / GIB
    cure = ": lower `keep`, or set `run`" if free < needed else ""
    return f"disk: {keep + 1} training states take {needed:.1f} GiB, {free:.1f} are free in {folder}{cure}"


def kv_bytes_per_token(text) -> int:
    return 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim * 2  # K and V, bf16


def block_bytes(text) -> int:
    """What one text block keeps of one token for its backward pass, in bf16 with fp32 norms."""
    q, kv = text.num_attention_heads * text.head_dim, text.num_key_value_heads * text.head_dim
    # 16 H: two norms and their inputs. q and kv: head norms, rotary, attention; the prompt's keys are repeated for its
    # suffixes, here taken as 4 copies. 8 I: gate, its activation, up, and their product.
    return 16 * text.hidden_size + 12 * q + (10 + 4 * 4) * kv + 8 * text.intermediate_size


def _feature_bytes(s: Shapes, tokens: int) -> int:
    return 2 * (1 + len(s.vision.deepstack_visual_indexes)) * s.text.hidden_size * tokens


def _tower_bytes(s: Shapes, cfg: PolicyConfig, tokens: int) -> int:
    v = s.vision
    patches = v.spatial_merge_size**2 * tokens
    block = 16 * v.hidden_size + 12 * v.hidden_size + 6 * v.intermediate_size
    pixels = 4 * v.in_channels * v.temporal_patch_size * v.patch_size**2
    if s.frozen:
        kept = 0
    elif cfg.activation_checkpointing:
        kept = 2 * v.hidden_size * v.depth
    else:
        kept = block * v.depth
    return patches * (pixels + block + kept)


def training_flops(cfg: PolicyConfig, tokens: int, passes: int = 6) -> float:
    """Of `tokens` packed tokens: 2 N forward, 4 N backward, 2 N more for each further forward pass. Matrix products
    only; at these lengths attention adds little."""
    s = shapes(cfg)
    return passes * (s.trained - s.text.vocab_size * s.text.hidden_size) * tokens


def training_seconds(
    cfg: PolicyConfig, gpus: int, tokens: int, tflops: float = 989.0, mfu: float = 0.3, more_passes: int = 0
) -> float:
    """Forward and backward of a step, shared out over the GPUs (default: H100, bf16); `mfu` counts what is computed.
    `more_passes`: forward passes on top, such as the reference's."""
    passes = (8 if cfg.activation_checkpointing else 6) + 2 * more_passes
    return training_flops(cfg, tokens, passes) / (gpus * tflops * 1e12 * mfu)


def utilisation(cfg: PolicyConfig, tokens: int, seconds: float, gpus: int) -> dict[str, float]:
    """MFU: the useful share of the GPUs' peak, where that peak is known; nothing on a CPU."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    peak = next((tflops for part, tflops in PEAK_TFLOPS.items() if part in name), None)
    return {"mfu": training_flops(cfg, tokens) / (gpus * peak * 1e12 * seconds)} if peak else {}


# ------------------------------------------------------------------------------------------------ a step of RL


@dataclass(frozen=True)
class Pace:
    """What the plan of a step assumes: speeds of one GPU (an H100 with an 8B in bf16), and what an episode is like."""

    decode_tokens_per_second: float = 2500.0
    """Sampled by a full engine GPU ..."""
    stream_tokens_per_second: float = 100.0
    """... and in a single sequence. The longest episode of a batch fills one turn (rollout.max_new_tokens) at this."""
    prefill_tokens_per_second: float = 10_000.0
    """Read by an engine GPU, its vision tower included."""
    tool_seconds: float = 2.0
    """Per round of calls: decoding the windows, HTTP, our own Python."""
    tflops: float = 989.0
    """Dense bf16 peak of a training GPU ..."""
    mfu: float = 0.3
    """... and the share of it that training reaches, counting what is computed, recomputation included."""
    publish_gb_per_second: float = 2.0
    """Of the bf16 weights, from the trainers' shards into every server."""
    sampled_tokens: float = 500.0
    """Of the main agent, per episode."""
    rounds: float = 1.0
    """Of calls, per episode."""
    calls: float = 2.0
    """Per round."""
    report_tokens: float = 150.0
    text_tokens: float = 600.0
    """Of a prompt: system, tools, question."""
    stamp_tokens: float = 8.0
    """Per frame, beside its visual tokens: the stamp and the marks around the image."""

    def __post_init__(self):
        may_be_zero = ("tool_seconds", "rounds", "calls")
        for name, value in vars(self).items():
            if value < 0 or (value == 0 and name not in may_be_zero):
                raise PlanError(f"{name} = {value:g}: must be positive" + ", or 0" * (name in may_be_zero))


@dataclass(frozen=True)
class Step:
    """Seconds of the phases of an RL step."""

    rollout: float
    training: float
    publish: float

    def seconds(self, staleness: int) -> float:
        """0: one after the other. 1: the next batch is sampled while this one trains; weights wait for both."""
        both = max(self.rollout, self.training) if staleness else self.rollout + self.training
        return both + self.publish


UNCOUNTED = "the frozen vision tower's pass in training, rewards, AdamW's step, communication that is not hidden"


def plan_step(cfg, trainers: int, engines: int, pace: Pace) -> Step:
    """A step of an RLConfig on so many training and rollout GPUs."""
    frame = cfg.visual.frame_pixels / cfg.visual.cell**2 + pace.stamp_tokens
    prompt = pace.text_tokens + frame * statistics.fmean(cfg.gating or (cfg.visual.overview_frames,))
    calls = pace.rounds * pace.calls if cfg.rollout.dispatch != "none" else 0.0
    crop = frame * cfg.visual.crop_max_frames
    episodes = cfg.batch_tasks * cfg.group_size

    # Requests go to the least busy server, so each server reads a group's prompt once, up to G servers.
    read = cfg.batch_tasks * min(cfg.group_size, engines) * prompt + episodes * calls * (crop + pace.report_tokens)
    sampled = episodes * (pace.sampled_tokens + calls * pace.report_tokens)
    rollout = read / (engines * pace.prefill_tokens_per_second) + max(
        sampled / (engines * pace.decode_tokens_per_second),
        cfg.rollout.max_new_tokens / pace.stream_tokens_per_second,
    )
    rollout += pace.tool_seconds * pace.rounds * (calls > 0)

    group = prompt + cfg.group_size * (pace.sampled_tokens + calls * pace.report_tokens)
    if cfg.rollout.subagents.train:
        group += cfg.group_size * calls * (crop + pace.report_tokens)
    # A task trains where it was sampled, and all ranks wait for the last.
    fullest = math.ceil(cfg.batch_tasks / trainers)
    more = (cfg.kl > 0) + (cfg.minibatches > 1)  # the reference, pi_prox
    training = training_seconds(cfg.policy, 1, round(fullest * group), pace.tflops, pace.mfu, more)
    publish = 2 * shapes(cfg.policy).parameters / (pace.publish_gb_per_second * 1e9)
    return Step(rollout, training, publish)


RELEASED, AIM = 250.0, 50.0  # seconds for 56 episodes: the released recipe on 7 + 1 GPUs, and what we aim at


@dataclass(frozen=True)
class Split:
    """One way to share out the GPUs of a node."""

    trainers: int
    engines: int
    step: Step
    training_gib: float
    engine_gib: float

    def fits(self, gpu_gib: float) -> bool:
        return max(self.training_gib, self.engine_gib) <= gpu_gib


def plan_splits(cfg, gpus: int, pace: Pace) -> list[Split]:
    """All of them, for an RLConfig."""
    if gpus < 2:
        raise PlanError(f"{gpus} GPUs: a split needs 2, to train and to sample; `rl.py CONFIG --dry-run` plans one")
    found = []
    for t in range(1, gpus):
        training = plan_updates(cfg, t, engine=False)
        engine = plan_engine(cfg.policy, gpus - t, *engine_load(cfg))
        found.append(Split(t, gpus - t, plan_step(cfg, t, gpus - t, pace), training.gib, engine.gib))
    return found


def best_split(splits: list[Split], staleness: int, gpu_gib: float) -> Split:
    fitting = [split for split in splits if split.fits(gpu_gib)]
    if not fitting:
        raise PlanError(f"no split fits into {gpu_gib:g} GiB; `rl.py CONFIG --dry-run` says what to change")
    return min(fitting, key=lambda split: split.step.seconds(staleness))
