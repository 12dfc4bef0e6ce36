"""servers.py: an engine of SGLang servers: start them, supervise them and query them over HTTP.

    engine = SGLang(checkpoint, renderer, gpus=(6, 7))      # starts one server per GPU, or per `tensor_parallel` GPUs
    engine = SGLang(checkpoint, renderer, urls=(...,))      # uses servers that already run
    engine.wait_until_ready()                               # servers start in the background

Every response must echo the trainer's prompt ids and carry the current weights' version. A server that dies, hangs or gives
replies that do not fit is started again, and loads the current snapshot. Lost requests are sent again. Our servers end
with this process, even after kill -9.

Deliberately missing: streaming, weight sync over NCCL, seeds (only the in-process engine uses them).
"""

import base64
import contextlib
import io
import itertools
import json
import logging
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import numpy as np
import torch
from PIL import Image

from runtime.cleanup import kill_group, memory_folder, start_group
from runtime.engine import Engine, EngineError, Sample
from runtime.render import Renderer
from runtime.video import Clip
from runtime.visual import ContractError, read_json
from runtime.web import NoReply, request

log = logging.getLogger(__name__)

# Prefixes of torchrun's and the trainer's environment variables, which the servers must not inherit.
OF_TRAINER = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC", "TORCH_NCCL", "PET_", "OMP_", "PYTORCH_")  # fmt: skip
IMAGE_BYTES = 7e9  # bytes of /dev/shm for the servers' images: 64 requests in flight x 64 frames x 1.6 MB
# After so many failures without a served request in between, a server of ours is restarted; after twice as many, given up.
STRIKES = 3
LONGEST_PAUSE = 30.0  # seconds between two attempts at a server that fails


class _Failure(Exception):
    """A server failed: it is gone, hangs, is busy, or gives a reply that does not fit."""


@dataclass
class _Server:
    url: str
    gpus: str = ""  # "4,5"; empty: we did not start it
    process: subprocess.Popen | None = None
    warm: bool = False  # it has sampled a first batch
    has_our_snapshot: bool = False  # a snapshot of another run can have the same version
    healthy: bool = False  # it answers, with the current weights
    strikes: int = 0  # failures since it last served a request
    restarted: bool = False  # since it last served a request
    problem: str = ""  # the last failure
    given_up: str = ""  # why it is not started again
    busy: int = 0  # requests in flight


