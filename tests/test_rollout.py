"""Rollouts: seeds, shared prompts, failures, threads. What holds for every episode is in test_invariants.py."""

import gc
import itertools
import re
import threading
import time
from dataclasses import replace

import pytest
from scripted import END, TASK, MemoryVideos, Scripted, crop, is_subagent, play, turns
from scripts import wait_for

import rollout
from episode import Task
from rollout import AgentContext, RolloutConfig, render_prompt
from runtime import dataset
from runtime.visual import ContractError

ANSWER = "y</think>" + END


def tasks_named(count: int) -> list[Task]:
    return [replace(TASK, id=f"t{i}") for i in range(count)]


def context_of(engine: Scripted, renderer) -> AgentContext:
    return AgentContext(engine, renderer, MemoryVideos(), RolloutConfig(max_context=100_000))


# ---- prompts and seeds


def test_a_step_and_a_copy_of_a_task_have_their_own_seeds(renderer):
    def seeds(step, tasks, group_size, copies=()):
        context = context_of(Scripted(renderer, turns(ANSWER)), renderer)
        groups = rollout.rollout(context, tasks, [4] * len(tasks), group_size, step=step, copies=copies)
        return [episode.seed for group in groups for episode in group.episodes]

    drawn = [*seeds(0, [TASK, TASK], 3, copies=[0, 1]), *seeds(1, [TASK], 3), *seeds(0, [replace(TASK, id="t2")], 3)]
    assert len(set(drawn)) == 12
    assert seeds(0, [TASK], 6) == drawn[:6]


def test_a_prompt_of_a_window_is_shared_until_the_episodes_that_hold_it_are_gone(renderer):
    """Engine and trainer know a shared prompt by its object, in whichever episodes and turns its agents were asked."""
    said = turns("x</think>" + crop(0, 20) * 2 + crop(20, 40) + END, "x</think>" + crop(0, 20) + END, ANSWER)
    context = context_of(Scripted(renderer, said), renderer)
    groups = rollout.rollout(context, [TASK, replace(TASK, id="t2", videos=("/data/w.mp4",))], [4, 4], 2)
    prompts = {agent.prompt for group in groups for episode in group.episodes for agent in episode.subagents}
    assert len(prompts) == 4 and set(context.subagent_prompts.values()) == prompts  # 2 videos, 2 windows
    del groups, prompts
    wait_for(lambda: gc.collect() >= 0 and not context.subagent_prompts)  # threads of jobs are ending


# ---- failures


@pytest.mark.parametrize("token", ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"])
def test_an_engine_that_samples_pixels_stops_the_run(renderer, token):
    sampled = renderer.tokenizer.convert_tokens_to_ids(token)
    with pytest.raises(ContractError, match="banned"):
        play(renderer, lambda prompt, seed: [sampled, renderer.end_of_turn])


def test_a_slow_call_is_given_up_and_costs_its_siblings_nothing(renderer):
    expected = []
    later = threading.Event()

    def reply(prompt, seed):
        if is_subagent(prompt) and float(re.findall(r"<([\d.]+) seconds>", prompt)[0]) > 30:
            later.wait(20)
        elif "<tool_response>" in prompt:
            expected.append(engine.expected)
        return turns("x</think>" + crop(0, 20) + crop(40, 60) * 2 + END, ANSWER)(prompt, seed)

    engine = Scripted(renderer, reply)
    [episode] = play(renderer, None, engine=engine, call_timeout=0.3)
    assert [(c.error, c.seconds) for c in episode.calls[1:]] == [("timeout", 0.3)] * 2 and not episode.calls[0].error
    assert "given up" in renderer.readable(episode.main.ids) and len(episode.main.turns) == 2
    assert expected == [1]  # only the main agent
    before = replace(episode.calls[1])
    later.set()
    wait_for(lambda: not engine.busy)
    assert episode.calls[1] == before  # a late result changes nothing
    assert engine.expected == 0


def test_a_prompt_that_cannot_be_made_costs_its_group_and_no_other_and_is_logged_once(renderer, caplog, monkeypatch):
    def render(task, *others):
        return 1 // (task.id != "t1") and render_prompt(task, *others)

    monkeypatch.setattr(rollout, "render_prompt", render)
    monkeypatch.setattr(dataset, "_logged", set())
    episodes = play(renderer, turns(ANSWER), tasks=tasks_named(3), group_size=2)
    assert [e.error_kind for e in episodes] == ["", "", "RowError", "RowError", "", ""]
    assert episodes[2].error_text.startswith("ZeroDivisionError")
    assert [record.exc_info[0] for record in caplog.records] == [ZeroDivisionError]


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_a_bug_of_ours_and_ctrl_c_end_the_run_and_no_further_turn_starts(renderer, error):
    number = itertools.count()

    def reply(prompt, seed):
        if next(number) == 2:
            raise error("stop")
        return "x</think><tool_call>no JSON</tool_call>" + END  # needs no thread of the calls, which end, too

    engine = Scripted(renderer, reply, latency=0.02)
    with pytest.raises(error, match="stop"):
        play(renderer, None, engine=engine, tasks=tasks_named(40), concurrency=2, max_rounds=9)
    asked = len(engine.asked)
    time.sleep(0.15)
    assert len(engine.asked) <= asked + 1  # the other episode may just have asked
    assert engine.expected == 0


def test_agents_and_the_calls_of_a_turn_run_at_once(renderer):
    """The engine answers no sub-agent before all 128 have asked."""
    all_ask = threading.Barrier(128, timeout=20)

    def report(prompt):
        all_ask.wait()
        return "seen"

    said = turns("x</think>" + crop() * 4 + END, ANSWER, report=report)
    for episode in play(renderer, said, tasks=tasks_named(32)):
        assert [call.error for call in episode.calls] == [""] * 4 and not episode.error
