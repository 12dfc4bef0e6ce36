"""ask.py: watch one agent at work, or check that the trainer sees exactly what the agent did.

    python -m study.ask --model M --video v.mp4 "What is written on the door?" [--k 64] [--url http://...]
    python -m study.ask ... --call '{"name": "crop_video", "arguments": {...}}'     # begin with this call
    python -m study.ask doctor --model M --video v.mp4          # exit status 1 if a check fails
    python -m study.ask doctor --gpu 7 --video v.mp4            # checks an SGLang server of configs/paragrpo_8b.yaml

The first command prints the agent's thoughts turn by turn, its parallel calls on a timeline, and their reports.
The *token doctor* lets the model's own engine continue after two parallel calls that work and one that fails. It checks
that our positions are transformers' own, that trainer and engine agree on the log-probs, and that the frames are seen, and
runs the check of a training's first batch. Run it on every new checkpoint, SGLang version or contract: it finds errors
that training would only show as noise. With --gpu it starts a server there.
"""

import argparse
import contextlib
import json
import os
import re
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from data import Call, Episode, Group, Task
from records import dump
from rl import RLConfig
from rollout import AgentContext, RolloutConfig, open_engine, render_prompt, run_episode
from runtime import config
from runtime.checks import check_servers, find_checkpoint, refuse_template
from runtime.config import ConfigError
from runtime.doctor import logprob_gap, position_error, self_check, trainer_logprobs
from runtime.engine import Engine, EngineError, Sample
from runtime.policy import PolicyConfig, load
from runtime.prompts import Prompts
from runtime.render import Renderer, load_tokenizer
from runtime.script import expandable_segments
from runtime.video import Clip, VideoError, Videos
from runtime.visual import ContractError, VisualContract
from tools import TOOLS

WIDTH = 40  # characters of the timeline
CONFIG = Path(__file__).resolve().parent.parent / "configs" / "paragrpo_8b.yaml"


