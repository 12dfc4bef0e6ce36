"""answers.py: what the words of an answer say: an option's letter, a span of seconds, plain words.

    parse_letter("B) Vitamin C", options) -> "B"          listed_options("Which?\\nA. red\\nB. blue") -> ("red", "blue")
    parse_span("from 12.5 to 20.1") -> (12.5, 20.1)       words_of("The red door.") -> ["red", "door"]

What is read stands in tables: each row is an example of a form and its pattern. All patterns take linear time.
"""

import re
import unicodedata
from typing import NamedTuple

# ------------------------------------------------------------------------------------------------ letters

LETTERS = "ABCDEFGHIJ"

# "A" and "I" are words, not letters, where a word or a number follows, unless it goes on about a letter.
_NO_WORD = r"(?!(?:A|I) (?!(?i:or|and|is|as|because|since|but|not)\b)(?:[a-z\d]|[A-Z][A-Za-z]))"
_END = r"(?![\w'’])"
_IS = r"(?i:\banswer(?: (?:is|would be|must be|should be)|:)+)"
_OPEN = r"[\s:*(\"'\[]{1,5}"
# How prose names an option. The letters that all rows find are put together: two different ones name none.
LETTER_FORMS = (
    ("It is B", rf"(?<![\w'’.]){_NO_WORD}([A-J])(?!\.?[\w'’])"),
    ("option c", rf"(?i:\b(?:option|choice)){_OPEN}([A-Ja-j]){_END}"),
    ("The answer is (b)", rf"{_IS}{_OPEN}{_NO_WORD}([A-Jb-hj]){_END}"),
    ("The answer is a.", rf"{_IS}{_OPEN}([ai])(?=[\s*.,;)\]\"']{{0,5}}$)"),
)
# "not A but B", "neither A nor B": what is denied is not named.
_DENIED = re.compile(
    r"(?i:(?:\b(?:not|never|neither|without|instead of|rather than)|n['’]t)(?: be)? (?:(?:option|choice) )?)"
    rf"\(?[A-J]\)?{_END}(?: (?:or|nor) \(?[A-J]\)?{_END}){{0,9}}"
)
# "B. Vitamin C", "(B) red", "B: red", "B - red", "B\nred": a letter, and the text that it stands for.
_LABEL = re.compile(
    r"[\W_]{0,9}([A-Ja-j])(?:[*_]{0,3}[.)\]:][*_)\].:]{0,3}(?=\s)|[*_]{0,3}[)\]:]|\s[-–—]\s|[ \t]*\n)\s*(.*)", re.S
)
_ALONE = re.compile(r"[\W_]*([A-Ja-j])[\W_]*")
# "Answer: B. Vitamin C": what may stand before a letter alone or a label.
_LEAD = re.compile(
    r"[\W_]{0,5}(?:the )?(?:(?:final|correct|best|right) )?(?:answer|option|choice)(?: is)?[\s:*_]{1,5}", re.I
)


def parse_letter(text: str, options: tuple[str, ...] = ()) -> str | None:
    """Return the one option that the text names, A to J, or None if it names none or several."""
    allowed = LETTERS[: len(options) or len(LETTERS)]
    text = re.sub(r"\\(?:boxed|text)\{([^{}]*)\}", r"\1", text).strip()
    text_of = {letter: normalise(option) for letter, option in zip(allowed, options)}

    # "Answer: (B)": skip words that lead to a letter.
    lead = _LEAD.match(text)
    if lead and (_ALONE.fullmatch(text, lead.end()) or _LABEL.fullmatch(text, lead.end())):
        text = text[lead.end() :]

    # "(B)": the letter alone.
    alone = _ALONE.fullmatch(text)
    if alone and alone[1].upper() in allowed:
        return alone[1].upper()

    # "B) Vitamin C", "Vitamin C": the text of an option, with its own letter or without one.
    label = _LABEL.fullmatch(text)
    letter = label[1].upper() if label else ""
    if label and text_of.get(letter) == normalise(label[2]):
        return letter
    same = [x for x in text_of if text_of[x] == normalise(text)]
    if len(same) == 1 and letter != "A":  # normalise() takes the label "A" for an article
        return same[0]

    # "B. U.S. Team A": a letter and other text, of whose letters only those count that it calls an option.
    if label:
        others = _named(label[2], LETTER_FORMS[1:]) - {letter}
        others |= set(re.findall(r"(?m)^[ \t(\[*]{0,5}([A-J])(?:[)\]:]|\.(?!\S))", label[2])) - {letter}
        only_letters = re.fullmatch(r"(?:[\W_]*\b(?:[A-J]|and|or)\b)*[\W_]*", label[2])
        joined = re.match(r"[\W_]{0,5}(?:or|and)\b", label[2])
        if others or only_letters or joined or letter not in allowed:
            return None
        return letter

    # "I think it is B": prose that names one letter.
    named = _named(text, LETTER_FORMS)
    return named.pop() if len(named) == 1 and named <= set(allowed) else None


