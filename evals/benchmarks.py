"""benchmarks.py: the evaluation splits: read a dataset's folder into items, grade answers, and compute the figures.

    items = load_split("videomme", "/data/Video-MME")     # refuses an incomplete dataset and says how to complete it
    task = with_subtitles(item, times)                    # videomme_wsub: adds the cues of the sampled frames
    grade(item, answer, open_answer, judge)               # reads it as the rewards do; an unread answer scores 0
    figures("videomme", records)                          # in percent, the headline figure first

A dataset's folder is what `hf download` leaves, with its archives unpacked anywhere below it. Questions keep their
authors' words, and their options are lettered exactly once. Instructions come from the protocols.

Deliberately missing: downloads, splits with hidden answers, guesses where an answer cannot be read.
"""

import functools
import math
import os
import re
import shlex
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data import add_options, bare_options, listed_in_other_order, listed_options, parse_task, read_options
from episode import Task
from runtime.answers import LEAD, LETTERS, Judge, letters_of, score_answer, unboxed
from runtime.dataset import DataError, RowError, Rows

VIDEO_SUFFIXES = (".mp4", ".mkv", ".webm", ".avi", ".mov")
UNANSWERABLE = "?"  # gold of a row whose answer is not among its options: every reply is wrong


@dataclass(frozen=True)
class Cue:
    """One subtitle."""

    start: float  # seconds
    end: float
    text: str


@dataclass(frozen=True)
class Item:
    """One question of a split."""

    task: Task
    subtitles: tuple[Cue, ...] = ()  # in order
    caption: str = ""  # the event to locate, in a dataset of spans
    duration: str = ""  # VideoMME's class of the video's length: short, medium or long


# What `grade` returns. A prediction is a letter, "[start, end]" in seconds, or text. None: nothing could be read.
UNGRADED: dict[str, Any] = {"prediction": None, "score": 0.0, "judged": False}


class Files:
    """An index of all files below a root, by name and by folder/name. Links are followed."""

    def __init__(self, root: Path):
        self.root = root
        self._paths: dict[str, str] = {}  # key of a name -> path
        for folder, folders, names in os.walk(root, followlinks=True):
            folders.sort()
            for name in sorted(names):
                path = os.path.abspath(os.path.join(folder, name))
                self._paths.setdefault(_key(name), path)
                self._paths.setdefault(_key(f"{os.path.basename(folder)}/{name}"), path)

    def find(self, name: str) -> str | None:
        return self._paths.get(_key(name))

    def video(self, name: str) -> str:
        path = self.find(name if name.lower().endswith(VIDEO_SUFFIXES) else name + ".mp4")
        if path is None:
            raise FileNotFoundError(name)
        return path


def _key(name: str) -> str:
    """Return a key that ignores the container of a video, and that takes spaces for underscores."""
    stem, suffix = os.path.splitext(name.replace(" ", "_"))
    return f"{stem}.mp4" if suffix.lower() in VIDEO_SUFFIXES else stem + suffix


# ------------------------------------------------------------------------------------------------ rows to items


def _videomme(row: dict, _: int, files: Files) -> Item:
    video = files.video(row["videoID"])
    item = _choice(row["question_id"], row["question"], row["options"], row["answer"], video)  # videoIDs repeat
    return replace(item, duration=row.get("duration", ""))


def _videomme_wsub(row: dict, i: int, files: Files) -> Item:
    path = files.find(f"{row['videoID']}.srt")  # not every video has one
    return replace(_videomme(row, i, files), subtitles=_srt(path) if path else ())


def _longvideobench(row: dict, _: int, files: Files) -> Item:
    options = _without_fillers([row[f"option{n}"] for n in range(5)])
    gold = row["correct_choice"]
    letter = LETTERS[gold] if gold >= 0 else ""  # -1 where the answer is hidden
    return _choice(row["id"], row["question"], options, letter, files.video(row["video_path"]))


def _lvbench(row: dict, _: int, files: Files) -> Item:
    video = files.video(os.path.basename(row["video_path"]))
    return _choice(str(row["uid"]), row["question"], row.get("options") or (), row["answer"], video)


def _mlvu(row: dict, i: int, files: Files) -> Item:
    options = read_options(row["candidates"])
    gold = row["answer"].strip()
    letter = gold.strip("() .").upper()
    if letter not in tuple(LETTERS[: len(options)]):  # in the original dataset, the answer is an option's text
        letter = LETTERS[options.index(gold)] if gold in options else UNANSWERABLE
    return _choice(f"{row['task_type']}-{i}", row["question"], options, letter, files.video(row["video_name"]))


