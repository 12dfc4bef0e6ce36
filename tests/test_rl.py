"""PARA-GRPO: advantages and losses by hand and against plain transformers; ranks, kills and micro-batches change nothing."""

import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
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

import grpo
import rl
import sft
from data import Call, Group, Task, Trajectory, parse_task
from grpo import group_advantage, make_lessons, split_by_prompt, token_losses
from rewards import Anchor, RewardConfig, score, stage
from rl import RLConfig
from rollout import RolloutConfig, open_engine, rollout
from rollout import load as load_episodes
from runtime import config
from runtime.contract import END_OF_TURN, Bundle, Renderer, VisualContract, load_tokenizer, patchify
from runtime.dataset import Dataset
from runtime.doctor import flaw_of, self_check
from runtime.engine import EngineError
from runtime.plan import PlanError
from runtime.policy import Scores, clip_gradients, load, make_optimizer
from runtime.settings import OptimConfig, PolicyConfig
from runtime.video import Frames, Videos

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


def lessons_of(groups, renderer, cfg):
    return make_lessons(groups, renderer, cfg, cfg.reward.anchor, cfg.rollout.subagents.train)


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
    (lesson,) = lessons_of([one], toy_renderer, cfg)
    anchored = group_advantage([0.7, -0.3, 0.0, 0.7], cfg.std_floor)
    at = 0
    for episode, a in zip(one.episodes, anchored, strict=True):
        sampled = [t for t, m in zip(episode.main.ids, episode.main.mask) if m]
        values = lesson.advantage[at : at + len(sampled)]
        at += len(sampled)
        moved = toy_renderer.decode([t for t, v in zip(sampled, values) if v])
        tags = [tag for tag in ("<think>", "</think>", "<answer>", "</answer>") if tag in toy_renderer.decode(sampled)]
        assert moved == "".join(tags) + END_OF_TURN
        assert values[values != 0] == pytest.approx(0.5 * a)
    assert at == len(lesson.advantage)


def test_to_stop_after_the_answer_is_credited(toy_renderer):
    """Only ends that came too early were structure, and a policy that babbled after </answer> until it was cut off was
    never taught better: the tags before have the same credit in both, and the end had none."""
    cfg = settings()
    babble = TIDY.replace(END_OF_TURN, "red" + "." * 40)
    one = group(toy_renderer, cfg, [TIDY, babble, TIDY, babble])
    (lesson,) = lessons_of([one], toy_renderer, cfg)
    stops = np.array(
        [t == toy_renderer.end_of_turn for e in one.episodes for t, m in zip(e.main.ids, e.main.mask) if m]
    )
    assert stops.sum() == 2 and (lesson.advantage[stops] > 0.1).all()


def test_without_the_anchor_every_token_has_its_episodes_advantage(toy_renderer):
    cfg = settings(reward=RewardConfig(w_fmt=0, w_tool=0, untagged_answer=True, anchor=Anchor(credit="off")))
    one = group(toy_renderer, cfg, [TIDY, WRONG, LOOSE.replace("red", "blue")])
    (lesson,) = lessons_of([one], toy_renderer, cfg)
    lengths = [sum(e.main.mask) for e in one.episodes]
    expected = np.repeat(group_advantage([1, 0, 0], 1e-3), lengths)
    assert lesson.advantage == pytest.approx(expected.astype(np.float32))
    assert not lessons_of([group(toy_renderer, cfg, [TIDY, LOOSE])], toy_renderer, cfg)  # both right: nothing to learn


def test_the_mean_is_over_the_tokens_of_the_whole_batch_flat_groups_included(toy_renderer):
    cfg = settings(reward=RewardConfig(w_fmt=0, w_tool=0, anchor=Anchor(credit="off")))
    groups = [group(toy_renderer, cfg, [TIDY, WRONG], "a"), group(toy_renderer, cfg, [TIDY, TIDY], "b")]
    tokens = sum(sum(e.main.mask) for g in groups for e in g.episodes)
    (lesson,) = lessons_of(groups, toy_renderer, cfg)
    assert lesson.weight == pytest.approx(np.full(len(lesson.weight), 1 / tokens))
    (lesson,) = lessons_of(groups, toy_renderer, replace(cfg, aggregation="sequence"))
    lengths = [sum(e.main.mask) for e in groups[0].episodes]
    assert lesson.weight == pytest.approx(np.repeat([1 / (4 * n) for n in lengths], lengths))


