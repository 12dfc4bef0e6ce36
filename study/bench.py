"""bench.py: every claim of speed as the ratio of two sides that do the same work, measured in one run.

    python -m study.bench                            # everything (under 25 minutes on two cores); on a GPU where there is one
    python -m study.bench update decode --write      # some of it, into results/bench.md
    python -m study.bench plan configs/paragrpo_8b.yaml pace.mfu=0.25    # computed: seconds per step by split of 8 GPUs

    with weights (bench_training.py)   update, update_8b, sft, engine, sync
    around them (here)                 dispatch, overhead, decode, startup

The sides take turns (A B A B ...). Before the clock runs, both have run once and their results were compared: gradient for
gradient, token for token, frame for frame. A difference ends the program.

Deliberately missing: other frameworks (each needs an environment of its own), the speed of SGLang itself.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import importlib.util
import inspect
import itertools
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, median

import av
import numpy as np

from data import Episode, parse_task
from evals.compare import markdown, put_between_marks
from rollout import RolloutConfig, SubagentConfig, open_engine, rollout
from runtime import config
from runtime.contract import Renderer, VisualContract, load_tokenizer
from runtime.engine import Engine, Sample
from runtime.video import Videos, uniform_indices, window_indices
from study import toy
from study.measure import CACHE, Row, take_turns, toy_folder, toy_items, versus

REPO = Path(__file__).resolve().parent.parent
RESULTS = REPO / "results" / "bench.md"


def benches() -> dict[str, Callable[..., Iterator[Row]]]:
    """By name, in the order of a run. Imported here: torch takes seconds, and `--help` has none to spend."""
    from study.bench_training import engine, sft, sync, update, update_8b

    run = (update, update_8b, sft, dispatch, overhead, decode, engine, sync, startup)
    return {bench.__name__: bench for bench in run}


# ------------------------------------------------------------------------------------------------ agents


class Scripted:
    """An engine whose main agent says what it is told to, in no time or in that of a report: the calls, then an answer.
    Reports take a fixed time, or are another engine's."""

    version = 0

    def __init__(self, renderer: Renderer, calls: int, turn: float, report: float | Engine):
        self.turn, self.report, self.calls = turn, report, [toy.call(2 * i, 2 * i + 16) for i in range(calls)]
        self.renderer, self.response = renderer, renderer.encode("<tool_response>")[0]
        self.expect = getattr(report, "expect", lambda change: None)

    def generate(self, ids, frames, *, stop=(), shared=0, **rest) -> Sample:
        main = len(frames[0]) == 64  # a crop has fewer frames
        if not main and not isinstance(self.report, float):
            return self.report.generate(ids, frames, stop=stop, shared=shared, **rest)
        calls = "".join(self.calls[ids[shared:].count(self.response) :])
        text = f"</think>{calls or '<answer>red</answer>'}<|im_end|>" if main else "No flash.<|im_end|>"
        said = self.renderer.encode(text)
        said = said[: min(i for i, token in enumerate(said) if token in stop) + 1]
        time.sleep(self.turn if main else self.report)
        return Sample(said, [-1.0] * len(said), "stop", 0)


def play(n: int, stage: dict, dispatch: str = "parallel") -> list[Episode]:
    """n whole episodes at once, in groups of up to 8."""
    tasks, reports = toy_items("rl", parse_task, math.ceil(n / 8)), SubagentConfig(max_new_tokens=16)
    cfg = RolloutConfig(dispatch=dispatch, max_turns=1, max_calls=8, concurrency=n, subagents=reports)
    groups = rollout(tasks, [64] * len(tasks), min(n, 8), **stage, cfg=cfg, progress=False)
    return [episode for group in groups for episode in group.episodes]


