"""bench.py: every claim of speed as the ratio of two sides that do the same work, measured in one run.

    python -m study.bench                            # everything (under 20 minutes on two cores); on a GPU where there is one
    python -m study.bench update decode --write      # some of it, into results/bench.md
    python -m study.bench gpu --write                # the notes of `make test-gpu`, into results/gpu.md

    update, sft            plain transformers on padded rows / ours, packed
    dispatch, overhead     calls one per turn / all at once; what our Python adds to an episode
    decode                 PyAV / video.py
    engine                 transformers' generate / inprocess.py
    images                 frames to a server as PNGs / as files in memory

The sides take turns (A B A B ...). Before the clock runs, both have run once and their results were compared: gradient for
gradient, token for token, frame for frame. A difference ends the program. A gain is the median over pairs of neighbours,
since what else the machine does hits neighbours alike.

Deliberately missing: other frameworks, the speed of SGLang itself, several GPUs, the optimizer's step.
"""

import argparse
import ctypes
import functools
import importlib.metadata
import inspect
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import av
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from data import Episode, parse_task
from evals.tables import markdown, put_between_marks
from grpo import GRPOConfig, token_losses
from rollout import RolloutConfig, SubagentConfig, derive, open_engine, rollout, run_all
from runtime import config
from runtime.contract import Bundle, Renderer, VisualContract, load_tokenizer, patchify
from runtime.dataset import Rows
from runtime.distributed import device
from runtime.engine import Engine, Sample
from runtime.inprocess import InProcess
from runtime.packing import best_fit
from runtime.policy import Policy, PolicyConfig, load, recompute
from runtime.servers import SGLang
from runtime.video import Frames, Videos, uniform_indices, window_indices
from study import toy

REPO = Path(__file__).resolve().parent.parent
RESULTS = REPO / "results" / "bench.md"
GPU_NOTES = REPO / "runs" / "gpu.jsonl"
CACHE = REPO / "runs" / "bench"  # what is made once
Plain = Qwen3VLForConditionalGeneration
Parts = list[list[Bundle]]  # micro-batches
# A text model that a CPU trains in seconds; the toy's other sizes stay.
SMALL = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 8}

# ------------------------------------------------------------------------------------------------ measuring


@dataclass(frozen=True)
class Timing:
    """One line of a bench's table."""

    what: str
    plain: Sequence[float] = ()  # one value per repeat: seconds, unless `what` names another unit; (): no other side
    ours: Sequence[float] = ()
    note: str = ""

    @property
    def gains(self) -> list[float]:
        return [plain / ours for plain, ours in zip(self.plain, self.ours)]

    def cells(self) -> list[str]:
        """Return what, plain, ours, gain, note; of several repeats the medians, and the range of the gain."""
        plain = f"{median(self.plain):.3g}" if self.plain else ""
        ours = f"{median(self.ours):.3g}" if self.ours else ""
        gain = f"{median(self.gains):.3g}x" if self.gains else ""
        if len(self.gains) > 1:
            gain += f" ({min(self.gains):.3g} - {max(self.gains):.3g})"
        return [self.what, plain, ours, gain, self.note]


def versus(what: str, plain: Callable, ours: Callable, repeats: int, note: str = "") -> Timing:
    """Time both sides, run A B A B ..."""
    seconds = {plain: [], ours: []}
    for _ in range(repeats):
        for side, found in seconds.items():
            began = time.perf_counter()
            side()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            found.append(time.perf_counter() - began)
    return Timing(what, seconds[plain], seconds[ours], note)


