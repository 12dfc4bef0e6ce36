"""rl.py: short runs, the order of the loop, its sampler and its checks."""

import contextlib
import itertools
import math
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from scripted import MemoryVideos, Scripted, by_chance, is_subagent, load_episodes
from scripts import metrics, rl_config, wait_for
from short_runs import pay_by_chance, train
from torch.optim.optimizer import register_optimizer_step_post_hook

import rl
from rewards import assign_rewards
from rl import RLConfig, require_agreement
from rollout import render_prompt
from runtime import config
from runtime.checkpoints import load_policy
from runtime.dataset import RowError
from runtime.engine import EngineError
from runtime.packing import Bundle
from runtime.policy import PolicyConfig
from runtime.weights import run_memory

# ------------------------------------------------------------------------------------------------ short runs


@pytest.fixture
def disturbed(scripted, monkeypatch):
    """disturbed(sampling=f, loading=g): call f(version) before an engine samples a turn of training, and g(folder) before it loads
    weights."""
    generate, update_weights = Scripted.generate, Scripted.update_weights

    def install(sampling=lambda version: None, loading=lambda folder: None) -> None:
        def generate_disturbed(engine, *given, temperature, **more):
            if temperature:
                sampling(engine.version)
            return generate(engine, *given, temperature=temperature, **more)

        def update_disturbed(engine, path, version):
            loading(path)
            update_weights(engine, path, version)

        monkeypatch.setattr(Scripted, "generate", generate_disturbed)
        monkeypatch.setattr(Scripted, "update_weights", update_disturbed)

    return install


def test_the_next_batchs_overviews_are_decoded_while_this_one_is_sampled(toy_dir, tmp_path, toy_renderer):
    """Past bug: they were decoded before each batch, which would take 0.5 to 2.5 s of an 8B's step."""
    videos = MemoryVideos()

    def reply(prompt: str, seed: int) -> str:
        wait_for(lambda: len(videos._cache) == 4)  # two batches of two tasks
        return by_chance(prompt, seed)

    path = rl_config(tmp_path / "c.yaml", toy_dir, rollout={"dispatch": "none"})
    cfg = config.load(RLConfig, path)
    with contextlib.closing(rl.Sampler(cfg, Scripted(toy_renderer, reply), toy_renderer, videos)) as sampler:
        sampler.start(0)
        groups, _ = sampler.get(0)
    assert not any(episode.error for group in groups for episode in group.episodes)


def test_a_step_logs_its_rate_and_the_means_of_its_records_also_where_no_reward_needs_them(scripted, toy_dir, tmp_path):
    rates = []
    hook = register_optimizer_step_post_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    first, last = train(tmp_path / "c.yaml", toy_dir, steps=2, batch_tasks=1, optim={"lr": 1e-3, "schedule": "cosine"})
    hook.remove()
    assert rates == [first["lr"], last["lr"]] == [1e-3, 5e-4]
    episodes = load_episodes(tmp_path / "c" / "episodes" / "step-000000.jsonl")
    for name in ("R", "well_formed", "closure/think", "surplus/answer", "f_release"):
        assert first[name] == pytest.approx(sum(e.rewards[name] for e in episodes) / 4), name


def test_the_reference_has_the_policys_frozen_tower_and_text_of_its_own(scripted, toy_dir, tmp_path, monkeypatch):
    """The memory plan counts the tower once."""
    held = []
    monkeypatch.setattr(rl, "train", lambda cfg, *policies: held.extend(policies[:2]))
    rl.main(config.load(RLConfig, rl_config(tmp_path / "c.yaml", toy_dir, steps=1, grpo={"kl_coef": 0.1})))
    policy, reference = held
    assert reference.vision is policy.vision and reference.text is not policy.text
    assert not any(p.requires_grad for p in reference.parameters())


