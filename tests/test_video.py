"""video.py on real files, good and bad, all written here: it returns the right frame and its true time, or a VideoError."""

import os
import signal
import struct
import subprocess
import sys
import wave
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import partial
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scripts import Forked, alive, children, finish, wait_for

from runtime import video
from runtime.video import VideoError, Videos, uniform_indices, window_indices

WIDTH, HEIGHT = 96, 64
# Without look-ahead, x264 always writes the same file. With it, the bits depend on the machine's load.
X264, X265 = "threads=1:scenecut=0:rc-lookahead=0:no-mbtree=1", "bframes=3:log-level=none:pools=1"


def picture(i: int) -> np.ndarray:
    """Draw frame i: its number as twelve binary blocks on top, a moving texture below."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    image = np.stack([x * 2 + i * 7, y * 3 + i * 5, (x + y) + i * 11], -1) % 256  # [H, W, 3]
    for bit in range(12):
        image[: HEIGHT // 2, bit * 8 : bit * 8 + 8] = 255 * (i >> bit & 1)
    return image.astype(np.uint8)


def number(pixels: np.ndarray) -> int:
    blocks = pixels[: HEIGHT // 2].mean((0, 2)).reshape(12, 8).mean(1)  # [12]
    return sum(int(value > 127) << bit for bit, value in enumerate(blocks))


def patch(path: Path, box: bytes, offset: int, value: bytes) -> Path:
    """Overwrite bytes of an mp4 box, counted from its name."""
    data = bytearray(path.read_bytes())
    at = data.index(box) + offset
    data[at : at + len(value)] = value
    path.write_bytes(data)
    return path


def write(path, n=60, codec="libx264", gop=30, options=None, stamps=None, rotate=0, aspect=None, sound=None, flags=None, hidden=0):  # fmt: skip
    """Write n pictures at 25 per second, or at `stamps` in units of 1/30 s. `sound`: the codec of a second track. `hidden`:
    the number of pictures that an edit list cuts off."""
    if codec == "libx264":
        options = {"preset": "veryfast", "x264-params": X264} | (options or {})
    with av.open(str(path), "w", options={"movflags": flags} if flags else {}) as container:
        stream = container.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        stream.gop_size, stream.codec_context.options = gop, options or {}
        if aspect:
            stream.codec_context.sample_aspect_ratio = aspect
        if rotate:
            stream.set_display_rotation(rotate)
        if stamps:
            stream.codec_context.time_base = Fraction(1, 30)
        track = container.add_stream(sound, rate=44100) if sound else None
        container.start_encoding()
        for i in range(n):
            if sound and i % 25 == 0:
                noise = av.AudioFrame.from_ndarray(np.ones((1, 44100), np.float32) / 8, format="fltp", layout="mono")
                noise.rate, noise.pts = 44100, i // 25 * 44100
                container.mux(track.encode(noise))
            image = av.VideoFrame.from_ndarray(picture(i))
            if stamps:
                image.pts, image.time_base = stamps[i], Fraction(1, 30)
            container.mux(stream.encode(image))
        container.mux(stream.encode())
    if hidden:
        patch(path, b"elst", 16, struct.pack(">i", 1024 + 512 * hidden))
    return path


def sequential(path) -> tuple[np.ndarray, np.ndarray]:
    """The oracle: decode every frame from the start. Return frames and times."""
    with av.open(str(path)) as container:
        images = [(image.to_ndarray(format="rgb24"), image.time) for image in container.decode(video=0)]
    return np.stack([pixels for pixels, _ in images]), np.array([t for _, t in images])  # [N, H, W, 3], [N]


def same_size(width: int, height: int) -> tuple[int, int]:
    return width, height


def error_of(ask, *arguments) -> VideoError:
    with pytest.raises(VideoError) as error:
        ask(*arguments)
    return error.value


def worker_pids(videos: Videos) -> set[int]:
    return {worker.process.pid for worker in videos._workers}


@pytest.fixture(scope="module")
def reader():
    with Videos(workers=1, timeout=30) as videos:
        yield videos


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> str:
    return str(write(tmp_path_factory.mktemp("good") / "good.mp4"))


@pytest.fixture
def hangs(tmp_path) -> str:
    return str(write(tmp_path / "hangs.mp4", n=1))


@pytest.fixture
def fake_av(tmp_path, monkeypatch):
    """fake_av(act): in workers that start from now on, opening hangs.mp4 runs this code, and no file can be opened."""

    def install(act: str) -> None:
        (tmp_path / "fake").mkdir()
        source = (
            "import os, signal, sys, time\ndef open(path, options):\n    if 'hangs' in path:\n        {}\n    1 / 0\n"
        )
        (tmp_path / "fake" / "av.py").write_text(source.format(act))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))

    return install


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """Record the requests that reached workers ("probe", "decode") because the cache could not answer them."""
    kinds, send = [], video._Worker.request

    def note(worker, message):
        kinds.append(message[0])
        return send(worker, message)

    monkeypatch.setattr(video._Worker, "request", note)
    return kinds


# ---- which frames --------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(st.integers(1, 5000), st.integers(1, 300))
def test_uniform_indices_are_distinct_and_reach_both_ends(n, k):
    indices = uniform_indices(n, k)
    assert len(set(indices)) == len(indices) == min(n, k) and indices[0] == 0
    assert indices == [round(i) for i in np.linspace(0, n - 1, min(n, k))]


TIMES = st.lists(st.integers(1, 4000), min_size=0, max_size=80).map(lambda gaps: np.cumsum([0, *gaps]) / 1000)


@settings(max_examples=40)
@given(TIMES, st.floats(-5, 400), st.floats(0, 300), st.floats(0.1, 30), st.integers(1, 32))
def test_window_frames_lie_in_the_window_and_number_as_asked(times, start, span, fps, max_frames):
    end = start + span
    indices = window_indices(times, start, end, fps, max_frames)
    inside = np.flatnonzero((times >= start) & (times <= end))
    if len(inside):
        assert len(indices) == min(max(round((end - start) * fps), 1), max_frames, len(inside))
        assert len(set(indices)) == len(indices) and indices == sorted(indices) and set(indices) <= set(inside)
    else:
        distance = np.abs(times - (start + end) / 2)
        assert len(indices) == 1 and distance[indices[0]] == distance.min()


def test_window_frames_are_the_middles_of_equal_bins():
    assert window_indices(np.arange(100) / 10, 0, 9.9, 1, 4) == [12, 37, 62, 87]


def test_an_index_that_the_video_lacks_is_our_bug(reader, good):
    for indices in ([-1], [60], []):
        with pytest.raises(ValueError, match=r"some of 0\.\.59"):
            reader.frames(good, indices, (32, 32))


# ---- the right frame with the right time ---------------------------------------------------------------------------

KINDS = {
    "long_gop.mp4": {"n": 300, "gop": 250},
    "b_frames.mp4": {"n": 70, "options": {"x264-params": X264 + ":bframes=5:b-pyramid=normal"}},
    "open_gop.mp4": {"n": 70, "options": {"x264-params": X264 + ":open-gop=1:bframes=3"}},
    "intra_refresh.mp4": {"n": 100, "options": {"x264-params": X264 + ":intra-refresh=1"}},
    "hevc.mp4": {"n": 70, "codec": "libx265", "options": {"preset": "ultrafast", "x265-params": X265}},
    "vp9.webm": {"n": 100, "codec": "libvpx-vp9", "options": {"cpu-used": "8", "lag-in-frames": "25"}},
    "av1.mp4": {"codec": "libsvtav1", "options": {"preset": "12"}},
    "matroska.mkv": {"n": 70},
    "flash.flv": {"n": 100},
    "sound.ts": {"n": 70, "sound": "aac"},
    "mpeg4_b_frames.avi": {"n": 70, "codec": "mpeg4", "options": {"bf": "2"}},
    "one.mp4": {"n": 1},
    "edit_list.mp4": {"n": 70, "hidden": 20},
    "variable_rate.mp4": {"n": 40, "stamps": (np.cumsum([0] + [1, 5, 1, 1, 30] * 8)[:40] + 7).tolist()},
    "quarter_turn.mp4": {"n": 20, "rotate": 90},
    "upside_down.mp4": {"n": 20, "rotate": 180},
}


# The others differ from these in little, and take as long.
RARE = {"long_gop.mp4", "intra_refresh.mp4", "vp9.webm", "matroska.mkv", "flash.flv", "upside_down.mp4"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in RARE else ()) for name in KINDS])
def test_any_selection_equals_sequential_decoding(reader, tmp_path, name):
    """decord2 3.4.0 returns wrong frames without an error (HEVC with open GOPs, AVI, MPEG-TS). On a rotation by 90 degrees
    it fails or swaps rows and columns. It shifts the frames after hidden ones."""
    path = write(tmp_path / name, **KINDS[name])
    pixels, times = sequential(path)
    assert number(pixels[0]) == KINDS[name].get("hidden", 0)
    pixels = np.rot90(pixels, KINDS[name].get("rotate", 0) // 90, axes=(1, 2))
    info = reader.info(path)
    np.testing.assert_allclose(info.times, times - times[0], atol=1e-6)
    assert (info.n_frames, info.height, info.width) == pixels.shape[:3]
    rng = np.random.default_rng(0)
    selections = [range(info.n_frames), *(rng.choice(info.n_frames, size) for size in (1, 2, 9))]  # any order
    for indices in map(list, selections):
        frames = reader.frames(path, indices, (info.width, info.height))
        assert (frames.pixels == pixels[indices]).all()
        assert frames.times == tuple(info.times[indices])
    small = reader.overview(path, info.n_frames, lambda width, height: (width // 2, height // 2)).pixels
    blocks = pixels.reshape(len(pixels), info.height // 2, 2, info.width // 2, 2, 3).mean((2, 4))
    assert small.shape == blocks.shape and np.abs(small - blocks).mean() < 12


@pytest.mark.parametrize("name", ["good.mp4", "av1.mp4", "open_gop.mp4"])
def test_a_seek_finds_all_of_its_frames(tmp_path, monkeypatch, name):
    """A frame that the seek misses is found by decoding from the start, which takes long. With an open GOP, frame 124 is shown
    before keyframe 125, but decoded after it."""
    path = write(tmp_path / name, **KINDS.get(name, {}) | {"n": 300, "gop": 125})
    keys, decode_from = [], video._decode_from
    monkeypatch.setattr(video, "_decode_from", lambda *args: keys.append(args[2]) or decode_from(*args))
    *_, table = video._probe(str(path))
    video._decode(str(path), table[4::20].tolist(), (WIDTH, HEIGHT))
    assert keys and None not in keys


def test_size_and_duration_are_those_that_are_shown_whatever_the_header_says(reader, tmp_path):
    dvd = reader.info(write(tmp_path / "dvd.mkv", n=3, aspect=Fraction(4, 3)))
    assert (dvd.width, dvd.height) == (128, 64)
    path = patch(write(tmp_path / "liar.mkv"), b"\x44\x89\x88", 3, struct.pack(">d", 36_000_000.0))  # Duration, in ms
    with av.open(str(path)) as container:
        assert container.duration == 36_000 * av.time_base  # FFmpeg believes it
    assert reader.info(path).duration == pytest.approx(2.4) and reader.info(path).times[-1] == pytest.approx(2.36)


@pytest.mark.slow
def test_an_hour_costs_bounded_memory(tmp_path):
    stamps = list(range(0, 108_000, 30))
    path = write(tmp_path / "hour.mp4", n=3600, gop=250, options={"preset": "ultrafast"}, stamps=stamps)
    with Videos(workers=1) as videos:
        frames = videos.overview(path, 64, same_size)
        assert frames.times[-1] == 3599 and [number(p) for p in frames.pixels] == list(frames.times)
        status = Path(f"/proc/{worker_pids(videos).pop()}/status").read_text()
        assert int(status.split("VmHWM:")[1].split()[0]) < 200 << 10  # KiB


# ---- bad files -----------------------------------------------------------------------------------------------------


def hum(path: Path) -> None:
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(bytes(8000))


def thin(path: Path) -> None:
    patch(write(path, n=3, aspect=Fraction(3, 2)), b"pasp", 4, struct.pack(">II", 1, 10**6))


def half(path: Path) -> None:
    write(path)
    os.truncate(path, path.stat().st_size * 6 // 10)


def text(path: Path) -> None:
    path.write_text("<html>404 not found</html>\n" * 50)


BAD = {  # file -> how it is made, a part of its error, and whether it is quarantined
    "nul\0.mp4": (str, "cannot be opened", False),
    "fifo.mp4": (os.mkfifo, "not a regular file", False),
    "thin.mp4": (thin, "1/1000000", True),  # its pixel aspect ratio leaves no width
    "text.mp4": (text, "cannot be decoded", True),
    "index_at_the_end.mp4": (half, "cannot be decoded", True),
    "audio_only.mp4": (hum, "no video stream", True),
    "h264.avi": (partial(write, n=100), "contradict", False),  # AVI stores no times: those of B-frames are guesses
    "fifo.png": (os.mkfifo, "not a regular file", False),
    "eps.png": (partial(Image.fromarray(picture(5)).save, format="EPS"), "Unidentified", False),  # starts Ghostscript
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_a_clear_error_and_costs_nobody_else(reader, good, tmp_path, asked, name):
    path, (make, reason, quarantined) = tmp_path / name, BAD[name]
    make(path)
    ask = partial(reader.image, path) if name.endswith("png") else partial(reader.overview, path, 60)
    error = str(error_of(ask, same_size))
    assert error.startswith(f"{path}: ") and reason in error
    assert number(reader.frames(good, [17], (WIDTH, HEIGHT)).pixels[0]) == 17
    if quarantined:
        asked.clear()
        assert str(error_of(reader.info, path)) == error and not asked
        path.write_bytes(Path(good).read_bytes())
        assert reader.info(path).n_frames == 60


@pytest.mark.parametrize("name, flags", [("hevc.mp4", "faststart"), ("flash.flv", ""), ("mpeg4_b_frames.avi", "")])
def test_a_file_that_ends_in_the_middle_of_a_frame_gives_all_frames_before(reader, tmp_path, name, flags):
    path = write(tmp_path / name, **KINDS.get(name, {}) | {"n": 100, "flags": flags})
    clean, size = sequential(path)[0], path.stat().st_size
    for share in (0.9, 0.77, 0.65):
        os.truncate(path, int(size * share))
        frames = reader.overview(path, 200, same_size)
        shown = [number(pixels) for pixels in frames.pixels]
        assert len(frames) > 15 and len(set(shown)) == len(shown)
        assert (frames.pixels == clean[shown]).all()
        assert frames.times == pytest.approx([(i - shown[0]) / 25 for i in shown], abs=2e-3)


def test_damage_is_never_passed_off_as_frames(reader, tmp_path):
    """FFmpeg conceals damage with repeated or smeared pictures. Only damage that parses as valid video can go unnoticed."""
    data, errors = write(tmp_path / "rot.mp4", n=90, flags="faststart").read_bytes(), 0
    for seed in range(20):
        rng, rotten = np.random.default_rng(seed), bytearray(data)
        for at in rng.integers(data.index(b"mdat") + 800, len(data), 3):
            rotten[at] ^= int(rng.integers(1, 256))
        (tmp_path / f"{seed}.mp4").write_bytes(rotten)
        try:
            reader.overview(tmp_path / f"{seed}.mp4", 90, same_size)
        except VideoError:
            errors += 1
    assert errors >= 17


def test_damage_costs_the_frames_that_it_hits_and_no_others(reader, tmp_path):
    path = write(tmp_path / "overwritten.mp4", n=100)
    patch(path, b"mdat", path.stat().st_size // 2, bytes(range(1, 251)) * 12)
    for _ in range(2):
        frames = reader.frames(path, range(0, 30, 5), (WIDTH, HEIGHT))
        assert [number(p) for p in frames.pixels] == list(range(0, 30, 5))
        assert "cannot be decoded" in str(error_of(reader.frames, path, range(30, 100, 5), (WIDTH, HEIGHT)))


# ---- images --------------------------------------------------------------------------------------------------------


def test_an_image_is_one_frame_without_a_time(reader, tmp_path):
    path = tmp_path / "a.png"
    Image.fromarray(picture(5)).save(path)
    frames = reader.image(path, lambda width, height: (width // 2, height // 4))
    expected = Image.fromarray(picture(5)).resize((WIDTH // 2, HEIGHT // 4), Image.Resampling.BICUBIC)
    assert np.array_equal(frames.pixels, np.asarray(expected)[None]) and frames.times == (None,)


# ---- workers that hang, crash, age and end -------------------------------------------------------------------------


SILENT = "os.write(int(sys.argv[2]), b'\\0\\0\\x10\\0' + b'x' * 100); time.sleep(60)"  # announces 4096 bytes


@pytest.mark.parametrize("act, told", [
    pytest.param("time.sleep(60)", "hung its decoder for 1 s", id="hangs"),
    pytest.param(SILENT, "hung its decoder for 1 s", id="falls silent in its answer"),
    pytest.param("os.kill(os.getpid(), signal.SIGSTOP)", "hung its decoder for 1 s", id="is stopped"),
    pytest.param("os.kill(os.getpid(), signal.SIGSEGV)", "(exit code -11)", id="crashes"),
])  # fmt: skip
def test_a_file_that_a_worker_cannot_index_ends_the_worker_and_is_not_tried_again(
    good, hangs, fake_av, asked, act, told
):
    fake_av(act)
    with Videos(workers=1, timeout=1) as videos:
        for _ in range(2):
            assert told in str(error_of(videos.info, hangs))
        assert asked == ["probe"] and not any(map(alive, worker_pids(videos)))
        assert "ZeroDivisionError" in str(error_of(videos.info, good))  # another worker takes its place


def test_workers_that_die_while_idle_cost_no_file_and_leave_no_descriptors(good):
    """In a process of its own: threads of other tests open and close descriptors."""
    finish(Forked(partial(kill_idle_workers, good)))


def kill_idle_workers(good: str) -> None:
    with Videos(workers=1, cache_bytes=0) as videos:
        counts = set()
        for i in range(3):
            videos.frames(good, [i], (32, 32))
            counts.add(len(os.listdir("/proc/self/fd")))
            [worker] = videos._workers
            worker.process.kill()
            worker.process.wait()
        assert len(counts) == 1
        # Past bug: a scheduler signals all processes. SIGTERM killed the decoder, and the file was called damaged.
        videos.info(good)
        [worker] = videos._workers
        worker.process.terminate()
        videos.frames(good, [50], (32, 32))
        assert {worker} == videos._workers


def test_a_worker_works_on_beside_one_that_hangs_and_close_ends_both(good, hangs, fake_av, asked):
    fake_av("time.sleep(60)")
    videos = Videos(workers=2)
    with ThreadPoolExecutor(1) as threads:
        busy = threads.submit(error_of, videos.info, hangs)
        wait_for(lambda: asked)
        assert "ZeroDivisionError" in str(error_of(videos.info, good))
        pids = worker_pids(videos)
        videos.close()
        assert "closed" in str(busy.result())
    assert len(pids) == 2 and not any(map(alive, pids))
    assert "closed" in str(error_of(videos.info, hangs)) and len(videos._bad) == 1  # the file is not at fault


def hang_a_worker(path: str) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_IGN)  # a program hands this on to those that it starts
    with Videos(workers=1, timeout=1) as videos:
        videos.info(path)


def test_a_worker_that_hangs_does_not_outlive_its_parent(hangs, fake_av):
    """In C code it does not notice that its pipe is closed. An alarm ends it."""
    fake_av("os.mkdir(path + '.d'); time.sleep(60)")
    parent = Forked(partial(hang_a_worker, hangs))
    wait_for(Path(hangs + ".d").exists, parent)
    [worker] = children(parent.pid)
    parent.kill()
    wait_for(lambda: not alive(worker), seconds=20)


# ---- threads and the cache -----------------------------------------------------------------------------------------


def test_threads_share_decodes_errors_and_frames_nobody_can_change(good, tmp_path, asked):
    bad = tmp_path / "bad.mp4"
    text(bad)
    asks = [([i % 11, 20 + i % 7, 59], (WIDTH, HEIGHT) if i % 3 else (48, 32)) for i in range(100)]
    with Videos(workers=2) as many, Videos(workers=1, cache_bytes=0) as one:
        with ThreadPoolExecutor(12) as threads:
            got = list(threads.map(lambda ask: many.frames(good, *ask), asks))
            list(threads.map(lambda _: error_of(many.info, bad), range(8)))
        assert asked.count("decode") == len({(tuple(indices), size) for indices, size in asks}) < 100
        assert asked.count("probe") < 6
        for ask, frames in zip(asks[:12], got):
            alone = one.frames(good, *ask)
            assert (frames.pixels == alone.pixels).all() and frames.times == alone.times
        for shared in (got[0].pixels, many.info(good).times):
            with pytest.raises(ValueError, match="read-only"):
                shared[0] = 1


def test_the_cache_is_keyed_by_everything_that_shapes_the_frames(tmp_path, asked):
    """Released ParaVT keys its episode cache by the path alone, so one question gets another's prompt."""
    path = write(tmp_path / "v.mp4")
    with Videos(workers=1) as videos:
        first = videos.window(path, 0.0, 1.0, same_size, 4, 16)
        second = videos.window(path, 1.0, 2.0, same_size, 4, 16)
        small = videos.window(path, 1.0, 2.0, lambda w, h: (w // 2, h // 2), 4, 16)
        assert [number(p) for p in first.pixels] != [number(p) for p in second.pixels]
        assert small.pixels.shape[1:] == (HEIGHT // 2, WIDTH // 2, 3) and small.times == second.times
        assert videos.window(path, 1.0, 2.0, same_size, 4, 16).pixels is second.pixels
        assert asked.count("decode") == 3
        link = tmp_path / "link.mp4"
        link.symlink_to(path)  # another name of the same file shares its frames
        assert videos.window(link, 1.0, 2.0, same_size, 4, 16).pixels is second.pixels
        write(path, n=75, options={"crf": "30"})
        assert videos.info(path).n_frames == 75
        assert (videos.window(path, 1.0, 2.0, same_size, 4, 16).pixels != second.pixels).any()


def test_the_cache_keeps_to_its_budget_and_forgets_the_oldest_use_first(good, asked):
    one = WIDTH * HEIGHT * 3
    index = 60 * 4 * 8  # bytes: a time and three stamps per frame
    with Videos(workers=1, cache_bytes=index + 3 * one) as videos:
        for i in (0, 1, 2, 0, 3, 0, 2, 3):  # 3 pushes out 1
            videos.frames(good, [i], (WIDTH, HEIGHT))
        assert asked.count("decode") == 4 and videos._cached_bytes == index + 3 * one
        videos.frames(good, [1], (WIDTH, HEIGHT))
        assert asked.count("decode") == 5
        assert len(videos.overview(good, 60, same_size)) == 60  # larger than the budget: returned but not cached
        assert videos._cached_bytes <= index + 3 * one


def test_the_reader_imports_neither_torch_nor_a_decoder_into_its_user():
    code = "import sys, video; print([m for m in ('torch', 'av', 'decord') if m in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(video.__file__).parent)
    assert output.stdout.strip() == b"[]"
