"""bench_agents.py: benches of what surrounds the models: tool calls, our own Python, video. (For `python bench.py`.)

    dispatch   the calls of a turn one after the other / in threads
    overhead   what our own Python adds to an episode, by the number of episodes at once
    decode     plain PyAV and decord / video.py, on 1 to 60 minutes of H.264 and AV1

Agents talk to an engine that says what it is told to, after a fixed time: all the rest of an episode is real.

Deliberately missing: a model that really answers, files over a network, variable frame rates.
"""

import functools
import importlib.util
import itertools
import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, median

import av
import numpy as np

import toy
from contract import Renderer, VisualContract, load_tokenizer
from dataset import parse_task
from engine import Sample
from measure import Section, cached, ratio, require, side_by_side, take_turns, toy_folder, toy_items
from rollout import RolloutConfig, Stage, opening, rollout, run_episode
from video import Videos, uniform_indices, window_indices

# ------------------------------------------------------------------------------------------------ agents


class Paced:
    """An engine that knows what to say, and how long saying it takes: the calls, then an answer; reports."""

    version = 0

    def __init__(self, renderer: Renderer, calls: int, report_seconds: float, turn_seconds: float = 0.0):
        self.calls = [renderer.encode(toy.call(2 * i, 2 * i + 16)) for i in range(calls)]
        self.close, self.answer = renderer.encode("</think>"), renderer.encode("</think><answer>red</answer><|im_end|>")
        self.report, self.response = renderer.encode("No flash.<|im_end|>"), renderer.encode("<tool_response>")[0]
        self.seconds = {False: report_seconds, True: turn_seconds}

    def generate(self, ids, frames, *, stop=(), shared=0, **_) -> Sample:
        main = len(frames[0]) == 64  # a crop has fewer frames
        said = self.report
        if main:
            rest = self.calls[ids[shared:].count(self.response) :]
            said = [*self.close, *itertools.chain(*rest), self.answer[-1]] if rest else self.answer
            said = said[: min(i for i, token in enumerate(said) if token in stop) + 1]
        time.sleep(self.seconds[main])
        return Sample(list(said), [-1.0] * len(said), "stop", 0)

    def expect(self, change: int) -> None: ...


def agents(dispatch: str = "parallel", concurrency: int = 1) -> RolloutConfig:
    return RolloutConfig(dispatch=dispatch, max_turns=1, max_calls=8, concurrency=concurrency)


def dispatch(quick: bool) -> Section:
    latency, rows = 0.02 if quick else 0.5, []
    renderer = Renderer(load_tokenizer(toy_folder() / "model"), VisualContract())
    task = toy_items("rl", parse_task, 1)[0]
    with Videos(workers=2, cache_bytes=0) as videos:  # no cache: every call decodes its window
        for n in (1, 3) if quick else range(1, 9):
            engine = Paced(renderer, n, latency)
            stages = [Stage(engine, renderer, videos, agents(how)) for how in ("sequential", "parallel")]
            sides = [functools.partial(run_episode, stage, task, 64, opening(task, 64, stage), 0) for stage in stages]
            one, other = [[(call.window, call.text, call.error) for call in side().calls] for side in sides]
            require(one == other and len(one) == n and not any(error for *_, error in one), "calls")
            a, b = take_turns(1 if quick else 5, *sides)
            rows.append({"calls": str(n)} | side_by_side({"one after the other, s": a, "in threads, s": b}))
    return Section(
        f"Whole episodes on a toy video; a report takes {latency} s, turns of the main agent none; 2 decoders, no "
        "cache; windows and reports equal",
        rows,
    )


