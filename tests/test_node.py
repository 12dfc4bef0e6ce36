"""docs/node.md: its commands are commands, and what it quotes is what the scripts print.

No GPU is here, so the 8B's configs run on the toy's model, and stand-ins take the place of its SGLang servers."""

import errno
import os
import re
import shlex
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from scripts import REPO, Forked, fake_server, finish, metrics
from test_mistakes import matches

import rl
import sft
from eval import EvalConfig
from runtime import config, distributed, doctor, plan, servers
from runtime.contract import Renderer, VisualContract, load_tokenizer
from runtime.engine import EngineError

PAGE = (REPO / "docs" / "node.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)\n```$", PAGE, re.M | re.S)
COMMANDS = [line.partition("  #")[0] for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]
QUOTES = [text for kind, text in BLOCKS if kind == "text"]
CONFIGS = {"sft.py": sft.SFTConfig, "rl.py": rl.RLConfig, "eval.py": EvalConfig}


def assert_quoted(told: str, *openings: str) -> None:
    """Compare what was said with the page's lines that begin so."""
    lines = [line for text in QUOTES for line in text.splitlines()]
    for opening in openings:
        quoted = [line for line in lines if line.startswith(opening)]
        assert quoted, f"the page no longer says {opening!r}"
        for line in quoted:
            assert matches(line, told), f"{line}\n---\n{told}"


def test_its_commands_are_commands():
    for command in COMMANDS:
        script = re.search(r"(?:python|torchrun)(?: --\S+)* (\w+\.py)((?: \S+)*)", command)
        if not script:
            assert re.search(r"pip install|hf download|make test-gpu", command), command
            continue
        name, rest = script[1], shlex.split(script[2])
        assert (REPO / name).is_file()
        if name in CONFIGS and rest[0] != "table":
            overrides = [word for word in rest[1:] if "=" in word and not word.startswith("--")]
            config.load(CONFIGS[name], REPO / rest[0], overrides)
    assert len(COMMANDS) > 12


def test_the_files_and_headings_that_it_names_are_there():
    paths = re.findall(r"\b(?:configs|docs|tests)/[\w/.]+\.(?:yaml|md|py)", PAGE)
    paths += [f"configs/{name}.yaml" for name in re.findall(r"`(\w+_(?:8b|2b)\w*)`", PAGE)]
    assert len(paths) > 10 and all((REPO / path).is_file() for path in paths)
    for name, heading in re.findall(r"\]\((\w+\.md)#?([\w-]*)\)", PAGE):
        headings = re.findall(r"^## (.*)$", (REPO / "docs" / name).read_text("utf-8"), re.M)
        assert not heading or heading in [text.lower().replace(" ", "-") for text in headings]


def test_it_shows_the_figures_of_a_step_in_their_order():
    for name, shown in (("sft", [key for key in sft.SHOWN if key != "val_loss"]), ("rl", rl.SHOWN)):
        [line] = [line for text in QUOTES for line in text.splitlines() if line.startswith(f"{name} step")]
        assert line.split("/", 1)[1].split()[1:] == [word for key in shown for word in (key, "...")]


def test_its_plans_are_those_of_the_dry_runs(toy_dir, monkeypatch, capsys):
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda folder: SimpleNamespace(free=2 << 40))
    rows = f"data.sources=[{{path: {toy_dir}/sft.parquet}}]"
    sft.dry_run(config.load(sft.SFTConfig, REPO / "configs/sft_8b.yaml", [rows]))
    rl.check_memory(config.load(rl.RLConfig, REPO / "configs/paragrpo_8b.yaml"))
    told = capsys.readouterr().out
    plans = [text for text in QUOTES if text.startswith("training, each of")]
    assert len(plans) == 2 and all(matches(text, told) for text in plans), told


def test_it_quotes_how_a_server_a_disk_and_shared_memory_fail(tmp_path, toy_dir, toy_renderer, monkeypatch, capsys):
    monkeypatch.setattr(servers.tempfile, "gettempdir", lambda: "/tmp")
    with pytest.raises(EngineError) as died:
        servers.SGLang("", toy_renderer, gpus=[5], launch=lambda port: ["false"], patience=0.05)
    assert_quoted(f"error: {died.value}", "error: the server on GPU 5")

    def fill(cfg) -> None:
        raise OSError(errno.ENOSPC, "the disk is full", "runs/paragrpo_8b/state/step-00000030")

    with pytest.raises(SystemExit) as full:
        config.run_script(fill, None)
    assert_quoted(full.value.code, "error: runs/paragrpo_8b/state")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(distributed.shutil, "disk_usage", lambda folder: SimpleNamespace(free=64 << 10))
    with distributed.snapshot_folder("runs/paragrpo_8b", toy_dir / "model") as snapshot:
        assert snapshot.absolute().is_relative_to(tmp_path / "runs/paragrpo_8b/snapshot")
    assert_quoted(capsys.readouterr().out, "/dev/shm has no room")


