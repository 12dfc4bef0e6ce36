"""ask.py: watch one agent at work, or check that the trainer sees exactly what the agent did.

    python -m study.ask --model M --video v.mp4 "What is written on the door?" [--k 64] [--url http://...]
    python -m study.ask ... --call '{"name": "crop_video", "arguments": {...}}'     # begin with this call
    python -m study.ask doctor --model M --video v.mp4          # a table; exit status 1 if a check fails
    python -m study.ask doctor --gpu 7 --video v.mp4            # checks an SGLang server of configs/paragrpo_8b.yaml

The first command prints the agent's thoughts turn by turn, its parallel calls on a timeline, and their reports.
The *token doctor* lets the model's own engine continue after two parallel calls that work and one that fails. It checks
the episode against independent sources: the chat template, transformers' position ids, and the trainer's log-probs. Run
it on every new checkpoint, SGLang version or contract: it finds errors that training would only show as noise. With
--gpu it starts a server there, checks it at two temperatures, kills it, and checks the server that restarts.
"""

import argparse
import contextlib
import json
import os
import re
import sys
import threading
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

import data
from data import Call, Episode, Task
from rl import RLConfig
from rollout import NO_CALLS_LEFT, AgentContext, RolloutConfig, dump, open_engine, render_prompt, run_episode
from runtime import config
from runtime.checks import check_servers, find_checkpoint
from runtime.cleanup import kill_group
from runtime.config import ConfigError, expandable_segments
from runtime.doctor import engine_logprobs, flaw_of, position_error, trainer_logprobs
from runtime.engine import Engine, EngineError, Sample
from runtime.policy import Policy, PolicyConfig, load
from runtime.prompts import Prompts
from runtime.render import END_OF_TURN, Renderer, load_tokenizer
from runtime.video import Frames, VideoError, Videos
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
        said = f"I look.\n</think>\n<tool_call>\n{args.call}\n</tool_call>"
        witness = Witness(context.engine, [*context.renderer.encode(said), context.renderer.end_of_turn])
        context = replace(context, engine=witness)
    screen = Screen(context.videos.info(args.video[0]).duration)
    episode = run_task(replace(context, observe=screen.show), args.question, args)
    print(f"\n{len(episode.main.turns)} turns, {len(episode.calls)} calls, {episode.seconds:.1f} s {episode.error}")
    return int(bool(episode.error))


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


class Witness:
    """An engine that records every request to the real one. It writes the first turn itself, so that there are calls to
    check for every model."""

    def __init__(self, engine: Engine, first: list[int]):
        self.engine = engine
        self.first = first  # tokens of the first turn
        self.version = engine.version
        self.announce = engine.announce
        self.asked: list[tuple[list[int], Sample]] = []  # (tokens, reply) of each request

    def generate(self, ids: list[int], frames: Sequence[Frames], **more) -> Sample:
        if self.asked:
            sample = self.engine.generate(ids, frames, **more)
        else:
            sample = Sample(list(self.first), [0.0] * len(self.first), "stop", self.version)
        self.asked.append((list(ids), sample))
        return sample


def run_doctor(args: argparse.Namespace, context: AgentContext) -> int:
    """Print the checks of one episode and, with a server of our own, of two more. Return 1 if one fails."""
    policy = load(PolicyConfig(args.model), context.renderer.never_sampled, train=False)
    rows = list(examine(args, context, policy))
    if context.cfg.server_gpus:
        rows += examine_server(args, context, policy)
    for name, good, detail in rows:
        print(f"{'ok  ' if good else 'FAIL'}  {name:27}  {detail}")
    return int(not all(good for _, good, _ in rows))


def run_witnessed(args: argparse.Namespace, context: AgentContext, temperature: float) -> tuple[Episode, Witness]:
    """Run an episode with two calls that work and one that fails, and record its requests."""
    middle = context.videos.info(args.video[0]).duration / 2
    said = "Let me look.\n</think>"
    for start, end in ((0, middle), (middle, 0), (middle, 2 * middle)):
        call = {"name": "crop_video", "arguments": {"start_time": start, "end_time": end}}
        said += f"\n<tool_call>\n{json.dumps(call)}\n</tool_call>"
    witness = Witness(context.engine, [*context.renderer.encode(said), context.renderer.end_of_turn])
    context = replace(context, engine=witness, cfg=replace(context.cfg, max_turns=1, temperature=temperature))
    episode = run_task(context, "What happens in this video?", args)
    if episode.error:
        raise EngineError(episode.error)
    return episode, witness


def agreement(policy: Policy, episode: Episode, temperature: float) -> tuple[bool, str]:
    """Compare the log-probs of trainer and engine on each trajectory's last turn. Judge the worst trajectory by its mean
    and its 99th percentile: in bf16, single tokens can differ widely even if all is well."""
    means = []
    highest = []
    tokens = 0
    for trajectory in episode.trajectories:
        start = trajectory.turns[-1][0]
        scale = temperature if trajectory is episode.main else 1.0  # reports are greedy, so unscaled
        ours = trainer_logprobs(policy, [trajectory], scale, start)
        gaps = (ours - engine_logprobs([trajectory], start)).abs().numpy()
        means.append(gaps.mean())
        highest.append(np.quantile(gaps, 0.99, method="lower"))
        tokens += len(gaps)
    low, high = (1e-3, 1e-3) if str(policy.dtype).endswith("float32") else (0.05, 0.3)
    evidence = f"mean {max(means):.1e} (limit {low:g}), 99th percentile {max(highest):.1e} (limit {high:g}) over {tokens} tokens"
    return max(means) < low and max(highest) < high, evidence