def _mmvu(row: dict, _: int, files: Files) -> Item:
    # The URL ends in videos/SUBJECT/NUMBER.mp4. Numbers repeat across subjects.
    url = urllib.parse.unquote(row["video"])
    video = files.video("/".join(url.split("/")[-2:]))
    if row["question_type"] == "open-ended":  # its choices are empty strings
        return Item(Task(row["id"], row["question"].strip(), (video,), "oe", row["answer"]))
    options = _without_fillers([row["choices"][letter] for letter in sorted(row["choices"])])
    return _choice(row["id"], row["question"], options, row["answer"], video)


def _charades(row: dict, i: int, files: Files) -> Item:
    # Times are stored as float16. Rounding restores the annotators' tenths of a second.
    start, end = (round(float(t), 1) for t in row["timestamp"])
    caption = row["caption"].strip()
    question = f"During which part of the video does this happen: {caption.rstrip('.')}?"
    task = Task(f"charades-{i}", question, (files.video(row["video"]),), "tvg", f"[{start}, {end}]")
    return Item(task, caption=caption)


def _toy(row: dict, i: int, files: Files) -> Item:
    return Item(parse_task(row, f"toy-{i}", files.root))


def _choice(id: str, question: str, options: Sequence[str], gold: str, video: str) -> Item:
    """Make a multiple-choice item. Its options may be bare, already lettered, or part of the question."""
    question = question.strip()
    options = bare_options(read_options(options))
    gold = gold.strip("() .").upper()
    question = add_options(question, options)
    options = options or listed_options(question)
    if gold != UNANSWERABLE and gold not in letters_of(options):
        raise RowError(f"its answer {gold!r} is none of its {len(options)} options; hidden answers cannot be graded")
    return Item(Task(id, question, (video,), "mcq", gold, options))


def _without_fillers(options: list) -> list:
    """Drop fillers at the end only, so that every option keeps its position and its letter."""
    while options and options[-1] in ("N/A", "", None):
        options.pop()
    return options


# ------------------------------------------------------------------------------------------------ subtitles


def with_subtitles(item: Item, times: Sequence[float]) -> Task:
    """Return the task with the cues of the sampled frames before its question, each once: Video-MME's official rule."""
    shown = [cue.text for cue in item.subtitles if any(cue.start <= t <= cue.end for t in times)]
    if not shown:
        return item.task
    return replace(item.task, question="\n".join(["Subtitles at these frames:", *shown, "", item.task.question]))


def seconds_of(time: str) -> float:
    """Return the seconds of a time like 12.5, 00:12.5 or 00:00:12.5."""
    return sum(float(part) * 60**i for i, part in enumerate(reversed(time.split(":"))))


@functools.lru_cache(maxsize=1)  # questions about one video are neighbours and share its cues
def _srt(path: str) -> tuple[Cue, ...]:
    """Read the cues of an .srt file, without font tags."""
    cues = []
    for block in re.split(r"\n\s*\n", Path(path).read_text(encoding="utf-8", errors="replace")):
        cue = re.search(r"(\d[\d:.,]*) *--> *(\d[\d:.,]*)[^\n]*\n(.*)", block, re.S)
        if not cue:
            continue
        start, end, text = cue.groups()
        text = " ".join(re.sub(r"<[^>]*>", " ", text).split())
        if text:
            cues.append(Cue(seconds_of(start.replace(",", ".")), seconds_of(end.replace(",", ".")), text))
    return tuple(sorted(cues, key=lambda cue: cue.start))


# ------------------------------------------------------------------------------------------------ the splits


@dataclass(frozen=True)
class Split:
    """The place of a split in its dataset, and its size."""

    hub: str  # the dataset's name on the hub; empty: study/toy.py builds it
    parse: Callable[[dict, int, Files], Item]  # (row, its index, files)
    question_files: str  # a glob, in the root or one folder down
    counts: tuple[int, ...] = ()  # allowed numbers of items; (): any
    subtitled: int = 0  # how many of its videos have an .srt file


_VIDEOMME = Split("lmms-lab/Video-MME", _videomme, "test-*.parquet", (2700,))
SPLITS = {
    "videomme": _VIDEOMME,
    "videomme_wsub": replace(_VIDEOMME, parse=_videomme_wsub, subtitled=744),
    # Its terms must be accepted on the hub first.
    "longvideobench": Split("longvideobench/LongVideoBench", _longvideobench, "validation-*.parquet", (1337,)),
    "lvbench": Split("lmms-lab/LVBench", _lvbench, "train-*.parquet", (1549,)),  # its only split is called train
    # Papers quote either number.
    "mlvu": Split("sy1998/MLVU_dev", _mlvu, "test-*.parquet", (2174, 2175)),
    "mmvu": Split("yale-nlp/MMVU", _mmvu, "validation.json", (1000,)),
    "charades": Split("lmms-lab/charades_sta", _charades, "test-*.parquet", (3720,)),
    "toy": Split("", _toy, "test.parquet"),
}  # fmt: skip


def count_items(name: str, root: str) -> int:
    return sum(len(Rows(path)) for path in _question_files(name, root))


