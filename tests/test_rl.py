"""PARA-GRPO: advantages and losses by hand and against plain transformers; ranks, kills and micro-batches change nothing."""

import json
import math
import os
import random
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from scripts import REPO, finish, metrics, start

import config
import grpo
import rl
import sft
from contract import END_OF_TURN, Renderer, VisualContract, patchify
from data import Group, Task
from grpo import group_advantage, make_lessons, token_losses
from policy import PolicyConfig, load
from rewards import Anchor, RewardConfig, score, stage
from rl import RLConfig

run = partial(start, "rl.py")
CALL = '<tool_call>\n{"name": "crop_video", "arguments": {"start_time": 0, "end_time": 16}}\n</tool_call>'
TIDY = f"<think>\nI see it.\n</think>\n<answer>red</answer>{END_OF_TURN}"
LOOSE = f"<think>\nI see it.\nThe answer is red.{END_OF_TURN}"
BARE = f"The answer is red.{END_OF_TURN}"
WRONG = TIDY.replace("red", "blue")


def settings(**changes) -> RLConfig:
    cfg = RLConfig(run="", policy=PolicyConfig(""), data=None, kl=0.0, reward=RewardConfig(w_fmt=0, w_tool=0, untagged_answer=True))  # fmt: skip
    return replace(cfg, **changes)


@pytest.fixture
def toy_renderer(tokenizer):
    return Renderer(tokenizer, VisualContract(frame_pixels=1024))


def group(renderer, cfg, turns, name="t", prompt=(40, 41, 42)):
    """Episodes that said `turns`, with log-probs of an engine and rewards, as the rollout leaves them."""
    task, episodes = Task(name, "Which?", (), "oe", "red"), []
    for i, turn in enumerate(turns):
        episode = stage([turn], task, renderer)
        main = episode.main
        main.ids, main.mask = [*prompt, *main.ids], [0] * len(prompt) + main.mask
        main.turns, main.prompt_length = [(a + len(prompt), b + len(prompt)) for a, b in main.turns], len(prompt)
        main.logprobs = [-0.1 * (i + 1) * m for m in main.mask]
        episode.reward = score(episode, renderer, cfg.reward)
        episodes.append(episode)
    return Group(task, 64, episodes)


# ------------------------------------------------------------------------------------------------ advantages


def test_advantages_are_centred_and_scaled_by_the_sample_deviation():
    found = group_advantage([1, 0, 0, 1, 1], 1e-3)
    assert found == pytest.approx(np.array([0.4, -0.6, -0.6, 0.4, 0.4]) / math.sqrt(0.3))
    assert group_advantage([1, 0], 1e-3, by_std=False) == pytest.approx([0.5, -0.5])


def test_a_flat_group_has_no_advantage_whatever_rounding_leaves():
    """Pitfalls B13: 0.1 + 0.2 and 0.3 differ in the last bit, and a std of 1e-17 would blow that up."""
    assert not group_advantage([0.1 + 0.2, 0.3, 0.3], 1e-3).any()
    assert not group_advantage([0.7], 1e-3).any()


def test_selective_anchoring_moves_structural_tokens_only(toy_renderer):
    """All four answers are right, so R is flat: whatever advantage there is, is the anchor's."""
    cfg = settings()
    one = group(toy_renderer, cfg, [TIDY, LOOSE, BARE, TIDY])
    (lesson,) = make_lessons([one], toy_renderer, cfg)
    anchored = group_advantage([0.7, -0.3, 0.0, 0.7], cfg.std_floor)
    at = 0
    for episode, a in zip(one.episodes, anchored, strict=True):
        sampled = [t for t, m in zip(episode.main.ids, episode.main.mask) if m]
        values = lesson.advantage[at : at + len(sampled)]
        at += len(sampled)
        moved = toy_renderer.decode([t for t, v in zip(sampled, values) if v])
        broke = END_OF_TURN if "</answer>" not in toy_renderer.decode(sampled) else ""
        tags = [tag for tag in ("<think>", "</think>", "<answer>", "</answer>") if tag in toy_renderer.decode(sampled)]
        assert moved == "".join(tags) + broke
        assert values[values != 0] == pytest.approx(0.5 * a)
    assert at == len(lesson.advantage)


