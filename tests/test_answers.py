"""Answer parsing, for every form that models write. The expected values were written by hand."""

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import Task, listed_options
from evals.benchmarks import Item, grade, grade_leniently, spoken
from rewards import RewardConfig, accuracy, final_answer
from runtime import config
from runtime.answers import normalise, parse_letter, parse_span, words_of

EXACT = RewardConfig(open_answer="exact")

# fmt: off
# Each table: expected value -> texts that state it.
OPTIONS = ("red", "blue", "a green car", "Vitamin C", "A")
LISTED = {
    "A": ("A", "A. blue", "Option A shows the man", "The answer is a.", "The answer is A because of the light."),
    "B": (
        "B", "(B)", "B.", "b", "**B**", "[B]", " B \n", "\\boxed{B}", "Ｂ", "（Ｂ）", "The answer is (B).", "The answer is b.",
        # an option's text, with its letter or without it
        "blue", "Blue.", "B: blue", "B) blue", "B. blue", "B - blue", "B.Blue.", "B、blue", "The answer is blue.",
        "The answer is: **B**", "I think it is B", "A man holds B", "So the answer is (b), I think",
        # in scripts without spaces, a letter touches its neighbours
        "答案是B", "选B", "选项B", "正确答案为B。", "B选项", "答えはBです", "정답은 B입니다", "不是A，是B",
        # letters that are denied, or are only a reason, are not named
        "not A but B", "B, not A", "B rather than C", "It isn't A or C, it is B", "It can't be A, so B", "A is wrong. It is B",
        "D) is incorrect. B) is correct.", "B. Option A is wrong", "The answer is B. Option C is wrong",
        "The answer is B because A is only seen later.", "B正确，A错误", "A不对，选B", "所以答案是B，因为A不对",
        # each letter has its own verdict; a decision replaces a hedge
        "A、C、D错误，B正确", "A: no. B: yes. C: no. D: no.", "不选A，选B", "B而非D",
        "A、C均不符合，故选B", "A和C都不对，正确的是B", "The answer is B, although D also appears", "Between B and D, B is better",
        "Not A, C, or D. B.", "Either A or B; I'd go with B.", "Hmm, A... no wait, B", "A cannot be excluded, but the answer is B",
        "A: it is red - no.\nB: it is blue - yes.\n\nSo the answer is B.", "排除A、C、D，选B",
        "A is on the wall.\nB is not a car.\n\\boxed{B}", "A is wrong and B is right", "The answer is B. If you also consider the sound, D.",
    ),
    "C": ("C) green car", "green car", "Answer: C", "answer: c", "option c", "Option C.", "neither A nor B but C"),
    "D": ("A? No, the second window shows D.", "$\\boxed{\\text{D}}$", "d) vitamin C", "(D) Vitamin C.", "**D.** vitamin c", "D\nVitamin C", "vitamin C",
          "The answer is D) Vitamin C.", "The answer is vitamin C.", "D.31:15-31:45"),
    "E": ("E. a",),
    None: (
        "J", "AB", "", "...", "red blue", "a red car", "none of them", "The answer is a man", "A Ferrari", "A 3", "A 3-story house",
        "It's B's turn", "I am sure", "Début", "not A", "It is not B", "J. nothing", "All except B",
        # two letters
        "The answer is B. Option C fits, too",  # the released code: right for both
        "A or B", "B or A", "B, C", "A、B", "选A和B", "A) or B)", "A. B. C.", "A. red\nB. blue", "(A) (B)", "A) or perhaps B",
        "N/A", "N/A.", "A/N", "A/B", "B, then D", "A B", "A is more likely than B", "I prefer A over B", "Is B right?",
        # a person reads B; the rules are not sure
        "(A) false (B) true (C) false (D) false", "All options are wrong except B", "B? Yes, at 0:12.", "It is B and not C", "Maybe B",
        "B. Option A is better", "B、C都有可能", "B: maybe; C: maybe", "A is true. B is true.", "无法确定是A还是B。",
    ),
}
UNLISTED = {  # any letter from A to J; a leading label counts
    "B": ("B. Vitamin C", "B) Plan A", "B: U.S. Team A", "(B) Vitamin C", "B - Plan A", "**B.** D.C. United", "B\nVitamin C",
          "b) a red car", "Answer: B. Vitamin C", "B because A moves", "B. I"),
    "C": ("Vitamin C",), "D": ("D. Both A and B", "D. It is not explained"), "J": ("J",),
    None: ("K", "D.C. United", "A\nB", "I saw a man", "a man", "e.g. a man", "**Final answer:** B) Plan A"),
}
LETTERS = {OPTIONS: LISTED, (): UNLISTED, ("yeast", "E. coli", "B or A"): {"B": ("E. coli",), "C": ("B or A", "C. B or A")}}
SPANS = {
    (12.5, 20.1): (
        "12.5-20.1", "12.5–20.1", "12.5—20.1", "12.5 ~ 20.1", "12.5 → 20.1", "12.5 and 20.1", "12.5, 20.1",
        "12.5 / 20.1", "[12.5 20.1]", "[12.5,20.1]", "(12.5, 20.1)", "[\n12.5,\n20.1\n]", "t=12.5 to t=20.1", "１２．５～２０．１",
        "{\"start\": 12.5, \"end_time\": 20.1}", "start_time=12.5, end_time=20.1", "1. **Start**: 12.5\n2. **End**: 20.1",
        "12.5s - 20.1s", "12.5s -20.1s", "12.5 s to 20.1 s", "12.5 sec - 20.1 sec", "20.1–12.5s",
        "<12.5 seconds> to <20.1 seconds>", "12.5秒到20.1秒", "从第12.5秒到第20.1秒",
        "It opens at 12.5 seconds and closes at 20.1.", "It starts at 12.5 s and ends at 20.1 s.",
        # numbers that are not times
        "In frames 2-5 it jumps, 12.5, 20.1", "Frames 1, 2 and 3: 12.5, 20.1", "In frames 2, 12.5 and 20.1", "Step 2: 12.5, 20.1",
        "2024-05-06: 12.5, 20.1", "the 2nd man, 12.5, 20.1",
        # with more times, the last range
        "9 men: 12.5 -> 20.1", "9 men from 12.5 through 20.1", "9 men, 12.5 up to 20.1", "9 men, 12.5 until about 20.1",
        "9 men between 12.5 and 20.1", "9 men: [12.5, 20.1]", "9 men from 12.5 s, when he sits down, to 20.1",
        "I looked at 0 - 60.\nAnswer: 12.5, 20.1", "It starts at 12.5 s and ends at 20.1 s, after 7.6 s.",
        "It is 12 to 20. No, 12.5 to 20.1. I am sure.", "12.5 - 20.1 (not 3.0 - 5.0)", "Not 3 - 5 but 12.5 - 20.1", "a 2-3 second event at 12.5 - 20.1",
    ),
    (3, 5): ("5 - 3", "- 3 - 5", "0 - 60\n3 - 5", "0-60。3-5。", "from 3 seconds to 5 seconds", "It began at 3 and ended at 5",
             "- Start: 0:03\n- End: 0:05", "starts at 3 and lasts until 5", "Segments 1-2 show 3 - 5"),
    (12, 20): ("00:12 to 00:20", "00:12-00:20", "[00:12,00:20]", "00:12 (12 seconds) to 00:20 (20 seconds)",
               "the 12 second mark to the 20 second mark", "I looked at 0 - 60. It happens from 00:12 to 00:20."),
    (120, 180): ("2 to 3 minutes", "2 min - 3 min"), (125, 180): ("2 minutes and 5 seconds to 3 minutes",),
    (125, 130): ("2m5s - 2m10s", "2 minutes 5 seconds to 2 minutes 10 seconds", "2分5秒至2分10秒"),
    (65.5, 120): ("1:05.5 to 2:00", "between 1:05.5 and 2:00"), (750, 760.5): ("12'30\" - 12'40.5\"", "12′30″ to 12′40.5″"),
    (3605, 3609): ("01:00:05 - 01:00:09",), (3720, 3784): ("1 hour, 2 minutes to 1h 3m 4s",),
    (2.5, 5): ("00:00:02,500 --> 00:00:05,000",), (0, 5): ("0 - 5",), (1, 240): ("[1,240]",), (100, 200): ("[100,200]",),
    (1234.5, 1234567): ("1,234.5 - 1,234,567",),
    None: ("5", "soon", "", "1,240", "20.1", "123456789 - 987654321", "50% - 60%",
           "frames 2 and 3", "Frames 2, 3 and 4", "in 3 or 4 places", "12.5 s or 20.1 s", "at 5 s, 7 s and 9 s", "It starts at 65 s and lasts 15 seconds.",
           "from the 42-second mark, for 15 seconds", "12.0 - 15.5 and 65.0 - 80.0", "between the 83rd and the 97th second",
           "3 - 5 or 12.5 - 20.1", "It is 12 to 20, or 12.5 to 20.1.", "0:03-0:05或0:12-0:20", "not 3 - 5"),
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


@pytest.mark.parametrize("options", LETTERS)
def test_a_letter_is_read_only_where_one_option_is_named(options):
    for letter, text in pairs(LETTERS[options]):
        assert parse_letter(text, options) == letter, text


@pytest.mark.parametrize("span, text", pairs(SPANS))
def test_a_span_is_read_in_every_written_form(span, text):
    assert parse_span(text) == (pytest.approx(span) if span else None)


def test_a_thought_and_a_call_are_no_answer():
    """Past bug: a thought that was cut off counted as naming an option, and arguments of a call as a span."""
    assert spoken("<think>A or C?</think> <tool_call>1, 2</tool_call> B") == spoken("A or C?</think>B") == "B"
    assert spoken("<think>Option A says that he") == spoken("<tool_call>1 - 2") == ""
    unopened = "Option A, or rather <answer>A</answer></think> I cannot tell."
    assert read({"kind": "mcq", "options": ["red", "blue"]}, unopened) == [None, None]


def read(question, turn):
    """Return both readings of a turn: a letter, a span, or whether an open answer is right."""
    kind, gold = question["kind"], {"mcq": "?", "tvg": "[0, 1]"}
    item = Item(Task("t", "?", (), kind, gold.get(kind, question.get("gold")), tuple(question.get("options", ()))))
    strict = grade(item, final_answer([turn]) or spoken(turn), EXACT)
    both = strict, grade_leniently(item, strict, turn, EXACT)
    return [verdict["score"] == 1 if kind == "oe" else verdict["prediction"] for verdict in both]


@pytest.mark.parametrize(
    "group, count, strictly, leniently", [("", 150, 144, 143), ("more_", 80, 66, 77), ("later_", 40, 35, 39)]
)
def test_answers_are_read_as_a_careful_person_reads_them(group, count, strictly, leniently):
    """Many answers that a person reads count as none. A letter, a span or a hit is never another one than the person's."""
    written = config.read_tree(Path(__file__).parent / "readings.yaml")
    rows = written[f"{group}texts"]
    rows = sum(rows.values(), []) if isinstance(rows, dict) else rows
    agreed = [0, 0]
    for name, text, *persons in rows:
        question = written[f"{group}questions"][name]
        persons = [str([float(x) for x in person]) if isinstance(person, list) else person for person in persons]
        for i, (code, person) in enumerate(zip(read(question, text), persons * (2 // len(persons)))):
            agreed[i] += code == person
            one_span_for_none = question["kind"] == "tvg" and person is None
            assert code in (person, None, False) or one_span_for_none, text
    assert len(rows) == count and agreed[0] >= strictly and agreed[1] >= leniently


def test_an_answer_that_names_no_option_earns_nothing():
    """Past bug: "N/A" was read as A, and "B, then D" as B, so a policy was paid for giving no answer."""
    for text, gold in (("N/A", "A"), ("N/A.", "A"), ("A/N", "A"), ("B, then D", "B"), ("B, then D", "D")):
        assert accuracy(text, Task("t", "?", (), "mcq", gold, ("red", "blue", "green", "white")), EXACT) == 0


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
