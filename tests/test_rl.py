"""rl.py: the update computed by hand, and the loop with its sampler and its evaluations."""

import contextlib
import math
import os
import threading
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
from scripted import Scripted, by_chance, is_subagent, load_episodes
from scripts import metrics, rl_config, wait_for
from short_runs import train

import rl
from episode import Trajectory
from grpo import assign_advantages, bundle_groups
from rewards import assign_rewards
from rl import RLConfig, require_agreement
from rollout import RolloutConfig, render_prompt
from runtime import config
from runtime.checkpoints import load_policy
from runtime.dataset import RowError
from runtime.engine import EngineError
from runtime.policy import Policy, PolicyConfig
from runtime.run import Clock, Run
from runtime.video import Videos

# ------------------------------------------------------------------------------------------------ short runs


def test_the_next_batchs_overviews_are_decoded_while_this_one_is_sampled(toy_dir, tmp_path, monkeypatch):
    """Past bug: they were decoded before each batch, which would take 0.5 to 2.5 s of an 8B's step."""
    decoded, at_its_start = [], []
    request, sample = Videos._request, rl.rollout

    def noted(self, path, identity, verb, *arguments):
        if verb == "decode":
            decoded.append(str(path))
        return request(self, path, identity, verb, *arguments)

    def rollout(context, tasks, *given):
        mine = {path for task in tasks for path in task.videos}
        at_its_start.append(mine <= set(decoded))
        groups = sample(context, tasks, *given)
        if len(at_its_start) < 3:
            wait_for(lambda: len(decoded) == 2 * len(at_its_start) + 2)
        return groups

    monkeypatch.setattr(Videos, "_request", noted)
    monkeypatch.setattr(rl, "rollout", rollout)
    train(tmp_path / "c.yaml", toy_dir, steps=3, rollout={"dispatch": "none", "max_new_tokens": 8})
    assert at_its_start == [False, True, True] and len(decoded) == 6 == len(set(decoded))


def test_an_update_is_taken_at_the_rate_that_is_logged(scripted, toy_dir, tmp_path):
    with tiny.rates_of_updates() as rates:
        lines = train(tmp_path / "c.yaml", toy_dir, steps=2, optim={"lr": 1e-3, "schedule": "cosine"})
    assert rates == [line["lr"] for line in lines] == [1e-3, 5e-4]


def test_a_steps_metrics_are_the_means_of_its_records_also_where_no_reward_needs_them(scripted, toy_dir, tmp_path):
    [line] = train(tmp_path / "c.yaml", toy_dir, steps=1, batch_tasks=1)
    episodes = load_episodes(tmp_path / "c" / "episodes" / "step-000000.jsonl")
    for name in ("R", "well_formed", "closure/think", "surplus/answer", "f_release"):
        assert line[name] == pytest.approx(sum(e.rewards[name] for e in episodes) / 4), name


def test_the_reference_has_the_policys_frozen_tower_and_text_of_its_own(scripted, toy_dir, tmp_path, monkeypatch):
    """The memory plan counts the tower once."""
    held = []
    monkeypatch.setattr(rl, "train", lambda cfg, *policies: held.extend(policies[:2]))
    rl.main(config.load(RLConfig, rl_config(tmp_path / "c.yaml", toy_dir, steps=1, grpo={"kl_coef": 0.1})))
    policy, reference = held
    assert reference.vision is policy.vision and reference.text is not policy.text
    assert not any(p.requires_grad for p in reference.parameters())


# ------------------------------------------------------------------------------------------------ the loop's parts

NO_UPDATE = {"loss": 0.0, "learned_tokens": 0, "logprob_gap": 0.0, "logprob_gap_max": 0.0}


@pytest.fixture
def draw(toy_dir, tmp_path, toy_renderer, videos):
    """draw(*steps, ...changes of the config) -> a sampler's groups for the last step, and its engine."""

    def sample(*steps: int, **changes):
        cfg = config.load(RLConfig, rl_config(tmp_path / "draw.yaml", toy_dir, **changes))
        engine = Scripted(toy_renderer, by_chance)
        with contextlib.closing(rl.Sampler(cfg, engine, toy_renderer, videos)) as sampler:
            for step in steps:
                sampler.start(step)
            for step in steps:
                groups, _ = sampler.get(step)
        return groups, engine

    return sample


