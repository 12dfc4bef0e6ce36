"""ask.py: watch one agent at work.

    python -m study.ask --model M --video v.mp4 "What is written on the door?" [--k 64] [--url http://...]
    python -m study.ask ... --call '{"name": "crop_video", "arguments": {...}}'     # begin with this call; a list: with several

It prints the agent's thoughts turn by turn, its parallel calls on a timeline, and their reports.
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

from episode import Call, Prompt, Task, episode_record
from rollout import AgentContext, RolloutConfig, SubagentConfig, render_prompt, run_episode
from runtime import config
from runtime.config import UserError
from runtime.engine import Engine, Sample
from runtime.lines import append_line
from runtime.open_engine import open_engine, require_servers
from runtime.prompts import Prompts
from runtime.render import Renderer, refuse_template
from runtime.script import expandable_segments, open_checkpoint
from runtime.video import Clip, VideoError, Videos
from tools import TOOLS, schemas_of

WIDTH = 40  # characters of the timeline


def main() -> int:
    args = parse_arguments()
    # One limit for all: a report is no longer than a turn.
    reports = SubagentConfig(max_new_tokens=min(args.max_new_tokens, SubagentConfig().max_new_tokens))
    cfg = RolloutConfig(
        tools=tuple(args.tool or ["crop_video"]),
        temperature=0.0,
        max_new_tokens=args.max_new_tokens,
        subagents=reports,
        urls=tuple(args.url),
    )
    expandable_segments()
    try:
        with Videos(workers=2) as videos:
            for path in args.video:
                videos.info(path)  # refuse a bad file before the weights are loaded
            context = open_context(args.model, args.prompts, videos, cfg)
            with contextlib.closing(context.engine):
                return run_ask(args, context)
    except (VideoError, UserError, FileNotFoundError) as error:
        sys.exit(f"error: {error}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m study.ask", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("question")
    parser.add_argument("--model", required=True, help="a checkpoint's folder, or its name on the hub")
    parser.add_argument("--video", required=True, action="append", help="a video; give it again for more")
    parser.add_argument("--k", type=int, help="overview frames (default: the checkpoint's contract)")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="default: crop_video")
    parser.add_argument("--call", metavar="JSON", help="the model's first turn: a call, or a list of calls")
    parser.add_argument("--url", action="append", default=[], help="an SGLang server that runs this checkpoint")
    parser.add_argument("--prompts", type=Path, help="YAML with texts in place of the checkpoint's")
    parser.add_argument("--max-new-tokens", type=int, default=2048, help="per turn")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the episode as JSON, for study.report")
    args = parser.parse_args()
    if args.k is not None and args.k < 1:
        parser.error(f"--k {args.k}: must be at least 1, since the agent needs a frame")
    if args.max_new_tokens < 1:
        parser.error(f"--max-new-tokens {args.max_new_tokens}: must be at least 1")
    return args


def open_context(model: str, prompts: Path | None, videos: Videos, cfg: RolloutConfig) -> AgentContext:
    """Return everything that an agent needs, with the checkpoint's own contract."""
    require_servers(cfg, ranks=1)
    source, renderer = open_checkpoint(model, weights=not cfg.urls)
    if prompts:  # also other ones than the checkpoint was trained with
        texts = config.build(Prompts, config.read_tree(prompts), "")
        renderer = Renderer(renderer.tokenizer, renderer.contract, texts)
    refuse_template(source, renderer, schemas_of(cfg.tools))
    return AgentContext(open_engine(source, renderer, cfg), renderer, videos, cfg)


def run_ask(args: argparse.Namespace, context: AgentContext) -> int:
    """Show one episode while it runs. Write it to --trace if given."""
    if args.call:
        blocks = [f"\n<tool_call>\n{call}\n</tool_call>" for call in calls_in(args.call)]
        said = "I look.\n</think>" + "".join(blocks)
        ids = [*context.renderer.encode(said), context.renderer.end_of_turn]
        context = replace(context, engine=FirstTurn(context.engine, ids))
    screen = Screen(context.videos.info(args.video[0]).duration)
    context = replace(context, observe=screen.show)
    task = Task("ask", args.question, tuple(map(os.path.abspath, args.video)), "oe", "")
    k = args.k or context.renderer.contract.overview_frames
    episode = run_episode(context, task, k, render_prompt(task, k, context), 0)
    print(f"\n{len(episode.main.turns)} turns, {len(episode.calls)} calls, {episode.seconds:.1f} s {episode.error}")
    if args.trace:
        args.trace.write_text("")  # empties the file of an earlier question
        append_line(args.trace, episode_record(episode, context.renderer.readable))
    return int(bool(episode.error_kind))


def calls_in(text: str) -> list[str]:
    """Return the calls of a JSON list. Any other text is one call, right or wrong."""
    with contextlib.suppress(ValueError):
        calls = json.loads(text)
        if isinstance(calls, list):
            return [json.dumps(call) for call in calls]
    return [text]


class Screen:
    """The terminal. Reports of parallel calls arrive in any order, each from its own thread."""

    def __init__(self, duration: float):
        self.duration = duration  # seconds of the video
        self.turn = 0
        self._lock = threading.Lock()

    def show(self, event: str, what: str | Call) -> None:  # ("turn", its text), or ("clip" or "report", the call)
        with self._lock:
            if isinstance(what, str):
                self.turn += 1
                said = re.sub(r"<tool_call>.*?</tool_call>|<\|(?:im_end|endoftext)\|>", "", what, flags=re.S).strip()
                print(f"\n── turn {self.turn} " + "─" * 60 + f"\n{said}", flush=True)
            elif event == "clip" and what.window:
                start, end = (int(WIDTH * second / self.duration) for second in what.window)
                bar = "·" * start + "█" * max(end - start, 1)
                print(f"  │{bar[:WIDTH]:·<{WIDTH}}│  {what.name} {_window(what)}", flush=True)
            else:
                outcome = f"{what.error}: {what.text}" if what.error else what.text
                print(f"  ↳ {_window(what)} {outcome}  ({what.seconds:.1f} s)", flush=True)


def _window(call: Call) -> str:
    return "{:.1f}–{:.1f} s".format(*call.window) if call.window else call.name or "call"


class FirstTurn(Engine):
    """An engine that writes the first turn itself and then asks the real one, so that every model makes this call."""

    def __init__(self, engine: Engine, first: list[int]):
        self.engine = engine
        self.first = first  # its tokens; empty once it has been said

    def announce(self, change: int) -> None:
        self.engine.announce(change)

    def generate(self, prompt: Prompt, ids: list[int], clips: Sequence[Clip], **more) -> Sample:
        if not self.first:
            return self.engine.generate(prompt, ids, clips, **more)
        first, self.first = self.first, []
        return Sample(first, [0.0] * len(first), "stop", self.engine.version)


if __name__ == "__main__":
    sys.exit(main())
