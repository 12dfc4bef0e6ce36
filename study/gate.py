"""gate.py: measure four skills of the toy's cold start that no evaluation measures, over 256 items each.

`python -m study.gate MODEL TOY SEED OUTPUT` needs the seed that the toy was built with. It writes a JSON file:

    reports_flash, reports_none    report accuracy on clips with a flash, and on clips without
    copied                         share of answers that repeat a report's color (the overview shows no flash)
    direct_k64                     accuracy of greedy answers without tools, at K = 64
"""

import json
import random
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

import rollout
from data import Task
from rewards import final_answer, turn_texts
from runtime.engine import run_all
from runtime.render import THINK_PREFIX, Renderer, load_tokenizer
from runtime.video import Videos
from runtime.visual import VisualContract
from study import toy
from tools import crop_video


def measure(context: rollout.AgentContext, root: Path, flashes: list[toy.Flash], items: int = 256) -> dict[str, float]:
    """Return all figures of the policy in the context's engine. `flashes`: the toy's held-out videos."""
    rng = random.Random("gate")
    jobs = {"reports_flash": [], "reports_none": [], "copied": [], "direct_k64": []}
    while min(len(some) for some in jobs.values()) < items:
        flash = rng.choice(flashes)
        task = task_of(root, flash)
        start = rng.randrange(flash.duration - 7)
        window = (start, start + 8)
        kind = "reports_flash" if flash.visible(toy.crop_times(flash, *window)) else "reports_none"
        jobs[kind].append(partial(reports, context, task, flash, window))
        if not flash.visible(toy.overview_times(flash, 4)):
            jobs["copied"].append(partial(copies, context, task, flash, rng.choice(toy.NAMES)))
        jobs["direct_k64"].append(partial(answers, context, task))
    return {name: share(context, jobs[name][:items]) for name in jobs}


def task_of(root: Path, flash: toy.Flash) -> Task:
    return Task(flash.name, toy.question(""), (str(root / "videos" / flash.name),), "oe", flash.color)


def share(context: rollout.AgentContext, jobs: list[partial]) -> float:
    """Run the jobs concurrently. Return the share of True."""
    outcomes = []
    run_all(context.engine, jobs, context.cfg.concurrency, lambda _, good: outcomes.append(good))
    return fmean(outcomes)


def reports(context: rollout.AgentContext, task: Task, flash: toy.Flash, window: tuple[int, int]) -> bool:
    arguments = {"start_time": window[0], "end_time": window[1]}
    clip = crop_video(task, arguments, context.videos, context.renderer.contract)
    _, said = rollout.ask_subagent(context, clip, seed=0)
    return toy.report_is_right(flash, window, said)


def copies(context: rollout.AgentContext, task: Task, flash: toy.Flash, color: str) -> bool:
    """Write the model's calls, and invent the reports: the first names a color. Return whether the answer is it."""
    renderer = context.renderer
    windows = toy.windows(flash, "")
    calls = "\n".join(toy.call(*window) for window in windows)
    said = [[f"A {color} flash."], [toy.NOTHING]][: len(windows)]
    main = rollout.open_trajectory(rollout.render_prompt(task, 4, context))
    main.ids += renderer.encode(f"{THINK_PREFIX}Let me look closer.\n</think>\n{calls}")
    rollout.append_rendered(context, main, renderer.continuation(said))
    start = len(main.ids)
    rollout.sample_turn(context, main, context.cfg.max_new_tokens, 0.0, 0, renderer.ends_of_turn)
    return final_answer([renderer.decode(main.ids[start:])], "stated") == color


def answers(context: rollout.AgentContext, task: Task) -> bool:
    """Return whether the model answers rightly without tools."""
    context = replace(context, cfg=replace(context.cfg, dispatch="none"))
    episode = rollout.run_episode(context, task, 64, rollout.render_prompt(task, 64, context), 0)
    return final_answer(turn_texts(episode.main, context.renderer), "stated") == task.answer


def greedy_agent(model: Path, videos: Videos, think_prefix: bool = False) -> rollout.AgentContext:
    """Return the context of a toy model. It samples greedily, with the limits of its training."""
    renderer = Renderer(load_tokenizer(model), VisualContract.load(model))
    subagents = rollout.SubagentConfig(max_new_tokens=16)
    limits = {"max_turns": 2, "max_calls": 4, "max_new_tokens": 96, "subagents": subagents}
    cfg = rollout.RolloutConfig(temperature=0.0, think_prefix=think_prefix, **limits)
    return rollout.AgentContext(rollout.open_engine(model, renderer, cfg), renderer, videos, cfg)


def main(model: str, root: str, seed: str, output: str) -> None:
    with Videos(workers=1) as videos:
        figures = measure(greedy_agent(Path(model), videos), Path(root), toy.draw_splits(int(seed))["test"])
    Path(output).write_text(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