def main() -> int:
    doctor = sys.argv[1:2] == ["doctor"]
    parser = argparse.ArgumentParser("python -m study.ask", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("doctor" if doctor else "question")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="default: crop_video")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the episode as JSON, for study.report")
    served = parser.add_mutually_exclusive_group()
    served.add_argument("--url", action="append", default=[], help="an SGLang server that runs this checkpoint")
    if doctor:
        served.add_argument("--gpu", type=int, help="start a server on this GPU (and up); GPU 0 is the trainer's")
        parser.add_argument("--config", default=CONFIG, help="config of the server, and of the model without --model")
    else:
        parser.add_argument("--call", metavar="JSON", help="the model's first turn: one call, to see a tool at work")
    parser.add_argument("--model", required=not doctor, help="a checkpoint's folder, or its name on the hub")
    parser.add_argument("--video", required=True, action="append", help="a video; give it again for more")
    parser.add_argument("--k", type=int, help="overview frames (default: the checkpoint's contract)")
    parser.add_argument(
        "--prompts", type=Path, help="YAML with texts in place of our prompts (default: the checkpoint's)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="the doctor's is always 1")
    parser.add_argument("--max-new-tokens", type=int, default=64 if doctor else 2048, help="per turn")
    args = parser.parse_args()
    if args.k is not None and args.k < 1:
        parser.error(f"--k {args.k}: must be at least 1, since the agent needs a frame")
    tools = tuple(args.tool or ["crop_video"])
    cfg = RolloutConfig(tools=tools, temperature=args.temperature, max_new_tokens=args.max_new_tokens)
    expandable_segments()
    try:
        cfg = replace(cfg, urls=tuple(args.url))
        if doctor:
            run = config.load(RLConfig, args.config)
            args.model = args.model or run.policy.checkpoint
        if doctor and args.gpu is not None:
            gpus = tuple(range(args.gpu, args.gpu + run.rollout.tensor_parallel))
            same = {name: getattr(run.rollout, name) for name in ("tensor_parallel", "server_args", "max_context")}
            cfg = replace(cfg, server_gpus=gpus, **same)
        with Videos(workers=2) as videos:
            context = context_of(args, videos, cfg)
            with contextlib.closing(context.engine):
                return run_doctor(args, context) if doctor else run_ask(args, context)
    except (VideoError, EngineError, FileNotFoundError, ConfigError, ContractError) as error:
        sys.exit(f"error: {error}")


def context_of(args: argparse.Namespace, videos: Videos, cfg: RolloutConfig) -> AgentContext:
    """Return everything that an agent needs, with the checkpoint's own contract."""
    source = find_checkpoint(args.model, weights=not cfg.urls)
    check_servers(cfg, ranks=1)
    contract = VisualContract.load(source)
    contract.check(source)
    prompts = Prompts.load(source)
    if args.prompts:
        prompts = config.build(Prompts, config.read_tree(args.prompts), "")
    renderer = Renderer(load_tokenizer(source), contract, prompts)
    refuse_template(source, renderer, dict(zip(cfg.tools, cfg.schemas)))
    return AgentContext(open_engine(source, renderer, cfg), renderer, videos, cfg)


def run_task(context: AgentContext, question: str, args: argparse.Namespace) -> Episode:
    """Run one episode about the videos of the command line, and write it to --trace if given."""
    task = Task("ask", question, tuple(map(os.path.abspath, args.video)), "oe", "")
    k = args.k or context.renderer.contract.overview_frames
    episode = run_episode(context, task, k, render_prompt(task, k, context), 0)
    if args.trace:
        with args.trace.open("w", encoding="utf-8") as file:
            dump(episode, file, context.renderer)
    return episode


# ------------------------------------------------------------------------------------------------ ask


def run_ask(args: argparse.Namespace, context: AgentContext) -> int:
    """Show one episode while it runs."""
    if args.call:
        context = begin_with(f"I look.\n</think>\n<tool_call>\n{args.call}\n</tool_call>", context)
    screen = Screen(context.videos.info(args.video[0]).duration)
    episode = run_task(replace(context, observe=screen.show), args.question, args)
    print(f"\n{len(episode.main.turns)} turns, {len(episode.calls)} calls, {episode.seconds:.1f} s {episode.error}")
    return int(bool(episode.error_kind))


class Screen:
    """The terminal. Reports of parallel calls arrive in any order, each from its own thread."""

    def __init__(self, duration: float):
        self.duration = duration  # seconds of the video
        self.turn = 0
        self._lock = threading.Lock()

    def show(self, event: str, what: str | Call) -> None:
        with self._lock:
            if event == "turn":
                self.turn += 1
                said = re.sub(r"<tool_call>.*?</tool_call>|<\|(?:im_end|endoftext)\|>", "", what, flags=re.S).strip()
                print(f"\n── turn {self.turn} " + "─" * 60 + f"\n{said}", flush=True)
            elif event == "clip":
                start, end = (int(WIDTH * second / self.duration) for second in what.window)
                bar = "·" * start + "█" * max(end - start, 1)
                print(f"  │{bar[:WIDTH]:·<{WIDTH}}│  {what.name} {_window(what)}", flush=True)
            else:
                outcome = f"{what.error}: {what.text}" if what.error else what.text
                print(f"  ↳ {_window(what)} {outcome}  ({what.seconds:.1f} s)", flush=True)


def _window(call: Call) -> str:
    return "{:.1f}–{:.1f} s".format(*call.window) if call.window else call.name or "call"


# ------------------------------------------------------------------------------------------------ doctor


def run_doctor(args: argparse.Namespace, context: AgentContext) -> int:
    """Run an episode with two calls that work and one that fails, and print four checks of it. Return 1 if one fails."""
    middle = context.videos.info(args.video[0]).duration / 2
    said = "Let me look.\n</think>"
    for start, end in ((0, middle), (middle, 0), (middle, 2 * middle)):
        call = {"name": "crop_video", "arguments": {"start_time": start, "end_time": end}}
        said += f"\n<tool_call>\n{json.dumps(call)}\n</tool_call>"
    context = replace(begin_with(said, context), cfg=replace(context.cfg, max_turns=1, temperature=1.0))
    episode = run_task(context, "What happens in this video?", args)
    if episode.error_kind:
        raise EngineError(episode.error)
    for i in range(*episode.main.turns[0]):  # these tokens are ours, not the engine's
        episode.main.mask[i] = 0
        episode.main.versions[i] = -1

    # Positions: ours must be those of transformers.
    policy = load(PolicyConfig(args.model), context.renderer.never_sampled, train=False)
    worst = max(position_error(policy, trajectory, context.renderer) for trajectory in episode.trajectories)
    passed = show(worst == 0, f"positions: they differ from transformers' by at most {worst}")

    # Log-probs: the engine reported those that the trainer computes. (Reports are greedy. Their log-probs are at temperature 1.)
    limit = 1e-3 if policy.dtype == torch.float32 else 0.05
    gap = max(logprob_gap(policy, [trajectory], 1.0) for trajectory in episode.trajectories)
    passed &= show(gap < limit, f"log-probs: trainer and engine differ by {gap:.1e} on average (limit {limit:g})")

    # Pixels: the same tokens have other log-probs with black frames.
    changes = []
    for trajectory in episode.trajectories:
        black = [Clip(np.zeros_like(clip.pixels), clip.times) for clip in trajectory.clips]
        blind = replace(trajectory, prompt_clips=black, call_clips=[])
        seen, unseen = (trainer_logprobs(policy, [t], 1.0) for t in (trajectory, blind))
        changes.append((seen - unseen).abs().max().item())
    passed &= show(min(changes) > 1e-4, f"pixels: black frames change log-probs by {min(changes):.1e} or more")

    # The check of a training's first batch. It raises EngineError.
    self_check(policy, [Group(episode.task, episode.k, [episode])], 1.0)
    return int(not passed)


def show(good: bool, claim: str) -> bool:
    print(f"{'ok  ' if good else 'FAIL'}  {claim}")
    return good


class FirstTurn:
    """An engine that writes the first turn itself and then asks the real one, so that every model makes these calls."""

    def __init__(self, engine: Engine, first: list[int]):
        self.engine = engine
        self.first = first  # its tokens; empty once it has been said
        self.version = engine.version
        self.announce = engine.announce

    def generate(self, ids: list[int], clips: Sequence[Clip], **more) -> Sample:
        if not self.first:
            return self.engine.generate(ids, clips, **more)
        first, self.first = self.first, []
        return Sample(first, [0.0] * len(first), "stop", self.version)


def begin_with(said: str, context: AgentContext) -> AgentContext:
    """Return a context whose episode begins with this turn."""
    return replace(
        context, engine=FirstTurn(context.engine, [*context.renderer.encode(said), context.renderer.end_of_turn])
    )


if __name__ == "__main__":
    sys.exit(main())