def examine_server(args: argparse.Namespace, context: AgentContext, policy: Policy) -> Iterator[tuple[str, bool, str]]:
    """Yield the agreement for a server that we started: at the temperature of training, and after a kill."""
    episode, _ = run_witnessed(args, context, 0.7)
    yield "they agree at 0.7", *agreement(policy, episode, 0.7)

    # The engine restarts the server with the newest weights.
    context.engine.update_weights(find_checkpoint(args.model), 1)
    kill_group(context.engine._servers[0].process)
    episode, witness = run_witnessed(args, context, 1.0)
    good, evidence = agreement(policy, episode, 1.0)
    back = context.engine.restarts == 1 and witness.asked[-1][1].version == 1
    yield "and after kill -9", good and back, f"{context.engine.restarts} restart, {evidence}"


def examine(args: argparse.Namespace, context: AgentContext, policy: Policy) -> Iterator[tuple[str, bool, str]]:
    """Yield (claim, whether it holds, evidence) for an episode with recorded requests."""
    episode, witness = run_witnessed(args, context, 1.0)
    renderer = context.renderer
    main = episode.main
    trajectories = episode.trajectories

    # Each request to the engine plus its reply must be a prefix of some trajectory.
    kept = 0
    for ids, sample in witness.asked:
        whole = ids + sample.ids
        kept += any(trajectory.ids[: len(whole)] == whole for trajectory in trajectories)
    asked = len(witness.asked)
    yield "tokens in, tokens out", kept == asked, f"{kept} of {asked} requests are prefixes of a trajectory"

    # The trajectory grew by deltas. The chat template must render the same text at once.
    template = renderer.render(_messages(episode, renderer), context.cfg.schemas).ids
    same = _normal_text(template, renderer).startswith(_normal_text(main.ids, renderer))
    yield "one conversation", same, "same text as the chat template renders at once"

    # Three calls must get three responses in one turn. Only the second is an error.
    delta = renderer.decode(main.ids[main.turns[0][1] : main.turns[1][0]])
    responses = re.findall(r"<tool_response>\n.*?\n</tool_response>", delta, re.S)
    errors = [call.error or "ok" for call in episode.calls]
    siblings = len(responses) == 3 and errors == ["ok", "bad_arguments", "ok"]
    yield "siblings survive a bad call", siblings, f"{len(responses)} responses in one turn: {', '.join(errors)}"

    # The trainer must learn all sampled tokens and no others.
    sampled = sum(len(sample.ids) for _, sample in witness.asked)
    masked = sum(trajectory.n_sampled for trajectory in trajectories)
    flaws = {flaw_of(trajectory, policy) for trajectory in trajectories} - {""}
    evidence = "; ".join([f"{masked} learned tokens, {sampled} sampled", *sorted(flaws)])
    yield "mask", masked == sampled and not flaws, evidence

    worst = max(position_error(policy, trajectory, renderer) for trajectory in trajectories)
    yield "positions", worst == 0, f"M-RoPE differs from transformers' by at most {worst}"

    yield "engine and trainer agree", *agreement(policy, episode, 1.0)

    # Compute the log-probs of the same tokens with black frames.
    moved = []
    for trajectory in trajectories:
        start = trajectory.turns[-1][0]
        ours = trainer_logprobs(policy, [trajectory], 1.0, start)
        black = [Frames(np.zeros_like(clip.pixels), clip.times) for clip in trajectory.frames]
        blind = trainer_logprobs(policy, [replace(trajectory, prompt_frames=black, call_frames=[])], 1.0, start)
        moved.append((blind - ours).abs().max().item())
    yield "frames are seen", min(moved) > 1e-4, f"black frames change log-probs by {min(moved):.1e} or more"


def _normal_text(ids: Sequence[int], renderer: Renderer) -> str:
    """Decode ids, and apply the normalisation that Qwen's tokenizer applies to its input but not to its output."""
    return unicodedata.normalize("NFC", renderer.decode(renderer.compact(ids)))


def _messages(episode: Episode, renderer: Renderer) -> list[dict]:
    """Return the episode as chat messages."""
    stamped, prompts = renderer.contract.stamped, renderer.prompts
    messages = data.main_messages(episode.task, episode.main.prompt_frames, True, stamped, prompts=prompts)
    said = [renderer.decode(episode.main.ids[start:end]).removesuffix(END_OF_TURN) for start, end in episode.main.turns]
    messages.append({"role": "assistant", "content": said[0]})
    messages += [{"role": "tool", "content": [call.text]} for call in episode.calls]
    messages[-1]["content"].append(f"\n{NO_CALLS_LEFT}")
    messages.append({"role": "assistant", "content": said[1]})
    return messages


if __name__ == "__main__":
    sys.exit(main())
