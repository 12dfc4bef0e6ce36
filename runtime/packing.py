"""packing.py: pack bundles into one flat sequence, each shared prompt once, with attention that keeps them apart.

    packed = pack_bundles(bundles, image_pad, cell)          # ids, positions, segments, and where the targets are
    hidden = run_text_model(model, packed, visual, kernel)   # [L, H]; the forward of policy.py and inprocess.py

    tokens      prompt a | suffix a1 | suffix a2 | prompt b | suffix b1 | ...
    positions   0 .. p-1 | p p+1 ... | p p+1 ... | 0 ...                         p: M-RoPE's position after the prompt
    attention   a2 sees prompt a and itself, causally; no token sees another suffix or bundle

For G suffixes of one prompt, the model runs prompt + G * suffix tokens instead of G * (prompt + suffix), and the vision tower
encodes the prompt's frames once. An SFT row is a bundle with one suffix, so it is packed the same way.

Letters in shapes: L tokens of the flat sequence, N targets among them, M visual tokens, H hidden, D DeepStack levels.

Deliberately missing: an L x L mask over the sequence, and keys shared across bundles with equal prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from runtime.video import Clip
from runtime.visual import patchify

# ------------------------------------------------------------------------------------------------ layout


@dataclass
class Bundle:
    """One prompt and the suffixes that continue it: the unit of training for SFT and RL.

    Two answers to one question, of 2 and 3 tokens, and the log-probs that they need (N = 4; the first token was forced):

        Bundle(prompt=[5, 6, 7], suffixes=[[8, 9], [8, 4, 9]], masks=[[1, 1], [0, 1, 1]], clips=[overview])
    """

    prompt: list[int]
    suffixes: list[list[int]]
    masks: list[list[int]]  # per suffix: 1 on the tokens whose log-probs are computed
    clips: list[Clip]  # of the prompt, then of each suffix, in the order of their pads

    @classmethod
    def conversation(cls, ids: list[int], mask: list[int], clips: list[Clip]) -> "Bundle":
        """Return the bundle of one whole conversation: an empty prompt and a single suffix."""
        return cls([], [ids], [mask], clips)

    def __len__(self) -> int:
        return len(self.prompt) + sum(map(len, self.suffixes))


class Segment(NamedTuple):
    """A prompt or a suffix: tokens [start, stop) of the flat sequence. Each token sees tokens [prompt_start, prompt_stop)
    and the segment's own tokens up to itself. For a prompt, [prompt_start, prompt_stop) is empty."""

    start: int
    stop: int
    prompt_start: int
    prompt_stop: int
    is_prompt: bool = False

    def key_positions(self) -> np.ndarray:
        """Return the indices of all keys that the segment's last token sees."""
        return np.concatenate([np.arange(self.prompt_start, self.prompt_stop), np.arange(self.start, self.stop)])


@dataclass
class Packed:
    """Several bundles as one flat sequence."""

    ids: np.ndarray  # int64 [L]
    positions: np.ndarray  # int64 [3, L]: M-RoPE's time, height, width
    segments: list[Segment]
    predictors: np.ndarray  # int64 [N]: index of the token before each target, whose hidden state predicts it
    targets: np.ndarray  # int64 [N]: ids of the targets


def rope_positions(
    ids: np.ndarray, images: Sequence[tuple[int, int]], image_pad: int, start: int
) -> tuple[np.ndarray, int, int]:
    """Return the M-RoPE positions [3, len(ids)] of a piece that begins at position `start`, the position after the piece,
    and the number of images in it.

    A text token at p has position (p, p, p). Token (row, column) of an image at p has (p, p + row, p + column), and the
    text continues at p + max(rows, columns). `images` holds (rows, columns); it can include images of later pieces."""
    positions = np.empty((3, len(ids)), np.int64)
    pads = np.flatnonzero(ids == image_pad)
    at = pads_placed = images_placed = 0
    position = start
    while at < len(ids):
        # text up to the next image, or to the end
        text_end = pads[pads_placed] if pads_placed < len(pads) else len(ids)
        count = text_end - at
        positions[:, at:text_end] = position + np.arange(count)
        at = text_end
        position += count
        if pads_placed == len(pads):
            break
        # one image
        rows, columns = images[images_placed] if images_placed < len(images) else (0, 0)
        count = rows * columns
        stop = at + count
        if count == 0 or stop > len(ids) or not (ids[at:stop] == image_pad).all():
            raise ValueError(
                f"image pads from token {at}: expected {rows} x {columns} for the next frame. Give a bundle's frames "
                "in the order of their pads, and never cut a sequence inside an image"
            )
        row, column = np.indices((rows, columns)).reshape(2, count)
        positions[0, at:stop] = position
        positions[1, at:stop] = position + row
        positions[2, at:stop] = position + column
        at = stop
        pads_placed += count
        images_placed += 1
        position += max(rows, columns)
    return positions, position, images_placed


