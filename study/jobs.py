"""jobs.py: run the processes of a study, each on its own cores, as soon as the jobs that it needs are done.

    run_jobs(jobs, root)      # ROOT/logs/NAME.log: a job's output; ROOT/done/NAME: the commit at which it succeeded

A job that is done is not run again, so a study can be stopped at any time.
"""

import os
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from runtime.cleanup import kill_group, start_group
from runtime.config import git_commit

# Core-seconds of a job, from the logs of a `make demo` on two quiet cores at commit e78a06b. "start" uses both cores.
# "train" is the mean of plain GRPO (53) and PARA-GRPO (98). If several jobs can start, the first kind goes first.
SECONDS = {"build": 22, "start": 448, "train": 75, "evaluate": 11, "report": 5}
NEWS = 20  # seconds between two progress reports


@dataclass(frozen=True, eq=False)
class Job:
    """One process of a study."""

    kind: str  # a key of SECONDS
    name: str
    command: list[str]  # the arguments of Python
    needs: list[str] = field(default_factory=list)  # names of jobs that must be done first
    cores: int = 1
    environment: dict[str, str] = field(default_factory=dict)  # extra environment variables


def other_commits(root: Path) -> str:
    """Return a sentence that names the other commits of finished jobs, or "" if there are none."""
    made = {marker.read_text() for marker in (root / "done").glob("*")} - {git_commit()}
    return f"{root} has figures of commit {', '.join(sorted(made))}; the code is at {git_commit()}" if made else ""


def run_jobs(jobs: Sequence[Job], root: Path) -> bool:
    """Run all jobs that are not done. After a failure, start no others and return False. Jobs end with this process."""
    done, logs = root / "done", root / "logs"
    done.mkdir(parents=True, exist_ok=True)
    logs.mkdir(exist_ok=True)
    ours = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
    cores = len(os.sched_getaffinity(0))
    waiting = [job for job in jobs if not (done / job.name).exists()]
    waiting.sort(key=lambda job: list(SECONDS).index(job.kind))
    running: dict[Job, subprocess.Popen] = {}
    failed = False
    told = time.monotonic()
    while running or (waiting and not failed):
        # Start every job that can start, unless one has failed.
        while not failed and (job := next_job(waiting, running, cores)):
            waiting.remove(job)
            log = logs / f"{job.name}.log"
            print(f"{job.name}: started, writes {log}", flush=True)
            with log.open("ab") as file:
                command = [sys.executable, *job.command]
                running[job] = start_group(command, stdout=file, stderr=file, env=ours | job.environment)

        # Now and then, print how much is left, and the last line of each log.
        time.sleep(0.2)
        if time.monotonic() - told > NEWS:
            told = time.monotonic()
            left = [*waiting, *running]
            minutes = sum(SECONDS[job.kind] for job in left) / 60 / 2
            so_far = f"{len(jobs) - len(left)} of {len(jobs)} jobs are done"
            print(f"{so_far}; the rest takes about {minutes:.1f} minutes on two quiet cores", flush=True)
            for job in running:
                lines = (logs / f"{job.name}.log").read_text(errors="replace").splitlines()  # a progress bar is many
                print(f"{job.name}: {lines[-1][:100] if lines else ''}", flush=True)

        # Collect the jobs that have ended, and mark those that succeeded.
        for job in [job for job, process in running.items() if process.poll() is not None]:
            process = running.pop(job)
            if process.returncode == 0:
                (done / job.name).write_text(git_commit())
            else:
                failed = True
                print(f"{job.name}: failed, see {logs}/{job.name}.log", flush=True)
            kill_group(process)
    return not failed


def next_job(waiting: Sequence[Job], running: Collection[Job], cores: int) -> Job | None:
    """Return the first job whose needs are done, or None until enough cores are free for it."""
    unfinished = {job.name for job in (*waiting, *running)}
    busy = sum(job.cores for job in running)
    for job in waiting:
        if not unfinished.intersection(job.needs):
            return job if busy + job.cores <= cores or not running else None
    return None
