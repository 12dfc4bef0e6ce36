"""lines.py: the files of JSON lines that a run writes, and files that are written whole.

    write_lines(path, records)                 # the whole file, or nothing
    append_line(path, record)
    for record in read_lines(path): ...        # also while a run appends

These are RUN/metrics.jsonl, the results of an evaluation, and the records of episodes. A user's data files have their own reader
in dataset.py, because there a last line without a line break is a row. This file imports only config.py, so every other file may
import it.
"""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from runtime.config import UserError


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file. A last line without a line break is still being written, or was cut off by a kill: leave it
    out."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                try:
                    yield json.loads(line)
                except ValueError:
                    raise UserError(f"{path}: line {number} is damaged: delete it, and run again") from None


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Add a record to a file. One thread at a time may do so."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json_line(record))


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Write a file anew."""
    write_whole(path, "".join(map(json_line, records)))


def json_line(record: dict[str, Any]) -> str:
    return json.dumps(record) + "\n"  # as ASCII, so that no separator of Unicode breaks the line


def printable(text: str) -> str:
    """Escape half characters, line breaks, and the characters that a terminal obeys."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def write_whole(path: Path, text: str) -> None:
    """Write a file completely or, if the process or the machine dies, not at all."""
    unborn = path.with_name(path.name + ".new")
    with unborn.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # without it, a power cut may leave the renamed file empty
    unborn.rename(path)
