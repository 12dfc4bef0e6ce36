"""sft.py: the cold start. Teaches the policy the tools, the tags and the sub-agent's reports from trajectories.

    torchrun --standalone --nproc_per_node=8 sft.py configs/sft_8b.yaml    # one 8x80 GB node
    python sft.py configs/toy_sft.yaml                                     # the same code on a CPU
    python sft.py configs/sft_8b.yaml --dry-run                            # config, data and memory plan; loads no weights

Rows (parquet in the published schema) -> RUN/metrics.jsonl, RUN/state/ (to resume), RUN/model/ (Hugging Face format).

A step reads `batch_rows` rows, whatever the number of ranks; each rank packs its share into micro-batches of at most
`pack_tokens` tokens. The loss of a step is one formula over the target tokens of all ranks,

    L = sum_t w_t * (-log pi(o_t | o_<t)) / sum_t w_t

so neither packing, nor the number of micro-batches, nor the number of ranks changes it.

Deliberately missing: gradient accumulation as a knob (it is what packing leaves over), loss on prompts, early stopping.
"""

import os

from runtime import config

if __name__ == "__main__":
    config.answer_help(__doc__)  # before torch and transformers, which take seconds to import
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # no two micro-batches have the same length

import json
import math
import re
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from data import Dialogue, encode_dialogue, parse_dialogue
from rewards import TAG
from runtime.checks import check_run, find_checkpoint
from runtime.contract import END_OF_TURN, Bundle, ContractError, Renderer, VisualContract, load_tokenizer
from runtime.dataset import DataConfig, DataError, Dataset, RowError, check_rows
from runtime.distributed import (
    checkpoint_dir,
    export,
    gather,
    init_distributed,
    load_state,
    peak_memory,
    print0,
    save_state,
    sum_over_ranks,
)
from runtime.packing import best_fit
from runtime.plan import PlanError, plan_disk, plan_training, training_seconds, utilisation
from runtime.policy import load, make_optimizer, optimizer_step
from runtime.settings import OptimConfig, PolicyConfig
from runtime.video import VideoError, Videos
from tools import TOOLS

# What a target token is, by the assistant's text; everything else is prose.
KIND_PATTERNS = {
    "arguments": re.compile(r"<tool_call>(.*?)</tool_call>", re.S),
    "answer": re.compile(r"<answer>(.*?)</answer>", re.S),
    "structure": re.compile(rf"({TAG.pattern}|{re.escape(END_OF_TURN)})"),
}
KINDS = ("prose", *KIND_PATTERNS)


@dataclass(frozen=True)
class SFTConfig:
    """One SFT run."""

    run: str
    """Folder of everything the run leaves."""
    policy: PolicyConfig
    data: DataConfig
    val: DataConfig | None = None
    """Held-out rows: the loss on `batch_rows` of them is measured every `eval_every` steps."""
    visual: VisualContract = VisualContract()
    tools: tuple[str, ...] = ("crop_video",)
    """Names of tools.TOOLS that the prompt offers."""
    optim: OptimConfig = OptimConfig(lr=2e-5, schedule="cosine", warmup=0.05)
    kind_weights: dict[str, float] = field(default_factory=dict)
    """w_t by kind of target token (prose, arguments, answer, structure); 1 where nothing is said."""
    steps: int = 500
    batch_rows: int = 64
    """Rows of a step, over all ranks."""
    pack_tokens: int = 8192
    """Tokens of a micro-batch; a longer row is skipped and counted."""
    eval_every: int = 50
    save_every: int = 50
    keep: int = 2
    """Complete training states that stay on disk."""
    resume: Literal["auto", "never"] = "auto"
    """auto: go on from the newest state of `run`, if there is one."""
    max_bad_steps: int = 5
    """A step whose gradient is not finite is skipped; after more than this many the run stops."""
    decoders: int = 2
    """Video decoder processes per rank."""
    gpus: int = 8
    """What --dry-run plans for; torchrun decides how many there are ..."""
    gpu_gib: float = 80.0
    """... and the machine, how much memory each has."""

    def __post_init__(self):
        if unknown := set(self.tools) - set(TOOLS):
            raise ValueError(f"tools = {sorted(unknown)}: not among tools.TOOLS: {', '.join(TOOLS)}")
        if unknown := set(self.kind_weights) - set(KINDS):
            raise ValueError(f"kind_weights = {sorted(unknown)}: no kinds of token; there are {', '.join(KINDS)}")
        if min(self.steps, self.batch_rows, self.pack_tokens, self.eval_every, self.save_every, self.keep) < 1:
            raise ValueError("steps, batch_rows, pack_tokens, eval_every, save_every, keep: must be at least 1")


SHOWN = ("loss", "loss_answer", "loss_arguments", "val_loss", "grad_norm", "lr", "tokens_per_second", "seconds")


