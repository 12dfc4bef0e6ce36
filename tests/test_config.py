"""A run uses exactly the values that are written, and its saved file is its config. The configs of configs/ differ in what they
say and fit their GPUs. What is refused is in test_mistakes.py."""

import contextlib
import json
import os
import runpy
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from hypothesis import Phase, given, reject, settings
from hypothesis import strategies as st
from scripts import REPO, Forked, finish

import rl
import sft
from eval import EvalConfig
from evals import rows
from rl import RLConfig
from runtime import config, folder
from runtime.config import differences
from runtime.dataset import Source
from runtime.engine import EngineConfig
from runtime.folder import save_run
from runtime.open_engine import server_flags
from runtime.run import OptimConfig
from runtime.visual import VisualContract
from sft import SFTConfig

CONFIGS = sorted({*REPO.glob("configs/**/*.yaml")} - {REPO / "configs" / "eval" / "published.yaml"})  # it is a table
TEXT = st.text(st.characters(max_codepoint=0xD7FF), max_size=9) | st.just(
    "a\x85b"
)  # past bug: it was read back as a space
VALUES = {bool: st.booleans(), int: st.integers(0, 1 << 60), float: st.floats(0, 1e300), str: TEXT}


def class_of(path: Path) -> type:
    if path.parent.name == "eval":
        return EvalConfig
    return SFTConfig if "sft" in path.stem else RLConfig


def load(path: Path, *overrides: str) -> Any:
    """Load a config of configs/ as its script does."""
    return rows.load(class_of(path), path, ["row=paravt_8b", *overrides] if path.stem == "rows" else overrides)


def settings_of(cls: type, section: str = "") -> Iterator[tuple[str, Any]]:
    """Yield name and type of each setting: ("optim.lr", float)."""
    for name, hint in get_type_hints(cls).items():
        if type(None) in get_args(hint):
            hint = get_args(hint)[0]
        yield section + name, hint
        if is_dataclass(hint):
            yield from settings_of(hint, f"{section}{name}.")


SETTINGS = {cls: dict(settings_of(cls)) for cls in (SFTConfig, RLConfig, EvalConfig)}


def value_of(cfg: Any, setting: str) -> Any:
    for name in setting.split("."):
        cfg = getattr(cfg, name)
    return cfg


@settings(max_examples=25, phases=[Phase.generate])  # shrinking would take minutes
@given(st.sampled_from(CONFIGS), st.data())
def test_a_config_has_the_values_that_are_written_and_its_saved_file_is_that_config(path, data):
    scalars = {}
    for name, hint in SETTINGS[class_of(path)].items():
        if get_origin(hint) is Literal:
            scalars[name] = st.sampled_from(get_args(hint))
        elif hint in VALUES and not name.endswith(("key", "prompt_file")):  # they refuse most texts
            scalars[name] = VALUES[hint]
    chosen = data.draw(st.lists(st.sampled_from([*scalars]), unique=True, max_size=4))
    written = {setting: data.draw(scalars[setting], setting) for setting in chosen}
    try:
        cfg = load(path, *(f"{setting}={json.dumps(value)}" for setting, value in written.items()))
    except config.ConfigError:
        reject()  # a rule of several settings, or a section that lacks others
    assert {setting: value_of(cfg, setting) for setting in written} == written
    with tempfile.TemporaryDirectory() as run:
        save_run(cfg, run)
        assert config.load(type(cfg), Path(run) / "config.yaml") == cfg


def test_what_may_change_when_a_run_resumes_is_a_setting():
    assert set().union(*SETTINGS.values()) >= folder.MAY_CHANGE | folder.MAY_GROW


def test_a_file_inherits_from_its_base_and_the_command_line_wins(tmp_path):
    (tmp_path / "base.yaml").write_text(
        "{run: base, steps: 5, policy: {checkpoint: x}, optim: {lr: 1.0e-3, warmup: 0.1}, data: {sources: [{path: a}]}}"
    )
    child = tmp_path / "child.yaml"
    child.write_text("base: base.yaml\nrun: child\noptim: {lr: 2.0e-3}\ndata: {sources: [{path: c}]}")
    cfg = config.load(SFTConfig, child, ["optim.lr=0.5", "keep=3"])
    assert (cfg.run, cfg.steps, cfg.keep) == ("child", 5, 3)
    assert (cfg.optim.lr, cfg.optim.warmup) == (0.5, 0.1)  # mappings merge
    assert cfg.data.sources == (Source("c"),)  # lists replace