def test_it_quotes_materialize(tmp_path, toy_dir):
    (tmp_path / "PARQUETS").mkdir()
    (tmp_path / "MEDIA").mkdir()
    shutil.copy(toy_dir / "sft.parquet", tmp_path / "PARQUETS" / "paravt_sft_charades_12k4.parquet")
    command = next(command for command in COMMANDS if "materialize" in command)
    told = finish(Forked(shlex.split(command)[1:], tmp_path), code=1)
    assert_quoted(told, "data/train/paravt_sft_charades", "... media files")


def train_beside_stand_ins(toy: Path) -> None:
    """Run paragrpo_8b.yaml: a server is killed after the first step, and Ctrl-C pressed after the second."""
    renderer = Renderer(load_tokenizer("runs/sft_8b/model"), VisualContract(frame_pixels=1024))
    servers.server_command = lambda checkpoint, _, port, extra=(): fake_server(renderer, port)
    rl.check_servers = lambda *_: None
    doctor.GAP_LIMIT = 100  # the stand-ins' log-probs are no model's
    publish = rl.Sampler.publish

    def watched(sampler, policy, version):
        engine = sampler.engine
        if version == 1 and engine.version == 0:
            process = engine._servers[1].process
            os.killpg(process.pid, signal.SIGKILL)
            while not engine.restarts:
                time.sleep(0.01)
        if version == 2:
            os.kill(os.getpid(), signal.SIGINT)
        publish(sampler, policy, version)

    rl.Sampler.publish = watched
    sys.argv = ["rl.py", str(REPO / "configs/paragrpo_8b.yaml"), "visual.frame_pixels=1024", "save_every=1"]
    sys.argv += [f"data.sources=[{{path: {toy}/rl.parquet}}]", "decoders=1", "group_size=8", "train_tokens=4096"]
    cfg, _ = config.command_line(rl.RLConfig, "")
    config.run_script(rl.main, cfg, EngineError)


@pytest.mark.slow
def test_it_quotes_what_runs_print_and_names_figures_that_they_log(tmp_path, toy_dir):
    rows = f"data.sources=[{{path: {toy_dir}/sft.parquet}}]"
    command = [str(REPO / "sft.py"), str(REPO / "configs/sft_8b.yaml"), rows, "visual.frame_pixels=1024"]
    command += [f"policy.checkpoint={toy_dir}/model", "steps=1", "batch_rows=4", "decoders=1"]
    told = finish(Forked(command, tmp_path)).replace(" 1/1 ", " 1/500 ")
    assert_quoted(told, "runs/sft_8b: starts anew", "sft step 1/500", "done: runs/sft_8b/model")

    told = finish(Forked(partial(train_beside_stand_ins, toy_dir), tmp_path), code=1)
    assert_quoted(told, "runs/paragrpo_8b: starts", "SGLang starts", "sampling the first", "trainer and engine")
    assert_quoted(told, "rl step 1/54", "restarting", "interrupted.")
    told = finish(Forked(partial(train_beside_stand_ins, toy_dir), tmp_path), code=1)
    assert_quoted(told, "runs/paragrpo_8b: goes on")

    # The first columns of its tables of figures; mfu needs a GPU, and a batch need not draw every K.
    [sft_row], [rl_row] = metrics(tmp_path / "runs/sft_8b"), metrics(tmp_path / "runs/paragrpo_8b")[:1]
    for table, row in zip(re.findall(r"^\| figure \|.*?(?=\n\n)", PAGE, re.M | re.S), (sft_row, rl_row), strict=True):
        named = re.findall(r"`([\w/=]+)`", "".join(line.split("|")[1] for line in table.splitlines()))
        assert len(named) > 8
        for name in named:
            assert name in row or name == "mfu" or name.startswith("kappa/K="), name