def main(cfg: SFTConfig) -> None:
    """Train from the newest state of the run, or from its checkpoint, to the last step; export the policy."""
    rank, world = init_distributed()
    check_run(cfg)
    run, source = Path(cfg.run), find_checkpoint(cfg.policy.checkpoint, checkpoint_dir)
    cfg.visual.check(source)
    renderer = Renderer(load_tokenizer(source), cfg.visual)
    check_rows(parse_dialogue, cfg.data, cfg.val)
    start = replace(cfg.policy, checkpoint=str(source))
    if torch.cuda.is_available():
        check_memory(replace(cfg, gpus=world, policy=start))
    policy = load(start, renderer.never_sampled)
    optimizer = make_optimizer(policy, cfg.optim)
    done, counted = load_state(run / "state", policy, optimizer, cfg.resume)
    bad_steps = counted.get("bad_steps", 0)
    metrics = None
    if rank == 0:
        config.save_run(cfg, run)
        metrics = config.Metrics(run, "sft", done, cfg.steps, SHOWN)
    with Videos(cfg.decoders, quarantine=run / "bad_videos.jsonl") as videos:
        batches = Batches(cfg, cfg.data, videos, renderer, rank, world)
        held_out = Batches(cfg, cfg.val, videos, renderer, rank, world).make(0) if cfg.val else None
        if held_out and not any(gather(len(held_out.micro))):
            raise DataError(f"val: none of its first {cfg.batch_rows} rows can be used: see `python data.py check`")
        for step in range(done, cfg.steps):
            clock = time.perf_counter()
            batch = batches.take(step)
            waited = time.perf_counter() - clock

            measured = accumulate(policy, batch)
            norm = optimizer_step(policy, optimizer, cfg.optim, step, cfg.steps)
            if bad := not math.isfinite(norm):
                bad_steps += 1
                batch.dump(run / f"bad_step_{step}_rank{rank}.json")

            seconds = time.perf_counter() - clock
            measured |= {"grad_norm": norm, "lr": optimizer.param_groups[0]["lr"] * (not bad), "bad_steps": bad_steps}
            measured |= {"seconds": seconds, "wait_seconds": waited, "tokens_per_second": measured["tokens"] / seconds}
            measured |= {"peak_memory_gib": peak_memory()}
            measured |= utilisation(start, int(measured["tokens"]), seconds, world)
            measured |= sum_over_ranks({"bad_rows": len(batches.dataset.bad)})
            last = step + 1 == cfg.steps
            if held_out and (last or (step + 1) % cfg.eval_every == 0):
                with torch.no_grad():
                    losses = accumulate(policy, held_out)
                measured |= {f"val_{name}": value for name, value in losses.items() if name.startswith("loss")}
            if metrics:
                metrics.write(step, measured)
            if bad_steps > cfg.max_bad_steps:
                raise FloatingPointError(
                    f"gradient not finite in {bad_steps} steps, more than max_bad_steps = {cfg.max_bad_steps}; "
                    f"their rows and tokens: {run}/bad_step_*.json. Lower optim.lr, or drop these rows."
                )
            if last or (step + 1) % cfg.save_every == 0:
                save_state(run / "state", policy, optimizer, step + 1, cfg.keep, {"bad_steps": bad_steps})
    export(policy, run / "model", source, cfg.visual)
    print0(f"done: {run}/model")


# ------------------------------------------------------------------------------------------------ the loss


def accumulate(policy, batch: "Batch") -> dict[str, float]:
    """L over the micro-batches of all ranks, and its gradient where gradients are on.

    Every rank runs as many micro-batches as the longest: the rest are empty, for the collectives' sake."""
    total = sum_over_ranks({"w": float(sum(w.sum() for w in batch.weights))})["w"]
    sums = {"loss": 0.0, "tokens": 0.0} | {f"{what}_{kind}": 0.0 for kind in KINDS for what in ("nll", "targets")}
    for i in range(max(gather(len(batch.micro)))):
        mine = batch.micro[i : i + 1]
        nll = -policy(mine[0] if mine else []).logprobs  # [N]
        weights = torch.from_numpy(batch.weights[i]).to(nll) if mine else nll.detach()  # [N], where N = 0
        loss = (weights * nll).sum() / total
        if loss.requires_grad:
            loss.backward()
        sums["loss"] += loss.item()
        if mine:
            sums["tokens"] += sum(map(len, mine[0]))
            nll = nll.detach().cpu().numpy()
            for k, kind in enumerate(KINDS):
                chosen = batch.kinds[i] == k
                sums[f"nll_{kind}"] += float(nll[chosen].sum())
                sums[f"targets_{kind}"] += int(chosen.sum())
    sums = sum_over_ranks(sums)
    per_kind = {f"loss_{kind}": sums[f"nll_{kind}"] / n for kind in KINDS if (n := sums[f"targets_{kind}"])}
    loss = {"loss": sums["loss"]} if total else {}  # of nothing there is none
    return {**loss, **per_kind, "tokens": sums["tokens"]}


# ------------------------------------------------------------------------------------------------ batches


