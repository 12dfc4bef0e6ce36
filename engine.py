"""engine.py: tokens in, tokens out. Who samples the turns of a rollout: a model in this process, or SGLang servers.

    engine = open_engine(checkpoint, renderer)                   # in this process, on a CPU or a GPU
    engine = open_engine(checkpoint, renderer, gpus=(6, 7))      # starts and supervises one SGLang server per GPU
    engine = open_engine(checkpoint, renderer, urls=(...,))      # servers that already run
    sample = engine.generate(ids, frames, max_new_tokens=512, temperature=0.7, seed=1, stop=(im_end,))
    engine.update_weights(snapshot_dir, version)                 # safetensors; every later sample carries the version

`generate` blocks and is called from many threads: one per running agent. Both engines return exactly the sampled ids
(the stop token included) and log softmax(masked logits / temperature) of each, where image and video tokens are masked.

SGLang is spoken to over HTTP. Every response must echo exactly the ids that the trainer will learn from, and must carry
the weights' current version. A dead server is restarted, loads the current snapshot, and only lost requests run again.

Deliberately missing: streaming, tensor parallelism (one server per GPU), weight sync over NCCL.
"""

import atexit
import base64
import contextlib
import io
import itertools
import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import requests

from contract import ContractError, Renderer
from video import Frames

log = logging.getLogger(__name__)


class EngineError(RuntimeError):
    """A request that the engine could not serve; it costs one episode."""


@dataclass(frozen=True)
class Sample:
    """One sampled turn."""

    ids: list[int]  # the stop token included
    logprobs: list[float]  # log softmax(masked logits / temperature); unscaled where the temperature is 0
    finish: str  # stop | length
    version: int  # of the weights that sampled it


class Engine(Protocol):
    version: int

    def generate(
        self,
        ids: list[int],
        frames: Sequence[Frames],
        *,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        stop: tuple[int, ...] = (),
        shared: int = 0,
    ) -> Sample:
        """Continue `ids`. The checkpoint's own end tokens stop, and those in `stop`. `shared`: so many leading ids are
        probably those of other requests, too."""

    def expect(self, change: int) -> None:
        """So many more (or fewer) threads are about to call `generate`."""

    def update_weights(self, path: str | Path, version: int, push: bool = True) -> None:
        """Load the safetensors of a folder, which must stay until the next update: a restarted server reads them again.
        Samples that are under way end with the old weights. `push=False`: another rank loads them into the servers that
        we share, and here they are only expected."""

    def close(self) -> None: ...


def open_engine(
    checkpoint: str | Path,
    renderer: Renderer,
    *,
    gpus: Sequence[int] = (),
    urls: Sequence[str] = (),
    server_args: Sequence[str] = (),
    device: str = "cpu",
    dtype: str = "float32",
    max_batch_tokens: int = 131_072,
) -> Engine:
    """The engine that a config describes: neither GPUs nor URLs mean this process."""
    if gpus or urls:
        return SGLang(checkpoint, renderer, gpus=gpus, urls=urls, server_args=server_args)
    from inprocess import InProcess  # torch and transformers, which a client of servers does not need

    return InProcess(checkpoint, renderer, device=device, dtype=dtype, max_batch_tokens=max_batch_tokens)


def together(engine: Engine, jobs: Sequence[Callable[[], Any]], timeout: float) -> list[Any]:
    """Run jobs at the same time -> their results in order, None for one that is given up.

    The engine is told who is about to ask it for something: while this thread waits, the jobs in its place."""
    if not jobs:
        return []
    lock, waiting, left = threading.Lock(), True, len(jobs)

    def run(job):
        nonlocal left
        try:
            return job()
        finally:
            with lock:
                left -= 1
                if waiting and left:  # the last one hands its place back to us
                    engine.expect(-1)

    engine.expect(len(jobs) - 1)
    pool = ThreadPoolExecutor(len(jobs), "call")  # of our own: in a shared pool, calls would wait for strangers' calls
    futures = [pool.submit(run, job) for job in jobs]
    wait(futures, timeout)
    with lock:
        waiting = False
        if left:
            engine.expect(1 - left)
        finished = [future.done() for future in futures]
    pool.shutdown(wait=False)
    return [future.result() if done else None for future, done in zip(futures, finished)]