def test_batch_normalisation_lifts_the_few_that_vary(toy_renderer):
    """Past bug: flat groups were left out of its std, which made it a constant factor."""
    cfg = settings(reward=RewardConfig(w_fmt=0, w_tool=0, anchor=Anchor(credit="off")), normalise="batch", kl=0.1)
    groups = [group(toy_renderer, cfg, turns, name) for turns, name in (([TIDY, WRONG, WRONG], "a"), ([TIDY] * 3, "b"))]
    varied, flat = lessons_of(groups, toy_renderer, cfg)  # with a KL, a flat group is trained on too
    own = group_advantage([1, 0, 0], 1e-3)
    spread = np.sqrt(sum(own**2) / 6)  # of six episodes, three of which have 0
    lengths = [sum(e.main.mask) for e in groups[0].episodes]
    assert varied.advantage == pytest.approx(np.repeat(own / spread, lengths).astype(np.float32))
    assert not flat.advantage.any()


def test_credit_logp_is_a_mean_over_the_structure_of_rollouts_that_parse(toy_renderer):
    cfg = settings(reward=RewardConfig(w_fmt=0, w_tool=0, untagged_answer=True, anchor=Anchor(credit="logp")))
    (lesson,) = lessons_of([group(toy_renderer, cfg, [TIDY, LOOSE, TIDY])], toy_renderer, cfg)
    assert lesson.pull.sum() == pytest.approx(0.5)  # lambda, shared out
    assert not lesson.advantage.any() and np.count_nonzero(lesson.pull) == 2 * 9


def test_a_failed_episode_is_not_compared_and_not_trained_on(toy_renderer):
    cfg = settings()
    one = group(toy_renderer, cfg, [TIDY, WRONG, WRONG])
    one.episodes[2].error = "EngineError: gone"
    (lesson,) = lessons_of([one], toy_renderer, cfg)
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


def test_a_token_that_the_engine_could_not_have_sampled_leaves_the_gradient_alone():
    """Past bug: 0 * inf in the backward pass of a token that was left out."""
    new = torch.tensor([-1.0, -2.0], requires_grad=True)
    losses, watched = token_losses(new, new.detach(), torch.tensor([-200.0, -2.0]), None, torch.ones(2), settings())
    losses.sum().backward()
    assert new.grad.tolist() == [0, -1] and watched["capped_fraction"].tolist() == [1, 0]


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
    lessons = lessons_of(groups, toy_renderer, cfg)
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
        micro = grpo.micro_batches(lessons_of(groups, toy_renderer, cfg), budget)
        sizes.append(len(micro))
        for part in micro:
            assert sum(len(b) for b in grpo.bundles(part)) <= budget
            grpo.lessons_loss(policy(grpo.bundles(part), cfg.rollout.temperature), part, None, None, cfg)[0].backward()
        gradients.append({name: p.grad for name, p in policy.named_parameters() if p.grad is not None})
    assert sizes[0] > sizes[1] == 1
    for name, expected in gradients[1].items():
        assert (gradients[0][name] - expected).norm() <= 1e-4 * expected.norm() + 1e-8, name


def test_structural_credit_reaches_the_logits_of_structural_tokens_only(toy_renderer):
    """One row of logits per token: all answers are right, so whatever gradient there is, is the anchor's."""
    cfg = settings()
    one = group(toy_renderer, cfg, [TIDY, LOOSE, BARE, TIDY])
    (lesson,) = lessons_of([one], toy_renderer, cfg)
    targets = torch.tensor([t for e in one.episodes for t, m in zip(e.main.ids, e.main.mask) if m])
    logits = torch.zeros(len(targets), 600, requires_grad=True)
    logprobs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    grpo.lessons_loss(Scores(logprobs, logprobs.detach()), [lesson], None, None, cfg)[0].backward()
    moved = logits.grad.abs().sum(-1) > 0
    struct = [s for e in one.episodes for s, m in zip(grpo.structural_mask(e.main, toy_renderer), e.main.mask) if m]
    assert moved.tolist() == struct and 0 < sum(struct) < len(struct)


