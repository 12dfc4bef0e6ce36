"""How frames reach SGLang's servers: as files."""

import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import requests
from PIL import Image
from scripts import fake_server
from tiny import noise

import rollout
from rollout import RolloutConfig
from runtime.cleanup import MEMORY
from runtime.servers import SGLang
from runtime.video import Clip


@pytest.fixture(scope="module")
def port(renderer) -> Iterator[int]:
    """The port of a stand-in."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(fake_server(renderer, port))
    yield port
    process.kill()
    process.wait()


@pytest.fixture
def connect(port, renderer):
    """connect() -> a client, and its folder of frames."""
    clients = []

    def client(**options) -> tuple[SGLang, Path]:
        clients.append(SGLang("", renderer, urls=[f"http://127.0.0.1:{port}"], **options))
        clients[-1].wait_until_ready()
        return clients[-1], Path(clients[-1]._frames)

    yield client
    for each in clients:
        each.close()


@pytest.fixture
def show(port, renderer):
    """show(client, clip) -> the frames as the server gets them."""

    def ask(client: SGLang, clip: Clip) -> list[str]:
        ids = renderer.render([{"role": "user", "content": [clip, "What?"]}], generate=True).ids
        client.generate(ids, [clip], max_new_tokens=2, temperature=1.0, seed=0)
        return requests.get(f"http://127.0.0.1:{port}/model_info").json()["shown"]

    return ask


def pixels_of(sent: str) -> np.ndarray:
    return np.array(Image.open(sent.removeprefix("file://")))


def test_servers_get_the_very_pixels_once_per_clip(connect, show):
    (client, folder), clip = connect(), noise(3, width=512, height=512)
    with ThreadPoolExecutor(8) as rollouts:  # a group's rollouts start together
        first, *others = rollouts.map(lambda _: show(client, clip), range(8))
    assert others == [first] * 7 and {f"file://{path}" for path in folder.rglob("*.bmp")} == set(first)
    assert all((pixels_of(sent) == pixels).all() for sent, pixels in zip(first, clip.pixels, strict=True))


def test_a_clips_files_live_as_long_as_the_clip(connect, show):
    (client, folder), kept = connect(), noise(2)
    files = show(client, kept)
    for seed in range(5):
        passing = noise(1, seed)
        [sent] = show(client, passing)
        assert (pixels_of(sent) == passing.pixels[0]).all()
        del passing
        assert not Path(sent.removeprefix("file://")).exists()
    assert {f"file://{path}" for path in folder.rglob("*.bmp")} == set(files)
    client.close()
    assert not folder.exists()


def test_frames_lie_in_memory_or_where_there_is_room(connect, monkeypatch, tmp_path):
    assert connect()[1].parent == MEMORY
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1e9))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert connect()[1].parent == tmp_path
    (tmp_path / "run").mkdir()
    assert connect(frames=tmp_path / "run")[1].parent == tmp_path / "run"


def test_all_servers_get_the_same_flags_and_those_of_the_config_after_them(monkeypatch, tmp_path):
    """Past bug: only RL's configs chose SGLang's well-tested paths, so an evaluation's servers had bf16 logits."""
    monkeypatch.setattr(rollout, "SGLang", lambda *_, server_args, **others: MagicMock(flags=server_args))

    def flags(**cfg) -> tuple[str, ...]:
        return rollout.open_engine(tmp_path, None, RolloutConfig(**cfg)).flags

    same = {
        "--enable-fp32-lm-head",
        "--mm-feature-transport=cpu",
        "--prefill-decode-interval=0",
        "--schedule-policy=lpm",
    }
    first = flags(server_gpus=(0,), server_args=("--a=1",), max_context=24_576)
    assert first[-1] == "--a=1" and {*first} == {*same, "--context-length=24592", "--max-running-requests=64", "--a=1"}
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    same |= {"--context-length=24592", "--max-running-requests=128"}
    # With fa3, a server fails an assertion on newer GPUs.
    for capability, more in (((9, 0), {"--attention-backend=fa3"}), ((10, 0), set()), ((8, 0), set())):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda gpu, capability=capability: capability)
        assert {*flags(server_gpus=(4, 5), tensor_parallel=2, max_context=24_576)} == same | more
    assert flags(urls=("http://node7:1",)) == ()
