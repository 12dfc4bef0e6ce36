"""Answer parsing, for every form that models write. The expected values were written by hand."""

import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import listed_options
from episode import Task
from runtime import config
from runtime.answers import (
    final_answer,
    iou,
    normalise,
    parse_letter,
    parse_span,
    score_answer,
    token_f1,
    words_of,
)

READINGS = config.read_tree(Path(__file__).parent / "readings.yaml")

# fmt: off
# What only this part of a pattern reads right: text -> reading, of OPTIONS. Drop the part, and a test fails.
OPTIONS = ("red", "blue", "a green car", "Vitamin C", "A")
PARTS = {
    "a letter stands alone": {"B's and D's": None, "A/B": None, "N/A": None, "D.C. United": None, "Début": None, "选B": "B"},
    "an article is no letter": {
        "A man holds B": "B", "He sits.\nA man walks": None, "He sits. A man walks": None, "Answer: A man": None, "\"A man\" is shown": None, "- A man walks": None, "A forest is shown": None,
        "The answer is A man": None, "It must be A man": None, "It's A man": None,
        "Both A and B fit": None, "A or B": None, "neither A nor B": None, "A is more likely than B": None, "Both B and A are possible": None,
    },
    "a small letter after option": {"option b": "B", "Option b": "B", "It's option c.": "C", "Option d fits": "D", "option a and option b": None, "the option a man takes": None},
    "I needs a mark": {"I think it is B": "B"},
    "a label is no letter of several": {
        "The answer is B or C": None, "The answer is B, C": None, "B and C are shown; either B or C is right": None, "B, then D": None,
        "B nor C": None, "A and B is right, as is D": None, "选A和B": None, "选A或B": None, "选A、B": None, "(A) (B)": None, "A)\nB)": None,
    },
    "a label may be small": {"b": "B", "b) a red car": "B", "The answer is a.": "A", "b: D": "B", "a man": None},
    # 1
    "one option's text": {"blue": "B", "Blue.": "B", "A": "A", "The answer is vitamin C.": "D", "Option: Vitamin C": "D", "Choice: Vitamin C": "D",
                          "**Answer:** vitamin C": "D", "The correct answer is: Vitamin C": "D", "- The answer is Vitamin C": "D"},
    # 2
    "denied before": {"not A but B": "B", "Not A, B, or C. D.": "D", "It isn't A or C, it is B": "B", "neither A nor C. B": "B", "B rather than C": "B", "不是A，是B": "B",
                      "选B，不选A": "B", "not (A) but (B)": "B", "not **A** but **B**": "B", "It isn't option b": None, "not option B": None},
    "quoted": {"Option A says that he": None, "B says that he": None},
    "a reason": {"B (since A happens first)": "B", "It is B because C moves": "B", "It is B because option C moves": "B"},
    "denied after": {
        "B is not shown; D is": "D", "B is wrong; D fits": "D", "D), as (B) is wrong": "D", "B is incorrect; D fits": "D", "B is false; D fits": "D",
        "B is ruled out; D fits": "D", "B is out; D fits": "D", "B is excluded; D fits": "D", "B never happens; D does": "D", "B and C are wrong; D fits": "D",
        "B can be excluded; D fits": "D", "B isn't shown; D is": "D", "A: no; B: yes": "B", "A ✗ B ✓ C ✗": "B", "A) ❌ B) ✅": "B",
        "A错，B对": "B", "A不对，B对": "B", "A项不对，B项对": "B", "A选项不对，B对": "B", "A 不对，选项B": "B", "A和C都不对，正确的是B": "B", "A、C均不符合，故B": "B",
    },
    "lines of a list": {"A. red\nB. blue": None, "- A. red\n- B. blue": None, "A) red\nB) blue": None, "A: red\nB: blue": None,
                        "A. red: incorrect\nB. blue: correct\nC. a green car: incorrect\n\nTherefore, B is correct.": "B",
                        "D. Vitamin C\n\nA: no\nB: no": "D"},
    # 3
    "a word that chooses": {
        "The answer is B; D is near": "B", "The choice is B; D is near": "B", "The option is B; D is near": "B", "It must be D? The answer must be B": "B",
        "Answer: B, as D is near": "B", "I choose B; D is near": "B", "I go with B; D is near": "B", "I am going with B; D is near": "B", "So, B; D is near": "B",
        "Thus B; D is near": "B", "Hence B; D is near": "B", "Therefore B; D is near": "B", "I choose option B; D is near": "B",
        "答案B。D也有": "B", "答案是B。D也有": "B", "答案为B。D也有": "B", "选B。D也有": "B", "选择B。D也有": "B",
        "The answer is D. No, the answer is B.": "B", "D. I mean, the answer is B.": "B", "There is also B; D is near": None, "{\"answer\": \"B\", \"second\": \"D\"}": "B",
    },
    "on its line": {"Let's see each option:\n\nA. red\nB. blue\nTherefore, C is correct": "C", "C fits, or so:\n(D) is near": None},
    # 4
    "called right": {"C is near, B is correct": "B", "C is near, B is right": "B", "C is near, B is the best": "B", "(C) is near, (B) is correct": "B"},
    # 5
    "at the beginning": {"B. D is near": "B", "B) as D is near": "B", "B: D is near": "B", "B\n\nD is near": "B", "(b): D is near": "B", "B fits, D is near": None},
    "doubt": {"B. No wait, C.": None, "B.\n\nWait, C.": None, "B. Maybe C.": None, "B. Perhaps C.": None, "B. It could be C.": None, "B. It might be C.": None},
    # 6
    "alone": {"I am sure of B": "B", "It is B because A moves": "B"},
}
# What may follow a label. Each word stands behind an A that it alone keeps from being an article.
LABELS = (
    "Option {} matches the video", "I choose {} here", "I'd go with {} overall", "Choice {} it is", "So {} remains", "Only {} happens", "The video supports {} more",
    "{} is right", "{} was right", "{} fits best", "{} matches the video", "{} shows what he does", "{} describes it", "{} seems right", "{} and no other",
    "{} or nothing", "{} because he runs", "The answer is {} since he runs", "The answer is {} as shown", "The answer is {} for this reason", "The answer is {} from what I see",
    "The answer is {} in my opinion", "The answer is {} with certainty", "The answer is {} at 12 s", "The best match is {} by far", "The correct answer would be {} here",
    "The answer is {} which shows it", "The answer is {} based on the clip", "The answer is {} given the clip", "The answer is {} due to the light", "The answer is {} according to it",
)
# Each table: expected value -> texts that state it.
RULES = {  # by the rules at the top of answers.py
    "A": ("A. blue",),
    "B": (
        "The answer is blue.", "\\boxed{blue}",
        "(B)", "**B**", "[B]", "'B'", " B \n", "\\boxed{B}", "Ｂ", "（Ｂ）", "B: yes", "B) blue", "B.Blue.", "B, not A",
        "B\nVitamin C", "B. Option A is better", "The answer is: **B**", "**Final answer:** B) Plan A", "选B（不是D）",
        "A or C? The answer is (B).", "The answer is B. Option C fits, too", "A, C和D错；答案是B",
        "A? No. I'd choose B", "C seems so, but I go with B", "C? No, so B.",
        "I think it is B", "B、blue", "答案为B。", "Option A can be excluded, as it is not red. Option B fits.",
        "A is wrong. It is B", "D) is incorrect. B) is correct.", "A、C均不符合，故选B",
    ),
    "C": ("C fits best, so I pick it",),
    "D": ("$\\boxed{\\text{D}}$", "D\nVitamin C", "D.31:15-31:45", "(D) Vitamin C."),
    None: (
        "J", "J. nothing", "AB", "", "...", "red blue", "a red car", "The answer is a man", "Answer: A man walks in", "It's B's turn", "I am sure",
        "not A", "It is not B", "B or A", "B, C", "A、B", "A) or B)", "(A) (B)", "A B", "Option B fits, and so does C",
        "A/N", "A, B or C, I cannot tell", "None of A, B, C or D is correct", "B、C都有可能", "e.g. a man",
    ),
}
LETTERS = {
    OPTIONS: RULES,
    (): {"B": ("B. Vitamin C", "B because A moves"), "C": ("Vitamin C",), "D": ("D. Both A and B",), "I": ("I", "The answer is I."), "J": ("J",), None: ("K", "A\nB")},
    ("red", "Red"): {None: ("red",)},
    ("yeast", "E. coli", "B or A"): {"B": ("E. coli",), "C": ("B or A", "C. B or A")},
}
# As PARTS, of spans.
SPAN_PARTS = {
    "a time": {"B12 - C13": None, "12.05.2024 - 13.05.2024": None, "7, 8, 9 - \ua4d4": None, "12.5% - 20.5%": None, "2.5th - 3.5th": None, "123456789 - 987654321": None, "3 s - 5 sec": (3, 5),
               "3 seconds - 5 second": (3, 5), "1:05 - 1:10": (65, 70), "1:00:05 - 1:00:10": (3605, 3610), "9 men: 3s - 5 s": (3, 5)},
    "minutes": {"2 min - 3 mins": (120, 180), "1 minute - 2 minutes": (60, 120), "2m - 3m": (120, 180), "2min - 3min": (120, 180),
                "2分 - 3分钟": (120, 180), "2分钟5秒 - 3分": (125, 180), "2-3 minutes": (120, 180), "2 to 3 min": (120, 180),
                "between 2 and 3 min": (120, 180), "2 min and 5 s - 3 min": (125, 180), "2 min 5 s - 3 min": (125, 180),
                "2m5s - 3m": (125, 180), "1:05 min - 1:10 min": (65, 70), "3 men - 5 men": (3, 5),
                "2 s 500 ms - 900 ms": None},
    "frames and lengths": {"3 - 5, lasts 2 s": (3, 5), "Frames 2 - 5": None, "In frame 2 at 12.5, then 20.1": (12.5, 20.1),
                           "frames 2-5: at 3 s until 5 s": (3, 5), "frames 2, 3 and 4": None, "frames 2 to 4 at 9 s": None, "frames 2 and 3 at 9 s": None,
                           "frames 2-5, 10 - 12 s": (10, 12), "frames 2-5, 10-12 s": (10, 12), "frames 2, 12.5 and 20.1": (12.5, 20.1),
                           "frames 2, 1:05 and 1:10": (65, 70), "frames 2, 10 s and 12 s": (10, 12), "frames 2, 10 sec and 12 sec": (10, 12),
                           "In frames 2-5 she sits at 12 s": None},
    "the only two": {"It opens at 3 s and closes at 5 s.": (3, 5)},
    "a range": {"9 men: 3 - 5": (3, 5), "9 men: 3–5": (3, 5), "9 men, 3 s (still) to 5 s": None, "9 men from 3 to 5": (3, 5), "9 men between 3 and 5": (3, 5),
                "9 men [3, 5]": (3, 5), "9 men [3,5]": (3, 5), "9 men (3, 5)": (3, 5), "9 men: 3, 5\nYes": (3, 5), "9 men: 3, 5 and more": None, "Not 3 - 5 but 7 - 9": (7, 9)},
    "cannot tell": {"I cannot tell; 3 - 5?": None, "I can't tell; 3 - 5?": None, "I am unable to tell; 3 - 5?": None, "It is unclear; 3 - 5?": None},
    "denied": {"not 3 - 5": None, "not from 3 to 5": None, "nothing between 3 s and 5 s matches": None},
    "another one": {"3 - 5 or 7 - 9": None, "3 - 5 and 7 - 9": None, "3 - 5或7 - 9": None, "3 s or 5 s": None, "5 - 3": None},
}
SPANS = {
    (12.5, 20.1): (
        "12.5-20.1", "12.5–20.1", "12.5 ~ 20.1", "12.5 → 20.1", "12.5, 20.1", "[12.5,20.1]", "(12.5, 20.1)", "[\n12.5,\n20.1\n]",
        "t=12.5 to t=20.1", "１２．５～２０．１", "{\"start\": 12.5, \"end_time\": 20.1}", "12.5s -20.1s", "12.5 sec to 20.1 seconds",
        "<12.5 seconds> to <20.1 seconds>", "从第12.5秒到第20.1秒", "It opens at 12.5 seconds and closes at 20.1.",
        # numbers that are not times
        "In frames 2-5 it jumps, 12.5, 20.1", "the 2nd man, 12.5, 20.1", "12.5 to 20.1, which lasts 7.6 s", "50% sure: 12.5 - 20.1",
        # with more times, the last range
        "9 men: 12.5 -> 20.1", "9 men between 12.5 and 20.1", "9 men: [12.5, 20.1]", "I looked at 0 - 60.\nAnswer: 12.5, 20.1",
        "It is 12 to 20. No, 12.5 to 20.1. I am sure.", "Not 3 - 5 but 12.5 - 20.1",
    ),
    (12, 20): ("00:12 to 00:20", "[00:12,00:20]", "00:12 (12 seconds) to 00:20 (20 seconds)", "I looked at 0 - 60. It is from 00:12 to 00:20."),
    (120, 180): ("2 to 3 minutes", "2 min - 3 min"), (125, 180): ("2 minutes and 5 seconds to 3 minutes",), (125, 130): ("2m5s - 2m10s",),
    (65.5, 120): ("1:05.5 to 2:00",), (3605, 3609): ("01:00:05 - 01:00:09",), (0, 5): ("0 - 5",), (1, 240): ("[1,240]",),
    None: (
        "5", "soon", "", "123456789 - 987654321", "50% - 60%", "frames 2 and 3", "at 5 s, 7 s and 9 s", "It starts at 6 s and lasts 15 seconds.",
        "20.1 - 12.5", "12.5 s or 20.1 s", "3 - 5 or 12.5 - 20.1", "12.0 - 15.5 and 65.0 - 80.0", "0:03-0:05或0:12-0:20", "not 3 - 5",
        "3 - 5, not 12.5 - 20.1", "I am unable to say; 3 - 5 is shown", "It is unclear from 3 to 5",
    ),
}
QUESTIONS = {
    ("red", "blue", "green"): ("Which?\nA. red\nB. blue\nC. green",), ("red", "a car"): ("Which?\n(A) red\n(B) a car;\n",),
    ("red", "blue"): ("Which? (A) red (B) blue", "What did A. Smith wear? A. red, B. blue",
                      "A: What? B: That.\nOptions:\nA) red\nB) blue", "A. Smith\nB. Jones\nWho wins?\nA. red\nB. blue"),
    (): ("Which color flashes?", "Who is J. D. Smith?\nA. nobody"),
}
WORDS = {
    "The red door.": "red door", "RED, door!": "red door", "a": "a", "The": "the", "A red car": "red car", "1.25": "1.25",
    "3. May": "3 may", "-5": "-5", "−5": "-5", "10-5": "10 5", "well-known": "well known", "x > y": "x>y", "x<y": "x<y",
    "x ≥ y": "x>=y", "a->b->c": "a->b->c", "a → b → c": "a->b->c", "AB+": "ab+", "AB-": "ab", "at <12.5 seconds>": "at 12.5 seconds",
    "５": "5", "Café": "café", "\"no\"": "no", "कि": "कि", "don't": "don t", "0.5m/s": "0.5 m s", "O(n²)": "o n2", "O(n^2)": "o n2", "H2O": "h2o",
    "\\boxed{0.5}": "0.5", "$0.5\\ \\text{m/s}$": "0.5 m s", "The answer is 4": "answer is 4",
}
PIECES = ["1", " ", "12.5", "1,000", ":", "-", "to ", "and ", "frames ", "start ", "end ", "A", "b) ", "(", "[", "not A ",
          "answer is ", "option ", "\n", "\\boxed{", "<", "->", "分", "_", ".", "or ", "seconds ", "a->", "\ua4d4", "between ",
          "is wrong", "because ", "、", "，", "wait ", "$", "? "]