def test_training_sub_agents_makes_good_reports_likelier_and_bad_ones_less_likely(toy_renderer, toy_dir):
    subagents = replace(settings().rollout.subagents, train=True, temperature=0.7)
    cfg = settings(rollout=replace(settings().rollout, subagents=subagents), reward=RewardConfig(anchor=Anchor(credit="off")))  # fmt: skip
    one = group(toy_renderer, cfg, [TIDY, WRONG])
    for episode, report in zip(one.episodes, ["A red flash at 12 s.", "Nothing flashes."], strict=True):
        agent = group(toy_renderer, cfg, [report + END_OF_TURN], prompt=(50, 51)).episodes[0].main
        episode.calls = [Call(0, "crop_video", {}, agent=agent)]
    policy = load(PolicyConfig(str(toy_dir / "model")), toy_renderer.never_sampled)

    def likelihoods():
        rows = [Bundle([], [a.ids], [a.mask], []) for e in one.episodes for a in e.agents]
        with torch.no_grad():
            return [policy([row], 0.7).logprobs.sum().item() for row in rows]

    for train in (False, True):
        cfg = replace(cfg, rollout=replace(cfg.rollout, subagents=replace(subagents, train=train)))
        lessons = lessons_of([one], toy_renderer, cfg)
        spoken = [toy_renderer.decode(s) for lesson in lessons for s in lesson.bundle.suffixes]
        assert any("A red flash" in text for text in spoken) == train
    before = likelihoods()
    own = [lesson for lesson in lessons if lesson.bundle.prompt == [50, 51]]  # so that nothing else moves the weights
    grpo.lessons_loss(policy(grpo.bundles(own), 0.7), own, None, None, cfg)[0].backward()
    torch.optim.SGD(policy.parameters(), lr=1e-2).step()
    after = likelihoods()
    assert after[0] > before[0] and after[1] < before[1]


def test_further_minibatches_are_clipped_against_the_policy_before_the_first(toy_renderer, toy_dir):
    groups = [group(toy_renderer, settings(), [TIDY, WRONG, LOOSE], name, (40, 41, i)) for i, name in enumerate("abcd")]
    clipped = {}
    for minibatches in (1, 2):
        cfg = settings(minibatches=minibatches, optim=OptimConfig(lr=0.05), rollout=RolloutConfig(temperature=1.0))
        policy = load(PolicyConfig(str(toy_dir / "model")), toy_renderer.never_sampled)
        optimizer = make_optimizer(policy, cfg.optim)
        for g in groups:  # the engine is exact
            for e in g.episodes:
                with torch.no_grad():
                    found = policy([Bundle([], [e.main.ids], [e.main.mask], [])]).logprobs.tolist()
                e.main.logprobs = [found.pop(0) if m else 0.0 for m in e.main.mask]
        lessons = lessons_of(groups, toy_renderer, cfg)
        measured, bad = rl.update(policy, None, optimizer, lessons, cfg, 0)
        assert not bad and measured["gap"] < 1e-4  # behaviour and prox are the policy before the first update
        clipped[minibatches] = measured["clip_fraction"]
        assert {int(s["step"]) for s in optimizer.state.values()} == {minibatches}
    assert clipped[1] == 0 < clipped[2]


def test_two_looks_with_the_same_words_are_trained_on_their_own_frames():
    """Past bug: stamps have a tenth of a second, so windows that differ by less had equal prompts, and one's frames."""

    def look(shade: int) -> Trajectory:
        frames = Frames(np.full((1, 32, 32, 3), shade, np.uint8), (1.0,))
        return Trajectory([5, 6, 7], [0, 0, 1], [0.0, 0.0, -1.0], [-1, -1, 0], [frames], prompt_length=2)

    one, other = look(0), look(255)
    again = replace(one)
    parts = split_by_prompt([(agent, []) for agent in (one, other, again)], 100)
    assert [[agent for agent, _ in part] for part in parts] == [[one, again], [other]]


# ------------------------------------------------------------------------------------------------ the first batch


@pytest.fixture
def exact_group(toy_renderer, toy_dir):
    """A group whose log-probs are the policy's own at temperature 1, and that policy."""
    policy = load(PolicyConfig(str(toy_dir / "model")), toy_renderer.never_sampled)
    one = group(toy_renderer, settings(), [TIDY, WRONG])
    for episode in one.episodes:
        main = episode.main
        with torch.no_grad():
            found = policy([Bundle([], [main.ids], [main.mask], [])]).logprobs.tolist()
        main.logprobs = [found.pop(0) if m else 0.0 for m in main.mask]
        main.versions = [0 if m else -1 for m in main.mask]
    return one, policy


