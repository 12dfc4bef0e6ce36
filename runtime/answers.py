"""answers.py: parse a model's answer: an option's letter, a span of seconds, or plain words.

    parse_letter("B) Vitamin C") -> "B"                   words_of("The red door.") -> ["red", "door"]
    parse_span("from 12.5 to 20.1") -> (12.5, 20.1)

Three rules read a letter. The first one that applies decides. If it gives several letters, the text has no answer.
1. The text is one option's text.
2. The text concludes: it begins with its only label ("B", "B. Vitamin C"), or a clause names a letter beside a word such as
   "so" or "answer". If conclusions differ, the lenient reading takes the last one.
3. A clause names letters, and neither denies them ("not A") nor leaves them open ("maybe A").
A span is the only two times of a text, or its last range ("12.5 - 20.1"). All patterns run in linear time.
"""

import re
import unicodedata


def unboxed(text: str) -> str:
    """Return the content of the text's last \\boxed{}, or the whole text, without \\text{} and dollar signs."""
    text = re.sub(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}|\$", r"\1", text)  # "$0.5 \text{m}$" -> "0.5 m"
    text = unicodedata.normalize("NFKC", text)  # "１２．５" -> "12.5"
    boxes = re.findall(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}", text)  # "\boxed{B}", with braces in it one level deep
    return (boxes[-1] if boxes else text).strip()


# ------------------------------------------------------------------------------------------------ letters

LETTERS = "ABCDEFGHIJ"
# "The answer is", "**Final answer:**": the lead of an answer.
LEAD = r"(?i)\A[\W_]{0,5}(?:the )?(?:(?:final|correct|best|right) )?(?:answer|option|choice)(?: is\b|\W?:)[\s:*_]{0,5}"
# Words beside a letter that deny it, leave it open, or conclude.
DENIES = (
    r"not?|[a-z]+n['’]t|never|neither|nor|cannot|wrong|incorrect|false|unlikely|except|without|(?:is|are) out|rul[a-z]+ out"
    r"|(?:exclud|eliminat|discard|reject|contradict)[a-z]*|rather than|instead of|不|没|错|排除|而非|✗|✘|❌"
)
HEDGES = r"may|might|could|maybe|perhaps|possibl[ey]|seems?|first|initial[a-z]*|thought|if|between|either|\?|可能"
CONCLUDES = (
    r"so|thus|therefore|hence|answer|must be|choose|choice|pick|select|go(?:ing)? with|correct|right|true|yes|best|better"
    r"|fits?|match[a-z]*|supports?|actually|wait|答案|选(?!项)|所以|正确|符合|支持|✓|✔|✅"
)
_ASIDE = r"(?i)(?:\b(?:because|since|(?:al)?though|while)\b|因为|虽然)[^.,;\n。]*"  # "because A is heard": no answer
_SENTENCE_END = r"[;!\n。]|\.(?!\w)"
# "B, not A", "B (not A)", "not A but B", "A is wrong and B is right"
_CLAUSE_END = r",|\((?![A-J]\))|\bbut\b|(?=\b(?:rather|instead)\b|\band [A-J] is\b|而[不非])"
# "A", "(A)", "option A", but not "A's", "N/A", "D.C.", "A-frame", "A man". "I" is only a label.
# At the start of a sentence, "A" is an article before a word, unless that is a verb ("A shows", "A or B").
_ARTICLE = r"(?<![a-z] )A (?!\w{0,20}s\b|(?:[A-J]|or|and|but|can|would|over|rather|instead)\b)[A-Za-z\d]"
_LETTER = rf"(?<![\w/])(?<!\w[.'’-])(?!{_ARTICLE})(?:[A-HJ]|I(?=[).:]))(?![\w/]|[.'’-]\w)"
# "B)", "B:", "B -" anywhere, and "B." or "B" as a line of its own where a clause begins.
_LABEL = r"(?<!\w)[A-J](?:[):\]、]|\s[-–—]\s)|(?:\A|[\n.,;])[^\w\n]{0,9}[A-J](?:\.(?!\w\.)|[^\w\n]{0,9}(?=\n|\Z))"


