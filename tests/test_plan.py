"""The plan's numbers are the model's: parameters, KV bytes, and the activations that autograd really keeps; the seconds
of a step are those of paper and pencil."""

import dataclasses
import time
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch

from runtime.contract import Bundle, VisualContract
from runtime.plan import (
    GIB,
    Pace,
    PlanError,
    Step,
    block_bytes,
    kv_bytes_per_token,
    plan_engine,
    plan_step,
    plan_training,
    plan_updates,
    shapes,
    training_flops,
    training_seconds,
)
from runtime.policy import load
from runtime.settings import PolicyConfig

EIGHT = PolicyConfig("Qwen/Qwen3-VL-8B-Instruct")


def test_the_8b_shapes_are_the_published_ones_within_seconds():
    began = time.perf_counter()
    s = shapes(EIGHT)
    assert (s.parameters, s.frozen, s.layer) == (8_767_123_696, 576_388_336, 192_946_432)
    assert s.trained == 7_568_405_504 + 622_329_856 and s.root == 2 * 622_329_856 + 4096
    assert kv_bytes_per_token(s.text) == 147_456
    assert shapes(PolicyConfig(EIGHT.checkpoint, freeze=())).frozen == 0
    assert time.perf_counter() - began < 10


def test_the_paper_recipe_fits_a_node_and_a_lone_gpu_is_told_why_not():
    training = plan_training(EIGHT, 7, 16_384, visual_tokens=16_384, reference=True)
    training.check(80)
    assert 40 < training.gib < 75
    plan_engine(EIGHT, 1, rows=64, row_tokens=5000).check(80)
    assert "master weights" in training.table(80) and "of 80" in training.table(80)
    with pytest.raises(PlanError, match="more GPUs"):
        plan_training(EIGHT, 1, 8192).check(80)
    with pytest.raises(PlanError, match="fewer concurrent rollouts"):
        plan_engine(EIGHT, 1, rows=512, row_tokens=8192).check(80)
    with pytest.raises(PlanError, match="policy.activation_checkpointing = true"):
        plan_training(PolicyConfig(EIGHT.checkpoint, activation_checkpointing=False), 8, 16_384).check(80)


def test_knobs_move_the_sum_in_their_direction():
    base = plan_training(EIGHT, 8, 8192, 4096).gib
    assert plan_training(EIGHT, 4, 8192, 4096).gib > base > plan_training(EIGHT, 8, 4096, 2048).gib
    assert plan_training(PolicyConfig(EIGHT.checkpoint, freeze=()), 8, 8192, 4096).gib > base
    assert plan_training(PolicyConfig(EIGHT.checkpoint, logit_chunk=256), 8, 8192, 4096).gib < base
    assert plan_training(EIGHT, 8, 8192, 4096, reference=True).gib == pytest.approx(base + 2 * 8.19 / 8 * 1e9 * 1.05 / GIB, rel=1e-3)  # fmt: skip
    seconds = training_seconds(EIGHT, 7, 8 * 7 * 6000)
    assert seconds == pytest.approx(2 * training_seconds(EIGHT, 14, 8 * 7 * 6000)) and 1 < seconds < 60


def test_an_episode_that_fills_its_context_and_an_engine_in_the_trainer_are_planned_for():
    """Past bug: the plan was for train_tokens, which a single episode may exceed."""

    def plan(**changes):
        rollout = SimpleNamespace(
            **{"max_context": 16_384, "gpus": (7,), "urls": (), "max_batch_tokens": 1000} | changes
        )
        return plan_updates(SimpleNamespace(policy=EIGHT, train_tokens=8192, kl=0, rollout=rollout), 8).gib

    assert plan() == plan_training(EIGHT, 8, 16_384, 8192).gib > plan(max_context=4096)
    assert plan(gpus=()) - plan() == pytest.approx((2 * 8_767_123_696 + 1000 * 147_456) / GIB)
    assert plan(gpus=(), urls=("http://x",)) == plan()


def test_an_unknown_checkpoint_is_told_what_the_plan_needs(tmp_path):
    with pytest.raises(PlanError, match=r"config\.json"):
        plan_training(PolicyConfig(str(tmp_path)), 8, 8192)
    path = tiny.write(tmp_path / "model")
    policy = load(PolicyConfig(str(path)))
    assert shapes(PolicyConfig(str(path))).parameters == sum(p.numel() for p in policy.parameters())