def test_the_first_batch_is_checked_against_the_trainer(exact_group):
    one, policy = exact_group
    cfg = settings(gap_limit=1e-3)
    self_check(policy, [one], 1.0, cfg.gap_limit)
    self_check(policy, [], 1.0, cfg.gap_limit)  # a rank without episodes
    with pytest.raises(
        EngineError, match=r"more than gap_limit = 0.001; its log-probs are those of temperature 1, not 0.3"
    ):
        self_check(policy, [one], 0.3, cfg.gap_limit)
    one.episodes[0].main.logprobs = [2 * p for p in one.episodes[0].main.logprobs]
    with pytest.raises(EngineError, match="its images, its weights or its banned tokens are others"):
        self_check(policy, [one], 1.0, cfg.gap_limit)


def broken(trajectory, column, where, value):
    at = {"sampled": trajectory.mask.index(1), "prompt": 0}[where]
    getattr(trajectory, column)[at] = value


@pytest.mark.parametrize(
    "breaks, says",
    [
        (lambda t, pad: t.logprobs.pop(), "have different lengths"),
        (lambda t, pad: broken(t, "mask", "prompt", 1), "outside the assistant's turns has mask 1"),
        (lambda t, pad: broken(t, "versions", "sampled", -1), "mask and versions disagree"),
        (lambda t, pad: broken(t, "logprobs", "sampled", math.nan), "positive or not a number"),
        (lambda t, pad: broken(t, "ids", "sampled", pad), "a token that stands for pixels was sampled"),
    ],
)
def test_a_trajectory_that_breaks_an_invariant_is_named(exact_group, toy_renderer, breaks, says):
    one, policy = exact_group
    trajectory = one.episodes[1].main
    assert flaw_of(trajectory, policy) == ""
    breaks(trajectory, toy_renderer.image_pad)
    assert says in flaw_of(trajectory, policy)


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
    for a, b in zip(metrics(uninterrupted), metrics(tmp_path / "run"), strict=True):
        measured = [name for name in a if "second" not in name and name != "peak_memory_gib"]
        assert a.keys() == b.keys() and {k: a[k] for k in measured} == {k: b[k] for k in measured}


def test_a_run_evaluates_itself_greedily_with_tools_and_without(toy_dir, cold_start, tmp_path):
    val = {"val": {"sources": [{"path": str(toy_dir / "val.parquet")}]}, "val_tasks": 4, "val_frames": [4, 8]}
    cfg = config.load(RLConfig, write_config(tmp_path / "c.yaml", toy_dir, cold_start, eval_every=2, steps=3, **val))
    rl.main(cfg)
    lines = metrics(tmp_path / "run")
    assert ["eval/acc" in line for line in lines] == [False, True, True]  # every 2 steps, and at the end
    trained = tmp_path / "run" / "model"
    renderer = Renderer(load_tokenizer(trained), cfg.visual)
    engine = open_engine(trained, renderer)
    tasks = [task for task, _ in Dataset(cfg.val, parse_task).batch(0, 4)]
    with Videos(1) as videos:
        for name, dispatch in (("eval", "parallel"), ("eval_no_tools", "none")):
            agent = replace(cfg.rollout, temperature=0.0, dispatch=dispatch)
            stage = {"engine": engine, "renderer": renderer, "videos": videos, "cfg": agent, "progress": False}
            found = {k: [score(group.episodes[0], renderer, cfg.reward) for group in rollout(tasks, [k] * 4, 1, **stage)] for k in (4, 8)}  # fmt: skip
            for part in ("acc", "strict"):
                for k in (4, 8):
                    assert lines[-1][f"{name}/{part}/K={k}"] == pytest.approx(np.mean([r[part] for r in found[k]]))
                assert lines[-1][f"{name}/{part}"] == pytest.approx(
                    np.mean([r[part] for k in (4, 8) for r in found[k]])
                )
            assert lines[-1][f"{name}/failed_rate"] == 0
    engine.close()
    assert "eval_no_tools/kappa" not in lines[-1] and lines[-1]["eval/kappa"] >= 0


def test_the_reference_has_the_policys_frozen_tower_and_text_of_its_own(toy_dir, cold_start, tmp_path, monkeypatch):
    """The plan counts the tower once."""
    held, update = [], rl.update
    monkeypatch.setattr(rl, "update", lambda *args: held.append(args[:2]) or update(*args))
    rl.main(config.load(RLConfig, write_config(tmp_path / "c.yaml", toy_dir, cold_start, steps=1, kl=0.1)))
    [(policy, reference)] = held
    assert reference.vision is policy.vision and reference.text is not policy.text
    assert not any(p.requires_grad for p in reference.parameters())