class SGLang(Engine):
    """Client and supervisor of SGLang servers."""

    timeout = 1200.0  # seconds for one `generate`, including other attempts and a server's restart
    attempt_timeout = 400.0  # seconds for one attempt, or for one load of weights
    probe_timeout = 10.0  # seconds within which a server must say that it lives

    def __init__(
        self,
        checkpoint: str | Path, renderer: Renderer, *, gpus: Sequence[int] = (), urls: Sequence[str] = (),
        server_args: Sequence[str] = (), tensor_parallel: int = 1,  # GPUs per server
        logs: str | Path | None = None,  # folder of the servers' logs; None: a new one in /tmp
        launch: Callable[[int], list[str]] | None = None,  # port -> command; tests start a stand-in
        start_timeout: float = 900.0,  # seconds within which a server must start
        patience: float = 0.5,  # seconds until a server that failed is asked again; doubles with each strike
    ):  # fmt: skip
        self.version = 0
        self.snapshot: str | None = None  # the folder of the current weights; None: the checkpoint's weights
        self.restarts = 0
        self.renderer, self.start_timeout, self.patience = renderer, start_timeout, patience
        flags = (*server_args, f"--tp-size={tensor_parallel}")
        self._launch = launch or (lambda port: server_command(checkpoint, renderer, port, flags))
        self._vocabulary = _text_config(checkpoint).get("vocab_size", math.inf)
        self._frames = FrameFiles(in_memory=on_this_machine(urls))
        self._last_reader: dict[int, _Server] = {}  # hash of a shared prompt -> the server that read it last
        self._closed = False
        # Guards `busy`, the version, `_closed` and the start of processes. Other fields are also set without it.
        self._changed = threading.Condition()

        # List the servers. Each of ours gets a free port, and keeps it when it is restarted, since other ranks use it.
        self._servers = [_Server(url.rstrip("/"), warm=True) for url in urls]
        with contextlib.ExitStack() as probes:  # stay open until each server has a port, so that no two get the same
            for first in range(0, len(gpus), tensor_parallel):
                probe = probes.enter_context(socket.create_server(("127.0.0.1", 0)))
                url = f"http://127.0.0.1:{probe.getsockname()[1]}"
                self._servers.append(_Server(url, ",".join(map(str, gpus[first : first + tensor_parallel]))))
        self.urls = [server.url for server in self._servers]
        # Each rank has its own client. Rotate the list by rank, so that not all ranks begin with the same idle server.
        offset = int(os.environ.get("RANK", 0)) % len(self._servers)
        self._servers = self._servers[offset:] + self._servers[:offset]

        # Start a supervisor for each. It starts the server's process, if it is ours.
        if gpus:
            self._logs = logs = Path(logs or tempfile.mkdtemp(prefix="sglang-"))
            logs.mkdir(parents=True, exist_ok=True)
            print(f"SGLang starts on GPUs {list(gpus)}: up to {start_timeout / 60:g} minutes; logs: {logs}", flush=True)
        for server in self._servers:
            threading.Thread(target=self._supervise, args=(server,), daemon=True).start()

    def wait_until_ready(self) -> None:
        """Wait for all servers that we start. Of `urls`, wait for any one: another process may still start the others."""
        self._wait_for_servers(all if self._servers[0].gpus else any)

    def generate(self, ids, clips, *, max_new_tokens, temperature, seed, stop=(), shared_prefix=0) -> Sample:
        images = []
        for clip in clips:
            images += self._frames.sent(clip)
        prompt_key = hash((tuple(ids[:shared_prefix]), *images[:1])) if shared_prefix else None
        payload = {
            "input_ids": self.renderer.compact(ids),
            "image_data": images,
            "sampling_params": self._sampling(max_new_tokens, temperature, seed, stop),
            "return_logprob": True,
            "return_prompt_token_ids": True,
        }

        # Ask healthy servers until one answers.
        deadline = time.monotonic() + self.timeout
        problem = ""
        while (left := deadline - time.monotonic()) > 0:
            with self._changed:
                server = self._pick_server(self._wait_for_servers(any, left), prompt_key)
                server.busy += 1
                oldest = self.version  # of the weights that may sample the reply
            try:
                reply = self._ask(server, "/generate", min(self.attempt_timeout, deadline - time.monotonic()), payload)
                sample = self._read_sample(reply, ids, max_new_tokens, oldest)
                server.strikes = 0
                server.restarted = False
                return sample
            except _Failure as error:
                problem = str(error)  # only its text: the traceback would keep this call and its clips in memory
                if server.healthy:  # if not, another request has already reported it
                    self._strike(server, problem)
            finally:
                with self._changed:
                    server.busy -= 1
                    self._changed.notify_all()
        raise EngineError(f"not served within {self.timeout:g} s, last: {problem}")

    def update_weights(self, path: str | Path, version: int, push: bool = True) -> None:
        with self._changed:
            self.snapshot = str(path)
            self.version = version
            self._last_reader.clear()  # new weights empty the servers' caches
            for server in self._servers:
                server.healthy = False  # until its supervisor has loaded them
                server.has_our_snapshot |= not push  # another rank has loaded them
            self._changed.notify_all()
        self._wait_for_servers(all if push else any)  # the rank that pushes knows which servers were given up

    def close(self) -> None:
        """Start no further request, and kill our servers and their child processes."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for server in self._servers:
            if server.process:
                kill_group(server.process)
        self._frames.close()

    # -------------------------------------------------------------------------------------------- requests

    def _sampling(self, max_new_tokens: int, temperature: float, seed: int, stop: Sequence[int]) -> dict:
        return {
            "temperature": temperature,
            "top_p": 1.0,  # SGLang does not renormalise log-probs after truncation
            "top_k": -1,
            "sampling_seed": seed % 2**31,  # SGLang ignores it without --enable-deterministic-inference
            "max_new_tokens": max_new_tokens,
            "stop_token_ids": list(stop),
            "skip_special_tokens": False,
            "logit_bias": {str(token): -1000.0 for token in self.renderer.never_sampled},
        }

    def _pick_server(self, ready: list[_Server], prompt_key: int | None) -> _Server:
        """Return the server that read this prompt last, since its cache holds it. If the least busy server has at least 8
        requests fewer (about a group), return that one."""
        chosen = min(ready, key=lambda server: server.busy)
        if prompt_key is not None:
            reader = self._last_reader.get(prompt_key)
            if reader in ready and reader.busy < chosen.busy + 8:
                chosen = reader
            self._last_reader[prompt_key] = chosen
        return chosen

    def _read_sample(self, reply: Any, ids: list[int], max_new_tokens: int, oldest: int) -> Sample:
        """Parse a reply. Refuse one that has the wrong weights, or does not continue the prompt that the trainer reads."""
        # Sampling ended with a stop token or at the token budget.
        meta = _field(reply, "meta_info", dict)
        finish = _field(meta, "finish_reason", dict).get("type")
        if finish not in ("stop", "length"):
            raise _Failure(f"finish reason {meta['finish_reason']}")

        # The weights were current at some time since the request was sent.
        label = _field(meta, "weight_version", str)  # "default" if the server has loaded no snapshot
        current = {str(version): version for version in range(oldest, self.version + 1)}
        if self.snapshot and label not in current:
            raise _Failure(f"sampled by weights {label[:20]!r}, expected {oldest} ... {self.version}")

        # The server read the same ids that the trainer will read.
        prompt = _field(reply, "prompt_token_ids", list)
        if prompt != ids:
            same = len(os.path.commonprefix([ids, prompt]))
            differ = f"the server and the trainer read prompts that differ from position {same} on"
            raise ContractError(f"{differ}: compare preprocessor_config.json with the run's `visual` keys")

        # Each sampled token has a log-prob.
        sampled, logprobs = [], []
        for entry in _field(meta, "output_token_logprobs", list):
            match entry:
                case [float() | int() as logprob, int(token), _] if -1e9 < logprob <= 0 <= token < self._vocabulary:
                    sampled.append(token)
                    logprobs.append(float(logprob))
                case _:
                    wanted = f"[a log-prob, a token below {self._vocabulary}, its text]"
                    raise _Failure(f"output_token_logprobs has {str(entry)[:80]}, not {wanted}")
        if not 1 <= len(sampled) <= max_new_tokens:
            count = len(sampled)
            raise _Failure(f"output_token_logprobs has {count} tokens, expected 1 to {max_new_tokens}")
        return Sample(sampled, logprobs, finish, current.get(label, 0))

    def _wait(self, seconds: float | None, until: Callable[[], bool] = lambda: False) -> None:
        """Wait at most `seconds` until `until()` holds. Raise EngineError if the engine is closed meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or until(), seconds)
            if self._closed:
                raise EngineError("the engine was closed")

    def _wait_for_servers(self, enough: Callable, seconds: float | None = None) -> list[_Server]:
        """Wait until `enough` (`all` or `any`) servers are healthy, at most as long as two starts may take. Return the healthy
        ones. Nobody waits for servers that are given up, or for servers of `urls` that keep failing, unless all do."""

        def expected() -> list[_Server]:
            kept = [server for server in self._servers if not server.given_up]
            hopeful = [server for server in kept if server.healthy or server.gpus or server.strikes <= STRIKES]
            return hopeful or kept

        if seconds is None:
            seconds = 2 * self.start_timeout
        with self._changed:  # the lock is re-entrant, and waiting in _wait releases it completely
            self._wait(seconds, lambda: enough(server.healthy for server in expected()) or not expected())
            healthy = [server for server in expected() if server.healthy]
            if not healthy:
                first = self._servers[0]
                raise EngineError(first.given_up or f"no server is ready after {seconds:.3g} s, last: {first.problem}")
            return healthy

    def _ask(self, server: _Server, route: str, seconds: float, payload: dict | None = None) -> Any:
        """Send a request, and return the reply's JSON. A request that the server refuses is an EngineError."""
        self._wait(0)  # raises if the engine is closed
        try:
            reply = request(server.url + route, seconds, payload)
            if reply.status == 200:
                return reply.json()
        except NoReply as error:
            raise _Failure(f"{server.url}{route}: {error}") from None
        if reply.status == 400:
            raise EngineError(f"{server.url}{route} refuses the request: {reply.text[:500]}")
        raise _Failure(f"{server.url}{route}: status {reply.status}: {reply.text[:500]}")

    # -------------------------------------------------------------------------------------------- supervision

    def _strike(self, server: _Server, problem: str) -> None:
        """Count a failure, and wake the server's supervisor. Nobody chooses the server until it is healthy again."""
        with self._changed:
            server.healthy = False
            server.strikes += 1
            server.problem = problem
            self._changed.notify_all()

    def _supervise(self, server: _Server) -> None:
        """Move one server through these states, in its own thread, until it is given up or the engine is closed.

            started -> warm -> healthy        a server that we did not start begins as warm
               ^         ^        |
               |         +--------+           it has failed, or there are newer weights
               +------------------+           its process has exited, or it has failed STRIKES times

        Each failure is a strike, and a served request clears them. Without one, a server is restarted only once: it is given up
        when it exits again, or has 2 * STRIKES strikes. A server of `urls` is asked for ever, in longer pauses."""
        started = time.monotonic()
        try:
            while True:
                if server.gpus and self._must_start(server):
                    self._start(server)
                    started = time.monotonic()
                elif server.warm and server.strikes and not server.healthy:
                    self._wait(min(LONGEST_PAUSE, self.patience * 2 ** min(server.strikes, 10)))
                try:
                    if not server.warm:
                        self._warm_up(server)
                    self._bring_up_to_date(server)
                    self._wait(2.0, lambda: not server.healthy)  # then look whether an idle server still lives
                except (_Failure, EngineError) as error:  # EngineError: a newer snapshot has replaced this one
                    if server.warm or server.process.poll() is not None:
                        self._strike(server, str(error))
                    elif time.monotonic() - started > self.start_timeout:
                        self._give_up(server, f"it did not start within {self.start_timeout:g} s")
                    else:
                        self._wait(self.patience)
        except Exception as error:  # the waiting threads report it, even if it is a bug of ours
            with self._changed:
                server.healthy = False
                server.given_up = str(error) if isinstance(error, EngineError) else repr(error)
                self._changed.notify_all()
                if not self._closed:
                    log.warning("%s serves no more: %s", server.url, server.given_up)

    def _must_start(self, server: _Server) -> bool:
        """Return whether a server of ours must start, at first or once more. Give up one whose restart did not help."""
        if server.process is None:
            return True
        exited = server.process.poll() is not None
        if exited:
            server.problem = f"exit code {server.process.returncode}"
        if not server.restarted:
            return exited or server.strikes >= STRIKES
        if exited or server.strikes >= 2 * STRIKES:
            self._give_up(server, server.problem)
        return False

    def _start(self, server: _Server) -> None:
        """Start a server's process. If it had one, kill that first."""
        if server.process:
            self.restarts += 1
            log.warning("restarting the server on GPU %s: %s, %s", server.gpus, server.problem, self._log_of(server))
            kill_group(server.process)  # its child processes can outlive it
            server.restarted = True
        server.healthy = server.warm = False
        command = self._launch(urlsplit(server.url).port)
        with open(self._log_of(server), "ab") as file, self._changed:
            self._wait(0)  # `close` kills every process that has started by then
            server.process = start_group(command, env=_server_environment(server.gpus), stdout=file, stderr=file)

    def _give_up(self, server: _Server, problem: str) -> NoReturn:
        output = self._log_of(server)
        end = "\n".join(output.read_text("utf-8", "replace").splitlines()[-20:])
        raise EngineError(f"the server on GPU {server.gpus} is given up: {problem}; {output} ends:\n{end}")

    def _log_of(self, server: _Server) -> Path:
        return self._logs / f"sglang-gpu{server.gpus}.log"

    def _bring_up_to_date(self, server: _Server) -> None:
        """Make a server load the current snapshot, unless it already has it. Raise if it does not answer."""
        info = self._ask(server, "/model_info", self.probe_timeout)
        if server.healthy:  # its version can be newer by now: another rank pushes it before this one hears of it
            return
        with self._changed:
            snapshot = self.snapshot
            version = self.version
        if snapshot and not (server.has_our_snapshot and _field(info, "weight_version", str) == str(version)):
            load = {"model_path": snapshot, "weight_version": str(version), "flush_cache": True}
            self._ask(server, "/update_weights_from_disk", self.attempt_timeout, load)
            server.has_our_snapshot = True
        with self._changed:
            server.healthy = version == self.version  # False if newer weights have arrived meanwhile
            self._changed.notify_all()

    def _warm_up(self, server: _Server) -> None:
        """Make a new server sample a greedy and a random turn in one batch, as sub-agents and main agents do. SGLang compiles
        that path at its first use, which takes up to a minute. Otherwise the first episodes would wait for it."""
        sampling = [self._sampling(8, temperature, 0, ()) | {"ignore_eos": True} for temperature in (0.0, 1.0)]
        asked = {"input_ids": [[0], [0]], "sampling_params": sampling, "return_logprob": True}
        self._ask(server, "/generate", self.start_timeout, asked)
        server.warm = True


