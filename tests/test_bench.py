"""The benchmarks run, and both sides do the same work."""

import functools
import re
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
    """Use small sizes, and folders of this test."""
    monkeypatch.setattr(bench, "TOY", toy_dir)
    monkeypatch.setattr(bench, "OURS", tmp_path)


@pytest.mark.parametrize("name", SMALL)
def test_every_bench_says_what_it_measures_and_measures_it(name):
    assert bench.BENCHES[name].__doc__
    for what, plain, ours, gain in SMALL[name]():
        assert what and float(ours) > 0 and float(gain.partition("x")[0]) > 0
        if name == "dispatch":  # two reports take their time together
            assert float(plain) > 1.3 * float(ours)


def test_sides_with_other_gradients_are_not_timed(monkeypatch):
    plainly = bench.plain_logprobs
    monkeypatch.setattr(bench, "plain_logprobs", lambda *args: 1.001 * plainly(*args))
    with pytest.raises(AssertionError, match="the update: the sides differ"):
        next(SMALL["update"]())


def test_the_command_prints_a_section_per_bench_whose_sides_took_turns(monkeypatch, capsys):
    order = []

    def nap(side: str, seconds: float) -> None:
        order.append(side)
        time.sleep(seconds)

    def sleep():
        """About sleep."""
        yield bench.versus("a nap", functools.partial(nap, "a", 0.02), functools.partial(nap, "b", 0.01), 2)

    monkeypatch.setattr(bench, "BENCHES", {"sleep": sleep, "awake": None})
    monkeypatch.setattr(sys, "argv", ["bench.py", "sleep"])
    assert bench.main() == 0
    assert order == ["a", "b"] * 3  # the first run of each is compared
    told = capsys.readouterr().out
    assert told.startswith("\n#### sleep, ") and "About sleep." in told and "| a nap | 0.02" in told
    gain, least, most = map(float, re.search(r"(\S+)x \((\S+) - (\S+)\)", told).groups())
    assert 0 < least <= gain <= most
