"""Video and image files -> frames with true timestamps, without ever hanging or killing the run.

    with Videos(workers=4) as videos:
        frames = videos.window("v.mp4", 12.5, 20.0, size_rule, fps=1.0, max_frames=16)

Datasets hold files that hang or crash a decoder inside C code, out of reach of any exception. So FFmpeg and Pillow run only
in worker processes that can be killed and replaced: a bad file costs its own question a VideoError. A file that cannot be
opened, or takes its decoder down with it, is quarantined: this process never asks for it again.

Two verbs cross the pipe for videos. `probe` reads the packets, without decoding them, into an index: the presentation time
of each frame, and the keyframe to decode it from. `decode` seeks to that keyframe and decodes until the wanted times come
out. Frames are matched by presentation time, never by counting, which edit lists and open GOPs shift. Images have two more:
`measure` reads the header, `image` decodes and scales.

Deliberately missing: audio, GPU decoding, URLs, subtitles, the choice of a frame's size (the caller's `size_rule`).
"""

import math
import multiprocessing
import os
import queue
import signal
import stat
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

SizeRule = Callable[[int, int], tuple[int, int]]  # (width, height) of the video -> (width, height) of its frames
Identity = tuple[str, int, int, str]  # (real path, bytes, mtime in ns, kind): a replaced file is another file


class VideoError(Exception):
    """A file that cannot give the frames asked for."""

    def __init__(self, path: str | Path, reason: str, transient: bool = False):
        super().__init__(f"{path}: {reason}")
        self.reason = reason
        self.transient = transient  # the machine may be the cause: it was slow, or short of memory


@dataclass(frozen=True, eq=False)
class VideoInfo:
    path: str  # of the file itself, where it was asked for by a link
    width: int  # pixels as displayed: after the rotation and the pixel aspect ratio that the file asks for
    height: int
    times: np.ndarray  # [N] float64 seconds, read-only, strictly increasing, the first frame is at 0
    duration: float  # seconds, the end of the last frame (from the packets: headers lie)
    # [N, 3] int64 ticks, the reader's own: when the frame is shown, when its keyframe is shown, and when that is decoded
    _table: np.ndarray | None = field(default=None, repr=False)

    @property
    def n_frames(self) -> int:
        return len(self.times)

    @property
    def nbytes(self) -> int:
        return self.times.nbytes + self._table.nbytes


@dataclass(frozen=True, eq=False)
class Frames:
    pixels: np.ndarray  # [n, H, W, 3] uint8 RGB, read-only: the cache hands the same array to everyone
    times: tuple[float, ...]  # [n] seconds of the decoded frames

    def __len__(self) -> int:
        return len(self.pixels)


# ---- which frames: pure functions ----------------------------------------------------------------------------------


def uniform_indices(n_frames: int, k: int) -> list[int]:
    """Return min(k, n_frames) distinct indices, evenly spread, both ends included."""
    return np.linspace(0, n_frames - 1, min(k, n_frames)).round().astype(int).tolist()


