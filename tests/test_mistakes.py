"""Users' mistakes: each one prints one sentence that says what to do, and leaves no files behind.

The tests run commands as a user types them, in a folder with `configs` and `toy_data`. torch is imported once for all.
They also run the commands of docs/troubleshooting.md, and compare the quoted output literally."""

import contextlib
import json
import re
import runpy
import shlex
import shutil
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file
from scripts import GONE, REPO

from eval import EvalConfig
from rl import RLConfig
from rollout import RolloutConfig
from runtime import config, folder, open_engine
from runtime.config import ConfigError
from runtime.folder import save_run
from sft import SFTConfig

# ------------------------------------------------------------------------------------------------ configs

MISTAKES = yaml.safe_load((Path(__file__).parent / "mistakes.yaml").read_text("utf-8"))
FILES = {SFTConfig: "toy_sft", RLConfig: "toy_paragrpo", EvalConfig: "eval/toy"}


def check_refusal(cls: type, path: Path, overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        config.load(cls, path, overrides)
    assert [word for word in words if word not in str(error.value)] == []


@pytest.mark.parametrize("cls, overrides", [(cls, text) for cls in FILES for text in MISTAKES["configs"][cls.__name__]])
def test_a_config_that_cannot_run_names_the_key_the_value_and_the_rule(cls, overrides):
    path = REPO / "configs" / f"{FILES[cls]}.yaml"
    check_refusal(cls, path, re.split(r" (?=[\w.]+=)", overrides), MISTAKES["configs"][cls.__name__][overrides])


@pytest.mark.parametrize("text", MISTAKES["files"])
def test_a_file_that_is_no_config_is_named(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    check_refusal(SFTConfig, path, [], [str(tmp_path), *MISTAKES["files"][text]])


# ------------------------------------------------------------------------------------------------ commands

SFT = "sft.py configs/toy_sft.yaml policy.checkpoint=toy_data/model"
RL = "rl.py configs/toy_paragrpo.yaml policy.checkpoint=toy_data/model"
EVAL = "eval.py configs/eval/toy.yaml checkpoint=toy_data/model"


@pytest.fixture(scope="module")
def desk(toy_dir, tmp_path_factory) -> Path:
    """The folder of the commands: the toy, and files that are not what they look like."""
    root = tmp_path_factory.mktemp("desk")
    for name in ("holiday", "linked", "other/state/step-00000009"):
        (root / name).mkdir(parents=True)
    links = {"configs": REPO / "configs", "toy_data": toy_dir, "same": toy_dir, "linked/model": toy_dir / "model"}
    for name, there in links.items():
        (root / name).symlink_to(there)
    shutil.copy(toy_dir / "sft.parquet", root / "moved.parquet")  # its relative paths are now wrong
    for name in ("shards", "thinking", "int8", "two", "none"):
        shutil.copytree(toy_dir / "model", root / name)
    for name, text in MISTAKES["desk"].items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "none" / "model.safetensors").rename(root / "none" / "consolidated.safetensors")
    save_file({"x.weight": torch.ones(2, dtype=torch.int8)}, root / "int8" / "model.safetensors", {"format": "pt"})
    return root


@pytest.fixture
def typed(desk, monkeypatch, capsys):
    """typed("sft.py a.yaml x=1") -> (exit status, output)."""
    monkeypatch.chdir(desk)

    def run(command: str) -> tuple[int, str]:
        script, *arguments = shlex.split(command)
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        monkeypatch.setattr("runtime.script.end_process", sys.exit)  # this process goes on
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(REPO / script), run_name="__main__")
        told = "".join(capsys.readouterr())
        return (1, told + end.value.code) if isinstance(end.value.code, str) else (end.value.code, told)

    return run


@pytest.mark.parametrize("name", MISTAKES["commands"])
def test_a_mistake_is_answered_with_what_to_do_and_leaves_nothing_behind(desk, typed, name):
    before = set(desk.rglob("*"))
    [(command, words)] = MISTAKES["commands"][name].items()
    for short, long in (("SFT ", SFT), ("RL ", RL), ("EVAL ", EVAL)):
        command = command.replace(short, f"{long} run=run ")
    status, told = typed(command)
    assert status and [word for word in words if word not in told] == [] and "Traceback" not in told
    assert set(desk.rglob("*")) == before


def test_a_dry_run_shows_memory_then_its_checks_and_ends_at_the_first_fault(desk, typed, golden):
    status, told = typed(f"{RL} run=run --dry-run")
    assert not status and told.endswith("\nready: run\n")
    golden("dry_run.txt", told)

    # All that needs no cold start is shown before the run asks for it.
    status, told = typed(f"{RL} run=run policy.checkpoint=gone policy.family=toy_data/model --dry-run")
    assert status == 1 and re.search(r"\ndata: .*\nerror: gone: ", told)
    # Past bug: it checked the one rank of the dry run itself. Each rank needs a task.
    assert "error: batch_tasks = 8: each of 9 ranks" in typed(f"{RL} run=run plan.gpus=9 --dry-run")[1]
    assert not typed(f"{RL} run=run plan.gpus=8 --dry-run")[0]
    assert not (desk / "run").exists()


