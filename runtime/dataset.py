"""dataset.py: read the rows of every dataset as a stream of tasks or dialogues.

    Dataset(cfg, dialogues.parse_dialogue).batch(step, size)    # SFT rows -> Draws whose `item` is a Dialogue
    Dataset(cfg, data.parse_task).batch(step, size)             # RL rows -> Draws whose `item` is a Task

A batch is a pure function of (seed, step), so a run resumes at its step number. Any number of ranks share the same batch:
each takes its slice. A row is bad if reading, parsing or encoding it raises any exception (`row_errors`). A bad row is
reported once, skipped and counted.

Deliberately missing: epochs in the trainers, worker processes that load data (video.py has its own).
"""

import contextlib
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import pyarrow.parquet as pq

from runtime.config import UserError
from runtime.distributed import print0
from runtime.lines import printable
from runtime.video import VideoError

Parsed = TypeVar("Parsed")  # what `parse` makes of a row: a Task or a Dialogue
log = logging.getLogger(__name__)
_logged: set[type] = set()  # exception types whose traceback this process has logged


@dataclass(frozen=True)
class Source:
    """One parquet, JSONL or JSON file of the mixture."""

    path: str
    weight: float = 1.0
    """Copies of each row per epoch. 0.5: a new random half in every epoch."""
    first: bool = False
    """A curriculum: read this source once, before the mixture of all other sources."""
    loss_weight: float = 1.0
    """Factor on the loss of its target tokens (SFT)."""


@dataclass(frozen=True)
class DataConfig:
    """Which rows a run reads."""

    sources: tuple[Source, ...]
    video_root: str = ""
    """Folder at which the rows' relative paths start. Empty: the data file's own folder."""
    seed: int = 0
    max_bad_fraction: float = 0.01
    """The run stops if more than this share of a rank's rows is unusable. In RL, a video that cannot be read fails its episodes, and
    no row counts for it."""


class DataError(UserError):
    """Data that a run cannot use. The message says what to do."""


class RowError(DataError):
    """A row that cannot be used. The message is the reason. Parsers of rows raise it (docs/add_a_dataset.md)."""


@contextlib.contextmanager
def row_errors() -> Iterator[None]:
    """Turn any exception while one row is read, parsed or encoded into a RowError: rows come from outside and hold anything.
    Log the first traceback of each type other than RowError and VideoError, since it can be a bug of ours."""
    try:
        yield
    except Exception as error:
        reason = str(error)
        if not isinstance(error, RowError | VideoError):
            reason = f"{type(error).__name__}: {error}"
            if type(error) not in _logged:
                _logged.add(type(error))
                log.exception("a row raised %s, for the first time:", type(error).__name__)
        raise RowError(printable(reason[:1000])) from error  # it can quote a megabyte of a row


# ------------------------------------------------------------------------------------------------ columns of a row


def decode_json(value: Any, what: str) -> Any:
    """Return the value of a column. Parse it if it is a JSON string."""
    if not isinstance(value, str | bytes):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:  # RecursionError: a hundred thousand nested brackets
        raise RowError(f"{what} is not JSON: {error!r}") from None


def refuse_columns(row: dict, columns: Sequence[str], rule: str) -> None:
    """Refuse a row that holds something in one of these columns."""
    for column in columns:
        if holds_something(row.get(column)):
            raise RowError(f"`{column}` = {row[column]!r}: {rule}; remove the column")


def holds_something(value: Any) -> bool:
    """Return whether a field is filled. {"bbox": []}, [{"url": None}] and the JSON "[]" are not."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return any(map(holds_something, value))
    return bool(value) and value not in ("[]", "{}")


def read_messages(row: dict, column: str, needed_by: str) -> list[dict]:
    """Return the messages of an RL row or of an SFT row."""
    if column not in row:
        raise RowError(f"{needed_by} needs the field `{column}`; this one has {', '.join(row)}")
    return decode_json(row[column], column)


def read_paths(urls: Sequence[str], root: Path) -> list[str]:
    """Return absolute paths without file://. Relative ones start at `root`. Refuse a file that does not exist."""
    paths = [os.path.abspath(os.path.join(root, url.removeprefix("file://"))) for url in urls]
    missing = [path for path in paths if not os.path.exists(path)]
    if missing:
        raise RowError(f"{', '.join(missing)}: no such file")
    return paths


# ------------------------------------------------------------------------------------------------ files of rows