def test_without_the_anchor_every_token_has_its_episodes_advantage(toy_renderer):
    cfg = settings(reward=RewardConfig(w_fmt=0, w_tool=0, untagged_answer=True, anchor=Anchor(credit="off")))
    one = group(toy_renderer, cfg, [TIDY, WRONG, LOOSE.replace("red", "blue")])
    (lesson,) = make_lessons([one], toy_renderer, cfg)
    lengths = [sum(e.main.mask) for e in one.episodes]
    expected = np.repeat(group_advantage([1, 0, 0], 1e-3), lengths)
    assert lesson.advantage == pytest.approx(expected.astype(np.float32))
    assert not make_lessons(
        [group(toy_renderer, cfg, [TIDY, LOOSE])], toy_renderer, cfg
    )  # both right: nothing to learn


def test_the_mean_is_over_the_tokens_of_the_whole_batch_flat_groups_included(toy_renderer):
    cfg = settings(reward=RewardConfig(w_fmt=0, w_tool=0, anchor=Anchor(credit="off")))
    groups = [group(toy_renderer, cfg, [TIDY, WRONG], "a"), group(toy_renderer, cfg, [TIDY, TIDY], "b")]
    tokens = sum(sum(e.main.mask) for g in groups for e in g.episodes)
    (lesson,) = make_lessons(groups, toy_renderer, cfg)
    assert lesson.weight == pytest.approx(np.full(len(lesson.weight), 1 / tokens))
    (lesson,) = make_lessons(groups, toy_renderer, replace(cfg, aggregation="sequence"))
    lengths = [sum(e.main.mask) for e in groups[0].episodes]
    assert lesson.weight == pytest.approx(np.repeat([1 / (4 * n) for n in lengths], lengths))


def test_batch_normalisation_leaves_flat_groups_flat(toy_renderer):
    cfg = settings(reward=RewardConfig(w_fmt=0, w_tool=0, anchor=Anchor(credit="off")), normalise="batch", kl=0.1)
    groups = [group(toy_renderer, cfg, turns, name) for turns, name in (([TIDY, WRONG, WRONG], "a"), ([TIDY] * 3, "b"))]
    varied, flat = make_lessons(groups, toy_renderer, cfg)  # with a KL, a flat group is trained on too
    own = group_advantage([1, 0, 0], 1e-3)
    lengths = [sum(e.main.mask) for e in groups[0].episodes]
    assert varied.advantage == pytest.approx(np.repeat((own - own.mean()) / own.std(), lengths).astype(np.float32))
    assert not flat.advantage.any()


def test_credit_logp_is_a_mean_over_the_structure_of_rollouts_that_parse(toy_renderer):
    cfg = settings(reward=RewardConfig(w_fmt=0, w_tool=0, untagged_answer=True, anchor=Anchor(credit="logp")))
    (lesson,) = make_lessons([group(toy_renderer, cfg, [TIDY, LOOSE, TIDY])], toy_renderer, cfg)
    assert lesson.anchor.sum() == pytest.approx(0.5)  # lambda, shared out
    assert not lesson.advantage.any() and np.count_nonzero(lesson.anchor) == 2 * 8


def test_a_failed_episode_is_not_compared_and_not_trained_on(toy_renderer):
    cfg = settings()
    one = group(toy_renderer, cfg, [TIDY, WRONG, WRONG])
    one.episodes[2].error = "EngineError: gone"
    (lesson,) = make_lessons([one], toy_renderer, cfg)
    assert len(lesson.bundle.suffixes) == 2


# ------------------------------------------------------------------------------------------------ the loss