RUNS = ["1-2 ", "1exclud", "?,", "A. \n", "\n\n", "\\boxed{{a}", "1 and ", "start 1 ", "frames 1, ", "A. ", "answer: ", "x > ", "not A or ", "B because ", "A is ", "from 1 ", "A, ", "A、", "not 1-2 ", "B. A: no "]
# fmt: on


def pairs(table):
    return [(reading, text) for reading, texts in table.items() for text in texts]


@pytest.mark.parametrize("part", PARTS)
def test_each_part_of_the_patterns_of_letters_reads_its_example(part):
    for text, letter in PARTS[part].items():
        assert parse_letter(text, OPTIONS) == letter, text


@pytest.mark.parametrize("text", LABELS)
def test_what_follows_a_label_reads_every_letter(text):
    """Past bug: A before any word in lower case was an article, so only A was not read."""
    assert [parse_letter(text.format(letter), OPTIONS) for letter in "ABCD"] == [*"ABCD"]


@pytest.mark.parametrize("options", LETTERS)
def test_a_letter_is_read_only_where_one_option_is_named(options):
    for letter, text in pairs(LETTERS[options]):
        assert parse_letter(text, options) == letter, text


@pytest.mark.parametrize("part", SPAN_PARTS)
def test_each_part_of_the_patterns_of_spans_reads_its_example(part):
    for text, span in SPAN_PARTS[part].items():
        assert parse_span(text) == span, text


