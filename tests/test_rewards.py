"""Rewards: hand-computed values, adversarial completions, and structural tokens that never touch content."""

import itertools
import json
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scripted import crop
from scripts import REPO
from tiny import Pieces

import rewards
from episode import NO_PROMPT, Group, Task, Trajectory
from rewards import Anchor, RewardConfig, score, structural_mask
from runtime.answers import JudgeError
from runtime.engine import Api
from runtime.render import END_OF_TURN, TAG, TAGS, TAGS_AND_CODE
from study import lab
from study.lab import Characters, episode_of_turns

CALL = crop(0, 16)
LOOK = f"<think>\nLet me look closer.\n</think>\n{CALL}{END_OF_TURN}"
DONE = f"<think>\nThe clip shows it.\n</think>\n<answer>B</answer>{END_OF_TURN}"
EMPTY_LOOK = LOOK.replace("\nLet me look closer.\n", "")
EMPTY_DONE = DONE.replace("\nThe clip shows it.\n", "")
MCQ = Task("t", "Which?\nA. red\nB. blue", (), "mcq", "B", ("red", "blue"))
PLAIN = RewardConfig()


def earned(turns, executed=0, task=MCQ, cfg=PLAIN, forced=""):
    return score(episode_of_turns(turns, task, Characters(), executed, forced), Characters(), cfg)


# ------------------------------------------------------------------------------------------------ adversarial completions