def dispatch(repeats: int = 5, most: int = 8, latency: float = 0.25) -> Iterator[Row]:
    """The calls of an episode: each in a turn of its own / all in one turn, in threads. Whole episodes on a toy video, 2
    decoders, no cache; the main agent speaks in no time. A report takes 0.25 s, or is 16 tokens of the toy's model on the
    CPU. Windows and reports equal."""
    renderer = Renderer(load_tokenizer(toy_folder() / "model"), toy.CONTRACT)
    model = open_engine(toy_folder() / "model", renderer)
    with Videos(workers=2, cache_bytes=0) as videos:
        for (what, report), n in itertools.product(((f"{latency} s", latency), ("the toy", model)), range(1, most + 1)):
            stage = {"engine": Scripted(renderer, n, 0.0, report), "renderer": renderer, "videos": videos}
            sides = [functools.partial(play, 1, stage, how) for how in ("sequential", "parallel")]
            one, other = [[(call.window, call.text, call.error) for call in side()[0].calls] for side in sides]
            assert one == other and len(one) == n and not any(error for *_, error in one), "calls differ"
            yield versus(f"calls: {n}, reports: {what}", *sides, repeats)
    model.close()


def overhead(numbers: Sequence[int] = (1, 16, 64, 256), latency: float = 2.0) -> Iterator[Row]:
    """Seconds of an episode in which it does not wait for its engine, by episodes at once. Two turns and two reports at
    once, 2 s each; K = 64 frames of 64 tokens, cached; waiting for Python's lock counts. Promised: 2 % of 30 s at 64. The
    CPU time is all of this process, prompts included."""
    renderer = Renderer(load_tokenizer(toy_folder() / "model"), VisualContract())
    with Videos(workers=2) as videos:
        stage = {"engine": Scripted(renderer, 2, latency, latency), "renderer": renderer, "videos": videos}
        for n in numbers:
            play(n, stage)  # fills the cache: decoding is no Python of ours
            began = time.process_time()
            episodes = play(n, stage)
            cpu = (time.process_time() - began) / n
            assert all([call.error for call in e.calls] == ["", ""] for e in episodes), "an episode failed"
            added = [episode.seconds - 3 * latency for episode in episodes]
            yield Row(f"{n} at once", (), added, f"mean {fmean(added) / 30:.2%} of 30 s; {cpu:.3f} s of CPU each")


# ------------------------------------------------------------------------------------------------ video

ENCODERS = {
    "H.264": ("libx264", {"preset": "veryfast", "x264-params": "scenecut=0"}),
    "AV1": ("libsvtav1", {"preset": "11", "crf": "45"}),
}
RATE, GOP, UNIT = 25, 125, 60  # frames per second, frames from keyframe to keyframe, seconds that are encoded


