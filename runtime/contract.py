"""contract.py: what the model sees, byte for byte. One visual contract and one way to turn messages into tokens.

SFT, RL, evaluation and `ask` all pass through the two classes here, so a frame has the same pixels and a prompt the
same ids wherever it is used, and a checkpoint carries the contract it was trained with:

    contract = VisualContract()                    # 65,536 pixels a frame = 64 tokens, stamped images
    contract.check(checkpoint_dir)                 # refuses a checkpoint that was trained with another one
    renderer = Renderer(load_tokenizer(checkpoint_dir), contract)
    rendered = renderer.render(messages, tools)    # ids with expanded image pads, assistant mask, frames
    pixel_values, grid = patchify(rendered.frames) # float32 [patches, 1536], int64 [frames, 3]

A message is {"role": system|user|assistant|tool, "content": str | list of str and Frames}. Each frame becomes its time
stamp followed by an image: `<12.5 seconds><|vision_start|><|image_pad|>...<|vision_end|>`.

Text from outside (users and tools: questions, options, subtitles, summaries) can never become a control token: every
added token that it spells is tokenised as ordinary characters, unless the text is our own (`Live`). Assistant text may
hold the tags (`<think>`, ...), which are not special tokens, but cannot end its own turn.

Deliberately missing: the video channel of Qwen3-VL (frame pairs), torchvision, the Hugging Face processor classes.
"""

import dataclasses
import functools
import itertools
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from runtime.video import Frames

TEMPORAL_PATCH = 2  # an image is one temporal slot: the frame stands in it twice
VISION_START, IMAGE_PAD, VISION_END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
NEVER_SAMPLED = (IMAGE_PAD, "<|video_pad|>", VISION_START, VISION_END)  # banned in the engine, masked in the softmax
END_OF_TURN = "<|im_end|>"


class ContractError(ValueError):
    """Two parts of the system would show the model different things."""


