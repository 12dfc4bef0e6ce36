"""A tiny random Qwen3-VL or Qwen2.5-VL without a tokenizer, random bundles, and two oracles: plain transformers for log-probs, and a
reference implementation of the GPU's attention kernels."""

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import AutoModelForImageTextToText, PreTrainedModel

from runtime.distributed import init_distributed, rank, world_size
from runtime.packing import Bundle
from runtime.policy import Policy, PolicyConfig, load
from runtime.video import Clip
from runtime.visual import patchify
from study import toy

# An odd vocabulary: two ranks hold different numbers of its rows.
VOCABULARY, IMAGE_PAD, VIDEO_PAD, VISION_START, VISION_END = 129, 120, 121, 122, 123
NEVER_SAMPLED = (IMAGE_PAD, VIDEO_PAD, VISION_START, VISION_END)
TOKENS = {"<|endoftext|>": 0, "<|im_end|>": 1, "<|image_pad|>": IMAGE_PAD, "<|video_pad|>": VIDEO_PAD}
TOKENS |= {"<|vision_start|>": VISION_START, "<|vision_end|>": VISION_END}


class Pieces:
    """A renderer whose tokens are the given strings. Strings that begin with `<|` end a turn."""

    def __init__(self, *pieces: str):
        self.pieces, self.ends_of_turn = pieces, [i for i, piece in enumerate(pieces) if piece.startswith("<|")]

    def decode(self, ids: list[int]) -> str:
        return "".join(self.pieces[i] for i in ids)

    def offsets(self, ids: list[int]) -> list[tuple[int, int]]:
        ends = np.cumsum([len(self.pieces[i]) for i in ids]).tolist()
        return list(zip([0, *ends], ends))


def write(
    path: Path, tied: bool = True, seed: int = 0, text: dict | None = None, vision: dict | None = None,
    model_type: str = "qwen3_vl",
) -> Path:  # fmt: skip
    """Write a checkpoint of random weights that are large enough to make attention far from uniform."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]}
    sizes = {"vocab_size": VOCABULARY, "intermediate_size": 96, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
    tower = {"depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
    if model_type == "qwen3_vl":
        sizes |= {"hidden_size": 48, "head_dim": 16, "rope_parameters": rope | {"mrope_interleaved": True}}
        tower |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
    else:
        sizes |= {"hidden_size": 64, "rope_parameters": rope}
        tower |= {"window_size": 56, "fullatt_block_indexes": [1]}  # windows of 2 x 2 tokens
    sizes |= {"tie_word_embeddings": tied} | (text or {})
    tower |= {"out_hidden_size": sizes["hidden_size"]} | (vision or {})
    model = toy.untrained_model(model_type, sizes, tower, TOKENS, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter *= 4
            else:  # with their default values, a missing norm or bias would go unnoticed
                parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(path)
    return path


def plain(path: Path, attention: str = "eager") -> PreTrainedModel:
    return AutoModelForImageTextToText.from_pretrained(path, attn_implementation=attention, dtype=torch.float32)


@dataclass
class Piece:
    """A prompt or a suffix with the frames among its tokens."""

    ids: list[int]
    clips: list[Clip]


def piece(rng: np.random.Generator, length: int, images: int, cell: int = 32) -> Piece:
    """Make `length` text tokens with images of different sizes between them."""
    ids, clips = rng.integers(2, IMAGE_PAD, length).tolist(), []
    for at in sorted(rng.integers(0, length + 1, images).tolist(), reverse=True):
        rows, columns = rng.integers(2, 4, 2).tolist()  # at least two tokens a side: with one, M-RoPE is degenerate
        pixels = rng.integers(0, 256, (1, cell * rows, cell * columns, 3), dtype=np.uint8)
        clips.insert(0, Clip(pixels, (0.0,)))
        ids[at:at] = [VISION_START, *[IMAGE_PAD] * (rows * columns), VISION_END]
    return Piece(ids, clips)


def bundle(
    rng: np.random.Generator, prompt: tuple[int, int], suffixes: list[tuple[int, int]], cell: int = 32
) -> tuple[Bundle, list[Piece]]:
    """Make a bundle from the numbers (text tokens, images) of its prompt and suffixes. Also return each row unpacked."""
    start, ends = piece(rng, *prompt, cell), [piece(rng, *sizes, cell) for sizes in suffixes]
    masks = []
    for end in ends:
        mask = [int(token < IMAGE_PAD and rng.random() < 0.7) for token in end.ids]
        if mask and not start.ids:
            mask[0] = 0
        masks.append(mask)
    frames = [clip for p in (start, *ends) for clip in p.clips]
    rows = [Piece(start.ids + end.ids, start.clips + end.clips) for end in ends]
    return Bundle(start.ids, [end.ids for end in ends], masks, frames), rows


def random_bundles(seed: int, images: bool = True, cell: int = 32) -> tuple[list[Bundle], list[list[Piece]]]:
    rng = np.random.default_rng(seed)

    def some(limit):
        return int(rng.integers(0, limit + 1)) if images else 0

    made = []
    for _ in range(rng.integers(1, 4)):
        suffixes = [(int(rng.integers(0, 14)), some(1)) for _ in range(rng.integers(1, 5))]
        made.append(bundle(rng, (int(rng.integers(0, 20)), some(3)), suffixes, cell))
    return [b for b, _ in made], [rows for _, rows in made]


def plain_inputs(model, ids: list[int], clips: list[Clip]) -> dict[str, torch.Tensor]:
    """Return plain transformers' inputs for one row."""
    row = torch.tensor([ids])
    given = {"input_ids": row, "attention_mask": torch.ones_like(row)}
    given["mm_token_type_ids"] = (row == model.config.image_token_id).int()
    if clips:
        tower = model.config.vision_config
        given["pixel_values"], given["image_grid_thw"] = patchify(clips, tower.patch_size, tower.spatial_merge_size)
    return given