@pytest.mark.parametrize("command", [f"{SFT} policy.dtype=bf16", EVAL])
def test_a_dry_run_tells_which_prompts_are_not_ours_and_needs_no_gpu_for_bf16(typed, command):
    status, told = typed(f"{command} run=run prompts=words.yaml --dry-run")
    assert not status and "prompts: not ours: system, before_question\n" in told
    assert "bf16" not in command or "policy.dtype = 'bf16'" in typed(f"{command} run=bf16")[1]


@pytest.fixture
def begun(tmp_path):
    """begun(cls, override, ...) -> the config of a run in a folder that has a state of the run without these overrides."""

    def resume(cls: type, *overrides: str):
        judge = ["reward.judge.url=http://127.0.0.1:8/v1", "reward.judge.model=m"] if cls is RLConfig else []
        cfg = partial(config.load, cls, REPO / "configs" / f"{FILES[cls]}.yaml")
        if not (tmp_path / "state").exists():
            save_run(cfg([f"run={tmp_path}", *judge]), tmp_path)
            (tmp_path / "state" / "step-00000001").mkdir(parents=True)
        return cfg([f"run={tmp_path}", *judge, *overrides])

    return resume


def test_a_run_may_go_on_longer_or_slower_and_says_what_changed(begun, capsys):
    """Past bug: after a default had changed, a run continued with another optim.betas without a word."""
    folder.refuse_other_run(begun(RLConfig, "steps=99", "optim.lr=1e-4"))
    told = capsys.readouterr().out
    assert "optim.lr: 0.0003, now 0.0001; steps: 60, now 99" in told and told.count(", now ") == 2


RESUMES = [(change, allowed) for allowed, changes in MISTAKES["resumes"].items() for change in changes]


@pytest.mark.parametrize("change, allowed", RESUMES)
def test_a_run_goes_on_elsewhere_and_otherwise_but_not_as_another_one(begun, change, allowed):
    cfg, key = begun(SFTConfig if "pack" in change else RLConfig, change), change.partition("=")[0]
    refusal = pytest.raises(ConfigError, match=rf"\({key}: ")
    with contextlib.nullcontext() if allowed else refusal:
        folder.refuse_other_run(cfg)


def test_a_setting_that_is_newer_than_the_run_had_its_default_value_there(begun):
    cfg = begun(RLConfig)
    saved = Path(cfg.run) / "config.yaml"
    tree = yaml.safe_load(saved.read_text())
    del tree["data"]["seed"]
    saved.write_text(yaml.safe_dump(tree))
    folder.refuse_other_run(cfg)


def test_a_run_that_goes_on_with_other_code_keeps_its_commits_and_has_its_packages(begun):
    cfg = begun(RLConfig)
    record = Path(cfg.run) / "run.json"
    first = json.loads(record.read_text())
    record.write_text(json.dumps(first | {"commits": ["abc"]}))
    save_run(cfg, cfg.run)
    now = json.loads(record.read_text())
    assert now["commits"] == ["abc", *first["commits"]] and now["packages"]["torch"] == version("torch")


# ------------------------------------------------------------------------------------------------ the page


BLOCKS = re.findall(r"^```console\n(.*?)\n```$", (REPO / "docs" / "troubleshooting.md").read_text("utf-8"), re.M | re.S)
BLOCKS = [block for block in BLOCKS if not GONE.search(block)]


def matches(quoted: str, said: str) -> bool:
    """Compare output with the page, where `...` stands for any text, and line breaks do not count."""
    parts = [re.escape(" ".join(part.split())) for part in re.split(r"\s*\.\.\.\s*", quoted)]
    return re.search(".*".join(parts), " ".join(said.split())) is not None


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[0][:60])
def test_the_page_quotes_what_its_commands_say(desk, typed, block):
    before = set(desk.rglob("*"))
    command, _, quoted = block.removeprefix("$ python ").partition("\n")
    status, told = typed(command)
    assert status == 1 and matches(quoted, told), told
    assert set(desk.rglob("*")) == before


# ------------------------------------------------------------------------------------------------ on the node


@pytest.mark.parametrize("ranks, gpus, says", [(8, 8, r"\[7\]"), (7, 4, "4 GPUs")])
def test_gpus_that_train_already_or_are_not_there_are_refused(monkeypatch, ranks, gpus, says):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(ConfigError, match=says):
        open_engine.require_servers(RolloutConfig(server_gpus=(7,)), ranks)
