"""sft.py: the cold start. Train the policy on written trajectories: tool calls, tags and sub-agent reports.

    torchrun --standalone --nproc_per_node=8 sft.py configs/sft_8b.yaml    # one 8x80 GB node
    python sft.py configs/toy_sft.yaml                                     # the same code on a CPU
    python sft.py configs/sft_8b.yaml --dry-run                            # config, data and memory plan; loads no weights

It reads rows (dialogues.py shows their forms) and writes RUN/metrics.jsonl, RUN/state/ (to resume from) and RUN/model/
(Hugging Face format). A step reads `batch_rows` rows in total. Each rank packs its share into micro-batches of at most
`pack_tokens` tokens. The loss of a step is a weighted mean over the target tokens of all ranks,

    L = sum_t w_t * (-log pi(o_t | o_<t)) / sum_t w_t

so it does not depend on the packing, the number of micro-batches or the number of ranks.

Deliberately missing: a setting for gradient accumulation (packing decides it), loss on prompts, early stopping.
"""

import re
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from dialogues import Dialogue, Media, parse_dialogue
from episode import NO_PROMPT, Call, Trajectory
from runtime.checkpoints import load_policy, on_the_hub
from runtime.dataset import DataConfig, DataError, Dataset, RowError, require_rows, row_errors
from runtime.distributed import gather, init_distributed, local_size, print0, rank, sum_over_ranks, world_size
from runtime.engine import map_in_threads, thread_pool
from runtime.folder import hold_folder, require_folder
from runtime.packing import Bundle, best_fit
from runtime.plan import plan_training
from runtime.policy import Policy
from runtime.render import TAG, Renderer, refuse_template
from runtime.run import (
    OptimConfig,
    Run,
    RunConfig,
    make_optimizer,
    optimizer_step,
    require_memory,
    require_weights,
    utilisation,
)
from runtime.script import command_line, note_not_looked_up, open_checkpoint, read_all_rows, run_script
from runtime.video import Videos
from tools import TOOLS, parse_calls, schemas_of

TokenKind = Literal["prose", "arguments", "untagged_answer", "answer", "structure"]


@dataclass(frozen=True, kw_only=True)
class SFTConfig(RunConfig):
    """One SFT run."""

    tools: tuple[Literal[*TOOLS], ...] = ("crop_video",)  # type: ignore[valid-type]  # mypy wants the words written out
    """Tools that the prompt offers, by their names in tools.TOOLS."""
    optim: OptimConfig = OptimConfig(lr=2e-5, schedule="cosine", warmup=0.05)
    kind_weights: dict[TokenKind, float] = field(default_factory=dict)
    """w_t by kind of target token; 1 for all other kinds. The source's loss_weight multiplies it."""
    steps: int = 500
    batch_rows: int = 64
    """Rows per step, over all ranks. Also the number of `val` rows whose loss is measured."""
    pack_tokens: int = 8192
    """Most tokens of a micro-batch. A longer row is skipped and counted."""


SHOWN = ("loss", "loss_answer", "loss_arguments", "val_loss", "grad_norm", "lr", "tokens_per_second", "seconds")


def main(cfg: SFTConfig, dry: bool = False) -> None:
    """Build the parts of a run, train to the last step, and export the policy. A dry run ends before the weights are loaded."""
    init_distributed()

    # Refuse what cannot work, in the order of cost. A dry run may be on another machine than the run.
    gpus = cfg.plan.gpus if dry else local_size()
    if dry or torch.cuda.is_available():
        require_memory(cfg.plan, [plan_training(cfg.policy, gpus, cfg.pack_tokens)])
    require_folder(cfg, cfg.policy.checkpoint)
    require_rows(parse_dialogue, cfg.data, cfg.val)
    if dry and on_the_hub(cfg.policy.checkpoint):
        note_not_looked_up(cfg.policy.checkpoint)
    else:
        source, renderer = open_checkpoint(cfg.policy.checkpoint, cfg.visual, cfg.prompts)
        refuse_template(source, renderer, schemas_of(cfg.tools))
        require_weights(cfg, source)
    if dry:
        print0(f"ready: {cfg.run}")
        return

    with hold_folder(cfg, source):
        # Load the policy and make the optimizer. Run restores both from the newest state.
        policy = load_policy(replace(cfg.policy, checkpoint=str(source)), renderer.never_sampled)
        run = Run(cfg, "sft", SHOWN, policy, make_optimizer(policy, cfg.optim))

        # Open the training rows, and read the held-out rows once.
        if run.steps_done < cfg.steps:
            with Videos(cfg.workers) as videos:
                batches = Batches(cfg.data, cfg, videos, renderer)
                held_out = []
                if cfg.val:
                    val = Batches(cfg.val, cfg, videos, renderer)
                    held_out = val.make(0, min(cfg.batch_rows, len(val.dataset)))
                train(cfg, policy, batches, held_out, run)
        run.export()


