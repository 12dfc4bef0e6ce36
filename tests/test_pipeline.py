"""node.sh: the same file that a node runs, with the toy's configs, one step and two items."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import ONE_THREAD, REPO

FETCHED = [".venv-node", "data/train", "data/media"]
FETCHED += [f"data/eval/{name}" for name in ("Video-MME", "LongVideoBench", "LVBench", "MLVU_dev", "MMVU")]


def call(folder: Path, *words: str) -> list[str]:
    """Run node.sh. Return the commands that it printed."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | ONE_THREAD | {"PATH": path}
    ended = subprocess.run(["bash", "node.sh", *words], cwd=folder, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    return [
        line
        for line in ended.stdout.splitlines()
        if line.startswith(("python ", "torchrun ", "pip ", "hf ", "unpack "))
    ]


@pytest.mark.slow
def test_the_pipeline_ends_in_tables_and_a_second_call_trains_nothing(tmp_path, toy_dir):
    folder = tmp_path / "node"
    left_out = shutil.ignore_patterns(".*", "runs", "data", "toy_data", "__pycache__")
    shutil.copytree(REPO, folder, ignore=left_out)
    (folder / "toy_data").symlink_to(toy_dir)
    for name in FETCHED:  # nothing can be downloaded here
        (folder / name).mkdir(parents=True)
        for done in (".installed", ".fetched", ".unpacked"):
            (folder / name / done).touch()
    first = call(folder, "tests/toy_node.sh")
    trained = [command.split()[4] for command in first if "torchrun" in command]
    assert len(trained) == 8 and trained[0] == "configs/toy_sft.yaml"
    evaluated = [command for command in first if "eval.py configs" in command]
    assert len(evaluated) == 9 and len(list(folder.glob("runs/toy/eval/*/toy-K4-parallel.jsonl"))) == 8
    assert (folder / "runs/toy/eval/paragrpo/toy-K4-sequential.jsonl").exists()
    again = call(folder, "tests/toy_node.sh")
    assert again == [command for command in first if " eval.py " in command]
