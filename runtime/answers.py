"""answers.py: what the words of an answer say: an option's letter, a span of seconds, plain words.

    parse_letter("B) Vitamin C", options) -> "B"          listed_options("Which?\\nA. red\\nB. blue") -> ("red", "blue")
    parse_span("from 12.5 to 20.1") -> (12.5, 20.1)       words_of("The red door.") -> ["red", "door"]
    spoken("<think>A or B?</think> B") -> "B"

What is read stands in tables: each row is an example of a form and its pattern. All patterns take linear time.
"""

import re
import unicodedata

# Scripts without spaces between words: Thai to Khmer, kana, Han. In Hangul, too, a particle touches a letter.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_TOUCHING = _UNSPACED + "\u1100-\u11ff\u3130-\u318f\uac00-\ud7af"


def spoken(turn: str) -> str:
    """Return what a turn says after its thoughts, without calls. A thought that never ends is no answer."""
    said = turn.rpartition("</think>")[2]
    return re.sub(r"<(think|tool_call)>.*?(?:</\1>|\Z)", " ", said, flags=re.S).strip()


# ------------------------------------------------------------------------------------------------ letters

LETTERS = "ABCDEFGHIJ"

# "A" and "I" are words, not letters, where a word or a number follows, unless it goes on about a letter.
_NO_WORD = r"(?![AIai] (?!(?i:or|and|is|as|because|since|but|not)\b)(?:[a-z\d]|[A-Z][A-Za-z]))"
_END = r"(?![\w'’])"  # not in "B's"
_OPEN = r"[\s:*(\"'\[]{1,5}"  # in "option (c)"
# How a text names an option. The letters that all rows find are put together: two different ones name none.
LETTER_FORMS = (
    ("It is B", rf"(?<![\w'’.]){_NO_WORD}([A-J])(?!\.?[\w'’])"),
    ("option c", rf"(?i:\b(?:option|choice)){_OPEN}([A-Ja-j]){_END}"),
    ("The answer is (b)", rf"(?i:\banswer(?: (?:is|would be|must be|should be)|:)+){_OPEN}{_NO_WORD}([A-Ja-j]){_END}"),
    ("It is:\nB) red", r"(?m)^[ \t(\[*]{0,5}([A-J])(?:[)\]:]|\.(?!\S))"),
)
# What is denied, or is only a reason, is not named. _SOME: "option A", "A or (B)".
_SOME = rf"(?:(?:option|choice) )?\(?(?<![\w'’.])[A-J]\)?{_END}(?: (?:or|nor|and) \(?[A-J]\)?{_END}){{0,9}}"
DENIED_FORMS = (
    ("not A", rf"(?:\b(?:not|cannot|never|neither|without|except|instead of|rather than)|n['’]t|不是)(?: be)? {_SOME}"),
    ("A is wrong", rf"{_SOME} (?:is|are|can|does|do)(?:n['’]t| ?not| wrong| incorrect| false| ruled out)\b"),
    ("A 错误", rf"{_SOME} ?是?(?:错|不对|不正确)"),
    ("because A is later", r"(?<=\b[A-J])\W{1,3}(?:because\b|since\b|因为)[^.!?。\n]*"),
)
_DENIED = re.compile("|".join(pattern for _, pattern in DENIED_FORMS), re.I)
# "Answer: B": what leads to a letter.
_LEAD = r"(?i)\A[\W_]{0,5}(?:the )?(?:(?:final|correct|best|right) )?(?:answer|option|choice)(?: is)?[\s:*_]{1,5}"
# "(B)", "B. Vitamin C", "**B.** red", "B: red", "B、red", "B - red", "B\nred": a letter first, and what it stands for.
_MARK = r"[*_]{0,3}(?:[)\]:、]|\.(?![A-Za-z]\b))[*_)\].:]{0,3}"  # "D.C." is no label
_LABEL = rf"(?s)[\W_]{{0,9}}([A-Ja-j])(?:[\W_]*\Z|{_MARK}|\s[-–—]\s|[ \t]*\n)\s*(.*)"
# "A) or B)", "A. B. C.": letters that follow a label, and no text of it. "B. I" may be a numeral.
_MORE_LETTERS = re.compile(r"[\W_]{0,5}(?:or|and)\b|(?:[\W_]*\b(?:[A-HJ]|and|or)\b)+[\W_]*\Z")


