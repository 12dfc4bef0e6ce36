"""dialogue.py: parse an SFT row into a Dialogue. sft.encode_dialogue then makes its tokens.

Published rows write the same turns in many ways. A Dialogue has the form that a rollout produces: one turn per tool response,
a line break after `<think>`, no white space around a report. Deliberately missing: prompts. A row's system prompt is dropped,
because SFT, RL and evaluation share the prompts of prompts.py.
"""

import itertools
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

from runtime.dataset import RowError, decode_json, resolve_path
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
        if self.start is None:
            return videos.overview(self.path, self.nframes or contract.overview_frames, contract.frame_size)
        fps, max_frames = contract.crop_fps, contract.crop_max_frames
        return videos.window(self.path, self.start, self.end, contract.crop_size, fps, max_frames)

    def window(self, videos: Videos) -> tuple[float, float]:
        """Return which seconds of its file it shows."""
        if self.start is not None:
            return self.start, self.end
        return 0.0, 0.0 if self.still else videos.info(self.path).duration


@dataclass(frozen=True)
class Dialogue:
    """An SFT row: the opening question and the turns that follow it."""

    id: str
    agent: str  # the agent to teach: main | direct (a main agent without tools) | sub
    question: str
    media: tuple[Media, ...]  # videos and images beside the question
    turns: tuple[dict, ...]  # {"role": assistant | user | tool, "content": [str | Media, ...]}
    request: str = ""  # the sub-agent's instruction, as in tools.ClipForSubagent; empty: prompts.SUBAGENT_REQUEST
    system: str = ""  # the sub-agent's system prompt; empty: prompts.subagent_system_prompt