def peak(work: Callable[[], object]) -> float:
    """Return the GiB, of the GPU or of this process (Linux), that the work needs beyond what is there before."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.max_memory_allocated()
        work()
        return (torch.cuda.max_memory_allocated() - before) / 2**30
    status = Path("/proc/self/status")
    ctypes.CDLL(None).malloc_trim(0)  # memory that was used and freed before would hide some
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark is what is there now
    before = int(status.read_text().partition("VmHWM:")[2].split()[0])  # KiB
    work()
    return (int(status.read_text().partition("VmHWM:")[2].split()[0]) - before) / 2**20


# ------------------------------------------------------------------------------------------------ what is measured on


def toy_folder() -> Path:
    """Build once: 60 videos, rows that ask about them, a small model, the tokenizer of all models here."""
    folder, unfinished = CACHE / "toy", CACHE / "toy.tmp"
    if not folder.exists():
        rows = {"perception": 100, "direct": 20, "sft": 300, "sft_val": 10, "rl": 64, "val": 8, "test": 8}
        toy.build_toy(unfinished, sizes={"train": 60} | rows)
        unfinished.rename(folder)
    return folder


def checkpoint(name: str, contract: VisualContract, seed: int = 0, **sizes) -> Path:
    """Write random weights of the real class, with all that stands beside them."""
    toy.write_checkpoint(CACHE / name, load_tokenizer(toy_folder() / "model"), contract, seed, **sizes)
    return CACHE / name


def draw_group(c: Qwen3VLConfig, frames: int, side: int, suffixes: Sequence[int]) -> Bundle:
    """Draw random tokens: a prompt that shows square frames of `side` pixels, and rollouts of so many tokens."""
    rng = np.random.default_rng(0)
    marks = [c.image_token_id, c.video_token_id, c.vision_start_token_id, c.vision_end_token_id]
    words = np.setdiff1d(np.arange(2, c.text_config.vocab_size), marks)
    image = [c.vision_start_token_id, *[c.image_token_id] * (side // 32) ** 2, c.vision_end_token_id]
    prompt = []
    for _ in range(frames):
        prompt += [*rng.choice(words, 5).tolist(), *image]
    prompt += rng.choice(words, 60).tolist()
    said = [rng.choice(words, length).tolist() for length in suffixes]
    clip = Frames(rng.integers(0, 256, (frames, side, side, 3), dtype=np.uint8), (0.0,) * frames)
    return Bundle(prompt, said, [[1] * len(ids) for ids in said], [clip])


def rows_of(group: Bundle) -> list[Bundle]:
    """Return the rollouts of a group, each with a prompt of its own."""
    given = [0] * len(group.prompt)
    return [Bundle([], [group.prompt + ids], [given + [1] * len(ids)], group.frames) for ids in group.suffixes]


# ------------------------------------------------------------------------------------------------ training


@dataclass(frozen=True)
class Side:
    """What learns, and from what: plain transformers from rows, or our policy from bundles."""

    model: Plain | Policy
    parts: Parts
    reference: Plain | Policy | None = None

    def backward(self) -> None:
        """Leave the gradient of a step in the model."""
        total = sum(sum(map(sum, bundle.masks)) for part in self.parts for bundle in part)
        self.model.zero_grad()
        for part in self.parts:
            # Ours sees the frames once for all passes.
            features = self.model.encode(part) if isinstance(self.model, Policy) else None
            ref_logprobs = None
            if self.reference:
                with torch.no_grad():
                    ref_logprobs = score(self.reference, part, features)
            logprobs = score(self.model, part, features)
            old_logprobs = logprobs.detach()  # of the first update: pi_prox's and the engine's
            # Some advantage per token, the same on both sides. (With 1 for all, this is the gradient of SFT.)
            advantages = old_logprobs.cos()
            losses, _ = token_losses(logprobs, old_logprobs, old_logprobs, ref_logprobs, advantages, GRPOConfig())
            (losses.sum() / total).backward()

    def gradient(self) -> Tensor:
        """Return the gradient of all weights that train, as one vector."""
        return torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None])


def load_both(folder: Path) -> tuple[Plain, Policy]:
    """Load plain transformers and our policy: the same weights, frozen vision tower and recomputation."""
    # Not with train=True: on a GPU that means fp32 master weights in FSDP2, which the plain side has not.
    policy = load(PolicyConfig(str(folder), dtype="fp32"), train=False)
    plain = Plain.from_pretrained(folder, dtype=policy.dtype, attn_implementation="sdpa").to(device())
    for model in (plain, policy.model):
        model.requires_grad_(True).model.visual.requires_grad_(False)
        for block in model.model.language_model.layers:
            block.forward = functools.partial(recompute, block.forward)
    return plain, policy


def score(model: Plain | Policy, part: list[Bundle], features) -> Tensor:
    if isinstance(model, Policy):
        return model(part, features=features).logprobs
    return plain_logprobs(model, part)


def plain_logprobs(model: Plain, rows: Sequence[Bundle]) -> Tensor:
    """Return `policy(rows).logprobs` by plain transformers on right-padded rows; as in ours, logits at the targets only."""
    ids, real, target = torch.zeros(3, len(rows), max(map(len, rows)), dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row.suffixes[0])
        real[i, : len(row)] = 1
        target[i, : len(row)] = torch.tensor(row.masks[0])
    ids, real, target = ids.to(device()), real.to(device()), target[:, 1:].bool().to(device())
    seen = plain_inputs(model, ids, [clip for row in rows for clip in row.frames])
    hidden = model.model(**seen, attention_mask=real, use_cache=False).last_hidden_state[:, :-1][target]  # [N, H]
    return -F.cross_entropy(model.lm_head(hidden).float(), ids[:, 1:][target], reduction="none")


def plain_inputs(model: Plain, ids: Tensor, clips: list[Frames]) -> dict[str, Tensor]:
    pixels, grid = (x.to(device()) for x in patchify(clips))
    types = (ids == model.config.image_token_id).int()
    return {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": types}


def compare_training(what: str, plain: Side, ours: Side, repeats: int) -> Timing:
    """Time both sides once their gradients are equal; beside the gain, its ceiling."""
    for side in (plain, ours):
        side.backward()
    difference = (ours.gradient() - plain.gradient()).norm() / plain.gradient().norm()
    assert difference < 1e-4, f"gradients differ by {difference:.2g}"
    padded = sum(len(part) * max(map(len, part)) for part in plain.parts)
    tokens = sum(len(bundle) for part in ours.parts for bundle in part)
    note = f"{padded} and {tokens} tokens: {padded / tokens:.3g}x"
    return versus(what, plain.backward, ours.backward, repeats, note)


def update(repeats: int = 3, frames: int = 64, side: int = 256, suffixes=range(200, 601, 57)) -> Iterator[Timing]:
    """An RL update, reference pass included: one trajectory after the other / the group as one sequence, its prompt once.
    64 frames x 64 tokens, G = 8, suffixes of 200 to 600 tokens; 2 layers, hidden 256, fp32,
    frozen vision tower, blocks recomputed in the backward pass; gradients equal to 1e-4."""
    plain, policy = load_both(checkpoint("update0", VisualContract(), 0, **SMALL))
    plain_reference, reference = load_both(checkpoint("update1", VisualContract(), 1, **SMALL))
    reference.model.model.visual = policy.vision  # frozen: the policy's and the reference's are the same
    plain_reference.model.visual = plain.model.visual
    group = draw_group(policy.model.config, frames, side, suffixes)
    rows = rows_of(group)
    one_by_one = Side(plain, [[row] for row in rows], plain_reference)
    at_once = Side(plain, [rows], plain_reference)
    ours = Side(policy, [[group]], reference)
    yield compare_training("the update", one_by_one, ours, repeats)

    # Memory: the packed group against its rows one by one, and against all of them in one micro-batch.
    gib = []
    for side in (one_by_one, ours, at_once):
        plain.zero_grad()  # gradients count
        policy.zero_grad()
        gib.append([peak(side.backward)])
    yield Timing("GiB beyond the weights, plain one by one", gib[0], gib[1])
    yield Timing(f"GiB beyond the weights, plain {len(rows)} at a time", gib[2], gib[1])


def sft(repeats=3, count=16, most=8192, frames=(4, 8, 16, 32, 64), side=256) -> Iterator[Timing]:
    """Rows padded to the longest of their micro-batch, in the order of the data / packed without padding; micro-batches
    of as many tokens, padding included; gradients equal to 1e-4. Rows of 4 to 64 frames x 64 tokens with 100 to 800
    target tokens in the model of `update`."""
    plain, policy = load_both(checkpoint("sft", VisualContract(), **SMALL))
    rng, rows = np.random.default_rng(0), []
    for _ in range(count):
        rows += rows_of(draw_group(plain.config, int(rng.choice(frames)), side, [int(rng.integers(100, 801))]))
    padded = [[]]
    for row in rows:
        longest = max(map(len, [*padded[-1], row]))
        if longest * (len(padded[-1]) + 1) > most:
            padded.append([])
        padded[-1].append(row)
    packed = [[rows[i] for i in members] for members in best_fit([len(row) for row in rows], most)]
    yield compare_training(f"{count} rows", Side(plain, padded), Side(policy, packed), repeats)


# ------------------------------------------------------------------------------------------------ agents


class Scripted:
    """An engine whose main agent makes its calls and then answers; a turn takes turn(seed) seconds. Reports take a fixed
    time, or are another engine's."""

    version = 0

    def __init__(self, renderer: Renderer, calls: int, turn: Callable[[int], float], report: float | Engine):
        self.turn, self.report = turn, report
        self.encode = functools.cache(renderer.encode)  # an engine has its tokens at hand
        self.calls = [toy.call(2 * i, 2 * i + 16) for i in range(calls)]
        self.response = renderer.encode("<tool_response>")[0]

    def expect(self, change: int) -> None:
        if not isinstance(self.report, float):
            self.report.expect(change)

    def generate(self, ids, frames, *, seed, stop=(), shared=0, **rest) -> Sample:
        main_agent = len(frames[0]) == 64  # a crop has fewer frames
        if main_agent:
            answered = ids[shared:].count(self.response)
            said = "".join(self.calls[answered:]) or "<answer>red</answer>"
            said, seconds = f"</think>{said}<|im_end|>", self.turn(seed)
        elif isinstance(self.report, float):
            said, seconds = "No flash.<|im_end|>", self.report
        else:
            return self.report.generate(ids, frames, seed=seed, stop=stop, shared=shared, **rest)
        tokens = self.encode(said)
        end = min(i for i, token in enumerate(tokens) if token in stop)
        time.sleep(seconds)
        return Sample(tokens[: end + 1], [-1.0] * (end + 1), "stop", 0)


