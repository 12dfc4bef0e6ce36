"""engine.py: tokens in, tokens out. The interface of the engines that sample an agent's turns.

    sample = engine.generate(ids, frames, max_new_tokens=512, temperature=0.7, seed=1, stop=(im_end,))
    engine.update_weights(snapshot_dir, version)                 # safetensors; every later sample carries the version
    run_all(engine, jobs, 256, on_done)                          # jobs that call the engine, so many at a time
    run_parallel(engine, pool, {name: job}, timeout) -> {name: result}

`generate` blocks, and many threads call it, one per running agent. servers.py asks SGLang, inprocess.py a model in this
process. Both return exactly the sampled ids and their log-probs, where image and video tokens are masked.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from runtime.video import Frames


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

    def wait_until_ready(self) -> None:
        """Wait until all servers that were started serve; an EngineError tells of one that does not."""

    def generate(
        self, ids: list[int], frames: Sequence[Frames], *, max_new_tokens: int, temperature: float, seed: int,
        stop: tuple[int, ...] = (), shared: int = 0,
    ) -> Sample:  # fmt: skip
        """Continue `ids` until an end token or one in `stop`. Other requests may begin with the first `shared` ids, too."""

    def announce(self, change: int) -> None:
        """Note that so many more (or fewer) threads are about to call `generate`."""

    def update_weights(self, path: str | Path, version: int, push: bool = True) -> None:
        """Load the safetensors of a folder, which must stay until the next update: a restarted server reads them again.
        `push=False`: another rank loads them into the shared servers, and this one only expects them."""

    def close(self) -> None: ...


class ActiveCallers:
    """Counts the threads that can still call the engine, and tells it when their number changes (`engine.announce`). The
    engine in this process starts a batch once so many threads wait for it. One too few, and batches depend on timing; one
    too many, and it hangs. Each job that has not ended counts, within [at_least, at_most]."""

    def __init__(self, engine: Engine, jobs: Iterable, at_least: int, at_most: int):
        self.engine, self.at_least, self.at_most = engine, at_least, at_most
        self.running, self.lock = set(jobs), threading.Lock()
        engine.announce(self.count() - at_least)

    def count(self) -> int:
        return max(self.at_least, min(len(self.running), self.at_most))

    def leave(self, jobs: Iterable) -> None:
        """Take note that these jobs have ended, or that nobody waits for them any more."""
        with self.lock:
            before = self.count()
            self.running.difference_update(jobs)
            self.engine.announce(self.count() - before)

    def run(self, name: Any, job: Callable) -> Any:
        try:
            return job()
        finally:
            self.leave([name])


def run_all(engine: Engine, jobs: Sequence[Callable], at_once: int, on_done: Callable[[int, Any], None]) -> None:
    """Run jobs, `at_once` at a time, and call on_done(index, result) as each ends, in this thread."""
    workers = min(at_once, len(jobs))
    callers = ActiveCallers(engine, range(len(jobs)), at_least=0, at_most=workers)
    pool, running = ThreadPoolExecutor(max(1, workers), "episode"), {}
    try:  # from the first thread on: Ctrl-C may come while one starts, and only a pool that is shut down ends it
        for i, job in enumerate(jobs):
            running[pool.submit(callers.run, i, job)] = i
        for future in as_completed(running):
            on_done(running[future], future.result())
    finally:  # after Ctrl-C or a bug, no further job begins
        callers.leave([i for future, i in running.items() if future.cancel()])
        pool.shutdown(wait=False)


def run_parallel(engine: Engine, pool: ThreadPoolExecutor, jobs: dict[Any, Callable], timeout: float) -> dict[Any, Any]:
    """Run the jobs of a thread that waits for them, all at the same time. Return the results of those that end in time."""
    # The thread counts already. It calls nothing while it waits, so N jobs add N - 1; when all have ended it calls again.
    callers = ActiveCallers(engine, jobs, at_least=1, at_most=len(jobs))
    futures = {name: pool.submit(callers.run, name, job) for name, job in jobs.items()}
    wait(futures.values(), timeout)
    callers.leave(jobs)
    return {name: future.result() for name, future in futures.items() if future.done()}
