"""servers.py: an engine of SGLang servers on this machine, over HTTP. open_engine.py starts them.

    engine = SGLang(servers, renderer)
    engine.wait_until_ready()                       # each server is healthy and has sampled a token

A new prompt goes to the next server in turn, and all requests with it follow, because that server's cache holds it. Every reply
must echo the trainer's prompt ids and carry the current weights' version. A lost request is asked on the other servers. A
server that exits, times out, fails MAX_FAILURES times in a row or does not take weights is left out, and the run goes on without it.

Deliberately missing: restarts (the same command brings a server back), streaming, weight sync over NCCL, repeatable samples.
"""

import logging
import os
import shutil
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
from PIL import Image

from episode import Prompt
from runtime.distributed import local_rank
from runtime.engine import Engine, EngineError, EngineLost, Sample, map_in_threads
from runtime.processes import MEMORY, kill_group
from runtime.render import Renderer
from runtime.video import Clip
from runtime.visual import ContractError

log = logging.getLogger(__name__)

IMAGE_BYTES = 7e9  # bytes of /dev/shm for the servers' images: 64 requests in flight x 64 frames x 1.6 MB
MAX_FAILURES = 3  # a server that fails so often in a row is left out


@dataclass(eq=False)
class Server:
    url: str
    gpus: str = ""  # "4,5"; empty: we did not start it
    log: Path | None = None  # of ours
    process: subprocess.Popen | None = None
    failures: int = 0  # in a row; requests in flight together fail together, and count once
    last_failure: float = 0.0  # when the last one was counted

    @property
    def exited(self) -> bool:
        """We started it, and its process has ended."""
        return self.process is not None and self.process.poll() is not None


class Failure(requests.RequestException):
    """A reply without usable tokens. Requests that get no reply, or an error, raise another RequestException."""


class SGLang(Engine):
    """Client of SGLang servers, and owner of those that this run has started."""

    request_timeout = 300.0  # seconds for a request, so that a call (rollout.call_timeout) can try two servers
    start_timeout = 900.0  # seconds within which all servers must answer

    def __init__(self, servers: list[Server], renderer: Renderer, frames: Path | None = None):
        """`frames`: the folder for frames. None: in memory, or in /tmp if memory has no room."""
        self.version = 0
        self.snapshot: str | None = None  # the folder of the current weights; None: the checkpoint's weights
        self.servers: list[Server] = servers  # those in use
        self.urls = [server.url for server in servers]
        self.renderer = renderer
        self._frames = FrameFiles(frames)
        self._server_of: weakref.WeakKeyDictionary[Prompt, Server] = weakref.WeakKeyDictionary()
        self._turn = local_rank()  # the ranks of a node share its servers: each rank begins with another one
        self._lock = threading.Lock()  # held whenever one of these fields, or a field of a server, changes

    def generate(self, prompt, ids, clips, *, max_new_tokens, temperature, seed, stop=()) -> Sample:
        all_ids = prompt.ids + ids
        payload = {
            "input_ids": self.renderer.compact(all_ids),
            "image_data": self._frames.urls([*prompt.clips, *clips]),
            "sampling_params": {
                "temperature": temperature,
                "sampling_seed": seed % 2**31,  # SGLang ignores it without --enable-deterministic-inference
                "max_new_tokens": max_new_tokens,
                "stop_token_ids": list(stop),
                "top_p": 1.0,  # SGLang does not renormalise log-probs after truncation
                "top_k": -1,
                "skip_special_tokens": False,
                "logit_bias": {str(token): -1000.0 for token in self.renderer.never_sampled},
            },
            "return_logprob": True,
            "return_prompt_token_ids": True,
        }

        # Ask the prompt's server. If the request is lost, ask one of the others, but none twice.
        asked: list[Server] = []
        problem = ""
        while True:
            with self._lock:
                self._require_servers()
                left = [server for server in self.servers if server not in asked]
                if not left:
                    raise EngineError(f"a request failed on {len(asked)} servers; the last one: {problem}")
                server = self._pick_server(prompt, left)
                version = self.version
            asked.append(server)
            sent = time.monotonic()
            try:
                reply = request_json(server.url + "/generate", self.request_timeout, payload)
                sample = self._read_sample(reply, all_ids, version)
                with self._lock:
                    server.failures = 0
                return sample
            except requests.RequestException as error:
                problem = str(error)  # only its text: the traceback would keep this call and its clips in memory
                self._count_failure(server, error, sent)

    def _pick_server(self, prompt: Prompt, left: list[Server]) -> Server:
        """Return the prompt's server. If the prompt has none yet, or the request was lost there, take the next in turn."""
        own = self._server_of.get(prompt)
        if own in left:
            return own
        server = left[self._turn % len(left)]
        self._turn += 1
        if own not in self.servers:  # the prompt is new, or its server was left out
            self._server_of[prompt] = server
        return server

    def _read_sample(self, reply: Any, ids: list[int], version: int) -> Sample:
        """Parse a reply. Refuse one that has the wrong weights, or does not continue the prompt that the trainer reads."""
        try:
            meta = reply["meta_info"]
            finish = meta["finish_reason"]["type"]
            label = meta["weight_version"]
            read = list(reply["prompt_token_ids"])
            logprobs = [float(logprob) for logprob, _, _ in meta["output_token_logprobs"]]
            sampled = [int(token) for _, token, _ in meta["output_token_logprobs"]]
        except (LookupError, TypeError, ValueError):
            raise Failure(f"a reply does not fit: {str(reply)[:300]}") from None
        if finish not in ("stop", "length"):
            raise Failure(f"finish reason {meta['finish_reason']}")
        if self.snapshot and label != str(version):
            raise Failure(f"sampled by weights {label!r}, expected {version}")

        # The server read the same ids that the trainer will read.
        if read != ids:
            same = len(os.path.commonprefix([ids, read]))
            differ = f"the server and the trainer read prompts that differ from position {same} on"
            raise ContractError(f"{differ}: compare preprocessor_config.json with the run's `visual` keys")
        return Sample(sampled, logprobs, finish, version)

    def _count_failure(self, server: Server, failure: Exception, sent: float) -> None:
        """Leave a server out that exited, timed out, or failed MAX_FAILURES times in a row. Requests that were sent before its
        last failure count once, because all requests in flight fail together."""
        with self._lock:
            if sent >= server.last_failure:
                server.failures += 1
                server.last_failure = time.monotonic()
            unusable = server.exited or isinstance(failure, requests.Timeout) or server.failures >= MAX_FAILURES
        if unusable:
            self._leave_out(server, failure)

    # -------------------------------------------------------------------------------------------- weights and servers

    def update_weights(self, path: str | Path, version: int, push: bool = True) -> None:
        with self._lock:
            self.snapshot = str(path)
            self.version = version
        if push:  # to all servers at once
            list(map_in_threads(self._push_weights, [*self.servers], at_once=len(self.urls)))
        self._require_servers()

    def _push_weights(self, server: Server) -> None:
        """Make a server load the current snapshot, or leave it out."""
        payload = {"model_path": self.snapshot, "weight_version": str(self.version), "flush_cache": True}
        try:
            request_json(server.url + "/update_weights_from_disk", self.request_timeout, payload)
        except (requests.RequestException, EngineError) as error:  # EngineError: it refuses the snapshot
            self._leave_out(server, error)

    def wait_until_ready(self) -> None:
        """Wait until each server is healthy and has sampled a token. If one does not, kill ours."""
        payload = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}}
        deadline = time.monotonic() + self.start_timeout
        for server in self.servers:
            while True:
                seconds = max(1.0, deadline - time.monotonic())
                try:
                    # A server samples before its own warm-up has ended, and dies if weights are pushed until then.
                    request_json(server.url + "/health", seconds)  # 503 while it warms up
                    request_json(server.url + "/generate", seconds, payload)
                    break
                except requests.RequestException as error:
                    if server.exited or time.monotonic() > deadline:
                        problem = server_problem(server, error)
                        self.close()
                        raise EngineError(problem) from None
                    time.sleep(0.2)

    def _require_servers(self) -> None:
        if not self.servers:
            raise EngineLost("no server is left: the engine was closed, or each failed; the lines above say why")

    def _leave_out(self, server: Server, failure: Exception) -> None:
        """Send no more requests to a server, and kill it if it is ours."""
        with self._lock:
            if server not in self.servers:
                return
            self.servers.remove(server)
            log.warning("servers left: %d, because %s", len(self.servers), server_problem(server, failure))
        kill(server)

    def close(self) -> None:
        """Send no further request, and kill our servers and their child processes."""
        with self._lock:
            servers = self.servers
            self.servers = []
        for server in servers:
            kill(server)
        shutil.rmtree(self._frames.folder, ignore_errors=True)


