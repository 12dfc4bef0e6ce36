"""servers.py: SGLang servers as an engine: started, supervised and asked over HTTP.

    engine = SGLang(checkpoint, renderer, gpus=(6, 7))      # starts one server per GPU, or per `tensor_parallel` GPUs
    engine = SGLang(checkpoint, renderer, urls=(...,))      # servers that already run
    engine.wait_until_ready()                               # they start meanwhile

Every response must echo the trainer's prompt ids and carry the current weights' version. A dead server is restarted
and loads the current snapshot; only lost requests run again. Our servers end when we end, even after kill -9.

Deliberately missing: streaming, weight sync over NCCL, seeds (they count only in the engine in this process).
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
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from PIL import Image

from runtime.cleanup import kill_group, memory_folder, note_shared_memory, start_group
from runtime.engine import Engine, EngineError, Sample
from runtime.render import Renderer
from runtime.video import Frames
from runtime.visual import ContractError, read_json

log = logging.getLogger(__name__)

# Prefixes of the variables of torchrun and of the trainer, which the servers do not inherit.
OF_TRAINER = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC", "TORCH_NCCL", "PET_", "OMP_", "PYTORCH_")  # fmt: skip
MAX_REPLY = 64 << 20  # bytes of a reply that are read; one of 262,144 tokens has some 12 MB
IMAGES = 7e9  # bytes of /dev/shm that the servers' images take: 64 requests in flight, 64 frames each, 1.6 MB a frame


class _Retry(Exception):
    """A request was lost, or answered by the wrong weights: send it again, once its server has been checked."""


class _BadReply(_Retry):
    """A reply of another shape than SGLang's. Three in a row give the server up."""


@dataclass
class _Server:
    url: str
    gpus: str = ""  # "4,5"; none: somebody else started it
    process: subprocess.Popen | None = None
    warm: bool = False  # it has sampled a first batch
    ours: bool = False  # it has loaded a snapshot of this run; another run's may have the same number
    healthy: bool = False  # it answers, with the current weights
    failed: str = ""  # why it was given up
    busy: int = 0  # requests under way
    bad_replies: int = 0  # in a row


