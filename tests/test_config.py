"""The config loader: a run uses exactly the values that are written, and its saved file is its config. What it refuses is in
test_mistakes.py."""

import json
import os
import runpy
import sys
import tempfile
import typing
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from scripts import REPO, Forked, finish

from eval import EvalConfig
from evals import rows
from rl import RLConfig
from runtime import config
from runtime.dataset import Source
from runtime.folder import save_run
from runtime.run import OptimConfig
from runtime.visual import VisualContract
from sft import SFTConfig

CONFIGS = sorted({*REPO.glob("configs/**/*.yaml")} - {REPO / "configs" / "eval" / "published.yaml"})  # it is a table
TEXT = st.text(st.characters(max_codepoint=0xD7FF), max_size=9)
VALUES = {bool: st.booleans(), int: st.integers(0, 1 << 60), float: st.floats(0, 1e300), str: TEXT}


def load(path: Path, *overrides: str) -> Any:
    """Load a config of configs/ as its script does."""
    if path.parent.name == "eval":
        return rows.load(EvalConfig, path, ["row=paravt_8b", *overrides] if path.stem == "rows" else overrides)
    return config.load(SFTConfig if "sft" in path.stem else RLConfig, path, overrides)


def scalars(cfg: Any, prefix: str = "") -> Iterator[tuple[str, st.SearchStrategy]]:
    """Yield each scalar setting, such as "optim.lr", with a strategy for its values."""
    for name, hint in get_type_hints(type(cfg)).items():
        value = getattr(cfg, name)
        if type(None) in get_args(hint):
            hint = get_args(hint)[0]
        if is_dataclass(value):
            yield from scalars(value, f"{prefix}{name}.")
        elif typing.get_origin(hint) is typing.Literal:
            yield prefix + name, st.sampled_from(get_args(hint))
        elif hint in VALUES and name not in ("key", "prompt_file"):  # they refuse most texts
            yield prefix + name, VALUES[hint]


def value_of(cfg: Any, setting: str) -> Any:
    for name in setting.split("."):
        cfg = getattr(cfg, name)
    return cfg


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_loads_and_names_its_run_after_itself(path):
    names = {"trained": "", "rows": "eval/paravt_8b", "toy": "toy/eval/sft"}
    named = load(path).run.removeprefix("runs/")
    if path.parent.name == "eval":
        assert named == names[path.stem]
    else:
        assert named.replace("toy/", "toy_") in (path.stem, path.stem.removesuffix("_1gpu"))


@settings(max_examples=25)
@given(st.sampled_from(CONFIGS), st.data())
def test_a_config_has_the_values_that_are_written_and_its_saved_file_is_that_config(path, data):
    choices = dict(scalars(load(path)))
    chosen = data.draw(st.lists(st.sampled_from([*choices]), unique=True, max_size=4))
    values = {setting: data.draw(choices[setting], setting) for setting in chosen}
    try:
        cfg = load(path, *(f"{setting}={json.dumps(value)}" for setting, value in values.items()))
    except config.ConfigError:
        reject()  # a rule of several settings
    assert {setting: value_of(cfg, setting) for setting in values} == values
    with tempfile.TemporaryDirectory() as folder:
        save_run(cfg, folder)
        assert config.load(type(cfg), Path(folder) / "config.yaml") == cfg


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
    """Start each script with an override that ends it, then print what torch's allocator reads."""
    for script, cfg in (("sft.py", "toy_sft"), ("eval.py", "eval/toy"), ("rl.py", "toy_grpo")):
        os.environ.pop("PYTORCH_ALLOC_CONF", None)
        sys.argv = [script, f"configs/{cfg}.yaml", "nonsense=1"]
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit:
            print(script, os.environ.get("PYTORCH_ALLOC_CONF"))
    print(torch._C._accelerator_getAllocatorSettings(), torch.cuda.is_initialized())


def test_every_script_sets_the_allocator_before_torch_reads_the_setting():
    """torch reads PYTORCH_ALLOC_CONF when it first uses the allocator. A use at import would come before the script."""
    scripts = [f"{script} expandable_segments:True" for script in ("sft.py", "eval.py", "rl.py")]
    assert finish(Forked(start_the_scripts)).splitlines() == [*scripts, "expandable_segments:True False"]
