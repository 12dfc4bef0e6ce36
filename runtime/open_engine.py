"""open_engine.py: open the engine of a config, for training, evaluation and study.ask.

engine = open_engine(checkpoint, renderer, cfg.rollout, logs=run / "logs")     # engine.py describes what it can do
"""

from dataclasses import replace
from pathlib import Path

import torch

from runtime.api import Api, OpenAI
from runtime.distributed import gather, local_rank, local_size, rank
from runtime.engine import Engine, EngineConfig
from runtime.inprocess import InProcess
from runtime.render import Renderer
from runtime.servers import SGLang


def open_engine(
    checkpoint: str | Path,
    renderer: Renderer,
    cfg: EngineConfig,
    logs: Path | None = None,
    frames: Path | None = None,
    api: Api | None = None,
) -> Engine:
    """Open an API's model, or SGLang's servers at `urls`, or servers on `server_gpus`, or else the model in this process, on a GPU
    if there is one. A node's first rank starts the servers and owns them; its other ranks connect to them. `logs` and `frames`:
    folders of the servers' logs, and of the frames that they read."""
    if api and api.url:
        return OpenAI(api, renderer)
    if not cfg.uses_servers:
        device, dtype = ("cuda", "bfloat16") if torch.cuda.is_available() else ("cpu", "float32")
        return InProcess(checkpoint, renderer, device=device, dtype=dtype, max_batch_tokens=cfg.max_batch_tokens)

    # Start the servers on this node's first rank. The other ranks wait here until they are ready.
    urls = cfg.urls
    if not urls:
        engine = None
        if local_rank() == 0:
            if logs and rank() > 0:
                logs /= f"node-{rank() // local_size()}"
            engine = SGLang(checkpoint, renderer, cfg, logs, frames)
            engine.wait_until_ready()
        urls_by_rank = gather(engine.urls if engine else None)
        if engine:
            return engine
        urls = tuple(urls_by_rank[rank() - local_rank()])

    # Connect to servers that already run.
    engine = SGLang(checkpoint, renderer, replace(cfg, urls=urls), frames=frames)
    engine.wait_until_ready()
    return engine
