"""packing.py: several bundles as one flat sequence, each shared prompt once, and the attention that keeps them apart.

    packed = pack_bundles(bundles, image_pad, cell)          # ids, positions, segments, and where the targets are
    layout = KeyLayout(packed.segments, kernel, device)      # what group_packed_attention needs of it

    tokens      prompt a | suffix a1 | suffix a2 | prompt b | suffix b1 | ...
    positions   0 .. p-1 | p p+1 ... | p p+1 ... | 0 ...                         p: M-RoPE's position after the prompt
    attention   a2 sees prompt a and itself, causally; nothing looks into another suffix or bundle

With G rollouts of a prompt of P tokens and suffixes of S, the model runs P + G S tokens instead of G (P + S), and the
vision tower sees the prompt's frames once. An SFT row is a bundle with one suffix, so its packing is the same thing.

Deliberately missing: a mask over the pack (L x L), and keys shared across bundles with equal prompts.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.config import ConfigError
from runtime.contract import Bundle

# ------------------------------------------------------------------------------------------------ layout


class Segment(NamedTuple):
    """Tokens [start, stop) of the flat sequence; they see tokens [prompt, prompt_stop) and, causally, themselves."""

    start: int
    stop: int
    prompt: int
    prompt_stop: int


@dataclass
class Packed:
    """Several bundles as one flat sequence."""

    ids: np.ndarray  # int64 [L]
    positions: np.ndarray  # int64 [3, L]: M-RoPE's time, height, width
    segments: list[Segment]
    sources: np.ndarray  # int64 [N]: where each target's log-prob is computed, the token before it
    targets: np.ndarray  # int64 [N]: ids


def rope_positions(ids: np.ndarray, images: Iterator[tuple[int, int]], image_pad: int, start: int):
    """M-RoPE positions [3, len(ids)] of a piece that begins at position `start`, and the position after it.

    A text token at p stands at (p, p, p). Token (row, column) of an image stands at (p, p + row, p + column), and the
    text goes on at p + max(rows, columns). `images` yields (rows, columns) and may reach beyond this piece."""
    positions = np.empty((3, len(ids)), np.int64)
    pads = np.flatnonzero(ids == image_pad)
    at, used, position = 0, 0, start
    while at < len(ids):
        text = (pads[used] if used < len(pads) else len(ids)) - at
        positions[:, at : at + text] = position + np.arange(text)
        at, position = at + text, position + text
        if used < len(pads):
            rows, columns = next(images, (0, 0))
            n = rows * columns
            if n == 0 or not (ids[at : at + n] == image_pad).all() or at + n > len(ids):
                raise ValueError(
                    f"image pads from token {at}: expected {rows} x {columns} for the next frame. A bundle's frames "
                    "must be those of its pads, in order; never cut a sequence inside an image"
                )
            grid = np.indices((rows, columns)).reshape(2, n)
            positions[:, at : at + n] = position + np.concatenate([np.zeros((1, n), np.int64), grid])
            at, used, position = at + n, used + n, position + max(rows, columns)
    return positions, position


def pack_bundles(bundles: Sequence[Bundle], image_pad: int, cell: int) -> Packed:
    """Lay bundles out as one sequence. `cell`: side in pixels of what becomes one visual token."""
    ids, positions, sources, targets = ([np.zeros(0, np.int64)] for _ in range(4))
    positions[0] = np.zeros((3, 0), np.int64)
    segments: list[Segment] = []
    end = 0
    for bundle in bundles:
        sizes = [
            (clip.pixels.shape[1] // cell, clip.pixels.shape[2] // cell) for clip in bundle.frames for _ in clip.pixels
        ]
        images = iter(sizes)
        prompt = np.array(bundle.prompt, np.int64)
        placed, after_prompt = rope_positions(prompt, images, image_pad, start=0)
        start, end = end, end + len(prompt)
        prompt_at = (start, end)
        ids.append(prompt)
        positions.append(placed)
        segments.append(Segment(*prompt_at, start, start))
        for suffix, mask in zip(bundle.suffixes, bundle.masks, strict=True):
            if len(mask) != len(suffix):
                raise ValueError(f"a suffix of {len(suffix)} tokens has a mask of {len(mask)}")
            if not bundle.prompt and mask[:1] == [1]:
                raise ValueError("nothing stands before the first token of a row without a prompt: its mask must be 0")
            suffix, wanted = np.array(suffix, np.int64), np.flatnonzero(mask)
            start, end = end, end + len(suffix)
            before = np.arange(start, end) - 1
            before[:1] = prompt_at[1] - 1  # it follows the prompt, not the suffix that is laid out before it
            ids.append(suffix)
            positions.append(rope_positions(suffix, images, image_pad, start=after_prompt)[0])
            segments.append(Segment(start, end, *prompt_at))
            sources.append(before[wanted])
            targets.append(suffix[wanted])
        if unused := sum(1 for _ in images):
            raise ValueError(f"a bundle has {unused} frames more than images among its tokens")
    if not end:  # every rank runs the model, also one that has nothing to do: over one token that nobody asks about
        ids, positions, segments = [np.zeros(1, np.int64)], [np.zeros((3, 1), np.int64)], [Segment(0, 1, 0, 0)]
    segments = [segment for segment in segments if segment.stop > segment.start]
    flat_ids, flat_sources, flat_targets = map(np.concatenate, (ids, sources, targets))
    return Packed(flat_ids, np.concatenate(positions, axis=1), segments, flat_sources, flat_targets)


# ------------------------------------------------------------------------------------------------ attention


class KeyLayout:
    """Which keys each query sees, in the form that the kernel wants; made once per pass, used by every text block."""

    def __init__(self, segments: list[Segment], kernel: str, where: torch.device):
        self.segments, self.kernel = segments, kernel
        if kernel == "sdpa":
            self.masks = [_suffix_mask(s, where) if s.prompt_stop > s.prompt else None for s in segments]
            return
        # One call for all segments, whose keys must be consecutive: each suffix repeats its prompt's.
        runs = [np.r_[s.prompt : s.prompt_stop, s.start : s.stop] for s in segments]
        queries, keys = [s.stop - s.start for s in segments], [len(run) for run in runs]
        self.keys = torch.from_numpy(np.concatenate(runs)).to(where)
        self.query_ends, self.key_ends = (
            torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32, device=where) for n in (queries, keys)
        )
        self.longest_query, self.longest_key = max(queries), max(keys)


def group_packed_attention(module, query, key, value, attention_mask, scaling, key_layout: KeyLayout, **_):
    """transformers' attention interface: [1, heads, L, size] -> [1, L, heads, size], for text blocks only.

    `key_layout` comes down from Policy.forward as a keyword argument of every block; its name is nobody else's."""
    if key_layout.kernel == "sdpa":
        return _attend_by_segment(query, key, value, key_layout, scaling), None
    if key_layout.kernel == "flash":
        from flash_attn import flash_attn_varlen_func as attend

        options = {"causal": True, "softmax_scale": scaling}
    else:
        from torch.nn.attention.varlen import varlen_attn as attend

        options = {"window_size": (-1, 0), "scale": scaling, "enable_gqa": True}
    # Both align the causal mask bottom-right: the last query of a segment sees all of its keys.
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [L, heads, size]
    ends = (key_layout.query_ends, key_layout.key_ends, key_layout.longest_query, key_layout.longest_key)
    return attend(query, key[key_layout.keys], value[key_layout.keys], *ends, **options)[None], None


