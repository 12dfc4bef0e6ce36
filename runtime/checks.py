"""checks.py: refuse what cannot work, before a model is loaded and before results are written.

First what is in the run's folder, then the checkpoint, the other nodes, and the engine's servers.

Other refusals stand where their facts are: the config dataclasses refuse values that contradict each other, dataset.py refuses
rows, plan.py refuses models that do not fit, and rl.require_agreement compares engine and trainer once a run has begun.
"""

import contextlib
import importlib.util
import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
import torch
from jinja2 import TemplateError

from runtime.checkpoints import weights_digest
from runtime.config import ConfigError, differences, load
from runtime.dataset import DataError
from runtime.distributed import gather, print0
from runtime.engine import EngineConfig, EngineError, EngineLost
from runtime.render import THINK_PREFIX, Renderer
from runtime.run import RunConfig, git_commit
from runtime.servers import request_json
from runtime.visual import ContractError, read_json

# Errors that a user can fix: they are shown as one sentence, without a traceback.
USER_ERRORS = (ConfigError, ContractError, DataError, EngineError, EngineLost, FileNotFoundError)

# ------------------------------------------------------------------------------------------------ the folder of a run

RESULTS = "*-K*-*.jsonl"  # eval.py's files in RUN: SPLIT-K64-ARM.jsonl