def seeds_of(groups) -> list[int]:
    return [episode.seed for group in groups for episode in group.episodes]


def test_k_reaches_the_sampler_as_frames_and_pads_of_every_prompt(draw):
    for gating, choices in (([4, 8], {4, 8}), ([], {64})):
        groups, engine = draw(0, gating=gating, batch_tasks=6)
        assert {group.k for group in groups} == choices
        first = [request for request in engine.asked if "<tool_response>" not in request.prompt]
        for group in groups:
            shown = [sum(map(len, request.clips)) for request in first if group.task.question in request.prompt]
            assert len(shown) >= 4 and group.k in shown
            assert all(episode.main.all_ids.count(engine.renderer.image_pad) == group.k for episode in group.episodes)


def test_k_and_seeds_hang_on_the_task_and_its_draw_and_on_nothing_else(draw):
    """24 tasks: steps 0 to 11 are epoch 0 of 2 tasks a step."""
    wide = {"gating": list(range(1, 30)), "batch_tasks": 24, "grpo": {"group_size": 2}}
    groups, _ = draw(0, **wide)
    again, _ = draw(0, **wide)
    ks = {group.task.id: group.k for group in groups}
    assert seeds_of(again) == seeds_of(groups) and len(set(seeds_of(groups))) == 48
    assert {group.task.id: group.k for group in again} == ks
    for change in ({"seed": 1}, {}):  # another seed; the next epoch
        others, _ = draw(0 if change else 1, **wide, **change)
        moved = {group.task.id: group.k for group in others}
        assert moved.keys() == ks.keys() and sum(moved[name] != ks[name] for name in ks) > 15
        assert not set(seeds_of(others)) & set(seeds_of(groups))


def test_a_batch_that_is_sampled_ahead_is_that_of_its_step(draw):
    groups, engine = draw(0, 1, 2, staleness=1, steps=3)
    assert seeds_of(groups) == seeds_of(draw(2, steps=3)[0])
    opened = [request for request in engine.asked if "<|im_start|>assistant" in request.prompt[-40:]]
    assert sum(not is_subagent(request.prompt) and "<tool_response>" not in request.prompt for request in opened) == 24


def test_no_weight_changes_while_the_next_batch_is_sampled(scripted, toy_dir, tmp_path, monkeypatch):
    """The update takes 0.2 s and sampling 0.5 s, so they overlap. Tokens are one update old."""
    monkeypatch.setattr(rl, "accumulate", lambda *_: time.sleep(0.2) or dict(NO_UPDATE))
    first, second, last = train(tmp_path / "c.yaml", toy_dir, steps=3, staleness=1)
    assert [line["staleness"] for line in (first, second, last)] == [0, 1, 1] and scripted[0].version == 3
    # The first batch overlaps with nothing. Of the last batch, the time without waiting was hidden behind the update.
    assert first["rollout_seconds"] > 0.2 > last["rollout_seconds"]
    assert 0 < second["wait_seconds"] < last["sampling_seconds"] - 0.15


def test_servers_that_already_run_get_the_weights_before_the_first_batch(scripted, toy_dir, tmp_path, monkeypatch):
    """They can hold another run's weights."""
    loaded, load = [], Scripted.update_weights

    def note(engine, path, version):
        loaded.append((version, len(engine.asked), (path / "model.safetensors").exists()))
        load(engine, path, version)

    monkeypatch.setattr(Scripted, "update_weights", note)
    monkeypatch.setattr(rl, "require_servers", lambda *_: None)
    train(tmp_path / "c.yaml", toy_dir, steps=1, rollout={"urls": ["http://127.0.0.1:9"]})
    assert loaded[0] == (0, 0, True) and [version for version, *_ in loaded] == [0, 1]