class Rows:
    """The rows of one parquet, JSONL or JSON file, by index."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"{path}: no such data file; a relative path starts at {Path.cwd()}")
        if self.path.suffix == ".parquet":
            try:
                self._rows = pq.read_table(self.path, memory_map=True)
            except (OSError, ValueError) as error:  # an interrupted download; a Git LFS pointer
                raise DataError(f"{path}: not a readable parquet file: {error}; fetch it again") from None
        elif self.path.suffix == ".jsonl":
            self._rows = [line for line in self.path.read_bytes().splitlines() if line.strip()]
        elif self.path.suffix == ".json":
            self._rows = decode_json(self.path.read_bytes(), str(path))
        else:
            raise DataError(f"{path}: expected a .parquet, .jsonl or .json file")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> dict:
        if self.path.suffix == ".parquet":
            return self._rows.slice(i, 1).to_pylist()[0]
        return decode_json(self._rows[i], "the line")


Pool = list[tuple[Source, Rows]]


class Place(NamedTuple):
    """Where a row of the endless order stands."""

    source: Source
    rows: Rows  # of the source
    row: int  # its index in `rows`
    epoch: int


class Draw(NamedTuple, Generic[Parsed]):
    """A row of a batch."""

    item: Parsed
    epoch: int
    loss_weight: float  # of its source
    origin: str  # the row's name, file:row, by which it is rejected
    copy: int  # how many times the row stands earlier in the batch of all ranks


class Dataset(Generic[Parsed]):
    """An endless, seeded shuffle of the sources' rows, read by step number."""

    # parse(row, its name, where relative paths start)
    def __init__(self, cfg: DataConfig, parse: Callable[[dict, str, Path], Parsed]):
        self.cfg = cfg
        self._parse = parse
        self._first: Pool = []
        self._mixture: Pool = []
        for source in cfg.sources:
            pool = self._first if source.first else self._mixture
            pool.append((source, Rows(source.path)))
        pools = self._first + self._mixture
        opened = [rows for _, rows in pools]
        self.total = sum(len(rows) for rows in opened)
        self.bad: dict[str, str] = {}  # the row's name -> why it cannot be used
        # Distinct rows that this rank gets up to the newest batch, at least its share of an epoch. `reject` compares with it.
        self._rows_in_share = self.total
        # A row's name has the file's name without its folder, since K and all seeds depend on it and files can move. If two
        # files have the same name, it has the whole path.
        paths = {rows.path for rows in opened}
        files_called = Counter(path.name for path in paths)
        self._names = {path: path.name if files_called[path.name] == 1 else path for path in paths}
        self._epoch: int | None = None  # the epoch whose order is in memory
        self._order = np.zeros((2, 0), int)
        for (source, rows), count in zip(pools, _draws(pools)):
            if len(rows) and not count:
                rule = "rounds to 0 rows; raise the weight, or leave the file out"
                raise DataError(f"{source.path}: weight = {source.weight:g} times {len(rows)} rows {rule}")
        if not len(self):
            raise DataError("data.sources have no rows, apart from those read `first`")

    def __len__(self) -> int:
        """Return the number of rows in an epoch of the mixture."""
        return sum(_draws(self._mixture))

    def batch(self, step: int, size: int, rank: int = 0, world: int = 1) -> list[Draw[Parsed]]:
        """Return this rank's share of a step's batch. It is shorter if rows are bad."""
        draws = []
        copies: Counter[str] = Counter()  # the row's name -> how many times it has been drawn, by all ranks
        drawn = max(self.total, (step + 1) * size)  # by all ranks, at least one epoch; each later one is dealt out anew
        self._rows_in_share = min(self.total, drawn // world)
        for i in range(size):
            place = self._place(step * size + i)
            origin = f"{self._names[place.rows.path]}:{place.row}"
            copy = copies[origin]
            copies[origin] += 1
            if i % world != rank or origin in self.bad:
                continue
            root = Path(self.cfg.video_root or place.rows.path.parent)
            try:
                with row_errors():
                    item = self._parse(place.rows[place.row], origin, root)
                    draws.append(Draw(item, place.epoch, place.source.loss_weight, origin, copy))
            except RowError as error:
                self.reject(origin, str(error))
        return draws

    def reject(self, origin: str, reason: str) -> None:
        """Count a row as bad, and print it once. It is skipped from now on. Too many bad rows stop the run."""
        if origin in self.bad:
            return
        self.bad[origin] = reason
        print(f"unusable: {origin}: {reason}", file=sys.stderr)
        allowed = self.cfg.max_bad_fraction
        if len(self.bad) > allowed * self._rows_in_share:
            raise RowError(
                f"{len(self.bad)} of {self._rows_in_share} rows are unusable, more than max_bad_fraction = {allowed}; "
                f"the last: {origin}: {reason}. `--check-data` checks them all."
            )

    def _place(self, position: int) -> Place:
        """Find the row at a position of the endless order: the `first` rows, then the mixture, epoch after epoch."""
        opening = sum(_draws(self._first))
        if position < opening:
            pool, epoch, offset = self._first, -1, position
        else:
            pool = self._mixture
            epoch, offset = divmod(position - opening, len(self))
        if self._epoch != epoch:
            self._epoch, self._order = epoch, self._shuffle(pool, epoch)
        number, row = self._order[:, offset].tolist()
        source, rows = pool[number]
        return Place(source, rows, row, max(epoch, 0))

    def _shuffle(self, pool: Pool, epoch: int) -> np.ndarray:
        """Return the order of an epoch's rows: [2, rows] = (number of the source in the pool, index of the row in it)."""
        rng = np.random.default_rng([self.cfg.seed, epoch + 1])
        numbers = []
        indices = []
        for number, ((_, rows), count) in enumerate(zip(pool, _draws(pool))):
            # Draw all rows as often as possible, and a random part of them for the rest: for weight 2.5, twice and a half.
            copies, rest = divmod(count, max(1, len(rows)))
            indices += [np.arange(len(rows))] * copies
            indices.append(rng.permutation(len(rows))[:rest])
            numbers.append(np.full(count, number))
        order = np.stack([np.concatenate(numbers), np.concatenate(indices)])
        return rng.permutation(order, axis=1)


def require_rows(parse: Callable, *cfgs: DataConfig | None) -> None:
    """Raise DataError if none of the first 16 rows can be used, before weights are loaded or anything is written."""
    for cfg in filter(None, cfgs):
        dataset = Dataset(replace(cfg, max_bad_fraction=1.0), parse)
        if not any(dataset.batch(position, 1) for position in range(min(16, len(dataset)))):
            origin, reason = next(iter(dataset.bad.items()))
            raise DataError(
                f"{origin}: {reason}; none of the first rows can be used. Relative paths start at data.video_root = "
                f"{cfg.video_root!r} (empty: the data file's folder); `--check-data` checks all rows"
            )
        print0(f"data: {dataset.total} rows of {', '.join(source.path for source in cfg.sources)}")


def _draws(pool: Pool) -> list[int]:
    """Return how many rows of each source an epoch has."""
    return [round(source.weight * len(rows)) for source, rows in pool]
