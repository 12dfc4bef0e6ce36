"""bench.py: the claims of speed, each as two sides that do the same work, measured in one run.

    python -m study.bench                            # everything (a quarter of an hour on two cores); on a GPU where there is one
    python -m study.bench update decode --write      # some of it, appended to results/bench.md

The sides take turns (A B A B ...). Before the clock runs, both have run once and their results were compared: gradient for
gradient, token for token, frame for frame. A difference ends the program. A gain is the median over pairs of neighbours,
since what else the machine does hits neighbours alike.

Deliberately missing: memory, other frameworks, the speed of SGLang itself, several GPUs, the optimizer's step.
"""

import argparse
import functools
import inspect
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, median

import av
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from data import Episode, Task
from evals.tables import markdown
from grpo import GRPOConfig, token_losses
from rollout import RolloutConfig, SubagentConfig, derive, rollout, run_all
from runtime.config import git_commit
from runtime.distributed import device
from runtime.engine import Sample
from runtime.inprocess import InProcess
from runtime.policy import PolicyConfig, load, recompute
from runtime.render import Bundle, Renderer, load_tokenizer
from runtime.video import Frames, Videos, uniform_indices
from runtime.visual import VisualContract, patchify
from study import toy

REPO = Path(__file__).resolve().parent.parent
CACHE = REPO / "runs" / "bench"  # what is made once
Plain = Qwen3VLForConditionalGeneration
# A text model that a CPU trains in seconds; the toy's other sizes stay.
SMALL = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 8}


def versus(what: str, plain: Callable, ours: Callable, repeats: int) -> list[str]:
    """Time both sides, run A B A B ... Return a row: what, the medians in seconds, the gain and its range."""
    seconds = {plain: [], ours: []}
    for _ in range(repeats):
        for side, found in seconds.items():
            began = time.perf_counter()
            side()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            found.append(time.perf_counter() - began)
    gains = [one / other for one, other in zip(seconds[plain], seconds[ours])]
    medians = [f"{median(found):.3g}" for found in seconds.values()]
    return [what, *medians, f"{median(gains):.3g}x ({min(gains):.3g} - {max(gains):.3g})"]


# ------------------------------------------------------------------------------------------------ what is measured on


def toy_folder() -> Path:
    """Build a small toy once: videos, and the tokenizer of all models here."""
    folder, unfinished = CACHE / "toy", CACHE / "toy.tmp"
    if not folder.exists():
        toy.build_toy(unfinished, sizes=dict.fromkeys(toy.SIZES, 64))
        unfinished.rename(folder)
    return folder


def checkpoint(name: str, contract: VisualContract, seed: int = 0, **sizes) -> Path:
    """Write random weights of the real class, with all that stands beside them."""
    toy.write_checkpoint(CACHE / name, load_tokenizer(toy_folder() / "model"), contract, seed, **sizes)
    return CACHE / name


