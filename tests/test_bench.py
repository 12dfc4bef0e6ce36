"""The benches run, compare equal work and count right; the planned split is the best of its table."""

import dataclasses
import math
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import bench
import bench_agents
import bench_training
import config
import measure
from data import Bundle
from plan import Pace, PlanError, Split, Step, best_split, plan_splits
from rl import RLConfig
from video import Videos

torch.set_num_threads(1)
BENCHES = bench.benches()


@pytest.fixture(scope="module")
def cache(tmp_path_factory, toy_dir):
    folder = tmp_path_factory.mktemp("bench")
    (folder / "toy").symlink_to(toy_dir)
    return folder


@pytest.fixture(autouse=True)
def small(monkeypatch, cache):
    """Our own cache, a fast H.264 encoder with keyframes close together, and none for AV1."""
    monkeypatch.setattr(measure, "CACHE", cache)
    monkeypatch.setattr(bench_agents, "GOP", 50)
    fast = {"preset": "ultrafast", "x264-params": "scenecut=0:bframes=2"}
    monkeypatch.setattr(bench_agents, "ENCODERS", {"H.264": [("libx264", fast)], "AV1": [("no such encoder", {})]})


def numbers(row: dict) -> list[float]:
    found = [value.values if isinstance(value, measure.Ratio) else [value] for value in row.values()]
    return [x for values in found for x in values if not isinstance(x, str)]


# ------------------------------------------------------------------------------------------------ the benches


@pytest.mark.parametrize("name", BENCHES)
def test_every_bench_yields_finite_positive_numbers(name):
    section = BENCHES[name](True)
    if name == "update_8b" and not torch.cuda.is_available():
        assert section.said == "Not measured: it needs a GPU" and not section.rows
        return
    assert section.rows
    for row in section.rows:
        assert numbers(row) and all(math.isfinite(x) and x > 0 for x in numbers(row)), row
    if name == "decode":
        assert "AV1: this PyAV has no encoder" in section.said
    if name == "dispatch":  # three reports wait together
        assert float(section.rows[-1]["gain"]) > 1
    assert section.text("a title").count("\n|") == len(section.rows) + 2


@pytest.mark.parametrize("name", ["update", "sft"])
def test_sides_with_other_gradients_are_not_timed(name, monkeypatch):
    plainly = bench_training.plain_logprobs
    monkeypatch.setattr(bench_training, "plain_logprobs", lambda *args: 1.001 * plainly(*args))
    monkeypatch.setattr(bench_training, "take_turns", lambda *_: pytest.fail("it was timed"))
    with pytest.raises(AssertionError, match="gradients differ"):
        BENCHES[name](True)


def test_readers_with_other_frames_are_not_timed(monkeypatch):
    """One frame late: the neighbour of each frame, which looks different."""
    read = bench_agents.read_with_pyav
    late = lambda path, times, size: read(path, np.minimum(np.asarray(times) + 1 / bench_agents.RATE, 19.9), size)  # noqa: E731
    monkeypatch.setattr(bench_agents, "read_with_pyav", late)
    monkeypatch.setattr(bench_agents, "take_turns", lambda *_: pytest.fail("it was timed"))
    with pytest.raises(AssertionError, match=r"frames of video.py and PyAV differ"):
        bench_agents.decode(True)


def test_decord_is_held_to_the_frames_within_its_scaling(monkeypatch):
    pytest.importorskip("decord")
    read = bench_agents.read_with_decord
    monkeypatch.setattr(
        bench_agents, "read_with_decord", lambda path, i, size: read(path, [max(0, j - 1) for j in i], size)
    )
    monkeypatch.setattr(bench_agents, "take_turns", lambda *_: pytest.fail("it was timed"))
    with pytest.raises(AssertionError, match=r"frames of video.py and decord differ"):
        bench_agents.decode(True)


# ------------------------------------------------------------------------------------------------ measuring


def test_sides_take_turns_and_each_is_timed_alone():
    order = []

    def side(name, seconds):
        order.append(name)
        time.sleep(seconds)

    a, b = measure.take_turns(3, lambda: side("a", 0.05), lambda: side("b", 0.01))
    assert order == ["a", "b"] * 3 and len(a) == len(b) == 3
    assert all(x >= 0.05 for x in a) and all(0.01 <= x < 0.05 for x in b)


def test_a_ratio_is_the_median_over_neighbours_with_its_range():
    found = measure.ratio([8.0, 6.0, 9.0], [2.0, 3.0, 3.0])  # 4, 2, 3; the ratio of the medians would be 8 / 3
    assert found.values == [4.0, 2.0, 3.0] and float(found) == 3.0
    assert str(found) == "3x (2 - 4)" and str(measure.ratio([9.0], [4.0])) == "2.25x"
    with pytest.raises(ValueError):
        measure.ratio([1.0], [1.0, 2.0])


def test_a_row_has_medians_or_rates_and_leaves_other_cells_empty():
    row = measure.side_by_side({"old, s": [8.0, 6.0, 9.0], "new, s": [2.0, 3.0, 3.0]})
    assert (row["old, s"], row["new, s"], float(row["gain"])) == (8.0, 3.0, 3.0)
    rates = measure.side_by_side({"old": [8.0, 6.0, 9.0], "new": [2.0, 3.0, 3.0]}, 24)
    assert (rates["old"], rates["new"], rates["gain"]) == (3.0, 8.0, row["gain"])
    text = measure.Section("said", [{"a": 1 / 3}, {"b": "x"}]).text("title")
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert text.startswith("#### title\n\nsaid.\n") and lines[0] == ["a", "b"]
    assert lines[2:] == [["0.333", ""], ["", "x"]]