@dataclass
class Batch:
    """This rank's share of a step, packed into micro-batches."""

    micro: list[list[Bundle]]
    weights: list[np.ndarray]  # per micro-batch: w_t of its targets, in the order bundle, token
    kinds: list[np.ndarray]  # the same for their kinds, as indices into KINDS
    rows: list[str]  # where each bundle comes from

    def dump(self, path: Path) -> None:
        """What is needed to look at a step that went wrong: its rows and their exact tokens."""
        tokens = [bundle.suffixes[0] for bundles in self.micro for bundle in bundles]
        path.write_text(json.dumps({"rows": self.rows, "tokens": tokens}))


class Batches:
    """Batches by step number; the next one is made while this one trains."""

    def __init__(self, cfg: SFTConfig, source: DataConfig, videos: Videos, renderer: Renderer, rank: int, world: int):
        self.cfg, self.videos, self.renderer, self.rank, self.world = cfg, videos, renderer, rank, world
        self.dataset = Dataset(source, parse_dialogue)
        self.schemas = [TOOLS[name].schema for name in cfg.tools]
        self.rows, self.ahead = ThreadPoolExecutor(2 * cfg.decoders, "row"), ThreadPoolExecutor(1, "batch")
        self.next: Future | None = None

    def take(self, step: int) -> Batch:
        batch = (self.next or self.ahead.submit(self.make, step)).result()
        self.next = self.ahead.submit(self.make, step + 1) if step + 1 < self.cfg.steps else None
        return batch

    def make(self, step: int) -> Batch:
        dialogues = [d for d, _ in self.dataset.batch(step, self.cfg.batch_rows, self.rank, self.world)]
        encoded = []
        for dialogue, bundle in zip(dialogues, self.rows.map(self.encode, dialogues)):
            if isinstance(bundle, str):
                self.dataset.reject(dialogue.id, bundle)
            else:
                encoded.append((dialogue.id, bundle, target_kinds(bundle, self.renderer)))
        weight_of = np.array([self.cfg.kind_weights.get(kind, 1.0) for kind in KINDS], np.float32)
        bins = best_fit([len(bundle) for _, bundle, _ in encoded], self.cfg.pack_tokens)
        members = [[encoded[i] for i in bin] for bin in bins]
        return Batch(
            micro=[[bundle for _, bundle, _ in bin] for bin in members],
            weights=[np.concatenate([bundle.weight * weight_of[kinds] for _, bundle, kinds in bin]) for bin in members],
            kinds=[np.concatenate([kinds for *_, kinds in bin]) for bin in members],
            rows=[row for bin in members for row, *_ in bin],
        )

    def encode(self, dialogue: Dialogue) -> Bundle | str:
        """The dialogue's bundle, or why it cannot be used."""
        try:
            bundle = encode_dialogue(dialogue, self.videos, self.renderer, self.schemas)
        except (RowError, VideoError) as error:
            return str(error)
        if len(bundle) > self.cfg.pack_tokens:
            return f"{len(bundle)} tokens, more than pack_tokens = {self.cfg.pack_tokens}"
        return bundle


def target_kinds(bundle: Bundle, renderer: Renderer) -> np.ndarray:
    """Index into KINDS of each target token; a token that spans two kinds is of the kind that it begins with."""
    (ids,), (mask,) = bundle.suffixes, bundle.masks
    edges = np.flatnonzero(np.diff([0, *mask, 0]))
    kinds = []
    for start, stop in zip(edges[::2], edges[1::2]):  # one assistant turn
        text, spans = renderer.decode(ids[start:stop]), renderer.offsets(ids[start:stop])
        kind_at = np.zeros(len(text) + 1, int)
        for k, pattern in enumerate(KIND_PATTERNS.values(), 1):
            for match in pattern.finditer(text):
                kind_at[match.start(1) : match.end(1)] = k
        kinds += [kind_at[min(start, len(text))] for start, _ in spans]
    return np.array(kinds, int)


def check_memory(cfg: SFTConfig) -> None:
    """Print the plan of a micro-batch that is full, and full of frames; PlanError if it does not fit."""
    plan = plan_training(cfg.policy, cfg.gpus, cfg.pack_tokens, visual_tokens=cfg.pack_tokens)
    print0(plan.table(cfg.gpu_gib))
    plan.check(cfg.gpu_gib)


def dry_run(cfg: SFTConfig) -> int:
    """Memory, data, disk: what `main` would stumble over."""
    check_memory(cfg)
    seconds = training_seconds(cfg.policy, cfg.gpus, cfg.gpus * cfg.pack_tokens)
    print(f"one full micro-batch on every GPU: about {seconds:.1f} s (H100, 30 % of its peak)")
    check_rows(parse_dialogue, cfg.data, cfg.val)
    dataset = Dataset(cfg.data, parse_dialogue)
    print(f"data: {dataset.total} rows, {len(dataset)} per epoch")
    print(plan_disk(cfg.policy, cfg.run, cfg.keep))
    return 0


if __name__ == "__main__":
    cfg, args = config.command_line(SFTConfig, __doc__)
    try:
        sys.exit(dry_run(cfg) if args.dry_run else main(cfg))
    except (config.ConfigError, ContractError, DataError, FileNotFoundError, PlanError) as error:
        sys.exit(f"error: {error}")
