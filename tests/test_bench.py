"""The benches run, compare equal work and count right."""

import functools
import json
import math
import re
import sys
import time

import numpy as np
import pytest
import torch

from runtime import config
from study import bench
from study.bench import Timing

torch.set_num_threads(1)
SMALL = {
    "update": functools.partial(bench.update, 2, 3, 64, (8, 12, 16)),
    "sft": functools.partial(bench.sft, 1, 2, frames=(2,), side=64),
    "dispatch": functools.partial(bench.dispatch, 3, 2, 0.2),
    "overhead": functools.partial(bench.overhead, (4,), 0.1),
    "decode": functools.partial(bench.decode, 1, 4),
    "engine": functools.partial(bench.engine, 1, 8, 8),
    "images": functools.partial(bench.images, 2, 4, 64),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory, toy_dir):
    folder = tmp_path_factory.mktemp("bench")
    (folder / "toy").symlink_to(toy_dir)
    return folder


@pytest.fixture(autouse=True)
def small(monkeypatch, cache):
    """Our own cache, and files with keyframes close together."""
    monkeypatch.setattr(bench, "CACHE", cache)
    monkeypatch.setattr(bench, "GOP", 50)
    monkeypatch.setattr(bench, "UNIT", 2)


@pytest.mark.parametrize("name", bench.BENCHES)
def test_every_bench_says_what_it_measures_and_yields_finite_positive_numbers(name):
    assert bench.BENCHES[name].__doc__
    rows = list(SMALL[name]())
    for row in rows:
        numbers = [*row.plain, *row.ours, *row.gains]
        assert all(math.isfinite(x) and x > 0 for x in numbers), row
        assert row.ours, row
    if name == "dispatch":  # two reports wait together
        assert rows[0].what == "calls: 2, reports: 0.2 s" and max(rows[0].gains) > 1.3


def test_sides_with_other_gradients_are_not_timed(monkeypatch):
    plainly = bench.plain_logprobs
    monkeypatch.setattr(bench, "plain_logprobs", lambda *args: 1.001 * plainly(*args))
    monkeypatch.setattr(bench, "versus", lambda *_: pytest.fail("it was timed"))
    with pytest.raises(AssertionError, match="gradients differ"):
        next(SMALL["update"]())


def test_readers_with_other_frames_are_not_timed(monkeypatch):
    """One frame late: the neighbour of each frame, which looks different."""
    pyav = bench.read_with_pyav
    late = lambda path, times, size: pyav(path, np.minimum(times + 1 / bench.RATE, 3.9), size)  # noqa: E731
    monkeypatch.setattr(bench, "read_with_pyav", late)
    with pytest.raises(AssertionError, match="frames of video.py and PyAV differ"):
        list(SMALL["decode"]())


def test_sides_take_turns_and_each_is_timed_alone():
    order = []

    def side(name, seconds):
        order.append(name)
        time.sleep(seconds)

    row = bench.versus("what", lambda: side("a", 0.1), lambda: side("b", 0.01), 3)
    assert order == ["a", "b"] * 3 and len(row.plain) == len(row.ours) == 3
    assert min(row.plain) >= 0.1 and min(row.ours) >= 0.01 and sum(row.ours) < sum(row.plain)


def test_a_gain_is_the_median_over_neighbours_with_its_range():
    row = Timing("what", [8.0, 6.0, 9.0], [2.0, 3.0, 3.0], "a note")  # 4, 2, 3; the ratio of the medians would be 8 / 3
    assert row.cells() == ["what", "8", "3", "3x (2 - 4)", "a note"]
    assert Timing("what", [9.0], [4.0]).cells() == ["what", "9", "4", "2.25x", ""]
    assert Timing("what", (), [1 / 3]).cells() == ["what", "", "0.333", "", ""]


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU, its memory counts")
def test_the_peak_is_what_was_held_at_once_beyond_what_was_there():
    held = np.ones(20 << 20, np.uint8)
    pieces = [np.ones(64 << 10, np.uint8) for _ in range(1600)]  # freed below, and no longer the process's
    del pieces
    peak = bench.peak(lambda: [[np.ones(64 << 10, np.uint8) for _ in range(16 * n)] for n in (30, 100, 50)][0][0])
    assert 178 <= peak * 1024 < 200 and held.sum() == 20 << 20


def test_writing_replaces_the_sections_that_were_run_and_nothing_else(monkeypatch, tmp_path, capsys):
    said = {"decode": "first", "sync": "second"}

    def bench_of(name):
        def rows():
            yield Timing(said[name], [2.0], [1.0])

        rows.__doc__ = f"About {name}."
        return rows

    def run(*arguments) -> str:
        monkeypatch.setattr(sys, "argv", ["bench.py", *arguments])
        assert bench.main() == 0
        return path.read_text()

    path = tmp_path / "bench.md"
    monkeypatch.setattr(bench, "RESULTS", path)
    monkeypatch.setattr(bench, "BENCHES", {name: bench_of(name) for name in said})
    before = run("--write")
    assert "About decode." in before and re.search(r"\| first +\| 2 +\| 1 +\| 2x +\|", before)
    assert "`python -m study.bench --write`" in before and config.git_commit() in before
    said |= {"decode": "newest", "sync": "unwritten"}
    after = run("decode", "--write")
    assert "newest" in after and "first" not in after
    assert after.partition("end of decode")[2] == before.partition("end of decode")[2]
    assert run("sync") == after


def test_notes_of_a_gpu_become_a_page_with_the_newest_of_each_part(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "GPU_NOTES", tmp_path / "gpu.jsonl")
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "bench.md")
    monkeypatch.setattr(sys, "argv", ["bench.py", "gpu", "--write"])
    with pytest.raises(SystemExit, match="make test-gpu"):
        bench.main()
    notes = [
        {"part": "kernel", "device": "H100", "kernel": k, "out": e}
        for k, e in (("flash", 0.5), ("sdpa", 0.1), ("flash", 0.2))
    ]
    bench.GPU_NOTES.write_text("".join(json.dumps(note) + "\n" for note in notes))
    assert bench.main() == 0
    page = (tmp_path / "gpu.md").read_text()
    assert page.startswith("# On a GPU") and page.count("| kernel") == 2
    assert "out 0.2" in page and "out 0.1" in page and "0.5" not in page and "H100" in page
