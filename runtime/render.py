"""render.py: turn messages into token ids, and ids into text, for SFT, RL, evaluation and `ask`.

    renderer = Renderer(load_tokenizer(checkpoint_dir), contract)
    rendered = renderer.render(messages, tools)    # ids with expanded image pads, assistant mask, clips

A message is {"role": system|user|assistant|tool, "content": str | list of str and Clip}. Each frame becomes its time
stamp followed by an image: `<12.5 seconds><|vision_start|><|image_pad|>...<|vision_end|>`.

Text from outside never becomes a control token. Every added token that it spells is tokenised as ordinary characters, in
each role's turns, even in a row's system prompt. In text that we mark as our own (`Live`), control tokens stay live.
"""

import codecs
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jinja2 import TemplateError
from transformers import AutoTokenizer

from episode import Prompt
from runtime.config import ConfigError
from runtime.prompts import OURS, Live, Prompts
from runtime.video import Clip
from runtime.visual import ContractError, VisualContract, read_json

VISION_START, IMAGE_PAD, VISION_END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
NEVER_SAMPLED = (IMAGE_PAD, "<|video_pad|>", VISION_START, VISION_END)  # banned in the engine, masked in the softmax
END_OF_TURN = "<|im_end|>"
THINK_PREFIX = "<think>\n"  # forced at the start of a main agent's turn; an SFT turn with <think> begins so as well
NO_REPORT = "(empty report)"  # replaces a tool result without text
# The tags of chat templates and of our prompts. In some vocabularies they are no single tokens.
TEMPLATE_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<answer>", "</answer>")  # those of the format
TAG = re.compile("|".join(TAGS))
TAGS_AND_CODE = (*TAGS, "<tool_code>", "</tool_code>")  # a call in <tool_code> runs, but the format does not ask for it
# A piece of a tag is the name of a tag behind `<` or `</`, as in `<think now`, or a tag that the end of a text cuts off: `</answ`.
# Reports are not the model's to write, so <tool_response> counts as well. `a<b`, `<video>`, `<the car>`, `</b>` and `<-` are text.
CUT_OFF = "|".join(tag[:length] for tag in TAGS_AND_CODE for length in range(1, len(tag)))
TAG_PIECE = re.compile(rf"</?(?:think|tool_call|tool_code|answer|tool_response)[a-z_]*>?|(?:{CUT_OFF})\Z")
CHAT_TEMPLATE = Path(__file__).with_name("chat.jinja").read_text(encoding="utf-8")


def load_tokenizer(checkpoint: str | Path):
    return AutoTokenizer.from_pretrained(str(checkpoint), trust_remote_code=False)  # None: ask whether to run its code


def template_with_tools(own: str) -> str:
    """Return a checkpoint's own chat template, or ours if that renders no tools, as Qwen2.5-VL's."""
    return own if "tools" in own else CHAT_TEMPLATE


def write_chat_template(checkpoint: Path) -> None:
    """Give a checkpoint whose own chat template renders no tools ours, with which it was trained."""
    path = checkpoint / "chat_template.jinja"
    config = read_json(checkpoint / "tokenizer_config.json") or {}
    own = path.read_text(encoding="utf-8") if path.exists() else config.get("chat_template", "")
    if template_with_tools(own) != own:
        path.write_text(CHAT_TEMPLATE, encoding="utf-8")
        (checkpoint / "chat_template.json").unlink(missing_ok=True)  # the processor's copy of the other one


@dataclass
class Rendered:
    """A conversation as the model reads it."""

    ids: list[int]  # image pads are expanded: one per visual token
    mask: list[int]  # 1 on the tokens that SFT trains: the assistant's, including the end of turn
    clips: list[Clip]  # in the order of their pads


# `inert` puts this private-use character into control tokens and tags that outside text spells. `encode` splits there, so
# none matches. Remove it from outside text, and also lone surrogates (half an emoji in JSON), which no tokenizer accepts.
_CUT = "\U000f0000"
_REMOVED = re.compile(f"[\ud800-\udfff{_CUT}]")
_ASSISTANT = "<|im_start|>assistant\n"
_ASSISTANT_TURN = re.compile(rf"(?<={re.escape(_ASSISTANT)})(.*?{re.escape(END_OF_TURN)})", re.DOTALL)


def clock(seconds: float) -> str:
    """Write seconds as HH:MM:SS."""
    whole = int(seconds)
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"


