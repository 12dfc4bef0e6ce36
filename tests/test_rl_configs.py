"""rl.py: what the configs say, which of them fit their GPUs, and which are refused."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from scripts import REPO, rl_config
from short_runs import try_out

import rl
import sft
from rl import RLConfig
from runtime import config
from runtime.config import differences
from runtime.engine import EngineConfig
from runtime.open_engine import server_flags
from runtime.plan import PlanConfig


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"rollout": {"subagents": {"train": True}}}, "needs rollout.subagents.temperature = 0.7"),
        ({"gating": [0, 4]}, "an overview has at least 1 frame"),
        ({"gating": [], "visual": {"overview_frames": 0}}, "an overview has at least 1 frame"),
        ({"rollout": {"server_gpus": None}}, "rollout.server_gpus = null: only for an evaluation"),
        ({"rollout": {"concurrency": None}}, "rollout.concurrency = null: only for an evaluation"),
        ({"rollout": {"think_prefix": None}}, "rollout.think_prefix = null: only for an evaluation"),
        ({"grpo": {"group_size": 1}}, "grpo: group_size = 1: an advantage compares at least 2"),
    ],
)
def test_what_cannot_run_says_so(toy_dir, tmp_path, changes, says):
    path = rl_config(tmp_path / "c.yaml", toy_dir, **({"rollout": {}} | changes))
    with pytest.raises(config.ConfigError, match=says):
        config.load(RLConfig, path)


def test_a_run_whose_servers_do_not_answer_is_refused_before_it_loads_a_model(toy_dir, tmp_path):
    path = rl_config(tmp_path / "c.yaml", toy_dir, rollout={"urls": ["http://127.0.0.1:9"]})
    with pytest.raises(config.ConfigError, match="no server answers at http://127.0.0.1:9"):
        rl.main(config.load(RLConfig, path))


def on_node(name: str, toy_dir: Path) -> RLConfig:
    """Load a config of configs/ whose data exist, but whose cold start does not."""
    data = [f"data.sources=[{{path: {toy_dir}/rl.parquet}}]", f"data.video_root={toy_dir}"]
    return config.load(RLConfig, REPO / "configs" / name, data)


@pytest.mark.parametrize("path", sorted((REPO / "configs").glob("*_[28]b*.yaml")), ids=lambda path: path.stem)
def test_every_config_of_a_real_model_fits_its_gpus(path, toy_dir, capsys):
    if path.stem.startswith("sft"):
        data = [f"data.sources=[{{path: {toy_dir}/sft.parquet}}]", f"data.video_root={toy_dir}"]
        cfg = config.load(sft.SFTConfig, path, data)
        sft.main(cfg, dry=True)
    else:
        cfg = on_node(path.name, toy_dir)
        with pytest.raises(
            config.ConfigError, match=f"^{cfg.policy.checkpoint}: neither a folder nor a model on the hub"
        ):
            try_out(cfg)  # only the cold start is missing
    told = capsys.readouterr().out
    assert "data: " in told and "there is no GPU here" in told
    used = [float(line.split()[1]) for line in told.splitlines() if line.split()[:1] == ["sum"]]
    assert used and all(20 < gib < 80 for gib in used)
    assert f"training, each of {cfg.plan.gpus} GPUs" in told or "training and engine on one GPU" in told


def test_a_gpu_that_trains_and_samples_must_hold_both(toy_dir, capsys):
    with pytest.raises(config.ConfigError, match="training and engine on one GPU: .* do not fit into 20 GiB"):
        try_out(replace(on_node("paragrpo_2b_1gpu.yaml", toy_dir), plan=PlanConfig(1, gpu_gib=20)))
    told = capsys.readouterr().out
    assert "KV cache" in told and told.count("sum") == 1


@pytest.mark.parametrize("path", sorted((REPO / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_loads_and_names_its_run_after_itself(path):
    cfg = config.load(sft.SFTConfig if "sft" in path.stem else RLConfig, path)
    assert cfg.run.replace("/toy/", "/toy_").removeprefix("runs/") in (path.stem, path.stem.removesuffix("_1gpu"))


def test_all_servers_get_the_same_flags_and_those_of_the_config_after_them(monkeypatch):
    """Past bug: only RL's configs chose SGLang's well-tested paths, so an evaluation's servers had bf16 logits."""

    def flags(**cfg) -> list[str]:
        *ours, size = server_flags(EngineConfig(**cfg))
        assert size == f"--tp-size={cfg.get('tensor_parallel', 1)}"
        return ours

    same = {
        "--enable-fp32-lm-head",
        "--mm-feature-transport=cpu",
        "--prefill-decode-interval=0",
        "--schedule-policy=lpm",
    }
    first = flags(server_gpus=(0,), server_args=("--a=1",), max_context=24_576)
    assert first[-1] == "--a=1" and {*first} == {*same, "--context-length=24592", "--max-running-requests=64", "--a=1"}
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    same |= {"--context-length=24592", "--max-running-requests=128"}
    # With fa3, a server fails an assertion on newer GPUs.
    for capability, more in (((9, 0), {"--attention-backend=fa3"}), ((10, 0), set()), ((8, 0), set())):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda gpu, capability=capability: capability)
        assert {*flags(server_gpus=(4, 5), tensor_parallel=2, max_context=24_576)} == same | more


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


def test_every_rank_has_a_task(toy_dir, tmp_path):
    cfg = config.load(RLConfig, rl_config(tmp_path / "c.yaml", toy_dir, batch_tasks=3))
    rl.main(replace(cfg, plan=PlanConfig(3)), dry=True)
    with pytest.raises(config.ConfigError, match="batch_tasks = 3: each of 4 ranks needs a task"):
        rl.main(replace(cfg, plan=PlanConfig(4)), dry=True)
