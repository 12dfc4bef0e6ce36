"""servers.py: an engine of SGLang servers: start them on this machine, and query them over HTTP.

    engine = SGLang(checkpoint, renderer, cfg)      # uses the servers at cfg.urls; without urls, starts some on cfg.server_gpus
    engine.wait_until_ready()                       # servers start in the background

Every reply must echo the trainer's prompt ids and carry the current weights' version. A lost request goes to another server.
After a time-out, MAX_FAILURES failures in a row or a failed weight update, a server is left out, and the run goes on with the
others. Our servers end with this process, even after kill -9.

Deliberately missing: restarts (the same command brings a server back), streaming, weight sync over NCCL, seeds.
"""

import json
import logging
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
import torch
from PIL import Image

from runtime.engine import Engine, EngineConfig, EngineError, EngineLost, Sample
from runtime.processes import MEMORY, kill_group, start_group
from runtime.render import Renderer
from runtime.video import Clip
from runtime.visual import ContractError

log = logging.getLogger(__name__)

# Prefixes of torchrun's and the trainer's environment variables, which the servers must not inherit.
OF_TRAINER = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC", "TORCH_NCCL", "PET_", "OMP_", "PYTORCH_")  # fmt: skip
IMAGE_BYTES = 7e9  # bytes of /dev/shm for the servers' images: 64 requests in flight x 64 frames x 1.6 MB
MAX_FAILURES = 3  # a server that fails so often in a row is left out


class Failure(requests.RequestException):
    """A reply without usable tokens. Requests that get no reply, or an error, raise another RequestException."""


@dataclass(eq=False)
class _Server:
    url: str
    gpus: str = ""  # "4,5"; empty: we did not start it
    log: Path | None = None  # of ours
    process: subprocess.Popen | None = None
    busy: int = 0  # requests in flight
    failures: int = 0  # in a row
    last_failure: float = 0.0  # when the last one was counted