def train(cfg: SFTConfig, policy: Policy, batches: "Batches", held_out: "list[MicroBatch]", run: Run) -> None:
    """Train to the last step: read, forward and backward, update, log, save."""
    with thread_pool(1) as ahead:
        upcoming = ahead.submit(batches.make, run.steps_done)
        for step in range(run.steps_done, cfg.steps):
            # Wait for this step's batch. The next one is made in a thread while this one trains.
            started = time.perf_counter()
            batch = upcoming.result()
            if step + 1 < cfg.steps:
                upcoming = ahead.submit(batches.make, step + 1)
            waited = time.perf_counter() - started

            # Forward, backward, update. A gradient that is not finite is skipped (`bad_steps: 1`).
            measured = batch_loss(policy, batch)
            if "loss" not in measured:  # on all ranks
                bad = [f"{origin}: {reason}" for origin, reason in batches.dataset.bad.items()]
                raise DataError(f"step {step + 1}: none of its rows can be used; the last: {''.join(bad[-1:])}")
            measured["grad_norm"] = optimizer_step(policy, run.optimizer, cfg.optim, step, cfg.steps)
            seconds = time.perf_counter() - started

            # Log.
            measured |= {"seconds": seconds, "wait_seconds": waited, "tokens_per_second": measured["tokens"] / seconds}
            measured |= utilisation(policy.cfg, int(measured["tokens"]), seconds, world_size())
            measured |= sum_over_ranks({"bad_rows": len(batches.dataset.bad)})
            if cfg.val and run.is_time(step, cfg.eval_every):
                with torch.no_grad():
                    losses = batch_loss(policy, held_out)
                measured |= {f"val_{name}": value for name, value in losses.items() if name.startswith("loss")}
            run.log(step, measured)

            # Save.
            run.refuse_broken_end(step, measured)
            run.save(step)


# ------------------------------------------------------------------------------------------------ the loss


class MicroBatch(NamedTuple):
    """Bundles that share a forward pass."""

    bundles: list[Bundle]
    kinds: np.ndarray  # str [N]: one of TOKEN_KINDS for each target, only to log the loss by kind

    @property
    def weight(self) -> float:
        """The sum of w_t over its targets."""
        return float(sum(np.sum(row.loss_weights, dtype=np.float64) for bundle in self.bundles for row in bundle.rows))


def batch_loss(policy: Policy, batch: list[MicroBatch]) -> dict[str, float]:
    """Return the loss L over the micro-batches of all ranks, and the mean loss by kind of token. With gradients enabled, also
    add the gradient of L."""
    # Pad with empty micro-batches: all ranks must run the same collectives.
    empty = MicroBatch([], np.zeros(0, str))
    batch = batch + [empty] * (max(gather(len(batch))) - len(batch))

    total = sum(gather(sum(micro.weight for micro in batch)))  # sum_t w_t over all ranks
    sums: dict[str, float] = defaultdict(int, loss=0.0, tokens=0.0)  # an empty batch adds no other keys
    for micro in batch:
        output = policy(micro.bundles)
        nll = -output.logprobs  # [N]
        loss = (output.loss_weights * nll).sum() / total
        if loss.requires_grad:  # not on held-out rows
            loss.backward()

        sums["loss"] += loss.item()
        sums["tokens"] += sum(len(bundle) for bundle in micro.bundles)
        nll = nll.detach().cpu().numpy()
        for kind in TOKEN_KINDS:
            chosen = micro.kinds == kind
            sums[f"nll_{kind}"] += float(nll[chosen].sum())
            sums[f"targets_{kind}"] += int(chosen.sum())

    # A batch or a kind without targets has no loss.
    sums = sum_over_ranks(sums)
    measured = {"tokens": sums["tokens"]}
    if total:
        measured["loss"] = sums["loss"]
    for kind in TOKEN_KINDS:
        if sums.get(f"targets_{kind}"):
            measured[f"loss_{kind}"] = sums[f"nll_{kind}"] / sums[f"targets_{kind}"]
    return measured