def parse_letter(text: str, options: tuple[str, ...] = ()) -> str | None:
    """Return the one option that the text names, A to J, or None if it names none or several."""
    allowed = LETTERS[: len(options) or len(LETTERS)]
    text_of = {letter: normalise(option) for letter, option in zip(allowed, options)}
    text = unicodedata.normalize("NFKC", re.sub(r"\\(?:boxed|text)\{([^{}]*)\}", r"\1", text)).strip()

    # "(B)", "B) Vitamin C": a letter alone, or with its own text.
    letter, words = _split_label(text)
    if letter and letter in allowed and (not words or text_of.get(letter) == normalise(words)):
        return letter

    # "Vitamin C": the text of one option. normalise() would take the label "A" for an article.
    said = (normalise(text), normalise(re.sub(_LEAD, "", text)))
    same = [x for x in text_of if text_of[x] in said]
    if len(same) == 1 and letter != "A":
        return same[0]

    # "I think it is B": the letters in prose. "B. U.S. Team A": behind a label, only those that are called options.
    text = re.sub(rf"(?<=[{_TOUCHING}])(?=[A-J])|(?<=[A-J])(?=[{_TOUCHING}])", " ", text)  # 选B
    letter, words = _split_label(_DENIED.sub(" ", text))
    named = {letter} if letter else set()
    labelled = letter and not _MORE_LETTERS.match(words)
    for _, pattern in LETTER_FORMS[1:] if labelled else LETTER_FORMS:
        named.update(found.upper() for found in re.findall(pattern, words))
    return named.pop() if len(named) == 1 and named <= set(allowed) else None


def _split_label(text: str) -> tuple[str, str]:
    """Return the letter that a text begins with, or "", and the words behind it."""
    label = re.fullmatch(_LABEL, re.sub(_LEAD, "", text))
    return (label[1].upper(), label[2]) if label else ("", text)


# How a question lists its options: one a line, or in one line.
OPTION_FORMS = (
    ("A. red\nB. blue", re.compile(r"(?m)^[ \t]*[(\[]?([A-J])[)\].:]+[ \t]*(?=\S)")),
    ("(A) red (B) blue", re.compile(r"(?<![\w.])[(\[]?([A-J])(?:[)\]][ \t]*|[.:][ \t]+)(?=\S)")),
)


def listed_options(question: str) -> tuple[str, ...]:
    """Return the options that a question lists itself, without their letters; () if it lists none."""
    for _, form in OPTION_FORMS:
        labels = list(form.finditer(question))
        letters = "".join(label[1] for label in labels)
        for count in range(len(LETTERS), 1, -1):
            first = letters.rfind(LETTERS[:count])  # the longest A, B, C, ... without a gap
            if first >= 0:
                labels = labels[first : first + count]
                ends = [label.start() for label in labels[1:]] + [len(question)]
                texts = [question[label.end() : end].strip() for label, end in zip(labels, ends)]
                return tuple(text.split("\n")[0].strip(" \t;,") for text in texts)
    return ()


# ------------------------------------------------------------------------------------------------ spans

_N = r"\d{1,7}(?:\.\d{1,9})?"
_THINGS = "(?:frame|image|picture|figure|option|step|question)s?|(?:clip|segment|scene|shot|part|call|turn)s"
# Numbers that are no times, and commas: what is written instead before times are read.
REWRITTEN = (
    ("2024-05-06", r"(?<![\d.])\d{1,4}([-/.])\d{1,2}\1\d{1,4}(?!\.?\d)", " "),
    ("frames 2, 3 and 4", rf"\b(?:{_THINGS})[ #]{{1,2}}\d{{1,7}}(?!\.?\d)(?:,? ?(?:and|to|[-–,]) ?\d{{1,7}}(?!\.?\d))*", " "),
    ("1. **Start**", r"(?m)^[ \t]*\d{1,2}[.)][ \t]+(?=\W{0,3}[^\W\d])(?!to |and )", " "),
    ("-3", rf"(?<![\w)\]>\"'″”–-])(?<!\d )(?<![\ddc ]s )[-−]{_N}", " "),  # unless it stands behind a time: "12.5s -20.1s"
    ("00:00:02,500", r"(:\d\d),(?=\d{3})", r"\1."),
    ("[1,240]", r"([\[(]\s?\d{1,7}),(?=\d{1,7}\s?[\])])", r"\1, "),
    ("1,234.5", r"(?<![\d.])(\d{1,3}),(?=\d{3}(?!\d))", r"\1"),
)  # fmt: skip

# What a time looks like, and the seconds that each of its numbers counts for; 0: a bare number ("2 to 3 minutes").
_UNITS = ("hours?|hrs?|h|小时|小時|時間|时", "minutes?|mins?|m|分钟|分鐘|分", "seconds?|secs?|s|秒钟|秒", "ms|毫秒")
_PARTS = "".join(rf"(?:[ ,]{{0,2}}(?:and )?({_N}) {{0,2}}(?:{unit})(?![a-z]))?" for unit in _UNITS)
TIME_FORMS = (
    ("01:02:05.5", r"(?:(\d{1,3}):)?(\d{1,4})[:'′’](\d{1,2}(?:\.\d{1,9})?)(?!\.?\d|:)['’′\"″”]{0,2}", (3600, 60, 1)),
    ("1 hour 2 minutes 5 s 500 ms", rf"(?={_N} {{0,2}}(?:{'|'.join(_UNITS)})(?![a-z])){_PARTS}", (3600, 60, 1, 0.001)),
    ("12.5", rf"({_N})(?!\.?\d| ?%|(?!to\d)[a-z])", (0,)),
)
_BEGIN = r"(?:(?<![a-z\d_])(?<!\d\.)|(?<=\dto))"  # where a number may: not in "x264", but in "12.5to20.1"
_TIME = re.compile(_BEGIN + "(?:" + "|".join(pattern for _, pattern, _ in TIME_FORMS) + ")", re.I)
_FACTORS = sum((factors for *_, factors in TIME_FORMS), ())