def pack_bundles(bundles: Sequence[Bundle], image_pad: int, cell: int) -> Packed:
    """Pack bundles into one sequence. `cell`: side in pixels of the square that becomes one visual token."""
    # Each list begins with an empty piece, so that np.concatenate works even without bundles.
    nothing = np.zeros(0, np.int64)
    ids, predictors, targets = [nothing], [nothing], [nothing]
    positions = [np.zeros((3, 0), np.int64)]
    segments: list[Segment] = []
    end = 0  # tokens placed so far
    for bundle in bundles:
        images = []  # (rows, columns) of visual tokens
        for clip in bundle.clips:
            height, width = clip.pixels.shape[1:3]
            images += [(height // cell, width // cell)] * len(clip.pixels)

        # the prompt
        prompt = np.array(bundle.prompt, np.int64)
        prompt_start, prompt_stop = end, end + len(prompt)
        placed, after_prompt, shown = rope_positions(prompt, images, image_pad, start=0)
        images = images[shown:]
        ids.append(prompt)
        positions.append(placed)
        segments.append(Segment(prompt_start, prompt_stop, prompt_start, prompt_start, is_prompt=True))
        end = prompt_stop

        # its suffixes: each continues the prompt, not the suffix before it in the sequence
        for suffix, mask in zip(bundle.suffixes, bundle.masks, strict=True):
            if not bundle.prompt and mask[:1] == [1]:
                raise ValueError("without a prompt, nothing predicts the first token of a row: its mask must be 0")
            suffix = np.array(suffix, np.int64)
            start = end
            end += len(suffix)
            placed, _, shown = rope_positions(suffix, images, image_pad, start=after_prompt)
            images = images[shown:]
            ids.append(suffix)
            positions.append(placed)
            segments.append(Segment(start, end, prompt_start, prompt_stop))
            before = np.arange(start, end) - 1
            if len(before):
                before[0] = prompt_stop - 1  # it follows the prompt, not the suffix placed before it
            wanted = np.flatnonzero(mask)
            predictors.append(before[wanted])
            targets.append(suffix[wanted])
        if images:
            raise ValueError(f"a bundle has {len(images)} more frames than images among its tokens")

    if end == 0:  # every rank must run the model: without bundles, run it over one token and no targets
        ids, positions, segments = [np.zeros(1, np.int64)], [np.zeros((3, 1), np.int64)], [Segment(0, 1, 0, 0)]
    return Packed(
        ids=np.concatenate(ids),
        positions=np.concatenate(positions, axis=1),
        segments=[segment for segment in segments if segment.stop > segment.start],
        predictors=np.concatenate(predictors),
        targets=np.concatenate(targets),
    )


# ------------------------------------------------------------------------------------------------ attention


class KeyLayout:
    """The keys that each segment's queries see, as the kernel needs them. All text blocks of a forward pass share one layout.

    sdpa runs once per segment and needs a mask for each suffix. The other kernels run once for all segments and need each
    segment's keys side by side, so each suffix repeats its prompt's keys."""

    def __init__(self, segments: list[Segment], kernel: str, device: torch.device):
        self.segments, self.kernel = segments, kernel
        if kernel == "sdpa":
            self.masks = []  # by segment; None: causal
            for segment in segments:
                prompt = segment.prompt_stop - segment.prompt_start
                own = segment.stop - segment.start
                mask = None
                if prompt:  # see all of it, and the suffix up to the query (`is_causal` aligns top-left)
                    mask = torch.ones(own, prompt + own, dtype=torch.bool, device=device).tril(prompt)
                self.masks.append(mask)
            return
        keys = []
        query_ends, key_ends = [0], [0]  # of the segments, one after another
        for segment in segments:
            keys.append(segment.key_positions())
            query_ends.append(query_ends[-1] + segment.stop - segment.start)
            key_ends.append(key_ends[-1] + len(keys[-1]))
        self.keys = torch.from_numpy(np.concatenate(keys)).to(device)
        self.query_ends = torch.tensor(query_ends, dtype=torch.int32, device=device)
        self.key_ends = torch.tensor(key_ends, dtype=torch.int32, device=device)
        self.longest_query = max(segment.stop - segment.start for segment in segments)
        self.longest_key = max(map(len, keys))


def group_packed_attention(module, query, key, value, attention_mask, scaling, key_layout: KeyLayout, **_):
    """Implement transformers' attention interface for the text blocks: [1, heads, L, size] -> [1, L, heads, size].
    `run_text_model` passes `key_layout`, and transformers passes it on to every block."""
    if key_layout.kernel == "sdpa":
        return _attend_by_segment(query, key, value, key_layout, scaling), None
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [L, heads, size]
    key, value = key[key_layout.keys], value[key_layout.keys]
    ends = (key_layout.query_ends, key_layout.key_ends, key_layout.longest_query, key_layout.longest_key)
    return _attend_in_one_call(key_layout.kernel, query, key, value, ends, scaling, causal=True)[None], None


def frames_flash_attention(
    module, query, key, value, attention_mask, scaling, cu_seq_lens_q, frame_kernel: str, longest_frame: int, **_
):
    """Attend within each frame, many frames in one call: [1, heads, patches, size] -> [1, patches, heads, size].
    `encode_frames` passes the kernel and the number of patches of the largest frame. In most blocks of Qwen2.5-VL's tower,
    `cu_seq_lens_q` has the ends of windows instead of frames."""
    if frame_kernel != "sdpa":
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [patches, heads, size]
        ends = (cu_seq_lens_q, cu_seq_lens_q, longest_frame, longest_frame)
        return _attend_in_one_call(frame_kernel, query, key, value, ends, scaling, causal=False)[None], None

    # SDPA needs sequences of one length in a batch, so batch consecutive frames (or windows) of equal size.
    out = []
    start = 0
    lengths, counts = cu_seq_lens_q.diff().unique_consecutive(return_counts=True)
    for length, count in zip(lengths.tolist(), counts.tolist()):
        stop = start + count * length
        batch = [x[0, :, start:stop].unflatten(1, (count, length)).transpose(0, 1) for x in (query, key, value)]
        attended = F.scaled_dot_product_attention(*batch, scale=scaling)  # [count, heads, length, size]
        out.append(attended.transpose(1, 2).flatten(0, 1))  # [count * length, heads, size]
        start = stop
    return torch.cat(out)[None], None


def _attend_in_one_call(kernel: str, query, key, value, ends: tuple, scaling: float, causal: bool) -> Tensor:
    """Run one kernel over all segments. A causal mask is aligned bottom-right: the last query sees all keys."""
    if kernel == "flash":
        from flash_attn import flash_attn_varlen_func

        return flash_attn_varlen_func(query, key, value, *ends, causal=causal, softmax_scale=scaling)
    from torch.nn.attention.varlen import varlen_attn

    window = (-1, 0) if causal else (-1, -1)
    return varlen_attn(query, key, value, *ends, scale=scaling, window_size=window, enable_gqa=True)


def _attend_by_segment(query: Tensor, key: Tensor, value: Tensor, layout: KeyLayout, scaling: float) -> Tensor:
    """Call SDPA once per segment, with the keys of its prompt and its own."""
    out = []
    for segment, mask in zip(layout.segments, layout.masks):
        own, prompt = slice(segment.start, segment.stop), slice(segment.prompt_start, segment.prompt_stop)
        keys = torch.cat([key[:, :, prompt], key[:, :, own]], dim=2)
        values = torch.cat([value[:, :, prompt], value[:, :, own]], dim=2)
        causal = mask is None
        attended = F.scaled_dot_product_attention(
            query[:, :, own], keys, values, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=True
        )  # [1, heads, stop - start, size]
        out.append(attended.transpose(1, 2))
    return torch.cat(out, dim=1)


def pick_kernel(device: torch.device, dtype: torch.dtype) -> str:
    """Return the fastest kernel that runs here: FlashAttention 2, torch's own, or one SDPA call per segment."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return "sdpa"
    try:  # flash-attn-4 installs a folder of the same name, so look for the function itself
        from flash_attn import flash_attn_varlen_func  # noqa: F401

        return "flash"
    except ImportError:
        return "varlen"


# ------------------------------------------------------------------------------------------------ the model


def matmul_fp32(left: Tensor, right: Tensor) -> Tensor:
    """Multiply [m, k] by [k, n] with an fp32 result. bf16 has 8 bits: it would round a logit above 16 by up to 0.06."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)  # not differentiable
    return left.float() @ right.float()


def prepare_tower(vision) -> None:
    """Give the vision tower our attention, and embed its flattened patches with a matrix product, since Conv3d is several
    times slower."""
    # transformers passes the frames' ends to functions whose name contains "flash", and calls others once per frame. Set
    # the name after construction: a constructor that reads "flash" looks for the flash-attn package.
    AttentionInterface.register("frames_flash", frames_flash_attention)
    vision.config._attn_implementation = "frames_flash"
    embed = vision.patch_embed
    embed.forward = lambda x: F.linear(x.to(embed.proj.weight.dtype), embed.proj.weight.flatten(1), embed.proj.bias)


def encode_frames(vision, clips: Sequence[Clip], patch: int, merge: int, kernel: str) -> Tensor:
    """Return [1 + D, M, H]: the embeddings that replace the frames' pads, then the vision tower's D DeepStack levels."""
    patches, grid = patchify(clips, patch, merge, vision.device)
    longest = int(grid[:, 1:].prod(dim=1).max())  # computed on the host: on the GPU, each layer would wait for it
    # Merge consecutive frames of one size into one entry, (frames, rows, columns). The tower then computes their positions
    # once. Each frame still attends only to itself.
    runs, counts = grid.unique_consecutive(dim=0, return_counts=True)
    runs[:, 0] = counts
    encoded = vision(patches, grid_thw=runs.to(vision.device), frame_kernel=kernel, longest_frame=longest)
    return torch.stack([encoded.pooler_output, *getattr(encoded, "deepstack_features", [])])


def count_levels(vision) -> int:
    """Return 1 + D. A tower without DeepStack, as Qwen2.5-VL's, has D = 0."""
    return 1 + len(getattr(vision.config, "deepstack_visual_indexes", []))


def run_text_model(model, packed: Packed, visual: Tensor | None, kernel: str, **cache) -> Tensor:
    """Run the text model over a packed sequence. Return its last hidden states [L, H]. `visual` [1 + D, M, H] comes
    from `encode_frames`; None: no frames."""
    text = model.model.language_model
    device = text.norm.weight.device
    ids = torch.from_numpy(packed.ids).to(device)[None]  # [1, L]
    embeds = text.embed_tokens(ids)  # [1, L, H]
    levels = {}
    if visual is not None:  # replace the frames' pads by their embeddings
        pads = ids == model.config.image_token_id  # [1, L]
        embeds = embeds.masked_scatter(pads[..., None], visual[0].to(embeds.dtype))
        if len(visual) > 1:  # DeepStack adds its levels there
            levels = {"visual_pos_masks": pads, "deepstack_visual_embeds": list(visual[1:])}
    return text(
        inputs_embeds=embeds,
        # Three rows: time, height, width. transformers reads a fourth as text positions, and splits where they restart.
        position_ids=torch.from_numpy(packed.positions).to(device)[:, None],  # [3, 1, L]
        key_layout=KeyLayout(packed.segments, kernel, device),
        **levels,
        **cache,
    ).last_hidden_state[0]


# ------------------------------------------------------------------------------------------------ micro-batches


def best_fit(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Group rows into micro-batches of at most `limit` tokens by best-fit decreasing: put each row, longest first, where it
    leaves the least room. Return row indices. No row is split; a row longer than `limit` is alone."""
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        wide_enough = [b for b in range(len(bins)) if room[b] >= lengths[i]]
        if wide_enough:
            best = min(wide_enough, key=lambda b: room[b])
        else:
            best = len(bins)
            bins.append([])
            room.append(limit)
        bins[best].append(i)
        room[best] -= lengths[i]
    return bins