class Renderer:
    """Turns messages into tokens, with the checkpoint's own chat template if that renders tools."""

    def __init__(self, tokenizer, contract: VisualContract, prompts: Prompts = OURS):
        from transformers.convert_slow_tokenizer import bytes_to_unicode  # how byte-level vocabularies write bytes

        self.tokenizer = tokenizer
        self.contract = contract
        self.prompts = prompts
        # `encode` calls the library below transformers: transformers' checks take longer than the work and block other threads.
        self._plain = tokenizer.backend_tokenizer
        self._plain.no_padding()
        self._plain.no_truncation()
        added = tokenizer.added_tokens_decoder.values()
        self._control = _any_of([token.content for token in added] + list(TEMPLATE_TAGS))
        self._special = _any_of([token.content for token in added if token.special])
        self.image_pad = tokenizer.convert_tokens_to_ids(IMAGE_PAD)
        self.end_of_turn = tokenizer.convert_tokens_to_ids(END_OF_TURN)
        self.think_prefix = self.encode(THINK_PREFIX)
        self._byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
        others = [token for token in ends_of_turn_in(Path(tokenizer.name_or_path)) if token != self.end_of_turn]
        self.ends_of_turn = (self.end_of_turn, *others)
        self.never_sampled = [i for i in tokenizer.convert_tokens_to_ids(list(NEVER_SAMPLED)) if i is not None]

    def render(self, messages: list[dict], tools: list[dict] | None = None, generate: bool = False) -> Rendered:
        """Tokenise the whole conversation. `generate` appends the opening of the next assistant turn."""
        text, clips = self._text(messages, tools, generate)
        pieces = _ASSISTANT_TURN.split(text)  # every second piece is such a turn: outside text cannot spell its bounds
        if len(pieces) // 2 != sum(message["role"] == "assistant" for message in messages):
            raise ContractError(f"the chat template does not write assistant turns as {_ASSISTANT!r} ... {END_OF_TURN}")
        ids, mask = [], []
        for i, piece in enumerate(pieces):
            tokens = self.encode(piece)
            ids += tokens
            mask += [i % 2] * len(tokens)
        return self._expand(ids, mask, clips)

    def prompt(self, messages: list[dict], tools: list[dict] | None = None) -> Prompt:
        """Tokenise what an agent reads first, with the opening of its turn."""
        rendered = self.render(messages, tools, generate=True)
        return Prompt(rendered.ids, rendered.clips)

    def continuation(self, contents: Sequence[str | list], role: str = "tool") -> Rendered:
        """Tokenise the messages after a sampled assistant turn: one user turn with a response per call (role = "user": plain
        user turns), then the opening of the next assistant turn. The ids before stay exactly as sampled."""
        messages: list[dict] = [{"role": "assistant", "content": ""}]
        messages += [{"role": role, "content": content} for content in contents]
        text, clips = self._text(messages, None, generate=True)
        ids = self.encode(text.partition(_ASSISTANT + END_OF_TURN)[2])
        return self._expand(ids, [0] * len(ids), clips)

    def _text(self, messages: list[dict], tools: list[dict] | None, generate: bool) -> tuple[str, list[Clip]]:
        """Return the chat template's text of the conversation, with one image pad per frame, and its clips."""
        clips = []
        chat = []  # the messages in transformers' form
        for message in messages:
            role, content = message["role"], message["content"]
            parts = []
            for part in [content] if isinstance(content, str) else _joined(content):
                if isinstance(part, Clip):
                    clips.append(part)
                    for i, time in enumerate(part.times):  # None: a still image
                        stamp = "" if time is None else self.contract.stamp.format(time, i=i, clock=clock(time))
                        parts += [{"type": "text", "text": stamp}, {"type": "image"}]
                else:
                    text = part if isinstance(part, Live) else self.inert(part, role)
                    parts.append({"type": "text", "text": text})
            chat.append({"role": role, "content": parts})
        if chat[0]["role"] == "system" and any("<tools>" in part["text"] for part in chat[0]["content"]):
            tools = None  # a system prompt of one's own that declares them already
        # A model that is only asked, without tools, sees its own template.
        with_tools = tools or any(message["role"] == "tool" for message in messages)
        template = template_with_tools(self.tokenizer.chat_template or "") if with_tools else None
        text = self.tokenizer.apply_chat_template(
            chat, tools=tools, chat_template=template, tokenize=False, add_generation_prompt=generate
        )
        return text, clips

    def _expand(self, ids: list[int], mask: list[int], clips: list[Clip]) -> Rendered:
        """Repeat the image pad of each frame, once per visual token."""
        sizes = []
        for clip in clips:
            height, width = clip.pixels.shape[1:3]
            sizes += [self.contract.frame_tokens(width, height)] * len(clip.times)
        pads = [i for i, token in enumerate(ids) if token == self.image_pad]
        if len(pads) != len(sizes):
            raise ContractError(f"the chat template made {len(pads)} image pads for {len(sizes)} frames")
        repeat = np.ones(len(ids), int)
        repeat[pads] = sizes
        return Rendered(np.repeat(ids, repeat).tolist(), np.repeat(mask, repeat).tolist(), clips)

    def encode(self, text: str) -> list[int]:
        """Tokenise our own text. Control tokens in it are live, except those that `inert` has cut."""
        ids = []
        for piece in text.split(_CUT):
            ids += self._plain.encode(piece, add_special_tokens=False).ids
        return ids

    def inert(self, text: str, role: str = "user") -> str:
        """Cut every control token and every tag that `text` spells, so that `encode` sees ordinary characters. An assistant's text keeps
        its tags (`<think>`, ...), which are not special tokens, but it cannot end its turn."""
        pattern = self._special if role == "assistant" else self._control
        text = _REMOVED.sub("", text)
        return pattern.sub(lambda match: f"{_CUT}{match[0][0]}{_CUT}{match[0][1:]}{_CUT}", text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return exactly the text of the ids, control tokens included."""
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def readable(self, ids: list[int]) -> str:
        """Return the text of the ids with one image pad per image."""
        return self.decode(self.compact(ids))

    def compact(self, ids: list[int]) -> list[int]:
        """Keep one image pad per image, as SGLang expects (it expands them again)."""
        kept = []
        for i, token in enumerate(ids):
            if token != self.image_pad or i == 0 or ids[i - 1] != self.image_pad:
                kept.append(token)
        return kept

    def offsets(self, ids: list[int]) -> list[tuple[int, int]]:
        """Return each token's span [start, end) in `decode(ids)`. If tokens share a character of several bytes, their spans
        overlap. Bytes that are not UTF-8 decode to U+FFFD."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        complete = 0  # characters that the bytes so far have completed
        begun = 0  # ... and have begun
        spans = []
        for piece in self.tokenizer.convert_ids_to_tokens(ids):
            piece = piece or ""  # rows of the embedding without a token have no text
            try:
                data = bytes([self._byte_of[character] for character in piece])
            except KeyError:  # an added token, which may hold any characters
                data = piece.encode()
            start = begun
            for i in range(len(data)):
                complete += len(decoder.decode(data[i : i + 1]))
                # The decoder holds the bytes of an incomplete character, or of half a surrogate pair: one U+FFFD per byte.
                begun = complete + len(decoder.getstate()[0].decode("utf-8", "replace"))
                if i == 0:
                    start = begun - 1  # the first byte belongs to the last character that has begun
            spans.append((start, begun))
        return spans


def ends_of_turn_in(checkpoint: Path) -> list[int]:
    """Return the tokens that a checkpoint lets end a turn."""
    config = read_json(checkpoint / "generation_config.json") or {}
    ends = config.get("eos_token_id", [])
    return [ends] if isinstance(ends, int) else ends


def _any_of(tokens: list[str]) -> re.Pattern:
    return re.compile("|".join(re.escape(token) for token in tokens))


def _joined(parts: list[str | Clip]) -> list[str | Clip]:
    """Join adjacent texts from outside. Otherwise a control token could arrive in two pieces."""
    joined: list[str | Clip] = []
    for part in parts:
        if joined and type(part) is str and type(joined[-1]) is str:  # not Live
            joined[-1] += part
        else:
            joined.append(part)
    return joined


# ------------------------------------------------------------------------------------------------ the chat template of a checkpoint


def refuse_template(source: Path, renderer: Renderer, schemas: dict[str, dict]) -> None:
    """Refuse a chat template that does not continue a dialogue as rollouts do, and a tool whose schema has another name.
    `schemas`: those of the tools, by their keys in tools.TOOLS."""
    for key, schema in schemas.items():
        name = schema["function"]["name"]
        if name != key:
            raise ConfigError(
                f"tools.TOOLS[{key!r}]: the model would call it {name!r}, by its function's name; use that"
            )
    if problem := template_problem(renderer, list(schemas.values())):
        raise ConfigError(
            f"{source}: its chat template does not continue a dialogue as rollouts do: {problem}. "
            "Put the Instruct model's chat_template.jinja into this folder"
        )


def template_problem(renderer: Renderer, schemas: list[dict]) -> str:
    """Return where a dialogue that the chat template renders as a whole, as in SFT, differs from the same dialogue turn by
    turn, as in a rollout. Empty: nowhere."""
    opening = [{"role": "system", "content": "Look."}, {"role": "user", "content": "Which?"}]
    said = THINK_PREFIX + "I see.\n</think>\n<tool_call>\n{}\n</tool_call>"
    turn = {"role": "assistant", "content": said}
    for tools, role, contents in ((schemas, "tool", ["red", "blue"]), (None, "user", ["red"])):
        replies = [{"role": role, "content": content} for content in contents]
        try:
            prompt = renderer.render(opening, tools, generate=True).ids
            grown = [*prompt, *renderer.encode(said), renderer.end_of_turn, *renderer.continuation(contents, role).ids]
            whole = renderer.render([*opening, turn, *replies], tools, generate=True).ids
        except (ContractError, TemplateError, TypeError) as error:  # TypeError: it reads no lists of parts
            return str(error)
        if grown != whole:
            same = os.path.commonprefix([grown, whole])
            template_text, rollout_text = (renderer.decode(ids[len(same) :][:8]) for ids in (whole, grown))
            return f"after {renderer.decode(same[-8:])!r} it writes {template_text!r}, and a rollout {rollout_text!r}"
    return ""
