"""What people get wrong: each mistake is answered in a sentence that says what to do, and leaves nothing behind.

The commands are typed as a user types them, in a folder with `configs` and `toy_data`; torch is imported once for all.
docs/troubleshooting.md quotes messages: its commands are run here, and what it quotes is compared to the letter."""

import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from scripts import REPO

import rl
from data import Episode, Group, Task, Trajectory
from rl import RLConfig
from rollout import RolloutConfig
from runtime import checks, config, video
from runtime.config import ConfigError
from runtime.dataset import DataConfig, Source
from runtime.doctor import self_check
from runtime.engine import EngineError
from runtime.servers import SGLang
from runtime.settings import PolicyConfig

PAGE = (REPO / "docs" / "troubleshooting.md").read_text("utf-8")
SFT = "sft.py configs/toy_sft.yaml policy.checkpoint=toy_data/model"
RL = "rl.py configs/toy_paragrpo.yaml policy.checkpoint=toy_data/model"
EVAL = "eval.py configs/eval/toy.yaml checkpoint=toy_data/model"
ASK = 'rollout.py "Which color flashes?" --video toy_data/videos/test00000.mp4'


@pytest.fixture(scope="module")
def desk(toy_dir, tmp_path_factory) -> Path:
    """Where the commands are typed: the toy, and things that look like what they are not."""
    root = tmp_path_factory.mktemp("desk")
    for name, there in (("configs", REPO / "configs"), ("toy_data", toy_dir)):
        (root / name).symlink_to(there)
    (root / "notes.txt").write_text("milk")
    (root / "fake.mp4").write_text("milk")
    (root / "fake.parquet").write_text("milk")
    (root / "child.yaml").write_text("base: gone.yaml")
    (root / "results").mkdir()
    (root / "results" / "toy-K4-none.jsonl").write_text("milk\n")
    (root / "begun").mkdir()
    (root / "begun" / "metrics.jsonl").touch()
    (root / "holiday").mkdir()
    rows = pq.read_table(toy_dir / "sft.parquet")
    pq.write_table(rows.slice(0, 0), root / "empty.parquet")
    pq.write_table(rows, root / "moved.parquet")  # its relative paths now lead nowhere
    pq.write_table(pa.table({"question": ["Why?"]}), root / "other.parquet")
    for name in ("no_weights", "torn", "no_template", "qwen25", "no_tokenizer", "no_processor"):
        shutil.copytree(toy_dir / "model", root / name)
    (root / "no_tokenizer" / "tokenizer.json").write_text("milk")
    (root / "no_processor" / "preprocessor_config.json").write_text("milk")
    (root / "no_weights" / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (root / "torn" / "model.safetensors.index.json").write_text(json.dumps(index))
    (root / "no_template" / "chat_template.jinja").rename(root / "no_template" / "chat_template.json")  # for processors
    shape = json.loads((root / "qwen25" / "config.json").read_text())
    (root / "qwen25" / "config.json").write_text(json.dumps(shape | {"model_type": "qwen2_5_vl"}))
    return root


@pytest.fixture
def typed(desk, monkeypatch, capsys):
    """typed("sft.py a.yaml x=1") -> (exit status, all that was said)."""
    monkeypatch.chdir(desk)

    def run(command: str) -> tuple[int, str]:
        script, *arguments = shlex.split(command)
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(REPO / script), run_name="__main__")
        told = "".join(capsys.readouterr())
        return (1, told + end.value.code) if isinstance(end.value.code, str) else (end.value.code, told)

    return run