# ------------------------------------------------------------------------------------------------ rows


def encode_row(dialogue: Dialogue, cfg: SFTConfig, renderer: Renderer, videos: Videos) -> Trajectory:
    """Return the dialogue's row, or raise RowError if it cannot be used."""
    with row_errors():
        row = encode_dialogue(dialogue, videos, renderer, list(schemas_of(cfg.tools).values()))
    if len(row.ids) > cfg.pack_tokens:
        raise RowError(f"{len(row.ids)} tokens, more than pack_tokens = {cfg.pack_tokens}")
    return row


def encode_dialogue(dialogue: Dialogue, videos: Videos, renderer: Renderer, tools: list[dict]) -> Trajectory:
    """Encode a dialogue as a row, with mask 1 on the assistant's tokens only. Rows of SFT share no prompt, so all
    tokens are the row's own."""
    refuse_calls_of_other_tools(dialogue, tools if dialogue.agent == "main" else [])
    prompts, contract = renderer.prompts, renderer.contract
    clips = [media.frames(videos, contract) for media in dialogue.media]

    # Open with the prompt that this agent gets in a rollout.
    if dialogue.agent == "sub":
        if len(clips) != 1:
            raise RowError(f"a sub-agent's row must show one video or image, and this one shows {len(clips)}")
        window = dialogue.media[0].window(videos)
        messages = prompts.subagent_messages(
            clips[0], window, contract, dialogue.request, dialogue.system, dialogue.question
        )
    else:
        paths = [media.path for media in dialogue.media]
        messages = prompts.main_messages(dialogue.question, paths, clips, contract, with_tools=dialogue.agent == "main")

    # Append the turns, and decode their media.
    for turn in dialogue.turns:
        content = []
        for part in turn["content"]:
            content.append(part.frames(videos, contract) if isinstance(part, Media) else part)
        messages.append({"role": turn["role"], "content": content})

    rendered = renderer.render(messages, tools if dialogue.agent == "main" else None)
    return Trajectory(NO_PROMPT, rendered.ids, rendered.mask, call_clips=rendered.clips)


def refuse_calls_of_other_tools(dialogue: Dialogue, tools: list[dict]) -> None:
    """Refuse a dialogue that would teach calls of tools which its agent is not offered."""
    offered = [tool["function"]["name"] for tool in tools]
    for call in read_calls(dialogue):
        if not call.error and call.name not in offered:
            raise RowError(f"a call of {call.name!r}: this agent is offered {offered}; set `tools`, or drop the row")


def read_calls(dialogue: Dialogue) -> list[Call]:
    """Read the calls of all turns, as a rollout does."""
    calls = []
    for turn in dialogue.turns:
        if turn["role"] == "assistant":
            calls += parse_calls(turn["content"][0])
    return calls


# ------------------------------------------------------------------------------------------------ batches


class Batches:
    """This rank's batches from a data source, by step number."""

    def __init__(self, source: DataConfig, cfg: SFTConfig, videos: Videos, renderer: Renderer):
        self.dataset = Dataset(source, parse_dialogue)
        self.cfg = cfg
        self.videos = videos
        self.renderer = renderer

    def make(self, step: int, size: int | None = None) -> list[MicroBatch]:
        """Read this rank's share of a step's rows and pack it. Unusable rows are counted and left out."""
        # Encode the rows in threads.
        draws = self.dataset.batch(step, size or self.cfg.batch_rows, rank(), world_size())
        results = map_in_threads(self.try_to_encode, [draw.item for draw in draws], at_once=2 * self.cfg.workers)
        rows = []
        kinds_of_rows = []  # str [N] of each row
        for draw, (row, reason) in zip(draws, results):
            if row is None:
                self.dataset.reject(draw.origin, reason)
                continue

            # w_t = the source's loss_weight * the weight of the token's kind, and 0 outside the targets
            kinds = target_kinds(row, self.renderer)
            kind_weights = np.array([self.cfg.kind_weights.get(kind, 1.0) for kind in kinds])  # [N]
            row.loss_weights = np.zeros(len(row.ids), np.float32)  # [T]
            row.loss_weights[np.flatnonzero(row.mask)] = draw.loss_weight * kind_weights
            rows.append(row)
            kinds_of_rows.append(np.array(kinds, str))

        # Pack them into micro-batches.
        batch = []
        for members in best_fit([len(row.ids) for row in rows], self.cfg.pack_tokens):
            bundles = [Bundle(NO_PROMPT, [rows[i]]) for i in members]
            batch.append(MicroBatch(bundles, np.concatenate([kinds_of_rows[i] for i in members])))
        return batch

    def try_to_encode(self, dialogue: Dialogue) -> tuple[Trajectory | None, str]:
        """Return the dialogue's row, or None and the reason why it cannot be used."""
        try:
            return encode_row(dialogue, self.cfg, self.renderer, self.videos), ""
        except RowError as error:
            if self.videos.closed:  # the run is ending, and no row is at fault
                raise
            return None, str(error)


