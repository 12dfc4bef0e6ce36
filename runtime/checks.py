"""checks.py: refuse what cannot work before a model is loaded and before anything is written.

Other checks live where their facts are: the config dataclasses refuse values that contradict each other, dataset.py refuses
rows, plan.py refuses models that do not fit, and run.self_check compares engine and trainer once a run has begun.
"""

import contextlib
import fcntl
import importlib.util
import json
import os
import shutil
import socket
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
import torch
from tqdm import tqdm

from episode import RecordError
from runtime.checkpoints import find_checkpoint, on_the_hub, read_config, saved_step, weights_digest
from runtime.config import ConfigError, differences, git_commit, load
from runtime.dataset import DataError, Dataset, RowError, Rows, check_rows, row_errors
from runtime.distributed import barrier, gather, print0, rank
from runtime.engine import EngineError, EngineLost
from runtime.render import Renderer, load_tokenizer
from runtime.servers import ask
from runtime.video import Videos
from runtime.visual import ContractError, read_json

# Errors that a user can fix: they are shown as one sentence, without a traceback.
USER_ERRORS = (ConfigError, ContractError, DataError, RecordError, EngineError, EngineLost, FileNotFoundError)
# Settings that may change when a run resumes: how long, where and how fast it runs, what it reports, and the remedies for bad
# steps and rows. A name without a dot stands for the whole section. In data.sources only the folders may change.
MAY_CHANGE = {
    "run", "steps", "save_every", "keep", "export_every", "decoders", "plan", "grpo.train_tokens", "pack_tokens",
    "policy.family", "policy.dtype", "policy.activation_checkpointing", "policy.logit_chunk",
    "rollout.server_gpus", "rollout.urls", "rollout.tensor_parallel", "rollout.server_args", "rollout.concurrency",
    "rollout.call_timeout", "rollout.max_batch_tokens", "eval_every", "val", "val_tasks", "val_frames", "dump_groups",
    "report_to", "data.video_root", "data.max_bad_fraction", "optim",
    "save_episodes", "api.key", "api.timeout", "grading.judge.url", "grading.judge.key", "grading.judge.timeout",
}  # fmt: skip
# Settings that add results to an evaluation.
MAY_GROW = {"splits", "frames", "arms", "limit"}
RESULTS = "*-K*-*.jsonl"  # eval.py's files in RUN: SPLIT-K64-ARM.jsonl
SECONDS_TO_FREE = 60.0  # within this time, a server that has just been killed frees its GPU's memory


def inspect(
    cfg: Any, parse: Callable, check_hardware: Callable[[Any, bool], None], dry: bool = False
) -> tuple[Path | None, Renderer | None]:
    """Refuse a training that cannot work, before anything is written or loaded. Return the checkpoint's folder and renderer; a
    dry run downloads none. `check_hardware` is the script's own check of memory and servers: it prints the memory plan."""
    if cfg.prompts.changed:
        print0(f"  note    prompts: not ours: {', '.join(cfg.prompts.changed)}")
    check_hardware(cfg, dry)
    check_start(Path(cfg.run), Path(cfg.policy.checkpoint))
    check_run(cfg)
    passed(f"run: {cfg.run}", dry)
    check_rows(parse, cfg.data, cfg.val)
    passed(f"data: {Dataset(cfg.data, parse).total} rows", dry)

    # The checkpoint comes last: before its training, a dry run shows all the rest.
    if dry and on_the_hub(cfg.policy.checkpoint):
        print0(f"  note    checkpoint: {cfg.policy.checkpoint} was not looked up; the run fetches it from the hub")
        return None, None
    source, renderer = check_checkpoint(cfg)
    passed(f"checkpoint: {source}", dry)
    return source, renderer


def passed(check: str, dry: bool) -> None:
    """Tell, in a dry run, that a check has passed."""
    if dry:
        print(f"  ok      {check}")


def work_of(
    args: Namespace, train: Callable, parse: Callable, check_hardware: Callable, count_tokens: Callable, step: str
) -> Callable:
    """Return the function of a config that a training script runs: `train`, or what --dry-run or --check-data asks for."""
    if args.dry_run:
        return partial(dry_run, parse=parse, check_hardware=check_hardware, step=step)
    if args.check_data:
        return partial(check_data, parse=parse, count_tokens=count_tokens)
    return train


def dry_run(cfg: Any, parse: Callable, check_hardware: Callable[[Any, bool], None], step: str) -> None:
    """Show what a step does and what memory it needs, then check what the run needs. The first fault ends it."""
    print(f"  step    {step}")
    print(f"  note    this machine has {torch.cuda.device_count()} GPUs")
    inspect(cfg, parse, check_hardware, dry=True)


