"""Rewards: hand-computed values, adversarial completions, and structural tokens that never touch content."""

import http.server
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rewards
from data import Task
from rewards import (
    Anchor,
    Characters,
    Judge,
    JudgeError,
    RewardConfig,
    accuracy,
    iou,
    score,
    stage,
    structural_mask,
    token_f1,
)
from runtime.answers import parse_letter, parse_span
from runtime.contract import END_OF_TURN

CALL = '<tool_call>\n{"name": "crop_video", "arguments": {"start_time": 0, "end_time": 16}}\n</tool_call>'
LOOK = f"<think>\nLet me look closer.\n</think>\n{CALL}{END_OF_TURN}"
DONE = f"<think>\nThe clip shows it.\n</think>\n<answer>B</answer>{END_OF_TURN}"
MCQ = Task("t", "Which?\nA. red\nB. blue", (), "mcq", "B", ("red", "blue"))
PLAIN = RewardConfig(anchor=Anchor(credit="sequence"))


def earned(turns, executed=0, task=MCQ, cfg=PLAIN, forced=""):
    return score(stage(turns, task, Characters(), executed, forced), Characters(), cfg)


# ------------------------------------------------------------------------------------------------ R_acc


@pytest.mark.parametrize(
    "text, letter",
    [
        ("B", "B"), ("(B)", "B"), ("B.", "B"), ("b", "B"), ("**B**", "B"), ("B: blue", "B"), ("B) blue", "B"),
        ("\\boxed{B}", "B"), ("The answer is (B).", "B"), ("blue", "B"), ("Blue.", "B"), ("B. blue", "B"),
        ("A man holds B", "B"), ("I think it is B", "B"), ("A", "A"),
        ("The answer is B. Option C is wrong", None),  # pitfalls A9: it was right for both
        ("A or B", None), ("AB", None), ("", None), ("none of them", None), ("J", None), ("a red car", None),
    ],
)  # fmt: skip
def test_a_letter_is_read_only_where_one_option_is_named(text, letter):
    assert parse_letter(text, ("red", "blue", "green")) == letter


def test_gold_letters_compare_as_letters_and_not_as_words():
    """Pitfalls A9: gold "A" was an article, so it normalised to nothing and everything matched."""
    task = Task("t", "", (), "mcq", "A", ("x", "y"))
    assert accuracy("A", task, PLAIN) == 1 and accuracy("B", task, PLAIN) == 0 and accuracy(None, task, PLAIN) == 0
    oe = Task("t", "", (), "oe", "A")
    assert accuracy("A", oe, PLAIN) == 1 and accuracy("the", oe, PLAIN) == 0


@pytest.mark.parametrize(
    "text, span",
    [
        ("12.5 - 20.1", (12.5, 20.1)), ("[12.5, 20.1]", (12.5, 20.1)), ("00:12 to 00:20", (12, 20)),
        ("12.5s–20.1s", (12.5, 20.1)), ("from 3 seconds to 7 seconds", (3, 7)), ("01:00:05 - 01:00:09", (3605, 3609)),
        ("20 - 10", (10, 20)), ("between 1:05.5 and 2:00", (65.5, 120)), ("5", None), ("soon", None),
    ],
)  # fmt: skip
def test_a_time_span_is_read_in_every_written_form(text, span):
    assert parse_span(text) == span


def test_iou_is_the_shared_part_of_the_joint_part():
    assert iou((0, 10), (5, 15)) == pytest.approx(5 / 15)
    assert iou((0, 10), (20, 30)) == 0 and iou((3, 3), (3, 3)) == 0
    task = Task("t", "", (), "tvg", "[12.5, 20.1]")
    assert accuracy("[1.25, 20.1]", task, PLAIN) == pytest.approx(7.6 / 18.85)  # pitfalls A9: they were equal
    assert accuracy("12.5 to 20.1", task, PLAIN) == 1


def test_token_f1_counts_shared_words():
    assert token_f1("A red car!", "the red bus") == pytest.approx(2 * 1 / 4)
    assert token_f1("red red", "red") == pytest.approx(2 / 3) and token_f1("1.25", "12.5") == 0


# ------------------------------------------------------------------------------------------------ adversarial completions

