"""video.py: read frames with true timestamps from video and image files, without ever hanging or killing the run.

    with Videos(workers=4) as videos:
        frames = videos.window("v.mp4", 12.5, 20.0, size_rule, fps=1.0, max_frames=16)

Some files of a dataset hang or crash FFmpeg inside C code, where no exception helps. So it runs only in worker processes,
which can be killed and replaced. A bad file raises a VideoError for its own question. A video that cannot be indexed, or
that hangs its decoder, is quarantined: this process does not try it again.

A worker serves two requests. `probe` reads a video's packets, without decoding them, into an index: each frame's
presentation time and the keyframe to decode it from. `decode` seeks to that keyframe and decodes until the wanted frames
come out. Frames are matched by presentation time, never by counting, since edit lists and open GOPs shift the count.
Images need no worker: Pillow reads them in the caller.

Deliberately missing: audio, GPU decoding, URLs, subtitles, the choice of a frame's size (the caller's `size_rule`).
"""

import contextlib
import multiprocessing
import os
import queue
import signal
import stat
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image

Cached = TypeVar("Cached", "VideoInfo", np.ndarray)
SizeRule = Callable[[int, int], tuple[int, int]]  # (width, height) of the video -> (width, height) of its frames
Identity = tuple[str, int, int]  # (real path, bytes, mtime in ns): a replaced file has another identity
IMAGE_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")  # not all of Pillow's: EPS starts Ghostscript


class VideoError(Exception):
    """A file that cannot give the requested frames."""

    def __init__(self, path: str | Path, reason: str):
        super().__init__(f"{path}: {reason}")


@dataclass(frozen=True, eq=False)
class VideoInfo:
    """A video's size, duration and frame times."""

    path: str  # real path, with links resolved
    width: int  # pixels as displayed, after the file's rotation and pixel aspect ratio
    height: int
    times: np.ndarray  # [N] float64 seconds, read-only, strictly increasing, the first frame is at 0
    duration: float  # seconds: the end of the last frame, from the packets, since headers can be wrong
    # [N, 3] int64 ticks, for the reader alone: presentation time of the frame, then pts and dts of its keyframe
    _table: np.ndarray = field(repr=False)

    @property
    def n_frames(self) -> int:
        return len(self.times)

    @property
    def nbytes(self) -> int:
        return self.times.nbytes + self._table.nbytes


@dataclass(frozen=True, eq=False)
class Clip:
    """The decoded frames of one clip, or one image."""

    pixels: np.ndarray  # [n, H, W, 3] uint8 RGB, read-only: the cache returns the same array to all callers
    times: tuple[float | None, ...]  # [n] seconds of the decoded frames; an image has (None,)

    def __len__(self) -> int:
        return len(self.pixels)


# ------------------------------------------------------------------------------------------------ which frames: pure functions


def uniform_indices(n_frames: int, k: int) -> list[int]:
    """Return min(k, n_frames) distinct indices, evenly spread, both ends included."""
    return np.linspace(0, n_frames - 1, min(k, n_frames)).round().astype(int).tolist()