def load_split(name: str, root: str, limit: int = 0) -> list[Item]:
    """Read the items of a split in the dataset's order. With a limit, read only the first ones, which need no other
    videos. Raise DataError if the dataset is incomplete."""
    split = SPLITS[name]
    hint = _hint(name, root)
    places = []  # (file, index in it) of every row
    for path in _question_files(name, root):
        rows = Rows(path)
        places += [(rows, n) for n in range(len(rows))]

    files = Files(Path(root).expanduser())
    items = []
    missing = []  # names of videos
    for i, (rows, n) in enumerate(places[: limit or None]):
        try:
            items.append(split.parse(rows[n], i, files))
        except FileNotFoundError as error:
            missing.append(str(error))
        except (KeyError, RowError) as error:
            raise DataError(f"{rows.path}: row {n}: {error!r}. Another revision of the dataset? {hint}") from None

    # Refuse an incomplete dataset: a score over fewer items does not compare.
    if split.counts and len(places) not in split.counts:
        wanted = " or ".join(map(str, split.counts))
        raise DataError(f"{root}: {name} has {wanted} items, found {len(places)}: are shards missing? {hint}")
    if missing:
        videos = sorted(set(missing))
        raise DataError(f"{len(videos)} videos of {name} are not below {root}, such as {', '.join(videos[:5])}. {hint}")
    subtitled = {video for item in items for video in item.task.videos if files.find(f"{Path(video).stem}.srt")}
    if not limit and len(subtitled) < split.subtitled:
        raise DataError(f"{root}: {split.subtitled} videos of {name} have an .srt file, found {len(subtitled)}. {hint}")
    repeated = len(items) - len({item.task.id for item in items})
    if repeated:  # results are stored by id
        raise DataError(f"{root}: {repeated} items of {name} have the id of another one. {hint}")
    _note_other_order(name, [item.task for item in items])
    return items


def _note_other_order(name: str, tasks: list[Task]) -> None:
    """Tell if questions list their options under other letters than the dataset. Its letter is the gold."""
    unlike = [task.id for task in tasks if listed_in_other_order(task.question, task.options)]
    if unlike:
        print(f"  note    {name}: {len(unlike)} questions list their options in another order, such as {unlike[0]}")


def _question_files(name: str, root: str) -> list[Path]:
    """Find the files with the questions, in the root or one folder down."""
    base = Path(root).expanduser()
    pattern = SPLITS[name].question_files
    paths = sorted(base.glob(pattern)) or sorted(base.glob(f"*/{pattern}"))
    if not paths:
        raise DataError(f"{root}: no file {pattern}, where {name} has its questions. {_hint(name, root)}")
    return paths


def _hint(name: str, root: str) -> str:
    """Say how to get a dataset."""
    hub = SPLITS[name].hub
    folder = shlex.quote(root)
    if not hub:
        return f"`python -m study.toy build {folder}` makes it."
    fetch = f"hf download {hub} --repo-type dataset --local-dir {folder}"
    unpack = "then unpack its archives (join their parts first), anywhere below it"
    return f"`{fetch}` fetches the dataset (if its page on the hub has terms, accept them first); {unpack}."


# ------------------------------------------------------------------------------------------------ answers


def grade(item: Item, answer: str | None, open_answer: str, judge: Judge | None = None) -> dict:
    """Grade the text that holds the answer (None: no answer). A judge can raise JudgeError."""
    task = item.task
    text = (answer or "").strip()
    if task.kind == "oe":
        text = re.sub(LEAD, "", unboxed(text))
    said, score = score_answer(text, task, open_answer, judge)
    if said is None:
        return dict(UNGRADED)
    judged = task.kind == "oe" and open_answer == "judge"
    prediction = str(list(said)) if task.kind == "tvg" else said
    return {"prediction": prediction, "score": score, "judged": judged}


# ------------------------------------------------------------------------------------------------ figures


def headline(name: str, records: Sequence[dict]) -> list[dict]:
    """Return the records whose mean score is the split's headline figure: of MMVU, those of its multiple-choice questions."""
    return [record for record in records if name != "mmvu" or record["kind"] == "mcq"]


def figures(name: str, records: Sequence[dict]) -> dict[str, float]:
    """Return a split's figures in percent, headline first, from the records of eval.py. An error scores 0."""
    scores = [record["score"] for record in records]
    first = _percent([record["score"] for record in headline(name, records)])
    if name == "charades":
        shares = {f"r@{least}": _percent([score >= least for score in scores]) for least in (0.3, 0.5, 0.7)}
        return {"miou": first} | shares
    if name == "mmvu":
        judged = any(record["judged"] for record in records)  # without a judge, open answers give no accuracy
        return {"mc_625": first, "all_1000": _percent(scores)} if judged else {"mc_625": first}
    return {"accuracy": first}


def _percent(values: Sequence[float]) -> float:
    return 100 * sum(values) / len(values) if values else math.nan