@pytest.mark.parametrize("span, text", pairs(SPANS))
def test_a_span_is_read_in_every_written_form(span, text):
    assert parse_span(text) == (pytest.approx(span) if span else None)


def task(kind: str, gold: str, *options: str) -> Task:
    return Task("t", "Which?", (), kind, gold, options)


def read(question, turn):
    """Return a turn's reading as an evaluation reads it."""
    question = READINGS["questions"][question]
    said, _ = score_answer(final_answer([turn], "prose"), task(question["kind"], "0 - 1", *question.get("options", ())))
    return said


def person(reading):
    return tuple(map(float, reading)) if isinstance(reading, list) else reading


@pytest.mark.parametrize("model", READINGS["plain"])
def test_what_models_write_nearly_always_is_read_as_a_person_reads_it(model):
    for question, turn, reading in READINGS["plain"][model]:
        assert read(question, turn) == person(reading), turn


def test_a_hard_text_is_read_as_a_person_reads_it_or_not_at_all():
    """A wrong reading is worse than none. Of the first 270 texts that the hard ones come from, the rules read 78 % of the letters."""
    agreed = 0
    for question, turn, reading in READINGS["hard"]:
        found = read(question, turn)
        assert found in (person(reading), None), turn
        agreed += found == person(reading)
    assert agreed >= 56