CASES = {
    # name: (turns, executed calls, acc, fmt with the anchor in it, tool, anchor)
    "tidy direct answer": ([DONE], 0, 1, 0.2 + 0.3 + 0.2 + 0.1 + 0.5 * 0.7, 0, 0.7),
    "tidy trajectory with tools": ([LOOK, DONE], 1, 1, 1.0, 0.8, 0.7),
    "call without execution": ([LOOK, DONE], 0, 1, 1.0, 0.1, 0.7),
    "executed, but the answer is wrong": ([LOOK, DONE.replace("B<", "A<")], 1, 0, 1.0, 0.3, 0.7),
    "unreadable call": ([LOOK.replace('{"name"', "{name"), DONE], 0, 1, 0.8 + 0.35, 0, 0.7),
    "empty tags": ([f"<think></think><answer></answer>{END_OF_TURN}"], 0, 0, 0.5 * 0.4, 0, 0.4),
    "unclosed think": ([f"<think>\nIt is clearly blue. <answer>B</answer>{END_OF_TURN}"], 0, 1, 0.5 - 0.15, 0, -0.3),
    "no think": ([f"<answer>B</answer>{END_OF_TURN}"], 0, 1, 0.5 + 0.1, 0, 0.0),
    "unclosed answer": ([f"<think>\nIt is clearly blue.\n</think>\n<answer>B{END_OF_TURN}"], 0, 0, 0.2 + 0.3 + 0.2, 0, 0.4),
    "prose only": ([f"The answer is B.{END_OF_TURN}"], 0, 0, 0, 0, 0.0),
    "answer repeated after the end": ([DONE.replace(END_OF_TURN, "B</answer>" + END_OF_TURN)], 0, 1, 0.7 + 0.2, 0, 0.4),
    "two answers, the last counts": ([DONE.replace("<answer>B", "<answer>A</answer><answer>B")], 0, 1, 0.8 + 0.2, 0, 0.4),
    "nested answers": ([DONE.replace("<answer>B", "<answer>A<answer>B")], 0, 1, 0.7 + 0.2, 0, 0.4),
    "two letters": ([DONE.replace(">B<", ">A or B<")], 0, 0, 0.8 + 0.35, 0, 0.7),
    "copied example": ([DONE.replace(">B<", ">...<")], 0, 0, 0.8 + 0.35, 0, 0.7),
    "nested thinks": ([DONE.replace("<think>", "<think><think>")], 0, 1, 0.7 - 0.15, 0, -0.3),
    "close without open": ([DONE.replace("<think>\n", "")], 0, 1, 0.5, 0, 0.0),
    "truncated": ([DONE.removesuffix("</answer>" + END_OF_TURN)], 0, 0, 0.2 + 0.3 + 0.2, 0, 0.4),
    "tag spam": ([f"<think>{'</think>' * 9}<answer>B</answer>{END_OF_TURN}"], 0, 0, 0, 0, 0),
    "a stamp is no tag": ([DONE.replace("blue", "blue at <12.5 seconds>").replace(">B<", "> B <12.5 seconds><")], 0, 1, 0.8 + 0.35, 0, 0.7),
    "a broken tag is not text": ([DONE.replace(">B<", ">B</answe<")], 0, 1, 0.8 + 0.2, 0, 0.4),
    "call tags in the thought": ([f"<think>\nI could {CALL} here.\n</think>\n<answer>B</answer>{END_OF_TURN}"], 0, 1, 0.8 + 0.35, 0.1, 0.7),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_an_adversarial_completion_earns_is_known_by_hand(name):
    turns, executed, acc, fmt, tool, anchor = CASES[name]
    parts = earned(turns, executed)
    got = {key: parts[key] for key in ("acc", "fmt", "tool", "anchor", "reward")}
    fmt = min(fmt, 1.0)
    assert got == pytest.approx({"acc": acc, "fmt": fmt, "tool": tool, "anchor": anchor, "reward": acc + fmt + tool})


def test_an_answer_inside_a_tool_response_scores_nothing():
    """The response stands between the turns; only the assistant's own spans are read (invariant 7)."""
    episode = stage([LOOK, DONE.replace(">B<", ">A<")], MCQ, Characters(), 1)
    gap = Characters().encode("<tool_response><think></think><answer>B</answer></tool_response>")
    (a, b), (c, d) = episode.main.turns
    main = episode.main
    main.ids[b:b], main.mask[b:b] = gap, [0] * len(gap)
    main.turns = [(a, b), (c + len(gap), d + len(gap))]
    assert score(episode, Characters(), PLAIN)["acc"] == 0
    assert not any(structural_mask(main, Characters())[b : b + len(gap)])


def test_accuracy_only_pays_nothing_else_and_f_is_logged_all_the_same():
    cfg = RewardConfig(w_fmt=0, w_tool=0, anchor=Anchor(credit="off"))
    parts = earned([LOOK, DONE], 1, cfg=cfg)
    assert parts["reward"] == 1 and parts["fmt"] == 1 and parts["tool"] == pytest.approx(0.8)
    struct = earned([DONE], cfg=RewardConfig())  # struct pays the anchor through the advantage, not through R_fmt
    assert struct["reward"] == pytest.approx(1 + 0.8) and struct["fmt"] == pytest.approx(1.0)


def test_an_untagged_answer_counts_only_where_the_config_says_so():
    said = f"<think>\nI see it.\nThe answer is A. No, the answer is B.{END_OF_TURN}"
    lenient = RewardConfig(w_fmt=0, w_tool=0, untagged_answer=True)
    assert earned([said])["acc"] == 0 and earned([said], cfg=lenient)["acc"] == 1
    assert earned([DONE.replace("B<", "A<").replace("shows", "answer is B: shows")], cfg=lenient)["acc"] == 0
    assert earned([f"I do not know.{END_OF_TURN}"], cfg=lenient)["acc"] == 0


def test_the_plain_weights_without_the_answer_suffix():
    parts = earned([DONE], cfg=RewardConfig(answer_suffix=False, anchor=Anchor(credit="off")))
    assert parts["reward"] == pytest.approx(1 + 0.3 + 0.2 + 0.1 + 0.1)


def test_the_forced_prefix_counts():
    """Pitfalls A4: the released rewards read sampled tokens only, so a forced <think> was never seen."""
    full = earned([DONE], forced="<think>\n")
    assert full["anchor"] == pytest.approx(0.7) and full["strict"] == 1


def test_f1_and_iou_must_reach_a_half_to_count_as_scored():
    whole_video = Task("t", "", (), "tvg", "[10, 20]")
    parts = earned([LOOK, DONE.replace(">B<", ">0 - 100<")], 1, task=whole_video)
    assert parts["acc"] == pytest.approx(0.1) and parts["tool"] == pytest.approx(0.3)
    assert earned([LOOK, DONE.replace(">B<", ">10 - 18<")], 1, task=whole_video)["tool"] == pytest.approx(0.8)


def test_a_span_that_is_answered_in_the_stamps_of_the_prompt_is_in_form():
    parts = earned(
        [DONE.replace(">B<", "><10.0 seconds> - <20.0 seconds><")], task=Task("t", "", (), "tvg", "[10, 20]")
    )
    assert (parts["acc"], parts["strict"], parts["anchor"]) == (1, 1, pytest.approx(0.7)) and parts["fmt"] == 1


@pytest.mark.parametrize("turns, right", [([DONE], 1), ([LOOK, DONE], 1), ([LOOK], 0), ([], 0), ([DONE + "x"], 0), ([DONE, DONE], 0), ([LOOK.removesuffix(END_OF_TURN), DONE], 1), ([LOOK.replace(END_OF_TURN, "x"), DONE], 0), ([DONE.replace("\n</think>", " <12.5 seconds>\n</think>")], 1)])  # fmt: skip
def test_the_strict_parse_allows_nothing_beside_the_format(turns, right):
    """Past bugs: sequential dispatch ends a turn with </tool_call>, and a thought may quote a stamp."""
    assert earned(turns, 1)["strict"] == right


# ------------------------------------------------------------------------------------------------ structural tokens


def painted(turns, renderer=None, forced=""):
    renderer = renderer or Characters()
    main = stage(turns, MCQ, renderer, forced=forced).main
    mask = structural_mask(main, renderer)
    return "".join(renderer.decode([t]) for t, s in zip(main.ids, mask, strict=True) if s)


def test_structure_is_the_tags_and_nothing_of_their_content():
    call, answer = "<think></think><tool_call></tool_call>", "<think></think><answer></answer>"
    assert painted([LOOK, DONE]) == call + END_OF_TURN + answer + END_OF_TURN
    assert (
        painted([DONE], forced="<think>\n") == f"</think><answer></answer>{END_OF_TURN}"
    )  # what was forced earns no credit


@pytest.mark.parametrize(
    "turn, paint",
    [
        (f"<think>\nIt is B.{END_OF_TURN}", f"<think>{END_OF_TURN}"),  # ended while thinking
        (f"<think>\nIt is <answer>B</answer>{END_OF_TURN}", f"<think><answer></answer>{END_OF_TURN}"),
        (f"It is B.{END_OF_TURN}", END_OF_TURN),  # never thought
        (f"<think>\nB\n</think>\nIt is B.{END_OF_TURN}", f"<think></think>{END_OF_TURN}"),  # neither answer nor call
        (f"<think>\nB\n</think>\n<answer>B{END_OF_TURN}", f"<think></think><answer>{END_OF_TURN}"),
    ],
)
def test_an_end_that_came_too_early_is_structure_too(turn, paint):
    assert painted([turn]) == paint


def test_tags_of_several_tokens_count_whole_and_mixed_tokens_are_left_out(renderer):
    """`<answer>` is three tokens here; in Qwen's vocabulary its last one can be `>B`."""
    main = stage([DONE], MCQ, renderer).main
    kept = [renderer.decode([t]) for t, s in zip(main.ids, structural_mask(main, renderer), strict=True) if s]
    assert kept == ["<think>", "</think>", "<", "answer", ">", "</", "answer", ">", END_OF_TURN]

    class Merged(Characters):  # a vocabulary with the token `>B`, and one with `>\n`
        def decode(self, ids):
            return super().decode(ids).replace("\ue000", ">B").replace("\ue001", ">\n")

    text = "<think>\nB\n</think>\n<answer\ue000</answer\ue001"
    main = stage([text], MCQ, Merged()).main
    kept = [Merged().decode([t]) for t, s in zip(main.ids, structural_mask(main, Merged()), strict=True) if s]
    assert "".join(kept) == "<think></think><answer</answer>\n"


@given(st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "<tool_call>", "</tool_call>", CALL, "B", "\n", "text ", END_OF_TURN]), max_size=14))  # fmt: skip
def test_no_completion_breaks_the_rewards_or_leaves_their_range(pieces):
    turn = "".join(pieces)
    parts = earned([turn], 1)
    assert (
        0 <= parts["acc"] <= 1
        and -0.15 <= parts["fmt"] <= 1
        and 0 <= parts["tool"] <= 1
        and -0.3 <= parts["anchor"] <= 0.7
    )
    main = stage([turn], MCQ, Characters()).main
    chosen = [t for t, s in zip(main.ids, structural_mask(main, Characters()), strict=True) if s]
    assert rewards.TAG.sub("", Characters().decode(chosen)).replace(END_OF_TURN, "") == ""


