"""The plan's numbers are the model's: parameters, KV bytes, and the activations that autograd really keeps. It warns where a
run may not fit, and refuses where it cannot."""

from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch

from runtime.contract import Bundle, VisualContract
from runtime.plan import (
    GIB,
    PlanError,
    block_bytes,
    check_disk,
    engine_load,
    kv_bytes_per_token,
    plan_engine,
    plan_training,
    plan_updates,
    shapes,
)
from runtime.policy import PolicyConfig, load

EIGHT = PolicyConfig("Qwen/Qwen3-VL-8B-Instruct")


def test_the_8b_shapes_are_the_published_ones():
    s = shapes(EIGHT)
    assert (s.parameters, s.frozen, s.layer) == (8_767_123_696, 576_388_336, 192_946_432)
    assert s.trained == 7_568_405_504 + 622_329_856 and s.root == 2 * 622_329_856 + 4096
    assert kv_bytes_per_token(s.text) == 147_456
    assert shapes(PolicyConfig(EIGHT.checkpoint, freeze=())).frozen == 0


def test_the_engine_is_given_room_for_the_frames_that_the_contract_shows():
    """It counted 80 tokens a frame under every contract."""
    rollout = SimpleNamespace(concurrency=256, max_new_tokens=2048)
    for visual, tokens in ((VisualContract(), 66), (VisualContract(max_frame_pixels=602_112), 576)):
        cfg = SimpleNamespace(rollout=rollout, gpus=4, batch_tasks=8, group_size=8, visual=visual)
        assert engine_load(cfg) == (64, 64 * (tokens + 10) // 8 + 2 * 2048)
    rollout.concurrency = 10  # of each rank
    assert engine_load(cfg)[0] == 40


@pytest.mark.parametrize(
    "plan, knob",
    [
        (plan_training(EIGHT, 2, 24_576, 16_384, reference=True), "more GPUs"),
        (plan_engine(EIGHT, 1, rows=512, row_tokens=8192), "fewer concurrent rollouts"),
        (
            plan_training(PolicyConfig(EIGHT.checkpoint, activation_checkpointing=False), 8, 16_384),
            "policy.activation_checkpointing = true",
        ),
    ],
)
def test_a_run_that_may_not_fit_is_warned_with_the_knob_and_not_refused(plan, knob):
    plan.check(80)
    last = plan.table(80).splitlines()[-1]
    assert "WARNING" in last and knob in last and "GiB" in last


def test_a_run_that_cannot_fit_is_refused():
    """Weights and AdamW's state alone take 16 bytes for each of 8.2e9 trained weights."""
    with pytest.raises(PlanError, match="weights and optimizer state, 12.* GiB, do not fit into 80 GiB.*more GPUs"):
        plan_training(EIGHT, 1, 8192).check(80)
    with pytest.raises(PlanError, match="do not fit into 12 GiB.*a smaller model"):
        plan_engine(EIGHT, 1, rows=1, row_tokens=1000).check(12)


def test_the_card_says_how_much_memory_it_has(monkeypatch):
    """An "80 GB" H100 has 79.6 GiB, a borrowed card may have half of it: the device counts, not the config."""
    plan = plan_training(EIGHT, 8, 8192, 4096)
    plan.check(80)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr(
        "torch.cuda.get_device_properties", lambda _: SimpleNamespace(total_memory=int(10.5 * GIB), name="small")
    )
    assert "GiB of 10.5" in plan.table(80) and "WARNING" in plan.table(80)
    with pytest.raises(PlanError, match="do not fit into 10.5 GiB"):
        plan.check(80)


def test_knobs_move_the_sum_in_their_direction():
    base = plan_training(EIGHT, 8, 8192, 4096).gib
    assert plan_training(EIGHT, 4, 8192, 4096).gib > base > plan_training(EIGHT, 8, 4096, 2048).gib
    assert plan_training(PolicyConfig(EIGHT.checkpoint, freeze=()), 8, 8192, 4096).gib > base
    assert plan_training(PolicyConfig(EIGHT.checkpoint, logit_chunk=4096), 8, 8192, 4096).gib > base


def test_the_sums_are_those_of_an_independent_count():
    """Counted by hand from the sources, for GPUs that nobody has measured: GiB before the overhead. Past bug: the plan
    added up moments that never coincide, and said 66, 70 and 41."""
    for gpus, tokens, visual, reference, gib in (
        (4, 24_576, 16_384, True, 57.8),
        (3, 16_384, 8192, True, 64),
        (8, 16_384, 16_384, False, 34),
    ):
        rows = plan_training(EIGHT, gpus, tokens, visual, reference=reference).rows
        *counted, overhead = rows
        assert "overhead" in overhead.what and 4 < overhead.bytes / GIB < 7
        assert sum(row.bytes for row in counted) / GIB == pytest.approx(gib, rel=0.03)


def test_an_episode_that_fills_its_context_and_an_engine_in_the_trainer_are_planned_for():
    """Past bug: the plan was for train_tokens, which a single episode may exceed."""

    def plan(**changes):
        rollout = {"max_context": 16_384, "gpus": (7,), "urls": (), "max_batch_tokens": 1000} | changes
        cfg = SimpleNamespace(policy=EIGHT, train_tokens=8192, kl_coef=0, rollout=SimpleNamespace(**rollout))
        return plan_updates(cfg, 8).gib

    assert plan() == plan_training(EIGHT, 8, 16_384, 8192).gib > plan(max_context=4096)
    reading = 3 * 2 * 12_288 + 2 * 4 * 4096  # bytes of a token
    assert plan(gpus=()) - plan() == pytest.approx((2 * 8_767_123_696 + 1000 * (147_456 + reading)) / GIB)
    assert plan(gpus=(), urls=("http://x",)) == plan()


def test_an_unknown_checkpoint_is_told_what_the_plan_needs(tmp_path):
    with pytest.raises(PlanError, match=r"config\.json"):
        plan_training(PolicyConfig(str(tmp_path)), 8, 8192)
    # Another model of the hub is not planned as the family that an inherited config names.
    with pytest.raises(FileNotFoundError, match="Qwen/Qwen3-VL-32B-Instruct: neither a folder nor a model on the hub"):
        plan_training(PolicyConfig("Qwen/Qwen3-VL-32B-Instruct", family=EIGHT.checkpoint), 8, 8192)
    trained_later = PolicyConfig("runs/sft_8b/model", family=EIGHT.checkpoint)
    assert plan_training(trained_later, 8, 8192).gib == plan_training(EIGHT, 8, 8192).gib
    path = tiny.write(tmp_path / "model")
    policy = load(PolicyConfig(str(path)))
    assert shapes(PolicyConfig(str(path))).parameters == sum(p.numel() for p in policy.parameters())


def test_a_run_counts_the_states_that_are_there_as_room(tmp_path, monkeypatch):
    """8.19e9 weights of 12 bytes are 91.5 GiB a state; the model, 8.77e9 of 2 bytes, 16.3."""
    monkeypatch.setattr("runtime.plan.shutil.disk_usage", lambda folder: SimpleNamespace(free=74 * GIB))
    with pytest.raises(PlanError, match=r"3 training states take 274.6 GiB, the model 16.3; 74.0 free at .*`keep`"):
        check_disk(EIGHT, 2, str(tmp_path / "run"))
    for step in (1, 2, 3):
        state = tmp_path / "run" / "state" / f"step-{step:08d}"
        state.mkdir(parents=True)
        with open(state / "shard", "wb") as shard:
            shard.truncate(73 * GIB)  # a hole, which takes no room
    assert check_disk(EIGHT, 2, str(tmp_path / "run")).endswith(f"74.0 free at {tmp_path / 'run'}")


def test_activations_are_what_autograd_keeps(tmp_path):
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 8}
    path = tiny.write(tmp_path / "model", text=sizes | {"head_dim": 32, "rope_parameters": rope})
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