def exchanged(text, first, second):
    """Return the text with two labels exchanged. The A of "A dog" is none."""
    other = {first: second, second: first}
    label = rf"(?<![A-Za-z])[{first}{second}](?![A-Za-z]| (?:dog|cat|horse|cow|tie))"
    return re.sub(label, lambda found: other[found[0]], text)


@pytest.mark.parametrize("letter", "ABCD")
def test_a_text_reads_alike_if_its_letter_is_exchanged_for_another(letter):
    """Past bug: "A fits best" named no letter, but "C fits best" did. Training would have learned to avoid A."""
    texts = [text for model in READINGS["plain"].values() for text in model] + READINGS["hard"]
    for question, turn, reading in texts:
        options = list(READINGS["questions"][question].get("options", ()))
        old, new = "ABCDEFGHIJ".find(str(reading)), "ABCD".index(letter)
        if old == -1 or new >= len(options):
            continue
        options[old], options[new] = options[new], options[old]
        options = [exchanged(option, reading, letter) for option in options]
        answer = final_answer([exchanged(turn, reading, letter)], "prose")
        found, _ = score_answer(answer, task("mcq", letter, *options))
        assert found == (letter if read(question, turn) else None), turn


def test_an_answer_in_prose_is_the_text_after_the_thought_without_calls_and_tags():
    for turn, answer in (
        ("<think>A or C?</think> <tool_call>1, 2</tool_call> B<|im_end|>", "B"),
        ("A or C?</think>It is B.\nYes", "It is B.\nYes"),
        ("<think>So.</think>A <answer>B</answer> C", "B"),  # the tags come first
        ("So <answer>B", "So  B"),  # an open tag
        ("I see <answer>A</answer></think> I cannot tell.", "I cannot tell."),
        ("<think>Option A says that he", None),  # an open thought has only what it states
        ("<think>A? The answer is C.<tool_call>", "C."),
        ("<tool_call>1 - 2", None),
    ):
        assert final_answer([turn], "prose") == answer, turn


