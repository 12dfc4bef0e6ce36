"""Short trainings in this process."""

from pathlib import Path

from scripts import metrics, rl_config

import rl
from rl import RLConfig
from runtime import config
from runtime.script import dry_run


def train(path: Path, toy_dir: Path, **changes) -> list[dict]:
    """Run rl.py in this process. Return its metrics."""
    rl.main(config.load(RLConfig, rl_config(path, toy_dir, **changes)))
    return metrics(path.with_suffix(""))


def try_out(cfg: RLConfig) -> None:
    dry_run(cfg, rl.SCRIPT)
