"""Rewards: hand-computed values, adversarial completions, and structural tokens that never touch content."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from scripted import Characters, crop, episode_of_turns
from tiny import Pieces

import rewards
from episode import NO_PROMPT, Group, Task, Trajectory
from rewards import Anchor, RewardConfig, score, structural_mask
from runtime.answers import JudgeError
from runtime.engine import Api
from runtime.render import END_OF_TURN, TAG, TAGS, TAGS_AND_CODE

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

CASES = yaml.safe_load((Path(__file__).parent / "rewards.yaml").read_text("utf-8"))
TEXTS = CASES["texts"]
PARTS = {*rewards.PARTS}


# Plain GRPO, and an anchor that pays nothing. Past bug: under plain GRPO, f had other weights and paid its last 0.1 for balanced
# tags, so curves compared two scales.
OTHERS = [
    RewardConfig(answer_suffix=False, anchor=Anchor("off")),
    RewardConfig(anchor=Anchor(alpha=0.0, beta=0.0, gamma=0.0, lam=0.0)),
]


@pytest.mark.parametrize("case", TEXTS, ids=[case["name"] for case in TEXTS])
def test_a_text_earns_what_is_known_by_hand(case):
    settings = dict(case.get("cfg", {}))
    cfg = RewardConfig(anchor=Anchor(credit=settings.pop("credit", "struct")), **settings)
    task = Task("t", "", (), "tvg", case["gold"]) if "gold" in case else MCQ
    parts = earned(case["turns"], case.get("ran", 0), task, cfg, case.get("forced", ""))
    expected = {name: case[name] for name in PARTS & case.keys()}
    assert {name: parts[name] for name in expected} == pytest.approx(expected)
    assert parts["R"] == pytest.approx(parts["R_acc"] + cfg.w_fmt * parts["R_fmt"] + cfg.w_tool * parts["R_tool"])
    assert len({earned(case["turns"], case.get("ran", 0), cfg=each)["f"] for each in (PLAIN, *OTHERS)}) == 1
    for mode, acc in case.get("untagged", {}).items():
        assert earned(case["turns"], cfg=RewardConfig(untagged_answer=mode))["R_acc"] == acc, mode
    if "struct" in case:
        assert painted(case["turns"], forced=case.get("forced", "")) == case["struct"]
    assert case.keys() <= PARTS | {"name", "turns", "ran", "forced", "gold", "cfg", "untagged", "struct"}


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


# ------------------------------------------------------------------------------------------------ structural tokens


def painted(turns, renderer=None, forced="") -> str:
    renderer = renderer or Characters()
    main = episode_of_turns(turns, MCQ, renderer, forced=forced).main
    return "".join(renderer.decode([t]) for t, s in zip(main.ids, structural_mask(main, renderer), strict=True) if s)


@pytest.mark.parametrize("answer, struct", CASES["tokens"])
def test_a_token_that_shares_a_tag_is_structure_unless_it_carries_content(answer, struct):
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