# ------------------------------------------------------------------------------------------------ the judge and the lab


@pytest.fixture
def judge_server():
    replies, asked = [], []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            reply = replies.pop(0)
            body = json.dumps({"choices": [{"message": {"content": reply}}]}).encode()
            self.send_response(200 if reply else 500)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1", replies, asked
    server.shutdown()


def test_the_judge_is_asked_once_per_content_and_its_failure_is_not_a_zero(judge_server, tmp_path):
    url, replies, asked = judge_server
    cfg = Judge(url=url, model="m", retries=2, cache=str(tmp_path / "cache.jsonl"))
    replies += ["Yes.", "no"]
    assert [rewards.ask_judge("q", "g", a, cfg) for a in ("x", "y", "x", "y")] == [1, 0, 1, 0]
    assert len(asked) == 2 and "x" in asked[0]["messages"][0]["content"]
    replies += ["", "perhaps"]
    with pytest.raises(JudgeError, match="no yes or no after 2 tries; the last reply: perhaps"):
        rewards.ask_judge("q", "g", "z", cfg)
    replies += ["", "yes"]
    assert rewards.ask_judge("q", "g", "z", cfg) == 1  # a failure is not cached


def test_the_lab_prints_every_term_and_paints_the_structure():
    lab = [sys.executable, "rewards.py", DONE.removesuffix(END_OF_TURN), "--answer", "B"]
    told = subprocess.run(lab, cwd=Path(rewards.__file__).parent, capture_output=True, text=True, check=True).stdout
    assert "acc   1.00" in told and "[<][a][n][s][w][e][r][>]B[<]" in told