def _named(text: str, forms: tuple[tuple[str, str], ...]) -> set[str]:
    prose = _DENIED.sub(" ", text)
    letters = set()
    for _, pattern in forms:
        letters.update(letter.upper() for letter in re.findall(pattern, prose))
    return letters


# How a question lists its options: one a line, or in one line.
OPTION_FORMS = (
    ("A. red\nB. blue", re.compile(r"(?m)^[ \t]*[(\[]?([A-J])[)\].:]+[ \t]*(?=\S)")),
    ("(A) red (B) blue", re.compile(r"(?<!\w)[(\[]([A-J])[)\]][ \t]*(?=\S)")),
    ("A. red B. blue", re.compile(r"(?<![\w.])([A-J])[.):][ \t]+(?=\S)")),
)


def listed_options(question: str) -> tuple[str, ...]:
    """Return the options that a question lists itself, without their letters; () if it lists none."""
    for _, form in OPTION_FORMS:
        longest, run = [], []
        for label in form.finditer(question):
            if label[1] == "A":
                run = []
            if label[1] == LETTERS[len(run) : len(run) + 1]:  # A, B, C, ... without a gap
                run.append(label)
            if len(run) >= len(longest):
                longest = list(run)
        if len(longest) > 1:
            ends = [label.start() for label in longest[1:]] + [len(question)]
            texts = [question[label.end() : end].strip() for label, end in zip(longest, ends)]
            return tuple(text.split("\n")[0].strip(" \t;,") for text in texts)
    return ()


# ------------------------------------------------------------------------------------------------ spans

_N = r"(\d{1,7}(?:\.\d{1,9})?)(?!\d)"
_HOURS = r" {0,2}(?:hours?|hrs?|h|小时|小時|時間|时)(?![a-z])"
_MINUTES = r" {0,2}(?:minutes?|mins?|m|分钟|分鐘|分)(?![a-z])"
_SECONDS = r" {0,2}(?:seconds?|secs?|s|秒钟|秒)(?![a-z])"
_AND = r"[ ,]{0,2}(?:and )?"
# What a time looks like: the first row that fits decides. The numbers are the seconds that each group counts for; 0
# marks a bare number: seconds, or what its partner has ("2 to 3 minutes").
TIME_FORMS = (
    ("01:02:05.5", r"(?:(\d{1,3}):)?(\d{1,4}):(\d{1,2}(?:\.\d{1,9}|,\d{3})?)(?![\d:])", (3600, 60, 1)),
    ("12'30\"", r"(\d{1,4}) ?['′’] ?(\d{1,2}(?:\.\d{1,9})?)(?!\d)(?:[\"″”]|''|’’)?", (60, 1)),
    ("1 hour 2 minutes 5 s", rf"{_N}{_HOURS}(?:{_AND}{_N}{_MINUTES})?(?:{_AND}{_N}{_SECONDS})?", (3600, 60, 1)),
    ("2m5s", rf"{_N}{_MINUTES}(?:{_AND}{_N}{_SECONDS})?", (60, 1)),
    ("12.5 seconds", rf"{_N}{_SECONDS}", (1,)),
    ("1,234.5", r"(\d{1,3}(?:,\d{3}){1,2}(?:\.\d{1,9})?)(?![\d,])", (0,)),
    ("12.5", _N, (0,)),
)
_TIME_FORMS = [(re.compile(pattern, re.I), factors) for _, pattern, factors in TIME_FORMS]
# "Frames 2 and 3": numbers of things, not times.
_COUNTED = re.compile(
    r"(?:\b(?:frame|image|picture|figure|option|step|question)s?|\b(?:clip|segment|scene|shot|part|call|turn)s|#)[ #]{0,2}$",
    re.I,
)

