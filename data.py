"""data.py: read rows. An RL row becomes a Task, an SFT row a Dialogue.

An RL row, and what parse_task(row, origin, root) makes of it. rollout.render_prompt shows it with K frames:

    {"prompt": [{"role": "user", "content": "<video>Which?\\nA. red\\nB. blue"}], "videos": [{"video": "a.mp4"}],
     "extra_info": {"id": "a1", "question_type": "mcq", "answer": "(b)", "options": ["red", "blue"]}}
    -> Task("a1", "Which?\\nA. red\\nB. blue", ("/videos/a.mp4",), "mcq", "B", ("red", "blue"))

An SFT row, and what parse_dialogue(row, origin, root) makes of it. sft.encode_dialogue makes tokens and targets of that:

    {"messages": [{"role": "user", "content": [{"video": "a.mp4"}, "Which?"]},
                  {"role": "assistant", "content": "<think>I look.</think><tool_call>{...}</tool_call>"},
                  {"role": "user", "content": "<tool_response>\\nA red flash.\\n</tool_response>"},
                  {"role": "assistant", "content": "<think>Red.</think><answer>A</answer>"}]}
    -> Dialogue("rows.jsonl:0", "main", "Which?", (Media("/videos/a.mp4"),), turns)
       turns: assistant "<think>\\nI look. ...", tool "A red flash.", assistant "<think>\\nRed. ..."

Published SFT rows write the same turns in several ways. A Dialogue has the form that a rollout produces:

    tool results   `tool` messages, or <tool_response> blocks in a user message -> one `tool` turn each, without white
                   space around the report
    media          parts of a message, or `videos` and `images` columns with a <video> or <image> for each -> Media
    thoughts       with or without a line break after `<think>` -> with one
    agent          the optional column `agent`: main, direct or sub; with `request` and `system`, a sub-agent's prompts

`origin` (file:row) names a row without an id, and relative paths start at `root`. `prompt`, `extra_info`, `messages` and an RL
row's `videos` may also be JSON strings. A row that cannot be used, or that says what training would ignore, raises RowError.
runtime/dataset.py streams the rows, and `--check-data` checks them.

Deliberately missing: prompts. A row's system prompt is dropped, because SFT, RL and evaluation share runtime/prompts.py.
"""

import functools
import itertools
import logging
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from episode import Task
from runtime.answers import LETTERS, count_times, letters_of, normalise, parse_span
from runtime.dataset import RowError, decode_json
from runtime.render import NO_REPORT, THINK_PREFIX
from runtime.video import Clip, Videos
from runtime.visual import VisualContract

log = logging.getLogger(__name__)

# ------------------------------------------------------------------------------------------------ RL rows

# question_type of a row, in lower case with _ for spaces and hyphens -> Task.kind
KINDS = {
    "mcq": "mcq", "multiple_choice": "mcq",
    "tvg": "tvg", "temporal": "tvg", "temporal_grounding": "tvg", "charades_tvg": "tvg",
    "oe": "oe", "open_ended": "oe",
}  # fmt: skip


def parse_task(row: dict, origin: str, root: Path) -> Task:
    """Return a row's task. `origin` names a row without an id."""
    _refuse_columns(row, ("images", "audios", "objects"), "RL shows only videos")
    videos = _read_videos(row, root)
    question = _read_question(row, len(videos))

    # Read the answer as its kind of question asks. Published rows have no `options`.
    info = decode_json(row.get("extra_info") or {}, "extra_info")
    options = bare_options(read_options(info.get("options") or []))
    default = "mcq" if options else "oe"
    kind = _read_kind(str(info.get("question_type") or default)) or default
    answer = _read_gold(info.get("answer"), kind)
    if kind == "mcq":
        if listed_in_other_order(question, options):
            raise RowError(f"options = {list(options)}: the question lists them in another order; write both in one")
        question = add_options(question, options)
        answer, options = _read_choice(answer, options, question)

    name = origin if info.get("id") is None else str(info["id"])
    name.encode()  # K and all seeds hash its bytes; this raises if it holds half a surrogate pair
    return Task(name, question, videos, kind, answer, options)


