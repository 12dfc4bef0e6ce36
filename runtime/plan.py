"""plan.py: will it fit? Answered from shapes alone, before any weight is loaded. And MFU, from the same shapes.

    plan = plan_training(cfg.policy, gpus=4, tokens=24576, visual_tokens=16384, reference=True)
    print(plan.table(gpu_gib=80))       # a row per use of memory, the sum, and a warning if that is more than the card has
    plan.check(gpu_gib=80)              # PlanError only where it cannot fit whatever the length of the micro-batches

The sums are estimates for FSDP2 with bf16 computation and fp32 master weights, as `policy.load` builds it. Where there is
a GPU, its own memory counts, not `gpu_gib`.

Deliberately missing: step times. configs/paragrpo_8b.yaml has the arithmetic of the 8B's.
"""

import functools
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, Qwen3VLConfig

from runtime.checks import on_the_hub
from runtime.distributed import checkpoint_dir
from runtime.policy import PolicyConfig, empty

GIB = 1 << 30

_LARGE_TOWER = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]}
_SMALL_TOWER = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
_ROPE = {"rope_type": "default", "rope_theta": 5_000_000, "mrope_section": [24, 20, 20], "mrope_interleaved": True}


def _published(hidden: int, intermediate: int, layers: int, heads: int, tower: dict, tied: bool) -> dict:
    """Return Qwen3VLConfig's arguments for one size of the family."""
    text = {
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_parameters": _ROPE,
    }
    vision = tower | {"num_heads": 16, "out_hidden_size": hidden, "num_position_embeddings": 2304}
    return {"text_config": text, "vision_config": vision, "tie_word_embeddings": tied}


# Checkpoints that --dry-run knows without their config.json.
PUBLISHED = {
    "Qwen/Qwen3-VL-8B-Instruct": _published(4096, 12288, 36, 32, _LARGE_TOWER, tied=False),
    "Qwen/Qwen3-VL-2B-Instruct": _published(2048, 6144, 28, 16, _SMALL_TOWER, tied=True),
}
# Dense bf16 TFLOPS of a GPU, by a part of the name that CUDA gives it.
PEAK_TFLOPS = {"H100": 989, "H200": 989, "B200": 2250, "A100": 312}


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


def model_config(cfg: PolicyConfig) -> Qwen3VLConfig:
    """Read the checkpoint's sizes; before it is trained, those of the family that the config names."""
    names = [cfg.checkpoint, cfg.family]
    if on_the_hub(cfg.checkpoint) and cfg.checkpoint not in PUBLISHED:  # its family may be another one's: ask the hub
        names = [checkpoint_dir(cfg.checkpoint, only=["config.json"])]
    for name in names:
        if name and (Path(name) / "config.json").exists():
            return AutoConfig.from_pretrained(name)
        if name in PUBLISHED:
            return Qwen3VLConfig(**PUBLISHED[name])
    raise PlanError(
        f"{cfg.checkpoint}: the plan needs its config.json, or policy.family set to one of {', '.join(PUBLISHED)}"
    )


@functools.cache
def shapes(cfg: PolicyConfig) -> Shapes:
    """Count on the meta device."""
    config = model_config(cfg)
    policy = empty(config, cfg)

    def count(module, trained_only=False):
        return sum(p.numel() for p in module.parameters() if p.requires_grad or not trained_only)

    trained = count(policy, trained_only=True)
    blocks = count(policy.text.layers)
    if not policy.vision_frozen:
        blocks += count(policy.vision.blocks)
    layer = count(policy.text.layers[0])
    return Shapes(config.text_config, config.vision_config, count(policy), trained, layer, trained - blocks)


@dataclass(frozen=True)
class Row:
    """One use of memory, for one GPU."""

    what: str
    bytes: float
    knob: str = ""  # what makes it smaller
    held: bool = False  # from the first step to the last, whatever the micro-batches: weights and the optimizer's state


@dataclass(frozen=True)
class Plan:
    """Where the memory of one GPU goes at its fullest moment."""

    title: str
    rows: list[Row]

    @property
    def gib(self) -> float:
        return sum(row.bytes for row in self.rows) / GIB

    def table(self, gpu_gib: float) -> str:
        """Return the rows and their sum; where it is more than the card has, also a warning."""
        card = card_gib(gpu_gib)
        lines = [self.title]
        for row in self.rows:
            lines.append(f"  {row.what:<58}{row.bytes / GIB:>8.1f} GiB")
        lines.append(f"  {'sum':<58}{self.gib:>8.1f} GiB of {card:.4g}")
        if self.gib > card:
            lines.append(f"  WARNING: may run out of memory. What helps most: {knobs(self.rows)}")
        return "\n".join(lines)

    def check(self, gpu_gib: float) -> None:
        """Refuse what is impossible: weights and optimizer state alone are larger than the card."""
        card = card_gib(gpu_gib)
        held = [row for row in self.rows if row.held]
        gib = sum(row.bytes for row in held) / GIB
        if gib > card:
            raise PlanError(
                f"{self.title}: weights and optimizer state, {gib:.1f} GiB, do not fit into {card:.4g} GiB. "
                f"What helps most: {knobs(held)}"
            )


