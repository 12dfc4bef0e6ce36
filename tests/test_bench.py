"""The benches run, and compare equal work."""

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
    """Folders of the test's own."""
    monkeypatch.setattr(bench, "TOY", toy_dir)
    monkeypatch.setattr(bench, "OURS", tmp_path)


@pytest.mark.parametrize("name", SMALL)
def test_every_bench_says_what_it_measures_and_measures_it(name):
    assert bench.BENCHES[name].__doc__
    for what, plain, ours, gain in SMALL[name]():
        assert what and float(ours) > 0 and float(gain.partition("x")[0]) > 0
        if name == "dispatch":  # two reports wait together
            assert float(plain) > 1.3 * float(ours)


def test_sides_with_other_gradients_are_not_timed(monkeypatch):
    plainly = bench.plain_logprobs
    monkeypatch.setattr(bench, "plain_logprobs", lambda *args: 1.001 * plainly(*args))
    with pytest.raises(AssertionError, match="the update: the sides differ"):
        next(SMALL["update"]())


def test_sides_take_turns_and_a_gain_is_the_median_over_neighbours():
    """8, 1 and 1 times; the ratio of the medians would be 2."""
    order, seconds = [], {"a": iter([0, 0.4, 0.1, 0.2]), "b": iter([0, 0.05, 0.1, 0.2])}

    def side(name: str) -> None:
        order.append(name)
        time.sleep(next(seconds[name]))

    *_, gain = bench.versus("what", functools.partial(side, "a"), functools.partial(side, "b"), 3)
    assert order == ["a", "b"] * 4  # the first two are compared
    median, least, most = map(float, re.fullmatch(r"(\S+)x \((\S+) - (\S+)\)", gain).groups())
    assert least <= median < 1.5 and most > 4


def test_the_command_prints_a_section_per_bench(monkeypatch, capsys):
    def sleep():
        """About sleep."""
        yield bench.versus("a nap", lambda: time.sleep(0.02), lambda: time.sleep(0.01), 1)

    monkeypatch.setattr(bench, "BENCHES", {"sleep": sleep, "awake": None})
    monkeypatch.setattr(sys, "argv", ["bench.py", "sleep"])
    assert bench.main() == 0
    told = capsys.readouterr().out
    assert told.startswith("\n#### sleep, ") and "About sleep." in told and "| a nap | 0.02" in told


@pytest.mark.slow
def test_a_step_has_a_column_per_way_and_state_and_a_mean_over_ten():
    changes = ["batch_tasks=1", "grpo.group_size=2", "gating=[4]"]
    *phases, (_, *steps), (_, *means) = table = list(bench.step(100.0, *changes))
    assert [row[0] for row in table] == [*bench.PHASES, "the step", "mean of ten steps"]
    assert all(len(row) == 5 for row in table)
    for phase, *spans in phases:
        for with_state, span in zip((False, True, False, True), spans):
            expected = with_state or phase != "trainer: state"
            assert bool(re.fullmatch(r"\d+\.\d - \d+\.\d", span)) is expected, (phase, spans)
    plain, saved, plain4, saved4 = map(float, steps)
    assert means[1::2] == ["", ""]
    assert [float(mean) for mean in means[::2]] == pytest.approx(
        [(9 * plain + saved) / 10, (9 * plain4 + saved4) / 10], abs=0.1
    )


@pytest.mark.slow
def test_a_simulated_step_hides_export_and_state_behind_sampling(monkeypatch):
    """The loop is rl.py's. Here a batch takes 2 s, and the trainer has little to do. Past bug: the weights were written
    after sampling had ended, and the next batch began after a state was saved."""
    plan = dict.fromkeys(bench.planned("TP-1"), 0.0) | {"writing": 20.0, "state": 5.0}
    monkeypatch.setattr(bench, "planned", lambda way: plan)
    ran = {phase: [] for phase in bench.PHASES}
    for phase, *span in bench.run_node("TP-1", 10, ["batch_tasks=1", "grpo.group_size=2", "gating=[4]"]).spans:
        ran[phase].append(span)
    batches, pushes, exports = ran["sampler: batch"], ran["trainer: push"], ran["trainer: export"]
    assert all(ran.values()) and len(batches) == len(pushes) == len(exports) == 5
    for batch, export, push in zip(batches[1:], exports, pushes):
        assert batch[0] < export[0] < export[1] < batch[1] < push[0]
    assert pushes[1][1] < batches[3][0] < ran["trainer: state"][0][1]