def parse_dialogue(row: dict, origin: str, root: Path) -> Dialogue:
    """Read `messages` (a JSON string or a list). Tool results are `tool` messages, or user text in <tool_response> tags.
    Videos and images are parts of the messages, or stand in columns of their own (`_place_media`).

    Three more columns are optional. `agent` marks rows that teach another agent than the main one. `request` and `system` are
    a sub-agent's prompts, if its tool brings its own."""
    if "messages" not in row:
        raise RowError(f"an SFT row needs the field `messages`; this one has {', '.join(row)} (`prompt` is for rl.py)")
    messages = decode_json(row["messages"], "messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise RowError("`messages` is not a list of messages")
    contents = [(message.get("role"), _read_parts(message, root)) for message in messages]
    turns = []
    for role, parts in _place_media(contents, row, root):
        turns += _read_turns(role, parts)

    # The user comes first, the assistant last, and every user turn is followed by the assistant.
    roles = [turn["role"] for turn in turns]
    if not roles or roles[0] != "user" or roles[-1] != "assistant":
        raise RowError(f"turns {roles}: must start with the user and end with the assistant")
    for before, after in itertools.pairwise(roles):
        if before == after == "assistant" or (before == "user" and after != "assistant"):
            raise RowError(f"turns {roles}: the assistant must follow each user turn, and never its own")

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


def _place_media(contents: list[tuple[str, list]], row: dict, root: Path) -> list[tuple[str, list]]:
    """Put media from columns where the messages show them. In the layout of ms-swift and LLaMA-Factory, each `<video>` of a
    user or tool turn is the next entry of `videos`, and each `<image>` of `images`. Refuse media that no message shows."""
    for column in ("objects", "audios"):
        entries = row.get(column)
        if any(entries.values()) if isinstance(entries, dict) else entries:  # {"bbox": []} has none
            raise RowError(f"`{column}` = {entries!r}: SFT shows only videos and images; remove the column")
    media = {"<video>": _read_column("video", row, root), "<image>": _read_column("image", row, root)}
    shown = {part.path for _, parts in contents for part in parts if isinstance(part, Media)}
    if shown:  # the messages have their media, and a placeholder is only text
        unseen = [entry.path for entries in media.values() for entry in entries if entry.path not in shown]
        if unseen:
            raise RowError(f"{', '.join(unseen)}: in a column of the row, but no message shows it; add it to a message")
        return contents

    asked = "\n".join(part for role, parts in contents if role in ("user", "tool") for part in parts)
    for placeholder, entries in media.items():
        count = asked.count(placeholder)
        if count != len(entries):
            column = placeholder.strip("<>") + "s"
            told = f"{count} {placeholder} in user and tool turns, but `{column}` names {len(entries)}"
            raise RowError(f"{told}: write one {placeholder} for each")
    placed = []
    for role, parts in contents:
        if role in ("user", "tool"):
            pieces = [piece for part in parts for piece in re.split("(<video>|<image>)", part)]
            parts = [media[piece].pop(0) if piece in media else piece for piece in pieces]
        placed.append((role, parts))
    return placed


def _read_column(kind: str, row: dict, root: Path) -> list[Media]:
    """Read the videos or images of a row that stand beside its messages: one path, or a list of paths."""
    entries = row.get(f"{kind}s") or row.get(kind) or []
    if isinstance(entries, str):
        entries = [entries]
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise RowError(f"`{kind}s` = {entries!r}: must be a list of paths")
    return [_read_media({kind: entry}, root) for entry in entries]


def _read_turns(role: str, parts: list[str | Media]) -> list[dict]:
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
        return [{"role": "assistant", "content": [_open_turn("".join(parts))]}]
    raise RowError(f"role {role!r}: must be system, user, assistant or tool")


def _read_parts(message: dict, root: Path) -> list[str | Media]:
    """Return a message's texts and media."""
    if message.get("tool_calls"):
        raise RowError("a message has `tool_calls`: write calls into its content, as <tool_call>...</tool_call>")
    content = message.get("content")
    if isinstance(content, str):
        content = [content]
    parts: list[str | Media] = []
    for part in content or []:
        if isinstance(part, str):
            parts.append(part)
        elif part.get("type") == "text" and isinstance(part.get("text"), str):
            parts.append(part["text"])
        else:
            parts.append(_read_media(part, root))
    return parts


def _read_media(part: dict, root: Path) -> Media:
    """Read a part with media: {"video": path}, {"video_url": {"url": path}}, or the same keys with `image`."""
    keys = [key for key in ("video_url", "image_url", "video", "image") if part.get(key)]
    if not keys:
        raise RowError(f"a part of type {part.get('type')!r} is neither text, video nor image")
    url = part[keys[0]]
    options = part
    if isinstance(url, dict):  # options can be in it, beside the URL
        options = url | part
        url = url["url"]
    path = resolve_path(url, root)
    if not os.path.exists(path):
        raise RowError(f"{path}: no such file")
    nframes, start, end = options.get("nframes"), options.get("video_start"), options.get("video_end")
    windowed = start is not None or end is not None
    if windowed and not -math.inf < start < end < math.inf:  # only one given: a TypeError, so a RowError
        raise RowError(f"{path}: video_start = {start}, video_end = {end}: must be seconds, with start before end")
    if nframes is not None and not (isinstance(nframes, int) and nframes > 0):
        raise RowError(f"{path}: nframes = {nframes!r}: must be a whole number above 0")
    return Media(path, nframes, start, end, still=keys[0].startswith("image"))


def _open_turn(text: str) -> str:
    """Make an assistant's turn begin as in a rollout, where `<think>\\n` is forced. Published rows begin with `<think>Thought`
    or `<think>\\n\\n`, which would teach another first token than the model needs there."""
    text = text.lstrip()
    if text.startswith("<think>"):
        text = THINK_PREFIX + text.removeprefix("<think>").lstrip()
    return text


def _strip_report(parts: list[str | Media]) -> list[str | Media]:
    """Strip white space around a report, as a rollout does."""
    stripped = [part.strip() if isinstance(part, str) else part for part in parts]
    return [part for part in stripped if part != ""] or [NO_REPORT]


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