def _read_question(row: dict, n_videos: int) -> str:
    """Return the text of the user's message without <video>: all videos are shown before it. System prompts are dropped."""
    messages = _read_messages(row, "prompt", "an RL row")
    turns = [message for message in messages if message.get("role") != "system"]
    roles = [turn.get("role") for turn in turns]
    if roles != ["user"]:
        raise RowError(f"`prompt` has the turns {roles}: RL asks one question; leave one user message")
    text = turns[0]["content"]
    if not isinstance(text, str) or not text.replace("<video>", "").strip():
        raise RowError("`prompt` has no user message with text: add one")
    if "<image>" in text:
        raise RowError("the question has <image>: RL shows only videos; remove it")
    if text.count("<video>") > n_videos:
        raise RowError(f"{text.count('<video>')} <video> in the question, but `videos` names {n_videos}: name them all")
    return text.replace("<video>", "").strip()


def _refuse_columns(row: dict, columns: Sequence[str], rule: str) -> None:
    """Refuse a row that holds something in one of these columns."""
    for column in columns:
        if _holds_something(row.get(column)):
            raise RowError(f"`{column}` = {row[column]!r}: {rule}; remove the column")


def _holds_something(value: Any) -> bool:
    """Return whether a field is filled. {"bbox": []} and {"url": None} are not."""
    return any(value.values()) if isinstance(value, dict) else bool(value)


def _read_messages(row: dict, column: str, needed_by: str) -> list[dict]:
    """Return the messages of an RL row or of an SFT row."""
    if column not in row:
        raise RowError(f"{needed_by} needs the field `{column}`; this one has {', '.join(row)}")
    messages = decode_json(row[column], column)
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise RowError(f"`{column}` is not a list of messages")
    return messages


def _read_videos(row: dict, root: Path) -> tuple[str, ...]:
    """Return the paths of all videos. Every one must exist, because a question can have another answer without it."""
    urls = []
    for video in decode_json(row.get("videos") or [], "videos"):
        if isinstance(video, dict) and (video.get("video_start") or video.get("video_end")):
            raise RowError(f"{video}: RL shows whole videos; cut the window out, and remove video_start and video_end")
        urls.append(video["video"] if isinstance(video, dict) else video)
    if not urls:
        raise RowError(f"`videos` names no video; the row has {', '.join(row)}")
    paths = _read_paths(urls, root)
    names = [os.path.basename(path) for path in set(paths)]
    if len(set(names)) < len(names):
        raise RowError(f"two videos are called {max(names, key=names.count)}, but calls use that name: rename one")
    return tuple(paths)


def _read_paths(urls: Sequence[str], root: Path) -> list[str]:
    """Return absolute paths without file://. Relative ones start at `root`. Refuse a file that does not exist."""
    paths = [os.path.abspath(os.path.join(root, url.removeprefix("file://"))) for url in urls]
    missing = [path for path in paths if not os.path.exists(path)]
    if missing:
        raise RowError(f"{', '.join(missing)}: no such file")
    return paths


def _read_gold(answer: Any, kind: str) -> str:
    """Return the gold answer as text. Refuse one that no answer can match. In parquet, a missing answer is None."""
    if isinstance(answer, list | dict) and kind != "tvg":  # [12.5, 20.1] is a span
        raise RowError(f"answer = {answer!r}: must be one text")
    if isinstance(answer, float) and math.isnan(answer):  # pandas writes a missing answer so
        raise RowError("answer = nan: the row has no answer; add it, or drop the row")
    gold = "" if answer is None else str(answer).strip()
    if kind == "tvg":
        span = parse_span(gold)
        if not span or span[0] == span[1]:
            raise RowError(f"answer = {gold!r}: the answer of a tvg must be a span of seconds, as in [12.5, 20.1]")
        if count_times(gold) >= 4:
            raise RowError(f"answer = {gold!r}: the answer of a tvg must be one span; make a row of each")
    if kind == "oe" and not normalise(gold):
        raise RowError(f"answer = {gold!r}: the answer of an open question must have a word or a number")
    return gold