def run_all(
    engine: Engine, jobs: Sequence[Callable[[], Any]], at_once: int, on_done: Callable[[int, Any], None]
) -> None:
    """Run jobs, `at_once` at a time -> on_done(index, result) as each ends, in this thread.

    The engine is told how many threads may ask it for something: a job that ends leaves its place to the next."""
    workers = min(at_once, len(jobs))
    lock, unstarted = threading.Lock(), len(jobs) - workers

    def run(job):
        nonlocal unstarted
        try:
            return job()
        finally:
            with lock:
                if unstarted:
                    unstarted -= 1
                else:
                    engine.expect(-1)

    engine.expect(workers)
    pool = ThreadPoolExecutor(max(1, workers), "episode")
    try:
        running = {pool.submit(run, job): i for i, job in enumerate(jobs)}
        for future in as_completed(running):
            on_done(running[future], future.result())
    except BaseException:  # Ctrl-C, or a bug: no further job begins
        with lock:
            unstarted = 0
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


# ------------------------------------------------------------------------------------------------ SGLang over HTTP

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC", "TORCH_NCCL", "PET_", "OMP_")


class _Lost(Exception):
    """A request that was lost or answered by the wrong weights: heal the server and send it again."""


@dataclass
class _Server:
    url: str
    gpu: int | None = None  # None: somebody else started it
    process: subprocess.Popen | None = None
    busy: int = 0  # requests under way
    healthy: bool = True
    ours: bool = False  # it has loaded a snapshot of this run; another run's may bear the same number
    healing: threading.Lock = field(default_factory=threading.Lock)


