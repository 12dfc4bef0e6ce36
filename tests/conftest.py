"""Shared fixtures. Most tests use a small toy, which is built once per session."""

import fcntl
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # tests use the CPU; with CUDA_VISIBLE_DEVICES=0, some use a GPU
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import hypothesis
import pytest
import scripts

os.environ |= scripts.ONE_THREAD  # before torch is imported: the workers share the cores

import tiny
from scripted import Scripted, by_chance

from runtime.render import Renderer, load_tokenizer
from runtime.video import Videos
from runtime.visual import VisualContract
from study import toy
from tools import TOOLS

hypothesis.settings.register_profile("patient", deadline=None)  # the machine may be busy
hypothesis.settings.load_profile("patient")

SMALL = {"train": 30, "rl": 24, "val": 8, "test": 8}
SMALL |= {"perception": 120, "calls": 20, "direct": 20, "sft": 300, "sft_val": 20}


def pytest_addoption(parser) -> None:
    parser.addoption("--renew", action="store_true", help="write the golden files anew")


def pytest_collection_modifyitems(items) -> None:
    """Run the slowest files first, so that both workers end at about the same time."""
    items.sort(key=lambda item: item.path.stem not in ("test_engine", "test_eval", "test_faults", "test_rl"))


@pytest.fixture(scope="session")
def toy_dir(tmp_path_factory) -> Path:
    """The toy, which one worker of the session builds and all workers read."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # each worker's folder is inside the session's folder
    with open(root / "toy.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (root / "toy.built").exists():
            toy.build_toy(root / "toy", seed=0, sizes=SMALL)
            (root / "toy.built").touch()
    return root / "toy"


@pytest.fixture(scope="session")
def tokenizer(toy_dir):
    return load_tokenizer(toy_dir / "model")


@pytest.fixture(scope="session")
def toy_renderer(tokenizer) -> Renderer:
    """A renderer with the toy's contract: one token per frame."""
    return Renderer(tokenizer, VisualContract(frame_pixels=1024))


@pytest.fixture(scope="session")
def checkpoint(request, tmp_path_factory) -> Path:
    """A checkpoint with a small vocabulary and several tokens per frame. Its random weights are large, so that the
    distributions are far from uniform: greedy text varies, and rows differ. A test's parameter can choose its family."""
    model_type = getattr(request, "param", "qwen3_vl")
    return tiny.build(tmp_path_factory.mktemp("tiny"), model_type=model_type, initializer_range=0.1)


@pytest.fixture(scope="session")
def model(checkpoint):
    """The checkpoint in plain transformers."""
    return tiny.plain(checkpoint)


@pytest.fixture(scope="session")
def renderer(checkpoint) -> Renderer:
    return tiny.renderer(checkpoint)


@pytest.fixture(scope="session")
def videos():
    with Videos(workers=1) as reader:
        yield reader


@pytest.fixture(scope="session")
def schemas() -> list[dict]:
    return [TOOLS[tiny.TOOL].schema]


@pytest.fixture
def scripted(monkeypatch):
    """Run rl.main with scripted engines instead of a model. Their log-probs differ from the trainer's."""
    engines = []

    def open_it(source, renderer, *_):
        engines.append(Scripted(renderer, by_chance))
        return engines[-1]

    monkeypatch.setattr("rl.open_engine", open_it)
    monkeypatch.setattr("rl.GAP_LIMIT", float("inf"))
    return engines


@pytest.fixture
def golden(request):
    """golden(name, text): this text stands in tests/golden/NAME. `pytest --renew` writes it there: read the diff."""

    def check(name: str, text: str) -> None:
        file = Path(__file__).parent / "golden" / name
        if request.config.getoption("--renew"):
            file.write_text(text, "utf-8")
        assert text == file.read_text("utf-8")

    return check
