"""The benches run, compare equal work and count right; the planned split is the best of its table."""

import functools
import math
import re
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from rl import RLConfig
from runtime import config
from runtime.plan import Pace, PlanError, best_split, plan_splits
from runtime.video import Videos
from study import bench, bench_training, measure
from study.measure import Row

torch.set_num_threads(1)
SHAPE = {"frames": 3, "rollouts": 3, "suffix": (8, 16), "side": 64}
SMALL = {
    "update": functools.partial(bench_training.update, 2, [("rollouts", 2)], **SHAPE),
    "sft": functools.partial(bench_training.sft, 1, (4, 2), frames=2, side=64),
    "dispatch": functools.partial(bench.dispatch, 1, 2, 0.2),
    "overhead": functools.partial(bench.overhead, (1, 4), 0.05),
    "decode": functools.partial(bench.decode, 1, (4,)),
    "engine": functools.partial(bench_training.engine, 1, 8, 8),
    "sync": functools.partial(bench_training.sync, 1, hidden_size=128, intermediate_size=384, num_hidden_layers=2),
    "startup": functools.partial(bench.startup, 1, "eval.py"),
}
PARAGRPO = str(bench.REPO / "configs" / "paragrpo_8b.yaml")


@pytest.fixture(scope="module")
def cache(tmp_path_factory, toy_dir):
    folder = tmp_path_factory.mktemp("bench")
    (folder / "toy").symlink_to(toy_dir)
    return folder


@pytest.fixture(autouse=True)
def small(monkeypatch, cache):
    """Our own cache, a fast H.264 encoder with keyframes close together, and none for AV1."""
    for module in (measure, bench, bench_training):
        monkeypatch.setattr(module, "CACHE", cache)
    monkeypatch.setattr(bench, "GOP", 50)
    monkeypatch.setattr(bench, "UNIT", 2)
    fast = {"preset": "ultrafast", "x264-params": "scenecut=0:bframes=2"}
    monkeypatch.setattr(bench, "ENCODERS", {"H.264": ("libx264", fast), "AV1": ("no such encoder", {})})


@pytest.fixture
def never_timed(monkeypatch):
    for module in (bench, bench_training):
        monkeypatch.setattr(module, "versus", lambda *_: pytest.fail("it was timed"))


# ------------------------------------------------------------------------------------------------ the benches


@pytest.mark.parametrize("name", SMALL)
def test_every_bench_yields_finite_positive_numbers(name):
    rows = list(SMALL[name]())
    for row in rows:
        numbers = [*row.plain, *row.ours, *row.gains]
        assert all(math.isfinite(x) and x > 0 for x in numbers), row
        assert row.ours or row.what == "AV1, 4 s: this PyAV has no encoder", row
    if name == "dispatch":  # two reports wait together
        assert rows[1].what == "calls: 2, reports: 0.2 s" and rows[1].gains[0] > 1.3


def test_every_bench_is_run_and_says_what_it_measures():
    benches = bench.benches()
    assert set(benches) == {*SMALL, "update_8b"} and all(run.__doc__ for run in benches.values())
    if not torch.cuda.is_available():
        assert list(benches["update_8b"]()) == [Row("not measured: it needs a GPU")]


@pytest.mark.parametrize("name", ["update", "sft"])
def test_sides_with_other_gradients_are_not_timed(name, monkeypatch, never_timed):
    plainly = bench_training.plain_logprobs
    monkeypatch.setattr(bench_training, "plain_logprobs", lambda *args: 1.001 * plainly(*args))
    with pytest.raises(AssertionError, match="gradients differ"):
        next(SMALL[name]())


@pytest.mark.parametrize("reader", ["PyAV", "decord"])
def test_readers_with_other_frames_are_not_timed(reader, monkeypatch, cache):
    """One frame late or early: the neighbour of each frame, which looks different."""
    if reader == "decord":
        pytest.importorskip("decord")
    pyav, decord = bench.read_with_pyav, bench.read_with_decord
    shifted = {
        "PyAV": lambda path, times, size: pyav(path, np.minimum(times + 1 / bench.RATE, 3.9), size),
        "decord": lambda path, indices, size: decord(path, [max(0, i - 1) for i in indices], size),
    }
    monkeypatch.setattr(bench, f"read_with_{reader.lower()}", shifted[reader])
    monkeypatch.setattr(bench, "versus", lambda what, *_: what)
    if reader == "PyAV":
        with pytest.raises(AssertionError, match="frames of video.py and PyAV differ"):
            list(SMALL["decode"]())
    else:
        said = [row if isinstance(row, str) else row.what for row in SMALL["decode"]()]
        assert any("decord returned other frames" in what for what in said)
        assert not any(what.endswith(", decord") for what in said)


def test_a_group_and_its_rows_have_the_same_targets():
    shapes = bench_training.Qwen3VLConfig()
    shapes.text_config.vocab_size = 500
    rows, [[group]] = bench_training.draw_group(shapes, frames=3, rollouts=2, suffix=(7, 7), side=64)
    assert len(group.prompt) == 3 * (5 + 1 + 4 + 1) + 60 == 93 and len(group) == 107
    for [row], suffix in zip(rows, group.suffixes, strict=True):
        assert row.suffixes == [group.prompt + suffix] and row.masks == [[0] * 93 + [1] * 7]