def check_data(cfg: Any, parse: Callable, count_tokens: Callable[[Any, Any, Renderer, Videos], int]) -> int:
    """Read every row of `data` and `val`, open its files and encode it. Print counts and the first bad rows. Return 1 if any is
    bad. `count_tokens(item, cfg, renderer, videos)` encodes a parsed row."""
    source = find_checkpoint(cfg.policy.checkpoint, weights=False)
    renderer = Renderer(load_tokenizer(source), cfg.visual, cfg.prompts)
    files = []
    for data in filter(None, (cfg.data, cfg.val)):
        files += [(Rows(source.path), data.video_root) for source in data.sources]
    status = 0
    with Videos(cfg.workers) as videos, ThreadPoolExecutor(2 * cfg.workers) as readers:
        encode = partial(count_tokens, cfg=cfg, renderer=renderer, videos=videos)
        for rows, root in files:
            check = partial(check_row, rows=rows, root=Path(root or rows.path.parent), parse=parse, encode=encode)
            results = list(tqdm(readers.map(check, range(len(rows))), total=len(rows), unit="row"))
            lengths = [tokens for tokens, _ in results]
            bad = [f"  row {i}: {reason}" for i, (_, reason) in enumerate(results) if reason]
            longest = max(lengths, default=0)
            print(f"{rows.path}: {len(rows)} rows, {len(bad)} unusable; {sum(lengths)} tokens, at most {longest}")
            for line in bad[:10]:
                print(line)
                status = 1
    return status


def check_row(i: int, rows: Rows, root: Path, parse: Callable, encode: Callable[[Any], int]) -> tuple[int, str]:
    """Return how many tokens a row has, and why it cannot be used ("" if it can)."""
    try:
        with row_errors():
            return encode(parse(rows[i], f"{rows.path.name}:{i}", root)), ""
    except RowError as error:
        return 0, str(error)


@contextlib.contextmanager
def open_run(cfg: Any, parse: Callable, check_hardware: Callable[[Any, bool], None]) -> Iterator[tuple[Path, Renderer]]:
    """Check everything that a training run needs, then lock its folder. Yield the checkpoint's folder and its renderer.
    All ranks check, and the first one reports."""
    source, renderer = inspect(cfg, parse, check_hardware)
    with only_run_in(Path(cfg.run)) if rank() == 0 else contextlib.nullcontext():
        barrier()  # the others read the lock
        check_nodes(cfg, source)
        yield source, renderer


@contextlib.contextmanager
def only_run_in(run: Path) -> Iterator[None]:
    """Hold RUN/.lock until this process ends, even by kill -9. Refuse a folder that another process holds."""
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


def check_start(run: Path, checkpoint: Path) -> None:
    """Refuse a run whose result would replace the checkpoint that it starts from, even under another name."""
    if not checkpoint.is_dir():
        return
    start = checkpoint.resolve()
    if start.is_relative_to(run.resolve()) or start == (run / "model").resolve():
        raise ConfigError(
            f"policy.checkpoint = {str(checkpoint)!r} is in the folder of run = {str(run)!r}, whose files a run replaces; "
            "choose another `run`"
        )


def check_checkpoint(cfg: Any) -> tuple[Path, Renderer]:
    """Return the checkpoint's folder and renderer. Refuse another family, visual contract, chat template or other prompts. Refuse to
    resume from other weights than the run began with: reference and frozen tower would be new, and the text model old."""
    run = Path(cfg.run)
    source = find_checkpoint(cfg.policy.checkpoint)
    read_config(source)  # refuses other families, whose tokenizer may not load
    cfg.visual.check(source)
    cfg.prompts.check(source)
    if saved_step(run / "state"):
        refuse_other_weights(run, source, f"policy.checkpoint = {cfg.policy.checkpoint!r}")
    renderer = Renderer(load_tokenizer(source), cfg.visual, cfg.prompts)
    refuse_template(source, renderer, cfg.schemas)
    return source, renderer


def refuse_other_weights(run: Path, source: Path, setting: str) -> None:
    """Refuse a checkpoint that is not the one that the run began with. `setting` names it: "checkpoint = 'runs/x/model'"."""
    began = (read_json(run / "run.json") or {}).get("checkpoint")
    if began and began != weights_digest(source):
        raise ConfigError(f"{setting} has changed since {run} started from it: restore it, or choose another `run`")


def refuse_template(source: Path, renderer: Renderer, schemas: dict[str, dict]) -> None:
    """Refuse a chat template that does not continue a dialogue as rollouts do, and a tool whose schema is not one.
    `schemas`: those of the tools, by their keys in tools.TOOLS."""
    for key, schema in schemas.items():
        try:
            name = json.loads(json.dumps(schema))["function"]["name"]
        except (TypeError, ValueError, KeyError) as error:
            told = f"tool {key}: no model can be shown its schema ({error!r})"
            raise ConfigError(f"{told}; write it with make_tool") from None
        if name != key:
            raise ConfigError(
                f"tools.TOOLS[{key!r}]: the model would call it {name!r}, by its function's name; use that"
            )
    if problem := renderer.template_problem(list(schemas.values())):
        told = f"{source}: its chat template does not continue a dialogue as rollouts do: {problem}"
        raise ConfigError(f"{told}. Put the Instruct model's chat_template.jinja into this folder")