def kill(server: Server) -> None:
    """Kill a server that we started. Remove the images that SGLang leaves in memory when it is killed."""
    if server.process:
        kill_group(server.process)
        for image in MEMORY.glob(f"sgl_shm_mm_{server.process.pid}_*"):
            image.unlink(missing_ok=True)


def server_problem(server: Server, failure: Exception) -> str:
    """Return a sentence about a server that failed, with the end of its log if it is ours."""
    if not server.process or not server.log:
        return f"the server at {server.url} failed: {failure}"
    reason = f"exit code {server.process.returncode}" if server.exited else str(failure)
    end = "\n".join(server.log.read_text("utf-8", "replace").splitlines()[-20:])
    return f"the server on GPU {server.gpus} failed: {reason}; {server.log} ends:\n{end}"


class FrameFiles:
    """Hands frames to servers as files, uncompressed: a clip once for all rollouts and turns that show it."""

    def __init__(self, parent: Path | None):
        if parent is None and shutil.disk_usage(MEMORY).free > IMAGE_BYTES:
            parent = MEMORY
        self.folder = tempfile.mkdtemp(prefix=f"minparavt-{os.getuid()}-", dir=parent)
        self._folder_of: weakref.WeakKeyDictionary[Clip, str] = weakref.WeakKeyDictionary()  # with the clip's frames
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


def request_json(url: str, seconds: float, payload: dict | None = None) -> Any:
    """Send a POST of JSON, or a GET, to a server of this machine, which may be silent for so many seconds. Return the reply's
    JSON, or None if it is empty. A request that the server refuses is an EngineError; without a reply, raise a
    RequestException."""
    with requests.Session() as session:
        session.trust_env = False  # do not ask by way of a proxy
        reply = session.request("POST" if payload else "GET", url, json=payload, timeout=(10.0, seconds))
    if reply.status_code == 400:
        raise EngineError(f"{url} refuses the request: {reply.text[:500]}")
    reply.raise_for_status()
    return reply.json() if reply.content else None
