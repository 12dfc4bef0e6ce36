"""dialogues.py: read the rows of SFT. A row becomes a Dialogue; data.py reads the rows of RL.

A row, and what parse_dialogue(row, origin, root) makes of it. sft.encode_dialogue makes tokens and targets of that:

    {"messages": [{"role": "user", "content": [{"video": "a.mp4"}, "Which?"]},
                  {"role": "assistant", "content": "<think>I look.</think><tool_call>{...}</tool_call>"},
                  {"role": "user", "content": "<tool_response>\\nA red flash.\\n</tool_response>"},
                  {"role": "assistant", "content": "<think>Red.</think><answer>A</answer>"}]}
    -> Dialogue("rows.jsonl:0", "main", "Which?", (Media("/videos/a.mp4"),), turns)
       turns: assistant "<think>\\nI look. ...", tool "A red flash.", assistant "<think>\\nRed. ..."

Published rows write the same turns in several ways. A Dialogue has the form that a rollout produces:

    tool results   `tool` messages, or <tool_response> blocks in a user message -> one `tool` turn each, without white
                   space around the report
    media          parts of a message -> Media; docs/add_a_dataset.md moves media of columns into the messages
    thoughts       with or without a line break after `<think>` -> with one
    agent          the optional column `agent`: main, direct or sub; with `request` and `system`, a sub-agent's prompts

`origin` (file:row) names the row, and relative paths start at `root`. `messages` may also be a JSON string. A row that cannot be
used, or that has fields which SFT would ignore, raises RowError.

Deliberately missing: a row's system prompt, as in data.py.
"""

import itertools
import math
import re
from dataclasses import dataclass
from pathlib import Path

from runtime.dataset import RowError, holds_something, read_messages, read_paths, refuse_columns
from runtime.render import NO_REPORT, THINK_PREFIX
from runtime.video import Clip, Videos
from runtime.visual import VisualContract


@dataclass(frozen=True)
class Media:
    """A video or an image of a row. The row's keys are those of qwen-vl-utils: nframes, video_start, video_end."""

    path: str
    nframes: int | None = None  # frames of the overview; None: the contract's number
    start: float | None = None  # seconds; with `end`, a window that is sampled like a crop
    end: float | None = None
    still: bool = False  # an image

    def frames(self, videos: Videos, contract: VisualContract) -> Clip:
        """Decode the frames."""
        if self.still:
            return videos.image(self.path, contract.frame_size)
        if self.start is None or self.end is None:
            return videos.overview(self.path, self.nframes or contract.overview_frames, contract.frame_size)
        fps, max_frames = contract.crop_fps, contract.crop_max_frames
        return videos.window(self.path, self.start, self.end, contract.crop_size, fps, max_frames)

    def window(self, videos: Videos) -> tuple[float, float]:
        """Return which seconds of its file it shows."""
        if self.still:
            return 0.0, 0.0
        if self.start is None or self.end is None:
            return 0.0, videos.info(self.path).duration
        return self.start, self.end


@dataclass(frozen=True)
class Dialogue:
    """An SFT row: the opening question and the turns that follow it."""

    id: str
    agent: str  # the agent to teach: main | direct (a main agent without tools) | sub
    question: str
    media: tuple[Media, ...]  # videos and images beside the question
    turns: tuple[dict, ...]  # the renderer's messages: {"role": assistant | user | tool, "content": [str | Media, ...]}
    request: str = ""  # the sub-agent's instruction and system prompt, as in tools.ClipForSubagent
    system: str = ""


def parse_dialogue(row: dict, origin: str, root: Path) -> Dialogue:
    """Return a row's dialogue."""
    # Read each message as texts and media.
    contents: list[tuple[str | None, list[str | Media]]] = []
    for message in read_messages(row, "messages", "an SFT row"):
        contents.append((message.get("role"), _read_parts(message, root)))
    _refuse_media_elsewhere(contents, row, root)

    # Write the turns as a rollout would.
    turns = []
    for role, parts in contents:
        turns += _read_turns(role, parts)
    _refuse_disorder([turn["role"] for turn in turns])

    # The first turn is the question.
    agent = row.get("agent") or "main"
    if agent not in ("main", "direct", "sub"):
        raise RowError(f"agent {agent!r}: must be main, direct or sub")
    opening = turns[0]["content"]
    text = " ".join(part for part in opening if isinstance(part, str))
    return Dialogue(
        id=origin,
        agent=agent,
        question=re.sub(r"<(video|image)>", "", text).strip(),
        media=tuple(part for part in opening if isinstance(part, Media)),
        turns=tuple(turns[1:]),
        request=str(row.get("request") or ""),
        system=str(row.get("system") or ""),
    )


# ------------------------------------------------------------------------------------------------ texts and media


def _read_parts(message: dict, root: Path) -> list[str | Media]:
    """Return a message's texts and media."""
    _refuse_fields(message)
    content = message.get("content")
    if isinstance(content, str):
        content = [content]
    if not isinstance(content, list | None):
        raise RowError(f"`content` = {content!r}: must be a text or a list of parts")
    parts: list[str | Media] = []
    for part in content or []:
        parts.append(part if isinstance(part, str) else _read_part(part, root))
    return parts


def _refuse_fields(message: dict) -> None:
    """Refuse a message with fields that SFT would ignore. In parquet, a missing field is None."""
    if message.get("tool_calls"):
        raise RowError("a message has `tool_calls`: write calls into its content, as <tool_call>...</tool_call>")
    if message.get("reasoning_content"):
        raise RowError("a message has `reasoning_content`: write it into its content, as <think>...</think>")
    if message.get("role") == "assistant":  # SFT trains on no other turns anyway
        for field in ("loss", "weight"):
            if message.get(field) not in (None, 1):
                rule = "SFT trains on every turn of the assistant; drop the row, or remove the field"
                raise RowError(f"a message has `{field}` = {message[field]!r}: {rule}")