def check_nodes(cfg: Any, start: Path) -> None:
    """Refuse ranks that see another run folder than rank 0, or have other settings, code or another cold start."""
    lock = Path(cfg.run) / ".lock"
    mine = {"lock": lock.exists() and lock.read_text(), "config": asdict(cfg), "commit": git_commit()}
    mine["checkpoint"] = weights_digest(start)
    first, *others = gather(mine)
    for number, theirs in enumerate(others, 1):
        changed = differences(first, theirs)
        if "lock" in changed:
            rule = "run must be a folder that all nodes share"
            raise ConfigError(f"run = {cfg.run!r}: rank {number} sees another folder; {rule}")
        if changed:
            raise ConfigError(
                f"rank {number} differs from rank 0 ({'; '.join(changed.values())}): start all nodes alike"
            )


def check_run(cfg: Any) -> None:
    """Refuse a run folder that cannot be written, or that holds a model, states or results of another run."""
    run = Path(cfg.run)
    there = next(path for path in (run.absolute(), *run.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ConfigError(f"run = {cfg.run!r}: {there} is not a writable folder; choose another `run`")
    if not any((run / "state").glob("step-*")) and not (run / "model").exists() and not any(run.glob(RESULTS)):
        return  # nothing can be overwritten
    if not (run / "config.yaml").exists():
        raise ConfigError(
            f"{run} has a model, states or results, but no config.yaml, so its run is unknown: choose another `run`"
        )
    advice = "choose another `run`, or delete the folder"
    try:  # a setting that is newer than the run had its default value there
        before = load(type(cfg), run / "config.yaml")
    except ConfigError as error:
        raise ConfigError(
            f"{run} is of another script, or of another version of this code ({error}): {advice}"
        ) from None
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
            f"{run} belongs to a run with other settings ({'; '.join(changed)}), so it cannot resume: {advice}"
        )


def comparable(cfg: Any) -> dict:
    """Return a config as nested mappings, without the folders of a training's data files, which may move."""
    tree = asdict(cfg)
    for source in tree.get("data", {}).get("sources", ()):
        source["path"] = Path(source["path"]).name
    return tree


def check_servers(cfg: Any, ranks: int = 0) -> None:
    """Refuse a RolloutConfig whose GPUs cannot run servers beside `ranks` training ranks, or whose URLs do not answer."""
    shared = sorted(set(cfg.server_gpus) & set(range(ranks)))
    may_share = any(flag.startswith("--mem-fraction-static") for flag in cfg.server_args)
    if shared and not may_share:
        raise ConfigError(
            f"rollout.server_gpus = {list(cfg.server_gpus)}: {ranks} ranks train on GPUs 0 ... {ranks - 1}, so {shared} would have to "
            "do both; start fewer ranks (torchrun --nproc_per_node), or share by --mem-fraction-static in server_args"
        )
    if cfg.server_gpus and max(cfg.server_gpus) >= torch.cuda.device_count():
        raise ConfigError(
            f"rollout.server_gpus = {list(cfg.server_gpus)}: there are {torch.cuda.device_count()} GPUs here"
        )
    if cfg.server_gpus and importlib.util.find_spec("pynvml"):  # SGLang installs it
        deadline = time.monotonic() + SECONDS_TO_FREE
        for gpu in cfg.server_gpus:  # a server takes a share of the free memory
            while torch.cuda.device_memory_used(gpu) > 4 << 30 and time.monotonic() < deadline:
                time.sleep(1)
            used = torch.cuda.device_memory_used(gpu) / 2**30
            if used > 4 and not may_share:
                told = f"rollout.server_gpus: another process holds {used:.0f} GiB of GPU {gpu}"
                raise ConfigError(f"{told}; end it (`nvidia-smi` names it), or choose other GPUs")
    homes = filter(None, (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"))
    if cfg.server_gpus and not shutil.which("nvcc") and not any(Path(home, "bin/nvcc").exists() for home in homes):
        raise ConfigError("nvcc is not found, and SGLang compiles kernels with it: put it on PATH, or set CUDA_HOME")
    check_urls(cfg.urls)


def check_urls(urls: Sequence[str]) -> None:
    """Refuse URLs of other machines, and those where no server answers."""
    for url in urls:
        if not on_this_machine(urlsplit(url).hostname):
            raise ConfigError(f"{url} is not on this machine, whose files servers read; start a server here")
        try:
            ask(url.rstrip("/") + "/model_info", 10.0)
        except (requests.RequestException, EngineError) as error:
            raise ConfigError(f"no server answers at {url}; start it, or correct http://HOST:PORT: {error}") from None


def on_this_machine(host: str | None) -> bool:
    """Return whether a host is this machine: a socket can only be bound to an address of its own."""
    with contextlib.suppress(OSError):  # an unknown name, or no address of ours
        for family, *_, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with socket.socket(family) as probe:
                probe.bind(address)
                return True
    return False
