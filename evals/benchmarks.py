"""benchmarks.py: the evaluation splits. A dataset's own folder -> items; an answer -> a grade; grades -> figures.

    items = load_split("videomme", "/data/Video-MME")     # refuses an incomplete dataset and says how to complete it
    task = ask_with_subtitles(item, times)                # the *_wsub splits: the cues of the sampled frames, no others
    grade(item, answer, cfg)                              # read by the rewards' parser; unparsed or no answer scores 0
    figures("videomme", records)                          # in percent, the headline figure first

A dataset's folder is what `hf download NAME --repo-type dataset --local-dir ROOT` leaves, with its archives unpacked
anywhere below it. Videos are found by name in all folders (links are followed), whatever their container.

A question reads as its authors wrote it, its options lettered exactly once. Instructions belong to the protocols.

Deliberately missing: downloads, splits with hidden answers, guesses in place of answers that cannot be read.
"""

import collections
import functools
import itertools
import math
import os
import re
import shlex
import sys
import urllib.parse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from data import Task, parse_task
from rewards import RewardConfig, accuracy
from runtime.answers import parse_letter, parse_span, seconds_of
from runtime.dataset import DataError, RowError, Rows

LETTERS = tuple("ABCDEFGHIJ")
VIDEO_SUFFIXES = (".mp4", ".mkv", ".webm", ".avi", ".mov")
LENGTHS = ("short", "medium", "long")
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
    groups: dict[str, tuple[str, ...]]  # what the figures are broken down by; several labels where the dataset has them
    subtitles: tuple[Cue, ...] = ()  # in order


# What `grade` returns. The prediction is a letter, "[start, end]" in seconds, or text; None: nothing could be read.
UNGRADED = {"prediction": None, "score": 0.0, "judged": False}


class VideoMissing(Exception):
    """The row's video is not below the root."""


class Files:
    """All files below a root, by name or folder/name: it does not matter where an archive was unpacked."""

    def __init__(self, root: Path):
        self.root, self._paths = root, {}
        for folder, folders, names in os.walk(root, followlinks=True):
            folders.sort()
            for name in sorted(names):
                path = os.path.abspath(os.path.join(folder, name))
                for key in (name, f"{os.path.basename(folder)}/{name}"):
                    self._paths.setdefault(_key(key), path)

    def find(self, name: str) -> str | None:
        return self._paths.get(_key(name))

    def video(self, name: str) -> str:
        if path := self.find(name if name.lower().endswith(VIDEO_SUFFIXES) else name + ".mp4"):
            return path
        raise VideoMissing(name)


def _key(name: str) -> str:
    """The same for every container of a video, and for folders with spaces or underscores."""
    stem, suffix = os.path.splitext(name.replace(" ", "_"))
    return stem + (".mp4" if suffix.lower() in VIDEO_SUFFIXES else suffix)


# ------------------------------------------------------------------------------------------------ rows -> items


def _videomme(row: dict, _: int, files: Files) -> Item:
    video = files.video(row["videoID"])
    groups = {"duration": (row["duration"],)}
    # The id is question_id: three questions share a videoID.
    return _choice(row["question_id"], row["question"], row["options"], row["answer"], video, groups)


def _videomme_wsub(row: dict, i: int, files: Files) -> Item:
    path = files.find(f"{row['videoID']}.srt")  # not every video has one
    return replace(_videomme(row, i, files), subtitles=_srt(path) if path else ())


def _longvideobench(row: dict, _: int, files: Files) -> Item:
    # The raw JSON lists the candidates; the parquet spreads them over columns and fills up with N/A.
    options = list(row["candidates"] if "candidates" in row else (row[f"option{n}"] for n in range(5)))
    options, gold = _without_fillers(options), row["correct_choice"]
    letter = LETTERS[gold] if gold >= 0 else ""  # -1 where the answer is hidden
    groups = {"duration": (str(int(row["duration_group"])),)}
    return _choice(row["id"], row["question"], options, letter, files.video(row["video_path"]), groups)


