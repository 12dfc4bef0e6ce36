"""Do the tests notice when the method is broken? Each mutant of mutants.yaml breaks one thing in a copy of the tree.

    python tests/mutants.py                # `make mutants`: all of them -> results/mutants.md
    python tests/mutants.py grpo anchor    # only those whose file or description has one of these words

A mutant is killed if a test fails that passes without it. First the tests that it names run (`by`); if they pass, all fast
tests of its file. A mutant whose old text does not stand exactly once in its file is refused: mend mutants.yaml, too.
Verdicts are kept in runs/mutants.jsonl as long as the mutant and its file stay as they are; survivors are tried again.

Every mutant runs in a process of its own, forked from this one, which has imported torch and nothing of the project.
"""

import contextlib
import functools
import hashlib
import importlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
os.environ["PYTEST_XDIST_WORKER"] = "mutants"  # so that conftest.build_once builds the toy once for all of them

import pytest
import yaml

REPO = Path(__file__).resolve().parent.parent
KEPT, RESULT = REPO / "runs" / "mutants.jsonl", REPO / "results" / "mutants.md"
NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", ".qwen", "runs", "toy_data", "*cache*", ".hypothesis")
PRELOAD = [  # what every forked process would import, but for the project
    "hypothesis", "_hypothesis_pytestplugin", "requests", "av", "pyarrow.parquet", "torch.distributed.fsdp",
    "torch.distributed.checkpoint", "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3_vl.modeling_qwen3_vl", "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl",
]  # fmt: skip
OPTIONS = ["-x", "-q", "--tb=line", "--assert=plain", "-m", "not slow and not sglang and not qwen"]
OPTIONS += ["-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:anyio"]
SECONDS = 600  # a mutant whose tests take longer counts as killed
TIMES = itertools.count(1)


@dataclass(frozen=True)
class Mutant:
    """One small change that some test must notice."""

    file: str
    tests: list[str]  # test files
    breaks: str
    old: str
    new: str
    by: str  # -k: the tests that should kill it

    @functools.cached_property
    def key(self) -> str:
        return hashlib.sha256(repr((self.old, self.new, (REPO / self.file).read_text())).encode()).hexdigest()


def read_mutants() -> list[Mutant]:
    """Read all mutants; refuse those whose place in the code is gone or is no longer one."""
    found, wrong = [], []
    for file, room in yaml.safe_load((REPO / "tests" / "mutants.yaml").read_text()).items():
        text = (REPO / file).read_text()
        for fields in room["mutants"]:
            mutant = Mutant(**{"file": file, "tests": room["tests"], **fields})
            found.append(mutant)
            if text.count(mutant.old) == 1:
                compile(text.replace(mutant.old, mutant.new), file, "exec")
            else:
                wrong.append(f"{file}: {mutant.breaks}: found {text.count(mutant.old)} times: {mutant.old!r}")
    if wrong:
        sys.exit("\n".join(["error: the old text of a mutant must stand in its file exactly once:", *wrong]))
    return found