MISTAKES = [
    # the command line and YAML
    ("a misspelt key", f"{SFT} optim.lrr=1", "optim.lrr = 1: unknown key; did you mean optim.lr?"),
    ("a value of another type", f"{SFT} steps=many", "steps = 'many': must be int, not str"),
    ("no equals sign", f"{SFT} steps 5", "override 'steps': write it as key.sub=value"),
    ("a flag", f"{SFT} --steps=5", ": no such option; write settings as key.sub=value"),
    ("a list that the shell has split", f"{RL} gating=[4, 8]", "quote it whole for the shell, as in 'gating=[4, 8]'"),
    ("a scalar for a list", f"{RL} gating=4", "gating = 4: must be a list, as in [a, b]"),
    ("no such YAML", "sft.py configs/toysft.yaml", "no such file; did you mean configs/toy_sft.yaml?"),
    ("no such base", "sft.py child.yaml", "gone.yaml: no such file, the `base` of child.yaml"),
    ("another script's YAML", "rl.py configs/toy_sft.yaml", "unknown key; RLConfig has group_size, kl"),
    ("an unknown tool", f"{SFT} tools=[crop]", "tools = ['crop']: not among tools.TOOLS: crop_video"),
    # checkpoints
    ("no cold start before RL", "rl.py configs/toy_paragrpo.yaml", "runs/toy/sft/model: neither a folder nor a model on the hub; a training leaves its checkpoint in RUN/model"),
    ("a name that the hub cannot give", f"{SFT} policy.checkpoint=Qwen/Qwen3-VL-2B", "Qwen/Qwen3-VL-2B: neither a folder nor a model on the hub"),
    ("the weights, not their folder", f"{SFT} policy.checkpoint=toy_data/model/model.safetensors", "a checkpoint is a folder, not a file; did you mean toy_data/model?"),
    ("any folder", f"{SFT} policy.checkpoint=holiday", "holiday has no config.json: it is not a Hugging Face checkpoint"),
    ("no weights", f"{RL} policy.checkpoint=no_weights", "no_weights has no model.safetensors: the checkpoint is not whole"),
    ("an interrupted download", f"{RL} policy.checkpoint=torn", "torn has no model-00002-of-00002.safetensors: the checkpoint is not whole"),
    ("a base model", f"{SFT} policy.checkpoint=no_template", "no_template has no chat template, so it is a base model"),
    ("another family", f"{RL} policy.checkpoint=qwen25", "qwen25 is a 'qwen2_5_vl'; this code runs dense Qwen3-VL"),
    ("another family, asked", f"{ASK} --model qwen25", "qwen25 is a 'qwen2_5_vl'; this code runs dense Qwen3-VL"),
    ("another contract", f"{SFT} visual.frame_pixels=65536", "frame_pixels: this run has 65536, the checkpoint 1024"),
    ("no such model to count tokens with", "data.py check toy_data/sft.parquet --model nowhere", "nowhere: neither a folder nor a model on the hub"),
    ("no such model in the reward lab", "rewards.py '<answer>B</answer>' --answer B --model nowhere", "nowhere: neither a folder nor a model on the hub"),
    ("no such model to ask", f"{ASK} --model toy_data/modell", "toy_data/modell: neither a folder nor a model on the hub"),
    # data
    ("no such data", f"{SFT} 'data.sources=[{{path: gone.parquet}}]'", "gone.parquet: no such data file; `python data.py materialize`"),
    ("no such held-out data", f"{SFT} 'val.sources=[{{path: gone.parquet}}]'", "gone.parquet: no such data file"),
    ("another kind of file", f"{SFT} 'data.sources=[{{path: notes.txt}}]'", "notes.txt: expected a .parquet, .jsonl or .json file"),
    ("no parquet inside", f"{SFT} 'data.sources=[{{path: fake.parquet}}]'", "fake.parquet: not a readable parquet file"),
    ("no rows", f"{SFT} 'data.sources=[{{path: empty.parquet}}]'", "no rows in empty.parquet"),
    ("RL rows for SFT", f"{SFT} 'data.sources=[{{path: toy_data/rl.parquet}}]'", "no field `messages`, only prompt, videos, extra_info: SFT rows have it; rows with `prompt` are for rl.py"),
    ("SFT rows for RL", f"{RL} 'data.sources=[{{path: toy_data/sft.parquet}}]'", "no field `prompt`, only messages, agent: RL rows have it; rows with `messages` are for sft.py"),
    ("rows of one's own", f"{RL} 'data.sources=[{{path: other.parquet}}]'", "no field `prompt`, only question"),
    ("moved videos", f"{SFT} 'data.sources=[{{path: moved.parquet}}]'", "mp4: no such file; of the 64 rows that are read first, none can be used. Relative paths start at data.video_root"),
    # RL
    ("a group of one", f"{RL} group_size=1", "group_size = 1: an advantage compares at least 2 episodes"),
    ("greedy sampling", f"{RL} rollout.temperature=0", "greedy episodes of a group are all alike"),
    ("no overview", f"{RL} gating=[0]", "gating or val_frames = [0]: an overview has at least 1 frame"),
    ("servers of both kinds", f"{RL} rollout.gpus=[1] 'rollout.urls=[http://127.0.0.1:1]'", "give one of the two"),
    ("a judge without an address", f"{RL} reward.open_answer=judge", "open_answer = 'judge': needs judge.url and judge.model"),
    ("no http://", f"{RL} rollout.urls=[localhost:30000]", "no server answers at localhost:30000; start it"),
    ("a GPU that trains already", f"{RL} rollout.gpus=[0]", "1 ranks train on GPUs 0 ... 0, so [0] would have to do both"),
    ("prompts over the context", f"{RL} rollout.max_context=64 batch_tasks=1 group_size=2", "all 2 episodes of the first batch failed, such as: EngineError: a prompt of"),
    # the run's folder
    ("a file as run", f"{SFT} run=notes.txt/run", "notes.txt is a file; choose another `run`"),
    # evaluation, report, toy
    ("an unknown split", f"{EVAL} 'splits={{toyy: toy_data}}'", "splits = ['toyy']: there is only videomme"),
    ("a split's folder elsewhere", f"{EVAL} 'splits={{toy: holiday}}'", "holiday: no file test.parquet, where toy has its questions"),
    ("no weights to evaluate", f"{EVAL} checkpoint=no_weights", "no_weights has no model.safetensors"),
    ("a table of nothing", "eval.py table holiday", "no results in holiday: `python eval.py CONFIG` makes them"),
    ("a table of something else", "eval.py table results", "toy-K4-none.jsonl: not a file of results"),
    ("a report on no run", "study/report.py holiday", "no config.yaml and no metrics.jsonl in ['holiday']"),
    ("a page below a file", "study/report.py begun -o notes.txt/page.html", "notes.txt/page.html is the page's template, or lies below a file"),
    ("a file for the toy", "study/toy.py build notes.txt", "notes.txt is a file; name a folder"),
    ("a share above 1", "study/toy.py build new --p-loose 60", "60: must lie in 0 ... 1"),
    # asking
    ("no such video", 'rollout.py "Why?" --model toy_data/model --video gone.mp4', "gone.mp4: cannot be opened (No such file or directory); check the path"),
    ("no video inside", 'rollout.py "Why?" --model toy_data/model --video fake.mp4', "fake.mp4: cannot be decoded"),
    ("an overview of nothing", f"{ASK} --model toy_data/model --k 0", "--k 0: an overview has at least 1 frame"),
    ("a temperature below 0", f"{ASK} --model toy_data/model --temperature -1", "--temperature not negative"),
    ("a trace into nowhere", f"{ASK} --model toy_data/model --trace gone/t.html", "there is no folder gone; make it first"),
    # results
    ("a study that is not there", "study/paradox.py tables --root nowhere", "there is no study in nowhere; `python -m study.paradox study --root nowhere` makes one"),
    ("no seeds", "study/paradox.py study --seeds 0", "--seeds 0 --jobs"),
    ("a run without curves or episodes", "study/report.py gone", "no such run: ['gone']"),
    ("a report of other rows", "study/report.py toy_data/sft.parquet", "neither curves nor episodes in toy_data/sft.parquet"),
    ("a plan of one GPU", "study/bench.py plan configs/paragrpo_2b_1gpu.yaml --gpus 1", "1 GPUs: a split needs 2"),
    ("GPUs of no plan", "study/bench.py --gpus 4", "--gpus 4 is for `plan CONFIG`"),
    ("a config without its folder", "sft.py toy_sft", "did you mean configs/toy_sft.yaml?"),
    ("a kernel for other machines", f"{SFT} policy.attention=varlen", "policy.attention = 'varlen' needs a GPU and bf16"),
    ("bf16 without a GPU", f"{SFT} policy.dtype=bf16", "policy.dtype = 'bf16': training in bf16"),
    ("a torn tokenizer", f"{ASK} --model no_tokenizer", "no_tokenizer: its tokenizer is not readable: "),
    ("a torn processor", f"{ASK} --model no_processor", "no_processor/preprocessor_config.json: not readable: "),
    ("no question", "rollout.py --model toy_data/model --video fake.mp4", "the following arguments are required: question"),
]  # fmt: skip


