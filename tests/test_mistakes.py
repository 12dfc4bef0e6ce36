"""Users' mistakes: each one prints one sentence that says what to do, and leaves no files behind.

The tests run commands as a user types them, in a folder with `configs` and `toy_data`. torch is imported once for all.
They also run the commands of docs/troubleshooting.md, and compare the quoted output literally."""

import json
import re
import runpy
import shlex
import shutil
import sys
import typing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file
from scripts import REPO

from eval import EvalConfig
from rl import RLConfig
from rollout import RolloutConfig
from runtime import config, folder, open_engine
from runtime.config import ConfigError
from runtime.folder import save_run
from sft import SFTConfig

SFT = "sft.py configs/toy_sft.yaml policy.checkpoint=toy_data/model"
RL = "rl.py configs/toy_paragrpo.yaml policy.checkpoint=toy_data/model"
EVAL = "eval.py configs/eval/toy.yaml checkpoint=toy_data/model"


@pytest.fixture(scope="module")
def desk(toy_dir, tmp_path_factory) -> Path:
    """The folder of the commands: the toy, and files that are not what they look like."""
    root = tmp_path_factory.mktemp("desk")
    for name, there in (("configs", REPO / "configs"), ("toy_data", toy_dir)):
        (root / name).symlink_to(there)
    (root / "holiday").mkdir()
    (root / "linked").mkdir()
    (root / "linked" / "model").symlink_to(toy_dir / "model")
    (root / "same").symlink_to(toy_dir)
    (root / "notes.txt").write_text("milk")
    (root / "mine").mkdir()
    row = {"video": "a.mp4", "prompt": [{"role": "user", "content": "Why?"}]}
    (root / "mine" / "rows.jsonl").write_text(json.dumps(row))
    shutil.copy(toy_dir / "sft.parquet", root / "moved.parquet")  # its relative paths are now wrong
    changes = {"unknown": {"model_type": "foo_vl"}, "fp8": {"quantization_config": {"quant_method": "fp8"}}}
    for name, change in (changes | dict.fromkeys(("shards", "thinking", "int8", "two", "none"), {})).items():
        shutil.copytree(toy_dir / "model", root / name)
        shape = json.loads((root / name / "config.json").read_text())
        (root / name / "config.json").write_text(json.dumps(shape | change))
    shards = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (root / "shards" / "model.safetensors.index.json").write_text(json.dumps(shards))
    (root / "two" / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-00001-of-00001.safetensors"}}'
    )
    (root / "none" / "model.safetensors").rename(root / "none" / "consolidated.safetensors")
    save_file({"x.weight": torch.ones(2, dtype=torch.int8)}, root / "int8" / "model.safetensors", {"format": "pt"})
    template = root / "thinking" / "chat_template.jinja"
    opening = "<|im_start|>assistant\\n' if add_generation_prompt"
    assert template.read_text().count(opening) == 1
    template.write_text(template.read_text().replace(opening, opening.replace("\\n'", "\\n<think>\\n'")))
    (root / "words.yaml").write_text("system: Look.\nbefore_question: ''\n")
    (root / "other" / "state" / "step-00000009").mkdir(parents=True)
    (root / "other" / "metrics.jsonl").write_text("")
    (root / "other" / "config.yaml").write_text("run: other\ngroup_size: 8\nsteps: 9")
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