class SGLang:
    """Client and supervisor of SGLang servers."""

    def __init__(
        self,
        checkpoint: str | Path,
        renderer: Renderer,
        *,
        gpus: Sequence[int] = (),
        urls: Sequence[str] = (),
        server_args: Sequence[str] = (),
        launch: Callable[[int], list[str]] | None = None,  # port -> command; tests start something smaller
        request_timeout: float = 600.0,  # seconds
        start_timeout: float = 900.0,
        attempts: int = 6,
        patience: float = 1.0,  # seconds before the second attempt; doubles
    ):
        self.version, self.snapshot, self.restarts = 0, None, 0
        self.renderer, self.request_timeout, self.start_timeout = renderer, request_timeout, start_timeout
        self.attempts, self.patience = attempts, patience
        self._launch = launch or (lambda port: server_command(checkpoint, renderer, port, server_args))
        self._servers = [_Server(url.rstrip("/")) for url in urls] + [_Server("", gpu) for gpu in gpus]
        self._choosing, self._current = threading.Lock(), threading.Event()  # _current: no weights are on their way
        self._current.set()
        self._closed = False
        self._images: OrderedDict[int, tuple[Frames, list[str]]] = OrderedDict()
        self._session = requests.Session()
        self._session.mount("http://", requests.adapters.HTTPAdapter(pool_connections=64, pool_maxsize=1024))
        atexit.register(self.close)
        try:
            self._everywhere(self._heal)
        except BaseException:
            self.close()
            raise

    def generate(self, ids, frames, *, max_new_tokens, temperature, seed, stop=(), shared=0) -> Sample:
        payload = {
            "input_ids": self.renderer.compact(ids),
            "image_data": [png for clip in frames for png in self._pngs(clip)],
            "sampling_params": {
                "max_new_tokens": max_new_tokens,
                "temperature": temperature,
                "top_p": 1.0,  # log-probs are not renormalised for truncated sampling
                "top_k": -1,
                "stop_token_ids": list(stop),
                "skip_special_tokens": False,
                "logit_bias": {str(token): -1000.0 for token in self.renderer.never_sampled},
                "sampling_seed": seed % 2**31,
            },
            "return_logprob": True,
            "return_prompt_token_ids": True,
        }
        problem = None
        for attempt in range(self.attempts):
            if attempt:  # jitter: hundreds of requests that were lost together must not return together
                time.sleep(min(self.patience * 2 ** (attempt - 1), 30.0) * random.uniform(0.5, 1.5))
            self._current.wait()
            oldest = self.version
            with self._least_loaded() as server:
                try:
                    return self._sample(self._post(server, "/generate", payload, self.request_timeout), ids, oldest)
                except _Lost as error:
                    problem = error
                    if self._closed:
                        break
                    self._heal(server)
        raise EngineError(f"a request was lost {attempt + 1} times, last: {problem}")

    @property
    def urls(self) -> list[str]:
        """For the other ranks, which connect to the servers that rank 0 has started."""
        return [server.url for server in self._servers]

    def expect(self, change: int) -> None:
        """Servers batch on their own."""

    def update_weights(self, path: str | Path, version: int, push: bool = True) -> None:
        self._current.clear()
        try:
            self.snapshot, self.version = str(path), version
            if push:
                self._everywhere(self._heal)
            else:
                for server in self._servers:
                    server.ours = True
        finally:
            self._current.set()

    def close(self) -> None:
        self._closed = True
        for server in self._servers:
            _stop(server)
        atexit.unregister(self.close)

    def _sample(self, reply: dict, ids: list[int], oldest: int) -> Sample:
        """The reply, if it is a result, of the right weights, to the prompt that the trainer will see."""
        meta = reply["meta_info"]
        finish = meta["finish_reason"]["type"]
        if finish not in ("stop", "length"):
            raise _Lost(f"finish reason {meta['finish_reason']}")
        version = _number(meta["weight_version"])
        if self.snapshot and not oldest <= version <= self.version:
            raise _Lost(f"sampled by weights {meta['weight_version']!r}, expected {oldest} ... {self.version}")
        if reply["prompt_token_ids"] != ids:
            raise ContractError(_drift(ids, reply["prompt_token_ids"]))
        logprobs, tokens = zip(*((logprob, token) for logprob, token, _ in meta["output_token_logprobs"]))
        if list(tokens) != reply["output_ids"]:
            raise ContractError("the server's output ids are not those of its log-probs")
        return Sample(list(tokens), list(logprobs), finish, version)

    def _pngs(self, clip: Frames) -> list[str]:
        """Lossless, and encoded once for all rollouts and turns that show the clip."""
        from PIL import Image

        key = id(clip.pixels)
        with self._choosing:
            if key in self._images:
                self._images.move_to_end(key)
                return self._images[key][1]
        encoded = []
        for pixels in clip.pixels:
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "png", compress_level=1)
            encoded.append(base64.b64encode(file.getvalue()).decode())
        with self._choosing:
            self._images[key] = (clip, encoded)  # holds the clip, so that nobody else gets its id
            while len(self._images) > 256:
                self._images.popitem(last=False)
        return encoded

    @contextlib.contextmanager
    def _least_loaded(self):
        with self._choosing:
            server = min(self._servers, key=lambda s: (not s.healthy, s.busy))
            server.busy += 1
        try:
            yield server
        finally:
            with self._choosing:
                server.busy -= 1

    def _post(self, server: _Server, route: str, payload: dict, timeout: float) -> dict:
        try:
            reply = self._session.post(server.url + route, json=payload, timeout=(10, timeout))
            if reply.status_code == 400:
                raise EngineError(f"{server.url}{route} refuses the request: {reply.text[:500]}")
            reply.raise_for_status()
            return reply.json()
        except requests.RequestException as error:
            raise _Lost(f"{server.url}{route}: {error}") from None

    def _everywhere(self, action: Callable[[_Server], None]) -> None:
        with ThreadPoolExecutor(len(self._servers)) as pool:
            list(pool.map(action, self._servers))

    def _heal(self, server: _Server) -> None:
        """Return when the server runs with the current weights. One thread works; the others use other servers, if
        there are any."""
        alone = not any(other.healthy for other in self._servers if other is not server)
        if not server.healing.acquire(blocking=alone):
            return
        try:
            server.healthy = False
            deadline = time.monotonic() + self.start_timeout
            while not (info := self._info(server)):
                if self._closed or time.monotonic() > deadline:
                    raise EngineError(f"the server {server.url} did not answer for {self.start_timeout:g} s")
                if server.gpu is not None and (server.process is None or server.process.poll() is not None):
                    self._start(server)
                time.sleep(0.5)
            if self.snapshot and not (server.ours and _number(info["weight_version"]) == self.version):
                load = {"model_path": self.snapshot, "weight_version": str(self.version), "flush_cache": True}
                reply = self._post(server, "/update_weights_from_disk", load, self.start_timeout)
                if not reply["success"]:
                    raise EngineError(f"{server.url} did not load {self.snapshot}: {reply['message']}")
                server.ours = True
            server.healthy = True
        except _Lost as error:
            log.warning("%s; it is tried again with the next request", error)
        finally:
            server.healing.release()

    def _info(self, server: _Server) -> dict | None:
        """What the server says of its model; None while it cannot serve."""
        try:
            reply = self._session.get(server.url + "/model_info", timeout=10) if server.url else None
            return reply.json() if reply is not None and reply.ok else None
        except requests.RequestException:
            return None

    def _start(self, server: _Server) -> None:
        if not server.url:  # a restarted server keeps its address, which other ranks know
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                server.url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        path = Path(tempfile.gettempdir()) / f"sglang-{os.getpid()}-gpu{server.gpu}.log"
        if server.process is not None:
            self.restarts += 1
            log.warning(
                "server on GPU %s died (exit code %s, log %s): restarting", server.gpu, server.process.poll(), path
            )
        _stop(server)  # its children may live on
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        env = {key: value for key, value in os.environ.items() if not key.startswith(TORCHRUN)}
        env["CUDA_VISIBLE_DEVICES"] = (
            visible[server.gpu] if server.gpu < len(visible) and visible[0] else str(server.gpu)
        )
        # Its cache of image embeddings outlives a weight update, and would go on serving the old vision tower's.
        env["SGLANG_VLM_CACHE_SIZE_MB"] = "0"
        with open(path, "ab") as output:
            server.process = subprocess.Popen(
                self._launch(int(server.url.rpartition(":")[2])),
                env=env,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )


def server_command(checkpoint: str | Path, renderer: Renderer, port: int, extra: Sequence[str] = ()) -> list[str]:
    """How a server is started, so that it shows the model the pixels that the trainer shows it."""
    size = renderer.contract.processor_size()
    image = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(checkpoint), "--host", "127.0.0.1"]
    return [*command, "--port", str(port), "--mm-process-config", json.dumps({"image": image}), *extra]


def _stop(server: _Server) -> None:
    """End a server of ours and all its children."""
    if server.process is None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()


def _number(version: str) -> int:
    return int(version) if version.isdigit() else 0  # a server that has loaded no snapshot says "default"


def _drift(ours: list[int], theirs: list[int]) -> str:
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs))
    at = sum(1 for _ in same)
    return (
        f"the server read another prompt than the trainer will: they differ from position {at} on, "
        f"ours {ours[at : at + 5]} of {len(ours)} ids, the server's {theirs[at : at + 5]} of {len(theirs)}. "
        "Compare the checkpoint's preprocessor_config.json with the run's `visual` keys"
    )