def test_an_update_that_is_not_finite_is_skipped_and_shown_and_the_last_one_leaves_no_state_and_no_result(
    scripted, toy_dir, tmp_path, monkeypatch, capsys
):
    """Past bug: `optim.lr=1e30` ended with "done" and a model of weights of 9e29."""
    with monkeypatch.context() as patched:
        norms = iter([math.nan, 1.0, math.nan])
        patched.setattr("runtime.run.clip_gradients", lambda *_: next(norms))
        with pytest.raises(config.ConfigError, match="last step.* norm nan"):
            train(tmp_path / "run.yaml", toy_dir, steps=3, save_every=1, export_every=1)
    run = tmp_path / "run"
    assert [line["bad_steps"] for line in metrics(run)] == [1, 0, 1]
    assert " bad_steps 1" in capsys.readouterr().out
    before, skipped, after = (
        load_file(folder / "model.safetensors") for folder in (toy_dir / "model", *sorted((run / "models").iterdir()))
    )
    assert all(torch.equal(before[name], skipped[name]) for name in before)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert {state.name for state in (run / "state").iterdir()} == {"step-00000001", "step-00000002"}
    assert not (run / "model").exists()
    rl.main(config.load(RLConfig, tmp_path / "run.yaml", ["optim.lr=1e-9"]))
    assert (run / "model").exists()


def test_a_step_without_an_episode_stops_the_run_and_one_goes_on(disturbed, toy_dir, tmp_path):
    """Past bug: only the first batch was checked. Later, the run exited with status 0 and had replaced all its states."""
    earlier = itertools.count()

    def fail(version: int) -> None:
        if version == 2 or (version == 1 and next(earlier)):
            raise EngineError("gone")

    disturbed(fail)
    with pytest.raises(EngineError, match="step 3: .* 8 episodes.* EngineError: gone"):
        train(tmp_path / "c.yaml", toy_dir, steps=9, save_every=1, rollout={"dispatch": "none"})
    assert [line["failed_rate"] for line in metrics(tmp_path / "c")] == [0, 7 / 8]
    assert {path.name for path in (tmp_path / "c" / "state").iterdir()} == {"step-00000001", "step-00000002"}


def test_a_run_does_not_go_on_from_a_checkpoint_that_was_made_anew(scripted, toy_dir, tmp_path):
    """Past bug: reference and frozen tower came from the new checkpoint, the text model from the old state."""
    start = tmp_path / "start"
    shutil.copytree(toy_dir / "model", start)
    train(tmp_path / "c.yaml", toy_dir, policy={"checkpoint": str(start)}, steps=1)
    weights = load_file(start / "model.safetensors")
    save_file({name: w + 0.01 for name, w in weights.items()}, start / "model.safetensors", {"format": "pt"})
    cfg = config.load(RLConfig, tmp_path / "c.yaml", ["steps=2", "plan.gpus=1"])
    try_out = partial(rl.main, dry=True)
    for go_on in (rl.main, try_out):
        with pytest.raises(config.ConfigError, match="start' has changed since .*/c started from it: restore it"):
            go_on(cfg)
    save_file(weights, start / "model.safetensors", {"format": "pt"})
    try_out(cfg)


