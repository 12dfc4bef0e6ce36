"""The project's scripts as subprocesses, alone or under torchrun."""

import json
import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent


def start(script: str, cfg: Path, *overrides: str, ranks: int = 1, **popen) -> subprocess.Popen:
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*launcher, script, str(cfg), *overrides], cwd=REPO, env=environment, **pipes, **popen)


def finish(process: subprocess.Popen, code: int = 0) -> str:
    told, _ = process.communicate(timeout=300)
    assert process.returncode == code, told
    return told


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
