"""How frames reach SGLang's servers: as files in memory where they are on this machine, as PNGs over a network."""

import base64
import io
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from tiny_checkpoint import noise

import rollout
from runtime.cleanup import memory_folder
from runtime.servers import SGLang
from runtime.video import Frames


@pytest.fixture
def client(monkeypatch):
    monkeypatch.setattr(SGLang, "_supervise", lambda client, server: setattr(server, "healthy", True))
    clients = []

    def connect(*urls: str) -> SGLang:
        clients.append(SGLang("", SimpleNamespace(), urls=urls))
        return clients[-1]

    yield connect
    for each in clients:
        each.close()


def pixels_of(sent: str) -> np.ndarray:
    file = sent.removeprefix("file://") if sent.startswith("file://") else io.BytesIO(base64.b64decode(sent))
    return np.array(Image.open(file))


@pytest.mark.parametrize("url", ["http://127.0.0.1:30000", "http://node7:30000"])
def test_servers_get_the_very_pixels_once_per_clip(client, url, monkeypatch):
    local = client(url)
    clip, written, send = noise(3), [], SGLang._send
    monkeypatch.setattr(SGLang, "_send", lambda *given: written.append(time.sleep(0.02)) or send(*given))
    with ThreadPoolExecutor(8) as rollouts:  # those of a group begin together
        first, *others = rollouts.map(lambda _: local._shown(Frames(clip.pixels, clip.times)), range(8))
    assert others == [first] * 7 and len(written) == 3 and local._shown(clip) == first
    assert [Path(sent[7:]).is_relative_to(memory_folder()) for sent in first] == [("127" in url)] * 3
    assert all((pixels_of(sent) == pixels).all() for sent, pixels in zip(first, clip.pixels, strict=True))


def test_a_clips_files_live_as_long_as_its_pixels(client):
    """Another clip may then get the id of its pixels."""
    local, kept = client("http://localhost:30000"), noise(2)
    files = local._shown(kept)
    for seed in range(5):
        passing = noise(1, seed)
        [sent] = local._shown(passing)
        assert (pixels_of(sent) == passing.pixels[0]).all()
        del passing
        assert not Path(sent.removeprefix("file://")).exists()
    assert all(Path(sent.removeprefix("file://")).exists() for sent in files)
    folder = local._folder
    assert len(list(folder.iterdir())) == 2
    local.close()
    assert not folder.exists()


def test_where_memory_is_full_frames_travel_as_images(client):
    local = client("http://127.0.0.1:30000")
    os.rmdir(local._folder)  # nothing can be written there any more
    clip = noise(2)
    sent = local._shown(clip)
    assert all((pixels_of(image) == pixels).all() for image, pixels in zip(sent, clip.pixels, strict=True))
    assert not any(image.startswith("file://") for image in sent)


def test_all_servers_get_the_same_flags_and_those_of_the_config_after_them(monkeypatch, tmp_path):
    """Only RL's configs named SGLang's well-worn paths; an evaluation's servers took newer ones, with logits in bf16. Past
    bug: Qwen2.5-VL's config.json, which has no text_config, ended an evaluation with a KeyError."""
    opened = []

    def server(*args, server_args, **rest):
        return SimpleNamespace(wait_until_ready=lambda: opened.append(server_args))

    monkeypatch.setattr(rollout, "SGLang", server)
    (tmp_path / "config.json").write_text('{"text_config": {"max_position_embeddings": 32768}}')
    for asked in (24_576, 40_000):
        rollout.open_engine(tmp_path, None, gpus=(0,), server_args=("--a=1",), max_context=asked)
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 32768}')
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for capability in ((9, 0), (10, 0), (8, 0)):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda gpu, capability=capability: capability)
        rollout.open_engine(tmp_path, None, gpus=(4, 5), tensor_parallel=2, max_context=24_576)
    rollout.open_engine("m", None, urls=("http://node7:1",), max_context=24_576)
    monkeypatch.undo()

    same = {
        "--enable-fp32-lm-head",
        "--mm-feature-transport=cpu",
        "--prefill-decode-interval=0",
        "--schedule-policy=lpm",
    }
    first, longer, hopper, *others, elsewhere = opened
    assert first[-1] == "--a=1" and {*first} == {*same, "--context-length=24592", "--max-running-requests=64", "--a=1"}
    assert {*longer} == {*first} - {"--context-length=24592"} | {"--context-length=32768"}
    expected = {*same, "--context-length=24592", "--max-running-requests=128"}
    assert {*hopper} == {*expected, "--attention-backend=fa3"}  # whose server ends with an assertion on newer GPUs
    assert [{*flags} for flags in others] == [expected, expected]
    assert elsewhere == ()
