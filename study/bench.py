"""bench.py: the claims of speed, each as two sides that do the same work, measured in one run.

    python -m study.toy build toy_data                          # a video, and the tokenizer of all models here
    python -m study.bench                                       # everything (ten minutes on two cores); on a GPU where there is one
    python -m study.bench update engine >> results/bench.md     # some of it

The sides take turns (A B A B ...). Before the clock runs, both have run once and their results were compared: gradient for
gradient, token for token. A difference ends the program. A gain is the median over pairs of neighbours, since what else the
machine does hits neighbours alike.

Deliberately missing: memory, other frameworks, the speed of SGLang itself, several GPUs, the optimizer's step; what our
Python adds to an episode, and decoding, which commit 73b2e4e measured.
"""

import argparse
import functools
import inspect
import operator
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from data import Task
from evals.tables import markdown
from grpo import GRPOConfig, token_losses
from rollout import AgentContext, RolloutConfig, render_prompt, run_all, run_episode
from runtime.config import git_commit
from runtime.distributed import device
from runtime.engine import Engine, Sample
from runtime.inprocess import InProcess
from runtime.policy import PolicyConfig, load, recompute
from runtime.render import Bundle, Renderer, load_tokenizer
from runtime.video import Frames, Videos
from runtime.visual import VisualContract, patchify
from study import toy

TOY = Path("toy_data")  # read
OURS = Path("runs/bench")  # written
Plain = Qwen3VLForConditionalGeneration


def versus(what: str, plain: Callable, ours: Callable, repeats: int, same: Callable = operator.eq) -> list[str]:
    """Compare the results of both sides, then time them, run A B A B ... Return a row: what, the medians in seconds, the
    gain and its range."""
    assert same(plain(), ours()), f"{what}: the sides differ"
    seconds = {plain: [], ours: []}
    for _ in range(repeats):
        for side in (plain, ours):
            began = time.perf_counter()
            side()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds[side].append(time.perf_counter() - began)
    gains = [one / other for one, other in zip(seconds[plain], seconds[ours])]
    gain = f"{median(gains):.3g}x ({min(gains):.3g} - {max(gains):.3g})"
    return [what, f"{median(seconds[plain]):.3g}", f"{median(seconds[ours]):.3g}", gain]