@dataclass(frozen=True)
class VisualContract:
    """How a video becomes model input. Saved into every checkpoint as visual.json; a mismatch refuses to run."""

    frame_pixels: int = 65_536
    """Least area of a frame. 65,536 = 64 tokens, and the smallest image that Qwen3-VL's processor does not enlarge."""
    patch: int = 16
    """Side of a vision patch in pixels (14 for Qwen2.5-VL)."""
    merge: int = 2
    """merge x merge patches become one token."""
    channel: Literal["image"] = "image"
    """Frames are images, each preceded by its stamp; the same for overview and crops."""
    stamp: str = "<{:.1f} seconds>"
    """The text before each frame: the true time of the decoded frame. Other models read `{clock}` (HH:MM:SS) or `{i}`
    (the frame's place in its clip); empty: no stamps."""
    overview_frames: int = 64
    """K: frames of the overview unless gating draws another number."""
    crop_fps: float = 1.0
    """Frames per second of a crop ..."""
    crop_min_frames: int = 1
    crop_max_frames: int = 16
    """... and its least and largest number of frames."""

    def __post_init__(self):
        if self.frame_pixels < self.cell**2:
            raise ValueError(f"frame_pixels = {self.frame_pixels}: at least one token, {self.cell**2} pixels")
        if not 1 <= self.crop_min_frames <= self.crop_max_frames:
            raise ValueError(
                f"crop_min_frames = {self.crop_min_frames}: must lie in 1 ... crop_max_frames = {self.crop_max_frames}"
            )
        if self.overview_frames < 1 or self.crop_fps <= 0:
            raise ValueError(f"overview_frames = {self.overview_frames}, crop_fps = {self.crop_fps}: must be positive")
        try:
            self.stamp.format(0.0, i=0, clock="")
        except (LookupError, ValueError):
            raise ValueError(f"stamp = {self.stamp!r}: may hold seconds as {{:.1f}}, {{clock}} and {{i}}") from None

    @property
    def cell(self) -> int:
        """Side in pixels of what becomes one token."""
        return self.patch * self.merge

    def frame_size(self, width: int, height: int) -> tuple[int, int]:
        """The (width, height) at which a video is decoded: multiples of `cell`, area >= frame_pixels, so that every
        later resize (transformers', SGLang's) is the identity."""
        scale = math.sqrt(self.frame_pixels / (width * height))
        # The epsilon keeps an exact fit (256 x 256) from rounding up to one cell more.
        columns, rows = (max(1, math.ceil(side * scale / self.cell - 1e-9)) for side in (width, height))
        return columns * self.cell, rows * self.cell

    def frame_tokens(self, width: int, height: int) -> int:
        """Visual tokens of one decoded frame of this size."""
        return (width // self.cell) * (height // self.cell)

    def processor_size(self) -> dict[str, int]:
        """The image processor's limits under which our frames pass unchanged (Qwen names areas "edges")."""
        return {"shortest_edge": self.frame_pixels, "longest_edge": max(16_777_216, self.frame_pixels)}

    @classmethod
    def load(cls, checkpoint: str | Path) -> "VisualContract":
        """The contract that a checkpoint carries; the default one of a stock checkpoint."""
        path = Path(checkpoint) / "visual.json"
        saved = _read_json(path) or {}
        try:
            return cls(**saved)
        except (TypeError, ValueError) as error:  # a key of another version, an impossible value
            raise ContractError(f"{path}: {error}; correct it, or use the version of the code that wrote it") from None

    def save(self, checkpoint: str | Path) -> None:
        """Write the contract beside the weights, and the same limits where transformers and SGLang read them."""
        checkpoint = Path(checkpoint)
        (checkpoint / "visual.json").write_text(json.dumps(dataclasses.asdict(self), indent=1))
        path = checkpoint / "preprocessor_config.json"
        stock = {"image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen3VLProcessor"}
        processor = (_read_json(path) or stock) | self._processor_constants() | {"size": self.processor_size()}
        path.write_text(json.dumps(processor, indent=1))

    def check(self, checkpoint: str | Path) -> None:
        """Raise ContractError if the checkpoint was made for other pixels. A stock checkpoint has no visual.json: then
        only its processor's constants must agree (its size limits are overridden when SGLang is started)."""
        checkpoint = Path(checkpoint)
        saved, processor = _read_json(checkpoint / "visual.json"), _read_json(checkpoint / "preprocessor_config.json")
        limits = {} if saved is None else {"size": self.processor_size()}
        pairs = [(dataclasses.asdict(self), saved), (self._processor_constants() | limits, processor)]
        wrong = [
            f"{key}: this run has {value!r}, the checkpoint {found.get(key)!r}"
            for expected, found in pairs
            for key, value in expected.items()
            if found is not None and found.get(key) != value
        ]
        if wrong:
            raise ContractError(
                f"{checkpoint} was made under another visual contract ({'; '.join(wrong)}). "
                "Set the run's `visual` keys to the checkpoint's values, or train a checkpoint under the new ones."
            )

    def _processor_constants(self) -> dict[str, Any]:
        sizes = {"patch_size": self.patch, "merge_size": self.merge, "temporal_patch_size": TEMPORAL_PATCH}
        half = [0.5, 0.5, 0.5]  # what `patchify` normalises with; Qwen2.5-VL (patch 14) is only ever served
        return sizes | ({"image_mean": half, "image_std": half} if self.patch == 16 else {})


def _read_json(path: Path) -> dict | None:
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    except ValueError as error:
        raise ContractError(f"{path}: not readable: {error}; copy the checkpoint here again") from None


# 0 ... 255 -> [-1, 1], rounded exactly as transformers' PIL image processor rounds (rescale in float64, then float32).
_NORMALISED = ((np.arange(256) * (1 / 255)).astype(np.float32) - np.float32(0.5)) / np.float32(0.5)


def patchify(frames: list[Frames], patch: int = 16, merge: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Frames -> (pixel_values float32 [patches, 3 * 2 * patch * patch], grid int64 [frames, 3] = (1, rows, columns)).

    Patches of one token stand together (merge x merge blocks, row by row), as Qwen's vision tower expects them."""
    values, grids = [], []
    for clip in frames:
        n, height, width, _ = clip.pixels.shape
        rows, columns = height // patch, width // patch
        x = clip.pixels.reshape(n, rows // merge, merge, patch, columns // merge, merge, patch, 3)
        x = x.transpose(0, 1, 4, 2, 5, 7, 3, 6)  # [n, rows/m, columns/m, m, m, 3, patch, patch]
        x = x.reshape(-1, patch * patch).repeat(TEMPORAL_PATCH, axis=0)  # bytes are moved, floats written once
        values.append(_NORMALISED[x].reshape(n * rows * columns, -1))
        grids += [[1, rows, columns]] * n
    if not values:
        return np.zeros((0, 3 * TEMPORAL_PATCH * patch * patch), np.float32), np.zeros((0, 3), np.int64)
    return np.concatenate(values), np.array(grids, np.int64)


def load_tokenizer(checkpoint: str | Path):
    from transformers import AutoTokenizer  # 2 s of imports that `--help` does not need

    try:
        return AutoTokenizer.from_pretrained(str(checkpoint))
    except Exception as error:  # of the tokenizers library, whose own kind of error is Exception itself
        raise ContractError(f"{checkpoint}: its tokenizer is not readable: {error}; copy it here again") from None


@dataclass
class Rendered:
    """A conversation as the model reads it."""

    ids: list[int]  # image pads expanded: one per visual token
    mask: list[int]  # 1 on assistant tokens, their end-of-turn included: what SFT learns
    frames: list[Frames]  # in the order of their pads


@dataclass
class Bundle:
    """One prompt and the suffixes that continue it; a lone conversation is one suffix of an empty prompt."""

    prompt: list[int]
    suffixes: list[list[int]]
    masks: list[list[int]]  # per suffix: 1 on the tokens whose log-probs are wanted
    frames: list[Frames]  # of the prompt, then of each suffix, in the order of their pads
    weight: float = 1.0  # of its target tokens in the loss

    def __len__(self) -> int:
        return len(self.prompt) + sum(map(len, self.suffixes))


# Private-use characters mark places in the rendered text. They are removed from text that comes from outside, and so
# are lone surrogates (half an emoji in somebody's JSON), which no tokenizer takes.
_BEGIN, _END = "\U000f0000", "\U000f0001"  # of what the assistant says
_LITERAL = 0xF0002  # ... + i stands for the i-th added token, spelled out
_PRIVATE = re.compile("[\ud800-\udfff\U000f0000-\U000ffffd]")


class Live(str):
    """Text of our own in a user's or a tool's turn: the tags that it names are tokens."""


def clock(seconds: float) -> str:
    """HH:MM:SS."""
    whole = int(seconds)
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"


class Renderer:
    """Messages -> tokens, through the checkpoint's own chat template."""

    def __init__(self, tokenizer, contract: VisualContract):
        self.tokenizer, self.contract = tokenizer, contract
        added = tokenizer.added_tokens_decoder  # {id: AddedToken}
        self._added = [token.content for token in added.values()]
        special = [token.content for token in added.values() if token.special]
        self._inert = {
            "user": _any_of(self._added),
            "tool": _any_of(self._added),
            "assistant": _any_of(special),  # its tags are live, but it cannot end its own turn
        }
        self.image_pad, self.end_of_turn = (tokenizer.convert_tokens_to_ids(t) for t in (IMAGE_PAD, END_OF_TURN))
        self._text_of = functools.lru_cache(1 << 18)(lambda token: self.decode([token]))
        self.never_sampled = [i for i in tokenizer.convert_tokens_to_ids(list(NEVER_SAMPLED)) if i is not None]

    def render(self, messages: list[dict], tools: list[dict] | None = None, generate: bool = False) -> Rendered:
        """The whole conversation; `generate` appends the opening of the next assistant turn."""
        text, frames = self._text(messages, tools, generate)
        ids, mask, inside = [], [], False
        for piece in re.split(f"([{_BEGIN}{_END}])", text):
            if piece in (_BEGIN, _END):
                inside = piece == _BEGIN
                continue
            tokens = self.encode(piece)
            ends_turn = bool(ids) and mask[-1] == 1 and not inside and tokens[:1] == [self.end_of_turn]
            ids += tokens
            mask += [int(inside)] * len(tokens)
            if ends_turn:
                mask[-len(tokens)] = 1
        return Rendered(*self._expand(ids, mask, frames), frames)

    def continuation(self, contents: list[str | list], role: str = "tool") -> Rendered:
        """What follows a sampled assistant turn that called tools: one user turn with a response per call, then the
        opening of the next assistant turn. Only this delta is tokenised; earlier ids stay as they were sampled.
        With role = "user": plain user turns."""
        messages = [{"role": "assistant", "content": ""}, *({"role": role, "content": c} for c in contents)]
        text, frames = self._text(messages, None, generate=True)
        ids = self.encode(text.partition(_END + END_OF_TURN)[2])
        return Rendered(*self._expand(ids, [0] * len(ids), frames), frames)

    def encode(self, text: str) -> list[int]:
        """Our own text -> ids. Control tokens in it are live, the marks of `inert` are spelled out."""
        ids = []
        for piece in re.split(f"([{chr(_LITERAL)}-\U000ffffd])", text):
            if len(piece) == 1 and ord(piece) >= _LITERAL:
                token = self._added[ord(piece) - _LITERAL]
                # Split after its first character, no added token can match.
                ids += self._tokens(token[:1]) + self._tokens(token[1:])
            elif piece:
                ids += self._tokens(piece)
        return ids

    def inert(self, text: str, role: str = "user") -> str:
        """Mark every control token that `text` spells, so that `encode` reads it as ordinary characters."""
        text = _PRIVATE.sub("", text)
        return self._inert[role].sub(lambda match: chr(_LITERAL + self._added.index(match.group())), text)

    def decode(self, ids: list[int]) -> str:
        """Exactly the text of the ids, control tokens included."""
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def offsets(self, ids: list[int]) -> list[tuple[int, int]]:
        """Where each token stands in `decode(ids)`, as [start, end). Tokens that share a character (bytes of one UTF-8
        sequence) share its span."""
        spans, pending, start = [], [], 0
        for i, token in enumerate(ids):
            pending.append(token)
            text = self._text_of(token) if len(pending) == 1 else self.decode(pending)
            unfinished = text.endswith("\N{REPLACEMENT CHARACTER}") and len(pending) < 4 and i + 1 < len(ids)
            if not unfinished:  # a UTF-8 sequence has at most 4 bytes, so a longer wait is for bytes that never come
                spans += [(start, start + len(text))] * len(pending)
                pending, start = [], start + len(text)
        if start != len(self.decode(ids)):  # bytes that are no UTF-8 decode otherwise among their neighbours
            ends = [len(self.decode(ids[:i])) for i in range(len(ids) + 1)]
            spans = list(itertools.pairwise(ends))
            for i in range(1, len(ids)):  # the further bytes of a character
                spans[i] = spans[i] if spans[i][0] < spans[i][1] else spans[i - 1]
        return spans

    def compact(self, ids: list[int]) -> list[int]:
        """One image pad per image: the form that SGLang takes (it expands them again)."""
        pad = self.image_pad
        return [token for i, token in enumerate(ids) if token != pad or i == 0 or ids[i - 1] != pad]

    def _tokens(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _text(self, messages: list[dict], tools: list[dict] | None, generate: bool) -> tuple[str, list[Frames]]:
        """The chat template's text with one image pad per frame, and the frames in order."""
        frames, plain = [], []
        for message in messages:
            role, content = message["role"], message["content"]
            parts = [content] if isinstance(content, str) else content
            # Neighbouring texts are one, or a control token could come in two halves.
            parts = (["".join(run)] if kind is str else run for kind, run in itertools.groupby(parts, type))
            rendered = []
            for part in itertools.chain.from_iterable(parts):
                if isinstance(part, Frames):
                    frames += [part]
                    for i, time in enumerate(part.times):  # None: a still image, which has no time
                        stamp = "" if time is None else self.contract.stamp.format(time, i=i, clock=clock(time))
                        rendered += [{"type": "text", "text": stamp}, {"type": "image"}]
                else:
                    ours = isinstance(part, Live) or role not in self._inert
                    text = part if ours else self.inert(part, role)
                    rendered += [{"type": "text", "text": text}]
            if role == "assistant":
                rendered = [{"type": "text", "text": _BEGIN}, *rendered, {"type": "text", "text": _END}]
            plain.append({"role": role, "content": rendered})
        text = self.tokenizer.apply_chat_template(plain, tools=tools, tokenize=False, add_generation_prompt=generate)
        return text, frames

    def _expand(self, ids: list[int], mask: list[int], frames: list[Frames]) -> tuple[list[int], list[int]]:
        sizes = [self.contract.frame_tokens(c.pixels.shape[2], c.pixels.shape[1]) for c in frames for _ in c.times]
        pads = [i for i, token in enumerate(ids) if token == self.image_pad]
        if len(pads) != len(sizes):
            raise ContractError(f"the chat template made {len(pads)} image pads for {len(sizes)} frames")
        repeat = np.ones(len(ids), int)
        repeat[pads] = sizes
        return np.repeat(ids, repeat).tolist(), np.repeat(mask, repeat).tolist()


def _any_of(tokens: list[str]) -> re.Pattern:
    return re.compile("|".join(re.escape(t) for t in sorted(tokens, key=len, reverse=True)) or r"(?!)")