def play(n: int, stage: dict, dispatch: str = "parallel") -> list[Episode]:
    """Play n whole episodes at once, in groups of up to 8."""
    rows = Rows(toy_folder() / "rl.parquet")
    tasks = [parse_task(rows[i], f"row {i}", toy_folder()) for i in range(math.ceil(n / 8))]
    reports = SubagentConfig(max_new_tokens=16)
    cfg = RolloutConfig(dispatch=dispatch, max_turns=1, max_calls=8, concurrency=n, subagents=reports)
    groups = rollout(tasks, [64] * len(tasks), min(n, 8), **stage, cfg=cfg, progress=False)
    return [episode for group in groups for episode in group.episodes]


def dispatch(repeats: int = 5, calls: int = 8, latency: float = 0.25) -> Iterator[Timing]:
    """The calls of an episode: each in a turn of its own / all in one turn, in threads. Whole episodes on a toy video, 2
    decoders, no cache; the main agent speaks in no time. A report takes 0.25 s, or is 16 tokens of the toy's model on the
    CPU. Windows and reports equal."""
    renderer = Renderer(load_tokenizer(toy_folder() / "model"), toy.CONTRACT)
    model = open_engine(toy_folder() / "model", renderer)
    with Videos(workers=2, cache_bytes=0) as videos:
        for what, report in ((f"{latency} s", latency), ("the toy", model)):
            engine = Scripted(renderer, calls, lambda seed: 0.0, report)
            stage = {"engine": engine, "renderer": renderer, "videos": videos}
            sides = [functools.partial(play, 1, stage, how) for how in ("sequential", "parallel")]
            one, other = ([(call.window, call.text, call.error) for call in side()[0].calls] for side in sides)
            assert one == other and len(one) == calls and not any(error for *_, error in one), "calls differ"
            yield versus(f"calls: {calls}, reports: {what}", *sides, repeats)
    model.close()


