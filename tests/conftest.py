"""A small toy, built once per session: the fixtures that most tests stand on."""

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # tests are of a CPU; with CUDA_VISIBLE_DEVICES=0, some of a GPU
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import pytest

from runtime.contract import Renderer, VisualContract, load_tokenizer
from runtime.video import Frames, Videos
from study import toy
from tools import TOOLS

SMALL = {"videos": 30, "perception": 120, "direct": 20, "sft": 300, "sft_val": 20, "rl": 24, "val": 8, "test": 8}


@pytest.fixture(scope="session")
def toy_dir(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("toy")
    toy.build(root, seed=0, sizes=SMALL)
    return root


@pytest.fixture(scope="session")
def tokenizer(toy_dir):
    return load_tokenizer(toy_dir / "model")


@pytest.fixture(scope="session")
def wide() -> VisualContract:
    """A contract with several tokens per frame, which the toy's has not."""
    return VisualContract(frame_pixels=64 * 64)


@pytest.fixture
def renderer(tokenizer, wide) -> Renderer:
    return Renderer(tokenizer, wide)


@pytest.fixture(scope="session")
def videos():
    with Videos(workers=1) as reader:
        yield reader


@pytest.fixture(scope="session")
def schemas() -> list[dict]:
    return [TOOLS["crop_video"].schema]


@pytest.fixture
def make_frames():
    def make(count: int, width: int = 64, height: int = 64, seed: int = 0, start: float = 0.0) -> Frames:
        pixels = np.random.default_rng(seed).integers(0, 256, (count, height, width, 3), dtype=np.uint8)
        return Frames(pixels, tuple(start + float(i) for i in range(count)))

    return make
