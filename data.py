"""data.py: turn RL rows into tasks, and show a task's videos.

    parse_task(RL row) -> Task;  overview(task, k, videos, contract) -> clips

runtime/dataset.py streams the rows, and `--check-data` checks them. runtime/prompts.py makes the prompts.
"""

import functools
import hashlib
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from episode import Task
from runtime.answers import LETTERS, normalise, parse_span
from runtime.dataset import RowError, decode_json, resolve_path
from runtime.video import Clip, Videos
from runtime.visual import VisualContract

log = logging.getLogger(__name__)


def overview(task: Task, k: int, videos: Videos, contract: VisualContract) -> list[Clip]:
    """Return K uniformly spaced frames, divided among the task's videos. Each video shows at least one."""
    lengths = [videos.info(path).n_frames for path in task.videos]
    shares = [0] * len(lengths)
    left = min(max(k, len(lengths)), sum(lengths))
    # Give one more frame to each video in turn. Longer videos get the share that a short one cannot fill.
    while left:
        for i, length in enumerate(lengths):
            if left and shares[i] < length:
                shares[i] += 1
                left -= 1
    return [videos.overview(path, share, contract.frame_size) for path, share in zip(task.videos, shares)]


def draw_k(task_id: str, epoch: int, choices: Sequence[int], seed: int = 0) -> int:
    """Draw K ~ Uniform(choices) for nFrames gating. All processes, and all episodes of the task's group, get the same K."""
    digest = hashlib.sha256(f"{seed}/{epoch}/{task_id}".encode()).digest()
    return choices[int.from_bytes(digest[:8], "big") % len(choices)]


# ------------------------------------------------------------------------------------------------ RL rows


# question_type of a row, in lower case with _ for spaces and hyphens -> Task.kind
KINDS = {
    "mcq": "mcq", "multiple_choice": "mcq",
    "tvg": "tvg", "temporal": "tvg", "temporal_grounding": "tvg", "charades_tvg": "tvg",
    "oe": "oe", "open_ended": "oe",
}  # fmt: skip


def parse_task(row: dict, origin: str, root: Path) -> Task:
    """Return a row's task. Relative paths start at `root`, and `origin` names a row without an id.

    {"prompt": [{"role": "user", "content": "<video>Which?\\nA. red\\nB. blue"}], "videos": [{"video": "a.mp4"}],
     "extra_info": {"id": "a1", "question_type": "mcq", "answer": "B", "options": ["red", "blue"]}}"""
    question = _read_question(row)
    videos = _read_videos(row, root)
    info = decode_json(row.get("extra_info") or {}, "extra_info")
    options = read_options(info.get("options") or [])
    kind = _read_kind(str(info.get("question_type") or ("mcq" if options else "oe")))
    answer = _read_gold(info.get("answer"), kind)
    if kind == "mcq":
        answer, options = _read_choice(answer, options, question)
    name = origin if info.get("id") is None else str(info["id"])
    name.encode()  # K and all seeds hash its bytes; this raises if it holds half a surrogate pair
    return Task(name, question, videos, kind, answer, options)


def _read_question(row: dict) -> str:
    """Return the text of the last user message."""
    if "prompt" not in row:
        raise RowError(f"an RL row needs the field `prompt`; this one has {', '.join(row)} (`messages` is for sft.py)")
    messages = decode_json(row["prompt"], "prompt")
    contents = [m["content"] for m in messages or [] if isinstance(m, dict) and m.get("role") == "user"]
    if not contents or not isinstance(contents[-1], str):
        raise RowError("`prompt` has no user message with text: add one")
    return contents[-1].replace("<video>", "").strip()


def _read_videos(row: dict, root: Path) -> tuple[str, ...]:
    """Return the paths of all videos. Every one must exist, because a question can have another answer without it."""
    paths = []
    for video in decode_json(row.get("videos") or [], "videos"):
        if isinstance(video, dict) and (video.get("video_start") or video.get("video_end")):
            raise RowError(f"{video}: RL shows whole videos; cut the window out, and remove video_start and video_end")
        paths.append(resolve_path(video["video"] if isinstance(video, dict) else video, root))
    if not paths:
        raise RowError(f"`videos` names no video; the row has {', '.join(row)}")
    missing = [path for path in paths if not os.path.exists(path)]
    if missing:
        raise RowError(f"{', '.join(missing)}: no such file")
    names = [os.path.basename(path) for path in set(paths)]
    if len(set(names)) < len(names):
        raise RowError(f"two videos are called {max(names, key=names.count)}, but calls use that name: rename one")
    return tuple(paths)