def video_file(codec: str, seconds: int) -> Path:
    """640x360. Only its first minute is encoded; a longer file repeats those packets."""
    path = CACHE / f"{codec}-{seconds}s.mp4"
    if path.exists():
        return path
    blocks = np.random.default_rng(0).integers(0, 256, (23, 40, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    image, unfinished = blocks.repeat(16, 0).repeat(16, 1)[:360], path.with_suffix(".tmp.mp4")
    with av.open(str(unfinished), "w") as out:
        stream = out.add_stream(ENCODERS[codec][0], rate=RATE, options=ENCODERS[codec][1])
        stream.width, stream.height, stream.pix_fmt, stream.codec_context.gop_size = 640, 360, "yuv420p", GOP
        packets = []
        for i in range(min(seconds, UNIT) * RATE):  # neighbours differ, so a wrong frame is seen
            frame = av.VideoFrame.from_ndarray(np.roll(image, (3 * i, 5 * i), (0, 1)), "rgb24")
            packets += stream.encode(frame)
        packets = [(packet, packet.pts, packet.dts, packet.time_base) for packet in [*packets, *stream.encode()]]
        for start, (packet, pts, dts, tick) in itertools.product(range(0, seconds, UNIT), packets):
            packet.pts, packet.dts, packet.time_base = pts + round(start / tick), dts + round(start / tick), tick
            out.mux(packet)
    unfinished.rename(path)
    return path


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


def decode(repeats: int = 3, lengths: Sequence[int] = (60, 600, 3600)) -> Iterator[Row]:
    """Other readers, one thread each / video.py, on files opened anew: 640x360, 25 frames/s, a keyframe every 5 s, a longer
    file the same minute again and again; scaled to 64 tokens. Equal frames (decord: but for its scaling)."""
    with Videos(workers=os.cpu_count() or 1, timeout=600) as videos:
        for codec, seconds in itertools.product(ENCODERS, lengths):
            if ENCODERS[codec][0] in av.codecs_available:
                yield from decode_file(videos, f"{codec}, {seconds} s", video_file(codec, seconds), repeats)
            else:
                yield Row(f"{codec}, {seconds} s: this PyAV has no encoder")


def decode_file(videos: Videos, name: str, path: Path, repeats: int) -> Iterator[Row]:
    info = videos.info(path)
    size = VisualContract().frame_size(info.width, info.height)

    def crop(start: float, length: float) -> list[int]:
        return window_indices(info.times, start, start + length, fps=1.0, min_frames=1, max_frames=16)

    def read(indices: Sequence[int]) -> np.ndarray:
        return videos.frames(path, indices, size).pixels

    def read_anew(each: Callable, *asked: Sequence[int]) -> list[np.ndarray]:
        os.utime(path)  # another mtime is another file: nothing is in the cache
        return list(each(read, asked))

    for what, indices in (("64", uniform_indices(info.n_frames, 64)), ("crop of 16", crop(0.4 * info.duration, 16))):
        ours = functools.partial(read_anew, map, indices)
        others = {"PyAV": functools.partial(read_with_pyav, path, info.times[indices], size)}
        if importlib.util.find_spec("decord"):
            others["decord"] = functools.partial(read_with_decord, path, indices, size)
        frames = ours()[0].astype(int)
        for reader, theirs in others.items():
            # decord scales with another filter; a neighbouring frame would differ ten times as much.
            most = {"PyAV": 0, "decord": 4}[reader]
            same = np.abs(frames - theirs()).mean() <= most
            assert same or reader == "decord", f"frames of video.py and {reader} differ"
            if same:
                yield versus(f"{name}: {what}, {reader}", theirs, ours, repeats)
            else:  # it gives up on some seeks, without an error
                yield Row(f"{name}: {what}, {reader} returned other frames")
        yield versus(f"{name}: {what}, decoded / cached", ours, functools.partial(read, indices), repeats)

    asked = [crop(info.duration * i / 32, 8) for i in range(16)]
    with ThreadPoolExecutor(16) as threads:
        alone, together = (functools.partial(read_anew, each, *asked) for each in (map, threads.map))
        assert all(map(np.array_equal, alone(), together())), "frames of one thread and of 16 differ"
        yield versus(f"{name}: 16 crops of 8, in one thread / in 16", alone, together, repeats)


# ------------------------------------------------------------------------------------------------ scripts, plan


def startup(repeats: int = 3, scripts: str = "*.py") -> Iterator[Row]:
    """Whole processes, their files in the page cache. Promised: 1 s for --help, 10 s for --dry-run."""
    folder = toy_folder()
    known = ("policy.checkpoint=Qwen/Qwen3-VL-8B-Instruct", "policy.family=''")  # there is no cold start to plan for
    dry_runs = {
        "sft.py": ("configs/sft_8b.yaml", f"data.sources=[{{path: {folder}/sft.parquet}}]"),
        "rl.py": ("configs/paragrpo_8b.yaml", f"data.sources=[{{path: {folder}/rl.parquet}}]", *known),
        "eval.py": ("configs/eval/toy.yaml", f"checkpoint={folder}/model", f"splits.toy={folder}"),
    }
    for script in sorted(REPO.glob(scripts)):
        commands = {"--help": (1, ())} if '__name__ == "__main__"' in script.read_text() else {}
        commands |= {"--dry-run": (10, dry_runs[script.name])} if script.name in dry_runs else {}
        for flag, (most, arguments) in commands.items():
            command = [sys.executable, script, *arguments, flag]
            run = functools.partial(subprocess.run, command, cwd=REPO, check=True, capture_output=True)
            (seconds,) = take_turns(repeats, run)
            yield Row(f"{script.name} {flag}", (), seconds, "too slow" * (median(seconds) > most))


def plan(gpus: int, path: str, overrides: Sequence[str]) -> str:
    """Computed, not measured: the splits of a node. Overrides of the config's keys, and pace.* of what is assumed."""
    from rl import RLConfig
    from runtime.plan import AIM, RELEASED, UNCOUNTED, Pace, best_split, plan_splits

    assumed = dict(o.removeprefix("pace.").partition("=")[::2] for o in overrides if o.startswith("pace."))
    pace = config.build(Pace, assumed, "pace.")
    cfg = config.load(RLConfig, path, [o for o in overrides if not o.startswith("pace.")])
    splits, episodes = plan_splits(cfg, gpus, pace), cfg.batch_tasks * cfg.group_size
    said = [f"{episodes} episodes a step on {gpus} GPUs of {cfg.gpu_gib:g} GiB; seconds per phase and per step."]
    rows = []
    for s in splits:
        numbers = (*dataclasses.astuple(s.step), s.step.seconds(0), s.step.seconds(1), s.training_gib, s.engine_gib)
        fits = "yes" if s.fits(cfg.gpu_gib) else "no"
        rows.append([f"{s.trainers} + {s.engines}", *(f"{x:.1f}" for x in numbers), fits])
    for staleness in (0, 1):
        best = best_split(splits, staleness, cfg.gpu_gib)
        took, released, aim = best.step.seconds(staleness), RELEASED * episodes / 56, AIM * episodes / 56
        said.append(
            f"Best at staleness {staleness}: {best.trainers} + {best.engines}, {took:.1f} s; the release's {RELEASED:.0f} s "
            f"for 56 episodes on 7 + 1 would be {released:.0f} s; the aim of {aim:.0f} s is {'met' if took <= aim else 'missed'}."
        )
    said += ["Assumed: " + ", ".join(f"{name} = {x:g}" for name, x in vars(pace).items()), f"Not counted: {UNCOUNTED}"]
    columns = ["train + rollout", "rollout", "training", "publish", "staleness 0", "staleness 1", "trainer, GiB", "engine, GiB", "fits"]  # fmt: skip
    return markdown("\n".join(said), columns, rows)


# ------------------------------------------------------------------------------------------------ the command


def sections(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """(title, text) of what was asked for."""
    import torch

    from runtime.plan import PlanError

    if args.names[:1] == ["plan"]:
        path, *overrides = args.names[1:] or ["CONFIG"]
        try:
            yield f"plan of {path}", plan(8 if args.gpus is None else args.gpus, path, overrides)
        except (config.ConfigError, PlanError) as error:
            sys.exit(f"error: {error}")
        return
    if args.gpus is not None:
        sys.exit(f"error: --gpus {args.gpus} is for `plan CONFIG`")
    known, where = benches(), torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    if unknown := set(args.names) - set(known):
        sys.exit(f"error: {', '.join(sorted(unknown))}: there is only {', '.join(known)}, and `plan CONFIG`")
    for name in args.names or known:
        rows = [row.cells() for row in known[name]()]
        yield f"{name}, {where}", markdown(inspect.getdoc(known[name]), ["what", "plain", "ours", "gain", ""], rows)


def made(seconds: float) -> str:
    """How long it took, the command, the commit, the machine and the versions."""
    import torch

    cpu = Path("/proc/cpuinfo").read_text().partition("model name")[2].partition("\n")[0].strip("\t :")
    machine = f"{cpu}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}"
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "av"))
    command = shlex.join(["python", *sys.argv])
    return f"{seconds:.0f} s: `{command}` at commit {config.git_commit()}; {machine}; {versions}."


def main() -> int:
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # of weights that are read in no time
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="benches (default: all), or: plan CONFIG [KEY=VALUE ...]"
    )
    parser.add_argument("--gpus", type=int, help="of the planned node (default: 8)")
    parser.add_argument("--write", action="store_true", help="also into results/bench.md")
    args, began = parser.parse_intermixed_args(), time.perf_counter()
    for title, text in sections(args):
        text, began = f"#### {title}\n\n{text}\n\n{made(time.perf_counter() - began)}", time.perf_counter()
        print(f"{text}\n", flush=True)
        if args.write:
            put_between_marks(RESULTS, title, "bench.py", text, "Measurements")
    return 0


if __name__ == "__main__":
    sys.exit(main())
