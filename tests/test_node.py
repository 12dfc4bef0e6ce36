"""docs/node.md: the metrics that it names are logged (test_docs.py: its commands, files and links). The 8B's configs run on
the toy's model, and stand-ins take the place of its SGLang servers."""

import os
import re
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
from scripts import REPO, Forked, fake_server, finish, metrics

import rl
from runtime import open_engine
from runtime.render import Renderer, load_tokenizer
from runtime.script import command_line, run_script
from runtime.visual import VisualContract
from runtime.weights import WeightSync

PAGE = (REPO / "docs" / "node.md").read_text("utf-8")


def test_it_shows_the_figures_of_a_step_in_their_order():
    shown = {"rl": rl.SHOWN, "sft": [key for key in pytest.importorskip("sft").SHOWN if key != "val_loss"]}
    for name, keys in shown.items():
        assert re.search(rf"^{name} step \S+{''.join(rf' {key} [.]{{3}}' for key in keys)}$", PAGE, re.M)


def train_beside_stand_ins(toy: Path) -> None:
    """Run paragrpo_8b.yaml: a server is killed after the first step, and Ctrl-C pressed after the second."""
    renderer = Renderer(load_tokenizer("runs/sft_8b/model"), VisualContract(frame_pixels=1024))
    open_engine.server_command = lambda checkpoint, _, port, extra=(): fake_server(renderer, port)
    rl.require_servers = lambda *_: None
    rl.GAP_LIMIT = 100  # the stand-ins' log-probs are no model's
    publish = WeightSync.publish

    def disturbed(weights, version):
        engine = weights.engine
        if version == 1 and engine.version == 0:
            os.killpg(engine.servers[1].process.pid, signal.SIGKILL)
        if version == 2:
            os.kill(os.getpid(), signal.SIGINT)
        publish(weights, version)

    WeightSync.publish = disturbed
    sys.argv = ["rl.py", str(REPO / "configs/paragrpo_8b.yaml"), "visual.frame_pixels=1024", "save_every=1"]
    sys.argv += [f"data.sources=[{{path: {toy}/rl.parquet}}]", f"data.video_root={toy}", "decoders=1"]
    sys.argv += ["grpo.group_size=8", "grpo.train_tokens=4096"]
    cfg, _ = command_line(rl.RLConfig, "")
    run_script(rl.main, cfg)


@pytest.mark.slow
def test_the_8bs_configs_run_go_on_and_log_the_figures_that_it_explains(tmp_path, toy_dir):
    pytest.importorskip("sft")
    command = [str(REPO / "sft.py"), str(REPO / "configs/sft_8b.yaml"), "visual.frame_pixels=1024"]
    command += [f"data.sources=[{{path: {toy_dir}/sft.parquet}}]", f"data.video_root={toy_dir}"]
    command += [f"policy.checkpoint={toy_dir}/model", "steps=1", "batch_rows=4", "decoders=1"]
    assert "done: runs/sft_8b/model" in finish(Forked(command, tmp_path))
    told = finish(Forked(partial(train_beside_stand_ins, toy_dir), tmp_path), code=1)
    assert "servers left: 3, because the server on GPU " in told and "interrupted. The same command resumes" in told
    told = finish(Forked(partial(train_beside_stand_ins, toy_dir), tmp_path), code=1)
    assert "runs/paragrpo_8b: resumes after step" in told

    # The first columns of its tables. mfu needs a GPU, and a random model makes no calls, so it gets no reports.
    logged = metrics(tmp_path / "runs/sft_8b")[0], metrics(tmp_path / "runs/paragrpo_8b")[0]
    for table, row in zip(re.findall(r"^\| metric \|.*?(?=\n\n)", PAGE, re.M | re.S), logged, strict=True):
        named = set(re.findall(r"`([\w/]+)`", "".join(re.findall(r"^\|(.*?)\|", table, re.M))))
        assert named and {name for name in named - row.keys() if not name.startswith("report/")} <= {"mfu"}