CODE = "<tool_code>\ncrop_video(start_time=0, end_time=16)\n</tool_code>"
CASES = {
    # name: (turns, executed calls, R_acc, R_fmt, R_tool, R_anchor), and f where the cap of 0.9 hides part of R_fmt.
    "tidy direct answer": ([DONE], 0, 1, 0.2 + 0.3 + 0.2 + 0.1, 0, 0.7),
    "tidy trajectory with tools": ([LOOK, DONE], 1, 1, 1.0, 0.8, 0.7),
    "call without execution": ([LOOK, DONE], 0, 1, 0.8, 0.1, 0.7),
    "an answer before the reports": ([LOOK.replace("<tool_call>", "<answer>B</answer><tool_call>"), DONE.replace("<answer>B</answer>", "ok")], 1, 0, 0.5, 0.3, 0.4),
    "a call beside the answer": ([DONE.replace("<answer>", f"{CALL}<answer>")], 1, 1, 0.9, 0.3, 0.4, 0.9),
    "an answer inside the last thought": ([f"<think>\nThe clip shows it.\n</think><think>\nIt is blue, so <answer>B</answer>\n</think>\nok{END_OF_TURN}"], 0, 0, 0.2, 0, 0.4),
    "executed, but the answer is wrong": ([LOOK, DONE.replace("B<", "A<")], 1, 0, 1.0, 0.3, 0.7),
    "unreadable call": ([LOOK.replace('{"name"', "{name"), DONE], 0, 1, 0.8, 0, 0.7),
    "a thought before <tool_code>": ([LOOK.replace(CALL, CODE), DONE], 1, 1, 0.9, 0.8, 0.7, 0.9),
    "a thought behind an empty one and the call": ([LOOK.replace("<think>", f"<think></think>{CALL}<think>"), DONE], 1, 1, 0.7, 0.8, 0.7, 0.9),
    "empty thought": ([EMPTY_DONE], 0, 1, 0.5 + 0.1, 0, 0.0),
    "short thought": ([DONE.replace("The clip shows it.", "See it.")], 0, 1, 0.5 + 0.1, 0, 0.0),
    "a thought of ten letters": ([DONE.replace("The clip shows it.", "It is so blue")], 0, 1, 0.8, 0, 0.7),
    "a thought of dots": ([DONE.replace("The clip shows it.", 10 * "." + 10 * "\u200b")], 0, 1, 0.5 + 0.1, 0, 0.0),
    "a thought of tags": ([EMPTY_DONE.replace("</think>", "<answer></answer></think>")], 0, 1, 0.5, 0, 0.0),
    "an empty thought before the call": ([EMPTY_LOOK, DONE], 1, 1, 0.5 + 0.1, 0.8, 0.0),
    "an empty thought before the second call": ([LOOK, EMPTY_LOOK, DONE], 2, 1, 0.5 + 0.1, 0.8, 0.0),
    "a thought closed twice": ([DONE.replace("<answer>", "</think><answer>")], 0, 1, 0.2 + 0.5, 0, -0.3),
    "a thought closed twice before a call": ([LOOK.replace("</think>", "</think></think>"), DONE], 1, 1, 0.9, 0.8, -0.3, 1.0 - 0.15),
    "a second call without its opening tag": ([LOOK.replace(CALL, CALL + CALL.replace("<tool_call>", "")), DONE], 1, 1, 0.9, 0.8, 0.7, 0.9),
    "an answer before the last turn": ([DONE.replace("B<", "A<"), DONE], 0, 1, 0.7, 0, 0.7, 0.9),
    "unclosed think": ([f"<think>\nIt is clearly blue. <answer>B</answer>{END_OF_TURN}"], 0, 0, 0, 0, -0.3),
    "no think": ([f"<answer>B</answer>{END_OF_TURN}"], 0, 1, 0.5, 0, 0.0),
    "unclosed answer": ([f"<think>\nIt is clearly blue.\n</think>\n<answer>B{END_OF_TURN}"], 0, 0, 0.2, 0, 0.4),
    "prose only": ([f"The answer is B.{END_OF_TURN}"], 0, 0, 0, 0, 0.0),
    "as many answers as are no spam": ([DONE.replace("<answer>B", 2 * "<answer>A</answer>" + "<answer>B")], 0, 1, 0.7, 0, 0.4),
    "nested thinks": ([DONE.replace("<think>", "<think><think>")], 0, 1, 0.7, 0, -0.3),
    "close without open": ([DONE.replace("<think>\n", "")], 0, 1, 0.5, 0, -0.3),
    "closed before it is opened": ([DONE.replace("<think>", "</think><think>").replace("</think>\n<answer>", "<answer>")], 0, 0, 0, 0, -0.3),
    "truncated": ([DONE.removesuffix("</answer>" + END_OF_TURN)], 0, 0, 0.2, 0, 0.4),
    "tag spam": ([f"<think>{'</think>' * 9}<answer>B</answer>{END_OF_TURN}"], 0, 0, 0, 0, -0.3),
    "a stamp is no tag": ([DONE.replace("blue", "blue at <12.5 seconds>").replace(">B<", "> B <12.5 seconds><")], 0, 1, 0.8, 0, 0.7),
    "a comparison is no tag": ([DONE.replace("shows it", "shows that 3 < 5").replace(">B<", "> B, <= 5<")], 0, 1, 0.8, 0, 0.7),
    "a broken tag is not text": ([DONE.replace(">B<", ">B</answe<")], 0, 1, 0.7, 0, 0.4),
    "<tool_code> before the answer": ([DONE.replace("<answer>", "<tool_code><answer>")], 0, 1, 0.7, 0, 0.4),
    "call tags in the thought": ([f"<think>\nI could {CALL} here.\n</think>\n<answer>B</answer>{END_OF_TURN}"], 0, 1, 0.7, 0.1, 0.7, 0.9),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_an_adversarial_completion_earns_is_known_by_hand(name):
    turns, executed, acc, r_fmt, tool, anchor, *below_the_cap = CASES[name]
    f = below_the_cap[0] if below_the_cap else min(1.0, r_fmt + 0.5 * anchor)
    expected = {"R_acc": acc, "R_fmt": r_fmt, "f": f, "R_tool": tool, "R_anchor": anchor}
    expected |= {"R": acc + r_fmt + tool}
    parts = earned(turns, executed)
    assert {key: parts[key] for key in expected} == pytest.approx(expected)


GRPO = RewardConfig(answer_suffix=False, anchor=Anchor(credit="off"))  # plain GRPO


@pytest.mark.parametrize("name", CASES)
def test_the_metric_f_of_a_text_is_the_same_in_every_run(name):
    """Past bug: under plain GRPO, f had other weights and paid its last 0.1 for balanced tags, so curves compared two scales."""
    turns, executed, *_ = CASES[name]
    f = earned(turns, executed)["f"]
    for cfg in (GRPO, RewardConfig(anchor=Anchor(alpha=0.0, beta=0.0, gamma=0.0, lam=0.0))):
        assert earned(turns, executed, cfg=cfg)["f"] == f


def one_edit_away(turns: list[str]) -> list[list[str]]:
    """Return the texts in which a tag is left out, replaced or swapped with the next, or a tag, a pair of tags, a piece of one or
    a word is added before or after any tag."""
    pairs = ["<think></think>", "<answer>B</answer>", "<tool_call></tool_call>"]
    added = [*TAGS_AND_CODE, *pairs, " ok ", "</answe", "<"]
    edited = []
    for i, turn in enumerate(turns):
        tags = [(tag.start(), tag.end()) for tag in TAG.finditer(turn)]
        texts = []
        for place in {0, len(turn), *itertools.chain(*tags)}:
            texts += [turn[:place] + more + turn[place:] for more in added]
        for start, end in tags:
            texts += [turn[:start] + other + turn[end:] for other in ("", *TAGS) if other != turn[start:end]]
        for (a, b), (c, d) in itertools.pairwise(tags):
            texts.append(turn[:a] + turn[c:d] + turn[b:c] + turn[a:b] + turn[d:])
        edited += [[*turns[:i], text, *turns[i + 1 :]] for text in texts]
    return edited


@pytest.mark.parametrize("credit, suffix", [("struct", True), ("off", False)])
@pytest.mark.parametrize("honest", [[DONE], [LOOK, DONE], [LOOK.replace(CALL, f"{CALL}\n{CALL}"), LOOK, DONE]])
def test_no_text_one_edit_from_an_honest_one_earns_as_much_unless_it_is_well_formed(honest, credit, suffix):
    """Plain GRPO (`off`) still pays for words, second answers and empty calls between balanced tags, as the release does."""
    cfg = RewardConfig(answer_suffix=suffix, anchor=Anchor(credit=credit))
    full = earned(honest, 9, cfg=cfg)
    unlike = 0
    for turns in one_edit_away(honest):
        parts = earned(turns, 9, cfg=cfg)
        flawed = not parts["well_formed"]
        if credit == "off":
            elements = [rewards.split_turn(turn) for turn in turns]
            names = (*rewards.TAG_LIMITS, "tool_code")
            flawed = not all(rewards.tags_pair(turn, name) for turn in elements for name in names)
        most = full["R"] - 0.09 * flawed
        assert parts["R"] < most + 1e-9 and parts["f"] < full["f"] - 0.04 * flawed + 1e-9, turns
        assert parts["R_anchor"] <= full["R_anchor"], turns
        unlike += flawed
    assert unlike > 50


THOUGHTS = (
    "The clip shows it.",
    "If a<b and b<c, then a<c holds; also x <= y.",
    "The title reads <b>News</b> in <i>bold</i>.",
    "The score is 2:1 (<90 min). Q&A: \"who?\" - 'nobody'.",
    "视频中有一把红伞，所以选择B。时间<20秒。",
    "He writes I <3 U on the wall :> and draws <*)))><.",
    "A <top> view: <the red car> passes an <animal>; x<then, vector<any> and a table's <th> are text.",
    "It flashes at <12.5 seconds>",
    "",
)  # fmt: skip
PIECES = ["<", "</", "<t", "</thin", "</tool_c", "</answe", "</answers>", "<think now", "<tool_response>ok</tool_response>"]  # fmt: skip
VIDEO_CALL = crop(0, 16, video_path="<video>")
WELL_FORMED = {
    1: [
        *([DONE.replace("The clip shows it.", text)] for text in THOUGHTS),
        [LOOK, DONE],
        [LOOK.replace(CALL, VIDEO_CALL), DONE],
        [LOOK.replace(CALL, f"{CALL}\n{VIDEO_CALL}\n{CALL}"), LOOK, DONE.replace(">B<", ">\nB. a<b\n<")],
        [LOOK.removesuffix(END_OF_TURN), DONE],  # sequential dispatch
        [LOOK.replace("\n<tool_call>\n", "<tool_call>").replace("\n</tool_call>", "</tool_call>"), DONE.replace("\n", "")],
        [DONE.replace(">B<", "> 12.5 - 20.1 <").replace("</answer>", "</answer>\n")],
    ],
    0: [
        *([DONE.replace(tag, piece + tag)] for piece in PIECES for tag in ("</think>", "</answer>")),
        [],
        [LOOK],
        [DONE + "x"],
        [DONE, DONE],
        [LOOK.replace(END_OF_TURN, "x"), DONE],
        [LOOK.replace(CALL, "<tool_call>crop</tool_call>"), DONE],
    ],
}  # fmt: skip


@pytest.mark.parametrize("expected, turns", [(key, turns) for key, texts in WELL_FORMED.items() for turns in texts])
def test_well_formed_allows_any_honest_text_and_nothing_beside_the_format(expected, turns):
    assert earned(turns, 1)["well_formed"] == expected


def test_a_failed_judge_leaves_an_error_and_no_reward():
    def judge(question, gold, answer):
        if answer == "B":
            raise JudgeError("gone")
        return 1.0

    judged = RewardConfig(open_answer="judge", judge=Api(url="u", model="m"))
    task = Task("t", "", (), "oe", "blue")
    failed, right = (episode_of_turns([turn], task, Characters()) for turn in (DONE, DONE.replace(">B<", ">blue<")))
    rewards.assign_rewards([Group(task, 64, [failed, right])], Characters(), judged, judge)
    assert failed.error == "JudgeError: gone" and not failed.rewards
    assert not right.error and right.rewards["R_acc"] == 1


@pytest.mark.parametrize("number", [np.float32(0.5), torch.tensor(0.5)], ids=["numpy", "torch"])
def test_a_reward_part_of_numpy_or_torch_is_stored_as_a_float(number, monkeypatch):
    monkeypatch.setattr(rewards, "score", lambda *_: {"R": 1.0, "R_own": number})
    episode = episode_of_turns([DONE], MCQ, Characters())
    rewards.assign_rewards([Group(MCQ, 64, [episode])], Characters(), PLAIN)
    assert json.dumps(episode.rewards) == '{"R": 1.0, "R_own": 0.5}'


def test_a_turn_ends_by_any_token_of_the_list_if_it_was_sampled():
    """Qwen also ends turns with <|endoftext|>."""

    class TwoEnds(Characters):
        ends_of_turn = (*Characters.ends_of_turn, ord("¶"))

    whole = earned([LOOK, DONE], 1)
    episode = episode_of_turns([LOOK.replace(END_OF_TURN, "¶"), DONE.replace(END_OF_TURN, "¶")], MCQ, TwoEnds(), 1)
    assert score(episode, TwoEnds(), PLAIN) == whole
    assert painted([DONE.replace(END_OF_TURN, "¶")], TwoEnds()).endswith("</answer>¶")
    episode.main.mask[-1] = 0  # the same token, not sampled
    padded = score(episode, TwoEnds(), PLAIN)
    assert padded["well_formed"] == 0 and padded["R_anchor"] == pytest.approx(0.4)
    assert not structural_mask(episode.main, TwoEnds())[-1]


CODE_LOOK = LOOK.replace(CALL, CODE)


@pytest.mark.parametrize(
    "turns, weights, expected",
    [
        ([LOOK, DONE], {"w_fmt": 0, "w_tool": 0}, {"R": 1, "f": 1, "R_tool": 0.8}),  # accuracy only; all is logged
        ([DONE], {"answer_suffix": False}, {"R": 1 + 0.3 + 0.2 + 0.1 + 0.1}),
        ([CODE_LOOK, DONE], {"answer_suffix": False}, {"R_fmt": 1.0}),
        (
            [CODE_LOOK.replace("</tool_code>", ""), DONE],
            {"answer_suffix": False},
            {"R_fmt": 0.9},
        ),  # tags do not balance
    ],
)
def test_weights_of_the_config_are_those_of_r(turns, weights, expected):
    parts = earned(turns, 1, cfg=RewardConfig(**weights, anchor=Anchor(credit="off")))
    assert {key: parts[key] for key in expected} == pytest.approx(expected)


THOUGHT = "<think>\nThe answer is A.\n</think>\n"
OPEN_THOUGHT = "<think>\nThe clip shows it."


@pytest.mark.parametrize(
    "turn, off, stated, fallback",
    [
        (DONE, 1, 1, 1),
        (f"{THOUGHT}The answer is A. No, the answer is B.", 0, 1, 1),
        (f"{THOUGHT}The correct answer is:\n\n**B. blue**", 0, 0, 1),
        (f"{THOUGHT}{CALL}\nB", 0, 0, 1),
        (f"{THOUGHT}ok", 0, 0, 0),  # the thought's "The answer is" does not count
        (f"{THOUGHT}The answer is B. <answer>A</answer>", 0, 0, 0),  # a complete <answer> is what counts
        (f"{OPEN_THOUGHT} <answer>B</answer>", 0, 1, 0),
        (f"{OPEN_THOUGHT} The answer is B.", 0, 1, 0),
        ("A is red.\n\nB\n", 0, 0, 1),  # without a thought, the last line
        (LOOK.removesuffix(END_OF_TURN), 0, 0, 0),
        ("", 0, 0, 0),
    ],
)
def test_what_an_answer_without_tags_is_worth_depends_on_the_config(turn, off, stated, fallback):
    """The release reads such answers. Without `fallback`, losing the tags would cost far more than in the paper."""
    turn = turn.removesuffix(END_OF_TURN) + END_OF_TURN
    for mode, worth in {"off": off, "stated": stated, "fallback": fallback}.items():
        assert earned([LOOK, turn], cfg=RewardConfig(untagged_answer=mode))["R_acc"] == worth, mode


def test_the_forced_prefix_counts():
    """The released rewards read only sampled tokens, so they never see a forced <think>."""
    full = earned([DONE], forced="<think>\n")
    assert full["R_anchor"] == pytest.approx(0.7) and full["well_formed"] == 1


@pytest.mark.parametrize("answer, acc, tool", [("0 - 100", 0.1, 0.3), ("10 - 14.9", 0.49, 0.3), ("10 - 15", 0.5, 0.8)])
def test_f1_and_iou_must_reach_a_half_to_count_as_scored(answer, acc, tool):
    parts = earned([LOOK, DONE.replace(">B<", f">{answer}<")], 1, task=Task("t", "", (), "tvg", "[10, 20]"))
    assert (parts["R_acc"], parts["R_tool"]) == pytest.approx((acc, tool))


# ------------------------------------------------------------------------------------------------ structural tokens


def painted(turns, renderer=None, forced="") -> str:
    renderer = renderer or Characters()
    main = episode_of_turns(turns, MCQ, renderer, forced=forced).main
    return "".join(renderer.decode([t]) for t, s in zip(main.ids, structural_mask(main, renderer), strict=True) if s)


CALLED = f"<think></think>\n<tool_call></tool_call>{END_OF_TURN}"
ANSWERED = f"<think></think>\n<answer></answer>{END_OF_TURN}"


@pytest.mark.parametrize(
    "turns, forced, paint",
    [
        ([LOOK, DONE], "", CALLED + ANSWERED),
        ([DONE], "<think>\n", ANSWERED.removeprefix("<think>")),  # a forced tag earns no credit
        # A premature end is structural.
        ([f"<think>\nIt is B.{END_OF_TURN}"], "", f"<think>{END_OF_TURN}"),
        ([f"<think>\nB\n</think>\n<answer>B{END_OF_TURN}"], "", f"<think></think>\n<answer>{END_OF_TURN}"),
        # White space right after a closing tag is structural: it decides not to close again.
        (["a\n</think>\n\n b"], "", "</think>\n"),  # after that character the decision is made
        (["</answer> </answer>\t."], "", "</answer> </answer>\t"),
        (["<answer>\nx </answe> \n"], "", "<answer>"),  # not after an opening or a misspelled tag
    ],
)
def test_structure_is_tags_ends_and_what_follows_a_tag_and_never_their_content(turns, forced, paint):
    assert painted(turns, forced=forced) == paint


@pytest.mark.parametrize(
    "answer, struct",
    [
        # Tokens with a letter, a digit or the answer's first character are not structural ...
        (">B|</", "</"),
        (">|?</", ">"),
        (">\n|?</", ">\n"),
        # ... nor are `>(` and `>[`. But sampling `)</` is the decision to close.
        (">(|B|)</", ")</"),
        (">|A red door|.</", ">|.</"),
        (">\n|B| </", ">\n| </"),
        # Tokens with punctuation after a closing tag or before an opening one are not structural.
        (">|x|</|answer|>,| done| .<|answer|>|B|</", ">|</|answer|answer|>|</"),
    ],
)
def test_a_token_that_shares_a_tag_is_structure_unless_it_carries_content(answer, struct):
    """These are tokens of Qwen."""
    pieces = ["<think>", "I see it.", "</think>", "<", "answer", *answer.split("|"), "answer", ">", END_OF_TURN]
    ids = list(range(len(pieces)))
    mask = structural_mask(Trajectory(NO_PROMPT, ids, [1] * len(ids), turns=[(0, len(ids))]), Pieces(*pieces))
    painted = [piece for piece, structural in zip(pieces, mask, strict=True) if structural]
    assert painted == ["<think>", "</think>", "<", "answer", *struct.split("|"), "answer", ">", END_OF_TURN]


@given(st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "<tool_call>", "</tool_call>", CALL, "B", "\n", "text ", END_OF_TURN]), max_size=14))  # fmt: skip
def test_no_completion_breaks_the_rewards_or_leaves_their_range(pieces):
    turn = "".join(pieces)
    for credit in ("off", "struct"):
        parts = earned([turn], 1, cfg=RewardConfig(anchor=Anchor(credit=credit)))
        assert parts["R"] == pytest.approx(parts["R_acc"] + parts["R_fmt"] + parts["R_tool"])
    assert 0 <= parts["R_acc"] <= 1 and 0 <= parts["R_tool"] <= 1
    assert -0.15 <= parts["f"] <= 1 and -0.3 <= parts["R_anchor"] <= 0.7
    assert TAG.sub("", painted([turn])).replace(END_OF_TURN, "").strip() == ""