def _attend_by_segment(query: Tensor, key: Tensor, value: Tensor, layout: KeyLayout, scaling: float) -> Tensor:
    out = []
    for (start, stop, prompt, prompt_stop), mask in zip(layout.segments, layout.masks):
        keys, values = key[:, :, start:stop], value[:, :, start:stop]
        if mask is not None:
            keys = torch.cat([key[:, :, prompt:prompt_stop], keys], dim=2)
            values = torch.cat([value[:, :, prompt:prompt_stop], values], dim=2)
        attended = F.scaled_dot_product_attention(
            query[:, :, start:stop],
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=True,
        )  # [1, heads, stop - start, size]
        out.append(attended.transpose(1, 2))
    return torch.cat(out, dim=1)


def _suffix_mask(segment: Segment, where: torch.device) -> Tensor:
    """[suffix, prompt + suffix]: all of the prompt, and the suffix up to the query. (`is_causal` would align top-left.)"""
    seen, own = segment.prompt_stop - segment.prompt, segment.stop - segment.start
    return torch.ones(own, seen + own, dtype=torch.bool, device=where).tril(seen)


def pick_kernel(wanted: str, where: torch.device, dtype: torch.dtype) -> str:
    """The attention kernel that `wanted` means on this machine."""
    try:  # the package flash-attn-4 fills a folder of the same name, so ask for the function itself
        from flash_attn import flash_attn_varlen_func  # noqa: F401

        flash = True
    except ImportError:
        flash = False
    fits = where.type == "cuda" and dtype == torch.bfloat16
    usable = {"flash": flash and fits, "varlen": fits, "sdpa": True}
    if wanted == "auto":
        return next(kernel for kernel, ok in usable.items() if ok)
    if not usable[wanted]:
        raise ConfigError(
            f"policy.attention = {wanted!r} needs {'flash-attn 2, ' * (wanted == 'flash')}a GPU and bf16, "
            f"this is {where.type} in {dtype}; use `auto`"
        )
    return wanted


# ------------------------------------------------------------------------------------------------ micro-batches


def best_fit(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Best-fit decreasing: indices of rows that share a micro-batch of at most `limit` tokens; a row is never split, and
    one that is longer stands alone."""
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        best = min((b for b in range(len(bins)) if room[b] >= lengths[i]), key=lambda b: room[b], default=None)
        if best is None:
            best = len(bins)
            bins.append([])
            room.append(limit)
        bins[best].append(i)
        room[best] -= lengths[i]
    return bins
