"""servers.py: SGLang servers as an engine: started, supervised and asked over HTTP.

    engine = SGLang(checkpoint, renderer, gpus=(6, 7))      # starts one server per GPU
    engine = SGLang(checkpoint, renderer, urls=(...,))      # servers that already run

Every response must echo the trainer's prompt ids and carry the current weights' version. A dead server is restarted
and loads the current snapshot; only lost requests run again. Our servers end when we end, even by kill -9.

Deliberately missing: streaming, tensor parallelism (one server per GPU), weight sync over NCCL.
"""

import base64
import contextlib
import io
import itertools
import json
import logging
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
from urllib.parse import urlsplit

import numpy as np
from PIL import Image

from runtime.cleanup import kill_group, memory_folder, start_group
from runtime.engine import Engine, EngineError, Sample
from runtime.render import Renderer
from runtime.video import Frames
from runtime.visual import ContractError

log = logging.getLogger(__name__)

# Prefixes of the variables of torchrun and of the trainer, which the servers do not inherit.
OF_TRAINER = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC", "TORCH_NCCL", "PET_", "OMP_", "PYTORCH_")  # fmt: skip


class _Lost(Exception):
    """A request was lost or answered by the wrong weights: it is sent again when its server has been checked."""


@dataclass
class _Server:
    url: str
    gpu: int | None = None  # None: somebody else started it
    process: subprocess.Popen | None = None
    busy: int = 0  # requests under way
    healthy: bool = False  # it answers, with the current weights
    failed: str = ""  # why it was given up
    ours: bool = False  # it has loaded a snapshot of this run; another run's may have the same number


