"""The cold start teaches the toy what it claims: perception, parallel tool trajectories, and direct answers (slow)."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import rewards
from data import parse_task
from rollout import RolloutConfig, open_engine, rollout
from runtime.contract import Renderer, load_tokenizer
from runtime.dataset import Rows
from runtime.video import Videos
from study import toy

REPO = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """configs/toy_sft.yaml, exactly as the README runs it."""
    folder = tmp_path_factory.mktemp("trained")
    environment = os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    for command in (
        ["-m", "study.toy", "build", "toy_data"],
        [str(REPO / "sft.py"), str(REPO / "configs" / "toy_sft.yaml")],
    ):
        subprocess.run([sys.executable, *command], cwd=folder, env=environment, check=True)
    return folder


@pytest.mark.slow
def test_the_cold_start_learns_to_see_to_call_and_to_answer(trained):
    model, root = trained / "runs" / "toy" / "sft" / "model", trained / "toy_data"
    renderer = Renderer(load_tokenizer(model), toy.CONTRACT)
    rows = Rows(root / "test.parquet")
    tasks = [parse_task(rows[i], f"test:{i}", root) for i in range(96)]
    flashes = {flash.name: flash for split in toy.draw_splits(0, toy.SIZES).values() for flash in split}
    engine = open_engine(model, renderer)
    found = {}
    with Videos(workers=1) as videos:

        def play(k, **options):
            cfg = RolloutConfig(max_new_tokens=128, temperature=0.0, think_prefix=False, **options)
            stage = {"engine": engine, "renderer": renderer, "videos": videos, "cfg": cfg, "progress": False}
            episodes = [episode for group in rollout(tasks, [k] * len(tasks), 1, **stage) for episode in group.episodes]
            scores = [rewards.score(episode, renderer, rewards.RewardConfig()) for episode in episodes]
            return episodes, np.mean([s["acc"] for s in scores]), np.mean([s["strict"] for s in scores])

        found["direct answers, K = 64"] = play(64, dispatch="none")[1]
        blind, found["trajectories, K = 4"], found["strict format"] = play(4)
        found["K = 4 without tools (chance and luck)"] = 1 - play(4, dispatch="none")[1]
    engine.close()
    reports = {"positives": [], "negatives": []}
    windows = []
    for episode in blind:
        flash = flashes[Path(episode.task.videos[0]).name]
        cue = next((half for half in ("first", "second") if half in episode.task.question), "")
        ran = [call for call in episode.calls if not call.error]
        windows.append([call.window for call in ran] == toy.windows(flash, cue))
        for call in ran:
            truth = toy.report(flash, call.agent.frames[0].times)
            reports["negatives" if truth == toy.NOTHING else "positives"].append(call.text == truth)
    found |= {f"reports, {kind}": np.mean(right) for kind, right in reports.items()} | {"windows": np.mean(windows)}
    print({what: round(float(value), 2) for what, value in found.items()})
    low = found.pop("K = 4 without tools (chance and luck)")
    assert low > 0.4 and min(found.values()) >= 0.9, found
