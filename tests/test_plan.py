"""The plan's numbers are the model's: parameters, KV bytes, and the activations that autograd really keeps."""

import time

import numpy as np
import pytest
import tiny
import torch

from data import Bundle
from plan import (
    GIB,
    PlanError,
    block_bytes,
    kv_bytes_per_token,
    plan_engine,
    plan_training,
    shapes,
    training_seconds,
)
from policy import PolicyConfig, load

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
    training = plan_training(EIGHT, 7, 16_384, visual_tokens=4096, kept_visual_tokens=8 * 4096, reference=True)
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
    assert plan_training(EIGHT, 8, 8192, 4096, reference=True).gib == pytest.approx(base + (2 * 8.19 / 8 + 2 * 0.576) * 1e9 * 1.05 / GIB, rel=1e-3)  # fmt: skip
    seconds = training_seconds(EIGHT, 7, 8 * 7 * 6000)
    assert seconds == pytest.approx(2 * training_seconds(EIGHT, 14, 8 * 7 * 6000)) and 1 < seconds < 60


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
