"""engine.py: the interface of the engines that sample an agent's turns: token ids in, token ids out.

    sample = engine.generate(prompt, ids, clips, max_new_tokens=512, temperature=0.7, seed=1, stop=(im_end,))
    engine.update_weights(snapshot_dir, version)                 # safetensors; every later sample carries the version
    results = run_all(engine, jobs, 256)                         # jobs that call the engine, 256 at a time

`generate` blocks. Many threads call it, one per running agent. servers.py queries SGLang, and inprocess.py runs a model in this
process: both return the log-probs of the sampled ids, and ban image and video tokens. api.py asks the model of an API, for
evaluation only: its log-probs are 0, and it bans nothing.
"""

import contextlib
import re
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from episode import Prompt
from runtime.config import ConfigError, UserError
from runtime.video import Clip

K = TypeVar("K")  # name of a job
T = TypeVar("T")  # its result


@dataclass(frozen=True)
class Sample:
    """One sampled turn."""

    ids: list[int]  # the stop token included
    logprobs: list[float]  # log softmax(masked logits / temperature); at temperature 0 the logits are not divided
    finish: Literal["stop", "length"]
    version: int  # version of the weights that sampled it


class Engine:  # every engine has its own `generate`; the other methods may do nothing
    version: int
    servers: Sequence = ()  # SGLang's, those in use

    def generate(
        self, prompt: Prompt, ids: list[int], clips: Sequence[Clip], *, max_new_tokens: int, temperature: float,
        seed: int, stop: tuple[int, ...] = (),
    ) -> Sample:  # fmt: skip
        """Sample a continuation of the prompt and `ids`, up to an end-of-turn token, a token in `stop` or `max_new_tokens`.
        `clips`: those of `ids`. The engine prefills a prompt once for all requests that hold the same object."""
        raise NotImplementedError

    def announce(self, change: int) -> None:
        """Tell the engine that `change` more threads (fewer if negative) are about to call `generate`."""

    def update_weights(self, path: str | Path, version: int, push: bool = True) -> None:
        """Load the safetensors files of a folder. `push=False`: another rank has loaded them into the servers that the ranks
        share; expect the new version in their replies."""

    def close(self) -> None: ...


class EngineError(UserError):
    """A request that the engine could not serve. The episode that needs it fails; the run goes on."""


class EngineLost(UserError):
    """An engine that can serve nothing any more. The run ends."""


def run_all(
    engine: Engine, jobs: Mapping[K, Callable[[], T]], at_once: int, timeout: float | None = None, nested: bool = False
) -> dict[K, T]:
    """Run jobs that call the engine, each in a thread, at most `at_once` at a time. Return their results by name. After
    `timeout` seconds, stop waiting: the other threads run on, and their results are dropped. A job that raises ends the wait at
    once, with its error. `nested`: this thread is itself a job of another run_all."""
    callers = ActiveCallers(engine, jobs, at_once, nested)
    futures: dict[K, Future[T]] = {}
    try:
        with thread_pool(max(1, min(at_once, len(jobs)))) as pool:
            for name, job in jobs.items():
                futures[name] = pool.submit(callers.run, name, job)
            wait(futures.values(), timeout, FIRST_EXCEPTION)
            return {name: future.result() for name, future in futures.items() if future.done()}
    finally:
        callers.remove(jobs)


class ActiveCallers:
    """Tells the engine how many threads can still call it. The in-process engine starts a batch once that many requests wait.
    If the number is too low, batches depend on timing. If it is too high, the engine waits forever.

    The number is that of the unfinished jobs, within two bounds. A pool of `at_once` threads runs no more jobs at once. Callers
    are threads that may still send a request. An episode that waits for its 3 calls does not count, but its calls (`nested`)
    do: with 8 episodes, 8 - 1 + 3 = 10. When the last of the 3 ends, the episode's own thread counts again: 8."""

    def __init__(self, engine: Engine, names: Iterable, at_once: int, nested: bool):
        self.engine = engine
        self.at_least = int(nested)
        self.at_most = at_once
        self.unfinished = set(names)
        self.lock = threading.Lock()
        engine.announce(self.count() - self.at_least)

    def count(self) -> int:
        return max(self.at_least, min(len(self.unfinished), self.at_most))

    def remove(self, names: Iterable) -> None:
        """Stop counting jobs that ended, timed out or were cancelled."""
        with self.lock:
            before = self.count()
            self.unfinished.difference_update(names)
            self.engine.announce(self.count() - before)

    def run(self, name: Hashable, job: Callable[[], T]) -> T:
        try:
            return job()
        finally:
            self.remove([name])