def test_a_group_unpacks_into_rows_with_the_same_targets():
    shapes = bench_training.Qwen3VLConfig()
    shapes.text_config.vocab_size = 500
    group = bench_training.draw_group(shapes, frames=3, rollouts=2, suffix=(7, 7), side=64)
    rows = bench_training.unpack(group)
    assert len(group.prompt) == 3 * (5 + 1 + 4 + 1) + 60 and [len(row) for row in rows] == [93 + 60 - 60 + 7] * 2
    assert sum(map(len, rows)) / len(group) == pytest.approx(200 / 107)
    for row, suffix in zip(rows, group.suffixes):
        assert isinstance(row, Bundle) and row.suffixes == [group.prompt + suffix] and sum(row.masks[0]) == 7
        assert [t for t, m in zip(row.suffixes[0], row.masks[0]) if m] == suffix


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU, its memory counts")
def test_the_peak_is_what_was_held_at_once_beyond_what_was_there():
    held = np.ones(20 << 20, np.uint8)
    peak = measure.peak(lambda: [np.ones(n << 20, np.uint8).sum() for n in (30, 100, 50)])
    assert 97 <= peak * 1024 < 115 and held.sum() == 20 << 20


def test_a_long_file_is_the_short_one_again_and_again():
    short, long = (bench_agents.video_file("H.264", seconds, 2) for seconds in (2, 6))
    with Videos(workers=1) as videos:
        times = videos.info(long).times
        np.testing.assert_allclose(times, np.arange(6 * bench_agents.RATE) / bench_agents.RATE, atol=1e-6)
        once, again = videos.frames(short, [3, 40], (64, 32)), videos.frames(long, [3, 140], (64, 32))
        assert (once.pixels == again.pixels).all()
    assert bench_agents.video_file("AV1", 2, 2) is None


# ------------------------------------------------------------------------------------------------ the plan


def test_more_gpus_make_their_phase_faster_and_the_best_split_is_the_least():
    cfg = config.load(RLConfig, bench.REPO / "configs" / "paragrpo_8b.yaml")
    splits = plan_splits(cfg, 8, Pace())
    assert [(s.trainers, s.engines) for s in splits] == [(t, 8 - t) for t in range(1, 8)]
    rollouts, trainings = ([getattr(s.step, phase) for s in splits] for phase in ("rollout", "training"))
    assert rollouts == sorted(rollouts) and len(set(rollouts)) == 7  # fewer engines, slower
    assert trainings == sorted(trainings, reverse=True)
    assert [s.training_gib for s in splits] == sorted((s.training_gib for s in splits), reverse=True)
    section = bench.plan(cfg, 8, Pace())
    for staleness in (0, 1):
        column = [row[f"staleness {staleness}, s"] for row in section.rows if row["fits"] == "yes"]
        best = best_split(splits, staleness, cfg.gpu_gib)
        assert 0 < len(column) < 7 and best.step.seconds(staleness) == min(column)
        assert f"Best at staleness {staleness}: {best.trainers} + {best.engines}, {min(column):.0f} s" in section.said
    assert all(field.name in section.said for field in dataclasses.fields(Pace))
    with pytest.raises(PlanError, match="no split fits into 20 GiB"):
        best_split(splits, 0, 20)
    assert not Split(1, 7, Step(1, 1, 1), 70, 81).fits(80)


# ------------------------------------------------------------------------------------------------ the command


def test_writing_replaces_the_sections_that_were_run_and_nothing_else(tmp_path):
    path = tmp_path / "results" / "bench.md"
    bench.write(path, "decode, CPU", "decode: first")
    bench.write(path, "sync, CPU", "sync: first")
    path.write_text(path.read_text().replace("# Measurements", "# Ours\n\nWords before.") + "\nWords after.\n")
    before = path.read_text()
    bench.write(path, "decode, CPU", "decode: second")
    assert path.read_text() == before.replace("decode: first", "decode: second") != before
    bench.write(path, "decode, H200", "decode: on a GPU")
    after = path.read_text()
    assert "decode: second" in after and "sync: first" in after and after.index("on a GPU") > after.index("Words after")


def test_help_answers_before_torch_is_imported():
    told = subprocess.run(
        [sys.executable, "-X", "importtime", "bench.py", "--help"], cwd=bench.REPO, capture_output=True, text=True
    )
    assert told.returncode == 0 and "--quick" in told.stdout
    imported = {line.split("|")[-1].strip() for line in told.stderr.splitlines()}
    assert "measure" in imported and not imported & {"torch", "transformers"}


def test_the_command_plans_writes_and_refuses(tmp_path, monkeypatch, capsys):
    path = tmp_path / "results" / "bench.md"
    monkeypatch.setattr(bench, "RESULTS", path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["bench.py", *arguments])
        return bench.main()

    here = str(config.Path(config.__file__).parent / "configs" / "paragrpo_8b.yaml")
    assert run("plan", here, "--mfu", "0.15", "batch_tasks=14", "--write") == 0
    told = capsys.readouterr().out
    assert "14 tasks x 8 episodes" in told and "mfu = 0.15" in told
    written = path.read_text()
    assert told.strip() in written and "--mfu 0.15" in written and config.git_commit() in written
    for arguments, message in (
        (["nothing"], "there is only update"),
        (["sync", "--quick", "--write"], "worth keeping"),
    ):
        with pytest.raises(SystemExit):
            run(*arguments)
        assert message in capsys.readouterr().err
    assert path.read_text() == written
