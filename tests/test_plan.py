"""The memory plan equals the model's real parameters, and the activations that autograd really keeps. It warns if a run may
not fit, and refuses a run that cannot."""

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from scripts import GONE, REPO

from grpo import GRPOConfig
from rl import RLConfig, plan_rl
from rollout import RolloutConfig
from runtime import config
from runtime.checkpoints import load_policy
from runtime.config import ConfigError
from runtime.plan import GIB, PUBLISHED, Plan, PlanConfig, count, meta_policy, plan_training
from runtime.policy import PolicyConfig
from runtime.run import RunConfig, require_memory
from runtime.visual import VisualContract

EIGHT = PolicyConfig("Qwen/Qwen3-VL-8B-Instruct")


def load(name: str, *overrides: str) -> RunConfig:
    """Load a config of configs/ by its name."""
    cls = pytest.importorskip("sft").SFTConfig if "sft" in name else RLConfig
    return config.load(cls, REPO / "configs" / f"{name}.yaml", overrides)


def plans_of(cfg: RunConfig) -> list[Plan]:
    if not isinstance(cfg, RLConfig):  # SFT
        return [plan_training(cfg.policy, cfg.plan.gpus, cfg.pack_tokens)]
    return plan_rl(cfg, cfg.plan.gpus)


PAGE = (REPO / "docs" / "node.md").read_text("utf-8")
MEMORY = re.search(r"^\| config \| GPUs that train .*?\n\n", PAGE, re.M | re.S)[0].splitlines()[2:-1]
MEMORY = [row for row in MEMORY if not GONE.search(row)]


@pytest.mark.parametrize("row", MEMORY, ids=lambda row: row.split("`")[1])
def test_the_memory_of_node_md_is_the_plans(row):
    """Its cells: config, GPUs that train, GiB of each, GPUs that sample, GiB of each."""
    names, *cells = row.strip("|").split("|")
    for name in re.findall(r"\w+", names):
        cfg = load(name)
        training, *engine = plans_of(cfg)
        numbers = [f"{cfg.plan.gpus}", f"{training.total_gib:.1f}"]
        for plan in engine:
            numbers += [f"{len(cfg.rollout.server_gpus)}", f"{plan.total_gib:.1f}"]
        assert re.findall(r"[\d.]+", "|".join(cells[:4])) == numbers


def test_every_real_training_fits_its_gpus_and_needs_no_download_to_know_it():
    needed = {"mwxely/ParaVT-8B-SFT"}  # in docs/node.md
    for path in (REPO / "configs").glob("[!t]*.yaml"):  # without the toys
        if GONE.search(path.stem):
            continue
        cfg = load(path.stem)
        assert all(20 < plan.total_gib < 80 for plan in plans_of(cfg)), path
        needed.add(cfg.policy.family or cfg.policy.checkpoint)
    assert PUBLISHED.keys() == needed


@pytest.mark.parametrize("name, weights, trained", [
    ("Qwen/Qwen3-VL-8B-Instruct", 8_767_123_696, 7_568_405_504 + 622_329_856),
    ("Qwen/Qwen2.5-VL-7B-Instruct", 8_292_166_656, 7_615_616_512),
])  # fmt: skip
def test_the_shapes_are_the_published_ones(name, weights, trained):
    policy = meta_policy(PolicyConfig(name))
    assert count(policy) == weights and count(policy, trained=True) == trained
    assert count(meta_policy(PolicyConfig(name, freeze=())), trained=True) == weights


def test_the_sums_are_what_the_real_update_holds():
    """The figures are GiB of live tensors at the peak of a real update, counted on meta tensors."""
    for name, gib in (("paragrpo_8b", 53.4), ("sft_8b", 29.9), ("sft_2b_1gpu", 32.2), ("paragrpo_2b_1gpu", 38.0)):
        if GONE.search(name):
            continue
        urls = [] if name.startswith("sft") else ["rollout.server_gpus=[]", "rollout.urls=[http://x]"]
        [plan] = plans_of(load(name, *urls))
        uses = plan.held | plan.used
        overhead = uses.pop("overhead: CUDA, NCCL, kernels, and 5 % between tensors")
        assert sum(uses.values()) / GIB == pytest.approx(gib, rel=0.03)
        assert 5 < overhead / GIB < 7


def test_what_may_not_fit_is_warned_of_and_what_cannot_is_refused(monkeypatch, capsys):
    """The card's memory decides: an "80 GB" H100 has 79.6 GiB, and a shared one can have half of it."""
    plan = plan_training(EIGHT, 8, 8192)
    for gpu_gib, warns in ((80, False), (17, True)):
        plan.show(gpu_gib)
        told = capsys.readouterr().out
        assert f"GiB of {gpu_gib}" in told and ("WARNING" in told) is warns
    with pytest.raises(ConfigError, match="12.* GiB, .* 80 GiB"):
        plan_training(EIGHT, 1, 8192).require_room(80)  # 16 bytes for each of 8.2e9 trained weights
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(total_memory=int(10.5 * GIB)))
    with pytest.raises(ConfigError, match="10.5 GiB"):
        require_memory(PlanConfig(), [plan])