def _field(reply: Any, name: str, kind: type) -> Any:
    """Return a field of a reply. Raise _Failure if it is missing or has another type."""
    value = reply.get(name) if isinstance(reply, dict) else None
    if not isinstance(value, kind):
        raise _Failure(f"`{name}` must be a {kind.__name__}, in {str(reply)[:300]}")
    return value


# ------------------------------------------------------------------------------------------------ frames


class FrameFiles:
    """Encodes frames for requests: for servers on this machine as uncompressed files in memory, for others as PNGs. A clip
    is written once for all rollouts and turns that show it. Its files are deleted when its pixels are freed."""

    def __init__(self, in_memory: bool):
        self.folder = Path(tempfile.mkdtemp(prefix="frames-", dir=memory_folder())) if in_memory else None
        self.numbers = itertools.count()
        self.sent_as: dict[int, list[str]] = {}  # by id(clip.pixels)
        self.lock = threading.Lock()

    def sent(self, clip: Clip) -> list[str]:
        """Return one string per frame for the request: a file URL or a base64 PNG."""
        key = id(clip.pixels)
        with self.lock:  # the rollouts of a group send the same clip at the same time
            if key not in self.sent_as:
                self.sent_as[key] = [self._write(pixels) for pixels in clip.pixels]
                weakref.finalize(clip.pixels, self._forget, key)  # a later clip can get the same id
            return self.sent_as[key]

    def _write(self, pixels: np.ndarray) -> str:
        image = Image.fromarray(pixels)
        if self.folder:
            path = self.folder / f"{next(self.numbers)}.bmp"
            with contextlib.suppress(OSError):  # if memory is full, send the frame inside the request
                image.save(path)
                return f"file://{path}"
            path.unlink(missing_ok=True)
        file = io.BytesIO()
        image.save(file, "png", compress_level=0)
        return base64.b64encode(file.getvalue()).decode()

    def _forget(self, key: int) -> None:
        for sent in self.sent_as.pop(key):
            if sent.startswith("file://"):
                Path(sent.removeprefix("file://")).unlink(missing_ok=True)

    def close(self) -> None:
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)


