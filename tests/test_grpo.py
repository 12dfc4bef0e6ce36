"""Advantages and losses, computed by hand and checked against plain transformers."""

import math
from functools import partial

import numpy as np
import pytest
import tiny
import torch
from scripted import group_that_said
from tiny import noise

import grpo
from episode import Call, Group, Trajectory
from grpo import GRPOConfig, assign_advantages, group_advantage, token_losses
from rewards import Anchor, RewardConfig, structural_mask
from rl import RLConfig
from runtime.checkpoints import load_policy
from runtime.policy import PolicyConfig
from runtime.render import END_OF_TURN

TIDY = f"<think>\nA clip shows it.\n</think>\n<answer>red</answer>{END_OF_TURN}"
LOOSE = f"<think>\nA clip shows it.\nThe answer is red.{END_OF_TURN}"
BARE = f"The answer is red.{END_OF_TURN}"
WRONG = TIDY.replace("red", "blue")


def settings(credit: str = "struct", grpo: dict | None = None, **changes) -> RLConfig:
    reward = RewardConfig(w_fmt=0, w_tool=0, untagged_answer="stated", anchor=Anchor(credit=credit))
    grpo = GRPOConfig(**{"kl_coef": 0.0} | (grpo or {}))
    return RLConfig(run="run", policy=PolicyConfig(""), data=None, grpo=grpo, reward=reward, **changes)


def bundle_groups(groups, cfg, subagents=False):
    """Assign advantages and make bundles, in the order of rl.train."""
    assign_advantages(groups, cfg.grpo, cfg.reward.anchor)
    return grpo.bundle_groups(groups, cfg.grpo, subagents)


def rows_of(one: Group) -> list[Trajectory]:
    return [episode.main for episode in one.episodes]


def count_sampled(one: Group) -> int:
    return sum(row.n_sampled for row in rows_of(one))


# ------------------------------------------------------------------------------------------------ advantages


@pytest.mark.parametrize(
    "rewards, advantages",
    [
        ([1, 0, 0, 1, 1], np.array([0.4, -0.6, -0.6, 0.4, 0.4]) / math.sqrt(0.3)),  # the sample deviation
        ([0.1 + 0.2, 0.3, 0.3], [0, 0, 0]),  # past bug: they differ in the last bit, and dividing by 1e-17 blew that up
        ([0.7], [0]),
    ],
)
def test_advantages_are_centred_and_scaled_or_0_in_a_flat_group(rewards, advantages):
    assert group_advantage(rewards) == pytest.approx(np.array(advantages))


def test_selective_anchoring_moves_structural_tokens_only(toy_renderer):
    """All four answers are right, so R is flat and any advantage comes from the anchor."""
    cfg = settings()
    one = group_that_said(toy_renderer, cfg, [TIDY, LOOSE, BARE, TIDY])
    [bundle], _ = bundle_groups([one], cfg)
    assert bundle.rows == rows_of(one)
    for row, a in zip(bundle.rows, group_advantage([0.7, -0.3, 0.0, 0.7]), strict=True):
        assert all(row.mask)
        moved = toy_renderer.decode([t for t, weight in zip(row.ids, row.loss_weights, strict=True) if weight])
        structure = ("<think>", "</think>\n", "<answer>", "</answer>")
        tags = [tag for tag in structure if tag in toy_renderer.decode(row.ids)]
        assert moved == "".join(tags) + END_OF_TURN
        assert row.loss_weights[row.loss_weights != 0] == pytest.approx(0.5 * a)


def test_without_the_anchor_every_token_has_its_episodes_advantage(toy_renderer):
    cfg = settings("off")
    one = group_that_said(toy_renderer, cfg, [TIDY, WRONG, LOOSE.replace("red", "blue"), WRONG])
    one.episodes[3].error_kind = "EngineError"  # it is not compared and not trained on
    [bundle], _ = bundle_groups([one], cfg)
    for row, a in zip(bundle.rows, group_advantage([1, 0, 0]), strict=True):
        assert row.loss_weights == pytest.approx(np.full(len(row.ids), a, np.float32))
    bundles, _ = bundle_groups([group_that_said(toy_renderer, cfg, [TIDY, LOOSE])], cfg)
    assert not bundles  # both right: nothing to learn


