"""What the model sees: one visual contract, and one way to turn messages into tokens, for SFT, RL, evaluation and `ask`.

    contract = VisualContract()                    # frames of about 65,536 pixels, 64 tokens if square; stamped images
    contract.frame_size(1280, 720)                 # (352, 192): the size at which such a video's frames are decoded
    contract.check(checkpoint_dir)                 # refuses a checkpoint that was trained with another one
    renderer = Renderer(load_tokenizer(checkpoint_dir), contract)
    rendered = renderer.render(messages, tools)    # ids with expanded image pads, assistant mask, frames
    pixel_values, grid = patchify(rendered.frames) # tensors: float32 [patches, 1536], int64 [frames, 3]

A message is {"role": system|user|assistant|tool, "content": str | list of str and Frames}. Each frame becomes its time
stamp followed by an image: `<12.5 seconds><|vision_start|><|image_pad|>...<|vision_end|>`.

Text from outside (of users and tools) can never become a control token: every added token that it spells is tokenised
as ordinary characters, unless the text is our own (`Live`).

Deliberately missing: the video channel of Qwen3-VL (frame pairs), torchvision, the Hugging Face processor classes.
"""

import codecs
import dataclasses
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    """Least area of a frame. 65,536 = 64 tokens: the smallest image that Qwen3-VL's processor does not enlarge."""
    max_frame_pixels: int | None = None
    """Largest area of a frame: one that is neither too small nor too large keeps its size, as in Qwen's processors
    (min_pixels, max_pixels). null: every frame is scaled to `frame_pixels`, whatever its source."""
    crop_frame_pixels: int | None = None
    """Frames of a crop are scaled to this area. null: they are as large as those of the overview."""
    patch: int = 16
    """Side of a vision patch in pixels (14 for Qwen2.5-VL)."""
    merge: int = 2
    """merge x merge patches become one token."""
    stamp: str = "<{:.1f} seconds>"
    """The text before each frame: the true time of the decoded frame. Other models read `{clock}` (HH:MM:SS) or `{i}`
    (the frame's place in its clip); empty: no stamps."""
    overview_frames: int = 64
    """K: frames of the overview unless gating draws another number."""
    crop_fps: float = 1.0
    crop_max_frames: int = 16

    def __post_init__(self):
        for name in ("frame_pixels", "crop_frame_pixels"):
            area = getattr(self, name)
            if area is not None and area < self.cell**2:
                raise ValueError(f"{name} = {area}: at least one token, {self.cell**2} pixels")
        if self.max_frame_pixels is not None and self.max_frame_pixels < self.frame_pixels:
            raise ValueError(
                f"max_frame_pixels = {self.max_frame_pixels}: at least frame_pixels = {self.frame_pixels}; null scales "
                "every frame to frame_pixels"
            )
        for name in ("overview_frames", "crop_fps", "crop_max_frames"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be positive")

    @property
    def cell(self) -> int:
        return self.patch * self.merge  # pixels: the side of the square that becomes one token

    def frame_size(self, width: int, height: int) -> tuple[int, int]:
        """Return (width, height) to decode at: every later resize (transformers', SGLang's) is the identity."""
        if self.max_frame_pixels is None:
            return self._scale_to(self.frame_pixels, width, height)
        # Between two areas, as Qwen's smart_resize, bit for bit: each side is rounded to whole tokens. Too large a frame
        # shrinks, and its sides are rounded down; too small a one grows, and they are rounded up.
        columns, rows = round(width / self.cell), round(height / self.cell)
        area = columns * rows * self.cell**2
        if area > self.max_frame_pixels:
            factor = math.sqrt(width * height / self.max_frame_pixels)
            columns = max(1, math.floor(width / factor / self.cell))
            rows = max(1, math.floor(height / factor / self.cell))
        elif area < self.frame_pixels:
            factor = math.sqrt(self.frame_pixels / (width * height))
            columns = math.ceil(width * factor / self.cell)
            rows = math.ceil(height * factor / self.cell)
        return columns * self.cell, rows * self.cell

    def crop_size(self, width: int, height: int) -> tuple[int, int]:
        """Return (width, height) to decode a crop's frames at."""
        if self.crop_frame_pixels is None:
            return self.frame_size(width, height)
        return self._scale_to(self.crop_frame_pixels, width, height)

    def _scale_to(self, area: int, width: int, height: int) -> tuple[int, int]:
        """Return the smallest size in whole tokens that covers the area in this shape."""
        scale = math.sqrt(area / (width * height))
        # The epsilon keeps an exact fit (256 x 256) from rounding up to one cell more.
        columns = max(1, math.ceil(width * scale / self.cell - 1e-9))
        rows = max(1, math.ceil(height * scale / self.cell - 1e-9))
        return columns * self.cell, rows * self.cell

    def frame_tokens(self, width: int, height: int) -> int:
        return (width // self.cell) * (height // self.cell)

    def processor_size(self) -> dict[str, int]:
        """Return the image processor's limits under which our frames pass unchanged (Qwen names areas "edges")."""
        smallest, largest = self.frame_pixels, max(16_777_216, self.frame_pixels, self.max_frame_pixels or 0)
        if self.max_frame_pixels or self.crop_frame_pixels:
            smallest = self.cell**2  # a frame that was rounded down, or of a crop, may be below frame_pixels
        return {"shortest_edge": smallest, "longest_edge": largest}

    @classmethod
    def load(cls, checkpoint: str | Path) -> "VisualContract":
        """Read the contract that a checkpoint carries; a stock checkpoint gets the default one."""
        path = Path(checkpoint) / "visual.json"
        saved = _read_json(path) or {}
        try:
            return cls(**saved)
        except (TypeError, ValueError) as error:  # a key of another version, an impossible value
            raise ContractError(f"{path}: {error}") from None

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
        saved = None
        if (Path(checkpoint) / "visual.json").exists():
            saved = dataclasses.asdict(self.load(checkpoint))
        processor = _read_json(Path(checkpoint) / "preprocessor_config.json")
        constants = self._processor_constants()
        if saved is not None:
            constants["size"] = self.processor_size()
        wrong = []
        for expected, found in ((dataclasses.asdict(self), saved), (constants, processor)):
            for key, value in expected.items():
                if found is not None and found.get(key) != value:
                    wrong.append(f"{key}: this run has {value!r}, the checkpoint {found.get(key)!r}")
        if wrong:
            raise ContractError(
                f"{checkpoint} was made under another visual contract ({'; '.join(wrong)}). "
                "Set the run's `visual` keys to the checkpoint's values, or train a checkpoint under the new ones."
            )

    def _processor_constants(self) -> dict[str, Any]:
        constants = {"patch_size": self.patch, "merge_size": self.merge, "temporal_patch_size": TEMPORAL_PATCH}
        if self.patch == 16:  # Qwen2.5-VL (patch 14) has other means, but is only ever served
            constants |= {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}  # what `patchify` works with
        return constants


def _read_json(path: Path) -> dict | None:
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    except ValueError as error:
        raise ContractError(f"{path}: not readable: {error}; copy the checkpoint here again") from None


# 0 ... 255 -> [-1, 1], rounded exactly as transformers' PIL image processor rounds (rescale in float64, then float32).
_NORMALISED = ((np.arange(256) * (1 / 255)).astype(np.float32) - np.float32(0.5)) / np.float32(0.5)


def patchify(frames: Sequence[Frames], patch: int = 16, merge: int = 2, device="cpu"):
    """Return two tensors: pixel_values float32 [patches, 3 * 2 * patch * patch], on the device, and grid int64 [frames, 3] =
    (1, rows, columns), on the host.

    Patches of one token stand together (merge x merge blocks, row by row), as Qwen's vision tower expects them."""
    import torch  # what reads contracts alone needs no torch

    cut, grid = [np.zeros((0, 3 * patch * patch), np.uint8)], []
    for clip in frames:
        n, height, width, _ = clip.pixels.shape
        rows, columns = height // patch, width // patch
        x = clip.pixels.reshape(n, rows // merge, merge, patch, columns // merge, merge, patch, 3)
        x = x.transpose(0, 1, 4, 2, 5, 7, 3, 6)  # [n, rows/m, columns/m, m, m, 3, patch, patch]
        cut.append(x.reshape(n * rows * columns, 3 * patch * patch))
        grid += [[1, rows, columns]] * n
    # Only bytes are moved on the CPU and sent: the frames of one full micro-batch are 48 MiB, their values 384 MiB.
    x = torch.from_numpy(np.concatenate(cut)).to(device)
    x = torch.from_numpy(_NORMALISED).to(device)[x.int()]  # [P, 3 * patch * patch]
    x = x.view(len(x), 3, 1, patch * patch).expand(-1, -1, TEMPORAL_PATCH, -1)
    x = x.reshape(len(x), 3 * TEMPORAL_PATCH * patch * patch)
    return x, torch.tensor(grid, dtype=torch.int64).view(len(grid), 3)


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


# A private-use character inside a control token that outside text spells: `encode` cuts there, so no token matches.
# It is removed from outside text, and so are lone surrogates (half an emoji in somebody's JSON), which no tokenizer takes.
_CUT = "\U000f0000"
_REMOVED = re.compile(f"[\ud800-\udfff{_CUT}]")
_ASSISTANT = "<|im_start|>assistant\n"
_SAID = re.compile(rf"(?<={re.escape(_ASSISTANT)})(.*?{re.escape(END_OF_TURN)})", re.DOTALL)  # one assistant turn


class Live(str):
    """Text of our own in a user's or a tool's turn: the control tokens that it spells are live."""


def clock(seconds: float) -> str:
    """Write seconds as HH:MM:SS."""
    whole = int(seconds)
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"


class Renderer:
    """Turns messages into tokens, through the checkpoint's own chat template."""

    def __init__(self, tokenizer, contract: VisualContract):
        from transformers.convert_slow_tokenizer import bytes_to_unicode  # byte-level vocabularies write bytes so

        self.tokenizer, self.contract = tokenizer, contract
        # `encode` asks the library below transformers, whose checks take longer than the work and hold up other threads.
        self._plain = tokenizer.backend_tokenizer
        self._plain.no_padding()
        self._plain.no_truncation()
        added = tokenizer.added_tokens_decoder.values()
        self._control = _any_of([token.content for token in added])
        self._special = _any_of([token.content for token in added if token.special])
        self.image_pad, self.end_of_turn = (tokenizer.convert_tokens_to_ids(t) for t in (IMAGE_PAD, END_OF_TURN))
        self._byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
        self.ends_of_turn = self._read_ends_of_turn()  # <|im_end|> first, then others of the checkpoint
        self.never_sampled = [i for i in tokenizer.convert_tokens_to_ids(list(NEVER_SAMPLED)) if i is not None]

    def render(self, messages: list[dict], tools: list[dict] | None = None, generate: bool = False) -> Rendered:
        """Tokenise the whole conversation; `generate` appends the opening of the next assistant turn."""
        text, frames = self._text(messages, tools, generate)
        pieces = _SAID.split(text)  # every second one is an assistant's turn: outside text cannot spell its bounds
        if len(pieces) // 2 != sum(message["role"] == "assistant" for message in messages):
            raise ContractError(f"the chat template does not write assistant turns as {_ASSISTANT!r} ... {END_OF_TURN}")
        ids, mask = [], []
        for i, piece in enumerate(pieces):
            tokens = self.encode(piece)
            ids += tokens
            mask += [i % 2] * len(tokens)
        return Rendered(*self._expand(ids, mask, frames), frames)

    def continuation(self, contents: list[str | list], role: str = "tool") -> Rendered:
        """Tokenise what follows a sampled assistant turn: one user turn with a response per call (role = "user": plain
        user turns), then the opening of the next assistant turn. Earlier ids stay as they were sampled."""
        messages = [{"role": "assistant", "content": ""}]
        messages += [{"role": role, "content": content} for content in contents]
        text, frames = self._text(messages, None, generate=True)
        ids = self.encode(text.partition(_ASSISTANT + END_OF_TURN)[2])
        return Rendered(*self._expand(ids, [0] * len(ids), frames), frames)

    def encode(self, text: str) -> list[int]:
        """Tokenise our own text. Control tokens in it are live, except where `inert` has cut them."""
        ids = []
        for piece in text.split(_CUT):
            ids += self._plain.encode(piece, add_special_tokens=False).ids
        return ids

    def inert(self, text: str, role: str = "user") -> str:
        """Cut every control token that `text` spells, so that `encode` reads ordinary characters. An assistant's text
        keeps its tags (`<think>`, ...), which are no special tokens, but cannot end its turn."""
        pattern = self._special if role == "assistant" else self._control
        text = _REMOVED.sub("", text)
        return pattern.sub(lambda match: f"{_CUT}{match[0][0]}{_CUT}{match[0][1:]}{_CUT}", text)

    def decode(self, ids: list[int]) -> str:
        """Return exactly the text of the ids, control tokens included."""
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def offsets(self, ids: list[int]) -> list[tuple[int, int]]:
        """Return where each token stands in `decode(ids)`, as [start, end). Tokens may share a character of several
        bytes: then their spans overlap. Bytes that are no UTF-8 read as U+FFFD."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        complete = 0  # characters that the bytes so far have completed
        spans = []
        for piece in self.tokenizer.convert_ids_to_tokens(ids):
            data = self._bytes(piece or "")  # rows of the embedding without a token have no text
            begun = []  # characters that have begun when the token's first byte has been read, and its last
            for part in (data[:1], data[1:]):
                complete += len(decoder.decode(part))
                unfinished = decoder.getstate()[0].decode("utf-8", "replace")
                begun.append(complete + len(unfinished))
            start = begun[0] - 1 if data else begun[0]  # the first byte stands in the last character that has begun
            spans.append((start, begun[1]))
        return spans

    def _bytes(self, piece: str) -> bytes:
        try:
            return bytes([self._byte_of[character] for character in piece])
        except KeyError:  # an added token, which may hold any characters
            return piece.encode()

    def _read_ends_of_turn(self) -> tuple[int, ...]:
        config = _read_json(Path(self.tokenizer.name_or_path) / "generation_config.json") or {}
        ends = config.get("eos_token_id", [])
        if isinstance(ends, int):
            ends = [ends]
        return (self.end_of_turn, *(token for token in ends if token != self.end_of_turn))

    def compact(self, ids: list[int]) -> list[int]:
        """Keep one image pad per image: the form that SGLang takes (it expands them again)."""
        kept = []
        before = None
        for token in ids:
            if token != self.image_pad or before != self.image_pad:
                kept.append(token)
            before = token
        return kept

    def _text(self, messages: list[dict], tools: list[dict] | None, generate: bool) -> tuple[str, list[Frames]]:
        frames, plain = [], []
        for message in messages:
            role, content = message["role"], message["content"]
            rendered = []
            for part in [content] if isinstance(content, str) else _joined(content):
                if isinstance(part, Frames):
                    frames.append(part)
                    for i, time in enumerate(part.times):  # None: a still image, which has no time
                        stamp = "" if time is None else self.contract.stamp.format(time, i=i, clock=clock(time))
                        rendered += [{"type": "text", "text": stamp}, {"type": "image"}]
                else:
                    ours = role == "system" or isinstance(part, Live)
                    rendered.append({"type": "text", "text": part if ours else self.inert(part, role)})
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
    return re.compile("|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)))


def _joined(parts: list[str | Frames]) -> list[str | Frames]:
    """Join neighbouring texts from outside, or a control token could come in two halves."""
    joined = []
    for part in parts:
        if joined and type(part) is str and type(joined[-1]) is str:  # not Live
            joined[-1] += part
        else:
            joined.append(part)
    return joined