def test_a_batch_whose_gradient_is_not_finite_changes_nothing_and_can_be_replayed(
    toy_dir, cold_start, tmp_path, monkeypatch
):
    def clip(policy, largest):
        norms.append(clip_gradients(policy, largest))
        return math.nan if len(norms) > 1 else norms[-1]

    norms, taught = [], []
    monkeypatch.setattr("runtime.policy.clip_gradients", clip)
    monkeypatch.setattr(rl, "make_lessons", lambda *args: taught.append(make_lessons(*args)) or taught[-1])
    cfg = config.load(RLConfig, write_config(tmp_path / "c.yaml", toy_dir, cold_start, max_bad_steps=1, save_every=1))
    with pytest.raises(FloatingPointError, match=r"not finite in 2 steps, more than max_bad_steps = 1.*bad_steps"):
        rl.main(cfg)
    assert [line["bad_steps"] for line in metrics(tmp_path / "run")] == [0, 1, 2]
    kept = sorted((tmp_path / "run" / "bad_steps").iterdir())
    assert [path.name for path in kept] == ["step-000001-rank0.jsonl", "step-000002-rank0.jsonl"]
    with Videos(1) as videos:
        episodes = load_episodes(kept[0], videos, cfg.visual)
    groups = [Group(e.task, e.k, [x for x in episodes if x.task == e.task]) for e in episodes[:: cfg.group_size]]
    again = lessons_of(groups, Renderer(load_tokenizer(cold_start), cfg.visual), cfg)
    for ours, theirs in zip(again, taught[1], strict=True):
        assert ours.bundle.suffixes == theirs.bundle.suffixes
        assert all(np.array_equal(a.pixels, b.pixels) for a, b in zip(ours.bundle.frames, theirs.bundle.frames))
        for column in ("advantage", "behaviour", "weight", "pull"):
            assert np.array_equal(getattr(ours, column), getattr(theirs, column))


