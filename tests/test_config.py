"""The config loader: a run uses exactly the values that are written, and a config that cannot run says why."""

import importlib.metadata
import os
import runpy
import sys
from dataclasses import dataclass, field
from typing import Literal

import pytest
import torch
from scripts import Forked, finish

from runtime import config
from runtime.folder import save_run


@dataclass(frozen=True)
class Optim:
    lr: float = 1e-5
    betas: tuple[float, ...] = (0.9, 0.95)
    warmup: int = 0

    def __post_init__(self):
        if self.lr <= 0:
            raise ValueError(f"lr = {self.lr}: must be positive")


@dataclass(frozen=True)
class Source:
    path: str


@dataclass(frozen=True)
class Run:
    name: str
    steps: int = 10
    credit: Literal["struct", "off"] = "struct"
    seed: int | None = None
    optim: Optim = Optim()
    sources: tuple[Source, ...] = ()
    weights: dict[str, float] = field(default_factory=dict)


def write(path, text):
    path.write_text(text)
    return path


def test_a_file_inherits_from_its_base_and_the_command_line_wins(tmp_path):
    write(
        tmp_path / "base.yaml", "name: base\nsteps: 5\noptim: {lr: 1.0e-3, warmup: 7}\nsources: [{path: a}, {path: b}]"
    )
    child = write(tmp_path / "child.yaml", "base: base.yaml\nname: child\noptim: {lr: 2.0e-3}\nsources: [{path: c}]")
    cfg = config.load(Run, child, ["optim.lr=0.5", "seed=3"])
    assert (cfg.name, cfg.steps, cfg.seed) == ("child", 5, 3)
    assert cfg.optim == Optim(lr=0.5, warmup=7)  # mappings merge
    assert cfg.sources == (Source("c"),)  # lists replace


def test_numbers_without_a_dot_and_a_bare_off_mean_what_they_say(tmp_path):
    """YAML reads `1e-4` as a string and `off` as false."""
    cfg = config.load(Run, write(tmp_path / "a.yaml", "name: a\noptim: {lr: 1e-4}\ncredit: off"))
    assert cfg.optim.lr == 1e-4 and cfg.credit == "off"
    assert config.load(Run, tmp_path / "a.yaml", ["optim.betas=[1, 0.5]"]).optim.betas == (1.0, 0.5)


@pytest.mark.parametrize(
    "text, overrides, says",
    [
        ("name: a\nstpes: 3", [], "stpes: unknown key; did you mean steps?"),
        ("name: a\nlr: 1", [], "lr: unknown key; choose from name, steps, credit, seed, optim, sources, weights"),
        ("name: a\nsteps: true", [], "steps = True: must be int"),
        ("name: a\ncredit: monkey", [], "credit = 'monkey': choose from struct, off"),  # not an API key
        ("name: a\nsources: {path: x}", [], "sources = {'path': 'x'}: must be a list"),
        ("name: a\nsources: [{path: 3}]", [], "sources[0].path = 3: must be str"),
        ("name: a\nweights: {x: y}", [], "weights.x = 'y': must be float"),
        ("name: a\noptim: {betas: [.inf]}", [], "optim.betas[0] = inf: must be finite and not negative"),
        ("name: a\nseed: -1", [], "seed = -1: must be finite and not negative"),
        ("name: a\noptim: {lr: 0}", [], "optim: lr = 0.0: must be positive"),
        ("# steps: 3", [], "name: required, but not given"),  # a file of comments is one without keys
        ("name: a", ["steps"], "write it as key.sub=value"),
        ("name: a\nsteps: 3", ["steps.x=1"], "override steps.x: steps must be a mapping"),
        ("name: [", [], "not a readable YAML file"),
        # Past bug: the last of two keys won, so a second section dropped the first.
        ("optim: {lr: 1}\nname: a\noptim: {warmup: 7}", [], "the key 'optim' in line 3 stands twice"),
        ("name: a\non: 1", [], "True: unknown key; choose from name"),  # YAML reads `on` as true
        ("name: {{x}}", [], "not a readable YAML file"),  # past bug: a traceback for a template that is not filled in
        ("base: nowhere.yaml", [], "nowhere.yaml: not a readable YAML file: [Errno 2] No such file"),
    ],
)
def test_what_cannot_run_names_the_key_the_value_and_the_rule(tmp_path, text, overrides, says):
    path = write(tmp_path / "run.yaml", text)
    with pytest.raises(config.ConfigError) as error:
        config.load(Run, path, overrides)
    assert says in str(error.value)


def test_the_saved_config_is_the_run_config(tmp_path):
    cfg = Run(name="a", optim=Optim(lr=3e-4), sources=(Source("x"),), weights={"answer": 2.0}, seed=1)
    save_run(cfg, tmp_path / "run")
    assert config.load(Run, tmp_path / "run" / "config.yaml") == cfg
    assert f'"torch": "{importlib.metadata.version("torch")}' in (tmp_path / "run" / "run.json").read_text()


def test_what_a_mapping_leaves_out_is_as_its_parent_has_it(tmp_path):
    """Past bug: with `rollout.max_rounds=2`, a greedy evaluation sampled at 0.7, the nested class's own default."""

    @dataclass(frozen=True)
    class Run:
        optim: Optim = Optim(lr=3.0, warmup=7)
        maybe: Optim | None = None

    (tmp_path / "c.yaml").write_text("optim: {warmup: 9}\nmaybe: {lr: 2}")
    assert config.load(Run, tmp_path / "c.yaml") == Run(Optim(lr=3.0, warmup=9), Optim(lr=2.0))
    assert config.load(Run, tmp_path / "c.yaml", ["optim.lr=1"]).optim == Optim(lr=1.0, warmup=9)


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