def card_gib(gpu_gib: float) -> float:
    """Return the memory of this machine's GPU; where there is none, what the config says of the node's."""
    if not torch.cuda.is_available():
        return gpu_gib
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / GIB


def knobs(rows: list[Row]) -> str:
    """Name what makes the three largest rows smaller."""
    turnable = [row for row in rows if row.knob]
    turnable.sort(key=lambda row: -row.bytes)
    return "; ".join(f"{row.knob} ({row.what}: {row.bytes / GIB:.1f} GiB)" for row in turnable[:3])


def plan_training(cfg: PolicyConfig, gpus: int, tokens: int, visual_tokens: int = 0, reference: bool = False) -> Plan:
    """Plan a training GPU of `gpus`, at micro-batches of `tokens`, of which `visual_tokens` come from frames."""
    s = shapes(cfg)
    layers, hidden, block = s.text.num_hidden_layers, s.text.hidden_size, block_bytes(s.text)
    fewer = "more GPUs" if s.frozen else "more GPUs, or policy.freeze = [vision]"
    shorter = "fewer tokens per micro-batch"

    # held from the first step to the last
    rows = [
        Row("master weights, fp32, sharded", 4 * s.trained / gpus, fewer, held=True),
        Row("gradients, fp32, sharded", 4 * s.trained / gpus, fewer, held=True),
        Row("AdamW's two moments, fp32, sharded", 8 * s.trained / gpus, fewer, held=True),
    ]
    if s.frozen:
        rows.append(Row("frozen vision tower, bf16, whole", 2 * s.frozen, held=True))
    if reference:
        rows.append(Row("reference policy, bf16", 2 * s.trained / gpus, "kl = 0, or more GPUs", held=True))

    # kept from the forward pass to the backward pass
    rows.append(Row("embeddings and head: bf16 weights and gradients, whole", 4 * s.root))
    if cfg.activation_checkpointing:
        rows.append(Row(f"inputs of {layers} blocks at {tokens} tokens", 2 * hidden * layers * tokens, shorter))
    else:
        recompute = "policy.activation_checkpointing = true"
        rows.append(Row(f"activations of {layers} blocks at {tokens} tokens", block * layers * tokens, recompute))
    features = 2 * (1 + len(s.vision.deepstack_visual_indexes)) * hidden * visual_tokens
    rows.append(Row("embeddings, final norm and visual features", 16 * hidden * tokens + features, shorter))

    # One after the other: only the larger of these two counts. (The frozen tower's moment is smaller.)
    # A block in its backward pass: two gathered, one gradient in bf16 and one in fp32, what it computes again.
    again = 1.5 * block * tokens if cfg.activation_checkpointing else 0
    backward = Row("at the fullest moment: a block in its backward pass", 10 * s.layer + again, shorter)
    # Logits: bf16 and fp32, the scaled copy, their exponentials and their gradients. The head's gradient: a chunk's in
    # bf16, the sum in fp32.
    chunk = 22 * min(cfg.logit_chunk, tokens) * s.text.vocab_size + 6 * s.text.vocab_size * hidden
    logits = Row(f"at the fullest moment: logits of {cfg.logit_chunk} targets", chunk, "a smaller policy.logit_chunk")
    rows.append(max(backward, logits, key=lambda row: row.bytes))

    # A guess until a GPU was seen: CUDA, NCCL and cuBLAS hold about 3 GiB that PyTorch's allocator does not count; 5 % of
    # what it counts lies between tensors of different lengths.
    used = sum(row.bytes for row in rows)
    rows.append(Row("overhead: CUDA, NCCL, cuBLAS, and 5 % between tensors", 3 * GIB + 0.05 * used))
    return Plan(f"training, each of {gpus} GPUs", rows)