# ------------------------------------------------------------------------------------------------ the judge and the lab


def lab_says(monkeypatch, capsys, *arguments: str) -> list[list[str]]:
    monkeypatch.setattr(sys, "argv", ["lab.py", *arguments])
    lab.main()
    return [line.split() for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("answer, kind", [("B", "mcq"), ("(b)", "mcq"), ("A dog", "oe"), ("0:12 - 0:20", "tvg"), ("2 cats and 3 dogs", "oe")])  # fmt: skip
def test_the_labs_kind_follows_from_the_gold_answer(monkeypatch, capsys, answer, kind):
    lines = lab_says(monkeypatch, capsys, f"<answer>{answer}</answer>", "--answer", answer)
    assert ["kind", kind] in lines and ["R_acc", "1.00"] in lines


@pytest.mark.parametrize("more, r", [((), "1.80"), (("--config", str(REPO / "configs" / "toy_paragrpo.yaml")), "1.00")])
def test_the_lab_paints_the_structure_and_scores_by_the_reward_of_a_config(monkeypatch, capsys, more, r):
    """The toy pays for the answer alone."""
    lines = lab_says(monkeypatch, capsys, DONE.removesuffix(END_OF_TURN), "--answer", "B", *more)
    assert ["R", r] in lines
    assert "[<][a][n][s][w][e][r][>]B[<]" in lines[-1][0]