# ------------------------------------------------------------------------------------------------ kinds of tokens

# Patterns for the kinds of text in an assistant's turn. Group 1 of a match is text of that kind. A later kind overwrites an
# earlier one. All other text is prose.
KIND_PATTERNS: dict[TokenKind, re.Pattern] = {
    "arguments": re.compile(r"<tool_call>(.*?)</tool_call>", re.S),
    "untagged_answer": re.compile(r"answer is ([^\n<.]+)", re.I),
    "answer": re.compile(r"<answer>(.*?)</answer>", re.S),
    "structure": re.compile(f"({TAG.pattern})"),
}
TOKEN_KINDS = ("prose", *KIND_PATTERNS)


def target_kinds(row: Trajectory, renderer: Renderer) -> list[TokenKind]:
    """Return the kind of each target token."""
    kinds: list[TokenKind] = []
    edges = np.flatnonzero(np.diff([0, *row.mask, 0]))  # start, end, start, end, ... of the assistant's turns
    for start, stop in zip(edges[::2], edges[1::2]):
        turn = row.ids[start:stop]
        kind_at = character_kinds(renderer.decode(turn))
        for token, (first, last) in zip(turn, renderer.offsets(turn), strict=True):
            if token in renderer.ends_of_turn:
                kinds.append("structure")
            else:
                kinds.append(token_kind(kind_at[first : max(last, first + 1)]))
    return kinds


def character_kinds(text: str) -> list[TokenKind]:
    """Return the kind of each character, and one more `prose` for a token without characters at the end of the text."""
    kinds: list[TokenKind] = ["prose"] * (len(text) + 1)
    for kind, pattern in KIND_PATTERNS.items():
        for match in pattern.finditer(text):
            kinds[match.start(1) : match.end(1)] = [kind] * len(match[1])
    return kinds


def token_kind(kinds: list[TokenKind]) -> TokenKind:
    """Return the kind of the token with these characters. In a token of tag and content, the last content decides, unlike
    in rewards.structural_mask: `>B` and `]</` hold a piece of a tag and of an answer, and count as answer."""
    content = [kind for kind in kinds if kind != "structure"]
    if not content:
        return "structure"  # `</think>`, `</`
    return content[-1]  # `red`, `>B`, `]</`


# ------------------------------------------------------------------------------------------------ --check-data


def check_row(
    row: dict, name: str, root: Path, cfg: SFTConfig, renderer: Renderer, videos: Videos
) -> tuple[int, list[str]]:
    """Return how many tokens a row has, and what is odd about it."""
    dialogue = parse_dialogue(row, name, root)
    return len(encode_row(dialogue, cfg, renderer, videos).ids), list_oddities(dialogue)


def list_oddities(dialogue: Dialogue) -> list[str]:
    """List likely mistakes. SFT trains on such a row all the same, because a loose format can be taught on purpose."""
    calls = read_calls(dialogue)
    parts = list(dialogue.media)
    replies = 0
    for turn in dialogue.turns:
        parts += turn["content"]
        replies += turn["role"] == "tool"
    oddities = []
    if any(call.error for call in calls):
        oddities.append("a call that cannot be parsed")
    if replies < len(calls):
        oddities.append("fewer replies than calls")
    if not any(isinstance(part, Media) for part in parts):
        oddities.append("no frame")
    return oddities


if __name__ == "__main__":
    cfg, args = command_line(SFTConfig, __doc__)
    work = partial(read_all_rows, check_row=check_row) if args.check_data else partial(main, dry=args.dry_run)
    run_script(work, cfg)