def test_the_first_batch_is_checked_at_the_temperatures_of_its_agents(scripted, toy_dir, tmp_path, monkeypatch):
    checked, agents = [], {"max_rounds": 1, "temperature": 0.9, "subagents": {"temperature": 0.4}}
    monkeypatch.setattr(rl, "require_agreement", lambda policy, groups, *temperatures: checked.append(temperatures))
    train(tmp_path / "c.yaml", toy_dir, steps=1, rollout=agents)
    assert checked == [(0.9, 0.4)]


def held_out(toy_dir: Path) -> dict:
    return {"val": {"sources": [{"path": str(toy_dir / "val.parquet")}]}, "eval_every": 1, "val_tasks": 1}


def test_weights_are_written_and_a_step_is_saved_while_a_batch_is_sampled(scripted, toy_dir, tmp_path, monkeypatch):
    """Batch s ends when weights s are being written, and batch s + 2 begins before step s is saved. An evaluation has the
    engine to itself."""
    begun, writing, told, there = defaultdict(threading.Event), defaultdict(threading.Event), [], []

    def note(owner, name, before=lambda *_: None):
        original = getattr(owner, name)

        def noted(*args, **more):
            told.append(name)
            before(*args)
            return original(*args, **more)

        monkeypatch.setattr(owner, name, noted)

    def sample(sampler, step):
        begun[step].set()
        assert step == 0 or writing[step].wait(20), "nothing is written before sampling has ended"
        return sample_batch(sampler, step)

    def evaluating(tasks, sampler, *_):
        assert all(batch.done() for batch in sampler.batches.values())

    def saving(run, step):
        assert step >= 1 or begun[step + 2].wait(20), "the next batch waits"

    sample_batch = rl.Sampler.sample
    monkeypatch.setattr(rl.Sampler, "sample", sample)
    monkeypatch.setattr(rl, "accumulate", lambda *_: dict(NO_UPDATE))
    note(rl, "barrier")
    note(rl, "accumulate")
    note(rl, "write_weights", lambda policy, folder: writing[int(folder.name.split("-")[1])].set())
    note(Scripted, "update_weights", lambda engine, path, version: there.append(sorted(os.listdir(path.parent))))
    note(rl, "evaluate", evaluating)
    note(Run, "save", saving)
    lines = train(tmp_path / "c.yaml", toy_dir, steps=3, staleness=1, save_every=1, **held_out(toy_dir))
    step = ["barrier", "accumulate", "write_weights", "barrier", "update_weights", "evaluate", "save"]
    assert told == step * 3 and begun.keys() == {0, 1, 2}
    assert there == [["weights-1"], ["weights-1", "weights-2"], ["weights-2", "weights-3"]]
    assert all(line["export_seconds"] > 0 for line in lines)


def test_a_sampler_that_fails_ends_the_run_when_its_batch_is_due_and_spoils_no_evaluation(
    scripted, toy_dir, tmp_path, monkeypatch
):
    """Past bug: from then on, no agent of an evaluation sampled a turn."""

    def rollout(context, tasks, ks, group_size, seed=0, step=0, copies=()):
        if step == 2:
            context = replace(context, engine=Scripted(context.renderer, lambda prompt, seed: 1 / 0))
        return plain_rollout(context, tasks, ks, group_size, seed, step, copies)

    plain_rollout = rl.rollout
    monkeypatch.setattr(rl, "rollout", rollout)
    with pytest.raises(ZeroDivisionError):
        train(tmp_path / "c.yaml", toy_dir, steps=4, staleness=1, **held_out(toy_dir))
    assert [(line["failed_rate"], line["eval/failed_rate"]) for line in metrics(tmp_path / "c")] == [(0, 0), (0, 0)]


