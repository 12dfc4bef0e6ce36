"""The benches run, and compare equal work."""

import functools
import sys
import time

import pytest
import torch

from study import bench

torch.set_num_threads(1)
SMALL = {
    "update": functools.partial(bench.update, 2, 3, 64, (8, 12, 16)),
    "dispatch": functools.partial(bench.dispatch, 3, 2, 0.2),
    "engine": functools.partial(bench.engine, 1, 8, 8),
}


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path, toy_dir):
    """Folders of the test's own."""
    monkeypatch.setattr(bench, "TOY", toy_dir)
    monkeypatch.setattr(bench, "OURS", tmp_path)


@pytest.mark.parametrize("name", bench.BENCHES)
def test_every_bench_says_what_it_measures_and_measures_it(name):
    assert bench.BENCHES[name].__doc__
    for what, plain, ours, gain in SMALL[name]():
        assert what and float(ours) > 0 and float(gain.partition("x")[0]) > 0
        if name == "dispatch":  # two reports wait together
            assert float(plain) > 1.3 * float(ours)


def test_sides_with_other_gradients_are_not_timed(monkeypatch):
    plainly = bench.plain_logprobs
    monkeypatch.setattr(bench, "plain_logprobs", lambda *args: 1.001 * plainly(*args))
    monkeypatch.setattr(bench.time, "perf_counter", lambda: pytest.fail("it was timed"))
    with pytest.raises(AssertionError, match="the update: the sides differ"):
        next(SMALL["update"]())


def test_sides_take_turns_and_a_gain_is_the_median_over_neighbours(monkeypatch):
    clock, order = iter([0.0, 8, 8, 10, 10, 16, 16, 19, 19, 28, 28, 31]), []
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(clock))
    row = bench.versus("what", lambda: order.append("a"), lambda: order.append("b"), 3)
    assert order == ["a", "b"] * 4  # the first two are compared
    # 8 / 2, 6 / 3 and 9 / 3; the ratio of the medians would be 8 / 3
    assert row == ["what", "8", "3", "3x (2 - 4)"]


def test_the_command_prints_a_section_per_bench(monkeypatch, capsys):
    def sleep():
        """About sleep."""
        yield bench.versus("a nap", lambda: time.sleep(0.02), lambda: time.sleep(0.01), 1)

    monkeypatch.setattr(bench, "BENCHES", {"sleep": sleep, "awake": None})
    monkeypatch.setattr(sys, "argv", ["bench.py", "sleep"])
    assert bench.main() == 0
    told = capsys.readouterr().out
    assert told.startswith("\n#### sleep, ") and "About sleep." in told and "| a nap | 0.02" in told