def plan_updates(cfg, gpus: int) -> Plan:
    """Plan an RLConfig's training: a micro-batch full of frames, or one episode that fills its context; and the engine,
    where the ranks sample for themselves."""
    longest = max(cfg.train_tokens, cfg.rollout.max_context)
    plan = plan_training(cfg.policy, gpus, longest, cfg.train_tokens, reference=cfg.kl_coef > 0)
    if not cfg.rollout.gpus and not cfg.rollout.urls:
        s = shapes(cfg.policy)
        cache = cfg.rollout.max_batch_tokens * kv_bytes_per_token(s.text)
        plan.rows.append(Row("weights of the engine in this process", 2 * s.parameters, "rollout.gpus", held=True))
        plan.rows.append(Row("its KV cache", cache, "fewer rollout.max_batch_tokens"))
        # A batch is read at once: gate, up and their product in bf16, the norms and what they normalise in fp32.
        reading = cfg.rollout.max_batch_tokens * (6 * s.text.intermediate_size + 8 * s.text.hidden_size)
        plan.rows.append(Row("its reading of a batch that shares no prompt", reading, "fewer rollout.max_batch_tokens"))
    return plan


def plan_engine(cfg: PolicyConfig, gpus: int, rows: int, row_tokens: int) -> Plan:
    """Plan engines with a whole copy of the weights per GPU that hold `rows` sequences of `row_tokens` among them."""
    s = shapes(cfg)
    here = math.ceil(rows / gpus)
    cache = here * row_tokens * kv_bytes_per_token(s.text)
    uses = [
        Row("weights, bf16", 2 * s.parameters, "a smaller model, or a larger card", held=True),
        Row(f"KV cache of {here} x {row_tokens} tokens", cache, "fewer concurrent rollouts, or more engine GPUs"),
        Row("CUDA graphs and activations", 6 * GIB),
    ]
    return Plan(f"engine, each of {gpus} GPUs", uses)


def engine_load(cfg) -> tuple[int, int]:
    """Return (rows, tokens of each) that the engine of an RLConfig holds."""
    rows = min(cfg.rollout.concurrency * cfg.gpus, cfg.batch_tasks * cfg.group_size)
    # A group shares its prompt's keys (10 more tokens a frame: its bounds and stamp); each episode has two full turns.
    prompt = cfg.visual.overview_frames * (cfg.visual.frame_tokens(*cfg.visual.frame_size(1280, 720)) + 10)
    return rows, prompt // cfg.group_size + 2 * cfg.rollout.max_new_tokens


def check_disk(cfg: PolicyConfig, keep: int, run: str) -> str:
    """Weigh what a run writes: training states (fp32 weights and two moments), `keep` of them and one that is being
    written, and the model. PlanError if the disk has no room for them (the states that are there already count as room)."""
    s, folder = shapes(cfg), Path(run).absolute()
    states, model = 12 * s.trained * (keep + 1) / GIB, 2 * s.parameters / GIB
    there = sum(file.stat().st_size for file in folder.glob("state/step-*/*")) / GIB
    disk = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(disk).free / GIB
    told = f"disk: {keep + 1} training states take {states:.1f} GiB, the model {model:.1f}; {free:.1f} free at {disk}"
    if states + model > free + there:
        raise PlanError(f"{told}; make room, lower `keep`, or choose a `run` on another disk")
    return told


def kv_bytes_per_token(text) -> int:
    return 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim * 2  # K and V, bf16


def block_bytes(text) -> int:
    """Count what one text block keeps of one token for its backward pass, in bf16 with fp32 norms."""
    q, kv = text.num_attention_heads * text.head_dim, text.num_key_value_heads * text.head_dim
    # 16 H: two norms and their inputs. q and kv: head norms, rotary, attention; the prompt's keys are repeated for its
    # suffixes, here taken as 4 copies. 8 I: gate, its activation, up, and their product.
    return 16 * text.hidden_size + 12 * q + (10 + 4 * 4) * kv + 8 * text.intermediate_size


def utilisation(cfg: PolicyConfig, tokens: int, seconds: float, gpus: int) -> dict[str, float]:
    """Return MFU, the useful share of the GPUs' peak, where that peak is known; nothing on a CPU."""
    if not torch.cuda.is_available():
        return {}
    s = shapes(cfg)
    # 2 N for the forward pass of a token and 4 N for its backward pass. Attention adds little at these lengths.
    flops = 6 * (s.trained - s.text.vocab_size * s.text.hidden_size) * tokens
    name = torch.cuda.get_device_name()
    for part, tflops in PEAK_TFLOPS.items():
        if part in name:
            return {"mfu": flops / (gpus * tflops * 1e12 * seconds)}
    return {}