def test_tokens_and_micro_batches_are_counted_over_all_ranks_flat_groups_included(toy_renderer, monkeypatch):
    cfg = settings("off")
    groups = [
        group_that_said(toy_renderer, cfg, turns, name) for name, turns in (("a", [TIDY, WRONG]), ("b", [TIDY] * 2))
    ]
    monkeypatch.setattr(grpo, "gather", lambda mine: [mine, 3])  # another rank has 3
    _, total_tokens = bundle_groups(groups, cfg)
    assert total_tokens == sum(map(count_sampled, groups)) + 3
    assert grpo.micro_batches([], 100) == [[], [], []]  # as many passes as the rank with the most


def test_batch_normalisation_is_over_all_episodes_of_all_ranks_and_spares_the_anchor(toy_renderer, monkeypatch):
    """Past bug: the std left out flat groups, so normalisation was a constant factor."""
    cfg = settings(grpo={"normalise": "batch", "kl_coef": 0.1})
    varied = group_that_said(toy_renderer, cfg, [TIDY, WRONG, LOOSE], "a")
    flat = group_that_said(toy_renderer, cfg, [TIDY] * 3, "b")
    own = group_advantage([1, 0, 1])
    # Another rank has two episodes, and no tokens.
    monkeypatch.setattr(grpo, "gather", lambda mine: [mine, [4.0, -4.0] if isinstance(mine, list) else 0])
    bundles, _ = bundle_groups([varied, flat], cfg)
    assert [e.advantage for e in varied.episodes] == pytest.approx(own / np.std([*own, 0, 0, 0, 4, -4]))
    assert [e.anchor_advantage for e in varied.episodes] == pytest.approx(group_advantage([0.7, 0.7, -0.3]))
    assert bundles[1].rows == rows_of(flat)  # with a KL, a flat group still trains
    assert not any(row.loss_weights.any() for row in bundles[1].rows)


def test_sub_agents_share_the_advantage_and_not_the_anchors(toy_renderer):
    cfg = settings()
    one = group_that_said(toy_renderer, cfg, [TIDY, BARE.replace("red", "blue")])
    [reporter] = rows_of(group_that_said(toy_renderer, cfg, [TIDY], prompt=(50, 51)))  # its tags are not structural
    one.episodes[0].calls = [Call(0, "crop_video", {}, subagent=reporter)]
    bundles, total_tokens = bundle_groups([one], cfg, subagents=True)
    assert [bundle.rows for bundle in bundles] == [rows_of(one), [reporter]]
    assert reporter.loss_weights == pytest.approx(np.full(len(reporter.ids), one.episodes[0].advantage))
    assert one.episodes[0].anchor_advantage > 0
    assert total_tokens == count_sampled(one) + reporter.n_sampled  # the mean includes its tokens
    bundles, total_tokens = bundle_groups([one], cfg)
    assert [bundle.rows for bundle in bundles] == [rows_of(one)] and total_tokens == count_sampled(one)


# ------------------------------------------------------------------------------------------------ the loss


def test_the_loss_of_a_token_is_the_formula():
    cfg = settings(grpo={"clip_eps": 0.2, "kl_coef": 0.1})
    log = torch.tensor
    new = log([-1.0, -1.0, -1.0, -1.0, -1.0])
    prox = log([-1.0, -1.5, -1.5, -0.5, -1.0])  # ratios 1, 1.65, 1.65, 0.61, 1
    old = log([-1.2, -1.5, -1.5, -0.5, -3.0])  # w = 1.22, 1, 1, 1, 7.4 (over the cap)
    advantages, reference = log([2.0, 1.0, -1.0, -1.0, 1.0]), log([-1.0, -1.0, -1.5, -1.0, -1.0])
    losses, stats = token_losses(new, prox, old, reference, advantages, cfg.grpo)
    k3 = math.exp(-0.5) + 0.5 - 1
    by_hand = [-math.exp(0.2) * 2, -1.2, math.exp(0.5) * (1 + 0.1 * k3), 0.8, 0.0]
    assert losses.tolist() == pytest.approx(by_hand, rel=1e-5)
    assert stats["over_cap_fraction"].tolist() == [0, 0, 0, 0, 1]
    assert stats["kl"].tolist() == pytest.approx([0, 0, math.exp(0.5) * k3, 0, 0], abs=1e-6)
    assert stats["logprob_gap"].tolist() == pytest.approx([0.2, 0, 0, 0, 2.0])