def overhead(quick: bool) -> Section:
    latency, rows = 0.05 if quick else 2.0, []
    renderer = Renderer(load_tokenizer(toy_folder() / "model"), VisualContract())
    engine = Paced(renderer, 2, latency, latency)
    with Videos(workers=2) as videos:
        around = {"engine": engine, "renderer": renderer, "videos": videos, "progress": False}
        for n in (1, 4) if quick else (1, 16, 64, 256):
            tasks = toy_items("rl", parse_task, max(1, n // 8))
            run = functools.partial(rollout, tasks, [64] * len(tasks), min(n, 8), cfg=agents(concurrency=n), **around)
            run()  # fills the cache: decoding is no Python of ours
            began = time.process_time()
            episodes = [episode for group in run() for episode in group.episodes]
            cpu = (time.process_time() - began) / n
            flawless = [len(e.calls) == 2 and not e.error and not any(call.error for call in e.calls) for e in episodes]
            require(all(flawless) and len(episodes) == n, "episodes")
            added = fmean(episode.seconds for episode in episodes) - 3 * latency  # calls, reports, answer
            row = {"episodes at once": str(n), "CPU s per episode": cpu, "s outside the engine": added}
            rows.append(row | {"share of 30 s": added / 30})
    return Section(
        f"Two turns and two reports of {latency} s each; K = 64 frames of 64 tokens; frames cached; waiting for "
        "Python's lock counts, and the CPU time is all of this process, prompts included; promised: 2 % at 64",
        rows,
    )


# ------------------------------------------------------------------------------------------------ video

ENCODERS = {
    "H.264": [("libx264", {"preset": "veryfast", "x264-params": "scenecut=0"})],
    "AV1": [("libsvtav1", {"preset": "12", "crf": "45"}), ("libaom-av1", {"cpu-used": "8", "crf": "45"})],
}
RATE, GOP = 25, 250  # frames per second, frames from keyframe to keyframe


def video_file(codec: str, seconds: int, unit: int) -> Path | None:
    """640x360; `unit` seconds are encoded, longer files repeat their packets. None: this PyAV has no encoder."""
    path = cached(f"{codec}-{seconds}s.mp4")
    unfinished = path.with_suffix(".tmp.mp4")
    usable = [(name, options) for name, options in ENCODERS[codec] if name in av.codecs_available]
    if path.exists() or not usable:
        return path if path.exists() else None
    with av.open(str(unfinished), "w") as out:
        if seconds == unit:
            encode(out, seconds, *usable[0])
        else:
            repeat(out, video_file(codec, unit, unit), unit, seconds // unit)
    unfinished.rename(path)
    return path


def encode(out, seconds: int, encoder: str, options: dict[str, str]) -> None:
    stream = out.add_stream(encoder, rate=RATE, options=options)
    stream.width, stream.height, stream.pix_fmt, stream.codec_context.gop_size = 640, 360, "yuv420p", GOP
    blocks = np.random.default_rng(0).integers(0, 256, (23, 40, 3), dtype=np.uint8)
    image = blocks.repeat(16, 0).repeat(16, 1)[:360]
    for i in range(seconds * RATE):  # neighbours differ, so a wrong frame is seen
        out.mux(stream.encode(av.VideoFrame.from_ndarray(np.roll(image, (3 * i, 5 * i), (0, 1)), "rgb24")))
    out.mux(stream.encode())


def repeat(out, path: Path, unit: int, times: int) -> None:
    """The packets of a file of `unit` seconds, again and again."""
    with av.open(str(path)) as source:
        theirs = source.streams.video[0]
        stream = out.add_stream_from_template(theirs, opaque=True)
        packets = [(packet, packet.pts, packet.dts) for packet in source.demux(theirs) if packet.dts is not None]
        length = round(unit / theirs.time_base)
        for n in range(times):
            for packet, pts, dts in packets:
                packet.stream, packet.pts, packet.dts = stream, pts + n * length, dts + n * length
                out.mux(packet)


def read_with_pyav(path: Path, times: Sequence[float], size: tuple[int, int]) -> np.ndarray:
    """Seek to the keyframe and decode on; a new seek only where the next frame lies beyond the next keyframe."""
    found, last = [], -math.inf
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        for seconds in times:
            stamp = (stream.start_time or 0) + round(seconds / stream.time_base)
            if seconds - last > GOP / RATE:
                earlier = stamp - round(0.2 / stream.time_base)  # B-frames: a little before
                container.seek(max(0, earlier), stream=stream)
                frames = container.decode(stream)
            image = next(frame for frame in frames if frame.pts >= stamp)
            found.append(image.to_ndarray(format="rgb24", width=size[0], height=size[1], interpolation="BICUBIC"))
            last = seconds
    return np.stack(found)


def read_with_decord(path: Path, indices: Sequence[int], size: tuple[int, int]) -> np.ndarray:
    import decord

    reader = decord.VideoReader(str(path), width=size[0], height=size[1], num_threads=1)
    return reader.get_batch(indices).asnumpy()


def decode(quick: bool) -> Section:
    lengths, repeats, rows = [20] if quick else [60, 600, 3600], 1 if quick else 3, []
    missing = [codec for codec in ENCODERS if video_file(codec, lengths[0], lengths[0]) is None]
    with Videos(workers=os.cpu_count() or 1, timeout=600) as videos:
        for codec, seconds in itertools.product([codec for codec in ENCODERS if codec not in missing], lengths):
            found = decode_file(videos, video_file(codec, seconds, lengths[0]), seconds, repeats)
            rows += [{"file": f"{codec}, {seconds} s"} | row for row in found]
    said = (
        f"640x360, {RATE} frames/s, a keyframe every {GOP}, scaled to 64 tokens; files opened anew; each reader with "
        "one thread; equal frames (decord: but for its scaling)"
    )
    return Section(said + "".join(f"; {codec}: this PyAV has no encoder" for codec in missing), rows)


def decode_file(videos: Videos, path: Path, seconds: int, repeats: int) -> list[dict]:
    info, rows = videos.info(path), []
    size, middle = VisualContract().frame_size(info.width, info.height), 0.4 * seconds
    crop = functools.partial(window_indices, info.times, fps=1.0, min_frames=1, max_frames=16)

    def read(indices: Sequence[int]) -> np.ndarray:
        return videos.frames(path, indices, size).pixels

    def read_anew(each, asked: Sequence[Sequence[int]]) -> list[np.ndarray]:
        os.utime(path)  # another mtime is another file: nothing is in the cache
        return list(each(read, asked))

    chosen = {"overview of 64": uniform_indices(info.n_frames, 64), "crop of 16": crop(middle, middle + 16)}
    for what, indices in chosen.items():
        ours = functools.partial(read_anew, map, [indices])
        sides = [ours, functools.partial(read_with_pyav, path, info.times[indices], size)]
        frames = [ours()[0], sides[1]()]
        require(np.array_equal(*frames), "frames of video.py and PyAV")
        if importlib.util.find_spec("decord"):
            sides.append(functools.partial(read_with_decord, path, indices, size))
            # decord scales with another filter; a neighbouring frame would differ ten times as much.
            require(np.abs(frames[0].astype(int) - sides[2]()).mean() < 4, "frames of video.py and decord")
        a, b, *c = take_turns(repeats, *sides)
        (hit,) = take_turns(9, functools.partial(read, indices))
        row = {"frames": what, "video.py, s": median(a), "PyAV / video.py": ratio(b, a)}
        row |= {"decord / video.py": ratio(c[0], a) if c else "not installed"}
        rows.append(row | {"from the cache, s": median(hit)})

    asked = [crop(seconds * i / 32, seconds * i / 32 + 8) for i in range(16)]
    with ThreadPoolExecutor(16) as threads:
        alone, together = (functools.partial(read_anew, each, asked) for each in (map, threads.map))
        require(all(map(np.array_equal, alone(), together())), "frames of one thread and of 16")
        a, b = take_turns(repeats, alone, together)
    return [*rows, {"frames": "16 crops of 8 s", "video.py, s": median(b), "one thread / 16": ratio(a, b)}]