@pytest.mark.parametrize("command, says", [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES])
def test_a_mistake_is_answered_with_what_to_do_and_leaves_nothing_behind(desk, typed, command, says):
    before = set(desk.rglob("*"))
    trains = command.startswith(("sft.py", "rl.py", "eval.py configs")) and " run=" not in command
    status, told = typed(command + " run=run" * trains)
    assert status and says in told and "Traceback" not in told
    if "first batch" in says:  # that is known only once the run has begun
        shutil.rmtree(desk / "run")
    assert set(desk.rglob("*")) == before


def test_the_exit_status_reaches_the_shell():
    ended = subprocess.run([sys.executable, "eval.py", "table", "nowhere"], cwd=REPO, capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr == "error: nowhere: no such folder; `python eval.py CONFIG` makes it\n"


def test_a_run_goes_on_longer_or_cured_but_not_as_another_one(desk, typed):
    base = f"{SFT} run=once steps=1 batch_rows=2 val=null"
    try:
        assert not typed(base)[0] and (desk / "once" / "model").is_dir()
        for change, named in (("data.seed=1", "data.seed: 0, now 1"), ("batch_rows=4", "batch_rows: 2, now 4")):
            status, told = typed(f"{base} {change}")
            assert status == 1 and f"once/state is of a run with other settings ({named}), so it cannot go on" in told
        assert not typed(f"{base} steps=2 optim.lr=1e-4 decoders=2")[0]
        assert len((desk / "once" / "metrics.jsonl").read_text().splitlines()) == 2
    finally:
        shutil.rmtree(desk / "once", ignore_errors=True)


# ------------------------------------------------------------------------------------------------ the page


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)\n```$", PAGE, re.M | re.S)


def matches(quoted: str, said: str) -> bool:
    """`...` on the page stands for what differs from case to case; line breaks are the page's own."""
    parts = [re.escape(" ".join(part.split())) for part in re.split(r"\s*\.\.\.\s*", quoted)]
    return re.search(".*".join(parts), " ".join(said.split())) is not None


@pytest.mark.parametrize("block", blocks("console"), ids=lambda block: block.splitlines()[0][:60])
def test_the_page_quotes_what_its_commands_say(typed, block):
    command, _, quoted = block.removeprefix("$ python ").partition("\n")
    status, told = typed(command)
    assert status == 1 and matches(quoted, told), told


def said_of_servers(caplog) -> list[str]:
    """One that dies, and one that never serves."""
    said = []
    for life in ("raise SystemExit(3)", "import time; time.sleep(60)"):
        with pytest.raises(EngineError) as error:
            SGLang("", None, gpus=(7,), launch=lambda port, life=life: [sys.executable, "-c", life], start_timeout=1.0)
        said.append(str(error.value))
    return [*said, *(record.getMessage() for record in caplog.records)]


def said_by_a_trainer_that_disagrees() -> list[str]:
    agent = Trajectory([1, 2], [0, 1], [0.0, -1.0], [-1, 0], [], 1, [(1, 2)])
    episode = Episode(Task("t", "", (), "oe", ""), 4, agent)

    class Policy:
        never_sampled = ()

        def __call__(self, rows, temperature):
            return SimpleNamespace(logprobs=torch.tensor([-4.0]))

    with pytest.raises(EngineError) as error:
        self_check(Policy(), [Group(episode.task, 4, [episode])], 1.0, 0.5)
    return [str(error.value)]


def said_of_a_video_that_hangs() -> list[str]:
    worker = video._Worker(timeout=0.3)
    os.kill(worker.process.pid, signal.SIGSTOP)  # as good as a decoder that never returns
    good, reason = worker.ask(("probe", "v.mp4"))
    assert not good
    return [f"v.mp4: {reason}"]


def said_of_a_folder_that_is_taken(monkeypatch, tmp_path) -> list[str]:
    monkeypatch.chdir(tmp_path)
    cfg = RLConfig(run="runs/grpo_8b", policy=PolicyConfig("m"), data=DataConfig((Source("d"),)))
    config.save_run(cfg, cfg.run)
    (tmp_path / cfg.run / "state" / "step-00000010").mkdir(parents=True)
    with pytest.raises(ConfigError) as error:
        checks.check_run(replace(cfg, gating=()))
    return [str(error.value)]


def said_of_small_shared_memory(monkeypatch, capsys, toy_dir) -> list[str]:
    monkeypatch.setattr(rl.shutil, "disk_usage", lambda folder: SimpleNamespace(free=64 << 10))
    rl.snapshot_folder(Path("runs/paragrpo_8b"), toy_dir / "model")
    return capsys.readouterr().out.splitlines()


def said_of_gpus(monkeypatch) -> list[str]:
    """GPU 7 of 8 serves: too many ranks; too few GPUs; no SGLang."""
    said = []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for ranks, gpus in ((8, 8), (7, 4), (7, 8)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        with pytest.raises(ConfigError) as error:
            checks.check_servers(RolloutConfig(gpus=(7,)), ranks)
        said.append(str(error.value))
    return said


def test_the_page_quotes_what_a_node_says(monkeypatch, caplog, capsys, tmp_path, toy_dir):
    said = [
        *said_of_servers(caplog),
        *said_by_a_trainer_that_disagrees(),
        *said_of_a_video_that_hangs(),
        *said_of_small_shared_memory(monkeypatch, capsys, toy_dir),
        *said_of_gpus(monkeypatch),
        *said_of_a_folder_that_is_taken(monkeypatch, tmp_path),
    ]
    assert len(blocks("text")) >= 7
    for quoted in blocks("text"):
        assert any(matches(quoted, message) for message in said), (quoted, said)