def test_the_kl_term_has_the_value_and_gradient_of_the_kl_to_the_reference():
    """Sum over a small vocabulary, weighted by pi_behaviour. Past bug: the KL term lacked the weight w * r, so it was not the
    KL of the policy in training, and a token that this policy had nearly dropped had a gradient of -600."""
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    behaviour, prox, reference = torch.randn(3, 6, dtype=torch.float64).log_softmax(-1)
    cfg = settings(grpo={"kl_coef": 1.0, "behaviour_cap": 1e9}).grpo
    logprobs = logits.log_softmax(-1)
    losses, stats = token_losses(logprobs, prox, behaviour, reference, torch.zeros(6), cfg)
    expected = (logprobs.exp() * (logprobs - reference)).sum()  # KL(pi || pi_ref)
    assert (behaviour.exp() * losses).sum().item() == pytest.approx(expected.item(), rel=1e-12)
    assert (behaviour.exp() * stats["kl"]).sum().item() == pytest.approx(expected.item(), rel=1e-12)
    (found,) = torch.autograd.grad((behaviour.exp() * losses).sum(), logits)
    (wanted,) = torch.autograd.grad((logits.log_softmax(-1).exp() * (logits.log_softmax(-1) - reference)).sum(), logits)
    assert found.tolist() == pytest.approx(wanted.tolist(), rel=1e-9)


def test_a_token_that_could_not_be_sampled_leaves_the_gradient_alone():
    """Past bug: the backward pass computed 0 * inf for a token over the cap."""
    new = torch.tensor([-1.0, -2.0], requires_grad=True)
    old, advantages = torch.tensor([[-200.0, -2.0], [1.0, 1.0]])
    losses, stats = token_losses(new, new.detach(), old, None, advantages, settings().grpo)
    losses.sum().backward()
    assert new.grad.tolist() == [0, -1]
    assert stats["over_cap_fraction"].tolist() == [1, 0]