class SGLang(Engine):
    """Client and supervisor of SGLang servers."""

    timeout = 1200.0  # seconds of one `generate`: a server's restart and another attempt included

    def __init__(
        self,
        checkpoint: str | Path, renderer: Renderer, *, gpus: Sequence[int] = (), urls: Sequence[str] = (),
        server_args: Sequence[str] = (),
        launch: Callable[[int], list[str]] | None = None,  # port -> command; tests start something smaller
        start_timeout: float = 900.0,  # seconds of a server's start
        patience: float = 2.0,  # seconds between attempts
    ):  # fmt: skip
        self.version, self.snapshot, self.restarts = 0, None, 0
        self.renderer, self.start_timeout, self.patience = renderer, start_timeout, patience
        self._launch = launch or (lambda port: server_command(checkpoint, renderer, port, server_args))
        self._servers = [_Server(url.rstrip("/")) for url in urls] + [_Server("", gpu) for gpu in gpus]
        self._changed, self._closed = threading.Condition(), False
        self._images: dict[int, list[str]] = {}  # id(clip.pixels) -> its frames as sent; as long as the pixels live
        self._writing, self._folder, self._numbers = threading.Lock(), None, itertools.count()
        if all(urlsplit(url).hostname in ("127.0.0.1", "localhost") for url in urls):  # frames pass as files in memory
            self._folder = Path(tempfile.mkdtemp(prefix="frames-", dir=memory_folder()))
        self._connections: set[HTTPConnection] = set()  # of requests under way
        self._supervisors = [threading.Thread(target=self._supervise, args=(s,), daemon=True) for s in self._servers]
        if gpus:
            logs = f"{tempfile.gettempdir()}/sglang-{os.getpid()}-gpu*.log"
            print(f"SGLang starts on GPUs {list(gpus)}: up to {start_timeout / 60:g} minutes; logs: {logs}", flush=True)
        for supervisor in self._supervisors:
            supervisor.start()
        self._ready(all)
        self.urls = [server.url for server in self._servers]

    def generate(self, ids, frames, *, max_new_tokens, temperature, seed, stop=(), shared=0) -> Sample:
        images = []
        for clip in frames:
            images += self._shown(clip)
        payload = {
            "input_ids": self.renderer.compact(ids),
            "image_data": images,
            "sampling_params": {
                "temperature": temperature,
                "top_p": 1.0,  # log-probs are not renormalised for truncated sampling
                "top_k": -1,
                "sampling_seed": seed % 2**31,
                "max_new_tokens": max_new_tokens,
                "stop_token_ids": list(stop),
                "skip_special_tokens": False,
                "logit_bias": {str(token): -1000.0 for token in self.renderer.never_sampled},
            },
            "return_logprob": True,
            "return_prompt_token_ids": True,
        }

        # Ask the healthy server that has the least to do, until one has answered.
        deadline, problem = time.monotonic() + self.timeout, None
        while True:
            with self._changed:
                ready = self._ready(any, deadline - time.monotonic())
                left = deadline - time.monotonic()
                if not ready or left <= 0:
                    raise EngineError(f"not served within {self.timeout:g} s, last: {problem}")
                server, oldest = min(ready, key=lambda s: s.busy), self.version
                server.busy += 1
            try:
                return self._sample(self._ask(server, "/generate", left, payload), ids, oldest)
            except _Lost as error:
                problem = str(error)  # not the error, whose traceback would keep this call and its frames alive
                server.healthy = False  # until its supervisor has checked it
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
        self._ready(all)

    def close(self) -> None:
        """End requests under way with an EngineError, and our servers with their children."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for connection in list(self._connections):
            with contextlib.suppress(OSError, AttributeError):  # it has just ended
                connection.sock.shutdown(socket.SHUT_RDWR)
        for server, supervisor in zip(self._servers, self._supervisors):
            supervisor.join()
            if server.process:
                kill_group(server.process)
                server.process = None
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _sample(self, reply: dict, ids: list[int], oldest: int) -> Sample:
        """Accept a reply only if it is a result, by the right weights, of the prompt that the trainer will see."""
        meta = reply["meta_info"]
        finish = meta["finish_reason"]["type"]
        if finish not in ("stop", "length"):
            raise _Lost(f"finish reason {meta['finish_reason']}")
        said = meta["weight_version"]
        version = int(said) if said.isdigit() else 0  # a server that has loaded no snapshot says "default"
        if self.snapshot and not oldest <= version <= self.version:
            raise _Lost(f"sampled by weights {said!r}, expected {oldest} ... {self.version}")
        if reply["prompt_token_ids"] != ids:
            at = len(os.path.commonprefix([ids, reply["prompt_token_ids"]]))
            told = f"the server and the trainer read prompts that differ from position {at} on"
            raise ContractError(f"{told}: compare preprocessor_config.json with the run's `visual` keys")
        logprobs = [logprob for logprob, _, _ in meta["output_token_logprobs"]]
        return Sample([token for _, token, _ in meta["output_token_logprobs"]], logprobs, finish, version)

    def _shown(self, clip: Frames) -> list[str]:
        """Give each frame a form that the servers read, once for all rollouts and turns that show the clip."""
        key = id(clip.pixels)
        with self._writing:  # the rollouts of a group begin together
            if key not in self._images:
                self._images[key] = [self._send(pixels) for pixels in clip.pixels]
                weakref.finalize(clip.pixels, _forget, self._images, key)  # its files go with it
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
        """Return the healthy servers as soon as enough are (all or any), or the time is over."""

        def possible() -> bool:
            return enough(not server.failed for server in self._servers)

        with self._changed:  # its lock is re-entrant, and waiting in _pause releases it whole
            self._pause(seconds, lambda: enough(server.healthy for server in self._servers) or not possible())
            if not possible():
                raise EngineError(next(server.failed for server in self._servers if server.failed))
            return [server for server in self._servers if server.healthy]

    def _ask(self, server: _Server, route: str, timeout: float, payload: dict | None = None) -> dict:
        """Send a request over a connection of its own, which `close` can break off, and past any http_proxy."""
        address = urlsplit(server.url)
        connection = (HTTPSConnection if address.scheme == "https" else HTTPConnection)(address.netloc, timeout=10)
        method, body = ("GET", None) if payload is None else ("POST", json.dumps(payload))
        try:
            connection.connect()
            connection.sock.settimeout(timeout)
            self._connections.add(connection)
            self._pause(0)  # raises if `close` has come too early to break it off
            connection.request(method, address.path + route, body, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            text = reply.read().decode("utf-8", "replace")
            if reply.status == 400:
                raise EngineError(f"{server.url}{route} refuses the request: {text[:500]}")
            if reply.status != 200:
                raise _Lost(f"{server.url}{route}: status {reply.status}: {text[:500]}")
            return json.loads(text)
        except (OSError, HTTPException, json.JSONDecodeError) as error:
            raise _Lost(f"{server.url}{route}: {error!r}") from None
        finally:
            self._connections.discard(connection)
            connection.close()

    def _supervise(self, server: _Server) -> None:
        """Keep one server alive and up to date, until it has to be given up. Only this thread of its own starts it."""
        starts, refusals, deadline = 0, 0, time.monotonic() + self.start_timeout
        try:
            while True:
                if server.gpu is not None and (server.process is None or server.process.poll() is not None):
                    server.healthy, starts = False, starts + 1
                    self._start(server, starts)
                try:
                    if not server.healthy:
                        self._bring_up_to_date(server)
                    self._pause(2.0, lambda: not server.healthy)  # one that dies unasked is noticed after 2 s
                    starts, refusals, deadline = 0, 0, time.monotonic() + self.start_timeout
                except (_Lost, EngineError) as error:  # one refused may just give way to the next snapshot
                    refusals += isinstance(error, EngineError)
                    if refusals > 4 or time.monotonic() > deadline:
                        raise EngineError(f"the server is given up: {error}") from None
                    self._pause(0.5)
        except Exception as error:  # whatever it is, it belongs to the threads that wait for the server
            with self._changed:
                server.healthy, server.failed = False, str(error) if isinstance(error, EngineError) else repr(error)
                self._changed.notify_all()

    def _bring_up_to_date(self, server: _Server) -> None:
        info = self._ask(server, "/model_info", 10)
        with self._changed:
            snapshot, version = self.snapshot, self.version
        if snapshot and not (server.ours and info["weight_version"] == str(version)):
            load = {"model_path": snapshot, "weight_version": str(version), "flush_cache": True}
            self._ask(server, "/update_weights_from_disk", self.start_timeout, load)
            server.ours = True
        with self._changed:
            server.healthy = version == self.version  # else still newer weights have come meanwhile
            self._changed.notify_all()

    def _start(self, server: _Server, attempt: int) -> None:
        output = Path(tempfile.gettempdir()) / f"sglang-{os.getpid()}-gpu{server.gpu}.log"
        if attempt > 2:
            end = "\n".join(output.read_text("utf-8", "replace").splitlines()[-20:])
            raise EngineError(f"the server on GPU {server.gpu} died twice at its start; {output} ends:\n{end}")
        if not server.url:  # a restarted server keeps its address, which other ranks know
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                server.url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        if server.process:
            self.restarts += 1
            code = server.process.returncode
            log.warning("restarting the server on GPU %s: exit code %s, %s", server.gpu, code, output)
            kill_group(server.process)  # its children may live on
        env = {key: value for key, value in os.environ.items() if not key.startswith(OF_TRAINER)}
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        env["CUDA_VISIBLE_DEVICES"] = visible.split(",")[server.gpu] if visible else str(server.gpu)
        env |= {"no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"}  # it sends itself a first request
        # The server's cache of image embeddings outlives weight updates: with it, a tower that trains serves old features.
        env["SGLANG_VLM_CACHE_SIZE_MB"] = "0"
        command = self._launch(int(server.url.rpartition(":")[2]))
        with open(output, "ab") as file:
            server.process = start_group(command, env=env, stdout=file, stderr=file)


def server_command(checkpoint: str | Path, renderer: Renderer, port: int, extra: Sequence[str] = ()) -> list[str]:
    """Return the command of a server that shows the model the pixels that the trainer shows it."""
    size = renderer.contract.processor_size()
    image = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(checkpoint), "--host", "127.0.0.1"]
    return [*command, "--port", str(port), "--mm-process-config", json.dumps({"image": image}), *extra]


def context_flags(checkpoint: str | Path, max_context: int) -> list[str]:
    """Return the flags that hold a server to our context: for the model's own, 262,144 tokens, SGLang reserves 2 GB."""
    text = json.loads(Path(checkpoint, "config.json").read_text(encoding="utf-8"))["text_config"]
    return ["--context-length", str(min(max_context + 16, text["max_position_embeddings"]))]  # 16: the end of a turn


def _forget(images: dict[int, list[str]], key: int) -> None:
    """Remove the files of a clip that is freed. Another one may get the id of its pixels."""
    for sent in images.pop(key):
        if sent.startswith("file://"):
            Path(sent.removeprefix("file://")).unlink(missing_ok=True)
