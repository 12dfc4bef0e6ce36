"""dataset.py: every dataset, as a stream of tasks or dialogues.

    Dataset(cfg, parse_dialogue).batch(step, size)    # SFT rows -> Dialogue, then encode_dialogue -> Bundle
    Dataset(cfg, parse_task).batch(step, size)        # RL rows -> Task

A batch is a pure function of (seed, step): the position to resume at is the step number, and every rank takes its slice
of the same batch, whatever the number of ranks. A bad row is reported once, skipped and counted.

To add a dataset: docs/add_a_dataset.md; a row that cannot be used raises RowError with the reason.

Deliberately missing: epochs as a concept of the trainers, worker processes that load data (video.py has its own).
"""

import functools
import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from data import Bundle, Task, main_messages, subagent_messages
from rewards import parse_span
from runtime.contract import Renderer, VisualContract
from runtime.video import Frames, VideoError, Videos

# ------------------------------------------------------------------------------------------------ batches


@dataclass(frozen=True)
class Source:
    """One parquet, JSONL or JSON file of the mixture."""

    path: str
    weight: float = 1.0
    """Copies of each row in an epoch; 0.5 is another random half in every epoch."""
    first: bool = False
    """Read once, before the mixture of all other sources begins: a curriculum."""
    loss_weight: float = 1.0
    """Factor on the loss of its target tokens (SFT)."""

    def __post_init__(self):
        if self.weight <= 0 or self.loss_weight <= 0:
            raise ValueError(f"weight = {self.weight}, loss_weight = {self.loss_weight}: must be positive")


@dataclass(frozen=True)
class DataConfig:
    """Which rows a run reads."""

    sources: tuple[Source, ...]
    video_root: str = ""
    """Where relative paths of the rows start; empty: at the data file's own folder."""
    seed: int = 0
    max_bad_fraction: float = 0.01
    """The run stops when more than this share of the rows that a rank meets is unusable."""


class DataError(ValueError):
    """Data that a run cannot use; the text says what to do."""


class RowError(DataError):
    """A row that cannot be used; the text is the reason."""