@pytest.mark.parametrize("budget, passes, kl_coef", [(32, 5, 0.2), (10_000, 1, 0.2), (10_000, 1, 0.0)])
def test_an_update_has_the_loss_and_gradient_of_plain_transformers(toy_renderer, toy_dir, budget, passes, kl_coef):
    """Compute them row by row, at the sampling temperature, without banned ids, and with another policy as the reference. The token
    budget splits groups but changes nothing. Without a KL, the flat group is skipped: its tokens are in the loss's mean only."""
    cfg = settings(grpo={"train_tokens": budget, "kl_coef": kl_coef})
    frames, pad = noise(2, width=32, height=32), toy_renderer.image_pad
    prompts = {"a": (40, pad, 41, pad, 42), "b": (40, pad, 41, pad, 43)}
    groups = [
        group_that_said(toy_renderer, cfg, [TIDY, WRONG, LOOSE], name, prompt) for name, prompt in prompts.items()
    ]
    flat = group_that_said(toy_renderer, cfg, [TIDY, TIDY], "flat")
    weights = PolicyConfig(str(toy_dir / "model"), freeze=())
    policy, reference = (load_policy(weights, toy_renderer.never_sampled) for _ in range(2))
    plain, other = (tiny.plain(toy_dir / "model") for _ in range(2))
    with torch.no_grad():
        for p in (*reference.parameters(), *other.parameters()):
            p.mul_(1.2)

    def of_sampled(read, model, main):
        """Return what tiny.plain_... says of the tokens, which were all sampled: [N, ...]."""
        return read(model, toy_renderer.never_sampled, main.all_ids, main.clips, 0.7)[len(main.prompt.ids) - 1 :]

    logprobs_of = partial(of_sampled, tiny.plain_logprobs)

    # The engine is a little off, and once far off.
    for one in groups:
        one.episodes[0].main.prompt.clips.append(frames)  # all its episodes have this prompt
    for main in [main for one in (flat, *groups) for main in rows_of(one)]:
        assert all(main.mask)
        with torch.no_grad():
            found = logprobs_of(plain, main)
        main.logprobs = (found + 0.5 * torch.arange(len(found)).sin()).tolist()
    main.logprobs[-3] -= 9
    bundles, total_tokens = bundle_groups([*groups, flat], cfg)
    parts = grpo.micro_batches(bundles, budget)
    assert len(parts) == passes
    assert all(sum(map(len, part)) <= budget for part in parts)
    measured = grpo.accumulate(policy, reference if kl_coef else None, bundles, total_tokens, 0.7, cfg.grpo)

    # By hand: r = 1, w = pi / pi_behaviour <= 5, the KL, and the mean over all tokens.
    found = {name: [] for name in ("loss", "kl", "logprob_gap", "entropy", "over_cap_fraction")}
    for one in [*groups, flat] if kl_coef else groups:
        own = group_advantage([e.rewards["R"] for e in one.episodes])
        tags = group_advantage([e.rewards["R_anchor"] for e in one.episodes])
        for main, a, t in zip(rows_of(one), own, tags, strict=True):
            new, old = logprobs_of(plain, main), torch.tensor(main.logprobs)
            with torch.no_grad():
                ref, log = logprobs_of(other, main), of_sampled(tiny.plain_distributions, plain, main)[:-1]
            w = (new.detach() - old).exp()
            weight = torch.where(w <= cfg.grpo.behaviour_cap, w, 0.0) * (new - new.detach()).exp()
            kl = weight * ((ref - new).exp() - (ref - new) - 1)
            struct = torch.tensor(structural_mask(main, toy_renderer))
            found["loss"].append(kl_coef * kl - weight * (a + 0.5 * t * struct))
            found["kl"].append(kl)
            found["logprob_gap"].append((new - old).abs())
            found["entropy"].append(-(log.exp() * log).sum(-1))
            found["over_cap_fraction"].append((w > cfg.grpo.behaviour_cap).float())
    found = {name: torch.cat(values) for name, values in found.items()}
    (found["loss"].sum() / total_tokens).backward()
    expected = {name: values.mean().item() for name, values in found.items()}
    expected |= {"loss": found["loss"].sum().item() / total_tokens, "learned_tokens": len(found["loss"])}
    expected["logprob_gap_max"] = found["logprob_gap"].max().item()
    if not kl_coef:
        del expected["kl"]
    assert total_tokens == sum(map(count_sampled, [*groups, flat]))
    assert measured == pytest.approx(expected, rel=1e-4)  # past mutant: divided by the tokens again
    tiny.assert_close(tiny.gradients(policy.model), tiny.gradients(plain), 1e-3)


def test_an_update_without_a_row_has_no_tokens_and_nan_is_never_hidden(toy_renderer, toy_dir):
    """Past bug: one token of nothing."""
    cfg = settings()
    policy = load_policy(PolicyConfig(str(toy_dir / "model")), toy_renderer.never_sampled)
    assert grpo.accumulate(policy, None, [], 10, 1.0, cfg.grpo)["learned_tokens"] == 0
    bundles, total_tokens = bundle_groups([group_that_said(toy_renderer, cfg, [TIDY, WRONG])], cfg)
    bundles[0].rows[0].logprobs[3] = math.nan
    broken = grpo.accumulate(policy, None, bundles, total_tokens, 1.0, cfg.grpo)
    assert math.isnan(broken["logprob_gap"])
    assert math.isnan(broken["logprob_gap_max"])
