"""The invariants of an episode, checked with a scripted engine."""

import dataclasses
import gc
import itertools
import json
import random
import re
import threading
import time

import pytest
from scripted import END, TASK, MemoryVideos, Scripted, check_trajectory, is_subagent, load_episodes, play, turns
from scripts import wait_for
from tiny import CONTRACT

import rollout
from episode import Episode, Task, episode_record
from rollout import NO_CALLS_LEFT, AgentContext, RolloutConfig, SubagentConfig, overview, render_prompt
from runtime import dataset
from runtime.engine import EngineError
from runtime.lines import append_line
from runtime.render import IMAGE_PAD
from runtime.visual import ContractError


def call(start=0, end=20, **more) -> str:
    arguments = {"start_time": start, "end_time": end, **more}
    return f"<tool_call>\n{json.dumps({'name': 'crop_video', 'arguments': arguments})}\n</tool_call>"


def tasks_named(count: int) -> list[Task]:
    return [dataclasses.replace(TASK, id=f"t{i}") for i in range(count)]


def text_of(episode: Episode, renderer) -> str:
    return renderer.decode(renderer.compact(episode.main.all_ids))


def user_turns(episode: Episode, renderer) -> list[str]:
    return re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>\n", text_of(episode, renderer), re.S)


def reports(turn: str) -> list[str]:
    return re.findall(r"<tool_response>\n(.*?)\n</tool_response>", turn, re.S)


# ---- 1: tokens in, tokens out


def test_the_trainer_reads_what_the_engine_was_asked_and_said(renderer):
    """Each request is a prefix of the final trajectory, and continues with the sampled ids."""
    said = turns("so</think>" + call() + call(20, 40) + END, "done</think><answer>cat</answer>" + END)
    engine = Scripted(renderer, said)
    [episode] = play(renderer, None, engine=engine)
    main = episode.main
    asked = sorted((request.ids for request in engine.asked if not is_subagent(request.prompt)), key=len)
    assert len(asked) == 2 == len(main.turns)
    for ids, (start, end) in zip(asked, main.turns):
        assert main.all_ids[: len(ids)] == ids
        begins = len(ids) - len(main.prompt.ids)  # the sampled part of the turn
        assert main.mask[start:begins] == [0] * (begins - start) and all(main.mask[begins:end])
    for agent in [episode.main, *episode.subagents]:
        check_trajectory(agent, renderer)
    prompt = renderer.decode(episode.subagents[0].all_ids)  # a sub-agent sees frames and not the question
    assert TASK.question not in prompt and "seconds>" in prompt