def test_a_fallback_answer_is_the_text_without_calls_and_pieces_of_tags():
    for said, answer in (
        ("a < b <video>", "a < b <video>"),
        ('<tool_call>\n{"name": "crop_video"}\n</tool_call>red</thinks', "red"),
        ("Answer: red\nok", "red"),
    ):
        assert final_answer([f"<think>\nThe answer is A.\n</think>\n{said}<|im_end|>"], "fallback") == answer, said


def test_an_answer_is_a_letter_a_span_or_text():
    assert score_answer("B. blue", task("mcq", "B", "red", "blue")) == ("B", 1)
    assert score_answer("1.25 to 20.1", task("tvg", "[12.5, 20.1]")) == ((1.25, 20.1), pytest.approx(7.6 / 18.85))
    assert score_answer("a red car", task("oe", "red car")) == ("a red car", 1)
    for text, kind in (("", "oe"), (None, "mcq"), ("soon", "tvg")):
        assert score_answer(text, task(kind, "0 - 1")) == (None, 0)


def test_a_judge_reads_the_question_its_answer_and_the_text():
    seen = []
    said = score_answer("a car", task("oe", "red car"), "judge", lambda *texts: seen.append(texts) or 1.0)
    assert said == ("a car", 1) and seen == [("Which?", "red car", "a car")]