def test_activations_are_what_autograd_keeps(tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 8}
    path = tiny.write(tmp_path / "model", text=sizes | {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5], "mrope_interleaved": True}})  # fmt: skip
    rng = np.random.default_rng(0)
    prompt, suffixes = rng.integers(2, 100, 600).tolist(), rng.integers(2, 100, (4, 100)).tolist()
    tokens = 1000
    for checkpointing in (False, True):
        policy = load(PolicyConfig(str(path), activation_checkpointing=checkpointing)).to(torch.bfloat16)
        weights = {p.untyped_storage().data_ptr() for p in policy.parameters()}
        kept, at_block = {}, []

        def keep(x, kept=kept, weights=weights):
            if x.untyped_storage().data_ptr() not in weights:
                kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
            return x

        def reached(*_, kept=kept, at_block=at_block):
            at_block.append(sum(storage.nbytes() for storage in kept.values()))

        for layer in policy.text.layers:
            layer.register_forward_pre_hook(reached)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            policy([Bundle(prompt, suffixes, [[1] * 100] * 4, [])])
        expected = 2 * 256 * tokens if checkpointing else tokens * block_bytes(policy.text.config)
        assert at_block[1] - at_block[0] == pytest.approx(expected, rel=0.01 if checkpointing else 0.15)


# ------------------------------------------------------------------------------------------------ a step of RL


def recipe(**changes):
    """2 tasks x 4 episodes of 10 frames x 64 tokens."""
    rollout = SimpleNamespace(dispatch="parallel", max_new_tokens=200, subagents=SimpleNamespace(train=False))
    base = {"policy": EIGHT, "visual": VisualContract(crop_max_frames=5), "gating": (8, 12), "rollout": rollout}
    return SimpleNamespace(**base | {"batch_tasks": 2, "group_size": 4, "kl": 0.01, "minibatches": 1} | changes)


PACE = Pace(
    decode_tokens_per_second=100, stream_tokens_per_second=10, prefill_tokens_per_second=1000, tool_seconds=3,
    sampled_tokens=50, rounds=1, calls=2, report_tokens=25, text_tokens=280, stamp_tokens=8, tflops=100, mfu=0.5,
    publish_gb_per_second=4,
)  # fmt: skip


def test_the_seconds_of_a_step_are_those_of_paper_and_pencil():
    """A frame has 64 + 8 tokens, a prompt 280 + 10 x 72 = 1000, a crop 5 x 72 = 360. 8 episodes sample 50 + 2 x 25."""
    step = plan_step(recipe(), trainers=1, engines=2, pace=PACE)
    read = 2 * 2 * 1000 + 8 * 2 * (360 + 25)  # both servers read both prompts
    assert step.rollout == pytest.approx(read / 2000 + 20 + 3)  # 800 / 200 s of decoding hide behind one long turn
    assert plan_step(recipe(), 1, 2, dataclasses.replace(PACE, stream_tokens_per_second=1e9)).rollout == pytest.approx(
        read / 2000 + 800 / 200 + 3
    )
    tokens = 2 * (1000 + 4 * 100)
    # 2 forward, 4 backward, 2 recomputed, 2 of the reference
    assert step.training == pytest.approx(training_flops(EIGHT, tokens, 10) / (100e12 * 0.5))
    assert step.publish == pytest.approx(2 * 8_767_123_696 / 4e9)
    assert step.seconds(0) == pytest.approx(step.rollout + step.training + step.publish)
    assert Step(5, 7, 1).seconds(1) == 8 and Step(7, 5, 1).seconds(1) == 8 and Step(5, 7, 1).seconds(0) == 13


def test_what_a_recipe_does_not_do_costs_nothing_and_what_it_does_costs():
    base = plan_step(recipe(), 1, 1, PACE)
    bare = recipe(rollout=SimpleNamespace(dispatch="none", max_new_tokens=200, subagents=SimpleNamespace(train=False)))
    assert plan_step(bare, 1, 1, PACE).rollout == pytest.approx(2 * 1000 / 1000 + 20)
    assert plan_step(recipe(kl=0), 1, 1, PACE).training == pytest.approx(0.8 * base.training)
    assert plan_step(recipe(minibatches=2), 1, 1, PACE).training == pytest.approx(1.2 * base.training)
    also = recipe(rollout=SimpleNamespace(dispatch="parallel", max_new_tokens=200, subagents=SimpleNamespace(train=True)))  # fmt: skip
    assert plan_step(also, 1, 1, PACE).training == pytest.approx(base.training * (1400 + 4 * 2 * 385) / 1400)
    # Two tasks on three trainers: one has none, and the others wait for nobody but take as long as with two.
    assert plan_step(recipe(), 3, 1, PACE).training == plan_step(recipe(), 2, 1, PACE).training == base.training / 2


def test_speeds_that_cannot_be_are_refused():
    for wrong in ({"mfu": 0.0}, {"tool_seconds": -1.0}, {"text_tokens": 0.0}):
        with pytest.raises(PlanError, match=f"{next(iter(wrong))} = .*must be positive"):
            Pace(**wrong)
    assert Pace(calls=0, rounds=0, tool_seconds=0)