# ------------------------------------------------------------------------------------------------ starting a server


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


def on_this_machine(urls: Sequence[str]) -> bool:
    """Return whether the servers can read this machine's files. Servers that we start have no URL yet."""
    return all(urlsplit(url).hostname in ("127.0.0.1", "localhost") for url in urls)


def server_command(checkpoint: str | Path, renderer: Renderer, port: int, extra: Sequence[str] = ()) -> list[str]:
    """Return the command that starts a server which shows the model the same pixels as the trainer."""
    size = renderer.contract.processor_size()
    image = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(checkpoint), "--host", "127.0.0.1"]
    return [*command, "--port", str(port), "--mm-process-config", json.dumps({"image": image}), *extra]


def _text_config(checkpoint: str | Path) -> dict[str, Any]:
    """Return the language model's keys of config.json, or {} if this machine does not have the checkpoint."""
    config = read_json(Path(checkpoint) / "config.json") or {}
    return config.get("text_config", config)  # Qwen2.5-VL has them at the top level


def server_flags(checkpoint: str | Path, max_context: int, gpus: Sequence[int], tensor_parallel: int = 1) -> list[str]:
    """Return the flags of every server that we start, in RL and evaluation. On Hopper they select SGLang's
    well-tested paths over newer ones. A config's `server_args` follow them; the last flag of a name wins."""
    # 16 more for the end of a turn
    context = min(max_context + 16, _text_config(checkpoint)["max_position_embeddings"])
    flags = [
        f"--context-length={context}",  # the default, the model's 262,144 tokens, reserves 2 GB
        f"--max-running-requests={64 * tensor_parallel}",  # the default reserves slots for thousands of requests
        "--enable-fp32-lm-head",  # logits in fp32 as in the trainer; the default rounds them to bf16
        "--mm-feature-transport=cpu",  # the default, CUDA IPC, takes a pool of 1 GiB for image features
        "--prefill-decode-interval=0",  # the default runs 22 decoding steps before it prefills the next prompt
        "--schedule-policy=lpm",  # prompts in the cache go first, so a group's prompt is prefilled once
    ]
    # SGLang would decode Qwen3-VL with flashinfer. fa3 is for Hopper: on newer GPUs it fails an assertion.
    if torch.cuda.is_available() and torch.cuda.get_device_capability(gpus[0]) == (9, 0):
        flags.append("--attention-backend=fa3")
    return flags