def plain_inputs(model: Plain, ids: Tensor, clips: list[Frames]) -> dict[str, Tensor]:
    pixels, grid = (x.to(device()) for x in patchify(clips))
    types = (ids == model.config.image_token_id).int()
    return {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": types}


def draw_group(c: Qwen3VLConfig, frames: int, side: int, suffixes: Sequence[int], seed: int = 0) -> Bundle:
    """Draw random tokens: a prompt that shows square frames of `side` pixels, and rollouts of so many tokens."""
    rng = np.random.default_rng(seed)
    image = [c.vision_start_token_id, *[c.image_token_id] * (side // 32) ** 2, c.vision_end_token_id]
    prompt = []
    for _ in range(frames):
        prompt += [*rng.integers(20, 120, 5).tolist(), *image]  # ordinary tokens of every vocabulary
    said = [rng.integers(20, 120, length).tolist() for length in suffixes]
    clip = Frames(rng.integers(0, 256, (frames, side, side, 3), dtype=np.uint8), (0.0,) * frames)
    return Bundle(prompt, said, [[1] * len(ids) for ids in said], [clip])


# ------------------------------------------------------------------------------------------------ the benches


def plain_logprobs(model: Plain, group: Bundle, suffix: list[int]) -> Tensor:
    """Return the log-probs [S] of one rollout by plain transformers; as in ours, logits of the suffix only."""
    ids = torch.tensor([group.prompt + suffix], device=device())  # [1, P + S]
    start = len(group.prompt)
    hidden = model.model(**plain_inputs(model, ids, group.frames), use_cache=False).last_hidden_state  # [1, P + S, H]
    logits = model.lm_head(hidden[0, start - 1 : -1]).float()  # [S, V]
    return -F.cross_entropy(logits, ids[0, start:], reduction="none")


def backward(logprobs: Tensor, ref_logprobs: Tensor) -> None:
    """Add the gradient of a first update, whose advantages are some function of the token."""
    before = logprobs.detach()  # pi_prox's and the engine's
    losses, _ = token_losses(logprobs, before, before, ref_logprobs, before.cos(), GRPOConfig())
    losses.sum().backward()


def update(repeats: int = 3, frames: int = 64, side: int = 256, suffixes=range(200, 601, 57)) -> Iterator[list[str]]:
    """An RL update, reference pass included: one trajectory after the other / the group as one sequence, its prompt once.
    64 frames x 64 tokens, G = 8, suffixes of 200 to 600 tokens; 2 layers, hidden 256, fp32,
    frozen vision tower, blocks recomputed in the backward pass; the reference has the policy's weights, as in the first step.
    Gradients equal to 1e-4."""
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 8}
    folder = OURS / "update"
    toy.write_checkpoint(folder, load_tokenizer(TOY / "model"), VisualContract(), **sizes)
    # Not with train=True: on a GPU that means fp32 master weights in FSDP2, which the plain side has not.
    policy = load(PolicyConfig(str(folder), dtype="fp32"), train=False)
    plain = Plain.from_pretrained(folder, dtype=policy.dtype, attn_implementation="sdpa").to(device())
    for model in (plain, policy.model):
        model.requires_grad_(True).model.visual.requires_grad_(False)
        for block in model.model.language_model.layers:
            block.forward = functools.partial(recompute, block.forward)
    group = draw_group(policy.model.config, frames, side, suffixes)

    def one_by_one() -> Tensor:
        plain.zero_grad()
        for suffix in group.suffixes:
            with torch.no_grad():
                ref_logprobs = plain_logprobs(plain, group, suffix)
            backward(plain_logprobs(plain, group, suffix), ref_logprobs)
        return torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None])

    def packed() -> Tensor:
        policy.zero_grad()
        features = policy.encode([group])  # the frames are seen once for both passes
        with torch.no_grad():
            ref_logprobs = policy([group], features=features).logprobs
        backward(policy([group], features=features).logprobs, ref_logprobs)
        return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])

    yield versus("the update", one_by_one, packed, repeats, lambda one, other: (one - other).norm() < 1e-4 * one.norm())


@dataclass
class Scripted(Engine):
    """An engine whose main agent makes its calls, `per_turn` at a time, and answers, all in no time; a report takes `seconds`."""

    renderer: Renderer
    calls: list[str]
    per_turn: int
    seconds: float
    version: int = 0

    def generate(self, ids, frames, *, shared_prefix=0, **rest) -> Sample:
        if len(frames[0]) < 64:  # a crop: a sub-agent asks
            time.sleep(self.seconds)
            said = "No flash."
        else:
            answered = self.renderer.decode(ids[shared_prefix:]).count("<tool_response>")
            said = "".join(self.calls[answered : answered + self.per_turn]) or "<answer>red</answer>"
        tokens = self.renderer.encode(f"{said}<|im_end|>")
        return Sample(tokens, [-1.0] * len(tokens), "stop", 0)


def dispatch(repeats: int = 5, count: int = 8, latency: float = 0.25) -> Iterator[list[str]]:
    """The calls of an episode: each in a turn of its own / all in one turn, in threads. Whole episodes on a toy video, 2
    decoders, no cache; the main agent answers in no time, a report takes 0.25 s. Windows and reports equal."""
    renderer = Renderer(load_tokenizer(TOY / "model"), toy.CONTRACT)
    calls = [toy.call(2 * i, 2 * i + 16) for i in range(count)]
    task = Task("", "Which color flashes?", (str(TOY / "videos" / "rl00000.mp4"),), "oe", "red")
    cfg = RolloutConfig(max_turns=count, max_calls=count, think_prefix=False)
    with Videos(workers=2, cache_bytes=0) as videos:

        def run(per_turn: int) -> list[tuple]:
            context = AgentContext(Scripted(renderer, calls, per_turn, latency), renderer, videos, cfg)
            episode = run_episode(context, task, 64, render_prompt(task, 64, context), seed=0)
            assert episode.n_executed == count, f"{episode.n_executed} calls were run, not {count}"
            return [(call.window, call.text) for call in episode.calls]

        yield versus(f"calls: {count}, reports: {latency} s", lambda: run(1), lambda: run(count), repeats)