# How two times become a span. T stands for a time. The last row is believed only where no other fits.
_T = "\ua4d4"  # a letter without a lower case, which no answer holds: \W never runs over it
_FILL = r"\W{0,5}(?:(?:about|around|approximately|roughly|the|at|time|第)\W{1,3}|第){0,3}"
_CUE = r"[a-z_]{0,8}\W{0,5}(?:(?:time|at|is|from|point|around|about|approximately|the)\W{1,5}){0,4}"
SPAN_FORMS = (
    ("12.5 - 20.1", rf"T\W{{0,4}}(?:mark )?\W{{0,4}}(?:--?>?|–|—|~|～|→|⇒|=>){_FILL}T"),
    ("12.5 to 20.1", rf"T\W{{0,4}}(?:mark )?(?:and |up )?(?:to|until|till|through|thru|到|至|から){_FILL}T"),
    ("between 12.5 and 20.1", rf"between{_FILL}T\W{{0,4}}and{_FILL}T"),
    ("[12.5, 20.1]", rf"[\[(]\W{{0,3}}T\W{{0,3}}[,;]{_FILL}T\W{{0,3}}[\])]"),
    ("Answer: 12.5, 20.1", rf"(?m)^(?:[^\nT]{{0,40}}[:=])?[^\w\n]{{0,5}}T\W{{0,3}}[,;]{_FILL}T[^\w\n]{{0,5}}$"),
    ("from 12.5, when it opens, to 20.1", rf"(?<![a-z])from{_FILL}T[^T]{{0,80}}(?<![a-z])to{_FILL}T"),
    ("starts at 12.5 and ends at 20.1", rf"(?<![a-z])(?:start|beg[aiu]n|from){_CUE}T[^T]{{0,200}}(?<![a-z])(?:end|finish|stop|until){_CUE}T"),
    ("12.5 and 20.1", rf"T\W{{0,4}}(?:and|,|;){_FILL}T"),
)  # fmt: skip
_SPAN_FORMS = [re.compile(pattern.replace("T", _T), re.I) for _, pattern in SPAN_FORMS]
_SENTENCE_END = re.compile(r"[.!?](?:\s|$)|[。！？]|\n")


class Time(NamedTuple):
    """A time that a text names, at characters [start, end)."""

    start: int
    end: int
    seconds: float
    unit: int  # the seconds of its only unit; 0: a bare number


def parse_span(text: str) -> tuple[float, float] | None:
    """Return the first span of seconds in the last sentence that has one, its ends in order."""
    text = re.sub(r"([\[(]\s?\d{1,7}),(\d{1,7}\s?[\])])", r"\1, \2", text.replace(_T, " "))  # [1,240] is no 1,240
    times = _find_times(text)

    # Put a mark in place of each time, so that a form is a pattern of words around marks.
    pieces, at = [], 0
    for time in times:
        pieces += [text[at : time.start], _T]
        at = time.end
    masked = "".join(pieces) + text[at:]

    found = [match for form in _SPAN_FORMS[:-1] for match in form.finditer(masked)]
    found = found or list(_SPAN_FORMS[-1].finditer(masked))
    if not found:
        return None
    found.sort(key=lambda match: match.start())
    chosen, end = found[0], found[0].end()
    for match in found:
        if _SENTENCE_END.search(masked, end, match.start()):
            chosen = match
        end = max(end, match.end())
    first = masked.count(_T, 0, chosen.start())
    a, b = times[first], times[first + 1]
    start_seconds = a.seconds * b.unit if a.unit == 0 and b.unit else a.seconds
    return min(start_seconds, b.seconds), max(start_seconds, b.seconds)


