"""open_engine.py: open the engine of a config, for training, evaluation and study.ask.

    engine = open_engine(checkpoint, renderer, cfg.rollout, logs=run / "logs")     # engine.py describes what it can do

SGLang's servers start here. They end with this process, even after kill -9.
"""

import importlib.util
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import requests
import torch

from runtime.api import OpenAI
from runtime.config import ConfigError
from runtime.distributed import gather, local_rank, local_size, print0, rank
from runtime.engine import Api, Engine, EngineConfig, EngineError
from runtime.inprocess import InProcess
from runtime.processes import start_group
from runtime.render import Renderer
from runtime.servers import Server, SGLang, request_json

Config = TypeVar("Config", bound=EngineConfig)
# Prefixes of torchrun's and the trainer's environment variables, which the servers must not inherit.
TRAINER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC", "TORCH_NCCL", "PET_", "OMP_", "PYTORCH_")  # fmt: skip


def for_this_machine(cfg: Config) -> Config:
    """Return the settings with this machine's GPUs in place of null."""
    gpus = cfg.server_gpus
    if gpus is None:
        gpus = tuple(range(torch.cuda.device_count())) if importlib.util.find_spec("sglang") else ()
    return replace(cfg, server_gpus=gpus)


def open_engine(
    checkpoint: str | Path,
    renderer: Renderer,
    cfg: EngineConfig,
    logs: Path | None = None,
    frames: Path | None = None,
    api: Api | None = None,
) -> Engine:
    """Open the engine that the settings ask for; for_this_machine has replaced null. `logs` and `frames`: folders of the servers'
    logs, and of the frames that they read."""
    if api and api.url:  # an API's model
        return OpenAI(api, renderer)
    if not cfg.uses_servers:  # the model in this process, on a GPU if there is one
        device, dtype = ("cuda", "bfloat16") if torch.cuda.is_available() else ("cpu", "float32")
        return InProcess(checkpoint, renderer, device=device, dtype=dtype, max_batch_tokens=cfg.max_batch_tokens)

    # SGLang's servers, at `urls` or on `server_gpus`. This node's first rank starts them and owns them. The other ranks wait in
    # `gather` until they are ready, and connect to them.
    engine = None
    if cfg.urls or local_rank() == 0:
        servers = [Server(url.rstrip("/")) for url in cfg.urls]
        if not servers:
            if logs and rank() > 0:
                logs /= f"node-{rank() // local_size()}"
            flags = server_flags(cfg)
            servers = start_servers(cfg, logs, lambda port: server_command(checkpoint, renderer, port, flags))
        engine = SGLang(servers, renderer, frames)
        engine.wait_until_ready()
    urls_by_rank = gather(engine.urls if engine else [])
    if engine:
        return engine
    urls = urls_by_rank[rank() - local_rank()]  # those of this node's first rank
    return SGLang([Server(url) for url in urls], renderer, frames)


# ------------------------------------------------------------------------------------------------ starting servers


def start_servers(cfg: EngineConfig, logs: Path | None, launch: Callable[[int], list[str]]) -> list[Server]:
    """Start a server per `tensor_parallel` GPUs, which loads its weights in the background. `launch`: port -> command (tests
    pass their own). `logs`: the folder of their logs; None: a new one in /tmp."""
    logs = logs or Path(tempfile.mkdtemp(prefix="sglang-"))
    logs.mkdir(parents=True, exist_ok=True)
    gpus = cfg.gpus
    print(f"SGLang starts on GPUs {list(gpus)}: up to {SGLang.start_timeout / 60:g} minutes; logs: {logs}", flush=True)
    servers = []
    for first in range(0, len(gpus), cfg.tensor_parallel):
        own = ",".join(map(str, gpus[first : first + cfg.tensor_parallel]))
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]  # a free one
        log = logs / f"sglang-gpu{own}.log"
        with log.open("ab") as file:
            process = start_group(launch(port), env=_server_environment(own), stdout=file, stderr=file)
        servers.append(Server(f"http://127.0.0.1:{port}", own, log, process))
    return servers


def _server_environment(gpus: str) -> dict[str, str]:
    """Return a server's environment: ours, without torchrun's and the trainer's variables, with these GPUs visible."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(TRAINER_VARIABLES)}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:  # our GPU numbers are indices into this list
        devices = visible.split(",")
        gpus = ",".join(devices[int(gpu)] for gpu in gpus.split(","))
    env["CUDA_VISIBLE_DEVICES"] = gpus
    env |= {"no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"}  # the server sends itself a first request
    # SGLang keeps cached image embeddings across weight updates. If the vision tower trains, they would be stale.
    env["SGLANG_VLM_CACHE_SIZE_MB"] = "0"
    return env


def server_command(checkpoint: str | Path, renderer: Renderer, port: int, extra: Sequence[str] = ()) -> list[str]:
    """Return the command that starts a server which shows the model the same pixels as the trainer."""
    size = renderer.contract.processor_size()
    image = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(checkpoint), "--host", "127.0.0.1"]
    return [*command, "--port", str(port), "--mm-process-config", json.dumps({"image": image}), *extra]


def server_flags(cfg: EngineConfig) -> list[str]:
    """Return the flags of every server that we start, in RL and evaluation. They avoid SGLang's newest paths. The config's
    `server_args` follow them; the last flag of a name wins."""
    flags = [
        f"--context-length={cfg.max_context + 16}",  # with the end of a turn; the default, 262,144 tokens, reserves 2 GB
        f"--max-running-requests={64 * cfg.tensor_parallel}",  # the default reserves slots for thousands of requests
        "--enable-fp32-lm-head",  # logits in fp32 as in the trainer; the default rounds them to bf16
        "--mm-feature-transport=cpu",  # the default, CUDA IPC, takes a pool of 1 GiB for image features
        "--prefill-decode-interval=0",  # the default runs 22 decoding steps before it prefills the next prompt
        "--schedule-policy=lpm",  # prompts in the cache go first, so a group's prompt is prefilled once
    ]
    # SGLang would decode Qwen3-VL with flashinfer. fa3 is for Hopper: on newer GPUs it fails an assertion.
    if torch.cuda.is_available() and torch.cuda.get_device_capability(cfg.gpus[0]) == (9, 0):
        flags.append("--attention-backend=fa3")
    return [*flags, *cfg.server_args, f"--tp-size={cfg.tensor_parallel}"]


# ------------------------------------------------------------------------------------------------ before a run

SECONDS_TO_FREE = 60.0  # within this time, a server that has just been killed frees its GPU's memory


def require_servers(cfg: EngineConfig, ranks: int = 0) -> None:
    """Refuse a config whose GPUs cannot run servers beside `ranks` training ranks, or whose URLs do not answer."""
    if cfg.urls:
        require_urls(cfg.urls)
    elif cfg.server_gpus:
        require_gpus(cfg, ranks)


def require_gpus(cfg: EngineConfig, ranks: int) -> None:
    """Refuse GPUs for servers that train, that are not there, or that another process holds."""
    gpus = list(cfg.gpus)
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
    """Refuse URLs at which no server answers. Tell which model each server says that it serves."""
    for url in urls:
        try:
            info = request_json(url.rstrip("/") + "/model_info", 10.0)
        except (requests.RequestException, EngineError) as error:
            raise ConfigError(f"no server answers at {url}; start it, or correct http://HOST:PORT: {error}") from None
        if isinstance(info, dict) and info.get("model_path"):
            print0(f"  note    {url} says that it serves {info['model_path']}")