class SGLang(Engine):
    """Client and supervisor of SGLang servers."""

    timeout = 1200.0  # seconds of one `generate`: a server's restart and another attempt included

    def __init__(
        self,
        checkpoint: str | Path, renderer: Renderer, *, gpus: Sequence[int] = (), urls: Sequence[str] = (),
        server_args: Sequence[str] = (), tensor_parallel: int = 1,  # GPUs of one server
        logs: str | Path | None = None,  # folder of the servers' logs; None: a new one in /tmp
        launch: Callable[[int], list[str]] | None = None,  # port -> command; tests start something smaller
        start_timeout: float = 900.0,  # seconds of a server's start
        patience: float = 2.0,  # seconds between attempts
    ):  # fmt: skip
        self.version = 0
        self.snapshot: str | None = None  # the folder of the current weights; None: those of the checkpoint
        self.restarts = 0
        self.renderer, self.start_timeout, self.patience = renderer, start_timeout, patience
        flags = (*server_args, f"--tp-size={tensor_parallel}")
        self._launch = launch or (lambda port: server_command(checkpoint, renderer, port, flags))
        self._vocabulary = _text_config(checkpoint).get("vocab_size", math.inf)
        self._frames = FrameFiles(in_memory=on_this_machine(urls))
        self._servers = [_Server(url.rstrip("/")) for url in urls]
        with contextlib.ExitStack() as probes:  # open until each server has a port, or two might get the same
            for first in range(0, len(gpus), tensor_parallel):
                probe = probes.enter_context(socket.create_server(("127.0.0.1", 0)))
                url = f"http://127.0.0.1:{probe.getsockname()[1]}"  # a restarted server keeps it: other ranks know it
                self._servers.append(_Server(url, ",".join(map(str, gpus[first : first + tensor_parallel]))))
        self.urls = [server.url for server in self._servers]
        # Each rank has its own client. When all servers are idle, each rank begins with another one.
        offset = int(os.environ.get("RANK", 0)) % len(self._servers)
        self._servers = self._servers[offset:] + self._servers[:offset]
        self._last_reader: dict[int, _Server] = {}  # hash of a shared prompt -> the server that read it last
        self._sockets: set[socket.socket] = set()  # of requests under way
        self._closed = False
        self._changed = threading.Condition()  # guards the servers' fields, the version and `_closed`
        self._supervisors = [threading.Thread(target=self._supervise, args=(s,), daemon=True) for s in self._servers]
        if gpus:
            self._logs = logs = Path(logs or tempfile.mkdtemp(prefix="sglang-"))
            logs.mkdir(parents=True, exist_ok=True)
            print(f"SGLang starts on GPUs {list(gpus)}: up to {start_timeout / 60:g} minutes; logs: {logs}", flush=True)
        for supervisor in self._supervisors:
            supervisor.start()

    def wait_until_ready(self) -> None:
        """Wait for all servers of our own, or for one of somebody else's: only their owner knows that one will never come."""
        self._wait_for_servers(all if self._servers[0].gpus else any)

    def generate(self, ids, frames, *, max_new_tokens, temperature, seed, stop=(), shared_prefix=0) -> Sample:
        images = []
        for clip in frames:
            images += self._frames.sent(clip)
        prompt_key = hash((tuple(ids[:shared_prefix]), *images[:1])) if shared_prefix else None
        payload = {
            "input_ids": self.renderer.compact(ids),
            "image_data": images,
            "sampling_params": self._sampling(max_new_tokens, temperature, seed, stop),
            "return_logprob": True,
            "return_prompt_token_ids": True,
        }

        # Ask healthy servers until one has answered.
        deadline = time.monotonic() + self.timeout
        problem = None
        while True:
            with self._changed:
                ready = self._wait_for_servers(any, deadline - time.monotonic())
                left = deadline - time.monotonic()
                if not ready or left <= 0:
                    raise EngineError(f"not served within {self.timeout:g} s, last: {problem}")
                server = self._choose(ready, prompt_key)
                server.busy += 1
                oldest = self.version
            try:
                reply = self._ask(server, "/generate", left, payload)
                sample = self._read_sample(reply, ids, max_new_tokens, oldest)
                server.bad_replies = 0
                return sample
            except _Retry as error:
                problem = str(error)  # not the error, whose traceback would keep this call and its frames alive
                server.healthy = False  # until its supervisor has checked it
                server.bad_replies += isinstance(error, _BadReply)
                if server.bad_replies > 2:
                    server.failed = f"{server.url} is given up: three replies in a row do not fit, the last: {problem}"
            finally:
                with self._changed:
                    server.busy -= 1
                    self._changed.notify_all()
            self._wait(self.patience)

    def update_weights(self, path: str | Path, version: int, push: bool = True) -> None:
        with self._changed:
            self.snapshot = str(path)
            self.version = version
            self._last_reader.clear()  # new weights empty the servers' caches
            for server in self._servers:
                server.healthy = False  # until it has loaded them; its supervisor sees to that
                server.ours |= not push  # another rank has loaded them
            self._changed.notify_all()
        self._wait_for_servers(all if push else any)  # the rank that pushes knows which servers were given up

    def close(self) -> None:
        """End requests under way with an EngineError, and our servers with their children."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for sock in list(self._sockets):
            _break_off(sock)
        for server, supervisor in zip(self._servers, self._supervisors):
            supervisor.join()
            if server.process:
                kill_group(server.process)
                server.process = None
        self._frames.close()

    def _sampling(self, max_new_tokens: int, temperature: float, seed: int, stop: Sequence[int]) -> dict:
        return {
            "temperature": temperature,
            "top_p": 1.0,  # log-probs are not renormalised for truncated sampling
            "top_k": -1,
            "sampling_seed": seed % 2**31,  # does nothing without --enable-deterministic-inference
            "max_new_tokens": max_new_tokens,
            "stop_token_ids": list(stop),
            "skip_special_tokens": False,
            "logit_bias": {str(token): -1000.0 for token in self.renderer.never_sampled},
        }

    def _choose(self, ready: list[_Server], prompt_key: int | None) -> _Server:
        """Return the server that read this prompt last, whose cache has it, or the one with the least to do if that has a
        group's worth of requests (8) less."""
        chosen = min(ready, key=lambda server: server.busy)
        if prompt_key is not None:
            reader = self._last_reader.get(prompt_key)
            if reader in ready and reader.busy < chosen.busy + 8:
                chosen = reader
            self._last_reader[prompt_key] = chosen
        return chosen

    def _read_sample(self, reply: Any, ids: list[int], max_new_tokens: int, oldest: int) -> Sample:
        """Accept a reply only if it is a result, by the right weights, of the prompt that the trainer will see."""
        # It has ended by itself or by its budget.
        meta = _field(reply, "meta_info", dict)
        finish = _field(meta, "finish_reason", dict).get("type")
        if finish not in ("stop", "length"):
            raise _Retry(f"finish reason {meta['finish_reason']}")

        # Its weights were current at some time since the request was sent.
        label = _field(meta, "weight_version", str)
        version = int(label) if label.isdecimal() else 0  # a server that has loaded no snapshot says "default"
        if self.snapshot and not oldest <= version <= self.version:
            raise _Retry(f"sampled by weights {label!r}, expected {oldest} ... {self.version}")

        # The server has read the ids that the trainer will read.
        prompt = _field(reply, "prompt_token_ids", list)
        if prompt != ids:
            same = len(os.path.commonprefix([ids, prompt]))
            told = f"the server and the trainer read prompts that differ from position {same} on"
            raise ContractError(f"{told}: compare preprocessor_config.json with the run's `visual` keys")

        # Each sampled token has a finite log-prob.
        sampled, logprobs = [], []
        for entry in _field(meta, "output_token_logprobs", list):
            match entry:
                case [float() | int() as logprob, int(token), _] if (
                    math.isfinite(logprob) and 0 <= token < self._vocabulary
                ):
                    sampled.append(token)
                    logprobs.append(logprob)
                case _:
                    told = f"output_token_logprobs has {str(entry)[:80]}"
                    raise _BadReply(f"{told}, not [a finite log-prob, a token below {self._vocabulary}, its text]")
        if not 1 <= len(sampled) <= max_new_tokens:
            count = len(sampled)
            raise _BadReply(f"output_token_logprobs has {count} tokens, and 1 to {max_new_tokens} were asked for")
        return Sample(sampled, logprobs, finish, version)

    def _wait(self, seconds: float | None, until: Callable[[], bool] = lambda: False) -> None:
        """Wait until `until()` holds, for so many seconds at most; raise if the engine is closed meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or until(), seconds)
            if self._closed:
                raise EngineError("the engine was closed")

    def _wait_for_servers(self, enough: Callable, seconds: float | None = None) -> list[_Server]:
        """Wait until `all` or `any` of the servers that were not given up are healthy, or the time is over; return those."""

        def living() -> list[_Server]:
            return [server for server in self._servers if not server.failed]

        with self._changed:  # its lock is re-entrant, and waiting in _wait releases it whole
            self._wait(seconds, lambda: enough(server.healthy for server in living()) or not living())
            if not living():
                raise EngineError(self._servers[0].failed)
            return [server for server in living() if server.healthy]

    def _ask(self, server: _Server, route: str, timeout: float, payload: dict | None = None) -> dict:
        """Send a request over its own connection, which `close` can break off, and past any http_proxy."""
        address = urlsplit(server.url)
        connection = (HTTPSConnection if address.scheme == "https" else HTTPConnection)(address.netloc, timeout=10)
        method = "POST" if payload else "GET"
        body = json.dumps(payload) if payload else None
        deadline = time.monotonic() + timeout
        sock = None
        # A socket's own timeout begins anew with each byte.
        watchdog = threading.Timer(timeout, lambda: _break_off(sock))
        try:
            connection.connect()
            sock = connection.sock
            sock.settimeout(timeout)
            self._sockets.add(sock)
            watchdog.start()
            self._wait(0)  # raises if `close` has come too early to break it off
            connection.request(method, address.path + route, body, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            text = reply.read(MAX_REPLY).decode("utf-8", "replace")
            if reply.status == 400:
                raise EngineError(f"{server.url}{route} refuses the request: {text[:500]}")
            if reply.status != 200:
                raise _Retry(f"{server.url}{route}: status {reply.status}: {text[:500]}")
            return json.loads(text)
        except (OSError, HTTPException, ValueError, RecursionError) as error:  # the last two: no JSON
            told = "timed out" if time.monotonic() >= deadline else repr(error)
            raise _Retry(f"{server.url}{route}: {told}") from None
        finally:
            self._sockets.discard(sock)
            watchdog.cancel()
            connection.close()

    def _supervise(self, server: _Server) -> None:
        """Bring one server through these states, in its own thread, until it is given up or the engine is closed.

            started -> warm -> healthy        a server of somebody else begins as warm
               ^         ^        |
               |         +--------+           it has lost a request, or there are newer weights
               +------------------+           its process has died

        It is given up after two starts, or after five refusals or bad replies, without being healthy in between; and when it
        has not been healthy for `start_timeout`."""
        starts = refusals = 0  # since it was healthy
        deadline = time.monotonic() + self.start_timeout
        try:
            while True:
                if server.gpus and (server.process is None or server.process.poll() is not None):
                    server.healthy = server.warm = False
                    starts += 1
                    self._start(server, starts)
                try:
                    if server.gpus and not server.warm:
                        self._warm_up(server)
                    if not server.healthy:
                        self._bring_up_to_date(server)
                    self._wait(2.0, lambda: not server.healthy)  # a server that dies idle is noticed after 2 s
                    starts = refusals = 0
                    deadline = time.monotonic() + self.start_timeout
                except (_Retry, EngineError) as error:
                    # A snapshot may be refused just because the next one has replaced it.
                    refusals += isinstance(error, EngineError | _BadReply)
                    if refusals > 4 or time.monotonic() > deadline:
                        raise EngineError(f"the server is given up: {error}") from None
                    self._wait(0.5)
        except Exception as error:  # whatever it is, it belongs to the threads that wait for the server
            with self._changed:
                server.healthy = False
                server.failed = str(error) if isinstance(error, EngineError) else repr(error)
                self._changed.notify_all()
                if not self._closed:
                    log.warning("%s serves no more: %s", server.url, server.failed)

    def _bring_up_to_date(self, server: _Server) -> None:
        """Have a server load the current snapshot, unless it has it."""
        info = self._ask(server, "/model_info", 10)
        with self._changed:
            snapshot = self.snapshot
            version = self.version
        if snapshot and not (server.ours and _field(info, "weight_version", str) == str(version)):
            load = {"model_path": snapshot, "weight_version": str(version), "flush_cache": True}
            self._ask(server, "/update_weights_from_disk", self.start_timeout, load)
            server.ours = True
        with self._changed:
            server.healthy = version == self.version  # not if newer weights have come meanwhile
            self._changed.notify_all()

    def _warm_up(self, server: _Server) -> None:
        """Let a new server sample a greedy and a random turn in one batch. Such a batch, as main agents and sub-agents make
        it, takes a path that is compiled at its first use: up to a minute, which the first episodes would wait."""
        sampling = [self._sampling(8, temperature, 0, ()) | {"ignore_eos": True} for temperature in (0.0, 1.0)]
        asked = {"input_ids": [[0], [0]], "sampling_params": sampling, "return_logprob": True}
        self._ask(server, "/generate", self.start_timeout, asked)
        note_shared_memory(server.process)  # it has opened all of it by now
        server.warm = True

    def _start(self, server: _Server, attempt: int) -> None:
        """Start a server's process, for the first or second time in a row; at the third attempt raise with its log."""
        output = self._logs / f"sglang-gpu{server.gpus}.log"
        if attempt > 2:
            end = "\n".join(output.read_text("utf-8", "replace").splitlines()[-20:])
            raise EngineError(f"the server on GPU {server.gpus} died twice at its start; {output} ends:\n{end}")
        if server.process:
            self.restarts += 1
            code = server.process.returncode
            log.warning("restarting the server on GPU %s: exit code %s, %s", server.gpus, code, output)
            kill_group(server.process)  # its children may live on
        command = self._launch(urlsplit(server.url).port)
        with open(output, "ab") as file:
            server.process = start_group(command, env=_server_environment(server.gpus), stdout=file, stderr=file)