def _lvbench(row: dict, _: int, files: Files) -> Item:
    video = files.video(os.path.basename(row["video_path"]))
    types = row.get("question_type") or ()
    groups = {"type": (types,) if isinstance(types, str) else tuple(types)}
    return _choice(str(row["uid"]), row["question"], row.get("options") or (), row["answer"], video, groups)


def _mlvu(row: dict, i: int, files: Files) -> Item:
    kind, video = row["task_type"], files.video(row["video_name"])
    options, gold = [option.strip() for option in row["candidates"]], row["answer"].strip()
    letter = gold.strip("() .").upper()
    if letter not in LETTERS[: len(options)]:  # the original's answers are texts
        letter = LETTERS[options.index(gold)] if gold in options else UNANSWERABLE
    return _choice(f"{kind}-{i}", row["question"], options, letter, video, {"task": (kind,)})


def _mmvu(row: dict, _: int, files: Files) -> Item:
    # A URL that ends in videos/SUBJECT/NUMBER.mp4; the numbers start anew in every subject.
    url = urllib.parse.unquote(row["video_path"] if "video_path" in row else row["video"])
    video = files.video("/".join(url.split("/")[-2:]))
    if row["question_type"] == "open-ended":  # its choices are empty texts
        return Item(Task(row["id"], row["question"].strip(), (video,), "oe", row["answer"]), {})
    options = _without_fillers([row["choices"][letter] for letter in sorted(row["choices"])])
    return _choice(row["id"], row["question"], options, row["answer"], video, {})


def _charades(row: dict, i: int, files: Files) -> Item:
    # Stored as float16; the annotators wrote tenths of a second, which rounding restores.
    start, end = (round(float(t), 1) for t in row["timestamp"])
    caption = row["caption"].strip().rstrip(".")
    question = f"During which part of the video does this happen: {caption}? Give its start and end in seconds."
    return Item(Task(f"charades-{i}", question, (files.video(row["video"]),), "tvg", f"[{start}, {end}]"), {})


def _toy(row: dict, i: int, files: Files) -> Item:
    return Item(parse_task(row, f"toy-{i}", files.root), {})


def _choice(
    id: str, question: str, options: Sequence[str], gold: str, video: str, groups: dict[str, tuple[str, ...]]
) -> Item:
    """A multiple-choice item, whether the options are bare, already lettered, or part of the question."""
    question, options, gold = question.strip(), _bare(options), gold.strip("() .").upper()
    listed = _listed(question)
    if not (listed and all(option in listed for option in options)):
        question += "".join(f"\n{letter}. {option}" for letter, option in zip(LETTERS, options))
    options = options or listed
    if gold != UNANSWERABLE and gold not in LETTERS[: len(options) or None]:
        raise RowError(f"its answer {gold!r} is none of its {len(options)} options; splits with hidden answers are out")
    return Item(Task(id, question, (video,), "mcq", gold, options), groups)


def _bare(options: Sequence[str]) -> tuple[str, ...]:
    """Options without letters, where each one has its own."""
    parts = [re.fullmatch(rf"\(?{letter}\)?[.:)]\s*(.*)", o.strip(), re.S) for letter, o in zip(LETTERS, options)]
    return tuple(part[1] for part in parts) if all(parts) else tuple(option.strip() for option in options)


def _listed(question: str) -> tuple[str, ...]:
    """The options that a question lists itself, one a line."""
    lines = re.findall(r"^[ \t]*\(?([A-J])\)?[.:)][ \t]*(.*?)[ \t]*$", question, re.M)
    in_order = len(lines) > 1 and all(letter == due for (letter, _), due in zip(lines, LETTERS))
    return tuple(text for _, text in lines) if in_order else ()


def _without_fillers(options: list[str | None]) -> list[str]:
    """Only fillers at the end go: every option keeps its position, and so its letter."""
    last = max((i for i, option in enumerate(options) if option not in ("N/A", "", None)), default=-1)
    return options[: last + 1]


# ------------------------------------------------------------------------------------------------ subtitles


def ask_with_subtitles(item: Item, times: Sequence[float]) -> Task:
    """The official rule of Video-MME: only the cues shown at the sampled frames, in order, each once."""
    shown = [cue.text for cue in item.subtitles if any(cue.start <= t <= cue.end for t in times)]
    if not shown:
        return item.task
    return replace(item.task, question="\n".join(["Subtitles at these frames:", *shown, "", item.task.question]))