# Settings that may change when a run resumes. A name without a dot stands for the whole section. In data.sources only the
# folders may change.
MAY_CHANGE = {
    # how long and where it runs
    "run", "steps", "save_every", "keep", "export_every", "plan", "data.video_root",
    # how fast it runs
    "decoders", "grpo.train_tokens", "pack_tokens",
    "policy.family", "policy.dtype", "policy.activation_checkpointing", "policy.compile", "policy.logit_chunk",
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


def require_writable(run: str) -> None:
    """Refuse a run folder that cannot be written, or whose name a shell would have expanded."""
    if run.startswith("~") or "$" in run:
        raise ConfigError(f"run = {run!r}: write the whole path, because nothing expands ~ and $ in it")
    path = Path(run).absolute()
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ConfigError(f"run = {run!r}: {there} is not a writable folder; choose another `run`")


def refuse_other_run(cfg: Any) -> None:
    """Refuse a run folder that holds a model, states or results of another run. Print the settings that may change."""
    run = Path(cfg.run)
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


# ------------------------------------------------------------------------------------------------ the checkpoint


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


def refuse_template(source: Path, renderer: Renderer, schemas: dict[str, dict]) -> None:
    """Refuse a chat template that does not continue a dialogue as rollouts do, and a tool whose schema is invalid or has another name.
    `schemas`: those of the tools, by their keys in tools.TOOLS."""
    for key, schema in schemas.items():
        try:
            name = json.loads(json.dumps(schema))["function"]["name"]
        except (TypeError, ValueError, KeyError) as error:
            raise ConfigError(
                f"tool {key}: no model can be shown its schema ({error!r}); write it with make_tool"
            ) from None
        if name != key:
            raise ConfigError(
                f"tools.TOOLS[{key!r}]: the model would call it {name!r}, by its function's name; use that"
            )
    if problem := template_problem(renderer, list(schemas.values())):
        raise ConfigError(
            f"{source}: its chat template does not continue a dialogue as rollouts do: {problem}. "
            "Put the Instruct model's chat_template.jinja into this folder"
        )


def template_problem(renderer: Renderer, schemas: list[dict]) -> str:
    """Return where a dialogue that the chat template renders as a whole, as in SFT, differs from the same dialogue turn by
    turn, as in a rollout. Empty: nowhere."""
    opening = [{"role": "system", "content": "Look."}, {"role": "user", "content": "Which?"}]
    said = THINK_PREFIX + "I see.\n</think>\n<tool_call>\n{}\n</tool_call>"
    turn = {"role": "assistant", "content": said}
    for tools, role, contents in ((schemas, "tool", ["red", "blue"]), (None, "user", ["red"])):
        replies = [{"role": role, "content": content} for content in contents]
        try:
            prompt = renderer.render(opening, tools, generate=True).ids
            grown = [*prompt, *renderer.encode(said), renderer.end_of_turn, *renderer.continuation(contents, role).ids]
            whole = renderer.render([*opening, turn, *replies], tools, generate=True).ids
        except (ContractError, TemplateError, TypeError) as error:  # TypeError: it reads no lists of parts
            return str(error)
        if grown != whole:
            same = os.path.commonprefix([grown, whole])
            template_text, rollout_text = (renderer.decode(ids[len(same) :][:8]) for ids in (whole, grown))
            return f"after {renderer.decode(same[-8:])!r} it writes {template_text!r}, and a rollout {rollout_text!r}"
    return ""


# ------------------------------------------------------------------------------------------------ the nodes


def refuse_unlike_nodes(cfg: RunConfig, start: Path) -> None:
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


# ------------------------------------------------------------------------------------------------ the servers

SECONDS_TO_FREE = 60.0  # within this time, a server that has just been killed frees its GPU's memory


def require_servers(cfg: EngineConfig, ranks: int = 0) -> None:
    """Refuse a config whose GPUs cannot run servers beside `ranks` training ranks, or whose URLs do not answer."""
    if cfg.urls:
        require_urls(cfg.urls)
    elif cfg.server_gpus:
        require_gpus(cfg, ranks)


def require_gpus(cfg: EngineConfig, ranks: int) -> None:
    """Refuse GPUs for servers that train, that are not there, or that another process holds."""
    gpus = list(cfg.server_gpus)
    shared = sorted(set(gpus) & set(range(ranks)))
    may_share = any(flag.startswith("--mem-fraction-static") for flag in cfg.server_args)
    if shared and not may_share:
        raise ConfigError(
            f"rollout.server_gpus = {gpus}: {ranks} ranks train on GPUs 0 ... {ranks - 1}, so {shared} would have to "
            "do both; start fewer ranks (torchrun --nproc_per_node), or share by --mem-fraction-static in server_args"
        )
    if max(gpus) >= torch.cuda.device_count():
        raise ConfigError(f"rollout.server_gpus = {gpus}: there are {torch.cuda.device_count()} GPUs here")
    if not importlib.util.find_spec("pynvml"):  # SGLang installs it
        return
    deadline = time.monotonic() + SECONDS_TO_FREE
    for gpu in gpus:  # a server takes a share of the free memory
        while torch.cuda.device_memory_used(gpu) > 4 << 30 and time.monotonic() < deadline:
            time.sleep(1)
        used = torch.cuda.device_memory_used(gpu) / 2**30
        if used > 4 and not may_share:
            raise ConfigError(
                f"rollout.server_gpus: another process holds {used:.0f} GiB of GPU {gpu}; "
                "end it (`nvidia-smi` names it), or choose other GPUs"
            )


def require_urls(urls: Sequence[str]) -> None:
    """Refuse URLs of other machines, and those where no server answers. Tell which model each server says that it serves."""
    for url in urls:
        if not on_this_machine(urlsplit(url).hostname):
            raise ConfigError(f"{url} is not on this machine, whose files servers read; start a server here")
        try:
            info = request_json(url.rstrip("/") + "/model_info", 10.0)
        except (requests.RequestException, EngineError) as error:
            raise ConfigError(f"no server answers at {url}; start it, or correct http://HOST:PORT: {error}") from None
        if isinstance(info, dict) and info.get("model_path"):
            print0(f"  note    {url} says that it serves {info['model_path']}")


def on_this_machine(host: str | None) -> bool:
    """Return whether a host is this machine: a socket can only be bound to an address of its own."""
    with contextlib.suppress(OSError):  # an unknown name, or no address of ours
        for family, *_, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with socket.socket(family) as probe:
                probe.bind(address)
                return True
    return False
