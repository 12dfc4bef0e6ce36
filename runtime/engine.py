"""engine.py: tokens in, tokens out. The interface of the engines that sample an agent's turns.

    sample = engine.generate(ids, frames, max_new_tokens=512, temperature=0.7, seed=1, stop=(im_end,))
    engine.update_weights(snapshot_dir, version)                 # safetensors; every later sample carries the version

`generate` blocks, and many threads call it, one per running agent. Both engines return exactly the sampled ids
(the stop token included) and log softmax(masked logits / temperature) of each, where image and video tokens are masked.
servers.py asks SGLang, inprocess.py a model in this process; rollout.open_engine picks one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

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

    def generate(
        self, ids: list[int], frames: Sequence[Frames], *, max_new_tokens: int, temperature: float, seed: int,
        stop: tuple[int, ...] = (), shared: int = 0,
    ) -> Sample:  # fmt: skip
        """Continue `ids` until the checkpoint's own end tokens or those in `stop`. `shared`: the number of leading ids
        that other requests probably begin with, too."""

    def expect(self, change: int) -> None:
        """Note that so many more (or fewer) threads are about to call `generate`."""

    def update_weights(self, path: str | Path, version: int, push: bool = True) -> None:
        """Load the safetensors of a folder, which must stay until the next update: a restarted server reads them again.
        Samples that are under way end with the old weights. `push=False`: another rank loads them into the shared
        servers, and this one only expects them."""

    def close(self) -> None: ...