class Request(NamedTuple):
    """What an engine is asked to continue."""

    ids: list[int]
    clips: list[Frames]
    shared: int  # length of the prompt that it shares with other requests


def engine(repeats: int = 3, count: int = 64, max_new_tokens: int = 32) -> Iterator[list[str]]:
    """64 requests at once: transformers' generate on one batch, padded on the left / inprocess.py. The toy's sizes, up to
    32 new tokens, fp32; prompts of 4 to 64 frames x 4 tokens, and of 8 to 64 tokens of text. Greedy tokens equal."""
    folder = OURS / "engine"
    contract = VisualContract(frame_pixels=64 * 64)
    renderer = Renderer(load_tokenizer(TOY / "model"), contract)
    # Greedy text of large random weights varies.
    toy.write_checkpoint(folder, renderer.tokenizer, contract, initializer_range=0.1)
    plain = Plain.from_pretrained(folder, dtype=torch.float32).to(device())
    ours = InProcess(folder, renderer, device=str(device()))
    never = [[token] for token in renderer.never_sampled]
    pad = plain.generation_config.pad_token_id

    def padded(requests: list[Request]) -> list[list[int]]:
        longest = max(len(request.ids) for request in requests)
        rows, clips = [], []
        for request in requests:
            rows.append([pad] * (longest - len(request.ids)) + request.ids)
            clips += request.clips
        ids = torch.tensor(rows, device=device())  # [B, P]
        asked = plain_inputs(plain, ids, clips) if clips else {"input_ids": ids}
        asked |= {"attention_mask": (ids != pad).int(), "bad_words_ids": never}
        out = plain.generate(**asked, max_new_tokens=max_new_tokens, do_sample=False)  # [B, P + T]
        return out[:, longest:].tolist()

    def ragged(requests: list[Request]) -> list[list[int]]:
        ask = functools.partial(ours.generate, max_new_tokens=max_new_tokens, temperature=0.0, seed=0)
        jobs = [
            functools.partial(ask, request.ids, request.clips, shared_prefix=request.shared) for request in requests
        ]
        samples = [None] * len(jobs)
        run_all(ours, jobs, len(jobs), samples.__setitem__)
        return [sample.ids for sample in samples]

    def same(one: list, other: list) -> bool:  # up to what pads the rows that ended before others
        return all(row[: len(said)] == said for row, said in zip(one, other, strict=True))

    for prompts in (count, count // 8):
        requests = []
        for i in range(prompts):
            group = draw_group(plain.config, (4, 8, 16, 32, 64)[i % 5], 64, [4] * (count // prompts), seed=i)
            for begun in group.suffixes:
                requests.append(Request(group.prompt + begun, group.frames, len(group.prompt)))
        what = f"{prompts} prompts, each {count // prompts} times"
        yield versus(what, functools.partial(padded, requests), functools.partial(ragged, requests), repeats, same)
    rng = np.random.default_rng(0)
    texts = [Request(rng.integers(20, 120, length).tolist(), [], 0) for length in rng.integers(8, 65, count)]
    yield versus(f"{count} texts", lambda: padded(texts), lambda: ragged(texts), 3 * repeats, same)
    ours.close()


BENCHES = {bench.__name__: bench for bench in (update, dispatch, engine)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(BENCHES)} (default: all of them)")
    names = parser.parse_args().names or BENCHES
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    machine = f"{where}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}"
    torch.backends.cudnn.allow_tf32 = False  # the plain side's convolution would differ from our matrix product
    for name in names:
        header = ["what", "plain, s", "ours, s", "gain"]
        table = markdown(inspect.getdoc(BENCHES[name]), header, list(BENCHES[name]()))
        made = f"`python -m study.bench {name}` at commit {git_commit()}; {machine}; torch {torch.__version__}."
        print(f"\n#### {name}, {where}\n\n{table}\n\n{made}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