def plain_inputs(model: Plain, ids: Tensor, clips: list[Frames]) -> dict[str, Tensor]:
    pixels, grid = (x.to(device()) for x in patchify(clips))
    types = (ids == model.config.image_token_id).int()
    return {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": types}


def draw_group(c: Qwen3VLConfig, frames: int, side: int, suffixes: Sequence[int], seed: int = 0) -> Bundle:
    """Draw random tokens: a prompt that shows square frames of `side` pixels, and rollouts of so many tokens."""
    rng = np.random.default_rng(seed)
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


# ------------------------------------------------------------------------------------------------ training


def plain_logprobs(model: Plain, group: Bundle, suffix: list[int]) -> Tensor:
    """Return the log-probs [S] of one rollout by plain transformers; as in ours, logits of the suffix only."""
    ids, start = torch.tensor([group.prompt + suffix], device=device()), len(group.prompt)  # [1, P + S]
    hidden = model.model(**plain_inputs(model, ids, group.frames), use_cache=False).last_hidden_state  # [1, P + S, H]
    logits = model.lm_head(hidden[0, start - 1 : -1]).float()  # [S, V]
    return -F.cross_entropy(logits, ids[0, start:], reduction="none")


def backward(logprobs: Tensor, ref_logprobs: Tensor, total: int) -> None:
    """Add the gradient of the first update of a batch of `total` tokens, whose advantages are some function of the token."""
    old_logprobs = logprobs.detach()  # pi_prox's and the engine's
    losses, _ = token_losses(logprobs, old_logprobs, old_logprobs, ref_logprobs, old_logprobs.cos(), GRPOConfig())
    (losses.sum() / total).backward()


def gradient(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def update(repeats: int = 3, frames: int = 64, side: int = 256, suffixes=range(200, 601, 57)) -> Iterator[list[str]]:
    """An RL update, reference pass included: one trajectory after the other / the group as one sequence, its prompt once.
    64 frames x 64 tokens, G = 8, suffixes of 200 to 600 tokens; 2 layers, hidden 256, fp32,
    frozen vision tower, blocks recomputed in the backward pass; the reference has the policy's weights, as in the first step.
    Gradients equal to 1e-4."""
    folder = checkpoint("update", VisualContract(), **SMALL)
    # Not with train=True: on a GPU that means fp32 master weights in FSDP2, which the plain side has not.
    policy = load(PolicyConfig(str(folder), dtype="fp32"), train=False)
    plain = Plain.from_pretrained(folder, dtype=policy.dtype, attn_implementation="sdpa").to(device())
    for model in (plain, policy.model):
        model.requires_grad_(True).model.visual.requires_grad_(False)
        for block in model.model.language_model.layers:
            block.forward = functools.partial(recompute, block.forward)
    group = draw_group(policy.model.config, frames, side, suffixes)
    total = sum(map(len, group.suffixes))

    def one_by_one() -> None:
        plain.zero_grad()
        for suffix in group.suffixes:
            with torch.no_grad():
                ref_logprobs = plain_logprobs(plain, group, suffix)
            backward(plain_logprobs(plain, group, suffix), ref_logprobs, total)

    def packed() -> None:
        policy.zero_grad()
        features = policy.encode([group])  # the frames are seen once for both passes
        with torch.no_grad():
            ref_logprobs = policy([group], features=features).logprobs
        backward(policy([group], features=features).logprobs, ref_logprobs, total)

    one_by_one()
    packed()
    difference = (gradient(policy) - gradient(plain)).norm() / gradient(plain).norm()
    assert difference < 1e-4, f"gradients differ by {difference:.2g}"
    yield versus("the update", one_by_one, packed, repeats)


# ------------------------------------------------------------------------------------------------ agents


class Scripted:
    """An engine whose main agent makes its calls and then answers; a turn takes turn(seed) seconds, a report `report`."""

    version = 0

    def __init__(self, renderer: Renderer, calls: int, turn: Callable[[int], float], report: float):
        self.turn, self.report = turn, report
        self.encode = functools.cache(renderer.encode)  # an engine has its tokens at hand
        self.calls = [toy.call(2 * i, 2 * i + 16) for i in range(calls)]
        self.response = renderer.encode("<tool_response>")[0]

    def expect(self, change: int) -> None: ...

    def generate(self, ids, frames, *, seed, stop=(), shared=0, **rest) -> Sample:
        said, seconds = "No flash.<|im_end|>", self.report
        if len(frames[0]) == 64:  # the main agent: a crop has fewer frames
            answered = ids[shared:].count(self.response)
            said = "".join(self.calls[answered:]) or "<answer>red</answer>"
            said, seconds = f"</think>{said}<|im_end|>", self.turn(seed)
        tokens = self.encode(said)
        end = min(i for i, token in enumerate(tokens) if token in stop)
        time.sleep(seconds)
        return Sample(tokens[: end + 1], [-1.0] * (end + 1), "stop", 0)


def play(n: int, engine: Scripted, renderer: Renderer, videos: Videos, dispatch: str = "parallel") -> list[Episode]:
    """Play n whole episodes at once, in groups of up to 8."""
    files = sorted((toy_folder() / "videos").glob("rl*.mp4"))[: math.ceil(n / 8)]
    tasks = [Task(file.stem, "Which color flashes?", (str(file),), "oe", "red") for file in files]
    reports = SubagentConfig(max_new_tokens=16)
    cfg = RolloutConfig(dispatch=dispatch, max_turns=1, max_calls=8, concurrency=n, subagents=reports)
    stage = {"engine": engine, "renderer": renderer, "videos": videos, "cfg": cfg}
    groups = rollout(tasks, [64] * len(tasks), min(n, 8), **stage, progress=False)
    return [episode for group in groups for episode in group.episodes]


def dispatch(repeats: int = 5, calls: int = 8, latency: float = 0.25) -> Iterator[list[str]]:
    """The calls of an episode: each in a turn of its own / all in one turn, in threads. Whole episodes on a toy video, 2
    decoders, no cache; the main agent speaks in no time, a report takes 0.25 s. Windows and reports equal."""
    renderer = Renderer(load_tokenizer(toy_folder() / "model"), toy.CONTRACT)
    engine = Scripted(renderer, calls, lambda seed: 0.0, latency)
    with Videos(workers=2, cache_bytes=0) as videos:
        sides = [functools.partial(play, 1, engine, renderer, videos, how) for how in ("sequential", "parallel")]
        one, other = ([(call.window, call.text, call.error) for call in side()[0].calls] for side in sides)
        assert one == other and len(one) == calls and not any(error for *_, error in one), "calls differ"
        yield versus(f"calls: {calls}, reports: {latency} s", *sides, repeats)


def overhead(counts: Sequence[int] = (64, 256), latency: float = 10.0) -> Iterator[list[str]]:
    """What our Python adds to an episode of some 30 s, by episodes at once. A turn takes 5 to 15 s, then two reports at once
    10 s, and a turn; K = 64 frames of 64 tokens, cached. (SGLang's client counts as engine.) CPU: of this process, all
    threads, per episode. added: seconds in which an episode does not wait for its engine, but works, or waits for Python's
    lock or a core; another program on the machine lengthens it."""
    renderer = Renderer(load_tokenizer(toy_folder() / "model"), VisualContract())

    def turn(seed: int) -> float:
        return latency * random.Random(seed).uniform(0.5, 1.5)

    with Videos(workers=2) as videos:
        for n in counts:
            # Fill the cache: decoding is no Python of ours.
            play(n, Scripted(renderer, 2, lambda seed: 0.0, 0.0), renderer, videos)
            began = time.process_time()
            episodes = play(n, Scripted(renderer, 2, turn, latency), renderer, videos)
            cpu = (time.process_time() - began) / n
            assert all([call.error for call in e.calls] == ["", ""] for e in episodes), "an episode failed"
            # The seeds of its turns are those of rollout.run_episode.
            added = fmean(e.seconds - latency - turn(derive(e.seed, 0)) - turn(derive(e.seed, 1)) for e in episodes)
            yield [f"{n} at once", "", f"{added:.2g}", f"{added / (3 * latency):.2%} of an episode; {cpu:.2g} s of CPU"]


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
    """Seek to the keyframe before each frame, and decode on."""
    found = []
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        for seconds in times:
            stamp = (stream.start_time or 0) + round(seconds / stream.time_base)
            earlier = stamp - round(0.2 / stream.time_base)  # B-frames: a little before
            container.seek(max(0, earlier), stream=stream)
            image = next(frame for frame in container.decode(stream) if frame.pts >= stamp)
            found.append(image.to_ndarray(format="rgb24", width=size[0], height=size[1], interpolation="BICUBIC"))
    return np.stack(found)


def decode(repeats: int = 3, seconds: int = 3600) -> Iterator[list[str]]:
    """PyAV, a seek per frame, one thread / video.py, on an H.264 file opened anew: 640x360, 25 frames/s, a keyframe every
    5 s, the same minute again and again; 64 frames scaled to 64 tokens. Equal frames."""
    path = video_file(seconds)
    with Videos(workers=os.cpu_count() or 1, timeout=600) as videos:
        info = videos.info(path)
        size, indices = VisualContract().frame_size(info.width, info.height), uniform_indices(info.n_frames, 64)

        def ours() -> np.ndarray:
            os.utime(path)  # another mtime is another file: nothing is in the cache
            return videos.frames(path, indices, size).pixels

        theirs = functools.partial(read_with_pyav, path, info.times[indices], size)
        assert (ours() == theirs()).all(), "frames of video.py and PyAV differ"
        yield versus(f"64 frames of {seconds} s", theirs, ours, repeats)


# ------------------------------------------------------------------------------------------------ the engine


def engine(repeats: int = 3, count: int = 64, most: int = 32) -> Iterator[list[str]]:
    """64 requests at once: transformers' generate, one after the other / inprocess.py. The toy's sizes, prompts of 4 to
    64 frames x 4 tokens, up to 32 new tokens, fp32; greedy tokens equal."""
    contract = VisualContract(frame_pixels=64 * 64)
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
            frames = (4, 8, 16, 32, 64)[i % 5]
            group = draw_group(plain.config, frames, 64, [4] * (count // prompts), seed=i)
            requests += [(group.prompt + begun, group.frames[0], len(group.prompt)) for begun in group.suffixes]
        said = alone(requests)
        assert said == together(requests), "greedy tokens differ"
        what = f"{prompts} prompts, each {count // prompts} times, {sum(map(len, said))} tokens"
        yield versus(what, functools.partial(alone, requests), functools.partial(together, requests), repeats)
    ours.close()


# ------------------------------------------------------------------------------------------------ the command

BENCHES = {bench.__name__: bench for bench in (update, dispatch, overhead, decode, engine)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(BENCHES)} (default: all of them)")
    parser.add_argument("--write", action="store_true", help="also append to results/bench.md")
    args = parser.parse_args()
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    machine = f"{where}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}"
    made = f"`python -m study.bench {' '.join(sys.argv[1:])}` at commit {git_commit()}; {machine}; torch {torch.__version__}."
    torch.backends.cudnn.allow_tf32 = False  # the plain side's convolution would differ from our matrix product
    for name in args.names or BENCHES:
        rows = list(BENCHES[name]())
        table = markdown(inspect.getdoc(BENCHES[name]), ["what", "plain, s", "ours, s", "gain"], rows)
        section = f"#### {name}, {where}\n\n{table}\n\n{made}\n"
        print(section, flush=True)
        if args.write:
            with (REPO / "results" / "bench.md").open("a", encoding="utf-8") as file:
                file.write(f"\n{section}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
