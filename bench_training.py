"""bench_training.py: benches of what has weights: updates, SFT, the engine, weight sync. (For `python bench.py`.)

    update     plain transformers, one trajectory after the other / a group as one sequence, its prompt once
    update_8b  the same with the 8B's shapes on a GPU: tokens/s, MFU, memory
    sft        batches padded to their longest row / rows packed without padding
    engine     transformers' generate request by request / inprocess.py
    sync       plain writing and reading of as many bytes / weights to the engine, training state to disk and back

The plain side is transformers' own forward and backward on right-padded rows, with the same weights, the same frozen
vision tower, the same recomputation, and logits at the targets only, as ours.

Deliberately missing: the optimizer's step (the same on both sides), several GPUs.
"""

import functools
import itertools
import math
import multiprocessing
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForImageTextToText, Qwen3VLConfig, Qwen3VLForConditionalGeneration

import toy
from contract import Renderer, VisualContract, load_tokenizer, patchify
from data import Bundle
from dataset import encode_dialogue, pack, parse_dialogue
from distributed import device, export, load_state, save_state
from engine import run_all
from grpo import GRPOConfig, token_losses
from inprocess import InProcess
from measure import Section, cached, checkpoint, peak, ratio, require, side_by_side, take_turns, toy_folder, toy_items
from plan import PUBLISHED, utilisation
from policy import OptimConfig, Policy, PolicyConfig, load, make_optimizer, recompute
from rl import snapshot_folder
from tools import TOOLS
from video import Frames, Videos

# A text model that a CPU trains in seconds; the toy's other sizes stay.
SMALL = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8}
SAME = (
    "4 layers, hidden 256, fp32, frozen vision tower, blocks recomputed in the backward pass; gradients equal to 1e-4"
)

# ------------------------------------------------------------------------------------------------ two sides


def both(folder: Path, dtype: str = "fp32", train: bool = True) -> tuple[Policy, Qwen3VLForConditionalGeneration]:
    """Our policy and plain transformers: the same weights, frozen vision tower and recomputation on both sides."""
    policy = load(PolicyConfig(str(folder), dtype=dtype), train=False)
    attention = {"text_config": "flash_attention_2" if policy.kernel == "flash" else "sdpa", "vision_config": "sdpa"}
    plain = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=policy.dtype, attn_implementation=attention)
    for model in (policy.model, plain.to(device())):
        model.requires_grad_(train).model.visual.requires_grad_(False)
        for block in model.model.language_model.layers:
            block.forward = functools.partial(recompute, block.forward)
    return policy, plain


