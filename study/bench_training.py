"""bench_training.py: benches of what has weights: updates, SFT, the engine, weight sync. (For `python -m study.bench`.)

The plain side of training is transformers' own forward and backward on right-padded rows, with the same weights, the
same frozen vision tower, the same recomputation, and logits at the targets only, as ours.

Deliberately missing: the optimizer's step (the same on both sides), several GPUs.
"""

import dataclasses
import functools
import itertools
import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForImageTextToText, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from data import encode_dialogue, parse_dialogue
from grpo import token_losses
from rollout import run_all
from runtime.contract import Bundle, Renderer, VisualContract, load_tokenizer, patchify
from runtime.distributed import device, export, load_state, save_state
from runtime.inprocess import InProcess
from runtime.packing import best_fit
from runtime.plan import PUBLISHED, utilisation
from runtime.policy import Policy, load, make_optimizer, recompute
from runtime.settings import GRPOConfig, OptimConfig, PolicyConfig
from runtime.video import Frames, Videos
from study import toy
from study.measure import CACHE, Row, peak, take_turns, toy_folder, toy_items, versus
from tools import TOOLS

Plain = Qwen3VLForConditionalGeneration
Parts = list[list[Bundle]]  # micro-batches
# A text model that a CPU trains in seconds; the toy's other sizes stay.
SMALL = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 8}


def checkpoint(name: str, contract: VisualContract, seed: int = 0, **sizes) -> Path:
    """Random weights of the real class, with all that stands beside them."""
    toy.write_checkpoint(CACHE / name, load_tokenizer(toy_folder() / "model"), contract, seed, **sizes)
    return CACHE / name


# ------------------------------------------------------------------------------------------------ two sides


def both(folder: Path, dtype: str = "fp32") -> tuple[Plain, Policy]:
    """Plain transformers and our policy: the same weights, frozen vision tower and recomputation."""
    # Not with train=True: on a GPU that means fp32 master weights in FSDP2, which the plain side has not.
    policy = load(PolicyConfig(str(folder), dtype=dtype), train=False)
    attention = {"text_config": "flash_attention_2" if policy.kernel == "flash" else "sdpa", "vision_config": "sdpa"}
    plain = Plain.from_pretrained(folder, dtype=policy.dtype, attn_implementation=attention).to(device())
    for model in (plain, policy.model):
        model.requires_grad_(True).model.visual.requires_grad_(False)
        for block in model.model.language_model.layers:
            block.forward = functools.partial(recompute, block.forward)
    return plain, policy


