"""measure.py: what a measurement is, and the small toy that is measured on.

    row = versus("a group of 8", plain, ours, repeats=5)       # A B A B ... -> medians, and the gain with its range
    peak(work)                                                 # GiB

A gain is how many times ours the plain side's seconds (or GiB) are: the median over pairs of neighbours, since what else
the machine does hits neighbours alike. torch is imported where it is needed: `bench.py --help` does not wait for it.

Deliberately missing: significance tests, warm-up by a number of runs (the comparison of results is one), profiles.
"""

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from runtime.dataset import DataConfig, Dataset, Source
from study import toy

CACHE = Path(__file__).resolve().parent.parent / "runs" / "bench"  # of what is made once


@dataclass(frozen=True)
class Row:
    """One line of a bench's table."""

    what: str
    plain: Sequence[float] = ()  # one value per repeat: seconds, unless `what` names another unit; (): no other side
    ours: Sequence[float] = ()  # (): not measured, `what` says why
    note: str = ""

    @property
    def gains(self) -> list[float]:
        return [plain / ours for plain, ours in zip(self.plain, self.ours)]

    def cells(self) -> list[str]:
        plain, ours, gain = (f"{median(x):.3g}" if x else "" for x in (self.plain, self.ours, self.gains))
        spread = f" ({min(self.gains):.3g} - {max(self.gains):.3g})" if len(self.gains) > 1 else ""
        return [self.what, plain, ours, gain and f"{gain}x{spread}", self.note]


def versus(what: str, plain: Callable, ours: Callable, repeats: int, note: str = "") -> Row:
    return Row(what, *take_turns(repeats, plain, ours), note)


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


def peak(work: Callable[[], object]) -> float:
    """GiB that the work needs beyond what is there before: of the GPU, or of this process (Linux) where there is none."""
    import torch

    on_gpu = torch.cuda.is_available()

    def most() -> int:
        if on_gpu:
            return torch.cuda.max_memory_allocated()
        return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024

    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    else:
        ctypes.CDLL(None).malloc_trim(0)  # memory that was used and freed before would hide some
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark is what is there now
    before = most()
    work()
    return (most() - before) / 2**30


def toy_folder() -> Path:
    """60 videos, rows that ask about them, a small model, the tokenizer of all models here."""
    folder, unfinished = CACHE / "toy", CACHE / "toy.tmp"
    if not folder.exists():
        rows = {"perception": 100, "direct": 20, "sft": 300, "sft_val": 10, "rl": 64, "val": 8, "test": 8}
        toy.build(unfinished, sizes={"videos": 60} | rows)
        unfinished.rename(folder)
    return folder


def toy_items(name: str, parse: Callable, count: int) -> list:
    """Tasks or dialogues of the toy."""
    source = Source(f"{toy_folder()}/{name}.parquet")
    return [item for item, _ in Dataset(DataConfig((source,)), parse).batch(0, count)]