def test_the_loss_of_a_token_is_the_formula():
    cfg = settings(clip=0.2, clip_high=0.3, kl=0.1)
    log = torch.tensor
    new = log([-1.0, -1.0, -1.0, -1.0, -1.0])
    prox = log([-1.0, -1.5, -1.5, -0.5, -1.0])  # ratios 1, 1.65, 1.65, 0.61, 1
    behaviour = log([-1.2, -1.5, -1.5, -0.5, -3.0])  # w = 1.22, 1, 1, 1, 7.4 (over the cap)
    advantage, reference = log([2.0, 1.0, -1.0, -1.0, 1.0]), log([-1.0, -1.0, -1.5, -1.0, -1.0])
    losses, watched = token_losses(new, prox, behaviour, reference, advantage, cfg)
    k3 = math.exp(-0.5) + 0.5 - 1
    by_hand = [-math.exp(0.2) * 2, -1.3, math.exp(0.5) + 0.1 * k3, 0.8, 0.0]
    assert losses.tolist() == pytest.approx(by_hand, rel=1e-5)
    assert watched["clip_fraction"].tolist() == [0, 1, 0, 1, 0] and watched["capped_fraction"].tolist() == [
        0,
        0,
        0,
        0,
        1,
    ]
    assert watched["kl"].tolist() == pytest.approx([0, 0, k3, 0, 0], abs=1e-6)
    assert watched["gap"].tolist() == pytest.approx([0.2, 0, 0, 0, 2.0])


def test_a_step_has_the_policy_gradient_of_plain_transformers(toy_renderer, toy_dir, make_frames):
    """- sum_t A_t grad log pi(o_t) / N, row by row, under the sampling temperature and without the banned ids."""
    from transformers import Qwen3VLForConditionalGeneration

    cfg = settings(rollout=replace(settings().rollout, temperature=0.7))
    frames = make_frames(2, 32, 32)
    pad = toy_renderer.image_pad
    groups = [
        group(toy_renderer, cfg, [TIDY, WRONG, LOOSE], name, (40, pad, 41, pad, i))
        for i, name in ((42, "a"), (43, "b"))
    ]
    policy = load(PolicyConfig(str(toy_dir / "model"), freeze=()), toy_renderer.never_sampled)
    plain = Qwen3VLForConditionalGeneration.from_pretrained(toy_dir / "model").train()

    def logprobs_of(main):
        ids = torch.tensor([main.ids])
        pixels, grid = map(torch.from_numpy, patchify([frames]))
        out = plain(input_ids=ids, mm_token_type_ids=(ids == pad).int(), pixel_values=pixels, image_grid_thw=grid)
        logits = out.logits[0].index_fill(1, torch.tensor(toy_renderer.never_sampled), -1e9) / 0.7
        return torch.log_softmax(logits[:-1], -1).gather(1, ids[0, 1:, None])[:, 0]

    episodes = [e for g in groups for e in g.episodes]
    for episode in episodes:
        episode.main.frames = [frames]
        with torch.no_grad():  # the engine is exact, so w = 1
            episode.main.logprobs = [0.0, *logprobs_of(episode.main).tolist()]
    lessons = make_lessons(groups, toy_renderer, cfg)
    scores = policy([lesson.bundle for lesson in lessons], 0.7)
    loss, watched = grpo.lessons_loss(scores, lessons, None, None, cfg)
    loss.backward()
    assert watched["gap"].max() < 1e-5

    expected, n = 0.0, sum(sum(e.main.mask) for e in episodes)
    for g in groups:
        own = group_advantage([e.reward["reward"] for e in g.episodes], 1e-3)
        tags = group_advantage([e.reward["anchor"] for e in g.episodes], 1e-3)
        for episode, a, t in zip(g.episodes, own, tags, strict=True):
            main = episode.main
            struct = torch.tensor(grpo.structural_mask(main, toy_renderer), dtype=torch.float32)
            advantage = (a + 0.5 * t * struct) * torch.tensor(main.mask)
            expected = expected - (advantage[1:] * logprobs_of(main)).sum() / n
    expected.backward()
    theirs = {name: p.grad for name, p in plain.named_parameters()}
    for name, p in policy.model.named_parameters():
        assert (p.grad - theirs[name]).norm() <= 1e-4 * theirs[name].norm() + 1e-8, name


