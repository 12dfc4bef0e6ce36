"""Run the project's scripts as processes, alone or as several ranks.

Python takes five seconds of a core to import torch and transformers, so most scripts are forked from a process that has
imported them already. `anew=True` starts a real one."""

import ast
import atexit
import contextlib
import json
import multiprocessing
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path

import yaml

REPO = Path(__file__).resolve().parent.parent
# What a fork may remove, and how pages name it. They may still do so: what they say of it is not checked.
REMOVABLE = {
    "eval.py": r"eval\.py|evals\b|eval/",
    "sft.py": r"sft\.py|sft\.\w|\bsft_|toy_sft",
    "dialogues.py": r"dialogues",
    "study/report.py": r"study[./](?!toy)|paradox",
}
GONE = re.compile("|".join(["(?!)", *(words for file, words in REMOVABLE.items() if not (REPO / file).exists())]))
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
FORKS = multiprocessing.get_context("forkserver")
# Preload nothing of the project itself: the guides' tests run changed copies of it.
MODEL = "transformers.models.qwen3_vl.modeling_qwen3_vl"
FORKS.set_forkserver_preload(["torch.distributed.fsdp", "transformers.models.auto", MODEL, "pyarrow.parquet"])


@cache
def printed_by_node_sh() -> str:
    """Return the commands that node.sh would run."""
    return subprocess.run(["bash", "node.sh", "--print"], cwd=REPO, capture_output=True, text=True, check=True).stdout


def imports_of(file: Path, at_the_top: bool = False) -> set[str]:
    """Return the modules that a file imports, also in functions and the main guard unless only those at its top are asked for."""
    tree = ast.parse(file.read_text("utf-8"))
    found = set()
    for node in tree.body if at_the_top else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    return found


class Forked(FORKS.Process):
    """A script or a function in a forked process, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, command: list[str] | Callable[[], None], folder: Path = REPO, ranks: int = 1, nodes: int = 1):
        super().__init__(daemon=True)
        self.command, self.folder, self.ranks, self.nodes = command, str(folder), ranks, nodes
        self.environment = os.environ | ONE_THREAD
        self.log = tempfile.mkstemp(suffix=".log")[1]
        self.start()

    def run(self) -> None:
        """Run in the forked process as a fresh interpreter would."""
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores SIGINT
        log = os.open(self.log, os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        sys.path.insert(0, self.folder)
        if self.ranks > 1:
            fork_ranks(self.ranks, self.nodes)
        status = 0
        try:
            if callable(self.command):
                self.command()
            elif self.command[0] == "-m":
                sys.argv = self.command[1:]
                runpy.run_module(self.command[1], run_name="__main__", alter_sys=True)
            else:
                sys.argv = self.command
                runpy.run_path(self.command[0], run_name="__main__")
        except SystemExit as end:
            status = end.code
        except BaseException:
            traceback.print_exc()
            status = 1
        # multiprocessing leaves these out. As in an interpreter, the exception and its frames are gone by now: a pool that
        # they hold would never end its threads.
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.exit(status)

    @property
    def returncode(self) -> int | None:
        return self.exitcode

    def poll(self) -> int | None:
        return self.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired(self.command, timeout)
        told = Path(self.log).read_text(encoding="utf-8")
        os.unlink(self.log)
        return told, None


def fork_ranks(world: int, nodes: int = 1) -> None:
    """Fork `world` ranks with torchrun's variables for `nodes` nodes, and return in each. The calling process waits for them
    and exits. If one rank fails, the others are killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(world)}
    ranks, local = set(), world // nodes
    os.environ["LOCAL_WORLD_SIZE"] = str(local)
    for rank in range(world):
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank % local), "GROUP_RANK": str(rank // local)}
        pid = os.fork()
        if pid == 0:
            return
        ranks.add(pid)
    failed = False
    while ranks:
        pid, status = os.wait()
        ranks.remove(pid)
        if status:
            failed = True
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    sys.exit(failed)


def start(script: str, cfg: Path, *overrides: str, ranks: int = 1, anew: bool = False, restarts: int = 0):
    """Start `SCRIPT CFG OVERRIDES...` and return its process. `restarts`: how often a real torchrun may restart its ranks."""
    command = [script, str(cfg), *overrides]
    if not anew:
        return Forked(command, ranks=ranks)
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone"]
        launcher += [f"--nproc_per_node={ranks}", f"--max-restarts={restarts}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*launcher, *command], cwd=REPO, env=os.environ | ONE_THREAD, **pipes)


def finish(process, code: int = 0, seconds: float = 300) -> str:
    """Wait for a process of `start` to exit with this status. Return its output."""
    told, _ = process.communicate(timeout=seconds)
    assert process.returncode == code, told
    return told


def alive(pid: int) -> bool:
    """Return whether the process is running. A zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def children(pid: int) -> list[int]:
    """Return the processes that this one's threads have started. It takes no time in which a run goes on."""
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            found += map(int, file.read_text().split())
    return found


def wait_for(condition: Callable, process=None, seconds: float = 60) -> None:
    """Wait until the condition holds. Fail if it does not within the time or before `process` ends."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.002)


def fake_server(renderer, port: int, fault: str = "") -> list[str]:
    """Return the command that starts a stand-in for an SGLang server."""
    numbers = (port, renderer.image_pad, renderer.contract.cell, renderer.end_of_turn)
    return [sys.executable, str(REPO / "tests" / "fake_sglang.py"), *map(str, numbers), fault]


def write_config(path: Path, toy_dir: Path, rows: str, **changes) -> Path:
    """Write the config of a small run on the toy, whose folder is named after the file."""
    tree = {
        "run": str(path.with_suffix("")),
        "policy": {"checkpoint": str(toy_dir / "model")},
        "data": {"sources": [{"path": str(toy_dir / rows)}]},
        "visual": {"frame_pixels": 1024},
        "optim": {"lr": 1e-3},
        "decoders": 1,
    }
    path.write_text(yaml.safe_dump(tree | changes))
    return path


def rl_config(path: Path, toy_dir: Path, **changes) -> Path:
    small = {"gating": [4, 8], "steps": 6, "batch_tasks": 2, "save_every": 2}
    small["rollout"] = {"max_rounds": 1, "max_new_tokens": 48, "temperature": 1.0, "subagents": {"max_new_tokens": 8}}
    changes["grpo"] = {"group_size": 4} | changes.get("grpo", {})
    return write_config(path, toy_dir, "rl.parquet", **small | changes)


def sft_config(path: Path, toy_dir: Path, **changes) -> Path:
    perception = {"path": str(toy_dir / "perception.parquet"), "loss_weight": 10}
    small = {"steps": 12, "batch_rows": 4, "pack_tokens": 700, "save_every": 3, "kind_weights": {"answer": 5}}
    small["policy"] = {"checkpoint": str(toy_dir / "model"), "freeze": []}
    small["data"] = {"sources": [perception, {"path": str(toy_dir / "sft.parquet")}]}
    small["optim"] = {"lr": 1e-3, "warmup": 0.1, "schedule": "cosine"}
    return write_config(path, toy_dir, "sft.parquet", **small | changes)


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def figures(lines: list[dict]) -> list[dict]:
    """Return metrics without times, memory, servers in use and val_loss (an interrupted run may have no held-out rows)."""
    free = ("val_loss", "peak_memory_gib", "time", "servers")
    return [{k: v for k, v in line.items() if "second" not in k and not k.startswith(free)} for line in lines]
