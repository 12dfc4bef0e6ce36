"""A fork that removes a room keeps the tests of what remains.

The rule, as in CONTRIBUTING.md: with a file go the files that import it at their top, of tests/ too, and so on."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import REPO, imports_of

# The tests that every fork must keep. They run in it.
METHOD = ["docs", "grpo", "house", "metrics", "one_step", "rewards", "rollout", "tools"]
EVALS = ["eval.py", *(f"evals/{path.name}" for path in (REPO / "evals").glob("*.py"))]
STUDY = [f"study/{path.name}" for path in (REPO / "study").glob("[!_]*.py") if path.name != "toy.py"]


def remove(root: Path, files: list[str]) -> None:
    """Delete these files, and those that import a deleted one at their top, until none does."""
    for name in files:
        (root / name).unlink()
    gone = {".".join(Path(name).with_suffix("").parts) for name in files}
    while True:
        needy = [file for file in root.rglob("*.py") if imports_of(file, at_the_top=True) & gone]
        if not needy:
            return
        for file in needy:
            file.unlink()
            parts = file.relative_to(root).with_suffix("").parts
            gone.add(".".join(parts[1:] if parts[0] == "tests" else parts))


@pytest.mark.slow
@pytest.mark.parametrize("removed", [EVALS, STUDY, ["sft.py", "dialogues.py"]], ids=["evals", "study", "sft"])
def test_a_fork_without_a_room_collects_what_remains_and_the_methods_tests_pass(tmp_path, removed):
    if not all((REPO / file).exists() for file in removed):
        pytest.skip("this fork has removed it")
    root = tmp_path / "fork"
    shutil.copytree(REPO, root, ignore=shutil.ignore_patterns(".git", ".venv*", ".qwen", "runs", "data", "__pycache__"))
    remove(root, removed)
    assert {f"test_{name}.py" for name in METHOD} <= {path.name for path in root.glob("tests/*.py")}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    files = [f"tests/test_{name}.py" for name in METHOD]
    for words in (["--collect-only", "-qq"], files):
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words]
        ended = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout[-3000:]
