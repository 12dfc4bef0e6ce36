"""gate.py: nine figures, over 256 items each, that show whether a cold start of the toy has learned what RL needs.

`python -m study.gate MODEL TOY --seed 0 --output gate.json` needs the seed that the toy was built with. It writes:

    reports_flash, reports_none    report accuracy on clips with a flash, and on clips without
    copied                         share of answers that repeat a report's color (the overview shows no flash)
    tools_k4                       accuracy of greedy answers with tools, at K = 4
    direct_k64                     accuracy of greedy answers without tools, at K = 64
    well_formed, f, kappa          the injected fragility: samples at tau = 1, a third each at K = 4, 16 and 64
    kappa_k64                      calls of samples at K = 64, which is what plain GRPO sees
"""

import argparse
import json
import random
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

import rollout
from data import Task
from rewards import RewardConfig, accuracy, final_answer, score
from rollout import AgentContext, RolloutConfig, SubagentConfig, open_engine, open_trajectory, render_prompt
from runtime.render import THINK_PREFIX, Renderer, load_tokenizer
from runtime.video import Videos
from runtime.visual import VisualContract
from study import toy
from tools import crop_video

READING = RewardConfig(w_fmt=0, w_tool=0, open_answer="exact", untagged_answer="stated")


def measure(context: AgentContext, root: Path, flashes: list[toy.Flash], items: int = 256) -> dict[str, float]:
    """Return all figures of the policy in the context's engine. `flashes`: the toy's held-out videos."""
    rng = random.Random("gate")
    figures = {}
    # Perception: draw windows that show the flash, and windows that do not.
    for name, shows in (("reports_flash", True), ("reports_none", False)):
        jobs = []
        while len(jobs) < items:
            flash = rng.choice(flashes)
            width = rng.choice((8, 16, 24, 32))
            start = rng.randrange(flash.duration - width + 1)
            if flash.visible(toy.crop_times(flash, start, start + width)) == shows:
                jobs.append(partial(report_is_right, context, root, flash, (start, start + width)))
        figures[name] = share(context, jobs)

    # Copying: the overview shows nothing, and a report names some color.
    jobs = []
    while len(jobs) < items:
        flash = rng.choice(flashes)
        if not flash.visible(toy.overview_times(flash, 4)):
            jobs.append(partial(copies, context, root, flash, toy.draw_cue(rng, flash), len(jobs)))
    figures["copied"] = share(context, jobs)

    # Answers, and samples like those that RL will learn from.
    tasks = []
    for i, flash in enumerate(rng.choices(flashes, k=items)):
        tasks.append(task_of(root, flash, toy.draw_cue(rng, flash), i))
    figures["tools_k4"] = run_tasks(context, tasks, [4])["R_acc"]
    figures["direct_k64"] = run_tasks(context, tasks, [64], dispatch="none")["R_acc"]
    sampled = run_tasks(context, tasks, [4, 16, 64], temperature=1.0)
    figures |= {name: sampled[name] for name in ("well_formed", "f", "kappa")}
    return figures | {"kappa_k64": run_tasks(context, tasks, [64], temperature=1.0)["kappa"]}


def greedy_agent(model: Path, videos: Videos, think_prefix: bool = False) -> AgentContext:
    """Return the context of a toy model. It samples greedily, with the limits of its training."""
    renderer = Renderer(load_tokenizer(model), VisualContract.load(model))
    limits = {"max_turns": 2, "max_calls": 4, "max_new_tokens": 96, "subagents": SubagentConfig(max_new_tokens=16)}
    cfg = RolloutConfig(temperature=0.0, think_prefix=think_prefix, **limits)
    return AgentContext(open_engine(model, renderer, cfg), renderer, videos, cfg)


def share(context: AgentContext, jobs: list[partial]) -> float:
    """Run the jobs concurrently. Return the share of True."""
    outcomes = []
    rollout.run_all(context.engine, jobs, context.cfg.concurrency, lambda _, good: outcomes.append(good))
    return fmean(outcomes)


def task_of(root: Path, flash: toy.Flash, cue: str = "", i: int = 0) -> Task:
    return Task(f"{i}", toy.question(cue), (str(root / "videos" / flash.name),), "oe", flash.color)


def report_is_right(context: AgentContext, root: Path, flash: toy.Flash, window: tuple[int, int]) -> bool:
    arguments = {"start_time": window[0], "end_time": window[1]}
    clip = crop_video(task_of(root, flash), arguments, context.videos, context.renderer.contract)
    _, said = rollout.ask_subagent(context, clip, seed=0)
    return toy.report_is_right(flash, window, said)


def copies(context: AgentContext, root: Path, flash: toy.Flash, cue: str, i: int) -> bool:
    """Write the model's calls, and invent the reports: one names a color. Return whether the answer is it."""
    renderer = context.renderer
    windows = toy.windows(flash, cue)
    calls = "\n".join(toy.call(*window) for window in windows)
    color = toy.NAMES[i % len(toy.NAMES)]
    reports = [[toy.NOTHING] for _ in windows]
    reports[i % len(windows)] = [f"A {color} flash."]
    task = replace(task_of(root, flash, cue, i), answer=color)
    main = open_trajectory(render_prompt(task, 4, context))
    main.ids += renderer.encode(f"{THINK_PREFIX}Let me look closer.\n</think>\n{calls}")
    rollout.append_rendered(context, main, renderer.continuation(reports))
    start = len(main.ids)
    rollout.sample_turn(context, main, context.cfg.max_new_tokens, 0.0, 0, renderer.ends_of_turn)
    answer = final_answer([renderer.decode(main.ids[start:])], "stated")
    return accuracy(answer, task, READING) == 1


def run_tasks(context: AgentContext, tasks: list[Task], ks: list[int], **changes) -> dict[str, float]:
    """Run each task once, cycling through `ks`. Return the means of accuracy, well_formed, f and kappa."""
    parts = {"engine": context.engine, "renderer": context.renderer, "videos": context.videos}
    k_of_task = [ks[i % len(ks)] for i in range(len(tasks))]
    groups = rollout.rollout(tasks, k_of_task, 1, **parts, cfg=replace(context.cfg, **changes), progress=False)
    episodes = [group.episodes[0] for group in groups]
    rewards = [score(episode, context.renderer, READING) for episode in episodes]
    return {
        "R_acc": fmean(earned["R_acc"] for earned in rewards),
        "well_formed": fmean(earned["well_formed"] for earned in rewards),
        "f": fmean(earned["f"] for earned in rewards),
        "kappa": fmean(episode.n_executed for episode in episodes),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a cold start")
    parser.add_argument("toy", type=Path, help="the toy that it was trained on")
    parser.add_argument("--seed", type=int, default=0, help="seed of the toy")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    with Videos(workers=1) as videos:
        figures = measure(greedy_agent(args.model, videos), args.toy, toy.draw_splits(args.seed)["test"])
    args.output.write_text(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