def test_a_finished_run_exports_again_and_samples_no_more(scripted, toy_dir, tmp_path):
    """Past bug: it started servers and gave them weights, only to export again."""
    for _ in range(2):
        train(tmp_path / "c.yaml", toy_dir, steps=1)
        shutil.rmtree(tmp_path / "c" / "model")  # which is there
    assert len(scripted) == 1


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["qwen2_5_vl"], indirect=True)
def test_a_published_qwen25_vl_trains_and_its_result_trains_on(checkpoint, toy_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(rl, "assign_rewards", pay_by_chance)
    stock = tiny.as_published(checkpoint, tmp_path / "stock")
    (stock / "visual.json").unlink()
    changes = {"visual": {"patch": 14, "frame_pixels": 6 * 28 * 28}, "steps": 2, "grpo": {"kl_coef": 0.1}}
    lines = train(tmp_path / "one.yaml", toy_dir, policy={"checkpoint": str(stock)}, **changes)
    lines += train(tmp_path / "two.yaml", toy_dir, policy={"checkpoint": str(tmp_path / "one" / "model")}, **changes)
    assert all(line["logprob_gap"] < 1e-4 and not line["failed_rate"] and line["kl"] >= 0 for line in lines)
    before, after = (load_file(folder / "model.safetensors") for folder in (stock, tmp_path / "two" / "model"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and not any(name.startswith("visual") for name in changed)


# ------------------------------------------------------------------------------------------------ the loop's parts


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


def test_k_and_seeds_hang_on_the_task_and_its_draw_and_on_nothing_else(draw):
    wide = {"gating": list(range(1, 30)), "batch_tasks": 24, "grpo": {"group_size": 2}}  # an epoch a step
    drawn = [draw(step, seed=seed, **wide)[0] for step, seed in ((0, 0), (0, 0), (0, 1), (1, 0))]
    ks, *other_ks = [{group.task.id: group.k for group in groups} for groups in drawn]
    seeds, *other_seeds = [{*seeds_of(groups)} for groups in drawn]
    assert (other_ks.pop(0), other_seeds.pop(0)) == (ks, seeds) and len(seeds) == 48
    for others, moved in zip(other_seeds, other_ks):
        assert moved.keys() == ks.keys() and sum(moved[name] != ks[name] for name in ks) > 15
        assert not others & seeds
    assert {group.k for group in draw(0, gating=[])[0]} == {64}  # visual.overview_frames


def test_a_batch_that_is_sampled_ahead_is_that_of_its_step(draw):
    groups, engine = draw(0, 1, 2, staleness=1, steps=3)
    assert seeds_of(groups) == seeds_of(draw(2, steps=3)[0])
    opened = [request for request in engine.asked if "<|im_start|>assistant" in request.prompt[-40:]]
    assert sum(not is_subagent(request.prompt) and "<tool_response>" not in request.prompt for request in opened) == 24


def test_the_first_batch_is_checked_at_the_temperatures_of_its_agents(scripted, toy_dir, tmp_path, monkeypatch):
    checked, agents = [], {"max_rounds": 1, "temperature": 0.9, "subagents": {"temperature": 0.4}}
    monkeypatch.setattr(rl, "require_agreement", lambda policy, groups, *temperatures: checked.append(temperatures))
    train(tmp_path / "c.yaml", toy_dir, steps=1, rollout=agents)
    assert checked == [(0.9, 0.4)]


def held_out(toy_dir: Path) -> dict:
    return {"val": {"sources": [{"path": str(toy_dir / "val.parquet")}]}, "eval_every": 1, "val_tasks": 1}


def test_with_staleness_1_a_step_is_trained_written_and_saved_while_the_next_batch_is_sampled(
    disturbed, scripted, toy_dir, tmp_path, monkeypatch
):
    """Weights v sample batch v + 1. It goes on until weights v + 1 are written and step v is saved. No weight changes meanwhile:
    the engine asserts it, and the ranks, which may share servers, wait for each other before the update and before the weights
    change. An evaluation has the engine to itself. There are at most two snapshots."""
    run, snapshots, barriers, waits = tmp_path / "c", [], [], []

    def wait_for_the_trainer(version: int) -> None:
        if version:
            wait_for((run_memory(run) / f"weights-{version + 1}").exists)
            wait_for((run / "state" / f"step-{version:08d}").exists)

    def load(folder: Path) -> None:
        snapshots.append(sorted(os.listdir(folder.parent)))
        waits.append(len(barriers))

    disturbed(wait_for_the_trainer, load)
    monkeypatch.setattr(rl, "barrier", lambda: barriers.append("rl"))
    changes = {"staleness": 1, "save_every": 1, "rollout": {"max_rounds": 1, "subagents": {"temperature": 0.9}}}
    lines = train(tmp_path / "c.yaml", toy_dir, steps=4, **changes, **held_out(toy_dir))
    assert [(line["staleness"], line["failed_rate"]) for line in lines] == [(0, 0), (1, 0), (1, 0), (1, 0)]
    assert snapshots[:3] == [["weights-1"], ["weights-1", "weights-2"], ["weights-2", "weights-3"]]
    assert waits == [2, 4, 6, 8]
    assert lines[1]["sampling_seconds"] > lines[1]["rollout_seconds"]  # it began a step earlier
    greedy = [request.temperature == 0 for request in scripted[0].asked]
    kinds = [kind for kind, _ in itertools.groupby(greedy)]
    assert kinds == [False, True] * 3  # batches 0 and 1, a batch, the last one; two evaluations at the end


def test_a_sampler_that_fails_ends_the_run_when_its_batch_is_due_and_spoils_no_evaluation(disturbed, toy_dir, tmp_path):
    """Past bug: from then on, no agent of an evaluation sampled a turn."""
    disturbed(lambda version: 1 / (version != 1))  # the third batch
    with pytest.raises(ZeroDivisionError):
        train(tmp_path / "c.yaml", toy_dir, steps=4, staleness=1, **held_out(toy_dir))
    assert [(line["failed_rate"], line["eval/failed_rate"]) for line in metrics(tmp_path / "c")] == [(0, 0), (0, 0)]


def test_servers_that_already_run_get_the_weights_before_the_first_batch(disturbed, toy_dir, tmp_path, monkeypatch):
    """They can hold another run's weights."""
    told = []
    disturbed(told.append, lambda folder: told.append([file.name for file in folder.parent.glob("*/*.safetensors")]))
    monkeypatch.setattr(rl, "require_servers", lambda *_: None)
    train(tmp_path / "c.yaml", toy_dir, steps=1, rollout={"urls": ["http://127.0.0.1:9"]})
    assert told[0] == ["model.safetensors"] and set(told[1:-1]) == {0}


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


def test_a_row_whose_prompt_cannot_be_rendered_is_a_bad_row(draw, monkeypatch):
    """Past bugs: only its episodes counted as failed, however many such rows there were. It was rejected by the task's own id,
    so it was drawn again."""

    def render(task, *others):
        return 1 // (task.id == good) and render_prompt(task, *others)

    good = draw(0)[0][0].task.id
    monkeypatch.setattr("rollout.render_prompt", render)
    with pytest.raises(RowError, match=r"1 of 24 rows are unusable, .*; the last: rl.parquet:\d+: ZeroDivisionError"):
        draw(0)


def test_a_step_whose_log_probs_are_not_numbers_ends_the_run(scripted, toy_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(rl, "accumulate", lambda *_: {"logprob_gap": math.nan})
    with pytest.raises(EngineError, match="step 1: .* differ by nan on average"):
        rl.main(config.load(RLConfig, rl_config(tmp_path / "c.yaml", toy_dir, steps=1)))


def test_the_first_batch_is_checked_with_a_call_and_its_report(draw, toy_dir, monkeypatch):
    """Past bug: only the shortest trajectory was checked, usually without calls, so wrong crop sizes passed."""
    groups, engine = draw(0)
    policy = load_policy(PolicyConfig(str(toy_dir / "model")), engine.renderer.never_sampled)
    reports = []
    for episode in [episode for group in groups for episode in group.episodes]:
        reports += episode.subagents
        for agent in [episode.main, *episode.subagents]:
            with torch.no_grad():
                exact = policy([Bundle(agent.prompt, [agent])]).logprobs.tolist()
            agent.logprobs = [exact.pop(0) if sampled else 0.0 for sampled in agent.mask]
    monkeypatch.setattr("rl.GAP_LIMIT", 1e-4)
    require_agreement(policy, groups, 1.0, 0.0)
    require_agreement(policy, [], 1.0)  # a rank without episodes
    for temperatures in ((0.3, 0.0), (1.0, 0.5)):
        with pytest.raises(EngineError, match="disagree"):
            require_agreement(policy, groups, *temperatures)
    for report in reports:
        clips = [replace(clip, pixels=255 - clip.pixels) for clip in report.prompt.clips]
        report.prompt = replace(report.prompt, clips=clips)
    with pytest.raises(EngineError, match="disagree"):
        require_agreement(policy, groups, 1.0, 0.0)
    for report in reports:
        report.logprobs = [math.nan] * len(report.ids)
    with pytest.raises(EngineError, match="nan"):  # max() would drop it
        require_agreement(policy, groups, 1.0, 0.0)
