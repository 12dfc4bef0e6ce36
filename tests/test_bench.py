"""The benchmarks run, and both sides do the same work."""

import re
import time

import pytest
import torch

from study import bench

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def folders(monkeypatch, tmp_path, toy_dir):
    monkeypatch.setattr(bench, "TOY", toy_dir)
    monkeypatch.setattr(bench, "OURS", tmp_path)


def test_the_command_prints_a_row_per_claim(monkeypatch, capsys):
    """With small sizes."""
    rows = bench.update(3, 64, (8, 12, 16)), bench.dispatch(2)
    for name, row in zip(("update", "dispatch"), rows):
        monkeypatch.setattr(bench, name, lambda row=row: row)
    bench.main()
    told = capsys.readouterr().out
    found = re.findall(r"^\| (\w+)[^|]*\| ([\d.]+) +\| ([\d.]+) +\| ([\d.]+)x \(", told, re.M)
    assert [name for name, *_ in found] == ["update", "2"]
    assert float(found[1][1]) > 1.3 * float(found[1][2])  # two reports take their time together


def test_sides_take_turns_and_other_results_are_not_timed():
    order = []

    def nap(side: str, seconds: float) -> str:
        order.append(side)
        time.sleep(seconds)
        return "done"

    row = bench.versus("naps", lambda: nap("a", 0.02), lambda: nap("b", 0.01), str.__eq__)
    assert order == ["a", "b"] * 4  # the first run of each is compared
    gain, least, most = map(float, re.fullmatch(r"(\S+)x \((\S+) - (\S+)\)", row[-1]).groups())
    assert 0 < least <= gain <= most
    with pytest.raises(AssertionError, match="naps: the sides differ"):
        bench.versus("naps", lambda: "a", lambda: "b", str.__eq__)