def plain_logprobs(model, never_sampled, ids: list[int], clips: list[Clip], temperature: float = 1.0) -> torch.Tensor:
    """Return log pi of every token of a row except the first, from one plain forward without the banned ids: [L - 1]."""
    logits = model(**plain_inputs(model, ids, clips)).logits[0].float()
    logits = logits.index_fill(1, torch.tensor(never_sampled), -torch.inf)
    logprobs = (logits / (temperature or 1.0)).log_softmax(-1)[:-1]
    return logprobs.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@contextlib.contextmanager
def rates_of_updates() -> Iterator[list[float]]:
    """Collect the learning rate of each optimizer step inside the block."""
    rates = []
    with register_optimizer_step_post_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"])):
        yield rates


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    """Compare gradients by the norm of each difference."""
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        assert (found[name] - wanted).norm() <= tolerance * wanted.norm() + 1e-8, name


def plain_scores(model, bundles, rows_of, temperature: float = 1.0, banned=NEVER_SAMPLED):
    """Return what `policy(bundles)` must return, from each row alone and a softmax over a vocabulary without `banned`."""
    allowed = [token for token in range(VOCABULARY) if token not in banned]
    logprobs, entropies = [torch.zeros(0)], [torch.zeros(0)]
    for b, rows in zip(bundles, rows_of):
        for suffix, mask, row in zip(b.suffixes, b.masks, rows):
            wanted = [j for j, m in enumerate(mask) if m]
            if not wanted:
                continue
            logits = model(**plain_inputs(model, row.ids, row.clips)).logits[0]
            before = [len(b.prompt) + j - 1 for j in wanted]
            log = torch.log_softmax(logits[before][:, allowed] / temperature, -1)
            logprobs.append(log[range(len(wanted)), [allowed.index(suffix[j]) for j in wanted]])
            entropies.append(-(log.exp() * log).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


def varlen_reference(q, k, v, query_ends, key_ends, longest_query, longest_key, causal):
    """Compute variable-length attention as the kernels define it: per segment, causal from the bottom right."""
    out = torch.zeros_like(q)
    groups = q.shape[1] // k.shape[1]
    for i in range(len(query_ends) - 1):
        rows, columns = slice(*query_ends[i : i + 2].tolist()), slice(*key_ends[i : i + 2].tolist())
        n, m = rows.stop - rows.start, columns.stop - columns.start
        assert n <= longest_query and m <= longest_key
        keys, values = (x[columns].repeat_interleave(groups, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[rows], keys) * q.shape[-1] ** -0.5
        if causal:
            hidden = torch.arange(m)[None] > torch.arange(n)[:, None] + m - n
            scores = scores.masked_fill(hidden, -torch.inf)
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return out


def flash_attn_2(q, *args, causal, softmax_scale):
    assert softmax_scale == q.shape[-1] ** -0.5
    return varlen_reference(q, *args, causal)


def torch_varlen(q, *args, window_size, scale, enable_gqa):
    assert window_size in ((-1, 0), (-1, -1)) and scale == q.shape[-1] ** -0.5 and enable_gqa
    return varlen_reference(q, *args, window_size == (-1, 0))


def on_ranks(work, world: int, *args) -> None:
    """Run `work(*args)` on `world` gloo ranks, each in its own process. If one raises, the caller fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.start_processes(_rank, (world, port, work, args), world, start_method="forkserver")


def _rank(number: int, world: int, port: int, work, args) -> None:
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    init_distributed()
    assert (rank(), world_size()) == (number, world)
    work(*args)
    torch.distributed.destroy_process_group()


def assert_loaded_as_in_transformers(path: Path) -> tuple[Policy, PreTrainedModel, dict[str, torch.Tensor]]:
    """Compare all weights and buffers of a loaded policy with those of plain transformers. Return both, and the buffers."""
    policy, model = load(PolicyConfig(str(path)), train=False), plain(path)
    for kind in ("named_parameters", "named_buffers"):
        ours, expected = dict(getattr(policy.model, kind)()), dict(getattr(model, kind)())
        assert ours.keys() == expected.keys()
        assert all(torch.equal(ours[name], expected[name]) for name in expected)
    return policy, model, expected
