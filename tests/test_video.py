"""video.py against real files, good and bad, all written here: a right frame with its true time, or a VideoError."""

import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime import video
from runtime.video import VideoError, Videos, uniform_indices, window_indices

WIDTH, HEIGHT = 96, 64
X264, X265 = "threads=1:scenecut=0", "bframes=3:log-level=none:pools=1"


def picture(i: int) -> np.ndarray:
    """Frame i shows its number: twelve binary blocks on top, a moving texture below."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    image = np.stack([x * 2 + i * 7, y * 3 + i * 5, (x + y) + i * 11], -1) % 256  # [H, W, 3]
    for bit in range(12):
        image[: HEIGHT // 2, bit * 8 : bit * 8 + 8] = 255 * (i >> bit & 1)
    return image.astype(np.uint8)


def number(pixels: np.ndarray) -> int:
    blocks = pixels[: HEIGHT // 2].mean((0, 2)).reshape(12, 8).mean(1)  # [12]
    return sum(int(value > 127) << bit for bit, value in enumerate(blocks))


def write(path, n=60, codec="libx264", gop=30, options=None, stamps=None, rotate=0, aspect=None, file_options=None):
    """n pictures at 25 per second, or at `stamps` in units of 1/30 s."""
    if codec == "libx264":
        options = {"preset": "veryfast", "x264-params": X264} | (options or {})
    with av.open(str(path), "w", options=file_options or {}) as container:
        stream = container.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        stream.gop_size, stream.codec_context.options = gop, options or {}
        if aspect:
            stream.codec_context.sample_aspect_ratio = aspect
        if rotate:
            stream.set_display_rotation(rotate)
        if stamps:
            stream.codec_context.time_base = Fraction(1, 30)
        for i in range(n):
            image = av.VideoFrame.from_ndarray(picture(i))
            if stamps:
                image.pts, image.time_base = stamps[i], Fraction(1, 30)
            container.mux(stream.encode(image))
        container.mux(stream.encode())
    return path


def sequential(path) -> tuple[np.ndarray, np.ndarray]:
    """The judge: every frame by plain decoding from the start, and its time."""
    with av.open(str(path)) as container:
        images = [(image.to_ndarray(format="rgb24"), image.time) for image in container.decode(video=0)]
    return np.stack([pixels for pixels, _ in images]), np.array([t for _, t in images])  # [N, H, W, 3], [N]


def patch(path: Path, box: bytes, offset: int, value: bytes) -> Path:
    """Overwrite bytes of an mp4 box, counted from its name."""
    data = bytearray(path.read_bytes())
    at = data.index(box) + offset
    data[at : at + len(value)] = value
    path.write_bytes(data)
    return path


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def same_size(width: int, height: int) -> tuple[int, int]:
    return width, height


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
def fake_av(tmp_path, monkeypatch):
    """Workers started from here on import this `av` instead of the real one."""

    def install(source: str) -> None:
        (tmp_path / "fake").mkdir()
        (tmp_path / "fake" / "sitecustomize.py").write_text(
            f"import sys; sys.path.insert(0, {str(tmp_path / 'fake')!r})"
        )
        (tmp_path / "fake" / "av.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))

    return install


# ---- which frames --------------------------------------------------------------------------------------------------


@given(st.integers(1, 5000), st.integers(1, 300))
def test_uniform_indices_are_distinct_and_reach_both_ends(n, k):
    indices = uniform_indices(n, k)
    assert len(set(indices)) == len(indices) == min(n, k)
    assert indices == sorted(indices) and indices[0] == 0
    assert k == 1 or indices[-1] == n - 1
    assert indices == [round(i) for i in np.linspace(0, n - 1, min(n, k))]


TIMES = st.lists(st.integers(1, 4000), min_size=0, max_size=80).map(lambda gaps: np.cumsum([0, *gaps]) / 1000)


@given(TIMES, st.floats(-5, 400), st.floats(0, 300), st.floats(0.1, 30), st.integers(1, 8), st.integers(0, 24))
def test_window_frames_lie_in_the_window_and_number_as_asked(times, start, span, fps, low, extra):
    end, high = start + span, low + extra
    indices = window_indices(times, start, end, fps, low, high)
    inside = np.flatnonzero((times >= start) & (times <= end))
    if len(inside):
        assert len(indices) == min(max(round((end - start) * fps), low), high, len(inside))
        assert len(set(indices)) == len(indices) and indices == sorted(indices) and set(indices) <= set(inside)
    else:
        distance = np.abs(times - (start + end) / 2)
        assert len(indices) == 1 and distance[indices[0]] == distance.min()


def test_window_frames_are_the_middles_of_equal_bins():
    assert window_indices(np.arange(100) / 10, 0, 9.9, 1, 1, 4) == [12, 37, 62, 87]
    assert window_indices(np.arange(100) / 10, 2.0, 2.4, 1, 1, 16) == [22]


@pytest.mark.parametrize("bad", [(3, 2), (0, float("inf")), (float("nan"), 1)])
def test_an_impossible_window_is_our_bug(bad):
    with pytest.raises(ValueError, match="start <= end"):
        window_indices(np.arange(9.0), *bad, 1, 1, 4)


def test_indices_and_sizes_out_of_range_are_our_bugs(reader, good):
    for indices in ([-1], [60], []):
        with pytest.raises(ValueError, match=r"some of 0\.\.59"):
            reader.frames(good, indices, (32, 32))
    with pytest.raises(ValueError, match="at least 1"):
        reader.frames(good, [0], (0, 32))
    with pytest.raises(TypeError):
        reader.frames(good, [0.5], (32, 32))
    with pytest.raises(ValueError, match="at least 1"):
        uniform_indices(10, 0)


# ---- the right frame with the right time ---------------------------------------------------------------------------

KINDS = {
    "long_gop.mp4": {"n": 300, "gop": 250},
    "b_frames.mp4": {"n": 130, "options": {"x264-params": X264 + ":bframes=5:b-pyramid=normal"}},
    "open_gop.mp4": {"n": 130, "options": {"x264-params": X264 + ":open-gop=1:bframes=3"}},
    "interlaced.mp4": {"options": {"x264-params": X264 + ":interlaced=1"}},
    "intra_refresh.mp4": {"n": 100, "options": {"x264-params": X264 + ":intra-refresh=1"}},
    "hevc.mp4": {"n": 130, "codec": "libx265", "options": {"preset": "ultrafast", "x265-params": X265}},
    "vp9.webm": {"n": 100, "codec": "libvpx-vp9", "options": {"cpu-used": "8", "lag-in-frames": "25"}},
    "av1.mp4": {"codec": "libsvtav1", "options": {"preset": "12"}},
    "matroska.mkv": {"n": 130},
    "transport.ts": {"n": 130},
    "flash.flv": {"n": 100},
    "mpeg4.avi": {"n": 100, "codec": "mpeg4"},
    "mpeg4_b_frames.avi": {"n": 100, "codec": "mpeg4", "options": {"bf": "2"}},
}


@pytest.mark.parametrize("name", KINDS)
def test_any_selection_equals_sequential_decoding(reader, tmp_path, name):
    """decord2 3.4.0 returned other frames than asked, without an error: HEVC with open GOPs (sparse indices), FLV."""
    path = write(tmp_path / name, **KINDS[name])
    pixels, times = sequential(path)
    info = reader.info(path)
    np.testing.assert_allclose(info.times, times - times[0], atol=1e-6)
    assert info.n_frames == len(pixels) and (info.width, info.height) == (WIDTH, HEIGHT)
    rng = np.random.default_rng(0)
    selections = [range(info.n_frames), *(rng.choice(info.n_frames, size) for size in (1, 1, 1, 2, 5, 9))]  # any order
    for indices in map(list, selections):
        frames = reader.frames(path, indices, (WIDTH, HEIGHT))
        assert (frames.pixels == pixels[indices]).all()
        assert frames.times == tuple(info.times[indices])


@pytest.mark.parametrize("name", ["good.mp4", "av1.mp4", "vp9.webm", "matroska.mkv"])
def test_a_seek_finds_all_of_its_frames(tmp_path, monkeypatch, name):
    """Past bug: told to skip, dav1d dropped wanted frames that it still held back, and every selection of an AV1 file
    was decoded once more, from the start of the file."""
    path = write(tmp_path / name, **KINDS.get(name, {}) | {"n": 300, "gop": 125})
    keys, decode_from = [], video._decode_from
    monkeypatch.setattr(video, "_decode_from", lambda *args: keys.append(args[2]) or decode_from(*args))
    table = video.VideoInfo("", *video._probe(str(path)))._table
    video._decode(str(path), table[5::25].tolist(), (WIDTH, HEIGHT))
    assert keys and None not in keys


def test_frames_hidden_by_an_edit_list_have_no_index(reader, tmp_path):
    """decord2 gave the hidden frames negative times and shifted all later ones: 0.04 s returned the frame of 0.84 s."""
    path = patch(write(tmp_path / "cut.mp4", n=100), b"elst", 16, struct.pack(">i", 1024 + 512 * 20))
    pixels, times = sequential(path)
    assert len(pixels) < 90 and number(pixels[0]) == 20
    info = reader.info(path)
    np.testing.assert_allclose(info.times, times - times[0], atol=1e-6)
    for i in range(0, info.n_frames, 7):
        assert number(reader.frames(path, [i], (WIDTH, HEIGHT)).pixels[0]) == 20 + i


def test_times_are_true_at_a_variable_frame_rate(reader, tmp_path):
    stamps = (np.cumsum([0] + [1, 5, 1, 1, 30] * 8)[:40] + 7).tolist()
    path = write(tmp_path / "vfr.mp4", n=40, stamps=stamps)
    np.testing.assert_allclose(reader.info(path).times, (np.array(stamps) - 7) / 30, atol=1e-6)
    frames = reader.window(path, 3.0, 5.0, same_size, fps=10, max_frames=99)
    assert [round(t * 30) + 7 for t in frames.times] == [s for s in stamps if 90 <= s - 7 <= 150]
    assert [number(p) for p in frames.pixels] == [stamps.index(round(t * 30) + 7) for t in frames.times]


@pytest.mark.parametrize("degrees", [90, 180, -90])
def test_frames_are_upright_and_sizes_are_as_displayed(reader, tmp_path, degrees):
    """decord2 fails or mixes up rows and columns when a file asks for a quarter turn."""
    path = write(tmp_path / "turned.mp4", n=5, rotate=degrees)
    upright = np.rot90(sequential(path)[0], degrees // 90, axes=(1, 2))
    info = reader.info(path)
    assert (info.height, info.width) == upright.shape[1:3]
    assert (reader.overview(path, 5, same_size).pixels == upright).all()
    small = reader.overview(path, 5, lambda width, height: (width // 2, height // 2)).pixels
    blocks = upright.reshape(5, info.height // 2, 2, info.width // 2, 2, 3).mean((2, 4))
    assert small.shape == blocks.shape and np.abs(small - blocks).mean() < 12


def test_non_square_pixels_widen_the_display_size(reader, tmp_path):
    info = reader.info(write(tmp_path / "dvd.mkv", n=3, aspect=Fraction(4, 3)))
    assert (info.width, info.height) == (128, 64)


def test_one_frame_is_a_video(reader, tmp_path):
    path = write(tmp_path / "one.mp4", n=1)
    assert reader.info(path).duration == pytest.approx(0.04)
    assert reader.overview(path, 64, same_size).times == (0.0,)
    assert reader.window(path, 5, 9, same_size).times == (0.0,)


def test_duration_comes_from_the_packets_not_from_the_header(reader, tmp_path):
    mp4, mkv = write(tmp_path / "liar.mp4"), write(tmp_path / "liar.mkv")
    for box, offset, ticks in ((b"mvhd", 20, 36_000_000), (b"tkhd", 24, 36_000_000), (b"mdhd", 20, 36_000 * 12_800)):
        patch(mp4, box, offset, struct.pack(">I", ticks))
    patch(mkv, b"\x44\x89\x88", 3, struct.pack(">d", 36_000_000.0))  # Duration, in ms
    with av.open(str(mkv)) as container:
        assert container.duration == 36_000 * av.time_base  # FFmpeg believes it
    for path in (mp4, mkv):
        info = reader.info(path)
        assert info.duration == pytest.approx(2.4) and info.times[-1] == pytest.approx(2.36)
        assert number(reader.overview(path, 2, same_size).pixels[-1]) == 59


def test_an_hour_costs_bounded_memory(tmp_path):
    path = write(
        tmp_path / "hour.mp4", n=3600, gop=250, options={"preset": "ultrafast"}, stamps=list(range(0, 108_000, 30))
    )
    with Videos(workers=1) as videos:
        frames = videos.overview(path, 64, same_size)
        assert (
            len(frames) == 64 and frames.times[-1] == 3599 and [number(p) for p in frames.pixels] == list(frames.times)
        )
        status = Path(f"/proc/{worker_pids(videos).pop()}/status").read_text()
        peak = int(status.split("VmHWM:")[1].split()[0]) // 1024  # MiB
        assert peak < 200, f"the worker took {peak} MiB"


# ---- bad files -----------------------------------------------------------------------------------------------------


def bad_file(kind: str, folder: Path) -> Path:
    path = folder / f"{kind}.mp4"
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "empty":
        path.touch()
    elif kind == "text":
        path.write_text("<html>404 not found</html>\n" * 50)
    elif kind == "truncated, index at the end":
        write(path)
        os.truncate(path, path.stat().st_size * 6 // 10)
    elif kind == "truncated, index in front":
        write(path, file_options={"movflags": "faststart"})
        os.truncate(path, path.stat().st_size * 6 // 10)
    elif kind == "overwritten":
        write(path, n=100)
        data = bytearray(path.read_bytes())
        middle = data.index(b"mdat") + (data.index(b"moov") - data.index(b"mdat")) // 2
        data[middle : middle + 3000] = bytes(range(1, 251)) * 12
        path.write_bytes(data)
    elif kind == "h264 in avi":  # no times are stored, and B-frames make guessing them impossible
        path = write(path.with_suffix(".avi"), n=100)
    elif kind == "audio only":
        with av.open(str(path), "w") as container:
            stream = container.add_stream("aac", rate=44100)
            sound = av.AudioFrame.from_ndarray(np.zeros((1, 44100), np.float32), format="fltp", layout="mono")
            sound.rate, sound.pts = 44100, 0
            container.mux(stream.encode(sound))
            container.mux(stream.encode())
    elif kind == "no frames":
        with av.open(str(path), "w") as container:
            stream = container.add_stream("libx264", rate=25)
            stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
            container.start_encoding()
    return path


SEEN_EARLY = {"missing": "No such file", "directory": "not a regular file", "fifo": "not a regular file"}
SEEN_BY_DECODER = {
    "empty": "cannot be decoded",
    "text": "cannot be decoded",
    "truncated, index at the end": "cannot be decoded",
    "truncated, index in front": "cannot be decoded",
    "overwritten": "cannot be decoded",
    "h264 in avi": "contradict the order",
    "audio only": "no video stream",
    "no frames": "cannot be decoded",
}
SEEN_IN_PLACES = {"truncated, index in front", "overwritten", "h264 in avi"}  # other frames may be good


@pytest.mark.parametrize("kind", SEEN_EARLY | SEEN_BY_DECODER)
def test_a_bad_file_is_a_clear_error_and_costs_nobody_else(reader, good, tmp_path, kind):
    path = bad_file(kind, tmp_path)
    before = len(reader._bad)
    with pytest.raises(VideoError) as caught:
        reader.overview(path, 60, same_size)
    assert caught.value.path == str(path) and str(path) in str(caught.value)
    assert (SEEN_EARLY | SEEN_BY_DECODER)[kind] in caught.value.reason
    assert len(reader._bad) - before == (kind in SEEN_BY_DECODER and kind not in SEEN_IN_PLACES)
    assert number(reader.frames(good, [17], (WIDTH, HEIGHT)).pixels[0]) == 17


def test_damage_is_never_passed_off_as_frames(tmp_path):
    """FFmpeg conceals damage with repeated or smeared pictures; only damage that still parses as video can stay unseen."""
    path = write(tmp_path / "rot.mp4", n=90, file_options={"movflags": "faststart"})
    clean, data = sequential(path)[0], path.read_bytes()
    outcomes = {"error": 0, "right": 0, "unseen": 0}
    with Videos(workers=1) as videos:
        for seed in range(40):
            rng, rotten = np.random.default_rng(seed), bytearray(data)
            for at in rng.integers(data.index(b"mdat") + 800, len(data), 3):
                rotten[at] ^= int(rng.integers(1, 256))
            (tmp_path / f"{seed}.mp4").write_bytes(rotten)
            try:
                pixels = videos.overview(tmp_path / f"{seed}.mp4", 90, same_size).pixels
                outcomes["right" if (pixels == clean).all() else "unseen"] += 1
            except VideoError:
                outcomes["error"] += 1
    assert outcomes["error"] >= 34, outcomes


def test_damage_costs_the_frames_that_it_hits_and_no_others(tmp_path):
    """One crop of the damaged part put the file into quarantine, for this run and all later calls of it."""
    path, record = bad_file("overwritten", tmp_path), tmp_path / "quarantine.jsonl"
    with Videos(workers=1, cache_bytes=0, quarantine=record) as videos:
        for _ in range(2):
            frames = videos.frames(path, range(0, 30, 5), (WIDTH, HEIGHT))
            assert [number(p) for p in frames.pixels] == list(range(0, 30, 5))
            with pytest.raises(VideoError, match="cannot be decoded"):
                videos.frames(path, range(30, 100, 5), (WIDTH, HEIGHT))
    assert not record.exists()


def test_a_quarantined_file_fails_at_once_in_later_runs_until_it_is_replaced(tmp_path, good):
    path, record = bad_file("text", tmp_path), tmp_path / "runs" / "quarantine.jsonl"
    with Videos(workers=1, quarantine=record) as videos:
        with pytest.raises(VideoError) as first:
            videos.info(path)
        with pytest.raises(VideoError):
            videos.info(tmp_path / "missing.mp4")
    (row,) = map(json.loads, record.read_text().splitlines())
    assert (row["path"], row["reason"]) == (os.path.realpath(path), first.value.reason)
    assert (row["size"], row["mtime_ns"]) == (path.stat().st_size, path.stat().st_mtime_ns)
    with Videos(workers=1, quarantine=record) as videos:
        with pytest.raises(VideoError) as again:
            videos.info(path)
        assert again.value.reason == first.value.reason and not worker_pids(videos)
        path.write_bytes(Path(good).read_bytes())
        assert videos.info(path).n_frames == 60
    assert len(record.read_text().splitlines()) == 1


# ---- workers that hang, crash, age and end -------------------------------------------------------------------------


def test_a_hung_worker_is_killed_and_replaced_and_its_siblings_work_on(good, tmp_path):
    other = write(tmp_path / "other.mp4")
    with Videos(workers=2, timeout=1.5) as videos:
        videos.info(good)
        (victim,) = worker_pids(videos)
        os.kill(victim, signal.SIGSTOP)
        with ThreadPoolExecutor(2) as threads:
            began = time.monotonic()
            hung = threads.submit(
                videos.frames, good, [5], (32, 32)
            )  # the free worker of latest use is the stopped one
            assert wait_until(lambda: videos._idle.qsize() == 1)
            assert number(videos.frames(other, [9], (WIDTH, HEIGHT)).pixels[0]) == 9
            assert not hung.done()
            with pytest.raises(VideoError, match=r"hung its decoder for 1\.5 s"):
                hung.result()
            assert time.monotonic() - began < 4
        assert not alive(victim)
        assert len(videos.overview(other, 4, same_size)) == 4 and victim not in worker_pids(videos)


def test_a_worker_that_is_killed_once_costs_nothing(good, tmp_path):
    """The system, short of memory, killed one, and the good file that it was reading was never asked again."""
    with Videos(workers=1, timeout=30, quarantine=tmp_path / "quarantine.jsonl") as videos:
        videos.info(good)
        (victim,) = worker_pids(videos)
        os.kill(victim, signal.SIGSTOP)
        threading.Timer(0.3, os.kill, (victim, signal.SIGKILL)).start()
        assert number(videos.frames(good, [5], (WIDTH, HEIGHT)).pixels[0]) == 5
        assert not alive(victim) and victim not in worker_pids(videos)
    assert not (tmp_path / "quarantine.jsonl").exists()


def test_a_file_that_kills_two_workers_is_quarantined(good, tmp_path, fake_av):
    fake_av("import os, signal\ndef open(path, options):\n    os.kill(os.getpid(), signal.SIGSEGV)\n")
    record, twice = tmp_path / "quarantine.jsonl", r"killed its decoder \(exit code -11\)"
    with Videos(workers=1, quarantine=record) as videos, pytest.raises(VideoError, match=twice):
        videos.info(good)
    assert len(record.read_text().splitlines()) == 1


def test_a_worker_that_starts_slowly_holds_up_nobody(good, fake_av):
    """It started under the lock that every hit of the cache takes, too, and for as long as it liked."""
    with Videos(workers=2) as videos, ThreadPoolExecutor(2) as threads:
        frames = videos.frames(good, [5], (32, 32))
        fake_av("import time; time.sleep(3)")
        began, _ = time.monotonic(), videos._idle.get()
        starting = threads.submit(videos.frames, good, [6], (32, 32))
        assert wait_until(lambda: videos._idle.empty())
        assert threads.submit(videos.frames, good, [5], (32, 32)).result().pixels is frames.pixels
        videos.close()
        assert time.monotonic() - began < 2
        with pytest.raises(RuntimeError, match="closed"):
            starting.result()
        assert not any(map(alive, worker_pids(videos)))


def test_a_worker_that_never_starts_is_an_error(good, fake_av, monkeypatch):
    monkeypatch.setattr(video, "START_LIMIT", 0.5)
    fake_av("import time; time.sleep(60)")
    with Videos(workers=1) as videos, pytest.raises(RuntimeError, match=r"or took 0\.5 s"):
        videos.info(good)


def test_a_worker_that_dies_while_idle_is_no_fault_of_the_next_file(good):
    with Videos(workers=1) as videos:
        videos.info(good)
        (victim,) = worker_pids(videos)
        os.kill(victim, signal.SIGKILL)
        assert wait_until(lambda: not alive(victim))
        assert len(videos.overview(good, 3, same_size)) == 3


def test_a_worker_that_stops_in_the_middle_of_its_answer_is_killed(good, fake_av):
    half = "os.write(int(sys.argv[2]), b'\\0\\0\\x10\\0' + b'x' * 100)"  # announces 4096 bytes
    fake_av(f"import os, sys, time\ndef open(path, options):\n    {half}\n    time.sleep(60)\n")
    with Videos(workers=1, timeout=1) as videos, pytest.raises(VideoError, match="hung its decoder for 1 s"):
        videos.info(good)


def test_a_missing_decoder_is_our_error_and_condemns_no_file(good, tmp_path, fake_av):
    fake_av("raise ImportError('no FFmpeg here')")
    with Videos(workers=1, quarantine=tmp_path / "quarantine.jsonl") as videos:
        with pytest.raises(RuntimeError, match="import av"):
            videos.info(good)
        assert not videos._bad and not (tmp_path / "quarantine.jsonl").exists()


def test_workers_are_recycled(good):
    with Videos(workers=1, tasks_per_worker=3) as videos:
        seen = set()
        for i in range(8):  # with the probe: nine requests
            videos.frames(good, [i], (32, 32))
            seen |= worker_pids(videos)
        assert len(seen) == 3 and len(worker_pids(videos)) == 1 and sum(map(alive, seen)) == 1


def test_close_ends_every_worker_busy_or_idle(good):
    videos = Videos(workers=2)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda i: videos.frames(good, [i], (32, 32)), range(8)))
        pids = worker_pids(videos)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        busy = threads.submit(videos.frames, good, [50], (32, 32))
        assert wait_until(lambda: videos._idle.qsize() < 2)
        videos.close()
        with pytest.raises(RuntimeError, match="closed"):
            busy.result()
    assert not any(map(alive, pids))
    assert not videos._bad  # a closed reader is no fault of the file
    with pytest.raises(RuntimeError, match="closed"):
        videos.frames(good, [51], (32, 32))


LIFE = """
import sys
from runtime import video
videos = video.Videos(workers=1, timeout=1)
videos.info(sys.argv[1]) if len(sys.argv) == 2 else videos._idle.put(videos._fit(videos._idle.get()))
print(*[worker.process.pid for worker in videos._workers], flush=True)
{end}
"""


@pytest.mark.parametrize(
    "end", ["pass", "raise SystemExit(3)", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
)
def test_no_worker_outlives_its_parent(good, end):
    command = [sys.executable, "-c", LIFE.format(end=end), good]
    output = subprocess.run(command, stdout=subprocess.PIPE, cwd=Path(video.__file__).parent.parent).stdout
    assert wait_until(lambda: not alive(int(output)))


def test_a_hung_orphan_ends_by_itself(good, fake_av):
    fake_av("import time\ndef open(path, options):\n    time.sleep(60)\n")
    end = "import threading; threading.Thread(target=videos.info, args=(sys.argv[1],), daemon=True).start()\n"
    end += "import os, signal, time; time.sleep(0.5); os.kill(os.getpid(), signal.SIGKILL)"
    command = [sys.executable, "-c", LIFE.format(end=end), good, "do not ask yet"]
    output = subprocess.run(command, stdout=subprocess.PIPE, cwd=Path(video.__file__).parent.parent).stdout
    assert alive(int(output)) and wait_until(lambda: not alive(int(output)), 5)


# ---- threads and the cache -----------------------------------------------------------------------------------------


@pytest.fixture
def decodes(monkeypatch) -> list[tuple]:
    """The requests for frames that came to a worker: those that no cache has answered."""
    asked, ask = [], video._Worker.ask

    def note(worker, request):
        asked.extend([request] if request[0] == "decode" else [])
        return ask(worker, request)

    monkeypatch.setattr(video._Worker, "ask", note)
    return asked


def test_many_threads_get_the_same_frames_as_one(good, tmp_path, decodes):
    paths = [good, str(write(tmp_path / "second.mp4", n=90))]
    asks = [(paths[i % 2], [i % 11, 20 + i % 7, 59], (WIDTH, HEIGHT) if i % 3 else (48, 32)) for i in range(60)]
    with Videos(workers=2) as many, Videos(workers=1, cache_bytes=0) as one:
        with ThreadPoolExecutor(12) as threads:
            got = list(threads.map(lambda ask: many.frames(*ask), asks))
        assert len(decodes) == len({(path, tuple(indices), size) for path, indices, size in asks})
        for ask, frames in zip(asks, got):
            alone = one.frames(*ask)
            assert (frames.pixels == alone.pixels).all() and frames.times == alone.times
        assert len(worker_pids(many)) == 2


def test_threads_that_ask_for_the_same_thing_share_one_decode_and_one_error(good, tmp_path, decodes):
    bad = bad_file("text", tmp_path)
    with Videos(workers=2, quarantine=tmp_path / "quarantine.jsonl") as videos, ThreadPoolExecutor(8) as threads:
        frames = list(threads.map(lambda _: videos.overview(good, 30, same_size), range(8)))
        assert len({id(f.pixels) for f in frames}) == 1 == len(decodes)
        errors = [future.exception() for future in [threads.submit(videos.info, bad) for _ in range(8)]]
        assert all(isinstance(error, VideoError) for error in errors)
        assert len((tmp_path / "quarantine.jsonl").read_text().splitlines()) == 1


def test_the_cache_is_keyed_by_everything_that_shapes_the_frames(tmp_path, decodes):
    """Released ParaVT keyed its episode cache by the path alone and handed one question's prompt to another."""
    path = write(tmp_path / "v.mp4")
    with Videos(workers=1) as videos:
        first = videos.window(path, 0.0, 1.0, same_size, fps=4)
        second = videos.window(path, 1.0, 2.0, same_size, fps=4)
        small = videos.window(path, 1.0, 2.0, lambda w, h: (w // 2, h // 2), fps=4)
        assert [number(p) for p in first.pixels] != [number(p) for p in second.pixels]
        assert small.pixels.shape[1:] == (HEIGHT // 2, WIDTH // 2, 3) and small.times == second.times
        assert videos.window(path, 1.0, 2.0, same_size, fps=4).pixels is second.pixels
        assert len(decodes) == 3
        link = tmp_path / "link.mp4"
        link.symlink_to(path)  # another name of the same file shares its frames, and is named as asked
        assert videos.window(link, 1.0, 2.0, same_size, fps=4).pixels is second.pixels
        assert videos.info(link).path == str(link) and videos.info(path).path == str(path)
        write(path, n=75, options={"crf": "30"})
        assert videos.info(path).n_frames == 75
        assert (videos.window(path, 1.0, 2.0, same_size, fps=4).pixels != second.pixels).any()


def test_the_cache_keeps_to_its_budget_and_forgets_the_oldest_use_first(good, decodes):
    one = WIDTH * HEIGHT * 3
    index = 60 * 4 * 8  # bytes: a time and three stamps per frame
    with Videos(workers=1, cache_bytes=index + 3 * one) as videos:
        for i in (0, 1, 2, 0, 3):  # 3 pushes out 1
            videos.frames(good, [i], (WIDTH, HEIGHT))
        assert len(decodes) == 4 and videos._cached_bytes == index + 3 * one
        for i in (0, 2, 3):
            videos.frames(good, [i], (WIDTH, HEIGHT))
        assert len(decodes) == 4
        videos.frames(good, [1], (WIDTH, HEIGHT))
        assert len(decodes) == 5
        assert len(videos.overview(good, 60, same_size)) == 60  # larger than the budget: answered, not kept
        assert videos._cached_bytes <= index + 3 * one


def test_what_the_cache_shares_cannot_be_written_to(reader, good):
    with pytest.raises(ValueError, match="read-only"):
        reader.frames(good, [0], (32, 32)).pixels[0] = 0
    with pytest.raises(ValueError, match="read-only"):
        reader.info(good).times[0] = 1


# ---- the command line ----------------------------------------------------------------------------------------------


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, video.__file__, *arguments], capture_output=True, text=True)


def test_the_command_prints_what_the_reader_sees(good, tmp_path):
    output = run(good).stdout
    assert "60 frames, 2.400 s, 96x64, 25.000 fps" in output
    assert "<0.000 seconds>" in output and "<2.360 seconds>" in output
    failed = run(str(tmp_path / "missing.mp4"))
    assert failed.returncode == 1 and "check the path" in failed.stderr and "Traceback" not in failed.stderr


def test_the_reader_imports_neither_torch_nor_a_decoder_into_its_user():
    code = "import sys, video; print([m for m in ('torch', 'av', 'decord') if m in sys.modules])"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(video.__file__).parent
    )
    assert output.stdout.strip() == "[]"
