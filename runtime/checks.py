"""checks.py: what can be known to go wrong is refused before a model is loaded, and before anything is written.

    check_run(cfg)                                       # is the run's folder free, or the same run's?
    source = find_checkpoint(name, checkpoint_dir)       # a whole checkpoint of the right kind
    check_servers(cfg.rollout, ranks)                    # GPUs that are there and free, servers that answer

Values that contradict each other are refused by the dataclasses themselves; rows, by dataset.py; memory, by plan.py.

Deliberately missing: what only a run can show (watch.self_check looks at its first batch).
"""

import dataclasses
import importlib.util
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from runtime.config import ConfigError, load

# What may change before a run goes on: how long, where and how fast it runs, what it reports, and the cures for bad steps.
MAY_CHANGE = re.compile(
    r"run|steps|resume|optim|data\.(?!seed)|val\w*|eval_every|save_every|keep|dump_groups|max_bad_steps|gap_limit"
    r"|decoders|gpus|gpu_gib|train_tokens|pack_tokens|policy\.(?!checkpoint|freeze)"
    r"|rollout\.(gpus|urls|server_args|concurrency|call_timeout|max_batch_tokens)"
)


def check_run(cfg: Any) -> None:
    """Refuse a run that could not write into its folder, or would go on from the state of another one."""
    run = Path(cfg.run)
    there = next(path for path in (run.absolute(), *run.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        what = "is a folder that may not be written" if there.is_dir() else "is a file"
        raise ConfigError(f"run = {cfg.run!r}: {there} {what}; choose another `run`")
    resumes = getattr(cfg, "resume", "never") == "auto" and any((run / "state").glob("step-*"))
    if not resumes or not (run / "config.yaml").exists():
        return
    try:
        before = load(type(cfg), run / "config.yaml")
    except ConfigError as error:
        raise ConfigError(
            f"{error}; {run}/state is of another version: choose another `run`, or delete the folder"
        ) from None
    was, now = (json.loads(json.dumps(dataclasses.asdict(c))) for c in (before, cfg))
    if changed := {key: text for key, text in differences(was, now).items() if not MAY_CHANGE.match(key)}:
        raise ConfigError(
            f"{run}/state is of a run with other settings ({'; '.join(changed.values())}), so it cannot go on: "
            "choose another `run`, or delete the folder"
        )


def differences(was: Any, now: Any, name: str = "") -> dict[str, str]:
    """{"rollout.temperature": "rollout.temperature: 0.0, now 0.7"}, for every setting that differs."""
    if isinstance(was, dict) and isinstance(now, dict):
        pairs = [(f"{name}.{key}" if name else key, was.get(key), now.get(key)) for key in was | now]
        return {path: text for key, a, b in pairs for path, text in differences(a, b, key).items()}
    return {name: f"{name}: {was!r}, now {now!r}"} if was != now else {}


def find_checkpoint(name: str | Path, fetch: Callable[[str | Path], Path], served: bool = False) -> Path:
    """The folder of a whole checkpoint; `fetch` brings a name on the hub here. `served`: others load its weights, so any
    model will do."""
    folder = Path(name)
    if folder.is_file():
        raise ConfigError(f"{name}: a checkpoint is a folder, not a file; did you mean {folder.parent}?")
    if not folder.is_dir():
        # A name on the hub is owner/model; where the owner is a folder here, a path was meant.
        if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(name)) or folder.parent.is_dir():
            raise ConfigError(
                f"{name}: neither a folder nor a model on the hub; a training leaves its checkpoint in RUN/model when "
                "it is done"
            )
        folder = fetch(name)
    model, tokenizer = _json_of(folder / "config.json"), _json_of(folder / "tokenizer_config.json")
    index = folder / "model.safetensors.index.json"
    weights = set(_json_of(index)["weight_map"].values()) if index.exists() else {"model.safetensors"}
    missing = [file for file in sorted(weights) if not served and not (folder / file).is_file()]
    if not any((folder / file).is_file() for file in ("tokenizer.json", "vocab.json")):
        missing.append("tokenizer.json")
    if missing:
        raise ConfigError(f"{folder} has no {', '.join(missing[:3])}: the checkpoint is not whole; copy it here again")
    if not served and model.get("model_type") != "qwen3_vl":
        raise ConfigError(f"{folder} is a {model.get('model_type')!r}; this code runs dense Qwen3-VL: 'qwen3_vl'")
    if not tokenizer.get("chat_template") and not (folder / "chat_template.jinja").is_file():
        raise ConfigError(
            f"{folder} has no chat template, so it is a base model; start from an Instruct one, or put its "
            "chat_template.jinja there"
        )
    return folder


def find_tokenizer(name: str | Path) -> Path:
    """The folder of a checkpoint whose weights are not needed; from the hub, only its small files come."""
    from runtime.distributed import checkpoint_dir  # torch

    return find_checkpoint(name, lambda name: checkpoint_dir(name, only=("*.json", "*.jinja", "*.txt")), served=True)


def check_servers(cfg: Any, ranks: int = 0, patience: float = 15.0) -> None:
    """SGLang servers can be started on the GPUs of a RolloutConfig beside so many training ranks, or already run."""
    if cfg.gpus:
        import torch

        shared = sorted(set(cfg.gpus) & set(range(ranks)))
        if shared and "--mem-fraction-static" not in cfg.server_args:
            raise ConfigError(
                f"rollout.gpus = {list(cfg.gpus)}: {ranks} ranks train on GPUs 0 ... {ranks - 1}, so {shared} would have to "
                "do both; start fewer ranks (torchrun --nproc_per_node), or set rollout.server_args="
                '[--mem-fraction-static, "0.25"] to share'
            )
        if max(cfg.gpus) >= torch.cuda.device_count():
            raise ConfigError(
                f"rollout.gpus = {list(cfg.gpus)}: there are {torch.cuda.device_count()} GPUs here; without `gpus` and "
                "`urls` the model runs in this process"
            )
        if not importlib.util.find_spec("sglang"):
            raise ConfigError(
                f"rollout.gpus = {list(cfg.gpus)}: needs SGLang, which is not installed; pip install -r requirements.txt"
            )
    check_urls(cfg.urls, patience)


def check_urls(urls: Sequence[str], patience: float) -> None:
    import requests

    session, deadline = requests.Session(), time.monotonic() + patience
    session.trust_env = False  # straight to the server, as engine.py: whatever http_proxy says
    for url in urls:
        while True:
            try:
                session.get(url.rstrip("/") + "/model_info", timeout=10).raise_for_status()
                break
            except requests.RequestException as error:
                if time.monotonic() > deadline or isinstance(error, ValueError):  # ValueError: no URL at all
                    raise ConfigError(
                        f"no server answers at {url}; start it (python -m sglang.launch_server ...) and "
                        "wait until it serves, or correct the address: http://HOST:PORT. The last try: {error}"
                    ) from None
                time.sleep(0.5)


def _json_of(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if path.name == "config.json":
            raise ConfigError(f"{path.parent} has no config.json: it is not a Hugging Face checkpoint") from None
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not readable as JSON: {error}; copy the checkpoint here again") from None