class SGLang(Engine):
    """Client of SGLang servers, and owner of those that it starts."""

    request_timeout = 300.0  # seconds for a request, so that a call (rollout.call_timeout) can try two servers
    start_timeout = 900.0  # seconds within which all servers must answer

    def __init__(
        self,
        checkpoint: str | Path, renderer: Renderer, cfg: EngineConfig,
        logs: str | Path | None = None,  # folder of the servers' logs; None: a new one in /tmp
        frames: Path | None = None,  # folder for frames; None: in memory, or in /tmp if memory has no room
        launch: Callable[[int], list[str]] | None = None,  # port -> command; tests start a stand-in
    ):  # fmt: skip
        self.version = 0
        self.snapshot: str | None = None  # the folder of the current weights; None: the checkpoint's weights
        self.renderer = renderer
        self._frames = FrameFiles(frames)
        self._last_reader: dict[int, _Server] = {}  # hash of a shared prompt -> the server that read it last
        self._lock = threading.Lock()  # held whenever one of these fields, or a field of a server, changes

        if cfg.urls:
            servers = [_Server(url.rstrip("/")) for url in cfg.urls]
        else:
            flags = server_flags(cfg)
            launch = launch or (lambda port: server_command(checkpoint, renderer, port, flags))
            servers = start_servers(cfg, Path(logs or tempfile.mkdtemp(prefix="sglang-")), launch)
        self.servers = servers  # those in use
        self.urls = [server.url for server in servers]

    def wait_until_ready(self) -> None:
        """Wait until each server has sampled a token. If one does not, kill ours."""
        payload = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}}
        deadline = time.monotonic() + self.start_timeout
        waiting = [*self.servers]
        while waiting:
            server = waiting[0]
            try:
                ask(server.url + "/generate", max(1.0, deadline - time.monotonic()), payload)
                waiting.remove(server)
            except requests.RequestException as error:
                if time.monotonic() > deadline or server.process and server.process.poll() is not None:
                    failure = server_problem(server, error)
                    self.close()
                    raise EngineError(failure) from None
                time.sleep(0.2)

    def generate(self, ids, clips, *, max_new_tokens, temperature, seed, stop=(), shared_prefix=0) -> Sample:
        sampling = {
            "temperature": temperature,
            "sampling_seed": seed % 2**31,  # SGLang ignores it without --enable-deterministic-inference
            "max_new_tokens": max_new_tokens,
            "stop_token_ids": list(stop),
        }
        payload = self._payload(ids, clips, sampling)
        prompt_key = hash((tuple(ids[:shared_prefix]), *payload["image_data"][:1])) if shared_prefix else None

        # Ask one server after the other, but none twice.
        asked = []
        problem = ""
        while True:
            with self._lock:
                self._require_servers()
                left = [server for server in self.servers if server not in asked]
                if not left:
                    raise EngineError(f"a request failed on {len(asked)} servers; the last one: {problem}")
                server = self._pick_server(left, prompt_key)
                server.busy += 1
                version = self.version
            sent = time.monotonic()
            try:
                reply = ask(server.url + "/generate", self.request_timeout, payload)
                sample = self._read_sample(reply, ids, version)
                with self._lock:
                    server.failures = 0
                return sample
            except requests.RequestException as error:
                problem = str(error)  # only its text: the traceback would keep this call and its clips in memory
                self._count_failure(server, error, sent)
                asked.append(server)
            finally:
                with self._lock:
                    server.busy -= 1

    def update_weights(self, path: str | Path, version: int, push: bool = True) -> None:
        with self._lock:
            self.snapshot = str(path)
            self.version = version
            self._last_reader.clear()  # new weights empty the servers' caches
        if push:  # to all servers at once; the pool is not waited for, since after Ctrl-C a server may hang
            pool = ThreadPoolExecutor(len(self.urls))
            list(pool.map(self._push_weights, [*self.servers]))
        self._require_servers()

    def close(self) -> None:
        """Send no further request, and kill our servers and their child processes."""
        with self._lock:
            servers = self.servers
            self.servers = []
        for server in servers:
            if server.process:
                kill_group(server.process)
        shutil.rmtree(self._frames.folder, ignore_errors=True)

    # -------------------------------------------------------------------------------------------- requests

    def _pick_server(self, usable: list[_Server], prompt_key: int | None) -> _Server:
        """Return the server that read this prompt last, since its cache holds it. If the least busy server has at least 8
        requests fewer (about a group), return that one. All ranks share the servers, so draw among equals."""
        chosen = min(usable, key=lambda server: (server.busy, random.random()))
        if prompt_key is not None:
            reader = self._last_reader.get(prompt_key)
            if reader in usable and reader.busy < chosen.busy + 8:
                chosen = reader
            self._last_reader[prompt_key] = chosen
        return chosen

    def _payload(self, ids: list[int], clips: Sequence[Clip], sampling: dict) -> dict:
        """Return a request for a sample, with the settings that all samples share."""
        shared = {
            "top_p": 1.0,  # SGLang does not renormalise log-probs after truncation
            "top_k": -1,
            "skip_special_tokens": False,
            "logit_bias": {str(token): -1000.0 for token in self.renderer.never_sampled},
        }
        payload = {"input_ids": self.renderer.compact(ids), "image_data": self._frames.urls(clips)}
        return payload | {"sampling_params": sampling | shared, "return_logprob": True, "return_prompt_token_ids": True}

    def _read_sample(self, reply: Any, ids: list[int], version: int) -> Sample:
        """Parse a reply. Refuse one that has the wrong weights, or does not continue the prompt that the trainer reads."""
        try:
            meta = reply["meta_info"]
            finish = meta["finish_reason"]["type"]
            label = meta["weight_version"]
            prompt = list(reply["prompt_token_ids"])
            logprobs = [float(logprob) for logprob, _, _ in meta["output_token_logprobs"]]
            sampled = [int(token) for _, token, _ in meta["output_token_logprobs"]]
        except (LookupError, TypeError, ValueError):
            raise Failure(f"a reply does not fit: {str(reply)[:300]}") from None
        if finish not in ("stop", "length"):
            raise Failure(f"finish reason {meta['finish_reason']}")
        if self.snapshot and label != str(version):
            raise Failure(f"sampled by weights {label!r}, expected {version}")

        # The server read the same ids that the trainer will read.
        if prompt != ids:
            same = len(os.path.commonprefix([ids, prompt]))
            differ = f"the server and the trainer read prompts that differ from position {same} on"
            raise ContractError(f"{differ}: compare preprocessor_config.json with the run's `visual` keys")
        return Sample(sampled, logprobs, finish, version)

    # -------------------------------------------------------------------------------------------- servers

    def _push_weights(self, server: _Server) -> None:
        """Make a server load the current snapshot, or leave it out."""
        payload = {"model_path": self.snapshot, "weight_version": str(self.version), "flush_cache": True}
        try:
            ask(server.url + "/update_weights_from_disk", self.request_timeout, payload)
        except (requests.RequestException, EngineError) as error:  # EngineError: it refuses the snapshot
            self._leave_out(server, error)

    def _count_failure(self, server: _Server, failure: Exception, sent: float) -> None:
        """Leave a server out that timed out, or failed MAX_FAILURES times in a row. Requests that were sent before its last
        failure count once, because all requests in flight fail together."""
        with self._lock:
            if sent >= server.last_failure:
                server.failures += 1
                server.last_failure = time.monotonic()
            unusable = isinstance(failure, requests.Timeout) or server.failures >= MAX_FAILURES
        if unusable:
            self._leave_out(server, failure)

    def _leave_out(self, server: _Server, problem: Exception) -> None:
        """Send no more requests to a server, and kill it if it is ours."""
        with self._lock:
            if server not in self.servers:
                return
            self.servers.remove(server)
            log.warning("servers left: %d, because %s", len(self.servers), server_problem(server, problem))
        if server.process:
            kill_group(server.process)

    def _require_servers(self) -> None:
        if not self.servers:
            raise EngineLost("no server is left: the engine was closed, or each failed; the lines above say why")