def window_indices(times, start: float, end: float, fps: float, max_frames: int) -> list[int]:
    """Return the indices of clamp(round((end - start) * fps), 1, max_frames) frames whose time is in [start, end] seconds.

    If the window has fewer frames, return all of them. If it has none, return the frame nearest to its middle.
    """
    first = int(np.searchsorted(times, start, "left"))
    m = int(np.searchsorted(times, end, "right")) - first
    if m == 0:
        return [int(np.abs(np.asarray(times) - (start + end) / 2).argmin())]
    n = min(max(round((end - start) * fps), 1), max_frames, m)
    return [first + (2 * j + 1) * m // (2 * n) for j in range(n)]  # midpoints of n equal bins of the m candidates


# ------------------------------------------------------------------------------------------------ the worker process, which alone runs FFmpeg


def _open(path: str):
    import av

    container = av.open(path, options={"protocol_whitelist": "file"})  # a playlist must not reach the network
    stream = container.streams.best("video")
    if stream is None:
        raise ValueError("it has no video stream")
    stream.codec_context.thread_count = 1  # the workers run in parallel, and frame threads would delay skip_frame
    return container, stream


def _stamp(packet) -> int | None:
    return packet.dts if packet.pts is None else packet.pts  # AVI stores no presentation times


def _probe(path: str) -> tuple:
    """Read the packets once. Return the fields of VideoInfo except the path."""
    container, stream = _open(path)
    with container:
        image, packets = _read_packets(container, stream)
        tick = stream.time_base
        aspect = stream.sample_aspect_ratio or 1
    if image is None or not packets:
        raise ValueError("it has no frame that can be decoded and is shown")

    # The size as displayed.
    width = round(image.width * aspect)
    height = image.height
    if width < 1:
        raise ValueError(f"its pixel aspect ratio, {aspect}, leaves no width")
    if image.rotation % 180:
        width, height = height, width

    # The times, with the end of the last frame.
    stamps = sorted(packets)  # [N] in presentation order
    last = packets[stamps[-1]][0] or np.median(np.diff(stamps, prepend=stamps[0]))
    ticks = np.array([*stamps, stamps[-1] + int(last)]) - stamps[0]
    seconds = ticks * tick.numerator / tick.denominator  # [N + 1]
    table = np.array([(stamp, *packets[stamp][1:]) for stamp in stamps])  # [N, 3]
    return width, height, seconds[:-1], float(seconds[-1]), table


def _read_packets(container, stream) -> tuple:
    """Return the first picture, and of each frame that is shown its stamp -> (duration, pts and dts of its keyframe), in ticks."""
    image = None
    previous = None  # the keyframe before the last one: (pts, dts)
    keyframe = None  # the last keyframe
    cut_off = None  # the stamp of the last packet if it is incomplete
    packets: dict[int, tuple] = {}
    for packet in container.demux(stream):
        if image is None:  # decode one frame, since only a frame has the rotation
            image = next(iter(packet.decode()), None)
        stamp = _stamp(packet)
        if stamp is None:
            continue
        if packet.is_keyframe:
            previous = keyframe
            keyframe = (stamp, stamp if packet.dts is None else packet.dts)
        # A frame is decoded from the last keyframe before it. A leading picture of an open GOP is shown before that keyframe
        # and is decoded from the previous one.
        leading = keyframe is not None and stamp < keyframe[0]
        decoded_from = previous if leading else keyframe
        # The decoder never outputs frames that an edit list hides or that precede the first keyframe. Skip them.
        if decoded_from is not None and not packet.is_discard:
            packets.setdefault(stamp, (packet.duration or 0, *decoded_from))
        cut_off = stamp if packet.is_corrupt else None
    if cut_off is not None:  # the file ends in the middle of its last packet
        packets.pop(cut_off, None)
    return image, packets


def _decode(path: str, rows: list[list[int]], size: tuple[int, int]) -> np.ndarray:
    """Decode the frames of these index rows, in this order."""
    wanted: dict[tuple, set[int]] = {}  # keyframe (pts, dts) -> stamps
    for stamp, *key in rows:
        wanted.setdefault(tuple(key), set()).add(stamp)
    pictures: dict[int, np.ndarray] = {}  # stamp -> [H, W, 3]
    container, stream = _open(path)
    with container:
        for key, stamps in wanted.items():
            container.seek(key[1], stream=stream)
            pictures |= _decode_from(container, stream, key[0], stamps, size)
    lost = {row[0] for row in rows} - pictures.keys()
    if lost:  # some containers seek badly: decode once from the start
        container, stream = _open(path)
        with container:
            pictures |= _decode_from(container, stream, None, lost, size)
    lost -= pictures.keys()
    if lost:
        raise ValueError(f"{len(lost)} of {len(rows)} frames are announced but cannot be decoded")
    return np.stack([pictures[row[0]] for row in rows])  # [n, H, W, 3]


def _decode_from(container, stream, key: int | None, wanted: set[int], size: tuple[int, int]) -> dict[int, np.ndarray]:
    """Decode from the keyframe shown at `key` (None: the next one) until the wanted frames have come out."""
    from av.video.reformatter import VideoReformatter

    scaler = VideoReformatter()  # one for all frames: setting it up takes longer than scaling a small frame
    pictures: dict[int, np.ndarray] = {}  # stamp -> [H, W, 3]
    delayed = stream.codec_context.name == "libdav1d"
    begun = None  # stamp of the keyframe at which decoding began
    latest = None  # stamp of the last picture
    for packet in container.demux(stream):
        stamp = _stamp(packet)
        if begun is None:
            if not packet.is_keyframe or stamp is None or key not in (None, stamp):
                continue
            begun = stamp
            latest = stamp
        # Skip unwanted frames to which no other frame refers. This saves up to half of the time and changes no other
        # frame. dav1d must not skip: it applies the flag to frames that it still holds, so it would drop wanted ones.
        skippable = not delayed and key is not None and stamp is not None and stamp not in wanted
        stream.codec_context.skip_frame = "NONREF" if skippable else "DEFAULT"
        # Trust nothing after a truncated packet: flush the frames that the decoder still holds, then stop.
        ended = packet.is_corrupt
        for image in stream.codec_context.decode(None if ended else packet):
            if image.pts is None or image.pts < begun:
                continue  # a leading picture, broken if decoding begins here
            if image.pts < latest:  # FFmpeg guesses stamps if the container has none: H.264 with B-frames in AVI
                raise ValueError("its stamps contradict the order of its pictures")
            latest = image.pts
            if image.is_corrupt:  # FFmpeg fills in what it cannot read, and later frames depend on that
                raise ValueError(f"the frame at {image.time:.2f} s (clock of the file) is damaged")
            if image.pts in wanted:
                pictures[image.pts] = _upright(image, size, scaler)
        if ended or len(pictures) == len(wanted):
            break
    return pictures


def _upright(image, size: tuple[int, int], scaler) -> np.ndarray:
    """Scale a picture, and turn it as the file says. Return [H, W, 3]."""
    quarter_turns = image.rotation // 90 % 4  # counter-clockwise
    width, height = size[::-1] if quarter_turns % 2 else size
    return np.rot90(scaler.reformat(image, width, height, "rgb24", interpolation="BICUBIC").to_ndarray(), quarter_turns)


def _serve(fd: int, timeout: float) -> None:
    """Run a worker: answer (verb, *arguments) with (True, value) or (False, reason) until the parent is gone."""
    for end in (signal.SIGINT, signal.SIGTERM):  # the parent handles both, and ends this process
        signal.signal(end, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a parent that ignores it passes that on
    pipe = Connection(fd)
    verbs: dict[str, Callable] = {"probe": _probe, "decode": _decode}
    with contextlib.suppress(EOFError, OSError):  # the parent closed the pipe or ended
        while True:
            verb, *arguments = pipe.recv()
            # SIGALRM ends this process even inside C code, so a worker that hangs does not outlive its parent for long.
            signal.setitimer(signal.ITIMER_REAL, timeout + 1)
            try:
                answer = True, verbs[verb](*arguments)
            except Exception as error:  # the process boundary: every decoding error becomes the parent's VideoError
                answer = False, f"cannot be decoded ({type(error).__name__}: {error}); fetch it again or re-encode it"
            pipe.send(answer)
            signal.setitimer(signal.ITIMER_REAL, 0)


# ------------------------------------------------------------------------------------------------ the parent: workers, cache, quarantine


class _Worker:
    """A decoder process. It does not use multiprocessing's spawn, which would import the parent's heavy __main__ again."""

    def __init__(self, timeout: float):
        self.timeout = timeout
        self.expired = False
        self.pipe, theirs = multiprocessing.Pipe()
        with theirs:
            command = [sys.executable, os.path.abspath(__file__), str(theirs.fileno()), str(timeout)]
            null = subprocess.DEVNULL
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=null, stdout=null)

    def request(self, message: tuple) -> tuple[bool, Any]:
        """Return (True, value) or (False, what is wrong with the file), always within the timeout."""
        # Kill by a timer instead of polling the pipe: a worker can also stop halfway through its answer.
        watchdog = threading.Timer(self.timeout, self._expire)
        watchdog.start()
        try:
            self.pipe.send(message)
            answer = self.pipe.recv()
        except (EOFError, OSError):
            answer = False, f"killed its decoder (exit code {self.stop()}); fetch it again or re-encode it"
        watchdog.cancel()
        watchdog.join()  # `expired` is final now, and no late kill can hit the next request
        if self.expired:
            self.stop()
            return False, f"hung its decoder for {self.timeout:g} s; re-encode it"
        return answer

    def _expire(self) -> None:
        self.expired = True
        self.process.kill()

    def stop(self) -> int:
        self.process.kill()  # does nothing to a process that is already gone
        return self.process.wait()


class Videos(AbstractContextManager):
    """Reads frames of many videos for many threads: killable workers behind a cache and a quarantine list."""

    def __init__(
        self,
        workers: int = 2,  # decoder processes, one CPU each, started when first needed
        timeout: float = 300.0,  # seconds for one request (64 frames of an hour in 4K take minutes); then its worker is killed
        cache_bytes: int = 2 << 30,  # budget for decoded frames and indexes
    ):
        if workers < 1:  # every request would wait forever
            raise ValueError(f"{workers=}: must be at least 1")
        self._timeout = timeout
        self._cache_bytes = cache_bytes
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()  # None: a worker that is not started
        for _ in range(workers):
            self._idle.put(None)
        self._lock = threading.Lock()  # guards everything below
        self._workers: set[_Worker] = set()
        self.closed = False
        self._cache: OrderedDict[tuple, Future] = OrderedDict()  # least recently used first; not done: being made
        self._cached_bytes = 0
        self._bad: dict[Identity, str] = {}  # the quarantine: file -> what is wrong with it

    def info(self, path: str | Path) -> VideoInfo:
        identity = self._identify(path)
        info = self._cached((identity,), lambda: VideoInfo(identity[0], *self._request(path, identity, "probe")))
        info.times.flags.writeable = False
        return info

    def frames(self, path: str | Path, indices: Iterable[int], size: tuple[int, int]) -> Clip:
        """Return the frames at these indices, in this order, scaled by the decoder to size = (width, height)."""
        indices = tuple(int(i) for i in indices)
        identity, info = self._identify(path), self.info(path)
        if not indices or min(indices) < 0 or max(indices) >= info.n_frames:
            raise ValueError(f"indices {indices} of {path}: must be some of 0..{info.n_frames - 1}")
        rows = info._table[list(indices)].tolist()
        pixels = self._cached((identity, indices, size), lambda: self._request(path, identity, "decode", rows, size))
        pixels.flags.writeable = False
        return Clip(pixels, tuple(info.times[list(indices)].tolist()))

    def overview(self, path: str | Path, k: int, size_rule: SizeRule) -> Clip:
        """Return k frames spread evenly over the video, or all of them if it has fewer."""
        info = self.info(path)
        return self.frames(path, uniform_indices(info.n_frames, k), size_rule(info.width, info.height))

    def window(
        self, path: str | Path, start: float, end: float, size_rule: SizeRule, fps: float, max_frames: int
    ) -> Clip:
        """Return frames of [start, end] seconds, see `window_indices`."""
        info = self.info(path)
        if start >= info.duration or end <= 0:
            raise VideoError(
                path,
                f"the window {start:g} ... {end:g} s lies outside the video, "
                f"which lasts from 0 to {info.duration:.1f} seconds",
            )
        indices = window_indices(info.times, start, end, fps, max_frames)
        return self.frames(path, indices, size_rule(info.width, info.height))

    def image(self, path: str | Path, size_rule: SizeRule) -> Clip:
        """Return an image as one frame. Its time is None."""
        self._identify(path)
        try:
            with Image.open(path, formats=IMAGE_FORMATS) as image:
                scaled = image.convert("RGB").resize(size_rule(*image.size), Image.Resampling.BICUBIC)
        except Exception as error:  # a damaged file raises whatever its decoder stumbles over
            raise VideoError(path, f"cannot be decoded ({type(error).__name__}: {error}); fetch it again") from None
        return Clip(np.array(scaled)[None], (None,))  # [1, H, W, 3]

    def close(self) -> None:
        with self._lock:
            self.closed = True
            for worker in self._workers:
                worker.stop()

    def __exit__(self, *_) -> None:
        self.close()

    def _identify(self, path: str | Path) -> Identity:
        try:
            status = os.stat(path)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            raise VideoError(path, f"cannot be opened ({error}); check the path") from None
        if not stat.S_ISREG(status.st_mode):  # opening a FIFO or a device can block forever
            raise VideoError(path, "is not a regular file; pass the path of a video or an image")
        identity = (os.path.realpath(path), status.st_size, status.st_mtime_ns)
        if identity in self._bad:
            raise VideoError(path, self._bad[identity])
        return identity

    def _cached(self, key: tuple, make: Callable[[], Cached]) -> Cached:
        """Return the value of `key`. Threads that ask for the same key share one call of `make`."""
        with self._lock:
            hit = key in self._cache
            future = self._cache.setdefault(key, Future())
            self._cache.move_to_end(key)
        if hit:
            return future.result()
        try:
            value = make()
        except BaseException as error:  # raised here and in the threads that wait for this value
            with self._lock:
                del self._cache[key]
            future.set_exception(error)
            raise
        with self._lock:
            future.set_result(value)
            self._cached_bytes += value.nbytes
            while self._cached_bytes > self._cache_bytes:
                oldest = next(key for key, future in self._cache.items() if future.done())
                self._cached_bytes -= self._cache.pop(oldest).result().nbytes
        return value

    def _request(self, path: str | Path, identity: Identity, verb: str, *arguments) -> Any:
        """Return what the verb returns in a worker."""
        worker = self._idle.get()  # blocks until one is free; the timeout does not include this wait
        try:
            worker = self._live_worker(worker)
            good, value = worker.request((verb, identity[0], *arguments))
        finally:
            self._idle.put(worker)
        if self.closed:  # close() killed the worker, so the file is not at fault
            raise VideoError(path, "Videos is closed: close it after its users are done")
        if not good:
            # A file that only fails to `decode` is damaged in one place, and can be good elsewhere.
            if verb == "probe" or worker.expired:
                self._bad[identity] = value
            raise VideoError(path, value)
        return value

    def _live_worker(self, worker: _Worker | None) -> _Worker:
        """Return the worker if it is alive. Otherwise start a new one in its place."""
        if worker and worker.process.poll() is None:
            return worker
        if worker:
            worker.pipe.close()
        with self._lock:  # close() must know every worker
            new = _Worker(self._timeout)
            self._workers.discard(worker)
            self._workers.add(new)
            if self.closed:
                new.stop()
        return new


if __name__ == "__main__":  # a worker, see _Worker
    _serve(int(sys.argv[1]), float(sys.argv[2]))