def _read_gold(answer: Any, kind: str) -> str:
    """Return the gold answer as text. Refuse one that no answer can match. Parquet fills gaps with None."""
    if isinstance(answer, list | dict) and kind != "tvg":  # [12.5, 20.1] is a span
        raise RowError(f"answer = {answer!r}: must be one text")
    gold = "" if answer is None else str(answer).strip()
    if kind == "tvg":
        start, end = parse_span(gold) or (0, 0)
        if start == end:
            raise RowError(f"answer = {gold!r}: the answer of a tvg must be a span of seconds, as in [12.5, 20.1]")
    if kind == "oe" and not normalise(gold):
        raise RowError(f"answer = {gold!r}: the answer of an open question must have a word or a number")
    return gold


def _read_choice(gold: str, options: tuple[str, ...], question: str) -> tuple[str, tuple[str, ...]]:
    """Return the gold letter of an mcq, and its options: those of the row, or those that its question lists, as in published
    rows. The gold is the text of one option, or begins with a letter."""
    allowed = LETTERS[: len(options) or None]
    options = options or listed_options(question)
    label = re.match(r"\(?([A-J])(?:[.):]|$)", gold, re.I)  # "B", "(b)", "B. A dog"; but not "A dog"
    letter = label[1].upper() if label else ""
    if options.count(gold) == 1 and gold.upper() not in tuple(LETTERS):
        letter = LETTERS[options.index(gold)]
    if not letter or letter not in allowed:
        rule = f"must begin with a letter of {allowed}, as in (B), or be the text of one option"
        raise RowError(f"answer = {gold!r}: the answer of an mcq {rule}")
    # A list in the question that lacks the gold letter is another list.
    return letter, options if letter in LETTERS[: len(options)] else ()


def read_options(options: Any) -> tuple[str, ...]:
    """Return the options of a row, as a dataset lists them. Refuse anything but a list of at most ten texts."""
    texts = isinstance(options, list | tuple) and all(isinstance(option, str) for option in options)
    if not texts or len(options) > len(LETTERS):
        raise RowError(f"options = {options!r}: must be a list of at most {len(LETTERS)} texts")
    return tuple(option.strip() for option in options)


def listed_options(question: str) -> tuple[str, ...]:
    """Return the options that a question lists in its text, without their letters. Return () if it lists none."""
    one_per_line = r"(?m)^[ \t]*[(\[]?([A-J])[)\].:]+[ \t]*(?=\S)"  # "A. red\nB. blue"
    in_one_line = r"(?<![\w.])[(\[]?([A-J])(?:[)\]][ \t]*|[.:][ \t]+)(?=\S)"  # "(A) red (B) blue"
    for form in (one_per_line, in_one_line):
        labels = list(re.finditer(form, question))
        letters = "".join(label[1] for label in labels)
        # Find the longest sequence A, B, C, ... without a gap, and take its last occurrence.
        for count in range(len(LETTERS), 1, -1):
            first = letters.rfind(LETTERS[:count])
            if first >= 0:
                return _texts_after(labels[first : first + count], question)
    return ()


def _texts_after(labels: list[re.Match], question: str) -> tuple[str, ...]:
    """Return the first line after each label, up to the next label."""
    texts = []
    ends = [label.start() for label in labels[1:]] + [len(question)]
    for label, end in zip(labels, ends):
        line = question[label.end() : end].strip().split("\n")[0]
        texts.append(line.strip(" \t;,"))
    return tuple(texts)


@functools.cache  # so an unknown type is reported once
def _read_kind(question_type: str) -> str:
    """Return a question's kind. As in the release, a question of an unknown type is open-ended."""
    kind = KINDS.get(re.sub("[- ]", "_", question_type.lower()))
    if kind is None:
        log.warning("question_type = %r: unknown, so such questions count as open-ended", question_type)
    return kind or "oe"
