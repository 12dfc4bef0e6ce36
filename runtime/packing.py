"""packing.py: rows that share a prompt, and their layout in one flat sequence. policy.py runs the model over it.

    bundles = bundle_rows(rows, budget)                      # rows with the same prompt, together
    packed = pack_bundles(bundles, image_pad, cell)          # ids, positions, segments, and where the targets are

    tokens      prompt a | row a1 | row a2 | prompt b | row b1 | ...
    positions   0 .. p-1 | p p+1 ... | p p+1 ... | 0 ...                         p: M-RoPE's position after the prompt
    attention   a2 sees prompt a and itself, causally; no token sees another row or bundle

For G rows of one prompt, the model runs prompt + G * row tokens instead of G * (prompt + row), and the vision tower encodes the
prompt's frames once. An SFT row continues an empty prompt, so it is packed the same way. So are the requests of the in-process
engine: rows without targets.

Letters in shapes: L tokens of the flat sequence, N targets among them.

Deliberately missing: an L x L mask over the sequence, and keys shared across bundles with equal prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from episode import Prompt, Trajectory
from runtime.video import Clip


@dataclass
class Bundle:
    """One prompt and the rows that continue it: the unit of a forward pass.

    Two answers to one question, of 2 and 3 tokens, whose log-probs are needed at N = 4 tokens (the first of `b` was forced):

        prompt = Prompt(ids=[5, 6, 7], clips=[overview])
        a = Trajectory(prompt, ids=[8, 9], mask=[1, 1])
        b = Trajectory(prompt, ids=[8, 4, 9], mask=[0, 1, 1])
        Bundle(prompt, rows=[a, b])
    """

    prompt: Prompt
    rows: list[Trajectory]

    def __len__(self) -> int:
        return len(self.prompt.ids) + sum(len(row.ids) for row in self.rows)

    @property
    def clips(self) -> list[Clip]:
        """The clips of the prompt, then of each row, in the order of their pads."""
        return self.prompt.clips + [clip for row in self.rows for clip in row.call_clips]


def bundle_rows(rows: Sequence[Trajectory], budget: int) -> list[Bundle]:
    """Put rows with the same prompt into bundles of at most `budget` tokens, unless a single row is longer. A row
    that does not fit begins a new bundle, which repeats the prompt."""
    bundles: list[Bundle] = []
    newest: dict[Prompt, Bundle] = {}
    for row in rows:
        bundle = newest.get(row.prompt)
        if bundle is None or len(bundle) + len(row.ids) > budget:
            bundle = Bundle(row.prompt, [])
            newest[row.prompt] = bundle
            bundles.append(bundle)
        bundle.rows.append(row)
    return bundles


class Segment(NamedTuple):
    """A prompt or a row: tokens [start, stop) of the flat sequence. Each token sees tokens [prompt_start, prompt_stop)
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
    loss_weights: np.ndarray  # float32 [N]: of the targets
    behaviour_logprobs: np.ndarray  # float32 [N]: their log-probs when they were sampled


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
        bundles = [*bundles, Bundle(Prompt([0], []), [])]
    ids, positions = [], []
    predictors, targets = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    loss_weights, behaviour_logprobs = [np.zeros(0, np.float32)], [np.zeros(0, np.float32)]
    segments: list[Segment] = []
    end = 0  # tokens placed so far
    for bundle in bundles:
        images = []  # (rows, columns) of visual tokens
        for clip in bundle.clips:
            height, width = clip.pixels.shape[1:3]
            images += [(height // cell, width // cell)] * len(clip.pixels)

        # The prompt.
        prompt = np.array(bundle.prompt.ids, np.int64)
        prompt_start, prompt_stop = end, end + len(prompt)
        placed, after_prompt, shown = rope_positions(prompt, images, image_pad, start=0)
        images = images[shown:]
        ids.append(prompt)
        positions.append(placed)
        segments.append(Segment(prompt_start, prompt_stop, prompt_start, prompt_start, is_prompt=True))
        end = prompt_stop

        # Its rows: each continues the prompt, not the row before it in the sequence.
        for row in bundle.rows:
            if not len(prompt) and row.mask[:1] == [1]:
                raise ValueError("without a prompt, nothing predicts the first token of a row: its mask must be 0")
            own = np.array(row.ids, np.int64)
            start = end
            end += len(own)
            placed, _, shown = rope_positions(own, images, image_pad, start=after_prompt)
            images = images[shown:]
            ids.append(own)
            positions.append(placed)
            segments.append(Segment(start, end, prompt_start, prompt_stop))

            # Its targets.
            before = np.arange(start, end) - 1
            if len(before):
                before[0] = prompt_stop - 1  # it follows the prompt, not the row placed before it
            wanted = np.flatnonzero(row.mask)
            predictors.append(before[wanted])
            targets.append(own[wanted])
            loss_weights.append(take(row.loss_weights, wanted))
            behaviour_logprobs.append(take(row.logprobs, wanted))
        if images:
            raise ValueError(f"a bundle has {len(images)} more frames than images among its tokens")

    return Packed(
        ids=np.concatenate(ids),
        positions=np.concatenate(positions, axis=1),
        segments=[segment for segment in segments if segment.stop > segment.start],
        predictors=np.concatenate(predictors),
        targets=np.concatenate(targets),
        loss_weights=np.concatenate(loss_weights),
        behaviour_logprobs=np.concatenate(behaviour_logprobs),
    )


def take(column: Sequence[float] | np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return the entries of these tokens in a row's column, float32; zeros if the column is empty."""
    if not len(column):
        return np.zeros(len(tokens), np.float32)
    return np.asarray(column, np.float32)[tokens]


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
