"""docs/node.md: the metrics that it names are logged (test_docs.py: its commands, files and links). The 8B's configs run on
the toy's model, and stand-ins take the place of its SGLang servers."""

import re
import sys
from functools import partial

import pytest
from scripts import REPO, Forked, finish, metrics
from short_runs import use_stand_ins

import rl
from runtime.script import command_line, run_script

PAGE = (REPO / "docs" / "node.md").read_text("utf-8")


def test_it_shows_the_figures_of_a_step_in_their_order():
    shown = {"rl": rl.SHOWN, "sft": [key for key in pytest.importorskip("sft").SHOWN if key != "val_loss"]}
    for name, keys in shown.items():
        assert re.search(rf"^{name} step \S+{''.join(rf' {key} [.]{{3}}' for key in keys)}$", PAGE, re.M)


def train_beside_stand_ins(*changes: str) -> None:
    use_stand_ins()
    sys.argv = ["rl.py", str(REPO / "configs/paragrpo_8b.yaml"), *changes]
    cfg, _ = command_line(rl.RLConfig, "")
    run_script(rl.main, cfg)


@pytest.mark.slow
def test_the_8bs_configs_run_one_after_the_other_and_log_the_figures_that_it_explains(tmp_path, toy_dir):
    pytest.importorskip("sft")
    small = ["visual.frame_pixels=1024", f"data.video_root={toy_dir}", "decoders=1"]
    command = [str(REPO / "sft.py"), str(REPO / "configs/sft_8b.yaml"), *small, "steps=1", "batch_rows=4"]
    command += [f"data.sources=[{{path: {toy_dir}/sft.parquet}}]", f"policy.checkpoint={toy_dir}/model"]
    assert "done: runs/sft_8b/model" in finish(Forked(command, tmp_path))
    small += [
        f"data.sources=[{{path: {toy_dir}/rl.parquet}}]",
        "grpo.group_size=8",
        "grpo.train_tokens=4096",
        "steps=2",
    ]
    assert "done: runs/paragrpo_8b/model" in finish(Forked(partial(train_beside_stand_ins, *small), tmp_path))

    # The first columns of its tables. mfu needs a GPU, and a random model makes no calls, so it gets no reports.
    logged = metrics(tmp_path / "runs/sft_8b")[0], metrics(tmp_path / "runs/paragrpo_8b")[0]
    for table, row in zip(re.findall(r"^\| metric \|.*?(?=\n\n)", PAGE, re.M | re.S), logged, strict=True):
        named = set(re.findall(r"`([\w/]+)`", "".join(re.findall(r"^\|(.*?)\|", table, re.M))))
        assert named and {name for name in named - row.keys() if not name.startswith("report/")} <= {"mfu"}