def run_tests(tree: Path, *arguments: str, seconds: float = SECONDS) -> tuple[str, str]:
    """Run pytest on the copy; return passed | failed | too long | none, and the test that failed."""
    child = os.fork()
    if child == 0:
        os.setsid()
        output = os.open(tree.parent / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(tree)
        sys.path[0] = str(tree)
        os._exit(pytest.main([*OPTIONS, f"--basetemp={tree.parent}/toy/run", *arguments]))

    started, done, status = time.monotonic(), 0, 0
    while not done and time.monotonic() - started < seconds:
        time.sleep(0.05)
        done, status = os.waitpid(child, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):  # it, or what it has left behind
        os.killpg(child, signal.SIGKILL)
    if not done:
        os.waitpid(child, 0)
        return "too long", ""
    told = (tree.parent / "log").read_text(errors="replace")
    verdict = {0: "passed", 1: "failed", 5: "none"}.get(os.waitstatus_to_exitcode(status))
    if verdict is None:  # the tests could not even be collected
        sys.exit(f"error: pytest ended with status {status}:\n{told[-3000:]}")
    failed = [line.split()[1] for line in told.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return verdict, "".join(failed[:1]).partition("[")[0]


def try_mutant(mutant: Mutant, tree: Path, *chosen: str) -> dict:
    """Apply a mutant to the copy, run the chosen ones of its tests, and put the file back."""
    path = tree / mutant.file
    whole = path.read_text()
    write(path, whole.replace(mutant.old, mutant.new))
    verdict, test = run_tests(tree, *(f"tests/{name}" for name in mutant.tests), *chosen)
    write(path, whole)
    return {"key": mutant.key, "verdict": verdict, "test": test}


def write(path: Path, text: str) -> None:
    """Write a file with a time of its own, or Python might take an earlier text's bytecode for this one's."""
    path.write_text(text)
    os.utime(path, times=(next(TIMES), next(TIMES)))


def report(mutants: list[Mutant], verdicts: dict[str, dict]) -> str:
    """Return results/mutants.md."""
    lived = [m for m in mutants if verdicts[m.key]["verdict"] == "passed"]
    slow = [m for m in mutants if verdicts[m.key]["verdict"] == "too long"]
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=REPO, text=True).strip()
    dead = len(mutants) - len(lived)
    lines = ["# Mutants", "", "Each breaks one thing; it is killed if a fast test fails that passes without it.", ""]
    lines += [f"**{dead} of {len(mutants)} killed ({dead / len(mutants):.1%})**: `make mutants` at {commit}.", ""]
    lines += ["| file | killed | of |", "|---|---|---|"]
    for file in dict.fromkeys(m.file for m in mutants):
        own = [m for m in mutants if m.file == file]
        lines.append(f"| `{file}` | {len(own) - sum(m in lived for m in own)} | {len(own)} |")
    lines += ["", "What lived:" if lived else "None lived.", ""]
    lines += [f"- `{m.file}`: {m.breaks}" for m in lived]
    lines += [f"- `{m.file}`: {m.breaks}: killed, because its tests took more than {SECONDS} s." for m in slow]
    return "\n".join(lines).strip() + "\n"


def main(words: list[str]) -> None:
    mutants = read_mutants()
    KEPT.parent.mkdir(exist_ok=True)
    lines = KEPT.read_text().splitlines() if KEPT.exists() else []
    verdicts = {line["key"]: line for line in map(json.loads, lines)}
    chosen = [m for m in mutants if not words or any(word in f"{m.file}: {m.breaks}" for word in words)]
    todo = [m for m in chosen if m.key not in verdicts or verdicts[m.key]["verdict"] == "passed"]

    for name in PRELOAD:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, KEPT.open("a") as kept:
        tree = Path(folder) / "tree"
        shutil.copytree(REPO, tree, ignore=NOT_COPIED)
        (Path(folder) / "toy").mkdir()
        run_tests(tree, "tests/test_data.py", "-k", "k_frames_asked")  # builds the toy, without a mutant
        for narrowly in (True, False):  # by the tests that it names; those that live, by all tests of their file
            for i, mutant in enumerate(todo, 1):
                found = verdicts[mutant.key] = try_mutant(mutant, tree, *(["-k", mutant.by] if narrowly else []))
                print(f"{i}/{len(todo)} {found['verdict']}: {mutant.file}: {mutant.breaks} {found['test']}", flush=True)
                if found["verdict"] in ("failed", "too long") or not narrowly:
                    kept.write(json.dumps(found) + "\n")
                    kept.flush()
            todo = [m for m in todo if verdicts[m.key]["verdict"] in ("passed", "none")]
        # A test that fails without a mutant, too, kills nothing.
        killers = sorted({verdicts[m.key]["test"] for m in chosen} - {""})
        verdict, test = run_tests(tree, *killers, seconds=4 * SECONDS)
        if verdict != "passed":
            sys.exit(f"error: {test} fails without a mutant, too ({verdict})")
    if not words:
        RESULT.write_text(report(mutants, verdicts))


if __name__ == "__main__":
    main(sys.argv[1:])
