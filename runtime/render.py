"""render.py: messages become ids and ids become text, for SFT, RL, evaluation and `ask`. It needs no torch.

    renderer = Renderer(load_tokenizer(checkpoint_dir), contract)
    rendered = renderer.render(messages, tools)    # ids with expanded image pads, assistant mask, frames

A message is {"role": system|user|assistant|tool, "content": str | list of str and Frames}. Each frame becomes its time
stamp followed by an image: `<12.5 seconds><|vision_start|><|image_pad|>...<|vision_end|>`.

Text from outside can never become a control token: every added token that it spells is tokenised as ordinary characters, in
each role's turns, even in a row's system prompt. In a text that we mark as our own (`Live`) control tokens stay alive.
"""

import codecs
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from runtime.video import Frames
from runtime.visual import ContractError, VisualContract, read_json

VISION_START, IMAGE_PAD, VISION_END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
NEVER_SAMPLED = (IMAGE_PAD, "<|video_pad|>", VISION_START, VISION_END)  # banned in the engine, masked in the softmax
END_OF_TURN = "<|im_end|>"
THINK_PREFIX = "<think>\n"  # opens every turn of a main agent: rollouts force it, rows of SFT are made to begin so
NO_REPORT = "(empty report)"  # stands for a tool's result without text


def load_tokenizer(checkpoint: str | Path):
    from transformers import AutoTokenizer  # 2 s of imports that `--help` does not need

    return AutoTokenizer.from_pretrained(str(checkpoint))


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


# `inert` puts this private-use character into control tokens that outside text spells: `encode` cuts there, so none matches.
# It is removed from outside text, and so are lone surrogates (half an emoji in somebody's JSON), which no tokenizer takes.
_CUT = "\U000f0000"
_REMOVED = re.compile(f"[\ud800-\udfff{_CUT}]")
_ASSISTANT = "<|im_start|>assistant\n"
_ASSISTANT_TURN = re.compile(rf"(?<={re.escape(_ASSISTANT)})(.*?{re.escape(END_OF_TURN)})", re.DOTALL)


class Live(str):
    """Text of our own: the control tokens that it spells are live."""


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
        self.image_pad = tokenizer.convert_tokens_to_ids(IMAGE_PAD)
        self.end_of_turn = tokenizer.convert_tokens_to_ids(END_OF_TURN)
        self._byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
        self.ends_of_turn = self._read_ends_of_turn()  # <|im_end|> first, then others of the checkpoint
        self.never_sampled = [i for i in tokenizer.convert_tokens_to_ids(list(NEVER_SAMPLED)) if i is not None]

    def render(self, messages: list[dict], tools: list[dict] | None = None, generate: bool = False) -> Rendered:
        """Tokenise the whole conversation; `generate` appends the opening of the next assistant turn."""
        text, frames = self._text(messages, tools, generate)
        pieces = _ASSISTANT_TURN.split(text)  # every second one is such a turn: outside text cannot spell its bounds
        if len(pieces) // 2 != sum(message["role"] == "assistant" for message in messages):
            raise ContractError(f"the chat template does not write assistant turns as {_ASSISTANT!r} ... {END_OF_TURN}")
        ids, mask = [], []
        for i, piece in enumerate(pieces):
            tokens = self.encode(piece)
            ids += tokens
            mask += [i % 2] * len(tokens)
        return self._expand(ids, mask, frames)

    def continuation(self, contents: list[str | list], role: str = "tool") -> Rendered:
        """Tokenise what follows a sampled assistant turn: one user turn with a response per call (role = "user": plain
        user turns), then the opening of the next assistant turn. Earlier ids stay as they were sampled."""
        messages = [{"role": "assistant", "content": ""}]
        messages += [{"role": role, "content": content} for content in contents]
        text, frames = self._text(messages, None, generate=True)
        ids = self.encode(text.partition(_ASSISTANT + END_OF_TURN)[2])
        return self._expand(ids, [0] * len(ids), frames)

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

        def read(part: bytes) -> int:
            """Read more bytes; return how many characters have begun by then."""
            nonlocal complete
            complete += len(decoder.decode(part))
            return complete + len(decoder.getstate()[0].decode("utf-8", "replace"))

        spans = []
        for piece in self.tokenizer.convert_ids_to_tokens(ids):
            piece = piece or ""  # rows of the embedding without a token have no text
            try:
                data = bytes([self._byte_of[character] for character in piece])
            except KeyError:  # an added token, which may hold any characters
                data = piece.encode()
            start = read(data[:1])
            if data:
                start -= 1  # the first byte stands in the last character that has begun
            spans.append((start, read(data[1:])))
        return spans

    def _read_ends_of_turn(self) -> tuple[int, ...]:
        config = read_json(Path(self.tokenizer.name_or_path) / "generation_config.json") or {}
        ends = config.get("eos_token_id", [])
        if isinstance(ends, int):
            ends = [ends]
        return (self.end_of_turn, *(token for token in ends if token != self.end_of_turn))

    def compact(self, ids: list[int]) -> list[int]:
        """Keep one image pad per image: the form that SGLang takes (it expands them again)."""
        kept = []
        for i, token in enumerate(ids):
            if token != self.image_pad or i == 0 or ids[i - 1] != self.image_pad:
                kept.append(token)
        return kept

    def _text(self, messages: list[dict], tools: list[dict] | None, generate: bool) -> tuple[str, list[Frames]]:
        """Return the conversation as the chat template writes it, one image pad per frame, and its clips."""
        clips = []
        chat = []  # the messages in transformers' form
        for message in messages:
            role, content = message["role"], message["content"]
            parts = []
            for part in [content] if isinstance(content, str) else _joined(content):
                if isinstance(part, Frames):
                    clips.append(part)
                    for i, time in enumerate(part.times):  # None: a still image, which has no time
                        stamp = "" if time is None else self.contract.stamp.format(time, i=i, clock=clock(time))
                        parts += [{"type": "text", "text": stamp}, {"type": "image"}]
                else:
                    text = part if isinstance(part, Live) else self.inert(part, role)
                    parts.append({"type": "text", "text": text})
            chat.append({"role": role, "content": parts})
        text = self.tokenizer.apply_chat_template(chat, tools=tools, tokenize=False, add_generation_prompt=generate)
        return text, clips

    def _expand(self, ids: list[int], mask: list[int], frames: list[Frames]) -> Rendered:
        """Repeat the image pad of each frame, once per visual token."""
        sizes = []
        for clip in frames:
            height, width = clip.pixels.shape[1:3]
            sizes += [self.contract.frame_tokens(width, height)] * len(clip.times)
        pads = [i for i, token in enumerate(ids) if token == self.image_pad]
        if len(pads) != len(sizes):
            raise ContractError(f"the chat template made {len(pads)} image pads for {len(sizes)} frames")
        repeat = np.ones(len(ids), int)
        repeat[pads] = sizes
        return Rendered(np.repeat(ids, repeat).tolist(), np.repeat(mask, repeat).tolist(), frames)


def _any_of(tokens: list[str]) -> re.Pattern:
    return re.compile("|".join(re.escape(token) for token in tokens))


def _joined(parts: list[str | Frames]) -> list[str | Frames]:
    """Join neighbouring texts from outside, or a control token could come in two halves."""
    joined = []
    for part in parts:
        if joined and type(part) is str and type(joined[-1]) is str:  # not Live
            joined[-1] += part
        else:
            joined.append(part)
    return joined
