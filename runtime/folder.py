"""folder.py: the folder of a run: who may write into it, what may change when a run resumes, and its record.

    require_folder(cfg)                         # refuse a folder that holds another run
    with hold_folder(cfg, source):              # lock it, and make sure that all nodes see it
        save_run(cfg, cfg.run)                  # config.yaml and run.json

Until the weights are loaded, a run writes only the lock and, with servers, their logs.
"""

import contextlib
import fcntl
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from runtime.checkpoints import weights_digest
from runtime.config import ConfigError, differences, load
from runtime.distributed import barrier, gather, print0, rank, world_size
from runtime.lines import write_whole
from runtime.visual import read_json


@dataclass(frozen=True, kw_only=True)
class ScriptConfig:
    """The config of sft.py, rl.py or eval.py."""

    run: str
    """Folder for all output. If it holds states of this run, training resumes from the newest."""


# ------------------------------------------------------------------------------------------------ what may change

RESULTS = "*-K*-*.jsonl"  # eval.py's files in RUN: SPLIT-K64-ARM.jsonl

# Settings that may change when a run resumes. A name without a dot stands for the whole section. In data.sources only the
# folders may change.
MAY_CHANGE = {
    # how long and where it runs
    "run", "steps", "save_every", "keep", "export_every", "plan", "data.video_root",
    # how fast it runs
    "decoders", "grpo.train_tokens",
    "policy.family", "policy.dtype", "policy.activation_checkpointing", "policy.compile",
    "rollout.server_gpus", "rollout.urls", "rollout.tensor_parallel", "rollout.server_args", "rollout.concurrency",
    "rollout.call_timeout", "rollout.max_batch_tokens",
    # what it reports
    "eval_every", "val", "val_tasks", "val_frames", "dump_groups", "report_to", "save_episodes",
    # the remedies for bad steps and rows
    "optim", "data.max_bad_fraction",
    # access to an API
    "api.key", "api.timeout", "grading.judge.url", "grading.judge.key", "grading.judge.timeout",
    "reward.judge.url", "reward.judge.key", "reward.judge.timeout",
}  # fmt: skip
# Settings that add results to an evaluation.
MAY_GROW = {"splits", "frames", "arms", "limit"}


def require_folder(cfg: ScriptConfig, checkpoint: str = "") -> None:
    """Refuse a run's folder that holds another run or this run's starting checkpoint, or whose name a shell would have expanded."""
    if cfg.run.startswith("~") or "$" in cfg.run:
        raise ConfigError(f"run = {cfg.run!r}: write the whole path, because nothing expands ~ and $ in it")
    if checkpoint:
        refuse_replaced_checkpoint(Path(cfg.run), Path(checkpoint))
    refuse_other_run(cfg)


def refuse_other_run(cfg: ScriptConfig) -> None:
    """Refuse a run folder that holds a model, states or results of another run. Print the settings that may change."""
    run = Path(cfg.run)
    if not any((run / "state").glob("step-*")) and not (run / "model").exists() and not any(run.glob(RESULTS)):
        return  # nothing can be overwritten
    try:  # a setting that is newer than the run had its default value there
        before = load(type(cfg), run / "config.yaml")
    except ConfigError as error:
        rule = "choose another `run`, or resume with the commit in its run.json"
        raise ConfigError(f"{run} is of another script, or of another version of this code ({error}): {rule}") from None
    changed = []
    allowed = []
    for key, text in differences(comparable(before), comparable(cfg)).items():
        if {key, key.partition(".")[0]} & (MAY_CHANGE | MAY_GROW):
            allowed.append(text)
        else:
            changed.append(text)
    if allowed:
        print0(f"{run} has other settings than before: {'; '.join(allowed)}")
    if changed:
        raise ConfigError(
            f"{run} belongs to a run with other settings ({'; '.join(changed)}), so it cannot resume: "
            "choose another `run`, or delete the folder"
        )


def comparable(cfg: ScriptConfig) -> dict:
    """Return a config as nested mappings, without the folders of a training's data files, which may move."""
    tree = asdict(cfg)
    for source in tree.get("data", {}).get("sources", ()):
        source["path"] = Path(source["path"]).name
    return tree