@functools.lru_cache(maxsize=1)  # the questions of a video stand together and share its cues
def _srt(path: str) -> tuple[Cue, ...]:
    """The cues of an .srt file, font tags removed."""
    cues = []
    for block in re.split(r"\n\s*\n", Path(path).read_text(encoding="utf-8", errors="replace")):
        if found := re.search(r"(\d[\d:.,]*) *--> *(\d[\d:.,]*)[^\n]*\n(.*)", block, re.S):
            *clocks, text = found.groups()
            try:
                start, end = (seconds_of(clock.replace(",", ".")) for clock in clocks)
            except ValueError:
                raise DataError(
                    f"{path}: {' --> '.join(clocks)} are no times, such as 00:00:01,500; correct them, or unpack it again"
                ) from None
            if text := " ".join(re.sub(r"<[^>]*>", " ", text).split()):
                cues.append(Cue(start, end, text))
    return tuple(sorted(cues, key=lambda cue: cue.start))


# ------------------------------------------------------------------------------------------------ the splits


@dataclass(frozen=True)
class Split:
    """Where a split lies in its dataset, and how large it is."""

    hub: str  # the dataset's name on the hub; empty: toy.py makes it
    parse: Callable[[dict, int, Files], Item]  # (row, its index, files)
    tables: tuple[str, ...]  # globs, in the root or one folder down: all files of the first that matches are read
    counts: tuple[int, ...] = ()  # numbers of items that it may have
    archives: str = ""  # to be unpacked
    subtitled: int = 0  # how many of its videos have an .srt file


_VIDEOMME = Split("lmms-lab/Video-MME", _videomme, ("test-*.parquet",), (2700,), "videos_chunked_*.zip")
SPLITS = {
    "videomme": _VIDEOMME,
    "videomme_wsub": replace(
        _VIDEOMME, parse=_videomme_wsub, archives="videos_chunked_*.zip and subtitle.zip", subtitled=744
    ),
    "longvideobench": Split(  # gated: its terms are accepted on its page
        "longvideobench/LongVideoBench",
        _longvideobench,
        ("validation-*.parquet", "lvb_val.json"),
        (1337,),
        "videos.tar.part.* (joined with cat)",
    ),
    # The only split of this dataset is called train.
    "lvbench": Split("lmms-lab/LVBench", _lvbench, ("train-*.parquet",), (1549,), "its video archives"),
    # Quoted with either number.
    "mlvu": Split("sy1998/MLVU_dev", _mlvu, ("test-*.parquet",), (2174, 2175), "video_part_*.zip"),
    "mmvu": Split("yale-nlp/MMVU", _mmvu, ("validation.json", "validation-*.parquet"), (1000,)),
    "charades": Split("lmms-lab/charades_sta", _charades, ("test-*.parquet",), (3720,), "Charades_v1_480_part_*.zip"),
    "toy": Split("", _toy, ("test.parquet",)),
}