def test_an_evaluation_is_greedy_at_each_k_with_tools_and_without(scripted, toy_dir, tmp_path, monkeypatch):
    """Past bugs: its sub-agents were not greedy. With fewer rows than `val_tasks`, some were asked twice."""
    rewarded, agents = [], {"max_rounds": 1, "subagents": {"temperature": 0.9}}
    monkeypatch.setattr(
        rl, "assign_rewards", lambda groups, *more: rewarded.append(groups) or assign_rewards(groups, *more)
    )
    val = {"val": {"sources": [{"path": str(toy_dir / "val.parquet")}]}, "val_tasks": 20, "val_frames": [4, 16]}
    first, last = train(tmp_path / "c.yaml", toy_dir, steps=2, rollout=agents, **val)
    assert "eval/acc" not in first
    greedy = [request for request in scripted[0].asked if request.temperature == 0]
    opened = [r for r in greedy if not is_subagent(r.prompt) and "<tool_response>" not in r.prompt]
    assert len(opened) == 2 * 2 * 8  # with tools and without, both K, the rows of val.parquet
    assert sorted(sum(map(len, request.clips)) for request in opened) == [4] * 16 + [16] * 16
    assert sum("<tools>" in request.prompt for request in opened) == 16
    assert sum(is_subagent(request.prompt) for request in greedy) == 16 * last["eval/kappa"] > 0
    said = [scripted[0].renderer.decode(group.episodes[0].main.ids) for group in rewarded[-1]]
    right = [f"<answer>{group.task.answer}</answer>" in text for group, text in zip(rewarded[-1], said)]
    assert len(right) == 16 and last["eval_no_tools/acc"] == sum(right) / 16
    for part in ("acc", "well_formed", "kappa"):
        assert last[f"eval/{part}"] == pytest.approx((last[f"eval/{part}/K=4"] + last[f"eval/{part}/K=16"]) / 2)
    assert last["eval/well_formed"] == 1 and last["eval/kappa"] > 0 == last["eval_no_tools/kappa"]
    assert last["eval/failed_rate"] == last["eval_no_tools/failed_rate"] == 0


def test_the_servers_of_the_rank_that_has_lost_most_are_counted(monkeypatch):
    rollout = RolloutConfig(urls=("http://127.0.0.1:1", "http://127.0.0.1:2"))
    sampler = SimpleNamespace(cfg=SimpleNamespace(rollout=rollout), dataset=SimpleNamespace(bad={"rl.parquet:3": ""}))
    sampler.engine = SimpleNamespace(servers=[1, 2])
    monkeypatch.setattr(rl, "gather", lambda mine: [mine, 1])
    monkeypatch.setattr(rl, "speed", lambda *_: {})
    clock = Clock()
    clock.lap("train")
    assert rl.measure_run(sampler, SimpleNamespace(cfg=None), [], clock) == {"bad_rows": 1, "servers": 1}


def test_the_engine_is_closed_if_what_opens_after_it_fails(toy_dir, tmp_path, renderer, monkeypatch):
    cfg = config.load(RLConfig, rl_config(tmp_path / "c.yaml", toy_dir, run=str(tmp_path / "run")))
    (tmp_path / "run").mkdir()
    engine = Scripted(renderer, by_chance)
    closed = []
    engine.close = lambda: closed.append(1)
    monkeypatch.setattr(rl, "open_engine", lambda *_: engine)
    monkeypatch.setattr(rl, "Dataset", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), rl.open_sampler(cfg, toy_dir / "model", renderer):
        pass
    assert closed


def test_a_row_whose_prompt_cannot_be_rendered_is_a_bad_row(draw, monkeypatch):
    """Past bugs: only its episodes counted as failed, however many such rows there were. It was rejected by the task's own id,
    so it was drawn again."""

    def render(task, *others):
        return 1 // (task.id == good) and render_prompt(task, *others)

    good = draw(0)[0][0].task.id
    monkeypatch.setattr("rollout.render_prompt", render)
    with pytest.raises(RowError, match=r"1 of 24 rows are unusable, .*; the last: rl.parquet:\d+: ZeroDivisionError"):
        draw(0)


