"""engine.py: tokens in, tokens out. The interface of the engines that sample an agent's turns.

    sample = engine.generate(ids, frames, max_new_tokens=512, temperature=0.7, seed=1, stop=(im_end,))
    engine.update_weights(snapshot_dir, version)                 # safetensors; every later sample carries the version
    run_all(engine, jobs, 256, on_done)                          # jobs that call the engine, 256 at a time
    run_parallel(engine, pool, {name: job}, timeout) -> {name: result}

`generate` blocks, and many threads call it, one per running agent. servers.py asks SGLang; inprocess.py runs a model in
this process. Both return the sampled ids and their log-probs. Image and video tokens are never sampled.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from runtime.video import Frames


class EngineError(RuntimeError):
    """A request that the engine could not serve. It costs one episode."""


@dataclass(frozen=True)
class Sample:
    """One sampled turn."""

    ids: list[int]  # the stop token included
    logprobs: list[float]  # log softmax(masked logits / temperature); with temperature 0 that of the logits themselves
    finish: str  # stop | length
    version: int  # of the weights that sampled it


class Engine(Protocol):
    version: int

    def wait_until_ready(self) -> None:
        """Wait until the servers serve; raise EngineError if one cannot start."""

    def generate(
        self, ids: list[int], frames: Sequence[Frames], *, max_new_tokens: int, temperature: float, seed: int,
        stop: tuple[int, ...] = (), shared_prefix: int = 0,
    ) -> Sample:  # fmt: skip
        """Continue `ids` until an end of turn or a token in `stop`. Their first `shared_prefix` ids may be those of other
        requests as well: the engine reads them once."""

    def announce(self, change: int) -> None:
        """Take note that `change` more (or, if negative, fewer) threads are about to call `generate`."""

    def update_weights(self, path: str | Path, version: int, push: bool = True) -> None:
        """Load the safetensors of a folder, which must stay until the next update: a restarted server reads them again.
        `push=False`: another rank loads them into the servers that both use."""

    def close(self) -> None: ...


class ActiveCallers:
    """Counts the threads that can still call the engine, and announces each change to it. The engine in this process starts
    a batch once that many threads wait: if it expects too few, batches depend on timing; if too many, it hangs.

    Every job that has not ended counts as a thread, but at least `at_least` and at most `at_most` threads count."""

    def __init__(self, engine: Engine, jobs: Iterable, at_least: int, at_most: int):
        self.engine, self.at_least, self.at_most = engine, at_least, at_most
        self.unfinished = set(jobs)
        self.lock = threading.Lock()
        engine.announce(self.count() - at_least)

    def count(self) -> int:
        return max(self.at_least, min(len(self.unfinished), self.at_most))

    def remove(self, jobs: Iterable) -> None:
        """Stop counting jobs that have ended, or for which nobody waits any more."""
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
    """Run jobs, `at_once` at a time, and call on_done(index, result) as each ends, in this thread."""
    workers = min(at_once, len(jobs))
    callers = ActiveCallers(engine, range(len(jobs)), at_least=0, at_most=workers)
    pool = ThreadPoolExecutor(max(1, workers), "episode")
    index_of: dict[Future, int] = {}
    try:  # Ctrl-C may come while jobs are submitted, and only a pool that is shut down ends its threads
        for i, job in enumerate(jobs):
            index_of[pool.submit(callers.run, i, job)] = i
        for future in as_completed(index_of):
            on_done(index_of[future], future.result())
    finally:  # after Ctrl-C or a bug, no further job begins
        callers.remove([i for future, i in index_of.items() if future.cancel()])
        pool.shutdown(wait=False)


def run_parallel(engine: Engine, pool: ThreadPoolExecutor, jobs: dict[Any, Callable], timeout: float) -> dict[Any, Any]:
    """Run all jobs at the same time and wait for them. Return the results of those that end in time."""
    # The thread that waits here was announced, and calls nothing meanwhile. So N jobs add N - 1 callers, and the last job
    # that ends leaves one: this thread.
    callers = ActiveCallers(engine, jobs, at_least=1, at_most=len(jobs))
    futures = {name: pool.submit(callers.run, name, job) for name, job in jobs.items()}
    wait(futures.values(), timeout)
    callers.remove(jobs)
    return {name: future.result() for name, future in futures.items() if future.done()}
