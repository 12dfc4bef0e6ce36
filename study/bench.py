"""bench.py: two claims of speed, each as two sides that do the same work, measured in one run.

    python -m study.toy build toy_data       # a video, and the tokenizer of the model here
    CUDA_VISIBLE_DEVICES= python -m study.bench

The sides take turns (A B A B ...). Before the clock runs, both have run once and their results were compared: gradient for
gradient, report for report. A difference ends the program. A gain is the median over pairs of neighbours, since what else the
machine does hits neighbours alike.

Deliberately missing: GPUs, memory, other frameworks, the speed of SGLang itself, the optimizer's step.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3VLConfig

from data import Call, Task
from evals.tables import markdown
from rollout import AgentContext, RolloutConfig, run_calls
from runtime.config import git_commit
from runtime.engine import Engine, Sample
from runtime.packing import Bundle
from runtime.policy import PolicyConfig, load
from runtime.render import Renderer, load_tokenizer
from runtime.video import Clip, Videos
from runtime.visual import VisualContract
from study import toy
from tools import parse_calls

TOY = Path("toy_data")  # read
OURS = Path("runs/bench")  # written


def versus(what: str, plain: Callable, ours: Callable, same: Callable, repeats: int = 3) -> list[str]:
    """Compare the results of both sides, then time them in turns. Return a row: what, the medians in seconds, the gain."""
    assert same(plain(), ours()), f"{what}: the sides differ"
    seconds = {plain: [], ours: []}
    for _ in range(repeats):
        for side in (plain, ours):
            began = time.perf_counter()
            side()
            seconds[side].append(time.perf_counter() - began)
    gains = [one / other for one, other in zip(seconds[plain], seconds[ours])]
    row = [what, f"{median(seconds[plain]):.3g}", f"{median(seconds[ours]):.3g}"]
    return [*row, f"{median(gains):.3g}x ({min(gains):.3g} - {max(gains):.3g})"]


def draw_group(c: Qwen3VLConfig, frames: int, side: int, suffixes: Sequence[int]) -> Bundle:
    """Draw random tokens: a prompt that shows square frames of `side` pixels, and rollouts of so many tokens."""
    rng = np.random.default_rng(0)
    image = [c.vision_start_token_id, *[c.image_token_id] * (side // 32) ** 2, c.vision_end_token_id]
    prompt = []
    for _ in range(frames):
        prompt += [*rng.integers(20, 120, 5).tolist(), *image]  # ordinary tokens of every vocabulary
    said = [rng.integers(20, 120, length).tolist() for length in suffixes]
    clip = Clip(rng.integers(0, 256, (frames, side, side, 3), dtype=np.uint8), (0.0,) * frames)
    return Bundle(prompt, said, [[1] * len(ids) for ids in said], [clip])


def update(frames: int = 64, side: int = 256, suffixes: Sequence[int] = range(200, 601, 57)) -> list[str]:
    """An update's forward and backward passes: a pass per rollout, or the group as one sequence with its prompt once."""
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 8}
    toy.write_checkpoint(OURS / "update", load_tokenizer(TOY / "model"), VisualContract(), **sizes)
    policy = load(PolicyConfig(str(OURS / "update"), dtype="fp32"), train=False)
    policy.model.requires_grad_(True).model.visual.requires_grad_(False)
    group = draw_group(policy.model.config, frames, side, suffixes)
    alone = [replace(group, suffixes=[ids], masks=[mask]) for ids, mask in zip(group.suffixes, group.masks)]

    def gradient(bundles: list[Bundle]) -> Tensor:
        policy.zero_grad()
        for bundle in bundles:
            policy([bundle]).logprobs.sum().backward()
        return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])

    def same(one: Tensor, other: Tensor) -> bool:
        return (one - other).norm() < 1e-4 * one.norm()

    what = f"update, {len(alone)} rollouts of a prompt with {frames} frames"
    return versus(what, partial(gradient, alone), partial(gradient, [group]), same)


class SlowReports(Engine):
    """An engine that takes 0.25 s for a sub-agent's report."""

    version = 0
    report: list[int]

    def generate(self, ids, clips, **rest) -> Sample:
        time.sleep(0.25)
        return Sample(self.report, [-1.0] * len(self.report), "stop", 0)


def dispatch(count: int = 8) -> list[str]:
    """The calls of an episode: each in a turn of its own, or all in one turn, in threads."""
    renderer = Renderer(load_tokenizer(TOY / "model"), toy.CONTRACT)
    calls = parse_calls("".join(toy.call(2 * i, 2 * i + 16) for i in range(count)))
    task = Task("", "Which color flashes?", (str(TOY / "videos" / "rl00000.mp4"),), "oe", "red")
    SlowReports.report = renderer.encode("No flash.<|im_end|>")
    with Videos(workers=2, cache_bytes=0) as videos:
        context = AgentContext(SlowReports(), renderer, videos, RolloutConfig())

        def run(turns: list[list[Call]]) -> list[tuple]:
            found = []
            for turn in turns:
                ran, _ = run_calls(context, task, turn, count, seed=0)
                found += [(call.window, call.text, call.error) for call in ran]
            return found

        one_by_one, at_once = partial(run, [[call] for call in calls]), partial(run, [calls])
        return versus(f"{count} calls, reports of 0.25 s", one_by_one, at_once, list.__eq__)


def main() -> None:
    print(markdown("#### Two sides", ["what", "plain, s", "ours, s", "gain"], [update(), dispatch()]))
    machine = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}"
    print(f"\n`python -m study.bench` at commit {git_commit()}; {machine}; torch {torch.__version__}.")


if __name__ == "__main__":
    main()