def parse_letter(text: str, options: tuple[str, ...] = (), lenient: bool = False) -> str | None:
    """Return the letter of the option that the text names, or None."""
    allowed = LETTERS[: len(options) or len(LETTERS)]
    text = re.sub(LEAD, "Answer: ", re.sub(r"[*`#]|__", "", unboxed(text)))

    # 1. The text is one option's text. normalise() would drop the label "A" as an article.
    said = text.removeprefix("Answer: ")
    same = [letter for letter, option in zip(allowed, options) if normalise(option) == normalise(said)]
    if len(same) == 1 and not re.match(r"\W*[Aa](?:\.|\W*\Z)", said):
        return same[0]

    # 2. A label with which the text begins is a conclusion, unless a second label makes it a list.
    text = _clean(text, options)
    concluded = []
    named = []
    label = re.match(rf"\W*({_LABEL})(?!\W{{0,9}}(?:or|and|is|was)\b)", text)
    if label and len(re.findall(_LABEL, text)) == 1:
        concluded = re.findall("[A-J]", label[1])
        text = text[label.end() :]

    # 2. and 3. Find the letter that each clause concludes or names.
    for sentence in re.split(_SENTENCE_END, text):
        concludes = False  # until a clause names a letter: "If I have to pick one, B"
        for clause in re.split(_CLAUSE_END, sentence):
            letters = set(re.findall(_LETTER, clause))
            words = re.sub(_LETTER, " ", clause)
            concludes = concludes or has_word(CONCLUDES, words)
            if has_word(f"{DENIES}|{HEDGES}", words):
                continue
            if concludes and len(letters) == 1:
                concluded.extend(letters)
                concludes = False
            else:
                named.extend(letters)

    letters = concluded[-1:] if lenient and concluded else concluded or named
    return letters[0] if len(set(letters)) == 1 and letters[0] in allowed else None


def _clean(text: str, options: tuple[str, ...]) -> str:
    """Rewrite the text so that `parse_letter` finds its sentences, clauses and letters."""
    text = re.sub(r":\s+", ": ", text)  # "The answer is:\n\nB" is one sentence
    text = re.sub(r"(?<=[\u3040-\ud7ff])(?=[A-J])|(?<=[A-J])(?=[\u3040-\ud7ff])", " ", text)  # "选B" -> "选 B"
    small = r"(?:\A\W*|(?i:\b(?:option|choice|answer(?: is|:))\W{1,3})|\()(?:[b-j]|a(?! \w))(?=[).:,\s]|\Z)"
    text = re.sub(small, lambda match: match[0][:-1] + match[0][-1].upper(), text)  # "b)", "(c)" -> "B)", "(C)"
    # "A, B or C" -> "A and B or C": a list is one clause, but "C, B is only heard" is two
    text = re.sub(rf"({_LETTER}\)?)\s?[,、]\s?(?=(?:or |and )?\(?{_LETTER}(?! (?:is|was)\b))", r"\1 and ", text)
    # "D. Vitamin C" -> "D.": an option's own text after its letter says nothing more
    for letter, option in zip(LETTERS, options):
        text = re.sub(rf"(?i)(\b{letter}\W{{1,4}}){re.escape(option.strip(' .'))}(?!\w)", r"\1", text)
    text = re.sub(r"(?m)^\W{0,9}([A-J])\. (?!\W{0,9}[A-J]\b)", r"\1: ", text)  # "A. wrong" -> "A: wrong" is one clause
    return re.sub(_ASIDE, "", text)


def has_word(words: str, text: str) -> bool:
    """Return whether the text has one of these words, for example DENIES."""
    return re.search(rf"(?i)(?:(?<![a-z])|(?=\W))(?:{words})(?![a-z])", text) is not None


def clause_before(end: int, text: str) -> str:
    """Return the words before this position, from the start of their clause, and at most 200 characters."""
    return re.split(f"{_SENTENCE_END}|{_CLAUSE_END}", text[max(0, end - 200) : end])[-1]


# ------------------------------------------------------------------------------------------------ spans

_N = r"\d{1,7}(?:\.\d{1,9})?"
_UNITS = (r"hours?|hrs?|h|小时", r"minutes?|mins?|m|分钟|分", r"seconds?|secs?|s|秒")
# A time is "01:02:05.5" or 12'30", "1 hour 2 minutes 5 s", or a bare "12.5".
_CLOCK = r"(?:(\d{1,3}):)?(\d{1,4})[:'′’](\d{1,2}(?:\.\d{1,9})?)(?!\.?\d|:)"
_PARTS = "".join(rf"(?:[ ,]{{0,2}}(?:and )?({_N}) ?(?:{unit})(?![a-z]))?" for unit in _UNITS)
_TIME = rf"(?i)(?<![a-z\d_.])(?:{_CLOCK}|(?={_N} ?(?:{'|'.join(_UNITS)})(?![a-z])){_PARTS}|({_N})(?!\.?\d|[a-z]))"
# Numbers that are not times: "frames 2, 3 and 4", "1. **Start**", "lasts 15 seconds", "50%".
_THINGS = "(?:frame|image|picture|figure|option|step|question|clip|segment|scene|shot|part|call|turn)s?"
_NOT_TIMES = (
    rf"(?im)\b{_THINGS}[ #]{{1,2}}\d{{1,7}}(?!\.?\d)(?:,? ?(?:and|to|[-–,]) ?\d{{1,7}}(?!\.?\d))*"
    rf"|^[ \t]*\d{{1,2}}[.)][ \t]+(?=\W{{0,3}}[^\W\d])|{_N} ?%"
    rf"|(?:\b(?:last(?:s|ed|ing)?|duration|for)|持续|时长)[\s:]{{0,2}}(?:(?:for|of|about|around|approximately) ){{0,2}}{_N}"
)
# A range is two times T and words between them. _FILL: words like " about the ".
_T = "\ua4d4"  # a caseless letter that no answer contains
_FILL = r"(?:\W|about|around|approximately|roughly|the|at|time|t|第){0,9}"
_RANGES = (
    rf"T\W{{0,4}}(?:[-‐–—−~→⇒]|=>|(?:and |up )?(?:to|until|till|through|thru)|到|至|から){_FILL}T",  # "12.5 - 20.1"
    rf"between{_FILL}T\W{{0,4}}and{_FILL}T",
    rf"(?m)(?:[\[(:=]|^)[^\w\n]{{0,5}}T\W{{0,3}}[,;]{_FILL}T[^\w\n]{{0,5}}(?:[\])]|$)",  # "[12.5, 20.1]"
    r"(?<![a-z])(?:start|beg[aiu]n|from)[^T]{0,30}T[^T]{0,80}(?<![a-z])(?:end|finish|stop|until|to)[^T]{0,30}T",
)