def test_the_token_budget_splits_groups_and_changes_nothing(toy_renderer, toy_dir):
    cfg, gradients, sizes = settings(), [], []
    groups = [group(toy_renderer, cfg, [TIDY, WRONG, LOOSE, BARE, TIDY], name) for name in "ab"]
    for budget in (40, 10_000):
        cfg = replace(cfg, train_tokens=budget)
        policy = load(PolicyConfig(str(toy_dir / "model")), toy_renderer.never_sampled)
        micro = grpo.micro_batches(make_lessons(groups, toy_renderer, cfg), budget)
        sizes.append(len(micro))
        for part in micro:
            assert sum(len(b) for b in grpo.bundles(part)) <= budget
            grpo.lessons_loss(policy(grpo.bundles(part), cfg.rollout.temperature), part, None, None, cfg)[0].backward()
        gradients.append({name: p.grad for name, p in policy.named_parameters() if p.grad is not None})
    assert sizes[0] > sizes[1] == 1
    for name, expected in gradients[1].items():
        assert (gradients[0][name] - expected).norm() <= 1e-4 * expected.norm() + 1e-8, name


# ------------------------------------------------------------------------------------------------ whole runs


@pytest.fixture(scope="module")
def cold_start(toy_dir, tmp_path_factory) -> Path:
    """A checkpoint that has begun to write the tags, so that groups differ."""
    folder = tmp_path_factory.mktemp("cold_start")
    tree = {
        "run": str(folder),
        "policy": {"checkpoint": str(toy_dir / "model"), "freeze": [], "activation_checkpointing": False},
        "data": {"sources": [{"path": str(toy_dir / "sft.parquet")}]},
        "visual": {"frame_pixels": 1024},
        "optim": {"lr": 3e-3, "warmup": 0.1},
        "steps": 32,
        "batch_rows": 8,
        "save_every": 32,
        "decoders": 1,
    }
    (folder / "sft.yaml").write_text(yaml.safe_dump(tree))
    sft.main(config.load(sft.SFTConfig, folder / "sft.yaml"))
    return folder / "model"


def write_config(path: Path, toy_dir: Path, checkpoint: Path, **changes) -> Path:
    tree = {
        "run": str(path.parent / "run"),
        "policy": {"checkpoint": str(checkpoint)},
        "data": {"sources": [{"path": str(toy_dir / "rl.parquet")}]},
        "visual": {"frame_pixels": 1024},
        "rollout": {"max_turns": 1, "max_new_tokens": 48, "temperature": 1.0, "subagents": {"max_new_tokens": 8}},
        "optim": {"lr": 1e-3},
        "gating": [4, 8],
        "steps": 6,
        "batch_tasks": 2,
        "group_size": 4,
        "save_every": 2,
        "decoders": 1,
    }
    path.write_text(yaml.safe_dump(tree | changes))
    return path