def test_a_long_file_is_its_first_part_again_and_again():
    short, long = (bench.video_file("H.264", seconds) for seconds in (2, 6))
    with Videos(workers=1) as videos:
        np.testing.assert_allclose(videos.info(long).times, np.arange(150) / 25, atol=1e-6)
        once, again = videos.frames(short, [3, 40], (64, 32)), videos.frames(long, [3, 140], (64, 32))
        assert (once.pixels == again.pixels).all()


# ------------------------------------------------------------------------------------------------ measuring


def test_sides_take_turns_and_each_is_timed_alone():
    order = []

    def side(name, seconds):
        order.append(name)
        time.sleep(seconds)

    row = measure.versus("what", lambda: side("a", 0.1), lambda: side("b", 0.01), 3)
    assert order == ["a", "b"] * 3 and len(row.plain) == len(row.ours) == 3
    assert min(row.plain) >= 0.1 and min(row.ours) >= 0.01 and sum(row.ours) < sum(row.plain)


def test_a_gain_is_the_median_over_neighbours_with_its_range():
    row = Row("what", [8.0, 6.0, 9.0], [2.0, 3.0, 3.0], "a note")  # 4, 2, 3; the ratio of the medians would be 8 / 3
    assert row.cells() == ["what", "8", "3", "3x (2 - 4)", "a note"]
    assert Row("what", [9.0], [4.0]).cells() == ["what", "9", "4", "2.25x", ""]
    assert Row("what", (), [1 / 3]).cells() == ["what", "", "0.333", "", ""]


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU, its memory counts")
def test_the_peak_is_what_was_held_at_once_beyond_what_was_there():
    held = np.ones(20 << 20, np.uint8)
    pieces = [np.ones(64 << 10, np.uint8) for _ in range(1600)]  # freed below, and no longer the process's
    del pieces
    peak = measure.peak(lambda: [[np.ones(64 << 10, np.uint8) for _ in range(16 * n)] for n in (30, 100, 50)][0][0])
    assert 178 <= peak * 1024 < 200 and held.sum() == 20 << 20


# ------------------------------------------------------------------------------------------------ the command


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """The command, in a project without results -> what it printed."""
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "results" / "bench.md")

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["bench.py", *arguments])
        assert bench.main() == 0
        return capsys.readouterr().out

    return command


def test_the_best_split_is_the_least_of_the_printed_column(run):
    cfg = config.load(RLConfig, PARAGRPO)
    splits = plan_splits(cfg, 8, Pace())
    rollouts, trainings = ([getattr(s.step, phase) for s in splits] for phase in ("rollout", "training"))
    assert rollouts == sorted(rollouts) and len(set(rollouts)) == 7  # fewer engines, slower
    assert trainings == sorted(trainings, reverse=True)
    told = run("plan", PARAGRPO)
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in told.splitlines() if line.startswith("|")]
    for staleness in (0, 1):
        column = table[0].index(f"staleness {staleness}")
        fitting = {row[0]: float(row[column]) for row in table[2:] if row[-1] == "yes"}
        best = min(fitting, key=fitting.get)
        assert 0 < len(fitting) < 7 and f"Best at staleness {staleness}: {best}, {fitting[best]:.1f} s" in told
    with pytest.raises(PlanError, match="no split fits into 20 GiB"):
        best_split(splits, 0, 20)


def test_writing_replaces_the_sections_that_were_run_and_nothing_else(run, monkeypatch):
    said = {"decode": "first", "sync": "second"}

    def known():
        def made(name):
            def rows():
                yield Row(said[name], [2.0], [1.0])

            rows.__doc__ = f"About {name}."
            return rows

        return {name: made(name) for name in said}

    monkeypatch.setattr(bench, "benches", known)
    told, path = run("--write"), bench.RESULTS
    assert "About decode." in told and re.search(r"\| first +\| 2 +\| 1 +\| 2x +\|", told)
    path.write_text(path.read_text().replace("# Measurements", "# Ours\n\nWords before.") + "\nWords after.\n")
    before, said["decode"] = path.read_text(), "newest"
    told = run("decode", "--write")
    after = path.read_text()
    assert told.strip() in after and "first" not in after and config.git_commit() in after
    assert after.partition("<!--")[0] == before.partition("<!--")[0]
    assert after.partition("end of decode")[2] == before.partition("end of decode")[2]
    run("sync")
    assert path.read_text() == after


def test_what_cannot_be_run_is_refused_with_a_reason(run):
    for arguments, message in (
        (["nothing"], "nothing: there is only update"),
        (["plan", PARAGRPO, "pace.mfu=0"], "mfu = 0: must be positive"),
        (["plan", PARAGRPO, "pace.mfo=1"], "did you mean pace.mfu"),
        (["plan", "configs/nothing.yaml"], "no such file"),
    ):
        with pytest.raises(SystemExit, match=message):
            run(*arguments)


def test_the_plan_takes_overrides_of_the_config_and_of_what_it_assumes(run):
    told = run("plan", PARAGRPO, "batch_tasks=14", "pace.mfu=0.15", "--gpus", "16")
    assert "112 episodes a step on 16 GPUs" in told and "mfu = 0.15" in told and "| 15 + 1 " in told


def test_help_answers_before_torch_is_imported():
    told = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "study.bench", "--help"],
        cwd=bench.REPO,
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0 and "--write" in told.stdout
    imported = {line.split("|")[-1].strip() for line in told.stderr.splitlines()}
    assert "study.measure" in imported and not imported & {"torch", "transformers"}
