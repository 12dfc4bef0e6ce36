"""packing.py: the layout of bundles in one flat sequence, each shared prompt once. policy.py runs the model over it.

    packed = pack_bundles(bundles, image_pad, cell)          # ids, positions, segments, and where the targets are

    tokens      prompt a | suffix a1 | suffix a2 | prompt b | suffix b1 | ...
    positions   0 .. p-1 | p p+1 ... | p p+1 ... | 0 ...                         p: M-RoPE's position after the prompt
    attention   a2 sees prompt a and itself, causally; no token sees another suffix or bundle

For G suffixes of one prompt, the model runs prompt + G * suffix tokens instead of G * (prompt + suffix), and the vision tower
encodes the prompt's frames once. An SFT row is a bundle with one suffix, so it is packed the same way.

Letters in shapes: L tokens of the flat sequence, N targets among them.

Deliberately missing: an L x L mask over the sequence, and keys shared across bundles with equal prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from runtime.video import Clip


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
        # Text up to the next image, or to the end.
        text_end = pads[pads_placed] if pads_placed < len(pads) else len(ids)
        count = text_end - at
        positions[:, at:text_end] = position + np.arange(count)
        at = text_end
        position += count
        if pads_placed == len(pads):
            break
        # One image.
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
    if not any(map(len, bundles)):  # every rank must run the model: over one token, without targets
        bundles = [*bundles, Bundle([0], [], [], [])]
    ids, positions = [], []
    nothing = np.zeros(0, np.int64)
    predictors, targets = [nothing], [nothing]
    segments: list[Segment] = []
    end = 0  # tokens placed so far
    for bundle in bundles:
        images = []  # (rows, columns) of visual tokens
        for clip in bundle.clips:
            height, width = clip.pixels.shape[1:3]
            images += [(height // cell, width // cell)] * len(clip.pixels)

        # The prompt.
        prompt = np.array(bundle.prompt, np.int64)
        prompt_start, prompt_stop = end, end + len(prompt)
        placed, after_prompt, shown = rope_positions(prompt, images, image_pad, start=0)
        images = images[shown:]
        ids.append(prompt)
        positions.append(placed)
        segments.append(Segment(prompt_start, prompt_stop, prompt_start, prompt_start, is_prompt=True))
        end = prompt_stop

        # Its suffixes: each continues the prompt, not the suffix before it in the sequence.
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

    return Packed(
        ids=np.concatenate(ids),
        positions=np.concatenate(positions, axis=1),
        segments=[segment for segment in segments if segment.stop > segment.start],
        predictors=np.concatenate(predictors),
        targets=np.concatenate(targets),
    )


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