class FrameFiles:
    """The form in which frames are sent: to servers on this machine as files in memory, uncompressed; over a network as PNGs.
    A clip is written once, for all rollouts and turns that show it, and its files live as long as its pixels."""

    def __init__(self, in_memory: bool):
        self.folder = Path(tempfile.mkdtemp(prefix="frames-", dir=memory_folder())) if in_memory else None
        self.numbers = itertools.count()
        self.sent_as: dict[int, list[str]] = {}  # by id(clip.pixels)
        self.lock = threading.Lock()

    def sent(self, clip: Frames) -> list[str]:
        """Return what a request says of each frame."""
        key = id(clip.pixels)
        with self.lock:  # the rollouts of a group begin together
            if key not in self.sent_as:
                self.sent_as[key] = [self._write(pixels) for pixels in clip.pixels]
                weakref.finalize(clip.pixels, self._forget, key)  # another clip may get the id
            return self.sent_as[key]

    def _write(self, pixels: np.ndarray) -> str:
        image = Image.fromarray(pixels)
        if self.folder:
            path = self.folder / f"{next(self.numbers)}.bmp"
            with contextlib.suppress(OSError):  # a full memory: send it in the request instead
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


def _server_environment(gpus: str) -> dict[str, str]:
    """Return the environment of a server on these GPUs: ours, without what torchrun and the trainer have set."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(OF_TRAINER)}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:  # our GPUs are counted among these
        devices = visible.split(",")
        gpus = ",".join(devices[int(gpu)] for gpu in gpus.split(","))
    env["CUDA_VISIBLE_DEVICES"] = gpus
    env |= {"no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"}  # it sends itself a first request
    # The server's cache of image embeddings outlives weight updates: with it, a tower that trains serves old features.
    env["SGLANG_VLM_CACHE_SIZE_MB"] = "0"
    return env


def _field(reply: Any, name: str, kind: type) -> Any:
    """Return a field of a reply, if it is there and of this kind."""
    value = reply.get(name) if isinstance(reply, dict) else None
    if not isinstance(value, kind):
        raise _BadReply(f"`{name}` must be a {kind.__name__}, in {str(reply)[:300]}")
    return value


def _break_off(sock: socket.socket | None) -> None:
    """End the request that waits for a socket, if it has not just ended."""
    with contextlib.suppress(OSError, AttributeError):
        sock.shutdown(socket.SHUT_RDWR)


def on_this_machine(urls: Sequence[str]) -> bool:
    """Return whether servers read the files of this machine. Servers that we start have no URL yet."""
    return all(urlsplit(url).hostname in ("127.0.0.1", "localhost") for url in urls)


def server_command(checkpoint: str | Path, renderer: Renderer, port: int, extra: Sequence[str] = ()) -> list[str]:
    """Return the command of a server that shows the model the pixels that the trainer shows it."""
    size = renderer.contract.processor_size()
    image = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(checkpoint), "--host", "127.0.0.1"]
    return [*command, "--port", str(port), "--mm-process-config", json.dumps({"image": image}), *extra]


def _text_config(checkpoint: str | Path) -> dict[str, Any]:
    """Return what config.json says of the language model; {} where there is none, as beside a server elsewhere."""
    config = read_json(Path(checkpoint) / "config.json") or {}
    return config.get("text_config", config)  # Qwen2.5-VL's has no part of its own


def server_flags(checkpoint: str | Path, max_context: int, gpus: Sequence[int], tensor_parallel: int = 1) -> list[str]:
    """Return the flags of every server that we start, in RL, evaluation and the doctor: SGLang's well-tested paths, where it
    would pick newer ones on Hopper. `server_args` of a config follow them, and the last flag of a name counts."""
    import torch  # which a client of servers does not need

    # 16: the end of a turn
    context = min(max_context + 16, _text_config(checkpoint)["max_position_embeddings"])
    flags = [
        f"--context-length={context}",  # for the model's own, 262,144 tokens, it reserves 2 GB
        f"--max-running-requests={64 * tensor_parallel}",  # it reserves request slots for thousands
        "--enable-fp32-lm-head",  # logits as the trainer has them: it rounds them to bf16
        "--mm-feature-transport=cpu",  # it hands image features over by CUDA IPC, out of a pool of 1 GiB
        "--prefill-decode-interval=0",  # it lets 22 decoding steps pass before it reads the next prompt
        "--schedule-policy=lpm",  # prompts that its cache has go first, so a group's is read once
    ]
    # It picks flashinfer for Qwen3-VL's decoding. On a newer GPU than Hopper fa3 would end with an assertion.
    if torch.cuda.is_available() and torch.cuda.get_device_capability(gpus[0]) == (9, 0):
        flags.append("--attention-backend=fa3")
    return flags
