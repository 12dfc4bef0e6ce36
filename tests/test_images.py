"""How frames reach SGLang's servers: as files in memory where they are on this machine, as PNGs over a network."""

import base64
import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from tiny_checkpoint import noise

import rollout
from runtime import servers
from runtime.servers import SGLang, image_folder


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
    clips = [noise(3), noise(2, seed=1)]
    with local._shown(clips) as first:
        assert [sent.startswith("file:///dev/shm/") for sent in first] == [("127" in url)] * 5
        shown = np.concatenate([clip.pixels for clip in clips])
        assert all((pixels_of(sent) == pixels).all() for sent, pixels in zip(first, shown, strict=True))
        monkeypatch.setattr(SGLang, "_send", None)  # neither a turn later nor for a sibling is a frame written again
        with local._shown(clips[::-1]) as second:
            assert second == first[3:] + first[:3]


def test_files_live_until_the_last_request_that_names_them_has_ended(client, monkeypatch):
    monkeypatch.setattr(servers, "CLIPS", 1)
    local = client("http://localhost:30000")
    asked = noise(2)
    with local._shown([asked]) as held:
        for seed in range(1, 4):
            with local._shown([noise(1, seed)]) as [passing]:
                assert Path(passing.removeprefix("file://")).exists()
            assert not Path(passing.removeprefix("file://")).exists()  # the place is taken by the one under way
        assert all(Path(path.removeprefix("file://")).exists() for path in held)
    folder = local._folder
    assert len(list(folder.iterdir())) == 2  # one clip may stay
    local.close()
    assert not folder.exists()


def test_what_a_killed_process_left_in_memory_is_removed_by_the_next(tmp_path):
    script = "import os, signal; from runtime.servers import image_folder; print(image_folder([]), flush=True); os.kill(os.getpid(), signal.SIGKILL)"  # fmt: skip
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(servers.__file__).parent.parent)  # fmt: skip
    left = Path(run.stdout.strip())
    assert run.returncode < 0 and left.is_dir()
    mine = image_folder([])
    assert not left.exists() and mine.is_dir() and str(os.getpid()) in mine.name
    assert image_folder(["http://127.0.0.1:1", "http://10.0.0.7:1"]) is None
    mine.rmdir()


def test_where_memory_is_full_frames_travel_as_images(client):
    local = client("http://127.0.0.1:30000")
    os.rmdir(local._folder)  # nothing can be written there any more
    clip = noise(2)
    with local._shown([clip]) as sent:
        assert all((pixels_of(image) == pixels).all() for image, pixels in zip(sent, clip.pixels, strict=True))
        assert not any(image.startswith("file://") for image in sent)


def test_servers_get_the_context_of_the_config_and_its_flags_after_it(monkeypatch, tmp_path):
    """SGLang would reserve 2 GB for the model's own context, and start with no longer one."""
    opened = []
    monkeypatch.setattr(rollout, "SGLang", lambda *args, **options: opened.append(options["server_args"]))
    (tmp_path / "config.json").write_text('{"text_config": {"max_position_embeddings": 32768}}')
    for asked in (24_576, 40_000):
        rollout.open_engine(tmp_path, None, gpus=(0,), server_args=("--a=1",), max_context=asked)
    rollout.open_engine("m", None, urls=("http://node7:1",), max_context=24_576)
    assert opened == [("--context-length", "24592", "--a=1"), ("--context-length", "32768", "--a=1"), ()]
