"""Metrics: figures that were counted by hand, and f as the released code computes it."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from scripted import TASK, Characters, crop, episode_of_turns

from episode import CALL_ERRORS, NO_PROMPT, Call, Episode, Group, Prompt, Task, Trajectory, console_text
from metrics import describe, f_release, format_metrics
from rewards import TAG_LIMITS, Anchor, RewardConfig
from runtime.policy import PolicyConfig
from runtime.render import END_OF_TURN
from runtime.run import utilisation
from tools import TOOLS

CODE = "<tool_code>\ncrop_video(start_time=0, end_time=16)\n</tool_code>"
CALL = crop(0, 16)
LOOK = f"<think>\nLet me look closer.\n</think>\n{CALL}{END_OF_TURN}"
DONE = f"<think>\nThe clip shows it.\n</think>\n<answer>B</answer>{END_OF_TURN}"
MCQ = Task("t", "Which?\nA. red\nB. blue", (), "mcq", "B", ("red", "blue"))
PLAIN = RewardConfig()
EIGHT = PolicyConfig("Qwen/Qwen3-VL-8B-Instruct")


def measured(turns, forced=""):
    return format_metrics(episode_of_turns(turns, MCQ, Characters(), forced=forced), Characters(), PLAIN)


# ------------------------------------------------------------------------------------------------ means over a step


def test_the_figures_of_a_step_are_those_counted_by_hand():
    task, prompt = TASK, Prompt([5, 5], [])

    def agent(sampled: list[int], turns: int, finish: str = "stop") -> Trajectory:
        n = len(sampled)
        return Trajectory(prompt, [5] * n, [1] * n, [0.0] * n, sampled, [(0, 1)] * turns, finish)

    # One sub-agent ends its report. The other is cut off, with the main agent's ids. It repeats the first call.
    ended, cut = agent([3, 3, 3], 1), agent([3, 3, 3, 3, 3, 3], 1, "length")
    calls = [
        Call(0, "crop_video", {}, "A red flash.", window=(0.0, 10.0), subagent=ended),
        Call(0, "crop_video", {}, "red\n</think>\nred red red", window=(4.9, 14.9), subagent=cut),
        Call(0, "crop_video", {}, error="too_dark"),
        Call(0, "crop_video", {}, error="unparseable"),
    ]
    called = Episode(task, 4, agent([3, 3, 4, 4], 2), calls[:3], advantage=1.0)  # too_dark: a kind of a fork's tool
    called.rewards = {"R": 2.0, "R_acc": 1.0, "closure/think": 1.0}
    tried = Episode(task, 4, agent([4, 4], 2, "length"), calls[3:], advantage=-1.0)  # no call ran
    tried.rewards = {"R": 0.0, "R_acc": 0.0, "closure/think": 0.5}
    skipped = Episode(task, 64, agent([5], 1), anchor_advantage=0.5)  # not flat: it is trained on
    skipped.rewards = {"R": 1.0, "R_acc": 1.0}
    failed = Episode(task, 64, agent([], 0), error_kind="EngineError")
    groups = [Group(task, 4, [called, tried]), Group(task, 64, [skipped]), Group(task, 64, [failed])]
    expected = {f"call_errors/{kind}": 0 for kind in CALL_ERRORS} | {f"calls/{name}": 0 for name in TOOLS} | {
        "failed_rate": 1 / 4, "R": 1, "R_acc": 2 / 3, "closure/think": 0.75, "kappa": 2 / 3, "kappa/K=4": 1, "kappa/K=64": 0,
        "calling_rate": 1 / 3, "parallel_rate": 1,
        "acc/K=4": 0.5, "acc/K=64": 1, "acc/K=4/called": 1, "acc/K=4/skipped": 0, "acc/K=64/skipped": 1,
        "truncated_rate": 1 / 3, "turns": 5 / 3, "sampled_tokens": 7 / 3, "calls/crop_video": 2 / 3,
        "call_errors/unparseable": 1 / 4, "call_errors/too_dark": 1 / 4,
        "calls/distinct": 1 / 2, "critical_tokens": (4 + 6 + 2 + 1) / 3,
        "report/ended": 1 / 2, "report/tokens": 4.5, "report/tagged": 1 / 2,
        "staleness": (1.5 + 1 + 0) / 3, "share/K=4": 1 / 3, "share/K=64": 2 / 3, "flat_groups": 1 / 3,
    }  # fmt: skip
    assert describe(groups, (4, 64), step=5) == pytest.approx(expected)


RAN, FAILED = Call(0, "crop_video", {"start_time": 0}), Call(0, "crop_video", {"start_time": 1}, error="failed")
OTHER, LATER = replace(RAN, arguments={"start_time": 1}), replace(RAN, turn=1, text="again")


@pytest.mark.parametrize("calls, calling, parallel, distinct", [
    ([RAN, RAN, LATER], 0.5, 1, 1 / 3),
    ([RAN, LATER], 0.5, 0, 1 / 2),
    ([RAN, FAILED], 0.5, 0, 1),
    ([FAILED, OTHER], 0.5, 0, 1),
    ([RAN, OTHER, LATER], 0.5, 1, 2 / 3),
    ([RAN, replace(RAN, name="zoom")], 0.5, 1, 1),
    ([FAILED, FAILED], 0, None, None),
])  # fmt: skip
def test_calls_are_parallel_if_several_of_one_turn_ran_and_distinct_unless_they_repeat_one_that_ran(
    calls, calling, parallel, distinct
):
    """There is one episode that makes these calls and one that makes none."""
    episodes = [Episode(TASK, 4, Trajectory(NO_PROMPT), made, rewards={"R_acc": 0.0}) for made in (calls, [])]
    figures = describe([Group(TASK, 4, episodes)], (4,), step=0)
    assert [figures["calling_rate"], figures.get("parallel_rate")] == [calling, parallel]
    assert figures.get("calls/distinct") == pytest.approx(distinct)


def test_a_kind_of_error_that_only_another_rank_has_seen_is_counted_over_the_calls_of_all(monkeypatch):
    """Past mutant: each rank counted only its own kinds, so the rate divided by the calls of those ranks alone."""
    episode = Episode(TASK, 4, Trajectory(NO_PROMPT), [RAN], rewards={"R_acc": 0.0})
    monkeypatch.setattr("metrics.gather", lambda mine: [mine, {"too_dark"}])
    assert describe([Group(TASK, 4, [episode])], (4,), step=0)["call_errors/too_dark"] == 0


# ------------------------------------------------------------------------------------------------ the tags of an episode


def test_closure_spam_and_surplus_are_counted_in_each_turn():
    """Past bugs: opened and closed tags were summed over all turns, so one tag closed twice hid one left open. Only spam episodes
    had the key, so its mean was always 1."""
    parts = measured([LOOK.replace("</think>", ""), DONE.replace("</think>", "</think></think></think>")])
    assert parts["closure/think"] == 0.5 and parts["closure/answer"] == 1 == parts["closure/tool_call"]
    assert parts["surplus/think"] == 2 and parts["surplus/answer"] == 0
    assert measured([DONE + "</answer>"])["closure/answer"] == 1  # extra closing tags do not raise it
    tidy, spam = measured([DONE]), measured([f"<think>{'</think>' * 9}"])
    assert [parts[f"spam/{tag}"] for parts in (tidy, spam) for tag in TAG_LIMITS] == [0, 0, 0, 1, 0, 0]
    # The code of pretrained models counts for closure, and has no limit.
    parts = measured([LOOK.replace(CALL, CODE), LOOK.replace(CALL, CODE.removesuffix("</tool_code>")), DONE])
    assert parts["closure/tool_code"] == 0.5 and "spam/tool_code" not in parts


# ------------------------------------------------------------------------------------------------ f on the paper's scale

OFF = RewardConfig(answer_suffix=False, anchor=Anchor(credit="off"))  # the released recipe of plain GRPO
RELEASE_F = yaml.safe_load((Path(__file__).parent / "release_f.yaml").read_text("utf-8"))


@pytest.mark.parametrize("plain, anchored, text", RELEASE_F)
def test_f_release_is_that_of_the_released_code(plain, anchored, text):
    """Past bug: 25 of these texts had another value."""
    assert f_release(text, OFF) == pytest.approx(plain)
    assert f_release(text, PLAIN) == pytest.approx(anchored)


def test_f_release_reads_what_was_sampled_even_in_spam():
    assert measured([DONE], forced="<think>\n")["f_release"] == 0.5
    assert measured([DONE])["f_release"] == 1.0
    assert measured([DONE.replace("<answer>", "<think>" * 4 + "<answer>")])["f_release"] > 0.5  # R is 0


# ------------------------------------------------------------------------------------------------ speed


def test_the_mfu_is_six_flops_a_weight_and_token_over_the_peak_of_a_known_gpu(monkeypatch):
    assert utilisation(EIGHT, tokens=1000, seconds=2.0, gpus=4) == {}  # a CPU
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for name, peak in (("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA A100-SXM4-80GB", 312e12)):
        monkeypatch.setattr("torch.cuda.get_device_name", lambda name=name: name)
        mfu = 6 * 7_568_405_504 * 1000 / (2.0 * 4 * peak)  # the embedding is looked up, not multiplied
        assert utilisation(EIGHT, tokens=1000, seconds=2.0, gpus=4) == {"mfu": pytest.approx(mfu)}
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "another")
    assert utilisation(EIGHT, tokens=1000, seconds=2.0, gpus=4) == {}


def test_the_console_shows_an_episode_in_twelve_lines_and_obeys_none_of_its_characters():
    said = [
        f"<think>{chr(27)}[2J\nA flash.\n</think>\n{CALL}<|im_end|>",
        "\n".join("0123456789") + "\n<answer>B</answer><|im_end|>",
    ]
    episode = episode_of_turns(said, MCQ, Characters())
    first, *rest = console_text(episode, Characters().decode).split("\n")
    assert first == rf"t, K={episode.k}: Which?\nA. red\nB. blue"
    assert (
        len(rest) == 11 and rest[0] == r"<think>\x1b[2J" and rest[-1].endswith("</answer><|im_end|>") and "..." in rest
    )