@pytest.mark.parametrize("main", [True, False])
def test_a_first_batch_with_a_gap_that_is_no_number_is_refused(draw, toy_dir, monkeypatch, main):
    groups, engine = draw(0)
    policy = load_policy(PolicyConfig(str(toy_dir / "model")), engine.renderer.never_sampled)
    gaps = [math.nan, 0.0] if main else [0.0, math.nan]  # max() keeps the first of two, if either is NaN
    monkeypatch.setattr("rl.logprob_gap", lambda *_: gaps.pop(0))
    with pytest.raises(EngineError, match="disagree: their log-probs differ by nan"):
        require_agreement(policy, groups, 1.0)


def test_a_step_whose_log_probs_are_not_numbers_ends_the_run(scripted, toy_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(rl, "accumulate", lambda *_: NO_UPDATE | {"logprob_gap": math.nan, "logprob_gap_max": math.nan})
    with pytest.raises(EngineError, match="step 1: .* differ by nan on average"):
        rl.main(config.load(RLConfig, rl_config(tmp_path / "c.yaml", toy_dir, steps=1)))


def logprobs_alone(policy: Policy, row: Trajectory, temperature: float) -> torch.Tensor:
    """Return the log-probs of the sampled tokens of one conversation that shares no prompt."""
    whole = tiny.alone(row.all_ids, [0] * len(row.prompt.ids) + row.mask, row.clips)
    with torch.no_grad():
        return policy([whole], temperature).logprobs


def test_frames_of_calls_are_learned_with_the_episode_that_saw_them(draw, toy_dir):
    """Packed groups have the log-probs of each episode alone."""
    groups, engine = draw(0, rollout={"tool_return": "frames", "max_new_tokens": 64})
    episodes = [episode for group in groups for episode in group.episodes]
    assert {len(episode.main.clips) for episode in episodes} == {1, 2}  # some called
    assert all(not episode.subagents and not episode.error for episode in episodes)
    cfg = RLConfig(run="run", policy=PolicyConfig(str(toy_dir / "model")), data=None)
    assign_rewards(groups, engine.renderer, cfg.reward)
    assign_advantages(groups, cfg.grpo, cfg.reward.anchor)
    bundles, _ = bundle_groups(groups, cfg.grpo)
    assert len(bundles) == len(groups)  # each prompt is computed once
    policy = load_policy(cfg.policy, engine.renderer.never_sampled)
    with torch.no_grad():
        packed = policy(bundles, 0.7).logprobs
    alone = torch.cat([logprobs_alone(policy, episode.main, 0.7) for episode in episodes])
    assert len(packed) > 100 and torch.allclose(packed, alone, atol=1e-5)


def test_the_first_batch_is_checked_with_a_call_and_its_report(draw, toy_dir, monkeypatch):
    """Past bug: only the shortest trajectory was checked, usually without calls, so wrong crop sizes passed."""
    groups, engine = draw(0)
    policy = load_policy(PolicyConfig(str(toy_dir / "model")), engine.renderer.never_sampled)
    reports = []
    for episode in [episode for group in groups for episode in group.episodes]:
        reports += episode.subagents
        for agent in [episode.main, *episode.subagents]:
            exact = logprobs_alone(policy, agent, 1.0).tolist()
            agent.logprobs = [exact.pop(0) if sampled else 0.0 for sampled in agent.mask]
    monkeypatch.setattr("rl.GAP_LIMIT", 1e-4)
    require_agreement(policy, groups, 1.0, 0.0)
    require_agreement(policy, [], 1.0)  # a rank without episodes
    for temperatures in ((0.3, 0.0), (1.0, 0.5)):
        with pytest.raises(EngineError, match="the engine's images, weights, temperature or banned tokens differ"):
            require_agreement(policy, groups, *temperatures)
    for report in reports:
        clips = [replace(clip, pixels=255 - clip.pixels) for clip in report.prompt.clips]
        report.prompt = replace(report.prompt, clips=clips)
    with pytest.raises(EngineError, match="trainer and engine disagree"):
        require_agreement(policy, groups, 1.0, 0.0)
