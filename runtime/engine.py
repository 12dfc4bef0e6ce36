"""engine.py: the interface of the engines that sample an agent's turns: token ids in, token ids out.

    sample = engine.generate(ids, clips, max_new_tokens=512, temperature=0.7, seed=1, stop=(im_end,))
    engine.update_weights(snapshot_dir, version)                 # safetensors; every later sample carries the version
    run_all(engine, jobs, 256, on_done)                          # jobs that call the engine, 256 at a time

`generate` blocks. Many threads call it, one per running agent. servers.py queries SGLang; inprocess.py runs a model in
this process. Both return the sampled ids and their log-probs. Both ban image and video tokens.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.video import Clip


class EngineError(RuntimeError):
    """A request that the engine could not serve. The episode that needs it fails; the run goes on."""


class EngineLost(RuntimeError):
    """An engine that can serve nothing any more. The run ends."""


@dataclass(frozen=True)
class Sample:
    """One sampled turn."""

    ids: list[int]  # the stop token included
    logprobs: list[float]  # log softmax(masked logits / temperature); at temperature 0 the logits are not divided
    finish: str  # stop | length
    version: int  # version of the weights that sampled it


class Engine:  # a method without a body does nothing unless an engine overrides it
    version: int
    servers = ()  # SGLang's, those in use

    def generate(
        self, ids: list[int], clips: Sequence[Clip], *, max_new_tokens: int, temperature: float, seed: int,
        stop: tuple[int, ...] = (), shared_prefix: int = 0,
    ) -> Sample:  # fmt: skip
        """Sample a continuation of `ids` up to an end-of-turn token, a token in `stop` or `max_new_tokens`. Other requests can
        share the first `shared_prefix` ids; the engine prefills those once."""

    def announce(self, change: int) -> None:
        """Tell the engine that `change` more threads (fewer if negative) are about to call `generate`."""

    def update_weights(self, path: str | Path, version: int, push: bool = True) -> None:
        """Load the safetensors files of a folder. `push=False`: another rank loads them into the servers that the ranks share."""

    def close(self) -> None: ...


class ActiveCallers:
    """Tells the engine how many threads can still call it. The in-process engine starts a batch once that many requests wait.
    If the number is too low, batches depend on timing. If it is too high, the engine waits forever.

    The number is that of the unfinished jobs, within two bounds. A pool with `at_most` threads runs no more jobs at once. When
    all jobs have ended, `at_least` threads remain: 1 if the thread that waits for the jobs is itself announced."""

    def __init__(self, engine: Engine, jobs: Iterable, at_least: int, at_most: int):
        self.engine, self.at_least, self.at_most = engine, at_least, at_most
        self.unfinished = set(jobs)
        self.lock = threading.Lock()
        engine.announce(self.count() - at_least)

    def count(self) -> int:
        return max(self.at_least, min(len(self.unfinished), self.at_most))

    def remove(self, jobs: Iterable) -> None:
        """Stop counting jobs that ended, timed out or were cancelled."""
        with self.lock:
            before = self.count()
            self.unfinished.difference_update(jobs)
            self.engine.announce(self.count() - before)

    def run(self, name: Any, job: Callable) -> Any:
        try:
            return job()
        finally:
            self.remove([name])


def run_all(engine: Engine, jobs: Sequence[Callable], at_once: int, on_done: Callable[[int, Any], None]) -> None:
    """Run at most `at_once` jobs at a time. As each job ends, call on_done(index, result) in this thread."""
    workers = min(at_once, len(jobs))
    callers = ActiveCallers(engine, range(len(jobs)), at_least=0, at_most=workers)
    pool = ThreadPoolExecutor(max(1, workers), "episode")
    index_of: dict[Future, int] = {}
    try:  # Ctrl-C can arrive while jobs are submitted, and the pool's threads end only after `shutdown`
        for i, job in enumerate(jobs):
            index_of[pool.submit(callers.run, i, job)] = i
        for future in as_completed(index_of):
            on_done(index_of[future], future.result())
    finally:  # after Ctrl-C or a bug, start no further job
        callers.remove([i for future, i in index_of.items() if future.cancel()])
        pool.shutdown(wait=False)