def _read_part(part: dict, root: Path) -> str | Media:
    """Read a text, or media: {"video": path}, {"video_url": {"url": path}}, or the same keys with `image`. Options of media stand
    beside the path or the URL: nframes, video_start, video_end."""
    keys = [key for key in ("video_url", "image_url", "video", "image") if holds_something(part.get(key))]
    text = part.get("text")
    if keys and text:
        raise RowError(f"a part has `text` and `{keys[0]}`: make two parts of it")
    if not keys and part.get("type") == "text" and isinstance(text, str):
        return text
    if not keys:
        raise RowError(f"a part of type {part.get('type')!r} is neither text, video nor image")
    url = part[keys[0]]
    options = part
    if isinstance(url, dict):
        options = url | part
        url = url["url"]
    [path] = read_paths([url], root)
    nframes, start, end = options.get("nframes"), options.get("video_start"), options.get("video_end")
    unordered = start is not None and end is not None and not -math.inf < start < end < math.inf
    if unordered or (start is None) != (end is None):
        raise RowError(f"{path}: video_start = {start}, video_end = {end}: must be seconds, with start before end")
    if nframes is not None and not (isinstance(nframes, int) and nframes > 0):
        raise RowError(f"{path}: nframes = {nframes!r}: must be a whole number above 0")
    return Media(path, nframes, start, end, still=keys[0].startswith("image"))


def _refuse_media_elsewhere(contents: list[tuple[str | None, list[str | Media]]], row: dict, root: Path) -> None:
    """Refuse a row that names media which its messages do not show. A column may repeat what they show, and with media in the
    messages a placeholder is only text."""
    rule = "SFT shows only media that are parts of messages; docs/add_a_dataset.md converts such rows"
    refuse_columns(row, ("objects", "audios"), "SFT shows only videos and images")
    shown = [part.path for _, parts in contents for part in parts if isinstance(part, Media)]
    for column in ("videos", "images", "video", "image"):
        entries = row.get(column) or []
        if not isinstance(entries, list):
            entries = [entries]
        for entry in entries:
            if not isinstance(entry, str) or read_paths([entry], root)[0] not in shown:
                raise RowError(f"`{column}` names {entry!r}: {rule}")
    asked = [part for role, parts in contents for part in parts if role in ("user", "tool") and isinstance(part, str)]
    for placeholder in ("<video>", "<image>"):
        if not shown and any(placeholder in part for part in asked):
            raise RowError(f"{placeholder} in a text: {rule}")


# ------------------------------------------------------------------------------------------------ turns


def _read_turns(role: str | None, parts: list[str | Media]) -> list[dict]:
    """Return a message's turns: none for a system prompt, one per tool response, otherwise one."""
    if role in ("system", "assistant") and any(isinstance(part, Media) for part in parts):
        raise RowError(f"the {role}'s turn shows a video or an image: move it to a user's turn or a report")
    if role == "system":
        return []
    if role == "user":
        if not any(isinstance(part, str) and "<tool_response>" in part for part in parts):
            return [{"role": "user", "content": parts}]
        return [{"role": "tool", "content": _strip_report(report)} for report in _split_responses(parts)]
    if role == "tool":
        return [{"role": "tool", "content": _strip_report(parts)}]
    if role == "assistant":
        text = _open_turn("".join(part for part in parts if isinstance(part, str)))
        if not text:
            raise RowError("a turn of the assistant is empty: write its text into `content`, or drop the row")
        return [{"role": "assistant", "content": [text]}]
    raise RowError(f"role {role!r}: must be system, user, assistant or tool")


def _open_turn(text: str) -> str:
    """Make an assistant's turn begin as in a rollout, where `<think>\\n` is forced. Published rows begin with `<think>Thought`
    or `<think>\\n\\n`, which would teach another first token than the model needs there."""
    text = text.lstrip()
    if text.startswith("<think>"):
        text = THINK_PREFIX + text.removeprefix("<think>").lstrip()
    return text


def _split_responses(parts: list[str | Media]) -> list[list[str | Media]]:
    """Return the content of each <tool_response> block of a user turn. Media between two blocks belong to the second."""
    responses: list[list[str | Media]] = []
    current: list[str | Media] = []
    for part in parts:
        pieces = re.split("(</?tool_response>)", part) if isinstance(part, str) else [part]
        for piece in pieces:
            if piece == "</tool_response>":
                responses.append(current)
                current = []
            elif isinstance(piece, Media) or (piece != "<tool_response>" and piece.strip()):
                current.append(piece)
    if current:
        raise RowError("text or media after the last </tool_response>: move it into a block")
    return responses


def _strip_report(parts: list[str | Media]) -> list[str | Media]:
    """Strip white space around a report, as a rollout does."""
    stripped = [part.strip() if isinstance(part, str) else part for part in parts]
    return [part for part in stripped if part != ""] or [NO_REPORT]


def _refuse_disorder(roles: list[str]) -> None:
    """Refuse turns unless the user comes first, the assistant last, and the assistant after every user turn."""
    if not roles or roles[0] != "user" or roles[-1] != "assistant":
        raise RowError(f"turns {roles}: must start with the user and end with the assistant")
    for before, after in itertools.pairwise(roles):
        if before == after == "assistant" or (before == "user" and after != "assistant"):
            raise RowError(
                f"turns {roles}: each user turn needs a turn of the assistant, and two of the assistant cannot follow each other"
            )
