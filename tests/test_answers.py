"""What an answer says, in every form that models write it. The values were written by hand."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime import answers
from runtime.answers import listed_options, normalise, parse_letter, parse_span, words_of

# fmt: off
LETTERS = {
    # with the options red, blue, a green car, Vitamin C, A
    True: {
        # the letter alone
        "B": "B", "(B)": "B", "B.": "B", "b": "B", "**B**": "B", "[B]": "B", " B \n": "B", "\\boxed{B}": "B", "A": "A",
        "$\\boxed{\\text{D}}$": "D", "J": None, "AB": None, "": None, "...": None,
        # an option's text, with its letter or without it
        "blue": "B", "Blue.": "B", "B: blue": "B", "B) blue": "B", "B. blue": "B", "d) vitamin C": "D", "(D) Vitamin C.": "D",
        "**D.** vitamin c": "D", "D\nVitamin C": "D", "vitamin C": "D", "green car": "C", "C) green car": "C", "B - blue": "B",
        "A. blue": "A", "E. a": "E", "red blue": None, "a red car": None, "none of them": None,
        # prose that names one letter
        "The answer is (B).": "B", "The answer is b.": "B", "The answer is: **B**": "B", "Answer: C": "C", "answer: c": "C",
        "The answer is a.": "A", "The answer is a man": None, "I think it is B": "B", "A man holds B": "B", "A Ferrari": None,
        "option c": "C", "Option A shows the man": "A", "A 3": None, "A 3-story house": None,
        "The answer is D) Vitamin C.": "D", "Answer: C) a green car": "C", "The answer is (B)": "B", "Option C.": "C",
        "The answer is A because of the light.": "A", "It's B's turn": None, "I am sure": None,
        # what is denied is not named
        "not A but B": "B", "not A": None, "It is not B": None, "neither A nor B but C": "C", "B, not A": "B",
        "B rather than C": "B", "It isn't A or C, it is B": "B", "It can't be A, so B": "B",
        # two letters are none
        "The answer is B. Option C is wrong": None,  # the released code: right for both
        "A or B": None, "B, C": None, "A) or B)": None, "A. B. C.": None, "A. red\nB. blue": None, "(A) (B)": None,
        "B. Option A is wrong": None, "A) or perhaps B": None, "J. nothing": None,
    },
    # without options: any letter from A to J, and a leading label is believed
    False: {
        "J": "J", "K": None, "B. Vitamin C": "B", "B) Plan A": "B", "B: U.S. Team A": "B", "(B) Vitamin C": "B", "B - Plan A": "B",
        "**B.** D.C. United": "B", "D. Both A and B": "D", "B\nVitamin C": "B", "b) a red car": "B", "D.C. United": None,
        "Answer: B. Vitamin C": "B", "**Final answer:** B) Plan A": "B", "B because A moves": "B", "A\nB": None,
        "I saw a man": None, "a man": None, "e.g. a man": None, "Vitamin C": "C",
    },
}
SPANS = {
    # numbers
    "12.5 - 20.1": (12.5, 20.1), "12.5-20.1": (12.5, 20.1), "12.5–20.1": (12.5, 20.1), "12.5—20.1": (12.5, 20.1),
    "12.5 ~ 20.1": (12.5, 20.1), "12.5 → 20.1": (12.5, 20.1), "12.5 -> 20.1": (12.5, 20.1), "12.5 to 20.1": (12.5, 20.1),
    "12.5to20.1": (12.5, 20.1), "from 12.5 through 20.1": (12.5, 20.1), "from 12.5 until 20.1": (12.5, 20.1),
    "between 12.5 and 20.1": (12.5, 20.1), "12.5 and 20.1": (12.5, 20.1), "12.5, 20.1": (12.5, 20.1),
    "[12.5, 20.1]": (12.5, 20.1), "[12.5,20.1]": (12.5, 20.1), "(12.5, 20.1)": (12.5, 20.1), "[\n12.5,\n20.1\n]": (12.5, 20.1),
    "20 - 10": (10, 20), "0 - 5": (0, 5), "[100,200]": (100, 200), "[1,240]": (1, 240), "1,234.5 - 1,240": (1234.5, 1240),
    "from 1,200 to 1,234,567": (1200, 1234567), "12.5 to about 20.1": (12.5, 20.1), "12.5 up to 20.1": (12.5, 20.1),
    "{\"start\": 12.5, \"end_time\": 20.1}": (12.5, 20.1),
    # clocks
    "00:12 to 00:20": (12, 20), "00:12-00:20": (12, 20), "01:00:05 - 01:00:09": (3605, 3609), "1:05.5 to 2:00": (65.5, 120),
    "between 1:05.5 and 2:00": (65.5, 120), "[00:12,00:20]": (12, 20), "00:00:02,500 --> 00:00:05,000": (2.5, 5),
    "00:12 (12 seconds) to 00:20 (20 seconds)": (12, 20), "12'30\" - 12'40\"": (750, 760), "12′30″ to 12′40.5″": (750, 760.5),
    # units
    "12.5s - 20.1s": (12.5, 20.1), "12.5 s to 20.1 s": (12.5, 20.1), "12.5 sec - 20.1 sec": (12.5, 20.1),
    "from 3 seconds to 7 seconds": (3, 7), "20.1–12.5s": (12.5, 20.1), "<12.5 seconds> to <20.1 seconds>": (12.5, 20.1),
    "<12.5 seconds> - <20.1 seconds>": (12.5, 20.1), "2m5s - 2m10s": (125, 130), "2 min - 3 min": (120, 180),
    "2 minutes 5 seconds to 2 minutes 10 seconds": (125, 130), "2 minutes and 5 seconds to 3 minutes": (125, 180),
    "1 hour, 2 minutes to 1h 3m 4s": (3720, 3784), "2 to 3 minutes": (120, 180), "12.5秒到20.1秒": (12.5, 20.1),
    "从第12.5秒到第20.1秒": (12.5, 20.1), "2分5秒至2分10秒": (125, 130), "the 12 second mark to the 20 second mark": (12, 20),
    # words around each end
    "It starts at 12.5 s and ends at 20.1 s.": (12.5, 20.1), "Start time: 24.3 seconds\nEnd time: 30.4 seconds": (24.3, 30.4),
    "It begins at 3, when he sits down, and finishes at 9.": (3, 9), "starts at 5 and lasts until 9": (5, 9),
    "From 12.5 seconds, when he sits down, to 20.1": (12.5, 20.1), "It began at 3 and ended at 9": (3, 9),
    "- Start: 0:05\n- End: 0:09": (5, 9), "start_time=12.5, end_time=20.1": (12.5, 20.1),
    # other numbers
    "Frames 2 and 3 show a cat that jumps from 12.5 to 20.1": (12.5, 20.1), "In frames 2-5 it jumps, 12.5 to 20.1": (12.5, 20.1),
    "Frames 1, 2 and 3 show it: 12.5 to 20.1": (12.5, 20.1), "frames 2 and 3": None, "Frames 2, 3 and 4": None, "In frames 2, 12.5 to 20.1": (12.5, 20.1), "Step 2: 12.5 - 20.1": (12.5, 20.1),
    "2 and 3 people come, from 12.5 to 20.1": (12.5, 20.1), "in 3 or 4 places": None, "Segments 1-2 show 5 - 9": (5, 9),
    # the last sentence that has one
    "I looked at 0 - 60. It happens from 00:12 to 00:20.": (12, 20), "0 - 60\n3 - 5": (3, 5), "0-60。3-5。": (3, 5),
    "It is 12 to 20, or 30 to 40. I am sure.": (12, 20), "I looked at 0 - 60.\nAnswer: 12.5, 20.1": (12.5, 20.1),
    # nothing
    "5": None, "soon": None, "": None, "1,240": None, "20.1": None, "123456789 - 987654321": None, "12500 ms - 20100 ms": None,
}
WORDS = {
    "The red door.": "red door", "RED, door!": "red door", "a": "a", "The": "the", "A red car": "red car", "1.25": "1.25",
    "3. May": "3 may", "-5": "-5", "−5": "-5", "10-5": "10 5", "well-known": "well known", "x > y": "x>y", "x<y": "x<y",
    "x ≥ y": "x>=y", "a->b->c": "a->b->c", "a → b → c": "a->b->c", "AB+": "ab+", "AB-": "ab", "at <12.5 seconds>": "at 12.5 seconds",
    "５": "5", "Café": "café", "\"no\"": "no", "कि": "कि", "don't": "don t",
}
# fmt: on
OPTIONS = ("red", "blue", "a green car", "Vitamin C", "A")


@pytest.mark.parametrize("listed, text", [(listed, text) for listed, cases in LETTERS.items() for text in cases])
def test_a_letter_is_read_only_where_one_option_is_named(listed, text):
    assert parse_letter(text, OPTIONS if listed else ()) == LETTERS[listed][text]


def test_an_options_text_may_name_other_letters():
    assert parse_letter("E. coli", ("yeast", "E. coli")) == "B"
    assert parse_letter("B. Option A or C", ("red", "Option A or C", "blue")) == "B"


@pytest.mark.parametrize("text", SPANS)
def test_a_span_is_read_in_every_written_form(text):
    assert parse_span(text) == (pytest.approx(SPANS[text]) if SPANS[text] else None)


@pytest.mark.parametrize("text", WORDS)
def test_words_keep_the_signs_that_change_what_they_say(text):
    assert normalise(text) == WORDS[text]


def test_scripts_without_spaces_are_compared_by_character():
    assert words_of("一把红伞") == ["一", "把", "红", "伞"] and words_of("red 伞 car") == ["red", "伞", "car"]
    assert words_of("빨간 우산") == ["빨간", "우산"]  # Korean has spaces


@pytest.mark.parametrize(
    "question, options",
    [
        ("Which?\nA. red\nB. blue\nC. green", ("red", "blue", "green")),
        ("Which?\n(A) red\n(B) a blue car;\n", ("red", "a blue car")),
        ("Which? (A) red (B) blue", ("red", "blue")),
        ("What did A. Smith wear? A. red, B. blue", ("red", "blue")),
        ("A: What? B: That.\nOptions:\nA) red\nB) blue", ("red", "blue")),
        ("A. Smith\nB. Jones\nWhich one wins?\nA. red\nB. blue", ("red", "blue")),
        ("Which color flashes?", ()),
        ("Who is J. D. Smith?\nA. nobody", ()),
    ],
)
def test_options_are_read_from_the_question(question, options):
    assert listed_options(question) == options


def test_every_row_of_the_tables_reads_its_own_example():
    for example, pattern in answers.LETTER_FORMS:
        assert re.search(pattern, example) and parse_letter(example), example
    for form in answers.TIME_FORMS:
        assert next(other for other in answers.TIME_FORMS if re.fullmatch(other[1], form[0], re.I)) == form
    for example, _ in answers.SPAN_FORMS:
        assert parse_span(example) == (12.5, 20.1)
    for example, form in answers.OPTION_FORMS:
        assert len(form.findall(example)) == 2 and listed_options(example) == ("red", "blue")


PIECES = ["1", " ", "12.5", "1,000", ":", "-", "to ", "and ", "frames ", "start ", "end ", "A", "b) ", "(", "[", "not A ",
          "answer is ", "option ", "\n", "\\boxed{", "<", "->", "分", "_", ".", "or ", "seconds ", "a->", "\ua4d4", "between "]  # fmt: skip


@pytest.mark.parametrize(
    "unit", [*PIECES, "1-2 ", "1 and ", "start 1 ", "frames 1, ", "A. ", "answer: ", "x > ", "not A or "]
)
def test_ten_thousand_characters_are_read_at_once(unit):
    """A pattern that tries every way to share out what repeats takes minutes."""
    text = unit * (10_000 // len(unit))
    started = time.process_time()
    for tail in ("", "!", " 7"):
        parse_letter(text + tail, OPTIONS), parse_span(text + tail), words_of(text + tail), listed_options(text + tail)
    assert time.process_time() - started < 3


@given(st.lists(st.sampled_from(PIECES), max_size=40))
def test_no_answer_breaks_the_readers(pieces):
    text = "".join(pieces)
    assert parse_letter(text) in [None, *"ABCDEFGHIJ"]
    span = parse_span(text)
    assert span is None or 0 <= span[0] <= span[1]
    words_of(text), listed_options(text)