def overhead(counts: Sequence[int] = (64, 256), latency: float = 10.0) -> Iterator[Timing]:
    """What our Python adds to an episode of some 30 s, by episodes at once. A turn takes 5 to 15 s, then two reports at once
    10 s, and a turn; K = 64 frames of 64 tokens, cached. Promised: 1 % at 256. (SGLang's client counts as engine.)
    CPU: of this process, all threads, per episode: Python runs one thread at a time, so where n episodes are ready at the
    same moment, the last one waits n times as long. added: seconds in which an episode does not wait for its engine, but
    works, or waits for Python's lock or a core; another program on the machine lengthens it."""
    renderer = Renderer(load_tokenizer(toy_folder() / "model"), VisualContract())

    def turn(seed: int) -> float:
        return latency * random.Random(seed).uniform(0.5, 1.5)

    with Videos(workers=2) as videos:
        for n in counts:
            stage = {"renderer": renderer, "videos": videos}
            # Fill the cache: decoding is no Python of ours.
            play(n, stage | {"engine": Scripted(renderer, 2, lambda seed: 0.0, 0.0)})
            began = time.process_time()
            episodes = play(n, stage | {"engine": Scripted(renderer, 2, turn, latency)})
            cpu = (time.process_time() - began) / n
            assert all([call.error for call in e.calls] == ["", ""] for e in episodes), "an episode failed"
            # The seeds of its turns are those of rollout.run_episode.
            added = [e.seconds - latency - turn(derive(e.seed, 0)) - turn(derive(e.seed, 1)) for e in episodes]
            yield Timing(f"{n} at once, CPU: ms", (), [1000 * cpu], f"n times: {n * cpu:.2g} s")
            yield Timing(
                f"{n} at once, added: s", (), added, f"mean {fmean(added):.2g} s, {fmean(added) / 30:.2%} of 30 s"
            )