def load_split(name: str, root: str) -> list[Item]:
    """The items of a split, in the dataset's order. An incomplete dataset raises DataError."""
    split, base, hint = SPLITS[name], Path(root).expanduser(), _hint(name, root)
    if not base.is_dir():
        raise DataError(f"{root}: no such folder, so {name} cannot be read. {hint}")
    globs = (where + pattern for pattern in split.tables for where in ("", "*/"))
    tables = next((found for pattern in globs if (found := sorted(base.glob(pattern)))), [])
    if not tables:
        raise DataError(f"{root}: no file {' or '.join(split.tables)}, where {name} has its questions. {hint}")

    files, items, missing = Files(base), [], []
    places = [(table, rows, n) for table in tables for rows in [Rows(table)] for n in range(len(rows))]
    for i, (table, rows, n) in enumerate(places):
        try:
            row = rows[n]
            items.append(split.parse(row, i, files))
        except VideoMissing as error:
            missing.append(str(error))
        except (RowError, KeyError) as error:
            reason = f"no field {error}, only {', '.join(row)}" if isinstance(error, KeyError) else error
            raise DataError(f"{table}: row {i}: {reason}. Another revision of the dataset? {hint}") from None

    count = len(items) + len(missing)
    if split.counts and count not in split.counts:
        wanted = " or ".join(map(str, split.counts))
        raise DataError(f"{root}: {name} has {wanted} items, found {count}: are shards missing? {hint}")
    if missing:
        videos = sorted(set(missing))
        names = ", ".join(videos[:5]) + (", ..." if len(videos) > 5 else "")
        where = f"nowhere below {root} (as {', '.join(VIDEO_SUFFIXES)})"
        raise DataError(f"{len(videos)} videos of {name} are {where}: {names}. {hint}")
    subtitled = {video for item in items for video in item.task.videos if files.find(f"{Path(video).stem}.srt")}
    if len(subtitled) < split.subtitled:
        raise DataError(f"{root}: {split.subtitled} videos of {name} have an .srt file, found {len(subtitled)}. {hint}")
    if twice := [id for id, n in collections.Counter(item.task.id for item in items).items() if n > 1]:
        raise DataError(f"{root}: {len(twice)} ids of {name} occur twice, such as {twice[0]}. {hint}")
    if lost := sum(item.task.answer == UNANSWERABLE for item in items):
        print(f"{name}: {lost} answers are not among their options; these items count as wrong", file=sys.stderr)
    return items


def _hint(name: str, root: str) -> str:
    split, folder = SPLITS[name], shlex.quote(root)
    if not split.hub:
        return f"`python -m study.toy build {folder}` makes it."
    unpack = f"; then unpack {split.archives}, anywhere below it." if split.archives else "."
    return f"`hf download {split.hub} --repo-type dataset --local-dir {folder}` fetches the dataset{unpack}"


# ------------------------------------------------------------------------------------------------ figures


def grade(item: Item, answer: str | None, cfg: RewardConfig) -> dict:
    """`answer` is the text that the protocol extracted; None: there was none. The judge, if asked, may raise JudgeError."""
    task, text = item.task, (answer or "").strip()
    if task.kind == "mcq":
        read = parse_letter(text, task.options)
    elif task.kind == "tvg":
        read = str(list(span)) if (span := parse_span(text)) else None
    else:
        read = text or None
    if read is None:
        return UNGRADED
    judged = task.kind == "oe" and cfg.open_answer == "judge"
    return {"prediction": read, "score": accuracy(text, task, cfg), "judged": judged}


def figures(name: str, records: Sequence[dict]) -> dict[str, float]:
    """All figures of a split in percent, the headline first, from the lines of eval.py. An error has scored 0."""
    scores = [r["score"] for r in records]
    if name == "charades":
        found = {"miou": _percent(scores)}
        found |= {f"r@{least}": _percent(score >= least for score in scores) for least in (0.3, 0.5, 0.7)}
    elif name == "mmvu":
        found = {"mc_625": _percent(r["score"] for r in records if r["kind"] == "mcq")}
        if any(r["judged"] for r in records):  # without a judge, open answers give no accuracy
            found["all_1000"] = _percent(scores)
    else:
        found = {"accuracy": _percent(scores)}

    by_label = collections.defaultdict(list)  # an item of two types counts in both
    for r in records:
        for label in itertools.chain(*r["groups"].values()):
            by_label[label].append(r["score"])
    groups = {label: _percent(by_label[label]) for label in sorted(by_label, key=_label_order)}
    if name == "mlvu":  # M-Avg = mean of the seven tasks' accuracies; `accuracy` is over all questions alike
        found["m_avg"] = sum(groups.values()) / len(groups) if groups else math.nan
    return found | groups


def _percent(values: Iterable[float]) -> float:
    values = list(values)
    return 100 * sum(values) / len(values) if values else math.nan


def _label_order(label: str) -> tuple[int, str]:
    """Numbers by size; short, medium, long; other words by the alphabet. (Results come in the order of their ends.)"""
    if label in LENGTHS:
        return LENGTHS.index(label), ""
    return (int(label), "") if label.isdigit() else (0, label)
