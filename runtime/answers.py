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


def unboxed(text: str) -> str:
    """Return what the text's last \\boxed{} holds, or all of it; without \\text{} and dollar signs."""
    text = unicodedata.normalize("NFKC", re.sub(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}|\$", r"\1", text))
    boxes = re.findall(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}", text)
    return (boxes[-1] if boxes else text).strip()


# ------------------------------------------------------------------------------------------------ letters

LETTERS = "ABCDEFGHIJ"
# The rule: a text is a sequence of statements about letters. Each affirms its letter, leaves it open or denies it. The
# letter that counts most is the answer, so a decision replaces an earlier hedge. Two that count alike are no answer.
AFFIRMED, LABELLED, MENTIONED, OPEN, DENIED = 5, 4, 3, 2, 1
# Examples, how much D counts in them, and the words beside it that say so. The first row that is found counts.
STATEMENTS = (
    ("Nothing fits except D", AFFIRMED, r"(?:none|nothing|wrong|incorrect|false)\b.*\b(?:except|other than)"),
    ("D cannot be excluded", OPEN, r"(?:can)?not be (?:\w+ )?(?:excluded|ruled out|eliminated)"),
    ("It is not D. D is wrong", DENIED, r"not|never|neither|nor|cannot|no(?=\W*$)|wrong|incorrect|false|impossible|unlikely|contradict\w*|without|except|exclud\w+|eliminat\w+|discard\w*|reject\w*|rul\w+ out|(?:is|are) out|rather than|instead of|nicht|pas|不|而非|并非|排除|错|誤|没|間違|틀|✗|✘|❌"),
    ("It may be D. D is possible", OPEN, r"may|might|could|maybe|perhaps|possibl[ey]|plausible|seems?|tempt\w+|going to|initial\w*|first|original\w*|consider\w*|thought|(?:al)?though|while|because|since|可能|虽然|因为|起初|最初|有道理"),
    ("So it is D. D is right", AFFIRMED, r"answer|so|thus|therefore|hence|must be|choose|choice|chose|pick|select\w*|go\w* with|correct|right|true|yes|best|better|fits?|match\w*|the only|closest|remains?|lean\w*|prefer|support\w*|confirm\w*|答案|[选選](?!项|項)|正确|正解|对(?!于)|符合|支持|정답|✓|✔|✅"),
)  # fmt: skip
LEAD = r"(?i)\A[\W_]{0,5}(?:the )?(?:(?:final|correct|best|right) )?(?:answer|option|choice)(?: is\b|\W?:)[\s:*_]{0,5}"
_NEXT = r"[!?;,\n。]|\.(?!\w)|\bbut\b"  # begins another statement
_OTHER = rf"{_NEXT}|\b(?:(?:al)?though|because|since|while|so|rather|instead)\b|(?:\bnot|不?[是选]|而非)\W*\Z"  # of another letter
# "A" and "I" are words where a word or a number follows, unless it goes on about a letter.
_NO_WORD = r"(?![AIai] (?!(?i:or|and|is|as|because|since|but|not|seems|might|may|could|it)\b)(?:[a-z\d]|[A-Z][A-Za-z]))"
_LETTER = rf"(?<![\w'’.])(?:(?<=[Oo]ption )|{_NO_WORD})(?:[A-HJ]|I(?=[).:\]]))(?!\.?[\w'’])[)\]*\"]{{0,4}}"
_SMALL = rf"\b(?i:option|choice|answer(?: is| \w+ be|:)+)[\s:*(\"'\[]{{1,5}}{_NO_WORD}[a-j](?![\w'’])"  # "option c"
# "A, B or C", "A、B": letters that stand together.
_COMMA = rf"\s?[,、/&][\s(\[*\"]{{0,5}}{_LETTER}"
_OR = rf"[.?]?,?\s?(?i:and/or|and|or|nor|和|与|或|还是)(?: maybe| perhaps)?[\s(\[*\"]{{1,5}}(?:option )?{_LETTER}"
_LIST = re.compile(rf"({_LETTER}(?:(?:{_COMMA})*(?:{_OR})+|(?:{_COMMA}){{2,}}|{_COMMA}\s?(?=\Z|[\u3400-\u9fff])|))")
# "B. Vitamin C", "**B.** red", "B: red", "B、red", "B - red", "B\nred": a letter first, and what it stands for.
_MARK = r"(?:[*_]{0,3}(?:[)\]:]|、(?!\s?[A-J](?![A-Za-z]))|\.(?!\.|[A-Za-z]\b))[*_)\].:]{0,3}|\s[-–—]\s|[ \t]*\n)"  # no "D.C."


def parse_letter(text: str, options: tuple[str, ...] = (), lenient: bool = False) -> str | None:
    """Return the one option that the text names, or None. A lenient reader takes the first of several that count alike."""
    allowed = LETTERS[: len(options) or len(LETTERS)]
    text = re.sub(LEAD, "", unboxed(text.replace("，", ";")))  # in Chinese, a list has "、"
    text = re.sub(rf"\A[\W_]{{0,9}}([A-Ja-j])(?:[\W_]*\Z|{_MARK})\s*", lambda label: f"{label[1].upper()}. ", text)

    # "Vitamin C": the text of one option. normalise() would take the label "A" for an article.
    same = [letter for letter, option in zip(allowed, options) if normalise(option) == normalise(text)]
    if len(same) == 1 and not text.startswith("A."):
        return same[0]

    # Mark the letters. An option's own text behind its letter says nothing.
    text = re.sub(rf"(?<=[{_TOUCHING}])(?=[A-J])|(?<=[A-J])(?=[{_TOUCHING}])", " ", text)  # 选B
    text = re.sub(_SMALL, lambda small: small[0][:-1] + small[0][-1].upper(), text)
    for letter, option in zip(allowed, options):
        text = re.sub(rf"(?i)(\b{letter}\W{{1,4}}){re.escape(option.strip(' .'))}(?!\w)", r"\1_", text)
    counts, together, parts = {}, set(), _LIST.split(text)  # words, letters, words, letters, ..., words
    for i in range(1, len(parts), 2):
        # What is said before the letters and behind them. A label's own text says nothing, but a verdict may follow.
        letters, before = re.findall(r"(?<!\w)[A-J](?!\w)", parts[i]), re.split(_NEXT, parts[i - 1])[-1]
        begins = not re.search(r"\w", before)
        label = begins and len(letters) == 1 and re.match("[A-J]" + _MARK, parts[i] + parts[i + 1])
        after = (parts[i] + parts[i + 1])[label.end() if label else len(parts[i]) :]
        behind = re.split(_OTHER, after.replace("?", " "))[0]  # "D?" is answered in the next statement
        verdict = weigh_words(behind, r"(?:^|[-–—:(])[\W_]*(?:(?:this|it) )?(?:is |was )?" if label else "")
        parts[i + 1] = after[len(behind) :] if verdict else parts[i + 1]  # it is not said of the next letter
        # The weaker one of both counts; without any, how the letters stand there. Several that stand together are open.
        plain = LABELLED if begins and (label or not re.search(r"\w", behind)) else MENTIONED
        count = min(filter(None, (weigh_words(before), verdict)), default=plain)
        if len(letters) > 1 and (count != AFFIRMED or re.search(r"(?i)\bor\b|或|还", parts[i])):
            count = min(count, OPEN)
        if len(letters) > 1 or label:
            together.update(letters)
        if re.search(r"(?i)\bwait\b|correction", parts[i - 1]):
            counts = {letter: min(old, OPEN) for letter, old in counts.items()}
        for letter in letters:  # what was denied comes back only if it is affirmed
            if counts.get(letter) != DENIED or count == AFFIRMED:
                counts[letter] = count if count == DENIED else max(count, counts.get(letter, OPEN))
    if list(counts.values()).count(LABELLED) == 1 and counts.get(text[0]) == LABELLED:
        counts[text[0]] = AFFIRMED  # a text that begins with its only label states it
    best = [letter for letter in counts if counts[letter] == max(counts.values()) > DENIED]
    best = best[:1] if lenient and together.isdisjoint(best) else best
    return best[0] if len(best) == 1 and best[0] in allowed else None


def weigh_words(words: str, start: str = "") -> int:
    """Return how much a letter counts by the words of its statement, 0 if they say nothing of it."""
    words = re.sub(r"n['’]t\b", " not", re.split(_NEXT, words)[-1])
    rows = (count for _, count, form in STATEMENTS if re.search(rf"(?i){start}(?<![a-z])(?:{form})(?![a-z])", words))
    return next(rows, 0)


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
        runs = [LETTERS[:count] for count in range(len(LETTERS), 1, -1) if LETTERS[:count] in letters]
        if runs:  # the longest A, B, C, ... without a gap
            first = letters.rfind(runs[0])
            labels = labels[first : first + len(runs[0])]
            ends = [label.start() for label in labels[1:]] + [len(question)]
            texts = [question[label.end() : end].strip().split("\n")[0] for label, end in zip(labels, ends)]
            return tuple(text.strip(" \t;,") for text in texts)
    return ()


# ------------------------------------------------------------------------------------------------ spans

_N = r"\d{1,7}(?:\.\d{1,9})?"
_THINGS = "(?:frame|image|picture|figure|option|step|question)s?|(?:clip|segment|scene|shot|part|call|turn)s"
# Numbers that are no times, and commas: what is written instead before times are read.
REWRITTEN = (
    ("2024-05-06", r"(?<![\d.])\d{1,4}([-/.])\d{1,2}\1\d{1,4}(?!\.?\d)", " "),
    ("frames 2, 3 and 4", rf"\b(?:{_THINGS})[ #]{{1,2}}\d{{1,7}}(?!\.?\d)(?:,? ?(?:and|to|[-–,]) ?\d{{1,7}}(?!\.?\d))*", " "),
    ("1. **Start**", r"(?m)^[ \t]*\d{1,2}[.)][ \t]+(?=\W{0,3}[^\W\d])(?!to |and )", " "),
    ("the 83rd and the 97th second", r"(\d)(?:st|nd|rd|th)(?=(?: (?:and|to|until) the \d+(?:st|nd|rd|th))? seconds?\b)", r"\1"),
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
    text = unboxed(text).replace(_T, " ")
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
        starts += [masked.index(_T, match.start()) for match in re.finditer(pattern.replace("T", _T), masked, re.I)]
    if len(times) == 2 and not re.search(rf"{_T} or {_T}", masked):
        starts = [masked.index(_T)]
    starts = sorted(start for start in starts if weigh_words(masked[:start][-80:]) != DENIED)  # "not 3 - 5"
    if not starts or re.search(rf"{_T}\W*(?:\bor\b|或)[^{_T}.;,\n]*\Z", masked[: starts[-1]]):  # "3 - 5 or 7 - 9"
        return None
    first = masked.count(_T, 0, starts[-1])
    (start, start_unit), (end, end_unit) = times[first : first + 2]
    if start_unit == 0 and end_unit:
        start *= end_unit  # "2 to 3 minutes"
    return min(start, end), max(start, end)


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
    text = unboxed(text).lower()
    for sign, spelled in _SPELLED.items():
        text = text.replace(sign, spelled)
    text = re.sub(r"<([\d.]+ seconds)>", r"\1", " ".join(text.split()))  # a frame's stamp
    text = re.sub(rf"(?<=\w) ?({_OPERATOR}) ?(?=[\w-])", r"\1", text)  # "x > y" is one word, and not "y > x"
    words = _KEPT.sub(lambda sign: sign[1] or sign[0] * (unicodedata.category(sign[0])[0] == "M") or " ", text).split()
    text = " ".join([word for word in words if word not in ("a", "an", "the")] or words)
    return re.sub(r"\b(\d+)(?=[^\W\d_])", r"\1 ", text)  # "0.5m" says "0.5 m"


def words_of(text: str) -> list[str]:
    """Return the words of the normalised text; where a script has no spaces, its characters."""
    return re.sub(rf"([{_UNSPACED}])", r" \1 ", normalise(text)).split()
