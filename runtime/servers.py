"""servers.py: SGLang servers as an engine: started, supervised and asked over HTTP.

    engine = SGLang(checkpoint, renderer, gpus=(6, 7))      # starts one server per GPU, or per `tensor_parallel` GPUs
    engine = SGLang(checkpoint, renderer, urls=(...,))      # servers that already run
    engine.wait_until_ready()                               # they start meanwhile

Every response must echo the trainer's prompt ids and carry the current weights' version. A dead server is restarted
and loads the current snapshot; only lost requests run again. Our servers end when we end, even by kill -9.

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
from collections.abc import Callable, Iterable, Sequence
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


class _Lost(Exception):
    """A request was lost or answered by the wrong weights: it is sent again when its server has been checked."""


class _Misfit(_Lost):
    """A reply of another shape than ours, as of another server or version. Three in a row give the server up."""


@dataclass
class _Server:
    url: str
    gpus: str = ""  # "4,5"; none: somebody else started it
    process: subprocess.Popen | None = None
    busy: int = 0  # requests under way
    healthy: bool = False  # it answers, with the current weights
    failed: str = ""  # why it was given up
    misfits: int = 0  # replies in a row that did not fit
    ours: bool = False  # it has loaded a snapshot of this run; another run's may have the same number


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
        self.version, self.snapshot, self.restarts = 0, None, 0
        self.renderer, self.start_timeout, self.patience = renderer, start_timeout, patience
        flags = (*server_args, f"--tp-size={tensor_parallel}")
        self._launch = launch or (lambda port: server_command(checkpoint, renderer, port, flags))
        self._tokens = _text_config(checkpoint).get("vocab_size", math.inf)
        self._servers = [_Server(url.rstrip("/")) for url in urls]
        with contextlib.ExitStack() as probes:  # open until each server has a port, or two might get the same
            for first in range(0, len(gpus), tensor_parallel):
                probe = probes.enter_context(socket.create_server(("127.0.0.1", 0)))
                url = f"http://127.0.0.1:{probe.getsockname()[1]}"  # a restarted server keeps it: other ranks know it
                self._servers.append(_Server(url, ",".join(map(str, gpus[first : first + tensor_parallel]))))
        self.urls = [server.url for server in self._servers]
        # Each rank has a client of its own. While nobody has anything to do, each begins with another server.
        offset = int(os.environ.get("RANK", 0)) % len(self._servers)
        self._servers = self._servers[offset:] + self._servers[:offset]
        self._changed, self._closed = threading.Condition(), False
        self._images: dict[int, list[str]] = {}  # id(clip.pixels) -> its frames as sent; as long as the pixels live
        self._readers: dict[int, dict] = {}  # likewise -> {hash of a prompt that it opens: server that read it last}
        self._writing, self._folder, self._numbers = threading.Lock(), None, itertools.count()
        if on_this_machine(urls):  # frames pass as files in memory
            self._folder = Path(tempfile.mkdtemp(prefix="frames-", dir=memory_folder()))
        self._sockets: set[socket.socket] = set()  # of requests under way
        self._supervisors = [threading.Thread(target=self._supervise, args=(s,), daemon=True) for s in self._servers]
        if gpus:
            self._logs = logs = Path(logs or tempfile.mkdtemp(prefix="sglang-"))
            logs.mkdir(parents=True, exist_ok=True)
            print(f"SGLang starts on GPUs {list(gpus)}: up to {start_timeout / 60:g} minutes; logs: {logs}", flush=True)
        for supervisor in self._supervisors:
            supervisor.start()

    def wait_until_ready(self) -> None:
        """Wait for all servers of our own, or for one of somebody else's: only who starts them gives one up in time."""
        self._ready(all if self._servers[0].gpus else any)

    def generate(self, ids, frames, *, max_new_tokens, temperature, seed, stop=(), shared=0) -> Sample:
        images = []
        for clip in frames:
            images += self._shown(clip)
        payload = {
            "input_ids": self.renderer.compact(ids),
            "image_data": images,
            "sampling_params": self._sampling(max_new_tokens, temperature, seed, stop),
            "return_logprob": True,
            "return_prompt_token_ids": True,
        }

        # Ask healthy servers until one has answered.
        deadline, problem = time.monotonic() + self.timeout, None
        while True:
            with self._changed:
                ready = self._ready(any, deadline - time.monotonic())
                left = deadline - time.monotonic()
                if not ready or left <= 0:
                    raise EngineError(f"not served within {self.timeout:g} s, last: {problem}")
                server, oldest = self._choose(ready, ids[:shared], frames), self.version
                server.busy += 1
            try:
                sample = self._sample(self._ask(server, "/generate", left, payload), ids, max_new_tokens, oldest)
                server.misfits = 0
                return sample
            except _Lost as error:
                problem = str(error)  # not the error, whose traceback would keep this call and its frames alive
                server.healthy = False  # until its supervisor has checked it
                server.misfits += isinstance(error, _Misfit)
                if server.misfits > 2:
                    server.failed = f"{server.url} is given up: three replies in a row do not fit, the last: {problem}"
            finally:
                with self._changed:
                    server.busy -= 1
                    self._changed.notify_all()
            self._pause(self.patience)

    def update_weights(self, path: str | Path, version: int, push: bool = True) -> None:
        with self._changed:
            self.snapshot, self.version = str(path), version
            for server in self._servers:
                server.healthy = False  # until it has loaded them, be it because another rank pushes
                server.ours |= not push
            self._changed.notify_all()
        self._ready(all if push else any)  # who pushes knows which servers it has given up

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
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

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

    def _choose(self, ready: list[_Server], prompt: list[int], frames: Sequence[Frames]) -> _Server:
        """Return the server that read the shared prompt last, for its cache has it, unless it has a group's worth of requests
        (8) more than another; else the one with the least to do."""
        chosen = min(ready, key=lambda server: server.busy)
        if prompt and frames:
            key, readers = hash(tuple(prompt)), self._readers[id(frames[0].pixels)]
            if readers.get(key) in ready and readers[key].busy < chosen.busy + 8:
                chosen = readers[key]
            readers[key] = chosen
        return chosen

    def _sample(self, reply: Any, ids: list[int], asked: int, oldest: int) -> Sample:
        """Accept a reply only if it is a result, by the right weights, of the prompt that the trainer will see."""
        meta = _field(reply, "meta_info", dict)
        finish = _field(meta, "finish_reason", dict).get("type")
        if finish not in ("stop", "length"):
            raise _Lost(f"finish reason {meta['finish_reason']}")
        said = _field(meta, "weight_version", str)
        version = int(said) if said.isdecimal() else 0  # a server that has loaded no snapshot says "default"
        if self.snapshot and not oldest <= version <= self.version:
            raise _Lost(f"sampled by weights {said!r}, expected {oldest} ... {self.version}")
        read = _field(reply, "prompt_token_ids", list)
        if read != ids:
            at = len(os.path.commonprefix([ids, read]))
            told = f"the server and the trainer read prompts that differ from position {at} on"
            raise ContractError(f"{told}: compare preprocessor_config.json with the run's `visual` keys")
        sampled, logprobs = [], []
        for entry in _field(meta, "output_token_logprobs", list):
            match entry:
                case [float() | int() as logprob, int(token), _] if (
                    math.isfinite(logprob) and 0 <= token < self._tokens
                ):
                    sampled.append(token)
                    logprobs.append(logprob)
                case _:
                    told = f"output_token_logprobs has {str(entry)[:80]}"
                    raise _Misfit(f"{told}, not [a finite log-prob, a token below {self._tokens}, its text]")
        if not 1 <= len(sampled) <= asked:
            raise _Misfit(f"output_token_logprobs has {len(sampled)} tokens, and 1 to {asked} were asked for")
        return Sample(sampled, logprobs, finish, version)

    def _shown(self, clip: Frames) -> list[str]:
        """Give each frame a form that the servers read, once for all rollouts and turns that show the clip."""
        key = id(clip.pixels)
        with self._writing:  # the rollouts of a group begin together
            if key not in self._images:
                self._images[key], self._readers[key] = [self._send(pixels) for pixels in clip.pixels], {}
                weakref.finalize(clip.pixels, _forget, self._images, self._readers, key)  # its files go with it
            return self._images[key]

    def _send(self, pixels: np.ndarray) -> str:
        """Write a frame where servers on this machine read it, uncompressed; over a network it travels as a PNG."""
        image = Image.fromarray(pixels)
        if self._folder:
            path = self._folder / f"{next(self._numbers)}.bmp"
            with contextlib.suppress(OSError):  # a full memory
                image.save(path)
                return f"file://{path}"
            path.unlink(missing_ok=True)
        file = io.BytesIO()
        image.save(file, "png", compress_level=0)
        return base64.b64encode(file.getvalue()).decode()

    def _pause(self, seconds: float | None, until: Callable[[], bool] = lambda: False) -> None:
        """Wait until `until()` holds, for so many seconds at most; raise if the engine is closed meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or until(), seconds)
            if self._closed:
                raise EngineError("the engine was closed")

    def _ready(self, enough: Callable[[Iterable[bool]], bool], seconds: float | None = None) -> list[_Server]:
        """Return the healthy servers as soon as enough (all or any) of those that live are, or the time is over."""

        def living() -> list[_Server]:
            return [server for server in self._servers if not server.failed]

        with self._changed:  # its lock is re-entrant, and waiting in _pause releases it whole
            self._pause(seconds, lambda: enough(server.healthy for server in living()) or not living())
            if not living():
                raise EngineError(self._servers[0].failed)
            return [server for server in living() if server.healthy]

    def _ask(self, server: _Server, route: str, timeout: float, payload: dict | None = None) -> dict:
        """Send a request over a connection of its own, which `close` can break off, and past any http_proxy."""
        address = urlsplit(server.url)
        connection = (HTTPSConnection if address.scheme == "https" else HTTPConnection)(address.netloc, timeout=10)
        method, body = ("GET", None) if payload is None else ("POST", json.dumps(payload))
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
            self._pause(0)  # raises if `close` has come too early to break it off
            connection.request(method, address.path + route, body, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            text = reply.read(MAX_REPLY).decode("utf-8", "replace")
            if reply.status == 400:
                raise EngineError(f"{server.url}{route} refuses the request: {text[:500]}")
            if reply.status != 200:
                raise _Lost(f"{server.url}{route}: status {reply.status}: {text[:500]}")
            return json.loads(text)
        except (OSError, HTTPException, ValueError, RecursionError) as error:  # the last two: no JSON
            told = "timed out" if time.monotonic() >= deadline else repr(error)
            raise _Lost(f"{server.url}{route}: {told}") from None
        finally:
            self._sockets.discard(sock)
            watchdog.cancel()
            connection.close()

    def _supervise(self, server: _Server) -> None:
        """Keep one server alive and up to date, until it has to be given up. Only this thread of its own starts it."""
        starts, refusals, cold, deadline = 0, 0, True, time.monotonic() + self.start_timeout
        try:
            while True:
                if server.gpus and (server.process is None or server.process.poll() is not None):
                    server.healthy, cold, starts = False, True, starts + 1
                    self._start(server, starts)
                try:
                    if server.gpus and cold:
                        self._warm_up(server)
                        cold = False
                    if not server.healthy:
                        self._bring_up_to_date(server)
                    self._pause(2.0, lambda: not server.healthy)  # one that dies unasked is noticed after 2 s
                    starts, refusals, deadline = 0, 0, time.monotonic() + self.start_timeout
                except (_Lost, EngineError) as error:  # one refused may just give way to the next snapshot
                    refusals += isinstance(error, EngineError | _Misfit)
                    if refusals > 4 or time.monotonic() > deadline:
                        raise EngineError(f"the server is given up: {error}") from None
                    self._pause(0.5)
        except Exception as error:  # whatever it is, it belongs to the threads that wait for the server
            with self._changed:
                server.healthy, server.failed = False, str(error) if isinstance(error, EngineError) else repr(error)
                self._changed.notify_all()
                if not self._closed:
                    log.warning("%s serves no more: %s", server.url, server.failed)

    def _bring_up_to_date(self, server: _Server) -> None:
        info = self._ask(server, "/model_info", 10)
        with self._changed:
            snapshot, version = self.snapshot, self.version
        if snapshot and not (server.ours and _field(info, "weight_version", str) == str(version)):
            load = {"model_path": snapshot, "weight_version": str(version), "flush_cache": True}
            self._ask(server, "/update_weights_from_disk", self.start_timeout, load)
            server.ours = True
        with self._changed:
            server.healthy = version == self.version  # else still newer weights have come meanwhile
            self._changed.notify_all()

    def _warm_up(self, server: _Server) -> None:
        """Let a new server sample a greedy and a random turn in one batch. Such a batch, as main agents and sub-agents make
        it, takes a path that is compiled at its first use: up to a minute, which the first episodes would wait."""
        sampling = [self._sampling(8, temperature, 0, ()) | {"ignore_eos": True} for temperature in (0.0, 1.0)]
        asked = {"input_ids": [[0], [0]], "sampling_params": sampling, "return_logprob": True}
        self._ask(server, "/generate", self.start_timeout, asked)
        note_shared_memory(server.process)  # all that it needs is there now

    def _start(self, server: _Server, attempt: int) -> None:
        output = self._logs / f"sglang-gpu{server.gpus}.log"
        if attempt > 2:
            end = "\n".join(output.read_text("utf-8", "replace").splitlines()[-20:])
            raise EngineError(f"the server on GPU {server.gpus} died twice at its start; {output} ends:\n{end}")
        if server.process:
            self.restarts += 1
            code = server.process.returncode
            log.warning("restarting the server on GPU %s: exit code %s, %s", server.gpus, code, output)
            kill_group(server.process)  # its children may live on
        env = {key: value for key, value in os.environ.items() if not key.startswith(OF_TRAINER)}
        env["CUDA_VISIBLE_DEVICES"] = server.gpus
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible:  # our GPUs are counted among these
            devices = visible.split(",")
            env["CUDA_VISIBLE_DEVICES"] = ",".join(devices[int(gpu)] for gpu in server.gpus.split(","))
        env |= {"no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"}  # it sends itself a first request
        # The server's cache of image embeddings outlives weight updates: with it, a tower that trains serves old features.
        env["SGLANG_VLM_CACHE_SIZE_MB"] = "0"
        command = self._launch(int(server.url.rpartition(":")[2]))
        with open(output, "ab") as file:
            server.process = start_group(command, env=env, stdout=file, stderr=file)


def _field(reply: Any, name: str, kind: type) -> Any:
    """Return a field of a reply, if it is there and of this kind."""
    value = reply.get(name) if isinstance(reply, dict) else None
    if not isinstance(value, kind):
        raise _Misfit(f"`{name}` must be a {kind.__name__}, in {str(reply)[:300]}")
    return value


def _break_off(sock: socket.socket | None) -> None:
    """End what waits for a socket, if it has not just ended."""
    with contextlib.suppress(OSError, AttributeError):
        sock.shutdown(socket.SHUT_RDWR)


def on_this_machine(urls: Sequence[str]) -> bool:
    """Return whether servers read the files of this machine; those that we start have no URL yet."""
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
    """Return the flags of every server that we start, in RL, evaluation and the doctor: SGLang's well-worn paths, where it
    would pick newer ones on Hopper. `server_args` of a config follow them, and the last word counts."""
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


def _forget(images: dict[int, list[str]], readers: dict[int, dict], key: int) -> None:
    """Remove the files of a clip that is freed. Another one may get the id of its pixels."""
    del readers[key]
    for sent in images.pop(key):
        if sent.startswith("file://"):
            Path(sent.removeprefix("file://")).unlink(missing_ok=True)
