"""measure.py: what the benches measure with, and what they measure on.

    a, b = take_turns(5, slow, fast)              # seconds of each, A B A B ...
    side_by_side({"slow, s": a, "fast, s": b})    # cells of a row: medians, and the gain with its range
    require(same, "frames")                       # before the clock runs: both sides did the same work
    Section("the geometry", rows).text("title")   # Markdown

A ratio is the median over pairs of neighbours: what else the machine does hits neighbours alike. The toy and random
weights of the real class lie in runs/bench/, where they are made once.

torch is imported where it is needed: `bench.py --help` does not wait for it.

Deliberately missing: significance tests, warm-up by a number of runs (the comparison of results is one), profiles.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import toy
from compare import markdown
from contract import VisualContract, load_tokenizer
from dataset import DataConfig, Dataset, Source

REPO = Path(__file__).resolve().parent
CACHE = REPO / "runs" / "bench"


@dataclass(frozen=True)
class Ratio:
    """How many times as long as the second side the first one took, for each pair of neighbours."""

    values: list[float]

    def __float__(self) -> float:
        return median(self.values)

    def __str__(self) -> str:
        spread = f" ({min(self.values):.3g} - {max(self.values):.3g})" if len(self.values) > 1 else ""
        return f"{float(self):.3g}x{spread}"


@dataclass(frozen=True)
class Section:
    """What a bench found."""

    said: str  # the geometry, and what was equal
    rows: Sequence[dict[str, str | float | Ratio]] = ()  # by column; a cell that a row has not stays empty

    def text(self, title: str) -> str:
        columns = list(dict.fromkeys(column for row in self.rows for column in row))
        cells = [[row.get(column, "") for column in columns] for row in self.rows]
        shown = [[f"{x:.3g}" if isinstance(x, float) else str(x) for x in row] for row in cells]
        head = f"#### {title}\n\n{self.said}."
        return markdown(head, columns, shown) if shown else head


def take_turns(repeats: int, *sides: Callable[[], object]) -> list[list[float]]:
    """Seconds of each side, A B A B ..."""
    import torch

    seconds = [[] for _ in sides]
    for _ in range(repeats):
        for found, side in zip(seconds, sides):
            began = time.perf_counter()
            side()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            found.append(time.perf_counter() - began)
    return seconds


def ratio(first: Sequence[float], second: Sequence[float]) -> Ratio:
    return Ratio([a / b for a, b in zip(first, second, strict=True)])


def side_by_side(sides: dict[str, Sequence[float]], amount: float = 0) -> dict[str, float | Ratio]:
    """Cells of a row: each side's median, or `amount` per second; what the second side gained on the first."""
    medians = {name: amount / median(seconds) if amount else median(seconds) for name, seconds in sides.items()}
    return medians | {"gain": ratio(*sides.values())}


def require(same: bool, what: str) -> None:
    if not same:
        raise AssertionError(f"{what} differ: the sides did not do the same work, so their times mean nothing")


def peak(work: Callable[[], object]) -> float:
    """GiB that the work needs beyond what is there before."""
    import torch

    on_gpu = torch.cuda.is_available()

    def most() -> int:
        if on_gpu:
            return torch.cuda.max_memory_allocated()
        # Linux; a new process inherits its parent's ru_maxrss, so ask for this one's own high-water mark.
        return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024

    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")
    before = most()
    work()
    return (most() - before) / 2**30


def gpu() -> str:
    """Its name; "" where there is none."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


# ------------------------------------------------------------------------------------------------ what is measured on


def cached(name: str) -> Path:
    """A place for what is made once."""
    CACHE.mkdir(parents=True, exist_ok=True)
    return CACHE / name


def toy_folder() -> Path:
    """A small toy: videos, rows, and the tokenizer of all models here."""
    folder, unfinished = cached("toy"), cached("toy.tmp")
    if not folder.exists():
        rows = {"perception": 100, "direct": 20, "sft": 300, "sft_val": 10, "rl": 64, "val": 8, "test": 8}
        toy.build(unfinished, sizes={"videos": 60} | rows)
        unfinished.rename(folder)
    return folder


def toy_items(name: str, parse: Callable, count: int) -> list:
    source = Source(f"{toy_folder()}/{name}.parquet")
    return [item for item, _ in Dataset(DataConfig((source,)), parse).batch(0, count)]


def checkpoint(name: str, contract: VisualContract, seed: int = 0, **sizes) -> Path:
    """Random weights of the real class, with all that stands beside them."""
    toy.write_checkpoint(cached(name), load_tokenizer(toy_folder() / "model"), contract, seed, **sizes)
    return cached(name)