@contextlib.contextmanager
def thread_pool(threads: int) -> Iterator[ThreadPoolExecutor]:
    """Yield a pool of threads. The end of the block cancels what has not begun, and waits for nothing: after an error or Ctrl-C,
    a decoder, a server or a judge may hang."""
    pool = ThreadPoolExecutor(threads)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def map_in_threads(function: Callable[..., T], items: Iterable, at_once: int) -> Iterator[T]:
    """Yield the result for each item, in order. The first error ends it."""
    with thread_pool(at_once) as pool:
        yield from pool.map(function, items)


@dataclass(frozen=True)
class EngineConfig:
    """Which engine samples. Without server_gpus and urls, the model runs in this process."""

    server_gpus: tuple[int, ...] | None = ()
    """GPUs on which this run starts SGLang servers, one server per `tensor_parallel` GPUs. null, in evaluation only: all GPUs of
    this machine, or none if SGLang is not installed."""
    tensor_parallel: int = 1
    """GPUs per server, taken in order: with 2, `server_gpus: [4, 5, 6, 7]` starts a server on 4 and 5 and one on 6 and 7."""
    urls: tuple[str, ...] = ()
    """SGLang servers that run on this machine, to use instead of `server_gpus`. If the vision tower trains, start them with
    SGLANG_VLM_CACHE_SIZE_MB=0: their cache of image embeddings survives a weight update."""
    server_args: tuple[str, ...] = ()
    """Extra flags for `sglang.launch_server`, after those of `runtime.open_engine.server_flags`."""
    max_context: int = 32_768
    """Longest trajectory, in tokens."""
    concurrency: int | None = 256
    """Episodes that run at once on each rank. null, in evaluation only: 32 per GPU of `server_gpus`; without servers, 32."""
    max_batch_tokens: int = 131_072
    """For the model in this process: the most rows * length of a batch. It bounds the memory of the KV cache."""

    def __post_init__(self):
        gpus, size = list(self.gpus), self.tensor_parallel
        if not size or len(gpus) % size:
            raise ConfigError(  # also raised after the YAML is read, for the GPUs that replace null
                f"server_gpus = {gpus} cannot be divided into servers of tensor_parallel = {size}: give a multiple of it"
            )

    @property
    def gpus(self) -> tuple[int, ...]:
        """GPUs of this run's servers, once `for_this_machine` has replaced null."""
        return self.server_gpus or ()

    @property
    def at_once(self) -> int:
        """Episodes that run at once on each rank."""
        return 32 * max(1, len(self.gpus)) if self.concurrency is None else self.concurrency

    @property
    def uses_servers(self) -> bool:
        return bool(self.gpus or self.urls)


@dataclass(frozen=True)
class Api:
    """An OpenAI-compatible chat endpoint."""

    url: str = ""
    """Such as https://api.openai.com/v1. Empty: no API."""
    model: str = ""
    key: str = "OPENAI_API_KEY"
    """Name of the environment variable with the key. The key itself is never written down. Empty: send no key."""
    timeout: float = 180.0
    """Seconds without a byte from the API."""
    parameters: dict[str, object] = field(default_factory=dict)
    """Override the fields of a request other than its messages. null drops a field. OpenAI's o-series and gpt-5 need
    {max_completion_tokens: N, max_tokens: null, temperature: null}, where N includes thinking tokens."""

    def __post_init__(self):
        if not re.fullmatch("([A-Z_][A-Z0-9_]*)?", self.key):  # it may be the key itself, so it is not printed
            raise ValueError("key: give the name of an environment variable with the key, such as OPENAI_API_KEY")