def _read_choice(gold: str, options: tuple[str, ...], question: str) -> tuple[str, tuple[str, ...]]:
    """Return the gold letter of an mcq, and its options: those of the row, or those that its question lists, as in published
    rows. The gold is the text of one option, or begins with a letter."""
    choices = options or listed_options(question)
    letter = ""
    label = re.match(r"\(?([A-J])(?:[.):]|$)", gold, re.I)  # "B", "(b)", "B. A dog"; but not "A dog"
    if label:
        letter = label[1].upper()
    if choices.count(gold) == 1 and gold.upper() not in tuple(LETTERS):  # "B" is the letter, even if an option is "B"
        letter = LETTERS[choices.index(gold)]

    # The row's own options limit the letter. A list in the question does not: it may be a list of something else.
    allowed = letters_of(options)
    if not letter or letter not in allowed:
        rule = f"must begin with a letter of {''.join(allowed)}, as in (B), or be the text of one option"
        raise RowError(f"answer = {gold!r}: the answer of an mcq {rule}")
    if letter not in letters_of(choices):
        return letter, ()
    return letter, choices


def read_options(options: Any) -> tuple[str, ...]:
    """Return the options of a row, as a dataset lists them. Refuse anything but a list of at most ten texts."""
    texts = isinstance(options, list | tuple) and all(isinstance(option, str) for option in options)
    if not texts or len(options) > len(LETTERS):
        raise RowError(f"options = {options!r}: must be a list of at most {len(LETTERS)} texts")
    return tuple(option.strip() for option in options)


def bare_options(options: tuple[str, ...]) -> tuple[str, ...]:
    """Strip the letters from the options if every option has its own."""
    bare = []
    for letter, option in zip(LETTERS, options):
        lettered = re.fullmatch(rf"\(?{letter}\)?[.:)]\s*(.*)", option, re.S)  # "(A) red", "A. red"
        if not lettered:
            return options
        bare.append(lettered[1])
    return tuple(bare)


def add_options(question: str, options: tuple[str, ...]) -> str:
    """Append the options to the question, each with its letter, unless it lists them itself."""
    if {_first_line(option) for option in options} <= set(listed_options(question)):
        return question
    return question + "".join(f"\n{letter}. {option}" for letter, option in zip(LETTERS, options))


def listed_in_other_order(question: str, options: tuple[str, ...]) -> bool:
    """Return whether the question lists the options under other letters than their places in `options` give them."""
    listed = listed_options(question)
    expected = tuple(_first_line(option) for option in options)
    return set(expected) <= set(listed) and listed[: len(expected)] != expected


def listed_options(question: str) -> tuple[str, ...]:
    """Return the options that a question lists in its text, without their letters. Return () if it lists none."""
    one_per_line = r"(?m)^[ \t]*[(\[]?([A-J])[)\].:]+[ \t]*(?=\S)"  # "A. red\nB. blue"
    in_one_line = r"(?<![\w.])[(\[]?([A-J])(?:[)\]][ \t]*|[.:][ \t]+)(?=\S)"  # "(A) red (B) blue"
    for form in (one_per_line, in_one_line):
        labels = list(re.finditer(form, question))
        letters = "".join(label[1] for label in labels)
        # Find the longest sequence A, B, C, ... without a gap, and take its last occurrence: in "ABCABC", the second.
        for count in range(len(LETTERS), 1, -1):
            first = letters.rfind(LETTERS[:count])
            if first >= 0:
                chosen = labels[first : first + count]
                ends = [label.start() for label in chosen[1:]] + [len(question)]
                return tuple(_first_line(question[label.end() : end]) for label, end in zip(chosen, ends))
    return ()


def _first_line(text: str) -> str:
    return text.strip().split("\n")[0].strip(" \t;,")


