"""bench.py: three claims of speed on a CPU, each as a plain side and ours, which do the same work.

python -m study.toy build toy_data       # a model and a video
python -m study.bench                    # about two minutes; prints the table of results/bench.md
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForImageTextToText

from episode import Episode, Prompt, Task, Trajectory
from evals.tables import markdown
from rollout import AgentContext, RolloutConfig, agent_flow, run_calls
from runtime.checkpoints import load_policy
from runtime.engine import Engine, Sample, run_all
from runtime.folder import git_commit
from runtime.inprocess import InProcess
from runtime.packing import Bundle
from runtime.policy import PolicyConfig
from runtime.render import END_OF_TURN, Renderer, load_tokenizer
from runtime.video import Clip, Videos
from runtime.visual import patchify
from study import toy
from tools import parse_calls

TOY = Path("toy_data")
MODEL = TOY / "model"
if not MODEL.exists():
    sys.exit(f"error: {MODEL} is missing; build it with `python -m study.toy build {TOY}`")
RENDERER = Renderer(load_tokenizer(MODEL), toy.CONTRACT)


def compare(what: str, plain: Callable[[], Any], ours: Callable[[], Any], same: Callable[[Any, Any], bool]) -> dict:
    """Time both sides in turns, because what else the machine does hits neighbours alike. Refuse sides that differ."""
    assert same(plain(), ours()), f"{what}: the sides differ"  # this also warms both up
    pairs = []
    for _ in range(3):
        times = [time.perf_counter()]
        for side in (plain, ours):
            side()
            times.append(time.perf_counter())
        pairs.append(np.diff(times))
    seconds = [f"{median(side):.3g}" for side in zip(*pairs)]
    gains = [slow / fast for slow, fast in pairs]
    gain = f"{median(gains):.3g}x ({min(gains):.3g} - {max(gains):.3g})"
    return {"what": what, "plain, s": seconds[0], "ours, s": seconds[1], "gain": gain}


def random_prompt(frames: int, side: int, seed: int = 0) -> Prompt:
    """Draw a prompt of words and square frames of `side` pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (frames, side, side, 3), dtype=np.uint8)
    clip = Clip(pixels, tuple(map(float, range(frames))))
    rendered = RENDERER.render([{"role": "user", "content": [clip, "Which color flashes?"]}], generate=True)
    return Prompt(rendered.ids, [clip])


def update() -> dict:
    """Compute an update's gradient: a pass per rollout, or the group in one sequence with its prompt once."""
    policy = load_policy(PolicyConfig(str(MODEL), dtype="fp32", freeze=("vision",)))
    prompt = random_prompt(64, side=256)  # 64 tokens a frame
    rows = [Trajectory(prompt, [100] * n, [1] * n) for n in range(200, 601, 57)]
    for row in rows:
        row.loss_weights = row.logprobs = [1.0] * len(row.ids)

    def gradient(bundles: list[Bundle]) -> torch.Tensor:
        policy.zero_grad()
        for bundle in bundles:
            policy([bundle]).logprobs.sum().backward()
        return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])

    def same(one: torch.Tensor, other: torch.Tensor) -> bool:
        return bool((one - other).norm() < 1e-4 * one.norm())

    alone = partial(gradient, [Bundle(prompt, [row]) for row in rows])
    group = partial(gradient, [Bundle(prompt, rows)])
    return compare("update, 8 rollouts of a prompt with 64 frames", alone, group, same)


class SlowReports(Engine):
    """Samples a sub-agent's report in 0.25 s."""

    version = 0

    def generate(self, *_, **__) -> Sample:
        time.sleep(0.25)
        said = RENDERER.encode(f"No flash.{END_OF_TURN}")
        return Sample(said, [-1.0] * len(said), "stop", 0)


def dispatch() -> dict:
    """Run an episode's calls: each in a turn of its own, or all in one turn, in threads."""
    calls = parse_calls("".join(toy.call(2 * i, 2 * i + 16) for i in range(8)))
    task = Task("", toy.question(""), (str(TOY / "videos" / "rl00000.mp4"),), "oe", "red")
    episode = Episode(task, 4, Trajectory(random_prompt(4, side=32)))
    cfg = RolloutConfig(max_calls=len(calls))
    with Videos(workers=2, cache_bytes=0) as videos:
        context = AgentContext(SlowReports(), RENDERER, videos, cfg)

        def reports(turns: list[list]) -> list[str]:
            ended = [call for turn in turns for call in run_calls(context, agent_flow(cfg), episode, turn, seed=0)]
            assert not any(call.error for call in ended)
            return [call.text for call in ended]

        one_by_one = partial(reports, [[call] for call in calls])
        at_once = partial(reports, [calls])
        return compare("8 calls, reports of 0.25 s", one_by_one, at_once, list.__eq__)


def engine() -> dict:
    """Sample 8 prompts of 4 to 64 frames, 8 times each, greedily: transformers' generate on one padded batch, or inprocess.py."""
    plain: Any = AutoModelForImageTextToText.from_pretrained(MODEL, dtype=torch.float32)
    ours = InProcess(MODEL, RENDERER)
    pad = plain.generation_config.pad_token_id
    prompts = [random_prompt((4, 8, 16, 32, 64)[i % 5], 64, seed=i) for i in range(8)]

    def padded() -> list[list[int]]:
        rows = [prompt.ids for prompt in prompts for _ in range(8)]
        longest = max(map(len, rows))
        ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows])  # [B, P]
        pixels, grid = patchify([clip for prompt in prompts for clip in prompt.clips * 8])
        types = (ids == plain.config.image_token_id).int()
        images: dict[str, Any] = {"pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": types}
        rules: dict[str, Any] = {
            "max_new_tokens": 32,
            "do_sample": False,
            "bad_words_ids": [[t] for t in RENDERER.never_sampled],
        }
        return plain.generate(input_ids=ids, attention_mask=(ids != pad).int(), **images, **rules)[:, longest:].tolist()

    def ragged() -> list[list[int]]:
        settings: dict[str, Any] = {"ids": [], "clips": [], "max_new_tokens": 32, "temperature": 0.0, "seed": 0}
        jobs = {
            (i, j): partial(ours.generate, prompt, **settings) for i, prompt in enumerate(prompts) for j in range(8)
        }
        sampled = run_all(ours, jobs, len(jobs))
        return [sampled[name].ids for name in jobs]

    def same(one: list, other: list) -> bool:  # up to what pads the rows that ended before others
        return all(row[: len(said)] == said for row, said in zip(one, other, strict=True))

    row = compare("engine, 8 prompts, each 8 times", padded, ragged, same)
    ours.close()
    return row


if __name__ == "__main__":
    rows = [update(), dispatch(), engine()]
    print(markdown("#### Two sides that do the same work", list(rows[0]), rows))
    print(
        f"\n`python -m study.bench` at commit {git_commit()}; {torch.get_num_threads()} threads, torch {torch.__version__}."
    )