def _find_times(text: str) -> list[Time]:
    times, end, counted_until = [], 0, 0
    for digit in re.finditer(r"(?:(?<![A-Za-z\d_.])|(?<=\dto))\d", text):
        start = digit.start()
        if start < end:  # a part of the time before
            continue
        match, factors = _read_time(text, start)
        if match is None:
            continue
        end = match.end()
        if factors == (0,):
            # Leave out "Frames 2 and 3": the number after such a word, and those that a list joins to it.
            in_list = counted_until and re.fullmatch(r"\W{0,2}(?:and|to|-|–|,)\W{0,2}", text[counted_until:start])
            if _COUNTED.search(text, max(0, start - 12), start) or (in_list and "." not in match[0]):
                counted_until = end
                continue
        parts = [(value, factor) for value, factor in zip(match.groups(), factors) if value]
        seconds = 0.0
        for value, factor in parts:
            decimal = "." if ":" in match[0] else ""  # 00:02:05,500 of subtitles; else 1,234.5
            seconds += float(value.replace(",", decimal)) * (factor or 1)
        times.append(Time(start, end, seconds, parts[0][1] if len(parts) == 1 else 1))
    return times


def _read_time(text: str, start: int) -> tuple[re.Match | None, tuple[int, ...]]:
    for form, factors in _TIME_FORMS:
        match = form.match(text, start)
        if match:
            return match, factors
    return None, ()


def seconds_of(time: str) -> float:
    """Return the seconds of 12.5, 00:12.5 or 00:00:12.5."""
    return sum(float(part) * 60**i for i, part in enumerate(reversed(time.split(":"))))


# ------------------------------------------------------------------------------------------------ words

_OPERATOR = r"(?:<->|->|=>|<-|<=|>=|!=|[<>→←⇒≤≥≠])"
_SPELLED = {"→": "->", "←": "<-", "⇒": "=>", "≤": "<=", "≥": ">=", "≠": "!=", "−": "-"}
# Signs that change what a text says; all others are dropped.
KEPT_FORMS = (
    ("12.5", r"(?<=\d)\.(?=\d)"),
    ("-5", r"(?<![\w.)])-(?=\.?\d)"),
    ("AB+", r"(?<=\w)\+{1,2}(?!\w)"),
    ("x>y", rf"(?<=\w){_OPERATOR}(?=[\w-])"),
)
_KEPT = re.compile("(" + "|".join(pattern for _, pattern in KEPT_FORMS) + r")|[^\w\s]")
# Scripts without spaces between words: Thai to Khmer, kana, Han.
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)


def normalise(text: str) -> str:
    """Return the text in lower case without punctuation and articles. A text that is nothing but an article stays."""
    text = unicodedata.normalize("NFKC", text).lower()
    for sign, spelled in _SPELLED.items():
        text = text.replace(sign, spelled)
    text = re.sub(r"<([\d.]+ seconds)>", r"\1", " ".join(text.split()))  # a frame's stamp
    text = re.sub(rf"(?<=\w) ?({_OPERATOR}) ?(?=[\w-])", r"\1", text)  # "x > y" is one word, and not "y > x"
    words = _KEPT.sub(_keep, text).split()
    return " ".join([word for word in words if word not in ("a", "an", "the")] or words)


def _keep(sign: re.Match) -> str:
    if sign[1]:
        return sign[1]
    return sign[0] if unicodedata.category(sign[0]).startswith("M") else " "  # an accent, a vowel sign


def words_of(text: str) -> list[str]:
    """Return the words of the normalised text; where a script has no spaces, its characters."""
    words = []
    for word in normalise(text).split():
        words += _UNSPACED.sub(lambda character: f" {character[0]} ", word).split()
    return words
