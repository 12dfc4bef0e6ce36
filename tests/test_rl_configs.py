"""rl.py: what the configs say, which of them fit their GPUs, and which are refused."""

import contextlib
from dataclasses import asdict
from pathlib import Path

import pytest
from scripts import REPO, rl_config

import rl
import sft
from rl import RLConfig
from runtime import config
from runtime.config import differences
from runtime.engine import EngineConfig
from runtime.open_engine import server_flags


def test_a_run_whose_servers_do_not_answer_is_refused_before_it_loads_a_model(toy_dir, tmp_path):
    path = rl_config(tmp_path / "c.yaml", toy_dir, rollout={"urls": ["http://127.0.0.1:9"]})
    with pytest.raises(config.ConfigError, match="no server answers at http://127.0.0.1:9"):
        rl.main(config.load(RLConfig, path))


def dry_run(name: str, toy_dir: Path, *overrides: str) -> None:
    """Try out a config of configs/ whose data exist. Of RL, the cold start does not."""
    cls, main, rows = (sft.SFTConfig, sft.main, "sft") if name.startswith("sft") else (RLConfig, rl.main, "rl")
    data = [f"data.sources=[{{path: {toy_dir}/{rows}.parquet}}]", f"data.video_root={toy_dir}"]
    main(config.load(cls, REPO / "configs" / f"{name}.yaml", [*data, *overrides]), dry=True)


@pytest.mark.parametrize("name", [path.stem for path in sorted((REPO / "configs").glob("*_[28]b*.yaml"))])
def test_every_config_of_a_real_model_fits_its_gpus(name, toy_dir, capsys):
    missing = pytest.raises(config.ConfigError, match="^runs/sft_.*/model: neither a folder nor a model on the hub")
    with contextlib.nullcontext() if name.startswith("sft") else missing:
        dry_run(name, toy_dir)
    told = capsys.readouterr().out
    used = [float(line.split()[1]) for line in told.splitlines() if line.split()[:1] == ["sum"]]
    assert "data: " in told and used and all(20 < gib < 80 for gib in used)
    # Past bug: it said "ok" to any name that looks like one on the hub.
    assert ("Qwen3-VL-8B-Instruct was not looked up" in told) is (name == "sft_8b")


def test_a_gpu_that_trains_and_samples_must_hold_both(toy_dir, capsys):
    with pytest.raises(config.ConfigError, match="training and engine on one GPU: .* 20 GiB"):
        dry_run("paragrpo_2b_1gpu", toy_dir, "plan.gpu_gib=20")
    told = capsys.readouterr().out
    assert "KV cache" in told and told.count("sum") == 1


@pytest.mark.parametrize("capability, size, more", [
    (None, 1, set()),
    ((9, 0), 2, {"--attention-backend=fa3"}),
    ((10, 0), 2, set()),  # with fa3, a server fails an assertion on newer GPUs
    ((8, 0), 2, set()),
])  # fmt: skip
def test_all_servers_get_the_same_flags_and_those_of_the_config_after_them(monkeypatch, capability, size, more):
    """Past bug: only RL's configs chose SGLang's well-tested paths, so an evaluation's servers had bf16 logits."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: capability is not None)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda gpu: capability)
    cfg = EngineConfig(server_gpus=(4, 5), tensor_parallel=size, server_args=("--a=1",), max_context=24_576)
    *ours, theirs, of_size = server_flags(cfg)
    assert (theirs, of_size) == ("--a=1", f"--tp-size={size}")
    same = {
        "--context-length=24592", f"--max-running-requests={64 * size}", "--enable-fp32-lm-head",
        "--mm-feature-transport=cpu", "--prefill-decode-interval=0", "--schedule-policy=lpm",
    }  # fmt: skip
    assert {*ours} == same | more


NO_ANCHORING = {
    "rollout.think_prefix: True, now False",
    "reward.answer_suffix: True, now False",
    "reward.anchor.credit: 'struct', now 'off'",
}

NO_GATING = {"gating: (4, 8, 16, 32, 64), now ()"}

ABLATIONS = {
    "grpo": NO_ANCHORING | NO_GATING,
    "anchoring": NO_GATING,
    "gating": NO_ANCHORING,
    "no_tool_reward": {"reward.w_tool: 1.0, now 0.0"},
    "no_gamma": {"reward.anchor.gamma: 0.3, now 0.0"},
}


@pytest.mark.parametrize("name, model", [*[(name, "8b") for name in ABLATIONS], ("grpo", "qwen25vl_7b")])
def test_an_ablation_differs_from_the_whole_in_what_it_says(name, model):
    cfg, whole = (asdict(config.load(RLConfig, REPO / "configs" / f"{n}_{model}.yaml")) for n in (name, "paragrpo"))
    assert set(differences(whole, cfg | {"run": whole["run"]}).values()) == ABLATIONS[name]


def test_a_rank_starts_no_more_decoders_than_it_has_cores(monkeypatch):
    cfg = config.load(RLConfig, REPO / "configs" / "paragrpo_8b.yaml")
    for cores, ranks, workers in ((128, 4, 12), (16, 4, 4), (2, 4, 1), (None, 1, 1)):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert cfg.workers == workers