def rl_plans(**changes):
    rollout = RolloutConfig(**{"max_context": 16_384, "max_batch_tokens": 1000} | changes)
    sizes = {"plan": PlanConfig(4), "batch_tasks": 8, "grpo": GRPOConfig(train_tokens=8192, kl_coef=0)}
    visual = VisualContract(max_frame_pixels=602_112)
    return plans_of(replace(load("paragrpo_8b"), policy=EIGHT, visual=visual, rollout=rollout, **sizes))


def test_a_full_context_and_an_engine_in_the_trainer_are_planned_for():
    """Past bug: the plan assumed train_tokens, but a single episode can be longer."""
    [beside] = rl_plans(urls=("http://x",))
    [shorter] = rl_plans(urls=("http://x",), max_context=4096)
    [within] = rl_plans()
    assert beside.total_gib == plan_training(EIGHT, 4, 16_384).total_gib > shorter.total_gib
    assert within.total_gib - beside.total_gib == pytest.approx((2 * 8_767_123_696 + 1000 * 2 * 147_456) / GIB)


def test_the_engine_is_given_room_for_the_frames_that_the_contract_shows_to_its_nodes_episodes(monkeypatch):
    """Past bugs: it counted 80 tokens per frame under every contract, and a node's servers got the episodes of all nodes."""
    four, tokens = (4, 5, 6, 7), 64 * (576 + 10) // 8 + 2 * 2048  # of an episode
    whole = 2 * 8_767_123_696  # bytes of the weights
    for gpus, changes, ranks, rows, share in [
        (four, {}, 4, 16, 1),
        # Two servers of two GPUs each: a GPU holds half the weights, and half the keys and values of twice as many episodes.
        (four, {"tensor_parallel": 2}, 4, 32, 2),
        (four, {}, 2, 8, 1),  # one of two nodes
        ((4,), {"concurrency": 10}, 4, 40, 1),
    ]:
        monkeypatch.setattr("rl.world_size", lambda: 4)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        training, engine = rl_plans(server_gpus=gpus, **changes)
        assert engine.held == {"weights of the engine, bf16": whole / share}
        assert engine.used[f"KV cache of {rows * tokens} tokens"] == 147_456 * rows * tokens / share
    [both] = rl_plans(server_gpus=(3,), concurrency=10)
    assert both.total_gib == pytest.approx(training.total_gib + engine.total_gib)


def test_an_unknown_checkpoint_is_told_what_the_plan_needs(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json"):
        plan_training(PolicyConfig(str(tmp_path)), 8, 8192)
    # For another model of the hub, the plan does not use the family that an inherited config names.
    with pytest.raises(FileNotFoundError, match="Qwen/Qwen3-VL-64B-Instruct"):
        plan_training(PolicyConfig("Qwen/Qwen3-VL-64B-Instruct", family=EIGHT.checkpoint), 8, 8192)
    trained_later = PolicyConfig("runs/sft_8b/model", family=EIGHT.checkpoint)
    assert plan_training(trained_later, 8, 8192).total_gib == plan_training(EIGHT, 8, 8192).total_gib
    path = tiny.write(tmp_path / "model")
    assert count(meta_policy(PolicyConfig(str(path)))) == count(load_policy(PolicyConfig(str(path))))


@pytest.mark.parametrize("model_type, own", [("qwen3_vl", {"mrope_interleaved": True}), ("qwen2_5_vl", {})])
def test_activations_are_what_autograd_keeps(tmp_path, model_type, own):
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]} | own
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 8}
    path = tiny.write(tmp_path / "model", text=sizes | {"head_dim": 32, "rope_parameters": rope}, model_type=model_type)
    rng = np.random.default_rng(0)
    bundle = tiny.text_bundle(rng.integers(2, 100, 120).tolist(), *rng.integers(2, 100, (4, 20)).tolist())
    tokens = 200
    for checkpointing in (False, True):
        cfg = PolicyConfig(str(path), activation_checkpointing=checkpointing)
        policy = load_policy(cfg).to(torch.bfloat16)
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
            policy([bundle])
        [planned] = [size for use, size in plan_training(cfg, 1, tokens).used.items() if "of 2 blocks" in use]
        assert at_block[1] - at_block[0] == pytest.approx(planned / 2, rel=0.01 if checkpointing else 0.15)