class Rows:
    """The rows of one parquet, JSONL or JSON file, by index."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(
                f"{path}: no such data file; `python data.py materialize` prepares the published ones, "
                "`python -m study.toy build DIR` makes the toy's"
            )
        if self.path.suffix == ".parquet":
            import pyarrow.parquet as pq  # 0.3 s that `--help` does not need

            try:
                self._table = pq.read_table(self.path, memory_map=True)
            except (OSError, ValueError) as error:  # an interrupted download; a Git LFS pointer
                raise DataError(f"{path}: not a readable parquet file: {error}; fetch it again") from None
            self._lines = None
        elif self.path.suffix == ".jsonl":
            self._lines = [line for line in self.path.read_bytes().splitlines() if line.strip()]
        elif self.path.suffix == ".json":
            self._lines = _json(self.path.read_bytes(), str(path))
            if not isinstance(self._lines, list):
                raise DataError(f"{path}: expected a list of rows, got {type(self._lines).__name__}")
        else:
            raise DataError(f"{path}: expected a .parquet, .jsonl or .json file")

    def __len__(self) -> int:
        return self._table.num_rows if self._lines is None else len(self._lines)

    def __getitem__(self, i: int) -> dict:
        if self._lines is None:
            return self._table.slice(i, 1).to_pylist()[0]
        row = _json(self._lines[i], "the line")
        if not isinstance(row, dict):
            raise RowError(f"expected a JSON object, got {type(row).__name__}")
        return row


class Dataset:
    """An endless, seeded shuffle of the sources' rows, read by step number."""

    def __init__(self, cfg: DataConfig, parse: Callable[[dict, str, Path, float], Any]):
        self.cfg, self._parse = cfg, parse
        sources = [(source, Rows(source.path)) for source in cfg.sources]
        self._first = [(s, rows) for s, rows in sources if s.first]
        self._mixture = [(s, rows) for s, rows in sources if not s.first]
        self.total, self.bad, self._met = sum(len(rows) for _, rows in sources), {}, 0
        # Rows are called after their file, not after its place, since K and all seeds hang on it; unless two are called so.
        paths = {rows.path for _, rows in sources}
        shared = Counter(path.name for path in paths)
        self._names = {path: path.name if shared[path.name] == 1 else path for path in paths}
        self._order = (None, np.zeros(0, int))  # the epoch whose permutation is in memory
        if not len(self):
            files = ", ".join(s.path for s in cfg.sources)
            raise DataError(f"no rows in {files or 'an empty list of sources'}, apart from those read `first`")

    def __len__(self) -> int:
        """Rows of an epoch of the mixture."""
        return sum(_draws(self._mixture))

    def batch(self, step: int, size: int, rank: int = 0, world: int = 1) -> list[tuple[Any, int]]:
        """This rank's share of step's batch: (item, epoch). Bad rows leave it shorter."""
        items = []
        # A rank meets its share of the rows in the first epoch, and then others in every further one.
        self._met = min(self.total, max(self.total, (step + 1) * size) // world)
        for position in range(step * size + rank, (step + 1) * size, world):
            source, rows, row, epoch = self._row(position)
            origin = f"{self._names[rows.path]}:{row}"
            if origin in self.bad:
                continue
            root = Path(self.cfg.video_root or rows.path.parent)
            try:
                items.append((self._parse(rows[row], origin, root, source.loss_weight), epoch))
            except RowError as error:
                self.reject(origin, str(error))
        return items

    def reject(self, origin: str, reason: str) -> None:
        """Count a row as bad: named once, skipped from now on; too many stop the run."""
        if origin in self.bad:
            return
        self.bad[origin] = reason
        print(f"skipped {origin}: {reason}", file=sys.stderr)
        if len(self.bad) > self.cfg.max_bad_fraction * self._met:
            raise RowError(
                f"{len(self.bad)} of {self._met} rows are unusable, more than max_bad_fraction = "
                f"{self.cfg.max_bad_fraction}; the last: {origin}: {reason}. `python data.py check` lists them all."
            )

    def _row(self, position: int) -> tuple[Source, Rows, int, int]:
        """What stands at a position of the endless order: the `first` rows, then epoch after epoch of the mixture."""
        opening = sum(_draws(self._first))
        epoch, offset = divmod(position - opening, len(self)) if position >= opening else (-1, position)
        pool = self._first if epoch < 0 else self._mixture
        if self._order[0] != epoch:
            rng = np.random.default_rng([self.cfg.seed, epoch + 1])
            chosen = []
            for (_, rows), count in zip(pool, _draws(pool)):
                whole, rest = divmod(count, max(1, len(rows)))
                chosen.append(np.concatenate([*[np.arange(len(rows))] * whole, rng.permutation(len(rows))[:rest]]))
            pairs = np.stack([np.repeat(np.arange(len(pool)), _draws(pool)), np.concatenate(chosen)])  # [2, rows]
            self._order = (epoch, rng.permutation(pairs, axis=1).astype(int))
        source, row = self._order[1][:, offset]
        return *pool[source], int(row), max(epoch, 0)


def check_rows(parse: Callable, *cfgs: DataConfig | None, look: int = 64) -> None:
    """Raise if not one of the first rows can be used: before weights are loaded, and anything is written."""
    for cfg in filter(None, cfgs):
        dataset, reasons = Dataset(cfg, parse), []
        for position in range(min(look, len(dataset))):
            source, rows, row, _ = dataset._row(position)
            origin, root = f"{rows.path}: row {row}", Path(cfg.video_root or rows.path.parent)
            try:
                parse(rows[row], origin, root, source.loss_weight)
                break
            except RowError as error:
                reasons.append(f"{origin}: {error}")
        else:
            raise DataError(
                f"{reasons[0]}; of the {len(reasons)} rows that are read first, none can be used. Relative paths start at "
                f"data.video_root = {cfg.video_root!r} (empty: the data file's folder); `python data.py check` lists all"
            )


def _draws(pool: list[tuple[Source, Rows]]) -> list[int]:
    return [round(source.weight * len(rows)) for source, rows in pool]


def _refusing(parse: Callable) -> Callable:
    """Whatever else a foreign row may be shaped like costs that row, not the run."""

    @functools.wraps(parse)
    def parse_or_refuse(*arguments, **more):
        try:
            return parse(*arguments, **more)
        except (KeyError, TypeError, AttributeError) as error:
            raise RowError(f"malformed: {error!r}") from error

    return parse_or_refuse


# ------------------------------------------------------------------------------------------------ RL rows


@_refusing
def parse_task(row: dict, origin: str, root: Path, _weight: float = 1.0) -> Task:
    """`prompt` (messages, a literal <video>), `videos` ([{"video": path}]), `extra_info` (answer, question_type)."""
    info = _json(row.get("extra_info") or {}, "extra_info")
    if "prompt" not in row:
        raise RowError(
            f"no field `prompt`, only {', '.join(row)}: RL rows have it; rows with `messages` are for sft.py"
        )
    messages = _json(row["prompt"], "prompt")
    videos = [
        _resolve(v["video"] if isinstance(v, dict) else v, root) for v in _json(row.get("videos") or [], "videos")
    ]
    present = tuple(path for path in videos if os.path.exists(path))
    if not present:
        raise RowError(f"no video of the row exists: {', '.join(videos) or 'none is named'}")
    users = [m["content"] for m in messages or [] if isinstance(m, dict) and m.get("role") == "user"]
    if not users or not isinstance(users[-1], str):
        raise RowError("`prompt` holds no user message with text")
    kind, answer = info.get("question_type") or "oe", info.get("answer")  # parquet fills what a row lacks with None
    if kind not in ("mcq", "tvg", "oe"):
        raise RowError(f"question_type = {kind!r}: must be mcq, tvg or oe")
    answer = "" if answer is None else str(answer).strip()
    if not answer:
        raise RowError("extra_info has no answer")
    if kind == "mcq" and not re.fullmatch("[A-J]", answer.strip("() .").upper()):
        raise RowError(f"answer = {answer!r}: of an mcq, must be a letter from A to J")
    if kind == "tvg" and not parse_span(answer):
        raise RowError(f"answer = {answer!r}: of a tvg, must be a span of seconds, as in [12.5, 20.1]")
    return Task(
        id=origin if info.get("id") is None else str(info["id"]),
        question=users[-1].replace("<video>", "").strip(),
        videos=present,
        kind=kind,
        answer=answer,
        options=tuple(map(str, info.get("options") or ())),
    )


# ------------------------------------------------------------------------------------------------ SFT rows


@dataclass(frozen=True)
class Clip:
    """A video or an image of a row. The keys are qwen-vl-utils': nframes, video_start, video_end."""

    path: str
    nframes: int | None = None  # frames of the overview; None: the contract's
    start: float | None = None  # seconds; with `end` a window, sampled like a crop
    end: float | None = None
    still: bool = False

    def frames(self, videos: Videos, contract: VisualContract) -> Frames:
        if self.still:
            return _still(self.path, contract)
        if self.start is None:
            return videos.overview(self.path, self.nframes or contract.overview_frames, contract.frame_size)
        limits = contract.crop_fps, contract.crop_min_frames, contract.crop_max_frames
        return videos.window(self.path, self.start, self.end, contract.frame_size, *limits)


@dataclass(frozen=True)
class Dialogue:
    """An SFT row: the opening question and the turns that answer it."""

    id: str
    agent: str  # whose opening the first user turn gets: main | direct (a main agent without tools) | sub
    question: str
    media: tuple[Clip, ...]
    turns: tuple[dict, ...]  # {"role": assistant | user | tool, "content": [str | Clip, ...]}
    weight: float = 1.0


@_refusing
def parse_dialogue(row: dict, origin: str, root: Path, weight: float = 1.0) -> Dialogue:
    """`messages` (a JSON string or a list); tool results as `tool` messages or as user text in <tool_response> tags.

    The row's system prompt is dropped: SFT, RL and evaluation share one. The optional column `agent` marks rows that
    teach another agent than the main one."""
    if "messages" not in row:
        raise RowError(
            f"no field `messages`, only {', '.join(row)}: SFT rows have it; rows with `prompt` are for rl.py"
        )
    messages = _json(row["messages"], "messages")
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise RowError("`messages` is not a list of messages")
    turns: list[dict] = []
    for message in messages:
        role, parts = message.get("role"), _parts(message, root)
        if role == "system":
            continue
        if role not in ("user", "assistant", "tool"):
            raise RowError(f"role {role!r}: must be system, user, assistant or tool")
        if role == "user" and any(isinstance(p, str) and "<tool_response>" in p for p in parts):
            turns += [{"role": "tool", "content": content} for content in _responses(parts)]
        else:
            turns.append({"role": role, "content": parts})
    roles = [turn["role"] for turn in turns]
    if not roles or roles[0] != "user" or roles[-1] != "assistant":
        raise RowError(f"turns {roles}: must open with the user and close with the assistant")
    if any(a == b == "assistant" or (a == "user" and b != "assistant") for a, b in zip(roles, roles[1:])):
        raise RowError(f"turns {roles}: the assistant must follow each user, and never itself")
    agent, opening = row.get("agent") or "main", turns[0]["content"]
    if agent not in ("main", "direct", "sub"):
        raise RowError(f"agent {agent!r}: must be main, direct or sub")
    return Dialogue(
        id=origin,
        agent=agent,
        question=re.sub(r"<(video|image)>", "", " ".join(p for p in opening if isinstance(p, str))).strip(),
        media=tuple(p for p in opening if isinstance(p, Clip)),
        turns=tuple(turns[1:]),
        weight=weight,
    )


def encode_dialogue(dialogue: Dialogue, videos: Videos, renderer: Renderer, tools: list[dict]) -> Bundle:
    """Tokens and frames of a row; loss only on assistant tokens."""
    contract = renderer.contract
    media = [clip.frames(videos, contract) for clip in dialogue.media]
    if dialogue.agent == "sub":
        if len(media) != 1:
            raise RowError(f"a sub-agent's row shows one clip, this one {len(media)}")
        opening = subagent_messages(media[0], dialogue.question or None)
    else:
        paths = tuple(clip.path for clip in dialogue.media)
        task = Task(dialogue.id, dialogue.question, paths, "oe", "")
        opening = main_messages(task, media, with_tools=dialogue.agent == "main")
    turns = [
        t | {"content": [p.frames(videos, contract) if isinstance(p, Clip) else p for p in t["content"]]}
        for t in dialogue.turns
    ]
    rendered = renderer.render([*opening, *turns], tools if dialogue.agent == "main" else None)
    if 1 not in rendered.mask:
        raise RowError("no assistant token to learn")
    return Bundle([], [rendered.ids], [rendered.mask], rendered.frames, dialogue.weight)


def pack(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Best-fit decreasing: indices of rows that share a micro-batch of at most `limit` tokens; a row is never split, and
    one that is longer stands alone."""
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        best = min((b for b in range(len(bins)) if room[b] >= lengths[i]), key=lambda b: room[b], default=None)
        if best is None:
            best = len(bins)
            bins.append([])
            room.append(limit)
        bins[best].append(i)
        room[best] -= lengths[i]
    return bins


def _parts(message: dict, root: Path) -> list[str | Clip]:
    content = message.get("content")
    parts: list[str | Clip] = []
    for part in [content] if isinstance(content, str) else content or []:
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        if part.get("type") == "text" and isinstance(part.get("text"), str):
            parts.append(part["text"])
            continue
        key = next((k for k in ("video_url", "image_url", "video", "image") if part.get(k)), None)
        if key is None:
            raise RowError(f"a part of type {part.get('type')!r} is neither text, video nor image")
        url = part[key]
        options = url | part if isinstance(url, dict) else part
        path = _resolve(url["url"] if isinstance(url, dict) else url, root)
        if not os.path.exists(path):
            raise RowError(f"{path}: no such file")
        nframes, start, end = (options.get(name) for name in ("nframes", "video_start", "video_end"))
        if (start is None) != (end is None):
            raise RowError(f"{path}: video_start and video_end come together")
        if start is not None and not -math.inf < start <= end < math.inf:
            raise RowError(
                f"{path}: video_start = {start}, video_end = {end}: must be seconds, the start before the end"
            )
        if nframes is not None and not (isinstance(nframes, int) and nframes > 0):
            raise RowError(f"{path}: nframes = {nframes!r}: must be a whole number above 0")
        parts.append(Clip(path, nframes, start, end, still=key.startswith("image")))
    for call in message.get("tool_calls") or []:
        function = call.get("function", call)
        arguments = _json(function.get("arguments", {}), "arguments")
        text = json.dumps({"name": function.get("name"), "arguments": arguments}, ensure_ascii=False)
        parts.append("\n" * bool(parts) + f"<tool_call>\n{text}\n</tool_call>")
    return parts


def _responses(parts: list[str | Clip]) -> list[list[str | Clip]]:
    """A user turn of <tool_response> blocks -> the content of each; media belong to the block they precede."""
    responses: list[list[str | Clip]] = []
    current: list[str | Clip] = []
    for part in parts:
        for piece in re.split("(</?tool_response>)", part) if isinstance(part, str) else [part]:
            if piece == "</tool_response>":
                responses.append(current)
                current = []
            elif not isinstance(piece, str):
                current.append(piece)
            elif piece != "<tool_response>" and piece.strip():
                current.append(piece.strip("\n"))
    if current:
        raise RowError("text or media after the last </tool_response>")
    return responses


def _still(path: str, contract: VisualContract) -> Frames:
    try:
        with Image.open(path) as image:
            pixels = np.array(image.convert("RGB").resize(contract.frame_size(*image.size), Image.Resampling.BICUBIC))
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise VideoError(path, f"not a readable image: {error}") from None
    return Frames(pixels[None], (None,))  # an image has no time, so no stamp


def _resolve(url: str, root: Path) -> str:
    """A path of a row -> an absolute path: file:// and absolute ones as they are, others below the root."""
    return os.path.abspath(os.path.join(root, url.removeprefix("file://")))


def _json(value: Any, what: str) -> Any:
    """Columns come as JSON strings or as values."""
    if not isinstance(value, str | bytes):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise RowError(f"{what} is not JSON: {error}") from None