def draw_group(c: Qwen3VLConfig, frames=64, rollouts=8, suffix=(200, 600), side=256) -> tuple[Parts, Parts]:
    """Random tokens: a prompt with square frames of `side` pixels, and rollouts of suffix[0] to suffix[1] tokens. As rows,
    each with a prompt of its own and in a micro-batch of its own, and as one bundle."""
    rng = np.random.default_rng(0)
    marks = [c.image_token_id, c.video_token_id, c.vision_start_token_id, c.vision_end_token_id]
    words = np.setdiff1d(np.arange(2, c.text_config.vocab_size), marks)
    image = [c.vision_start_token_id, *[c.image_token_id] * (side // 32) ** 2, c.vision_end_token_id]
    prompt = [token for _ in range(frames) for token in [*rng.choice(words, 5).tolist(), *image]]
    prompt += rng.choice(words, 60).tolist()
    said = [rng.choice(words, rng.integers(suffix[0], suffix[1] + 1)).tolist() for _ in range(rollouts)]
    clips = [Frames(rng.integers(0, 256, (frames, side, side, 3), dtype=np.uint8), (0.0,) * frames)]
    rows = [Bundle([], [prompt + ids], [[0] * len(prompt) + [1] * len(ids)], clips) for ids in said]
    return [[row] for row in rows], [[Bundle(prompt, said, [[1] * len(ids) for ids in said], clips)]]


def inputs(model: Plain, ids: Tensor, clips: list[Frames]) -> dict[str, Tensor]:
    pixels, grid = (torch.from_numpy(x).to(device()) for x in patchify(clips))
    types = (ids == model.config.image_token_id).int()
    return {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": types}


def plain_logprobs(model: Plain, rows: Sequence[Bundle]) -> Tensor:
    """`policy(rows).logprobs` by plain transformers on right-padded rows; as in ours, logits at the targets only."""
    ids, real, target = torch.zeros(3, len(rows), max(map(len, rows)), dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)], real[i, : len(row)] = torch.tensor(row.suffixes[0]), 1
        target[i, : len(row)] = torch.tensor(row.masks[0])
    ids, real, target = (x.to(device()) for x in (ids, real, target[:, 1:].bool()))
    seen = inputs(model, ids, [clip for row in rows for clip in row.frames])
    hidden = model.model(**seen, attention_mask=real, use_cache=False).last_hidden_state[:, :-1][target]  # [N, H]
    return -F.cross_entropy(model.lm_head(hidden).float(), ids[:, 1:][target], reduction="none")


def train_pass(model: Plain | Policy, parts: Parts, beside: Sequence = ()) -> None:
    """Gradients of one step over micro-batches: plain transformers' of rows, or ours of bundles. `beside`: models that
    score them, too, without gradient: the reference, and the model itself where pi_prox has a pass of its own."""
    ours = isinstance(model, Policy)
    total = sum(sum(map(sum, bundle.masks)) for part in parts for bundle in part)
    model.zero_grad()
    for part in parts:
        features = model.encode(part) if ours else None  # frames are seen once for all passes

        def score(m, part=part, features=features):
            return m(part, features=features).logprobs if ours else plain_logprobs(m, part)

        with torch.no_grad():
            reference, prox, *_ = [*map(score, beside), None, None]
        logprobs = score(model)
        prox = logprobs.detach() if prox is None else prox
        # Some advantage per token, the same on both sides. (With 1 for all, this is the gradient of SFT.)
        losses, _ = token_losses(logprobs, prox, prox, reference, prox.cos(), GRPOConfig())
        (losses.sum() / total).backward()


def gradient_difference(plain: Plain, policy: Policy) -> float:
    """|g' - g| / |g| over all weights that train."""
    theirs, ours = ({n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in (plain, policy.model))
    assert ours.keys() == theirs.keys(), "the weights that train differ"
    apart = math.fsum((ours[name] - g).float().square().sum().item() for name, g in theirs.items())
    return math.sqrt(apart / math.fsum(g.float().square().sum().item() for g in theirs.values()))


def train_versus(what: str, models, parts, repeats: int, beside=((), ())) -> Row:
    """Passes over the (plain, our) parts, timed once their gradients are equal; beside the gain, its ceiling."""
    sides = [functools.partial(train_pass, *side) for side in zip(models, parts, beside, strict=True)]
    for side in sides:
        side()
    assert gradient_difference(*models) < (1e-4 if models[0].dtype == torch.float32 else 0.2), "gradients differ"
    row = versus(what, *sides, repeats)
    padded = sum(len(part) * max(map(len, part)) for part in parts[0])
    packed = sum(len(bundle) for part in parts[1] for bundle in part)
    note = f"{padded} and {packed} tokens: {padded / packed:.3g}x"
    for side, tokens, seconds in (("plain", padded, median(row.plain)), ("ours", packed, median(row.ours))):
        for mfu in utilisation(models[1].cfg, tokens, seconds, 1).values():  # on a GPU
            note += f"; {side} {tokens / seconds:.0f} tokens/s, MFU {mfu:.1%}"
    return dataclasses.replace(row, note=note)


# ------------------------------------------------------------------------------------------------ training

SWEEP = [("rollouts", 2), ("rollouts", 4), ("frames", 4), ("frames", 16), ("suffix", (100, 100)), ("suffix", (1200, 1200))]  # fmt: skip


def update(repeats: int = 3, sweep: Sequence[tuple] = SWEEP, **shape) -> Iterator[Row]:
    """An RL update, reference pass included: one trajectory after the other / the group as one sequence, its prompt once.
    64 frames x 64 tokens, G = 8, suffixes of 200 to 600 tokens where nothing else is said; 2 layers, hidden 256, fp32,
    frozen vision tower, blocks recomputed in the backward pass; gradients equal to 1e-4."""
    folders = [checkpoint(f"update{seed}", VisualContract(), seed, **SMALL) for seed in (0, 1)]
    models, references = both(folders[0]), both(folders[1])
    references[0].model.visual = models[0].model.visual  # frozen: the policy's and the reference's are the same
    with_reference = [[reference] for reference in references]
    parts = draw_group(models[0].config, **shape)
    yield train_versus("the update", models, parts, repeats, with_reference)
    yield train_versus("the update, and a pass for pi_prox", models, parts, repeats, list(zip(references, models)))
    yield from memory(models, parts, with_reference)
    for name, value in sweep:
        parts = draw_group(models[0].config, **shape | {name: value})
        yield train_versus(f"the update, {name} = {value}", models, parts, min(repeats, 2), with_reference)


def update_8b(repeats: int = 5) -> Iterator[Row]:
    """The same without a reference, with the 8B's shapes and random weights on a GPU: weights and gradients in bf16,
    gradients equal to 20 %. MFU counts the tokens that a side computes."""
    if not torch.cuda.is_available():
        yield Row("not measured: it needs a GPU")
        return
    shapes = Qwen3VLConfig(**PUBLISHED["Qwen/Qwen3-VL-8B-Instruct"])
    shapes.text_config.num_hidden_layers = layers = 36 if torch.cuda.mem_get_info()[1] > 120 * 2**30 else 12
    with tempfile.TemporaryDirectory() as folder:
        with torch.device("cuda"):
            AutoModelForImageTextToText.from_config(shapes, dtype=torch.bfloat16).save_pretrained(folder)
        models, parts = both(Path(folder), "bf16"), draw_group(shapes)
        yield train_versus(f"the update, {layers} of 36 layers, kernel {models[1].kernel}", models, parts, repeats)
        yield from memory(models, parts)


def memory(models, parts: tuple[Parts, Parts], beside=((), ())) -> Iterator[Row]:
    """The packed group against its rows one by one, and against all of them in one micro-batch."""
    rows, gib = [row for (row,) in parts[0]], []
    for side in (*zip(models, parts, beside), (models[0], [rows], beside[0])):
        for model in models:  # gradients count
            model.zero_grad()
        gib.append([peak(functools.partial(train_pass, *side))])
    yield Row("GiB beyond the weights, plain one by one", gib[0], gib[1])
    yield Row(f"GiB beyond the weights, plain {len(rows)} at a time", gib[2], gib[1])


def sft(repeats: int = 3, counts: tuple[int, int] = (64, 16), **base) -> Iterator[Row]:
    """Rows padded to the longest of their micro-batch, in the order of the data / packed without padding; micro-batches
    of as many tokens, padding included; gradients equal to 1e-4. The toy's rows in the toy's model; rows of 4 to 64
    frames x 64 tokens with 100 to 800 target tokens in the model of `update`."""
    rng, mixed = np.random.default_rng(0), []
    renderer = Renderer(load_tokenizer(toy_folder() / "model"), toy.CONTRACT)
    small = checkpoint("sft", VisualContract(), **SMALL)
    with Videos(workers=1) as videos:
        dialogues, tools = toy_items("sft", parse_dialogue, counts[0]), [TOOLS["crop_video"].schema]
        short = [encode_dialogue(dialogue, videos, renderer, tools) for dialogue in dialogues]
    for _ in range(counts[1]):
        frames, text = int(rng.choice([4, 8, 16, 32, 64])), int(rng.integers(100, 801))
        shape = {"frames": frames, "rollouts": 1, "suffix": (text, text)} | base
        mixed += draw_group(Qwen3VLConfig.from_pretrained(small), **shape)[0][0]
    for what, rows, folder, most in (("the toy", short, toy_folder() / "model", 4096), ("mixed", mixed, small, 8192)):
        packs, padded = best_fit([len(row) for row in rows], most), [[]]
        for row in rows:
            if max(map(len, [*padded[-1], row])) * (len(padded[-1]) + 1) > most:
                padded.append([])
            padded[-1].append(row)
        parts = padded, [[rows[i] for i in members] for members in packs]
        yield train_versus(f"{what}, {len(rows)} rows", both(folder), parts, repeats)


# ------------------------------------------------------------------------------------------------ engine, weights


def engine(repeats: int = 3, count: int = 64, most: int = 32) -> Iterator[Row]:
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
            out = plain.generate(**inputs(plain, row, [clip]), attention_mask=torch.ones_like(row), **greedy)
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
        yield versus(what, *(functools.partial(side, requests) for side in (alone, together)), repeats)
    ours.close()


def sync(repeats: int = 5, **sizes) -> Iterator[Row]:
    """Seconds per GB, there and back: a file of as many bytes / weights to the engine (export and update_weights, in memory
    where there is /dev/shm), training state to disk (save_state and load_state). fp32; weights equal after each way."""
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8} | sizes
    source, contract = checkpoint("sync", VisualContract(), **sizes), VisualContract()
    policy = load(PolicyConfig(str(source), dtype="fp32"))
    optimizer, steps = make_optimizer(policy, OptimConfig()), itertools.count()
    served = InProcess(source, Renderer(load_tokenizer(source), contract), device=str(device()))
    memory, state = Path("/dev/shm"), CACHE / "sync-state"
    snapshot = (memory if memory.is_dir() else CACHE) / "minparavt-bench-sync"
    shutil.rmtree(state, ignore_errors=True)

    def publish() -> None:
        export(policy, snapshot, source, contract)
        served.update_weights(snapshot, 1)

    def save_and_load() -> None:
        save_state(state, policy, optimizer, next(steps), keep=1)
        norm.zero_()
        load_state(state, policy, optimizer)

    norm = policy.text.norm.weight.detach()
    norm += 1
    for what, ours, folder in (("weights", publish, snapshot), ("training state", save_and_load, state)):
        ours()
        pairs = zip(policy.model.parameters(), served.model.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), f"{what} differ"
        content = bytes(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
        file, gb = folder.with_suffix(".plain"), len(content) / 1e9
        plainly = functools.partial(lambda file, content: (file.write_bytes(content), file.read_bytes()), file, content)
        seconds = take_turns(repeats, plainly, ours)
        yield Row(f"{what}, {gb:.2g} GB", *([x / gb for x in found] for found in seconds))
        file.unlink()
        shutil.rmtree(folder)
    served.close()