# Explicit ranges: T stands for a time, and _FILL for " about the ".
_T = "\ua4d4"  # a letter without a lower case, which no answer holds: \W never runs over it
_FILL = r"(?:\W|about|around|approximately|roughly|the|at|time|t|第){0,9}"
RANGE_FORMS = (
    ("12.5 - 20.1", rf"T\W{{0,4}}(?:[-‐–—−~→⇒]|=>|(?:and |up )?(?:to|until|till|through|thru)|到|至|から){_FILL}T"),
    ("between 12.5 and 20.1", rf"between{_FILL}T\W{{0,4}}and{_FILL}T"),
    ("[12.5, 20.1]", rf"(?m)(?:[\[(:=]|^)[^\w\n]{{0,5}}T\W{{0,3}}[,;]{_FILL}T[^\w\n]{{0,5}}(?:[\])]|$)"),
    ("starts at 12.5 and ends at 20.1", r"(?<![a-z])(?:start|beg[aiu]n|from)[^T]{0,30}T[^T]{0,80}(?<![a-z])(?:end|finish|stop|until|to)[^T]{0,30}T"),
)  # fmt: skip


def parse_span(text: str) -> tuple[float, float] | None:
    """Return the span of seconds, its ends in order: the two times, if the text has two; else its last explicit range."""
    text = unicodedata.normalize("NFKC", text).replace(_T, " ")
    for _, pattern, new in REWRITTEN:
        text = re.sub(pattern, new, text, flags=re.I)
    times = []  # each one's seconds, and the unit of a lone number
    for time in _TIME.finditer(text):
        parts = [(float(number), factor) for number, factor in zip(time.groups(), _FACTORS) if number]
        seconds = sum(number * (factor or 1) for number, factor in parts)
        times.append((seconds, parts[0][1] if len(parts) == 1 else 1))
    masked = _TIME.sub(_T, text)  # a mark for each time: a range is a pattern of words around marks

    starts = []
    for _, pattern in RANGE_FORMS:
        starts += [match.start() for match in re.finditer(pattern.replace("T", _T), masked, re.I)]
    if len(times) == 2 and not re.search(rf"{_T} or {_T}", masked):
        starts = [0]
    if not starts:
        return None
    first = masked.count(_T, 0, max(starts))
    (start, start_unit), (end, end_unit) = times[first : first + 2]
    if start_unit == 0 and end_unit:
        start *= end_unit  # "2 to 3 minutes"
    return min(start, end), max(start, end)


def seconds_of(time: str) -> float:
    """Return the seconds of 12.5, 00:12.5 or 00:00:12.5."""
    return sum(float(part) * 60**i for i, part in enumerate(reversed(time.split(":"))))


# ------------------------------------------------------------------------------------------------ words

_OPERATOR = r"(?:<->|->|=>|<-|<=|>=|!=|[<>→←⇒≤≥≠])"
_SPELLED = {"→": "->", "←": "<-", "⇒": "=>", "≤": "<=", "≥": ">=", "≠": "!=", "−": "-", "^": ""}
# Signs that change what a text says; all others are dropped.
KEPT_FORMS = (
    ("12.5", r"(?<=\d)\.(?=\d)"),
    ("-5", r"(?<![\w.)])-(?=\.?\d)"),
    ("AB+", r"(?<=\w)\+{1,2}(?!\w)"),
    ("x>y", rf"(?<=\w){_OPERATOR}(?=[\w-])"),
)
_KEPT = re.compile("(" + "|".join(pattern for _, pattern in KEPT_FORMS) + r")|[^\w\s]")


def normalise(text: str) -> str:
    """Return the text in lower case without punctuation and articles. A text that is nothing but an article stays."""
    text = unicodedata.normalize("NFKC", text).lower()
    for sign, spelled in _SPELLED.items():
        text = text.replace(sign, spelled)
    text = re.sub(r"<([\d.]+ seconds)>", r"\1", " ".join(text.split()))  # a frame's stamp
    text = re.sub(rf"(?<=\w) ?({_OPERATOR}) ?(?=[\w-])", r"\1", text)  # "x > y" is one word, and not "y > x"
    words = _KEPT.sub(_keep, text).split()
    text = " ".join([word for word in words if word not in ("a", "an", "the")] or words)
    return re.sub(r"\b(\d+)(?=[^\W\d_])", r"\1 ", text)  # "0.5m" says "0.5 m"


def _keep(sign: re.Match) -> str:
    if sign[1]:
        return sign[1]
    return sign[0] if unicodedata.category(sign[0]).startswith("M") else " "  # an accent, a vowel sign


def words_of(text: str) -> list[str]:
    """Return the words of the normalised text; where a script has no spaces, its characters."""
    return re.sub(rf"([{_UNSPACED}])", r" \1 ", normalise(text)).split()