# ------------------------------------------------------------------------------------------------ video

RATE, GOP, UNIT = 25, 125, 60  # frames per second, frames from keyframe to keyframe, seconds that are encoded


def video_file(seconds: int) -> Path:
    """Write 640x360 frames once. Only the first minute is encoded; a longer file repeats those packets."""
    path = CACHE / f"H.264-{seconds}s.mp4"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    blocks = np.random.default_rng(0).integers(0, 256, (23, 40, 3), dtype=np.uint8)
    image, unfinished = blocks.repeat(16, 0).repeat(16, 1)[:360], path.with_suffix(".tmp.mp4")
    with av.open(str(unfinished), "w") as out:
        options = {"preset": "veryfast", "x264-params": "scenecut=0"}
        stream = out.add_stream("libx264", rate=RATE, options=options)
        stream.width, stream.height, stream.pix_fmt, stream.codec_context.gop_size = 640, 360, "yuv420p", GOP
        packets = []
        for i in range(min(seconds, UNIT) * RATE):  # neighbours differ, so a wrong frame is seen
            frame = av.VideoFrame.from_ndarray(np.roll(image, (3 * i, 5 * i), (0, 1)), "rgb24")
            packets += stream.encode(frame)
        packets += stream.encode()
        packets = [(packet, packet.pts, packet.dts, packet.time_base) for packet in packets]
        for start in range(0, seconds, UNIT):
            for packet, pts, dts, tick in packets:
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