def refuse_replaced_checkpoint(run: Path, checkpoint: Path) -> None:
    """Refuse a run whose result would replace the checkpoint that it starts from, even under another name."""
    if not checkpoint.is_dir():
        return
    start = checkpoint.resolve()
    if start.is_relative_to(run.resolve()) or start == (run / "model").resolve():
        raise ConfigError(
            f"policy.checkpoint = {str(checkpoint)!r} is in the folder of run = {str(run)!r}, whose files a run replaces; "
            "choose another `run`"
        )


def refuse_other_weights(run: Path, source: Path, setting: str) -> None:
    """Refuse a checkpoint that is not the one that the run began with. `setting` names it: "checkpoint = 'runs/x/model'"."""
    began = (read_json(run / "run.json") or {}).get("checkpoint")
    if began and began != weights_digest(source):
        raise ConfigError(f"{setting} has changed since {run} started from it: restore it, or choose another `run`")


# ------------------------------------------------------------------------------------------------ the lock


@contextlib.contextmanager
def hold_folder(cfg: ScriptConfig, source: Path) -> Iterator[None]:
    """Lock the folder for the length of the block. Refuse a folder that another process holds, and nodes that see another folder
    than the first one does."""
    with contextlib.ExitStack() as held:
        if rank() == 0:
            held.enter_context(only_run_in(Path(cfg.run)))
        if world_size() > 1:
            barrier()  # the others read the lock
            refuse_unlike_nodes(cfg, source)
        yield


@contextlib.contextmanager
def only_run_in(run: Path) -> Iterator[None]:
    """Hold RUN/.lock for the length of the block; the kernel frees it even after kill -9. Refuse a folder that another process holds."""
    run.mkdir(parents=True, exist_ok=True)
    with open(run / ".lock", "a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise ConfigError(
                f"run = {str(run)!r}: {lock.read()} is using this folder; wait, or choose another `run`"
            ) from None
        except OSError as error:  # some shared file systems have no locks
            print(f"{run}/.lock: {error}; make sure that no other run uses this folder")
        lock.truncate(0)
        print(f"process {os.getpid()} on {os.uname().nodename}", end="", file=lock, flush=True)
        os.fsync(lock.fileno())  # the other nodes read it
        yield


def refuse_unlike_nodes(cfg: ScriptConfig, start: Path) -> None:
    """Refuse ranks that see another run folder than rank 0, or have other settings, code or another cold start."""
    lock = Path(cfg.run) / ".lock"
    mine: dict[str, object] = {str(lock): lock.exists() and lock.read_text(), "config": asdict(cfg)}
    mine |= {"commit": git_commit(), "checkpoint": weights_digest(start)}
    first, *others = gather(mine)
    for number, theirs in enumerate(others, 1):
        changed = differences(first, theirs)
        if changed:
            raise ConfigError(
                f"rank {number} differs from rank 0 ({'; '.join(changed.values())}): "
                "start all nodes alike, with one `run` folder that they share"
            )


# ------------------------------------------------------------------------------------------------ the record of a run


def save_run(cfg: ScriptConfig, run_dir: str | Path, **more: object) -> None:
    """Write what is needed to repeat the run: config.yaml and run.json. `more` goes into run.json."""
    run_dir = Path(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    # JSON turns tuples into lists, so the file is plain YAML that `load` reads back.
    text = yaml.safe_dump(json.loads(json.dumps(asdict(cfg))), sort_keys=False)
    write_whole(run_dir / "config.yaml", text)  # `refuse_other_run` reads it before a run resumes
    # A run that continues with other code keeps the commits with which it began.
    path = run_dir / "run.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    commits = before.get("commits", [])
    commit = git_commit()
    if commits[-1:] != [commit]:
        commits.append(commit)
    packages = {package.name: package.version for package in importlib.metadata.distributions()}
    run = {"command": sys.argv, "commits": commits, "python": sys.version, **more, "packages": packages}
    write_whole(path, json.dumps(run, indent=1))


def git_commit() -> str:
    """Return the commit that is checked out, with `+` when files (but results) differ from it, or "unknown"."""
    git = ["git", "-C", str(Path(__file__).parent.parent)]
    try:
        commit = subprocess.check_output(
            [*git, "rev-parse", "--short=12", "HEAD"], stderr=subprocess.DEVNULL, text=True
        )
        changed = subprocess.check_output([*git, "status", "--porcelain", "-uno", "--", ".", ":!results"])
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.strip() + ("+" if changed else "")
