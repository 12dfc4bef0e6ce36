"""data.py: read the rows of RL. A row becomes a Task; dialogues.py reads the rows of SFT.

A row, and what parse_task(row, origin, root) makes of it. rollout.render_prompt shows it with K frames:

    {"prompt": [{"role": "user", "content": "<video>Which?\\nA. red\\nB. blue"}], "videos": [{"video": "a.mp4"}],
     "extra_info": {"id": "a1", "question_type": "mcq", "answer": "(b)", "options": ["red", "blue"]}}
    -> Task("a1", "Which?\\nA. red\\nB. blue", ("/videos/a.mp4",), "mcq", "B", ("red", "blue"))

`origin` (file:row) names a row without an id, and relative paths start at `root`. `prompt`, `videos` and `extra_info` may also
be JSON strings. A row that cannot be used, or that has fields which RL would ignore, such as images, raises RowError.
runtime/dataset.py streams the rows, and `--check-data` checks them.

Deliberately missing: prompts. A row's system prompt is dropped, because SFT, RL and evaluation share runtime/prompts.py.
"""

import functools
import logging
import math
import os
import re
from pathlib import Path
from typing import Any

from episode import Task
from runtime.answers import LETTERS, letters_of, mark_times, normalise, parse_span
from runtime.dataset import RowError, decode_json, read_messages, read_paths, refuse_columns

log = logging.getLogger(__name__)

# question_type of a row, in lower case with _ for spaces and hyphens -> Task.kind
KINDS = {
    "mcq": "mcq", "multiple_choice": "mcq",
    "tvg": "tvg", "temporal": "tvg", "temporal_grounding": "tvg", "charades_tvg": "tvg",
    "oe": "oe", "open_ended": "oe",
}  # fmt: skip


def parse_task(row: dict, origin: str, root: Path) -> Task:
    """Return a row's task. `origin` names a row without an id."""
    refuse_columns(row, ("images", "audios", "objects"), "RL shows only videos")
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
            raise RowError(
                f"options = {list(options)}: the question lists them in another order; use the same order in both"
            )
        question = add_options(question, options)
        answer, options = _read_choice(answer, options, question)

    name = origin if info.get("id") is None else str(info["id"])
    name.encode()  # K and all seeds hash its bytes; this raises if it holds half a surrogate pair
    return Task(name, question, videos, kind, answer, options)


def _read_question(row: dict, n_videos: int) -> str:
    """Return the text of the user's message without <video>: all videos are shown before it. System prompts are dropped."""
    messages = read_messages(row, "prompt", "an RL row")
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


def _read_videos(row: dict, root: Path) -> tuple[str, ...]:
    """Return the paths of all videos. Every one must exist, because a question can have another answer without it."""
    urls = []
    for video in decode_json(row.get("videos") or [], "videos"):
        if isinstance(video, dict) and (video.get("video_start") or video.get("video_end")):
            raise RowError(f"{video}: RL shows whole videos; cut the window out, and remove video_start and video_end")
        urls.append(video["video"] if isinstance(video, dict) else video)
    if not urls:
        raise RowError(f"`videos` names no video; the row has {', '.join(row)}")
    paths = read_paths(urls, root)
    names = [os.path.basename(path) for path in set(paths)]
    if len(set(names)) < len(names):
        raise RowError(f"two videos are called {max(names, key=names.count)}, but calls use that name: rename one")
    return tuple(paths)


def _read_gold(answer: Any, kind: str) -> str:
    """Return the gold answer as text. Refuse one that no answer can match. In parquet, a missing answer is None."""
    if isinstance(answer, list | dict) and kind != "tvg":  # [12.5, 20.1] is a span
        raise RowError(f"answer = {answer!r}: must be one text")
    if isinstance(answer, float) and math.isnan(answer):  # pandas writes NaN for a missing answer
        raise RowError("answer = nan: the row has no answer; add it, or drop the row")
    gold = "" if answer is None else str(answer).strip()
    if kind == "tvg":
        span = parse_span(gold)
        if not span or span[0] == span[1]:
            raise RowError(f"answer = {gold!r}: the answer of a tvg must be a span of seconds, as in [12.5, 20.1]")
        _, times = mark_times(gold)
        if len(times) >= 4:
            raise RowError(f"answer = {gold!r}: the answer of a tvg must be one span; write one row per span")
    if kind == "oe" and not normalise(gold):
        raise RowError(f"answer = {gold!r}: the answer of an open question must have a word or a number")
    return gold


def _read_choice(gold: str, options: tuple[str, ...], question: str) -> tuple[str, tuple[str, ...]]:
    """Return the gold letter of an mcq, and its options: those of the row, or those that its question lists, as in published
    rows. The gold is the text of one option, or begins with a letter."""
    choices = options or listed_options(question)
    label = re.match(r"\(?([A-J])(?:[.):]|$)", gold, re.I)  # "B", "(b)", "B. A dog"; but not "A dog"
    if choices.count(gold) == 1 and gold.upper() not in tuple(LETTERS):  # "B" is the letter, even if an option is "B"
        letter = LETTERS[choices.index(gold)]
    elif label:
        letter = label[1].upper()
    else:
        letter = ""

    # The row's own options limit the letter. A list in the question does not: it may be a list of something else.
    allowed = letters_of(options)
    if letter not in allowed:
        rule = f"must begin with a letter of {''.join(allowed)}, as in (B), or be the text of one option"
        raise RowError(f"answer = {gold!r}: the answer of an mcq {rule}")
    if letter not in letters_of(choices):
        choices = ()
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
    if set(map(_option_key, options)) <= set(map(_option_key, listed_options(question))):
        return question
    return question + "".join(f"\n{letter}. {option}" for letter, option in zip(LETTERS, options))


def listed_in_other_order(question: str, options: tuple[str, ...]) -> bool:
    """Return whether the question lists the options under other letters than their places in `options` give them."""
    listed = [_option_key(option) for option in listed_options(question)]
    expected = [_option_key(option) for option in options]
    return set(expected) <= set(listed) and listed[: len(expected)] != expected


def _option_key(option: str) -> str:
    """Return what an option is compared by: "Blue." in a question is the option "blue"."""
    return _first_line(option).rstrip(".").casefold()


def listed_options(question: str) -> tuple[str, ...]:
    """Return the options that a question lists in its text, without their letters. Return () if it lists none."""
    one_per_line = r"(?m)^[ \t]*[(\[]?([A-J])[)\].:]+[ \t]*(?=\S)"  # "A. red\nB. blue"
    in_one_line = r"(?<![\w.])[(\[]?([A-J])(?:[)\]][ \t]*|[.:][ \t]+)(?=\S)"  # "(A) red (B) blue"
    for form in (one_per_line, in_one_line):
        labels = _longest_list(list(re.finditer(form, question)))
        if labels:
            ends = [label.start() for label in labels[1:]] + [len(question)]
            return tuple(_first_line(question[label.end() : end]) for label, end in zip(labels, ends))
    return ()


def _longest_list(labels: list[re.Match]) -> list[re.Match]:
    """Return the longest sequence of labels A, B, C, ... without a gap: of equally long ones the last, as in "ABCABC". A single
    label is no list."""
    letters = "".join(label[1] for label in labels)
    for count in range(len(LETTERS), 1, -1):
        first = letters.rfind(LETTERS[:count])
        if first >= 0:
            return labels[first : first + count]
    return []


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