def server_problem(server: _Server, problem: Exception) -> str:
    """Return a sentence about a server that failed, with the end of its log if it is ours."""
    if not server.process:
        return f"the server at {server.url} failed: {problem}"
    exited = server.process.poll() is not None
    reason = f"exit code {server.process.returncode}" if exited else str(problem)
    end = "\n".join(server.log.read_text("utf-8", "replace").splitlines()[-20:])
    return f"the server on GPU {server.gpus} failed: {reason}; {server.log} ends:\n{end}"


class FrameFiles:
    """Hands frames to servers as files, uncompressed: a clip once for all rollouts and turns that show it."""

    def __init__(self, parent: Path | None):
        if parent is None and shutil.disk_usage(MEMORY).free > IMAGE_BYTES:
            parent = MEMORY
        self.folder = tempfile.mkdtemp(prefix=f"minparavt-{os.getuid()}-", dir=parent)
        self._folder_of = weakref.WeakKeyDictionary()  # clip -> the folder with its frames
        self._lock = threading.Lock()  # the rollouts of a group send the same clip at the same time

    def urls(self, clips: Sequence[Clip]) -> list[str]:
        """Return a URL per frame. A clip's files are deleted when it is freed."""
        urls = []
        with self._lock:
            for clip in clips:
                if clip not in self._folder_of:
                    self._folder_of[clip] = self._write(clip)
                urls += [f"file://{self._folder_of[clip]}/{i}.bmp" for i in range(len(clip))]
        return urls

    def _write(self, clip: Clip) -> str:
        folder = tempfile.mkdtemp(dir=self.folder)
        for i, pixels in enumerate(clip.pixels):
            Image.fromarray(pixels).save(f"{folder}/{i}.bmp")
        weakref.finalize(clip, shutil.rmtree, folder, ignore_errors=True)
        return folder


def ask(url: str, seconds: float, payload: dict | None = None) -> Any:
    """Send a POST of JSON, or a GET, to a server of this machine, which may be silent for so many seconds. Return the reply's
    JSON. A request that the server refuses is an EngineError; without a reply, raise a RequestException."""
    with requests.Session() as session:
        session.trust_env = False  # do not ask by way of a proxy
        reply = session.request("POST" if payload else "GET", url, json=payload, timeout=(10.0, seconds))
    if reply.status_code == 400:
        raise EngineError(f"{url} refuses the request: {reply.text[:500]}")
    reply.raise_for_status()
    return reply.json()


# ------------------------------------------------------------------------------------------------ starting a server


def start_servers(cfg: EngineConfig, logs: Path, launch: Callable[[int], list[str]]) -> list[_Server]:
    """Start a server per `tensor_parallel` GPUs, which loads its weights in the background. `launch`: port -> command."""
    gpus = cfg.server_gpus
    print(f"SGLang starts on GPUs {list(gpus)}: up to {SGLang.start_timeout / 60:g} minutes; logs: {logs}", flush=True)
    logs.mkdir(parents=True, exist_ok=True)
    servers = []
    for first in range(0, len(gpus), cfg.tensor_parallel):
        own = ",".join(map(str, gpus[first : first + cfg.tensor_parallel]))
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]  # a free one
        log_file = logs / f"sglang-gpu{own}.log"
        with log_file.open("ab") as file:
            process = start_group(launch(port), env=_server_environment(own), stdout=file, stderr=file)
        servers.append(_Server(f"http://127.0.0.1:{port}", own, log_file, process))
    return servers


def _server_environment(gpus: str) -> dict[str, str]:
    """Return a server's environment: ours, without torchrun's and the trainer's variables, with these GPUs visible."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(OF_TRAINER)}
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
    """Return the flags of every server that we start, in RL and evaluation. On Hopper they select SGLang's
    well-tested paths over newer ones. The config's `server_args` follow them; the last flag of a name wins."""
    flags = [
        f"--context-length={cfg.max_context + 16}",  # with the end of a turn; the default, 262,144 tokens, reserves 2 GB
        f"--max-running-requests={64 * cfg.tensor_parallel}",  # the default reserves slots for thousands of requests
        "--enable-fp32-lm-head",  # logits in fp32 as in the trainer; the default rounds them to bf16
        "--mm-feature-transport=cpu",  # the default, CUDA IPC, takes a pool of 1 GiB for image features
        "--prefill-decode-interval=0",  # the default runs 22 decoding steps before it prefills the next prompt
        "--schedule-policy=lpm",  # prompts in the cache go first, so a group's prompt is prefilled once
    ]
    # SGLang would decode Qwen3-VL with flashinfer. fa3 is for Hopper: on newer GPUs it fails an assertion.
    if torch.cuda.is_available() and torch.cuda.get_device_capability(cfg.server_gpus[0]) == (9, 0):
        flags.append("--attention-backend=fa3")
    return [*flags, *cfg.server_args, f"--tp-size={cfg.tensor_parallel}"]