MISTAKES = [  # the page has more
    # the command line and YAML
    ("an unknown tool", f"{SFT} tools=[crop]", "tools[0] = 'crop': choose from crop_video"),
    ("a kind of token that is none", f"{SFT} 'kind_weights={{color: 1}}'", "kind_weights = 'color': choose from prose, arguments, untagged_answer, answer, structure"),
    # checkpoints
    ("any folder", f"{SFT} policy.checkpoint=holiday", "holiday has no config.json: it is no checkpoint; a training leaves its own in RUN/model"),
    ("another script's run", f"{SFT} run=other", "other is of another script, or of another version of this code (other/config.yaml: group_size: unknown key"),
    ("a folder that is no run's", f"{RL} policy.checkpoint=shards run=same", "same is of another script, or of another version of this code (same/config.yaml: not a readable YAML file"),
    ("its own start, by another name", f"{RL} policy.checkpoint=same/model run=linked", "'same/model' is in the folder of run = 'linked'"),
    ("a missing shard, tried out", f"{SFT} policy.checkpoint=shards --dry-run", "error: shards lacks model-00002-of-00002.safetensors: copy or download it again"),
    ("two kinds of weights", f"{SFT} policy.checkpoint=two --dry-run", "error: two has model.safetensors and an index of other files: delete one of the two"),
    ("no weights", f"{SFT} policy.checkpoint=none --dry-run", "error: none lacks model.safetensors: copy or download it again"),
    ("a quantized model", f"{SFT} policy.checkpoint=fp8 --dry-run", "error: fp8 is quantized (quantization_config in config.json): take its bf16 checkpoint"),
    ("quantized weights", f"{SFT} policy.checkpoint=int8 --dry-run", "error: int8/model.safetensors: x.weight is stored as I8: weights must be floats of 16 bits or more; take the bf16 checkpoint"),
    ("a template that opens thoughts", f"{SFT} policy.checkpoint=thinking", "thinking: its chat template does not continue a dialogue as rollouts do: after "),
    ("other frames than the checkpoint's", f"{SFT} visual.frame_pixels=65536", "made under another visual contract (frame_pixels: this run has 65536, the checkpoint 1024; "),
    ("another family", f"{RL} policy.checkpoint=unknown", "unknown is a 'foo_vl' model; this code trains qwen3_vl and qwen2_5_vl"),
    # data
    ("rows of another script", f"{SFT} 'data.sources=[{{path: toy_data/rl.parquet}}]'", "an SFT row needs the field `messages`; this one has prompt"),
    ("a column of another name", f"{RL} 'data.sources=[{{path: mine/rows.jsonl}}]'", "`videos` names no video; the row has video, prompt"),
    # settings with which nothing would be learned
    ("a gradient clipped to nothing", f"{SFT} --dry-run optim.max_grad_norm=0", "max_grad_norm=0.0): needs lr > 0, max_grad_norm > 0, warmup < 1 and two betas below 1"),
    ("no token below the cap", f"{RL} --dry-run grpo.behaviour_cap=0", "behaviour_cap = 0: every token would be masked"),
    ("calls without time", f"{RL} --dry-run rollout.call_timeout=0", "call_timeout = 0: set a larger number"),
    ("turns without tokens", f"{RL} --dry-run rollout.max_new_tokens=0", "max_new_tokens = 0: set a larger number"),
    ("AdamW's betas", f"{SFT} --dry-run 'optim.betas=[1.5, 0.9]'", "warmup < 1 and two betas below 1"),
    # RL
    ("greedy sampling", f"{RL} rollout.temperature=0", "all episodes of a group would be the same; set it above 0"),
    ("a file as run", f"{SFT} run=notes.txt/run", "Not a directory: 'notes.txt/run'"),
    ("a home folder as run", f"{SFT} run=~/run", "run = '~/run': write the whole path, because nothing expands ~ and $ in it"),
    ("a variable as run", f"{EVAL} run=$HOME/run", "run = '$HOME/run': write the whole path"),
    ("an evaluation's way of reading answers", f"{RL} reward.untagged_answer=prose", "untagged_answer = 'prose' is for evaluation"),
    ("a judge without an address", f"{RL} reward.open_answer=judge", "open_answer = 'judge' needs judge.url and judge.model"),
    # evaluation, report, asking
    ("an unknown split", f"{EVAL} 'splits={{toyy: toy_data}}'", "splits = 'toyy': did you mean toy?"),
    ("no such video", 'study/ask.py "Why?" --model toy_data/model --video gone.mp4', "gone.mp4: cannot be opened"),
]  # fmt: skip


@pytest.mark.parametrize("command, says", [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES])
def test_a_mistake_is_answered_with_what_to_do_and_leaves_nothing_behind(desk, typed, command, says):
    before = set(desk.rglob("*"))
    trains = command.startswith(("sft.py", "rl.py", "eval.py configs")) and " run=" not in command
    status, told = typed(command + " run=run" * trains)
    assert status and says in told and "Traceback" not in told
    assert set(desk.rglob("*")) == before


def test_bf16_needs_a_gpu_in_the_run_but_not_in_its_dry_run(desk, typed):
    assert "policy.dtype = 'bf16': training in bf16" in typed(f"{SFT} policy.dtype=bf16 run=bf16")[1]
    assert typed(f"{SFT} policy.dtype=bf16 run=bf16 --dry-run")[1].endswith("ready: bf16\n")


def test_a_dry_run_shows_memory_then_its_checks_and_ends_at_the_first_fault(desk, typed):
    status, told = typed(f"{RL} run=run --dry-run")
    lines = told.splitlines()
    assert not status
    assert lines[0] == "  note    there is no GPU here: planned for plan.gpus = 1, plan.gpu_gib = 80"
    assert lines[1] == "training and engine on one GPU"
    assert re.fullmatch(r"  sum +\d+\.\d GiB of 80", lines[-4])
    assert [line.split()[0] for line in lines[-3:-1]] == ["data:", "data:"]  # data and val
    assert lines[-1] == "ready: run"

    # All that needs no cold start is shown before the run asks for it.
    status, told = typed(f"{RL} run=run policy.checkpoint=gone policy.family=toy_data/model --dry-run")
    assert status == 1 and re.search(
        r"data: \d+ rows of \S+\nerror: gone: neither a folder nor a model on the hub", told
    )
    # Past bug: it checked the one rank of the dry run itself.
    assert "error: batch_tasks = 8: each of 9 ranks needs a task" in typed(f"{RL} run=run plan.gpus=9 --dry-run")[1]
    assert not (desk / "run").exists()