def window_indices(times, start: float, end: float, fps: float, max_frames: int) -> list[int]:
    """Return clamp(round((end - start) * fps), 1, max_frames) of the frames whose time lies in [start, end] seconds.

    Never more than the window holds; the one frame nearest to its middle if it holds none.
    """
    first = int(np.searchsorted(times, start, "left"))
    m = int(np.searchsorted(times, end, "right")) - first
    if m == 0:
        return [int(np.abs(np.asarray(times) - (start + end) / 2).argmin())]
    n = min(max(round((end - start) * fps), 1), max_frames, m)
    return [first + (2 * j + 1) * m // (2 * n) for j in range(n)]  # midpoints of n equal bins of the m candidates


# ---- the worker process: the only place that runs FFmpeg -----------------------------------------------------------


def _open(path: str):
    import av

    container = av.open(path, options={"protocol_whitelist": "file"})  # a playlist must not reach the network
    stream = container.streams.best("video")
    if stream is None:
        raise ValueError("it has no video stream")
    stream.codec_context.thread_count = 1  # the pool is the parallelism, and frame threads would delay skip_frame
    return container, stream


def _stamp(packet) -> int | None:
    return packet.dts if packet.pts is None else packet.pts  # AVI stores no presentation times


def _probe(path: str) -> tuple:
    """Walk over the packets once, and return the fields of VideoInfo but the path."""
    image = cut_off = None  # the first picture; the stamp of the last packet if it is incomplete
    before = latest = None  # the last two keyframes, each as (pts, dts)
    packets: dict[int, tuple] = {}  # stamp -> (duration, pts of its keyframe, dts of its keyframe), in ticks
    container, stream = _open(path)
    with container:
        for packet in container.demux(stream):
            if image is None:  # one frame is decoded: it alone knows the rotation
                pictures = packet.decode()
                if pictures:
                    image = pictures[0]
            stamp = _stamp(packet)
            if stamp is None:
                continue
            if packet.is_keyframe:
                before, latest = latest, (stamp, stamp if packet.dts is None else packet.dts)
            # A frame decodes from the last keyframe before it. A leading picture of an open GOP is shown before that
            # keyframe and refers further back: to the keyframe before.
            key = latest
            if latest is not None and stamp < latest[0]:
                key = before
            # Frames that an edit list hides, or that precede the first keyframe, never leave the decoder: no index.
            if key is not None and not packet.is_discard:
                packets.setdefault(stamp, (packet.duration or 0, *key))
            cut_off = stamp if packet.is_corrupt else None
        tick, aspect = stream.time_base, stream.sample_aspect_ratio or 1
    packets.pop(cut_off, None)  # the file ends in the middle of its last packet
    if image is None or not packets:
        raise ValueError("it has no frame that can be decoded and is shown")
    stamps = sorted(packets)  # [N] in presentation order
    last = packets[stamps[-1]][0] or np.median(np.diff(stamps, prepend=stamps[0]))
    width, height = round(image.width * aspect), image.height
    if width < 1:
        raise ValueError(f"its pixel aspect ratio, {aspect}, leaves no width")
    if image.rotation % 180:
        width, height = height, width
    table = np.array([(stamp, *packets[stamp][1:]) for stamp in stamps])  # [N, 3]
    ticks = np.array([*stamps, stamps[-1] + int(last)]) - stamps[0]
    seconds = ticks * tick.numerator / tick.denominator  # [N + 1]
    return width, height, seconds[:-1], float(seconds[-1]), table


def _decode(path: str, rows: list[list[int]], size: tuple[int, int]) -> np.ndarray:
    """Decode the frames of these rows of the index, in their order."""
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
    if lost:  # a container that seeks badly: one plain pass from the start
        container, stream = _open(path)
        with container:
            pictures |= _decode_from(container, stream, None, lost, size)
    lost -= pictures.keys()
    if lost:
        raise ValueError(f"{len(lost)} of {len(rows)} frames are announced but cannot be decoded")
    return np.stack([pictures[row[0]] for row in rows])  # [n, H, W, 3]


def _decode_from(container, stream, key: int | None, wanted: set[int], size: tuple[int, int]) -> dict[int, np.ndarray]:
    """Decode from the keyframe shown at `key` (None: the next one) until the wanted stamps have come out."""
    from av.video.reformatter import VideoReformatter

    scaler = VideoReformatter()  # one for all: to set it up takes longer than to scale a small frame
    pictures: dict[int, np.ndarray] = {}  # stamp -> [H, W, 3]
    delayed = stream.codec_context.name == "libdav1d"
    begun = latest = None  # stamps: of the keyframe at which decoding began, of the last picture
    for packet in container.demux(stream):
        stamp = _stamp(packet)
        if begun is None:
            if not packet.is_keyframe or stamp is None or key not in (None, stamp):
                continue
            begun = latest = stamp
        # A frame that no other frame refers to is decoded only if wanted. Saves up to half, changes no bit of the rest.
        # Not with dav1d: it applies the flag to frames that it still holds back, and would drop wanted ones.
        skippable = not delayed and key is not None and stamp is not None and stamp not in wanted
        stream.codec_context.skip_frame = "NONREF" if skippable else "DEFAULT"
        # Nothing behind a packet that is cut off can be trusted: what the decoder holds back comes out, and no more.
        ended = packet.is_corrupt
        for image in stream.codec_context.decode(None if ended else packet):
            if image.pts is None or image.pts < begun:
                continue  # a leading picture, broken when decoding begins here
            if image.pts < latest:  # FFmpeg's guesses for a container that stores none: H.264 with B-frames in AVI
                raise ValueError("its stamps contradict the order of its pictures")
            latest = image.pts
            if image.is_corrupt:  # FFmpeg invents what it cannot read, and later frames build on that
                raise ValueError(f"the frame at {image.time:.2f} s (clock of the file) is damaged")
            if image.pts in wanted:
                turns = image.rotation // 90 % 4  # counter-clockwise
                width, height = size[::-1] if turns % 2 else size
                image = scaler.reformat(image, width, height, "rgb24", interpolation="BICUBIC")
                pictures[image.pts] = np.rot90(image.to_ndarray(), turns)
        if ended or len(pictures) == len(wanted):
            break
    return pictures


IMAGE_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")  # of Pillow's others, EPS starts Ghostscript
# A phone's picture has up to 108 million pixels, an A3 page at 600 dpi 70 million, a frame in 8K 33 million.
MAX_IMAGE_PIXELS = 120_000_000  # 360 MB once decoded


def _measure(path: str) -> tuple[int, int]:
    """Return an image's (width, height), which its header says; refuse one that is too large to decode."""
    from PIL import Image

    with Image.open(path, formats=IMAGE_FORMATS) as image:
        width, height = image.size
    if width * height > MAX_IMAGE_PIXELS:
        raise ValueError(f"{width} x {height} pixels, more than {MAX_IMAGE_PIXELS:,} in all: make it smaller")
    return width, height


def _image(path: str, size: tuple[int, int]) -> np.ndarray:
    """Decode an image and scale it."""
    from PIL import Image

    with Image.open(path, formats=IMAGE_FORMATS) as image:
        return np.array(image.convert("RGB").resize(size, Image.Resampling.BICUBIC))  # [H, W, 3]


def _serve(fd: int, timeout: float) -> None:
    """Answer (verb, *arguments) with (True, value) or (False, reason) until the parent is gone: a worker's life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    import av  # noqa: F401 (before "ready": a missing decoder is our error, not that of the first video)

    pipe, verbs = Connection(fd), {"probe": _probe, "decode": _decode, "measure": _measure, "image": _image}
    try:
        pipe.send("ready")
        while True:
            verb, *arguments = pipe.recv()
            signal.alarm(math.ceil(timeout) + 1)  # ends a worker that hangs in C code after its parent has died
            try:
                answer = True, verbs[verb](*arguments)
            except Exception as error:  # the process boundary: whatever decoding raises is the parent's VideoError
                answer = False, f"cannot be decoded ({type(error).__name__}: {error}); fetch it again or re-encode it"
            pipe.send(answer)
            signal.alarm(0)
    except (EOFError, OSError):
        pass  # the parent closed the pipe or died


# ---- the parent: workers, cache, quarantine ------------------------------------------------------------------------

START_LIMIT = 300.0  # seconds in which a worker must have imported its decoder, be it from a cold network disk


class _Worker:
    """A decoder process. Not multiprocessing's spawn, which would import the parent's heavy __main__ once more."""

    def __init__(self, timeout: float):
        self.timeout, self.expired = timeout, False
        self.pipe, theirs = multiprocessing.Pipe()
        with theirs:
            command = [sys.executable, os.path.abspath(__file__), str(theirs.fileno()), str(timeout)]
            null = subprocess.DEVNULL
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=null, stdout=null)
        try:
            ready = self.pipe.poll(START_LIMIT) and self.pipe.recv()
        except (EOFError, OSError):  # it died
            ready = False
        if not ready:
            reason = f"died at its start, or took {START_LIMIT:g} s ({self.stop()})"
            raise RuntimeError(f"a video worker {reason}: does `import av` work?")

    def ask(self, request: tuple) -> tuple[bool, object]:
        """Return (True, value) or (False, what is wrong with the file), within the timeout whatever the worker does."""
        # A timer that kills also covers a worker that stops halfway through its answer; polling the pipe would not.
        watchdog = threading.Timer(self.timeout, self._expire)
        watchdog.start()
        try:
            self.pipe.send(request)
            answer = self.pipe.recv()
        except (EOFError, OSError):
            answer = False, f"killed its decoder ({self.stop()}); fetch it again or re-encode it"
        watchdog.cancel()
        watchdog.join()  # `expired` is settled now, and no late kill can hit the next request
        if self.expired:
            self.stop()
            return False, f"hung its decoder for {self.timeout:g} s; re-encode it"
        return answer

    def _expire(self) -> None:
        self.expired = True
        self.process.kill()

    def stop(self) -> str:
        self.process.kill()  # does nothing to a process that is already gone
        return f"exit code {self.process.wait()}"


class Videos(AbstractContextManager):
    """Frames of many videos for many threads at once: killable workers behind a cache and a quarantine list."""

    def __init__(
        self,
        workers: int = 2,  # decoder processes, one CPU each, started when first needed
        timeout: float = 300.0,  # seconds for one request (64 frames of an hour in 4K take minutes); then its worker is killed
        cache_bytes: int = 2 << 30,  # budget for decoded frames and indexes
    ):
        if workers < 1:  # nobody would ever answer
            raise ValueError(f"{workers=}: must be at least 1")
        self._timeout, self._cache_bytes = timeout, cache_bytes
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()  # None: a place without a process
        for _ in range(workers):
            self._idle.put(None)
        self._lock = threading.Lock()  # guards everything below
        self._workers: set[_Worker] = set()
        self._closed = False
        self._cache: OrderedDict[tuple, Future] = OrderedDict()  # oldest use first; not done: somebody decodes it
        self._cached_bytes = 0
        self._bad: dict[Identity, tuple[str, bool]] = {}  # file -> what is wrong with it, and whether that is transient
        # path -> why no overview of it can be shown, for callers that count such files; not where the machine may be the cause
        self.unreadable: dict[str, str] = {}

    def info(self, path: str | Path) -> VideoInfo:
        with self._record_unreadable(path):
            identity = self._identify(path)
            info = self._cached((identity,), lambda: VideoInfo(identity[0], *self._ask(path, identity, "probe")))
        info.times.flags.writeable = False
        return info

    def frames(self, path: str | Path, indices: Iterable[int], size: tuple[int, int]) -> Frames:
        """Return the frames at these indices, in this order, scaled by the decoder to size = (width, height)."""
        indices = tuple(int(i) for i in indices)
        identity, info = self._identify(path), self.info(path)
        if not indices or min(indices) < 0 or max(indices) >= info.n_frames:
            raise ValueError(f"indices {indices} of {path}: must be some of 0..{info.n_frames - 1}")
        rows = info._table[list(indices)].tolist()
        pixels = self._cached((identity, indices, size), lambda: self._ask(path, identity, "decode", rows, size))
        pixels.flags.writeable = False
        return Frames(pixels, tuple(info.times[list(indices)].tolist()))

    def overview(self, path: str | Path, k: int, size_rule: SizeRule) -> Frames:
        """Return k frames spread evenly over the video, or all of them if it has fewer."""
        info = self.info(path)
        with self._record_unreadable(path):
            return self.frames(path, uniform_indices(info.n_frames, k), size_rule(info.width, info.height))

    def window(
        self, path: str | Path, start: float, end: float, size_rule: SizeRule, fps: float, max_frames: int
    ) -> Frames:
        """Return frames of [start, end] seconds, see `window_indices`."""
        info = self.info(path)
        if start >= info.duration or end <= 0:
            told = f"the window {start:g} ... {end:g} s lies outside the video"
            raise VideoError(path, f"{told}, which lasts from 0 to {info.duration:.1f} seconds")
        indices = window_indices(info.times, start, end, fps, max_frames)
        return self.frames(path, indices, size_rule(info.width, info.height))

    def image(self, path: str | Path, size_rule: SizeRule) -> Frames:
        """Return an image as one frame; it has no time."""
        identity = self._identify(path, "image")
        size = size_rule(*self._ask(path, identity, "measure"))
        pixels = self._ask(path, identity, "image", size)
        return Frames(pixels[None], (None,))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for worker in self._workers:
                worker.stop()

    def __exit__(self, *_) -> None:
        self.close()

    @contextmanager
    def _record_unreadable(self, path: str | Path) -> Iterator[None]:
        """Record the reason in `unreadable` if the code inside finds that the file cannot be read."""
        try:
            yield
        except VideoError as error:
            if not error.transient:
                self.unreadable[str(path)] = error.reason
            raise

    def _identify(self, path: str | Path, kind: str = "video") -> Identity:
        try:
            status = os.stat(path)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            raise VideoError(path, f"cannot be opened ({error}); check the path") from None
        if not stat.S_ISREG(status.st_mode):  # opening a FIFO or a device may block for ever
            raise VideoError(path, "is not a regular file; pass the path of a video or an image")
        identity = (os.path.realpath(path), status.st_size, status.st_mtime_ns, kind)  # no image, it may be a video
        if identity in self._bad:
            raise VideoError(path, *self._bad[identity])
        return identity

    def _cached(self, key: tuple, make: Callable) -> VideoInfo | np.ndarray:
        """Return the value of `key`. Threads that want the same thing share one `make`."""
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

    def _ask(self, path: str | Path, identity: Identity, verb: str, *arguments) -> tuple | np.ndarray:
        worker = self._idle.get()  # blocks until one is free; waiting is not decoding
        try:
            for _ in range(2):  # one that dies may have been killed from outside (for memory): it gets a second try
                worker = self._live_worker(worker)
                good, value = worker.ask((verb, identity[0], *arguments))
                dead = worker.process.returncode is not None
                if not dead or worker.expired or self._closed:
                    break
        finally:
            self._idle.put(worker)
        if self._closed:  # close() killed the worker: no fault of the file
            raise VideoError(path, "Videos is closed: close it after its users are done", transient=True)
        if not good:
            # Killed from outside, a worker says nothing about the file. If it answered while decoding, the file is
            # damaged in one place, and elsewhere good.
            outside = worker.process.returncode in (-signal.SIGKILL, -signal.SIGTERM) and not worker.expired
            if not outside and (dead or verb != "decode"):
                self._bad[identity] = value, worker.expired
            raise VideoError(path, value, outside or worker.expired)
        return value

    def _live_worker(self, worker: _Worker | None) -> _Worker:
        """Return the worker if it is alive, else start a new one in its place."""
        if worker and worker.process.poll() is None:
            return worker
        if worker:
            worker.pipe.close()
        try:  # outside the lock, which nobody shall hold for so long
            new = _Worker(self._timeout)
        except RuntimeError:  # killed while it started, for memory: a second one may live
            new = _Worker(self._timeout)
        with self._lock:  # close() must know every worker
            self._workers.discard(worker)
            self._workers.add(new)
            if self._closed:
                new.stop()
        return new


if __name__ == "__main__":  # a worker, see _Worker
    _serve(int(sys.argv[1]), float(sys.argv[2]))