@pytest.fixture(scope="module")
def uninterrupted(toy_dir, cold_start, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    finish(run(write_config(folder / "c.yaml", toy_dir, cold_start)))
    return folder / "run"


def test_a_run_learns_from_something_and_writes_it_all_down(uninterrupted, cold_start):
    lines = metrics(uninterrupted)
    assert [line["step"] for line in lines] == list(range(6))
    assert any(line["grad_norm"] > 0 for line in lines) and all(line["gap"] < 1e-4 for line in lines)
    for name in ("reward", "acc", "fmt", "kappa", "strict", "flat_groups", "entropy", "kl", "rollout_seconds"):
        assert name in lines[-1], name
    assert lines[0]["kl"] == pytest.approx(0, abs=1e-6) and max(line["kl"] for line in lines[1:]) > 0
    shares = [sum(v for k, v in line.items() if k.startswith("share/")) for line in lines]
    assert shares == pytest.approx([1] * 6)
    kept = (uninterrupted / "episodes" / "step-000003.jsonl").read_text().splitlines()
    assert len(kept) == 4 and json.loads(kept[0])["reward"]
    before, after = (load_file(path / "model.safetensors") for path in (cold_start, uninterrupted / "model"))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and not any(".visual." in name for name in moved)  # the vision tower is frozen


def test_two_processes_have_the_metrics_of_one(uninterrupted, toy_dir, cold_start, tmp_path):
    """Batches of other shapes round differently, so sooner or later a sampled token differs: the first steps count."""
    finish(run(write_config(tmp_path / "c.yaml", toy_dir, cold_start, steps=3), ranks=2))
    for one, two in zip(metrics(uninterrupted)[:3], metrics(tmp_path / "run"), strict=True):
        for name in ("reward", "acc", "fmt", "kappa", "anchor", "loss", "kl", "entropy", "grad_norm", "learned_tokens"):
            assert two[name] == pytest.approx(one[name], abs=1e-4, rel=1e-4), name


def test_a_rank_without_any_task_keeps_step(toy_dir, cold_start, tmp_path):
    """Invariant 10: one task for two ranks; the second has nothing to roll out and nothing to learn."""
    finish(run(write_config(tmp_path / "c.yaml", toy_dir, cold_start, batch_tasks=1, steps=2), ranks=2))
    assert len(metrics(tmp_path / "run")) == 2


def test_a_run_killed_at_random_moments_ends_with_the_same_bits(uninterrupted, toy_dir, cold_start, tmp_path):
    cfg, rng, kills = write_config(tmp_path / "c.yaml", toy_dir, cold_start), random.Random(1), 0
    lines = tmp_path / "run" / "metrics.jsonl"
    while kills < 2:
        seen = len(lines.read_text().splitlines()) if lines.exists() else 0
        process = run(cfg, start_new_session=True)
        while process.poll() is None and (len(lines.read_text().splitlines()) if lines.exists() else 0) <= min(seen, 4):
            time.sleep(0.01)
        time.sleep(rng.random())
        if process.poll() is not None:
            break
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        kills += 1
    finish(run(cfg))
    assert kills
    expected, got = (load_file(folder / "model" / "model.safetensors") for folder in (uninterrupted, tmp_path / "run"))
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    timed = ("seconds", "_seconds")
    for a, b in zip(metrics(uninterrupted), metrics(tmp_path / "run"), strict=True):
        assert {k: v for k, v in a.items() if not k.endswith(timed)} == {k: v for k, v in b.items() if not k.endswith(timed)}  # fmt: skip


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"rollout": {"temperature": 0}}, "greedy episodes of a group are all alike"),
        ({"group_size": 1}, "group_size = 1: an advantage compares at least 2 episodes"),
        ({"rollout": {"subagents": {"train": True}}}, "needs rollout.subagents.temperature = 0.7"),
        ({"rollout": {"tool_return": "frames"}}, "is for evaluation"),
        ({"reward": {"anchor": {"credit": "strict"}}}, "reward.anchor.credit = 'strict': must be one of"),
        ({"steps": 0}, "must be at least 1"),
    ],
)
def test_what_cannot_run_says_so(toy_dir, tmp_path, changes, says):
    path = write_config(tmp_path / "c.yaml", toy_dir, Path("m"), **({"rollout": {}} | changes))
    with pytest.raises(config.ConfigError, match=says):
        config.load(RLConfig, path)


def test_a_dry_run_plans_trainer_and_engine_for_the_node(capsys):
    cfg = config.load(RLConfig, REPO / "configs" / "paragrpo_8b.yaml", ["policy.checkpoint=Qwen/Qwen3-VL-8B-Instruct"])
    with pytest.raises(FileNotFoundError, match="paravt_rl_diverse_4k4.parquet: no such data file"):
        rl.dry_run(cfg)
    told = capsys.readouterr().out
    assert "training, each of 7 GPUs" in told and "reference policy" in told and "engine, each of 1 GPUs" in told


@pytest.mark.parametrize("path", sorted((REPO / "configs").glob("*grpo*.yaml")), ids=lambda path: path.stem)
def test_every_config_loads(path):
    assert config.load(RLConfig, path).run.startswith("runs/")