def decode(repeats: int = 3, seconds: int = 3600) -> Iterator[Timing]:
    """PyAV, seeking well, one thread / video.py, on an H.264 file opened anew: 640x360, 25 frames/s, a keyframe every 5 s,
    the same minute again and again; scaled to 64 tokens. Equal frames."""
    path = video_file(seconds)
    with Videos(workers=os.cpu_count() or 1, timeout=600) as videos:
        info = videos.info(path)
        size = VisualContract().frame_size(info.width, info.height)
        start = 0.4 * info.duration
        crop = window_indices(info.times, start, start + 16, fps=1.0, max_frames=16)
        for what, indices in (("64", uniform_indices(info.n_frames, 64)), ("crop of 16", crop)):

            def ours(indices=indices) -> np.ndarray:
                os.utime(path)  # another mtime is another file: nothing is in the cache
                return videos.frames(path, indices, size).pixels

            theirs = functools.partial(read_with_pyav, path, info.times[indices], size)
            assert (ours() == theirs()).all(), "frames of video.py and PyAV differ"
            yield versus(f"H.264, {seconds} s: {what}", theirs, ours, repeats)


# ------------------------------------------------------------------------------------------------ engine, weights


def engine(repeats: int = 3, count: int = 64, most: int = 32) -> Iterator[Timing]:
    """64 requests at once: transformers' generate, one after the other / inprocess.py. The toy's sizes, prompts of 4 to
    64 frames x 4 tokens, up to 32 new tokens, fp32; greedy tokens equal."""
    contract, rng = VisualContract(frame_pixels=64 * 64), np.random.default_rng(0)
    folder = checkpoint("engine", contract, initializer_range=0.1)  # greedy text of large random weights varies
    renderer = Renderer(load_tokenizer(folder), contract)
    plain = Plain.from_pretrained(folder, dtype=torch.float32).to(device())
    ours = InProcess(folder, renderer, device=str(device()))
    greedy = {"max_new_tokens": most, "do_sample": False, "bad_words_ids": [[t] for t in renderer.never_sampled]}

    def alone(requests: list) -> list[list[int]]:
        found = []
        for ids, clip, _ in requests:
            row = torch.tensor([ids], device=device())
            out = plain.generate(**plain_inputs(plain, row, [clip]), attention_mask=torch.ones_like(row), **greedy)
            found.append(out[0, len(ids) :].tolist())
        return found

    def together(requests: list) -> list[list[int]]:
        ask, found = functools.partial(ours.generate, max_new_tokens=most, temperature=0.0, seed=0), {}
        jobs = [functools.partial(ask, ids, [clip], shared=shared) for ids, clip, shared in requests]
        run_all(ours, jobs, len(jobs), found.__setitem__)
        return [found[i].ids for i in range(len(jobs))]

    for prompts in (count, count // 8):
        requests = []
        for i in range(prompts):
            k = int(rng.choice([4, 8, 16, 32, 64]))
            clip = Frames(rng.integers(0, 256, (k, 64, 64, 3), dtype=np.uint8), tuple(map(float, range(k))))
            messages = [{"role": "user", "content": [clip, f"What happens?{' Say it.' * i}"]}]
            prompt = renderer.render(messages, generate=True).ids
            requests += [(prompt + renderer.encode(f"Idea {j}: "), clip, len(prompt)) for j in range(count // prompts)]
        said = alone(requests)
        assert said == together(requests), "greedy tokens differ"
        what = f"{prompts} prompts, each {count // prompts} times, {sum(map(len, said))} tokens"
        yield versus(what, functools.partial(alone, requests), functools.partial(together, requests), repeats)
    ours.close()


# ------------------------------------------------------------------------------------------------ frames to servers


class Unasked(SGLang):
    """A client that makes requests of servers that are never asked."""

    def _supervise(self, server) -> None:
        server.healthy = True

    def request(self, clip: Frames) -> str:
        return json.dumps({"image_data": self._shown(clip)})


def images(repeats: int = 5, frames: int = 64, side: int = 256) -> Iterator[Timing]:
    """Write the part of a request to SGLang that shows a clip. plain: PNGs, as over a network; ours: files in memory."""
    far, near = (Unasked("", None, urls=(url,)) for url in ("http://node:1", "http://127.0.0.1:1"))
    walk = np.cumsum(np.random.default_rng(0).normal(0, 6, (frames, side, side, 3)), axis=2)  # smooth, as pictures are
    pixels = np.clip(128 + walk, 0, 255).astype(np.uint8)

    def new() -> Frames:
        return Frames(pixels.copy(), tuple(map(float, range(frames))))

    known = new()
    bytes_sent = [len(client.request(known)) for client in (far, near)]
    yield versus("the first of a clip", lambda: far.request(new()), lambda: near.request(new()), repeats)
    yield versus("its siblings and later turns", lambda: far.request(known), lambda: near.request(known), repeats)
    yield Timing("bytes of a request", bytes_sent[:1], bytes_sent[1:])
    far.close()
    near.close()


# ------------------------------------------------------------------------------------------------ the command

BENCHES = {bench.__name__: bench for bench in (update, sft, dispatch, overhead, decode, engine, images)}


def made() -> str:
    """Name the command, the commit, the machine and the versions."""
    cpu = Path("/proc/cpuinfo").read_text().partition("model name")[2].partition("\n")[0].strip("\t :")
    machine = f"{cpu}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}"
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "av"))
    command = " ".join(["python", "-m", "study.bench", *sys.argv[1:]])
    return f"`{command}` at commit {config.git_commit()}; {machine}; {versions}."


def gpu_table() -> str:
    """Return what `make test-gpu` has noted: of each part its newest figures."""
    if not GPU_NOTES.exists():
        sys.exit(f"error: there is no {GPU_NOTES}; `make test-gpu` leaves it where there is a GPU")
    newest = {}
    for line in GPU_NOTES.read_text(encoding="utf-8").splitlines():
        figures = json.loads(line)
        part, where = figures.pop("part"), figures.pop("device")
        variant = figures.pop("kernel", figures.pop("frames", ""))  # some parts have several
        shown = ", ".join(f"{name} {value}" for name, value in figures.items())
        newest[part, variant] = [f"{part} {variant}".strip(), where, shown]
    return markdown("#### make test-gpu", ["part", "device", "figures"], list(newest.values()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(BENCHES)} (default: all of them), or gpu")
    parser.add_argument("--write", action="store_true", help="also into results/bench.md")
    args = parser.parse_args()
    if args.names == ["gpu"]:
        text = f"{gpu_table()}\n\n{made()}"
        print(text)
        if args.write:
            put_between_marks(RESULTS.with_name("gpu.md"), "gpu", "bench.py", text, "On a GPU")
        return 0
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    torch.backends.cudnn.allow_tf32 = False  # the plain side's convolution would differ from our matrix product
    for name in args.names or BENCHES:
        title, began = f"{name}, {where}", time.perf_counter()
        rows = [row.cells() for row in BENCHES[name]()]
        table = markdown(inspect.getdoc(BENCHES[name]), ["what", "plain", "ours", "gain", ""], rows)
        text = f"#### {title}\n\n{table}\n\n{time.perf_counter() - began:.0f} s: {made()}"
        print(f"{text}\n", flush=True)
        if args.write:
            put_between_marks(RESULTS, title, "bench.py", text, "Measurements")
    return 0


if __name__ == "__main__":
    sys.exit(main())