def parse_span(text: str) -> tuple[float, float] | None:
    """Return a span in seconds, start first. None: the text has no range, or denies it, or leaves several open with "or"."""
    text = re.sub(r"(:\d\d),(?=\d{3})", r"\1.", unboxed(text).replace(_T, " "))  # "00:00:02,500"
    text = re.sub(r"(?<![\d.:\[(])(\d{1,3}),(?=\d{3}(?!\d))", r"\1", text)  # "1,234.5", but not "[1,240]"
    text = re.sub(_NOT_TIMES, " ", text)
    times = [_seconds(time) for time in re.finditer(_TIME, text)]
    masked = re.sub(_TIME, _T, text)

    # Find where the last range starts.
    starts = []
    for form in _RANGES if len(times) > 2 else ("T(?! or T)[^T]*T",):
        starts += [masked.index(_T, match.start()) for match in re.finditer(form.replace("T", _T), masked, re.I)]
    starts = [start for start in starts if not has_word(DENIES, clause_before(start, masked))]  # "not 3 - 5"
    last = max(starts, default=None)
    if last is None or re.search(rf"{_T}\W*(?:\b(?:or|and)\b|[或和])[^{_T}.;,\n]*\Z", masked[:last]):
        return None

    first = masked.count(_T, 0, last)
    (start, start_unit), (end, end_unit) = times[first : first + 2]
    if start_unit == 0 and end_unit:
        start *= end_unit  # "2 to 3 minutes"
    return min(start, end), max(start, end)


def _seconds(time: re.Match) -> tuple[float, float]:
    """Return a time in seconds, and the seconds of its unit if it is a single number (0: no unit), else 1."""
    factors = (3600, 60, 1, 3600, 60, 1, 0)
    numbers = [(float(number), factor) for number, factor in zip(time.groups(), factors) if number]
    seconds = sum(number * (factor or 1) for number, factor in numbers)
    return seconds, numbers[0][1] if len(numbers) == 1 else 1


# ------------------------------------------------------------------------------------------------ words

# Scripts without spaces between words: Thai to Khmer, kana, Han.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_SPELLED = str.maketrans({"→": "->", "←": "<-", "⇒": "=>", "≤": "<=", "≥": ">=", "≠": "!=", "−": "-", "^": ""})
_OPERATOR = r"(?:<->|->|=>|<-|<=|>=|!=|[<>])"  # stands between two words that it compares or joins
# Signs that carry meaning, as in "12.5", "-5", "AB+" and "x>y". All others are dropped, except marks that belong to a letter.
_SIGNS = (
    rf"((?<=\d)\.(?=\d)|(?<![\w.)])-(?=\.?\d)|(?<=\w)\+{{1,2}}(?!\w)|(?<=\w){_OPERATOR}(?=[\w-]))"
    r"|[^\w\s\u0300-\u036f\u064b-\u065f\u0900-\u109f\u1780-\u17ff]"
)


def normalise(text: str) -> str:
    """Return the text in lower case without punctuation and articles. A text of articles alone is kept."""
    text = unboxed(text).lower().translate(_SPELLED)
    text = re.sub(r"<([\d.]+ seconds)>", r"\1", " ".join(text.split()))  # a frame's stamp
    text = re.sub(rf"(?<=\w) ?({_OPERATOR}) ?(?=[\w-])", r"\1", text)  # "x > y" is one word and differs from "y > x"
    words = re.sub(_SIGNS, lambda sign: sign[1] or " ", text).split()
    text = " ".join([word for word in words if word not in ("a", "an", "the")] or words)
    return re.sub(r"\b(\d+)(?=[^\W\d_])", r"\1 ", text)  # "0.5m" equals "0.5 m"


def words_of(text: str) -> list[str]:
    """Return the words of the normalised text, or the single characters of a script without spaces."""
    return re.sub(rf"([{_UNSPACED}])", r" \1 ", normalise(text)).split()