def draw_group(model_config, frames: int = 64, rollouts: int = 8, suffix=(200, 600), side: int = 256) -> Bundle:
    """A prompt with `frames` square frames, and rollouts of random tokens, whose number is drawn from `suffix`."""
    rng, c = np.random.default_rng(0), model_config
    marks = [c.image_token_id, c.video_token_id, c.vision_start_token_id, c.vision_end_token_id]
    words = np.setdiff1d(np.arange(2, c.text_config.vocab_size), marks)
    image = [c.vision_start_token_id, *[c.image_token_id] * (side // 32) ** 2, c.vision_end_token_id]
    prompt = [token for _ in range(frames) for token in [*rng.choice(words, 5).tolist(), *image]]
    prompt += rng.choice(words, 60).tolist()
    suffixes = [rng.choice(words, rng.integers(suffix[0], suffix[1] + 1)).tolist() for _ in range(rollouts)]
    pixels = rng.integers(0, 256, (frames, side, side, 3), dtype=np.uint8)
    return Bundle(prompt, suffixes, [[1] * len(s) for s in suffixes], [Frames(pixels, (0.0,) * frames)])


def unpack(bundle: Bundle) -> list[Bundle]:
    """The trajectories of a bundle that has frames in its prompt only."""
    rows = zip(bundle.suffixes, bundle.masks)
    return [Bundle([], [bundle.prompt + ids], [[0] * len(bundle.prompt) + mask], bundle.frames) for ids, mask in rows]


def plain_logprobs(model: Qwen3VLForConditionalGeneration, rows: Sequence[Bundle]) -> Tensor:
    """`policy(rows).logprobs` by plain transformers on right-padded rows; as in ours, logits at the targets only."""
    ids, real = (torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long) for _ in range(2))
    for i, row in enumerate(rows):
        ids[i, : len(row)], real[i, : len(row)] = torch.tensor(row.suffixes[0]), 1
    pixels, grid = (torch.from_numpy(x).to(device()) for x in patchify([clip for row in rows for clip in row.frames]))
    seen = {"pixel_values": pixels, "image_grid_thw": grid} if len(grid) else {}
    ids, real = ids.to(device()), real.to(device())
    types = (ids == model.config.image_token_id).int()
    hidden = model.model(ids, attention_mask=real, mm_token_type_ids=types, use_cache=False, **seen).last_hidden_state
    found = []
    for i, row in enumerate(rows):
        at = torch.from_numpy(np.flatnonzero(row.masks[0])).to(device())
        found.append(model.lm_head(hidden[i, at - 1]).float().log_softmax(-1).gather(-1, ids[i, at, None])[:, 0])
    return torch.cat(found)


def train_pass(model: Policy | Qwen3VLForConditionalGeneration, parts: list[list[Bundle]], rl=True, reference=None):
    """Gradients of one step over micro-batches: ours of bundles, plain transformers' of padded rows."""
    ours = isinstance(model, Policy)
    total, at = sum(sum(map(sum, bundle.masks)) for part in parts for bundle in part), 0
    model.zero_grad()
    for part in parts:
        features = model.encode(part) if ours else None  # frames are seen once for all passes

        def score(m, part=part, features=features):
            return m(part, features=features).logprobs if ours else plain_logprobs(m, part)

        logprobs, before = score(model), None
        if reference is not None:
            with torch.no_grad():
                before = score(reference)
        losses = -logprobs
        if rl:
            advantage = torch.cos(torch.arange(at, at + len(logprobs), device=logprobs.device))
            losses, _ = token_losses(logprobs, logprobs.detach(), logprobs.detach(), before, advantage, GRPOConfig())
        (losses.sum() / total).backward()
        at += len(logprobs)


def gradient_difference(policy: Policy, plain: Qwen3VLForConditionalGeneration) -> float:
    """|g - g'| / |g'| over all weights that train."""
    ours, theirs = ({n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in (policy.model, plain))
    require(ours.keys() == theirs.keys(), "the weights that train")
    apart = math.fsum((ours[name] - g).float().square().sum().item() for name, g in theirs.items())
    return math.sqrt(apart / math.fsum(g.float().square().sum().item() for g in theirs.values()))


# ------------------------------------------------------------------------------------------------ updates


def update_memory(folders: list[Path], ours: bool, at_once: int, shape: dict) -> float:
    """In a process of its own: memory that was used and freed before would hide some."""
    transformers.utils.logging.disable_progress_bar()
    model, reference = (both(folder, train=i == 0)[0 if ours else 1] for i, folder in enumerate(folders))
    group = draw_group(Qwen3VLConfig.from_pretrained(folders[0]), **shape)
    rows = unpack(group)
    parts = [[group]] if ours else [rows[i : i + at_once] for i in range(0, len(rows), at_once)]
    return peak(lambda: train_pass(model, parts, reference=reference))


def update(quick: bool) -> Section:
    base, changes = {"frames": 64, "rollouts": 8}, [{}, *({"rollouts": g} for g in (2, 4, 16))]
    changes += [*({"frames": k} for k in (4, 16)), *({"suffix": (n, n)} for n in (100, 1200))]
    if quick:
        base, changes = {"frames": 3, "rollouts": 3, "suffix": (8, 16), "side": 64}, changes[:2]
    folders = [checkpoint(f"update{seed}", VisualContract(), seed, **SMALL) for seed in (0, 1)]
    (ours, plain), (our_reference, reference) = both(folders[0]), both(folders[1], train=False)
    reference.model.visual = plain.model.visual  # frozen: the policy's and the reference's are the same
    rows = []
    for change in changes:
        repeats = 1 if quick else 2 if change else 3
        group = draw_group(plain.config, **base | change)
        alone = [[trajectory] for trajectory in unpack(group)]
        ceiling = {"tokens, plain / packed": sum(map(len, unpack(group))) / len(group)}
        padded = functools.partial(train_pass, plain, alone, reference=reference)
        packed = functools.partial(train_pass, ours, [[group]], reference=our_reference)
        padded(), packed()
        require(gradient_difference(ours, plain) < 1e-4, "gradients")
        a, b = take_turns(repeats, padded, packed)
        shape = ", ".join(f"{key} = {value}" for key, value in change.items()) or "shape as above"
        row = {"what": f"update and reference pass, {shape}: seconds"}
        rows.append(row | side_by_side({"plain": a, "packed": b}) | ceiling)
        if not change:
            rows.append({"what": "pi_prox pass: seconds"} | forward_only(ours, plain, group, repeats) | ceiling)
    context = multiprocessing.get_context("forkserver")  # whose server has imported this file and nothing else
    context.set_forkserver_preload([__name__])
    with context.Pool(1, maxtasksperchild=1) as pool:
        packed = pool.apply(update_memory, (folders, True, 0, base))
        for what, at_once in (("one trajectory", 1), (f"{base['rollouts']} padded rows", base["rollouts"])):
            padded = pool.apply(update_memory, (folders, False, at_once, base))
            row = {"what": f"memory beyond the weights, {what} at a time: GiB"}
            rows.append(row | side_by_side({"plain": [padded], "packed": [packed]}))
    said = "64 frames x 64 tokens, G = 8, suffixes of 200 to 600 tokens where nothing else is said"
    return Section(f"{said}; {SAME}", rows)


@torch.no_grad()
def forward_only(ours: Policy, plain: Qwen3VLForConditionalGeneration, group: Bundle, repeats: int) -> dict:
    def padded() -> Tensor:
        return torch.cat([plain_logprobs(plain, [trajectory]) for trajectory in unpack(group)])

    def packed() -> Tensor:
        return ours([group]).logprobs

    require(torch.allclose(padded(), packed(), atol=1e-4), "log-probs")
    a, b = take_turns(repeats, padded, packed)
    return side_by_side({"plain": a, "packed": b})


def update_8b(quick: bool) -> Section:
    if not torch.cuda.is_available():
        return Section("Not measured: it needs a GPU")
    layers = 2 if quick else 36 if torch.cuda.mem_get_info()[1] > 120 * 2**30 else 12
    shapes = Qwen3VLConfig(**PUBLISHED["Qwen/Qwen3-VL-8B-Instruct"])
    shapes.text_config.num_hidden_layers = layers
    rows, group = [], draw_group(shapes)
    with tempfile.TemporaryDirectory() as folder:
        with torch.device("cuda"):
            AutoModelForImageTextToText.from_config(shapes, dtype=torch.bfloat16).save_pretrained(folder)
        ours, plain = both(Path(folder), "bf16")
        parts = [[row] for row in unpack(group)], [[group]]
        sides = [functools.partial(train_pass, model, part) for model, part in zip((plain, ours), parts)]
        gib = [peak(side) for side in sides]
        apart = gradient_difference(ours, plain)
        require(apart < 0.2, "gradients")
        seconds = take_turns(1 if quick else 5, *sides)
        for name, part, took, memory in zip(("plain", "packed"), parts, seconds, gib):
            tokens = sum(len(row) for micro in part for row in micro)
            mfu = utilisation(PolicyConfig(folder), tokens, median(took), 1).get("mfu", "peak unknown")
            row = {"side": name, "tokens": tokens, "seconds": median(took), "tokens/s": tokens / median(took)}
            rows.append(row | {"MFU": mfu, "GiB beyond weights": memory, "plain / side": ratio(seconds[0], took)})
    return Section(
        f"The 8B's shapes, random weights, {layers} of 36 layers, weights and gradients in bf16, blocks recomputed, "
        f"kernel {ours.kernel}; K = 64, G = 8, suffixes of 200 to 600 tokens, no reference; gradients {apart:.1%} "
        "apart",
        rows,
    )


def sft(quick: bool) -> Section:
    rng, rows = np.random.default_rng(0), []
    renderer = Renderer(load_tokenizer(toy_folder() / "model"), toy.CONTRACT)
    with Videos(workers=1) as videos:
        dialogues = toy_items("sft", parse_dialogue, 4 if quick else 64)
        short = [encode_dialogue(d, videos, renderer, [TOOLS["crop_video"].schema]) for d in dialogues]
    small, long = checkpoint("sft", VisualContract(), **SMALL), []
    for _ in range(2 if quick else 16):
        frames, text = int(rng.choice([4, 8, 16, 32, 64])), int(rng.integers(100, 801))
        shape = {"frames": 2, "side": 64} if quick else {"frames": frames}
        long += unpack(draw_group(Qwen3VLConfig.from_pretrained(small), rollouts=1, suffix=(text, text), **shape))
    for name, bundles, folder, most in (
        ("toy", short, toy_folder() / "model", 4096),
        ("4 to 64 frames x 64 tokens, 100 to 800 target tokens", long, small, 8192),
    ):
        ours, plain = both(folder)
        lengths = [len(bundle) for bundle in bundles]
        packs = [[bundles[i] for i in members] for members in pack(lengths, most)]
        batches = [[]]  # in the order of the data; the padding counts in the budget
        for bundle in bundles:
            if max(map(len, [*batches[-1], bundle])) * (len(batches[-1]) + 1) > most:
                batches.append([])
            batches[-1].append(bundle)
        packed = functools.partial(train_pass, ours, packs, rl=False)
        padded = functools.partial(train_pass, plain, batches, rl=False)
        packed(), padded()
        require(gradient_difference(ours, plain) < 1e-4, "gradients")
        a, b = take_turns(1 if quick else 5, padded, packed)
        row = {"rows": f"{name}: {len(bundles)} rows of {min(lengths)} to {max(lengths)}", "micro-batch": most}
        row |= side_by_side({"padded, tokens/s": a, "packed, tokens/s": b}, sum(lengths))
        whole = sum(max(map(len, batch)) * len(batch) for batch in batches)
        rows.append(row | {"tokens, padded / packed": whole / sum(lengths)})
    return Section(f"Padding counts in the micro-batch, not in tokens/s. Toy: the toy's model; else {SAME}", rows)


# ------------------------------------------------------------------------------------------------ engine, weights


def engine(quick: bool) -> Section:
    contract, rng, rows = VisualContract(frame_pixels=64 * 64), np.random.default_rng(0), []
    # Large weights: greedy text of an untrained model varies.
    folder = checkpoint("engine", contract, initializer_range=0.1)
    renderer, most, count = Renderer(load_tokenizer(folder), contract), 8 if quick else 64, 4 if quick else 64
    plain = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).to(device())
    ours = InProcess(folder, renderer, device=str(device()))
    banned = [[token] for token in renderer.never_sampled]

    def together(asked: list) -> list[list[int]]:
        def job(ids: list[int], clip: Frames, shared: int) -> list[int]:
            return ours.generate(ids, [clip], max_new_tokens=most, temperature=0.0, seed=0, shared=shared).ids

        found = {}
        run_all(ours, [functools.partial(job, *request) for request in asked], len(asked), found.__setitem__)
        return [found[i] for i in range(len(asked))]

    def alone(asked: list) -> list[list[int]]:
        found = []
        for ids, clip, _ in asked:
            pixels, grid = (torch.from_numpy(x).to(device()) for x in patchify([clip]))
            row = torch.tensor([ids], device=device())
            seen = {
                "pixel_values": pixels,
                "image_grid_thw": grid,
                "mm_token_type_ids": (row == renderer.image_pad).int(),
            }
            greedy = {"max_new_tokens": most, "do_sample": False, "bad_words_ids": banned}
            out = plain.generate(input_ids=row, attention_mask=torch.ones_like(row), **seen, **greedy)
            found.append(out[0, len(ids) :].tolist())
        return found

    for prompts in (count, count // 8 or 1):
        asked = []
        for i in range(prompts):
            k = int(rng.choice([4, 8, 16, 32, 64]))
            clip = Frames(rng.integers(0, 256, (k, 64, 64, 3), dtype=np.uint8), tuple(map(float, range(k))))
            messages = [{"role": "user", "content": [clip, f"What happens?{' Say it.' * i}"]}]
            prompt = renderer.render(messages, generate=True).ids
            asked += [(prompt + renderer.encode(f"Idea {j}: "), clip, len(prompt)) for j in range(count // prompts)]
        said = together(asked)
        require(said == alone(asked), "greedy tokens")
        a, b = take_turns(1 if quick else 3, lambda asked=asked: alone(asked), lambda asked=asked: together(asked))
        sides = {"generate, tokens/s": a, "inprocess.py, tokens/s": b}
        rows.append({"requests": f"{prompts} prompts x {count // prompts}"} | side_by_side(sides, sum(map(len, said))))
    ours.close()
    return Section(
        f"The toy's model, prompts of 4 to 64 frames x 4 tokens, up to {most} new tokens, fp32; greedy tokens equal",
        rows,
    )


def sync(quick: bool) -> Section:
    contract, rows, repeats = VisualContract(), [], 1 if quick else 5
    sizes = {} if quick else {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8}
    source = checkpoint("sync", contract, **sizes)
    policy = load(PolicyConfig(str(source), dtype="fp32"))
    optimizer = make_optimizer(policy, OptimConfig())
    served = InProcess(source, Renderer(load_tokenizer(source), contract), device=str(device()))
    snapshot, state, steps = snapshot_folder(cached("sync")), cached("sync-state"), itertools.count()
    shutil.rmtree(state, ignore_errors=True)
    norm = policy.text.norm.weight.detach()
    norm += 1

    def publish() -> None:
        export(policy, snapshot, source, contract)
        served.update_weights(snapshot, 1)

    def save() -> None:
        save_state(state, policy, optimizer, next(steps), keep=1)

    def restore() -> None:
        load_state(state, policy, optimizer)

    publish()
    pairs = zip(policy.model.parameters(), served.model.parameters(), strict=True)
    require(all(torch.equal(a, b) for a, b in pairs), "weights of policy and engine")
    save()
    norm.zero_()
    restore()
    require(torch.equal(norm, served.model.model.language_model.norm.weight), "weights before and after")
    for what, ours, folder, writes, reads in (
        ("export and update_weights", publish, snapshot, True, True),
        ("save_state", save, state, True, False),
        ("load_state", restore, state, False, True),
    ):
        content = bytes(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
        beside, gb = folder.with_suffix(".plain"), len(content) / 1e9
        beside.write_bytes(content)

        def plainly(beside=beside, content=content, writes=writes, reads=reads) -> None:
            if writes:
                beside.write_bytes(content)
            if reads:
                beside.read_bytes()

        a, b = ([x / gb for x in seconds] for seconds in take_turns(repeats, plainly, ours))
        rows.append({"what": what, "GB": gb} | side_by_side({"plainly, s/GB": a, "ours, s/GB": b}))
        beside.unlink()
    served.close()
    shutil.rmtree(snapshot)
    shutil.rmtree(state)
    return Section(f"Snapshot in {snapshot.parent}, state beside the runs, fp32; weights equal after each way", rows)
