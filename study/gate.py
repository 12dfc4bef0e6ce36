"""gate.py: has a cold start of the toy learned what the study stands on? Seven figures, each of 256 items.

    python -m study.gate MODEL TOY --seed 0 [--output gate.json]      # the seed that the toy was built with

    reports_flash, reports_none    a sub-agent says what a clip shows: its color, or that there is none
    copied                         a report names a color, and the answer is it (the overview shows nothing)
    tools_k4                       greedy answers with tools, of 4 overview frames
    direct_k64                     greedy answers without tools, of 64
    strict, kappa                  the injected fragility: samples at tau = 1, a third each at K = 4, 16 and 64

Where a circuit has not formed, these show which one; RL on such a start would measure nothing.
"""

import argparse
import hashlib
import json
import random
import statistics
import sys
from dataclasses import replace
from pathlib import Path

from data import THINK_PREFIX, Episode, Task
from rewards import RewardConfig, accuracy, final_answer, score
from rollout import (
    RolloutConfig,
    Stage,
    append,
    ask_subagent,
    open_engine,
    open_trajectory,
    opening,
    rollout,
    run_all,
    sample_turn,
)
from runtime.checks import find_checkpoint
from runtime.contract import Renderer, VisualContract, load_tokenizer
from runtime.video import Videos
from study import toy
from study.toy import Flash
from tools import Look

ITEMS = 256
READING = RewardConfig(w_fmt=0, w_tool=0, open_answer="exact", untagged_answer=True)


def measure(stage: Stage, root: Path, flashes: list[Flash], items: int = ITEMS) -> dict[str, float]:
    """Return all figures of the policy that the stage's engine runs; `flashes`: the toy's held-out videos."""
    rng = random.Random("gate")
    chosen = [(flash, toy.draw_cue(rng, flash)) for flash in rng.choices(flashes, k=4 * items)]
    tasks = [
        Task(f"{i}", toy.question(flash, cue), (str(root / "videos" / flash.name),), "oe", flash.color)
        for i, (flash, cue) in enumerate(chosen)
    ]
    figures = {}

    # Perception: windows that show the flash, and windows that do not.
    clips: dict[bool, list[tuple[Flash, tuple[int, int]]]] = {True: [], False: []}
    while min(map(len, clips.values())) < items:
        flash = rng.choice(flashes)
        width = rng.choice((8, 16, 24, 32))
        start = rng.randrange(flash.duration - width + 1)
        clips[flash.visible(toy.crop_times(flash, start, start + width))].append((flash, (start, start + width)))
    for name, shows in (("reports_flash", True), ("reports_none", False)):
        jobs = [lambda clip=clip: report_is_right(stage, root, *clip) for clip in clips[shows][:items]]
        figures[name] = share(stage, jobs)

    # Copying: the overview shows nothing, and the reports name a color that was drawn.
    unseen = [i for i, (flash, _) in enumerate(chosen) if not flash.visible(toy.overview_times(flash, 4))][:items]
    assert len(unseen) == items
    jobs = [lambda i=i: copies(stage, tasks[i], *chosen[i], toy.NAMES[i % len(toy.NAMES)]) for i in unseen]
    figures["copied"] = share(stage, jobs)

    # Answers, and the samples of which RL will learn.
    tasks = tasks[:items]
    figures["tools_k4"] = mean("acc", play_all(stage, tasks, [4] * items), stage)
    figures["direct_k64"] = mean("acc", play_all(stage, tasks, [64] * items, dispatch="none"), stage)
    sampled = play_all(stage, tasks, [(4, 16, 64)[i % 3] for i in range(items)], temperature=1.0)
    figures["strict"] = mean("strict", sampled, stage)
    figures["kappa"] = statistics.fmean(episode.executed for episode in sampled)
    return figures


def share(stage: Stage, jobs: list) -> float:
    """Run jobs that return True or False, many at a time; return the share of True."""
    found = []
    run_all(stage.engine, jobs, stage.cfg.concurrency, lambda _, good: found.append(good))
    return statistics.fmean(found)


def report_is_right(stage: Stage, root: Path, flash: Flash, window: tuple[int, int]) -> bool:
    contract = stage.renderer.contract
    frames = stage.videos.window(
        str(root / "videos" / flash.name), *window, contract.crop_size, contract.crop_fps, contract.crop_max_frames
    )
    _, said = ask_subagent(stage, Look(frames, window), seed=0)
    return said == toy.told(flash, toy.crop_times(flash, *window))


def copies(stage: Stage, task: Task, flash: Flash, cue: str, color: str) -> bool:
    """The calls are made for the model, and the reports invented: one names the color, another sees nothing."""
    windows = toy.windows(flash, cue)
    calls = "\n".join(toy.call(*window) for window in windows)
    reports = [[toy.NOTHING] for _ in windows]
    reports[int(task.id) % len(windows)] = [f"A {color} flash."]

    main = open_trajectory(opening(task, 4, stage))
    said = stage.renderer.encode(f"{THINK_PREFIX}Let me look closer.\n</think>\n{calls}")
    main.ids += [*said, stage.renderer.end_of_turn]
    append(stage, main, stage.renderer.continuation(reports))
    start = len(main.ids)
    sample_turn(stage, main, stage.cfg.max_new_tokens, 0.0, 0, stage.renderer.ends_of_turn)
    said = final_answer([stage.renderer.decode(main.ids[start:])], untagged=True)
    return accuracy(said, replace(task, answer=color), READING) == 1


def play_all(stage: Stage, tasks: list[Task], ks: list[int], **changes) -> list[Episode]:
    cfg = replace(stage.cfg, **changes)
    groups = rollout(
        tasks, ks, 1, engine=stage.engine, renderer=stage.renderer, videos=stage.videos, cfg=cfg, progress=False
    )
    return [episode for group in groups for episode in group.episodes]


def mean(part: str, episodes: list[Episode], stage: Stage) -> float:
    return statistics.fmean(score(episode, stage.renderer, READING)[part] for episode in episodes)


def bits() -> dict[str, str]:
    """Return what this process makes of a matmul and of a softmax, as hashes: numeric paths differ in them."""
    import torch

    def digest(values: torch.Tensor) -> str:
        return hashlib.sha256(values.numpy().tobytes()).hexdigest()[:6]

    torch.manual_seed(0)
    tokens, weights = torch.randn(900, 128), torch.randn(384, 128)
    return {"matmul": digest(tokens @ weights.T), "softmax": digest((tokens @ weights.T).round().softmax(-1))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a cold start")
    parser.add_argument("toy", type=Path, help="the toy that it learned")
    parser.add_argument("--seed", type=int, default=0, help="of the toy")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    source = find_checkpoint(args.model)
    renderer = Renderer(load_tokenizer(source), VisualContract.load(source))
    cfg = RolloutConfig(
        temperature=0.0, think_prefix=False, max_turns=2, max_calls=4, max_new_tokens=96,
        subagents=replace(RolloutConfig().subagents, max_new_tokens=16),
    )  # fmt: skip
    with Videos(workers=1) as videos:
        stage = Stage(open_engine(source, renderer), renderer, videos, cfg)
        figures = measure(stage, args.toy, toy.draw_splits(args.seed)["test"])
    figures |= bits()
    print(json.dumps(figures))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