def test_a_sub_agent_reads_these_words(renderer):
    """Compare word for word: checkpoints learned these prompts in the cold start, and no other test notices a change."""
    [episode] = play(renderer, turns("x</think>" + call(0, 1) + END, "y</think>" + END))
    agent = episode.subagents[0]
    read = renderer.decode(renderer.compact(agent.prompt.ids))
    frame = "<|vision_start|><|image_pad|><|vision_end|>"
    assert read == (
        "<|im_start|>system\nYou see frames of one part of a video, each after its time. "
        "Report briefly what happens in it, and when.<|im_end|>\n"
        f"<|im_start|>user\n<0.5 seconds>{frame}\nWhat happens here?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_sampled_ids_are_kept_even_where_the_tokenizer_would_write_others(renderer):
    spelled = [i for letter in "done" for i in renderer.encode(letter)] + renderer.encode("</think>")
    assert spelled != renderer.encode("done</think>")
    [episode] = play(renderer, lambda prompt, seed: [*spelled, renderer.end_of_turn])
    start, end = episode.main.turns[0]
    assert episode.main.ids[end - len(spelled) - 1 : end - 1] == spelled


@pytest.fixture
def ends_as_qwen(renderer, monkeypatch):
    """Let the renderer end turns with two tokens, as Qwen's generation_config.json does."""
    endoftext = renderer.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    monkeypatch.setattr(renderer, "ends_of_turn", (renderer.end_of_turn, endoftext))
    return endoftext


def test_any_of_the_checkpoints_list_of_ends_ends_a_turn(renderer, ends_as_qwen):
    """Qwen's list is <|im_end|> and <|endoftext|>. After <|endoftext|> the template's end of turn follows with mask 0.
    (The released code splices re-rendered turns by length, so responses 2..N end up inside an open assistant turn.)"""
    first = "so</think>\n" + call() + "\n" + call(9, 5) + "\n" + call(20, 40) + "<|endoftext|>" + call() + END
    reports = iter([" a cat <|endoftext|> and more", "a dog" + END])
    said = turns(first, "done</think><answer>cat</answer><|endoftext|>more" + END)
    [episode] = play(renderer, lambda prompt, seed: next(reports) if is_subagent(prompt) else said(prompt, seed))
    main = episode.main
    assert {c.text for c in episode.calls if not c.error} == {"a cat", "a dog"} and main.finish == "stop"
    check_episode(episode, renderer, RolloutConfig())
    # Each turn ends with its sampled token, and the delta closes it.
    for _, end in main.turns:
        assert (main.ids[end - 1], main.mask[end - 1]) == (ends_as_qwen, 1)
    end = main.turns[0][1]
    assert renderer.decode(main.ids[end : end + 3]).startswith("<|im_end|>\n<|im_start|>")
    assert main.ids[end] == renderer.end_of_turn and main.mask[end] == 0 and main.logprobs[end] == 0


@pytest.mark.parametrize("think_prefix", [True, False])
def test_the_forced_opening_is_in_every_turn_and_is_never_learned(renderer, think_prefix):
    [episode] = play(renderer, turns("a</think>" + call() + END, "b</think>" + END), think_prefix=think_prefix)
    opened = renderer.encode("<think>\n") if think_prefix else []
    for start, end in episode.main.turns:
        assert episode.main.ids[start : start + len(opened)] == opened
        assert episode.main.mask[start:end] == [0] * len(opened) + [1] * (end - start - len(opened))
    assert episode.main.turns[0][0] == 0


def test_each_request_has_a_seed_of_its_own_and_the_settings_of_its_agent(renderer):
    calling = "x</think>" + call() + call(20, 40) + END
    engine = Scripted(renderer, turns(calling, calling, "y</think>" + END))
    limits = {"temperature": 0.7, "max_new_tokens": 500, "subagents": SubagentConfig(max_new_tokens=9, temperature=0.3)}
    for step in range(2):
        episodes = play(renderer, None, engine=engine, tasks=tasks_named(2), group_size=2, step=step, **limits)
    one, other = (episode.main for episode in episodes[:2])
    assert one.prompt is other.prompt  # the rollouts of a group share it
    assert len(engine.asked) == 2 * 4 * 7 == len({request.seed for request in engine.asked})
    settings = {(is_subagent(request.prompt), request.temperature, request.max_new_tokens) for request in engine.asked}
    assert settings == {(False, 0.7, 500), (True, 0.3, 9)}


def test_sub_agents_that_see_the_same_window_of_a_video_hold_one_prompt_until_their_episodes_are_gone(renderer):
    """Engine and trainer know a shared prompt by its object, in whichever episodes and turns its agents were asked."""
    said = turns("x</think>" + call(0, 20) * 2 + call(20, 40) + END, "x</think>" + call(0, 20) + END, "y</think>" + END)
    context = AgentContext(Scripted(renderer, said), renderer, MemoryVideos(), RolloutConfig(max_context=100_000))
    other_video = dataclasses.replace(TASK, id="t2", videos=("/data/w.mp4",))
    groups = rollout.rollout(context, [TASK, other_video], [4, 4], 2)
    prompts = {}  # (video, window) -> the prompts of those who saw it
    for group in groups:
        for episode in group.episodes:
            for asked in episode.calls:
                prompts.setdefault((*group.task.videos, asked.window), []).append(asked.subagent.prompt)
    assert sorted(map(len, prompts.values())) == [2, 2, 6, 6]
    assert [len(set(same)) for same in prompts.values()] == [1] * 4 and len(set(sum(prompts.values(), []))) == 4
    assert set(context.subagent_prompts.values()) == set(sum(prompts.values(), []))
    del groups, group, episode, asked, prompts
    wait_for(lambda: gc.collect() >= 0 and not context.subagent_prompts)  # threads of jobs are ending


# ---- 2: all calls of a turn, one answer turn


def test_a_task_that_comes_twice_in_a_step_is_sampled_with_other_seeds(renderer):
    engine = Scripted(renderer, turns("y</think>" + END))
    context = AgentContext(engine, renderer, MemoryVideos(), RolloutConfig(max_context=100_000))
    first, second = rollout.rollout(context, [TASK, TASK], [4, 4], 3, copies=[0, 1])
    assert len({episode.seed for group in (first, second) for episode in group.episodes}) == 6
    [alone] = rollout.rollout(context, [TASK], [4], 6)
    assert [episode.seed for episode in alone.episodes[:3]] == [episode.seed for episode in first.episodes]


def test_every_call_is_answered_in_call_order_or_told_over_the_limit(renderer):
    """All calls are in a single turn. Unparseable calls do not count towards the limit."""
    first = "x</think>" + call(0, 10) + call(50, 40) + "<tool_call>{oops</tool_call>" * 2 + call(10, 20) + call() * 2
    described = turns(first + END, "y</think>" + END, report=lambda prompt: re.findall(r"<([\d.]+) sec", prompt)[0])
    [episode] = play(renderer, described, max_calls=3)
    _, answers = user_turns(episode, renderer)
    assert reports(answers) == [c.text for c in episode.calls]
    errors = ["", "bad_arguments", "unparseable", "unparseable", "", "over_limit", "over_limit"]
    assert [c.error for c in episode.calls] == errors
    assert float(episode.calls[0].text) < 10 <= float(episode.calls[4].text)
    for i, says in ((1, "from 0 to 60.0 seconds"), (2, "could not be read"), (6, "at most 3")):
        assert says in episode.calls[i].text


def test_a_slow_call_is_given_up_and_costs_its_siblings_nothing(renderer):
    expected = []
    later = threading.Event()

    def reply(prompt, seed):
        if is_subagent(prompt) and float(re.findall(r"<([\d.]+) seconds>", prompt)[0]) > 30:
            later.wait(20)
        elif "<tool_response>" in prompt:
            expected.append(engine.expected)
        return turns("x</think>" + call(0, 20) + call(40, 60) * 2 + END, "y</think>" + END)(prompt, seed)

    engine = Scripted(renderer, reply)
    [episode] = play(renderer, None, engine=engine, call_timeout=0.3)
    assert [c.error for c in episode.calls] == ["", "timeout", "timeout"]
    assert [c.seconds for c in episode.calls[1:]] == [0.3] * 2
    assert "given up" in user_turns(episode, renderer)[1] and len(episode.main.turns) == 2
    assert expected == [1]  # only the main agent
    before = dataclasses.replace(episode.calls[1])
    later.set()
    wait_for(lambda: not engine.busy)
    assert episode.calls[1] == before  # a late result changes nothing
    assert engine.expected == 0


# ---- 3: turns


def test_after_the_last_round_calls_are_not_run(renderer):
    """The released code runs the last turn's calls and never shows their results."""
    engine = Scripted(renderer, turns("x</think>" + call() + END))
    [episode] = play(renderer, None, engine=engine, max_rounds=3)
    assert len(episode.main.turns) == 4 and len(episode.calls) == 3
    assert sum(is_subagent(request.prompt) for request in engine.asked) == 3
    told = [NO_CALLS_LEFT in turn for turn in user_turns(episode, renderer)]
    assert told == [False, False, False, True]


def test_a_turn_that_is_cut_off_ends_the_episode_within_the_context(renderer):
    engine = Scripted(renderer, turns("x</think>" + call() + "and then I" + "." * 200))
    [episode] = play(renderer, None, engine=engine, max_new_tokens=100)
    assert episode.main.finish == "length" and episode.calls == [] and len(engine.asked) == 1
    assert sum(episode.main.mask) == 100 and not episode.error
    room = len(episode.main.prompt.ids) + 30
    [episode] = play(renderer, turns("x</think>" + "." * 200 + END), max_context=room)
    assert len(episode.main.all_ids) == room and episode.main.finish == "length"
    [episode] = play(renderer, turns("x</think>" + "<tool_call>" * 300 + END), max_context=1200)
    assert len(episode.main.all_ids) <= 1200 and episode.main.finish == "length"
    assert len(episode.calls) == len(re.findall("<tool_response>", text_of(episode, renderer)))


def test_sequential_dispatch_runs_one_call_per_turn_with_the_same_budget(renderer):
    said = turns("x</think>" + call(0, 10) + call(10, 20) + END)
    [episode] = play(renderer, said, dispatch="sequential", max_rounds=2, max_calls=3)
    assert len(episode.calls) == 6 and all(len(reports(turn)) == 1 for turn in user_turns(episode, renderer)[1:])
    for start, end in episode.main.turns:
        assert renderer.decode(episode.main.ids[start:end]).endswith("</tool_call>")
    closed = r"\}\n</tool_call><\|im_end\|>\n<\|im_start\|>user\n+<tool_response>"
    assert len(re.findall(closed, text_of(episode, renderer))) == 6
    closing = [i for i, token in enumerate(episode.main.ids) if token == renderer.end_of_turn]
    assert all(episode.main.mask[i] == 0 for i in closing)  # it was not sampled


def test_without_tools_there_is_no_schema_and_one_turn(renderer):
    [episode] = play(renderer, turns("x</think>" + call() + END), dispatch="none")
    assert "crop_video" not in text_of(episode, renderer).split("<|im_start|>assistant")[0]
    assert len(episode.main.turns) == 1 and episode.calls == []


@pytest.mark.parametrize("frames, k, shares", [([900, 30, 3], 64, [31, 30, 3]), ([5, 2], 64, [5, 2])])
def test_what_a_short_video_cannot_fill_of_the_overview_the_others_get(frames, k, shares):
    class Videos(MemoryVideos):
        def info(self, path):
            return dataclasses.replace(super().info(path), times=self.times[: int(path)])

        def overview(self, path, k, size_rule):
            return min(k, int(path))

    task = dataclasses.replace(TASK, videos=tuple(map(str, frames)))
    assert overview(task, k, Videos(duration=500.0), CONTRACT) == shares


# ---- 7, 8, 9: what comes from outside


@pytest.mark.parametrize("token", ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"])
def test_an_engine_that_samples_pixels_stops_the_run(renderer, token):
    sampled = renderer.tokenizer.convert_tokens_to_ids(token)
    with pytest.raises(ContractError, match="banned"):
        play(renderer, lambda prompt, seed: [sampled, renderer.end_of_turn])


def test_frames_can_be_returned_instead_of_a_report(renderer):
    [episode] = play(renderer, turns("x</think>" + call() + call(9, 5) + END, "y</think>" + END), tool_return="frames")
    check_trajectory(episode.main, renderer)
    shown, error = reports(user_turns(episode, renderer)[1])
    assert shown.count("seconds>") == CONTRACT.crop_max_frames == len(episode.main.clips[1])
    assert "must be less" in error and not episode.subagents


# ---- failures


def test_a_prompt_that_cannot_be_made_costs_its_group_and_is_logged(renderer, caplog, monkeypatch):
    def render(task, *others):
        return 1 // (task is TASK) and render_prompt(task, *others)

    monkeypatch.setattr(rollout, "render_prompt", render)
    monkeypatch.setattr(dataset, "_logged", set())
    good, *bad = play(renderer, lambda prompt, seed: "x</think>" + END, tasks=(TASK, *[dataclasses.replace(TASK)] * 2))
    assert not good.error and {e.error[:27] for e in bad} == {"RowError: ZeroDivisionError"}
    assert [record.exc_info[0] for record in caplog.records] == [ZeroDivisionError]


def test_an_episode_that_cannot_run_never_stops_the_others(renderer):
    bad = Task("t2", "?", ("/data/bad.mp4",), "oe", "")

    def reply(prompt, seed):
        if "broken" in prompt or is_subagent(prompt):
            raise EngineError("no server")
        return turns("x</think>" + call() + END, "y</think>" + END)(prompt, seed)

    lost = Task("t3", "broken?", ("/data/v.mp4",), "oe", "")
    engine = Scripted(renderer, reply)
    episodes = play(renderer, None, engine=engine, tasks=(TASK, bad, lost), group_size=2)
    # If a sub-agent fails, the main agent only reads a text about it.
    assert [c.error for c in episodes[0].calls] == ["engine"] and len(episodes[0].main.turns) == 2
    assert [bool(e.error) for e in episodes] == [False, False, True, True, True, True]
    assert episodes[2].error == "VideoError: /data/bad.mp4: is not a video" and "no server" in episodes[4].error
    assert engine.expected == 0


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


# ---- parallel, and fast


def test_agents_and_the_calls_of_a_turn_run_at_once(renderer):
    """The engine answers no sub-agent before all 128 have asked."""
    all_ask = threading.Barrier(128, timeout=20)

    def report(prompt):
        all_ask.wait()
        return "seen"

    said = turns("x</think>" + call() * 4 + END, "y</think>" + END, report=report)
    episodes = play(renderer, said, tasks=tasks_named(32))
    assert all([c.error for c in e.calls] == [""] * 4 and not e.error for e in episodes)


@pytest.mark.parametrize("concurrency", [1, 3, 100])
def test_the_engine_is_told_exactly_who_will_ask(renderer, concurrency):
    """A batch starts when as many requests wait as were announced. Announcing too few breaks repeatability, too many hangs."""

    class Barrier(Scripted):
        """An engine that answers only when all announced requests wait."""

        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.condition, self.waiting, self.round, self.batches = threading.Condition(), 0, 0, []

        def release(self):
            if self.waiting and self.waiting >= self.expected:
                self.batches.append(self.waiting)
                self.waiting, self.round = 0, self.round + 1
                self.condition.notify_all()

        def generate(self, *arguments, **more):
            with self.condition:
                self.waiting, mine = self.waiting + 1, self.round
                self.release()
                assert self.condition.wait_for(lambda: self.round > mine, timeout=20), "hangs"
            return super().generate(*arguments, **more)

        def announce(self, change):
            with self.condition:
                super().announce(change)
                self.release()

    def reply(prompt, seed):
        rng = random.Random(seed)
        if is_subagent(prompt):
            return "seen" + END
        calls = [rng.choice([call(), call(5, 1), "<tool_call>{"]) for _ in range(rng.randrange(4))]
        return "x</think>" + "".join(calls) + END

    tasks = tasks_named(10)
    tasks[3] = dataclasses.replace(tasks[3], videos=("/data/bad.mp4",))
    runs = []
    for _ in range(2):
        engine = Barrier(renderer, reply)
        episodes = play(renderer, None, engine=engine, tasks=tasks, group_size=2, concurrency=concurrency)
        assert engine.expected == 0 and engine.least_expected >= 0
        runs.append((engine.batches, [e.main.all_ids for e in episodes]))
    assert runs[0] == runs[1]


# ---- whatever a model writes

PIECES = [f"<{slash}{tag}>" for slash in ("", "/") for tag in ("think", "tool_call", "answer", "tool_response")]
PIECES += [call(), call(50, 3), call(1e9, -1), "<tool_code>crop_video(start_time=1, end_time=9)</tool_code>"]
PIECES += ["<tool_code>", '{"name": "crop_video", "arguments": {}}', "<|im_start|>", "<|endoftext|>", "\n", " I see "]
PIECES += [END, END, "é\u200b你"]


def check_episode(episode: Episode, renderer, cfg: RolloutConfig) -> None:
    """Check invariants 1-3 and 7-9 of any episode."""
    flow = rollout.agent_flow(cfg)
    rounds, per_round = flow.rounds, flow.calls_per_turn
    assert not episode.error
    for agent in [episode.main, *episode.subagents]:
        check_trajectory(agent, renderer)
    main = episode.main
    assert 1 <= len(main.turns) <= rounds + 1
    response, end = (renderer.tokenizer.convert_tokens_to_ids(t) for t in ("<tool_response>", END))
    for turn, ((_, stop), (start, _)) in enumerate(zip(main.turns, main.turns[1:])):
        answered = [c for c in episode.calls if c.turn == turn]
        assert answered and main.ids[stop:start].count(response) == len(answered)
        # One user turn, closed once. Then only the next assistant turn opens.
        assert main.ids[stop:start].count(end) == 1 + (main.ids[stop - 1] != end)
        assert sum(c.error in ("", "bad_arguments", "unknown_tool", "timeout", "engine") for c in answered) <= per_round
        assert main.mask[stop:start] == [0] * (start - stop)
    assert {c.turn for c in episode.calls} == set(range(len(main.turns) - 1))
    assert all((c.text != "") and (c.subagent is not None) == (c.error == "") for c in episode.calls)
    assert len(episode.subagents) == episode.n_executed


@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_completions_break_no_invariant(renderer, ends_as_qwen, count):
    """The engine samples random ids and pieces of calls, with all threads running."""
    vocabulary = [i for i in range(len(renderer.tokenizer)) if i not in renderer.never_sampled]
    pieces = [renderer.tokenizer.encode(piece, add_special_tokens=False) for piece in PIECES]

    def reply(prompt, seed):
        rng, ids = random.Random(seed), []
        for _ in range(rng.randrange(14)):
            ids += rng.choice(pieces) if rng.random() < 0.6 else [rng.choice(vocabulary)]
        return [*ids, renderer.end_of_turn]

    limits = {"max_new_tokens": 300, "max_context": 3000, "max_rounds": 2, "max_calls": 2, "concurrency": 16}
    engine, step = Scripted(renderer, reply), 0
    while len(engine.asked) < count:
        for episode in play(renderer, None, engine=engine, tasks=tasks_named(50), k=1, step=step, **limits):
            check_episode(episode, renderer, RolloutConfig(**limits))
        step += 1


# ---- on disk


@pytest.mark.parametrize("tool_return", ["subagent", "frames"])
def test_a_dumped_episode_comes_back_whole(renderer, tmp_path, tool_return):
    said = turns("x</think>" + call(0, 20) + call(9, 5) + call(3.5, 40, num_frames=2) + END, "y</think>\ud7ff" + END)
    [episode] = play(renderer, said, tool_return=tool_return)
    episode.main.structural = [*episode.main.mask]  # as scoring fills it
    path = tmp_path / "episodes.jsonl"
    append_line(path, episode_record(episode, renderer.readable))
    append_line(path, episode_record(episode, renderer.readable))
    text = json.loads(path.read_text().splitlines()[0])["main"]["text"]  # the readable text
    assert "y</think>" in text and text.count(IMAGE_PAD) == sum(map(len, episode.main.clips))
    again, episodes = tmp_path / "again.jsonl", load_episodes(path)
    assert episodes[0].main.prompt is episodes[1].main.prompt
    for loaded in episodes:
        append_line(again, episode_record(loaded, renderer.readable))
    assert again.read_text() == path.read_text()


def test_an_agent_without_tools_is_not_told_to_call_them():
    with pytest.raises(ValueError, match="dispatch: none"):
        RolloutConfig(tools=())