def test_a_dry_run_tells_what_it_did_not_look_up_and_which_prompts_are_not_ours(desk, typed):
    """Past bug: it said "ok" to any name that looks like one on the hub."""
    for script, key in ((SFT, "policy.checkpoint"), (EVAL, "checkpoint")):
        _, told = typed(f"{script} run=run {key}=Qwen/Qwen3-VL-2B-Instruct --dry-run")
        assert "  note    checkpoint: Qwen/Qwen3-VL-2B-Instruct was not looked up" in told
        _, told = typed(f"{script} run=run prompts=words.yaml --dry-run")
        assert "  note    prompts: not ours: system, before_question\n" in told


def cfg_of(run: Path, *overrides: str) -> RLConfig:
    return config.load(RLConfig, REPO / "configs" / "toy_paragrpo.yaml", [f"run={run}", *overrides])


@pytest.fixture
def begun(tmp_path) -> Path:
    """The folder of a run that has a state."""
    save_run(cfg_of(tmp_path), tmp_path)
    (tmp_path / "state" / "step-00000001").mkdir(parents=True)
    return tmp_path


def test_a_run_may_go_on_longer_or_slower_and_says_what_changed(begun, capsys):
    """Past bug: after a default had changed, a run continued with another optim.betas without a word."""
    folder.refuse_other_run(cfg_of(begun, "steps=99", "optim.lr=1e-4"))
    told = "has other settings than before: optim.lr: 0.0003, now 0.0001; steps: 60, now 99\n"
    assert capsys.readouterr().out == f"{begun} {told}"


@pytest.mark.parametrize("change", ["url=http://127.0.0.1:9/v1", "key=OTHER_KEY", "timeout=9"])
def test_a_resumed_run_may_reach_its_judge_in_another_way(begun, change):
    """Past bug: only an evaluation could, so an RL run could not resume once its judge had another port."""
    save_run(cfg_of(begun, "reward.judge.url=http://127.0.0.1:8/v1", "reward.judge.model=m"), begun)
    folder.refuse_other_run(
        cfg_of(begun, "reward.judge.url=http://127.0.0.1:8/v1", "reward.judge.model=m", f"reward.judge.{change}")
    )


def test_a_setting_that_is_newer_than_the_run_had_its_default_value_there(begun):
    saved = begun / "config.yaml"
    tree = yaml.safe_load(saved.read_text())
    del tree["val_tasks"], tree["data"]["seed"]
    saved.write_text(yaml.safe_dump(tree))
    folder.refuse_other_run(cfg_of(begun))


def test_a_run_that_goes_on_with_other_code_keeps_its_commits(begun):
    record = begun / "run.json"
    first = json.loads(record.read_text())
    record.write_text(json.dumps(first | {"commits": ["abc"]}))
    save_run(cfg_of(begun), begun)
    assert json.loads(record.read_text())["commits"] == ["abc", *first["commits"]]


def test_a_resumed_run_may_find_its_data_elsewhere(begun):
    folder.refuse_other_run(cfg_of(begun, "data.sources=[{path: elsewhere/rl.parquet}]", "data.video_root=elsewhere"))


MIXED_ANEW = ("sources=[{path: rl.parquet, weight: 2}]", "sources=[{path: sft.parquet}]", "seed=1")


@pytest.mark.parametrize("change", ["grpo.group_size=4", *(f"data.{change}" for change in MIXED_ANEW)])
def test_a_run_does_not_go_on_as_another_one(begun, change):
    """Past bugs: the weights, the files and the order of the data could change."""
    key = change.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"belongs to a run with other settings \({key}: "):
        folder.refuse_other_run(cfg_of(begun, change))


def test_a_training_does_not_resume_with_another_length_of_its_packs(begun):
    """Past bug: it could, but rows over `pack_tokens` are skipped, so the steps after it had other rows."""
    sft = config.load(SFTConfig, REPO / "configs" / "toy_sft.yaml", [f"run={begun}"])
    save_run(sft, begun)
    with pytest.raises(ConfigError, match=r"belongs to a run with other settings \(pack_tokens: "):
        folder.refuse_other_run(replace(sft, pack_tokens=sft.pack_tokens + 1))


def has_setting(cls: type, name: str) -> bool:
    """Return whether a config has the setting, such as "rollout.urls", in its own section or in one of its sections."""
    key, _, rest = name.partition(".")
    hint = typing.get_type_hints(cls).get(key)
    return hint is not None and (not rest or has_setting(hint, rest))


@pytest.mark.parametrize("name", sorted(folder.MAY_CHANGE | folder.MAY_GROW))
def test_what_may_change_when_a_run_resumes_is_a_setting(name):
    assert any(has_setting(cls, name) for cls in (RLConfig, SFTConfig, EvalConfig))


# ------------------------------------------------------------------------------------------------ the page


BLOCKS = re.findall(r"^```console\n(.*?)\n```$", (REPO / "docs" / "troubleshooting.md").read_text("utf-8"), re.M | re.S)


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


@pytest.mark.parametrize("ranks, gpus, says", [(8, 8, r"\[7\] would have to do both"), (7, 4, "there are 4 GPUs here")])
def test_gpus_that_train_already_or_are_not_there_are_refused(monkeypatch, ranks, gpus, says):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(ConfigError, match=says):
        open_engine.require_servers(RolloutConfig(server_gpus=(7,)), ranks)