def test_numbers_without_a_dot_and_a_bare_off_mean_what_they_say():
    """YAML reads `1e-4` as a string and `off` as false."""
    cfg = load(CONFIGS[0], "optim.lr=1e-4", "reward.anchor.credit=off", "optim.betas=[0, 0.5]")
    assert (cfg.optim.lr, cfg.reward.anchor.credit, cfg.optim.betas) == (1e-4, "off", (0.0, 0.5))


def test_what_a_section_leaves_out_is_as_its_parent_has_it(tmp_path):
    """Past bug: with `rollout.max_rounds=2`, a greedy evaluation sampled at 0.7, the nested class's own default."""
    path = tmp_path / "c.yaml"
    path.write_text("{checkpoint: x, splits: {}, run: y, rollout: {max_rounds: 2}, visual: {crop_fps: 2}}")
    for overrides in ([], ["rollout.max_calls=3"]):
        cfg = config.load(EvalConfig, path, overrides)
        assert (cfg.rollout.temperature, cfg.rollout.max_rounds, cfg.rollout.server_gpus) == (0, 2, None)
        assert cfg.visual == VisualContract(crop_fps=2)  # the parent has none
    cfg = load(REPO / "configs" / "sft_8b.yaml", "optim={warmup: 0.2}")
    assert cfg.optim == OptimConfig(lr=2e-5, schedule="cosine", warmup=0.2)


def start_the_scripts() -> None:
    """Start each script with an override that ends it, then look at what torch's allocator has read."""
    for script, cfg in (("sft.py", "toy_sft"), ("eval.py", "eval/toy"), ("rl.py", "toy_grpo")):
        os.environ.pop("PYTORCH_ALLOC_CONF", None)
        sys.argv = [script, f"configs/{cfg}.yaml", "nonsense=1"]
        with contextlib.suppress(SystemExit):
            runpy.run_path(script, run_name="__main__")
        assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert torch._C._accelerator_getAllocatorSettings() == "expandable_segments:True"
    assert not torch.cuda.is_initialized()


def test_every_script_sets_the_allocator_before_torch_reads_the_setting():
    """torch reads PYTORCH_ALLOC_CONF when it first uses the allocator. A use at import would come before the script."""
    finish(Forked(start_the_scripts))


# ------------------------------------------------------------------------------------------------ the configs of configs/


def test_every_config_loads_and_has_a_run_of_its_own():
    assert len({load(path).run for path in CONFIGS}) == len(CONFIGS)


def test_the_dry_run_of_a_real_model_knows_its_memory_and_what_it_has_not_looked_up(toy_dir, capsys):
    data = f"data={{video_root: {toy_dir}, sources: [{{path: {toy_dir}/%s.parquet}}]}}"
    sft.main(load(REPO / "configs" / "sft_8b.yaml", data % "sft"), dry=True)
    # Past bug: it said "ok" to any name that looks like one on the hub.
    assert "Qwen3-VL-8B-Instruct was not looked up" in capsys.readouterr().out
    # A GPU that trains and samples must hold both.
    with pytest.raises(config.ConfigError, match="training and engine on one GPU: .* 20 GiB"):
        rl.main(load(REPO / "configs" / "paragrpo_2b_1gpu.yaml", data % "rl", "plan.gpu_gib=20"), dry=True)
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


NO_ANCHORING = {"rollout.think_prefix": False, "reward.answer_suffix": False, "reward.anchor.credit": "off"}
NO_GATING = {"gating": ()}


@pytest.mark.parametrize("name, whole, changes", [
    ("grpo_8b", "paragrpo_8b", NO_ANCHORING | NO_GATING),
    ("grpo_qwen25vl_7b", "paragrpo_qwen25vl_7b", NO_ANCHORING | NO_GATING),
    ("anchoring_8b", "paragrpo_8b", NO_GATING),
    ("gating_8b", "paragrpo_8b", NO_ANCHORING),
    ("no_tool_reward_8b", "paragrpo_8b", {"reward.w_tool": 0}),
    ("no_gamma_8b", "paragrpo_8b", {"reward.anchor.gamma": 0}),
])  # fmt: skip
def test_an_ablation_differs_from_the_whole_in_what_it_says(name, whole, changes):
    cfg, whole = (load(REPO / "configs" / f"{name}.yaml") for name in (name, whole))
    changed = differences(asdict(whole), asdict(cfg)).keys() - {"run"}
    assert {setting: value_of(cfg, setting) for setting in changed} == changes


def test_a_rank_starts_no_more_decoders_than_it_has_cores(monkeypatch):
    cfg = load(REPO / "configs" / "paragrpo_8b.yaml")
    for cores, ranks, workers in ((128, 4, 12), (16, 4, 4), (2, 4, 1), (None, 1, 1)):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert cfg.workers == workers