@pytest.mark.parametrize("text", WORDS)
def test_words_keep_the_signs_that_change_what_they_say(text):
    assert normalise(text) == WORDS[text]


def test_scripts_without_spaces_are_compared_by_character():
    assert words_of("一把红伞") == ["一", "把", "红", "伞"] and words_of("red 伞 car") == ["red", "伞", "car"]
    assert words_of("빨간 우산") == ["빨간", "우산"]  # Korean has spaces


@pytest.mark.parametrize("options, question", pairs(QUESTIONS))
def test_options_are_read_from_the_question(options, question):
    assert listed_options(question) == options


@pytest.mark.parametrize("unit", PIECES + RUNS)
def test_long_answers_are_read_in_linear_time(unit):
    """Past bugs: patterns that backtrack over every split of a repetition, or start again at each digit, take minutes."""
    text = unit * (20_000 // len(unit)) + "! 7"
    started = time.process_time()
    parse_letter(text, OPTIONS), parse_span(text), words_of(text), listed_options(text)
    assert time.process_time() - started < 2


@given(st.lists(st.sampled_from(PIECES), max_size=40))
def test_no_answer_breaks_the_readers(pieces):
    text = "".join(pieces)
    assert parse_letter(text) in [None, *"ABCDEFGHIJ"]
    span = parse_span(text)
    assert span is None or 0 <= span[0] <= span[1]
    words_of(text), listed_options(text)


def test_a_gold_of_letters_is_no_article():
    """In the released code, gold "A" is dropped as an article, so every answer matches."""
    for kind in ("mcq", "oe"):
        assert score_answer("A", task(kind, "A")) == ("A", 1)
        assert score_answer("B", task(kind, "A")) == ("B", 0)


def test_iou_is_the_shared_part_of_the_joint_part():
    assert iou((0, 10), (5, 15)) == pytest.approx(5 / 15)
    assert iou((0, 10), (20, 30)) == 0 and iou((3, 3), (3, 3)) == 0


def test_token_f1_counts_shared_words():
    assert token_f1("A red car!", "the red bus") == pytest.approx(2 * 1 / 4)
    assert token_f1("red red", "red") == pytest.approx(2 / 3) and token_f1("1.25", "12.5") == 0
    assert token_f1("red red", "red red") == 1