def test_sampling_overlaps_training_and_its_tokens_are_one_update_old(toy_dir, cold_start, tmp_path):
    """A server that takes its time; a KL, so that its random words are trained on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    renderer = Renderer(load_tokenizer(cold_start), VisualContract(frame_pixels=1024))
    command = [sys.executable, "fake_sglang.py", port, renderer.image_pad, 32, renderer.end_of_turn, "slow=0.6"]
    server = subprocess.Popen(list(map(str, command)), cwd=REPO / "tests")
    try:
        for staleness in (0, 1):
            path = tmp_path / f"{staleness}.yaml"
            write_config(path, toy_dir, cold_start, run=str(path.with_suffix("")), staleness=staleness, gap_limit=100,
                steps=4, rollout={"max_new_tokens": 8, "urls": [f"http://127.0.0.1:{port}"]}, batch_tasks=4)  # fmt: skip
            rl.main(config.load(RLConfig, path))
            lines = metrics(path.with_suffix(""))
            assert [line["staleness"] for line in lines] == [0, *[staleness] * 3]
            # The first has nothing to overlap with, the last samples nothing ahead.
            sampled = lines[2:] if staleness else lines[1:-1]
            apart = sum(line["sampling_seconds"] for line in sampled) + sum(
                line["train_seconds"] for line in lines[1:-1]
            )
            together = sum(line["rollout_seconds"] + line["train_seconds"] for line in lines[1:-1])
            trained = sum(line["train_seconds"] for line in lines[1:-1])
            assert together < apart - 0.5 * trained if staleness else together >= apart
    finally:
        server.kill()


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"rollout": {"temperature": 0}}, "greedy episodes of a group are all alike"),
        ({"group_size": 1}, "group_size = 1: an advantage compares at least 2 episodes"),
        ({"rollout": {"subagents": {"train": True}}}, "needs rollout.subagents.temperature = 0.7"),
        ({"rollout": {"tool_return": "frames"}}, "is for evaluation"),
        ({"reward": {"anchor": {"credit": "strict"}}}, "reward.anchor.credit = 'strict': must be one of"),
        ({"steps": 0}, "must be at least 1"),
        ({"std_floor": 0, "clip": -1}, "clip = -1.0, std_floor = 0.0: must be greater than 0"),
        ({"kl": -0.1}, "kl = -0.1: must not be negative"),
        ({"reward": {"open_answer": "judge", "judge": {"url": "http://x"}}}, "needs judge.url and judge.model"),
    ],
)
def test_what_cannot_run_says_so(toy_dir, tmp_path, changes, says):
    path = write_config(tmp_path / "c.yaml", toy_dir, Path("m"), **({"rollout": {}} | changes))
    with pytest.raises(config.ConfigError, match=says):
        config.load(RLConfig, path)


def on_node(name: str, toy_dir: Path) -> RLConfig:
    """A config of configs/ whose data are there, before its cold start is."""
    return config.load(RLConfig, REPO / "configs" / name, [f"data.sources=[{{path: {toy_dir}/rl.parquet}}]"])


@pytest.mark.parametrize("path", sorted((REPO / "configs").glob("*_[28]b*.yaml")), ids=lambda path: path.stem)
def test_every_config_of_a_real_model_fits_its_gpus(path, toy_dir, capsys):
    if path.stem.startswith("sft"):
        cfg = config.load(sft.SFTConfig, path, [f"data.sources=[{{path: {toy_dir}/sft.parquet}}]"])
        assert sft.dry_run(cfg) == 0
    else:
        cfg = on_node(path.name, toy_dir)
        assert rl.dry_run(cfg) == 1  # all is there but the cold start
    told = capsys.readouterr().out
    used = [float(line.split()[1]) for line in told.splitlines() if line.split()[:1] == ["sum"]]
    assert used and all(20 < gib < 80 for gib in used)
    assert f"training, each of {cfg.gpus} GPUs" in told or "training and engine on the same GPU" in told
    if cfg.policy.checkpoint.startswith("runs"):
        assert f"{cfg.policy.checkpoint} is not there yet; the plan is that of Qwen/Qwen3-VL" in told


def test_a_dry_run_plans_trainer_and_engine_for_the_node(toy_dir, capsys):
    rl.dry_run(on_node("paragrpo_8b.yaml", toy_dir))
    told = capsys.readouterr().out
    assert "training, each of 4 GPUs" in told and "reference policy" in told and "engine, each of 4 GPUs" in told
    assert "disk: 3 training states take" in told


def test_a_gpu_that_trains_and_samples_must_hold_both(toy_dir, capsys):
    cfg = on_node("paragrpo_2b_1gpu.yaml", toy_dir)
    rl.dry_run(cfg)
    told = capsys.readouterr().out
    assert "training and engine on the same GPU" in told and "KV cache" in told and told.count("sum") == 1
    with pytest.raises(PlanError, match="do not fit into 60 GiB"):
        rl.dry_run(replace(cfg, gpu_gib=60))


@pytest.mark.parametrize("path", sorted((REPO / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_loads_and_names_its_run_after_itself(path):
    cfg = config.load(sft.SFTConfig if "sft" in path.stem else RLConfig, path)
    assert cfg.run.replace("/toy/", "/toy_").removeprefix("runs/") in (path.stem, path.stem.removesuffix("_1gpu"))


ABLATIONS = {  # what differs from PARA-GRPO: (think prefix, answer suffix, credit, gamma, w_tool, gating)
    "paragrpo": (True, True, "struct", 0.3, 1, True),
    "grpo": (False, False, "off", 0.3, 1, False),
    "anchoring": (True, True, "struct", 0.3, 1, False),
    "gating": (False, False, "off", 0.3, 1, True),
    "no_tool_reward": (True, True, "struct", 0.3, 0, True),
    "no_gamma": (True, True, "struct", 0, 1, True),
}


@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablation_differs_from_the_whole_in_what_it_says(name):
    cfg, whole = (config.load(RLConfig, REPO / "configs" / f"{n}_8b.yaml") for n in (name, "paragrpo"))
    reward = cfg.reward
    found = (cfg.rollout.think_prefix, reward.answer_suffix, reward.anchor.credit, reward.anchor.gamma, reward.w_tool)
    assert (*found, bool(cfg.gating)) == ABLATIONS[name]
    anchor = replace(reward.anchor, credit="struct", gamma=0.3)
    same = replace(
        cfg,
        run=whole.run,
        gating=whole.gating,
        rollout=replace(cfg.rollout, think_prefix=True),
        reward=replace(reward, answer_suffix=True, w_tool=1, anchor=anchor),
    )
    assert same == whole