@functools.cache  # the cache makes each unknown type log once per process
def _read_kind(question_type: str) -> str | None:
    """Return a question's kind. None: the type is unknown. Without options it is then open-ended, as in the release."""
    kind = KINDS.get(re.sub("[- ]", "_", question_type.lower()))
    if kind is None:
        counts_as = "mcq if the row has options, otherwise as open-ended"
        log.warning("question_type = %r: unknown, so such a question counts as %s", question_type, counts_as)
    return kind


# ------------------------------------------------------------------------------------------------ SFT rows


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
        if self.still:
            return 0.0, 0.0
        if self.start is None:
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
    # Read each message as texts and media. Media of columns take the places that the messages leave for them.
    contents = []
    for message in _read_messages(row, "messages", "an SFT row"):
        contents.append((message.get("role"), _read_parts(message, root)))
    contents = _place_media(contents, row, root)

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


# ------------------------------------------------------------------------------------------------ SFT rows: texts and media


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
    keys = [key for key in ("video_url", "image_url", "video", "image") if _holds_something(part.get(key))]
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
    [path] = _read_paths([url], root)
    nframes, start, end = options.get("nframes"), options.get("video_start"), options.get("video_end")
    if (start is None) != (end is None) or (start is not None and not -math.inf < start < end < math.inf):
        raise RowError(f"{path}: video_start = {start}, video_end = {end}: must be seconds, with start before end")
    if nframes is not None and not (isinstance(nframes, int) and nframes > 0):
        raise RowError(f"{path}: nframes = {nframes!r}: must be a whole number above 0")
    return Media(path, nframes, start, end, still=keys[0].startswith("image"))


def _place_media(contents: list[tuple[str, list]], row: dict, root: Path) -> list[tuple[str, list]]:
    """Put media from columns where the messages show them. In the layout of ms-swift and LLaMA-Factory, each `<video>` of a
    user or tool turn is the next entry of `videos`, and each `<image>` of `images`. Refuse media that no message shows."""
    _refuse_columns(row, ("objects", "audios"), "SFT shows only videos and images")
    media = {"<video>": _read_column("video", row, root), "<image>": _read_column("image", row, root)}

    # If the messages have their media, a placeholder is only text.
    shown = [part.path for _, parts in contents for part in parts if isinstance(part, Media)]
    if shown:
        for entry in [*media["<video>"], *media["<image>"]]:
            if entry.path not in shown:
                raise RowError(f"{entry.path}: in a column of the row, but no message shows it; add it to a message")
        return contents

    # Otherwise all parts are texts, and each placeholder in them needs its entry.
    asked = "\n".join(part for role, parts in contents if role in ("user", "tool") for part in parts)
    for placeholder, entries in media.items():
        count = asked.count(placeholder)
        if count != len(entries):
            column = placeholder.strip("<>") + "s"
            raise RowError(
                f"{count} {placeholder} in user and tool turns, but `{column}` names {len(entries)}: "
                f"write one {placeholder} for each"
            )

    # Replace the placeholders in order.
    placed = []
    for role, parts in contents:
        if role not in ("user", "tool"):
            placed.append((role, parts))
            continue
        pieces: list[str | Media] = []
        for text in parts:
            for piece in re.split("(<video>|<image>)", text):
                pieces.append(media[piece].pop(0) if piece in media else piece)  # the next entry of its column
        placed.append((role, pieces))
    return placed


def _read_column(kind: str, row: dict, root: Path) -> list[Media]:
    """Read the videos or images of a row that stand beside its messages: one path, or a list of paths."""
    entries = row.get(f"{kind}s") or row.get(kind) or []
    if isinstance(entries, str):
        entries = [entries]
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise RowError(f"`{kind}s` = {entries!r}: must be a list of paths")
    return [_read_part({kind: entry}, root) for entry in entries]


# ------------------------------------------------------------------------------------------------ SFT rows: turns


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
        text = _open_turn("".join(parts))
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
            raise RowError(f"turns {roles}: the assistant must follow each user turn, and never its own")
